//! The notes beside the leases, by which [`crate::attachment::life`] judges their containers.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, Metadata};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;

use nix::time::{ClockId, clock_gettime};

use super::dir::Dir;
use super::index;
use super::lease::Lease;
use super::note::{FileId, Note};
use super::origin::Origin;
use super::table::{Entry, Key};
use crate::attachment::{Gone, Life, Trace, life};

/// A file that the kernel makes at the start of a boot and nobody writes to: its time is what the
/// clock on the wall showed then.
const WITNESS: &str = "/dev/null";
/// How far start of the boot and witness may be apart, in seconds, if nobody set the clock.
const STEADY: i64 = 120;
/// How much older than the boot a file must be to be of an earlier one, in seconds.
const MARGIN: i64 = 600;

/// A lease whose container is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reclaimed {
    /// What its file told.
    pub lease: Lease,
    /// What proves it.
    pub why: Gone,
}

impl fmt::Display for Reclaimed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.lease, self.why)
    }
}

/// The notes that were kept so far, by lease.
#[derive(Debug, Default)]
pub(super) struct Notes {
    kept: HashMap<(Key, IpAddr), Note>,
    /// Another machine had the store.
    elsewhere: bool,
    /// Files last written before this are of an earlier boot.
    boot_start: Option<i64>,
}

impl Notes {
    /// All that the last index in `root` knows, whether it is believed or not.
    pub(super) fn read(root: Option<&Dir>, boot: &str) -> Notes {
        let here = Origin::here(boot);
        let (entries, origin) = root.and_then(index::salvage).unwrap_or_else(|| (Vec::new(), here));
        let elsewhere = origin.is_elsewhere(&here);
        let this_boot = origin.is_of_boot(boot);
        let note = |entry: Entry| {
            let note = entry.note;
            let earlier_boot = note.earlier_boot || !this_boot;
            let note = if elsewhere || note.elsewhere {
                note.taken_elsewhere()
            } else {
                Note { earlier_boot, ..note }
            };
            ((entry.key, entry.ip), note)
        };
        let kept = entries.into_iter().map(note).collect();
        Notes { kept, elsewhere, boot_start: boot_start() }
    }

    /// The note of a lease, whose file this is. One that has none, made by the reference, is
    /// noted now: after the next boot it is known to be of an earlier one.
    pub(super) fn of(&self, lease: &Lease, meta: &Metadata) -> Note {
        let file = FileId::of(meta);
        match self.kept.get(&(index::key(lease), lease.ip)) {
            Some(note) if note.file == file => *note,
            _ if self.elsewhere => Note::new(file, None).taken_elsewhere(),
            _ => {
                let earlier_boot = self.boot_start.is_some_and(|start| meta.mtime() < start);
                Note { earlier_boot, ..Note::new(file, None) }
            }
        }
    }

    /// What was noted of leases, without looking at their files.
    pub(super) fn entries(&self) -> Vec<Entry> {
        let entry =
            |((key, ip), note): (&(Key, IpAddr), &Note)| Entry { key: *key, ip: *ip, note: *note };
        self.kept.iter().map(entry).collect()
    }
}

/// The time below which a file is certainly of an earlier boot. `None` where the clock on the wall
/// was set since the boot began: then a file of this boot may look older than the boot.
fn boot_start() -> Option<i64> {
    let now = |clock| clock_gettime(clock).map(|now| now.tv_sec());
    let start = now(ClockId::CLOCK_REALTIME).ok()? - now(ClockId::CLOCK_BOOTTIME).ok()?;
    let witness = fs::metadata(WITNESS).ok()?.mtime();
    ((start - witness).abs() <= STEADY).then(|| start.min(witness) - MARGIN)
}

/// The life behind each of these notes.
pub(super) fn judge(entries: &[Entry]) -> Vec<Life> {
    let trace = |entry: &Entry| Trace {
        netns: entry.note.netns,
        earlier_boot: entry.note.earlier_boot,
        ips: vec![entry.ip],
    };
    life::judge(&entries.iter().map(trace).collect::<Vec<_>>())
}
