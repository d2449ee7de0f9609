//! The identity of a boot and of a machine.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use nix::time::{ClockId, clock_gettime};

/// The machine id, machine-id(5).
const MACHINE_ID: &str = "/etc/machine-id";
/// A file that the kernel creates at boot and no program writes to: its modification time is the wall clock's time at
/// boot.
const WITNESS: &str = "/dev/null";
/// Largest difference in seconds between boot time and witness if the clock was not set.
const STEADY: i64 = 120;
/// Seconds by which a file must be older than the boot to belong to an earlier boot.
const MARGIN: i64 = 600;

/// The current time by both clocks.
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
    pub(super) fn now(boot: Option<&str>) -> BootTime {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let uptime = clock_gettime(ClockId::CLOCK_BOOTTIME).map(|now| now.tv_sec());
        let uptime = uptime.ok().and_then(|now| u64::try_from(now).ok()).unwrap_or_default();
        BootTime { boot: boot.unwrap_or("-").to_owned(), uptime, wall }
    }

    /// Whether a `delay` that began at `then` is over.
    pub(super) fn is_past(&self, then: &BootTime, delay: Duration) -> bool {
        let delay = delay.as_secs();
        if self.boot == then.boot {
            return self.uptime >= then.uptime.saturating_add(delay);
        }
        self.uptime >= delay || self.wall >= then.wall.saturating_add(delay)
    }

    /// The rest of a `delay` that began at `then`; `None` if the delay is over.
    pub(super) fn left(&self, then: &BootTime, delay: Duration) -> Option<Duration> {
        if self.is_past(then, delay) {
            return None;
        }
        let gone = if self.boot == then.boot {
            self.uptime.saturating_sub(then.uptime)
        } else {
            self.uptime.max(self.wall.saturating_sub(then.wall))
        };
        Some(delay.saturating_sub(Duration::from_secs(gone)))
    }
}

/// Files with an older modification time, in seconds since 1970, are certainly of an earlier boot. `None` if the wall
/// clock was set since boot: then a file of this boot may look older than the boot.
pub(super) fn start() -> Option<i64> {
    let now = |clock| clock_gettime(clock).map(|now| now.tv_sec());
    let start = now(ClockId::CLOCK_REALTIME).ok()? - now(ClockId::CLOCK_BOOTTIME).ok()?;
    let witness = fs::metadata(WITNESS).ok()?.mtime();
    ((start - witness).abs() <= STEADY).then(|| start.min(witness) - MARGIN)
}

/// The machine's id; `None` if there is none, or one on a tmpfs, which changes at each boot.
#[cfg(not(test))]
pub(super) fn machine_id() -> Option<String> {
    read(MACHINE_ID)
}

#[cfg(test)]
pub(super) fn machine_id() -> Option<String> {
    super::tests::MACHINE.get().map(str::to_owned).or_else(|| read(MACHINE_ID))
}

fn read(path: &str) -> Option<String> {
    let file = File::open(path).ok()?;
    if fstatfs(&file).ok()?.filesystem_type() == TMPFS_MAGIC {
        return None;
    }
    let mut text = String::new();
    file.take(64).read_to_string(&mut text).ok()?;
    let id = text.trim();
    // An image may have the text "uninitialized" in the file.
    let is_id = id.len() == 32 && id.chars().all(|c| c.is_ascii_hexdigit());
    is_id.then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_machine_id_is_none() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        for text in ["", "uninitialized\n", "0123456789abcdef0123456789abcde"] {
            fs::write(path, text).unwrap();
            assert_eq!(read(path), None, "{text}");
        }
        assert_eq!(read("/no/such"), None);
    }
}
