//! Masquerading on `nf_tables`. In our layout a packet finds its subnet's chain by its source
//! address in a map, and a call changes one element per address, however many there are:
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
//! The networks of `ipMasqExcept` follow in the names and rules, and `-random` and `fully-random`
//! for `ipMasqRandomFully`: `subnet-10.1.2.0/24-10.0.0.0/8-random`.
//!
//! An address of several attachments has the element of the first one, as with iptables, where the
//! first chain decides.
//!
//! The reference has one rule per address in `inet cni_plugins_masquerade`, chain `masq_checks`,
//! with the same comments. Its rules are accepted and deleted; they are created only to hand over
//! to the reference.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use super::super::backend::IpFamily;
use super::super::elements::{RecordedElements, differing_data, elements_of_part};
use super::super::layout::{HandoverCount, TableLayout};
use super::super::names::has_same_owner;
use super::super::{AttachmentId, PacketFilter, RuleBackend};
use super::{MasqueradeOptions, MasqueradePart, RECORDS};
use crate::netlink::NetlinkResult;
use crate::netlink::nftables::{
    CommentSelector, NetfilterHook, NftBatch, NftChain, NftRule, NftSet, NftSocket, NftTable,
    NftValue, PacketField, PacketVerdict, SRCNAT, SetElement, ValueType,
};

pub(super) const TABLE: NftTable<'_> = NftTable::new_inet("cnibox_masquerade")
    .with_comment("cnibox: what containers send out of their subnet gets the host's address");
const POSTROUTING: NftChain<'_> =
    TABLE.named_chain("postrouting").at_nat_hook(NetfilterHook::Postrouting, SRCNAT);
pub(super) const PODS: [NftSet<'_>; 2] = [
    TABLE.verdict_map("pods4", &[ValueType::Ipv4Addr]),
    TABLE.verdict_map("pods6", &[ValueType::Ipv6Addr]),
];

/// The prefix of the names of subnets' chains.
const SUBNET: &str = "subnet-";
/// The suffix of those with random ports.
const RANDOM: &str = "-random";

const REFERENCE: NftTable<'_> = NftTable::new_inet("cni_plugins_masquerade")
    .with_comment("Masquerading for plugins from github.com/containernetworking/plugins");
const MASQ_CHECKS: NftChain<'_> = REFERENCE.named_chain("masq_checks").with_comment(
    "Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet",
);

/// The name of a subnet's chain. nft accepts neither colons nor brackets in names.
fn subnet_chain_name(addr: IpNet, options: &MasqueradeOptions) -> String {
    let except = options.chain_suffix(IpFamily::of_address(addr.addr()));
    let ports = if options.random_fully { RANDOM } else { "" };
    format!("{SUBNET}{}{except}{ports}", addr.trunc()).replace(':', "_")
}

/// Adds the conditions of a subnet's chain to `rule`, and its statement.
fn masquerade_by_chain(mut rule: NftRule, chain: &str) -> Option<NftRule> {
    let nets = chain.strip_prefix(SUBNET)?.replace('_', ":");
    let is_random = nets.ends_with(RANDOM);
    for net in nets.trim_end_matches(RANDOM).split('-') {
        rule = rule.daddr_not_in(net.parse().ok()?);
    }
    Some(if is_random { rule.masquerade_fully_random() } else { rule.masquerade() })
}

fn subnet_rules(chain: &str) -> Option<Vec<NftRule>> {
    let leaves = masquerade_by_chain(NftRule::new(), chain)?;
    Some(vec![leaves.with_comment("what leaves the subnet")])
}

fn address_elements(
    owner: AttachmentId<'_>,
    addrs: &[IpNet],
    options: &MasqueradeOptions,
) -> Vec<SetElement> {
    addrs
        .iter()
        .map(|addr| {
            let element = PODS[usize::from(addr.addr().is_ipv6())].element_with_key(addr.addr());
            element
                .with_verdict(PacketVerdict::go_to(subnet_chain_name(*addr, options)))
                .with_comment(owner.reference_comment())
        })
        .collect()
}

