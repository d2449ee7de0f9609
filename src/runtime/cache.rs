//! What is remembered of each attachment between ADD and DEL: the result, the configuration and
//! the arguments.
//!
//! One file `<cache dir>/results/<network>-<container id>-<ifname>` (0600 in directories 0700),
//! in the reference's format `cniCacheV1`: compact JSON with `kind`, `containerId`, `config`
//! (base64), `ifName`, `networkName`, `netns`, `cniArgs`, `capabilityArgs`, `result`. Programs
//! built on libcni read these files, and this module reads theirs, including those from before
//! configurations were cached, which are bare results.
//!
//! Beyond that: files are replaced atomically; an empty file, as a crash of another writer leaves
//! it, counts as missing; the names are checked before they become a path. The three names are
//! joined with `-` and may contain it, so two attachments can have the same file name; the fields in
//! the file decide which attachment the file is of, and the second attachment, like one whose name is
//! too long for a file, gets the name `<sha512 of the three>.hashed`.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha512};

use super::{Attach, NetworkList};
use crate::cni::json::{Json, compact};
use crate::cni::{CniResult, ContainerId, IfName, NetworkName, SpecVersion};
use crate::error::{Code, Context, Error, Result};
use crate::files::atomic::{self, Durability, Writer};
use crate::sort::sort;

const KIND: &str = "cniCacheV1";
/// The longest file name there is (`NAME_MAX`), in bytes.
const NAME_MAX: usize = 255;
/// Ends the names that are hashes; a network's file ends in an interface name.
const HASHED: &str = ".hashed";

/// What a cache file says about its attachment.
#[derive(Clone, Debug, PartialEq)]
pub struct CachedAttachment {
    /// The network's name.
    pub network: String,
    /// The configuration's bytes as they were at ADD; empty in files from before that was kept.
    pub config: Vec<u8>,
    /// Container, namespace (empty in old files), interface and arguments.
    pub attach: Attach,
}

/// The cache below one directory.
pub(super) struct Cache {
    results: PathBuf,
}

/// The attachment of the file: checked names.
pub(super) struct Key {
    network: NetworkName,
    container: ContainerId,
    ifname: IfName,
}

impl Key {
    /// Checks all three names, in the order of the reference's ADD.
    pub(super) fn of(network: &str, attach: &Attach) -> Result<Key> {
        let container = ContainerId::parse(&attach.container_id)?;
        let network = NetworkName::parse(network)?;
        let ifname = IfName::parse(&attach.ifname)?;
        Ok(Key { network, container, ifname })
    }

    /// As [`Key::of`], with the message of the cache for a missing name.
    pub(super) fn complete(network: &str, attach: &Attach) -> Result<Key> {
        let (id, ifname) = (&attach.container_id, &attach.ifname);
        if network.is_empty() || id.is_empty() || ifname.is_empty() {
            return Err(Error::config(format!(
                "cache file path requires network name (\"{network}\"), container ID (\"{id}\"), \
                 and interface name (\"{ifname}\")"
            )));
        }
        Key::of(network, attach)
    }

    fn plain_name(&self) -> String {
        format!("{}-{}-{}", self.network, self.container, self.ifname)
    }

    /// No name contains a `/`, so a `/` separates them.
    fn hashed_name(&self) -> String {
        let text = format!("{}/{}/{}", self.network, self.container, self.ifname);
        hex(&Sha512::digest(text)[..20]) + HASHED
    }

    fn owns(&self, file: &Json) -> bool {
        // A bare result does not name its attachment.
        kind(file) != KIND
            || text(file, "networkName") == self.network.as_str()
                && text(file, "containerId") == self.container.as_str()
                && text(file, "ifName") == self.ifname.as_str()
    }
}

impl Cache {
    pub(super) fn below(dir: &Path) -> Cache {
        Cache { results: dir.join("results") }
    }

