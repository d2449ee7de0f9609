//! A live container that is hidden in each way from each plugin and tool.

use std::env;
use std::fs;
use std::thread;

use nix::sched::{CloneFlags, unshare};
use serde_json::json;

use super::{IP, KINDS, PORT, World};
use crate::host_local::reclaim::Background;
use crate::support::node::{Container, eventually};

/// A way to hide the container.
struct Hiding {
    name: &'static str,
    /// Commands on the host, after ADD; `$D` is the node's directory.
    host: &'static str,
    /// Commands before each later call, in a mount namespace of its own.
    view: &'static str,
}

const UNPINNED: &str = "ip netns del live";

const HIDINGS: &[Hiding] = &[
    Hiding { name: "path hidden", host: "mount -t tmpfs tmpfs /run/netns", view: "" },
    Hiding { name: "pin removed", host: UNPINNED, view: "" },
    Hiding {
        name: "pin moved",
        host: "touch /run/netns/m && mount --bind /run/netns/live /run/netns/m && ip netns del live",
        view: "",
    },
    Hiding {
        name: "address stripped",
        host: "ip -n live addr flush dev eth0 && ip netns del live",
        view: "",
    },
    Hiding {
        name: "renamed",
        host: "ip -n live link set eth0 down && ip -n live link set eth0 name other && ip netns del live",
        view: "",
    },
    Hiding {
        name: "moved into a nested namespace",
        host: "ip netns add nested && ip -n live link set eth0 netns nested && ip netns del live",
        view: "",
    },
    Hiding {
        name: "the host's end moved",
        host: "ip netns add router && for l in $(ip -o link show type veth | sed 's/^[0-9]*: //; s/@.*//' | grep -v ^up); do ip link set $l netns router; done",
        view: "",
    },
    Hiding {
        name: "the lease without its text",
        host: "f=$D/leases/net/10.88.0.2 && touch -r $f $D/time && truncate -s 0 $f && touch -r $D/time $f",
        view: "",
    },
    Hiding {
        name: "chrooted view",
        host: UNPINNED,
        view: "mkdir -p $D/root && mount --rbind / $D/root && exec chroot $D/root \"$0\" \"$@\"",
    },
    Hiding {
        name: "boot id of a container manager",
        host: "echo c9ae8a4e-5f0b-4c4c-9b7e-000000000000 > $D/boot",
        view: "mount --bind $D/boot /proc/sys/kernel/random/boot_id",
    },
    Hiding {
        name: "no machine id",
        host: "true",
        view: "test ! -e /etc/machine-id || mount --bind /dev/null /etc/machine-id",
    },
    Hiding {
        name: "another machine id",
        host: "echo 0123456789abcdef0123456789abcdef > $D/machine",
        view: "test ! -e /etc/machine-id || mount --bind $D/machine /etc/machine-id",
    },
    Hiding { name: "a pod's view", host: "true", view: "mount -t tmpfs tmpfs /run" },
    Hiding {
        name: "a pod's view, in its network",
        host: "true",
        view: "mount -t tmpfs tmpfs /run && exec unshare -n \"$0\" \"$@\"",
    },
    Hiding {
        name: "without CAP_DAC_OVERRIDE",
        host: UNPINNED,
        view: "exec setpriv --bounding-set -dac_override,-dac_read_search --inh-caps -dac_override,-dac_read_search \"$0\" \"$@\"",
    },
];

/// A container with a process in the namespace `/run/netns/live`.
fn live(world: &World) -> Background {
    world.node.sh("ip netns add live");
    let ready = world.node.path("ready").display().to_string();
    // In a process and mount namespace of its own.
    let inside = format!("touch {ready}; exec sleep 60");
    let enter = "exec nsenter --net=/run/netns/live unshare -m -p -f";
    let process = Background::new(&format!("{enter} sh -c '{inside}'"));
    eventually("the process is there", || world.node.path("ready").exists());
    process
}

fn hide(world: &mut World, hiding: &Hiding) {
    let directory = world.node.path("").display().to_string();
    let filled = |text: &str| text.replace("$D", directory.trim_end_matches('/'));
    world.node.sh(&filled(hiding.host));
    if !hiding.view.is_empty() {
        let script = filled(hiding.view) + " && exec \"$0\" \"$@\"";
        world.view = ["unshare", "-m", "sh", "-c", &script].map(str::to_owned).into();
    }
}

