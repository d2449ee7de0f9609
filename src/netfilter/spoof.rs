//! The check of source MACs: what a container sends with an address that is not its own is dropped
//! at its port of the bridge.
//!
//! ```text
//! table bridge cnibox_spoof {
//!     set checked { type ifname; elements = { "veth1" comment ".." } }
//!     set allowed { type ifname . ether_addr; elements = { "veth1" . 02:..:01 comment ".." } }
//!     chain prerouting {
//!         type filter hook prerouting priority -300
//!         iifname @checked iifname . ether saddr != @allowed drop
//!     }
//! }
//! ```
//!
//! Two elements for each port instead of the reference's two chains and four rules, so that a
//! frame costs the same however many ports there are. What the reference made is removed as well.

use serde::{Deserialize, Serialize};

use super::backend::PacketFilter;
use super::handover::HandedOver;
use super::layout::{self, Change, Feature, Layout};
use super::names::{Owner, identity, stale};
use crate::attachment::Kept;
use crate::error::{Context, Error, Result};
use crate::netlink::nftables::{
    Batch, Chain, Element, Family, Field, Hook, Nft, RAW, Rule, Set, Table, Type, Value,
};
use crate::netlink::{self, Mac};

const TABLE: Table<'_> = Table::new(Family::Bridge, "cnibox_spoof")
    .comment("cnibox: containers send with their own MAC only");
const PREROUTING: Chain<'_> = TABLE.chain("prerouting").filter(Hook::Prerouting, RAW);
const CHECKED: Set<'_> = TABLE.set("checked", &[Type::IfName]);
const ALLOWED: Set<'_> = TABLE.set("allowed", &[Type::IfName, Type::EtherAddr]);

/// Where the reference plugins keep their rules.
const REFERENCE: Table<'_> = Table::new(Family::Bridge, "nat");

/// What is kept of each attachment.
const KEPT: Kept = Kept::of("spoof");

/// For [`super::heal`].
pub(super) const FEATURE: Feature = Feature { kept: KEPT, layouts: || vec![layout()], restore };

/// A port of a bridge and the only source of what comes in by it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// The host's end of the pair.
    pub name: String,
    /// The address of the container's end.
    pub mac: Mac,
}

impl Port {
    fn elements(&self, owner: Owner<'_>) -> [(Set<'static>, Element); 2] {
        let checked = Element::new(self.name.as_str()).comment(owner.label());
        let allowed = Element::new((self.name.as_str(), self.mac)).comment(owner.label());
        [(CHECKED, checked), (ALLOWED, allowed)]
    }
}

fn layout() -> Layout {
    let source = [Field::Iifname, Field::EtherSaddr];
    let rule = Rule::new().in_set(&[Field::Iifname], CHECKED).not_in_set(&source, ALLOWED);
    let chains = vec![(PREROUTING, vec![rule.drop().comment("another source")])];
    Layout { table: TABLE, sets: vec![CHECKED, ALLOWED], chains, subnet: |_| None }
}

fn restore(change: &mut Change<'_>) {
    if change.is_flushed(CHECKED) || change.is_flushed(ALLOWED) {
        for kept in change.living::<Port>(KEPT) {
            for (set, element) in kept.content.elements(kept.owner()) {
                change.restore(set, &element);
            }
        }
    }
}

/// What is wrong with the rules that attachments of this host depend on.
pub fn damage(filter: &PacketFilter) -> Result<Option<String>> {
    let is_needed = || !KEPT.living::<Port>().is_empty();
    Ok(layout().damage(filter.nft()?, is_needed)?)
}

/// Drops what comes in by the port with another source.
pub fn add(filter: &PacketFilter, owner: Owner<'_>, port: &Port) -> Result<()> {
    let failed = || "failed to setup spoof-check";
    let nft = filter.nft().context(failed)?;
    KEPT.keep(owner, port);
    let elements = port.elements(owner);
    let keys = elements.clone().map(|(set, element)| (set, element.key));
    let fill = |change: &mut Change<'_>, found: Vec<Option<Element>>| {
        if found.iter().flatten().eq(elements.iter().map(|(_, element)| element)) {
            return Ok(());
        }
        if found.first().is_some_and(Option::is_some) {
            // A port that is no more had the name.
            for (set, element) in all_elements(nft)? {
                if element.key.0.first() == Some(&port.name.as_str().into()) {
                    change.batch().del_element(set, &element);
                }
            }
        }
        for (set, element) in &elements {
            change.put(*set, element);
        }
        Ok(())
    };
    layout::change(nft, &[layout()], &keys, fill).context(failed)
}

/// Verifies that the port is checked, and that its container may send.
pub fn check(filter: &PacketFilter, owner: Owner<'_>, port: &Port) -> Result<()> {
    let nft = filter.nft()?;
    let damage = layout().damage(nft, || true)?;
    let mut complete = damage.is_none();
    for (set, wanted) in port.elements(owner) {
        complete = complete && nft.element(set, wanted.key.clone())?.as_ref() == Some(&wanted);
    }
    let reference = format!("macspoofchk-{}-{}", owner.id, owner.ifname);
    let theirs = |nft: &Nft| -> Result<bool> {
        let rules = nft.dump_rules(REFERENCE.chain("PREROUTING"))?;
        Ok(rules.iter().any(|rule| rule.comment.as_ref() == Some(&reference)))
    };
    if complete || theirs(nft)? {
        return Ok(());
    }
    Err(Error::internal(format!("the source MAC of port \"{}\" is not checked", port.name))
        .with_details(KEPT.remedy(owner, damage.as_deref())))
}

