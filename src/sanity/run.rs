//! Discovery of plugins, and their cases in processes of their own, several at once.

use std::collections::VecDeque;
use std::fs;
use std::io::{IsTerminal, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::call::Call;
use super::cases::{self, Subject};
use super::catalogue;
use super::check::{Check, Verdict};
use super::options::{Case, Options};
use super::profiles::{KINDS, Kind, Profile, VERSIONS, configuration};
use super::report::Outcome;
use super::world::{self, Needs, Result, STATE, World};

/// How long a case may take.
const LIMIT: Duration = Duration::from_secs(180);
const LIMIT_OF_FAULTS: Duration = Duration::from_secs(900);

/// The areas of assertions that are one case's: it looks at these, and no other case does.
const AREAS: [(&str, &[&str]); 7] = [
    ("protocol", &["conf.", "env.", "error.", "stdin.", "version."]),
    ("process", &["process."]),
    ("values", &["values."]),
    ("keys", &["keys."]),
    ("damage", &["damage."]),
    ("delegation", &["delegation."]),
    ("faults", &["faults."]),
];

/// What a child process tells of its case.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Told {
    verdicts: Vec<Verdict>,
    skipped: Option<String>,
    trouble: Option<String>,
}

/// A case in line.
struct Waiting {
    case: &'static str,
    kind: Kind,
    version: &'static str,
}

/// Runs all cases for the plugins of a folder.
pub fn all(folder: &Path, options: &Options) -> Result<Vec<Outcome>> {
    let folder =
        fs::canonicalize(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    if let Some(hidden) = STATE.iter().find(|state| folder.starts_with(state)) {
        return Err(format!(
            "{}: cases have a {hidden} of their own; copy the plugins elsewhere",
            folder.display()
        ));
    }
    let waiting = discover(&folder, options)?;
    if waiting.is_empty() {
        return Err(format!(
            "{}: there is no plugin to test; cni-sanity --list has the types",
            folder.display()
        ));
    }
    let total = waiting.len();
    let (queue, done) = (Mutex::new(waiting), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..options.jobs.max(1) {
            scope.spawn(|| {
                while let Some(next) = take(&queue) {
                    let outcome = outcome(&next, &folder, options);
                    if let Ok(mut done) = done.lock() {
                        done.push(outcome);
                        progress(done.len(), total);
                    }
                }
            });
        }
    });
    let mut done = done.into_inner().map_err(|_| "a case panicked".to_owned())?;
    done.sort_by(|a: &Outcome, b| {
        (&a.kind, &a.version, a.case).cmp(&(&b.kind, &b.version, b.case))
    });
    Ok(done)
}

fn take(queue: &Mutex<VecDeque<Waiting>>) -> Option<Waiting> {
    queue.lock().ok()?.pop_front()
}

fn progress(done: usize, total: usize) {
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        let end = if done == total { "\n" } else { "" };
        // Nobody needs it.
        drop(write!(stderr, "\r{done} of {total} cases{end}"));
    }
}

/// The cases of the plugins that are there, by the versions that they support.
fn discover(folder: &Path, options: &Options) -> Result<VecDeque<Waiting>> {
    let mut kinds: Vec<Kind> =
        KINDS.into_iter().filter(|kind| folder.join(kind.name).exists()).collect();
    if let Some(path) = &options.config {
        let conf = read_config(path)?;
        let name = conf["type"].as_str().ok_or_else(|| format!("{}: no type", path.display()))?;
        let profile = options.profile.unwrap_or(Profile::Interface);
        // It lives as long as the process.
        let name: &'static str = name.to_owned().leak();
        kinds =
            vec![Kind { name, profile, needs: Needs::Nothing, has_ipam: !conf["ipam"].is_null() }];
    }
    kinds.retain(|kind| {
        (options.types.is_empty() || options.types.iter().any(|name| name == kind.name))
            && options.profile.is_none_or(|profile| profile == kind.profile)
    });
    let mut waiting = VecDeque::new();
    for kind in kinds {
        let answer =
            Call::new(&folder.join(kind.name), "VERSION", &json!({"cniVersion": "1.0.0"})).run()?;
        let supported = answer.json.unwrap_or_default()["supportedVersions"].clone();
        let is_supported = |version: &&&str| {
            supported.as_array().is_some_and(|all| all.iter().any(|one| one == **version))
        };
        let mut versions: Vec<&'static str> =
            VERSIONS.iter().filter(is_supported).copied().collect();
        if versions.is_empty() {
            // The protocol's case says what is wrong with its VERSION.
            versions.push("1.0.0");
        }
        versions.retain(|version| {
            options.versions.is_empty() || options.versions.iter().any(|one| one == version)
        });
        let newest = versions.last().copied();
        for version in versions {
            let is_known = options.config.is_none();
            let all = cases_of(&kind, version, Some(version) == newest && is_known);
            let all = all.into_iter().filter(|case| *case != "faults" || options.faults);
            let wanted = all.filter(|case| may_find(case, options.only.as_deref()));
            waiting.extend(wanted.map(|case| Waiting { case, kind, version }));
        }
    }
    Ok(waiting)
}

