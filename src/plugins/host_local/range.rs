//! Ranges of addresses and sets of them: defaults, validation, order of allocation. No I/O.

use std::collections::HashSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

use ipnet::{IpNet, Ipv6Net};
use serde::Deserialize;

use crate::cni::ip;
use crate::error::{Context, Error, Result};

/// A range as it is configured.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RangeConf {
    /// The network, host bits included as they were written; required.
    #[serde(deserialize_with = "ip::optional_cidr")]
    pub subnet: Option<IpNet>,
    /// The first address; by default the network's first after its own.
    #[serde(deserialize_with = "ip::optional_ip")]
    pub range_start: Option<IpAddr>,
    /// The last address; by default the network's last, for IPv4 the one before broadcast.
    #[serde(deserialize_with = "ip::optional_ip")]
    pub range_end: Option<IpAddr>,
    /// The gateway, which may lie anywhere; by default the network's first address.
    #[serde(deserialize_with = "ip::optional_ip")]
    pub gateway: Option<IpAddr>,
}

/// A range with all its values, known to make sense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    /// The network, which gives the addresses their prefix length.
    pub subnet: IpNet,
    /// The first address handed out.
    pub start: IpAddr,
    /// The last address handed out.
    pub end: IpAddr,
    /// The gateway, never handed out.
    pub gateway: IpAddr,
}

/// Ranges that together supply one address of a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeSet(Vec<Range>);

impl Range {
    /// Fills in the defaults and refuses what cannot work.
    pub fn resolve(conf: &RangeConf) -> Result<Range> {
        let subnet = conf.subnet.ok_or_else(|| Error::config("IP <nil> not v4 nor v6"))?;
        check_subnet(subnet)?;
        let first = address(bits(subnet.network()) + 1, subnet);
        let outside = |what: &str, ip| {
            Err(Error::config(format!("{what} {ip} not in network {subnet}"))
                .with_details("choose an address of the subnet"))
        };
        let start = conf.range_start.unwrap_or(first);
        let above_end = conf.range_end.is_some_and(|end| same_family(start, end) && start > end);
        if conf.range_start.is_some() && (!subnet.contains(&start) || above_end) {
            let above = |e: Error| {
                if above_end {
                    e.with_details("rangeStart is above rangeEnd: swap them")
                } else {
                    e
                }
            };
            return outside("RangeStart", start).map_err(above);
        }
        let end = conf.range_end.unwrap_or_else(|| last(subnet));
        if !subnet.contains(&end) || end < start {
            return outside("RangeEnd", end);
        }
        Ok(Range { subnet, start, end, gateway: conf.gateway.unwrap_or(first) })
    }

    /// Whether `ip` is one of the range's addresses.
    pub fn contains(&self, ip: IpAddr) -> bool {
        same_family(self.start, ip) && self.start <= ip && ip <= self.end
    }

    /// Whether the two ranges share an address.
    pub fn overlaps(&self, other: &Range) -> bool {
        same_family(self.start, other.start) && self.start <= other.end && other.start <= self.end
    }

    fn bounds(&self) -> RangeInclusive<u128> {
        bits(self.start)..=bits(self.end)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.start, self.end)
    }
}

impl RangeSet {
    /// Resolves every range; they must be of one family and share no address.
    pub fn resolve(confs: &[RangeConf]) -> Result<RangeSet> {
        let mut ranges: Vec<Range> = Vec::with_capacity(confs.len());
        for conf in confs {
            let range = Range::resolve(conf)?;
            if ranges.first().is_some_and(|first| !same_family(first.start, range.start)) {
                return Err(Error::config("mixed address families")
                    .with_details("give each family a range set of its own: [[IPv4], [IPv6]]"));
            }
            ranges.push(range);
        }
        if ranges.is_empty() {
            return Err(Error::config("empty range set"));
        }
        if let Some(((_, a), (_, b))) = pairs(&ranges).find(|((_, a), (_, b))| a.overlaps(b)) {
            return Err(Error::config(format!("subnets {a} and {b} overlap")));
        }
        Ok(RangeSet(ranges))
    }

