//! Router advertisements on the link of a container whose IPv6 addresses are IPAM's: the key
//! `acceptRA` of the interface plugins, and kernel parameters of `tuning`.

use std::ffi::CString;
use std::net::{Ipv6Addr, SocketAddrV6};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};

use crate::support::net::{Net, merged};
use crate::support::node::{Container, Node, eventually};

const ADDRESS: &str = "fd04::5/64";

/// A router behind `wire0`, and behind the bridge `br0`, that advertises `2001:db8:77::/64`.
struct Router {
    ends: Arc<AtomicBool>,
    sender: Option<JoinHandle<()>>,
}

impl Router {
    fn start(node: &Node) -> Router {
        let container = Container::new();
        node.sh("ip link add br0 type bridge; ip link set br0 up");
        for (near, far) in [("wire0", "far0"), ("up1", "far1"), ("hd0", "far2")] {
            node.sh(&format!(
                "ip link add {near} type veth peer name {far}; ip link set {near} up"
            ));
            node.sh(&format!("ip link set {far} netns {}", container.path()));
            container.sh(&format!("ip link set {far} up"));
        }
        node.sh("ip link set up1 master br0");
        let ends = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&ends);
        let sender = thread::spawn(move || {
            container.run(|| {
                let all: Ipv6Addr = "ff02::1".parse().unwrap();
                while !ended.load(Ordering::Relaxed) {
                    for name in ["far0", "far1", "far2"] {
                        // The link-local address is tentative at first, and a device may be moved.
                        drop(send(&advertisement(), all, name));
                    }
                    thread::sleep(Duration::from_millis(50));
                }
            });
        });
        Router { ends, sender: Some(sender) }
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        drop(self.sender.take().map(JoinHandle::join));
    }
}

/// A default router for half an hour, and a prefix for a day (RFC 4861, 4.2 and 4.6.2).
fn advertisement() -> Vec<u8> {
    let prefix: Ipv6Addr = "2001:db8:77::".parse().unwrap();
    let mut message = vec![134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0];
    message.extend([3, 4, 64, 0xc0, 0, 1, 0x51, 0x80, 0, 1, 0x51, 0x80, 0, 0, 0, 0]);
    message.extend(prefix.octets());
    message
}

fn send(message: &[u8], to: Ipv6Addr, interface: &str) -> std::io::Result<usize> {
    let index = nix::net::if_::if_nametoindex(CString::new(interface)?.as_c_str())?;
    let socket = Socket::new(Domain::IPV6, Type::RAW, Some(Protocol::ICMPV6))?;
    socket.set_multicast_hops_v6(255)?;
    socket.set_multicast_if_v6(index)?;
    socket.send_to(message, &SocketAddrV6::new(to, 0, 0, index).into())
}

fn net<'n>(node: &'n Node, plugin: &'static str, extra: &Value) -> Net<'n> {
    let ipam = json!({"type": "static", "addresses": [{"address": ADDRESS, "gateway": "fd04::1"}]});
    let keys = json!({"bridge": "br0", "master": "wire0", "device": "hd0", "ipam": ipam});
    Net::new(node, plugin, "1.1.0", &merged(&keys, extra))
}

/// The global addresses and the default routes of `eth0`.
fn state(container: &Container) -> (Vec<String>, String) {
    let shown = container.sh("ip -6 -o addr show dev eth0 scope global");
    let found = shown.lines().map(|line| line.split_whitespace().nth(3).unwrap().to_owned());
    (found.collect(), container.sh("ip -6 route show default"))
}

fn is_advertised(container: &Container) -> bool {
    let (found, default) = state(container);
    found.iter().any(|address| address.starts_with("2001:db8:77:")) && default.contains("proto ra")
}

#[test]
fn without_accept_ra_only_ipam_gives_addresses() {
    for plugin in ["macvlan", "bridge", "host-device"] {
        let node = Node::new();
        let _router = Router::start(&node);
        let container = Container::new();
        net(&node, plugin, &json!({})).add(&container);
        eventually(&format!("{plugin}: no advertisement"), || is_advertised(&container));
        net(&node, plugin, &json!({})).del(&container);

        let container = Container::new();
        let closed = net(&node, plugin, &json!({"acceptRA": false}));
        let result = closed.add(&container);
        for _ in 0..20 {
            let only = (vec![ADDRESS.to_owned()], String::new());
            assert_eq!(state(&container), only, "{plugin}");
            thread::sleep(Duration::from_millis(50));
        }
        closed.check(&container, &result).ok();
    }
}

#[test]
fn tuning_removes_what_came_before_it() {
    for (parameter, routes_stay) in [("accept_ra", false), ("autoconf", true)] {
        let node = Node::new();
        let _router = Router::start(&node);
        let container = Container::new();
        let prev = net(&node, "macvlan", &json!({})).add(&container);
        eventually("no advertisement", || is_advertised(&container));
        let sysctl = json!({format!("net.ipv6.conf.IFNAME.{parameter}"): "0"});
        let keys = json!({"sysctl": sysctl, "prevResult": prev});
        Net::new(&node, "tuning", "1.1.0", &keys).add(&container);
        for _ in 0..10 {
            let (found, default) = state(&container);
            assert_eq!(
                (found, default.contains("proto ra")),
                (vec![ADDRESS.to_owned()], routes_stay)
            );
            thread::sleep(Duration::from_millis(50));
        }
    }
}
