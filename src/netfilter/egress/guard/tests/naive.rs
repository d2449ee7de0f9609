//! The rules of the guard, in their order, without regard to speed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::super::GuardPolicy;
use super::frames::numbered_ip;
use crate::netfilter::egress::compile::{AllowedRange, ServiceRange};

/// Whether the frame passes.
pub(super) fn passes(policy: &GuardPolicy<'_>, frame: &[u8]) -> bool {
    let policy = if is_to_neighbour(policy, frame) {
        GuardPolicy { allowed: policy.neighbours, served: &[], ..*policy }
    } else {
        *policy
    };
    judge(&policy, frame).unwrap_or(false)
}

/// Whether the frame is for another port of the bridge, and not for the bridge.
fn is_to_neighbour(policy: &GuardPolicy<'_>, frame: &[u8]) -> bool {
    policy.bridge.is_some_and(|bridge| frame.get(..6) != Some(&bridge.0[..]))
}

/// Whether the container may send from the address.
fn is_source(policy: &GuardPolicy<'_>, is_v4: bool, addr: u128) -> bool {
    let Some(own) = policy.sources else { return true };
    own.iter().any(|source| source.is_ipv4() == is_v4 && numbered_ip(*source) == addr)
}

/// Whether the container may send from the IPv6 address, which may be none.
fn is_source6(policy: &GuardPolicy<'_>, addr: u128) -> bool {
    addr == 0 || is_source(policy, false, addr)
}

/// The number in the bytes; `None` if the frame is too short.
fn number(frame: &[u8], at: usize, size: usize) -> Option<u128> {
    Some(frame.get(at..at + size)?.iter().fold(0, |value, byte| value << 8 | u128::from(*byte)))
}

fn judge(policy: &GuardPolicy<'_>, frame: &[u8]) -> Option<bool> {
    let ethertype = number(frame, 12, 2)?;
    if frame.get(6..12)? != policy.mac.0 {
        return Some(false);
    }
    match ethertype {
        0x0806 => judge_arp(policy, frame),
        0x0800 => judge_v4(policy, frame),
        0x86dd => judge_v6(policy, frame),
        _ => Some(false),
    }
}

fn find(ranges: &[AllowedRange], addr: u128) -> Option<&AllowedRange> {
    ranges.iter().find(|range| (range.first..=range.last).contains(&addr))
}

fn is_in(services: &[ServiceRange], service: u128) -> bool {
    services.iter().any(|range| (u128::from(range.first)..=range.last.into()).contains(&service))
}

fn is_router(policy: &GuardPolicy<'_>, is_v4: bool, addr: u128) -> bool {
    policy.routers.iter().any(|router| router.is_ipv4() == is_v4 && numbered_ip(*router) == addr)
}

fn judge_arp(policy: &GuardPolicy<'_>, frame: &[u8]) -> Option<bool> {
    let target = number(frame, 38, 4)?;
    if number(frame, 14, 6)? != 0x0001_0800_0604 || frame.get(22..28)? != policy.mac.0 {
        return Some(false);
    }
    let sender = number(frame, 28, 4)?;
    if sender != 0 && !is_source(policy, true, sender) {
        return Some(false);
    }
    Some(match number(frame, 20, 2)? {
        1 => find(&policy.found.v4, target).is_some() || is_router(policy, true, target),
        2 => true,
        _ => false,
    })
}

fn judge_v4(policy: &GuardPolicy<'_>, frame: &[u8]) -> Option<bool> {
    let to = number(frame, 30, 4)?;
    let (version, words) = (frame[14] >> 4, usize::from(frame[14] & 15));
    if version != 4 || words < 5 || !is_source(policy, true, number(frame, 26, 4)?) {
        return Some(false);
    }
    let range = find(&policy.allowed.v4, to);
    if number(frame, 20, 2)? & 0x1fff != 0 {
        return Some(range.is_some());
    }
    judge_transport(policy, range, frame[23], &frame[14..], words * 4)
}

