//! Where names may lead.

use std::net::Ipv4Addr;

use super::*;
use crate::netlink::MacAddress;
use crate::netns::isolate_test_thread;

fn policy(json: &str) -> EgressPolicy {
    serde_json::from_str(json).unwrap()
}

/// A container at 10.1.0.2 whose router is the host, with these policies.
fn port(policies: &[&str]) -> EgressPart {
    EgressPart {
        end: "veth0".to_owned(),
        mac: MacAddress([2, 0, 0, 0, 0, 1]),
        arrives_at: vec!["veth0".to_owned()],
        ips: vec!["10.1.0.2".parse().unwrap()],
        on_link: vec!["10.1.0.0/24".parse().unwrap()],
        routers: vec!["10.1.0.1".parse().unwrap()],
        host: vec!["10.1.0.1".parse().unwrap(), "203.0.113.9".parse().unwrap()],
        policies: policies.iter().map(|json| policy(json)).collect(),
        ..EgressPart::default()
    }
}

const ONE: &str =
    r#"{"allow": [{"to": ["api.example.org", "*.example.net"], "ports": ["tcp/443"]}]}"#;

fn services(names: &NamePolicies, name: &str, addr: &str) -> Option<Vec<ServiceRange>> {
    services_at(&names.policies, name, addr.parse().unwrap())
}

#[test]
fn all_policies_of_a_container_decide_about_a_name() {
    let https = vec![ServiceRange::of_port(6, 443)];
    let web = r#"{"allow": [{"to": ["internet"], "ports": ["tcp/80", "tcp/443"]}]}"#;
    let other = r#"{"allow": [{"to": ["*.example.org"], "ports": ["tcp"]}]}"#;
    let sandbox = r#"{"profile": "sandbox"}"#;
    let nothing = "{}";
    for (policies, is_answered, expected) in [
        (&[ONE][..], true, Some(https.clone())),
        (&[ONE, sandbox], true, Some(https.clone())),
        // A policy without names has to allow the question, too.
        (&[ONE, web], false, Some(https.clone())),
        (&[ONE, other], true, Some(https.clone())),
        (&[ONE, nothing], false, Some(Vec::new())),
        (&[sandbox], true, None),
        (&[other, other], true, Some(vec![ServiceRange::of_protocol(6)])),
    ] {
        let names = NamePolicies::new(&port(policies)).unwrap();
        assert_eq!(names.answers("api.example.org"), is_answered, "{policies:?}");
        assert_eq!(services(&names, "api.example.org", "198.51.100.7"), expected, "{policies:?}");
        assert_eq!(services(&names, "example.com", "198.51.100.7"), None, "{policies:?}");
        let lists = &names.compiled.service_lists;
        let has_list = |list: &Vec<ServiceRange>| list.is_empty() || lists.contains(list);
        assert!(expected.as_ref().is_none_or(has_list), "{policies:?}: {lists:?}");
    }
}

#[test]
fn dns_in_a_policy_with_names_answers_other_names() {
    let both = r#"{"allow": [{"to": ["api.example.org"]}, {"to": ["dns"]}]}"#;
    let names = NamePolicies::new(&port(&[both])).unwrap();
    assert!(names.answers("example.com"));
    assert!(!NamePolicies::new(&port(&[ONE])).unwrap().answers("example.com"));
}

#[test]
fn a_name_leads_nowhere_special() {
    isolate_test_thread();
    let host = Netlink::open().unwrap();
    let own = r#"{"allow": [{"to": ["api.example.org"]}, {"to": ["10.20.0.7"]},
        {"to": ["203.0.113.9"], "ports": ["tcp/22"]}], "deny": [{"to": ["198.51.100.66"]}]}"#;
    let names = NamePolicies::new(&port(&[own])).unwrap();
    for (addr, expected) in [
        ("198.51.100.7", AddressUse::Named),
        ("2001:db8::7", AddressUse::Named),
        ("198.51.100.66", AddressUse::Refused),
        ("10.20.0.8", AddressUse::Refused),
        // The policy has the address itself.
        ("10.20.0.7", AddressUse::Told),
        ("203.0.113.9", AddressUse::Told),
        ("10.1.0.1", AddressUse::Refused),
        ("10.1.0.3", AddressUse::Refused),
        ("169.254.169.254", AddressUse::Refused),
        ("127.0.0.1", AddressUse::Refused),
        ("0.0.0.0", AddressUse::Refused),
        ("::1", AddressUse::Refused),
        ("::ffff:198.51.100.7", AddressUse::Refused),
        ("fd00::1", AddressUse::Refused),
        ("64:ff9b::a00:1", AddressUse::Refused),
    ] {
        let found = names.judge_address(&host, "api.example.org", addr.parse().unwrap()).unwrap();
        assert_eq!(found, expected, "{addr}");
    }
    let other = names.judge_address(&host, "example.com", "10.1.0.3".parse().unwrap()).unwrap();
    assert_eq!(other, AddressUse::Told, "opens nothing");
}

