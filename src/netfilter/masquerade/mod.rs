//! Masquerading: what a container sends out of its subnet leaves with the host's address.
//!
//! Multicast and the container's own subnet are left alone. Rules are made with one back end
//! ([`add`]); the other verbs look at what is there, made with either, by this program or by the
//! reference plugins. Nothing is known about a container but its [`Owner`] and, where the caller
//! has them, its addresses: DEL works without namespace, interface and result.
//!
//! | file | layout |
//! | --- | --- |
//! | `nft.rs` | ours on `nf_tables`: one map element for each address |
//! | `iptables.rs` | the reference's with iptables: one chain for each container |
//! | `reference.rs` | the reference's on `nf_tables`: one rule for each address; made by `hand_over` alone |

pub(super) mod iptables;
mod nft;
mod reference;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::all;
use super::backend::{Backend, PacketFilter};
use super::handed_over::{HandedOver, replace_table};
use super::layout::{Change, Feature};
use super::names::Owner;
use crate::attachment::{Keepsake, Kept};
use crate::error::{Context, Error, Result};
use crate::netlink::nftables::Nft;

/// What is kept of each attachment.
const KEPT: Kept = Kept::of("masquerade");

/// What is masqueraded, and with which back end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    backend: Backend,
    /// Each with the prefix of its subnet.
    addrs: Vec<IpNet>,
}

/// For [`super::heal`].
pub(super) const FEATURE: Feature =
    Feature { kept: KEPT, layouts: || vec![nft::layout()], restore };

fn restore(change: &mut Change<'_>) {
    change.restore_all(KEPT, &[nft::layout()], |owner, record: &Record| match record.backend {
        Backend::Nftables => nft::elements(owner, &record.addrs),
        Backend::Iptables => Vec::new(),
    });
}

/// What is wrong with the rules that attachments of this host depend on.
pub fn damage(filter: &PacketFilter) -> Result<Option<String>> {
    let is_ours = |kept: &Keepsake<Record>| kept.content.backend == Backend::Nftables;
    let is_needed = || KEPT.living().iter().any(is_ours);
    if let Some(nft) = filter.nft_if_present()?
        && let Some(damage) = nft::layout().damage(nft, is_needed)?
    {
        return Ok(Some(damage));
    }
    iptables::RECORDS.damage()
}

/// Masquerades the addresses, each with the prefix of its subnet. What an earlier owner of one of
/// them left is replaced.
pub fn add(
    filter: &PacketFilter,
    backend: Backend,
    owner: Owner<'_>,
    addrs: &[IpNet],
) -> Result<()> {
    KEPT.keep(owner, Record { backend, addrs: addrs.to_vec() });
    let added = match backend {
        Backend::Nftables => filter.nft().and_then(|nft| nft::add(nft, owner, addrs)),
        Backend::Iptables => iptables::add(owner, addrs),
    };
    added.context(|| "masquerade")
}

/// Verifies that every address is masqueraded, by rules of ours or of the reference.
pub fn check(filter: &PacketFilter, owner: Owner<'_>, addrs: &[IpNet]) -> Result<()> {
    let nft = filter.nft_if_present()?;
    for addr in addrs {
        let on_nft = match nft {
            Some(nft) => nft::has(nft, owner, *addr)? || reference::has(nft, owner)?,
            None => false,
        };
        if !on_nft && !iptables::has(filter, owner, *addr)? {
            let error = Error::internal(format!("{addr} is not masqueraded"));
            return Err(error.with_details(KEPT.remedy(owner, damage(filter)?.as_deref())));
        }
    }
    Ok(())
}

/// Ends masquerading for the owner, with every back end. Without addresses what belongs to the
/// owner is found by its comments and names.
pub fn del(filter: &PacketFilter, owner: Owner<'_>, addrs: &[IpNet]) -> Result<()> {
    let mut outcomes = vec![KEPT.remove(owner), iptables::del(filter, owner, addrs)];
    if let Some(nft) = filter.nft_if_present()? {
        outcomes.extend([nft::del(nft, owner, addrs), reference::del(nft, owner)]);
    }
    all(outcomes).context(|| "end masquerading")
}

/// Ends masquerading for the attachments of the network that are not among `valid`.
pub fn gc(filter: &PacketFilter, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    let removed = KEPT.remove_stale(network, valid);
    let mut outcomes = vec![removed, iptables::gc(filter, network, valid)];
    if let Some(nft) = filter.nft_if_present()? {
        outcomes.extend([nft::gc(nft, network, valid), reference::gc(nft, network, valid)]);
    }
    all(outcomes).context(|| "clean up masquerading")
}

/// Rewrites our layout on `nf_tables` into the reference's; how many addresses that were.
pub(super) fn hand_over(nft: &Nft) -> Result<HandedOver> {
    replace_table(nft, nft::TABLE, &|nft, batch| {
        let pods = nft::pods(nft)?;
        if !pods.is_empty() {
            reference::make(nft, batch, &pods)?;
        }
        Ok(HandedOver::all(pods.len()))
    })
}
