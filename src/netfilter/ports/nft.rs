//! A container's elements in our table: one for each port, one for each address.
//!
//! The cost of ADD and DEL does not depend on the number of other containers: elements are looked
//! up by key, and `attachments` contains their number. The maps are read only if the numbers
//! differ, as when the mappings of DEL are not those of ADD.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::layout::{self, ANY, ATTACHMENTS, CONDITIONAL, HOST, MAPPED, TABLE};
use super::{
    MappedPort, PortOwner, PortmapPart, RECORDS, TakenPort, describe_host_port, flows, reference,
};
use crate::attachment::decode_part;
use crate::netfilter::backend::{IpFamily, PacketFilter, RuleBackend};
use crate::netfilter::elements::{RecordedElements, differing_data, elements_of_part};
use crate::netfilter::layout::LayoutTransaction;
use crate::netfilter::names::{AttachmentId, parse_label, stale_matcher};
use crate::netlink;
use crate::netlink::nftables::{
    CommentSelector, ElementData, ElementKey, NftRule, NftSocket, NftValue, PacketVerdict,
    RuleInfo, SetElement, TransportProtocol,
};
use cni::error::{Error, Result};
use cni::json::Json;
use cni::sort::collect_set;

/// The length of each half of an instance's hash that fits into an interface name.
const HALF: usize = 15;

/// The port of the host that an element maps: address, port, protocol.
fn host_port_of(element: &SetElement) -> Option<(Option<IpAddr>, u16, TransportProtocol)> {
    match element.key.0.as_slice() {
        [NftValue::Ip(addr), NftValue::Proto(proto), NftValue::Port(port)] => {
            Some((Some(*addr), *port, *proto))
        }
        [NftValue::Proto(proto), NftValue::Port(port)] => Some((None, *port, *proto)),
        _ => None,
    }
}

/// The container's address that a port is mapped to.
fn container_address(element: &SetElement) -> Option<IpAddr> {
    let Some(ElementData::Values(ElementKey(to))) = &element.data else { return None };
    if let Some(NftValue::Ip(addr)) = to.first() { Some(*addr) } else { None }
}

/// The attachment's own element, without the number of its other elements.
fn attachment_element(owner: AttachmentId<'_>) -> SetElement {
    let instance = owner.instance_id();
    let halves = instance.split('-').map(|half| half.get(..HALF).unwrap_or(half).into());
    ATTACHMENTS.element_with_key(ElementKey(halves.collect())).with_comment(owner.object_label())
}

/// The element of a mapping, without its data.
fn mapping_element(mapping: &MappedPort, family: IpFamily) -> SetElement {
    let (at, proto, port) = (family as usize, mapping.proto, mapping.host_port);
    match mapping.single_address() {
        Some(addr) => HOST[at].element_with_key((addr, proto, port)),
        None => ANY[at].element_with_key((proto, port)),
    }
}

/// The element of a container's address, without its data.
fn address_element(addr: IpAddr) -> SetElement {
    MAPPED[usize::from(addr.is_ipv6())].element_with_key(addr)
}

/// The elements of the attachment, without its own.
fn mapping_elements(owner: AttachmentId<'_>, forward: &PortmapPart) -> Vec<SetElement> {
    let (mut all, label) = (Vec::new(), owner.object_label());
    for target in forward.targets.iter().copied() {
        let (addr, family) = (target.addr(), IpFamily::of_address(target.addr()));
        let mappings: Vec<_> = forward.mappings_to(target).collect();
        // Ports with conditions are mapped by rules.
        if !forward.conditions.has_conditions_for(family) {
            all.extend(
                mappings
                    .iter()
                    .map(|m| mapping_element(m, family).with_values((addr, m.container_port))),
            );
        }
        let from = layout::client_chain_name(forward.snat, target).filter(|_| !mappings.is_empty());
        all.extend(
            from.map(|chain| address_element(addr).with_verdict(PacketVerdict::go_to(chain))),
        );
    }
    all.into_iter().map(|element| element.with_comment(&label)).collect()
}

pub(super) const ELEMENTS: RecordedElements = RecordedElements {
    kept: RECORDS,
    layout: layout::LAYOUT,
    sets: layout::LAYOUT.sets,
    of_part: |owner, part| elements_of_part(owner, part, recorded_elements),
    find_conflict,
};

