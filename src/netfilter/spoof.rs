//! The source MAC check: frames from a container with another source address are dropped at its
//! bridge port.
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
//! Two elements per port replace the reference's two chains and four rules, so that the cost of a
//! frame does not depend on the number of ports. DEL also deletes the reference's chains.

use serde::{Deserialize, Serialize};

use super::backend::FilterFeature;
use super::elements::{RecordedElements, elements_of_part};
use super::layout::{self, HandoverCount, LayoutTransaction, RestorableState, TableLayout};
use super::names::{parse_label, stale_matcher};
use super::reconcile::check_attachment;
use super::{AttachmentId, PacketFilter};
use crate::attachment::RecordStore;
use crate::netlink::nftables::{
    NetfilterHook, NftBatch, NftChain, NftRule, NftSet, NftSocket, NftTable, NftValue, PacketField,
    RAW, RuleInfo, SetElement, TableFamily, ValueType,
};
use crate::netlink::{self, MacAddress};
use cni::error::{Error, ErrorContext, Result, join_outcomes};

const TABLE: NftTable<'_> = NftTable::new(TableFamily::Bridge, "cnibox_spoof")
    .with_comment("cnibox: containers send with their own MAC only");
const PREROUTING: NftChain<'_> =
    TABLE.named_chain("prerouting").at_filter_hook(NetfilterHook::Prerouting, RAW);
const CHECKED: NftSet<'_> = TABLE.named_set("checked", &[ValueType::IfName]);
const ALLOWED: NftSet<'_> = TABLE.named_set("allowed", &[ValueType::IfName, ValueType::EtherAddr]);
const SETS: [NftSet<'_>; 2] = [CHECKED, ALLOWED];

/// The table of the reference plugins.
const REFERENCE: NftTable<'_> = NftTable::new(TableFamily::Bridge, "nat");

/// The parts of this feature in the records of attachments.
pub const RECORDS: RecordStore = RecordStore("spoof");

/// The feature, which has no rules in iptables.
pub const FEATURE: FilterFeature = FilterFeature {
    elements: Some(ELEMENTS),
    is_of_reference: |nft, owner, _| Ok(!reference_rules(nft, owner)?.is_empty()),
    remove: |filter, owner, _| delete_ports(filter, owner, &[]),
    hand_over: &[("source-MAC checks", hand_over)],
    ..FilterFeature::new(RestorableState {
        kept: RECORDS,
        layouts: &[LAYOUT],
        needs_table: |layout| ELEMENTS.need_table(layout.table),
        restore: |change| ELEMENTS.restore(change),
    })
};

/// A bridge port, and the only source address of its frames.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SpoofPart {
    /// The host end of the veth pair.
    pub name: String,
    /// The address of the container's end.
    pub mac: MacAddress,
}

fn port_elements(owner: AttachmentId<'_>, SpoofPart { name, mac }: &SpoofPart) -> Vec<SetElement> {
    let name = name.as_str();
    let elements = [CHECKED.element_with_key(name), ALLOWED.element_with_key((name, *mac))];
    elements.map(|element| element.with_comment(owner.object_label())).into()
}

const ELEMENTS: RecordedElements = RecordedElements {
    kept: RECORDS,
    layout: LAYOUT,
    sets: &SETS,
    of_part: |owner, part| elements_of_part(owner, part, port_elements),
    // No other attachment may have the name of the port.
    find_conflict: |_, wanted, found| {
        (found != wanted)
            .then(|| format!("element {wanted} of {} belongs to another attachment", wanted.set))
    },
};

const LAYOUT: TableLayout = TableLayout {
    sets: &SETS,
    chains: &[(PREROUTING, &[("another source", drop_other_sources)])],
    ..TableLayout::new(TABLE)
};

fn drop_other_sources() -> NftRule {
    let source = [PacketField::Iifname, PacketField::EtherSaddr];
    NftRule::new().in_set(&[PacketField::Iifname], CHECKED).not_in_set(&source, ALLOWED).drop()
}

/// Drops frames from the port with another source address.
pub fn add_port(filter: &PacketFilter, owner: AttachmentId<'_>, port: &SpoofPart) -> Result<()> {
    let failed = || "failed to setup spoof-check";
    let nft = filter.nft_socket().context(failed)?;
    RECORDS.add_part(owner, port);
    let elements = port_elements(owner, port);
    let fill = &mut |change: &mut LayoutTransaction<'_>, found: Vec<Option<SetElement>>| {
        if found.iter().flatten().eq(&elements) {
            return Ok(());
        }
        if found.first().is_some_and(Option::is_some) {
            // A deleted port had the same name.
            for element in nft.find_elements(&SETS, &[])? {
                if element.key.0.first() == Some(&port.name.as_str().into()) {
                    change.batch.delete_element(&element);
                }
            }
        }
        for element in &elements {
            change.put_element(element);
        }
        Ok(())
    };
    filter.own_tables()?.change_tables(&[LAYOUT], &elements, fill).context(failed)
}

/// Verifies that the port is checked, and that the container's address is allowed.
pub fn check_port(filter: &PacketFilter, owner: AttachmentId<'_>, port: &SpoofPart) -> Result<()> {
    check_attachment(filter, &FEATURE, owner, port)
}

