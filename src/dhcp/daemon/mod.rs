//! `dhcp daemon`: maintains the leases of all containers of the node.
//!
//! One thread with a task per lease; a short-lived thread enters a namespace to open a socket
//! there. Leases are on disk before the plugin gets a reply, so the daemon can be killed at any
//! time, and the next daemon resumes them. `docs/decisions/0008-dhcp-daemon.md`.
//!
//! | file | |
//! | --- | --- |
//! | `options.rs` | the command line |
//! | `serve.rs` | the socket, and the connections of plugins |
//! | `registry.rs`, `requests.rs` | all leases, and the requests of plugins |
//! | `task.rs` | one lease |
//! | `view.rs`, `occupants.rs` | its namespace: whether it is reached, and whether processes are in it |
//! | `transport.rs`, `sockets.rs` | the messages of a lease, and its sockets |

mod occupants;
mod options;
mod registry;
mod requests;
mod serve;
mod sockets;
mod task;
mod transport;
mod view;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;

use nix::libc;
use nix::unistd::{dup2_stdout, geteuid, setsid};
use tokio::net::UnixListener;
use tokio::runtime;
use tokio::task::LocalSet;

use self::options::DaemonOptions;
use self::registry::LeaseRegistry;
use super::record::DhcpRecordStore;
use crate::confine::{self, AccessFs, CapabilitySet, Confinement};
use crate::daemon::{block_signals, raise_file_limit};
use crate::options::{ParsedCommandLine, version_text};
use crate::stderr;
use cni::error::{Error, Result, errno_text, io_text};
use cni::files::atomic::{AtomicWriter, Durability};

/// The line that a daemon started on demand prints when plugins can connect.
pub const READY: &str = "ready";

/// Runs the daemon with the arguments after `daemon`.
pub fn main(args: Vec<String>) -> ExitCode {
    let read = options::parse_arguments(args).and_then(|asked| match asked {
        ParsedCommandLine::Help => Ok(Err(options::help_text())),
        ParsedCommandLine::Version => Ok(Err(version_text())),
        ParsedCommandLine::Work(line) => DaemonOptions::from_command_line(&line).map(Ok),
    });
    let options = match read {
        Ok(Ok(options)) => options,
        Ok(Err(text)) => {
            stderr::write_line(text);
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            stderr::write_line(format_args!("{error}; see dhcp daemon --help"));
            return ExitCode::from(2);
        }
    };
    let on_demand = options.on_demand;
    let Err(error) = run_daemon(options) else { return ExitCode::SUCCESS };
    stderr::write_line(&error);
    if on_demand {
        report_to_plugin(&error.to_string());
    }
    ExitCode::FAILURE
}

fn run_daemon(options: DaemonOptions) -> Result<()> {
    // A lease needs up to three descriptors during an exchange.
    raise_file_limit();
    if options.on_demand {
        leave_session();
    }
    // Before any thread is started, so that every thread inherits the mask.
    let signals = block_signals()?;

    let _pidfile = options.pidfile.as_deref().map(write_pidfile).transpose()?;
    let path = options.socket.clone();
    let records = DhcpRecordStore::open_or_create(&path)?;
    let _lock = records.try_lock()?.ok_or_else(|| {
        Error::internal(format!("another daemon keeps the leases of {}", path.display()))
    })?;
    let (listener, created) = serve::open_listener(&path)?;
    let _removed = created.clone().map(RemovedOnDrop);
    let null = File::options().write(true).open("/dev/null");
    let recorded = LeaseRegistry::open_recorded_leases(&options, &records);

    let removed = [created.as_deref(), options.pidfile.as_deref()];
    confine::drop_privileges(&confinement(records.directory_path(), &removed))?;
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Error::io("start the executor", &e))?;
    let served = LocalSet::new().block_on(&runtime, async {
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        let on_demand = options.on_demand;
        let registry = Rc::new(LeaseRegistry::new(options, records));
        let open = recorded.iter().filter(|(_, sandbox)| sandbox.is_open()).count();
        let hidden = match recorded.len() - open {
            0 => String::new(),
            hidden => format!(", {hidden} in doubt"),
        };
        stderr::write_line(format_args!("ready, with {open} leases resumed{hidden}"));
        registry.resume_leases(recorded);
        if on_demand {
            report_ready(null);
        }
        serve::serve_until_signal(listener, signals, registry).await
    });
    served.map_err(|e| Error::io("serve", &e))
}

/// What the daemon keeps: work in containers' namespaces, and the directory of leases.
fn confinement<'a>(leases: &'a Path, removed: &'a [Option<&'a Path>]) -> Confinement<'a> {
    Confinement {
        capabilities: CapabilitySet::SYS_ADMIN // entering namespaces
            .union(CapabilitySet::NET_ADMIN) // addresses, routes, links
            .union(CapabilitySet::NET_RAW) // frames, and sockets of one interface
            .union(CapabilitySet::NET_BIND_SERVICE), // ports 68 and 546
        families: &[libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET],
        enters_namespaces: true,
        directory: leases,
        changes: AccessFs::WriteFile | AccessFs::MakeReg | AccessFs::RemoveFile,
        removed,
    }
}

/// Leaves the plugin's session and working directory, whose file system may have to be unmounted.
fn leave_session() {
    if let Err(errno) = setsid() {
        debug!("could not begin a session: {}", errno_text(errno));
    }
    if let Err(error) = std::env::set_current_dir("/") {
        debug!("could not change to the directory /: {}", io_text(&error));
    }
}

/// Reports to the plugin that waits, and closes the pipe to it.
fn report_ready(null: io::Result<File>) {
    report_to_plugin(READY);
    if let Err(error) = null.and_then(|null| dup2_stdout(null).map_err(io::Error::from)) {
        warn!("could not {}", Error::io("close standard output", &error));
    }
}

fn report_to_plugin(text: &str) {
    // This fails if the plugin has stopped waiting.
    drop(writeln!(io::stdout(), "{text}"));
}

/// Creates the pidfile, or replaces a regular file of this user. Symbolic links are not followed.
fn write_pidfile(path: &Path) -> Result<RemovedOnDrop> {
    let failed = |why: String| {
        Error::internal(format!("Error writing pidfile \"{}\": {why}", path.display()))
    };
    if !path.is_absolute() {
        return Err(failed("path not absolute".to_owned()));
    }
    if let Some(dir) = path.parent() {
        let created = fs::DirBuilder::new().recursive(true).mode(0o755).create(dir);
        created.map_err(|e| failed(io_text(&e)))?;
    }
    let is_own = |meta: fs::Metadata| meta.is_file() && meta.uid() == geteuid().as_raw();
    if fs::symlink_metadata(path).is_ok_and(|meta| !is_own(meta)) {
        return Err(failed("the path is not a regular file of this user".to_owned()));
    }
    let writer = AtomicWriter::with_unique_name(path, Durability::Volatile);
    let written = writer.replace_file(path, std::process::id().to_string().as_bytes(), 0o644);
    written.map_err(|e| failed(e.to_string()))?;
    Ok(RemovedOnDrop(path.to_owned()))
}

struct RemovedOnDrop(PathBuf);

impl Drop for RemovedOnDrop {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            debug!("could not remove {}: {error}", self.0.display());
        }
    }
}
