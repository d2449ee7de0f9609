//! Ranges of addresses, and sets of ranges: defaults, validation, order of allocation.

use std::collections::HashSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use serde::Deserialize;

use crate::framework::addressing;
use cni::error::{Error, ErrorContext, Result};
use cni::ip;

/// A range of the configuration.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RangeConfig {
    /// The network, required; host bits are kept.
    #[serde(deserialize_with = "ip::deserialize_optional_cidr")]
    pub subnet: Option<IpNet>,
    /// The first address. Default: the network address plus 1.
    #[serde(deserialize_with = "ip::deserialize_optional_ip")]
    pub range_start: Option<IpAddr>,
    /// The last address. Default: the last address of the network, for IPv4 the last one before
    /// broadcast.
    #[serde(deserialize_with = "ip::deserialize_optional_ip")]
    pub range_end: Option<IpAddr>,
    /// The gateway, which may be outside of the network. Default: the network address plus 1.
    #[serde(deserialize_with = "ip::deserialize_optional_ip")]
    pub gateway: Option<IpAddr>,
    /// Whether addresses of the network outside of the range can be requested.
    pub requests_from_subnet: bool,
    /// Whether addresses that a file reserves can be requested.
    pub requests_from_reserved: bool,
}

/// A validated range with its defaults set.
#[derive(Debug, PartialEq)]
pub struct AddressRange {
    /// The network, whose prefix length the addresses get.
    pub subnet: IpNet,
    /// The first address to allocate.
    pub start: IpAddr,
    /// The last address to allocate.
    pub end: IpAddr,
    /// The gateway, which is never allocated.
    pub gateway: IpAddr,
    /// Whether addresses of the network outside of the range can be requested.
    pub requests_from_subnet: bool,
    /// Whether addresses that a file reserves can be requested.
    pub requests_from_reserved: bool,
}

/// Ranges that together supply one address of a result; never empty.
#[derive(Debug)]
pub struct RangeSet(Vec<AddressRange>);

impl RangeConfig {
    /// The addresses of the range, with their key, that no host can have.
    fn reserved_addresses(&self) -> impl Iterator<Item = (&'static str, IpAddr, &'static str)> {
        let keys = [
            ("rangeStart", self.range_start),
            ("rangeEnd", self.range_end),
            ("gateway", self.gateway),
        ];
        keys.into_iter().filter_map(|(key, ip)| {
            let (ip, subnet) = (ip?, self.subnet?);
            Some((key, ip, addressing::reserved_address_kind(ip, subnet)?))
        })
    }

    /// Warnings of addresses that no host can have.
    pub fn address_warnings(&self) -> Vec<Error> {
        self.reserved_addresses()
            .map(|(key, ip, what)| {
                let msg = format!(
                    "{key} {ip} is the {what} address of the subnet, which no host can have"
                );
                let remedy = match key {
                    "gateway" => "choose an address between the two ends of the subnet",
                    _ => "it is left out; choose the address beside it",
                };
                Error::config(msg).with_details(remedy)
            })
            .collect()
    }
}

impl AddressRange {
    /// Sets the defaults and validates the range.
    pub fn from_config(conf: &RangeConfig) -> Result<AddressRange> {
        let subnet = conf.subnet.ok_or_else(|| Error::config("IP <nil> not v4 nor v6"))?;
        let (length, network) = (subnet.prefix_len(), subnet.network());
        let longest = subnet.max_prefix_len() - 2;
        if length > longest {
            return Err(Error::config(format!("Network {subnet} too small to allocate from"))
                .with_details(format!("choose a prefix of /{longest} or shorter")));
        }
        if matches!(subnet, IpNet::V6(v6) if v6.addr().to_ipv4_mapped().is_some()) {
            return Err(Error::config("IPNet IP and Mask version mismatch"));
        }
        if subnet.addr() != network {
            return Err(Error::config(format!(
                "Network has host bits set. For a subnet mask of length {length} the network \
                 address is {network}"
            )));
        }
        let first = address_from_bits(address_bits(network) + 1, subnet);
        let start = conf.range_start.unwrap_or(first);
        // IPv6 has no broadcast address.
        let last = address_bits(subnet.broadcast()) - u128::from(subnet.addr().is_ipv4());
        let end = conf.range_end.unwrap_or_else(|| address_from_bits(last, subnet));
        let outside =
            |what: &str, ip| Error::config(format!("{what} {ip} not in network {subnet}"));
        let remedy = "choose an address of the subnet";
        if !subnet.contains(&start) {
            return Err(outside("RangeStart", start).with_details(remedy));
        }
        let is_comparable = start.is_ipv4() == end.is_ipv4();
        if conf.range_start.is_some() && is_comparable && start > end {
            let remedy = "rangeStart is above rangeEnd: swap them";
            return Err(outside("RangeStart", start).with_details(remedy));
        }
        if !subnet.contains(&end) || end < start {
            return Err(outside("RangeEnd", end).with_details(remedy));
        }
        let is_reserved = |ip| addressing::reserved_address_kind(ip, subnet).is_some();
        let start = if is_reserved(start) {
            address_from_bits(address_bits(start) + 1, subnet)
        } else {
            start
        };
        let end =
            if is_reserved(end) { address_from_bits(address_bits(end) - 1, subnet) } else { end };
        if end < start {
            return Err(Error::config(format!(
                "the range has no address that a host of {subnet} can have"
            ))
            .with_details(remedy));
        }
        let gateway = conf.gateway.unwrap_or(first);
        let RangeConfig { requests_from_subnet, requests_from_reserved, .. } = *conf;
        Ok(AddressRange {
            subnet,
            start,
            end,
            gateway,
            requests_from_subnet,
            requests_from_reserved,
        })
    }