/// The checked ports that may send with this source address: those that [`add_port`] has
/// registered.
pub fn ports_with_mac(filter: &PacketFilter, mac: MacAddress) -> Result<Vec<SpoofPart>> {
    let mut ports = Vec::new();
    for element in filter.nft_socket()?.find_elements(&[ALLOWED], &[])? {
        match element.key.0.as_slice() {
            [NftValue::IfName(name), NftValue::Mac(found)] if *found == mac => {
                ports.push(SpoofPart { name: name.clone(), mac });
            }
            _ => {}
        }
    }
    Ok(ports)
}

/// Removes the objects that [`add_port`] or the reference created for the owner. If the ports are
/// known, the sets need not be searched.
pub fn delete_ports(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    ports: &[SpoofPart],
) -> Result<()> {
    let Some(nft) = filter.nft_socket_if_present()? else { return Ok(()) };
    let wanted: Vec<_> = ports.iter().flat_map(|port| port_elements(owner, port)).collect();
    let own = ELEMENTS.delete_found(nft, Some(owner), &mut |nft, _| {
        let mut found = nft.find_elements(&SETS, &wanted)?;
        // A later plugin may have changed the address.
        if found.len() < 2 && !wanted.is_empty() {
            found = nft.find_elements(&SETS, &[])?;
        }
        found.retain(|element| owner.owns_comment(element.comment.as_deref()));
        Ok(found)
    });
    let outcomes =
        [RECORDS.remove_part(owner), own.map_err(Error::from), delete_reference_chains(nft, owner)];
    join_outcomes(outcomes).context(|| "failed to teardown spoof-check")
}

/// The reference's two chains of an attachment, and the comment of its rules.
fn reference_names(id: &str) -> [String; 3] {
    let port = format!("cni-br-iface-{id}");
    [port.clone(), format!("{port}-mac"), format!("macspoofchk-{id}")]
}

/// The handles of the rules that jump to the reference's chains of an attachment.
fn reference_rules(
    nft: &NftSocket,
    owner: AttachmentId<'_>,
) -> netlink::NetlinkResult<Vec<RuleInfo>> {
    let [.., own] = reference_names(&format!("{}-{}", owner.id, owner.ifname));
    nft.find_rules_by_comment(REFERENCE.named_chain("PREROUTING"), &|comment| comment == Some(&own))
}

/// Deletes the reference's chains, whose names contain neither the network nor the port.
fn delete_reference_chains(nft: &NftSocket, owner: AttachmentId<'_>) -> Result<()> {
    let [port, mac, _] = reference_names(&format!("{}-{}", owner.id, owner.ifname));
    if !nft.has_object(REFERENCE.named_chain(&port))? {
        return Ok(());
    }
    let mut batch = NftBatch::new();
    batch.delete_rules(REFERENCE, &reference_rules(nft, owner)?);
    batch.delete_object(REFERENCE.named_chain(&port)).delete_object(REFERENCE.named_chain(&mac));
    Ok(nft.commit_batch(batch)?)
}

/// Rewrites our layout into the reference's. Counts ports; lost ports are no longer checked.
fn hand_over(filter: &PacketFilter) -> Result<HandoverCount> {
    let convert = |nft: &NftSocket, batch: &mut NftBatch| {
        let mut handed = HandoverCount::default();
        for element in nft.find_elements(&[ALLOWED], &[])? {
            match create_reference_chains(batch, &element) {
                Some(()) => handed.objects += 1,
                None => handed.nameless += 1,
            }
        }
        Ok(handed)
    };
    filter.query_nft(&|nft| layout::hand_over(nft, TABLE, &convert))
}

/// Adds the reference's chains of a port; `None` if the element does not identify its attachment.
fn create_reference_chains(batch: &mut NftBatch, element: &SetElement) -> Option<()> {
    let (id, ifname, _) = parse_label(element.comment.as_deref()?)?;
    let [NftValue::IfName(name), NftValue::Mac(address)] = element.key.0.as_slice() else {
        return None;
    };
    let [iface, mac, comment] = reference_names(&format!("{id}-{ifname}"));
    let prerouting =
        REFERENCE.named_chain("PREROUTING").at_filter_hook(NetfilterHook::Prerouting, RAW);
    let (iface, mac) = (REFERENCE.named_chain(&iface), REFERENCE.named_chain(&mac));
    batch
        .ensure_object(REFERENCE)
        .ensure_object(prerouting)
        .ensure_object(mac)
        .ensure_object(iface);
    batch.flush_chain(mac).flush_chain(iface);
    for (chain, rule) in [
        (
            prerouting,
            NftRule::new().match_equal(PacketField::Iifname, name.as_str()).jump_to(iface.name),
        ),
        (iface, NftRule::new().jump_to(mac.name)),
        (mac, NftRule::new().match_equal(PacketField::EtherSaddr, *address).return_to_caller()),
        (mac, NftRule::new().drop()),
    ] {
        batch.append_rule(chain, &rule.with_comment(&comment));
    }
    Some(())
}

/// Removes the elements of the network's attachments that are not among `valid`. The reference's
/// objects do not identify their network.
pub fn remove_stale_ports(
    filter: &PacketFilter,
    network: &str,
    valid: &[AttachmentId<'_>],
) -> Result<()> {
    RECORDS.remove_stale_parts(network, valid)?;
    let is_stale = stale_matcher(network, valid);
    filter
        .query_nft(&|nft| ELEMENTS.delete_by_comment(nft, &is_stale))
        .context(|| "clean up spoof-check")
}
