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
//! the reference does not know the notes, and leaves those of what it deletes.
//!
//! Each family gets one transaction for each verb. Two ADDs that need the same new chain cannot
//! both make it: the second one reads again what is there.

use std::net::IpAddr;
use std::path::Path;
use std::thread;

use nix::errno::Errno;

use super::nftables;
use super::{Ingress, KEPT, Network, Owner, Pod, Policy, Record, kept, missing};
use crate::attachment;
use crate::error::Result;
use crate::log;
use crate::netfilter::backend::{Backend, Family, PacketFilter};
use crate::netfilter::iptables::{Draft, Iptables, Rule};
use crate::netfilter::names::identity;
use crate::netlink::nftables::Nft;
use crate::store;

pub(super) const FILTER: &str = "filter";
const FORWARD: &str = "FORWARD";
const CNI_FORWARD: &str = "CNI-FORWARD";
const STAGE_1: &str = "CNI-ISOLATION-STAGE-1";
const STAGE_2: &str = "CNI-ISOLATION-STAGE-2";
pub(super) const OWNERS: &str = "CNIBOX-FIREWALL";
pub(super) const BRIDGE_OWNER: &str = "CNIBOX-FW-";

/// The default of `iptablesAdminChainName`.
pub const DEFAULT_ADMIN: &str = "CNI-ADMIN";

const RULES: &str = "CNI firewall plugin rules";
const OVERRIDES: &str = "CNI firewall plugin admin overrides";
const ANY_POLICY: &str = "CNI firewall plugin rules (ingressPolicy: same-bridge|isolated)";

/// The chain for an administrator's own rules.
#[derive(Clone, Copy, Debug)]
pub struct Admin<'a>(pub &'a str);

/// What an ADD makes, and a CHECK looks for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The attachment.
    pub pod: &'a Pod,
    /// The policy of its bridge.
    pub ingress: Ingress<'a>,
    /// The administrator's chain; none where only the policy is iptables' business.
    pub admin: Option<Admin<'a>>,
}

fn cidr(ip: IpAddr) -> String {
    format!("{ip}/{}", if ip.is_ipv4() { 32 } else { 128 })
}

fn to_cni_forward() -> Rule {
    Rule::new::<&str>(FORWARD, []).comment(RULES).target(CNI_FORWARD)
}

fn to_chains(admin: Admin<'_>) -> [Rule; 2] {
    [to_cni_forward(), Rule::new::<&str>(CNI_FORWARD, []).comment(OVERRIDES).target(admin.0)]
}

pub(super) fn address_rules(ip: IpAddr) -> [Rule; 2] {
    let cidr = cidr(ip);
    let states = ["-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"];
    [
        Rule::new(CNI_FORWARD, ["-d", &cidr]).with(states).target("ACCEPT"),
        Rule::new(CNI_FORWARD, ["-s", &cidr]).target("ACCEPT"),
    ]
}

fn owner_rule(ip: IpAddr, owner: &Owner) -> Rule {
    Rule::new(OWNERS, ["-s", &cidr(ip)]).comment(owner.comment())
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
    Rule::new::<&str>(FORWARD, []).comment(ANY_POLICY).target(STAGE_1)
}

fn stage_ends() -> [Rule; 2] {
    [STAGE_1, STAGE_2]
        .map(|stage| Rule::new::<&str>(stage, []).comment(ANY_POLICY).target("RETURN"))
}

/// The chain that says whose policy a bridge has.
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
    Record::keep(Backend::Iptables, pod, ingress, admin.map(|admin| admin.0));
    let nft = filter.nft_if_present()?;
    if let Some(nft) = nft.filter(|_| !pod.ports.is_empty()) {
        isolate(nft, pod, ingress)?;
    }
    for (family, ips) in families(wanted.pod) {
        let change = || {
            let tables = Iptables::require(family)?;
            let witness = kept::witness(&pod.owner, family);
            let plan = |draft: &mut Draft| {
                if witness.iter().any(|rule| !draft.has(rule)) {
                    kept::restore(draft, family);
                }
                make(draft, wanted, &ips);
                Ok(())
            };
            let expect = || {
                let mut draft = expected_table((filter, &tables), wanted, (family, &ips))?;
                draft.rules.extend(witness.clone());
                Some(draft)
            };
            tables.add_expected(FILTER, expect, plan)
        };
        if let Err(error) = change() {
            drop(del(filter, pod));
            drop(nft.map(|nft| nftables::del(nft, pod)));
            return Err(error);
        }
    }
    Ok(())
}

