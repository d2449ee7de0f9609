//! The readers of the store's files, for the fuzz targets below `fuzz/`: no bytes make one of them
//! panic, and a lease that is read is written as it was.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};

use super::lease::Lease;
use super::quarantine::Moment;
use super::table;

/// Reads `bytes` as each kind of file.
///
/// # Panics
///
/// If a lease is not written as it was read.
pub fn files(bytes: &[u8]) {
    let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
    if let Some(lease) = Lease::parse(ip, bytes) {
        assert_eq!(Lease::parse(ip, lease.text().as_bytes()), Some(lease));
    }
    table::parse_all(bytes);
    for line in String::from_utf8_lossy(bytes).lines() {
        black_box(Moment::parse(line));
    }
}
