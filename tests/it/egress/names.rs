//! Names in policies: the real resolver on the real kernel, between containers and name servers
//! that a test programs.
//!
//! | module | |
//! | --- | --- |
//! | `answers` | what is answered, and what an answer opens |
//! | `audit` | names in the mode audit |
//! | `bounds` | what one container may cost |
//! | `hostile` | name servers that lie, and containers that ask for others |
//! | `lifecycle` | ADD, CHECK, DEL, GC and STATUS; other policies for a running container |
//! | `outages` | the resolver dies, the rules are flushed, addresses vanish |
//! | `load` | the first packet behind an answer, and figures of many queries |
//! | `servers` | dnsmasq and unbound as name servers |
//! | `client`, `upstream`, `wire` | questions, a programmable name server, messages |

mod answers;
mod audit;
mod bounds;
mod client;
mod hostile;
mod lifecycle;
mod load;
mod outages;
mod servers;
mod upstream;
mod wire;

use std::fs::File;
use std::net::IpAddr;
use std::path::PathBuf;

use serde_json::{Value, json};

use self::client::{Echo, Way, connect};
use self::upstream::Upstream;
use self::wire::{A, Message, Record};
use super::{OUTSIDE, add_outside, list};
use crate::support::conflist::{Attached, Conflist};
use crate::support::net::GATEWAYS;
use crate::support::node::{Container, Node, Running, eventually};
use crate::support::traffic::Place;

/// A name server somewhere in the Internet, which nothing in a test's node answers for.
const PUBLIC: [&str; 2] = ["8.8.8.8", "2001:4860:4860::8888"];
/// The name that the resolver answers for the node.
const PROBE: &str = "resolver.cnibox.invalid";
/// The port of the node at which the resolver listens.
const PORT: u16 = 533;

/// A policy with names.
fn names() -> Value {
    json!({"allow": [{"to": ["api.example.org", "*.example.net"], "ports": ["tcp/443"]}]})
}

/// A node with the resolver, and a host outside with a name server, and with servers at the TCP
/// ports 80 and 443 of all its addresses, among which are 203.0.113.0/24 and `2001:db8:f::/64`.
struct Site {
    resolver: Option<Running>,
    upstream: Upstream,
    _echo: Echo,
    outside: Container,
    node: Node,
}

/// What the resolver says about a failed test.
impl Drop for Site {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(self.log()).unwrap_or_default());
        }
    }
}

impl Site {
    /// Without the resolver.
    fn without_resolver() -> Site {
        let node = Node::new();
        let outside = add_outside(&node);
        outside.sh("ip link set lo up");
        // The kernel asks for the MAC address of a gateway only if its route has the scope of the link,
        // and else for that of each destination, of which all namespaces together have 1,024.
        node.sh("ip route replace $(ip route show default) onlink");
        for prefix in ["203.0.113.0/24", "20.0.0.0/8", "2001:db8:f::/64"] {
            outside.sh(&format!("ip route add local {prefix} dev lo"));
        }
        eventually("duplicate address detection", || {
            outside.sh("ip -6 addr show tentative").trim().is_empty()
        });
        assert!(node.reaches(OUTSIDE[0]) && node.reaches(OUTSIDE[1]));
        let upstream = Upstream::start(&outside, OUTSIDE[0], 53);
        let echo = Echo::start(&outside, &[80, 443]);
        upstream.serve(zone());
        Site { resolver: None, upstream, _echo: echo, outside, node }
    }

    fn new() -> Site {
        let mut site = Site::without_resolver();
        site.start_resolver(&[&site.upstream.address.to_string()]);
        site
    }

    /// Starts the resolver with these servers, and waits until it answers.
    fn start_resolver(&mut self, servers: &[&str]) {
        let options = servers.iter().flat_map(|server| ["--upstream", server]);
        let words: Vec<&str> = ["egress", "resolver"].into_iter().chain(options).collect();
        let log = File::options().create(true).append(true).open(self.log()).unwrap();
        self.resolver = Some(Running::start_with(&self.node.cnibox(&words), log.into()));
        eventually("the resolver does not start", || self.answers_probe());
    }

    fn log(&self) -> PathBuf {
        self.node.path("resolver.log")
    }

    fn answers_probe(&self) -> bool {
        let probe = Message::question(PROBE, A);
        Way::udp("127.0.0.1").at_port(PORT).is_answered(&self.node, &probe)
    }

    /// Whether the resolver has files about the names that containers asked for.
    #[expect(clippy::unused_self, reason = "the directory is that of the site's node")]
    fn has_noted_names(&self) -> bool {
        let files = std::fs::read_dir("/run/cni/cnibox/egress-names");
        files.is_ok_and(|mut files| files.next().is_some())
    }

    /// Waits until the resolver has taken the end of the containers over.
    fn forgets_names(&self) {
        eventually("names of an ended container", || !self.has_noted_names());
    }

