//! Mappings as iptables rules: a chain for each container, entered from `CNI-HOSTPORT-DNAT`; names,
//! comments and rules are the reference plugin's (`rules.rs`).
//!
//! The reference has one chain for all interfaces that a container has in a network. Here the
//! second interface gets a chain of its own; a comment at the end of a chain tells its interface. Whose
//! a chain is, the comments of the entries tell, not its name.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use super::kept::{restore, witness};
use super::rules::{
    MASQ, SETMARK, TOP, entries, entries_ahead, entry_comment, interface, marker, parse_comment,
    rules, shared_rules,
};
use super::{Forward, Holder, HostPort, KEPT, Mapping, Options, Snat, Taken, Target};
use crate::cni::ip::host_net;
use crate::error::{Error, Result};
use crate::log;
use crate::netfilter::backend::{Family, PacketFilter};
use crate::netfilter::handover::HandedOver;
use crate::netfilter::iptables::{Draft, Iptables, Rule};
use crate::netfilter::names::Owner;

pub(super) const NAT: &str = "nat";
/// Where an old release of the reference entered its chains for sources.
const OLD_SNAT: &str = "CNI-HOSTPORT-SNAT";

/// Makes the mappings, in one transaction for each family; those that the attachment had before
/// are replaced. A port that another container has is returned. Then, and on failure, the attachment
/// has no mappings.
pub fn add(forward: &Forward<'_>, options: &Options<'_>) -> Result<Option<Taken>> {
    let taken = RefCell::new(None);
    for (at, target) in forward.targets.iter().enumerate() {
        let witness = witness(forward.owner, target.family());
        let is_gone = |draft: &Draft, comment| !draft.rules().iter().any(|r| is_entry(r, comment));
        let plan = |draft: &mut Draft| {
            if witness.as_ref().is_some_and(|comment| is_gone(draft, comment)) {
                restore(draft, target.family(), Some(forward.owner));
            }
            if let Some(port) = taken_port(draft, forward, target) {
                taken.replace(Some(port.clone()));
                return Err(port.into());
            }
            make(draft, forward, target, options);
            Ok(())
        };
        let made = Iptables::require(target.family()).and_then(|tables| {
            let expect = || expected_table(&tables, forward, target, options, witness.as_deref());
            tables.add_expected(NAT, expect, plan)
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
fn expected_table(
    tables: &Iptables,
    forward: &Forward<'_>,
    target: &Target,
    options: &Options<'_>,
    witness: Option<&str>,
) -> Option<Draft> {
    let entries = tables.read_chain(NAT, TOP)?;
    let is_free = |mapping: &Mapping| !entries.rules().iter().any(|e| may_be_of(e, mapping));
    if !forward.mappings_to(target).all(is_free) {
        return None;
    }
    let mut draft = Draft::empty(NAT);
    shared(&mut draft, forward.snat, options);
    if let Some(comment) = witness {
        draft.rules.push(entries.rules().iter().find(|rule| is_entry(rule, comment))?.clone());
    }
    Some(draft)
}

/// Whether an entry rule may be for this port: by what it says, unless that is not understood.
fn may_be_of(entry: &Rule, mapping: &Mapping) -> bool {
    let of_proto = |proto| proto == mapping.proto.to_string();
    if !entry.value("-p").is_none_or(of_proto) {
        return false;
    }
    let is_port = |text: &str| text.parse().map_or(true, |port: u16| port == mapping.host_port);
    entry.value("--dports").is_none_or(|ports| ports.split(',').any(is_port))
}

pub(super) fn make(
    draft: &mut Draft,
    forward: &Forward<'_>,
    target: &Target,
    options: &Options<'_>,
) {
    shared(draft, forward.snat, options);
    let chain = chain_of(draft, forward.owner);
    draft.del_rules(|rule| rule.goes_to(&chain));
    draft.flush_chain(&chain);
    draft.ensure_chain(&chain);
    fill(draft, forward, target, &chain, options);
}

/// Adds the rules of the attachment, to its chain that is empty.
fn fill(
    draft: &mut Draft,
    forward: &Forward<'_>,
    target: &Target,
    chain: &str,
    options: &Options<'_>,
) {
    for rule in rules(forward, target, chain, options) {
        draft.append_unique(rule);
    }
    draft.append_unique(marker(chain, forward.owner.ifname));
    // Behind those of others: of several networks of a container the first serves.
    let ahead = draft.rules().iter().filter(|rule| rule.chain == TOP);
    let ahead = ahead.take_while(|rule| rule.value("-d").is_some()).count();
    for entry in entries_ahead(forward, target, chain, options) {
        draft.insert_behind(ahead, entry);
    }
}

fn take_back(family: Family, owner: Owner<'_>) {
    let undone = Iptables::require(family).and_then(|tables| {
        tables.update(NAT, |draft| {
            let chain = chain_of(draft, owner);
            draft.uproot_chain(&chain);
            Ok(())
        })
    });
    if let Err(error) = undone {
        log::warn(format_args!("take back port mappings: {error}"));
    }
}

/// The objects that all containers share.
fn shared(draft: &mut Draft, snat: Snat, options: &Options<'_>) {
    let ours = options.set_mark_chain.is_none() && snat != Snat::Never;
    if ours {
        draft.ensure_chain(SETMARK);
        draft.ensure_chain(MASQ);
    }
    draft.ensure_chain(TOP);
    let [prerouting, output, setmark, masq, marked] = shared_rules(options);
    draft.append_unique(prerouting);
    draft.append_unique(output);
    if ours {
        draft.append_unique(setmark);
        draft.append_unique(masq);
        draft.insert_unique(marked);
    }
}

/// The attachment's chain, as entries and the marker of an interface tell. Where there is none yet,
/// that of the container, unless another interface has it, or another container: the reference
/// joins the texts of network and container in its name, so that two may have the same.
fn chain_of(draft: &Draft, owner: Owner<'_>) -> String {
    let (common, own) = chains(owner);
    let comment = entry_comment(owner);
    let is_others_interface = |chain: &str| {
        let own_marker = marker(chain, owner.ifname);
        let mut rules = draft.rules().iter().filter(|rule| rule.chain == chain);
        rules.any(|rule| interface(rule).is_some() && *rule != own_marker)
    };
    let is_mine =
        |chain: &&str| !is_others_interface(chain) && !is_anothers(draft, chain, &comment);
    let entries = draft.rules().iter().filter(|rule| is_entry(rule, &comment));
    if let Some(chain) = entries.filter_map(|entry| entry.value("-j")).find(is_mine) {
        return chain.to_owned();
    }
    if draft.has_chain(&own) || !is_mine(&common.as_str()) { own } else { common }
}

fn is_entry(rule: &Rule, comment: &str) -> bool {
    rule.chain == TOP && rule.value("--comment") == Some(comment)
}

/// Whether an entry of another container leads to the chain.
fn is_anothers(draft: &Draft, chain: &str, comment: &str) -> bool {
    let mut entries = draft.rules().iter().filter(|r| r.chain == TOP && r.goes_to(chain));
    entries.any(|entry| !is_entry(entry, comment))
}

/// Deletes the entries of this comment to the chain, and the chain unless others lead to it.
fn remove_chain(draft: &mut Draft, chain: &str, comment: &str) {
    draft.del_rules(|rule| is_entry(rule, comment) && rule.goes_to(chain));
    if !is_anothers(draft, chain, comment) {
        draft.uproot_chain(chain);
    }
}

/// The container's chain by the reference's name, and the one for an interface beside its first.
fn chains(owner: Owner<'_>) -> (String, String) {
    let id = format!("/{}/{}", owner.id, owner.ifname);
    (owner.chain("DN-"), Owner { id: &id, ..owner }.chain("DN-"))
}

/// Whether this is the same container in another network. Runtimes ask for its ports in each
/// (`podman network connect`); the chain that is entered first serves them.
fn is_in_another(owner: Owner<'_>, network: &str, id: &str) -> bool {
    id == owner.id && network != owner.network
}

/// A port that the chain of another container has.
pub(super) fn taken_port(draft: &Draft, forward: &Forward<'_>, target: &Target) -> Option<Taken> {
    let own = chain_of(draft, forward.owner);
    let others = || {
        let dnat = draft.rules().iter().filter(|rule| rule.goes_to("DNAT"));
        dnat.filter(|rule| rule.chain.starts_with("CNI-DN-") && rule.chain != own)
    };
    for mapping in forward.mappings_to(target) {
        let port = mapping.host_port.to_string();
        let proto = mapping.proto.to_string();
        let addr = mapping.address().map(|addr| host_net(addr).to_string());
        let same = |rule: &&Rule| {
            rule.value("--dport") == Some(&port)
                && rule.value("-p") == Some(&proto)
                && rule.value("-d") == addr.as_deref()
        };
        if let Some(other) = others().find(same) {
            let entry = draft.rules().iter().find(|r| r.chain == TOP && r.goes_to(&other.chain));
            // A chain that nothing leads to maps nothing.
            let Some(entry) = entry else { continue };
            let owner = entry.value("--comment").and_then(parse_comment);
            if owner.is_some_and(|(network, id)| is_in_another(forward.owner, network, id)) {
                continue;
            }
            let port = HostPort(mapping.address(), mapping.host_port, mapping.proto);
            return Some(Taken { port, by: holder(draft, owner, &other.chain) });
        }
    }
    None
}

/// Who has a chain, by the network and container that lead to it and the interface in its rules.
fn holder(draft: &Draft, owner: Option<(&str, &str)>, chain: &str) -> Holder {
    let (network, id) = owner.unwrap_or_default();
    let ifname = draft.rules().iter().filter(|rule| rule.chain == chain).find_map(interface);
    Holder {
        network: network.to_owned(),
        id: id.to_owned(),
        ifname: ifname.map(ToOwned::to_owned),
        comment: format!("chain {chain}"),
        ..Holder::default()
    }
}

/// Deletes what the attachment has, whichever flavour of iptables made it; tells where it led UDP
/// to. What ADD was told, where it is known, saves looking for it.
pub fn del(
    filter: &PacketFilter,
    owner: Owner<'_>,
    told: Option<(&Forward<'_>, &Options<'_>)>,
) -> Result<BTreeSet<IpAddr>> {
    let (common, own) = chains(owner);
    // Of a second interface, by the release before.
    let former = Owner { id: &format!("{}{}", owner.id, owner.ifname), ..owner }.chain("DN-");
    let mut servers = BTreeSet::new();
    for family in Family::BOTH {
        let mut programs = Vec::new();
        for chain in [&common, &own, &former] {
            if programs.is_empty() {
                programs = filter.iptables_with(family, NAT, chain)?;
            }
        }
        let expected =
            || told.and_then(|(forward, options)| expected_chain(family, forward, options));
        for program in programs {
            let served = RefCell::default();
            let plan = |draft: &mut Draft| {
                served.replace(plan_del(draft, owner));
                Ok(())
            };
            match &expected() {
                Some(expected) => program.delete_expected(expected, plan)?,
                None => program.delete_expected(&Draft::empty(NAT), plan)?,
            }
            servers.extend(served.into_inner());
        }
    }
    Ok(servers)
}

fn plan_del(draft: &mut Draft, owner: Owner<'_>) -> Vec<IpAddr> {
    let chain = chain_of(draft, owner);
    let mine = draft.rules().iter().filter(|rule| rule.chain == chain);
    let udp = mine.filter(|rule| rule.value("-p") == Some("udp"));
    let to = udp.filter_map(|rule| rule.value("--to-destination")?.parse().ok());
    let served = to.map(|to: SocketAddr| to.ip()).collect();
    // By its words, which tell the interface: the chain may be another one's by now.
    draft.del(&marker(&chain, owner.ifname));
    remove_chain(draft, &chain, &entry_comment(owner));
    // One that the reference made for two containers.
    let (common, _) = chains(owner);
    if is_anothers(draft, &common, &entry_comment(owner)) {
        remove_chain(draft, &common, &entry_comment(owner));
    }
    if draft.has_chain(OLD_SNAT) {
        draft.uproot_chain(&owner.chain("SN-"));
    }
    served
}

/// The table with nothing but what ADD made of the attachment's first interface.
fn expected_chain(family: Family, forward: &Forward<'_>, options: &Options<'_>) -> Option<Draft> {
    let target = forward.targets.iter().find(|target| target.family() == family)?;
    let (chain, _) = chains(forward.owner);
    let mut draft = Draft::empty(NAT);
    draft.ensure_chain(&chain);
    fill(&mut draft, forward, target, &chain, options);
    draft.rules().iter().any(|rule| rule.chain == TOP).then_some(draft)
}

/// Verifies every rule of the attachment and those that all share.
pub fn check(forward: &Forward<'_>, options: &Options<'_>) -> Result<()> {
    for target in forward.targets {
        let tables = Iptables::require(target.family())?;
        let draft = tables.read(NAT)?;
        let chain = chain_of(&draft, forward.owner);
        if !draft.has_chain(&chain) {
            let error = Error::internal(format!("chain {chain} not found in iptables table nat"));
            return Err(error.with_details(KEPT.remedy(forward.owner, None)));
        }
        let missing = missing(&draft, forward, target, options, |rule| tables.has(&draft, rule))?;
        if let Some(rule) = missing {
            let words = rule.words().join(" ");
            let msg = format!("rule {words} in chain {} not found in table nat", rule.chain);
            let error = Error::internal(msg);
            return Err(error.with_details(KEPT.remedy(forward.owner, None)));
        }
    }
    Ok(())
}

/// The first rule of the attachment, or shared by all, that is not there.
pub(super) fn missing(
    draft: &Draft,
    forward: &Forward<'_>,
    target: &Target,
    options: &Options<'_>,
    has: impl Fn(&Rule) -> Result<bool>,
) -> Result<Option<Rule>> {
    let chain = chain_of(draft, forward.owner);
    let conditional = !options.conditions(target.family()).is_empty();
    for rule in expected(draft, forward, target, &chain, options) {
        // iptables-save may write conditions in other words.
        let there = if conditional && rule.chain == TOP {
            draft.rules().iter().any(|r| r.chain == TOP && r.goes_to(&chain))
        } else {
            has(&rule)?
        };
        if !there {
            return Ok(Some(rule));
        }
    }
    Ok(None)
}

/// What is to be there: of what the reference made, its own rules.
fn expected(
    draft: &Draft,
    forward: &Forward<'_>,
    target: &Target,
    chain: &str,
    options: &Options<'_>,
) -> Vec<Rule> {
    let [prerouting, output, setmark, masq, marked] = shared_rules(options);
    let mut all = vec![prerouting, output];
    if options.set_mark_chain.is_none() && forward.snat != Snat::Never {
        all.extend([setmark, masq, marked]);
    }
    all.extend(rules(forward, target, chain, options));
    if draft.has(&marker(chain, forward.owner.ifname)) {
        all.extend(entries_ahead(forward, target, chain, options));
    }
    all
}

/// Deletes the chains of a network whose attachments are not among `valid`.
pub fn collect(filter: &PacketFilter, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    for family in Family::BOTH {
        for program in filter.iptables_with(family, NAT, TOP)? {
            program.update(NAT, |draft| {
                for (chain, comment) in stale(draft, network, valid) {
                    remove_chain(draft, &chain, &comment);
                }
                let [prerouting, output] = entries();
                draft.leave_one(&prerouting);
                draft.leave_one(&output);
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// The stale chains and the comments of the entries that lead there.
fn stale(draft: &Draft, network: &str, valid: &[Owner<'_>]) -> BTreeSet<(String, String)> {
    let mut stale = BTreeSet::new();
    for entry in draft.rules().iter().filter(|rule| rule.chain == TOP) {
        let Some(comment) = entry.value("--comment") else { continue };
        let Some((of, id)) = parse_comment(comment) else { continue };
        let Some(chain) = entry.value("-j") else { continue };
        // The reference's rules do not tell the interface.
        let ifname = draft.rules().iter().filter(|r| r.chain == chain).find_map(interface);
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
        let programs = filter.iptables_with(family, NAT, TOP)?;
        if programs.is_empty() && filter.has_chain(family, NAT, TOP)? {
            log::warn(format_args!(
                "port mappings in iptables are not looked at: no iptables-restore in PATH. Those of a \
                 container's second interface in one network stay until {TOP} is emptied"
            ));
        }
        for program in programs {
            let before = count.get();
            program.update(NAT, |draft| {
                count.set(before + join(draft));
                Ok(())
            })?;
        }
    }
    Ok(HandedOver::all(count.get()))
}

fn join(draft: &mut Draft) -> usize {
    let mut joined: Vec<String> = Vec::new();
    for entry in draft.rules().to_vec().iter().filter(|rule| rule.chain == TOP) {
        let Some(chain) = entry.value("-j").filter(|chain| chain.starts_with("CNI-DN-")) else {
            continue;
        };
        let Some((network, id)) = entry.value("--comment").and_then(parse_comment) else {
            continue;
        };
        let common = Owner { network, ifname: "", id }.chain("DN-");
        if chain == common {
            continue;
        }
        draft.ensure_chain(&common);
        let entry = entry.redirected(&common);
        if entry.value("-d").is_some() {
            draft.insert_unique(entry);
        } else {
            draft.append_unique(entry);
        }
        draft.del_rules(|rule| rule.chain == common && interface(rule).is_some());
        let mut own = draft.rules().to_vec();
        own.retain(|rule| rule.chain == chain && interface(rule).is_none());
        for rule in own {
            draft.append_unique(Rule::new(&common, rule.words()));
        }
        if !joined.iter().any(|known| known == chain) {
            joined.push(chain.to_owned());
        }
    }
    for chain in &joined {
        draft.uproot_chain(chain);
    }
    joined.len()
}
