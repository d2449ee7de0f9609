//! Switching a node under load, in both directions: no call fails, nothing leaks.

use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use serde_json::{Value, json};

use super::Installer;
use crate::support::compare;
use crate::support::node::{Call, Container, Node, assert_unchanged, executable};

const PLUGINS: [&str; 4] = ["bridge", "host-local", "loopback", "ptp"];

fn conf(node: &Node) -> Value {
    let ipam = node.host_local(&["10.1.0.0/16"]);
    json!({"name": "n", "cniVersion": "1.0.0", "type": "bridge", "isDefaultGateway": true, "ipam": ipam})
}

/// A call of a plugin in the directory that is being switched.
fn call(at: &Installer<'_>, verb: &str, id: &str, container: &Container) -> Call {
    let call = at.node.call("bridge", verb).program(at.directory.join("bridge"));
    let call = call.env("CNI_PATH", &at.directory.display().to_string()).id(id);
    call.conf(&conf(at.node)).netns(&container.path())
}

fn copy_reference(at: &Installer<'_>, peer: &Path) {
    for name in PLUGINS {
        fs::copy(peer.join(name), at.directory.join(name)).unwrap();
    }
}

#[test]
fn a_node_with_containers_is_migrated_and_rolled_back() {
    let Some(peer) = compare::peer("switch of a node with containers") else { return };
    let node = Node::new();
    let at = Installer::new(&node);
    copy_reference(&at, &peer);
    let containers: Vec<_> = (0..4).map(|_| Container::new()).collect();
    let [first, second, third, fourth] = &containers[..] else { unreachable!() };
    // The bridge itself persists after DEL, so it must exist before the snapshot.
    call(&at, "ADD", "warm", first).result();
    call(&at, "DEL", "warm", first).ok();
    let before = node.snapshot();

    call(&at, "ADD", "first", first).result();
    call(&at, "ADD", "second", second).result();
    at.install(&[]);
    assert!(at.about("bridge").contains("+cnibox."));
    let prev = call(&at, "ADD", "third", third).result();
    let address = prev["ips"][0]["address"].as_str().unwrap().split('/').next().unwrap();
    assert!(first.pings(address), "a container of the reference reaches one of ours");
    call(&at, "DEL", "first", first).ok();
    call(&at, "ADD", "fourth", fourth).result();
    at.uninstall();
    assert!(!at.about("bridge").contains("cnibox"));
    assert!(second.pings(address), "and after the way back");
    // Each container is deleted by the other implementation: one that the reference added before
    // the switch, two that cnibox added.
    for (id, container) in [("second", second), ("third", third), ("fourth", fourth)] {
        call(&at, "DEL", id, container).ok();
    }
    assert_unchanged(&before, &node.snapshot());
    assert_eq!(node.leases("n"), [""; 0]);
}

#[test]
fn uninstall_converts_rules_of_running_containers() {
    let node = Node::new();
    let at = Installer::new(&node);
    for name in ["bridge", "host-local"] {
        at.write(name, &super::like_the_reference("1.9.1"));
    }
    at.install(&[]);
    let mut conf = conf(&node);
    conf["ipMasq"] = json!(true);
    conf["ipMasqBackend"] = json!("nftables");
    let container = Container::new();
    call(&at, "ADD", "pod", &container).conf(&conf).result();
    let tables = || node.sh("nft list tables");
    assert!(tables().contains("inet cnibox_masquerade"));
    at.call("uninstall", &["--no-hand-over"]).printed();
    assert!(tables().contains("inet cnibox_masquerade"));
    assert_ne!(
        node.sh("find /run/cni/cnibox -name '*.json'"),
        "",
        "the records of these rules stay"
    );
    at.install(&[]);
    at.uninstall();
    let after = tables();
    assert!(!after.contains("cnibox_masquerade"), "{after}");
    assert!(after.contains("inet cni_plugins_masquerade"), "{after}");
    assert_eq!(node.sh("find /run/cni/cnibox -name '*.json'"), "", "no record is left");
    // The restored plugin detaches the container, which leaves nothing that a later installation
    // would restore.
    node.sh("nft delete table inet cni_plugins_masquerade");
    at.install(&[]);
    let repair = node.cnibox(&["repair", "--dry-run"]);
    assert_eq!(repair.printed(), "nothing was missing\n");
}

