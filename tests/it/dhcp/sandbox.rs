//! The namespaces of leases: how the daemon gets them, enters them again, and tells them from others.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::world::{Process, World, addresses};
use crate::support::node::{Container, assert_unchanged, eventually};

/// The number of network namespaces that a process has open.
fn open_namespaces(process: &Process) -> usize {
    let entries = fs::read_dir(format!("/proc/{}/fd", process.id())).unwrap();
    let links = entries.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    let names: Vec<_> = links.map(|link| link.display().to_string()).collect();
    names.iter().filter(|name| name.starts_with("net:[") || name.ends_with("/netns")).count()
}

/// Changes the only record of the world.
fn edit_record(world: &World, edit: impl FnOnce(&mut Value)) {
    let path = &world.records()[0];
    let mut content: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    edit(&mut content["record"]);
    fs::write(path, content.to_string()).unwrap();
}

/// A container in whose place another one is: the same mount point, and the record has the number of
/// the other namespace, as if the kernel had given it again.
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

/// Starts a daemon, which must forget the lease for this reason and must not touch the namespace.
fn is_forgotten(world: &World, why: &str, two: &Container) {
    let (before, said) = (two.snapshot(&world.node), world.isc_log());
    let _daemon = world.daemon(&[]);
    eventually("the record stays", || world.records().is_empty());
    assert!(world.daemon_log().contains(why), "{}", world.daemon_log());
    assert_unchanged(&before, &two.snapshot(&world.node));
    assert_eq!(world.isc_log(), said, "nothing was sent");
}

#[test]
fn a_namespace_with_a_reused_inode_is_not_changed() {
    let world = World::new();
    let _server = world.isc(600);
    let two = replaced(&world, |record| assert!(record["netnsCookie"].is_u64(), "{record}"));
    is_forgotten(&world, "another network namespace has the number of the container's", &two);
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
    let without_cookie = |record: &mut Value| {
        record.as_object_mut().unwrap().remove("netnsCookie").unwrap();
    };
    let world = World::new();
    let _server = world.isc(600);
    let two = replaced(&world, without_cookie);
    is_forgotten(&world, "eth0 is not known by its Ethernet or IP address", &two);
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
    let mut sleep = Command::new("unshare");
    let mut process = Process::start(sleep.args(["-n", "sleep", "600"]), &world.node.path("sleep.log"));
    let path = format!("/proc/{}/ns/net", process.id());
    let own = fs::read_link("/proc/thread-self/ns/net").unwrap();
    eventually("no namespace", || fs::read_link(&path).unwrap() != own);
    world.node.sh("ip link add v1 type veth peer name pv1 && ip link set v1 master br0 up");
    world.node.sh(&format!("ip link set pv1 netns {}", process.id()));
    world.node.sh(&format!("nsenter --net={path} -- sh -c 'ip link set pv1 name eth0; ip link set eth0 up'"));
    // Runtimes also pass links to the link.
    let link = world.node.path("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let net = world.alone("1.1.0");
    let link = link.display().to_string();
    net.call("ADD", "c1").netns(&link).result();
    assert_eq!(open_namespaces(&daemon), 1);
    assert!(fs::read_to_string(&world.records()[0]).unwrap().contains(&path));
    // The next daemon opens the namespace at its start.
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    daemon = world.daemon(&[]);
    eventually("it is not open", || open_namespaces(&daemon) == 1);
    net.call("CHECK", "c1").netns(&link).run();
    process.signal(Signal::SIGKILL);
    process.wait();
    eventually("the lease stays", || world.records().is_empty());
    eventually("the namespace stays", || !world.node.ip("link").to_string().contains("\"v1\""));
    assert_eq!(open_namespaces(&daemon), 0);
    assert!(world.daemon_log().contains(&format!("{path} is gone")), "{}", world.daemon_log());
}

#[test]
fn a_mounted_namespace_is_not_kept_open() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let daemon = world.daemon(&[]);
    let container = world.wired("v1");
    let mount = world.mounted(&container, "netns");
    let net = world.alone("1.1.0");
    net.call("ADD", "c1").netns(&mount).result();
    drop(container);
    eventually("it is open", || open_namespaces(&daemon) == 0);
    world.node.sh(&format!("umount {mount}"));
    eventually("the namespace stays", || !world.node.ip("link").to_string().contains("\"v1\""));
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
