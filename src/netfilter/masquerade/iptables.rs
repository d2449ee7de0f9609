//! The reference's layout with iptables: a chain for each container and network.
//!
//! ```text
//! -A POSTROUTING -s 10.1.2.4/32 .. -j CNI-<hash>
//! -A CNI-<hash> -d 10.1.2.0/24 .. -j ACCEPT
//! -A CNI-<hash> ! -d 224.0.0.0/4 .. -j MASQUERADE
//! ```
//!
//! The interface is not part of any name: two attachments of a container to one network share the chain, which is
//! deleted with the last address.

use std::collections::BTreeSet;

use ipnet::IpNet;

use super::super::backend::{Backend, Family, PacketFilter};
use super::super::iptables::{Records, Rule, Scope, Table};
use super::super::names::{Owner, rule_comment_of};
use super::{KEPT, Record};
use crate::cni::ip::host_net;
use crate::error::Result;

const NAT: &str = "nat";
const POSTROUTING: &str = "POSTROUTING";

/// For [`super::super::heal`].
pub(in crate::netfilter) const RECORDS: Records<Record> = Records {
    kept: KEPT,
    table: NAT,
    is_of: |record, family| {
        record.backend == Backend::Iptables && !of_family(family, &record.addrs).is_empty()
    },
    restore: |table, family, kept| {
        plan_add(table, kept.owner(), &of_family(family, &kept.content.addrs));
    },
};

fn of_family(family: Family, addrs: &[IpNet]) -> Vec<IpNet> {
    addrs.iter().copied().filter(|addr| Family::of(addr.addr()) == family).collect()
}

pub(super) fn add(filter: &PacketFilter, owner: Owner<'_>, addrs: &[IpNet]) -> Result<()> {
    for family in Family::BOTH {
        let addrs = of_family(family, addrs);
        if addrs.is_empty() {
            continue;
        }
        // A rule of another attachment, whose absence shows a flush.
        let witness: Option<Rule> = RECORDS.another(owner, family).and_then(|kept| {
            let addr = *of_family(family, &kept.content.addrs).first()?;
            Some(entry(kept.owner(), addr))
        });
        let plan = |table: &mut Table| {
            if witness.as_ref().is_some_and(|rule| !table.has(rule)) {
                RECORDS.restore(table, family, Some(owner));
            }
            plan_add(table, owner, &addrs);
        };
        let chains = [POSTROUTING, &owner.chain("")];
        filter.iptables(family)?.update(NAT, Scope::of(&chains), &plan)?;
    }
    Ok(())
}

/// The rule that jumps to the container's chain.
fn entry(owner: Owner<'_>, addr: IpNet) -> Rule {
    let entry = Rule::new(POSTROUTING).with(&["-s", &host_net(addr.addr()).to_string()]);
    entry.comment(&owner.rule_comment()).target(&owner.chain(""))
}

fn plan_add(table: &mut Table, owner: Owner<'_>, addrs: &[IpNet]) {
    if addrs.is_empty() {
        return;
    }
    let (chain, comment) = (owner.chain(""), owner.rule_comment());
    table.ensure_chain(&chain);
    for subnet in addrs.iter().map(IpNet::trunc) {
        // iptables-save omits a destination of prefix length 0.
        let to = ["-d".to_owned(), subnet.to_string()];
        let to = if subnet.prefix_len() == 0 { &[] } else { &to[..] };
        let stays = Rule::new(&chain).with(to).comment(&comment).target("ACCEPT");
        // Before the rule that masquerades, which exists if there is an earlier address.
        table.insert_unique(0, stays);
    }
    for addr in addrs {
        let multicast = if addr.addr().is_ipv4() { "224.0.0.0/4" } else { "ff00::/8" };
        let leaves = Rule::new(&chain).with(&["!", "-d", multicast]).comment(&comment);
        table.append_unique(leaves.target("MASQUERADE"));
        table.append_unique(entry(owner, *addr));
    }
}

pub(super) fn has(filter: &PacketFilter, owner: Owner<'_>, addr: IpNet) -> Result<bool> {
    let chain = owner.chain("");
    for tables in filter.iptables_with(Family::of(addr.addr()), NAT, &[&chain])? {
        let mut table = tables.read(NAT, Scope::of(&[POSTROUTING, &chain]))?;
        plan_add(&mut table, owner, &[addr]);
        if table.first_change().is_none() {
            return Ok(true);
        }
    }
    Ok(false)
}

pub(super) fn del(filter: &PacketFilter, owner: Owner<'_>, addrs: &[IpNet]) -> Result<()> {
    let chain = owner.chain("");
    let plan = |table: &mut Table, _| plan_del(table, owner, addrs);
    filter.delete_with_iptables(NAT, &[&chain], Scope::of(&[POSTROUTING, &chain]), &plan)
}

/// Old versions of the reference matched the whole subnet in POSTROUTING.
fn plan_del(table: &mut Table, owner: Owner<'_>, addrs: &[IpNet]) {
    let (chain, comment) = (owner.chain(""), owner.rule_comment());
    let sources = addrs.iter().flat_map(|addr| [host_net(addr.addr()), addr.trunc()]);
    let sources: Vec<String> = sources.map(|net| net.to_string()).collect();
    table.del_rules(|rule| {
        rule.goes_to(&chain)
            && match rule.value("-s") {
                Some(source) if !addrs.is_empty() => sources.iter().any(|own| own == source),
                // Another network and container may share the chain: its name is a hash of both texts joined.
                _ => addrs.is_empty() && rule.value("--comment").is_none_or(|c| c == comment),
            }
    });
    table.del_unused_chain(&chain);
}

