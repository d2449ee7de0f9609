//! `cnibox pause`: waits for SIGTERM or SIGINT. The main container of a DaemonSet whose init
//! container does the work.

use std::os::fd::{AsFd, BorrowedFd};
use std::process::ExitCode;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::ToolCommand;
use crate::framework::AppletTable;
use crate::options::require_no_words;
use cni::error::{Error, Result};

pub(super) const TOOL: ToolCommand = ToolCommand {
    command: "cnibox pause",
    usage: "\
pause: waits for SIGTERM or SIGINT, as the main container of a DaemonSet

Usage:
  cnibox pause
",
    options: &[],
    notes: "",
};

/// Runs `cnibox pause` with the arguments that follow it. There are no children to reap.
pub(super) fn main(args: Vec<String>, _: AppletTable) -> ExitCode {
    TOOL.run_command(
        args,
        |line| require_no_words(&line),
        |()| StopSignals::block_signals()?.wait_for_event(&[], None).map(|_| ExitCode::SUCCESS),
    )
}

/// The reason why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WakeReason {
    /// A source has input, or the wait was interrupted.
    Change,
    /// SIGTERM or SIGINT was received.
    End,
}

/// A signalfd(2) for SIGTERM and SIGINT: process 1 of a container ignores signals without a
/// handler.
#[derive(Debug)]
pub(super) struct StopSignals(SignalFd);

impl StopSignals {
    /// Blocks SIGTERM and SIGINT, so that only [`StopSignals::wait_for_event`] receives them.
    pub(super) fn block_signals() -> Result<StopSignals> {
        let mut set = SigSet::empty();
        set.add(Signal::SIGTERM);
        set.add(Signal::SIGINT);
        set.thread_block().map_err(wait_error)?;
        SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC).map(StopSignals).map_err(wait_error)
    }

    /// Waits for a signal or for input of one of `sources`; `None` after the timeout `limit`.
    pub(super) fn wait_for_event(
        &self,
        sources: &[BorrowedFd<'_>],
        limit: Option<Duration>,
    ) -> Result<Option<WakeReason>> {
        let mut fds = vec![PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        fds.extend(sources.iter().map(|source| PollFd::new(*source, PollFlags::POLLIN)));
        let timeout = limit.map_or(PollTimeout::NONE, |limit| {
            PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut fds, timeout) {
            Ok(0) => Ok(None),
            Ok(_) if fds[0].any().unwrap_or(true) => Ok(Some(WakeReason::End)),
            Ok(_) | Err(Errno::EINTR) => Ok(Some(WakeReason::Change)),
            Err(errno) => Err(wait_error(errno)),
        }
    }
}

fn wait_error(errno: Errno) -> Error {
    Error::io("wait for a signal", &errno.into())
}
