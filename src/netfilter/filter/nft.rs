//! Filter rules in `nf_tables`: two tables of our own with a fixed number of rules. An attachment
//! adds only elements of sets.
//!
//! ```text
//! table inet cnibox_firewall {
//!     set pods4, pods6                the containers' addresses
//!     set bridges { ifname }          bridges with an ingress policy
//!     set same_bridge { ifname . ifname }   br . br, where neighbours may reach each other
//!     chain forward {                 hook forward, policy accept
//!         iifname @bridges oifname @bridges jump isolation
//!         jump admin                  an administrator's own rules
//!         ct state established,related ip daddr @pods4 accept
//!         ip saddr @pods4 accept      (and both for pods6)
//!         ct status dnat ip daddr @pods4 accept
//!     }
//!     chain isolation {
//!         iifname . oifname @same_bridge return
//!         ct state established,related ct status dnat return
//!         ct status dnat oifname . oifname @same_bridge return
//!         drop
//!     }
//! }
//! table bridge cnibox_firewall {      created with the first isolated attachment
//!     set ports { ifname }            the host ends of isolated containers
//!     chain forward {                 frames from one port of a bridge to another
//!         iifname @ports drop
//!         oifname @ports drop
//!     }
//! }
//! ```
//!
//! Connections that the host translates to a container, to a published port, are accepted. If the
//! container's bridge has the policy `same-bridge`, they are accepted from any bridge: a port is
//! published in order to be reached.
//!
//! Packets that are accepted here may still be dropped by another table or by iptables: no table
//! can overrule a drop of another. A node that drops forwarded traffic by default does so in the
//! chain `forward` above (`nft chain inet cnibox_firewall forward '{ policy drop; }'`), which is
//! created once and then left unchanged. Dropping frames between ports needs no `br_netfilter`, and
//! applies to all protocols, also with the back end iptables. Frames between a container and the
//! bridge itself, such as ARP, are not forwarded and so not dropped.

use std::net::IpAddr;

use super::{FirewallPart, IngressPolicy, RECORDS, decides_policy, unused_policy_links};
use crate::attachment::{StoredRecord, decode_part};
use crate::netfilter::backend::{PacketFilter, RuleBackend};
use crate::netfilter::elements::{RecordedElements, differing_data, elements_of_part};
use crate::netfilter::layout::{LayoutTransaction, TableLayout};
use crate::netfilter::names::{
    AttachmentId, has_same_owner, network_hash, network_label, stale_matcher,
};
use crate::netlink::NetlinkResult;
use crate::netlink::nftables::{
    BRIDGE_FILTER, CT_STATE_ANSWERS, FILTER, NetfilterHook, NftBatch, NftChain, NftRule, NftSet,
    NftSocket, NftTable, NftValue, PacketField, SetElement, TableFamily, ValueType,
};
use cni::error;
use cni::json::Json;

const TABLE: NftTable<'_> =
    NftTable::new_inet("cnibox_firewall").with_comment("cnibox: plugin firewall");
const FORWARD: NftChain<'_> =
    TABLE.named_chain("forward").at_filter_hook(NetfilterHook::Forward, FILTER);
const ISOLATION: NftChain<'_> =
    TABLE.named_chain("isolation").with_comment("between bridges with a policy");
const ADMIN: NftChain<'_> =
    TABLE.named_chain("admin").with_comment("the administrator's own rules");
const BRIDGES: NftSet<'_> = TABLE.named_set("bridges", &[ValueType::IfName]);
const SAME_BRIDGE: NftSet<'_> =
    TABLE.named_set("same_bridge", &[ValueType::IfName, ValueType::IfName]);

const FRAMES: NftTable<'_> =
    NftTable::new(TableFamily::Bridge, "cnibox_firewall").with_comment("cnibox: plugin firewall");
const FRAMES_FORWARD: NftChain<'_> =
    FRAMES.named_chain("forward").at_filter_hook(NetfilterHook::Forward, BRIDGE_FILTER);
/// The comment of an element is its owner.
const PORTS: NftSet<'_> = FRAMES.named_set("ports", &[ValueType::IfName]);

/// The containers' addresses of IPv4 and IPv6; the comment of an element is its owner.
const PODS: [NftSet<'_>; 2] = [
    TABLE.named_set("pods4", &[ValueType::Ipv4Addr]),
    TABLE.named_set("pods6", &[ValueType::Ipv6Addr]),
];

