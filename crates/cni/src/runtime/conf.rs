//! The configuration of one plugin, and the files of configurations.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{Error, ErrorCode, Result, io_text};
use crate::files;
use crate::json::keys::DecodedKeys;
use crate::json::{Json, encode_compact};
use crate::result::DnsConfig;
use crate::sort::sort_items;

/// Limit of a configuration's size in bytes: the plugins' limit of a request.
pub const MAX_CONF_BYTES: usize = 16 << 20;

/// The file name extensions of network configurations.
pub const EXTENSIONS: [&str; 3] = ["conflist", "conf", "json"];

/// The configuration of one plugin: the common keys decoded, and the document.
#[derive(Clone, Debug)]
pub struct PluginConfig {
    /// `type`: the name of the plugin's executable. Never empty.
    pub plugin_type: String,
    /// `name` of the network; empty inside a list, usually.
    pub name: String,
    /// `cniVersion` as written; empty inside a list, usually.
    pub cni_version: String,
    /// `capabilities`, including those that are `false`.
    pub capabilities: BTreeMap<String, bool>,
    /// `ipam.type`; empty without address management.
    pub ipam_type: String,
    /// `dns`: name servers, domain, search domains and options.
    pub dns: DnsConfig,
    pub(super) json: Json,
    pub(super) bytes: Vec<u8>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct CommonPluginKeys {
    cni_version: String,
    name: String,
    r#type: String,
    capabilities: BTreeMap<String, bool>,
    ipam: PluginIpamKey,
    dns: DnsConfig,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct PluginIpamKey {
    r#type: String,
}

impl PluginConfig {
    /// Parses a document; its bytes are kept as they are.
    ///
    /// Errors: `error parsing configuration: <reason>`, the reason being `missing 'type'` for a
    /// list or anything else that is not a plugin's configuration.
    ///
    /// ```
    /// # use cnibox_cni::runtime::PluginConfig;
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let plugin = PluginConfig::from_bytes(br#"{"name": "pods", "type": "ptp"}"#)?;
    /// assert_eq!(plugin.plugin_type, "ptp");
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_bytes(bytes: &[u8]) -> Result<PluginConfig> {
        let json = Json::parse(bytes).map_err(malformed_config)?;
        PluginConfig::from_json(json, bytes.to_vec())
    }

    /// Parses a file like [`PluginConfig::from_bytes`]. If the file cannot be read, the error is
    /// `error reading <file>: open <file>: <reason>`.
    ///
    /// ```
    /// # use cnibox_cni::runtime::PluginConfig;
    /// let error = PluginConfig::from_file("/none.conf".as_ref()).unwrap_err();
    /// assert_eq!(error.message(), "error reading /none.conf: open /none.conf: no such file or directory");
    /// ```
    pub fn from_file(path: &Path) -> Result<PluginConfig> {
        PluginConfig::from_bytes(&read_config_file(path)?)
    }

    /// Parses an entry of a list: its bytes are compact with sorted keys, as in the reference.
    pub(super) fn from_entry(entry: &Json) -> Result<PluginConfig> {
        let json = entry.clone().without_repeated_keys().with_normalised_numbers();
        let bytes = encode_compact(&json.clone().with_sorted_keys())?.into_bytes();
        PluginConfig::from_json(json, bytes)
    }

    fn from_json(json: Json, bytes: Vec<u8>) -> Result<PluginConfig> {
        let common = match &json {
            Json::Null => CommonPluginKeys::default(),
            Json::Object(_) => json.decode().map_err(malformed_config)?,
            other => {
                let msg = other.wrong_type_message("an object");
                return Err(malformed_config(Error::new(ErrorCode::DECODE, msg)));
            }
        };
        if common.r#type.is_empty() {
            let remedy = match json.get_present_member("plugins") {
                Some(_) => "the file of a list of plugins is called .conflist",
                None => "add \"type\", the name of the plugin",
            };
            return Err(malformed_config(Error::config("missing 'type'")).with_details(remedy));
        }
        Ok(PluginConfig {
            plugin_type: common.r#type,
            name: common.name,
            cni_version: common.cni_version,
            capabilities: common.capabilities,
            ipam_type: common.ipam.r#type,
            dns: common.dns,
            json,
            bytes,
        })
    }

    /// Members that are open to any plugin, or come from the runtime: their content is not known.
    #[doc(hidden)]
    pub const OPEN_KEYS: [&str; 5] =
        ["args", "capabilities", "ipam", "prevResult", "runtimeConfig"];

    /// The keys that the configuration of every plugin may have, with the open ones.
    #[doc(hidden)]
    pub fn common_keys() -> DecodedKeys {
        let common = DecodedKeys::of_type::<CommonPluginKeys>();
        PluginConfig::OPEN_KEYS
            .iter()
            .fold(common, |keys, name| keys.with_member(name, DecodedKeys::Any))
    }

    /// The document.
    ///
    /// ```
    /// # use cnibox_cni::runtime::PluginConfig;
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let plugin = PluginConfig::from_bytes(br#"{"name": "pods", "type": "ptp", "mtu": 1400}"#)?;
    /// assert!(plugin.json().get_member("mtu").is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub fn json(&self) -> &Json {
        &self.json
    }

    /// The bytes of the document: as read, or for an entry of a list compact with sorted keys.
    ///
    /// ```
    /// # use cnibox_cni::runtime::PluginConfig;
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let plugin = PluginConfig::from_bytes(br#"{ "type": "ptp" }"#)?;
    /// assert_eq!(plugin.bytes(), br#"{ "type": "ptp" }"#);
    /// # Ok(())
    /// # }
    /// ```
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The same configuration with the keys of `members` added or replaced (case-insensitively);
    /// compact with sorted keys.
    ///
    /// Errors: `keys cannot be empty`, `key '<k>' value must not be nil`.
    ///
    /// ```
    /// # use cnibox_cni::runtime::PluginConfig;
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let plugin = PluginConfig::from_bytes(br#"{"type": "ptp"}"#)?;
    /// let named = plugin.inject_members(&[("name".into(), "pods".into())])?;
    /// assert_eq!(named.bytes(), br#"{"name":"pods","type":"ptp"}"#);
    /// # Ok(())
    /// # }
    /// ```
    pub fn inject_members(&self, members: &[(String, Json)]) -> Result<PluginConfig> {
        let mut json = self.json.clone();
        for (key, value) in members {
            if key.is_empty() {
                return Err(Error::internal("keys cannot be empty"));
            }
            if *value == Json::Null {
                return Err(Error::internal(format!("key '{key}' value must not be nil")));
            }
            json.set_member(key, value.clone());
        }
        PluginConfig::from_entry(&json)
    }

    /// The capabilities that the plugin asks for.
    pub(super) fn wanted_capabilities(&self) -> impl Iterator<Item = &str> {
        self.capabilities.iter().filter(|(_, wanted)| **wanted).map(|(name, _)| name.as_str())
    }
}

fn malformed_config(error: Error) -> Error {
    error.context("error parsing configuration")
}

/// The files in `dir` whose extension is one of `extensions` (without the dot, case-sensitive),
/// sorted by name in byte order. The list of a directory that does not exist is empty. Symbolic
/// links count as files, whatever their targets; subdirectories are not searched.
///
/// ```
/// # use cnibox_cni::runtime::find_config_files;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let dir = tempfile::tempdir()?;
/// std::fs::write(dir.path().join("10-pods.conflist"), "{}")?;
/// assert_eq!(find_config_files(dir.path(), &["conflist"])?.len(), 1);
/// # Ok(())
/// # }
/// ```
pub fn find_config_files(dir: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>> {
    let failed = |cause| Error::io(format_args!("open {}", dir.display()), &cause);
    let entries = match fs::read_dir(dir) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        // `Path::extension` would skip a file called ".conf", which libcni reads.
        let extension = name.to_str().and_then(|name| name.rsplit_once('.')).map(|(_, e)| e);
        if extension.is_some_and(|e| extensions.contains(&e))
            && !entry.file_type().map_err(failed)?.is_dir()
        {
            files.push(entry.path());
        }
    }
    sort_items(&mut files);
    Ok(files)
}

pub(super) fn read_config_file(path: &Path) -> Result<Vec<u8>> {
    files::read_regular_file(path, MAX_CONF_BYTES).map_err(|cause| {
        let path = path.display();
        Error::new(ErrorCode::IO, format!("error reading {path}: open {path}: {}", io_text(&cause)))
    })
}
