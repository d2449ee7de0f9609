//! The cache of attachments: the result, the configuration and the arguments of each ADD, until
//! its DEL.
//!
//! One file `<cache dir>/results/<network>-<container id>-<ifname>` (0600 in directories 0700),
//! in the reference's format `cniCacheV1`: compact JSON with `kind`, `containerId`, `config`
//! (base64), `ifName`, `networkName`, `netns`, `cniArgs`, `capabilityArgs`, `result`. Programs
//! built on libcni read these files, and this module reads theirs, including those from before
//! configurations were cached, which are bare results.
//!
//! In addition, files are replaced atomically; an empty file, which the crash of another writer
//! may leave, counts as missing; the names are checked before they become a path. The three names
//! are joined with `-` and may contain it, so two attachments can have the same file name; the
//! fields in the file decide to which attachment the file belongs. The second attachment, and an
//! attachment whose name is too long for a file, gets the name `<sha512 of the three>.hashed`.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha512};

use super::{AttachmentParams, NetworkList, PluginConfig, Runtime};
use crate::error::{Error, ErrorCode, ErrorContext, Result};
use crate::files;
use crate::files::atomic::{self, AtomicWriter, Durability};
use crate::json::{Json, encode_compact};
use crate::names::{ContainerId, InterfaceName, NetworkName};
use crate::result::CniResult;
use crate::sort::sort_items;
use crate::version::SpecVersion;

const KIND: &str = "cniCacheV1";
/// Limit of a file's size in bytes: a configuration in base64, and a result, of the maximum size
/// each.
const MAX_BYTES: usize = 40 << 20;
/// The longest file name in bytes (limits.h).
const NAME_MAX: usize = 255;
/// The suffix of hashed names. Other names end with the name of an interface.
const HASHED: &str = ".hashed";

/// An attachment as the cache stores it.
#[derive(Clone, Debug, PartialEq)]
pub struct CachedAttachment {
    /// The name of the network.
    pub network: String,
    /// The configuration's bytes at ADD; empty in files of old releases of libcni.
    pub config: Vec<u8>,
    /// Container, namespace (empty in old files), interface and arguments.
    pub attach: AttachmentParams,
    /// When the result of ADD was written, if the file system tells.
    pub written: Option<SystemTime>,
}

impl CachedAttachment {
    /// The network at ADD, if it is in the cache.
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
    /// let at_add = runtime.cached_attachments("3f2a")?[0].network_list();
    /// assert_eq!(at_add.map(|network| network.name).as_deref(), Some("pods"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn network_list(&self) -> Option<NetworkList> {
        let list = NetworkList::from_bytes(&self.config).ok()?;
        let list = if list.plugins.is_empty() {
            let single = NetworkList::from_single(&PluginConfig::from_bytes(&self.config).ok()?);
            NetworkList { is_single: false, ..single }
        } else {
            list
        };
        Some(list).filter(|list| list.name == self.network)
    }
}

/// What identifies a cache file: the checked names of network, container and interface.
pub(super) struct CacheFileKey([String; 3]);

impl CacheFileKey {
    /// Checks all three names, in the order of the reference's ADD.
    pub(super) fn new(network: &str, attach: &AttachmentParams) -> Result<CacheFileKey> {
        let (container_id, ifname) = (&attach.container_id, &attach.ifname);
        ContainerId::parse(container_id)?;
        NetworkName::parse(network)?;
        InterfaceName::parse(ifname)?;
        Ok(CacheFileKey([network.to_owned(), container_id.clone(), ifname.clone()]))
    }

    /// As [`CacheFileKey::new`], with the reference's message for a missing name in cache
    /// operations.
    fn from_complete_names(network: &str, attach: &AttachmentParams) -> Result<CacheFileKey> {
        let (id, ifname) = (&attach.container_id, &attach.ifname);
        if network.is_empty() || id.is_empty() || ifname.is_empty() {
            return Err(Error::config(format!(
                "cache file path requires network name (\"{network}\"), container ID (\"{id}\"), \
                 and interface name (\"{ifname}\")"
            )));
        }
        CacheFileKey::new(network, attach)
    }

