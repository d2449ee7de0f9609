//! The namespaces of leases: how the daemon gets them, enters them again, and tells them from
//! others.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::world::{Process, World, addresses};
use crate::lane::{self, needs};
use crate::support::node::{Container, assert_unchanged, eventually};

/// Changes the only record of the world.
fn edit_record(world: &World, edit: impl FnOnce(&mut Value)) {
    let path = &world.records()[0];
    let mut content: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    edit(&mut content["record"]);
    fs::write(path, content.to_string()).unwrap();
}

/// A container in whose place another one is: the same mount point, and the record has the number
/// of the other namespace, as if the kernel had given it again.
fn replaced(world: &World, edit: impl FnOnce(&mut Value)) -> Container {
    let one = world.wired("v1");
    let mount = world.mounted(&one, "netns");
    let mut daemon = world.daemon(&[]);
    world.alone("1.1.0").call("ADD", "c1").netns(&mount).result();
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    world.node.sh(&format!("umount {mount}"));
    drop(one);
    eventually("the first lives", || !world.node.ip("link").to_string().contains("\"v1\""));
    let two = world.wired("v2");
    two.sh("ip addr add 192.168.1.200/24 dev eth0");
    assert_eq!(world.mounted(&two, "netns"), mount);
    let meta = fs::metadata(&mount).unwrap();
    edit_record(world, |record| {
        record["netnsId"] = json!([meta.dev(), meta.ino()]);
        edit(record);
    });
    two
}

/// Starts a daemon, which must give this reason, keep that many records, and must not touch the
/// namespace.
fn is_left_alone(world: &World, why: &str, records: usize, two: &Container) {
    let (before, said) = (two.snapshot(&world.node), world.isc_log());
    let daemon = world.daemon(&[]);
    eventually("it does not say why", || world.daemon_log().contains(why));
    eventually("the record", || world.records().len() == records);
    eventually("it keeps the namespace open", || daemon.open_namespaces() == 0);
    assert_unchanged(&before, &two.snapshot(&world.node));
    assert_eq!(world.isc_log(), said, "nothing was sent");
}

#[test]
fn a_namespace_with_a_reused_inode_is_not_changed() {
    needs!(lane::NETNS_COOKIE);
    let world = World::new();
    let _server = world.isc(600);
    let two = replaced(&world, |record| assert!(record["netnsCookie"].is_u64(), "{record}"));
    is_left_alone(&world, "another network namespace has the number of the container's", 0, &two);
}

#[test]
fn del_without_a_daemon_keeps_another_namespace() {
    let world = World::new();
    let _server = world.isc(600);
    let two = replaced(&world, |_| {});
    let (before, said) = (two.snapshot(&world.node), world.isc_log());
    world.alone("1.1.0").call("DEL", "c1").run();
    assert!(world.records().is_empty());
    assert_unchanged(&before, &two.snapshot(&world.node));
    assert_eq!(world.isc_log(), said, "nothing was sent");
}

#[test]
fn a_record_of_release_0_2_0_needs_another_proof() {
    needs!(lane::NETNS_COOKIE);
    let without_cookie = |record: &mut Value| {
        for key in ["netnsCookie", "netnsNumber", "ifindex"] {
            record.as_object_mut().unwrap().remove(key).unwrap();
        }
    };
    let world = World::new();
    let _server = world.isc(600);
    let two = replaced(&world, without_cookie);
    is_left_alone(&world, "eth0 is not known by its Ethernet or IP address", 1, &two);
    world.alone("1.1.0").call("DEL", "c1").ok();
    assert!(world.records().is_empty());
    // The same interface, and after that the same address on it, are proofs.
    let mut daemon = world.daemon(&[]);
    let (net, container) = (world.net("1.1.0"), Container::new());
    let result = net.add(&container);
    for _ in 0..2 {
        daemon.signal(Signal::SIGKILL);
        daemon.wait();
        edit_record(&world, without_cookie);
        daemon = world.daemon(&[]);
        let saved = || fs::read_to_string(&world.records()[0]).unwrap().contains("netnsCookie");
        eventually("no cookie", saved);
        world.alone("1.1.0").check(&container, &result).ok();
        container.sh("ip link set eth0 address 02:00:00:00:00:99");
    }
}

