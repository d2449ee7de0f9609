//! The leases of one network, a directory in the format of the reference's host-local plugin.
//!
//! Each lease is a file named by its address; `last_reserved_ip.<range id>` has the address from
//! which allocation continues; both implementations lock the file `lock`. [`super::journal`] is an
//! addition of this program.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{DirBuilder, Metadata};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::DATA_DIR;
use super::journal::{self, LeaseJournal, log_unwritable};
use super::lease::{AddressLease, LeaseOptions, ReclaimedLease};
use super::lines::{JournalContents, JournalEntry, JournalRemoval, LeaseFileId};
use super::listing::{self, AddressFile, AddressReservation};
use super::notes::judge_entries;
use super::quarantine::AddressQuarantine;
use crate::attachment::{AttachmentId, BootIdentity, HostVeth, Liveness};
use crate::files::dir::OpenDirectory;
use crate::files::lock::FileLock;
use crate::stderr;
use cni::error;
use cni::files::{FileOperationContext, FileResult};
use cni::sort::sort_by_key;

/// Limit of the size of `last_reserved_ip` in bytes.
const MAX_BYTES: usize = 256;
/// Prefix of the names of reservations that were set aside, in the directory `.cnibox`.
const ASIDE: &str = "reserved.";
/// Networks whose lock this process did not get in time: the rollback of the same ADD does not wait
/// for the lock again.
static TIMED_OUT: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A network's leases, locked from opening to drop.
#[derive(Debug)]
pub struct LeaseStore {
    dir: OpenDirectory,
    /// The directory `.cnibox`; `None` if it cannot be created or trusted.
    directory: Option<OpenDirectory>,
    quarantine: AddressQuarantine,
    boot: Rc<BootIdentity>,
    /// `None` if the journal cannot be written; then every lookup reads all leases. Also `None`
    /// while journal and leases may differ: an error or a panic leaves the store unsealed, and
    /// the next command rewrites the journal.
    journal: Option<LeaseJournal>,
    /// Released last: fields are dropped in order.
    _lock: FileLock,
}

impl LeaseStore {
    /// Opens the store of `network`, creating missing directories.
    pub fn open(
        data_dir: &Path,
        network: &str,
        options: LeaseOptions,
    ) -> error::Result<LeaseStore> {
        if let Some(store) = LeaseStore::open_existing(data_dir, network, options)? {
            return Ok(store);
        }
        let path = data_dir.join(network);
        DirBuilder::new().recursive(true).mode(0o755).create(&path).during("create", &path)?;
        let store = LeaseStore::open_existing(data_dir, network, options)?;
        Ok(store.ok_or(ErrorKind::NotFound).during("open", &path)?)
    }

    /// Opens the store of `network` unless there is none.
    pub fn open_existing(
        data_dir: &Path,
        network: &str,
        options: LeaseOptions,
    ) -> error::Result<Option<LeaseStore>> {
        let Some(dir) = OpenDirectory::open_network(data_dir, network)? else { return Ok(None) };
        LeaseStore::open_directory(dir, BootIdentity::current(), options).map(Some)
    }

    pub(super) fn open_directory(
        dir: OpenDirectory,
        boot: BootIdentity,
        options: LeaseOptions,
    ) -> error::Result<LeaseStore> {
        let LeaseOptions { lock_timeout, reuse_delay } = options;
        let lock = take_lock(&dir, lock_timeout)?;
        let directory = journal::create_directory(&dir);
        let quarantine = AddressQuarantine::new(reuse_delay, &boot);
        let journal = directory
            .as_ref()
            .and_then(|directory| LeaseJournal::open_sealed(&dir, directory, &boot));
        let mut store =
            LeaseStore { dir, directory, quarantine, boot: Rc::new(boot), journal, _lock: lock };
        if store.journal.is_none() {
            store.rebuild_journal()?;
        }
        Ok(store)
    }

