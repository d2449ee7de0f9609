//! Lists with other plugins: CHECK of every plugin, two of this plugin, the plugins behind it.

use serde_json::{Value, json};

use super::{BRIDGED, added, routes};
use crate::doctor::Ward;
use crate::support::conflist::{Attached, Conflist, Failed};
use crate::support::net::{merged, settles, wire};
use crate::support::node::{Container, Node, assert_unchanged};

#[test]
fn check_finds_deleted_and_missing_routes() {
    let keys = json!({"flushgateway": true, "delroutes": [{"dst": "192.168.0.0/16"}], "addroutes": [{"dst": "50.0.0.0/24"}]});
    let (pod, result) = added(&keys);
    let net = pod.net(&keys);
    for (line, undo, msg) in [
        (
            "add default via 10.1.2.1",
            "del default",
            "the container has the deleted route \"0.0.0.0/0 via 10.1.2.1\"",
        ),
        (
            "add 192.168.0.0/16 via 10.1.2.9",
            "del 192.168.0.0/16",
            "the container has the deleted route \"192.168.0.0/16 via 10.1.2.9\"",
        ),
        (
            "del 50.0.0.0/24",
            "add 50.0.0.0/24 via 10.1.2.1",
            "Expected Route 50.0.0.0/24 via 10.1.2.1 not found",
        ),
        (
            "change 50.0.0.0/24 via 10.1.2.7",
            "change 50.0.0.0/24 via 10.1.2.1",
            "Expected Route 50.0.0.0/24 via 10.1.2.1 not found",
        ),
    ] {
        pod.container.sh(&format!("ip route {line}"));
        let error = net.check(&pod.container, &result).error();
        assert!(error.msg.contains(msg), "{line}: {error:?}");
        for skip in [json!({"skipcheck": true}), json!({"args": {"cni": {"skipcheck": true}}})] {
            net.with(&skip).check(&pod.container, &result).ok();
        }
        pod.container.sh(&format!("ip route {undo}"));
        net.check(&pod.container, &result).ok();
    }
    net.check_finds(&pod.container, &Value::Null, "Required prevResult missing");
}

/// The routes of both families after ADD and CHECK of all plugins of a list. DEL leaves nothing.
#[track_caller]
fn routes_of_list(node: &Node, plugins: &Value) -> Vec<String> {
    let list =
        Conflist::new(node, json!({"cniVersion": "1.1.0", "name": "net", "plugins": plugins}));
    let container = Container::new();
    let before = container.snapshot(node);
    let at = Attached::new("c1", &container.path());
    let result = list.add(&at).unwrap();
    let failed: Vec<Failed> = list.failures_of_check(&at, &result).collect();
    assert_eq!(failed, [], "{plugins}: {result}");
    let found = [routes(&container, "-4"), routes(&container, "-6")].concat();
    list.del(&at, Some(&result)).unwrap();
    settles(&before, || container.snapshot(node));
    assert_eq!(node.sh("ls /run/cni/route-override"), "");
    found
}

#[test]
fn check_of_the_interface_plugins_agrees() {
    let node = Node::new();
    wire(&node);
    let ipam = json!({"type": "static", "addresses": [{"address": "10.1.2.2/24", "gateway": "10.1.2.1"},
        {"address": "2001:db8:1::2/64", "gateway": "2001:db8:1::1"}],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "192.168.0.0/16"}, {"dst": "::/0"}, {"dst": "fd99::/16"}]});
    let bridge = json!({"type": "bridge", "isGateway": true, "ipam": ipam});
    let ptp = json!({"type": "ptp", "ipam": ipam});
    let macvlan = json!({"type": "macvlan", "master": "wire0", "ipam": ipam});
    let default = json!({"dst": "0.0.0.0/0", "gw": "10.1.2.9", "priority": 5});
    for interface in [&bridge, &ptp, &macvlan] {
        for keys in [
            json!({"flushgateway": true}),
            json!({"flushroutes": true}),
            json!({"flushroutes": true, "flushgateway": true, "addroutes": [{"dst": "50.0.0.0/24"}]}),
            json!({"delroutes": [{"dst": "192.168.0.0/16"}], "addroutes": [{"dst": "192.168.0.0/16", "gw": "10.1.2.9"}]}),
            json!({"flushgateway": true, "addroutes": [default]}),
        ] {
            if interface["type"] == "ptp" && keys["addroutes"].to_string().contains("10.1.2.9") {
                // Only the gateway is on the link.
                continue;
            }
            let ours = merged(&json!({"type": "route-override"}), &keys);
            let found = routes_of_list(&node, &json!([interface, ours]));
            let has = |start: &str| found.iter().any(|route| route.starts_with(start));
            assert_eq!(
                has("default"),
                keys["addroutes"] == json!([default]) || !has_flush(&keys),
                "{keys}: {found:?}"
            );
            assert!(has("10.1.2.0/24") && has("2001:db8:1::/64"), "{keys}: {found:?}");
        }
    }
}

