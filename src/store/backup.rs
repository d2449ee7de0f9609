//! What an interface was like before it was changed: a file for each attachment, in the place
//! where the reference plugins keep theirs.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use super::atomic::{self, Durability, Writer};
use super::{During, Result, remove_file};

/// The file of one attachment. Calls for one attachment come one after the other, so they need no
/// lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupFile(PathBuf);

/// How the temporary names begin; they are no longer than those of the files.
const TEMPORARY: &str = ".tmp-";
/// How the names of the files end.
const ENDING: &str = ".json";

impl BackupFile {
    /// That of the container's interface, in the folder `dir`. Neither of them can contain `/`.
    pub fn new(dir: &Path, container_id: &str, ifname: &str) -> BackupFile {
        BackupFile(dir.join(format!("{container_id}_{ifname}{ENDING}")))
    }

    /// All that are in `dir`, which need not be there.
    pub fn all(dir: &Path) -> Result<Vec<BackupFile>> {
        let entries = match fs::read_dir(dir) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.during("list", dir)?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry.during("list", dir)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.ends_with(ENDING) {
                found.push(BackupFile(path));
            }
        }
        atomic::sweep_stale(dir);
        Ok(found)
    }

    /// Its content, if there is any.
    pub fn read(&self) -> Result<Option<Vec<u8>>> {
        match fs::read(&self.0) {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            content => content.during("read", &self.0).map(Some),
        }
    }

    /// Puts `content` in place of what it has, making the folder.
    pub fn write(&self, content: &[u8]) -> Result<()> {
        if let Some(dir) = self.0.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(dir).during("create", dir)?;
        }
        // It describes a living interface: a power cut ends that too.
        Writer::new(self.temporary(), Durability::Volatile).replace(&self.0, content, 0o600)
    }

    /// Removes it, if it is there, and what a killed process left of it.
    pub fn remove(&self) -> Result<()> {
        remove_file(&self.temporary())?;
        remove_file(&self.0)
    }

    fn temporary(&self) -> PathBuf {
        let name = self.0.file_stem().unwrap_or_default().to_string_lossy();
        self.0.with_file_name(format!("{TEMPORARY}{name}"))
    }
}

/// Fails unless files can be written in `dir`, or it could be made; changes nothing.
pub fn require_writable(dir: &Path) -> Result<()> {
    let existing = dir.ancestors().find(|dir| dir.symlink_metadata().is_ok()).unwrap_or(dir);
    access(existing, AccessFlags::W_OK | AccessFlags::X_OK).during("access", existing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn written_listed_and_removed() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/tuning");
        assert_eq!(BackupFile::all(&dir).unwrap(), []);
        require_writable(&dir).unwrap();
        let file = BackupFile::new(&dir, "c1", "eth0");
        assert_eq!(file.read().unwrap(), None);
        file.write(b"one").unwrap();
        file.write(b"two").unwrap();
        assert_eq!(fs::read(dir.join("c1_eth0.json")).unwrap(), b"two");
        assert_eq!(file.read().unwrap().as_deref(), Some(&b"two"[..]));
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&dir), mode(&file.0)), (0o700, 0o600));
        fs::write(dir.join(".tmp-1-0"), "").unwrap();
        fs::write(dir.join("other"), "").unwrap();
        assert_eq!(BackupFile::all(&dir).unwrap(), std::slice::from_ref(&file));
        fs::write(dir.join(".tmp-c1_eth0"), "").unwrap();
        file.remove().unwrap();
        file.remove().unwrap();
        assert_eq!(BackupFile::all(&dir).unwrap(), []);
        assert!(!dir.join(".tmp-c1_eth0").exists());
    }

    #[test]
    fn a_file_in_place_of_the_folder_is_told() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(BackupFile::all(file.path()).is_err());
        let error = BackupFile::new(file.path(), "c1", "eth0").write(b"").unwrap_err();
        assert!(error.to_string().starts_with("create /"), "{error}");
    }
}
