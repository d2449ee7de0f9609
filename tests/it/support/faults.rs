//! A failing ADD rolls back everything, at whatever step it fails; after a killed ADD or DEL the
//! next DEL removes everything.
//!
//! strace records a run, which is repeated for each of its system calls, with an injected error of
//! this call ([`no_add_leaves_anything`]) or with SIGKILL before it ([`survives_kill`]). Errors are
//! injected into every call with an effect and every third of the others, from reading stdin to
//! writing the result, but not into the allocator's calls, nor a second time during the rollback.
//! Kills precede each call with an effect: between two such calls the visible state is the same.
//!
//! The bridge exists with another container, so that states can be compared exactly.
//!
//! A call that the kernel restarts (a sysctl written while another process holds the RTNL) counts
//! twice in one run and once in the next. Writes are therefore counted per file, and some points
//! may still not be reached. The names of the calls that must have been hit are asserted at the end
//! ([`Hits`]).
//!
//! strace cannot forge the kernel's error reply to a netlink request, so the sending fails instead.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::support::net::{merged, wire};
use crate::support::node::{
    Call, Container, Node, Outcome, Snapshot, assert_unchanged, set_sysctl,
};
use crate::support::strace::{self, Hits, Syscall};

/// A plausible error of a system call.
pub(crate) fn errno(call: &Syscall) -> &'static str {
    match call.verb() {
        "send" | "setns" | "utimensat" => "EPERM",
        "recv" => "ENOBUFS",
        "open" | "socket" | "epoll_create1" | "eventfd2" | "fcntl" => "EMFILE",
        "write" | "rename" | "mkdir" | "link" | "symlink" => "ENOSPC",
        "flock" => "ENOLCK",
        "unlink" => "EROFS",
        "fork" => "EAGAIN",
        "epoll_wait" => "EINTR",
        "setsockopt" => "ENOPROTOOPT",
        "access" => "EACCES",
        _ => "EIO",
    }
}

/// System calls with externally visible effects ([`Syscall::verb`]).
const EFFECTS: [&str; 11] = [
    "send",
    "write",
    "link",
    "rename",
    "unlink",
    "symlink",
    "utimensat",
    "mkdir",
    "open",
    "fork",
    "ioctl",
];

/// A node with an attached container (the neighbour) and the container under test.
pub(crate) struct Scene {
    pub(crate) node: Node,
    pub(crate) conf: Value,
    pub(crate) plugin: &'static str,
    pub(crate) container: Container,
    _neighbour: Container,
    pub(crate) before: (Snapshot, Snapshot),
    /// What ADD and DEL do beside the work of host-local ([`Hits`]).
    add: &'static [&'static str],
    del: &'static [&'static str],
}

impl Scene {
    pub(crate) fn new(plugin: &'static str, keys: &Value) -> Scene {
        Scene::prepared(plugin, |_| keys.clone(), &json!({}))
    }

    /// `prepare` returns the configuration keys; `neighbours` overrides them for the neighbour.
    pub(crate) fn prepared(
        plugin: &'static str,
        prepare: impl Fn(&Node) -> Value,
        neighbours: &Value,
    ) -> Scene {
        let node = Node::new();
        // Link-local addresses appear asynchronously and would make snapshots differ.
        set_sysctl("net/ipv6/conf/default/addr_gen_mode", "1");
        let ipam = node.host_local(&["10.1.0.0/24", "fd00:1::/64"]);
        let conf = json!({"name": "n", "cniVersion": "1.0.0", "ipam": ipam});
        let conf = merged(&conf, &prepare(&node));
        if conf["master"] == "wire0" {
            wire(&node);
        }
        let (neighbour, container, scratch) = (quick(), quick(), quick());
        let call = node.call(plugin, "ADD").conf(&merged(&conf, neighbours));
        call.netns(&neighbour.path()).id("neighbour").result();
        // ADD and DEL create permanent state first: forwarding sysctls, the store's directory.
        let call = |verb| node.call(plugin, verb).conf(&conf).netns(&scratch.path());
        call("ADD").result();
        call("DEL").ok();
        let before = (node.snapshot(), container.snapshot(&node));
        Scene {
            node,
            conf,
            plugin,
            container,
            _neighbour: neighbour,
            before,
            add: &["RTM_NEWLINK", "RTM_NEWADDR"],
            del: &["RTM_DELLINK"],
        }
    }

