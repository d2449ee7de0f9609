//! The leases of one network, a directory in the format of the reference's host-local plugin.
//!
//! Each lease is a file named by its address; `last_reserved_ip.<range id>` remembers where to go
//! on; `lock` is what both implementations lock. Beside them lies our [`super::journal`].

use std::collections::{BTreeMap, HashSet};
use std::fs::{DirBuilder, File, Metadata};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::boot::BootTime;
use super::journal::{self, Boot, Entry, FileId, Journal, Note};
use super::lease::{Lease, LeaseOptions, Owner};
use super::listing::{self, Found, Reservation};
use super::notes::{Notes, Reclaimed, judge, trace};
use super::quarantine;
use crate::attachment::{Liveness, Trace, liveness};
use crate::error;
use crate::files::dir::Dir;
use crate::files::lock::Lock;
use crate::files::{During, Error, Result};
use crate::sort::{sort, sort_by_key};
use crate::{log, sysctl};

/// More than an address can have.
const MAX_BYTES: usize = 256;
/// Networks whose lock this process has waited for in vain: the roll-back of an ADD that could not begin
/// does not wait again.
static TIMED_OUT: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A network's leases, locked from opening to drop.
#[derive(Debug)]
pub struct LeaseStore {
    dir: Rc<Dir>,
    /// Its folder `.cnibox`; `None` if it cannot be made or trusted.
    folder: Option<Rc<Dir>>,
    reuse_delay: Duration,
    /// What is left of the time to wait for the lock.
    lock_timeout: Duration,
    /// The boot id; `None` where it cannot be read.
    boot: Option<String>,
    /// `None` if it cannot be written; then every lookup reads all leases.
    journal: Option<Journal>,
    /// Released after all else.
    lock: Option<Lock>,
}

/// What one owner holds.
struct Held {
    current: Vec<Lease>,
    /// In the old form, which does not tell the interfaces of a container apart.
    old: Vec<Lease>,
}

