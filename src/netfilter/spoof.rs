//! The source MAC check: frames from a container with another source address are dropped at its bridge port.
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
//! Two elements per port replace the reference's two chains and four rules, so that the cost of a frame does not
//! depend on the number of ports. The reference's chains are deleted as well.

use serde::{Deserialize, Serialize};

use super::backend::Feature;
use super::layout::{self, Change, HandedOver, Layout, Restorable};
use super::names::{identity, stale};
use super::{Owner, PacketFilter, all};
use crate::attachment::Kept;
use crate::error::{Context, Error, Result};
use crate::netlink::nftables::{
    Batch, Chain, Element, Family, Field, Hook, Nft, RAW, Rule, RuleInfo, Set, Table, Type, Value,
};
use crate::netlink::{self, Mac};

const TABLE: Table<'_> = Table::new(Family::Bridge, "cnibox_spoof")
    .comment("cnibox: containers send with their own MAC only");
const PREROUTING: Chain<'_> = TABLE.chain("prerouting").filter(Hook::Prerouting, RAW);
const CHECKED: Set<'_> = TABLE.set("checked", &[Type::IfName]);
const ALLOWED: Set<'_> = TABLE.set("allowed", &[Type::IfName, Type::EtherAddr]);
const SETS: [Set<'_>; 2] = [CHECKED, ALLOWED];

/// The table of the reference plugins.
const REFERENCE: Table<'_> = Table::new(Family::Bridge, "nat");

/// The records of attachments.
pub const KEPT: Kept = Kept("spoof");

/// Has no rules in iptables.
pub(super) const FEATURE: Feature = Feature {
    state: Restorable {
        kept: KEPT,
        layouts: || vec![layout()],
        restore: |change| change.restore_all(KEPT, &SETS, elements),
    },
    heal: |_, _| Ok(None),
    remove: |filter, owner, _| del(filter, owner, &[]),
    hand_over: &[("source-MAC checks", hand_over)],
};

/// A bridge port, and the only source address of its frames.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Port {
    /// The host end of the veth pair.
    pub name: String,
    /// The address of the container's end.
    pub mac: Mac,
}

fn elements(owner: Owner<'_>, Port { name, mac }: &Port) -> Vec<Element> {
    let name = name.as_str();
    let elements = [CHECKED.element(name), ALLOWED.element((name, *mac))];
    elements.map(|element| element.comment(owner.label())).into()
}

fn layout() -> Layout {
    let source = [Field::Iifname, Field::EtherSaddr];
    let rule = Rule::new().in_set(&[Field::Iifname], CHECKED).not_in_set(&source, ALLOWED);
    let chains = vec![(PREROUTING, vec![rule.drop().comment("another source")])];
    Layout { table: TABLE, sets: SETS.to_vec(), chains, additions: &[], subnet: |_| None }
}

/// The first missing object that attachments of this host depend on.
pub fn damage(filter: &PacketFilter) -> Result<Option<String>> {
    let is_needed = || !KEPT.living::<Port>().is_empty();
    Ok(layout().damage(filter.nft()?, &is_needed)?)
}

