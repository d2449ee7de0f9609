//! Masquerading: packets from a container to destinations outside its subnet get the host's address.
//!
//! Packets to multicast addresses and to the container's own subnet are not changed. [`add`] uses one back end; the
//! other functions examine both back ends, and the layouts of this program and of the reference plugins. A container
//! is identified by its [`Owner`] and, where the caller knows them, its addresses: DEL needs neither the namespace
//! nor the interface nor a result.
//!
//! | file | layout |
//! | --- | --- |
//! | `nft.rs` | ours on `nf_tables`: one map element per address; the reference's: one rule per address |
//! | `iptables.rs` | the reference's with iptables: one chain per container |

pub(super) mod iptables;
mod nft;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::backend::Feature;
use super::layout::{Restorable, hand_over};
use super::names::stale;
use super::{Backend, Owner, PacketFilter, Repair, all};
use crate::attachment::Kept;
use crate::error::{Context, Error, Result};

/// The records of attachments.
const KEPT: Kept = Kept("masquerade");

/// The masqueraded addresses of an attachment.
#[derive(Serialize, Deserialize)]
pub(super) struct Record {
    backend: Backend,
    /// Each with the prefix length of its subnet.
    addrs: Vec<IpNet>,
}

/// Both back ends.
pub(super) const FEATURE: Feature = Feature {
    state: Restorable {
        kept: KEPT,
        layouts: || vec![nft::layout()],
        restore: |change| change.restore_all(KEPT, &nft::PODS, nft::recorded),
    },
    heal: |filter, repair| iptables::RECORDS.heal(&|family| filter.iptables(family), repair),
    remove: |filter, owner, ips| {
        let addrs: Vec<IpNet> = ips.iter().map(|ip| IpNet::from(*ip)).collect();
        del(filter, owner, &addrs)
    },
    hand_over: &[("masqueraded addresses", |filter| {
        filter.ask(&|nft| hand_over(nft, nft::TABLE, &nft::create_reference))
    })],
};

/// The first missing rule that attachments of this host depend on.
pub fn damage(filter: &PacketFilter) -> Result<Option<String>> {
    let is_needed = || Backend::Nftables.is_recorded(KEPT);
    let damage = filter.ask(&|nft| nft::layout().damage(nft, &is_needed))?;
    if damage.is_some() { Ok(damage) } else { (FEATURE.heal)(filter, Repair::Report) }
}

/// Masquerades the addresses, each with the prefix length of its subnet. An address of another attachment is left to it.
pub fn add(
    filter: &PacketFilter,
    backend: Backend,
    owner: Owner<'_>,
    addrs: &[IpNet],
) -> Result<()> {
    KEPT.keep(owner, Record { backend, addrs: addrs.to_vec() });
    let added = match backend {
        Backend::Nftables => nft::add(filter, owner, addrs).map_err(Error::from),
        Backend::Iptables => iptables::add(filter, owner, addrs),
    };
    added.context(|| "masquerade")
}

/// Verifies that every address is masqueraded, by our rules or by the reference's.
pub fn check(filter: &PacketFilter, owner: Owner<'_>, addrs: &[IpNet]) -> Result<()> {
    for addr in addrs {
        let on_nft = filter.ask(&|nft| nft::has(nft, owner, *addr))?;
        if !on_nft && !iptables::has(filter, owner, *addr)? {
            let error = Error::internal(format!("{addr} is not masqueraded"));
            return Err(error.with_details(KEPT.remedy(owner, damage(filter)?.as_deref())));
        }
    }
    Ok(())
}

/// Ends masquerading for the owner in all back ends. Without addresses the owner's rules are found by their comments
/// and chain names.
pub fn del(filter: &PacketFilter, owner: Owner<'_>, addrs: &[IpNet]) -> Result<()> {
    all([
        KEPT.remove(owner),
        iptables::del(filter, owner, addrs),
        filter.ask(&|nft| nft::del(nft, owner, addrs)),
        filter.ask(&|nft| nft::del_reference(nft, &owner.matcher())),
    ])
    .context(|| "end masquerading")
}

/// Ends masquerading for the attachments of the network that are not among `valid`.
pub fn gc(filter: &PacketFilter, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    let is_stale = stale(network, valid);
    all([
        KEPT.remove_stale(network, valid),
        iptables::gc(filter, network, valid),
        filter.ask(&|nft| nft::gc(nft, &is_stale)),
        filter.ask(&|nft| nft::del_reference(nft, &is_stale)),
    ])
    .context(|| "clean up masquerading")
}
