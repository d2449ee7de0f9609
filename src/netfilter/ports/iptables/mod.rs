//! Mappings as iptables rules: a chain for each container, entered from `CNI-HOSTPORT-DNAT`. Names,
//! comments and rules are the reference plugin's (`rules.rs`).
//!
//! The reference has one chain for all interfaces of a container in a network. Here a second
//! interface gets its own chain. The container of a chain is identified by the comments of its
//! entries, not by the chain's name; the interface by the record of the attachment that has the
//! address of the chain's rules.

mod handover;
mod rules;

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

pub(in crate::netfilter) use self::handover::join_interfaces;
pub use self::rules::IptablesOptions;
use self::rules::{
    CHAIN_MASQ, CHAIN_TOP, POSTROUTING, RequiredRules, SETMARK, attachment_rules, entries_ahead,
    entry_comment, parse_entry_comment, shared_rules, top_chain_jumps,
};
use super::{MappedPort, PortOwner, PortmapPart, RECORDS, TakenPort, describe_host_port};
use crate::attachment::{AttachmentRecord, decode_part};
use crate::netfilter::iptables::{
    ChainScope, IptablesRule, IptablesTable, PORT_EXTENSIONS, program_name,
};
use crate::netfilter::rules::RecordedRules;
use crate::netfilter::{AttachmentId, IpFamily, PacketFilter, RuleBackend};
use cni::error::{Error, Result};
use cni::ip::host_net;
use cni::sort::collect_set;

const NAT: &str = "nat";
/// The top chain for sources of an old release of the reference.
const OLD_SNAT: &str = "CNI-HOSTPORT-SNAT";

/// The chains with rules that all attachments share, beside [`CHAIN_TOP`].
const SHARED: [&str; 5] = ["PREROUTING", "OUTPUT", POSTROUTING, SETMARK, CHAIN_MASQ];

/// A port that another container holds meanwhile is not restored.
pub(super) const RULES: RecordedRules = RecordedRules {
    kept: RECORDS,
    table: NAT,
    extensions: PORT_EXTENSIONS,
    is_of: |part, family| {
        let forward =
            decode_part::<PortmapPart>(part).filter(|of| of.backend == RuleBackend::Iptables);
        forward.is_some_and(|of| {
            of.targets.iter().any(|target| IpFamily::of_address(target.addr()) == family)
        })
    },
    plan: |table, family, stored, _| {
        let forward = decode_part::<PortmapPart>(&stored.content)?;
        let wanted = RequiredRules::of_family(stored.attachment_id(), &forward, family)?;
        find_missing_rule(table, wanted)?;
        let taken = find_taken_port(table, wanted);
        if taken.is_none() {
            create_rules(table, wanted);
        }
        taken.map(|taken| taken.to_string())
    },
    expected: |family, other, _| {
        let comment = entry_comment(other.attachment_id());
        let mut rules = vec![IptablesRule::new(CHAIN_TOP).with_comment(&comment)];
        let forward = decode_part::<PortmapPart>(&other.content);
        let wanted = forward
            .as_ref()
            .and_then(|forward| RequiredRules::of_family(other.attachment_id(), forward, family));
        rules.extend(wanted.into_iter().flat_map(shared_rules));
        rules
    },
};

/// Creates the mappings, in one transaction for each family; earlier mappings of the attachment are
/// replaced. If another container holds a port, the port is returned. In this case, and on failure,
/// no family has new mappings.
pub(super) fn add_mappings(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    forward: &PortmapPart,
) -> Result<Option<TakenPort>> {
    let (taken, mut created) = (RefCell::new(None), Vec::new());
    for family in IpFamily::BOTH {
        let Some(wanted) = RequiredRules::of_family(owner, forward, family) else { continue };
        let ports = wanted.family_mappings().map(|m| (m.proto.to_string(), m.host_port)).collect();
        let outcome =
            with_chain_scope(owner, &SHARED, &|entry| may_map_ports(entry, &ports), &|scope| {
                RULES.add(&filter.default_iptables(family)?, owner, forward, scope, &|table| {
                    let port = find_taken_port(table, wanted);
                    // What was restored for the holder of the port remains.
                    if port.is_none() {
                        create_rules(table, wanted);
                    }
                    taken.replace(port);
                })
            });
        if outcome.is_err() || taken.borrow().is_some() {
            for earlier in created {
                undo_mappings(filter, earlier, owner);
            }
            outcome.map_err(|error| {
                missing_mark_chain_error(filter, family, forward).unwrap_or(error)
            })?;
            return Ok(taken.into_inner());
        }
        created.push(family);
    }
    let (common, own) = chain_names(owner);
    // An earlier ADD may have created mappings of a family that has no client or address now.
    for family in IpFamily::BOTH.into_iter().filter(|family| !created.contains(family)) {
        for tables in filter.iptables_with_chains(family, NAT, &[&common, &own])? {
            with_deletion_scope(owner, &|scope| {
                tables.delete_from_table(NAT, scope, &|table| _ = plan_deletion(table, owner))
            })?;
        }
    }
    Ok(None)
}

