//! `stats`: the number of calls and failures and the durations, by plugin and verb, and the use of
//! the address pools of host-local.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{RecordedCall, milliseconds_text, nanos_to_seconds};
use crate::leases::LeaseListing;
use crate::tool::directories::ToolDirectories;
use crate::tool::format_table;
use cni::error::Result;

/// The reported quantiles in percent, and their labels.
const QUANTILES: [(usize, &str); 3] = [(50, "0.5"), (90, "0.9"), (99, "0.99")];

/// The calls of a plugin with one verb.
#[derive(Default)]
struct CallStatistics {
    /// The number of calls by error code; 0 is success.
    codes: BTreeMap<u32, u64>,
    /// The durations in nanoseconds, sorted. Failed calls whose spans were not recorded have none.
    durations: Vec<u64>,
}

impl CallStatistics {
    /// The calls of these recordings by plugin and verb.
    fn group_by_verb(recordings: &[RecordedCall]) -> BTreeMap<(&str, &str), CallStatistics> {
        let mut all: BTreeMap<_, CallStatistics> = BTreeMap::new();
        for recording in
            recordings.iter().filter(|call| !call.call_attribute("cni.plugin").is_empty())
        {
            let key =
                (recording.call_attribute("cni.plugin"), recording.call_attribute("cni.command"));
            let calls = all.entry(key).or_default();
            let code = recording.call_attribute("cni.error.code").parse().unwrap_or(0);
            *calls.codes.entry(code).or_default() += 1;
            if recording.spans.len() > 1 || recording.call_span().error.is_none() {
                calls.durations.push(recording.call_span().duration_nanos());
            }
        }
        for calls in all.values_mut() {
            calls.durations.sort_unstable();
        }
        all
    }

    /// The number of calls, and the number of failed calls.
    fn call_counts(&self) -> (u64, u64) {
        let count = self.codes.values().sum();
        (count, count - self.codes.get(&0).unwrap_or(&0))
    }

    /// The shortest duration that this share of the calls does not exceed (nearest rank).
    fn duration_quantile(&self, percent: usize) -> Option<u64> {
        let rank = (percent * self.durations.len()).div_ceil(100);
        self.durations.get(rank.max(1) - 1).copied()
    }
}

pub(super) fn json_objects(recordings: &[RecordedCall]) -> Vec<Value> {
    CallStatistics::group_by_verb(recordings)
        .into_iter()
        .map(|((plugin, verb), calls)| {
            let [median, ninety, most] = QUANTILES
                .map(|(percent, _)| calls.duration_quantile(percent).map(nanos_to_seconds));
            let (count, failed) = calls.call_counts();
            json!({
                "plugin": plugin, "verb": verb, "calls": count, "failed": failed,
                "0.5": median, "0.9": ninety, "0.99": most,
            })
        })
        .collect()
}

pub(super) fn text_table(recordings: &[RecordedCall]) -> String {
    let heading = ["PLUGIN", "VERB", "CALLS", "FAILED", "MEDIAN", "90 %", "99 %"];
    let lines =
        CallStatistics::group_by_verb(recordings).into_iter().map(|((plugin, verb), calls)| {
            let [median, ninety, most] = QUANTILES.map(|(percent, _)| {
                calls.duration_quantile(percent).map_or("-".to_owned(), milliseconds_text)
            });
            let (count, failed) = calls.call_counts();
            [
                plugin.into(),
                verb.into(),
                count.to_string(),
                failed.to_string(),
                median,
                ninety,
                most,
            ]
        });
    format_table(heading, lines)
}

/// The text format of Prometheus, version 0.0.4.
pub(super) fn prometheus_text(
    recordings: &[RecordedCall],
    directories: &ToolDirectories,
) -> Result<String> {
    let mut calls = PrometheusMetric::new_gauge(
        "cnibox_recorded_calls",
        "Recorded calls by code; 0 is success.",
    );
    let name = "cnibox_recorded_call_duration_seconds";
    let mut time = PrometheusMetric::new(name, "summary", "Durations of recorded calls.");
    for ((plugin, verb), of_verb) in CallStatistics::group_by_verb(recordings) {
        let labels = [("plugin", plugin), ("command", verb)];
        for (code, count) in &of_verb.codes {
            calls.push_sample("", &[&labels[..], &[("code", &code.to_string())]].concat(), count);
        }
        for (percent, name) in QUANTILES {
            if let Some(nanos) = of_verb.duration_quantile(percent) {
                time.push_sample(
                    "",
                    &[&labels[..], &[("quantile", name)]].concat(),
                    nanos_to_seconds(nanos),
                );
            }
        }
        time.push_sample("_sum", &labels, nanos_to_seconds(of_verb.durations.iter().sum()));
        time.push_sample("_count", &labels, of_verb.durations.len());
    }
    let help = "Addresses of host-local that are leased or reserved.";
    let mut taken = PrometheusMetric::new_gauge("cnibox_ipam_addresses_taken", help);
    let help = "Addresses of host-local that can be leased.";
    let mut total = PrometheusMetric::new_gauge("cnibox_ipam_addresses", help);
    add_pool_samples(directories, &mut taken, &mut total)?;
    Ok([calls, time, taken, total].map(|metric| metric.text).concat())
}

/// A metric with its samples.
struct PrometheusMetric {
    name: &'static str,
    text: String,
}

impl PrometheusMetric {
    fn new_gauge(name: &'static str, help: &str) -> PrometheusMetric {
        PrometheusMetric::new(name, "gauge", help)
    }

