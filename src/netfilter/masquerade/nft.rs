//! Masquerading on `nf_tables`. In our layout a packet finds its subnet's chain by its source address in a map, and
//! a call changes one element per address, however many there are:
//!
//! ```text
//! table inet cnibox_masquerade {
//!     map pods4 {
//!         type ipv4_addr : verdict
//!         elements = { 10.1.2.3 comment "<hash>, net: .." : goto subnet-10.1.2.0/24 }
//!     }
//!     chain postrouting {
//!         type nat hook postrouting priority srcnat
//!         ip daddr 224.0.0.0/4 return
//!         ip6 daddr ff00::/8 return
//!         ip saddr vmap @pods4
//!         ip6 saddr vmap @pods6
//!     }
//!     chain subnet-10.1.2.0/24 {
//!         ip daddr != 10.1.2.0/24 masquerade
//!     }
//! }
//! ```
//!
//! An address of several attachments has the element of the first one, as with iptables, where the first chain decides.
//!
//! The reference has one rule per address in `inet cni_plugins_masquerade`, chain `masq_checks`, with the same
//! comments. Its rules are accepted and deleted; they are created only to hand over to the reference.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use super::super::layout::{HandedOver, Layout};
use super::super::shared::{has_owner_of, heirs, serves};
use super::super::{Backend, Owner, PacketFilter};
use super::{KEPT, Record};
use crate::netlink::Result;
use crate::netlink::nftables::{
    Batch, ByComment, Chain, Element, Field, Hook, Nft, Rule, SRCNAT, Set, Table, Type, Value,
    Verdict,
};

pub(super) const TABLE: Table<'_> = Table::inet("cnibox_masquerade")
    .comment("cnibox: what containers send out of their subnet gets the host's address");
