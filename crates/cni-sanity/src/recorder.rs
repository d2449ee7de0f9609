//! A plugin that records its calls and prints prepared answers, so that the suite observes the
//! calls of delegating plugins. It is this executable under another name.

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Result, context};

/// The type of the plugin.
pub const NAME: &str = "sanity-recorder";

/// The prepared status for which the recorder ends itself by a signal.
pub const KILLED: u8 = 137;

/// The text that the recorder prints on stderr.
pub const WORDS: &str = "the recorder was here";

/// A call that the recorder got.
#[derive(Debug, Serialize, Deserialize)]
pub struct Recorded {
    /// The variables whose names begin with `CNI_`.
    pub env: BTreeMap<String, String>,
    pub stdin: Value,
}

impl Recorded {
    /// The value of a variable; empty if it was not set.
    pub fn variable(&self, name: &str) -> &str {
        self.env.get(name).map_or("", String::as_str)
    }
}

/// A recorder in its own directory.
#[derive(Debug)]
pub struct Recorder {
    pub directory: PathBuf,
}

impl Recorder {
    /// Installs a recorder into a new directory.
    pub fn install(directory: &str) -> Result<Recorder> {
        let directory = PathBuf::from(directory);
        fs::create_dir_all(&directory)?;
        context(fs::copy("/proc/self/exe", directory.join(NAME)), &format!("install {NAME}"))?;
        Ok(Recorder { directory })
    }

    /// Sets the answer to a verb.
    pub fn answers(&self, verb: &str, status: u8, stdout: &str) -> Result<()> {
        Ok(fs::write(self.directory.join(verb), format!("{status}\n{stdout}"))?)
    }

    /// The calls of a verb since the last [`Recorder::forget`].
    pub fn calls(&self, verb: &str) -> Vec<Recorded> {
        let text = fs::read_to_string(self.directory.join("calls")).unwrap_or_default();
        let all = text.lines().filter_map(|line| serde_json::from_str::<Recorded>(line).ok());
        all.filter(|call| call.variable("CNI_COMMAND") == verb).collect()
    }

    /// The verbs since the last [`Recorder::forget`], for details.
    pub fn verbs(&self) -> String {
        let text = fs::read_to_string(self.directory.join("calls")).unwrap_or_default();
        let all = text.lines().filter_map(|line| serde_json::from_str::<Recorded>(line).ok());
        let verbs: Vec<String> = all.map(|call| call.variable("CNI_COMMAND").to_owned()).collect();
        if verbs.is_empty() {
            return "the delegate was not called".to_owned();
        }
        format!("the delegate was called with {}", verbs.join(", "))
    }

    /// Deletes the recorded calls.
    pub fn forget(&self) {
        // The file does not exist before the first call.
        drop(fs::remove_file(self.directory.join("calls")));
    }
}

/// Whether this process was started under the recorder's name.
pub fn is_invoked() -> bool {
    env::args_os().next().is_some_and(|name| Path::new(&name).ends_with(NAME))
}

/// The recorder's main function.
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
    let directory = exe.parent().unwrap_or(Path::new("/"));
    let mut calls = File::options().create(true).append(true).open(directory.join("calls"))?;
    calls.write_all((line + "\n").as_bytes())?;
    std::io::stderr().write_all(WORDS.as_bytes())?;
    let answer = fs::read_to_string(directory.join(verb)).unwrap_or_default();
    let (status, stdout) = answer.split_once('\n').unwrap_or(("0", ""));
    std::io::stdout().write_all(stdout.as_bytes())?;
    let status: u8 = status.parse().unwrap_or_default();
    if status == KILLED {
        std::process::abort();
    }
    Ok(ExitCode::from(status))
}
