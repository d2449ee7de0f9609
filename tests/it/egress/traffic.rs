//! What passes and what does not: destinations, ports, replies, translated destinations, containers
//! without a policy.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpStream, UdpSocket};
use std::time::Duration;

use serde_json::json;

use super::{FAR, OUTSIDE, World, bind, datagram_arrives, list};
use crate::lane::{self, needs};
use crate::support::conflist::{Attached, Conflist};
use crate::support::net::GATEWAYS;
use crate::support::node::Container;
use crate::support::traffic::{Place, tcp, tcp_through};

#[test]
fn only_allowed_destinations_and_ports_are_reached() {
    let allow = json!([
        {"to": ["10.9.0.0/24", "2001:db8:9::/64"], "ports": ["udp/53", "udp/8000-8100"]},
        {"to": ["192.0.2.0/24"]},
    ]);
    let deny = json!([{"to": ["192.0.2.8/29"]}, {"to": ["10.9.0.0/24"], "ports": ["udp/8050"]}]);
    for kind in ["bridge", "ptp"] {
        let world = World::new(kind, &json!({"allow": allow, "deny": deny}));
        let [v4, v6] = OUTSIDE;
        for (ip, port, passes) in [
            (v4, 53, true),
            (v6, 53, true),
            (v4, 8000, true),
            (v6, 8100, true),
            (v4, 54, false),
            (v6, 7999, false),
            (v4, 8101, false),
            (v4, 8050, false),
            (v6, 8050, true),
            (FAR[0], 9, true),
            (FAR[1], 53, false),
            (FAR[3], 53, false),
        ] {
            assert_eq!(world.reaches(&world.outside, ip, port), passes, "{kind}: {ip} {port}");
        }
        assert!(world.inside.reaches(FAR[0]), "all protocols");
        assert!(
            !world.inside.reaches_within(v4, 1) && !world.inside.reaches_within(FAR[1], 1),
            "ping"
        );
        for gateway in GATEWAYS {
            assert!(!world.reaches(&world.node, gateway, 53), "{kind}: the host itself: {gateway}");
        }
        assert!(!world.reaches(&world.neighbour, "10.1.2.2", 53), "{kind}: the neighbour");
    }
}

#[test]
fn sandbox_reaches_the_internet_only() {
    for kind in ["bridge", "ptp"] {
        let world = World::new(kind, &json!({"profile": "sandbox"}));
        for (ip, passes) in [(FAR[0], true), (FAR[1], true), (FAR[2], false), (OUTSIDE[0], false)] {
            assert_eq!(world.reaches(&world.outside, ip, 4000), passes, "{kind}: {ip}");
        }
        // 2001:db8:f::7 is not on the link of the container.
        assert!(world.reaches(&world.outside, FAR[3], 4000), "{kind}");
        for gateway in GATEWAYS {
            assert!(world.reaches(&world.node, gateway, 53), "{kind}: DNS of the host: {gateway}");
            assert!(!world.reaches(&world.node, gateway, 54), "{kind}: the host itself: {gateway}");
        }
        assert!(
            !world.reaches(&world.node, "10.9.0.1", 4000),
            "{kind}: another address of the host"
        );
        for ip in ["10.1.2.2", "2001:db8:1::2"] {
            assert!(!world.reaches(&world.neighbour, ip, 4000), "{kind}: {ip}");
        }
    }
}

#[test]
fn replies_are_not_egress() {
    let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
    for kind in ["bridge", "ptp"] {
        let keys = json!({"capabilities": {"portMappings": true}, "runtimeConfig": {"portMappings": ports}});
        let world = World::new(kind, &keys);
        let portmap = json!({"type": "portmap", "runtimeConfig": {"portMappings": ports}});
        let portmap = Conflist::new(
            &world.node,
            json!({"cniVersion": "1.1.0", "name": "net", "plugins": [portmap]}),
        );
        portmap.call("ADD", &world.attached(), 0, Some(&world.result)).result();
        tcp_through(&world.outside, &world.inside, "10.9.0.1:8080", 80);
        // Also from ports that are not published: probes of the node, clients of a Service.
        for ip in [world.ip(false), world.ip(true)] {
            tcp(&world.outside, &world.inside, &ip);
            tcp(&world.node, &world.inside, &ip);
            tcp(&world.neighbour, &world.inside, &ip);
        }
        for place in [&world.outside, &world.neighbour] {
            assert!(place.reaches(&world.ip(false)) && place.reaches(&world.ip(true)), "ping");
        }
        let dials = world.inside.within(|| {
            let outside: SocketAddr = (Ipv4Addr::new(10, 9, 0, 2), 81).into();
            TcpStream::connect_timeout(&outside, Duration::from_millis(400)).is_ok()
        });
        assert!(!dials, "{kind}: a connection of its own");
    }
}

