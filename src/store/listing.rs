//! What is in a store's directory, and how a lease's file is read.

use std::collections::HashSet;
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{AccessFlags, access};

use super::lease::Lease;
use super::life::{Notes, Reclaimed, judge};
use super::table::Entry;
use super::{During, Result, Terms, index, quarantine};
use crate::attachment::Life;
use crate::{error, log, sysctl};

/// The addresses taken in a network at one moment, seen without its lock.
#[derive(Debug, Default)]
pub struct Listing {
    /// Names are looked up faster from the directory itself. Absent if there is none.
    dir: Option<File>,
    path: PathBuf,
    ips: HashSet<IpAddr>,
    /// Freed so short a while ago that nobody may have them.
    kept_back: HashSet<IpAddr>,
}

/// A lease, and what is known beside it.
#[derive(Clone, Debug)]
pub struct Known {
    /// What its file tells.
    pub lease: Lease,
    /// Whether its container is alive.
    pub life: Life,
    /// When it was made, if the clock on the wall was right then.
    pub made: Option<SystemTime>,
}

/// How a lease file was found.
pub(super) enum Found {
    Lease(Lease, File),
    Debris,
    Nothing,
}

impl Listing {
    /// Lists the store of `network` and changes nothing. Fails if ADD could not write there; a
    /// store that is missing but could be created is empty.
    pub fn peek(data_dir: &Path, network: &str, terms: Terms) -> error::Result<Listing> {
        let dir = data_dir.join(network);
        let existing = dir.ancestors().find(|dir| dir.symlink_metadata().is_ok()).unwrap_or(&dir);
        let rights = AccessFlags::R_OK | AccessFlags::W_OK | AccessFlags::X_OK;
        access(existing, rights).during("access", existing)?;
        if existing == dir {
            let kept_back =
                quarantine::kept_back(&dir, sysctl::boot_id().ok().as_deref(), terms.reuse_delay);
            return Ok(Listing {
                kept_back: kept_back.into_keys().collect(),
                ..Listing::read(&dir)?
            });
        }
        fs::read_dir(existing).during("list", existing)?;
        Ok(Listing { dir: None, path: dir, ..Listing::default() })
    }

    /// Lists the store of `network` for somebody who only looks; `None` if there is none. A folder
    /// is one if it has the lock, which every command that made a lease has left there.
    pub fn look(data_dir: &Path, network: &str) -> error::Result<Option<Listing>> {
        let dir = data_dir.join(network);
        let lock = dir.join("lock");
        match fs::symlink_metadata(&lock) {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            found => {
                found.during("look for", &lock)?;
                Ok(Some(Listing::read(&dir)?))
            }
        }
    }

    pub(super) fn read(dir: &Path) -> Result<Listing> {
        let mut ips = HashSet::new();
        for entry in fs::read_dir(dir).during("list", dir)? {
            let name = entry.during("list", dir)?.file_name();
            ips.extend(name.to_str().and_then(parse_name));
        }
        let path = dir.to_owned();
        let dir = Some(File::open(dir).during("open", dir)?);
        Ok(Listing { dir, path, ips, kept_back: HashSet::new() })
    }

    /// The addresses that files are named by, and those that are kept back.
    pub fn taken(&self) -> HashSet<IpAddr> {
        self.ips.union(&self.kept_back).copied().collect()
    }

    pub(super) fn into_taken(self) -> HashSet<IpAddr> {
        self.ips
    }

    /// Those that ADD cannot have: files that name no container and leases of containers that are
    /// gone are no obstacle to it.
    pub fn lasting(&self) -> HashSet<IpAddr> {
        let lasting = self.known().into_iter().filter(|k| !matches!(k.life, Life::Gone(_)));
        lasting.map(|known| known.lease.ip).chain(self.kept_back.iter().copied()).collect()
    }

    /// All leases with what is known beside them.
    pub fn known(&self) -> Vec<Known> {
        let notes = sysctl::boot_id().map(|boot| Notes::read(&self.path, &boot)).ok();
        let (mut entries, mut leases) = (Vec::new(), Vec::new());
        for (lease, meta) in self.files() {
            let note = notes.as_ref().map(|notes| notes.of(&lease, &meta));
            entries.extend(note.map(|note| Entry { key: index::key(&lease), ip: lease.ip, note }));
            leases.push((lease, meta.modified().ok()));
        }
        // Without a boot id there are no notes at all.
        let lives = judge(&entries).into_iter().chain(std::iter::repeat(Life::Unknown));
        let known = |((lease, made), life)| Known { lease, life, made };
        leases.into_iter().zip(lives).map(known).collect()
    }

    /// The leases of containers that are gone, by address.
    pub fn gone(&self) -> Vec<Reclaimed> {
        let gone = |known: Known| match known.life {
            Life::Gone(why) => Some(Reclaimed { lease: known.lease, why }),
            Life::Alive | Life::Unknown => None,
        };
        let mut gone: Vec<_> = self.known().into_iter().filter_map(gone).collect();
        gone.sort_by_key(|gone| gone.lease.ip);
        gone
    }

    /// The leases with the state of their files.
    pub(super) fn files(&self) -> impl Iterator<Item = (Lease, Metadata)> {
        self.found().filter_map(|(_, found)| match found {
            Found::Lease(lease, file) => Some((lease, file.metadata().ok()?)),
            Found::Debris | Found::Nothing => None,
        })
    }

    /// Reads the files one by one.
    pub(super) fn found(&self) -> impl Iterator<Item = (IpAddr, Found)> {
        self.dir.iter().flat_map(|dir| {
            self.ips.iter().map(move |ip| (*ip, read(dir, Path::new(&ip.to_string()), *ip)))
        })
    }
}

/// Reads the lease of `ip` at `path` below `dir`.
pub(super) fn read(dir: impl AsFd, path: &Path, ip: IpAddr) -> Found {
    #[cfg(test)]
    super::tests::READS.with(|reads| reads.set(reads.get() + 1));
    match content(dir, path) {
        Ok((content, file)) => match Lease::parse(ip, &content) {
            Some(lease) => Found::Lease(lease, file),
            None => Found::Debris,
        },
        Err(e) => {
            log::debug(format_args!("skip lease {}: {}", path.display(), error::io_text(&e)));
            Found::Nothing
        }
    }
}

/// The content of a file that is a few bytes long, at the cost of one read.
pub(super) fn content(dir: impl AsFd, path: &Path) -> io::Result<(Vec<u8>, File)> {
    let mut file =
        File::from(openat(dir, path, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?);
    let mut buffer = [0; 512];
    loop {
        match file.read(&mut buffer) {
            // The end of a file is where less is read than was asked for.
            Ok(n) if n < buffer.len() => return Ok((buffer[..n].to_vec(), file)),
            Ok(_) => {
                let mut content = buffer.to_vec();
                file.read_to_end(&mut content)?;
                return Ok((content, file));
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// The networks that have a store below `data_dir`, by name.
pub fn networks(data_dir: &Path) -> error::Result<Vec<String>> {
    let entries = match fs::read_dir(data_dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.during("list", data_dir)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.during("list", data_dir)?;
        if entry.path().join("lock").is_file() {
            names.extend(entry.file_name().into_string().ok());
        }
    }
    names.sort();
    Ok(names)
}

/// The address that a file is named by. Only its canonical text: other names are not looked at
/// when an address is reserved, neither by us nor by the reference.
fn parse_name(name: &str) -> Option<IpAddr> {
    name.parse().ok().filter(|ip: &IpAddr| ip.to_canonical() == *ip && ip.to_string() == name)
}
