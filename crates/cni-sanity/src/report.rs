//! Reports of a run, as text and in the formats of other programs.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::assertion::{Assertion, Level};
use super::catalogue;
use super::check::Verdict;
use super::known;
use super::profiles::Profile;

/// The most binding one first.
pub const LEVELS: [Level; 3] = [Level::Required, Level::Recommended, Level::Informational];

/// A case of a plugin in a version: the argument of the child process that runs it, as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub struct Case {
    pub name: String,
    pub kind: String,
    pub profile: Profile,
    pub version: String,
    pub directory: PathBuf,
    pub config: Option<PathBuf>,
    pub only: Option<String>,
    /// Whether the case ends at the first failed assertion that `only` selects.
    pub fail_fast: bool,
}

/// The verdicts of a case, or the reason for which it has none.
#[derive(Debug, Serialize, Deserialize)]
pub struct Outcome {
    pub kind: String,
    pub version: String,
    pub case: String,
    pub verdicts: Vec<Verdict>,
    /// The reason for which the case was not run.
    pub skipped: Option<String>,
    /// The failure of the suite itself.
    pub trouble: Option<String>,
}

impl Outcome {
    /// An outcome without verdicts.
    pub fn of(case: &Case) -> Outcome {
        let (kind, version) = (case.kind.clone(), case.version.clone());
        let (case, verdicts) = (case.name.clone(), Vec::new());
        Outcome { kind, version, case, verdicts, skipped: None, trouble: None }
    }

    /// Whether an assertion failed.
    pub fn has_failed(&self) -> bool {
        self.verdicts.iter().any(|verdict| !verdict.passed)
    }
}

/// An assertion that failed for a type, with the versions for which it failed.
struct Failure<'a> {
    level: Level,
    kind: &'a str,
    verdict: &'a Verdict,
    versions: Vec<&'a str>,
}

/// The outcomes of all cases of a run.
#[derive(Debug)]
pub struct Report {
    pub outcomes: Vec<Outcome>,
    /// Ids that may fail: `id` or `id@type`.
    pub expected: Vec<String>,
    /// The lowest level whose failures count.
    pub level: Level,
}

impl Report {
    fn is_expected(&self, kind: &str, id: &str) -> bool {
        self.expected.iter().any(|line| covers(line, kind, id))
    }

    /// The verdicts with their cases.
    fn verdicts(&self) -> impl Iterator<Item = (&Outcome, &Verdict)> {
        self.outcomes
            .iter()
            .flat_map(|outcome| outcome.verdicts.iter().map(move |verdict| (outcome, verdict)))
    }

