//! The lines of a network's journal, as text and as data.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::Metadata;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use super::lease::{Lease, Reclaimed};
use super::quarantine::{BootTime, Quarantine};
use crate::attachment::{Boot, Gone, HostEnd, Made};

/// The end of every line.
pub(super) const END: &str = " .";
/// The word for an unknown value.
const UNKNOWN: &str = "-";

/// A line that adds a lease, with the data that later proves whether its attachment has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) lease: Lease,
    /// The lease's file: the entry is not valid for a file that was replaced or written to.
    pub(super) file: FileId,
    /// The host's end of the attachment's veth pair.
    pub(super) end: Option<HostEnd>,
    /// When the lease was made, relative to the boot in the journal's first line.
    pub(super) made: Made,
}

/// A line that removes a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Removal {
    pub(super) ip: IpAddr,
    /// The time, if the address is withheld.
    pub(super) freed: Option<BootTime>,
    /// The lease, and the proof that its attachment had ended, if it was reclaimed.
    pub(super) reclaimed: Option<Reclaimed>,
}

/// What a journal tells of each address.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// The leases.
    pub(super) entries: HashMap<IpAddr, Entry>,
    /// The last removals.
    pub(super) removals: HashMap<IpAddr, Removal>,
    /// When a lease without an entry was made: another machine, that wrote the journal before, may have made it.
    pub(super) unlisted: Made,
}

/// Distinguishes one lease file from all others that had or will have its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId {
    ino: u64,
    /// Nanoseconds of the modification time.
    mtime: i64,
}

impl Contents {
    /// Parses the text of a journal; a line that is cut short counts as absent.
    pub(super) fn parse(text: &str) -> Contents {
        let mut contents = Contents::default();
        if parse_header(text).is_none() {
            return contents;
        }
        for line in text.split('\n') {
            if let Some(entry) = Entry::parse(line) {
                contents.entries.insert(entry.lease.ip, entry);
            } else if let Some(removal) = Removal::parse(line) {
                contents.entries.remove(&removal.ip);
                contents.removals.insert(removal.ip, removal);
            }
        }
        contents
    }

    /// Without the removals of addresses that are not withheld, unless they tell why the present owner has the address.
    pub(super) fn tidied(mut self, quarantine: &Quarantine) -> Contents {
        let Contents { entries, removals, .. } = &mut self;
        removals.retain(|ip, removal| {
            let explains = removal.reclaimed.is_some() && entries.contains_key(ip);
            explains || removal.left(quarantine).is_some()
        });
        self
    }

    pub(super) fn lines(&self) -> String {
        let removals = self.removals.values().map(Removal::line);
        removals.chain(self.entries.values().map(Entry::line)).collect()
    }
}

impl Removal {
    /// The removal of a lease whose address can be allocated at once.
    pub(super) fn of(ip: IpAddr) -> Removal {
        Removal { ip, freed: None, reclaimed: None }
    }

    /// For how long the address is still withheld.
    pub(super) fn left(&self, quarantine: &Quarantine) -> Option<Duration> {
        quarantine.left(self.freed.as_ref()?)
    }

    pub(super) fn line(&self) -> String {
        let ip = self.ip.to_string();
        let freed = self.freed.as_ref().map_or_else(|| UNKNOWN.to_owned(), BootTime::word);
        match &self.reclaimed {
            Some(Reclaimed { lease, why }) => {
                let ifname = escaped(lease.ifname.as_deref().unwrap_or_default());
                line(&["-", &ip, &freed, gone_word(*why), &escaped(&lease.id), &ifname])
            }
            None if self.freed.is_some() => line(&["-", &ip, &freed]),
            None => line(&["-", &ip]),
        }
    }

    pub(super) fn parse(line: &str) -> Option<Removal> {
        let ip = parse_removed(line)?;
        let words = words(line);
        let freed = words.get(2).and_then(|word| BootTime::parse(word));
        let reclaimed = if let [_, _, _, why, id, ifname] = words[..] {
            let why = [Gone::HostEnd, Gone::EarlierBoot].into_iter().find(|w| gone_word(*w) == why);
            let lease = Lease { ip, id: unescaped(id)?, ifname: unescaped(ifname) };
            why.map(|why| Reclaimed { lease, why })
        } else {
            None
        };
        Some(Removal { ip, freed, reclaimed })
    }
}

