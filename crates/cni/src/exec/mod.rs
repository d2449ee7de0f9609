//! Plugins as executables: find them, run them, decode their output.
//!
//! Used by both sides of CNI: by `runtime` for the plugins of a network, and by plugins for
//! foreign delegates. [`ProcessExecutor`] runs processes; tests have other implementations of
//! [`PluginExecutor`].
#![warn(missing_docs)]

mod process;
mod pump;
#[cfg(test)]
mod tests;

use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

#[doc(hidden)]
pub use process::{EndedProcess, exit_text, finish_process};
pub use process::{PluginCommand, execute_plugin};

use crate::error::{Error, ErrorCode, ErrorContext, Result};
use crate::json::Json;
use crate::names;
use crate::result::CniResult;
use crate::version::SpecVersion;

/// Finds and runs plugins. Shared between the threads of runtimes that attach several containers
/// at a time.
pub trait PluginExecutor: fmt::Debug + Send + Sync {
    /// The executable of the plugin `name` in one of `dirs`.
    fn find_plugin(&self, name: &str, dirs: &[PathBuf]) -> Result<PathBuf>;

    /// Runs a plugin and returns its stdout. The error is made from the plugin's error object.
    fn run_plugin(&self, call: &PluginCommand<'_>) -> Result<Vec<u8>>;
}

/// Finds plugins as files and runs them as processes: [`find_plugin()`] and [`execute_plugin()`].
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessExecutor;

impl PluginExecutor for ProcessExecutor {
    fn find_plugin(&self, name: &str, dirs: &[PathBuf]) -> Result<PathBuf> {
        find_plugin(name, dirs)
    }