pub(super) fn gc(filter: &PacketFilter, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    let plan = |table: &mut Table, _| plan_gc(table, network, valid);
    filter.delete_with_iptables(NAT, &[], Scope::All, &plan)
}

/// Deletes the chains of the network's containers without a valid attachment. They are found by the comments of
/// their rules, or of a rule in POSTROUTING without its chain.
fn plan_gc(table: &mut Table, network: &str, valid: &[Owner<'_>]) {
    let prefix = rule_comment_of(network);
    let mut stale: BTreeSet<(String, String)> = BTreeSet::new();
    for rule in &table.rules {
        let Some(comment) = rule.value("--comment") else { continue };
        let Some(id) = comment.strip_prefix(&prefix) else { continue };
        let id = id.trim_end_matches('"');
        let chain = Owner { network, ifname: "", id }.chain("");
        // Other plugins comment their rules in the same way.
        let is_masquerading = rule.chain == chain || rule.goes_to(&chain);
        if is_masquerading && !valid.iter().any(|owner| owner.id == id) {
            stale.insert((chain, comment.to_owned()));
        }
    }
    for (chain, comment) in stale {
        table.del_rules(|rule| rule.goes_to(&chain) && rule.value("--comment") == Some(&comment));
        table.del_unused_chain(&chain);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: Owner<'_> = Owner { network: "net", ifname: "eth0", id: "c1" };

    fn table_with(owner: Owner<'_>, addrs: &[&str]) -> Table {
        let mut table = Table::parse(NAT, ":POSTROUTING ACCEPT [0:0]\n");
        plan_add(&mut table, owner, &nets(addrs));
        table
    }

    fn nets(addrs: &[&str]) -> Vec<IpNet> {
        addrs.iter().map(|addr| addr.parse().unwrap()).collect()
    }

    fn targets(table: &Table) -> Vec<&str> {
        let chain = OWNER.chain("");
        let rules = table.rules.iter().filter(|rule| rule.chain == chain);
        rules.filter_map(|rule| rule.value("-j")).collect()
    }

    #[test]
    fn every_subnet_is_accepted_before_the_rest_is_masqueraded() {
        let mut table = table_with(OWNER, &["10.1.2.3/24"]);
        plan_add(&mut table, OWNER, &nets(&["10.9.0.1/16", "10.1.2.4/24"]));
        assert_eq!(targets(&table), ["ACCEPT", "ACCEPT", "MASQUERADE"]);
        let before = table.rules.len();
        plan_add(&mut table, OWNER, &nets(&["10.9.0.1/16"]));
        assert_eq!(table.rules.len(), before);
    }

    #[test]
    fn the_chain_is_deleted_with_the_last_address() {
        let mut table = table_with(OWNER, &["10.1.2.3/24", "10.1.2.4/24"]);
        plan_del(&mut table, OWNER, &nets(&["10.1.2.3/24"]));
        assert_eq!(table.rules.len(), 3);
        plan_del(&mut table, OWNER, &nets(&["10.1.2.4/24"]));
        assert_eq!((table.rules.len(), table.chains.len()), (0, 1));
    }

    #[test]
    fn without_addresses_only_rules_of_others_remain() {
        let other = Owner { id: "c2", ..OWNER };
        let mut table = table_with(OWNER, &["10.1.2.3/24", "10.1.2.4/24"]);
        plan_add(&mut table, other, &nets(&["10.1.2.5/24"]));
        plan_del(&mut table, OWNER, &[]);
        assert_eq!(table.chains, [POSTROUTING, &other.chain("")]);
        assert_eq!(table.rules.len(), 3);
    }

    #[test]
    fn a_shared_chain_is_deleted_with_its_second_container() {
        let [one, two] = [("n1", "2abc"), ("n12", "abc")].map(|(network, id)| Owner {
            network,
            ifname: "eth0",
            id,
        });
        assert_eq!(one.chain(""), two.chain(""));
        let removals: [fn(&mut Table, Owner<'_>); 3] = [
            |table, owner| plan_del(table, owner, &[]),
            |table, owner| plan_del(table, owner, &nets(&["10.1.2.3/24", "10.1.2.4/24"])[..1]),
            |table, owner| plan_gc(table, owner.network, &[]),
        ];
        for remove in removals {
            let mut table = table_with(one, &["10.1.2.3/24"]);
            plan_add(&mut table, two, &nets(&["10.1.2.4/24"]));
            remove(&mut table, one);
            let leads = |r: &&Rule| r.chain == POSTROUTING && r.value("-s") == Some("10.1.2.4/32");
            assert!(table.rules.iter().any(|rule| leads(&rule)) && table.has_chain(&two.chain("")));
            assert!(!table.rules.iter().any(|rule| rule.value("-s") == Some("10.1.2.3/32")));
            plan_del(&mut table, two, &[]);
            assert!(!table.has_chain(&two.chain("")));
        }
    }

    #[test]
    fn gc_deletes_rules_of_one_network() {
        let [two, elsewhere] = [Owner { id: "c2", ..OWNER }, Owner { network: "net2", ..OWNER }];
        let mut table = table_with(OWNER, &["10.1.2.3/24"]);
        plan_add(&mut table, two, &nets(&["10.1.2.4/24"]));
        plan_add(&mut table, elsewhere, &nets(&["10.3.0.4/24"]));
        table.append_unique(Rule::new("CNI-X").target("X").comment(&OWNER.rule_comment()));
        plan_gc(&mut table, "net", &[two]);
        assert_eq!(table.chains, [POSTROUTING, &two.chain(""), &elsewhere.chain("")]);
        assert_eq!(table.rules.len(), 7);
    }
}
