//! The folder of plugins as it is.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::BINARY;
use super::files::{During, EXECUTABLE};
use super::origin::{Origin, sha256};
use crate::error::Result;

type Identity = (u64, u64);

/// A folder, and what was read in it.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// Many names can lead to one file.
    read: RefCell<BTreeMap<Identity, Content>>,
}

/// What is in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) sha256: String,
    pub(super) origin: Origin,
}

/// What is at a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// A symbolic link with this text.
    Link(PathBuf),
    /// A file; whether everybody may execute it.
    File(Identity, bool),
    /// A folder, a device: nothing that can be replaced.
    Other,
}

/// A name of the folder that is taken.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) shape: Shape,
    /// Of the file that the name leads to; `None` if it leads to none.
    pub(super) content: Option<Content>,
}

impl Folder {
    pub(super) fn new(path: &Path) -> Folder {
        Folder { path: path.to_owned(), read: RefCell::default() }
    }

    /// What is at `name`; `None` if nothing is.
    pub(super) fn look(&self, name: &str) -> Result<Option<Entry>> {
        let path = self.path.join(name);
        let metadata = match fs::symlink_metadata(&path) {
            Err(e) if matches!(e.kind(), ErrorKind::NotFound) => return Ok(None),
            other => other.during("look at", &path)?,
        };
        let shape = if metadata.is_symlink() {
            Shape::Link(fs::read_link(&path).during("read link", &path)?)
        } else if metadata.is_file() {
            let executable = metadata.permissions().mode() & EXECUTABLE == EXECUTABLE;
            Shape::File(identity(&metadata), executable)
        } else {
            Shape::Other
        };
        let content = match fs::metadata(&path) {
            Ok(metadata) if metadata.is_file() => Some(self.content(&path, &metadata)?),
            // A link to nothing.
            _ => None,
        };
        Ok(Some(Entry { shape, content }))
    }

    fn content(&self, path: &Path, metadata: &Metadata) -> Result<Content> {
        if let Some(content) = self.read.borrow().get(&identity(metadata)) {
            return Ok(content.clone());
        }
        let bytes = fs::read(path).during("read", path)?;
        let content = Content { sha256: sha256(&bytes), origin: Origin::of(&bytes) };
        self.read.borrow_mut().insert(identity(metadata), content.clone());
        Ok(content)
    }
}

fn identity(metadata: &Metadata) -> Identity {
    (metadata.dev(), metadata.ino())
}

impl Entry {
    /// The origin of the entry. A dangling link is ours if it has our target.
    pub(super) fn origin(&self) -> Origin {
        match (&self.content, &self.shape) {
            (Some(content), _) => content.origin.clone(),
            (None, Shape::Link(target)) if target.as_os_str() == BINARY => {
                Origin::Own(String::new())
            }
            (None, _) => Origin::Foreign,
        }
    }

    pub(super) fn link(&self) -> Option<&Path> {
        if let Shape::Link(target) = &self.shape { Some(target) } else { None }
    }

    /// Whether it is an executable file with this content.
    pub(super) fn is_file_of(&self, sha256: &str) -> bool {
        matches!(self.shape, Shape::File(_, true))
            && self.content.as_ref().is_some_and(|content| content.sha256 == sha256)
    }

    /// Whether it is another name of the same file.
    pub(super) fn is_hard_link_to(&self, other: &Entry) -> bool {
        matches!((&self.shape, &other.shape), (Shape::File(a, true), Shape::File(b, _)) if a == b)
    }

    /// In words, for a person.
    pub(super) fn describe(&self) -> String {
        match (&self.shape, &self.content) {
            (Shape::Link(target), None) => format!("a link to nothing, {}", target.display()),
            (Shape::Link(target), Some(_)) if target.as_os_str() != BINARY => {
                format!("{}, a link to {}", self.origin(), target.display())
            }
            (Shape::Other, _) => "not a file".to_owned(),
            _ => self.origin().to_string(),
        }
    }
}
