//! Filter rules in iptables: the chains and rules of the reference plugin, word for word, so that either
//! implementation can delete the rules of the other.
//!
//! Those rules do not identify their owner. Additional chains that no rule jumps to record the owners:
//!
//! | chain | rules |
//! | --- | --- |
//! | `CNIBOX-FIREWALL` | `-s <address>` with the attachment's comment, for each address |
//! | `CNIBOX-FW-<bridge>` | the comment of the network whose policy the bridge has |
//!
//! A recorded owner is valid unless a lease assigns the address to another container: the reference ignores these
//! chains, and leaves the owner of an address that it deletes.
//!
//! Each family is changed by one transaction per verb. If two ADDs create the same chain, the transaction of the
//! second one fails, and is planned again.

mod words;

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::Path;

use nix::errno::Errno;

pub use self::words::DEFAULT_ADMIN;
use self::words::{
    BRIDGE_OWNER, CHAINS, CNI_FORWARD, FORWARD, OWNERS, PUBLISHED, STAGE_1, STAGE_2, address_rules,
    bridge_rules, is_about, marker, owner_rule, published_rule, stage_ends, to_chains,
    to_cni_forward, to_stage_1, translated_rule,
};
use super::{KEPT, Pod, Policy, missing, nft};
use crate::attachment::{Keepsake, Record};
use crate::cni::ip::host_net;
use crate::error::{Error, Result};
use crate::leases;
use crate::log;
use crate::netfilter::backend::{Backend, Family, PacketFilter};
use crate::netfilter::iptables::{Flavour, Records, Rule, Scope, Table, program};
use crate::netfilter::names::{Owner, identity, network_hash, network_label, stale};
use crate::netfilter::shared::{instance, is_of_dead, others};
use crate::netlink::nftables::Nft;

const FILTER: &str = "filter";

/// For [`super::super::heal`].
pub(in crate::netfilter) const RECORDS: Records<Pod> = Records {
    kept: KEPT,
    table: FILTER,
    is_of: is_in,
    restore: |table, family, kept| create(table, kept.owner(), &kept.content, family),
};

/// Whether the attachment has rules in this family's table.
fn is_in(pod: &Pod, family: Family) -> bool {
    pod.backend == Backend::Iptables && !ips_of(&pod.ips, family).is_empty()
}

/// Creates the rules, one family after the other.
pub(super) fn add(filter: &PacketFilter, owner: Owner<'_>, pod: &Pod) -> Result<()> {
    if let Some(nft) = filter.nft_if_present()?.filter(|_| !pod.ports.is_empty()) {
        isolate(nft, owner, pod)?;
    }
    for family in families(pod) {
        // The rules of another attachment, whose absence shows a flush.
        let witness = RECORDS.another(owner, family);
        let witness = witness.map(|kept| rules(&kept.content, family)).unwrap_or_default();
        let plan = |table: &mut Table| {
            if witness.iter().any(|rule| !table.has(rule)) {
                RECORDS.restore(table, family, Some(owner));
            }
            create(table, owner, pod, family);
        };
        with_scope(pod.admin.as_deref(), pod.bridge.as_deref(), &|scope| {
            filter.iptables(family)?.update(FILTER, scope, &plan)
        })?;
    }
    Ok(())
}

