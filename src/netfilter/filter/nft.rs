//! Filter rules in `nf_tables`: two tables of our own, a fixed number of rules, and sets whose
//! elements are all that an attachment adds.
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
//!     }
//!     chain isolation { iifname . oifname @same_bridge return; drop }
//! }
//! table bridge cnibox_firewall {      made with the first isolated attachment
//!     set ports { ifname }            the host's ends of isolated containers
//!     chain forward {                 frames from one port of a bridge to another
//!         iifname @ports drop
//!         oifname @ports drop
//!     }
//! }
//! ```
//!
//! What is accepted here may still be dropped by another table or by iptables: no table can
//! overrule another one's drop. A node that drops forwarded traffic by default does so in the
//! chain `forward` above (`nft chain inet cnibox_firewall forward '{ policy drop; }'`), which is
//! made once and then left as it is. Frames between ports need no `br_netfilter`, and are dropped whatever
//! they carry, with the back end iptables as well: what the container and the bridge itself say to each
//! other, ARP among it, is not forwarded.

use std::net::IpAddr;

use super::{Ingress, KEPT, Pod, Policy, Record, missing};
use crate::error::Result;
use crate::netfilter::backend::Backend;
use crate::netfilter::layout::{self, Change, Layout};
use crate::netfilter::names::{Owner, network_hash, network_label, stale};
use crate::netlink;
use crate::netlink::nftables::{
    Batch, CT_STATE_ANSWERS, Chain, Element, FILTER, Family, Field, Hook, Nft, Rule, Set, Table,
    Type, Value,
};

const TABLE: Table<'_> = Table::inet("cnibox_firewall").comment("cnibox: plugin firewall");
const FORWARD: Chain<'_> = TABLE.chain("forward").filter(Hook::Forward, FILTER);
const ISOLATION: Chain<'_> = TABLE.chain("isolation").comment("between bridges with a policy");
const ADMIN: Chain<'_> = TABLE.chain("admin").comment("the administrator's own rules");
const BRIDGES: Set<'_> = TABLE.set("bridges", &[Type::IfName]);
const SAME_BRIDGE: Set<'_> = TABLE.set("same_bridge", &[Type::IfName, Type::IfName]);

const FRAMES: Table<'_> =
    Table::new(Family::Bridge, "cnibox_firewall").comment("cnibox: plugin firewall");
/// Where nft's `filter` is in this family.
const BRIDGE_FILTER: i32 = -200;
const FRAMES_FORWARD: Chain<'_> = FRAMES.chain("forward").filter(Hook::Forward, BRIDGE_FILTER);
/// The comment of an element is its owner.
const PORTS: Set<'_> = FRAMES.set("ports", &[Type::IfName]);

/// The containers' addresses of IPv4 and IPv6; the comment of an element is its owner.
const PODS: [Set<'_>; 2] =
    [TABLE.set("pods4", &[Type::Ipv4Addr]), TABLE.set("pods6", &[Type::Ipv6Addr])];

/// The elements of the attachment's addresses.
fn addresses(pod: &Pod<'_>) -> Vec<Element> {
    let label = pod.owner.label();
    let element = |ip: &IpAddr| PODS[usize::from(ip.is_ipv6())].element(*ip).comment(&label);
    pod.ips.iter().map(element).collect()
}

/// The attachment's elements: among its addresses, or, where those are not known, among all.
fn owned(nft: &Nft, pod: &Pod<'_>) -> netlink::Result<Vec<Element>> {
    nft.find_of(&PODS, &addresses(pod), &pod.owner.matcher())
}

/// Lets the attachment's traffic pass, and its bridge have the policy. All of it or nothing.
pub fn add(nft: &Nft, pod: &Pod<'_>, ingress: Ingress<'_>) -> Result<()> {
    Record::keep(Backend::Nftables, pod, ingress, None);
    let needed = if ingress.policy == Policy::Isolated { layouts() } else { vec![layout()] };
    Ok(put(nft, &elements(pod, ingress), &needed)?)
}

/// Isolates the attachment's ports, or no longer, where iptables has all the rest.
pub(super) fn isolate(nft: &Nft, pod: &Pod<'_>, ingress: Ingress<'_>) -> netlink::Result<()> {
    if ingress.policy == Policy::Isolated || nft.has(FRAMES)? {
        put(nft, &ports(pod, ingress), &[frames()])?;
    }
    Ok(())
}

fn ports(pod: &Pod<'_>, ingress: Ingress<'_>) -> Vec<Wanted> {
    elements(&Pod { ips: Vec::new(), ..pod.clone() }, Ingress { bridge: None, ..ingress })
}

fn put(nft: &Nft, all: &[Wanted], needed: &[Layout]) -> netlink::Result<()> {
    let elements: Vec<_> = all.iter().map(|wanted| wanted.element.clone()).collect();
    let fill = |change: &mut Change<'_>, found: Vec<Option<Element>>| {
        for (Wanted { element, present }, found) in all.iter().zip(&found) {
            match (present, found) {
                (true, None) => change.put(element),
                (true, Some(other))
                    if !has_owner_of(other, element) && !IS_SHARED.contains(&element.set) =>
                {
                    change.replace(found.as_ref(), element);
                }
                (false, Some(own)) if has_owner_of(own, element) => {
                    change.batch.del_element(element);
                }
                _ => {}
            }
        }
        Ok(())
    };
    layout::change(nft, needed, &elements, fill)
}

