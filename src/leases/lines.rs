//! The lines of a network's journal, as text and as data.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::fs::Metadata;
use std::net::IpAddr;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::rc::Rc;
use std::time::Duration;

use super::lease::{AddressLease, ReclaimedLease};
use super::quarantine::{AddressQuarantine, RemovalTime};
use crate::attachment::boot::current_unix_time;
use crate::attachment::{BootIdentity, ContainerVeth, EndedBy, HostVeth};
use cni::sort::sort_items;

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
    pub(super) end: Option<HostVeth>,
    /// The boot in which the lease was created, or first seen; `None` if it is unknown.
    pub(super) boot: Option<Rc<BootIdentity>>,
}

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
    /// The boot in which the journal was last written.
    pub(super) written_in: Option<Rc<BootIdentity>>,
    /// When it was written, in seconds since 1970.
    pub(super) written_at: Option<i64>,
    /// The boot of leases without an entry; `None` if it is unknown: the machine that last wrote
    /// the journal may be another one, and may have created them.
    pub(super) unlisted: Option<Rc<BootIdentity>>,
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
        let Some(JournalHeader { boot, written_at, .. }) = JournalHeader::parse(text) else {
            return contents;
        };
        let boot = Rc::new(boot);
        let mut boots = JournalBoots::from([(THIS.to_owned(), Rc::clone(&boot))]);
        contents.written_in = Some(boot);
        contents.written_at = written_at;
        for line in text.split('\n').skip(1) {
            if let Some(entry) = JournalEntry::parse(line, &boots) {
                contents.entries.insert(entry.lease.ip, entry);
            } else if let Some(removal) = JournalRemoval::parse(line) {
                contents.entries.remove(&removal.ip);
                contents.removals.insert(removal.ip, removal);
            } else if let [BOOT, word, machine, id] = split_line(line)[..] {
                boots.insert(word.to_owned(), Rc::new(parse_boot(machine, id)));
            }
        }
        contents
    }

    /// Drops the removals of addresses that are not in quarantine, unless a removal explains why
    /// the present owner got the address.
    pub(super) fn without_old_removals(
        mut self,
        quarantine: &AddressQuarantine,
    ) -> JournalContents {
        let JournalContents { entries, removals, .. } = &mut self;
        removals.retain(|ip, removal| {
            let explains = removal.reclaimed.is_some() && entries.contains_key(ip);
            explains || removal.time_left(quarantine).is_some()
        });
        self
    }

    /// The text of a journal that is written in the boot `current`, to which more lines can be
    /// added.
    pub(super) fn to_text(&self, current: &BootIdentity) -> String {
        let mut numbers: BTreeMap<&BootIdentity, String> = BTreeMap::new();
        // Removals before entries: one may explain how the owner of an entry got the address.
        let mut first: String = self.removals.values().map(JournalRemoval::to_line).collect();
        let mut entries = Vec::with_capacity(self.entries.len());
        for entry in self.entries.values() {
            let word = match entry.boot.as_deref() {
                None => UNKNOWN,
                Some(boot) if boot == current => THIS,
                Some(boot) => {
                    let next = numbers.len() + 1;
                    numbers.entry(boot).or_insert_with(|| next.to_string())
                }
            };
            entries.push(entry.to_line(word));
        }
        for (boot, number) in numbers {
            first +=
                &join_line(&[BOOT, &number, boot.machine.as_deref().unwrap_or(UNKNOWN), &boot.id]);
        }
        sort_items(&mut entries);
        let entries = entries.concat();
        let header = JournalHeader {
            boot: current.clone(),
            written_at: Some(current_unix_time()),
            sorted: first.len() as u64..(first.len() + entries.len()) as u64,
        };
        header.to_line() + &first + &entries
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
                join_line(&[
                    "-",
                    &ip,
                    &freed,
                    end_proof_word(*why),
                    &escape_word(&lease.id),
                    &ifname,
                ])
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
            let why = [EndedBy::HostEnd, EndedBy::EarlierBoot]
                .into_iter()
                .find(|w| end_proof_word(*w) == why);
            let lease = AddressLease { ip, id: unescape_word(id)?, ifname: unescape_word(ifname) };
            why.map(|why| ReclaimedLease { lease, why })
        } else {
            None
        };
        Some(JournalRemoval { ip, freed, reclaimed })
    }
}

fn end_proof_word(why: EndedBy) -> &'static str {
    match why {
        EndedBy::HostEnd => "host-end",
        EndedBy::EarlierBoot => "earlier-boot",
    }
}

