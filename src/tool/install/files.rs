//! File operations of the installer, with errors that say what to do about them.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

use nix::errno::Errno;

use super::STATE;
use crate::error::{Error, Result};
use crate::files::lock::Lock;
use crate::log;

/// Executables and folders are for everybody to read and run.
pub(super) const EXECUTABLE: u32 = 0o755;
/// The label of SELinux.
const LABEL: &str = "security.selinux";

/// Names the operation of a failing file operation, and a remedy.
pub(super) trait During<T> {
    fn during(self, what: &str, path: &Path) -> Result<T>;
}

impl<T, E: Into<io::Error>> During<T> for std::result::Result<T, E> {
    fn during(self, what: &str, path: &Path) -> Result<T> {
        self.map_err(|cause| failure(what, path, &cause.into()))
    }
}

fn failure(what: &str, path: &Path, cause: &io::Error) -> Error {
    let error = Error::io(format_args!("{what} {}", path.display()), cause);
    match cause.kind() {
        ErrorKind::ReadOnlyFilesystem => error.with_details(
            "mount the folder writable, or name another one that the runtime looks into",
        ),
        ErrorKind::PermissionDenied => error
            .with_details("run as the owner of the folder, or with --root below a folder of yours"),
        ErrorKind::StorageFull => {
            error.with_details("nothing was switched; make room and run it again")
        }
        _ => error,
    }
}

/// Creates a folder and those above it; that it is there is fine.
pub(super) fn create_folder(path: &Path) -> Result<()> {
    DirBuilder::new().recursive(true).mode(EXECUTABLE).create(path).during("create", path)
}

/// Keeps other installers away until it is dropped.
pub(super) fn lock(folder: &Path) -> Result<Lock> {
    let path = folder.join(STATE).join("lock");
    Ok(Lock::exclusive(&path)?)
}

/// A new executable, on the disk when this returns.
pub(super) fn write_executable(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(EXECUTABLE).open(path);
    let mut file = file.during("create", path)?;
    file.write_all(bytes).during("write", path)?;
    // Whatever the umask says: runtimes need not be root.
    file.set_permissions(Permissions::from_mode(EXECUTABLE)).during("change", path)?;
    file.sync_all().during("write", path)
}

/// A second name for what is at `from`, links not followed; a copy where the file system or its
/// rules allow no second name. `to` may be left over from before.
pub(super) fn keep(from: &Path, to: &Path) -> Result<()> {
    remove(to)?;
    let Err(cause) = fs::hard_link(from, to) else { return Ok(()) };
    if cause.kind() == ErrorKind::NotFound {
        return Err(failure("keep", from, &cause));
    }
    if let Ok(target) = fs::read_link(from) {
        return symlink(target, to).during("keep", from);
    }
    fs::copy(from, to).during("keep", from)?;
    File::open(to).and_then(|file| file.sync_all()).during("keep", from)
}

/// Removes a file or link; that it is gone is fine.
pub(super) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(cause) if cause.kind() != ErrorKind::NotFound => Err(failure("remove", path, &cause)),
        _ => Ok(()),
    }
}

/// Makes the names of a folder survive a power cut.
pub(super) fn sync(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|dir| dir.sync_all()).during("sync", folder)
}

/// Gives a file the SELinux label of `folder`, if there are labels: a file made in our own folder
/// may have another label, and a confined runtime would not be allowed to start it.
pub(super) fn copy_label(folder: &Path, file: &Path) {
    let mut label = [0; 512];
    let Ok(length) = rustix::fs::getxattr(folder, LABEL, &mut label) else { return };
    let mut own = [0; 512];
    let same =
        rustix::fs::lgetxattr(file, LABEL, &mut own).is_ok_and(|n| own[..n] == label[..length]);
    if same {
        return;
    }
    let flags = rustix::fs::XattrFlags::empty();
    if let Err(cause) = rustix::fs::lsetxattr(file, LABEL, &label[..length], flags) {
        let cause = crate::error::errno_text(Errno::from_raw(cause.raw_os_error()));
        log::warn(format_args!("label {} as its folder: {cause}", file.display()));
    }
}
