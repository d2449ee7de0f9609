//! The files of attachment records below `/run/cni/cnibox`: owned by root, lost at reboot.
//!
//! ```text
//! attachments/<instance>.json
//! by-address/10.88.0.2/<instance> -> attachments/<instance>.json
//! <feature>/<instance>.json -> attachments/<instance>.json
//! ```
//!
//! A record is replaced as a whole, so that a reader finds the old or the new one. A record that cannot be parsed counts
//! as absent.

use std::cell::LazyCell;
use std::collections::HashSet;
use std::fmt;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, OFlag};
use nix::sys::stat::Mode;

use super::backup::{self, temporary_of};
use super::owner::{Owner, network_hash};
use super::record::Record;
use crate::cni::NetworkName;
use crate::error::{Error, Result};
use crate::files::atomic::{Durability, Writer};
use crate::files::dir::{self, open_regular, read_up_to};
use crate::files::lock::Lock;
use crate::files::{self, During, remove_file};
use crate::log;
use crate::netns;

/// Logs that something is not recorded. In a user namespace the folder belongs to another user, as in a rootless container
/// without a `/run` of its own, and nobody there can change that: its network ends with it.
pub fn unrecorded(what: fmt::Arguments<'_>) {
    let map = files::read(Path::new("/proc/self/uid_map"), 4096).unwrap_or_default();
    let map = String::from_utf8_lossy(&map);
    let is_whole = map.split_whitespace().eq(["0", "0", "4294967295"]);
    if is_whole || map.is_empty() { log::warn(what) } else { log::debug(what) }
}

/// The parent folder of all records.
const DIR: &str = "/run/cni/cnibox";
/// The folder of the records, in [`DIR`].
pub(super) const ATTACHMENTS: &str = "attachments";
/// The records by address, in [`DIR`]: for each address a folder with an entry for each attachment.
const BY_ADDRESS: &str = "by-address";
/// The suffix of a record's file name, after the [instance](Owner::instance).
const ENDING: &str = ".json";
/// Limit of a record's size in bytes.
const MAX_BYTES: usize = 1 << 24;
/// Attempts to add an entry, whose folder another process may be removing.
const LINK_TRIES: usize = 10;

/// A folder of records, or of links to records.
pub(super) fn folder(name: &str) -> PathBuf {
    Path::new(DIR).join(name)
}

/// The file of the instance in a [folder].
pub(super) fn place(name: &str, instance: &str) -> PathBuf {
    folder(name).join(format!("{instance}{ENDING}"))
}

/// The record of an attachment, and its temporary name.
fn of(owner: Owner<'_>) -> (PathBuf, PathBuf) {
    (place(ATTACHMENTS, &owner.instance()), temporary_of(&folder(ATTACHMENTS), &owner))
}

/// The instances of `network`, or of all networks, that have a file in the folder.
pub(super) fn instances(name: &str, network: Option<&str>) -> Vec<String> {
    let prefix = network.map(network_hash).unwrap_or_default();
    let entries = fs::read_dir(folder(name)).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let names = names.filter(|name| name.starts_with(&prefix));
    names.filter_map(|name| name.strip_suffix(ENDING).map(str::to_owned)).collect()
}

