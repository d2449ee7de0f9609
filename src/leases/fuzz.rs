//! Runs the parsers of the store's files on arbitrary bytes, for the fuzz targets in `fuzz/`. They must not panic, and a
//! parsed lease must be written back unchanged.

use std::net::{IpAddr, Ipv4Addr};

use super::lease::Lease;
use super::lines::{Contents, Entry, Removal};

/// Parses `bytes` as each kind of file.
///
/// # Panics
///
/// If a lease or a line of the journal is not written as it was read.
pub fn files(bytes: &[u8]) {
    let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
    if let Some(lease) = Lease::parse(ip, bytes) {
        assert_eq!(Lease::parse(ip, lease.text().as_bytes()), Some(lease));
    }
    let Contents { entries, removals, .. } = Contents::parse(&String::from_utf8_lossy(bytes));
    for entry in entries.values() {
        assert_eq!(Entry::parse(entry.line().trim_start()).as_ref(), Some(entry));
    }
    for removal in removals.values() {
        assert_eq!(Removal::parse(removal.line().trim_start()).as_ref(), Some(removal));
    }
}
