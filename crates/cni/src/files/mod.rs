//! Files of the cache and of state: reading what others have named, and atomic replacement. Shared
//! with cnibox, not a part of the interface.
//!
//! | file | |
//! | --- | --- |
//! | `atomic.rs` | atomic replacement of files |
//! | `read.rs` | opening and reading files that others have named |

pub mod atomic;
mod read;

use std::fs::File;
use std::io::Write;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};

pub use self::read::{open_file, read_regular_file, read_text};
use crate::error::{self, ErrorCode};

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
    pub fn new(op: &'static str, path: &Path, source: impl Into<io::Error>) -> FileError {
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
                error.with_code(ErrorCode::TRY_AGAIN).with_details(remedy)
            }
            io::ErrorKind::InvalidInput => {
                error.with_details("find out where it comes from, and move it away")
            }
            _ => error,
        }
    }
}

/// Adds the operation and the path to the error of an `io::Result` or a nix `Result`.
pub trait FileOperationContext<T> {
    fn during(self, op: &'static str, path: &Path) -> FileResult<T>;
}

impl<T, E: Into<io::Error>> FileOperationContext<T> for Result<T, E> {
    fn during(self, op: &'static str, path: &Path) -> FileResult<T> {
        self.map_err(|e| FileError::new(op, path, e))
    }
}

/// Removes a file; a missing file is success.
pub fn remove_file(path: &Path) -> FileResult<()> {
    remove_at(AT_FDCWD, path, path)
}

/// Syncs the entries of a directory to the disk.
pub fn sync_directory(path: &Path) -> FileResult<()> {
    File::open(path).and_then(|directory| directory.sync_all()).during("sync", path)
}

/// Creates the file `name` in the directory `dir` with this content, in place of a file that a
/// killed process left. Errors show `path`.
pub fn create_new(
    dir: BorrowedFd<'_>,
    name: &Path,
    path: &Path,
    mode: Mode,
    bytes: &[u8],
) -> FileResult<File> {
    let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    let file = match openat(dir, name, flags, mode) {
        Err(Errno::EEXIST) => {
            // Removed, not truncated: after a kill between link and unlink the name is a second
            // name of a valid file.
            remove_at(dir, name, path)?;
            openat(dir, name, flags, mode)
        }
        file => file,
    };
    let mut file = File::from(file.during("create", path)?);
    let written = file.write_all(bytes);
    if written.is_err() {
        // Removes the part that fitted on a full disk.
        remove_at(dir, name, path)?;
    }
    written.during("write", path).map(|()| file)
}

/// Removes the file `name` in the directory `dir`; a missing file is success, also where a file is
/// in place of the directory. Errors show `path`.
pub fn remove_at(dir: BorrowedFd<'_>, name: &Path, path: &Path) -> FileResult<()> {
    match unlinkat(dir, name, UnlinkatFlags::NoRemoveDir) {
        Err(Errno::ENOENT | Errno::ENOTDIR) => Ok(()),
        removed => removed.during("remove", path),
    }
}