    /// Reserves `ip`; false if it is taken. `end` is the host's end of the attachment's veth pair,
    /// if there is one: it proves later that the attachment has ended.
    pub fn reserve_address(
        &mut self,
        ip: IpAddr,
        owner: AttachmentId<'_>,
        end: Option<HostVeth>,
    ) -> error::Result<bool> {
        let (name, lease) = (ip.to_string(), AddressLease::new(ip, owner));
        // One system call for each address that is taken, instead of the six that create a file.
        if self.dir.has_entry(&name) {
            return Ok(false);
        }
        let (directory, temp) = journal::temporary_lease_file(&self.dir, self.directory.as_ref());
        let file = directory.create_file(temp, lease.file_text().as_bytes())?;
        if let Err(e) = journal::mark_lease(&file) {
            debug!("could not mark the lease of {ip}: {e}");
        }
        // The journal is written before the lease is linked: a kill leaves no lease without an
        // entry.
        let journal = change_journal(self.journal.take(), |journal| {
            let file =
                LeaseFileId::from_metadata(&file.metadata().during("stat", Path::new(temp))?);
            journal.add_entry(&JournalEntry { lease, file, end, boot: Some(Rc::clone(&self.boot)) })
        });
        let linked = directory.publish_file(temp, &self.dir, &name);
        // A temporary file that cannot be removed is no error, because it does not affect the
        // lease. The next command that writes a lease removes the file.
        if let Err(error) = directory.remove_file(temp) {
            debug!("could not remove a temporary file: {error}");
        }
        let reserved = linked?;
        self.journal = if reserved {
            journal
        } else {
            change_journal(journal, |journal| {
                journal.add_removals(&[JournalRemoval::of_address(ip)])
            })
        };
        Ok(reserved)
    }

    /// Moves the file by which an administrator reserves `ip` out of the way of a lease, whose
    /// removal puts the file back; false if there is no such file.
    pub fn set_reservation_aside(&mut self, ip: IpAddr) -> error::Result<bool> {
        let (Some(directory), AddressFile::Reserved(_)) =
            (&self.directory, listing::read_address_file(&self.dir, ip))
        else {
            return Ok(false);
        };
        let (name, journal) = (ip.to_string(), self.journal.take());
        let is_aside = self.dir.move_file(&name, directory, &aside_name(&name))?;
        self.journal = journal;
        self.journal.iter_mut().for_each(LeaseJournal::mark_directory_changed);
        Ok(is_aside)
    }

    /// Puts a reservation back that was set aside, in place of a lease if there is one; false if
    /// there is none.
    pub fn put_reservation_back(&self, ip: IpAddr) -> FileResult<bool> {
        let Some(directory) = &self.directory else { return Ok(false) };
        let name = ip.to_string();
        directory.move_file(&aside_name(&name), &self.dir, &name)
    }

    /// The addresses that `owner` holds, in the current form or the old one.
    pub fn addresses_held_by(&mut self, owner: AttachmentId<'_>) -> error::Result<Vec<IpAddr>> {
        Ok(self.leases_held_by(owner)?.iter().map(|lease| lease.ip).collect())
    }

    /// Releases all leases of `owner` and returns their addresses. Leases in the old form, without
    /// an interface, are released only if there is none in the current form.
    pub fn release_attachment(&mut self, owner: AttachmentId<'_>) -> error::Result<Vec<IpAddr>> {
        let mut leases = self.leases_held_by(owner)?;
        if leases.iter().any(|lease| lease.ifname.is_some()) {
            leases.retain(|lease| lease.ifname.is_some());
        }
        let released = self.remove_freed_leases(leases)?;
        Ok(released.into_iter().map(|lease| lease.ip).collect())
    }

    /// Releases one lease of `owner`, for a rollback; false if `owner` does not hold the address.
    pub fn release_address(&mut self, ip: IpAddr, owner: AttachmentId<'_>) -> error::Result<bool> {
        let lease = AddressLease::new(ip, owner);
        if !self.holds_lease(&lease) {
            return Ok(false);
        }
        self.remove_leases(vec![lease], |lease| JournalRemoval::of_address(lease.ip)).map(|_| true)
    }

