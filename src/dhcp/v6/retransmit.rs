//! Retransmission timeouts, RFC 9915 section 15.

use std::time::Duration;

use super::super::timing::{Exchange, Random, Timing};

/// The timeouts of a message, RFC 9915 section 7.6.
#[derive(Debug)]
pub struct Repeat {
    /// The initial retransmission time (IRT).
    pub first: Duration,
    /// The maximum retransmission time (MRT).
    pub most: Duration,
    /// Whether the first timeout is never below IRT, so that all servers can reply (section 18.2.1).
    pub full: bool,
}

/// `SOL_TIMEOUT`, `REQ_TIMEOUT` and `DEC_TIMEOUT`.
const SOON: Duration = Duration::from_secs(1);
/// `SOL_MAX_RT`.
const SOL_MAX_RT: Duration = Duration::from_secs(3600);
/// The valid values of a server's `SOL_MAX_RT` (section 21.24).
const SOL_MAX_RT_RANGE: std::ops::RangeInclusive<u32> = 60..=86_400;
/// `REQ_MAX_RT`.
const REQ_MAX_RT: Duration = Duration::from_secs(30);
/// `REN_TIMEOUT` and `REB_TIMEOUT`.
const REN_TIMEOUT: Duration = Duration::from_secs(10);
/// The shortest timeout of a Renew or Rebind, whatever the lease time.
const SHORTEST_RENEWAL: Duration = Duration::from_secs(1);
/// `REN_MAX_RT` and `REB_MAX_RT`.
const REN_MAX_RT: Duration = Duration::from_secs(600);

impl Repeat {
    /// For Solicit. The maximum is `sol_max_rt`, the server's option in seconds, or else the daemon's `-resendmax`.
    pub fn solicit(timing: &Timing, sol_max_rt: Option<u32>) -> Repeat {
        let most = match sol_max_rt.filter(|seconds| SOL_MAX_RT_RANGE.contains(seconds)) {
            Some(seconds) => Duration::from_secs(seconds.into()),
            None => SOL_MAX_RT.min(timing.most),
        };
        Repeat { first: SOON.min(timing.first), most, full: true }
    }

    /// For Request and Decline.
    pub fn request(timing: &Timing) -> Repeat {
        let most = REQ_MAX_RT.min(timing.most);
        Repeat { first: SOON.min(timing.first), most, full: false }
    }

    /// For Renew and Rebind, with the maximum retransmission duration (MRD) `left`: the first timeout is short enough
    /// for short leases.
    pub fn renew(left: Duration) -> Repeat {
        let first = REN_TIMEOUT.min(left / 4).max(SHORTEST_RENEWAL);
        Repeat { first, most: REN_MAX_RT, full: false }
    }

    /// The timeout of the next message of an exchange.
    pub fn wait(&self, exchange: &Exchange, random: &mut Random) -> Duration {
        let (mean, tenth) = match exchange.wait.saturating_mul(2) {
            _ if exchange.sent == 0 => (self.first, self.first / 10),
            doubled if doubled > self.most => (self.most, self.most / 10),
            doubled => (doubled, exchange.wait / 10),
        };
        if self.full && exchange.sent == 0 {
            mean + tenth.mul_f64(random.part())
        } else {
            random.around(mean, tenth)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn waits(repeat: &Repeat, count: usize) -> Vec<f64> {
        let mut random = Random::from_seed(9);
        let mut exchange = Exchange::begin(SECOND, 1);
        let one = |_| {
            let now = exchange.asked + exchange.wait;
            exchange = exchange.send(now, repeat.wait(&exchange, &mut random));
            exchange.wait.as_secs_f64()
        };
        (0..count).map(one).collect()
    }

    #[test]
    fn waits_double_up_to_the_most_within_a_tenth() {
        let repeat = Repeat { first: SECOND, most: 30 * SECOND, full: false };
        let all = waits(&repeat, 9);
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
            let mut random = Random::default();
            let exchange = Exchange::begin(SECOND, 1);
            let wait = Repeat::solicit(&timing, None).wait(&exchange, &mut random);
            let exchange = exchange.send(SECOND, wait);
            assert!(exchange.asked + exchange.wait >= 2 * SECOND, "{exchange:?}");
        }
    }

    #[test]
    fn the_daemons_timeouts_limit_those_of_the_rfc() {
        let short = Timing { first: SECOND / 2, most: 2 * SECOND, probe: SECOND };
        assert_eq!(Repeat::solicit(&short, None).first, SECOND / 2);
        assert_eq!(Repeat::solicit(&short, None).most, 2 * SECOND);
        assert_eq!(Repeat::request(&short).most, 2 * SECOND);
        let long = Timing { first: 90 * SECOND, most: 90_000 * SECOND, probe: SECOND };
        assert_eq!(Repeat::solicit(&long, None).first, SECOND);
        assert_eq!(Repeat::solicit(&long, None).most, 3600 * SECOND);
        assert_eq!(
            Repeat::solicit(&short, Some(120)).most,
            120 * SECOND,
            "the limit of the server"
        );
        for nonsense in [0, 59, 86_401, u32::MAX] {
            assert_eq!(Repeat::solicit(&short, Some(nonsense)).most, 2 * SECOND);
        }
        assert_eq!(Repeat::renew(3600 * SECOND).first, 10 * SECOND);
        assert_eq!(Repeat::renew(8 * SECOND).first, 2 * SECOND);
        assert_eq!(Repeat::renew(SECOND).first, SECOND);
    }
}
