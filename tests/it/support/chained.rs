//! The verbs of a chained plugin (behind an interface plugin in a list) in the orders in which
//! runtimes call them, in every version, with faults and kills at each step. DEL must restore the
//! state that the interface plugin left.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::conflist::{Attached, Conflist};
use crate::support::faults::{assert_well_formed_failure, errno, has_effect, worth_trying};
use crate::support::net::{Net, dual_ipam, merged, normal_json, settles};
use crate::support::node::{
    Call, Container, MILESTONES, Node, Snapshot, VERSIONS, assert_unchanged, exists, set_sysctl,
};
use crate::support::parallel::at_once_in;
use crate::support::strace::{self, Hits};

/// A plugin under test.
pub(crate) struct Subject {
    pub(crate) plugin: &'static str,
    /// The supported CNI versions.
    pub(crate) versions: &'static [&'static str],
    /// The keys of the plugin's configuration.
    pub(crate) keys: fn(&Node) -> Value,
    /// The interface plugin before it, with its keys.
    pub(crate) behind: (&'static str, fn(&Node) -> Value),
    /// Prepares both namespaces, for example with permanent kernel state that snapshots would
    /// show.
    pub(crate) prepare: fn(&Node, &Container),
    /// Turns `prevResult` into the expected result of a version.
    pub(crate) result: fn(&mut Value, &str),
    /// Sysctls of the container that a snapshot does not include.
    pub(crate) sysctls: &'static [&'static str],
    /// The directory of the plugin's files, relative to the directory of state.
    pub(crate) files: &'static str,
}

/// A container behind an interface plugin, on a node of its own.
pub(crate) struct Pod<'s> {
    pub(crate) node: Node,
    pub(crate) container: Container,
    /// The result of the interface plugin.
    pub(crate) prev: Value,
    /// The state after ADD of the interface plugin.
    pub(crate) before: State,
    version: &'static str,
    subject: &'s Subject,
    keys: Value,
}

/// Everything that a chained plugin may change.
#[derive(PartialEq, Eq, Debug, Clone)]
pub(crate) struct State {
    pub(crate) host: Snapshot,
    pub(crate) inside: Snapshot,
    pub(crate) sysctls: Vec<String>,
    pub(crate) files: Vec<String>,
}

impl State {
    fn of(subject: &Subject, node: &Node, container: &Container) -> State {
        let sysctls = subject.sysctls.iter();
        let entries = fs::read_dir(node.state(subject.files)).into_iter().flatten();
        let mut files: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        files.sort();
        State {
            host: node.snapshot(),
            inside: container.snapshot(node),
            sysctls: sysctls.map(|key| format!("{key}={}", container.sysctl(key))).collect(),
            files,
        }
    }
}

impl Pod<'_> {
    /// The network with the plugin's keys, `prevResult` and `keys`.
    pub(crate) fn net(&self, keys: &Value) -> Net<'_> {
        let own = merged(&self.keys, &json!({"prevResult": self.prev}));
        Net::new(&self.node, self.subject.plugin, self.version, &merged(&own, keys))
    }

    /// The network with the plugin's keys.
    pub(crate) fn plain(&self) -> Net<'_> {
        self.net(&json!({}))
    }

    /// A call with `prevResult`.
    pub(crate) fn call(&self, verb: &str) -> Call {
        self.plain().on(verb, &self.container).env("RUST_BACKTRACE", "0")
    }

    /// A call with more `keys`, without `prevResult` unless `keys` contains it.
    pub(crate) fn call_with(&self, verb: &str, keys: &Value) -> Call {
        let mut bare = self.plain();
        bare.conf["prevResult"] = Value::Null;
        bare.with(keys).on(verb, &self.container)
    }

    /// A call without `prevResult`.
    pub(crate) fn bare(&self, verb: &str) -> Call {
        self.call_with(verb, &json!({}))
    }

    pub(crate) fn state(&self) -> State {
        State::of(self.subject, &self.node, &self.container)
    }

    /// Asserts that the state equals `before`.
    #[track_caller]
    pub(crate) fn assert_as(&self, before: &State, why: &str) {
        let now = self.state();
        if now != *before {
            eprintln!("{why}");
        }
        assert_unchanged(&before.host, &now.host);
        assert_unchanged(&before.inside, &now.inside);
        assert_eq!((&now.sysctls, &now.files), (&before.sysctls, &before.files), "{why}");
    }

    /// Like [`Pod::assert_as`], with retries: the kernel may acknowledge the deletion of a device
    /// before it completes.
    #[track_caller]
    pub(crate) fn assert_settles_as(&self, before: &State, why: &str) {
        let deadline = Instant::now() + Duration::from_secs(2);
        while self.state() != *before && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(20));
        }
        self.assert_as(before, why);
    }

    /// Asserts that CHECK fails with `msg` and changes nothing.
    #[track_caller]
    pub(crate) fn check_finds(&self, msg: &str) {
        self.plain().check_finds(&self.container, &self.prev, msg);
    }

    /// Asserts that the call fails with this code and message and changes nothing.
    #[track_caller]
    pub(crate) fn is_refused(&self, call: &Call, brief: (u64, &str)) {
        self.plain().is_refused(call, &self.container, brief);
    }
}

