//! Everything kept on disk: the lock, atomic writes, the IPAM leases and what lies beside them.
//!
//! | file | |
//! | --- | --- |
//! | `lock.rs`, `atomic.rs` | flock with an end to its patience, files that appear whole |
//! | `dir.rs` | an open folder, whose files are reached by no link |
//! | `lease.rs`, `listing.rs`, `leases.rs` | one lease, all that a folder has, a locked store |
//! | `index.rs`, `table.rs`, `origin.rs` | leases by owner, so that no command reads all of them |
//! | `note.rs`, `life.rs` | what tells whether the container of a lease is alive |
//! | `quarantine.rs` | addresses that were freed a short while ago |
//! | `folder.rs` | folders that only root can write to |
//! | `backup.rs` | what an interface was like before it was changed |

pub mod atomic;
pub mod backup;
mod dir;
pub mod folder;
#[doc(hidden)]
pub mod fuzz;
mod index;
mod lease;
mod leases;
mod life;
mod listing;
pub mod lock;
mod note;
mod origin;
mod quarantine;
mod table;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

pub use crate::attachment::{Gone, Life};
use crate::error;

pub use lease::{Lease, Owner};
pub use leases::{LeaseStore, Terms};
pub use life::Reclaimed;
pub use listing::{Known, Listing, Reservation, lease_of, networks};

/// Where host-local keeps leases unless the configuration says otherwise.
pub const DATA_DIR: &str = "/var/lib/cni/networks";

/// A file operation that failed, with its errno.
#[derive(Debug)]
pub struct Error {
    /// What was attempted: `open lock`.
    pub op: &'static str,
    /// On which file.
    pub path: PathBuf,
    /// Why it failed.
    pub source: io::Error,
}

/// A `Result` whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    fn new(op: &'static str, path: &Path, source: impl Into<io::Error>) -> Error {
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
                let remedy = "try again; if that process hangs, end it, and the lock is free";
                error.with_code(error::Code::TRY_AGAIN).with_details(remedy)
            }
            io::ErrorKind::InvalidInput => {
                error.with_details("see who put it there, and move it away")
            }
            _ => error,
        }
    }
}

/// Names the operation of a failing `io::Result` or nix `Result`.
trait During<T> {
    fn during(self, op: &'static str, path: &Path) -> Result<T>;
}

impl<T, E: Into<io::Error>> During<T> for std::result::Result<T, E> {
    fn during(self, op: &'static str, path: &Path) -> Result<T> {
        self.map_err(|e| Error::new(op, path, e))
    }
}

/// Removes a file; that it is gone already is success.
fn remove_file(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::new("remove", path, e)),
        _ => Ok(()),
    }
}