    fn plain_name(&self) -> String {
        self.0.join("-")
    }

    /// Unambiguous, since no name contains a `/`.
    fn hashed_name(&self) -> String {
        encode_hex(&Sha512::digest(self.0.join("/"))[..20]) + HASHED
    }

    /// Whether the file belongs to the attachment. A bare result does not name its attachment.
    fn owns_file(&self, file: &Json) -> bool {
        let names = ["networkName", "containerId", "ifName"].map(|key| text_member(file, key));
        file_kind(file) != KIND || names == self.0
    }
}

impl Runtime {
    /// The directory of the files.
    ///
    /// ```
    /// # use cnibox_cni::runtime::Runtime;
    /// assert_eq!(Runtime::new(Vec::new()).results_dir().to_str(), Some("/var/lib/cni/results"));
    /// ```
    pub fn results_dir(&self) -> PathBuf {
        self.cache_dir.join("results")
    }

    /// Caches a successful ADD.
    pub(super) fn cache_result(
        &self,
        list: &NetworkList,
        attach: &AttachmentParams,
        result: Option<&CniResult>,
    ) -> Result<()> {
        let key = CacheFileKey::from_complete_names(&list.name, attach)?;
        let results = self.results_dir();
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&results);
        created.map_err(|cause| Error::io(format_args!("mkdir {}", results.display()), &cause))?;
        let bytes = encode_compact(&cache_file_content(list, attach, result))?;
        let [plain, hashed] = self.cache_file_paths(&key);
        let is_foreign = files::read_regular_file(&plain, MAX_BYTES)
            .ok()
            .and_then(|bytes| Json::parse(&bytes).ok())
            .is_some_and(|file| !key.owns_file(&file));
        let path = if key.plain_name().len() > NAME_MAX || is_foreign { hashed } else { plain };
        let writer = AtomicWriter::with_unique_name(&path, Durability::Synced);
        Ok(writer.replace_file(&path, bytes.as_bytes(), 0o600)?)
    }

    /// Removes the attachment from the cache. Errors are ignored: the attachment itself no longer
    /// exists.
    pub(super) fn remove_cached(&self, key: &CacheFileKey) {
        for path in self.cache_file_paths(key) {
            let Ok(bytes) = files::read_regular_file(&path, MAX_BYTES) else { continue };
            // An empty or malformed file does not name its attachment.
            if Json::parse(&bytes).map_or(true, |file| key.owns_file(&file)) {
                drop(fs::remove_file(path));
            }
        }
    }

    /// The result of the attachment's ADD in the network's version; `None` if none is cached.
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
    /// assert_eq!(runtime.cached_result(&network, &pod)?, None);
    /// let added = runtime.add(&network, &pod)?;
    /// assert_eq!(runtime.cached_result(&network, &pod)?, added);
    /// # Ok(())
    /// # }
    /// ```
    pub fn cached_result(
        &self,
        list: &NetworkList,
        attach: &AttachmentParams,
    ) -> Result<Option<CniResult>> {
        let key = CacheFileKey::from_complete_names(&list.name, attach)?;
        let Some(file) = self.read_cache_file(&key, "decoding version from network config")? else {
            return Ok(None);
        };
        let json = if file_kind(&file) == KIND {
            file.get_present_member("result").cloned().unwrap_or(Json::Object(Vec::new()))
        } else {
            file
        };
        let result = CniResult::decode(&json, SpecVersion::V0_1_0)?;
        let wanted = &list.cni_version;
        SpecVersion::parse_exact(wanted)
            .ok_or_else(|| {
                let from = result.version;
                Error::internal(format!("no converter for CNI result version {from} to {wanted}"))
            })
            .and_then(|version| result.convert_to(version))
            .context(|| format!("failed to convert cached result to config version \"{wanted}\""))
            .map(Some)
    }

    /// The configuration with which the attachment was made, and `attach` with the arguments of its
    /// ADD: `CNI_ARGS` if there were any, capability arguments always; the namespace stays that
    /// of `attach`. `None` if nothing is cached. DEL with these undoes exactly what ADD did.
    ///
    /// Errors: `failed to unmarshal cached network "<name>" config: <reason>`,
    /// `read cached network "<name>" config has wrong kind: <kind>`.
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
    /// let (config, _) = runtime.cached_config("pods", &pod)?.unwrap_or_default();
    /// assert_eq!(config, network.bytes());
    /// # Ok(())
    /// # }
    /// ```
    pub fn cached_config(
        &self,
        network: &str,
        attach: &AttachmentParams,
    ) -> Result<Option<(Vec<u8>, AttachmentParams)>> {
        let key = CacheFileKey::from_complete_names(network, attach)?;
        let what = format!("failed to unmarshal cached network \"{network}\" config");
        let Some(file) = self.read_cache_file(&key, &what)? else { return Ok(None) };
        if file_kind(&file) != KIND {
            let kind = file_kind(&file);
            let msg = format!("read cached network \"{network}\" config has wrong kind: {kind}");
            return Err(Error::new(ErrorCode::DECODE, msg));
        }
        let CachedAttachment { config, attach: cached, .. } =
            decode_attachment(&file).context(|| what)?;
        let args = if cached.args.is_empty() { attach.args.clone() } else { cached.args };
        let capability_args = cached.capability_args;
        Ok(Some((config, AttachmentParams { args, capability_args, ..attach.clone() })))
    }

    /// The attachments in the cache, of one container or, if `container_id` is empty, of all,
    /// sorted by file name. Other files are skipped; without the directory the list is empty.
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
    /// assert_eq!(runtime.cached_attachments("")?[0].attach, pod);
    /// # Ok(())
    /// # }
    /// ```
    pub fn cached_attachments(&self, container_id: &str) -> Result<Vec<CachedAttachment>> {
        let results = self.results_dir();
        atomic::remove_stale_temporaries(&results);
        let failed = |cause| Error::io(format_args!("open {}", results.display()), &cause);
        let entries = match fs::read_dir(&results) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(failed)?,
        };
        let mut names = Vec::new();
        for entry in entries {
            // No cache file has a name that is not UTF-8.
            names.extend(entry.map_err(failed)?.file_name().into_string());
        }
        sort_items(&mut names);
        if !container_id.is_empty() {
            // Filters by name, so that few files are read.
            let infix = format!("-{container_id}-");
            names.retain(|name| name.contains(&infix) || name.ends_with(HASHED));
        }
        let mut found: Vec<_> =
            names.iter().filter_map(|name| read_listed_file(&results, name)).collect();
        found.retain(|c| container_id.is_empty() || c.attach.container_id == container_id);
        Ok(found)
    }

    /// The file of `key`. The message of an error is `what` and the parser's reason. An empty or
    /// unreadable file counts as missing.
    fn read_cache_file(&self, key: &CacheFileKey, what: &str) -> Result<Option<Json>> {
        for path in self.cache_file_paths(key) {
            let bytes = files::read_regular_file(&path, MAX_BYTES).unwrap_or_default();
            if bytes.is_empty() {
                continue;
            }
            let file = Json::parse(&bytes).context(|| what)?;
            if key.owns_file(&file) {
                return Ok(Some(file));
            }
        }
        Ok(None)
    }

    /// The possible paths of the attachment's file.
    #[doc(hidden)]
    pub fn cache_paths(&self, network: &str, attach: &AttachmentParams) -> Result<[PathBuf; 2]> {
        Ok(self.cache_file_paths(&CacheFileKey::new(network, attach)?))
    }

    /// The possible paths of the file of `key`.
    fn cache_file_paths(&self, key: &CacheFileKey) -> [PathBuf; 2] {
        [key.plain_name(), key.hashed_name()].map(|name| self.results_dir().join(name))
    }
}