impl Pod<'_> {
    /// ADD returns the expected result, CHECK succeeds, a second ADD is idempotent, and two DELs,
    /// with or without `prevResult`, restore the state.
    fn add_check_del_del(&self, round: &str) {
        let (why, container) = (format!("{} {round} prevResult", self.version), &self.container);
        let net = self.plain();
        let mut expected = self.prev.clone();
        (self.subject.result)(&mut expected, self.version);
        let result = net.add(container);
        if expected == self.prev {
            assert_eq!(result, expected, "{why}: passed through unchanged");
        }
        assert_eq!(normal_json(&result, container), normal_json(&expected, container), "{why}");
        let added = self.state();
        assert!(added != self.before, "{why}: nothing was done");
        if self.version >= "0.4.0" {
            net.check(container, &result).ok();
            self.assert_as(&added, "CHECK");
        } else {
            let error = net.check(container, &result).error();
            assert_eq!(error.brief(), (1, "config version does not allow CHECK"));
        }
        assert_eq!(net.add(container), result, "{why}: the second ADD");
        self.assert_settles_as(&added, "the second ADD");
        let prev = if round == "with" { &result } else { &Value::Null };
        for _ in 0..2 {
            net.with(&json!({"prevResult": prev})).del(container);
            self.assert_settles_as(&self.before, &why);
        }
    }

    /// Three lifecycles; then DEL without state, and without the namespace.
    fn in_rounds(&self) {
        for round in ["with", "without", "with"] {
            self.add_check_del_del(round);
        }
        self.bare("DEL").netns("").ok();
        self.bare("DEL").without("CNI_NETNS").ok();
        self.call("DEL").netns("/var/run/netns/no-such").ok();
        assert!(!exists("/var/run/netns/no-such"), "no lock file is made");
        self.call("DEL").ifname("eth9").ok();
        self.assert_settles_as(&self.before, "nothing to delete");
    }

    fn gc_and_status(&self) {
        self.call("ADD").result();
        let added = self.state();
        for verb in ["GC", "STATUS"] {
            let keys = json!({"cni.dev/valid-attachments": []});
            let call = self.call_with(verb, &keys).without("CNI_NETNS");
            if self.version < "1.1.0" {
                let msg = format!("config version does not allow {verb}");
                assert_eq!(call.error().brief(), (1, msg.as_str()));
            } else {
                call.ok();
            }
        }
        self.assert_as(&added, "GC and STATUS");
        self.call("DEL").ok();
        self.assert_settles_as(&self.before, "DEL after GC");
    }
}

/// Keys of a dual-stack ptp network with default routes.
fn ptp(node: &Node) -> Value {
    let ipam = dual_ipam(node);
    json!({"ipam": ipam})
}

