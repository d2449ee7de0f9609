//! A path that leads nowhere, or elsewhere, ends no lease: what ends one is its DEL, GC, the end of
//! its interface, or the end of its namespace.

use std::fs;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::world::{Process, World, addresses};
use crate::support::net::{Net, no_veth_remains, settles};
use crate::support::node::{Container, assert_unchanged, eventually};

/// The seconds of a lease: it is renewed after half of them.
const SECONDS: u32 = 12;

/// The record of the only lease.
fn record(world: &World) -> Value {
    let content: Value =
        serde_json::from_str(&fs::read_to_string(&world.records()[0]).unwrap()).unwrap();
    content["record"].clone()
}

/// Waits until the lease is forgotten, and the container's link `v1` on the node is gone.
#[track_caller]
fn is_cleaned(world: &World, daemon: &Process) {
    eventually("the record stays", || world.records().is_empty());
    eventually("the namespace stays", || !world.node.ip("link").to_string().contains("\"v1\""));
    assert_eq!(daemon.open_namespaces(), 0);
}

/// A daemon for which the directory is empty.
fn daemon_without(world: &World, directory: &Path) -> Process {
    let hide = format!("mount -t tmpfs tmpfs {}; exec \"$@\"", directory.display());
    world.daemon_under(&["unshare", "-m", "--propagation", "private", "sh", "-c", &hide, "sh"], &[])
}

#[test]
fn a_lease_is_renewed_while_its_path_is_missing() {
    let world = World::new();
    let _server = world.isc(SECONDS);
    let daemon = world.daemon(&[]);
    let mut process = world.wired_process("v1", "exec sleep 600");
    let mount = world.mounted_at(&process.netns(), "netns");
    let net = world.alone("1.1.0");
    net.call("ADD", "c1").netns(&mount).result();
    process.sh("ip addr add 192.168.1.5/24 dev eth0");
    world.node.sh(&format!("umount {mount}"));
    world.is_renewed();
    fs::remove_file(&mount).unwrap();
    world.is_renewed();
    // Another namespace at the path is no proof either, and is not touched.
    let other = world.wired("v2");
    let before = other.snapshot(&world.node);
    assert_eq!(world.mounted(&other, "netns"), mount);
    world.is_renewed();
    assert_unchanged(&before, &other.snapshot(&world.node));
    assert_eq!(world.isc_log().matches("DHCPDISCOVER").count(), 1, "{}", world.isc_log());
    net.call("CHECK", "c1").netns(&mount).run();
    // The end of the container.
    process.kill();
    is_cleaned(&world, &daemon);
}

#[test]
fn a_lease_outlives_the_process_of_its_path() {
    let world = World::new();
    let _server = world.isc(SECONDS);
    let daemon = world.daemon(&[]);
    let child = world.node.path("child");
    let mut process =
        world.wired_process("v1", &format!("sleep 600 & echo $! > {}; wait", child.display()));
    let child_id = || fs::read_to_string(&child).ok().and_then(|text| text.trim().parse().ok());
    eventually("no child", || child_id().is_some());
    world.alone("1.1.0").call("ADD", "c1").netns(&process.netns()).result();
    process.kill();
    world.is_renewed();
    world.is_renewed();
    kill(Pid::from_raw(child_id().unwrap()), Signal::SIGKILL).unwrap();
    is_cleaned(&world, &daemon);
}

