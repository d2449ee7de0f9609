//! The lines of a network's journal, as text and as data.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::Metadata;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use super::lease::{AddressLease, ReclaimedLease};
use super::quarantine::{AddressQuarantine, RemovalTime};
use crate::attachment::{BootIdentity, BootRelation, EndProof, HostPairEnd};

/// The end of every line.
pub(super) const END: &str = " .";
/// The word for an unknown value.
const UNKNOWN: &str = "-";

/// A line that adds a lease, with the data that later proves whether its attachment has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JournalEntry {
    pub(super) lease: AddressLease,
    /// The lease's file: the entry is not valid for a file that was replaced or written to.
    pub(super) file: LeaseFileId,
    /// The host's end of the attachment's veth pair.
    pub(super) end: Option<HostPairEnd>,
    /// When the lease was created, relative to the boot in the journal's first line.
    pub(super) made: BootRelation,
}

/// A line that removes a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JournalRemoval {
    pub(super) ip: IpAddr,
    /// The time of the removal, if the address is in quarantine.
    pub(super) freed: Option<RemovalTime>,
    /// The lease, with the proof that its attachment had ended, if the lease was reclaimed.
    pub(super) reclaimed: Option<ReclaimedLease>,
}

/// The content of a journal, by address.
#[derive(Debug, Default)]
pub(super) struct JournalContents {
    pub(super) entries: HashMap<IpAddr, JournalEntry>,
    /// The last removal of a lease of each address.
    pub(super) removals: HashMap<IpAddr, JournalRemoval>,
    /// The boot of leases without an entry: the machine that last wrote the journal may be another one, and may have
    /// created them.
    pub(super) unlisted: BootRelation,
}

/// Distinguishes one lease file from all others that had or will have its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LeaseFileId {
    ino: u64,
    /// Nanoseconds of the modification time.
    mtime: i64,
}

impl JournalContents {
    /// Parses the text of a journal; a line that is cut short counts as absent.
    pub(super) fn parse(text: &str) -> JournalContents {
        let mut contents = JournalContents::default();
        if parse_header(text).is_none() {
            return contents;
        }
        for line in text.split('\n') {
            if let Some(entry) = JournalEntry::parse(line) {
                contents.entries.insert(entry.lease.ip, entry);
            } else if let Some(removal) = JournalRemoval::parse(line) {
                contents.entries.remove(&removal.ip);
                contents.removals.insert(removal.ip, removal);
            }
        }
        contents
    }

    /// Drops the removals of addresses that are not in quarantine, unless a removal explains why the present owner got
    /// the address.
    pub(super) fn without_old_removals(mut self, quarantine: &AddressQuarantine) -> JournalContents {
        let JournalContents { entries, removals, .. } = &mut self;
        removals.retain(|ip, removal| {
            let explains = removal.reclaimed.is_some() && entries.contains_key(ip);
            explains || removal.time_left(quarantine).is_some()
        });
        self
    }

    pub(super) fn to_lines(&self) -> String {
        let removals = self.removals.values().map(JournalRemoval::to_line);
        removals.chain(self.entries.values().map(JournalEntry::to_line)).collect()
    }
}

impl JournalRemoval {
    /// The removal of a lease whose address can be allocated at once.
    pub(super) fn of_address(ip: IpAddr) -> JournalRemoval {
        JournalRemoval { ip, freed: None, reclaimed: None }
    }

    /// For how long the address is still in quarantine.
    pub(super) fn time_left(&self, quarantine: &AddressQuarantine) -> Option<Duration> {
        quarantine.time_left(self.freed.as_ref()?)
    }

    pub(super) fn to_line(&self) -> String {
        let ip = self.ip.to_string();
        let freed = self.freed.as_ref().map_or_else(|| UNKNOWN.to_owned(), RemovalTime::to_word);
        match &self.reclaimed {
            Some(ReclaimedLease { lease, why }) => {
                let ifname = escape_word(lease.ifname.as_deref().unwrap_or_default());
                join_line(&["-", &ip, &freed, end_proof_word(*why), &escape_word(&lease.id), &ifname])
            }
            None if self.freed.is_some() => join_line(&["-", &ip, &freed]),
            None => join_line(&["-", &ip]),
        }
    }

    pub(super) fn parse(line: &str) -> Option<JournalRemoval> {
        let ip = parse_removed_address(line)?;
        let words = split_line(line);
        let freed = words.get(2).and_then(|word| RemovalTime::parse(word));
        let reclaimed = if let [_, _, _, why, id, ifname] = words[..] {
            let why = [EndProof::HostEnd, EndProof::EarlierBoot].into_iter().find(|w| end_proof_word(*w) == why);
            let lease = AddressLease { ip, id: unescape_word(id)?, ifname: unescape_word(ifname) };
            why.map(|why| ReclaimedLease { lease, why })
        } else {
            None
        };
        Some(JournalRemoval { ip, freed, reclaimed })
    }
}