    /// Removes the leases of attachments that have certainly ended, and returns these leases,
    /// sorted by address. `reclaim` gets the network's name, removes the other state of the
    /// attachments, and returns the leases to remove.
    pub fn reclaim_ended(
        &mut self,
        reclaim: impl FnOnce(&str, Vec<ReclaimedLease>) -> Vec<ReclaimedLease>,
    ) -> error::Result<Vec<ReclaimedLease>> {
        let noted = JournalContents::read_journal(self.directory.as_ref(), &self.boot);
        let entries: Vec<JournalEntry> = noted.entries.into_values().collect();
        let network = listing::network_name_of(&self.dir);
        let mut gone = Vec::new();
        for (entry, life) in entries.iter().zip(judge_entries(&network, &entries, &self.boot)) {
            let Liveness::Gone(why) = life else { continue };
            // The lease must still be the file of the entry.
            let is_its_file = match listing::read_address_file(&self.dir, entry.lease.ip) {
                AddressFile::Lease(lease, meta) => {
                    lease == entry.lease && LeaseFileId::from_metadata(&meta) == entry.file
                }
                AddressFile::Lost(meta) => LeaseFileId::from_metadata(&meta) == entry.file,
                AddressFile::Reserved(_) | AddressFile::Nothing => false,
            };
            if is_its_file {
                gone.push(ReclaimedLease { lease: entry.lease.clone(), why });
            }
        }
        let (gone, freed) = (reclaim(&network, gone), self.quarantine.removal_time());
        let mut gone = self.remove_leases(gone, |gone| JournalRemoval {
            freed: freed.clone(),
            reclaimed: Some(gone.clone()),
            ..JournalRemoval::of_address(gone.lease.ip)
        })?;
        sort_by_key(&mut gone, |gone| gone.lease.ip);
        Ok(gone)
    }

    /// The addresses that were freed less than `reuseDelay` ago, with the time left.
    pub fn quarantined_addresses(&self) -> BTreeMap<IpAddr, Duration> {
        journal::withheld_addresses(self.directory.as_ref(), &self.quarantine)
    }

    /// Removes and returns the `unwanted` reservations.
    pub fn remove_reservations(
        &mut self,
        unwanted: impl Fn(&AddressReservation) -> bool,
    ) -> error::Result<Vec<AddressReservation>> {
        let ips = self.taken_addresses()?;
        let mut reserved = listing::read_reservations(&self.dir, self.directory.as_ref(), &ips);
        reserved.retain(unwanted);
        for reservation in &reserved {
            self.dir.remove_file(&reservation.ip.to_string())?;
            self.journal.iter_mut().for_each(LeaseJournal::mark_directory_changed);
        }
        Ok(reserved)
    }

    /// The number of files with the name of an address that are not leases.
    pub fn count_reservations(&self) -> error::Result<usize> {
        let ips = listing::listed_addresses(&self.dir)?;
        let leases = match self.journal.as_ref().and_then(LeaseJournal::len) {
            Some(leases) => leases,
            None => ips
                .iter()
                .filter_map(|ip| listing::read_address_file(&self.dir, *ip).into_lease())
                .count(),
        };
        Ok(ips.len().saturating_sub(leases))
    }

    /// Removes every lease for which `keep` is false. With `spare`, leases of attachments that
    /// certainly exist stay. Returns the removed and the spared leases.
    pub fn retain_leases(
        &mut self,
        keep: impl Fn(&AddressLease) -> bool,
        spare: bool,
    ) -> error::Result<(Vec<AddressLease>, Vec<AddressLease>)> {
        let noted = JournalContents::read_journal(self.directory.as_ref(), &self.boot);
        let mut refused = self.read_all_leases(&noted)?;
        refused.retain(|(lease, _)| !keep(lease));
        let lives = noted.judge_leases(&listing::network_name_of(&self.dir), &refused, &self.boot);
        let (mut go, mut stay) = (Vec::new(), Vec::new());
        for ((lease, _), life) in refused.into_iter().zip(lives) {
            if spare && life == Liveness::Alive { stay.push(lease) } else { go.push(lease) }
        }
        Ok((self.remove_freed_leases(go)?, stay))
    }

    /// The addresses that have a file, from one listing of the directory.
    pub fn taken_addresses(&self) -> error::Result<HashSet<IpAddr>> {
        Ok(listing::listed_addresses(&self.dir)?)
    }

    /// The lease of an address, if it has one.
    pub fn find_lease(&self, ip: IpAddr) -> Option<AddressLease> {
        listing::read_address_file(&self.dir, ip).into_lease().map(|(lease, _)| lease)
    }

    /// The address that was last reserved in a range set. It is a hint: an unreadable file counts
    /// as absent.
    pub fn last_reserved(&self, range_id: usize) -> Option<IpAddr> {
        let read = self.dir.read_file(&last_reserved_file_name(range_id), MAX_BYTES);
        if let Err(e) = read.as_ref()
            && e.kind() != ErrorKind::NotFound
        {
            stderr::write_line(format_args!(
                "Error retrieving last reserved ip: {}",
                error::io_text(e)
            ));
        }
        std::str::from_utf8(&read.ok()?.0).ok()?.trim().parse().ok()
    }

