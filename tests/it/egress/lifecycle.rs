//! ADD, CHECK, DEL, GC and STATUS in every version; faults and kills.

use serde_json::{Value, json};

use super::{OUTSIDE, World, list};
use crate::support::chained::Subject;
use crate::support::conflist::Attached;
use crate::support::net::settles;
use crate::support::node::{Call, Container, Node, VERSIONS};
use crate::support::strace::{self, Hits};

const SUBJECT: Subject = Subject {
    plugin: "egress",
    keys: |_| json!({"allow": [{"to": ["10.9.0.0/24"], "ports": ["tcp/443"]}], "serve": ["tcp/80"]}),
    files: "egress",
    ..Subject::BEHIND_BRIDGE
};

#[test]
fn every_version_attaches_checks_and_detaches() {
    for kind in ["bridge", "ptp"] {
        for version in VERSIONS {
            let (node, container) = (Node::new(), Container::new());
            let keys = json!({"profile": "sandbox", "serve": ["tcp"]});
            let mut list = list(&node, kind, &keys);
            list.conf["cniVersion"] = json!(version);
            let at = Attached::new("c1", &container.path());
            let first = list.add(&at).unwrap();
            list.del(&at, Some(&first)).unwrap();
            let before = node.snapshot();
            let result = list.add(&at).unwrap();
            if version >= "0.4.0" {
                let added = node.snapshot();
                list.check(&at, &result).unwrap();
                settles(&added, || node.snapshot());
            }
            if version >= "1.1.0" {
                list.gc(std::slice::from_ref(&at)).unwrap();
                list.check(&at, &result).unwrap();
                list.call("STATUS", &at, 1, None).ok();
            }
            let prev = (version > "0.2.0").then_some(&result);
            for _ in 0..2 {
                list.del(&at, prev).unwrap();
                settles(&before, || node.snapshot());
            }
            list.add(&at).unwrap();
            let gone = Attached::new("c1", &container.path());
            drop(container);
            list.del(&gone, None).unwrap();
            settles(&before, || node.snapshot());
        }
    }
}

#[test]
fn gc_removes_stale_policies() {
    let (node, container, valid) = (Node::new(), Container::new(), Container::new());
    let list = list(&node, "bridge", &json!({"policy": "allow"}));
    let stays = Attached::new("c0", &valid.path());
    list.add(&stays).unwrap();
    let before = node.snapshot();
    list.add(&Attached::new("c1", &container.path())).unwrap();
    drop(container);
    list.gc(&[stays]).unwrap();
    settles(&before, || node.snapshot());
}

#[test]
fn equal_policies_share_their_chains() {
    let keys = json!({"allow": [{"to": ["10.9.0.0/24"], "ports": ["udp/53"]}]});
    let world = World::new("bridge", &keys);
    let chains = || {
        world
            .node
            .sh("nft list tables; nft list table inet cnibox_egress")
            .matches("chain policy_")
            .count()
    };
    assert_eq!(chains(), 1);
    let others: Vec<_> = (0..3).map(|_| Container::new()).collect();
    let list = list(&world.node, "bridge", &keys);
    for (nth, other) in others.iter().enumerate() {
        list.add(&Attached::new(&format!("other{nth}"), &other.path())).unwrap();
    }
    assert_eq!(chains(), 1);
    list.del(&world.attached(), None).unwrap();
    assert_eq!(chains(), 1);
    for (nth, other) in others.iter().enumerate() {
        list.del(&Attached::new(&format!("other{nth}"), &other.path()), None).unwrap();
    }
    assert_eq!(chains(), 0);
}