fn recorded_elements(owner: AttachmentId<'_>, forward: &PortmapPart) -> Vec<SetElement> {
    if forward.backend == RuleBackend::Iptables {
        return Vec::new();
    }
    let mut all = mapping_elements(owner, forward);
    all.push(count_element(owner, all.len(), &conditional_rules(owner, forward)));
    all
}

/// The attachment's own element, with the number of its other elements. If the attachment also has
/// rules, the number is larger than any number of elements, since rules are found only by reading
/// their chain.
fn count_element(owner: AttachmentId<'_>, count: usize, rules: &[NftRule]) -> SetElement {
    let count = if rules.is_empty() { u32::try_from(count).ok() } else { None };
    attachment_element(owner).with_values(NftValue::Mark(count.unwrap_or(u32::MAX)))
}

/// The rules of mappings with conditions.
fn conditional_rules(owner: AttachmentId<'_>, forward: &PortmapPart) -> Vec<NftRule> {
    let mut rules = Vec::new();
    for target in forward.targets.iter().copied() {
        let alternatives = forward.conditions.rule_beginnings(IpFamily::of_address(target.addr()));
        for mapping in forward.mappings_to(target) {
            for rule in alternatives.iter().cloned() {
                let rule = mapping.single_address().into_iter().fold(rule, NftRule::daddr_is);
                let rule = rule.dport_is(mapping.proto, mapping.host_port);
                let rule = rule.dnat_to(target.addr(), mapping.container_port);
                rules.push(rule.with_comment(owner.object_label()));
            }
        }
    }
    rules
}

/// Creates the mappings; earlier mappings of the attachment are replaced. If another container
/// holds a port, nothing is created and the port is returned. A port that the same container holds
/// in another network remains there.
pub(super) fn add_mappings(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    forward: &PortmapPart,
) -> Result<Option<TakenPort>> {
    let (wanted, rules) = (mapping_elements(owner, forward), conditional_rules(owner, forward));
    let queried: Vec<_> = [attachment_element(owner)].iter().chain(&wanted).cloned().collect();
    let mut taken = None;
    filter.own_tables()?.change_tables(&[layout::LAYOUT], &queried, &mut |change, found| {
        let mut found = found.into_iter();
        let known = found.next().flatten();
        let found = with_flushed_ports(change, owner, &wanted, found);
        taken = find_taken_port(owner, &wanted, &found);
        if taken.is_some() {
            return Ok(());
        }
        if known.is_some() {
            delete_former_mappings(change, owner, &wanted)?;
        }
        let mut count = 0;
        for (element, found) in wanted.iter().zip(&found) {
            let other = found.as_ref().filter(|other| other.comment != element.comment);
            if host_port_of(element).is_some() && other.is_some() {
                continue;
            }
            count += usize::from(change.claim_element(found.as_ref(), element));
        }
        change.replace_element(known.as_ref(), &count_element(owner, count, &rules));
        change.append_rules(CONDITIONAL, &owner.object_label(), &rules);
        Ok(())
    })?;
    Ok(taken)
}

/// The elements that were found for `wanted`. After a flush, the ports of other living attachments
/// count as found: this transaction restores them.
fn with_flushed_ports(
    change: &mut LayoutTransaction<'_>,
    owner: AttachmentId<'_>,
    wanted: &[SetElement],
    found: impl Iterator<Item = Option<SetElement>>,
) -> Vec<Option<SetElement>> {
    let mut flushed = HashMap::new();
    if ANY.iter().chain(&HOST).any(|set| change.is_flushed(*set)) {
        for kept in change
            .restorable_records::<PortmapPart>(RECORDS)
            .iter()
            .filter(|kept| kept.attachment_id() != owner)
        {
            let ports = recorded_elements(kept.attachment_id(), &kept.content).into_iter();
            flushed.extend(
                ports.filter(|e| host_port_of(e).is_some()).map(|e| ((e.set, e.key.clone()), e)),
            );
        }
    }
    let mut of_record = |wanted: &SetElement| flushed.remove(&(wanted.set, wanted.key.clone()));
    wanted.iter().zip(found).map(|(wanted, found)| found.or_else(|| of_record(wanted))).collect()
}

/// The first of the ports that another container holds.
fn find_taken_port(
    owner: AttachmentId<'_>,
    wanted: &[SetElement],
    found: &[Option<SetElement>],
) -> Option<TakenPort> {
    wanted.iter().zip(found).find_map(|(element, found)| {
        let other = found.as_ref().filter(|other| other.comment != element.comment)?;
        let other = other.comment.as_deref();
        if owner.owns_comment(other) || owner.is_of_same_container(other) {
            return None;
        }
        let (addr, port, proto) = host_port_of(element)?;
        let targets = collect_set(found.iter().filter_map(container_address));
        let by = PortOwner { targets, ..parse_port_owner(other) };
        Some(TakenPort { port: describe_host_port(addr, port, proto), by })
    })
}

