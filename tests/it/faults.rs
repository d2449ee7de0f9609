//! A failing ADD rolls back everything, at whatever step it fails; after a killed ADD or DEL the
//! next DEL removes everything. The faults are those of `support::faults`.
//!
//! The calls with effects of a node's first ADD are also tried ([`first_add`]); the next ADD must
//! succeed.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::lane::{self, needs};
use crate::support::faults::{
    Scene, assert_well_formed_failure, errno, has_effect, no_add_leaves_anything, survives_kill,
};
use crate::support::node::{Call, Container, Node, Outcome, assert_unchanged};
use crate::support::strace::{self, Hits, Syscall};

/// A node's first ADD, which creates the bridge and the store, on a new node for each point.
fn first_add(signal: Option<&str>) {
    let fresh = || {
        let node = Node::new();
        let ipam = node.host_local(&["10.1.0.0/24", "fd00:1::/64"]);
        let conf =
            json!({"name": "n", "cniVersion": "1.0.0", "isDefaultGateway": true, "ipam": ipam});
        (node, Container::new(), conf)
    };
    let call = |node: &Node, container: &Container, conf: &Value, verb| {
        let call = node.call("bridge", verb).conf(conf).netns(&container.path());
        call.env("RUST_BACKTRACE", "0")
    };
    let (node, container, conf) = fresh();
    let (_, calls) = strace::record(&node, &call(&node, &container, &conf, "ADD"));
    let mut hit = Hits::default();
    for point in strace::points(&calls).into_iter().filter(has_effect) {
        let (node, container, conf) = fresh();
        let empty = container.snapshot(&node);
        let call = |verb| call(&node, &container, &conf, verb);
        let error = format!("error={}", errno(&point));
        let (outcome, fired) = point.run(&node, &call("ADD"), signal.unwrap_or(&error));
        let why = format!("{}: {outcome:?}", point.describe());
        hit.extend(fired.then_some(&point));
        if signal.is_some() || outcome.status == Some(0) {
            call("DEL").ok();
        }
        assert_eq!(node.leases("n"), [""; 0], "{why}");
        assert_eq!(node.ip("link show type veth"), json!([]), "{why}");
        assert_unchanged(&empty, &container.snapshot(&node));
        let outcome = call("ADD").run();
        assert_eq!(outcome.status, Some(0), "{why}, then {outcome:?}");
        assert!(container.pings("10.1.0.1") && container.pings("fd00:1::1"), "{why}");
    }
    hit.assert_include(&[
        "open",
        "write",
        "link",
        "mkdir",
        "rename",
        "unlink",
        "RTM_NEWLINK",
        "RTM_NEWADDR",
        "RTM_NEWROUTE",
    ]);
}

/// The kernel may have executed a request whose reply is lost. A failed receive is retried three
/// times. ADD must have failed without the answers to these requests.
fn no_lost_answer_leaves_anything(scene: &Scene, answers: &[&str]) {
    let (_, calls) = strace::record(&scene.node, &scene.call("ADD"));
    scene.call("DEL").ok();
    let receives = |point: &Syscall| point.verb() == "recv";
    let mut lost = BTreeSet::new();
    for point in strace::points(&calls).into_iter().filter(receives) {
        let point = point.and(3);
        for (errno, text) in [("EIO", "I/O error"), ("EINTR", "")] {
            let (outcome, fired) =
                point.run(&scene.node, &scene.call("ADD"), &format!("error={errno}"));
            let why = format!("{} with {errno}: {outcome:?}", point.describe());
            match outcome.status {
                Some(0) => scene.call("DEL").ok(),
                _ => assert!(errno != "EINTR", "{why}"),
            }
            if outcome.status == Some(1) {
                assert_well_formed_failure(&outcome, &why);
                assert!(fired && outcome.stdout.contains(text), "{why}");
                lost.extend(point.messages());
            }
            scene.assert_as_before(&why);
        }
    }
    assert!(answers.iter().all(|answer| lost.contains(*answer)), "not {answers:?}, only {lost:?}");
}

#[test]
fn a_bridge_add_that_loses_an_answer_leaves_nothing() {
    no_lost_answer_leaves_anything(
        &Scene::bridge(),
        &["RTM_NEWLINK", "RTM_NEWADDR", "RTM_NEWROUTE", "NFT_MSG_NEWSETELEM"],
    );
}

#[test]
fn a_ptp_add_that_loses_an_answer_says_why_and_leaves_nothing() {
    no_lost_answer_leaves_anything(
        &Scene::ptp(),
        &["RTM_NEWLINK", "RTM_NEWADDR", "RTM_NEWROUTE", "NFT_MSG_NEWSETELEM"],
    );
}

#[test]
fn a_macvlan_add_that_loses_an_answer_leaves_nothing() {
    no_lost_answer_leaves_anything(&Scene::macvlan(), &["RTM_NEWLINK", "RTM_NEWADDR"]);
}

#[test]
fn a_dummy_add_that_loses_an_answer_leaves_nothing() {
    needs!(lane::DUMMY);
    no_lost_answer_leaves_anything(&Scene::dummy(), &["RTM_NEWLINK", "RTM_NEWADDR"]);
}

