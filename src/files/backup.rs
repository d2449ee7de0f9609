//! What an interface was like before it was changed: a file for each attachment, in the place
//! where the reference plugins keep theirs.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use super::atomic::{self, Durability, Writer};
use super::{During, Result, dir, remove_file};
use crate::attachment::Owner;

/// The file of one attachment. Calls for one attachment come one after the other, so they need no
/// lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupFile {
    dir: PathBuf,
    path: PathBuf,
    temporary: PathBuf,
}

/// How the names of the files end.
const ENDING: &str = ".json";

impl BackupFile {
    /// The backup of an attachment, in the folder `dir`. Container and interface cannot contain `/`.
    pub fn new(dir: &Path, owner: &Owner<'_>) -> BackupFile {
        let path = dir.join(format!("{}_{}{ENDING}", owner.id, owner.ifname));
        BackupFile { dir: dir.to_owned(), path, temporary: atomic::temporary_of(dir, owner) }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its content, if there is any. In a folder that others can write to nothing is.
    pub fn read(&self) -> Result<Option<Vec<u8>>> {
        if dir::require_own(&self.dir)? { read(&self.path) } else { Ok(None) }
    }

    /// Replaces the content of the file, and makes the folder if it is missing.
    pub fn write(&self, content: &[u8]) -> Result<()> {
        dir::ensure(&self.dir, 0o700)?;
        // It describes a living interface: a power cut ends that too.
        Writer::new(&self.temporary, Durability::Volatile).replace(&self.path, content, 0o600)
    }

    /// Removes it, if it is there, and what a killed process left of it.
    pub fn remove(&self) -> Result<()> {
        remove_file(&self.temporary)?;
        remove_file(&self.path)
    }
}

/// The backups in `dir`, which need not be there, with their contents.
pub fn all(dir: &Path) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut found = Vec::new();
    if !dir::require_own(dir)? {
        return Ok(found);
    }
    for entry in fs::read_dir(dir).during("list", dir)? {
        let path = entry.during("list", dir)?.path();
        if path.to_string_lossy().ends_with(ENDING)
            && let Some(content) = read(&path)?
        {
            found.push((path, content));
        }
    }
    Ok(found)
}

/// Removes one of them, if it is there.
pub fn remove(path: &Path) -> Result<()> {
    remove_file(path)
}

fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        content => content.during("read", path).map(Some),
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

    const OWNER: Owner<'_> = Owner { network: "n", ifname: "eth0", id: "c1" };

    #[test]
    fn written_listed_and_removed() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/tuning");
        assert_eq!(all(&dir).unwrap(), []);
        require_writable(&dir).unwrap();
        let file = BackupFile::new(&dir, &OWNER);
        assert_eq!(file.read().unwrap(), None);
        file.write(b"one").unwrap();
        file.write(b"two").unwrap();
        assert_eq!(fs::read(dir.join("c1_eth0.json")).unwrap(), b"two");
        assert_eq!(file.read().unwrap().as_deref(), Some(&b"two"[..]));
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&dir), mode(&file.path)), (0o700, 0o600));
        fs::write(dir.join("other"), "").unwrap();
        assert_eq!(all(&dir).unwrap(), [(file.path.clone(), b"two".to_vec())]);
        fs::write(&file.temporary, "").unwrap();
        file.remove().unwrap();
        file.remove().unwrap();
        assert_eq!(all(&dir).unwrap(), []);
        assert!(!file.temporary.exists());
        // What others can write to is not believed.
        file.write(b"three").unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(file.read().is_err() && all(&dir).is_err() && file.write(b"").is_err());
    }

    #[test]
    fn a_file_in_place_of_the_folder_is_told() {
        let place = tempfile::NamedTempFile::new().unwrap();
        assert!(all(place.path()).is_err());
        let error = BackupFile::new(place.path(), &OWNER).write(b"").unwrap_err();
        assert!(error.to_string().starts_with("open /"), "{error}");
    }
}
