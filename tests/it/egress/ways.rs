//! Ways out of a policy, each tried: with the rules and the filter, with the rules alone, and with
//! the filter alone, as after a flush. Captured are all frames that arrive outside, at the
//! neighbour, and at a socket of the host.

use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};

use super::{FAR, OUTSIDE, World, list};
use crate::hostile::{frame_socket, send_frame};
use crate::support::conflist::Attached;
use crate::support::node::{Container, eventually};
use crate::support::traffic::Place;

/// What every frame of a way contains.
pub(super) const MARK: &[u8] = b"WAY-OUT-OF-A-POLICY";

type Mac = [u8; 6];

/// Addresses of the participants.
pub(super) struct Map {
    own: Mac,
    pub(super) router: Mac,
    neighbour: Mac,
    pub(super) ip: Ipv4Addr,
    pub(super) ip6: Ipv6Addr,
}

fn mac(text: &str) -> Mac {
    let octets: Vec<u8> =
        text.trim().split(':').map(|octet| u8::from_str_radix(octet, 16).unwrap()).collect();
    octets.try_into().unwrap()
}

pub(super) fn mac_of(container: &Container) -> Mac {
    mac(container.ip("link show eth0")[0]["address"].as_str().unwrap())
}

impl Map {
    pub(super) fn of(world: &World) -> Map {
        let router = if world.result["interfaces"][0]["name"] == "br0" {
            "br0".to_owned()
        } else {
            world.end()
        };
        Map {
            own: mac_of(&world.inside),
            router: mac(world.node.ip(&format!("link show {router}"))[0]["address"]
                .as_str()
                .unwrap()),
            neighbour: mac_of(&world.neighbour),
            ip: world.ip(false).parse().unwrap(),
            ip6: world.ip(true).parse().unwrap(),
        }
    }

    pub(super) fn eth(&self, to: Mac, ethertype: u16, payload: &[u8]) -> Vec<u8> {
        [&to[..], &self.own, &ethertype.to_be_bytes(), payload].concat()
    }

    /// A packet of IPv4 to the router.
    pub(super) fn v4(&self, to: &str, proto: u8, payload: &[u8]) -> Vec<u8> {
        self.eth(self.router, 0x0800, &ipv4(self.ip, to, proto, 0x4000, payload))
    }

    fn v6(&self, to: &str, next: u8, payload: &[u8]) -> Vec<u8> {
        self.eth(self.router, 0x86dd, &ipv6(self.ip6, to, next, 255, payload))
    }
}

pub(super) fn sum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|two| u32::from(u16::from_be_bytes([two[0], *two.get(1).unwrap_or(&0)])));
    let mut total: u32 = words.sum();
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    !u16::try_from(total).unwrap()
}

/// A length for a header.
fn length(bytes: usize) -> u16 {
    u16::try_from(bytes).unwrap()
}

pub(super) fn ipv4(from: Ipv4Addr, to: &str, proto: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
    with_options(from, to, proto, fragment, &[], payload)
}

fn with_options(
    from: Ipv4Addr,
    to: &str,
    proto: u8,
    fragment: u16,
    options: &[u8],
    payload: &[u8],
) -> Vec<u8> {
    let to: Ipv4Addr = to.parse().unwrap();
    let first = 0x40 | u8::try_from(5 + options.len() / 4).unwrap();
    let [l0, l1] = length(20 + options.len() + payload.len()).to_be_bytes();
    let [f0, f1] = fragment.to_be_bytes();
    let mut header = vec![first, 0, l0, l1, 0x12, 0x34, f0, f1, 64, proto, 0, 0];
    header.extend(from.octets());
    header.extend(to.octets());
    header.extend(options);
    let check = sum(&header).to_be_bytes();
    header[10..12].copy_from_slice(&check);
    [&header, payload].concat()
}

