//! A container runtime in fifty lines: a network namespace, ADD, a command in the namespace, DEL.
//!
//! ```text
//! runtime CONFLIST COMMAND [ARGUMENT...]
//! runtime /etc/cni/net.d/10-pods.conflist ip address show eth0
//! ```
//!
//! `CNI_PATH` lists the directories of plugins, default /opt/cni/bin. Prints the result of ADD,
//! followed by the output of the command. Exit status: that of the command, or 1 with the reason on
//! stderr.

use std::env;
use std::fs::File;
use std::io::{Write, stderr, stdout};
use std::os::fd::AsRawFd;
use std::process::{Command, ExitCode, ExitStatus, id};
use std::thread::{scope, spawn};

use cnibox_cni::runtime::{AttachmentParams, NetworkList, OnAddError, Runtime};
use nix::sched::{CloneFlags, setns, unshare};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> ExitCode {
    run(&env::args().skip(1).collect::<Vec<_>>()).unwrap_or_else(|error| {
        let _ignored = writeln!(stderr(), "runtime: {error}");
        ExitCode::FAILURE
    })
}

fn run(args: &[String]) -> Result<ExitCode> {
    let [conflist, command @ ..] = args else { return Err(USAGE.into()) };
    let [program, arguments @ ..] = command else { return Err(USAGE.into()) };
    let network = NetworkList::from_file(conflist.as_ref())?;
    let plugins = env::var_os("CNI_PATH").unwrap_or("/opt/cni/bin".into());
    let runtime = Runtime {
        on_add_error: OnAddError::Undo,
        ..Runtime::new(env::split_paths(&plugins).collect())
    };

    // The open file keeps the namespace alive; /proc/<pid>/fd is its only path.
    let netns = fresh_namespace()?;
    let path = format!("/proc/{}/fd/{}", id(), netns.as_raw_fd());
    let attachment = AttachmentParams::new(&format!("example-{}", id()), &path, "eth0");
    if let Some(result) = runtime.add(&network, &attachment)? {
        writeln!(stdout(), "{:#}", serde_json::to_value(result.to_json())?)?;
    }
    let ended = inside(&netns, Command::new(program).args(arguments));
    // DEL also if the command failed.
    runtime.del(&network, &attachment)?;
    let code = ended?.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

const USAGE: &str = "usage: runtime CONFLIST COMMAND [ARGUMENT...]";

/// Creates a network namespace on a temporary thread, so that the process stays in its own.
fn fresh_namespace() -> Result<File> {
    let thread = spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        Ok(File::open("/proc/thread-self/ns/net")?)
    });
    thread.join().map_err(|_| "the thread of the namespace")?
}

/// Runs a command in the namespace and waits for it.
fn inside(netns: &File, command: &mut Command) -> Result<ExitStatus> {
    let run = || {
        setns(netns, CloneFlags::CLONE_NEWNET)?;
        Ok(command.status()?)
    };
    scope(|scope| scope.spawn(run).join().map_err(|_| "the thread of the command")?)
}
