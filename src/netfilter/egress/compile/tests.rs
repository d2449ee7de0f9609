//! Random entries and traffic, compared with their definitions address by address.

use super::*;

/// Random numbers, the same in each run (splitmix64).
pub(in crate::netfilter::egress) struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number less than `end`.
    pub(in crate::netfilter::egress) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap()
    }

    pub(in crate::netfilter::egress) fn one_of<'t, T>(&mut self, values: &'t [T]) -> &'t T {
        &values[self.below(values.len())]
    }

    /// A network. Many of them have addresses in common, or are adjacent.
    pub(in crate::netfilter::egress) fn network(&mut self) -> IpNet {
        let base: IpAddr = self
            .one_of(&["10.0.0.0", "10.0.0.129", "255.255.255.255", "::", "2001:db8::1"])
            .parse()
            .unwrap();
        let base = if self.below(9) == 0 {
            "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff".parse().unwrap()
        } else {
            base
        };
        let bits = if base.is_ipv4() { 32 } else { 128 };
        let changed = address_number(base) ^ (1 << self.below(bits));
        let length = u8::try_from(self.below(bits + 1)).unwrap();
        IpNet::new(address_of(base.is_ipv4(), changed), length).unwrap()
    }

    fn services(&mut self) -> Vec<ServiceRange> {
        let count = self.below(4);
        let mut one = || self.one_of(&SERVICES).1;
        merge_services((0..count).map(|_| one()).collect())
    }

    fn entries(&mut self) -> Vec<Entry> {
        let count = self.below(12);
        let entry = |_| Entry {
            networks: (0..=self.below(3)).map(|_| self.network()).collect(),
            services: self.services(),
            verdict: *self.one_of(&[Verdict::Allow, Verdict::Deny]),
        };
        (0..count).map(entry).collect()
    }

    fn verdict(&mut self) -> Verdict {
        *self.one_of(&[Verdict::Allow, Verdict::Deny, Verdict::Deny])
    }

    fn traffic(&mut self) -> AllowedTraffic {
        flatten(&self.entries(), by_default(self.verdict()))
    }
}

/// Services as a configuration names them.
pub(in crate::netfilter::egress) const SERVICES: [(&str, ServiceRange); 12] = [
    ("tcp", ServiceRange { first: 0x6_0000, last: 0x6_ffff }),
    ("tcp/443", ServiceRange { first: 0x6_01bb, last: 0x6_01bb }),
    ("tcp/444-65535", ServiceRange { first: 0x6_01bc, last: 0x6_ffff }),
    ("tcp/1-500", ServiceRange { first: 0x6_0001, last: 0x6_01f4 }),
    ("udp", ServiceRange { first: 0x11_0000, last: 0x11_ffff }),
    ("udp/53", ServiceRange { first: 0x11_0035, last: 0x11_0035 }),
    ("sctp/65535", ServiceRange { first: 0x84_ffff, last: 0x84_ffff }),
    ("icmp", ServiceRange { first: 0x1_0000, last: 0x1_ffff }),
    ("icmpv6", ServiceRange { first: 0x3a_0000, last: 0x3a_ffff }),
    ("0", ServiceRange { first: 0, last: 0xffff }),
    ("7", ServiceRange { first: 0x7_0000, last: 0x7_ffff }),
    ("255", ServiceRange { first: 0xff_0000, last: 0xff_ffff }),
];

/// The services at the bounds of [`SERVICES`], and beside them.
pub(in crate::netfilter::egress) fn services_around_bounds() -> Vec<Service> {
    let bounds = SERVICES.iter().flat_map(|(_, range)| [range.first, range.last]);
    let around =
        bounds.flat_map(|bound| [bound.saturating_sub(1), bound, (bound + 1).min(LAST_SERVICE)]);
    around.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
}

/// The first and last addresses of networks, and the addresses beside them.
pub(in crate::netfilter::egress) fn addresses_around_bounds(networks: &[IpNet]) -> Vec<IpAddr> {
    let around = |network: &IpNet| {
        let is_v4 = network.addr().is_ipv4();
        let bounds = [network.network(), network.broadcast()].map(address_number);
        let largest = if is_v4 { u32::MAX.into() } else { u128::MAX };
        let numbers = bounds.into_iter().flat_map(move |n| {
            [n.saturating_sub(1), n, n.saturating_add(1).min(largest), largest, 0]
        });
        numbers.map(move |number| address_of(is_v4, number))
    };
    networks
        .iter()
        .flat_map(around)
        .collect::<std::collections::BTreeSet<_>>()
        .into_iter()
        .collect()
}

