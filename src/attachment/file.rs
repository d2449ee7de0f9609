//! The files of attachment records below `/run/cni/cnibox`: owned by root, lost at reboot.
//!
//! ```text
//! attachments/<instance>.json
//! by-address/10.88.0.2/<instance> -> attachments/<instance>.json
//! <feature>/<instance>.json -> attachments/<instance>.json
//! ```
//!
//! A record is replaced as a whole, so that a reader finds the old or the new one. A record that
//! cannot be parsed counts as absent.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{AT_FDCWD, OFlag};
use nix::sys::stat::Mode;

use super::backup::{self, temporary_path};
use super::owner::{AttachmentId, network_hash};
use super::record::{AttachmentRecord, host_netns_id};
use crate::files::dir::{self, open_regular, read_up_to};
use crate::files::lock::FileLock;
use crate::netns;
use cni::NetworkName;
use cni::error::{Error, Result};
use cni::files::atomic::{AtomicWriter, Durability};
use cni::files::{self, FileOperationContext, remove_file};

/// Logs that the data `what` of an attachment could not be recorded: as a warning, except in a user
/// namespace. There the directory may belong to another user, as in a rootless container without a
/// `/run` of its own, and no operator can change that; its network ends with the container.
pub fn log_unrecorded(what: fmt::Arguments<'_>) {
    let map = files::read_regular_file(Path::new("/proc/self/uid_map"), 4096).unwrap_or_default();
    let map = String::from_utf8_lossy(&map);
    let is_whole = map.split_whitespace().eq(["0", "0", "4294967295"]);
    if is_whole || map.is_empty() { warn!("{what}") } else { debug!("{what}") }
}

/// The parent directory of all records.
pub const DIR: &str = "/run/cni/cnibox";
/// The directory of the records, in [`DIR`].
pub const ATTACHMENTS: &str = "attachments";
/// The records by address, in [`DIR`]: for each address a directory with an entry for each
/// attachment.
const BY_ADDRESS: &str = "by-address";
/// The suffix of a record's file name, after the [instance](AttachmentId::instance_id).
const ENDING: &str = ".json";
/// Limit of a record's size in bytes.
const MAX_BYTES: usize = 1 << 24;
/// Attempts to add an entry, whose directory another process may be removing.
const LINK_TRIES: usize = 10;

/// A directory of records, of links to records, or of other files about attachments of this host.
pub fn record_directory(name: &str) -> PathBuf {
    Path::new(DIR).join(name)
}

/// The file of the instance in a [`record_directory`].
pub fn record_path(name: &str, instance: &str) -> PathBuf {
    record_directory(name).join(format!("{instance}{ENDING}"))
}

/// The instance whose file has this name in a [`record_directory`]; `None` for temporary files.
pub fn instance_of_file(name: &OsStr) -> Option<&str> {
    let instance = name.to_str()?.strip_suffix(ENDING)?;
    (!instance.starts_with('.')).then_some(instance)
}

/// Whether the attachment of this instance is listed in the directory `name`.
pub(super) fn is_listed(name: &str, instance: &str) -> bool {
    record_path(name, instance).symlink_metadata().is_ok()
}

/// The path of the record of an attachment, and its temporary path.
fn attachment_paths(owner: AttachmentId<'_>) -> (PathBuf, PathBuf) {
    (
        record_path(ATTACHMENTS, &owner.instance_id()),
        temporary_path(&record_directory(ATTACHMENTS), &owner),
    )
}

/// The instances of `network`, or of all networks, that have a file in the directory.
pub(super) fn list_instances(name: &str, network: Option<&str>) -> Vec<String> {
    let prefix = network.map(network_hash).unwrap_or_default();
    let entries = fs::read_dir(record_directory(name)).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let names = names.filter(|name| name.starts_with(&prefix));
    names.filter_map(|name| name.strip_suffix(ENDING).map(str::to_owned)).collect()
}

