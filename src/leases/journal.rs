//! The journal of a network's leases, by which ADD and DEL find the leases of a container without reading
//! the files of all others.
//!
//! `<network>/.cnibox/leases` is text, a line for each change:
//!
//! ```text
//! leases <machine id> <boot id> <time> .
//! boot <machine id> <earlier boot id> .
//! + <container id> <interface> 10.88.0.2 <file> <host end> this .
//! boot <machine id> <boot id> .
//! + <container id> <interface> 10.88.0.3 <file> <host end> this .
//! - 10.88.0.2 .
//! - 10.88.0.3 <time> host-end <container id> <interface> .
//! ```
//!
//! The first line has the machine, the boot and the time at which the file was last rewritten. `<file>` is inode and modification
//! time of the lease's file, `<host end>` the [end](crate::attachment::HostPairEnd) of the attachment's veth pair on
//! the host, `this` the boot in the last line of a boot: the lease was created, or first seen, in that boot. Whether
//! that was an earlier one is decided whenever the journal is read. `-` stands for an unknown or absent value.
//!
//! The line of a removed lease has the [time](super::quarantine::RemovalTime) of the removal if the address is in
//! quarantine. If the lease was reclaimed, the line also has the reason (`host-end` or `earlier-boot`), the container
//! and the interface.
//!
//! The reference plugins may add and remove leases whenever they hold the lock, and do not update the
//! journal. The modification time of the network's directory shows such a change: a session of this program that
//! changed leases ends by setting the modification times of the directory and of the journal to one time whose
//! nanoseconds are [`SEAL`], which the kernel's clock practically never yields. Any other change moves one of
//! the two times. A journal that is not sealed in this way, or is of another boot, or contradicts a lease, is
//! rewritten from the leases. See `docs/decisions/0001-lease-journal.md`.

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io::{ErrorKind, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

use super::lease::AddressLease;
use super::lines::{self, JournalContents, JournalEntry, JournalRemoval, parse_removed_address};
use super::quarantine::AddressQuarantine;
use crate::attachment::boot::current_unix_time;
use crate::attachment::{AttachmentId, BootIdentity};
use crate::files::dir::{OpenDirectory, read_up_to, require_owner};
use crate::files::{FileError, FileOperationContext, FileResult};
use crate::log;

/// Nanoseconds of a sealed file's modification time: whole microseconds, because some file
/// systems keep no more.
const SEAL: u32 = 424_242_000;
/// The directory, in a network's directory, of all files that the reference does not have.
const DIRECTORY: &str = ".cnibox";
/// The journal, and its temporary name while it is written.
const JOURNAL: &str = "leases";
const JOURNAL_TEMP: &str = "leases.new";
/// Limit of a journal's size in bytes: enough for the leases of a /8.
const MAX_BYTES: usize = (1 << 31) - 1;
/// The list of addresses in quarantine of releases up to 0.2.0.
const FREED: &str = "freed";
/// Number of lines of removed leases that a journal without leases may have.
const SPARE_LINES: usize = 100;

/// A journal that agrees with the leases of its network, for as long as the network's lock is held.
#[derive(Debug)]
pub(super) struct LeaseJournal {
    file: File,
    /// The text of the file.
    text: String,
    /// Numbers of lines that add or remove a lease; 0 until the lines were read.
    added: usize,
    removed: usize,
    /// The boot in which the file was last rewritten.
    boot: BootIdentity,
    /// Whether the session changed the journal or the network's directory, and has to seal them at its end.
    is_changed: bool,
}

impl LeaseJournal {
    /// The journal in `directory`; `None` if the leases may have changed since it was sealed.
    pub(super) fn open_sealed(
        network: &OpenDirectory,
        directory: &OpenDirectory,
        boot: &BootIdentity,
    ) -> Option<LeaseJournal> {
        let sealed = seal_seconds(&network.metadata().ok()?)?;
        let flags = OFlag::O_RDWR | OFlag::O_APPEND;
        let (mut file, meta) = directory.open_file(JOURNAL, flags, Mode::empty()).ok()?;
        if seal_seconds(&meta) != Some(sealed) || require_owner(&meta, Path::new(JOURNAL)).is_err() {
            return None;
        }
        let text = String::from_utf8(read_up_to(&mut file, &meta, MAX_BYTES).ok()?).ok()?;
        let (written_in, _) = lines::parse_header(&text)?;
        let is_current = written_in.id == boot.id;
        is_current.then_some(LeaseJournal { file, text, added: 0, removed: 0, boot: written_in, is_changed: false })
    }

    /// Writes a journal of all leases of `network`, which are in `contents`.
    pub(super) fn create_from(
        network: &OpenDirectory,
        directory: &OpenDirectory,
        boot: &BootIdentity,
        contents: &JournalContents,
    ) -> FileResult<LeaseJournal> {
        network.remove_file(TEMP)?;
        for leftover in [LEASE_TEMP, FREED] {
            directory.remove_file(leftover)?;
        }
        require_seal_support(directory)?;
        let text = contents.to_text(boot);
        let file = directory.replace_file(JOURNAL, JOURNAL_TEMP, text.as_bytes())?;
        Ok(LeaseJournal { file, text, added: 0, removed: 0, boot: boot.clone(), is_changed: true })
    }

    /// The number of leases.
    pub(super) fn len(&self) -> usize {
        JournalContents::parse(&self.text).entries.len()
    }

    /// The leases of `owner`; `None` if the journal is damaged.
    pub(super) fn leases_held_by(&mut self, owner: AttachmentId<'_>) -> Option<Vec<AddressLease>> {
        let container_prefix = format!("+ {} ", lines::escape_word(owner.id));
        let (mut held, mut added, mut removed) = (Vec::new(), 0, 0);
        for line in self.text.split('\n').skip(1) {
            if !line.ends_with(lines::END) {
                return None;
            }
            // Only the lines of this container are parsed.
            if line.starts_with('+') {
                added += 1;
                if line.starts_with(&container_prefix) {
                    held.push(JournalEntry::parse(line, None)?.lease);
                }
            } else if let Some(ip) = parse_removed_address(line) {
                removed += 1;
                held.retain(|lease| lease.ip != ip);
            } else {
                lines::parse_boot(line)?;
            }
        }
        (self.added, self.removed) = (added, removed);
        held.retain(|lease| lease.is_held_by(owner));
        Some(held)
    }

    /// Adds a lease that is about to be created.
    pub(super) fn add_entry(&mut self, entry: &JournalEntry) -> FileResult<()> {
        self.append_lines(&entry.to_line())
    }

    /// Adds the lines of removed leases.
    pub(super) fn add_removals(&mut self, removals: &[JournalRemoval]) -> FileResult<()> {
        self.removed += removals.len();
        self.append_lines(&removals.iter().map(JournalRemoval::to_line).collect::<String>())
    }

    fn append_lines(&mut self, lines: &str) -> FileResult<()> {
        self.is_changed = true;
        self.text += lines;
        self.file.write_all(lines.as_bytes()).during("write", Path::new(JOURNAL))
    }

    /// Marks the network's directory as changed, although no lease was changed.
    pub(super) fn mark_directory_changed(&mut self) {
        self.is_changed = true;
    }

    /// Seals journal and directory, as the last step, if there was any change. A journal that is dropped without a seal
    /// is invalid.
    pub(super) fn seal_if_changed(
        mut self,
        network: &OpenDirectory,
        directory: &OpenDirectory,
        quarantine: &AddressQuarantine,
    ) -> FileResult<()> {
        if !self.is_changed {
            return Ok(());
        }
        // More than three lines for each lease; at most two stay.
        if 3 * self.removed > 2 * self.added + SPARE_LINES {
            let contents = JournalContents::parse(&self.text).without_old_removals(quarantine);
            let text = contents.to_text(&self.boot);
            self.file = directory.replace_file(JOURNAL, JOURNAL_TEMP, text.as_bytes())?;
        }
        let sealed = current_unix_time();
        set_seal_time(&self.file, sealed)?;
        set_seal_time(network.as_file(), sealed)
    }
}

/// The text of the journal in `directory`, sealed or not: each entry names a lease file, and is valid only for that
/// file.
pub(super) fn read_journal_text(directory: &OpenDirectory) -> String {
    let text = directory.read_file(JOURNAL, MAX_BYTES).map(|(bytes, _)| bytes).unwrap_or_default();
    String::from_utf8_lossy(&text).into_owned()
}

/// The addresses in quarantine, with the time left.
pub(super) fn withheld_addresses(
    directory: Option<&OpenDirectory>,
    quarantine: &AddressQuarantine,
) -> BTreeMap<IpAddr, Duration> {
    let Some(directory) = directory.filter(|_| quarantine.removal_time().is_some()) else {
        return BTreeMap::new();
    };
    let JournalContents { entries, mut removals, .. } = JournalContents::parse(&read_journal_text(directory));
    removals.retain(|ip, _| !entries.contains_key(ip));
    removals.iter().filter_map(|(ip, removal)| Some((*ip, removal.time_left(quarantine)?))).collect()
}

/// The directory `.cnibox` in `network`, created if missing. Without the directory there is no journal, and every
/// command reads all leases.
pub(super) fn create_directory(network: &OpenDirectory) -> Option<OpenDirectory> {
    network.create_private(DIRECTORY).inspect_err(log_unwritable).ok()?;
    existing_directory(network)
}

/// The directory `.cnibox` in `network`, if it exists.
pub(super) fn existing_directory(network: &OpenDirectory) -> Option<OpenDirectory> {
    let warn = |e| log::warn(format_args!("no lease journal: {e}"));
    network.open_private(DIRECTORY).map_err(warn).ok()?
}

/// Logs that the journal cannot be written: the next command reads all leases.
pub(super) fn log_unwritable(error: &FileError) {
    log::debug(format_args!("no lease journal: {error}"));
}

/// The temporary name of leases in [`DIRECTORY`], and in networks that cannot have one.
const LEASE_TEMP: &str = "tmp";
const TEMP: &str = ".cnibox-tmp";

/// Directory and name of the temporary file of a lease: in `.cnibox`, which the reference plugins do not list, if the
/// directory exists.
pub(super) fn temporary_lease_file<'f>(
    network: &'f OpenDirectory,
    directory: Option<&'f OpenDirectory>,
) -> (&'f OpenDirectory, &'static str) {
    directory.map_or((network, TEMP), |directory| (directory, LEASE_TEMP))
}

