//! The leases of one network, a directory in the format of the reference's host-local plugin.
//!
//! Each lease is a file named by its address; `last_reserved_ip.<range id>` remembers where to go
//! on; `lock` is what both implementations lock. Beside them lies our [`super::index`].

use std::collections::HashSet;
use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use super::index::{self, Index};
use super::lease::{Lease, Owner};
use super::lock::Lock;
use super::{During, Result, remove_file};
use crate::error;
use crate::{log, sysctl};

/// The mode of everything we write into a store.
const MODE: u32 = 0o600;

/// A network's leases, locked from opening to drop.
#[derive(Debug)]
pub struct LeaseStore {
    dir: PathBuf,
    /// Absent where there is no telling one boot from the next.
    boot: Option<String>,
    /// Absent if it cannot be had; then every lookup reads all leases.
    index: Option<Index>,
    _lock: Lock,
}

/// What one owner holds.
struct Held {
    current: Vec<Lease>,
    /// In the old form, which does not tell the interfaces of a container apart.
    old: Vec<Lease>,
}

/// How a lease file was found.
enum Found {
    Lease(Lease),
    Debris,
    Nothing,
}

impl LeaseStore {
    /// Opens the store of `network`, creating what is missing.
    pub fn open(data_dir: &Path, network: &str) -> error::Result<LeaseStore> {
        let dir = data_dir.join(network);
        DirBuilder::new().recursive(true).mode(0o755).create(&dir).during("create", &dir)?;
        LeaseStore::open_dir(dir, sysctl::boot_id().ok())
    }

    /// Opens the store of `network` unless there is none.
    pub fn open_existing(data_dir: &Path, network: &str) -> error::Result<Option<LeaseStore>> {
        let dir = data_dir.join(network);
        match fs::metadata(&dir) {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            meta => {
                meta.during("open", &dir)?;
                LeaseStore::open_dir(dir, sysctl::boot_id().ok()).map(Some)
            }
        }
    }

    pub(super) fn open_dir(dir: PathBuf, boot: Option<String>) -> error::Result<LeaseStore> {
        let lock = Lock::exclusive(&dir.join("lock"))?;
        let index = boot.as_deref().and_then(|boot| Index::open(&dir, boot));
        let mut store = LeaseStore { dir, boot, index, _lock: lock };
        if store.index.is_none() {
            store.rebuild()?;
        }
        Ok(store)
    }

