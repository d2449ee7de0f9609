//! Addresses that were freed a short while ago, and are not allocated until packets to the previous owner have expired
//! (`reuseDelay`).
//!
//! A line of `.cnibox/freed` has an address, the boot id, the seconds since boot, and the wall clock's time. Within one
//! boot the seconds since boot count, because that clock cannot be set. After a reboot the delay is over when it is over by
//! either clock: all of the time since boot is after the release.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use nix::time::{ClockId, clock_gettime};

use super::journal::{UNKNOWN, line, words};
use crate::attachment::Boot;
use crate::files::dir::Dir;
use crate::files::{During, Result};

/// The list, in the network's folder `.cnibox`, and its temporary name while it is written.
const FREED: &str = "freed";
const TEMP: &str = "freed.new";
/// A list of fewer lines is not rewritten.
const MIN_LINES: usize = 256;
/// Limit of the list's size in bytes.
const MAX_BYTES: usize = 1 << 28;

/// A point in time by two clocks.
#[derive(Clone, Debug)]
pub(super) struct BootTime {
    /// The boot id.
    pub(super) boot: String,
    /// Seconds since the start of the boot, suspend included (`CLOCK_BOOTTIME`, which cannot be set).
    pub(super) uptime: u64,
    /// Seconds since 1970.
    pub(super) wall: u64,
}

impl BootTime {
    pub(super) fn now(boot: Option<&Boot>) -> BootTime {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let uptime = clock_gettime(ClockId::CLOCK_BOOTTIME).map(|now| now.tv_sec());
        let uptime = uptime.ok().and_then(|now| u64::try_from(now).ok()).unwrap_or_default();
        BootTime { boot: boot.map_or(UNKNOWN, |boot| &boot.id).to_owned(), uptime, wall }
    }

    /// The rest of a `delay` that began at `then`; `None` if the delay is over.
    fn left(&self, then: &BootTime, delay: Duration) -> Option<Duration> {
        let passed = if self.boot == then.boot {
            self.uptime.saturating_sub(then.uptime)
        } else {
            self.uptime.max(self.wall.saturating_sub(then.wall))
        };
        delay.checked_sub(Duration::from_secs(passed)).filter(|left| !left.is_zero())
    }
}

/// Adds addresses that are about to be freed.
pub(super) fn add(folder: &Dir, now: &BootTime, ips: impl Iterator<Item = IpAddr>) -> Result<()> {
    let text: String = ips.map(|ip| freed(ip, now)).collect();
    let flags = OFlag::O_WRONLY | OFlag::O_APPEND | OFlag::O_CREAT;
    // One write: after a kill the file has all lines or none.
    let file = folder.file(FREED, flags, Mode::S_IRUSR | Mode::S_IWUSR);
    let written = file.and_then(|(mut file, _)| file.write_all(text.as_bytes()));
    written.during("write", &folder.path(FREED))
}

/// The addresses that must not be allocated yet, with the time left.
pub(super) fn quarantined(
    folder: Option<&Dir>,
    boot: Option<&Boot>,
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
        .filter(|(_, then)| now.left(then, delay).is_some())
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
