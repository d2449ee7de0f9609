//! Discovery of plugins, and the execution of their cases, each in its own process, several in
//! parallel.

use std::collections::VecDeque;
use std::fs;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::call::{self, Answer, Call};
use super::cases::{self, Subject};
use super::catalogue;
use super::check::Check;
use super::options::Options;
use super::profiles::{KINDS, Kind, Profile, VERSIONS, configuration};
use super::report::{Case, Outcome};
use super::world::{self, Needs, STATE};
use super::{Result, context};

/// The time limit of a case.
const LIMIT: Duration = Duration::from_secs(180);
const LIMIT_OF_FAULTS: Duration = Duration::from_secs(900);

/// Areas of assertions that only one case tests: the case, and the areas.
const AREAS: [(&str, &[&str]); 7] = [
    ("protocol", &["conf.", "env.", "error.", "stdin.", "version."]),
    ("process", &["process."]),
    ("values", &["values."]),
    ("keys", &["keys."]),
    ("damage", &["damage."]),
    ("delegation", &["delegation."]),
    ("faults", &["faults."]),
];

/// Runs all cases for the plugins of a directory.
pub fn all(directory: &Path, options: &Options) -> Result<Vec<Outcome>> {
    let directory = context(fs::canonicalize(directory), &directory.display().to_string())?;
    let shown = directory.display();
    if let Some(hidden) = STATE.iter().find(|state| directory.starts_with(state)) {
        let error = "of their own; copy the plugins elsewhere";
        return Err(format!("{shown}: cases have a {hidden} {error}").into());
    }
    let (cases, listed) = discover(&directory, options)?;
    if listed.is_empty() {
        let error = "there is no plugin to test; cni-sanity --list has the types";
        return Err(format!("{shown}: {error}").into());
    }
    let total = cases.len() + listed.len();
    let (queue, outcomes) = (Mutex::new(cases), Mutex::new(listed));
    let next = || queue.lock().ok()?.pop_front();
    thread::scope(|scope| {
        for _ in 0..options.jobs.max(1) {
            scope.spawn(|| {
                while let Some(case) = next() {
                    let outcome = outcome(&case);
                    if options.fail_fast
                        && outcome.has_failed()
                        && let Ok(mut rest) = queue.lock()
                    {
                        rest.clear();
                    }
                    if let Ok(mut outcomes) = outcomes.lock() {
                        outcomes.push(outcome);
                        progress(outcomes.len(), total);
                    }
                }
            });
        }
    });
    let mut outcomes = outcomes.into_inner().map_err(|_| "a case panicked")?;
    outcomes.sort_by(|a: &Outcome, b| {
        (&a.kind, &a.version, &a.case).cmp(&(&b.kind, &b.version, &b.case))
    });
    Ok(outcomes)
}

fn progress(done: usize, total: usize) {
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        let end = if done == total { "\n" } else { "" };
        drop(write!(stderr, "\r{done} of {total} cases{end}"));
    }
}

/// The cases of the plugins in the directory for each version to test, and the verdicts on whether
/// VERSION lists the version: a requested version that is not listed is a failure.
fn discover(directory: &Path, options: &Options) -> Result<(VecDeque<Case>, Vec<Outcome>)> {
    let mut kinds: Vec<Kind> =
        KINDS.into_iter().filter(|kind| directory.join(kind.name).exists()).collect();
    if let Some(path) = &options.config {
        let profile = options.profile.unwrap_or(Profile::Interface);
        let kind = foreign(&read_config(path)?, profile);
        kinds = vec![kind.ok_or_else(|| format!("{}: no type", path.display()))?];
    }
    for name in &options.types {
        if !kinds.iter().any(|kind| kind.name == name) {
            return Err(format!("{}: there is no {name}", directory.display()).into());
        }
    }
    kinds.retain(|kind| {
        (options.types.is_empty() || options.types.iter().any(|name| name == kind.name))
            && options.profile.is_none_or(|profile| profile == kind.profile)
    });
    let (mut cases, mut outcomes) = (VecDeque::new(), Vec::new());
    for kind in kinds {
        let answer = ask(&kind, directory)?;
        let listed = listed(&answer);
        let versions = selected(&listed, &options.versions);
        let tested = versions.iter().filter(|version| listed.contains(version));
        let newest = tested
            .max_by_key(|version| VERSIONS.iter().position(|known| known == *version))
            .filter(|_| options.config.is_none());
        for &version in &versions {
            let case = |name: &str| Case {
                name: name.to_owned(),
                kind: kind.name.to_owned(),
                profile: kind.profile,
                version: version.to_owned(),
                directory: directory.to_owned(),
                config: options.config.clone(),
                only: options.only.clone(),
                fail_fast: options.fail_fast,
            };
            let mut check = Check::default();
            check.of("version.supports-configured", &answer, listed.contains(&version));
            outcomes.push(Outcome { verdicts: check.verdicts, ..Outcome::of(&case("discovery")) });
            let mut names = cases_of(&kind, version, newest == Some(&version));
            if !listed.is_empty() && !listed.contains(&version) {
                names = vec!["protocol"];
            }
            names.retain(|name| {
                (*name != "faults" || options.faults) && may_test(name, options.only.as_deref())
            });
            cases.extend(names.into_iter().map(case));
        }
    }
    Ok((cases, outcomes))
}

/// The plugin type of a configuration given with `--config`.
fn foreign(conf: &Value, profile: Profile) -> Option<Kind> {
    // One leak in the lifetime of the process.
    let name = conf["type"].as_str()?.to_owned().leak();
    Some(Kind { name, profile, needs: Needs::Nothing, has_ipam: !conf["ipam"].is_null() })
}

