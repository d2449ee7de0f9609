//! The state of a directory of plugins: its entries, and the manifest of the installed files.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::files::{self, DeviceInode, EXECUTABLE, device_inode, if_present};
use super::options::InstallMode;
use super::origin::{ExecutableOrigin, sha256_hex};
use super::{BINARY, STATE};
use crate::tool::json_text;
use cni::error::{Error, ErrorContext, Result};
use cni::files::FileOperationContext;
use cni::files::atomic::{AtomicWriter, Durability};
use cni::json::Json;
use cni::sort::collect_set;

/// What a directory of plugins contains.
pub(super) struct PluginDirectory {
    entries: BTreeMap<String, PluginDirectoryEntry>,
    pub(super) manifest: InstallManifest,
}

pub(super) struct PluginDirectoryEntry {
    /// The target, if the entry is a symbolic link.
    link: Option<PathBuf>,
    /// Device and inode of the entry; those of the link itself if it is a link.
    id: DeviceInode,
    is_executable: bool,
    /// The content of the regular file that the name leads to; `None` for a dangling link, a
    /// directory or a device.
    pub(super) content: Option<EntryContent>,
}

#[derive(Clone)]
pub(super) struct EntryContent {
    pub(super) sha256: String,
    origin: ExecutableOrigin,
}

impl PluginDirectory {
    /// Reads the manifest, and the entries of the executable, of `names` and of the names in the
    /// manifest.
    pub(super) fn read_entries(path: &Path, names: &[&str]) -> Result<PluginDirectory> {
        let manifest = InstallManifest::load_from(path)?;
        let owned = manifest.files.iter().map(|owned| owned.name.as_str());
        let names = collect_set(owned.chain(names.iter().copied()).chain([BINARY]));
        let (mut entries, mut contents) = (BTreeMap::new(), BTreeMap::new());
        for name in names {
            if let Some(entry) = PluginDirectoryEntry::read_entry(&path.join(name), &mut contents)?
            {
                entries.insert(name.to_owned(), entry);
            }
        }
        Ok(PluginDirectory { entries, manifest })
    }

    pub(super) fn find_entry(&self, name: &str) -> Option<&PluginDirectoryEntry> {
        self.entries.get(name)
    }

    /// Whether the entry is still as it was installed.
    pub(super) fn is_unchanged(&self, owned: &InstalledFile) -> bool {
        self.find_entry(&owned.name).is_some_and(|entry| match (&owned.link, &owned.sha256) {
            (Some(link), _) => entry.links_to(link),
            (None, Some(sha256)) => {
                entry.link.is_none() && entry.content.as_ref().is_some_and(|c| c.sha256 == *sha256)
            }
            (None, None) => false,
        })
    }
}

impl PluginDirectoryEntry {
    /// Reads an entry. Many names lead to one file, so `contents` has the content of each inode
    /// that was read already.
    fn read_entry(
        path: &Path,
        contents: &mut BTreeMap<DeviceInode, EntryContent>,
    ) -> Result<Option<PluginDirectoryEntry>> {
        let metadata = if_present(path.symlink_metadata()).during("read", path)?;
        let Some(metadata) = metadata else { return Ok(None) };
        let link =
            metadata.is_symlink().then(|| fs::read_link(path).during("read", path)).transpose()?;
        let content = match fs::metadata(path) {
            Ok(file) if file.is_file() => Some(match contents.entry(device_inode(&file)) {
                Slot::Occupied(known) => known.get().clone(),
                Slot::Vacant(slot) => {
                    let bytes = files::read_file(path).during("read", path)?;
                    let content = EntryContent {
                        sha256: sha256_hex(&bytes),
                        origin: ExecutableOrigin::from_bytes(&bytes),
                    };
                    slot.insert(content).clone()
                }
            }),
            _ => None,
        };
        let is_executable = metadata.permissions().mode() & EXECUTABLE == EXECUTABLE;
        Ok(Some(PluginDirectoryEntry { link, id: device_inode(&metadata), is_executable, content }))
    }

    /// The origin of the file. A dangling link to [`BINARY`] is ours.
    pub(super) fn file_origin(&self) -> ExecutableOrigin {
        match &self.content {
            Some(content) => content.origin.clone(),
            None if self.links_to(BINARY) => ExecutableOrigin::Own(String::new()),
            None => ExecutableOrigin::Foreign,
        }
    }

