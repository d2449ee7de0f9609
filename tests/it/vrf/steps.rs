//! Calls that fail or are killed at each step.

use serde_json::json;

use super::Pod;
use crate::lane::{self, needs};
use crate::support::net::settles;
use crate::support::node::Call;
use crate::support::strace::{self, Hits};

fn at_each_step(verb: &str, action: &str) {
    let pod = Pod::new();
    pod.container.sh("ip addr add 10.0.0.2/24 dev eth0");
    pod.container.sh("ip addr add fd00:1::2/64 dev eth0 nodad");
    pod.container.sh("ip route add default via 10.0.0.1");
    pod.container.sh("ip route add fd00:2::/64 via fd00:1::9");
    let before = pod.container.snapshot(&pod.node);
    let call = |verb: &str| -> Call {
        let call = pod.call(verb, "eth0", &json!({"vrfname": "blue"}));
        call.env("RUST_BACKTRACE", "0")
    };
    if verb == "DEL" {
        call("ADD").result();
    }
    let (outcome, calls) = strace::record(&pod.node, &call(verb));
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    call("DEL").ok();
    settles(&before, || pod.container.snapshot(&pod.node));
    let effects = ["send", "flock", "fork"];
    let mut hit = Hits::default();
    for point in strace::points(&calls).into_iter().filter(|point| effects.contains(&point.verb()))
    {
        if verb == "DEL" {
            call("ADD").result();
        }
        let (outcome, fired) = point.run(&pod.node, &call(verb), action);
        let why = format!("{verb} with {action} at {}: {outcome:?}", point.describe());
        assert!(!outcome.stderr.contains("panicked"), "{why}");
        hit.extend(fired.then_some(&point));
        if verb == "DEL" || outcome.status != Some(1) {
            let outcome = call("DEL").run();
            assert_eq!(outcome.status, Some(0), "{why}, then {outcome:?}");
        }
        assert_eq!(pod.table("blue"), None, "{why}");
        assert!(!pod.container.sh("ip link show eth0").contains("master"), "{why}");
        if action.starts_with("error") && verb == "ADD" {
            eprintln!("{why}");
            settles(&before, || pod.container.snapshot(&pod.node));
        } else {
            // A kill between joining and restoring loses the addresses and routes that the kernel
            // removed.
            pod.container.sh("ip addr replace fd00:1::2/64 dev eth0 nodad");
            pod.container.sh("ip route replace default via 10.0.0.1");
            pod.container.sh("ip route replace fd00:2::/64 via fd00:1::9");
        }
    }
    hit.assert_include(if verb == "ADD" {
        &["flock", "RTM_NEWLINK"]
    } else {
        &["flock", "RTM_DELLINK"]
    });
}

#[test]
#[ignore = "takes minutes in the VM lane: make test-long"]
fn a_failing_add_leaves_nothing_at_any_step() {
    needs!(lane::VRF);
    at_each_step("ADD", "error=EPERM");
}

#[test]
#[ignore = "takes minutes in the VM lane: make test-long"]
fn an_add_killed_anywhere_is_cleaned_up_by_del() {
    needs!(lane::VRF);
    at_each_step("ADD", "signal=KILL");
}

#[test]
#[ignore = "takes minutes in the VM lane: make test-long"]
fn a_del_killed_or_failing_anywhere_is_finished_by_the_next() {
    needs!(lane::VRF);
    at_each_step("DEL", "signal=KILL");
    at_each_step("DEL", "error=EPERM");
}