    /// Whether a host of the network can have `ip`.
    pub fn is_host_address(&self, ip: IpAddr) -> bool {
        self.subnet.contains(&ip) && addressing::reserved_address_kind(ip, self.subnet).is_none()
    }

    /// Whether the range includes `ip`. All IPv4 addresses are less than all IPv6 addresses.
    pub fn contains(&self, ip: IpAddr) -> bool {
        self.start <= ip && ip <= self.end
    }

    /// Whether the two ranges share an address.
    pub fn overlaps(&self, other: &AddressRange) -> bool {
        self.start <= other.end && other.start <= self.end
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.start, self.end)
    }
}

impl RangeSet {
    /// Resolves the ranges, which must be of one family and must not overlap.
    pub fn from_configs(confs: &[RangeConfig]) -> Result<RangeSet> {
        let mut ranges: Vec<AddressRange> = Vec::with_capacity(confs.len());
        for conf in confs {
            let range = AddressRange::from_config(conf)?;
            if ranges.first().is_some_and(|first| first.start.is_ipv4() != range.start.is_ipv4()) {
                return Err(Error::config("mixed address families")
                    .with_details("give each family a range set of its own: [[IPv4], [IPv6]]"));
            }
            if let Some(other) = ranges.iter().find(|other| other.overlaps(&range)) {
                return Err(Error::config(format!("subnets {other} and {range} overlap")));
            }
            ranges.push(range);
        }
        if ranges.is_empty() {
            return Err(Error::config("empty range set"));
        }
        Ok(RangeSet(ranges))
    }

    /// Resolves the sets. [`check_overlaps`] is separate, because the number of sets is checked
    /// before.
    pub fn all_from_configs(sets: &[Vec<RangeConfig>]) -> Result<Vec<RangeSet>> {
        if sets.is_empty() {
            return Err(Error::config("no IP ranges specified")
                .with_details("add \"ranges\": [[{\"subnet\": \"10.1.0.0/16\"}]] to \"ipam\""));
        }
        sets.iter()
            .enumerate()
            .map(|(i, set)| {
                RangeSet::from_configs(set).context(|| format!("invalid range set {i}"))
            })
            .collect()
    }

    /// The ranges, in configured order.
    pub fn ranges(&self) -> &[AddressRange] {
        &self.0
    }

    /// Whether the addresses are IPv4 addresses.
    pub fn is_ipv4(&self) -> bool {
        self.0.iter().all(|range| range.start.is_ipv4())
    }

    /// The range of which `ip` can be requested.
    pub fn find_range(&self, ip: IpAddr) -> Option<&AddressRange> {
        let ranges = &self.0;
        let including = ranges.iter().find(|range| range.contains(ip));
        including.or_else(|| {
            ranges.iter().find(|range| range.requests_from_subnet && range.is_host_address(ip))
        })
    }

    pub fn contains(&self, ip: IpAddr) -> bool {
        self.find_range(ip).is_some()
    }

    /// Whether the two sets share an address.
    pub fn overlaps(&self, other: &RangeSet) -> bool {
        self.0.iter().any(|a| other.0.iter().any(|b| a.overlaps(b)))
    }