/// Isolates the ports, as far as the kernel can.
fn isolate(nft: &Nft, pod: &Pod, ingress: Ingress<'_>) -> Result<()> {
    match nftables::isolate(nft, pod, ingress) {
        Err(error) if error.errno() == Some(Errno::EOPNOTSUPP) => {
            log::warn(format_args!(
                "firewall: {error}: frames that are not IP pass between isolated containers of a bridge"
            ));
            Ok(())
        }
        outcome => Ok(outcome?),
    }
}

/// What all attachments share, if the chains of their rules have none of this one or its
/// addresses, and there is no policy of a bridge, nor was: rules of another one may be anywhere.
fn expected_table(
    (filter, tables): (&PacketFilter, &Iptables),
    wanted: Wanted<'_>,
    (family, ips): (Family, &[IpAddr]),
) -> Option<Draft> {
    let admin = wanted.admin?;
    let has_no_policy = |bridge| {
        filter.iptables_with(family, FILTER, &marker(bridge)).is_ok_and(|found| found.is_empty())
    };
    if wanted.ingress.policy != Policy::Open || !wanted.ingress.bridge.is_none_or(has_no_policy) {
        return None;
    }
    let owner = &wanted.pod.owner;
    // Most of the time of a program goes into its start.
    let (owners, accepted) = thread::scope(|scope| {
        let owners = scope.spawn(|| tables.read_chain(FILTER, OWNERS));
        let accepted = tables.read_chain(FILTER, CNI_FORWARD)?;
        Some((owners.join().ok()??, accepted))
    })?;
    let is_known = |rule: &Rule| {
        owner.owns(rule.value("--comment")) || ips.iter().any(|ip| is_owner_of(rule, *ip))
    };
    let is_accepted = |ip: &IpAddr| address_rules(*ip).iter().any(|rule| accepted.has(rule));
    if owners.rules().iter().any(is_known) || ips.iter().any(is_accepted) {
        return None;
    }
    let mut draft = Draft::empty(FILTER);
    shared(&mut draft, admin);
    draft.ensure_chain(OWNERS);
    Some(draft)
}

/// The chains of the reference and the way to them.
pub(super) fn shared(draft: &mut Draft, admin: Admin<'_>) {
    for chain in [CNI_FORWARD, admin.0] {
        draft.ensure_chain(chain);
    }
    for jump in to_chains(admin) {
        draft.insert_unique(jump);
    }
}

/// The families that the attachment has addresses of, with those.
fn families(pod: &Pod) -> Vec<(Family, Vec<IpAddr>)> {
    let of = |family| pod.ips.iter().copied().filter(move |ip| Family::of(*ip) == family);
    let all = Family::BOTH.map(|family| (family, of(family).collect::<Vec<_>>()));
    all.into_iter().filter(|(_, ips)| !ips.is_empty()).collect()
}

/// Makes what is wanted for these addresses.
pub(super) fn make(draft: &mut Draft, wanted: Wanted<'_>, ips: &[IpAddr]) {
    if let Some(admin) = wanted.admin {
        shared(draft, admin);
        draft.ensure_chain(OWNERS);
        let owner = &wanted.pod.owner;
        remove(draft, &former_addresses(draft, owner, ips));
        for ip in ips {
            // Whoever had the address is gone.
            draft.del_rules(|r| is_owner_of(r, *ip) && *r != owner_rule(*ip, owner));
            for rule in rules_of(*ip, owner) {
                draft.append_unique(rule);
            }
        }
    }
    plan_policy(draft, wanted.pod.owner.network(), wanted.ingress);
}