#[test]
fn the_host_is_told_if_the_policy_has_it() {
    isolate_test_thread();
    let host = Netlink::open().unwrap();
    let own = r#"{"allow": [{"to": ["api.example.org"]}, {"to": ["host"], "ports": ["tcp/22"]}]}"#;
    for (policy, expected) in [(own, AddressUse::Told), (ONE, AddressUse::Refused)] {
        let names = NamePolicies::new(&port(&[policy])).unwrap();
        for addr in ["10.1.0.1", "203.0.113.9"] {
            let addr = addr.parse().unwrap();
            let found = names.judge_address(&host, "api.example.org", addr).unwrap();
            assert_eq!(found, expected, "{addr}");
        }
    }
}

/// Also where they are public, and routes of the host say nothing about them.
#[test]
fn a_name_does_not_lead_into_the_networks_of_the_container() {
    isolate_test_thread();
    let host = Netlink::open().unwrap();
    let on_link = ["192.0.2.0/24", "2001:db8:1::/64"].map(|net| net.parse().unwrap());
    let port = EgressPart { on_link: on_link.to_vec(), ..port(&[ONE]) };
    let names = NamePolicies::new(&port).unwrap();
    for (addr, expected) in [
        ("192.0.2.77", AddressUse::Refused),
        ("192.0.3.77", AddressUse::Named),
        ("2001:db8:1::77", AddressUse::Refused),
        ("2001:db8:2::77", AddressUse::Named),
    ] {
        let found = names.judge_address(&host, "api.example.org", addr.parse().unwrap()).unwrap();
        assert_eq!(found, expected, "{addr}");
    }
}

#[test]
fn the_time_of_an_address_is_that_of_the_name() {
    let names = NamePolicies::new(&port(&[ONE])).unwrap();
    let ip = "198.51.100.7".parse().unwrap();
    let remaining = || names.remaining_time("api.example.org", ip);
    assert_eq!(remaining(), 0);
    let recorded = [NamedAddress::with_ttl("api.example.org", ip, 300)];
    names.note_addresses(&recorded, &recorded);
    assert!((299..=300).contains(&remaining()));
    assert_eq!(names.remaining_time("a.example.net", ip), 0);
    // The record has given it up.
    names.note_addresses(&[], &[]);
    assert_eq!(remaining(), 0);
}

#[test]
fn the_filter_has_the_addresses_of_the_record() {
    let mut port = port(&[ONE]);
    let compiled = port.compile().unwrap();
    let before = port.guard_filter(&compiled).unwrap();
    let named = ["198.51.100.7", "10.1.0.1", "169.254.169.254"];
    let named = named.map(|ip| NamedAddress::with_ttl("api.example.org", ip.parse().unwrap(), 60));
    port.add_named(&named[1..]);
    assert_eq!(port.guard_filter(&compiled).unwrap(), before, "special addresses open nothing");
    port.add_named(&named);
    let with_name = port.guard_filter(&compiled).unwrap();
    assert_ne!(with_name, before);
    let static_policy = r#"{"allow": [{"to": ["198.51.100.7"], "ports": ["tcp/443"]},
        {"to": ["api.example.org"], "ports": ["tcp/443"]}]}"#;
    let same = EgressPart { policies: vec![policy(static_policy)], named: Vec::new(), ..port };
    assert_eq!(same.guard_filter(&same.compile().unwrap()).unwrap(), with_name);
}