/// Deletes the attachment's elements that are not `wanted`, and its rules.
fn delete_former_mappings(
    change: &mut LayoutTransaction<'_>,
    owner: AttachmentId<'_>,
    wanted: &[SetElement],
) -> netlink::NetlinkResult<()> {
    let wanted: HashSet<_> = wanted.iter().map(|element| (element.set, &element.key)).collect();
    let owns = owner.comment_matcher();
    let mut former = change.nft.find_elements_by_comment(layout::LAYOUT.sets, &[], &owns)?;
    former.retain(|e| e.set != ATTACHMENTS && !wanted.contains(&(e.set, &e.key)));
    for element in &former {
        change.batch.delete_element(element);
    }
    for element in ELEMENTS.elements_of_next_owners(Some(owner), &former) {
        change.put_element(&element);
    }
    let rules = change.nft.find_rules_by_comment(CONDITIONAL, &owns)?;
    change.batch.delete_rules(TABLE, &rules);
    Ok(())
}

/// Restores the elements and rules that a flush has deleted.
pub(super) fn restore_mappings(change: &mut LayoutTransaction<'_>) {
    let mut living = change.restorable_records::<PortmapPart>(RECORDS);
    living.retain(|kept| kept.content.backend == RuleBackend::Nftables);
    for (owner, forward) in living.iter().map(|kept| (kept.attachment_id(), &kept.content)) {
        let (all, rules) = (mapping_elements(owner, forward), conditional_rules(owner, forward));
        let restored = all.iter().filter(|element| change.restore_element(element)).count();
        let is_counted = !change.restore_element(&count_element(owner, all.len(), &rules));
        if is_counted && restored > 0 {
            // An ADD with other ports may have been killed: the attachment may have more elements
            // than the record.
            change.restore_with_data(
                &attachment_element(owner).with_values(NftValue::Mark(u32::MAX)),
            );
        }
        change.restore_rules(CONDITIONAL, &owner.object_label(), &rules);
    }
}

/// The owner that a comment identifies.
fn parse_port_owner(comment: Option<&str>) -> PortOwner {
    let comment = comment.unwrap_or_default().to_owned();
    let instance = comment.split(',').next().unwrap_or_default().to_owned();
    let Some((id, ifname, network)) = parse_label(&comment) else {
        return PortOwner { instance, comment, ..PortOwner::default() };
    };
    let (id, ifname, network) = (id.to_owned(), Some(ifname.to_owned()), network.to_owned());
    PortOwner { instance, id, network, ifname, comment, ..PortOwner::default() }
}

/// The owner of each port in our table.
pub(super) fn list_port_owners(filter: &PacketFilter) -> Result<Vec<PortOwner>> {
    let Some(nft) = filter.nft_socket_if_present()? else { return Ok(Vec::new()) };
    if !nft.has_object(TABLE)? {
        return Ok(Vec::new());
    }
    let (elements, rules) =
        find_by_comment(nft, &|comment| comment.is_some_and(|text| parse_label(text).is_some()))?;
    let mut found = Vec::new();
    for element in &elements {
        let Some((addr, port, proto)) = host_port_of(element) else { continue };
        let ports = collect_set([describe_host_port(addr, port, proto)]);
        let targets = collect_set(container_address(element));
        found.push(PortOwner { ports, targets, ..parse_port_owner(element.comment.as_deref()) });
    }
    found.extend(rules.iter().map(owner_of_rule));
    Ok(found)
}

/// The owner of a rule in the chain `conditional`.
fn owner_of_rule(rule: &RuleInfo) -> PortOwner {
    let port = host_port_of_rule(rule).map(|(proto, port)| describe_host_port(None, port, proto));
    let (ports, targets) = (collect_set(port), collect_set(flows::server_of_rule(rule)));
    PortOwner { ports, targets, ..parse_port_owner(rule.comment.as_deref()) }
}

/// The port of the host that a rule in the chain `conditional` maps.
fn host_port_of_rule(rule: &RuleInfo) -> Option<(TransportProtocol, u16)> {
    // Then come the address and port of the container.
    let values = rule.values();
    let [.., proto, port, _, _] = values.as_slice() else { return None };
    let port = u16::from_be_bytes(port.as_slice().try_into().ok()?);
    Some(((*proto.first()?).into(), port))
}

