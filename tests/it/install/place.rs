//! Installation as other users, below other roots, with SELinux labels, and on file systems without
//! full support.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use super::Installer;
use crate::support::node::{Call, Node, executable};

/// The call as `$0 "$@"` of a shell script that mounts a file system first.
fn after_mount(call: &Call, script: &str) -> Call {
    call.clone().in_script(&format!("{script}; exec \"$0\" \"$@\""))
}

#[test]
fn a_read_only_directory_is_an_error_unless_up_to_date() {
    let node = Node::new();
    let at = Installer::new(&node);
    let directory = at.directory.display().to_string();
    let ro =
        format!("mount --bind {directory} {directory} && mount -o remount,bind,ro {directory}");
    let outcome = after_mount(&at.call("install", &[]), &ro).run();
    assert_eq!(outcome.status, Some(1), "{outcome:?}");
    let said = "read-only file system; its file system is mounted read-only";
    assert!(outcome.stderr.contains(said), "{outcome:?}");
    assert_eq!(at.names(), [""; 0]);
    at.install(&[]);
    let outcome = after_mount(&at.call("install", &[]), &ro).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(outcome.stdout.contains("nothing to do"), "{outcome:?}");
    let outcome = after_mount(&at.call("uninstall", &[]), &ro).run();
    assert_eq!(outcome.status, Some(1), "{outcome:?}");
    at.is_all_cnibox();
}

#[test]
fn a_noexec_directory_is_refused_before_any_change() {
    let node = Node::new();
    let at = Installer::new(&node);
    let directory = at.directory.display().to_string();
    at.write("bridge", &super::like_the_reference("1.5.1"));
    let before = at.names();
    let noexec =
        format!("mount --bind {directory} {directory} && mount -o remount,bind,noexec {directory}");
    let outcome = after_mount(&at.call("install", &[]), &noexec).run();
    assert_eq!(outcome.status, Some(1), "{outcome:?}");
    for text in ["ask ", "nothing was changed", "permission denied", "--no-verify"] {
        assert!(outcome.stderr.contains(text), "{text}: {outcome:?}");
    }
    assert_eq!(at.names(), before);
    assert_eq!(fs::read(at.directory.join("bridge")).unwrap(), super::like_the_reference("1.5.1"));
    let outcome = after_mount(&at.call("install", &["--no-verify"]), &noexec).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    at.is_all_cnibox();
}

#[test]
fn a_full_disk_changes_nothing() {
    let node = Node::new();
    let at = Installer::new(&node);
    let directory = at.directory.display().to_string();
    let check = "echo old > bridge.keep; \"$0\" \"$@\"; echo status $?; ls -A";
    let script = format!("mount -t tmpfs -o size=1m tmpfs {directory}; cd {directory}; {check}");
    let outcome = at.call("install", &[]).in_script(&script).run();
    assert!(outcome.stderr.contains("no space left on device; free space"), "{outcome:?}");
    assert_eq!(outcome.stdout, "status 1\n.cnibox\nbridge.keep\n", "{outcome:?}");
}

#[test]
fn an_ordinary_user_may_install_below_another_root() {
    let node = Node::new();
    let at = Installer::new(&node);
    // The executable must be readable by the unprivileged user.
    let bin = node.path("cnibox");
    fs::copy(executable(), &bin).unwrap();
    let root = node.path("root");
    fs::create_dir(&root).unwrap();
    node.sh(&format!(
        "chmod 755 {}; chown 65534:65534 {}",
        node.path("").display(),
        root.display()
    ));
    let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let call = node.tool("cnitool", &["install", "--json"]).program(&bin).under(&user);
    let call = call.env("DESTDIR", &root.display().to_string());
    call.printed();
    let directory = root.join("opt/cni/bin");
    assert_eq!(fs::read_link(directory.join("bridge")).unwrap().to_str(), Some("cnibox"));
    assert_eq!(directory.join("cnibox").metadata().unwrap().permissions().mode() & 0o7777, 0o755);
    // A directory owned by root is refused with a remedy.
    let call = at.call("install", &[]).program(&bin).under(&user);
    let outcome = call.run();
    assert_eq!(outcome.status, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("permission denied; run it as root"), "{outcome:?}");
}

#[test]
fn files_get_the_label_of_their_directory() {
    const LABEL: &[u8] = b"system_u:object_r:bin_t:s0\0";
    let node = Node::new();
    let at = Installer::new(&node);
    let flags = rustix::fs::XattrFlags::empty();
    let set = rustix::fs::setxattr(&at.directory, "security.selinux", LABEL, flags);
    if set.is_err() {
        println!("SKIP files_get_the_label_of_their_directory: {set:?}");
        return;
    }
    for mode in ["symlink", "copy"] {
        at.install(&["--mode", mode]);
        for name in ["cnibox", "bridge"] {
            let mut label = [0; 64];
            let path = at.directory.join(name);
            let length = rustix::fs::lgetxattr(&path, "security.selinux", &mut label).unwrap_or(0);
            assert_eq!(&label[..length], LABEL, "{mode} {name}");
        }
    }
}

#[test]
fn a_running_executable_is_replaced() {
    let node = Node::new();
    let at = Installer::new(&node);
    at.install(&[]);
    let mut child = Command::new(at.binary()).arg("pause").spawn().unwrap();
    fs::write(node.path("cnibox-other"), super::as_release("0.0.9")).unwrap();
    node.sh(&format!("chmod 755 {}", node.path("cnibox-other").display()));
    at.call("install", &["--force"]).program(node.path("cnibox-other")).printed();
    assert_eq!(child.try_wait().unwrap(), None);
    child.kill().unwrap();
    child.wait().unwrap();
    at.is_all_cnibox();
}
