//! CHECK: each verified property, broken by hand.

use serde_json::{Value, json};

use super::{SUBJECT, quick};
use crate::lane::{self, needs};
use crate::support::net::Net;
use crate::support::node::{Container, Node};

fn attached<'n>(node: &'n Node, container: &Container) -> (Net<'n>, Value) {
    let net = Net::new(node, "vlan", "1.1.0", &(SUBJECT.keys)(node));
    let result = net.add(container);
    net.check(container, &result).ok();
    (net, result)
}

#[test]
fn check_reports_changes_in_the_container() {
    needs!(lane::VLAN);
    for (line, msg) in [
        ("ip link set eth0 down", "interface \"eth0\" is down"),
        ("ip link del eth0", "Interface name eth0 not found in NETNS"),
        (
            "sh -c 'ip link del eth0; ip link add eth0 up type bridge'",
            "Error: Container interface eth0 not of type vlan",
        ),
        (
            "ip link set eth0 address 02:00:00:00:00:99",
            "Interface eth0 Mac MAC doesn't match link Mac: 02:00:00:00:00:99",
        ),
        ("ip link set eth0 mtu 1300", "interface \"eth0\" has MTU 1300 instead of 1400"),
        ("ip addr del 10.1.2.2/24 dev eth0", "Failed to match addr 10.1.2.2/24 on interface eth0"),
        (
            "ip route del default",
            "Expected Route 0.0.0.0/0 via 10.1.2.1 not found in routing table",
        ),
    ] {
        let (node, container) = (Node::new(), quick());
        let (net, result) = attached(&node, &container);
        container.sh(line);
        let mac = result["interfaces"][0]["mac"].as_str().unwrap();
        let msg = msg.replace("NETNS", &container.path()).replace("MAC", mac);
        net.check_finds(&container, &result, &msg);
    }
}

#[test]
fn check_reports_changed_configuration() {
    needs!(lane::VLAN);
    let (node, container) = (Node::new(), quick());
    let (net, result) = attached(&node, &container);
    for (keys, msg) in [
        (json!({"vlanId": 101}), "interface \"eth0\" is of VLAN 100, configured is 101"),
        (json!({"mtu": 1500}), "interface \"eth0\" has MTU 1400 instead of 1500"),
        (json!({"master": "wire1"}), "interface \"eth0\" is not on top of \"wire1\""),
        (json!({"master": "gone"}), "failed to lookup master \"gone\": Link not found"),
    ] {
        net.with(&keys).check_finds(&container, &result, msg);
    }
}

#[test]
fn check_requires_lease_prev_result_and_sandbox() {
    needs!(lane::VLAN);
    let (node, container) = (Node::new(), quick());
    let (net, mut result) = attached(&node, &container);
    assert_eq!(net.on("CHECK", &container).error().brief(), (999, "Required prevResult missing"));
    for ip in net.leases() {
        std::fs::remove_file(node.path("leases/net").join(ip)).unwrap();
    }
    let msg = "host-local: Failed to find address added by container c1";
    net.check_finds(&container, &result, msg);
    net.del(&container);
    result = net.add(&container);
    result["interfaces"][0]["sandbox"] = json!("/elsewhere");
    let netns = container.path();
    let msg = format!("Sandbox in prevResult /elsewhere doesn't match configured netns: {netns}");
    net.check_finds(&container, &result, &msg);
}
