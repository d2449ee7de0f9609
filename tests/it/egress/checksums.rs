//! Checksums that the kernel is asked to write: the sender names a word of the packet, a part of
//! its destination, and the kernel would write it when the node sends the packet on, behind both
//! guards. A program asks by `PACKET_VNET_HDR`, a virtual machine by the header of virtio-net.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use cnibox::testing::netlink::Netlink;
use nix::libc;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::SetStruct;
use serde_json::{Value, json};
use socket2::Socket;

use super::ways::{Capture, Map, ipv4, ipv6, sum, tcp, udp};
use super::{FAR, OUTSIDE, World, list};
use crate::hostile::frame_socket;
use crate::support::conflist::Attached;
use crate::support::node::Container;
use crate::support::tap::{SINGLE, open};

/// Public addresses that become private ones when a word of them is written, as `2600:f::7` does.
const PUBLIC: &str = "8.8.0.0/16";

const KEYS: fn() -> Value = || {
    json!({"profile": "sandbox", "serve": [],
        "deny": [{"to": [FAR[0]], "ports": ["udp/25", "tcp/25"]}]})
};

/// From `linux/if_packet.h`; libc lacks it for some systems.
const PACKET_VNET_HDR: i32 = 15;
const PACKET_QDISC_BYPASS: i32 = 20;

/// The socket option by which frames have the header of virtio-net.
#[derive(Clone, Copy)]
struct FrameHeader;

/// The socket option by which frames pass no queueing discipline.
#[derive(Clone, Copy)]
struct QdiscBypass;

nix::setsockopt_impl!(FrameHeader, libc::SOL_PACKET, PACKET_VNET_HDR, i32, SetStruct<i32>);
nix::setsockopt_impl!(QdiscBypass, libc::SOL_PACKET, PACKET_QDISC_BYPASS, i32, SetStruct<i32>);

/// What sends frames with the header of virtio-net.
enum Sender {
    Program(Socket),
    Machine(File),
}

impl Sender {
    fn program(container: &Container, bypasses: bool) -> Sender {
        let socket = frame_socket(container);
        setsockopt(&socket.as_fd(), FrameHeader, &1).unwrap();
        if bypasses {
            setsockopt(&socket.as_fd(), QdiscBypass, &1).unwrap();
        }
        Sender::Program(socket)
    }

    fn machine(container: &Container) -> Sender {
        Sender::Machine(container.run(|| open("tap0", SINGLE | libc::IFF_VNET_HDR)).unwrap())
    }

    /// Whether the kernel takes the frame.
    fn send(&self, frame: &[u8]) -> bool {
        match self {
            Sender::Program(socket) => socket.send(frame).is_ok(),
            Sender::Machine(tap) => (&*tap).write_all(frame).is_ok(),
        }
    }
}

/// The checksum that is asked for: the first byte of the sum, and the place of the word behind it.
#[derive(Clone, Copy)]
struct Request {
    start: u16,
    offset: u16,
    /// The type of segments and their size; 0 without.
    segments: (u8, u16),
}

const TCP4: u8 = 1;
const UDP: u8 = 3;
const UDP_L4: u8 = 5;

impl Request {
    /// `struct virtio_net_hdr`, in the byte order of the machine, before the frame.
    fn before(self, frame: &[u8]) -> Vec<u8> {
        let (kind, size) = self.segments;
        let header_length = if kind == 0 { 0_u16 } else { 54 };
        let words = [header_length, size, self.start, self.offset];
        let words = words.map(u16::to_ne_bytes).concat();
        [&[1, kind][..], &words, frame].concat()
    }
}

/// Sets the last word of the frame so that the kernel, which adds `rest` to the sum, writes `word`.
fn aimed(mut frame: Vec<u8>, request: Request, word: u16, rest: &[u8]) -> Vec<u8> {
    let last = frame.len() - 2;
    frame[last..].fill(0);
    let summed = [&frame[usize::from(request.start)..], rest].concat();
    let (present, wanted) = (u32::from(!sum(&summed)), u32::from(!word));
    let free = u16::try_from((wanted + 0xffff - present) % 0xffff).unwrap();
    frame[last..].copy_from_slice(&free.to_be_bytes());
    frame
}

