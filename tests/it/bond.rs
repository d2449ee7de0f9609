//! bond: links of the host or of the container as one interface in every version, failover,
//! settings, and the links as before after DEL, GC, failures and kills.
//!
//! The links are ends of veth pairs; their other ends are ports of a bridge with the gateways,
//! which plays the switch.

mod faults;
mod lifecycle;
mod refusals;

use serde_json::{Value, json};

use crate::lane::{self, needs};
use crate::support::net::{FIRST, GATEWAYS, Net, addresses, dual_ipam, merged, settles};
use crate::support::node::{Container, Node, Snapshot, eventually};
use crate::support::traffic::{Place, tcp, udp};

const MACS: [&str; 2] = ["02:00:00:00:00:d1", "02:00:00:00:00:d2"];

/// Creates the links `up1`, with an alias, an alternative name, addresses and a route, and `up2`,
/// and the switch.
fn plug(node: &Node) {
    let [v4, v6] = GATEWAYS;
    node.sh(&format!(
        "echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad
         ip link add sw0 address 02:00:00:00:00:f0 type bridge forward_delay 0
         for i in 1 2; do
             ip link add up$i address 02:00:00:00:00:d$i mtu 1400 type veth peer name far$i mtu 1400
             ip link set far$i master sw0 up
         done
         ip addr add {v4}/24 dev sw0
         ip addr add {v6}/64 dev sw0
         ip link set sw0 up
         ip link set up1 alias uplink
         ip link property add dev up1 altname a-long-name-of-up1
         ip addr add 192.0.2.7/24 dev up1
         ip addr add 2001:db8:7::7/64 dev up1
         ip link set up1 up
         ip route add 198.51.100.0/24 via 192.0.2.9 dev up1"
    ));
}

fn keys() -> Value {
    json!({"mode": "active-backup", "mtu": 1400, "links": [{"name": "up1"}, {"name": "up2"}]})
}

/// A dual-stack network.
fn dual<'n>(node: &'n Node, version: &'static str) -> Net<'n> {
    Net::new(node, "bond", version, &merged(&keys(), &json!({"ipam": dual_ipam(node)})))
}

/// A network of version 1.1.0 with 10.1.2.0/24 and more keys.
fn simple<'n>(node: &'n Node, extra: &Value) -> Net<'n> {
    let ipam = node.host_local(&["10.1.2.0/24"]);
    Net::new(node, "bond", "1.1.0", &merged(&merged(&keys(), &json!({"ipam": ipam})), extra))
}

/// The result of the first container: one interface, in the container.
fn golden(version: &str) -> String {
    crate::support::lifecycle::golden!("macvlan")(version).trim_end().replace("VERSION", version)
}

/// The records of links.
fn records(node: &Node) -> Vec<String> {
    let found = node.sh(&format!(
        "cd {} 2>/dev/null && find . -type f | sort || true",
        node.state("bond").display()
    ));
    found.lines().map(str::to_owned).collect()
}

/// Asserts that the host is as before, without records or leases.
#[track_caller]
fn is_back(node: &Node, before: &Snapshot) {
    settles(before, || node.snapshot());
    assert_eq!(records(node), [""; 0]);
    assert_eq!(node.leases("net"), [""; 0]);
}

fn bond_of(container: &Container) -> Value {
    container.ip("-d link show eth0")[0].clone()
}

#[test]
fn traffic_goes_on_when_a_link_fails() {
    needs!(lane::BOND);
    for fail_over_mac in [0, 1, 2] {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        let before = node.snapshot();
        let net = dual(&node, "1.1.0").with(&json!({"failOverMac": fail_over_mac}));
        let result = net.add(&container);
        assert_eq!(bond_of(&container)["linkinfo"]["info_data"]["active_slave"], "up1");
        for (fails, works) in [("far1", "up2"), ("far2", "up1")] {
            for family in [0, 1] {
                assert!(container.reaches(GATEWAYS[family]), "container to the switch");
                assert!(node.reaches(FIRST[family]), "and back");
                tcp(&container, &node, GATEWAYS[family]);
                assert_eq!(udp(&container, &node, GATEWAYS[family]).to_string(), FIRST[family]);
            }
            node.sh(&format!("ip link set {fails} down"));
            let active = || bond_of(&container)["linkinfo"]["info_data"]["active_slave"] == works;
            eventually(&format!("{works} takes over"), active);
            eventually("traffic goes on", || {
                container.pings(GATEWAYS[0]) && container.pings(GATEWAYS[1])
            });
            net.check(&container, &result).ok();
            node.sh(&format!("ip link set {fails} up"));
            let all_up = || {
                container.ip("link show up1")[0]["operstate"] == "UP"
                    && container.ip("link show up2")[0]["operstate"] == "UP"
            };
            eventually("the link is there again", all_up);
        }
        net.del(&container);
        is_back(&node, &before);
    }
}