/// As [`instances`], without the attachments `valid`.
pub(super) fn stale(name: &str, network: &str, valid: &[Owner<'_>]) -> Vec<String> {
    let valid: HashSet<String> = valid.iter().map(Owner::instance).collect();
    let mut stale = instances(name, Some(network));
    stale.retain(|instance| !valid.contains(instance));
    stale
}

/// Adds a link to the record, in place of a file of release 0.2.0.
pub(super) fn link(path: &Path, instance: &str) -> files::Result<()> {
    let folder = path.parent().unwrap_or(path);
    for _ in 0..LINK_TRIES {
        match symlink(place(ATTACHMENTS, instance), path) {
            Err(e) if e.kind() == ErrorKind::NotFound => make_folder(folder)?,
            Err(e) if e.kind() == ErrorKind::AlreadyExists && path.is_symlink() => return Ok(()),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => remove_file(path)?,
            linked => return linked.during("link", path),
        }
    }
    Err(files::Error::new("link", path, ErrorKind::ResourceBusy))
}

/// Creates the folder, which must be below [`DIR`]. Only root may write to both.
fn make_folder(folder: &Path) -> files::Result<()> {
    if DirBuilder::new().mode(0o700).create(folder).is_ok() {
        return Ok(());
    }
    dir::ensure(Path::new(DIR), 0o700)?;
    dir::ensure(folder, 0o700)
}

fn by_address(ip: IpAddr) -> PathBuf {
    folder(BY_ADDRESS).join(ip.to_string())
}

/// Reads a record; `None` if there is none, or its content is malformed.
fn load(path: &Path) -> io::Result<Option<Record>> {
    match open_regular(AT_FDCWD, path, OFlag::O_RDONLY, Mode::empty()) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        opened => {
            let (mut file, meta) = opened?;
            Ok(serde_json::from_slice(&read_up_to(&mut file, &meta, MAX_BYTES)?).ok())
        }
    }
}

/// What [`Record::host`] is for the calling thread's network namespace.
pub(super) type Here = LazyCell<Option<u64>>;

pub(super) fn here() -> Here {
    LazyCell::new(netns::current_id)
}

/// Whether the record was written in this namespace; release 0.2.0 wrote its inode number.
fn is_of(record: &Record, here: &Here) -> bool {
    let host = Some(record.host);
    host == **here || host == netns::current_inode()
}

/// The record of the instance in a folder, if it was written here.
pub(super) fn read(name: &str, instance: &str, here: &Here) -> Option<Record> {
    let record = load(&place(name, instance)).ok()??;
    let is_it = record.owner().instance() == instance && is_of(&record, here);
    is_it.then_some(record)
}

impl Record {
    /// The record of an attachment, if there is one for this host.
    pub fn of(owner: Owner<'_>) -> Option<Record> {
        Record::read(&owner.instance())
    }

    /// The record of an attachment, to be changed; an error if it cannot be read.
    pub(super) fn present(owner: Owner<'_>) -> io::Result<Option<Record>> {
        Ok(load(&of(owner).0)?.filter(|record| record.owner() == owner))
    }

