//! Atomic replacement of files: written under a temporary name, then renamed.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::Mode;

use super::{FileOperationContext, FileResult, create_new, remove_file, sync_directory};

/// The event that a file must survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// A power cut: file and directory are synced. For files that must outlive the boot, such as a
    /// cached configuration without which a network cannot be removed.
    Synced,
    /// The end of the process: nothing is synced. For files about running containers, such as
    /// backups: a power cut ends the containers, too.
    Volatile,
}

/// The prefix of temporary names.
pub const PREFIX: &str = ".tmp-";
/// The age after which no process is still writing a temporary file of a few kilobytes.
const STALE: Duration = Duration::from_secs(60);

/// Writes files under one temporary name, then renames them.
///
/// With a fixed name the next writer removes the file that a killed process left; the caller has to
/// hold a lock that covers the name.
#[derive(Debug)]
pub struct AtomicWriter {
    temp: PathBuf,
    durability: Durability,
}

impl AtomicWriter {
    /// Uses `temp`, which must be on the file system of the files to write.
    pub fn new(temp: impl Into<PathBuf>, durability: Durability) -> AtomicWriter {
        AtomicWriter { temp: temp.into(), durability }
    }

    /// Uses a unique hidden name beside `path`, for directories without a lock: see
    /// [`remove_stale_temporaries`]. The name is short, because the name of `path` may have the
    /// maximum length.
    pub fn with_unique_name(path: &Path, durability: Durability) -> AtomicWriter {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let n = COUNTER.fetch_add(1, Ordering::Relaxed);
        let temp = format!("{PREFIX}{}-{n}", std::process::id());
        AtomicWriter::new(path.with_file_name(temp), durability)
    }

    /// Replaces the file at `path` by a new one of `mode`.
    pub fn replace_file(&self, path: &Path, bytes: &[u8], mode: u32) -> FileResult<()> {
        let mode = Mode::from_bits_truncate(mode);
        let file = create_new(AT_FDCWD, &self.temp, &self.temp, mode, bytes)?;
        let is_synced = self.durability == Durability::Synced;
        let written = if is_synced { file.sync_all() } else { Ok(()) };
        let renamed = written
            .during("write", &self.temp)
            .and_then(|()| fs::rename(&self.temp, path).during("replace", path));
        if renamed.is_err() {
            remove_file(&self.temp)?;
        }
        renamed?;
        match path.parent().filter(|_| is_synced) {
            Some(dir) => sync_directory(dir),
            None => Ok(()),
        }
    }
}

/// Whether the name is from [`AtomicWriter::with_unique_name`].
fn is_unique_temporary(name: &str) -> bool {
    let numbers = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.is_some_and(|(pid, n)| number(pid) && number(n))
}

/// Removes from `dir` the temporary files that killed writers without a lock left.
pub fn remove_stale_temporaries(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let temporary = is_unique_temporary(&entry.file_name().to_string_lossy());
        let age = || entry.metadata().ok()?.modified().ok()?.elapsed().ok();
        if temporary && age().is_some_and(|age| age > STALE) {
            // Another process may have removed the file.
            drop(fs::remove_file(entry.path()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn an_atomic_write_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let writer = AtomicWriter::with_unique_name(&path, Durability::Synced);
        writer.replace_file(&path, b"one", 0o600).unwrap();
        writer.replace_file(&path, b"two", 0o600).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        // A directory is not replaced.
        let taken = dir.path().join("taken");
        fs::create_dir(&taken).unwrap();
        assert!(writer.replace_file(&taken, b"one", 0o600).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn only_stale_temporary_files_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let old = std::time::SystemTime::now() - 2 * STALE;
        let foreign = [".tmp-", ".tmp-1", ".tmp-1-", ".tmp-1-x", ".tmp-1-0-0", "kept"];
        let old_ones = foreign.iter().chain(&[".tmp-1-0"]).map(|name| (*name, Some(old)));
        for (name, time) in old_ones.chain([(".tmp-2-0", None)]) {
            let file = File::create(dir.path().join(name)).unwrap();
            if let Some(time) = time {
                file.set_modified(time).unwrap();
            }
        }
        remove_stale_temporaries(dir.path());
        let exists = |name: &str| dir.path().join(name).exists();
        assert!(!exists(".tmp-1-0") && exists(".tmp-2-0"));
        assert!(foreign.iter().all(|name| exists(name)));
    }

    #[test]
    fn a_temporary_file_with_a_hard_link_is_not_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let (temp, old) = (dir.path().join("temp"), dir.path().join("old"));
        fs::write(&temp, "old").unwrap();
        fs::hard_link(&temp, &old).unwrap();
        let writer = AtomicWriter::new(&temp, Durability::Volatile);
        writer.replace_file(&dir.path().join("new"), b"new", 0o600).unwrap();
        assert_eq!(fs::read(&old).unwrap(), b"old");
        assert!(!temp.exists());
    }
}
