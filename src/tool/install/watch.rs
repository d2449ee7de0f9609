//! `cnibox install --watch`: for nodes where no init container comes again. Waits for the kernel
//! to tell of a change in the folder and repairs what is no longer as installed.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::files::{During, create_folder};
use super::report::Report;
use super::{Job, STATE};
use crate::error::Result;
use crate::log;
use crate::tool::pause::{Signals, Woken};

/// A package manager that is at work is left to finish.
const SETTLE: Duration = Duration::from_millis(200);
/// A repair that failed is tried again, also when nothing else happens.
const RETRY: Duration = Duration::from_secs(30);

/// Installs, then repairs until SIGTERM or SIGINT. What goes wrong is reported and tried again,
/// but for the first time, which fails the call.
pub(super) fn run(job: &Job<'_>) -> Result<()> {
    // Blocked from here on: as process 1 of a container nothing else would end it.
    let signals = Signals::block()?;
    create_folder(&job.options.folder)?;
    let mut watch = Watch::start(job)?;
    job.run()?.print()?;
    let mut failed = false;
    loop {
        let woken = watch.wait(&signals, failed.then_some(RETRY))?;
        if woken == Woken::End || watch.settle(&signals)? == Woken::End {
            return Ok(());
        }
        let repaired = repair(job, &mut watch);
        failed = repaired.is_err();
        if let Err(error) = repaired {
            log::warn(error);
        }
    }
}

fn repair(job: &Job<'_>, watch: &mut Watch) -> Result<()> {
    if watch.lost {
        create_folder(&job.options.folder)?;
        *watch = Watch::start(job)?;
    }
    let report: Report = job.run()?;
    if report.changed() { report.print() } else { Ok(()) }
}

struct Watch {
    inotify: Inotify,
    /// The folder itself went away.
    lost: bool,
}

impl Watch {
    fn start(job: &Job<'_>) -> Result<Watch> {
        let flags = InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK;
        let folder = &job.options.folder;
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
            create_folder(&job.options.conf_dir)?;
            let dir = &job.options.conf_dir;
            inotify.add_watch(dir, events).during("watch", dir)?;
        }
        Ok(Watch { inotify, lost: false })
    }

    /// Sleeps until something happens that is not our own folder's.
    fn wait(&mut self, signals: &Signals, limit: Option<Duration>) -> Result<Woken> {
        loop {
            match signals.wait(&[self.inotify.as_fd()], limit)? {
                Some(Woken::Change) if !self.drain()? => {}
                Some(woken) => return Ok(woken),
                None => return Ok(Woken::Change),
            }
        }
    }

    /// Lets the time of [`SETTLE`] pass without an event.
    fn settle(&mut self, signals: &Signals) -> Result<Woken> {
        loop {
            match signals.wait(&[self.inotify.as_fd()], Some(SETTLE))? {
                Some(Woken::Change) => drop(self.drain()?),
                Some(Woken::End) => return Ok(Woken::End),
                None => return Ok(Woken::Change),
            }
        }
    }

    /// Reads what happened; whether it is any of our business.
    fn drain(&mut self) -> Result<bool> {
        let mut relevant = false;
        loop {
            let events = match self.inotify.read_events() {
                Ok(events) => events,
                Err(Errno::EAGAIN) => return Ok(relevant),
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(errno).during("read changes of", Path::new("the folder")),
            };
            let gone = AddWatchFlags::IN_DELETE_SELF
                | AddWatchFlags::IN_MOVE_SELF
                | AddWatchFlags::IN_IGNORED;
            self.lost |= events.iter().any(|event| event.mask.intersects(gone));
            let own =
                |name: &std::ffi::OsString| name.as_encoded_bytes().starts_with(STATE.as_bytes());
            relevant |= events.iter().any(|event| !event.name.as_ref().is_some_and(own));
        }
    }
}