    fn run_plugin(&self, call: &PluginCommand<'_>) -> Result<Vec<u8>> {
        execute_plugin(call)
    }
}

/// Calls a function instead of processes, for tests of runtimes. Every plugin is found.
#[derive(Clone, Copy, Debug)]
pub struct FunctionExecutor(pub fn(&PluginCommand<'_>) -> Result<Vec<u8>>);

impl PluginExecutor for FunctionExecutor {
    fn find_plugin(&self, name: &str, _: &[PathBuf]) -> Result<PathBuf> {
        Ok(name.into())
    }

    fn run_plugin(&self, call: &PluginCommand<'_>) -> Result<Vec<u8>> {
        (self.0)(call)
    }
}

/// The executable of the plugin `name` in the first of `dirs` that has one. Symbolic links are
/// followed; empty directory names are skipped. A file without execute permission is returned only
/// if no directory has an executable, so that the error of running it names the permission.
///
/// Messages: `no plugin name provided`, `invalid plugin name: <name>`, `no paths provided`,
/// `failed to find plugin "<name>" in path [<dir> <dir>]`.
///
/// ```
/// # use cnibox_cni::exec::find_plugin;
/// let error = find_plugin("bridge", &["/none".into()]).unwrap_err();
/// assert_eq!(error.message(), "failed to find plugin \"bridge\" in path [/none]");
/// ```
pub fn find_plugin(name: &str, dirs: &[PathBuf]) -> Result<PathBuf> {
    let refuse = |msg: String, remedy: &str| Err(Error::internal(msg).with_details(remedy));
    if name.is_empty() {
        let remedy = "set the key \"type\", of the plugin or of its \"ipam\"";
        return refuse("no plugin name provided".to_owned(), remedy);
    }
    if name.contains('/') {
        let remedy = "write the name of a file in CNI_PATH, without a directory";
        return refuse(format!("invalid plugin name: {name}"), remedy);
    }
    let dirs: Vec<&PathBuf> = dirs.iter().filter(|dir| !dir.as_os_str().is_empty()).collect();
    if dirs.is_empty() {
        let remedy = "set CNI_PATH to the directories that hold the plugins, usually /opt/cni/bin";
        return refuse("no paths provided".to_owned(), remedy);
    }
    let mut fallback = None;
    for candidate in dirs.iter().map(|dir| dir.join(name)) {
        match fs::metadata(&candidate) {
            Ok(file) if file.is_file() && file.permissions().mode() & 0o111 != 0 => {
                return Ok(candidate);
            }
            Ok(file) if file.is_file() => fallback = fallback.or(Some(candidate)),
            _ => {}
        }
    }
    if let Some(file) = fallback {
        return Ok(file);
    }
    let names: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    let msg = format!("failed to find plugin \"{name}\" in path [{}]", names.join(" "));
    refuse(msg, &missing_plugin_remedy(name, &dirs))
}

/// The reason why no directory has the plugin, and the remedy.
fn missing_plugin_remedy(name: &str, dirs: &[&PathBuf]) -> String {
    if let Some(dir) = dirs.iter().find(|dir| !dir.is_dir()) {
        return format!("{} is not a directory: correct CNI_PATH, or create it", dir.display());
    }
    if let Some(link) =
        dirs.iter().map(|dir| dir.join(name)).find(|file| file.is_symlink() && !file.exists())
    {
        let link = link.display();
        return format!("{link} is a link to a file that does not exist: install the plugin again");
    }
    let files = dirs.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten();
    let names: Vec<String> = files.filter_map(|file| file.file_name().into_string().ok()).collect();
    match names::nearest_word(name, names.iter().map(String::as_str)) {
        Some(other) => format!("did you mean \"{other}\"?"),
        None => "install the plugin there, or correct \"type\"".to_owned(),
    }
}

/// The directories in the text of `CNI_PATH`, which are separated by `:`, without empty names.
///
/// ```
/// # use cnibox_cni::exec::split_path;
/// # use std::path::PathBuf;
/// assert_eq!(split_path("/opt/cni/bin::/usr/lib/cni"), ["/opt/cni/bin", "/usr/lib/cni"].map(PathBuf::from));
/// ```
pub fn split_path(cni_path: &str) -> Vec<PathBuf> {
    cni_path.split(':').filter(|dir| !dir.is_empty()).map(PathBuf::from).collect()
}

/// Decodes the stdout of a successful ADD: a JSON object, or `null` for an empty result. A result
/// without a version has the version `default`, which is the version of the configuration. The
/// result is not converted.
///
/// The error has code 6: `failed to unmarshal raw result: ...`; spec, section "Delegation".
///
/// ```
/// # use cnibox_cni::{SpecVersion, exec::read_result};
/// # fn main() -> cnibox_cni::Result<()> {
/// let result = read_result(br#"{"ips": [{"address": "10.1.2.3/24"}]}"#, SpecVersion::V1_0_0)?;
/// assert_eq!(result.ips[0].address.to_string(), "10.1.2.3/24");
/// # Ok(())
/// # }
/// ```
pub fn read_result(stdout: &[u8], default: SpecVersion) -> Result<CniResult> {
    let what = || "failed to unmarshal raw result";
    match Json::parse(stdout).context(what)? {
        Json::Null => CniResult::decode(&Json::Object(Vec::new()), default),
        json @ Json::Object(_) => CniResult::decode(&json, default),
        other => {
            let msg = other.wrong_type_message("an object");
            Err(Error::new(ErrorCode::DECODE, msg).context(what()))
        }
    }
}

/// The reply of a plugin to VERSION.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
pub struct VersionInfo {
    /// The version of the reply.
    pub cni_version: String,
    /// The supported versions, as written.
    pub supported_versions: Vec<String>,
}

impl VersionInfo {
    /// Whether a network of this version can use the plugin. The texts are compared (`1.0` is not
    /// `1.0.0`); the empty version is 0.1.0.
    ///
    /// ```
    /// # use cnibox_cni::exec::VersionInfo;
    /// let info = VersionInfo { cni_version: "1.1.0".into(), supported_versions: vec!["1.0.0".into(), "1.1.0".into()] };
    /// assert!(info.supports_version("1.0.0") && !info.supports_version("0.4.0"));
    /// ```
    pub fn supports_version(&self, version: &str) -> bool {
        let version = if version.is_empty() { "0.1.0" } else { version };
        self.supported_versions.iter().any(|v| v == version)
    }

    fn of_old_plugin(version: &str, supported: &[&str]) -> VersionInfo {
        let supported_versions = supported.iter().map(|v| (*v).to_owned()).collect();
        VersionInfo { cni_version: version.to_owned(), supported_versions }
    }
}

/// Runs the plugin at `path` with VERSION. An invalid reply is an error with code 6, `decoding
/// version info: ...`. A plugin older than CNI 0.2.0 does not know VERSION; it supports 0.1.0.
///
/// ```
/// # use cnibox_cni::exec::{FunctionExecutor, query_version_info};
/// # fn main() -> cnibox_cni::Result<()> {
/// let plugins = FunctionExecutor(|_| Ok(br#"{"cniVersion": "1.1.0", "supportedVersions": ["1.1.0"]}"#.to_vec()));
/// assert!(query_version_info(&plugins, "/opt/cni/bin/bridge".as_ref(), None)?.supports_version("1.1.0"));
/// # Ok(())
/// # }
/// ```
pub fn query_version_info(
    executor: &dyn PluginExecutor,
    path: &Path,
    deadline: Option<Duration>,
) -> Result<VersionInfo> {
    // The dummy values are those of libcni.
    let env = [
        ("CNI_COMMAND", "VERSION"),
        ("CNI_CONTAINERID", ""),
        ("CNI_NETNS", "dummy"),
        ("CNI_IFNAME", "dummy"),
        ("CNI_ARGS", ""),
        ("CNI_PATH", "dummy"),
    ];
    let env = env.map(|(key, value)| (key, value.to_owned())).to_vec();
    let stdin = br#"{"cniVersion":"1.1.0"}"#;
    match executor.run_plugin(&PluginCommand { path, env, stdin, deadline }) {
        Ok(stdout) => decode_version_info(&stdout),
        Err(e) if e.message() == "unknown CNI_COMMAND: VERSION" => {
            Ok(VersionInfo::of_old_plugin("0.1.0", &["0.1.0"]))
        }
        Err(e) => Err(e),
    }
}

fn decode_version_info(stdout: &[u8]) -> Result<VersionInfo> {
    let malformed =
        |why: &str| Error::new(ErrorCode::DECODE, format!("decoding version info: {why}"));
    let json = Json::parse(stdout).map_err(|e| malformed(&e.to_string()))?;
    if !matches!(json, Json::Object(_) | Json::Null) {
        return Err(malformed(&json.wrong_type_message("an object")));
    }
    let info: VersionInfo = json.decode().map_err(|e| malformed(e.message()))?;
    match (info.cni_version.as_str(), info.supported_versions.is_empty()) {
        ("", _) => Err(malformed("missing field cniVersion")),
        ("0.2.0", true) => Ok(VersionInfo::of_old_plugin("0.2.0", &["0.1.0", "0.2.0"])),
        (_, true) => Err(malformed("missing field supportedVersions")),
        _ => Ok(info),
    }
}
