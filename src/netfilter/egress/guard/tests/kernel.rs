//! The program in the kernel: a container's frames, of which those that pass are redirected to
//! another link.

use std::io::{ErrorKind, Read};
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;
use std::time::Duration;

use nix::ifaddrs::getifaddrs;
use nix::sys::socket::bind;
use socket2::{Domain, Protocol, Socket, Type};

use super::{
    AllowedTraffic, BRIDGE, FrameGenerator, MAC, OwnedPolicy, Packet, RandomGenerator,
    compile_filter, naive, networks, protocol, random_policy, range, sample_policy, service,
};
use crate::iface::guard::{SINK, has_guard, put_guard};
use crate::iface::redirect;
use crate::netlink::{Link, LinkChange, LinkKind, Netlink, NewLink, VethPeer};
use crate::netns::{Netns, isolate_test_thread};

/// A socket for all frames of an interface of the calling thread's namespace.
fn packet_socket(ifname: &str) -> Socket {
    let own = getifaddrs()
        .unwrap()
        .find(|entry| entry.interface_name == ifname && entry.address.is_some_and(is_link));
    let socket =
        Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(i32::from(3_u16.to_be()))))
            .unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    bind(socket.as_raw_fd(), own.unwrap().address.unwrap().as_link_addr().unwrap()).unwrap();
    socket
}

fn is_link(addr: nix::sys::socket::SockaddrStorage) -> bool {
    addr.as_link_addr().is_some()
}

/// A namespace with the host's end `host0` of a container's `eth0`.
struct Rig {
    netlink: Netlink,
    container: Netns,
    end: Link,
}

impl Rig {
    fn new() -> Rig {
        isolate_test_thread();
        let (netlink, container) = (Netlink::open().unwrap(), Netns::create_unnamed().unwrap());
        let peer = VethPeer::new("eth0").with_netns(container.as_fd()).with_mac(MAC);
        let end = netlink
            .add_and_read_link(&NewLink::new("host0", LinkKind::Veth { peer }).set_up())
            .unwrap();
        let inside = Netlink::open_in(&container).unwrap();
        inside
            .change_link(inside.require_link("eth0").unwrap().index, LinkChange::new().set_up())
            .unwrap();
        Rig { netlink, container, end }
    }

    fn guard(&self, policy: &OwnedPolicy) {
        let guard = compile_filter(&policy.guard()).unwrap();
        put_guard(&self.netlink, &self.end, guard.clone(), SINK).unwrap();
        assert!(has_guard(&self.netlink, &self.end, &guard, SINK).unwrap());
    }

    /// Redirects the frames that pass; returns a socket at their destination.
    fn redirect(&self) -> Socket {
        let peer = VethPeer::new("seen1");
        let target = NewLink::new("seen0", LinkKind::Veth { peer }).set_up();
        let target = self.netlink.add_and_read_link(&target).unwrap();
        let seen = self.netlink.require_link("seen1").unwrap();
        self.netlink.change_link(seen.index, LinkChange::new().set_up()).unwrap();
        redirect::add(&self.netlink, &self.end, &target).unwrap();
        packet_socket("seen1")
    }

    /// Redirects all frames to a device for shaping, which returns them.
    fn shape(&self) {
        let device =
            self.netlink.add_and_read_link(&NewLink::new("ifb9", LinkKind::Ifb).set_up()).unwrap();
        redirect::add(&self.netlink, &self.end, &device).unwrap();
    }

    fn run_inside(&self, command: &str) -> bool {
        let (program, args) = command.split_once(' ').unwrap();
        let run = || Command::new(program).args(args.split(' ')).output().unwrap().status.success();
        self.container.run_inside(run).unwrap()
    }
}

/// Whether the frame passes, if it is sent before a frame that passes.
fn passes(sender: &Socket, seen: &Socket, frame: &[u8], mark: &mut u16) -> bool {
    *mark += 1;
    // A reply of ARP, with a number in its padding.
    let mut last = Packet { arp: Some(2), to_mac: BRIDGE, ..Packet::to("10.88.0.1") }.to_frame();
    last.extend([0xa5, 0x5a]);
    last.extend(mark.to_be_bytes());
    let (mut buffer, mut found) = ([0; 2048], false);
    // The kernel drops frames while the queue of a processor is full, which other tests can fill.
    for _ in 0..3 {
        sender.send(frame).unwrap();
        sender.send(&last).unwrap();
        while let Ok(length) = (&*seen).read(&mut buffer) {
            found |= &buffer[..length] == frame;
            if buffer[..length] == last[..] {
                return found;
            }
        }
    }
    panic!("no frame arrives");
}

