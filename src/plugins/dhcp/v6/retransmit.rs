//! One exchange of messages with one number, and when to send again: section 15.

use std::time::Duration;

use super::super::timing::{BootTime, Random, Timing};

/// How a message is repeated: RFC 9915 section 7.6 has the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repeat {
    /// The initial retransmission time (IRT).
    pub first: Duration,
    /// The maximum retransmission time (MRT).
    pub most: Duration,
    /// The maximum retransmission count (MRC).
    pub count: u32,
    /// Whether the first wait is never below IRT, so that all servers can answer (section 18.2.1).
    pub full: bool,
}

/// `SOL_TIMEOUT`, `REQ_TIMEOUT` and `DEC_TIMEOUT`.
const SOON: Duration = Duration::from_secs(1);
/// `SOL_MAX_RT`.
const SOL_MAX_RT: Duration = Duration::from_secs(3600);
/// The range that a server may set `SOL_MAX_RT` to (section 21.24).
const SOL_MAX_RT_RANGE: std::ops::RangeInclusive<u32> = 60..=86_400;
/// `REQ_MAX_RT`.
const REQ_MAX_RT: Duration = Duration::from_secs(30);
/// Half of `REQ_MAX_RC`: half a minute, which leaves time to find another server.
const REQ_MAX_RC: u32 = 5;
/// `REN_TIMEOUT` and `REB_TIMEOUT`.
const REN_TIMEOUT: Duration = Duration::from_secs(10);
/// The shortest time between two requests, however short the lease.
const SHORTEST_RENEWAL: Duration = Duration::from_secs(1);
/// `REN_MAX_RT` and `REB_MAX_RT`.
const REN_MAX_RT: Duration = Duration::from_secs(600);
/// `DEC_MAX_RC`.
const DEC_MAX_RC: u32 = 4;

impl Repeat {
    /// For Solicit. `told` is the `SOL_MAX_RT` option of a server, in seconds; without
    /// it the daemon's `-resendmax` holds, as for all other waits.
    pub fn solicit(timing: &Timing, told: Option<u32>) -> Repeat {
        let told = told.filter(|told| SOL_MAX_RT_RANGE.contains(told));
        let most = match told {
            Some(told) => Duration::from_secs(told.into()),
            None => SOL_MAX_RT.min(timing.most),
        };
        Repeat { first: SOON.min(timing.first), most, count: u32::MAX, full: true }
    }

    /// For Request.
    pub fn request(timing: &Timing) -> Repeat {
        let most = REQ_MAX_RT.min(timing.most);
        Repeat { first: SOON.min(timing.first), most, count: REQ_MAX_RC, full: false }
    }

    /// For Decline.
    pub fn decline(timing: &Timing) -> Repeat {
        Repeat { count: DEC_MAX_RC, ..Repeat::request(timing) }
    }

    /// For Renew and Rebind, with the maximum retransmission duration (MRD) `left`: short leases
    /// are renewed in time.
    pub fn renew(left: Duration) -> Repeat {
        let first = REN_TIMEOUT.min(left / 4).max(SHORTEST_RENEWAL);
        Repeat { first, most: REN_MAX_RT, count: u32::MAX, full: false }
    }
}

/// An exchange of messages with one transaction ID.
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    /// The transaction ID.
    pub xid: u32,
    /// How many messages were sent.
    pub sent: u32,
    /// When the last message was sent.
    pub asked: BootTime,
    /// When to send the next message.
    pub until: BootTime,
    began: BootTime,
    wait: Duration,
}

impl Exchange {
    /// An exchange of which nothing was sent yet.
    pub fn begin(now: BootTime, random: &mut Random) -> Exchange {
        let xid = random.number() >> 8;
        Exchange { xid, sent: 0, asked: now, until: now, began: now, wait: Duration::ZERO }
    }

