//! Concurrent calls in one namespace, and calls that fail or are killed at each step.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::Pod;
use crate::support::node::{Call, Container, Node, Snapshot, assert_unchanged};
use crate::support::parallel::at_once;
use crate::support::strace::{self, Hits};

const LINKS: usize = 24;

/// A container with many interfaces, each with an address of each family.
fn many() -> (Node, Container) {
    let (node, container) = (Node::new(), Container::new());
    let mut script = vec!["ip link set lo up".to_owned()];
    for i in 0..LINKS {
        script.push(format!("ip link add net{i} type veth peer name far{i}"));
        script.push(format!("ip link set far{i} addrgenmode none up"));
        script.push(format!("ip link set net{i} addrgenmode none up"));
        script.push(format!("ip addr add 10.{i}.0.2/24 dev net{i}"));
        script.push(format!("ip addr add fd00:{i}::2/64 dev net{i} nodad"));
    }
    container.sh(&format!("sh -c '{}'", script.join(" && ")));
    (node, container)
}

fn call(node: &Node, container: &Container, verb: &str, i: usize) -> Call {
    let prev = json!({"cniVersion": "1.0.0", "interfaces": [{"name": format!("net{i}")}], "ips": [
        {"address": format!("10.{i}.0.2/24"), "gateway": format!("10.{i}.0.1"), "interface": 0},
        {"address": format!("fd00:{i}::2/64"), "gateway": format!("fd00:{i}::1"), "interface": 0},
    ]});
    let conf = json!({"cniVersion": "1.0.0", "name": "n", "type": "sbr", "prevResult": prev});
    let call = node.call("sbr", verb).conf(&conf).ifname(&format!("net{i}"));
    call.netns(&container.path())
}

/// The tables that the rules refer to, and the number of rules.
fn tables(container: &Container) -> (BTreeSet<String>, usize) {
    let mut found = Vec::new();
    for family in ["-4", "-6"] {
        let text = container.sh(&format!("ip {family} rule"));
        let rules = text.lines().filter(|line| !line.contains("from all"));
        found.extend(rules.map(|line| line.rsplit("lookup ").next().unwrap().trim().to_owned()));
    }
    (found.iter().cloned().collect(), found.len())
}

#[test]
fn calls_in_one_namespace_never_choose_the_same_table() {
    let (node, container) = many();
    let before = container.snapshot(&node);
    at_once(LINKS, |i| call(&node, &container, "ADD", i).result());
    let (different, all) = tables(&container);
    assert_eq!((different.len(), all), (2 * LINKS, 2 * LINKS));
    assert_eq!(different.first().map(String::as_str), Some("100"));
    at_once(LINKS, |i| call(&node, &container, "CHECK", i).ok());
    // Half of the attachments are deleted while the other half is added again.
    at_once(LINKS, |i| {
        if i % 2 == 0 {
            call(&node, &container, "DEL", i).ok();
        } else {
            call(&node, &container, "ADD", i).result();
        }
    });
    assert_eq!(tables(&container).1, LINKS);
    at_once(LINKS, |i| call(&node, &container, "DEL", i).ok());
    assert_unchanged(&before, &container.snapshot(&node));
}

#[test]
fn thirty_two_containers_are_attached_concurrently() {
    let node = Node::new();
    let containers: Vec<Container> = (0..32).map(|_| Container::new()).collect();
    let setup = "ip link add net1 type veth peer name far && ip link set far up && \
                 ip link set net1 up && ip addr add 10.1.0.2/24 dev net1";
    for container in &containers {
        container.sh(&format!("sh -c '{setup}'"));
    }
    at_once(32, |i| call(&node, &containers[i], "ADD", 1).result());
    for container in &containers {
        assert!(container.sh("ip rule").contains("from 10.1.0.2 lookup 100"));
    }
    at_once(32, |i| call(&node, &containers[i], "DEL", 1).ok());
}

struct Scene {
    pod: Pod,
    keys: Value,
    before: Snapshot,
}

impl Scene {
    fn new(keys: Value) -> Scene {
        let pod = Pod::dual();
        let before = pod.container.snapshot(&pod.node);
        Scene { pod, keys, before }
    }

    fn call(&self, verb: &str) -> Call {
        self.pod.call(verb, &self.keys).env("RUST_BACKTRACE", "0")
    }

    #[track_caller]
    fn assert_as_before(&self, why: &str) {
        let now = self.pod.container.snapshot(&self.pod.node);
        if now != self.before {
            eprintln!("{why}");
        }
        assert_unchanged(&self.before, &now);
    }
}

/// Makes each netlink message and each other call with an effect fail or be the last one. [`Hits`]
/// says what `steps` names.
fn at_each_step(keys: Value, verb: &str, action: &str, steps: &[&str]) {
    let scene = Scene::new(keys);
    if verb == "DEL" {
        scene.call("ADD").result();
    }
    let (outcome, calls) = strace::record(&scene.pod.node, &scene.call(verb));
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    scene.call("DEL").ok();
    scene.assert_as_before("recorded");
    let effects = ["send", "write", "flock", "open", "fork", "setns"];
    let mut hit = Hits::default();
    for point in strace::points(&calls).into_iter().filter(|point| effects.contains(&point.verb()))
    {
        if verb == "DEL" {
            scene.call("ADD").result();
        }
        let (outcome, fired) = point.run(&scene.pod.node, &scene.call(verb), action);
        let why = format!("{verb} with {action} at {}: {outcome:?}", point.describe());
        assert!(!outcome.stderr.contains("panicked"), "{why}");
        hit.extend(fired.then_some(&point));
        // A failed ADD has rolled back; otherwise a DEL cleans up.
        if verb == "DEL" || outcome.status != Some(1) {
            let outcome = scene.call("DEL").run();
            assert_eq!(outcome.status, Some(0), "{why}, then {outcome:?}");
        }
        scene.assert_as_before(&why);
    }
    hit.assert_include(steps);
}

fn each_add(action: &str) {
    let moves = ["open", "setns", "RTM_DELROUTE", "RTM_NEWROUTE", "RTM_NEWRULE"];
    at_each_step(json!({}), "ADD", action, &moves);
    at_each_step(json!({"addSourceHints": true}), "ADD", action, &moves);
    // The routes of such a table are the administrator's.
    at_each_step(json!({"table": 5000}), "ADD", action, &["open", "setns", "RTM_NEWRULE"]);
}

#[test]
fn a_failing_add_leaves_nothing_at_any_step() {
    each_add("error=EPERM");
}

#[test]
fn an_add_killed_anywhere_is_cleaned_up_by_del() {
    each_add("signal=KILL");
}

#[test]
fn a_del_killed_or_failing_anywhere_is_finished_by_the_next() {
    for action in ["signal=KILL", "error=EPERM"] {
        at_each_step(json!({}), "DEL", action, &["RTM_DELROUTE", "RTM_DELRULE", "RTM_NEWROUTE"]);
    }
}