    pub(crate) fn that_does(
        self,
        add: &'static [&'static str],
        del: &'static [&'static str],
    ) -> Scene {
        Scene { add, del, ..self }
    }

    fn that_masquerades(self) -> Scene {
        self.that_does(
            &["RTM_NEWLINK", "RTM_NEWADDR", "RTM_NEWROUTE", "NFT_MSG_NEWSETELEM"],
            &["RTM_DELLINK", "NFT_MSG_DELSETELEM"],
        )
    }

    pub(crate) fn bridge() -> Scene {
        let keys = json!({"isDefaultGateway": true, "hairpinMode": true,
                          "ipMasq": true, "ipMasqBackend": "nftables", "macspoofchk": true});
        Scene::new("bridge", &keys).that_masquerades()
    }

    pub(crate) fn ptp() -> Scene {
        let keys = json!({"mtu": 1400, "ipMasq": true, "ipMasqBackend": "nftables"});
        Scene::new("ptp", &keys).that_masquerades()
    }

    pub(crate) fn macvlan() -> Scene {
        Scene::new("macvlan", &json!({"master": "wire0", "mtu": 1400}))
    }

    pub(crate) fn ipvlan() -> Scene {
        Scene::new("ipvlan", &json!({"master": "wire0", "mtu": 1400}))
    }

    pub(crate) fn dummy() -> Scene {
        Scene::new("dummy", &json!({"mtu": 1400}))
    }

    /// The neighbour has another VLAN id, as each VLAN of a master belongs to one container.
    pub(crate) fn vlan() -> Scene {
        let keys = json!({"master": "wire0", "vlanId": 100, "mtu": 1400});
        Scene::prepared("vlan", |_| keys.clone(), &json!({"vlanId": 99}))
    }

    /// The neighbour is in another VLAN, so that ADD creates the VLAN's gateway and DEL deletes it.
    pub(crate) fn bridge_vlan() -> Scene {
        let keys = json!({"isDefaultGateway": true, "vlan": 100});
        Scene::prepared("bridge", |_| keys.clone(), &json!({"vlan": 99}))
    }

    pub(crate) fn call(&self, verb: &str) -> Call {
        let call = self.node.call(self.plugin, verb).conf(&self.conf);
        call.netns(&self.container.path()).env("RUST_BACKTRACE", "0")
    }

    pub(crate) fn assert_as_before(&self, why: &str) {
        let now = (self.node.snapshot(), self.container.snapshot(&self.node));
        if now != self.before {
            eprintln!("{why}");
        }
        assert_unchanged(&self.before.0, &now.0);
        assert_unchanged(&self.before.1, &now.1);
    }

    /// Asserts that the next ADD succeeds with addresses leased to its container.
    pub(crate) fn assert_usable(&self, why: &str) {
        let outcome = self.call("ADD").run();
        assert_eq!(outcome.status, Some(0), "{why}: {outcome:?}");
        let leases = self.node.leases("n");
        assert_eq!(leases.len(), 4, "{why}: {leases:?}");
        let result: Value = serde_json::from_str(&outcome.stdout).unwrap();
        for ip in result["ips"].as_array().unwrap() {
            let ip = ip["address"].as_str().unwrap().split('/').next().unwrap();
            let owner = self.node.path("leases").join("n").join(ip);
            let owner = std::fs::read_to_string(owner).unwrap();
            assert!(owner.starts_with("container-1"), "{why}: {ip} is of {owner}");
        }
        self.call("DEL").ok();
    }
}

/// A container without duplicate address detection: the kernel waits up to one second even if it
/// sends no probes.
pub(crate) fn quick() -> Container {
    let container = Container::new();
    for whose in ["all", "default"] {
        container.set_sysctl(&format!("net/ipv6/conf/{whose}/accept_dad"), "0");
    }
    container
}

