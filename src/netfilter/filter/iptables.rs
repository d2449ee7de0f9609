//! Filter rules in iptables: the chains and rules of the reference plugin, word for word, so that either
//! implementation can delete the rules of the other.
//!
//! Those rules do not identify their owner, which the records of attachments do, and leases. Up to release 0.2.0 chains that no
//! rule jumps to did: `CNIBOX-FIREWALL`, and `CNIBOX-FW-<bridge>` for the network of a bridge's policy. GC removes them.
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
    bridge_rules, is_about, published_rule, stage_ends, to_chains, to_cni_forward, to_stage_1,
    translated_rule,
};
use super::{KEPT, Pod, Policy, missing, nft, unused_links};
use crate::attachment::{Keepsake, Record};
use crate::error::{Error, Result};
use crate::leases;
use crate::log;
use crate::netfilter::backend::{Backend, Family, PacketFilter};
use crate::netfilter::iptables::{Flavour, Records, Rule, Scope, Table, program};
use crate::netfilter::names::Owner;
use crate::netfilter::shared::others;

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

/// Creates the rules, one family after the other, in place of those of the attachment's `former` addresses.
pub(super) fn add(
    filter: &PacketFilter,
    owner: Owner<'_>,
    pod: &Pod,
    former: &[IpAddr],
) -> Result<()> {
    if filter.nft_if_present()?.is_some() && !pod.ports.is_empty() {
        isolate(filter, owner, pod)?;
    }
    for family in families(pod) {
        // The rules of another attachment, whose absence shows a flush.
        let witness = RECORDS.another(owner, family);
        let witness = witness.map(|kept| rules(&kept.content, family)).unwrap_or_default();
        let plan = |table: &mut Table| {
            if witness.iter().any(|rule| !table.has(rule)) {
                RECORDS.restore(table, family, Some(owner));
            }
            remove(table, &free(former, family, owner));
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
    let mut chains = vec![FORWARD, CNI_FORWARD];
    chains.extend(admin);
    if bridge.is_some() {
        chains.extend([STAGE_1, STAGE_2]);
    }
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
fn isolate(filter: &PacketFilter, owner: Owner<'_>, pod: &Pod) -> Result<()> {
    match nft::isolate(filter, owner, pod) {
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
        for ip in ips_of(&pod.ips, family) {
            let published = pod.published.then(|| published_rule(ip));
            for rule in address_rules(ip).into_iter().chain(published) {
                table.append_unique(rule);
            }
        }
    }
    plan_policy(table, owner.network, pod);
}

/// Changes the policy of the bridge, unless it belongs to another network.
fn plan_policy(table: &mut Table, network: &str, pod: &Pod) {
    let Some(bridge) = &pod.bridge else { return };
    let mut rules = bridge_rules(bridge, pod.policy);
    rules.extend(translated_rule(bridge, pod.policy));
    let is_former = |rule: &Rule| is_about(rule, bridge) && !rules.contains(rule);
    if table.rules.iter().any(is_former) && !has_policy_of_other(bridge, network) {
        table.del_rules(is_former);
    }
    if pod.policy == Policy::Open {
        return;
    }
    create_policy(table, bridge, pod.policy);
    if let Some(rule) = translated_rule(bridge, pod.policy).filter(|_| pod.published) {
        table.insert_unique(0, rule);
    }
}

/// Whether a living attachment of another network has a policy for the bridge.
fn has_policy_of_other(bridge: &str, network: &str) -> bool {
    KEPT.living::<Pod>().iter().any(|kept| {
        let pod = &kept.content;
        let is_for = pod.bridge.as_deref() == Some(bridge) && pod.policy != Policy::Open;
        is_for && pod.backend == Backend::Iptables && kept.owner().network != network
    })
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
    let mut chains = vec![CNI_FORWARD];
    chains.extend(own.iter().flat_map(|_| [STAGE_1, STAGE_2]));
    filter.delete_with_iptables(FILTER, &CHAINS, Scope::of(&chains), &|table, family| {
        remove(table, &free(ips, family, owner));
        if let Some(link) = own {
            table.del_rules(|rule| is_about(rule, link));
        }
    })
}

/// The addresses of the family that no other attachment than the owner has.
fn free(ips: &[IpAddr], family: Family, owner: Owner<'_>) -> Vec<IpAddr> {
    let mut ips = ips_of(ips, family);
    ips.retain(|ip| !is_of_other(*ip, owner));
    ips
}

/// Whether another attachment than the owner has the address: by its record, or by a lease of another container.
fn is_of_other(ip: IpAddr, owner: Owner<'_>) -> bool {
    let others = others::<Pod>(KEPT, ip, owner);
    others.iter().any(|(_, pod)| pod.backend == Backend::Iptables && pod.admin.is_some())
        || is_leased_to_other(ip, owner)
}

fn is_leased_to_other(ip: IpAddr, owner: Owner<'_>) -> bool {
    let dir = Record::of(owner).and_then(|record| record.data_dir);
    let dir = dir.as_deref().unwrap_or(Path::new(leases::DATA_DIR));
    leases::lease_of(dir, owner.network, ip).is_some_and(|lease| lease.id != owner.id)
}

/// Removes the rules of `stale` attachments, and the policies of links that are not in use.
pub(super) fn gc(filter: &PacketFilter, stale: &[Keepsake<Pod>]) -> Result<()> {
    filter.delete_with_iptables(FILTER, &CHAINS, Scope::All, &|table, family| {
        for kept in stale {
            remove(table, &free(&kept.content.ips, family, kept.owner()));
        }
        table.del_duplicates(&to_cni_forward());
        table.del_duplicates(&to_stage_1());
        for link in unused_links(links_of_policies(table)) {
            table.del_rules(|rule| is_about(rule, &link));
        }
        remove_notes(table);
    })
}

/// Removes the chains in which release 0.2.0 recorded owners.
fn remove_notes(table: &mut Table) {
    let is_note = |chain: &&String| *chain == OWNERS || chain.starts_with(BRIDGE_OWNER);
    for chain in table.chains.clone().iter().filter(is_note) {
        table.del_chain(chain);
    }
}

/// The links that have a policy.
fn links_of_policies(table: &Table) -> HashSet<String> {
    let stages = [STAGE_1, STAGE_2].into_iter().flat_map(|stage| table.rules_of(stage));
    let names = stages.flat_map(|rule| [rule.value("-i"), rule.value("-o")]);
    names.flatten().map(str::to_owned).collect()
}

fn remove(table: &mut Table, ips: &[IpAddr]) {
    for ip in ips {
        let ([to, from], published) = (address_rules(*ip), published_rule(*ip));
        let rules = [to, from, published];
        table.del_rules(|rule| rules.contains(rule));
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

/// Removes the rules that the reference does not have and would not delete, and the chains in which release 0.2.0 recorded
/// owners; the other rules remain.
pub(super) fn forget_owners(filter: &PacketFilter) -> Result<()> {
    let is_addition = |rule: &Rule| rule.value("--comment") == Some(PUBLISHED);
    let chains = [CNI_FORWARD, STAGE_1, OWNERS];
    filter.delete_with_iptables(FILTER, &chains, Scope::All, &|table, _| {
        table.del_rules(is_addition);
        remove_notes(table);
    })?;
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
