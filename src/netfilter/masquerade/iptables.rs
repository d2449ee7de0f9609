//! The reference's layout with iptables: a chain for each container and network.
//!
//! ```text
//! -A POSTROUTING -s 10.1.2.4/32 .. -j CNI-<hash>
//! -A CNI-<hash> -d 10.1.2.0/24 .. -j ACCEPT
//! -A CNI-<hash> ! -d 224.0.0.0/4 .. -j MASQUERADE
//! ```
//!
//! Before the last rule, `-s 10.1.2.4/32 -d NET .. -j ACCEPT` for each exception.
//!
//! The interface is not part of any name: two attachments of a container to one network share the
//! chain, which is deleted with the last address.

use std::collections::BTreeSet;

use ipnet::IpNet;

use super::super::backend::{IpFamily, PacketFilter, RuleBackend};
use super::super::iptables::{
    ChainScope, IptablesRule, IptablesTable, RANDOM_FULLY, XT_COMMENT, XT_MASQUERADE,
};
use super::super::names::{AttachmentId, rule_comment_prefix};
use super::super::rules::RecordedRules;
use super::{MasqueradeOptions, MasqueradePart, RECORDS};
use crate::attachment::decode_part;
use cni::error::Result;
use cni::ip::host_net;
use cni::json::Json;

const NAT: &str = "nat";
const POSTROUTING: &str = "POSTROUTING";

pub(super) const RULES: RecordedRules = RecordedRules {
    kept: RECORDS,
    table: NAT,
    extensions: &[XT_COMMENT, XT_MASQUERADE],
    is_of: |part, family| !recorded_addresses(part, family).is_empty(),
    plan: |table, family, stored, _| {
        if let Some(record) = decode_recorded(&stored.content) {
            let addrs = addresses_of_family(&record.addrs, family);
            plan_addition(table, stored.attachment_id(), &addrs, &record.options);
        }
        None
    },
    expected: |family, other, _| {
        let addrs = recorded_addresses(&other.content, family).into_iter();
        addrs.map(|addr| entry_rule(other.attachment_id(), addr)).collect()
    },
};

/// The addresses with rules in the family's table.
fn recorded_addresses(part: &Json, family: IpFamily) -> Vec<IpNet> {
    let record = decode_recorded(part);
    record.map(|record| addresses_of_family(&record.addrs, family)).unwrap_or_default()
}

fn decode_recorded(part: &Json) -> Option<MasqueradePart> {
    decode_part::<MasqueradePart>(part).filter(|record| record.backend == RuleBackend::Iptables)
}

fn addresses_of_family(addrs: &[IpNet], family: IpFamily) -> Vec<IpNet> {
    addrs.iter().copied().filter(|addr| IpFamily::of_address(addr.addr()) == family).collect()
}

pub(super) fn add_rules(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    record: &MasqueradePart,
) -> Result<()> {
    let chains = [POSTROUTING, &owner.iptables_chain("")];
    for family in IpFamily::BOTH {
        let addrs = addresses_of_family(&record.addrs, family);
        if !addrs.is_empty() {
            let tables = filter.default_iptables(family)?;
            let scope = ChainScope::named_chains(&chains).with_beginnings(&[(POSTROUTING, 1)]);
            RULES.add(&tables, owner, record, scope, &|table| {
                plan_addition(table, owner, &addrs, &record.options);
            })?;
        }
    }
    Ok(())
}

/// The rule that jumps to the container's chain.
fn entry_rule(owner: AttachmentId<'_>, addr: IpNet) -> IptablesRule {
    let entry =
        IptablesRule::new(POSTROUTING).with_words(&["-s", &host_net(addr.addr()).to_string()]);
    entry.with_comment(&owner.rule_comment()).with_target(&owner.iptables_chain(""))
}