/// All of an address.
fn rules_of(ip: IpAddr, owner: &Owner) -> [Rule; 3] {
    let [to, from] = address_rules(ip);
    [owner_rule(ip, owner), to, from]
}

/// Addresses that the attachment had before it got `ips`.
fn former_addresses(draft: &Draft, owner: &Owner, ips: &[IpAddr]) -> Vec<IpAddr> {
    let rules = owner_rules(draft).into_iter().filter(|r| owner.owns(r.value("--comment")));
    rules.filter_map(|rule| address(&rule)).filter(|ip| !ips.contains(ip)).collect()
}

fn is_owner_of(rule: &Rule, ip: IpAddr) -> bool {
    rule.chain == OWNERS && rule.value("-s") == Some(&cidr(ip))
}

/// What another network wants of the same bridge stays.
fn plan_policy(draft: &mut Draft, network: &Network, ingress: Ingress<'_>) {
    let Some(bridge) = ingress.bridge else { return };
    let marker = marker(bridge);
    let mut owners = draft.rules().iter().filter(|rule| rule.chain == marker);
    let is_foreign = owners.any(|rule| !network.owns(rule.value("--comment")));
    let is_known = draft.has_chain(&marker);
    let rules = bridge_rules(bridge, ingress.policy);
    if !is_foreign && (is_known || ingress.policy != Policy::Open) {
        draft.del_rules(|rule| is_about(rule, bridge) && !rules.contains(rule));
    }
    if ingress.policy == Policy::Open {
        if !is_foreign {
            draft.del_chain(&marker);
        }
        return;
    }
    draft.ensure_chain(&marker);
    if !is_foreign {
        draft.append_unique(Rule::new::<&str>(&marker, []).comment(network.comment()));
    }
    make_policy(draft, bridge, ingress.policy);
}

pub(super) fn make_policy(draft: &mut Draft, bridge: &str, policy: Policy) {
    for chain in [STAGE_1, STAGE_2] {
        draft.ensure_chain(chain);
    }
    draft.insert_unique(to_stage_1());
    for rule in bridge_rules(bridge, policy) {
        draft.insert_unique(rule);
    }
    for end in stage_ends() {
        draft.append_unique(end);
    }
}

