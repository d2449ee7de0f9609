//! Mappings as iptables rules: a chain for each container, entered from `CNI-HOSTPORT-DNAT`; names,
//! comments and rules are the reference plugin's (`rules.rs`).
//!
//! The reference has one chain for all interfaces that a container has in a network. Here the
//! second interface gets a chain of its own; a comment at the end of a chain tells its interface. The
//! comments of the entries tell the owner of a chain, its name does not.

mod rules;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

use self::rules::{
    MASQ, SETMARK, TOP, entries, entries_ahead, entry_comment, interface, marker, parse_comment,
    rules, shared_rules,
};
pub use self::rules::{Options, Wanted};
use super::{Forward, Holder, HostPort, KEPT, Mapping, Record, Taken};
use crate::cni::ip::host_net;
use crate::error::{Error, Result};
use crate::log;
use crate::netfilter::backend::{Backend, Family, PacketFilter};
use crate::netfilter::handed_over::HandedOver;
use crate::netfilter::iptables::{Iptables, Records, Rule, Table};
use crate::netfilter::names::Owner;

const NAT: &str = "nat";
/// Where an old release of the reference entered its chains for sources.
const OLD_SNAT: &str = "CNI-HOSTPORT-SNAT";

/// For [`crate::netfilter::heal`]. A port that another container has meanwhile is left to it.
pub const RECORDS: Records<Record<'static>> = Records {
    kept: KEPT,
    table: NAT,
    is_of: |record, family| {
        let mut targets = record.targets.iter();
        record.backend == Backend::Iptables && targets.any(|target| target.family() == family)
    },
    restore: |table, family, kept| {
        let Some(options) = &kept.content.options else { return };
        let forward = kept.content.forward(kept.owner());
        for wanted in Wanted::each(&forward, options) {
            let has = |rule: &Rule| Ok(table.has(rule) || table.unreadable.contains(&rule.chain));
            let is_whole = |table| missing(table, wanted, has).is_ok_and(|m| m.is_none());
            let is_of_family = wanted.target.family() == family;
            if is_of_family && !is_whole(table) && taken_port(table, wanted).is_none() {
                make(table, wanted);
            }
        }
    },
};

/// Makes the mappings, in one transaction for each family; earlier mappings of the attachment
/// are replaced. A port that another container has is returned. Then, and on failure, the attachment
/// has no mappings.
pub fn add(forward: &Forward<'_>, options: &Options<'_>) -> Result<Option<Taken>> {
    let taken = RefCell::new(None);
    for (at, wanted) in Wanted::each(forward, options).into_iter().enumerate() {
        let family = wanted.target.family();
        let witness = RECORDS.another(forward.owner, family);
        let witness = witness.map(|kept| entry_comment(kept.owner()));
        let is_gone = |table: &Table, comment| !table.rules.iter().any(|r| is_entry(r, comment));
        let plan = |table: &mut Table| {
            if witness.as_ref().is_some_and(|comment| is_gone(table, comment)) {
                RECORDS.restore(table, family, Some(forward.owner));
            }
            match taken_port(table, wanted) {
                Some(port) => {
                    taken.replace(Some(port.clone()));
                    table.refuse(port.into());
                }
                None => make(table, wanted),
            }
        };
        let made = Iptables::require(family).and_then(|tables| {
            let expect = || expected_table(&tables, wanted, witness.as_deref());
            tables.add_expected(NAT, expect, &plan)
        });
        if let Err(error) = made {
            for earlier in &forward.targets[..at] {
                take_back(earlier.family(), forward.owner);
            }
            return taken.into_inner().map_or(Err(error), |taken| Ok(Some(taken)));
        }
    }
    Ok(None)
}

/// What all containers share, if no other one has a port of these by the rules that lead to them.
fn expected_table(tables: &Iptables, wanted: Wanted<'_>, witness: Option<&str>) -> Option<Table> {
    let entries = tables.read_chain(NAT, TOP)?;
    let ports = wanted.mappings().map(|m| (m.proto.to_string(), m.host_port)).collect();
    if entries.rules.iter().any(|entry| may_be_of(entry, &ports)) {
        return None;
    }
    let mut table = Table::empty(NAT);
    shared(&mut table, wanted);
    if let Some(comment) = witness {
        table.rules.push(entries.rules.iter().find(|rule| is_entry(rule, comment))?.clone());
    }
    Some(table)
}

/// Whether an entry rule may be for one of these ports: by what it says, unless that is not understood.
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

