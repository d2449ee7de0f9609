//! Faults and kills at each step; see `tests/it/faults.rs`.

use serde_json::json;

use super::plug;
use crate::support::faults::{Scene, no_add_leaves_anything, survives_kill};

/// The neighbour has its own device. The records of devices count as leases, which must be as
/// before.
fn scene() -> Scene {
    let prepare = |node: &crate::support::node::Node| {
        plug(node);
        node.sh("ip link add hd1 type veth peer name far1");
        json!({"device": "hd0"})
    };
    Scene::prepared("host-device", prepare, &json!({"device": "hd1"}))
        .that_does(&["rename", "RTM_NEWLINK", "RTM_NEWADDR"], &["RTM_NEWLINK"])
}

#[test]
fn add_failing_at_any_system_call_returns_the_device() {
    no_add_leaves_anything(&scene());
}

#[test]
fn an_add_killed_anywhere_is_cleaned_up_by_del() {
    survives_kill(&scene(), "ADD");
}

#[test]
fn a_del_killed_anywhere_is_finished_by_the_next() {
    survives_kill(&scene(), "DEL");
}
