//! The index of the leases by owner, so that ADD and DEL need not read every lease.
//!
//! `<store>/.cnibox/<boot id>/` holds one small file per owner that lists its addresses. The
//! reference plugins know nothing of it and may add and remove leases whenever they hold the lock.
//! Such a change is seen in the store directory's modification time: ours end by setting its
//! nanoseconds to [`SEAL`], a value the kernel's clock practically never yields, and any other
//! change moves it away from that. An unsealed index, one of another boot, or one that contradicts
//! a lease is thrown away and built anew. See `docs/decisions/0001-lease-index.md`.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{ErrorKind, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;
use sha2::{Digest, Sha512};

use super::atomic::{Durability, Writer};
use super::lease::Lease;
use super::{During, Error, Result, remove_file};

/// Nanoseconds of a sealed directory's modification time: whole microseconds, because some file
/// systems keep no more.
const SEAL: i64 = 424_242_000;
/// Nanoseconds of a directory that must not be believed.
const UNSEALED: i64 = 0;
/// Where all that is ours lives in a store.
const ROOT: &str = ".cnibox";
/// The temporary name for stores where there can be no [`ROOT`].
const TEMP: &str = ".cnibox-tmp";

/// An index that agrees with the leases of its store, for as long as the store's lock is held.
#[derive(Debug)]
pub(super) struct Index {
    store: PathBuf,
    dir: PathBuf,
}

impl Index {
    /// The index as the last command left it; `None` if anything happened since.
    pub(super) fn open(store: &Path, boot: &str) -> Option<Index> {
        let dir = store.join(ROOT).join(boot);
        let current = is_sealed(store) && is_sealed(&dir);
        current.then(|| Index { store: store.to_owned(), dir })
    }

    /// Builds the index of `leases`, which are all that `store` holds.
    pub(super) fn build(store: &Path, boot: &str, leases: &[Lease]) -> Result<Index> {
        // Killed from here on, the next command must not find a seal: it may be there still, if
        // only the boot changed or somebody deleted the index.
        stamp(store, UNSEALED)?;
        remove_file(&store.join(TEMP))?;
        let index = Index { store: store.to_owned(), dir: store.join(ROOT).join(boot) };
        if let Err(e) = index.fill(leases) {
            // Nobody would read the part that fitted on a full disk.
            let root = store.join(ROOT);
            fs::remove_dir_all(&root).during("remove", &root)?;
            return Err(e);
        }
        Ok(index)
    }

    /// Writes only what differs from an earlier index of this boot: creating files is what takes
    /// the time, and a single change by the reference leads here.
    fn fill(&self, leases: &[Lease]) -> Result<()> {
        let mut options = DirBuilder::new();
        options.recursive(true).mode(0o700).create(&self.dir).during("create", &self.dir)?;
        sweep(&self.store.join(ROOT), |path| path == self.dir)?;
        self.try_seal()?;
        let mut entries: HashMap<PathBuf, String> = HashMap::new();
        for lease in leases {
            let entry = self.entry(&lease.id, lease.ifname.as_deref());
            entries.entry(entry).or_default().push_str(&line(lease.ip));
        }
        sweep(&self.dir, |path| entries.contains_key(path))?;
        for (path, text) in entries {
            if fs::read(&path).ok().as_deref() != Some(text.as_bytes()) {
                fs::write(&path, text).during("write", &path)?;
            }
        }
        self.seal()
    }

    /// The addresses of an interface, or in the old form of a container. An error means that the
    /// index is damaged.
    pub(super) fn lookup(&self, id: &str, ifname: Option<&str>) -> Result<Vec<IpAddr>> {
        let path = self.entry(id, ifname);
        let text = match fs::read_to_string(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            text => text.during("read", &path)?,
        };
        // Other keys are left to later versions.
        let ips: Option<Vec<IpAddr>> =
            text.lines().filter_map(|l| l.strip_prefix("ip=")).map(|ip| ip.parse().ok()).collect();
        ips.filter(|ips| !ips.is_empty())
            .ok_or_else(|| Error::new("parse", &path, ErrorKind::InvalidData))
    }