    /// Reserves `ip`; false if it is taken.
    pub fn reserve(&mut self, ip: IpAddr, owner: &Owner) -> error::Result<bool> {
        let (path, lease) = (self.path(ip), owner.lease(ip));
        // One cheap call for the many that are taken before the three that make a file.
        if path.symlink_metadata().is_ok() || !self.create(&path, &lease)? {
            return Ok(false);
        }
        self.update_index(|index| index.add(&lease));
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
        let released = self.remove_all(leases)?;
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

    /// Removes every lease that `keep` refuses, and returns those.
    pub fn retain(&mut self, keep: impl Fn(&Lease) -> bool) -> error::Result<Vec<Lease>> {
        let refused = self.scan()?.into_iter().filter(|lease| !keep(lease)).collect();
        self.remove_all(refused)
    }

    /// All leases, read one by one.
    pub fn leases(&self) -> error::Result<Vec<Lease>> {
        Ok(Listing::read(&self.dir)?.leases())
    }

    /// The addresses that are taken, from one listing of the directory.
    pub fn taken(&self) -> error::Result<HashSet<IpAddr>> {
        Ok(Listing::read(&self.dir)?.ips)
    }

    /// The address that was last reserved in a range set. It only says where to go on, so one
    /// that cannot be read is as good as none.
    pub fn last_reserved(&self, range_id: usize) -> Option<IpAddr> {
        match fs::read_to_string(self.last_reserved_path(range_id)) {
            Ok(text) => text.trim().parse().ok(),
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
    pub fn set_last_reserved(&mut self, range_id: usize, ip: IpAddr) -> error::Result<()> {
        let path = self.last_reserved_path(range_id);
        let writer = index::writer(&self.dir, self.index.as_ref());
        writer.replace(&path, ip.to_string().as_bytes(), MODE)?;
        self.update_index(|_| Ok(()));
        Ok(())
    }

    /// First step of a reservation: from here to the index's seal the store is unsealed.
    pub(super) fn create(&self, path: &Path, lease: &Lease) -> Result<bool> {
        let writer = index::writer(&self.dir, self.index.as_ref());
        writer.create_exclusive(path, lease.text().as_bytes(), MODE)
    }

    /// Carries a change of the leases over to the index. No index is worth failing for: it is
    /// given up, and as the change took the seal away, the next command builds another.
    fn update_index(&mut self, change: impl FnOnce(&Index) -> Result<()>) {
        let Some(index) = &self.index else { return };
        if let Err(e) = change(index).and_then(|()| index.seal()) {
            log::debug(format_args!("lease index given up: {e}"));
            self.index = None;
        }
    }

    fn held(&mut self, owner: &Owner) -> error::Result<Held> {
        if let Some(held) = self.held_by_index(owner) {
            return Ok(held);
        }
        let (mut current, mut old) = (Vec::new(), Vec::new());
        for lease in self.rebuild()?.into_iter().filter(|lease| lease.id == owner.id()) {
            match lease.ifname.as_deref() {
                Some(ifname) if ifname == owner.ifname() => current.push(lease),
                Some(_) => {}
                None => old.push(lease),
            }
        }
        Ok(Held { current, old })
    }

    /// What the index knows of `owner`; `None` if it cannot be relied on.
    fn held_by_index(&self, owner: &Owner) -> Option<Held> {
        let index = self.index.as_ref()?;
        let current = self.find(index, owner.id(), Some(owner.ifname()))?;
        Some(Held { current, old: self.find(index, owner.id(), None)? })
    }

    /// The leases in one form, if they bear the index out: somebody may have overwritten one in
    /// place, which no directory's time shows.
    fn find(&self, index: &Index, id: &str, ifname: Option<&str>) -> Option<Vec<Lease>> {
        let lease = |ip| Lease { ip, id: id.to_owned(), ifname: ifname.map(str::to_owned) };
        let leases: Vec<Lease> = index.lookup(id, ifname).ok()?.into_iter().map(lease).collect();
        leases.iter().all(|lease| self.holds(lease)).then_some(leases)
    }

    fn holds(&self, lease: &Lease) -> bool {
        matches!(read(&self.dir, lease.ip), Found::Lease(found) if found == *lease)
    }

    /// Removes leases as far as possible, reports what went wrong afterwards.
    fn remove_all(&mut self, leases: Vec<Lease>) -> error::Result<Vec<Lease>> {
        let mut errors = Vec::new();
        let mut removed = Vec::new();
        for lease in leases {
            match remove_file(&self.path(lease.ip)) {
                Ok(()) => removed.push(lease),
                Err(e) => errors.push(e.into()),
            }
        }
        self.update_index(|index| removed.iter().try_for_each(|lease| index.remove(lease)));
        error::Error::join(errors).map_or(Ok(removed), Err)
    }

    /// Reads all leases and makes an index of them if possible.
    fn rebuild(&mut self) -> error::Result<Vec<Lease>> {
        let leases = self.scan()?;
        self.index = self.boot.as_deref().and_then(|boot| {
            let built = Index::build(&self.dir, boot, &leases);
            built.map_err(|e| log::debug(format_args!("no lease index: {e}"))).ok()
        });
        Ok(leases)
    }

    /// Reads all leases, and removes what crashes left: the reference creates a lease empty and
    /// writes it while it holds the lock, which is ours now.
    fn scan(&mut self) -> error::Result<Vec<Lease>> {
        let mut leases = Vec::new();
        let mut swept = false;
        for ip in Listing::read(&self.dir)?.ips {
            match read(&self.dir, ip) {
                Found::Lease(lease) => leases.push(lease),
                Found::Debris => swept |= self.sweep(ip),
                Found::Nothing => {}
            }
        }
        if swept {
            // The index never knew them, so all it needs is its seal back.
            self.update_index(|_| Ok(()));
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

/// The addresses taken in a network at one moment, seen without its lock.
#[derive(Debug)]
pub struct Listing {
    dir: PathBuf,
    ips: HashSet<IpAddr>,
}

impl Listing {
    /// Lists the store of `network` and changes nothing. Fails if ADD could not write there; a
    /// store that is missing but could be created is empty.
    pub fn peek(data_dir: &Path, network: &str) -> error::Result<Listing> {
        let dir = data_dir.join(network);
        let existing = dir.ancestors().find(|dir| dir.symlink_metadata().is_ok()).unwrap_or(&dir);
        let rights = AccessFlags::R_OK | AccessFlags::W_OK | AccessFlags::X_OK;
        access(existing, rights).during("access", existing)?;
        if existing == dir {
            return Ok(Listing::read(&dir)?);
        }
        fs::read_dir(existing).during("list", existing)?;
        Ok(Listing { dir, ips: HashSet::new() })
    }

    /// The addresses that files are named by.
    pub fn taken(&self) -> &HashSet<IpAddr> {
        &self.ips
    }

    /// Those whose files name a container: a crash may have left others, which ADD reclaims.
    pub fn leased(&self) -> HashSet<IpAddr> {
        self.leases().into_iter().map(|lease| lease.ip).collect()
    }

    fn leases(&self) -> Vec<Lease> {
        let found = self.ips.iter().map(|ip| read(&self.dir, *ip));
        found.filter_map(|f| if let Found::Lease(lease) = f { Some(lease) } else { None }).collect()
    }

    fn read(dir: &Path) -> Result<Listing> {
        let mut ips = HashSet::new();
        for entry in fs::read_dir(dir).during("list", dir)? {
            let name = entry.during("list", dir)?.file_name();
            ips.extend(name.to_str().and_then(parse_name));
        }
        Ok(Listing { dir: dir.to_owned(), ips })
    }
}

/// The address that a file is named by. Only its canonical text: other names are not looked at
/// when an address is reserved, neither by us nor by the reference.
fn parse_name(name: &str) -> Option<IpAddr> {
    name.parse().ok().filter(|ip: &IpAddr| ip.to_string() == name)
}

fn read(dir: &Path, ip: IpAddr) -> Found {
    #[cfg(test)]
    super::tests::READS.with(|reads| reads.set(reads.get() + 1));
    let path = dir.join(ip.to_string());
    match fs::read(&path) {
        Ok(content) => Lease::parse(ip, &content).map_or(Found::Debris, Found::Lease),
        Err(e) => {
            log::debug(format_args!("skip lease {}: {}", path.display(), error::io_text(&e)));
            Found::Nothing
        }
    }
}
