//! One run of a plugin: start, feed, collect, reap.

use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::cmd::pump::{Ended, Pump};
use crate::cni::wire::{Failure, error_of};
use crate::error::{Result, io_text};
use crate::netns;
use crate::trace::{self, TRACEPARENT};

/// How long a plugin that is being written may stay "busy". An installer that copies in place
/// holds the file open for moments.
const BUSY_LIMIT: Duration = Duration::from_secs(5);
/// The longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What to run.
#[derive(Clone, Debug)]
pub struct Exec<'a> {
    /// The executable. It gets no arguments.
    pub path: &'a Path,
    /// Environment variables to add to, or to replace, the variables of this process.
    pub env: Vec<(&'a str, String)>,
    /// The request. A plugin may end without reading it.
    pub stdin: &'a [u8],
    /// How long the plugin may take; it is killed (`SIGKILL`) then. `None`: for ever.
    pub deadline: Option<Duration>,
}

/// Runs a plugin until it has exited and no process holds its stdout and stderr open, and returns its
/// stdout. Its stderr is copied to ours as it arrives.
///
/// The error is the plugin's own error object, or what can be told from its stderr and its exit:
/// `netplugin failed with no error message: signal: killed`.
pub fn exec(call: &Exec<'_>) -> Result<Vec<u8>> {
    exec_to(call, &mut io::stderr())
}

/// As [`exec`], with another place for the plugin's stderr.
pub(super) fn exec_to(call: &Exec<'_>, stderr: &mut dyn Write) -> Result<Vec<u8>> {
    let span = trace::span("plugin");
    span.text("process.executable.path", || call.path.display().to_string());
    span.end_with(run_to(call, stderr))
}

fn run_to(call: &Exec<'_>, stderr: &mut dyn Write) -> Result<Vec<u8>> {
    netns::at_home()?;
    let until = call.deadline.and_then(|limit| Instant::now().checked_add(limit));
    let mut child = start(call, until).map_err(|cause| {
        let exit = format!("fork/exec {}: {}", call.path.display(), io_text(&cause));
        error_of(&Failure { stdout: b"", stderr: b"", exit: &exit })
            .with_details(remedy(call.path, &cause))
    })?;
    let mut pump = Pump::new(&mut child, call.stdin);
    let status = match pump.run(until, stderr) {
        Ok(Ended::Closed) => reap(&mut child, until),
        Ok(Ended::Expired) => kill(&mut child),
        Err(cause) => kill(&mut child).and(Err(cause)),
    };
    let (stdout, stderr) = pump.into_output();
    let exit = match status {
        Ok(status) if status.success() => return Ok(stdout),
        Ok(status) => exit_text(status),
        Err(cause) => io_text(&cause),
    };
    Err(error_of(&Failure { stdout: &stdout, stderr: &stderr, exit: &exit }))
}

/// What makes a file executable that could not be executed.
fn remedy(path: &Path, cause: &io::Error) -> String {
    let path = path.display();
    match cause.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EACCES) => {
            format!("make it executable: chmod 755 {path}; or mount its file system without noexec")
        }
        Some(Errno::ENOEXEC) => {
            format!("{path} is no program of this machine: install the plugin again")
        }
        _ => String::new(),
    }
}

/// Starts the plugin, again and again while its file is open for writing somewhere.
fn start(call: &Exec<'_>, until: Option<Instant>) -> io::Result<Child> {
    let mut command = Command::new(call.path);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.envs(call.env.iter().map(|(key, value)| (key, value)));
    if let Some(parent) = trace::traceparent() {
        command.env(TRACEPARENT, parent);
    }
    let started = Instant::now();
    let mut pause = Duration::from_millis(5);
    loop {
        let busy = match command.spawn() {
            Err(cause) if cause.raw_os_error() == Some(Errno::ETXTBSY as i32) => cause,
            other => return other,
        };
        let expired = until.is_some_and(|until| Instant::now() >= until);
        if expired || started.elapsed() >= BUSY_LIMIT {
            return Err(busy);
        }
        thread::sleep(pause);
        pause = LONGEST_PAUSE.min(pause * 2);
    }
}

/// Waits for the exit of a plugin that has closed its pipes.
fn reap(child: &mut Child, until: Option<Instant>) -> io::Result<ExitStatus> {
    let Some(until) = until else { return child.wait() };
    let mut pause = Duration::from_micros(50);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= until {
            return kill(child);
        }
        thread::sleep(pause);
        pause = Duration::from_millis(20).min(pause * 2);
    }
}

fn kill(child: &mut Child) -> io::Result<ExitStatus> {
    child.kill()?;
    child.wait()
}

/// The end of a process as Go words it; callers match on `exit status 1` and `signal: killed`.
fn exit_text(status: ExitStatus) -> String {
    let dumped = if status.core_dumped() { " (core dumped)" } else { "" };
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal: {}{dumped}", signal_text(signal)),
        (None, None) => status.to_string(),
    }
}

fn signal_text(signal: i32) -> String {
    let name = match signal {
        1 => "hangup",
        2 => "interrupt",
        3 => "quit",
        4 => "illegal instruction",
        5 => "trace/breakpoint trap",
        6 => "aborted",
        7 => "bus error",
        8 => "floating point exception",
        9 => "killed",
        11 => "segmentation fault",
        13 => "broken pipe",
        14 => "alarm clock",
        15 => "terminated",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}
