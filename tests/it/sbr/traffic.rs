//! Each reply must leave through the uplink on which the request arrived.

use serde_json::json;

use crate::support::node::{Call, Container, Node};
use crate::support::traffic::{Place, tcp};

/// A pod with two uplinks, each to its own router, and a server behind both routers.
struct TwoUplinks {
    node: Node,
    pod: Container,
    routers: [Container; 2],
    server: Container,
}

const POD: [[&str; 2]; 2] = [["10.1.0.2", "10.2.0.2"], ["fd01::2", "fd02::2"]];

impl TwoUplinks {
    fn new() -> TwoUplinks {
        let (node, pod, server) = (Node::new(), Container::new(), Container::new());
        let routers = [Container::new(), Container::new()];
        for (i, router) in (1..).zip(&routers) {
            let name = if i == 1 { "eth0" } else { "net1" };
            cable(
                (&pod, name, [&format!("10.{i}.0.2/24"), &format!("fd0{i}::2/64")]),
                (router, "pod", [&format!("10.{i}.0.1/24"), &format!("fd0{i}::1/64")]),
            );
            cable(
                (
                    &server,
                    &format!("to{i}"),
                    [&format!("192.0.{i}.2/24"), &format!("fd1{i}::2/64")],
                ),
                (router, "server", [&format!("192.0.{i}.1/24"), &format!("fd1{i}::1/64")]),
            );
            router.sh("sysctl -q net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
            server.sh(&format!("ip route add 10.{i}.0.0/24 via 192.0.{i}.1"));
            server.sh(&format!("ip route add fd0{i}::/64 via fd1{i}::1"));
        }
        // The server uses the same source address through both routers.
        server.sh("ip link set lo up");
        for addr in ["203.0.113.9/32", "fd20::9/128"] {
            server.sh(&format!("ip addr add {addr} dev lo"));
        }
        for (i, router) in (1..).zip(&routers) {
            router.sh(&format!("ip route add 203.0.113.9 via 192.0.{i}.2"));
            router.sh(&format!("ip route add fd20::9 via fd1{i}::2"));
        }
        pod.sh("ip route add default via 10.1.0.1");
        pod.sh("ip route add default via fd01::1");
        TwoUplinks { node, pod, routers, server }
    }

    fn call(&self, verb: &str, ifname: &str, i: usize) -> Call {
        let prev = json!({"interfaces": [{"name": ifname}], "ips": [
            {"address": format!("10.{i}.0.2/24"), "gateway": format!("10.{i}.0.1"), "interface": 0},
            {"address": format!("fd0{i}::2/64"), "gateway": format!("fd0{i}::1"), "interface": 0},
        ]});
        let conf = json!({"cniVersion": "1.1.0", "name": "n", "type": "sbr", "prevResult": prev});
        self.node.call("sbr", verb).conf(&conf).ifname(ifname).netns(&self.pod.path())
    }

    /// The number of replies, out of twenty, from an address of the pod that each router forwards.
    fn answers(&self, address: &str) -> [u64; 2] {
        let v6 = address.contains(':');
        let (family, proto) = if v6 { ("ip6", "icmpv6") } else { ("ip", "icmp") };
        let source = if v6 { "fd20::9" } else { "203.0.113.9" };
        let ping = |options: &str| {
            self.server.sh(&format!("ping -n -q {options} -I {source} {address}"));
        };
        // Until neighbour resolution has completed.
        ping("-c 1 -w 20");
        for router in &self.routers {
            router.sh("nft flush ruleset");
            router.sh("nft add table inet t");
            router.sh("nft 'add chain inet t c { type filter hook forward priority 0; }'");
            let rule = format!("{family} saddr {address} {proto} type echo-reply counter");
            router.sh(&format!("nft add rule inet t c {rule}"));
        }
        ping("-i 0.01 -c 20 -W 5");
        [0, 1].map(|i: usize| {
            let text = self.routers[i].sh("nft list ruleset");
            let count = text.split("packets ").nth(1).unwrap().split(' ').next().unwrap();
            count.parse().unwrap()
        })
    }
}

/// A veth pair with an address of each family on both ends.
fn cable(one: (&Container, &str, [&str; 2]), two: (&Container, &str, [&str; 2])) {
    let (a, name, _) = one;
    let (b, peer, _) = two;
    a.sh(&format!("ip link add {name} type veth peer name {peer} netns {}", b.path()));
    for (place, name, addrs) in [one, two] {
        place.sh(&format!("ip link set {name} up"));
        place.sh(&format!("ip addr add {} dev {name}", addrs[0]));
        place.sh(&format!("ip addr add {} dev {name} nodad", addrs[1]));
    }
}

#[test]
fn replies_leave_by_the_uplink_of_their_address() {
    let net = TwoUplinks::new();
    for addresses in POD {
        assert_eq!(net.answers(addresses[0]), [20, 0]);
        assert_eq!(net.answers(addresses[1]), [20, 0], "without sbr, all by the default route");
    }
    net.call("ADD", "net1", 2).result();
    net.call("CHECK", "net1", 2).ok();
    for addresses in POD {
        assert_eq!(net.answers(addresses[0]), [20, 0]);
        assert_eq!(net.answers(addresses[1]), [0, 20]);
    }
    net.call("ADD", "eth0", 1).result();
    for addresses in POD {
        assert_eq!(net.answers(addresses[0]), [20, 0]);
        assert_eq!(net.answers(addresses[1]), [0, 20]);
        for address in addresses {
            tcp(&net.server, &net.pod, address);
        }
    }
    // IPv6 neighbours on both links are still reachable over link-local addresses.
    for ifname in ["eth0", "net1"] {
        net.pod.sh(&format!("ping -n -c 1 -W 5 ff02::1%{ifname}"));
    }
    net.call("DEL", "net1", 2).ok();
    assert_eq!(net.answers(POD[0][0]), [20, 0], "the other interface's table is still there");
}

#[test]
fn hints_use_the_source_address_of_the_subnet() {
    let net = TwoUplinks::new();
    let source = |target: &str| {
        let text = net.pod.sh(&format!("ip -o route get {target}"));
        let mut words = text.split_whitespace().skip_while(|word| *word != "src");
        words.nth(1).unwrap_or_default().to_owned()
    };
    net.call("ADD", "net1", 2).result();
    assert_eq!(source("10.2.0.1"), "10.1.0.2", "by the default route of eth0");
    net.call("DEL", "net1", 2).ok();
    let conf = |verb: &str| {
        let text = r#"{"cniVersion":"1.1.0","name":"n","type":"sbr","addSourceHints":true,
            "prevResult":{"interfaces":[{"name":"net1"}],"ips":[
            {"address":"10.2.0.2/24","gateway":"10.2.0.1","interface":0},
            {"address":"fd02::2/64","gateway":"fd02::1","interface":0}]}}"#;
        net.node.call("sbr", verb).stdin(text).ifname("net1").netns(&net.pod.path())
    };
    conf("ADD").result();
    assert_eq!((source("10.2.0.1").as_str(), source("fd02::1").as_str()), ("10.2.0.2", "fd02::2"));
    assert!(net.pod.reaches("10.2.0.1") && net.pod.reaches("fd02::1"));
    assert_eq!(net.answers(POD[0][1]), [0, 20]);
}
