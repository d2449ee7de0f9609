//! The journal of a network's leases, by which ADD and DEL find the leases of a container without
//! reading the files of all others.
//!
//! `<network>/.cnibox/leases` is text, a line for each change:
//!
//! ```text
//! leases <machine id> <boot id> <time> <from>:<to> .
//! boot 1 <machine id> <boot id> .
//! + <container id> <interface> 10.88.0.2 <file> <host end> 1 .
//! + <container id> <interface> 10.88.0.3 <file> <host end> this .
//! - 10.88.0.2 .
//! - 10.88.0.3 <time> host-end <container id> <interface> .
//! ```
//!
//! The first line has the machine, the boot and the time at which the file was last rewritten, and
//! the place of the entries that it had then, which are sorted: the leases of a container are found
//! without reading those of all others. `<file>` is inode and modification time of the lease's
//! file, `<host end>` the [end](crate::attachment::HostVeth) of the attachment's veth pair on the
//! host. The last word is the boot in which the lease was created, or first seen: `this`, the one
//! in the first line, or that of a line `boot`. Whether it was an earlier one is decided whenever
//! the journal is read. `-` stands for an unknown or absent value.
//!
//! The line of a removed lease has the [time](super::quarantine::RemovalTime) of the removal if the
//! address is in quarantine. If the lease was reclaimed, the line also has the reason (`host-end`
//! or `earlier-boot`), the container and the interface.
//!
//! The reference plugins may add and remove leases whenever they hold the lock, and do not update
//! the journal. The modification time of the network's directory shows such a change: a session of
//! this program that changed leases ends by setting the modification times of the directory and of
//! the journal to one time whose nanoseconds are [`SEAL`], which the kernel's clock practically
//! never yields. Any other change moves one of the two times. A journal that is not sealed in this
//! way, or is of another boot, or contradicts a lease, is rewritten from the leases. See
//! `docs/decisions/0001-lease-journal.md`.

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io::{ErrorKind, Write as _};
use std::net::IpAddr;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

use super::lease::AddressLease;
use super::lines::{
    self, JournalBoots, JournalContents, JournalEntry, JournalHeader, JournalRemoval,
    parse_removed_address,
};
use super::quarantine::AddressQuarantine;
use crate::attachment::boot::current_unix_time;
use crate::attachment::{AttachmentId, BootIdentity};
use crate::files::dir::{OpenDirectory, require_owner};
use cni::files::{FileError, FileOperationContext, FileResult};

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
/// The bytes that a search in the sorted entries reads at once.
const BLOCK: u64 = 16 * 1024;
/// The bytes of lines that are added to a small journal before it is rewritten.
const MAX_ADDED: u64 = 64 * 1024;