/// Like [`list_instances`], without the attachments `valid`.
pub(super) fn stale_instances(
    name: &str,
    network: &str,
    valid: &[AttachmentId<'_>],
) -> Vec<String> {
    let valid: HashSet<String> = valid.iter().map(AttachmentId::instance_id).collect();
    let mut stale = list_instances(name, Some(network));
    stale.retain(|instance| !valid.contains(instance));
    stale
}

pub(super) fn link_record(path: &Path, instance: &str) -> files::FileResult<()> {
    let directory = path.parent().unwrap_or(path);
    for _ in 0..LINK_TRIES {
        match symlink(record_path(ATTACHMENTS, instance), path) {
            Err(e) if e.kind() == ErrorKind::NotFound => create_directory(directory)?,
            Err(e) if e.kind() == ErrorKind::AlreadyExists => return Ok(()),
            linked => return linked.during("link", path),
        }
    }
    Err(files::FileError::new("link", path, ErrorKind::ResourceBusy))
}

/// Creates the directory, which must be a [`record_directory`]. Only root may write there.
pub fn create_directory(directory: &Path) -> files::FileResult<()> {
    if DirBuilder::new().mode(0o700).create(directory).is_ok() {
        return Ok(());
    }
    dir::ensure_directory(Path::new(DIR), 0o700)?;
    dir::ensure_directory(directory, 0o700)
}

fn address_directory(ip: IpAddr) -> PathBuf {
    record_directory(BY_ADDRESS).join(ip.to_string())
}

/// Reads a record; `None` if there is none, or its content is malformed.
fn load_record(path: &Path) -> io::Result<Option<AttachmentRecord>> {
    match open_regular(AT_FDCWD, path, OFlag::O_RDONLY, Mode::empty()) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        opened => {
            let (mut file, meta) = opened?;
            Ok(serde_json::from_slice(&read_up_to(&mut file, &meta, MAX_BYTES)?).ok())
        }
    }
}

/// Whether the record was written in this network namespace. A call that could not ask for the
/// namespace's cookie has recorded its inode number.
fn is_written_here(record: &AttachmentRecord) -> bool {
    let host = Some(record.host);
    host == host_netns_id() || host == netns::current_inode()
}

/// The record of the instance, if it was written here.
pub(super) fn read_record(instance: &str) -> Option<AttachmentRecord> {
    let record = load_record(&record_path(ATTACHMENTS, instance)).ok()??;
    let is_it = record.attachment_id().instance_id() == instance && is_written_here(&record);
    is_it.then_some(record)
}

impl AttachmentRecord {
    /// The record of an attachment, if there is one for this host.
    pub fn find_by_attachment(owner: AttachmentId<'_>) -> Option<AttachmentRecord> {
        AttachmentRecord::find_by_instance(&owner.instance_id())
    }

    /// The record of an attachment, to be changed; an error if it cannot be read.
    pub(super) fn load_for_change(owner: AttachmentId<'_>) -> io::Result<Option<AttachmentRecord>> {
        Ok(load_record(&attachment_paths(owner).0)?
            .filter(|record| record.attachment_id() == owner))
    }

