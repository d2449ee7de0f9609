//! `cnibox repair --watch --install`: repairs the installation when inotify(7) reports a change of the folder.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::files::{During, create_folder};
use super::renew::Own;
use super::{Job, STATE, report};
use crate::error::Result;
use crate::log;
use crate::tool::pause::{Signals, Woken};

/// The repair starts after this time without a change: a package manager is left to finish.
const SETTLE: Duration = Duration::from_millis(200);
/// The pause before a failed repair is retried.
const RETRY: Duration = Duration::from_secs(30);

/// Installs, then repairs until SIGTERM or SIGINT. Only the first installation can fail the call;
/// later errors are logged and retried.
pub(super) fn run(job: &Job<'_>) -> Result<()> {
    // Process 1 of a container ignores signals that it does not wait for.
    let signals = Signals::block()?;
    create_folder(&job.options.folder)?;
    let mut watch = Watch::start(job)?;
    report(job.options, &job.run()?)?;
    let own = Own::find()?;
    let mut failed = false;
    while watch.wait(&signals, failed.then_some(RETRY))? == Woken::Change {
        own.renew();
        let repaired = repair(job, &mut watch);
        failed = repaired.is_err();
        if let Err(error) = repaired {
            log::warn(error);
        }
    }
    Ok(())
}

fn repair(job: &Job<'_>, watch: &mut Watch) -> Result<()> {
    if watch.is_lost {
        create_folder(&job.options.folder)?;
        *watch = Watch::start(job)?;
    }
    let steps = job.run()?;
    if steps.iter().any(|step| step.action.changes()) {
        report(job.options, &steps)?;
    }
    Ok(())
}

struct Watch {
    inotify: Inotify,
    /// The folder itself was deleted or renamed.
    is_lost: bool,
}

impl Watch {
    fn start(job: &Job<'_>) -> Result<Watch> {
        let (folder, conf_dir) = (&job.options.folder, &job.options.conf_dir);
        let flags = InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK;
        let inotify = Inotify::init(flags).during("watch", folder)?;
        let events = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVE
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF;
        inotify.add_watch(folder, events).during("watch", folder)?;
        if job.options.conflist.is_some() {
            create_folder(conf_dir)?;
            inotify.add_watch(conf_dir, events).during("watch", conf_dir)?;
        }
        Ok(Watch { inotify, is_lost: false })
    }

    /// Waits for a change, at most `limit`, and then until [`SETTLE`] passes without an event.
    fn wait(&mut self, signals: &Signals, limit: Option<Duration>) -> Result<Woken> {
        let mut limit = limit;
        loop {
            match signals.wait(&[self.inotify.as_fd()], limit)? {
                Some(Woken::End) => return Ok(Woken::End),
                Some(Woken::Change) if self.drain()? => limit = Some(SETTLE),
                Some(Woken::Change) => {}
                None => return Ok(Woken::Change),
            }
        }
    }

    /// Reads all events. Returns whether any of them is not about [`STATE`].
    fn drain(&mut self) -> Result<bool> {
        let gone =
            AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF | AddWatchFlags::IN_IGNORED;
        let is_own = |name: &OsString| name.as_encoded_bytes().starts_with(STATE.as_bytes());
        let mut is_relevant = false;
        loop {
            let events = match self.inotify.read_events() {
                Ok(events) => events,
                Err(Errno::EAGAIN) => return Ok(is_relevant),
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(errno).during("read changes of", Path::new("the folder")),
            };
            self.is_lost |= events.iter().any(|event| event.mask.intersects(gone));
            is_relevant |= !events.iter().all(|event| event.name.as_ref().is_some_and(is_own));
        }
    }
}
