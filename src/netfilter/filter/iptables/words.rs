//! The rules, in the words of the reference as far as it has them.

use std::net::IpAddr;

use super::super::Policy;
use crate::cni::ip::host_net;
use crate::netfilter::iptables::Rule;

pub(super) const FORWARD: &str = "FORWARD";
pub(super) const CNI_FORWARD: &str = "CNI-FORWARD";
pub(super) const STAGE_1: &str = "CNI-ISOLATION-STAGE-1";
pub(super) const STAGE_2: &str = "CNI-ISOLATION-STAGE-2";
/// The chains that show the use of the plugin; with firewalld only the second one exists.
pub(super) const CHAINS: [&str; 2] = [CNI_FORWARD, STAGE_1];
pub(super) const OWNERS: &str = "CNIBOX-FIREWALL";
pub(super) const BRIDGE_OWNER: &str = "CNIBOX-FW-";

/// The default of `iptablesAdminChainName`.
pub const DEFAULT_ADMIN: &str = "CNI-ADMIN";

const RULES: &str = "CNI firewall plugin rules";
const OVERRIDES: &str = "CNI firewall plugin admin overrides";
const ANY_POLICY: &str = "CNI firewall plugin rules (ingressPolicy: same-bridge|isolated)";

/// The comment of rules that the reference does not have.
pub(super) const PUBLISHED: &str = "cnibox: published ports";

/// The match for packets of known connections.
const ANSWERS: [&str; 4] = ["-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"];
/// The match for connections whose destination the host translates.
const TRANSLATED: [&str; 4] = ["-m", "conntrack", "--ctstate", "DNAT"];

fn jump(chain: &str, comment: &str, target: &str) -> Rule {
    Rule::new(chain).comment(comment).target(target)
}

pub(super) fn to_cni_forward() -> Rule {
    jump(FORWARD, RULES, CNI_FORWARD)
}

pub(super) fn to_chains(admin: &str) -> [Rule; 2] {
    [to_cni_forward(), jump(CNI_FORWARD, OVERRIDES, admin)]
}

pub(super) fn address_rules(ip: IpAddr) -> [Rule; 2] {
    let cidr = host_net(ip).to_string();
    [
        Rule::new(CNI_FORWARD).with(&["-d", &cidr]).with(&ANSWERS).target("ACCEPT"),
        Rule::new(CNI_FORWARD).with(&["-s", &cidr]).target("ACCEPT"),
    ]
}

/// Accepts what the host translates to the address: its published ports. The reference has no such rule.
pub(super) fn published_rule(ip: IpAddr) -> Rule {
    let rule = Rule::new(CNI_FORWARD).with(&["-d", &host_net(ip).to_string()]);
    rule.with(&TRANSLATED).comment(PUBLISHED).target("ACCEPT")
}

/// The rules for a bridge that are inserted at the beginning of their chains, in this order.
pub(super) fn bridge_rules(bridge: &str, policy: Policy) -> Vec<Rule> {
    if policy == Policy::Open {
        return Vec::new();
    }
    let comment = format!("{RULES} (ingressPolicy: {})", policy.as_str());
    let out = Rule::new(STAGE_1).with(&["-i", bridge, "!", "-o", bridge]);
    let mut rules = vec![
        out.comment(&comment).target(STAGE_2),
        Rule::new(STAGE_2).with(&["-o", bridge]).comment(ANY_POLICY).target("DROP"),
    ];
    if policy == Policy::Isolated {
        let within = Rule::new(STAGE_1).with(&["-i", bridge, "-o", bridge]);
        rules.push(within.comment(&comment).target("DROP"));
    }
    rules
}

/// The rule that lets translated traffic pass to a bridge: connections with the policy `same-bridge`, only answers with
/// `isolated`. The reference has no such rule.
pub(super) fn translated_rule(bridge: &str, policy: Policy) -> Option<Rule> {
    let rule = Rule::new(STAGE_2).with(&["-o", bridge]);
    let rule = match policy {
        Policy::Open => return None,
        Policy::SameBridge => rule.with(&TRANSLATED),
        Policy::Isolated => rule.with(&ANSWERS),
    };
    Some(rule.comment(PUBLISHED).target("RETURN"))
}

pub(super) fn to_stage_1() -> Rule {
    jump(FORWARD, ANY_POLICY, STAGE_1)
}

pub(super) fn stage_ends() -> [Rule; 2] {
    [STAGE_1, STAGE_2].map(|stage| jump(stage, ANY_POLICY, "RETURN"))
}

/// Whether a rule is part of a bridge's policy.
pub(super) fn is_about(rule: &Rule, bridge: &str) -> bool {
    let names = [rule.value("-i"), rule.value("-o")];
    [STAGE_1, STAGE_2].contains(&rule.chain.as_str()) && names.contains(&Some(bridge))
}
