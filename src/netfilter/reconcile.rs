//! Compares the packet filter with the records of attachments, which are the desired state, and makes it so.
//!
//! Every question whether rules are as they should be is asked here: by STATUS of what the next ADD needs, by `cnibox
//! doctor` and `cnibox repair` of all rules of this host.

use super::backend::{FilterFeature, PacketFilter, RuleBackend};
use super::difference::{Difference, ReconcileMode};
use super::layout::TableLayout;
use crate::error::{ErrorContext, Result};
use crate::log;
use crate::netlink::NetlinkResult;

/// Compares the rules of all attachments of this host, single elements included.
pub fn reconcile_all(filter: &PacketFilter, mode: ReconcileMode) -> Result<Vec<Difference>> {
    let missing = filter.query_nft(&|_| filter.own_tables()?.repair_tables(mode))?;
    let mut found: Vec<Difference> = missing.into_iter().map(Difference::new).collect();
    for feature in filter.features {
        found.extend((feature.reconcile)(filter, mode)?);
    }
    Ok(found)
}

/// For STATUS: restores what the next ADD with these features would restore. Fails, with code 50, only where that ADD
/// would fail: if the back end cannot work, or the feature's tables of this back end cannot be restored. Other rules that
/// cannot be restored are those of other attachments, which `cnibox doctor` reports. `None` stands for an ADD that needs
/// no rules of these features.
pub fn require_serviceable(
    filter: &PacketFilter,
    backend: Option<RuleBackend>,
    features: &[FilterFeature],
) -> Result<()> {
    backend.map_or(Ok(()), |backend| backend.require_usable(filter))?;
    let required = |of: RuleBackend, outcome: Result<()>| match outcome {
        Err(error) if backend != Some(of) => {
            log::warn(format_args!("could not restore rules: {error}"));
            Ok(())
        }
        outcome => outcome.or_unavailable(),
    };
    for feature in features {
        required(RuleBackend::Nftables, filter.query_nft(&|_| restore_tables(filter, feature)))?;
        required(RuleBackend::Iptables, restore_others(filter, feature))?;
    }
    Ok(())
}

/// Restores what a feature has outside of our tables. Fails if it cannot be compared with the records.
fn restore_others(filter: &PacketFilter, feature: &FilterFeature) -> Result<()> {
    for Difference { object, failure } in (feature.reconcile)(filter, ReconcileMode::Apply)? {
        match failure {
            None => log::debug(format_args!("restored: {object}")),
            Some(error) => log::warn(format_args!("could not restore {object}: {error}")),
        }
    }
    Ok(())
}

/// Restores the tables of a feature that exist or that records need, with all elements in flushed sets.
fn restore_tables(filter: &PacketFilter, feature: &FilterFeature) -> NetlinkResult<()> {
    let mut damaged: Vec<TableLayout> = Vec::new();
    for layout in feature.state.layouts {
        let is_needed = || (feature.state.needs_table)(layout);
        if let Some(damage) = layout.first_deviation(filter.nft_socket()?, &is_needed)? {
            log::debug(format_args!("restored: {damage}"));
            damaged.push(*layout);
        }
    }
    if damaged.is_empty() {
        return Ok(());
    }
    filter.own_tables()?.change_tables(&damaged, &[], &mut |_, _| Ok(()))
}