    /// The names that `cnibox egress ls` lists for the first container, with their verdicts and the
    /// numbers of their addresses, sorted.
    fn listed_names(&self) -> Vec<(String, String, usize)> {
        let listed = self.node.tool("egress", &["ls", "--json"]).printed();
        let ports: Value = serde_json::from_str(&listed).unwrap();
        let asked = ports[0]["names"].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let addresses = |asked: &Value| asked["addresses"].as_array().unwrap().len();
        let listed =
            asked.iter().map(|it| (text(&it["name"]), text(&it["verdict"]), addresses(it)));
        let mut names: Vec<_> = listed.collect();
        names.sort();
        names
    }

    /// How long the address is in force, as nft prints it: its whole time, and what is left of it.
    fn times_of(&self, ip: &str) -> String {
        self.node.sh(&format!("nft list ruleset | grep -o '{ip} timeout [^,}}]*'"))
    }

    /// Sets another policy for the container `c1`.
    fn set(&self, policy: &Value) {
        let file = self.node.path("policy.json");
        std::fs::write(&file, policy.to_string()).unwrap();
        self.node.tool("egress", &["set", "--container", "c1", file.to_str().unwrap()]).printed();
    }

    /// Ends the resolver by SIGKILL.
    fn kill_resolver(&mut self) {
        drop(self.resolver.take());
    }

    /// Attaches a container with the list of [`list`] and these keys; without egress, if there are
    /// none.
    fn attach(&self, kind: &str, id: &str, keys: Option<&Value>) -> Inside {
        let mut list = list(&self.node, kind, keys.unwrap_or(&json!({})));
        if keys.is_none() {
            list.conf["plugins"].as_array_mut().unwrap().pop();
        }
        attach_by(&list, id)
    }
}

fn attach_by(list: &Conflist<'_>, id: &str) -> Inside {
    let container = Container::new();
    let at = Attached::new(id, &container.path());
    let result = list.add(&at).unwrap_or_else(|failed| panic!("{failed:?}"));
    let inside = Inside { container, at, result };
    inside.wait_for_addresses();
    inside
}

/// An attached container.
struct Inside {
    container: Container,
    at: Attached,
    result: Value,
}

impl Inside {
    /// Waits for the end of duplicate address detection.
    fn wait_for_addresses(&self) {
        eventually("duplicate address detection", || {
            self.container.sh("ip -6 addr show tentative").trim().is_empty()
        });
    }

    /// Its address, IPv4 or IPv6.
    fn ip(&self, is_ipv6: bool) -> String {
        super::address(&self.result, usize::from(is_ipv6))
    }

    /// The host's end of its pair.
    fn end(&self) -> String {
        let interfaces = self.result["interfaces"].as_array().unwrap();
        let mut names = interfaces.iter().map(|interface| interface["name"].as_str().unwrap());
        names.find(|name| name.starts_with("veth")).unwrap().to_owned()
    }

    /// The answer of the gateway about a name.
    #[track_caller]
    fn ask(&self, name: &str, kind: u16) -> Message {
        Way::udp(GATEWAYS[0]).ask(&self.container, &Message::question(name, kind))
    }

    /// The answer, which has to have these addresses.
    #[track_caller]
    fn finds(&self, name: &str, ips: &[&str]) {
        let kind = if ips[0].contains(':') { wire::AAAA } else { A };
        let answer = self.ask(name, kind);
        assert_eq!(answer.rcode(), wire::NOERROR, "{answer:?}");
        assert_eq!(answer.ips(), parsed(ips), "{name}");
    }

    /// Whether the gateway answers about a name at all.
    fn is_answered(&self, name: &str) -> bool {
        Way::udp(GATEWAYS[0]).is_answered(&self.container, &Message::question(name, A))
    }

    /// Whether a TCP connection comes about, and carries data.
    fn reaches(&self, ip: &str, port: u16) -> bool {
        connect(&self.container, ip, port).is_ok_and(|mut stream| client::is_alive(&mut stream))
    }
}

/// Sorted addresses.
fn parsed(ips: &[&str]) -> Vec<IpAddr> {
    let mut ips: Vec<IpAddr> = ips.iter().map(|ip| ip.parse().unwrap()).collect();
    ips.sort_unstable();
    ips
}

/// What the name server outside knows at the beginning.
fn zone() -> Vec<Record> {
    vec![
        Record::address("api.example.org", "192.0.2.7"),
        Record::address("api.example.org", "2001:db8:f::7"),
        Record::address("a.example.net", "203.0.113.10"),
        Record::address("b.example.net", "203.0.113.11"),
        Record::address("deep.b.example.net", "203.0.113.12"),
        Record::address("example.net", "203.0.113.13"),
        Record::cname("www.example.net", "edge.example.com"),
        Record::cname("edge.example.com", "host.edge.example.com"),
        Record::address("host.edge.example.com", "203.0.113.14"),
        Record::address("host.edge.example.com", "2001:db8:f::14"),
        Record::address("other.example.org", "203.0.113.15"),
        Record::address("xn--bcher-kva.example.org", "203.0.113.16"),
        Record::text("a.example.net", "text"),
    ]
}
