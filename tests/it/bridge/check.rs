//! CHECK: every verified property, changed by hand.

use serde_json::{Value, json};

use super::{dual, simple};
use crate::support::net::{Net, merged};
use crate::support::node::{Container, Node};

/// ADD with gateway, default routes and one more route; returns the network and the result.
fn attached<'n>(node: &'n Node, container: &Container) -> (Net<'n>, Value) {
    let mut keys = merged(&dual(node), &json!({"isDefaultGateway": true}));
    keys["ipam"]["routes"] = json!([{"dst": "10.9.0.0/16"}, {"dst": "10.8.0.0/16", "table": 99}]);
    let net = Net::new(node, "bridge", "1.1.0", &keys);
    let result = net.add(container);
    net.check(container, &result).ok();
    (net, result)
}

/// Asserts that CHECK fails with `msg` after the command `line` in the container.
#[track_caller]
fn broken_inside(line: &str, msg: &str) {
    let (node, container) = (Node::new(), Container::new());
    let (net, result) = attached(&node, &container);
    container.sh(line);
    net.check_finds(&container, &result, msg);
}

/// Asserts that CHECK fails with `msg` after the command `line` on the host; `VETH` is replaced by
/// the name of the host's veth end.
#[track_caller]
fn broken_outside(line: &str, msg: &str) {
    let (node, container) = (Node::new(), Container::new());
    let (net, result) = attached(&node, &container);
    let veth = result["interfaces"][1]["name"].as_str().unwrap();
    node.sh(&line.replace("VETH", veth));
    net.check_finds(&container, &result, &msg.replace("VETH", veth));
}

#[test]
fn check_reports_missing_ipv4_address() {
    broken_inside(
        "ip addr del 10.1.2.2/24 dev eth0",
        "Failed to match addr 10.1.2.2/24 on interface eth0",
    );
}

#[test]
fn check_reports_missing_ipv6_address() {
    broken_inside(
        "ip addr del 2001:db8:1::2/64 dev eth0",
        "Failed to match addr 2001:db8:1::2/64 on interface eth0",
    );
}

#[test]
fn check_reports_changed_prefix_length() {
    broken_inside(
        "sh -c 'ip addr add 10.1.2.2/25 dev eth0; ip addr del 10.1.2.2/24 dev eth0'",
        "Failed to match addr 10.1.2.2/24 on interface eth0",
    );
}

#[test]
fn check_reports_missing_connected_route() {
    broken_inside("ip route del 10.1.2.0/24", "Failed to find Gateway 10.1.2.1 for interface eth0");
}

#[test]
fn check_reports_missing_route() {
    broken_inside(
        "ip route del 10.9.0.0/16",
        "Expected Route 10.9.0.0/16 via 10.1.2.1 not found in routing table",
    );
}

#[test]
fn check_reports_route_in_another_table() {
    broken_inside(
        "sh -c 'ip route del 10.8.0.0/16 table 99; ip route add 10.8.0.0/16 via 10.1.2.1'",
        "Expected Route 10.8.0.0/16 via 10.1.2.1 table 99 not found in routing table",
    );
}

#[test]
fn check_reports_missing_default_route() {
    broken_inside(
        "ip -6 route del default",
        "Expected Route ::/0 via 2001:db8:1::1 not found in routing table",
    );
}

#[test]
fn check_reports_changed_gateway_of_default_route() {
    broken_inside(
        "ip route replace default via 10.1.2.99",
        "Expected Route 0.0.0.0/0 via 10.1.2.1 not found in routing table",
    );
}

#[test]
fn check_reports_container_link_that_is_down() {
    broken_inside("ip link set eth0 down", "interface \"eth0\" is down");
}

#[test]
fn check_reports_missing_container_link() {
    let (node, container) = (Node::new(), Container::new());
    let (net, result) = attached(&node, &container);
    container.sh("ip link del eth0");
    let msg = format!("Interface name eth0 not found in {}", container.path());
    net.check_finds(&container, &result, &msg);
}

#[test]
fn check_reports_container_link_of_another_kind() {
    broken_inside(
        "sh -c 'ip link del eth0; ip link add eth0 up type bridge'",
        "Error: Container interface eth0 not of type veth",
    );
}

