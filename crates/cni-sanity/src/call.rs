//! One call of a plugin: its input, its output, and the shell command that repeats it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Result, context, kill};

/// The time limit of a plugin.
const LIMIT: Duration = Duration::from_secs(20);

/// The user without privileges: the kernel's `overflowuid`.
const NOBODY: u32 = 65534;

/// The interval of polling for the plugin's exit.
const TICK: Duration = Duration::from_millis(2);

/// A call before its execution.
#[derive(Debug)]
pub struct Call {
    plugin: PathBuf,
    env: Vec<(String, String)>,
    stdin: Vec<u8>,
    /// A working directory that is deleted before the plugin starts.
    directory: Option<PathBuf>,
    has_stderr: bool,
    is_unprivileged: bool,
}

/// The exit status and the output of a call.
#[derive(Debug)]
pub struct Answer {
    /// The exit status; `None` after a signal or a timeout.
    pub status: Option<i32>,
    /// What ended a call without an exit status.
    end: String,
    pub stdout: Vec<u8>,
    pub stderr: String,
    /// The JSON on stdout; `None` if stdout is not JSON.
    pub json: Option<Value>,
    /// The shell command that repeats the call.
    pub by_hand: String,
}

impl Call {
    /// A call of the plugin at `path` with this verb and configuration.
    pub fn new(path: &Path, verb: &str, conf: &Value) -> Call {
        let call = Call {
            plugin: path.to_owned(),
            env: Vec::new(),
            stdin: conf.to_string().into_bytes(),
            directory: None,
            has_stderr: true,
            is_unprivileged: false,
        };
        let directory = path.parent().unwrap_or(Path::new(".")).display().to_string();
        call.env("CNI_COMMAND", verb).env("CNI_PATH", &directory)
    }

    /// Sets a variable; an empty value removes it.
    pub fn env(mut self, key: &str, value: &str) -> Call {
        self.env.retain(|(known, _)| known != key);
        if !value.is_empty() {
            self.env.push((key.to_owned(), value.to_owned()));
        }
        self
    }

    /// Replaces the bytes on stdin.
    pub fn stdin(mut self, bytes: &[u8]) -> Call {
        self.stdin = bytes.to_vec();
        self
    }

    /// Runs the plugin in a working directory that is created, and deleted before the plugin
    /// starts.
    pub fn in_deleted_directory(mut self, directory: &str) -> Call {
        self.directory = Some(directory.into());
        self
    }

    /// Runs the plugin with a closed stderr.
    pub fn without_stderr(mut self) -> Call {
        self.has_stderr = false;
        self
    }

    /// Runs the plugin as a user without privileges.
    pub fn without_privileges(mut self) -> Call {
        self.is_unprivileged = true;
        self
    }

