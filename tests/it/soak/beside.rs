//! What runs beside the workers: STATUS, GC, doctor, flushes, a full disk, clocks that jump, and
//! measurements of the daemons and of the files.

use std::fs::{self, File};
use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use super::Soak;
use super::networks::Network;
use super::report::Trouble;

/// The directories with state. Each is a file system, or below one, of a limited size.
const STATE: [&str; 2] = ["/var/lib/cni", "/run"];

/// What administrators and other programs do to rules. The last but one restores what was saved at
/// its last turn, with rules of containers that have ended since, and without those of others.
const FLUSHES: [&str; 10] = [
    "nft flush ruleset",
    "iptables -t nat -F; iptables -t nat -X; iptables -F; iptables -X",
    "iptables -t nat -F POSTROUTING",
    "iptables -D FORWARD 1",
    "nft delete table inet cnibox_masquerade; nft delete table inet cnibox_firewall",
    "nft flush table inet cnibox_masquerade; nft flush table inet cnibox_portmap",
    "nft flush map inet cnibox_masquerade pods4; nft flush map inet cnibox_portmap any",
    "nft flush chain inet cnibox_firewall forward; nft flush chain bridge cnibox_spoof prerouting",
    "iptables-restore < DIR/saved; iptables-save > DIR/saved",
    KUBE_PROXY,
];

/// As kube-proxy writes all its rules, in its own chains.
const KUBE_PROXY: &str = "\
    for round in 1 2 3; do iptables-restore --noflush <<END
*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-SOAK - [0:0]
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp --dport 53 -j KUBE-SVC-SOAK
-A KUBE-SVC-SOAK -p tcp -j DNAT --to-destination 10.11.0.2:53
COMMIT
END
    iptables -t nat -C PREROUTING -j KUBE-SERVICES || iptables -t nat -I PREROUTING -j KUBE-SERVICES
    done
    iptables -t nat -D PREROUTING -j KUBE-SERVICES
    iptables -t nat -F KUBE-SERVICES; iptables -t nat -F KUBE-SVC-SOAK
    iptables -t nat -X KUBE-SERVICES; iptables -t nat -X KUBE-SVC-SOAK";

/// How long `repair --watch` may take on a busy machine.
const HEALED_WITHIN: Duration = Duration::from_secs(60);

