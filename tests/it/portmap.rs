//! portmap: every verb in every version, traffic, both back ends, compatibility with the reference.

mod clients;
mod ended;
mod lifecycle;
mod others;
mod owners;
mod reference;
mod traffic;

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::symlink;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::net::Net;
use crate::support::node::{Call, Container, Node, exists};
use crate::support::snapshot::without_recorded;
use crate::support::traffic::Place;

const LIMIT: Duration = Duration::from_millis(1500);

/// The back end of the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rules {
    Nftables,
    /// iptables on top of `nf_tables`.
    Iptables,
    Legacy,
}

const ALL: [Rules; 3] = [Rules::Nftables, Rules::Iptables, Rules::Legacy];

impl Rules {
    fn key(self) -> &'static str {
        if self == Rules::Nftables { "nftables" } else { "iptables" }
    }
}

/// A node with a bridge network and port mappings.
struct Ports {
    node: Node,
    rules: Rules,
    version: &'static str,
}

/// An attachment by the bridge plugin.
struct Pod {
    id: &'static str,
    container: Container,
    prev: Value,
}

fn mapping(host: u16, container: u16, proto: &str) -> Value {
    json!({"hostPort": host, "containerPort": container, "protocol": proto})
}

impl Ports {
    fn new(rules: Rules, version: &'static str) -> Ports {
        let node = Node::new();
        // The iptables programs under the names that nodes with this variant use.
        let bin = node.path("flavour");
        fs::create_dir(&bin).unwrap();
        let flavour = if rules == Rules::Legacy { "legacy" } else { "nft" };
        for family in ["iptables", "ip6tables"] {
            for tool in ["", "-save", "-restore"] {
                let program = format!("/usr/sbin/{family}-{flavour}{tool}");
                symlink(program, bin.join(format!("{family}{tool}"))).unwrap();
            }
        }
        Ports { node, rules, version }
    }

