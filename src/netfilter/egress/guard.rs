//! The second guard of egress policies: a program of classic BPF that judges each frame of a
//! container before the bridge and before netfilter. It keeps no state, and a flush of nftables
//! does not remove it.
//!
//! A frame passes if it is a request to an allowed service, may be a reply of a served service, or
//! is needed on the link. A load beyond the end of the frame would end the program with 0, as if
//! the frame may pass: the length is compared before each load that may be beyond it.

mod assembler;
mod search;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use nix::libc;

use self::assembler::{
    ADD, AND, Assembler, COPY_X, IF_AT_LEAST, IF_AT_LEAST_X, IF_BIT, IF_EQUAL, LOAD_BYTE,
    LOAD_BYTE_AT_X, LOAD_CELL, LOAD_HALF, LOAD_HALF_AT_X, LOAD_LENGTH, LOAD_NUMBER, LOAD_WORD,
    LOAD_X_CELL, LOAD_X_HEADER_LENGTH, LOAD_X_NUMBER, Label, OR_X, SET_X, SHIFT_LEFT, STORE_CELL,
    STORE_X_CELL,
};
use self::search::put_search;
use super::compile::{AllowedRange, AllowedTraffic, LAST_SERVICE, ServiceRange, address_number};
use crate::netlink::MacAddress;
use crate::netlink::traffic::program::{
    ClassicInstruction, ProgramFilter, TC_ACT_SHOT, TC_ACT_UNSPEC,
};
use cni::error::{Error, Result};
use cni::sort::sort_items;

/// The maximum number of instructions of a program. The kernel accepts 4096, but has to list a
/// filter in one message of 32 KiB.
pub const MOST_INSTRUCTIONS: usize = 4000;

/// The next filter is asked.
const PASS: u32 = 0;
/// The frame goes to the sink.
const DROP: u32 = 1;

/// Lengths of headers in bytes: Ethernet; Ethernet and ARP; Ethernet and the fixed part of IPv4 and
/// of IPv6.
const ETHERNET: u32 = 14;
const ARP: u32 = ETHERNET + 28;
const IPV4: u32 = ETHERNET + 20;
const IPV6: u32 = ETHERNET + 40;
/// The end of the target in a neighbour solicitation.
const SOLICITATION: u32 = IPV6 + 24;

/// The offset of the flag for a VLAN tag that is not in the frame's data:
/// `SKF_AD_VLAN_TAG_PRESENT`.
const VLAN_TAG_PRESENT: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_VLAN_TAG_PRESENT).cast_unsigned();

/// Offsets in the frame.
const DESTINATION_MAC: u32 = 0;
const SOURCE_MAC: u32 = 6;
const ETHERTYPE: u32 = 12;
const ARP_SENDER_MAC: u32 = 22;
const ARP_SENDER: u32 = 28;
const ARP_TARGET: u32 = 38;
const IPV4_SOURCE: u32 = 26;
const IPV4_DESTINATION: u32 = 30;
const IPV6_HOP_LIMIT: u32 = 21;
const IPV6_SOURCE: u32 = 22;
const IPV6_DESTINATION: u32 = 38;

/// Cells of the memory: the protocol << 16, the length of the IP header, the destination's service,
/// the source's.
const PROTOCOL: u32 = 0;
const HEADER: u32 = 1;
const SERVICE: u32 = 2;
const SOURCE_SERVICE: u32 = 3;
/// The address that is looked up; IPv4 has only the first cell.
const ADDRESS: [u32; 4] = [4, 5, 6, 7];
/// Whether the frame is for a neighbour instead of the bridge: 1 or 0. Only with
/// [`GuardPolicy::bridge`].
const IS_FOR_NEIGHBOUR: u32 = 8;

/// A number above all services, which stands for any of them.
const ANY_SERVICE: u32 = u32::MAX;

