//! Two living attachments with one address: whichever is deleted first, the other one keeps its
//! masquerading.

use std::sync::Barrier;
use std::time::Duration;

use cnibox::testing::attachment::AttachmentRecord;
use cnibox::testing::netfilter::{
    AttachmentId, PacketFilter, RuleBackend, hand_over_to_reference, masquerade,
};
use serde_json::{Value, json};

use super::{BACKENDS, HOST, Masq, OUTSIDE, each_back_end, lines_of, outside, rules, seen};
use crate::support::node::{Container, Node, eventually};

/// The addresses of both attachments.
const SHARED: [&str; 2] = ["10.1.2.2/24", "2001:db8:1::2/64"];

/// Network `net2` on the bridge `br1`, with the subnet of `net` and leases of its own.
fn second<'n>(node: &'n Node, masq: &Masq<'n>) -> Masq<'n> {
    let mut ipam = masq.net.conf["ipam"].clone();
    ipam["dataDir"] = json!(node.path("other-leases"));
    masq.with(&json!({"name": "net2", "bridge": "br1", "ipam": ipam}))
}

#[track_caller]
fn has_shared_addresses(result: &Value) {
    let ips = result["ips"].as_array().unwrap().iter();
    assert_eq!(ips.map(|ip| ip["address"].as_str().unwrap()).collect::<Vec<_>>(), SHARED);
}

#[track_caller]
fn is_masqueraded(container: &Container, outside: &Container) {
    for (target, source) in OUTSIDE.into_iter().zip(HOST) {
        assert_eq!(seen(container, outside, target), source);
    }
}

/// CHECK; the routes of the second bridge are the node's own, and its gateway's address is on both
/// bridges.
fn check(masq: &Masq<'_>, prev: &Value, id: &str, container: &Container) {
    masq.with(&json!({"prevResult": prev})).call("CHECK", id, &container.path()).ok();
}

#[test]
fn del_of_the_second_network_keeps_the_first_masqueraded() {
    each_back_end(|node, masq| {
        let first = masq("bridge");
        let second = second(node, &first);
        let (outside, one, two) = (outside(node), Container::new(), Container::new());
        let prev = first.add("c1", &one);
        let alone = rules(node);
        for with_result in [true, false] {
            let other = second.add("c2", &two);
            has_shared_addresses(&other);
            is_masqueraded(&one, &outside);
            check(&first, &prev, "c1", &one);
            check(&second, &other, "c2", &two);
            let known = if with_result { other } else { Value::Null };
            second.with(&json!({"prevResult": known})).call("DEL", "c2", &two.path()).ok();
            is_masqueraded(&one, &outside);
            check(&first, &prev, "c1", &one);
            assert_eq!(rules(node), alone);
            // The next address would be another one.
            std::fs::remove_dir_all(node.path("other-leases")).unwrap();
        }
        first.del("c1");
        assert_eq!(lines_of(node, "c1"), 0, "{}", rules(node));
    });
}

#[test]
fn del_of_the_first_network_keeps_the_second_masqueraded() {
    for gc in [false, true] {
        each_back_end(|node, masq| {
            let first = masq("bridge");
            let second = second(node, &first);
            let (outside, one, two) = (outside(node), Container::new(), Container::new());
            first.add("c1", &one);
            let other = second.add("c2", &two);
            if gc {
                let none = first.with(&json!({"cni.dev/valid-attachments": []}));
                none.call("GC", "", "").without("CNI_CONTAINERID").ok();
            } else {
                first.del("c1");
            }
            assert_eq!(lines_of(node, "c1"), 0, "{}", rules(node));
            node.sh("ip link del br0");
            is_masqueraded(&two, &outside);
            check(&second, &other, "c2", &two);
            second.del("c2");
            assert_eq!(lines_of(node, "c2"), 0, "{}", rules(node));
        });
    }
}

