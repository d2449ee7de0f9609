//! A container's elements in our table: one for each port, one for each address.
//!
//! The cost of ADD and DEL does not depend on the number of other containers: elements are looked up by key, and
//! `attachments` contains their number. The maps are read only if the numbers differ, as when the mappings of DEL
//! are not those of ADD.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::layout::{self, ANY, ATTACHMENTS, CONDITIONAL, HOST, MAPPED, TABLE};
use super::{Forward, Holder, KEPT, Mapping, Taken, flows, host_port, reference};
use crate::error::{Error, Result};
use crate::netfilter::backend::{Backend, Family, PacketFilter};
use crate::netfilter::layout::{self as tables, Change};
use crate::netfilter::names::{Owner, identity, stale};
use crate::netfilter::shared::{Heirs, heirs};
use crate::netlink;
use crate::netlink::nftables::{
    Batch, ByComment, Data, Element, Key, L4, Nft, Rule, RuleInfo, Value, Verdict,
};

/// The length of each half of an instance's hash that fits into an interface name.
const HALF: usize = 15;

/// The port of the host that an element maps: address, port, protocol.
fn port(element: &Element) -> Option<(Option<IpAddr>, u16, L4)> {
    match element.key.0.as_slice() {
        [Value::Ip(addr), Value::Proto(proto), Value::Port(port)] => {
            Some((Some(*addr), *port, *proto))
        }
        [Value::Proto(proto), Value::Port(port)] => Some((None, *port, *proto)),
        _ => None,
    }
}

/// The container's address that a port is mapped to.
fn addr(element: &Element) -> Option<IpAddr> {
    let Some(Data::Values(Key(to))) = &element.data else { return None };
    if let Some(Value::Ip(addr)) = to.first() { Some(*addr) } else { None }
}

/// The attachment's own element, without the number of the others.
fn attachment(owner: Owner<'_>) -> Element {
    let instance = owner.instance();
    let halves = instance.split('-').map(|half| half.get(..HALF).unwrap_or(half).into());
    ATTACHMENTS.element(Key(halves.collect())).comment(owner.label())
}

/// The element of a mapping, without its data.
fn place(mapping: &Mapping, family: Family) -> Element {
    let (at, proto, port) = (family as usize, mapping.proto, mapping.host_port);
    match mapping.address() {
        Some(addr) => HOST[at].element((addr, proto, port)),
        None => ANY[at].element((proto, port)),
    }
}

/// The element of a container's address, without its data.
fn mapped(addr: IpAddr) -> Element {
    MAPPED[usize::from(addr.is_ipv6())].element(addr)
}

/// The elements of the attachment, without its own.
fn elements(owner: Owner<'_>, forward: &Forward) -> Vec<Element> {
    let (mut all, label) = (Vec::new(), owner.label());
    for target in forward.targets.iter().copied() {
        let (addr, family) = (target.addr(), Family::of(target.addr()));
        let mappings: Vec<_> = forward.mappings_to(target).collect();
        // Ports with conditions are mapped by rules.
        if !forward.conditions.are_for(family) {
            all.extend(mappings.iter().map(|m| place(m, family).to((addr, m.container_port))));
        }
        let from = layout::from(forward.snat, target).filter(|_| !mappings.is_empty());
        all.extend(from.map(|chain| mapped(addr).verdict(Verdict::goto(chain))));
    }
    all.into_iter().map(|element| element.comment(&label)).collect()
}

/// The elements of a record.
fn recorded(owner: Owner<'_>, forward: &Forward) -> Vec<Element> {
    match forward.backend {
        Backend::Nftables => elements(owner, forward),
        Backend::Iptables => Vec::new(),
    }
}

/// The attachment's own element, with the number of the others. If there are rules as well, the number is larger
/// than that of any elements, since rules are found only by reading their chain.
fn total(owner: Owner<'_>, count: usize, rules: &[Rule]) -> Element {
    let count = if rules.is_empty() { u32::try_from(count).ok() } else { None };
    attachment(owner).to(Value::Mark(count.unwrap_or(u32::MAX)))
}