fn address_of(is_v4: bool, number: u128) -> IpAddr {
    if is_v4 {
        IpAddr::from(u32::try_from(number).unwrap().to_be_bytes())
    } else {
        IpAddr::from(number.to_be_bytes())
    }
}

/// The addresses at the bounds of the ranges, and beside them.
fn addresses_of(all: &[&AllowedTraffic]) -> Vec<IpAddr> {
    let bounds = |is_v4: bool, range: &AllowedRange| {
        [range.first, range.last].map(|n| IpNet::from(address_of(is_v4, n)))
    };
    let v4 = all.iter().flat_map(|traffic| &traffic.v4).flat_map(|range| bounds(true, range));
    let v6 = all.iter().flat_map(|traffic| &traffic.v6).flat_map(|range| bounds(false, range));
    addresses_around_bounds(&v4.chain(v6).collect::<Vec<_>>())
}

pub(in crate::netfilter::egress) fn assert_canonical(traffic: &AllowedTraffic) {
    for (ranges, largest) in [(&traffic.v4, u32::MAX.into()), (&traffic.v6, u128::MAX)] {
        for range in ranges {
            assert!(
                range.first <= range.last && range.last <= largest && !range.services.is_empty(),
                "{range:?}"
            );
            assert!(
                range.services.iter().all(|s| s.first <= s.last && s.last <= LAST_SERVICE),
                "{range:?}"
            );
            assert!(
                range.services.windows(2).all(|pair| pair[0].last + 1 < pair[1].first),
                "{range:?}"
            );
        }
        for pair in ranges.windows(2) {
            assert!(pair[0].last < pair[1].first, "{pair:?}");
            assert!(
                pair[0].last + 1 < pair[1].first || pair[0].services != pair[1].services,
                "{pair:?}"
            );
        }
    }
}

/// The services that are allowed by default.
fn by_default(verdict: Verdict) -> &'static [ServiceRange] {
    if verdict == Verdict::Allow { &[ServiceRange::ALL] } else { &[] }
}

/// The rule of [`flatten`].
fn is_allowed(entries: &[Entry], default: Verdict, addr: IpAddr, service: Service) -> bool {
    let matching = entries
        .iter()
        .filter(|entry| entry.services.iter().any(|s| (s.first..=s.last).contains(&service)));
    let prefixes = matching.flat_map(|entry| {
        let around = entry.networks.iter().filter(|network| network.contains(&addr));
        around.map(|network| (network.prefix_len(), entry.verdict == Verdict::Deny))
    });
    prefixes.max().map_or(default == Verdict::Allow, |(_, is_denied)| !is_denied)
}

#[test]
fn random_entries_are_decided_by_the_longest_prefix() {
    let mut random = Random(1);
    for round in 0..100 {
        let (entries, default) = (random.entries(), random.verdict());
        let traffic = flatten(&entries, by_default(default));
        assert_canonical(&traffic);
        let networks: Vec<IpNet> =
            entries.iter().flat_map(|entry| entry.networks.clone()).collect();
        for addr in addresses_around_bounds(&networks) {
            for service in services_around_bounds() {
                let expected = is_allowed(&entries, default, addr, service);
                assert_eq!(
                    traffic.allows(addr, service),
                    expected,
                    "{round}: {addr} {service:x} {entries:?}"
                );
            }
        }
    }
}

#[test]
fn random_traffic_is_intersected_and_united_pointwise() {
    let mut random = Random(2);
    for round in 0..100 {
        let (ours, theirs) = (random.traffic(), random.traffic());
        let (both, any) = (ours.intersect(&theirs), ours.union(&theirs));
        assert_canonical(&both);
        assert_canonical(&any);
        for addr in addresses_of(&[&ours, &theirs]) {
            for service in services_around_bounds() {
                let (a, b) = (ours.allows(addr, service), theirs.allows(addr, service));
                assert_eq!(both.allows(addr, service), a && b, "{round}: {addr} {service:x}");
                assert_eq!(any.allows(addr, service), a || b, "{round}: {addr} {service:x}");
            }
        }
        assert_eq!((&both, &any), (&theirs.intersect(&ours), &theirs.union(&ours)));
        assert_eq!((ours.intersect(&ours), ours.union(&ours)), (ours.clone(), ours.clone()));
        assert_eq!((ours.union(&both), ours.intersect(&any)), (ours.clone(), ours));
    }
}