const ETHERTYPE_IPV4: u32 = 0x0800;
const ETHERTYPE_ARP: u32 = 0x0806;
const ETHERTYPE_IPV6: u32 = 0x86dd;
const ICMP: u32 = 1;
const TCP: u32 = 6;
/// TCP, UDP, DCCP, SCTP, UDP-Lite.
const PROTOCOLS_WITH_PORTS: [u32; 5] = [TCP, 17, 33, 132, 136];
const HOP_BY_HOP: u32 = 0;
const FRAGMENT: u32 = 44;
const ICMPV6: u32 = 58;
/// Multicast listener discovery: report, done, report of version 2.
const LISTENER_TYPES: [u32; 3] = [131, 132, 143];
/// The types of echo replies of ICMP and ICMPv6.
const ECHO_REPLY: u32 = 0;
const ECHO_REPLY6: u32 = 129;
const ROUTER_SOLICITATION: u32 = 133;
const NEIGHBOUR_SOLICITATION: u32 = 135;
const NEIGHBOUR_ADVERTISEMENT: u32 = 136;
/// The first half of `ff02::/16`.
const LINK_MULTICAST: u32 = 0xff02;
/// `fe80::/10`.
const LINK_LOCAL: (u128, u128) = (0xfe80 << 112, (0xfec0 << 112) - 1);

/// What a container may send.
#[derive(Clone, Copy, Debug)]
pub struct GuardPolicy<'a> {
    /// The address of the container's interface.
    pub mac: MacAddress,
    pub allowed: &'a AllowedTraffic,
    /// The services of the container whose replies pass.
    pub served: &'a [ServiceRange],
    /// Gateways and addresses of the host, whose MAC addresses the container may ask for.
    pub routers: &'a [IpAddr],
    /// The container's addresses, from which alone it may send; `None`: any.
    pub sources: Option<&'a [IpAddr]>,
    /// The part of `allowed` on the container's own link, whose MAC addresses the container may
    /// ask for.
    pub found: &'a AllowedTraffic,
    /// The part of that for neighbours: without addresses of the host.
    pub neighbours: &'a AllowedTraffic,
    /// The address of the bridge, if it is the only router: frames to others are for neighbours.
    pub bridge: Option<MacAddress>,
}

/// The program for a policy, which judges frames with the container's MAC address: it returns 0 for
/// what may pass and 1 for the rest, at the ingress of the host's end of a veth pair. Fails with
/// code 7 if the program would be longer than the kernel accepts.
fn compile_program(policy: &GuardPolicy<'_>) -> Result<Vec<ClassicInstruction>> {
    let mut code = Assembler::new();
    let (drop, pass) = (code.put_return(DROP), code.put_return(PASS));
    GuardCompiler { policy, code: &mut code, pass, drop }.put_program();
    let program = code.into_program();
    if program.len() > MOST_INSTRUCTIONS {
        let (needed, most) = (program.len(), MOST_INSTRUCTIONS);
        return Err(Error::config(format!(
            "the egress policy needs a filter of {needed} instructions of {most}"
        ))
        .with_details("allow fewer networks, or larger networks instead of their parts"));
    }
    Ok(program)
}

/// The filter for a policy. Its first program drops frames with another MAC address than the
/// container's: what reaches the sink is recorded and answered by that address.
pub fn compile_filter(policy: &GuardPolicy<'_>) -> Result<ProgramFilter> {
    let mut code = Assembler::new();
    let (drop, pass) = (code.put_return(TC_ACT_SHOT), code.put_return(TC_ACT_UNSPEC));
    let mut first = GuardCompiler { policy, code: &mut code, pass, drop };
    let own = first.put_if_mac(SOURCE_MAC, policy.mac, pass, drop);
    first.put_if_long(ETHERNET, own);
    let program = compile_program(policy)?;
    Ok(ProgramFilter { first: code.into_program(), program, redirect: None })
}

