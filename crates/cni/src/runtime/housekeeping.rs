//! The operations on a network as a whole: GC, STATUS and the validation of its plugins.

use super::{AttachmentParams, NetworkList, PluginConfig, Runtime, ops};
use crate::config::ValidAttachment;
use crate::error::{Error, ErrorCode, Result};
use crate::exec::{self, VersionInfo};
use crate::names::NetworkName;
use crate::sort::sort_items;
use crate::version::SpecVersion;

impl Runtime {
    /// Removes the remains of attachments that are not in `valid`: a DEL for each such attachment
    /// in the cache, with the configuration and the arguments of its ADD, then (from 1.1.0 on) the
    /// verb GC for every plugin, with the list, for attachments that are not in the cache.
    ///
    /// `None` instead of a list: every cached attachment of the network is removed, and the
    /// plugins receive no list. An empty list means
    /// that no attachment is valid. Does nothing if the list has `disableGC`.
    ///
    /// Continues after failures and reports them all, one per line:
    /// `failed to delete stale attachment <id> <ifname>: <reason>`,
    /// `failed to GC plugin <type>: <reason>`.
    ///
    /// ```
    /// # use cnibox_cni::exec::FunctionExecutor;
    /// # use cnibox_cni::runtime::{AttachmentParams, NetworkList, PluginConfig, Runtime};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let cache = tempfile::tempdir()?;
    /// # let plugins = FunctionExecutor(|_| Ok(br#"{"cniVersion": "1.1.0", "supportedVersions": ["1.1.0"],
    /// #     "ips": [{"address": "10.1.2.3/24"}]}"#.to_vec()));
    /// # let runtime = Runtime { cache_dir: cache.path().into(), executor: Box::new(plugins), ..Runtime::new(Vec::new()) };
    /// # let network = NetworkList::from_bytes(br#"{"cniVersion": "1.1.0", "name": "pods",
    /// #     "plugins": [{"type": "ptp", "capabilities": {"mac": true}}]}"#)?;
    /// # let plugin = PluginConfig::from_bytes(br#"{"cniVersion": "1.1.0", "name": "pods", "type": "ptp"}"#)?;
    /// # let pod = AttachmentParams::new("3f2a", "/run/netns/web", "eth0");
    /// runtime.add(&network, &pod)?;
    /// // No attachment is valid.
    /// runtime.gc(&network, Some(&[]))?;
    /// assert_eq!(runtime.cached_attachments("")?, []);
    /// # Ok(())
    /// # }
    /// ```
    pub fn gc(&self, list: &NetworkList, valid: Option<&[ValidAttachment]>) -> Result<()> {
        if list.disable_gc {
            return Ok(());
        }
        NetworkName::parse(&list.name)?;
        let has_verb = list.is_at_least(SpecVersion::V1_1_0)?;
        let mut errors = Vec::new();
        let cached = self.cached_attachments("").unwrap_or_else(|error| {
            errors.push(error.context("read the cached attachments"));
            Vec::new()
        });
        let is_stale = |attach: &AttachmentParams| {
            !valid.unwrap_or_default().iter().any(|valid| {
                valid.container_id == attach.container_id && valid.ifname == attach.ifname
            })
        };
        for stale in cached.iter().filter(|c| c.network == list.name && is_stale(&c.attach)) {
            let at_add = stale.network_list();
            if let Err(error) = self.del(at_add.as_ref().unwrap_or(list), &stale.attach) {
                let AttachmentParams { container_id, ifname, .. } = &stale.attach;
                let what = format!("failed to delete stale attachment {container_id} {ifname}");
                errors.push(Error::new(error.code(), format!("{what}: {error}")));
            }
        }
        for plugin in list.plugins.iter().filter(|_| has_verb) {
            let request = ops::network_request(list, plugin, valid);
            let none = AttachmentParams::default();
            if let Err(error) = self.call_plugin("GC", plugin, &none, request) {
                let what = format!("failed to GC plugin {}", plugin.plugin_type);
                errors.push(Error::new(error.code(), format!("{what}: {error}")));
            }
        }
        join_errors(&errors, "\n")
            .map_or(Ok(()), |(code, text)| Err(Error::from_other_plugin(code, text, "")))
    }

