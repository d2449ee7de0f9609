//! The records from which DEL restores routes: repeated ADDs, other namespaces, GC.

use std::fs;

use serde_json::{Value, json};

use super::{BRIDGED, routes};
use crate::support::net::merged;
use crate::support::node::{Container, exists};

const KEYS: &str = r#"{"flushroutes": true, "addroutes": [{"dst": "50.0.0.0/24"}]}"#;

fn keys() -> Value {
    serde_json::from_str(KEYS).unwrap()
}

#[test]
fn repeated_adds_keep_the_original_routes() {
    let pod = BRIDGED.pod("1.1.0");
    for more in [
        json!({}),
        json!({"addroutes": [{"dst": "51.0.0.0/24"}]}),
        json!({"delroutes": [{"dst": "50.0.0.0/24"}], "addroutes": [{"dst": "50.0.0.0/24", "gw": "10.1.2.7"}]}),
        json!({"flushroutes": false, "addroutes": []}),
    ] {
        pod.net(&merged(&keys(), &more)).add(&pod.container);
    }
    let failing = pod
        .net(&merged(&keys(), &json!({"addroutes": [{"dst": "52.0.0.0/24", "gw": "10.9.9.9"}]})));
    failing.on("ADD", &pod.container).error();
    assert_eq!(routes(&pod.container, "-4").len(), 2, "subnet and 50.0.0.0/24");
    pod.net(&json!({})).del(&pod.container);
    pod.assert_as(&pod.before, "after four ADDs and one that failed");
}

#[test]
fn routes_that_the_container_changed_are_not_touched() {
    let pod = BRIDGED.pod("1.1.0");
    pod.net(&keys()).add(&pod.container);
    pod.container.sh("ip route replace 50.0.0.0/24 via 10.1.2.7");
    pod.container.sh("ip route add 192.168.0.0/16 via 10.1.2.9");
    pod.net(&keys()).del(&pod.container);
    let expected = [super::SUBNETS[0], "192.168.0.0/16 via 10.1.2.9", "50.0.0.0/24 via 10.1.2.7"];
    assert_eq!(routes(&pod.container, "-4"), expected);
}

#[test]
fn a_record_of_another_namespace_is_not_applied() {
    let pod = BRIDGED.pod("1.1.0");
    pod.net(&keys()).add(&pod.container);
    let path = pod.node.state("route-override/c1_eth0.json");
    assert!(path.is_file());
    // The container was restarted with the same id, without DEL.
    let other = Container::new();
    let index = &pod.container.ip("link show eth0")[0]["ifindex"];
    other.sh(&format!("ip link add eth0 index {index} type veth peer name far index 99"));
    other.sh("ip link set eth0 up; ip link set far up");
    other.sh("ip addr add 10.1.2.2/24 dev eth0");
    other.sh("ip route add 50.0.0.0/24 via 10.1.2.1");
    let before = other.sh("ip route");
    pod.net(&keys()).del(&other);
    assert_eq!(other.sh("ip route"), before);
    assert!(!path.exists());
}

#[test]
fn a_broken_record_is_replaced_and_removed() {
    let pod = BRIDGED.pod("1.1.0");
    let path = pod.node.state("route-override/c1_eth0.json");
    fs::create_dir(pod.node.state("route-override")).unwrap();
    for broken in ["", "{", r#"{"network": 7}"#] {
        fs::write(&path, broken).unwrap();
        pod.net(&keys()).add(&pod.container);
        pod.net(&keys()).del(&pod.container);
        pod.assert_as(&pod.before, broken);
        fs::write(&path, broken).unwrap();
        pod.net(&keys()).del(&pod.container);
        assert!(!path.exists());
    }
}

#[test]
fn an_add_without_changes_writes_no_record() {
    let pod = BRIDGED.pod("1.1.0");
    pod.net(&json!({"flushgateway": true, "delroutes": [{"dst": "50.0.0.0/24"}]}))
        .add(&pod.container);
    assert!(!exists(pod.node.state("route-override")));
    pod.net(&json!({})).del(&pod.container);
    pod.assert_as(&pod.before, "nothing was changed");
}

#[test]
fn gc_removes_records_of_stale_attachments() {
    let pod = BRIDGED.pod("1.1.0");
    pod.net(&keys()).add(&pod.container);
    let path = pod.node.state("route-override/c1_eth0.json");
    let gc = |keys: Value| pod.call_with("GC", &keys).without("CNI_NETNS").ok();
    gc(json!({"cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}]}));
    gc(json!({"name": "other", "cni.dev/valid-attachments": []}));
    gc(json!({}));
    assert!(path.is_file());
    let temporary = pod.node.state("route-override").join(".cnibox-x");
    fs::write(&temporary, "").unwrap();
    gc(json!({"cni.dev/valid-attachments": []}));
    assert!(
        !path.exists() && temporary.exists(),
        "only temporaries of this network's attachments are removed"
    );
    // Without a record DEL leaves the routes to the interface plugin.
    pod.call("DEL").ok();
}

#[test]
fn del_after_the_end_of_the_namespace_removes_the_record() {
    let pod = BRIDGED.pod("1.1.0");
    pod.net(&keys()).add(&pod.container);
    let call = pod.net(&keys()).on("DEL", &pod.container);
    let path = pod.container.path();
    drop(pod.container);
    call.netns(&path).ok();
    assert!(!pod.node.state("route-override/c1_eth0.json").exists());
}
