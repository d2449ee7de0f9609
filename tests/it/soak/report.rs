//! What a soak has seen: calls, durations, failures by message, and what excuses a failure.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::support::node::Outcome;

/// A state of the node that excuses failures with a message about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Trouble {
    /// A file system of state is full.
    FullDisk,
    /// Rules were flushed, and are not yet all restored.
    Flush,
    /// host-local has no free address in the network with few.
    NoAddress,
    /// Other calls run, and hold locks: as long as there are workers.
    OtherCalls,
}

const TROUBLES: [Trouble; 4] =
    [Trouble::FullDisk, Trouble::Flush, Trouble::NoAddress, Trouble::OtherCalls];

impl Trouble {
    /// Whether a message can have this reason.
    fn explains(self, verb: &str, text: &str) -> bool {
        match self {
            // DEL needs no space.
            Trouble::FullDisk => verb != "DEL" && text.contains("no space left on device"),
            Trouble::Flush => verb == "traffic" || RULES.iter().any(|word| text.contains(word)),
            Trouble::NoAddress => text.contains("no IP addresses available"),
            Trouble::OtherCalls => text.contains("held for more than"),
        }
    }
}

/// What messages about flushed rules say.
const RULES: [&str; 2] = ["\"cnibox repair\" restores", "missing: "];

/// When a trouble began and ended last.
#[derive(Clone, Copy, Debug, Default)]
struct Span {
    began: Option<Instant>,
    ended: Option<Instant>,
}

impl Span {
    /// Whether the trouble was there at some time since.
    fn was_since(&self, since: Instant) -> bool {
        self.began.is_some() || self.ended.is_some_and(|end| end >= since)
    }
}

#[derive(Debug, Default)]
struct Failure {
    count: usize,
    example: String,
}

#[derive(Debug, Default)]
struct Counts {
    troubles: [Span; TROUBLES.len()],
    /// The durations of the calls of each verb that succeeded, in milliseconds.
    durations: BTreeMap<&'static str, Vec<u32>>,
    /// How often something else happened.
    events: BTreeMap<String, usize>,
    /// By excuse, verb and message.
    failures: BTreeMap<(Option<Trouble>, String, String), Failure>,
    /// What became of each attachment, by its container.
    fates: BTreeMap<String, String>,
}

/// The counters of all threads.
#[derive(Debug)]
pub(super) struct Report {
    begin: Instant,
    counts: Mutex<Counts>,
}

impl Report {
    pub(super) fn new() -> Report {
        Report { begin: Instant::now(), counts: Mutex::default() }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap()
    }

    /// Prints what happens, for the search of a cause.
    pub(super) fn say(&self, text: &str) {
        println!("soak: {:.1?}: {text}", self.begin.elapsed());
    }

    pub(super) fn begin(&self, trouble: Trouble) {
        self.counts().troubles[trouble as usize].began = Some(Instant::now());
    }

    pub(super) fn end(&self, trouble: Trouble) {
        let span = &mut self.counts().troubles[trouble as usize];
        *span = Span { began: None, ended: Some(Instant::now()) };
    }

    /// Whether the trouble was there at some time since.
    pub(super) fn was_since(&self, trouble: Trouble, since: Instant) -> bool {
        self.counts().troubles[trouble as usize].was_since(since)
    }

    pub(super) fn event(&self, name: &str) {
        *self.counts().events.entry(name.to_owned()).or_default() += 1;
    }

    pub(super) fn fate(&self, id: &str, fate: &str) {
        let mut counts = self.counts();
        let fates = counts.fates.entry(id.to_owned()).or_default();
        write!(fates, " {fate}").unwrap();
    }

