//! A network's configuration: an ordered list of plugins under one name and version.

use std::path::{Path, PathBuf};

use super::conf::{self, PluginConf, conf_files};
use crate::cni::json::{Json, compact};
use crate::cni::names;
use crate::cni::version::{SpecVersion, Version};
use crate::error::{Error, Result};
use crate::log;

/// A parsed network configuration.
#[derive(Clone, Debug)]
pub struct NetworkList {
    /// `name`. Checked when the network is used, not when it is read.
    pub name: String,
    /// The version that the plugins are run with: of `cniVersions` and `cniVersion` the highest
    /// that this library knows; `cniVersion` as it is written if there is no choice.
    pub cni_version: String,
    /// `disableCheck`: CHECK does nothing.
    pub disable_check: bool,
    /// `disableGC`: GC does nothing.
    pub disable_gc: bool,
    /// `loadOnlyInlinedPlugins`: the folder beside the file is not looked into.
    pub only_inlined: bool,
    /// The plugins, in the order of ADD.
    pub plugins: Vec<PluginConf>,
    pub(super) bytes: Vec<u8>,
}

impl NetworkList {
    /// Parses a list. Keys of the top level must be written exactly; unknown ones stay in the
    /// bytes but reach no plugin. Plugins in a folder are not looked for.
    ///
    /// Errors: `error parsing configuration list: <reason>`, and for an entry of `plugins`
    /// `failed to parse plugin config <i>: <reason>`.
    pub fn from_bytes(bytes: &[u8]) -> Result<NetworkList> {
        let json = conf::parse(bytes).map_err(wrong)?;
        NetworkList::from_json(&json, bytes)
    }

    /// Parses a list and appends the plugins of the folder beside it that has the network's name
    /// (`*.conf`, sorted), unless the list says `loadOnlyInlinedPlugins`. The bytes of a list
    /// with such plugins contain them, so that the cached configuration is complete.
    ///
    /// Errors: as [`NetworkList::from_bytes`], `error reading <file>: ...`, and
    /// `no plugin configs found`.
    pub fn from_file(path: &Path) -> Result<NetworkList> {
        let mut list = NetworkList::from_bytes(&conf::read(path)?)?;
        // A name that is none must not become a path: `../x`, or the directory itself.
        if !list.only_inlined && names::is_identifier(&list.name) {
            let folder = path.parent().unwrap_or(Path::new(".")).join(&list.name);
            list.append(&folder)?;
        }
        if list.plugins.is_empty() {
            return Err(Error::config("no plugin configs found")
                .with_details("a .conflist file has the list \"plugins\"; the file of a single plugin is called .conf"));
        }
        Ok(list)
    }

    /// A list of the one plugin, under the plugin's own name and version.
    pub fn from_plugin(plugin: &PluginConf) -> Result<NetworkList> {
        let json = Json::Object(vec![
            ("cniVersion".to_owned(), plugin.cni_version.as_str().into()),
            ("name".to_owned(), plugin.name.as_str().into()),
            ("plugins".to_owned(), Json::Array(vec![plugin.json.clone()])),
        ]);
        NetworkList::from_bytes(compact(&json.normalised().sorted())?.as_bytes())
    }

    /// The network called `name` in the directory `dir`: of the `.conflist` files, sorted, the
    /// first with this name; else of the `.conf` and `.json` files, which hold a single plugin.
    ///
    /// A file that cannot be loaded is passed over; if no other has the name, its error is the
    /// one returned. Else: `no net configurations found in <dir>`,
    /// `no net configuration with name "<name>" in <dir>`; the details list the names there are.
    pub fn load(dir: &Path, name: &str) -> Result<NetworkList> {
        let lists = conf_files(dir, &["conflist"])?;
        let singles = conf_files(dir, &["conf", "json"])?;
        let nothing = lists.is_empty() && singles.is_empty();
        let mut search = Search::default();
        let found = search
            .first(&lists, name, NetworkList::from_file)
            .or_else(|| search.first(&singles, name, NetworkList::from_single_file));
        match (found, search.error) {
            (Some(list), _) => Ok(list),
            (None, Some(error)) => Err(error),
            (None, None) if nothing => {
                let msg = format!("no net configurations found in {}", dir.display());
                Err(Error::config(msg).with_details(
                    "put a *.conflist, *.conf or *.json file there, or choose the directory with --net-conf-path or NETCONFPATH",
                ))
            }
            (None, None) => {
                let dir = dir.display();
                let msg = format!("no net configuration with name \"{name}\" in {dir}");
                let order = if name.contains('/') {
                    "the network comes first, then the namespace; "
                } else {
                    ""
                };
                Err(Error::config(msg)
                    .with_details(format!("{order}there are: {}", search.names.join(", "))))
            }
        }
    }

