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
//!         meta protocol ip iifname @ports drop
//!         meta protocol ip oifname @ports drop      (and both for ip6)
//!     }
//! }
//! ```
//!
//! What is accepted here may still be dropped by another table or by iptables: no table can
//! overrule another one's drop. A node that drops forwarded traffic by default does so in the
//! chain `forward` above (`nft chain inet cnibox_firewall forward '{ policy drop; }'`), which is
//! made once and then left as it is. Frames between ports need no `br_netfilter`.

use std::net::IpAddr;

use super::{Ingress, Network, Owner, Pod, Policy, missing};
use crate::error::Result;
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

/// The chains with rules of ours, and how many they have.
const RULES: [(Chain<'_>, usize); 2] = [(FORWARD, 6), (ISOLATION, 2)];
const FRAME_RULES: [(Chain<'_>, usize); 1] = [(FRAMES_FORWARD, 4)];

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
        let mut found = Vec::new();
        for ip in &pod.ips {
            let set = self.set(*ip);
            found.extend(nft.element(set, *ip)?.map(|element| (set, element)));
        }
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
    commit(nft, ingress, |batch| {
        PODS.put(nft, pod, batch)?;
        put_ports(nft, pod, ingress.policy, batch)?;
        put_policy(nft, pod.owner.network(), ingress, batch)
    })
}

/// Lets the attachment's bridge have the policy, whatever the back end of the addresses is.
pub fn add_policy(nft: &Nft, pod: &Pod, ingress: Ingress<'_>) -> Result<()> {
    commit(nft, ingress, |batch| {
        put_ports(nft, pod, ingress.policy, batch)?;
        put_policy(nft, pod.owner.network(), ingress, batch)
    })
}

/// Commits what `fill` adds, together with tables and chains where those are not there yet.
fn commit(
    nft: &Nft,
    ingress: Ingress<'_>,
    fill: impl Fn(&mut Batch) -> netlink::Result<()>,
) -> Result<()> {
    // Another ADD may be the first one at the same time; then the tables are there.
    for _ in 0..ATTEMPTS {
        let mut batch = Batch::new();
        if !nft.has_chain(FORWARD)? {
            base(&mut batch);
        }
        if ingress.policy == Policy::Isolated && !nft.has_chain(FRAMES_FORWARD)? {
            frames_base(&mut batch);
        }
        fill(&mut batch)?;
        match nft.commit(batch) {
            Err(error) if error.is_exists() => {}
            other => return Ok(other?),
        }
    }
    let mut batch = Batch::new();
    fill(&mut batch)?;
    Ok(nft.commit(batch)?)
}

/// As often as there are tables whose making can be lost to another process.
const ATTEMPTS: usize = 3;

/// The table for packets. Its base chain must be new: that decides between two that make it.
fn base(batch: &mut Batch) {
    PODS.ensure(batch);
    batch.ensure_set(BRIDGES).ensure_set(SAME_BRIDGE);
    batch.add_chain(FORWARD).ensure_chain(ISOLATION).ensure_chain(ADMIN);
    let between = Rule::new()
        .in_set(&[Field::Iifname], BRIDGES)
        .in_set(&[Field::Oifname], BRIDGES)
        .jump(ISOLATION.name());
    batch.append_rule(FORWARD, &between);
    batch.append_rule(FORWARD, &Rule::new().jump(ADMIN.name()));
    for (field, set) in [(Field::IpDaddr, PODS.four), (Field::Ip6Daddr, PODS.six)] {
        let answers = Rule::new().ct_state(&[CtState::Established, CtState::Related]);
        batch.append_rule(FORWARD, &answers.in_set(&[field], set).accept());
    }
    for (field, set) in [(Field::IpSaddr, PODS.four), (Field::Ip6Saddr, PODS.six)] {
        batch.append_rule(FORWARD, &Rule::new().in_set(&[field], set).accept());
    }
    let within = Rule::new().in_set(&[Field::Iifname, Field::Oifname], SAME_BRIDGE);
    batch.append_rule(ISOLATION, &within.ret());
    batch.append_rule(ISOLATION, &Rule::new().drop());
}

/// The table for frames between two ports of a bridge.
fn frames_base(batch: &mut Batch) {
    batch.ensure_table(FRAMES).ensure_set(PORTS).add_chain(FRAMES_FORWARD);
    for ethertype in [0x0800, 0x86dd] {
        for field in [Field::Iifname, Field::Oifname] {
            let rule = Rule::new().eq(Field::Protocol, ethertype).in_set(&[field], PORTS);
            batch.append_rule(FRAMES_FORWARD, &rule.drop());
        }
    }
}

/// The ports of an isolated attachment, whoever had their names before.
fn put_ports(nft: &Nft, pod: &Pod, policy: Policy, batch: &mut Batch) -> netlink::Result<()> {
    for port in &pod.ports {
        let found = nft.element(PORTS, port.as_str())?;
        let is_mine = found.as_ref().is_some_and(|e| pod.owner.owns(e.comment.as_deref()));
        let is_wanted = policy == Policy::Isolated;
        let element = Element::new(port.as_str()).comment(pod.owner.comment());
        if found.is_some() && is_mine != is_wanted {
            batch.del_element(PORTS, &element);
        }
        if is_wanted && !is_mine {
            batch.ensure_element(PORTS, &element);
        }
    }
    Ok(())
}

/// For each set that is about policies: the key of the bridge, and whether it has to be there.
fn policy_elements(bridge: &str, policy: Policy) -> [(Set<'static>, Key, bool); 2] {
    [
        (BRIDGES, bridge.into(), policy != Policy::Open),
        (SAME_BRIDGE, (bridge, bridge).into(), policy == Policy::SameBridge),
    ]
}

/// What another network wants of the same bridge stays.
fn put_policy(
    nft: &Nft,
    network: &Network,
    ingress: Ingress<'_>,
    batch: &mut Batch,
) -> netlink::Result<()> {
    let Some(bridge) = ingress.bridge else { return Ok(()) };
    for (set, key, wanted) in policy_elements(bridge, ingress.policy) {
        let found = nft.element(set, key.clone())?;
        let element = Element::new(key).comment(network.comment());
        match found {
            None if wanted => drop(batch.ensure_element(set, &element)),
            Some(found) if !wanted && network.owns(found.comment.as_deref()) => {
                batch.del_element(set, &element);
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether an address of the attachment is here.
pub fn has(nft: &Nft, pod: &Pod) -> Result<bool> {
    Ok(nft.has_table(TABLE)? && !PODS.owned(nft, pod)?.is_empty())
}

/// Verifies everything that [`add`] made.
pub fn check(nft: &Nft, pod: &Pod, ingress: Ingress<'_>) -> Result<()> {
    check_rules(nft, &RULES)?;
    for ip in &pod.ips {
        let set = PODS.set(*ip);
        let found = nft.element(set, *ip)?;
        let owned = found.is_some_and(|e| pod.owner.owns(e.comment.as_deref()));
        owned.then_some(()).ok_or_else(|| missing(format!("element {ip} of {set}")))?;
    }
    check_policy(nft, pod, ingress)
}

/// Verifies everything that [`add_policy`] made.
pub fn check_policy(nft: &Nft, pod: &Pod, ingress: Ingress<'_>) -> Result<()> {
    let Some(bridge) = ingress.bridge.filter(|_| ingress.policy != Policy::Open) else {
        return Ok(());
    };
    check_rules(nft, &RULES)?;
    if ingress.policy == Policy::Isolated {
        check_rules(nft, &FRAME_RULES)?;
        for port in &pod.ports {
            let found = nft.element(PORTS, port.as_str())?;
            let owned = found.is_some_and(|e| pod.owner.owns(e.comment.as_deref()));
            owned.then_some(()).ok_or_else(|| missing(format!("port \"{port}\" in {PORTS}")))?;
        }
    }
    for (set, key, wanted) in policy_elements(bridge, ingress.policy) {
        if wanted && nft.element(set, key)?.is_none() {
            return Err(missing(format!("bridge \"{bridge}\" in {set}")));
        }
    }
    Ok(())
}

/// An administrator may have added some.
fn check_rules(nft: &Nft, chains: &[(Chain<'_>, usize)]) -> Result<()> {
    for (chain, rules) in chains {
        if nft.dump_rules(*chain)?.len() < *rules {
            return Err(missing(format!("rules of chain {chain}")));
        }
    }
    Ok(())
}

/// Removes what the attachment has in the sets; the tables stay.
pub fn del(nft: &Nft, pod: &Pod) -> Result<()> {
    if !nft.has_table(TABLE)? {
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
    let mut found = Vec::new();
    for port in &pod.ports {
        found.extend(nft.element(PORTS, port.as_str())?);
    }
    if pod.ports.is_empty() {
        found = nft.dump_elements(PORTS)?;
    }
    found.retain(|element| pod.owner.owns(element.comment.as_deref()));
    Ok(found.into_iter().map(|element| (PORTS, element)).collect())
}

/// Removes the addresses of all attachments of the network but `valid`, and when there are none
/// of those, its policies.
pub fn gc(nft: &Nft, network: &Network, valid: &[Owner]) -> Result<()> {
    if !nft.has_table(TABLE)? {
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
