//! Filter rules in iptables: the chains and rules of the reference plugin, word for word, so that
//! either deletes what the other made.
//!
//! Those rules have no room for an owner. It stands beside them, in chains that no rule jumps to:
//!
//! | chain | rules |
//! | --- | --- |
//! | `CNIBOX-FIREWALL` | `-s <address>` with the attachment's comment, for each address |
//! | `CNIBOX-FW-<bridge>` | the comment of the network whose policy the bridge has |
//!
//! A note of an owner is believed as long as no lease says that another container has the address:
//! the reference does not know the notes, and leaves the note of an address that it deletes.
//!
//! Each family gets one transaction for each verb. Two ADDs that need the same new chain cannot
//! both make it: the second one reads again what is there.

use std::net::IpAddr;
use std::path::Path;
use std::thread;

use nix::errno::Errno;

use super::nft;
use super::{Ingress, KEPT, Pod, Policy, Record, missing};
use crate::attachment;
use crate::cni::ip::host_net;
use crate::error::Result;
use crate::leases;
use crate::log;
use crate::netfilter::backend::{Backend, Family, PacketFilter};
use crate::netfilter::iptables::{Iptables, Records, Rule, Table};
use crate::netfilter::names::{Owner, identity, network_hash, network_label, stale};
use crate::netlink::nftables::Nft;

pub(super) const FILTER: &str = "filter";
const FORWARD: &str = "FORWARD";
const CNI_FORWARD: &str = "CNI-FORWARD";
const STAGE_1: &str = "CNI-ISOLATION-STAGE-1";
const STAGE_2: &str = "CNI-ISOLATION-STAGE-2";
/// By which the plugin's rules are found. Beside firewalld there is the second one only.
const CHAINS: [&str; 2] = [CNI_FORWARD, STAGE_1];
pub(super) const OWNERS: &str = "CNIBOX-FIREWALL";
pub(super) const BRIDGE_OWNER: &str = "CNIBOX-FW-";

/// The default of `iptablesAdminChainName`.
pub const DEFAULT_ADMIN: &str = "CNI-ADMIN";

const RULES: &str = "CNI firewall plugin rules";
const OVERRIDES: &str = "CNI firewall plugin admin overrides";
const ANY_POLICY: &str = "CNI firewall plugin rules (ingressPolicy: same-bridge|isolated)";

/// What an ADD makes, and a CHECK looks for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The attachment.
    pub pod: &'a Pod<'a>,
    /// The policy of its bridge.
    pub ingress: Ingress<'a>,
    /// The administrator's chain; none where only the policy is iptables' business.
    pub admin: Option<&'a str>,
}

/// For [`super::super::heal`].
pub const RECORDS: Records<Record> = Records {
    kept: KEPT,
    table: FILTER,
    is_of: |record, family| {
        record.backend == Backend::Iptables && record.ips.iter().any(|ip| Family::of(*ip) == family)
    },
    restore: |table, family, kept| {
        let (pod, ingress) = (kept.content.pod(kept.owner()), kept.content.ingress());
        make(table, Wanted { pod: &pod, ingress, admin: kept.content.admin.as_deref() }, family);
    },
};

fn to_cni_forward() -> Rule {
    Rule::every(FORWARD).comment(RULES).target(CNI_FORWARD)
}

fn to_chains(admin: &str) -> [Rule; 2] {
    [to_cni_forward(), Rule::every(CNI_FORWARD).comment(OVERRIDES).target(admin)]
}

pub(super) fn address_rules(ip: IpAddr) -> [Rule; 2] {
    let cidr = host_net(ip).to_string();
    let states = ["-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"];
    [
        Rule::new(CNI_FORWARD, ["-d", &cidr]).with(states).target("ACCEPT"),
        Rule::new(CNI_FORWARD, ["-s", &cidr]).target("ACCEPT"),
    ]
}

fn owner_rule(ip: IpAddr, owner: Owner<'_>) -> Rule {
    Rule::new(OWNERS, ["-s", &host_net(ip).to_string()]).comment(&owner.label())
}

/// The rules for a bridge that go to the beginning of their chains, in the order to insert them.
fn bridge_rules(bridge: &str, policy: Policy) -> Vec<Rule> {
    if policy == Policy::Open {
        return Vec::new();
    }
    let comment = format!("{RULES} (ingressPolicy: {})", policy.as_str());
    let mut rules = vec![
        Rule::new(STAGE_1, ["-i", bridge, "!", "-o", bridge]).comment(&comment).target(STAGE_2),
        Rule::new(STAGE_2, ["-o", bridge]).comment(ANY_POLICY).target("DROP"),
    ];
    if policy == Policy::Isolated {
        let within = Rule::new(STAGE_1, ["-i", bridge, "-o", bridge]);
        rules.push(within.comment(&comment).target("DROP"));
    }
    rules
}

