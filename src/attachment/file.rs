//! The files of attachment records below `/run/cni/cnibox`: owned by root, lost at reboot.
//!
//! A record is replaced as a whole, so that a reader finds the old or the new one.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, OFlag};
use nix::sys::stat::Mode;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::files::atomic::{Durability, PREFIX, Writer};
use crate::files::dir::{self, open_regular, read_up_to};
use crate::files::lock::Lock;
use crate::files::{During, Result, remove_file};

/// The parent folder of all records.
pub(super) const DIR: &str = "/run/cni/cnibox";
/// The folder of the records, in [`DIR`].
pub(super) const ATTACHMENTS: &str = "/run/cni/cnibox/attachments";
/// The suffix of a record's file name, after the [instance](super::Owner::instance).
pub(super) const ENDING: &str = ".json";
/// Limit of a record's size in bytes.
const MAX_BYTES: usize = 1 << 24;

/// The path of a record.
pub(super) fn place(instance: &str) -> PathBuf {
    Path::new(ATTACHMENTS).join(format!("{instance}{ENDING}"))
}

/// The target of a link to a record from a folder beside that of the records.
pub(super) fn target(instance: &str) -> String {
    format!("../attachments/{instance}{ENDING}")
}

fn temporary(instance: &str) -> PathBuf {
    Path::new(ATTACHMENTS).join(format!("{PREFIX}{instance}"))
}

/// Waits for the turn of an attachment: ADD takes it while it replaces the record, and whoever reclaims the attachment for as long as
/// that takes.
pub(super) fn turn(instance: &str) -> Result<Option<Lock>> {
    Lock::turn_for(instance)
}

/// Replaces a record. The runtime serialises the calls of an attachment.
pub(super) fn write(instance: &str, content: &impl Serialize) -> Result<()> {
    let path = place(instance);
    let text = serde_json::to_vec(content).map_err(io::Error::from).during("write", &path)?;
    // A power cut ends the attachments as well.
    let writer = Writer::new(temporary(instance), Durability::Volatile);
    match writer.replace(&path, &text, 0o600) {
        Err(e) if e.source.kind() == ErrorKind::NotFound => {
            make_folder(Path::new(ATTACHMENTS))?;
            writer.replace(&path, &text, 0o600)
        }
        written => written,
    }
}

/// Removes a record, and what a killed process left of a new version.
pub(super) fn remove(instance: &str) -> Result<()> {
    remove_temporary(instance)?;
    remove_file(&place(instance))
}

/// For DEL: removes what killed processes left of an attachment besides its record.
pub(super) fn remove_remains_of(instance: &str) -> Result<()> {
    Lock::remove_turn(instance)?;
    remove_temporary(instance)
}

/// Removes what a killed process left of a record, or of a new version.
fn remove_temporary(instance: &str) -> Result<()> {
    remove_file(&temporary(instance))
}

/// As [`remove_temporary`], for all instances that begin with `prefix`, unless `is_valid`. Records that release 0.2.0 was writing
/// when it was killed are removed as well.
pub(super) fn sweep(prefix: &str, is_valid: &dyn Fn(&str) -> bool) {
    Lock::sweep_turns();
    let entries = fs::read_dir(ATTACHMENTS).into_iter().flatten().flatten();
    for name in entries.filter_map(|entry| entry.file_name().into_string().ok()) {
        let left = name.strip_prefix(PREFIX);
        let cut_off = || {
            let instance = name.strip_suffix(ENDING)?;
            matches!(load::<serde_json::Value>(&place(instance)), Ok(None)).then_some(instance)
        };
        if let Some(instance) = left.or_else(cut_off)
            && instance.starts_with(prefix)
            && !is_valid(instance)
        {
            // Another process may have removed the file.
            drop(remove_file(&Path::new(ATTACHMENTS).join(&name)));
        }
    }
}

/// Reads a record; `None` if the content is malformed.
pub(super) fn load<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let (mut file, meta): (File, _) = open_regular(AT_FDCWD, path, OFlag::O_RDONLY, Mode::empty())?;
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

/// The host of a record.
#[derive(Deserialize)]
struct Host {
    host: u64,
}

/// Removes what refers to records that no longer exist, and the files of release 0.2.0 that `is_here`.
pub(super) fn remove_remains(is_here: &dyn Fn(u64) -> bool) -> Result<()> {
    for folder in fs::read_dir(DIR).into_iter().flatten().flatten().map(|entry| entry.path()) {
        for name in instances(&folder, "").into_iter().map(|instance| instance + ENDING) {
            let path = folder.join(name);
            let is_old = || matches!(load::<Host>(&path), Ok(Some(old)) if is_here(old.host));
            if (path.is_symlink() && !path.exists()) || is_old() {
                remove_file(&path)?;
            }
        }
    }
    Ok(())
}

/// Creates the folder, which must be in [`DIR`]. Only root may write to both.
pub(super) fn make_folder(folder: &Path) -> Result<()> {
    dir::ensure(Path::new(DIR), 0o700)?;
    dir::ensure(folder, 0o700)
}
