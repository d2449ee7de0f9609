//! The limits of a configuration, and their token buckets.

use serde::Deserialize;

use crate::netlink::traffic::{TICKS_PER_8_MICROSECONDS, TokenBucket};
use cni::error::{Error, Result};

/// The maximum queueing delay of a packet, in milliseconds.
const LATENCY: u64 = 25;

/// The kernel's unit of a bucket.
const NANOSECONDS_PER_TICK: u128 = 64;

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BandwidthConfig {
    /// The rate at which the container may receive, in bits per second. 0 is no limit.
    ingress_rate: u64,
    /// The largest burst that the container may receive, in bits.
    ingress_burst: u64,
    /// The rate at which the container may send, in bits per second. 0 is no limit.
    egress_rate: u64,
    /// The largest burst that the container may send, in bits.
    egress_burst: u64,
    /// The maximum queueing delay of a packet, in milliseconds; other packets are dropped.
    /// Default: 25.
    latency: Option<u64>,
    runtime_config: BandwidthRuntimeConfig,
    shaped_subnets: Vec<String>,
    unshaped_subnets: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BandwidthRuntimeConfig {
    bandwidth: BandwidthRates,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct BandwidthRates {
    ingress_rate: u64,
    ingress_burst: u64,
    egress_rate: u64,
    egress_burst: u64,
}

/// The token buckets. Both directions are seen from the container.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct BandwidthLimits {
    pub(super) ingress: Option<TokenBucket>,
    pub(super) egress: Option<TokenBucket>,
}

impl BandwidthConfig {
    /// The rates of the configuration; if it has none, those of the runtime.
    fn effective_rates(&self) -> BandwidthRates {
        let BandwidthConfig { ingress_rate, ingress_burst, egress_rate, egress_burst, .. } = *self;
        let own = BandwidthRates { ingress_rate, ingress_burst, egress_rate, egress_burst };
        if own == BandwidthRates::default() { self.runtime_config.bandwidth } else { own }
    }

    /// The limits; code 7 if they are invalid.
    pub(super) fn resolve_limits(&self) -> Result<BandwidthLimits> {
        let BandwidthRates { ingress_rate, ingress_burst, egress_rate, egress_burst } =
            self.effective_rates();
        let latency = self.latency.unwrap_or(LATENCY);
        Ok(BandwidthLimits {
            ingress: token_bucket("ingress", ingress_rate, ingress_burst, latency)?,
            egress: token_bucket("egress", egress_rate, egress_burst, latency)?,
        })
    }

    /// The configured keys of releases 1.5.0 and 1.5.1 of the reference, which have no effect.
    pub(super) fn obsolete_keys(&self) -> impl Iterator<Item = &'static str> {
        let keys =
            [("shapedSubnets", &self.shaped_subnets), ("unshapedSubnets", &self.unshaped_subnets)];
        keys.into_iter().filter(|(_, subnets)| !subnets.is_empty()).map(|(key, _)| key)
    }

    /// Whether there is any limit, valid or not.
    pub(super) fn has_limits(&self) -> bool {
        self.effective_rates() != BandwidthRates::default()
    }
}

/// The token bucket of one direction. As in the reference every division rounds down.
fn token_bucket(
    direction: &str,
    rate: u64,
    burst: u64,
    latency: u64,
) -> Result<Option<TokenBucket>> {
    match (rate, burst) {
        (0, 0) => return Ok(None),
        (_, 0) => return Err(Error::config("if rate is set, burst must also be set")),
        (0, _) => return Err(Error::config("if burst is set, rate must also be set")),
        _ => {}
    }
    let (rate_bytes, burst_bytes) = (rate / 8, burst / 8);
    if burst_bytes >= u64::from(u32::MAX) {
        return Err(Error::config("burst cannot be more than 4GB"));
    }
    if rate_bytes == 0 {
        let msg = format!("{direction}Rate {rate} is less than a byte a second");
        return Err(Error::config(msg).with_details("rates are in bits a second: write 8 or more"));
    }
    let microseconds = u128::from(burst_bytes) * 1_000_000 / u128::from(rate_bytes);
    let ticks = microseconds * u128::from(TICKS_PER_8_MICROSECONDS) / 8;
    if bucket_capacity(rate_bytes, ticks) == 0 {
        let msg = format!("{direction}Burst {burst} is too small for {direction}Rate {rate}");
        let least = least_burst(rate_bytes) * 8;
        return Err(Error::config(msg).with_details(format!("at least {least} bits are needed")));
    }
    let waiting = u128::from(rate_bytes) * u128::from(latency) / 1000 + u128::from(burst_bytes);
    let saturated = |n: u128| u32::try_from(n).unwrap_or(u32::MAX);
    Ok(Some(TokenBucket { rate: rate_bytes, buffer: saturated(ticks), limit: saturated(waiting) }))
}

