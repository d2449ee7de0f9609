//! The lock that commands take on a store: flock(2) on a file, as the reference plugins do it.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use fs2::FileExt;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use super::{During, Error, Result};

/// An exclusive lock, held until it is dropped or the process ends.
#[derive(Debug)]
pub struct Lock {
    /// Closing it releases the lock; close-on-exec, so that no child keeps it.
    _file: File,
}

impl Lock {
    /// Waits for the lock on `path`, which is created (0640) if it is missing.
    pub fn exclusive(path: &Path) -> Result<Lock> {
        // Opened for reading only: enough for flock, and works for a lock that is there on a
        // file system that became read-only. The standard library refuses that combination.
        let flags = OFlag::O_RDONLY | OFlag::O_CREAT | OFlag::O_CLOEXEC;
        let mode = Mode::S_IRUSR | Mode::S_IWUSR | Mode::S_IRGRP;
        let file = File::from(open(path, flags, mode).during("open lock", path)?);
        loop {
            match file.lock_exclusive() {
                Ok(()) => return Ok(Lock { _file: file }),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::new("take lock", path, e)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn excludes_others_until_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lock = Lock::exclusive(&path).unwrap();
        let other = File::open(&path).unwrap();
        assert!(FileExt::try_lock_exclusive(&other).is_err());
        drop(lock);
        assert!(FileExt::try_lock_exclusive(&other).is_ok());
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o137, 0);
    }

    #[test]
    fn says_what_it_could_not_open() {
        let error = Lock::exclusive(Path::new("/nowhere/lock")).unwrap_err();
        let error = crate::error::Error::from(error);
        assert_eq!(error.msg(), "open lock /nowhere/lock: no such file or directory");
        assert_eq!(error.code(), crate::error::Code::IO);
    }
}
