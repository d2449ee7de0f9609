//! The addresses to which allowed names lead, in force in both guards for as long as the resolver's
//! answer holds.
//!
//! The record has them first, then the filter of the container, then the sets of its policy, whose
//! elements vanish at their time. What restores the rules of a record after a flush restores these
//! elements, too. An address stays in the filter until the next change: both guards must let a
//! packet pass.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use ipnet::IpNet;
use nix::errno::Errno;

use super::compile::{
    AllowedTraffic, Entry, Service, ServiceRange, Verdict, combine_services, flatten, has_service,
};
use super::find_container_link;
use super::named_address::{NamedAddress, boot_seconds};
use super::objects::{CONNECTED_TIMEOUT, NamedSet, PolicyObjects};
use super::part::{EgressPart, GuardTraffic};
use super::policy::{CompiledPolicy, EgressPolicy, is_name};
use super::special::special_networks;
use crate::netfilter::backend::PacketFilter;
use crate::netfilter::layout::LayoutTransaction;
use crate::netlink::nftables::{NftBatch, NftSocket, TimedKey};
use crate::netlink::traffic::program::ProgramFilter;
use crate::netlink::{Netlink, NetlinkError, NetlinkResult};
use cni::error::Result;

/// The maximum number of addresses of names that are in force for a container; those that vanish
/// first are given up.
const MOST_ADDRESSES: usize = 256;

/// How long the filter passes packets to an address that has vanished, in seconds, because of open
/// connections, of which the rules know.
const LINGERING: u64 = CONNECTED_TIMEOUT as u64;

/// How often the elements are read and written again, because some of them vanished in between.
const ATTEMPTS: usize = 4;

/// What an answer with the address means for a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressUse {
    /// The name must not lead there.
    Refused,
    /// The answer may have the address, and opens nothing: the policies allow the address itself, or
    /// do not have the name.
    Told,
    /// The address has to be in force before the answer.
    Named,
}

/// What the policies of one container say about names.
#[derive(Debug)]
pub struct NamePolicies {
    /// The container, without addresses of names.
    port: EgressPart,
    policies: Vec<CompiledPolicy>,
    compiled: CompiledPolicy,
    guard: GuardTraffic,
    sets: Vec<NamedSet>,
    /// What this process has put in force, with the time at which it vanishes.
    known: Mutex<HashMap<(String, IpAddr), u64>>,
}

impl NamePolicies {
    pub fn new(port: &EgressPart) -> Result<NamePolicies> {
        let (policies, compiled) = (port.compile_policies()?, port.compile()?);
        let sets = port.objects(&compiled).iter().flat_map(PolicyObjects::named_sets).collect();
        let guard = GuardTraffic::new(port, &compiled);
        let port = EgressPart { named: Vec::new(), ..port.clone() };
        Ok(NamePolicies { port, policies, compiled, guard, sets, known: Mutex::default() })
    }

    /// Whether these are the policies of the port, whatever addresses are in force for it.
    pub fn are_of(&self, port: &EgressPart) -> bool {
        self.port == EgressPart { named: Vec::new(), ..port.clone() }
    }

    pub fn compiled(&self) -> &CompiledPolicy {
        &self.compiled
    }

    /// The filter of the second guard for the container with these addresses of names.
    pub fn guard_filter(&self, port: &EgressPart) -> Result<ProgramFilter> {
        self.guard.compile_filter(port, &self.policies)
    }

    pub fn is_audited(&self) -> bool {
        self.port.is_audited
    }

    /// Whether the container gets an answer about the name, which is in lower case and without the
    /// final dot, as each of its policies allows.
    pub fn answers(&self, name: &str) -> bool {
        self.policies.iter().all(|policy| policy.names.answers(name))
    }

    /// Whether the name is an allowed name with a domain of a search list behind it: there is no such
    /// name for the container. With another answer than that the search would end (musl, which
    /// takes no other for one, or glibc) before it comes to the name itself.
    pub fn has_prefix_of(&self, name: &str) -> bool {
        let ends = name.match_indices('.').map(|(at, _)| at);
        let is_of_all = self.policies.iter().all(|policy| {
            ends.clone().any(|end| policy.names.services_of(&name[..end]).is_some())
                || policy.names.answers(name)
        });
        is_of_all && !self.answers(name)
    }

    /// What an answer with the address means. What is private or special, a neighbour, or an address
    /// of the host is not what the owner of a name decides about.
    pub fn judge_address(
        &self,
        host: &Netlink,
        name: &str,
        addr: IpAddr,
    ) -> NetlinkResult<AddressUse> {
        let Some(services) = services_at(&self.policies, name, addr) else {
            return Ok(AddressUse::Told);
        };
        // The mode audit changes nothing for the container.
        let refused = if self.port.is_audited { AddressUse::Told } else { AddressUse::Refused };
        if self.port.is_near_or_special(addr) || is_of_host(host, &self.port, addr)? {
            let CompiledPolicy { routed, host, neighbours, .. } = &self.compiled;
            let traffic = [routed, host, neighbours];
            let is_allowed = traffic.iter().any(|t| !t.services_of(addr).is_empty());
            return Ok(if is_allowed { AddressUse::Told } else { refused });
        }
        Ok(if services.is_empty() { refused } else { AddressUse::Named })
    }

