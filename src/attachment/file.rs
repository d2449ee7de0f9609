//! The files of attachment records below `/run/cni/cnibox`: owned by root, lost at reboot.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// The parent folder of all records.
pub(super) const DIR: &str = "/run/cni/cnibox";
/// The suffix of a record's file name, after the [instance](super::Owner::instance).
pub(super) const ENDING: &str = ".json";
/// The network namespace of this host: several hosts may share one `/run`.
const HOST: &str = "/proc/thread-self/ns/net";

/// The inode number of the calling thread's network namespace.
pub(super) fn host() -> Option<u64> {
    fs::metadata(HOST).ok().map(|meta| meta.ino())
}

fn nofollow() -> i32 {
    (OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC).bits()
}

/// Writes a record of this host, without a temporary file: the runtime serialises the calls of an attachment,
/// and a truncated record is ignored.
pub(super) fn write(path: &Path, host: u64, content: &impl Serialize) -> io::Result<()> {
    if host == 0 {
        return Err(io::Error::other("the host's namespace cannot be told"));
    }
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(nofollow());
    let mut file = options.open(path).or_else(|e| match (e.kind(), path.parent()) {
        (ErrorKind::NotFound, Some(folder)) => {
            make_folder(folder).and_then(|()| options.open(path))
        }
        _ => Err(e),
    })?;
    file.write_all(&serde_json::to_vec(content)?)
}

/// `None` if the content is malformed.
pub(super) fn load<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let mut file = OpenOptions::new().read(true).custom_flags(nofollow()).open(path)?;
    let mut content = Vec::new();
    file.read_to_end(&mut content)?;
    Ok(serde_json::from_slice(&content).ok())
}

/// The instances beginning with `prefix` that have a file in the folder.
pub(super) fn instances(folder: &Path, prefix: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let names = names.filter(|name| name.starts_with(prefix));
    names.filter_map(|name| name.strip_suffix(ENDING).map(str::to_owned)).collect()
}

/// Makes the folder, if the folder and its parents are owned and writable by root alone.
pub(super) fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    for dir in [Path::new(DIR), folder] {
        let meta = fs::symlink_metadata(dir)?;
        if !meta.is_dir() || meta.uid() != geteuid().as_raw() || meta.mode() & 0o022 != 0 {
            return Err(io::Error::new(
                ErrorKind::PermissionDenied,
                format!("{} is not root's own", dir.display()),
            ));
        }
    }
    Ok(())
}

pub(super) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            Err(Error::io(format_args!("remove {}", path.display()), &e))
        }
        _ => Ok(()),
    }
}