    /// The record of this [instance](Owner::instance), if there is one for this host.
    pub fn read(instance: &str) -> Option<Record> {
        if !instance.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-') {
            return None;
        }
        read(ATTACHMENTS, instance, &here())
    }

    /// The records of the attachments that were given this address. One system call if there is none.
    pub fn of_address(ip: IpAddr) -> Vec<Record> {
        let entries = fs::read_dir(by_address(ip)).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let records = names.filter_map(|instance| Record::read(&instance));
        records.filter(|record| record.ips.contains(&ip)).collect()
    }

    /// As [`Record::of_address`], but for the attachment `except`.
    pub fn sharing(ip: IpAddr, except: Owner<'_>) -> Vec<Record> {
        let mut others = Record::of_address(ip);
        others.retain(|record| record.owner() != except);
        others
    }

    /// All records of `network`, or of all networks.
    pub fn all(network: Option<&str>) -> Vec<Record> {
        let (here, instances) = (here(), instances(ATTACHMENTS, network).into_iter());
        instances.filter_map(|instance| read(ATTACHMENTS, &instance, &here)).collect()
    }

    /// Removes what killed processes left of the network's records, except for the records of `valid`: temporary files, locks, and
    /// records that release 0.2.0 was writing.
    pub fn sweep(network: &NetworkName, valid: &[Owner<'_>]) {
        Lock::sweep_turns();
        backup::sweep(&folder(ATTACHMENTS), network.as_str(), valid);
        for instance in stale(ATTACHMENTS, network.as_str(), valid) {
            let path = place(ATTACHMENTS, &instance);
            if let Ok(None) = load(&path) {
                // Another process may have removed the file.
                drop(remove_file(&path));
            }
        }
    }

    /// Waits until nobody else reclaims the attachment, and excludes that until the lock is dropped: ADD takes it while it replaces
    /// the record, and whoever reclaims the attachment for as long as that takes. Without a folder for locks there are no records
    /// either.
    pub fn turn(owner: Owner<'_>) -> Result<Option<Lock>> {
        Ok(Lock::turn_for(&owner.instance())?)
    }

    /// Writes the record, replacing an earlier record of the attachment, and its entries by address.
    pub fn write(&self) -> Result<()> {
        let instance = self.owner().instance();
        let enter = |ip: &IpAddr| link(&by_address(*ip).join(&instance), &instance);
        let written = self.save().and_then(|()| self.ips.iter().try_for_each(enter));
        written.map_err(|e| Error::from(e).context("record the attachment"))
    }

    /// Writes the record without entries by address. The runtime serialises the calls of an attachment.
    pub(super) fn save(&self) -> files::Result<()> {
        let (path, temporary) = of(self.owner());
        if self.host == 0 {
            let why = io::Error::other("the host's network namespace is unknown");
            return Err(files::Error::new("write", &path, why));
        }
        let text = serde_json::to_vec(self).map_err(io::Error::from).during("write", &path)?;
        // A power cut ends the attachments as well.
        let writer = Writer::new(temporary, Durability::Volatile);
        match writer.replace(&path, &text, 0o600) {
            Err(e) if e.source.kind() == ErrorKind::NotFound => {
                make_folder(&folder(ATTACHMENTS))?;
                writer.replace(&path, &text, 0o600)
            }
            written => written,
        }
    }

    /// Removes the record, or, while features have parts in it, only the plugin's name: the last feature then removes it.
    pub fn release(mut self) -> Result<()> {
        if self.rules.is_empty() {
            return self.remove();
        }
        self.plugin.clear();
        Ok(self.save()?)
    }

    /// Removes the record and its entries by address.
    pub fn remove(&self) -> Result<()> {
        for folder in self.ips.iter().map(|ip| by_address(*ip)) {
            remove_file(&folder.join(self.owner().instance()))?;
            // Fails while the address has other owners.
            drop(fs::remove_dir(&folder));
        }
        let (path, temporary) = of(self.owner());
        remove_file(&temporary)?;
        Ok(remove_file(&path)?)
    }
}

/// Removes the attachment's record if this plugin wrote the record, or the record cannot be parsed, and what killed processes left
/// besides.
pub fn forget(owner: Owner<'_>, plugin: &str) -> Result<()> {
    let (path, temporary) = of(owner);
    let is_its = |record: &Record| record.plugin == plugin && is_of(record, &here());
    match load(&path) {
        Ok(Some(record)) if is_its(&record) => record.remove()?,
        Ok(Some(_)) => return Ok(()),
        Ok(None) => remove_file(&path)?,
        Err(e) => return Err(Error::io(format_args!("open {}", path.display()), &e)),
    }
    Lock::remove_turn(&owner.instance())?;
    Ok(remove_file(&temporary)?)
}

/// Removes all records of this host, what refers to records that no longer exist, and the files of release 0.2.0: other plugins
/// are responsible for the attachments from now on.
pub fn remove_all() -> Result<()> {
    Record::all(None).iter().try_for_each(Record::remove)?;
    let (here, folders) = (here(), fs::read_dir(DIR).into_iter().flatten().flatten());
    for entry in folders.flat_map(|folder| fs::read_dir(folder.path())).flatten().flatten() {
        let path = entry.path();
        let is_old = || matches!(load(&path), Ok(Some(old)) if is_of(&old, &here));
        if (path.is_symlink() && !path.exists()) || is_old() {
            remove_file(&path)?;
        }
    }
    Ok(())
}
