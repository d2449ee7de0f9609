//! How the daemons of the node begin, before they drop privileges.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use cni::error::{Error, Result, errno_text};

/// Blocks SIGTERM and SIGINT in this thread and in those that it will start, and returns a
/// descriptor that receives them without waiting.
pub fn block_signals() -> Result<SignalFd> {
    let system = |what: &'static str| move |e: nix::Error| Error::io(what, &e.into());
    let mut set = SigSet::empty();
    set.add(Signal::SIGTERM);
    set.add(Signal::SIGINT);
    set.thread_block().map_err(system("block signals"))?;
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    SignalFd::with_flags(&set, flags).map_err(system("open a signal descriptor"))
}

/// Raises the limit of open files as far as this user may.
pub fn raise_file_limit() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && let Err(errno) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        debug!("could not raise the limit of open files: {}", errno_text(errno));
    }
}
