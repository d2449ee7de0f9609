//! The reference plugin's nftables rules: table `cni_hostport` of either family, each rule with
//! the container's id as its comment, and nothing that tells the network. They are made only when
//! the reference takes over.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::layout::{self, Sets};
use super::{Forward, Snat, flows};
use crate::cni::ip::host_net;
use crate::error::Result;
use crate::netfilter::backend::Family;
use crate::netfilter::handed_over::HandedOver;
use crate::netfilter::names::container;
use crate::netlink;
use crate::netlink::nftables::{
    Batch, Chain, DSTNAT, Data, Element, Hook, Key, Nft, Rule, SRCNAT, Table, Value,
};

/// Chains that have rules of containers; releases differ in which they use.
const CHAINS: [&str; 3] = ["hostports", "hostip_hostports", "masquerading"];

/// Deletes the rules of container `id`; where they led UDP to.
pub fn del(nft: &Nft, id: &str) -> Result<BTreeSet<IpAddr>> {
    let (mut batch, mut servers) = (Batch::new(), BTreeSet::new());
    for family in Family::BOTH {
        let table = Table::new(family.into(), "cni_hostport");
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

/// Whether the reference made all mappings of the container, by the number of its rules, as its own
/// CHECK counts.
pub fn has(nft: &Nft, forward: &Forward<'_>) -> Result<bool> {
    for target in forward.targets {
        let wanted = forward.mappings_to(target).count();
        let table = Table::new(target.family().into(), "cni_hostport");
        let is_own = |comment: Option<&str>| comment == Some(forward.owner.id);
        let count = |name| nft.rules_of(table.chain(name), &is_own).map(|rules| rules.len());
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

/// A rule of a container, and the chain that it belongs to.
pub(super) struct Mapped {
    chain: &'static str,
    rule: Rule,
}

/// Adds the rules of one family to what the reference may have there.
pub(super) fn make(batch: &mut Batch, family: Family, rules: &[Mapped]) {
    let table = Table::new(family.into(), "cni_hostport").comment("CNI portmap plugin");
    let [hostports, by_address, masquerading] =
        ["hostports", "hostip_hostports", "masquerading"].map(|name| table.chain(name));
    let all = table.chain("hostports_all");
    let masquerading = masquerading.nat(Hook::Postrouting, SRCNAT);
    batch.ensure(table).ensure(hostports).ensure(by_address);
    refill(batch, all, [by_address, hostports].map(|chain| Rule::new().jump(chain.name)));
    for (name, hook) in [("prerouting", Hook::Prerouting), ("output", Hook::Output)] {
        let entry = Rule::new().daddr_is_local().jump(all.name);
        refill(batch, table.chain(name).nat(hook, DSTNAT), [entry]);
    }
    batch.ensure(masquerading);
    for mapped in rules {
        batch.append_rule(table.chain(mapped.chain), &mapped.rule);
    }
}

fn refill<const N: usize>(batch: &mut Batch, chain: Chain<'_>, rules: [Rule; N]) {
    batch.ensure(chain).flush_chain(chain);
    for rule in rules {
        batch.append_rule(chain, &rule);
    }
}

/// All mappings in the reference's terms, those of one address first, which win; without those
/// whose comment is too short for the container. Both are counted in `handed`.
pub(super) fn read(
    nft: &Nft,
    family: Family,
    handed: &mut HandedOver,
) -> netlink::Result<Vec<Mapped>> {
    let sets = Sets::of(family);
    let mut rules = Vec::new();
    for element in nft.find(&[sets.host, sets.any, sets.mapped], &[])? {
        let made = rules_of(&element);
        handed.nameless += usize::from(made.is_empty());
        rules.extend(made);
    }
    handed.objects += rules.len();
    Ok(rules)
}

fn rules_of(element: &Element) -> Vec<Mapped> {
    let Some(id) = element.comment.as_deref().and_then(container) else { return Vec::new() };
    match (element.key.0.as_slice(), &element.data) {
        ([Value::Ip(addr)], _) => {
            let masquerade = |sources| Mapped {
                chain: "masquerading",
                rule: Rule::new().saddr_in(sources).daddr(*addr).masquerade().comment(id),
            };
            sources_of(layout::snat_of(element), *addr).into_iter().map(masquerade).collect()
        }
        ([on @ .., Value::Proto(proto), Value::Port(from)], Some(Data::Values(Key(to)))) => {
            let [Value::Ip(addr), Value::Port(to)] = to.as_slice() else { return Vec::new() };
            let rule = if let [Value::Ip(on)] = on { Rule::new().daddr(*on) } else { Rule::new() };
            let rule = rule.dport(*proto, *from).dnat(*addr, *to).comment(id);
            vec![Mapped { chain: "hostports", rule }]
        }
        _ => Vec::new(),
    }
}

/// The reference masquerades the container itself where we do its subnet.
fn sources_of(snat: Option<Snat>, addr: IpAddr) -> Vec<IpNet> {
    match snat {
        Some(Snat::Always) if addr.is_ipv4() => vec![Ipv4Net::default().into()],
        Some(Snat::Always) => vec![Ipv6Net::default().into()],
        Some(Snat::WhereNeeded) if addr.is_ipv4() => {
            vec![host_net(addr), host_net(Ipv4Addr::LOCALHOST.into())]
        }
        Some(Snat::WhereNeeded) => vec![host_net(addr)],
        Some(Snat::Never) | None => Vec::new(),
    }
}