fn to_stage_1() -> Rule {
    Rule::every(FORWARD).comment(ANY_POLICY).target(STAGE_1)
}

fn stage_ends() -> [Rule; 2] {
    [STAGE_1, STAGE_2].map(|stage| Rule::every(stage).comment(ANY_POLICY).target("RETURN"))
}

/// The chain whose comment names the network of a bridge's policy.
fn marker(bridge: &str) -> String {
    format!("{BRIDGE_OWNER}{bridge}")
}

/// Whether a rule is about a bridge's policy.
fn is_about(rule: &Rule, bridge: &str) -> bool {
    let names = [rule.value("-i"), rule.value("-o")];
    [STAGE_1, STAGE_2].contains(&rule.chain.as_str()) && names.contains(&Some(bridge))
}

/// Makes what is wanted, one family after the other; on failure the addresses are taken out again.
pub fn add(filter: &PacketFilter, wanted: Wanted<'_>) -> Result<()> {
    let Wanted { pod, ingress, admin } = wanted;
    Record::keep(Backend::Iptables, pod, ingress, admin);
    let nft = filter.nft_if_present()?;
    if let Some(nft) = nft.filter(|_| !pod.ports.is_empty()) {
        isolate(nft, pod, ingress)?;
    }
    for family in families(pod) {
        let change = || {
            let tables = Iptables::require(family)?;
            let witness = witness(pod.owner, family);
            let plan = |table: &mut Table| {
                if witness.iter().any(|rule| !table.has(rule)) {
                    RECORDS.restore(table, family, None);
                }
                make(table, wanted, family);
            };
            let expect = || {
                let mut table = expected_table(filter, &tables, wanted, family)?;
                table.rules.extend(witness.clone());
                Some(table)
            };
            tables.add_expected(FILTER, expect, &plan)
        };
        if let Err(error) = change() {
            drop(del(filter, pod));
            drop(nft.map(|nft| nft::del(nft, pod)));
            return Err(error);
        }
    }
    Ok(())
}

/// The rules of another attachment, by which a flush is noticed.
fn witness(owner: Owner<'_>, family: Family) -> Vec<Rule> {
    let Some(kept) = RECORDS.another(owner, family) else { return Vec::new() };
    let mut rules = policy_rules(kept.content.ingress());
    if kept.content.admin.is_some() {
        rules.extend(ips_of(&kept.content.ips, family).into_iter().flat_map(address_rules));
    }
    rules
}

/// Isolates the ports, as far as the kernel can.
fn isolate(nft: &Nft, pod: &Pod<'_>, ingress: Ingress<'_>) -> Result<()> {
    match nft::isolate(nft, pod, ingress) {
        Err(error) if error.errno() == Some(Errno::EOPNOTSUPP) => {
            log::warn(format_args!(
                "firewall: {error}: frames that are not IP pass between isolated containers of a bridge"
            ));
            Ok(())
        }
        outcome => Ok(outcome?),
    }
}

/// The rules that all attachments share, if the chains have no rule of this attachment or its
/// addresses, and no bridge has or had a policy: rules of another policy may be anywhere.
fn expected_table(
    filter: &PacketFilter,
    tables: &Iptables,
    wanted: Wanted<'_>,
    family: Family,
) -> Option<Table> {
    let admin = wanted.admin?;
    let ips = ips_of(&wanted.pod.ips, family);
    let has_no_policy = |bridge| {
        filter.iptables_with(family, FILTER, &[&marker(bridge)]).is_ok_and(|found| found.is_empty())
    };
    if wanted.ingress.policy != Policy::Open || !wanted.ingress.bridge.is_none_or(has_no_policy) {
        return None;
    }
    let owns = wanted.pod.owner.matcher();
    // Most of the time of a program goes into its start.
    let (owners, accepted) = thread::scope(|scope| {
        let owners = scope.spawn(|| tables.read_chain(FILTER, OWNERS));
        let accepted = tables.read_chain(FILTER, CNI_FORWARD)?;
        Some((owners.join().ok()??, accepted))
    })?;
    let is_known =
        |rule: &Rule| owns(rule.value("--comment")) || ips.iter().any(|ip| is_owner_of(rule, *ip));
    let is_accepted = |ip: &IpAddr| address_rules(*ip).iter().any(|rule| accepted.has(rule));
    if owners.rules.iter().any(is_known) || ips.iter().any(is_accepted) {
        return None;
    }
    let mut table = Table::empty(FILTER);
    shared(&mut table, admin);
    table.ensure_chain(OWNERS);
    Some(table)
}

