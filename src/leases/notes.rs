//! The journal's data on the containers of leases, from which [`crate::attachment::liveness`] decides whether a container
//! is alive.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, Metadata};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;

use nix::time::{ClockId, clock_gettime};

use super::journal::{self, Boot, Entry, FileId, UNKNOWN, machine_id};
use super::lease::Lease;
use crate::attachment::{Gone, Liveness, Trace, liveness};
use crate::files::dir::Dir;

/// A file that the kernel creates at boot and no program writes to: its modification time is the wall clock's time at
/// boot.
const WITNESS: &str = "/dev/null";
/// Largest difference in seconds between boot time and witness if the clock was not set.
const STEADY: i64 = 120;
/// Seconds by which a file must be older than the boot to belong to an earlier boot.
const MARGIN: i64 = 600;

/// A lease of a container that is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reclaimed {
    /// The lease that was removed.
    pub lease: Lease,
    /// The proof that the container is gone.
    pub why: Gone,
}

impl fmt::Display for Reclaimed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.lease, self.why)
    }
}

/// The notes of a network's leases.
pub(super) struct Notes {
    entries: HashMap<IpAddr, Entry>,
    /// Another machine wrote the journal: its entries do not apply to containers of this machine.
    is_foreign: bool,
    boot_start: Option<i64>,
}

impl Notes {
    /// Reads the journal in `folder`, sealed or not.
    pub(super) fn read(folder: Option<&Dir>, boot: &str) -> Notes {
        let text = folder.map(journal::read).unwrap_or_default();
        let (machine, written_in) = journal::parse_header(&text).unwrap_or((UNKNOWN, boot));
        let is_foreign = machine != UNKNOWN && machine_id().is_some_and(|here| here != machine);
        let mut entries = journal::entries(&text);
        for entry in entries.values_mut() {
            if is_foreign {
                (entry.netns, entry.boot) = (None, Boot::Unknown);
            } else if entry.boot == Boot::This && written_in != boot {
                entry.boot = Boot::Earlier;
            }
        }
        Notes { entries, is_foreign, boot_start: boot_start() }
    }

    /// The entry of a lease with the file `meta`. A lease without an entry, made by the reference, gets one
    /// now: after the next boot the lease is known to be of an earlier boot.
    pub(super) fn entry(&self, lease: &Lease, meta: &Metadata) -> Entry {
        let file = FileId::of(meta);
        let noted = self.entries.get(&lease.ip);
        if let Some(entry) = noted.filter(|entry| entry.lease == *lease && entry.file == file) {
            return entry.clone();
        }
        let boot = match self.boot_start {
            _ if self.is_foreign => Boot::Unknown,
            Some(start) if meta.mtime() < start => Boot::Earlier,
            _ => Boot::This,
        };
        Entry { lease: lease.clone(), file, netns: None, boot }
    }

    /// The entries of the journal, without reading the leases.
    pub(super) fn into_entries(self) -> Vec<Entry> {
        self.entries.into_values().collect()
    }
}

/// Files with an older modification time, in seconds since 1970, are certainly of an earlier boot. `None` if the wall
/// clock was set since boot: then a file of this boot may look older than the boot.
fn boot_start() -> Option<i64> {
    let now = |clock| clock_gettime(clock).map(|now| now.tv_sec());
    let start = now(ClockId::CLOCK_REALTIME).ok()? - now(ClockId::CLOCK_BOOTTIME).ok()?;
    let witness = fs::metadata(WITNESS).ok()?.mtime();
    ((start - witness).abs() <= STEADY).then(|| start.min(witness) - MARGIN)
}

/// The entry's data on the container.
pub(super) fn trace(entry: &Entry) -> Trace {
    let earlier_boot = entry.boot == Boot::Earlier;
    Trace { netns: entry.netns, earlier_boot, ips: vec![entry.lease.ip] }
}

/// The liveness of the container of each entry, in order.
pub(super) fn judge(entries: &[Entry]) -> Vec<Liveness> {
    liveness::judge(&entries.iter().map(trace).collect::<Vec<_>>())
}