fn gone_word(why: Gone) -> &'static str {
    match why {
        Gone::HostEnd => "host-end",
        Gone::EarlierBoot => "earlier-boot",
    }
}

impl Entry {
    pub(super) fn line(&self) -> String {
        let Entry { lease, file, end, made } = self;
        let unknown = || UNKNOWN.to_owned();
        line(&[
            "+",
            &escaped(&lease.id),
            &lease.ifname.as_deref().map_or_else(unknown, escaped),
            &lease.ip.to_string(),
            &format!("{}:{}", file.ino, file.mtime),
            &end.map_or_else(unknown, end_word),
            MADE[*made as usize].1,
        ])
    }

    pub(super) fn parse(line: &str) -> Option<Entry> {
        let ["+", id, ifname, ip, file, end, made] = words(line)[..] else { return None };
        let ifname = if ifname == UNKNOWN { None } else { Some(unescaped(ifname)?) };
        let (ino, mtime) = file.split_once(':')?;
        let file = FileId { ino: ino.parse().ok()?, mtime: mtime.parse().ok()? };
        let made = MADE.iter().find(|(_, word)| *word == made)?.0;
        let lease = Lease { ip: ip.parse().ok()?, id: unescaped(id)?, ifname };
        Some(Entry { lease, file, end: parse_end(end), made })
    }
}

/// The words for the boot in which a lease was made.
const MADE: [(Made, &str); 3] =
    [(Made::Now, "this"), (Made::Earlier, "earlier"), (Made::Elsewhere, UNKNOWN)];

/// The last part of the word for an end with, and without, the attachment's label.
const LABELLED: &str = "own";
const LISTED: &str = "listed";

fn end_word(HostEnd { netns, index, labelled }: HostEnd) -> String {
    format!("{netns}:{index}:{}", if labelled { LABELLED } else { LISTED })
}

/// The host's end; `None` also for the namespace that releases up to 0.2.0 wrote.
fn parse_end(word: &str) -> Option<HostEnd> {
    let [netns, index, last] = word.split(':').collect::<Vec<_>>()[..] else { return None };
    let labelled = last == LABELLED;
    let (netns, index) = (netns.parse().ok()?, index.parse().ok()?);
    (labelled || last == LISTED).then_some(HostEnd { netns, index, labelled })
}

impl FileId {
    pub(super) fn of(meta: &Metadata) -> FileId {
        let mtime = meta.mtime().wrapping_mul(1_000_000_000).wrapping_add(meta.mtime_nsec());
        FileId { ino: meta.ino(), mtime }
    }

    /// The seconds since 1970 at which the file was written.
    pub(super) fn created(self) -> i64 {
        self.mtime.div_euclid(1_000_000_000)
    }
}

/// A line of `words`, none of which contains white space. The line begins with a newline and ends with [`END`]: a
/// truncated line is ignored, and the next line is not affected.
fn line(words: &[&str]) -> String {
    format!("\n{}{END}", words.join(" "))
}

/// The words of a line; none if the line is truncated.
fn words(line: &str) -> Vec<&str> {
    line.strip_suffix(END).map(|line| line.split(' ').collect()).unwrap_or_default()
}

/// The first line of a journal that is written in `boot`.
pub(super) fn header(boot: &Boot) -> String {
    let machine = boot.machine.as_deref().unwrap_or(UNKNOWN);
    line(&["leases", machine, &boot.id]).split_off(1)
}

/// The boot in which the journal was written; entries call this boot `this`.
pub(super) fn parse_header(text: &str) -> Option<Boot> {
    let ["leases", machine, id] = words(text.lines().next()?)[..] else { return None };
    let machine = Some(machine).filter(|machine| *machine != UNKNOWN).map(str::to_owned);
    Some(Boot { machine, id: id.to_owned() })
}

pub(super) fn parse_removed(line: &str) -> Option<IpAddr> {
    let mut words = line.strip_suffix(END)?.split(' ');
    if words.next() == Some("-") { words.next()?.parse().ok() } else { None }
}

/// `text` as one word: bytes other than printable ASCII are written as `%` and two hexadecimal digits.
pub(super) fn escaped(text: &str) -> String {
    let mut word = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_graphic() && byte != b'%' && text != UNKNOWN {
            word.push(char::from(byte));
        } else {
            // To a string, this cannot fail.
            write!(word, "%{byte:02x}").unwrap_or_default();
        }
    }
    word
}

fn unescaped(word: &str) -> Option<String> {
    let mut parts = word.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}