    /// Counts a call that began at `begin`; whether it succeeded.
    pub(super) fn call(
        &self,
        (verb, network): (&'static str, &str),
        id: &str,
        begin: Instant,
        outcome: &Outcome,
    ) -> bool {
        if outcome.status == Some(0) {
            self.took(verb, begin);
            return true;
        }
        self.failed((verb, network), id, begin, &said(outcome));
        false
    }

    /// Notes the duration of what began at `begin`.
    pub(super) fn took(&self, what: &'static str, begin: Instant) {
        let took = u32::try_from(begin.elapsed().as_millis()).unwrap();
        self.counts().durations.entry(what).or_default().push(took);
    }

    /// Counts a failure of something that began at `begin`. One without an excuse is printed.
    pub(super) fn failed(
        &self,
        (verb, network): (&str, &str),
        id: &str,
        begin: Instant,
        text: &str,
    ) {
        let mut excuses = TROUBLES.into_iter();
        let excuse =
            excuses.find(|trouble| self.was_since(*trouble, begin) && trouble.explains(verb, text));
        if excuse.is_none() {
            self.say(&format!("{verb} {network} of {id} after {:.1?}: {text}", begin.elapsed()));
        }
        self.count_failure(excuse, (verb, network), id, text);
    }

    /// Counts a failure with an excuse that is known already, or none.
    pub(super) fn count_failure(
        &self,
        excuse: Option<Trouble>,
        (verb, network): (&str, &str),
        id: &str,
        text: &str,
    ) {
        let mut counts = self.counts();
        let key = (excuse, format!("{verb} {network}"), general(text));
        let failure = counts.failures.entry(key).or_default();
        failure.count += 1;
        if failure.count == 1 {
            failure.example = format!("{id}: {}", text.trim());
        }
    }

    /// The mean duration of a verb so far.
    pub(super) fn mean(&self, verb: &str) -> Duration {
        let counts = self.counts();
        let durations = counts.durations.get(verb).map_or(&[][..], Vec::as_slice);
        let recent = &durations[durations.len().saturating_sub(100)..];
        let count = u32::try_from(recent.len()).unwrap().max(1);
        Duration::from_millis(u64::from(recent.iter().sum::<u32>() / count))
    }

    /// What became of the containers that a text names.
    pub(super) fn fates_in(&self, text: &str) -> String {
        let counts = self.counts();
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
        let known = words.filter_map(|word| Some((word, counts.fates.get(word)?)));
        let fates: BTreeMap<&str, &String> = known.collect();
        format!("{fates:#?}")
    }

    /// The failures without an excuse.
    pub(super) fn faults(&self) -> Vec<String> {
        let counts = self.counts();
        let faults = counts.failures.iter().filter(|((excuse, ..), _)| excuse.is_none());
        faults
            .map(|((_, what, _), failure)| {
                format!("{}x {what}: {}", failure.count, failure.example)
            })
            .collect()
    }

    /// All counters as text.
    pub(super) fn text(&self) -> String {
        let counts = self.counts();
        let mut text = String::new();
        for (verb, durations) in &counts.durations {
            let mut sorted = durations.clone();
            sorted.sort_unstable();
            let at = |percent: usize| sorted[(sorted.len() - 1) * percent / 100];
            writeln!(
                text,
                "  {verb}: {} succeeded; ms at 50 %: {}, 90 %: {}, 99 %: {}, at most {}",
                sorted.len(),
                at(50),
                at(90),
                at(99),
                at(100)
            )
            .unwrap();
        }
        for (event, count) in &counts.events {
            writeln!(text, "  {event}: {count}").unwrap();
        }
        for ((excuse, what, message), failure) in &counts.failures {
            let excuse = excuse.map_or("FAULT".to_owned(), |trouble| format!("{trouble:?}"));
            writeln!(text, "  {excuse}: {}x {what}: {message}", failure.count).unwrap();
        }
        text
    }
}

/// Why a call failed.
pub(super) fn said(outcome: &Outcome) -> String {
    let text = if outcome.stderr.is_empty() { &outcome.stdout } else { &outcome.stderr };
    text.trim().to_owned()
}

/// A message without names and numbers.
fn general(text: &str) -> String {
    let mut out = String::new();
    for word in text.trim().split_inclusive(|c: char| !c.is_ascii_alphanumeric()) {
        let (body, end) =
            word.split_at(word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).len());
        let varies = body.contains(|c: char| c.is_ascii_digit());
        out.push_str(if varies { "N" } else { body });
        out.push_str(end);
    }
    out.chars().take(400).collect()
}
