//! Clock, retransmission timers and random numbers, for both families.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// A point in time: the time since boot, suspend included.
pub type BootClockTime = Duration;

pub const NEVER: BootClockTime = Duration::MAX;

/// The wait after the second refusal, doubled for each further refusal and randomized by a third,
/// because some servers offer the same address to all clients that start at the same time.
const AFTER_REFUSAL: Duration = Duration::from_millis(250);

/// The current time. `CLOCK_BOOTTIME` advances during suspend, as the server's clock does.
pub fn boot_time_now() -> BootClockTime {
    // Linux has had this clock since 2.6.39.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

/// Times in files: milliseconds, `u64::MAX` for [`NEVER`]. For `#[serde(with)]`.
pub mod millis {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::{BootClockTime, Duration, NEVER};

    pub fn serialize<S: Serializer>(time: &BootClockTime, s: S) -> Result<S::Ok, S::Error> {
        u64::try_from(time.as_millis()).unwrap_or(u64::MAX).serialize(s)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<BootClockTime, D::Error> {
        let millis = u64::deserialize(d)?;
        Ok(if millis == u64::MAX { NEVER } else { Duration::from_millis(millis) })
    }
}

/// Random numbers, sufficient for transaction IDs that are visible on one link only.
#[derive(Debug)]
pub struct RandomGenerator(u64);

impl Default for RandomGenerator {
    /// A generator with an unpredictable seed.
    fn default() -> RandomGenerator {
        // The standard library seeds its hasher from the kernel's random numbers.
        RandomGenerator::from_seed(RandomState::new().build_hasher().finish())
    }
}

impl RandomGenerator {
    pub fn from_seed(seed: u64) -> RandomGenerator {
        RandomGenerator(seed | 1)
    }

    /// The next number (xorshift64*).
    pub fn next_number(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    /// A number between 0 and 1.
    pub fn next_fraction(&mut self) -> f64 {
        f64::from(self.next_number()) / f64::from(u32::MAX)
    }

    /// `mean` plus or minus up to `spread`.
    pub fn vary_by(&mut self, mean: Duration, spread: Duration) -> Duration {
        (mean + spread.mul_f64(2.0 * self.next_fraction())).saturating_sub(spread)
    }

    /// `time` minus up to 5 %, so that clients that started together do not renew together. Never
    /// later than `time`, because the server may rely on T1 and T2.
    pub fn slightly_earlier(&mut self, time: Duration) -> Duration {
        if time == NEVER {
            NEVER
        } else {
            time.saturating_sub((time / 20).mul_f64(self.next_fraction()))
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct LeaseTimers {
    /// T1: renew with the server of the lease.
    pub renew: BootClockTime,
    /// T2: renew with any server.
    pub rebind: BootClockTime,
    /// The end of the lease.
    pub expires: BootClockTime,
}

impl LeaseTimers {
    /// The timers of a lease that was requested at `asked`, from T1, T2 and the lease time of the
    /// server.
    pub fn new(
        asked: BootClockTime,
        [t1, t2, time]: [Duration; 3],
        random: &mut RandomGenerator,
    ) -> LeaseTimers {
        let t1 = random.slightly_earlier(t1);
        let t2 = random.slightly_earlier(t2).max(t1);
        let [renew, rebind, expires] = [t1, t2, time].map(|t| asked.saturating_add(t));
        LeaseTimers { renew, rebind, expires }
    }
}

/// An exchange of messages with one transaction ID.
#[derive(Clone, Copy, Debug)]
pub struct MessageExchange {
    pub xid: u32,
    pub began: BootClockTime,
    /// How many messages were sent.
    pub sent: u32,
    /// When the last message was sent.
    pub asked: BootClockTime,
    /// The timeout of the last message.
    pub wait: Duration,
}

impl MessageExchange {
    /// An exchange without messages.
    pub fn begin_at(now: BootClockTime, xid: u32) -> MessageExchange {
        MessageExchange { xid, began: now, sent: 0, asked: now, wait: Duration::ZERO }
    }

    /// The time from its begin to the last message.
    pub fn elapsed_time(&self) -> Duration {
        self.asked.saturating_sub(self.began)
    }

    /// The exchange after another message with this timeout.
    #[must_use]
    pub fn after_sending(self, now: BootClockTime, wait: Duration) -> MessageExchange {
        MessageExchange { sent: self.sent + 1, asked: now, wait, ..self }
    }
}

/// The configured timeouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientTiming {
    /// The timeout of the first message, doubled for each further message.
    pub first: Duration,
    /// The longest timeout of a message.
    pub most: Duration,
    /// How long to wait for a reply to the probes of an address; zero sends no probes.
    pub probe: Duration,
}

impl Default for ClientTiming {
    /// RFC 2131 section 4.1, with the longest timeout of the reference.
    fn default() -> ClientTiming {
        ClientTiming {
            first: Duration::from_secs(4),
            most: Duration::from_secs(62),
            probe: Duration::from_millis(200),
        }
    }
}

impl ClientTiming {
    /// The timeout of a message after `earlier` messages without a reply. RFC 2131 section 4.1
    /// randomizes it by a second, here by at most a quarter.
    pub fn message_timeout(&self, earlier: u32, random: &mut RandomGenerator) -> Duration {
        let doubled = self.first.saturating_mul(1 << earlier.min(16));
        let mean = doubled.min(self.most);
        random.vary_by(mean, (mean / 4).min(Duration::from_secs(1)))
    }

    /// The wait before a restart after a refusal that follows `earlier` refusals.
    pub fn after_refusal(&self, earlier: u32, random: &mut RandomGenerator) -> Duration {
        // The most likely cause of the first refusal is a change of the server's configuration.
        let Some(n) = earlier.checked_sub(1) else { return Duration::ZERO };
        let mean = AFTER_REFUSAL.saturating_mul(1 << n.min(16)).min(self.most);
        random.vary_by(mean, mean / 3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_maximum_and_are_random() {
        let timing = ClientTiming {
            first: Duration::from_secs(4),
            most: Duration::from_secs(64),
            probe: Duration::ZERO,
        };
        let mut random = RandomGenerator::from_seed(7);
        for (earlier, mean) in [(0, 4), (1, 8), (4, 64), (5, 64), (4_000_000_000, 64)] {
            let waits: Vec<_> =
                (0..50).map(|_| timing.message_timeout(earlier, &mut random)).collect();
            let near = |wait: &Duration| wait.as_secs_f64() - f64::from(mean);
            assert!(waits.iter().all(|wait| near(wait).abs() <= 1.0), "{waits:?}");
            assert!(waits.iter().any(|wait| *wait != waits[0]));
        }
    }

    #[test]
    fn the_clock_advances() {
        assert!(boot_time_now() > Duration::ZERO && boot_time_now() <= boot_time_now());
    }
}
