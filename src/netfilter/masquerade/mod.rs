//! Masquerading: what a container sends out of its subnet leaves with the host's address.
//!
//! Multicast and the container's own subnet are left alone. Rules are made with one back end
//! ([`add`]); the other verbs look at what is there, made with either, by this program or by the
//! reference plugins. Nothing is known about a container but its [`Owner`] and, where the caller
//! has them, its addresses: DEL works without namespace, interface and result.
//!
//! | file | layout |
//! | --- | --- |
//! | `elements.rs` | ours on `nf_tables`: one map element for each address |
//! | `chains.rs` | the reference's with iptables: one chain for each container |
//! | `rules.rs` | the reference's on `nf_tables`: one rule for each address; made by `hand_over` alone |

mod chains;
mod elements;
mod rules;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::backend::{Backend, PacketFilter};
use super::handover::HandedOver;
use super::layout::{Change, Feature};
use super::names::Owner;
use crate::attachment::{Keepsake, Kept};
use crate::error::{Context, Error, Result};
use crate::netlink::nftables::{Batch, Nft};

/// What is kept of each attachment.
const KEPT: Kept = Kept::of("masquerade");

/// What is masqueraded, and with which back end.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Record {
    backend: Backend,
    /// Each with the prefix of its subnet.
    addrs: Vec<IpNet>,
}

/// For [`super::heal`].
pub(super) const FEATURE: Feature = Feature { kept: KEPT, layouts: elements::layouts, restore };

fn restore(change: &mut Change<'_>) {
    if !elements::layouts().iter().flat_map(|l| &l.sets).any(|set| change.is_flushed(*set)) {
        return;
    }
    for kept in change.living::<Record>(KEPT) {
        if kept.content.backend == Backend::Nftables {
            elements::restore(change, kept.owner(), &kept.content.addrs);
        }
    }
}

/// What is wrong with the rules that attachments of this host depend on.
pub fn damage(filter: &PacketFilter) -> Result<Option<String>> {
    let is_ours = |kept: &Keepsake<Record>| kept.content.backend == Backend::Nftables;
    let is_needed = || KEPT.living().iter().any(is_ours);
    let on_nft = match filter.nft_if_present()? {
        Some(nft) => elements::layout().damage(nft, is_needed)?,
        None => None,
    };
    on_nft.map_or_else(chains::damage, |text| Ok(Some(text)))
}

/// Restores what is gone from iptables; what that was.
pub(super) fn heal_chains() -> Result<Option<String>> {
    chains::heal()
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
        Backend::Nftables => filter.nft().and_then(|nft| elements::add(nft, owner, addrs)),
        Backend::Iptables => chains::add(owner, addrs),
    };
    added.context(|| "masquerade")
}

/// Verifies that every address is masqueraded, whoever made the rules.
pub fn check(filter: &PacketFilter, owner: Owner<'_>, addrs: &[IpNet]) -> Result<()> {
    let nft = filter.nft_if_present()?;
    for addr in addrs {
        let on_nft = match nft {
            Some(nft) => elements::has(nft, owner, *addr)? || rules::has(nft, owner)?,
            None => false,
        };
        if !on_nft && !chains::has(filter, owner, *addr)? {
            let error = Error::internal(format!("{addr} is not masqueraded"));
            return Err(error.with_details(KEPT.remedy(owner, damage(filter)?.as_deref())));
        }
    }
    Ok(())
}

/// Ends masquerading for the owner, with every back end. Without addresses what belongs to the
/// owner is found by its comments and names.
pub fn del(filter: &PacketFilter, owner: Owner<'_>, addrs: &[IpNet]) -> Result<()> {
    let mut outcomes = vec![KEPT.remove(owner)];
    outcomes.extend(chains::del(filter, owner, addrs));
    if let Some(nft) = filter.nft_if_present()? {
        outcomes.extend([elements::del(nft, owner, addrs), rules::del(nft, owner)]);
    }
    all(outcomes).context(|| "end masquerading")
}

/// Ends masquerading for the attachments of the network that are not among `valid`.
pub fn gc(filter: &PacketFilter, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    let mut outcomes = vec![KEPT.remove_stale(network, valid)];
    outcomes.extend(chains::gc(filter, network, valid));
    if let Some(nft) = filter.nft_if_present()? {
        outcomes.extend([elements::gc(nft, network, valid), rules::gc(nft, network, valid)]);
    }
    all(outcomes).context(|| "clean up masquerading")
}

/// Rewrites our layout on `nf_tables` into the reference's, at one blow; how many addresses that were.
pub(super) fn hand_over(nft: &Nft) -> Result<HandedOver> {
    let mut handed = HandedOver::default();
    nft.update(|nft| {
        let mut batch = Batch::new();
        let pods = elements::take(nft, &mut batch)?;
        handed = HandedOver::all(pods.len());
        if !pods.is_empty() {
            rules::make(nft, &mut batch, &pods)?;
        }
        Ok(batch)
    })?;
    Ok(handed)
}

/// Success, or all errors as one.
fn all(outcomes: Vec<Result<()>>) -> Result<()> {
    let errors = outcomes.into_iter().filter_map(Result::err).collect();
    Error::join(errors).map_or(Ok(()), Err)
}
