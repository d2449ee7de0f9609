//! Puts the addresses of an answer in force for the container that asks, before the answer.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::containers::ContainerOwner;
use crate::framework::AttachmentTurn;
use crate::iface::guard::{SINK, put_guard};
use crate::netfilter::PacketFilter;
use crate::netfilter::egress::named_address::NamedAddress;
use crate::netfilter::egress::resolved::{AddressUse, NamePolicies};
use crate::netfilter::egress::{self, EgressPart};
use crate::netlink::Netlink;
use crate::netlink::traffic::program::ProgramFilter;
use cni::error::{Error, Result};

/// How long another change of the policy may take: other containers wait as well. The container asks
/// again.
const PATIENCE: Duration = Duration::from_millis(100);

/// The number of seconds for which an address is in force after the container has forgotten it.
const SLACK: u32 = 5;

/// Addresses with their time to live in seconds.
pub type Addresses = Vec<(IpAddr, u32)>;

/// The addresses to which a name leads a container.
#[derive(Debug)]
pub struct Grant {
    pub owner: Arc<ContainerOwner>,
    pub policies: Arc<NamePolicies>,
    pub name: String,
    pub addresses: Addresses,
}

impl Grant {
    /// What the answer may have if all addresses are in force already; else `None`. Waits for
    /// nothing. That no address has become one that the name must not lead to, is judged again when
    /// its time is to begin again.
    pub(super) fn find_in_force(&self) -> Option<Addresses> {
        let in_force = |&(ip, ttl)| {
            let left = self.policies.remaining_time(&self.name, ip);
            (left > SLACK).then(|| (ip, told_time(ttl, left)))
        };
        self.addresses.iter().map(in_force).collect()
    }

    /// Puts the addresses in force, unless they are. Returns those that the answer may have, with
    /// the time to live for the answer: not longer than the address is in force.
    ///
    /// Blocks: for about a millisecond if an address is new, for microseconds otherwise.
    pub(super) fn allow(&self, filter: &PacketFilter, host: &Netlink) -> Result<Addresses> {
        let (mut told, mut named, mut is_new) = (Vec::new(), Vec::new(), false);
        for &(ip, ttl) in &self.addresses {
            match self.policies.judge_address(host, &self.name, ip)? {
                AddressUse::Refused => {}
                AddressUse::Told => told.push((ip, ttl)),
                AddressUse::Named => {
                    let (mut left, address) = self.named_address(ip, ttl);
                    if left <= SLACK {
                        is_new = true;
                        left = address.remaining();
                    }
                    told.push((ip, told_time(ttl, left)));
                    named.push(address);
                }
            }
        }
        if is_new {
            // All of them, so that none is given up for another one of the same answer.
            self.put_in_force(filter, host, &named)?;
        }
        Ok(told)
    }

    /// Whether the time of an address is to begin again.
    pub(super) fn is_due(&self) -> bool {
        self.due_addresses().next().is_some()
    }

    /// Puts the addresses that are due in force again, unless another question for the name has done
    /// that meanwhile.
    pub(super) fn renew(&self, filter: &PacketFilter, host: &Netlink) -> Result<()> {
        let mut due = Vec::new();
        for address in self.due_addresses() {
            let judged = self.policies.judge_address(host, &self.name, address.ip)?;
            due.extend((judged == AddressUse::Named).then_some(address));
        }
        if due.is_empty() { Ok(()) } else { self.put_in_force(filter, host, &due) }
    }

    /// Those of the addresses that have less of their time left than the rest at which they are renewed.
    fn due_addresses(&self) -> impl Iterator<Item = NamedAddress> {
        let renewed = self.addresses.iter().map(|&(ip, ttl)| self.named_address(ip, ttl));
        let due =
            renewed.filter(|(left, new)| *left > 0 && *left < self.rest(new.ip, new.remaining()));
        due.map(|(_, address)| address)
    }

