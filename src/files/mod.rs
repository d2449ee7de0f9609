//! Files that outlive a call: locks, atomic replacement, folders that others may write to.
//!
//! | file | |
//! | --- | --- |
//! | `lock.rs` | flock(2) with a timeout |
//! | `atomic.rs` | atomic replacement of files |
//! | `dir.rs` | folders of state, whose files are opened without following links |
//! | `trust.rs` | which folders are believed |
//! | `read.rs` | reading files that others have named |
//! | `ring.rs` | a log file of bounded size |

pub mod atomic;
pub mod dir;
pub mod lock;
mod read;
pub mod ring;
pub mod trust;

use std::path::{Path, PathBuf};
use std::{fmt, io};

use nix::fcntl::AT_FDCWD;

pub use self::read::{read, read_text};
use crate::error;

/// A failed file operation, with its errno.
#[derive(Debug)]
pub struct Error {
    /// The operation: `open lock`.
    pub op: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The cause.
    pub source: io::Error,
}

/// A `Result` whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn new(op: &'static str, path: &Path, source: impl Into<io::Error>) -> Error {
        Error { op, path: path.to_owned(), source: source.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.op, self.path.display(), error::io_text(&self.source))
    }
}

impl std::error::Error for Error {}

impl From<Error> for error::Error {
    fn from(e: Error) -> error::Error {
        let error = error::Error::io(format_args!("{} {}", e.op, e.path.display()), &e.source);
        match e.source.kind() {
            io::ErrorKind::TimedOut => {
                let remedy = "try again; if that process hangs, end it to release the lock";
                error.with_code(error::Code::TRY_AGAIN).with_details(remedy)
            }
            io::ErrorKind::InvalidInput => {
                error.with_details("find out where it comes from, and move it away")
            }
            _ => error,
        }
    }
}

/// Adds the operation and the path to the error of an `io::Result` or a nix `Result`.
pub(crate) trait During<T> {
    fn during(self, op: &'static str, path: &Path) -> Result<T>;
}

impl<T, E: Into<io::Error>> During<T> for std::result::Result<T, E> {
    fn during(self, op: &'static str, path: &Path) -> Result<T> {
        self.map_err(|e| Error::new(op, path, e))
    }
}

/// Removes a file; a missing file is success.
pub(crate) fn remove_file(path: &Path) -> Result<()> {
    dir::remove_at(AT_FDCWD, path, path)
}
