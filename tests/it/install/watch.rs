//! The long-running `install --watch` and `pause`: repairs, no wake-ups without need, and
//! termination at the first signal, also as PID 1.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::Installer;
use crate::support::node::{Node, Running, eventually, executable, exists};

#[test]
fn watch_restores_changed_files_until_a_signal() {
    let node = Node::new();
    let at = Installer::new(&node);
    let watcher = Running::start(&at.call("install", &["--watch"]));
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
    eventually("the rest, when the way is free", || exists(&link) && exists(at.directory.join("ptp")));
    watcher.ends();
    at.is_all_cnibox();
}

#[test]
fn watch_sleeps_when_nothing_changes() {
    let node = Node::new();
    let at = Installer::new(&node);
    let watcher = Running::start(&at.call("install", &["--watch"]));
    let manifest = at.directory.join(".cnibox/manifest.json");
    eventually("not installed", || exists(&manifest) && !exists(at.directory.join(".cnibox/new")));
    // The watcher still processes the events of its own changes.
    eventually("it works without need", || watcher.sleeps());
    watcher.ends();
}

/// `install --watch` is the former name of `repair --watch --install`.
#[test]
fn install_watch_warns_once_of_its_deprecation() {
    let node = Node::new();
    let at = Installer::new(&node);
    let directory = at.directory.display().to_string();
    at.install(&[]);
    for (args, lines) in
        [(["install", &directory, "--watch"].to_vec(), 1), (vec!["repair", "--watch", "--install", &directory], 0)]
    {
        let (said, link) = (node.path("stderr"), at.directory.join("bridge"));
        let call = node.cnibox(&args).without("DESTDIR");
        let stderr = fs::File::create(&said).unwrap();
        let watcher = Running::start_with(&call, stderr.into());
        for _ in 0..2 {
            eventually("it does not wait", || watcher.sleeps());
            fs::remove_file(&link).unwrap();
            eventually("a removed link", || exists(&link));
        }
        watcher.ends();
        let said = fs::read_to_string(said).unwrap();
        let is_deprecated = |line: &&str| {
            line.starts_with("install --watch is deprecated") && line.contains("repair --watch --install")
        };
        assert_eq!(said.lines().filter(is_deprecated).count(), lines, "{said}");
        assert_eq!(said.matches("deprecated").count(), lines, "{said}");
    }
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
