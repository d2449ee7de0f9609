//! Files that outlive a call: locks, atomic replacement, directories that others may write to.
//!
//! | file | |
//! | --- | --- |
//! | `lock.rs` | flock(2) with a timeout |
//! | `atomic.rs` | atomic replacement of files |
//! | `dir.rs` | directories of state, whose files are opened without following links |
//! | `trust.rs` | which directories are trusted |
//! | `read.rs` | reading files that others have named |
//! | `ring.rs` | a log file of bounded size |

pub mod atomic;
pub mod dir;
pub mod lock;
mod read;
pub mod ring;
pub mod trust;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use nix::fcntl::AT_FDCWD;

pub use self::read::{read_regular_file, read_text};
use crate::error;

/// A failed file operation, with its errno.
#[derive(Debug)]
pub struct FileError {
    /// The operation: `open lock`.
    pub op: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
}

/// A `Result` whose error is [`FileError`].
pub type FileResult<T, E = FileError> = Result<T, E>;

impl FileError {
    pub(crate) fn new(op: &'static str, path: &Path, source: impl Into<io::Error>) -> FileError {
        FileError { op, path: path.to_owned(), source: source.into() }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.op, self.path.display(), error::io_text(&self.source))
    }
}

impl std::error::Error for FileError {}

impl From<FileError> for error::Error {
    fn from(e: FileError) -> error::Error {
        let error = error::Error::io(format_args!("{} {}", e.op, e.path.display()), &e.source);
        match e.source.kind() {
            io::ErrorKind::TimedOut => {
                let remedy = "try again; if that process hangs, end it to release the lock";
                error.with_code(error::ErrorCode::TRY_AGAIN).with_details(remedy)
            }
            io::ErrorKind::InvalidInput => error.with_details("find out where it comes from, and move it away"),
            _ => error,
        }
    }
}

/// Adds the operation and the path to the error of an `io::Result` or a nix `Result`.
pub(crate) trait FileOperationContext<T> {
    fn during(self, op: &'static str, path: &Path) -> FileResult<T>;
}

impl<T, E: Into<io::Error>> FileOperationContext<T> for Result<T, E> {
    fn during(self, op: &'static str, path: &Path) -> FileResult<T> {
        self.map_err(|e| FileError::new(op, path, e))
    }
}

/// Removes a file; a missing file is success.
pub(crate) fn remove_file(path: &Path) -> FileResult<()> {
    dir::remove_at(AT_FDCWD, path, path)
}

/// Syncs the entries of a directory to the disk.
pub(crate) fn sync_directory(path: &Path) -> FileResult<()> {
    File::open(path).and_then(|directory| directory.sync_all()).during("sync", path)
}
