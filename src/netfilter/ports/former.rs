//! The reference plugin's nftables rules: table `cni_hostport` of either family, each rule with
//! the container's id as its comment, and nothing that tells the network. They are made only when
//! the reference takes over.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::layout::{self, Sets};
use super::{Forward, Snat, Target, flows};
use crate::cni::ip::host_net;
use crate::error::Result;
use crate::netfilter::backend::Family;
use crate::netfilter::handover::HandedOver;
use crate::netfilter::names::container;
use crate::netlink;
use crate::netlink::nftables::{
    self, Batch, Chain, DSTNAT, Data, Element, Hook, Key, L4, Nft, Rule, SRCNAT, Table, Value,
};

/// Chains that have rules of containers; releases differ in which they use.
const CHAINS: [&str; 3] = ["hostports", "hostip_hostports", "masquerading"];

/// Deletes the rules of container `id`; where they led UDP to.
pub fn del(nft: &Nft, id: &str) -> Result<BTreeSet<IpAddr>> {
    let (mut batch, mut servers) = (Batch::new(), BTreeSet::new());
    for family in [nftables::Family::Ip, nftables::Family::Ip6] {
        let table = Table::new(family, "cni_hostport");
        if !nft.has_table(table)? {
            continue;
        }
        for chain in CHAINS.map(|name| table.chain(name)) {
            let rules = nft.dump_rules(chain)?;
            for rule in rules.iter().filter(|rule| rule.comment.as_deref() == Some(id)) {
                servers.extend(flows::served_by(rule));
                batch.del_rule(chain, rule.handle);
            }
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
        let table = Table::new(family_of(target), "cni_hostport");
        let count = |name| -> netlink::Result<usize> {
            let rules = nft.dump_rules(table.chain(name))?.into_iter();
            Ok(rules.filter(|rule| rule.comment.as_deref() == Some(forward.owner.id)).count())
        };
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

fn family_of(target: &Target) -> nftables::Family {
    match target.family() {
        Family::V4 => nftables::Family::Ip,
        Family::V6 => nftables::Family::Ip6,
    }
}

/// A rule of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Former {
    /// The container.
    pub(super) id: String,
    /// Its address.
    pub(super) addr: IpAddr,
    /// What the rule does.
    pub(super) what: What,
}

/// What a rule of a container does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// Leads a port of the host, of one of its addresses or of all, to a port of the container.
    Map(Option<IpAddr>, L4, u16, u16),
    /// Translates the source of clients from here.
    Masquerade(IpNet),
}

/// Adds the rules of one family to what the reference may have there.
pub(super) fn make(batch: &mut Batch, family: nftables::Family, rules: &[Former]) {
    let table = Table::new(family, "cni_hostport").comment("CNI portmap plugin");
    let [hostports, by_address, masquerading] =
        ["hostports", "hostip_hostports", "masquerading"].map(|name| table.chain(name));
    let all = table.chain("hostports_all");
    let masquerading = masquerading.nat(Hook::Postrouting, SRCNAT);
    batch.ensure_table(table).ensure_chain(hostports).ensure_chain(by_address);
    refill(batch, all, [by_address, hostports].map(|chain| Rule::new().jump(chain.name())));
    for (name, hook) in [("prerouting", Hook::Prerouting), ("output", Hook::Output)] {
        let entry = Rule::new().daddr_is_local().jump(all.name());
        refill(batch, table.chain(name).nat(hook, DSTNAT), [entry]);
    }
    batch.ensure_chain(masquerading);
    for former in rules {
        let (chain, rule) = match former.what {
            What::Map(on, proto, from, to) => {
                let rule = on.map_or_else(Rule::new, |on| Rule::new().daddr(on));
                (hostports, rule.dport(proto, from).dnat(former.addr, Some(to)))
            }
            What::Masquerade(sources) => {
                let rule = Rule::new().saddr_in(sources).daddr(former.addr);
                (masquerading, rule.masquerade())
            }
        };
        batch.append_rule(chain, &rule.comment(&former.id));
    }
}

fn refill<const N: usize>(batch: &mut Batch, chain: Chain<'_>, rules: [Rule; N]) {
    batch.ensure_chain(chain).flush_chain(chain);
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
) -> netlink::Result<Vec<Former>> {
    let sets = Sets::of(family);
    let mut all = Vec::new();
    for set in [sets.host, sets.any, sets.mapped] {
        all.extend(nft.dump_elements(set)?);
    }
    let mut rules = Vec::new();
    for element in &all {
        let made = former_rules(element);
        handed.nameless += usize::from(made.is_empty());
        rules.extend(made);
    }
    handed.objects += rules.len();
    Ok(rules)
}

fn former_rules(element: &Element) -> Vec<Former> {
    let Some(id) = element.comment.as_deref().and_then(container) else { return Vec::new() };
    let former = |addr, what| Former { id: id.to_owned(), addr, what };
    match (element.key.0.as_slice(), &element.data) {
        ([Value::Ip(addr)], _) => {
            let sources = former_sources(layout::snat_of(element), *addr);
            sources.map(|sources| former(*addr, What::Masquerade(sources))).collect()
        }
        ([on @ .., Value::Proto(proto), Value::Port(from)], Some(Data::Values(Key(to)))) => {
            let [Value::Ip(addr), Value::Port(to)] = to.as_slice() else { return Vec::new() };
            let on = if let [Value::Ip(on)] = on { Some(*on) } else { None };
            vec![former(*addr, What::Map(on, *proto, *from, *to))]
        }
        _ => Vec::new(),
    }
}

/// The reference masquerades the container itself where we do its subnet.
fn former_sources(snat: Option<Snat>, addr: IpAddr) -> impl Iterator<Item = IpNet> {
    let all: IpNet = match addr {
        IpAddr::V4(_) => Ipv4Net::default().into(),
        IpAddr::V6(_) => Ipv6Net::default().into(),
    };
    let loopback = addr.is_ipv4().then(|| host_net(Ipv4Addr::LOCALHOST.into()));
    let [first, second] = match snat {
        Some(Snat::Always) => [Some(all), None],
        Some(Snat::WhereNeeded) => [Some(host_net(addr)), loopback],
        Some(Snat::Never) | None => [None, None],
    };
    first.into_iter().chain(second)
}
