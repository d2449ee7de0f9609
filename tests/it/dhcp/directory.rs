//! The lease directory: which files the daemon reads, writes and removes, and which locations are
//! allowed.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::json;

use super::daemon::Started;
use super::world::World;
use crate::support::node::eventually;

/// The user id of `nobody`.
const NOBODY: u32 = 65534;

/// Creates old foreign files with the suffixes of lease files and of temporary lease files.
fn put_files_of_others(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    let hash = "0123456789abcdef0123456789abcdef.json";
    for name in ["daemon.json", "key.json", hash, "other.conf", ".tmp-1-0", ".tmp-precious"] {
        fs::write(dir.join(name), "{\"precious\": 1}").unwrap();
        let file = File::options().write(true).open(dir.join(name)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
    }
}

/// The sorted names of a directory's entries.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn foreign_files_are_kept_without_a_daemon() {
    let world = World::new();
    let dir = world.node.path("etc/docker");
    put_files_of_others(&dir);
    let before = names(&dir);
    let ipam = json!({"type": "dhcp", "daemonSocketPath": world.node.path("etc/docker.sock")});
    let net = world.alone("1.1.0").with(&json!({"ipam": ipam}));
    for verb in ["GC", "DEL"] {
        let valid = json!({"cni.dev/valid-attachments": []});
        let outcome = net.with(&valid).call(verb, "c1").run();
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        assert_eq!(names(&dir), before, "{verb}");
    }
}

#[test]
fn the_daemon_keeps_invalid_records() {
    let world = World::new();
    let dir = world.node.path("run/dhcp");
    put_files_of_others(&dir);
    let before: Vec<_> = names(&dir).into_iter().filter(|name| name != ".tmp-1-0").collect();
    let daemon = world.daemon(&[]);
    world.alone("1.1.0").call("STATUS", "").ok();
    drop(daemon);
    let mut after = names(&dir);
    after.retain(|name| name != "lock" && name != ".tmp-1-0");
    assert_eq!(after, before);
}

/// The lease is held, whether its record could be written or not; it is written with the next one.
#[test]
fn a_record_without_space_is_written_later() {
    let world = World::new();
    let dir = world.node.path("run/dhcp").display().to_string();
    world.node.sh(&format!("mkdir -pm 700 {dir}; mount -t tmpfs -o size=64k,mode=700 tmpfs {dir}"));
    let (_server, daemon) = (world.dnsmasq(9, &[]), world.daemon(&[]));
    let (net, containers) = (world.alone("1.1.0"), [world.wired("v1"), world.wired("v2")]);
    world.node.sh(&format!("cat /dev/zero > {dir}/filler 2> /dev/null || true"));
    net.add(&containers[0]);
    assert_eq!(world.records().len(), 0);
    net.on("CHECK", &containers[0]).ok();
    world.node.sh(&format!("rm {dir}/filler"));
    net.call("ADD", "c2").netns(&containers[1].path()).result();
    assert_eq!(world.records().len(), 2);
    drop(daemon);
    let _next = world.daemon(&[]);
    net.on("CHECK", &containers[0]).ok();
}

#[test]
fn the_daemon_is_started_below_run_cni_only() {
    let world = World::new();
    let own = world.own_run();
    let container = world.wired("v1");
    let elsewhere = world.node.path("new/a/b/c.sock");
    fs::create_dir_all("/run/cni").unwrap();
    symlink(world.node.path("new"), "/run/cni/link").unwrap();
    fs::create_dir(world.node.path("new")).unwrap();
    let net = |socket: &Path| {
        let keys = json!({"type": "dhcp", "startDaemon": true, "daemonSocketPath": socket});
        world.alone("1.1.0").with(&json!({"ipam": keys}))
    };
    for socket in [
        elsewhere,
        "/run/cni.sock".into(),
        "/run/cni/../c.sock".into(),
        "/run/cni/sub/../../c.sock".into(),
        "/run/cni/link/c.sock".into(),
        "/run/cni/..".into(),
        "run/cni/c.sock".into(),
    ] {
        let text = format!("is not possible for {}: it is not below /run/cni", socket.display());
        for verb in ["ADD", "STATUS"] {
            let error = net(&socket).on(verb, &container).error();
            assert!(error.msg.contains(&text), "{verb} {error:?}");
        }
    }
    assert_eq!(names(&world.node.path("new")), [""; 0]);
    // Only the flight recorder has written, for the failed calls; locks of attachments are in
    // /run/cni/cnibox.
    assert_eq!(names(Path::new("/run")), ["cni", "cnibox"]);
    assert_eq!(names(Path::new("/run/cni")), ["cnibox", "link"]);
    assert_eq!(names(Path::new("/run/cni/cnibox")), [""; 0]);
    // A symbolic link to an allowed directory is allowed.
    symlink("/run/cni", world.node.path("to-run")).unwrap();
    let _server = world.dnsmasq(9, &[]);
    let _ends_with_the_test = Started("/run/cni/dhcp/pid".into());
    net(&world.node.path("to-run/dhcp.sock")).add(&container);
    assert!(own.exists());
}