const POSTROUTING: Chain<'_> = TABLE.chain("postrouting").nat(Hook::Postrouting, SRCNAT);
pub(super) const PODS: [Set<'_>; 2] =
    [TABLE.vmap("pods4", &[Type::Ipv4Addr]), TABLE.vmap("pods6", &[Type::Ipv6Addr])];

/// The prefix of the names of subnets' chains.
const SUBNET: &str = "subnet-";

const REFERENCE: Table<'_> = Table::inet("cni_plugins_masquerade")
    .comment("Masquerading for plugins from github.com/containernetworking/plugins");
const MASQ_CHECKS: Chain<'_> = REFERENCE
    .chain("masq_checks")
    .comment("Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet");

/// nft accepts neither colons nor brackets in names.
fn subnet_chain(addr: IpNet) -> String {
    format!("{SUBNET}{}", addr.trunc()).replace(':', "_")
}

fn subnet(chain: &str) -> Option<IpNet> {
    chain.strip_prefix(SUBNET)?.replace('_', ":").parse().ok()
}

fn subnet_rules(chain: &str) -> Option<Vec<Rule>> {
    let leaves = Rule::new().daddr_not_in(subnet(chain)?);
    Some(vec![leaves.masquerade().comment("what leaves the subnet")])
}

fn elements(owner: Owner<'_>, addrs: &[IpNet]) -> Vec<Element> {
    let element = |addr: &IpNet| {
        let element = PODS[usize::from(addr.addr().is_ipv6())].element(addr.addr());
        element.verdict(Verdict::goto(subnet_chain(*addr))).comment(owner.comment())
    };
    addrs.iter().map(element).collect()
}

/// The elements of a record.
pub(super) fn recorded(owner: Owner<'_>, record: &Record) -> Vec<Element> {
    match record.backend {
        Backend::Nftables => elements(owner, &record.addrs),
        Backend::Iptables => Vec::new(),
    }
}

pub(super) fn layout() -> Layout {
    let [v4, v6] = multicast().map(|net| Rule::new().daddr_in(net).ret());
    let by_source = |field, set| Rule::new().vmap(&[field], set);
    let postrouting = vec![
        v4.comment("multicast"),
        v6.comment("IPv6 multicast"),
        by_source(Field::IpSaddr, PODS[0]).comment("by source"),
        by_source(Field::Ip6Saddr, PODS[1]).comment("by IPv6 source"),
    ];
    let chains = vec![(POSTROUTING, postrouting)];
    Layout { table: TABLE, sets: PODS.to_vec(), chains, additions: &[], subnet: subnet_rules }
}

/// The destinations that are never masqueraded.
fn multicast() -> [IpNet; 2] {
    let v4 = IpNet::new_assert(Ipv4Addr::new(224, 0, 0, 0).into(), 4);
    [v4, IpNet::new_assert(Ipv6Addr::from(0xff00 << 112).into(), 8)]
}

pub(super) fn add(filter: &PacketFilter, owner: Owner<'_>, addrs: &[IpNet]) -> Result<()> {
    let wanted = elements(owner, addrs);
    filter.tables()?.change(&[layout()], &wanted, &mut |change, found| {
        for (element, found) in wanted.iter().zip(&found) {
            change.claim(found.as_ref(), element);
        }
        Ok(())
    })
}

/// Whether the address is masqueraded, in our layout or the reference's.
pub(super) fn has(nft: &Nft, owner: Owner<'_>, addr: IpNet) -> Result<bool> {
    let wanted = elements(owner, &[addr]);
    let mut found = wanted.iter().zip(nft.elements(&wanted)?);
    if found.all(|(wanted, found)| serves(found.as_ref(), wanted))
        && layout().damage(nft, &|| true)?.is_none()
    {
        return Ok(true);
    }
    Ok(!nft.rules_of(MASQ_CHECKS, &owner.matcher())?.is_empty())
}

pub(super) fn del(nft: &Nft, owner: Owner<'_>, addrs: &[IpNet]) -> Result<()> {
    let known = elements(owner, addrs);
    let find = &mut |nft: &Nft, _: &mut Batch| nft.find_of(&PODS, &known, &owner.matcher());
    layout().hand_on(nft, KEPT, find, &|deleted| heirs(KEPT, Some(owner), deleted, recorded))
}

/// Deletes stale elements, and the chains of subnets without elements.
pub(super) fn gc(nft: &Nft, is_stale: ByComment<'_>) -> Result<()> {
    let find = &mut |nft: &Nft, _: &mut Batch| nft.find_of(&PODS, &[], is_stale);
    layout().hand_on(nft, KEPT, find, &|deleted| heirs(KEPT, None, deleted, recorded))?;
    nft.update(&mut |nft| {
        let mut batch = Batch::new();
        for chain in nft.dump_chains(TABLE)? {
            if subnet_rules(&chain.name).is_some_and(|rules| chain.uses as usize <= rules.len()) {
                batch.del(TABLE.chain(&chain.name));
            }
        }
        Ok(batch)
    })
}

/// Deletes rules of the reference's layout.
pub(super) fn del_reference(nft: &Nft, which: ByComment<'_>) -> Result<()> {
    let mut batch = Batch::new();
    batch.del_rules(REFERENCE, &nft.rules_of(MASQ_CHECKS, which)?);
    nft.commit(batch)
}

/// Adds the rules of all our elements to the reference's layout. Counts addresses.
pub(super) fn create_reference(nft: &Nft, batch: &mut Batch) -> Result<HandedOver> {
    let mut pods = nft.find(&PODS, &[])?;
    pods.extend(sharing(&pods));
    pods.retain(|pod| net_of(pod).is_some());
    let handed = HandedOver { objects: pods.len(), ..HandedOver::default() };
    if pods.is_empty() {
        return Ok(handed);
    }
    let postrouting = REFERENCE.chain("postrouting").nat(Hook::Postrouting, SRCNAT);
    batch.ensure(REFERENCE).ensure(MASQ_CHECKS).ensure(postrouting).flush_chain(postrouting);
    for net in multicast() {
        batch.append_rule(postrouting, &Rule::new().daddr_in(net).ret());
    }
    batch.append_rule(postrouting, &Rule::new().goto(MASQ_CHECKS.name));
    let is_replaced = |comment: Option<&str>| {
        comment.is_some() && pods.iter().any(|pod| pod.comment.as_deref() == comment)
    };
    batch.del_rules(REFERENCE, &nft.rules_of(MASQ_CHECKS, &is_replaced)?);
    for pod in &pods {
        let Some(net) = net_of(pod) else { continue };
        let leaves = Rule::new().saddr(net.addr()).daddr_not_in(net.trunc()).masquerade();
        batch.append_rule(MASQ_CHECKS, &leaves.comment(pod.comment.as_deref().unwrap_or_default()));
    }
    Ok(handed)
}

/// The elements that other living attachments would have if the addresses were theirs alone: the reference has a rule for each.
fn sharing(pods: &[Element]) -> Vec<Element> {
    let is_shared = |element: &Element| {
        let has_key = |pod: &Element| pod.set == element.set && pod.key == element.key;
        pods.iter().any(|pod| has_key(pod) && !has_owner_of(pod, element))
    };
    let living = KEPT.living::<Record>();
    let elements = living.iter().flat_map(|kept| recorded(kept.owner(), &kept.content));
    elements.filter(is_shared).collect()
}

/// The address of an element, with the prefix length of its subnet.
fn net_of(pod: &Element) -> Option<IpNet> {
    let [Value::Ip(addr)] = pod.key.0.as_slice() else { return None };
    IpNet::new(*addr, subnet(pod.leads_to()?)?.prefix_len()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_named_after_subnets() {
        let name = |text: &str| subnet_chain(text.parse().unwrap());
        assert_eq!(name("10.1.2.3/24"), "subnet-10.1.2.0/24");
        assert_eq!(name("2001:db8::5/64"), "subnet-2001_db8__/64");
    }
}
