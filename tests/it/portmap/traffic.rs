//! Packets through mapped ports from every origin, and packets without a mapping.

use std::net::UdpSocket;

use serde_json::{Value, json};

use super::{ALL, LIMIT, Pod, Ports, Rules, asks, mapping, patiently, tcp, udp};
use crate::support::net::Net;
use crate::support::node::{Container, eventually, exists};
use crate::support::strace;
use crate::support::traffic::Place;

fn web() -> Value {
    json!([mapping(8080, 80, "tcp"), mapping(5353, 53, "udp")])
}

#[test]
fn mapped_ports_are_reachable_from_everywhere() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (pod, sibling, peer) = (ports.pod("c1"), ports.pod("c2"), ports.peer());
        ports.add(&pod, &web());
        let server = &pod.container;
        assert!(peer.reaches("2001:db8:1::2"), "the kernel is done with IPv6");
        for (host, source) in [("192.0.2.1", "192.0.2.2"), ("[2001:db8:9::1]", "2001:db8:9::2")] {
            let (http, dns) = (format!("{host}:8080"), format!("{host}:5353"));
            let source = Some(source.parse().unwrap());
            assert_eq!(tcp(&peer, server, &http, 80), source, "{rules:?} {host} keeps the client");
            assert_eq!(udp(&peer, server, &dns, 53), source, "{rules:?} {host}");
            assert!(tcp(&ports.node, server, &http, 80).is_some(), "{rules:?} host to {host}");
            assert!(udp(&ports.node, server, &dns, 53).is_some(), "{rules:?} host to {host}");
            assert!(tcp(server, server, &http, 80).is_some(), "{rules:?} hairpin to {host}");
            let seen = tcp(&sibling.container, server, &http, 80);
            assert!(seen.is_some(), "{rules:?} sibling to {host}");
            assert!(udp(&sibling.container, server, &dns, 53).is_some(), "{rules:?} {host}");
        }
        assert!(tcp(&ports.node, server, "127.0.0.1:8080", 80).is_some(), "{rules:?} localhost");
        assert!(udp(&ports.node, server, "127.0.0.1:5353", 53).is_some(), "{rules:?} localhost");
        assert!(tcp(&ports.node, server, "10.1.2.2:80", 80).is_some(), "{rules:?} directly");
        ports.del(&pod, &web());
        assert_eq!(tcp(&peer, server, "192.0.2.1:8080", 80), None, "{rules:?}");
        assert_eq!(tcp(&ports.node, server, "127.0.0.1:8080", 80), None, "{rules:?}");
    }
}

/// Where bridged packets pass iptables. Lint notes it
/// (`lint::missing_hairpin_mode_for_own_ports_is_reported`).
#[test]
fn own_ports_need_hairpin_mode_with_br_netfilter() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        if !exists("/proc/sys/net/bridge/bridge-nf-call-iptables") {
            println!("skipped: no br_netfilter");
            return;
        }
        let (pod, _peer) = (ports.pod("c1"), ports.peer());
        ports.add(&pod, &web());
        let port = pod.prev["interfaces"][1]["name"].as_str().unwrap();
        for (passes, hairpin, reaches) in
            [("1", "on", true), ("1", "off", false), ("0", "off", true), ("0", "on", true)]
        {
            ports.node.sh(&format!("echo {passes} > /proc/sys/net/bridge/bridge-nf-call-iptables"));
            ports.node.sh(&format!("bridge link set dev {port} hairpin {hairpin}"));
            let seen = tcp(&pod.container, &pod.container, "192.0.2.1:8080", 80);
            assert_eq!(seen.is_some(), reaches, "{rules:?} {passes} {hairpin}");
        }
    }
}

/// CVE-2025-67499.
#[test]
fn traffic_to_other_destinations_is_not_changed() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (pod, sibling, peer) = (ports.pod("c1"), ports.pod("c2"), ports.peer());
        let elsewhere = ports.outside("other", "203.0.113", "2001:db8:a");
        let host_ip = json!([mapping(8080, 80, "tcp"), mapping(5353, 53, "udp"),
            {"hostPort": 9090, "containerPort": 80, "protocol": "tcp", "hostIP": "203.0.113.2"}]);
        ports.add(&pod, &host_ip);
        for target in ["203.0.113.2", "[2001:db8:a::2]"] {
            let http = format!("{target}:8080");
            assert!(tcp(&peer, &elsewhere, &http, 8080).is_some(), "{rules:?} {target}");
            assert!(tcp(&ports.node, &elsewhere, &http, 8080).is_some(), "{rules:?} {target}");
            assert!(tcp(&sibling.container, &elsewhere, &http, 8080).is_some(), "{rules:?}");
            assert!(tcp(&pod.container, &elsewhere, &http, 8080).is_some(), "{rules:?}");
            let dns = format!("{target}:5353");
            assert!(udp(&sibling.container, &elsewhere, &dns, 5353).is_some(), "{rules:?}");
        }
        let odd = tcp(&peer, &elsewhere, "203.0.113.2:9090", 9090);
        assert!(odd.is_some(), "{rules:?}: a hostIP that the host does not have");
    }
}

