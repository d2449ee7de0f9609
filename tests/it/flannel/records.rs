//! The configuration stored for DEL.

use std::fs;

use serde_json::{Value, json};

use super::{ENV, ENV_V4, kept, keys, simple};
use crate::support::net::Net;
use crate::support::node::{Container, Node, exists};

fn record(node: &Node, name: &str) -> Value {
    serde_json::from_slice(&fs::read(node.state("flannel").join(name)).unwrap()).unwrap()
}

#[test]
fn records_equal_the_references() {
    use std::os::unix::fs::PermissionsExt;
    let two = "FLANNEL_NETWORK=10.1.0.0/16,192.168.0.0/16\nFLANNEL_SUBNET=10.1.2.1/24\n\
               FLANNEL_MTU=1472\nFLANNEL_IPMASQ=true\n";
    let v6 = "FLANNEL_IPV6_NETWORK=fc00::/48\nFLANNEL_IPV6_SUBNET=fc00::1/64\n\
              FLANNEL_MTU=1472\nFLANNEL_IPMASQ=false\n";
    for (env, ranges, routes, ips) in [
        (ENV_V4, json!(["10.1.2.0/24"]), json!(["10.1.0.0/16"]), 1),
        (two, json!(["10.1.2.0/24"]), json!(["10.1.0.0/16", "192.168.0.0/16"]), 1),
        (v6, json!(["fc00::/64"]), json!(["fc00::/48"]), 1),
        (
            ENV,
            json!(["10.1.2.0/24", "2001:db8:1::/64"]),
            json!(["10.1.0.0/16", "2001:db8::/32"]),
            2,
        ),
    ] {
        let node = Node::new();
        let net = Net::new(&node, "flannel", "1.0.0", &keys(&node, env));
        let container = Container::new();
        let result = net.add(&container);
        assert_eq!(result["ips"].as_array().unwrap().len(), ips);
        let list = |key: &str, values: &Value| -> Vec<Value> {
            let values = values.as_array().unwrap().iter();
            values.map(|value| json!({key: value})).collect()
        };
        let ranges: Vec<_> = list("subnet", &ranges).into_iter().map(|r| json!([r])).collect();
        let mtu = if env.contains("1472") { 1472 } else { 1450 };
        let expected = json!({
            "bridge": "br0", "isDefaultGateway": true, "isGateway": true, "mtu": mtu,
            "cniVersion": "1.0.0", "name": "net", "type": "bridge",
            "ipMasq": env.contains("IPMASQ=false"),
            "ipam": {"type": "host-local", "dataDir": node.path("leases"),
                     "ranges": ranges, "routes": list("dst", &routes)},
        });
        assert_eq!(record(&node, "c1"), expected);
        let mode = fs::metadata(node.state("flannel").join("c1")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mode = fs::metadata(node.state("flannel")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        net.del(&container);
        assert!(!exists(node.state("flannel").join("c1")));
    }
}

#[test]
fn runtime_config_args_and_dns_are_passed_to_the_delegate() {
    let node = Node::new();
    let net = simple(&node).with(&json!({
        "runtimeConfig": {"mac": "c2:11:22:33:44:55", "ips": ["10.1.2.77"]},
        "dns": {"nameservers": ["10.0.0.53"]},
    }));
    let container = Container::new();
    let result = net.add(&container);
    assert_eq!(result["ips"][0]["address"], "10.1.2.77/24");
    assert_eq!(result["dns"]["nameservers"][0], "10.0.0.53");
    assert!(container.sh("ip link show eth0").contains("c2:11:22:33:44:55"));
    // DEL uses the stored configuration, so its own may lack `runtimeConfig`.
    assert_eq!(record(&node, "c1")["runtimeConfig"]["mac"], "c2:11:22:33:44:55");
    net.with(&json!({"runtimeConfig": null})).del(&container);
    assert_eq!(net.leases(), [""; 0]);
    let net = simple(&node).with(&json!({"args": {"cni": {"ips": ["10.1.2.99"]}}}));
    assert_eq!(net.add(&container)["ips"][0]["address"], "10.1.2.99/24");
    net.del(&container);
}

#[test]
fn two_interfaces_of_a_container_are_deleted_one_by_one() {
    let node = Node::new();
    let one = simple(&node);
    let other = one.with(&json!({"name": "other", "delegate": {"bridge": "br1"}}));
    for first_goes_first in [true, false] {
        let container = Container::new();
        one.add(&container);
        other.on("ADD", &container).ifname("net1").result();
        assert_eq!(record(&node, "c1")["bridge"], "br0");
        assert_eq!(kept(&node), ["./.cnibox/c1", "./.cnibox/c1:net1", "./c1"]);
        let del_one = || one.del(&container);
        let del_other = || other.on("DEL", &container).ifname("net1").ok();
        let (left, gone) = if first_goes_first { ("net1", "eth0") } else { ("eth0", "net1") };
        if first_goes_first {
            del_one();
        } else {
            del_other();
        }
        assert!(container.try_sh(&format!("ip link show {left}")));
        assert!(!container.try_sh(&format!("ip link show {gone}")));
        assert_eq!(node.leases("net").len() + node.leases("other").len(), 1);
        if first_goes_first {
            del_other();
        } else {
            del_one();
        }
        assert_eq!(kept(&node), [""; 0]);
        assert_eq!(node.leases("net").len() + node.leases("other").len(), 0);
    }
}

#[test]
fn a_record_is_kept_until_the_delegates_del_succeeds() {
    let node = Node::new();
    let net = simple(&node);
    let container = Container::new();
    net.add(&container);
    let store = node.path("leases").join("net");
    // A file in place of the store's directory makes the release fail.
    fs::rename(&store, node.path("aside")).unwrap();
    fs::write(&store, "").unwrap();
    for _ in 0..2 {
        net.on("DEL", &container).error();
        assert!(exists(node.state("flannel").join("c1")), "the record is needed still");
    }
    fs::remove_file(&store).unwrap();
    fs::rename(node.path("aside"), &store).unwrap();
    net.del(&container);
    assert_eq!((kept(&node), net.leases()), (vec![], vec![]));
}

#[test]
fn an_empty_record_is_written_again() {
    for (content, daemon) in [("", true), ("{\"name\":", true), ("[]", false)] {
        let node = Node::new();
        let net = simple(&node);
        let container = Container::new();
        net.add(&container);
        fs::write(node.state("flannel").join("c1"), content).unwrap();
        if !daemon {
            fs::remove_file(node.path("subnet.env")).unwrap();
        }
        let outcome = net.on("DEL", &container).run();
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        assert!(outcome.stderr.contains("is derived again"), "{outcome:?}");
        assert_eq!((kept(&node), net.leases()), (vec![], vec![]), "{content}");
        assert!(!container.try_sh("ip link show eth0"));
    }
}

#[test]
fn del_needs_no_daemon() {
    let node = Node::new();
    let net = simple(&node);
    let container = Container::new();
    net.add(&container);
    fs::remove_file(node.path("subnet.env")).unwrap();
    net.del(&container);
    net.del(&container);
    assert_eq!((kept(&node), net.leases()), (vec![], vec![]));
}

#[test]
fn a_second_add_is_refused_and_changes_nothing() {
    let node = Node::new();
    let net = simple(&node);
    let container = Container::new();
    net.add(&container);
    let state = (node.snapshot(), container.snapshot(&node), record(&node, "c1"));
    let error =
        net.with(&json!({"delegate": {"bridge": "br0", "mtu": 1300}})).on("ADD", &container);
    assert!(error.error().msg.contains("already exists"));
    let now = (node.snapshot(), container.snapshot(&node), record(&node, "c1"));
    assert!(state == now, "{}", state.0.difference(&now.0));
    net.del(&container);
    assert_eq!((kept(&node), net.leases()), (vec![], vec![]));
}

#[test]
fn gc_removes_stale_records_including_the_references() {
    let node = Node::new();
    let net = simple(&node);
    let gc = |valid: Value| {
        let keys = json!({"cni.dev/valid-attachments": valid});
        net.with(&keys).call("GC", "").without("CNI_CONTAINERID").ok();
    };
    let valid = |id: &str, ifname: &str| json!([{"containerID": id, "ifname": ifname}]);
    let container = Container::new();
    net.add(&container);
    net.on("ADD", &container).ifname("net1").result();
    // A record of the reference, without a note of the interface.
    fs::copy(node.state("flannel").join("c1"), node.state("flannel").join("old")).unwrap();
    let foreign = r#"{"name":"another","type":"bridge"}"#;
    fs::write(node.state("flannel").join("stranger"), foreign).unwrap();
    fs::write(node.state("flannel").join("crashed"), "").unwrap();
    let both = json!([
        {"containerID": "c1", "ifname": "eth0"}, {"containerID": "c1", "ifname": "net1"},
        {"containerID": "old", "ifname": "eth7"},
    ]);
    gc(both);
    let all = ["./.cnibox/c1", "./.cnibox/c1:net1", "./c1", "./crashed", "./old", "./stranger"];
    assert_eq!(kept(&node), all);
    assert_eq!(net.leases().len(), 2);
    gc(valid("c1", "net1"));
    assert_eq!(kept(&node), ["./.cnibox/c1:net1", "./crashed", "./stranger"]);
    assert_eq!(net.leases().len(), 1);
    fs::remove_file(node.path("subnet.env")).unwrap();
    gc(json!([]));
    assert_eq!(kept(&node), ["./crashed", "./stranger"], "others' records stay");
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn gc_deletes_the_interface_in_a_living_namespace() {
    let node = Node::new();
    let net = simple(&node);
    let gc = |valid: Value| {
        let keys = json!({"cni.dev/valid-attachments": valid});
        net.with(&keys).call("GC", "").without("CNI_CONTAINERID").ok();
    };
    let (container, neighbour) = (Container::new(), Container::new());
    net.call("ADD", "neighbour").netns(&neighbour.path()).result();
    let valid = json!([{"containerID": "neighbour", "ifname": "eth0"}]);
    let ends = || node.ip("link show master br0").as_array().unwrap().len();
    // The state of an ADD killed before it labelled the veth pair.
    for label in ["whole", "''"] {
        net.add(&container);
        if label == "''" {
            for end in node.ip("link show master br0").as_array().unwrap() {
                node.sh(&format!("ip link set {} alias ''", end["ifname"].as_str().unwrap()));
            }
        }
        gc(valid.clone());
        assert!(!container.try_sh("ip link show eth0"), "label {label}");
        assert_eq!((ends(), net.leases().len()), (1, 1), "label {label}");
        assert_eq!(kept(&node), ["./.cnibox/neighbour", "./neighbour"], "label {label}");
        net.del(&container);
    }
    assert!(neighbour.try_sh("ip link show eth0"));
    // The container was recreated in the same namespace, without a DEL of the old id.
    let old = net.call("ADD", "old").netns(&container.path());
    old.result();
    let files = ["old", ".cnibox/old"].map(|name| node.state("flannel").join(name));
    let content = files.clone().map(|file| fs::read(file).unwrap());
    net.call("DEL", "old").netns(&container.path()).ok();
    let prev = net.add(&container);
    for (file, content) in files.iter().zip(content) {
        fs::write(file, content).unwrap();
    }
    gc(json!([valid[0], {"containerID": "c1", "ifname": "eth0"}]));
    assert!(!exists(&files[0]));
    net.check(&container, &prev).ok();
    net.del(&container);
}

#[test]
fn check_needs_the_record() {
    let node = Node::new();
    let net = simple(&node);
    let container = Container::new();
    let prev = net.add(&container);
    net.check(&container, &prev).ok();
    container.sh("ip route del default");
    let msg = "Expected Route 0.0.0.0/0 via 10.1.2.1 not found in routing table";
    net.check_finds(&container, &prev, msg);
    net.del(&container);
    net.check_finds(&container, &prev, "flannel: no configuration is saved for c1, eth0");
}
