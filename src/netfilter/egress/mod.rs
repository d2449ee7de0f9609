//! Egress policies: what a container may reach, and nothing else.
//!
//! | file | |
//! | --- | --- |
//! | `policy.rs` | the syntax of policies |
//! | `limits.rs` | how many connections a container may open |
//! | `source.rs` | the places of policies |
//! | `part.rs` | a container with policies, as its record has it |
//! | `special.rs` | the networks that are not the Internet |
//! | `lint.rs` | entries that do not do what they say |
//! | `names.rs` | which names policies allow |
//! | `named_address.rs` | an address of a name, for a time |
//! | `resolved.rs` | the addresses to which allowed names lead |
//! | `probe.rs` | whether that resolver answers |
//! | `redirect.rs` | the redirection of name service to the resolver of the node |
//! | `explain.rs` | which entry decides a packet |
//! | `compile.rs` | ranges of addresses and services that policies allow |
//! | `table.rs` | the tables of `nf_tables` |
//! | `objects.rs` | the chains and sets of a policy, which containers with equal policies share |
//! | `intervals.rs` | the elements of those sets |
//! | `report.rs` | what was refused |
//! | `answer.rs` | how containers are told |
//! | `guard.rs` | the second guard: a program that a flush of `nf_tables` does not remove |

mod answer;
pub mod compile;
mod discovery;
pub mod explain;
pub mod guard;
mod intervals;
pub mod limits;
pub mod lint;
pub mod named_address;
pub mod names;
mod objects;
mod part;
pub mod policy;
pub mod probe;
mod redirect;
pub mod report;
pub mod resolved;
pub mod source;
mod special;
mod table;

use std::collections::{HashMap, HashSet};
use std::iter;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use self::objects::{PolicyObjects, delete_unused, list_policies, policy_chains};
pub use self::part::EgressPart;
use self::policy::CompiledPolicy;
pub use self::redirect::RESOLVER_PORT;
use self::resolved::restore_addresses;
pub(crate) use self::table::SINK_PORT;
use self::table::{FRAMES, PACKETS};
use super::backend::{FilterFeature, PacketFilter};
use super::layout::{LayoutTransaction, RestorableState, RuleComparison, TableLayout};
use super::names::{AttachmentId, is_left_in_place, stale_matcher};
use crate::attachment::{RecordStore, decode_part};
use crate::files::lock::{FileLock, TIMEOUT};
use crate::netlink::nftables::{
    FILTER, NftBatch, NftSet, NftSocket, NftTable, PacketField, SetElement, ValueType,
};
use crate::netlink::{Link, Netlink, NetlinkResult};
use cni::error::{Error, ErrorContext, Result, join_outcomes};

/// The parts of this feature in the records of attachments.
pub const RECORDS: RecordStore = RecordStore("egress");

/// It has no `hand_over`, because the reference has no egress policies: the rules stay in force
/// until the port vanishes.
pub const FEATURE: FilterFeature = FilterFeature {
    check: |filter, owner, part| match decode_part(part) {
        Some(port) => check_port(filter, owner, &port),
        None => Ok(()),
    },
    restore: restore_recorders,
    remove: |filter, owner, _| delete_port(filter, owner),
    ..FilterFeature::new(RestorableState {
        kept: RECORDS,
        layouts: &table::LAYOUTS,
        needs_table,
        restore: restore_ports,
    })
};

/// The tables about what the second guard refuses.
const RECORDERS: &[TableLayout] = &[table::GUARD_LAYOUT, answer::LAYOUT];

/// The kinds of links by which packets leave for other containers.
const CONTAINER_LINKS: [&str; 2] = ["veth", "bridge"];

const BROADCAST: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::BROADCAST, 32);
const MULTICAST: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(224, 0, 0, 0), 4);
const MULTICAST6: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8);
const GROUPS: [IpNet; 3] = [IpNet::V4(BROADCAST), IpNet::V4(MULTICAST), IpNet::V6(MULTICAST6)];
/// The groups that no router forwards (RFC 4291, section 2.7).
const LINK_LOCAL_MULTICAST: Ipv6Net =
    Ipv6Net::new_assert(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0), 16);
const UNSPECIFIED6: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 128);
const LINK_LOCAL: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10);

