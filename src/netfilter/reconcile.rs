//! Compares the packet filter with the records of attachments, which are the desired state, and makes it so.
//!
//! Every question whether rules are as they should be is asked here: by STATUS of what the next ADD needs, by `cnibox
//! doctor` and `cnibox repair` of all rules of this host.

use super::backend::{FilterFeature, PacketFilter};
use super::layout::TableLayout;
use crate::error::{Error, ErrorContext, Result};
use crate::log;
use crate::netlink::NetlinkResult;

/// What is done about differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReconcileMode {
    /// The packet filter is changed.
    Apply,
    /// Nothing is changed.
    Report,
}

/// Something that is not as the records want it.
#[derive(Debug)]
pub struct Difference {
    /// What is missing or was changed, for messages.
    pub object: String,
    /// Why it could not be restored.
    pub failure: Option<Error>,
}

impl Difference {
    /// A difference that is restored, or reported only.
    pub fn new(object: impl Into<String>) -> Difference {
        Difference { object: object.into(), failure: None }
    }
}

/// Compares the rules of all attachments of this host, single elements included.
pub fn reconcile_all(filter: &PacketFilter, mode: ReconcileMode) -> Result<Vec<Difference>> {
    let missing = filter.query_nft(&|_| filter.own_tables()?.repair_tables(mode))?;
    let mut found: Vec<Difference> = missing.into_iter().map(Difference::new).collect();
    for feature in filter.features {
        found.extend((feature.reconcile)(filter, mode)?);
    }
    Ok(found)
}

/// For STATUS: restores what the next ADD with these features would restore. Fails only where that ADD would fail: rules
/// of other attachments that cannot be restored are reported by `cnibox doctor`.
pub fn restore_for_next_add(filter: &PacketFilter, features: &[FilterFeature]) -> Result<()> {
    for feature in features {
        filter.query_nft(&|_| restore_tables(filter, feature)).or_unavailable()?;
        for Difference { object, failure } in (feature.reconcile)(filter, ReconcileMode::Apply).or_unavailable()? {
            match failure {
                None => log::debug(format_args!("restored: {object}")),
                Some(error) => log::warn(format_args!("could not restore {object}: {error}")),
            }
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