/// All sets of both tables.
pub(super) const SETS: [NftSet<'_>; 5] = [PODS[0], PODS[1], BRIDGES, SAME_BRIDGE, PORTS];

const PUBLISHED: &str = "published ports of containers";
const PUBLISHED6: &str = "published IPv6 ports of containers";
const ANSWERS: &str = "answers of published ports";
const NEIGHBOURS_PORTS: &str = "published ports of neighbours";

fn address_elements(owner: AttachmentId<'_>, ips: &[IpAddr]) -> Vec<SetElement> {
    let label = owner.object_label();
    ips.iter()
        .map(|ip| PODS[usize::from(ip.is_ipv6())].element_with_key(*ip).with_comment(&label))
        .collect()
}

/// The elements of an attachment, and whether they are to be present or absent. With the back end
/// iptables only the ports are isolated here.
fn desired_elements(owner: AttachmentId<'_>, pod: &FirewallPart) -> Vec<(SetElement, bool)> {
    let (own, shared) = (owner.object_label(), network_label(owner.network));
    let port = |port: &String| PORTS.element_with_key(port.as_str()).with_comment(&own);
    let is_isolated = pod.policy == IngressPolicy::Isolated;
    let mut all = Vec::new();
    if pod.backend == RuleBackend::Nftables && pod.admin.is_some() {
        all.extend(address_elements(owner, &pod.ips).into_iter().map(|element| (element, true)));
    }
    all.extend(pod.ports.iter().map(|name| (port(name), is_isolated)));
    if pod.backend == RuleBackend::Nftables
        && let Some(bridge) = pod.bridge.as_deref()
    {
        let bridges = BRIDGES.element_with_key(bridge).with_comment(&shared);
        let neighbours = SAME_BRIDGE.element_with_key((bridge, bridge)).with_comment(&shared);
        all.push((bridges, pod.policy != IngressPolicy::Open));
        all.push((neighbours, pod.policy == IngressPolicy::SameBridge));
    }
    all
}

pub(super) fn add_elements(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    pod: &FirewallPart,
) -> NetlinkResult<()> {
    let needed =
        if pod.policy == IngressPolicy::Isolated { &LAYOUTS[..] } else { &[PACKET_LAYOUT] };
    apply_elements(filter, &desired_elements(owner, pod), needed)
}

/// With the back end iptables: isolates the ports, or ends their isolation.
pub(super) fn isolate_ports(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    pod: &FirewallPart,
) -> NetlinkResult<()> {
    if pod.policy == IngressPolicy::Isolated || filter.nft_socket()?.has_object(FRAMES)? {
        apply_elements(filter, &desired_elements(owner, pod), &[FRAME_LAYOUT])?;
    }
    Ok(())
}

fn apply_elements(
    filter: &PacketFilter,
    all: &[(SetElement, bool)],
    needed: &[TableLayout],
) -> NetlinkResult<()> {
    let elements: Vec<_> = all.iter().map(|(element, _)| element.clone()).collect();
    filter.own_tables()?.change_tables(needed, &elements, &mut |change, found| {
        for ((element, is_present), found) in all.iter().zip(&found) {
            let is_own = found.as_ref().is_some_and(|found| has_same_owner(found, element));
            if *is_present && !is_own {
                change.claim_element(found.as_ref(), element);
            } else if !is_present && is_own {
                change.batch.delete_element(element);
            }
        }
        Ok(())
    })
}

pub(super) const ELEMENTS: RecordedElements = RecordedElements {
    kept: RECORDS,
    layout: PACKET_LAYOUT,
    sets: &SETS,
    of_part: |owner, part| elements_of_part(owner, part, recorded_elements),
    find_conflict: differing_data,
};

fn recorded_elements(owner: AttachmentId<'_>, pod: &FirewallPart) -> Vec<SetElement> {
    let present = desired_elements(owner, pod).into_iter().filter(|(_, is_present)| *is_present);
    present.map(|(element, _)| element).collect()
}

/// Restores the elements of all records, if one of the sets was flushed.
pub(super) fn restore_elements(change: &mut LayoutTransaction<'_>) {
    if !SETS.iter().any(|set| change.is_flushed(*set)) {
        return;
    }
    let all = change.restorable_records::<Json>(RECORDS);
    for kept in &all {
        // What is left of a policy is that of the latest ADD, which may be gone.
        let bridge = kept.content.get_member("bridge").and_then(Json::as_str);
        let has_policy =
            bridge.is_some_and(|bridge| change.has_occupant(&BRIDGES.element_with_key(bridge)));
        let restores = (!has_policy || change.was_flushed(SAME_BRIDGE))
            && decides_policy(kept, &all, &|_| true);
        let mut elements = (ELEMENTS.of_part)(kept.attachment_id(), &kept.content);
        elements.retain(|element| restores || ![BRIDGES, SAME_BRIDGE].contains(&element.set));
        for element in &elements {
            change.restore_element(element);
        }
    }
}

pub(super) const LAYOUTS: [TableLayout; 2] = [PACKET_LAYOUT, FRAME_LAYOUT];

const PACKET_LAYOUT: TableLayout = TableLayout {
    sets: &[PODS[0], PODS[1], BRIDGES, SAME_BRIDGE],
    chains: &[
        (ADMIN, &[]),
        (
            ISOLATION,
            &[
                ("neighbours", || to_same_bridge(NftRule::new(), PacketField::Iifname)),
                (ANSWERS, || if_answer(NftRule::new().match_dnat()).return_to_caller()),
                (NEIGHBOURS_PORTS, || {
                    to_same_bridge(NftRule::new().match_dnat(), PacketField::Oifname)
                }),
                ("others", || NftRule::new().drop()),
            ],
        ),
        (
            FORWARD,
            &[
                ("between bridges with a policy", || {
                    let from = NftRule::new().in_set(&[PacketField::Iifname], BRIDGES);
                    from.in_set(&[PacketField::Oifname], BRIDGES).jump_to(ISOLATION.name)
                }),
                ("the administrator's own rules", || NftRule::new().jump_to(ADMIN.name)),
                ("answers to containers", || {
                    accept_if(if_answer(NftRule::new()), PacketField::IpDaddr)
                }),
                ("IPv6 answers to containers", || {
                    accept_if(if_answer(NftRule::new()), PacketField::Ip6Daddr)
                }),
                ("from containers", || accept_if(NftRule::new(), PacketField::IpSaddr)),
                ("IPv6 from containers", || accept_if(NftRule::new(), PacketField::Ip6Saddr)),
                (PUBLISHED, || accept_if(NftRule::new().match_dnat(), PacketField::IpDaddr)),
                (PUBLISHED6, || accept_if(NftRule::new().match_dnat(), PacketField::Ip6Daddr)),
            ],
        ),
    ],
    ..TableLayout::new(TABLE)
};

fn if_answer(rule: NftRule) -> NftRule {
    rule.any_bit_set(PacketField::CtState, CT_STATE_ANSWERS)
}

/// Accepts packets with the address of a container in this field.
fn accept_if(rule: NftRule, address: PacketField) -> NftRule {
    let is_ipv6 = matches!(address, PacketField::Ip6Saddr | PacketField::Ip6Daddr);
    rule.in_set(&[address], PODS[usize::from(is_ipv6)]).accept()
}

/// Returns for packets that leave by the interface in this field.
fn to_same_bridge(rule: NftRule, from: PacketField) -> NftRule {
    rule.in_set(&[from, PacketField::Oifname], SAME_BRIDGE).return_to_caller()
}

/// The table for frames between two ports of a bridge.
const FRAME_LAYOUT: TableLayout = TableLayout {
    sets: &[PORTS],
    chains: &[(
        FRAMES_FORWARD,
        &[
            ("from isolated ports", || {
                NftRule::new().in_set(&[PacketField::Iifname], PORTS).drop()
            }),
            ("to isolated ports", || NftRule::new().in_set(&[PacketField::Oifname], PORTS).drop()),
        ],
    )],
    ..TableLayout::new(FRAMES)
};

/// The attachment's elements with these addresses, or, if `ips` is empty, all of its elements.
fn find_own_elements(
    nft: &NftSocket,
    owner: AttachmentId<'_>,
    ips: &[IpAddr],
) -> NetlinkResult<Vec<SetElement>> {
    nft.find_elements_by_comment(&PODS, &address_elements(owner, ips), &owner.comment_matcher())
}

/// Whether one of the addresses is the attachment's.
pub(super) fn has_elements(
    nft: &NftSocket,
    owner: AttachmentId<'_>,
    ips: &[IpAddr],
) -> NetlinkResult<bool> {
    Ok(!find_own_elements(nft, owner, ips)?.is_empty())
}

/// The part of a record without the policy of its bridge, unless this record decides the policy,
/// and none is in force: a policy in force is that of the latest ADD, which may be gone.
pub(super) fn decided_part(
    filter: &PacketFilter,
    kept: &StoredRecord<Json>,
    all: &[StoredRecord<Json>],
) -> error::Result<Json> {
    let mut part = kept.content.clone();
    let Some(pod) = decode_part::<FirewallPart>(&part) else { return Ok(part) };
    if pod.backend == RuleBackend::Nftables
        && let Some(bridge) = pod.bridge.as_deref()
        && (!decides_policy(kept, all, &|_| true)
            || filter.nft_socket()?.read_element(&BRIDGES.element_with_key(bridge))?.is_some())
        && let Some(bridge) = part.get_member_mut("bridge")
    {
        *bridge = Json::Null;
    }
    Ok(part)
}

/// Removes the attachment's elements; without addresses or ports they are searched for. Removes the
/// policy of its `own` link, if any.
pub(super) fn delete_elements(
    nft: &NftSocket,
    owner: AttachmentId<'_>,
    ips: &[IpAddr],
    ports: &[String],
    own: Option<&str>,
) -> NetlinkResult<()> {
    let ports: Vec<_> = ports.iter().map(|port| PORTS.element_with_key(port.as_str())).collect();
    ELEMENTS.delete_found(nft, Some(owner), &mut |nft, _| {
        let mut found = find_own_elements(nft, owner, ips)?;
        found.extend(nft.find_elements_by_comment(&[PORTS], &ports, &owner.comment_matcher())?);
        if let Some(link) = own {
            let policy =
                [BRIDGES.element_with_key(link), SAME_BRIDGE.element_with_key((link, link))];
            found.extend(nft.read_elements(&policy)?.into_iter().flatten());
        }
        Ok(found)
    })
}

/// Removes stale elements, if no attachment is valid all elements of the network, and the policies
/// of links that are not in use.
pub(super) fn remove_stale_elements(
    nft: &NftSocket,
    network: &str,
    valid: &[AttachmentId<'_>],
) -> NetlinkResult<()> {
    let (hash, is_stale) = (network_hash(network), stale_matcher(network, valid));
    let which = |comment: Option<&str>| {
        is_stale(comment) || comment.is_some_and(|text| valid.is_empty() && text.starts_with(&hash))
    };
    let link = |element: &SetElement| match element.key.0.first() {
        Some(NftValue::IfName(link)) if element.set != PORTS => Some(link.clone()),
        _ => None,
    };
    ELEMENTS.delete_found(nft, None, &mut |nft, _| {
        let mut found = nft.find_elements(&SETS, &[])?;
        let unused = unused_policy_links(found.iter().filter_map(link).collect(), &[]);
        let is_left =
            |element: &SetElement| link(element).is_some_and(|link| unused.contains(&link));
        found.retain(|element| which(element.comment.as_deref()) || is_left(element));
        Ok(found)
    })
}

/// Bridges with a policy.
type BridgePolicies = Vec<(String, IngressPolicy)>;

/// The content of the tables that rules of the reference can express: the containers' addresses and
/// the policies.
pub(super) fn read_content(nft: &NftSocket) -> NetlinkResult<(Vec<IpAddr>, BridgePolicies)> {
    let (mut ips, mut bridges) = (Vec::new(), Vec::new());
    for element in nft.find_elements(&PODS, &[])? {
        if let Some(NftValue::Ip(ip)) = element.key.0.first() {
            ips.push(*ip);
        }
    }
    for element in nft.find_elements(&[BRIDGES], &[])? {
        let Some(NftValue::IfName(bridge)) = element.key.0.first() else { continue };
        let open_inside =
            nft.read_element(&SAME_BRIDGE.element_with_key((bridge.as_str(), bridge.as_str())))?;
        let policy =
            if open_inside.is_some() { IngressPolicy::SameBridge } else { IngressPolicy::Isolated };
        bridges.push((bridge.clone(), policy));
    }
    Ok((ips, bridges))
}

/// Deletes the tables; if an administrator has added rules, only the elements.
pub(super) fn delete_tables(nft: &NftSocket) -> NetlinkResult<()> {
    let mut batch = NftBatch::new();
    if nft.has_object(FRAMES)? {
        batch.delete_object(FRAMES);
    }
    if nft.has_object(TABLE)? && nft.dump_rules(ADMIN)?.is_empty() {
        batch.delete_object(TABLE);
    } else {
        for set in PACKET_LAYOUT.sets.iter().copied() {
            if nft.has_object(set)? {
                batch.flush_set(set);
            }
        }
    }
    nft.commit_batch(batch)
}