/// Before the chains of others that filter packets.
const BEFORE_FILTER: i32 = FILTER - 10;

/// The key of a container: the interface by which its packets arrive, and their source address.
const PORT: [ValueType; 2] = [ValueType::IfName, ValueType::EtherAddr];
const PORT_FIELDS: [PacketField; 2] = [PacketField::Iifname, PacketField::EtherSaddr];

/// The error of a MAC address that two containers have.
fn taken_error(port: &EgressPart, comment: Option<&str>) -> Error {
    let other = comment.unwrap_or("another program");
    Error::config(format!(
        "the MAC address {} of port \"{}\" is also that of {other}",
        port.mac, port.end
    ))
    .with_details("a policy is bound to the address: give each container an address of its own")
}

/// The link by which packets leave the host for an address, if it is of a kind that links of
/// containers are.
pub fn find_container_link(host: &Netlink, addr: IpAddr) -> NetlinkResult<Option<Link>> {
    let index = host.find_route_to(addr, None)?.and_then(|route| route.oif);
    let link = index.map(|index| host.find_link_by_index(index)).transpose()?.flatten();
    Ok(link.filter(|link| link.kind.as_deref().is_some_and(|kind| CONTAINER_LINKS.contains(&kind))))
}

/// Waits for the lock of the attachment's policy: the record, the rules and the filter are changed
/// one after the other, and the runtime does not know of `cnibox egress set`. `None` if there is no
/// directory for locks.
pub fn lock_policy(owner: AttachmentId<'_>) -> Result<Option<FileLock>> {
    lock_policy_within(owner, TIMEOUT)
}

/// Like [`lock_policy`], for at most `limit`.
pub fn lock_policy_within(owner: AttachmentId<'_>, limit: Duration) -> Result<Option<FileLock>> {
    Ok(FileLock::acquire_attachment_lock(&format!("{}-egress", owner.instance_id()), limit)?)
}

/// The elements that a container may have, by their keys, each once; their data is not in the
/// record.
fn recorded_elements(owner: AttachmentId<'_>, port: &EgressPart) -> Vec<SetElement> {
    let mut all = Vec::new();
    for port in iter::once(port).chain(&port.replaced) {
        let mut elements = table::port_elements(owner, port, &policy_chains(&[]));
        elements.push(table::guard_element(owner, port.mac));
        elements.extend(answer::told_elements(owner, port));
        elements.retain(|element| !has_key_of(&all, element));
        all.extend(elements);
    }
    all
}

