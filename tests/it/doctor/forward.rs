//! Packet filters of other software: doctor reports those that drop packets of containers, and only
//! those; its remedy lets the packets pass, and no others. Judged by traffic.

use serde_json::json;

use super::Ward;
use crate::firewall::firewalld::Firewalld;
use crate::portmap::tcp;
use crate::support::node::Container;
use crate::support::traffic::Place;

/// The addresses of the host and of a machine outside.
const HOST: &str = "198.51.100.1";
const OUTSIDE: &str = "198.51.100.2";

/// Rules, and whether packets pass: to the outside, and from there to a published port.
const FILTERS: [(&str, [bool; 2]); 14] = [
    // Docker's, with the chain for an administrator's own rules.
    (
        "iptables -P FORWARD DROP; iptables -N DOCKER-USER; iptables -A FORWARD -j DOCKER-USER;
         iptables -N DOCKER-FORWARD; iptables -A FORWARD -j DOCKER-FORWARD;
         iptables -A DOCKER-FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT;
         iptables -A DOCKER-FORWARD -i docker0 -j ACCEPT",
        [false, false],
    ),
    // ufw's.
    (
        "iptables -P FORWARD DROP; iptables -N ufw-before-forward; iptables -A FORWARD -j ufw-before-forward;
         iptables -A ufw-before-forward -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT;
         iptables -A ufw-before-forward -m conntrack --ctstate INVALID -j DROP;
         iptables -A ufw-before-forward -p icmp -m icmp --icmp-type 11 -j ACCEPT",
        [false, false],
    ),
    // Conditions whose outcome is not known: kube-proxy's mark behind Docker's policy, and the time.
    (
        "iptables -P FORWARD DROP; iptables -N KUBE-FORWARD; iptables -A FORWARD -j KUBE-FORWARD;
         iptables -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP;
         iptables -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT",
        [false, false],
    ),
    (
        "iptables -P FORWARD DROP; iptables -A FORWARD -m time --timestart 00:00 --timestop 00:01 -i x -o y -j ACCEPT;
         iptables -A FORWARD -m iprange --src-range 192.0.2.1-192.0.2.9 -j ACCEPT",
        [false, false],
    ),
    // A policy to accept, and a last rule that refuses.
    (
        "iptables -A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT;
         iptables -A FORWARD -m comment --comment last -j REJECT --reject-with icmp-host-prohibited",
        [false, false],
    ),
    // firewalld's.
    (
        "nft 'table inet firewalld { chain filter_FORWARD { type filter hook forward priority filter + 10;
           ct state { established, related } accept; ct status dnat accept; iifname lo accept;
           jump policies; ct state invalid drop; reject with icmpx admin-prohibited; }
         chain policies { iifname eth0 oifname eth0 return; iifname docker0 accept; }; }'",
        [false, true],
    ),
    (
        "nft 'table inet firewalld { chain filter_FORWARD { type filter hook forward priority filter + 10;
           ct state vmap { established : accept, related : accept }; jump ports; iifname cni0 accept;
           reject with icmpx admin-prohibited; }
         chain ports { meta l4proto tcp ct original proto-dst 9999 accept; }; }'",
        [true, false],
    ),
    // OpenWrt's.
    (
        "nft 'table inet fw4 { chain forward { type filter hook forward priority filter; policy drop;
           ct state established,related accept; iifname { br-lan, br-guest } jump lan; jump handle_reject; }
         chain lan { oifname wan accept; }
         chain handle_reject { meta l4proto tcp reject with tcp reset; reject with icmpx port-unreachable; }; }'",
        [false, false],
    ),
    // A rule that names the bridge, before others.
    (
        "nft 'table inet early { chain forwarding { type filter hook forward priority -50;
           iifname cni0 oifname uplink drop; }; }'",
        [false, false],
    ),
    // Podman's.
    (
        "nft 'table inet netavark { chain FORWARD { type filter hook forward priority filter; ct state invalid drop;
           jump ISOL1; ip daddr 10.99.0.0/16 ct state established,related accept; }
         chain ISOL1 { iifname podman0 oifname != podman0 jump ISOL2; }; chain ISOL2 { oifname podman0 drop; }; }'",
        [true, true],
    ),
    // A policy to drop, and rules that accept by address.
    (
        "nft 'table inet own { set pods { type ipv4_addr; flags interval; elements = { 10.88.0.0/16 }; }
         chain forward { type filter hook forward priority filter; policy drop; ct state established,related accept;
           ip saddr @pods accept; ip daddr 10.88.0.0/24 tcp dport 80 accept; }; }'",
        [true, true],
    ),
    // A drop that does not concern this traffic.
    (
        "nft 'table inet own { chain forward { type filter hook forward priority filter; policy accept;
           ip saddr 10.88.0.0/16 ip daddr 10.0.0.0/8 drop; oifname cni0 tcp dport 22 drop; iifname != cni0 oifname != cni0 drop; }; }'",
        [true, true],
    ),
    // A set that lacks the bridge.
    (
        "nft 'table ip own { set links { type ifname; elements = { docker0 }; }; chain forward { type filter hook forward priority filter;
           ct state established,related accept; iifname != @links oifname != @links drop; }; }'",
        [false, false],
    ),
    ("true", [true, true]),
];