    /// Remembers a successful ADD.
    pub(super) fn store(
        &self,
        list: &NetworkList,
        attach: &Attach,
        result: Option<&CniResult>,
    ) -> Result<()> {
        let key = Key::complete(&list.name, attach)?;
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.results)
            .map_err(|cause| Error::io(format_args!("mkdir {}", self.results.display()), &cause))?;
        let bytes = compact(&document(list, attach, result))?;
        let path = self.path_to_write(&key);
        Ok(Writer::unlocked(&path, Durability::Synced).replace(&path, bytes.as_bytes(), 0o600)?)
    }

    /// Forgets the attachment. That there is nothing is fine, and so is that it cannot be removed:
    /// the attachment is gone all the same.
    pub(super) fn remove(&self, key: &Key) {
        for path in self.paths(key) {
            let Ok(bytes) = fs::read(&path) else { continue };
            // The attachment of a file that is empty or malformed is unknown.
            if Json::parse(&bytes).map_or(true, |file| key.owns(&file)) {
                drop(fs::remove_file(path));
            }
        }
    }

    /// The result of the ADD, in the network's version; `None` if none is cached.
    pub(super) fn result(&self, list: &NetworkList, attach: &Attach) -> Result<Option<CniResult>> {
        let key = Key::complete(&list.name, attach)?;
        let Some(file) = self.read(&key, "decoding version from network config")? else {
            return Ok(None);
        };
        let json = if kind(&file) == KIND {
            file.get_present("result").cloned().unwrap_or(Json::Object(Vec::new()))
        } else {
            file
        };
        let result = CniResult::decode(&json, SpecVersion::V0_1_0)?;
        let wanted = &list.cni_version;
        SpecVersion::exact(wanted)
            .ok_or_else(|| {
                let from = result.version;
                Error::internal(format!("no converter for CNI result version {from} to {wanted}"))
            })
            .and_then(|version| result.convert(version))
            .context(|| format!("failed to convert cached result to config version \"{wanted}\""))
            .map(Some)
    }

    /// Configuration and arguments of the ADD; `None` if nothing is cached.
    pub(super) fn config(
        &self,
        network: &str,
        attach: &Attach,
    ) -> Result<Option<CachedAttachment>> {
        let key = Key::complete(network, attach)?;
        let what = format!("failed to unmarshal cached network \"{network}\" config");
        let Some(file) = self.read(&key, &what)? else { return Ok(None) };
        if kind(&file) != KIND {
            let kind = kind(&file);
            let msg = format!("read cached network \"{network}\" config has wrong kind: {kind}");
            return Err(Error::new(Code::DECODE, msg));
        }
        attachment(&file).map(Some).map_err(|e| e.context(what))
    }

    /// All attachments, or the attachments of one container if `container` is not empty, by file name.
    /// Files that say too little are passed over.
    pub(super) fn attachments(&self, container: &str) -> Result<Vec<CachedAttachment>> {
        atomic::sweep_stale(&self.results);
        let failed = |cause| Error::io(format_args!("open {}", self.results.display()), &cause);
        let entries = match fs::read_dir(&self.results) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(failed)?,
        };
        let mut names = Vec::new();
        for entry in entries {
            // A name that is not UTF-8 is not one of ours.
            names.extend(entry.map_err(failed)?.file_name().into_string());
        }
        sort(&mut names);
        let within = format!("-{container}-");
        names.retain(|name| {
            container.is_empty() || name.contains(&within) || name.ends_with(HASHED)
        });
        Ok(names.iter().filter_map(|name| self.listed(name, container)).collect())
    }

    /// The attachment in the file `name`, if that is the file of the attachment in it: what a
    /// crashed writer left under a temporary name is not.
    fn listed(&self, name: &str, container: &str) -> Option<CachedAttachment> {
        let file = Json::parse(&fs::read(self.results.join(name)).ok()?).ok()?;
        let found = (kind(&file) == KIND).then(|| attachment(&file).ok())??;
        let key = Key::of(&found.network, &found.attach).ok()?;
        let own_name = key.plain_name() == name || key.hashed_name() == name;
        (own_name && (container.is_empty() || container == found.attach.container_id))
            .then_some(found)
    }

    /// The document of `key`, wherever it is; the error is `what` and the parser's reason. An
    /// empty or unreadable file counts as missing.
    fn read(&self, key: &Key, what: &str) -> Result<Option<Json>> {
        for path in self.paths(key) {
            let bytes = fs::read(path).unwrap_or_default();
            if bytes.is_empty() {
                continue;
            }
            let file = Json::parse(&bytes)
                .map_err(|why| Error::new(Code::DECODE, format!("{what}: {why}")))?;
            if key.owns(&file) {
                return Ok(Some(file));
            }
        }
        Ok(None)
    }

    /// Where the file of `key` may be.
    fn paths(&self, key: &Key) -> [PathBuf; 2] {
        [key.plain_name(), key.hashed_name()].map(|name| self.results.join(name))
    }

    fn path_to_write(&self, key: &Key) -> PathBuf {
        let [plain, hashed] = self.paths(key);
        let somebody_elses = fs::read(&plain)
            .ok()
            .and_then(|bytes| Json::parse(&bytes).ok())
            .is_some_and(|file| !key.owns(&file));
        if key.plain_name().len() > NAME_MAX || somebody_elses { hashed } else { plain }
    }
}

/// The file's content, keys in the reference's order.
fn document(list: &NetworkList, attach: &Attach, result: Option<&CniResult>) -> Json {
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
        let pair =
            |(k, v): &(String, String)| Json::Array(vec![k.as_str().into(), v.as_str().into()]);
        members.push(("cniArgs", Json::Array(attach.args.iter().map(pair).collect())));
    }
    if !attach.capability_args.is_empty() {
        members.push(("capabilityArgs", Json::Object(attach.capability_args.clone()).sorted()));
    }
    if let Some(result) = result {
        members.push(("result", result.to_json().sorted()));
    }
    Json::Object(members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

/// Reads a document of the right kind.
fn attachment(file: &Json) -> Result<CachedAttachment> {
    let config = STANDARD
        .decode(text(file, "config"))
        .map_err(|why| Error::new(Code::DECODE, format!("config: {why}")))?;
    let args: Option<Vec<(String, String)>> =
        file.get_present("cniArgs").map(Json::decode).transpose()?;
    let capability_args = match file.get_present("capabilityArgs") {
        Some(Json::Object(members)) => members.clone(),
        _ => Vec::new(),
    };
    Ok(CachedAttachment {
        network: text(file, "networkName").to_owned(),
        config,
        attach: Attach {
            args: args.unwrap_or_default(),
            capability_args,
            ..Attach::new(text(file, "containerId"), text(file, "netns"), text(file, "ifName"))
        },
    })
}

fn kind(file: &Json) -> &str {
    text(file, "kind")
}

fn text<'a>(file: &'a Json, key: &str) -> &'a str {
    file.get(key).and_then(Json::as_str).unwrap_or_default()
}

/// Bytes in lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.filter_map(|digit| char::from_digit(digit.into(), 16)).collect()
}