#[test]
fn check_reports_changed_mac_of_container_link() {
    let (node, container) = (Node::new(), Container::new());
    let (net, result) = attached(&node, &container);
    container.sh("ip link set eth0 address 02:00:00:00:00:99");
    let mac = result["interfaces"][2]["mac"].as_str().unwrap();
    let msg = format!("Interface eth0 Mac {mac} doesn't match link Mac: 02:00:00:00:00:99");
    net.check_finds(&container, &result, &msg);
}

#[test]
fn check_reports_changed_mac_of_bridge_or_host_end() {
    for index in [0, 1] {
        let (node, container) = (Node::new(), Container::new());
        let (net, result) = attached(&node, &container);
        let entry = &result["interfaces"][index];
        let (name, mac) = (entry["name"].as_str().unwrap(), entry["mac"].as_str().unwrap());
        node.sh(&format!("ip link set {name} address 02:00:00:00:00:99"));
        let msg = format!("Interface {name} Mac {mac} doesn't match link Mac: 02:00:00:00:00:99");
        net.check_finds(&container, &result, &msg);
    }
}

/// It follows the lowest MAC of the ports while nobody sets it.
#[test]
fn the_mac_of_a_bridge_without_a_gateway_may_change() {
    let (node, container) = (Node::new(), Container::new());
    node.sh("ip link add br0 type bridge");
    let net = simple(&node, &json!({}));
    let result = net.add(&container);
    let mac = || node.ip("link show br0")[0]["address"].clone();
    let former = mac();
    node.sh("ip link add low address 02:00:00:00:00:01 type veth peer name far; ip link set low master br0");
    assert_ne!(mac(), former);
    net.check(&container, &result).ok();
}

#[test]
fn check_reports_port_outside_of_the_bridge() {
    broken_outside("ip link set VETH nomaster", "CNI veth created for bridge br0 was not found");
}

#[test]
fn check_reports_port_of_another_bridge() {
    broken_outside(
        "ip link add br9 up type bridge; ip link set VETH master br9",
        "CNI veth created for bridge br0 was not found",
    );
}

#[test]
fn check_reports_port_that_is_down() {
    broken_outside("ip link set VETH down", "interface \"VETH\" is down");
}

#[test]
fn check_reports_renamed_host_end() {
    broken_outside(
        "ip link set VETH down; ip link set VETH name other; ip link set other up",
        "CNI veth created for bridge br0 was not found",
    );
}

#[test]
fn check_reports_bridge_that_is_down() {
    broken_outside("ip link set br0 down", "interface \"br0\" is down");
}

#[test]
fn check_reports_missing_or_replaced_bridge() {
    broken_outside("ip link del br0", "Interface name br0 not found");
    broken_outside(
        "ip link del br0; ip link add br0 type veth peer name x",
        "\"br0\" already exists but is not a bridge",
    );
}

#[test]
fn check_reports_missing_gateway_address() {
    for (address, gw) in [("10.1.2.1/24", "10.1.2.1"), ("2001:db8:1::1/64", "2001:db8:1::1")] {
        broken_outside(
            &format!("ip addr del {address} dev br0"),
            &format!("gateway {gw} is not an address of bridge \"br0\""),
        );
    }
}

#[test]
fn check_reports_changed_port_attributes() {
    for (keys, change, msg) in [
        (
            json!({"hairpinMode": true}),
            "hairpin off",
            "hairpin mode false and isolation false, configured are true and false",
        ),
        (
            json!({"portIsolation": true}),
            "isolated off",
            "hairpin mode false and isolation false, configured are false and true",
        ),
        (
            json!({}),
            "hairpin on",
            "hairpin mode true and isolation false, configured are false and false",
        ),
        (
            json!({}),
            "isolated on",
            "hairpin mode false and isolation true, configured are false and false",
        ),
    ] {
        let (node, container) = (Node::new(), Container::new());
        let net = simple(&node, &keys);
        let result = net.add(&container);
        net.check(&container, &result).ok();
        let veth = result["interfaces"][1]["name"].as_str().unwrap();
        node.sh(&format!("ip link set {veth} type bridge_slave {change}"));
        net.check_finds(&container, &result, &format!("port \"{veth}\" has {msg}"));
    }
}