#[test]
fn a_container_that_dies_without_del_leaves_nothing() {
    let world = World::new();
    let _server = world.isc(600);
    let daemon = world.daemon(&[]);
    let net = world.net("1.1.0");
    let before = world.node.snapshot();
    for path_ends_first in [false, true] {
        let mut process = world.process("exec sleep 600");
        let mount = world.mounted_at(&process.netns(), "netns");
        net.call("ADD", "c1").netns(&mount).result();
        if path_ends_first {
            world.node.sh(&format!("umount {mount}"));
            eventually("it does not look", || {
                world.daemon_log().contains("leads to its namespace")
            });
            process.kill();
        } else {
            process.kill();
            world.node.sh(&format!("umount {mount}"));
        }
        eventually("the record stays", || world.records().is_empty());
        no_veth_remains(&world.node);
        assert_eq!(daemon.open_namespaces(), 0);
        // The end of the link on the host is the proof for everything else.
        let directories =
            ["cache", "net.d", "leases"].map(|name| world.node.path(name).display().to_string());
        let [cache, conf, leases] = &directories;
        let line = ["gc", "--cache-dir", cache, "--conf-dir", conf, "--data-dir", leases];
        world.node.cnibox(&line).printed();
        assert_unchanged(&before, &world.node.snapshot());
    }
}

#[test]
fn both_leases_of_a_dead_container_are_forgotten() {
    let world = World::v6();
    let _server = world.dnsmasq_both(9);
    let daemon = world.daemon(&[]);
    let mut process = world.wired_process("v1", "exec sleep 600");
    let mount = world.mounted_at(&process.netns(), "netns");
    world.alone_of("both").call("ADD", "c1").netns(&mount).result();
    assert_eq!((world.records().len(), daemon.open_namespaces()), (2, 1));
    world.node.sh(&format!("umount {mount}"));
    process.kill();
    is_cleaned(&world, &daemon);
}

/// It does not know who is in a namespace, and keeps it until the DEL.
#[test]
fn a_daemon_that_sees_no_processes_lets_nothing_go() {
    let world = World::new();
    let _server = world.isc(SECONDS);
    let mut process = world.wired_process("v1", "exec sleep 600");
    let mount = world.mounted_at(&process.netns(), "netns");
    let _daemon = world.daemon_under(&["unshare", "-p", "-f", "--kill-child", "--mount-proc"], &[]);
    let net = world.alone("1.1.0");
    net.call("ADD", "c1").netns(&mount).result();
    process.sh("ip addr add 192.168.1.5/24 dev eth0");
    // The kernel also detaches the mount that the daemon has in its mount namespace.
    world.node.sh(&format!("umount {mount} && rm {mount}"));
    eventually("it does not look", || world.daemon_log().contains("leads to its namespace"));
    world.is_renewed();
    process.kill();
    world.is_renewed();
    net.call("DEL", "c1").ok();
    assert!(world.isc_log().contains("DHCPRELEASE of 192.168.1.5") && world.records().is_empty());
    eventually("the namespace stays", || !world.node.ip("link").to_string().contains("\"v1\""));
}

/// The record stays, as long as nothing proves the end of the namespace. A lease that has expired
/// meanwhile is replaced.
#[test]
fn a_namespace_that_is_let_go_is_found_again() {
    let world = World::new();
    let _server = world.isc(6);
    let daemon = world.daemon(&[]);
    // A descriptor of the test keeps the namespace alive, and no process is in it.
    let container = world.wired("v1");
    container.sh("ip addr add 192.168.1.5/24 dev eth0");
    let mount = world.mounted(&container, "netns");
    let net = world.alone("1.1.0");
    net.call("ADD", "c1").netns(&mount).result();
    world.node.sh(&format!("umount {mount}"));
    eventually("the namespace is kept open", || daemon.open_namespaces() == 0);
    eventually("it is silent", || world.daemon_log().contains("the namespace is out of view"));
    let error = net.call("CHECK", "c1").netns(&mount).error();
    assert!(error.msg.contains("out of view"), "{error:?}");
    let milliseconds = || {
        let uptime = fs::read_to_string("/proc/uptime").unwrap();
        uptime.split('.').next().unwrap().parse::<u64>().unwrap() * 1000
    };
    eventually("it is renewed", || {
        milliseconds() > record(&world)["lease"]["expires"].as_u64().unwrap()
    });
    assert_eq!(addresses(&container), ["192.168.1.5/24"]);
    world.mounted(&container, "netns");
    eventually("it does not expire", || world.daemon_log().contains("the lease has expired"));
    eventually("no new lease", || record(&world)["lease"].is_object());
    // The record of the lease is written before the address is configured.
    eventually("the lease's address", || {
        (daemon.open_namespaces(), addresses(&container).len()) == (1, 1)
    });
    world.node.sh(&format!("umount {mount}"));
    eventually("the namespace is kept open", || daemon.open_namespaces() == 0);
    assert_eq!(world.records().len(), 1);
    drop(container);
    is_cleaned(&world, &daemon);
}