#[test]
fn the_addresses_that_vanish_first_are_given_up() {
    let mut port = port(&[ONE]);
    let address = |at: u32, ttl| {
        let ip = IpAddr::V4(Ipv4Addr::from_bits(0xc633_6400 + at));
        NamedAddress::with_ttl("api.example.org", ip, ttl)
    };
    let first: Vec<NamedAddress> = (0..200).map(|at| address(at, 60 + at)).collect();
    port.add_named(&first);
    port.add_named(&(200..300).map(|at| address(at, 3600)).collect::<Vec<_>>());
    assert_eq!(port.named.len(), MOST_ADDRESSES);
    assert_eq!(port.named[0].ip, first[44].ip);
    // Again with another time, and with an address that has vanished.
    port.named[0].until = 0;
    port.add_named(&[address(299, 60)]);
    // It is forgotten once no connection can be open any more: not soon after the start of the system.
    let is_forgotten = boot_seconds() >= LINGERING;
    assert_eq!(port.named.len(), MOST_ADDRESSES - usize::from(is_forgotten));
    // What is added stays, however soon it vanishes.
    port.add_named(&[address(999, 0)]);
    assert_eq!(port.named.last().map(|named| named.ip), Some(address(999, 0).ip));
    let remaining = |port: &EgressPart| {
        port.named.iter().find(|named| named.ip == address(299, 0).ip).unwrap().remaining()
    };
    assert!((59..=60).contains(&remaining(&port)));
}

#[test]
fn times_are_between_a_minute_and_an_hour() {
    for (ttl, expected) in [(0, 60), (1, 60), (300, 300), (86400, 3600), (u32::MAX, 3600)] {
        let ip = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 7));
        let address = NamedAddress::with_ttl("a.example", ip, ttl);
        let remaining = address.remaining();
        assert!((expected - 1..=expected).contains(&remaining), "{ttl}: {remaining}");
        assert!(address.until <= boot_seconds() + u64::from(expected), "{ttl}: {address:?}");
    }
}