fn make(table: &mut Table, wanted: Wanted<'_>) {
    shared(table, wanted);
    let chain = chain_of(table, wanted.forward.owner);
    table.del_rules(|rule| rule.goes_to(&chain));
    table.flush_chain(&chain);
    table.ensure_chain(&chain);
    fill(table, wanted, &chain);
}

/// Adds the rules of the attachment, to its chain that is empty.
fn fill(table: &mut Table, wanted: Wanted<'_>, chain: &str) {
    table.append_all_unique(rules(wanted, chain));
    table.append_unique(marker(chain, wanted.forward.owner.ifname));
    // Behind those of others: of several networks of a container the first serves.
    let ahead = table.rules_of(TOP).take_while(|rule| rule.value("-d").is_some()).count();
    for entry in entries_ahead(wanted, chain) {
        table.insert_behind(ahead, entry);
    }
}

fn take_back(family: Family, owner: Owner<'_>) {
    let undone = Iptables::require(family).and_then(|tables| {
        tables.update(NAT, &|table| table.uproot_chain(&chain_of(table, owner)))
    });
    if let Err(error) = undone {
        log::warn(format_args!("take back port mappings: {error}"));
    }
}

/// The objects that all containers share.
fn shared(table: &mut Table, wanted: Wanted<'_>) {
    if wanted.masquerades() {
        table.ensure_chain(SETMARK);
        table.ensure_chain(MASQ);
    }
    table.ensure_chain(TOP);
    let [prerouting, output, setmark, masq, marked] = shared_rules(wanted.options);
    table.append_unique(prerouting);
    table.append_unique(output);
    if wanted.masquerades() {
        table.append_unique(setmark);
        table.append_unique(masq);
        table.insert_unique(marked);
    }
}

/// The attachment's chain, as entries and the marker of an interface tell. Where there is none yet,
/// the container's chain, unless another interface or another container has it: the reference
/// joins the texts of network and container in the name, so that two containers may have the same.
fn chain_of(table: &Table, owner: Owner<'_>) -> String {
    let (common, own) = chains(owner);
    let comment = entry_comment(owner);
    let is_others_interface = |chain: &str| {
        let own_marker = marker(chain, owner.ifname);
        table.rules_of(chain).any(|rule| interface(rule).is_some() && *rule != own_marker)
    };
    let is_mine =
        |chain: &&str| !is_others_interface(chain) && !is_anothers(table, chain, &comment);
    let entries = table.rules.iter().filter(|rule| is_entry(rule, &comment));
    if let Some(chain) = entries.filter_map(|entry| entry.value("-j")).find(is_mine) {
        return chain.to_owned();
    }
    if table.has_chain(&own) || !is_mine(&common.as_str()) { own } else { common }
}

fn is_entry(rule: &Rule, comment: &str) -> bool {
    rule.chain == TOP && rule.value("--comment") == Some(comment)
}

/// Whether an entry of another container leads to the chain.
fn is_anothers(table: &Table, chain: &str, comment: &str) -> bool {
    table.rules_of(TOP).any(|entry| entry.goes_to(chain) && !is_entry(entry, comment))
}

/// Deletes the entries of this comment to the chain, and the chain unless others lead to it.
fn remove_chain(table: &mut Table, chain: &str, comment: &str) {
    table.del_rules(|rule| is_entry(rule, comment) && rule.goes_to(chain));
    if !is_anothers(table, chain, comment) {
        table.uproot_chain(chain);
    }
}

/// The container's chain by the reference's name, and the one for an interface beside its first.
fn chains(owner: Owner<'_>) -> (String, String) {
    let id = format!("/{}/{}", owner.id, owner.ifname);
    (owner.chain("DN-"), Owner { id: &id, ..owner }.chain("DN-"))
}