pub(super) const ELEMENTS: RecordedElements = RecordedElements {
    kept: RECORDS,
    layout: LAYOUT,
    sets: &PODS,
    of_part: |owner, part| elements_of_part(owner, part, recorded_elements),
    find_conflict: differing_data,
};

fn recorded_elements(owner: AttachmentId<'_>, record: &MasqueradePart) -> Vec<SetElement> {
    match record.backend {
        RuleBackend::Nftables => address_elements(owner, &record.addrs, &record.options),
        RuleBackend::Iptables => Vec::new(),
    }
}

pub(super) const LAYOUT: TableLayout = TableLayout {
    sets: &PODS,
    chains: &[(
        POSTROUTING,
        &[
            ("multicast", || NftRule::new().daddr_in(multicast_networks()[0]).return_to_caller()),
            ("IPv6 multicast", || {
                NftRule::new().daddr_in(multicast_networks()[1]).return_to_caller()
            }),
            ("by source", || NftRule::new().verdict_by_map(&[PacketField::IpSaddr], PODS[0])),
            ("by IPv6 source", || NftRule::new().verdict_by_map(&[PacketField::Ip6Saddr], PODS[1])),
        ],
    )],
    subnet: Some(subnet_rules),
    ..TableLayout::new(TABLE)
};

/// The destinations that are never masqueraded.
fn multicast_networks() -> [IpNet; 2] {
    let v4 = IpNet::new_assert(Ipv4Addr::new(224, 0, 0, 0).into(), 4);
    [v4, IpNet::new_assert(Ipv6Addr::from(0xff00 << 112).into(), 8)]
}

pub(super) fn add_elements(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    record: &MasqueradePart,
) -> NetlinkResult<()> {
    let wanted = recorded_elements(owner, record);
    filter.own_tables()?.change_tables(&[LAYOUT], &wanted, &mut |change, found| {
        for (element, found) in wanted.iter().zip(&found) {
            change.claim_element(found.as_ref(), element);
        }
        Ok(())
    })
}

pub(super) fn has_reference_rules(nft: &NftSocket, owner: AttachmentId<'_>) -> NetlinkResult<bool> {
    Ok(!nft.find_rules_by_comment(MASQ_CHECKS, &owner.comment_matcher())?.is_empty())
}

pub(super) fn delete_elements(
    nft: &NftSocket,
    owner: AttachmentId<'_>,
    addrs: &[IpNet],
) -> NetlinkResult<()> {
    let known = address_elements(owner, addrs, &MasqueradeOptions::default());
    ELEMENTS.delete_of_owner(nft, owner, &known)
}

/// Deletes stale elements, and the chains of subnets without elements.
pub(super) fn remove_stale_elements(
    nft: &NftSocket,
    is_stale: CommentSelector<'_>,
) -> NetlinkResult<()> {
    ELEMENTS.delete_by_comment(nft, is_stale)?;
    nft.update_tables(&mut |nft| {
        let mut batch = NftBatch::new();
        for info in nft.dump_chains(TABLE)? {
            let chain = TABLE.named_chain(&info.name);
            if LAYOUT.is_unused(nft, chain, info.uses, 0)? {
                batch.delete_object(chain);
            }
        }
        Ok(batch)
    })
}

/// Deletes rules of the reference's layout.
pub(super) fn delete_reference_rules(
    nft: &NftSocket,
    which: CommentSelector<'_>,
) -> NetlinkResult<()> {
    let mut batch = NftBatch::new();
    batch.delete_rules(REFERENCE, &nft.find_rules_by_comment(MASQ_CHECKS, which)?);
    nft.commit_batch(batch)
}

