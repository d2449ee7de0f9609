//! ADD, CHECK, DEL, GC and STATUS of containers whose policies have names; names that a running
//! container gets and loses.

use std::slice;

use serde_json::json;

use super::super::list;
use super::client::{Way, connect, exchange};
use super::wire::{A, AAAA, Message, NOERROR, Record};
use super::{Inside, PUBLIC, Site, attach_by, names};
use crate::support::conflist::Attached;
use crate::support::net::{GATEWAYS, settles};
use crate::support::node::{Container, Refusal, VERSIONS, assert_unchanged, eventually};
use crate::support::snapshot::without_recorded;

const NOT_RUNNING: &str = "the resolver for names in egress policies does not answer: ";

/// As a host whose packet filter accepts nothing from its containers.
#[test]
fn add_says_that_the_node_drops_questions() {
    for kind in ["bridge", "ptp"] {
        let site = Site::new();
        for verdict in ["drop", "reject"] {
            site.node.sh(&format!(
                "nft add table inet host
                 nft add chain inet host input '{{ type filter hook input priority 0; }}'
                 nft add rule inet host input iif != lo meta l4proto udp {verdict}"
            ));
            let container = Container::new();
            let list = list(&site.node, kind, &names());
            let at = Attached::new("c1", &container.path());
            let failed = list.add(&at).unwrap_err();
            let problem = "this node drops what containers of 10.1.2.0/24 ask its resolver";
            assert!(failed.msg.starts_with(problem), "{kind} {verdict}: {failed:?}");
            let left = site.node.sh("nft list table inet cnibox_egress");
            assert!(!left.contains("c1"), "{kind} {verdict}: {left}");
            list.del(&at, None).unwrap();
            site.node
                .sh("nft insert rule inet host input ip saddr 10.1.2.0/24 udp dport 533 accept");
            let result = list.add(&at).unwrap();
            assert!(!site.has_noted_names(), "the question of ADD is not the container's");
            let doctor = || site.node.cnibox(&["doctor"]).run().stdout;
            assert!(!doctor().contains("name service of egress"), "{}", doctor());
            site.node.sh("nft flush chain inet host input");
            site.node
                .sh(&format!("nft add rule inet host input iif != lo udp dport 533 {verdict}"));
            assert!(doctor().contains(problem), "{kind} {verdict}: {}", doctor());
            list.del(&at, Some(&result)).unwrap();
            site.node.sh("nft delete table inet host");
        }
    }
}

#[test]
fn every_version_attaches_checks_and_detaches() {
    for kind in ["bridge", "ptp"] {
        let site = Site::new();
        for version in VERSIONS {
            let container = Container::new();
            let mut list = list(&site.node, kind, &names());
            list.conf["cniVersion"] = json!(version);
            let at = Attached::new("c1", &container.path());
            let first = list.add(&at).unwrap();
            list.del(&at, Some(&first)).unwrap();
            site.forgets_names();
            let before = site.node.snapshot();
            let result = list.add(&at).unwrap();
            assert_eq!(result["dns"]["nameservers"], json!(GATEWAYS), "{kind} {version}: {result}");
            let inside = Inside { container, at, result };
            inside.wait_for_addresses();
            let check = || {
                if version >= "0.4.0" {
                    list.check(&inside.at, &inside.result).unwrap();
                }
            };
            check();
            // Addresses of both families, a refused name, and one that leads inside.
            inside.finds("api.example.org", &["192.0.2.7"]);
            inside.finds("api.example.org", &["2001:db8:f::7"]);
            inside.finds("a.example.net", &["203.0.113.10"]);
            inside.ask("refused.example.com", A);
            check();
            assert!(inside.reaches("192.0.2.7", 443), "{kind} {version}");
            if version >= "1.1.0" {
                list.gc(slice::from_ref(&inside.at)).unwrap();
                check();
                list.call("STATUS", &inside.at, 1, None).ok();
            }
            assert!(inside.reaches("203.0.113.10", 443), "{kind} {version}");
            let prev = (version > "0.2.0").then_some(&inside.result);
            for _ in 0..2 {
                list.del(&inside.at, prev).unwrap();
                site.forgets_names();
                settles(&before, || site.node.snapshot());
            }
        }
    }
}

#[test]
fn gc_removes_the_addresses_of_ended_containers() {
    let site = Site::new();
    // With equal services the container would keep the sets of the other one.
    let other = json!({"allow": [{"to": ["a.example.net"], "ports": ["tcp/443", "tcp/80"]}]});
    let stays = site.attach("bridge", "c0", Some(&other));
    stays.finds("a.example.net", &["203.0.113.10"]);
    let list = list(&site.node, "bridge", &names());
    let before = site.node.snapshot();
    let ended = site.attach("bridge", "c1", Some(&names()));
    ended.finds("api.example.org", &["192.0.2.7"]);
    ended.ask("refused.example.com", A);
    eventually("the name is noted", || site.has_noted_names());
    drop(ended);
    list.gc(slice::from_ref(&stays.at)).unwrap();
    site.forgets_names();
    settles(&before, || site.node.snapshot());
    assert!(stays.reaches("203.0.113.10", 443));
}