    /// The failures, most severe first, one for each type and assertion.
    fn failures(&self) -> Vec<Failure<'_>> {
        let mut all: BTreeMap<(Level, &str, &str), Failure<'_>> = BTreeMap::new();
        for (outcome, verdict) in self.verdicts().filter(|(_, verdict)| !verdict.passed) {
            let (level, kind) = (level(&verdict.id), outcome.kind.as_str());
            let failure = all.entry((level, kind, &verdict.id));
            let failure = failure.or_insert(Failure { level, kind, verdict, versions: Vec::new() });
            if !failure.versions.contains(&outcome.version.as_str()) {
                failure.versions.push(&outcome.version);
            }
        }
        all.into_values().collect()
    }

    /// The tested assertions of a level, and those that passed.
    fn count(&self, of: Level) -> (usize, usize) {
        let all = self.verdicts().filter(|(_, verdict)| level(&verdict.id) == of);
        all.fold((0, 0), |(all, passed), (_, verdict)| {
            (all + 1, passed + usize::from(verdict.passed))
        })
    }

    /// Whether no assertion of the level failed unexpectedly, and the suite itself did not fail.
    pub fn is_good(&self) -> bool {
        let is_bad = |failure: &Failure<'_>| {
            failure.level <= self.level && !self.is_expected(failure.kind, &failure.verdict.id)
        };
        !self.failures().iter().any(is_bad)
            && self.outcomes.iter().all(|outcome| outcome.trouble.is_none())
    }

    /// The report as text: the failures with their commands, and the counts.
    pub fn text(&self) -> String {
        let mut lines = Vec::new();
        let failures = self.failures();
        for Failure { level, kind, verdict, versions } in &failures {
            let expected = if self.is_expected(kind, &verdict.id) { " (expected)" } else { "" };
            let Some(assertion) = catalogue::find(&verdict.id) else { continue };
            let (Assertion { id, text, .. }, clause) = (assertion, assertion.source());
            lines.push(format!("FAIL {} {kind} {id}{expected}: {text}", level.name()));
            lines.push(format!("  versions  {}", versions.join(", ")));
            lines.push(format!("  clause    {clause}"));
            lines.push(format!("  seen      {}", verdict.detail));
            if let Some(thread) = known::thread(kind, id) {
                lines.push(format!("  known     {thread}"));
            }
            if !verdict.by_hand.is_empty() {
                lines.push(format!("  by hand   {}", verdict.by_hand));
            }
        }
        for Outcome { kind, version, case, skipped, trouble, .. } in &self.outcomes {
            for (what, why) in [("SKIP", skipped), ("TROUBLE", trouble)] {
                if let Some(why) = why {
                    lines.push(format!("{what} {kind} {version} {case}: {why}"));
                }
            }
        }
        for id in &self.expected {
            if !failures.iter().any(|failure| covers(id, failure.kind, &failure.verdict.id)) {
                lines.push(format!("PASS {id}, which was expected to fail"));
            }
        }
        for level in LEVELS {
            let (all, passed) = self.count(level);
            lines.push(format!("{}: {passed} of {all} passed", level.name()));
        }
        joined(&lines)
    }

    /// The Test Anything Protocol, version 13. A failure that does not count is a TODO.
    pub fn tap(&self) -> String {
        let mut lines = vec![format!("TAP version 13\n1..{}", self.verdicts().count())];
        for (number, (Outcome { kind, version, .. }, verdict)) in (1..).zip(self.verdicts()) {
            let id = &verdict.id;
            let (not, todo) = match (verdict.passed, level(id)) {
                (true, _) => ("", String::new()),
                (false, level) if level <= self.level => ("not ", String::new()),
                (false, level) => ("not ", format!(" # TODO {}", level.name())),
            };
            lines.push(format!("{not}ok {number} {kind} {version} {id}{todo}"));
        }
        joined(&lines)
    }

    /// `JUnit` XML: a suite for each type; failures that do not count are `skipped`.
    pub fn junit(&self) -> String {
        let mut suites: BTreeMap<&str, Vec<(&Outcome, &Verdict)>> = BTreeMap::new();
        for (outcome, verdict) in self.verdicts() {
            suites.entry(&outcome.kind).or_default().push((outcome, verdict));
        }
        let mut lines = vec!["<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>".to_owned()];
        for (kind, verdicts) in suites {
            let (tests, mut failures, mut cases) = (verdicts.len(), 0, Vec::new());
            for (Outcome { version, .. }, Verdict { id, passed, detail, by_hand }) in verdicts {
                let body = match (passed, level(id)) {
                    (true, _) => String::new(),
                    (false, level) if level <= self.level => {
                        failures += 1;
                        format!("<failure>{}</failure>", escaped(&format!("{detail}\n{by_hand}")))
                    }
                    (false, level) => format!("<skipped message=\"{}\"/>", level.name()),
                };
                cases.push(format!(
                    "<testcase classname=\"{kind}.{version}\" name=\"{id}\">{body}</testcase>"
                ));
            }
            lines.push(format!(
                "<testsuite name=\"{kind}\" tests=\"{tests}\" failures=\"{failures}\">\n{}</testsuite>",
                joined(&cases)
            ));
        }
        lines.push("</testsuites>".to_owned());
        joined(&lines)
    }

    /// All verdicts as JSON.
    pub fn json(&self) -> String {
        let verdicts = self.verdicts().map(|(outcome, verdict)| {
            let clause = catalogue::find(&verdict.id).map(Assertion::source);
            json!({"type": outcome.kind, "version": outcome.version, "id": verdict.id, "passed": verdict.passed,
                "level": level(&verdict.id).name(), "clause": clause, "detail": verdict.detail,
                "byHand": verdict.by_hand})
        });
        let skipped = self.outcomes.iter().filter_map(|outcome| {
            let why = outcome.skipped.as_ref()?;
            Some(json!({"type": outcome.kind, "version": outcome.version, "case": outcome.case, "why": why}))
        });
        let (verdicts, skipped): (Vec<Value>, Vec<Value>) = (verdicts.collect(), skipped.collect());
        json!({"verdicts": verdicts, "skipped": skipped}).to_string() + "\n"
    }

    /// An SVG for a README: the number of required assertions that passed.
    pub fn badge(&self) -> String {
        let (all, passed) = self.count(Level::Required);
        let color = if passed == all && all > 0 { "#2e7d32" } else { "#c62828" };
        let text = format!("{passed} of {all}");
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"180\" height=\"20\" role=\"img\" aria-label=\"cni-sanity: {text}\">\
             <rect width=\"80\" height=\"20\" fill=\"#555\"/><rect x=\"80\" width=\"100\" height=\"20\" fill=\"{color}\"/>\
             <g fill=\"#fff\" font-family=\"sans-serif\" font-size=\"11\" text-anchor=\"middle\">\
             <text x=\"40\" y=\"14\">cni-sanity</text><text x=\"130\" y=\"14\">{text}</text></g></svg>\n"
        )
    }

    /// A row of a scoreboard, and rows of its failures.
    pub fn row(&self, name: &str) -> (String, String) {
        let counts = LEVELS.map(|level| self.count(level));
        let counts = counts.map(|(all, passed)| format!("{passed} of {all}"));
        let mut list = Vec::new();
        for Failure { kind, verdict, versions, .. } in self.failures() {
            let Some(assertion) = catalogue::find(&verdict.id) else { continue };
            let (Assertion { id, level, text, .. }, clause) = (assertion, assertion.source());
            let thread = known::thread(kind, id).unwrap_or_default();
            let (level, versions) = (level.name(), versions.join(", "));
            list.push(format!(
                "| {level} | {kind} | `{id}` | {text} | {clause} | {versions} | {thread} |"
            ));
        }
        (format!("| {name} | {} |\n", counts.join(" | ")), joined(&list))
    }
}

/// The lines, each with its end.
fn joined(lines: &[String]) -> String {
    lines.iter().flat_map(|line| [line, "\n"]).collect()
}

/// Whether a line of the expected failures is about this assertion.
fn covers(line: &str, kind: &str, id: &str) -> bool {
    line == id || line.strip_suffix(kind).and_then(|line| line.strip_suffix('@')) == Some(id)
}

fn level(id: &str) -> Level {
    catalogue::find(id).map_or(Level::Informational, |assertion| assertion.level)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
