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

use super::layout::{Change, Feature, HandedOver};
use super::names::stale;
use super::{Backend, Owner, PacketFilter, all};
use crate::attachment::Kept;
use crate::error::{Context, Error, Result};
use crate::netlink::nftables::Nft;

/// The records of attachments.
const KEPT: Kept = Kept("masquerade");

/// The masqueraded addresses of an attachment.
#[derive(Serialize, Deserialize)]
pub(super) struct Record {
    backend: Backend,
    /// Each with the prefix length of its subnet.
    addrs: Vec<IpNet>,
}

/// For [`super::heal`].
pub(super) const FEATURE: Feature =
    Feature { kept: KEPT, layouts: || vec![nft::layout()], restore };

fn restore(change: &mut Change<'_>) {
    change.restore_all(KEPT, &[nft::layout()], nft::recorded);
}

/// The first missing rule that attachments of this host depend on.
pub fn damage(filter: &PacketFilter) -> Result<Option<String>> {
    if let Some(nft) = filter.nft_if_present()?
        && let Some(damage) = nft::layout().damage(nft, &|| Backend::Nftables.is_recorded(KEPT))?
    {
        return Ok(Some(damage));
    }
    iptables::RECORDS.damage(&|family| filter.iptables(family))
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
    let nft = filter.nft_if_present()?;
    for addr in addrs {
        let on_nft = nft.map(|nft| nft::has(nft, owner, *addr)).transpose()?.unwrap_or_default();
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
    let mut outcomes = vec![KEPT.remove(owner), iptables::del(filter, owner, addrs)];
    if let Some(nft) = filter.nft_if_present()? {
        outcomes.push(nft::del(nft, owner, addrs).map_err(Error::from));
        outcomes.push(nft::del_reference(nft, &owner.matcher()).map_err(Error::from));
    }
    all(outcomes).context(|| "end masquerading")
}

/// Ends masquerading for the attachments of the network that are not among `valid`.
pub fn gc(filter: &PacketFilter, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    let removed = KEPT.remove_stale(network, valid);
    let mut outcomes = vec![removed, iptables::gc(filter, network, valid)];
    if let Some(nft) = filter.nft_if_present()? {
        let is_stale = stale(network, valid);
        outcomes.push(nft::gc(nft, &is_stale).map_err(Error::from));
        outcomes.push(nft::del_reference(nft, &is_stale).map_err(Error::from));
    }
    all(outcomes).context(|| "clean up masquerading")
}

/// Rewrites our layout on `nf_tables` into the reference's. Counts addresses.
pub(super) fn hand_over(nft: &Nft) -> Result<HandedOver> {
    super::layout::hand_over(nft, nft::TABLE, &nft::create_reference)
}
