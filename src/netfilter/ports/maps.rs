//! A container's elements in our table: one for each port, one for each address.
//!
//! Their cost does not depend on how many others there are: what ADD and DEL need is found by its
//! key, and `attachments` tells how much there is to find. Only when that does not add up, as when
//! DEL is not told the mappings of ADD, the maps are read.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;

use super::layout::{self, ATTACHMENTS, CONDITIONAL, Sets, TABLE};
use super::{Forward, Holder, HostPort, KEPT, Mapping, Taken, Target, flows};
use crate::error::{Error, Result};
use crate::netfilter::backend::Family;
use crate::netfilter::layout::{self as tables, Change};
use crate::netfilter::names::{Owner, identity, stale};
use crate::netlink;
use crate::netlink::nftables::{
    Batch, Data, Element, Key, L4, Nft, Rule, RuleInfo, Set, Value, Verdict,
};

/// How much of each half of an instance's hash fits a name.
const HALF: usize = 15;

/// An element and its set.
#[derive(Clone, Debug)]
struct Placed {
    set: Set<'static>,
    element: Element,
}

impl Placed {
    /// The port that this maps.
    fn port(&self) -> Option<HostPort> {
        match self.element.key.0.as_slice() {
            [Value::Ip(addr), Value::Proto(proto), Value::Port(port)] => {
                Some(HostPort(Some(*addr), *port, *proto))
            }
            [Value::Proto(proto), Value::Port(port)] => Some(HostPort(None, *port, *proto)),
            _ => None,
        }
    }

    /// The container's address that a port leads to.
    fn addr(&self) -> Option<IpAddr> {
        let Some(Data::Values(Key(to))) = &self.element.data else { return None };
        if let Some(Value::Ip(addr)) = to.first() { Some(*addr) } else { None }
    }

    /// Where it leads UDP to.
    fn udp(&self) -> Option<IpAddr> {
        self.port().filter(|port| port.2 == L4::Udp).and_then(|_| self.addr())
    }

    fn place(&self) -> (Set<'static>, Key) {
        (self.set, self.element.key.clone())
    }
}

fn attachment(owner: Owner<'_>) -> Key {
    let instance = owner.instance();
    let halves = instance.split('-').map(|half| half.get(..HALF).unwrap_or(half).into());
    Key(halves.collect())
}

/// Where the port of a mapping is.
fn place(mapping: &Mapping, family: Family) -> (Set<'static>, Key) {
    let (sets, proto, port) = (Sets::of(family), mapping.proto, mapping.host_port);
    match mapping.address() {
        Some(addr) => (sets.host, (addr, proto, port).into()),
        None => (sets.any, (proto, port).into()),
    }
}

/// The elements of one address.
fn elements_to(forward: &Forward<'_>, target: &Target) -> Vec<Placed> {
    let family = target.family();
    let mut mappings = forward.mappings_to(target).peekable();
    let from = layout::from(forward.snat, target).filter(|_| mappings.peek().is_some());
    let snat = from.map(|chain| {
        let element = Element::new(target.addr()).verdict(Verdict::Goto(chain));
        Placed { set: Sets::of(family).mapped, element }
    });
    let port = |mapping: &Mapping| {
        let (set, key) = place(mapping, family);
        Placed { set, element: Element::new(key).to((target.addr(), mapping.container_port)) }
    };
    // Where there are conditions, rules map the ports.
    let ports = mappings.filter(|_| !forward.conditions.are_for(family)).map(port);
    ports.chain(snat).collect()
}

/// All elements that `forward` consists of, but for the attachment's own.
fn elements(forward: &Forward<'_>) -> Vec<Placed> {
    let comment = forward.owner.label();
    let mut all: Vec<Placed> =
        forward.targets.iter().flat_map(|target| elements_to(forward, target)).collect();
    for placed in &mut all {
        placed.element.comment = Some(comment.clone());
    }
    all
}

/// The element that tells how many others there are; more if there are rules, too, which are found by
/// reading their chain.
fn total(forward: &Forward<'_>, count: usize, rules: &[Rule]) -> Element {
    let count = if rules.is_empty() { u32::try_from(count).ok() } else { None };
    let count = Value::Mark(count.unwrap_or(u32::MAX));
    let element = Element::new(attachment(forward.owner)).comment(forward.owner.label());
    Element { data: Some(Data::Values(Key(vec![count]))), ..element }
}

/// The rules of mappings with conditions.
fn rules(forward: &Forward<'_>) -> Vec<Rule> {
    let mut rules = Vec::new();
    for target in forward.targets {
        for mapping in forward.mappings_to(target) {
            for when in forward.conditions.rules(target.family()) {
                let when = mapping.address().into_iter().fold(when, Rule::daddr);
                let rule = when.dport(mapping.proto, mapping.host_port);
                let rule = rule.dnat(target.addr(), Some(mapping.container_port));
                rules.push(rule.comment(forward.owner.label()));
            }
        }
    }
    rules
}

