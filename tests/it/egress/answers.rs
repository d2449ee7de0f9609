//! What a refusal tells: programs fail at once, and nobody else is told.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use serde_json::json;

use super::ways::{Capture, Map, ipv4, mac_of, sum, tcp, udp};
use super::{FAR, OUTSIDE, World, list};
use crate::hostile::send_frame;
use crate::lane::{self, needs};
use crate::support::conflist::{Attached, Conflist};
use crate::support::net::merged;
use crate::support::node::{Container, eventually};
use crate::support::traffic::Place;

/// How long a program may wait that is told.
const AT_ONCE: Duration = Duration::from_millis(900);

/// How connecting ends, and whether at once.
fn connect(from: &impl Place, ip: &str) -> (ErrorKind, bool) {
    let to: SocketAddr = (ip.parse::<IpAddr>().unwrap(), 4001).into();
    from.within(|| {
        let start = Instant::now();
        let ended = TcpStream::connect_timeout(&to, Duration::from_secs(2)).unwrap_err().kind();
        (ended, start.elapsed() < AT_ONCE)
    })
}

/// How waiting for an answer to a datagram ends.
fn ask(from: &impl Place, ip: &str) -> ErrorKind {
    let ip: IpAddr = ip.parse().unwrap();
    let any: IpAddr = if ip.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    from.within(|| {
        let socket = UdpSocket::bind((any, 0)).unwrap();
        socket.connect((ip, 4001)).unwrap();
        socket.set_read_timeout(Some(AT_ONCE)).unwrap();
        socket.send(b"question").unwrap();
        loop {
            match socket.recv(&mut [0; 16]).unwrap_err().kind() {
                ErrorKind::Interrupted => {}
                ended => return ended,
            }
        }
    })
}

/// Resolves the routers: a first packet may wait for their addresses. The kernel sends a container
/// one ICMP error a second, after the first six.
fn prepare(world: &World) {
    world.node.sh("sysctl -qw net.ipv4.icmp_ratelimit=0 net.ipv6.icmp.ratelimit=0");
    for ip in [FAR[0], FAR[3]] {
        assert!(world.reaches(&world.outside, ip, 9), "{ip}");
    }
}

/// How a connection that is refused with an answer ends.
const TOLD: (ErrorKind, bool) = (ErrorKind::ConnectionRefused, true);

fn assert_told(world: &World, ip: &str, why: &str) {
    assert_eq!(connect(&world.inside, ip), TOLD, "{why}: {ip}");
    let told =
        if ip.contains(':') { ErrorKind::PermissionDenied } else { ErrorKind::HostUnreachable };
    assert_eq!(ask(&world.inside, ip), told, "{why}: {ip}");
}

const KEYS: &str = r#"{"allow": [{"to": ["192.0.2.0/24", "2001:db8:f::/64"]}]}"#;

#[test]
fn a_refused_program_fails_at_once() {
    needs!(lane::REJECT_AT_INGRESS);
    let keys = serde_json::from_str(KEYS).unwrap();
    for kind in ["bridge", "ptp"] {
        let world = World::new(kind, &keys);
        prepare(&world);
        let another = Container::new();
        let ipam = world.node.host_local(&["10.7.0.0/24", "2001:db8:7::/64"]);
        let plugin = json!({"type": "bridge", "bridge": "br7", "isGateway": true, "ipam": ipam});
        let network = json!({"cniVersion": "1.1.0", "name": "another", "plugins": [plugin]});
        Conflist::new(&world.node, network).add(&Attached::new("a", &another.path())).unwrap();
        let own = list(&world.node, kind, &keys);
        let restore = || _ = own.call("ADD", &world.attached(), 1, Some(&world.result)).result();
        let near = ["10.7.0.2", "10.1.2.1", "2001:db8:1::1"];
        for ip in [FAR[1], OUTSIDE[0], OUTSIDE[1]].iter().chain(&near) {
            assert_told(&world, ip, kind);
        }
        // By the rules alone, as where the filter cannot know what is another container's.
        world.node.sh(&format!("tc qdisc del dev {} ingress", world.end()));
        for ip in [FAR[1], OUTSIDE[1]].iter().chain(&near) {
            assert_told(&world, ip, &format!("{kind}, rules alone"));
        }
        restore();
        // By the filter alone nobody is told, and nothing is reached.
        world.node.sh("nft flush ruleset");
        assert_eq!(connect(&world.inside, FAR[1]), (ErrorKind::TimedOut, false), "{kind}: flushed");
        assert_eq!(world.node.cnibox(&["repair"]).run().status, Some(0));
        let why = format!("{kind}, after a repair");
        assert_eq!(connect(&world.inside, FAR[1]), TOLD, "{why}");
        world.node.sh("ip link del cnibox-refused");
        restore();
        let why = format!("{kind}, with new links");
        assert_eq!(connect(&world.inside, FAR[1]), TOLD, "{why}");
        own.check(&world.attached(), &world.result).unwrap();
    }
}

