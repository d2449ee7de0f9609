//! The index of the leases by owner, so that ADD and DEL need not read every lease.
//!
//! `<store>/.cnibox/index` is a [`Table`] of the current boot. The reference plugins know nothing
//! of it and may add and remove leases whenever they hold the lock. Such a change is seen in the
//! store directory's modification time: a session of ours that changed something ends by setting
//! it, and that of the index, to one time whose nanoseconds are [`SEAL`], a value the kernel's
//! clock practically never yields. Any other change moves one of them away from that. An index
//! that is not so sealed, or of another boot, or damaged, or that contradicts a lease, is thrown
//! away and built anew. See `docs/decisions/0001-lease-index.md`.

use std::fs::{File, Metadata};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sys::stat::futimens;
use nix::sys::time::TimeSpec;

use super::dir::Dir;
use super::lease::{Lease, Owner};
use super::note::Note;
use super::origin::Origin;
use super::table::{self, Entry, Key, Table};
use super::{During, Error, Result};
use crate::log;

/// Nanoseconds of a sealed file's modification time: whole microseconds, because some file
/// systems keep no more.
const SEAL: i64 = 424_242_000;
/// Where all that is ours lives in a store.
const ROOT: &str = ".cnibox";
/// The temporary name of leases.
const LEASE_TEMP: &str = "tmp";
/// The temporary name for stores where there can be no [`ROOT`].
const TEMP: &str = ".cnibox-tmp";

/// An index that agrees with the leases of its store, for as long as the store's lock is held.
#[derive(Debug)]
pub(super) struct Index {
    store: Rc<Dir>,
    table: Table,
    /// The seconds of the seal.
    sealed: i64,
    pending: Pending,
}

/// What a session leaves to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    Nothing,
    /// To seal the store, whose directory has changed.
    Store,
    /// To finish and seal the table, and then the store.
    Table,
}

impl Index {
    /// The index as our last session left it in `root`; `None` if anything happened since.
    pub(super) fn open(store: &Rc<Dir>, root: &Rc<Dir>, boot: &str) -> Option<Index> {
        let sealed = seal_of(&store.metadata().ok()?)?;
        let (table, meta) = Table::open(root, boot).ok()?;
        let current = seal_of(&meta) == Some(sealed);
        let (store, pending) = (Rc::clone(store), Pending::Nothing);
        current.then(|| Index { store, table, sealed, pending })
    }

    /// Builds the index of `leases`, which are all that `store` holds.
    pub(super) fn build(
        store: &Rc<Dir>,
        root: &Rc<Dir>,
        boot: &str,
        leases: &[(Lease, Note)],
    ) -> Result<Index> {
        store.remove(TEMP)?;
        root.remove(LEASE_TEMP)?;
        require_seals(root)?;
        let entry = |(lease, note): &(Lease, Note)| entry(lease, *note);
        let entries: Vec<_> = leases.iter().map(entry).collect();
        if !root.has(table::NAME) && table::salvage(root, table::TEMP).is_some() {
            // What a kill left while it was put in place: not to be lost to a second one.
            root.rename(table::TEMP, table::NAME)?;
        }
        let table = Table::create(Rc::clone(root), Origin::here(boot), &entries)?;
        Ok(Index { store: Rc::clone(store), table, sealed: 0, pending: Pending::Table })
    }

    /// How many leases there are.
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// The addresses that `owner` holds, and those its container holds in the old form. An error
    /// means that the index is damaged.
    pub(super) fn lookup(&mut self, owner: &Owner) -> Result<(Vec<IpAddr>, Vec<IpAddr>)> {
        self.table.lookup(owner.id(), owner.ifname())
    }

    /// Notes a lease that is about to be created.
    pub(super) fn add(&mut self, lease: &Lease, note: Note) -> Result<()> {
        self.pending = Pending::Table;
        self.table.insert(entry(lease, note))
    }

