//! The reference plugin's nftables rules: table `cni_hostport` of either family. The comment of each rule is the
//! container's id; nothing identifies the network. They are created only to hand over to the reference.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::layout::{self, ANY, HOST, MAPPED};
use super::{Forward, Snat, flows};
use crate::cni::ip::host_net;
use crate::netfilter::layout::HandedOver;
use crate::netfilter::names::container;
use crate::netfilter::{Family, Owner};
use crate::netlink::Result;
use crate::netlink::nftables::{
    Batch, Chain, DSTNAT, Data, Element, Hook, Key, Nft, Rule, SRCNAT, Table, Value,
};

/// The chains with rules of containers; releases differ in which they use.
const CHAINS: [&str; 3] = ["hostports", "hostip_hostports", "masquerading"];

fn table(family: Family) -> Table<'static> {
    Table::new(family.into(), "cni_hostport").comment("CNI portmap plugin")
}

/// Deletes the rules of container `id`. Returns the addresses that they redirected UDP to.
pub(super) fn del(nft: &Nft, id: &str) -> Result<BTreeSet<IpAddr>> {
    let (mut batch, mut servers) = (Batch::new(), BTreeSet::new());
    for table in Family::BOTH.map(table) {
        if !nft.has(table)? {
            continue;
        }
        for chain in CHAINS.map(|name| table.chain(name)) {
            let rules = nft.rules_of(chain, &|comment| comment == Some(id))?;
            servers.extend(rules.iter().filter_map(flows::served_by));
            batch.del_rules(table, &rules);
        }
    }
    nft.commit(batch)?;
    Ok(servers)
}

/// Whether the reference created all mappings of the container, by the number of its rules, as its own CHECK counts.
pub(super) fn has(nft: &Nft, owner: Owner<'_>, forward: &Forward) -> Result<bool> {
    for target in forward.targets.iter().copied() {
        let wanted = forward.mappings_to(target).count();
        let is_own = |comment: Option<&str>| comment == Some(owner.id);
        let chain = |name| table(Family::of(target.addr())).chain(name);
        let count = |name| nft.rules_of(chain(name), &is_own).map(|rules| rules.len());
        let [ports, by_address, masquerading] = CHAINS;
        let sources = match forward.snat {
            Snat::WhereNeeded if target.addr().is_ipv4() => 2,
            Snat::WhereNeeded | Snat::Always => 1,
            Snat::Never => 0,
        };
        let has_ports = count(ports)? + count(by_address)? >= wanted;
        if wanted > 0 && !(has_ports && count(masquerading)? >= sources) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Adds the rules of all our elements to the reference's layout. Not converted, but counted, are elements whose
/// comment is too short for the container's id, and rules with conditions. Counts rules.
pub(super) fn create(nft: &Nft, batch: &mut Batch) -> Result<HandedOver> {
    let mut handed = HandedOver::default();
    for family in Family::BOTH {
        let at = family as usize;
        let mut rules = Vec::new();
        // Mappings of a single address come first, since they take precedence.
        for element in nft.find(&[HOST[at], ANY[at], MAPPED[at]], &[])? {
            let converted = rules_of(&element);
            handed.nameless += usize::from(converted.is_empty());
            rules.extend(converted);
        }
        handed.objects += rules.len();
        if !rules.is_empty() {
            create_rules(batch, table(family), &rules);
        }
    }
    // The first rule is part of the layout.
    handed.conditional = nft.dump_rules(layout::CONDITIONAL)?.len().saturating_sub(1);
    Ok(handed)
}

/// Adds rules to the chains of these names, and the fixed chains of the table.
fn create_rules(batch: &mut Batch, table: Table<'_>, rules: &[(&str, Rule)]) {
    let [hostports, by_address, masquerading] = CHAINS.map(|name| table.chain(name));
    let all = table.chain("hostports_all");
    batch.ensure(table).ensure(hostports).ensure(by_address);
    refill(batch, all, &[by_address, hostports].map(|chain| Rule::new().jump(chain.name)));
    for (name, hook) in [("prerouting", Hook::Prerouting), ("output", Hook::Output)] {
        let entry = Rule::new().daddr_is_local().jump(all.name);
        refill(batch, table.chain(name).nat(hook, DSTNAT), &[entry]);
    }
    batch.ensure(masquerading.nat(Hook::Postrouting, SRCNAT));
    for (chain, rule) in rules {
        batch.append_rule(table.chain(chain), rule);
    }
}

fn refill(batch: &mut Batch, chain: Chain<'_>, rules: &[Rule]) {
    batch.ensure(chain).flush_chain(chain);
    for rule in rules {
        batch.append_rule(chain, rule);
    }
}

/// The reference's rules for an element, each with the name of its chain.
fn rules_of(element: &Element) -> Vec<(&'static str, Rule)> {
    let Some(id) = element.comment.as_deref().and_then(container) else { return Vec::new() };
    match (element.key.0.as_slice(), &element.data) {
        ([Value::Ip(addr)], _) => {
            let masquerade = |sources| {
                let rule = Rule::new().saddr_in(sources).daddr(*addr).masquerade();
                ("masquerading", rule.comment(id))
            };
            sources_of(layout::snat_of(element), *addr).into_iter().map(masquerade).collect()
        }
        ([on @ .., Value::Proto(proto), Value::Port(from)], Some(Data::Values(Key(to)))) => {
            let [Value::Ip(addr), Value::Port(to)] = to.as_slice() else { return Vec::new() };
            let rule = if let [Value::Ip(on)] = on { Rule::new().daddr(*on) } else { Rule::new() };
            vec![("hostports", rule.dport(*proto, *from).dnat(*addr, *to).comment(id))]
        }
        _ => Vec::new(),
    }
}

/// The sources that the reference masquerades: the container itself where our layout masquerades its subnet.
fn sources_of(snat: Option<Snat>, addr: IpAddr) -> Vec<IpNet> {
    let (all, loopback) = match addr {
        IpAddr::V4(_) => (Ipv4Net::default().into(), Some(host_net(Ipv4Addr::LOCALHOST.into()))),
        IpAddr::V6(_) => (Ipv6Net::default().into(), None),
    };
    match snat {
        Some(Snat::Always) => vec![all],
        Some(Snat::WhereNeeded) => [host_net(addr)].into_iter().chain(loopback).collect(),
        Some(Snat::Never) | None => Vec::new(),
    }
}
