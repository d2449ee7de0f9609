//! The content of a store's directory, and the parser of lease files.

use std::collections::HashSet;
use std::fmt;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::Path;
use std::time::SystemTime;

use super::journal;
use super::lease::{Lease, LeaseOptions, Reclaimed};
use super::lines::Contents;
use super::quarantine::Quarantine;
use crate::attachment::backup::require_writable;
use crate::attachment::{Boot, Liveness};
use crate::files::dir::Dir;
use crate::files::{During, Result};
use crate::sort::{sort, sort_by_key};
use crate::{error, log};

/// Limit of a lease file's size in bytes.
const MAX_BYTES: usize = 4096;

/// The addresses taken in a network at one moment, read without the lock.
#[derive(Debug, Default)]
pub struct Listing {
    /// Absent if there is no store yet.
    dir: Option<Dir>,
    ips: HashSet<IpAddr>,
    /// Freed a short while ago: not to be allocated yet (`reuseDelay`).
    quarantined: HashSet<IpAddr>,
}

/// A lease and the state of its container.
#[derive(Clone, Debug)]
pub struct LeaseStatus {
    /// The lease, from its file.
    pub lease: Lease,
    /// Whether its container is alive.
    pub liveness: Liveness,
    /// The previous lease of the address, if it was reclaimed.
    pub reclaimed: Option<Reclaimed>,
    /// The time of the lease's creation, by the wall clock.
    pub created: Option<SystemTime>,
}

/// An address whose file is not a lease: an administrator reserved the address, or another program was killed while it
/// wrote a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The address: the file's name.
    pub ip: IpAddr,
    /// The file is empty.
    pub empty: bool,
}

impl Reservation {
    /// Why the file is not a lease.
    pub fn why(&self) -> &'static str {
        if self.empty { "the file is empty" } else { "the file names no container" }
    }
}

impl fmt::Display for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, which was reserved: {}", self.ip, self.why())
    }
}

/// The kind of a file that is named by an address.
pub(super) enum Found {
    Lease(Lease, Box<Metadata>),
    /// A lease of this program that lost its text in a power cut.
    Lost,
    Reserved(Reservation),
    Nothing,
}

impl Listing {
    /// Lists the store of `network` and changes nothing. Fails if ADD could not write to the store; a missing store that
    /// ADD could create is empty.
    pub fn open_writable(
        data_dir: &Path,
        network: &str,
        terms: LeaseOptions,
    ) -> error::Result<Listing> {
        let path = data_dir.join(network);
        require_writable(&path)?;
        let Some(dir) = Dir::of_network(data_dir, network)? else { return Ok(Listing::default()) };
        if dir.has("lock") {
            // Only a regular file can be locked.
            dir.read("lock", 0).during("open lock", &dir.path("lock"))?;
        }
        let quarantine = Quarantine::new(terms.reuse_delay, &Boot::current());
        let withheld = journal::withheld(journal::existing_folder(&dir).as_ref(), &quarantine);
        let quarantined = withheld.into_keys().collect();
        Ok(Listing { ips: addresses(&dir)?, dir: Some(dir), quarantined })
    }

    /// Lists the store of `network`, without write permission; `None` if there is no store. A folder is a store if it
    /// has the file `lock`, which every command that made a lease has created.
    pub fn open_existing(data_dir: &Path, network: &str) -> error::Result<Option<Listing>> {
        let dir = Dir::of_network(data_dir, network)?.filter(|dir| dir.has("lock"));
        let Some(dir) = dir else { return Ok(None) };
        Ok(Some(Listing { ips: addresses(&dir)?, dir: Some(dir), ..Listing::default() }))
    }

    /// The addresses of all files, and the addresses in quarantine.
    pub fn taken(&self) -> HashSet<IpAddr> {
        self.ips.union(&self.quarantined).copied().collect()
    }

    /// The addresses that ADD cannot allocate: leases of containers that are gone do not count.
    pub fn unavailable(&self) -> HashSet<IpAddr> {
        let gone: HashSet<IpAddr> = self.gone().iter().map(|gone| gone.lease.ip).collect();
        self.ips.difference(&gone).chain(&self.quarantined).copied().collect()
    }