fn plan_addition(
    table: &mut IptablesTable,
    owner: AttachmentId<'_>,
    addrs: &[IpNet],
    options: &MasqueradeOptions,
) {
    if addrs.is_empty() {
        return;
    }
    let (chain, comment) = (owner.iptables_chain(""), owner.rule_comment());
    let is_new = !table.has_chain(&chain);
    table.ensure_chain(&chain);
    // Before the rule that masquerades, which exists if there is an earlier address.
    let mut insert_accepting = |from: &[&str], net: IpNet| {
        // iptables-save omits a destination of prefix length 0.
        let to = ["-d".to_owned(), net.to_string()];
        let to = if net.prefix_len() == 0 { &[] } else { &to[..] };
        let stays = IptablesRule::new(&chain).with_words(from).with_words(to);
        table.insert_unique(0, stays.with_comment(&comment).with_target("ACCEPT"));
    };
    for addr in addrs {
        insert_accepting(&[], addr.trunc());
        for net in options.exceptions(IpFamily::of_address(addr.addr())) {
            insert_accepting(&["-s", &host_net(addr.addr()).to_string()], net);
        }
    }
    for addr in addrs {
        let multicast = if addr.addr().is_ipv4() { "224.0.0.0/4" } else { "ff00::/8" };
        let leaves =
            IptablesRule::new(&chain).with_words(&["!", "-d", multicast]).with_comment(&comment);
        let ports: &[_] = if options.random_fully { &[RANDOM_FULLY] } else { &[] };
        table.append_unique(leaves.with_target("MASQUERADE").with_words(ports));
        let entry = entry_rule(owner, *addr);
        if is_new {
            // No rule jumps to a chain that did not exist.
            table.append_new(entry);
        } else {
            table.append_unique(entry);
        }
    }
}

pub(super) fn delete_rules(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    addrs: &[IpNet],
) -> Result<()> {
    let chain = owner.iptables_chain("");
    filter.delete_iptables_rules(
        NAT,
        &[&chain],
        ChainScope::named_chains(&[POSTROUTING, &chain]),
        &|table, _| {
            plan_deletion(table, owner, addrs);
        },
    )
}

/// Also deletes the rules of old versions of the reference, which matched the whole subnet in
/// POSTROUTING.
fn plan_deletion(table: &mut IptablesTable, owner: AttachmentId<'_>, addrs: &[IpNet]) {
    let (chain, comment) = (owner.iptables_chain(""), owner.rule_comment());
    let sources = addrs.iter().flat_map(|addr| [host_net(addr.addr()), addr.trunc()]);
    let sources: Vec<String> = sources.map(|net| net.to_string()).collect();
    table.delete_rules(|rule| match rule.option_value("-s") {
        Some(source) if !addrs.is_empty() => {
            (rule.goes_to(&chain) || rule.chain == chain) && sources.iter().any(|own| own == source)
        }
        // Another network and container may share the chain: its name is a hash of both texts
        // joined.
        _ => {
            addrs.is_empty()
                && rule.goes_to(&chain)
                && rule.option_value("--comment").is_none_or(|c| c == comment)
        }
    });
    table.delete_unused_chain(&chain);
}