#[test]
fn a_host_ip_limits_the_mapping_to_this_address() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (pod, peer) = (ports.pod("c1"), ports.peer());
        let on = |ip: &str| json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ip}]);
        let from_peer = |target: &str| tcp(&peer, &pod.container, target, 80).is_some();
        let from_host = |target: &str| tcp(&ports.node, &pod.container, target, 80).is_some();
        let (v4, v6) = ("192.0.2.1:8080", "[2001:db8:9::1]:8080");
        for (ip, expected) in [
            ("192.0.2.1", [true, false, false, false]),
            ("10.1.2.1", [false, false, true, false]),
            ("2001:db8:9::1", [false, true, false, false]),
            ("0.0.0.0", [true, false, true, true]),
            ("::", [false, true, false, false]),
            ("127.0.0.1", [false, false, false, true]),
        ] {
            ports.add(&pod, &on(ip));
            ports.call("CHECK", &pod, &on(ip)).ok();
            let look = || {
                let host = [from_host("10.1.2.1:8080"), from_host("127.0.0.1:8080")];
                [from_peer(v4), from_peer(v6), host[0], host[1]]
            };
            // The bridge may drop the first IPv6 multicasts until its multicast snooping has learnt
            // the listeners.
            let seen = (0..3).map(|_| look()).find(|seen| *seen == expected);
            assert!(seen.is_some(), "{rules:?} {ip}: {:?}", look());
            ports.del(&pod, &on(ip));
        }
    }
}

#[test]
fn sources_are_kept_or_translated_as_configured() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (pod, peer) = (ports.pod("c1"), ports.peer());
        let server = &pod.container;
        for (keys, outside, local) in [
            (json!({"masqAll": true}), "10.1.2.1", true),
            (json!({"snat": false}), "192.0.2.2", false),
            (json!({"snat": false, "masqAll": true}), "192.0.2.2", false),
        ] {
            ports.call_with("ADD", &pod, &web(), &keys).result();
            ports.call_with("CHECK", &pod, &web(), &keys).ok();
            let seen = tcp(&peer, server, "192.0.2.1:8080", 80);
            assert_eq!(seen, Some(outside.parse().unwrap()), "{rules:?} {keys}");
            let hairpin = tcp(server, server, "192.0.2.1:8080", 80).is_some();
            assert_eq!(hairpin, local, "{rules:?} {keys}");
            ports.call_with("DEL", &pod, &web(), &keys).ok();
        }
        assert_eq!(tcp(&peer, server, "192.0.2.1:8080", 80), None);
    }
}

#[test]
fn thirty_two_ports_are_mapped() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (pod, peer) = (ports.pod("c1"), ports.peer());
        let list: Vec<_> = (0..32).map(|n| mapping(9000 + n, 100 + n, "tcp")).collect();
        let list = json!(list);
        ports.add(&pod, &list);
        ports.call("CHECK", &pod, &list).ok();
        for n in [0, 14, 15, 31_u16] {
            let target = format!("192.0.2.1:{}", 9000 + n);
            assert!(tcp(&peer, &pod.container, &target, 100 + n).is_some(), "{rules:?} {target}");
        }
        ports.del(&pod, &list);
        assert!(!ports.state().contains("9000"));
    }
}

#[test]
fn earlier_udp_flows_follow_a_new_mapping() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (one, two, peer) = (ports.pod("c1"), ports.pod("c2"), ports.peer());
        // A single socket keeps a single conntrack entry, whatever happens to the mapping.
        let client = peer.run(|| UdpSocket::bind("0.0.0.0:4444").unwrap());
        let target = "192.0.2.1:5353".parse().unwrap();
        let host = UdpSocket::bind("0.0.0.0:5353").unwrap();
        client.send_to(b"x", target).unwrap();
        host.recv_from(&mut [0; 4]).unwrap();
        host.send_to(b"y", "192.0.2.2:4444").unwrap();
        client.recv_from(&mut [0; 4]).unwrap();
        drop(host);
        let dns = json!([mapping(5353, 53, "udp")]);
        ports.add(&one, &dns);
        assert!(asks(&client, &one.container, target, 53).is_some(), "{rules:?}: ADD flushes");
        ports.del(&one, &dns);
        let entries = ports.node.sh("conntrack -L -p udp --orig-port-dst 5353 2>/dev/null");
        assert!(!entries.contains("dport=5353"), "{rules:?}: DEL flushes: {entries}");
        ports.add(&two, &dns);
        assert!(asks(&client, &two.container, target, 53).is_some(), "{rules:?}");
    }
}