/// Calls a function with all chains that the rules of an attachment are in.
fn with_scope<T>(admin: Option<&str>, bridge: Option<&str>, call: &dyn Fn(Scope<'_>) -> T) -> T {
    let marker = marker(bridge.unwrap_or_default());
    let mut chains = vec![FORWARD, CNI_FORWARD, STAGE_1, STAGE_2, OWNERS, &marker];
    chains.extend(admin);
    call(Scope::of(&chains))
}

/// The attachment's rules in a family, without those that all attachments share.
fn rules(pod: &Pod, family: Family) -> Vec<Rule> {
    let mut rules = Vec::new();
    if pod.admin.is_some() {
        let ips = ips_of(&pod.ips, family);
        rules.extend(ips.iter().copied().flat_map(address_rules));
        rules.extend(ips.into_iter().filter(|_| pod.published).map(published_rule));
    }
    rules.extend(policy_rules(pod));
    rules
}

/// Isolates the ports if the kernel supports bridge tables with the required expressions.
fn isolate(nft: &Nft, owner: Owner<'_>, pod: &Pod) -> Result<()> {
    match nft::isolate(nft, owner, pod) {
        Err(error) if error.errno() == Some(Errno::EOPNOTSUPP) => {
            log::warn(format_args!(
                "firewall: {error}: frames that are not IP pass between isolated containers of a bridge"
            ));
            Ok(())
        }
        outcome => Ok(outcome?),
    }
}

/// Adds the chains of the reference and the rules that jump to them.
fn shared(table: &mut Table, admin: &str) {
    for chain in [CNI_FORWARD, admin] {
        table.ensure_chain(chain);
    }
    for jump in to_chains(admin) {
        table.insert_unique(0, jump);
    }
}

/// The families of the attachment's addresses.
fn families(pod: &Pod) -> impl Iterator<Item = Family> {
    Family::BOTH.into_iter().filter(|family| !ips_of(&pod.ips, *family).is_empty())
}

fn ips_of(ips: &[IpAddr], family: Family) -> Vec<IpAddr> {
    ips.iter().copied().filter(|ip| Family::of(*ip) == family).collect()
}

/// Adds the rules of one family.
fn create(table: &mut Table, owner: Owner<'_>, pod: &Pod, family: Family) {
    if let Some(admin) = &pod.admin {
        shared(table, admin);
        table.ensure_chain(OWNERS);
        let (ips, owns) = (ips_of(&pod.ips, family), owner.matcher());
        let own = table.rules_of(OWNERS).filter(|rule| owns(rule.value("--comment")));
        let former: Vec<_> = own.filter_map(address).filter(|ip| !ips.contains(ip)).collect();
        remove(table, &former);
        for ip in ips {
            table.del_rules(|rule| {
                let label = rule.value("--comment").unwrap_or_default();
                is_owner_of(rule, ip) && (is_of_dead(Some(label)) || is_leased_to_other(ip, label))
            });
            let [of_owner, to, from, published] = rules_of(ip, owner);
            let published = pod.published.then_some(published);
            for rule in [of_owner, to, from].into_iter().chain(published) {
                table.append_unique(rule);
            }
        }
    }
    plan_policy(table, owner.network, pod);
}

/// All rules of an address.
fn rules_of(ip: IpAddr, owner: Owner<'_>) -> [Rule; 4] {
    let [to, from] = address_rules(ip);
    [owner_rule(ip, owner), to, from, published_rule(ip)]
}

fn is_owner_of(rule: &Rule, ip: IpAddr) -> bool {
    rule.chain == OWNERS && rule.value("-s") == Some(&host_net(ip).to_string())
}

/// Changes the policy of the bridge, unless it belongs to another network.
fn plan_policy(table: &mut Table, network: &str, pod: &Pod) {
    let Some(bridge) = &pod.bridge else { return };
    let marker = marker(bridge);
    let is_foreign = table.rules_of(&marker).any(|rule| !is_of(rule, network));
    let mut rules = bridge_rules(bridge, pod.policy);
    rules.extend(translated_rule(bridge, pod.policy));
    if !is_foreign && (table.has_chain(&marker) || pod.policy != Policy::Open) {
        table.del_rules(|rule| is_about(rule, bridge) && !rules.contains(rule));
    }
    if pod.policy == Policy::Open {
        if !is_foreign {
            table.del_chain(&marker);
        }
        return;
    }
    table.ensure_chain(&marker);
    if !is_foreign {
        table.append_unique(Rule::new(&marker).comment(&network_label(network)));
    }
    create_policy(table, bridge, pod.policy);
    if let Some(rule) = translated_rule(bridge, pod.policy).filter(|_| pod.published) {
        table.insert_unique(0, rule);
    }
}

fn create_policy(table: &mut Table, bridge: &str, policy: Policy) {
    for chain in [STAGE_1, STAGE_2] {
        table.ensure_chain(chain);
    }
    table.insert_unique(0, to_stage_1());
    for rule in bridge_rules(bridge, policy) {
        table.insert_unique(0, rule);
    }
    for end in stage_ends() {
        table.append_unique(end);
    }
}

pub(super) fn check(filter: &PacketFilter, owner: Owner<'_>, pod: &Pod) -> Result<()> {
    // The reference does not isolate ports.
    if KEPT.exists(&owner.instance())
        && let Some(nft) = filter.nft_if_present()?
    {
        nft::check(nft, owner, pod)?;
    }
    for family in families(pod) {
        let table = with_scope(pod.admin.as_deref(), pod.bridge.as_deref(), &|scope| {
            filter.iptables(family)?.read(FILTER, scope)
        })?;
        let jumps = pod.admin.iter().flat_map(|admin| to_chains(admin));
        if let Some(rule) = jumps.chain(rules(pod, family)).find(|rule| !table.has(rule)) {
            return Err(missing(owner, KEPT, &describe(&rule)));
        }
    }
    Ok(())
}

/// All rules of a policy.
fn policy_rules(pod: &Pod) -> Vec<Rule> {
    match &pod.bridge {
        Some(bridge) if pod.policy != Policy::Open => {
            let mut rules = vec![to_stage_1()];
            rules.extend(bridge_rules(bridge, pod.policy));
            rules.extend(translated_rule(bridge, pod.policy).filter(|_| pod.published));
            rules.extend(stage_ends());
            rules
        }
        _ => Vec::new(),
    }
}

/// The reference's description of a rule: its chain unless that is obvious, and its arguments.
fn describe(rule: &Rule) -> String {
    let words = rule.words.join(" ");
    match rule.chain.as_str() {
        CNI_FORWARD if rule.value("--ctstate").is_some() || rule.goes_to("ACCEPT") => {
            format!("rule [{words}]")
        }
        chain => format!("{chain} rule [{words}]"),
    }
}

/// Removes the attachment's rules from every flavour of iptables, rules of the reference included, except the rules
/// of addresses that another attachment has meanwhile; and the policy of its `own` link, if any. The chains remain.
pub(super) fn del(
    filter: &PacketFilter,
    owner: Owner<'_>,
    ips: &[IpAddr],
    own: Option<&str>,
) -> Result<()> {
    let marker = own.map(marker);
    let mut chains = vec![CNI_FORWARD, OWNERS];
    chains.extend(marker.iter().flat_map(|marker| [STAGE_1, STAGE_2, marker.as_str()]));
    filter.delete_with_iptables(FILTER, &CHAINS, Scope::of(&chains), &|table, family| {
        let (mut ips, owns) = (ips_of(ips, family), owner.matcher());
        let is_own = |rule: &Rule| owns(rule.value("--comment"));
        ips.extend(table.rules_of(OWNERS).filter(|rule| is_own(rule)).filter_map(address));
        let others = table.rules_of(OWNERS).filter(|rule| !is_own(rule)).filter_map(address);
        let others: HashSet<IpAddr> = others.collect();
        ips.retain(|ip| !others.contains(ip) && !is_of_other(*ip, &owner.label()));
        remove(table, &ips);
        table.del_rules(|rule| rule.chain == OWNERS && is_own(rule));
        if let Some(link) = own {
            remove_policy(table, link);
        }
    })
}

fn remove_policy(table: &mut Table, link: &str) {
    table.del_rules(|rule| is_about(rule, link) || rule.chain == marker(link));
    table.del_chain(&marker(link));
}

/// Whether another attachment than the owner in this label has the address: by its record, or by a lease of another
/// container.
fn is_of_other(ip: IpAddr, label: &str) -> bool {
    let Some((id, ifname, network)) = identity(label) else { return false };
    let others = others::<Pod>(KEPT, ip, Owner { network, ifname, id });
    others.iter().any(|(_, pod)| pod.backend == Backend::Iptables && pod.admin.is_some())
        || is_leased_to_other(ip, label)
}

/// Whether a lease assigns the address to another container than the owner in this label.
fn is_leased_to_other(ip: IpAddr, label: &str) -> bool {
    let Some((id, _, network)) = identity(label) else { return false };
    let record = instance(Some(label)).and_then(Record::read).unwrap_or_default();
    let network = if record.network.is_empty() { network } else { &record.network };
    let dir = record.data_dir.as_deref().unwrap_or(Path::new(leases::DATA_DIR));
    leases::lease_of(dir, network, ip).is_some_and(|lease| lease.id != id)
}

/// Removes the rules of the network's attachments that are not `valid`, and the policies of links that are not among `links`.
pub(super) fn gc(
    filter: &PacketFilter,
    network: &str,
    valid: &[Owner<'_>],
    links: &HashSet<String>,
) -> Result<()> {
    let has_stale = stale(network, valid);
    let is_stale = |rule: &Rule| has_stale(rule.value("--comment"));
    let policies = if valid.is_empty() { policies() } else { Vec::new() };
    filter.delete_with_iptables(FILTER, &CHAINS, Scope::All, &|table, family| {
        let free = |rule: &Rule| {
            let comment = rule.value("--comment").unwrap_or_default();
            address(rule).filter(|ip| !is_of_other(*ip, comment))
        };
        let stale = table.rules_of(OWNERS).filter(|rule| is_stale(rule));
        let mut ips: Vec<IpAddr> = stale.filter_map(free).collect();
        let kept = table.rules_of(OWNERS).filter(|rule| !is_stale(rule)).filter_map(address);
        let kept: HashSet<IpAddr> = kept.collect();
        ips.retain(|ip| !kept.contains(ip));
        remove(table, &ips);
        table.del_rules(|rule| rule.chain == OWNERS && is_stale(rule));
        table.del_duplicates(&to_cni_forward());
        table.del_duplicates(&to_stage_1());
        for link in links_of_policies(table).difference(links) {
            remove_policy(table, link);
        }
        for chain in table.chains.clone() {
            let Some(bridge) = chain.strip_prefix(BRIDGE_OWNER) else { continue };
            if valid.is_empty() && table.rules_of(&chain).all(|rule| is_of(rule, network)) {
                table.del_rules(|rule| is_about(rule, bridge));
                table.del_chain(&chain);
                let mut heirs = policies.iter().filter(|kept| is_in(&kept.content, family));
                let is_for = |pod: &Pod| pod.bridge.as_deref() == Some(bridge);
                if let Some(heir) = heirs.find(|kept| is_for(&kept.content)) {
                    plan_policy(table, heir.owner().network, &heir.content);
                }
            }
        }
    })
}

/// The links that have a policy.
fn links_of_policies(table: &Table) -> HashSet<String> {
    let stages = [STAGE_1, STAGE_2].into_iter().flat_map(|stage| table.rules_of(stage));
    let names = stages.flat_map(|rule| [rule.value("-i"), rule.value("-o")]);
    let marked = table.chains.iter().filter_map(|chain| chain.strip_prefix(BRIDGE_OWNER));
    names.flatten().chain(marked).map(str::to_owned).collect()
}

/// The records of living attachments to bridges with a policy.
fn policies() -> Vec<Keepsake<Pod>> {
    let mut policies = KEPT.living::<Pod>();
    policies.retain(|kept| kept.content.policy != Policy::Open);
    policies
}

/// Whether the comment of a rule names the network.
fn is_of(rule: &Rule, network: &str) -> bool {
    rule.value("--comment").is_some_and(|comment| comment.starts_with(&network_hash(network)))
}

fn address(rule: &Rule) -> Option<IpAddr> {
    rule.value("-s")?.split('/').next()?.parse().ok()
}

fn remove(table: &mut Table, ips: &[IpAddr]) {
    for ip in ips {
        let ([to, from], published) = (address_rules(*ip), published_rule(*ip));
        let rules = [to, from, published];
        table.del_rules(|rule| is_owner_of(rule, *ip) || rules.contains(rule));
    }
}

/// Creates the rules for the content of our tables of `nf_tables`, without owners, as the reference does.
pub(super) fn create_ownerless(
    filter: &PacketFilter,
    ips: &[IpAddr],
    bridges: &[(String, Policy)],
) -> Result<()> {
    for family in Family::BOTH {
        let ips = ips_of(ips, family);
        if ips.is_empty() && bridges.is_empty() {
            continue;
        }
        filter.iptables(family)?.update(FILTER, Scope::All, &|table| {
            shared(table, DEFAULT_ADMIN);
            for rule in ips.iter().flat_map(|ip| address_rules(*ip)) {
                table.append_unique(rule);
            }
            for (bridge, policy) in bridges {
                create_policy(table, bridge, *policy);
            }
        })?;
    }
    Ok(())
}

/// Removes the rules that the reference does not have and would not delete, and the chains that record owners; the
/// other rules remain.
pub(super) fn forget_owners(filter: &PacketFilter) -> Result<()> {
    let is_addition = |rule: &Rule| rule.value("--comment") == Some(PUBLISHED);
    let is_record = |chain: &&String| *chain == OWNERS || chain.starts_with(BRIDGE_OWNER);
    filter.delete_with_iptables(
        FILTER,
        &[CNI_FORWARD, STAGE_1, OWNERS],
        Scope::All,
        &|table, _| {
            table.del_rules(is_addition);
            for chain in table.chains.clone().iter().filter(is_record) {
                table.del_chain(chain);
            }
        },
    )?;
    // Of iptables-legacy only the programs can tell.
    for family in Family::BOTH.into_iter().filter(|f| filter.has_legacy_table(*f, FILTER)) {
        filter.find_iptables(family, Flavour::Legacy)?.ok_or_else(|| {
            let program = format!("{}-legacy", program(family));
            Error::internal(format!("look for chain {OWNERS}: no {program} in PATH")).with_details(
                format!(
                    "if there is one, run on the node: {program} -F {OWNERS}; {program} -X {OWNERS}; \
                     and the same for each chain {BRIDGE_OWNER}.."
                ),
            )
        })?;
    }
    Ok(())
}