    /// Resolves the list of sets. Whether they overlap is asked apart ([`check_overlaps`]),
    /// because the configuration's version is judged in between.
    pub fn resolve_all(sets: &[Vec<RangeConf>]) -> Result<Vec<RangeSet>> {
        if sets.is_empty() {
            return Err(Error::config("no IP ranges specified")
                .with_details("add \"ranges\": [[{\"subnet\": \"10.1.0.0/16\"}]] to \"ipam\""));
        }
        let resolve = |(i, set): (usize, &Vec<RangeConf>)| {
            RangeSet::resolve(set).context(|| format!("invalid range set {i}"))
        };
        sets.iter().enumerate().map(resolve).collect()
    }

    /// The ranges, in configured order.
    pub fn ranges(&self) -> &[Range] {
        &self.0
    }

    /// Whether the set's addresses are IPv4 ones.
    pub fn is_ipv4(&self) -> bool {
        self.0.iter().all(|range| range.start.is_ipv4())
    }

    /// The range that has `ip`.
    pub fn range_of(&self, ip: IpAddr) -> Option<&Range> {
        self.0.iter().find(|range| range.contains(ip))
    }

    /// Whether one of the ranges has `ip`.
    pub fn contains(&self, ip: IpAddr) -> bool {
        self.range_of(ip).is_some()
    }

    /// Whether the two sets share an address.
    pub fn overlaps(&self, other: &RangeSet) -> bool {
        self.0.iter().any(|a| other.0.iter().any(|b| a.overlaps(b)))
    }

    /// Whether `ip` is the gateway of any range of the set: no container may have the gateway of another range
    /// either.
    pub fn is_gateway(&self, ip: IpAddr) -> bool {
        self.0.iter().any(|range| range.gateway == ip)
    }

    /// Every address that may be handed out once, with its range: those after `last`, range by
    /// range, then from the start again up to and including `last`.
    pub fn candidates(&self, last: Option<IpAddr>) -> impl Iterator<Item = (IpAddr, &Range)> {
        self.segments(last)
            .into_iter()
            .flat_map(|(range, segment)| {
                segment.map(move |bits| (address(bits, range.subnet), range))
            })
            .filter(|(ip, _)| !self.is_gateway(*ip))
    }

    /// Whether all addresses are among `taken`, at a cost that does not depend on the set's size.
    pub fn is_full(&self, taken: &HashSet<IpAddr>) -> bool {
        let gateways: HashSet<IpAddr> = self.0.iter().map(|range| range.gateway).collect();
        let withheld = gateways.iter().filter(|ip| self.contains(**ip)).count();
        let available = self.size().saturating_sub(withheld as u128);
        if available > taken.len() as u128 {
            return false;
        }
        let used = taken.iter().filter(|ip| self.contains(**ip) && !gateways.contains(ip));
        used.count() as u128 >= available
    }

    fn size(&self) -> u128 {
        let sizes = self.0.iter().map(|range| bits(range.end) - bits(range.start));
        sizes.fold(0, |sum, size| sum.saturating_add(size).saturating_add(1))
    }

    fn segments(&self, last: Option<IpAddr>) -> Vec<(&Range, RangeInclusive<u128>)> {
        let whole = |range| -> (&Range, _) { (range, Range::bounds(range)) };
        let here = last.and_then(|ip| Some((ip, self.0.iter().position(|r| r.contains(ip))?)));
        let Some((last, here)) = here else {
            return self.0.iter().map(whole).collect();
        };
        let range = &self.0[here];
        let (start, end) = range.bounds().into_inner();
        let tail = match bits(last) {
            last if last == end => None,
            last => Some((range, last + 1..=end)),
        };
        let others = self.0[here + 1..].iter().chain(&self.0[..here]).map(whole);
        tail.into_iter().chain(others).chain([(range, start..=bits(last))]).collect()
    }
}