#[test]
fn a_daemon_keeps_the_records_of_hidden_namespaces() {
    let world = World::new();
    let _server = world.isc(SECONDS);
    let mut daemon = world.daemon(&[]);
    let view = world.node.path("view");
    fs::create_dir(&view).unwrap();
    let container = world.wired("v1");
    let mount = world.mounted(&container, "view/netns");
    let net = world.alone("1.1.0");
    let result = net.call("ADD", "c1").netns(&mount).result();
    container.sh("ip addr add 192.168.1.5/24 dev eth0");
    let restart = |daemon: &mut Process, next: &dyn Fn() -> Process| {
        daemon.kill();
        *daemon = next();
        net.call("STATUS", "").ok();
    };
    restart(&mut daemon, &|| daemon_without(&world, &view));
    eventually("it is silent", || world.daemon_log().contains("the namespace is out of view"));
    assert_eq!(world.records().len(), 1);
    // The next daemon that sees it goes on.
    restart(&mut daemon, &|| world.daemon(&[]));
    world.is_renewed();
    // So does the same daemon.
    restart(&mut daemon, &|| daemon_without(&world, &view));
    eventually("it is silent", || {
        world.daemon_log().matches("the namespace is out of view").count() == 2
    });
    world.node.sh(&format!("nsenter -t {} -m umount {}", daemon.id(), view.display()));
    world.is_renewed();
    net.check(&container, &result).ok();
    assert_eq!(world.isc_log().matches("DHCPDISCOVER").count(), 1, "{}", world.isc_log());
    // A DEL ends a lease whose namespace is hidden, and the proof of the end does.
    restart(&mut daemon, &|| daemon_without(&world, &view));
    net.call("DEL", "c1").ok();
    assert!(world.records().is_empty());
    net.call("ADD", "c1").netns(&mount).error();
    restart(&mut daemon, &|| world.daemon(&[]));
    net.call("ADD", "c1").netns(&mount).result();
    daemon.kill();
    world.node.sh(&format!("umount {mount}"));
    drop(container);
    eventually("the namespace stays", || !world.node.ip("link").to_string().contains("\"v1\""));
    daemon = world.daemon(&[]);
    is_cleaned(&world, &daemon);
}

#[test]
fn a_daemon_finds_a_namespace_by_its_process() {
    let world = World::new();
    let _server = world.isc(SECONDS);
    let mut daemon = world.daemon(&[]);
    let mut process = world.wired_process("v1", "exec sleep 600");
    let mount = world.mounted_at(&process.netns(), "netns");
    let net = world.alone("1.1.0");
    net.call("ADD", "c1").netns(&mount).result();
    daemon.kill();
    world.node.sh(&format!("umount {mount}"));
    daemon = world.daemon(&[]);
    world.is_renewed();
    net.call("STATUS", "").ok();
    process.kill();
    is_cleaned(&world, &daemon);
}

/// An ADD of an attachment that has a lease.
fn add_again<'w>(world: &'w World, keys: &Value) -> Net<'w> {
    world.alone("1.1.0").with(&json!({"ipam": world.ipam(keys)}))
}