    fn pod(&self, id: &'static str) -> Pod {
        let keys = json!({"bridge": "cni0", "isDefaultGateway": true,
            "hairpinMode": true, "ipam":
            self.node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"])});
        let container = Container::new();
        let net = Net::new(&self.node, "bridge", self.version, &keys);
        let prev = net.call("ADD", id).netns(&container.path()).result();
        Pod { id, container, prev }
    }

    /// The network with these port mappings and keys.
    fn net(&self, ports: &Value, keys: &Value) -> Net<'_> {
        let base = json!({"backend": self.rules.key(), "runtimeConfig": {"portMappings": ports}});
        Net::new(&self.node, "portmap", self.version, &crate::support::net::merged(&base, keys))
    }

    fn call(&self, verb: &str, pod: &Pod, ports: &Value) -> Call {
        self.call_with(verb, pod, ports, &json!({}))
    }

    fn call_with(&self, verb: &str, pod: &Pod, ports: &Value, keys: &Value) -> Call {
        let net = self.net(ports, keys).with(&json!({"prevResult": pod.prev}));
        self.path(net.call(verb, pod.id).netns(&pod.container.path()))
    }

    fn path(&self, call: Call) -> Call {
        let path = std::env::var("PATH").unwrap();
        call.env("PATH", &format!("{}:{path}", self.node.path("flavour").display()))
    }

    #[track_caller]
    fn add(&self, pod: &Pod, ports: &Value) {
        assert_eq!(self.call("ADD", pod, ports).result(), pod.prev);
    }

    /// ADD that waits for no lock of an attachment: such a wait would be in its recording.
    #[track_caller]
    fn add_at_once(&self, pod: &Pod, ports: &Value) {
        let call = self.call("ADD", pod, ports).env("CNI_LOG", "trace");
        assert_eq!(call.result(), pod.prev);
        let recorded = fs::read_to_string("/run/cnibox/traces.jsonl").unwrap();
        assert!(recorded.contains("portmap ADD"), "{recorded}");
        assert!(!recorded.contains("/turn-"), "{recorded}");
    }

    #[track_caller]
    fn del(&self, pod: &Pod, ports: &Value) {
        self.call("DEL", pod, ports).ok();
    }

    /// All rules, without counters.
    fn state(&self) -> String {
        let flavour = self.node.path("flavour");
        let save = |name: &str| {
            let name = flavour.join(name);
            self.node.sh(&format!("{} -t nat | grep -v '^[#]' | sed 's/ \\[.*//'", name.display()))
        };
        match self.rules {
            Rules::Nftables => without_recorded(&self.node.sh("nft list ruleset")),
            _ => save("iptables-save") + &save("ip6tables-save"),
        }
    }

    /// An external namespace with routes: 192.0.2.2 and `2001:db8:9::2`; the host is .1 and `::1`.
    fn peer(&self) -> Container {
        self.outside("peer", "192.0.2", "2001:db8:9")
    }

    fn outside(&self, name: &str, v4: &str, v6: &str) -> Container {
        let peer = Container::new();
        let node = &self.node;
        node.sh(&format!("ip link add {name} type veth peer name inside"));
        node.sh(&format!("ip link set inside netns {} name eth0", peer.path()));
        node.sh(&format!("ip addr add {v4}.1/24 dev {name}; ip link set {name} up"));
        node.sh(&format!("ip addr add {v6}::1/64 dev {name} nodad"));
        peer.sh("ip link set lo up");
        peer.sh(&format!("ip addr add {v4}.2/24 dev eth0"));
        peer.sh(&format!("ip addr add {v6}::2/64 dev eth0 nodad"));
        peer.sh("ip link set eth0 up");
        peer.sh(&format!("ip route add default via {v4}.1"));
        peer.sh(&format!("ip route add default via {v6}::1"));
        // The kernel adds the local route of an IPv6 address asynchronously.
        assert!(peer.reaches(&format!("{v6}::1")) && peer.reaches(&format!("{v4}.1")));
        peer
    }
}

/// Retries, because a process that another test has forked may still hold the previous socket.
fn patiently<T>(bind: impl Fn() -> std::io::Result<T>) -> T {
    let attempts = (0..50).find_map(|_| bind().map_err(|_| thread::sleep(LIMIT / 50)).ok());
    attempts.expect("the port stays in use")
}

/// Opens a TCP connection from `client` to `target`, expected at `port` in `server`; returns the
/// source address that the server sees, or `None` if the connection does not arrive.
pub(crate) fn tcp(
    client: &impl Place,
    server: &impl Place,
    target: &str,
    port: u16,
) -> Option<IpAddr> {
    let target: SocketAddr = target.parse().unwrap();
    let any = Ipv6Addr::UNSPECIFIED;
    let listener = server.within(|| patiently(|| TcpListener::bind((any, port))));
    listener.set_nonblocking(true).unwrap();
    let mut near = client.within(|| TcpStream::connect_timeout(&target, LIMIT)).ok()?;
    let deadline = Instant::now() + LIMIT;
    let (mut far, from) = loop {
        match listener.accept() {
            Ok(accepted) => break accepted,
            Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
            Err(_) => return None,
        }
    };
    far.set_nonblocking(false).unwrap();
    for (from, to) in [(&mut near, 0), (&mut far, 1)] {
        from.set_read_timeout(Some(LIMIT)).unwrap();
        from.write_all(&[to]).unwrap();
    }
    let mut byte = [9];
    far.read_exact(&mut byte).unwrap();
    near.read_exact(&mut byte).unwrap();
    Some(from.ip().to_canonical())
}

/// The same with a UDP request and reply, as [`tcp`].
fn udp(client: &impl Place, server: &impl Place, target: &str, port: u16) -> Option<IpAddr> {
    let target: SocketAddr = target.parse().unwrap();
    let any: IpAddr = if target.is_ipv4() { "0.0.0.0" } else { "::" }.parse().unwrap();
    let near = client.within(|| UdpSocket::bind((any, 0)).unwrap());
    asks(&near, server, target, port)
}

fn asks(near: &UdpSocket, server: &impl Place, target: SocketAddr, port: u16) -> Option<IpAddr> {
    let far = server.within(|| patiently(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port))));
    for socket in [near, &far] {
        socket.set_read_timeout(Some(LIMIT)).unwrap();
    }
    near.send_to(b"question", target).unwrap();
    let mut buffer = [0; 16];
    let (_, from) = far.recv_from(&mut buffer).ok()?;
    far.send_to(b"answer", from).unwrap();
    let (length, answered) = near.recv_from(&mut buffer).unwrap();
    assert_eq!((&buffer[..length], answered), (&b"answer"[..], target));
    Some(from.ip().to_canonical())
}

fn reference() -> Option<std::path::PathBuf> {
    let dir =
        std::env::var_os("PEER").map_or_else(|| "/usr/lib/cni".into(), std::path::PathBuf::from);
    let file = dir.join("portmap");
    if exists(&file) {
        return Some(file);
    }
    println!("SKIP: {} is not there", file.display());
    None
}