    pub(super) fn links_to(&self, target: &str) -> bool {
        self.link.as_ref().is_some_and(|link| link.as_os_str() == target)
    }

    /// Whether the entry is an executable file with this content.
    pub(super) fn is_file_with_hash(&self, sha256: &str) -> bool {
        let has_content = self.content.as_ref().is_some_and(|content| content.sha256 == sha256);
        self.link.is_none() && self.is_executable && has_content
    }

    /// Whether the entry is another name of the same executable file.
    pub(super) fn is_hard_link_to(&self, other: &PluginDirectoryEntry) -> bool {
        self.link.is_none() && self.is_executable && self.id == other.id
    }

    /// Whether the entry is a file or a link, and not a directory or a device.
    pub(super) fn is_replaceable(&self) -> bool {
        self.link.is_some() || self.content.is_some()
    }

    /// A description of the entry for reports.
    pub(super) fn describe(&self) -> String {
        match (&self.link, &self.content) {
            (Some(target), None) => format!("a dangling link to {}", target.display()),
            (Some(target), Some(_)) if !self.links_to(BINARY) => {
                format!("{}, a link to {}", self.file_origin(), target.display())
            }
            (None, None) => "not a file".to_owned(),
            _ => self.file_origin().to_string(),
        }
    }
}

/// `.cnibox/manifest.json`, the list of the installed files. Only files on this list that have not
/// changed since are ever removed.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct InstallManifest {
    /// The release that was installed.
    pub(super) version: String,
    pub(super) mode: InstallMode,
    /// Whether the executable has the immutable flag, if the file system has this flag.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) protect: bool,
    pub(super) files: Vec<InstalledFile>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) conflist: Option<InstalledConfig>,
}

/// An installed link with this target, or an installed file with this content.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct InstalledFile {
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
pub(super) struct InstalledConfig {
    pub(super) path: PathBuf,
    pub(super) sha256: String,
    /// Whether a file was replaced and backed up.
    pub(super) backup: bool,
}

impl InstallManifest {
    pub(super) fn file_path(directory: &Path) -> PathBuf {
        directory.join(STATE).join("manifest.json")
    }

    /// The manifest of a directory; an empty manifest if nothing is installed.
    pub(super) fn load_from(directory: &Path) -> Result<InstallManifest> {
        let path = InstallManifest::file_path(directory);
        let Some(bytes) = if_present(files::read_file(&path)).during("read", &path)? else {
            return Ok(InstallManifest::default());
        };
        let read = || format!("read {}", path.display());
        let json = Json::parse(&bytes).context(read)?;
        let manifest: InstallManifest = json.decode().context(read)?;
        // Files of these names are removed: a name must not lead out of the directory.
        let is_path =
            |owned: &&InstalledFile| owned.name.contains('/') || owned.name.starts_with('.');
        match manifest.files.iter().find(is_path) {
            Some(InstalledFile { name, .. }) => {
                Err(Error::config(format!("{}: \"{name}\" is not a file name", read())))
            }
            None => Ok(manifest),
        }
    }

    pub(super) fn save_to(&self, directory: &Path) -> Result<()> {
        replace_text_file(&InstallManifest::file_path(directory), json_text(self)?.as_bytes())
    }

    pub(super) fn find_file(&self, name: &str) -> Option<&InstalledFile> {
        self.files.iter().find(|owned| owned.name == name)
    }
}

/// The path of the backup of the file `name`. Names of network configurations have a dot, names of
/// applets have none, so that no two files have the same path.
pub(super) fn backup_path(directory: &Path, name: &str) -> PathBuf {
    directory.join(STATE).join("backup").join(Path::new(name).file_name().unwrap_or_default())
}

/// Replaces a text file atomically.
pub(super) fn replace_text_file(path: &Path, bytes: &[u8]) -> Result<()> {
    AtomicWriter::with_unique_name(path, Durability::Synced).replace_file(path, bytes, 0o644)?;
    files::copy_label(path.parent().unwrap_or(path), path);
    Ok(())
}
