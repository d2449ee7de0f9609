//! Live state is converted to the layout of the reference plugins: the traffic continues, and the
//! reference's DEL removes everything.

use cnibox::testing::netfilter::{PacketFilter, hand_over_to_reference};
use serde_json::{Value, json};

use crate::support::compare::{lacks_masquerading, peer};
use crate::support::net::merged;
use crate::support::node::{Call, Container, Node};
use crate::support::traffic::{self, Place};

/// A timeout that suffices on a slow machine.
const LIMIT: std::time::Duration = std::time::Duration::from_secs(10);

/// A node with a container attached by every plugin that has rules.
struct Pod {
    node: Node,
    container: Container,
    outside: Container,
    backend: &'static str,
    prev: Value,
}

fn hand_over() -> Vec<String> {
    hand_over_to_reference(&PacketFilter::new()).unwrap()
}

impl Pod {
    fn new(backend: &'static str) -> Pod {
        let (node, container, outside) = (Node::new(), Container::new(), Container::new());
        node.sh(&format!("ip link add out0 type veth peer name eth0 netns {}", outside.path()));
        node.sh("ip addr add 192.0.2.1/24 dev out0; ip link set out0 up");
        outside.sh("ip addr add 192.0.2.2/24 dev eth0");
        outside.sh("ip link set eth0 up");
        let mut pod = Pod { node, container, outside, backend, prev: Value::Null };
        for plugin in ["bridge", "portmap", "firewall"] {
            let result = pod.call(plugin, "ADD").result();
            pod.prev = result;
        }
        pod
    }

    fn call(&self, plugin: &str, verb: &str) -> Call {
        self.call_in("net", plugin, verb)
    }

    fn call_in(&self, network: &str, plugin: &str, verb: &str) -> Call {
        let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
            {"hostPort": 8081, "containerPort": 80, "protocol": "tcp", "hostIP": "192.0.2.1"}]);
        let mut ipam = self.node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
        ipam["routes"] = json!([{"dst": "0.0.0.0/0"}]);
        let keys = match plugin {
            "bridge" => json!({"bridge": "cni0", "isGateway": true, "ipMasq": true,
                "hairpinMode": true, "ipMasqBackend": self.backend, "macspoofchk": true,
                "ipam": ipam}),
            "portmap" => {
                json!({"backend": self.backend, "runtimeConfig": {"portMappings": ports}})
            }
            _ => json!({"backend": self.backend, "ingressPolicy": "same-bridge"}),
        };
        let common = json!({"cniVersion": "1.0.0", "name": network, "type": plugin});
        let mut conf = merged(&common, &keys);
        if !self.prev.is_null() {
            conf["prevResult"] = self.prev.clone();
        }
        self.node.call(plugin, verb).id("c1").conf(&conf).netns(&self.container.path())
    }

    /// Whether the reference supports CNI 1.1.0, and so nftables; older releases look for the
    /// iptables rules of each family in both.
    fn is_new(&self, program: &std::path::Path) -> bool {
        self.call("portmap", "VERSION").program(program).run().stdout.contains("1.1.0")
    }

    fn del_by_reference_if_it_knows_nftables(&self, plugin: &str) {
        let Some(program) = peer("handover").map(|dir| dir.join(plugin)) else { return };
        if self.is_new(&program) {
            let outcome = self.call(plugin, "DEL").program(&program).run();
            let is_known = lacks_masquerading(&outcome.stdout);
            assert!(outcome.status == Some(0) || is_known, "{outcome:?}");
            let rules = self.ruleset();
            let left = match plugin {
                "portmap" => "comment \"c1\"",
                "firewall" => "ip saddr 10.1.2.2  counter accept",
                _ => "masquerade comment",
            };
            assert!(!rules.contains(left), "{plugin} left {left}: {rules}");
        }
    }

    fn ruleset(&self) -> String {
        self.node.sh("nft -s list ruleset 2>/dev/null")
    }

    /// Asserts that the mapped ports work and that outbound packets have the host's source address.
    #[track_caller]
    fn works(&self) {
        for port in [8080, 8081] {
            let listener = self.container.within(|| std::net::TcpListener::bind("[::]:80"));
            let target = format!("192.0.2.1:{port}").parse().unwrap();
            let connect = || std::net::TcpStream::connect_timeout(&target, LIMIT);
            self.outside.within(connect).unwrap_or_else(|e| panic!("port {port}: {e}"));
            drop(listener);
        }
        let seen = traffic::udp(&self.container, &self.outside, "192.0.2.2");
        assert_eq!(seen.to_string(), "192.0.2.1", "the container is masqueraded");
    }
}

