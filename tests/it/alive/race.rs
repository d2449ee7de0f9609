//! A container that is started again with its id, while another call acts on what its former self
//! left.
//!
//! The other call is stopped at each of its system calls in turn, and the runtime deletes and adds
//! the container in the pause. Normally the pauses are a part of those at the calls that matter
//! most, and one in many of the others; with `CNIBOX_LONG` they are all.

use std::cell::RefCell;
use std::env;

use serde_json::{Value, json};

use super::{PORT, World};
use crate::support::node::{Call, Container, eventually};
use crate::support::pause;

/// The pauses of each test, without `CNIBOX_LONG`.
const PAUSES: usize = 20;
/// Of the pauses, one in so many is at another call than the critical ones.
const OTHER: usize = 6;

/// The host port of the container when it is started again: another call may want the first.
const NEXT_PORT: u16 = PORT + 1;

/// What is paused while a container is started again.
struct Race<'w> {
    world: &'w World,
    /// Whether the former container lives when the call begins.
    is_alive: bool,
    /// Makes the call, whose containers it holds.
    call: &'w dyn Fn() -> Call,
    /// Undoes the call.
    clean: &'w dyn Fn(),
}

impl Race<'_> {
    /// The former self of the container is attached, and has ended unless it is to live. Returns
    /// the path of its namespace.
    fn prepare(&self) -> (String, Option<Container>) {
        let former = Container::new();
        let path = former.path();
        self.world.runtime("add", "same", &path).printed();
        if self.is_alive {
            return (path, Some(former));
        }
        let links = || self.world.node.sh("ip -o link show type veth").lines().count();
        let before = links();
        drop(former);
        eventually("its link is gone", || links() < before);
        (path, None)
    }

    /// Pauses the call at its system call `number`. The new container has all it was given.
    fn pause_at(&self, number: usize) -> bool {
        let (world, (former, _lives)) = (self.world, self.prepare());
        let again = Container::new();
        let restart = || {
            world.runtime("del", "same", &former).printed();
            world.runtime_at("add", "same", &again.path(), NEXT_PORT).printed();
        };
        let store = world.node.path("leases/net");
        let run =
            pause::run(&(self.call)(), Some(number), restart, &|| pause::waits_for_lock(&store));
        if run.is_paused {
            let what = format!("paused at {number} of {}: {:?}", run.calls.len(), run.outcome);
            let checked = world.runtime_at("check", "same", &again.path(), NEXT_PORT).run();
            assert_eq!(checked.status, Some(0), "{what}: {checked:?}");
            assert_eq!(world.liveness_of("same"), world.expected_liveness(), "{what}");
            let state = world.state();
            assert!(
                state.contains(&NEXT_PORT.to_string()) && state.contains("id: same"),
                "{what}: {state}"
            );
            assert!(world.node.sh("ls /run/cni/cnibox/attachments").lines().count() > 0, "{what}");
        }
        world.runtime_at("del", "same", &again.path(), NEXT_PORT).printed();
        (self.clean)();
        let (state, leases) = (world.state(), world.node.leases("net"));
        assert!(
            !state.contains("id: same") && leases.is_empty(),
            "pause {number}: {leases:?} {state}"
        );
        run.is_paused
    }

    /// All pauses from the call on that `first` chooses. Tests with another `turn` try others.
    fn pause_everywhere(&self, turn: usize, first: fn(&[i64]) -> usize) {
        let calls = {
            let (former, _lives) = self.prepare();
            let run = pause::run(&(self.call)(), None, || (), &|| false);
            assert_eq!(run.outcome.status, Some(0), "{:?}", run.outcome);
            self.world.runtime("del", "same", &former).printed();
            (self.clean)();
            run.calls
        };
        let first = first(&calls);
        let mut numbers: Vec<usize> = (first..calls.len()).collect();
        if env::var_os("CNIBOX_LONG").is_none() {
            let critical: Vec<usize> =
                pause::critical(&calls).into_iter().filter(|at| *at >= first).collect();
            let step = critical.len().div_ceil(PAUSES);
            let others = numbers.into_iter().filter(|at| !critical.contains(at));
            let every = calls.len() * OTHER / PAUSES;
            let mut chosen: Vec<usize> =
                others.skip(turn * every / 3).step_by(every.max(1)).collect();
            chosen.extend(critical.into_iter().skip(turn % step).step_by(step));
            numbers = chosen;
        }
        let paused = numbers.iter().filter(|number| self.pause_at(**number)).count();
        println!("{paused} pauses in {} system calls", calls.len());
        assert!(paused * 10 >= numbers.len() * 9, "too few: {paused} of {}", numbers.len());
    }
}

