//! The content of a store's directory, and the parser of lease files.

use std::collections::HashSet;
use std::fmt;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::Path;
use std::rc::Rc;
use std::time::SystemTime;

use super::journal;
use super::lease::{AddressLease, LeaseOptions, ReclaimedLease};
use super::lines::JournalContents;
use super::quarantine::AddressQuarantine;
use crate::attachment::backup::require_writable;
use crate::attachment::{BootIdentity, Liveness};
use crate::files::dir::OpenDirectory;
use cni::error;
use cni::files::{FileOperationContext, FileResult};
use cni::sort::{sort_by_key, sort_items};

/// Limit of a lease file's size in bytes.
const MAX_BYTES: usize = 4096;

/// The addresses taken in a network at one moment, read without the lock.
#[derive(Debug, Default)]
pub struct LeaseListing {
    /// `None` if there is no store yet.
    dir: Option<OpenDirectory>,
    ips: HashSet<IpAddr>,
    /// Addresses that were freed a short while ago, and must not be allocated yet (`reuseDelay`).
    quarantined: HashSet<IpAddr>,
}

/// A lease and the state of its container.
#[derive(Clone, Debug)]
pub struct LeaseStatus {
    /// The lease, from its file.
    pub lease: AddressLease,
    /// Whether the lease's container is alive.
    pub liveness: Liveness,
    /// The previous lease of the address, if it was reclaimed.
    pub reclaimed: Option<ReclaimedLease>,
    /// The time of the lease's creation, by the wall clock.
    pub created: Option<SystemTime>,
}

/// An address whose file is not a lease: an administrator reserved the address, or another program
/// was killed while it wrote a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressReservation {
    /// The address: the file's name.
    pub ip: IpAddr,
    /// Whether the file is empty.
    pub empty: bool,
}

impl AddressReservation {
    /// Why the file is not a lease.
    pub fn reason_text(&self) -> &'static str {
        if self.empty { "the file is empty" } else { "the file names no container" }
    }
}

impl fmt::Display for AddressReservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, which was reserved: {}", self.ip, self.reason_text())
    }
}

/// The kind of a file that is named by an address.
pub(super) enum AddressFile {
    Lease(AddressLease, Box<Metadata>),
    /// A lease of this program that lost its text.
    Lost(Box<Metadata>),
    Reserved(AddressReservation),
    Nothing,
}

impl LeaseListing {
    /// Lists the store of `network` and changes nothing. Fails if ADD could not write to the store;
    /// a missing store that ADD could create is empty.
    pub fn open_writable(
        data_dir: &Path,
        network: &str,
        options: LeaseOptions,
    ) -> error::Result<LeaseListing> {
        let path = data_dir.join(network);
        require_writable(&path)?;
        let Some(dir) = OpenDirectory::open_network(data_dir, network)? else {
            return Ok(LeaseListing::default());
        };
        if dir.has_entry("lock") {
            // Only a regular file can be locked.
            dir.read_file("lock", 0).during("open lock", &dir.file_path("lock"))?;
        }
        let quarantine = AddressQuarantine::new(options.reuse_delay, &BootIdentity::current());
        let withheld =
            journal::withheld_addresses(journal::existing_directory(&dir).as_ref(), &quarantine);
        let quarantined = withheld.into_keys().collect();
        Ok(LeaseListing { ips: listed_addresses(&dir)?, dir: Some(dir), quarantined })
    }

    /// Lists the store of `network`, without write permission; `None` if there is no store. A
    /// directory is a store if it has the file `lock`, which every command that reserves an
    /// address creates.
    pub fn open_existing(data_dir: &Path, network: &str) -> error::Result<Option<LeaseListing>> {
        let dir =
            OpenDirectory::open_network(data_dir, network)?.filter(|dir| dir.has_entry("lock"));
        let Some(dir) = dir else { return Ok(None) };
        Ok(Some(LeaseListing {
            ips: listed_addresses(&dir)?,
            dir: Some(dir),
            ..LeaseListing::default()
        }))
    }

    /// The addresses that have a file, and the addresses in quarantine.
    pub fn taken_addresses(&self) -> HashSet<IpAddr> {
        self.ips.union(&self.quarantined).copied().collect()
    }

    /// The addresses that ADD cannot allocate: leases of containers that are gone do not count.
    pub fn unavailable_addresses(&self) -> HashSet<IpAddr> {
        let gone: HashSet<IpAddr> = self.ended_leases().iter().map(|gone| gone.lease.ip).collect();
        self.ips.difference(&gone).chain(&self.quarantined).copied().collect()
    }

    /// All leases with the state of their containers.
    pub fn lease_statuses(&self) -> Vec<LeaseStatus> {
        let Some(dir) = &self.dir else { return Vec::new() };
        let current = Rc::new(BootIdentity::current());
        let journal =
            JournalContents::read_journal(journal::existing_directory(dir).as_ref(), &current);
        let found: Vec<_> = self
            .ips
            .iter()
            .filter_map(|ip| read_address_file(dir, *ip).with_lost(*ip, &journal).into_lease())
            .collect();
        let lives = journal.judge_leases(&network_name_of(dir), &found, &current);
        found
            .into_iter()
            .zip(lives)
            .map(|((lease, meta), liveness)| LeaseStatus {
                reclaimed: journal.removals.get(&lease.ip).and_then(|last| last.reclaimed.clone()),
                lease,
                liveness,
                created: meta.modified().ok(),
            })
            .collect()
    }

