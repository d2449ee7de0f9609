//! The resolver dies, the rules are flushed, addresses vanish: nothing opens, and what is open
//! lives on.

use std::io::ErrorKind;
use std::{fs, thread};

use serde_json::Value;

use super::super::{datagram_arrives, list};
use super::client::{PATIENCE, WAIT, Way, connect, connect_within, exchange, is_alive};
use super::wire::{A, Message, Record};
use super::{Inside, PUBLIC, Site, Upstream, names};
use crate::lane;
use crate::support::conflist::Attached;
use crate::support::node::{Container, eventually};

/// Deletes the elements of the sets of addresses, as their time does.
fn expire(site: &Site) {
    let sets = named_sets(site);
    assert!(!sets.is_empty());
    for (family, name) in sets {
        site.node.sh(&format!("nft flush set {family} cnibox_egress {name}"));
    }
}

/// The families and names of the sets of addresses.
fn named_sets(site: &Site) -> Vec<(String, String)> {
    let listed: Value = serde_json::from_str(&site.node.sh("nft -j list sets")).unwrap();
    let sets = listed["nftables"].as_array().unwrap().iter().map(|entry| &entry["set"]);
    let text = |set: &Value, key: &str| set[key].as_str().unwrap_or_default().to_owned();
    let all = sets.map(|set| (text(set, "family"), text(set, "name")));
    all.filter(|(_, name)| name.contains("_named")).collect()
}

#[test]
fn refused_names_outlive_the_resolver_and_not_the_container() {
    let mut site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    inside.ask("b.example.com", A);
    let refused = |name: &str| (name.to_owned(), "refused".to_owned(), 0);
    eventually("the name is listed", || site.listed_names() == [refused("b.example.com")]);
    site.kill_resolver();
    site.start_resolver(&[&site.upstream.address.to_string()]);
    inside.ask("a.example.com", A);
    let both = [refused("a.example.com"), refused("b.example.com")];
    eventually("both are listed", || site.listed_names() == both);
    // The container ends while no resolver runs.
    site.kill_resolver();
    list(&site.node, "bridge", &names()).del(&inside.at, Some(&inside.result)).unwrap();
    assert!(site.has_noted_names());
    site.start_resolver(&[&site.upstream.address.to_string()]);
    site.forgets_names();
}

/// The resolver writes names each second.
#[test]
fn names_of_an_ended_container_are_not_written() {
    let site = Site::new();
    for _ in 0..3 {
        let inside = site.attach("bridge", "c1", Some(&names()));
        inside.ask("refused.example.com", A);
        list(&site.node, "bridge", &names()).del(&inside.at, Some(&inside.result)).unwrap();
        thread::sleep(std::time::Duration::from_millis(2200));
        assert!(!site.has_noted_names());
    }
}

/// The redirection leads new connections only.
#[test]
fn a_connection_to_another_name_server_ends_with_names() {
    for server in ["10.9.0.2", "10.1.2.1"] {
        let site = Site::new();
        let open = serde_json::json!({"allow": [{"to": [server]}]});
        let inside = site.attach("bridge", "c1", Some(&open));
        let of_node = Upstream::start(&site.node, "10.1.2.1", 53);
        let mut stream = connect(&inside.container, server, 53).unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        let question = Message::question("other.example.org", A).encode();
        assert!(exchange(&mut stream, &question).is_ok(), "{server}");
        site.set(&names());
        site.upstream.asked();
        of_node.asked();
        assert!(exchange(&mut stream, &question).is_err(), "{server}");
        assert!(site.upstream.asked().is_empty() && of_node.asked().is_empty(), "{server}");
    }
}

#[test]
fn connections_outlive_the_resolver_and_their_address() {
    for (kind, name, ip) in [
        ("bridge", "api.example.org", "192.0.2.7"),
        ("ptp", "api.example.org", "192.0.2.7"),
        ("bridge", "api.example.org", "2001:db8:f::7"),
        ("ptp", "api.example.org", "2001:db8:f::7"),
    ] {
        let mut site = Site::new();
        let inside = site.attach(kind, "c1", Some(&names()));
        inside.finds(name, &[ip]);
        let mut open = connect(&inside.container, ip, 443).unwrap();
        assert!(is_alive(&mut open), "{kind} {ip}");
        let listed = site.node.sh("nft list table inet cnibox_egress");
        let is_kept = |line: &str| line.contains(ip) && line.contains("timeout 2h30m");
        assert!(listed.lines().any(is_kept), "{kind} {ip}: {listed}");
        site.kill_resolver();
        assert!(is_alive(&mut open), "{kind} {ip}");
        assert!(inside.reaches(ip, 443), "{kind} {ip}: an address that is in force");
        assert!(!inside.is_answered(name), "{kind}");
        assert!(!Way::udp(PUBLIC[0]).is_answered(&inside.container, &Message::question(name, A)));
        assert!(!inside.reaches("203.0.113.10", 443), "{kind}");
        site.start_resolver(&[&site.upstream.address.to_string()]);
        inside.finds("a.example.net", &["203.0.113.10"]);
        assert!(is_alive(&mut open) && inside.reaches("203.0.113.10", 443), "{kind} {ip}");
        expire(&site);
        assert!(is_alive(&mut open), "{kind} {ip}: a connection lives on");
        for ip in [ip, "203.0.113.10"] {
            assert!(!inside.reaches(ip, 443), "{kind} {ip}: a new connection");
        }
        // The record has the address no longer, and the filter is written again.
        forget_addresses(&site);
        inside.finds("b.example.net", &["203.0.113.11"]);
        assert!(inside.reaches("203.0.113.11", 443), "{kind}");
        assert!(is_alive(&mut open), "{kind} {ip}: a connection lives on after a change");
        assert!(!inside.reaches(ip, 443), "{kind} {ip}");
        assert!(is_alive(&mut open), "{kind} {ip}");
    }
}