/// Judges by protocol and ports, which are behind the IP header of `header` bytes.
fn judge_transport(
    policy: &GuardPolicy<'_>,
    range: Option<&AllowedRange>,
    protocol: u8,
    packet: &[u8],
    header: usize,
) -> Option<bool> {
    let (from, to) = match protocol {
        6 | 17 | 33 | 132 | 136 => (number(packet, header, 2)?, number(packet, header + 2, 2)?),
        _ => (0, 0),
    };
    let opens_nothing = match protocol {
        6 => number(packet, header + 13, 1)? & 0x14 != 0,
        1 => number(packet, header, 1)? == 0,
        58 => number(packet, header, 1)? == 129,
        _ => false,
    };
    let is_served = protocol != 6 && is_in(policy.served, u128::from(protocol) << 16 | from);
    let protocol = u128::from(protocol) << 16;
    if opens_nothing || is_served {
        return Some(true);
    }
    Some(range.is_some_and(|range| is_in(&range.services, protocol | to)))
}

fn judge_v6(policy: &GuardPolicy<'_>, frame: &[u8]) -> Option<bool> {
    let to = number(frame, 38, 16)?;
    if frame[14] >> 4 != 6 || !is_source6(policy, number(frame, 22, 16)?) {
        return Some(false);
    }
    let range = find(&policy.allowed.v6, to);
    let link = match frame[20] {
        44 => return Some(range.is_some()),
        0 => is_listener_report(frame, to)?,
        58 => judge_icmpv6(policy, frame, to)?,
        _ => Judgement::ByDestination,
    };
    match link {
        Judgement::Passes => Some(true),
        Judgement::Dropped => Some(false),
        Judgement::ByDestination => judge_transport(policy, range, frame[20], &frame[14..], 40),
    }
}

enum Judgement {
    Passes,
    Dropped,
    ByDestination,
}

fn is_multicast(to: u128) -> bool {
    to >> 112 == 0xff02
}

fn is_listener_report(frame: &[u8], to: u128) -> Option<Judgement> {
    if number(frame, 54, 2)? != 58 << 8 {
        return Some(Judgement::ByDestination);
    }
    let reports = matches!(number(frame, 62, 1)?, 131 | 132 | 143);
    Some(if reports && is_multicast(to) { Judgement::Passes } else { Judgement::ByDestination })
}

fn judge_icmpv6(policy: &GuardPolicy<'_>, frame: &[u8], to: u128) -> Option<Judgement> {
    let (kind, is_near) = (number(frame, 54, 1)?, frame[21] == 255);
    let is_in_range = |ranges: &[AllowedRange], addr: u128| find(ranges, addr).is_some();
    let is_neighbour = |addr: u128| {
        let is_local = Ipv6Addr::from(addr).segments()[0] & 0xffc0 == 0xfe80;
        is_local || is_router(policy, false, addr) || is_in_range(&policy.found.v6, addr)
    };
    let to_neighbour = is_to_neighbour(policy, frame);
    let passes_if = |passes| if passes { Judgement::Passes } else { Judgement::Dropped };
    Some(match (kind, is_multicast(to)) {
        (131 | 132 | 143, true) => Judgement::Passes,
        (135, true) if is_near => {
            let target = number(frame, 62, 16)?;
            passes_if(if number(frame, 22, 16)? == 0 {
                is_source(policy, false, target)
            } else {
                is_neighbour(target)
            })
        }
        (133, true) if is_near => Judgement::Passes,
        (136, _) if is_near => passes_if(is_source(policy, false, number(frame, 62, 16)?)),
        (135, false) if is_near && to_neighbour => {
            passes_if(is_in_range(&policy.neighbours.v6, to))
        }
        (135, false) if is_near => passes_if(is_neighbour(to) || is_in(policy.served, 58 << 16)),
        _ => Judgement::ByDestination,
    })
}

#[test]
fn numbers_of_addresses_are_big_endian() {
    assert_eq!(numbered_ip(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1))), 0x0a00_0001);
}
