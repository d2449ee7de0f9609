//! `cni-sanity` on the plugins of this project, which conform, and on mutants: plugins with one
//! defect each, which the suite must detect.

mod mutants;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use cnibox_tests::{cni_sanity, example};
use serde_json::Value;
use tempfile::TempDir;

use self::mutants::Mutant;
use crate::lane::{self, needs};
use crate::support::node::{executable, write_executable};

/// A directory with all plugins of this project, outside `/run`, which each case mounts anew.
fn sound() -> TempDir {
    lane::begin_test();
    let directory = tempfile::tempdir().unwrap();
    let mut install = Command::new(executable());
    let output = install.args(["install", "--no-verify"]).arg(directory.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    open(&directory);
    directory
}

/// Another user may run the plugins too: STATUS must tell that this user may not change the network.
fn open(directory: &TempDir) {
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
}

/// The exit status and the report of a run.
fn sanity(directory: &Path, args: &[&str]) -> (Option<i32>, Value) {
    let mut command = Command::new(cni_sanity());
    let output = command.args(["--format", "json"]).args(args).arg(directory).output().unwrap();
    let report = serde_json::from_slice(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    (output.status.code(), report.unwrap_or_else(|error| panic!("{error}: {stderr}")))
}

/// The ids of the failed assertions.
fn failed(report: &Value) -> BTreeSet<String> {
    let verdicts = report["verdicts"].as_array().unwrap().iter();
    verdicts
        .filter(|verdict| verdict["passed"] == false)
        .map(|verdict| verdict["id"].to_string())
        .collect()
}

/// Known deviations from optional assertions: loopback's CHECK does not need a `prevResult`;
/// VERSION always answers in the newest version, as the reference's; a killed ADD of host-local may
/// leave a temporary file, which its next ADD overwrites.
fn is_known(verdict: &Value) -> bool {
    let detail = verdict["detail"].as_str().unwrap_or_default();
    match verdict["id"].as_str().unwrap_or_default() {
        "check.no-prev-result" => verdict["type"] == "loopback",
        "version.echo" => true,
        "faults.killed-add.leaves-nothing" => {
            detail.ends_with("/.cnibox/tmp") && !detail.contains(';')
        }
        _ => false,
    }
}

fn assert_sound(args: &[&str], types: usize) {
    let directory = sound();
    let (status, report) = sanity(directory.path(), args);
    let failures: Vec<&Value> = report["verdicts"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|verdict| verdict["passed"] == false)
        .collect();
    assert!(failures.iter().all(|verdict| is_known(verdict)), "{failures:#?}");
    assert_eq!(status, Some(0));
    let kinds: BTreeSet<String> = report["verdicts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|verdict| verdict["type"].to_string())
        .collect();
    assert_eq!(kinds.len(), types, "{kinds:?}");
}

#[test]
fn the_plugins_of_this_project_conform() {
    assert_sound(&[], 23);
}

/// The example of `crates/cni`, behind bridge of this project.
#[test]
fn the_example_plugin_conforms_in_all_versions() {
    let directory = sound();
    fs::copy(example("hostsdir"), directory.path().join("hostsdir")).unwrap();
    let config = directory.path().join("hostsdir.json");
    fs::write(&config, r#"{"name": "sanity", "type": "hostsdir", "directory": "/run/hosts.d"}"#)
        .unwrap();
    let config = config.display().to_string();
    let (status, report) = sanity(directory.path(), &["--config", &config, "--profile", "chained"]);
    let verdicts = report["verdicts"].as_array().unwrap();
    let failures: Vec<&Value> =
        verdicts.iter().filter(|v| v["passed"] == false && !is_known(v)).collect();
    assert!(status == Some(0) && failures.is_empty(), "{failures:#?}");
    // As a chained plugin, in seven versions.
    assert_eq!(verdicts.iter().filter(|v| v["id"] == "chained.no-prev-result").count(), 7);
}

/// Plugins killed at system calls, full disks, many concurrent calls.
#[test]
fn plugins_conform_with_faults() {
    let types = ["--type", "bridge", "--type", "loopback", "--cni-version", "1.1.0"];
    assert_sound(&[&types[..], &["--faults", "--only", "faults."]].concat(), 2);
}

#[test]
fn plugins_that_need_kernel_modules_conform() {
    needs!(lane::DUMMY, lane::VRF, lane::VLAN, lane::IPVLAN, lane::BOND);
    let types = ["dummy", "vrf", "vlan", "ipvlan", "bond"].map(|name| ["--type", name]);
    let args: Vec<&str> =
        types.as_flattened().iter().copied().chain(["--cni-version", "1.1.0"]).collect();
    assert_sound(&args, 5);
}

/// A plugin directory with the mutant; the other types are correct.
fn make(mutant: &Mutant, sound: &Path) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    open(&directory);
    for entry in fs::read_dir(sound).unwrap() {
        let name = entry.unwrap().file_name();
        if name != mutant.kind {
            symlink(sound.join(&name), directory.path().join(&name)).unwrap();
        }
    }
    let real = sound.join(mutant.kind).display().to_string();
    let Mutant { verb, body, .. } = mutant;
    let script = format!(
        "#!/bin/sh\n\
         run() {{ printf '%s' \"$in\" | '{real}'; }}\n\
         bend() {{ out=$(run); status=$?; printf '%s\\n' \"$out\" | sed \"$1\"; exit $status; }}\n\
         inside() {{ nsenter --net=\"$CNI_NETNS\" \"$@\"; }}\n\
         case $CNI_COMMAND in\n{verb}) in=$(cat); {body} ;;\n*) exec '{real}' ;;\nesac\n"
    );
    let path = directory.path().join(mutant.kind);
    write_executable(&path, &script);
    directory
}

/// Returns `Ok` if the suite detects the defect, otherwise the assertions that failed instead.
fn is_caught(mutant: &Mutant, sound: &Path) -> Result<(), String> {
    let directory = make(mutant, sound);
    let args = [
        "--type",
        mutant.kind,
        "--cni-version",
        mutant.version,
        "--only",
        mutant.seen,
        "--fail-fast",
        "--jobs",
        "1",
    ];
    let (_, report) = sanity(directory.path(), &args);
    let failed = failed(&report);
    if failed.contains(&format!("\"{}\"", mutant.seen)) {
        return Ok(());
    }
    Err(format!("{} ({}): {failed:?}", mutant.body, mutant.seen))
}

#[test]
fn every_mutant_is_detected() {
    let (sound, mutants, next) = (sound(), mutants::all(), AtomicUsize::new(0));
    assert!(mutants.len() >= 400, "{}", mutants.len());
    let doubtful: Vec<&Mutant> = thread::scope(|scope| {
        let work = || {
            let numbers = std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)));
            let own = numbers.map_while(|number| mutants.get(number));
            own.filter(|mutant| is_caught(mutant, sound.path()).is_err()).collect::<Vec<_>>()
        };
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    // On a busy machine a call may have taken longer than the suite waits.
    let survivors: Vec<String> =
        doubtful.iter().filter_map(|mutant| is_caught(mutant, sound.path()).err()).collect();
    println!("{} of {} mutants are caught", mutants.len() - survivors.len(), mutants.len());
    assert!(survivors.is_empty(), "{}", survivors.join("\n"));
}

#[test]
fn fail_fast_ends_at_the_first_failure() {
    let mutant = Mutant {
        kind: "bridge",
        version: "1.1.0",
        verb: "DEL",
        body: "exit 1".to_owned(),
        seen: "del.succeeds",
        clause: None,
    };
    let sound = sound();
    let directory = make(&mutant, sound.path());
    let args = ["--type", "bridge", "--cni-version", "1.1.0", "--only", "del.", "--jobs", "1"];
    let (status, report) = sanity(directory.path(), &args);
    assert!(status == Some(1) && failed(&report).len() > 1, "{report}");
    let (status, report) = sanity(directory.path(), &[&args[..], &["--fail-fast"]].concat());
    assert_eq!((status, failed(&report).len()), (Some(1), 1), "{report}");
}

#[test]
fn failures_of_the_level_count() {
    let mutant = Mutant {
        kind: "ptp",
        version: "1.1.0",
        verb: "CHECK",
        body: "exit 0".to_owned(),
        seen: "damage.mac-other",
        clause: None,
    };
    let sound = sound();
    let directory = make(&mutant, sound.path());
    let args = ["--type", "ptp", "--cni-version", "1.1.0", "--only", mutant.seen];
    for (level, expected) in [("required", 0), ("recommended", 1), ("informational", 1)] {
        let (status, report) = sanity(directory.path(), &[&args[..], &["--level", level]].concat());
        assert!(failed(&report).contains("\"damage.mac-other\""), "{report}");
        assert_eq!(status, Some(expected), "{level}");
    }
}

/// A busy machine is no defect of a plugin: the report tells a limit from a signal.
#[test]
fn a_limit_is_told_from_a_signal() {
    let sound = sound();
    for (body, seen) in
        [("sleep 30", "no end within 20 seconds"), ("kill -9 $$", "killed by signal 9")]
    {
        let mutant = Mutant {
            kind: "loopback",
            version: "1.1.0",
            verb: "DEL",
            body: body.to_owned(),
            seen: "del.succeeds",
            clause: None,
        };
        let directory = make(&mutant, sound.path());
        let args = ["--type", "loopback", "--cni-version", "1.1.0", "--only", mutant.seen];
        let (_, report) = sanity(directory.path(), &[&args[..], &["--fail-fast"]].concat());
        assert!(report.to_string().contains(seen), "{report}");
    }
}

/// The output of `cni-sanity` with one option, by lines and tabs.
fn table(option: &str) -> Vec<Vec<String>> {
    let output = Command::new(cni_sanity()).arg(option).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect()
}

/// Clauses that bind plugins, are tested, and have no mutant, with the reason.
const WITHOUT_MUTANT: &[(&str, &str)] = &[];

/// Every MUST and SHOULD of the specification has a mutant, or a written reason for having none.
#[test]
fn each_clause_has_a_mutant_or_a_reason() {
    lane::begin_test();
    let of: BTreeMap<String, Vec<String>> = table("--list")
        .into_iter()
        .filter(|line| line.len() == 4)
        .map(|line| (line[0].clone(), line[2].split(' ').map(str::to_owned).collect()))
        .collect();
    let (mut broken, mut seen) = (BTreeSet::new(), BTreeSet::new());
    for Mutant { seen: id, clause, .. } in mutants::all() {
        let clauses = of.get(id).unwrap_or_else(|| panic!("no assertion {id}"));
        let clause = clause.map_or_else(|| clauses[0].clone(), str::to_owned);
        assert!(clauses.contains(&clause), "{id} does not follow from {clause}");
        broken.insert(clause);
        seen.insert(id);
    }
    println!("{} of {} assertions have a mutant", seen.len(), of.len());
    let mut missing = Vec::new();
    for line in table("--clauses") {
        let [id, force, section, text, tested] = &line[..] else { panic!("{line:?}") };
        let known = WITHOUT_MUTANT.iter().find(|(known, _)| known == id);
        let reason = tested.strip_prefix("- ").or(known.map(|(_, reason)| *reason));
        let has_mutant = broken.contains(id);
        assert!(!has_mutant || reason.is_none(), "{id} has a mutant, and a reason for none");
        if force == "-" || has_mutant {
            continue;
        }
        println!("no mutant: {id} ({force}, {section}): {text}: {}", reason.unwrap_or("?"));
        if reason.is_none() {
            missing.push(id.clone());
        }
    }
    assert!(missing.is_empty(), "neither mutant nor reason: {missing:?}");
}

/// A run for a version that a plugin does not list, or whose VERSION fails, is no success.
#[test]
fn an_unlisted_version_is_a_failure() {
    let sound = sound();
    for body in ["exit 1", r#"bend 's/,"1.1.0"//'"#, r#"bend 's/"supportedVersions"/"other"/'"#] {
        let mutant = Mutant {
            kind: "bridge",
            version: "1.1.0",
            verb: "VERSION",
            body: body.to_owned(),
            seen: "version.supports-configured",
            clause: None,
        };
        let directory = make(&mutant, sound.path());
        let types = ["--type", "bridge", "--type", "loopback", "--cni-version", "1.1.0"];
        let (status, report) =
            sanity(directory.path(), &[&types[..], &["--only", "stdin."]].concat());
        assert_eq!(status, Some(1), "{body}");
        assert!(failed(&report).contains("\"version.supports-configured\""), "{body}");
    }
    for args in [
        &["--type", "no-such-plugin"][..],
        &["--cni-version", "9.9.9"],
        &["--fail-fast"],
        &["--level", "high"],
    ] {
        let mut command = Command::new(cni_sanity());
        let output = command.args(args).arg(sound.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
}
