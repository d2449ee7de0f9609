//! The traffic that policies allow, as disjoint ranges of addresses, each with ranges of services.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::iter::Peekable;
use std::net::IpAddr;

use ipnet::IpNet;

use cni::sort::sort_items;

/// A protocol and a destination port as one number: the protocol's number << 16 | the port. A
/// protocol without ports is the range of all its port numbers.
pub type Service = u32;

/// The largest [`Service`].
pub const LAST_SERVICE: Service = 0xff_ffff;

/// The services from `first` to `last`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceRange {
    pub first: Service,
    pub last: Service,
}

impl ServiceRange {
    pub const ALL: ServiceRange = ServiceRange { first: 0, last: LAST_SERVICE };

    /// All services of the protocol of this number.
    pub fn of_protocol(protocol: u8) -> ServiceRange {
        ServiceRange::of_ports(protocol, 0, u16::MAX)
    }

    /// One port of the protocol of this number.
    pub fn of_port(protocol: u8, port: u16) -> ServiceRange {
        ServiceRange::of_ports(protocol, port, port)
    }

    /// The ports from `first` to `last` of the protocol of this number.
    pub fn of_ports(protocol: u8, first: u16, last: u16) -> ServiceRange {
        let service = |port: u16| Service::from(protocol) << 16 | Service::from(port);
        ServiceRange { first: service(first), last: service(last) }
    }
}

/// The addresses from `first` to `last`, both included, as numbers, with the services that are
/// allowed there: sorted, disjoint, not adjacent, at least one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AllowedRange {
    pub first: u128,
    pub last: u128,
    pub services: Vec<ServiceRange>,
}

/// The allowed destinations of each family: sorted and disjoint; adjacent ranges differ in their
/// services.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct AllowedTraffic {
    pub v4: Vec<AllowedRange>,
    pub v6: Vec<AllowedRange>,
}

impl AllowedTraffic {
    #[must_use]
    pub fn intersect(&self, other: &AllowedTraffic) -> AllowedTraffic {
        self.combine(other, |ours, theirs| ours && theirs)
    }

    #[must_use]
    pub fn union(&self, other: &AllowedTraffic) -> AllowedTraffic {
        self.combine(other, |ours, theirs| ours || theirs)
    }

    /// The part of the traffic whose destinations are in one of the networks, which may overlap.
    #[must_use]
    pub fn restrict_to(&self, nets: &[IpNet]) -> AllowedTraffic {
        self.intersect(&AllowedTraffic::to_networks(nets))
    }

    /// The part of the traffic whose destinations are in none of the networks, which may overlap.
    #[must_use]
    pub fn without(&self, nets: &[IpNet]) -> AllowedTraffic {
        self.subtract(&AllowedTraffic::to_networks(nets))
    }

    #[must_use]
    pub fn subtract(&self, other: &AllowedTraffic) -> AllowedTraffic {
        self.combine(other, |ours, theirs| ours && !theirs)
    }

    /// All traffic to the networks, which may overlap.
    pub fn to_networks(nets: &[IpNet]) -> AllowedTraffic {
        let inside = Entry {
            networks: nets.to_vec(),
            services: vec![ServiceRange::ALL],
            verdict: Verdict::Allow,
        };
        flatten(&[inside], &[])
    }

    /// Whether packets of the service may go to the address.
    pub fn allows(&self, addr: IpAddr, service: Service) -> bool {
        has_service(self.services_of(addr), service)
    }

    /// The services that are allowed at the address.
    pub fn services_of(&self, addr: IpAddr) -> &[ServiceRange] {
        let ranges = if addr.is_ipv4() { &self.v4 } else { &self.v6 };
        services_at(ranges, address_number(addr))
    }