#[test]
fn random_traffic_is_restricted_to_networks() {
    let mut random = Random(3);
    for round in 0..100 {
        let traffic = random.traffic();
        let nets: Vec<IpNet> = (0..random.below(5)).map(|_| random.network()).collect();
        let restricted = traffic.restrict_to(&nets);
        assert_canonical(&restricted);
        for addr in addresses_of(&[&traffic]).into_iter().chain(addresses_around_bounds(&nets)) {
            let is_inside = nets.iter().any(|net| net.contains(&addr));
            for service in services_around_bounds() {
                let expected = is_inside && traffic.allows(addr, service);
                assert_eq!(
                    restricted.allows(addr, service),
                    expected,
                    "{round}: {addr} {service:x} {nets:?}"
                );
            }
        }
    }
}

#[test]
fn traffic_without_ranges_is_empty() {
    assert!(flatten(&[], &[]).is_empty());
    assert!(AllowedTraffic::default().is_empty());
    let all = flatten(&[], &[ServiceRange::ALL]);
    assert!(!all.is_empty() && all.restrict_to(&[]).is_empty());
    for one in ["10.0.0.1/32", "::1/128"] {
        assert!(!all.restrict_to(&[one.parse().unwrap()]).is_empty(), "{one}");
    }
}

#[test]
fn all_traffic_is_one_range_of_each_family() {
    let range = |last| vec![AllowedRange { first: 0, last, services: vec![ServiceRange::ALL] }];
    let all = AllowedTraffic { v4: range(u32::MAX.into()), v6: range(u128::MAX) };
    assert_eq!(flatten(&[], &[ServiceRange::ALL]), all);
    let halves =
        ["0.0.0.0/1", "128.0.0.0/1", "::/1", "8000::/1"].map(|half| half.parse().unwrap()).to_vec();
    let services =
        vec![ServiceRange { first: 0, last: 9 }, ServiceRange { first: 10, last: LAST_SERVICE }];
    assert_eq!(flatten(&[Entry { networks: halves, services, verdict: Verdict::Allow }], &[]), all);
}

#[test]
fn equal_bytes_are_of_equal_traffic() {
    let mut random = Random(4);
    let mut known = BTreeMap::new();
    for _ in 0..500 {
        let traffic = random.traffic();
        let bytes = traffic.to_bytes();
        assert_eq!(bytes, traffic.union(&traffic).to_bytes());
        assert_eq!(*known.entry(bytes).or_insert_with(|| traffic.clone()), traffic);
    }
    assert!(known.len() > 300, "{}", known.len());
    // The same numbers in the other family, as other addresses, as other services.
    let range = |first, last, service| AllowedRange {
        first,
        last,
        services: vec![ServiceRange { first: service, last: 9 }],
    };
    let v4 =
        |first, last, service| AllowedTraffic { v4: vec![range(first, last, service)], v6: vec![] };
    let v6 = AllowedTraffic { v4: vec![], v6: vec![range(1, 2, 3)] };
    let all = [v6, v4(1, 2, 3), v4(0, 2, 3), v4(1, 3, 3), v4(1, 2, 4)];
    let different: std::collections::BTreeSet<_> =
        all.iter().map(AllowedTraffic::to_bytes).collect();
    assert_eq!(different.len(), 5);
}

#[test]
fn services_are_sorted_and_merged() {
    let range = |(first, last)| ServiceRange { first, last };
    let merged =
        |ranges: &[(u32, u32)]| merge_services(ranges.iter().copied().map(range).collect());
    assert_eq!(merged(&[(7, 9), (1, 2), (3, 3), (8, 8)]), [range((1, 3)), range((7, 9))]);
    assert_eq!(merged(&[(1, 9), (2, 3), (5, 10)]), [range((1, 10))]);
    assert_eq!(merged(&[(0, 1), (3, LAST_SERVICE)]), [range((0, 1)), range((3, LAST_SERVICE))]);
    assert_eq!(merged(&[]), []);
}

#[test]
fn ports_and_protocols_are_service_ranges() {
    assert_eq!(ServiceRange::of_port(6, 443), ServiceRange { first: 0x6_01bb, last: 0x6_01bb });
    assert_eq!(
        ServiceRange::of_ports(17, 1, 2),
        ServiceRange { first: 0x11_0001, last: 0x11_0002 }
    );
    assert_eq!(
        ServiceRange::of_protocol(255),
        ServiceRange { first: 0xff_0000, last: LAST_SERVICE }
    );
}
