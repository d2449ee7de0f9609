//! Mappings as iptables rules: a chain for each container, entered from `CNI-HOSTPORT-DNAT`. Names, comments and
//! rules are the reference plugin's (`rules.rs`).
//!
//! The reference has one chain for all interfaces of a container in a network. Here a second interface gets its own
//! chain. The container of a chain is identified by the comments of its entries, not by the chain's name; the
//! interface by the record of the attachment that has the address of the chain's rules.

mod rules;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

pub use self::rules::Options;
use self::rules::{
    MASQ, POSTROUTING, SETMARK, TOP, Wanted, entries, entries_ahead, entry_comment, parse_comment,
    rules, shared_rules,
};
use super::{Forward, Holder, KEPT, Mapping, Taken, host_port};
use crate::attachment::Record;
use crate::cni::ip::host_net;
use crate::error::{Error, Result};
use crate::log;
use crate::netfilter::iptables::{Records, Rule, Scope, Table, program};
use crate::netfilter::layout::HandedOver;
use crate::netfilter::{Backend, Family, Owner, PacketFilter};

const NAT: &str = "nat";
/// The top chain for sources of an old release of the reference.
const OLD_SNAT: &str = "CNI-HOSTPORT-SNAT";

/// The chains with rules that all attachments share, beside [`TOP`].
const SHARED: [&str; 5] = ["PREROUTING", "OUTPUT", POSTROUTING, SETMARK, MASQ];

/// For [`crate::netfilter::heal`]. A port that another container holds meanwhile is not restored.
pub(in crate::netfilter) const RECORDS: Records<Forward> = Records {
    kept: KEPT,
    table: NAT,
    is_of: |forward, family| {
        let mut targets = forward.targets.iter();
        forward.backend == Backend::Iptables
            && targets.any(|target| Family::of(target.addr()) == family)
    },
    restore: |table, family, kept| {
        for wanted in Wanted::each(kept.owner(), &kept.content) {
            let is_complete = |table| missing(table, wanted).is_none();
            let is_of_family = wanted.family() == family;
            if is_of_family && !is_complete(table) && taken_port(table, wanted).is_none() {
                create(table, wanted);
            }
        }
    },
};

/// Creates the mappings, in one transaction for each family; earlier mappings of the attachment are replaced. If
/// another container holds a port, the port is returned. In this case, and on failure, the attachment has no
/// mappings.
pub(super) fn add(
    filter: &PacketFilter,
    owner: Owner<'_>,
    forward: &Forward,
) -> Result<Option<Taken>> {
    let taken = RefCell::new(None);
    for (at, wanted) in Wanted::each(owner, forward).into_iter().enumerate() {
        let family = wanted.family();
        // The entries of another attachment, whose absence shows a flush.
        let witness = RECORDS.another(owner, family).map(|kept| entry_comment(kept.owner()));
        let is_gone = |table: &Table, comment| !table.rules.iter().any(|r| is_entry(r, comment));
        let plan = |table: &mut Table| {
            if witness.as_ref().is_some_and(|comment| is_gone(table, comment)) {
                RECORDS.restore(table, family, Some(owner));
            }
            let port = taken_port(table, wanted);
            // What was restored for the holder of the port remains.
            if port.is_none() {
                create(table, wanted);
            }
            taken.replace(port);
        };
        let ports = wanted.mappings().map(|m| (m.proto.to_string(), m.host_port)).collect();
        let may_hold = |entry: &Rule| may_be_of(entry, &ports);
        let created = with_scope(owner, &SHARED, &may_hold, &|scope| {
            filter.iptables(family)?.update(NAT, scope, &plan)
        });
        if created.is_err() || taken.borrow().is_some() {
            for earlier in &forward.targets[..at] {
                undo(filter, Family::of(earlier.addr()), owner);
            }
            return created
                .map_err(|error| without_mark_chain(filter, family, forward).unwrap_or(error))
                .map(|()| taken.into_inner());
        }
    }
    Ok(None)
}