    /// Whether nothing is allowed.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty()
    }

    /// The number of pairs of an address range and a service range; and the largest number of
    /// service ranges of an address range.
    pub fn count_pairs(&self) -> (usize, usize) {
        let counts = self.v4.iter().chain(&self.v6).map(|range| range.services.len());
        (counts.clone().sum(), counts.max().unwrap_or_default())
    }

    /// All numbers, with the lengths of the lists: equal for equal traffic only.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for ranges in [&self.v4, &self.v6] {
            bytes.extend((ranges.len() as u64).to_be_bytes());
            for AllowedRange { first, last, services } in ranges {
                bytes.extend([first.to_be_bytes(), last.to_be_bytes()].as_flattened());
                bytes.extend((services.len() as u64).to_be_bytes());
                bytes.extend(
                    services
                        .iter()
                        .flat_map(|service| [service.first, service.last].map(u32::to_be_bytes))
                        .flatten(),
                );
            }
        }
        bytes
    }

    fn combine(&self, other: &AllowedTraffic, is_allowed: Operation) -> AllowedTraffic {
        AllowedTraffic {
            v4: combine_ranges(&self.v4, &other.v4, is_allowed),
            v6: combine_ranges(&self.v6, &other.v6, is_allowed),
        }
    }
}

/// Whether services are in a combination of two sets, by whether they are in each. What is in
/// neither must not be in the combination.
type Operation = fn(bool, bool) -> bool;

/// What an entry of a policy, or its default, does with packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Allow,
    Deny,
}

/// A verdict on packets to one of the networks with one of the services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub networks: Vec<IpNet>,
    pub services: Vec<ServiceRange>,
    pub verdict: Verdict,
}

/// The services that the entries of one network name, in any order; they may overlap.
#[derive(Debug, Default)]
struct NetworkServices {
    allowed: Vec<ServiceRange>,
    denied: Vec<ServiceRange>,
}

impl NetworkServices {
    /// The services that are allowed in the network, given those that are allowed around it. The
    /// entries of the network decide the services that they name, and denials go first.
    fn allowed_within(self, around: &[ServiceRange]) -> Vec<ServiceRange> {
        let allowed = combine_services(around, &merge_services(self.allowed), |around, allowed| {
            around || allowed
        });
        combine_services(&allowed, &merge_services(self.denied), |allowed, denied| {
            allowed && !denied
        })
    }
}

/// Networks as their first and last addresses. A network is before the networks in it.
type Networks = BTreeMap<(u128, Reverse<u128>), NetworkServices>;

/// The traffic that entries allow. Of the entries that match a packet, the one with the longest
/// prefix decides; of those, one that denies. Of the packets that no entry matches those with the
/// services `by_default` are allowed, which are merged.
pub fn flatten(entries: &[Entry], by_default: &[ServiceRange]) -> AllowedTraffic {
    let (mut v4, mut v6) = (Networks::new(), Networks::new());
    for entry in entries {
        for network in &entry.networks {
            let networks = if network.addr().is_ipv4() { &mut v4 } else { &mut v6 };
            let [first, last] = [network.network(), network.broadcast()].map(address_number);
            let services = networks.entry((first, Reverse(last))).or_default();
            let named = match entry.verdict {
                Verdict::Allow => &mut services.allowed,
                Verdict::Deny => &mut services.denied,
            };
            named.extend(&entry.services);
        }
    }
    let resolve = |networks: Networks, last: u128| {
        let mut ranges = Vec::new();
        let around = AllowedRange { first: 0, last, services: by_default.to_vec() };
        resolve_networks(&mut networks.into_iter().peekable(), around, &mut ranges);
        ranges
    };
    AllowedTraffic { v4: resolve(v4, u32::MAX.into()), v6: resolve(v6, u128::MAX) }
}

/// Appends `around`, and in it the next networks as far as they are in `around`. Of two networks
/// that have an address in common one is in the other, so that each level of the recursion is a
/// longer prefix.
fn resolve_networks(
    networks: &mut Peekable<impl Iterator<Item = ((u128, Reverse<u128>), NetworkServices)>>,
    around: AllowedRange,
    ranges: &mut Vec<AllowedRange>,
) {
    let AllowedRange { first: mut next, last: end, services: allowed } = around;
    while let Some(((first, Reverse(last)), services)) =
        networks.next_if(|((first, _), _)| *first <= end)
    {
        if next < first {
            push_range(
                ranges,
                AllowedRange { first: next, last: first - 1, services: allowed.clone() },
            );
        }
        let within = AllowedRange { first, last, services: services.allowed_within(&allowed) };
        resolve_networks(networks, within, ranges);
        match last.checked_add(1) {
            Some(after) => next = after,
            None => return,
        }
    }
    if next <= end {
        push_range(ranges, AllowedRange { first: next, last: end, services: allowed });
    }
}

