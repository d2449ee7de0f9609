//! Retransmission timeouts, RFC 9915 section 15.

use std::time::Duration;

use super::super::timing::{ClientTiming, MessageExchange, RandomGenerator};

/// The timeouts of a message, RFC 9915 section 7.6.
#[derive(Debug)]
pub struct RetransmitTimeouts {
    /// The initial retransmission time (IRT).
    pub first: Duration,
    /// The maximum retransmission time (MRT).
    pub most: Duration,
    /// Whether the first timeout is never below IRT, so that all servers can reply (section
    /// 18.2.1).
    pub full: bool,
}

/// `SOL_TIMEOUT`, `REQ_TIMEOUT` and `DEC_TIMEOUT`.
const SOON: Duration = Duration::from_secs(1);
const SOL_MAX_RT: Duration = Duration::from_secs(3600);
/// The valid values of a server's `SOL_MAX_RT` (section 21.24).
const SOL_MAX_RT_RANGE: std::ops::RangeInclusive<u32> = 60..=86_400;
const REQ_MAX_RT: Duration = Duration::from_secs(30);
/// `REN_TIMEOUT` and `REB_TIMEOUT`.
const REN_TIMEOUT: Duration = Duration::from_secs(10);
/// The shortest timeout of a Renew or Rebind, whatever the lease time.
const SHORTEST_RENEWAL: Duration = Duration::from_secs(1);
/// `REN_MAX_RT` and `REB_MAX_RT`.
const REN_MAX_RT: Duration = Duration::from_secs(600);

impl RetransmitTimeouts {
    /// The timeouts of a Solicit. The maximum is `sol_max_rt`, the server's option in seconds, or
    /// else the daemon's `-resendmax`.
    pub fn for_solicit(timing: &ClientTiming, sol_max_rt: Option<u32>) -> RetransmitTimeouts {
        let most = match sol_max_rt.filter(|seconds| SOL_MAX_RT_RANGE.contains(seconds)) {
            Some(seconds) => Duration::from_secs(seconds.into()),
            None => SOL_MAX_RT.min(timing.most),
        };
        RetransmitTimeouts { first: SOON.min(timing.first), most, full: true }
    }

    /// The timeouts of a Request or Decline.
    pub fn for_request(timing: &ClientTiming) -> RetransmitTimeouts {
        let most = REQ_MAX_RT.min(timing.most);
        RetransmitTimeouts { first: SOON.min(timing.first), most, full: false }
    }

    /// The timeouts of a Renew or Rebind, with the maximum retransmission duration (MRD) `left`:
    /// the first timeout is short enough for short leases.
    pub fn for_renew(left: Duration) -> RetransmitTimeouts {
        let first = REN_TIMEOUT.min(left / 4).max(SHORTEST_RENEWAL);
        RetransmitTimeouts { first, most: REN_MAX_RT, full: false }
    }

    pub fn next_timeout(
        &self,
        exchange: &MessageExchange,
        random: &mut RandomGenerator,
    ) -> Duration {
        let (mean, tenth) = match exchange.wait.saturating_mul(2) {
            _ if exchange.sent == 0 => (self.first, self.first / 10),
            doubled if doubled > self.most => (self.most, self.most / 10),
            doubled => (doubled, exchange.wait / 10),
        };
        if self.full && exchange.sent == 0 {
            mean + tenth.mul_f64(random.next_fraction())
        } else {
            random.vary_by(mean, tenth)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn waits(repeat: &RetransmitTimeouts, count: usize) -> Vec<f64> {
        let mut random = RandomGenerator::from_seed(9);
        let mut exchange = MessageExchange::begin_at(SECOND, 1);
        (0..count)
            .map(|_| {
                let now = exchange.asked + exchange.wait;
                exchange = exchange.after_sending(now, repeat.next_timeout(&exchange, &mut random));
                exchange.wait.as_secs_f64()
            })
            .collect()
    }

    #[test]
    fn waits_double_up_to_the_maximum_with_10_percent_jitter() {
        let repeat = RetransmitTimeouts { first: SECOND, most: 30 * SECOND, full: false };
        let all = waits(&repeat, 9);
        let mut mean: f64 = 1.0;
        for wait in &all {
            assert!((wait - mean).abs() <= mean / 10.0 + 1e-9, "{all:?}");
            mean = (2.0 * wait).min(30.0);
        }
        assert!((all[8] - 30.0).abs() <= 3.0 && (all[7] - all[8]).abs() > 1e-9, "{all:?}");
    }

    #[test]
    fn the_first_solicit_waits_at_least_its_timeout() {
        let timing = ClientTiming { first: 4 * SECOND, most: 62 * SECOND, probe: SECOND };
        for _ in 0..50 {
            let mut random = RandomGenerator::default();
            let exchange = MessageExchange::begin_at(SECOND, 1);
            let wait =
                RetransmitTimeouts::for_solicit(&timing, None).next_timeout(&exchange, &mut random);
            let exchange = exchange.after_sending(SECOND, wait);
            assert!(exchange.asked + exchange.wait >= 2 * SECOND, "{exchange:?}");
        }
    }

    #[test]
    fn the_daemons_timeouts_limit_those_of_the_rfc() {
        let short = ClientTiming { first: SECOND / 2, most: 2 * SECOND, probe: SECOND };
        assert_eq!(RetransmitTimeouts::for_solicit(&short, None).first, SECOND / 2);
        assert_eq!(RetransmitTimeouts::for_solicit(&short, None).most, 2 * SECOND);
        assert_eq!(RetransmitTimeouts::for_request(&short).most, 2 * SECOND);
        let long = ClientTiming { first: 90 * SECOND, most: 90_000 * SECOND, probe: SECOND };
        assert_eq!(RetransmitTimeouts::for_solicit(&long, None).first, SECOND);
        assert_eq!(RetransmitTimeouts::for_solicit(&long, None).most, 3600 * SECOND);
        assert_eq!(
            RetransmitTimeouts::for_solicit(&short, Some(120)).most,
            120 * SECOND,
            "the limit of the server"
        );
        for nonsense in [0, 59, 86_401, u32::MAX] {
            assert_eq!(RetransmitTimeouts::for_solicit(&short, Some(nonsense)).most, 2 * SECOND);
        }
        assert_eq!(RetransmitTimeouts::for_renew(3600 * SECOND).first, 10 * SECOND);
        assert_eq!(RetransmitTimeouts::for_renew(8 * SECOND).first, 2 * SECOND);
        assert_eq!(RetransmitTimeouts::for_renew(SECOND).first, SECOND);
    }
}