#[test]
fn the_bond_has_the_configured_settings() {
    needs!(lane::BOND);
    let node = Node::new();
    plug(&node);
    let before = node.snapshot();
    let mac = "02:00:00:00:00:99";
    for (keys, expected) in [
        (
            json!({"mode": "balance-rr"}),
            json!({"miimon": 100, "fail_over_mac": "none", "xmit_hash_policy": "layer2"}),
        ),
        (
            json!({"mode": "active-backup", "failOverMac": "1", "miimon": "50"}),
            json!({"miimon": 50, "fail_over_mac": "active"}),
        ),
        (
            json!({"mode": "active-backup", "failOverMac": 2, "allSlavesActive": 1}),
            json!({"fail_over_mac": "follow", "all_slaves_active": 1}),
        ),
        (
            json!({"mode": "balance-xor", "xmitHashPolicy": "layer3+4", "miimon": 0}),
            json!({"xmit_hash_policy": "layer3+4", "miimon": 0}),
        ),
        (json!({"mode": "broadcast", "allSlavesActive": "0"}), json!({"all_slaves_active": 0})),
        (
            json!({"mode": "802.3ad", "lacpRate": "fast", "minLinks": 2}),
            json!({"ad_lacp_rate": "fast", "min_links": 2}),
        ),
        (
            json!({"mode": "802.3ad", "xmitHashPolicy": "vlan+srcmac"}),
            json!({"xmit_hash_policy": "vlan+srcmac"}),
        ),
        (json!({"mode": "balance-tlb", "tlbDynamicLb": 0}), json!({"tlb_dynamic_lb": 0})),
        (
            json!({"mode": "balance-alb", "tlbDynamicLb": "1", "mac": mac, "mtu": "1300"}),
            json!({"tlb_dynamic_lb": 1}),
        ),
    ] {
        let container = Container::new();
        let net = simple(&node, &merged(&json!({"ipam": null}), &keys));
        if keys["xmitHashPolicy"] == "vlan+srcmac" && !lane::BOND_VLAN_SRCMAC.is_here() {
            let error = net.on("ADD", &container).error();
            assert!(error.details.contains("vlan+srcmac\" needs Linux 5.12"), "{error:?}");
            continue;
        }
        let result = net.add(&container);
        let link = bond_of(&container);
        let data = &link["linkinfo"]["info_data"];
        assert_eq!(data["mode"], keys["mode"], "{link}");
        for (key, value) in expected.as_object().unwrap() {
            assert_eq!(&data[key], value, "{keys} {key}: {link}");
        }
        let mtu = if keys["mtu"].is_null() { 1400 } else { 1300 };
        assert_eq!(
            (&link["mtu"], &container.ip("link show up2")[0]["mtu"]),
            (&json!(mtu), &json!(mtu))
        );
        let wanted = keys["mac"].as_str().unwrap_or(MACS[0]);
        assert_eq!(
            (&link["address"], &result["interfaces"][0]["mac"]),
            (&json!(wanted), &json!(wanted))
        );
        assert!(link["flags"].as_array().unwrap().contains(&json!("UP")), "{link}");
        net.check(&container, &result).ok();
        net.del(&container);
        is_back(&node, &before);
    }
    let container = Container::new();
    let call = simple(&node, &json!({"mac": MACS[1]}))
        .on("ADD", &container)
        .env("CNI_ARGS", &format!("IgnoreUnknown=1;MAC={mac}"));
    assert_eq!(call.result()["interfaces"][0]["mac"], mac);
    simple(&node, &json!({})).del(&container);
    is_back(&node, &before);
}

/// Moves the links into the container, as attachments made before: `up1` up with addresses, `up2`
/// down.
fn hand_over(node: &Node, container: &Container) {
    let path = container.path();
    node.sh(&format!("ip link set up1 netns {path}; ip link set up2 netns {path}"));
    container.sh("sh -c 'echo 0 > /proc/sys/net/ipv6/conf/up1/accept_dad
         ip addr add 10.7.0.1/24 dev up1; ip addr add 2001:db8:9::1/64 dev up1; ip link set up1 up
         ip route add 10.8.0.0/16 via 10.7.0.9 dev up1'");
}

#[test]
fn links_of_the_container_stay_there_as_they_were() {
    needs!(lane::BOND);
    for mode in ["active-backup", "balance-tlb"] {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        hand_over(&node, &container);
        let before = (node.snapshot(), container.snapshot(&node));
        let net = simple(&node, &json!({"mode": mode, "linksInContainer": true, "mtu": 1300}));
        let result = net.add(&container);
        net.check(&container, &result).ok();
        eventually("the switch answers", || container.pings(GATEWAYS[0]));
        assert_eq!(records(&node), ["./net/c1:eth0:up1.json", "./net/c1:eth0:up2.json"]);
        for _ in ["DEL", "DEL again"] {
            net.del(&container);
            is_back(&node, &before.0);
            settles(&before.1, || container.snapshot(&node));
        }
        // Each link is deleted by the plugin that made it, before the bond or with the container.
        net.add(&container);
        node.sh("ip link del far1");
        net.del(&container);
        assert_eq!(records(&node), [""; 0]);
        let error = net.on("ADD", &container).error();
        assert_eq!(
            error.brief(),
            (999, "failed to find a link of the bond: link \"up1\" not found")
        );
        let netns = container.path();
        drop(container);
        net.call("DEL", "c1").netns(&netns).ok();
    }
}

#[test]
fn links_with_the_same_mac_get_different_ones() {
    needs!(lane::BOND);
    for (mode, fail_over_mac) in [("balance-tlb", 0), ("active-backup", 1)] {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        node.sh(&format!("ip link set up2 address {}", MACS[0]));
        let before = node.snapshot();
        let net = simple(&node, &json!({"mode": mode, "failOverMac": fail_over_mac}));
        net.add(&container);
        let macs = ["up1", "up2"]
            .map(|name| container.ip(&format!("link show {name}"))[0]["address"].clone());
        assert_ne!(macs[0], macs[1], "{mode}");
        net.del(&container);
        is_back(&node, &before);
    }
}

#[test]
fn check_finds_a_missing_route() {
    needs!(lane::BOND);
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let net = dual(&node, "1.1.0").with(&json!({"failOverMac": 1}));
    let result = net.add(&container);
    assert_eq!(addresses(&container.ip("addr show eth0")), ["10.1.2.2/24", "2001:db8:1::2/64"]);
    container.sh("ip route del default");
    let route = "Expected Route 0.0.0.0/0 via 10.1.2.1 not found in routing table";
    net.check_finds(&container, &result, route);
    net.del(&container);
}
