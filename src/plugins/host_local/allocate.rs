//! Allocation of addresses: one of each range set, requested ones first, all or none.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;

use super::range::{AddressRange, RangeSet};
use crate::attachment::{AttachmentId, AttachmentRecord, HostVeth, Liveness};
use crate::framework::{Failures, reclaim};
use crate::leases::{LeaseListing, LeaseStore};
use cni::IpConfig;
use cni::error::{Error, ErrorCode, ErrorContext, Result};

/// How many candidates are tried one by one before the directory is read: reading thousands of
/// entries costs more than a few dozen failed attempts.
const PROBES: usize = 64;

/// Reserves one address of every set for `owner`, and every address of `requested`, in that
/// order. On failure no new reservation remains. `end` is the host's end of the attachment's veth
/// pair.
pub fn allocate_all(
    store: &mut LeaseStore,
    sets: &[RangeSet],
    requested: &[IpAddr],
    owner: AttachmentId<'_>,
    end: Option<HostVeth>,
) -> Result<Vec<IpConfig>> {
    let mut first = AddressAllocation::new(store, owner, end)?;
    let mut error = match first.allocate_or_roll_back(sets, requested) {
        // The lease may be a dead container's, also that of an earlier container with the same id.
        Err(error) if first.is_blocked => error,
        outcome => return outcome,
    };
    let mut failures = Failures::new();
    let reclaimed = reclaim::remove_ended_leases(store, Some(owner), &mut failures)?;
    if let Err(why) = failures.into_result() {
        warn!("{why}");
        // Another call is ending the owner of a lease.
        if why.code() == ErrorCode::TRY_AGAIN {
            error = error.with_code(ErrorCode::TRY_AGAIN);
        }
    }
    if reclaimed.is_empty() {
        return Err(error);
    }
    AddressAllocation::new(store, owner, end)?.allocate_or_roll_back(sets, requested)
}

/// For STATUS: whether the set has no free address.
pub fn is_exhausted(listing: &LeaseListing, set: &RangeSet) -> bool {
    // The files are read only if their names occupy all addresses.
    set.is_full(&listing.taken_addresses()) && set.is_full(&listing.unavailable_addresses())
}

struct AddressAllocation<'a> {
    store: &'a mut LeaseStore,
    owner: AttachmentId<'a>,
    end: Option<HostVeth>,
    /// The owner's addresses before.
    held: Vec<IpAddr>,
    /// Recently released addresses, and how long they are withheld.
    quarantined: BTreeMap<IpAddr, Duration>,
    /// Whether a lease has prevented the allocation.
    is_blocked: bool,
    reserved: Vec<IpAddr>,
}