#[test]
fn a_directory_of_another_user_is_not_used() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let daemon = world.daemon(&[]);
    let container = world.wired("v1");
    let net = world.alone("1.1.0");
    net.add(&container);
    drop(daemon);
    let dir = world.node.path("run/dhcp");
    let (records, leased) = (world.records(), world.leased());
    assert_eq!((records.len(), leased.len()), (1, 1));
    let start = || {
        let socket = world.socket().display().to_string();
        world.node.tool("dhcp", &["daemon", "-socketpath", &socket]).run()
    };
    let refused = |text: &str| {
        let outcome = start();
        assert!(outcome.status == Some(1) && outcome.stderr.contains(text), "{outcome:?}");
        let outcome = net.on("DEL", &container).run();
        assert!(outcome.status == Some(0) && outcome.stderr.contains(text), "{outcome:?}");
        assert_eq!((world.records(), world.leased()), (records.clone(), leased.clone()));
    };
    chown(&dir, Some(NOBODY), None).unwrap();
    refused("user 65534 has it with mode 700");
    chown(&dir, Some(0), None).unwrap();
    fs::set_permissions(&dir, Permissions::from_mode(0o777)).unwrap();
    refused("user 0 has it with mode 777");
    fs::set_permissions(&dir, Permissions::from_mode(0o700)).unwrap();
    net.del(&container);
    world.leases_become(&[]);
    // A symbolic link in place of the directory is refused.
    fs::rename(&dir, world.node.path("run/real")).unwrap();
    symlink("real", &dir).unwrap();
    assert!(start().stderr.contains("not a directory"));
}

#[test]
fn a_linked_pidfile_is_not_written() {
    let world = World::new();
    let (precious, pid) = (world.node.path("precious"), world.node.path("x/pid"));
    fs::write(&precious, "precious").unwrap();
    fs::create_dir(world.node.path("x")).unwrap();
    let start = || {
        let (socket, pid) = (world.socket(), pid.display().to_string());
        let socket = socket.display().to_string();
        world.node.tool("dhcp", &["daemon", "-socketpath", &socket, "-pidfile", &pid]).run()
    };
    let refused = || {
        let outcome = start();
        let text = format!(
            "Error writing pidfile \"{}\": the path is not a regular file of this user",
            pid.display()
        );
        assert!(outcome.status == Some(1) && outcome.stderr.contains(&text), "{outcome:?}");
    };
    symlink(&precious, &pid).unwrap();
    refused();
    assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
    fs::remove_file(&pid).unwrap();
    fs::hard_link(&precious, &pid).unwrap();
    chown(&pid, Some(NOBODY), None).unwrap();
    refused();
    assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
    // A file of the same user is replaced, so that its other hard links do not change.
    chown(&pid, Some(0), None).unwrap();
    let daemon = world.daemon(&["-pidfile", &pid.display().to_string()]);
    assert_eq!(fs::read_to_string(&pid).unwrap(), daemon.id().to_string());
    assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
}

#[test]
fn files_and_directories_are_private_without_a_umask() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let pid = world.node.path("a/b/pid");
    let line = format!(
        "umask 000; exec {} daemon -socketpath {} -pidfile {}",
        world.node.bin().join("dhcp").display(),
        world.socket().display(),
        pid.display()
    );
    let mut command = std::process::Command::new("sh");
    let log = world.node.path("daemon.log");
    let _daemon = super::world::Process::start(command.args(["-c", &line]), &log);
    eventually("it does not listen", || world.socket().exists());
    let container = world.wired("v1");
    world.alone("1.1.0").add(&container);
    let parents = |path: &Path| path.parent().unwrap().to_owned();
    let mut paths: Vec<PathBuf> = vec![parents(&parents(&pid)), parents(&pid), pid];
    paths.extend([world.node.path("run"), world.socket(), world.node.path("run/dhcp")]);
    paths.extend(fs::read_dir(world.node.path("run/dhcp")).unwrap().map(|e| e.unwrap().path()));
    assert!(paths.len() >= 8, "{paths:?}");
    for path in paths {
        let mode = fs::symlink_metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o022, 0, "{} {mode:o}", path.display());
    }
}
