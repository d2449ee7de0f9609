//! The state of a folder of plugins: its entries, and the manifest of the installed files.

use std::collections::btree_map::Entry as Slot;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::files::{self, During, EXECUTABLE, Identity, identity, if_present};
use super::options::Mode;
use super::origin::{Origin, sha256};
use super::{BINARY, STATE};
use crate::cni::json::{Json, pretty};
use crate::error::{Context, Error, Result};
use crate::files::atomic::{Durability, Writer};

/// A folder of plugins.
pub(super) struct Folder {
    entries: BTreeMap<String, Entry>,
    pub(super) manifest: Manifest,
}

/// An entry of the folder.
pub(super) struct Entry {
    /// The target, if the entry is a symbolic link.
    link: Option<PathBuf>,
    /// Of the entry itself.
    id: Identity,
    is_executable: bool,
    /// Of the regular file that the name leads to; `None` for a dangling link, a directory or a
    /// device.
    pub(super) content: Option<Content>,
}

#[derive(Clone)]
pub(super) struct Content {
    pub(super) sha256: String,
    origin: Origin,
}

impl Folder {
    /// Reads the manifest, and the entries of the executable, of `names` and of the names in the
    /// manifest.
    pub(super) fn read(path: &Path, names: &[&str]) -> Result<Folder> {
        let manifest = Manifest::load(path)?;
        let owned = manifest.files.iter().map(|owned| owned.name.as_str());
        let names: BTreeSet<&str> = owned.chain(names.iter().copied()).chain([BINARY]).collect();
        let (mut entries, mut contents) = (BTreeMap::new(), BTreeMap::new());
        for name in names {
            if let Some(entry) = Entry::read(&path.join(name), &mut contents)? {
                entries.insert(name.to_owned(), entry);
            }
        }
        Ok(Folder { entries, manifest })
    }

    pub(super) fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }

    /// Whether the entry is still as it was installed.
    pub(super) fn is_unchanged(&self, owned: &Owned) -> bool {
        self.entry(&owned.name).is_some_and(|entry| match (&owned.link, &owned.sha256) {
            (Some(link), _) => entry.links_to(link),
            (None, Some(sha256)) => {
                entry.link.is_none() && entry.content.as_ref().is_some_and(|c| c.sha256 == *sha256)
            }
            (None, None) => false,
        })
    }
}

impl Entry {
    /// Many names lead to one file, so the `contents` are read once for each inode.
    fn read(path: &Path, contents: &mut BTreeMap<Identity, Content>) -> Result<Option<Entry>> {
        let metadata = if_present(path.symlink_metadata()).during("read", path)?;
        let Some(metadata) = metadata else { return Ok(None) };
        let link =
            metadata.is_symlink().then(|| fs::read_link(path).during("read", path)).transpose()?;
        let content = match fs::metadata(path) {
            Ok(file) if file.is_file() => Some(match contents.entry(identity(&file)) {
                Slot::Occupied(known) => known.get().clone(),
                Slot::Vacant(slot) => {
                    let bytes = files::read(path).during("read", path)?;
                    let content = Content { sha256: sha256(&bytes), origin: Origin::of(&bytes) };
                    slot.insert(content).clone()
                }
            }),
            _ => None,
        };
        let is_executable = metadata.permissions().mode() & EXECUTABLE == EXECUTABLE;
        Ok(Some(Entry { link, id: identity(&metadata), is_executable, content }))
    }

    /// The origin of the file. A dangling link to [`BINARY`] is ours.
    pub(super) fn origin(&self) -> Origin {
        match &self.content {
            Some(content) => content.origin.clone(),
            None if self.links_to(BINARY) => Origin::Own(String::new()),
            None => Origin::Foreign,
        }
    }

    pub(super) fn links_to(&self, target: &str) -> bool {
        self.link.as_ref().is_some_and(|link| link.as_os_str() == target)
    }

    /// Whether the entry is an executable file with this content.
    pub(super) fn is_file_of(&self, sha256: &str) -> bool {
        let has_content = self.content.as_ref().is_some_and(|content| content.sha256 == sha256);
        self.link.is_none() && self.is_executable && has_content
    }

    /// Whether the entry is another name of the same executable file.
    pub(super) fn is_hard_link_to(&self, other: &Entry) -> bool {
        self.link.is_none() && self.is_executable && self.id == other.id
    }

    /// Whether the entry is a file or a link, and not a directory or a device.
    pub(super) fn is_replaceable(&self) -> bool {
        self.link.is_some() || self.content.is_some()
    }

    /// A description for a person.
    pub(super) fn describe(&self) -> String {
        match (&self.link, &self.content) {
            (Some(target), None) => format!("a dangling link to {}", target.display()),
            (Some(target), Some(_)) if !self.links_to(BINARY) => {
                format!("{}, a link to {}", self.origin(), target.display())
            }
            (None, None) => "not a file".to_owned(),
            _ => self.origin().to_string(),
        }
    }
}

/// `.cnibox/manifest.json`, the list of the installed files. Only files on this list that have not
/// changed since are ever removed.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Manifest {
    /// The release that was installed.
    pub(super) version: String,
    pub(super) mode: Mode,
    /// Whether the executable has the immutable flag, if the file system has this flag.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) protect: bool,
    pub(super) files: Vec<Owned>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) conflist: Option<OwnedConf>,
}

/// An installed link with this target, or an installed file with this content.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Owned {
    pub(super) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) link: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) sha256: Option<String>,
    /// The description of the file that was replaced and backed up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) backup: Option<String>,
}

/// The installed network configuration.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct OwnedConf {
    pub(super) path: PathBuf,
    pub(super) sha256: String,
    /// Whether a file was replaced and backed up.
    pub(super) backup: bool,
}

impl Manifest {
    pub(super) fn path(folder: &Path) -> PathBuf {
        folder.join(STATE).join("manifest.json")
    }

    /// The manifest of a folder; an empty manifest if nothing is installed.
    pub(super) fn load(folder: &Path) -> Result<Manifest> {
        let path = Manifest::path(folder);
        let Some(bytes) = if_present(files::read(&path)).during("read", &path)? else {
            return Ok(Manifest::default());
        };
        let read = || format!("read {}", path.display());
        let json = Json::parse(&bytes).context(read)?;
        let manifest: Manifest = json.decode().context(read)?;
        // Files of these names are removed: a name must not lead out of the folder.
        let is_path = |owned: &&Owned| owned.name.contains('/') || owned.name.starts_with('.');
        match manifest.files.iter().find(is_path) {
            Some(Owned { name, .. }) => {
                Err(Error::config(format!("{}: \"{name}\" is not a file name", read())))
            }
            None => Ok(manifest),
        }
    }

    pub(super) fn save(&self, folder: &Path) -> Result<()> {
        write(&Manifest::path(folder), (pretty(self)? + "\n").as_bytes())
    }

    pub(super) fn get(&self, name: &str) -> Option<&Owned> {
        self.files.iter().find(|owned| owned.name == name)
    }
}

/// The path of the backup of a file, by its name: that of a network configuration has a dot, unlike
/// that of an applet.
pub(super) fn backup(folder: &Path, name: &str) -> PathBuf {
    folder.join(STATE).join("backup").join(Path::new(name).file_name().unwrap_or_default())
}

/// Replaces a text file atomically.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    Writer::unlocked(path, Durability::Synced).replace(path, bytes, 0o644)?;
    files::copy_label(path.parent().unwrap_or(path), path);
    Ok(())
}