impl<'a> AddressAllocation<'a> {
    fn new(
        store: &'a mut LeaseStore,
        owner: AttachmentId<'a>,
        end: Option<HostVeth>,
    ) -> Result<AddressAllocation<'a>> {
        let held = store.addresses_held_by(owner)?;
        let quarantined = store.quarantined_addresses();
        let reserved = Vec::new();
        Ok(AddressAllocation { store, owner, end, held, quarantined, is_blocked: false, reserved })
    }

    fn allocate_or_roll_back(
        &mut self,
        sets: &[RangeSet],
        requested: &[IpAddr],
    ) -> Result<Vec<IpConfig>> {
        let outcome = self.allocate_sets(sets, requested);
        if outcome.is_err() {
            for ip in &self.reserved {
                if let Err(e) = self.store.release_address(*ip, self.owner) {
                    warn!("rollback: could not release {ip}: {e}");
                }
            }
        }
        outcome
    }

    fn allocate_sets(&mut self, sets: &[RangeSet], requested: &[IpAddr]) -> Result<Vec<IpConfig>> {
        let mut wanted = Vec::new();
        for ip in requested {
            if !wanted.contains(ip) {
                wanted.push(*ip);
            }
        }
        let mut allocated = Vec::with_capacity(sets.len());
        for (id, set) in sets.iter().enumerate() {
            let request = wanted.iter().position(|ip| set.contains(*ip)).map(|i| wanted.remove(i));
            let ip = self.allocate_from_set(id, set, request);
            allocated.push(ip.context(|| format!("failed to allocate for range {id}"))?);
        }
        if wanted.is_empty() {
            return Ok(allocated);
        }
        let left: Vec<String> = wanted.iter().map(IpAddr::to_string).collect();
        let msg = format!("failed to allocate all requested IPs: {}", left.join(" "));
        let mut ranges = sets.iter().flat_map(RangeSet::ranges);
        let is_in_subnet = ranges.any(|range| range.is_host_address(wanted[0]));
        let sets: Vec<String> = sets.iter().map(RangeSet::to_string).collect();
        let sets = sets.join(" and ");
        Err(Error::internal(msg).with_details(if is_in_subnet {
            format!(
                "it is in the subnet, but not in {sets}: request another one, or write \
                 \"requestsFromSubnet\": true into the range"
            )
        } else {
            format!("request one address of each of these ranges: {sets}")
        }))
    }

    /// Reserves an address of the set: the requested one, which the set includes, or the next free
    /// one.
    fn allocate_from_set(
        &mut self,
        id: usize,
        set: &RangeSet,
        request: Option<IpAddr>,
    ) -> Result<IpConfig> {
        if let Some(ip) = request.filter(|ip| set.is_gateway(*ip)) {
            return Err(Error::internal(format!("requested ip {ip} is subnet's gateway"))
                .with_details(format!("request another address of {set}")));
        }
        if let Some(ip) = self.held.iter().find(|ip| set.contains(**ip)) {
            self.is_blocked = true;
            let id = self.owner.id;
            return Err(Error::internal(format!(
                "{ip} has been allocated to {id}, duplicate allocation is not allowed"
            )));
        }
        let found = match request {
            // A request overrides the quarantine.
            Some(ip) => self.reserve_requested_address(set, ip)?,
            None => self.reserve_free_address(id, set)?,
        };
        let Some((ip, range)) = found else {
            self.is_blocked = true;
            return Err(
                request.map_or_else(|| self.exhausted_error(set), |ip| self.taken_error(set, ip))
            );
        };
        self.reserved.push(ip);
        if range.contains(ip) {
            self.store.set_last_reserved(id, ip)?;
        }
        let address = IpNet::new(ip, range.subnet.prefix_len()).unwrap_or(IpNet::from(ip));
        Ok(IpConfig { address, gateway: Some(range.gateway), interface: None })
    }

    fn reserve_requested_address<'s>(
        &mut self,
        set: &'s RangeSet,
        ip: IpAddr,
    ) -> Result<Option<(IpAddr, &'s AddressRange)>> {
        let Some(range) = set.find_range(ip) else { return Ok(None) };
        let set_aside = range.requests_from_reserved && self.store.set_reservation_aside(ip)?;
        let reserved = reserve_address(self.store, self.owner, self.end, ip);
        if set_aside && !matches!(reserved, Ok(true)) {
            self.store.put_reservation_back(ip)?;
        }
        Ok(reserved?.then_some((ip, range)))
    }

    fn reserve_free_address<'s>(
        &mut self,
        id: usize,
        set: &'s RangeSet,
    ) -> Result<Option<(IpAddr, &'s AddressRange)>> {
        let candidates = set.candidate_addresses(self.store.last_reserved(id));
        let candidates = candidates.filter(|(ip, _)| !self.quarantined.contains_key(ip));
        let mut taken = HashSet::new();
        for (attempt, (ip, range)) in candidates.enumerate() {
            if attempt == PROBES {
                // The check of the next addresses needs no system call.
                taken = self.store.taken_addresses()?;
            }
            if !taken.contains(&ip) && reserve_address(self.store, self.owner, self.end, ip)? {
                return Ok(Some((ip, range)));
            }
        }
        Ok(None)
    }

    fn taken_error(&self, set: &RangeSet, ip: IpAddr) -> Error {
        let msg = format!("requested IP address {ip} is not available in range set {set}");
        Error::internal(msg).with_details(match self.store.find_lease(ip) {
            Some(lease) => format!(
                "container {} has it (\"cnibox ipam ls\"): request another address of {set}",
                lease.id
            ),
            None if self.store.taken_addresses().is_ok_and(|taken| !taken.contains(&ip)) => {
                format!("an interface has it without a lease: request another address of {set}")
            }
            None => format!(
                "a file that names no container reserves it, which \"cnibox ipam free --network {} \
                 {ip}\" ends: request another address of {set}, or write \
                 \"requestsFromReserved\": true into the range",
                self.owner.network
            ),
        })
    }

    fn exhausted_error(&self, set: &RangeSet) -> Error {
        let error = Error::internal(format!("no IP addresses available in range set: {set}"));
        let waits = self.quarantined.iter().filter(|(ip, _)| set.contains(**ip));
        if let Some(shortest) = waits.map(|(_, left)| left.as_secs()).min() {
            let seconds = shortest.max(1);
            let details =
                format!("reuseDelay keeps back the next one for {seconds} s: try again then");
            return error.with_code(ErrorCode::TRY_AGAIN).with_details(details);
        }
        let remedy = "\"cnibox ipam ls\" lists their owners";
        error.with_details(match self.store.count_reservations() {
            Ok(0) | Err(_) => remedy.to_owned(),
            Ok(n) => format!(
                "{remedy}; {n} of this network are reserved by files that name no container: \
                 \"cnibox ipam free --network {} ADDRESS\" removes one, \"cnibox ipam free \
                 --empty\" the empty ones",
                self.owner.network
            ),
        })
    }
}