#[test]
fn udp_flows_of_other_mappings_are_kept() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (one, two, peer) = (ports.pod("c1"), ports.pod("c2"), ports.peer());
        let elsewhere = ports.outside("other", "203.0.113", "2001:db8:a");
        let dns = json!([mapping(53, 53, "udp")]);
        let other = json!([mapping(54, 53, "udp")]);
        ports.add(&two, &other);
        let ask = |client: &Container, port: u16, server: &Container, target: &str| {
            let near = client.run(|| UdpSocket::bind(("0.0.0.0", port)).unwrap());
            assert!(asks(&near, server, target.parse().unwrap(), 53).is_some(), "{target}");
        };
        // Forwarded to another resolver, to another mapping, and directly to a container.
        ask(&peer, 4001, &elsewhere, "203.0.113.2:53");
        ask(&peer, 4002, &two.container, "192.0.2.1:54");
        ask(&peer, 4003, &two.container, "10.1.2.3:53");
        let tracked = || {
            let list = ports.node.sh("conntrack -L -p udp 2>/dev/null");
            let ids = list.lines().filter_map(|line| line.split_once("sport=")?.1.split_once(' '));
            let mut ids: Vec<_> = ids.map(|(port, _)| port.to_owned()).collect();
            ids.retain(|port| port.starts_with("400"));
            ids.sort();
            ids
        };
        assert_eq!(tracked(), ["4001", "4002", "4003"], "{rules:?}");
        ports.add(&one, &dns);
        assert_eq!(tracked(), ["4001", "4002", "4003"], "{rules:?}: after ADD");
        ask(&peer, 4004, &one.container, "192.0.2.1:53");
        ports.add(&one, &dns);
        assert_eq!(tracked().len(), 4, "{rules:?}: what is translated to it already stays");
        ports.del(&one, &dns);
        assert_eq!(tracked(), ["4001", "4002", "4003"], "{rules:?}: after DEL");
        // The address is known only from the rules.
        ask(&peer, 4005, &two.container, "192.0.2.1:54");
        let net = ports.net(&json!([]), &json!({}));
        ports.path(net.call("DEL", "c2").without("CNI_NETNS")).ok();
        assert_eq!(tracked(), ["4001"], "{rules:?}: DEL that is told nothing");
    }
}

/// `route_localnet` must not expose the host's loopback addresses to containers: neither through a
/// service, nor through a mapping restricted to the host, nor through packets with a loopback
/// source.
#[test]
fn loopback_addresses_of_the_host_are_not_exposed() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (pod, sibling) = (ports.pod("c1"), ports.pod("c2"));
        let list = json!([mapping(8080, 80, "tcp"),
            {"hostPort": 82, "containerPort": 80, "protocol": "tcp", "hostIP": "127.0.0.1"}]);
        ports.add(&pod, &list);
        let thief = &sibling.container;
        thief.sh("ip addr flush dev lo");
        thief.sh(
            "sh -c 'ip route flush table local 127.0.0.0/8; ip route add 127.0.0.1 via 10.1.2.1'",
        );
        thief.sh("sh -c 'echo 1 > /proc/sys/net/ipv4/conf/eth0/route_localnet'");
        thief.sh("ip addr add 127.0.0.2/32 dev eth0");
        let service = || tcp(thief, &ports.node, "127.0.0.1:7070", 7070).is_some();
        let mapped = || tcp(thief, &pod.container, "127.0.0.1:82", 80).is_some();
        let forged = || {
            let far = patiently(|| UdpSocket::bind("10.1.2.1:9997"));
            far.set_read_timeout(Some(LIMIT / 5)).unwrap();
            let near = thief.within(|| UdpSocket::bind("127.0.0.2:0").unwrap());
            near.send_to(b"x", "10.1.2.1:9997").unwrap();
            far.recv_from(&mut [0]).is_ok()
        };
        assert!(tcp(thief, &ports.node, "10.1.2.1:7070", 7070).is_some());
        assert_eq!([service(), mapped(), forged()], [false; 3], "{rules:?}");
        for target in ["127.0.0.1:82", "127.0.0.1:8080"] {
            assert!(tcp(&ports.node, &pod.container, target, 80).is_some(), "{rules:?} {target}");
        }
        ports.call("CHECK", &pod, &list).ok();
        ports.node.sh("nft flush chain inet cnibox_localhost prerouting");
        assert_eq!([service(), mapped(), forged()], [true; 3], "{rules:?}: the guard closes it");
        let error = ports.call("CHECK", &pod, &list).error();
        assert!(error.code == 999 && error.msg.contains("cnibox_localhost"), "{error:?}");
        ports.call("STATUS", &pod, &list).ok();
        assert_eq!([service(), mapped(), forged()], [false; 3], "{rules:?}: STATUS closes it");
        ports.node.sh("nft flush chain inet cnibox_localhost prerouting");
        // The ADD of any plugin that connects a container closes them again.
        let ipam = ports.node.host_local(&["10.9.0.0/24"]);
        let other = Net::new(&ports.node, "ptp", "1.1.0", &json!({"ipam": ipam}));
        other.call("ADD", "c9").netns(&Container::new().path()).result();
        assert_eq!([service(), mapped(), forged()], [false; 3], "{rules:?}");
        ports.node.sh("nft flush chain inet cnibox_localhost prerouting");
        ports.add(&sibling, &json!([mapping(8081, 80, "tcp")]));
        ports.call("CHECK", &pod, &list).ok();
        // Also without any mapping, because `route_localnet` stays enabled.
        ports.del(&pod, &list);
        ports.del(&sibling, &json!([]));
        assert_eq!([service(), forged()], [false; 2], "{rules:?}");
    }
}