#[test]
fn add_and_status_need_the_resolver() {
    for kind in ["bridge", "ptp"] {
        let mut site = Site::without_resolver();
        let (container, list) = (Container::new(), list(&site.node, kind, &names()));
        let at = Attached::new("c1", &container.path());
        let plain = list.call("ADD", &at, 0, None).result();
        let before = (site.node.snapshot(), container.snapshot(&site.node));
        let is_it = |error: &Refusal, code| {
            assert_eq!(error.code, code, "{error:?}");
            assert!(error.msg.contains(NOT_RUNNING), "{error:?}");
            for command in ["systemctl enable", "cnibox egress resolver"] {
                assert!(error.details.contains(command), "{error:?}");
            }
        };
        let add = list.call("ADD", &at, 1, Some(&plain));
        let status = list.call("STATUS", &at, 1, None);
        for _ in 0..2 {
            is_it(&add.error(), 999);
            is_it(&status.error(), 50);
            assert_unchanged(&before.0, &site.node.snapshot());
            assert_unchanged(&before.1, &container.snapshot(&site.node));
        }
        // A program at its port that is another one.
        let other = super::Upstream::start(&site.node, "127.0.0.1", super::PORT);
        is_it(&add.error(), 999);
        is_it(&status.error(), 50);
        drop(other);
        // Policies without names need none.
        super::list(&site.node, kind, &json!({"profile": "sandbox"}))
            .call("STATUS", &at, 1, None)
            .ok();
        eventually("the port is free", || {
            std::net::UdpSocket::bind(("0.0.0.0", super::PORT)).is_ok()
        });
        site.start_resolver(&[&site.upstream.address.to_string()]);
        let list = super::list(&site.node, kind, &names());
        list.call("STATUS", &at, 1, None).ok();
        let result = list.call("ADD", &at, 1, Some(&plain)).result();
        assert_eq!(result["dns"]["nameservers"], json!(GATEWAYS));
        let inside = Inside { container, at, result };
        inside.finds("api.example.org", &["192.0.2.7"]);
    }
}

#[test]
fn a_bridge_without_a_gateway_has_no_names() {
    let site = Site::new();
    let (container, mut list) = (Container::new(), list(&site.node, "bridge", &names()));
    list.conf["plugins"][0]["isGateway"] = json!(false);
    let at = Attached::new("c1", &container.path());
    let plain = list.call("ADD", &at, 0, None).result();
    let before = site.node.snapshot();
    let error = list.call("ADD", &at, 1, Some(&plain)).error();
    let msg = "names in a policy need a router of the container that is this node";
    assert_eq!(error.brief(), (7, msg));
    assert!(error.details.contains("isGateway"), "{error:?}");
    assert_unchanged(&before, &site.node.snapshot());
}

/// Another container with the policy keeps the sets, in which an address stays for its time.
#[test]
fn an_ended_container_leaves_nothing_to_its_successor() {
    let site = Site::new();
    let stays = site.attach("bridge", "c0", Some(&names()));
    let mut list = list(&site.node, "bridge", &names());
    list.conf["plugins"][0]["runtimeConfig"] = json!({"mac": "02:00:00:00:00:99"});
    let ended = attach_by(&list, "c1");
    for inside in [&stays, &ended] {
        inside.finds("a.example.net", &["203.0.113.10"]);
        assert!(inside.reaches("203.0.113.10", 443));
    }
    list.del(&ended.at, Some(&ended.result)).unwrap();
    drop(ended);
    let next = attach_by(&list, "c2");
    assert!(next.container.sh("ip link show eth0").contains("02:00:00:00:00:99"));
    assert!(!next.reaches("203.0.113.10", 443));
    next.finds("a.example.net", &["203.0.113.10"]);
    assert!(next.reaches("203.0.113.10", 443) && stays.reaches("203.0.113.10", 443));
}

