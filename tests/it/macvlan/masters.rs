//! The choice of the master: named or from the default route, on the host or in the container.

use serde_json::{Value, json};

use super::{layer2, simple};
use crate::support::net::{Net, wire};
use crate::support::node::{Container, Node};
use crate::support::traffic::Place;

/// The index of the master of the container's `eth0`.
fn lower(container: &Container) -> u64 {
    let link = &container.ip("link show eth0")[0];
    // `ip` prints the name of a master in the same namespace, otherwise its index.
    match link["link"].as_str() {
        Some(name) => index(&container.ip(&format!("link show {name}"))),
        None => link["link_index"].as_u64().unwrap(),
    }
}

fn index(link: &Value) -> u64 {
    link[0]["ifindex"].as_u64().unwrap()
}

#[track_caller]
fn added_on(net: &Net<'_>, master: &str) {
    let container = Container::new();
    let result = net.add(&container);
    assert_eq!(lower(&container), index(&net.node.ip(&format!("link show {master}"))));
    net.check(&container, &result).ok();
    net.del(&container);
}

#[test]
fn the_default_master_has_the_default_route_ipv4_first() {
    let node = Node::new();
    wire(&node);
    node.sh(
        "ip link add other type bridge; ip link set other up; ip addr add 10.9.0.1/24 dev other",
    );
    node.sh("ip addr add 2001:db8:9::1/64 dev other nodad");
    let net = layer2(&node, &json!({"master": null}));
    let msg = "no default route interface found";
    net.add_is_refused(&Container::new(), 999, msg);
    assert_eq!(net.call("STATUS", "").error().brief(), (50, msg));
    // Neither is a default route of the main table.
    node.sh("ip route add 10.0.0.0/8 dev other; ip route add default dev other table 9");
    net.add_is_refused(&Container::new(), 999, msg);
    node.sh("ip -6 route add unreachable default metric 1");
    net.add_is_refused(&Container::new(), 999, msg);
    node.sh("ip -6 route add default via 2001:db8:9::7 dev other");
    added_on(&net, "other");
    net.call("STATUS", "").ok();
    node.sh("ip route add default dev wire0");
    added_on(&net, "wire0");
}

#[test]
fn the_first_next_hop_of_a_default_route_is_the_master() {
    let node = Node::new();
    wire(&node);
    node.sh(
        "ip link add other type bridge; ip link set other up; ip addr add 10.9.0.1/24 dev other",
    );
    node.sh("ip addr add 10.8.0.1/24 dev wire0");
    node.sh("ip route add default nexthop via 10.8.0.7 dev wire0 nexthop via 10.9.0.7 dev other");
    added_on(&layer2(&node, &json!({"master": null})), "wire0");
}

#[test]
fn check_needs_the_master_not_the_default_route() {
    let node = Node::new();
    wire(&node);
    node.sh("ip link add other type bridge; ip link set other up");
    node.sh("ip route add default dev wire0");
    let container = Container::new();
    let net = layer2(&node, &json!({"master": ""}));
    let result = net.add(&container);
    node.sh("ip route replace default dev other");
    net.check(&container, &result).ok();
    node.sh("ip route del default");
    net.check(&container, &result).ok();
}

#[test]
fn the_container_may_use_an_interface_name_of_the_host() {
    let node = Node::new();
    wire(&node);
    node.sh("ip link set wire0 down; ip link set wire0 name eth0; ip link set eth0 up");
    let net = simple(&node, &json!({"master": "eth0"}));
    let container = Container::new();
    let result = net.add(&container);
    assert!(container.reaches("10.1.2.1"));
    net.check(&container, &result).ok();
    net.del(&container);
    node.sh("ip link show eth0");
}

#[test]
fn the_master_may_be_in_the_container() {
    let node = Node::new();
    let container = Container::new();
    let path = container.path();
    node.sh(&format!("ip link add wire1 type veth peer name inner netns {path}"));
    node.sh("ip link set wire1 up; ip addr add 10.1.2.1/24 dev wire1");
    container.sh("ip link set inner up");
    let net = simple(&node, &json!({"master": "inner", "linkInContainer": true}));
    let before = container.snapshot(&node);
    let result = net.add(&container);
    assert_eq!(lower(&container), index(&container.ip("link show inner")));
    assert!(container.reaches("10.1.2.1"));
    net.check(&container, &result).ok();
    net.call("STATUS", "").ok();
    let msg = "interface \"eth0\" is not on top of \"wire1\" on the host";
    net.with(&json!({"master": "wire1", "linkInContainer": false}))
        .check_finds(&container, &result, msg);
    net.del(&container);
    assert_eq!(container.snapshot(&node), before);
}

#[test]
fn a_default_master_may_be_in_the_container() {
    let node = Node::new();
    wire(&node);
    node.sh("ip route add default dev wire0");
    let container = Container::new();
    let net = layer2(&node, &json!({"master": null, "linkInContainer": true}));
    net.add_is_refused(&container, 999, "no default route interface found");
    container.sh("ip link add inner type bridge");
    container.sh("ip link set inner up");
    container.sh("ip route add default dev inner");
    let result = net.add(&container);
    assert_eq!(lower(&container), index(&container.ip("link show inner")));
    net.check(&container, &result).ok();
    net.del(&container);
}

#[test]
fn a_master_with_the_name_of_the_interface_is_refused() {
    let node = Node::new();
    let container = Container::new();
    container.sh("ip link add eth0 type bridge");
    let net = layer2(&node, &json!({"master": "eth0", "linkInContainer": true}));
    let msg = "failed to create macvlan: container already has an interface \"eth0\": file exists";
    net.add_is_refused(&container, 999, msg);
}

#[test]
fn a_missing_master_is_named() {
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    let net = layer2(&node, &json!({"master": "eth7"}));
    let msg = "failed to lookup master \"eth7\": Link not found";
    net.add_is_refused(&container, 999, msg);
    assert_eq!(net.call("STATUS", "").error().brief(), (50, msg));
    // The master exists on the host but not in the container.
    let net = layer2(&node, &json!({"linkInContainer": true}));
    let msg = "failed to lookup master \"wire0\": Link not found";
    net.add_is_refused(&container, 999, msg);
}

#[test]
fn a_master_in_use_by_another_driver_is_explained() {
    let node = Node::new();
    wire(&node);
    node.sh("ip link add sw0 type bridge; ip link set wire0 master sw0");
    let error = layer2(&node, &json!({})).on("ADD", &Container::new()).error();
    assert!(error.msg.ends_with("device or resource busy"), "{error:?}");
    assert!(error.details.starts_with("\"wire0\" is a port of \"sw0\" (bridge)"), "{error:?}");
}

#[test]
fn del_needs_no_master() {
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    let net = simple(&node, &json!({}));
    net.add(&container);
    net.with(&json!({"master": "eth7", "mtu": 99_999, "mode": "x", "mac": "y"})).del(&container);
    assert!(!container.try_sh("ip link show eth0"));
    assert_eq!(net.leases(), [""; 0]);
    // The kernel deletes the children with their master.
    net.add(&container);
    node.sh("ip link del wire0");
    net.del(&container);
    assert_eq!(net.leases(), [""; 0]);
}
