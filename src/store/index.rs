//! The index of the leases by owner, so that ADD and DEL need not read every lease.
//!
//! `<store>/.cnibox/index` is a [`Table`] of the current boot. The reference plugins know nothing
//! of it and may add and remove leases whenever they hold the lock. Such a change is seen in the
//! store directory's modification time: a session of ours that changed something ends by setting
//! it, and that of the index, to one time whose nanoseconds are [`SEAL`], a value the kernel's
//! clock practically never yields. Any other change moves one of them away from that. An index
//! that is not so sealed, or of another boot, or damaged, or that contradicts a lease, is thrown
//! away and built anew. See `docs/decisions/0001-lease-index.md`.

use std::fs::{self, DirBuilder};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, futimens, utimensat};
use nix::sys::time::TimeSpec;

use super::atomic::{Durability, Writer};
use super::lease::{Lease, Owner};
use super::note::Note;
use super::table::{self, Entry, Key, Table};
use super::{During, Error, Result, remove_file};

/// Nanoseconds of a sealed file's modification time: whole microseconds, because some file
/// systems keep no more.
const SEAL: i64 = 424_242_000;
/// Where all that is ours lives in a store.
const ROOT: &str = ".cnibox";
const INDEX: &str = "index";
const INDEX_TEMP: &str = "index.new";
/// The temporary name of leases.
const LEASE_TEMP: &str = "tmp";
/// Addresses that were freed a short while ago: see [`super::quarantine`].
const FREED: &str = "freed";
/// The temporary name for stores where there can be no [`ROOT`].
const TEMP: &str = ".cnibox-tmp";

/// An index that agrees with the leases of its store, for as long as the store's lock is held.
#[derive(Debug)]
pub(super) struct Index {
    store: PathBuf,
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
    /// The index as our last session left it; `None` if anything happened since.
    pub(super) fn open(store: &Path, boot: &str) -> Option<Index> {
        let sealed = seal_of(&fs::metadata(store).ok()?)?;
        let (path, temp) = paths(store);
        let (table, meta) = Table::open(&path, &temp, boot).ok()?;
        let current = seal_of(&meta) == Some(sealed);
        let (store, pending) = (store.to_owned(), Pending::Nothing);
        current.then(|| Index { store, table, sealed, pending })
    }

    /// Builds the index of `leases`, which are all that `store` holds.
    pub(super) fn build(store: &Path, boot: &str, leases: &[(Lease, Note)]) -> Result<Index> {
        remove_file(&store.join(TEMP))?;
        let root = create_root(store)?;
        clear(&root)?;
        require_seals(&root)?;
        let entry = |(lease, note): &(Lease, Note)| entry(lease, *note);
        let entries: Vec<_> = leases.iter().map(entry).collect();
        let (path, temp) = paths(store);
        if !path.exists() && table::salvage(&temp, boot).is_some() {
            // What a kill left while it was put in place: not to be lost to a second one.
            fs::rename(&temp, &path).during("replace", &path)?;
        }
        let table = Table::create(&path, &temp, boot, &entries)?;
        Ok(Index { store: store.to_owned(), table, sealed: 0, pending: Pending::Table })
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
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            self.sealed = i64::try_from(now.as_secs()).unwrap_or_default();
            futimens(self.table.file(), &TimeSpec::UTIME_OMIT, &self.time())
                .during("set the time of", &self.store.join(ROOT))?;
        }
        if self.pending == Pending::Nothing {
            return Ok(());
        }
        stamp(&self.store, &self.time())
    }

    fn time(&self) -> TimeSpec {
        TimeSpec::new(self.sealed, SEAL)
    }
}

/// How to write files into `store`: by way of the index's directory, where no listing of the
/// reference plugins has to pass over temporary files, if there is one.
pub(super) fn writer(store: &Path, index: Option<&Index>) -> Writer {
    let temp = match index {
        Some(_) => store.join(ROOT).join(LEASE_TEMP),
        None => store.join(TEMP),
    };
    Writer::new(temp, Durability::Volatile)
}

/// The entries of the last index, believed or not, and whether it is of this boot. Each tells of
/// the file that it was made for, and counts for that one only.
pub(super) fn salvage(store: &Path, boot: &str) -> Option<(Vec<Entry>, bool)> {
    let (path, temp) = paths(store);
    // Killed while it was put in place, an index is whole under its temporary name.
    table::salvage(&path, boot).or_else(|| table::salvage(&temp, boot))
}

/// The list of freed addresses.
pub(super) fn freed_path(store: &Path) -> PathBuf {
    store.join(ROOT).join(FREED)
}

/// Makes the place for all that is ours.
pub(super) fn create_root(store: &Path) -> Result<PathBuf> {
    let root = store.join(ROOT);
    let mut options = DirBuilder::new();
    options.recursive(true).mode(0o700).create(&root).during("create", &root)?;
    Ok(root)
}

/// The index and the temporary name beside it.
fn paths(store: &Path) -> (PathBuf, PathBuf) {
    let root = store.join(ROOT);
    (root.join(INDEX), root.join(INDEX_TEMP))
}

/// Whose a lease is, in the index.
pub(super) fn key(lease: &Lease) -> Key {
    Key::new(&lease.id, lease.ifname.as_deref())
}

fn entry(lease: &Lease, note: Note) -> Entry {
    Entry { key: key(lease), ip: lease.ip, note }
}

/// Removes what has no place in `dir`: directories of earlier versions. The last index stays until
/// there is another, because of its notes.
fn clear(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).during("list", dir)? {
        let entry = entry.during("list", dir)?;
        let path = entry.path();
        let known = [INDEX, INDEX_TEMP, FREED].iter().any(|name| entry.file_name() == *name);
        if known && entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        if path.symlink_metadata().is_ok_and(|meta| meta.is_dir()) {
            fs::remove_dir_all(&path).during("remove", &path)?;
        } else {
            remove_file(&path)?;
        }
    }
    Ok(())
}

/// Refuses file systems that do not keep enough of a time to hold the seal: there, building an
/// index for every command would be all loss.
fn require_seals(dir: &Path) -> Result<()> {
    stamp(dir, &TimeSpec::new(0, SEAL))?;
    match seal_of(&fs::metadata(dir).during("stat", dir)?) {
        Some(_) => Ok(()),
        None => Err(Error::new("set the time of", dir, std::io::ErrorKind::Unsupported)),
    }
}

/// The seconds of a sealed time.
fn seal_of(meta: &fs::Metadata) -> Option<i64> {
    (meta.mtime_nsec() == SEAL).then(|| meta.mtime())
}

fn stamp(dir: &Path, time: &TimeSpec) -> Result<()> {
    let flags = UtimensatFlags::FollowSymlink;
    utimensat(AT_FDCWD, dir, &TimeSpec::UTIME_OMIT, time, flags).during("set the time of", dir)
}
