//! CHECK and STATUS: each verified property, broken by hand.

use serde_json::{Value, json};

use super::{SUBJECT, layer2, simple};
use crate::lane;
use crate::support::net::{Net, wire};
use crate::support::node::{Container, Node};

fn attached<'n>(node: &'n Node, container: &Container) -> (Net<'n>, Value) {
    let net = Net::new(node, "macvlan", "1.1.0", &(SUBJECT.keys)(node));
    // Disables duplicate address detection, which takes seconds.
    container.sh("sh -c 'echo 0 > /proc/sys/net/ipv6/conf/default/dad_transmits'");
    let result = net.add(container);
    net.check(container, &result).ok();
    (net, result)
}

/// Runs `inside` in the container and asserts that CHECK fails with `msg`.
#[track_caller]
fn broken(inside: &str, msg: &str) {
    let (node, container) = (Node::new(), Container::new());
    let (net, result) = attached(&node, &container);
    container.sh(inside);
    let mac = result["interfaces"][0]["mac"].as_str().unwrap();
    let msg = msg.replace("NETNS", &container.path()).replace("MAC", mac);
    net.check_finds(&container, &result, &msg);
}

#[test]
fn check_reports_missing_addresses_and_routes() {
    for address in ["10.1.2.2/24", "2001:db8:1::2/64"] {
        let msg = format!("Failed to match addr {address} on interface eth0");
        broken(&format!("ip addr del {address} dev eth0"), &msg);
    }
    let missing = |route: &str| format!("Expected Route {route} not found in routing table");
    broken("ip route del default", &missing("0.0.0.0/0 via 10.1.2.1"));
    broken("ip -6 route del default", &missing("::/0 via 2001:db8:1::1"));
}

#[test]
fn check_reports_link_down_missing_or_replaced() {
    broken("ip link set eth0 down", "interface \"eth0\" is down");
    broken("ip link del eth0", "Interface name eth0 not found in NETNS");
    let replaced = "sh -c 'ip link del eth0; ip link add eth0 up type bridge'";
    broken(replaced, "Error: Container interface eth0 not of type macvlan");
}

#[test]
fn check_reports_changed_mac_or_mode() {
    let mac = "ip link set eth0 address 02:00:00:00:00:99";
    broken(mac, "Interface eth0 Mac MAC doesn't match link Mac: 02:00:00:00:00:99");
    let mode = "ip link set eth0 type macvlan mode private";
    let msg = "container macvlan mode private does not match expected value: bridge";
    broken(mode, msg);
}

#[test]
fn check_reports_changed_configuration() {
    let (node, container) = (Node::new(), Container::new());
    let (net, result) = attached(&node, &container);
    node.sh("ip link add other type bridge");
    for (keys, msg) in [
        (
            json!({"mode": "vepa"}),
            "container macvlan mode bridge does not match expected value: vepa",
        ),
        (json!({"master": "other"}), "interface \"eth0\" is not on top of \"other\""),
        (json!({"master": "gone"}), "failed to lookup master \"gone\": Link not found"),
        (json!({"linkInContainer": true}), "failed to lookup master \"wire0\": Link not found"),
        (
            json!({"bcqueuelen": 77}),
            "container macvlan bcqueuelen 1000 does not match expected value: 77",
        ),
    ] {
        if keys["bcqueuelen"].is_null() || lane::MACVLAN_QUEUE.is_here() {
            net.with(&keys).check_finds(&container, &result, msg);
        }
    }
    for (keys, msg) in [
        (json!({"mtu": 1501}), "invalid MTU 1501, must be [0, master MTU(1500)]"),
        (json!({"mode": "x"}), "unknown macvlan mode: \"x\""),
        (json!({"mac": "x"}), "invalid args x for MAC addr: address x: invalid MAC address"),
    ] {
        let error = net.with(&keys).check(&container, &result).error();
        assert_eq!(error.brief(), (7, msg));
    }
}

#[test]
fn check_reports_wrong_namespace_of_the_master() {
    let (node, container) = (Node::new(), Container::new());
    let (net, result) = attached(&node, &container);
    let index = node.ip("link show wire0")[0]["ifindex"].as_u64().unwrap();
    let mac = result["interfaces"][0]["mac"].as_str().unwrap();
    container.sh("ip link del eth0");
    // A link of the same index, but in another namespace.
    container.sh(&format!("ip link add inner index {index} type bridge"));
    container
        .sh(&format!("ip link add link inner name eth0 address {mac} up type macvlan mode bridge"));
    let msg = "interface \"eth0\" is not on top of \"wire0\" on the host";
    net.check_finds(&container, &result, msg);
}

#[test]
fn check_requires_lease_prev_result_and_sandbox() {
    let (node, container) = (Node::new(), Container::new());
    let (net, mut result) = attached(&node, &container);
    let error = net.on("CHECK", &container).error();
    assert_eq!((error.code, error.msg.contains("Required prevResult missing")), (999, true));
    let good = result.clone();
    result["interfaces"][0]["sandbox"] = json!("/elsewhere");
    let netns = container.path();
    let msg = format!("Sandbox in prevResult /elsewhere doesn't match configured netns: {netns}");
    net.check_finds(&container, &result, &msg);
    for ip in net.leases() {
        std::fs::remove_file(node.path("leases/net").join(ip)).unwrap();
    }
    let msg = "host-local: Failed to find address added by container c1";
    net.check_finds(&container, &good, msg);
}

#[test]
fn status_reports_what_add_would_refuse() {
    let node = Node::new();
    wire(&node);
    let ok = |net: Net<'_>| net.call("STATUS", "").ok();
    ok(simple(&node, &json!({})));
    ok(layer2(&node, &json!({})));
    // `CNI_ARGS` belongs to an attachment.
    layer2(&node, &json!({})).call("STATUS", "").env("CNI_ARGS", "none").ok();
    for (keys, msg) in [
        (json!({"mode": "x"}), "unknown macvlan mode: \"x\""),
        (json!({"mac": "x"}), "invalid args x for MAC addr: address x: invalid MAC address"),
        (json!({"mtu": 1501}), "invalid MTU 1501, must be [0, master MTU(1500)]"),
        (json!({"master": "x"}), "failed to lookup master \"x\": Link not found"),
    ] {
        let error = layer2(&node, &keys).call("STATUS", "").error();
        assert_eq!(error.brief(), (50, msg));
    }
    node.script("broken", "cat >/dev/null; echo '{\"code\": 51, \"msg\": \"half\"}'; exit 1");
    let error = simple(&node, &json!({"ipam": {"type": "broken"}})).call("STATUS", "").error();
    assert_eq!(error.brief(), (51, "half"));
}