/// The rules of mappings with conditions.
fn rules(owner: Owner<'_>, forward: &Forward) -> Vec<Rule> {
    let mut rules = Vec::new();
    for target in forward.targets.iter().copied() {
        let alternatives = forward.conditions.rules(Family::of(target.addr()));
        for mapping in forward.mappings_to(target) {
            for rule in alternatives.iter().cloned() {
                let rule = mapping.address().into_iter().fold(rule, Rule::daddr);
                let rule = rule.dport(mapping.proto, mapping.host_port);
                let rule = rule.dnat(target.addr(), mapping.container_port);
                rules.push(rule.comment(owner.label()));
            }
        }
    }
    rules
}

/// Creates the mappings; earlier mappings of the attachment are replaced. If another container holds a port, nothing
/// is created and the port is returned. A port that the same container holds in another network remains there.
pub(super) fn add(
    filter: &PacketFilter,
    owner: Owner<'_>,
    forward: &Forward,
) -> Result<Option<Taken>> {
    let (wanted, rules) = (elements(owner, forward), rules(owner, forward));
    let queried: Vec<_> = [attachment(owner)].iter().chain(&wanted).cloned().collect();
    let mut taken = None;
    filter.tables()?.change(&[layout::layout()], &queried, &mut |change, found| {
        let mut found = found.into_iter();
        let known = found.next().flatten();
        let found = with_flushed_ports(change, owner, &wanted, found);
        taken = taken_port(owner, &wanted, &found);
        if taken.is_some() {
            return Ok(());
        }
        if known.is_some() {
            del_former(change, owner, &wanted)?;
        }
        let mut count = 0;
        for (element, found) in wanted.iter().zip(&found) {
            let other = found.as_ref().filter(|other| other.comment != element.comment);
            if port(element).is_some() && other.is_some() {
                continue;
            }
            count += usize::from(change.claim(found.as_ref(), element));
        }
        change.replace(known.as_ref(), &total(owner, count, &rules));
        change.append_rules(CONDITIONAL, &owner.label(), &rules);
        Ok(())
    })?;
    Ok(taken)
}

/// The elements that were found for `wanted`. After a flush, the ports of other living attachments count as found: this
/// transaction restores them.
fn with_flushed_ports(
    change: &mut Change<'_>,
    owner: Owner<'_>,
    wanted: &[Element],
    found: impl Iterator<Item = Option<Element>>,
) -> Vec<Option<Element>> {
    let mut flushed = HashMap::new();
    if ANY.iter().chain(&HOST).any(|set| change.is_flushed(*set)) {
        for kept in change.living::<Forward>(KEPT).iter().filter(|kept| kept.owner() != owner) {
            let ports = recorded(kept.owner(), &kept.content).into_iter();
            flushed
                .extend(ports.filter(|e| port(e).is_some()).map(|e| ((e.set, e.key.clone()), e)));
        }
    }
    let mut of_record = |wanted: &Element| flushed.remove(&(wanted.set, wanted.key.clone()));
    wanted.iter().zip(found).map(|(wanted, found)| found.or_else(|| of_record(wanted))).collect()
}

/// The first of the ports that another container holds.
fn taken_port(owner: Owner<'_>, wanted: &[Element], found: &[Option<Element>]) -> Option<Taken> {
    wanted.iter().zip(found).find_map(|(element, found)| {
        let other = found.as_ref().filter(|other| other.comment != element.comment)?;
        let other = other.comment.as_deref();
        if owner.owns(other) || owner.is_of_same_container(other) {
            return None;
        }
        let (addr, port, proto) = port(element)?;
        Some(Taken { port: host_port(addr, port, proto), by: holder(other) })
    })
}

/// Deletes the attachment's elements that are not `wanted`, and its rules.
fn del_former(
    change: &mut Change<'_>,
    owner: Owner<'_>,
    wanted: &[Element],
) -> netlink::Result<()> {
    let wanted: HashSet<_> = wanted.iter().map(|element| (element.set, &element.key)).collect();
    let owns = owner.matcher();
    let mut former = change.nft.find_of(&layout::layout().sets, &[], &owns)?;
    former.retain(|e| e.set != ATTACHMENTS && !wanted.contains(&(e.set, &e.key)));
    for element in &former {
        change.batch.del_element(element);
    }
    for heir in heirs(KEPT, Some(owner), &former, recorded) {
        change.put(&heir);
    }
    let rules = change.nft.rules_of(CONDITIONAL, &owns)?;
    change.batch.del_rules(TABLE, &rules);
    Ok(())
}