/// The chain of a policy: its table, and its name, which chains of both tables may have.
type PolicyChain = (NftTable<'static>, String);

fn selected_chain(element: &SetElement) -> Option<PolicyChain> {
    Some((element.set.table, element.target_chain()?.to_owned()))
}

/// Whether one of the elements is in the same set and has the same key.
fn has_key_of(elements: &[SetElement], other: &SetElement) -> bool {
    elements.iter().any(|element| (element.set, &element.key) == (other.set, &other.key))
}

/// Puts the policies of the container in force, in place of the [replaced](EgressPart::replaces)
/// ones, by one transaction. The caller has the [lock](lock_policy), and has recorded the port.
pub fn add_port(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    port: &EgressPart,
    compiled: &CompiledPolicy,
) -> Result<()> {
    let failed = || format!("put the egress policy of port \"{}\" in force", port.end);
    let objects = port.objects(compiled);
    let elements = table::port_elements(owner, port, &policy_chains(&objects));
    let (recorders, recorded) = recorders_of_port(owner, port, answer::is_ready(filter, port));
    let layouts = [table::layouts_of_port(port), recorders].concat();
    let all: Vec<SetElement> = elements.iter().chain(&recorded).cloned().collect();
    // The container may have had other addresses.
    let mut left =
        if port.replaced.is_empty() { Vec::new() } else { recorded_elements(owner, port) };
    left.retain(|old| !has_key_of(&all, old));
    let (mut taken, mut former) = (None, HashSet::new());
    let fill = &mut |change: &mut LayoutTransaction<'_>, found: Vec<Option<SetElement>>| {
        let mut known = elements
            .iter()
            .zip(&found)
            .filter_map(|(element, found)| Some((element, found.as_ref()?)));
        taken = known
            .find(|(element, found)| is_left_in_place(found, element))
            .map(|(_, found)| found.comment.clone());
        if taken.is_some() {
            return Ok(());
        }
        let mut of_before: Vec<SetElement> =
            change.nft.read_elements(&left)?.into_iter().flatten().collect();
        of_before.retain(|element| owner.owns_comment(element.comment.as_deref()));
        former = found.iter().flatten().chain(&of_before).filter_map(selected_chain).collect();
        for element in &of_before {
            change.batch.delete_element(element);
        }
        let mut is_new = false;
        for policy in &objects {
            is_new |= create_if_missing(change, policy)?;
        }
        restore_addresses(change, port, &objects, is_new)?;
        for (element, found) in elements.iter().zip(&found) {
            change.replace_element(found.as_ref(), element);
        }
        if !port.replaced.is_empty() {
            // A repair that has read the replaced policy at the same time is refused and planned
            // again, or this change is, which writes an element also if nothing else
            // differs.
            change.require_unchanged();
            let mut equal = elements
                .iter()
                .zip(&found)
                .filter(|(element, found)| found.as_ref() == Some(*element));
            if let Some((source, _)) =
                equal.find(|(element, _)| table::SOURCES.contains(&element.set))
            {
                change.replace_data(source);
            }
        }
        claim_recorders(change, &recorded, &found[elements.len()..]);
        Ok(())
    };
    filter.own_tables()?.change_tables(&layouts, &all, fill).context(failed)?;
    if let Some(comment) = taken {
        return Err(taken_error(port, comment.as_deref()));
    }
    former.extend(port.replaced_chains());
    for PolicyObjects { table, chain, .. } in objects {
        former.remove(&(table, chain));
    }
    if former.is_empty() && port.replaced.is_empty() {
        return Ok(());
    }
    match delete_former_policies(filter.nft_socket()?, &former) {
        Ok(()) => RECORDS.add_part(owner, &EgressPart { replaced: Vec::new(), ..port.clone() }),
        Err(error) => {
            warn!("could not delete the former egress policy of port \"{}\": {error}", port.end);
        }
    }
    Ok(())
}

/// Fails if the record still has another port, because it could not be rewritten: a repair would
/// put that port in force.
pub fn require_recorded(owner: AttachmentId<'_>, port: &EgressPart) -> Result<()> {
    if RECORDS.read_content(owner).is_some_and(|recorded: EgressPart| recorded != *port) {
        return Err(Error::internal("the record of the former policy cannot be replaced")
            .with_details("see the warning before; is there space in /run?"));
    }
    Ok(())
}

/// Puts the `former` port in force again, after a failure of [`add_port`] with another one.
pub fn restore_port(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    former: &EgressPart,
    failed: &EgressPart,
) -> Result<()> {
    let mut port = former.clone();
    port.replaces(failed);
    RECORDS.add_part(owner, &port);
    add_port(filter, owner, &port, &port.compile()?)
}

/// The tables that count, record and answer what the second guard refuses, and the elements of a
/// container in them. They enforce nothing, and need the links of the guard.
fn recorders_of_port(
    owner: AttachmentId<'_>,
    port: &EgressPart,
    can_answer: bool,
) -> (Vec<TableLayout>, Vec<SetElement>) {
    let (mut layouts, mut elements) =
        (vec![table::GUARD_LAYOUT], vec![table::guard_element(owner, port.mac)]);
    if can_answer {
        layouts.push(answer::LAYOUT);
        elements.extend(answer::told_elements(owner, port));
    }
    (layouts, elements)
}

/// A container with the same address behind another bridge may have the elements.
fn claim_recorders(
    change: &mut LayoutTransaction<'_>,
    elements: &[SetElement],
    found: &[Option<SetElement>],
) {
    for (element, found) in elements.iter().zip(found) {
        change.claim_element(found.as_ref(), element);
    }
}

