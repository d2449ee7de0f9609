//! The turn of an attachment: its lock while a call changes it.
//!
//! Each ADD and DEL has the turn from before its first change until its result is printed, with the
//! delegates that it calls; `cnibox gc` has it while it ends an attachment, reclaim while it
//! removes what an ended one left (`docs/decisions/0027-turns.md`). A call that has the turn never
//! calls a program that would wait for it.

use std::sync::{Arc, OnceLock};

use crate::attachment::{AttachmentId, AttachmentRecord};
use crate::files::lock::{BRIEF, FileLock, TIMEOUT};
use cni::error::Result;

/// Set if this call, or the call that runs it in the same process, has the turn. The value in it is
/// `None` if no call can have the turn, because there is no directory for locks.
#[derive(Clone, Debug, Default)]
pub struct AttachmentTurn(Arc<OnceLock<Option<FileLock>>>);

impl AttachmentTurn {
    /// The turn of an attachment without a request of the runtime; `None` if it cannot be had.
    pub fn take(owner: AttachmentId<'_>) -> Result<Option<AttachmentTurn>> {
        let lock = AttachmentRecord::lock_attachment(owner, BRIEF)?;
        Ok(lock.map(|lock| AttachmentTurn(Arc::new(OnceLock::from(Some(lock))))))
    }

    /// The turn of an attachment, unless another call has it. Who has another lock, such as that of
    /// leases, waits for no turn: the call that has the turn may wait for that lock.
    pub fn take_if_free(owner: AttachmentId<'_>) -> Option<AttachmentTurn> {
        let lock = AttachmentRecord::try_lock_instance(&owner.instance_id());
        let lock = lock.map_or_else(
            |error| {
                debug!("{error}");
                Some(None)
            },
            |lock| lock.map(Some),
        )?;
        Some(AttachmentTurn(Arc::new(OnceLock::from(lock))))
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