    /// Whether `ip` is the gateway of any range of the set: an address of one range may be the
    /// gateway of another.
    pub fn is_gateway(&self, ip: IpAddr) -> bool {
        self.0.iter().any(|range| range.gateway == ip)
    }

    /// All addresses to allocate, with their ranges: those after `last`, range by range, then from
    /// the start up to and including `last`.
    pub fn candidate_addresses(
        &self,
        last: Option<IpAddr>,
    ) -> impl Iterator<Item = (IpAddr, &AddressRange)> {
        let ranges = &self.0;
        let found = last.and_then(|ip| Some((ranges.iter().position(|r| r.contains(ip))?, ip)));
        // Without `last` the order begins after the end of the last range.
        let (at, last) = found.unwrap_or_else(|| (ranges.len() - 1, ranges[ranges.len() - 1].end));
        let range = &ranges[at];
        let others = ranges[at + 1..].iter().chain(&ranges[..at]);
        // Each part has a range, bounds, and how many addresses to skip.
        [(range, last, range.end, 1)]
            .into_iter()
            .chain(others.map(|range| (range, range.start, range.end, 0)))
            .chain([(range, range.start, last, 0)])
            .flat_map(|(range, first, last, skip)| {
                let all = (address_bits(first)..=address_bits(last)).skip(skip);
                all.map(move |bits| (address_from_bits(bits, range.subnet), range))
            })
            .filter(|(ip, _)| !self.is_gateway(*ip))
    }

    /// Whether all addresses are among `taken`. Ends at the first one that is not.
    pub fn is_full(&self, taken: &HashSet<IpAddr>) -> bool {
        self.candidate_addresses(None).all(|(ip, _)| taken.contains(&ip))
    }
}

impl fmt::Display for RangeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges: Vec<String> = self.0.iter().map(AddressRange::to_string).collect();
        f.write_str(&ranges.join(","))
    }
}

/// Fails if two sets share an address.
pub fn check_overlaps(sets: &[RangeSet]) -> Result<()> {
    for (j, set) in sets.iter().enumerate() {
        if let Some(i) = sets[..j].iter().position(|other| other.overlaps(set)) {
            return Err(Error::config(format!("range set {i} overlaps with {j}"))
                .with_details("give each set subnets that no other set has"));
        }
    }
    Ok(())
}

