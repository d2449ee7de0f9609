//! Backups of the settings of an interface before a plugin changed them: one file for each
//! attachment, in the directories of the reference plugins.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use super::owner::{AttachmentId, network_hash};
use crate::files::dir;
use cni::files::atomic::{AtomicWriter, Durability, PREFIX};
use cni::files::{self, FileOperationContext, FileResult, remove_file};

/// The backup of one attachment. The runtime serialises the calls of an attachment, so there is no
/// lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupFile {
    dir: PathBuf,
    pub path: PathBuf,
    temporary: PathBuf,
}

/// The suffix of the names of backups.
const ENDING: &str = ".json";
/// Limit of the size of a file in bytes: a device may have thousands of routes.
const MAX_BYTES: usize = 16 << 20;

impl BackupFile {
    /// The backup of an attachment in the directory `dir`. Container and interface cannot contain
    /// `/`.
    pub fn new(dir: &Path, owner: &AttachmentId<'_>) -> BackupFile {
        let path = dir.join(format!("{}_{}{ENDING}", owner.id, owner.ifname));
        BackupFile { dir: dir.to_owned(), path, temporary: temporary_path(dir, owner) }
    }

    /// The content, if the file exists. Fails if others can write to the directory.
    pub fn read_content(&self) -> FileResult<Option<Vec<u8>>> {
        if dir::require_own_directory(&self.dir)? { read_backup(&self.path) } else { Ok(None) }
    }

    /// Replaces the content of the file, and creates the directory if it is missing.
    pub fn write_content(&self, content: &[u8]) -> FileResult<()> {
        dir::ensure_directory(&self.dir, 0o700)?;
        // Volatile, because a power cut also ends the interface.
        AtomicWriter::new(&self.temporary, Durability::Volatile)
            .replace_file(&self.path, content, 0o600)
    }

    /// Removes the file and its temporary file, if they exist.
    pub fn remove_files(&self) -> FileResult<()> {
        remove_file(&self.temporary)?;
        remove_file(&self.path)
    }
}

/// The backups in `dir`, with their contents; none if the directory does not exist. A file that
/// cannot be read is skipped with a warning: the backups of other attachments must still be found.
pub fn read_backups(dir: &Path) -> FileResult<Vec<(PathBuf, Vec<u8>)>> {
    let mut found = Vec::new();
    if !dir::require_own_directory(dir)? {
        return Ok(found);
    }
    for entry in fs::read_dir(dir).during("list", dir)? {
        let path = entry.during("list", dir)?.path();
        if path.to_string_lossy().ends_with(ENDING) {
            let content =
                read_backup(&path).inspect_err(|e| warn!("could not {e}")).unwrap_or_default();
            found.extend(content.map(|content| (path, content)));
        }
    }
    Ok(found)
}

/// The content of a backup; `None` if the file does not exist.
pub fn read_backup(path: &Path) -> FileResult<Option<Vec<u8>>> {
    match files::read_regular_file(path, MAX_BYTES) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        content => content.during("read", path).map(Some),
    }
}

/// Fails unless files can be listed and written in `dir`, or `dir` could be created; changes
/// nothing.
pub fn require_writable(dir: &Path) -> FileResult<()> {
    let existing = dir.ancestors().find(|dir| dir.symlink_metadata().is_ok()).unwrap_or(dir);
    access(existing, AccessFlags::W_OK | AccessFlags::X_OK).during("access", existing)?;
    fs::read_dir(existing).during("list", existing).map(drop)
}

/// The temporary name of an attachment in `dir`.
pub fn temporary_path(dir: &Path, owner: &AttachmentId<'_>) -> PathBuf {
    dir.join(format!("{PREFIX}{}", owner.instance_id()))
}

/// Removes from `dir` the [temporary files](temporary_path) that killed processes left for
/// attachments of `network`, except for the attachments `valid`.
pub fn remove_temporaries(dir: &Path, network: &str, valid: &[AttachmentId<'_>]) {
    let ours = format!("{PREFIX}{}-", network_hash(network));
    let valid: Vec<PathBuf> = valid.iter().map(|owner| temporary_path(dir, owner)).collect();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let temporary = entry.file_name().to_string_lossy().starts_with(&ours);
        if temporary && !valid.contains(&entry.path()) {
            drop(fs::remove_file(entry.path()));
        }
    }
}

/// Serialises an optional MAC address of a backup: as text, or as an empty string if there is none.
pub mod mac_text {
    use serde::de::{Deserialize, Deserializer, Error};
    use serde::ser::Serializer;

    use crate::netlink::MacAddress;

    #[expect(clippy::ref_option, clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
    pub fn serialize<S: Serializer>(mac: &Option<MacAddress>, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(&mac.map(|mac| mac.to_string()).unwrap_or_default())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<MacAddress>, D::Error> {
        let text = String::deserialize(d)?;
        if text.is_empty() {
            return Ok(None);
        }
        text.parse().map(Some).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const OWNER: AttachmentId<'_> = AttachmentId { network: "n", ifname: "eth0", id: "c1" };

    #[test]
    fn backups_are_written_listed_and_removed() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/tuning");
        assert_eq!(read_backups(&dir).unwrap(), []);
        require_writable(&dir).unwrap();
        let file = BackupFile::new(&dir, &OWNER);
        assert_eq!(file.read_content().unwrap(), None);
        file.write_content(b"one").unwrap();
        file.write_content(b"two").unwrap();
        assert_eq!(file.read_content().unwrap().as_deref(), Some(&b"two"[..]));
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&dir), mode(&dir.join("c1_eth0.json"))), (0o700, 0o600));
        // Files that are not backups, or cannot be read, do not hide the others.
        fs::write(dir.join("other"), "").unwrap();
        fs::create_dir(dir.join("0_eth0.json")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", dir.join("z_eth0.json")).unwrap();
        assert_eq!(read_backups(&dir).unwrap(), [(file.path.clone(), b"two".to_vec())]);
        fs::write(&file.temporary, "").unwrap();
        file.remove_files().unwrap();
        file.remove_files().unwrap();
        assert!(read_backups(&dir).unwrap().is_empty() && !file.temporary.exists());
        // A directory that others can write to is refused, and so is a file in place of the
        // directory.
        file.write_content(b"three").unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        for file in [file.clone(), BackupFile::new(&file.path, &OWNER)] {
            assert!(
                file.read_content().is_err()
                    && read_backups(&file.dir).is_err()
                    && file.write_content(b"").is_err()
            );
        }
    }

    #[test]
    fn only_temporary_files_of_stale_attachments_are_swept() {
        let dir = tempfile::tempdir().unwrap();
        let owner = |network, id| AttachmentId { network, ifname: "eth0", id };
        let path = |network, id| temporary_path(dir.path(), &owner(network, id));
        for path in [path("n", "valid"), path("n", "stale"), path("other", "stale")] {
            fs::write(path, "").unwrap();
        }
        remove_temporaries(dir.path(), "n", &[owner("n", "valid")]);
        assert!(path("n", "valid").exists() && path("other", "stale").exists());
        assert!(!path("n", "stale").exists());
    }
}