/// The error if the chain of `externalSetMarkChain` does not exist.
fn without_mark_chain(filter: &PacketFilter, family: Family, forward: &Forward) -> Option<Error> {
    let chain = forward.options.as_ref()?.set_mark_chain.as_deref()?;
    let table = filter.iptables(family).ok()?.read(NAT, Scope::of(&[chain])).ok()?;
    (!table.has_chain(chain)).then(|| {
        let program = program(family);
        Error::config(format!("externalSetMarkChain: no chain \"{chain}\" in {program} table nat"))
            .with_details(
                "start the program that creates the chain, or remove the key: portmap then marks packets itself",
            )
    })
}

/// Whether an entry may be for one of these ports. Entries that cannot be parsed may be for any port.
fn may_be_of(entry: &Rule, ports: &HashSet<(String, u16)>) -> bool {
    let proto = entry.value("-p");
    let Some(of_entry) = entry.value("--dports") else {
        return ports.iter().any(|(of_port, _)| proto.is_none_or(|proto| proto == of_port));
    };
    of_entry.split(',').any(|text| match (proto, text.parse()) {
        (Some(proto), Ok(port)) => ports.contains(&(proto.to_owned(), port)),
        _ => true,
    })
}

fn create(table: &mut Table, wanted: Wanted<'_>) {
    shared(table, wanted);
    let chain = chain_of(table, wanted.owner);
    table.del_rules(|rule| rule.goes_to(&chain));
    table.flush_chain(&chain);
    fill(table, wanted, &chain);
}

/// Adds the rules of the attachment to its empty chain.
fn fill(table: &mut Table, wanted: Wanted<'_>, chain: &str) {
    table.ensure_chain(chain);
    table.append_all_unique(rules(wanted, chain));
    // After those of others: of several networks of a container the first one serves the port.
    let ahead = table.rules_of(TOP).take_while(|rule| rule.value("-d").is_some()).count();
    for entry in entries_ahead(wanted, chain) {
        if is_overtaken(table, &entry, wanted, chain) {
            table.insert_unique(ahead, entry);
        }
    }
}

/// Whether an entry of another container comes before those of `chain`, and may be for the port of `entry`, which is for a
/// single address of the host.
fn is_overtaken(table: &Table, entry: &Rule, wanted: Wanted<'_>, chain: &str) -> bool {
    let proto = entry.value("-p").unwrap_or_default();
    let ports = entry.value("--dports").unwrap_or_default().split(',');
    let ports = ports.filter_map(|port| Some((proto.to_owned(), port.parse().ok()?))).collect();
    let is_of_container = |rule: &Rule| {
        let named = rule.value("--comment").and_then(parse_comment);
        named.is_some_and(|(_, id)| id == wanted.owner.id)
    };
    let mut earlier = table.rules_of(TOP).take_while(|rule| !rule.goes_to(chain));
    earlier.any(|rule| may_be_of(rule, &ports) && !is_of_container(rule))
}

fn undo(filter: &PacketFilter, family: Family, owner: Owner<'_>) {
    let uproot = |table: &mut Table| table.uproot_chain(&chain_of(table, owner));
    let undone =
        with_own_scope(owner, &|scope| filter.iptables(family)?.update(NAT, scope, &uproot));
    if let Err(error) = undone {
        log::warn(format_args!("undo port mappings: {error}"));
    }
}

/// Adds the objects that all containers share.
fn shared(table: &mut Table, wanted: Wanted<'_>) {
    if wanted.masquerades() {
        table.ensure_chain(SETMARK);
        table.ensure_chain(MASQ);
    }
    table.ensure_chain(TOP);
    for rule in shared_rules(wanted) {
        if rule.chain == POSTROUTING {
            table.insert_unique(0, rule);
        } else {
            table.append_unique(rule);
        }
    }
}