    fn by_hand(&self) -> String {
        let quoted = |text: &str| format!("'{}'", text.replace('\'', "'\\''"));
        let env: Vec<String> =
            self.env.iter().map(|(key, value)| format!("{key}={}", quoted(value))).collect();
        let stdin = String::from_utf8_lossy(&self.stdin);
        let user = if self.is_unprivileged { "setpriv --reuid 65534 --clear-groups " } else { "" };
        let (stdin, env) = (quoted(&stdin), env.join(" "));
        format!("echo {stdin} | env {env} {user}{}", self.plugin.display())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.plugin);
        command.env_clear().env("PATH", std::env::var("PATH").unwrap_or_default());
        command.envs(self.env.iter().map(|(key, value)| (key, value)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if self.is_unprivileged {
            command.uid(NOBODY);
        }
        let (directory, has_stderr) = (self.directory.clone(), self.has_stderr);
        if directory.is_some() || !has_stderr {
            let prepare = move || {
                if let Some(directory) = &directory {
                    fs::create_dir_all(directory)?;
                    std::env::set_current_dir(directory)?;
                    fs::remove_dir(directory)?;
                }
                if !has_stderr {
                    nix::unistd::close(2)?;
                }
                Ok(())
            };
            #[expect(unsafe_code, reason = "code between fork and exec is unsafe by its nature")]
            // SAFETY: at the fork the other threads of a case wait for pipes; none holds a lock of
            // the allocator.
            unsafe {
                command.pre_exec(prepare);
            }
        }
        command
    }

    /// Writes the configuration; a plugin may exit without reading it.
    fn feed(&self, child: &mut Child) -> JoinHandle<()> {
        let (mut stdin, bytes) = (child.stdin.take(), self.stdin.clone());
        thread::spawn(move || drop(stdin.as_mut().map(|pipe| pipe.write_all(&bytes))))
    }

    /// Runs the plugin up to its system call `point` and kills it there, without reading its
    /// output. Returns the number of system calls.
    pub fn run_until(&self, point: u64) -> Result<u64> {
        let mut command = self.command();
        let child = kill::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()));
        let mut child = self.context(child)?;
        let writer = self.feed(&mut child);
        let calls = self.context(kill::kill_at(&child, point))?;
        drop(writer.join());
        Ok(calls)
    }

    /// Runs the plugin with its stdout in a file; returns the exit status.
    pub fn run_into(&self, stdout: File) -> Result<Option<i32>> {
        let mut child =
            self.context(self.command().stdout(stdout).stderr(Stdio::null()).spawn())?;
        let writer = self.feed(&mut child);
        let status = self.context(child.wait())?;
        drop(writer.join());
        Ok(status.code())
    }

    /// Runs the plugin. Fails only if the plugin could not be started.
    pub fn run(&self) -> Result<Answer> {
        let mut child = self.context(self.command().spawn())?;
        let writer = self.feed(&mut child);
        let (stdout, stderr) = (read_all(child.stdout.take()), read_all(child.stderr.take()));
        let status = self.context(wait(&mut child, LIMIT))?;
        let signal = status.and_then(|status| status.signal());
        let end = match signal {
            Some(signal) => format!("killed by signal {signal}"),
            None => format!(
                "no end within {} seconds: the machine may be too busy (--jobs 1)",
                LIMIT.as_secs()
            ),
        };
        drop(writer.join());
        let (stdout, stderr) =
            (stdout.join().unwrap_or_default(), stderr.join().unwrap_or_default());
        Ok(Answer {
            status: status.and_then(|status| status.code()),
            end,
            json: serde_json::from_slice(&stdout).ok(),
            stdout,
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
            by_hand: self.by_hand(),
        })
    }

    fn context<T>(&self, result: std::result::Result<T, impl Into<std::io::Error>>) -> Result<T> {
        context(result, &format!("run {}", self.plugin.display()))
    }
}

/// Waits for the end of a process. After the limit the process is killed, and the result is `None`.
pub fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    while start.elapsed() <= limit {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(TICK);
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}

/// Reads a pipe up to its end or an error.
pub fn read_all(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        drop(pipe.map(|mut pipe| pipe.read_to_end(&mut bytes)));
        bytes
    })
}

impl Answer {
    pub fn succeeded(&self) -> bool {
        self.status == Some(0)
    }

    /// Whether the call failed as the specification defines it: with an exit status other than 0,
    /// not by a signal.
    pub fn failed(&self) -> bool {
        self.status.is_some_and(|status| status != 0)
    }

    /// The JSON on stdout, if the call succeeded.
    pub fn result(&self) -> Option<&Value> {
        self.json.as_ref().filter(|_| self.succeeded())
    }

    /// The code of the error object, if the call printed one.
    pub fn code(&self) -> Option<u64> {
        self.json.as_ref()?.get("code")?.as_u64()
    }

    /// The exit status and the output, shortened.
    pub fn summary(&self) -> String {
        let stdout = String::from_utf8_lossy(&self.stdout);
        let mut text = match self.status {
            Some(status) => format!("status {status}"),
            None => self.end.clone(),
        };
        for (name, output) in [("stdout", stdout.trim()), ("stderr", self.stderr.trim())] {
            match output {
                "" => text.extend(["; nothing on ", name]),
                output => text.extend(["; ", name, ": ", output]),
            }
        }
        text.chars().take(600).collect()
    }
}