/// The address of a Service suffices, because translations are the administrator's.
#[test]
fn the_destination_that_the_container_writes_counts() {
    let world = World::new("bridge", &json!({"allow": [{"to": ["192.0.2.0/24"]}]}));
    // An allowed address that leads to the host outside and to the neighbour; and others that lead
    // to an allowed address and, from the host's own address, to the neighbour.
    world
        .node
        .sh("nft 'add table ip services; add chain ip services pre { type nat hook prerouting priority dstnat; }'");
    world
        .node
        .sh("nft 'add rule ip services pre ip daddr 192.0.2.7 udp dport 53 dnat to 10.9.0.2:53'");
    for (from, to) in [
        ("192.0.2.7 udp dport 54", "10.1.2.2:54"),
        ("198.51.100.7 udp dport 55", "192.0.2.7:55"),
        ("10.1.2.1 udp dport 56", "10.1.2.2:56"),
    ] {
        world.node.sh(&format!("nft 'add rule ip services pre ip daddr {from} dnat to {to}'"));
    }
    let arrives = |to: &str, place: &Container, port: u16| {
        let far = place.within(|| UdpSocket::bind(("0.0.0.0", port)).unwrap());
        far.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let near = world.inside.within(|| UdpSocket::bind("0.0.0.0:0").unwrap());
        (0..3).any(|_| near.send_to(b"x", (to, port)).is_ok() && far.recv(&mut [0; 4]).is_ok())
    };
    assert!(arrives("192.0.2.7", &world.outside, 53), "outside");
    assert!(arrives("192.0.2.7", &world.neighbour, 54), "the neighbour");
    assert!(!arrives("198.51.100.7", &world.outside, 55), "it leads to an allowed address");
    assert!(!arrives("10.1.2.1", &world.neighbour, 56), "a port of the host");
}

/// A network opens neither the host nor containers, also not those behind another bridge, whatever
/// address they have.
#[test]
fn networks_lead_to_no_container_and_not_to_the_host() {
    let wide = json!(["0.0.0.0/0", "::/0"]);
    for (to, host, near) in [
        (wide, false, false),
        (json!(["host"]), true, false),
        (json!(["neighbours"]), false, true),
        (json!(["host", "neighbours", "0.0.0.0/0", "::/0"]), true, true),
        (json!(["198.19.0.2", "2001:db8:c::2", "10.1.2.2", "10.1.2.1"]), true, true),
    ] {
        for kind in ["bridge", "ptp"] {
            let world = World::new(kind, &json!({"allow": [{"to": to}]}));
            let mut ipam = world.node.host_local(&["198.19.0.0/24", "2001:db8:c::/64"]);
            ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
            let others =
                json!({"type": "bridge", "bridge": "br1", "isGateway": true, "ipam": ipam});
            let others = json!({"cniVersion": "1.1.0", "name": "others", "plugins": [others]});
            let far = Container::new();
            Conflist::new(&world.node, others).add(&Attached::new("far", &far.path())).unwrap();
            assert!(world.node.reaches("2001:db8:c::2"));
            for ip in ["198.19.0.2", "2001:db8:c::2"] {
                assert_eq!(world.reaches(&far, ip, 53), near, "{kind} {to}: {ip}");
            }
            assert_eq!(world.reaches(&world.neighbour, "10.1.2.2", 53), near, "{kind} {to}");
            assert_eq!(world.reaches(&world.node, "10.1.2.1", 53), host, "{kind} {to}");
            let wide = to.to_string().contains("0.0.0.0/0");
            assert_eq!(world.reaches(&world.outside, FAR[0], 53), wide, "{kind} {to}");
            assert!(!world.reaches(&world.outside, FAR[2], 80), "{kind} {to}: metadata");
        }
    }
}