#[test]
fn check_finds_what_was_changed() {
    let keys =
        json!({"allow": [{"to": ["10.9.0.0/24"], "ports": ["udp/53"]}, {"to": ["192.0.2.0/24"]}]});
    let world = World::new("bridge", &keys);
    let list = list(&world.node, "bridge", &keys);
    let at = world.attached();
    list.check(&at, &world.result).unwrap();
    let (node, end) = (&world.node, world.end());
    let table = node.sh("nft list table inet cnibox_egress");
    let chain =
        table.split_whitespace().find(|word| word.starts_with("policy_")).unwrap().to_owned();
    let set = |name: &str| format!("{}_{name}", chain.replace("policy", "forward"));
    for (damage, msg) in [
        (
            format!("tc qdisc del dev {end} ingress"),
            format!("the filter of \"{end}\" is missing or was changed"),
        ),
        (
            format!("nft flush chain inet cnibox_egress {chain}"),
            format!(
                "chain inet cnibox_egress {chain} of the egress policy of port \"{end}\" is missing or was changed"
            ),
        ),
        (
            format!("nft flush set inet cnibox_egress {}", set("ranges4")),
            format!(
                "chain inet cnibox_egress {chain} of the egress policy of port \"{end}\" is missing or was changed"
            ),
        ),
        (
            format!("nft add element inet cnibox_egress {} '{{ 203.0.113.0/24 }}'", set("all4")),
            format!(
                "chain inet cnibox_egress {chain} of the egress policy of port \"{end}\" is missing or was changed"
            ),
        ),
        (
            "nft flush map bridge cnibox_egress ports".to_owned(),
            "map bridge cnibox_egress ports was flushed".to_owned(),
        ),
    ] {
        node.sh(&damage);
        assert_eq!(list.check(&at, &world.result).unwrap_err().msg, msg, "{damage}");
        // ADD again puts everything in force.
        list.call("ADD", &at, 1, Some(&world.result)).result();
        list.check(&at, &world.result).unwrap();
    }
}

#[test]
fn check_finds_a_filter_that_judges_first() {
    let keys = json!({"allow": [{"to": ["10.9.0.0/24"], "ports": ["udp/53"]}]});
    let world = World::new("bridge", &keys);
    let (list, at, end) = (list(&world.node, "bridge", &keys), world.attached(), world.end());
    world.node.sh(&format!("tc qdisc del dev {end} ingress && tc qdisc add dev {end} ingress"));
    world.node.sh(&format!(
        "tc filter add dev {end} parent ffff: prio 1 protocol all u32 match u32 0 0 flowid 1:1"
    ));
    let msg = format!("the filter of \"{end}\" is missing or was changed");
    assert_eq!(list.check(&at, &world.result).unwrap_err().msg, msg);
    let error = list.call("ADD", &at, 1, Some(&world.result)).error();
    assert!(error.msg.contains("judges frames of"), "{error:?}");
    world.node.sh("ip link set cnibox-drop up");
    let msg = "the links that drop refused frames were changed: \"cnibox-drop\" is up";
    assert_eq!(list.check(&at, &world.result).unwrap_err().msg, msg);
    let error = list.call("ADD", &at, 1, Some(&world.result)).error();
    assert!(error.msg.contains("judges frames of"), "ADD sets the bridge down: {error:?}");
    world.node.sh("ip link set cnibox-dropped nomaster");
    let msg = "the links that drop refused frames were changed: \"cnibox-dropped\" is not a port of \"cnibox-drop\"";
    assert_eq!(list.check(&at, &world.result).unwrap_err().msg, msg);
}

#[test]
fn a_program_of_another_owner_is_found_and_not_replaced() {
    let world = World::new("bridge", &json!({}));
    let (list, at, end) = (list(&world.node, "bridge", &json!({})), world.attached(), world.end());
    let program = format!(
        "tc filter add dev {end} parent ffff: prio 1 protocol all bpf da bytecode '1,6 0 0 0'"
    );
    world.node.sh(&program);
    let msg = format!("the filter of \"{end}\" is missing or was changed");
    assert_eq!(list.check(&at, &world.result).unwrap_err().msg, msg, "behind it in one priority");
    world.node.sh(&format!(
        "tc qdisc del dev {end} ingress && tc qdisc add dev {end} ingress && {program}"
    ));
    let before = world.node.sh(&format!("tc filter show dev {end} ingress"));
    let error = list.call("ADD", &at, 1, Some(&world.result)).error();
    assert_eq!(error.msg, format!("a filter of the kind bpf judges frames of \"{end}\" first"));
    assert_eq!(world.node.sh(&format!("tc filter show dev {end} ingress")), before);
}

#[test]
fn check_needs_the_pair_of_the_policy() {
    let world = World::new("bridge", &json!({}));
    let list = list(&world.node, "bridge", &json!({}));
    world
        .inside
        .sh("ip link set eth0 down; ip link set eth0 name other; ip link add eth0 type veth");
    let failed = list.call("CHECK", &world.attached(), 1, Some(&world.result)).error();
    assert_eq!(
        failed.msg,
        format!("interface \"eth0\" is no longer connected to port \"{}\"", world.end())
    );
}

