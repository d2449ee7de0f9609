//! What a run found, for people and for machines.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::catalogue;
use super::check::Verdict;
use super::clause::Level;
use super::known;

/// What one case found.
#[derive(Debug)]
pub struct Outcome {
    pub kind: String,
    pub version: String,
    pub case: &'static str,
    pub verdicts: Vec<Verdict>,
    /// Why it was not run.
    pub skipped: Option<String>,
    /// What the suite itself could not do.
    pub trouble: Option<String>,
}

/// An assertion that failed for a type, with the versions it failed for.
#[derive(Debug)]
struct Failure<'a> {
    level: Level,
    kind: &'a str,
    verdict: &'a Verdict,
    versions: Vec<&'a str>,
}

/// The outcomes of a run.
#[derive(Debug)]
pub struct Report {
    pub outcomes: Vec<Outcome>,
    /// Ids that may fail: `id` or `id@type`.
    pub expected: Vec<String>,
}

impl Report {
    fn is_expected(&self, kind: &str, id: &str) -> bool {
        let of_kind = format!("{id}@{kind}");
        self.expected.iter().any(|line| line == id || *line == of_kind)
    }

    /// The failures, the worst first, each once.
    fn failures(&self) -> Vec<Failure<'_>> {
        let mut all: Vec<Failure<'_>> = Vec::new();
        for outcome in &self.outcomes {
            for verdict in outcome.verdicts.iter().filter(|verdict| !verdict.passed) {
                let (kind, version) = (outcome.kind.as_str(), outcome.version.as_str());
                let known =
                    all.iter_mut().find(|one| one.kind == kind && one.verdict.id == verdict.id);
                match known {
                    Some(one) if one.versions.contains(&version) => {}
                    Some(one) => one.versions.push(version),
                    None => all.push(Failure {
                        level: level(&verdict.id),
                        kind,
                        verdict,
                        versions: vec![version],
                    }),
                }
            }
        }
        all.sort_by_key(|one| (one.level, one.kind, &one.verdict.id));
        all
    }

    /// Assertions that were looked at, and those that failed, of a level.
    pub fn count(&self, of: Level) -> (usize, usize) {
        let verdicts = self.outcomes.iter().flat_map(|outcome| &outcome.verdicts);
        let of_level = verdicts.filter(|verdict| level(&verdict.id) == of);
        of_level
            .fold((0, 0), |(all, failed), verdict| (all + 1, failed + usize::from(!verdict.passed)))
    }

    /// Whether nothing that is required failed, but for what was expected to, and the suite could do its work.
    pub fn is_good(&self) -> bool {
        let bad = |one: &Failure<'_>| {
            one.level == Level::Required && !self.is_expected(one.kind, &one.verdict.id)
        };
        !self.failures().iter().any(bad)
            && self.outcomes.iter().all(|outcome| outcome.trouble.is_none())
    }

    /// Expected failures that did not happen.
    fn unexpected_passes(&self) -> Vec<&String> {
        let failures = self.failures();
        let happened = |line: &&String| {
            failures.iter().any(|one| {
                **line == one.verdict.id || **line == format!("{}@{}", one.verdict.id, one.kind)
            })
        };
        self.expected.iter().filter(|line| !happened(line)).collect()
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let mut line = |text: String| out.push_str(&(text + "\n"));
        for Failure { level, kind, verdict, versions } in self.failures() {
            let expected = if self.is_expected(kind, &verdict.id) { " (expected)" } else { "" };
            let Some(assertion) = catalogue::find(&verdict.id) else { continue };
            line(format!(
                "FAIL {} {kind} {}{expected}: {}",
                level.name(),
                verdict.id,
                assertion.text
            ));
            line(format!("  versions  {}", versions.join(", ")));
            line(format!("  clause    {}", assertion.clause));
            line(format!("  seen      {}", verdict.detail));
            if let Some(thread) = known::thread(kind, &verdict.id) {
                line(format!("  known     {thread}"));
            }
            if !verdict.by_hand.is_empty() {
                line(format!("  by hand   {}", verdict.by_hand));
            }
        }
        for outcome in &self.outcomes {
            let Outcome { kind, version, case, .. } = outcome;
            if let Some(why) = &outcome.skipped {
                line(format!("SKIP {kind} {version} {case}: {why}"));
            }
            if let Some(why) = &outcome.trouble {
                line(format!("TROUBLE {kind} {version} {case}: {why}"));
            }
        }
        for one in self.unexpected_passes() {
            line(format!("PASS {one}, which was expected to fail"));
        }
        for level in [Level::Required, Level::Recommended, Level::Informational] {
            let (all, failed) = self.count(level);
            line(format!("{}: {} of {all} passed", level.name(), all - failed));
        }
        out
    }

    /// Each verdict.
    fn each(&self) -> impl Iterator<Item = (&Outcome, &Verdict)> {
        self.outcomes
            .iter()
            .flat_map(|outcome| outcome.verdicts.iter().map(move |verdict| (outcome, verdict)))
    }

    /// The Test Anything Protocol, version 13. What is not required is a TODO.
    pub fn tap(&self) -> String {
        let mut out = format!("TAP version 13\n1..{}\n", self.each().count());
        for (number, (outcome, verdict)) in self.each().enumerate() {
            let not = if verdict.passed { "" } else { "not " };
            let level = level(&verdict.id);
            let todo = if level == Level::Required {
                String::new()
            } else {
                format!(" # TODO {}", level.name())
            };
            let todo = if verdict.passed { String::new() } else { todo };
            out += &(format!(
                "{not}ok {} {} {} {}{todo}",
                number + 1,
                outcome.kind,
                outcome.version,
                verdict.id
            ) + "\n");
        }
        out
    }

    /// XML as `JUnit` writes it: a suite for each type, a failure for what is required, and `skipped` for the rest that failed.
    pub fn junit(&self) -> String {
        let mut suites: BTreeMap<&str, Vec<(&Outcome, &Verdict)>> = BTreeMap::new();
        for (outcome, verdict) in self.each() {
            suites.entry(&outcome.kind).or_default().push((outcome, verdict));
        }
        let mut out = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n".to_owned();
        for (kind, verdicts) in suites {
            let is_bad =
                |verdict: &Verdict| !verdict.passed && level(&verdict.id) == Level::Required;
            let failures = verdicts.iter().filter(|(_, verdict)| is_bad(verdict)).count();
            let tests = verdicts.len();
            out +=
                &(format!("<testsuite name=\"{kind}\" tests=\"{tests}\" failures=\"{failures}\">")
                    + "\n");
            for (outcome, verdict) in verdicts {
                let detail = escaped(&format!("{}\n{}", verdict.detail, verdict.by_hand));
                let body = match (verdict.passed, is_bad(verdict)) {
                    (true, _) => String::new(),
                    (false, true) => format!("<failure>{detail}</failure>"),
                    (false, false) => {
                        format!("<skipped message=\"{}\"/>", level(&verdict.id).name())
                    }
                };
                out += &(format!(
                    "<testcase classname=\"{kind}.{}\" name=\"{}\">{body}</testcase>",
                    outcome.version, verdict.id
                ) + "\n");
            }
            out.push_str("</testsuite>\n");
        }
        out + "</testsuites>\n"
    }

    /// Everything, for programs.
    pub fn json(&self) -> String {
        let verdicts: Vec<Value> = self.each().map(|(outcome, verdict)| {
            let assertion = catalogue::find(&verdict.id);
            json!({"type": outcome.kind, "version": outcome.version, "id": verdict.id, "passed": verdict.passed,
                "level": level(&verdict.id).name(), "clause": assertion.map(|assertion| assertion.clause),
                "detail": verdict.detail, "byHand": verdict.by_hand})
        }).collect();
        let skipped = self.outcomes.iter().filter_map(|outcome| {
            let why = outcome.skipped.as_ref()?;
            Some(json!({"type": outcome.kind, "version": outcome.version, "case": outcome.case, "why": why}))
        });
        json!({"verdicts": verdicts, "skipped": skipped.collect::<Vec<_>>()}).to_string() + "\n"
    }

    /// A picture for a README: how many of the required assertions passed.
    pub fn badge(&self) -> String {
        let (all, failed) = self.count(Level::Required);
        let color = if failed == 0 && all > 0 { "#2e7d32" } else { "#c62828" };
        let text = format!("{} of {all}", all - failed);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"180\" height=\"20\" role=\"img\" aria-label=\"cni-sanity: {text}\">\
             <rect width=\"80\" height=\"20\" fill=\"#555\"/><rect x=\"80\" width=\"100\" height=\"20\" fill=\"{color}\"/>\
             <g fill=\"#fff\" font-family=\"sans-serif\" font-size=\"11\" text-anchor=\"middle\">\
             <text x=\"40\" y=\"14\">cni-sanity</text><text x=\"130\" y=\"14\">{text}</text></g></svg>\n"
        )
    }

    /// A row of a scoreboard, and its failures.
    pub fn row(&self, name: &str) -> (String, String) {
        let mut row = format!("| {name} |");
        for level in [Level::Required, Level::Recommended, Level::Informational] {
            let (all, failed) = self.count(level);
            row.extend([" ", &(all - failed).to_string(), " of ", &all.to_string(), " |"]);
        }
        let mut list = String::new();
        for Failure { level, kind, verdict, versions } in self.failures() {
            let Some(assertion) = catalogue::find(&verdict.id) else { continue };
            let thread = known::thread(kind, &verdict.id).unwrap_or_default();
            let versions = versions.join(", ");
            list += &(format!(
                "| {} | {kind} | `{}` | {} | {} | {versions} | {thread} |",
                level.name(),
                verdict.id,
                assertion.text,
                assertion.clause
            ) + "\n");
        }
        (row, list)
    }
}

fn level(id: &str) -> Level {
    catalogue::find(id).map_or(Level::Informational, |assertion| assertion.level)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