#[test]
fn nftables_state_is_converted_to_the_references_layout() {
    let mut pod = Pod::new("nftables");
    // A second network maps the same ports; the first mapping wins.
    let prev = pod.prev.clone();
    pod.prev = serde_json::from_str(&prev.to_string().replace("10.1.2.2/", "10.1.2.9/")).unwrap();
    pod.prev["ips"].as_array_mut().unwrap().truncate(1);
    pod.call_in("second", "portmap", "ADD").result();
    pod.prev = prev;
    pod.works();
    let done = hand_over();
    assert_eq!(done.len(), 4, "{done:?}");
    pod.works();
    let rules = pod.ruleset();
    assert!(!rules.contains("cnibox"), "{rules}");
    let mac = pod.prev["interfaces"][2]["mac"].as_str().unwrap();
    for expected in [
        // The reference plugins' rules, as `nft` prints them.
        "ip saddr 10.1.2.2 ip daddr != 10.1.2.0/24 masquerade comment ",
        "ip6 saddr 2001:db8:1::2 ip6 daddr != 2001:db8:1::/64 masquerade comment ",
        "ip daddr 192.0.2.1 tcp dport 8081 dnat to 10.1.2.2:80 comment \"c1\"",
        "tcp dport 8080 dnat to 10.1.2.2:80 comment \"c1\"",
        "tcp dport 8080 dnat to [2001:db8:1::2]:80 comment \"c1\"",
        "ip saddr 10.1.2.2 ip daddr 10.1.2.2 masquerade comment \"c1\"",
        "ip saddr 127.0.0.1 ip daddr 10.1.2.2 masquerade comment \"c1\"",
        "ip6 saddr 2001:db8:1::2 ip6 daddr 2001:db8:1::2 masquerade comment \"c1\"",
        "jump cni-br-iface-c1-eth0 comment \"macspoofchk-c1-eth0\"",
        &format!("ether saddr {mac} return comment \"macspoofchk-c1-eth0\""),
    ] {
        assert_eq!(rules.matches(expected).count(), 1, "{expected}: {rules}");
    }
    assert_eq!(rules.matches("fib daddr type local jump hostports_all").count(), 4, "{rules}");
    assert_eq!(hand_over(), [""; 0], "nothing is left to hand over");
    assert_eq!(pod.ruleset(), rules);
    for plugin in ["firewall", "portmap", "bridge"] {
        pod.del_by_reference_if_it_knows_nftables(plugin);
        // DEL of cnibox deletes the reference's layout too.
        pod.call(plugin, "DEL").ok();
    }
    let rules = pod.ruleset();
    assert!(!rules.contains("10.1.2.2") && !rules.contains("c1"), "{rules}");
}

#[test]
fn the_reference_deletes_what_was_handed_over_in_iptables() {
    let Some(reference) = peer("handover") else { return };
    let pod = Pod::new("iptables");
    let first = pod.ruleset();
    let ports = json!([{"hostPort": 8082, "containerPort": 80, "protocol": "tcp"}]);
    let keys = json!({"runtimeConfig": {"portMappings": ports}, "prevResult": pod.prev,
        "cniVersion": "1.0.0", "name": "net", "type": "portmap", "backend": "iptables"});
    let mut other = keys.clone();
    other["prevResult"]["interfaces"][2]["name"] = json!("eth1");
    other["prevResult"]["ips"][0]["address"] = json!("10.1.2.9/24");
    other["prevResult"]["ips"][1]["address"] = json!("2001:db8:1::9/64");
    let on = |verb: &str| {
        pod.node.call("portmap", verb).id("c1").netns(&pod.container.path()).conf(&other)
    };
    on("ADD").ifname("eth1").result();
    assert_ne!(pod.ruleset(), first);
    let done = hand_over();
    let two = ["source-MAC checks: 1", "port mappings of second interfaces: 2"];
    assert_eq!(done, two.map(|what| format!("{what} handed over")));
    let rules = pod.ruleset();
    assert!(!rules.contains("CNIBOX"), "{rules}");
    pod.works();
    if pod.is_new(&reference.join("portmap")) {
        pod.call("portmap", "CHECK").program(reference.join("portmap")).ok();
    }
    for plugin in ["firewall", "portmap"] {
        pod.call(plugin, "DEL").program(reference.join(plugin)).ok();
    }
    pod.call("bridge", "DEL").program(reference.join("bridge")).ok();
    let rules = pod.ruleset();
    assert!(!rules.contains("10.1.2.2") && !rules.contains("CNI-DN-"), "{rules}");
}