/// Makes the mappings; those that the attachment had before are replaced. If another container has
/// a port, nothing is changed, and that is returned; one that the same container has in another
/// network stays there.
pub fn add(nft: &Nft, forward: &Forward<'_>) -> Result<Option<Taken>> {
    let (wanted, rules) = (elements(forward), rules(forward));
    let first = (ATTACHMENTS, attachment(forward.owner));
    let keys: Vec<_> = [first].into_iter().chain(wanted.iter().map(Placed::place)).collect();
    let mut taken = None;
    tables::change(nft, &[layout::layout()], &keys, |change, found| {
        let (known, found) = found.split_first().unwrap_or((&None, &[]));
        taken = taken_port(forward.owner, &wanted, found);
        if taken.is_some() {
            return Ok(());
        }
        if known.is_some() {
            replace(change, forward.owner, &wanted)?;
        }
        let mut count = 0;
        for (placed, found) in wanted.iter().zip(found) {
            let other = found.as_ref().filter(|other| other.comment != placed.element.comment);
            if placed.port().is_some() && other.is_some() {
                continue;
            }
            change.replace(placed.set, found.as_ref(), &placed.element);
            count += 1;
        }
        change.replace(ATTACHMENTS, known.as_ref(), &total(forward, count, &rules));
        change.append_rules(CONDITIONAL, &forward.owner.label(), &rules);
        Ok(())
    })?;
    Ok(taken)
}

/// The first of the ports that another container has.
fn taken_port(owner: Owner<'_>, wanted: &[Placed], found: &[Option<Element>]) -> Option<Taken> {
    let label = Some(owner.label());
    wanted.iter().zip(found).find_map(|(placed, found)| {
        let other = found.as_ref().filter(|other| other.comment != label)?.comment.as_deref();
        if owner.owns(other) || owner.is_of_same_container(other) {
            return None;
        }
        Some(Taken { port: placed.port()?, by: holder(other) })
    })
}

/// Deletes what the attachment has and is not to have any more.
fn replace(change: &mut Change<'_>, owner: Owner<'_>, wanted: &[Placed]) -> netlink::Result<()> {
    let wanted: HashSet<_> = wanted.iter().map(Placed::place).collect();
    let instance = owner.instance();
    for former in all_of(change.nft(), |comment| is_of(&instance, comment))? {
        if former.set != ATTACHMENTS && !wanted.contains(&former.place()) {
            change.batch().del_element(former.set, &former.element);
        }
    }
    let own = |rule: &&RuleInfo| is_of(&instance, rule.comment.as_deref());
    let handles: Vec<u64> = change.rules(TABLE).iter().filter(own).map(|r| r.handle).collect();
    for handle in handles {
        change.batch().del_rule(CONDITIONAL, handle);
    }
    Ok(())
}

fn is_of(instance: &str, comment: Option<&str>) -> bool {
    comment.is_some_and(|comment| comment.starts_with(instance))
}

