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

use nix::errno::Errno;

use super::backend::PacketFilter;
use super::handover::HandedOver;
use super::names::{Owner, identity, stale};
use crate::error::{Context, Error, Result};
use crate::netlink::Mac;
use crate::netlink::nftables::{
    Batch, Chain, Element, Family, Field, Hook, Nft, RAW, Rule, Set, Table, Type, Value,
};

const TABLE: Table<'_> = Table::new(Family::Bridge, "cnibox_spoof")
    .comment("cnibox: containers send with their own MAC only");
const PREROUTING: Chain<'_> = TABLE.chain("prerouting").filter(Hook::Prerouting, RAW);
const CHECKED: Set<'_> = TABLE.set("checked", &[Type::IfName]);
const ALLOWED: Set<'_> = TABLE.set("allowed", &[Type::IfName, Type::EtherAddr]);

/// Where the reference plugins keep their rules.
const REFERENCE: Table<'_> = Table::new(Family::Bridge, "nat");

/// How often an ADD is planned that others got in the way of.
const ATTEMPTS: usize = 20;

/// A port of a bridge and the only source of what comes in by it.
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// Drops what comes in by the port with another source.
pub fn add(filter: &PacketFilter, owner: Owner<'_>, port: &Port) -> Result<()> {
    let failed = || "failed to setup spoof-check";
    let nft = filter.nft().context(failed)?;
    let mut outcome = Ok(());
    for _ in 0..ATTEMPTS {
        outcome = nft.commit(plan(nft, owner, port).context(failed)?);
        // Another call was faster to make the chain.
        match &outcome {
            Err(error) if error.errno() == Some(Errno::EEXIST) => {}
            _ => break,
        }
    }
    outcome.context(failed)
}

fn plan(nft: &Nft, owner: Owner<'_>, port: &Port) -> Result<Batch> {
    let mut batch = Batch::new();
    if !nft.has_chain(PREROUTING)? {
        let source = [Field::Iifname, Field::EtherSaddr];
        let rule = Rule::new().in_set(&[Field::Iifname], CHECKED).not_in_set(&source, ALLOWED);
        batch.ensure_table(TABLE).add_chain(PREROUTING).ensure_set(CHECKED).ensure_set(ALLOWED);
        batch.append_rule(PREROUTING, &rule.drop());
    } else if nft.element(CHECKED, port.name.as_str())?.is_some() {
        // A port that is no more had the name.
        for (set, element) in all_elements(nft)? {
            if element.key.0.first() == Some(&port.name.as_str().into()) {
                batch.del_element(set, &element);
            }
        }
    }
    for (set, element) in port.elements(owner) {
        batch.add_element(set, &element);
    }
    Ok(batch)
}

/// Verifies that the port is checked, and that its container may send.
pub fn check(filter: &PacketFilter, owner: Owner<'_>, port: &Port) -> Result<()> {
    let nft = filter.nft()?;
    let mut complete = !nft.dump_rules(PREROUTING)?.is_empty();
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
        .with_details("the rules are gone from the packet filter; attach the container again"))
}

/// Removes what [`add`] or the reference made for the owner. The ports, where they are known, save
/// looking for it.
pub fn del(filter: &PacketFilter, owner: Owner<'_>, ports: &[Port]) -> Result<()> {
    let Some(nft) = filter.nft_if_present()? else { return Ok(()) };
    let ours = del_own(nft, owner, ports);
    let errors = [ours, del_reference(nft, owner)].into_iter().filter_map(Result::err).collect();
    Error::join(errors).map_or(Ok(()), Err).context(|| "failed to teardown spoof-check")
}

fn del_own(nft: &Nft, owner: Owner<'_>, ports: &[Port]) -> Result<()> {
    if !nft.has_table(TABLE)? {
        return Ok(());
    }
    let mut found = Vec::new();
    for (set, wanted) in ports.iter().flat_map(|port| port.elements(owner)) {
        found.extend(nft.element(set, wanted.key)?.map(|element| (set, element)));
    }
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

fn all_elements(nft: &Nft) -> Result<Vec<(Set<'static>, Element)>> {
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