/// Restores the [recorders](recorders_of_port) of all attachments with a record, if there are the
/// links of the guard, which ADD and a repair make before.
fn restore_recorders(filter: &PacketFilter) -> Result<()> {
    let parts = RECORDS.restorable_parts::<EgressPart>();
    if parts.is_empty() || Netlink::open()?.find_link(SINK_PORT)?.is_none() {
        return Ok(());
    }
    let nft = filter.nft_socket()?;
    let told = parts.iter().find(|part| part.content.is_told());
    let can_answer = told.is_some_and(|part| answer::is_ready(filter, &part.content));
    let wanted: Vec<_> = parts
        .iter()
        .map(|part| recorders_of_port(part.attachment_id(), &part.content, can_answer))
        .collect();
    let mut is_whole = true;
    for layout in wanted.iter().max_by_key(|(layouts, _)| layouts.len()).map_or(&[][..], |w| &w.0) {
        is_whole &= layout.find_difference(nft, RuleComparison::RuleSet)?.is_none();
    }
    let restored = wanted.iter().map(|(layouts, elements)| {
        if is_whole && nft.read_elements(elements)?.iter().all(Option::is_some) {
            return Ok(());
        }
        filter.own_tables()?.change_tables(layouts, elements, &mut |change, found| {
            claim_recorders(change, elements, &found);
            Ok(())
        })
    });
    join_outcomes(restored.map(|outcome: NetlinkResult<()>| outcome.map_err(Error::from)))
}

/// Deletes those of the policies that no container has any longer.
fn delete_former_policies(nft: &NftSocket, chains: &HashSet<PolicyChain>) -> NetlinkResult<()> {
    nft.update_tables(&mut |nft| {
        let mut batch = NftBatch::new();
        for (table, chain) in chains {
            delete_unused(nft, &mut batch, table.named_chain(chain), 0)?;
        }
        Ok(batch)
    })
}

/// Restores the policies and elements of all records that are missing.
fn restore_ports(change: &mut LayoutTransaction<'_>) {
    if !all_sets().iter().any(|set| change.is_flushed(*set)) {
        return;
    }
    // Containers with equal policies share them.
    let (mut compared, mut created) = (HashSet::new(), HashSet::new());
    for kept in change.restorable_records::<EgressPart>(RECORDS) {
        let port = &kept.content;
        let Ok(compiled) = port.compile() else { continue };
        let objects = port.objects(&compiled);
        let elements = table::port_elements(kept.attachment_id(), port, &policy_chains(&objects));
        for policy in &objects {
            let chain = (policy.table, policy.chain.clone());
            let is_needed = elements
                .iter()
                .filter(|element| selected_chain(element).as_ref() == Some(&chain))
                .any(|element| change.will_have_data(element));
            if !is_needed || !compared.insert(chain) {
                continue;
            }
            match create_if_missing(change, policy) {
                Ok(is_new) => created.extend(is_new.then(|| (policy.table, policy.chain.clone()))),
                Err(error) => warn!("could not restore an egress policy: {error}"),
            }
        }
        for element in &elements {
            change.restore_with_data(element);
        }
        for element in &recorders_of_port(kept.attachment_id(), port, true).1 {
            change.restore_element(element);
        }
        let is_created =
            |policy: &PolicyObjects| created.contains(&(policy.table, policy.chain.clone()));
        let is_new = objects.iter().any(is_created);
        restore_addresses(change, port, &objects, is_new)
            .unwrap_or_else(|error| warn!("could not restore addresses of names: {error}"));
    }
}

/// Creates the policy, or replaces its content, unless it exists or the transaction creates it
/// already. Returns whether the transaction creates it.
fn create_if_missing(
    change: &mut LayoutTransaction<'_>,
    policy: &PolicyObjects,
) -> NetlinkResult<bool> {
    if policy.exist(change.nft, change.rule_comparison())? {
        return Ok(false);
    }
    if change.begin_chain(policy.table, &policy.chain) {
        // Another container's ADD may create the same policy.
        change.require_unchanged();
        change.batch.append_batch(policy.creation(change.nft)?);
    }
    Ok(true)
}

/// The sets with elements of containers.
fn all_sets() -> Vec<NftSet<'static>> {
    let layouts = table::LAYOUTS.iter().chain(RECORDERS);
    layouts.flat_map(|layout| layout.sets).copied().collect()
}

