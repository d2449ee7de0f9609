//! Choosing addresses: one per range set, requested ones first, all or none.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;

use super::range::{Range, RangeSet};
use crate::error::{Code, Context, Error, Result};
use crate::leases::{LeaseStore, Listing, Owner, Reclaimed};
use crate::log;
use crate::skel::{Failures, reclaim};

/// How many taken addresses are tried one by one before the whole directory is listed: a listing
/// of thousands costs more than a few dozen misses.
const PROBES: usize = 64;

/// An address that has been reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocated {
    /// The address with its range's prefix length.
    pub net: IpNet,
    /// The gateway of its range.
    pub gateway: IpAddr,
}

/// Reserves one address of every set for `owner`, and every address of `requested`, in that
/// order. On failure nothing stays reserved that was not so before.
pub fn allocate_all(
    store: &mut LeaseStore,
    sets: &[RangeSet],
    requested: &[IpAddr],
    owner: &Owner,
) -> Result<Vec<Allocated>> {
    let mut first = Allocation::new(store, owner)?;
    let error = match first.run_or_roll_back(sets, requested) {
        // A container that is gone may have what is wanted; its successor may bear its name.
        Err(error) if first.is_in_the_way => error,
        outcome => return outcome,
    };
    let mut failures = Failures::new();
    let reclaimed = reclaim_dead(store, Some(owner), &mut failures)?;
    failures.into_result().unwrap_or_else(log::warn);
    if reclaimed.is_empty() {
        return Err(error);
    }
    Allocation::new(store, owner)?.run_or_roll_back(sets, requested)
}

/// Removes the leases of containers that are certainly gone, by name, and tells which. `failures` tell which
/// have to stay.
pub fn reclaim_dead(
    store: &mut LeaseStore,
    next: Option<&Owner>,
    failures: &mut Failures,
) -> Result<Vec<Reclaimed>> {
    let reclaimed =
        store.reclaim_dead(|network, gone| reclaim::leases(network, gone, next, failures))?;
    for gone in &reclaimed {
        log::warn(format_args!("reclaimed {gone}"));
    }
    Ok(reclaimed)
}

/// Whether a set has no address left; STATUS asks.
pub fn exhausted(listing: &Listing, set: &RangeSet) -> bool {
    // Only when the names say so is it worth reading the files behind them.
    set.is_full(&listing.taken()) && set.is_full(&listing.unavailable())
}

struct Allocation<'a> {
    store: &'a mut LeaseStore,
    owner: &'a Owner,
    /// What the owner had before.
    held: Vec<IpAddr>,
    /// Freed a short while ago: not to be given out yet, and for how long.
    quarantined: BTreeMap<IpAddr, Duration>,
    /// Whether an address was taken that had to be free.
    is_in_the_way: bool,
    reserved: Vec<IpAddr>,
}