pub(crate) fn assert_well_formed_failure(outcome: &Outcome, why: &str) {
    let error: Value = serde_json::from_str(&outcome.stdout)
        .unwrap_or_else(|e| panic!("{why}: no error object: {e}: {outcome:?}"));
    assert!(error["code"].as_u64().is_some_and(|code| code > 0), "{why}: {outcome:?}");
    assert!(error["msg"].as_str().is_some_and(|msg| !msg.is_empty()), "{why}: {outcome:?}");
}

/// Each system call of an ADD fails in turn.
pub(crate) fn no_add_leaves_anything(scene: &Scene) {
    let (outcome, calls) = strace::record(&scene.node, &scene.call("ADD"));
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    scene.call("DEL").ok();
    let mut failed = Hits::default();
    for point in strace::points(&calls).into_iter().filter(worth_trying()) {
        let action = format!("error={}", errno(&point));
        let (outcome, fired) = point.run(&scene.node, &scene.call("ADD"), &action);
        let why = format!("{} with {action}: {outcome:?}", point.describe());
        assert!(!outcome.stderr.contains("panicked"), "{why}");
        match outcome.status {
            Some(0) => scene.call("DEL").ok(),
            Some(1) => {
                assert!(fired, "{why}");
                failed.extend([&point]);
                if !point.prints_result() {
                    assert_well_formed_failure(&outcome, &why);
                }
            }
            _ => panic!("{why}"),
        }
        scene.assert_as_before(&why);
    }
    scene.assert_usable("after all");
    failed.assert_include(&[&["open", "write", "link"], scene.add].concat());
}

fn in_vm() -> bool {
    std::env::var("CNIBOX_LANE").is_ok_and(|lane| lane == "vm")
}

/// Selects all calls with effects, and of the other calls of each name the first and then every
/// third; in the VM only the first.
pub(crate) fn worth_trying() -> impl FnMut(&Syscall) -> bool {
    let mut seen: HashMap<String, usize> = HashMap::new();
    // In the VM each run takes more than one second.
    let step = if in_vm() { usize::MAX } else { 3 };
    move |point| {
        let nth = seen.entry(point.name.clone()).and_modify(|n| *n += 1).or_insert(0);
        EFFECTS.contains(&point.verb()) || nth.is_multiple_of(step)
    }
}

pub(crate) fn has_effect(point: &Syscall) -> bool {
    let verb = point.verb();
    EFFECTS.contains(&verb) && (verb != "open" || point.text.contains("O_CREAT"))
}

/// Whether a call has an externally visible effect, unlike a netlink query, the setup of a socket
/// or a write to stderr.
pub(crate) fn changes(point: &Syscall) -> bool {
    let text = &point.text;
    let asks = point.messages().iter().any(|message| message.contains("_GET"));
    has_effect(point) && !asks && !text.contains("FIONBIO") && !text.starts_with("2<")
}

/// Kills `verb` before each of its effects.
pub(crate) fn survives_kill(scene: &Scene, verb: &str) {
    if verb == "DEL" {
        scene.call("ADD").result();
    }
    let (outcome, calls) = strace::record(&scene.node, &scene.call(verb));
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    scene.call("DEL").ok();
    let mut killed = Hits::default();
    for point in strace::points(&calls).into_iter().filter(has_effect) {
        if verb == "DEL" {
            scene.call("ADD").result();
        }
        let (outcome, fired) = point.run(&scene.node, &scene.call(verb), "signal=KILL");
        let why = format!("{verb} killed at {}: {outcome:?}", point.describe());
        killed.extend(fired.then_some(&point));
        let outcome = scene.call("DEL").run();
        let silent_success = (Some(0), "");
        assert_eq!((outcome.status, outcome.stdout.as_str()), silent_success, "{why}: {outcome:?}");
        scene.assert_as_before(&why);
        scene.assert_usable(&why);
    }
    match verb {
        "ADD" => killed.assert_include(&[&["open", "write", "link", "unlink"], scene.add].concat()),
        _ => killed.assert_include(&[&["open", "write", "unlink"], scene.del].concat()),
    }
}
