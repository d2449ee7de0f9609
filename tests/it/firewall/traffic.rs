//! Packets: out and back under a default-drop policy, and who reaches whom with each ingress
//! policy.

use serde_json::{Value, json};

use super::BACKENDS;
use crate::net::Net;
use crate::node::{Container, Node};
use crate::traffic::{PATIENCE, Place, tcp};

/// A container that went through `bridge` and `firewall`.
struct Pod {
    container: Container,
    ips: Vec<String>,
}

/// A network of its own bridge, `br<n>`.
fn pod(node: &Node, n: u8, id: &str, keys: &Value) -> Pod {
    let container = Container::new();
    let mut ipam = node.host_local(&[&format!("10.{n}.0.0/24"), &format!("2001:db8:{n}::/64")]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    let bridge = Net::new(
        node,
        "bridge",
        "1.1.0",
        &json!({"name": format!("net{n}"), "bridge": format!("br{n}"), "isGateway": true, "ipam": ipam}),
    );
    let result = bridge.call("ADD", id).netns(&container.path()).result();
    let firewall = Net::new(node, "firewall", "1.1.0", keys);
    let firewall = firewall.with(&json!({"name": format!("net{n}"), "prevResult": result}));
    assert_eq!(firewall.call("ADD", id).netns(&container.path()).result(), result);
    let address =
        |ip: &Value| ip["address"].as_str().unwrap().split('/').next().unwrap().to_owned();
    let ips = result["ips"].as_array().unwrap().iter().map(address).collect();
    Pod { container, ips }
}

/// Somebody outside, who is on no bridge.
fn world(node: &Node) -> Pod {
    let container = Container::new();
    let mut ipam = node.host_local(&["10.9.0.0/24", "2001:db8:9::/64"]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    let ptp = Net::new(node, "ptp", "1.1.0", &json!({"name": "world", "ipam": ipam}));
    ptp.call("ADD", "world").netns(&container.path()).result();
    Pod { container, ips: vec!["10.9.0.2".into(), "2001:db8:9::2".into()] }
}

#[track_caller]
fn reaches(from: &Pod, to: &Pod, expected: bool, what: &str) {
    for ip in &to.ips {
        let seconds = if expected { PATIENCE } else { 1 };
        assert_eq!(from.container.reaches_within(ip, seconds), expected, "{what}: {ip}");
    }
}

#[test]
fn under_a_default_drop_pods_get_out_and_answers_come_back() {
    for backend in BACKENDS {
        let node = Node::new();
        let outside = world(&node);
        let inside = pod(&node, 1, "c1", &json!({"backend": backend}));
        let stranger = world_like(&node);
        match backend {
            "nftables" => {
                node.sh("nft \"chain inet cnibox_firewall forward { policy drop; }\"");
            }
            _ => {
                node.sh("iptables -P FORWARD DROP; ip6tables -P FORWARD DROP");
            }
        }
        reaches(&inside, &outside, true, backend);
        for ip in &outside.ips {
            tcp(&inside.container, &outside.container, ip);
        }
        reaches(&outside, &inside, false, backend);
        reaches(&stranger, &outside, false, "no pod of ours");
        // Another ADD leaves the node's policy alone.
        let second = pod(&node, 1, "c2", &json!({"backend": backend}));
        reaches(&second, &outside, true, backend);
        reaches(&outside, &second, false, backend);
    }
}

/// One more outside, without a rule of its own.
fn world_like(node: &Node) -> Pod {
    let container = Container::new();
    let mut ipam = node.host_local(&["10.8.0.0/24", "2001:db8:8::/64"]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    let ptp = Net::new(node, "ptp", "1.1.0", &json!({"name": "stranger", "ipam": ipam}));
    ptp.call("ADD", "stranger").netns(&container.path()).result();
    Pod { container, ips: vec!["10.8.0.2".into(), "2001:db8:8::2".into()] }
}

#[test]
fn the_administrator_has_the_first_word() {
    let node = Node::new();
    let outside = world(&node);
    let inside = pod(&node, 1, "c1", &json!({"backend": "nftables"}));
    reaches(&inside, &outside, true, "before");
    node.sh("nft add rule inet cnibox_firewall admin ip saddr 10.1.0.0/24 drop");
    node.sh("nft add rule inet cnibox_firewall admin ip6 saddr 2001:db8:1::/64 drop");
    reaches(&inside, &outside, false, "after");
}

#[test]
fn ingress_policies() {
    for backend in BACKENDS {
        for (policy, neighbours, strangers) in
            [("open", true, true), ("same-bridge", true, false), ("isolated", false, false)]
        {
            let node = Node::new();
            // iptables sees what passes a bridge by br_netfilter only, nftables needs none.
            let call = u8::from(backend == "iptables");
            for family in ["iptables", "ip6tables"] {
                node.sh(&format!("echo {call} >/proc/sys/net/bridge/bridge-nf-call-{family}"));
            }
            let keys = json!({"backend": backend, "ingressPolicy": policy});
            let outside = world(&node);
            let [one, two] = ["c1", "c2"].map(|id| pod(&node, 1, id, &keys));
            let far = pod(&node, 2, "c3", &keys);
            let what = |text: &str| format!("{backend}, {policy}: {text}");
            reaches(&one, &outside, true, &what("out"));
            reaches(&outside, &one, true, &what("in from no bridge"));
            reaches(&one, &two, neighbours, &what("neighbours"));
            reaches(&one, &far, strangers, &what("to another bridge"));
            reaches(&far, &two, strangers, &what("from another bridge"));
            let gateways = Pod {
                container: Container::new(),
                ips: vec!["10.1.0.1".into(), "2001:db8:1::1".into()],
            };
            reaches(&one, &gateways, true, &what("the gateway"));
        }
    }
}
