//! Whether the container of a lease can still be alive, judged by the notes beside the leases.
//!
//! Gone is only what is proved gone: see `docs/decisions/0007-lease-liveness.md`. All else stays.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::{self, Metadata};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::time::{ClockId, clock_gettime};

use super::index;
use super::lease::Lease;
use super::note::{FileId, Note};
use super::table::{Entry, Key};
use crate::log;
use crate::netlink::Netlink;
use crate::netns::Netns;
use crate::netns::census::{self, Census, NetnsId};

/// A file that the kernel makes at the start of a boot and nobody writes to: its time is what the
/// clock on the wall showed then.
const WITNESS: &str = "/dev/null";
/// How far start of the boot and witness may be apart, in seconds, if nobody set the clock.
const STEADY: i64 = 120;
/// How much older than the boot a file must be to be of an earlier one, in seconds.
const MARGIN: i64 = 600;

/// What is known of the container that a lease was made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// Its network namespace is there.
    Alive,
    /// It is gone, and the address can be had.
    Gone(Gone),
    /// Nothing is proved: the address stays taken.
    Unknown,
}

/// Why a container cannot be alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    /// The lease was made before the last boot.
    EarlierBoot,
    /// Its network namespace is no more.
    Namespace,
}

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

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Gone::EarlierBoot => "it was made before the last boot",
            Gone::Namespace => "its network namespace is gone",
        })
    }
}

/// The notes that were kept so far, by lease.
#[derive(Debug, Default)]
pub(super) struct Notes {
    kept: HashMap<(Key, IpAddr), Note>,
    /// Files last written before this are of an earlier boot.
    boot_start: Option<i64>,
}

impl Notes {
    /// All that the last index of `store` knows, whether it is believed or not.
    pub(super) fn read(store: &Path, boot: &str) -> Notes {
        let (entries, this_boot) = index::salvage(store, boot).unwrap_or_default();
        let note = |entry: Entry| {
            let earlier_boot = entry.note.earlier_boot || !this_boot;
            ((entry.key, entry.ip), Note { earlier_boot, ..entry.note })
        };
        Notes { kept: entries.into_iter().map(note).collect(), boot_start: boot_start() }
    }

    /// The note of a lease, whose file this is. One that has none, made by the reference, is
    /// noted now: after the next boot it is known to be of an earlier one.
    pub(super) fn of(&self, lease: &Lease, meta: &Metadata) -> Note {
        let file = FileId::of(meta);
        match self.kept.get(&(index::key(lease), lease.ip)) {
            Some(note) if note.file == file => *note,
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
    let mut lives = vec![None; entries.len()];
    // What was found holding a namespace may have ended before it was looked at.
    for _ in 0..3 {
        let open: Vec<usize> = (0..lives.len()).filter(|i| lives[*i].is_none()).collect();
        let asked: Vec<Entry> = open.iter().map(|i| entries[*i]).collect();
        for (i, life) in open.into_iter().zip(judge_once(&asked)) {
            lives[i] = life;
        }
    }
    lives.into_iter().map(|life| life.unwrap_or(Life::Unknown)).collect()
}

fn judge_once(entries: &[Entry]) -> Vec<Option<Life>> {
    let numbers = entries.iter().filter(|entry| !entry.note.earlier_boot);
    let numbers: HashSet<u32> = numbers.filter_map(|e| Some(e.note.netns?.ino)).collect();
    let census = Census::of(&numbers);
    if let Some(doubt) = census.doubt() {
        log::debug(format_args!("cannot tell which namespaces are gone: {doubt}"));
    }
    let mut judge = Judge { census, inside: HashMap::new() };
    entries.iter().map(|entry| judge.life(entry)).collect()
}

struct Judge {
    census: Census,
    /// The addresses in namespaces that were entered.
    inside: HashMap<u32, Option<HashSet<IpAddr>>>,
}

impl Judge {
    /// `None` if it has to be looked at again.
    fn life(&mut self, entry: &Entry) -> Option<Life> {
        if entry.note.earlier_boot {
            return Some(Life::Gone(Gone::EarlierBoot));
        }
        let Some(noted) = entry.note.netns else { return Some(Life::Unknown) };
        let Some(holder) = self.census.holder(noted.ino).map(Path::to_owned) else {
            let proved = self.census.doubt().is_none();
            return Some(if proved { Life::Gone(Gone::Namespace) } else { Life::Unknown });
        };
        let now = census::now_at(&holder).filter(|now| now.ino == noted.ino)?;
        match noted.born {
            born if born == now.born => Some(Life::Alive),
            // Nothing pinned it: it may be the container's own, or another's.
            0 => Some(Life::Unknown),
            _ => self.life_of_number(&holder, noted, entry.ip),
        }
    }

    /// The number belongs to another namespace, or what pinned the container's own was taken
    /// away. It is gone if this one does not even have the address.
    fn life_of_number(&mut self, holder: &Path, noted: NetnsId, ip: IpAddr) -> Option<Life> {
        let inside = self.inside.entry(noted.ino).or_insert_with(|| addresses(holder, noted.ino));
        let has = inside.as_ref()?.contains(&ip);
        Some(if has { Life::Alive } else { Life::Gone(Gone::Namespace) })
    }
}

/// All addresses in the namespace that `holder` leads to, if it is the one of this number.
fn addresses(holder: &Path, ino: u32) -> Option<HashSet<IpAddr>> {
    let netns = Netns::open(holder).ok()?;
    let netlink = Netlink::open_in(&netns).ok()?;
    let addresses = netlink.dump_all_addrs().ok()?;
    let same = census::now_at(holder).is_some_and(|now| now.ino == ino);
    same.then(|| addresses.into_iter().map(|addr| addr.net.addr()).collect())
}