    /// Asks every plugin in order whether it could serve an ADD now. Returns the first error as it
    /// is: code 50 or 51 usually. Below 1.1.0 no plugin is asked.
    ///
    /// ```
    /// # use cnibox_cni::exec::FunctionExecutor;
    /// # use cnibox_cni::runtime::{AttachmentParams, NetworkList, PluginConfig, Runtime};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let cache = tempfile::tempdir()?;
    /// # let plugins = FunctionExecutor(|_| Ok(br#"{"cniVersion": "1.1.0", "supportedVersions": ["1.1.0"],
    /// #     "ips": [{"address": "10.1.2.3/24"}]}"#.to_vec()));
    /// # let runtime = Runtime { cache_dir: cache.path().into(), executor: Box::new(plugins), ..Runtime::new(Vec::new()) };
    /// # let network = NetworkList::from_bytes(br#"{"cniVersion": "1.1.0", "name": "pods",
    /// #     "plugins": [{"type": "ptp", "capabilities": {"mac": true}}]}"#)?;
    /// # let plugin = PluginConfig::from_bytes(br#"{"cniVersion": "1.1.0", "name": "pods", "type": "ptp"}"#)?;
    /// # let pod = AttachmentParams::new("3f2a", "/run/netns/web", "eth0");
    /// runtime.status(&network)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn status(&self, list: &NetworkList) -> Result<()> {
        if !list.is_at_least(SpecVersion::V1_1_0)? {
            return Ok(());
        }
        list.plugins.iter().try_for_each(|plugin| {
            let request = ops::network_request(list, plugin, None);
            self.call_plugin("STATUS", plugin, &AttachmentParams::default(), request)
        })
    }

    /// Finds every plugin and compares its versions with that of the network. Returns the
    /// capabilities that any of the plugins asks for, sorted.
    ///
    /// Errors of all plugins at once, `[<e1> <e2>]`: not found, or
    /// `plugin <type> does not support config version "<v>"`.
    ///
    /// ```
    /// # use cnibox_cni::exec::FunctionExecutor;
    /// # use cnibox_cni::runtime::{AttachmentParams, NetworkList, PluginConfig, Runtime};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let cache = tempfile::tempdir()?;
    /// # let plugins = FunctionExecutor(|_| Ok(br#"{"cniVersion": "1.1.0", "supportedVersions": ["1.1.0"],
    /// #     "ips": [{"address": "10.1.2.3/24"}]}"#.to_vec()));
    /// # let runtime = Runtime { cache_dir: cache.path().into(), executor: Box::new(plugins), ..Runtime::new(Vec::new()) };
    /// # let network = NetworkList::from_bytes(br#"{"cniVersion": "1.1.0", "name": "pods",
    /// #     "plugins": [{"type": "ptp", "capabilities": {"mac": true}}]}"#)?;
    /// # let plugin = PluginConfig::from_bytes(br#"{"cniVersion": "1.1.0", "name": "pods", "type": "ptp"}"#)?;
    /// # let pod = AttachmentParams::new("3f2a", "/run/netns/web", "eth0");
    /// assert_eq!(runtime.validate(&network)?, ["mac"]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn validate(&self, list: &NetworkList) -> Result<Vec<String>> {
        let errors: Vec<Error> = list
            .plugins
            .iter()
            .filter_map(|plugin| self.validate_version(plugin, &list.cni_version).err())
            .collect();
        match join_errors(&errors, " ") {
            Some((code, text)) => Err(Error::from_other_plugin(code, format!("[{text}]"), "")),
            None => Ok(capability_names(&list.plugins)),
        }
    }

    /// As [`Runtime::validate`] for one plugin and its own version; returns its error as it is.
    ///
    /// ```
    /// # use cnibox_cni::exec::FunctionExecutor;
    /// # use cnibox_cni::runtime::{AttachmentParams, NetworkList, PluginConfig, Runtime};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let cache = tempfile::tempdir()?;
    /// # let plugins = FunctionExecutor(|_| Ok(br#"{"cniVersion": "1.1.0", "supportedVersions": ["1.1.0"],
    /// #     "ips": [{"address": "10.1.2.3/24"}]}"#.to_vec()));
    /// # let runtime = Runtime { cache_dir: cache.path().into(), executor: Box::new(plugins), ..Runtime::new(Vec::new()) };
    /// # let network = NetworkList::from_bytes(br#"{"cniVersion": "1.1.0", "name": "pods",
    /// #     "plugins": [{"type": "ptp", "capabilities": {"mac": true}}]}"#)?;
    /// # let plugin = PluginConfig::from_bytes(br#"{"cniVersion": "1.1.0", "name": "pods", "type": "ptp"}"#)?;
    /// # let pod = AttachmentParams::new("3f2a", "/run/netns/web", "eth0");
    /// assert!(runtime.validate_plugin(&plugin)?.is_empty());
    /// # Ok(())
    /// # }
    /// ```
    pub fn validate_plugin(&self, plugin: &PluginConfig) -> Result<Vec<String>> {
        self.validate_version(plugin, &plugin.cni_version)?;
        Ok(capability_names(std::slice::from_ref(plugin)))
    }

    /// The versions that the plugin called `plugin_type` supports.
    ///
    /// ```
    /// # use cnibox_cni::exec::FunctionExecutor;
    /// # use cnibox_cni::runtime::{AttachmentParams, NetworkList, PluginConfig, Runtime};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let cache = tempfile::tempdir()?;
    /// # let plugins = FunctionExecutor(|_| Ok(br#"{"cniVersion": "1.1.0", "supportedVersions": ["1.1.0"],
    /// #     "ips": [{"address": "10.1.2.3/24"}]}"#.to_vec()));
    /// # let runtime = Runtime { cache_dir: cache.path().into(), executor: Box::new(plugins), ..Runtime::new(Vec::new()) };
    /// # let network = NetworkList::from_bytes(br#"{"cniVersion": "1.1.0", "name": "pods",
    /// #     "plugins": [{"type": "ptp", "capabilities": {"mac": true}}]}"#)?;
    /// # let plugin = PluginConfig::from_bytes(br#"{"cniVersion": "1.1.0", "name": "pods", "type": "ptp"}"#)?;
    /// # let pod = AttachmentParams::new("3f2a", "/run/netns/web", "eth0");
    /// assert_eq!(runtime.version_info("ptp")?.supported_versions, ["1.1.0"]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn version_info(&self, plugin_type: &str) -> Result<VersionInfo> {
        let path = self.executor.find_plugin(plugin_type, &self.plugin_dirs)?;
        exec::query_version_info(self.executor.as_ref(), &path, self.deadline)
    }

    fn validate_version(&self, plugin: &PluginConfig, version: &str) -> Result<()> {
        let kind = &plugin.plugin_type;
        if self.version_info(kind)?.supports_version(version) {
            return Ok(());
        }
        let version = if version.is_empty() { "0.1.0" } else { version };
        let msg = format!("plugin {kind} does not support config version \"{version}\"");
        Err(Error::new(ErrorCode::INCOMPATIBLE_VERSION, msg))
    }
}

fn capability_names(plugins: &[PluginConfig]) -> Vec<String> {
    let wanted = plugins.iter().flat_map(PluginConfig::wanted_capabilities);
    let mut names: Vec<String> = wanted.map(str::to_owned).collect();
    sort_items(&mut names);
    names.dedup();
    names
}

/// The code of the first error, and all texts.
fn join_errors(errors: &[Error], separator: &str) -> Option<(ErrorCode, String)> {
    let texts: Vec<String> = errors.iter().map(Error::to_string).collect();
    errors.first().map(|first| (first.code(), texts.join(separator)))
}
