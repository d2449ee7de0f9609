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

use super::{Ingress, KEPT, Network, Owner, Pod, Policy, Record, missing};
use crate::error::Result;
use crate::netfilter::backend::Backend;
use crate::netfilter::layout::{self, Change, Layout};
use crate::netlink;
use crate::netlink::nftables::{
    Batch, Chain, CtState, Element, FILTER, Family, Field, Hook, Key, Nft, Rule, Set, Table, Type,
    Value,
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

/// A set of addresses for each family; the comment of an element is its owner.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    four: Set<'static>,
    six: Set<'static>,
}

const PODS: Addresses = Addresses {
    four: TABLE.set("pods4", &[Type::Ipv4Addr]),
    six: TABLE.set("pods6", &[Type::Ipv6Addr]),
};

/// What was given to firewalld, which keeps no owner. No rule looks at it.
pub(super) const SOURCES: Addresses = Addresses {
    four: TABLE.set("firewalld4", &[Type::Ipv4Addr]),
    six: TABLE.set("firewalld6", &[Type::Ipv6Addr]),
};

impl Addresses {
    fn set(&self, ip: IpAddr) -> Set<'static> {
        if ip.is_ipv4() { self.four } else { self.six }
    }

    fn both(&self) -> [Set<'static>; 2] {
        [self.four, self.six]
    }

    /// Makes the sets.
    pub(super) fn ensure(&self, batch: &mut Batch) {
        batch.ensure_table(TABLE).ensure_set(self.four).ensure_set(self.six);
    }

    /// Adds the addresses; one that somebody else left here gets the new owner.
    pub(super) fn put(&self, nft: &Nft, pod: &Pod, batch: &mut Batch) -> netlink::Result<()> {
        for ip in &pod.ips {
            let set = self.set(*ip);
            let element = Element::new(*ip).comment(pod.owner.comment());
            match nft.element(set, *ip)? {
                Some(found) if pod.owner.owns(found.comment.as_deref()) => {}
                Some(_) => drop(batch.del_element(set, &element).add_element(set, &element)),
                None => drop(batch.ensure_element(set, &element)),
            }
        }
        Ok(())
    }

    /// The elements that the attachment owns: among its addresses, or, where those are not
    /// known, among all.
    pub(super) fn owned(&self, nft: &Nft, pod: &Pod) -> netlink::Result<Elements> {
        let keys: Vec<_> = pod.ips.iter().map(|ip| (self.set(*ip), (*ip).into())).collect();
        let elements = keys.iter().map(|(set, _)| *set).zip(nft.elements(&keys)?);
        let mut found: Elements =
            elements.filter_map(|(set, element)| Some((set, element?))).collect();
        if pod.ips.is_empty() {
            found = self.all(nft)?;
        }
        found.retain(|(_, element)| pod.owner.owns(element.comment.as_deref()));
        Ok(found)
    }

    /// Those of the addresses that somebody else owns.
    pub(super) fn foreign(&self, nft: &Nft, pod: &Pod) -> netlink::Result<Vec<IpAddr>> {
        let mut foreign = Vec::new();
        for ip in &pod.ips {
            let found = nft.element(self.set(*ip), *ip)?;
            let is_foreign = |e: &Element| !pod.owner.owns(e.comment.as_deref());
            foreign.extend(found.filter(is_foreign).map(|_| *ip));
        }
        Ok(foreign)
    }

    fn all(&self, nft: &Nft) -> netlink::Result<Elements> {
        let mut all = Vec::new();
        for set in self.both() {
            all.extend(nft.dump_elements(set)?.into_iter().map(|element| (set, element)));
        }
        Ok(all)
    }

    /// The elements of attachments of `network` that are not among `valid`.
    pub(super) fn stale(
        &self,
        nft: &Nft,
        network: &Network,
        valid: &[Owner],
    ) -> netlink::Result<Elements> {
        let mut found = self.all(nft)?;
        found.retain(|(_, element)| network.has_stale(element.comment.as_deref(), valid));
        Ok(found)
    }
}

