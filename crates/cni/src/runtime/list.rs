//! A network's configuration: an ordered list of plugins under one name and version.

use std::path::Path;

use super::conf::{self, PluginConfig, find_config_files};
use crate::error::{Error, ErrorContext, Result};
use crate::json::{Json, encode_compact};
use crate::names;
use crate::version::{SpecVersion, VersionNumber, quoting_remedy};

/// A parsed network configuration.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "most are keys of the configuration")]
pub struct NetworkList {
    /// `name`. Checked when the network is used, not when it is read.
    pub name: String,
    /// The version with which the plugins are run: the highest of `cniVersions` and `cniVersion`
    /// that this library knows; `cniVersion` as written if there is no choice.
    pub cni_version: String,
    /// `disableCheck`: CHECK does nothing.
    pub disable_check: bool,
    /// `disableGC`: GC does nothing.
    pub disable_gc: bool,
    /// `loadOnlyInlinedPlugins`: the directory beside the file is not read.
    pub only_inlined: bool,
    /// The plugins, in the order of ADD.
    pub plugins: Vec<PluginConfig>,
    pub(super) bytes: Vec<u8>,
    /// The list was made for an operation on a single plugin, whose error is returned unchanged.
    pub(super) is_single: bool,
}

impl NetworkList {
    /// The keys of a list (CNI specification, section 1). Runtimes match them exactly, including
    /// upper and lower case.
    #[doc(hidden)]
    pub const KEYS: [&str; 7] = [
        "cniVersion",
        "cniVersions",
        "disableCheck",
        "disableGC",
        "loadOnlyInlinedPlugins",
        "name",
        "plugins",
    ];

    /// Parses a list. Keys of the top level are case-sensitive; unknown keys stay in the bytes but
    /// are passed to no plugin. Plugins in a directory are not read.
    ///
    /// Errors: `error parsing configuration list: <reason>`, and for an entry of `plugins`
    /// `failed to parse plugin config <i>: <reason>`.
    ///
    /// ```
    /// # use cnibox_cni::runtime::{NetworkList, PluginConfig};
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let list = br#"{"cniVersion": "1.1.0", "name": "pods", "plugins": [{"type": "ptp"}, {"type": "portmap"}]}"#;
    /// assert_eq!(NetworkList::from_bytes(list)?.plugins[1].plugin_type, "portmap");
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_bytes(bytes: &[u8]) -> Result<NetworkList> {
        let (mut list, entries) =
            parse_without_plugins(bytes).context(|| "error parsing configuration list")?;
        for (i, entry) in entries.iter().enumerate() {
            let plugin = PluginConfig::from_entry(entry);
            list.plugins.push(plugin.context(|| format!("failed to parse plugin config {i}"))?);
        }
        Ok(list)
    }

    /// Parses a list and appends the plugins of the directory beside it that has the network's name
    /// (`*.conf`, sorted), unless the list has `loadOnlyInlinedPlugins`. The bytes of such a list
    /// contain these plugins, so that the cached configuration is complete.
    ///
    /// Errors: as [`NetworkList::from_bytes`], `error reading <file>: ...`, and
    /// `no plugin configs found`.
    ///
    /// ```
    /// # use cnibox_cni::runtime::NetworkList;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// let file = dir.path().join("10-pods.conflist");
    /// std::fs::write(&file, r#"{"cniVersion": "1.1.0", "name": "pods", "plugins": [{"type": "ptp"}]}"#)?;
    /// assert_eq!(NetworkList::from_file(&file)?.name, "pods");
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_file(path: &Path) -> Result<NetworkList> {
        let mut list = NetworkList::from_bytes(&conf::read_config_file(path)?)?;
        // An invalid name must not become a path: `../x`, or the directory itself.
        if !list.only_inlined && names::is_identifier(&list.name) {
            list.append_directory(&path.parent().unwrap_or(Path::new(".")).join(&list.name))?;
        }
        if list.plugins.is_empty() {
            return Err(Error::config("no plugin configs found").with_details(
                "a .conflist file has the list \"plugins\"; the file of a single plugin is called \
                 .conf",
            ));
        }
        Ok(list)
    }

