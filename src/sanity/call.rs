//! One call of a plugin: what it gets, what it answers, and how a person repeats it.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::kill::{self, Ended};

/// How long a plugin may take.
const LIMIT: Duration = Duration::from_secs(20);

/// How often a plugin is looked at that runs.
const TICK: Duration = Duration::from_millis(2);

/// A call that is put together.
#[derive(Clone, Debug)]
pub struct Call {
    plugin: PathBuf,
    env: Vec<(String, String)>,
    stdin: Vec<u8>,
    /// A working directory that is deleted before the plugin starts.
    folder: Option<PathBuf>,
    has_stderr: bool,
}

/// What became of it.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The exit status; `None` for one that a signal or the limit ended.
    pub status: Option<i32>,
    pub stdout: Vec<u8>,
    pub stderr: String,
    /// stdout as JSON.
    pub json: Option<Value>,
    /// How a person repeats it.
    pub by_hand: String,
}

impl Call {
    /// A call of the plugin at `path` with this verb and configuration.
    pub fn new(path: &Path, verb: &str, conf: &Value) -> Call {
        let call = Call {
            plugin: path.to_owned(),
            env: Vec::new(),
            stdin: conf.to_string().into_bytes(),
            folder: None,
            has_stderr: true,
        };
        let folder = path.parent().unwrap_or(Path::new(".")).display().to_string();
        call.env("CNI_COMMAND", verb).env("CNI_PATH", &folder)
    }

    /// With this variable; an empty value leaves it out.
    pub fn env(mut self, key: &str, value: &str) -> Call {
        self.env.retain(|(known, _)| known != key);
        if !value.is_empty() {
            self.env.push((key.to_owned(), value.to_owned()));
        }
        self
    }

    /// With these bytes on stdin.
    pub fn stdin(mut self, bytes: &[u8]) -> Call {
        self.stdin = bytes.to_vec();
        self
    }

    /// In a working directory that is gone when the plugin starts; it is made here.
    pub fn in_folder_that_goes(mut self, folder: &str) -> Call {
        self.folder = Some(folder.into());
        self
    }

    /// With stderr closed.
    pub fn without_stderr(mut self) -> Call {
        self.has_stderr = false;
        self
    }

    /// The shell's line for it.
    pub fn by_hand(&self) -> String {
        let quoted = |text: &str| format!("'{}'", text.replace('\'', "'\\''"));
        let env: Vec<String> =
            self.env.iter().map(|(key, value)| format!("{key}={}", quoted(value))).collect();
        let stdin = String::from_utf8_lossy(&self.stdin);
        format!("echo {} | env {} {}", quoted(&stdin), env.join(" "), self.plugin.display())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.plugin);
        command.env_clear().env("PATH", std::env::var("PATH").unwrap_or_default());
        command.envs(self.env.iter().map(|(key, value)| (key, value)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let (folder, has_stderr) = (self.folder.clone(), self.has_stderr);
        if folder.is_some() || !has_stderr {
            let prepare = move || {
                if let Some(folder) = &folder {
                    fs::create_dir_all(folder)?;
                    std::env::set_current_dir(folder)?;
                    fs::remove_dir(folder)?;
                }
                if !has_stderr {
                    nix::unistd::close(2)?;
                }
                Ok(())
            };
            #[expect(unsafe_code, reason = "code between fork and exec is unsafe by its nature")]
            // SAFETY: other threads of a case only wait for pipes then; none holds a lock of the allocator.
            unsafe {
                command.pre_exec(prepare);
            }
        }
        command
    }

    fn failed(&self, error: impl Into<io::Error>) -> String {
        format!("run {}: {}", self.plugin.display(), error.into())
    }

    /// Writes the configuration; a plugin that does not read is no failure here.
    fn feed(&self, child: &mut Child) -> thread::JoinHandle<()> {
        let (mut stdin, bytes) = (child.stdin.take(), self.stdin.clone());
        thread::spawn(move || drop(stdin.as_mut().map(|pipe| pipe.write_all(&bytes))))
    }

    /// Runs it until its system call `point`, where it is killed; nobody listens to what it says.
    pub fn run_until(&self, point: u64) -> Result<Ended, String> {
        let mut command = self.command();
        let mut child = kill::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()))
            .map_err(|error| self.failed(error))?;
        let writer = self.feed(&mut child);
        let ended = kill::kill_at(&child, point).map_err(|error| self.failed(error))?;
        drop(writer.join());
        Ok(ended)
    }

    /// Runs it with its stdout in a file; its exit status.
    pub fn run_into(&self, stdout: File) -> Result<Option<i32>, String> {
        let mut command = self.command();
        let child = command.stdout(stdout).stderr(Stdio::null()).spawn();
        let mut child = child.map_err(|error| self.failed(error))?;
        let writer = self.feed(&mut child);
        let status = child.wait().map_err(|error| self.failed(error))?;
        drop(writer.join());
        Ok(status.code())
    }

    /// Runs it. An error is the suite's: it could not be started.
    pub fn run(&self) -> Result<Answer, String> {
        let failed = |error: io::Error| self.failed(error);
        let mut child = self.command().spawn().map_err(failed)?;
        let writer = self.feed(&mut child);
        let stdout = child.stdout.take().map(read_all);
        let stderr = child.stderr.take().map(read_all);
        let start = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                break status.code();
            }
            if start.elapsed() > LIMIT {
                child.kill().and_then(|()| child.wait().map(drop)).map_err(failed)?;
                break None;
            }
            thread::sleep(TICK);
        };
        drop(writer.join());
        let text = |reader: Option<thread::JoinHandle<Vec<u8>>>| {
            reader.and_then(|reader| reader.join().ok()).unwrap_or_default()
        };
        let (stdout, stderr) = (text(stdout), text(stderr));
        let json = serde_json::from_slice(&stdout).ok();
        let stderr = String::from_utf8_lossy(&stderr).into_owned();
        Ok(Answer { status, stdout, stderr, json, by_hand: self.by_hand() })
    }
}

fn read_all(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What came before an error is what there is.
        drop(pipe.read_to_end(&mut bytes));
        bytes
    })
}

impl Answer {
    /// Exit status 0.
    pub fn succeeded(&self) -> bool {
        self.status == Some(0)
    }

    /// The code of an error object.
    pub fn code(&self) -> Option<u64> {
        self.json.as_ref()?.get("code")?.as_u64()
    }

    /// What it said, for a person.
    pub fn said(&self) -> String {
        let stdout = String::from_utf8_lossy(&self.stdout);
        let ended = self
            .status
            .map_or_else(|| "a signal or no end".to_owned(), |status| status.to_string());
        let text =
            format!("status {ended}; stdout: {} stderr: {}", stdout.trim(), self.stderr.trim());
        text.chars().take(600).collect()
    }
}
