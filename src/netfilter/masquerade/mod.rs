//! Masquerading: packets from a container to destinations outside its subnet get the host's
//! address.
//!
//! Packets to multicast addresses and to the container's own subnet are not changed.
//! [`add_addresses`] uses one back end; the other functions examine both back ends, and the layouts
//! of this program and of the reference plugins. A container is identified by its [`AttachmentId`]
//! and, where the caller knows them, its addresses: DEL needs neither the namespace nor the
//! interface nor a result.
//!
//! | file | layout |
//! | --- | --- |
//! | `nft.rs` | ours on `nf_tables`: one map element per address; the reference's: one rule per address |
//! | `iptables.rs` | the reference's with iptables: one chain per container |
//! | `options.rs` | the keys beside `ipMasq` |

pub(super) mod iptables;
mod nft;
mod options;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

pub use self::options::MasqueradeOptions;
use super::backend::FilterFeature;
use super::layout::{RestorableState, hand_over};
use super::names::stale_matcher;
use super::reconcile::check_attachment;
use super::{AttachmentId, PacketFilter, RuleBackend};
use crate::attachment::RecordStore;
use cni::error::{Error, ErrorContext, Result, join_outcomes};

/// The parts of this feature in the records of attachments.
const RECORDS: RecordStore = RecordStore("masquerade");

/// The masqueraded addresses of an attachment.
#[derive(Serialize, Deserialize)]
pub(super) struct MasqueradePart {
    backend: RuleBackend,
    /// The addresses, each with the prefix length of its subnet.
    addrs: Vec<IpNet>,
    #[serde(default, skip_serializing_if = "MasqueradeOptions::is_default")]
    options: MasqueradeOptions,
}

/// The feature, for both back ends.
pub const FEATURE: FilterFeature = FilterFeature {
    elements: Some(nft::ELEMENTS),
    rules: Some(iptables::RULES),
    is_of_reference: |nft, owner, _| nft::has_reference_rules(nft, owner),
    remove: |filter, owner, ips| {
        let addrs: Vec<IpNet> = ips.iter().map(|ip| IpNet::from(*ip)).collect();
        delete_addresses(filter, owner, &addrs)
    },
    hand_over: &[("masqueraded addresses", |filter| {
        filter.query_nft(&|nft| hand_over(nft, nft::TABLE, &nft::create_reference_rules))
    })],
    ..FilterFeature::new(RestorableState {
        kept: RECORDS,
        layouts: &[nft::LAYOUT],
        needs_table: |layout| nft::ELEMENTS.need_table(layout.table),
        restore: |change| nft::ELEMENTS.restore(change),
    })
};

/// Masquerades the addresses, each with the prefix length of its subnet. An address that another
/// attachment has, too, stays with that attachment.
pub fn add_addresses(
    filter: &PacketFilter,
    backend: RuleBackend,
    owner: AttachmentId<'_>,
    addrs: &[IpNet],
    options: &MasqueradeOptions,
) -> Result<()> {
    let record = MasqueradePart { backend, addrs: addrs.to_vec(), options: options.clone() };
    RECORDS.add_part(owner, &record);
    let added = match backend {
        RuleBackend::Nftables => nft::add_elements(filter, owner, &record).map_err(Error::from),
        RuleBackend::Iptables => iptables::add_rules(filter, owner, &record),
    };
    added.context(|| "masquerade")
}

/// Verifies that every address is masqueraded, by our rules or by the reference's. The options are
/// those of ADD; without a record, the configured ones.
pub fn check_addresses(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    addrs: &[IpNet],
    configured: &MasqueradeOptions,
) -> Result<()> {
    let recorded = RECORDS.read_content::<MasqueradePart>(owner).map(|record| record.options);
    let options = recorded.as_ref().unwrap_or(configured);
    RuleBackend::check_rules(None, filter, &FEATURE, owner, &|backend| {
        check_attachment(
            filter,
            &FEATURE,
            owner,
            &MasqueradePart { backend, addrs: addrs.to_vec(), options: options.clone() },
        )
    })
}

/// Ends masquerading for the owner in all back ends. Without addresses the owner's rules are found
/// by their comments and chain names.
pub fn delete_addresses(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    addrs: &[IpNet],
) -> Result<()> {
    filter.warn_of_legacy_rules(RECORDS, owner, "nat", &owner.iptables_chain(""));
    join_outcomes([
        RECORDS.remove_part(owner),
        iptables::delete_rules(filter, owner, addrs),
        filter.query_nft(&|nft| nft::delete_elements(nft, owner, addrs)),
        filter.query_nft(&|nft| nft::delete_reference_rules(nft, &owner.comment_matcher())),
    ])
    .context(|| "end masquerading")
}

/// Ends masquerading for the attachments of the network that are not among `valid`.
pub fn remove_stale_addresses(
    filter: &PacketFilter,
    network: &str,
    valid: &[AttachmentId<'_>],
) -> Result<()> {
    let is_stale = stale_matcher(network, valid);
    join_outcomes([
        RECORDS.remove_stale_parts(network, valid),
        iptables::remove_stale_rules(filter, network, valid),
        filter.query_nft(&|nft| nft::remove_stale_elements(nft, &is_stale)),
        filter.query_nft(&|nft| nft::delete_reference_rules(nft, &is_stale)),
    ])
    .context(|| "clean up masquerading")
}