    /// A list of one plugin, under the plugin's own name and version.
    ///
    /// ```
    /// # use cnibox_cni::runtime::{NetworkList, PluginConfig};
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let plugin = PluginConfig::from_bytes(br#"{"cniVersion": "1.0.0", "name": "pods", "type": "ptp"}"#)?;
    /// assert_eq!(NetworkList::from_plugin(&plugin)?.cni_version, "1.0.0");
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_plugin(plugin: &PluginConfig) -> Result<NetworkList> {
        let json = Json::Object(vec![
            ("cniVersion".to_owned(), plugin.cni_version.as_str().into()),
            ("name".to_owned(), plugin.name.as_str().into()),
            ("plugins".to_owned(), Json::Array(vec![plugin.json.clone()])),
        ]);
        let text = encode_compact(&json.with_normalised_numbers().with_sorted_keys())?;
        NetworkList::from_bytes(text.as_bytes())
    }

    /// The network called `name` in the directory `dir`: the first `.conflist` file, sorted, with
    /// this name; else the first `.conf` or `.json` file, which holds a single plugin.
    ///
    /// A file that cannot be loaded is skipped; if no other file has the name, its error is
    /// returned. Otherwise the error is `no net configurations found in <dir>` or
    /// `no net configuration with name "<name>" in <dir>`; the details list the known names.
    ///
    /// ```
    /// # use cnibox_cni::runtime::NetworkList;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// let file = dir.path().join("10-pods.conflist");
    /// std::fs::write(&file, r#"{"cniVersion": "1.1.0", "name": "pods", "plugins": [{"type": "ptp"}]}"#)?;
    /// assert_eq!(NetworkList::load(dir.path(), "pods")?.plugins.len(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn load(dir: &Path, name: &str) -> Result<NetworkList> {
        let files =
            [find_config_files(dir, &["conflist"])?, find_config_files(dir, &["conf", "json"])?]
                .concat();
        let (mut names, mut broken) = (Vec::new(), None);
        for file in &files {
            match NetworkList::from_any_file(file) {
                Ok(list) if list.name == name => return Ok(list),
                Ok(list) => names.push(list.name),
                Err(error) => broken = broken.or(Some((error, file))),
            }
        }
        if let Some((error, file)) = broken {
            let known = if error.details().is_empty() { "" } else { "; " };
            let details = format!("{}{known}in {}", error.details(), file.display());
            return Err(error.with_details(details));
        }
        let dir = dir.display();
        if files.is_empty() {
            return Err(Error::config(format!("no net configurations found in {dir}"))
                .with_details(
                    "put a *.conflist, *.conf or *.json file there, or choose the directory with \
                     --conf-dir or NETCONFPATH",
                ));
        }
        let order =
            if name.contains('/') { "the network comes first, then the namespace; " } else { "" };
        let details = format!("{order}there are: {}", names.join(", "));
        let msg = format!("no net configuration with name \"{name}\" in {dir}");
        Err(Error::config(msg).with_details(details))
    }

    /// The bytes of the document as read, including the plugins of a directory, if there are any.
    ///
    /// ```
    /// # use cnibox_cni::runtime::{NetworkList, PluginConfig};
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let list = br#"{"name": "pods", "plugins": [{"type": "ptp"}]}"#;
    /// assert_eq!(NetworkList::from_bytes(list)?.bytes(), list);
    /// # Ok(())
    /// # }
    /// ```
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// A list of one plugin, unchanged, for the operations on a single plugin.
    pub(super) fn from_single(plugin: &PluginConfig) -> NetworkList {
        NetworkList {
            name: plugin.name.clone(),
            cni_version: plugin.cni_version.clone(),
            disable_check: false,
            disable_gc: false,
            only_inlined: true,
            plugins: vec![plugin.clone()],
            bytes: plugin.bytes.clone(),
            is_single: true,
        }
    }

    /// Whether the network's version is at least `version`; code 6 if it is not a version.
    pub(super) fn is_at_least(&self, version: SpecVersion) -> Result<bool> {
        Ok(self.cni_version.parse::<VersionNumber>()? >= version.into())
    }

    /// The network of a file: a list if its name ends in `.conflist`, else one plugin.
    ///
    /// ```
    /// # use cnibox_cni::runtime::NetworkList;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// let file = dir.path().join("10-pods.conf");
    /// std::fs::write(&file, r#"{"cniVersion": "1.1.0", "name": "pods", "type": "ptp"}"#)?;
    /// assert_eq!(NetworkList::from_any_file(&file)?.name, "pods");
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_any_file(path: &Path) -> Result<NetworkList> {
        if is_list_file(path) {
            NetworkList::from_file(path)
        } else {
            NetworkList::from_plugin(&PluginConfig::from_file(path)?)
        }
    }