/// Lets the attachment's bridge have the policy, whatever the back end of the addresses is.
pub fn add_policy(nft: &Nft, pod: &Pod<'_>, ingress: Ingress<'_>) -> Result<()> {
    add(nft, &Pod { ips: Vec::new(), ..pod.clone() }, ingress)
}

/// For [`netfilter::heal`](crate::netfilter::heal).
pub(super) fn restore(change: &mut Change<'_>) {
    change.restore_all(KEPT, &layouts(), |owner, record: &Record| {
        let (pod, ingress) = (record.pod(owner), record.ingress());
        let all = match record.backend {
            Backend::Nftables => elements(&pod, ingress),
            Backend::Iptables => ports(&pod, ingress),
        };
        all.into_iter().filter(|wanted| wanted.present).map(|wanted| wanted.element).collect()
    });
}

/// What is wrong with the rules that attachments of this host depend on.
pub fn damage(nft: &Nft) -> Result<Option<String>> {
    let depends = |matters: fn(&Record) -> bool| {
        KEPT.living::<Record>().iter().any(|kept| matters(&kept.content))
    };
    if nft.has(FORWARD)? || depends(|record| record.backend == Backend::Nftables) {
        let damage = layout().damage(nft, || true)?;
        if damage.is_some() {
            return Ok(damage);
        }
    }
    Ok(frames().damage(nft, || depends(|record| record.policy == Policy::Isolated))?)
}

/// An element that an attachment is to have, or not.
struct Wanted {
    /// With its owner's comment.
    element: Element,
    present: bool,
}

