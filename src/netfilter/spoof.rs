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

use super::all;
use super::backend::PacketFilter;
use super::handed_over::{HandedOver, replace_table};
use super::layout::{self, Change, Feature, Layout};
use super::names::{Owner, identity, stale};
use crate::attachment::Kept;
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

const SETS: [Set<'_>; 2] = [CHECKED, ALLOWED];

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
    fn elements(&self, owner: Owner<'_>) -> [Element; 2] {
        let name = self.name.as_str();
        [CHECKED.element(name), ALLOWED.element((name, self.mac))]
            .map(|element| element.comment(owner.label()))
    }
}

fn layout() -> Layout {
    let source = [Field::Iifname, Field::EtherSaddr];
    let rule = Rule::new().in_set(&[Field::Iifname], CHECKED).not_in_set(&source, ALLOWED);
    let chains = vec![(PREROUTING, vec![rule.drop().comment("another source")])];
    Layout { table: TABLE, sets: SETS.to_vec(), chains, subnet: |_| None }
}

fn restore(change: &mut Change<'_>) {
    change.restore_all(KEPT, &[layout()], |owner, port: &Port| port.elements(owner).into());
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
    let fill = |change: &mut Change<'_>, found: Vec<Option<Element>>| {
        if found.iter().flatten().eq(&elements) {
            return Ok(());
        }
        if found.first().is_some_and(Option::is_some) {
            // A port that is no more had the name.
            for element in nft.find(&SETS, &[])? {
                if element.key.0.first() == Some(&port.name.as_str().into()) {
                    change.batch.del_element(&element);
                }
            }
        }
        for element in &elements {
            change.put(element);
        }
        Ok(())
    };
    layout::change(nft, &[layout()], &elements, fill).context(failed)
}

/// Verifies that the port is checked, and that its container may send.
pub fn check(filter: &PacketFilter, owner: Owner<'_>, port: &Port) -> Result<()> {
    let nft = filter.nft()?;
    let damage = layout().damage(nft, || true)?;
    let mut complete = damage.is_none();
    for wanted in port.elements(owner) {
        complete = complete && nft.element(&wanted)?.as_ref() == Some(&wanted);
    }
    let [.., theirs] = reference_names(&format!("{}-{}", owner.id, owner.ifname));
    let is_theirs = |comment: Option<&str>| comment == Some(&theirs);
    if complete || !nft.rules_of(REFERENCE.chain("PREROUTING"), &is_theirs)?.is_empty() {
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
    all(outcomes).context(|| "failed to teardown spoof-check")
}

fn del_own(nft: &Nft, owner: Owner<'_>, ports: &[Port]) -> Result<()> {
    if !nft.has(TABLE)? {
        return Ok(());
    }
    let wanted: Vec<_> = ports.iter().flat_map(|port| port.elements(owner)).collect();
    let mut found: Vec<_> = nft.elements(&wanted)?.into_iter().flatten().collect();
    // A plugin behind ours may have changed the address.
    if found.len() < 2 {
        found = nft.find(&SETS, &[])?;
    }
    found.retain(|element| owner.owns(element.comment.as_deref()));
    Ok(nft.commit(layout().deletion(nft, &found)?)?)
}

/// The reference's two chains for an attachment, and the comment of its rules.
fn reference_names(id: &str) -> [String; 3] {
    let port = format!("cni-br-iface-{id}");
    [port.clone(), format!("{port}-mac"), format!("macspoofchk-{id}")]
}

/// The reference's chains, which say neither network nor host's end.
fn del_reference(nft: &Nft, owner: Owner<'_>) -> Result<()> {
    let [port, mac, own] = reference_names(&format!("{}-{}", owner.id, owner.ifname));
    if !nft.has(REFERENCE.chain(&port))? {
        return Ok(());
    }
    let is_own = |comment: Option<&str>| comment == Some(&own);
    let mut batch = Batch::new();
    batch.del_rules(REFERENCE, &nft.rules_of(REFERENCE.chain("PREROUTING"), &is_own)?);
    batch.del(REFERENCE.chain(&port)).del(REFERENCE.chain(&mac));
    Ok(nft.commit(batch)?)
}

/// Rewrites our layout into the reference's; how many ports that are. Those that are lost are no
/// longer checked.
pub(super) fn hand_over(nft: &Nft) -> Result<HandedOver> {
    replace_table(nft, TABLE, &|nft, batch| {
        let mut handed = HandedOver::default();
        for element in nft.dump_elements(ALLOWED)? {
            match reference_port(&element) {
                Some((id, port)) => {
                    handed.objects += 1;
                    make_reference(batch, &id, &port);
                }
                None => handed.nameless += 1,
            }
        }
        Ok(handed)
    })
}

/// The port, and the reference's name for its attachment.
fn reference_port(element: &Element) -> Option<(String, Port)> {
    let (id, ifname, _) = identity(element.comment.as_deref()?)?;
    let [Value::IfName(name), Value::Mac(mac)] = element.key.0.as_slice() else { return None };
    Some((format!("{id}-{ifname}"), Port { name: name.clone(), mac: *mac }))
}

fn make_reference(batch: &mut Batch, id: &str, port: &Port) {
    let [iface, mac, comment] = reference_names(id);
    let prerouting = REFERENCE.chain("PREROUTING").filter(Hook::Prerouting, RAW);
    let (iface, mac) = (REFERENCE.chain(&iface), REFERENCE.chain(&mac));
    batch.ensure(REFERENCE).ensure(prerouting).ensure(mac).ensure(iface);
    batch.flush_chain(mac).flush_chain(iface);
    let rules = [
        (prerouting, Rule::new().eq(Field::Iifname, port.name.as_str()).jump(iface.name)),
        (iface, Rule::new().jump(mac.name)),
        (mac, Rule::new().eq(Field::EtherSaddr, port.mac).ret()),
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
    if !nft.has(TABLE)? {
        return Ok(());
    }
    let found = nft.find_of(&SETS, &[], &stale(network, valid))?;
    nft.commit(layout().deletion(nft, &found)?).context(|| "clean up spoof-check")
}
