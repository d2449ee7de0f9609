//! Programs that are not plugins: `iptables-restore` and its kind. Started directly, never through
//! a shell.
//!
//! Nothing here is needed where the kernel can be spoken to; plugins are run by `invoke`, with the same
//! [`pump`].

pub(crate) mod pump;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use self::pump::Pump;
use crate::error::{Error, Result, io_text};
use crate::netns;
use crate::trace;

/// Folders of administrators, which runtimes often start without.
const SYSTEM: &str = "/usr/sbin:/sbin";

/// The executable `name` in `PATH`, or in `/usr/sbin` or `/sbin`. Starts nothing.
pub fn find(name: &str) -> Option<PathBuf> {
    find_in(name, &std::env::var_os("PATH").unwrap_or_default())
}

fn find_in(name: &str, path: &OsStr) -> Option<PathBuf> {
    let system = OsString::from(SYSTEM);
    let dirs = [path, &system].map(|list| std::env::split_paths(list).collect::<Vec<_>>());
    let dirs = dirs.into_iter().flatten().filter(|dir| dir.is_absolute());
    dirs.map(|dir| dir.join(name)).find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

/// The exit status of a program, and its output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Its exit status; `None` if a signal ended it.
    pub code: Option<i32>,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
    /// The program and its arguments, for messages.
    line: String,
    /// `exit status 4`, `signal 9`.
    end: String,
}

impl Output {
    /// Its standard output, if it succeeded.
    pub fn require_success(self) -> Result<String> {
        if self.code == Some(0) { Ok(self.stdout) } else { Err(self.failure()) }
    }

    /// That it failed, in its own words.
    pub fn failure(&self) -> Error {
        let said = self.stderr.trim();
        let said = if said.is_empty() { String::new() } else { format!(": {said}") };
        Error::internal(format!("run {}: {}{said}", self.line, self.end))
    }
}

/// Runs a program to its end with `stdin` as its standard input. An error is one of starting it;
/// how it ended is in the output.
pub fn run(program: &Path, args: &[&str], stdin: &str) -> Result<Output> {
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let line = [&[name.as_str()], args].concat().join(" ");
    let failed =
        |e: io::Error| Error::internal(format!("run {}: {}", program.display(), io_text(&e)));
    let span = trace::span("process");
    span.text("process.command", || line.as_str());
    netns::at_home()?;
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    let mut pump = Pump::new(&mut child, stdin.as_bytes());
    let served = pump.run(None, &mut io::sink());
    // With the pipes closed the program ends, also after an error.
    let (stdout, stderr) = pump.into_output();
    let status = child.wait().map_err(failed)?;
    served.map_err(failed)?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok(Output {
        code: status.code(),
        stdout: text(stdout),
        stderr: text(stderr),
        line,
        end: end_text(status),
    })
}

/// Starts this executable under the name of an applet, to stay when we end: with nothing of ours but
/// the folder and the namespaces. Returns the first line that
/// it writes on standard output, which it has to close, or nothing if it ends without.
pub fn start_own(applet: &str, args: &[String]) -> Result<String> {
    let failed = |e: io::Error| Error::internal(format!("start {applet}: {}", io_text(&e)));
    netns::at_home()?;
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

fn end_text(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("ended by signal {signal}"),
        (None, None) => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_beyond_the_path() {
        assert_eq!(find_in("sh", OsStr::new("/nowhere:/bin")), Some("/bin/sh".into()));
        assert_eq!(find_in("sh", OsStr::new("bin:.")), None, "relative folders are not searched");
        assert_eq!(find_in("passwd", OsStr::new("/etc")), None, "not executable");
    }

    #[test]
    fn input_larger_than_a_pipe_comes_back() {
        let text = "x".repeat(1 << 20);
        let output = run(Path::new("/bin/cat"), &[], &text).unwrap();
        assert_eq!(output.require_success().unwrap().len(), text.len());
    }

    #[test]
    fn a_program_that_reads_nothing_is_none_the_worse() {
        let text = "x".repeat(1 << 20);
        assert_eq!(run(Path::new("/bin/true"), &[], &text).unwrap().code, Some(0));
    }

    #[test]
    fn failures_tell_all() {
        let output = run(Path::new("/bin/sh"), &["-c", "echo no >&2; exit 3"], "").unwrap();
        assert_eq!(output.code, Some(3));
        let error = output.require_success().unwrap_err();
        assert_eq!(error.msg(), "run sh -c echo no >&2; exit 3: exit status 3: no");
        let error = run(Path::new("/nowhere/x"), &[], "").unwrap_err();
        assert_eq!(error.msg(), "run /nowhere/x: no such file or directory");
        let killed = run(Path::new("/bin/sh"), &["-c", "kill -9 $$"], "").unwrap();
        assert!(killed.failure().msg().ends_with("ended by signal 9"));
    }
}
