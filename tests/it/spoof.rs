//! `macspoofchk` of bridge: frames from a container pass only with the container's MAC.

use serde_json::{Value, json};

use crate::net::{Net, merged};
use crate::node::{Container, Node};
use crate::traffic::Place;

const GATEWAYS: [&str; 2] = ["10.1.2.1", "2001:db8:1::1"];

fn network<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    let base = json!({
        "bridge": "br0", "isGateway": true, "macspoofchk": true,
        "ipam": node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"])
    });
    Net::new(node, "bridge", "1.1.0", &merged(&base, keys))
}

fn rules(node: &Node) -> String {
    node.sh("nft -s list ruleset")
}

fn set_mac(container: &Container, mac: &str) {
    container.sh(&format!("ip link set eth0 address {mac}"));
    container.sh("ip neigh flush all");
}

fn mac_of(result: &Value) -> String {
    result["interfaces"][2]["mac"].as_str().unwrap().to_owned()
}

#[test]
fn another_mac_is_dropped_and_the_own_passes() {
    let node = Node::new();
    let net = network(&node, &json!({}));
    let (one, two) = (Container::new(), Container::new());
    let first = net.add(&one);
    let second = net.call("ADD", "c2").netns(&two.path()).result();
    for gateway in GATEWAYS {
        assert!(one.reaches(gateway) && two.reaches(gateway));
    }
    set_mac(&one, "02:00:00:00:00:99");
    for gateway in GATEWAYS {
        assert!(!one.reaches_within(gateway, 2), "spoofed");
    }
    set_mac(&one, &mac_of(&second));
    assert!(!one.reaches_within(GATEWAYS[0], 2), "another port's address");
    assert!(two.reaches(GATEWAYS[0]), "others are as they were");
    set_mac(&one, &mac_of(&first));
    assert!(one.reaches(GATEWAYS[0]));
    let unchecked = network(&node, &json!({"macspoofchk": false}));
    let three = Container::new();
    unchecked.call("ADD", "c3").netns(&three.path()).result();
    set_mac(&three, "02:00:00:00:00:99");
    assert!(three.reaches(GATEWAYS[0]), "a port without the key");
}

#[test]
fn del_removes_it_whatever_is_known_and_nothing_of_others() {
    let node = Node::new();
    let net = network(&node, &json!({}));
    let two = Container::new();
    net.call("ADD", "c2").netns(&two.path()).result();
    let before = rules(&node);
    for with_prev in [true, false] {
        let one = Container::new();
        let prev = net.add(&one);
        assert_ne!(rules(&node), before);
        let prev = if with_prev { prev } else { Value::Null };
        net.with(&json!({"prevResult": prev})).call("DEL", "c1").netns("").ok();
        assert_eq!(rules(&node), before);
        net.call("DEL", "c1").netns("").ok();
    }
    // A chained plugin has changed the MAC.
    let one = Container::new();
    let mut prev = net.add(&one);
    prev["interfaces"][2]["mac"] = json!("02:00:00:00:00:99");
    net.with(&json!({"prevResult": prev})).call("DEL", "c1").netns("").ok();
    assert_eq!(rules(&node), before);
}

#[test]
fn gc_and_check() {
    let node = Node::new();
    let net = network(&node, &json!({}));
    let other = network(&node, &json!({"name": "net2"}));
    let (one, two, three) = (Container::new(), Container::new(), Container::new());
    let prev = net.add(&one);
    other.call("ADD", "c3").netns(&three.path()).result();
    let wanted = rules(&node);
    net.call("ADD", "c2").netns(&two.path()).result();
    let valid = json!([{"containerID": "c1", "ifname": "eth0"}]);
    let gc = net.with(&json!({"cni.dev/valid-attachments": valid}));
    gc.call("GC", "").without("CNI_CONTAINERID").ok();
    assert_eq!(rules(&node), wanted);
    net.check(&one, &prev).ok();
    node.sh("nft flush set bridge cnibox_spoof allowed");
    let port = prev["interfaces"][1]["name"].as_str().unwrap();
    let error = net.check(&one, &prev).error();
    assert_eq!(error.msg, format!("the source MAC of port \"{port}\" is not checked"));
}

#[test]
fn what_the_reference_made_is_removed() {
    let node = Node::new();
    let net = network(&node, &json!({}));
    let make = |id: &str| {
        let (chain, mac) =
            (format!("cni-br-iface-{id}-eth0"), format!("cni-br-iface-{id}-eth0-mac"));
        let comment = format!("comment \\\"macspoofchk-{id}-eth0\\\"");
        let t = "bridge nat";
        node.sh(&format!(
            "nft \"add table {t}; add chain {t} PREROUTING {{ type filter hook prerouting priority -300; }}; add chain {t} {chain}; add chain {t} {mac}; add rule {t} PREROUTING iifname x{id} jump {chain} {comment}; add rule {t} {chain} jump {mac} {comment}; add rule {t} {mac} ether saddr 02:00:00:00:00:01 return {comment}; add rule {t} {mac} drop {comment}\""
        ));
    };
    make("c2");
    let before = rules(&node);
    make("c1");
    net.call("DEL", "c1").netns("").ok();
    assert_eq!(rules(&node), before);
}