    /// The document's bytes as they were read; with the plugins of a folder, if there are any.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The one plugin as it is, for the operations on a single plugin.
    pub(super) fn of_single(plugin: &PluginConf) -> NetworkList {
        NetworkList {
            name: plugin.name.clone(),
            cni_version: plugin.cni_version.clone(),
            disable_check: false,
            disable_gc: false,
            only_inlined: true,
            plugins: vec![plugin.clone()],
            bytes: plugin.bytes.clone(),
        }
    }

    /// Whether the network's version is at least `version`; code 6 if it is none.
    pub(super) fn at_least(&self, version: SpecVersion) -> Result<bool> {
        Ok(self.cni_version.parse::<Version>()? >= version.into())
    }

    /// The version that a result of this network has if it says none.
    pub(super) fn result_version(&self) -> SpecVersion {
        // A plugin that answers at all in an unknown version means the newest one.
        SpecVersion::exact(&self.cni_version).unwrap_or(SpecVersion::NEWEST)
    }

    /// The network of a file: a list if its name ends in `.conflist`, else one plugin.
    pub(crate) fn from_any_file(path: &Path) -> Result<NetworkList> {
        if is_list(path) {
            NetworkList::from_file(path)
        } else {
            NetworkList::from_single_file(path)
        }
    }

    fn from_single_file(path: &Path) -> Result<NetworkList> {
        NetworkList::from_plugin(&PluginConf::from_file(path)?)
    }

    fn from_json(json: &Json, bytes: &[u8]) -> Result<NetworkList> {
        let Json::Object(_) = json else {
            return Err(wrong(Error::config(format!("{} is not an object", json.go_type()))));
        };
        let name = match exact(json, "name") {
            None => return Err(wrong(Error::config("no name"))),
            Some(Json::String(name)) => name.clone(),
            Some(other) => return Err(wrong_type("invalid name type", other)),
        };
        let cni_version = version(json)?;
        let disable_check = boolean(json, "disableCheck")?;
        let disable_gc = boolean(json, "disableGC")?;
        let only_inlined = boolean(json, "loadOnlyInlinedPlugins")?;
        let plugins = plugins(json, only_inlined)?;
        let bytes = bytes.to_vec();
        Ok(NetworkList {
            name,
            cni_version,
            disable_check,
            disable_gc,
            only_inlined,
            plugins,
            bytes,
        })
    }

    fn append(&mut self, folder: &Path) -> Result<()> {
        let files = conf_files(folder, &["conf"])?;
        if files.is_empty() {
            return Ok(());
        }
        for file in &files {
            self.plugins.push(PluginConf::from_file(file)?);
            log::debug(format_args!("network {}: plugin from {}", self.name, file.display()));
        }
        let mut json = Json::parse(&self.bytes).map_err(Error::internal)?;
        let plugins = self.plugins.iter().map(|plugin| plugin.json.clone()).collect();
        json.set("plugins", Json::Array(plugins));
        self.bytes = compact(&json)?.into_bytes();
        Ok(())
    }
}

/// What a search by name has seen on its way.
#[derive(Default)]
struct Search {
    names: Vec<String>,
    error: Option<Error>,
}

