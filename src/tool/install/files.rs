//! File operations of the installer.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

use nix::errno::Errno;
use rustix::fs::{IFlags, XattrFlags, getxattr, ioctl_getflags, ioctl_setflags};
use rustix::fs::{lgetxattr, lsetxattr};

use super::BINARY;
use cni::error::errno_text;
use cni::files::{FileError, FileOperationContext, FileResult, remove_file};

/// The mode of executables and directories: runtimes need not be root.
pub(super) const EXECUTABLE: u32 = 0o755;
/// Limit of the size of a file in bytes. The executables of other projects have about 100 MB.
const LARGEST: usize = 1 << 30;
/// The extended attribute with the SELinux label.
const LABEL: &str = "security.selinux";

/// The result of an operation on a file that may be missing; `None` if it is missing.
pub(super) fn if_present<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(cause) if cause.kind() == ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// The content of an executable or a configuration.
pub(super) fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    cni::files::read_regular_file(path, LARGEST)
}

pub(super) type DeviceInode = (u64, u64);

pub(super) fn device_inode(metadata: &Metadata) -> DeviceInode {
    (metadata.dev(), metadata.ino())
}

/// Creates a directory and its parents, unless they exist.
pub(super) fn create_directory(path: &Path) -> FileResult<()> {
    DirBuilder::new().recursive(true).mode(EXECUTABLE).create(path).during("create", path)
}

/// Creates an executable and syncs it to the disk.
pub(super) fn write_executable(path: &Path, bytes: &[u8]) -> FileResult<()> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(EXECUTABLE).open(path);
    let mut file = file.during("create", path)?;
    file.write_all(bytes).during("write", path)?;
    // The umask does not apply to chmod(2).
    file.set_permissions(Permissions::from_mode(EXECUTABLE)).during("change", path)?;
    file.sync_all().during("write", path)
}

/// Replaces `to` with a hard link to `from` (symbolic links are not followed), or with a copy where
/// the file system or `fs.protected_hardlinks` forbids the link.
pub(super) fn link_or_copy(from: &Path, to: &Path) -> FileResult<()> {
    remove_file(to)?;
    let Err(cause) = fs::hard_link(from, to) else { return Ok(()) };
    if cause.kind() == ErrorKind::NotFound {
        return Err(FileError::new("keep", from, cause));
    }
    if let Ok(target) = fs::read_link(from) {
        return symlink(target, to).during("keep", from);
    }
    let copied = fs::copy(from, to).and_then(|_| File::open(to)?.sync_all());
    copied.during("keep", from)
}

/// Gives a file the SELinux label of `directory`, if the directory has one. Files created in
/// [`super::STATE`] may have inherited another label, with which a confined runtime must not
/// execute them.
pub(super) fn copy_label(directory: &Path, file: &Path) {
    let (mut label, mut own) = ([0; 512], [0; 512]);
    let Ok(length) = getxattr(directory, LABEL, &mut label) else { return };
    let label = &label[..length];
    if lgetxattr(file, LABEL, &mut own).is_ok_and(|length| own[..length] == *label) {
        return;
    }
    if let Err(cause) = lsetxattr(file, LABEL, label, XattrFlags::empty()) {
        let cause = errno_text(Errno::from_raw(cause.raw_os_error()));
        warn!("could not set the SELinux label of {}: {cause}", file.display());
    }
}

/// `--protect`: sets the immutable flag of the executable. A file system without the flag, or a
/// process without the capability, is only a warning.
///
/// The names of the plugins are links to the executable: `cp x portmap` follows the link and would
/// overwrite all plugins. With the flag that fails, and `cp -f`, which the init containers of some
/// networks use, replaces only the link. The flag belongs to the inode, so it is cleared before
/// the executable is replaced and set on the new one. If the installer is killed in between, the
/// next run sets the flag.
pub(super) fn protect_executable(directory: &Path) {
    let path = directory.join(BINARY);
    if let Err(cause) = set_immutable(&path, true) {
        let why = match Errno::from_raw(cause.raw_os_error().unwrap_or_default()) {
            Errno::ENOTTY | Errno::EOPNOTSUPP | Errno::EINVAL => {
                "the file system has no immutable flag".to_owned()
            }
            Errno::EPERM => "the capability LINUX_IMMUTABLE is missing".to_owned(),
            errno => errno_text(errno),
        };
        warn!("{} is not protected: {why}", path.display());
    }
}

/// Clears the immutable flag of the executable, if it is set.
pub(super) fn unprotect_executable(directory: &Path) -> FileResult<()> {
    let path = directory.join(BINARY);
    match set_immutable(&path, false) {
        Err(cause) if cause.raw_os_error() == Some(Errno::EPERM as i32) => {
            Err(cause).during("clear the immutable flag of", &path)
        }
        // There is no such file, or the file system has no such flag.
        _ => Ok(()),
    }
}

fn set_immutable(path: &Path, wanted: bool) -> io::Result<()> {
    // The ioctl would change the target of a link.
    if path.symlink_metadata()?.is_symlink() {
        return Ok(());
    }
    let file = File::open(path)?;
    let mut flags = ioctl_getflags(&file)?;
    if flags.contains(IFlags::IMMUTABLE) == wanted {
        return Ok(());
    }
    flags.set(IFlags::IMMUTABLE, wanted);
    Ok(ioctl_setflags(&file, flags)?)
}