    /// Writes the address that was last reserved in a range set.
    ///
    /// The file is overwritten in place: after a kill it may have another address or none, and
    /// allocation starts elsewhere. A rename over the old file would make ext4 write to the
    /// disk, which takes longer than the rest of an ADD.
    pub fn set_last_reserved(&mut self, range_id: usize, ip: IpAddr) -> error::Result<()> {
        let journal = self.journal.take();
        self.dir.overwrite_file(&last_reserved_file_name(range_id), ip.to_string().as_bytes())?;
        self.journal = journal;
        self.journal.iter_mut().for_each(LeaseJournal::mark_directory_changed);
        Ok(())
    }

    fn leases_held_by(&mut self, owner: AttachmentId<'_>) -> error::Result<Vec<AddressLease>> {
        let held = self.journal.as_ref().and_then(|journal| journal.leases_held_by(owner));
        // A lease that was overwritten in place does not change the directory's modification time.
        if let Some(held) = held.filter(|held| held.iter().all(|lease| self.holds_lease(lease))) {
            return Ok(held);
        }
        let all = self.rebuild_journal()?.into_iter().map(|(lease, _)| lease);
        Ok(all.filter(|lease| lease.is_held_by(owner)).collect())
    }

    fn holds_lease(&self, lease: &AddressLease) -> bool {
        let found = listing::read_address_file(&self.dir, lease.ip);
        matches!(found, AddressFile::Lease(found, _) if found == *lease)
    }

    /// Like [`LeaseStore::remove_leases`], for addresses that were in use: the quarantine begins.
    fn remove_freed_leases(
        &mut self,
        leases: Vec<AddressLease>,
    ) -> error::Result<Vec<AddressLease>> {
        let freed = self.quarantine.removal_time();
        self.remove_leases(leases, |lease| JournalRemoval {
            freed: freed.clone(),
            ..JournalRemoval::of_address(lease.ip)
        })
    }

    /// Removes all leases that can be removed, then reports the errors.
    fn remove_leases<L>(
        &mut self,
        leases: Vec<L>,
        removal: impl Fn(&L) -> JournalRemoval,
    ) -> error::Result<Vec<L>> {
        let (mut removed, mut removals, mut errors) = (Vec::new(), Vec::new(), Vec::new());
        let journal = self.journal.take();
        for lease in leases {
            let removal = removal(&lease);
            match self.remove_lease_file(removal.ip) {
                Ok(()) => {
                    removed.push(lease);
                    removals.push(removal);
                }
                Err(e) => errors.push(e.into()),
            }
        }
        self.journal = change_journal(journal, |journal| journal.add_removals(&removals));
        error::Error::join_all(errors).map(|()| removed)
    }

    fn remove_lease_file(&self, ip: IpAddr) -> FileResult<()> {
        match self.put_reservation_back(ip) {
            Ok(true) => Ok(()),
            Ok(false) | Err(_) => self.dir.remove_file(&ip.to_string()),
        }
    }

    /// Puts reservations back whose lease was removed by another program, or is missing after a
    /// kill.
    fn put_lost_reservations_back(&self) -> FileResult<()> {
        let Some(directory) = &self.directory else { return Ok(()) };
        for name in directory.entry_names()? {
            let ip = name.strip_prefix(ASIDE).and_then(|ip| ip.parse::<IpAddr>().ok());
            if let Some(ip) = ip.filter(|ip| !self.dir.has_entry(&ip.to_string())) {
                self.put_reservation_back(ip)?;
            }
        }
        Ok(())
    }

    /// Reads all leases, and writes a new journal of them if possible.
    fn rebuild_journal(&mut self) -> error::Result<Vec<(AddressLease, Metadata)>> {
        if let Err(e) = self.put_lost_reservations_back() {
            warn!("could not put reserved addresses back: {e}");
        }
        let mut noted = JournalContents::read_journal(self.directory.as_ref(), &self.boot);
        let leases = self.read_all_leases(&noted)?;
        self.journal = self.directory.as_ref().and_then(|directory| {
            let entries: HashMap<IpAddr, JournalEntry> = leases
                .iter()
                .map(|(lease, meta)| (lease.ip, noted.entry_of_lease(lease, meta)))
                .collect();
            // Removed by another program, or before a kill.
            for ip in noted.entries.into_keys().filter(|ip| !entries.contains_key(ip)) {
                let removal = JournalRemoval {
                    freed: self.quarantine.removal_time(),
                    ..JournalRemoval::of_address(ip)
                };
                noted.removals.insert(ip, removal);
            }
            let contents =
                JournalContents { entries, ..noted }.without_old_removals(&self.quarantine);
            LeaseJournal::create_from(&self.dir, directory, &self.boot, &contents)
                .inspect_err(log_unwritable)
                .ok()?
        });
        Ok(leases)
    }

