//! A container's elements in our table: one for each port, one for each address.
//!
//! Their cost does not depend on how many others there are: what ADD and DEL need is found by its
//! key, and `attachments` tells how much there is to find. Only when that does not add up, as when
//! DEL is not told the mappings of ADD, the maps are read.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::layout::{self, ATTACHMENTS, CONDITIONAL, Sets};
use super::queue::{self, Queue, Queues};
use super::{Forward, Holder, HostPort, Mapping, Snat, Taken, Target, flows};
use crate::error::{Error, Result};
use crate::netfilter::backend::Family;
use crate::netfilter::names::{Owner, identity, stale};
use crate::netlink;
use crate::netlink::nftables::{Batch, Data, Element, Key, L4, Nft, Rule, RuleInfo, Set, Value};

/// How much of each half of an instance's hash fits a name.
const HALF: usize = 15;

/// An element and its set.
#[derive(Clone, Debug)]
pub struct Placed {
    pub(super) set: Set<'static>,
    pub(super) element: Element,
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

    /// Where it leads UDP to.
    fn udp(&self) -> Option<IpAddr> {
        let Some(Data::Values(Key(to))) = &self.element.data else { return None };
        let HostPort(_, _, proto) = self.port()?;
        match to.first() {
            Some(Value::Ip(addr)) if proto == L4::Udp => Some(*addr),
            _ => None,
        }
    }

    fn is(&self, other: &Placed) -> bool {
        self.set == other.set && self.element.key == other.element.key
    }

    /// Whether its key is a port.
    fn is_port(&self) -> bool {
        Sets::is_ports(self.set)
    }
}

fn attachment(owner: Owner<'_>) -> Key {
    let instance = owner.instance();
    let halves = instance.split('-').map(|half| half.get(..HALF).unwrap_or(half).into());
    Key(halves.collect())
}

fn key(mapping: &Mapping) -> Key {
    match mapping.address() {
        Some(addr) => (addr, mapping.proto, mapping.host_port).into(),
        None => (mapping.proto, mapping.host_port).into(),
    }
}

fn ports(sets: &Sets, mapping: &Mapping) -> Set<'static> {
    if mapping.address().is_some() { sets.host } else { sets.any }
}

/// The elements of one address.
fn elements_to(forward: &Forward<'_>, target: &Target) -> Vec<Placed> {
    let sets = Sets::of(target.family());
    let mut placed: Vec<Placed> = Vec::new();
    if forward.mappings_to(target).next().is_none() {
        return placed;
    }
    if !forward.conditions.are_for(target.family()) {
        for mapping in forward.mappings_to(target) {
            let element = Element::new(key(mapping)).to((target.addr(), mapping.container_port));
            placed.push(Placed { set: ports(&sets, mapping), element });
        }
    }
    for sources in sources(forward.snat, target) {
        let mut element = Element::new((sources.network(), target.addr()));
        let end: Key = (sources.broadcast(), target.addr()).into();
        element.end = Some(end).filter(|end| *end != element.key);
        placed.push(Placed { set: sets.snat, element });
    }
    placed
}

/// Clients whose source is translated.
fn sources(snat: Snat, target: &Target) -> Vec<IpNet> {
    let v4 = target.addr().is_ipv4();
    let all: IpNet = if v4 { Ipv4Net::default().into() } else { Ipv6Net::default().into() };
    match snat {
        Snat::Never => Vec::new(),
        Snat::Always => vec![all],
        Snat::WhereNeeded => {
            let loopback = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8).into();
            [target.net].into_iter().chain(v4.then_some(loopback)).collect()
        }
    }
}

