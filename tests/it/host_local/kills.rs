//! SIGKILL at any moment of ADD, DEL, GC and reclaiming: the next call can read the store, no
//! address has two owners, and none is lost.
//!
//! strace kills before each system call with an effect (with `CNIBOX_LONG=<rounds>`, before every
//! call), or a signal kills after a random time. At the end the small pool is allocated to the last
//! address, which reveals lost addresses.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{net, reclaim};
use crate::support::net::{Net, merged};
use crate::support::node::{Call, Node, eventually};
use crate::support::strace::{self, Hits, Syscall};

/// 13 allocatable addresses, without the gateway's; no other test assigns them to an interface.
const POOL: (&str, usize) = ("198.51.100.128/28", 13);
/// Large enough for addresses that `reuseDelay` withholds.
const LARGE_POOL: (&str, usize) = ("198.18.0.0/23", 509);

/// System calls with externally visible effects ([`Syscall::verb`]).
const EFFECTS: [&str; 8] =
    ["write", "link", "rename", "unlink", "utimensat", "mkdir", "open", "flock"];

fn rounds() -> Option<usize> {
    std::env::var("CNIBOX_LONG").ok().map(|text| text.parse().unwrap())
}

struct Scene<'n> {
    net: Net<'n>,
    size: usize,
    /// The containers with permanent leases.
    residents: Vec<&'static str>,
}

impl<'n> Scene<'n> {
    fn new(node: &'n Node, pool: (&str, usize), keys: &Value) -> Scene<'n> {
        let ipam = merged(&json!({"ranges": [[{"subnet": pool.0}]]}), keys);
        let (net, residents) = (net(node, "1.1.0", &ipam), vec!["r1", "r2", "r3"]);
        let scene = Scene { net, size: pool.1, residents };
        for id in &scene.residents {
            scene.call("ADD", id).result();
        }
        scene
    }

    fn call(&self, verb: &str, id: &str) -> Call {
        self.net.call(verb, id).netns("/no/such")
    }

    fn gc(&self) -> Call {
        let listed = |id: &&str| json!({"containerID": id, "ifname": "eth0"});
        let valid: Vec<_> = self.residents.iter().map(listed).collect();
        self.net.with(&json!({"cni.dev/valid-attachments": valid})).call("GC", "")
    }

    /// Asserts that every lease has one owner, every resident one lease, and that `others` more
    /// leases exist.
    #[track_caller]
    fn assert_sound(&self, others: usize, why: &str) {
        let leases = self.net.leases();
        assert_eq!(leases.len(), self.residents.len() + others, "{why}: {leases:?}");
        let mut owners = BTreeSet::new();
        for ip in &leases {
            let text = fs::read_to_string(self.net.node.path("leases/net").join(ip)).unwrap();
            assert!(text.ends_with("\r\neth0"), "{why}: {ip} holds {text:?}");
            assert!(owners.insert(text.clone()), "{why}: {text:?} has two addresses");
        }
        for id in &self.residents {
            assert!(owners.contains(&format!("{id}\r\neth0")), "{why}: {id} lost its address");
        }
    }

    /// Asserts that DEL, ADD and CHECK of the victim succeed after a killed call.
    #[track_caller]
    fn assert_recovers(&self, why: &str) {
        let before = self.net.leases().len();
        assert!(before == 3 || before == 4, "{why}: {before}");
        let outcome = self.call("DEL", "victim").run();
        assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(0), ""), "{why}: {outcome:?}");
        self.assert_sound(0, why);
        let result = self.call("ADD", "victim").run();
        assert_eq!(result.status, Some(0), "{why}: {result:?}");
        self.assert_sound(1, why);
        self.call("CHECK", "victim").ok();
    }

    /// Asserts that every address of the pool can be allocated, each to another container.
    #[track_caller]
    fn assert_nothing_is_lost(&self) {
        self.call("DEL", "victim").ok();
        let ids: Vec<_> = (self.residents.len()..self.size).map(|n| format!("last-{n}")).collect();
        let add = |id: &String| self.call("ADD", id).run().status == Some(0);
        // An address that `reuseDelay` withholds is available after one second.
        for id in &ids {
            eventually("an address is lost", || add(id));
        }
        assert_eq!(self.net.leases().len(), self.size);
        assert!(!add(&"one-more".to_owned()));
        let residents = self.residents.iter().map(ToString::to_string);
        residents.chain(ids).for_each(|id| self.call("DEL", &id).ok());
        assert_eq!(self.net.leases(), [""; 0]);
    }

    /// Creates the initial state for `verb`: the victim's lease for DEL and GC, no lease for ADD.
    fn prepare(&self, verb: &str) {
        self.call("DEL", "victim").ok();
        if verb != "ADD" {
            self.call("ADD", "victim").result();
        }
    }

    fn victim(&self, verb: &str) -> Call {
        if verb == "GC" { self.gc() } else { self.call(verb, "victim") }
    }
}