/// Drops frames from the port with another source address.
pub fn add(filter: &PacketFilter, owner: Owner<'_>, port: &Port) -> Result<()> {
    let failed = || "failed to setup spoof-check";
    let nft = filter.nft().context(failed)?;
    KEPT.keep(owner, port);
    let elements = elements(owner, port);
    let fill = &mut |change: &mut Change<'_>, found: Vec<Option<Element>>| {
        if found.iter().flatten().eq(&elements) {
            return Ok(());
        }
        if found.first().is_some_and(Option::is_some) {
            // A deleted port had the same name.
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
    filter.tables()?.change(&[layout()], &elements, fill).context(failed)
}

/// Verifies that the port is checked, and that the container's address is allowed.
pub fn check(filter: &PacketFilter, owner: Owner<'_>, port: &Port) -> Result<()> {
    let nft = filter.nft()?;
    let damage = layout().damage(nft, &|| true)?;
    let elements = elements(owner, port);
    let is_complete = damage.is_none() && nft.find(&[], &elements)? == elements;
    if is_complete || !reference_rules(nft, owner)?.is_empty() {
        return Ok(());
    }
    Err(Error::internal(format!("the source MAC of port \"{}\" is not checked", port.name))
        .with_details(KEPT.remedy(owner, damage.as_deref())))
}

/// The checked ports that may send with this source address: those that [`add`] has registered.
pub fn ports_with(filter: &PacketFilter, mac: Mac) -> Result<Vec<Port>> {
    let mut ports = Vec::new();
    for element in filter.nft()?.find(&[ALLOWED], &[])? {
        match element.key.0.as_slice() {
            [Value::IfName(name), Value::Mac(found)] if *found == mac => {
                ports.push(Port { name: name.clone(), mac });
            }
            _ => {}
        }
    }
    Ok(ports)
}

/// Removes the objects that [`add`] or the reference created for the owner. If the ports are known, the sets need
/// not be searched.
pub fn del(filter: &PacketFilter, owner: Owner<'_>, ports: &[Port]) -> Result<()> {
    let Some(nft) = filter.nft_if_present()? else { return Ok(()) };
    let wanted: Vec<_> = ports.iter().flat_map(|port| elements(owner, port)).collect();
    let find = &mut |nft: &Nft, _: &mut Batch| {
        let mut found = nft.find(&SETS, &wanted)?;
        // A later plugin may have changed the address.
        if found.len() < 2 && !wanted.is_empty() {
            found = nft.find(&SETS, &[])?;
        }
        found.retain(|element| owner.owns(element.comment.as_deref()));
        Ok(found)
    };
    let own = layout().hand_on(nft, KEPT, find, &|_| Vec::new());
    let outcomes = [KEPT.remove(owner), own.map_err(Error::from), del_reference(nft, owner)];
    all(outcomes).context(|| "failed to teardown spoof-check")
}

/// The reference's two chains of an attachment, and the comment of its rules.
fn reference_names(id: &str) -> [String; 3] {
    let port = format!("cni-br-iface-{id}");
    [port.clone(), format!("{port}-mac"), format!("macspoofchk-{id}")]
}

/// The handles of the rules that jump to the reference's chains of an attachment.
fn reference_rules(nft: &Nft, owner: Owner<'_>) -> netlink::Result<Vec<RuleInfo>> {
    let [.., own] = reference_names(&format!("{}-{}", owner.id, owner.ifname));
    nft.rules_of(REFERENCE.chain("PREROUTING"), &|comment| comment == Some(&own))
}

/// Deletes the reference's chains, whose names contain neither the network nor the port.
fn del_reference(nft: &Nft, owner: Owner<'_>) -> Result<()> {
    let [port, mac, _] = reference_names(&format!("{}-{}", owner.id, owner.ifname));
    if !nft.has(REFERENCE.chain(&port))? {
        return Ok(());
    }
    let mut batch = Batch::new();
    batch.del_rules(REFERENCE, &reference_rules(nft, owner)?);
    batch.del(REFERENCE.chain(&port)).del(REFERENCE.chain(&mac));
    Ok(nft.commit(batch)?)
}

/// Rewrites our layout into the reference's. Counts ports; lost ports are no longer checked.
fn hand_over(filter: &PacketFilter) -> Result<HandedOver> {
    let convert = |nft: &Nft, batch: &mut Batch| {
        let mut handed = HandedOver::default();
        for element in nft.find(&[ALLOWED], &[])? {
            match create_reference(batch, &element) {
                Some(()) => handed.objects += 1,
                None => handed.nameless += 1,
            }
        }
        Ok(handed)
    };
    filter.ask(&|nft| layout::hand_over(nft, TABLE, &convert))
}

/// Adds the reference's chains of a port; `None` if the element does not identify its attachment.
fn create_reference(batch: &mut Batch, element: &Element) -> Option<()> {
    let (id, ifname, _) = identity(element.comment.as_deref()?)?;
    let [Value::IfName(name), Value::Mac(address)] = element.key.0.as_slice() else { return None };
    let [iface, mac, comment] = reference_names(&format!("{id}-{ifname}"));
    let prerouting = REFERENCE.chain("PREROUTING").filter(Hook::Prerouting, RAW);
    let (iface, mac) = (REFERENCE.chain(&iface), REFERENCE.chain(&mac));
    batch.ensure(REFERENCE).ensure(prerouting).ensure(mac).ensure(iface);
    batch.flush_chain(mac).flush_chain(iface);
    for (chain, rule) in [
        (prerouting, Rule::new().eq(Field::Iifname, name.as_str()).jump(iface.name)),
        (iface, Rule::new().jump(mac.name)),
        (mac, Rule::new().eq(Field::EtherSaddr, *address).ret()),
        (mac, Rule::new().drop()),
    ] {
        batch.append_rule(chain, &rule.comment(&comment));
    }
    Some(())
}

/// Removes the elements of the network's attachments that are not among `valid`. The reference's objects do not
/// identify their network.
pub fn gc(filter: &PacketFilter, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    KEPT.remove_stale(network, valid)?;
    let is_stale = stale(network, valid);
    let removed = filter.ask(&|nft| {
        let find = &mut |nft: &Nft, _: &mut Batch| nft.find_of(&SETS, &[], &is_stale);
        layout().hand_on(nft, KEPT, find, &|_| Vec::new())
    });
    removed.context(|| "clean up spoof-check")
}