#[test]
fn a_running_container_gets_and_loses_names() {
    for kind in ["bridge", "ptp"] {
        let site = Site::new();
        let closed = json!({"allow": [{"to": ["198.51.100.7"]}]});
        let inside = site.attach(kind, "c1", Some(&closed));
        let public = Way::udp(PUBLIC[0]);
        let question = || Message::question("api.example.org", A);
        assert!(!public.is_answered(&inside.container, &question()), "{kind}");
        site.set(&names());
        let answer = public.ask(&inside.container, &question());
        assert_eq!((answer.rcode(), answer.ips().len()), (NOERROR, 1), "{kind} {answer:?}");
        assert!(inside.reaches("192.0.2.7", 443), "{kind}");
        assert!(!inside.reaches("198.51.100.7", 443), "{kind}: the former policy");
        let checked = list(&site.node, kind, &closed);
        checked.check(&inside.at, &inside.result).unwrap();
        // Other names: what was opened for the former ones is closed.
        site.set(&json!({"allow": [{"to": ["b.example.net"], "ports": ["tcp/443"]}]}));
        assert_eq!(inside.ask("api.example.org", A).rcode(), super::wire::REFUSED, "{kind}");
        assert!(!inside.reaches("192.0.2.7", 443), "{kind}");
        inside.finds("b.example.net", &["203.0.113.11"]);
        assert!(inside.reaches("203.0.113.11", 443), "{kind}");
        checked.check(&inside.at, &inside.result).unwrap();
        site.set(&closed);
        assert!(!inside.is_answered("b.example.net"), "{kind}");
        assert!(!public.is_answered(&inside.container, &question()), "{kind}");
        assert!(!inside.reaches("203.0.113.11", 443), "{kind}");
        assert!(inside.reaches("198.51.100.7", 443), "{kind}");
        checked.check(&inside.at, &inside.result).unwrap();
        // Other tables have what was refused.
        let rules = without_recorded(&site.node.sh("nft list ruleset"));
        assert!(!rules.contains("203.0.113.11") && !rules.contains("192.0.2.7"), "{rules}");
    }
}

/// The resolver looks at the records before the first question, whichever way it comes.
#[test]
fn names_that_are_set_are_answered_over_tcp_at_once() {
    let site = Site::new();
    let closed = json!({"allow": [{"to": ["198.51.100.7"]}]});
    site.attach("bridge", "c0", Some(&names())).finds("a.example.net", &["203.0.113.10"]);
    let inside = site.attach("bridge", "c1", Some(&closed));
    site.set(&names());
    let question = Message::question("api.example.org", A);
    assert_eq!(Way::tcp(GATEWAYS[0]).ask(&inside.container, &question).rcode(), NOERROR);
}

/// A connection to the resolver is that of the present policy, and of nobody without one.
#[test]
fn an_open_connection_gets_the_answers_of_the_present_policy() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    let mut stream = connect(&inside.container, GATEWAYS[0], 53).unwrap();
    let question = Message::question("api.example.org", A).encode();
    let mut code = || {
        let answer = exchange(&mut stream, &question).ok()?;
        Some(Message::decode(&answer).unwrap().rcode())
    };
    assert_eq!(code(), Some(NOERROR));
    site.set(&json!({"allow": [{"to": ["b.example.net"], "ports": ["tcp/443"]}]}));
    assert_eq!(code(), Some(super::wire::REFUSED));
    site.set(&json!({"allow": [{"to": ["198.51.100.7"]}]}));
    site.upstream.asked();
    assert_eq!(code(), None);
    assert!(site.upstream.asked().is_empty());
}

#[test]
fn names_that_are_set_need_the_resolver() {
    let mut site = Site::new();
    let closed = json!({"allow": [{"to": ["198.51.100.7"]}]});
    let inside = site.attach("bridge", "c1", Some(&closed));
    site.kill_resolver();
    let file = site.node.path("policy.json");
    std::fs::write(&file, names().to_string()).unwrap();
    let words = ["set", "--container", "c1", file.to_str().unwrap()];
    let outcome = site.node.tool("egress", &words).run();
    assert_eq!(outcome.status, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains(NOT_RUNNING), "{outcome:?}");
    assert!(inside.reaches("198.51.100.7", 443), "the former policy holds");
}

/// Its questions go where they went, whatever its neighbour has.
#[test]
fn other_containers_are_not_redirected() {
    for kind in ["bridge", "ptp"] {
        let site = Site::new();
        let neighbour = site.attach(kind, "neighbour", None);
        let allowed = json!({"allow": [{"to": ["0.0.0.0/0", "10.9.0.2", "host"]}]});
        let with_policy = site.attach(kind, "wide", Some(&allowed));
        let inside = site.attach(kind, "c1", Some(&names()));
        inside.finds("api.example.org", &["192.0.2.7"]);
        site.upstream.serve(vec![
            Record::address("api.example.org", "10.0.0.1"),
            Record::address("api.example.org", "203.0.113.50"),
        ]);
        site.upstream.asked();
        for other in [&neighbour, &with_policy] {
            for way in [Way::udp("10.9.0.2"), Way::tcp("10.9.0.2")] {
                let answer = way.ask(&other.container, &Message::question("api.example.org", A));
                assert_eq!(answer.ips().len(), 2, "{kind} {way:?}: {answer:?}");
                let asked = site.upstream.asked();
                assert_eq!(asked.len(), 1, "{kind} {way:?}");
                assert_eq!(asked[0].from.ip().to_string(), other.ip(false), "{kind} {way:?}");
            }
            for way in [Way::udp(GATEWAYS[0]), Way::tcp(GATEWAYS[0]), Way::udp(GATEWAYS[1])] {
                let question = Message::question("api.example.org", AAAA);
                assert!(!way.is_answered(&other.container, &question), "{kind} {way:?}");
                let direct = way.at_port(super::PORT);
                assert!(!direct.is_answered(&other.container, &question), "{kind} {way:?}");
            }
        }
        inside.finds("api.example.org", &["203.0.113.50"]);
    }
}
