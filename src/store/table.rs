//! A hash table in one file: which addresses an interface of a container holds.
//!
//! A header of 64 bytes, then a power of two of slots of 64 bytes: 8 bytes of the container id's
//! hash, 8 of the interface's, 16 of the address, 32 of what tells whether the container lives
//! ([`Note`]). All numbers are big-endian. A slot's place follows from the id alone, the next free
//! one being taken if it is not: so one read of a block tells all that a container holds, and a
//! grown table is made from the old one.
//!
//! Nobody else may write it meanwhile; locks, and whether it is current, are the business of
//! [`super::index`].

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv6Addr};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use sha2::{Digest, Sha512};

use super::dir::Dir;
use super::note::Note;
use super::origin::Origin;
use super::{During, Error, Result};

/// The last byte is the format's version.
const MAGIC: &[u8; 8] = b"cniboxL\x02";
const HEADER: usize = 64;
const SLOT: usize = 64;
/// What is read at once; slots do not straddle blocks.
const BLOCK: u64 = 4096;
/// Fits into a block with its header, so that small tables are read whole.
const LEAST_SLOTS: u32 = 32;
const MOST_SLOTS: u32 = 1 << 26;
/// More than a table with the leases of a whole /8 has.
const MOST_BYTES: usize = (1 << 31) - 1;
/// The table's file, and its name until it is whole.
pub(super) const NAME: &str = "index";
pub(super) const TEMP: &str = "index.new";

/// Whose an address is, by hashes. Two owners with one key do no harm: the lease itself decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    id: u64,
    ifname: u64,
}

/// One lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) key: Key,
    pub(super) ip: IpAddr,
    pub(super) note: Note,
}

/// The addresses of a container: those of one interface, and those whose leases name none.
pub(super) type Owned = (Vec<IpAddr>, Vec<IpAddr>);

/// What identifies the file and tells its size.
#[derive(Clone, Copy, Debug)]
struct Header {
    /// Where and when the table was made.
    origin: Origin,
    slots: u32,
    taken: u32,
    /// Slots emptied in the midst of others, which a search must not stop at.
    removed: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Empty,
    Removed,
    Taken(Entry),
}

/// A table's open file.
#[derive(Debug)]
pub(super) struct Table {
    folder: Rc<Dir>,
    file: File,
    header: Header,
    /// What was read last.
    block: Block,
}

/// Part of a table's file.
#[derive(Debug, Default)]
struct Block {
    start: u64,
    bytes: Vec<u8>,
}

impl Key {
    /// Without an interface, the key of a lease in the old form.
    pub(super) fn new(id: &str, ifname: Option<&str>) -> Key {
        // An interface has a name, so the empty one is free.
        Key { id: hash(id) | 1, ifname: hash(ifname.unwrap_or_default()) }
    }
}

impl Header {
    fn new(origin: Origin, taken: u32) -> Header {
        let mut header = Header { origin, slots: LEAST_SLOTS, taken, removed: 0 };
        // At most 30 % full: half of what makes it grow.
        while u64::from(header.slots) * 3 < u64::from(taken) * 10 {
            header.slots *= 2;
        }
        header
    }

    fn bytes(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(MAGIC);
        let origin = self.origin.bytes();
        bytes[8..24].copy_from_slice(&origin[..16]);
        bytes[36..52].copy_from_slice(&origin[16..]);
        for (at, number) in [(24, self.slots), (28, self.taken), (32, self.removed)] {
            bytes[at..at + 4].copy_from_slice(&number.to_be_bytes());
        }
        bytes
    }

    /// The header of a table in a file of `size` bytes.
    fn parse(bytes: &[u8], size: u64) -> Option<Header> {
        let number = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let origin = Origin::parse(bytes.get(8..24)?, bytes.get(36..52)?)?;
        let header =
            Header { origin, slots: number(24)?, taken: number(28)?, removed: number(32)? };
        let sound = header.slots.is_power_of_two()
            && (LEAST_SLOTS..=MOST_SLOTS).contains(&header.slots)
            && size == place(header.slots)
            && u64::from(header.taken) + u64::from(header.removed) < u64::from(header.slots);
        (sound && bytes == header.bytes()).then_some(header)
    }