/// The cases of a type in a version; what does not depend on the version is asked in the newest one.
fn cases_of(kind: &Kind, version: &str, is_newest: bool) -> Vec<&'static str> {
    let own = match kind.profile {
        Profile::Interface => Some("lifecycle"),
        Profile::Chained => Some("chained"),
        Profile::Ipam => Some("ipam"),
        Profile::Foreign => None,
    };
    let mut cases = vec!["protocol"];
    cases.extend(own);
    if version == "1.1.0" && own.is_some() {
        cases.push("housekeeping");
    }
    if is_newest {
        cases.push("values");
        if own.is_some() {
            cases.extend(["process", "keys"]);
        }
        if ["lifecycle", "chained"].map(Some).contains(&own) {
            cases.push("damage");
        }
        if kind.has_ipam || kind.name == "flannel" {
            cases.push("delegation");
        }
    }
    if is_newest && own == Some("lifecycle") {
        cases.push("faults");
    }
    cases
}

/// Whether a case looks at assertions whose id contains this.
fn may_find(case: &str, only: Option<&str>) -> bool {
    let Some(only) = only else { return true };
    let is_of = |areas: &[&str], id: &str| areas.iter().any(|area| id.starts_with(area));
    let looks_at = |id: &str| match AREAS.iter().find(|(name, _)| *name == case) {
        Some((_, areas)) => is_of(areas, id),
        None => !AREAS.iter().any(|(_, areas)| is_of(areas, id)),
    };
    catalogue::all().any(|one| one.id.contains(only) && looks_at(one.id))
}

fn read_config(path: &Path) -> Result<Value> {
    let text =
        fs::read_to_string(path).map_err(|error| format!("read {}: {error}", path.display()))?;
    serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))
}

/// A case in a child process.
fn outcome(waiting: &Waiting, folder: &Path, options: &Options) -> Outcome {
    let Waiting { case, kind, version } = waiting;
    let told = child_process(waiting, folder, options);
    let mut told =
        told.unwrap_or_else(|trouble| Told { trouble: Some(trouble), ..Told::default() });
    if let Some(only) = &options.only {
        told.verdicts.retain(|verdict| verdict.id.contains(only.as_str()));
    }
    let Told { verdicts, skipped, trouble } = told;
    for Verdict { id, .. } in &verdicts {
        debug_assert!(catalogue::find(id).is_some(), "{id} is in no table");
    }
    Outcome {
        kind: kind.name.to_owned(),
        version: (*version).to_owned(),
        case,
        verdicts,
        skipped,
        trouble,
    }
}

fn child_process(waiting: &Waiting, folder: &Path, options: &Options) -> Result<Told> {
    let (config, only) = (options.config.as_deref(), options.only.as_deref());
    let failed = |error: std::io::Error| format!("run a case: {error}");
    let exe = std::env::current_exe().map_err(failed)?;
    let mut child = Command::new(exe)
        .args(["--case", waiting.case, waiting.kind.name, waiting.version])
        .args([folder, config.unwrap_or(Path::new("")), Path::new(only.unwrap_or_default())])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut stdout = child.stdout.take();
    let reader = thread::spawn(move || {
        let mut text = String::new();
        // What came before an error is what there is.
        drop(stdout.as_mut().map(|pipe| pipe.read_to_string(&mut text)));
        text
    });
    let (start, limit) =
        (Instant::now(), if waiting.case == "faults" { LIMIT_OF_FAULTS } else { LIMIT });
    while child.try_wait().map_err(failed)?.is_none() {
        if start.elapsed() > limit {
            child.kill().and_then(|()| child.wait().map(drop)).map_err(failed)?;
            return Err(format!("no end after {} s", limit.as_secs()));
        }
        thread::sleep(Duration::from_millis(5));
    }
    let text = reader.join().map_err(|_| "read what a case says: panic".to_owned())?;
    serde_json::from_str(&text).map_err(|error| format!("what a case says: {error}"))
}

/// What the child process prints: its verdicts.
pub fn child(case: &Case) -> String {
    let mut check = Check::default();
    let told = match in_world(case, &mut check) {
        Ok(skipped) => Told { verdicts: check.verdicts, skipped, trouble: None },
        Err(trouble) => Told { verdicts: check.verdicts, skipped: None, trouble: Some(trouble) },
    };
    serde_json::to_string(&told).unwrap_or_default()
}

/// Runs a case; why it cannot be run here.
fn in_world(case: &Case, check: &mut Check) -> Result<Option<String>> {
    let conf = case.config.as_deref().map(read_config).transpose()?;
    let world = World::enter()?;
    let known = KINDS.iter().find(|kind| kind.name == case.kind);
    let foreign = Kind {
        name: case.kind.clone().leak(),
        profile: Profile::Interface,
        needs: Needs::Nothing,
        has_ipam: conf.as_ref().is_some_and(|conf| !conf["ipam"].is_null()),
    };
    let kind = known.unwrap_or(&foreign);
    if case.name != "protocol"
        && let Some(lack) = world::lacks(kind.needs)?
    {
        return Ok(Some(format!("this kernel has no {lack}")));
    }
    let mut conf = conf.unwrap_or_else(|| configuration(kind, &case.version, &case.folder));
    conf["cniVersion"] = json!(case.version);
    let only = case.only.as_deref();
    let subject = Subject { kind, version: &case.version, folder: &case.folder, conf, only };
    cases::run(&case.name, &subject, &world, check).map(|()| None)
}
