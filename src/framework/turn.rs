//! The turn of an attachment: its lock while a call changes it.
//!
//! Each ADD and DEL has the turn from before its first change until its result is printed, with the
//! delegates that it calls; `cnibox gc` has it while it ends an attachment, reclaim while it
//! removes what an ended one left (`docs/decisions/0027-turns.md`). A call that has the turn never
//! calls a program that would wait for it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::attachment::{AttachmentId, AttachmentRecord};
use crate::files::lock::{BRIEF, FileLock, TIMEOUT};
use cni::error::Result;

/// Set if this call, or the call that runs it in the same process, has the turn. The value in it is
/// `None` if no call can have the turn, because there is no directory for locks.
#[derive(Clone, Debug, Default)]
pub struct AttachmentTurn(Arc<OnceLock<Option<FileLock>>>);

impl AttachmentTurn {
    /// The turn of an attachment without a request of the runtime; `None` if it cannot be had. An
    /// error with code 11 if another call has it for long.
    pub fn take(owner: AttachmentId<'_>) -> Result<Option<AttachmentTurn>> {
        AttachmentTurn::take_within(owner, BRIEF)
    }

    /// As [`AttachmentTurn::take`], without waiting: the call that has the turn may wait for a lock
    /// that the caller has, such as that of leases.
    pub fn take_at_once(owner: AttachmentId<'_>) -> Result<Option<AttachmentTurn>> {
        AttachmentTurn::take_within(owner, Duration::ZERO)
    }

    fn take_within(owner: AttachmentId<'_>, limit: Duration) -> Result<Option<AttachmentTurn>> {
        let lock = AttachmentRecord::lock_attachment(owner, limit)?;
        Ok(lock.map(|lock| AttachmentTurn(Arc::new(OnceLock::from(Some(lock))))))
    }

    /// Whether this call or its caller in the same process has the turn.
    pub(super) fn is_taken(&self) -> bool {
        self.0.get().is_some()
    }

    /// Waits for the turn.
    pub(super) fn take_for_add(&self, owner: AttachmentId<'_>) -> Result<()> {
        let lock = AttachmentRecord::lock_attachment(owner, TIMEOUT)?;
        self.0.get_or_init(|| lock);
        Ok(())
    }

    /// As [`AttachmentTurn::take_for_add`], but a deletion continues without the turn instead of
    /// waiting for long.
    pub(super) fn take_for_del(&self, owner: AttachmentId<'_>) {
        self.0.get_or_init(|| {
            AttachmentRecord::lock_attachment(owner, BRIEF).unwrap_or_else(|error| {
                warn!("DEL continues without the lock of the attachment: {error}");
                None
            })
        });
    }
}