#[test]
fn a_failed_second_add_keeps_the_lease() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let _daemon = world.daemon(&["-timeout", "300ms", "-resendmax=500ms", "-resendtimeout", "2s"]);
    let container = world.wired("v1");
    let net = add_again(&world, &json!({}));
    let result = net.add(&container);
    let is_kept = || {
        assert_eq!((world.leased(), world.records().len()), (vec!["192.168.1.5".to_owned()], 1));
        net.check(&container, &result).ok();
    };
    // Without the interface.
    let empty = Container::new();
    let error = net.on("ADD", &empty).error();
    assert!(error.msg.contains("Link not found"), "{error:?}");
    is_kept();
    // No server has an IPv6 address.
    let both = add_again(&world, &json!({"family": "both"}));
    for place in [&container, &world.wired("v2")] {
        let error = both.on("ADD", place).error();
        assert!(error.msg.contains("no more tries"), "{error:?}");
        is_kept();
    }
    assert!(!world.server_log().contains("DHCPRELEASE"), "{}", world.server_log());
    net.del(&container);
    world.leases_become(&[]);
}

/// The roll-back of the interface plugin sends a DEL.
#[test]
fn the_roll_back_of_a_second_add_keeps_the_lease() {
    let world = World::new();
    // The router of the route is unreachable.
    let _server = world.dnsmasq(9, &["--dhcp-option=121,10.9.0.0/16,172.16.9.9"]);
    let _daemon = world.daemon(&[]);
    let ipam = json!({"ipam": world.ipam(&json!({"request": [{"option": "121"}]}))});
    let (net, alone) = (world.net("1.1.0").with(&ipam), world.alone("1.1.0").with(&ipam));
    let (one, two) = (world.wired("v1"), Container::new());
    let result = alone.add(&one);
    let empty = two.snapshot(&world.node);
    for _ in 0..2 {
        let error = net.on("ADD", &two).error();
        assert!(error.msg.contains("10.9.0.0/16"), "{error:?}");
        settles(&empty, || two.snapshot(&world.node));
        assert_eq!((world.leased(), world.records().len()), (vec!["192.168.1.5".to_owned()], 1));
        alone.check(&one, &result).ok();
    }
    assert!(!world.server_log().contains("DHCPRELEASE"), "{}", world.server_log());
    // The DEL of the runtime ends the attachment.
    alone.del(&two);
    world.leases_become(&[]);
}

/// As with a runtime that starts a container again after a crash, without a DEL.
#[test]
fn a_lease_goes_on_in_the_namespace_of_a_second_add() {
    let world = World::new();
    let _server = world.isc(16);
    let daemon = world.daemon(&[]);
    let mut first = world.wired_process("v1", "exec sleep 600");
    let net = world.alone("1.1.0");
    let result = net.call("ADD", "c1").netns(&first.netns()).result();
    let second = world.wired("v2");
    assert_eq!(net.call("ADD", "c1").netns(&second.path()).result(), result);
    second.sh("ip addr add 192.168.1.5/24 dev eth0");
    assert_eq!(record(&world)["netns"], first.netns());
    first.kill();
    eventually("it does not go on", || record(&world)["netns"] == second.path().as_str());
    assert!(second.pings("192.168.1.1"), "the node learns the other Ethernet address");
    world.is_renewed();
    assert_eq!(world.isc_log().matches("DHCPDISCOVER").count(), 1, "{}", world.isc_log());
    assert!(!world.isc_log().contains("DHCPRELEASE"), "{}", world.isc_log());
    net.del(&second);
    eventually("no release", || world.isc_log().contains("DHCPRELEASE of 192.168.1.5"));
    assert_eq!(daemon.open_namespaces(), 0);
}

#[test]
fn a_lease_follows_a_renamed_interface() {
    let world = World::new();
    let _server = world.isc(SECONDS);
    let _daemon = world.daemon(&[]);
    let container = world.wired("v1");
    world.alone("1.1.0").add(&container);
    container.sh("ip addr add 192.168.1.5/24 dev eth0");
    container.sh("ip link set eth0 down && ip link set eth0 name net0 && ip link set net0 up");
    world.is_renewed();
    container.sh("ip link del net0");
    eventually("the record stays", || world.records().is_empty());
}