/// All elements that `forward` consists of, the attachment's own last.
fn elements(forward: &Forward<'_>) -> Vec<Placed> {
    let comment = forward.owner.label();
    let mut all: Vec<Placed> =
        forward.targets.iter().flat_map(|target| elements_to(forward, target)).collect();
    // Rules are found by reading their chain: nothing adds up then.
    let count = if rules(forward).is_empty() { u32::try_from(all.len()).ok() } else { None };
    let count = Value::Mark(count.unwrap_or(u32::MAX));
    let mut record = Element::new(attachment(forward.owner));
    record.data = Some(Data::Values(Key(vec![count])));
    all.push(Placed { set: ATTACHMENTS, element: record });
    for placed in &mut all {
        placed.element.comment = Some(comment.clone());
    }
    all
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

/// The rules whose comment `which` is true of.
fn rules_of(nft: &Nft, which: impl Fn(Option<&str>) -> bool) -> netlink::Result<Vec<RuleInfo>> {
    let rules = nft.dump_rules(CONDITIONAL)?.into_iter();
    Ok(rules.filter(|rule| which(rule.comment.as_deref())).collect())
}

/// Makes the mappings; those that the attachment had before are replaced. If another container has
/// a port, nothing is changed, and that is returned; behind one that the container has in another
/// network the mapping waits.
pub fn add(nft: &Nft, forward: &Forward<'_>) -> Result<Option<Taken>> {
    let all = elements(forward);
    let known = nft.element(ATTACHMENTS, attachment(forward.owner))?.is_some();
    let refusal = if known || !layout::is_whole(nft)? {
        replace(nft, forward, &all, Look::AtAll)?
    } else {
        match add_new(nft, forward, &all) {
            Err(error) if error.is_exists() || error.is_not_found() => {
                replace(nft, forward, &all, Look::AtAll)?
            }
            outcome => outcome?,
        }
    };
    Ok(refusal.and_then(|(placed, other)| {
        Some(Taken { port: placed.port()?, by: holder(other.comment.as_deref()) })
    }))
}

/// A port, and the element that has it.
type Refusal = Option<(Placed, Element)>;

/// The mappings of an attachment that has none.
fn add_new(nft: &Nft, forward: &Forward<'_>, all: &[Placed]) -> netlink::Result<Refusal> {
    let mut batch = Batch::new();
    for placed in all {
        batch.add_element(placed.set, &placed.element);
    }
    append_rules(&mut batch, forward);
    match nft.commit(batch) {
        Err(error) if error.is_exists() => replace(nft, forward, all, Look::AtPorts),
        outcome => outcome.map(|()| None),
    }
}

/// Where the attachment may have something already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// At the ports that it is to have.
    AtPorts,
    /// Anywhere: everything is read.
    AtAll,
}

/// As [`add`], with a look at what is there.
fn replace(
    nft: &Nft,
    forward: &Forward<'_>,
    all: &[Placed],
    look: Look,
) -> netlink::Result<Refusal> {
    let owner = forward.owner;
    let mut refusal = None;
    nft.update(|nft| {
        refusal = None;
        let (mut batch, mut queues) = (Batch::new(), Queues::default());
        if !layout::is_whole(nft)? {
            layout::build(&mut batch);
        }
        if look == Look::AtAll {
            let mut former = all_of(nft, |comment| owner.owns(comment))?;
            former.retain(|own| !all.iter().any(|placed| placed.is(own)) || !own.is_port());
            former.extend(former_containers(nft, owner, all)?);
            leave(nft, &mut queues, &former, |comment| owner.owns(comment))?;
            delete(&mut batch, &former);
            for rule in rules_of(nft, |comment| owner.owns(comment))? {
                batch.del_rule(CONDITIONAL, rule.handle);
            }
        }
        for placed in all {
            if !placed.is_port() {
                batch.add_element(placed.set, &placed.element);
                continue;
            }
            let queue = queues.of(nft, placed.set, &placed.element.key)?;
            if let Err(other) = queue.enter(owner, &placed.element) {
                refusal = Some((placed.clone(), other));
                return Ok(Batch::new());
            }
        }
        queues.write(&mut batch);
        append_rules(&mut batch, forward);
        Ok(batch)
    })?;
    Ok(refusal)
}

fn append_rules(batch: &mut Batch, forward: &Forward<'_>) {
    for rule in rules(forward) {
        batch.append_rule(CONDITIONAL, &rule);
    }
}

