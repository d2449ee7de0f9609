//! `stats`: how many calls of which plugin and verb, how many failed, how long they took; how full the pools of
//! host-local are.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use serde::Deserialize;

use super::duration;
use super::recording::Recording;
use crate::error::Result;
use crate::leases::Listing;
use crate::runtime::{EXTENSIONS, NetworkList, conf_files};

/// The quantiles that are told, and how they are written.
const QUANTILES: [(f64, &str); 3] = [(0.5, "0.5"), (0.9, "0.9"), (0.99, "0.99")];

/// The calls of a plugin with one verb.
#[derive(Default)]
struct Calls {
    /// How many ended with which code; 0 is success.
    codes: BTreeMap<u32, u64>,
    /// Nanoseconds, sorted. A failed call that nobody asked to record has none.
    durations: Vec<u64>,
}

impl Calls {
    /// Of all in these recordings, by plugin and verb.
    fn of(recordings: &[Recording]) -> BTreeMap<(&str, &str), Calls> {
        let mut all: BTreeMap<_, Calls> = BTreeMap::new();
        for recording in recordings {
            let key = (recording.get("cni.plugin"), recording.get("cni.command"));
            if key.0.is_empty() {
                continue;
            }
            let calls = all.entry(key).or_default();
            *calls
                .codes
                .entry(recording.get("cni.error.code").parse().unwrap_or(0))
                .or_default() += 1;
            if recording.spans.len() > 1 || recording.call().error.is_none() {
                calls.durations.push(recording.call().duration());
            }
        }
        for calls in all.values_mut() {
            calls.durations.sort_unstable();
        }
        all
    }

    /// The shortest duration that this part of the calls does not exceed.
    fn quantile(&self, part: f64) -> Option<u64> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a ring has some thousand calls"
        )]
        let rank = (part * self.durations.len() as f64).ceil() as usize;
        self.durations.get(rank.max(1) - 1).copied()
    }

    fn failed(&self) -> u64 {
        self.codes.iter().filter(|(code, _)| **code != 0).map(|(_, count)| count).sum()
    }
}

pub(super) fn text(recordings: &[Recording]) -> String {
    let heading =
        ["PLUGIN", "VERB", "CALLS", "FAILED", "MEDIAN", "90 %", "99 %"].map(str::to_owned);
    let line = |((plugin, verb), calls): (&(&str, &str), &Calls)| {
        let quantile = |(part, _)| calls.quantile(part).map_or("-".to_owned(), duration);
        let [median, ninety, most] = QUANTILES.map(quantile);
        let count = calls.codes.values().sum::<u64>().to_string();
        let (plugin, verb) = ((*plugin).to_owned(), (*verb).to_owned());
        [plugin, verb, count, calls.failed().to_string(), median, ninety, most]
    };
    let all = Calls::of(recordings);
    crate::tool::columns(&[heading].into_iter().chain(all.iter().map(line)).collect::<Vec<_>>())
}

/// The text format of Prometheus, version 0.0.4.
pub(super) fn prometheus(recordings: &[Recording], conf: &Path, leases: &Path) -> Result<String> {
    let all = Calls::of(recordings);
    let mut calls = Metric::new(
        "cnibox_recorded_calls",
        "gauge",
        "Calls in the flight recorder, by code; 0 is success.",
    );
    let mut time = Metric::new(
        "cnibox_recorded_call_duration_seconds",
        "summary",
        "How long the calls in the flight recorder took.",
    );
    for ((plugin, verb), of_verb) in &all {
        let labels = [("plugin", *plugin), ("command", *verb)];
        for (code, count) in &of_verb.codes {
            calls.push("", &[&labels[..], &[("code", &code.to_string())]].concat(), count);
        }
        for (part, name) in QUANTILES {
            if let Some(nanos) = of_verb.quantile(part) {
                time.push("", &[&labels[..], &[("quantile", name)]].concat(), seconds(nanos));
            }
        }
        time.push("_sum", &labels, seconds(of_verb.durations.iter().sum()));
        time.push("_count", &labels, of_verb.durations.len());
    }
    let mut taken = Metric::new(
        "cnibox_ipam_addresses_taken",
        "gauge",
        "Addresses of host-local that are leased or reserved.",
    );
    let mut total = Metric::new(
        "cnibox_ipam_addresses",
        "gauge",
        "Addresses of host-local that can be leased.",
    );
    for pool in Pool::all(conf, leases)? {
        let labels = [("network", pool.network.as_str())];
        taken.push("", &labels, pool.taken);
        total.push("", &labels, pool.total);
    }
    Ok([calls, time, taken, total].map(|metric| metric.text).concat())
}