    /// The number of seconds for which this process has put the address of the name in force.
    pub fn remaining_time(&self, name: &str, ip: IpAddr) -> u32 {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let until = known.get(&(name.to_owned(), ip)).copied().unwrap_or_default();
        NamedAddress { name: String::new(), ip, until }.remaining()
    }

    /// Puts the addresses in force in the rules; the record of `port` has them. Those that the record
    /// has given up are taken out. False if they are not in force, because the sets are missing.
    pub fn put_addresses(
        &self,
        filter: &PacketFilter,
        port: &EgressPart,
        named: &[NamedAddress],
        given_up: &[NamedAddress],
    ) -> Result<bool> {
        let keys = |addresses| named_keys(&self.port, &self.policies, &self.sets, addresses);
        // Another name that leads there may hold for longer.
        let is_named = |known: &&NamedAddress| named.iter().any(|new| new.ip == known.ip);
        let all: Vec<NamedAddress> = port.named.iter().filter(is_named).cloned().collect();
        let (wanted, unwanted) = (keys(&all), keys(given_up));
        let mut outcome = Ok(());
        for _ in 0..ATTEMPTS {
            outcome = replace_keys(filter.nft_socket()?, &wanted, &unwanted);
            match outcome.as_ref().err().and_then(NetlinkError::errno) {
                Some(Errno::ENOENT) => {}
                Some(_) => break,
                None => return Ok(true),
            }
        }
        debug!("the sets of names are missing: {outcome:?}");
        Ok(false)
    }

    /// Notes that the addresses of `named` are in force, and forgets those that are not `recorded`.
    pub fn note_addresses(&self, recorded: &[NamedAddress], named: &[NamedAddress]) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |named: &NamedAddress| ((named.name.clone(), named.ip), named.until);
        known.extend(named.iter().map(of));
        let recorded = recorded.iter().map(of);
        *known = recorded.filter(|(key, _)| known.contains_key(key)).collect();
    }
}

impl EgressPolicy {
    /// Whether the policy allows a name.
    pub fn has_names(&self) -> bool {
        self.allow.iter().flat_map(|entry| &entry.to).any(|text| is_name(text))
    }
}

impl EgressPart {
    /// Whether the container asks the resolver of the node.
    pub fn has_names(&self) -> bool {
        self.policies.iter().any(EgressPolicy::has_names)
    }

    /// Adds addresses, instead of earlier ones of the same names, and forgets those that have
    /// vanished long ago. Returns those that are given up for them.
    pub fn add_named(&mut self, named: &[NamedAddress]) -> Vec<NamedAddress> {
        self.named.retain(|known| {
            known.until + LINGERING > boot_seconds() && !named.iter().any(|new| new.is_same(known))
        });
        self.named.sort_by_key(|named| named.until);
        self.named.extend_from_slice(named);
        self.keep_named(MOST_ADDRESSES)
    }

    /// Whether the address of the name is recorded, for whatever time.
    pub fn has_named(&self, address: &NamedAddress) -> bool {
        self.named.iter().any(|known| known.is_same(address))
    }

    /// Keeps so many addresses: those that were added last, and of the others those that vanish last.
    /// Returns the rest.
    pub fn keep_named(&mut self, most: usize) -> Vec<NamedAddress> {
        let surplus = self.named.len().saturating_sub(most);
        let mut given_up: Vec<NamedAddress> = self.named.drain(..surplus).collect();
        // Another name may lead there.
        given_up.retain(|gone| !self.named.iter().any(|named| named.ip == gone.ip));
        given_up
    }

    /// Whether no name may open the address: it is special, on the container's own networks, or was
    /// the host's at the time of ADD.
    fn is_near_or_special(&self, addr: IpAddr) -> bool {
        let is_in = |networks: &[IpNet]| networks.iter().any(|net| net.contains(&addr));
        is_in(special_networks()) || is_in(&self.on_link) || self.host.contains(&addr)
    }

    /// The address of a name by which the service is allowed there now.
    pub fn find_named(&self, addr: IpAddr, service: Service) -> Result<Option<&NamedAddress>> {
        let policies = self.compile_policies()?;
        let is_allowed = |named: &&NamedAddress| {
            let services = services_at(&policies, &named.name, addr);
            named.ip == addr
                && named.remaining() > 0
                && services.is_some_and(|services| has_service(&services, service))
        };
        Ok(self.named.iter().find(is_allowed))
    }

