//! Opening files for reading by one system call.

use std::fs::File;
use std::io;
use std::path::Path;

use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::Mode;

/// Opens the file at `path` with these flags besides `O_CLOEXEC`. After open(2), musl's function of this name sets
/// close-on-exec by another system call, which openat(2) does not need.
pub fn open_file(path: impl AsRef<Path>, flags: OFlag) -> io::Result<File> {
    Ok(openat(AT_FDCWD, path.as_ref(), flags | OFlag::O_CLOEXEC, Mode::empty()).map(File::from)?)
}