    fn home(&self, key: Key) -> u32 {
        // The remainder is below `slots`.
        u32::try_from((key.id >> 1) % u64::from(self.slots)).unwrap_or_default()
    }

    fn after(&self, n: u32) -> u32 {
        (n + 1) % self.slots
    }

    fn is_crowded(&self) -> bool {
        (u64::from(self.taken) + u64::from(self.removed)) * 10 > u64::from(self.slots) * 6
    }
}

impl Slot {
    fn bytes(self) -> [u8; SLOT] {
        let mut bytes = [0; SLOT];
        match self {
            Slot::Empty => {}
            Slot::Removed => bytes[8..].fill(0xff),
            Slot::Taken(Entry { key, ip, note }) => {
                bytes[..8].copy_from_slice(&key.id.to_be_bytes());
                bytes[8..16].copy_from_slice(&key.ifname.to_be_bytes());
                let ip = match ip {
                    IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                    IpAddr::V6(v6) => v6,
                };
                bytes[16..32].copy_from_slice(&ip.octets());
                bytes[32..].copy_from_slice(&note.bytes());
            }
        }
        bytes
    }

    fn is_of(self, key: Key, ip: IpAddr) -> bool {
        matches!(self, Slot::Taken(entry) if entry.key == key && entry.ip == ip)
    }

    fn parse(bytes: &[u8]) -> Option<Slot> {
        let number = |at: usize| Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let key = Key { id: number(0)?, ifname: number(8)? };
        if key.id.is_multiple_of(2) {
            return [Slot::Empty, Slot::Removed].into_iter().find(|slot| slot.bytes() == bytes);
        }
        let ip: [u8; 16] = bytes.get(16..32)?.try_into().ok()?;
        let note = Note::parse(bytes.get(32..SLOT)?.try_into().ok()?)?;
        Some(Slot::Taken(Entry { key, ip: Ipv6Addr::from(ip).to_canonical(), note }))
    }
}

/// Reads `bytes` as a header and as slots.
pub(super) fn parse_all(bytes: &[u8]) {
    std::hint::black_box(Header::parse(bytes, bytes.len() as u64));
    for slot in bytes.chunks(SLOT) {
        // What is read is written as it was.
        debug_assert!(Slot::parse(slot).is_none_or(|read| read.bytes()[..32] == slot[..32]));
    }
}

impl Table {
    /// Opens the table in `folder`, and tells the state of its file; an error if it is damaged or
    /// of another boot.
    pub(super) fn open(folder: &Rc<Dir>, boot: &str) -> Result<(Table, Metadata)> {
        let path = folder.path(NAME);
        let (file, meta) = folder.file(NAME, OFlag::O_RDWR, Mode::empty()).during("open", &path)?;
        let (size, mut block) = (meta.len(), Block::default());
        block.load(&file, 0, size).during("read", &path)?;
        let header = block.bytes.get(..HEADER).and_then(|bytes| Header::parse(bytes, size));
        let header = header.filter(|header| header.origin.is_of_boot(boot));
        let header = header.ok_or_else(|| damaged(&path))?;
        Ok((Table { folder: Rc::clone(folder), file, header, block }, meta))
    }

    /// Puts a table of these entries in place of whatever is in `folder`.
    pub(super) fn create(folder: Rc<Dir>, origin: Origin, entries: &[Entry]) -> Result<Table> {
        let taken = u32::try_from(entries.len()).ok().filter(|taken| *taken < MOST_SLOTS / 8);
        let too_many = || Error::new("create", &folder.path(NAME), ErrorKind::FileTooLarge);
        let header = Header::new(origin, taken.ok_or_else(too_many)?);
        let file = folder.create(TEMP, &image(&header, entries))?;
        // Renamed over a file, ext4 would start to write at once.
        let done = folder.remove(NAME).and_then(|()| folder.rename(TEMP, NAME));
        if done.is_err() {
            folder.remove(TEMP)?;
        }
        done.map(|()| Table { folder, file, header, block: Block::default() })
    }