    /// How many of the `time` seconds of an address are left when it is renewed: a sixth to a half,
    /// always the same for the container and the address. What was put in force in the same second is
    /// not renewed in the same second.
    fn rest(&self, ip: IpAddr, time: u32) -> u32 {
        let mut hasher = DefaultHasher::new();
        (self.owner.attachment_id(), ip).hash(&mut hasher);
        let spread = u32::try_from(hasher.finish() % u64::from(time / 3 + 1)).unwrap_or_default();
        time / 6 + spread
    }

    /// For how many seconds the address is in force, and the address from now on: never for a shorter
    /// time than the container was told before.
    fn named_address(&self, ip: IpAddr, ttl: u32) -> (u32, NamedAddress) {
        let left = self.policies.remaining_time(&self.name, ip);
        (left, NamedAddress::with_ttl(&self.name, ip, ttl.max(left)))
    }

    /// The record comes first: what restores the rules of the container restores these addresses.
    fn put_in_force(
        &self,
        filter: &PacketFilter,
        host: &Netlink,
        named: &[NamedAddress],
    ) -> Result<()> {
        let (owner, policies) = (self.owner.attachment_id(), &self.policies);
        let _turn = AttachmentTurn::take_at_once(owner)?;
        let _lock = egress::lock_policy_within(owner, PATIENCE)?;
        // Those that this process has put in force already.
        let is_known = |new: &NamedAddress| policies.remaining_time(&new.name, new.ip) > 0;
        let (mut given_up, mut program) = (Vec::new(), None);
        let port = egress::RECORDS.change_part(owner, |port: &mut EgressPart| {
            if !policies.are_of(port) {
                return false;
            }
            let before = port.named.len();
            let is_old = named.iter().all(|new| is_known(new) && port.has_named(new));
            given_up = port.add_named(named);
            if is_old && port.named.len() == before {
                // The filter has the same addresses, without their times.
                return true;
            }
            program = Some(fit_filter(port, policies, named.len(), &mut given_up));
            matches!(program, Some(Ok(_)))
        })?;
        let program = program.transpose()?;
        let Some(port) = port else {
            return Err(Error::internal("the container has ended, or its policy was replaced"));
        };
        if let Some(program) = program {
            let end = host.require_link(&port.end).map_err(Error::from);
            let put = end.and_then(|end| put_guard(host, &end, program, SINK));
            // The filter has other addresses than the record: it is put again with the next question.
            put.inspect_err(|_| policies.note_addresses(&[], &[]))?;
        }
        if !policies.put_addresses(filter, &port, named, &given_up)? {
            egress::add_port(filter, owner, &port, policies.compiled())?;
        }
        policies.note_addresses(&port.named, named);
        Ok(())
    }
}

/// The time to live in an answer, of an address that is in force for `left` seconds.
fn told_time(ttl: u32, left: u32) -> u32 {
    ttl.min(left.saturating_sub(SLACK))
}