/// Another container's ADD restores who is told after a flush. What it cannot see is missing for
/// CHECK, until a repair.
#[test]
fn others_and_repair_restore_who_is_told() {
    needs!(lane::REJECT_AT_INGRESS);
    let keys = serde_json::from_str(KEYS).unwrap();
    let world = World::new("bridge", &keys);
    prepare(&world);
    let own = list(&world.node, "bridge", &keys);
    let add_another = || {
        let another = Container::new();
        let at = Attached::new("another", &another.path());
        let result = own.add(&at).unwrap();
        own.del(&at, Some(&result)).unwrap();
    };
    let flushes = [
        "nft flush ruleset",
        "nft delete table inet cnibox_egress_answers",
        "for set in told4 told6; do nft flush set inet cnibox_egress_answers $set; done",
    ];
    for damage in flushes {
        world.node.sh(damage);
        assert_eq!(connect(&world.inside, FAR[1]), (ErrorKind::TimedOut, false), "{damage}");
        add_another();
        for ip in [FAR[1], OUTSIDE[1]] {
            assert_told(&world, ip, damage);
        }
        own.check(&world.attached(), &world.result).unwrap();
    }
    let link = &world.inside.ip("link show eth0")[0];
    let mac = link["address"].as_str().unwrap();
    for (set, key) in [
        ("inet cnibox_egress_answers told4", format!("{mac} . {}", world.ip(false))),
        ("netdev cnibox_egress refused", mac.to_owned()),
    ] {
        world.node.sh(&format!("nft delete element {set} {{ {key} }}"));
        let failed = own.check(&world.attached(), &world.result).unwrap_err();
        assert!(format!("{failed:?}").contains(mac), "{failed:?}");
        let printed = world.node.cnibox(&["repair"]).printed();
        assert!(printed.contains("restored: "), "{set}: {printed}");
        own.check(&world.attached(), &world.result).unwrap();
        assert_told(&world, FAR[1], set);
    }
}

/// Without the links that refused packets go to there is no place for the chains about them: up to
/// Linux 6.12 the chains end with the links. STATUS does not wait for them, and a repair makes all
/// of it again.
#[test]
fn links_that_are_gone_delay_nothing_and_are_repaired() {
    needs!(lane::REJECT_AT_INGRESS);
    let keys = serde_json::from_str(KEYS).unwrap();
    let world = World::new("bridge", &keys);
    prepare(&world);
    let own = list(&world.node, "bridge", &keys);
    let inside = Container::new();
    let [conf, cache, bin] = [world.node.path("net.d"), world.node.path("cache"), world.node.bin()]
        .map(|path| path.display().to_string());
    std::fs::create_dir(&conf).unwrap();
    std::fs::write(world.node.path("net.d/net.conflist"), own.conf.to_string()).unwrap();
    let path = inside.path();
    let of_node = |words: &[&str]| {
        let words = [words, &["--cache-dir", &cache, "--plugin-path", &bin]].concat();
        world.node.cnibox(&words)
    };
    let id = "--container-id";
    of_node(&["cnitool", "add", "net", &path, id, "c2", "--conf-dir", &conf]).printed();
    let delete =
        "nft delete table inet cnibox_egress_answers; nft delete table netdev cnibox_egress
                  ip link del cnibox-refused";
    for damage in [delete, "ip link del cnibox-refused", "ip link del cnibox-drop"] {
        world.node.sh(damage);
        let began = Instant::now();
        let status = own.call("STATUS", &world.attached(), 1, None).run();
        assert_eq!((status.status, status.stderr.as_str()), (Some(0), ""), "{damage}");
        assert!(began.elapsed() < Duration::from_secs(5), "{damage}: {:?}", began.elapsed());
        let repaired = of_node(&["repair"]).run();
        assert_eq!((repaired.status, repaired.stderr.as_str()), (Some(0), ""), "{damage}");
        assert_eq!(connect(&inside, FAR[1]), TOLD, "{damage}: {}", repaired.stdout);
        assert_eq!(of_node(&["repair"]).printed(), "nothing was missing\n", "{damage}");
    }
}

#[test]
fn refusals_of_neighbours_and_behind_shaping_are_told() {
    needs!(lane::REJECT_AT_INGRESS);
    let keys = serde_json::from_str(KEYS).unwrap();
    let world = World::new("bridge", &keys);
    prepare(&world);
    let allowed = merged(&keys, &json!({"allow": [{"to": ["10.1.2.2"], "ports": ["udp/9"]}]}));
    let inside = Container::new();
    let mut shaped = list(&world.node, "bridge", &allowed);
    let rate = json!({"type": "bandwidth", "egressRate": 100_000_000, "egressBurst": 1_000_000});
    shaped.conf["plugins"].as_array_mut().unwrap().insert(1, rate);
    shaped.add(&Attached::new("shaped", &inside.path())).unwrap();
    let reached = || super::datagram_arrives(&inside, &world.neighbour, "10.1.2.2", 9);
    assert!(reached(), "its address is known");
    assert_eq!(connect(&inside, "10.1.2.2"), TOLD);
    assert_eq!(connect(&inside, FAR[1]), TOLD);
}