/// The error if the chain of `externalSetMarkChain` does not exist.
fn missing_mark_chain_error(
    filter: &PacketFilter,
    family: IpFamily,
    forward: &PortmapPart,
) -> Option<Error> {
    let chain = forward.options.as_ref()?.set_mark_chain.as_deref()?;
    let table = filter
        .default_iptables(family)
        .ok()?
        .read_table(NAT, ChainScope::named_chains(&[chain]))
        .ok()?;
    (!table.has_chain(chain)).then(|| {
        let program = program_name(family);
        Error::config(format!("externalSetMarkChain: no chain \"{chain}\" in {program} table nat"))
            .with_details(
                "start the program that creates the chain, or remove the key: portmap then marks \
                 packets itself",
            )
    })
}

/// Whether an entry may be for one of these ports. Entries that cannot be parsed may be for any
/// port.
fn may_map_ports(entry: &IptablesRule, ports: &HashSet<(String, u16)>) -> bool {
    let proto = entry.option_value("-p");
    let Some(of_entry) = entry.option_value("--dports") else {
        return ports.iter().any(|(of_port, _)| proto.is_none_or(|proto| proto == of_port));
    };
    of_entry.split(',').any(|text| match (proto, text.parse()) {
        (Some(proto), Ok(port)) => ports.contains(&(proto.to_owned(), port)),
        _ => true,
    })
}

fn create_rules(table: &mut IptablesTable, wanted: RequiredRules<'_>) {
    add_shared_rules(table, wanted);
    let chain = find_attachment_chain(table, wanted.owner);
    table.delete_rules(|rule| rule.goes_to(&chain));
    table.flush_chain(&chain);
    fill_chain(table, wanted, &chain);
}

/// Adds the rules of the attachment to its empty chain.
fn fill_chain(table: &mut IptablesTable, wanted: RequiredRules<'_>, chain: &str) {
    table.ensure_chain(chain);
    table.append_all_unique(attachment_rules(wanted, chain));
    // After the entries of others: if a container has several networks, the first network serves
    // the port.
    let ahead = table
        .rules_of_chain(CHAIN_TOP)
        .take_while(|rule| rule.option_value("-d").is_some())
        .count();
    for entry in entries_ahead(wanted, chain) {
        if is_preceded_by_other(table, &entry, wanted, chain) {
            table.insert_unique(ahead, entry);
        }
    }
}

/// Whether an entry of another container comes before those of `chain`, and may be for the port of
/// `entry`, which is for a single address of the host.
fn is_preceded_by_other(
    table: &IptablesTable,
    entry: &IptablesRule,
    wanted: RequiredRules<'_>,
    chain: &str,
) -> bool {
    let proto = entry.option_value("-p").unwrap_or_default();
    let ports = entry.option_value("--dports").unwrap_or_default().split(',');
    let ports = ports.filter_map(|port| Some((proto.to_owned(), port.parse().ok()?))).collect();
    let is_of_container = |rule: &IptablesRule| {
        let named = rule.option_value("--comment").and_then(parse_entry_comment);
        named.is_some_and(|(_, id)| id == wanted.owner.id)
    };
    let mut earlier = table.rules_of_chain(CHAIN_TOP).take_while(|rule| !rule.goes_to(chain));
    earlier.any(|rule| may_map_ports(rule, &ports) && !is_of_container(rule))
}

fn undo_mappings(filter: &PacketFilter, family: IpFamily, owner: AttachmentId<'_>) {
    let undone = with_deletion_scope(owner, &|scope| {
        filter.default_iptables(family)?.update_table(NAT, scope, &|table| {
            table.delete_chain_and_jumps(&find_attachment_chain(table, owner));
        })
    });
    if let Err(error) = undone {
        warn!("could not undo port mappings: {error}");
    }
}

/// Adds the objects that all containers share.
fn add_shared_rules(table: &mut IptablesTable, wanted: RequiredRules<'_>) {
    if wanted.needs_mark_chains() {
        table.ensure_chain(SETMARK);
        table.ensure_chain(CHAIN_MASQ);
    }
    table.ensure_chain(CHAIN_TOP);
    for rule in shared_rules(wanted) {
        if rule.chain == POSTROUTING {
            table.insert_unique(0, rule);
        } else {
            table.append_unique(rule);
        }
    }
}

