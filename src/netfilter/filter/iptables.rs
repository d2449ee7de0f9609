//! Filter rules in iptables: the chains and rules of the reference plugin, word for word, so that
//! either implementation can delete the rules of the other.
//!
//! Those rules do not identify their owner; the records of attachments and the leases do.
//!
//! Each family is changed by one transaction per verb. If two ADDs create the same chain, the
//! transaction of the second one fails, and is planned again.

mod words;

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::Path;

use nix::errno::Errno;

pub use self::words::DEFAULT_ADMIN;
use self::words::{
    CHAINS, CNI_FORWARD, FORWARD, PUBLISHED, STAGE_1, STAGE_2, address_rules, bridge_rules,
    cni_forward_jump, is_policy_rule, isolation_jump, published_ports_rule, shared_jumps,
    stage_return_rules, translated_rule,
};
use super::{FirewallPart, IngressPolicy, RECORDS, decides_policy, nft, unused_policy_links};
use crate::attachment::{AttachmentRecord, StoredRecord, decode_part};
use crate::leases;
use crate::netfilter::backend::{IpFamily, PacketFilter, RuleBackend};
use crate::netfilter::elements::other_attachments;
use crate::netfilter::iptables::{
    ChainScope, IptablesRule, IptablesTable, XT_COMMENT, XT_CONNTRACK,
};
use crate::netfilter::names::AttachmentId;
use crate::netfilter::rules::RecordedRules;
use cni::error::Result;

const FILTER: &str = "filter";

pub(super) const RULES: RecordedRules = RecordedRules {
    kept: RECORDS,
    table: FILTER,
    extensions: &[XT_COMMENT, XT_CONNTRACK],
    is_of: |part, family| {
        let pod =
            decode_part::<FirewallPart>(part).filter(|pod| pod.backend == RuleBackend::Iptables);
        pod.is_some_and(|pod| !ips_of_family(&pod.ips, family).is_empty())
    },
    plan: |table, family, stored, all| {
        let (owner, pod) = (stored.attachment_id(), decode_part(&stored.content)?);
        // The reference does not accept published ports.
        let is_recorded = RECORDS.has_instance(&owner.instance_id());
        create_address_rules(table, &pod, family, is_recorded, false);
        if pod.policy != IngressPolicy::Open
            && decides_policy(stored, all, &|part| (RULES.is_of)(part, family))
        {
            restore_policy(table, owner.network, &pod, is_recorded, all.is_empty());
        }
        None
    },
    expected: |family, other, part| {
        let Some(mut pod) = decode_part::<FirewallPart>(&other.content) else { return Vec::new() };
        // In one network the policy of a bridge is that of the latest ADD.
        if let Some(own) = part.and_then(decode_part::<FirewallPart>)
            && own.bridge == pod.bridge
        {
            pod.policy = own.policy;
        }
        let mut rules = attachment_rules(&pod, family);
        rules.extend(pod.admin.iter().flat_map(|admin| shared_jumps(admin)));
        rules
    },
};

/// Creates the rules, one family after the other, and deletes the rules of the addresses that the
/// attachment had before, if it had rules.
pub(super) fn add_rules(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    pod: &FirewallPart,
    former: Option<&[IpAddr]>,
) -> Result<()> {
    if filter.nft_socket_if_present()?.is_some() && !pod.ports.is_empty() {
        isolate_ports(filter, owner, pod)?;
    }
    let mut chains = vec![FORWARD, CNI_FORWARD];
    chains.extend(pod.admin.as_deref());
    if pod.bridge.is_some() {
        chains.extend([STAGE_1, STAGE_2]);
    }
    for family in IpFamily::BOTH {
        if ips_of_family(&pod.ips, family).is_empty() {
            continue;
        }
        let tables = filter.default_iptables(family)?;
        let beginnings: &[_] = former.map_or(&[(FORWARD, 0), (CNI_FORWARD, 3)], |_| &[]);
        let scope = ChainScope::named_chains(&chains).with_beginnings(beginnings);
        RULES.add(&tables, owner, pod, scope, &|table| {
            let stale = unshared_ips(former.unwrap_or_default(), family, owner);
            remove_address_rules(table, &stale);
            create_address_rules(table, pod, family, true, former.is_none());
            plan_policy(table, owner.network, pod);
        })?;
    }
    Ok(())
}

/// The attachment's rules in a family, without those that all attachments share.
fn attachment_rules(pod: &FirewallPart, family: IpFamily) -> Vec<IptablesRule> {
    let mut rules = Vec::new();
    if pod.admin.is_some() {
        let ips = ips_of_family(&pod.ips, family);
        rules.extend(ips.iter().copied().flat_map(address_rules));
        rules.extend(ips.into_iter().map(published_ports_rule));
    }
    rules.extend(policy_rules(pod));
    rules
}

