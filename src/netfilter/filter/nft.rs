//! Filter rules in `nf_tables`: two tables of our own with a fixed number of rules. An attachment adds only elements
//! of sets.
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
//! What the host translates to a container, a published port, is accepted, and reaches a container whose bridge has the policy
//! `same-bridge` from any bridge: whoever publishes a port wants it to be reached.
//!
//! Packets that are accepted here may still be dropped by another table or by iptables: no table can overrule a drop
//! of another. A node that drops forwarded traffic by default does so in the chain `forward` above
//! (`nft chain inet cnibox_firewall forward '{ policy drop; }'`), which is created once and then left unchanged.
//! Dropping frames between ports needs no `br_netfilter`, and applies to all protocols, with the back end iptables as
//! well. Frames between a container and the bridge itself, such as ARP, are not forwarded and so not dropped.

use std::net::IpAddr;

use super::{KEPT, Pod, Policy, missing, unused_links};
use crate::error;
use crate::netfilter::backend::{Backend, PacketFilter};
use crate::netfilter::layout::{self, Layout};
use crate::netfilter::names::{Owner, network_hash, network_label, stale};
use crate::netfilter::shared::{has_owner_of, heirs};
use crate::netlink::Result;
use crate::netlink::nftables::{
    Batch, CT_STATE_ANSWERS, CT_STATUS_DNAT, Chain, Element, FILTER, Family, Field, Hook, Nft,
    Rule, Set, Table, Type, Value,
};

const TABLE: Table<'_> = Table::inet("cnibox_firewall").comment("cnibox: plugin firewall");
const FORWARD: Chain<'_> = TABLE.chain("forward").filter(Hook::Forward, FILTER);
const ISOLATION: Chain<'_> = TABLE.chain("isolation").comment("between bridges with a policy");
const ADMIN: Chain<'_> = TABLE.chain("admin").comment("the administrator's own rules");
const BRIDGES: Set<'_> = TABLE.set("bridges", &[Type::IfName]);
const SAME_BRIDGE: Set<'_> = TABLE.set("same_bridge", &[Type::IfName, Type::IfName]);

const FRAMES: Table<'_> =
    Table::new(Family::Bridge, "cnibox_firewall").comment("cnibox: plugin firewall");
/// The priority `filter` of nft in the bridge family: `NF_BR_PRI_FILTER_BRIDGED`.
const BRIDGE_FILTER: i32 = -200;
const FRAMES_FORWARD: Chain<'_> = FRAMES.chain("forward").filter(Hook::Forward, BRIDGE_FILTER);
/// The comment of an element is its owner.
const PORTS: Set<'_> = FRAMES.set("ports", &[Type::IfName]);