impl LeaseStore {
    /// Opens the store of `network`, creating what is missing.
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
        let gone = || Error::new("open", &path, ErrorKind::NotFound).into();
        LeaseStore::open_existing(data_dir, network, options)?.ok_or_else(gone)
    }

    /// Opens the store of `network` unless there is none.
    pub fn open_existing(
        data_dir: &Path,
        network: &str,
        options: LeaseOptions,
    ) -> error::Result<Option<LeaseStore>> {
        let Some(dir) = Dir::of_network(data_dir, network)? else { return Ok(None) };
        LeaseStore::open_dir(dir, sysctl::boot_id().ok(), options).map(Some)
    }

    pub(super) fn open_dir(
        dir: Dir,
        boot: Option<String>,
        options: LeaseOptions,
    ) -> error::Result<LeaseStore> {
        let LeaseOptions { lock_timeout, reuse_delay } = options;
        let (dir, folder, journal, lock) = (Rc::new(dir), None, None, None);
        let mut store = LeaseStore { dir, folder, reuse_delay, lock_timeout, boot, journal, lock };
        store.lock()?;
        Ok(store)
    }

    /// Waits for the lock, and reads what is known of the leases.
    fn lock(&mut self) -> error::Result<()> {
        let timed_out = || TIMED_OUT.lock().unwrap_or_else(PoisonError::into_inner);
        let path = self.dir.path("");
        let lock_timeout =
            if timed_out().contains(&path) { Duration::ZERO } else { self.lock_timeout };
        let start = Instant::now();
        let lock = Lock::of(&self.dir, lock_timeout).inspect_err(|e| {
            if e.source.kind() == ErrorKind::TimedOut {
                timed_out().push(path);
            }
        })?;
        self.lock_timeout = self.lock_timeout.saturating_sub(start.elapsed());
        self.lock = Some(lock);
        self.folder = journal::make_folder(&self.dir);
        let folder_and_boot = self.folder.as_ref().zip(self.boot.as_deref());
        self.journal =
            folder_and_boot.and_then(|(folder, boot)| Journal::open(&self.dir, folder, boot));
        if self.journal.is_none() {
            self.rebuild()?;
        }
        Ok(())
    }

    /// Reserves `ip`; false if it is taken.
    pub fn reserve(&mut self, ip: IpAddr, owner: &Owner) -> error::Result<bool> {
        let (name, lease) = (ip.to_string(), owner.lease(ip));
        // One cheap call for the many that are taken before the six that make a file.
        if self.dir.has(&name) {
            return Ok(false);
        }
        let (folder, temp) = journal::temp(&self.dir, self.folder.as_deref());
        let file = folder.create(temp, lease.text().as_bytes())?;
        if let Err(e) = journal::sign(&file) {
            log::debug(format_args!("the lease of {ip} is not marked: {e}"));
        }
        // Noted before the lease is there: a kill leaves no lease without its note. As in `change`,
        // there is no journal as long as the two may differ.
        let mut journal =
            self.journal.take().and_then(|journal| noted(journal, &lease, owner, &file));
        let linked = folder.link(temp, &self.dir, &name);
        // The lease is there, or is not, whatever becomes of its second name: an error here would
        // hide that. The next command that writes a lease tries again.
        if let Err(error) = folder.remove(temp) {
            log::debug(format_args!("left behind: {error}"));
        }
        let reserved = linked?;
        if !reserved {
            journal = journal
                .and_then(|mut journal| journal.remove([ip].into_iter()).ok().map(|()| journal));
        }
        self.journal = journal;
        Ok(reserved)
    }

    /// The addresses that `owner` holds, in the present form or the old one.
    pub fn owned_by(&mut self, owner: &Owner) -> error::Result<Vec<IpAddr>> {
        let Held { current, old } = self.held(owner)?;
        Ok(current.iter().chain(&old).map(|lease| lease.ip).collect())
    }

    /// Releases all that `owner` holds and tells what that was. Leases in the old form are only
    /// looked at if there is none in the present one.
    pub fn release(&mut self, owner: &Owner) -> error::Result<Vec<IpAddr>> {
        let Held { current, old } = self.held(owner)?;
        let leases = if current.is_empty() { old } else { current };
        let released = self.remove_freed(leases)?;
        Ok(released.into_iter().map(|lease| lease.ip).collect())
    }

    /// Takes back one reservation of `owner`, for a rollback; false if it is not its (any more).
    pub fn release_address(&mut self, ip: IpAddr, owner: &Owner) -> error::Result<bool> {
        let lease = owner.lease(ip);
        if !self.holds(&lease) {
            return Ok(false);
        }
        self.remove_all(vec![lease]).map(|_| true)
    }

    /// Removes the leases of containers that are certainly gone, and tells which, by address. Those
    /// that `reclaim` leaves out stay: it takes back what their containers have besides in the
    /// network of this name.
    ///
    /// Others may work while the processes of the node are looked through: what was read before
    /// this may be out of date after it, and after an error nothing can be done any more.
    pub fn reclaim_dead(
        &mut self,
        reclaim: impl FnOnce(&str, Vec<Reclaimed>) -> Vec<Reclaimed>,
    ) -> error::Result<Vec<Reclaimed>> {
        let Some(boot) = self.boot.clone() else { return Ok(Vec::new()) };
        let entries = Notes::read(self.folder.as_deref(), &boot).into_entries();
        if entries.is_empty() {
            return Ok(Vec::new());
        }
        self.unlock();
        let lives = judge(&entries);
        self.lock()?;
        let mut gone = Vec::new();
        for (entry, life) in entries.iter().zip(lives) {
            let Liveness::Gone(why) = life else { continue };
            // The note names a file: the lease must still be that file. A file with a container id alone may have
            // been written by a person, to reserve the address.
            if let Found::Lease(lease, meta) = listing::read(&self.dir, entry.lease.ip)
                && lease.ifname.is_some()
                && FileId::of(&meta) == entry.note.file
                && lease == entry.lease
            {
                gone.push(Reclaimed { lease, why });
            }
        }
        let path = self.dir.path("");
        let network = path.file_name().unwrap_or_default().to_string_lossy();
        let mut gone = reclaim(&network, gone);
        let removed = self.remove_freed(gone.iter().map(|gone| gone.lease.clone()).collect())?;
        let removed: HashSet<IpAddr> = removed.into_iter().map(|lease| lease.ip).collect();
        gone.retain(|gone| removed.contains(&gone.lease.ip));
        sort_by_key(&mut gone, |gone| gone.lease.ip);
        Ok(gone)
    }

    /// The addresses that were freed less than `reuse_delay` ago, and for how long they have to wait.
    pub fn quarantined(&self) -> BTreeMap<IpAddr, Duration> {
        quarantine::quarantined(self.folder.as_deref(), self.boot.as_deref(), self.reuse_delay)
    }

    /// Removes every lease that `keep` refuses, and returns those.
    pub fn retain(&mut self, keep: impl Fn(&Lease) -> bool) -> error::Result<Vec<Lease>> {
        let leases = self.scan()?.into_iter().map(|(lease, _)| lease);
        let refused = leases.filter(|lease| !keep(lease)).collect();
        self.remove_freed(refused)
    }

    /// Removes files that are no leases, and returns those: for a person who says so.
    pub fn remove_reserved(
        &mut self,
        unwanted: impl Fn(&Reservation) -> bool,
    ) -> error::Result<Vec<Reservation>> {
        let mut removed = Vec::new();
        let mut ips: Vec<_> = listing::addresses(&self.dir)?.into_iter().collect();
        sort(&mut ips);
        for ip in ips {
            let Found::Reserved(reservation) = listing::read(&self.dir, ip) else { continue };
            if unwanted(&reservation) {
                self.remove_unknown(ip)?;
                removed.push(reservation);
            }
        }
        Ok(removed)
    }

    /// How many addresses are taken by files that are no leases.
    pub fn reserved(&self) -> error::Result<usize> {
        let ips = listing::addresses(&self.dir)?;
        let leases = match &self.journal {
            Some(journal) => journal.len(),
            None => ips.iter().filter_map(|ip| listing::read(&self.dir, *ip).lease()).count(),
        };
        Ok(ips.len().saturating_sub(leases))
    }

    /// As [`LeaseStore::retain`], for containers that may be alive: addresses that are on their
    /// interfaces are taken off first. Where that cannot be done the lease stays: the second list.
    pub fn evict(
        &mut self,
        keep: impl Fn(&Lease) -> bool,
    ) -> error::Result<(Vec<Lease>, Vec<Lease>)> {
        let mut refused = self.scan()?;
        refused.retain(|(lease, _)| !keep(lease));
        let mut traces: Vec<Trace> = Vec::new();
        if let Some(boot) = self.boot.as_deref() {
            let notes = Notes::read(self.folder.as_deref(), boot);
            traces.extend(refused.iter().map(|(lease, meta)| trace(&notes.entry(lease, meta))));
            traces.retain(|trace| !trace.earlier_boot);
        }
        let left = liveness::remove_addresses(&traces);
        let (stay, go): (Vec<_>, Vec<_>) =
            refused.into_iter().map(|(lease, _)| lease).partition(|lease| left.contains(&lease.ip));
        Ok((self.remove_freed(go)?, stay))
    }

    /// All leases, read one by one.
    #[cfg(test)]
    pub(super) fn leases(&self) -> error::Result<Vec<Lease>> {
        let found = self.taken()?.into_iter().map(|ip| listing::read(&self.dir, ip));
        Ok(found.filter_map(|found| Some(found.lease()?.0)).collect())
    }

    /// The addresses that are taken, from one listing of the directory.
    pub fn taken(&self) -> error::Result<HashSet<IpAddr>> {
        Ok(listing::addresses(&self.dir)?)
    }

    /// The address that was last reserved in a range set. It only says where to go on, so one
    /// that cannot be read is as good as none.
    pub fn last_reserved(&self, range_id: usize) -> Option<IpAddr> {
        match self.dir.read(&last_reserved(range_id), MAX_BYTES) {
            Ok((text, _)) => std::str::from_utf8(&text).ok()?.trim().parse().ok(),
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => {
                log::line(format_args!(
                    "Error retrieving last reserved ip: {}",
                    error::io_text(&e)
                ));
                None
            }
        }
    }

    /// Notes the address that was last reserved in a range set.
    ///
    /// In place: killed half-way, this leaves another address or none, and allocation starts
    /// somewhere else. A rename over the old file would have ext4 write to the disk, which takes
    /// longer than all the rest of an ADD.
    pub fn set_last_reserved(&mut self, range_id: usize, ip: IpAddr) -> error::Result<()> {
        let dir = Rc::clone(&self.dir);
        let text = ip.to_string();
        self.change(
            || dir.overwrite(&last_reserved(range_id), text.as_bytes()),
            |journal, ()| {
                journal.note_folder_change();
                Ok(())
            },
        )?;
        Ok(())
    }

    /// Changes the store, then the journal. As long as they may differ there is no journal: whatever
    /// ends this half-way, be it an error or a panic, leaves the store unsealed, and the next
    /// command writes another. No journal is worth failing for.
    pub(super) fn change<T>(
        &mut self,
        store: impl FnOnce() -> Result<T>,
        note: impl FnOnce(&mut Journal, &T) -> Result<()>,
    ) -> Result<T> {
        let current = self.journal.take();
        let outcome = store()?;
        if let Some(mut current) = current {
            self.journal =
                note(&mut current, &outcome).inspect_err(given_up).ok().map(|()| current);
        }
        Ok(outcome)
    }

    fn held(&mut self, owner: &Owner) -> error::Result<Held> {
        let noted = self.journal.as_mut().and_then(|journal| journal.held_by(owner));
        // A lease may have been overwritten in place, which shows in no folder's time.
        let noted = noted.filter(|noted| noted.iter().all(|lease| self.holds(lease)));
        let leases = noted.map_or_else(|| self.read_held(owner), Ok)?;
        let (current, old) = leases.into_iter().partition(|lease| lease.ifname.is_some());
        Ok(Held { current, old })
    }

    fn read_held(&mut self, owner: &Owner) -> error::Result<Vec<Lease>> {
        let all = self.rebuild()?.into_iter().map(|(lease, _)| lease);
        Ok(all.filter(|lease| owner.has(lease)).collect())
    }

    fn holds(&self, lease: &Lease) -> bool {
        let found = listing::read(&self.dir, lease.ip);
        matches!(found, Found::Lease(found, _) if found == *lease)
    }

    /// As [`LeaseStore::remove_all`], for addresses that were in use.
    fn remove_freed(&mut self, leases: Vec<Lease>) -> error::Result<Vec<Lease>> {
        if !self.reuse_delay.is_zero() && !leases.is_empty() {
            let now = BootTime::now(self.boot.as_deref());
            let ips = leases.iter().map(|lease| lease.ip);
            // Before they are free: a kill in between keeps back what is not free.
            let kept = self.folder.as_deref().map(|folder| {
                quarantine::add(folder, &now, ips)
                    .and_then(|()| quarantine::tidy(folder, &now, self.reuse_delay))
            });
            if let Err(e) = kept.unwrap_or(Ok(())) {
                log::warn(format_args!("freed addresses may be given out at once: {e}"));
            }
        }
        self.remove_all(leases)
    }

    /// Removes leases as far as possible, reports what went wrong afterwards.
    fn remove_all(&mut self, leases: Vec<Lease>) -> error::Result<Vec<Lease>> {
        let mut errors = Vec::new();
        let dir = Rc::clone(&self.dir);
        let remove = || {
            let mut removed = Vec::new();
            for lease in leases {
                match dir.remove(&lease.ip.to_string()) {
                    Ok(()) => removed.push(lease),
                    Err(e) => errors.push(e.into()),
                }
            }
            Ok(removed)
        };
        let removed = self.change(remove, |journal, removed: &Vec<Lease>| {
            journal.remove(removed.iter().map(|lease| lease.ip))
        })?;
        error::Error::join(errors).map_or(Ok(removed), Err)
    }

    /// Reads all leases and writes the journal of them if possible.
    fn rebuild(&mut self) -> error::Result<Vec<(Lease, Metadata)>> {
        let leases = self.scan()?;
        self.journal = self.folder.as_ref().zip(self.boot.as_deref()).and_then(|(folder, boot)| {
            let notes = Notes::read(Some(folder), boot);
            let entries: Vec<_> =
                leases.iter().map(|(lease, meta)| notes.entry(lease, meta)).collect();
            Journal::create(&self.dir, folder, boot, &entries).inspect_err(given_up).ok()
        });
        Ok(leases)
    }

    /// Reads all leases, and removes leases of ours that a power cut has emptied: it ended their
    /// containers.
    fn scan(&mut self) -> error::Result<Vec<(Lease, Metadata)>> {
        let mut leases = Vec::new();
        for ip in listing::addresses(&self.dir)? {
            match listing::read(&self.dir, ip) {
                Found::Lease(lease, meta) => leases.push((lease, *meta)),
                Found::Lost => match self.remove_unknown(ip) {
                    Ok(()) => log::warn(format_args!("freed {ip}: a power cut took its lease")),
                    Err(e) => log::warn(format_args!("cannot free {ip}, a lost lease: {e}")),
                },
                Found::Reserved(_) | Found::Nothing => {}
            }
        }
        Ok(leases)
    }

    /// Removes a file of which the journal knows nothing.
    fn remove_unknown(&mut self, ip: IpAddr) -> Result<()> {
        self.dir.remove(&ip.to_string())?;
        if let Some(journal) = &mut self.journal {
            journal.note_folder_change();
        }
        Ok(())
    }

    /// Seals the journal, and lets others work.
    fn unlock(&mut self) {
        if let Some(Err(e)) = self.journal.take().map(Journal::seal) {
            given_up(&e);
        }
        self.lock = None;
    }
}

impl Drop for LeaseStore {
    /// The session's last act, still under the lock: a sealed journal agrees with the leases.
    fn drop(&mut self) {
        self.unlock();
    }
}

fn last_reserved(range_id: usize) -> String {
    format!("last_reserved_ip.{range_id}")
}

/// Where the journal cannot be kept, the next command reads all leases.
fn given_up(error: &Error) {
    log::debug(format_args!("no lease journal: {error}"));
}

/// The journal with a lease that is about to be created; `None` if it cannot be written.
fn noted(mut journal: Journal, lease: &Lease, owner: &Owner, file: &File) -> Option<Journal> {
    let meta = file.metadata().during("stat", Path::new("lease"));
    let added = meta.and_then(|meta| {
        let note = Note { file: FileId::of(&meta), netns: owner.netns(), boot: Boot::This };
        journal.add(&Entry { lease: lease.clone(), note })
    });
    added.inspect_err(given_up).ok().map(|()| journal)
}