impl JournalEntry {
    /// The line, with this word for the boot.
    pub(super) fn to_line(&self, boot: &str) -> String {
        let JournalEntry { lease, file, end, .. } = self;
        let unknown = || UNKNOWN.to_owned();
        join_line(&[
            "+",
            &escape_word(&lease.id),
            &lease.ifname.as_deref().map_or_else(unknown, escape_word),
            &lease.ip.to_string(),
            &format!("{}:{}", file.ino, file.mtime),
            &end.map_or_else(unknown, host_end_word),
            boot,
        ])
    }

    pub(super) fn parse(line: &str, boots: &JournalBoots) -> Option<JournalEntry> {
        let ["+", id, ifname, ip, file, end, boot] = split_line(line)[..] else { return None };
        let ifname = if ifname == UNKNOWN { None } else { Some(unescape_word(ifname)?) };
        let (ino, mtime) = file.split_once(':')?;
        let file = LeaseFileId { ino: ino.parse().ok()?, mtime: mtime.parse().ok()? };
        let boot = boots.get(boot).cloned();
        let lease = AddressLease { ip: ip.parse().ok()?, id: unescape_word(id)?, ifname };
        Some(JournalEntry { lease, file, end: parse_host_end(end), boot })
    }
}

/// The third part of the word for an end with the attachment's label, and for an end without it.
const LABELLED: &str = "own";
const LISTED: &str = "listed";

fn host_end_word(HostVeth { netns, index, labelled, peer }: HostVeth) -> String {
    let kind = if labelled { LABELLED } else { LISTED };
    let peer = peer.map(|peer| format!(":{}:{}", peer.nsid, peer.index)).unwrap_or_default();
    format!("{netns}:{index}:{kind}{peer}")
}

/// Parses the host's end; `None` if unknown.
fn parse_host_end(word: &str) -> Option<HostVeth> {
    let mut parts = word.split(':');
    let (netns, index) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let labelled = match parts.next()? {
        LABELLED => true,
        LISTED => false,
        _ => return None,
    };
    let peer = match parts.next() {
        Some(nsid) => {
            Some(ContainerVeth { nsid: nsid.parse().ok()?, index: parts.next()?.parse().ok()? })
        }
        None => None,
    };
    Some(HostVeth { netns, index, labelled, peer })
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

/// A line of `words`, none of which contains white space. The line begins with a newline and ends
/// with [`END`]: a truncated line is ignored, and the next line is not affected.
fn join_line(words: &[&str]) -> String {
    format!("\n{}{END}", words.join(" "))
}

/// The words of a line; none if the line is truncated.
fn split_line(line: &str) -> Vec<&str> {
    line.strip_suffix(END).map(|line| line.split(' ').collect()).unwrap_or_default()
}

/// The first words of a journal's first line, and of the lines of other boots.
const HEADER: &str = "leases";
const BOOT: &str = "boot";
/// The word for the boot in the first line.
pub(super) const THIS: &str = "this";

/// The boots of entries, by the words for them.
pub(super) type JournalBoots = HashMap<String, Rc<BootIdentity>>;

/// The first line of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JournalHeader {
    /// The boot in which the journal was last written.
    pub(super) boot: BootIdentity,
    /// When it was written, in seconds since 1970.
    written_at: Option<i64>,
    /// The place of the entries, which are sorted; lines that were added since follow them. In
    /// bytes from the end of this line.
    pub(super) sorted: Range<u64>,
}

impl JournalHeader {
    fn to_line(&self) -> String {
        let JournalHeader { boot: BootIdentity { machine, id }, written_at, sorted } = self;
        let time = written_at.map_or_else(|| UNKNOWN.to_owned(), |time| time.to_string());
        let place = format!("{}:{}", sorted.start, sorted.end);
        join_line(&[HEADER, machine.as_deref().unwrap_or(UNKNOWN), id, &time, &place]).split_off(1)
    }

    /// Parses the first line of `text`.
    pub(super) fn parse(text: &str) -> Option<JournalHeader> {
        let mut words = split_line(text.lines().next()?).into_iter();
        let is_header = words.next()? == HEADER;
        let boot = parse_boot(words.next()?, words.next()?);
        let written_at = words.next().and_then(|word| word.parse().ok());
        let (start, end) = words.next()?.split_once(':')?;
        let sorted = start.parse().ok()?..end.parse().ok()?;
        is_header.then_some(JournalHeader { boot, written_at, sorted })
    }
}

fn parse_boot(machine: &str, id: &str) -> BootIdentity {
    let machine = Some(machine).filter(|machine| *machine != UNKNOWN).map(str::to_owned);
    BootIdentity { machine, id: id.to_owned() }
}

pub(super) fn parse_removed_address(line: &str) -> Option<IpAddr> {
    let mut words = line.strip_suffix(END)?.split(' ');
    if words.next() == Some("-") { words.next()?.parse().ok() } else { None }
}

/// `text` as one word: bytes other than printable ASCII are written as `%` and two hexadecimal
/// digits.
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
