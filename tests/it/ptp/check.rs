//! CHECK: each verified property, broken by hand.

use serde_json::{Value, json};

use super::SUBJECT;
use crate::support::net::Net;
use crate::support::node::{Container, Node};

fn attached<'n>(node: &'n Node, container: &Container) -> (Net<'n>, Value) {
    let net = Net::new(node, "ptp", "1.1.0", &(SUBJECT.keys)(node));
    let result = net.add(container);
    net.check(container, &result).ok();
    (net, result)
}

/// Runs `inside` in the container and `outside` on the host (`VETH` is the host's end); asserts
/// that CHECK fails with `msg`.
#[track_caller]
fn broken(inside: &str, outside: &str, msg: &str) {
    let (node, container) = (Node::new(), Container::new());
    let (net, result) = attached(&node, &container);
    let veth = result["interfaces"][0]["name"].as_str().unwrap();
    container.sh(inside);
    node.sh(&outside.replace("VETH", veth));
    let msg = msg.replace("VETH", veth).replace("NETNS", &container.path());
    net.check_finds(&container, &result, &msg);
}

#[test]
fn check_reports_missing_addresses() {
    for address in ["10.1.2.2/24", "2001:db8:1::2/64"] {
        broken(
            &format!("ip addr del {address} dev eth0"),
            "true",
            &format!("Failed to match addr {address} on interface eth0"),
        );
    }
}

#[test]
fn check_reports_missing_or_changed_container_routes() {
    let missing = |route: &str| format!("Expected Route {route} not found in routing table");
    let default = missing("0.0.0.0/0 via 10.1.2.1");
    broken("ip route del default", "true", &default);
    broken("ip route replace default via 10.1.2.7 dev eth0 onlink", "true", &default);
    broken("ip -6 route del default", "true", &missing("::/0 via 2001:db8:1::1"));
    let subnet = "Failed to find Gateway 10.1.2.1 for interface eth0";
    broken("ip route del 10.1.2.0/24", "true", subnet);
}

#[test]
fn check_reports_links_down_missing_or_replaced() {
    broken("ip link set eth0 down", "true", "interface \"eth0\" is down");
    broken("true", "ip link set VETH down", "interface \"VETH\" is down");
    broken("ip link del eth0", "true", "Interface name eth0 not found in NETNS");
    broken(
        "sh -c 'ip link del eth0; ip link add eth0 up type bridge'",
        "true",
        "Error: Container interface eth0 not of type veth",
    );
    broken(
        "true",
        "ip link set VETH down; ip link set VETH name other; ip link set other up",
        "ptp: host end of \"eth0\" was not found",
    );
}

#[test]
fn check_reports_changed_macs() {
    for index in [0, 1] {
        let (node, container) = (Node::new(), Container::new());
        let (net, result) = attached(&node, &container);
        let entry = &result["interfaces"][index];
        let (name, mac) = (entry["name"].as_str().unwrap(), entry["mac"].as_str().unwrap());
        let line = format!("ip link set {name} address 02:00:00:00:00:99");
        if index == 0 {
            node.sh(&line)
        } else {
            container.sh(&line)
        };
        let msg = format!("Interface {name} Mac {mac} doesn't match link Mac: 02:00:00:00:00:99");
        net.check_finds(&container, &result, &msg);
    }
}

#[test]
fn check_reports_missing_host_routes_and_addresses() {
    broken("true", "ip route del 10.1.2.2", "ptp: no route to 10.1.2.2/32 through \"VETH\"");
    broken(
        "true",
        "ip -6 route del 2001:db8:1::2",
        "ptp: no route to 2001:db8:1::2/128 through \"VETH\"",
    );
    broken(
        "true",
        "ip link add br9 up type bridge; ip route replace 10.1.2.2 dev br9",
        "ptp: no route to 10.1.2.2/32 through \"VETH\"",
    );
    for (address, gw) in [("10.1.2.1/32", "10.1.2.1"), ("2001:db8:1::1/128", "2001:db8:1::1")] {
        broken(
            "true",
            &format!("ip addr del {address} dev VETH"),
            &format!("ptp: {gw} is not an address of \"VETH\""),
        );
    }
}

#[test]
fn check_reports_missing_lease() {
    let (node, container) = (Node::new(), Container::new());
    let (net, result) = attached(&node, &container);
    for ip in net.leases() {
        std::fs::remove_file(node.path("leases/net").join(ip)).unwrap();
    }
    let msg = "host-local: Failed to find address added by container c1";
    net.check_finds(&container, &result, msg);
}

#[test]
fn check_requires_prev_result_and_its_sandbox() {
    let (node, container) = (Node::new(), Container::new());
    let (net, mut result) = attached(&node, &container);
    let error = net.on("CHECK", &container).error();
    assert_eq!((error.code, error.msg.contains("Required prevResult missing")), (999, true));
    result["interfaces"][1]["sandbox"] = json!("/elsewhere");
    let netns = container.path();
    let msg = format!("Sandbox in prevResult /elsewhere doesn't match configured netns: {netns}");
    net.check_finds(&container, &result, &msg);
}
