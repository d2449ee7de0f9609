//! What tells one boot from another, and one machine from another.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use nix::time::{ClockId, clock_gettime};

/// What systemd and its like give a machine once and for all.
const MACHINE_ID: &str = "/etc/machine-id";
/// A file that the kernel makes at the start of a boot and no program writes to: its time is what the
/// wall clock showed then.
const WITNESS: &str = "/dev/null";
/// How far start of the boot and witness may be apart, in seconds, if the clock was not set.
const STEADY: i64 = 120;
/// How much older than the boot a file must be to be of an earlier one, in seconds.
const MARGIN: i64 = 600;

/// The time of a command, by both clocks.
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

    /// Whether `delay` is over that began at `then`.
    pub(super) fn is_past(&self, then: &BootTime, delay: Duration) -> bool {
        let delay = delay.as_secs();
        if self.boot == then.boot {
            return self.uptime >= then.uptime.saturating_add(delay);
        }
        self.uptime >= delay || self.wall >= then.wall.saturating_add(delay)
    }

    /// How long `delay` still lasts that began at `then`; `None` if it is over.
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

/// The time below which a file is certainly of an earlier boot, in seconds since 1970. `None` where the
/// wall clock was set since the boot began: then a file of this boot may look older than the boot.
pub(super) fn start() -> Option<i64> {
    let now = |clock| clock_gettime(clock).map(|now| now.tv_sec());
    let start = now(ClockId::CLOCK_REALTIME).ok()? - now(ClockId::CLOCK_BOOTTIME).ok()?;
    let witness = fs::metadata(WITNESS).ok()?.mtime();
    ((start - witness).abs() <= STEADY).then(|| start.min(witness) - MARGIN)
}

/// The machine's id; `None` if it has none, or one in memory, which is made anew at each boot.
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
    // An image may have "uninitialized" there.
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