    fn append_directory(&mut self, directory: &Path) -> Result<()> {
        let files = find_config_files(directory, &["conf"])?;
        if files.is_empty() {
            return Ok(());
        }
        for file in &files {
            self.plugins.push(PluginConfig::from_file(file)?);
            log::debug!("network {}: read a plugin from {}", self.name, file.display());
        }
        let mut json = Json::parse(&self.bytes)?;
        let plugins = self.plugins.iter().map(|plugin| plugin.json.clone()).collect();
        json.set_member("plugins", Json::Array(plugins));
        self.bytes = encode_compact(&json)?.into_bytes();
        Ok(())
    }
}

/// Whether a file of this name holds a list.
#[doc(hidden)]
pub fn is_list_file(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(b".conflist")
}

/// The list without its plugins, and the entries of `plugins`.
fn parse_without_plugins(bytes: &[u8]) -> Result<(NetworkList, Vec<Json>)> {
    let json = Json::parse(bytes)?;
    if !matches!(json, Json::Object(_)) {
        return Err(Error::config(json.wrong_type_message("an object")));
    }
    let list = NetworkList {
        name: match exact_member(&json, "name") {
            None => return Err(Error::config("no name")),
            Some(Json::String(name)) => name.clone(),
            Some(other) => {
                return Err(wrong_type_error("invalid name type", other)
                    .with_details("write the name in double quotes"));
            }
        },
        cni_version: choose_version(&json)?,
        disable_check: boolean_member(&json, "disableCheck")?,
        disable_gc: boolean_member(&json, "disableGC")?,
        only_inlined: boolean_member(&json, "loadOnlyInlinedPlugins")?,
        plugins: Vec::new(),
        bytes: bytes.to_vec(),
        is_single: false,
    };
    let entries = match exact_member(&json, "plugins") {
        None if list.only_inlined => {
            let why = "`loadOnlyInlinedPlugins` is true, and no 'plugins' key";
            return Err(Error::config(why));
        }
        None => Vec::new(),
        Some(Json::Array(entries)) if entries.is_empty() => {
            return Err(Error::config("no plugins in list")
                .with_details("add a plugin to \"plugins\", or remove the file"));
        }
        Some(Json::Array(entries)) => entries.clone(),
        Some(other) => {
            return Err(wrong_type_error("invalid 'plugins' type", other)
                .with_details("put the plugins into brackets, [...]"));
        }
    };
    Ok((list, entries))
}

fn wrong_type_error(what: &str, value: &Json) -> Error {
    Error::config(format!("{what} {}", value.go_type()))
}

/// The value of a key, case-sensitively.
fn exact_member<'a>(json: &'a Json, key: &str) -> Option<&'a Json> {
    let Json::Object(members) = json else { return None };
    members.iter().rfind(|(k, _)| k == key).map(|(_, value)| value)
}

fn boolean_member(json: &Json, key: &str) -> Result<bool> {
    match exact_member(json, key) {
        None => Ok(false),
        Some(Json::Bool(value)) => Ok(*value),
        Some(Json::String(text)) => match text.to_lowercase().as_str() {
            "true" => Ok(true),
            "false" => Ok(false),
            other => Err(Error::config(format!("invalid value \"{other}\" for {key}"))),
        },
        Some(other) => Err(Error::config(format!("invalid type {} for {key}", other.go_type()))
            .with_details("write true or false")),
    }
}

/// The version to use: the highest known of `cniVersions` and `cniVersion`, as libcni chooses it.
fn choose_version(json: &Json) -> Result<String> {
    let single = match exact_member(json, "cniVersion") {
        None => "",
        Some(Json::String(text)) => text,
        Some(other) => {
            return Err(wrong_type_error("invalid cniVersion type", other)
                .with_details(quoting_remedy(other)));
        }
    };
    let choice = match exact_member(json, "cniVersions") {
        None => return Ok(single.to_owned()),
        Some(Json::Array(choice)) => choice,
        Some(other) => {
            return Err(wrong_type_error("invalid type for cniVersions:", other)
                .with_details("put the versions into brackets, [...]"));
        }
    };
    let mut usable = Vec::new();
    for (i, entry) in choice.iter().enumerate() {
        let Json::String(text) = entry else {
            let what = format!("invalid type for cniVersions index {i}:");
            return Err(wrong_type_error(&what, entry).with_details(quoting_remedy(entry)));
        };
        usable.push((
            text.parse::<VersionNumber>()
                .context(|| format!("invalid cniVersions entry {text} at index {i}"))?,
            text.as_str(),
        ));
    }
    if !single.is_empty() {
        usable.push((
            single.parse::<VersionNumber>().context(|| format!("invalid cniVersion {single}"))?,
            single,
        ));
    }
    usable.retain(|(version, _)| *version <= SpecVersion::NEWEST.into());
    Ok(usable.iter().max().map_or(single, |(_, text)| text).to_owned())
}