/// All calls of setns from the `nth` on fail, so that the process stays in its current namespace.
fn without_setns(call: &Call, nth: usize) -> Outcome {
    let inject = format!("inject=setns:error=EPERM:when={nth}+");
    call.clone().under(&["strace", "-f", "-o", "/dev/null", "-e", &inject]).run()
}

/// A process that cannot return to the host's namespace would apply host changes to the container.
fn a_failure_to_return_to_the_host_is_reported(scene: &Scene) {
    let (_, calls) = strace::record(&scene.node, &scene.call("ADD"));
    scene.call("DEL").ok();
    let count = calls.iter().filter(|call| call.name == "setns").count();
    let mut failed = BTreeSet::new();
    for nth in 1..=count {
        for verb in ["ADD", "DEL"] {
            if verb == "DEL" {
                scene.call("ADD").result();
            }
            let outcome = without_setns(&scene.call(verb), nth);
            let why = format!("{verb} without setns {nth} of {count}: {outcome:?}");
            if outcome.status != Some(0) {
                assert_eq!(outcome.status, Some(1), "{why}");
                assert_well_formed_failure(&outcome, &why);
                failed.insert(verb);
            }
            if verb == "ADD" && outcome.status == Some(1) {
                // The rollback has reached the host.
                assert_eq!(scene.node.snapshot(), scene.before.0, "{why}");
            }
            scene.call("DEL").ok();
            scene.assert_as_before(&why);
        }
    }
    assert_eq!(failed, BTreeSet::from(["ADD", "DEL"]), "of {count} calls");
}

#[test]
fn bridge_reports_a_failure_to_return_to_the_host() {
    a_failure_to_return_to_the_host_is_reported(&Scene::bridge());
}

#[test]
fn ptp_reports_a_failure_to_return_to_the_host() {
    a_failure_to_return_to_the_host_is_reported(&Scene::ptp());
}

#[test]
fn add_works_after_a_first_add_that_failed_at_any_step() {
    first_add(None);
}

#[test]
fn add_works_after_a_first_add_killed_at_any_step() {
    first_add(Some("signal=KILL"));
}

#[test]
fn a_failing_bridge_add_leaves_nothing_at_any_system_call() {
    no_add_leaves_anything(&Scene::bridge());
}

#[test]
fn a_failing_ptp_add_leaves_nothing_at_any_system_call() {
    no_add_leaves_anything(&Scene::ptp());
}

#[test]
fn a_bridge_add_killed_anywhere_is_cleaned_up_by_del() {
    survives_kill(&Scene::bridge(), "ADD");
}

#[test]
fn a_ptp_add_killed_anywhere_is_cleaned_up_by_del() {
    survives_kill(&Scene::ptp(), "ADD");
}

#[test]
fn a_bridge_del_killed_anywhere_is_finished_by_the_next() {
    survives_kill(&Scene::bridge(), "DEL");
}

#[test]
fn a_ptp_del_killed_anywhere_is_finished_by_the_next() {
    survives_kill(&Scene::ptp(), "DEL");
}

#[test]
fn a_failing_macvlan_add_leaves_nothing_at_any_system_call() {
    no_add_leaves_anything(&Scene::macvlan());
}

#[test]
fn a_macvlan_add_killed_anywhere_is_cleaned_up_by_del() {
    survives_kill(&Scene::macvlan(), "ADD");
}

#[test]
fn a_macvlan_del_killed_anywhere_is_finished_by_the_next() {
    survives_kill(&Scene::macvlan(), "DEL");
}

#[test]
#[ignore = "takes minutes in the VM lane: make test-long"]
fn a_failing_ipvlan_add_leaves_nothing_at_any_system_call() {
    needs!(lane::IPVLAN);
    no_add_leaves_anything(&Scene::ipvlan());
}

#[test]
#[ignore = "takes minutes in the VM lane: make test-long"]
fn a_failing_dummy_add_leaves_nothing_at_any_system_call() {
    needs!(lane::DUMMY);
    no_add_leaves_anything(&Scene::dummy());
}

#[test]
#[ignore = "takes minutes in the VM lane: make test-long"]
fn a_failing_vlan_add_leaves_nothing_at_any_system_call() {
    needs!(lane::VLAN);
    no_add_leaves_anything(&Scene::vlan());
}

#[test]
#[ignore = "takes minutes in the VM lane: make test-long"]
fn a_vlan_add_killed_anywhere_is_cleaned_up_by_del() {
    needs!(lane::VLAN);
    survives_kill(&Scene::vlan(), "ADD");
}

#[test]
#[ignore = "takes minutes in the VM lane: make test-long"]
fn a_failing_add_with_a_vlan_leaves_nothing() {
    needs!(lane::BRIDGE_VLAN);
    no_add_leaves_anything(&Scene::bridge_vlan());
}

#[test]
#[ignore = "takes minutes in the VM lane: make test-long"]
fn a_killed_add_with_a_vlan_is_cleaned_up_by_del() {
    needs!(lane::BRIDGE_VLAN);
    survives_kill(&Scene::bridge_vlan(), "ADD");
}

#[test]
#[ignore = "takes minutes in the VM lane: make test-long"]
fn a_killed_del_with_a_vlan_is_finished_by_the_next() {
    needs!(lane::BRIDGE_VLAN);
    survives_kill(&Scene::bridge_vlan(), "DEL");
}