/// Verifies everything that [`add`] made, and changes nothing.
pub fn check(filter: &PacketFilter, wanted: Wanted<'_>) -> Result<()> {
    if let Some(nft) = filter.nft_if_present()? {
        nftables::check_ports(nft, wanted.pod, wanted.ingress)?;
    }
    for (family, ips) in families(wanted.pod) {
        let tables = Iptables::require(family)?;
        let draft = tables.read(FILTER)?;
        let mut rules = Vec::new();
        if let Some(admin) = wanted.admin {
            rules.extend(to_chains(admin));
            rules.extend(ips.iter().flat_map(|ip| address_rules(*ip)));
        }
        rules.extend(policy_rules(wanted.ingress));
        for rule in &rules {
            if !tables.has(&draft, rule)? {
                let error = missing(describe(rule));
                return Err(error.with_details(KEPT.remedy(wanted.pod.owner.attachment(), None)));
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
    let words = rule.words().join(" ");
    match rule.chain.as_str() {
        CNI_FORWARD if rule.value("--ctstate").is_some() || rule.goes_to("ACCEPT") => {
            format!("rule [{words}]")
        }
        chain => format!("{chain} rule [{words}]"),
    }
}

/// Removes the attachment's rules, of either flavour of iptables, whoever made them; but not
/// those of an address that another attachment has meanwhile. The chains stay.
pub fn del(filter: &PacketFilter, pod: &Pod) -> Result<()> {
    let forgotten = KEPT.remove(pod.owner.attachment());
    let expected = |family| {
        let mut draft = Draft::empty(FILTER);
        for ip in pod.ips.iter().filter(|ip| Family::of(**ip) == family) {
            for rule in rules_of(*ip, &pod.owner) {
                draft.append_unique(rule);
            }
        }
        draft
    };
    change_all(filter, expected, |draft, family| {
        let mut ips: Vec<IpAddr> =
            pod.ips.iter().copied().filter(|ip| Family::of(*ip) == family).collect();
        let owners: Vec<Rule> = owner_rules(draft);
        for rule in &owners {
            let Some(ip) = address(rule) else { continue };
            if pod.owner.owns(rule.value("--comment")) {
                ips.push(ip);
            } else {
                ips.retain(|known| *known != ip);
            }
        }
        ips.retain(|ip| !is_anothers(*ip, pod.owner.comment()));
        remove(draft, &ips);
        draft.del_rules(|rule| rule.chain == OWNERS && pod.owner.owns(rule.value("--comment")));
    })
    .and(forgotten)
}

/// Whether the address has a lease, and not of the container that the owner's comment tells.
fn is_anothers(ip: IpAddr, comment: &str) -> bool {
    let Some((id, _, network)) = identity(comment) else { return false };
    let record = comment.split(',').next().and_then(attachment::Record::read).unwrap_or_default();
    let network = if record.network.is_empty() { network } else { &record.network };
    let dir = record.data_dir.as_deref().unwrap_or(Path::new(store::DATA_DIR));
    store::lease_of(dir, network, ip).is_some_and(|lease| lease.id != id)
}

/// Removes the rules of all attachments of the network but `valid`, and when there are none of
/// those, its policies.
pub fn gc(filter: &PacketFilter, network: &Network, valid: &[Owner]) -> Result<()> {
    let attachments: Vec<_> = valid.iter().map(Owner::attachment).collect();
    let forgotten = KEPT.remove_stale(network.name(), &attachments);
    let unknown = |_| Draft::empty(FILTER);
    change_all(filter, unknown, |draft, _| {
        let is_stale = |rule: &Rule| network.has_stale(rule.value("--comment"), valid);
        let stale: Vec<Rule> = owner_rules(draft).into_iter().filter(is_stale).collect();
        let mut ips: Vec<IpAddr> = Vec::new();
        for rule in &stale {
            let is_anothers =
                |ip: &IpAddr| is_anothers(*ip, rule.value("--comment").unwrap_or_default());
            ips.extend(address(rule).filter(|ip| !is_anothers(ip)));
        }
        remove(draft, &ips);
        draft.del_rules(|rule| stale.contains(rule));
        draft.leave_one(&to_cni_forward());
        draft.leave_one(&to_stage_1());
        if !valid.is_empty() {
            return;
        }
        for chain in draft.chains().to_vec() {
            let Some(bridge) = chain.strip_prefix(BRIDGE_OWNER) else { continue };
            let mut owners = draft.rules().iter().filter(|rule| rule.chain == chain);
            if owners.all(|rule| network.owns(rule.value("--comment"))) {
                draft.del_rules(|rule| is_about(rule, bridge));
                draft.del_chain(&chain);
            }
        }
    })
    .and(forgotten)
}

fn owner_rules(draft: &Draft) -> Vec<Rule> {
    draft.rules().iter().filter(|rule| rule.chain == OWNERS).cloned().collect()
}

fn address(rule: &Rule) -> Option<IpAddr> {
    rule.value("-s")?.split('/').next()?.parse().ok()
}

fn remove(draft: &mut Draft, ips: &[IpAddr]) {
    for ip in ips {
        let rules = address_rules(*ip);
        draft.del_rules(|rule| is_owner_of(rule, *ip) || rules.contains(rule));
    }
}

/// Changes the table of each family and flavour that has chains of this plugin; starts nothing
/// where there are none.
fn change_all(
    filter: &PacketFilter,
    expected: impl Fn(Family) -> Draft,
    plan: impl Fn(&mut Draft, Family),
) -> Result<()> {
    let mut outcome = Ok(());
    for family in Family::BOTH {
        let mut programs = filter.iptables_with(family, FILTER, CNI_FORWARD)?;
        // Beside firewalld there is the second chain only.
        let others = filter.iptables_with(family, FILTER, STAGE_1)?;
        if others.len() > programs.len() {
            programs = others;
        }
        for iptables in programs {
            let change = iptables.delete_expected(&expected(family), |draft| {
                plan(draft, family);
                Ok(())
            });
            outcome = outcome.and(change);
        }
    }
    outcome
}
