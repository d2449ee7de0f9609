//! The chain of bridge, portmap and firewall, for many containers at the same time.

use serde_json::{Value, json};

use crate::support::net::no_veth_remains;
use crate::support::node::{Container, Node};
use crate::support::parallel::at_once;
use crate::support::traffic::{self, Place};

const COUNT: usize = 64;

/// The plugins in the order of ADD calls.
const PLUGINS: [&str; 3] = ["bridge", "portmap", "firewall"];

/// The maps and sets that hold exactly one element of each container.
const OWNED: [(&str, &str); 4] = [
    ("cnibox_masquerade", "pods4"),
    ("cnibox_portmap", "any4"),
    ("cnibox_portmap", "attachments"),
    ("cnibox_firewall", "pods4"),
];

/// The configuration of `plugin` for container `i`.
fn conf(node: &Node, plugin: &str, i: usize, prev: &Value) -> Value {
    let ports = json!([{"hostPort": 20000 + i, "containerPort": 80, "protocol": "tcp"}]);
    let mut conf = match plugin {
        "bridge" => json!({"bridge": "cni0", "isGateway": true, "ipMasq": true,
            "ipMasqBackend": "nftables", "ipam": ipam(node)}),
        "portmap" => json!({"backend": "nftables", "runtimeConfig": {"portMappings": ports}}),
        _ => json!({"backend": "nftables", "ingressPolicy": "same-bridge"}),
    };
    conf["cniVersion"] = json!("1.1.0");
    conf["name"] = json!("n");
    conf["type"] = json!(plugin);
    if !prev.is_null() {
        conf["prevResult"] = prev.clone();
    }
    conf
}

fn ipam(node: &Node) -> Value {
    let mut ipam = node.host_local(&["10.1.0.0/16"]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}]);
    ipam
}

/// A namespace connected to the host: 192.0.2.2, with the host at 192.0.2.1.
pub(crate) fn peer(node: &Node) -> Container {
    let peer = Container::new();
    node.sh(&format!("ip link add out0 type veth peer name eth0 netns {}", peer.path()));
    node.sh("ip addr add 192.0.2.1/24 dev out0; ip link set out0 up");
    peer.sh("ip addr add 192.0.2.2/24 dev eth0");
    peer.sh("ip link set eth0 up");
    assert!(peer.reaches("192.0.2.1"));
    peer
}

/// The keys of the elements of a map or set as text, without the sentinel element.
fn elements(node: &Node, (table, set): (&str, &str)) -> Vec<String> {
    let tables: Value = serde_json::from_str(&node.sh("nft -j list ruleset")).unwrap();
    let objects = tables["nftables"].as_array().unwrap().iter();
    let mut objects = objects.flat_map(|o| [&o["set"], &o["map"]]);
    let found = objects.find(|o| o["table"] == table && o["name"] == set && o["family"] == "inet");
    let found = found.unwrap_or_else(|| panic!("{table} has no {set}"));
    let elements = found["elem"].as_array().cloned().unwrap_or_default();
    let texts = elements.iter().map(ToString::to_string);
    texts.filter(|text| !text.contains("cnibox: not flushed")).collect()
}

#[test]
fn a_chain_attaches_64_containers_concurrently() {
    let node = Node::new();
    let containers: Vec<_> = (0..COUNT).map(|_| Container::new()).collect();
    let call = |verb: &str, plugin: &str, i: usize, prev: &Value| {
        let call = node.call(plugin, verb).conf(&conf(&node, plugin, i, prev));
        call.id(&format!("pod-{i}-x")).netns(&containers[i].path())
    };
    let results = at_once(COUNT, |i| {
        let add = |prev: Value, plugin: &&str| call("ADD", plugin, i, &prev).result();
        PLUGINS.iter().fold(Value::Null, add)
    });
    let address = |i: usize| {
        let text = results[i]["ips"][0]["address"].as_str().unwrap();
        text.split('/').next().unwrap().to_owned()
    };

    for owned in OWNED {
        let found = elements(&node, owned);
        assert_eq!(found.len(), COUNT, "{owned:?}: {found:?}");
        for i in (0..COUNT).filter(|_| owned.1 != "attachments") {
            let ip = format!("\"{}\"", address(i));
            let times = found.iter().filter(|element| element.contains(&ip)).count();
            assert_eq!(times, 1, "{ip} in {owned:?}: {found:?}");
        }
    }
    // Shared rules exist once: one policy of the bridge, one chain of the subnet.
    for set in ["bridges", "same_bridge"] {
        assert_eq!(elements(&node, ("cnibox_firewall", set)).len(), 1);
    }
    let rules = node.sh("nft -s list ruleset");
    for once in ["chain subnet-", "vmap @pods4", "dnat ip to meta l4proto", "jump admin"] {
        assert_eq!(rules.matches(once).count(), 1, "{once}: {rules}");
    }
    at_once(COUNT, |i| {
        for plugin in PLUGINS {
            call("CHECK", plugin, i, &results[i]).ok();
        }
    });

    let peer = peer(&node);
    for i in [0, 1, 31, 62, 63] {
        traffic::tcp_through(&peer, &containers[i], &format!("192.0.2.1:{}", 20000 + i), 80);
    }

    at_once(COUNT, |i| {
        PLUGINS.iter().rev().for_each(|plugin| call("DEL", plugin, i, &results[i]).ok());
    });
    for owned in OWNED {
        assert_eq!(elements(&node, owned), [""; 0], "{owned:?}");
    }
    let rules = node.sh("nft -s list ruleset");
    assert!(!rules.contains("pod-"), "{rules}");
    assert_eq!(node.leases("n"), [""; 0]);
    drop(peer);
    no_veth_remains(&node);
    assert!(containers.iter().all(|c| c.ip("link").as_array().unwrap().len() == 1));
}