/// The attachment's chain: that of its interface, or the container's, found by the comments of entries, or by the reference's
/// name, unless another interface or another container uses that: the name is a hash of network and container joined, so
/// two containers may have the same name.
fn chain_of(table: &Table, owner: Owner<'_>) -> String {
    let (common, own) = chains(owner);
    if table.has_chain(&own) {
        return own;
    }
    let comment = entry_comment(owner);
    let is_own = |chain: &&str| {
        let interface = interface(table, chain, owner.network, owner.id);
        interface.is_none_or(|ifname| ifname == owner.ifname)
            && !is_of_other(table, chain, &comment)
    };
    let entries = table.rules.iter().filter(|rule| is_entry(rule, &comment));
    match entries.filter_map(|entry| entry.value("-j")).find(is_own) {
        Some(chain) => chain.to_owned(),
        None if is_own(&common.as_str()) => common,
        None => own,
    }
}

/// The interface of a container's chain: that of the attachment whose record has the address of the chain's rules.
fn interface(table: &Table, chain: &str, network: &str, id: &str) -> Option<String> {
    let addrs: BTreeSet<IpAddr> = table.rules_of(chain).filter_map(target).collect();
    let records = addrs.into_iter().flat_map(Record::of_address);
    let mut of_container = records.filter(|record| record.network == network && record.id == id);
    of_container.next().map(|record| record.ifname)
}

/// The address that the rule of a mapping translates to.
fn target(rule: &Rule) -> Option<IpAddr> {
    rule.value("--to-destination")?.parse().ok().map(|to: SocketAddr| to.ip())
}

fn is_entry(rule: &Rule, comment: &str) -> bool {
    rule.chain == TOP && rule.value("--comment") == Some(comment)
}

/// Whether an entry of another container jumps to the chain.
fn is_of_other(table: &Table, chain: &str, comment: &str) -> bool {
    table.rules_of(TOP).any(|entry| entry.goes_to(chain) && !is_entry(entry, comment))
}

/// Deletes the entries with this comment to the chain, and the chain unless others jump to it.
fn remove_chain(table: &mut Table, chain: &str, comment: &str) {
    table.del_rules(|rule| is_entry(rule, comment) && rule.goes_to(chain));
    if !is_of_other(table, chain, comment) {
        table.uproot_chain(chain);
    }
}

/// The names of the container's chain in the reference, and of the chain of a second interface.
fn chains(owner: Owner<'_>) -> (String, String) {
    let id = format!("/{}/{}", owner.id, owner.ifname);
    (owner.chain("DN-"), Owner { id: &id, ..owner }.chain("DN-"))
}

/// Calls a function with the chains that may have rules of the attachment, with `more` chains, and with those of the other
/// entries for which `is_wanted` returns true.
fn with_scope<T>(
    owner: Owner<'_>,
    more: &[&str],
    is_wanted: &dyn Fn(&Rule) -> bool,
    call: &dyn Fn(Scope<'_>) -> T,
) -> T {
    let (common, own) = chains(owner);
    let comment = entry_comment(owner);
    let needed = [&[TOP, common.as_str(), own.as_str()], more].concat();
    let leads_on = |rule: &Rule| is_entry(rule, &comment) || (rule.chain == TOP && is_wanted(rule));
    call(Scope::Chains(&needed, &leads_on))
}

/// As [`with_scope`], for a deletion.
fn with_own_scope<T>(owner: Owner<'_>, call: &dyn Fn(Scope<'_>) -> T) -> T {
    with_scope(owner, &[OLD_SNAT, &owner.chain("SN-")], &|_| false, call)
}