impl Search {
    fn first(
        &mut self,
        files: &[PathBuf],
        name: &str,
        parse: fn(&Path) -> Result<NetworkList>,
    ) -> Option<NetworkList> {
        for file in files {
            match parse(file) {
                Ok(list) if list.name == name => return Some(list),
                Ok(list) => self.names.push(list.name),
                Err(error) => self.remember(error, file),
            }
        }
        None
    }

    fn remember(&mut self, error: Error, file: &Path) {
        if self.error.is_some() {
            return;
        }
        let file = format!("in {}", file.display());
        let details =
            if error.details().is_empty() { file } else { format!("{}; {file}", error.details()) };
        self.error = Some(error.with_details(details));
    }
}

/// Whether a file of this name holds a list.
pub(crate) fn is_list(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "conflist")
}

fn wrong(error: Error) -> Error {
    error.context("error parsing configuration list")
}

fn wrong_type(what: &str, value: &Json) -> Error {
    wrong(Error::config(format!("{what} {}", value.go_type())))
}

/// The value of a key written exactly so.
fn exact<'a>(json: &'a Json, key: &str) -> Option<&'a Json> {
    let Json::Object(members) = json else { return None };
    members.iter().rfind(|(k, _)| k == key).map(|(_, value)| value)
}

fn boolean(json: &Json, key: &str) -> Result<bool> {
    match exact(json, key) {
        None => Ok(false),
        Some(Json::Bool(value)) => Ok(*value),
        Some(Json::String(text)) => match text.to_lowercase().as_str() {
            "true" => Ok(true),
            "false" => Ok(false),
            other => Err(wrong(Error::config(format!("invalid value \"{other}\" for {key}")))),
        },
        Some(other) => {
            Err(wrong(Error::config(format!("invalid type {} for {key}", other.go_type()))))
        }
    }
}

/// The version to use: runtime reference, section 3.
fn version(json: &Json) -> Result<String> {
    let single = match exact(json, "cniVersion") {
        None => "",
        Some(Json::String(text)) => text,
        Some(other) => return Err(wrong_type("invalid cniVersion type", other)),
    };
    let choice = match exact(json, "cniVersions") {
        None => return Ok(single.to_owned()),
        Some(Json::Array(choice)) => choice,
        Some(other) => return Err(wrong_type("invalid type for cniVersions:", other)),
    };
    let mut usable = Vec::new();
    for (i, entry) in choice.iter().enumerate() {
        let Json::String(text) = entry else {
            let what = format!("invalid type for cniVersions index {i}:");
            return Err(wrong_type(&what, entry));
        };
        let context = || format!("invalid cniVersions entry {text} at index {i}");
        let version: Version = text.parse().map_err(|e: Error| wrong(e.context(context())))?;
        usable.push((version, text.as_str()));
    }
    if !single.is_empty() {
        let context = || format!("invalid cniVersion {single}");
        let version: Version = single.parse().map_err(|e: Error| wrong(e.context(context())))?;
        usable.push((version, single));
    }
    usable.retain(|(version, _)| *version <= SpecVersion::NEWEST.into());
    Ok(usable.iter().max().map_or(single, |(_, text)| text).to_owned())
}

fn plugins(json: &Json, only_inlined: bool) -> Result<Vec<PluginConf>> {
    let entries = match exact(json, "plugins") {
        None if only_inlined => {
            let why = "`loadOnlyInlinedPlugins` is true, and no 'plugins' key";
            return Err(wrong(Error::config(why)));
        }
        None => return Ok(Vec::new()),
        Some(Json::Array(entries)) if entries.is_empty() => {
            return Err(wrong(Error::config("no plugins in list"))
                .with_details("add a plugin to \"plugins\", or remove the file"));
        }
        Some(Json::Array(entries)) => entries,
        Some(other) => {
            return Err(wrong_type("invalid 'plugins' type", other)
                .with_details("put the plugins into brackets, [...]"));
        }
    };
    let parse = |(i, entry): (usize, &Json)| {
        PluginConf::from_entry(entry)
            .map_err(|e| e.context(format_args!("failed to parse plugin config {i}")))
    };
    entries.iter().enumerate().map(parse).collect()
}
