//! What one container may cost the resolver, the name servers and the node.

use std::collections::HashSet;
use std::time::Duration;

use super::client::{WAIT, client};
use super::upstream::Asked;
use super::wire::{A, Message, Record, SERVFAIL};
use super::{GATEWAYS, Site, names};
use crate::support::node::eventually;

const NAME: &str = "api.example.org";
/// Longer than the resolver needs to ask, and shorter than it waits before it asks again.
const SOON: Duration = Duration::from_millis(1500);

/// With a query for each of them a forger had many numbers and ports to hit. Another container
/// neither waits nor learns by that what was asked for.
#[test]
fn equal_questions_of_one_container_are_asked_once() {
    let site = Site::new();
    let all = ["c0", "c1"].map(|id| site.attach("bridge", id, Some(&names())));
    site.upstream.answer(|_| Vec::new());
    site.upstream.asked();
    for inside in &all {
        let socket = client(&inside.container, GATEWAYS[0]);
        for _ in 0..20 {
            socket.send(&Message::question(NAME, A).encode()).unwrap();
        }
    }
    std::thread::sleep(SOON);
    assert_eq!(site.upstream.asked().len(), all.len());
}

#[test]
fn a_container_has_64_questions_that_are_not_answered() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    site.upstream.answer(|_| Vec::new());
    site.upstream.asked();
    let socket = client(&inside.container, GATEWAYS[0]);
    for nth in 0..200 {
        let question = Message::question(&format!("n{nth}.example.net"), A);
        socket.send(&question.encode()).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(SOON / 2);
    // A slow machine asks some of them again.
    let names: HashSet<String> = site.upstream.asked().iter().map(Asked::name).collect();
    assert_eq!(names.len(), 64);
    site.upstream.serve(super::zone());
    eventually("it is answered again", || inside.is_answered("a.example.net"));
}

#[test]
fn a_question_over_tcp_has_at_most_4096_bytes() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    let mut question = Message::question("refused.example.com", A).encode();
    for (length, is_answered) in [(4096, true), (4097, false), (65535, false)] {
        question.resize(length, 0);
        let answer = super::Way::tcp(GATEWAYS[0]).send(&inside.container, &question, WAIT);
        assert_eq!(answer.is_some(), is_answered, "{length}");
    }
}

/// A container makes the upstream fail, or asks for names of which it knows that they fail.
#[test]
fn the_journal_has_few_lines_of_a_container() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    site.upstream.answer(|asked| vec![asked.message.reply(SERVFAIL, Vec::new()).encode()]);
    let began = std::time::Instant::now();
    for nth in 0..100 {
        let answer = inside.ask(&format!("n{nth}.example.net"), A);
        assert_eq!(answer.rcode(), SERVFAIL, "{answer:?}");
    }
    let most = 21 + usize::try_from(began.elapsed().as_secs()).unwrap();
    let log = std::fs::read_to_string(site.log()).unwrap();
    let lines = log.lines().filter(|line| line.contains("could not resolve")).count();
    assert!((20..=most).contains(&lines) && most < 100, "{lines}, at most {most}");
}

/// 256 addresses are in force; those that vanish first are given up, and come with the next
/// question.
#[test]
fn addresses_that_are_given_up_come_again() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    let name = |nth: u32| format!("n{nth}.example.net");
    let ip = |nth: u32, at: u32| std::net::Ipv4Addr::from(0x1400_0000 + nth * 256 + at).to_string();
    let zone = (0..5).flat_map(|nth| {
        (1..=60)
            .map(move |at| (nth, at))
            .map(|(nth, at)| Record::address(&name(nth), &ip(nth, at)).with_ttl(600 + nth))
    });
    site.upstream.serve(zone.collect::<Vec<_>>());
    let ask = |nth| {
        let way = super::Way::tcp(GATEWAYS[0]);
        assert_eq!(way.ask(&inside.container, &Message::question(&name(nth), A)).ips().len(), 60);
    };
    let in_force = || {
        let key = "[0-9a-f]\\{2\\} . 20[.]0[.][0-9.]* timeout 10m";
        let listed = format!("nft list table inet cnibox_egress | grep -o '{key}' | wc -l");
        site.node.sh(&listed).trim().to_owned()
    };
    ask(0);
    assert!(inside.reaches(&ip(0, 1), 443));
    (1..5).for_each(ask);
    assert!(!inside.reaches(&ip(0, 1), 443), "the first was given up");
    assert_eq!(in_force(), "256");
    ask(0);
    for at in [1, 30, 60] {
        assert!(inside.reaches(&ip(0, at), 443), "{at}: it was given up");
        assert!(inside.reaches(&ip(4, at), 443), "{at}: it was not");
    }
}

/// The time of an address is that of the name that holds longest, whichever was asked for last.
#[test]
fn a_second_name_does_not_shorten_the_time_of_an_address() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    let zone = ["203.0.113.40", "203.0.113.41"].iter().flat_map(|ip| {
        [("a.example.net", 3600), ("b.example.net", 60)]
            .map(|(name, ttl)| Record::address(name, ip).with_ttl(ttl))
    });
    let zone: Vec<_> = zone.collect();
    for (ip, order) in [
        ("203.0.113.40", ["a.example.net", "b.example.net"]),
        ("203.0.113.41", ["b.example.net", "a.example.net"]),
    ] {
        let of_ip = zone.iter().filter(|record| record.ip() == ip.parse().ok());
        site.upstream.serve(of_ip.cloned().collect::<Vec<_>>());
        for name in order {
            inside.finds(name, &[ip]);
        }
        let listed = site.times_of(ip);
        assert!(listed.contains("expires 1h") || listed.contains("expires 59m"), "{listed}");
    }
}

/// The container was told the longer time.
#[test]
fn a_shorter_answer_does_not_shorten_the_time() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    let ips = ["203.0.113.50", "203.0.113.51"];
    let record = |ip, ttl| Record::address("a.example.net", ip).with_ttl(ttl);
    site.upstream.serve([record(ips[0], 3600)]);
    inside.finds("a.example.net", &ips[..1]);
    site.upstream.serve([record(ips[0], 60), record(ips[1], 60)]);
    inside.finds("a.example.net", &ips);
    assert!(
        site.times_of(ips[0]).contains("timeout 1h")
            || site.times_of(ips[0]).contains("expires 59m")
    );
    assert!(site.times_of(ips[1]).contains("timeout 1m"), "{}", site.times_of(ips[1]));
}
