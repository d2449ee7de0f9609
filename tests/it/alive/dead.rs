//! What a container leaves that ended without a DEL is reclaimed by the next call that needs it,
//! and by `cnibox gc`.

use std::fs;

use serde_json::{Value, json};

use super::{IP, PORT, World};
use crate::support::node::{Container, eventually};

/// The kinds whose link on the host shows the end.
const SHOWN: [&str; 4] = ["bridge", "masquerading", "ptp", "foreign"];

/// A world in which a container has ended without a DEL.
fn crashed(kind: &str) -> World {
    crashed_in(World::new(kind), kind)
}

fn crashed_in(world: World, kind: &str) -> World {
    let dead = Container::new();
    world.runtime("add", "dead", &dead.path()).printed();
    let state = world.state();
    assert!(state.contains(&PORT.to_string()) && state.contains(IP), "{kind}: {state}");
    drop(dead);
    eventually("its link is gone", || {
        world.node.sh("ip -o link show type veth").lines().count() == 2
    });
    world
}

#[track_caller]
fn has_nothing_of_the_dead(world: &World, what: &str) {
    let state = world.state();
    let words = ["dead", IP, "shapes", &PORT.to_string()];
    assert!(!words.iter().any(|word| state.contains(word)), "{what}: {state}");
    assert_eq!(world.node.leases("net"), [""; 0], "{what}");
    assert_eq!(world.node.sh("find /run/cni/cnibox ! -type d ! -name '*.lock'"), "", "{what}");
}

#[test]
fn the_next_add_gets_address_and_port_of_the_dead() {
    for kind in SHOWN {
        let world = crashed(kind);
        let next = Container::new();
        let outcome = world.runtime("add", "next", &next.path()).run();
        assert_eq!(outcome.status, Some(0), "{kind}: {outcome:?}");
        let state = world.state();
        assert!(!state.contains("dead") && state.contains("next"), "{kind}: {state}");
        assert_eq!(state.matches("shapes").count(), 1, "{kind}: {state}");
        assert_eq!(world.node.leases("net"), [IP], "{kind}");
        let row = world.listed("next").unwrap();
        let why = "from container dead: its link on the host is gone";
        assert_eq!(row["reclaimed"], why, "{kind}");
        world.runtime("del", "next", &next.path()).printed();
        has_nothing_of_the_dead(&world, kind);
    }
}

/// The lease goes with the port, or later, when the record that proved the end is gone.
#[test]
fn a_port_that_is_taken_over_leaves_no_lease_behind() {
    for kind in SHOWN {
        let world = crashed_in(World::with_pool(kind, "10.88.0.0/24"), kind);
        let next = Container::new();
        let outcome = world.runtime("add", "next", &next.path()).run();
        assert_eq!(outcome.status, Some(0), "{kind}: {outcome:?}");
        assert!(!world.state().contains("id: dead"), "{kind}: {}", world.state());
        world.tool(&["gc"]).printed();
        assert_eq!(world.node.leases("net"), ["10.88.0.3"], "{kind}");
    }
}

#[test]
fn cnibox_gc_collects_the_dead() {
    for kind in SHOWN {
        let world = crashed(kind);
        let row = world.listed("dead").unwrap();
        assert_eq!(row["alive"], false, "{kind}: {row}");
        assert_eq!(row["reason"], "its link on the host is gone", "{kind}");
        let outcome = world.tool(&["gc"]).run();
        assert_eq!(outcome.status, Some(0), "{kind}: {outcome:?}");
        has_nothing_of_the_dead(&world, kind);
        // Nothing keeps the ADD of a foreign plugin from running meanwhile: the DEL is left to the
        // runtime.
        let is_cached = world.node.path("cache/results/net-dead-eth0").exists();
        let is_left =
            outcome.stderr.contains("no DEL was sent to \"foreign\", a plugin of another program");
        assert_eq!(
            (is_cached, is_left),
            (kind == "foreign", kind == "foreign"),
            "{kind}: {outcome:?}"
        );
    }
}

/// A plugin that connects nothing does not wait for a turn, and so keeps no ADD of a foreign plugin
/// behind it from running.
#[test]
fn cnibox_gc_sends_no_del_to_a_foreign_plugin_behind_loopback() {
    let world = World::new("foreign");
    let path = world.node.path("net.d/net.conflist");
    let mut list: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    list["plugins"].as_array_mut().unwrap().insert(0, json!({"type": "loopback"}));
    fs::write(path, list.to_string()).unwrap();
    let outcome = crashed_in(world, "foreign").tool(&["gc"]).run();
    assert!(outcome.stderr.contains("no DEL was sent to \"foreign\""), "{outcome:?}");
}