/// A node with a network that is not attached yet, and a machine outside.
fn node_with_uplink() -> (Ward, Container) {
    let ward = Ward::with(&json!([
        {"type": "bridge", "bridge": "cni0", "isDefaultGateway": true, "ipMasq": true, "hairpinMode": true,
         "ipMasqBackend": "nftables", "ipam": {"type": "host-local", "dataDir": "LEASES", "subnet": "10.88.0.0/16"}},
        {"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}},
    ]));
    let outside = Container::new();
    ward.node.sh(&format!(
        "ip link add uplink type veth peer name inside; ip link set inside netns {} name eth0;
         ip addr add {HOST}/24 dev uplink; ip link set uplink up; ip route add default via {OUTSIDE}",
        outside.path()
    ));
    outside.sh(&format!("ip addr add {OUTSIDE}/24 dev eth0"));
    outside.sh("ip link set eth0 up");
    outside.sh(&format!("ip route add default via {HOST}"));
    (ward, outside)
}

#[test]
fn the_remedy_for_strict_forward_ports_of_firewalld_works() {
    let (ward, outside) = node_with_uplink();
    let Some(mut firewalld) = Firewalld::start(&ward.node) else { return };
    firewalld.configure("StrictForwardPorts=yes");
    if !firewalld.serve_itself() {
        return;
    }
    firewalld.send("zone.addInterface string:external string:uplink");
    firewalld.send("zone.addInterface string:trusted string:cni0");
    ward.attach(0);
    let is_served = || tcp(&outside, &ward.pods[0], &format!("{HOST}:8080"), 80).is_some();
    if is_served() {
        println!("SKIP: this firewalld has no StrictForwardPorts");
        return;
    }
    let (_, text) = ward.doctor();
    assert!(text.contains("set StrictForwardPorts=no in /etc/firewalld/firewalld.conf"), "{text}");
    firewalld.configure("StrictForwardPorts=no");
    firewalld.reload();
    assert!(is_served(), "{}", ward.node.sh("nft list table inet firewalld"));
    assert!(!ward.doctor().1.contains("StrictForwardPorts"));
}

#[test]
fn foreign_rules_are_evaluated_along_the_path_of_a_packet() {
    for (rules, passes) in FILTERS {
        let (ward, outside) = node_with_uplink();
        ward.attach(0);
        let pod = &ward.pods[0];
        let traffic = || {
            let out = pod.reaches_within(OUTSIDE, 1);
            [out, tcp(&outside, pod, &format!("{HOST}:8080"), 80).is_some()]
        };
        assert_eq!(traffic(), [true, true], "without rules of others");
        ward.node.sh(rules);
        assert_eq!(traffic(), passes, "{rules}");
        // The remedy is a command of firewalld, which does not know the imitation of its rules.
        if rules.contains("inet firewalld")
            && !ward.node.sh("command -v firewall-cmd || true").is_empty()
        {
            continue;
        }
        let (status, text) = ward.doctor();
        let is_alarm = text.contains("drops forwarded packets of network pods");
        assert_eq!(
            (is_alarm, status == Some(0)),
            // What cannot be judged is a note.
            (passes != [true; 2], passes == [true; 2] || text.contains(", unless rule")),
            "{rules}: {text}"
        );
        if !is_alarm {
            continue;
        }
        // Connections to the container itself, unless only their answers are dropped.
        let direct = rules.contains("early") || outside.reaches_within("10.88.0.2", 1);
        for diagnosis in ward.diagnoses() {
            ward.node.sh(diagnosis["remedy"].as_str().unwrap());
        }
        assert_eq!(traffic(), [true, true], "{rules}: {text}");
        assert_eq!(
            outside.reaches_within("10.88.0.2", 1),
            direct,
            "{rules}: the rest stays closed: {text}"
        );
        let (status, text) = ward.doctor();
        assert_eq!(status, Some(0), "{rules}: {text}");
    }
}