/// The other owners of rules for the ports of a mapping with conditions.
pub(super) fn list_rule_owners(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    forward: &PortmapPart,
) -> Result<Vec<PortOwner>> {
    let Some(nft) = filter.nft_socket_if_present()? else { return Ok(Vec::new()) };
    if conditional_rules(owner, forward).is_empty() || !nft.has_object(CONDITIONAL)? {
        return Ok(Vec::new());
    }
    let owns = owner.comment_matcher();
    let mut rules = nft.find_rules_by_comment(CONDITIONAL, &|comment| {
        comment.is_some_and(|text| parse_label(text).is_some()) && !owns(comment)
    })?;
    let ports: HashSet<_> = forward.mappings.iter().map(|m| (m.proto, m.host_port)).collect();
    rules.retain(|rule| host_port_of_rule(rule).is_some_and(|port| ports.contains(&port)));
    Ok(rules.iter().map(owner_of_rule).collect())
}

/// Deletes the elements and rules of an owner in our table if all of them redirect to addresses
/// that were seen. Returns the addresses that they redirected UDP to.
pub(super) fn remove_port_owner(
    filter: &PacketFilter,
    owner: &PortOwner,
) -> Result<BTreeSet<IpAddr>> {
    let Some(nft) = filter.nft_socket_if_present()? else { return Ok(BTreeSet::new()) };
    Ok(delete_found(nft, None, &|nft| {
        let found = find_by_comment(nft, &|comment| {
            comment.is_some_and(|text| text.starts_with(&owner.instance))
        })?;
        let (elements, rules) = &found;
        let mut targets = elements
            .iter()
            .filter_map(container_address)
            .chain(rules.iter().filter_map(flows::server_of_rule));
        Ok(if targets.all(|target| owner.targets.contains(&target)) {
            found
        } else {
            FoundMappings::default()
        })
    })?)
}

/// Elements, and rules in the chain `conditional`.
type FoundMappings = (Vec<SetElement>, Vec<RuleInfo>);

/// All elements and rules with a comment for which `which` returns true.
fn find_by_comment(
    nft: &NftSocket,
    which: CommentSelector<'_>,
) -> netlink::NetlinkResult<FoundMappings> {
    let elements = nft.find_elements_by_comment(layout::LAYOUT.sets, &[], which)?;
    Ok((elements, nft.find_rules_by_comment(CONDITIONAL, which)?))
}

/// Looks up the attachment's elements by key. Returns them if these are all, nothing if the
/// attachment has none, `None` if the maps have to be read.
fn find_by_key(
    nft: &NftSocket,
    owner: AttachmentId<'_>,
    known: Option<&PortmapPart>,
) -> netlink::NetlinkResult<Option<FoundMappings>> {
    let mut queried = vec![attachment_element(owner), ATTACHMENTS.sentinel_element()];
    let mappings = known.map_or(&[][..], |known| known.mappings.as_slice());
    for family in IpFamily::BOTH {
        let of_family = mappings.iter().filter(|mapping| mapping.is_for_family(family));
        queried.extend(of_family.map(|mapping| mapping_element(mapping, family)));
    }
    let addrs: Vec<IpAddr> = known.iter().flat_map(|k| k.targets.iter().map(IpNet::addr)).collect();
    queried.extend(addrs.iter().copied().map(address_element));
    let owns = owner.comment_matcher();
    let own = |found: Vec<Option<SetElement>>| -> Vec<SetElement> {
        let found = found.into_iter().flatten();
        found.filter(|element| owns(element.comment.as_deref())).collect()
    };
    let found = nft.read_elements(&queried)?;
    let [first, sentinel, ..] = found.as_slice() else { return Ok(None) };
    let Some(count) = first.as_ref().and_then(|first| first.data.clone()) else {
        // If the map was flushed, there may be other elements nevertheless.
        return Ok(sentinel.is_some().then(FoundMappings::default));
    };
    let mut elements = own(found);
    let mut more = collect_set(elements.iter().filter_map(container_address));
    more.retain(|addr| !addrs.contains(addr));
    let more: Vec<_> = more.into_iter().map(address_element).collect();
    elements.extend(own(nft.read_elements(&more)?));
    let found = u32::try_from(elements.len() - 1).map(NftValue::Mark);
    let is_all = found.is_ok_and(|found| count == ElementData::Values(ElementKey(vec![found])));
    Ok(is_all.then_some((elements, Vec::new())))
}

