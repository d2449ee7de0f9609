//! `--protect`: the executable gets the immutable flag, where the file system has it.
//!
//! The names of the plugins are links to the executable. `cp x portmap` writes through the link, and would
//! make every plugin x; with the flag it fails, and `cp -f`, as in the init containers of some
//! networks, replaces only its own name. The flag belongs to the file: it is taken away before the file is
//! replaced or removed, and set again in the end. What a kill leaves without it, the next run
//! completes.

use std::fs::File;
use std::io;
use std::path::Path;

use nix::errno::Errno;
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

use super::BINARY;
use super::files::During;
use crate::error::Result;
use crate::log;

/// Sets the flag unless it is set. What the file system cannot do is told, and no failure.
pub(super) fn set(folder: &Path) {
    let path = folder.join(BINARY);
    if let Err(cause) = change(&path, true) {
        let why = match Errno::from_raw(cause.raw_os_error().unwrap_or_default()) {
            Errno::ENOTTY | Errno::EOPNOTSUPP | Errno::EINVAL => {
                "the file system has no immutable flag".to_owned()
            }
            Errno::EPERM => "it takes the capability LINUX_IMMUTABLE".to_owned(),
            errno => crate::error::errno_text(errno),
        };
        log::warn(format_args!("{} is not protected: {why}", path.display()));
    }
}

/// Takes the flag away, if the file has it.
pub(super) fn lift(folder: &Path) -> Result<()> {
    let path = folder.join(BINARY);
    match change(&path, false) {
        Err(cause) if cause.raw_os_error() == Some(Errno::EPERM as i32) => {
            Err(cause).during("take the immutable flag of", &path)
        }
        // There is no such file, or no such flag.
        _ => Ok(()),
    }
}

fn change(path: &Path, wanted: bool) -> io::Result<()> {
    // Of the file itself, whatever has its name.
    if path.symlink_metadata()?.is_symlink() {
        return Ok(());
    }
    let file = File::open(path)?;
    let flags = ioctl_getflags(&file)?;
    if flags.contains(IFlags::IMMUTABLE) == wanted {
        return Ok(());
    }
    let mut changed = flags;
    changed.set(IFlags::IMMUTABLE, wanted);
    Ok(ioctl_setflags(&file, changed)?)
}
