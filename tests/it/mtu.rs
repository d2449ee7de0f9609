//! `"mtu": "auto"`: the MTU of the link of the host's default route.

use serde_json::{Value, json};

use crate::lane::{self, needs};
use crate::support::net::{Net, merged, wire};
use crate::support::node::{Container, Node};

fn is_that_of_the_default_routes_link(plugin: &'static str, keys: &Value) {
    let node = Node::new();
    wire(&node);
    node.sh("ip link add up0 mtu 1380 type veth peer name up1");
    node.sh("ip link set up0 up && ip link set up1 up && ip addr add 192.0.2.2/24 dev up0");
    let auto = json!({"mtu": "auto", "ipam": node.host_local(&["10.1.2.0/24"])});
    let net = Net::new(&node, plugin, "1.1.0", &merged(&auto, keys));
    let container = Container::new();
    let why = "mtu \"auto\": no default route interface found";
    net.add_is_refused(&container, 999, why);
    let status = net.call("STATUS", "").error();
    assert_eq!((status.code, status.msg.as_str()), (50, why), "{status:?}");

    node.sh("ip route add default via 192.0.2.1 dev up0");
    net.call("STATUS", "").ok();
    let result = net.add(&container);
    assert_eq!(container.ip("link show eth0")[0]["mtu"], 1380, "{result}");
    for interface in result["interfaces"].as_array().unwrap() {
        assert_eq!(interface["mtu"], 1380, "{result}");
    }
    // CHECK must not depend on the current default route.
    node.sh("ip route del default");
    net.check(&container, &result).ok();
    net.del(&container);
    let error = net.with(&json!({"mtu": "large"})).on("ADD", &container).error();
    assert_eq!(error.code, 6, "{error:?}");
    assert!(format!("{error:?}").contains("a number of bytes or"), "{error:?}");
}

#[test]
fn auto_mtu_of_bridge_is_the_uplinks() {
    is_that_of_the_default_routes_link("bridge", &json!({}));
}

#[test]
fn auto_mtu_of_ptp_is_the_uplinks() {
    is_that_of_the_default_routes_link("ptp", &json!({}));
}

#[test]
fn auto_mtu_of_macvlan_is_the_uplinks() {
    is_that_of_the_default_routes_link("macvlan", &json!({"master": "wire0"}));
}

#[test]
fn auto_mtu_of_ipvlan_is_the_uplinks() {
    needs!(lane::IPVLAN);
    is_that_of_the_default_routes_link("ipvlan", &json!({"master": "wire0"}));
}

#[test]
fn auto_mtu_does_not_exceed_the_masters() {
    let node = Node::new();
    wire(&node);
    node.sh("ip addr add 192.0.2.2/24 dev wire1 && ip route add default via 192.0.2.1 dev wire1");
    node.sh("ip link set wire0 mtu 1400");
    let keys = json!({"master": "wire0", "mtu": "auto", "ipam": node.host_local(&["10.1.2.0/24"])});
    let container = Container::new();
    Net::new(&node, "macvlan", "1.1.0", &keys).add(&container);
    assert_eq!(container.ip("link show eth0")[0]["mtu"], 1400);
}
