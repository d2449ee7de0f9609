//! GC without an attachment that the reference made: nothing tells whose its pair is, so its
//! address stays in use as long as a pair may be its own.

use std::fs;

use serde_json::{Value, json};

use crate::support::net::Net;
use crate::support::node::{Call, Container, Node, eventually};

/// Makes what this program created look as the reference leaves it: no labels, no notes, no
/// records.
fn as_by_the_reference(node: &Node) {
    for name in node.ip("-d link show type veth").as_array().unwrap() {
        let name = name["ifname"].as_str().unwrap();
        node.sh(&format!("ip link set dev {name} alias ''"));
    }
    for directory in [node.path("leases/net/.cnibox"), node.state("flannel").join(".cnibox")] {
        if directory.exists() {
            fs::remove_dir_all(directory).unwrap();
        }
    }
    node.sh("rm -rf /run/cni/cnibox");
}

fn network<'n>(node: &'n Node, plugin: &'static str) -> Net<'n> {
    let keys = json!({"bridge": "br0", "isGateway": true, "ipMasq": true, "ipMasqBackend": "iptables",
        "ipam": node.host_local(&["10.1.2.0/24"])});
    Net::new(node, plugin, "1.1.0", &keys)
}

fn gc(net: &Net<'_>, valid: &[&str]) -> Call {
    let of = |id: &&str| json!({"containerID": id, "ifname": "eth0"});
    let valid: Vec<Value> = valid.iter().map(of).collect();
    net.with(&json!({"cni.dev/valid-attachments": valid})).call("GC", "").without("CNI_CONTAINERID")
}

#[test]
fn an_address_behind_a_pair_without_a_label_stays_leased() {
    for plugin in ["bridge", "ptp"] {
        let node = Node::new();
        let net = network(&node, plugin);
        let (one, two) = (Container::new(), Container::new());
        net.add(&one);
        as_by_the_reference(&node);
        // An attachment of this program's is detached as before.
        net.call("ADD", "c2").netns(&two.path()).result();
        let outcome = gc(&net, &[]).run();
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        let warning = "GC keeps 10.1.2.2 of container c1";
        assert!(outcome.stderr.contains(warning), "{plugin}: {}", outcome.stderr);
        assert_eq!(net.leases(), ["10.1.2.2"], "{plugin}");
        assert!(!two.try_sh("ip link show eth0"));
        let rules = node.sh("iptables-save -t nat");
        assert!(rules.contains("id: \\\"c1\\\"") && !rules.contains("c2"), "{plugin}: {rules}");
        net.del(&one);
        assert_eq!((net.leases(), one.try_sh("ip link show eth0")), (vec![], false), "{plugin}");
    }
}

#[test]
fn an_address_without_such_a_pair_is_released() {
    for plugin in ["bridge", "ptp"] {
        let node = Node::new();
        let net = network(&node, plugin);
        node.sh("ip netns add gone");
        net.call("ADD", "c1").netns("/run/netns/gone").result();
        as_by_the_reference(&node);
        let ends = || node.sh("ip -br link show type veth | grep -c ^veth; true");
        assert_eq!(ends().trim(), "1");
        node.sh("ip netns del gone");
        eventually("the kernel deletes the pair", || ends().trim() == "0");
        // A pair elsewhere, and a pair with both ends on the host.
        let other = Container::new();
        node.sh(&format!("ip link add v0 type veth peer name v1 netns {}", other.path()));
        node.sh("ip link add w0 type veth peer name w1");
        if plugin == "bridge" {
            node.sh("ip link set w0 master br0");
        }
        // The uplink of a node that is a container itself.
        node.sh("ip addr add 172.18.0.2/16 dev v0; ip link set v0 up");
        node.sh("ip route add default via 172.18.0.1");
        gc(&net, &[]).ok();
        assert_eq!(net.leases(), [""; 0], "{plugin}");
    }
}

#[test]
fn a_record_of_flannel_is_kept_with_the_address() {
    let node = Node::new();
    let net = crate::flannel::simple(&node);
    let one = Container::new();
    net.add(&one);
    as_by_the_reference(&node);
    let outcome = gc(&net, &[]).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains("GC keeps the record of container \"c1\""), "{outcome:?}");
    assert_eq!(
        (net.leases(), crate::flannel::kept(&node)),
        (vec!["10.1.2.2".into()], vec!["./c1".into()])
    );
    net.del(&one);
    assert_eq!((net.leases(), crate::flannel::kept(&node)), (vec![], vec![]));
    assert!(!one.try_sh("ip link show eth0"));
}