#[test]
fn no_failed_add_leaves_anything() {
    SUBJECT.no_add_leaves_anything(&[
        "open",
        "write",
        "NFT_MSG_NEWCHAIN",
        "NFT_MSG_NEWRULE",
        "NFT_MSG_NEWSET",
        "NFT_MSG_NEWSETELEM",
    ]);
}

#[test]
fn add_and_del_survive_kill() {
    SUBJECT.survives_kill(
        &[
            "open",
            "write",
            "rename",
            "NFT_MSG_NEWCHAIN",
            "NFT_MSG_NEWRULE",
            "NFT_MSG_NEWSET",
            "NFT_MSG_NEWSETELEM",
        ],
        &["unlink", "NFT_MSG_DELCHAIN", "NFT_MSG_DELSETELEM"],
    );
}

#[test]
fn a_second_add_with_another_address_leaves_none_of_the_first() {
    let keys = json!({"allow": [{"to": ["192.0.2.0/24"]}]});
    let world = World::new("bridge", &keys);
    let list = list(&world.node, "bridge", &keys);
    let mut moved = world.result.clone();
    moved["ips"][0]["address"] = json!("10.1.2.99/24");
    // Another container has the same policy.
    let container = Container::new();
    let other = Attached::new("c2", &container.path());
    let of_other = list.add(&other).unwrap();
    list.call("ADD", &world.attached(), 1, Some(&moved)).result();
    let rules = world.node.sh("nft list ruleset");
    assert!(
        rules.contains("10.1.2.99") && !rules.contains(&format!(". {} ", world.ip(false))),
        "{rules}"
    );
    list.call("DEL", &world.attached(), 1, Some(&moved)).ok();
    let left = || world.node.sh("nft list ruleset | grep 'id: c1' || :");
    assert_eq!(left(), "");
    // Also if the second ADD is killed, at any of its requests to the kernel.
    let mut killed = Hits::default();
    for when in 1.. {
        list.call("ADD", &world.attached(), 1, Some(&world.result)).result();
        let second = list.call("ADD", &world.attached(), 1, Some(&moved));
        let injection = format!("sendto,sendmsg:signal=KILL:when={when}");
        let (outcome, hit) = strace::inject(&world.node, &second, &injection);
        killed.extend(&hit);
        if when % 2 == 0 {
            strace::inject(&world.node, &second, &injection);
        }
        list.call("DEL", &world.attached(), 1, Some(&moved)).ok();
        assert_eq!(left(), "", "{when}");
        if hit.is_empty() {
            assert_eq!(outcome.status, Some(0), "{when}: {outcome:?}");
            break;
        }
    }
    killed.assert_include(&["NFT_MSG_NEWSETELEM", "RTM_NEWTFILTER"]);
    list.check(&other, &of_other).unwrap();
}

/// Whoever replaces the policy is killed at any request to the kernel: DEL leaves nothing, and
/// `repair` finishes the work.
#[test]
fn a_killed_replacement_is_finished_or_deleted() {
    // The chains of the empty policy have the same name in both tables.
    for keys in [json!({"allow": [{"to": ["192.0.2.0/24"]}]}), json!({})] {
        kill_replacements(&World::new("bridge", &keys), &keys);
    }
}