    /// All leases with the state of their containers.
    pub fn statuses(&self) -> Vec<LeaseStatus> {
        let Some(dir) = &self.dir else { return Vec::new() };
        let found: Vec<_> = self.ips.iter().filter_map(|ip| read(dir, *ip).lease()).collect();
        let noted = Contents::read(journal::existing_folder(dir).as_ref(), &Boot::current());
        let lives = noted.judge(&network_of(dir), &found);
        let status = |((lease, meta), liveness): ((Lease, Metadata), _)| LeaseStatus {
            reclaimed: noted.removals.get(&lease.ip).and_then(|last| last.reclaimed.clone()),
            lease,
            liveness,
            created: meta.modified().ok(),
        };
        found.into_iter().zip(lives).map(status).collect()
    }

    /// The leases of containers that are gone, by address.
    pub fn gone(&self) -> Vec<Reclaimed> {
        let gone = |status: LeaseStatus| match status.liveness {
            Liveness::Gone(why) => Some(Reclaimed { lease: status.lease, why }),
            Liveness::Alive | Liveness::Unknown(_) => None,
        };
        let mut gone: Vec<_> = self.statuses().into_iter().filter_map(gone).collect();
        sort_by_key(&mut gone, |gone| gone.lease.ip);
        gone
    }

    /// The addresses whose files are not leases, sorted.
    pub fn reservations(&self) -> Vec<Reservation> {
        self.dir.as_ref().map(|dir| reservations(dir, &self.ips)).unwrap_or_default()
    }
}

impl Found {
    pub(super) fn lease(self) -> Option<(Lease, Metadata)> {
        if let Found::Lease(lease, meta) = self { Some((lease, *meta)) } else { None }
    }
}

/// The addresses whose files are not leases, sorted.
pub(super) fn reservations(dir: &Dir, ips: &HashSet<IpAddr>) -> Vec<Reservation> {
    let reserved = |ip: &IpAddr| match read(dir, *ip) {
        Found::Reserved(reservation) => Some(reservation),
        Found::Lease(..) | Found::Lost | Found::Nothing => None,
    };
    let mut reserved: Vec<_> = ips.iter().filter_map(reserved).collect();
    sort_by_key(&mut reserved, |reservation| reservation.ip);
    reserved
}

/// The name of the network whose leases are in `dir`.
pub(super) fn network_of(dir: &Dir) -> String {
    dir.path("").file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The addresses of all files.
pub(super) fn addresses(dir: &Dir) -> Result<HashSet<IpAddr>> {
    Ok(dir.names()?.iter().filter_map(|name| parse_name(name)).collect())
}

/// The owner of the address in the leases of `network`, read without the lock.
pub fn lease_of(data_dir: &Path, network: &str, ip: IpAddr) -> Option<Lease> {
    let dir = Dir::of_network(data_dir, network).ok()??;
    read(&dir, ip).lease().map(|(lease, _)| lease)
}

/// Reads the file of `ip`.
pub(super) fn read(dir: &Dir, ip: IpAddr) -> Found {
    #[cfg(test)]
    super::tests::READS.with(|reads| reads.set(reads.get() + 1));
    let name = ip.to_string();
    let (content, meta) = match dir.read(&name, MAX_BYTES) {
        Ok(read) => read,
        Err(e) if e.kind() == ErrorKind::InvalidInput => {
            return Found::Reserved(Reservation { ip, empty: false });
        }
        Err(e) => {
            let path = dir.path(&name);
            log::debug(format_args!("skip lease {}: {}", path.display(), error::io_text(&e)));
            return Found::Nothing;
        }
    };
    let empty = content.iter().all(|byte| *byte == 0 || byte.is_ascii_whitespace());
    match Lease::parse(ip, &content) {
        Some(lease) => Found::Lease(lease, Box::new(meta)),
        None if empty && journal::is_signed(&meta) => Found::Lost,
        None => Found::Reserved(Reservation { ip, empty }),
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
    sort(&mut names);
    Ok(names)
}

/// The address that a file is named by, in its canonical text: files of other names do not take an address, neither in
/// this program nor in the reference.
fn parse_name(name: &str) -> Option<IpAddr> {
    name.parse().ok().filter(|ip: &IpAddr| ip.to_canonical() == *ip && ip.to_string() == name)
}