/// Isolates the ports if the kernel supports bridge tables with the required expressions.
fn isolate_ports(filter: &PacketFilter, owner: AttachmentId<'_>, pod: &FirewallPart) -> Result<()> {
    match nft::isolate_ports(filter, owner, pod) {
        Err(error) if error.errno() == Some(Errno::EOPNOTSUPP) => {
            warn!(
                "could not isolate the ports of a bridge: {error}; frames that are not IP pass \
                 between isolated containers of a bridge"
            );
            Ok(())
        }
        outcome => Ok(outcome?),
    }
}

/// Adds the chains of the reference and the rules that jump to them.
fn add_shared_chains(table: &mut IptablesTable, admin: &str) {
    for chain in [CNI_FORWARD, admin] {
        table.ensure_chain(chain);
    }
    for jump in shared_jumps(admin) {
        table.insert_unique(0, jump);
    }
}

fn ips_of_family(ips: &[IpAddr], family: IpFamily) -> Vec<IpAddr> {
    ips.iter().copied().filter(|ip| IpFamily::of_address(*ip) == family).collect()
}

/// Adds the rules for the addresses of one family.
fn create_address_rules(
    table: &mut IptablesTable,
    pod: &FirewallPart,
    family: IpFamily,
    publishes: bool,
    is_new: bool,
) {
    if let Some(admin) = &pod.admin {
        add_shared_chains(table, admin);
        for ip in ips_of_family(&pod.ips, family) {
            let additional = publishes.then(|| published_ports_rule(ip));
            for rule in address_rules(ip).into_iter().chain(additional) {
                // A rule that a container with this address has left is deleted with this one.
                if is_new {
                    table.append_new(rule);
                } else {
                    table.append_unique(rule);
                }
            }
        }
    }
}

/// Changes the policy of the bridge, unless it belongs to another network.
fn plan_policy(table: &mut IptablesTable, network: &str, pod: &FirewallPart) {
    let Some(bridge) = &pod.bridge else { return };
    let is_former = other_policy_matcher(bridge, pod.policy);
    if table.rules.iter().any(&is_former) && !has_policy_of_other(bridge, network) {
        table.delete_rules(is_former);
    }
    if pod.policy != IngressPolicy::Open {
        plan_policy_rules(table, bridge, pod, true);
    }
}

fn plan_policy_rules(table: &mut IptablesTable, bridge: &str, pod: &FirewallPart, publishes: bool) {
    create_policy(table, bridge, pod.policy);
    if let Some(rule) = translated_rule(bridge, pod.policy).filter(|_| publishes) {
        table.insert_unique(0, rule);
    }
}

/// Restores the policy of the bridge, unless another one is in force, as that of a later ADD. CHECK
/// examines an attachment that `has_own_tables_only`: the configured policy must be in force.
fn restore_policy(
    table: &mut IptablesTable,
    network: &str,
    pod: &FirewallPart,
    publishes: bool,
    has_own_tables_only: bool,
) {
    let Some(bridge) = pod.bridge.as_deref() else { return };
    if has_own_tables_only
        || !is_other_policy_in_force(table, bridge, pod.policy)
        || has_policy_of_other(bridge, network)
    {
        plan_policy_rules(table, bridge, pod, publishes);
    }
}

/// Whether the table has a rule of another policy of the bridge. Rules that others add for the
/// bridge are no policy.
fn is_other_policy_in_force(table: &IptablesTable, bridge: &str, policy: IngressPolicy) -> bool {
    let own = bridge_rules(bridge, policy);
    let mut others = [IngressPolicy::SameBridge, IngressPolicy::Isolated]
        .into_iter()
        .filter(|other| *other != policy);
    others.any(|other| {
        bridge_rules(bridge, other).iter().any(|rule| !own.contains(rule) && table.has_rule(rule))
    })
}

/// Whether a rule belongs to another policy of the bridge.
fn other_policy_matcher(bridge: &str, policy: IngressPolicy) -> impl Fn(&IptablesRule) -> bool {
    let mut own = bridge_rules(bridge, policy);
    own.extend(translated_rule(bridge, policy));
    move |rule| is_policy_rule(rule, bridge) && !own.contains(rule)
}

/// Whether a living attachment of another network has a policy for the bridge.
fn has_policy_of_other(bridge: &str, network: &str) -> bool {
    RECORDS.has_restorable_part::<FirewallPart>(&|kept| {
        let pod = &kept.content;
        let is_for = pod.bridge.as_deref() == Some(bridge) && pod.policy != IngressPolicy::Open;
        is_for && pod.backend == RuleBackend::Iptables && kept.attachment_id().network != network
    })
}

fn create_policy(table: &mut IptablesTable, bridge: &str, policy: IngressPolicy) {
    for chain in [STAGE_1, STAGE_2] {
        table.ensure_chain(chain);
    }
    table.insert_unique(0, isolation_jump());
    for rule in bridge_rules(bridge, policy) {
        table.insert_unique(0, rule);
    }
    for end in stage_return_rules() {
        table.append_unique(end);
    }
}

