//! egress: lifecycle in every version, refusals, sources of policies; the submodules test what
//! passes, names and their resolver, ways out of a policy, flushes, and the tool.

mod answers;
mod audit;
mod checksums;
mod flush;
mod lifecycle;
mod limits;
mod mistakes;
mod names;
mod recipes;
mod recipes_by_name;
mod reload;
mod skipped;
mod sources;
mod tool;
mod traffic;
mod ways;

use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::conflist::{Attached, Conflist};
use crate::support::net::merged;
use crate::support::node::{Container, Node, eventually};
use crate::support::traffic::Place;

/// The addresses of the host outside, of which the first ones are its own.
const OUTSIDE: [&str; 2] = ["10.9.0.2", "2001:db8:9::2"];
/// Further addresses of the host outside.
const FAR: [&str; 4] = ["192.0.2.7", "198.51.100.7", "169.254.169.254", "2001:db8:f::7"];

/// A network with a policy, a host outside of it, and a neighbour without a policy.
struct World {
    node: Node,
    outside: Container,
    neighbour: Container,
    inside: Container,
    result: Value,
}

/// The list: the bridge or ptp, then egress with `keys`.
fn list<'n>(node: &'n Node, kind: &str, keys: &Value) -> Conflist<'n> {
    let mut ipam = node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    let interface = json!({"type": kind, "bridge": "br0", "isGateway": true, "ipam": ipam});
    let egress = merged(&json!({"type": "egress"}), keys);
    Conflist::new(
        node,
        json!({"cniVersion": "1.1.0", "name": "net", "plugins": [interface, egress]}),
    )
}

/// Adds the host outside, to which the default routes of the node lead.
fn add_outside(node: &Node) -> Container {
    let outside = Container::new();
    let mut ipam = node.host_local(&["10.9.0.0/24", "2001:db8:9::/64"]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    let ptp =
        json!({"cniVersion": "1.1.0", "name": "world", "plugins": [{"type": "ptp", "ipam": ipam}]});
    let world = Conflist::new(node, ptp).add(&Attached::new("world", &outside.path())).unwrap();
    let link = world["interfaces"][0]["name"].as_str().unwrap();
    for addr in FAR {
        let (length, via) = if addr.contains(':') { (128, "-6") } else { (32, "-4") };
        outside.sh(&format!("ip {via} addr add {addr}/{length} dev eth0 nodad"));
        let near = OUTSIDE[usize::from(addr.contains(':'))];
        node.sh(&format!("ip {via} route add {addr}/{length} via {near} dev {link}"));
    }
    for (family, via) in [("-4", OUTSIDE[0]), ("-6", OUTSIDE[1])] {
        node.sh(&format!("ip {family} route add default via {via} dev {link}"));
    }
    outside
}

impl World {
    /// Attaches a container with a policy, and a neighbour.
    fn new(kind: &str, keys: &Value) -> World {
        let node = Node::new();
        node.sh("ip addr add 203.0.113.1/24 dev lo");
        let (outside, neighbour, inside) = (add_outside(&node), Container::new(), Container::new());
        let mut bare = list(&node, kind, keys);
        bare.conf["plugins"].as_array_mut().unwrap().pop();
        bare.add(&Attached::new("neighbour", &neighbour.path())).unwrap();
        let result = list(&node, kind, keys).add(&Attached::new("c1", &inside.path())).unwrap();
        for container in [&outside, &neighbour, &inside] {
            eventually("duplicate address detection", || {
                container.sh("ip -6 addr show tentative").trim().is_empty()
            });
        }
        for ip in [OUTSIDE[1], FAR[3]] {
            assert!(neighbour.reaches(ip), "{ip}");
        }
        World { node, outside, neighbour, inside, result }
    }

    /// The address of the container, IPv4 or IPv6.
    fn ip(&self, is_ipv6: bool) -> String {
        address(&self.result, usize::from(is_ipv6))
    }

    /// The host's end of the container's pair.
    fn end(&self) -> String {
        let names = self.result["interfaces"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["name"].as_str().unwrap());
        names.into_iter().find(|name| name.starts_with("veth")).unwrap().to_owned()
    }

    fn attached(&self) -> Attached {
        Attached::new("c1", &self.inside.path())
    }

    /// Whether a datagram of the container reaches this address and port of another place.
    fn reaches(&self, place: &impl Place, ip: &str, port: u16) -> bool {
        datagram_arrives(&self.inside, place, ip, port)
    }
}

fn address(result: &Value, nth: usize) -> String {
    result["ips"][nth]["address"].as_str().unwrap().split('/').next().unwrap().to_owned()
}

/// A socket at the port. A child process of another test that does not execute its program yet may
/// have the former socket of the port.
fn bind(ip: IpAddr, port: u16) -> UdpSocket {
    let mut bound = None;
    eventually("the port is free", || {
        bound = UdpSocket::bind((ip, port)).ok();
        bound.is_some()
    });
    bound.unwrap()
}

/// Whether a datagram arrives, and for IPv6 addresses in duplicate address detection after some
/// attempts.
fn datagram_arrives(from: &impl Place, to: &impl Place, ip: &str, port: u16) -> bool {
    let ip: IpAddr = ip.parse().unwrap();
    let far = to.within(|| bind(ip, port));
    far.set_read_timeout(Some(Duration::from_millis(120))).unwrap();
    let any: IpAddr = if ip.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let near = from.within(|| UdpSocket::bind((any, 0)).unwrap());
    (0..3).any(|_| near.send_to(b"question", (ip, port)).is_ok() && far.recv(&mut [0; 16]).is_ok())
}
