//! `macspoofchk` of bridge: frames from a container pass only with the container's MAC.

use serde_json::{Value, json};

use crate::lane::{self, needs};
use crate::support::net::{Net, merged, settles};
use crate::support::node::{Container, Node};
use crate::support::traffic::Place;

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
fn frames_with_a_foreign_source_mac_are_dropped() {
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
fn del_removes_only_the_rules_of_its_attachment() {
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
fn gc_removes_stale_rules_and_check_reports_missing_ones() {
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
    assert_eq!(net.check(&one, &prev).error().msg, "set bridge cnibox_spoof allowed was flushed");
}

#[test]
fn del_removes_rules_of_the_reference() {
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

/// `macspoofchk` would certify a MAC that belongs to somebody else.
#[test]
fn a_requested_mac_in_use_is_refused() {
    let node = Node::new();
    let net = network(&node, &json!({}));
    let unchecked = network(&node, &json!({"macspoofchk": null}));
    let (one, two, three) = (Container::new(), Container::new(), Container::new());
    let silent = mac_of(&net.add(&one));
    node.sh("ip link set br0 type bridge fdb_flush");
    let seen = mac_of(&unchecked.call("ADD", "c2").netns(&two.path()).result());
    assert!(two.pings(GATEWAYS[0]));
    let link = |name: &str| node.ip(&format!("link show {name}"))[0]["address"].clone();
    let bridge = link("br0").as_str().unwrap().to_owned();
    let before = (node.snapshot(), three.snapshot(&node));
    for (mac, owner) in [(&silent, "c1"), (&seen, "c2"), (&bridge, "")] {
        let capability = json!({"runtimeConfig": {"mac": mac.to_uppercase()}});
        let by_runtime = net.with(&capability).call("ADD", "c3").netns(&three.path());
        let by_args = net.call("ADD", "c3").netns(&three.path());
        let by_args = by_args.env("CNI_ARGS", &format!("IgnoreUnknown=1;MAC={mac}"));
        for call in [by_runtime, by_args] {
            let error = call.error();
            let start = format!("the MAC {mac} is in use on bridge \"br0\", by \"");
            assert!(error.msg.starts_with(&start), "{error:?}");
            let names =
                owner.is_empty() || error.details.contains(&format!("container {owner} has it in"));
            assert!(names && error.details.contains("request another MAC"), "{error:?}");
            settles(&before.0, || node.snapshot());
            settles(&before.1, || three.snapshot(&node));
        }
    }
    // The MAC is free once its owner is gone, and no check is promised without the key.
    net.del(&one);
    let again = net.with(&json!({"runtimeConfig": {"mac": silent}}));
    assert_eq!(mac_of(&again.call("ADD", "c3").netns(&three.path()).result()), silent);
    assert!(three.reaches(GATEWAYS[0]));
    let twice = unchecked.with(&json!({"runtimeConfig": {"mac": silent}}));
    twice.call("ADD", "c4").netns(&Container::new().path()).result();
}

/// A virtual machine that moves to this node was seen behind the uplink a moment ago.
#[test]
fn a_mac_learned_on_an_uplink_is_accepted() {
    let node = Node::new();
    let net = network(&node, &json!({}));
    net.call("ADD", "c1").netns(&Container::new().path()).result();
    node.sh("ip link add up0 up type veth peer name up1; ip link set up0 master br0");
    node.sh("ip link set up1 up");
    let mac = "02:00:00:00:00:77";
    // Accepted once the port forwards.
    node.sh(&format!("until bridge fdb add {mac} dev up0 master dynamic; do sleep .05; done"));
    let three = Container::new();
    let moved = net.with(&json!({"runtimeConfig": {"mac": mac}}));
    moved.call("ADD", "c3").netns(&three.path()).result();
    assert!(three.reaches(GATEWAYS[0]));
}

/// Two VLANs of one bridge are two networks.
#[test]
fn a_mac_of_another_vlan_is_accepted() {
    needs!(lane::VLAN, lane::BRIDGE_VLAN);
    let node = Node::new();
    let vlan = |id: u16| {
        network(&node, &json!({"vlan": id, "runtimeConfig": {"mac": "02:00:00:00:00:77"}}))
    };
    let containers = [Container::new(), Container::new(), Container::new()];
    let call =
        |id: u16, of: usize| vlan(id).call("ADD", &format!("c{of}")).netns(&containers[of].path());
    call(7, 0).result();
    call(8, 1).result();
    let error = call(8, 2).error();
    assert!(error.details.contains("container c1 has it in"), "{error:?}");
}

/// The reference lets the bridge learn from link-local frames.
#[test]
fn check_covers_link_local_learning_of_own_ports_only() {
    let node = Node::new();
    let net = network(&node, &json!({}));
    let container = Container::new();
    let prev = net.add(&container);
    node.sh("ip link set br0 type bridge no_linklocal_learn 0");
    let msg = "bridge \"br0\" learns the sources of link-local frames";
    net.check_finds(&container, &prev, msg);
    // As the reference leaves the port.
    let port = prev["interfaces"][1]["name"].as_str().unwrap();
    node.sh(&format!("ip link set {port} alias ''"));
    net.check(&container, &prev).ok();
}