/// `cnibox gc` finds a container that has ended.
fn gc_spares_the_restarted(kind: &str, turn: usize) {
    let world = World::with_pool(kind, "10.88.0.0/29");
    let race =
        Race { world: &world, is_alive: false, call: &|| world.tool(&["gc"]), clean: &|| () };
    race.pause_everywhere(turn, |_| 0);
}

#[test]
fn gc_spares_a_restarted_container_of_bridge() {
    gc_spares_the_restarted("bridge", 0);
}

#[test]
fn gc_spares_a_restarted_container_with_masquerading() {
    gc_spares_the_restarted("masquerading", 1);
}

#[test]
fn gc_spares_a_restarted_container_of_ptp() {
    gc_spares_the_restarted("ptp", 2);
}

#[test]
fn gc_spares_a_restarted_container_behind_a_foreign_plugin() {
    gc_spares_the_restarted("foreign", 3);
}

#[test]
fn gc_spares_a_restarted_container_without_leases() {
    gc_spares_the_restarted("static", 4);
}

/// A person has named the container, whose end nothing proves. Before the first look at it, the
/// next self is meant.
#[test]
fn gc_of_a_named_container_spares_its_next_self() {
    let world = World::with_pool("macvlan", "10.88.0.0/29");
    let gc = || world.tool(&["gc", "--network", "net", "--container", "same"]);
    let race = Race { world: &world, is_alive: true, call: &gc, clean: &|| () };
    race.pause_everywhere(5, |calls| pause::first_lock(calls) - 20);
}

/// The ADD of another container wants the host port of one that has ended.
#[test]
fn a_port_is_not_taken_from_a_restarted_container() {
    let world = World::with_pool("masquerading", "10.88.0.0/29");
    let other = RefCell::new((Container::new(), Value::Null));
    let keys = |prev: &Value| {
        let port = json!([{"hostPort": PORT, "containerPort": 80, "protocol": "tcp"}]);
        json!({"runtimeConfig": {"portMappings": port}, "prevResult": prev})
    };
    let on = |index: usize, verb: &str, keys: &Value| {
        let netns = other.borrow().0.path();
        world.plugin(index, verb, keys).id("other").netns(&netns)
    };
    let add = || {
        let prev = on(0, "ADD", &json!({})).result();
        other.borrow_mut().1 = prev;
        on(1, "ADD", &keys(&other.borrow().1))
    };
    let clean = || {
        on(1, "DEL", &keys(&other.borrow().1)).ok();
        on(0, "DEL", &json!({})).ok();
    };
    Race { world: &world, is_alive: false, call: &add, clean: &clean }.pause_everywhere(0, |_| 0);
}

/// The ADD of another container asks for the address of one that has ended.
#[test]
fn an_address_is_not_taken_from_a_restarted_container() {
    let world = World::with_pool("masquerading", "10.88.0.0/29");
    let other = RefCell::new((Container::new(), String::new()));
    let on = |verb: &str| {
        let (container, ip) = &*other.borrow();
        let keys = json!({"runtimeConfig": {"ips": [format!("{ip}/29")]}});
        world.plugin(0, verb, &keys).id("other").netns(&container.path())
    };
    let add = || {
        let [ip] = <[String; 1]>::try_from(world.node.leases("net")).unwrap();
        other.borrow_mut().1 = ip;
        on("ADD")
    };
    Race { world: &world, is_alive: false, call: &add, clean: &|| on("DEL").ok() }
        .pause_everywhere(1, |_| 0);
}

/// A DEL that its runtime no longer waits for. A DEL that has not taken the lock has not begun.
#[test]
fn a_late_del_spares_a_restarted_container() {
    for (index, turn) in [(0, 0), (1, 1)] {
        let world = World::with_pool("masquerading", "10.88.0.0/29");
        let del = || world.plugin(index, "DEL", &json!({})).id("same");
        Race { world: &world, is_alive: true, call: &del, clean: &|| () }
            .pause_everywhere(turn, |calls| pause::first_lock(calls) + 1);
    }
}