#[test]
fn the_kernel_judges_frames_as_by_the_rules() {
    let rig = Rig::new();
    let mut random = RandomGenerator::from_seed(23);
    let policies = [
        sample_policy(),
        networks(500, true),
        OwnedPolicy { served: Vec::new(), ..sample_policy() },
    ];
    let policies = policies.into_iter().chain((0..20).map(|_| random_policy(&mut random)));
    let sender = rig.container.run_inside(|| packet_socket("eth0")).unwrap();
    let (mut seen, mut mark, mut passed) = (None, 0, 0);
    for (seed, policy) in (0..).zip(policies) {
        rig.guard(&policy);
        let seen = seen.get_or_insert_with(|| rig.redirect());
        let mut frames = FrameGenerator::new(&policy.guard(), seed);
        for at in 0..150 {
            let frame = frames.next_frame();
            // The kernel moves the tag of a VLAN out of the frame.
            if frame[12..14] == [0x81, 0] {
                continue;
            }
            let shortest = if at % 15 == 0 { 14 } else { frame.len() };
            for frame in (shortest..=frame.len()).map(|end| &frame[..end]) {
                let expected = naive::passes(&policy.guard(), frame);
                assert_eq!(
                    passes(&sender, seen, frame, &mut mark),
                    expected,
                    "{frame:02x?}\n{policy:?}"
                );
                passed += u32::from(expected);
            }
        }
    }
    assert!(passed > 500, "{passed}");
}

/// A container pings and sends what is allowed, and nothing else.
fn send_and_ping(rig: &Rig) {
    let (v4, v6): (IpAddr, IpAddr) = ("10.88.0.1".parse().unwrap(), "fd00:88::1".parse().unwrap());
    let add = |what: &str| {
        assert!(Command::new("ip").args(what.split(' ')).status().unwrap().success(), "{what}");
    };
    add("addr add 10.88.0.1/24 dev host0");
    add("addr add fd00:88::1/64 dev host0 nodad");
    assert!(rig.run_inside("ip addr add 10.88.0.2/24 dev eth0"));
    assert!(rig.run_inside("ip addr add fd00:88::2/64 dev eth0 nodad"));

    let refused = OwnedPolicy { routers: vec![v4, v6], ..OwnedPolicy::default() };
    rig.guard(&refused);
    assert!(!rig.run_inside("ping -c 1 -W 1 10.88.0.1"));
    assert!(!rig.run_inside("ping -c 1 -W 1 fd00:88::1"));
    // The neighbours were found all the same.
    assert!(
        rig.run_inside("ip neigh get 10.88.0.1 dev eth0")
            && rig.run_inside("ip neigh get fd00:88::1 dev eth0")
    );

    let icmp = OwnedPolicy {
        allowed: AllowedTraffic {
            v4: vec![range("10.88.0.1", "10.88.0.1", &[protocol(1), service(17, 5000)])],
            v6: vec![range("fd00:88::1", "fd00:88::1", &[protocol(58)])],
        },
        ..OwnedPolicy::default()
    };
    rig.guard(&icmp);
    assert!(rig.run_inside("ping -c 1 -W 5 10.88.0.1"));
    assert!(rig.run_inside("ping -c 1 -W 5 fd00:88::1"));

    let [good, bad] = [5000, 5001].map(|port| UdpSocket::bind((v4, port)).unwrap());
    let own = rig.container.run_inside(|| UdpSocket::bind("10.88.0.2:0").unwrap()).unwrap();
    own.send_to(b"x", (v4, 5001)).unwrap();
    own.send_to(b"x", (v4, 5000)).unwrap();
    good.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    assert_eq!(good.recv(&mut [0; 8]).unwrap(), 1);
    bad.set_nonblocking(true).unwrap();
    assert_eq!(bad.recv(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn a_container_sends_what_is_allowed() {
    send_and_ping(&Rig::new());
}

#[test]
fn a_container_sends_what_is_allowed_and_then_shaped() {
    let rig = Rig::new();
    rig.guard(&OwnedPolicy::default());
    rig.shape();
    send_and_ping(&rig);
}

#[test]
fn a_container_sends_what_is_shaped_and_then_allowed() {
    let rig = Rig::new();
    rig.shape();
    send_and_ping(&rig);
    rig.netlink.delete_link("ifb9").unwrap();
    assert_eq!(crate::iface::guard::find_place(&rig.netlink, &rig.end).unwrap().program, None);
}