/// A port that the chain of another container has.
fn taken_port(table: &Table, wanted: Wanted<'_>) -> Option<Taken> {
    let owner = wanted.forward.owner;
    let own = chain_of(table, owner);
    let asked: HashMap<_, _> = wanted.mappings().map(|m| (words_of(m), m)).collect();
    let is_others = |rule: &&Rule| {
        rule.goes_to("DNAT") && rule.chain.starts_with("CNI-DN-") && rule.chain != own
    };
    for rule in table.rules.iter().filter(is_others) {
        let words = ["-p", "--dport", "-d"].map(|option| rule.value(option).map(str::to_owned));
        let Some(mapping) = asked.get(&words) else { continue };
        let chain = &rule.chain;
        // A chain that nothing leads to maps nothing.
        let Some(entry) = table.rules_of(TOP).find(|entry| entry.goes_to(chain)) else { continue };
        let holds = entry.value("--comment").and_then(parse_comment);
        // Runtimes ask for the ports of a container in each of its networks (`podman network
        // connect`); the chain that is entered first serves them.
        if holds.is_some_and(|(network, id)| id == owner.id && network != owner.network) {
            continue;
        }
        let port = HostPort(mapping.address(), mapping.host_port, mapping.proto);
        let (network, id) = holds.unwrap_or_default();
        let ifname = table.rules_of(chain).find_map(interface);
        let by = Holder {
            network: network.to_owned(),
            id: id.to_owned(),
            ifname: ifname.map(ToOwned::to_owned),
            comment: format!("chain {chain}"),
            ..Holder::default()
        };
        return Some(Taken { port, by });
    }
    None
}

/// Protocol, port and address as the rule of a mapping has them.
fn words_of(mapping: &Mapping) -> [Option<String>; 3] {
    let (proto, port) = (mapping.proto.to_string(), mapping.host_port.to_string());
    let addr = mapping.address().map(|addr| host_net(addr).to_string());
    [Some(proto), Some(port), addr]
}