/// The chains of the reference and the way to them.
pub(super) fn shared(table: &mut Table, admin: &str) {
    for chain in [CNI_FORWARD, admin] {
        table.ensure_chain(chain);
    }
    for jump in to_chains(admin) {
        table.insert_unique(jump);
    }
}

/// The families that the attachment has addresses of.
fn families(pod: &Pod<'_>) -> impl Iterator<Item = Family> {
    Family::BOTH.into_iter().filter(|family| pod.ips.iter().any(|ip| Family::of(*ip) == *family))
}

fn ips_of(ips: &[IpAddr], family: Family) -> Vec<IpAddr> {
    ips.iter().copied().filter(|ip| Family::of(*ip) == family).collect()
}

/// Makes what is wanted for the addresses of the family.
fn make(table: &mut Table, wanted: Wanted<'_>, family: Family) {
    if let Some(admin) = wanted.admin {
        shared(table, admin);
        table.ensure_chain(OWNERS);
        let (owner, ips) = (wanted.pod.owner, ips_of(&wanted.pod.ips, family));
        let owns = owner.matcher();
        // Addresses that the attachment had before.
        let earlier = table.rules_of(OWNERS).filter(|r| owns(r.value("--comment")));
        let earlier =
            earlier.filter_map(address).filter(|ip| !ips.contains(ip)).collect::<Vec<_>>();
        remove(table, &earlier);
        for ip in ips {
            // The former owner of the address is gone.
            table.del_rules(|r| is_owner_of(r, ip) && *r != owner_rule(ip, owner));
            for rule in rules_of(ip, owner) {
                table.append_unique(rule);
            }
        }
    }
    plan_policy(table, wanted.pod.owner.network, wanted.ingress);
}

/// All of an address.
fn rules_of(ip: IpAddr, owner: Owner<'_>) -> [Rule; 3] {
    let [to, from] = address_rules(ip);
    [owner_rule(ip, owner), to, from]
}

fn is_owner_of(rule: &Rule, ip: IpAddr) -> bool {
    rule.chain == OWNERS && rule.value("-s") == Some(&host_net(ip).to_string())
}

/// What another network wants of the same bridge stays.
fn plan_policy(table: &mut Table, network: &str, ingress: Ingress<'_>) {
    let Some(bridge) = ingress.bridge else { return };
    let marker = marker(bridge);
    let is_foreign = table.rules_of(&marker).any(|rule| !is_of(rule, network));
    let is_known = table.has_chain(&marker);
    let rules = bridge_rules(bridge, ingress.policy);
    if !is_foreign && (is_known || ingress.policy != Policy::Open) {
        table.del_rules(|rule| is_about(rule, bridge) && !rules.contains(rule));
    }
    if ingress.policy == Policy::Open {
        if !is_foreign {
            table.del_chain(&marker);
        }
        return;
    }
    table.ensure_chain(&marker);
    if !is_foreign {
        table.append_unique(Rule::every(&marker).comment(&network_label(network)));
    }
    make_policy(table, bridge, ingress.policy);
}

pub(super) fn make_policy(table: &mut Table, bridge: &str, policy: Policy) {
    for chain in [STAGE_1, STAGE_2] {
        table.ensure_chain(chain);
    }
    table.insert_unique(to_stage_1());
    for rule in bridge_rules(bridge, policy) {
        table.insert_unique(rule);
    }
    for end in stage_ends() {
        table.append_unique(end);
    }
}

/// Verifies everything that [`add`] made, and changes nothing.
pub fn check(filter: &PacketFilter, wanted: Wanted<'_>) -> Result<()> {
    if let Some(nft) = filter.nft_if_present()? {
        nft::check_ports(nft, wanted.pod, wanted.ingress)?;
    }
    for family in families(wanted.pod) {
        let tables = Iptables::require(family)?;
        let table = tables.read(FILTER)?;
        let mut rules = Vec::new();
        if let Some(admin) = wanted.admin {
            rules.extend(to_chains(admin));
            rules.extend(ips_of(&wanted.pod.ips, family).into_iter().flat_map(address_rules));
        }
        rules.extend(policy_rules(wanted.ingress));
        for rule in &rules {
            if !tables.has(&table, rule)? {
                let error = missing(describe(rule));
                return Err(error.with_details(KEPT.remedy(wanted.pod.owner, None)));
            }
        }
    }
    Ok(())
}