    /// The traffic to the addresses of names that the policies allow. Names lead to none that is
    /// near or special.
    pub(super) fn named_traffic(&self, policies: &[CompiledPolicy]) -> AllowedTraffic {
        let entries = self.named.iter().filter(|named| !self.is_near_or_special(named.ip));
        let entries = entries.filter_map(|NamedAddress { name, ip, .. }| {
            let services = services_at(policies, name, *ip)?;
            Some(Entry { networks: vec![(*ip).into()], services, verdict: Verdict::Allow })
        });
        flatten(&entries.collect::<Vec<_>>(), &[])
    }
}

/// The services by which the policies allow the address because the name leads there; `None` if none
/// of them has the name.
fn services_at(policies: &[CompiledPolicy], name: &str, addr: IpAddr) -> Option<Vec<ServiceRange>> {
    let (mut is_named, mut services) = (false, vec![ServiceRange::ALL]);
    for CompiledPolicy { names, routed, .. } in policies {
        let own = names.services_of(name);
        is_named |= own.is_some();
        let own = own.unwrap_or_else(|| routed.services_of(addr));
        services = combine_services(&services, own, |all, own| all && own);
        if names.denies(addr, &services) {
            services.clear();
        }
    }
    is_named.then_some(services)
}

/// Whether packets to the address do not leave the node: it is an address of the host, or another
/// container is behind the link.
fn is_of_host(host: &Netlink, port: &EgressPart, addr: IpAddr) -> NetlinkResult<bool> {
    if host.is_local_address(addr) {
        return Ok(true);
    }
    let link = find_container_link(host, addr)?;
    Ok(link.is_some_and(|link| !port.uplinks.contains(&link.name)))
}

/// The elements of the addresses, by their sets.
fn named_keys<'s>(
    port: &EgressPart,
    policies: &[CompiledPolicy],
    sets: &'s [NamedSet],
    named: &[NamedAddress],
) -> KeysOfSets<'s> {
    let mut all: KeysOfSets<'_> = Vec::new();
    for address in named {
        let (ip, seconds) = (address.ip, address.remaining());
        if seconds == 0 || port.is_near_or_special(ip) {
            continue;
        }
        let services = services_at(policies, &address.name, ip);
        let set = sets
            .iter()
            .find(|set| set.is_ipv4 == ip.is_ipv4() && Some(&set.services) == services.as_ref());
        let Some(set) = set else { continue };
        let key = ((port.mac, ip).into(), seconds);
        match all.iter_mut().find(|(known, _)| std::ptr::eq(*known, set)) {
            // Several names may lead to one address.
            Some((_, keys)) => match keys.iter_mut().find(|known: &&mut TimedKey| known.0 == key.0)
            {
                Some(known) => known.1 = known.1.max(seconds),
                None => keys.push(key),
            },
            None => all.push((set, vec![key])),
        }
    }
    all
}

/// Elements by their sets.
type KeysOfSets<'s> = Vec<(&'s NamedSet, Vec<TimedKey>)>;

/// Adds elements, in place of those with the same keys, and deletes others.
fn replace_keys(
    nft: &NftSocket,
    wanted: &KeysOfSets<'_>,
    unwanted: &KeysOfSets<'_>,
) -> NetlinkResult<()> {
    let mut batch = NftBatch::new();
    for (set, keys) in wanted.iter().chain(unwanted) {
        let nft_set = set.nft_set();
        batch.delete_keys(nft_set, &nft.present_keys(nft_set, keys)?);
    }
    for (set, keys) in wanted {
        batch.add_timed_keys(set.nft_set(), keys);
    }
    nft.commit_batch(batch)
}

/// Adds the elements of the addresses that the record has and that are missing; all of them if the
/// transaction creates the sets.
pub(super) fn restore_addresses(
    change: &mut LayoutTransaction<'_>,
    port: &EgressPart,
    objects: &[PolicyObjects],
    is_new: bool,
) -> NetlinkResult<()> {
    // Policies from which there are objects can be compiled.
    if port.named.is_empty() {
        return Ok(());
    }
    // There are no objects of policies that cannot be compiled.
    let Ok(policies) = port.compile_policies() else { return Ok(()) };
    let sets: Vec<NamedSet> = objects.iter().flat_map(PolicyObjects::named_sets).collect();
    for (set, mut keys) in named_keys(port, &policies, &sets, &port.named) {
        if !is_new {
            // The port may have lost its place, and with it its policy, to another one.
            if !change.nft.has_object(set.nft_set())? {
                continue;
            }
            let present = change.nft.present_keys(set.nft_set(), &keys)?;
            keys.retain(|key| !present.contains(key));
        }
        change.batch.add_timed_keys(set.nft_set(), &keys);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