#[test]
fn equal_lists_of_ports_have_one_set() {
    let many: Vec<String> = (1..=17)
        .map(|port| format!(r#"{{"to": ["n{port}.example"], "ports": ["tcp/{port}"]}}"#))
        .collect();
    let error = port(&[&format!(r#"{{"allow": [{}]}}"#, many.join(","))]).compile().unwrap_err();
    assert_eq!(error.message(), "the names of the egress policy have 17 lists of ports");
    let equal = r#"{"allow": [{"to": ["a.example", "b.example"], "ports": ["tcp/1", "tcp/2"]},
        {"to": ["c.example"], "ports": ["tcp/1-2"]}, {"to": ["a.example"], "ports": ["tcp/2"]}]}"#;
    assert_eq!(port(&[equal]).compile().unwrap().service_lists.len(), 1);
}

#[test]
fn domains_of_search_lists_are_told_from_other_names() {
    let names = NamePolicies::new(&port(&[ONE])).unwrap();
    for (name, expected) in [
        ("api.example.org.default.svc.cluster.local", true),
        ("a.example.net.corp", true),
        ("api.example.org", false),
        ("example.net.corp", false),
        ("evil.org", false),
        ("xapi.example.org.corp", false),
    ] {
        assert_eq!(names.has_prefix_of(name), expected, "{name}");
    }
    let both = NamePolicies::new(&port(&[ONE, r#"{"allow": [{"to": ["*.example.net"]}]}"#]));
    assert!(!both.unwrap().has_prefix_of("api.example.org.corp"));
}

#[test]
fn the_longest_time_of_several_names_holds() {
    let port = port(&[ONE]);
    let names = NamePolicies::new(&port).unwrap();
    let address = |name, ttl| NamedAddress::with_ttl(name, "198.51.100.7".parse().unwrap(), ttl);
    let seconds = |named: &[NamedAddress]| {
        let keys = named_keys(&names.port, &names.policies, &names.sets, named);
        let times = keys.iter().flat_map(|(_, keys)| keys.iter().map(|key| key.1));
        times.collect::<Vec<_>>()
    };
    let (short, long) = (address("api.example.org", 60), address("a.example.net", 1800));
    for both in [[short.clone(), long.clone()], [long, short]] {
        let [only] = seconds(&both)[..] else { panic!("{:?}", seconds(&both)) };
        assert!((1799..=1800).contains(&only), "{only}");
    }
}

/// A record that was written by somebody else.
#[test]
fn special_addresses_of_a_record_open_nothing() {
    let names = NamePolicies::new(&port(&[ONE])).unwrap();
    for ip in ["10.1.0.3", "203.0.113.9", "169.254.169.254", "::1", "fd00::1"] {
        let address = [NamedAddress::with_ttl("api.example.org", ip.parse().unwrap(), 60)];
        let keys = named_keys(&names.port, &names.policies, &names.sets, &address);
        assert!(keys.is_empty(), "{ip}");
    }
}

#[test]
fn an_address_that_another_name_has_is_not_given_up() {
    let mut port = port(&[ONE]);
    let ips = ["198.51.100.7", "198.51.100.8"].map(|ip| ip.parse::<IpAddr>().unwrap());
    port.named = vec![
        NamedAddress::with_ttl("api.example.org", ips[0], 60),
        NamedAddress::with_ttl("api.example.org", ips[1], 70),
        NamedAddress::with_ttl("a.example.net", ips[0], 80),
    ];
    let given_up = port.keep_named(1);
    assert_eq!(given_up.iter().map(|gone| gone.ip).collect::<Vec<_>>(), [ips[1]]);
}

/// The filter has to let the segments of open connections pass.
#[test]
fn the_record_keeps_addresses_that_have_vanished() {
    let mut port = port(&[ONE]);
    let vanished = |ip: &str, ago: u64| NamedAddress {
        until: boot_seconds().saturating_sub(ago),
        ..NamedAddress::with_ttl("api.example.org", ip.parse().unwrap(), 60)
    };
    port.named = vec![vanished("198.51.100.7", 1), vanished("198.51.100.8", LINGERING - 60)];
    port.add_named(&[NamedAddress::with_ttl("a.example.net", "198.51.100.9".parse().unwrap(), 60)]);
    assert_eq!(port.named.len(), 3);
    assert_eq!(port.named[0].remaining(), 0);
}

#[test]
fn a_service_is_of_the_name_while_its_time_lasts() {
    let mut port = port(&[ONE]);
    let ip: IpAddr = "198.51.100.7".parse().unwrap();
    port.named = vec![NamedAddress::with_ttl("api.example.org", ip, 60)];
    let is_found = |port: &EgressPart, ip, number| {
        port.find_named(ip, ServiceRange::of_port(6, number).first).unwrap().is_some()
    };
    assert!(is_found(&port, ip, 443));
    assert!(!is_found(&port, ip, 80));
    assert!(!is_found(&port, "198.51.100.8".parse().unwrap(), 443));
    port.named[0].until = 0;
    assert!(!is_found(&port, ip, 443));
}

#[test]
fn a_damaged_record_holds_for_an_hour_at_most() {
    let ip: IpAddr = "198.51.100.7".parse().unwrap();
    for until in [boot_seconds() + 1_000_000, u64::MAX] {
        assert_eq!(NamedAddress { name: String::new(), ip, until }.remaining(), 3600);
    }
}

#[test]
fn an_address_is_denied_with_a_service_of_the_name() {
    let deny = |ports: &str| {
        let policy = format!(
            r#"{{"allow": [{{"to": ["api.example.org"], "ports": ["tcp/443"]}}],
                "deny": [{{"to": ["198.51.100.7"], "ports": [{ports}]}}]}}"#
        );
        let names = NamePolicies::new(&port(&[&policy])).unwrap();
        services(&names, "api.example.org", "198.51.100.7")
    };
    assert_eq!(deny(r#""tcp/443""#), Some(Vec::new()));
    assert_eq!(deny(r#""udp/443", "tcp/400-500""#), Some(Vec::new()));
    assert_eq!(deny(r#""udp/443""#), Some(vec![ServiceRange::of_port(6, 443)]));
}

#[test]
fn the_clock_is_the_time_since_the_start_of_the_system() {
    let text = std::fs::read_to_string("/proc/uptime").unwrap();
    let uptime: u64 = text.split('.').next().unwrap().parse().unwrap();
    assert!((uptime..=uptime + 2).contains(&boot_seconds()), "{uptime} {}", boot_seconds());
}
