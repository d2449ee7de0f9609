//! Masquerading: packets from a container to destinations outside its subnet get the host's address.
//!
//! Packets to multicast addresses and to the container's own subnet are not changed. [`add_addresses`] uses one back
//! end; the other functions examine both back ends, and the layouts of this program and of the reference plugins. A
//! container is identified by its [`AttachmentId`] and, where the caller knows them, its addresses: DEL needs neither
//! the namespace nor the interface nor a result.
//!
//! | file | layout |
//! | --- | --- |
//! | `nft.rs` | ours on `nf_tables`: one map element per address; the reference's: one rule per address |
//! | `iptables.rs` | the reference's with iptables: one chain per container |

pub(super) mod iptables;
mod nft;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::backend::FilterFeature;
use super::difference::differences_of_records;
use super::layout::{RestorableState, RuleComparison, hand_over};
use super::names::stale_matcher;
use super::{AttachmentId, PacketFilter, RuleBackend, join_errors};
use crate::attachment::{RecordStore, StoredRecord};
use crate::error::{Error, ErrorContext, Result};

/// The parts of this feature in the records of attachments.
const KEPT: RecordStore = RecordStore("masquerade");

/// The masqueraded addresses of an attachment.
#[derive(Serialize, Deserialize)]
pub(super) struct MasqueradeRecord {
    backend: RuleBackend,
    /// The addresses, each with the prefix length of its subnet.
    addrs: Vec<IpNet>,
}

/// The feature, for both back ends.
pub const FEATURE: FilterFeature = FilterFeature {
    state: RestorableState {
        kept: KEPT,
        layouts: &[nft::LAYOUT],
        needs_table: |layout| nft::ELEMENTS.need_table(layout.table),
        restore: |change| nft::ELEMENTS.restore(change),
    },
    differences: |filter| {
        let mut found = iptables::RECORDS.differences(&|family| filter.default_iptables(family))?;
        found.extend(differences_of_records(KEPT, |kept, _| check_nft_record(filter, kept)));
        Ok(found)
    },
    restore: |filter| iptables::RECORDS.restore_all(&|family| filter.default_iptables(family)),
    remove: |filter, owner, ips| {
        let addrs: Vec<IpNet> = ips.iter().map(|ip| IpNet::from(*ip)).collect();
        delete_addresses(filter, owner, &addrs)
    },
    hand_over: &[("masqueraded addresses", |filter| {
        filter.query_nft(&|nft| hand_over(nft, nft::TABLE, &nft::create_reference_rules))
    })],
};

/// Masquerades the addresses, each with the prefix length of its subnet. An address that another
/// attachment has, too, stays with that attachment.
pub fn add_addresses(
    filter: &PacketFilter,
    backend: RuleBackend,
    owner: AttachmentId<'_>,
    addrs: &[IpNet],
) -> Result<()> {
    KEPT.add_part(owner, MasqueradeRecord { backend, addrs: addrs.to_vec() });
    let added = match backend {
        RuleBackend::Nftables => nft::add_elements(filter, owner, addrs).map_err(Error::from),
        RuleBackend::Iptables => iptables::add_rules(filter, owner, addrs),
    };
    added.context(|| "masquerade")
}

/// For an attachment with a record of this back end: verifies that every address is masqueraded.
fn check_nft_record(filter: &PacketFilter, kept: &StoredRecord<MasqueradeRecord>) -> Result<()> {
    match kept.content.backend {
        RuleBackend::Nftables => {
            nft::LAYOUT.require_whole(filter.nft_socket()?, RuleComparison::ByComment)?;
            check_addresses(filter, kept.attachment_id(), &kept.content.addrs)
        }
        RuleBackend::Iptables => Ok(()),
    }
}

/// Verifies that every address is masqueraded, by our rules or by the reference's.
pub fn check_addresses(filter: &PacketFilter, owner: AttachmentId<'_>, addrs: &[IpNet]) -> Result<()> {
    for addr in addrs {
        let on_nft = filter.query_nft(&|nft| nft::is_masqueraded(nft, owner, *addr))?;
        if !on_nft && !iptables::has_rules(filter, owner, *addr)? {
            let error = Error::internal(format!("{addr} is not masqueraded"));
            let damage = filter.query_nft(&|nft| nft::LAYOUT.find_difference(nft, RuleComparison::ByComment))?;
            let damage = damage.filter(|_| nft::ELEMENTS.need_table(nft::TABLE)).map(|damage| damage.text);
            return Err(error.with_details(KEPT.restore_remedy(owner, damage.as_deref())));
        }
    }
    Ok(())
}

/// Ends masquerading for the owner in all back ends. Without addresses the owner's rules are found by their comments
/// and chain names.
pub fn delete_addresses(filter: &PacketFilter, owner: AttachmentId<'_>, addrs: &[IpNet]) -> Result<()> {
    join_errors([
        KEPT.remove_part(owner),
        iptables::delete_rules(filter, owner, addrs),
        filter.query_nft(&|nft| nft::delete_elements(nft, owner, addrs)),
        filter.query_nft(&|nft| nft::delete_reference_rules(nft, &owner.comment_matcher())),
    ])
    .context(|| "end masquerading")
}

/// Ends masquerading for the attachments of the network that are not among `valid`.
pub fn remove_stale_addresses(filter: &PacketFilter, network: &str, valid: &[AttachmentId<'_>]) -> Result<()> {
    let is_stale = stale_matcher(network, valid);
    join_errors([
        KEPT.remove_stale_parts(network, valid),
        iptables::remove_stale_rules(filter, network, valid),
        filter.query_nft(&|nft| nft::remove_stale_elements(nft, &is_stale)),
        filter.query_nft(&|nft| nft::delete_reference_rules(nft, &is_stale)),
    ])
    .context(|| "clean up masquerading")
}