/// The attachment's chain: the chain of its interface, or the container's chain, which is found by
/// the comments of entries or by the reference's name. A chain of this name may belong to another
/// interface, or to another container, because the name is a hash of network and container joined;
/// then the attachment has a chain of its own.
fn find_attachment_chain(table: &IptablesTable, owner: AttachmentId<'_>) -> String {
    let (common, own) = chain_names(owner);
    if table.has_chain(&own) {
        return own;
    }
    let comment = entry_comment(owner);
    let is_own = |chain: &&str| {
        let interface = interface_of_chain(table, chain, owner.network, owner.id);
        interface.is_none_or(|ifname| ifname == owner.ifname)
            && !is_entered_by_other(table, chain, &comment)
    };
    let entries = table.rules.iter().filter(|rule| is_entry_with_comment(rule, &comment));
    match entries.filter_map(|entry| entry.option_value("-j")).find(is_own) {
        Some(chain) => chain.to_owned(),
        None if is_own(&common.as_str()) => common,
        None => own,
    }
}

/// The interface that a container's chain belongs to. The name of the chain does not tell it, so
/// the address in the chain's rules is looked up in the records.
fn interface_of_chain(
    table: &IptablesTable,
    chain: &str,
    network: &str,
    id: &str,
) -> Option<String> {
    let addrs = collect_set(table.rules_of_chain(chain).filter_map(dnat_address));
    let records = addrs.into_iter().flat_map(AttachmentRecord::find_by_address);
    let mut of_container = records.filter(|record| record.network == network && record.id == id);
    of_container.next().map(|record| record.ifname)
}

/// The address that the rule of a mapping translates to.
fn dnat_address(rule: &IptablesRule) -> Option<IpAddr> {
    rule.option_value("--to-destination")?.parse().ok().map(|to: SocketAddr| to.ip())
}

fn is_entry_with_comment(rule: &IptablesRule, comment: &str) -> bool {
    rule.chain == CHAIN_TOP && rule.option_value("--comment") == Some(comment)
}

/// Whether an entry of another container jumps to the chain.
fn is_entered_by_other(table: &IptablesTable, chain: &str, comment: &str) -> bool {
    table
        .rules_of_chain(CHAIN_TOP)
        .any(|entry| entry.goes_to(chain) && !is_entry_with_comment(entry, comment))
}

/// Deletes the entries with this comment to the chain, and the chain unless others jump to it.
fn remove_chain(table: &mut IptablesTable, chain: &str, comment: &str) {
    table.delete_rules(|rule| is_entry_with_comment(rule, comment) && rule.goes_to(chain));
    if !is_entered_by_other(table, chain, comment) {
        table.delete_chain_and_jumps(chain);
    }
}

/// The names of the container's chain in the reference, and of the chain of a second interface.
fn chain_names(owner: AttachmentId<'_>) -> (String, String) {
    let id = format!("/{}/{}", owner.id, owner.ifname);
    (owner.iptables_chain("DN-"), AttachmentId { id: &id, ..owner }.iptables_chain("DN-"))
}

/// Calls a function with the chains that may have rules of the attachment, with `more` chains, and
/// with those of the other entries for which `is_wanted` returns true.
fn with_chain_scope<T>(
    owner: AttachmentId<'_>,
    more: &[&str],
    is_wanted: &dyn Fn(&IptablesRule) -> bool,
    call: &dyn Fn(ChainScope<'_>) -> T,
) -> T {
    let (common, own) = chain_names(owner);
    let comment = entry_comment(owner);
    let needed = [&[CHAIN_TOP, common.as_str(), own.as_str()], more].concat();
    let leads_on = |rule: &IptablesRule| {
        is_entry_with_comment(rule, &comment) || (rule.chain == CHAIN_TOP && is_wanted(rule))
    };
    // With the rule that jumps to `CHAIN_MASQ`, once for all.
    call(ChainScope::leading_on(&needed, &leads_on).with_beginnings(&[(POSTROUTING, 0)]))
}

/// Like [`with_chain_scope`], for a deletion.
fn with_deletion_scope<T>(owner: AttachmentId<'_>, call: &dyn Fn(ChainScope<'_>) -> T) -> T {
    with_chain_scope(owner, &[OLD_SNAT, &owner.iptables_chain("SN-")], &|_| false, call)
}

