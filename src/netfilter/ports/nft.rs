//! A container's elements in our table: one for each port, one for each address.
//!
//! Their cost does not depend on how many others there are: what ADD and DEL need is found by its
//! key, and `attachments` tells how much there is to find. Only when that does not add up, as when
//! DEL is not told the mappings of ADD, the maps are read.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;

use super::layout::{self, ATTACHMENTS, CONDITIONAL, Sets, TABLE};
use super::{Forward, Holder, HostPort, KEPT, Mapping, Taken, flows};
use crate::error::{Error, Result};
use crate::netfilter::backend::Family;
use crate::netfilter::layout::{self as tables, Change};
use crate::netfilter::names::{Owner, identity, stale};
use crate::netlink;
use crate::netlink::nftables::{
    ByComment, Data, Element, Key, L4, Nft, Rule, RuleInfo, Value, Verdict,
};

/// How much of each half of an instance's hash fits a name.
const HALF: usize = 15;

/// The port that an element maps.
fn port(element: &Element) -> Option<HostPort> {
    match element.key.0.as_slice() {
        [Value::Ip(addr), Value::Proto(proto), Value::Port(port)] => {
            Some(HostPort(Some(*addr), *port, *proto))
        }
        [Value::Proto(proto), Value::Port(port)] => Some(HostPort(None, *port, *proto)),
        _ => None,
    }
}

/// The container's address that a port leads to.
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

/// The element of a mapping, without the address that it leads to.
fn place(mapping: &Mapping, family: Family) -> Element {
    let (sets, proto, port) = (Sets::of(family), mapping.proto, mapping.host_port);
    match mapping.address() {
        Some(addr) => sets.host.element((addr, proto, port)),
        None => sets.any.element((proto, port)),
    }
}

/// The element of a container's address, without the chain that it leads to.
fn mapped(addr: IpAddr) -> Element {
    Sets::of(Family::of(addr)).mapped.element(addr)
}

/// All elements that `forward` consists of, but for the attachment's own.
fn elements(forward: &Forward<'_>) -> Vec<Element> {
    let (mut all, label) = (Vec::new(), forward.owner.label());
    for target in forward.targets {
        let (addr, family) = (target.addr(), target.family());
        let mappings: Vec<_> = forward.mappings_to(target).collect();
        // Where there are conditions, rules map the ports.
        let by_element = mappings.iter().filter(|_| !forward.conditions.are_for(family));
        all.extend(by_element.map(|m| place(m, family).to((addr, m.container_port))));
        let from = layout::from(forward.snat, target).filter(|_| !mappings.is_empty());
        all.extend(from.map(|chain| mapped(addr).verdict(Verdict::goto(chain))));
    }
    all.into_iter().map(|element| element.comment(&label)).collect()
}

/// The element that tells how many others there are; more if there are rules, too, which are found by
/// reading their chain.
fn total(forward: &Forward<'_>, count: usize, rules: &[Rule]) -> Element {
    let count = if rules.is_empty() { u32::try_from(count).ok() } else { None };
    attachment(forward.owner).to(Value::Mark(count.unwrap_or(u32::MAX)))
}

/// The rules of mappings with conditions.
fn rules(forward: &Forward<'_>) -> Vec<Rule> {
    let mut rules = Vec::new();
    for target in forward.targets {
        for mapping in forward.mappings_to(target) {
            for when in forward.conditions.rules(target.family()) {
                let when = mapping.address().into_iter().fold(when, Rule::daddr);
                let rule = when.dport(mapping.proto, mapping.host_port);
                let rule = rule.dnat(target.addr(), mapping.container_port);
                rules.push(rule.comment(forward.owner.label()));
            }
        }
    }
    rules
}

/// Makes the mappings; earlier mappings of the attachment are replaced. If another container has
/// a port, nothing is changed and the port is returned; a port that the same container has in another
/// network stays there.
pub fn add(nft: &Nft, forward: &Forward<'_>) -> Result<Option<Taken>> {
    let (wanted, rules) = (elements(forward), rules(forward));
    let asked: Vec<_> = [attachment(forward.owner)].iter().chain(&wanted).cloned().collect();
    let mut taken = None;
    tables::change(nft, &[layout::layout()], &asked, |change, found| {
        let (known, found) = found.split_first().unwrap_or((&None, &[]));
        taken = taken_port(forward.owner, &wanted, found);
        if taken.is_some() {
            return Ok(());
        }
        if known.is_some() {
            replace(change, forward.owner, &wanted)?;
        }
        let mut count = 0;
        for (element, found) in wanted.iter().zip(found) {
            let other = found.as_ref().filter(|other| other.comment != element.comment);
            if port(element).is_some() && other.is_some() {
                continue;
            }
            change.replace(found.as_ref(), element);
            count += 1;
        }
        change.replace(known.as_ref(), &total(forward, count, &rules));
        change.append_rules(CONDITIONAL, &forward.owner.label(), &rules);
        Ok(())
    })?;
    Ok(taken)
}

