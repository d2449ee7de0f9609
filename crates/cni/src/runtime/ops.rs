//! The operations on one attachment: ADD, CHECK and DEL, of a list or of a single plugin.

use std::path::{Path, PathBuf};

use super::cache::CacheFileKey;
use super::{AttachmentParams, NetworkList, OnAddError, OnDelError, PluginConfig, Runtime};
use crate::config::ValidAttachment;
use crate::error::{Error, ErrorCode, ErrorContext, Result};
use crate::exec::{PluginCommand, read_result};
use crate::json::{Json, encode_compact};
use crate::result::CniResult;
use crate::version::SpecVersion;

/// How far an ADD has come, for its undo.
#[derive(Default)]
struct AddProgress {
    /// The number of plugins that were run.
    started: usize,
    result: Option<CniResult>,
}

impl Runtime {
    /// Attaches: runs the plugins in order, each with the result of the previous plugin, and caches
    /// the result of the last plugin. Returns this result in the version in which the plugin
    /// returned it, `None` for a network without plugins.
    ///
    /// The first failure ends the ADD: `plugin type="<type>" name="<name>" failed (add): <error>`
    /// with the plugin's code, or `failed to set network "<name>" cached result: <reason>`; see
    /// [`OnAddError`] for what remains then.
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
    /// let result = runtime.add(&network, &pod)?.unwrap_or_default();
    /// assert_eq!(result.ips[0].address.to_string(), "10.1.2.3/24");
    /// # Ok(())
    /// # }
    /// ```
    pub fn add(&self, list: &NetworkList, attach: &AttachmentParams) -> Result<Option<CniResult>> {
        // A second ADD fails because of the first ADD, which must not be undone.
        let undo = self.on_add_error == OnAddError::Undo
            && matches!(self.cached_result(list, attach), Ok(None));
        let mut progress = AddProgress::default();
        let add = |plugin| {
            let added = self.add_one_plugin(list, attach, plugin, &mut progress);
            added.map_err(|error| name_plugin_in_error(list, plugin, "add", error))
        };
        let added = list.plugins.iter().try_for_each(add).and_then(|()| {
            self.cache_result(list, attach, progress.result.as_ref())
                .context(|| format!("failed to set network \"{}\" cached result", list.name))
        });
        if let (Err(failed), true) = (&added, undo) {
            self.undo_add(list, attach, &progress, failed);
        }
        added.map(|()| progress.result)
    }