fn kill_replacements(world: &World, keys: &Value) {
    let (node, at) = (&world.node, world.attached());
    let own = list(node, "bridge", keys);
    let file = node.path("policy.json").display().to_string();
    let other = json!({"allow": [{"to": ["198.51.100.0/24"]}]});
    std::fs::write(&file, other.to_string()).unwrap();
    let left = || node.sh("nft list ruleset | grep -E 'id: c1|policy_' || :");
    let move_to = |address: &str| {
        let mut moved = world.result.clone();
        moved["ips"][0]["address"] = json!(address);
        moved
    };
    own.call("DEL", &at, 1, Some(&world.result)).ok();
    assert_eq!(left(), "");
    let mut killed = Hits::default();
    let mut is_hit = true;
    for when in 1.. {
        if !std::mem::take(&mut is_hit) {
            break;
        }
        let injection = format!("sendto,sendmsg:signal=KILL:when={when}");
        let mut kill = |call: &Call| {
            let (_, hit) = strace::inject(node, call, &injection);
            killed.extend(&hit);
            is_hit |= !hit.is_empty();
        };
        for kind in ["set", "addresses"] {
            own.call("ADD", &at, 1, Some(&world.result)).result();
            match kind {
                "set" => kill(&node.tool("egress", &["set", "--container", "c1", &file])),
                _ => ["10.1.2.98/24", "10.1.2.99/24"].iter().for_each(|address| {
                    kill(&own.call("ADD", &at, 1, Some(&move_to(address))));
                }),
            }
            if when % 4 == 0 {
                assert_eq!(node.cnibox(&["repair"]).run().status, Some(0));
                assert_eq!(
                    node.cnibox(&["repair"]).printed(),
                    "nothing was missing\n",
                    "{kind} {when}"
                );
                // The filter is restored by way of the runtime's cache, which this test does not
                // have.
                let checked = own.check(&at, &world.result).map_err(|error| error.msg);
                let filter = format!("the filter of \"{}\" is missing or was changed", world.end());
                assert!(checked == Ok(()) || checked == Err(filter), "{kind} {when}: {checked:?}");
            }
            own.call("DEL", &at, 1, Some(&world.result)).ok();
            assert_eq!(left(), "", "{kind} {when}");
        }
    }
    killed.assert_include(&["NFT_MSG_NEWSETELEM", "RTM_NEWTFILTER"]);
}

#[test]
fn a_bridge_with_a_policy_keeps_its_mac_address() {
    let (node, container) = (Node::new(), Container::new());
    node.sh("ip link add br0 type bridge; ip addr add 10.1.2.1/24 dev br0; ip link set br0 up");
    node.sh("sysctl -qw net.ipv4.ip_forward=1; ip addr add 2001:db8:1::1/64 dev br0 nodad");
    let list = list(&node, "bridge", &json!({"allow": [{"to": ["192.0.2.0/24"]}]}));
    let at = Attached::new("c1", &container.path());
    let result = list.add(&at).unwrap();
    let mac = || node.ip("link show br0")[0]["address"].clone();
    let before = mac();
    node.sh("ip link add low address 02:00:00:00:00:01 type veth peer name low2; ip link set low master br0");
    assert_eq!(mac(), before);
    list.check(&at, &result).unwrap();
    node.sh("ip link set br0 address 02:00:00:00:00:02");
    let failed = list.call("CHECK", &at, 1, Some(&result)).error();
    assert_eq!(failed.msg, "the MAC address of bridge \"br0\" was changed");
}

#[test]
fn a_failed_second_add_keeps_the_addresses() {
    let keys = json!({"allow": [{"to": ["10.9.0.0/24"]}]});
    let world = World::new("bridge", &keys);
    let before = world.node.snapshot();
    let recorded = || {
        let record: Value =
            serde_json::from_str(&world.node.sh("cat /run/cni/cnibox/attachments/*.json")).unwrap();
        record["rules"]["egress"]["ips"].clone()
    };
    let addresses = recorded();
    let own = list(&world.node, "bridge", &keys);
    let mut moved = world.result.clone();
    moved["ips"][0]["address"] = json!("10.1.2.99/24");
    let mut failed = Hits::default();
    let mut is_hit_at = |when: &str| {
        let add = own.call("ADD", &world.attached(), 1, Some(&moved));
        let injection = format!("sendto,sendmsg:error=ENOBUFS:when={when}");
        let (outcome, hit) = strace::inject(&world.node, &add, &injection);
        if outcome.status == Some(0) {
            own.call("ADD", &world.attached(), 1, Some(&world.result)).result();
        } else {
            failed.extend(&hit);
        }
        assert_eq!(recorded(), addresses, "{when}");
        settles(&before, || world.node.snapshot());
        own.check(&world.attached(), &world.result).unwrap();
        !hit.is_empty()
    };
    // Each request to the kernel fails once; up to the first change also with all that follow.
    let mut when = 1;
    while is_hit_at(&when.to_string()) {
        when += 1;
    }
    for from in 1..=12 {
        assert!(is_hit_at(&format!("{from}+")), "{from}");
    }
    failed.assert_include(&["NFT_MSG_NEWSETELEM", "RTM_NEWTFILTER"]);
    assert!(world.reaches(&world.outside, OUTSIDE[0], 9), "the former address is in force");
}

#[test]
fn many_containers_are_attached_at_once() {
    SUBJECT.attaches_many_at_once();
}