#[test]
fn gc_without_a_list_collects_the_dead() {
    for kind in SHOWN {
        let world = crashed(kind);
        for outcome in world.gc(Some(&["dead"])) {
            assert_eq!(outcome.status, Some(0), "{kind}: {outcome:?}");
        }
        assert!(world.state().contains("dead"), "{kind}: what is valid stays");
        assert_eq!(world.node.leases("net"), [IP], "{kind}");
        for outcome in world.gc(None) {
            assert_eq!(outcome.status, Some(0), "{kind}: {outcome:?}");
        }
        // Interface plugins do not pass a GC without a list on.
        let ipam = world.plugin(0, "GC", &json!({"type": "host-local"}));
        ipam.program(world.node.bin().join("host-local")).without("CNI_CONTAINERID").ok();
        has_nothing_of_the_dead(&world, kind);
    }
}

/// nerdctl starts a container again with its id, and its namespace is gone before the DEL.
#[test]
fn the_same_container_starts_again_without_del() {
    for kind in SHOWN {
        let world = crashed(kind);
        let again = Container::new();
        let outcome = world.runtime("add", "dead", &again.path()).run();
        assert_eq!(outcome.status, Some(0), "{kind}: {outcome:?}");
        let state = world.state();
        assert!(state.contains(&PORT.to_string()), "{kind}: {state}");
        assert_eq!(state.matches("shapes").count(), 1, "{kind}: {state}");
        assert_eq!(world.node.leases("net"), [IP], "{kind}");
        world.tool(&["gc"]).printed();
        assert_eq!(world.state(), state, "{kind}: the new one lives");
        world.runtime("check", "dead", &again.path()).printed();
        world.runtime("del", "dead", &again.path()).printed();
        has_nothing_of_the_dead(&world, kind);
    }
}

/// A nested host that was started again, or a node whose /run is kept: records of containers of
/// which nothing is left.
#[test]
fn records_of_missing_objects_do_not_block_add() {
    for kind in SHOWN {
        let world = crashed(kind);
        world.node.sh("nft flush ruleset; for i in $(ip -o link show type ifb | cut -d: -f2); do ip link del $i; done");
        world.node.sh(&format!("rm -r {}", world.node.path("leases/net").display()));
        let next = Container::new();
        let outcome = world.runtime("add", "next", &next.path()).run();
        assert_eq!(outcome.status, Some(0), "{kind}: {outcome:?}");
        assert!(world.state().contains(&PORT.to_string()), "{kind}");
        world.tool(&["repair"]).run();
        assert!(!world.state().contains("dead"), "{kind}: {}", world.state());
        assert_eq!(world.listed("next").unwrap()["alive"], true, "{kind}");
    }
}

/// Of macvlan nothing on the host shows the end: what a crash leaves stays, until DEL or GC.
#[test]
fn death_is_uncertain_without_a_link_on_the_host() {
    let world = World::new("macvlan");
    let dead = Container::new();
    world.runtime("add", "dead", &dead.path()).printed();
    drop(dead);
    let said = world.tool(&["gc", "--dry-run"]).printed();
    let why = "it has no link on the host that would show its end (network net)";
    let start = format!("in doubt: {IP} of container dead, interface eth0: {why}; ");
    let remedy =
        said.lines().find_map(|line| line.strip_prefix(&start)).unwrap_or_else(|| panic!("{said}"));
    assert!(
        remedy.starts_with("cnibox gc --network net --container dead --")
            && remedy.ends_with(" # if it has ended")
    );
    let table = world.tool(&["ipam", "ls"]).printed();
    assert!(table.contains("  ?: it has no link on the host that would show its end\n"), "{table}");
    let findings = world.tool(&["doctor", "--json"]).run().stdout;
    assert!(
        findings.contains("leases in doubt, which stay until DEL or GC: 1: it has no"),
        "{findings}"
    );
    world.tool(&["gc"]).printed();
    assert_eq!(world.node.leases("net"), [IP]);
    world.gc(Some(&[]));
    assert_eq!(world.node.leases("net"), [""; 0]);
    assert_eq!(json!(world.listed("dead")), json!(null));
}