/// Removes what [`add`] or the reference made for the owner. The ports, where they are known, save
/// looking for it.
pub fn del(filter: &PacketFilter, owner: Owner<'_>, ports: &[Port]) -> Result<()> {
    let Some(nft) = filter.nft_if_present()? else { return Ok(()) };
    let outcomes = [KEPT.remove(owner), del_own(nft, owner, ports), del_reference(nft, owner)];
    let errors = outcomes.into_iter().filter_map(Result::err).collect();
    Error::join(errors).map_or(Ok(()), Err).context(|| "failed to teardown spoof-check")
}

fn del_own(nft: &Nft, owner: Owner<'_>, ports: &[Port]) -> Result<()> {
    if !nft.has_table(TABLE)? {
        return Ok(());
    }
    let wanted = ports.iter().flat_map(|port| port.elements(owner));
    let keys: Vec<_> = wanted.map(|(set, element)| (set, element.key)).collect();
    let elements = keys.iter().map(|(set, _)| *set).zip(nft.elements(&keys)?);
    let mut found: Vec<_> = elements.filter_map(|(set, element)| Some((set, element?))).collect();
    // A plugin behind ours may have changed the address.
    if found.len() < 2 {
        found = all_elements(nft)?;
    }
    let mut batch = Batch::new();
    for (set, element) in found.iter().filter(|(_, e)| owner.owns(e.comment.as_deref())) {
        batch.del_element(*set, element);
    }
    Ok(nft.commit(batch)?)
}

fn all_elements(nft: &Nft) -> netlink::Result<Vec<(Set<'static>, Element)>> {
    let mut found = Vec::new();
    for set in [CHECKED, ALLOWED] {
        found.extend(nft.dump_elements(set)?.into_iter().map(|element| (set, element)));
    }
    Ok(found)
}

/// The reference's chains, which say neither network nor host's end.
fn del_reference(nft: &Nft, owner: Owner<'_>) -> Result<()> {
    let id = format!("{}-{}", owner.id, owner.ifname);
    let (port, mac) = (format!("cni-br-iface-{id}"), format!("cni-br-iface-{id}-mac"));
    if !nft.has_chain(REFERENCE.chain(&port))? {
        return Ok(());
    }
    let (prerouting, comment) = (REFERENCE.chain("PREROUTING"), format!("macspoofchk-{id}"));
    let mut batch = Batch::new();
    for rule in nft.dump_rules(prerouting)? {
        if rule.comment.as_ref() == Some(&comment) {
            batch.del_rule(prerouting, rule.handle);
        }
    }
    batch.del_chain(REFERENCE.chain(&port)).del_chain(REFERENCE.chain(&mac));
    Ok(nft.commit(batch)?)
}

/// Rewrites our layout into the reference's, at one blow; how many ports that are.
/// Those that are lost are no longer checked.
pub(super) fn hand_over(nft: &Nft) -> Result<HandedOver> {
    let mut handed = HandedOver::default();
    nft.update(|nft| {
        let mut batch = Batch::new();
        handed = HandedOver::default();
        if !nft.has_table(TABLE)? {
            return Ok(batch);
        }
        for element in nft.dump_elements(ALLOWED)? {
            match reference_port(&element) {
                Some((id, port)) => {
                    handed.objects += 1;
                    make_reference(&mut batch, &id, &port);
                }
                None => handed.nameless += 1,
            }
        }
        batch.del_table(TABLE);
        Ok(batch)
    })?;
    Ok(handed)
}

/// The port, and the reference's name for its attachment.
fn reference_port(element: &Element) -> Option<(String, Port)> {
    let (id, ifname, _) = identity(element.comment.as_deref()?)?;
    let [Value::IfName(name), Value::Mac(mac)] = element.key.0.as_slice() else { return None };
    Some((format!("{id}-{ifname}"), Port { name: name.clone(), mac: *mac }))
}

fn make_reference(batch: &mut Batch, id: &str, port: &Port) {
    let (iface, mac) = (format!("cni-br-iface-{id}"), format!("cni-br-iface-{id}-mac"));
    let prerouting = REFERENCE.chain("PREROUTING").filter(Hook::Prerouting, RAW);
    let (iface, mac) = (REFERENCE.chain(&iface), REFERENCE.chain(&mac));
    let comment = format!("macspoofchk-{id}");
    batch.ensure_table(REFERENCE).ensure_chain(prerouting).ensure_chain(mac).ensure_chain(iface);
    batch.flush_chain(mac).flush_chain(iface);
    let rules = [
        (prerouting, Rule::new().iifname(&port.name).jump(iface.name())),
        (iface, Rule::new().jump(mac.name())),
        (mac, Rule::new().ether_saddr(port.mac).ret()),
        (mac, Rule::new().drop()),
    ];
    for (chain, rule) in rules {
        batch.append_rule(chain, &rule.comment(&comment));
    }
}

/// Removes what belongs to the network and to none of `valid`. The reference's objects do not
/// tell their network.
pub fn gc(filter: &PacketFilter, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    KEPT.remove_stale(network, valid)?;
    let Some(nft) = filter.nft_if_present()? else { return Ok(()) };
    if !nft.has_table(TABLE)? {
        return Ok(());
    }
    let is_stale = stale(network, valid);
    let mut batch = Batch::new();
    for (set, element) in all_elements(nft)? {
        if is_stale(element.comment.as_deref()) {
            batch.del_element(set, &element);
        }
    }
    nft.commit(batch).context(|| "clean up spoof-check")
}
