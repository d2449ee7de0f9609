//! Running plugins that are executables of their own: find, exec, read what they answer.
//!
//! Used by both sides of CNI: by `runtime` for the plugins of a network, and by the plugins for
//! a foreign delegate. [`Executor`] is the seam at which a test replaces it all; [`System`] is
//! the real thing.
#![warn(missing_docs)]

mod exec;
mod find;
#[cfg(test)]
mod tests;
mod version;

use std::fmt;
use std::path::{Path, PathBuf};

pub use exec::{Exec, exec};
pub use find::{find, is_own_executable, split_path};
pub use version::{VersionInfo, version_info};

use crate::cni::CniResult;
use crate::cni::json::Json;
use crate::cni::version::SpecVersion;
use crate::error::{Code, Error, Result};

/// How plugins are found and run. Shared between threads by runtimes that attach several
/// containers at a time.
pub trait Executor: fmt::Debug + Send + Sync {
    /// The executable of the plugin `name` in one of `dirs`.
    fn find(&self, name: &str, dirs: &[PathBuf]) -> Result<PathBuf>;

    /// Runs it and returns what it printed on stdout; its error object as the error.
    fn run(&self, call: &Exec<'_>) -> Result<Vec<u8>>;
}

/// Files and processes: [`find()`] and [`exec()`].
#[derive(Clone, Copy, Debug, Default)]
pub struct System;

impl Executor for System {
    fn find(&self, name: &str, dirs: &[PathBuf]) -> Result<PathBuf> {
        find(name, dirs)
    }

    fn run(&self, call: &Exec<'_>) -> Result<Vec<u8>> {
        exec(call)
    }
}

/// The result in `stdout`, which a successful ADD printed: a JSON object, or `null` for an empty
/// one. Where it says no version, `default` is assumed (the configuration's). Not converted.
///
/// Code 6, `failed to unmarshal raw result: ...`, if it is neither; spec, section "Delegation".
pub fn read_result(stdout: &[u8], default: SpecVersion) -> Result<CniResult> {
    let unreadable =
        |why: &str| Error::new(Code::DECODE, format!("failed to unmarshal raw result: {why}"));
    match Json::parse(stdout).map_err(|why| unreadable(&why))? {
        Json::Null => CniResult::decode(&Json::Object(Vec::new()), default),
        json @ Json::Object(_) => CniResult::decode(&json, default),
        other => Err(unreadable(&format!("{} is not an object", other.go_type()))),
    }
}

/// `path` for messages and for `CNI_PATH`.
pub(crate) fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