fn address_bits(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// The address in the family of `subnet`.
fn address_from_bits(bits: u128, subnet: IpNet) -> IpAddr {
    match subnet {
        #[expect(clippy::cast_possible_truncation, reason = "made from the 32 bits of an address")]
        IpNet::V4(_) => Ipv4Addr::from_bits(bits as u32).into(),
        IpNet::V6(_) => Ipv6Addr::from_bits(bits).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// `subnet`, `start`, `end`, `gateway`; trailing ones may be missing, `-` stands for unset.
    fn conf(text: &str) -> RangeConfig {
        let mut words = text.split_whitespace().map(|word| (word != "-").then_some(word));
        let subnet = words.next().flatten().map(|net| net.parse().unwrap());
        let mut next = || words.next().flatten().map(ip);
        let (range_start, range_end, gateway) = (next(), next(), next());
        RangeConfig { subnet, range_start, range_end, gateway, ..RangeConfig::default() }
    }

    fn set(texts: &[&str]) -> RangeSet {
        RangeSet::from_configs(&texts.iter().map(|text| conf(text)).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn range_start_end_and_gateway_have_defaults() {
        for (text, start, end, gateway) in [
            ("192.0.2.0/24", "192.0.2.1", "192.0.2.254", "192.0.2.1"),
            ("192.0.2.0/25", "192.0.2.1", "192.0.2.126", "192.0.2.1"),
            ("192.0.2.0/30", "192.0.2.1", "192.0.2.2", "192.0.2.1"),
            (
                "2001:db8:1::/64",
                "2001:db8:1::1",
                "2001:db8:1::ffff:ffff:ffff:ffff",
                "2001:db8:1::1",
            ),
            (
                "192.0.2.0/24 192.0.2.40 192.0.2.50 192.0.2.254",
                "192.0.2.40",
                "192.0.2.50",
                "192.0.2.254",
            ),
            (
                "192.0.2.0/24 192.0.2.0 192.0.2.255 2001:db8::1",
                "192.0.2.1",
                "192.0.2.254",
                "2001:db8::1",
            ),
            (
                "2001:db8:1::/64 2001:db8:1:: 2001:db8:1::9",
                "2001:db8:1::1",
                "2001:db8:1::9",
                "2001:db8:1::1",
            ),
        ] {
            let range = AddressRange::from_config(&conf(text)).unwrap();
            let want = (ip(start), ip(end), ip(gateway));
            assert_eq!((range.start, range.end, range.gateway), want, "{text}");
        }
    }

    #[test]
    fn invalid_ranges_are_refused() {
        let host_bits = "Network has host bits set. For a subnet mask of length";
        for (text, message) in [
            ("-", "IP <nil> not v4 nor v6".to_owned()),
            ("192.0.2.0/31", "Network 192.0.2.0/31 too small to allocate from".to_owned()),
            ("2001:db8::/127", "Network 2001:db8::/127 too small to allocate from".to_owned()),
            ("::ffff:192.0.2.0/120", "IPNet IP and Mask version mismatch".to_owned()),
            ("192.0.2.12/24", format!("{host_bits} 24 the network address is 192.0.2.0")),
            ("192.0.3.0/23", format!("{host_bits} 23 the network address is 192.0.2.0")),
            (
                "2001:db8:1::24:19a/64",
                format!("{host_bits} 64 the network address is 2001:db8:1::"),
            ),
            (
                "2001:db8::24:19:1f:0/63",
                format!("{host_bits} 63 the network address is 2001:db8::"),
            ),
            (
                "192.0.2.0/24 192.0.3.0",
                "RangeStart 192.0.3.0 not in network 192.0.2.0/24".to_owned(),
            ),
            (
                "192.0.2.0/24 2001:db8::1",
                "RangeStart 2001:db8::1 not in network 192.0.2.0/24".to_owned(),
            ),
            (
                "192.0.2.0/24 - 192.0.4.0",
                "RangeEnd 192.0.4.0 not in network 192.0.2.0/24".to_owned(),
            ),
            (
                "192.0.2.0/24 - 2001:db8::1",
                "RangeEnd 2001:db8::1 not in network 192.0.2.0/24".to_owned(),
            ),
            (
                "192.0.2.0/24 - 192.0.2.0",
                "RangeEnd 192.0.2.0 not in network 192.0.2.0/24".to_owned(),
            ),
            (
                "192.0.2.0/24 192.0.2.50 192.0.2.40",
                "RangeStart 192.0.2.50 not in network 192.0.2.0/24".to_owned(),
            ),
            (
                "192.0.2.0/24 192.0.2.255 192.0.2.255",
                "the range has no address that a host of 192.0.2.0/24 can have".to_owned(),
            ),
        ] {
            let error = AddressRange::from_config(&conf(text)).unwrap_err();
            assert_eq!(error.message(), message, "{text}");
        }
    }

    #[test]
    fn both_ends_of_a_range_belong_to_it() {
        let range = AddressRange::from_config(&conf("192.0.2.0/24 192.0.2.40 192.0.2.50")).unwrap();
        for (address, inside) in [
            ("192.0.2.39", false),
            ("192.0.2.40", true),
            ("192.0.2.50", true),
            ("192.0.2.51", false),
            ("192.0.3.45", false),
            ("::ffff:192.0.2.45", false),
        ] {
            assert_eq!(range.contains(ip(address)), inside, "{address}");
        }
    }

    #[test]
    fn overlap_is_symmetric() {
        for (a, b, overlap) in [
            ("10.0.0.0/20", "10.0.16.0/24", false),
            ("10.0.0.0/20", "2001:db8::/64", false),
            ("::/8", "0.0.0.0/8", false),
            ("10.0.0.0/20", "10.0.0.0/20", true),
            ("10.0.0.0/20", "10.0.2.0/24", true),
            ("10.0.0.0/20 - 10.0.1.20", "10.0.0.0/20 10.0.1.21", false),
            ("10.0.0.0/20 - 10.0.1.20", "10.0.0.0/20 10.0.1.20", true),
        ] {
            let (a, b) = (set(&[a]), set(&[b]));
            assert_eq!((a.overlaps(&b), b.overlaps(&a)), (overlap, overlap), "{a} {b}");
        }
    }

    #[test]
    fn sets_are_checked_inside_and_against_each_other() {
        let resolve = |sets: &[&[&str]]| {
            let confs: Vec<Vec<_>> =
                sets.iter().map(|set| set.iter().map(|text| conf(text)).collect()).collect();
            let sets = RangeSet::all_from_configs(&confs)?;
            check_overlaps(&sets).map(|()| sets)
        };
        for (sets, message) in [
            (&[] as &[&[&str]], "no IP ranges specified"),
            (&[&["10.0.0.0/24"], &[]], "invalid range set 1: empty range set"),
            (&[&["10.0.0.0/24", "::/64"]], "invalid range set 0: mixed address families"),
            (
                &[&["10.0.0.0/24", "10.0.0.0/31"]],
                "invalid range set 0: Network 10.0.0.0/31 too small to allocate from",
            ),
            (
                &[&["10.0.0.0/20", "10.0.0.0/24"]],
                "invalid range set 0: subnets 10.0.0.1-10.0.15.254 and 10.0.0.1-10.0.0.254 overlap",
            ),
            (
                &[&["10.0.0.0/24"], &["::/64"], &["10.0.1.0/24", "10.0.0.0/25"]],
                "range set 0 overlaps with 2",
            ),
        ] {
            assert_eq!(resolve(sets).unwrap_err().message(), message);
        }
        let sets = resolve(&[&["10.0.0.0/30", "10.0.1.0/30"], &["2001:db8::/64"]]).unwrap();
        assert_eq!(sets[0].to_string(), "10.0.0.1-10.0.0.2,10.0.1.1-10.0.1.2");
        assert_eq!((sets[0].is_ipv4(), sets[1].is_ipv4()), (true, false));
        assert_eq!(sets[0].find_range(ip("10.0.1.2")), Some(&sets[0].ranges()[1]));
        assert_eq!(sets[0].find_range(ip("10.0.2.1")), None);
    }

    #[test]
    fn each_candidate_is_tried_once() {
        let two = ["10.0.0.0/30", "10.0.1.0/29"];
        for (texts, last, want) in [
            (&two[..1], "-", "10.0.0.2"),
            (&two[1..], "-", "10.0.1.2 10.0.1.3 10.0.1.4 10.0.1.5 10.0.1.6"),
            (&two[1..], "10.0.1.4", "10.0.1.5 10.0.1.6 10.0.1.2 10.0.1.3 10.0.1.4"),
            (&two[1..], "10.0.1.6", "10.0.1.2 10.0.1.3 10.0.1.4 10.0.1.5 10.0.1.6"),
            (&two[1..], "10.0.9.9", "10.0.1.2 10.0.1.3 10.0.1.4 10.0.1.5 10.0.1.6"),
            (&two, "10.0.0.2", "10.0.1.2 10.0.1.3 10.0.1.4 10.0.1.5 10.0.1.6 10.0.0.2"),
            (&two, "10.0.1.5", "10.0.1.6 10.0.0.2 10.0.1.2 10.0.1.3 10.0.1.4 10.0.1.5"),
            (
                &["10.0.0.0/29 - 10.0.0.3", "10.0.0.0/29 10.0.0.4 - 10.0.0.2"],
                "-",
                "10.0.0.3 10.0.0.4 10.0.0.5 10.0.0.6",
            ),
            (
                &["255.255.255.248/29 255.255.255.253 255.255.255.255"],
                "255.255.255.254",
                "255.255.255.253 255.255.255.254",
            ),
        ] {
            let last = (last != "-").then(|| ip(last));
            let got: Vec<String> =
                set(texts).candidate_addresses(last).map(|(ip, _)| ip.to_string()).collect();
            assert_eq!(got.join(" "), want, "{texts:?} after {last:?}");
        }
    }

    #[test]
    fn a_set_is_full_if_no_address_is_free() {
        let set = set(&["10.0.0.0/30", "10.0.1.0/30 - - 10.0.0.1"]);
        for (taken, full) in [
            ("", false),
            ("10.0.0.2 10.0.1.1", false),
            ("10.0.0.2 10.0.1.1 10.0.1.2", true),
            ("10.0.0.1 10.0.0.2 10.0.1.1", false),
            ("10.0.0.2 10.0.1.1 10.9.9.9 10.9.9.8 10.9.9.7", false),
        ] {
            let taken = taken.split_whitespace().map(ip).collect();
            assert_eq!(set.is_full(&taken), full, "{taken:?}");
        }
        let huge = RangeSet::from_configs(&[conf("::/0 :: ")]).unwrap();
        assert!(!huge.is_full(&HashSet::from([ip("::2")])));
    }
}