/// The first wanted port that the chain of another container maps.
fn find_taken_port(table: &IptablesTable, wanted: RequiredRules<'_>) -> Option<TakenPort> {
    let owner = wanted.owner;
    let own = find_attachment_chain(table, owner);
    let requested: HashMap<_, _> =
        wanted.family_mappings().map(|m| (mapping_words(m), m)).collect();
    let is_others = |rule: &&IptablesRule| {
        rule.goes_to("DNAT") && rule.chain.starts_with("CNI-DN-") && rule.chain != own
    };
    for rule in table.rules.iter().filter(is_others) {
        let words =
            ["-p", "--dport", "-d"].map(|option| rule.option_value(option).map(str::to_owned));
        let Some(mapping) = requested.get(&words) else { continue };
        let chain = &rule.chain;
        // A chain without an entry maps nothing.
        let Some(entry) = table.rules_of_chain(CHAIN_TOP).find(|entry| entry.goes_to(chain)) else {
            continue;
        };
        let holds = entry.option_value("--comment").and_then(parse_entry_comment);
        // Runtimes request the ports of a container in each of its networks (`podman network
        // connect`); the chain that is entered first serves them.
        if holds.is_some_and(|(network, id)| id == owner.id && network != owner.network) {
            continue;
        }
        let (network, id) = holds.unwrap_or_default();
        let by = owner_of_chain(table, chain, network, id);
        let port = describe_host_port(mapping.single_address(), mapping.host_port, mapping.proto);
        return Some(TakenPort { port, by });
    }
    None
}

/// The owner of a chain, by the network and container of an entry.
fn owner_of_chain(table: &IptablesTable, chain: &str, network: &str, id: &str) -> PortOwner {
    let mappings: Vec<_> =
        table.rules_of_chain(chain).filter(|rule| rule.goes_to("DNAT")).collect();
    PortOwner {
        network: network.to_owned(),
        id: id.to_owned(),
        ifname: interface_of_chain(table, chain, network, id),
        comment: format!("chain {chain}"),
        ports: collect_set(mappings.iter().filter_map(|rule| {
            let [proto, port] = ["-p", "--dport"].map(|option| rule.option_value(option));
            let on = rule
                .option_value("-d")
                .map(|addr| format!("{}:", addr.split('/').next().unwrap_or(addr)));
            Some(format!("{}{}/{}", on.unwrap_or_default(), port?, proto?))
        })),
        targets: collect_set(mappings.iter().copied().filter_map(dnat_address)),
        ..PortOwner::default()
    }
}

/// The owners of all chains.
pub(super) fn list_port_owners(filter: &PacketFilter) -> Result<Vec<PortOwner>> {
    let mut found = Vec::new();
    for family in IpFamily::BOTH {
        for tables in filter.iptables_with_chains(family, NAT, &[CHAIN_TOP])? {
            let table = tables.read_table(NAT, ChainScope::All)?;
            found.extend(
                container_entries(&table)
                    .map(|(_, chain, network, id)| owner_of_chain(&table, chain, network, id)),
            );
        }
    }
    Ok(found)
}

/// Deletes the chains of an owner, without a record, that redirect to addresses that were seen.
/// Returns the addresses that they redirected UDP to.
pub(super) fn remove_port_owner(
    filter: &PacketFilter,
    owner: &PortOwner,
) -> Result<BTreeSet<IpAddr>> {
    let servers = RefCell::new(BTreeSet::new());
    filter.delete_iptables_rules(NAT, &[CHAIN_TOP], ChainScope::All, &|table, _| {
        let is_its = |chain: &str, network: &str, id: &str| {
            let found = owner_of_chain(table, chain, network, id);
            found.is_same(owner) && found.targets.is_subset(&owner.targets)
        };
        let its =
            container_entries(table).filter(|(_, chain, network, id)| is_its(chain, network, id));
        let its = collect_set(
            its.map(|(entry, chain, ..)| (chain.to_owned(), comment_of(entry).to_owned())),
        );
        for (chain, comment) in its {
            servers.borrow_mut().extend(udp_servers(table, &chain));
            remove_chain(table, &chain, &comment);
        }
    })?;
    Ok(servers.into_inner())
}

/// The addresses that a chain redirects UDP to.
fn udp_servers(table: &IptablesTable, chain: &str) -> Vec<IpAddr> {
    let udp = table.rules_of_chain(chain).filter(|rule| rule.option_value("-p") == Some("udp"));
    udp.filter_map(dnat_address).collect()
}

fn comment_of(entry: &IptablesRule) -> &str {
    entry.option_value("--comment").unwrap_or_default()
}

/// The protocol, port and address in the rule of a mapping.
fn mapping_words(mapping: &MappedPort) -> [Option<String>; 3] {
    let (proto, port) = (mapping.proto.to_string(), mapping.host_port.to_string());
    let addr = mapping.single_address().map(|addr| host_net(addr).to_string());
    [Some(proto), Some(port), addr]
}