/// The attachment in the file `name`, unless the name is that of another attachment or the
/// temporary name of a crashed writer.
fn read_listed_file(results: &Path, name: &str) -> Option<CachedAttachment> {
    let path = results.join(name);
    // Before the content: a file that is replaced meanwhile does not look older than it is.
    let written = path.metadata().ok()?.modified().ok();
    let file = Json::parse(&files::read_regular_file(&path, MAX_BYTES).ok()?).ok()?;
    let found = (file_kind(&file) == KIND).then(|| decode_attachment(&file).ok())??;
    let key = CacheFileKey::new(&found.network, &found.attach).ok()?;
    let is_its_name = key.plain_name() == name || key.hashed_name() == name;
    is_its_name.then_some(CachedAttachment { written, ..found })
}

/// The content of a file, with the keys in the reference's order.
fn cache_file_content(
    list: &NetworkList,
    attach: &AttachmentParams,
    result: Option<&CniResult>,
) -> Json {
    let mut members: Vec<(&str, Json)> = vec![
        ("kind", KIND.into()),
        ("containerId", attach.container_id.as_str().into()),
        ("config", Json::String(STANDARD.encode(&list.bytes))),
        ("ifName", attach.ifname.as_str().into()),
        ("networkName", list.name.as_str().into()),
    ];
    if !attach.netns.is_empty() {
        members.push(("netns", attach.netns.as_str().into()));
    }
    if !attach.args.is_empty() {
        members.push((
            "cniArgs",
            Json::Array(
                attach
                    .args
                    .iter()
                    .map(|(k, v)| Json::Array(vec![k.as_str().into(), v.as_str().into()]))
                    .collect(),
            ),
        ));
    }
    if !attach.capability_args.is_empty() {
        let args = Json::Object(attach.capability_args.clone());
        members.push(("capabilityArgs", args.with_sorted_keys()));
    }
    if let Some(result) = result {
        members.push(("result", result.to_json().with_sorted_keys()));
    }
    Json::Object(members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

/// Decodes a file of the kind [`KIND`].
fn decode_attachment(file: &Json) -> Result<CachedAttachment> {
    let config = STANDARD
        .decode(text_member(file, "config"))
        .map_err(|why| Error::new(ErrorCode::DECODE, format!("config: {why}")))?;
    let args: Option<Vec<(String, String)>> =
        file.get_present_member("cniArgs").map(Json::decode).transpose()?;
    let capability_args = match file.get_present_member("capabilityArgs") {
        Some(Json::Object(members)) => members.clone(),
        _ => Vec::new(),
    };
    Ok(CachedAttachment {
        network: text_member(file, "networkName").to_owned(),
        config,
        attach: AttachmentParams {
            args: args.unwrap_or_default(),
            capability_args,
            ..AttachmentParams::new(
                text_member(file, "containerId"),
                cached_netns(file),
                text_member(file, "ifName"),
            )
        },
        written: None,
    })
}

/// The path of the container's network namespace in a cache file, empty if it has none. libcni
/// before 1.2, that of containerd 1.6 and 1.7 and of podman 4, writes none: there it is that of the
/// interface in the result of ADD.
#[doc(hidden)]
pub fn cached_netns(file: &Json) -> &str {
    let netns = text_member(file, "netns");
    let result = file.get_member("result");
    if let ("", Some(Json::Array(interfaces))) =
        (netns, result.and_then(|result| result.get_member("interfaces")))
    {
        for interface in interfaces {
            // An entry of the name without a namespace is one of the host.
            let sandbox = text_member(interface, "sandbox");
            if !sandbox.is_empty() && text_member(interface, "name") == text_member(file, "ifName")
            {
                return sandbox;
            }
        }
    }
    netns
}

fn file_kind(file: &Json) -> &str {
    text_member(file, "kind")
}

fn text_member<'a>(file: &'a Json, key: &str) -> &'a str {
    file.get_member(key).and_then(Json::as_str).unwrap_or_default()
}

/// The bytes in lower-case hexadecimal digits.
#[doc(hidden)]
pub fn encode_hex(bytes: &[u8]) -> String {
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.filter_map(|digit| char::from_digit(digit.into(), 16)).collect()
}
