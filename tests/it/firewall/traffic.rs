//! Packets: outbound traffic and its replies under a default-drop policy, and reachability with
//! each ingress policy.

use std::io::Read;
use std::time::Duration;

use nix::libc;
use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};

use super::BACKENDS;
use crate::hostile::send_frame;
use crate::support::net::{Net, merged};
use crate::support::node::{Container, Node};
use crate::support::traffic::{PATIENCE, Place, tcp};

/// A container attached by `bridge` and `firewall`.
pub(super) struct Pod {
    pub(super) container: Container,
    pub(super) ips: Vec<String>,
    pub(super) result: Value,
}

/// Attaches a container to the bridge `br<n>` of network `n`.
pub(super) fn pod(node: &Node, n: u8, id: &str, keys: &Value) -> Pod {
    let container = Container::new();
    let mut ipam = node.host_local(&[&format!("10.{n}.0.0/24"), &format!("2001:db8:{n}::/64")]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    let bridge = Net::new(
        node,
        "bridge",
        "1.1.0",
        &json!({"name": format!("net{n}"), "bridge": format!("br{n}"), "isGateway": true, "ipam": ipam}),
    );
    let result = bridge.call("ADD", id).netns(&container.path()).result();
    let firewall = Net::new(node, "firewall", "1.1.0", keys);
    let firewall = firewall.with(&json!({"name": format!("net{n}"), "prevResult": result}));
    assert_eq!(firewall.call("ADD", id).netns(&container.path()).result(), result);
    let address =
        |ip: &Value| ip["address"].as_str().unwrap().split('/').next().unwrap().to_owned();
    let ips = result["ips"].as_array().unwrap().iter().map(address).collect();
    Pod { container, ips, result }
}

/// An external host, which is not behind a bridge.
pub(super) fn world(node: &Node) -> Pod {
    let container = Container::new();
    let mut ipam = node.host_local(&["10.9.0.0/24", "2001:db8:9::/64"]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    let ptp = Net::new(node, "ptp", "1.1.0", &json!({"name": "world", "ipam": ipam}));
    ptp.call("ADD", "world").netns(&container.path()).result();
    Pod { container, ips: vec!["10.9.0.2".into(), "2001:db8:9::2".into()], result: json!(null) }
}

#[track_caller]
pub(super) fn reaches(from: &Pod, to: &Pod, expected: bool, what: &str) {
    for ip in &to.ips {
        let seconds = if expected { PATIENCE } else { 1 };
        assert_eq!(from.container.reaches_within(ip, seconds), expected, "{what}: {ip}");
    }
}

#[test]
fn pods_have_egress_and_replies_under_a_default_drop() {
    for backend in BACKENDS {
        let node = Node::new();
        let outside = world(&node);
        let inside = pod(&node, 1, "c1", &json!({"backend": backend}));
        let stranger = world_like(&node);
        match backend {
            "nftables" => {
                node.sh("nft \"chain inet cnibox_firewall forward { policy drop; }\"");
            }
            _ => {
                node.sh("iptables -P FORWARD DROP; ip6tables -P FORWARD DROP");
            }
        }
        reaches(&inside, &outside, true, backend);
        for ip in &outside.ips {
            tcp(&inside.container, &outside.container, ip);
        }
        reaches(&outside, &inside, false, backend);
        reaches(&stranger, &outside, false, "no pod of ours");
        // Another ADD does not change the node's policy.
        let second = pod(&node, 1, "c2", &json!({"backend": backend}));
        reaches(&second, &outside, true, backend);
        reaches(&outside, &second, false, backend);
    }
}

/// A second external host, without a rule of its own.
fn world_like(node: &Node) -> Pod {
    let container = Container::new();
    let mut ipam = node.host_local(&["10.8.0.0/24", "2001:db8:8::/64"]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    let ptp = Net::new(node, "ptp", "1.1.0", &json!({"name": "stranger", "ipam": ipam}));
    ptp.call("ADD", "stranger").netns(&container.path()).result();
    Pod { container, ips: vec!["10.8.0.2".into(), "2001:db8:8::2".into()], result: json!(null) }
}

#[test]
fn rules_of_the_administrator_precede() {
    let node = Node::new();
    let outside = world(&node);
    let inside = pod(&node, 1, "c1", &json!({"backend": "nftables"}));
    reaches(&inside, &outside, true, "before");
    node.sh("nft add rule inet cnibox_firewall admin ip saddr 10.1.0.0/24 drop");
    node.sh("nft add rule inet cnibox_firewall admin ip6 saddr 2001:db8:1::/64 drop");
    reaches(&inside, &outside, false, "after");
}

#[test]
fn ingress_policies_limit_traffic_between_pods() {
    for backend in BACKENDS {
        for (policy, neighbours, strangers) in
            [("open", true, true), ("same-bridge", true, false), ("isolated", false, false)]
        {
            let node = Node::new();
            // iptables sees bridged packets by br_netfilter only; nftables does not need the
            // module.
            let call = u8::from(backend == "iptables");
            for family in ["iptables", "ip6tables"] {
                node.sh(&format!("modprobe -q br_netfilter || true; echo {call} >/proc/sys/net/bridge/bridge-nf-call-{family}"));
            }
            let keys = json!({"backend": backend, "ingressPolicy": policy});
            let outside = world(&node);
            let [one, two] = ["c1", "c2"].map(|id| pod(&node, 1, id, &keys));
            let far = pod(&node, 2, "c3", &keys);
            let what = |text: &str| format!("{backend}, {policy}: {text}");
            reaches(&one, &outside, true, &what("out"));
            reaches(&outside, &one, true, &what("in from no bridge"));
            reaches(&one, &two, neighbours, &what("neighbours"));
            reaches(&one, &far, strangers, &what("to another bridge"));
            reaches(&far, &two, strangers, &what("from another bridge"));
            let gateways = Pod {
                container: Container::new(),
                ips: vec!["10.1.0.1".into(), "2001:db8:1::1".into()],
                result: json!(null),
            };
            reaches(&one, &gateways, true, &what("the gateway"));
        }
    }
}

/// Frames between neighbours: a name, the `EtherType`, and the beginning of the payload.
const FRAMES: [(&str, &[u8]); 9] = [
    ("IPv4", &[0x08, 0x00]),
    ("IPv6", &[0x86, 0xdd]),
    ("ARP", &[0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 2]),
    ("802.1Q", &[0x81, 0x00, 0, 10, 0x08, 0x00]),
    ("QinQ", &[0x88, 0xa8, 0, 10, 0x81, 0x00, 0, 30, 0x08, 0x00]),
    ("two tags", &[0x81, 0x00, 0, 10, 0x81, 0x00, 0, 30, 0x08, 0x00]),
    ("PPPoE", &[0x88, 0x64, 0x11, 0, 0, 1, 0, 0x20, 0, 0x21]),
    ("MPLS", &[0x88, 0x47, 0, 0, 0x11, 0x40]),
    ("private", &[0x88, 0xb5]),
];

/// The frames that arrive, sent to the neighbour's MAC and to the broadcast address.
fn arriving(from: &Pod, to: &Pod) -> Vec<&'static str> {
    let octets = |pod: &Pod| -> Vec<u8> {
        let mac = pod.result["interfaces"][2]["mac"].as_str().unwrap();
        mac.split(':').map(|octet| u8::from_str_radix(octet, 16).unwrap()).collect()
    };
    let (source, target) = (octets(from), octets(to));
    let all = i32::from(u16::try_from(libc::ETH_P_ALL).unwrap().to_be());
    let open = || Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(all))).unwrap();
    let mut socket = to.container.run(open);
    socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut arrived = Vec::new();
    for (at, (name, kind)) in FRAMES.iter().enumerate() {
        let mark = [0xa5, 0x5a, u8::try_from(at).unwrap(), 0x7e];
        for target in [&target[..], &[0xff; 6]] {
            let frame = [target, &source, kind, &mark, &[0; 46]].concat();
            send_frame(&from.container, &frame);
        }
        let mut buffer = [0; 256];
        while let Ok(length) = socket.read(&mut buffer) {
            if buffer[..length].windows(4).any(|window| window == mark) {
                arrived.push(*name);
                break;
            }
        }
    }
    arrived
}