/// Marks a lease of this program by its modification time, before the lease is linked. A power cut, or a write that
/// fails later, may lose the content of a linked file, but not its modification time: the mark distinguishes a lease
/// that lost its content from other empty files.
pub(super) fn mark_lease(lease: &File) -> FileResult<()> {
    set_seal_time(lease, current_unix_time())
}

/// Writes the text of a lease that lost it. The file stays the same, so that its entry stays valid.
pub(super) fn rewrite_lease(network: &OpenDirectory, lease: &AddressLease, meta: &Metadata) -> FileResult<()> {
    let name = lease.ip.to_string();
    let file = network.overwrite_file(&name, lease.file_text().as_bytes())?;
    set_seal_time(&file, meta.mtime())
}

/// Whether a lease has the mark of [`mark_lease`].
pub(super) fn is_marked(meta: &Metadata) -> bool {
    seal_seconds(meta).is_some()
}

/// Refuses file systems whose modification times cannot hold the seal: there every command would rewrite the
/// journal.
fn require_seal_support(directory: &OpenDirectory) -> FileResult<()> {
    set_seal_time(directory.as_file(), 0)?;
    match seal_seconds(&directory.metadata()?) {
        Some(_) => Ok(()),
        None => Err(FileError::new("seal", &directory.file_path(""), ErrorKind::Unsupported)),
    }
}

/// The seconds of the modification time, if the time is a seal.
fn seal_seconds(meta: &Metadata) -> Option<i64> {
    (meta.mtime_nsec() == i64::from(SEAL)).then(|| meta.mtime())
}

/// Sets the modification time to the seal of these seconds.
fn set_seal_time(file: &File, seconds: i64) -> FileResult<()> {
    let since_epoch = Duration::new(seconds.try_into().unwrap_or_default(), SEAL);
    // The standard library's times have 64 bits everywhere, unlike libc's.
    file.set_modified(UNIX_EPOCH + since_epoch).during("set the time of", Path::new(DIRECTORY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seal_after_2038_is_read_back() {
        let file = tempfile::tempfile().unwrap();
        for seconds in [0, i64::from(i32::MAX), i64::from(i32::MAX) + 1, 5_000_000_000] {
            set_seal_time(&file, seconds).unwrap();
            assert_eq!(seal_seconds(&file.metadata().unwrap()), Some(seconds));
        }
    }
}