    /// As [`Runtime::add`] for one plugin under its own name and version; returns the plugin's
    /// error as it is.
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
    /// assert!(runtime.add_plugin(&plugin, &pod)?.is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub fn add_plugin(
        &self,
        plugin: &PluginConfig,
        attach: &AttachmentParams,
    ) -> Result<Option<CniResult>> {
        self.add(&NetworkList::from_single(plugin), attach)
    }

    /// Checks that the attachment is still as its ADD created it: runs the plugins in order, each
    /// with the cached result of the whole ADD. Runs nothing if the list has `disableCheck`.
    ///
    /// Errors: that of the first failing plugin, as it is;
    /// `configuration version "<v>" does not support the CHECK command` (code 1) below 0.4.0;
    /// `failed to get network "<name>" cached result: <reason>`.
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
    /// runtime.check(&network, &pod)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn check(&self, list: &NetworkList, attach: &AttachmentParams) -> Result<()> {
        if !list.is_at_least(SpecVersion::V0_4_0)? {
            let version = &list.cni_version;
            let msg =
                format!("configuration version \"{version}\" does not support the CHECK command");
            return Err(Error::new(ErrorCode::INCOMPATIBLE_VERSION, msg));
        }
        if list.disable_check {
            return Ok(());
        }
        CacheFileKey::new(&list.name, attach)?;
        let prev = self
            .cached_result(list, attach)
            .context(|| format!("failed to get network \"{}\" cached result", list.name))?;
        list.plugins.iter().try_for_each(|plugin| {
            let request = attachment_request(list, plugin, attach, prev.as_ref());
            self.call_plugin("CHECK", plugin, attach, request)
        })
    }

    /// The requests of a CHECK, in order, whatever the version: the path of each plugin that is
    /// found, and its request. The environment is the same for all. None if no result is cached.
    #[doc(hidden)]
    pub fn check_requests(
        &self,
        list: &NetworkList,
        attach: &AttachmentParams,
    ) -> Result<Vec<(PathBuf, Vec<u8>)>> {
        CacheFileKey::new(&list.name, attach)?;
        let Some(prev) = self.cached_result(list, attach)? else { return Ok(Vec::new()) };
        let found =
            list.plugins.iter().filter_map(|plugin| Some((plugin, self.find_plugin(plugin).ok()?)));
        let request =
            |plugin| encode_request(attachment_request(list, plugin, attach, Some(&prev)));
        found.map(|(plugin, path)| Ok((path, request(plugin)?))).collect()
    }

    /// As [`Runtime::check`] for one plugin under its own name and version.
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
    /// runtime.add_plugin(&plugin, &pod)?;
    /// runtime.check_plugin(&plugin, &pod)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn check_plugin(&self, plugin: &PluginConfig, attach: &AttachmentParams) -> Result<()> {
        self.check(&NetworkList::from_single(plugin), attach)
    }

    /// Detaches: runs the plugins in reverse order, each with the cached result of the ADD (from
    /// 0.4.0 on, if the cache has a readable result), then removes the attachment from the cache.
    /// Idempotent.
    ///
    /// A failure is `plugin type="<type>" name="<name>" failed (delete): <error>` with the
    /// plugin's code; [`OnDelError`] decides whether the other plugins still run. After a failure
    /// the cache file stays.
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
    /// runtime.del(&network, &pod)?;
    /// // Again, without a cached result.
    /// runtime.del(&network, &pod)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn del(&self, list: &NetworkList, attach: &AttachmentParams) -> Result<()> {
        let key = CacheFileKey::new(&list.name, attach)?;
        self.del_plugins(list, attach, &key)?;
        self.remove_cached(&key);
        Ok(())
    }

    /// As [`Runtime::del`]; the attachment stays in the cache.
    #[doc(hidden)]
    pub fn del_and_keep_cached(&self, list: &NetworkList, attach: &AttachmentParams) -> Result<()> {
        self.del_plugins(list, attach, &CacheFileKey::new(&list.name, attach)?)
    }

    fn del_plugins(
        &self,
        list: &NetworkList,
        attach: &AttachmentParams,
        key: &CacheFileKey,
    ) -> Result<()> {
        let mut prev = None;
        if list.is_at_least(SpecVersion::V0_4_0)? {
            // An unreadable cache file must not prevent the DEL.
            prev = self.cached_result(list, attach).unwrap_or_else(|error| {
                log::debug!("removed a cached result that could not be read: {error}");
                self.remove_cached(key);
                None
            });
        }
        let mut errors = Vec::new();
        for plugin in list.plugins.iter().rev() {
            let request = attachment_request(list, plugin, attach, prev.as_ref());
            if let Err(error) = self.call_plugin("DEL", plugin, attach, request) {
                errors.push(name_plugin_in_error(list, plugin, "delete", error));
                if self.on_del_error == OnDelError::Stop {
                    break;
                }
            }
        }
        Error::join_all(errors)
    }

    /// As [`Runtime::del`] for one plugin under its own name and version; returns the plugin's
    /// error as it is.
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
    /// runtime.del_plugin(&plugin, &pod)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn del_plugin(&self, plugin: &PluginConfig, attach: &AttachmentParams) -> Result<()> {
        self.del(&NetworkList::from_single(plugin), attach)
    }

    fn add_one_plugin(
        &self,
        list: &NetworkList,
        attach: &AttachmentParams,
        plugin: &PluginConfig,
        progress: &mut AddProgress,
    ) -> Result<()> {
        let path = self.find_plugin(plugin)?;
        CacheFileKey::new(&list.name, attach)?;
        let version = SpecVersion::parse_exact(&list.cni_version);
        // A plugin rejects a `prevResult` in another layout than that of the network's version.
        if let Some(version) = version
            && let Some(result) = progress.result.take()
        {
            progress.result = Some(result.convert_to(version)?);
        }
        let request = attachment_request(list, plugin, attach, progress.result.as_ref());
        progress.started += 1;
        let stdout = self.run_plugin(&path, "ADD", attach, request)?;
        // A plugin that accepts an unknown version is assumed to return the newest.
        progress.result = Some(read_result(&stdout, version.unwrap_or(SpecVersion::NEWEST))?);
        Ok(())
    }

    /// DEL for the plugins of a failed ADD, including the failed plugin, which may have left
    /// something. An error with the same text as the error of the ADD is not logged.
    fn undo_add(
        &self,
        list: &NetworkList,
        attach: &AttachmentParams,
        progress: &AddProgress,
        failed: &Error,
    ) {
        let takes_prev = list.is_at_least(SpecVersion::V0_4_0).unwrap_or(false);
        let prev = progress.result.as_ref().filter(|_| takes_prev);
        for plugin in list.plugins.iter().take(progress.started).rev() {
            let request = attachment_request(list, plugin, attach, prev);
            if let Err(error) = self.call_plugin("DEL", plugin, attach, request)
                && !failed.message().ends_with(error.message())
            {
                let kind = &plugin.plugin_type;
                log::warn!("could not undo a failed ADD: plugin type=\"{kind}\": {error}");
            }
        }
    }

    /// Finds and runs a plugin that has no result.
    pub(super) fn call_plugin(
        &self,
        command: &str,
        plugin: &PluginConfig,
        attach: &AttachmentParams,
        request: Json,
    ) -> Result<()> {
        self.run_plugin(&self.find_plugin(plugin)?, command, attach, request).map(drop)
    }

    fn find_plugin(&self, plugin: &PluginConfig) -> Result<PathBuf> {
        self.executor.find_plugin(&plugin.plugin_type, &self.plugin_dirs)
    }

    /// Runs a plugin and returns its stdout.
    fn run_plugin(
        &self,
        path: &Path,
        command: &str,
        attach: &AttachmentParams,
        request: Json,
    ) -> Result<Vec<u8>> {
        let (env, stdin) = (self.call_environment(command, attach), encode_request(request)?);
        let deadline = self.deadline;
        self.executor.run_plugin(&PluginCommand { path, env, stdin: &stdin, deadline })
    }

    /// All six variables of a call; the value of one that does not apply is empty.
    #[doc(hidden)]
    pub fn call_environment(
        &self,
        command: &str,
        attach: &AttachmentParams,
    ) -> Vec<(&'static str, String)> {
        let args: Vec<String> = attach.args.iter().map(|(k, v)| format!("{k}={v}")).collect();
        let dirs: Vec<String> =
            self.plugin_dirs.iter().map(|dir| dir.display().to_string()).collect();
        vec![
            ("CNI_COMMAND", command.to_owned()),
            ("CNI_CONTAINERID", attach.container_id.clone()),
            ("CNI_NETNS", attach.netns.clone()),
            ("CNI_IFNAME", attach.ifname.clone()),
            ("CNI_ARGS", args.join(";")),
            ("CNI_PATH", dirs.join(":")),
        ]
    }
}

