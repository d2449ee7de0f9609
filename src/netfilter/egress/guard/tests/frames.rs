//! Frames, described and generated.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::super::GuardPolicy;
use crate::dhcp::timing::RandomGenerator;
use crate::netlink::MacAddress;

pub(super) const MAC: MacAddress = MacAddress([0x0a, 0x58, 0x0a, 0x58, 0xfe, 0x02]);

/// The bridge of the container.
pub(super) const BRIDGE: MacAddress = MacAddress([0x0a, 0x58, 0x0a, 0x58, 0, 1]);

/// The address as the number that ranges have.
pub(super) fn numbered_ip(addr: IpAddr) -> u128 {
    match addr {
        IpAddr::V4(addr) => u32::from(addr).into(),
        IpAddr::V6(addr) => addr.into(),
    }
}

/// A packet of a container.
#[derive(Clone, Debug)]
pub(super) struct Packet {
    pub(super) to_mac: MacAddress,
    pub(super) mac: MacAddress,
    /// Another ethertype than that of the address.
    pub(super) ethertype: Option<u16>,
    /// An operation of ARP, for the address `to`.
    pub(super) arp: Option<u8>,
    pub(super) to: IpAddr,
    /// The last byte of the source address.
    pub(super) from: u8,
    pub(super) from_link: bool,
    pub(super) from_unspecified: bool,
    pub(super) protocol: u8,
    pub(super) hop_limit: u8,
    /// Flags and offset of IPv4.
    pub(super) fragment: u16,
    /// The length of the options of IPv4.
    pub(super) options: u8,
    pub(super) source_port: u16,
    pub(super) port: u16,
    /// Of TCP.
    pub(super) flags: u8,
    /// The type of ICMPv6.
    pub(super) icmp: u8,
    /// The target of a solicitation.
    pub(super) target: Ipv6Addr,
}

impl Packet {
    pub(super) fn to(addr: &str) -> Packet {
        Packet {
            to_mac: MacAddress([0xff; 6]),
            mac: MAC,
            ethertype: None,
            arp: None,
            to: addr.parse().unwrap(),
            from: 2,
            from_link: true,
            from_unspecified: false,
            protocol: 17,
            hop_limit: 255,
            fragment: 0,
            options: 0,
            source_port: 40000,
            port: 0,
            flags: 0x02,
            icmp: 128,
            target: Ipv6Addr::UNSPECIFIED,
        }
    }

    pub(super) fn to_number(addr: u128, is_v4: bool) -> Packet {
        let v4 = || Ipv4Addr::from(u32::try_from(addr).unwrap());
        let to = if is_v4 { v4().into() } else { Ipv6Addr::from(addr).into() };
        Packet { to, ..Packet::to("::") }
    }

    pub(super) fn to_frame(&self) -> Vec<u8> {
        let mut frame = self.to_mac.0.to_vec();
        frame.extend(self.mac.0);
        let own = match (self.arp, self.to) {
            (Some(_), _) => 0x0806,
            (None, IpAddr::V4(_)) => 0x0800,
            (None, IpAddr::V6(_)) => 0x86dd_u16,
        };
        frame.extend(self.ethertype.unwrap_or(own).to_be_bytes());
        match (self.arp, self.to) {
            (Some(operation), IpAddr::V4(to)) => {
                frame.extend([0, 1, 8, 0, 6, 4, 0, operation]);
                frame.extend(self.mac.0);
                frame.extend([10, 88, 0, 2, 0, 0, 0, 0, 0, 0]);
                frame.extend(to.octets());
            }
            (_, IpAddr::V4(to)) => self.put_v4(to, &mut frame),
            (_, IpAddr::V6(to)) => self.put_v6(to, &mut frame),
        }
        frame
    }

    fn put_v4(&self, to: Ipv4Addr, frame: &mut Vec<u8>) {
        frame.extend([0x45 + self.options / 4, 0, 0, 60, 0, 1]);
        frame.extend(self.fragment.to_be_bytes());
        frame.extend([64, self.protocol, 0, 0, 10, 88, 0, self.from]);
        frame.extend(to.octets());
        frame.resize(frame.len() + usize::from(self.options), 1);
        self.put_ports(frame);
    }

    fn put_v6(&self, to: Ipv6Addr, frame: &mut Vec<u8>) {
        frame.extend([0x60, 0, 0, 0, 0, 40, self.protocol, self.hop_limit]);
        let (first, last) =
            (if self.from_link { 0xfe80 } else { 0x2001 }, u16::from(self.from) + 3);
        let source =
            Ipv6Addr::new(first, if self.from_link { 0 } else { 0xdb8 }, 9, 0, 0, 0, 0, last);
        frame.extend(if self.from_unspecified { Ipv6Addr::UNSPECIFIED } else { source }.octets());
        frame.extend(to.octets());
        match self.protocol {
            0 => frame.extend([58, 0, 5, 2, 0, 0, 1, 0, self.icmp, 0, 0, 0]),
            58 => {
                frame.extend([self.icmp, 0, 0, 0, 0, 0, 0, 0]);
                frame.extend(self.target.octets());
            }
            _ => self.put_ports(frame),
        }
    }