/// Deletes the attachment's mappings in every flavour of iptables. Returns the addresses that they
/// redirected UDP to.
pub(super) fn delete_mappings(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
) -> Result<BTreeSet<IpAddr>> {
    let (common, own) = chain_names(owner);
    let servers = RefCell::new(BTreeSet::new());
    with_deletion_scope(owner, &|scope| {
        filter.delete_iptables_rules(NAT, &[&common, &own], scope, &|table, _| {
            servers.borrow_mut().extend(plan_deletion(table, owner));
        })
    })?;
    Ok(servers.into_inner())
}

/// Deletes the attachment's rules. Returns the addresses that they redirected UDP to.
fn plan_deletion(table: &mut IptablesTable, owner: AttachmentId<'_>) -> Vec<IpAddr> {
    let (chain, comment) = (find_attachment_chain(table, owner), entry_comment(owner));
    let servers = udp_servers(table, &chain);
    remove_chain(table, &chain, &comment);
    // A chain that the reference created for two containers.
    let (common, _) = chain_names(owner);
    if is_entered_by_other(table, &common, &comment) {
        remove_chain(table, &common, &comment);
    }
    if table.has_chain(OLD_SNAT) {
        table.delete_chain_and_jumps(&owner.iptables_chain("SN-"));
    }
    servers
}

/// The first missing rule of the attachment, or of the rules that all attachments share. For an
/// attachment without a record, which the reference created, only the reference's rules are
/// required.
fn find_missing_rule(table: &IptablesTable, wanted: RequiredRules<'_>) -> Option<IptablesRule> {
    let chain = find_attachment_chain(table, wanted.owner);
    let mut all = shared_rules(wanted);
    all.extend(attachment_rules(wanted, &chain));
    if RECORDS.has_instance(&wanted.owner.instance_id()) {
        let ahead = entries_ahead(wanted, &chain).into_iter();
        all.extend(ahead.filter(|entry| is_preceded_by_other(table, entry, wanted, &chain)));
    }
    // The table has the rules of all containers. Those of a chain usually are in the wanted order:
    // each search begins after the last rule that was found.
    let mut begin = 0;
    all.into_iter().find(|rule| {
        // iptables-save may print conditions in other words.
        if !wanted.condition_words().is_empty() && rule.chain == CHAIN_TOP {
            return !table.rules_of_chain(CHAIN_TOP).any(|rule| rule.goes_to(&chain));
        }
        let (before, after) = table.rules.split_at(begin);
        let found = after.iter().chain(before).position(|present| present == rule);
        begin = found.map_or(begin, |offset| (begin + offset) % table.rules.len() + 1);
        found.is_none()
    })
}

/// Deletes the chains of the network's attachments that are not among `valid`.
pub(super) fn remove_stale_chains(
    filter: &PacketFilter,
    network: &str,
    valid: &[AttachmentId<'_>],
) -> Result<()> {
    filter.delete_iptables_rules(NAT, &[CHAIN_TOP], ChainScope::All, &|table, _| {
        for (chain, comment) in find_stale_chains(table, network, valid) {
            remove_chain(table, &chain, &comment);
        }
        for entry in &top_chain_jumps() {
            table.delete_duplicates(entry);
        }
    })
}

/// The stale chains and the comments of their entries.
fn find_stale_chains(
    table: &IptablesTable,
    network: &str,
    valid: &[AttachmentId<'_>],
) -> BTreeSet<(String, String)> {
    let mut stale = BTreeSet::new();
    for (entry, chain, of, id) in container_entries(table) {
        let mut of_container = valid.iter().filter(|owner| owner.id == id).peekable();
        let is_valid = of.ne(network)
            || of_container.peek().is_some() && {
                let ifname = interface_of_chain(table, chain, network, id);
                of_container
                    .any(|owner| ifname.as_ref().is_none_or(|ifname| owner.ifname == ifname))
            };
        if !is_valid {
            stale.insert((chain.to_owned(), comment_of(entry).to_owned()));
        }
    }
    stale
}

/// The entries of containers, with their chain, network and container.
fn container_entries(
    table: &IptablesTable,
) -> impl Iterator<Item = (&IptablesRule, &str, &str, &str)> {
    table.rules_of_chain(CHAIN_TOP).filter_map(|entry| {
        let (network, id) = parse_entry_comment(entry.option_value("--comment")?)?;
        let chain = entry.option_value("-j").filter(|chain| chain.starts_with("CNI-DN-"))?;
        Some((entry, chain, network, id))
    })
}
