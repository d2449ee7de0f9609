//! One run of a plugin: start, serve the pipes, reap.

use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::statvfs::{FsFlags, statvfs};

use super::pump::PipePump;
use crate::error::{Result, io_text};
use crate::wire::{PluginFailure, decode_plugin_error};

/// How long ETXTBSY is retried: an installer that copies in place holds the file open for writing.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A call of a plugin: the executable, its environment and its request.
#[derive(Clone, Debug)]
pub struct PluginCommand<'a> {
    /// The executable, which gets no arguments.
    pub path: &'a Path,
    /// Environment variables in addition to those of this process, or in place of them.
    pub env: Vec<(&'a str, String)>,
    /// The request. A plugin may exit without reading it.
    pub stdin: &'a [u8],
    /// The timeout, after which the plugin is killed (`SIGKILL`). `None`: no timeout.
    pub deadline: Option<Duration>,
}

/// Runs a plugin until it has exited and no process holds its stdout and stderr open. Returns its
/// stdout; its stderr is copied to that of this process as it arrives.
///
/// The error is the plugin's error object, or is made from its stderr and exit status:
/// `netplugin failed with no error message: signal: killed`.
///
/// ```
/// # use cnibox_cni::exec::{PluginCommand, execute_plugin};
/// let env = vec![("CNI_COMMAND", "VERSION".to_owned())];
/// let call = PluginCommand { path: "/opt/cni/bin/none".as_ref(), env, stdin: b"{}", deadline: None };
/// let error = execute_plugin(&call).unwrap_err();
/// assert!(error.message().ends_with("no such file or directory"), "{error}");
/// ```
pub fn execute_plugin(call: &PluginCommand<'_>) -> Result<Vec<u8>> {
    execute_with_stderr(call, &mut io::stderr())
}

/// As [`execute_plugin`], with another destination for the plugin's stderr.
pub(super) fn execute_with_stderr(
    call: &PluginCommand<'_>,
    stderr: &mut dyn Write,
) -> Result<Vec<u8>> {
    let until = call.deadline.and_then(|limit| Instant::now().checked_add(limit));
    let child = start_process(call, until).map_err(|cause| {
        let exit = format!("fork/exec {}: {}", call.path.display(), io_text(&cause));
        decode_plugin_error(&PluginFailure { stdout: b"", stderr: b"", exit: &exit })
            .with_details(execution_remedy(call.path, &cause))
    })?;
    let EndedProcess { status, stdout, stderr } = finish_process(child, call.stdin, until, stderr);
    let exit = match status {
        Ok(status) if status.success() => return Ok(stdout),
        Ok(status) => exit_text(status),
        Err(cause) => io_text(&cause),
    };
    Err(decode_plugin_error(&PluginFailure { stdout: &stdout, stderr: &stderr, exit: &exit }))
}

/// What a process left.
#[derive(Debug)]
pub struct EndedProcess {
    /// Its exit, or why the pipes could not be served.
    pub status: io::Result<ExitStatus>,
    /// Its stdout.
    pub stdout: Vec<u8>,
    /// The beginning of its stderr.
    pub stderr: Vec<u8>,
}

/// Serves the three pipes of a process until it has exited and no process holds its stdout and
/// stderr open. Its stderr is copied to `forward` as it arrives. A process that has not ended at
/// `until` is killed.
#[doc(hidden)]
pub fn finish_process(
    mut child: Child,
    stdin: &[u8],
    until: Option<Instant>,
    forward: &mut dyn Write,
) -> EndedProcess {
    let mut pump = PipePump::new(&mut child, stdin);
    let status = match pump.serve_pipes(until, forward) {
        Ok(true) => wait_for_exit(&mut child, until),
        Ok(false) => kill_and_wait(&mut child),
        Err(cause) => kill_and_wait(&mut child).and(Err(cause)),
    };
    let (stdout, stderr) = pump.into_output();
    EndedProcess { status, stdout, stderr }
}

/// The remedy for a file that could not be executed.
fn execution_remedy(path: &Path, cause: &io::Error) -> String {
    let is_noexec = statvfs(path).is_ok_and(|fs| fs.flags().contains(FsFlags::ST_NOEXEC));
    let path = path.display();
    match cause.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EACCES) if is_noexec => {
            format!(
                "its file system is mounted noexec: mount -o remount,exec $(stat -Lc %m {path})"
            )
        }
        Some(Errno::EACCES) => format!("make it executable: chmod 755 {path}"),
        Some(Errno::ENOEXEC) => {
            format!("{path} is not a program for this machine: install the plugin again")
        }
        _ => String::new(),
    }
}

/// Starts the plugin; retries while a process has its file open for writing.
fn start_process(call: &PluginCommand<'_>, until: Option<Instant>) -> io::Result<Child> {
    let mut command = Command::new(call.path);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.envs(call.env.iter().map(|(key, value)| (key, value)));
    let started = Instant::now();
    let mut pause = Duration::from_millis(5);
    loop {
        let busy = match command.spawn() {
            Err(cause) if cause.raw_os_error() == Some(Errno::ETXTBSY as i32) => cause,
            other => return other,
        };
        let expired = until.is_some_and(|until| Instant::now() >= until);
        if expired || started.elapsed() >= BUSY_TIMEOUT {
            return Err(busy);
        }
        thread::sleep(pause);
        pause = LONGEST_PAUSE.min(pause * 2);
    }
}

/// Waits until a plugin that has closed its pipes exits.
fn wait_for_exit(child: &mut Child, until: Option<Instant>) -> io::Result<ExitStatus> {
    let Some(until) = until else { return child.wait() };
    let mut pause = Duration::from_micros(50);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= until {
            return kill_and_wait(child);
        }
        thread::sleep(pause);
        pause = Duration::from_millis(20).min(pause * 2);
    }
}

fn kill_and_wait(child: &mut Child) -> io::Result<ExitStatus> {
    child.kill()?;
    child.wait()
}

/// The exit status in Go's words; runtimes match on `exit status 1` and `signal: killed`.
#[doc(hidden)]
pub fn exit_text(status: ExitStatus) -> String {
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