/// The first wanted port that the chain of another container maps.
fn taken_port(table: &Table, wanted: Wanted<'_>) -> Option<Taken> {
    let owner = wanted.owner;
    let own = chain_of(table, owner);
    let requested: HashMap<_, _> = wanted.mappings().map(|m| (words_of(m), m)).collect();
    let is_others = |rule: &&Rule| {
        rule.goes_to("DNAT") && rule.chain.starts_with("CNI-DN-") && rule.chain != own
    };
    for rule in table.rules.iter().filter(is_others) {
        let words = ["-p", "--dport", "-d"].map(|option| rule.value(option).map(str::to_owned));
        let Some(mapping) = requested.get(&words) else { continue };
        let chain = &rule.chain;
        // A chain without an entry maps nothing.
        let Some(entry) = table.rules_of(TOP).find(|entry| entry.goes_to(chain)) else { continue };
        let holds = entry.value("--comment").and_then(parse_comment);
        // Runtimes request the ports of a container in each of its networks (`podman network connect`); the chain
        // that is entered first serves them.
        if holds.is_some_and(|(network, id)| id == owner.id && network != owner.network) {
            continue;
        }
        let (network, id) = holds.unwrap_or_default();
        let by = Holder {
            network: network.to_owned(),
            id: id.to_owned(),
            ifname: interface(table, chain, network, id),
            comment: format!("chain {chain}"),
            ..Holder::default()
        };
        let port = host_port(mapping.address(), mapping.host_port, mapping.proto);
        return Some(Taken { port, by });
    }
    None
}

/// The protocol, port and address in the rule of a mapping.
fn words_of(mapping: &Mapping) -> [Option<String>; 3] {
    let (proto, port) = (mapping.proto.to_string(), mapping.host_port.to_string());
    let addr = mapping.address().map(|addr| host_net(addr).to_string());
    [Some(proto), Some(port), addr]
}

/// Deletes the attachment's mappings in every flavour of iptables. Returns the addresses that they redirected UDP to.
pub(super) fn del(filter: &PacketFilter, owner: Owner<'_>) -> Result<BTreeSet<IpAddr>> {
    let (common, own) = chains(owner);
    let servers = RefCell::new(BTreeSet::new());
    let plan = |table: &mut Table, _| servers.borrow_mut().extend(plan_del(table, owner));
    with_own_scope(owner, &|scope| {
        filter.delete_with_iptables(NAT, &[&common, &own], scope, &plan)
    })?;
    Ok(servers.into_inner())
}

/// Deletes the attachment's rules. Returns the addresses that they redirected UDP to.
fn plan_del(table: &mut Table, owner: Owner<'_>) -> Vec<IpAddr> {
    let (chain, comment) = (chain_of(table, owner), entry_comment(owner));
    let udp = table.rules_of(&chain).filter(|rule| rule.value("-p") == Some("udp"));
    let servers = udp.filter_map(target).collect();
    remove_chain(table, &chain, &comment);
    // A chain that the reference created for two containers.
    let (common, _) = chains(owner);
    if is_of_other(table, &common, &comment) {
        remove_chain(table, &common, &comment);
    }
    if table.has_chain(OLD_SNAT) {
        table.uproot_chain(&owner.chain("SN-"));
    }
    servers
}

/// Verifies every rule of the attachment and the rules that all attachments share.
pub(super) fn check(filter: &PacketFilter, owner: Owner<'_>, forward: &Forward) -> Result<()> {
    for wanted in Wanted::each(owner, forward) {
        let table = with_scope(owner, &SHARED, &|_| false, &|scope| {
            filter.iptables(wanted.family())?.read(NAT, scope)
        })?;
        let chain = chain_of(&table, owner);
        let missing = if table.has_chain(&chain) {
            missing(&table, wanted).map(|rule| {
                let (words, chain) = (rule.words.join(" "), rule.chain);
                format!("rule {words} in chain {chain} not found in table nat")
            })
        } else {
            Some(format!("chain {chain} not found in iptables table nat"))
        };
        if let Some(missing) = missing {
            return Err(Error::internal(missing).with_details(KEPT.remedy(owner, None)));
        }
    }
    Ok(())
}

