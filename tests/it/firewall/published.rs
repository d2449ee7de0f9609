//! Published ports: under a policy to drop forwarded packets, and between bridges with a policy.

use std::net::IpAddr;

use serde_json::{Value, json};

use super::traffic::{Pod, pod, reaches, world};
use super::{BACKENDS, rules};
use crate::portmap::tcp;
use crate::support::net::{Net, merged};
use crate::support::node::Node;

/// The addresses of the host towards the external host, with the published port.
const HOST: [&str; 2] = ["10.9.0.1:8080", "[2001:db8:9::1]:8080"];

/// Publishes port 80 of the container of network `n` as port 8080 of the host.
fn publish(node: &Node, n: u8, id: &str, pod: &Pod, backend: &str) {
    let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
    let keys = json!({"name": format!("net{n}"), "backend": backend, "prevResult": pod.result,
        "runtimeConfig": {"portMappings": ports}});
    let portmap = Net::new(node, "portmap", "1.1.0", &keys);
    portmap.call("ADD", id).netns(&pod.container.path()).result();
}

fn firewall<'n>(node: &'n Node, n: u8, pod: &Pod, keys: &Value) -> Net<'n> {
    let name = json!({"name": format!("net{n}"), "prevResult": pod.result});
    Net::new(node, "firewall", "1.1.0", &merged(&name, keys))
}

/// The clients that the container sees behind each address of the host.
fn clients(from: &Pod, to: &Pod) -> [Option<IpAddr>; 2] {
    HOST.map(|host| tcp(&from.container, &to.container, host, 80))
}

fn drop_forwarded(node: &Node, backend: &str) {
    node.sh(match backend {
        "nftables" => "nft \"chain inet cnibox_firewall forward { policy drop; }\"",
        _ => "iptables -P FORWARD DROP; ip6tables -P FORWARD DROP",
    });
}

/// As Docker and ufw configure nodes.
#[test]
fn published_ports_answer_under_a_default_drop() {
    for backend in BACKENDS {
        let node = Node::new();
        let keys = json!({"backend": backend});
        let outside = world(&node);
        let inside = pod(&node, 1, "c1", &keys);
        publish(&node, 1, "c1", &inside, backend);
        reaches(&outside, &inside, true, "the kernel is done with IPv6");
        drop_forwarded(&node, backend);
        let seen = clients(&outside, &inside);
        let client = ["10.9.0.2", "2001:db8:9::2"].map(|ip| Some(ip.parse().unwrap()));
        assert_eq!(seen, client, "{backend}: {}", rules(&node));
        reaches(&outside, &inside, false, backend);
        let call = |verb| firewall(&node, 1, &inside, &keys).call(verb, "c1");
        call("CHECK").netns(&inside.container.path()).ok();
        call("DEL").netns(&inside.container.path()).ok();
        assert_eq!(clients(&outside, &inside), [None; 2], "{backend}: the rule is gone");
        let rules = rules(&node);
        let left =
            rules.lines().find(|line| line.contains("10.1.0.2") && !line.contains("DNAT --"));
        assert_eq!(left, None, "{backend}");
    }
}

/// The policy of the container's own bridge decides; answers always return.
#[test]
fn published_ports_are_reached_from_other_bridges() {
    for backend in BACKENDS {
        for (from, to, passes) in [
            ("same-bridge", "same-bridge", true),
            ("isolated", "same-bridge", true),
            ("same-bridge", "isolated", false),
        ] {
            let node = Node::new();
            let outside = world(&node);
            let keys = |policy| json!({"backend": backend, "ingressPolicy": policy});
            let client = pod(&node, 1, "c1", &keys(from));
            let server = pod(&node, 2, "c2", &keys(to));
            publish(&node, 2, "c2", &server, backend);
            let what = format!("{backend}, {from} to {to}");
            reaches(&outside, &server, true, &what);
            reaches(&client, &outside, true, &what);
            assert!(clients(&outside, &server).iter().all(Option::is_some), "{what}");
            let seen = clients(&client, &server).map(|client| client.is_some());
            assert_eq!(seen, [passes; 2], "{what}: {}", rules(&node));
            reaches(&client, &server, false, &what);
            reaches(&server, &client, false, &what);
            firewall(&node, 2, &server, &keys(to))
                .call("CHECK", "c2")
                .netns(&server.container.path())
                .ok();
        }
    }
}

/// Tables of an earlier release may lack rules; the next ADD or STATUS adds them.
#[test]
fn tables_of_an_earlier_release_are_completed() {
    let node = Node::new();
    let keys = json!({"backend": "nftables", "ingressPolicy": "same-bridge"});
    let one = pod(&node, 1, "c1", &keys);
    let complete = rules(&node);
    let remove_rules = || {
        for (chain, comment) in [("forward", "published"), ("isolation", "published")] {
            let lines = node
                .sh(&format!("nft -a list chain inet cnibox_firewall {chain} | grep {comment} | sed 's/.*handle //'"));
            for handle in lines.lines() {
                node.sh(&format!("nft delete rule inet cnibox_firewall {chain} handle {handle}"));
            }
        }
        assert_ne!(rules(&node), complete);
    };
    remove_rules();
    let net = firewall(&node, 1, &one, &keys);
    net.call("STATUS", "").without("CNI_CONTAINERID").ok();
    assert_eq!(rules(&node), complete);
    net.call("CHECK", "c1").netns(&one.container.path()).ok();
    remove_rules();
    let two = pod(&node, 1, "c2", &keys);
    let net = firewall(&node, 1, &two, &keys);
    net.call("DEL", "c2").netns(&two.container.path()).ok();
    assert_eq!(rules(&node), complete);
}