/// Deletes what the attachment has, whichever flavour of iptables made it; returns the addresses
/// that it led UDP to. What ADD was `told`, where it is known, saves looking for it.
pub fn del(
    filter: &PacketFilter,
    owner: Owner<'_>,
    told: &[Wanted<'_>],
) -> Result<BTreeSet<IpAddr>> {
    let (common, own) = chains(owner);
    let mut servers = BTreeSet::new();
    for family in Family::BOTH {
        let found = filter.iptables_with(family, NAT, &[&common, &own])?;
        if found.is_empty() {
            continue;
        }
        let told = told.iter().find(|wanted| wanted.target.family() == family);
        let expected = told.and_then(|told| expected_chain(*told));
        let expected = expected.unwrap_or_else(|| Table::empty(NAT));
        for programs in found {
            let served = RefCell::default();
            programs.delete_expected(&expected, &|table| {
                served.replace(plan_del(table, owner));
            })?;
            servers.extend(served.into_inner());
        }
    }
    Ok(servers)
}

fn plan_del(table: &mut Table, owner: Owner<'_>) -> Vec<IpAddr> {
    let chain = chain_of(table, owner);
    let udp = table.rules_of(&chain).filter(|rule| rule.value("-p") == Some("udp"));
    let to = udp.filter_map(|rule| rule.value("--to-destination")?.parse().ok());
    let served = to.map(|to: SocketAddr| to.ip()).collect();
    // By its words, which tell the interface: the chain may be another one's by now.
    table.del_rules(|rule| *rule == marker(&chain, owner.ifname));
    remove_chain(table, &chain, &entry_comment(owner));
    // A chain that the reference made for two containers.
    let (common, _) = chains(owner);
    if is_anothers(table, &common, &entry_comment(owner)) {
        remove_chain(table, &common, &entry_comment(owner));
    }
    if table.has_chain(OLD_SNAT) {
        table.uproot_chain(&owner.chain("SN-"));
    }
    served
}

/// The table with nothing but what ADD made of the attachment's first interface.
fn expected_chain(wanted: Wanted<'_>) -> Option<Table> {
    let (chain, _) = chains(wanted.forward.owner);
    let mut table = Table::empty(NAT);
    table.ensure_chain(&chain);
    fill(&mut table, wanted, &chain);
    let has_entries = table.rules_of(TOP).next().is_some();
    has_entries.then_some(table)
}

/// Verifies every rule of the attachment and the rules that all attachments share.
pub fn check(forward: &Forward<'_>, options: &Options<'_>) -> Result<()> {
    for wanted in Wanted::each(forward, options) {
        let tables = Iptables::require(wanted.target.family())?;
        let table = tables.read(NAT)?;
        let chain = chain_of(&table, forward.owner);
        let missing = if table.has_chain(&chain) {
            missing(&table, wanted, |rule| tables.has(&table, rule))?.map(|rule| {
                let (words, chain) = (rule.words.join(" "), rule.chain);
                format!("rule {words} in chain {chain} not found in table nat")
            })
        } else {
            Some(format!("chain {chain} not found in iptables table nat"))
        };
        if let Some(missing) = missing {
            let remedy = KEPT.remedy(forward.owner, None);
            return Err(Error::internal(missing).with_details(remedy));
        }
    }
    Ok(())
}

/// The first rule of the attachment, or shared by all, that is not there; of what the reference
/// made, of its own rules.
fn missing(
    table: &Table,
    wanted: Wanted<'_>,
    has: impl Fn(&Rule) -> Result<bool>,
) -> Result<Option<Rule>> {
    let chain = chain_of(table, wanted.forward.owner);
    let shared = if wanted.masquerades() { 5 } else { 2 };
    let mut all: Vec<Rule> = shared_rules(wanted.options).into_iter().take(shared).collect();
    all.extend(rules(wanted, &chain));
    if table.has(&marker(&chain, wanted.forward.owner.ifname)) {
        all.extend(entries_ahead(wanted, &chain));
    }
    let present: HashSet<&Rule> = table.rules.iter().collect();
    for rule in all {
        // iptables-save may write conditions in other words.
        let there = if !wanted.conditions().is_empty() && rule.chain == TOP {
            table.rules_of(TOP).any(|rule| rule.goes_to(&chain))
        } else {
            present.contains(&rule) || has(&rule)?
        };
        if !there {
            return Ok(Some(rule));
        }
    }
    Ok(None)
}

/// Deletes the chains of a network whose attachments are not among `valid`.
pub fn collect(filter: &PacketFilter, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    filter.delete_with_iptables(NAT, &[TOP], &|_| Table::empty(NAT), &|table, _| {
        for (chain, comment) in stale(table, network, valid) {
            remove_chain(table, &chain, &comment);
        }
        for entry in &entries() {
            table.leave_one(entry);
        }
    })
}

/// The stale chains and the comments of the entries that lead there.
fn stale(table: &Table, network: &str, valid: &[Owner<'_>]) -> BTreeSet<(String, String)> {
    let mut stale = BTreeSet::new();
    for entry in table.rules_of(TOP) {
        let Some(comment) = entry.value("--comment") else { continue };
        let Some((of, id)) = parse_comment(comment) else { continue };
        let Some(chain) = entry.value("-j") else { continue };
        // The reference's rules do not tell the interface.
        let ifname = table.rules_of(chain).find_map(interface);
        let is_valid = |owner: &Owner<'_>| {
            owner.id == id && ifname.is_none_or(|ifname| owner.ifname == ifname)
        };
        if of == network && !valid.iter().any(is_valid) && chain.starts_with("CNI-DN-") {
            stale.insert((chain.to_owned(), comment.to_owned()));
        }
    }
    stale
}

/// Moves the rules of second interfaces into their containers' chains, the only ones that the
/// reference looks for; how many chains that were.
pub(in crate::netfilter) fn join_interfaces(filter: &PacketFilter) -> Result<HandedOver> {
    let count = Cell::new(0);
    for family in Family::BOTH {
        let programs = filter.iptables_with(family, NAT, &[TOP])?;
        if programs.is_empty() && filter.has_chain(family, NAT, &[TOP])? {
            log::warn(format_args!(
                "port mappings in iptables are not looked at: no iptables-restore in PATH. Those of a \
                 container's second interface in one network stay until {TOP} is emptied"
            ));
        }
        for program in programs {
            let before = count.get();
            program.update(NAT, &|table| count.set(before + join(table)))?;
        }
    }
    Ok(HandedOver::all(count.get()))
}

fn join(table: &mut Table) -> usize {
    let mut joined = BTreeSet::new();
    for entry in table.rules_of(TOP).cloned().collect::<Vec<_>>() {
        let chain = entry.value("-j").filter(|chain| chain.starts_with("CNI-DN-"));
        let owner = entry.value("--comment").and_then(parse_comment);
        let Some((chain, (network, id))) = chain.zip(owner) else { continue };
        let common = Owner { network, ifname: "", id }.chain("DN-");
        if chain == common {
            continue;
        }
        table.ensure_chain(&common);
        let moved = entry.redirected(&common);
        if moved.value("-d").is_some() {
            table.insert_unique(moved);
        } else {
            table.append_unique(moved);
        }
        table.del_rules(|rule| rule.chain == common && interface(rule).is_some());
        let own = table.rules_of(chain).filter(|rule| interface(rule).is_none());
        for rule in own.cloned().collect::<Vec<_>>() {
            table.append_unique(Rule { chain: common.clone(), ..rule });
        }
        joined.insert(chain.to_owned());
    }
    for chain in &joined {
        table.uproot_chain(chain);
    }
    joined.len()
}