/// The time of all addresses in the records is over, as if it had passed.
fn forget_addresses(site: &Site) {
    let mut count = 0;
    let records = site.node.sh("grep -l '\"named\"' -r /run/cni/cnibox || true");
    for path in records.lines() {
        let text = fs::read_to_string(path).unwrap();
        let mut record: Value = serde_json::from_str(&text).unwrap();
        count += end_time(&mut record);
        fs::write(path, record.to_string()).unwrap();
    }
    assert!(count > 0, "{records}");
}

fn end_time(value: &mut Value) -> usize {
    match value {
        Value::Object(members) => members
            .iter_mut()
            .map(|(key, value)| {
                if key == "until" {
                    *value = 1.into();
                    return 1;
                }
                end_time(value)
            })
            .sum(),
        Value::Array(all) => all.iter_mut().map(end_time).sum(),
        _ => 0,
    }
}

/// The container may not connect, and is told at once, where the kernel can tell what the filter
/// refuses.
#[track_caller]
fn is_refused(inside: &Inside, ip: &str, port: u16) {
    is_refused_by(inside, ip, port, lane::REJECT_AT_INGRESS.is_here());
}

#[track_caller]
fn is_refused_by(inside: &Inside, ip: &str, port: u16, is_told: bool) {
    let (told, limit) = if is_told {
        (ErrorKind::ConnectionRefused, PATIENCE)
    } else {
        (ErrorKind::TimedOut, WAIT)
    };
    let outcome = connect_within(limit, &inside.container, ip, port).map_err(|error| error.kind());
    assert_eq!(outcome.map(drop), Err(told), "{ip} {port}");
}

#[test]
fn a_flush_loses_no_address_and_opens_nothing() {
    for kind in ["bridge", "ptp"] {
        let site = Site::new();
        let inside = site.attach(kind, "c1", Some(&names()));
        inside.finds("api.example.org", &["192.0.2.7"]);
        inside.finds("api.example.org", &["2001:db8:f::7"]);
        inside.finds("a.example.net", &["203.0.113.10"]);
        // One for each round.
        let mut fresh = (0..4)
            .map(|nth| (format!("round{nth}.example.net"), format!("203.0.113.{}", 40 + nth)));
        let zone = fresh.clone().map(|(name, ip)| Record::address(&name, &ip));
        site.upstream.serve(zone.chain(super::zone()).collect::<Vec<_>>());
        let opened = ["192.0.2.7", "2001:db8:f::7", "203.0.113.10"];
        let list = list(&site.node, kind, &names());
        let restore_by_add = || {
            let other = Container::new();
            let at = Attached::new("other", &other.path());
            let result = list.add(&at).unwrap();
            list.del(&at, Some(&result)).unwrap();
        };
        let restore_by_repair = || {
            let printed = site.node.cnibox(&["repair"]).printed();
            assert!(printed.contains("restored: "), "{printed}");
        };
        let damages = ["nft flush ruleset", "nft delete table inet cnibox_egress_names"];
        let restorations: [&dyn Fn(); 2] = [&restore_by_repair, &restore_by_add];
        for restore in restorations {
            for damage in damages {
                site.node.sh(damage);
                // Without its rules the host does not tell the container what is refused.
                let closed = [("203.0.113.11", 443), ("2001:db8:f::14", 443), ("192.0.2.7", 80)];
                thread::scope(|scope| {
                    let from = &inside.container;
                    for (ip, port) in closed {
                        scope.spawn(move || {
                            let opened = connect_within(WAIT, from, ip, port);
                            assert!(opened.is_err(), "{kind} {damage}: {ip} {port}");
                        });
                    }
                    assert!(!datagram_arrives(from, &site.outside, "192.0.2.7", 54));
                });
                restore();
                site.upstream.asked();
                for ip in opened {
                    assert!(inside.reaches(ip, 443), "{kind} {damage}: {ip}");
                    is_refused(&inside, ip, 80);
                }
                assert!(site.upstream.asked().is_empty());
                let (name, ip) = fresh.next().unwrap();
                is_refused(&inside, &ip, 443);
                inside.finds(&name, &[&ip]);
                assert!(inside.reaches(&ip, 443), "{kind} {damage}: {ip}");
                list.check(&inside.at, &inside.result).unwrap();
                assert_eq!(site.node.cnibox(&["repair"]).printed(), "nothing was missing\n");
            }
        }
    }
}

