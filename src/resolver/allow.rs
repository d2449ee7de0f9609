//! Puts the addresses of an answer in force for the container that asks, before the answer.

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

    /// Those of the addresses that are in force for less than half of their time.
    fn due_addresses(&self) -> impl Iterator<Item = NamedAddress> {
        let renewed = self.addresses.iter().map(|&(ip, ttl)| self.named_address(ip, ttl));
        let due = renewed.filter(|(left, address)| *left > 0 && *left < address.remaining() / 2);
        due.map(|(_, address)| address)
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
        let (mut given_up, mut program) = (Vec::new(), None);
        let port = egress::RECORDS.change_part(owner, |port: &mut EgressPart| {
            if !policies.are_of(port) {
                return false;
            }
            given_up = port.add_named(named);
            program = Some(fit_filter(port, policies, named.len(), &mut given_up));
            matches!(program, Some(Ok(_)))
        })?;
        let program = program.transpose()?;
        let Some((port, program)) = port.zip(program) else {
            return Err(Error::internal("the container has ended, or its policy was replaced"));
        };
        let end = host.require_link(&port.end)?;
        put_guard(host, &end, program, SINK)?;
        if !policies.put_addresses(filter, &port, named, &given_up)? {
            egress::add_port(filter, owner, &port, policies.compiled())?;
            policies.note_addresses(&port.named, &port.named);
        }
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
    use crate::netns::isolate_test_thread;

    fn part(name: &str) -> EgressPart {
        let policy = format!(r#"{{"allow": [{{"to": ["{name}"], "ports": ["tcp/443"]}}]}}"#);
        EgressPart {
            end: "veth0".to_owned(),
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
        for (left, told, is_due) in [(60, 55, false), (32, 27, false), (25, 20, true), (7, 2, true)]
        {
            known.until = begin + left;
            grant.policies.note_addresses(&[known.clone()], &[known.clone()]);
            let ttl = grant.find_in_force().unwrap()[0].1;
            // The second may end in between.
            assert!(ttl == told || ttl + 1 == told, "{left} s: {ttl}");
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