#[test]
fn refuse_drop_tells_nothing() {
    let keys = merged(&serde_json::from_str(KEYS).unwrap(), &json!({"refuse": "drop"}));
    for kind in ["bridge", "ptp"] {
        let world = World::new(kind, &keys);
        prepare(&world);
        for alone in [false, true] {
            if alone {
                world.node.sh(&format!("tc qdisc del dev {} ingress", world.end()));
            }
            assert_eq!(connect(&world.inside, FAR[1]), (ErrorKind::TimedOut, false), "{kind}");
            assert_eq!(ask(&world.inside, OUTSIDE[1]), ErrorKind::WouldBlock, "{kind}");
        }
    }
}

/// A segment of TCP with a checksum.
fn segment(from: Ipv4Addr, to: &str) -> Vec<u8> {
    let mut segment = tcp(4000, 4001, 2);
    let length = u16::try_from(segment.len()).unwrap().to_be_bytes();
    let to: Ipv4Addr = to.parse().unwrap();
    let pseudo = [&from.octets()[..], &to.octets(), &[0, 6], &length, &segment].concat();
    segment[16..18].copy_from_slice(&sum(&pseudo).to_be_bytes());
    segment
}

/// An answer goes to the container that has sent the packet, whoever it says it is: otherwise it
/// could end the connections of others.
#[test]
fn nobody_else_is_told() {
    needs!(lane::REJECT_AT_INGRESS);
    let keys = serde_json::from_str(KEYS).unwrap();
    for kind in ["bridge", "ptp"] {
        let world = World::new(kind, &keys);
        prepare(&world);
        let other = Container::new();
        let result =
            list(&world.node, kind, &keys).add(&Attached::new("c2", &other.path())).unwrap();
        let victim: Ipv4Addr = super::address(&result, 0).parse().unwrap();
        assert_eq!(connect(&other, FAR[1]), TOLD, "{kind}");
        let map = Map::of(&world);
        let received =
            |container: &Container| container.sh("grep -E '^(Tcp|Icmp):' /proc/net/snmp");
        let (before, mine) = (received(&other), Capture::at(&world.inside));
        let syn = |from| ipv4(from, FAR[1], 6, 0x4000, &segment(from, FAR[1]));
        let datagram = |from| ipv4(from, FAR[1], 17, 0x4000, &udp(4000, 4001));
        for packet in [syn, datagram as fn(Ipv4Addr) -> Vec<u8>] {
            for from in [victim, map.ip] {
                let mut frame = map.eth(map.router, 0x0800, &packet(from));
                send_frame(&world.inside, &frame);
                frame[6..12].copy_from_slice(&mac_of(&other));
                send_frame(&world.inside, &frame);
            }
        }
        send_frame(&world.inside, &map.eth(map.router, 0x0800, &datagram(map.ip)));
        // An ICMP error quotes the datagram.
        let mut own = 0;
        eventually("both datagrams from its own address are answered", || {
            let frames = mine.frames();
            own += frames.iter().filter(|frame| frame[..6] == mac_of(&world.inside)).count();
            own >= 2
        });
        assert_eq!(received(&other), before, "{kind}: the other container was told");
    }
}

/// The host has no route to a container behind a bridge without an address of the host: an answer
/// would leave by the default route.
#[test]
fn no_answer_leaves_the_host() {
    let keys = serde_json::from_str(KEYS).unwrap();
    let world = World::new("ptp", &keys);
    prepare(&world);
    let (inside, neighbour) = (Container::new(), Container::new());
    let ipam = world.node.host_local(&["10.7.0.0/24"]);
    let bridge = json!({"type": "bridge", "bridge": "br7", "ipam": ipam});
    let egress = merged(&json!({"type": "egress"}), &keys);
    let network = json!({"cniVersion": "1.1.0", "name": "near", "plugins": [bridge, egress]});
    let near = Conflist::new(&world.node, network);
    for (id, container) in [("a", &inside), ("b", &neighbour)] {
        near.add(&Attached::new(id, &container.path())).unwrap();
    }
    let left = || world.node.sh("nft list chain inet left out | grep -c 'packets 0 ' || true");
    world.node.sh(
        "nft 'add table inet left; add chain inet left out { type filter hook output priority 0; };
              add rule inet left out ip daddr 10.7.0.0/24 counter'",
    );
    let mac: String = mac_of(&neighbour).map(|byte| format!("{byte:02x}")).join(":");
    inside.sh(&format!("ip neigh replace 10.7.0.3 lladdr {mac} dev eth0"));
    assert_eq!(connect(&inside, "10.7.0.3"), (ErrorKind::TimedOut, false));
    assert_eq!(left().trim(), "1", "an answer was sent");
}