    /// The record of this [instance](AttachmentId::instance_id), if there is one for this host.
    pub fn find_by_instance(instance: &str) -> Option<AttachmentRecord> {
        if !instance.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-') {
            return None;
        }
        read_record(instance)
    }

    /// The records of the attachments that were given this address. One system call if there is
    /// none.
    pub fn find_by_address(ip: IpAddr) -> Vec<AttachmentRecord> {
        AttachmentRecord::read_by_address(ip, |_| true)
    }

    /// Like [`AttachmentRecord::find_by_address`], without the attachment `except`, whose record is
    /// not read.
    pub fn find_others_by_address(ip: IpAddr, except: AttachmentId<'_>) -> Vec<AttachmentRecord> {
        let except = except.instance_id();
        AttachmentRecord::read_by_address(ip, |instance| instance != except)
    }

    fn read_by_address(ip: IpAddr, is_read: impl Fn(&str) -> bool) -> Vec<AttachmentRecord> {
        let entries = fs::read_dir(address_directory(ip)).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let names = names.filter(|instance| is_read(instance));
        let records = names.filter_map(|instance| AttachmentRecord::find_by_instance(&instance));
        records.filter(|record| record.ips.contains(&ip)).collect()
    }

    /// All records of `network`, or of all networks.
    pub fn read_all(network: Option<&str>) -> Vec<AttachmentRecord> {
        let instances = list_instances(ATTACHMENTS, network).into_iter();
        instances.filter_map(|instance| read_record(&instance)).collect()
    }

    /// Removes what killed processes left of the network's records, except for the records of
    /// `valid`: temporary files, and records that cannot be parsed.
    pub fn remove_leftovers(network: &NetworkName, valid: &[AttachmentId<'_>]) {
        backup::remove_temporaries(&record_directory(ATTACHMENTS), network.as_str(), valid);
        for instance in stale_instances(ATTACHMENTS, network.as_str(), valid) {
            let path = record_path(ATTACHMENTS, &instance);
            if let Ok(None) = load_record(&path) {
                // Another process may have removed the file.
                drop(remove_file(&path));
            }
        }
    }

    /// Waits at most `timeout` for the lock of the attachment. ADD and DEL hold the lock, and so
    /// does whoever acts on the attachment without a request of the runtime. `None` if there is
    /// no directory for locks: then there are no records either.
    pub fn lock_attachment(owner: AttachmentId<'_>, timeout: Duration) -> Result<Option<FileLock>> {
        Ok(FileLock::acquire_attachment_lock(&owner.instance_id(), timeout)?)
    }

    /// The lock of the attachment of this [instance](AttachmentId::instance_id); `None` if it is
    /// held.
    pub fn try_lock_instance(instance: &str) -> Result<Option<FileLock>> {
        Ok(FileLock::try_acquire_attachment_lock(instance)?)
    }

    /// Writes the record, replacing an earlier record of the attachment, and its entries by
    /// address.
    pub fn save_with_addresses(&self) -> Result<()> {
        let instance = self.attachment_id().instance_id();
        let written = self.save_record().and_then(|()| {
            self.ips
                .iter()
                .try_for_each(|ip| link_record(&address_directory(*ip).join(&instance), &instance))
        });
        written.map_err(|e| Error::from(e).context("record the attachment"))
    }

    /// Writes the record in place of the `former` one of the attachment, whose other addresses lose
    /// their entries.
    pub fn replace_record(&self, former: &AttachmentRecord) -> Result<()> {
        self.save_with_addresses()?;
        former.remove_addresses(|ip| !self.ips.contains(ip))
    }

    /// Writes the record without entries by address. The runtime serialises the calls of an
    /// attachment.
    pub(super) fn save_record(&self) -> files::FileResult<()> {
        let (path, temporary) = attachment_paths(self.attachment_id());
        if self.host == 0 {
            let why = io::Error::other("the host's network namespace is unknown");
            return Err(files::FileError::new("write", &path, why));
        }
        let text = serde_json::to_vec(self).map_err(io::Error::from).during("write", &path)?;
        // Volatile, because a power cut also ends the attachments.
        let writer = AtomicWriter::new(temporary, Durability::Volatile);
        match writer.replace_file(&path, &text, 0o600) {
            Err(e) if e.source.kind() == ErrorKind::NotFound => {
                create_directory(&record_directory(ATTACHMENTS))?;
                writer.replace_file(&path, &text, 0o600)
            }
            written => written,
        }
    }

    /// Removes the record, or only the plugin's name while features have parts in the record: then
    /// the last feature removes the record.
    pub fn release_from_plugin(mut self) -> Result<()> {
        self.plugin.clear();
        self.drop_unlisted_parts()
    }

    /// Removes the parts of features that do not list the attachment, and the record with the last
    /// part, if the plugin has released it. Such a part means nothing, so that a deletion does not
    /// fail where a full file system keeps the record as it was.
    pub(super) fn drop_unlisted_parts(mut self) -> Result<()> {
        let instance = self.attachment_id().instance_id();
        self.rules.retain(|feature, _| is_listed(feature, &instance));
        if self.plugin.is_empty() && self.rules.is_empty() {
            return self.remove_with_addresses();
        }
        self.save_record().unwrap_or_else(|error| debug!("{error}"));
        Ok(())
    }

    /// Removes the record and its entries by address.
    pub fn remove_with_addresses(&self) -> Result<()> {
        self.remove_addresses(|_| true)?;
        let (path, temporary) = attachment_paths(self.attachment_id());
        remove_file(&temporary)?;
        Ok(remove_file(&path)?)
    }

    /// Removes the attachment's entries by the addresses that `which` selects.
    fn remove_addresses(&self, which: impl Fn(&IpAddr) -> bool) -> Result<()> {
        for directory in self.ips.iter().filter(|ip| which(ip)).map(|ip| address_directory(*ip)) {
            remove_file(&directory.join(self.attachment_id().instance_id()))?;
            // Fails while other attachments have the address.
            drop(fs::remove_dir(&directory));
        }
        Ok(())
    }
}

/// Removes the attachment's record if this plugin wrote it or it cannot be parsed; then also
/// removes the temporary file that a killed process may have left.
pub fn forget_attachment(owner: AttachmentId<'_>, plugin: &str) -> Result<()> {
    let (path, temporary) = attachment_paths(owner);
    let is_its = |record: &AttachmentRecord| record.plugin == plugin && is_written_here(record);
    match load_record(&path) {
        Ok(Some(record)) if is_its(&record) => record.remove_with_addresses()?,
        Ok(Some(_)) => return Ok(()),
        Ok(None) => remove_file(&path)?,
        Err(e) => return Err(Error::io(format_args!("open {}", path.display()), &e)),
    }
    Ok(remove_file(&temporary)?)
}

/// Removes all records of this host, and links to records that no longer exist: from now on other
/// plugins are responsible for the attachments.
pub fn remove_all_records() -> Result<()> {
    AttachmentRecord::read_all(None)
        .iter()
        .try_for_each(AttachmentRecord::remove_with_addresses)?;
    let directories = fs::read_dir(DIR).into_iter().flatten().flatten();
    for entry in
        directories.flat_map(|directory| fs::read_dir(directory.path())).flatten().flatten()
    {
        let path = entry.path();
        if path.is_symlink() && !path.exists() {
            remove_file(&path)?;
        }
    }
    Ok(())
}