/// Adds what a flush has deleted.
pub(super) fn restore(change: &mut Change<'_>) {
    let mut living = change.living::<Forward>(KEPT);
    living.retain(|kept| kept.content.backend == Backend::Nftables);
    for (owner, forward) in living.iter().map(|kept| (kept.owner(), &kept.content)) {
        let (mut all, rules) = (elements(owner, forward), rules(owner, forward));
        all.push(total(owner, all.len(), &rules));
        for element in &all {
            change.restore(element);
        }
        change.restore_rules(CONDITIONAL, &owner.label(), &rules);
    }
}

/// The owner that a comment identifies.
fn holder(comment: Option<&str>) -> Holder {
    let comment = comment.unwrap_or_default().to_owned();
    let instance = comment.split(',').next().unwrap_or_default().to_owned();
    let Some((id, ifname, network)) = identity(&comment) else {
        return Holder { instance, comment, ..Holder::default() };
    };
    let (id, ifname, network) = (id.to_owned(), Some(ifname.to_owned()), network.to_owned());
    Holder { instance, id, network, ifname, comment }
}

/// Elements, and rules in the chain `conditional`.
type Found = (Vec<Element>, Vec<RuleInfo>);

/// All elements and rules with a comment for which `which` returns true.
fn all(nft: &Nft, which: ByComment<'_>) -> netlink::Result<Found> {
    let elements = nft.find_of(&layout::layout().sets, &[], which)?;
    Ok((elements, nft.rules_of(CONDITIONAL, which)?))
}

/// Looks up the attachment's elements by key. Returns them if these are all, nothing if the attachment has none,
/// `None` if the maps have to be read.
fn all_by_key(
    nft: &Nft,
    owner: Owner<'_>,
    known: Option<&Forward>,
) -> netlink::Result<Option<Found>> {
    let mut queried = vec![attachment(owner), ATTACHMENTS.sentinel()];
    let mappings = known.map_or(&[][..], |known| known.mappings.as_slice());
    for family in Family::BOTH {
        let of_family = mappings.iter().filter(|mapping| mapping.is_of(family));
        queried.extend(of_family.map(|mapping| place(mapping, family)));
    }
    let addrs: Vec<IpAddr> = known.iter().flat_map(|k| k.targets.iter().map(IpNet::addr)).collect();
    queried.extend(addrs.iter().copied().map(mapped));
    let owns = owner.matcher();
    let own = |found: Vec<Option<Element>>| -> Vec<Element> {
        let found = found.into_iter().flatten();
        found.filter(|element| owns(element.comment.as_deref())).collect()
    };
    let found = nft.elements(&queried)?;
    let [first, sentinel, ..] = found.as_slice() else { return Ok(None) };
    let Some(count) = first.as_ref().and_then(|first| first.data.clone()) else {
        // If the map was flushed, there may be other elements nevertheless.
        return Ok(sentinel.is_some().then(Found::default));
    };
    let mut elements = own(found);
    let mut more: BTreeSet<IpAddr> = elements.iter().filter_map(addr).collect();
    more.retain(|addr| !addrs.contains(addr));
    let more: Vec<_> = more.into_iter().map(mapped).collect();
    elements.extend(own(nft.elements(&more)?));
    let found = u32::try_from(elements.len() - 1).map(Value::Mark);
    let is_all = found.is_ok_and(|found| count == Data::Values(Key(vec![found])));
    Ok(is_all.then_some((elements, Vec::new())))
}

/// Deletes what `find` returns, and gives the keys that other attachments need to the `heirs`. Returns the addresses that it
/// redirected UDP to.
fn delete(
    nft: &Nft,
    find: &dyn Fn(&Nft) -> netlink::Result<Found>,
    heirs: Heirs<'_>,
) -> netlink::Result<BTreeSet<IpAddr>> {
    let mut servers = BTreeSet::new();
    let find = &mut |nft: &Nft, batch: &mut Batch| {
        let (elements, rules) = find(nft)?;
        let is_udp = |e: &&Element| port(e).is_some_and(|(_, _, proto)| proto == L4::Udp);
        let of_rules = rules.iter().filter_map(flows::served_by);
        servers = elements.iter().filter(is_udp).filter_map(addr).chain(of_rules).collect();
        batch.del_rules(TABLE, &rules);
        Ok(elements)
    };
    layout::layout().hand_on(nft, KEPT, find, heirs)?;
    Ok(servers)
}