/// What others have for the addresses of these elements: their containers left without DEL.
fn former_containers(nft: &Nft, owner: Owner<'_>, all: &[Placed]) -> netlink::Result<Vec<Placed>> {
    let mut found = Vec::new();
    for set in Family::BOTH.map(|family| Sets::of(family).snat) {
        let addr = all.iter().find(|placed| placed.set == set);
        let Some(addr) = addr.and_then(|placed| placed.element.key.0.get(1)) else { continue };
        let others = nft.dump_elements(set)?.into_iter().filter(|other| {
            other.key.0.get(1) == Some(addr) && !owner.owns(other.comment.as_deref())
        });
        found.extend(others.map(|element| Placed { set, element }));
    }
    Ok(found)
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
        let elements = nft.dump_elements(set)?;
        found.extend(elements.into_iter().map(|element| Placed { set, element }));
    }
    for family in Family::BOTH {
        found.extend(queue::waiting(nft, family)?);
    }
    found.retain(|placed| which(placed.element.comment.as_deref()));
    Ok(found)
}

/// Takes those of `elements` that are ports out of their queues, by their comments.
fn leave(
    nft: &Nft,
    queues: &mut Queues,
    elements: &[Placed],
    which: impl Fn(Option<&str>) -> bool,
) -> netlink::Result<()> {
    for placed in elements.iter().filter(|placed| placed.is_port()) {
        queues.of(nft, placed.set, &placed.element.key)?.leave(&which);
    }
    Ok(())
}

/// Deletes those of `elements` that are no ports.
fn delete(batch: &mut Batch, elements: &[Placed]) {
    for placed in elements.iter().filter(|placed| !placed.is_port()) {
        batch.del_element(placed.set, &placed.element);
    }
}

/// The attachment's elements that are found by the keys of `mappings`; it leaves the ports' queues.
fn by_key(
    nft: &Nft,
    owner: Owner<'_>,
    mappings: &[Mapping],
    queues: &mut Queues,
) -> netlink::Result<Vec<Placed>> {
    let mut found: Vec<Placed> = Vec::new();
    for family in Family::BOTH {
        let sets = Sets::of(family);
        let mut addr = None;
        for mapping in mappings.iter().filter(|mapping| mapping.is_of(family)) {
            let queue = queues.of(nft, ports(&sets, mapping), &key(mapping))?;
            for own in queue.leave(|comment| owner.owns(comment)) {
                if let Some(Data::Values(Key(to))) = &own.element.data {
                    addr = to.first().cloned();
                }
                found.push(own);
            }
        }
        let Some(Value::Ip(addr)) = addr else { continue };
        // The sources that hold the container itself, and the host's loopback.
        let loopback = addr.is_ipv4().then_some(Ipv4Addr::LOCALHOST.into());
        for source in [addr].into_iter().chain(loopback) {
            let element = nft.element(sets.snat, (source, addr))?;
            let element = element.filter(|e| owner.owns(e.comment.as_deref()));
            let placed = element.map(|element| Placed { set: sets.snat, element });
            found.extend(placed.filter(|placed| !found.iter().any(|other| other.is(placed))));
        }
    }
    Ok(found)
}

/// What was deleted.
#[derive(Clone, Debug, Default)]
struct Deleted {
    elements: Vec<Placed>,
    rules: Vec<RuleInfo>,
}

impl Deleted {
    /// Where it led UDP to.
    fn servers(&self) -> BTreeSet<IpAddr> {
        let of_rules = self.rules.iter().filter_map(flows::served_by);
        self.elements.iter().filter_map(Placed::udp).chain(of_rules).collect()
    }
}