/// Writes the parts of the program, the last one first. Each part begins at the returned label.
struct GuardCompiler<'a> {
    policy: &'a GuardPolicy<'a>,
    code: &'a mut Assembler,
    pass: Label,
    drop: Label,
}

/// What the parts for IPv4 and IPv6 continue with.
struct IpParts {
    /// Passes if any service is allowed at the address in [`ADDRESS`], on the link.
    found4: Label,
    found6: Label,
    /// Passes if a neighbour on the bridge has the address in [`ADDRESS`] and any service is
    /// allowed there.
    neighbour6: Label,
    /// Judges an IPv6 packet by its destination and the service in [`SERVICE`].
    v6_destination: Label,
    /// Judges a packet of the protocol in A, whose header begins behind the X bytes of the IP
    /// header.
    transport: Label,
}

impl GuardCompiler<'_> {
    fn put_program(&mut self) {
        let frames = self.put_frames();
        let policy = self.policy;
        let frames = policy.bridge.map_or(frames, |bridge| {
            let [to_bridge, to_neighbour] = [0, 1].map(|side| {
                self.code.put_all(&[(LOAD_NUMBER, side), (STORE_CELL, IS_FOR_NEIGHBOUR)], frames)
            });
            self.put_if_mac(DESTINATION_MAC, bridge, to_bridge, to_neighbour)
        });
        self.put_if(LOAD_WORD, VLAN_TAG_PRESENT, 0, frames, self.drop);
    }

    /// Judges frames of all ethertypes.
    fn put_frames(&mut self) -> Label {
        let found4 = self.put_lookup(&ADDRESS[..1], &self.policy.found.v4);
        let found6 = self.put_lookup(&ADDRESS, &self.policy.found.v6);
        let [found4, found6] = [found4, found6].map(|lookup| self.put_any_service(lookup));
        let v4 = self.put_lookup(&ADDRESS[..1], &self.policy.allowed.v4);
        let v6 = self.put_lookup(&ADDRESS, &self.policy.allowed.v6);
        let neighbour4 = self.put_lookup(&ADDRESS[..1], &self.policy.neighbours.v4);
        let neighbour6 = self.put_lookup(&ADDRESS, &self.policy.neighbours.v6);
        let (v4, v6) = (self.put_by_side(v4, neighbour4), self.put_by_side(v6, neighbour6));
        let neighbour6 = self.put_any_service(neighbour6);
        let v6_destination = self.put_load_v6(IPV6_DESTINATION, v6);
        let v4_destination =
            self.code.put_all(&[(LOAD_WORD, IPV4_DESTINATION), (STORE_CELL, ADDRESS[0])], v4);
        let destination =
            self.put_if(LOAD_HALF, ETHERTYPE, ETHERTYPE_IPV4, v4_destination, v6_destination);
        let transport = self.put_transport(destination);
        let parts = IpParts { found4, found6, neighbour6, v6_destination, transport };
        let ipv6 = self.put_ipv6(&parts);
        let ipv4 = self.put_ipv4(&parts, v4_destination);
        let arp = self.put_arp(&parts);
        let by_type = [(ETHERTYPE_ARP, arp), (ETHERTYPE_IPV6, ipv6), (ETHERTYPE_IPV4, ipv4)];
        self.put_choice(LOAD_HALF, ETHERTYPE, &by_type, self.drop)
    }

    /// Continues by [`IS_FOR_NEIGHBOUR`].
    fn put_by_side(&mut self, to_bridge: Label, to_neighbour: Label) -> Label {
        if self.policy.bridge.is_none() {
            return to_bridge;
        }
        let side = self.code.put_branch(IF_EQUAL, 0, to_bridge, to_neighbour);
        if side == to_bridge { to_bridge } else { self.code.put(LOAD_CELL, IS_FOR_NEIGHBOUR, side) }
    }

    /// Looks up an address, then the service in [`SERVICE`].
    fn put_lookup(&mut self, cells: &[u32], allowed: &[AllowedRange]) -> Label {
        let mut ranges = Vec::with_capacity(allowed.len());
        for range in allowed {
            let mut services = range.services.clone();
            match services.last_mut() {
                // One range for all numbers from the first on.
                Some(last) if last.last == LAST_SERVICE => last.last = ANY_SERVICE,
                _ => services.push(ServiceRange { first: ANY_SERVICE, last: ANY_SERVICE }),
            }
            let service = self.put_services(SERVICE, services, self.pass, self.drop);
            ranges.push((range.first, range.last, service));
        }
        put_search(self.code, cells, ranges, self.drop)
    }

    /// Whether the service in a cell is in one of the ranges.
    fn put_services(
        &mut self,
        cell: u32,
        ranges: impl IntoIterator<Item = ServiceRange>,
        yes: Label,
        no: Label,
    ) -> Label {
        let ranges = ranges.into_iter().map(|range| (range.first.into(), range.last.into(), yes));
        put_search(self.code, &[cell], ranges, no)
    }

    /// Judges a packet by source and destination port, or by its protocol.
    fn put_transport(&mut self, destination: Label) -> Label {
        let replies = self.put_replies(destination);
        let with_ports = self.code.put_all(
            &[
                (LOAD_X_CELL, HEADER),
                (LOAD_HALF_AT_X, ETHERNET + 2),
                (LOAD_X_CELL, PROTOCOL),
                (OR_X, 0),
                (STORE_CELL, SERVICE),
                (LOAD_X_CELL, HEADER),
                (LOAD_HALF_AT_X, ETHERNET),
                (LOAD_X_CELL, PROTOCOL),
                (OR_X, 0),
                (STORE_CELL, SOURCE_SERVICE),
            ],
            replies,
        );
        let with_ports = self.put_if_long_behind_ip(4, with_ports);
        let portless =
            self.code.put_all(&[(STORE_CELL, SERVICE), (STORE_CELL, SOURCE_SERVICE)], replies);
        let choices = PROTOCOLS_WITH_PORTS.map(|protocol| (protocol << 16, with_ports));
        let kind = self.put_choices(&choices, portless);
        self.code.put_all(&[(STORE_X_CELL, HEADER), (SHIFT_LEFT, 16), (STORE_CELL, PROTOCOL)], kind)
    }

    /// Lets replies pass: segments of TCP that open no connection, echo replies, and what comes from
    /// a served service of another protocol, except to neighbours. All other packets are judged by
    /// their destination.
    fn put_replies(&mut self, destination: Label) -> Label {
        // ACK or RST.
        let flags = self.code.put_branch(IF_BIT, 0x14, self.pass, destination);
        let load = [(LOAD_X_CELL, HEADER), (LOAD_BYTE_AT_X, ETHERNET + 13)];
        let flags = self.code.put_all(&load, flags);
        let tcp = self.put_if_long_behind_ip(14, flags);
        let served = if self.policy.served.is_empty() {
            destination
        } else {
            let served = self.policy.served.iter().copied();
            let served = self.put_services(SOURCE_SERVICE, served, self.pass, destination);
            self.put_by_side(served, destination)
        };
        let [echo, echo6] = [ECHO_REPLY, ECHO_REPLY6].map(|kind| {
            let kind = self.code.put_branch(IF_EQUAL, kind, self.pass, served);
            let load = [(LOAD_X_CELL, HEADER), (LOAD_BYTE_AT_X, ETHERNET)];
            let kind = self.code.put_all(&load, kind);
            self.put_if_long_behind_ip(1, kind)
        });
        let by_protocol = [(TCP << 16, tcp), (ICMP << 16, echo), (ICMPV6 << 16, echo6)];
        self.put_choice(LOAD_CELL, PROTOCOL, &by_protocol, served)
    }

    fn put_ipv4(&mut self, parts: &IpParts, destination: Label) -> Label {
        let first = [(LOAD_X_HEADER_LENGTH, ETHERNET), (LOAD_BYTE, 23)];
        let first = self.code.put_all(&first, parts.transport);
        let later = self.put_any_service(destination);
        let offset = self.code.put_branch(IF_BIT, 0x1fff, later, first);
        let offset = self.code.put(LOAD_HALF, 20, offset);
        let offset = self.put_sources_v4(offset);
        // The version is 4 and the header has 5 words or more.
        let version = self.code.put_branch(IF_AT_LEAST, 0x50, self.drop, offset);
        let version = self.code.put_branch(IF_AT_LEAST, 0x45, version, self.drop);
        let version = self.code.put(LOAD_BYTE, ETHERNET, version);
        self.put_if_long(IPV4, version)
    }

    fn put_ipv6(&mut self, parts: &IpParts) -> Label {
        let other = self
            .code
            .put_all(&[(LOAD_X_NUMBER, IPV6 - ETHERNET), (LOAD_BYTE, 20)], parts.transport);
        let fragment = self.put_any_service(parts.v6_destination);
        let icmp = self.put_icmpv6(parts, other);
        let listener = self.put_listener_report(other);
        let by_protocol = [(HOP_BY_HOP, listener), (ICMPV6, icmp), (FRAGMENT, fragment)];
        let protocol = self.put_choice(LOAD_BYTE, 20, &by_protocol, other);
        let protocol = self.put_sources_v6(protocol);
        let version = self.code.put_branch(IF_EQUAL, 0x60, protocol, self.drop);
        let version = self.code.put_all(&[(LOAD_BYTE, ETHERNET), (AND, 0xf0)], version);
        self.put_if_long(IPV6, version)
    }

    /// Drops packets from other addresses than the container's.
    fn put_sources_v4(&mut self, next: Label) -> Label {
        let own = self.put_own_address(true, next);
        self.code.put_all(&[(LOAD_WORD, IPV4_SOURCE), (STORE_CELL, ADDRESS[0])], own)
    }

    /// Drops packets from other addresses than the container's, and none.
    fn put_sources_v6(&mut self, next: Label) -> Label {
        let own = self.put_own_address(false, next);
        let own = self.put_load_v6(IPV6_SOURCE, own);
        self.put_if_sourceless(next, own)
    }

    /// Whether the address in [`ADDRESS`] is one of the container's; the rest is dropped.
    fn put_own_address(&mut self, is_ipv4: bool, next: Label) -> Label {
        let Some(sources) = self.policy.sources else { return next };
        let own = sources.iter().filter(|addr| addr.is_ipv4() == is_ipv4);
        let mut own: Vec<u128> = own.map(|addr| address_number(*addr)).collect();
        sort_items(&mut own);
        own.dedup();
        let cells = if is_ipv4 { &ADDRESS[..1] } else { &ADDRESS };
        let own = own.into_iter().map(|addr| (addr, addr, next));
        put_search(self.code, cells, own, self.drop)
    }

    /// Whether the IPv6 source address is none.
    fn put_if_sourceless(&mut self, yes: Label, no: Label) -> Label {
        [12, 8, 4, 0]
            .into_iter()
            .fold(yes, |zero, offset| self.put_if(LOAD_WORD, IPV6_SOURCE + offset, 0, zero, no))
    }

    /// Lets the report of a multicast listener pass. Every report has a hop-by-hop options header
    /// of 8 bytes before the ICMPv6 header, RFC 3810 section 5.
    fn put_listener_report(&mut self, other: Label) -> Label {
        let multicast = self.put_if(LOAD_HALF, IPV6_DESTINATION, LINK_MULTICAST, self.pass, other);
        let by_type = LISTENER_TYPES.map(|kind| (kind, multicast));
        let kind = self.put_choice(LOAD_BYTE, IPV6 + 8, &by_type, other);
        let kind = self.put_if_long(IPV6 + 9, kind);
        // The next header and its own length beyond 8 bytes.
        let next = self.put_if(LOAD_HALF, IPV6, ICMPV6 << 8, kind, other);
        self.put_if_long(IPV6 + 2, next)
    }

    /// Lets the ICMPv6 messages pass that the link needs; `other` judges the rest.
    fn put_icmpv6(&mut self, parts: &IpParts, other: Label) -> Label {
        let multicast = self.put_if(LOAD_HALF, IPV6_DESTINATION, LINK_MULTICAST, self.pass, other);
        let neighbour = self.put_neighbour(parts.found6);
        let serves_all = self
            .policy
            .served
            .iter()
            .any(|range| (range.first..=range.last).contains(&(ICMPV6 << 16)));
        let unicast =
            self.put_by_side(if serves_all { self.pass } else { neighbour }, parts.neighbour6);
        let unicast = self.put_load_v6(IPV6_DESTINATION, unicast);
        let solicited = self.put_solicitation(neighbour);
        let solicitation =
            self.put_if(LOAD_HALF, IPV6_DESTINATION, LINK_MULTICAST, solicited, unicast);
        // An advertisement is for the container's own address, a solicitation is from it.
        let advertisement = self.put_own_address(false, self.pass);
        let advertisement = self.put_load_v6(IPV6 + 8, advertisement);
        let advertisement = self.put_if_long(SOLICITATION, advertisement);
        let mut by_type = LISTENER_TYPES.map(|kind| (kind, multicast)).to_vec();
        for (kind, label) in [
            (ROUTER_SOLICITATION, multicast),
            (NEIGHBOUR_SOLICITATION, solicitation),
            (NEIGHBOUR_ADVERTISEMENT, advertisement),
        ] {
            by_type.push((kind, self.put_if(LOAD_BYTE, IPV6_HOP_LIMIT, 255, label, other)));
        }
        let kind = self.put_choice(LOAD_BYTE, IPV6, &by_type, other);
        self.put_if_long(IPV6 + 1, kind)
    }

    /// A multicast solicitation: detects a duplicate of an own address, or asks for the MAC of a
    /// neighbour.
    fn put_solicitation(&mut self, neighbour: Label) -> Label {
        let target = self.put_load_v6(IPV6 + 8, neighbour);
        let own = self.put_own_address(false, self.pass);
        let own = self.put_load_v6(IPV6 + 8, own);
        let source = self.put_if_sourceless(own, target);
        self.put_if_long(SOLICITATION, source)
    }

    /// Whether the IPv6 address in [`ADDRESS`] is one of a router or of the link, or is allowed.
    fn put_neighbour(&mut self, allowed: Label) -> Label {
        let routers = self.policy.routers.iter().filter_map(|addr| match addr {
            IpAddr::V4(_) => None,
            IpAddr::V6(addr) => Some(u128::from(*addr)),
        });
        let (first, last) = LINK_LOCAL;
        let mut ranges: Vec<_> = routers
            .filter(|addr| !(first..=last).contains(addr))
            .map(|addr| (addr, addr))
            .collect();
        ranges.push(LINK_LOCAL);
        self.put_addresses(&ADDRESS, ranges, allowed)
    }

    fn put_arp(&mut self, parts: &IpParts) -> Label {
        let routers = self.policy.routers.iter().filter_map(|addr| match addr {
            IpAddr::V4(addr) => Some(u128::from(u32::from(*addr))),
            IpAddr::V6(_) => None,
        });
        let routers = routers.map(|addr| (addr, addr)).collect();
        let request = self.put_addresses(&ADDRESS[..1], routers, parts.found4);
        let request =
            self.code.put_all(&[(LOAD_WORD, ARP_TARGET), (STORE_CELL, ADDRESS[0])], request);
        let operation = self.put_choice(LOAD_HALF, 20, &[(1, request), (2, self.pass)], self.drop);
        let sender = self.put_own_address(true, operation);
        // A probe has no sender (RFC 5227).
        let sender = self.code.put(STORE_CELL, ADDRESS[0], sender);
        let sender = self.put_if(LOAD_WORD, ARP_SENDER, 0, operation, sender);
        let sender = self.put_if_mac(ARP_SENDER_MAC, self.policy.mac, sender, self.drop);
        // Addresses of Ethernet and IPv4, and their lengths.
        let lengths = self.put_if(LOAD_HALF, 18, 0x0604, sender, self.drop);
        let types = self.put_if(LOAD_WORD, 14, 0x0001_0800, lengths, self.drop);
        self.put_if_long(ARP, types)
    }

    /// Lets addresses of the ranges pass; `otherwise` judges the rest.
    fn put_addresses(
        &mut self,
        cells: &[u32],
        mut ranges: Vec<(u128, u128)>,
        otherwise: Label,
    ) -> Label {
        sort_items(&mut ranges);
        ranges.dedup();
        let ranges = ranges.into_iter().map(|(first, last)| (first, last, self.pass));
        put_search(self.code, cells, ranges, otherwise)
    }

    fn put_any_service(&mut self, next: Label) -> Label {
        self.code.put_all(&[(LOAD_NUMBER, ANY_SERVICE), (STORE_CELL, SERVICE)], next)
    }

    /// Copies an IPv6 address of the frame to [`ADDRESS`].
    fn put_load_v6(&mut self, offset: u32, next: Label) -> Label {
        let copies: Vec<_> = [0, 4, 8, 12]
            .into_iter()
            .zip(ADDRESS)
            .flat_map(|(at, cell)| [(LOAD_WORD, offset + at), (STORE_CELL, cell)])
            .collect();
        self.code.put_all(&copies, next)
    }

    /// Whether a MAC address is at the offset.
    fn put_if_mac(&mut self, offset: u32, mac: MacAddress, yes: Label, no: Label) -> Label {
        let [start @ .., fifth, last] = mac.0;
        let end = u32::from(u16::from_be_bytes([fifth, last]));
        let yes = self.put_if(LOAD_HALF, offset + 4, end, yes, no);
        self.put_if(LOAD_WORD, offset, u32::from_be_bytes(start), yes, no)
    }

    /// Drops frames of fewer bytes.
    fn put_if_long(&mut self, length: u32, next: Label) -> Label {
        let next = self.code.put_branch(IF_AT_LEAST, length, next, self.drop);
        self.code.put(LOAD_LENGTH, 0, next)
    }

    /// Drops frames with fewer bytes behind the IP header.
    fn put_if_long_behind_ip(&mut self, length: u32, next: Label) -> Label {
        let next = self.code.put_branch(IF_AT_LEAST_X, 0, next, self.drop);
        let end = [
            (LOAD_X_CELL, HEADER),
            (COPY_X, 0),
            (ADD, ETHERNET + length),
            (SET_X, 0),
            (LOAD_LENGTH, 0),
        ];
        self.code.put_all(&end, next)
    }

    /// Whether a load yields the value.
    fn put_if(&mut self, load: u32, k: u32, value: u32, yes: Label, no: Label) -> Label {
        self.put_choice(load, k, &[(value, yes)], no)
    }

    /// Chooses by the value that a load yields.
    fn put_choice(
        &mut self,
        load: u32,
        k: u32,
        choices: &[(u32, Label)],
        otherwise: Label,
    ) -> Label {
        let choice = self.put_choices(choices, otherwise);
        self.code.put(load, k, choice)
    }

    /// Chooses by the accumulator.
    fn put_choices(&mut self, choices: &[(u32, Label)], otherwise: Label) -> Label {
        choices
            .iter()
            .fold(otherwise, |no, (value, yes)| self.code.put_branch(IF_EQUAL, *value, *yes, no))
    }
}