#[test]
fn allowed_neighbours_are_reached_on_the_bridge() {
    let world = World::new(
        "bridge",
        &json!({"allow": [{"to": ["10.1.2.2", "2001:db8:1::2"], "ports": ["udp/53"]}]}),
    );
    for ip in ["10.1.2.2", "2001:db8:1::2"] {
        assert!(world.reaches(&world.neighbour, ip, 53), "{ip}");
        assert!(!world.reaches(&world.neighbour, ip, 54), "{ip}");
    }
    let third = Container::new();
    let mut bare = list(&world.node, "bridge", &json!({}));
    bare.conf["plugins"].as_array_mut().unwrap().pop();
    bare.add(&Attached::new("third", &third.path())).unwrap();
    assert!(!world.reaches(&third, "10.1.2.4", 53), "another neighbour");
}

#[test]
fn an_allowed_broadcast_reaches_neighbours() {
    let world =
        World::new("bridge", &json!({"allow": [{"to": ["10.1.2.255"], "ports": ["udp/67"]}]}));
    let far = world.neighbour.within(|| UdpSocket::bind("0.0.0.0:67").unwrap());
    far.set_read_timeout(Some(Duration::from_millis(400))).unwrap();
    let near = world.inside.within(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    near.set_broadcast(true).unwrap();
    for (to, arrives) in
        [("10.1.2.255:67", true), ("10.1.2.255:68", false), ("255.255.255.255:67", false)]
    {
        near.send_to(to.as_bytes(), to).unwrap();
        assert_eq!(far.recv(&mut [0; 32]).is_ok(), arrives, "{to}");
    }
}

#[test]
fn link_local_addresses_lead_to_no_neighbour() {
    for has_policy in [false, true] {
        let world = World::new("bridge", &json!({"policy": "allow"}));
        if !has_policy {
            list(&world.node, "bridge", &json!({}))
                .call("DEL", &world.attached(), 1, Some(&world.result))
                .ok();
            world.node.sh(&format!("tc qdisc del dev {} ingress", world.end()));
        }
        let text = world.neighbour.sh("ip -6 -o addr show dev eth0 scope link");
        let ip =
            text.split_whitespace().nth(3).unwrap().split('/').next().unwrap().parse().unwrap();
        let index = world.inside.ip("link show eth0")[0]["ifindex"].as_u64().unwrap();
        let far = world.neighbour.within(|| bind(Ipv6Addr::UNSPECIFIED.into(), 53));
        far.set_read_timeout(Some(Duration::from_millis(400))).unwrap();
        let near = world.inside.within(|| bind(Ipv6Addr::UNSPECIFIED.into(), 0));
        let to = SocketAddrV6::new(ip, 53, 0, u32::try_from(index).unwrap());
        near.send_to(b"question", to).unwrap();
        assert_eq!(far.recv(&mut [0; 32]).is_ok(), !has_policy, "{ip}");
    }
}

#[test]
fn containers_without_a_policy_are_not_affected() {
    let world = World::new("bridge", &json!({}));
    for ip in [OUTSIDE[0], OUTSIDE[1], FAR[0], FAR[3]] {
        assert!(datagram_arrives(&world.neighbour, &world.outside, ip, 53), "{ip}");
    }
    assert!(datagram_arrives(&world.neighbour, &world.node, GATEWAYS[0], 53));
    assert!(datagram_arrives(&world.outside, &world.neighbour, "10.1.2.2", 53));
    assert!(
        datagram_arrives(&world.outside, &world.inside, "10.1.2.3", 53),
        "ingress is not limited"
    );
}

#[test]
fn an_add_after_del_has_its_own_policy() {
    let world = World::new("bridge", &json!({"allow": [{"to": ["192.0.2.0/24"]}]}));
    let other = json!({"allow": [{"to": ["198.51.100.0/24"]}]});
    let list = list(&world.node, "bridge", &other);
    assert!(world.reaches(&world.outside, FAR[0], 9) && !world.reaches(&world.outside, FAR[1], 9));
    list.call("DEL", &world.attached(), 1, Some(&world.result)).ok();
    list.call("ADD", &world.attached(), 1, Some(&world.result)).result();
    assert!(!world.reaches(&world.outside, FAR[0], 9) && world.reaches(&world.outside, FAR[1], 9));
    let table = world.node.sh("nft list table inet cnibox_egress");
    assert_eq!(table.matches("chain policy_").count(), 1, "{table}");
    list.check(&world.attached(), &world.result).unwrap();
}

/// The bridge has no address: the neighbour is the router.
#[test]
fn another_router_on_the_bridge_is_found() {
    let world = World::new("bridge", &json!({}));
    let (router, inside) = (&world.neighbour, Container::new());
    router.sh("ip addr add 192.0.2.9/32 dev lo && ip -6 addr add 2001:db8:e::9/128 dev lo");
    // The node has the same addresses in another network.
    world.node.sh("sysctl -qw net.ipv4.conf.all.arp_ignore=1; ip addr add 10.1.2.2/32 dev lo");
    world.node.sh("ip addr add 2001:db8:1::2/128 dev lo");
    let keys = json!({"allow": [{"to": ["192.0.2.0/24", "2001:db8:e::/64"], "ports": ["udp/53"]}]});
    let mut list = list(&world.node, "bridge", &keys);
    let ipam = json!({"type": "static", "addresses": [{"address": "10.1.2.77/24", "gateway": "10.1.2.2"},
        {"address": "2001:db8:1::77/64", "gateway": "2001:db8:1::2"}],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]});
    list.conf["plugins"][0] = json!({"type": "bridge", "bridge": "br0", "ipam": ipam});
    list.add(&Attached::new("c7", &inside.path())).unwrap();
    for ip in ["192.0.2.9", "2001:db8:e::9"] {
        crate::support::node::eventually(ip, || datagram_arrives(&inside, router, ip, 53));
        assert!(!datagram_arrives(&inside, router, ip, 54), "{ip}");
    }
    assert!(!datagram_arrives(&inside, router, "10.1.2.2", 53), "the router itself");
}