#[test]
fn a_lease_ends_with_the_process_of_its_namespace() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let mut daemon = world.daemon(&[]);
    let mut process = world.wired_process("v1", "exec sleep 600");
    let path = process.netns();
    // Runtimes also pass links to the link.
    let link = world.node.path("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let net = world.alone("1.1.0");
    let link = link.display().to_string();
    net.call("ADD", "c1").netns(&link).result();
    assert_eq!(daemon.open_namespaces(), 1);
    assert!(fs::read_to_string(&world.records()[0]).unwrap().contains(&path));
    // The next daemon opens the namespace at its start.
    daemon.kill();
    daemon = world.daemon(&[]);
    eventually("it is not open", || daemon.open_namespaces() == 1);
    net.call("CHECK", "c1").netns(&link).run();
    process.kill();
    eventually("the lease stays", || world.records().is_empty());
    eventually("the namespace stays", || !world.node.ip("link").to_string().contains("\"v1\""));
    assert_eq!(daemon.open_namespaces(), 0);
    let log = world.daemon_log();
    assert!(
        log.contains(&format!("{path} is gone")) && log.contains("the lease is forgotten"),
        "{log}"
    );
}

#[test]
fn a_lease_ends_with_the_mount_of_its_namespace() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let daemon = world.daemon(&[]);
    let container = world.wired("v1");
    let mount = world.mounted(&container, "netns");
    let net = world.alone("1.1.0");
    net.call("ADD", "c1").netns(&mount).result();
    drop(container);
    assert_eq!(daemon.open_namespaces(), 1);
    world.node.sh(&format!("umount {mount}"));
    eventually("the namespace stays", || !world.node.ip("link").to_string().contains("\"v1\""));
    eventually("the lease stays", || world.records().is_empty());
    assert_eq!(daemon.open_namespaces(), 0);
}

#[test]
fn a_plugin_of_release_0_2_0_gets_leases_of_mounts() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let _daemon = world.daemon(&[]);
    let container = world.wired("v1");
    let add = |netns: &str| {
        let key = json!({"containerId": "c1", "network": "net", "ifname": "eth0"});
        let request = json!({"version": 1, "verb": "add", "key": key, "netns": netns,
            "families": ["ipv4"], "options": [[61, [0, 1]]], "priority": 0});
        let mut stream = UnixStream::connect(world.socket()).unwrap();
        writeln!(stream, "{request}").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str::<Value>(&line).unwrap()
    };
    let refused = add(&container.path());
    let (msg, details) = (&refused["error"]["msg"], &refused["error"]["details"]);
    assert!(msg.to_string().contains("permission denied"), "{refused}");
    assert!(details.to_string().contains("passes other namespaces"), "{refused}");
    assert!(world.records().is_empty() && world.leased().is_empty());
    let leased = add(&world.mounted(&container, "netns"));
    assert_eq!(leased["result"]["ips"][0]["address"], "192.168.1.5/24", "{leased}");
    world.alone("1.1.0").call("DEL", "c1").ok();
    world.leases_become(&[]);
}

#[test]
fn a_record_is_kept_if_opening_the_namespace_is_denied() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let mut daemon = world.daemon(&[]);
    let (net, container) = (world.net("1.1.0"), Container::new());
    net.add(&container);
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]);
    command.arg(world.node.bin().join("dhcp")).args(["daemon", "-socketpath"]);
    let log = world.node.path("daemon.log");
    let weak = Process::start(command.arg(world.socket()), &log);
    eventually("it does not say why", || world.daemon_log().contains("permission denied"));
    world.alone("1.1.0").call("STATUS", "").ok();
    assert_eq!((world.records().len(), addresses(&container).len()), (1, 1));
    // The next daemon that may open it goes on.
    drop(weak);
    let _daemon = world.daemon(&[]);
    net.del(&container);
    world.leases_become(&[]);
}