    fn put_ports(&self, frame: &mut Vec<u8>) {
        frame.extend(self.source_port.to_be_bytes());
        frame.extend(self.port.to_be_bytes());
        frame.extend([0, 0, 0, 0, 0, 0, 0, 0, 0x50, self.flags, 1, 1, 0, 0, 0, 0]);
    }
}

/// Frames with the numbers of a policy and their neighbours.
pub(super) struct FrameGenerator {
    random: RandomGenerator,
    v4: Vec<u128>,
    v6: Vec<u128>,
    ports: Vec<u16>,
}

impl FrameGenerator {
    pub(super) fn new(policy: &GuardPolicy<'_>, seed: u64) -> FrameGenerator {
        let around = |number: u128| [number.saturating_sub(1), number, number.saturating_add(1)];
        let routers = |is_v4| policy.routers.iter().filter(move |addr| addr.is_ipv4() == is_v4);
        let ends = |ranges: &[super::AllowedRange], is_v4| {
            let ends = ranges.iter().flat_map(|range| [range.first, range.last]);
            ends.chain(routers(is_v4).map(|addr| numbered_ip(*addr)))
                .flat_map(around)
                .collect::<Vec<_>>()
        };
        let mut v4 = ends(&policy.allowed.v4, true);
        v4.retain(|addr| *addr <= u32::MAX.into());
        v4.extend([0, 0xc000_0201, u32::MAX.into()]);
        let mut v6 = ends(&policy.allowed.v6, false);
        let others = [
            "::",
            "ff02::1",
            "ff02::1:ff00:1",
            "ff02::16",
            "ff03::1",
            "fe80::7",
            "fe7f::",
            "febf::1",
            "fec0::",
        ];
        v6.extend(others.map(|text| numbered_ip(text.parse().unwrap())));
        let allowed =
            policy.allowed.v4.iter().chain(&policy.allowed.v6).flat_map(|range| &range.services);
        let ports = allowed.chain(policy.served).flat_map(|range| [range.first, range.last]);
        let mut ports: Vec<u16> =
            ports.flat_map(|port| around(port.into())).map(|port| (port & 0xffff) as u16).collect();
        ports.extend([0, 40000, 65535]);
        FrameGenerator { random: RandomGenerator::from_seed(seed), v4, v6, ports }
    }

    fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.random.next_number() as usize % all.len()]
    }

    fn is_one_in(&mut self, count: u32) -> bool {
        self.random.next_number().is_multiple_of(count)
    }

    fn next_packet(&mut self) -> Packet {
        let is_v4 = self.is_one_in(2);
        let (v4, v6, ports) = (self.v4.clone(), self.v6.clone(), self.ports.clone());
        let protocols = [6, 6, 17, 17, 33, 132, 136, 1, 58, 58, 58, 0, 44, 255];
        Packet {
            to_mac: self.pick(&[
                BRIDGE,
                BRIDGE,
                MacAddress([0x0a, 0x58, 0x0a, 0x58, 0, 7]),
                MacAddress([0xff; 6]),
            ]),
            mac: if self.is_one_in(30) {
                MacAddress([0x0a, 0x58, 0x0a, 0x58, 0xfe, 3])
            } else {
                MAC
            },
            ethertype: self.is_one_in(20).then(|| self.pick(&[0x8100, 0x88cc, 0x88b5])),
            arp: (is_v4 && self.is_one_in(6)).then(|| self.pick(&[1, 1, 2, 3, 8])),
            from: self.pick(&[2, 2, 2, 2, 1, 3]),
            from_link: self.is_one_in(2),
            from_unspecified: self.is_one_in(4),
            protocol: self.pick(&protocols),
            hop_limit: self.pick(&[255, 255, 64]),
            fragment: self.pick(&[0, 0, 0, 0x4000, 0x2000, 0x2001, 0x1fff]),
            options: self.pick(&[0, 0, 0, 4, 40]),
            source_port: self.pick(&ports),
            port: self.pick(&ports),
            flags: self.pick(&[0x02, 0x12, 0x10, 0x04, 0xff]),
            icmp: self.pick(&[128, 131, 132, 133, 134, 135, 135, 136, 137, 143]),
            target: self.pick(&v6).into(),
            ..Packet::to_number(if is_v4 { self.pick(&v4) } else { self.pick(&v6) }, is_v4)
        }
    }

    /// The next frame, sometimes with a byte changed.
    pub(super) fn next_frame(&mut self) -> Vec<u8> {
        let mut frame = self.next_packet().to_frame();
        if self.is_one_in(8) {
            let at = self.random.next_number() as usize % frame.len();
            frame[at] = (self.random.next_number() & 0xff) as u8;
        }
        frame
    }
}
