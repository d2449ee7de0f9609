//! The files of attachments: below `/run/cni/cnibox`, root's own, and gone with the boot.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// What all of them are below.
pub(super) const DIR: &str = "/run/cni/cnibox";
/// How their names end, behind the [instance](super::Owner::instance).
pub(super) const ENDING: &str = ".json";
/// The host's namespace: several may share `/run`.
const HOST: &str = "/proc/thread-self/ns/net";

/// The number of the calling thread's namespace.
pub(super) fn host() -> Option<u64> {
    fs::metadata(HOST).ok().map(|meta| meta.ino())
}

fn nofollow() -> i32 {
    (OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC).bits()
}

/// Writes what is about this host. Not by way of a temporary name: calls for one attachment come one
/// after the other, and what is cut off half-way is not believed.
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