/// The filter judges each packet first, so that a mistake of the rules would show nowhere else.
#[test]
fn the_rules_alone_hold_names_to_their_ports() {
    for kind in ["bridge", "ptp"] {
        let site = Site::new();
        let inside = site.attach(kind, "c1", Some(&names()));
        let opened = ["192.0.2.7", "2001:db8:f::7"];
        // Every kernel can tell what the rules refuse.
        let is_refused = |ip, port| is_refused_by(&inside, ip, port, true);
        for ip in opened {
            inside.finds("api.example.org", &[ip]);
        }
        let end = inside.end();
        site.node.sh(&format!("tc qdisc del dev {end} ingress"));
        for ip in opened {
            assert!(inside.reaches(ip, 443), "{kind}: {ip}");
            is_refused(ip, 80);
        }
        is_refused("203.0.113.11", 443);
        is_refused("2001:db8:f::14", 443);
        expire(&site);
        is_refused(opened[0], 443);
    }
}

/// The tables of others are as they were, and questions reach the resolver.
#[test]
fn a_question_restores_the_rules_of_its_container() {
    for kind in ["bridge", "ptp"] {
        let site = Site::new();
        let inside = site.attach(kind, "c1", Some(&names()));
        inside.finds("a.example.net", &["203.0.113.10"]);
        site.node.sh("nft delete table inet cnibox_egress");
        inside.finds("b.example.net", &["203.0.113.11"]);
        for ip in ["203.0.113.10", "203.0.113.11"] {
            assert!(inside.reaches(ip, 443), "{kind}: {ip}");
            is_refused(&inside, ip, 80);
        }
        list(&site.node, kind, &names()).check(&inside.at, &inside.result).unwrap();
    }
}

/// While nothing leads its questions to the resolver, the container may ask whom it wants, but it
/// reaches nobody else.
#[test]
fn after_a_flush_questions_go_to_name_servers_only() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    site.node.sh("nft flush ruleset");
    site.upstream.serve(vec![Record::address("c.example.net", "203.0.113.70")]);
    let question = Message::question("c.example.net", A).encode();
    drop(Way::udp("10.9.0.2").send(&inside.container, &question, WAIT));
    for ip in ["203.0.113.70", "192.0.2.7"] {
        assert!(connect_within(WAIT, &inside.container, ip, 443).is_err(), "{ip}");
    }
    assert!(!datagram_arrives(&inside.container, &site.outside, "192.0.2.7", 5353));
    assert!(!datagram_arrives(&inside.container, &site.node, "10.1.2.1", super::PORT + 1));
}

/// An address that is deleted by hand is missing for CHECK as little as one whose time is over, and
/// the next question brings it back once the resolver has forgotten it.
#[test]
fn the_next_question_opens_again() {
    let mut site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    inside.finds("api.example.org", &["192.0.2.7"]);
    expire(&site);
    list(&site.node, "bridge", &names()).check(&inside.at, &inside.result).unwrap();
    assert!(!inside.reaches("192.0.2.7", 443));
    site.kill_resolver();
    site.start_resolver(&[&site.upstream.address.to_string()]);
    inside.finds("api.example.org", &["192.0.2.7"]);
    assert!(inside.reaches("192.0.2.7", 443));
}

/// The longest wait of the suite: an address vanishes by itself, a minute after an answer with a
/// TTL of 0.
#[test]
#[ignore = "takes long"]
fn an_address_vanishes_after_a_minute() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    site.upstream.serve(vec![Record::address("api.example.org", "192.0.2.7").with_ttl(0)]);
    inside.finds("api.example.org", &["192.0.2.7"]);
    let began = std::time::Instant::now();
    let mut open = connect(&inside.container, "192.0.2.7", 443).unwrap();
    assert!(is_alive(&mut open));
    eventually("it vanishes", || {
        thread::sleep(std::time::Duration::from_secs(5));
        began.elapsed().as_secs() > 55 || !inside.reaches("192.0.2.7", 443)
    });
    assert!(began.elapsed().as_secs() >= 55, "too early");
    thread::sleep(std::time::Duration::from_secs(10));
    assert!(!inside.reaches("192.0.2.7", 443));
    assert!(is_alive(&mut open));
    site.upstream.serve(vec![Record::address("a.example.net", "203.0.113.10")]);
    inside.finds("a.example.net", &["203.0.113.10"]);
    assert!(is_alive(&mut open));
}