/// Appends a range after all others. Keeps the invariants of [`AllowedTraffic`].
fn push_range(ranges: &mut Vec<AllowedRange>, range: AllowedRange) {
    match ranges.last_mut() {
        _ if range.services.is_empty() => {}
        Some(before) if before.last + 1 == range.first && before.services == range.services => {
            before.last = range.last;
        }
        _ => ranges.push(range),
    }
}

fn combine_ranges(
    ours: &[AllowedRange],
    theirs: &[AllowedRange],
    is_allowed: Operation,
) -> Vec<AllowedRange> {
    let ends =
        ours.iter().chain(theirs).flat_map(|range| [Some(range.first), range.last.checked_add(1)]);
    let mut starts: Vec<u128> = ends.flatten().collect();
    sort_items(&mut starts);
    starts.dedup();
    let mut ranges = Vec::new();
    for (at, &first) in starts.iter().enumerate() {
        let last = starts.get(at + 1).map_or(u128::MAX, |next| next - 1);
        let services =
            combine_services(services_at(ours, first), services_at(theirs, first), is_allowed);
        push_range(&mut ranges, AllowedRange { first, last, services });
    }
    ranges
}

/// The services that are allowed at an address; of ranges of its family.
fn services_at(ranges: &[AllowedRange], address: u128) -> &[ServiceRange] {
    let at = ranges.partition_point(|range| range.last < address);
    ranges.get(at).filter(|range| range.first <= address).map_or(&[], |range| &range.services)
}

/// Sorts services and merges those that overlap or are adjacent.
pub fn merge_services(mut services: Vec<ServiceRange>) -> Vec<ServiceRange> {
    sort_items(&mut services);
    let mut merged: Vec<ServiceRange> = Vec::new();
    for range in services {
        match merged.last_mut() {
            Some(before) if range.first <= before.last + 1 => {
                before.last = before.last.max(range.last);
            }
            _ => merged.push(range),
        }
    }
    merged
}

/// A combination of services that [`merge_services`] has merged; merged too.
pub fn combine_services(
    ours: &[ServiceRange],
    theirs: &[ServiceRange],
    is_allowed: Operation,
) -> Vec<ServiceRange> {
    if ours == theirs {
        return if is_allowed(true, true) { ours.to_vec() } else { Vec::new() };
    }
    for (present, absent, alone) in
        [(ours, theirs, is_allowed(true, false)), (theirs, ours, is_allowed(false, true))]
    {
        if absent.is_empty() {
            return if alone { present.to_vec() } else { Vec::new() };
        }
    }
    let bounds_of = |ranges: &[ServiceRange], set: usize| {
        let bounds = ranges.iter().flat_map(|range| [range.first, range.last + 1]);
        bounds.map(|bound| (bound, set)).collect::<Vec<_>>()
    };
    let mut bounds = [bounds_of(ours, 0), bounds_of(theirs, 1)].concat();
    sort_items(&mut bounds);
    let (mut is_in, mut start, mut combined) = ([false; 2], None, Vec::new());
    for equal in bounds.chunk_by(|one, next| one.0 == next.0) {
        let bound = equal[0].0;
        for &(_, set) in equal {
            is_in[set] = !is_in[set];
        }
        match (start, is_allowed(is_in[0], is_in[1])) {
            (None, true) => start = Some(bound),
            (Some(first), false) => {
                combined.push(ServiceRange { first, last: bound - 1 });
                start = None;
            }
            _ => {}
        }
    }
    combined
}

pub(super) fn has_service(services: &[ServiceRange], service: Service) -> bool {
    let at = services.partition_point(|range| range.last < service);
    services.get(at).is_some_and(|range| range.first <= service)
}

/// The address as a number, as in [`AllowedRange`].
pub(super) fn address_number(addr: IpAddr) -> u128 {
    match addr {
        IpAddr::V4(v4) => v4.to_bits().into(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

#[cfg(test)]
pub(super) mod tests;
