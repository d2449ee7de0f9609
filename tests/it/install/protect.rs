//! `install --protect`: what `cp` onto a plugin's name can replace, and that the immutable flag
//! does not hinder legitimate replacements of the executable.

use std::fs::{self, File};
use std::path::Path;

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

use super::{Installer, as_release};
use crate::support::node::{Node, Running, eventually, executable, exists};

/// A directory on its own file system.
fn on_tmpfs(node: &Node) -> Installer<'_> {
    let at = Installer::new(node);
    node.sh(&format!("mount -t tmpfs tmpfs {}", at.directory.display()));
    at
}

/// Whether the file is immutable; `None` if the file system has no such flag, such as tmpfs before
/// Linux 6.6.
fn is_immutable(path: &Path) -> Option<bool> {
    let flags = ioctl_getflags(File::open(path).unwrap()).ok()?;
    Some(flags.contains(IFlags::IMMUTABLE))
}

/// Writes the text `x` to a plugin's name, as another project's installer does; returns whether
/// that succeeded.
fn copies(at: &Installer<'_>, how: &str, name: &str) -> bool {
    let x = at.node.path("x");
    fs::write(&x, "x").unwrap();
    let line = format!(
        "{how} {} {} 2>/dev/null && echo done || true",
        x.display(),
        at.directory.join(name).display()
    );
    at.node.sh(&line) == "done\n"
}

#[test]
fn cp_cannot_overwrite_a_protected_executable() {
    let node = Node::new();
    let at = on_tmpfs(&node);
    at.install(&["--protect"]);
    if is_immutable(&at.binary()).is_none() {
        println!("SKIP cp_cannot_overwrite_a_protected_executable: no immutable flag on tmpfs");
        return;
    }
    assert_eq!(is_immutable(&at.binary()), Some(true));
    assert!(at.install(&["--protect"]).contains("nothing to do"));
    at.is_all_cnibox();
    assert!(!copies(&at, "cp", "portmap"));
    at.is_all_cnibox();
    assert!(copies(&at, "cp -f", "portmap"));
    assert_eq!(fs::read(at.directory.join("portmap")).unwrap(), b"x");
    assert!(at.about("bridge").contains("+cnibox."));
    at.install(&["--replace", "--no-backup"]);
    at.is_all_cnibox();
    assert_eq!(is_immutable(&at.binary()), Some(true), "without the option, too");

    // A killed installer left the executable without the flag.
    let file = File::open(at.binary()).unwrap();
    ioctl_setflags(&file, IFlags::empty()).unwrap();
    at.install(&[]);
    assert_eq!(is_immutable(&at.binary()), Some(true));

    // Another release replaces the executable and is protected.
    let other = node.path("cnibox-other");
    fs::write(&other, as_release("0.0.9")).unwrap();
    node.sh(&format!("chmod 755 {}", other.display()));
    at.call("install", &["--force"]).program(&other).printed();
    assert_eq!(fs::read(at.binary()).unwrap(), fs::read(&other).unwrap());
    assert_eq!(is_immutable(&at.binary()), Some(true));
    at.uninstall();
    assert_eq!(at.names(), Vec::<String>::new());
}

#[test]
fn install_warns_if_the_immutable_flag_cannot_be_set() {
    let node = Node::new();
    let at = on_tmpfs(&node);
    // Without `CAP_LINUX_IMMUTABLE` the flag cannot be set.
    let drop = ["setpriv", "--bounding-set=-linux_immutable", "--inh-caps=-linux_immutable"];
    let outcome = at.call("install", &["--protect"]).under(&drop).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains("is not protected: "), "{outcome:?}");
    at.is_all_cnibox();
    let outcome = at.call("install", &["--protect", "--mode", "hardlink"]).run();
    assert_eq!(outcome.status, Some(2), "{outcome:?}");
}

/// The flag would be cleared for a moment, in which another program may write through a link.
#[test]
fn restoring_links_keeps_the_immutable_flag() {
    let node = Node::new();
    let at = on_tmpfs(&node);
    at.install(&["--protect"]);
    if is_immutable(&at.binary()).is_none() {
        println!("SKIP restoring_links_keeps_the_immutable_flag: no immutable flag on tmpfs");
        return;
    }
    fs::remove_file(at.directory.join("portmap")).unwrap();
    // Without the capability the flag can be neither cleared nor set.
    let drop = ["setpriv", "--bounding-set=-linux_immutable", "--inh-caps=-linux_immutable"];
    let outcome = at.call("install", &[]).under(&drop).run();
    assert_eq!((outcome.status, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
    at.is_all_cnibox();
    assert_eq!(is_immutable(&at.binary()), Some(true));
    at.uninstall();
}

/// No process runs the executable, so writing to it does not fail with `ETXTBSY`.
#[test]
fn install_restores_an_overwritten_executable() {
    let node = Node::new();
    let at = Installer::new(&node);
    at.install(&[]);
    assert!(copies(&at, "cp", "portmap"));
    assert_eq!(fs::read(at.binary()).unwrap(), b"x");
    at.install(&[]);
    at.is_all_cnibox();
    assert!(!exists(at.directory.join(".cnibox/backup/cnibox")));
}

/// `cnibox repair --watch --install` for the directory.
fn repair(at: &Installer<'_>) -> Running {
    let directory = at.directory.display().to_string();
    let cache = at.node.path("cache").display().to_string();
    let args = [
        "repair",
        "--watch",
        "--install",
        &directory,
        "--plugin-path",
        &directory,
        "--cache-dir",
        &cache,
    ];
    let watch = Running::start(&at.node.tool("cnitool", &args).program(executable()));
    // A removal before the first scan would make the watch fail.
    eventually("it does not wait for changes", || watch.sleeps());
    fs::remove_file(at.directory.join("portmap")).unwrap();
    eventually("the directory is not kept", || exists(at.directory.join("portmap")));
    watch
}

#[test]
fn repair_restores_overwritten_plugins() {
    let node = Node::new();
    let at = Installer::new(&node);
    at.install(&[]);
    let watch = repair(&at);
    // The executable is busy while repair asks a plugin for its versions.
    eventually("it can be written", || copies(&at, "cp", "ptp"));
    eventually("healed", || at.about("bridge").contains("+cnibox."));
    watch.ends();
    at.is_all_cnibox();
}

/// As on K3s, whose own plugins are skipped.
#[test]
fn repair_restores_installed_files_only() {
    let node = Node::new();
    let at = Installer::new(&node);
    at.write("bridge", b"theirs");
    at.install(&["--skip", "bridge,ptp", "--mode", "hardlink"]);
    let watch = repair(&at);
    assert!(at.directory.join("portmap").symlink_metadata().unwrap().is_file());
    watch.ends();
    assert_eq!(fs::read(at.directory.join("bridge")).unwrap(), b"theirs");
    assert!(!exists(at.directory.join("ptp")));
}