/// The answer of a plugin to VERSION.
fn ask(kind: &Kind, directory: &Path) -> Result<Answer> {
    Call::new(&directory.join(kind.name), "VERSION", &json!({"cniVersion": "1.0.0"})).run()
}

/// The versions that a successful answer to VERSION lists.
fn listed(answer: &Answer) -> Vec<&'static str> {
    let supported = answer.result().map_or(&Value::Null, |json| &json["supportedVersions"]);
    let is_listed = |version: &&str| {
        supported.as_array().is_some_and(|all| all.iter().any(|known| known == version))
    };
    VERSIONS.into_iter().filter(is_listed).collect()
}

/// The versions to test: those that the options name, otherwise all that the plugin lists.
fn selected(listed: &[&'static str], wanted: &[&'static str]) -> Vec<&'static str> {
    match (wanted, listed) {
        // The case "protocol" reports an invalid answer to VERSION.
        ([], []) => vec!["1.0.0"],
        ([], listed) => listed.to_vec(),
        _ => VERSIONS.into_iter().filter(|version| wanted.contains(version)).collect(),
    }
}

/// The cases of a type in a version; cases that do not depend on the version run with the newest.
fn cases_of(kind: &Kind, version: &str, is_newest: bool) -> Vec<&'static str> {
    let own = match kind.profile {
        Profile::Interface => Some("lifecycle"),
        Profile::Chained => Some("chained"),
        Profile::Ipam => Some("ipam"),
        Profile::Foreign => None,
    };
    let mut cases = vec!["protocol"];
    cases.extend(own);
    if version == "1.1.0" && (own.is_some() || kind.name == "dhcp") {
        cases.push("housekeeping");
    }
    if is_newest {
        cases.push("values");
        if own.is_some() {
            cases.extend(["process", "keys"]);
        }
        if matches!(kind.profile, Profile::Interface | Profile::Chained) {
            cases.push("damage");
        }
        if kind.has_ipam || kind.name == "flannel" {
            cases.push("delegation");
        }
        if kind.profile == Profile::Interface {
            cases.push("faults");
        }
    }
    cases
}

/// Whether a case tests assertions whose id contains this.
fn may_test(case: &str, only: Option<&str>) -> bool {
    let Some(only) = only else { return true };
    let is_of = |areas: &[&str], id: &str| areas.iter().any(|area| id.starts_with(area));
    let tests = |id: &str| match AREAS.iter().find(|(name, _)| *name == case) {
        Some((_, areas)) => is_of(areas, id),
        None => !AREAS.iter().any(|(_, areas)| is_of(areas, id)),
    };
    catalogue::all().any(|assertion| assertion.id.contains(only) && tests(assertion.id))
}

fn read_config(path: &Path) -> Result<Value> {
    let text = context(fs::read_to_string(path), &format!("read {}", path.display()))?;
    serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()).into())
}

/// Runs a case in a child process.
fn outcome(case: &Case) -> Outcome {
    let mut outcome = child_process(case)
        .unwrap_or_else(|error| Outcome { trouble: Some(error.to_string()), ..Outcome::of(case) });
    if let Some(only) = &case.only {
        outcome.verdicts.retain(|verdict| verdict.id.contains(only));
    }
    for verdict in &outcome.verdicts {
        debug_assert!(catalogue::find(&verdict.id).is_some(), "{} is in no table", verdict.id);
    }
    outcome
}

fn child_process(case: &Case) -> Result<Outcome> {
    // This executable, even if its file was replaced meanwhile.
    let exe = "/proc/self/exe";
    let child = Command::new(exe)
        .args(["--case", &serde_json::to_string(case)?])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn();
    let mut child = context(child, "run a case")?;
    let stdout = call::read_all(child.stdout.take());
    let limit = if case.name == "faults" { LIMIT_OF_FAULTS } else { LIMIT };
    if context(call::wait(&mut child, limit), "run a case")?.is_none() {
        return Err(format!("no end after {} s", limit.as_secs()).into());
    }
    let text = stdout.join().map_err(|_| "read the output of a case: panic")?;
    serde_json::from_slice(&text)
        .map_err(|error| format!("parse the output of a case: {error}").into())
}

/// The output of the child process: the outcome as JSON.
pub fn child(case: &Case) -> Result<String> {
    let ends_at = case.only.clone().filter(|_| case.fail_fast);
    let mut check = Check { ends_at, ..Check::default() };
    let (skipped, trouble) = match run_in_world(case, &mut check) {
        Ok(skipped) => (skipped, None),
        Err(error) => (None, Some(error.to_string())),
    };
    let verdicts = check.verdicts;
    Ok(serde_json::to_string(&Outcome { verdicts, skipped, trouble, ..Outcome::of(case) })?)
}

/// Runs a case; returns the reason for which this kernel cannot run it.
fn run_in_world(case: &Case, check: &mut Check) -> Result<Option<String>> {
    let conf = case.config.as_deref().map(read_config).transpose()?;
    world::enter()?;
    let known = KINDS.into_iter().find(|kind| kind.name == case.kind);
    let kind = known.or_else(|| foreign(conf.as_ref()?, case.profile));
    let kind = &kind.ok_or_else(|| format!("no type {}", case.kind))?;
    if case.name != "protocol"
        && let Some(lack) = world::lacks(kind.needs)?
    {
        return Ok(Some(format!("this kernel has no {lack}")));
    }
    let mut conf = conf.unwrap_or_else(|| configuration(kind, &case.version, &case.directory));
    conf["cniVersion"] = json!(case.version);
    let (version, directory, only) = (&case.version, &case.directory, case.only.as_deref());
    let subject = Subject { kind, version, directory, conf, only };
    check.run(|check| cases::run(&case.name, &subject, check)).map(|()| None)
}
