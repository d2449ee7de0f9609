//! The verbs of a plugin that stands behind `ptp`, in the orders runtimes call them, for every
//! version that it speaks; and faults and kills at each of its steps.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::faults::{assert_well_formed_failure, errno, has_effect, prints_result, worth_trying};
use crate::net::{Net, merged};
use crate::node::{Call, Container, Node, Snapshot, assert_unchanged};
use crate::strace;

/// A plugin under test.
pub(crate) struct Subject {
    pub(crate) plugin: &'static str,
    pub(crate) versions: &'static [&'static str],
    /// Its keys.
    pub(crate) keys: fn(&Node) -> Value,
    /// Makes of the result of `ptp` what this plugin makes of it in a version.
    pub(crate) result: fn(&mut Value, &str),
    /// What a snapshot does not show: the values of these parameters in the container.
    pub(crate) sysctls: &'static [&'static str],
    /// A folder below the node's that holds the plugin's files.
    pub(crate) files: &'static str,
}

/// A container behind `ptp`, on a node of its own.
pub(crate) struct Pod<'s> {
    pub(crate) node: Node,
    pub(crate) container: Container,
    /// What `ptp` printed.
    pub(crate) prev: Value,
    version: &'static str,
    subject: &'s Subject,
}

/// All that may change.
#[derive(PartialEq, Eq, Debug, Clone)]
pub(crate) struct State {
    pub(crate) host: Snapshot,
    pub(crate) inside: Snapshot,
    pub(crate) sysctls: Vec<String>,
    pub(crate) files: Vec<String>,
}

impl Pod<'_> {
    pub(crate) fn net(&self, keys: &Value) -> Net<'_> {
        let own = merged(&(self.subject.keys)(&self.node), &json!({"prevResult": self.prev}));
        Net::new(&self.node, self.subject.plugin, self.version, &merged(&own, keys))
    }

    /// The network with the plugin's keys.
    pub(crate) fn plain(&self) -> Net<'_> {
        self.net(&json!({}))
    }

    fn call(&self, verb: &str) -> Call {
        self.plain().on(verb, &self.container).env("RUST_BACKTRACE", "0")
    }

    pub(crate) fn state(&self) -> State {
        let (node, container) = (&self.node, &self.container);
        let sysctls = self.subject.sysctls.iter();
        let entries = fs::read_dir(node.path(self.subject.files)).into_iter().flatten();
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

    /// Everything is as `before`.
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
}

impl Pod<'_> {
    /// As [`Pod::assert_as`], in a moment: the kernel removes a device after it has said so.
    #[track_caller]
    fn assert_settles_as(&self, before: &State, why: &str) {
        let deadline = Instant::now() + Duration::from_secs(2);
        while self.state() != *before && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(20));
        }
        self.assert_as(before, why);
    }
}

impl Subject {
    pub(crate) fn pod(&self, version: &'static str) -> Pod<'_> {
        let (node, container) = (Node::new(), Container::new());
        // Link-local addresses come and change by themselves, late on a busy machine.
        node.sh("echo 1 > /proc/sys/net/ipv6/conf/default/addr_gen_mode");
        container.sh("sh -c 'echo 1 > /proc/sys/net/ipv6/conf/default/addr_gen_mode'");
        let mut ipam = node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
        ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
        let ptp = Net::new(&node, "ptp", version, &json!({"ipam": ipam}));
        let prev = ptp.add(&container);
        Pod { node, container, prev, version, subject: self }
    }

    /// ADD passes the result on, a second one changes nothing more, CHECK agrees, two DELs leave
    /// everything as it was.
    pub(crate) fn add_check_del_del(&self) {
        for version in self.versions {
            let pod = self.pod(version);
            let before = pod.state();
            let mut expected = pod.prev.clone();
            let net = pod.plain();
            let result = net.add(&pod.container);
            (self.result)(&mut expected, version);
            assert_eq!(
                crate::net::normal_json(&result, &pod.container),
                crate::net::normal_json(&expected, &pod.container),
                "{version}"
            );
            let added = pod.state();
            assert!(added != before, "{version}: nothing was done");
            assert_eq!(net.add(&pod.container), result, "{version}: the second ADD");
            pod.assert_as(&added, "the second ADD");
            if *version >= "0.4.0" {
                net.check(&pod.container, &result).ok();
                pod.assert_as(&added, "CHECK");
            } else {
                let error = net.check(&pod.container, &result).error();
                assert_eq!(error.brief(), (1, "config version does not allow CHECK"));
            }
            net.with(&json!({"prevResult": result})).del(&pod.container);
            pod.assert_as(&before, version);
            net.with(&json!({"prevResult": result})).del(&pod.container);
            pod.assert_as(&before, version);
        }
    }

    /// DEL succeeds without `prevResult`, without a namespace, and without either. What the
    /// plugin cannot reach inside may stay; `judge` looks at the host.
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

    /// Each system call of an ADD fails in turn: nothing of it is left.
    pub(crate) fn no_add_leaves_anything(&self, at_least: usize) {
        let pod = self.pod("1.0.0");
        pod.call("ADD").result();
        pod.call("DEL").ok();
        let before = pod.state();
        let (outcome, calls) = strace::record(&pod.node, &pod.call("ADD"));
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        pod.call("DEL").ok();
        let (mut failed, mut tried) = (0, 0);
        for point in strace::points_of_a_visit(&calls).into_iter().filter(worth_trying()) {
            let action = format!("error={}", errno(&point.syscall.name));
            let (outcome, fired) = point.run(&pod.node, &pod.call("ADD"), &action);
            let why = format!("{} with {action}: {outcome:?}", point.describe());
            assert!(!outcome.stderr.contains("panicked"), "{why}");
            tried += usize::from(fired);
            match outcome.status {
                Some(0) => pod.call("DEL").ok(),
                Some(1) => {
                    failed += 1;
                    if !prints_result(&point) {
                        assert_well_formed_failure(&outcome, &why);
                    }
                }
                _ => panic!("{why}"),
            }
            pod.assert_settles_as(&before, &why);
        }
        println!("{}: {tried} faults, {failed} of them failed the ADD", self.plugin);
        assert!(failed >= at_least, "too few: {failed} of {tried}");
        pod.call("ADD").result();
    }

    /// ADD and DEL are killed before each of their effects: a DEL leaves everything as it was.
    pub(crate) fn survives_kill(&self, at_least: usize) {
        let pod = self.pod("1.0.0");
        pod.call("ADD").result();
        pod.call("DEL").ok();
        let before = pod.state();
        for verb in ["ADD", "DEL"] {
            let add = || drop((verb == "DEL").then(|| pod.call("ADD").result()));
            add();
            let (outcome, calls) = strace::record(&pod.node, &pod.call(verb));
            assert_eq!(outcome.status, Some(0), "{outcome:?}");
            pod.call("DEL").ok();
            let mut killed = 0;
            for point in strace::points_of_a_visit(&calls).into_iter().filter(has_effect) {
                add();
                let (outcome, fired) = point.run(&pod.node, &pod.call(verb), "signal=KILL");
                let why = format!("{verb} killed at {}: {outcome:?}", point.describe());
                killed += usize::from(fired);
                if verb == "ADD" {
                    // The runtime may try again first.
                    pod.call("ADD").result();
                }
                pod.call("DEL").ok();
                pod.assert_settles_as(&before, &why);
            }
            println!("{} {verb}: killed at {killed} places", self.plugin);
            assert!(killed >= at_least, "{verb}: too few: {killed}");
        }
    }
}