fn policy_rules(pod: &FirewallPart) -> Vec<IptablesRule> {
    match &pod.bridge {
        Some(bridge) if pod.policy != IngressPolicy::Open => {
            let mut rules = vec![isolation_jump()];
            rules.extend(bridge_rules(bridge, pod.policy));
            rules.extend(translated_rule(bridge, pod.policy));
            rules.extend(stage_return_rules());
            rules
        }
        _ => Vec::new(),
    }
}

/// Deletes the attachment's rules in every flavour of iptables, also rules of the reference, except
/// the rules of addresses that another attachment has meanwhile. Also deletes the policy of the
/// attachment's `own` link, if any. The chains remain.
pub(super) fn delete_rules(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    ips: &[IpAddr],
    own: Option<&str>,
) -> Result<()> {
    let mut chains = vec![CNI_FORWARD];
    chains.extend(own.iter().flat_map(|_| [STAGE_1, STAGE_2]));
    filter.delete_iptables_rules(
        FILTER,
        &CHAINS,
        ChainScope::named_chains(&chains),
        &|table, family| {
            remove_address_rules(table, &unshared_ips(ips, family, owner));
            if let Some(link) = own {
                table.delete_rules(|rule| is_policy_rule(rule, link));
            }
        },
    )
}

/// The addresses of the family that no other attachment than the owner has.
fn unshared_ips(ips: &[IpAddr], family: IpFamily, owner: AttachmentId<'_>) -> Vec<IpAddr> {
    let mut ips = ips_of_family(ips, family);
    ips.retain(|ip| !is_used_by_other(*ip, owner));
    ips
}

/// Whether another attachment than the owner has the address, according to its record or to a lease
/// of its container.
fn is_used_by_other(ip: IpAddr, owner: AttachmentId<'_>) -> bool {
    let others = other_attachments::<FirewallPart>(RECORDS, ip, owner);
    others.iter().any(|(_, pod)| pod.backend == RuleBackend::Iptables && pod.admin.is_some())
        || is_leased_to_other(ip, owner)
}

fn is_leased_to_other(ip: IpAddr, owner: AttachmentId<'_>) -> bool {
    let dir = AttachmentRecord::find_by_attachment(owner).and_then(|record| record.data_dir);
    let dir = dir.as_deref().unwrap_or(Path::new(leases::DATA_DIR));
    leases::find_lease(dir, owner.network, ip).is_some_and(|lease| lease.id != owner.id)
}

/// Removes the rules of `stale` attachments, and the policies of links that are not in use.
pub(super) fn remove_stale_rules(
    filter: &PacketFilter,
    stale: &[StoredRecord<FirewallPart>],
) -> Result<()> {
    filter.delete_iptables_rules(FILTER, &CHAINS, ChainScope::All, &|table, family| {
        for kept in stale {
            remove_address_rules(
                table,
                &unshared_ips(&kept.content.ips, family, kept.attachment_id()),
            );
        }
        table.delete_duplicates(&cni_forward_jump());
        table.delete_duplicates(&isolation_jump());
        for link in unused_policy_links(links_with_policy(table), stale) {
            table.delete_rules(|rule| is_policy_rule(rule, &link));
        }
    })
}

fn links_with_policy(table: &IptablesTable) -> HashSet<String> {
    let stages = [STAGE_1, STAGE_2].into_iter().flat_map(|stage| table.rules_of_chain(stage));
    let names = stages.flat_map(|rule| [rule.option_value("-i"), rule.option_value("-o")]);
    names.flatten().map(str::to_owned).collect()
}

fn remove_address_rules(table: &mut IptablesTable, ips: &[IpAddr]) {
    for ip in ips {
        let ([to, from], published) = (address_rules(*ip), published_ports_rule(*ip));
        let rules = [to, from, published];
        table.delete_rules(|rule| rules.contains(rule));
    }
}

/// Creates the rules for the content of our tables of `nf_tables`, without owners, as the reference
/// does.
pub(super) fn create_ownerless_rules(
    filter: &PacketFilter,
    ips: &[IpAddr],
    bridges: &[(String, IngressPolicy)],
) -> Result<()> {
    for family in IpFamily::BOTH {
        let ips = ips_of_family(ips, family);
        if ips.is_empty() && bridges.is_empty() {
            continue;
        }
        filter.default_iptables(family)?.update_table(FILTER, ChainScope::All, &|table| {
            add_shared_chains(table, DEFAULT_ADMIN);
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

/// Removes the rules that the reference does not have and would not delete; the other rules remain.
pub(super) fn remove_published_rules(filter: &PacketFilter) -> Result<()> {
    filter.delete_iptables_rules(FILTER, &CHAINS, ChainScope::All, &|table, _| {
        table.delete_rules(is_published_rule);
    })
}

fn is_published_rule(rule: &IptablesRule) -> bool {
    rule.option_value("--comment") == Some(PUBLISHED)
}
