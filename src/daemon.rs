//! What the daemons of the node share: how they begin, before they drop privileges, and descriptors
//! that they watch.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

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

/// Registers a descriptor with the executor, for input.
#[expect(deprecated, reason = "the alternative is unsafe; these types keep their descriptor")]
pub fn watch_readable<T: AsFd + AsRawFd>(descriptor: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(descriptor, Interest::READABLE)
}
