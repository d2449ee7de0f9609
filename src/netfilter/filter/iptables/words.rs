//! The rules, in the words of the reference where the reference has them.

use std::net::IpAddr;

use super::super::IngressPolicy;
use crate::netfilter::iptables::IptablesRule;
use cni::ip::host_net;

pub(super) const FORWARD: &str = "FORWARD";
pub(super) const CNI_FORWARD: &str = "CNI-FORWARD";
pub(super) const STAGE_1: &str = "CNI-ISOLATION-STAGE-1";
pub(super) const STAGE_2: &str = "CNI-ISOLATION-STAGE-2";
/// The chains that show the use of the plugin; with firewalld only the second one exists.
pub(super) const CHAINS: [&str; 2] = [CNI_FORWARD, STAGE_1];

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

fn jump_rule(chain: &str, comment: &str, target: &str) -> IptablesRule {
    IptablesRule::new(chain).with_comment(comment).with_target(target)
}

pub(super) fn cni_forward_jump() -> IptablesRule {
    jump_rule(FORWARD, RULES, CNI_FORWARD)
}

pub(super) fn shared_jumps(admin: &str) -> [IptablesRule; 2] {
    [cni_forward_jump(), jump_rule(CNI_FORWARD, OVERRIDES, admin)]
}

pub(super) fn address_rules(ip: IpAddr) -> [IptablesRule; 2] {
    let cidr = host_net(ip).to_string();
    [
        IptablesRule::new(CNI_FORWARD)
            .with_words(&["-d", &cidr])
            .with_words(&ANSWERS)
            .with_target("ACCEPT"),
        IptablesRule::new(CNI_FORWARD).with_words(&["-s", &cidr]).with_target("ACCEPT"),
    ]
}

/// Accepts connections that the host translates to the address: its published ports. The reference
/// has no such rule.
pub(super) fn published_ports_rule(ip: IpAddr) -> IptablesRule {
    let rule = IptablesRule::new(CNI_FORWARD).with_words(&["-d", &host_net(ip).to_string()]);
    rule.with_words(&TRANSLATED).with_comment(PUBLISHED).with_target("ACCEPT")
}

/// The rules for a bridge that are inserted at the beginning of their chains, in this order.
pub(super) fn bridge_rules(bridge: &str, policy: IngressPolicy) -> Vec<IptablesRule> {
    if policy == IngressPolicy::Open {
        return Vec::new();
    }
    let comment = format!("{RULES} (ingressPolicy: {})", policy.as_str());
    let out = IptablesRule::new(STAGE_1).with_words(&["-i", bridge, "!", "-o", bridge]);
    let mut rules = vec![
        out.with_comment(&comment).with_target(STAGE_2),
        IptablesRule::new(STAGE_2)
            .with_words(&["-o", bridge])
            .with_comment(ANY_POLICY)
            .with_target("DROP"),
    ];
    if policy == IngressPolicy::Isolated {
        let within = IptablesRule::new(STAGE_1).with_words(&["-i", bridge, "-o", bridge]);
        rules.push(within.with_comment(&comment).with_target("DROP"));
    }
    rules
}

/// The rule that lets translated traffic pass to a bridge: with the policy `same-bridge` all
/// connections, with `isolated` only answers. The reference has no such rule.
pub(super) fn translated_rule(bridge: &str, policy: IngressPolicy) -> Option<IptablesRule> {
    let rule = IptablesRule::new(STAGE_2).with_words(&["-o", bridge]);
    let rule = match policy {
        IngressPolicy::Open => return None,
        IngressPolicy::SameBridge => rule.with_words(&TRANSLATED),
        IngressPolicy::Isolated => rule.with_words(&ANSWERS),
    };
    Some(rule.with_comment(PUBLISHED).with_target("RETURN"))
}

pub(super) fn isolation_jump() -> IptablesRule {
    jump_rule(FORWARD, ANY_POLICY, STAGE_1)
}

pub(super) fn stage_return_rules() -> [IptablesRule; 2] {
    [STAGE_1, STAGE_2].map(|stage| jump_rule(stage, ANY_POLICY, "RETURN"))
}

/// Whether a rule is part of a bridge's policy.
pub(super) fn is_policy_rule(rule: &IptablesRule, bridge: &str) -> bool {
    let names = [rule.option_value("-i"), rule.option_value("-o")];
    [STAGE_1, STAGE_2].contains(&rule.chain.as_str()) && names.contains(&Some(bridge))
}