fn has_flush(keys: &Value) -> bool {
    ["flushroutes", "flushgateway"].iter().any(|key| keys.get(key).is_some())
}

#[test]
fn plugins_behind_it_use_its_routes() {
    let node = Node::new();
    let ipam =
        merged(&node.host_local(&["10.1.2.0/24"]), &json!({"routes": [{"dst": "0.0.0.0/0"}]}));
    let bridge = json!({"type": "bridge", "isGateway": true, "ipam": ipam});
    let first = json!({"type": "route-override", "flushgateway": true, "addroutes": [{"dst": "50.0.0.0/24"}]});
    let second = json!({"type": "route-override", "delroutes": [{"dst": "50.0.0.0/24"}],
        "addroutes": [{"dst": "50.0.0.0/24", "gw": "10.1.2.9"}, {"dst": "51.0.0.0/24", "gw": "10.1.2.8"}]});
    let subnet = "10.1.2.0/24 proto kernel scope link src 10.1.2.";
    let mut found = routes_of_list(&node, &json!([bridge, first, second]));
    assert!(found.remove(0).starts_with(subnet));
    assert_eq!(found, ["50.0.0.0/24 via 10.1.2.9", "51.0.0.0/24 via 10.1.2.8"]);
    let tuning = json!({"type": "tuning", "mtu": 1400, "dataDir": node.state("tuning")});
    let mut found = routes_of_list(&node, &json!([bridge, tuning, first, {"type": "firewall"}]));
    assert!(found.remove(0).starts_with(subnet));
    assert_eq!(found, ["50.0.0.0/24 via 10.1.2.1"]);
    assert_eq!(routes_of_list(&node, &json!([bridge, first, {"type": "sbr"}])), [""; 0]);
}

#[test]
fn two_of_a_list_are_undone_together() {
    let pod = BRIDGED.pod("1.1.0");
    let first = json!({"flushroutes": true, "addroutes": [{"dst": "50.0.0.0/24"}]});
    let result = pod.net(&first).add(&pod.container);
    let second = json!({"prevResult": result, "delroutes": [{"dst": "50.0.0.0/24"}],
        "addroutes": [{"dst": "50.0.0.0/24", "gw": "10.1.2.9"}, {"dst": "fd50::/64"},
            {"dst": "192.168.0.0/16", "gw": "10.1.2.9"}]});
    let result = pod.net(&second).add(&pod.container);
    let routes = [routes(&pod.container, "-4"), routes(&pod.container, "-6")].concat();
    assert!(
        routes.contains(&"50.0.0.0/24 via 10.1.2.9".to_owned()) && routes.len() == 5,
        "{routes:?}"
    );
    for keys in [&second, &first] {
        pod.net(&merged(keys, &json!({"prevResult": result}))).del(&pod.container);
        pod.assert_as(&pod.before, "DEL");
    }
}

/// An unspecified gateway in a result is none: repair adds no such address to the bridge, and no
/// such route. The other routes keep their gateway.
#[test]
fn repair_leaves_deleted_routes_alone() {
    for interface in [json!({"type": "bridge", "isGateway": true}), json!({"type": "ptp"})] {
        let ipam = json!({"type": "host-local", "dataDir": "LEASES", "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}, {"dst": "192.168.0.0/16"}],
            "ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "2001:db8:1::/64"}]]});
        let ours = json!({"type": "route-override", "flushgateway": true, "addroutes": [{"dst": "50.0.0.0/24"}]});
        let ward = Ward::sized(&json!([merged(&interface, &json!({"ipam": ipam})), ours]), 1);
        ward.attach(0);
        let pod = &ward.pods[0];
        let before = (ward.node.snapshot(), pod.snapshot(&ward.node));
        let repair = || ward.cnibox(&["repair"]).printed();
        assert_eq!(repair(), "nothing was missing\n");
        assert_unchanged(&before.0, &ward.node.snapshot());
        for dst in ["50.0.0.0/24", "192.168.0.0/16"] {
            pod.sh(&format!("ip route del {dst}"));
            let said = repair();
            assert!(said.contains(dst), "{said}");
        }
        assert_unchanged(&before.1, &pod.snapshot(&ward.node));
    }
}
