//! Addresses that were freed a short while ago, and are not allocated until packets to the previous
//! owner have expired (`reuseDelay`).
//!
//! The journal's line of a removed lease has the boot id, the seconds since boot, and the wall
//! clock's time. Within one boot the seconds since boot count, because that clock cannot be set.
//! After a reboot the delay is over when it is over by either clock: the address was freed before
//! the boot, so all of the time since boot has passed.

use std::time::Duration;

use crate::attachment::BootIdentity;
use crate::attachment::boot::{current_unix_time, seconds_since_boot};

/// A point in time by two clocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemovalTime {
    boot: String,
    /// Seconds since the start of the boot, suspend included (`CLOCK_BOOTTIME`, which cannot be
    /// set).
    uptime: i64,
    /// Seconds since 1970, by the wall clock.
    wall: i64,
}

/// The configured delay, and the present time.
#[derive(Debug)]
pub(super) struct AddressQuarantine {
    delay: Duration,
    now: RemovalTime,
}

impl RemovalTime {
    fn now_in_boot(boot: &BootIdentity) -> RemovalTime {
        let uptime = seconds_since_boot().unwrap_or_default();
        RemovalTime { boot: boot.id.clone(), uptime, wall: current_unix_time() }
    }

    /// The word for this time in the journal.
    pub(super) fn to_word(&self) -> String {
        format!("{}:{}:{}", self.boot, self.uptime, self.wall)
    }

    pub(super) fn parse(word: &str) -> Option<RemovalTime> {
        let [boot, uptime, wall] = word.split(':').collect::<Vec<_>>()[..] else { return None };
        let (uptime, wall) = (uptime.parse().ok()?, wall.parse().ok()?);
        Some(RemovalTime { boot: boot.to_owned(), uptime, wall })
    }
}

impl AddressQuarantine {
    pub(super) fn new(delay: Duration, boot: &BootIdentity) -> AddressQuarantine {
        AddressQuarantine { delay, now: RemovalTime::now_in_boot(boot) }
    }

    /// The time for an address that is freed now; `None` without a delay.
    pub(super) fn removal_time(&self) -> Option<RemovalTime> {
        (!self.delay.is_zero()).then(|| self.now.clone())
    }

    /// The rest of a delay that began at `then`; `None` if it is over.
    pub(super) fn time_left(&self, then: &RemovalTime) -> Option<Duration> {
        let now = &self.now;
        let passed = if now.boot == then.boot {
            now.uptime.saturating_sub(then.uptime)
        } else {
            now.uptime.max(now.wall.saturating_sub(then.wall))
        };
        let passed = Duration::from_secs(u64::try_from(passed).unwrap_or_default());
        self.delay.checked_sub(passed).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_reboot_a_delay_is_over_by_either_clock() {
        let at = |boot: &str, uptime, wall| RemovalTime { boot: boot.to_owned(), uptime, wall };
        let freed = at("a", 1000, 5000);
        for (now, left) in [
            // Within a boot the wall clock may be set, forward or back.
            (at("a", 1060, 9000), Some(40)),
            (at("a", 1060, 0), Some(40)),
            (at("a", 1100, 5000), None),
            (at("b", 10, 5070), Some(30)),
            (at("b", 10, 5100), None),
            // Set back at the boot.
            (at("b", 60, 0), Some(40)),
            (at("b", 100, 0), None),
        ] {
            let quarantine = AddressQuarantine { delay: Duration::from_secs(100), now };
            assert_eq!(
                quarantine.time_left(&freed).map(|left| left.as_secs()),
                left,
                "{:?}",
                quarantine.now
            );
        }
    }
}