impl<'a> Allocation<'a> {
    fn new(store: &'a mut LeaseStore, owner: &'a Owner) -> Result<Allocation<'a>> {
        let held = store.owned_by(owner)?;
        let quarantined = store.quarantined();
        Ok(Allocation {
            store,
            owner,
            held,
            quarantined,
            is_in_the_way: false,
            reserved: Vec::new(),
        })
    }

    fn run_or_roll_back(
        &mut self,
        sets: &[RangeSet],
        requested: &[IpAddr],
    ) -> Result<Vec<Allocated>> {
        let outcome = self.run(sets, requested);
        if outcome.is_err() {
            self.roll_back();
        }
        outcome
    }

    fn run(&mut self, sets: &[RangeSet], requested: &[IpAddr]) -> Result<Vec<Allocated>> {
        let mut wanted = Vec::new();
        for ip in requested {
            if !wanted.contains(ip) {
                wanted.push(*ip);
            }
        }
        let mut allocated = Vec::with_capacity(sets.len());
        for (id, set) in sets.iter().enumerate() {
            let request = wanted.iter().position(|ip| set.contains(*ip)).map(|i| wanted.remove(i));
            let (ip, range) = self
                .allocate(id, set, request)
                .context(|| format!("failed to allocate for range {id}"))?;
            allocated
                .push(Allocated { net: with_prefix(ip, range.subnet), gateway: range.gateway });
        }
        if wanted.is_empty() {
            return Ok(allocated);
        }
        let left: Vec<String> = wanted.iter().map(IpAddr::to_string).collect();
        Err(Error::internal(format!("failed to allocate all requested IPs: {}", left.join(" "))))
    }

    fn allocate<'s>(
        &mut self,
        id: usize,
        set: &'s RangeSet,
        request: Option<IpAddr>,
    ) -> Result<(IpAddr, &'s Range)> {
        let (ip, range) = match request {
            Some(ip) => self.reserve_requested(set, ip)?,
            None => self.reserve_next(id, set)?,
        };
        self.reserved.push(ip);
        self.store.set_last_reserved(id, ip)?;
        Ok((ip, range))
    }

    fn reserve_requested<'s>(
        &mut self,
        set: &'s RangeSet,
        ip: IpAddr,
    ) -> Result<(IpAddr, &'s Range)> {
        let range = set
            .range_of(ip)
            .ok_or_else(|| Error::internal(format!("{ip} not in range set {set}")))?;
        if set.is_gateway(ip) {
            return Err(Error::internal(format!("requested ip {ip} is subnet's gateway")));
        }
        self.refuse_second(set)?;
        // Also an address in quarantine: the request names it.
        if self.store.reserve(ip, self.owner)? {
            return Ok((ip, range));
        }
        self.is_in_the_way = true;
        let message = format!("requested IP address {ip} is not available in range set {set}");
        Err(Error::internal(message))
    }

    fn reserve_next<'s>(&mut self, id: usize, set: &'s RangeSet) -> Result<(IpAddr, &'s Range)> {
        self.refuse_second(set)?;
        if let Some(found) = self.reserve_free(id, set)? {
            return Ok(found);
        }
        self.is_in_the_way = true;
        Err(self.exhausted(set))
    }

    fn reserve_free<'s>(
        &mut self,
        id: usize,
        set: &'s RangeSet,
    ) -> Result<Option<(IpAddr, &'s Range)>> {
        let candidates = set.candidates(self.store.last_reserved(id));
        let mut candidates = candidates.filter(|(ip, _)| !self.quarantined.contains_key(ip));
        for (ip, range) in candidates.by_ref().take(PROBES) {
            if self.store.reserve(ip, self.owner)? {
                return Ok(Some((ip, range)));
            }
        }
        // The rest need no system call each, and a huge range no more steps than there are leases.
        let taken = self.store.taken()?;
        for (ip, range) in candidates.filter(|(ip, _)| !taken.contains(ip)) {
            if self.store.reserve(ip, self.owner)? {
                return Ok(Some((ip, range)));
            }
        }
        Ok(None)
    }

    fn exhausted(&self, set: &RangeSet) -> Error {
        let error = Error::internal(format!("no IP addresses available in range set: {set}"));
        let waits = self.quarantined.iter().filter(|(ip, _)| set.contains(**ip));
        let Some(shortest) = waits.map(|(_, left)| left.as_secs()).min() else {
            return error.with_details(self.who_has_them());
        };
        let details = format!("reuseDelay keeps back the next one for {} s", shortest.max(1));
        error.with_code(Code::TRY_AGAIN).with_details(details)
    }

    fn who_has_them(&self) -> String {
        let who = "see who has them: cnibox ipam ls";
        match self.store.reserved() {
            Ok(0) | Err(_) => who.to_owned(),
            Ok(n) => format!(
                "{who}; {n} of this network are taken by files that name no container, which \
                 cnibox ipam free, or cnibox ipam gc --empty for empty ones, gives back"
            ),
        }
    }

    fn refuse_second(&mut self, set: &RangeSet) -> Result<()> {
        let Some(ip) = self.held.iter().find(|ip| set.contains(**ip)) else { return Ok(()) };
        self.is_in_the_way = true;
        let id = &self.owner.id;
        let msg = format!("{ip} has been allocated to {id}, duplicate allocation is not allowed");
        Err(Error::internal(msg))
    }

    fn roll_back(&mut self) {
        for ip in std::mem::take(&mut self.reserved) {
            if let Err(e) = self.store.release_address(ip, self.owner) {
                log::warn(format_args!("cannot take back {ip}: {e}"));
            }
        }
    }
}

