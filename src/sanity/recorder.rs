//! A plugin that writes down how it is called and answers what it was told to: by it the suite sees what plugins ask
//! of others. It is this executable under another name.

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::world::Result;

/// Its type.
pub const NAME: &str = "sanity-recorder";

/// The status that stands for an end by a signal.
pub const KILLED: u8 = 137;

/// What it writes to stderr.
pub const WORDS: &str = "the recorder was here";

/// A call.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Recorded {
    /// The variables whose names begin with `CNI_`.
    pub env: BTreeMap<String, String>,
    pub stdin: Value,
}

impl Recorded {
    /// A variable; empty if it was not there.
    pub fn variable(&self, name: &str) -> &str {
        self.env.get(name).map_or("", String::as_str)
    }
}

/// A recorder in a folder of its own.
#[derive(Debug)]
pub struct Recorder {
    pub folder: PathBuf,
}

impl Recorder {
    /// Puts one into a folder, which is made.
    pub fn install(folder: &str) -> Result<Recorder> {
        let folder = PathBuf::from(folder);
        let made = fs::create_dir_all(&folder)
            .and_then(|()| fs::copy("/proc/self/exe", folder.join(NAME)));
        made.map_err(|error| format!("install {NAME}: {error}"))?;
        Ok(Recorder { folder })
    }

    /// What it answers from now on to a verb.
    pub fn answers(&self, verb: &str, status: u8, stdout: &str) -> Result<()> {
        fs::write(self.folder.join(verb), format!("{status}\n{stdout}"))
            .map_err(|error| format!("write an answer: {error}"))
    }

    /// The calls of a verb since the last [`Recorder::forget`].
    pub fn calls(&self, verb: &str) -> Vec<Recorded> {
        let text = fs::read_to_string(self.folder.join("calls")).unwrap_or_default();
        let all = text.lines().filter_map(|line| serde_json::from_str::<Recorded>(line).ok());
        all.filter(|call| call.variable("CNI_COMMAND") == verb).collect()
    }

    /// Forgets the calls.
    pub fn forget(&self) {
        // Without calls there is no such file.
        drop(fs::remove_file(self.folder.join("calls")));
    }
}

/// Whether this process was started as the recorder.
pub fn is_meant() -> bool {
    env::args_os().next().is_some_and(|name| Path::new(&name).ends_with(NAME))
}

/// The recorder.
pub fn run() -> ExitCode {
    record().unwrap_or_else(|error| {
        drop(writeln!(std::io::stderr(), "{NAME}: {error}"));
        ExitCode::FAILURE
    })
}

fn record() -> std::io::Result<ExitCode> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let env: BTreeMap<String, String> =
        env::vars().filter(|(key, _)| key.starts_with("CNI_")).collect();
    let verb = env.get("CNI_COMMAND").cloned().unwrap_or_default();
    let stdin = serde_json::from_str(&text).unwrap_or_default();
    let line = serde_json::to_string(&Recorded { env, stdin })?;
    let exe = env::current_exe()?;
    let folder = exe.parent().unwrap_or(Path::new("/"));
    let mut calls = File::options().create(true).append(true).open(folder.join("calls"))?;
    calls.write_all((line + "\n").as_bytes())?;
    std::io::stderr().write_all(WORDS.as_bytes())?;
    let answer = fs::read_to_string(folder.join(verb)).unwrap_or_default();
    let (status, stdout) = answer.split_once('\n').unwrap_or(("0", ""));
    std::io::stdout().write_all(stdout.as_bytes())?;
    let status: u8 = status.parse().unwrap_or_default();
    if status == KILLED {
        std::process::abort();
    }
    Ok(ExitCode::from(status))
}
