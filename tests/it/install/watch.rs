//! The long-running `repair --watch --install` and `pause`: repairs, no wake-ups without need, and
//! termination at the first signal, also as PID 1.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::Installer;
use crate::support::node::{Node, Running, eventually, executable, exists};

/// Keeps the directory as installed.
fn watch(node: &Node, at: &Installer<'_>) -> Running {
    let directory = at.directory.display().to_string();
    Running::start(&node.cnibox(&["repair", "--watch", "--install", &directory]))
}

#[test]
fn watch_restores_changed_files_until_a_signal() {
    let node = Node::new();
    let at = Installer::new(&node);
    let watcher = watch(&node, &at);
    let link = at.directory.join("bridge");
    let is_ours = || at.about("bridge").contains("+cnibox.");
    let rests = || is_ours() && !exists(at.directory.join(".cnibox/new"));
    eventually("not installed", rests);
    // Removed; replaced by a package; executable removed; directory removed.
    fs::remove_file(&link).unwrap();
    eventually("a removed link", || exists(&link));
    fs::remove_file(&link).unwrap();
    at.write("bridge", &super::like_the_reference("1.5.1"));
    eventually("a replaced link", || fs::read_link(&link).is_ok() && is_ours());
    fs::remove_file(at.binary()).unwrap();
    eventually("a removed executable", || exists(at.binary()) && is_ours());
    // The watcher may add files during the removal.
    eventually("the directory goes", || fs::remove_dir_all(&at.directory).is_ok());
    eventually("a removed directory", || exists(&link) && rests());
    // A foreign file is left alone and does not end the watcher.
    fs::remove_file(&link).unwrap();
    symlink("nowhere", &link).unwrap();
    fs::remove_file(at.directory.join("ptp")).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(fs::read_link(&link).unwrap().to_str(), Some("nowhere"));
    fs::remove_file(&link).unwrap();
    eventually("the rest, when the way is free", || {
        exists(&link) && exists(at.directory.join("ptp"))
    });
    watcher.ends();
    at.is_all_cnibox();
}

#[test]
fn watch_sleeps_when_nothing_changes() {
    let node = Node::new();
    let at = Installer::new(&node);
    let watcher = watch(&node, &at);
    let manifest = at.directory.join(".cnibox/manifest.json");
    eventually("not installed", || exists(&manifest) && !exists(at.directory.join(".cnibox/new")));
    // The watcher still processes the events of its own changes.
    eventually("it works without need", || watcher.sleeps());
    watcher.ends();
}

#[test]
fn pause_ends_at_a_signal_even_as_process_1() {
    let node = Node::new();
    let pause = node.tool("cnitool", &["pause"]).program(executable());
    let running = Running::start(&pause);
    let waiting = |pid: u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.starts_with("Name:\tcnibox\n") && status.contains("State:\tS")
    };
    eventually("pause does not wait", || waiting(running.id()));
    running.ends();
    // In its own PID namespace; unshare waits for the child and forwards no signals.
    let outer = Running::start(&pause.under(&["unshare", "--pid", "--fork", "--kill-child"]));
    let children = format!("/proc/{0}/task/{0}/children", outer.id());
    let child = || fs::read_to_string(&children).unwrap().trim().parse::<u32>().ok();
    eventually("process 1 does not wait", || child().is_some_and(waiting));
    kill(Pid::from_raw(child().unwrap().cast_signed()), Signal::SIGTERM).unwrap();
    eventually("process 1 is still there", || child().is_none_or(|pid| !waiting(pid)));
}