#[test]
fn a_shared_address_stays_masqueraded_for_its_other_owner() {
    each_back_end(|node, masq| {
        let first = masq("bridge");
        let (outside, one, two) = (outside(node), Container::new(), Container::new());
        let prev = first.add("c1", &one);
        let alone = rules(node);
        // On the same bridge, and with another subnet.
        let fixed = json!({"type": "static", "addresses": [{"address": "10.1.2.2/16"}]});
        let tenant = first.with(&json!({"name": "net2", "isGateway": false, "ipam": fixed}));
        let result = tenant.add("c2", &two);
        tenant.with(&json!({"prevResult": result})).call("CHECK", "c2", &two.path()).ok();
        tenant.del("c2");
        assert_eq!(rules(node), alone);
        node.sh("ip neigh flush all");
        is_masqueraded(&one, &outside);
        check(&first, &prev, "c1", &one);
    });
}

#[test]
fn the_element_of_a_dead_container_is_replaced() {
    let node = Node::new();
    let masq = Masq::new(&node, "bridge", BACKENDS[0]);
    let second = second(&node, &masq);
    node.sh("ip netns add dead");
    masq.call("ADD", "c1", "/run/netns/dead").result();
    node.sh("ip netns del dead");
    let is_deleted = || node.sh("ip -o link show type veth").is_empty();
    eventually("the kernel has deleted the pair", is_deleted);
    let two = Container::new();
    second.add("c2", &two);
    assert_eq!([lines_of(&node, "c1"), lines_of(&node, "c2")], [0, 2], "{}", rules(&node));
}

#[test]
fn handover_makes_a_rule_for_each_owner_of_an_address() {
    let node = Node::new();
    let masq = Masq::new(&node, "bridge", BACKENDS[0]);
    let second = second(&node, &masq);
    let (one, two) = (Container::new(), Container::new());
    masq.add("c1", &one);
    second.add("c2", &two);
    let done = hand_over_to_reference(&PacketFilter::new()).unwrap();
    assert_eq!(done, ["masqueraded addresses: 4 handed over"]);
    assert_eq!([lines_of(&node, "c1"), lines_of(&node, "c2")], [2, 2], "{}", rules(&node));
}

/// The functions instead of processes, so that they meet in the few microseconds between reading
/// and changing.
#[test]
fn concurrent_changes_of_one_address_lose_nothing() {
    const ROUNDS: u64 = 50;
    let node = Node::new();
    let addrs: [ipnet::IpNet; 1] = ["10.1.2.2/24".parse().unwrap()];
    let owners = ["c1", "c2"].map(|id| AttachmentId { network: "net", ifname: "eth0", id });
    let add = |owner: AttachmentId<'_>| {
        let record = AttachmentRecord {
            ips: vec![addrs[0].addr()],
            ..AttachmentRecord::new(owner, "bridge", "")
        };
        record.save_with_addresses().unwrap();
        masquerade::add_addresses(
            &PacketFilter::new(),
            RuleBackend::Nftables,
            owner,
            &addrs,
            &masquerade::MasqueradeOptions::default(),
        )
        .unwrap();
    };
    let del = |owner: AttachmentId<'_>| {
        masquerade::delete_addresses(&PacketFilter::new(), owner, &addrs).unwrap();
        AttachmentRecord::find_by_attachment(owner).unwrap().remove_with_addresses().unwrap();
    };
    let together = |first: &(dyn Fn() + Sync), second: &(dyn Fn() + Sync)| {
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            for act in [first, second] {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    act();
                });
            }
        });
    };
    let [one, two] = owners;
    let elements = || [lines_of(&node, "c1"), lines_of(&node, "c2")];
    for round in 0..ROUNDS {
        add(one);
        together(&|| del(one), &|| add(two));
        assert_eq!(elements(), [0, 1], "round {round}: DEL and ADD");
        add(one);
        // The record of the one is to be deleted while the other is being deleted.
        let later = Duration::from_micros(20 * round);
        let wait_and_del = || {
            std::thread::sleep(later);
            del(one);
        };
        together(&wait_and_del, &|| del(two));
        assert_eq!(elements(), [0, 0], "round {round}: two DELs");
    }
}
