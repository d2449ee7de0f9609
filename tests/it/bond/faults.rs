//! Faults and kills at each step; see `tests/it/faults.rs`.

use serde_json::json;

use super::{is_back, keys, plug, records, simple};
use crate::lane::{self, needs};
use crate::support::faults::{Scene, no_add_leaves_anything, survives_kill};
use crate::support::node::{Container, Node};

/// The neighbour has a bond of its own links. The records of links count as leases, which must be
/// as before.
fn scene() -> Scene {
    let prepare = |node: &Node| {
        plug(node);
        node.sh("for i in 3 4; do ip link add up$i mtu 1400 type veth peer name far$i; done");
        keys()
    };
    Scene::prepared("bond", prepare, &json!({"links": [{"name": "up3"}, {"name": "up4"}]}))
        .that_does(&["rename", "RTM_NEWLINK", "RTM_NEWADDR"], &["RTM_NEWLINK", "RTM_DELLINK"])
}

#[test]
fn add_failing_at_any_system_call_returns_the_links() {
    needs!(lane::BOND);
    no_add_leaves_anything(&scene());
}

#[test]
fn an_add_killed_anywhere_is_cleaned_up_by_del() {
    needs!(lane::BOND);
    survives_kill(&scene(), "ADD");
}

#[test]
fn a_del_killed_anywhere_is_finished_by_the_next() {
    needs!(lane::BOND);
    survives_kill(&scene(), "DEL");
}

#[test]
fn del_removes_the_file_of_a_record_that_was_being_written() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let before = node.snapshot();
    let net = simple(&node, &json!({}));
    let kill = ["strace", "-f", "-o", "/dev/null", "-e", "inject=rename:signal=KILL:when=1"];
    net.on("ADD", &container).under(&kill).run();
    assert_eq!(records(&node).len(), 1);
    net.del(&container);
    is_back(&node, &before);
}
