//! The elements of sets of allowed traffic.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::compile::{AllowedRange, LAST_SERVICE, Service, ServiceRange};
use super::table::ICMPV6;
use crate::netlink::nftables::{ElementKey, KeyInterval, NftValue, TransportProtocol};

/// What a sandbox allows at addresses of the Internet. The kernel takes milliseconds to build a set
/// of addresses and services from large networks, so such addresses have a set of their own.
pub(super) const ALL_BUT_ICMPV6: [ServiceRange; 2] = [
    ServiceRange { first: 0, last: ((ICMPV6 as u32) << 16) - 1 },
    ServiceRange { first: (ICMPV6 as u32 + 1) << 16, last: LAST_SERVICE },
];

fn address(number: u128, is_ipv4: bool) -> NftValue {
    NftValue::Ip(if is_ipv4 {
        IpAddr::V4(Ipv4Addr::from(u32::try_from(number).unwrap_or(u32::MAX)))
    } else {
        IpAddr::V6(Ipv6Addr::from(number))
    })
}

/// The ranges of addresses that `which` selects; adjacent ones are joined.
pub(super) fn addresses(
    ranges: &[AllowedRange],
    is_ipv4: bool,
    which: impl Fn(&AllowedRange) -> bool,
) -> Vec<KeyInterval> {
    let mut joined: Vec<(u128, u128)> = Vec::new();
    for range in ranges.iter().filter(|range| which(range)) {
        match joined.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(range.first) => *last = range.last,
            _ => joined.push((range.first, range.last)),
        }
    }
    let key = |number| ElementKey(vec![address(number, is_ipv4)]);
    joined
        .into_iter()
        .map(|(first, last)| KeyInterval { first: key(first), last: key(last) })
        .collect()
}

/// The intervals of address, protocol and port of the ranges that allow some services only.
pub(super) fn services(ranges: &[AllowedRange], is_ipv4: bool) -> Vec<KeyInterval> {
    let mut all = Vec::new();
    for AllowedRange { first, last, services } in
        ranges.iter().filter(|range| range.services != ALL_BUT_ICMPV6)
    {
        for service in services.iter().filter(|service| **service != ServiceRange::ALL) {
            for (low, high) in split_by_protocol(*service) {
                let key = |number, service| {
                    let [proto, port] = service_values(service);
                    ElementKey(vec![address(number, is_ipv4), proto, port])
                };
                all.push(KeyInterval { first: key(*first, low), last: key(*last, high) });
            }
        }
    }
    all
}

/// The intervals of protocol and port.
pub(super) fn service_intervals(services: &[ServiceRange]) -> Vec<KeyInterval> {
    let key = |service| ElementKey(service_values(service).to_vec());
    let split = services.iter().flat_map(|service| split_by_protocol(*service));
    split.map(|(low, high)| KeyInterval { first: key(low), last: key(high) }).collect()
}

/// The protocol and the port of a service.
fn service_values(service: Service) -> [NftValue; 2] {
    let [_, proto, ..] = service.to_be_bytes();
    let port = (service & 0xffff) as u16;
    [TransportProtocol::from(proto).into(), port.into()]
}

/// Splits a range of services so that each part has all of the protocol's ports, or one protocol.
fn split_by_protocol(ServiceRange { first, last }: ServiceRange) -> Vec<(u32, u32)> {
    let (low, high) = (first >> 16, last >> 16);
    if low == high {
        return vec![(first, last)];
    }
    let (begin, end) = (first & 0xffff, last & 0xffff);
    let mut parts = Vec::new();
    let whole_from = if begin == 0 { low } else { low + 1 };
    let whole_to = if end == 0xffff { high } else { high.saturating_sub(1) };
    if begin != 0 {
        parts.push((first, low << 16 | 0xffff));
    }
    if whole_from <= whole_to && !(end != 0xffff && high == 0) {
        parts.push((whole_from << 16, whole_to << 16 | 0xffff));
    }
    if end != 0xffff {
        parts.push((high << 16, last));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_ranges_are_split_into_rectangles() {
        let split = |first, last| split_by_protocol(ServiceRange { first, last });
        assert_eq!(split(0x06_0050, 0x06_0051), [(0x06_0050, 0x06_0051)]);
        assert_eq!(split(0, 0xff_ffff), [(0, 0xff_ffff)]);
        assert_eq!(split(0, 0x06_0018), [(0, 0x05_ffff), (0x06_0000, 0x06_0018)]);
        assert_eq!(split(0x06_001a, 0xff_ffff), [(0x06_001a, 0x06_ffff), (0x07_0000, 0xff_ffff)]);
        assert_eq!(split(0x06_0001, 0x07_0001), [(0x06_0001, 0x06_ffff), (0x07_0000, 0x07_0001)]);
    }
}