/// Adds the rules of all our elements to the reference's layout. Counts addresses.
pub(super) fn create_reference_rules(
    nft: &NftSocket,
    batch: &mut NftBatch,
) -> NetlinkResult<HandoverCount> {
    let mut pods = nft.find_elements(&PODS, &[])?;
    pods.extend(shared_elements(&pods));
    pods.retain(|pod| reference_rule(pod).is_some());
    let handed = HandoverCount { objects: pods.len(), ..HandoverCount::default() };
    if pods.is_empty() {
        return Ok(handed);
    }
    let postrouting =
        REFERENCE.named_chain("postrouting").at_nat_hook(NetfilterHook::Postrouting, SRCNAT);
    batch
        .ensure_object(REFERENCE)
        .ensure_object(MASQ_CHECKS)
        .ensure_object(postrouting)
        .flush_chain(postrouting);
    for net in multicast_networks() {
        batch.append_rule(postrouting, &NftRule::new().daddr_in(net).return_to_caller());
    }
    batch.append_rule(postrouting, &NftRule::new().go_to(MASQ_CHECKS.name));
    let is_replaced = |comment: Option<&str>| {
        comment.is_some() && pods.iter().any(|pod| pod.comment.as_deref() == comment)
    };
    batch.delete_rules(REFERENCE, &nft.find_rules_by_comment(MASQ_CHECKS, &is_replaced)?);
    for pod in &pods {
        let Some(leaves) = reference_rule(pod) else { continue };
        batch.append_rule(
            MASQ_CHECKS,
            &leaves.with_comment(pod.comment.as_deref().unwrap_or_default()),
        );
    }
    Ok(handed)
}

/// The elements that other living attachments would have if the addresses were theirs alone: the
/// reference has a rule for each.
fn shared_elements(pods: &[SetElement]) -> Vec<SetElement> {
    let living = RECORDS.restorable_parts::<MasqueradePart>();
    let elements =
        living.iter().flat_map(|kept| recorded_elements(kept.attachment_id(), &kept.content));
    elements
        .filter(|element| {
            let has_key = |pod: &SetElement| pod.set == element.set && pod.key == element.key;
            pods.iter().any(|pod| has_key(pod) && !has_same_owner(pod, element))
        })
        .collect()
}

/// The rule of the reference for the address of an element.
fn reference_rule(pod: &SetElement) -> Option<NftRule> {
    let [NftValue::Ip(addr)] = pod.key.0.as_slice() else { return None };
    masquerade_by_chain(NftRule::new().saddr_is(*addr), pod.target_chain()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_named_after_subnets() {
        let options = MasqueradeOptions::default();
        let name = |text: &str| subnet_chain_name(text.parse().unwrap(), &options);
        assert_eq!(name("10.1.2.3/24"), "subnet-10.1.2.0/24");
        assert_eq!(name("2001:db8::5/64"), "subnet-2001_db8__/64");
    }

    #[test]
    fn a_chain_is_named_after_its_options() {
        let except = ["10.0.0.0/8", "2001:db8:9::/48", "192.0.2.7"].map(ToOwned::to_owned);
        for (is_random, four, six) in [
            (
                false,
                "subnet-10.1.2.0/24-10.0.0.0/8-192.0.2.7/32",
                "subnet-2001_db8__/64-2001_db8_9__/48",
            ),
            (
                true,
                "subnet-10.1.2.0/24-10.0.0.0/8-192.0.2.7/32-random",
                "subnet-2001_db8__/64-2001_db8_9__/48-random",
            ),
        ] {
            let options = MasqueradeOptions::parse(&except, is_random).unwrap();
            for (addr, name) in [("10.1.2.3/24", four), ("2001:db8::5/64", six)] {
                assert_eq!(subnet_chain_name(addr.parse().unwrap(), &options), name);
                assert!(subnet_rules(name).is_some_and(|rules| rules.len() == 1), "{name}");
            }
        }
        assert!(subnet_rules("subnet-10.1.2.0/24-x").is_none());
        let widest = "2001:1111:1111:1111:1111:1111:1111:1111/128";
        let name = subnet_chain_name(widest.parse().unwrap(), &MasqueradeOptions::default());
        assert_eq!(name.len() + super::super::options::LONGEST_SUFFIX + RANDOM.len(), 255);
    }
}
