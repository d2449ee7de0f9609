//! The files of attachment records below `/run/cni/cnibox`: owned by root, lost at reboot.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::fcntl::{AT_FDCWD, OFlag};
use nix::sys::stat::Mode;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::files::dir::{self, open_regular, read_up_to};
use crate::files::{During, Error, Result};

/// The parent folder of all records.
pub(super) const DIR: &str = "/run/cni/cnibox";
/// The suffix of a record's file name, after the [instance](super::Owner::instance).
pub(super) const ENDING: &str = ".json";
/// The network namespace of this host: several hosts may share one `/run`.
const HOST: &str = "/proc/thread-self/ns/net";
/// Limit of a record's size in bytes.
const MAX_BYTES: usize = 1 << 24;

/// The inode number of the calling thread's network namespace.
pub(super) fn host() -> Option<u64> {
    fs::metadata(HOST).ok().map(|meta| meta.ino())
}

/// Writes a record of this host, without a temporary file: the runtime serialises the calls of an attachment,
/// and a truncated record is ignored.
pub(super) fn write(path: &Path, host: u64, content: &impl Serialize) -> Result<()> {
    if host == 0 {
        let why = io::Error::other("the host's network namespace is unknown");
        return Err(Error::new("write", path, why));
    }
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_TRUNC;
    let open = || open_regular(AT_FDCWD, path, flags, Mode::S_IRUSR | Mode::S_IWUSR);
    let (mut file, _) = match (open(), path.parent()) {
        (Err(e), Some(folder)) if e.kind() == ErrorKind::NotFound => {
            make_folder(folder)?;
            open()
        }
        (file, _) => file,
    }
    .during("write", path)?;
    let text = serde_json::to_vec(content).map_err(io::Error::from);
    text.and_then(|text| file.write_all(&text)).during("write", path)
}

/// Reads a record; `None` if the content is malformed.
pub(super) fn load<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let (mut file, meta) = open_regular(AT_FDCWD, path, OFlag::O_RDONLY, Mode::empty())?;
    let content = read_up_to(&mut file, &meta, MAX_BYTES)?;
    Ok(serde_json::from_slice(&content).ok())
}

/// The instances beginning with `prefix` that have a file in the folder.
pub(super) fn instances(folder: &Path, prefix: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let names = names.filter(|name| name.starts_with(prefix));
    names.filter_map(|name| name.strip_suffix(ENDING).map(str::to_owned)).collect()
}

/// Creates the folder, which must be in [`DIR`]. Only root may write to both.
pub(super) fn make_folder(folder: &Path) -> Result<()> {
    dir::ensure(Path::new(DIR), 0o700)?;
    dir::ensure(folder, 0o700)
}