    /// Reads all leases, also those that lost their text, as far as the journal, `noted`, has them.
    pub(super) fn read_all_leases(
        &mut self,
        noted: &JournalContents,
    ) -> error::Result<Vec<(AddressLease, Metadata)>> {
        let mut leases = Vec::new();
        for ip in listing::listed_addresses(&self.dir)? {
            match listing::read_address_file(&self.dir, ip) {
                AddressFile::Lease(lease, meta) => leases.push((lease, *meta)),
                AddressFile::Lost(meta) => {
                    let lease = self.recover_lost_lease(ip, &meta, noted);
                    leases.extend(lease.map(|lease| (lease, *meta)));
                }
                AddressFile::Reserved(_) | AddressFile::Nothing => {}
            }
        }
        Ok(leases)
    }

    /// Frees the address of a lease that lost its text in a power cut, which ended its container.
    /// If nothing proves that there was a reboot since, a failed write may have lost the text,
    /// and the container may live: its lease is written again, or its address stays reserved.
    fn recover_lost_lease(
        &mut self,
        ip: IpAddr,
        meta: &Metadata,
        noted: &JournalContents,
    ) -> Option<AddressLease> {
        if noted.is_of_earlier_boot(ip, meta, &self.boot) {
            self.journal.iter_mut().for_each(LeaseJournal::mark_directory_changed);
            match self.remove_lease_file(ip) {
                Ok(()) => warn!("freed {ip}: its lease was lost in a power cut"),
                Err(e) => warn!("could not free {ip}, whose lease was lost in a power cut: {e}"),
            }
            return None;
        }
        let Some(entry) = noted.entry_of_file(ip, meta) else {
            warn!(
                "{ip} stays reserved: its lease lost its text, and nothing says whose it was; if \
                 no container has the address: {}",
                self.free_command(ip)
            );
            return None;
        };
        let lease = entry.lease.clone();
        match journal::rewrite_lease(&self.dir, &lease, meta) {
            Ok(()) => warn!("the lease of {lease} lost its text, and was written again"),
            Err(e) => warn!("could not write the lease of {lease} again, which lost its text: {e}"),
        }
        Some(lease)
    }

    /// The command that frees an address which no lease names.
    fn free_command(&self, ip: IpAddr) -> String {
        let path = self.dir.file_path("");
        let data_dir = path.parent().unwrap_or(&path);
        let network = listing::network_name_of(&self.dir);
        let option = if data_dir == Path::new(DATA_DIR) {
            String::new()
        } else {
            format!("--data-dir {} ", data_dir.display())
        };
        format!("cnibox ipam free {option}--network {network} {ip}")
    }
}

impl Drop for LeaseStore {
    /// Seals the journal, under the lock: a sealed journal agrees with the leases.
    fn drop(&mut self) {
        if let (Some(journal), Some(directory)) = (self.journal.take(), &self.directory)
            && let Err(e) = journal.seal_if_changed(&self.dir, directory, &self.quarantine)
        {
            log_unwritable(&e);
        }
    }
}

/// Waits for the lock of a network's leases.
fn take_lock(dir: &OpenDirectory, timeout: Duration) -> error::Result<FileLock> {
    let timed_out = || TIMED_OUT.lock().unwrap_or_else(PoisonError::into_inner);
    let path = dir.file_path("");
    let timeout = if timed_out().contains(&path) { Duration::ZERO } else { timeout };
    let lock = FileLock::acquire_store_lock(dir, timeout).inspect_err(|e| {
        if e.source.kind() == ErrorKind::TimedOut {
            timed_out().push(path);
        }
    });
    Ok(lock?)
}

fn aside_name(address: &str) -> String {
    format!("{ASIDE}{address}")
}

fn last_reserved_file_name(range_id: usize) -> String {
    format!("last_reserved_ip.{range_id}")
}

/// Changes the journal and returns it; `None` if there is none, or if it cannot be written, which
/// is no error.
fn change_journal(
    journal: Option<LeaseJournal>,
    change: impl FnOnce(&mut LeaseJournal) -> FileResult<()>,
) -> Option<LeaseJournal> {
    let mut journal = journal?;
    change(&mut journal).inspect_err(log_unwritable).ok().map(|()| journal)
}