/// Keys of a dual-stack bridge network with a route by another router.
fn bridge(node: &Node) -> Value {
    let mut ipam = node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
    ipam["routes"] = json!([{"dst": "192.168.0.0/16", "gw": "10.1.2.9"}, {"dst": "fd99::/16"}]);
    json!({"isGateway": true, "ipam": ipam})
}

impl Subject {
    /// 64 containers are attached at once, and detached at once: nothing is left.
    pub(crate) fn attaches_many_at_once(&self) {
        const PODS: usize = 64;
        let node = Node::new();
        let containers: Vec<Container> = (0..PODS).map(|_| Container::new()).collect();
        for container in &containers {
            (self.prepare)(&node, container);
        }
        let (interface, keys) = self.behind;
        let plugins = [(interface, keys(&node)), (self.plugin, (self.keys)(&node))]
            .map(|(plugin, keys)| merged(&json!({"type": plugin}), &keys));
        let list =
            Conflist::new(&node, json!({"cniVersion": "1.1.0", "name": "net", "plugins": plugins}));
        let at: Vec<Attached> = containers
            .iter()
            .enumerate()
            .map(|(i, c)| Attached::new(&format!("pod{i}"), &c.path()))
            .collect();
        // What stays after the first container of a node.
        let first = list.add(&at[0]).unwrap();
        list.del(&at[0], Some(&first)).unwrap();
        let before = (node.snapshot(), containers[1].snapshot(&node));
        for _ in 0..2 {
            let results = at_once_in(PODS, PODS, |i| list.add(&at[i]).unwrap());
            at_once_in(PODS, PODS, |i| list.del(&at[i], Some(&results[i])).unwrap());
            settles(&before.0, || node.snapshot());
            for container in &containers[1..] {
                settles(&before.1, || container.snapshot(&node));
            }
        }
    }

    /// Defaults for a plugin behind ptp.
    pub(crate) const BEHIND_PTP: Subject = Subject {
        plugin: "none",
        versions: &VERSIONS,
        keys: |_| json!({}),
        behind: ("ptp", ptp),
        prepare: |_, container| {
            // Link-local addresses appear asynchronously and would make snapshots differ.
            set_sysctl("net/ipv6/conf/default/addr_gen_mode", "1");
            container.set_sysctl("net/ipv6/conf/default/addr_gen_mode", "1");
        },
        result: |_, _| {},
        sysctls: &[],
        files: "none",
    };
    /// Defaults for a plugin behind bridge.
    pub(crate) const BEHIND_BRIDGE: Subject =
        Subject { behind: ("bridge", bridge), prepare: |_, _| {}, ..Subject::BEHIND_PTP };

