//! The leases of one network, a directory in the format of the reference's host-local plugin.
//!
//! Each lease is a file named by its address; `last_reserved_ip.<range id>` remembers where to go
//! on; `lock` is what both implementations lock. Beside them lies our [`super::index`].

use std::collections::{BTreeMap, HashSet};
use std::fs::{DirBuilder, File, Metadata};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::dir::Dir;
use super::index::{self, Index};
use super::lease::{Lease, Owner};
use super::life::{Notes, Reclaimed, judge};
use super::listing::{self, Found, Reservation};
use super::lock::{self, Lock};
use super::note::{FileId, Note};
use super::quarantine::{self, Moment};
use super::{During, Result};
use crate::attachment::{Life, Trace, life};
use crate::error;
use crate::{log, sysctl};

/// More than an address can have.
const MOST_BYTES: usize = 256;
/// Stores whose lock this process has waited for in vain: the roll-back of what could not begin
/// does not wait again.
static GIVEN_UP: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// How to work with a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// How long to wait for the lock.
    pub patience: Duration,
    /// How long a freed address is kept from the next owner.
    pub reuse_delay: Duration,
}

impl Default for Terms {
    fn default() -> Terms {
        Terms { patience: lock::PATIENCE, reuse_delay: Duration::ZERO }
    }
}

/// A network's leases, locked from opening to drop.
#[derive(Debug)]
pub struct LeaseStore {
    dir: Rc<Dir>,
    /// The folder for all that is ours; absent if it cannot be had.
    root: Option<Rc<Dir>>,
    reuse_delay: Duration,
    /// What is left of the time to wait for the lock.
    patience: Duration,
    /// Absent where there is no telling one boot from the next.
    boot: Option<String>,
    /// Absent if it cannot be had; then every lookup reads all leases.
    index: Option<Index>,
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
    pub fn open(data_dir: &Path, network: &str, terms: Terms) -> error::Result<LeaseStore> {
        if let Some(store) = LeaseStore::open_existing(data_dir, network, terms)? {
            return Ok(store);
        }
        let path = data_dir.join(network);
        DirBuilder::new().recursive(true).mode(0o755).create(&path).during("create", &path)?;
        let gone = || super::Error::new("open", &path, ErrorKind::NotFound).into();
        LeaseStore::open_existing(data_dir, network, terms)?.ok_or_else(gone)
    }

    /// Opens the store of `network` unless there is none.
    pub fn open_existing(
        data_dir: &Path,
        network: &str,
        terms: Terms,
    ) -> error::Result<Option<LeaseStore>> {
        let Some(dir) = Dir::of_network(data_dir, network)? else { return Ok(None) };
        LeaseStore::open_dir(dir, sysctl::boot_id().ok(), terms).map(Some)
    }

    pub(super) fn open_dir(
        dir: Dir,
        boot: Option<String>,
        terms: Terms,
    ) -> error::Result<LeaseStore> {
        let Terms { patience, reuse_delay } = terms;
        let dir = Rc::new(dir);
        let mut store =
            LeaseStore { dir, root: None, reuse_delay, patience, boot, index: None, lock: None };
        store.lock()?;
        Ok(store)
    }

