//! `stats`: the number of calls and failures and the durations, by plugin and verb, and the use of the address pools of
//! host-local.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Recording, duration, seconds};
use crate::error::Result;
use crate::leases::Listing;
use crate::tool::columns;
use crate::tool::folders::Folders;

/// The reported quantiles in percent, and their labels.
const QUANTILES: [(usize, &str); 3] = [(50, "0.5"), (90, "0.9"), (99, "0.99")];

/// The calls of a plugin with one verb.
#[derive(Default)]
struct Calls {
    /// The number of calls by error code; 0 is success.
    codes: BTreeMap<u32, u64>,
    /// Nanoseconds, sorted; without failed calls whose spans were not recorded.
    durations: Vec<u64>,
}

impl Calls {
    /// The calls of these recordings by plugin and verb.
    fn group(recordings: &[Recording]) -> BTreeMap<(&str, &str), Calls> {
        let mut all: BTreeMap<_, Calls> = BTreeMap::new();
        for recording in recordings.iter().filter(|call| !call.get("cni.plugin").is_empty()) {
            let key = (recording.get("cni.plugin"), recording.get("cni.command"));
            let calls = all.entry(key).or_default();
            let code = recording.get("cni.error.code").parse().unwrap_or(0);
            *calls.codes.entry(code).or_default() += 1;
            if recording.spans.len() > 1 || recording.call().error.is_none() {
                calls.durations.push(recording.call().duration());
            }
        }
        for calls in all.values_mut() {
            calls.durations.sort_unstable();
        }
        all
    }

    /// The number of calls, and of those that failed.
    fn counts(&self) -> (u64, u64) {
        let count = self.codes.values().sum();
        (count, count - self.codes.get(&0).unwrap_or(&0))
    }

    /// The shortest duration that this share of the calls does not exceed (nearest rank).
    fn quantile(&self, percent: usize) -> Option<u64> {
        let rank = (percent * self.durations.len()).div_ceil(100);
        self.durations.get(rank.max(1) - 1).copied()
    }
}

pub(super) fn json(recordings: &[Recording]) -> Vec<Value> {
    let object = |((plugin, verb), calls): ((&str, &str), Calls)| {
        let [median, ninety, most] =
            QUANTILES.map(|(percent, _)| calls.quantile(percent).map(seconds));
        let (count, failed) = calls.counts();
        json!({
            "plugin": plugin, "verb": verb, "calls": count, "failed": failed,
            "0.5": median, "0.9": ninety, "0.99": most,
        })
    };
    Calls::group(recordings).into_iter().map(object).collect()
}

pub(super) fn text(recordings: &[Recording]) -> String {
    let heading = ["PLUGIN", "VERB", "CALLS", "FAILED", "MEDIAN", "90 %", "99 %"];
    let line = |((plugin, verb), calls): ((&str, &str), Calls)| {
        let quantile = |(percent, _)| calls.quantile(percent).map_or("-".to_owned(), duration);
        let [median, ninety, most] = QUANTILES.map(quantile);
        let (count, failed) = calls.counts();
        [plugin.into(), verb.into(), count.to_string(), failed.to_string(), median, ninety, most]
    };
    let lines = Calls::group(recordings).into_iter().map(line);
    columns([heading.map(str::to_owned)].into_iter().chain(lines).collect())
}

/// The text format of Prometheus, version 0.0.4.
pub(super) fn prometheus(recordings: &[Recording], folders: &Folders) -> Result<String> {
    let mut calls = Metric::gauge("cnibox_recorded_calls", "Recorded calls by code; 0 is success.");
    let name = "cnibox_recorded_call_duration_seconds";
    let mut time = Metric::new(name, "summary", "Durations of recorded calls.");
    for ((plugin, verb), of_verb) in Calls::group(recordings) {
        let labels = [("plugin", plugin), ("command", verb)];
        for (code, count) in &of_verb.codes {
            calls.push("", &[&labels[..], &[("code", &code.to_string())]].concat(), count);
        }
        for (percent, name) in QUANTILES {
            if let Some(nanos) = of_verb.quantile(percent) {
                time.push("", &[&labels[..], &[("quantile", name)]].concat(), seconds(nanos));
            }
        }
        time.push("_sum", &labels, seconds(of_verb.durations.iter().sum()));
        time.push("_count", &labels, of_verb.durations.len());
    }
    let help = "Addresses of host-local that are leased or reserved.";
    let mut taken = Metric::gauge("cnibox_ipam_addresses_taken", help);
    let help = "Addresses of host-local that can be leased.";
    let mut total = Metric::gauge("cnibox_ipam_addresses", help);
    pools(folders, &mut taken, &mut total)?;
    Ok([calls, time, taken, total].map(|metric| metric.text).concat())
}

