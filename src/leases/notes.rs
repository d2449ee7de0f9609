//! The journal's data on the containers of leases, from which [`crate::attachment::liveness`] decides whether a container
//! is alive.

use std::collections::HashMap;
use std::fmt;
use std::fs::Metadata;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;

use super::boot;
use super::journal::{Boot, Contents, Entry, FileId, Note};
use super::lease::Lease;
use crate::attachment::{Gone, Liveness, Trace, liveness};
use crate::files::dir::Dir;

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
#[derive(Debug)]
pub(super) struct Notes {
    entries: HashMap<IpAddr, Entry>,
    /// Another machine wrote the journal: its entries do not apply to containers of this machine.
    is_foreign: bool,
    /// The value of [`boot::start`].
    boot_start: Option<i64>,
}

impl Notes {
    /// Reads the journal in `folder`, sealed or not.
    pub(super) fn read(folder: Option<&Dir>, boot: &str) -> Notes {
        let Contents { machine, boot: written_in, mut entries } =
            folder.map(Contents::read).unwrap_or_default();
        let here = boot::machine_id();
        let is_foreign = here.is_some() && machine.is_some() && machine != here;
        for Entry { note, .. } in entries.values_mut() {
            if is_foreign {
                (note.netns, note.boot) = (None, Boot::Unknown);
            } else if note.boot == Boot::This && written_in != boot {
                note.boot = Boot::Earlier;
            }
        }
        Notes { entries, is_foreign, boot_start: boot::start() }
    }

    /// The entry of a lease with the file `meta`. A lease without an entry, made by the reference, gets one
    /// now: after the next boot the lease is known to be of an earlier boot.
    pub(super) fn entry(&self, lease: &Lease, meta: &Metadata) -> Entry {
        let file = FileId::of(meta);
        let noted = self.entries.get(&lease.ip);
        if let Some(entry) = noted.filter(|entry| entry.lease == *lease && entry.note.file == file)
        {
            return entry.clone();
        }
        let boot = match self.boot_start {
            _ if self.is_foreign => Boot::Unknown,
            Some(start) if meta.mtime() < start => Boot::Earlier,
            _ => Boot::This,
        };
        Entry { lease: lease.clone(), note: Note { file, netns: None, boot } }
    }

    /// The entries of the journal, without reading the leases.
    pub(super) fn into_entries(self) -> Vec<Entry> {
        self.entries.into_values().collect()
    }
}

/// The entry's data on the container.
pub(super) fn trace(entry: &Entry) -> Trace {
    let Note { netns, boot, .. } = entry.note;
    Trace { netns, earlier_boot: boot == Boot::Earlier, ips: vec![entry.lease.ip] }
}

/// The liveness of the container of each entry, in order.
pub(super) fn judge(entries: &[Entry]) -> Vec<Liveness> {
    liveness::judge(&entries.iter().map(trace).collect::<Vec<_>>())
}