/// A later installation would restore rules of containers that another plugin has deleted
/// meanwhile.
#[test]
fn uninstall_removes_its_records() {
    let node = Node::new();
    let at = Installer::new(&node);
    at.install(&[]);
    let mut conf = conf(&node);
    conf["ipMasq"] = json!(true);
    conf["ipMasqBackend"] = json!("nftables");
    let container = Container::new();
    call(&at, "ADD", "pod", &container).conf(&conf).result();
    at.uninstall();
    assert!(node.sh("nft list tables").contains("inet cni_plugins_masquerade"));
    assert_eq!(node.sh("find /run/cni/cnibox -name '*.json'"), "", "no record is left");
    // DEL of the reference.
    node.sh("nft delete table inet cni_plugins_masquerade");
    at.install(&[]);
    assert_eq!(node.cnibox(&["repair", "--dry-run"]).printed(), "nothing was missing\n");
}

/// ADD and DEL continuously in several threads while `switch` runs `rounds` times.
fn under_load(at: &Installer<'_>, rounds: usize, switch: impl Fn(usize)) {
    const WORKERS: usize = 4;
    let (stop, calls) = (AtomicBool::new(false), AtomicUsize::new(0));
    let failures = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for worker in 0..WORKERS {
            let (stop, calls, failures) = (&stop, &calls, &failures);
            scope.spawn(move || {
                let container = Container::new();
                let id = format!("pod-{worker}");
                while !stop.load(Ordering::Relaxed) {
                    for verb in ["ADD", "DEL"] {
                        // Without a retry: an executable that is busy or missing must be noticed.
                        match call(at, verb, &id, &container).try_run() {
                            Ok(outcome) if outcome.status == Some(0) => {}
                            other => failures.lock().unwrap().push(format!("{verb}: {other:?}")),
                        }
                        calls.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        for round in 0..rounds {
            switch(round);
            let done = calls.load(Ordering::Relaxed);
            while calls.load(Ordering::Relaxed) < done + WORKERS
                && failures.lock().unwrap().is_empty()
            {
                thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} failed: {:#?}", failures.len(), failures[0]);
    assert!(calls.into_inner() >= rounds * WORKERS);
}

#[test]
fn no_call_fails_during_upgrades() {
    let node = Node::new();
    let at = Installer::new(&node);
    at.install(&[]);
    let other = node.path("cnibox-other");
    fs::write(&other, super::as_release("0.0.9")).unwrap();
    node.sh(&format!("chmod 755 {}", other.display()));
    let before = node.leases("n");
    under_load(&at, 9, |round| {
        let mode = ["symlink", "copy", "hardlink"][round % 3];
        let args = ["--force", "--mode", mode];
        let call = at.call("install", &args);
        if round % 2 == 0 {
            call.program(&other).printed()
        } else {
            call.printed()
        };
    });
    assert_eq!(node.leases("n"), before);
    assert_eq!(node.ip("link show type veth"), json!([]));
}

#[test]
fn no_call_fails_while_replacing_and_restoring_the_reference() {
    let Some(peer) = compare::peer("switch under load") else { return };
    let node = Node::new();
    let at = Installer::new(&node);
    copy_reference(&at, &peer);
    under_load(&at, 6, |round| {
        if round % 2 == 0 {
            at.install(&[])
        } else {
            at.uninstall()
        };
    });
    assert_eq!(node.leases("n"), [""; 0]);
    assert_eq!(node.ip("link show type veth"), json!([]));
}

#[test]
fn concurrent_installers_agree() {
    let node = Node::new();
    let at = Installer::new(&node);
    at.write("bridge", &super::like_the_reference("1.5.1"));
    let outcomes = crate::support::parallel::at_once(8, |i| {
        at.call("install", &["--mode", ["symlink", "copy"][i % 2]]).run()
    });
    assert!(outcomes.iter().all(|outcome| outcome.status == Some(0)), "{outcomes:?}");
    at.is_all_cnibox();
    at.uninstall();
    assert_eq!(at.names(), ["bridge"]);
    assert_eq!(fs::read(at.directory.join("bridge")).unwrap(), super::like_the_reference("1.5.1"));
}

#[test]
fn an_install_completes_what_a_killed_one_left() {
    let node = Node::new();
    let at = Installer::new(&node);
    // Killed between the switches of two names: no manifest yet, a backup, incomplete files.
    at.write("bridge", &super::like_the_reference("1.5.1"));
    let own = at.directory.join(".cnibox");
    for dir in ["new", "old", "backup"] {
        fs::create_dir_all(own.join(dir)).unwrap();
    }
    fs::write(own.join("new/cnibox"), "half of it").unwrap();
    fs::write(own.join("backup/ptp"), super::like_the_reference("1.5.1")).unwrap();
    fs::copy(executable(), at.binary()).unwrap();
    std::os::unix::fs::symlink("cnibox", at.directory.join("ptp")).unwrap();
    at.install(&[]);
    at.is_all_cnibox();
    at.uninstall();
    assert_eq!(at.names(), ["bridge", "ptp"]);
    assert_eq!(fs::read(at.directory.join("ptp")).unwrap(), super::like_the_reference("1.5.1"));
}
