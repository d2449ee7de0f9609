//! The leases of one network, a directory in the format of the reference's host-local plugin.
//!
//! Each lease is a file named by its address; `last_reserved_ip.<range id>` remembers where to go
//! on; `lock` is what both implementations lock. Beside them lies our [`super::index`].

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, DirBuilder, File, Metadata};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::AT_FDCWD;

use super::atomic::{self, Writer};
use super::index::{self, Index};
use super::lease::{Lease, Owner};
use super::life::{Notes, Reclaimed, judge};
use super::listing::{self, Found, Listing};
use super::lock::{self, Lock};
use super::note::{FileId, Note};
use super::quarantine::{self, Moment};
use super::{During, Result, remove_file};
use crate::attachment::Life;
use crate::error;
use crate::{log, sysctl};

/// The mode of everything we write into a store.
const MODE: u32 = 0o600;

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
    dir: PathBuf,
    reuse_delay: Duration,
    /// Absent where there is no telling one boot from the next.
    boot: Option<String>,
    /// Absent if it cannot be had; then every lookup reads all leases.
    index: Option<Index>,
    /// Released after all else.
    _lock: Lock,
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
        let dir = data_dir.join(network);
        DirBuilder::new().recursive(true).mode(0o755).create(&dir).during("create", &dir)?;
        LeaseStore::open_dir(dir, sysctl::boot_id().ok(), terms)
    }

    /// Opens the store of `network` unless there is none.
    pub fn open_existing(
        data_dir: &Path,
        network: &str,
        terms: Terms,
    ) -> error::Result<Option<LeaseStore>> {
        let dir = data_dir.join(network);
        let boot = || sysctl::boot_id().ok();
        match Lock::within(&dir.join("lock"), terms.patience) {
            Err(e) if e.source.kind() == ErrorKind::NotFound => {
                // If it is there, somebody has made it just now.
                exists(&dir)?.then(|| LeaseStore::open_dir(dir, boot(), terms)).transpose()
            }
            lock => LeaseStore::load(dir, boot(), terms, lock?).map(Some),
        }
    }

    pub(super) fn open_dir(
        dir: PathBuf,
        boot: Option<String>,
        terms: Terms,
    ) -> error::Result<LeaseStore> {
        let lock = Lock::within(&dir.join("lock"), terms.patience)?;
        LeaseStore::load(dir, boot, terms, lock)
    }

    fn load(
        dir: PathBuf,
        boot: Option<String>,
        terms: Terms,
        lock: Lock,
    ) -> error::Result<LeaseStore> {
        let index = boot.as_deref().and_then(|boot| Index::open(&dir, boot));
        let mut store =
            LeaseStore { dir, reuse_delay: terms.reuse_delay, boot, index, _lock: lock };
        if store.index.is_none() {
            store.rebuild()?;
        }
        Ok(store)
    }

    /// Reserves `ip`; false if it is taken.
    pub fn reserve(&mut self, ip: IpAddr, owner: &Owner) -> error::Result<bool> {
        let (path, lease) = (self.path(ip), owner.lease(ip));
        // One cheap call for the many that are taken before the five that make a file.
        if path.symlink_metadata().is_ok() {
            return Ok(false);
        }
        let writer = index::writer(&self.dir, self.index.as_ref());
        // As in `change`. What tells whether the container lives is noted first: a kill leaves no
        // lease without it.
        let mut current = self.index.take();
        let note = |file: &File| current = noted(current.take(), &lease, owner, file);
        if !writer.create_noted(&path, lease.text().as_bytes(), MODE, note)? {
            current = current.and_then(|mut index| index.remove(&lease).ok().map(|()| index));
            self.index = current;
            return Ok(false);
        }
        self.index = current;
        Ok(true)
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
    pub fn heal(
        &mut self,
        reclaim: impl FnOnce(&str, Vec<Reclaimed>) -> Vec<Reclaimed>,
    ) -> error::Result<Vec<Reclaimed>> {
        let Some(boot) = self.boot.clone() else { return Ok(Vec::new()) };
        let entries = Notes::read(&self.dir, &boot).entries();
        let mut gone = Vec::new();
        for (entry, life) in entries.iter().zip(judge(&entries)) {
            let Life::Gone(why) = life else { continue };
            // The note is of a file: the lease must still be that one.
            if let Found::Lease(lease, file) = self.read(entry.ip)
                && file.metadata().is_ok_and(|meta| FileId::of(&meta) == entry.note.file)
                && index::key(&lease) == entry.key
            {
                gone.push(Reclaimed { lease, why });
            }
        }
        let network = self.dir.file_name().unwrap_or_default().to_string_lossy();
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
        quarantine::kept_back(&self.dir, self.boot.as_deref(), self.reuse_delay)
    }

    /// Removes every lease that `keep` refuses, and returns those.
    pub fn retain(&mut self, keep: impl Fn(&Lease) -> bool) -> error::Result<Vec<Lease>> {
        let leases = self.scan()?.into_iter().map(|(lease, _)| lease);
        let refused = leases.filter(|lease| !keep(lease)).collect();
        self.remove_freed(refused)
    }

    /// All leases, read one by one.
    #[cfg(test)]
    pub(super) fn leases(&self) -> error::Result<Vec<Lease>> {
        Ok(Listing::read(&self.dir)?.files().map(|(lease, _)| lease).collect())
    }

    /// The addresses that are taken, from one listing of the directory.
    pub fn taken(&self) -> error::Result<HashSet<IpAddr>> {
        Ok(Listing::read(&self.dir)?.into_taken())
    }

    /// The address that was last reserved in a range set. It only says where to go on, so one
    /// that cannot be read is as good as none.
    pub fn last_reserved(&self, range_id: usize) -> Option<IpAddr> {
        match listing::content(AT_FDCWD, &self.last_reserved_path(range_id)) {
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
        let path = self.last_reserved_path(range_id);
        let text = ip.to_string();
        self.change(
            |_| atomic::overwrite(&path, text.as_bytes(), MODE),
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
        store: impl FnOnce(&Writer) -> Result<T>,
        index: impl FnOnce(&mut Index, &T) -> Result<()>,
    ) -> Result<T> {
        let writer = index::writer(&self.dir, self.index.as_ref());
        let current = self.index.take();
        let outcome = store(&writer)?;
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
        matches!(self.read(lease.ip), Found::Lease(found, _) if found == *lease)
    }

    fn read(&self, ip: IpAddr) -> Found {
        listing::read(AT_FDCWD, &self.path(ip), ip)
    }

    /// As [`LeaseStore::remove_all`], for addresses that were in use.
    fn remove_freed(&mut self, leases: Vec<Lease>) -> error::Result<Vec<Lease>> {
        if !self.reuse_delay.is_zero() && !leases.is_empty() {
            let now = Moment::now(self.boot.as_deref());
            let ips = leases.iter().map(|lease| lease.ip);
            // Before they are free: a kill in between keeps back what is not free.
            let kept = quarantine::add(&self.dir, &now, ips).and_then(|()| {
                let writer = index::writer(&self.dir, self.index.as_ref());
                quarantine::tidy(&self.dir, &now, self.reuse_delay, &writer)
            });
            if let Err(e) = kept {
                log::warn(format_args!("freed addresses may be given out at once: {e}"));
            }
        }
        self.remove_all(leases)
    }

    /// Removes leases as far as possible, reports what went wrong afterwards.
    fn remove_all(&mut self, leases: Vec<Lease>) -> error::Result<Vec<Lease>> {
        let mut errors = Vec::new();
        let paths: Vec<PathBuf> = leases.iter().map(|lease| self.path(lease.ip)).collect();
        let remove = |_: &Writer| {
            let mut removed = Vec::new();
            for (lease, path) in leases.into_iter().zip(&paths) {
                match remove_file(path) {
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
        self.index = self.boot.as_deref().and_then(|boot| {
            let notes = Notes::read(&self.dir, boot);
            let join = |(lease, meta): &(Lease, Metadata)| (lease.clone(), notes.of(lease, meta));
            let leases: Vec<_> = leases.iter().map(join).collect();
            let built = Index::build(&self.dir, boot, &leases);
            built.map_err(|e| log::debug(format_args!("no lease index: {e}"))).ok()
        });
        Ok(leases)
    }

    /// Reads all leases, and removes what crashes left: the reference creates a lease empty and
    /// writes it while it holds the lock, which is ours now.
    fn scan(&mut self) -> error::Result<Vec<(Lease, Metadata)>> {
        let mut leases = Vec::new();
        for (ip, found) in Listing::read(&self.dir)?.found() {
            match found {
                Found::Lease(lease, file) => {
                    let meta = file.metadata().during("stat", &self.path(ip))?;
                    leases.push((lease, meta));
                }
                Found::Debris if self.sweep(ip) => {
                    // The index never knew it, so all it needs is its seal back.
                    if let Some(index) = &mut self.index {
                        index.outlive();
                    }
                }
                Found::Debris | Found::Nothing => {}
            }
        }
        Ok(leases)
    }

    fn sweep(&self, ip: IpAddr) -> bool {
        let path = self.path(ip);
        let name = path.display();
        match remove_file(&path) {
            Ok(()) => log::warn(format_args!("freed {ip}: {name} names no container")),
            Err(e) => log::warn(format_args!("cannot free {ip}, which no container holds: {e}")),
        }
        path.symlink_metadata().is_err()
    }

    fn path(&self, ip: IpAddr) -> PathBuf {
        self.dir.join(ip.to_string())
    }

    fn last_reserved_path(&self, range_id: usize) -> PathBuf {
        self.dir.join(format!("last_reserved_ip.{range_id}"))
    }
}

impl Drop for LeaseStore {
    /// The session's last act, still under the lock: an index that is left agrees with the leases.
    fn drop(&mut self) {
        if let Some(Err(e)) = self.index.take().map(Index::seal) {
            log::debug(format_args!("lease index not sealed: {e}"));
        }
    }
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

fn exists(dir: &Path) -> Result<bool> {
    match fs::metadata(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        meta => meta.during("open", dir).map(|_| true),
    }
}