/// A way, its frames with their headers, and whether a node that writes the word on output sends
/// the packet to an address or port that the policy refuses.
type Way = (&'static str, Vec<Vec<u8>>, bool);

/// Frames whose destination changes.
fn ways(map: &Map) -> Vec<Way> {
    // Behind the mark one byte, so that the last word is one of the sum.
    let padded = |datagram: Vec<u8>, more: usize| [datagram, vec![0; 3 + more]].concat();
    let payload = |port: u16| padded(lengthened(udp(1000, port), 3), 0);
    let v4 = |to: &str, protocol: u8, payload: &[u8]| {
        map.eth(map.router, 0x0800, &ipv4(map.ip, to, protocol, 0x4000, payload))
    };
    let whole = |start, offset| Request { start, offset, segments: (0, 0) };
    let address = whole(30, 0);
    let one = |frame: Vec<u8>, request: Request, word: u16| {
        vec![request.before(&aimed(frame, request, word, &[]))]
    };
    let segments = |kind, start, offset| Request { start, offset, segments: (kind, 200) };
    let large = |datagram: Vec<u8>| padded(lengthened(datagram, 1003), 1000);
    let by_tcp = padded(tcp(1000, 9, 0x10), 1000);
    let v6 = map.eth(map.router, 0x86dd, &ipv6(map.ip6, "2600:f::7", 17, 64, &payload(9)));
    vec![
        ("an address", one(v4("8.8.169.254", 17, &payload(80)), address, 0xa9fe), true),
        ("a private address", one(v4("8.8.0.2", 17, &payload(80)), address, 0x0a09), true),
        ("a port", one(v4(FAR[0], 17, &payload(9)), whole(34, 2), 25), true),
        ("an unknown protocol", one(v4("8.8.169.254", 253, &payload(80)), address, 0xa9fe), true),
        ("an address of IPv6", one(v6.clone(), whole(38, 0), 0xfd00), true),
        ("a sum from the source on", one(v6, whole(22, 16), 0xfd00), true),
        ("two fragments", fragments(map, address), true),
        (
            "a later fragment",
            one(
                map.eth(map.router, 0x0800, &ipv4(map.ip, "8.8.169.254", 17, 100, &payload(80))),
                address,
                0xa9fe,
            ),
            false,
        ),
        ("segments of TCP", one(v4(FAR[0], 6, &by_tcp), segments(TCP4, 20, 16), 25), false),
        (
            "segments of UDP",
            one(v4("8.8.169.254", 17, &large(udp(1000, 80))), segments(UDP_L4, 34, 6), 0xa9fe),
            false,
        ),
        (
            "segments of UDP, the address",
            one(v4("8.8.169.254", 17, &large(udp(1000, 80))), segments(UDP_L4, 24, 6), 0xa9fe),
            false,
        ),
        (
            "fragments of UDP by the kernel",
            one(v4("8.8.169.254", 17, &large(udp(1000, 80))), segments(UDP, 30, 0), 0xa9fe),
            false,
        ),
    ]
}

/// A datagram whose header says that `more` bytes follow the present ones.
fn lengthened(mut datagram: Vec<u8>, more: usize) -> Vec<u8> {
    let length = u16::try_from(datagram.len() + more).unwrap();
    datagram[4..6].copy_from_slice(&length.to_be_bytes());
    datagram
}

/// The node joins them, and would write the word when it splits the packet again.
fn fragments(map: &Map, request: Request) -> Vec<Vec<u8>> {
    let body = [lengthened(udp(1000, 80), 1573), vec![0; 1573]].concat();
    let (first, second) = body.split_at(800);
    let frame = |flags: u16, part: &[u8]| {
        map.eth(map.router, 0x0800, &ipv4(map.ip, "8.8.169.254", 17, flags, part))
    };
    let aimed = aimed(frame(0x2000, first), request, 0xa9fe, second);
    vec![request.before(&aimed), request.before(&frame(100, second))]
}

/// Whether the policy refuses the destination of a frame.
fn is_refused(frame: &[u8]) -> bool {
    let refused: [&[u8]; 2] = [&[169, 254, 169, 254], &[10, 9, 0, 2]];
    match frame[12..14] {
        [0x08, 0x00] => {
            refused.contains(&&frame[30..34])
                || frame[30..34] == [192, 0, 2, 7] && frame[36..38] == [0, 25]
        }
        _ => frame[38..40] == [0xfd, 0],
    }
}

/// The number of frames that arrive outside although the policy refuses their destination. The last
/// frame is allowed: the kernel is asked for the checksum of its header of UDP, and writes it.
fn refused_arrivals(sender: &Sender, map: &Map, outside: &Capture, frames: &[Vec<u8>]) -> usize {
    for frame in frames {
        sender.send(frame);
    }
    let request = Request { start: 34, offset: 6, segments: (0, 0) };
    let mut control = map.v4(FAR[0], 17, &udp(7, 7));
    // The sum of the pseudo header, as a stack leaves it there.
    let pseudo = [&control[26..34], &[0, 17], &control[38..40]].concat();
    control[40..42].copy_from_slice(&(!sum(&pseudo)).to_be_bytes());
    let seed = control[40..42].to_vec();
    assert!(sender.send(&request.before(&control)), "what is allowed is not sent");
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut refused = 0;
    loop {
        let arrived = outside.frames();
        refused += arrived.iter().filter(|frame| is_refused(frame)).count();
        let of_control = |frame: &&Vec<u8>| frame[34..38] == [0, 7, 0, 7];
        if let Some(control) = arrived.iter().find(of_control) {
            assert_ne!(control[40..42], seed, "the checksum is not written");
            return refused;
        }
        assert!(Instant::now() < deadline, "what is allowed does not arrive");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Routes to the networks whose addresses change, by a link that computes no checksums, like many
/// cards.
fn route_outside(world: &World) {
    let link = world.node.sh(&format!("ip -o route get {}", OUTSIDE[0]));
    let link = link.split_whitespace().skip_while(|word| *word != "dev").nth(1).unwrap().to_owned();
    let [v4, v6] = OUTSIDE;
    world.node.sh(&format!("ip route add {PUBLIC} via {v4} dev {link}"));
    world.node.sh(&format!("ip -6 route add 2600:f::/32 via {v6} dev {link}"));
    // The node asks for the MAC address of the destination, not of the gateway of ptp.
    for addr in ["8.8.169.254", "8.8.0.2"] {
        world.outside.sh(&format!("ip addr add {addr}/32 dev eth0"));
    }
    Netlink::open().unwrap().set_checksum_offload(&link, false).unwrap();
}

fn set_offload(container: &Container, is_on: bool) {
    container.run(|| Netlink::open().unwrap().set_checksum_offload("eth0", is_on)).unwrap();
}

/// With both guards, and with the filter alone.
fn nothing_refused_arrives(world: &World, senders: &[Sender], what: &str) {
    let map = Map::of(world);
    let outside = Capture::at(&world.outside);
    for guards in ["rules and filter", "filter alone"] {
        for (nth, sender) in senders.iter().enumerate() {
            for (way, frames, _) in ways(&map) {
                let arrived = refused_arrivals(sender, &map, &outside, &frames);
                assert_eq!(arrived, 0, "{what}, {guards}, sender {nth}: {way}");
            }
        }
        world.node.sh("nft flush ruleset");
    }
    // Only a container with CAP_NET_ADMIN can do this. It shows that the frames are the right ones.
    set_offload(&world.inside, true);
    let (_, frames, _) = &ways(&map)[0];
    for sender in senders {
        assert!(refused_arrivals(sender, &map, &outside, frames) > 0, "{what}");
    }
}

#[test]
fn no_checksum_changes_the_destination_of_a_programs_frame() {
    for kind in ["bridge", "ptp"] {
        let world = World::new(kind, &KEYS());
        route_outside(&world);
        let senders = [false, true].map(|bypasses| Sender::program(&world.inside, bypasses));
        nothing_refused_arrives(&world, &senders, kind);
    }
}

#[test]
fn no_checksum_changes_the_destination_of_a_machines_frame() {
    for kind in ["bridge", "ptp"] {
        for order in [1, 2] {
            let mut world = World::new(kind, &KEYS());
            route_outside(&world);
            let machine = Container::new();
            let mut list = list(&world.node, kind, &KEYS());
            list.conf["plugins"]
                .as_array_mut()
                .unwrap()
                .insert(order, json!({"type": "tc-redirect-tap"}));
            let at = Attached::new("machine", &machine.path());
            let result = list.add(&at).unwrap();
            list.check(&at, &result).unwrap();
            (world.inside, world.result) = (machine, result);
            let senders = [Sender::machine(&world.inside)];
            nothing_refused_arrives(&world, &senders, &format!("{kind}, egress {order}"));
        }
    }
}

#[test]
fn an_offload_that_was_switched_on_is_found() {
    let world = World::new("bridge", &KEYS());
    let list = list(&world.node, "bridge", &KEYS());
    route_outside(&world);
    let map = Map::of(&world);
    let (sender, outside) = (Sender::program(&world.inside, false), Capture::at(&world.outside));
    let arrivals = || -> Vec<&str> {
        let arrived = ways(&map)
            .into_iter()
            .filter(|(_, frames, _)| refused_arrivals(&sender, &map, &outside, frames) > 0);
        arrived.map(|(way, ..)| way).collect()
    };
    list.check(&world.attached(), &world.result).unwrap();
    assert_eq!(arrivals(), [""; 0]);
    set_offload(&world.inside, true);
    let changed: Vec<&str> =
        ways(&map).into_iter().filter(|(_, _, changes)| *changes).map(|(way, ..)| way).collect();
    let arrived = arrivals();
    // Debian's kernels do not put these fragments together (up to 6.1, without br_netfilter), or
    // fail to send on what they have put together (6.12, 7.2: IpFragFails).
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let fails = ["5.", "6.1.", "6.12.", "7."].iter().any(|version| kernel.starts_with(version));
    let is_possible = |way: &&&str| !fails || **way != "two fragments";
    assert!(changed.iter().filter(is_possible).all(|way| arrived.contains(way)), "{arrived:?}");
    let error = list.check(&world.attached(), &world.result).unwrap_err();
    let what = format!(
        "the transmit checksum offload of \"eth0\" behind port \"{}\" is on: checksums are written \
         behind the filter",
        world.end()
    );
    assert_eq!(error.msg, what);
}

#[test]
fn the_offload_is_off_while_the_pair_lives_unless_add_fails() {
    for kind in ["bridge", "ptp"] {
        let world = World::new(kind, &KEYS());
        let list = list(&world.node, kind, &KEYS());
        let offload = |container: &Container| {
            container.run(|| Netlink::open().unwrap().has_checksum_offload("eth0").unwrap())
        };
        assert!(!offload(&world.inside) && offload(&world.neighbour), "{kind}");
        let add = || list.call("ADD", &world.attached(), 1, Some(&world.result));
        set_offload(&world.inside, true);
        add().result();
        assert!(!offload(&world.inside), "{kind}: a second ADD");
        list.call("DEL", &world.attached(), 1, Some(&world.result)).ok();
        assert!(!offload(&world.inside), "{kind}: the container may still run");
        // A failed ADD leaves what it found.
        let end = world.end();
        world.node.sh(&format!(
            "tc qdisc del dev {end} ingress && tc qdisc add dev {end} ingress && \
             tc filter add dev {end} parent ffff: prio 1 protocol all u32 match u32 0 0 flowid 1:1"
        ));
        for is_on in [true, false] {
            set_offload(&world.inside, is_on);
            assert!(add().error().msg.contains("judges frames"), "{kind}");
            assert_eq!(offload(&world.inside), is_on, "{kind}: after a failed ADD");
        }
        world.node.sh(&format!("tc qdisc del dev {end} ingress"));
        add().result();
        assert!(!offload(&world.inside), "{kind}: ADD again");
        list.check(&world.attached(), &world.result).unwrap();
        list.del(&world.attached(), Some(&world.result)).unwrap();
        let again = list.add(&world.attached()).unwrap();
        assert!(!offload(&world.inside), "{kind}: another pair");
        list.check(&world.attached(), &again).unwrap();
    }
}