/// Reserves the address; false if it is taken by a lease or, if leases were deleted, by an existing
/// attachment of the network.
fn reserve_address(
    store: &mut LeaseStore,
    owner: AttachmentId<'_>,
    end: Option<HostVeth>,
    ip: IpAddr,
) -> Result<bool> {
    if !store.reserve_address(ip, owner, end)? {
        return Ok(false);
    }
    let sharing = AttachmentRecord::find_others_by_address(ip, owner);
    let Some(AttachmentRecord { id, .. }) = sharing
        .iter()
        .find(|other| other.network == owner.network && other.liveness() == Liveness::Alive)
    else {
        return Ok(true);
    };
    warn!("{ip} is not leased, but is in use by container {id}");
    store.release_address(ip, owner).map(|_| false)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::super::range::RangeConfig;
    use super::*;
    use crate::leases::LeaseOptions;

    fn owner(id: &str) -> AttachmentId<'_> {
        AttachmentId { network: "net", ifname: "eth0", id }
    }

    /// `subnet[=start-end][@gateway]`, several in a set joined with `,`.
    fn set(text: &str) -> RangeSet {
        let conf = |text: &str| {
            let (text, gateway) = text.split_once('@').unwrap_or((text, ""));
            let (subnet, bounds) = text.split_once('=').unwrap_or((text, "-"));
            let (start, end) = bounds.split_once('-').unwrap();
            RangeConfig {
                subnet: subnet.parse().ok(),
                range_start: start.parse().ok(),
                range_end: end.parse().ok(),
                gateway: gateway.parse().ok(),
                ..RangeConfig::default()
            }
        };
        RangeSet::from_configs(&text.split(',').map(conf).collect::<Vec<_>>()).unwrap()
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
            allocate_all(&mut store, &sets, &ips(requested), owner(id), None)
                .map(|all| all.iter().map(|a| a.address.to_string()).collect::<Vec<_>>().join(" "))
                .map_err(|e| e.message().to_owned())
        }

        fn del(&self, id: &str) {
            let mut store = LeaseStore::open(self.dir(), "net", LeaseOptions::default()).unwrap();
            store.release_attachment(owner(id)).unwrap();
        }

        fn taken(&self) -> HashSet<IpAddr> {
            LeaseStore::open(self.dir(), "net", LeaseOptions::default())
                .unwrap()
                .taken_addresses()
                .unwrap()
        }
    }

    #[test]
    fn addresses_are_allocated_round_robin() {
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
            ("10.0.0.0/29=10.0.0.0-10.0.0.3@10.0.0.6", "", "", "10.0.0.1/29"),
            ("10.0.0.0/29=10.0.0.6-10.0.0.7", "10.0.0.6", "", "10.0.0.6/29"),
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
    fn an_exhausted_set_is_named() {
        for (ranges, count, printed) in [
            ("10.0.0.0/30", 1, "10.0.0.1-10.0.0.2"),
            ("10.0.0.0/29", 5, "10.0.0.1-10.0.0.6"),
            ("10.0.0.0/30,10.0.1.0/30", 2, "10.0.0.1-10.0.0.2,10.0.1.1-10.0.1.2"),
            ("10.0.0.0/24", 253, "10.0.0.1-10.0.0.254"),
        ] {
            let node = Node::new();
            let exhausted = || {
                is_exhausted(
                    &LeaseListing::open_writable(node.dir(), "net", LeaseOptions::default())
                        .unwrap(),
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
    fn requested_addresses_are_allocated_or_refused() {
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
        let message = "failed to allocate for range 0: 10.0.0.2 has been allocated to c1, \
                       duplicate allocation is not allowed";
        for requested in ["", "10.0.0.2", "10.0.0.4"] {
            assert_eq!(add(requested), Err(message.to_owned()), "{requested}");
        }
        assert_eq!(node.taken(), HashSet::from_iter(ips("10.0.0.2")));
        assert_eq!(node.add("c1", &["10.7.0.0/29"], "").as_deref(), Ok("10.7.0.2/29"));
    }

    #[test]
    fn a_failure_releases_only_its_own_reservations() {
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