#[expect(clippy::cast_precision_loss, reason = "microseconds are enough")]
fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

/// A metric with its samples.
struct Metric {
    name: &'static str,
    text: String,
}

impl Metric {
    fn new(name: &'static str, kind: &str, help: &str) -> Metric {
        Metric { name, text: format!("# HELP {name} {help}\n# TYPE {name} {kind}\n") }
    }

    fn push(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl Display) {
        let escaped =
            |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let label = |(name, value): &(&str, &str)| format!("{name}=\"{}\"", escaped(value));
        let labels: Vec<String> = labels.iter().map(label).collect();
        self.text +=
            &[self.name, suffix, "{", &labels.join(","), "} ", &value.to_string(), "\n"].concat();
    }
}

/// The addresses of a network.
struct Pool {
    network: String,
    taken: usize,
    total: f64,
}

/// The keys of host-local that say which addresses there are.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Ipam {
    data_dir: Option<PathBuf>,
    ranges: Vec<Vec<Range>>,
    #[serde(flatten)]
    single: Range,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Range {
    subnet: Option<IpNet>,
    range_start: Option<IpAddr>,
    range_end: Option<IpAddr>,
}

impl Range {
    /// How many addresses can be leased, without network, broadcast and gateway.
    fn size(&self) -> f64 {
        let Some(subnet) = self.subnet else { return 0.0 };
        let number = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => u128::from(ip.to_bits()),
            IpAddr::V6(ip) => ip.to_bits(),
        };
        let broadcast = u128::from(subnet.addr().is_ipv4());
        let start = self.range_start.map_or(number(subnet.network()) + 2, number);
        let end = self.range_end.map_or(number(subnet.broadcast()) - broadcast, number);
        #[expect(
            clippy::cast_precision_loss,
            reason = "of a large pool the order of magnitude counts"
        )]
        let size = (end + 1).saturating_sub(start) as f64;
        size
    }
}

impl Pool {
    fn all(conf: &Path, leases: &Path) -> Result<Vec<Pool>> {
        let mut pools = Vec::new();
        for file in conf_files(conf, &EXTENSIONS)? {
            let Ok(list) = NetworkList::from_any_file(&file) else { continue };
            let is_ours = |plugin: &&crate::runtime::PluginConf| plugin.ipam_type == "host-local";
            for plugin in list.plugins.iter().filter(is_ours) {
                let Some(ipam) = plugin.json().get_present("ipam") else { continue };
                let Ok(ipam) = ipam.decode::<Ipam>() else { continue };
                let dir = ipam.data_dir.as_deref().unwrap_or(leases);
                let listing = Listing::open_existing(dir, &list.name)?;
                let taken = listing.map_or(0, |listing| listing.taken().len());
                let ranges = ipam.ranges.iter().flatten().chain([&ipam.single]);
                let total = ranges.map(Range::size).sum();
                pools.push(Pool { network: list.name.clone(), taken, total });
            }
        }
        Ok(pools)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_ranges() {
        let range = |subnet: &str, start: Option<&str>, end: Option<&str>| {
            let ip = |text: &str| text.parse().unwrap();
            Range {
                subnet: Some(subnet.parse().unwrap()),
                range_start: start.map(ip),
                range_end: end.map(ip),
            }
        };
        let sizes = [
            range("10.0.0.0/24", None, None),
            range("10.0.0.0/24", Some("10.0.0.10"), Some("10.0.0.19")),
            range("10.0.0.0/24", Some("10.0.0.200"), Some("10.0.0.100")),
            range("fd00::/120", None, None),
            Range::default(),
        ]
        .map(|range| range.size().to_string());
        assert_eq!(sizes, ["253", "10", "0", "254", "0"]);
    }

    #[test]
    fn quantiles() {
        let calls = Calls { durations: (1..=100).collect(), ..Calls::default() };
        assert_eq!(QUANTILES.map(|(part, _)| calls.quantile(part)), [Some(50), Some(90), Some(99)]);
        assert_eq!(Calls::default().quantile(0.5), None);
    }

    #[test]
    fn labels_are_escaped() {
        let mut metric = Metric::new("m", "gauge", "About.");
        metric.push("_sum", &[("a", "b\"\\\n")], 1.5);
        assert_eq!(metric.text, "# HELP m About.\n# TYPE m gauge\nm_sum{a=\"b\\\"\\\\\\n\"} 1.5\n");
    }
}
