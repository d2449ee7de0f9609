//! What is ours in a folder: `.cnibox/manifest.json`. Only what is listed there and has not
//! changed since is ever removed.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::STATE;
use super::files::During;
use super::folder::{Entry, Folder};
use super::options::Mode;
use crate::cni::json::{Json, pretty};
use crate::error::{Context, Error, Result};
use crate::files::atomic::{Durability, Writer};

/// The files of an installation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Manifest {
    /// The release that was installed.
    pub(super) version: String,
    pub(super) mode: Mode,
    /// Whether the executable has the immutable flag, where there is one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) protect: bool,
    pub(super) files: Vec<Owned>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) conflist: Option<OwnedConf>,
}

/// A name that is ours: a link with this text, or a file with this content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Owned {
    pub(super) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) link: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) sha256: Option<String>,
    /// What was there before and is kept, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) backup: Option<String>,
}

/// A network configuration that is ours.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct OwnedConf {
    pub(super) path: PathBuf,
    pub(super) sha256: String,
    /// Whether another file was there before and is kept.
    pub(super) backup: bool,
}

impl Manifest {
    fn path(folder: &Path) -> PathBuf {
        folder.join(STATE).join("manifest.json")
    }

    /// That of a folder; an empty one if there is none.
    pub(super) fn load(folder: &Path) -> Result<Manifest> {
        let path = Manifest::path(folder);
        let bytes = match fs::read(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Manifest::default()),
            other => other.during("read", &path)?,
        };
        let read = || format!("read {}", path.display());
        let json = Json::parse(&bytes).map_err(Error::internal).context(read)?;
        let manifest: Manifest = json.decode().context(read)?;
        // It leads to files being removed: names only, no paths.
        match manifest
            .files
            .iter()
            .find(|owned| owned.name.contains('/') || owned.name.starts_with('.'))
        {
            Some(odd) => {
                Err(Error::config(format!("{}: \"{}\" is not a file name", read(), odd.name)))
            }
            None => Ok(manifest),
        }
    }

    pub(super) fn save(&self, folder: &Path) -> Result<()> {
        let text = pretty(self)? + "\n";
        let path = Manifest::path(folder);
        Writer::unlocked(&path, Durability::Synced).replace(&path, text.as_bytes(), 0o644)?;
        Ok(())
    }

    pub(super) fn get(&self, name: &str) -> Option<&Owned> {
        self.files.iter().find(|owned| owned.name == name)
    }

    /// Forgets everything about the folder.
    pub(super) fn remove(folder: &Path) -> Result<()> {
        super::files::remove(&Manifest::path(folder))
    }
}

impl Owned {
    /// Whether what is in the folder is still what was installed.
    pub(super) fn is_unchanged(&self, folder: &Folder) -> Result<bool> {
        Ok(folder.look(&self.name)?.is_some_and(|entry| self.is(&entry)))
    }

    fn is(&self, entry: &Entry) -> bool {
        match (&self.link, &self.sha256) {
            (Some(link), _) => {
                entry.link().is_some_and(|target| target.as_os_str() == link.as_str())
            }
            (None, Some(sha256)) => {
                let same = |content: &super::folder::Content| content.sha256 == *sha256;
                entry.link().is_none() && entry.content.as_ref().is_some_and(same)
            }
            (None, None) => false,
        }
    }
}

/// Where what was at a name is kept.
pub(super) fn backup(folder: &Path, name: &str) -> PathBuf {
    folder.join(STATE).join("backup").join(name)
}