    /// How many leases it has.
    pub(super) fn len(&self) -> usize {
        self.header.taken as usize
    }

    fn path(&self) -> PathBuf {
        self.folder.path(NAME)
    }

    /// The file, for its times.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// What an interface of a container holds, and what the container holds in the old form.
    pub(super) fn lookup(&mut self, id: &str, ifname: &str) -> Result<Owned> {
        let (current, old) = (Key::new(id, Some(ifname)), Key::new(id, None));
        let (chain, _) = self.chain(current)?;
        let of = |wanted: Key| {
            let ip = |(_, slot): &(u32, Slot)| match slot {
                Slot::Taken(entry) if entry.key == wanted => Some(entry.ip),
                _ => None,
            };
            chain.iter().filter_map(ip).collect()
        };
        Ok((of(current), of(old)))
    }

    /// Adds an entry, or changes its note.
    pub(super) fn insert(&mut self, entry: Entry) -> Result<()> {
        let (chain, end) = self.chain(entry.key)?;
        if let Some((n, _)) = chain.iter().find(|(_, slot)| slot.is_of(entry.key, entry.ip)) {
            return self.put(*n, Slot::Taken(entry));
        }
        let entry = Slot::Taken(entry);
        let reused = chain.iter().find(|(_, slot)| *slot == Slot::Removed).map(|(n, _)| *n);
        self.put(reused.unwrap_or(end), entry)?;
        self.header.taken += 1;
        if reused.is_some() {
            self.header.removed = self.header.removed.saturating_sub(1);
        }
        if self.header.is_crowded() { self.rewrite() } else { Ok(()) }
    }

    /// Removes an entry; that there is none is an error.
    pub(super) fn remove(&mut self, key: Key, ip: IpAddr) -> Result<()> {
        let (chain, _) = self.chain(key)?;
        let found = chain.iter().position(|(_, slot)| slot.is_of(key, ip));
        let at = found.ok_or_else(|| damaged(&self.path()))?;
        self.header.taken = self.header.taken.saturating_sub(1);
        if at + 1 == chain.len() {
            // An empty slot follows: nobody passes through this one.
            return self.put(chain[at].0, Slot::Empty);
        }
        self.header.removed += 1;
        self.put(chain[at].0, Slot::Removed)
    }

    /// Writes the header, which the changes only noted.
    pub(super) fn finish(&self) -> Result<()> {
        self.file.write_all_at(&self.header.bytes(), 0).during("write", &self.path())
    }

    /// The slots from `key`'s place on that are not empty, and the empty one after them.
    fn chain(&mut self, key: Key) -> Result<(Vec<(u32, Slot)>, u32)> {
        let mut chain = Vec::new();
        let mut n = self.header.home(key);
        for _ in 0..self.header.slots {
            match self.get(n)? {
                Slot::Empty => return Ok((chain, n)),
                slot => chain.push((n, slot)),
            }
            n = self.header.after(n);
        }
        Err(damaged(&self.path()))
    }

    fn get(&mut self, n: u32) -> Result<Slot> {
        let at = self.load(n)?;
        Slot::parse(&self.block.bytes[at..at + SLOT]).ok_or_else(|| damaged(&self.path()))
    }

    fn put(&mut self, n: u32, slot: Slot) -> Result<()> {
        let at = self.load(n)?;
        self.block.bytes[at..at + SLOT].copy_from_slice(&slot.bytes());
        self.file.write_all_at(&slot.bytes(), place(n)).during("write", &self.path())
    }