/// Adds what a flush took.
pub(super) fn restore(change: &mut Change<'_>, forward: &Forward<'_>) {
    let (all, rules) = (elements(forward), rules(forward));
    for placed in &all {
        change.restore(placed.set, &placed.element);
    }
    change.restore(ATTACHMENTS, &total(forward, all.len(), &rules));
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
fn all_of(nft: &Nft, which: impl Fn(Option<&str>) -> bool) -> netlink::Result<Vec<Placed>> {
    let mut found = Vec::new();
    for set in Sets::all().chain([ATTACHMENTS]) {
        let elements = nft.dump_elements(set)?.into_iter();
        let mine = elements.filter(|element| which(element.comment.as_deref()));
        found.extend(mine.map(|element| Placed { set, element }));
    }
    Ok(found)
}

/// What is being deleted.
#[derive(Clone, Debug, Default)]
struct Deleted {
    elements: Vec<Placed>,
    rules: Vec<RuleInfo>,
}

impl Deleted {
    /// Everything whose comment `which` is true of.
    fn all(nft: &Nft, which: impl Fn(Option<&str>) -> bool) -> netlink::Result<Deleted> {
        let mut rules = nft.dump_rules(CONDITIONAL)?;
        rules.retain(|rule| which(rule.comment.as_deref()));
        Ok(Deleted { elements: all_of(nft, which)?, rules })
    }

    /// The attachment's elements by the keys of these mappings and addresses, if those are all that it
    /// has; nothing if it has nothing.
    fn by_key(
        nft: &Nft,
        owner: Owner<'_>,
        mappings: &[Mapping],
        addrs: &[IpAddr],
    ) -> netlink::Result<Option<Deleted>> {
        let mapped = |addr: &IpAddr| (Sets::of(Family::of(*addr)).mapped, Key::from(*addr));
        let instance = owner.instance();
        let sentinel = (ATTACHMENTS, ATTACHMENTS.sentinel().key);
        let mut keys = vec![(ATTACHMENTS, attachment(owner)), sentinel];
        for family in Family::BOTH {
            let of_family = mappings.iter().filter(|mapping| mapping.is_of(family));
            keys.extend(of_family.map(|mapping| place(mapping, family)));
        }
        keys.extend(addrs.iter().map(mapped));
        let own = |keys: &[(Set<'static>, Key)], found: Vec<Option<Element>>| -> Vec<Placed> {
            let found = keys.iter().zip(found);
            let found = found.filter_map(|((set, _), e)| Some(Placed { set: *set, element: e? }));
            found.filter(|own| is_of(&instance, own.element.comment.as_deref())).collect()
        };
        let found = nft.elements(&keys)?;
        let [first, sentinel, ..] = found.as_slice() else { return Ok(None) };
        let Some(count) = first.as_ref().and_then(|first| first.data.clone()) else {
            // Where the map was flushed, there may be something all the same.
            let nothing = sentinel.is_some() || !nft.has_table(TABLE)?;
            return Ok(nothing.then(Deleted::default));
        };
        let mut elements = own(&keys, found);
        let mut more: BTreeSet<IpAddr> = elements.iter().filter_map(Placed::addr).collect();
        more.retain(|addr| !addrs.contains(addr));
        let more: Vec<_> = more.iter().map(mapped).collect();
        elements.extend(own(&more, nft.elements(&more)?));
        let found = u32::try_from(elements.len() - 1).map(Value::Mark);
        let all = found.is_ok_and(|found| count == Data::Values(Key(vec![found])));
        Ok(all.then_some(Deleted { elements, rules: Vec::new() }))
    }

    fn batch(&self, nft: &Nft) -> netlink::Result<Batch> {
        let mut batch = Batch::new();
        for placed in &self.elements {
            batch.del_element(placed.set, &placed.element);
        }
        for rule in &self.rules {
            batch.del_rule(CONDITIONAL, rule.handle);
        }
        let elements: Vec<_> = self.elements.iter().map(|placed| &placed.element).collect();
        layout::layout().del_unused(nft, &mut batch, &elements)?;
        Ok(batch)
    }

    /// Where it led UDP to.
    fn servers(&self) -> BTreeSet<IpAddr> {
        let of_rules = self.rules.iter().filter_map(flows::served_by);
        self.elements.iter().filter_map(Placed::udp).chain(of_rules).collect()
    }
}

/// Deletes the attachment's mappings; where they led UDP to. What is known of its mappings and
/// addresses saves reading those of all.
pub fn del(
    nft: &Nft,
    owner: Owner<'_>,
    mappings: &[Mapping],
    addrs: &[IpAddr],
) -> Result<BTreeSet<IpAddr>> {
    let mut deleted = Deleted::default();
    nft.update(|nft| {
        deleted = match Deleted::by_key(nft, owner, mappings, addrs)? {
            Some(all) => all,
            None => Deleted::all(nft, |comment| owner.owns(comment))?,
        };
        deleted.batch(nft)
    })?;
    Ok(deleted.servers())
}

/// Deletes the mappings of a network whose attachments are not among `valid`; where they led UDP to.
pub fn collect(nft: &Nft, network: &str, valid: &[Owner<'_>]) -> Result<BTreeSet<IpAddr>> {
    let mut deleted = Deleted::default();
    nft.update(|nft| {
        deleted = Deleted::all(nft, stale(network, valid))?;
        deleted.batch(nft)
    })?;
    Ok(deleted.servers())
}

/// Verifies that every element is there as ADD made it, and that the chains use them.
pub fn check(nft: &Nft, forward: &Forward<'_>) -> Result<()> {
    let (mut wanted, rules) = (elements(forward), rules(forward));
    let keys: Vec<_> = wanted.iter().map(Placed::place).collect();
    wanted.push(Placed { set: ATTACHMENTS, element: total(forward, wanted.len(), &rules) });
    let missing = |text: String| {
        let remedy = KEPT.remedy(forward.owner, layout::layout().damage(nft, || true)?.as_deref());
        Err(Error::internal(text).with_details(remedy))
    };
    let mut found = nft.elements(&keys)?;
    found.push(nft.element(ATTACHMENTS, attachment(forward.owner))?);
    for (Placed { set, element }, found) in wanted.iter().zip(found) {
        let key = &element.key;
        let Some(found) = found else { return missing(format!("{key} is missing in {set}")) };
        let other = found.comment.as_deref().filter(|_| found.comment != element.comment);
        if other.is_some() && (set.is_vmap() || !forward.owner.is_of_same_container(other)) {
            let owner = holder(other);
            return missing(format!("element {key} of {set} belongs to {owner}"));
        }
        if other.is_none() && *set != ATTACHMENTS && found.data != element.data {
            return missing(format!("element {key} of {set} leads elsewhere"));
        }
    }
    let rules_found = nft.dump_rules(CONDITIONAL)?;
    let own = rules_found.iter().filter(|rule| forward.owner.owns(rule.comment.as_deref()));
    let (found, wanted) = (own.count(), rules.len());
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