/// Elements and their sets.
pub(super) type Elements = Vec<(Set<'static>, Element)>;

/// Deletes the elements that `find` finds, and no other that has taken the place of one since.
pub(super) fn remove(nft: &Nft, find: impl Fn(&Nft) -> netlink::Result<Elements>) -> Result<()> {
    let plan = |nft: &Nft| {
        let mut batch = Batch::new();
        for (set, element) in find(nft)? {
            batch.del_element(set, &element);
        }
        Ok(batch)
    };
    Ok(nft.update(plan)?)
}

/// Lets the attachment's traffic pass, and its bridge have the policy. All of it or nothing.
pub fn add(nft: &Nft, pod: &Pod, ingress: Ingress<'_>) -> Result<()> {
    Record::keep(Backend::Nftables, pod, ingress, None);
    let needed = if ingress.policy == Policy::Isolated { layouts() } else { vec![layout()] };
    Ok(put(nft, &elements(pod, ingress), &needed)?)
}

/// Isolates the attachment's ports, or no longer, where iptables has all the rest.
pub(super) fn isolate(nft: &Nft, pod: &Pod, ingress: Ingress<'_>) -> netlink::Result<()> {
    if ingress.policy == Policy::Isolated || nft.has_table(FRAMES)? {
        put(nft, &ports(pod, ingress), &[frames()])?;
    }
    Ok(())
}

fn ports(pod: &Pod, ingress: Ingress<'_>) -> Vec<Wanted> {
    elements(&Pod { ips: Vec::new(), ..pod.clone() }, Ingress { bridge: None, ..ingress })
}

fn put(nft: &Nft, all: &[Wanted], needed: &[Layout]) -> netlink::Result<()> {
    let keys: Vec<_> = all.iter().map(|wanted| (wanted.set, wanted.element.key.clone())).collect();
    let fill = |change: &mut Change<'_>, found: Vec<Option<Element>>| {
        for (Wanted { set, element, present }, found) in all.iter().zip(&found) {
            match (present, found) {
                (true, None) => change.put(*set, element),
                (true, Some(other))
                    if !has_owner_of(other, element) && !IS_SHARED.contains(set) =>
                {
                    change.replace(*set, found.as_ref(), element);
                }
                (false, Some(own)) if has_owner_of(own, element) => {
                    change.batch().del_element(*set, element);
                }
                _ => {}
            }
        }
        Ok(())
    };
    layout::change(nft, needed, &keys, fill)
}

/// Lets the attachment's bridge have the policy, whatever the back end of the addresses is.
pub fn add_policy(nft: &Nft, pod: &Pod, ingress: Ingress<'_>) -> Result<()> {
    add(nft, &Pod { ips: Vec::new(), ..pod.clone() }, ingress)
}

/// For [`netfilter::heal`](crate::netfilter::heal).
pub(super) fn restore(change: &mut Change<'_>) {
    if !layouts().iter().flat_map(|layout| &layout.sets).any(|set| change.is_flushed(*set)) {
        return;
    }
    for kept in change.living::<Record>(KEPT) {
        let (pod, ingress) = (kept.content.pod(kept.owner()), kept.content.ingress());
        let all = match kept.content.backend {
            Backend::Nftables => elements(&pod, ingress),
            Backend::Iptables => ports(&pod, ingress),
        };
        for wanted in all.iter().filter(|wanted| wanted.present) {
            change.restore(wanted.set, &wanted.element);
        }
    }
}

/// What is wrong with the rules that attachments of this host depend on.
pub fn damage(nft: &Nft) -> Result<Option<String>> {
    let depends = |matters: fn(&Record) -> bool| {
        KEPT.living::<Record>().iter().any(|kept| matters(&kept.content))
    };
    // The table alone may have been made for what firewalld was given.
    if nft.has_chain(FORWARD)? || depends(|record| record.backend == Backend::Nftables) {
        let damage = layout().damage(nft, || true)?;
        if damage.is_some() {
            return Ok(damage);
        }
    }
    Ok(frames().damage(nft, || depends(|record| record.policy == Policy::Isolated))?)
}

