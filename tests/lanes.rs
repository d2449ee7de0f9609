//! scripts/lanes.sh with a stand-in for cargo: which failures of the host lane fail the run.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use cnibox_tests::root;
use tempfile::TempDir;

/// The output of a test executable.
const PASSED: &str = "test a::b ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored; 0 measured";
const FAILED: &str =
    "test a::b ... FAILED\ntest result: FAILED. 4 passed; 1 failed; 0 ignored; 0 measured";
const NONE: &str = "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured";

fn program(path: &Path, script: &str) {
    fs::write(path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A run in which cargo prints `output` and exits with `status`, and in which each line of `alone`
/// is the script of an executable that is run alone: whether it succeeds, and its last line.
fn run(output: &str, status: u8, alone: &str, is_long: bool) -> (bool, String) {
    let directory = TempDir::new().unwrap();
    let at = |name: &str| directory.path().join(name);
    let executable = at("unit").display().to_string();
    program(&at("unit"), alone);
    let output = output.replace("EXECUTABLE", &executable);
    let (tests, documents) = output.split_at(output.find("   Doc-tests").unwrap_or(output.len()));
    let [tests, documents] = [("tests", tests), ("documents", documents)].map(|(name, text)| {
        fs::write(at(name), text).unwrap();
        let status = if text.is_empty() { 0 } else { status };
        format!("cat {}; exit {status} ;;", at(name).display())
    });
    let cargo = format!(
        "case \"$1 $CNIBOX_LANE $*\" in\nbuild* | *' list '* | *--no-run*) exit ;;\n\
         *--doc*) {documents}\n*) {tests}\nesac"
    );
    program(&at("cargo"), &cargo);
    let mut lanes = Command::new("bash");
    lanes.arg(root().join("scripts/lanes.sh")).arg("host-and-vm").env_remove("CNIBOX_LONG");
    let path = format!("{}:{}", directory.path().display(), std::env::var("PATH").unwrap());
    lanes.env("PATH", path).env("CNIBOX_NO_VM", "1");
    if is_long {
        lanes.env("CNIBOX_LONG", "1");
    }
    let output = lanes.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.success(), said + &String::from_utf8_lossy(&output.stderr))
}

/// The output of a run of the unit tests of an executable.
fn unit(text: &str) -> String {
    format!("     Running unittests src/main.rs (EXECUTABLE)\n{text}\n")
}

fn echo(text: &str) -> String {
    format!("echo '{text}'")
}

#[test]
fn a_test_that_passes_when_retried_fails_only_make_test_long() {
    let (good, said) = run(&unit(PASSED), 0, "exit 1", true);
    assert!(good && said.contains("1 passed, 0 failed, "), "{said}");
    assert!(said.contains("second tries: 0;"), "{said}");
    let alone = format!("[ \"$*\" != '--exact --test-threads=2 a::b' ] || {}", echo(PASSED));
    let (good, said) = run(&unit(FAILED), 101, &alone, false);
    assert!(good && said.contains("had a second try: a::b\n"), "{said}");
    assert!(said.contains("5 passed, 0 failed, "), "{said}");
    assert!(said.contains("second tries: 1;"), "{said}");
    let broken = FAILED.replace("test a::b", "cnibox: a warning of another test a::b");
    let (good, said) = run(&unit(&broken), 101, &alone, false);
    assert!(good && said.contains("had a second try: a::b\n"), "{said}");
    let (good, said) = run(&unit(FAILED), 101, &echo(PASSED), true);
    assert!(!good && said.contains("second tries: 1;"), "{said}");
}

#[test]
fn a_failed_or_empty_retry_fails_the_run() {
    for alone in [echo(FAILED) + "; exit 101", echo(NONE), echo(PASSED) + "; exit 1"] {
        let (good, said) = run(&unit(FAILED), 101, &alone, false);
        assert!(!good && said.contains("second tries: 1;"), "{said}");
    }
}

#[test]
fn doctests_and_many_failures_are_not_retried() {
    let four = FAILED.replace("test a::b ... FAILED\n", &"test a::b ... FAILED\n".repeat(4));
    let four = four.replace("1 failed", "4 failed");
    let document = FAILED.replace("a::b", "src/runtime/mod.rs - runtime (line 13)");
    for (output, reason) in [
        (format!("   Doc-tests cnibox\n{document}\n"), "a doctest"),
        (unit(FAILED) + &format!("   Doc-tests cnibox\n{document}\n"), "a doctest, too"),
        (unit(&four), "many"),
        (unit("test a::b ... ok"), "the executable died"),
        (unit("test a::c ... ok") + &unit(FAILED), "one of two executables died"),
        (unit("test result: FAILED. 4 passed; 1 failed; 0 ignored"), "no name"),
        (unit(PASSED), "cargo failed"),
    ] {
        let (good, said) = run(&output, 101, &echo(PASSED), false);
        assert!(!good && said.contains("second tries: 0;"), "{reason}: {said}");
    }
}
