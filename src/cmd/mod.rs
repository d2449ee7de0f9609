//! Programs other than plugins, such as `iptables-restore`. Executed directly, never by a shell.
//!
//! Used only where the kernel has no suitable interface. Plugins are run by
//! [`invoke`](crate::invoke), with the same function for their pipes.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::netns;
use crate::trace;
use cni::error::{Error, Result, io_text};
use cni::exec::{EndedProcess, exit_text, finish_process};

/// The arguments of this process, each with a NUL at its end; proc(5).
const OWN_ARGUMENTS: &str = "/proc/self/cmdline";

/// Directories that are searched after those in `PATH`: the `PATH` of runtimes often lacks them.
const SYSTEM_PATH: &str = "/usr/sbin:/sbin";

/// Finds the executable `name` in `PATH`, `/usr/sbin` and `/sbin`. Starts nothing.
pub fn find_program(name: &str) -> Option<PathBuf> {
    find_in_path(name, &std::env::var_os("PATH").unwrap_or_default())
}

fn find_in_path(name: &str, path: &OsStr) -> Option<PathBuf> {
    let system = OsString::from(SYSTEM_PATH);
    let dirs = std::env::split_paths(path).chain(std::env::split_paths(&system));
    let files = dirs.filter(|dir| dir.is_absolute()).map(|dir| dir.join(name));
    let is_executable = |file: &PathBuf| {
        fs::metadata(file).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    files.into_iter().find(is_executable)
}

/// The exit status and the output of a program.
#[derive(Debug)]
pub struct ProgramOutput {
    /// The exit status; `None` if a signal killed the program.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    /// The command and its exit status, for messages: `run iptables-save -t nat: exit status 4`.
    summary: String,
}

impl ProgramOutput {
    /// The standard output, if the exit status is 0.
    pub fn require_success(self) -> Result<String> {
        if self.code == Some(0) { Ok(self.stdout) } else { Err(self.failure_error()) }
    }

    /// The error, with the standard error of the program.
    pub fn failure_error(&self) -> Error {
        let stderr = self.stderr.trim();
        let separator = if stderr.is_empty() { "" } else { ": " };
        Error::internal(format!("{}{separator}{stderr}", self.summary))
    }
}

/// Runs a program with `stdin` as its standard input until it exits. Fails only if the program
/// cannot be started or its pipes cannot be served; the exit status is [`ProgramOutput::code`].
pub fn run_program(program: &Path, args: &[&str], stdin: &str) -> Result<ProgramOutput> {
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let line = [&[name.as_str()], args].concat().join(" ");
    let failed =
        |e: io::Error| Error::internal(format!("run {}: {}", program.display(), io_text(&e)));
    let span = trace::begin_span("process");
    span.add_text("process.command", || line.as_str());
    netns::require_home_netns()?;
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().map_err(failed)?;
    let EndedProcess { status, stdout, stderr } =
        finish_process(child, stdin.as_bytes(), None, &mut io::sink());
    let status = status.map_err(failed)?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let summary = format!("run {line}: {}", exit_text(status));
    Ok(ProgramOutput { code: status.code(), stdout: text(stdout), stderr: text(stderr), summary })
}

/// Starts a daemon: this executable under the name of an applet, with an empty environment.
/// It inherits only the working directory and the namespaces of this process. Returns the first
/// line that it prints; the daemon must then close its stdout. The line is empty if the daemon
/// exits.
pub fn start_applet_daemon(applet: &str, args: &[String]) -> Result<String> {
    let failed = |e: io::Error| Error::internal(format!("start {applet}: {}", io_text(&e)));
    netns::require_home_netns()?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0(applet).args(args).env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(failed)?;
    let mut line = String::new();
    if let Some(pipe) = child.stdout.take() {
        BufReader::new(pipe.take(4096)).read_line(&mut line).map_err(failed)?;
    }
    Ok(line)
}

/// Executes `program` in place of this process, with the arguments of this process. Returns only
/// the error.
pub fn replace_process(program: &Path) -> Error {
    // `std::env::args` is empty with musl, because `main` is not the standard library's.
    let arguments = match fs::read(OWN_ARGUMENTS) {
        Ok(bytes) => bytes,
        Err(cause) => return Error::internal(format!("read {OWN_ARGUMENTS}: {}", io_text(&cause))),
    };
    let mut arguments = arguments
        .strip_suffix(b"\0")
        .unwrap_or_default()
        .split(|byte| *byte == 0)
        .map(OsStr::from_bytes);
    let mut command = Command::new(program);
    command.arg0(arguments.next().unwrap_or_default()).args(arguments);
    let cause = command.exec();
    Error::internal(format!("execute {}: {}", program.display(), io_text(&cause)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_directories_are_searched_after_path() {
        assert_eq!(find_in_path("sh", OsStr::new("/nowhere:/bin")), Some("/bin/sh".into()));
        let relative = find_in_path("sh", OsStr::new("bin:."));
        assert_eq!(relative, None, "relative directories are not searched");
        assert_eq!(find_in_path("passwd", OsStr::new("/etc")), None, "not executable");
    }

    #[test]
    fn input_larger_than_a_pipe_is_echoed() {
        let text = "x".repeat(1 << 20);
        let output = run_program(Path::new("/bin/cat"), &[], &text).unwrap();
        assert_eq!(output.require_success().unwrap().len(), text.len());
    }

    #[test]
    fn a_program_need_not_read_its_input() {
        let text = "x".repeat(1 << 20);
        assert_eq!(run_program(Path::new("/bin/true"), &[], &text).unwrap().code, Some(0));
    }

    #[test]
    fn failures_name_command_and_status() {
        let output = run_program(Path::new("/bin/sh"), &["-c", "echo no >&2; exit 3"], "").unwrap();
        assert_eq!(output.code, Some(3));
        let error = output.require_success().unwrap_err();
        assert_eq!(error.message(), "run sh -c echo no >&2; exit 3: exit status 3: no");
        let error = run_program(Path::new("/nowhere/x"), &[], "").unwrap_err();
        assert_eq!(error.message(), "run /nowhere/x: no such file or directory");
        let killed = run_program(Path::new("/bin/sh"), &["-c", "kill -9 $$"], "").unwrap();
        assert!(killed.failure_error().message().ends_with("signal: killed"));
    }
}