#[test]
fn check_reports_disabled_promiscuous_mode() {
    let (node, container) = (Node::new(), Container::new());
    let net = simple(&node, &json!({"promiscMode": true}));
    let result = net.add(&container);
    net.check(&container, &result).ok();
    node.sh("ip link set br0 promisc off");
    let msg =
        "Bridge interface br0 configured Promisc Mode true doesn't match current state: false";
    net.check_finds(&container, &result, msg);
}

#[test]
fn check_ignores_packet_captures_on_the_bridge() {
    let (node, container) = (Node::new(), Container::new());
    let net = simple(&node, &json!({}));
    let result = net.add(&container);
    node.sh("ip link set br0 promisc on");
    net.check(&container, &result).ok();
}

#[test]
fn check_reports_missing_lease() {
    let (node, container) = (Node::new(), Container::new());
    let net = simple(&node, &json!({}));
    let result = net.add(&container);
    std::fs::remove_file(node.path("leases/net/10.1.2.2")).unwrap();
    let msg = "host-local: Failed to find address added by container c1";
    net.check_finds(&container, &result, msg);
}

#[test]
fn check_refuses_results_of_other_attachments() {
    let (node, container) = (Node::new(), Container::new());
    let (net, result) = attached(&node, &container);
    let changed = |path: &str, value: Value| {
        let mut other = result.clone();
        *other.pointer_mut(path).unwrap() = value;
        other
    };
    let netns = container.path();
    let sandbox = |found: &str| {
        format!("Sandbox in prevResult {found} doesn't match configured netns: {netns}")
    };
    for (prev, msg) in [
        (changed("/interfaces/0/name", "br9".into()), "Interface name br0 not found in prevResult"),
        (
            changed("/interfaces/0", json!({"name": "br0", "sandbox": netns})),
            "Interface name br0 not found in prevResult",
        ),
        (changed("/interfaces/2/name", "eth9".into()), sandbox("").as_str()),
        (changed("/interfaces/2/sandbox", "/elsewhere".into()), sandbox("/elsewhere").as_str()),
        (
            changed("/interfaces/1/name", "veth00000000".into()),
            "CNI veth created for bridge br0 was not found",
        ),
        (
            changed("/ips/0/address", "10.1.2.9/24".into()),
            "Failed to match addr 10.1.2.9/24 on interface eth0",
        ),
        (changed("/interfaces", json!([])), "Interface name br0 not found in prevResult"),
    ] {
        let error = net.check(&container, &prev).error();
        assert_eq!(error.brief(), (999, msg), "{prev}");
    }
}

#[test]
fn check_requires_prev_result_of_its_version() {
    let (node, container) = (Node::new(), Container::new());
    let (net, mut result) = attached(&node, &container);
    let error = net.on("CHECK", &container).error();
    assert_eq!(error.brief(), (999, "Required prevResult missing"));
    result["cniVersion"] = "1.0.0".into();
    net.check(&container, &result).ok();
    result["cniVersion"] = "0.4.0".into();
    let msg = "could not parse prevResult: result type supports [1.0.0 1.1.0] but unmarshalled CNIVersion is \"0.4.0\"";
    net.check_finds(&container, &result, msg);
}

#[test]
fn check_refuses_missing_or_invalid_namespace() {
    let (node, container) = (Node::new(), Container::new());
    let (net, result) = attached(&node, &container);
    let check = net.with(&json!({"prevResult": result}));
    let error = check.call("CHECK", "c1").netns("/no/such").error();
    let msg = "failed to open netns \"/no/such\": failed to Statfs \"/no/such\": no such file or directory";
    assert_eq!(error.brief(), (8, msg));
}

#[test]
fn check_ignores_additions_of_later_plugins() {
    let (node, container) = (Node::new(), Container::new());
    let (net, mut result) = attached(&node, &container);
    let ips = result["ips"].as_array_mut().unwrap();
    ips.push(json!({"address": "192.0.2.9/24", "interface": 3}));
    let entry = json!({"name": "later0", "sandbox": container.path()});
    result["interfaces"].as_array_mut().unwrap().push(entry);
    net.check(&container, &result).ok();
}
