//! Asking a plugin which versions it speaks.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use super::{Exec, Executor};
use crate::cni::json::Json;
use crate::error::{Code, Error, Result};

/// The request. Plugins need not look at it.
const QUERY: &[u8] = br#"{"cniVersion":"1.1.0"}"#;
/// What a plugin from before VERSION existed answers.
const BEFORE_VERSION: &str = "unknown CNI_COMMAND: VERSION";

/// What a plugin answers to VERSION.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct VersionInfo {
    /// The version it answers in.
    #[serde(default)]
    pub cni_version: String,
    /// The versions it serves, as written.
    #[serde(default)]
    pub supported_versions: Vec<String>,
}

impl VersionInfo {
    /// Whether a network of this version can use the plugin. The comparison is of texts (`1.0` is
    /// not `1.0.0`); the empty version is 0.1.0.
    pub fn supports(&self, version: &str) -> bool {
        let version = if version.is_empty() { "0.1.0" } else { version };
        self.supported_versions.iter().any(|v| v == version)
    }

    fn old(version: &str, supported: &[&str]) -> VersionInfo {
        let supported_versions = supported.iter().map(|v| (*v).to_owned()).collect();
        VersionInfo { cni_version: version.to_owned(), supported_versions }
    }
}

/// Asks the plugin at `path`. An answer that is none: code 6, `decoding version info: ...`.
/// Plugins from before 0.2.0 do not know the question; they serve 0.1.0.
pub fn version_info(
    executor: &dyn Executor,
    path: &Path,
    deadline: Option<Duration>,
) -> Result<VersionInfo> {
    let dummy = || "dummy".to_owned();
    let env = vec![
        ("CNI_COMMAND", "VERSION".to_owned()),
        ("CNI_CONTAINERID", String::new()),
        ("CNI_NETNS", dummy()),
        ("CNI_IFNAME", dummy()),
        ("CNI_ARGS", String::new()),
        ("CNI_PATH", dummy()),
    ];
    match executor.run(&Exec { path, env, stdin: QUERY, deadline }) {
        Ok(stdout) => decode(&stdout),
        Err(e) if e.msg() == BEFORE_VERSION => Ok(VersionInfo::old("0.1.0", &["0.1.0"])),
        Err(e) => Err(e),
    }
}

fn decode(stdout: &[u8]) -> Result<VersionInfo> {
    let malformed = |why: &str| Error::new(Code::DECODE, format!("decoding version info: {why}"));
    let json = Json::parse(stdout).map_err(|why| malformed(&why))?;
    if !matches!(json, Json::Object(_) | Json::Null) {
        return Err(malformed(&format!("{} is not an object", json.go_type())));
    }
    let info: VersionInfo = json.decode().map_err(|e| malformed(e.msg()))?;
    match (info.cni_version.as_str(), info.supported_versions.is_empty()) {
        ("", _) => Err(malformed("missing field cniVersion")),
        ("0.2.0", true) => Ok(VersionInfo::old("0.2.0", &["0.1.0", "0.2.0"])),
        (_, true) => Err(malformed("missing field supportedVersions")),
        _ => Ok(info),
    }
}