    /// The exchange after another message has been sent now.
    #[must_use]
    pub fn send(self, now: BootTime, repeat: Repeat, random: &mut Random) -> Exchange {
        let (mean, tenth) = match self.wait.saturating_mul(2) {
            _ if self.sent == 0 => (repeat.first, repeat.first / 10),
            doubled if doubled > repeat.most => (repeat.most, repeat.most / 10),
            doubled => (doubled, self.wait / 10),
        };
        let wait = if repeat.full && self.sent == 0 {
            mean + tenth.mul_f64(random.part())
        } else {
            random.around(mean, tenth)
        };
        Exchange { sent: self.sent + 1, asked: now, until: now + wait, wait, ..self }
    }

    /// Whether the maximum retransmission count is reached.
    pub fn is_over(&self, repeat: Repeat) -> bool {
        self.sent >= repeat.count
    }

    /// Hundredths of seconds since the exchange began.
    pub fn elapsed(&self, now: BootTime) -> u16 {
        u16::try_from(now.saturating_sub(self.began).as_millis() / 10).unwrap_or(u16::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn waits(repeat: Repeat, count: usize) -> Vec<f64> {
        let mut random = Random::from_seed(9);
        let mut exchange = Exchange::begin(SECOND, &mut random);
        let one = |_| {
            let now = exchange.until;
            exchange = exchange.send(now, repeat, &mut random);
            exchange.until.saturating_sub(now).as_secs_f64()
        };
        (0..count).map(one).collect()
    }

    #[test]
    fn waits_double_up_to_the_most_within_a_tenth() {
        let repeat = Repeat { first: SECOND, most: 30 * SECOND, count: 5, full: false };
        let all = waits(repeat, 9);
        let mut mean: f64 = 1.0;
        for wait in &all {
            assert!((wait - mean).abs() <= mean / 10.0 + 1e-9, "{all:?}");
            mean = (2.0 * wait).min(30.0);
        }
        assert!((all[8] - 30.0).abs() <= 3.0 && (all[7] - all[8]).abs() > 1e-9, "{all:?}");
    }

    #[test]
    fn the_first_solicit_waits_its_full_time() {
        let timing = Timing { first: 4 * SECOND, most: 62 * SECOND, probe: SECOND };
        for _ in 0..50 {
            let mut random = Random::new();
            let exchange = Exchange::begin(SECOND, &mut random);
            let exchange = exchange.send(SECOND, Repeat::solicit(&timing, None), &mut random);
            assert!(exchange.until >= 2 * SECOND, "{exchange:?}");
            assert!(exchange.xid <= 0x00ff_ffff);
        }
    }

    #[test]
    fn the_daemons_times_bound_those_of_the_standard() {
        let short = Timing { first: SECOND / 2, most: 2 * SECOND, probe: SECOND };
        assert_eq!(Repeat::solicit(&short, None).first, SECOND / 2);
        assert_eq!(Repeat::solicit(&short, None).most, 2 * SECOND);
        assert_eq!(Repeat::request(&short).most, 2 * SECOND);
        let long = Timing { first: 90 * SECOND, most: 90_000 * SECOND, probe: SECOND };
        assert_eq!(Repeat::solicit(&long, None).first, SECOND);
        assert_eq!(Repeat::solicit(&long, None).most, 3600 * SECOND);
        assert_eq!(Repeat::solicit(&short, Some(120)).most, 120 * SECOND, "a server may slow us");
        for nonsense in [0, 59, 86_401, u32::MAX] {
            assert_eq!(Repeat::solicit(&short, Some(nonsense)).most, 2 * SECOND);
        }
        assert_eq!(Repeat::renew(3600 * SECOND).first, 10 * SECOND);
        assert_eq!(Repeat::renew(8 * SECOND).first, 2 * SECOND);
        assert_eq!(Repeat::renew(SECOND).first, SECOND);
    }

    #[test]
    fn time_passes_in_hundredths_and_stops_at_the_most() {
        let exchange = Exchange::begin(SECOND, &mut Random::from_seed(1));
        assert_eq!(exchange.elapsed(SECOND), 0);
        assert_eq!(exchange.elapsed(SECOND * 5 / 2), 150);
        assert_eq!(exchange.elapsed(SECOND * 9999), u16::MAX);
    }
}