/// An element that an attachment is to have, or not.
struct Wanted {
    set: Set<'static>,
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

fn elements(pod: &Pod, ingress: Ingress<'_>) -> Vec<Wanted> {
    let Pod { owner, ips, ports } = pod;
    let (own, shared) = (owner.comment(), owner.network().comment());
    let wanted = |set, key: Key, comment: &str, present| {
        let element = Element::new(key).comment(comment);
        Wanted { set, element, present }
    };
    let mut all: Vec<Wanted> =
        ips.iter().map(|ip| wanted(PODS.set(*ip), (*ip).into(), own, true)).collect();
    let isolated = ingress.policy == Policy::Isolated;
    all.extend(ports.iter().map(|port| wanted(PORTS, port.as_str().into(), own, isolated)));
    let policy = ingress.bridge.map(|bridge| policy_elements(bridge, ingress.policy));
    let policy = policy.into_iter().flatten();
    all.extend(policy.map(|(set, key, present)| wanted(set, key, shared, present)));
    all
}

pub(super) fn layouts() -> Vec<Layout> {
    vec![layout(), frames()]
}

/// The table for packets.
fn layout() -> Layout {
    let between = Rule::new()
        .in_set(&[Field::Iifname], BRIDGES)
        .in_set(&[Field::Oifname], BRIDGES)
        .jump(ISOLATION.name());
    let admin = Rule::new().jump(ADMIN.name());
    let answers = |field, set| {
        let rule = Rule::new().ct_state(&[CtState::Established, CtState::Related]);
        rule.in_set(&[field], set).accept()
    };
    let from = |field, set| Rule::new().in_set(&[field], set).accept();
    let forward = vec![
        between.comment("between bridges with a policy"),
        admin.comment("the administrator's own rules"),
        answers(Field::IpDaddr, PODS.four).comment("answers to containers"),
        answers(Field::Ip6Daddr, PODS.six).comment("IPv6 answers to containers"),
        from(Field::IpSaddr, PODS.four).comment("from containers"),
        from(Field::Ip6Saddr, PODS.six).comment("IPv6 from containers"),
    ];
    let within = Rule::new().in_set(&[Field::Iifname, Field::Oifname], SAME_BRIDGE).ret();
    let isolation = vec![within.comment("neighbours"), Rule::new().drop().comment("others")];
    Layout {
        table: TABLE,
        sets: vec![PODS.four, PODS.six, BRIDGES, SAME_BRIDGE],
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

/// For each set that is about policies: the key of the bridge, and whether it has to be there.
fn policy_elements(bridge: &str, policy: Policy) -> [(Set<'static>, Key, bool); 2] {
    [
        (BRIDGES, bridge.into(), policy != Policy::Open),
        (SAME_BRIDGE, (bridge, bridge).into(), policy == Policy::SameBridge),
    ]
}

/// Whether an address of the attachment is here.
pub fn has(nft: &Nft, pod: &Pod) -> Result<bool> {
    Ok(nft.has_table(TABLE)? && !PODS.owned(nft, pod)?.is_empty())
}

/// Verifies everything that [`add`] made.
pub fn check(nft: &Nft, pod: &Pod, ingress: Ingress<'_>) -> Result<()> {
    layout::refuse(layout().damage(nft, || true)?)?;
    if ingress.policy == Policy::Isolated {
        layout::refuse(frames().damage(nft, || true)?)?;
    }
    check_elements(nft, pod, elements(pod, ingress))
}

/// Verifies what [`isolate`] made; the reference plugins have nothing of the kind.
pub(super) fn check_ports(nft: &Nft, pod: &Pod, ingress: Ingress<'_>) -> Result<()> {
    if ingress.policy != Policy::Isolated || !KEPT.is_there(&pod.owner.attachment().instance()) {
        return Ok(());
    }
    layout::refuse(frames().damage(nft, || true)?)?;
    check_elements(nft, pod, ports(pod, ingress))
}

fn check_elements(nft: &Nft, pod: &Pod, all: Vec<Wanted>) -> Result<()> {
    for Wanted { set, element, .. } in all.into_iter().filter(|wanted| wanted.present) {
        let found = nft.element(set, element.key.clone())?;
        if !found.is_some_and(|found| has_owner_of(&found, &element) || IS_SHARED.contains(&set)) {
            let error = missing(format!("element {element} of {set}"));
            return Err(error.with_details(KEPT.remedy(pod.owner.attachment(), None)));
        }
    }
    Ok(())
}

/// Verifies everything that [`add_policy`] made.
pub fn check_policy(nft: &Nft, pod: &Pod, ingress: Ingress<'_>) -> Result<()> {
    if ingress.policy == Policy::Open {
        return Ok(());
    }
    check(nft, &Pod { ips: Vec::new(), ..pod.clone() }, ingress)
}

fn is_there(nft: &Nft) -> netlink::Result<bool> {
    Ok(nft.has_table(TABLE)? || nft.has_table(FRAMES)?)
}

/// Removes what the attachment has in the sets; the tables stay.
pub fn del(nft: &Nft, pod: &Pod) -> Result<()> {
    if !is_there(nft)? {
        return Ok(());
    }
    let find = |nft: &Nft| {
        let mut owned = PODS.owned(nft, pod)?;
        owned.extend(owned_ports(nft, pod)?);
        Ok(owned)
    };
    remove(nft, find)
}

/// Without a result its ports are found among all.
fn owned_ports(nft: &Nft, pod: &Pod) -> netlink::Result<Elements> {
    let keys: Vec<_> = pod.ports.iter().map(|port| (PORTS, port.as_str().into())).collect();
    let mut found: Vec<Element> = nft.elements(&keys)?.into_iter().flatten().collect();
    if pod.ports.is_empty() {
        found = nft.dump_elements(PORTS)?;
    }
    found.retain(|element| pod.owner.owns(element.comment.as_deref()));
    Ok(found.into_iter().map(|element| (PORTS, element)).collect())
}

/// Removes the addresses of all attachments of the network but `valid`, and when there are none
/// of those, its policies.
pub fn gc(nft: &Nft, network: &Network, valid: &[Owner]) -> Result<()> {
    if !is_there(nft)? {
        return Ok(());
    }
    remove(nft, |nft| all_stale(nft, network, valid))
}

fn all_stale(nft: &Nft, network: &Network, valid: &[Owner]) -> netlink::Result<Elements> {
    let mut stale = PODS.stale(nft, network, valid)?;
    let ports = nft.dump_elements(PORTS)?.into_iter();
    let is_stale = |e: &Element| network.has_stale(e.comment.as_deref(), valid);
    stale.extend(ports.filter(is_stale).map(|element| (PORTS, element)));
    if valid.is_empty() {
        for set in [BRIDGES, SAME_BRIDGE] {
            let elements = nft.dump_elements(set)?.into_iter();
            let mine = elements.filter(|element| network.owns(element.comment.as_deref()));
            stale.extend(mine.map(|element| (set, element)));
        }
    }
    Ok(stale)
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
    if !nft.has_table(TABLE)? {
        return Ok(content);
    }
    for (_, element) in PODS.all(nft)? {
        if let Some(Value::Ip(ip)) = element.key.0.first() {
            content.ips.push(*ip);
        }
    }
    for element in nft.dump_elements(BRIDGES)? {
        let Some(Value::IfName(bridge)) = element.key.0.first() else { continue };
        let open_inside = nft.element(SAME_BRIDGE, (bridge.as_str(), bridge.as_str()))?;
        let policy = if open_inside.is_some() { Policy::SameBridge } else { Policy::Isolated };
        content.bridges.push((bridge.clone(), policy));
    }
    Ok(content)
}

/// Deletes the tables; but where an administrator has rules of their own, only the elements.
pub(super) fn clear(nft: &Nft) -> netlink::Result<()> {
    let mut batch = Batch::new();
    if nft.has_table(FRAMES)? {
        batch.del_table(FRAMES);
    }
    if nft.has_table(TABLE)? {
        if nft.dump_rules(ADMIN)?.is_empty() {
            batch.del_table(TABLE);
        } else {
            for set in [PODS.four, PODS.six, BRIDGES, SAME_BRIDGE, SOURCES.four, SOURCES.six] {
                if nft.has_set(set)? {
                    batch.flush_set(set);
                }
            }
        }
    }
    nft.commit(batch)
}
