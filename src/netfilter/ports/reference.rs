//! The reference plugin's nftables rules: table `cni_hostport` of either family. The comment of
//! each rule is the container's id; nothing identifies the network. They are created only to hand
//! over to the reference.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::layout::{self, ANY, HOST, MAPPED};
use super::{PortmapPart, SourceTranslation, flows};
use crate::attachment::decode_part;
use crate::netfilter::layout::HandoverCount;
use crate::netfilter::names::container_of_label;
use crate::netfilter::{AttachmentId, IpFamily};
use crate::netlink::NetlinkResult;
use crate::netlink::nftables::{
    DSTNAT, ElementData, ElementKey, NetfilterHook, NftBatch, NftChain, NftRule, NftSocket,
    NftTable, NftValue, SRCNAT, SetElement,
};
use cni::ip::host_net;
use cni::json::Json;

/// The chains with rules of containers; releases differ in which they use.
const CHAINS: [&str; 3] = ["hostports", "hostip_hostports", "masquerading"];

fn reference_table(family: IpFamily) -> NftTable<'static> {
    NftTable::new(family.into(), "cni_hostport").with_comment("CNI portmap plugin")
}

/// Deletes the rules of container `id`. Returns the addresses that they redirected UDP to.
pub(super) fn delete_rules(nft: &NftSocket, id: &str) -> NetlinkResult<BTreeSet<IpAddr>> {
    let (mut batch, mut servers) = (NftBatch::new(), BTreeSet::new());
    for table in IpFamily::BOTH.map(reference_table) {
        if !nft.has_object(table)? {
            continue;
        }
        for chain in CHAINS.map(|name| table.named_chain(name)) {
            let rules = nft.find_rules_by_comment(chain, &|comment| comment == Some(id))?;
            servers.extend(rules.iter().filter_map(flows::udp_server_of_rule));
            batch.delete_rules(table, &rules);
        }
    }
    nft.commit_batch(batch)?;
    Ok(servers)
}

/// Whether the reference created all mappings of the container, by the number of its rules, as its
/// own CHECK counts.
pub(super) fn has_rules(
    nft: &NftSocket,
    owner: AttachmentId<'_>,
    part: &Json,
) -> NetlinkResult<bool> {
    let Some(forward) = decode_part::<PortmapPart>(part) else { return Ok(false) };
    for target in forward.targets.iter().copied() {
        let wanted = forward.mappings_to(target).count();
        let chain = |name| reference_table(IpFamily::of_address(target.addr())).named_chain(name);
        let count = |name| {
            nft.find_rules_by_comment(chain(name), &|comment| comment == Some(owner.id))
                .map(|rules| rules.len())
        };
        let [ports, by_address, masquerading] = CHAINS;
        let sources = match forward.snat {
            SourceTranslation::WhereNeeded if target.addr().is_ipv4() => 2,
            SourceTranslation::WhereNeeded | SourceTranslation::Always => 1,
            SourceTranslation::Never => 0,
        };
        let has_ports = count(ports)? + count(by_address)? >= wanted;
        if wanted > 0 && !(has_ports && count(masquerading)? >= sources) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Adds the rules of all our elements to the reference's layout. Not converted, but counted, are
/// elements whose comment is too short for the container's id, and rules with conditions. Counts
/// rules.
pub(super) fn convert_elements(
    nft: &NftSocket,
    batch: &mut NftBatch,
) -> NetlinkResult<HandoverCount> {
    let mut handed = HandoverCount::default();
    for family in IpFamily::BOTH {
        let at = family as usize;
        let mut rules = Vec::new();
        // Mappings of a single address come first, since they take precedence.
        for element in nft.find_elements(&[HOST[at], ANY[at], MAPPED[at]], &[])? {
            let converted = rules_of_element(&element);
            handed.nameless += usize::from(converted.is_empty());
            rules.extend(converted);
        }
        handed.objects += rules.len();
        if !rules.is_empty() {
            create_rules(batch, reference_table(family), &rules);
        }
    }
    // The first rule is part of the layout.
    handed.conditional = nft.dump_rules(layout::CONDITIONAL)?.len().saturating_sub(1);
    Ok(handed)
}

/// Adds rules to the chains of these names, and the fixed chains of the table.
fn create_rules(batch: &mut NftBatch, table: NftTable<'_>, rules: &[(&str, NftRule)]) {
    let [hostports, by_address, masquerading] = CHAINS.map(|name| table.named_chain(name));
    let all = table.named_chain("hostports_all");
    batch.ensure_object(table).ensure_object(hostports).ensure_object(by_address);
    refill_chain(
        batch,
        all,
        &[by_address, hostports].map(|chain| NftRule::new().jump_to(chain.name)),
    );
    for (name, hook) in
        [("prerouting", NetfilterHook::Prerouting), ("output", NetfilterHook::Output)]
    {
        let entry = NftRule::new().daddr_is_local().jump_to(all.name);
        refill_chain(batch, table.named_chain(name).at_nat_hook(hook, DSTNAT), &[entry]);
    }
    batch.ensure_object(masquerading.at_nat_hook(NetfilterHook::Postrouting, SRCNAT));
    for (chain, rule) in rules {
        batch.append_rule(table.named_chain(chain), rule);
    }
}

fn refill_chain(batch: &mut NftBatch, chain: NftChain<'_>, rules: &[NftRule]) {
    batch.ensure_object(chain).flush_chain(chain);
    for rule in rules {
        batch.append_rule(chain, rule);
    }
}

/// The reference's rules for an element, each with the name of its chain.
fn rules_of_element(element: &SetElement) -> Vec<(&'static str, NftRule)> {
    let Some(id) = element.comment.as_deref().and_then(container_of_label) else {
        return Vec::new();
    };
    match (element.key.0.as_slice(), &element.data) {
        ([NftValue::Ip(addr)], _) => masqueraded_sources(layout::snat_of_element(element), *addr)
            .into_iter()
            .map(|sources| {
                let rule = NftRule::new().saddr_in(sources).daddr_is(*addr).masquerade();
                ("masquerading", rule.with_comment(id))
            })
            .collect(),
        (
            [on @ .., NftValue::Proto(proto), NftValue::Port(from)],
            Some(ElementData::Values(ElementKey(to))),
        ) => {
            let [NftValue::Ip(addr), NftValue::Port(to)] = to.as_slice() else { return Vec::new() };
            let rule = if let [NftValue::Ip(on)] = on {
                NftRule::new().daddr_is(*on)
            } else {
                NftRule::new()
            };
            vec![("hostports", rule.dport_is(*proto, *from).dnat_to(*addr, *to).with_comment(id))]
        }
        _ => Vec::new(),
    }
}

/// The sources that the reference masquerades: the container itself where our layout masquerades
/// its subnet.
fn masqueraded_sources(snat: Option<SourceTranslation>, addr: IpAddr) -> Vec<IpNet> {
    let (all, loopback) = match addr {
        IpAddr::V4(_) => (Ipv4Net::default().into(), Some(host_net(Ipv4Addr::LOCALHOST.into()))),
        IpAddr::V6(_) => (Ipv6Net::default().into(), None),
    };
    match snat {
        Some(SourceTranslation::Always) => vec![all],
        Some(SourceTranslation::WhereNeeded) => {
            [host_net(addr)].into_iter().chain(loopback).collect()
        }
        Some(SourceTranslation::Never) | None => Vec::new(),
    }
}