impl Soak<'_> {
    /// A part of the duration, between two limits in milliseconds.
    fn part(&self, divisor: u32, least: u64, most: u64) -> Duration {
        let [least, most] = [least, most].map(Duration::from_millis);
        (self.plan.duration / divisor).clamp(least, most)
    }

    /// STATUS of the networks of a group in turn, twice a second.
    pub(super) fn ask_for_status(&self, group: usize) {
        let networks = self.networks.iter().filter(|network| network.group == group);
        let networks: Vec<&Network> = networks.collect();
        for network in networks.iter().cycle() {
            if self.are_workers_done() {
                return;
            }
            let begin = Instant::now();
            let outcome = self.cnitool(&["status", network.name]).run();
            self.report.call(("STATUS", network.name), "-", begin, &outcome);
            thread::sleep(Duration::from_millis(500).saturating_sub(begin.elapsed()));
        }
    }

    /// GC of a runtime, for each network in turn, and that of the node.
    pub(super) fn collect_in_turn(&self) {
        for network in self.networks.iter().cycle() {
            if self.are_workers_done() {
                return;
            }
            self.collect(network);
            thread::sleep(self.part(100, 300, 2000));
            self.collect_the_dead();
        }
    }

    pub(super) fn collect_the_dead(&self) {
        let begin = Instant::now();
        let outcome = self.on_directory(&["gc"]).run();
        self.report.call(("cnibox gc", "*"), "-", begin, &outcome);
    }

    /// Findings are expected: containers have ended without DEL.
    pub(super) fn consult_doctor(&self) {
        while !self.are_workers_done() {
            let begin = Instant::now();
            let mut outcome = self.on_directory(&["doctor", "--json"]).run();
            let has_findings = outcome.status == Some(1) && outcome.stderr.is_empty();
            outcome.status = outcome.status.filter(|_| !has_findings).or(Some(0));
            self.report.call(("doctor", "*"), "-", begin, &outcome);
            thread::sleep(self.part(100, 1000, 5000));
        }
    }

    /// Flushes rules, until all are restored each time. Before that nothing is missing. The last
    /// flush ends also what an administrator has restored of containers that had ended: nothing in
    /// the rules of the reference says whose they are.
    pub(super) fn flush(&self) {
        let mut random = self.random(1001);
        let directory = self.node.path("").display().to_string();
        let pause = self.part(60, 2000, 15_000);
        self.node.sh(&format!("iptables-save > {directory}/saved"));
        loop {
            thread::sleep(pause);
            let begin = Instant::now();
            if let Some(text) = self.missing() {
                self.report.failed(("repair --dry-run", "*"), "-", begin, &text);
            }
            let is_last = self.is_over();
            let flush = if is_last { FLUSHES[0] } else { random.any(&FLUSHES) };
            self.flush_once(&flush.replace("DIR", &directory));
            if is_last {
                return;
            }
        }
    }

    fn flush_once(&self, flush: &str) {
        let begin = Instant::now();
        self.report.begin(Trouble::Flush);
        self.report.say(flush.lines().next().unwrap_or_default().trim());
        self.node.sh(&format!("{{ {flush}\n}} > /dev/null 2>&1 || true"));
        self.report.event("flushes");
        let mut missing = self.missing();
        while missing.is_some() && begin.elapsed() < HEALED_WITHIN {
            thread::sleep(Duration::from_millis(100));
            missing = self.missing();
        }
        self.report.took("healing", begin);
        self.report.end(Trouble::Flush);
        if let Some(text) = missing {
            let text = format!("{flush} is not healed: {text}");
            self.report.failed(("watch", "*"), "-", Instant::now(), &text);
        }
    }

    /// What `repair` would restore. It may also say what a container lacks whose DEL runs, was killed
    /// or had no space.
    fn missing(&self) -> Option<String> {
        let outcome = self.tool(&["repair", "--dry-run"]).run();
        let is_end = |line: &str| {
            let ends = [" not found", "no record of its policy; attach the container again"];
            line.starts_with("cnibox: container ") && ends.iter().any(|end| line.ends_with(end))
        };
        let are_ends = outcome.stderr.lines().all(is_end);
        let is_whole = outcome.stdout == "nothing was missing\n" || outcome.stdout.is_empty();
        (!is_whole || !are_ends).then(|| outcome.stdout + &outcome.stderr)
    }

    /// Fills each file system once, for half a minute of an hour.
    pub(super) fn fill_the_disk(&self) {
        for (directory, percent) in STATE.into_iter().zip([30, 60]) {
            let start = self.plan.duration * percent / 100;
            thread::sleep(start.saturating_sub(self.begin.elapsed()));
            let (begin, path) = (Instant::now(), format!("{directory}/filler"));
            self.report.begin(Trouble::FullDisk);
            self.report.event("full disks");
            self.report.say(&format!("{directory} is full"));
            let mut file = File::create(&path).unwrap();
            while begin.elapsed() < self.part(120, 1000, 60_000) {
                // Also what others free meanwhile.
                for size in [65_536, 4096] {
                    while file.write_all(&vec![0; size]).is_ok() {}
                }
                thread::sleep(Duration::from_millis(50));
            }
            fs::remove_file(path).unwrap();
            drop(file);
            self.report.say("it has space");
            self.report.end(Trouble::FullDisk);
        }
    }

    /// Sets modification times as if the wall clock had been set in between.
    pub(super) fn set_times(&self) {
        let mut random = self.random(1002);
        while !self.is_over() {
            let line = "find /var/lib/cni /run/cni -type f -o -type d 2> /dev/null || true";
            let found = self.node.sh(line);
            let found: Vec<&str> = found.lines().collect();
            let days = *random.any(&["-400 days", "-1 day", "now", "+1 day", "+400 days"]);
            let paths: Vec<&str> = (0..10).map(|_| *random.any(&found)).collect();
            let line = format!("touch -c -d '{days}' '{}' 2> /dev/null || true", paths.join("' '"));
            self.node.sh(&line);
            self.report.event("jumps of the wall clock");
            thread::sleep(self.part(600, 300, 2000));
        }
    }

    /// Measures these processes and the files every second.
    pub(super) fn measure(&self, daemons: &[(&'static str, u32)]) -> Vec<Sample> {
        let mut samples = Vec::new();
        while !self.is_over() {
            let at = self.begin.elapsed();
            for (name, id) in daemons {
                samples.push(Sample {
                    at,
                    what: format!("{name}: kB of memory"),
                    value: memory(*id),
                });
                let files = fs::read_dir(format!("/proc/{id}/fd")).map_or(0, Iterator::count);
                samples.push(Sample { at, what: format!("{name}: open files"), value: files });
            }
            if !self.report.was_since(Trouble::FullDisk, Instant::now()) {
                let [count, kilobytes] = self.count_files();
                samples.push(Sample { at, what: "files of state".to_owned(), value: count });
                samples.push(Sample { at, what: "kB of state".to_owned(), value: kilobytes });
            }
            thread::sleep(Duration::from_millis(500));
        }
        samples
    }

    /// The number of files of state, and their kilobytes, without the bounded traces.
    pub(super) fn count_files(&self) -> [usize; 2] {
        let line = "find /var/lib/cni /run/cni -type f -printf '%s\\n' 2> /dev/null || true";
        let text = self.node.sh(line);
        let sizes = text.lines().map(|size| size.parse::<usize>().unwrap());
        [sizes.clone().count(), sizes.sum::<usize>() / 1024]
    }
}

/// A measured value.
pub(super) struct Sample {
    at: Duration,
    what: String,
    value: usize,
}

/// How much the median of each value may grow from the second fifth of a soak to the last: a few
/// pages of memory, and the difference in what lives by chance.
const GROWTH: [(&str, usize); 4] =
    [("kB of memory", 4096), ("open files", 12), ("files of state", 300), ("kB of state", 512)];

/// The medians of the second and the last fifth, and what has grown.
pub(super) fn growth(samples: &[Sample], duration: Duration) -> (String, Vec<String>) {
    let mut names: Vec<&String> = samples.iter().map(|sample| &sample.what).collect();
    names.sort();
    names.dedup();
    let (mut lines, mut grown) = (String::new(), Vec::new());
    for name in names {
        let median = |fifth: u32| {
            let part = duration * fifth / 5..duration * (fifth + 1) / 5;
            let of_part = samples.iter().filter(|s| s.what == *name && part.contains(&s.at));
            let mut values: Vec<usize> = of_part.map(|sample| sample.value).collect();
            values.sort_unstable();
            values.get(values.len() / 2).copied().unwrap_or_default()
        };
        let [early, late] = [median(1), median(4)];
        let line = format!("{name}: {early} early, {late} late");
        lines.push_str(&["  ", &line, "\n"].concat());
        let (_, limit) = GROWTH.into_iter().find(|(unit, _)| name.ends_with(unit)).unwrap();
        if late > early + limit {
            grown.push(line);
        }
    }
    (lines, grown)
}

/// The resident memory of a process in kilobytes.
fn memory(id: u32) -> usize {
    let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or_default()
}