/// Deletes the attachment's mappings, in our layout and the reference's. Returns the addresses that they redirected
/// UDP to. With the mappings of ADD `known`, the elements of others need not be read.
pub(super) fn del(
    filter: &PacketFilter,
    owner: Owner<'_>,
    known: Option<&Forward>,
) -> Result<BTreeSet<IpAddr>> {
    let Some(nft) = filter.nft_if_present()? else { return Ok(BTreeSet::new()) };
    let find = |nft: &Nft| match all_by_key(nft, owner, known)? {
        Some(all) => Ok(all),
        None => all(nft, &owner.matcher()),
    };
    let mut servers = BTreeSet::new();
    if nft.has(TABLE)? {
        servers = delete(nft, &find, &|deleted| heirs(KEPT, Some(owner), deleted, recorded))?;
    }
    servers.extend(reference::del(nft, owner.id)?);
    Ok(servers)
}

/// Deletes the mappings of the network's attachments that are not among `valid`. Returns the addresses that they
/// redirected UDP to.
pub(super) fn collect(
    filter: &PacketFilter,
    network: &str,
    valid: &[Owner<'_>],
) -> Result<BTreeSet<IpAddr>> {
    let Some(nft) = filter.nft_if_present()? else { return Ok(BTreeSet::new()) };
    let find = |nft: &Nft| all(nft, &stale(network, valid));
    Ok(delete(nft, &find, &|deleted| heirs(KEPT, None, deleted, recorded))?)
}

/// Verifies that every element is as ADD created it, and that the chains use the elements; or that the reference
/// created the mappings.
pub(super) fn check(nft: &Nft, owner: Owner<'_>, forward: &Forward) -> Result<()> {
    match missing(nft, owner, forward)? {
        Some(text) if !reference::has(nft, owner, forward)? => {
            let damage = layout::layout().damage(nft, &|| true)?;
            if damage.as_ref() == Some(&text) {
                return tables::refuse(damage);
            }
            Err(Error::internal(text).with_details(KEPT.remedy(owner, damage.as_deref())))
        }
        _ => Ok(()),
    }
}

/// The first missing or different object.
fn missing(nft: &Nft, owner: Owner<'_>, forward: &Forward) -> netlink::Result<Option<String>> {
    let (mut wanted, rules) = (elements(owner, forward), rules(owner, forward));
    let mut found = nft.elements(&wanted)?;
    found.push(nft.element(&attachment(owner))?);
    wanted.push(total(owner, wanted.len(), &rules));
    for (element, found) in wanted.iter().zip(found) {
        let set = element.set;
        let Some(found) = found else { return Ok(Some(format!("{element} is missing in {set}"))) };
        let other = found.comment.as_deref().filter(|_| found.comment != element.comment);
        if other.is_some() && port(element).is_some() && !owner.is_of_same_container(other) {
            let owner = holder(other);
            return Ok(Some(format!("element {element} of {set} belongs to {owner}")));
        }
        if other.is_none() && set != ATTACHMENTS && found.data != element.data {
            return Ok(Some(format!("element {element} of {set} leads elsewhere")));
        }
    }
    let (found, wanted) = (nft.rules_of(CONDITIONAL, &owner.matcher())?.len(), rules.len());
    if found < wanted {
        return Ok(Some(format!("{found} of {wanted} rules are in chain {CONDITIONAL}")));
    }
    layout::layout().damage(nft, &|| true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_described() {
        let owner = Owner { network: "pods", ifname: "eth0", id: "c1" };
        let named = "container \"c1\" (network \"pods\", interface \"eth0\")";
        assert_eq!(holder(Some(&owner.label())).to_string(), named);
        assert_eq!(holder(None).to_string(), "an unknown owner: \"\"");
    }
}
