//! Compares the packet filter with the records of attachments, which are the desired state, and makes it so.
//!
//! Every question whether rules are as they should be is asked here: by STATUS of what the next ADD needs, by `cnibox
//! doctor` and `cnibox repair` of all rules of this host.

use std::collections::HashSet;

use super::backend::{FilterFeature, PacketFilter, RuleBackend};
use super::difference::{Difference, ReconcileMode, unique_objects};
use super::layout::{RuleComparison, TableLayout};
use crate::attachment::AttachmentRecord;
use crate::error::{Error, ErrorContext, Result};
use crate::log;
use crate::netlink::NetlinkResult;

/// The attachments whose locks are held at once: each is an open file.
const LOCKED: usize = 64;

/// What [`reconcile_all`] has found, and restored.
#[derive(Debug, Default)]
pub struct ReconcileOutcome {
    /// What was not as the records want it, for messages.
    pub differences: Vec<String>,
    /// Why some of it could not be restored.
    pub failures: Vec<Error>,
}

/// Compares the rules of all attachments of this host with their records.
pub fn reconcile_all(filter: &PacketFilter, mode: ReconcileMode) -> Result<ReconcileOutcome> {
    let differences = unique_objects(find_differences(filter)?);
    let is_applied = mode == ReconcileMode::Apply && !differences.is_empty();
    let failures = if is_applied { restore_all(filter) } else { Vec::new() };
    Ok(ReconcileOutcome { differences, failures })
}

/// Restores the missing rules of all attachments of this host. Returns what failed.
pub fn restore_all(filter: &PacketFilter) -> Vec<Error> {
    let tables = filter.query_nft(&|_| filter.own_tables()?.repair_tables());
    let others = filter.features.iter().map(|feature| (feature.restore)(filter));
    [tables].into_iter().chain(others).filter_map(Result::err).collect()
}

/// The differences of all features, without those of attachments that another process is changing: ADD, DEL and whoever
/// reclaims an attachment hold its lock from the change of the record to that of the rules. What seems to differ is
/// compared again while its lock is held here.
fn find_differences(filter: &PacketFilter) -> Result<Vec<Difference>> {
    let seen: HashSet<String> = differences_of_features(filter)?.into_iter().map(|found| found.instance).collect();
    let seen: Vec<String> = seen.into_iter().collect();
    let mut certain = Vec::new();
    for instances in seen.chunks(LOCKED) {
        let mut locked = Vec::new();
        for instance in instances {
            if let Some(lock) = AttachmentRecord::try_lock_instance(instance)? {
                locked.push((instance, lock));
            }
        }
        let mut again = differences_of_features(filter)?;
        again.retain(|found| locked.iter().any(|(instance, _)| **instance == found.instance));
        certain.extend(again);
    }
    Ok(certain)
}

fn differences_of_features(filter: &PacketFilter) -> Result<Vec<Difference>> {
    let mut all = Vec::new();
    for feature in filter.features {
        all.extend((feature.differences)(filter)?);
    }
    Ok(all)
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
    for feature in features {
        match filter.query_nft(&|_| restore_tables(filter, feature)) {
            Err(error) if backend != Some(RuleBackend::Nftables) => log::warn(unrestored(&error)),
            outcome => outcome.or_unavailable()?,
        }
        (feature.restore)(filter).unwrap_or_else(|error| log::warn(unrestored(&error)));
    }
    Ok(())
}

fn unrestored(error: &Error) -> String {
    format!("could not restore rules: {error}")
}

/// Restores the tables of a feature that exist or that records need, with all elements in flushed sets.
fn restore_tables(filter: &PacketFilter, feature: &FilterFeature) -> NetlinkResult<()> {
    let mut damaged: Vec<TableLayout> = Vec::new();
    for layout in feature.state.layouts {
        let damage = layout.find_difference(filter.nft_socket()?, RuleComparison::ByComment)?;
        if let Some(damage) = damage.filter(|damage| damage.exists || (feature.state.needs_table)(layout)) {
            log::debug(format_args!("restored: {}", damage.text));
            damaged.push(*layout);
        }
    }
    if damaged.is_empty() {
        return Ok(());
    }
    filter.own_tables()?.change_tables(&damaged, &[], &mut |_, _| Ok(()))
}