fn has_effect(point: &Syscall) -> bool {
    EFFECTS.contains(&point.verb())
}

fn at_every_call(pool: (&str, usize), keys: &Value) {
    let node = Node::new();
    let scene = Scene::new(&node, pool, keys);
    let soak = rounds();
    for round in 0..soak.unwrap_or(1) {
        for verb in ["ADD", "DEL", "GC"] {
            let mut killed = Hits::default();
            scene.prepare(verb);
            if round % 2 == 1 {
                // After a change by the reference the call has to write the journal first.
                fs::write(node.path("leases/net/theirs"), "").unwrap();
            }
            let (outcome, calls) = strace::record(&node, &scene.victim(verb));
            assert_eq!(outcome.status, Some(0), "{outcome:?}");
            let points = strace::points(&calls).into_iter();
            for point in points.filter(|point| soak.is_some() || has_effect(point)) {
                scene.prepare(verb);
                if round % 2 == 1 {
                    fs::remove_file(node.path("leases/net/theirs")).ok();
                    fs::write(node.path("leases/net/theirs"), "").unwrap();
                }
                let (outcome, fired) = point.run(&node, &scene.victim(verb), "signal=KILL");
                killed.extend(fired.then_some(&point));
                scene.assert_recovers(&format!(
                    "{verb} killed at {}: {outcome:?}",
                    point.describe()
                ));
            }
            killed.assert_include(match verb {
                "ADD" => &["open", "flock", "write", "link", "unlink"],
                _ => &["open", "flock", "write", "unlink"],
            });
        }
    }
    scene.assert_nothing_is_lost();
}

#[test]
fn the_store_survives_kills_at_any_system_call() {
    at_every_call(POOL, &json!({}));
}

#[test]
fn the_store_survives_kills_after_delayed_system_calls() {
    at_every_call(LARGE_POOL, &json!({"reuseDelay": 1}));
}

#[test]
fn the_store_survives_kills_at_random_times() {
    let node = Node::new();
    let scene = Scene::new(&node, POOL, &json!({}));
    let count = rounds().map_or(600, |rounds| rounds * 1000);
    let mut random = 7_u64;
    let mut killed = BTreeSet::new();
    for cycle in 0..count {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let verb = ["ADD", "DEL", "GC"][cycle % 3];
        let patience = Duration::from_micros((random >> 33) % 2_500);
        let call = scene.victim(verb);
        let mut child = call.spawn().unwrap();
        let start = Instant::now();
        while start.elapsed() < patience {
            std::hint::spin_loop();
        }
        if child.try_wait().unwrap().is_none() {
            killed.insert(verb);
        }
        child.kill().ok();
        child.wait().unwrap();
        let leases = scene.net.leases().len();
        assert!((3..=4).contains(&leases), "{verb} killed after {patience:?}: {leases} leases");
        if cycle % 20 == 19 {
            scene.assert_recovers(&format!("cycle {cycle}"));
        }
    }
    scene.assert_nothing_is_lost();
    assert_eq!(killed, BTreeSet::from(["ADD", "DEL", "GC"]));
}

#[test]
fn reclaiming_is_completed_after_a_kill() {
    if !reclaim::has_machine_id("a kill while leases are reclaimed") {
        return;
    }
    let node = Node::new();
    let ipam = json!({"ranges": [[{"subnet": "198.51.100.192/30"}]]});
    let net = net(&node, "1.1.0", &ipam);
    let add = |id: &str| net.call("ADD", id).netns("/no/such");
    let dead = |id: &str| {
        add(id).result();
        reclaim::age(&net);
    };
    dead("dead");
    let (outcome, calls) = strace::record(&node, &add("next"));
    assert!(outcome.stderr.contains("reclaimed 198.51.100.194"), "{outcome:?}");
    let store = node.path("leases").display().to_string();
    let touches = |point: &Syscall| has_effect(point) && point.text.contains(&store);
    let mut killed = Hits::default();
    for point in strace::points(&calls).into_iter().filter(touches) {
        net.call("DEL", "next").netns("").ok();
        dead("dead");
        let (outcome, fired) = point.run(&node, &add("next"), "signal=KILL");
        let why = format!("{}: {outcome:?}", point.describe());
        killed.extend(fired.then_some(&point));
        net.call("DEL", "next").netns("").ok();
        let outcome = add("next").run();
        assert_eq!(outcome.status, Some(0), "{why}, then {outcome:?}");
        assert_eq!(net.leases(), ["198.51.100.194"], "{why}");
    }
    killed.assert_include(&["open", "flock", "link", "write", "unlink"]);
}