fn end_proof_word(why: EndProof) -> &'static str {
    match why {
        EndProof::HostEnd => "host-end",
        EndProof::EarlierBoot => "earlier-boot",
    }
}

impl JournalEntry {
    pub(super) fn to_line(&self) -> String {
        let JournalEntry { lease, file, end, made } = self;
        let unknown = || UNKNOWN.to_owned();
        join_line(&[
            "+",
            &escape_word(&lease.id),
            &lease.ifname.as_deref().map_or_else(unknown, escape_word),
            &lease.ip.to_string(),
            &format!("{}:{}", file.ino, file.mtime),
            &end.map_or_else(unknown, host_end_word),
            MADE[*made as usize].1,
        ])
    }

    pub(super) fn parse(line: &str) -> Option<JournalEntry> {
        let ["+", id, ifname, ip, file, end, made] = split_line(line)[..] else { return None };
        let ifname = if ifname == UNKNOWN { None } else { Some(unescape_word(ifname)?) };
        let (ino, mtime) = file.split_once(':')?;
        let file = LeaseFileId { ino: ino.parse().ok()?, mtime: mtime.parse().ok()? };
        let made = MADE.iter().find(|(_, word)| *word == made)?.0;
        let lease = AddressLease { ip: ip.parse().ok()?, id: unescape_word(id)?, ifname };
        Some(JournalEntry { lease, file, end: parse_host_end(end), made })
    }
}

/// The words for the boot in which a lease was created.
const MADE: [(BootRelation, &str); 3] =
    [(BootRelation::Now, "this"), (BootRelation::Earlier, "earlier"), (BootRelation::Elsewhere, UNKNOWN)];

/// The last part of the word for an end with the attachment's label, and for an end without it.
const LABELLED: &str = "own";
const LISTED: &str = "listed";

fn host_end_word(HostPairEnd { netns, index, labelled }: HostPairEnd) -> String {
    format!("{netns}:{index}:{}", if labelled { LABELLED } else { LISTED })
}

/// Parses the host's end; `None` if unknown, and for the namespace that releases up to 0.2.0 wrote in this place.
fn parse_host_end(word: &str) -> Option<HostPairEnd> {
    let [netns, index, last] = word.split(':').collect::<Vec<_>>()[..] else { return None };
    let labelled = last == LABELLED;
    let (netns, index) = (netns.parse().ok()?, index.parse().ok()?);
    (labelled || last == LISTED).then_some(HostPairEnd { netns, index, labelled })
}

impl LeaseFileId {
    pub(super) fn from_metadata(meta: &Metadata) -> LeaseFileId {
        let mtime = meta.mtime().wrapping_mul(1_000_000_000).wrapping_add(meta.mtime_nsec());
        LeaseFileId { ino: meta.ino(), mtime }
    }

    /// The seconds since 1970 at which the file was written.
    pub(super) fn creation_time(self) -> i64 {
        self.mtime.div_euclid(1_000_000_000)
    }
}

/// A line of `words`, none of which contains white space. The line begins with a newline and ends with [`END`]: a
/// truncated line is ignored, and the next line is not affected.
fn join_line(words: &[&str]) -> String {
    format!("\n{}{END}", words.join(" "))
}

/// The words of a line; none if the line is truncated.
fn split_line(line: &str) -> Vec<&str> {
    line.strip_suffix(END).map(|line| line.split(' ').collect()).unwrap_or_default()
}

/// The first line of a journal that is written in `boot`.
pub(super) fn header_line(boot: &BootIdentity) -> String {
    let machine = boot.machine.as_deref().unwrap_or(UNKNOWN);
    join_line(&["leases", machine, &boot.id]).split_off(1)
}

/// The boot in which the journal was written; entries call this boot `this`.
pub(super) fn parse_header(text: &str) -> Option<BootIdentity> {
    let ["leases", machine, id] = split_line(text.lines().next()?)[..] else { return None };
    let machine = Some(machine).filter(|machine| *machine != UNKNOWN).map(str::to_owned);
    Some(BootIdentity { machine, id: id.to_owned() })
}

pub(super) fn parse_removed_address(line: &str) -> Option<IpAddr> {
    let mut words = line.strip_suffix(END)?.split(' ');
    if words.next() == Some("-") { words.next()?.parse().ok() } else { None }
}

/// `text` as one word: bytes other than printable ASCII are written as `%` and two hexadecimal digits.
pub(super) fn escape_word(text: &str) -> String {
    let mut word = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_graphic() && byte != b'%' && text != UNKNOWN {
            word.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            write!(word, "%{byte:02x}").unwrap_or_default();
        }
    }
    word
}

fn unescape_word(word: &str) -> Option<String> {
    let mut parts = word.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}