    /// The leases of containers that are gone, by address.
    pub fn ended_leases(&self) -> Vec<ReclaimedLease> {
        let gone = |status: LeaseStatus| match status.liveness {
            Liveness::Gone(why) => Some(ReclaimedLease { lease: status.lease, why }),
            Liveness::Alive | Liveness::Unknown(_) => None,
        };
        let mut gone: Vec<_> = self.lease_statuses().into_iter().filter_map(gone).collect();
        sort_by_key(&mut gone, |gone| gone.lease.ip);
        gone
    }

    /// The addresses whose files are not leases, sorted.
    pub fn list_reservations(&self) -> Vec<AddressReservation> {
        self.dir
            .as_ref()
            .map(|dir| read_reservations(dir, journal::existing_directory(dir).as_ref(), &self.ips))
            .unwrap_or_default()
    }
}

impl AddressFile {
    pub(super) fn into_lease(self) -> Option<(AddressLease, Metadata)> {
        if let AddressFile::Lease(lease, meta) = self { Some((lease, *meta)) } else { None }
    }

    /// For a lease that lost its text, the lease in the journal; without an entry nobody knows
    /// whose it was, and the file reserves its address.
    pub(super) fn with_lost(self, ip: IpAddr, journal: &JournalContents) -> AddressFile {
        let AddressFile::Lost(meta) = self else { return self };
        match journal.entry_of_file(ip, &meta) {
            Some(entry) => AddressFile::Lease(entry.lease.clone(), meta),
            None => AddressFile::Reserved(AddressReservation { ip, empty: true }),
        }
    }
}

/// The addresses whose files are not leases, sorted.
pub(super) fn read_reservations(
    dir: &OpenDirectory,
    directory: Option<&OpenDirectory>,
    ips: &HashSet<IpAddr>,
) -> Vec<AddressReservation> {
    let journal =
        JournalContents::parse(&directory.map(journal::read_journal_text).unwrap_or_default());
    let reserved = |ip: &IpAddr| match read_address_file(dir, *ip).with_lost(*ip, &journal) {
        AddressFile::Reserved(reservation) => Some(reservation),
        AddressFile::Lease(..) | AddressFile::Lost(_) | AddressFile::Nothing => None,
    };
    let mut reserved: Vec<_> = ips.iter().filter_map(reserved).collect();
    sort_by_key(&mut reserved, |reservation| reservation.ip);
    reserved
}

/// The name of the network whose leases are in `dir`.
pub(super) fn network_name_of(dir: &OpenDirectory) -> String {
    dir.file_path("").file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The addresses that have a file.
pub(super) fn listed_addresses(dir: &OpenDirectory) -> FileResult<HashSet<IpAddr>> {
    Ok(dir.entry_names()?.iter().filter_map(|name| parse_file_name(name)).collect())
}

/// The owner of the address in the leases of `network`, read without the lock.
pub fn find_lease(data_dir: &Path, network: &str, ip: IpAddr) -> Option<AddressLease> {
    let dir = OpenDirectory::open_network(data_dir, network).ok()??;
    let mut file = read_address_file(&dir, ip);
    if matches!(file, AddressFile::Lost(_)) {
        let text = journal::existing_directory(&dir)
            .as_ref()
            .map(journal::read_journal_text)
            .unwrap_or_default();
        file = file.with_lost(ip, &JournalContents::parse(&text));
    }
    file.into_lease().map(|(lease, _)| lease)
}

pub(super) fn read_address_file(dir: &OpenDirectory, ip: IpAddr) -> AddressFile {
    #[cfg(test)]
    super::tests::READS.with(|reads| reads.set(reads.get() + 1));
    let name = ip.to_string();
    let (content, meta) = match dir.read_file(&name, MAX_BYTES) {
        Ok(read) => read,
        Err(e) if e.kind() == ErrorKind::InvalidInput => {
            return AddressFile::Reserved(AddressReservation { ip, empty: false });
        }
        Err(e) => {
            let path = dir.file_path(&name);
            debug!("could not read lease {}: {}", path.display(), error::io_text(&e));
            return AddressFile::Nothing;
        }
    };
    let empty = content.iter().all(|byte| *byte == 0 || byte.is_ascii_whitespace());
    match AddressLease::parse_file(ip, &content) {
        Some(lease) => AddressFile::Lease(lease, Box::new(meta)),
        None if empty && journal::is_marked(&meta) => AddressFile::Lost(Box::new(meta)),
        None => AddressFile::Reserved(AddressReservation { ip, empty }),
    }
}

/// The networks that have a store below `data_dir`, by name.
pub fn list_networks(data_dir: &Path) -> error::Result<Vec<String>> {
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
    sort_items(&mut names);
    Ok(names)
}

/// The address in a file's name, which must be the canonical text of the address: neither this
/// program nor the reference regards an address as taken because of a file with another name.
fn parse_file_name(name: &str) -> Option<IpAddr> {
    name.parse().ok().filter(|ip: &IpAddr| ip.to_canonical() == *ip && ip.to_string() == name)
}