    /// A container attached by the interface plugin, in a CNI version.
    pub(crate) fn pod(&self, version: &'static str) -> Pod<'_> {
        self.pod_with(version, &json!({}))
    }

    /// The same with more keys of the interface plugin.
    pub(crate) fn pod_with(&self, version: &'static str, keys: &Value) -> Pod<'_> {
        let (node, container) = (Node::new(), Container::new());
        (self.prepare)(&node, &container);
        let (plugin, of_plugin) = self.behind;
        let prev = Net::new(&node, plugin, version, &of_plugin(&node)).add(&container);
        let keys = merged(&(self.keys)(&node), keys);
        let before = State::of(self, &node, &container);
        Pod { node, container, prev, before, version, subject: self, keys }
    }

    /// Runs `test` in each supported version of [`MILESTONES`], and ADD, CHECK and DEL in the other
    /// supported ones; the plugin must reject the rest.
    fn each_version(&self, keys: &Value, test: impl Fn(Pod<'_>)) {
        for version in VERSIONS {
            let pod = self.pod_with(version, keys);
            if self.versions.contains(&version) {
                if MILESTONES.contains(&version) {
                    test(pod);
                } else {
                    pod.add_check_del_del("with");
                }
                continue;
            }
            let error = pod.call("ADD").error();
            assert_eq!(error.brief(), (1, "incompatible CNI versions"), "{version}");
            pod.assert_as(&pod.before, version);
        }
    }

    /// ADD, CHECK, DEL, and DEL without namespace, in every version.
    pub(crate) fn add_check_del_del(&self) {
        self.each_version(&json!({}), |pod| {
            pod.in_rounds();
        });
    }

    /// The same with more keys, and GC, STATUS and the end of the namespace, for a plugin without
    /// state outside the container.
    pub(crate) fn every_verb_in_every_version(&self, keys: &Value) {
        self.each_version(keys, |pod| {
            pod.in_rounds();
            pod.gc_and_status();
            let (path, call) = (pod.container.path(), pod.call("DEL"));
            pod.call("ADD").result();
            drop(pod.container);
            call.netns(&path).ok();
        });
    }

    /// DEL succeeds without `prevResult`, without a namespace, and without both. State inside an
    /// unreachable namespace may remain; `judge` verifies the host.
    pub(crate) fn del_without(&self, judge: impl Fn(&Pod<'_>, &State, &str)) {
        for what in ["prevResult", "namespace", "prevResult and namespace"] {
            let pod = self.pod("1.1.0");
            let before = pod.state();
            let result = pod.plain().add(&pod.container);
            let prev = if what.contains("prevResult") { Value::Null } else { result };
            let netns = pod.container.path();
            let netns = if what.contains("namespace") { "/run/netns/no-such" } else { &netns };
            for _ in 0..2 {
                pod.net(&json!({"prevResult": prev})).call("DEL", "c1").netns(netns).ok();
            }
            if what == "prevResult" {
                pod.assert_as(&before, what);
            }
            assert_eq!(pod.state().files, before.files, "{what}");
            judge(&pod, &before, what);
        }
    }

    /// Each system call of an ADD fails in turn: no state remains.
    /// [`Hits`] says what `failing` names.
    pub(crate) fn no_add_leaves_anything(&self, failing: &[&str]) {
        let pod = self.pod("1.0.0");
        pod.call("ADD").result();
        pod.call("DEL").ok();
        let before = pod.state();
        let (outcome, calls) = strace::record(&pod.node, &pod.call("ADD"));
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        pod.call("DEL").ok();
        let mut failed = Hits::default();
        for point in strace::points(&calls).into_iter().filter(worth_trying()) {
            let action = format!("error={}", errno(&point));
            let (outcome, fired) = point.run(&pod.node, &pod.call("ADD"), &action);
            let why = format!("{} with {action}: {outcome:?}", point.describe());
            assert!(!outcome.stderr.contains("panicked"), "{why}");
            match outcome.status {
                Some(0) => pod.call("DEL").ok(),
                Some(1) => {
                    assert!(fired, "{why}");
                    failed.extend([&point]);
                    if !point.prints_result() {
                        assert_well_formed_failure(&outcome, &why);
                    }
                }
                _ => panic!("{why}"),
            }
            pod.assert_settles_as(&before, &why);
        }
        failed.assert_include(failing);
        pod.call("ADD").result();
    }

    /// ADD and DEL are killed before each system call with an effect; the next DEL restores the
    /// state.
    pub(crate) fn survives_kill(&self, add: &[&str], del: &[&str]) {
        let pod = self.pod("1.0.0");
        pod.call("ADD").result();
        pod.call("DEL").ok();
        let before = pod.state();
        for (verb, at) in [("ADD", add), ("DEL", del)] {
            let prepare = || drop((verb == "DEL").then(|| pod.call("ADD").result()));
            prepare();
            let (outcome, calls) = strace::record(&pod.node, &pod.call(verb));
            assert_eq!(outcome.status, Some(0), "{outcome:?}");
            pod.call("DEL").ok();
            let mut killed = Hits::default();
            for point in strace::points(&calls).into_iter().filter(has_effect) {
                prepare();
                let (outcome, fired) = point.run(&pod.node, &pod.call(verb), "signal=KILL");
                let why = format!("{verb} killed at {}: {outcome:?}", point.describe());
                killed.extend(fired.then_some(&point));
                if verb == "ADD" {
                    // The runtime may retry ADD first.
                    pod.call("ADD").result();
                }
                pod.call("DEL").ok();
                pod.assert_settles_as(&before, &why);
            }
            killed.assert_include(at);
        }
    }
}