    fn new(name: &'static str, kind: &str, help: &str) -> PrometheusMetric {
        PrometheusMetric { name, text: format!("# HELP {name} {help}\n# TYPE {name} {kind}\n") }
    }

    fn push_sample(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl Display) {
        let escaped =
            |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let labels: Vec<String> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        let sample = format!("{}{suffix}{{{}}} {value}\n", self.name, labels.join(","));
        self.text += &sample;
    }
}

/// Adds the number of used addresses and of all addresses for each range of each network with
/// host-local.
fn add_pool_samples(
    directories: &ToolDirectories,
    taken: &mut PrometheusMetric,
    total: &mut PrometheusMetric,
) -> Result<()> {
    for list in directories.configured_networks() {
        let mut used: HashSet<IpAddr> = HashSet::new();
        for store in directories.find_lease_directories(Some(&list.name))? {
            let listing = LeaseListing::open_existing(&store.data_dir, &store.network)?;
            used.extend(listing.iter().flat_map(LeaseListing::taken_addresses));
        }
        for plugin in list.plugins.iter().filter(|plugin| plugin.ipam_type == "host-local") {
            let Some(ipam) = plugin.json().get_present_member("ipam") else { continue };
            let Ok(ipam) = ipam.decode::<HostLocalPoolKeys>() else { continue };
            for range in ipam.ranges.iter().flatten().chain([&ipam.single]) {
                let Some((name, numbers)) = range.name_and_numbers() else { continue };
                let labels = [("network", list.name.as_str()), ("range", &name)];
                taken.push_sample(
                    "",
                    &labels,
                    used.iter()
                        .filter(|ip| {
                            range.subnet.is_some_and(|subnet| subnet.contains(*ip))
                                && numbers.contains(&ip_number(**ip))
                        })
                        .count(),
                );
                let size = (numbers.end() + 1).saturating_sub(*numbers.start());
                total.push_sample("", &labels, size);
            }
        }
    }
    Ok(())
}

fn ip_number(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => u128::from(ip.to_bits()),
        IpAddr::V6(ip) => ip.to_bits(),
    }
}

/// The keys of host-local that define its addresses.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct HostLocalPoolKeys {
    ranges: Vec<Vec<PoolRangeKeys>>,
    #[serde(flatten)]
    single: PoolRangeKeys,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PoolRangeKeys {
    subnet: Option<IpNet>,
    range_start: Option<IpAddr>,
    range_end: Option<IpAddr>,
}

impl PoolRangeKeys {
    /// The name of the range, and the addresses that can be leased, as numbers: without network,
    /// broadcast and gateway.
    fn name_and_numbers(&self) -> Option<(String, RangeInclusive<u128>)> {
        let subnet = self.subnet?.trunc();
        let broadcast = u128::from(subnet.addr().is_ipv4());
        let start = self.range_start.map_or(ip_number(subnet.network()) + 2, ip_number);
        let end = self.range_end.map_or(ip_number(subnet.broadcast()) - broadcast, ip_number);
        let name = match (self.range_start, self.range_end) {
            (None, None) => subnet.to_string(),
            (start, end) => {
                let bound = |ip: Option<IpAddr>| ip.map(|ip| ip.to_string()).unwrap_or_default();
                format!("{subnet} {}-{}", bound(start), bound(end))
            }
        };
        Some((name, start..=end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_have_a_name_and_a_size() {
        let span = |json: &str| {
            let range: PoolRangeKeys = serde_json::from_str(json).unwrap();
            let (name, span) = range.name_and_numbers()?;
            Some(format!("{name} {}", (span.end() + 1).saturating_sub(*span.start())))
        };
        for (json, expected) in [
            (r#"{"subnet":"10.0.0.0/24"}"#, Some("10.0.0.0/24 253")),
            (
                r#"{"subnet":"10.0.0.1/24","rangeStart":"10.0.0.10","rangeEnd":"10.0.0.19"}"#,
                Some("10.0.0.0/24 10.0.0.10-10.0.0.19 10"),
            ),
            (
                r#"{"subnet":"10.0.0.0/24","rangeStart":"10.0.0.200"}"#,
                Some("10.0.0.0/24 10.0.0.200- 55"),
            ),
            (
                r#"{"subnet":"10.0.0.0/24","rangeStart":"10.0.0.9","rangeEnd":"10.0.0.1"}"#,
                Some("10.0.0.0/24 10.0.0.9-10.0.0.1 0"),
            ),
            (r#"{"subnet":"fd00::/64"}"#, Some("fd00::/64 18446744073709551614")),
            ("{}", None),
        ] {
            assert_eq!(span(json).as_deref(), expected, "{json}");
        }
    }

    #[test]
    fn quantiles_of_durations_are_exact() {
        let calls = CallStatistics { durations: (1..=100).collect(), ..CallStatistics::default() };
        assert_eq!(
            QUANTILES.map(|(percent, _)| calls.duration_quantile(percent)),
            [Some(50), Some(90), Some(99)]
        );
        assert_eq!(CallStatistics::default().duration_quantile(50), None);
    }

    #[test]
    fn labels_are_escaped() {
        let mut metric = PrometheusMetric::new("m", "gauge", "About.");
        metric.push_sample("_sum", &[("a", "b\"\\\n")], 1.5);
        assert_eq!(metric.text, "# HELP m About.\n# TYPE m gauge\nm_sum{a=\"b\\\"\\\\\\n\"} 1.5\n");
    }
}