/// A journal that agrees with the leases of its network, for as long as the network's lock is held.
#[derive(Debug)]
pub(super) struct LeaseJournal {
    file: File,
    /// The boot in which the file was last rewritten.
    boot: BootIdentity,
    /// The place of the entries that were sorted then, in bytes; the lines that were added since
    /// follow them.
    sorted: Range<u64>,
    /// The length of the file in bytes.
    length: u64,
    /// Whether the session changed the journal or the network's directory, and has to seal them at
    /// its end.
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
        let (file, meta) = directory.open_file(JOURNAL, flags, Mode::empty()).ok()?;
        if seal_seconds(&meta) != Some(sealed) || require_owner(&meta, Path::new(JOURNAL)).is_err()
        {
            return None;
        }
        LeaseJournal::from_file(file, meta.len()).filter(|journal| journal.boot.id == boot.id)
    }

    /// Reads the first line of the file, which has this length in bytes.
    fn from_file(file: File, length: u64) -> Option<LeaseJournal> {
        let first = read_text_at(&file, 0..length.min(BLOCK))?;
        let first = first.lines().next()?;
        let JournalHeader { boot, sorted, .. } = JournalHeader::parse(first)?;
        let rest = length.checked_sub(first.len() as u64)?;
        if sorted.start > sorted.end || sorted.end > rest {
            return None;
        }
        let sorted = length - rest + sorted.start..length - rest + sorted.end;
        Some(LeaseJournal { file, boot, sorted, length, is_changed: false })
    }

    /// Writes a journal of all leases of `network`, which are in `contents`.
    pub(super) fn create_from(
        network: &OpenDirectory,
        directory: &OpenDirectory,
        boot: &BootIdentity,
        contents: &JournalContents,
    ) -> FileResult<Option<LeaseJournal>> {
        network.remove_file(TEMP)?;
        directory.remove_file(LEASE_TEMP)?;
        require_seal_support(directory)?;
        let text = contents.to_text(boot);
        let file = directory.replace_file(JOURNAL, JOURNAL_TEMP, text.as_bytes())?;
        Ok(LeaseJournal::from_file(file, text.len() as u64)
            .map(|journal| LeaseJournal { is_changed: true, ..journal }))
    }

    /// The number of leases; `None` if the journal cannot be read.
    pub(super) fn len(&self) -> Option<usize> {
        let text = read_text_at(&self.file, 0..self.length)?;
        Some(JournalContents::parse(&text).entries.len())
    }

    /// The leases of `owner`; `None` if the journal is damaged.
    pub(super) fn leases_held_by(&self, owner: AttachmentId<'_>) -> Option<Vec<AddressLease>> {
        let prefix = format!("+ {} ", lines::escape_word(owner.id));
        let text =
            self.read_sorted(&prefix)? + &read_text_at(&self.file, self.sorted.end..self.length)?;
        let mut lines = text.split('\n');
        // Every line begins with a newline.
        if lines.next() != Some("") {
            return None;
        }
        let mut held = Vec::new();
        for line in lines {
            if !line.ends_with(lines::END) {
                return None;
            }
            // Only the lines of this container are parsed.
            if line.starts_with(&prefix) {
                held.push(JournalEntry::parse(line, &JournalBoots::new())?.lease);
            } else if !line.starts_with('+') {
                let ip = parse_removed_address(line)?;
                held.retain(|lease| lease.ip != ip);
            }
        }
        held.retain(|lease| lease.is_held_by(owner));
        Some(held)
    }

    /// The sorted lines that begin with `prefix`, among others. `None` if the journal is damaged,
    /// or a line or these lines are longer than a block.
    fn read_sorted(&self, prefix: &str) -> Option<String> {
        let Range { start: mut low, end: mut high } = self.sorted;
        // The lines before `low` are less than `prefix`, those from `high` on are not.
        while high - low > BLOCK {
            let middle = low.midpoint(high);
            let text = read_text_at(&self.file, middle..(middle + BLOCK).min(self.sorted.end))?;
            let (before, line) = text.split_once('\n')?;
            let start = middle + before.len() as u64;
            if line.len() < prefix.len() {
                return None;
            }
            if start >= high {
                high = middle;
            } else if line < prefix {
                low = start;
            } else {
                high = start;
            }
        }
        let end = (high + BLOCK).min(self.sorted.end);
        let mut text = read_text_at(&self.file, low..end)?;
        if end < self.sorted.end {
            let last = text.rfind('\n')?;
            text.truncate(last);
            // There may be more of them.
            if text.rsplit('\n').next()?.starts_with(prefix) {
                return None;
            }
        }
        Some(text)
    }

    /// Adds a lease that is about to be created.
    pub(super) fn add_entry(&mut self, entry: &JournalEntry) -> FileResult<()> {
        self.append_lines(&entry.to_line(lines::THIS))
    }

    /// Adds the lines of removed leases.
    pub(super) fn add_removals(&mut self, removals: &[JournalRemoval]) -> FileResult<()> {
        self.append_lines(&removals.iter().map(JournalRemoval::to_line).collect::<String>())
    }

    fn append_lines(&mut self, lines: &str) -> FileResult<()> {
        self.is_changed = true;
        self.length += lines.len() as u64;
        self.file.write_all(lines.as_bytes()).during("write", Path::new(JOURNAL))
    }

    /// Marks the network's directory as changed, although no lease was changed.
    pub(super) fn mark_directory_changed(&mut self) {
        self.is_changed = true;
    }

    /// Seals journal and directory, as the last step, if there was any change. A journal that is
    /// dropped without a seal is invalid.
    pub(super) fn seal_if_changed(
        mut self,
        network: &OpenDirectory,
        directory: &OpenDirectory,
        quarantine: &AddressQuarantine,
    ) -> FileResult<()> {
        if !self.is_changed {
            return Ok(());
        }
        let added = self.length - self.sorted.end;
        if added > MAX_ADDED + (self.sorted.end - self.sorted.start) / 32 {
            let contents = JournalContents::parse(&read_journal_text(directory))
                .without_old_removals(quarantine);
            let text = contents.to_text(&self.boot);
            self.file = directory.replace_file(JOURNAL, JOURNAL_TEMP, text.as_bytes())?;
        }
        let sealed = current_unix_time();
        set_seal_time(&self.file, sealed)?;
        set_seal_time(network.as_file(), sealed)
    }
}

