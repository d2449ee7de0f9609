//! `cni-sanity` on the plugins of this project, which conform, and on mutants: plugins with one
//! defect each, which the suite must detect.

mod mutants;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::Value;
use tempfile::TempDir;

use self::mutants::Mutant;
use crate::lane::{self, needs};
use crate::node::executable;

/// A directory with all plugins of this project, outside `/run`, which each case mounts anew.
fn sound() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut install = Command::new(executable());
    let output = install.args(["install", "--no-verify"]).arg(folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder
}

/// The exit status and the report of a run.
fn sanity(folder: &Path, args: &[&str]) -> (Option<i32>, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cni-sanity"));
    let output = command.args(["--format", "json"]).args(args).arg(folder).output().unwrap();
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

/// Known deviations from optional assertions: loopback's CHECK does not need a `prevResult`; a
/// killed ADD of host-local may leave a temporary file, which its next ADD overwrites.
fn is_known(verdict: &Value) -> bool {
    let detail = verdict["detail"].as_str().unwrap_or_default();
    match verdict["id"].as_str().unwrap_or_default() {
        "check.no-prev-result" => verdict["type"] == "loopback",
        "faults.killed-add.leaves-nothing" => {
            detail.ends_with("/.cnibox/tmp") && !detail.contains(';')
        }
        _ => false,
    }
}

fn assert_sound(args: &[&str], types: usize) {
    let folder = sound();
    let (status, report) = sanity(folder.path(), args);
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
    assert_sound(&[], 19);
}

/// Plugins killed at system calls, full disks, many concurrent calls.
#[test]
fn plugins_survive_faults() {
    let types = ["--type", "bridge", "--type", "loopback", "--cni-version", "1.1.0"];
    assert_sound(&[&types[..], &["--faults", "--only", "faults."]].concat(), 2);
}

#[test]
fn plugins_that_need_kernel_modules_conform() {
    needs!(lane::DUMMY, lane::VRF, lane::VLAN, lane::IPVLAN);
    let types = ["dummy", "vrf", "vlan", "ipvlan"].map(|name| ["--type", name]);
    let args: Vec<&str> =
        types.as_flattened().iter().copied().chain(["--cni-version", "1.1.0"]).collect();
    assert_sound(&args, 4);
}

/// A plugin directory with the mutant; the other types are correct.
fn make(mutant: &Mutant, sound: &Path) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(sound).unwrap() {
        let name = entry.unwrap().file_name();
        if name != mutant.kind {
            symlink(sound.join(&name), folder.path().join(&name)).unwrap();
        }
    }
    let real = sound.join(mutant.kind).display().to_string();
    let Mutant { verb, body, .. } = mutant;
    let script = format!(
        "#!/bin/sh\nin=$(cat)\n\
         run() {{ printf '%s' \"$in\" | '{real}'; }}\n\
         bend() {{ out=$(run); status=$?; printf '%s\\n' \"$out\" | sed \"$1\"; exit $status; }}\n\
         inside() {{ nsenter --net=\"$CNI_NETNS\" \"$@\"; }}\n\
         case $CNI_COMMAND in\n{verb}) {body} ;;\n*) run ;;\nesac\n"
    );
    let path = folder.path().join(mutant.kind);
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// Returns `Ok` if the suite detects the defect, otherwise the assertions that failed instead.
fn is_caught(mutant: &Mutant, sound: &Path) -> Result<(), String> {
    let folder = make(mutant, sound);
    let args = [
        "--type",
        mutant.kind,
        "--cni-version",
        mutant.version,
        "--only",
        mutant.seen,
        "--jobs",
        "1",
    ];
    let (_, report) = sanity(folder.path(), &args);
    let failed = failed(&report);
    if failed.contains(&format!("\"{}\"", mutant.seen)) {
        return Ok(());
    }
    Err(format!("{} ({}): {failed:?}", mutant.body, mutant.seen))
}

#[test]
fn mutants_are_caught() {
    let (mutants, sound, next) = (mutants::all(), sound(), AtomicUsize::new(0));
    assert!(mutants.len() >= 60);
    let survivors: Vec<String> = thread::scope(|scope| {
        let work = || {
            let numbers = std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)));
            let own = numbers.map_while(|number| mutants.get(number));
            own.filter_map(|mutant| is_caught(mutant, sound.path()).err()).collect::<Vec<_>>()
        };
        let workers: Vec<_> = (0..8).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    println!("{} of {} mutants are caught", mutants.len() - survivors.len(), mutants.len());
    assert!(survivors.is_empty(), "{}", survivors.join("\n"));
}
