//! Moments, waits and the randomness in them.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// A point in time: how long the node is up, time asleep included.
pub type BootTime = Duration;

/// Never.
pub const NEVER: BootTime = Duration::MAX;

/// How long to wait after the second refusal; doubled for each further one. Some servers offer one
/// address to all who ask at the same time, so it is random by a third.
const AFTER_REFUSAL: Duration = Duration::from_millis(250);
/// How long to wait after an address turned out to be taken (RFC 2131, section 3.1, step 5),
/// unless it is the first one.
const AFTER_CONFLICT: Duration = Duration::from_secs(10);

/// Now. It goes on while the node sleeps, as the server's clock does.
pub fn now() -> BootTime {
    // A kernel without this clock is older than 2.6.39.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

/// Times in files: milliseconds, `u64::MAX` for [`NEVER`].
pub mod millis {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::{BootTime, Duration, NEVER};

    /// For `#[serde(with)]`.
    pub fn serialize<S: Serializer>(time: &BootTime, s: S) -> Result<S::Ok, S::Error> {
        u64::try_from(time.as_millis()).unwrap_or(u64::MAX).serialize(s)
    }

    /// For `#[serde(with)]`.
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<BootTime, D::Error> {
        let millis = u64::deserialize(d)?;
        Ok(if millis == u64::MAX { NEVER } else { Duration::from_millis(millis) })
    }
}

/// Random numbers, good enough for transaction ids that only this link sees.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Unpredictable numbers.
    pub fn new() -> Random {
        // The standard library keys its hasher with the kernel's random numbers.
        Random::from_seed(RandomState::new().build_hasher().finish())
    }

    /// The same numbers for the same seed.
    pub fn from_seed(seed: u64) -> Random {
        Random(seed | 1)
    }

    /// The next number (xorshift64*).
    pub fn number(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    /// From 0 to 1.
    pub fn part(&mut self) -> f64 {
        f64::from(self.number()) / f64::from(u32::MAX)
    }

    /// `mean`, more or less by `spread`.
    pub fn around(&mut self, mean: Duration, spread: Duration) -> Duration {
        (mean + spread.mul_f64(2.0 * self.part())).saturating_sub(spread)
    }

    /// `time`, or up to 5 % less: those who started together are not to ask together for ever.
    /// Never late: the server may count on the moment.
    pub fn early(&mut self, time: Duration) -> Duration {
        time.saturating_sub((time / 20).mul_f64(self.part()))
    }
}

impl Default for Random {
    fn default() -> Random {
        Random::new()
    }
}

/// How long to wait for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// For the answer to the first message; doubled for each further one.
    pub first: Duration,
    /// At most for the answer to one message.
    pub most: Duration,
    /// How long a host that has the address may take to answer; zero sends no probe.
    pub probe: Duration,
}

impl Default for Timing {
    /// As RFC 2131 has it in section 4.1, with the reference's longest wait.
    fn default() -> Timing {
        Timing {
            first: Duration::from_secs(4),
            most: Duration::from_secs(62),
            probe: Duration::from_millis(200),
        }
    }
}

impl Timing {
    /// The wait after `earlier` messages were not answered: RFC 2131, section 4.1, makes it
    /// random by a second, which here is never more than a quarter.
    pub fn wait(&self, earlier: u32, random: &mut Random) -> Duration {
        let doubled = self.first.saturating_mul(1 << earlier.min(16));
        let mean = doubled.min(self.most);
        random.around(mean, (mean / 4).min(Duration::from_secs(1)))
    }

    /// The wait before a new beginning after a refusal and `earlier` others.
    pub fn after_refusal(&self, earlier: u32, random: &mut Random) -> Duration {
        // The first time it is most likely that the server has just changed.
        let Some(n) = earlier.checked_sub(1) else { return Duration::ZERO };
        let mean = AFTER_REFUSAL.saturating_mul(1 << n.min(16)).min(self.most);
        random.around(mean, mean / 3)
    }

    /// The same after an address was declined.
    pub fn after_conflict(earlier: u32) -> Duration {
        if earlier == 0 { Duration::ZERO } else { AFTER_CONFLICT }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_most_and_differ() {
        let timing = Timing {
            first: Duration::from_secs(4),
            most: Duration::from_secs(64),
            probe: Duration::ZERO,
        };
        let mut random = Random::from_seed(7);
        for (earlier, mean) in [(0, 4), (1, 8), (4, 64), (5, 64), (4_000_000_000, 64)] {
            let waits: Vec<_> = (0..50).map(|_| timing.wait(earlier, &mut random)).collect();
            let near = |wait: &Duration| wait.as_secs_f64() - f64::from(mean);
            assert!(waits.iter().all(|wait| near(wait).abs() <= 1.0), "{waits:?}");
            assert!(waits.iter().any(|wait| *wait != waits[0]));
        }
    }

    #[test]
    fn the_clock_runs() {
        assert!(now() > Duration::ZERO && now() <= now());
    }
}
