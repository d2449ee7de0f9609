//! Addresses that were freed a short while ago, and are not allocated until packets to the previous owner have expired
//! (`reuseDelay`).
//!
//! A line of `.cnibox/freed` has an address, the boot id, the seconds since boot, and the wall clock's time. Within one
//! boot the seconds since boot count, since that clock cannot be set. After a reboot the delay is over when either clock
//! says so: all of the time since boot is after the release.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::IpAddr;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

use super::boot::BootTime;
use super::journal::{line, words};
use crate::files::dir::Dir;
use crate::files::{During, Result};

/// The list, in the network's folder `.cnibox`, and its temporary name while it is written.
const FREED: &str = "freed";
const TEMP: &str = "freed.new";
/// A list of fewer lines is not rewritten.
const MIN_LINES: usize = 256;
/// Limit of the list's size in bytes.
const MAX_BYTES: usize = 1 << 28;

/// Adds addresses that are about to be freed.
pub(super) fn add(folder: &Dir, now: &BootTime, ips: impl Iterator<Item = IpAddr>) -> Result<()> {
    let text: String = ips.map(|ip| freed(ip, now)).collect();
    let flags = OFlag::O_WRONLY | OFlag::O_APPEND | OFlag::O_CREAT;
    // One write: after a kill all lines are there, or none.
    let file = folder.file(FREED, flags, Mode::S_IRUSR | Mode::S_IWUSR);
    let written = file.and_then(|(mut file, _)| file.write_all(text.as_bytes()));
    written.during("write", &folder.path(FREED))
}

/// The addresses that must not be allocated yet, with the time left.
pub(super) fn quarantined(
    folder: Option<&Dir>,
    boot: Option<&str>,
    delay: Duration,
) -> BTreeMap<IpAddr, Duration> {
    let Some(folder) = folder.filter(|_| !delay.is_zero()) else { return BTreeMap::new() };
    let now = BootTime::now(boot);
    lines(folder).into_iter().filter_map(|(ip, then)| Some((ip, now.left(&then, delay)?))).collect()
}

/// Removes entries whose delay is over, if there are many. The caller holds the lock.
pub(super) fn tidy(folder: &Dir, now: &BootTime, delay: Duration) -> Result<()> {
    let lines = lines(folder);
    if lines.len() < MIN_LINES {
        return Ok(());
    }
    let text: String = lines
        .iter()
        .filter(|(_, then)| !now.is_past(then, delay))
        .map(|(ip, then)| freed(*ip, then))
        .collect();
    folder.replace(FREED, TEMP, text.as_bytes()).map(drop)
}

fn freed(ip: IpAddr, then: &BootTime) -> String {
    line(&[&ip.to_string(), &then.boot, &then.uptime.to_string(), &then.wall.to_string()])
}

/// The address of a line, and when it was freed.
pub(super) fn parse(line: &str) -> Option<(IpAddr, BootTime)> {
    let [ip, boot, uptime, wall] = words(line)[..] else { return None };
    let (uptime, wall) = (uptime.parse().ok()?, wall.parse().ok()?);
    Some((ip.parse().ok()?, BootTime { boot: boot.to_owned(), uptime, wall }))
}

fn lines(folder: &Dir) -> Vec<(IpAddr, BootTime)> {
    // An unreadable list quarantines nothing: ADD must not fail for it.
    let content = folder.read(FREED, MAX_BYTES).map(|(content, _)| content).unwrap_or_default();
    String::from_utf8_lossy(&content).lines().filter_map(parse).collect()
}