/// On kernels without `nf_tables`, iptables-legacy has the same rules.
#[test]
fn loopback_addresses_are_not_exposed_without_nf_tables() {
    let ports = Ports::new(Rules::Legacy, "1.1.0");
    let pod = ports.pod("c1");
    let list = json!([mapping(8080, 80, "tcp")]);
    let add = ports.call("ADD", &pod, &list);
    let (_, calls) = strace::record(&ports.node, &add);
    let opened =
        |call: &strace::Syscall| call.name == "socket" && call.text.contains("NETLINK_NETFILTER");
    let socket = calls.into_iter().find(opened).unwrap();
    ports.del(&pod, &list);
    // Not EPROTONOSUPPORT: musl repeats socket(2) then, without SOCK_CLOEXEC.
    let (outcome, injected) = socket.run(&ports.node, &add, "error=EAFNOSUPPORT");
    assert!(injected && outcome.status == Some(0), "{outcome:?}");
    let raw = ports.node.sh("iptables-legacy -t raw -S PREROUTING");
    for side in ["-d", "-s"] {
        assert!(raw.contains(&format!("-A PREROUTING {side} 127.0.0.0/8 ! -i lo")), "{raw}");
    }
    // Without a record, so that it is the same socket.
    ports.del(&pod, &list);
    let (outcome, _) = socket.run(&ports.node, &add, "error=EAFNOSUPPORT");
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert_eq!(ports.node.sh("iptables-legacy -t raw -S PREROUTING"), raw);
    assert!(tcp(&ports.node, &pod.container, "127.0.0.1:8080", 80).is_some());
}

/// Another program's DNAT to 127.0.0.1 is intended and must work.
#[test]
fn what_others_redirect_to_a_loopback_address_passes() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (pod, peer) = (ports.pod("c1"), ports.peer());
        ports.add(&pod, &web());
        ports.node.sh("echo 1 > /proc/sys/net/ipv4/conf/peer/route_localnet");
        ports.node.sh("iptables -t nat -I PREROUTING -d 192.0.2.1 -p tcp --dport 7000 -j DNAT --to 127.0.0.1:7070");
        assert!(tcp(&peer, &ports.node, "192.0.2.1:7000", 7070).is_some(), "{rules:?}");
    }
}

/// `route_localnet` is shared by all containers of the bridge.
#[test]
fn a_failed_add_keeps_localhost_ports_of_others() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (one, two, three) = (ports.pod("c1"), ports.pod("c2"), ports.pod("c3"));
        let (taken, free) = (json!([mapping(8080, 80, "tcp")]), json!([mapping(8081, 80, "tcp")]));
        ports.add(&one, &taken);
        ports.node.sh("echo 0 > /proc/sys/net/ipv4/conf/cni0/route_localnet");
        let failing = ports.call("ADD", &two, &taken).spawn().unwrap();
        eventually("it is on", || {
            ports.node.sh("cat /proc/sys/net/ipv4/conf/cni0/route_localnet").trim() == "1"
        });
        ports.add(&three, &free);
        assert!(!failing.wait_with_output().unwrap().status.success());
        let reached = tcp(&ports.node, &three.container, "127.0.0.1:8081", 80);
        assert!(reached.is_some(), "{rules:?}");
    }
}