pub(super) fn ipv6(from: Ipv6Addr, to: &str, next: u8, hops: u8, payload: &[u8]) -> Vec<u8> {
    let to: Ipv6Addr = to.parse().unwrap();
    let [l0, l1] = length(payload.len()).to_be_bytes();
    [&[0x60, 0, 0, 0, l0, l1, next, hops][..], &from.octets(), &to.octets(), payload].concat()
}

/// UDP without a checksum.
pub(super) fn udp(from: u16, to: u16) -> Vec<u8> {
    let length = length(8 + MARK.len()).to_be_bytes();
    [&from.to_be_bytes()[..], &to.to_be_bytes(), &length, &[0, 0], MARK].concat()
}

pub(super) fn tcp(from: u16, to: u16, flags: u8) -> Vec<u8> {
    let ports = [from.to_be_bytes(), to.to_be_bytes()].concat();
    [&ports[..], &[0, 0, 0, 1, 0, 0, 0, 1, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0], MARK].concat()
}

fn icmp(kind: u8) -> Vec<u8> {
    let mut message = [&[kind, 0, 0, 0, 0, 1, 0, 1][..], MARK].concat();
    let check = sum(&message).to_be_bytes();
    message[2..4].copy_from_slice(&check);
    message
}

/// A message of ICMPv6 with a checksum.
fn icmpv6(from: Ipv6Addr, to: &str, kind: u8, target: &str) -> Vec<u8> {
    let target: Ipv6Addr = target.parse().unwrap();
    let mut message = [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &target.octets(), MARK].concat();
    let dest: Ipv6Addr = to.parse().unwrap();
    let length = u32::from(length(message.len())).to_be_bytes();
    let pseudo = [&from.octets()[..], &dest.octets(), &length, &[0, 0, 0, 58], &message].concat();
    message[2..4].copy_from_slice(&sum(&pseudo).to_be_bytes());
    message
}

fn arp(operation: u8, from: Mac, from_ip: &str, to: Mac, to_ip: &str) -> Vec<u8> {
    let ip = |text: &str| text.parse::<Ipv4Addr>().unwrap().octets();
    [&[0, 1, 8, 0, 6, 4, 0, operation][..], &from, &ip(from_ip), &to, &ip(to_ip), MARK].concat()
}

const BROADCAST: Mac = [0xff; 6];

/// The ways whose frames may be replies: the filter alone lets them pass, because they open nothing.
const OPEN_NOTHING: [&str; 2] =
    ["TCP, ACK without a connection", "ICMP echo reply without a request"];