    /// Waits for the lock, and reads what is known of the leases.
    fn lock(&mut self) -> error::Result<()> {
        let given_up = || GIVEN_UP.lock().unwrap_or_else(PoisonError::into_inner);
        let path = self.dir.path("");
        let patience = if given_up().contains(&path) { Duration::ZERO } else { self.patience };
        let start = Instant::now();
        let lock = Lock::of(&self.dir, patience).inspect_err(|e| {
            if e.source.kind() == ErrorKind::TimedOut {
                given_up().push(path);
            }
        })?;
        self.patience = self.patience.saturating_sub(start.elapsed());
        self.lock = Some(lock);
        self.root = index::root(&self.dir);
        let root_and_boot = self.root.as_ref().zip(self.boot.as_deref());
        self.index = root_and_boot.and_then(|(root, boot)| Index::open(&self.dir, root, boot));
        if self.index.is_none() {
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
        let (folder, temp) = index::temp(&self.dir, self.root.as_deref());
        let file = folder.create(temp, lease.text().as_bytes())?;
        if let Err(e) = index::sign(&file) {
            log::debug(format_args!("the lease of {ip} is not marked: {e}"));
        }
        // As in `change`. What tells whether the container lives is noted first: a kill leaves no
        // lease without it.
        let mut current = noted(self.index.take(), &lease, owner, &file);
        let linked = folder.link(temp, &self.dir, &name);
        // The lease is there, or is not, whatever becomes of its second name: an error here would
        // hide that. Whoever writes next tries again.
        if let Err(error) = folder.remove(temp) {
            log::debug(format_args!("left behind: {error}"));
        }
        let reserved = linked?;
        if !reserved {
            current = current.and_then(|mut index| index.remove(&lease).ok().map(|()| index));
        }
        self.index = current;
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
    pub fn heal(
        &mut self,
        reclaim: impl FnOnce(&str, Vec<Reclaimed>) -> Vec<Reclaimed>,
    ) -> error::Result<Vec<Reclaimed>> {
        let Some(boot) = self.boot.clone() else { return Ok(Vec::new()) };
        let entries = Notes::read(self.root.as_deref(), &boot).entries();
        if entries.is_empty() {
            return Ok(Vec::new());
        }
        self.unlock();
        let lives = judge(&entries);
        self.lock()?;
        let mut gone = Vec::new();
        for (entry, life) in entries.iter().zip(lives) {
            let Life::Gone(why) = life else { continue };
            // The note is of a file: the lease must still be that one. A word alone may be anybody's
            // note that the address is taken.
            if let Found::Lease(lease, meta) = listing::read(&self.dir, entry.ip)
                && lease.ifname.is_some()
                && FileId::of(&meta) == entry.note.file
                && index::key(&lease) == entry.key
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
        gone.sort_by_key(|gone| gone.lease.ip);
        Ok(gone)
    }

    /// The addresses that were freed so short a while ago that nobody may have them yet, and for
    /// how long that is so.
    pub fn kept_back(&self) -> BTreeMap<IpAddr, Duration> {
        quarantine::kept_back(self.root.as_deref(), self.boot.as_deref(), self.reuse_delay)
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
        ips.sort();
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
        // The index has every lease.
        let leases = match &self.index {
            Some(index) => index.len(),
            None => ips.iter().filter_map(|ip| listing::read(&self.dir, *ip).lease()).count(),
        };
        Ok(ips.len().saturating_sub(leases))
    }

    /// As [`LeaseStore::retain`], for containers that may be alive: addresses that are on their
    /// interfaces are taken off first. Where that cannot be done the lease stays, with a warning.
    pub fn evict(&mut self, keep: impl Fn(&Lease) -> bool) -> error::Result<Vec<Lease>> {
        let mut refused = self.scan()?;
        refused.retain(|(lease, _)| !keep(lease));
        let notes = self.boot.as_deref().map(|boot| Notes::read(self.root.as_deref(), boot));
        let trace = |(lease, meta): &(Lease, Metadata)| {
            let Note { netns, earlier_boot, .. } = notes.as_ref()?.of(lease, meta);
            (!earlier_boot).then(|| Trace { netns, earlier_boot, ips: vec![lease.ip] })
        };
        let traces: Vec<Trace> = refused.iter().filter_map(trace).collect();
        let left = life::take_off(&traces);
        let (stay, go): (Vec<_>, Vec<_>) =
            refused.into_iter().map(|(lease, _)| lease).partition(|lease| left.contains(&lease.ip));
        for lease in stay {
            log::warn(format_args!("{lease} stays: its address is on an interface"));
        }
        self.remove_freed(go)
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
        match self.dir.read(&last_reserved(range_id), MOST_BYTES) {
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
            |index, ()| {
                index.outlive();
                Ok(())
            },
        )?;
        Ok(())
    }

    /// Changes the store, then the index. As long as they may differ there is no index: whatever
    /// ends this half-way, be it an error or a panic, leaves the store unsealed, and the next
    /// command builds another. No index is worth failing for.
    pub(super) fn change<T>(
        &mut self,
        store: impl FnOnce() -> Result<T>,
        index: impl FnOnce(&mut Index, &T) -> Result<()>,
    ) -> Result<T> {
        let current = self.index.take();
        let outcome = store()?;
        if let Some(mut current) = current {
            match index(&mut current, &outcome) {
                Ok(()) => self.index = Some(current),
                Err(e) => log::debug(format_args!("lease index given up: {e}")),
            }
        }
        Ok(outcome)
    }

    fn held(&mut self, owner: &Owner) -> error::Result<Held> {
        if let Some(held) = self.held_by_index(owner) {
            return Ok(held);
        }
        let (mut current, mut old) = (Vec::new(), Vec::new());
        let all = self.rebuild()?.into_iter().map(|(lease, _)| lease);
        for lease in all.filter(|lease| lease.id == owner.id()) {
            match lease.ifname.as_deref() {
                Some(ifname) if ifname == owner.ifname() => current.push(lease),
                Some(_) => {}
                None => old.push(lease),
            }
        }
        Ok(Held { current, old })
    }

    /// What the index knows of `owner`; `None` if it cannot be relied on.
    /// Only leases that bear the index out count: somebody may have overwritten one in place,
    /// which no directory's time shows.
    fn held_by_index(&mut self, owner: &Owner) -> Option<Held> {
        let (current, old) = self.index.as_mut()?.lookup(owner).ok()?;
        let current: Vec<Lease> = current.into_iter().map(|ip| owner.lease(ip)).collect();
        let old = old.into_iter().map(|ip| Lease { ifname: None, ..owner.lease(ip) });
        let held = Held { current, old: old.collect() };
        held.current.iter().chain(&held.old).all(|lease| self.holds(lease)).then_some(held)
    }

    fn holds(&self, lease: &Lease) -> bool {
        let found = listing::read(&self.dir, lease.ip);
        matches!(found, Found::Lease(found, _) if found == *lease)
    }

    /// As [`LeaseStore::remove_all`], for addresses that were in use.
    fn remove_freed(&mut self, leases: Vec<Lease>) -> error::Result<Vec<Lease>> {
        if !self.reuse_delay.is_zero() && !leases.is_empty() {
            let now = Moment::now(self.boot.as_deref());
            let ips = leases.iter().map(|lease| lease.ip);
            // Before they are free: a kill in between keeps back what is not free.
            let kept = self.root.as_deref().map(|root| {
                quarantine::add(root, &now, ips)
                    .and_then(|()| quarantine::tidy(root, &now, self.reuse_delay))
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
        let removed = self.change(remove, |index, removed: &Vec<Lease>| {
            removed.iter().try_for_each(|lease| index.remove(lease))
        })?;
        error::Error::join(errors).map_or(Ok(removed), Err)
    }

    /// Reads all leases and makes an index of them if possible.
    fn rebuild(&mut self) -> error::Result<Vec<(Lease, Metadata)>> {
        let leases = self.scan()?;
        self.index = self.root.as_ref().zip(self.boot.as_deref()).and_then(|(root, boot)| {
            let notes = Notes::read(Some(root), boot);
            let join = |(lease, meta): &(Lease, Metadata)| (lease.clone(), notes.of(lease, meta));
            let leases: Vec<_> = leases.iter().map(join).collect();
            let built = Index::build(&self.dir, root, boot, &leases);
            built.map_err(|e| log::debug(format_args!("no lease index: {e}"))).ok()
        });
        Ok(leases)
    }

    /// Reads all leases, and removes those of ours that a power cut has emptied: it ended their
    /// containers.
    fn scan(&mut self) -> error::Result<Vec<(Lease, Metadata)>> {
        let mut leases = Vec::new();
        for ip in listing::addresses(&self.dir)? {
            match listing::read(&self.dir, ip) {
                Found::Lease(lease, meta) => leases.push((lease, *meta)),
                Found::Lost => match self.remove_unknown(ip) {
                    Ok(()) => log::warn(format_args!("freed {ip}: a power cut took its lease")),
                    Err(e) => log::warn(format_args!("cannot free {ip}, which nobody holds: {e}")),
                },
                Found::Reserved(_) | Found::Nothing => {}
            }
        }
        Ok(leases)
    }

    /// Removes a file of which the index knows nothing.
    fn remove_unknown(&mut self, ip: IpAddr) -> Result<()> {
        self.dir.remove(&ip.to_string())?;
        if let Some(index) = &mut self.index {
            index.outlive();
        }
        Ok(())
    }

    /// Vouches for the index, and lets others work.
    fn unlock(&mut self) {
        if let Some(Err(e)) = self.index.take().map(Index::seal) {
            log::debug(format_args!("lease index not sealed: {e}"));
        }
        self.lock = None;
    }
}

impl Drop for LeaseStore {
    /// The session's last act, still under the lock: an index that is left agrees with the leases.
    fn drop(&mut self) {
        self.unlock();
    }
}

fn last_reserved(range_id: usize) -> String {
    format!("last_reserved_ip.{range_id}")
}

/// The index with a lease that is about to be created; `None` if that cannot be noted.
fn noted(index: Option<Index>, lease: &Lease, owner: &Owner, file: &File) -> Option<Index> {
    let mut index = index?;
    let meta = file.metadata().during("stat", Path::new("lease"));
    let added = meta.and_then(|meta| {
        let note = Note::new(FileId::of(&meta), owner.netns());
        index.add(lease, note)
    });
    added.map_err(|e| log::debug(format_args!("lease index given up: {e}"))).ok().map(|()| index)
}
