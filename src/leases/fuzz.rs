//! Runs the parsers of the store's files on arbitrary bytes, for the fuzz targets in `fuzz/`. They
//! must not panic, and a parsed lease must be written back unchanged.

use std::net::{IpAddr, Ipv4Addr};
use std::rc::Rc;

use super::lease::AddressLease;
use super::lines::{JournalBoots, JournalContents, JournalEntry, JournalRemoval};

/// Parses `bytes` as each kind of file.
///
/// # Panics
///
/// If a lease or a line of the journal is not written as it was read.
pub fn parse_lease_files(bytes: &[u8]) {
    let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
    if let Some(lease) = AddressLease::parse_file(ip, bytes) {
        assert_eq!(AddressLease::parse_file(ip, lease.file_text().as_bytes()), Some(lease));
    }
    let JournalContents { entries, removals, .. } =
        JournalContents::parse(&String::from_utf8_lossy(bytes));
    for entry in entries.values() {
        let boots: JournalBoots =
            entry.boot.iter().map(|boot| ("1".to_owned(), Rc::clone(boot))).collect();
        let line = entry.to_line(if entry.boot.is_some() { "1" } else { "-" });
        assert_eq!(JournalEntry::parse(line.trim_start(), &boots).as_ref(), Some(entry));
    }
    for removal in removals.values() {
        assert_eq!(JournalRemoval::parse(removal.to_line().trim_start()).as_ref(), Some(removal));
    }
}
