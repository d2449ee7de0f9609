//! The packet filter loses the rules: nothing opens in between, and the rules come back.

use std::time::Duration;

use serde_json::json;

use super::{FAR, OUTSIDE, World, datagram_arrives, list};
use crate::firewall::firewalld::Firewalld;
use crate::support::conflist::Attached;
use crate::support::node::{Container, Running, eventually};
use crate::support::snapshot::without_recorded;

#[test]
fn nothing_opens_after_a_flush_and_the_next_add_restores() {
    for kind in ["bridge", "ptp"] {
        let keys = json!({"allow": [{"to": ["192.0.2.0/24"], "ports": ["udp/53"]}]});
        let world = World::new(kind, &keys);
        world.node.sh("nft flush ruleset");
        assert!(world.reaches(&world.outside, FAR[0], 53), "{kind}: what is allowed passes");
        for (ip, port) in [(FAR[0], 54), (FAR[1], 53), (OUTSIDE[0], 53), (OUTSIDE[1], 53), (FAR[3], 53)] {
            assert!(!world.reaches(&world.outside, ip, port), "{kind}: {ip} {port}");
        }
        assert!(!world.reaches(&world.node, "10.1.2.1", 53), "{kind}: the host");
        assert!(!world.reaches(&world.neighbour, "10.1.2.2", 53), "{kind}: the neighbour");
        let list = list(&world.node, kind, &json!({"policy": "allow"}));
        let other = Container::new();
        list.add(&Attached::new("other", &other.path())).unwrap();
        let own = super::list(&world.node, kind, &keys);
        own.check(&world.attached(), &world.result).unwrap();
        // Without its rules the table keeps its sets, chains and elements.
        for table in world.node.sh("nft list tables | grep egress").lines() {
            world.node.sh(&format!("nft flush {table}"));
        }
        list.add(&Attached::new("third", &Container::new().path())).unwrap();
        own.check(&world.attached(), &world.result).unwrap();
        assert!(world.reaches(&world.outside, FAR[0], 53) && !world.reaches(&world.outside, FAR[0], 54), "{kind}");
    }
}

#[test]
fn repair_restores_policies_and_filters() {
    let keys = json!({"profile": "sandbox"});
    let world = World::new("bridge", &keys);
    let list = list(&world.node, "bridge", &keys);
    // The chains of this one have the same name in both tables.
    let empty = super::list(&world.node, "bridge", &json!({}));
    let (second, third) = (Container::new(), Container::new());
    let closed = Attached::new("closed", &second.path());
    let of_closed = empty.add(&closed).unwrap();
    let rules = || {
        let text = without_recorded(&world.node.sh("nft -s list ruleset"));
        let mut lines: Vec<_> =
            text.lines().map(|line| line.trim().trim_start_matches("elements = { ").to_owned()).collect();
        lines.sort();
        lines
    };
    let before = rules();
    for damage in [
        "nft flush ruleset",
        "nft flush map inet cnibox_egress ports",
        "nft delete table bridge cnibox_egress",
        "nft flush table bridge cnibox_egress",
        "nft flush table inet cnibox_egress; nft flush table bridge cnibox_egress",
    ] {
        world.node.sh(damage);
        list.add(&Attached::new("third", &third.path())).unwrap();
        list.check(&world.attached(), &world.result).unwrap();
        empty.check(&closed, &of_closed).unwrap();
        list.del(&Attached::new("third", &third.path()), None).unwrap();
        world.node.sh(damage);
        let outcome = world.node.cnibox(&["repair"]).run();
        assert!(outcome.status == Some(0) && outcome.stdout.contains("restored: "), "{outcome:?}");
        list.check(&world.attached(), &world.result).unwrap();
        empty.check(&closed, &of_closed).unwrap();
        assert!(rules() == before, "{damage}:\n{}", world.node.sh("nft list ruleset"));
        assert_eq!(world.node.cnibox(&["repair"]).printed(), "nothing was missing\n");
    }
}

#[test]
fn watch_restores_within_a_second() {
    let keys = json!({"profile": "sandbox"});
    let world = World::new("bridge", &keys);
    let list = list(&world.node, "bridge", &keys);
    let _watch = Running::start(&world.node.cnibox(&["repair", "--watch"]));
    std::thread::sleep(Duration::from_millis(300));
    world.node.sh("nft flush ruleset");
    eventually("the policy is not restored", || list.check(&world.attached(), &world.result).is_ok());
}

#[test]
fn a_start_and_a_reload_of_firewalld_open_nothing() {
    let keys = json!({"allow": [{"to": ["192.0.2.0/24"]}]});
    let world = World::new("bridge", &keys);
    let list = list(&world.node, "bridge", &keys);
    let Some(mut firewalld) = Firewalld::start(&world.node) else { return };
    if !firewalld.serve_itself() {
        return;
    }
    let judged = || {
        list.check(&world.attached(), &world.result).unwrap();
        assert!(world.reaches(&world.outside, FAR[0], 9));
        assert!(!world.reaches(&world.outside, FAR[1], 9) && !world.reaches(&world.neighbour, "10.1.2.2", 9));
    };
    firewalld.trust_all_interfaces();
    judged();
    firewalld.reload();
    judged();
}

#[test]
fn the_filter_stays_when_the_device_of_bandwidth_is_deleted() {
    let keys = json!({"allow": [{"to": ["192.0.2.0/24"]}]});
    let (world, container) = (World::new("bridge", &keys), Container::new());
    let mut list = list(&world.node, "bridge", &keys);
    let shaping = json!({"type": "bandwidth", "egressRate": 80_000_000, "egressBurst": 8_000_000});
    list.conf["plugins"].as_array_mut().unwrap().insert(1, shaping);
    let at = Attached::new("shaped", &container.path());
    let result = list.add(&at).unwrap();
    list.check(&at, &result).unwrap();
    for plugin in [2, 1] {
        list.call("DEL", &at, plugin, Some(&result)).ok();
    }
    assert!(datagram_arrives(&container, &world.outside, FAR[0], 9));
    assert!(!datagram_arrives(&container, &world.outside, FAR[1], 9));
    list.del(&at, Some(&result)).unwrap();
}

#[test]
fn the_filter_stays_until_the_pair_is_deleted() {
    let keys = json!({"allow": [{"to": ["192.0.2.0/24"]}]});
    let world = World::new("bridge", &keys);
    let list = list(&world.node, "bridge", &keys);
    // DEL of egress alone: the container may still run.
    list.call("DEL", &world.attached(), 1, Some(&world.result)).ok();
    assert!(!world.node.sh("nft list ruleset").contains("policy_"));
    assert!(world.reaches(&world.outside, FAR[0], 9) && !world.reaches(&world.outside, FAR[1], 9));
    list.call("DEL", &world.attached(), 0, Some(&world.result)).ok();
}