/// A part of the file; `None` if the file is shorter, or this part is no text.
fn read_text_at(file: &File, range: Range<u64>) -> Option<String> {
    let mut bytes = vec![0; usize::try_from(range.end.checked_sub(range.start)?).ok()?];
    file.read_exact_at(&mut bytes, range.start).ok()?;
    String::from_utf8(bytes).ok()
}

/// The text of the journal in `directory`, sealed or not: each entry names a lease file, and is
/// valid only for that file.
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
    let JournalContents { entries, mut removals, .. } =
        JournalContents::parse(&read_journal_text(directory));
    removals.retain(|ip, _| !entries.contains_key(ip));
    let mut withheld = BTreeMap::new();
    for (ip, removal) in removals {
        if let Some(left) = removal.time_left(quarantine) {
            withheld.insert(ip, left);
        }
    }
    withheld
}

/// The directory `.cnibox` in `network`, created if missing. Without the directory there is no
/// journal, and every command reads all leases.
pub(super) fn create_directory(network: &OpenDirectory) -> Option<OpenDirectory> {
    network.create_private(DIRECTORY).inspect_err(log_unwritable).ok()?;
    existing_directory(network)
}

/// The directory `.cnibox` in `network`, if it exists.
pub(super) fn existing_directory(network: &OpenDirectory) -> Option<OpenDirectory> {
    network
        .open_private(DIRECTORY)
        .map_err(|e| warn!("leases are read without the journal: {e}"))
        .ok()?
}

/// Logs that the journal cannot be written: the next command reads all leases.
pub(super) fn log_unwritable(error: &FileError) {
    debug!("could not write the lease journal: {error}");
}

/// The temporary name of leases in [`DIRECTORY`], and in networks that cannot have one.
const LEASE_TEMP: &str = "tmp";
const TEMP: &str = ".cnibox-tmp";

/// Directory and name of the temporary file of a lease: in `.cnibox`, which the reference plugins
/// do not list, if the directory exists.
pub(super) fn temporary_lease_file<'f>(
    network: &'f OpenDirectory,
    directory: Option<&'f OpenDirectory>,
) -> (&'f OpenDirectory, &'static str) {
    directory.map_or((network, TEMP), |directory| (directory, LEASE_TEMP))
}

/// Marks a lease of this program by its modification time, before the lease is linked. A power cut,
/// or a write that fails later, may lose the content of a linked file, but not its modification
/// time: the mark distinguishes a lease that lost its content from other empty files.
pub(super) fn mark_lease(lease: &File) -> FileResult<()> {
    set_seal_time(lease, current_unix_time())
}

/// Writes the text of a lease that lost it. The file stays the same, so that its entry stays valid.
pub(super) fn rewrite_lease(
    network: &OpenDirectory,
    lease: &AddressLease,
    meta: &Metadata,
) -> FileResult<()> {
    let name = lease.ip.to_string();
    let file = network.overwrite_file(&name, lease.file_text().as_bytes())?;
    set_seal_time(&file, meta.mtime())
}

pub(super) fn is_marked(meta: &Metadata) -> bool {
    seal_seconds(meta).is_some()
}

/// Refuses file systems whose modification times cannot hold the seal: there every command would
/// rewrite the journal.
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