/// A way: a name and its frames.
pub(super) type Way = (&'static str, Vec<Vec<u8>>);

pub(super) fn ways(map: &Map) -> Vec<Way> {
    let ways =
        [routed_ways(map), neighbour_ways(map), wrapped_ways(map), ipv6_ways(map), mixed_ways(map)];
    ways.into_iter().flatten().collect()
}

/// By the router.
fn routed_ways(map: &Map) -> Vec<Way> {
    let (private, far) = (OUTSIDE[0], FAR[0]);
    let other = Map { own: map.neighbour, ..*map };
    let long = [&udp(5, 5)[..], &[0; 29]].concat();
    let fragment = |offset: u16, more: u16, part: &[u8]| {
        map.eth(map.router, 0x0800, &ipv4(map.ip, private, 17, more << 13 | offset, part))
    };
    vec![
        ("UDP to a private address", vec![map.v4(private, 17, &udp(5, 5))]),
        ("UDP to port 53 of a private address", vec![map.v4(private, 17, &udp(5, 53))]),
        ("TCP, SYN", vec![map.v4(private, 6, &tcp(5, 443, 2))]),
        ("TCP, ACK without a connection", vec![map.v4(private, 6, &tcp(5, 443, 0x10))]),
        ("TCP, no flag", vec![map.v4(private, 6, &tcp(5, 443, 0))]),
        ("ping", vec![map.v4(private, 1, &icmp(8))]),
        ("ICMP echo reply without a request", vec![map.v4(private, 1, &icmp(0))]),
        ("metadata", vec![map.v4(FAR[2], 6, &tcp(5, 80, 2)), map.v4(FAR[2], 17, &udp(5, 80))]),
        ("an unknown protocol", vec![map.v4(private, 253, MARK)]),
        (
            "IPv4 options",
            vec![map.eth(
                map.router,
                0x0800,
                &with_options(map.ip, private, 17, 0x4000, &[1; 40], &udp(5, 5)),
            )],
        ),
        ("a first fragment", vec![fragment(0, 1, &long[..24])]),
        ("fragments", vec![fragment(0, 1, &long[..24]), fragment(3, 0, &long[24..])]),
        ("a later fragment alone", vec![fragment(9, 0, &[MARK, b"12345"].concat())]),
        (
            "the source address of the neighbour",
            vec![map.eth(
                map.router,
                0x0800,
                &ipv4("10.1.2.2".parse().unwrap(), private, 17, 0x4000, &udp(5, 5)),
            )],
        ),
        (
            "the source address of the host",
            vec![map.eth(
                map.router,
                0x0800,
                &ipv4("10.9.0.1".parse().unwrap(), private, 17, 0x4000, &udp(5, 5)),
            )],
        ),
        (
            "the MAC of the neighbour",
            vec![other.v4(private, 17, &udp(5, 5)), other.v4(far, 17, &udp(5, 5))],
        ),
        (
            "the MAC of the router",
            vec![Map { own: map.router, ..*map }.v4(private, 17, &udp(5, 5))],
        ),
        (
            "a multicast source MAC",
            vec![Map { own: BROADCAST, ..*map }.v4(private, 17, &udp(5, 5))],
        ),
    ]
}

/// To neighbours and groups of the link.
fn neighbour_ways(map: &Map) -> Vec<Way> {
    let far = FAR[0];
    vec![
        (
            "the neighbour",
            vec![map.eth(map.neighbour, 0x0800, &ipv4(map.ip, "10.1.2.2", 17, 0x4000, &udp(5, 5)))],
        ),
        (
            "the neighbour by an allowed address",
            vec![map.eth(map.neighbour, 0x0800, &ipv4(map.ip, far, 17, 0x4000, &udp(5, 5)))],
        ),
        (
            "the neighbour by the name service of the node",
            vec![
                map.eth(map.neighbour, 0x0800, &ipv4(map.ip, "10.1.2.1", 17, 0x4000, &udp(5, 53))),
                map.eth(
                    map.neighbour,
                    0x86dd,
                    &ipv6(map.ip6, "2001:db8:1::1", 17, 64, &udp(5, 53)),
                ),
            ],
        ),
        (
            "all neighbours by an allowed address",
            vec![map.eth(BROADCAST, 0x0800, &ipv4(map.ip, far, 17, 0x4000, &udp(5, 5)))],
        ),
        (
            "IPv4 broadcast",
            vec![map.eth(
                BROADCAST,
                0x0800,
                &ipv4(map.ip, "255.255.255.255", 17, 0x4000, &udp(68, 67)),
            )],
        ),
        (
            "broadcast of the subnet",
            vec![map.eth(BROADCAST, 0x0800, &ipv4(map.ip, "10.1.2.255", 17, 0x4000, &udp(5, 5)))],
        ),
        (
            "multicast",
            vec![map.eth(
                [1, 0, 0x5e, 0, 0, 0xfb],
                0x0800,
                &ipv4(map.ip, "224.0.0.251", 17, 0x4000, &udp(5, 5353)),
            )],
        ),
        (
            "an ARP request for the neighbour",
            vec![map.eth(BROADCAST, 0x0806, &arp(1, map.own, "10.1.2.3", [0; 6], "10.1.2.2"))],
        ),
        (
            "an ARP reply to the neighbour",
            vec![map.eth(
                map.neighbour,
                0x0806,
                &arp(2, map.own, "10.1.2.1", map.neighbour, "10.1.2.2"),
            )],
        ),
        (
            "ARP that claims the router's address",
            vec![map.eth(BROADCAST, 0x0806, &arp(1, map.own, "10.1.2.1", [0; 6], "10.1.2.2"))],
        ),
        (
            "ARP for another sender",
            vec![map.eth(
                map.neighbour,
                0x0806,
                &arp(2, map.router, "10.1.2.1", map.neighbour, "10.1.2.2"),
            )],
        ),
    ]
}

/// In other frames, in other packets, and to the host.
fn wrapped_ways(map: &Map) -> Vec<Way> {
    let inner = ipv4(map.ip, OUTSIDE[0], 17, 0x4000, &udp(5, 5));
    let tagged = |tag: u16, rest: &[u8]| [&tag.to_be_bytes()[..], &[0, 5], rest].concat();
    let allowed_in_tag = [&[8, 0][..], &ipv4(map.ip, FAR[0], 17, 0x4000, &udp(5, 5))].concat();
    let inside_tag = [&[8, 0][..], &inner].concat();
    let snap = [&[0xaa, 0xaa, 3, 0, 0, 0, 8, 0][..], &inner].concat();
    vec![
        (
            "another ethertype",
            vec![map.eth(map.neighbour, 0x88b5, MARK), map.eth(BROADCAST, 0x88b5, MARK)],
        ),
        (
            "a frame with a length",
            vec![map.eth(
                map.neighbour,
                length(MARK.len() + 3),
                &[&[0x42, 0x42, 3][..], MARK].concat(),
            )],
        ),
        ("IPv4 in SNAP", vec![map.eth(map.router, length(snap.len()), &snap)]),
        (
            "the spanning tree's address",
            vec![map.eth(
                [1, 0x80, 0xc2, 0, 0, 0],
                length(MARK.len() + 3),
                &[&[0x42, 0x42, 3][..], MARK].concat(),
            )],
        ),
        (
            "IPv4 to LLDP's address",
            vec![map.eth(
                [1, 0x80, 0xc2, 0, 0, 0xe],
                0x0800,
                &ipv4(map.ip, "10.1.2.1", 17, 0x4000, &udp(5, 4000)),
            )],
        ),
        (
            "a VLAN tag",
            vec![
                map.eth(map.router, 0x8100, &tagged(0, &inside_tag)),
                map.eth(map.neighbour, 0x8100, &tagged(7, &inside_tag)),
            ],
        ),
        (
            "a VLAN tag before an allowed address",
            vec![map.eth(map.neighbour, 0x8100, &tagged(7, &allowed_in_tag))],
        ),
        ("a public address of the host", vec![map.v4("203.0.113.1", 17, &udp(5, 4000))]),
        (
            "broadcast of a public network of the host",
            vec![map.v4("203.0.113.255", 17, &udp(5, 4000))],
        ),
        (
            "the network address of a public network of the host",
            vec![map.v4("203.0.113.0", 17, &udp(5, 4000))],
        ),
        ("Azure's metadata", vec![map.v4("168.63.129.16", 17, &udp(5, 80))]),
        (
            "both directions of a connection",
            vec![
                map.eth(
                    map.router,
                    0x0800,
                    &ipv4(OUTSIDE[0].parse().unwrap(), FAR[0], 17, 0x4000, &udp(4444, 53)),
                ),
                map.eth(
                    map.router,
                    0x0800,
                    &ipv4(FAR[0].parse().unwrap(), OUTSIDE[0], 17, 0x4000, &udp(53, 4444)),
                ),
                map.eth(
                    map.router,
                    0x0800,
                    &ipv4(FAR[0].parse().unwrap(), "10.1.2.2", 17, 0x4000, &udp(53, 4444)),
                ),
            ],
        ),
        (
            "two VLAN tags",
            vec![map.eth(
                map.router,
                0x88a8,
                &tagged(0, &[&[0x81, 0][..], &tagged(0, &inside_tag)].concat()),
            )],
        ),
        ("MPLS", vec![map.eth(map.router, 0x8847, &[&[0, 1, 1, 64][..], &inner].concat())]),
        (
            "PPPoE",
            vec![map.eth(
                map.router,
                0x8864,
                &[&[0x11, 0, 0, 1, 0, 60, 0, 0x21][..], &inner].concat(),
            )],
        ),
        ("IPv4 in IPv4 to the host", vec![map.v4("10.1.2.1", 4, &inner)]),
        ("GRE to the host", vec![map.v4("10.1.2.1", 47, &[&[0, 0, 8, 0][..], &inner].concat())]),
        ("VXLAN to the host", vec![map.v4("10.1.2.1", 17, &udp(4789, 4789))]),
        ("a socket of the host", vec![map.v4("10.1.2.1", 17, &udp(5, 4000))]),
        ("another address of the host", vec![map.v4("10.9.0.1", 17, &udp(5, 4000))]),
    ]
}

/// By IPv6.
fn ipv6_ways(map: &Map) -> Vec<Way> {
    let hop_options = [&[17, 0, 1, 4, 0, 0, 0, 0][..], &udp(5, 5)].concat();
    vec![
        (
            "IPv6 to the neighbour",
            vec![map.eth(
                map.neighbour,
                0x86dd,
                &ipv6(map.ip6, "2001:db8:1::2", 17, 64, &udp(5, 5)),
            )],
        ),
        ("IPv6 to the neighbour by the router", vec![map.v6("2001:db8:1::2", 17, &udp(5, 5))]),
        (
            "IPv6 with options to the neighbour",
            vec![
                map.v6("2001:db8:1::2", 0, &hop_options),
                map.v6("2001:db8:1::2", 60, &hop_options),
            ],
        ),
        (
            "an IPv6 fragment",
            vec![map.v6(
                "2001:db8:1::2",
                44,
                &[&[17, 0, 0, 1, 0, 0, 0, 9][..], &udp(5, 5)].concat(),
            )],
        ),
        ("ICMPv6 echo", vec![map.v6(FAR[3], 58, &icmpv6(map.ip6, FAR[3], 128, "::"))]),
        (
            "neighbour discovery to a far address",
            vec![
                map.v6(FAR[3], 58, &icmpv6(map.ip6, FAR[3], 135, FAR[3])),
                map.v6(FAR[3], 58, &icmpv6(map.ip6, FAR[3], 136, FAR[3])),
            ],
        ),
        (
            "a router advertisement",
            vec![map.eth(
                [0x33, 0x33, 0, 0, 0, 1],
                0x86dd,
                &ipv6(map.ip6, "ff02::1", 58, 255, &icmpv6(map.ip6, "ff02::1", 134, "::")),
            )],
        ),
        (
            "a solicitation for the neighbour",
            vec![map.eth(
                [0x33, 0x33, 0xff, 0, 0, 2],
                0x86dd,
                &ipv6(
                    map.ip6,
                    "ff02::1:ff00:2",
                    58,
                    255,
                    &icmpv6(map.ip6, "ff02::1:ff00:2", 135, "2001:db8:1::2"),
                ),
            )],
        ),
        (
            "an advertisement to the neighbour",
            vec![map.eth(
                map.neighbour,
                0x86dd,
                &ipv6(
                    map.ip6,
                    "2001:db8:1::2",
                    58,
                    255,
                    &icmpv6(map.ip6, "2001:db8:1::2", 136, "2001:db8:1::1"),
                ),
            )],
        ),
        (
            "IPv6 multicast",
            vec![map.eth(
                [0x33, 0x33, 0, 0, 0, 0xfb],
                0x86dd,
                &ipv6(map.ip6, "ff02::fb", 17, 255, &udp(5, 5353)),
            )],
        ),
    ]
}

/// IPv4 as IPv6, and the reverse; headers that end early.
fn mixed_ways(map: &Map) -> Vec<Way> {
    let private = OUTSIDE[0];
    let inner = ipv4(map.ip, private, 17, 0x4000, &udp(5, 5));
    vec![
        ("6to4 of a private address", vec![map.v6("2002:a09:2::1", 17, &udp(5, 5))]),
        (
            "IPv4 of protocol 58",
            vec![map.eth(
                map.neighbour,
                0x0800,
                &ipv4(map.ip, "10.1.2.2", 58, 0x4000, &icmpv6(map.ip6, "ff02::1", 135, "fe80::1")),
            )],
        ),
        (
            "IPv6 in an IPv4 frame",
            vec![map.eth(map.router, 0x0800, &ipv6(map.ip6, "2001:db8:1::2", 17, 64, &udp(5, 5)))],
        ),
        ("IPv4 in an IPv6 frame", vec![map.eth(map.router, 0x86dd, &inner)]),
        (
            "a short header",
            vec![map.v4(private, 17, &[0, 5]), map.eth(map.router, 0x0800, &[0x45])],
        ),
    ]
}

/// Receives all frames of a place with [`MARK`].
pub(super) struct Capture(Socket);

impl Capture {
    pub(super) fn at(place: &impl Place) -> Capture {
        // `ETH_P_ALL` in network byte order.
        let all = Protocol::from(i32::from(3_u16.to_be()));
        let socket = place.within(|| Socket::new(Domain::PACKET, Type::RAW, Some(all)).unwrap());
        socket.set_nonblocking(true).unwrap();
        Capture(socket)
    }

    pub(super) fn marked(&self) -> usize {
        self.frames().len()
    }

    /// What arrived since the last call.
    pub(super) fn frames(&self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        loop {
            let mut buffer = [0; 2048];
            let length = match (&self.0).read(&mut buffer) {
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return frames,
                Err(error) => panic!("{error}"),
            };
            if buffer[..length].windows(MARK.len()).any(|part| part == MARK) {
                frames.push(buffer[..length].to_vec());
            }
        }
    }
}

/// Waits until the control packet, sent last, has arrived.
fn settle(outside: &Capture) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while outside.marked() == 0 {
        assert!(Instant::now() < deadline, "what is allowed does not arrive");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn no_way_leads_out_of_a_sandbox() {
    for kind in ["bridge", "ptp"] {
        for (guards, remove) in [
            ("rules and filter", None),
            ("rules alone", Some("filter")),
            ("filter alone", Some("rules")),
        ] {
            let world =
                World::new(kind, &json!({"profile": "sandbox", "serve": ["tcp/80", "udp/53"]}));
            assert!(world.reaches(&world.outside, FAR[0], 9), "{kind}: resolved");
            match remove {
                Some("filter") => {
                    drop(world.node.sh(&format!("tc qdisc del dev {} ingress", world.end())));
                }
                Some(_) => drop(world.node.sh("nft flush ruleset")),
                None => {}
            }
            let map = Map::of(&world);
            let [outside, neighbour] = [&world.outside, &world.neighbour].map(Capture::at);
            let host = UdpSocket::bind("0.0.0.0:4000").unwrap();
            host.set_nonblocking(true).unwrap();
            let control = map.v4(FAR[0], 17, &udp(7, 7));
            for (way, frames) in ways(&map) {
                let why = format!("{kind}, {guards}: {way}");
                for frame in &frames {
                    send_frame(&world.inside, frame);
                }
                let early = (outside.marked(), neighbour.marked());
                send_frame(&world.inside, &control);
                settle(&outside);
                let out = if remove == Some("rules") && OPEN_NOTHING.contains(&way) {
                    frames.len()
                } else {
                    0
                };
                let arrived = early.0 + outside.marked();
                assert_eq!((arrived, early.1 + neighbour.marked()), (out, 0), "{why}");
                assert!(host.recv(&mut [0; 64]).is_err(), "{why}: at the host");
            }
        }
    }
}

#[test]
fn an_allowed_address_of_the_node_leads_to_no_neighbour() {
    for remove in ["true", "tc qdisc del dev $end ingress", "nft flush ruleset"] {
        let own = ["10.1.2.1", "2001:db8:1::1", "10.1.2.200", "2001:db8:1::200"];
        let keys = json!({"allow": [{"to": own, "ports": ["udp/53"]}, {"to": [FAR[0]]}]});
        let world = World::new("bridge", &keys);
        world
            .node
            .sh("ip addr add 10.1.2.200/24 dev br0; ip addr add 2001:db8:1::200/64 dev br0 nodad");
        list(&world.node, "bridge", &keys)
            .call("ADD", &world.attached(), 1, Some(&world.result))
            .result();
        assert!(
            world.reaches(&world.node, "10.1.2.200", 53)
                && world.reaches(&world.node, "2001:db8:1::200", 53)
        );
        assert!(
            world.reaches(&world.outside, FAR[0], 9) && world.reaches(&world.node, "10.1.2.1", 53),
            "{remove}"
        );
        world.node.sh(&remove.replace("$end", &world.end()));
        let map = Map::of(&world);
        let [outside, neighbour] = [&world.outside, &world.neighbour].map(Capture::at);
        for frame in [
            map.eth(map.neighbour, 0x0800, &ipv4(map.ip, "10.1.2.1", 17, 0x4000, &udp(5, 53))),
            map.eth(map.neighbour, 0x86dd, &ipv6(map.ip6, "2001:db8:1::1", 17, 64, &udp(5, 53))),
            map.eth(map.neighbour, 0x0800, &ipv4(map.ip, "10.1.2.200", 17, 0x4000, &udp(5, 53))),
            map.eth(map.neighbour, 0x86dd, &ipv6(map.ip6, "2001:db8:1::200", 17, 64, &udp(5, 53))),
            map.v4(FAR[0], 17, &udp(7, 7)),
        ] {
            send_frame(&world.inside, &frame);
        }
        settle(&outside);
        assert_eq!(neighbour.marked(), 0, "{remove}");
    }
}

/// Neither both directions of a connection, made by the container itself from an address of the
/// node that it may use as source, nor an ICMP error about another's connection.
#[test]
fn no_forged_reply_passes() {
    for (kind, remove) in
        [("bridge", None), ("bridge", Some("filter")), ("ptp", None), ("ptp", Some("filter"))]
    {
        let world = World::new(kind, &json!({"profile": "sandbox", "serve": ["udp/53", "icmp"]}));
        assert!(world.reaches(&world.outside, FAR[0], 9), "{kind}: resolved");
        if remove.is_some() {
            world.node.sh(&format!("tc qdisc del dev {} ingress", world.end()));
        }
        let map = Map::of(&world);
        let router = if kind == "bridge" { "br0".to_owned() } else { world.end() };
        let text = world.node.sh(&format!("ip -6 -o addr show dev {router} scope link"));
        let local = text.split_whitespace().nth(3).unwrap().split('/').next().unwrap();
        let from: Ipv6Addr = local.parse().unwrap();
        let host = UdpSocket::bind("[::]:4000").unwrap();
        host.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        for (source, port) in [(4000, 53), (53, 4000)] {
            let datagram = udp_over_ipv6(from, from, source, port);
            send_frame(
                &world.inside,
                &map.eth(map.router, 0x86dd, &ipv6(from, local, 17, 64, &datagram)),
            );
        }
        assert!(host.recv(&mut [0; 64]).is_err(), "{kind} {remove:?}: at the host");
        let client = world.neighbour.within(|| UdpSocket::bind("0.0.0.0:4001").unwrap());
        client.send_to(b"question", (OUTSIDE[0], 4001)).unwrap();
        let [outside, neighbour] = [&world.outside, &world.neighbour].map(Capture::at);
        let quoted = ipv4("10.1.2.2".parse().unwrap(), OUTSIDE[0], 17, 0x4000, &udp(4001, 4001));
        let mut message = [&[3, 1, 0, 0, 0, 0, 0, 0][..], &quoted].concat();
        let check = sum(&message).to_be_bytes();
        message[2..4].copy_from_slice(&check);
        send_frame(&world.inside, &map.v4("10.1.2.2", 1, &message));
        send_frame(&world.inside, &map.v4(FAR[0], 17, &udp(7, 7)));
        settle(&outside);
        assert_eq!(neighbour.marked(), 0, "{kind} {remove:?}: at the neighbour");
    }
}

fn udp_over_ipv6(from: Ipv6Addr, to: Ipv6Addr, source: u16, port: u16) -> Vec<u8> {
    let mut datagram = udp(source, port);
    let length = u32::from(length(datagram.len())).to_be_bytes();
    let pseudo = [&from.octets()[..], &to.octets(), &length, &[0, 0, 0, 17], &datagram].concat();
    datagram[6..8].copy_from_slice(&sum(&pseudo).to_be_bytes());
    datagram
}

/// Ends a flood, also when a test fails.
struct EndOfFlood<'a>(&'a AtomicBool);

impl Drop for EndOfFlood<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A container sends the frames of all ways as fast as it can, while others come and go, the rules
/// are flushed and deleted, a second ADD of the container is killed, and `repair` runs. With
/// `CNIBOX_LONG` there are a thousand cycles.
#[test]
fn a_flood_gets_nothing_out_whatever_happens_to_the_rules() {
    let keys = json!({"profile": "sandbox", "serve": ["tcp/80", "udp/53"]});
    let world = World::new("bridge", &keys);
    assert!(world.reaches(&world.outside, FAR[0], 9), "resolved");
    let (map, node, list) = (Map::of(&world), &world.node, list(&world.node, "bridge", &keys));
    let ways = ways(&map).into_iter().filter(|(way, _)| !OPEN_NOTHING.contains(way));
    let frames: Vec<Vec<u8>> = ways.flat_map(|(_, frames)| frames).collect();
    let (socket, [outside, neighbour]) =
        (frame_socket(&world.inside), [&world.outside, &world.neighbour].map(Capture::at));
    let host = UdpSocket::bind("0.0.0.0:4000").unwrap();
    host.set_nonblocking(true).unwrap();
    let cycles = if std::env::var_os("CNIBOX_LONG").is_some() { 1000 } else { 30 };
    let is_over = AtomicBool::new(false);
    // How often the frames of all ways were sent.
    let rounds = AtomicUsize::new(0);
    let flood = || {
        while !is_over.load(Ordering::Relaxed) {
            for frame in &frames {
                // The queue of the socket may be full.
                while socket.send(frame).is_err() && !is_over.load(Ordering::Relaxed) {
                    thread::yield_now();
                }
            }
            rounds.fetch_add(1, Ordering::Relaxed);
        }
    };
    thread::scope(|scope| {
        scope.spawn(flood);
        let _end = EndOfFlood(&is_over);
        for cycle in 0..cycles {
            let before = rounds.load(Ordering::Relaxed);
            let other = Container::new();
            let at = Attached::new(&format!("other{cycle}"), &other.path());
            let result = list.add(&at).unwrap();
            match cycle % 5 {
                0 => drop(node.sh("nft flush ruleset")),
                1 => drop(node.sh(
                    "nft delete table inet cnibox_egress; nft delete table bridge cnibox_egress",
                )),
                2 => drop(node.cnibox(&["repair"]).run()),
                _ => {
                    let mut add = list
                        .call("ADD", &world.attached(), 1, Some(&world.result))
                        .spawn()
                        .unwrap();
                    thread::sleep(Duration::from_micros(cycle * 137 % 3000));
                    add.kill().unwrap();
                    add.wait().unwrap();
                }
            }
            list.del(&at, Some(&result)).unwrap();
            eventually("a way was not tried", || rounds.load(Ordering::Relaxed) > before + 1);
            assert_eq!((outside.marked(), neighbour.marked()), (0, 0), "cycle {cycle}");
            assert!(host.recv(&mut [0; 64]).is_err(), "cycle {cycle}: at the host");
        }
    });
    send_frame(&world.inside, &map.v4(FAR[0], 17, &udp(7, 7)));
    settle(&outside);
}
