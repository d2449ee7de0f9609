//! Our layout on `nf_tables`: a packet finds its subnet's chain by its source in a map, and a call
//! changes one element for each address, however many there are.
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

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use super::super::layout::{self, Change, Layout};
use super::super::names::{Owner, stale};
use crate::error::Result;
use crate::netlink::nftables::{
    Batch, Chain, Element, Field, Hook, Nft, Rule, SRCNAT, Set, Table, Type, Value, Verdict,
};

pub(super) const TABLE: Table<'_> = Table::inet("cnibox_masquerade")
    .comment("cnibox: what containers send out of their subnet gets the host's address");
const POSTROUTING: Chain<'_> = TABLE.chain("postrouting").nat(Hook::Postrouting, SRCNAT);
const PODS4: Set<'_> = TABLE.vmap("pods4", &[Type::Ipv4Addr]);
const PODS6: Set<'_> = TABLE.vmap("pods6", &[Type::Ipv6Addr]);

/// What the names of subnets' chains begin with.
const SUBNET: &str = "subnet-";

/// nft takes neither colons nor brackets in names.
fn subnet_chain(addr: IpNet) -> String {
    format!("{SUBNET}{}", addr.trunc()).replace(':', "_")
}

fn element(owner: Owner<'_>, addr: IpNet) -> Element {
    let set = if addr.addr().is_ipv4() { PODS4 } else { PODS6 };
    let element = set.element(addr.addr());
    element.verdict(Verdict::goto(subnet_chain(addr))).comment(owner.comment())
}

pub(super) fn elements(owner: Owner<'_>, addrs: &[IpNet]) -> Vec<Element> {
    addrs.iter().map(|addr| element(owner, *addr)).collect()
}

/// The rule of a subnet's chain.
fn subnet_rules(chain: &str) -> Option<Vec<Rule>> {
    let subnet = subnet(chain)?;
    Some(vec![Rule::new().daddr_not_in(subnet).masquerade().comment("what leaves the subnet")])
}

fn subnet(chain: &str) -> Option<IpNet> {
    chain.strip_prefix(SUBNET)?.replace('_', ":").parse().ok()
}

pub(super) fn layout() -> Layout {
    let [v4, v6] = multicast().map(|net| Rule::new().daddr_in(net).ret());
    let by_source = |field, set| Rule::new().vmap(&[field], set);
    let postrouting = vec![
        v4.comment("multicast"),
        v6.comment("IPv6 multicast"),
        by_source(Field::IpSaddr, PODS4).comment("by source"),
        by_source(Field::Ip6Saddr, PODS6).comment("by IPv6 source"),
    ];
    let (sets, chains) = (vec![PODS4, PODS6], vec![(POSTROUTING, postrouting)]);
    Layout { table: TABLE, sets, chains, subnet: subnet_rules }
}

pub(super) fn add(nft: &Nft, owner: Owner<'_>, addrs: &[IpNet]) -> Result<()> {
    let wanted = elements(owner, addrs);
    let fill = |change: &mut Change<'_>, found: Vec<Option<Element>>| {
        for (element, found) in wanted.iter().zip(&found) {
            change.replace(found.as_ref(), element);
        }
        Ok(())
    };
    Ok(layout::change(nft, &[layout()], &wanted, fill)?)
}

/// Where nothing is masqueraded.
pub(super) fn multicast() -> [IpNet; 2] {
    let v4 = IpNet::new_assert(Ipv4Addr::new(224, 0, 0, 0).into(), 4);
    [v4, IpNet::new_assert(Ipv6Addr::from(0xff00 << 112).into(), 8)]
}

pub(super) fn has(nft: &Nft, owner: Owner<'_>, addr: IpNet) -> Result<bool> {
    let wanted = element(owner, addr);
    Ok(nft.element(&wanted)?.as_ref() == Some(&wanted) && layout().damage(nft, || true)?.is_none())
}

pub(super) fn del(nft: &Nft, owner: Owner<'_>, addrs: &[IpNet]) -> Result<()> {
    if !nft.has(TABLE)? {
        return Ok(());
    }
    // Between look and deletion the address may get another owner.
    let wanted = elements(owner, addrs);
    let find = |nft: &Nft| nft.find_of(&[PODS4, PODS6], &wanted, &owner.matcher());
    Ok(layout().remove(nft, &find)?)
}

/// An address that is masqueraded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pod {
    /// With the prefix length of its subnet.
    pub(super) net: IpNet,
    /// The owner, as the element's comment has it.
    pub(super) comment: String,
}

/// All addresses.
pub(super) fn pods(nft: &Nft) -> crate::netlink::Result<Vec<Pod>> {
    Ok(nft.find(&[PODS4, PODS6], &[])?.into_iter().filter_map(pod).collect())
}

fn pod(element: Element) -> Option<Pod> {
    let [Value::Ip(addr)] = element.key.0.as_slice() else { return None };
    let net = IpNet::new(*addr, subnet(element.leads_to()?)?.prefix_len()).ok()?;
    Some(Pod { net, comment: element.comment.unwrap_or_default() })
}

/// Also removes the chains of subnets that no element leads to any more.
pub(super) fn gc(nft: &Nft, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    if !nft.has(TABLE)? {
        return Ok(());
    }
    let is_stale = stale(network, valid);
    nft.update(&mut |nft| {
        let (mut batch, mut used) = (Batch::new(), Vec::new());
        for element in nft.find(&[PODS4, PODS6], &[])? {
            if is_stale(element.comment.as_deref()) {
                batch.del_element(&element);
            } else {
                used.extend(element.leads_to().map(str::to_owned));
            }
        }
        let chains = nft.dump_chains(TABLE)?.into_iter().map(|chain| chain.name);
        for name in chains.filter(|name| name.starts_with(SUBNET) && !used.contains(name)) {
            batch.del(TABLE.chain(&name));
        }
        Ok(batch)
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_of_subnets() {
        let name = |text: &str| subnet_chain(text.parse().unwrap());
        assert_eq!(name("10.1.2.3/24"), "subnet-10.1.2.0/24");
        assert_eq!(name("2001:db8::5/64"), "subnet-2001_db8__/64");
    }
}
