//! A container that is started again with its id, while another call reclaims what its former self left.

use std::time::Duration;
use std::{fs, thread};

use super::{IP, PORT, World};
use crate::support::node::{Call, Container, eventually};
use crate::support::strace;

/// Runs `call` with a pause before its first system call of this name, and `meanwhile` in the pause.
fn paused(world: &World, call: &Call, name: &str, meanwhile: impl FnOnce()) {
    strace::require();
    let log = world.node.path("race.strace").display().to_string();
    let (trace, inject) = (format!("trace={name}"), format!("inject={name}:delay_enter=2s:when=1"));
    let call = call.clone().under(&["strace", "-f", "-o", &log, "-e", &trace, "-e", &inject]);
    thread::scope(|scope| {
        let run = scope.spawn(|| call.run());
        eventually("it is paused", || fs::metadata(&log).is_ok_and(|log| log.len() > 0));
        thread::sleep(Duration::from_millis(300));
        meanwhile();
        run.join().unwrap();
    });
    assert!(fs::read_to_string(&log).unwrap().contains("(DELAYED)"), "no pause");
}

/// The former self has ended; the new one has a lease, rules and a record, and CHECK succeeds.
fn keeps_all(kind: &str, call: impl Fn(&World) -> Call, pause_at: &str) {
    let world = World::new(kind);
    let former = Container::new();
    world.runtime("add", "same", &former.path()).printed();
    drop(former);
    eventually("its link is gone", || world.node.sh("ip -o link show type veth").lines().count() == 2);
    let again = Container::new();
    paused(&world, &call(&world), pause_at, || {
        world.runtime("del", "same", "").run();
        world.runtime("add", "same", &again.path()).printed();
    });
    let (state, what) = (world.state(), format!("{kind}, {pause_at}"));
    assert!(state.contains(IP) && state.contains(&PORT.to_string()), "{what}: {state}");
    assert_eq!(world.node.leases("net"), [IP], "{what}");
    assert_eq!(world.listed("same").unwrap()["alive"], true, "{what}");
    let records = fs::read_dir("/run/cni/cnibox/attachments").unwrap().count();
    assert_eq!(records, 1, "{what}");
    world.runtime("check", "same", &again.path()).printed();
}

#[test]
fn a_restarted_container_keeps_its_address_and_port() {
    for kind in ["bridge", "masquerading", "ptp", "foreign"] {
        for pause_at in ["flock", "socket"] {
            keeps_all(kind, |world| world.tool(&["gc"]), pause_at);
        }
    }
}