/// Each call that might take something from the container; afterwards it has everything.
#[track_caller]
fn assert_keeps_all(world: &World, what: &str) {
    let before = world.state();
    let has_all = |call: &str| {
        assert_eq!(world.node.leases("net"), [IP], "{what}, {call}");
        assert_eq!(world.state(), before, "{what}, {call}");
    };
    assert!(before.contains(IP) && before.contains(&PORT.to_string()), "{what}: {before}");
    let next = Container::new();
    let add = world.runtime("add", "next", &next.path()).run();
    assert_ne!(add.status, Some(0), "{what}: {add:?}");
    has_all("ADD into the full pool");
    let asked = json!({"runtimeConfig": {"ips": [format!("{IP}/30")]}});
    let asked = world.plugin(0, "ADD", &asked).id("next").netns(&next.path()).run();
    assert_ne!(asked.status, Some(0), "{what}: {asked:?}");
    has_all("ADD of the address");
    let port = json!([{"hostPort": PORT, "containerPort": 80, "protocol": "tcp"}]);
    let prev = json!({"cniVersion": "1.1.0", "interfaces": [{"name": "eth0", "sandbox": next.path()}],
        "ips": [{"address": "10.99.0.2/24", "interface": 0}]});
    let keys = json!({"runtimeConfig": {"portMappings": port}, "prevResult": prev});
    let is_other_host = world.view.iter().any(|line| line.contains("unshare -n"));
    if !is_other_host {
        let taken = world.plugin(1, "ADD", &keys).id("next").netns(&next.path()).error();
        assert!(taken.msg.contains("taken by container \"live\""), "{what}: {taken:?}");
        has_all("ADD of the host port");
    }
    world.gc(Some(&["live"]));
    has_all("GC with a list");
    world.gc(None);
    has_all("GC without a list");
    for tool in [&["gc", "--dry-run"][..], &["gc"], &["doctor"]] {
        let said = world.tool(tool).run().stdout;
        has_all(&tool.join(" "));
        let advises = said.contains("; cnibox gc\n") || said.contains("; cnibox gc #");
        assert!(!advises, "{what}: {tool:?} advises to collect what it cannot see: {said}");
    }
    let row = world.listed("live").unwrap();
    let is_explained = row["alive"].is_null() && row["reason"].is_string();
    assert!(row["alive"] == true || is_explained, "{what}: {row}");
}

/// Hides a container of the kind of this number. Each way to hide is tried with two kinds, with
/// `CNIBOX_LONG` with all.
fn is_never_dead(number: usize) {
    let (kind, in_turn) = (KINDS[number], if env::var_os("CNIBOX_LONG").is_some() { 5 } else { 2 });
    let hidings = HIDINGS.iter().enumerate().filter(|(i, _)| (i + number) % 5 < in_turn);
    for (_, hiding) in hidings {
        let mut world = World::new(kind);
        let _process = live(&world);
        world.runtime("add", "live", "/run/netns/live").printed();
        hide(&mut world, hiding);
        assert_keeps_all(&world, &format!("{kind}, {}", hiding.name));
        if !hiding.view.is_empty() {
            // Nor on the host itself, after the calls with that view.
            world.view.clear();
            assert_keeps_all(&world, &format!("{kind}, after {}", hiding.name));
        }
    }
}

#[test]
fn a_container_of_bridge_is_never_dead() {
    is_never_dead(0);
}

#[test]
fn a_container_of_a_masquerading_bridge_is_never_dead() {
    is_never_dead(1);
}

#[test]
fn a_container_of_ptp_is_never_dead() {
    is_never_dead(2);
}

#[test]
fn a_container_of_macvlan_is_never_dead() {
    is_never_dead(3);
}

#[test]
fn a_container_of_a_foreign_plugin_is_never_dead() {
    is_never_dead(4);
}

/// `CNI_NETNS` is that of a process which ends, while its child lives.
#[test]
fn a_living_child_process_keeps_the_container_alive() {
    for kind in KINDS {
        let world = World::new(kind);
        let directory = world.node.path("");
        let script = format!(
            "cd {} && exec unshare -n sh -c 'sleep 60 & echo $$ > pid.new; mv pid.new pid; while test ! -e end; do sleep 0.1; done'",
            directory.display()
        );
        let _process = Background::new(&script);
        eventually("the process is there", || directory.join("pid").exists());
        let pid = fs::read_to_string(directory.join("pid")).unwrap().trim().to_owned();
        world.runtime("add", "live", &format!("/proc/{pid}/ns/net")).printed();
        fs::write(directory.join("end"), "").unwrap();
        let is_running = || fs::read_link(format!("/proc/{pid}/ns/net")).is_ok();
        eventually("the process has ended", || !is_running());
        assert_keeps_all(&world, kind);
    }
}

/// Only a thread with a table of descriptors of its own has the namespace.
#[test]
fn a_descriptor_of_a_thread_keeps_the_container_alive() {
    for kind in KINDS {
        let world = World::new(kind);
        world.node.sh("ip netns add live");
        world.runtime("add", "live", "/run/netns/live").printed();
        let (opened, ready) = std::sync::mpsc::channel();
        let (done, end) = std::sync::mpsc::channel::<()>();
        let holder = thread::spawn(move || {
            unshare(CloneFlags::CLONE_FILES).unwrap();
            let file = fs::File::open("/run/netns/live").unwrap();
            opened.send(()).unwrap();
            end.recv().ok();
            drop(file);
        });
        ready.recv().unwrap();
        world.node.sh(UNPINNED);
        assert_keeps_all(&world, kind);
        drop(done);
        holder.join().unwrap();
    }
}