/// The first missing rule of the attachment, or of those that all share. Of an attachment without a record, which the reference
/// has made, only the reference's rules are required.
fn missing(table: &Table, wanted: Wanted<'_>) -> Option<Rule> {
    let chain = chain_of(table, wanted.owner);
    let mut all = shared_rules(wanted);
    all.extend(rules(wanted, &chain));
    if KEPT.exists(&wanted.owner.instance()) {
        let ahead = entries_ahead(wanted, &chain).into_iter();
        all.extend(ahead.filter(|entry| is_overtaken(table, entry, wanted, &chain)));
    }
    let present: HashSet<&Rule> = table.rules.iter().collect();
    all.into_iter().find(|rule| {
        // iptables-save may print conditions in other words.
        if !wanted.conditions().is_empty() && rule.chain == TOP {
            !table.rules_of(TOP).any(|rule| rule.goes_to(&chain))
        } else {
            !present.contains(rule)
        }
    })
}

/// Deletes the chains of the network's attachments that are not among `valid`.
pub(super) fn collect(filter: &PacketFilter, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    filter.delete_with_iptables(NAT, &[TOP], Scope::All, &|table, _| {
        for (chain, comment) in stale(table, network, valid) {
            remove_chain(table, &chain, &comment);
        }
        for entry in &entries() {
            table.del_duplicates(entry);
        }
    })
}

/// The stale chains and the comments of their entries.
fn stale(table: &Table, network: &str, valid: &[Owner<'_>]) -> BTreeSet<(String, String)> {
    let mut stale = BTreeSet::new();
    for (entry, chain, of, id) in container_entries(table) {
        let mut of_container = valid.iter().filter(|owner| owner.id == id).peekable();
        let is_valid = of.ne(network)
            || of_container.peek().is_some() && {
                let ifname = interface(table, chain, network, id);
                of_container
                    .any(|owner| ifname.as_ref().is_none_or(|ifname| owner.ifname == ifname))
            };
        if !is_valid {
            let comment = entry.value("--comment").unwrap_or_default();
            stale.insert((chain.to_owned(), comment.to_owned()));
        }
    }
    stale
}

/// The entries of containers, with their chain, network and container.
fn container_entries(table: &Table) -> impl Iterator<Item = (&Rule, &str, &str, &str)> {
    table.rules_of(TOP).filter_map(|entry| {
        let (network, id) = parse_comment(entry.value("--comment")?)?;
        let chain = entry.value("-j").filter(|chain| chain.starts_with("CNI-DN-"))?;
        Some((entry, chain, network, id))
    })
}

/// Moves the rules of second interfaces into their containers' chains, the only ones that the reference looks for.
/// Counts chains.
pub(in crate::netfilter) fn join_interfaces(filter: &PacketFilter) -> Result<HandedOver> {
    let mut handed = HandedOver::default();
    for family in Family::BOTH {
        for tables in filter.iptables_with(family, NAT, &[TOP])? {
            let joined = Cell::new(0);
            tables.update(NAT, Scope::All, &|table| joined.set(join(table)))?;
            handed.objects += joined.get();
        }
    }
    Ok(handed)
}

fn join(table: &mut Table) -> usize {
    let mut joined = BTreeSet::new();
    let before = table.clone();
    for (entry, chain, network, id) in container_entries(&before) {
        let common = Owner { network, ifname: "", id }.chain("DN-");
        if chain == common {
            continue;
        }
        table.ensure_chain(&common);
        let moved = |word: &String| if word == chain { common.clone() } else { word.clone() };
        let moved = Rule { chain: TOP.to_owned(), words: entry.words.iter().map(moved).collect() };
        if moved.value("-d").is_some() {
            table.insert_unique(0, moved);
        } else {
            table.append_unique(moved);
        }
        for rule in before.rules_of(chain) {
            table.append_unique(Rule { chain: common.clone(), ..rule.clone() });
        }
        joined.insert(chain);
    }
    for chain in &joined {
        table.uproot_chain(chain);
    }
    joined.len()
}
