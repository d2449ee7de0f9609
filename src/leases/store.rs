//! The leases of one network, a directory in the format of the reference's host-local plugin.
//!
//! Each lease is a file named by its address; `last_reserved_ip.<range id>` has the address from which allocation
//! continues; both implementations lock the file `lock`. [`super::journal`] is an addition of this program.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{DirBuilder, Metadata};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::journal::{self, Journal, given_up};
use super::lease::{Lease, LeaseOptions, Reclaimed};
use super::lines::{Contents, Entry, FileId, Removal};
use super::listing::{self, Found, Reservation};
use super::notes::judge_all;
use super::quarantine::Quarantine;
use crate::attachment::{Boot, HostEnd, Liveness, Made, Owner};
use crate::files::dir::Dir;
use crate::files::lock::Lock;
use crate::files::{During, Result};
use crate::sort::sort_by_key;
use crate::{error, log};

/// Limit of the size of `last_reserved_ip` in bytes.
const MAX_BYTES: usize = 256;
/// Networks whose lock this process failed to get in time: the rollback of the same ADD does not wait again.
static TIMED_OUT: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A network's leases, locked from opening to drop.
#[derive(Debug)]
pub struct LeaseStore {
    dir: Dir,
    /// The folder `.cnibox`; `None` if it cannot be created or trusted.
    folder: Option<Dir>,
    quarantine: Quarantine,
    /// The current boot.
    boot: Boot,
    /// `None` if the journal cannot be written; then every lookup reads all leases. Also `None` while journal and leases may
    /// differ: an error or a panic leaves the store unsealed, and the next command rewrites the journal.
    journal: Option<Journal>,
    /// Released last: fields are dropped in order.
    _lock: Lock,
}

