//! `cnibox gc` of what dead attachments left: their records, and files that name no attachment.

use std::fs;

use super::{COLLECT, GarbageCollector};
use crate::attachment::AttachmentRecord;
use crate::framework::reclaim;
use crate::tool::directories::EMPTY;
use crate::tool::life::doubt_reason;
use crate::tool::outcome::{ActionOutcome, LEFT_ALONE};
use cni::error::{Error, ErrorCode, Result};

impl GarbageCollector<'_> {
    /// Removes, or with `dry_run` lists, the remains of a dead attachment.
    pub(super) fn remove_remains(
        &self,
        record: &AttachmentRecord,
        dry_run: bool,
    ) -> Option<ActionOutcome> {
        let AttachmentRecord { id, ifname, network, .. } = record;
        let object = format!("state of container {id}, interface {ifname}");
        let liveness = record.liveness();
        match self.selection.deletion_reason(network, id, liveness) {
            Some(why) if dry_run => {
                Some(ActionOutcome::new("would remove", network, object, why).with_remedy(COLLECT))
            }
            Some(why) => match reclaim::remove_if_ended(record) {
                Ok(removed) => removed.then(|| ActionOutcome::new("removed", network, object, why)),
                Err(busy) if busy.code() == ErrorCode::TRY_AGAIN => {
                    Some(ActionOutcome::new(LEFT_ALONE, network, object, busy.message()))
                }
                Err(error) => Some(ActionOutcome::log_failure(network, object, &error)),
            },
            None if dry_run && self.selection.has_attachment(network, id) => {
                doubt_reason(liveness).map(|why| self.outcome_in_doubt(network, id, object, why))
            }
            None => None,
        }
    }

    /// Removes, or with `dry_run` lists, empty files of the runtimes' cache.
    pub(super) fn remove_empty_files(
        &self,
        dry_run: bool,
        outcomes: &mut Vec<ActionOutcome>,
    ) -> Result<()> {
        if self.selection.network.is_some() || self.selection.container.is_some() {
            return Ok(());
        }
        for path in self.directories.empty_cache_files() {
            let action = if dry_run { "would remove" } else { "removed" };
            let object = path.display().to_string();
            if !dry_run {
                fs::remove_file(&path)
                    .map_err(|cause| Error::io(format_args!("remove {object}"), &cause))?;
            }
            outcomes.push(ActionOutcome::new(action, "", object, EMPTY).with_remedy(COLLECT));
        }
        Ok(())
    }
}