/// The containers' addresses of IPv4 and IPv6; the comment of an element is its owner.
const PODS: [Set<'_>; 2] =
    [TABLE.set("pods4", &[Type::Ipv4Addr]), TABLE.set("pods6", &[Type::Ipv6Addr])];

/// All sets of both tables.
pub(super) const SETS: [Set<'_>; 5] = [PODS[0], PODS[1], BRIDGES, SAME_BRIDGE, PORTS];

const PUBLISHED: &str = "published ports of containers";
const PUBLISHED6: &str = "published IPv6 ports of containers";
const ANSWERS: &str = "answers of published ports";
const NEIGHBOURS_PORTS: &str = "published ports of neighbours";

fn addresses(owner: Owner<'_>, ips: &[IpAddr]) -> Vec<Element> {
    let label = owner.label();
    let element = |ip: &IpAddr| PODS[usize::from(ip.is_ipv6())].element(*ip).comment(&label);
    ips.iter().map(element).collect()
}

/// The elements of an attachment, and whether they are to be present or absent. With the back end iptables only the
/// ports are isolated here.
fn elements(owner: Owner<'_>, pod: &Pod) -> Vec<(Element, bool)> {
    let (own, shared) = (owner.label(), network_label(owner.network));
    let port = |port: &String| PORTS.element(port.as_str()).comment(&own);
    let is_isolated = pod.policy == Policy::Isolated;
    let mut all = Vec::new();
    if pod.backend == Backend::Nftables && pod.admin.is_some() {
        all.extend(addresses(owner, &pod.ips).into_iter().map(|element| (element, true)));
    }
    all.extend(pod.ports.iter().map(|name| (port(name), is_isolated)));
    if pod.backend == Backend::Nftables
        && let Some(bridge) = pod.bridge.as_deref()
    {
        let bridges = BRIDGES.element(bridge).comment(&shared);
        let neighbours = SAME_BRIDGE.element((bridge, bridge)).comment(&shared);
        all.push((bridges, pod.policy != Policy::Open));
        all.push((neighbours, pod.policy == Policy::SameBridge));
    }
    all
}

pub(super) fn add(filter: &PacketFilter, owner: Owner<'_>, pod: &Pod) -> Result<()> {
    let needed = if pod.policy == Policy::Isolated { layouts() } else { vec![layout()] };
    put(filter, &elements(owner, pod), &needed)
}

/// With the back end iptables: isolates the ports, or ends their isolation.
pub(super) fn isolate(filter: &PacketFilter, owner: Owner<'_>, pod: &Pod) -> Result<()> {
    if pod.policy == Policy::Isolated || filter.nft()?.has(FRAMES)? {
        put(filter, &elements(owner, pod), &[frames()])?;
    }
    Ok(())
}

fn put(filter: &PacketFilter, all: &[(Element, bool)], needed: &[Layout]) -> Result<()> {
    let elements: Vec<_> = all.iter().map(|(element, _)| element.clone()).collect();
    filter.tables()?.change(needed, &elements, &mut |change, found| {
        for ((element, is_present), found) in all.iter().zip(&found) {
            let is_own = found.as_ref().is_some_and(|found| has_owner_of(found, element));
            if *is_present && !is_own {
                change.claim(found.as_ref(), element);
            } else if !is_present && is_own {
                change.batch.del_element(element);
            }
        }
        Ok(())
    })
}

/// The elements of a record.
pub(super) fn recorded(owner: Owner<'_>, pod: &Pod) -> Vec<Element> {
    let present = elements(owner, pod).into_iter().filter(|(_, is_present)| *is_present);
    present.map(|(element, _)| element).collect()
}

/// The first missing object that attachments of this host depend on.
pub(super) fn damage(nft: &Nft) -> Result<Option<String>> {
    if nft.has(FORWARD)? || Backend::Nftables.is_recorded(KEPT) {
        let damage = layout().damage(nft, &|| true)?;
        if damage.is_some() {
            return Ok(damage);
        }
    }
    let is_isolated = || KEPT.living::<Pod>().iter().any(|kept| kept.content.isolates_ports());
    frames().damage(nft, &is_isolated)
}

pub(super) fn layouts() -> Vec<Layout> {
    vec![layout(), frames()]
}

/// The table for packets.
fn layout() -> Layout {
    let between = Rule::new()
        .in_set(&[Field::Iifname], BRIDGES)
        .in_set(&[Field::Oifname], BRIDGES)
        .jump(ISOLATION.name);
    let answers = |field, set| {
        let rule = Rule::new().any_of(Field::CtState, CT_STATE_ANSWERS);
        rule.in_set(&[field], set).accept()
    };
    let translated = || Rule::new().any_of(Field::CtStatus, CT_STATUS_DNAT);
    let from = |field, set| Rule::new().in_set(&[field], set).accept();
    let forward = vec![
        between.comment("between bridges with a policy"),
        Rule::new().jump(ADMIN.name).comment("the administrator's own rules"),
        answers(Field::IpDaddr, PODS[0]).comment("answers to containers"),
        answers(Field::Ip6Daddr, PODS[1]).comment("IPv6 answers to containers"),
        from(Field::IpSaddr, PODS[0]).comment("from containers"),
        from(Field::Ip6Saddr, PODS[1]).comment("IPv6 from containers"),
        translated().in_set(&[Field::IpDaddr], PODS[0]).accept().comment(PUBLISHED),
        translated().in_set(&[Field::Ip6Daddr], PODS[1]).accept().comment(PUBLISHED6),
    ];
    let isolation = vec![
        Rule::new()
            .in_set(&[Field::Iifname, Field::Oifname], SAME_BRIDGE)
            .ret()
            .comment("neighbours"),
        translated().any_of(Field::CtState, CT_STATE_ANSWERS).ret().comment(ANSWERS),
        translated()
            .in_set(&[Field::Oifname, Field::Oifname], SAME_BRIDGE)
            .ret()
            .comment(NEIGHBOURS_PORTS),
        Rule::new().drop().comment("others"),
    ];
    Layout {
        table: TABLE,
        sets: vec![PODS[0], PODS[1], BRIDGES, SAME_BRIDGE],
        chains: vec![(ADMIN, Vec::new()), (ISOLATION, isolation), (FORWARD, forward)],
        additions: &[PUBLISHED, PUBLISHED6, ANSWERS, NEIGHBOURS_PORTS],
        subnet: |_| None,
    }
}

/// The table for frames between two ports of a bridge.
fn frames() -> Layout {
    let drop = |field| Rule::new().in_set(&[field], PORTS).drop();
    let forward = vec![
        drop(Field::Iifname).comment("from isolated ports"),
        drop(Field::Oifname).comment("to isolated ports"),
    ];
    let chains = vec![(FRAMES_FORWARD, forward)];
    Layout { table: FRAMES, sets: vec![PORTS], chains, additions: &[], subnet: |_| None }
}

/// The attachment's elements: with these addresses, or, without any, all.
fn owned(nft: &Nft, owner: Owner<'_>, ips: &[IpAddr]) -> Result<Vec<Element>> {
    nft.find_of(&PODS, &addresses(owner, ips), &owner.matcher())
}

/// Whether one of the addresses is the attachment's.
pub(super) fn has(nft: &Nft, owner: Owner<'_>, ips: &[IpAddr]) -> Result<bool> {
    Ok(!owned(nft, owner, ips)?.is_empty())
}

/// Verifies the attachment's elements and the tables.
pub(super) fn check(nft: &Nft, owner: Owner<'_>, pod: &Pod) -> error::Result<()> {
    if pod.backend == Backend::Nftables {
        layout::refuse(layout().damage(nft, &|| true)?)?;
    }
    if pod.isolates_ports() {
        layout::refuse(frames().damage(nft, &|| true)?)?;
    }
    for element in &recorded(owner, pod) {
        if nft.element(element)?.is_none() {
            return Err(missing(owner, KEPT, &format!("element {element} of {}", element.set)));
        }
    }
    Ok(())
}

/// Removes the attachment's elements; without addresses or ports they are searched for. Removes the policy of its `own` link,
/// if any.
pub(super) fn del(
    nft: &Nft,
    owner: Owner<'_>,
    ips: &[IpAddr],
    ports: &[String],
    own: Option<&str>,
) -> Result<()> {
    let ports: Vec<_> = ports.iter().map(|port| PORTS.element(port.as_str())).collect();
    let find = &mut |nft: &Nft, _: &mut Batch| {
        let mut found = owned(nft, owner, ips)?;
        found.extend(nft.find_of(&[PORTS], &ports, &owner.matcher())?);
        if let Some(link) = own {
            let policy = [BRIDGES.element(link), SAME_BRIDGE.element((link, link))];
            found.extend(nft.elements(&policy)?.into_iter().flatten());
        }
        Ok(found)
    };
    layout().hand_on(nft, KEPT, find, &|deleted| heirs(KEPT, Some(owner), deleted, recorded))
}

/// Removes stale elements, if no attachment is valid all elements of the network, and the policies of links that are not in
/// use.
pub(super) fn gc(nft: &Nft, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    let (hash, is_stale) = (network_hash(network), stale(network, valid));
    let is_of_network = |text: &str| valid.is_empty() && text.starts_with(&hash);
    let which = |comment: Option<&str>| is_stale(comment) || comment.is_some_and(is_of_network);
    let link = |element: &Element| match element.key.0.first() {
        Some(Value::IfName(link)) if element.set != PORTS => Some(link.clone()),
        _ => None,
    };
    let find = &mut |nft: &Nft, _: &mut Batch| {
        let mut found = nft.find(&SETS, &[])?;
        let unused = unused_links(found.iter().filter_map(link).collect());
        let is_left = |element: &Element| link(element).is_some_and(|link| unused.contains(&link));
        found.retain(|element| which(element.comment.as_deref()) || is_left(element));
        Ok(found)
    };
    layout().hand_on(nft, KEPT, find, &|deleted| heirs(KEPT, None, deleted, recorded))
}

/// Bridges with a policy.
type Bridges = Vec<(String, Policy)>;

/// The content of the tables that rules of the reference can express: the containers' addresses and the policies.
pub(super) fn content(nft: &Nft) -> Result<(Vec<IpAddr>, Bridges)> {
    let (mut ips, mut bridges) = (Vec::new(), Vec::new());
    for element in nft.find(&PODS, &[])? {
        if let Some(Value::Ip(ip)) = element.key.0.first() {
            ips.push(*ip);
        }
    }
    for element in nft.find(&[BRIDGES], &[])? {
        let Some(Value::IfName(bridge)) = element.key.0.first() else { continue };
        let open_inside = nft.element(&SAME_BRIDGE.element((bridge.as_str(), bridge.as_str())))?;
        let policy = if open_inside.is_some() { Policy::SameBridge } else { Policy::Isolated };
        bridges.push((bridge.clone(), policy));
    }
    Ok((ips, bridges))
}

/// Deletes the tables; if an administrator has added rules, only the elements.
pub(super) fn clear(nft: &Nft) -> Result<()> {
    let mut batch = Batch::new();
    if nft.has(FRAMES)? {
        batch.del(FRAMES);
    }
    if nft.has(TABLE)? && nft.dump_rules(ADMIN)?.is_empty() {
        batch.del(TABLE);
    } else {
        for set in layout().sets {
            if nft.has(set)? {
                batch.flush_set(set);
            }
        }
    }
    nft.commit(batch)
}