/// A metric with its samples.
struct Metric {
    name: &'static str,
    text: String,
}

impl Metric {
    fn gauge(name: &'static str, help: &str) -> Metric {
        Metric::new(name, "gauge", help)
    }

    fn new(name: &'static str, kind: &str, help: &str) -> Metric {
        Metric { name, text: format!("# HELP {name} {help}\n# TYPE {name} {kind}\n") }
    }

    fn push(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl Display) {
        let escaped =
            |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let label = |(name, value): &(&str, &str)| format!("{name}=\"{}\"", escaped(value));
        let labels: Vec<String> = labels.iter().map(label).collect();
        let sample = format!("{}{suffix}{{{}}} {value}\n", self.name, labels.join(","));
        self.text += &sample;
    }
}

/// Adds the used and all addresses of each range of each network with host-local.
fn pools(folders: &Folders, taken: &mut Metric, total: &mut Metric) -> Result<()> {
    for list in folders.networks() {
        let mut used: HashSet<IpAddr> = HashSet::new();
        for store in folders.stores(Some(&list.name))? {
            let listing = Listing::open_existing(&store.data_dir, &store.network)?;
            used.extend(listing.iter().flat_map(Listing::taken));
        }
        for plugin in list.plugins.iter().filter(|plugin| plugin.ipam_type == "host-local") {
            let Some(ipam) = plugin.json().get_present("ipam") else { continue };
            let Ok(ipam) = ipam.decode::<Ipam>() else { continue };
            for range in ipam.ranges.iter().flatten().chain([&ipam.single]) {
                let Some((name, numbers)) = range.span() else { continue };
                let labels = [("network", list.name.as_str()), ("range", &name)];
                let is_in = |ip: &&IpAddr| {
                    range.subnet.is_some_and(|subnet| subnet.contains(*ip))
                        && numbers.contains(&number(**ip))
                };
                taken.push("", &labels, used.iter().filter(is_in).count());
                let size = (numbers.end() + 1).saturating_sub(*numbers.start());
                total.push("", &labels, size);
            }
        }
    }
    Ok(())
}

fn number(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => u128::from(ip.to_bits()),
        IpAddr::V6(ip) => ip.to_bits(),
    }
}

/// The keys of host-local that define its addresses.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Ipam {
    ranges: Vec<Vec<Range>>,
    #[serde(flatten)]
    single: Range,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Range {
    subnet: Option<IpNet>,
    range_start: Option<IpAddr>,
    range_end: Option<IpAddr>,
}

impl Range {
    /// The name of the range, and the addresses that can be leased, as numbers: without network, broadcast and gateway.
    fn span(&self) -> Option<(String, RangeInclusive<u128>)> {
        let subnet = self.subnet?.trunc();
        let broadcast = u128::from(subnet.addr().is_ipv4());
        let start = self.range_start.map_or(number(subnet.network()) + 2, number);
        let end = self.range_end.map_or(number(subnet.broadcast()) - broadcast, number);
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
    fn names_and_sizes_of_ranges() {
        let span = |json: &str| {
            let range: Range = serde_json::from_str(json).unwrap();
            let (name, span) = range.span()?;
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
    fn quantiles() {
        let calls = Calls { durations: (1..=100).collect(), ..Calls::default() };
        assert_eq!(
            QUANTILES.map(|(percent, _)| calls.quantile(percent)),
            [Some(50), Some(90), Some(99)]
        );
        assert_eq!(Calls::default().quantile(50), None);
    }

    #[test]
    fn labels_are_escaped() {
        let mut metric = Metric::new("m", "gauge", "About.");
        metric.push("_sum", &[("a", "b\"\\\n")], 1.5);
        assert_eq!(metric.text, "# HELP m About.\n# TYPE m gauge\nm_sum{a=\"b\\\"\\\\\\n\"} 1.5\n");
    }
}
