//! A log of bounded size: the current file and the previous one.

use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, OFlag};
use nix::sys::stat::Mode;

use super::dir::{ensure_directory, open_regular, read_up_to};
use super::lock::FileLock;
use cni::files::{FileError, FileOperationContext, FileResult};

/// A log of lines in two files.
#[derive(Clone, Debug)]
pub struct RotatingLog {
    path: PathBuf,
    /// Bytes after which a file is full.
    limit: u64,
}

impl RotatingLog {
    /// The ring in the files `path` and `path.1`, in a directory that only root can write to.
    pub fn new(path: &Path, limit: u64) -> RotatingLog {
        RotatingLog { path: path.to_owned(), limit }
    }

    /// The file with the older lines.
    fn older_path(&self) -> PathBuf {
        PathBuf::from(format!("{}.1", self.path.display()))
    }

    /// Appends a line, which ends in a newline, in one write: lines of several processes do not
    /// mix.
    pub fn append_line(&self, line: &str) -> FileResult<()> {
        if let Some(dir) = self.path.parent() {
            ensure_directory(dir, 0o700)?;
        }
        let flags = OFlag::O_WRONLY | OFlag::O_APPEND | OFlag::O_CREAT;
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        let opened = open_regular(AT_FDCWD, &self.path, flags, mode);
        let (mut file, meta) = opened.during("open", &self.path)?;
        // The rest of a partial write must not follow another process's line.
        if file.write(line.as_bytes()).during("write", &self.path)? < line.len() {
            return Err(FileError::new("write", &self.path, io::ErrorKind::StorageFull));
        }
        // The process that gets the lock renames the file, unless another process has renamed it;
        // no process waits.
        if meta.len() + line.len() as u64 > self.limit
            && let Some(_lock) = FileLock::try_acquire_open(file, &self.path)?
            && self.path.metadata().is_ok_and(|now| now.ino() == meta.ino())
        {
            std::fs::rename(&self.path, self.older_path()).during("rename", &self.path)?;
        }
        Ok(())
    }

    /// The lines, oldest first. Concurrent writers may exceed the limit of a file: twice the limit
    /// is read of each.
    pub fn read_lines(&self) -> FileResult<String> {
        let mut text = String::new();
        for path in [self.older_path(), self.path.clone()] {
            let file = open_regular(AT_FDCWD, &path, OFlag::O_RDONLY, Mode::empty());
            let (mut file, meta) = match file {
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => continue,
                file => file.during("open", &path)?,
            };
            let most = usize::try_from(self.limit).unwrap_or(usize::MAX).saturating_mul(2);
            let mut bytes = read_up_to(&mut file, &meta, most).during("read", &path)?;
            if bytes.len() > most {
                bytes
                    .truncate(bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1));
            }
            text += &String::from_utf8_lossy(&bytes);
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn the_newest_lines_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let ring = RotatingLog::new(&dir.path().join("ring/lines.jsonl"), 1000);
        assert_eq!(ring.read_lines().unwrap(), "");
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let ring = &ring;
                scope.spawn(move || {
                    for i in 0..100 {
                        ring.append_line(&format!("{thread} line {i:03}\n")).unwrap();
                    }
                });
            }
        });
        let text = ring.read_lines().unwrap();
        assert!((500..=4000).contains(&text.len()), "{} bytes", text.len());
        assert!(text.lines().all(|line| line.len() == "0 line 000".len()), "{text}");
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&dir.path().join("ring")), 0o700);
        ring.append_line("last\n").unwrap();
        assert_eq!(mode(&ring.path), 0o600);
        assert!(ring.read_lines().unwrap().ends_with("last\n"));
    }

    #[test]
    fn symbolic_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (other, link) = (dir.path().join("other"), dir.path().join("link"));
        std::fs::write(&other, "").unwrap();
        symlink(&other, &link).unwrap();
        assert!(RotatingLog::new(&link, 10).append_line("line\n").is_err());
        assert_eq!(other.metadata().unwrap().len(), 0);
    }
}