/// All that a policy consists of.
pub(super) fn policy_rules(ingress: Ingress<'_>) -> Vec<Rule> {
    let bridge = ingress.bridge.filter(|_| ingress.policy != Policy::Open);
    let Some(bridge) = bridge else { return Vec::new() };
    let mut rules = vec![to_stage_1()];
    rules.extend(bridge_rules(bridge, ingress.policy));
    rules.extend(stage_ends());
    rules
}

/// As the reference names a rule: its chain where that is a known one, its words.
fn describe(rule: &Rule) -> String {
    let words = rule.words.join(" ");
    match rule.chain.as_str() {
        CNI_FORWARD if rule.value("--ctstate").is_some() || rule.goes_to("ACCEPT") => {
            format!("rule [{words}]")
        }
        chain => format!("{chain} rule [{words}]"),
    }
}

/// Removes the attachment's rules, of either flavour of iptables, including rules that the reference made; but not
/// the rules of an address that another attachment has meanwhile. The chains stay.
pub fn del(filter: &PacketFilter, pod: &Pod<'_>) -> Result<()> {
    let forgotten = KEPT.remove(pod.owner);
    let expected = |family| {
        let rules = ips_of(&pod.ips, family).into_iter().flat_map(|ip| rules_of(ip, pod.owner));
        Table { rules: rules.collect(), ..Table::empty(FILTER) }
    };
    filter
        .delete_with_iptables(FILTER, &CHAINS, &expected, &|table, family| {
            let (mut ips, owns) = (ips_of(&pod.ips, family), pod.owner.matcher());
            for rule in table.rules_of(OWNERS) {
                let Some(ip) = address(rule) else { continue };
                if owns(rule.value("--comment")) {
                    ips.push(ip);
                } else {
                    ips.retain(|known| *known != ip);
                }
            }
            ips.retain(|ip| !is_anothers(*ip, &pod.owner.label()));
            remove(table, &ips);
            table.del_rules(|rule| rule.chain == OWNERS && owns(rule.value("--comment")));
        })
        .and(forgotten)
}

/// Whether the address has a lease, and not of the container that the owner's comment tells.
fn is_anothers(ip: IpAddr, comment: &str) -> bool {
    let Some((id, _, network)) = identity(comment) else { return false };
    let record = comment.split(',').next().and_then(attachment::Record::read).unwrap_or_default();
    let network = if record.network.is_empty() { network } else { &record.network };
    let dir = record.data_dir.as_deref().unwrap_or(Path::new(leases::DATA_DIR));
    leases::lease_of(dir, network, ip).is_some_and(|lease| lease.id != id)
}

/// Removes the rules of all attachments of the network but `valid`, and when there are none of
/// those, its policies.
pub fn gc(filter: &PacketFilter, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    let forgotten = KEPT.remove_stale(network, valid);
    let has_stale = stale(network, valid);
    let is_stale = |rule: &Rule| has_stale(rule.value("--comment"));
    let plan = |table: &mut Table, _| {
        let free = |rule: &Rule| {
            let comment = rule.value("--comment").unwrap_or_default();
            address(rule).filter(|ip| !is_anothers(*ip, comment))
        };
        let stale = table.rules_of(OWNERS).filter(|rule| is_stale(rule));
        let ips: Vec<IpAddr> = stale.filter_map(free).collect();
        remove(table, &ips);
        table.del_rules(|rule| rule.chain == OWNERS && is_stale(rule));
        table.leave_one(&to_cni_forward());
        table.leave_one(&to_stage_1());
        for chain in table.chains.clone() {
            let Some(bridge) = chain.strip_prefix(BRIDGE_OWNER) else { continue };
            if valid.is_empty() && table.rules_of(&chain).all(|rule| is_of(rule, network)) {
                table.del_rules(|rule| is_about(rule, bridge));
                table.del_chain(&chain);
            }
        }
    };
    filter.delete_with_iptables(FILTER, &CHAINS, &|_| Table::empty(FILTER), &plan).and(forgotten)
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
        let rules = address_rules(*ip);
        table.del_rules(|rule| is_owner_of(rule, *ip) || rules.contains(rule));
    }
}