/// The bytes of a bucket of so many of the kernel's ticks, at this rate in bytes a second. The
/// kernel refuses a bucket for less than a byte.
pub(super) fn bucket_capacity(rate: u64, ticks: u128) -> u128 {
    ticks * NANOSECONDS_PER_TICK * u128::from(rate) / 1_000_000_000
}

/// The least burst in bytes that the kernel accepts at this rate in bytes a second.
fn least_burst(rate: u64) -> u128 {
    let rate = u128::from(rate);
    let ticks = 1_000_000_000_u128.div_ceil(NANOSECONDS_PER_TICK * rate);
    let microseconds = (ticks * 8).div_ceil(TICKS_PER_8_MICROSECONDS.into());
    (microseconds * rate).div_ceil(1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni::json::Json;

    fn limits(text: &str) -> Result<BandwidthLimits> {
        Json::parse(text.as_bytes()).unwrap().decode::<BandwidthConfig>().unwrap().resolve_limits()
    }

    fn of(rate: u64, burst: u64) -> Result<Option<TokenBucket>> {
        token_bucket("ingress", rate, burst, LATENCY)
    }

    #[test]
    fn numbers_equal_those_of_the_reference() {
        for (rate, burst, (rate_bytes, buffer, limit)) in [
            (8, 8, (1, 15_625_000, 1)),
            (16, 8, (2, 7_812_500, 1)),
            (8000, 80, (1000, 156_250, 35)),
            (8_000_000, 800_000, (1_000_000, 1_562_500, 125_000)),
            (3_000_000, 1_000_001, (375_000, 5_208_328, 134_375)),
        ] {
            let expected = TokenBucket { rate: rate_bytes, buffer, limit };
            assert_eq!(of(rate, burst).unwrap(), Some(expected), "{rate} {burst}");
        }
    }

    #[test]
    fn large_numbers_do_not_overflow() {
        const LARGEST: u64 = 4 * 1024 * 1024 * 1024 * 8 - 16;
        let bucket = of(8, LARGEST).unwrap().unwrap();
        assert_eq!((bucket.buffer, bucket.limit), (u32::MAX, u32::MAX - 1));
        let bucket = of(8_000_000_000_000, LARGEST).unwrap().unwrap();
        assert_eq!((bucket.rate, bucket.limit), (1_000_000_000_000, u32::MAX));
        assert!(of(u64::MAX, LARGEST).is_err());
        assert_eq!(of(8, LARGEST + 8).unwrap_err().message(), "burst cannot be more than 4GB");
    }

    #[test]
    fn invalid_limits_are_refused() {
        assert_eq!(of(0, 0).unwrap(), None);
        assert_eq!(of(8, 0).unwrap_err().message(), "if rate is set, burst must also be set");
        assert_eq!(of(0, 8).unwrap_err().message(), "if burst is set, rate must also be set");
        assert_eq!(of(7, 8).unwrap_err().message(), "ingressRate 7 is less than a byte a second");
        let error = of(80_000_000_000, 8000).unwrap_err();
        assert_eq!(error.message(), "ingressBurst 8000 is too small for ingressRate 80000000000");
        assert_eq!(error.details(), "at least 80000 bits are needed");
        assert!(of(80_000_000_000, 80_000).is_ok());
        assert!(of(8, 7).is_err());
        for rate in [8, 2_000_000, 8_000_000, 9_999_992, 80_000_000_000] {
            let error = of(rate, 7).unwrap_err();
            let least = error.details().split(' ').nth(2).unwrap().parse().unwrap();
            assert!(of(rate, least).is_ok() && of(rate, least - 1).is_err(), "{rate}: {least}");
        }
    }

    #[test]
    fn the_configuration_overrides_the_runtime() {
        let runtime = r#""runtimeConfig":{"bandWidth":{"ingressRate":8,"ingressBurst":8}}"#;
        let both = format!(r#"{{"egressRate":16,"egressBurst":8,{runtime}}}"#);
        let found = limits(&both).unwrap();
        assert_eq!((found.ingress, found.egress.map(|tbf| tbf.rate)), (None, Some(2)));
        for nothing in ["", r#""egressRate":0,"#, r#""egressRate":null,"#] {
            let found = limits(&format!("{{{nothing}{runtime}}}")).unwrap();
            assert_eq!((found.ingress.map(|tbf| tbf.rate), found.egress), (Some(1), None));
        }
        let error = limits(&format!(r#"{{"egressBurst":8,{runtime}}}"#)).unwrap_err();
        assert_eq!(error.message(), "if burst is set, rate must also be set");
        assert!(limits("{}").unwrap() == BandwidthLimits::default());
    }

    #[test]
    fn latency_bounds_the_queue() {
        let text = r#"{"ingressRate":8000000,"ingressBurst":80000,"latency":100}"#;
        assert_eq!(limits(text).unwrap().ingress.unwrap().limit, 110_000);
    }
}