/// What another network wants of the same bridge stays.
const IS_SHARED: [Set<'_>; 2] = [BRIDGES, SAME_BRIDGE];

/// Comments begin with a hash of the owner.
fn has_owner_of(found: &Element, wanted: &Element) -> bool {
    let owner = wanted.comment.as_deref().and_then(|comment| comment.split(',').next());
    let comment = found.comment.as_deref();
    owner.zip(comment).is_some_and(|(owner, comment)| comment.starts_with(owner))
}

fn elements(pod: &Pod<'_>, ingress: Ingress<'_>) -> Vec<Wanted> {
    let Ingress { policy, bridge } = ingress;
    let (own, shared) = (pod.owner.label(), network_label(pod.owner.network));
    let addresses = addresses(pod).into_iter().map(|element| (element, true));
    let port = |port: &String| PORTS.element(port.as_str()).comment(&own);
    let ports = pod.ports.iter().map(|name| (port(name), policy == Policy::Isolated));
    let of_bridge = |bridge| {
        let bridges = BRIDGES.element(bridge).comment(&shared);
        let neighbours = SAME_BRIDGE.element((bridge, bridge)).comment(&shared);
        [(bridges, policy != Policy::Open), (neighbours, policy == Policy::SameBridge)]
    };
    let all = addresses.chain(ports).chain(bridge.map(of_bridge).into_iter().flatten());
    all.map(|(element, present)| Wanted { element, present }).collect()
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
    let admin = Rule::new().jump(ADMIN.name);
    let answers = |field, set| {
        let rule = Rule::new().any_of(Field::CtState, CT_STATE_ANSWERS);
        rule.in_set(&[field], set).accept()
    };
    let from = |field, set| Rule::new().in_set(&[field], set).accept();
    let forward = vec![
        between.comment("between bridges with a policy"),
        admin.comment("the administrator's own rules"),
        answers(Field::IpDaddr, PODS[0]).comment("answers to containers"),
        answers(Field::Ip6Daddr, PODS[1]).comment("IPv6 answers to containers"),
        from(Field::IpSaddr, PODS[0]).comment("from containers"),
        from(Field::Ip6Saddr, PODS[1]).comment("IPv6 from containers"),
    ];
    let within = Rule::new().in_set(&[Field::Iifname, Field::Oifname], SAME_BRIDGE).ret();
    let isolation = vec![within.comment("neighbours"), Rule::new().drop().comment("others")];
    Layout {
        table: TABLE,
        sets: vec![PODS[0], PODS[1], BRIDGES, SAME_BRIDGE],
        chains: vec![(ADMIN, Vec::new()), (ISOLATION, isolation), (FORWARD, forward)],
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
    Layout { table: FRAMES, sets: vec![PORTS], chains, subnet: |_| None }
}

/// Whether an address of the attachment is here.
pub fn has(nft: &Nft, pod: &Pod<'_>) -> Result<bool> {
    Ok(nft.has(TABLE)? && !owned(nft, pod)?.is_empty())
}

/// Verifies everything that [`add`] made.
pub fn check(nft: &Nft, pod: &Pod<'_>, ingress: Ingress<'_>) -> Result<()> {
    layout::refuse(layout().damage(nft, || true)?)?;
    if ingress.policy == Policy::Isolated {
        layout::refuse(frames().damage(nft, || true)?)?;
    }
    check_elements(nft, pod, &elements(pod, ingress))
}

/// Verifies what [`isolate`] made; the reference plugins have nothing of the kind.
pub(super) fn check_ports(nft: &Nft, pod: &Pod<'_>, ingress: Ingress<'_>) -> Result<()> {
    if ingress.policy != Policy::Isolated || !KEPT.is_there(&pod.owner.instance()) {
        return Ok(());
    }
    layout::refuse(frames().damage(nft, || true)?)?;
    check_elements(nft, pod, &ports(pod, ingress))
}

fn check_elements(nft: &Nft, pod: &Pod<'_>, all: &[Wanted]) -> Result<()> {
    for Wanted { element, .. } in all.iter().filter(|wanted| wanted.present) {
        let found = nft.element(element)?;
        let is_shared = IS_SHARED.contains(&element.set);
        if !found.is_some_and(|found| is_shared || has_owner_of(&found, element)) {
            let error = missing(format!("element {element} of {}", element.set));
            return Err(error.with_details(KEPT.remedy(pod.owner, None)));
        }
    }
    Ok(())
}

/// Verifies everything that [`add_policy`] made.
pub fn check_policy(nft: &Nft, pod: &Pod<'_>, ingress: Ingress<'_>) -> Result<()> {
    if ingress.policy == Policy::Open {
        return Ok(());
    }
    check(nft, &Pod { ips: Vec::new(), ..pod.clone() }, ingress)
}

fn is_there(nft: &Nft) -> netlink::Result<bool> {
    Ok(nft.has(TABLE)? || nft.has(FRAMES)?)
}

/// Removes what the attachment has in the sets; the tables stay.
pub fn del(nft: &Nft, pod: &Pod<'_>) -> Result<()> {
    if !is_there(nft)? {
        return Ok(());
    }
    // Without a result its ports are found among all.
    let ports: Vec<_> = pod.ports.iter().map(|port| PORTS.element(port.as_str())).collect();
    Ok(layout().remove(nft, &|nft| {
        let mut found = owned(nft, pod)?;
        found.extend(nft.find_of(&[PORTS], &ports, &pod.owner.matcher())?);
        Ok(found)
    })?)
}

/// Removes the addresses of all attachments of the network but `valid`, and when there are none
/// of those, its policies.
pub fn gc(nft: &Nft, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    if !is_there(nft)? {
        return Ok(());
    }
    let hash = network_hash(network);
    let is_own = |comment: Option<&str>| comment.is_some_and(|text| text.starts_with(&hash));
    Ok(layout().remove(nft, &|nft| {
        let mut found = nft.find_of(&[PODS[0], PODS[1], PORTS], &[], &stale(network, valid))?;
        if valid.is_empty() {
            found.extend(nft.find_of(&IS_SHARED, &[], &is_own)?);
        }
        Ok(found)
    })?)
}

/// What the tables hold, without owners.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    /// The containers' addresses.
    pub(super) ips: Vec<IpAddr>,
    /// Bridges with a policy.
    pub(super) bridges: Vec<(String, Policy)>,
}

/// Everything that rules of the reference can say.
pub(super) fn content(nft: &Nft) -> netlink::Result<Content> {
    let mut content = Content::default();
    if !nft.has(TABLE)? {
        return Ok(content);
    }
    for element in nft.find(&PODS, &[])? {
        if let Some(Value::Ip(ip)) = element.key.0.first() {
            content.ips.push(*ip);
        }
    }
    for element in nft.dump_elements(BRIDGES)? {
        let Some(Value::IfName(bridge)) = element.key.0.first() else { continue };
        let open_inside = nft.element(&SAME_BRIDGE.element((bridge.as_str(), bridge.as_str())))?;
        let policy = if open_inside.is_some() { Policy::SameBridge } else { Policy::Isolated };
        content.bridges.push((bridge.clone(), policy));
    }
    Ok(content)
}

/// Deletes the tables; but where an administrator has rules of their own, only the elements.
pub(super) fn clear(nft: &Nft) -> netlink::Result<()> {
    let mut batch = Batch::new();
    if nft.has(FRAMES)? {
        batch.del(FRAMES);
    }
    if nft.has(TABLE)? {
        if nft.dump_rules(ADMIN)?.is_empty() {
            batch.del(TABLE);
        } else {
            for set in layout().sets {
                if nft.has(set)? {
                    batch.flush_set(set);
                }
            }
        }
    }
    nft.commit(batch)
}