impl LeaseStore {
    /// Opens the store of `network`, creating missing folders.
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
        let Some(dir) = Dir::of_network(data_dir, network)? else { return Ok(None) };
        LeaseStore::open_dir(dir, Boot::current(), options).map(Some)
    }

    pub(super) fn open_dir(
        dir: Dir,
        boot: Boot,
        options: LeaseOptions,
    ) -> error::Result<LeaseStore> {
        let LeaseOptions { lock_timeout, reuse_delay } = options;
        let lock = take_lock(&dir, lock_timeout)?;
        let folder = journal::make_folder(&dir);
        let quarantine = Quarantine::new(reuse_delay, &boot);
        let journal = folder.as_ref().and_then(|folder| Journal::open(&dir, folder, &boot));
        let mut store = LeaseStore { dir, folder, quarantine, boot, journal, _lock: lock };
        if store.journal.is_none() {
            store.rebuild()?;
        }
        Ok(store)
    }

    /// Reserves `ip`; false if it is taken. `end` is the host's end of the attachment's veth pair, if there is one: it
    /// proves later that the attachment has ended.
    pub fn reserve(
        &mut self,
        ip: IpAddr,
        owner: Owner<'_>,
        end: Option<HostEnd>,
    ) -> error::Result<bool> {
        let (name, lease) = (ip.to_string(), Lease::new(ip, owner));
        // One system call for each address that is taken, instead of the six that create a file.
        if self.dir.has(&name) {
            return Ok(false);
        }
        let (folder, temp) = journal::temp(&self.dir, self.folder.as_ref());
        let file = folder.create(temp, lease.text().as_bytes())?;
        if let Err(e) = journal::sign(&file) {
            log::debug(format_args!("the lease of {ip} is not marked: {e}"));
        }
        // The journal is written before the lease is linked: a kill leaves no lease without an entry.
        let journal = noted(self.journal.take(), |journal| {
            let file = FileId::of(&file.metadata().during("stat", Path::new(temp))?);
            journal.add(&Entry { lease, file, end, made: Made::Now })
        });
        let linked = folder.publish(temp, &self.dir, &name);
        // A temporary name that cannot be removed does not change whether the lease exists, so it is no error. The
        // next command that writes a lease removes the name.
        if let Err(error) = folder.remove(temp) {
            log::debug(format_args!("left behind: {error}"));
        }
        let reserved = linked?;
        self.journal = if reserved {
            journal
        } else {
            noted(journal, |journal| journal.remove(&[Removal::of(ip)]))
        };
        Ok(reserved)
    }

    /// The addresses that `owner` holds, in the current form or the old one.
    pub fn owned_by(&mut self, owner: Owner<'_>) -> error::Result<Vec<IpAddr>> {
        Ok(self.held(owner)?.iter().map(|lease| lease.ip).collect())
    }

    /// Releases all leases of `owner` and returns their addresses. Leases in the old form, without an interface, are
    /// released only if there is none in the current form.
    pub fn release(&mut self, owner: Owner<'_>) -> error::Result<Vec<IpAddr>> {
        let mut leases = self.held(owner)?;
        if leases.iter().any(|lease| lease.ifname.is_some()) {
            leases.retain(|lease| lease.ifname.is_some());
        }
        let released = self.remove_freed(leases)?;
        Ok(released.into_iter().map(|lease| lease.ip).collect())
    }

    /// Releases one lease of `owner`, for a rollback; false if `owner` does not hold the address.
    pub fn release_address(&mut self, ip: IpAddr, owner: Owner<'_>) -> error::Result<bool> {
        let lease = Lease::new(ip, owner);
        if !self.holds(&lease) {
            return Ok(false);
        }
        self.remove_all(vec![lease], |lease| Removal::of(lease.ip)).map(|_| true)
    }

    /// Removes the leases of attachments that have certainly ended, and returns these leases, sorted by address. `reclaim`
    /// gets the network's name, removes the other state of the attachments, and returns the leases to remove.
    pub fn reclaim_dead(
        &mut self,
        reclaim: impl FnOnce(&str, Vec<Reclaimed>) -> Vec<Reclaimed>,
    ) -> error::Result<Vec<Reclaimed>> {
        let noted = Contents::read(self.folder.as_ref(), &self.boot);
        let entries: Vec<Entry> = noted.entries.into_values().collect();
        let network = listing::network_of(&self.dir);
        let mut gone = Vec::new();
        for (entry, life) in entries.iter().zip(judge_all(&network, &entries)) {
            let Liveness::Gone(why) = life else { continue };
            // The lease must still be the file of the entry.
            if let Found::Lease(lease, meta) = listing::read(&self.dir, entry.lease.ip)
                && FileId::of(&meta) == entry.file
                && lease == entry.lease
            {
                gone.push(Reclaimed { lease, why });
            }
        }
        let (gone, freed) = (reclaim(&network, gone), self.quarantine.begin());
        let mut gone = self.remove_all(gone, |gone| Removal {
            freed: freed.clone(),
            reclaimed: Some(gone.clone()),
            ..Removal::of(gone.lease.ip)
        })?;
        sort_by_key(&mut gone, |gone| gone.lease.ip);
        Ok(gone)
    }

    /// The addresses that were freed less than `reuseDelay` ago, with the time left.
    pub fn quarantined(&self) -> BTreeMap<IpAddr, Duration> {
        journal::withheld(self.folder.as_ref(), &self.quarantine)
    }

    /// Removes and returns the `unwanted` reservations.
    pub fn remove_reserved(
        &mut self,
        unwanted: impl Fn(&Reservation) -> bool,
    ) -> error::Result<Vec<Reservation>> {
        let mut reserved = listing::reservations(&self.dir, &self.taken()?);
        reserved.retain(unwanted);
        reserved.iter().try_for_each(|reservation| self.remove_unknown(reservation.ip))?;
        Ok(reserved)
    }

    /// The number of files with the name of an address that are not leases.
    pub fn reserved(&self) -> error::Result<usize> {
        let ips = listing::addresses(&self.dir)?;
        let leases = match &self.journal {
            Some(journal) => journal.len(),
            None => ips.iter().filter_map(|ip| listing::read(&self.dir, *ip).lease()).count(),
        };
        Ok(ips.len().saturating_sub(leases))
    }

    /// Removes every lease that `keep` refuses, except with `spare` those whose attachments certainly exist. Returns the
    /// leases that were removed, and those that were spared.
    pub fn retain(
        &mut self,
        keep: impl Fn(&Lease) -> bool,
        spare: bool,
    ) -> error::Result<(Vec<Lease>, Vec<Lease>)> {
        let mut refused = self.scan()?;
        refused.retain(|(lease, _)| !keep(lease));
        let noted = Contents::read(self.folder.as_ref(), &self.boot);
        let lives = noted.judge(&listing::network_of(&self.dir), &refused);
        let (mut go, mut stay) = (Vec::new(), Vec::new());
        for ((lease, _), life) in refused.into_iter().zip(lives) {
            if spare && life == Liveness::Alive { stay.push(lease) } else { go.push(lease) }
        }
        Ok((self.remove_freed(go)?, stay))
    }

    /// The addresses of all files, from one listing of the directory.
    pub fn taken(&self) -> error::Result<HashSet<IpAddr>> {
        Ok(listing::addresses(&self.dir)?)
    }

    /// The address that was last reserved in a range set. It is a hint: an unreadable file counts as absent.
    pub fn last_reserved(&self, range_id: usize) -> Option<IpAddr> {
        let read = self.dir.read(&last_reserved(range_id), MAX_BYTES);
        if let Err(e) = read.as_ref()
            && e.kind() != ErrorKind::NotFound
        {
            log::line(format_args!("Error retrieving last reserved ip: {}", error::io_text(e)));
        }
        std::str::from_utf8(&read.ok()?.0).ok()?.trim().parse().ok()
    }

    /// Writes the address that was last reserved in a range set.
    ///
    /// The file is overwritten in place: after a kill it may have another address or none, and allocation starts
    /// elsewhere. A rename over the old file would make ext4 write to the disk, which takes longer than the rest of
    /// an ADD.
    pub fn set_last_reserved(&mut self, range_id: usize, ip: IpAddr) -> error::Result<()> {
        let journal = self.journal.take();
        self.dir.overwrite(&last_reserved(range_id), ip.to_string().as_bytes())?;
        self.journal = journal;
        self.journal.iter_mut().for_each(Journal::note_folder_change);
        Ok(())
    }

    fn held(&mut self, owner: Owner<'_>) -> error::Result<Vec<Lease>> {
        let held = self.journal.as_mut().and_then(|journal| journal.held_by(owner));
        // A lease that was overwritten in place does not change the folder's modification time.
        if let Some(held) = held.filter(|held| held.iter().all(|lease| self.holds(lease))) {
            return Ok(held);
        }
        let all = self.rebuild()?.into_iter().map(|(lease, _)| lease);
        Ok(all.filter(|lease| lease.is_of(owner)).collect())
    }

    fn holds(&self, lease: &Lease) -> bool {
        let found = listing::read(&self.dir, lease.ip);
        matches!(found, Found::Lease(found, _) if found == *lease)
    }

    /// As [`LeaseStore::remove_all`], for leases of addresses that were in use.
    fn remove_freed(&mut self, leases: Vec<Lease>) -> error::Result<Vec<Lease>> {
        let freed = self.quarantine.begin();
        self.remove_all(leases, |lease| Removal { freed: freed.clone(), ..Removal::of(lease.ip) })
    }

    /// Removes all leases that can be removed, then reports the errors.
    fn remove_all<L>(
        &mut self,
        leases: Vec<L>,
        removal: impl Fn(&L) -> Removal,
    ) -> error::Result<Vec<L>> {
        let (mut removed, mut removals, mut errors) = (Vec::new(), Vec::new(), Vec::new());
        let journal = self.journal.take();
        for lease in leases {
            let removal = removal(&lease);
            match self.dir.remove(&removal.ip.to_string()) {
                Ok(()) => {
                    removed.push(lease);
                    removals.push(removal);
                }
                Err(e) => errors.push(e.into()),
            }
        }
        self.journal = noted(journal, |journal| journal.remove(&removals));
        error::Error::join(errors).map_or(Ok(removed), Err)
    }

    /// Reads all leases and writes the journal of them if possible.
    fn rebuild(&mut self) -> error::Result<Vec<(Lease, Metadata)>> {
        let leases = self.scan()?;
        self.journal = self.folder.as_ref().and_then(|folder| {
            let mut noted = Contents::read(Some(folder), &self.boot);
            let entry = |(lease, meta): &(Lease, Metadata)| (lease.ip, noted.entry(lease, meta));
            let entries: HashMap<IpAddr, Entry> = leases.iter().map(entry).collect();
            // Removed by another program, or before a kill.
            for ip in noted.entries.into_keys().filter(|ip| !entries.contains_key(ip)) {
                let removal = Removal { freed: self.quarantine.begin(), ..Removal::of(ip) };
                noted.removals.insert(ip, removal);
            }
            let contents = Contents { entries, ..noted }.tidied(&self.quarantine);
            Journal::create(&self.dir, folder, &self.boot, &contents).inspect_err(given_up).ok()
        });
        Ok(leases)
    }

    /// Reads all leases, and removes leases of this program that lost their content in a power cut, which ended their
    /// containers.
    pub(super) fn scan(&mut self) -> error::Result<Vec<(Lease, Metadata)>> {
        let mut leases = Vec::new();
        for ip in listing::addresses(&self.dir)? {
            match listing::read(&self.dir, ip) {
                Found::Lease(lease, meta) => leases.push((lease, *meta)),
                Found::Lost => match self.remove_unknown(ip) {
                    Ok(()) => {
                        log::warn(format_args!("freed {ip}: its lease was lost in a power cut"));
                    }
                    Err(e) => log::warn(format_args!("cannot free {ip}, a lost lease: {e}")),
                },
                Found::Reserved(_) | Found::Nothing => {}
            }
        }
        Ok(leases)
    }

    /// Removes a file that the journal does not have.
    fn remove_unknown(&mut self, ip: IpAddr) -> Result<()> {
        self.dir.remove(&ip.to_string())?;
        self.journal.iter_mut().for_each(Journal::note_folder_change);
        Ok(())
    }
}

