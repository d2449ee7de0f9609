//! Addresses that were freed a short while ago, and are kept from the next owner until what is on
//! its way to the former one has arrived or is lost (`reuseDelay`).
//!
//! A line of `.cnibox/freed` is an address, the boot, the seconds since its start, and the time of the
//! wall clock. Within a boot the former counts, which cannot be set. After a boot the delay is over
//! when either clock says so: all of the time since the boot is after the release.

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

/// The list, in the network's folder `.cnibox`, and its name until it is whole.
const FREED: &str = "freed";
const TEMP: &str = "freed.new";
/// A list of fewer lines is not written anew.
const MIN_LINES: usize = 256;
/// More than a list can be that is tidied now and then.
const MAX_BYTES: usize = 1 << 28;

/// Notes that these addresses are being freed.
pub(super) fn add(folder: &Dir, now: &BootTime, ips: impl Iterator<Item = IpAddr>) -> Result<()> {
    let text: String = ips.map(|ip| freed(ip, now)).collect();
    let flags = OFlag::O_WRONLY | OFlag::O_APPEND | OFlag::O_CREAT;
    // One write: a kill leaves all of it or nothing.
    let file = folder.file(FREED, flags, Mode::S_IRUSR | Mode::S_IWUSR);
    let written = file.and_then(|(mut file, _)| file.write_all(text.as_bytes()));
    written.during("write", &folder.path(FREED))
}

/// The addresses that are not to be given out yet, and for how long.
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
    // A list that cannot be read keeps nothing back: an address is worth more.
    let content = folder.read(FREED, MAX_BYTES).map(|(content, _)| content).unwrap_or_default();
    String::from_utf8_lossy(&content).lines().filter_map(parse).collect()
}
