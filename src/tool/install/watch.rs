//! `cnibox repair --watch --install`: repairs the installation when inotify(7) reports a change of
//! the directory.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::files::create_directory;
use super::renew::OwnExecutable;
use super::{InstallJob, STATE, print_report};
use crate::tool::pause::{StopSignals, WakeReason};
use cni::error::Result;
use cni::files::FileOperationContext;

/// The repair starts after this time without a change: a package manager is left to finish.
const SETTLE: Duration = Duration::from_millis(200);
/// The pause before a failed repair is retried.
const RETRY: Duration = Duration::from_secs(30);

/// Installs, then repairs until SIGTERM or SIGINT. Only the first installation can fail the call;
/// later errors are logged and retried.
pub(super) fn install_and_watch(job: &InstallJob<'_>) -> Result<()> {
    // Process 1 of a container ignores signals that it does not wait for.
    let signals = StopSignals::block_signals()?;
    create_directory(&job.options.directory)?;
    let mut watch = DirectoryWatch::start_watching(job)?;
    print_report(job.options, &job.install_files()?)?;
    let own = OwnExecutable::find_current()?;
    let mut failed = false;
    while watch.wait_until_settled(&signals, failed.then_some(RETRY))? == WakeReason::Change {
        own.restart_if_replaced();
        let repaired = repair_installation(job, &mut watch);
        failed = repaired.is_err();
        if let Err(error) = repaired {
            warn!("could not repair the installation: {error}");
        }
    }
    Ok(())
}

fn repair_installation(job: &InstallJob<'_>, watch: &mut DirectoryWatch) -> Result<()> {
    if watch.is_gone {
        create_directory(&job.options.directory)?;
        *watch = DirectoryWatch::start_watching(job)?;
    }
    let steps = job.install_files()?;
    if steps.iter().any(|step| step.action.is_change()) {
        print_report(job.options, &steps)?;
    }
    Ok(())
}

struct DirectoryWatch {
    inotify: Inotify,
    /// The directory itself was deleted or renamed.
    is_gone: bool,
}

impl DirectoryWatch {
    fn start_watching(job: &InstallJob<'_>) -> Result<DirectoryWatch> {
        let (directory, conf_dir) = (&job.options.directory, &job.options.conf_dir);
        let flags = InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK;
        let inotify = Inotify::init(flags).during("watch", directory)?;
        let events = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVE
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF;
        inotify.add_watch(directory, events).during("watch", directory)?;
        if job.options.conflist.is_some() {
            create_directory(conf_dir)?;
            inotify.add_watch(conf_dir, events).during("watch", conf_dir)?;
        }
        Ok(DirectoryWatch { inotify, is_gone: false })
    }

    /// Waits for a change, at most `limit`, and then until [`SETTLE`] passes without an event.
    fn wait_until_settled(
        &mut self,
        signals: &StopSignals,
        limit: Option<Duration>,
    ) -> Result<WakeReason> {
        let mut limit = limit;
        loop {
            match signals.wait_for_event(&[self.inotify.as_fd()], limit)? {
                Some(WakeReason::End) => return Ok(WakeReason::End),
                Some(WakeReason::Change) if self.drain_events()? => limit = Some(SETTLE),
                Some(WakeReason::Change) => {}
                None => return Ok(WakeReason::Change),
            }
        }
    }

    /// Reads all events. Returns whether any of them is not about [`STATE`].
    fn drain_events(&mut self) -> Result<bool> {
        let gone =
            AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF | AddWatchFlags::IN_IGNORED;
        let mut is_relevant = false;
        loop {
            let events = match self.inotify.read_events() {
                Ok(events) => events,
                Err(Errno::EAGAIN) => return Ok(is_relevant),
                Err(Errno::EINTR) => continue,
                Err(errno) => Err(errno).during("read changes of", Path::new("the directory"))?,
            };
            self.is_gone |= events.iter().any(|event| event.mask.intersects(gone));
            is_relevant |= !events.iter().all(|event| {
                event
                    .name
                    .as_ref()
                    .is_some_and(|name| name.as_encoded_bytes().starts_with(STATE.as_bytes()))
            });
        }
    }
}