/// The filter of the container. That of a large policy has place for fewer addresses: then only the
/// last `needed` ones are kept, or as many more as fit.
fn fit_filter(
    port: &mut EgressPart,
    policies: &NamePolicies,
    needed: usize,
    given_up: &mut Vec<NamedAddress>,
) -> Result<ProgramFilter> {
    loop {
        match policies.guard_filter(port) {
            Err(_) if port.named.len() > needed => {
                given_up.extend(port.keep_named(needed.max(port.named.len() / 2)));
            }
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;
    use crate::attachment::AttachmentId;
    use crate::iface::guard::{find_place, has_guard, remove_guard};
    use crate::netlink::{LinkKind, NewLink, VethPeer};
    use crate::netns::isolate_test_thread;

    fn part(name: &str) -> EgressPart {
        let policy = format!(r#"{{"allow": [{{"to": ["{name}"], "ports": ["tcp/443"]}}]}}"#);
        EgressPart {
            end: "veth0".to_owned(),
            mac: "02:00:00:00:00:01".parse().unwrap(),
            ips: vec!["10.1.0.2".parse().unwrap()],
            policies: vec![serde_json::from_str(&policy).unwrap()],
            ..EgressPart::default()
        }
    }

    #[test]
    fn what_the_filter_has_no_place_for_is_given_up() {
        let mut port = part("a.example.org");
        // Addresses in which all words have to be compared.
        let ip =
            |n: u128| Ipv6Addr::from_bits((0x2600 << 112) + n * 0x0001_0001_0001_0001_0001_0001);
        port.policies[0].allow[0].to.extend((0..540).map(|n| ip(n).to_string()));
        let policies = NamePolicies::new(&port).unwrap();
        let named = |n: u32| {
            let ip = Ipv4Addr::from_bits(0x0808_0000 + 2 * n);
            NamedAddress::with_ttl("a.example.org", ip.into(), 60)
        };
        port.named = (0..256).map(named).collect();
        let (all, before) = (port.named.clone(), named(900));
        let mut given_up = vec![before.clone()];
        let program = fit_filter(&mut port, &policies, 20, &mut given_up).unwrap();
        assert_eq!(program, policies.guard_filter(&port).unwrap());
        assert!((20..256).contains(&port.named.len()), "{}", port.named.len());
        // The last ones stay, and what was given up before is still taken out of the sets.
        assert_eq!(given_up.remove(0), before);
        assert_eq!([given_up, port.named.clone()].concat(), all);
        port.named = all;
        fit_filter(&mut port, &policies, 256, &mut Vec::new()).unwrap_err();
    }

    fn grant(owner: AttachmentId<'_>, ips: &[&str]) -> Grant {
        Grant {
            owner: Arc::new(ContainerOwner::of(owner)),
            policies: Arc::new(NamePolicies::new(&part("a.example.org")).unwrap()),
            name: "a.example.org".to_owned(),
            addresses: ips.iter().map(|ip| (ip.parse().unwrap(), 60)).collect(),
        }
    }

    #[test]
    fn only_what_is_in_force_is_told_at_once() {
        let owner = AttachmentId { network: "resolver-force", ifname: "eth0", id: "c1" };
        let mut grant = grant(owner, &["198.51.100.7"]);
        assert!(grant.find_in_force().is_none() && !grant.is_due());
        let mut known = NamedAddress::with_ttl(&grant.name, grant.addresses[0].0, 60);
        let begin = known.until - 60;
        let rest = grant.rest(known.ip, 60);
        let lefts = [
            (60, false),
            // A second may end in between.
            (rest + 2, false),
            (rest - 1, true),
            (7, true),
        ];
        for (left, is_due) in lefts {
            known.until = begin + u64::from(left);
            grant.policies.note_addresses(&[known.clone()], &[known.clone()]);
            let ttl = grant.find_in_force().unwrap()[0].1;
            assert!(ttl + 5 == left || ttl + 6 == left, "{left} s: {ttl}");
            assert_eq!(grant.is_due(), is_due, "{left} s");
        }
        known.until = begin + 5;
        grant.policies.note_addresses(&[known.clone()], &[known.clone()]);
        assert!(grant.find_in_force().is_none() && grant.is_due());
        known.until = begin + 60;
        grant.policies.note_addresses(&[known.clone()], &[known]);
        grant.addresses.push(("198.51.100.8".parse().unwrap(), 60));
        assert!(grant.find_in_force().is_none() && !grant.is_due(), "one of two");
    }

    #[test]
    fn what_begins_at_once_is_renewed_at_different_times() {
        let mut of_second = [0; 60];
        for container in 0..50 {
            let id = format!("c{container}");
            let owner = AttachmentId { network: "resolver-spread", ifname: "eth0", id: &id };
            let grant = grant(owner, &[]);
            for last in 0..24 {
                let rest = grant.rest(Ipv4Addr::new(198, 51, 100, last).into(), 60);
                of_second[usize::try_from(rest).unwrap()] += 1;
            }
        }
        // 1,200 in 21 seconds: 57 in each.
        for (rest, count) in of_second.into_iter().enumerate() {
            let expected = if (10..=30).contains(&rest) { 25..=90 } else { 0..=0 };
            assert!(expected.contains(&count), "{count} with {rest} s left");
        }
    }

    /// A filter has addresses without their times.
    #[test]
    fn a_filter_is_put_when_its_addresses_change() {
        isolate_test_thread();
        let (filter, host) = (PacketFilter::new(), Netlink::open().unwrap());
        let veth = NewLink::new("veth0", LinkKind::Veth { peer: VethPeer::new("veth1") });
        let end = host.add_and_read_link(&veth).unwrap();
        let owner = AttachmentId { network: "resolver-renew", ifname: "eth0", id: "c1" };
        let grant = grant(owner, &["198.51.100.7"]);
        let mut due = NamedAddress::with_ttl(&grant.name, grant.addresses[0].0, 60);
        due.until -= 50;
        let gone = NamedAddress { until: 0, ip: "198.51.100.9".parse().unwrap(), ..due.clone() };
        let known = std::slice::from_ref(&due);
        // Returns the addresses of the record, and whether the filter was put.
        let change = |recorded: &[&NamedAddress], change: &dyn Fn(&Grant) -> Result<()>| {
            let named = recorded.iter().copied().cloned().collect();
            egress::RECORDS.add_part(owner, EgressPart { named, ..part("a.example.org") });
            let changed = change(&grant);
            let port = egress::RECORDS.read_content::<EgressPart>(owner);
            egress::RECORDS.remove_part(owner).unwrap();
            changed.unwrap();
            let port = port.unwrap();
            let wanted = grant.policies.guard_filter(&port).unwrap();
            let is_put = has_guard(&host, &end, &wanted, SINK).unwrap();
            assert_eq!(is_put, find_place(&host, &end).unwrap().program.is_some());
            remove_guard(&host, &end).unwrap();
            (port.named, is_put)
        };
        let renew = |grant: &Grant| {
            grant.policies.note_addresses(known, known);
            grant.renew(&filter, &host)
        };
        let remaining = |ip| grant.policies.remaining_time(&grant.name, ip);
        // Another process has recorded the address; nobody knows whether the filter has it.
        let other = NamedAddress { until: due.until + 40, ip: gone.ip, ..due.clone() };
        assert!(!change(&[&other, &due], &renew).1 && remaining(due.ip) > 50);
        assert_eq!(remaining(other.ip), 0, "the rules were missing, and have it now");
        let (named, is_put) = change(&[&due], &renew);
        assert!(named.len() == 1 && named[0].remaining() > 50 && !is_put, "{named:?}");
        let (named, is_put) = change(&[&gone, &due], &renew);
        // It is forgotten once no connection can be open any more: not soon after the start of the
        // system.
        assert_eq!(is_put, !named.contains(&gone));
        assert!(change(&[&gone], &renew).1, "the record did not have it");
        let allow = |grant: &Grant| {
            grant.policies.note_addresses(&[], &[]);
            grant.allow(&filter, &host).map(drop)
        };
        assert!(change(&[&due], &allow).1, "of another process");
        assert!(remaining(due.ip) > 0);
        egress::RECORDS.add_part(owner, part("a.example.org"));
        host.delete_link(&end.name).unwrap();
        let renewed = renew(&grant);
        egress::RECORDS.remove_part(owner).unwrap();
        renewed.unwrap_err();
        assert_eq!(remaining(due.ip), 0, "the filter was not put");
    }

    /// The question was allowed by the policy of before.
    #[test]
    fn a_replaced_policy_opens_nothing() {
        isolate_test_thread();
        let owner = AttachmentId { network: "resolver-allow", ifname: "eth0", id: "c1" };
        let grant = grant(owner, &["198.51.100.7"]);
        let (filter, host) = (PacketFilter::new(), Netlink::open().unwrap());
        let allow = || grant.allow(&filter, &host).unwrap_err().message().to_owned();
        let expected = "the container has ended, or its policy was replaced";
        assert_eq!(allow(), expected, "without a record");
        egress::RECORDS.add_part(owner, part("b.example.org"));
        let message = allow();
        let stored = egress::RECORDS.find_part::<EgressPart>(&owner.instance_id()).unwrap();
        egress::RECORDS.remove_part(owner).unwrap();
        assert_eq!(message, expected);
        assert_eq!(stored.content.named, []);
    }
}