impl Drop for LeaseStore {
    /// Seals the journal, under the lock: a sealed journal agrees with the leases.
    fn drop(&mut self) {
        if let (Some(journal), Some(folder)) = (self.journal.take(), &self.folder)
            && let Err(e) = journal.seal(&self.dir, folder, &self.quarantine)
        {
            given_up(&e);
        }
    }
}

/// Waits for the lock of a network's leases.
fn take_lock(dir: &Dir, timeout: Duration) -> error::Result<Lock> {
    let timed_out = || TIMED_OUT.lock().unwrap_or_else(PoisonError::into_inner);
    let path = dir.path("");
    let timeout = if timed_out().contains(&path) { Duration::ZERO } else { timeout };
    let lock = Lock::of(dir, timeout).inspect_err(|e| {
        if e.source.kind() == ErrorKind::TimedOut {
            timed_out().push(path);
        }
    });
    Ok(lock?)
}

fn last_reserved(range_id: usize) -> String {
    format!("last_reserved_ip.{range_id}")
}

/// The journal after a change of it; `None` if there is none, or it cannot be written, which fails no command.
fn noted(
    journal: Option<Journal>,
    note: impl FnOnce(&mut Journal) -> Result<()>,
) -> Option<Journal> {
    let mut journal = journal?;
    note(&mut journal).inspect_err(given_up).ok().map(|()| journal)
}
