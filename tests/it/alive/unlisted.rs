//! GC with a list that lacks a container which another runtime has attached.

use std::fs;
use std::path::Path;

use serde_json::json;

use super::{IP, KINDS, PORT, World};
use crate::support::node::{Container, eventually};

/// Writes the file that another runtime, or multus, has cached of the container; libcni before 1.2
/// wrote the path of the namespace only in the result.
fn cache_in(directory: &str, id: &str, netns: &str, is_older: bool) {
    fs::create_dir_all(directory).unwrap();
    let mut file =
        json!({"kind": "cniCacheV1", "networkName": "net", "containerId": id, "ifName": "eth0"});
    if is_older {
        file["result"] = json!({"interfaces": [{"name": "eth0", "sandbox": netns}]});
    } else {
        file["netns"] = json!(netns);
    }
    fs::write(Path::new(directory).join(format!("net-{id}-eth0")), file.to_string()).unwrap();
}

#[test]
fn gc_keeps_what_lives_and_is_in_a_cache() {
    for kind in KINDS {
        let world = World::new(kind);
        let live = Container::new();
        world.runtime("add", "live", &live.path()).printed();
        let before = world.state();
        assert!(before.contains(IP) && before.contains(&PORT.to_string()), "{kind}: {before}");
        for (directory, is_older) in [
            ("/var/lib/cni/results", false),
            ("/var/lib/cni/multus/results", false),
            ("/var/lib/cni/multus/results", true),
        ] {
            cache_in(directory, "live", &live.path(), is_older);
            for outcome in world.gc(Some(&[])) {
                assert_eq!(outcome.status, Some(0), "{kind}: {outcome:?}");
                let warning = "GC keeps container live, interface eth0, which the list lacks: it is alive, and in the cache";
                assert!(
                    outcome.stderr.contains(&format!("{warning} {directory}; ")),
                    "{kind}: {outcome:?}"
                );
            }
            assert_eq!(
                (world.state(), world.node.leases("net")),
                (before.clone(), vec![IP.to_owned()]),
                "{kind}"
            );
            world.runtime("check", "live", &live.path()).printed();
            fs::remove_dir_all(directory).unwrap();
        }
        if kind == "foreign" {
            // No GC of this program deletes its link.
            continue;
        }
        // The list alone decides on a container that no cache has.
        for outcome in world.gc(Some(&[])) {
            assert_eq!(outcome.status, Some(0), "{kind}: {outcome:?}");
        }
        assert!(
            !world.state().contains("live") && world.node.leases("net").is_empty(),
            "{kind}: {}",
            world.state()
        );
    }
}

#[test]
fn gc_frees_what_is_in_a_cache_but_has_ended() {
    for kind in ["bridge", "masquerading", "ptp"] {
        let world = World::new(kind);
        let dead = Container::new();
        world.runtime("add", "dead", &dead.path()).printed();
        cache_in("/var/lib/cni/results", "dead", &dead.path(), false);
        drop(dead);
        eventually("its link is gone", || {
            world.node.sh("ip -o link show type veth").lines().count() == 2
        });
        for outcome in world.gc(Some(&[])) {
            assert_eq!(outcome.status, Some(0), "{kind}: {outcome:?}");
        }
        assert!(
            !world.state().contains("dead") && world.node.leases("net").is_empty(),
            "{kind}: {}",
            world.state()
        );
    }
}