#[test]
fn configured_marks_and_conditions_are_used() {
    for rules in [Rules::Iptables, Rules::Legacy] {
        let ports = Ports::new(rules, "1.1.0");
        let (pod, peer) = (ports.pod("c1"), ports.peer());
        let from = |place: &Container| tcp(place, &pod.container, "192.0.2.1:8080", 80).is_some();
        let not_the_peer = json!({"conditionsV4": ["!", "-s", "192.0.2.0/24"], "markMasqBit": 5});
        ports.call_with("ADD", &pod, &web(), &not_the_peer).result();
        ports.call_with("CHECK", &pod, &web(), &not_the_peer).ok();
        let state = ports.state();
        assert!(state.contains("--set-xmark 0x20/0x20") && state.contains("--mark 0x20/0x20"));
        assert!(!from(&peer) && from(&pod.container), "{rules:?}");
        ports.call_with("DEL", &pod, &web(), &not_the_peer).ok();
        for family in ["iptables", "ip6tables"] {
            let program = ports.node.path("flavour").join(family);
            ports.node.sh(&format!("{} -t nat -N THEIRS", program.display()));
        }
        let theirs = json!({"externalSetMarkChain": "THEIRS"});
        ports.call_with("ADD", &pod, &web(), &theirs).result();
        ports.call_with("CHECK", &pod, &web(), &theirs).ok();
        assert!(ports.state().contains("-j THEIRS") && from(&peer), "{rules:?}");
        ports.call_with("DEL", &pod, &web(), &theirs).ok();
        assert!(!ports.state().contains("-j THEIRS"));
    }
}

#[test]
fn conditions_of_nftables_apply_to_their_container_only() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let (one, two, peer) = (ports.pod("c1"), ports.pod("c2"), ports.peer());
    let other = ports.outside("other", "198.51.100", "2001:db8:a");
    let reaches =
        |from: &Container, to: &Pod, target: &str| tcp(from, &to.container, target, 80).is_some();
    let keys = json!({"conditionsV4": ["ip", "saddr", "{", "192.0.2.0/24,", "10.9.9.9", "}"],
        "conditionsV6": ["ip6 saddr !=", "2001:db8:9::/64"]});
    let both = json!([mapping(8080, 80, "tcp"), mapping(5353, 53, "udp")]);
    let before = ports.state();
    ports.call_with("ADD", &one, &both, &keys).result();
    let first = ports.state();
    ports.add(&two, &json!([mapping(8081, 80, "tcp")]));
    ports.call_with("CHECK", &one, &both, &keys).ok();
    // The bridge's IPv6 may take a moment after the first attachment.
    assert!(ports.node.reaches("2001:db8:1::2") && ports.node.reaches("2001:db8:1::3"));
    for target in ["198.51.100.1:8081", "[2001:db8:a::1]:8081"] {
        assert!(reaches(&other, &two, target), "another container has no conditions");
    }
    assert!(reaches(&peer, &one, "192.0.2.1:8080"), "in the list");
    assert!(!reaches(&other, &one, "198.51.100.1:8080"), "not in the list");
    assert!(!reaches(&peer, &one, "[2001:db8:9::1]:8080"), "excluded");
    assert!(reaches(&other, &one, "[2001:db8:a::1]:8080"), "not excluded: {}", ports.state());
    ports.del(&two, &json!([mapping(8081, 80, "tcp")]));
    assert_eq!(ports.state(), first);
    // Another ADD with other conditions replaces the old ones.
    let turned = json!({"conditionsV4": ["iifname", "!=", "peer"]});
    ports.call_with("ADD", &one, &both, &turned).result();
    assert!(!reaches(&peer, &one, "192.0.2.1:8080"));
    assert!(reaches(&other, &one, "198.51.100.1:8080"));
    let handle = "nft -a list chain inet cnibox_portmap conditional | sed -n 's/.*# handle //p'";
    let handle = ports.node.sh(&format!("{handle} | tail -1"));
    let delete = "nft delete rule inet cnibox_portmap conditional handle";
    ports.node.sh(&format!("{delete} {handle}"));
    let error = ports.call_with("CHECK", &one, &both, &turned).error();
    assert!(error.msg.contains("1 of 2 rules"), "{error:?}");
    ports.del(&one, &json!([]));
    let left = ports.state();
    assert!(!left.contains("c1") && !left.contains("10.1.2.2"), "{left}");
    assert!(before.len() < left.len(), "the empty table stays");
}