/// Isolated containers exchange no frames of any `EtherType`.
#[test]
fn isolated_neighbours_do_not_reach_each_other() {
    let every: Vec<&str> = FRAMES.iter().map(|(name, _)| *name).collect();
    for backend in BACKENDS {
        for (policy, passes) in [("same-bridge", true), ("isolated", false)] {
            let node = Node::new();
            let keys = json!({"backend": backend, "ingressPolicy": policy});
            // br_netfilter drops malformed packets.
            for family in ["iptables", "ip6tables"] {
                node.sh(&format!("echo 0 >/proc/sys/net/bridge/bridge-nf-call-{family} || true"));
            }
            let [one, two] = ["c1", "c2"].map(|id| pod(&node, 1, id, &keys));
            let expected = if passes { every.clone() } else { Vec::new() };
            assert_eq!(arriving(&one, &two), expected, "{backend}, {policy}");
            assert!(one.container.reaches("10.1.0.1"), "{backend}, {policy}: the gateway");
            let firewall = |pod: &Pod| {
                let keys = json!({"name": "net1", "prevResult": pod.result});
                Net::new(
                    &node,
                    "firewall",
                    "1.1.0",
                    &merged(&keys, &json!({"backend": backend, "ingressPolicy": policy})),
                )
            };
            let call =
                |verb, id, pod: &Pod| firewall(pod).call(verb, id).netns(&pod.container.path());
            call("CHECK", "c1", &one).ok();
            if policy == "isolated" {
                node.sh("nft flush chain bridge cnibox_firewall forward");
                assert_eq!(arriving(&one, &two), every, "{backend}: the rules are what drops them");
                assert_eq!(call("CHECK", "c1", &one).error().code, 999);
                call("ADD", "c2", &two).result();
                assert!(arriving(&one, &two).is_empty(), "{backend}: they are back");
                node.sh("nft flush chain bridge cnibox_firewall forward");
                firewall(&one).call("STATUS", "").ok();
                assert!(arriving(&one, &two).is_empty(), "{backend}: by STATUS");
                // A flush of the ruleset also deletes the set of isolated ports; ADD restores every
                // port.
                node.sh("nft flush ruleset");
                call("ADD", "c2", &two).result();
                assert!(arriving(&one, &two).is_empty(), "{backend}: all of it is back");
                call("DEL", "c1", &one).ok();
                assert!(arriving(&one, &two).is_empty(), "{backend}: one is still isolated");
            }
            call("DEL", "c2", &two).ok();
            let ports = node.sh("nft list set bridge cnibox_firewall ports 2>/dev/null || true");
            assert!(!ports.contains("veth"), "{backend}: {ports}");
        }
    }
}