/// Adds the plugin of a list to the message of its error, and keeps code and details.
fn name_plugin_in_error(
    list: &NetworkList,
    plugin: &PluginConfig,
    verb: &str,
    error: Error,
) -> Error {
    if list.is_single {
        return error;
    }
    let kind = &plugin.plugin_type;
    let name = match plugin.name.as_str() {
        "" => String::new(),
        name => format!(" name=\"{name}\""),
    };
    let msg = format!("plugin type=\"{kind}\"{name} failed ({verb}): {}", error.message());
    Error::from_other_plugin(error.code(), msg, error.details())
}

/// The request of ADD, CHECK and DEL: the plugin's configuration with the name and version of the
/// network, the previous result, and the capability arguments that the plugin asks for. The last
/// two replace static values of the file; without them the static values stay.
pub(super) fn attachment_request(
    list: &NetworkList,
    plugin: &PluginConfig,
    attach: &AttachmentParams,
    prev: Option<&CniResult>,
) -> Json {
    let mut request = common_request(list, plugin);
    if let Some(prev) = prev {
        request.set_member("prevResult", prev.to_json());
    }
    let given = |name: &str| attach.capability_args.iter().rfind(|(key, _)| key == name).cloned();
    let wanted: Vec<_> = plugin.wanted_capabilities().filter_map(given).collect();
    if !wanted.is_empty() {
        request.set_member("runtimeConfig", Json::Object(wanted));
    }
    request
}

/// The request of GC and STATUS. The valid attachments are written under two keys, that of the
/// specification's tag 1.1.0 and the later one. Without a list neither key is written: an absent
/// key does not mean that no attachment is valid.
pub(super) fn network_request(
    list: &NetworkList,
    plugin: &PluginConfig,
    valid: Option<&[ValidAttachment]>,
) -> Json {
    let mut request = common_request(list, plugin);
    if let Some(valid) = valid {
        let valid = Json::Array(
            valid
                .iter()
                .map(|attachment| {
                    Json::Object(vec![
                        ("containerID".to_owned(), attachment.container_id.as_str().into()),
                        ("ifname".to_owned(), attachment.ifname.as_str().into()),
                    ])
                })
                .collect(),
        );
        request.set_member("cni.dev/attachments", valid.clone());
        request.set_member("cni.dev/valid-attachments", valid);
    }
    request
}

fn common_request(list: &NetworkList, plugin: &PluginConfig) -> Json {
    let mut request = plugin.json.clone();
    request.set_member("name", list.name.as_str().into());
    request.set_member("cniVersion", list.cni_version.as_str().into());
    request
}

/// Encodes a request, compact and with sorted keys. Integral floats become integers, as the
/// reference writes them: Go plugins accept nothing else in an integer field.
pub(super) fn encode_request(request: Json) -> Result<Vec<u8>> {
    encode_compact(&request.without_repeated_keys().with_normalised_numbers().with_sorted_keys())
        .map(String::into_bytes)
}