/// Deletes what `find` returns, of the `owner` or of several. Returns the addresses that it
/// redirected UDP to.
fn delete_found(
    nft: &NftSocket,
    owner: Option<AttachmentId<'_>>,
    find: &dyn Fn(&NftSocket) -> netlink::NetlinkResult<FoundMappings>,
) -> netlink::NetlinkResult<BTreeSet<IpAddr>> {
    let mut servers = BTreeSet::new();
    ELEMENTS.delete_found(nft, owner, &mut |nft, batch| {
        let (elements, rules) = find(nft)?;
        let of_rules = rules.iter().filter_map(flows::udp_server_of_rule);
        servers = collect_set(
            elements
                .iter()
                .filter(|e| {
                    host_port_of(e).is_some_and(|(_, _, proto)| proto == TransportProtocol::Udp)
                })
                .filter_map(container_address)
                .chain(of_rules),
        );
        batch.delete_rules(TABLE, &rules);
        Ok(elements)
    })?;
    Ok(servers)
}

/// Deletes the attachment's mappings, in our layout and the reference's. Returns the addresses that
/// they redirected UDP to. With the mappings of ADD `known`, the elements of others need not be
/// read.
pub(super) fn delete_mappings(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    known: Option<&PortmapPart>,
) -> Result<BTreeSet<IpAddr>> {
    let Some(nft) = filter.nft_socket_if_present()? else { return Ok(BTreeSet::new()) };
    let mut servers = BTreeSet::new();
    if nft.has_object(TABLE)? {
        servers = delete_found(nft, Some(owner), &|nft| match find_by_key(nft, owner, known)? {
            Some(all) => Ok(all),
            None => find_by_comment(nft, &owner.comment_matcher()),
        })?;
    }
    servers.extend(reference::delete_rules(nft, owner.id)?);
    Ok(servers)
}

/// Deletes the mappings of the network's attachments that are not among `valid`. Returns the
/// addresses that they redirected UDP to.
pub(super) fn remove_stale_mappings(
    filter: &PacketFilter,
    network: &str,
    valid: &[AttachmentId<'_>],
) -> Result<BTreeSet<IpAddr>> {
    let Some(nft) = filter.nft_socket_if_present()? else { return Ok(BTreeSet::new()) };
    Ok(delete_found(nft, None, &|nft| find_by_comment(nft, &stale_matcher(network, valid)))?)
}

/// What is wrong with the element that was found for a wanted one. The attachment may have fewer
/// elements than its record, if the first network of a container serves a port.
fn find_conflict(
    owner: AttachmentId<'_>,
    wanted: &SetElement,
    found: &SetElement,
) -> Option<String> {
    let other = found.comment.as_deref().filter(|_| found.comment != wanted.comment);
    if other.is_some() && host_port_of(wanted).is_some() && !owner.is_of_same_container(other) {
        let owner = parse_port_owner(other);
        return Some(format!("element {wanted} of {} belongs to {owner}", wanted.set));
    }
    if wanted.set == ATTACHMENTS {
        return None;
    }
    // An element without a comment is of no attachment.
    let unowned = found
        .comment
        .is_none()
        .then(|| SetElement { comment: wanted.comment.clone(), ..found.clone() });
    differing_data(owner, wanted, unowned.as_ref().unwrap_or(found))
}

/// Fails if the chain `conditional` lacks rules of the attachment.
pub(super) fn check_conditional_rules(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    part: &Json,
) -> Result<()> {
    let Some(forward) = decode_part::<PortmapPart>(part) else { return Ok(()) };
    let wanted = conditional_rules(owner, &forward).len();
    if forward.backend == RuleBackend::Iptables || wanted == 0 {
        return Ok(());
    }
    let found =
        filter.nft_socket()?.find_rules_by_comment(CONDITIONAL, &owner.comment_matcher())?.len();
    if found >= wanted {
        return Ok(());
    }
    let msg = format!("{found} of {wanted} rules are in chain {CONDITIONAL}");
    Err(Error::internal(msg).with_details(RECORDS.restore_remedy(owner)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_of_ports_are_described() {
        let owner = AttachmentId { network: "pods", ifname: "eth0", id: "c1" };
        let named = "container \"c1\" (network \"pods\", interface \"eth0\")";
        assert_eq!(parse_port_owner(Some(&owner.object_label())).to_string(), named);
        assert_eq!(parse_port_owner(None).to_string(), "an unknown owner: \"\"");
    }
}