/// The addresses of a VRF are local in its own routing table only.
#[test]
fn a_sandbox_in_a_vrf_asks_the_node_for_names_only() {
    needs!(lane::VRF);
    for kind in ["bridge", "ptp"] {
        let world = World::new(kind, &json!({"profile": "sandbox"}));
        let node = &world.node;
        let far =
            node.sh(&format!("ip -o route get {} | sed 's/.* dev \\([^ ]*\\).*/\\1/'", OUTSIDE[0]));
        let gateways = node.sh("ip -o addr show to 10.1.2.1 | cut -d' ' -f2");
        node.sh("ip link add blue type vrf table 10 && ip link set blue up && ip addr add 203.0.113.9/32 dev blue");
        node.sh("sysctl -q net.ipv4.udp_l3mdev_accept=1");
        for link in gateways.split_whitespace().chain([far.trim()]) {
            node.sh(&format!("ip link set {link} master blue"));
        }
        node.sh(&format!(
            "ip route add {} via {} dev {} vrf blue onlink",
            FAR[0],
            OUTSIDE[0],
            far.trim()
        ));
        list(node, kind, &json!({"profile": "sandbox"}))
            .call("ADD", &world.attached(), 1, Some(&world.result))
            .result();
        let require = |place: &dyn Fn(u16) -> UdpSocket, ip: &str, port: u16, passes: bool| {
            let far = place(port);
            far.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            let near = world.inside.within(|| UdpSocket::bind("0.0.0.0:0").unwrap());
            let arrives =
                |_| near.send_to(b"question", (ip, port)).is_ok() && far.recv(&mut [0; 16]).is_ok();
            let attempts = if passes { 30 } else { 3 };
            assert_eq!((0..attempts).any(arrives), passes, "{kind}: {ip}, port {port}");
        };
        let any = |port: u16| bind(Ipv4Addr::UNSPECIFIED.into(), port);
        let (on_node, outside) =
            (|port| node.within(|| any(port)), |port| world.outside.within(|| any(port)));
        for (ip, port, passes) in [
            ("10.1.2.1", 53, true),
            ("10.1.2.1", 54, false),
            ("203.0.113.9", 53, true),
            ("203.0.113.9", 54, false),
        ] {
            require(&on_node, ip, port, passes);
        }
        for (ip, passes) in [(FAR[0], true), (OUTSIDE[0], false)] {
            require(&outside, ip, 4000, passes);
        }
    }
}
