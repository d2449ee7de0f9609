//! Files that appear whole or not at all: written under a temporary name, then renamed or linked.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::{During, Error, Result, remove_file};
use crate::log;

/// What a file has to survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// A power cut: file and directory are synced. For what must outlive the boot, such as a
    /// cached configuration without which a network cannot be taken down.
    Synced,
    /// Only the end of the process: nothing is synced. For what describes living containers,
    /// such as leases: a power cut ends them too, and the debris it leaves is recognised.
    Volatile,
}

/// Writes files by way of one temporary name.
///
/// The name is fixed, so whoever writes next removes what a killed process left there. In turn the
/// caller holds a lock that covers the name.
#[derive(Debug)]
pub struct Writer {
    temp: PathBuf,
    durability: Durability,
}

impl Writer {
    /// Uses `temp`, which must be on the file system of the files to write.
    pub fn new(temp: impl Into<PathBuf>, durability: Durability) -> Writer {
        Writer { temp: temp.into(), durability }
    }

    /// Uses a hidden name beside `path`.
    pub fn beside(path: &Path, durability: Durability) -> Writer {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Writer::new(path.with_file_name(format!(".{name}.tmp")), durability)
    }

    /// Puts a file of `mode` in place of whatever is at `path`.
    pub fn replace(&self, path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
        self.write_temp(bytes, mode)?;
        fs::rename(&self.temp, path).during("replace", path)?;
        self.sync_parent(path)
    }

    /// Creates a file of `mode` at `path`; false if something is there.
    pub fn create_exclusive(&self, path: &Path, bytes: &[u8], mode: u32) -> Result<bool> {
        self.write_temp(bytes, mode)?;
        let linked = fs::hard_link(&self.temp, path);
        // The file is there, or is not, whatever becomes of its second name: an error here would
        // hide that. Whoever writes next tries again.
        if let Err(error) = remove_file(&self.temp) {
            log::debug(format_args!("left behind: {error}"));
        }
        match linked {
            Ok(()) => self.sync_parent(path).map(|()| true),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(e) => Err(Error::new("create", path, e)),
        }
    }

    fn write_temp(&self, bytes: &[u8], mode: u32) -> Result<()> {
        // Never truncated: a process killed between link and unlink left it as a second name of
        // a file that lives.
        remove_file(&self.temp)?;
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&self.temp)
            .during("create", &self.temp)?;
        let written = file.write_all(bytes).and_then(|()| match self.durability {
            Durability::Synced => file.sync_all(),
            Durability::Volatile => Ok(()),
        });
        if written.is_err() {
            // A full disk should not also keep the part that fitted.
            remove_file(&self.temp)?;
        }
        written.during("write", &self.temp)
    }

    fn sync_parent(&self, path: &Path) -> Result<()> {
        match (self.durability, path.parent()) {
            (Durability::Synced, Some(dir)) => {
                File::open(dir).and_then(|dir| dir.sync_all()).during("sync", dir)
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_and_leaves_no_temporary() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let writer = Writer::beside(&path, Durability::Synced);
        writer.replace(&path, b"one", 0o600).unwrap();
        writer.replace(&path, b"two", 0o600).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn creates_only_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let writer = Writer::beside(&path, Durability::Volatile);
        assert!(writer.create_exclusive(&path, b"one", 0o600).unwrap());
        assert!(!writer.create_exclusive(&path, b"two", 0o600).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_leftover_that_shares_its_inode_does_no_harm() {
        let dir = tempfile::tempdir().unwrap();
        let (temp, old) = (dir.path().join("temp"), dir.path().join("old"));
        fs::write(&temp, "old").unwrap();
        fs::hard_link(&temp, &old).unwrap();
        let writer = Writer::new(&temp, Durability::Volatile);
        assert!(writer.create_exclusive(&dir.path().join("new"), b"new", 0o600).unwrap());
        assert_eq!(fs::read(&old).unwrap(), b"old");
        assert!(!temp.exists());
    }
}
