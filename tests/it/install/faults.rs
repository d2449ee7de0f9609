//! The installer fails or is killed at each change of a file: each name is a working plugin at
//! every moment, a failed run leaves the directory unchanged, and the next run completes a killed
//! one.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use super::{Installer, like_the_reference};
use crate::support::node::Node;
use crate::support::strace::{self, Hits, Syscall};

/// Few names suffice. No plugin is started, because strace would follow the child processes.
const ARGS: [&str; 3] = ["--only", "bridge,ptp", "--no-verify"];

/// Fills the directory with fresh reference plugins.
fn prepare(at: &Installer<'_>) {
    fs::remove_dir_all(&at.directory).unwrap();
    fs::create_dir(&at.directory).unwrap();
    for (name, release) in [("bridge", "1.1.1"), ("ptp", "1.5.1"), ("vlan", "1.6.1")] {
        at.write(name, &like_the_reference(release));
    }
}

/// The names with the contents of their files; links are followed.
fn contents(at: &Installer<'_>) -> BTreeMap<PathBuf, Vec<u8>> {
    let paths = at.names().into_iter().map(|name| at.directory.join(name));
    paths.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

fn points(node: &Node, at: &Installer<'_>) -> (Vec<Syscall>, Vec<Syscall>) {
    prepare(at);
    let (outcome, calls) = strace::record(node, &at.call("install", &ARGS));
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let points = strace::file_changes(&calls);
    (calls, points)
}

#[test]
fn files_are_replaced_by_rename_only() {
    let node = Node::new();
    let at = Installer::new(&node);
    let (calls, _) = points(&node, &at);
    let name = format!("\"{}\"", at.directory.join("bridge").display());
    let touched = calls.iter().filter(|call| call.text.contains(&name));
    let mut renamed = 0;
    for call in touched {
        match call.name.as_str() {
            "rename" | "renameat" | "renameat2" => renamed += 1,
            // A backup link of the replaced file; the rest only reads.
            "link" | "linkat" => assert!(call.text.contains(".cnibox/"), "{call:?}"),
            "openat" | "open" => assert!(call.text.contains("O_RDONLY"), "{call:?}"),
            "lstat" | "stat" | "statx" | "newfstatat" | "readlink" | "readlinkat" => {}
            _ => panic!("{call:?}"),
        }
    }
    assert_eq!(renamed, 1);
}

#[test]
fn a_failed_install_changes_nothing() {
    let node = Node::new();
    let at = Installer::new(&node);
    let (_, points) = points(&node, &at);
    prepare(&at);
    let before = contents(&at);
    let mut failed = Hits::default();
    for point in &points {
        prepare(&at);
        let (outcome, injected) = point.run(&node, &at.call("install", &ARGS), "error=EIO");
        assert!(injected, "{}: {outcome:?}", point.describe());
        if outcome.status == Some(0) {
            // The error met only the clean-up, or a hard link that fell back to a copy.
            at.uninstall();
        } else {
            failed.extend([point]);
            let reason = outcome.stderr.contains("/O error");
            assert!(reason, "{}: {outcome:?}", point.describe());
        }
        assert_eq!(contents(&at), before, "{}: {outcome:?}", point.describe());
    }
    failed.assert_include(&["open", "rename", "symlink", "fsync"]);
}

#[test]
fn a_killed_install_leaves_a_plugin_at_every_name() {
    let node = Node::new();
    let at = Installer::new(&node);
    let (_, points) = points(&node, &at);
    prepare(&at);
    let before = contents(&at);
    for point in &points {
        prepare(&at);
        let (_, injected) = point.run(&node, &at.call("install", &ARGS), "signal=KILL");
        assert!(injected, "{}", point.describe());
        for name in ["bridge", "ptp", "vlan"] {
            assert!(fs::read(at.directory.join(name)).is_ok(), "{name}: {}", point.describe());
        }
        at.install(&ARGS);
        assert!(at.about("bridge").contains("+cnibox."), "{}", point.describe());
        at.uninstall();
        assert_eq!(contents(&at), before, "{}", point.describe());
        assert!(!at.directory.join(".cnibox").exists());
    }
    let mut killed = Hits::default();
    killed.extend(&points);
    killed.assert_include(&["open", "rename", "symlink", "unlink", "fsync"]);
}

#[test]
fn a_killed_uninstall_can_be_repeated() {
    let node = Node::new();
    let at = Installer::new(&node);
    prepare(&at);
    let before = contents(&at);
    at.install(&ARGS);
    let (outcome, calls) = strace::record(&node, &at.call("uninstall", &[]));
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let points = strace::file_changes(&calls);
    for point in &points {
        prepare(&at);
        at.install(&ARGS);
        let (_, injected) = point.run(&node, &at.call("uninstall", &[]), "signal=KILL");
        assert!(injected, "{}", point.describe());
        for name in ["bridge", "ptp", "vlan"] {
            assert!(fs::read(at.directory.join(name)).is_ok(), "{name}: {}", point.describe());
        }
        at.uninstall();
        assert_eq!(contents(&at), before, "{}", point.describe());
        assert!(!at.directory.join(".cnibox").exists(), "{}", point.describe());
    }
    let mut killed = Hits::default();
    killed.extend(&points);
    killed.assert_include(&["open", "rename", "unlink", "fsync"]);
}