    /// Has slot `n` in memory, and tells where in the block it is.
    fn load(&mut self, n: u32) -> Result<usize> {
        let (start, at) = (place(n) / BLOCK * BLOCK, place(n) % BLOCK);
        let at = usize::try_from(at).unwrap_or_default();
        if self.block.start != start || self.block.bytes.len() < at + SLOT {
            let size = place(self.header.slots);
            self.block.load(&self.file, start, size).during("read", &self.path())?;
        }
        Ok(at)
    }

    /// Makes room: a table of twice the size, or of the same if it is full of removed slots.
    fn rewrite(&mut self) -> Result<()> {
        let mut bytes = vec![0; SLOT * self.header.slots as usize];
        self.file.read_exact_at(&mut bytes, place(0)).during("read", &self.path())?;
        let mut entries = Vec::with_capacity(self.header.taken as usize);
        for slot in bytes.chunks_exact(SLOT) {
            match Slot::parse(slot).ok_or_else(|| damaged(&self.path()))? {
                Slot::Taken(entry) => entries.push(entry),
                Slot::Empty | Slot::Removed => {}
            }
        }
        *self = Table::create(Rc::clone(&self.folder), self.header.origin, &entries)?;
        Ok(())
    }
}

/// The entries of a table that nobody vouches for, and where it was made: each entry has to prove
/// itself. `None` if there is no table of this name.
pub(super) fn salvage(folder: &Dir, name: &str) -> Option<(Vec<Entry>, Origin)> {
    let (bytes, _) = folder.read(name, MOST_BYTES).ok()?;
    let header = Header::parse(bytes.get(..HEADER)?, bytes.len() as u64)?;
    let slots = bytes[HEADER..].chunks_exact(SLOT);
    let entry = |slot| match Slot::parse(slot) {
        Some(Slot::Taken(entry)) => Some(entry),
        _ => None,
    };
    Some((slots.filter_map(entry).collect(), header.origin))
}

impl Block {
    /// Reads the block at `start` of a file of `size` bytes.
    fn load(&mut self, file: &File, start: u64, size: u64) -> io::Result<()> {
        let length = usize::try_from(size.saturating_sub(start).min(BLOCK)).unwrap_or_default();
        // Taken out first: what fails to be read must not be held for anything.
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.resize(length, 0);
        file.read_exact_at(&mut bytes, start)?;
        *self = Block { start, bytes };
        Ok(())
    }
}

/// The bytes of a whole table.
fn image(header: &Header, entries: &[Entry]) -> Vec<u8> {
    let mut image = header.bytes().to_vec();
    image.resize(HEADER + SLOT * header.slots as usize, 0);
    // Where to look on from a slot that is taken, so that many entries of one container are not
    // passed again and again.
    let mut next: Vec<u32> = (0..header.slots).collect();
    for entry in entries {
        // There are more slots than entries.
        let (home, mut n) = (header.home(entry.key), header.home(entry.key));
        while next[n as usize] != n {
            n = next[n as usize];
        }
        let at = HEADER + SLOT * n as usize;
        image[at..at + SLOT].copy_from_slice(&Slot::Taken(*entry).bytes());
        next[n as usize] = header.after(n);
        next[home as usize] = header.after(n);
    }
    image
}

/// Where slot `n` is in the file.
fn place(n: u32) -> u64 {
    HEADER as u64 + SLOT as u64 * u64::from(n)
}

fn hash(text: &str) -> u64 {
    let digest = u128::from_be_bytes(digest(text));
    u64::try_from(digest >> 64).unwrap_or_default()
}

pub(super) fn digest(text: &str) -> [u8; 16] {
    let mut head = [0; 16];
    head.copy_from_slice(&Sha512::digest(text)[..16]);
    head
}

fn damaged(path: &Path) -> Error {
    Error::new("parse", path, ErrorKind::InvalidData)
}

#[cfg(test)]
mod tests;
