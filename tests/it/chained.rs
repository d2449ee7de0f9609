//! The verbs of a plugin that stands behind an interface plugin in a list, in the orders runtimes
//! call them, for every version; and faults and kills at each of its steps. What such a plugin does
//! ends with its DEL: everything is as the interface plugin left it.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::faults::{assert_well_formed_failure, errno, has_effect, worth_trying};
use crate::net::{Net, dual_ipam, merged, normal_json};
use crate::node::{Call, Container, Node, Snapshot, VERSIONS, assert_unchanged, exists};
use crate::strace;

/// A plugin under test.
pub(crate) struct Subject {
    pub(crate) plugin: &'static str,
    /// Those that it speaks.
    pub(crate) versions: &'static [&'static str],
    /// Its keys.
    pub(crate) keys: fn(&Node) -> Value,
    /// The plugin before it, and that one's keys.
    pub(crate) behind: (&'static str, fn(&Node) -> Value),
    /// Prepares the namespaces: what the kernel remembers for good in them, for example.
    pub(crate) prepare: fn(&Node, &Container),
    /// Makes of the result of the plugin before what this plugin makes of it in a version.
    pub(crate) result: fn(&mut Value, &str),
    /// What a snapshot does not show: the values of these parameters in the container.
    pub(crate) sysctls: &'static [&'static str],
    /// A folder below the node's that holds the plugin's files.
    pub(crate) files: &'static str,
}

/// A container behind an interface plugin, on a node of its own.
pub(crate) struct Pod<'s> {
    pub(crate) node: Node,
    pub(crate) container: Container,
    /// What the interface plugin printed.
    pub(crate) prev: Value,
    /// Everything as it was then.
    pub(crate) before: State,
    version: &'static str,
    subject: &'s Subject,
    keys: Value,
}

/// All that may change.
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
        let entries = fs::read_dir(node.path(subject.files)).into_iter().flatten();
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
    /// The network with the plugin's keys and `prevResult`, and with `keys`.
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

    /// A call with other keys, without `prevResult` unless they have it.
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

    /// As [`Pod::assert_as`], in a moment: the kernel removes a device after it has said so.
    #[track_caller]
    pub(crate) fn assert_settles_as(&self, before: &State, why: &str) {
        let deadline = Instant::now() + Duration::from_secs(2);
        while self.state() != *before && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(20));
        }
        self.assert_as(before, why);
    }

    /// CHECK fails with this message and changes nothing.
    #[track_caller]
    pub(crate) fn check_finds(&self, msg: &str) {
        self.plain().check_finds(&self.container, &self.prev, msg);
    }

    /// A call is refused and changes nothing.
    #[track_caller]
    pub(crate) fn is_refused(&self, call: &Call, brief: (u64, &str)) {
        self.plain().is_refused(call, &self.container, brief);
    }
}

/// The steps of a lifecycle.
impl Pod<'_> {
    /// ADD passes the result on, CHECK agrees, a second ADD changes nothing more, two DELs with or
    /// without `prevResult` leave everything as it was.
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

    /// Thrice; then with nothing to delete, and all that may be absent absent.
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

/// The keys of a dual-stack network of ptp, with default routes.
fn ptp(node: &Node) -> Value {
    let ipam = dual_ipam(node);
    json!({"ipam": ipam})
}

/// The keys of a dual-stack network of bridge, with a route behind a router.
fn bridge(node: &Node) -> Value {
    let mut ipam = node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
    ipam["routes"] = json!([{"dst": "192.168.0.0/16", "gw": "10.1.2.9"}, {"dst": "fd99::/16"}]);
    json!({"isGateway": true, "ipam": ipam})
}

impl Subject {
    /// One behind ptp that does nothing.
    pub(crate) const BEHIND_PTP: Subject = Subject {
        plugin: "none",
        versions: &VERSIONS,
        keys: |_| json!({}),
        behind: ("ptp", ptp),
        prepare: |node, container| {
            // Link-local addresses come and change by themselves, late on a busy machine.
            node.sh("echo 1 > /proc/sys/net/ipv6/conf/default/addr_gen_mode");
            container.sh("sh -c 'echo 1 > /proc/sys/net/ipv6/conf/default/addr_gen_mode'");
        },
        result: |_, _| {},
        sysctls: &[],
        files: "none",
    };
    /// One behind bridge that does nothing.
    pub(crate) const BEHIND_BRIDGE: Subject =
        Subject { behind: ("bridge", bridge), prepare: |_, _| {}, ..Subject::BEHIND_PTP };

    /// A pod in a version of the specification.
    pub(crate) fn pod(&self, version: &'static str) -> Pod<'_> {
        self.pod_with(version, &json!({}))
    }

    /// The same, for a plugin with more keys.
    pub(crate) fn pod_with(&self, version: &'static str, keys: &Value) -> Pod<'_> {
        let (node, container) = (Node::new(), Container::new());
        (self.prepare)(&node, &container);
        let (plugin, of_plugin) = self.behind;
        let prev = Net::new(&node, plugin, version, &of_plugin(&node)).add(&container);
        let keys = merged(&(self.keys)(&node), keys);
        let before = State::of(self, &node, &container);
        Pod { node, container, prev, before, version, subject: self, keys }
    }

    /// Runs `test` in each version; those that the plugin does not speak are refused.
    fn each_version(&self, keys: &Value, test: impl Fn(Pod<'_>)) {
        for version in VERSIONS {
            let pod = self.pod_with(version, keys);
            if self.versions.contains(&version) {
                test(pod);
                continue;
            }
            let error = pod.call("ADD").error();
            assert_eq!(error.brief(), (1, "incompatible CNI versions"), "{version}");
            pod.assert_as(&pod.before, version);
        }
    }

    /// ADD, CHECK, DEL, all that may be absent absent, in every version.
    pub(crate) fn add_check_del_del(&self) {
        self.each_version(&json!({}), |pod| {
            pod.in_rounds();
        });
    }

    /// The same with more keys, and GC, STATUS and the end of the namespace, for a plugin that has
    /// nothing outside the container.
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
        for point in strace::points(&calls).into_iter().filter(worth_trying()) {
            let action = format!("error={}", errno(&point.name));
            let (outcome, fired) = point.run(&pod.node, &pod.call("ADD"), &action);
            let why = format!("{} with {action}: {outcome:?}", point.describe());
            assert!(!outcome.stderr.contains("panicked"), "{why}");
            tried += usize::from(fired);
            match outcome.status {
                Some(0) => pod.call("DEL").ok(),
                Some(1) => {
                    failed += 1;
                    if !point.prints_result() {
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
            for point in strace::points(&calls).into_iter().filter(has_effect) {
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
