//! The chains of the sweep, and the tests.

use serde_json::{Value, json};

use super::{Chain, SAMPLE, sweep};
use crate::lane::{self, needs};
use crate::support::net::{merged, wire};
use crate::support::node::Node;

fn nothing(_: &Node) {}
fn uplink(node: &Node) {
    if !node.ip("link").to_string().contains("wire0") {
        wire(node);
    }
}

/// Two bytes unique to the node. The chains are swept concurrently, and the kernel may reuse the
/// inode number of a deleted namespace for another chain's, so no two chains may share an address.
fn bytes_of(node: &Node) -> [u8; 2] {
    let path = node.path("").into_os_string().into_encoded_bytes();
    let sum = |sum: u16, byte: &u8| sum.wrapping_mul(31).wrapping_add(u16::from(*byte));
    path.iter().fold(0, sum).to_be_bytes()
}

/// An interface plugin with addresses of both families.
fn interface(node: &Node, plugin: &str, keys: &Value) -> Value {
    let [high, low] = bytes_of(node);
    let (v4, v6) = (format!("10.{high}.{low}.0/24"), format!("fd00:{high:x}:{low:x}::/64"));
    let mut ipam = node.host_local(&[&v4, &v6]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    merged(&json!({"type": plugin, "ipam": ipam}), keys)
}

fn bridge(node: &Node) -> Value {
    interface(node, "bridge", &json!({"isDefaultGateway": true}))
}

fn masqueraded(node: &Node, plugin: &str, backend: &str) -> Value {
    let keys = json!({"isGateway": true, "ipMasq": true, "ipMasqBackend": backend});
    interface(node, plugin, &keys)
}

fn macvlan(node: &Node) -> Value {
    interface(node, "macvlan", &json!({"master": "wire0"}))
}

fn portmap(backend: &str, who: usize) -> Value {
    let protocols = ["tcp", "tcp", "udp", "udp"].iter().enumerate();
    let ports = protocols
        .map(|(i, protocol)| json!({"hostPort": 8000 + 10 * who + i, "containerPort": 80, "protocol": protocol}));
    let ports: Vec<_> = ports.collect();
    json!({"type": "portmap", "backend": backend, "runtimeConfig": {"portMappings": ports}})
}

/// A masquerading bridge, four ports and the firewall.
fn filtered(node: &Node, backend: &str, who: usize) -> Vec<Value> {
    let firewall = json!({"type": "firewall", "backend": backend});
    vec![masqueraded(node, "bridge", backend), portmap(backend, who), firewall]
}

fn bandwidth() -> Value {
    json!({"type": "bandwidth", "ingressRate": 8_000_000, "ingressBurst": 800_000,
           "egressRate": 16_000_000, "egressBurst": 800_000})
}

/// The parameters are set to their current values, because no DEL restores them.
fn tuning(node: &Node, who: usize) -> Value {
    json!({"type": "tuning", "dataDir": node.state("tuning"), "mtu": 1400,
           "mac": format!("02:00:00:00:07:{who:02}"), "promisc": true,
           "sysctl": {"net.core.somaxconn": "4096", "net.ipv4.conf.IFNAME.log_martians": "0"}})
}

/// Routes of both families through the gateway, instead of the default routes.
fn route_override() -> Value {
    json!({"type": "route-override", "flushgateway": true, "flushroutes": true,
           "addroutes": [{"dst": "198.51.100.0/24"}, {"dst": "2001:db8:100::/48"}]})
}

fn egress() -> Value {
    json!({"type": "egress", "profile": "sandbox", "allow": [{"to": ["192.0.2.0/24"], "ports": ["tcp/443"]}],
           "serve": ["tcp/80"]})
}

fn sbr() -> Value {
    json!({"type": "sbr"})
}

/// A device per container, with an address and a route that DEL restores. A device that was deleted
/// with its namespace is recreated identically, but distinct from other nodes' devices.
fn devices(node: &Node) {
    add_devices(node, 4);
}

/// Two devices per container.
fn pairs_of_devices(node: &Node) {
    add_devices(node, 8);
}

fn add_devices(node: &Node, count: usize) {
    let [high, low] = bytes_of(node);
    for who in 0..count {
        node.sh(&format!(
            "ip link show far{who} >/dev/null 2>&1 && exit
             ip link add hd{who} index 10{who} address 02:0d:00:{high:02x}:{low:02x}:0{who} type veth \
                peer name far{who} index 20{who} address 02:0f:00:{high:02x}:{low:02x}:0{who} || exit 0
             ip link set far{who} up; ip link set hd{who} up
             ip addr add 192.0.{who}.7/24 dev hd{who}
             ip addr add 2001:db8:{who}::7/64 dev hd{who}
             ip route add 198.51.{who}.0/24 via 192.0.{who}.9 dev hd{who}"
        ));
    }
}

fn host_device(node: &Node, who: usize) -> Value {
    let keys = json!({"device": format!("hd{who}")});
    interface(node, "host-device", &keys)
}

fn bond(node: &Node, who: usize) -> Value {
    let links: Vec<_> =
        [2 * who, 2 * who + 1].iter().map(|i| json!({"name": format!("hd{i}")})).collect();
    interface(node, "bond", &json!({"mode": "active-backup", "links": links}))
}

fn flannel(node: &Node) -> Value {
    let [high, low] = bytes_of(node);
    let env = format!(
        "FLANNEL_NETWORK=10.{high}.0.0/16\nFLANNEL_SUBNET=10.{high}.{low}.1/24\n\
         FLANNEL_IPV6_NETWORK=2001:db8::/32\nFLANNEL_IPV6_SUBNET=2001:db8:{high:02x}{low:02x}::1/64\n\
         FLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n"
    );
    std::fs::write(node.path("subnet.env"), env).unwrap();
    json!({"type": "flannel", "subnetFile": node.path("subnet.env"),
           "dataDir": node.state("flannel"), "ipam": {"dataDir": node.path("leases")},
           "delegate": {"isDefaultGateway": true, "ipMasq": true, "ipMasqBackend": "nftables"}})
}

/// Defines the tests of each chain: name, preparation of the node, features that kernels may lack,
/// plugins of a container.
macro_rules! chains {
    ($($name:ident: $prepare:ident $([$feature:expr])?, $plugins:expr;)+) => { $(
        mod $name {
            use super::*;

            const CHAIN: Chain =
                Chain { name: stringify!($name), prepare: $prepare, plugins: $plugins };

            #[test]
            fn kills_and_errors_at_sampled_points_leave_nothing() {
                $(needs!($feature);)?
                sweep(&CHAIN, Some(SAMPLE));
            }

            #[test]
            #[ignore = "takes minutes: make test-long"]
            fn kills_and_errors_at_every_point_leave_nothing() {
                $(needs!($feature);)?
                sweep(&CHAIN, None);
            }
        }
    )+ };
}

chains! {
    bridge_alone: nothing, |node, _| vec![bridge(node)];
    bridge_portmap_firewall_nftables: nothing, |node, who| filtered(node, "nftables", who);
    bridge_portmap_firewall_iptables: nothing, |node, who| filtered(node, "iptables", who);
    bridge_macspoofchk: nothing,
        |node, _| vec![merged(&bridge(node), &json!({"macspoofchk": true}))];
    ptp_nftables: nothing, |node, _| vec![masqueraded(node, "ptp", "nftables")];
    ptp_iptables: nothing, |node, _| vec![masqueraded(node, "ptp", "iptables")];
    macvlan_alone: uplink, |node, _| vec![macvlan(node)];
    bridge_bandwidth: nothing, |node, _| vec![bridge(node), bandwidth()];
    bridge_tuning: nothing, |node, who| vec![bridge(node), tuning(node, who)];
    bridge_route_override: nothing, |node, _| vec![bridge(node), route_override()];
    host_device_route_override_sbr: devices,
        |node, who| vec![host_device(node, who), route_override(), sbr()];
    ptp_sbr: nothing, |node, _| vec![interface(node, "ptp", &json!({})), sbr()];
    macvlan_tuning_sbr: uplink, |node, who| vec![macvlan(node), tuning(node, who), sbr()];
    host_device_alone: devices, |node, who| vec![host_device(node, who)];
    host_device_tuning_sbr: devices,
        |node, who| vec![host_device(node, who), tuning(node, who), sbr()];
    bond_alone: pairs_of_devices [lane::BOND], |node, who| vec![bond(node, who)];
    tap: nothing, |node, _| vec![interface(node, "tap", &json!({}))];
    ptp_tc_redirect_tap: nothing,
        |node, _| vec![interface(node, "ptp", &json!({})), json!({"type": "tc-redirect-tap"})];
    bridge_portmap_egress: nothing,
        |node, who| vec![masqueraded(node, "bridge", "nftables"), portmap("nftables", who), egress()];
    flannel_bridge: nothing, |node, _| vec![flannel(node)];
}