    /// Notes a lease that has been created.
    pub(super) fn add(&self, lease: &Lease) -> Result<()> {
        let path = self.entry(&lease.id, lease.ifname.as_deref());
        let mut options = OpenOptions::new();
        let mut file =
            options.append(true).create(true).mode(0o600).open(&path).during("open", &path)?;
        file.write_all(line(lease.ip).as_bytes()).during("write", &path)
    }

    /// Notes that a lease has been removed.
    pub(super) fn remove(&self, lease: &Lease) -> Result<()> {
        let ifname = lease.ifname.as_deref();
        let path = self.entry(&lease.id, ifname);
        let mut ips = self.lookup(&lease.id, ifname)?;
        ips.retain(|ip| *ip != lease.ip);
        if ips.is_empty() {
            return remove_file(&path);
        }
        // In place and not synced: until the seal is set nobody believes it.
        let text: String = ips.into_iter().map(line).collect();
        fs::write(&path, text).during("write", &path)
    }

    /// Vouches for the index. To be called last, when leases and index agree.
    pub(super) fn seal(&self) -> Result<()> {
        stamp(&self.dir, SEAL)?;
        stamp(&self.store, SEAL)
    }

    /// Refuses file systems that do not keep enough of a time to hold the seal: there, building
    /// an index for every command would be all loss.
    fn try_seal(&self) -> Result<()> {
        stamp(&self.dir, SEAL)?;
        if is_sealed(&self.dir) {
            return Ok(());
        }
        Err(Error::new("set the time of", &self.dir, ErrorKind::Unsupported))
    }

    /// The file of an owner. A container id has no NUL, so the two forms cannot be confused.
    fn entry(&self, id: &str, ifname: Option<&str>) -> PathBuf {
        let owner = match ifname {
            Some(ifname) => format!("{id}\0{ifname}"),
            None => id.to_owned(),
        };
        let mut head = [0; 16];
        head.copy_from_slice(&Sha512::digest(owner.as_bytes())[..16]);
        self.dir.join(format!("{:032x}", u128::from_be_bytes(head)))
    }
}

/// How to write files into `store`: by way of the index's directory, where no listing of the
/// reference plugins has to pass over temporary files, if there is one.
pub(super) fn writer(store: &Path, index: Option<&Index>) -> Writer {
    let temp = match index {
        Some(_) => store.join(ROOT).join("tmp"),
        None => store.join(TEMP),
    };
    Writer::new(temp, Durability::Volatile)
}

fn line(ip: IpAddr) -> String {
    format!("ip={ip}\n")
}

/// Removes everything in `dir` that is not to be kept.
fn sweep(dir: &Path, keep: impl Fn(&Path) -> bool) -> Result<()> {
    for entry in fs::read_dir(dir).during("list", dir)? {
        let path = entry.during("list", dir)?.path();
        if keep(&path) {
            continue;
        }
        if path.is_dir() {
            fs::remove_dir_all(&path).during("remove", &path)?;
        } else {
            remove_file(&path)?;
        }
    }
    Ok(())
}

fn is_sealed(dir: &Path) -> bool {
    fs::metadata(dir).is_ok_and(|meta| meta.is_dir() && meta.mtime_nsec() == SEAL)
}

/// Sets the nanoseconds of `dir`'s modification time, leaving the seconds.
fn stamp(dir: &Path, nanos: i64) -> Result<()> {
    let seconds = fs::metadata(dir).during("stat", dir)?.mtime();
    let mtime = TimeSpec::new(seconds, nanos);
    let flags = UtimensatFlags::FollowSymlink;
    utimensat(AT_FDCWD, dir, &TimeSpec::UTIME_OMIT, &mtime, flags).during("set the time of", dir)
}
