//! `dhcp daemon`: keeps the leases of all containers of the node.
//!
//! One thread with a task for each lease; a namespace is entered by a thread that lives as long as
//! it takes to open a socket there. Leases are on disk before a plugin hears of them, so the
//! daemon can end in any way, and the next daemon resumes them. `docs/decisions/0008-dhcp-daemon.md`.
//!
//! | file | |
//! | --- | --- |
//! | `options.rs` | the command line |
//! | `listen.rs`, `serve.rs` | the socket, and the plugins that connect to it |
//! | `confine.rs` | the privileges that the daemon gives up |
//! | `registry.rs`, `requests.rs` | all leases, and what plugins ask about them |
//! | `task.rs` | one lease |
//! | `transport.rs`, `sockets.rs` | the messages of a lease, and its sockets |

mod confine;
mod listen;
mod options;
mod registry;
mod requests;
mod serve;
mod sockets;
mod task;
mod transport;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::geteuid;
use tokio::runtime;
use tokio::task::LocalSet;

use self::options::Options;
use self::registry::Registry;
use super::record::Records;
use crate::error::{Error, Result, io_text};
use crate::files::atomic::{Durability, Writer};
use crate::log;
use crate::options::{Asked, version};

/// The line that a daemon started on demand prints when plugins can connect.
pub const READY: &str = "ready";

/// The daemon with the arguments behind its name.
pub fn main(args: Vec<String>) -> ExitCode {
    let options = match options::parse(args) {
        Ok(Asked::Help) => {
            log::line(options::help());
            return ExitCode::SUCCESS;
        }
        Ok(Asked::Version) => {
            log::line(version());
            return ExitCode::SUCCESS;
        }
        Ok(Asked::Work(line)) => Options::read(&line),
        Err(wrong) => Err(wrong),
    };
    let options = match options {
        Ok(options) => options,
        Err(wrong) => {
            log::line(format_args!("{wrong}; see dhcp daemon --help"));
            return ExitCode::from(2);
        }
    };
    let on_demand = options.on_demand;
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::line(&error);
            if on_demand {
                tell_plugin(&error.to_string());
            }
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> Result<()> {
    let system = |what: &'static str| move |e: nix::Error| Error::io(what, &e.into());
    raise_file_limit();
    if options.on_demand {
        leave_session();
    }
    // Before any thread is started, so that every thread inherits the mask.
    let mut set = SigSet::empty();
    set.add(Signal::SIGTERM);
    set.add(Signal::SIGINT);
    set.thread_block().map_err(system("block signals"))?;
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    let signals = SignalFd::with_flags(&set, flags).map_err(system("open a signal descriptor"))?;

    let _pidfile = options.pidfile.as_deref().map(write_pidfile).transpose()?;
    let records = Records::create(&options.socket())?;
    let claimed = records.claim()?;
    let _lock = claimed.ok_or_else(|| {
        Error::internal(format!(
            "another daemon keeps the leases of {}",
            options.socket().display()
        ))
    })?;
    let socket = listen::listen(&options.socket())?;
    let _removed = socket.own.map(Removed);

    confine::confine()?;
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Error::io("start the executor", &e))?;
    let local = LocalSet::new();
    let on_demand = options.on_demand;
    let served = local.block_on(&runtime, async {
        socket.listener.set_nonblocking(true)?;
        let listener = tokio::net::UnixListener::from_std(socket.listener)?;
        let registry = Rc::new(Registry::new(options, records));
        let resumed = registry.resume();
        log::line(format_args!("ready, with {resumed} leases of before"));
        if on_demand {
            detach();
        }
        serve::until_signal(listener, signals, registry).await
    });
    served.map_err(|e| Error::io("serve", &e))
}

/// Leaves the plugin's session and working directory, whose file system may have to be unmounted.
fn leave_session() {
    if let Err(errno) = nix::unistd::setsid() {
        log::debug(errno);
    }
    if let Err(error) = std::env::set_current_dir("/") {
        log::debug(error);
    }
}

/// Reports to the plugin that waits, and closes the pipe to it.
fn detach() {
    tell_plugin(READY);
    let closed = File::options()
        .write(true)
        .open("/dev/null")
        .and_then(|null| nix::unistd::dup2_stdout(null).map_err(io::Error::from));
    if let Err(error) = closed {
        log::warn(Error::io("close standard output", &error));
    }
}

fn tell_plugin(text: &str) {
    // A plugin that has stopped waiting finds out when it connects.
    drop(writeln!(io::stdout(), "{text}"));
}

/// A lease needs up to three descriptors during an exchange.
fn raise_file_limit() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && let Err(errno) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        log::debug(errno);
    }
}

/// Replaces a file of ours at `path`; nothing is written through a symbolic link.
fn write_pidfile(path: &Path) -> Result<Removed> {
    let failed = |why: String| {
        Error::internal(format!("Error writing pidfile \"{}\": {why}", path.display()))
    };
    if !path.is_absolute() {
        return Err(failed("path not absolute".to_owned()));
    }
    if let Some(dir) = path.parent() {
        let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(dir);
        made.map_err(|e| failed(io_text(&e)))?;
    }
    let is_ours = |meta: fs::Metadata| meta.is_file() && meta.uid() == geteuid().as_raw();
    if fs::symlink_metadata(path).is_ok_and(|meta| !is_ours(meta)) {
        return Err(failed("something else is there".to_owned()));
    }
    let writer = Writer::unlocked(path, Durability::Volatile);
    let written = writer.replace(path, std::process::id().to_string().as_bytes(), 0o644);
    written.map_err(|e| failed(e.to_string()))?;
    Ok(Removed(path.to_owned()))
}

/// A file that is removed at the end.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            log::debug(error);
        }
    }
}