    /// Notes that a lease has been removed.
    pub(super) fn remove(&mut self, lease: &Lease) -> Result<()> {
        self.pending = Pending::Table;
        self.table.remove(key(lease), lease.ip)
    }

    /// Notes a change of the store that is not one of its leases.
    pub(super) fn outlive(&mut self) {
        if self.pending == Pending::Nothing {
            self.pending = Pending::Store;
        }
    }

    /// Vouches for the index, last of all, if there was any change. An index that is dropped
    /// without this is not believed any more.
    pub(super) fn seal(mut self) -> Result<()> {
        if self.pending == Pending::Table {
            self.table.finish()?;
            self.sealed = now();
            stamp(self.table.file(), &self.time())?;
        }
        if self.pending == Pending::Nothing {
            return Ok(());
        }
        stamp(&*self.store, &self.time())
    }

    fn time(&self) -> TimeSpec {
        TimeSpec::new(self.sealed, SEAL)
    }
}

/// The folder for all that is ours in `store`, made if it is missing. Without one everything works,
/// but reads all leases.
pub(super) fn root(store: &Dir) -> Option<Rc<Dir>> {
    let made = match store.private(ROOT) {
        Ok(None) => {
            store
                .make_private(ROOT)
                .map_err(|e| log::debug(format_args!("no lease index: {e}")))
                .ok()?;
            store.private(ROOT)
        }
        found => found,
    };
    warned(made).map(Rc::new)
}

/// The same folder for who changes nothing.
pub(super) fn existing_root(store: &Dir) -> Option<Dir> {
    warned(store.private(ROOT))
}

fn warned(found: Result<Option<Dir>>) -> Option<Dir> {
    found.unwrap_or_else(|e| {
        log::warn(format_args!("no lease index: {e}"));
        None
    })
}

/// Where files of `store` are written until they are whole: in the folder that is ours, where no
/// listing of the reference plugins has to pass over them, if there is one.
pub(super) fn temp<'f>(store: &'f Dir, root: Option<&'f Dir>) -> (&'f Dir, &'static str) {
    root.map_or((store, TEMP), |root| (root, LEASE_TEMP))
}

/// The entries of the last index, believed or not, and where it was made. Each tells of the file
/// that it was made for, and counts for that one only.
pub(super) fn salvage(root: &Dir) -> Option<(Vec<Entry>, Origin)> {
    // Killed while it was put in place, an index is whole under its temporary name.
    [table::NAME, table::TEMP].into_iter().find_map(|name| table::salvage(root, name))
}

/// Marks a lease of ours before it can be seen. A power cut may lose what is in a file, but not the
/// time of one that has got its name: those that it emptied are told from those of others.
pub(super) fn sign(lease: &File) -> Result<()> {
    stamp(lease, &TimeSpec::new(now(), SEAL))
}

/// Whether a lease is marked so.
pub(super) fn is_signed(meta: &Metadata) -> bool {
    seal_of(meta).is_some()
}

/// Whose a lease is, in the index.
pub(super) fn key(lease: &Lease) -> Key {
    Key::new(&lease.id, lease.ifname.as_deref())
}

fn entry(lease: &Lease, note: Note) -> Entry {
    Entry { key: key(lease), ip: lease.ip, note }
}

/// Refuses file systems that do not keep enough of a time to hold the seal: there, building an
/// index for every command would be all loss.
fn require_seals(root: &Dir) -> Result<()> {
    stamp(root, &TimeSpec::new(0, SEAL))?;
    match seal_of(&root.metadata()?) {
        Some(_) => Ok(()),
        None => Err(Error::new("seal", &root.path(""), std::io::ErrorKind::Unsupported)),
    }
}

/// The seconds of a sealed time.
fn seal_of(meta: &Metadata) -> Option<i64> {
    (meta.mtime_nsec() == SEAL).then(|| meta.mtime())
}

fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or_default()
}

fn stamp(file: impl AsFd, time: &TimeSpec) -> Result<()> {
    futimens(file, &TimeSpec::UTIME_OMIT, time).during("set the time of", Path::new(ROOT))
}