/// The first of the ports that another container has.
fn taken_port(owner: Owner<'_>, wanted: &[Element], found: &[Option<Element>]) -> Option<Taken> {
    wanted.iter().zip(found).find_map(|(element, found)| {
        let other = found.as_ref().filter(|other| other.comment != element.comment)?;
        let other = other.comment.as_deref();
        if owner.owns(other) || owner.is_of_same_container(other) {
            return None;
        }
        Some(Taken { port: port(element)?, by: holder(other) })
    })
}

/// Deletes what the attachment has and is not to have any more.
fn replace(change: &mut Change<'_>, owner: Owner<'_>, wanted: &[Element]) -> netlink::Result<()> {
    let wanted: HashSet<_> = wanted.iter().map(|element| (element.set, &element.key)).collect();
    let owns = owner.matcher();
    for former in all_of(change.nft, &owns)? {
        if former.set != ATTACHMENTS && !wanted.contains(&(former.set, &former.key)) {
            change.batch.del_element(&former);
        }
    }
    let mut rules = change.rules(TABLE).to_vec();
    rules.retain(|rule| owns(rule.comment.as_deref()));
    change.batch.del_rules(TABLE, &rules);
    Ok(())
}

/// Adds what a flush took.
pub(super) fn restore(change: &mut Change<'_>, forward: &Forward<'_>) {
    let (mut all, rules) = (elements(forward), rules(forward));
    all.push(total(forward, all.len(), &rules));
    for element in &all {
        change.restore(element);
    }
    change.restore_rules(CONDITIONAL, &forward.owner.label(), &rules);
}

/// The owner that a comment tells.
fn holder(comment: Option<&str>) -> Holder {
    let comment = comment.unwrap_or_default().to_owned();
    let instance = comment.split(',').next().unwrap_or_default().to_owned();
    let Some((id, ifname, network)) = identity(&comment) else {
        return Holder { instance, comment, ..Holder::default() };
    };
    let (id, ifname, network) = (id.to_owned(), Some(ifname.to_owned()), network.to_owned());
    Holder { instance, id, network, ifname, comment }
}

/// Every element whose comment `which` is true of.
fn all_of(nft: &Nft, which: ByComment<'_>) -> netlink::Result<Vec<Element>> {
    nft.find_of(&layout::layout().sets, &[], which)
}

/// What is being deleted.
#[derive(Clone, Debug, Default)]
struct Deleted {
    elements: Vec<Element>,
    rules: Vec<RuleInfo>,
}

/// Everything whose comment `which` is true of.
fn all(nft: &Nft, which: ByComment<'_>) -> netlink::Result<Deleted> {
    Ok(Deleted { elements: all_of(nft, which)?, rules: nft.rules_of(CONDITIONAL, which)? })
}

/// The attachment's elements by the keys of these mappings and addresses, if those are all that it
/// has; nothing if it has nothing.
fn all_by_key(
    nft: &Nft,
    owner: Owner<'_>,
    mappings: &[Mapping],
    addrs: &[IpAddr],
) -> netlink::Result<Option<Deleted>> {
    let mut asked = vec![attachment(owner), ATTACHMENTS.sentinel()];
    for family in Family::BOTH {
        let of_family = mappings.iter().filter(|mapping| mapping.is_of(family));
        asked.extend(of_family.map(|mapping| place(mapping, family)));
    }
    asked.extend(addrs.iter().copied().map(mapped));
    let owns = owner.matcher();
    let own = |found: Vec<Option<Element>>| -> Vec<Element> {
        let found = found.into_iter().flatten();
        found.filter(|element| owns(element.comment.as_deref())).collect()
    };
    let found = nft.elements(&asked)?;
    let [first, sentinel, ..] = found.as_slice() else { return Ok(None) };
    let Some(count) = first.as_ref().and_then(|first| first.data.clone()) else {
        // Where the map was flushed, there may be something all the same.
        let nothing = sentinel.is_some() || !nft.has(TABLE)?;
        return Ok(nothing.then(Deleted::default));
    };
    let mut elements = own(found);
    let mut more: BTreeSet<IpAddr> = elements.iter().filter_map(addr).collect();
    more.retain(|addr| !addrs.contains(addr));
    let more: Vec<_> = more.into_iter().map(mapped).collect();
    elements.extend(own(nft.elements(&more)?));
    let found = u32::try_from(elements.len() - 1).map(Value::Mark);
    let all = found.is_ok_and(|found| count == Data::Values(Key(vec![found])));
    Ok(all.then_some(Deleted { elements, rules: Vec::new() }))
}