/// Deletes the attachment's mappings; where they led UDP to. `mappings` need not be all of them, or any.
/// Ports that the container wants in another network go there.
pub fn del(nft: &Nft, owner: Owner<'_>, mappings: &[Mapping]) -> Result<BTreeSet<IpAddr>> {
    let mut deleted = Deleted::default();
    nft.update(|nft| {
        deleted = Deleted::default();
        let Some(record) = nft.element(ATTACHMENTS, attachment(owner))? else {
            return Ok(Batch::new());
        };
        if let Some(Data::Values(Key(values))) = &record.data
            && let [Value::Mark(count)] = values.as_slice()
        {
            let (mut batch, mut queues) = (Batch::new(), Queues::default());
            deleted.elements = by_key(nft, owner, mappings, &mut queues)?;
            if deleted.elements.len() == *count as usize {
                deleted.elements.push(Placed { set: ATTACHMENTS, element: record });
                delete(&mut batch, &deleted.elements);
                queues.write(&mut batch);
                return Ok(batch);
            }
        }
        let (all, batch) = deleting_all(nft, |comment| owner.owns(comment))?;
        deleted = all;
        Ok(batch)
    })?;
    Ok(deleted.servers())
}

/// Everything whose comment `which` is true of, and the batch that deletes it.
fn deleting_all(
    nft: &Nft,
    which: impl Fn(Option<&str>) -> bool,
) -> netlink::Result<(Deleted, Batch)> {
    let elements = all_of(nft, &which)?;
    let (mut batch, mut queues) = (Batch::new(), Queues::default());
    leave(nft, &mut queues, &elements, &which)?;
    delete(&mut batch, &elements);
    queues.write(&mut batch);
    let rules = rules_of(nft, &which)?;
    for rule in &rules {
        batch.del_rule(CONDITIONAL, rule.handle);
    }
    Ok((Deleted { elements, rules }, batch))
}

/// What is at an element's key; of several mappings of one container, its own.
fn found_at(nft: &Nft, owner: Owner<'_>, placed: &Placed) -> netlink::Result<Option<Element>> {
    let (set, key) = (placed.set, &placed.element.key);
    let found = nft.element(set, key.clone())?;
    match found {
        Some(first) if placed.is_port() && owner.is_of_same_container(first.comment.as_deref()) => {
            Ok(Queue::read(nft, set, key)?.of(owner).or(Some(first)))
        }
        found => Ok(found),
    }
}

/// Verifies that every element is there as ADD made it, and that the chains use them.
pub fn check(nft: &Nft, forward: &Forward<'_>) -> Result<()> {
    let missing = |text: String| {
        Err(Error::internal(text).with_details("repeat ADD, which makes what is missing"))
    };
    for placed in elements(forward) {
        let (set, key) = (placed.set, &placed.element.key);
        match found_at(nft, forward.owner, &placed)? {
            None => return missing(format!("element {key} is missing in {set}")),
            Some(found) if found.comment != placed.element.comment => {
                let owner = holder(found.comment.as_deref());
                return missing(format!("element {key} of {set} belongs to {owner}"));
            }
            Some(found) if found.end != placed.element.end => {
                return missing(format!("element {found} of {set} is not {}", placed.element));
            }
            Some(found) if found.data != placed.element.data => {
                let text = |element: &Element| match &element.data {
                    Some(Data::Values(to)) => to.to_string(),
                    _ => "nothing".to_owned(),
                };
                let (is, wanted) = (text(&found), text(&placed.element));
                return missing(format!("element {key} of {set} is {is}, not {wanted}"));
            }
            Some(_) => {}
        }
    }
    let found = rules_of(nft, |comment| forward.owner.owns(comment))?.len();
    let wanted = rules(forward).len();
    if found < wanted {
        return missing(format!("{found} of {wanted} rules are in chain {CONDITIONAL}"));
    }
    match layout::damage(nft)? {
        Some(text) => missing(text),
        None => Ok(()),
    }
}

/// Deletes the mappings of a network whose attachments are not among `valid`; where they led UDP to.
pub fn collect(nft: &Nft, network: &str, valid: &[Owner<'_>]) -> Result<BTreeSet<IpAddr>> {
    let mut deleted = Deleted::default();
    nft.update(|nft| {
        let (all, batch) = deleting_all(nft, stale(network, valid))?;
        deleted = all;
        Ok(batch)
    })?;
    Ok(deleted.servers())
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