/// `ip` with the prefix length of `subnet`, which has it.
fn with_prefix(ip: IpAddr, subnet: IpNet) -> IpNet {
    // The lengths of a family are valid for every address of it.
    IpNet::new(ip, subnet.prefix_len()).unwrap_or(IpNet::from(ip))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fs;
    use std::path::Path;

    use super::super::range::RangeConf;
    use super::*;
    use crate::leases::LeaseOptions;

    /// `subnet[=start-end][@gateway]`, several in a set joined with `,`.
    fn set(text: &str) -> RangeSet {
        let conf = |text: &str| {
            let (text, gateway) = text.split_once('@').unwrap_or((text, ""));
            let (subnet, bounds) = text.split_once('=').unwrap_or((text, "-"));
            let (start, end) = bounds.split_once('-').unwrap();
            RangeConf {
                subnet: subnet.parse().ok(),
                range_start: start.parse().ok(),
                range_end: end.parse().ok(),
                gateway: gateway.parse().ok(),
            }
        };
        RangeSet::resolve(&text.split(',').map(conf).collect::<Vec<_>>()).unwrap()
    }

    fn ips(text: &str) -> Vec<IpAddr> {
        text.split_whitespace().map(|ip| ip.parse().unwrap()).collect()
    }

    struct Node(tempfile::TempDir);

    impl Node {
        fn new() -> Node {
            let dir = tempfile::tempdir().unwrap();
            drop(LeaseStore::open(dir.path(), "net", LeaseOptions::default()).unwrap());
            Node(dir)
        }

        fn dir(&self) -> &Path {
            self.0.path()
        }

        fn take(&self, ips: &str) {
            for ip in ips.split_whitespace() {
                fs::write(self.dir().join("net").join(ip), "another").unwrap();
            }
        }

        fn last(&self, ip: &str) {
            fs::write(self.dir().join("net/last_reserved_ip.0"), ip).unwrap();
        }

        /// An ADD of container `id`: its addresses, or the message.
        fn add(&self, id: &str, sets: &[&str], requested: &str) -> Result<String, String> {
            let mut store = LeaseStore::open(self.dir(), "net", LeaseOptions::default()).unwrap();
            let sets: Vec<RangeSet> = sets.iter().map(|text| set(text)).collect();
            allocate_all(&mut store, &sets, &ips(requested), &Owner::new(id, "eth0"))
                .map(|all| all.iter().map(|a| a.net.to_string()).collect::<Vec<_>>().join(" "))
                .map_err(|e| e.msg().to_owned())
        }

        fn del(&self, id: &str) {
            let mut store = LeaseStore::open(self.dir(), "net", LeaseOptions::default()).unwrap();
            store.release(&Owner::new(id, "eth0")).unwrap();
        }

        fn taken(&self) -> HashSet<IpAddr> {
            LeaseStore::open(self.dir(), "net", LeaseOptions::default()).unwrap().taken().unwrap()
        }
    }

    #[test]
    fn round_robin() {
        let two = "10.0.0.0/30,10.0.1.0/30";
        let three = "10.0.0.0/30,10.0.1.0/30,10.0.2.0/30";
        for (ranges, last, taken, want) in [
            ("10.0.0.0/29", "", "", "10.0.0.2/29"),
            ("10.0.0.0/30", "", "", "10.0.0.2/30"),
            ("10.0.0.0/29", "10.0.0.5", "", "10.0.0.6/29"),
            ("10.0.0.0/29", "10.0.0.5\n", "", "10.0.0.6/29"),
            ("10.0.0.0/29", "10.0.0.5", "10.0.0.6", "10.0.0.2/29"),
            ("10.0.0.0/29", "10.0.0.5", "10.0.0.4 10.0.0.5 10.0.0.6", "10.0.0.2/29"),
            ("10.0.0.0/29", "128.0.0.1", "", "10.0.0.2/29"),
            ("10.0.0.0/29", "10.0.0.4", "10.0.0.2 10.0.0.3 10.0.0.5 10.0.0.6", "10.0.0.4/29"),
            ("10.0.0.0/29", "garbage", "10.0.0.2", "10.0.0.3/29"),
            (two, "", "10.0.0.2", "10.0.1.2/30"),
            (two, "10.0.0.2", "", "10.0.1.2/30"),
            (three, "10.0.2.2", "", "10.0.0.2/30"),
            (three, "10.0.0.2", "10.0.1.2", "10.0.2.2/30"),
            ("10.0.0.0/30,10.0.1.0/30@10.0.0.2", "", "", "10.0.1.1/30"),
            ("10.0.0.0/29@2001:db8::1", "", "", "10.0.0.1/29"),
            ("10.0.0.0/29=10.0.0.0-10.0.0.0", "", "", "10.0.0.0/29"),
            ("2001:db8:1::/64", "", "", "2001:db8:1::2/64"),
        ] {
            let node = Node::new();
            node.last(last);
            node.take(taken);
            let case = format!("{ranges} after {last:?} without {taken:?}");
            assert_eq!(node.add("c1", &[ranges], "").as_deref(), Ok(want), "{case}");
        }
    }

    #[test]
    fn a_released_address_is_not_reused_at_once() {
        let node = Node::new();
        let add = |id| node.add(id, &["10.0.0.0/29"], "").unwrap();
        assert_eq!(add("c1"), "10.0.0.2/29");
        node.del("c1");
        assert_eq!(add("c2"), "10.0.0.3/29");
        assert_eq!(["c3", "c4", "c5"].map(add), ["10.0.0.4/29", "10.0.0.5/29", "10.0.0.6/29"]);
        assert_eq!(add("c6"), "10.0.0.2/29");
    }

    #[test]
    fn exhaustion() {
        for (ranges, count, printed) in [
            ("10.0.0.0/30", 1, "10.0.0.1-10.0.0.2"),
            ("10.0.0.0/29", 5, "10.0.0.1-10.0.0.6"),
            ("10.0.0.0/30,10.0.1.0/30", 2, "10.0.0.1-10.0.0.2,10.0.1.1-10.0.1.2"),
            ("10.0.0.0/24", 253, "10.0.0.1-10.0.0.254"),
        ] {
            let node = Node::new();
            let exhausted = || {
                exhausted(
                    &Listing::open_writable(node.dir(), "net", LeaseOptions::default()).unwrap(),
                    &set(ranges),
                )
            };
            for n in 0..count {
                assert!(!exhausted());
                node.add(&format!("c{n}"), &[ranges], "").unwrap();
            }
            assert!(exhausted());
            let message = "failed to allocate for range 0: no IP addresses available in range set";
            let want = format!("{message}: {printed}");
            assert_eq!(node.add("cx", &[ranges], "").as_ref(), Err(&want));
            let lease = node.dir().join("net/10.0.0.2");
            fs::remove_file(&lease).and_then(|()| fs::write(&lease, "")).unwrap();
            assert!(exhausted(), "an empty file may be a reservation");
            assert_eq!(node.add("cx", &[ranges], ""), Err(want));
            fs::remove_file(&lease).unwrap();
            assert_eq!(node.add("cx", &[ranges], "").map(drop), Ok(()));
        }
    }

    #[test]
    fn requested_addresses() {
        let sets = ["10.0.0.0/29,10.1.0.0/24", "2001:db8::/64"];
        let failed = "failed to allocate for range 0:";
        let set0 = "10.0.0.1-10.0.0.6,10.1.0.1-10.1.0.254";
        for (requested, want) in [
            ("10.1.0.7 2001:db8::7", Ok("10.1.0.7/24 2001:db8::7/64".to_owned())),
            ("2001:db8::7 10.0.0.6", Ok("10.0.0.6/29 2001:db8::7/64".to_owned())),
            ("10.0.0.6 10.0.0.6", Ok("10.0.0.6/29 2001:db8::2/64".to_owned())),
            (
                "10.0.0.5",
                Err(format!(
                    "{failed} requested IP address 10.0.0.5 is not available in range set {set0}"
                )),
            ),
            ("10.1.0.1", Err(format!("{failed} requested ip 10.1.0.1 is subnet's gateway"))),
            (
                "10.9.0.1 10.0.0.4 10.8.0.1",
                Err("failed to allocate all requested IPs: 10.9.0.1 10.8.0.1".to_owned()),
            ),
            ("10.0.0.4 10.0.0.3", Err("failed to allocate all requested IPs: 10.0.0.3".to_owned())),
            ("10.0.0.7", Err("failed to allocate all requested IPs: 10.0.0.7".to_owned())),
        ] {
            let node = Node::new();
            node.take("10.0.0.5");
            let got = node.add("c1", &sets, requested);
            assert_eq!(got, want, "{requested}");
            let left = if got.is_ok() { 3 } else { 1 };
            assert_eq!(node.taken().len(), left, "{requested}");
        }
    }

    #[test]
    fn a_second_address_of_a_set_is_refused() {
        let node = Node::new();
        let add = |requested| node.add("c1", &["10.0.0.0/29"], requested);
        add("").unwrap();
        let message = "failed to allocate for range 0: 10.0.0.2 has been allocated to c1, duplicate \
                       allocation is not allowed";
        for requested in ["", "10.0.0.2", "10.0.0.4"] {
            assert_eq!(add(requested), Err(message.to_owned()), "{requested}");
        }
        assert_eq!(node.taken(), HashSet::from_iter(ips("10.0.0.2")));
        assert_eq!(node.add("c1", &["10.7.0.0/29"], "").as_deref(), Ok("10.7.0.2/29"));
    }

    #[test]
    fn a_failure_takes_back_only_what_it_took() {
        let node = Node::new();
        node.add("c1", &["10.0.0.0/29"], "").unwrap();
        node.take("10.2.0.2");
        let error = node.add("c1", &["10.1.0.0/29", "10.2.0.0/30"], "").unwrap_err();
        assert!(error.starts_with("failed to allocate for range 1: no IP addresses"), "{error}");
        assert_eq!(node.taken(), HashSet::from_iter(ips("10.0.0.2 10.2.0.2")));
        fs::create_dir(node.dir().join("net/last_reserved_ip.1")).unwrap();
        let error = node.add("c1", &["10.1.0.0/29", "10.3.0.0/30"], "").unwrap_err();
        assert!(error.ends_with("last_reserved_ip.1: not a regular file"), "{error}");
        assert_eq!(node.taken(), HashSet::from_iter(ips("10.0.0.2 10.2.0.2")));
    }

    #[test]
    fn a_long_run_of_taken_addresses_is_skipped() {
        let node = Node::new();
        let all: Vec<String> = (2..2_000).map(|n| format!("2001:db8::{n:x}")).collect();
        node.take(&all.join(" "));
        assert_eq!(node.add("c1", &["2001:db8::/64"], "").as_deref(), Ok("2001:db8::7d0/64"));
    }
}