/// Deletes what `find` finds. Returns the addresses that it led UDP to.
fn delete(nft: &Nft, find: impl Fn(&Nft) -> netlink::Result<Deleted>) -> Result<BTreeSet<IpAddr>> {
    let mut servers = BTreeSet::new();
    nft.update(&mut |nft| {
        let Deleted { elements, rules } = find(nft)?;
        let is_udp = |e: &&Element| port(e).is_some_and(|port| port.2 == L4::Udp);
        let of_rules = rules.iter().filter_map(flows::served_by);
        servers = elements.iter().filter(is_udp).filter_map(addr).chain(of_rules).collect();
        let mut batch = layout::layout().deletion(nft, &elements)?;
        batch.del_rules(TABLE, &rules);
        Ok(batch)
    })?;
    Ok(servers)
}

/// Deletes the attachment's mappings. Returns the addresses that they led UDP to. With its mappings and
/// addresses known, the elements of all attachments need not be read.
pub fn del(
    nft: &Nft,
    owner: Owner<'_>,
    mappings: &[Mapping],
    addrs: &[IpAddr],
) -> Result<BTreeSet<IpAddr>> {
    delete(nft, |nft| match all_by_key(nft, owner, mappings, addrs)? {
        Some(all) => Ok(all),
        None => all(nft, &owner.matcher()),
    })
}

/// Deletes the mappings of a network whose attachments are not among `valid`; where they led UDP to.
pub fn collect(nft: &Nft, network: &str, valid: &[Owner<'_>]) -> Result<BTreeSet<IpAddr>> {
    delete(nft, |nft| all(nft, &stale(network, valid)))
}

/// Verifies that every element is there as ADD made it, and that the chains use them.
pub fn check(nft: &Nft, forward: &Forward<'_>) -> Result<()> {
    let (mut wanted, rules) = (elements(forward), rules(forward));
    let missing = |text: String| {
        let remedy = KEPT.remedy(forward.owner, layout::layout().damage(nft, || true)?.as_deref());
        Err(Error::internal(text).with_details(remedy))
    };
    let mut found = nft.elements(&wanted)?;
    found.push(nft.element(&attachment(forward.owner))?);
    wanted.push(total(forward, wanted.len(), &rules));
    for (element, found) in wanted.iter().zip(found) {
        let set = element.set;
        let Some(found) = found else { return missing(format!("{element} is missing in {set}")) };
        let other = found.comment.as_deref().filter(|_| found.comment != element.comment);
        if other.is_some()
            && (element.leads_to().is_some() || !forward.owner.is_of_same_container(other))
        {
            let owner = holder(other);
            return missing(format!("element {element} of {set} belongs to {owner}"));
        }
        if other.is_none() && set != ATTACHMENTS && found.data != element.data {
            return missing(format!("element {element} of {set} leads elsewhere"));
        }
    }
    let found = nft.rules_of(CONDITIONAL, &forward.owner.matcher())?.len();
    let wanted = rules.len();
    if found < wanted {
        return missing(format!("{found} of {wanted} rules are in chain {CONDITIONAL}"));
    }
    match layout::layout().damage(nft, || true)? {
        Some(text) => missing(text),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_named() {
        let owner = Owner { network: "pods", ifname: "eth0", id: "c1" };
        let named = "container \"c1\" (network \"pods\", interface \"eth0\")";
        assert_eq!(holder(Some(&owner.label())).to_string(), named);
        assert_eq!(holder(None).to_string(), "somebody else: \"\"");
    }
}