impl fmt::Display for RangeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, range) in self.0.iter().enumerate() {
            write!(f, "{}{range}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// Refuses sets that share an address.
pub fn check_overlaps(sets: &[RangeSet]) -> Result<()> {
    match pairs(sets).find(|((_, a), (_, b))| a.overlaps(b)) {
        Some(((i, _), (j, _))) => Err(Error::config(format!("range set {i} overlaps with {j}"))
            .with_details("give each set subnets that no other set has")),
        None => Ok(()),
    }
}

/// All pairs of different items, in order, each item with its index.
fn pairs<T>(items: &[T]) -> impl Iterator<Item = ((usize, &T), (usize, &T))> {
    let numbered = || items.iter().enumerate();
    numbered().flat_map(move |a| numbered().skip(a.0 + 1).map(move |b| (a, b)))
}

fn check_subnet(subnet: IpNet) -> Result<()> {
    let length = subnet.prefix_len();
    let longest = subnet.max_prefix_len() - 2;
    let message = if length > longest {
        return Err(Error::config(format!("Network {subnet} too small to allocate from"))
            .with_details(format!("choose a prefix of /{longest} or shorter")));
    } else if matches!(subnet, IpNet::V6(v6) if is_ipv4_mapped(v6)) {
        "IPNet IP and Mask version mismatch".to_owned()
    } else if subnet.addr() != subnet.network() {
        format!(
            "Network has host bits set. For a subnet mask of length {length} the network address \
             is {}",
            subnet.network()
        )
    } else {
        return Ok(());
    };
    Err(Error::config(message))
}

fn is_ipv4_mapped(subnet: Ipv6Net) -> bool {
    subnet.addr().to_ipv4_mapped().is_some()
}

/// The last address that is handed out by default: IPv6 has no broadcast to spare.
fn last(subnet: IpNet) -> IpAddr {
    match subnet {
        IpNet::V4(v4) => IpAddr::from(v4.broadcast().to_bits().wrapping_sub(1).to_be_bytes()),
        IpNet::V6(v6) => IpAddr::from(v6.broadcast()),
    }
}

fn same_family(a: IpAddr, b: IpAddr) -> bool {
    a.is_ipv4() == b.is_ipv4()
}

fn bits(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// The address in the family of `subnet`.
fn address(bits: u128, subnet: IpNet) -> IpAddr {
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
    fn conf(text: &str) -> RangeConf {
        let mut words = text.split_whitespace().map(|word| (word != "-").then_some(word));
        let subnet = words.next().flatten().map(|net| net.parse().unwrap());
        let mut next = || words.next().flatten().map(ip);
        RangeConf { subnet, range_start: next(), range_end: next(), gateway: next() }
    }

    fn set(texts: &[&str]) -> RangeSet {
        RangeSet::resolve(&texts.iter().map(|text| conf(text)).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn defaults() {
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
                "192.0.2.0",
                "192.0.2.255",
                "2001:db8::1",
            ),
        ] {
            let range = Range::resolve(&conf(text)).unwrap();
            let want = (ip(start), ip(end), ip(gateway));
            assert_eq!((range.start, range.end, range.gateway), want, "{text}");
        }
    }

    #[test]
    fn refusals() {
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
        ] {
            let error = Range::resolve(&conf(text)).unwrap_err();
            assert_eq!(error.msg(), message, "{text}");
        }
    }

    #[test]
    fn containment_at_both_ends() {
        let range = Range::resolve(&conf("192.0.2.0/24 192.0.2.40 192.0.2.50")).unwrap();
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
            let sets = RangeSet::resolve_all(&confs)?;
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
            assert_eq!(resolve(sets).unwrap_err().msg(), message);
        }
        let sets = resolve(&[&["10.0.0.0/30", "10.0.1.0/30"], &["2001:db8::/64"]]).unwrap();
        assert_eq!(sets[0].to_string(), "10.0.0.1-10.0.0.2,10.0.1.1-10.0.1.2");
        assert_eq!((sets[0].is_ipv4(), sets[1].is_ipv4()), (true, false));
        assert_eq!(sets[0].range_of(ip("10.0.1.2")), Some(&sets[0].ranges()[1]));
        assert_eq!(sets[0].range_of(ip("10.0.2.1")), None);
    }

    #[test]
    fn candidates_go_round_once() {
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
                &["255.255.255.252/30 255.255.255.254 255.255.255.255"],
                "255.255.255.255",
                "255.255.255.254 255.255.255.255",
            ),
        ] {
            let last = (last != "-").then(|| ip(last));
            let got: Vec<String> =
                set(texts).candidates(last).map(|(ip, _)| ip.to_string()).collect();
            assert_eq!(got.join(" "), want, "{texts:?} after {last:?}");
        }
    }

    #[test]
    fn full_means_that_no_address_is_left() {
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
        let huge = RangeSet::resolve(&[conf("::/0 :: ")]).unwrap();
        assert!(!huge.is_full(&HashSet::from([ip("::2")])));
    }
}