pub(super) fn remove_stale_rules(
    filter: &PacketFilter,
    network: &str,
    valid: &[AttachmentId<'_>],
) -> Result<()> {
    filter.delete_iptables_rules(NAT, &[], ChainScope::All, &|table, _| {
        plan_stale_removal(table, network, valid);
    })
}

/// Deletes the chains of the network's containers without a valid attachment. They are found by the
/// comments of their rules, or of a rule in POSTROUTING without its chain.
fn plan_stale_removal(table: &mut IptablesTable, network: &str, valid: &[AttachmentId<'_>]) {
    let prefix = rule_comment_prefix(network);
    let mut stale: BTreeSet<(String, String)> = BTreeSet::new();
    for rule in &table.rules {
        let Some(comment) = rule.option_value("--comment") else { continue };
        let Some(id) = comment.strip_prefix(&prefix) else { continue };
        let id = id.trim_end_matches('"');
        let chain = AttachmentId { network, ifname: "", id }.iptables_chain("");
        // Other plugins comment their rules in the same way.
        let is_masquerading = rule.chain == chain || rule.goes_to(&chain);
        if is_masquerading && !valid.iter().any(|owner| owner.id == id) {
            stale.insert((chain, comment.to_owned()));
        }
    }
    for (chain, comment) in stale {
        table.delete_rules(|rule| {
            rule.goes_to(&chain) && rule.option_value("--comment") == Some(&comment)
        });
        table.delete_unused_chain(&chain);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: AttachmentId<'_> = AttachmentId { network: "net", ifname: "eth0", id: "c1" };

    fn table_with(owner: AttachmentId<'_>, addrs: &[&str]) -> IptablesTable {
        let mut table = IptablesTable::parse_save_output(NAT, ":POSTROUTING ACCEPT [0:0]\n");
        add(&mut table, owner, addrs);
        table
    }

    fn add(table: &mut IptablesTable, owner: AttachmentId<'_>, addrs: &[&str]) {
        plan_addition(table, owner, &nets(addrs), &MasqueradeOptions::default());
    }

    fn nets(addrs: &[&str]) -> Vec<IpNet> {
        addrs.iter().map(|addr| addr.parse().unwrap()).collect()
    }

    fn targets(table: &IptablesTable) -> Vec<&str> {
        let chain = OWNER.iptables_chain("");
        let rules = table.rules.iter().filter(|rule| rule.chain == chain);
        rules.filter_map(|rule| rule.option_value("-j")).collect()
    }

    #[test]
    fn subnets_are_accepted_before_masquerading() {
        let mut table = table_with(OWNER, &["10.1.2.3/24"]);
        add(&mut table, OWNER, &["10.9.0.1/16", "10.1.2.4/24"]);
        assert_eq!(targets(&table), ["ACCEPT", "ACCEPT", "MASQUERADE"]);
        let before = table.rules.len();
        add(&mut table, OWNER, &["10.9.0.1/16"]);
        assert_eq!(table.rules.len(), before);
    }

    #[test]
    fn the_chain_is_deleted_with_the_last_address() {
        let mut table = table_with(OWNER, &["10.1.2.3/24", "10.1.2.4/24"]);
        plan_deletion(&mut table, OWNER, &nets(&["10.1.2.3/24"]));
        assert_eq!(table.rules.len(), 3);
        plan_deletion(&mut table, OWNER, &nets(&["10.1.2.4/24"]));
        assert_eq!((table.rules.len(), table.chains.len()), (0, 1));
    }

    #[test]
    fn without_addresses_only_rules_of_others_remain() {
        let other = AttachmentId { id: "c2", ..OWNER };
        let mut table = table_with(OWNER, &["10.1.2.3/24", "10.1.2.4/24"]);
        add(&mut table, other, &["10.1.2.5/24"]);
        plan_deletion(&mut table, OWNER, &[]);
        assert_eq!(table.chains, [POSTROUTING, &other.iptables_chain("")]);
        assert_eq!(table.rules.len(), 3);
    }

    #[test]
    fn a_shared_chain_is_deleted_with_its_second_container() {
        let [one, two] = [("n1", "2abc"), ("n12", "abc")].map(|(network, id)| AttachmentId {
            network,
            ifname: "eth0",
            id,
        });
        assert_eq!(one.iptables_chain(""), two.iptables_chain(""));
        let removals: [fn(&mut IptablesTable, AttachmentId<'_>); 3] = [
            |table, owner| plan_deletion(table, owner, &[]),
            |table, owner| plan_deletion(table, owner, &nets(&["10.1.2.3/24", "10.1.2.4/24"])[..1]),
            |table, owner| plan_stale_removal(table, owner.network, &[]),
        ];
        for remove in removals {
            let mut table = table_with(one, &["10.1.2.3/24"]);
            add(&mut table, two, &["10.1.2.4/24"]);
            remove(&mut table, one);
            let leads = |r: &&IptablesRule| {
                r.chain == POSTROUTING && r.option_value("-s") == Some("10.1.2.4/32")
            };
            assert!(
                table.rules.iter().any(|rule| leads(&rule))
                    && table.has_chain(&two.iptables_chain(""))
            );
            assert!(!table.rules.iter().any(|rule| rule.option_value("-s") == Some("10.1.2.3/32")));
            plan_deletion(&mut table, two, &[]);
            assert!(!table.has_chain(&two.iptables_chain("")));
        }
    }

    #[test]
    fn gc_deletes_rules_of_one_network() {
        let [two, elsewhere] =
            [AttachmentId { id: "c2", ..OWNER }, AttachmentId { network: "net2", ..OWNER }];
        let mut table = table_with(OWNER, &["10.1.2.3/24"]);
        add(&mut table, two, &["10.1.2.4/24"]);
        add(&mut table, elsewhere, &["10.3.0.4/24"]);
        table.append_unique(
            IptablesRule::new("CNI-X").with_target("X").with_comment(&OWNER.rule_comment()),
        );
        plan_stale_removal(&mut table, "net", &[two]);
        assert_eq!(
            table.chains,
            [POSTROUTING, &two.iptables_chain(""), &elsewhere.iptables_chain("")]
        );
        assert_eq!(table.rules.len(), 7);
    }
}