/// Whether the record of a living attachment needs the table.
fn needs_table(layout: &TableLayout) -> bool {
    RECORDS.has_restorable_part::<EgressPart>(&|part| table::needs_table(&part.content, layout))
}

/// Verifies everything that [`add_port`] created.
pub fn check_port(filter: &PacketFilter, owner: AttachmentId<'_>, port: &EgressPart) -> Result<()> {
    for layout in table::layouts_of_port(port).iter().chain([&table::GUARD_LAYOUT]) {
        layout.require_whole(filter.nft_socket()?, RuleComparison::RuleSet)?;
    }
    let (nft, objects) = (filter.nft_socket()?, port.objects(&port.compile()?));
    let missing = |what: String| {
        Err(Error::internal(format!(
            "{what} of the egress policy of port \"{}\" is missing or was changed",
            port.end
        ))
        .with_details(RECORDS.restore_remedy(owner)))
    };
    for policy in &objects {
        if !policy.exist(nft, RuleComparison::RuleSet)? {
            return missing(format!("chain {} {}", policy.table, policy.chain));
        }
    }
    let elements = table::port_elements(owner, port, &policy_chains(&objects));
    let found = nft.read_elements(&elements)?;
    let mut wrong =
        elements.iter().zip(&found).filter(|(element, found)| found.as_ref() != Some(*element));
    // Another container with the same address may have those.
    let (_, recorded) = recorders_of_port(owner, port, answer::exists(nft)?);
    let found = nft.read_elements(&recorded)?;
    let mut unrecorded = recorded.iter().zip(&found).filter(|(_, found)| found.is_none());
    match wrong.next().or_else(|| unrecorded.next()) {
        Some((element, _)) => missing(format!("element {element} of {}", element.set)),
        None => Ok(()),
    }
}

/// Removes the policies of the attachment. The second guard stays until the port vanishes.
pub fn delete_port(filter: &PacketFilter, owner: AttachmentId<'_>) -> Result<()> {
    // Without a record all elements are searched.
    let port: Option<EgressPart> = RECORDS.read_content(owner);
    let known = port.as_ref().map_or(Vec::new(), |port| recorded_elements(owner, port));
    let replaced = port.map_or(HashSet::new(), |port| port.replaced_chains());
    let removed = RECORDS.remove_part(owner);
    let is_own = owner.comment_matcher();
    let deleted = filter.query_nft(&|nft| delete_elements(nft, &known, &is_own, Some(&replaced)));
    join_outcomes([removed, deleted])
}

/// Removes the policies of the network's attachments that are not among `valid`, and policies that
/// no container has.
pub fn remove_stale_ports(
    filter: &PacketFilter,
    network: &str,
    valid: &[AttachmentId<'_>],
) -> Result<()> {
    let removed = RECORDS.remove_stale_parts(network, valid);
    let is_stale = stale_matcher(network, valid);
    let deleted = filter.query_nft(&|nft| delete_elements(nft, &[], &is_stale, None));
    join_outcomes([removed, deleted])
}

/// Deletes elements by their comments, those with the keys of `known` or any; and the policies that
/// no container has any longer: those of the elements, and those with the names of `chains` or any.
/// Recorded flows expire.
fn delete_elements(
    nft: &NftSocket,
    known: &[SetElement],
    which: &dyn Fn(Option<&str>) -> bool,
    chains: Option<&HashSet<PolicyChain>>,
) -> NetlinkResult<()> {
    nft.update_tables(&mut |nft| {
        let mut batch = NftBatch::new();
        let found = nft.find_elements_by_comment(&all_sets(), known, which)?;
        for element in &found {
            batch.delete_element(element);
        }
        let mut policies: HashMap<PolicyChain, usize> = HashMap::new();
        for chain in found.iter().filter_map(selected_chain) {
            *policies.entry(chain).or_default() += 1;
        }
        let others = match chains {
            Some(chains) => chains.iter().cloned().collect(),
            None => [list_policies(nft, PACKETS)?, list_policies(nft, FRAMES)?].concat(),
        };
        for chain in others {
            policies.entry(chain).or_default();
        }
        for ((table, chain), deleted) in policies {
            delete_unused(nft, &mut batch, table.named_chain(&chain), deleted)?;
        }
        Ok(batch)
    })
}
