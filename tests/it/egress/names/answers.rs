//! What the resolver answers, and what an answer opens.

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use serde_json::json;

use super::client::{Way, connect};
use super::wire::{
    A, AAAA, ANY, CH, CNAME, HTTPS, MX, Message, NOERROR, NXDOMAIN, REFUSED, Record, SVCB, TXT,
};
use super::{Inside, PUBLIC, Site, names, parsed};
use crate::support::conflist::{Attached, Conflist};
use crate::support::net::{GATEWAYS, merged};
use crate::support::node::{Container, eventually};
use crate::support::traffic::Place;

#[test]
fn an_answer_opens_its_addresses_for_the_ports_of_the_name() {
    for kind in ["bridge", "ptp"] {
        let site = Site::new();
        let inside = site.attach(kind, "c1", Some(&names()));
        let mut ways = Vec::new();
        for server in [GATEWAYS, PUBLIC].concat() {
            ways.extend([Way::udp(server), Way::tcp(server)]);
        }
        let zone = (0..ways.len()).flat_map(|nth| {
            let name = format!("way{nth}.example.net");
            [format!("203.0.113.{}", 100 + nth), format!("2001:db8:f::{}", nth + 1)]
                .map(|ip| Record::address(&name, &ip))
        });
        site.upstream.serve(zone.collect::<Vec<_>>());
        for (nth, way) in ways.into_iter().enumerate() {
            let name = format!("way{nth}.example.net");
            let ips = [format!("203.0.113.{}", 100 + nth), format!("2001:db8:f::{}", nth + 1)];
            for (kind, ip) in [(A, &ips[0]), (AAAA, &ips[1])] {
                assert!(!inside.reaches(ip, 443), "{way:?}: {ip} before the question");
                let answer = way.ask(&inside.container, &Message::question(&name, kind));
                assert_eq!(answer.ips(), parsed(&[ip]), "{way:?}");
                let stream = connect(&inside.container, ip, 443).unwrap();
                assert_eq!(sent_again(&stream), 0, "{way:?}: {ip}: the first packet passes");
                assert!(inside.reaches(ip, 443), "{way:?}: {ip}");
                assert!(!inside.reaches(ip, 80), "{way:?}: {ip}: another port");
            }
        }
        assert!(!inside.reaches("203.0.113.99", 443), "{kind}: another address");
    }
}

/// The number of segments that were sent again.
#[expect(unsafe_code, reason = "neither std nor nix reads tcp_info")]
fn sent_again(stream: &TcpStream) -> u32 {
    use nix::libc::{IPPROTO_TCP, TCP_INFO, getsockopt, socklen_t, tcp_info};
    // SAFETY: the structure has integers only.
    let mut info: tcp_info = unsafe { std::mem::zeroed() };
    let mut length = socklen_t::try_from(size_of::<tcp_info>()).unwrap();
    // SAFETY: the kernel writes at most the given length.
    let status = unsafe {
        let value = (&raw mut info).cast();
        getsockopt(stream.as_raw_fd(), IPPROTO_TCP, TCP_INFO, value, &raw mut length)
    };
    assert_eq!(status, 0);
    info.tcpi_total_retrans
}

#[test]
fn other_names_types_and_classes_are_refused() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    let question = |name: &str, kind| Message::question(name, kind);
    let mut chaos = question("api.example.org", A);
    chaos.questions[0].2 = CH;
    let mut refused = vec![chaos];
    for name in [
        "example.net",
        "other.example.org",
        "xapi.example.org",
        "x.api.example.org",
        "example.org",
        "anexample.net",
        "org",
        "",
        super::PROBE,
        "1.2.1.10.in-addr.arpa",
    ] {
        refused.push(question(name, A));
    }
    for kind in [TXT, ANY, MX, 2, 6, 12, 33, 43, 252, 65280] {
        refused.push(question("api.example.org", kind));
    }
    site.upstream.asked();
    for way in [Way::udp(GATEWAYS[0]), Way::tcp(PUBLIC[0])] {
        for question in &refused {
            let answer = way.ask(&inside.container, question);
            let counts = (answer.answers.len(), answer.authority.len());
            assert_eq!((answer.rcode(), counts), (REFUSED, (0, 0)), "{answer:?}");
        }
        // Neither other operations, nor several questions, nor answers.
        let mut several = question("api.example.org", A);
        several.questions.push(several.questions[0].clone());
        for odd in [
            Message { flags: 0x2900, ..question("api.example.org", A) },
            Message { flags: 0x1100, ..question("api.example.org", A) },
            Message { flags: 0x8100, ..question("api.example.org", A) },
            Message { questions: Vec::new(), ..question("", A) },
            several,
        ] {
            let answer = way.send(&inside.container, &odd.encode(), super::client::WAIT);
            let answer = answer.map(|bytes| Message::decode(&bytes).unwrap());
            assert!(answer.as_ref().is_none_or(|a| a.rcode() != NOERROR), "{odd:?} {answer:?}");
        }
        for bytes in [&b""[..], b"\0", &[0xff; 12], &[0; 11], &[0xc0; 600]] {
            let answer = way.send(&inside.container, bytes, super::client::WAIT);
            assert!(answer.is_none_or(|answer| answer[3] & 0xf != 0), "{bytes:?}");
        }
    }
    // An allowed name with a domain of a search list behind it: the container goes on searching.
    let searched = inside.ask("a.example.net.example.org", A);
    assert_eq!((searched.rcode(), searched.answers.len()), (NXDOMAIN, 0), "{searched:?}");
    let asked = site.upstream.asked();
    assert!(asked.is_empty(), "{asked:?}");
    inside.finds("api.example.org", &["192.0.2.7"]);
}

/// The probe of ADD tells nobody outside that a container was attached.
#[test]
fn the_name_of_the_probe_does_not_go_upstream() {
    let site = Site::new();
    let mut policy = names();
    policy["allow"].as_array_mut().unwrap().push(json!({"to": ["dns"]}));
    let inside = site.attach("bridge", "c1", Some(&policy));
    inside.finds("other.example.org", &["203.0.113.15"]);
    assert_eq!(inside.ask(super::PROBE, A).rcode(), REFUSED);
    let probed = site.upstream.asked().iter().any(|asked| asked.name() == super::PROBE);
    assert!(!probed);
}

#[test]
fn chains_wildcards_and_spellings() {
    let site = Site::new();
    let mut policy = names();
    let to = policy["allow"][0]["to"].as_array_mut().unwrap();
    to.push(json!("BÜCHER.example.org"));
    let inside = site.attach("bridge", "c1", Some(&policy));
    for (asked, ip) in [
        ("xn--bcher-kva.example.org", "203.0.113.16"),
        ("API.eXample.ORG", "192.0.2.7"),
        ("deep.b.example.net", "203.0.113.12"),
        ("www.example.net", "203.0.113.14"),
        ("WWW.EXAMPLE.NET", "203.0.113.14"),
        ("www.example.net", "2001:db8:f::14"),
    ] {
        inside.finds(asked, &[ip]);
        assert!(inside.reaches(ip, 443), "{asked}");
    }
    let answer = inside.ask("www.Example.net", A);
    let chain: Vec<_> = answer.answers.iter().map(|r| (r.name.to_lowercase(), r.kind)).collect();
    let names = [("www.example.net", CNAME), ("edge.example.com", CNAME)];
    let end = ("host.edge.example.com", A);
    let expected = [names[0], names[1], end].map(|(name, kind)| (name.to_owned(), kind));
    assert_eq!(chain, expected);
    assert!(answer.authority.is_empty(), "{answer:?}");
    // A name for itself that is an end of a chain is none of the policy.
    assert_eq!(inside.ask("edge.example.com", A).rcode(), REFUSED);
    let alias = inside.ask("www.example.net", CNAME);
    assert_eq!((alias.rcode(), alias.answers[0].kind), (NOERROR, CNAME), "{alias:?}");
    assert_eq!(inside.ask("none.example.net", A).rcode(), NXDOMAIN);
    let empty = inside.ask("a.example.net", AAAA);
    assert_eq!((empty.rcode(), empty.answers.len()), (NOERROR, 0), "{empty:?}");
}

/// An address that is in force is told at once, for the time that is left, and gets its new time
/// behind the answer.
#[test]
fn an_address_in_force_does_not_wait_for_its_new_time() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    let told = |ttl: u32| {
        site.upstream.serve([Record::address("api.example.org", "192.0.2.7").with_ttl(ttl)]);
        inside.ask("api.example.org", A).answers[0].ttl
    };
    let first = told(60);
    assert!((50..=55).contains(&first), "{first}");
    let second = told(3600);
    assert!((45..=first).contains(&second), "{second}");
    eventually("the new time", || {
        // Fewer questions than are answered in any case.
        thread::sleep(Duration::from_millis(50));
        let again = told(3600);
        assert!(again > 15, "the old time runs out: {again}");
        (3500..=3595).contains(&again)
    });
    let elements = site.node.sh("nft list ruleset | grep -F 192.0.2.7");
    assert!(elements.contains("expires 59m"), "{elements}");
    assert!(inside.reaches("192.0.2.7", 443));
}

#[test]
fn answers_that_lead_inside_are_left_out() {
    for kind in ["bridge", "ptp"] {
        let site = Site::new();
        site.node.sh("ip addr add 203.0.113.1/32 dev lo && ip addr add 2001:db8:a::1/128 dev lo");
        let neighbour = site.attach(kind, "neighbour", None);
        let inside = site.attach(kind, "c1", Some(&names()));
        // Later than the container.
        site.node.sh("ip addr add 203.0.113.2/32 dev lo && ip addr add 2001:db8:a::2/128 dev lo");
        let far = with_public_address(&site);
        let zone = |ips: &[&str]| -> Vec<Record> {
            ips.iter().map(|ip| Record::address("api.example.org", ip)).collect()
        };
        for (question, inner, outer) in [
            (A, &INNER4[..], &["192.0.2.7", "203.0.113.200"][..]),
            (AAAA, &INNER6[..], &["2001:db8:f::7"][..]),
        ] {
            let own = [&neighbour, &inside, &far].map(|c| c.ip(question == AAAA));
            let own: Vec<&str> = own.iter().map(String::as_str).collect();
            site.upstream.serve(zone(&[inner, outer, &own].concat()));
            let answer = inside.ask("api.example.org", question);
            assert_eq!((answer.rcode(), answer.ips()), (NOERROR, parsed(outer)), "{kind}");
            for ip in inner.iter().chain(&own) {
                site.upstream.serve(zone(&[ip]));
                let answer = inside.ask("api.example.org", question);
                assert_eq!((answer.rcode(), answer.ips()), (NOERROR, Vec::new()), "{kind}: {ip}");
            }
        }
        for (place, ip) in [(&neighbour, neighbour.ip(false)), (&far, far.ip(false))] {
            let _echo = super::client::Echo::start(&place.container, &[443]);
            assert!(!inside.reaches(&ip, 443), "{kind}: {ip}");
        }
        let _echo = super::client::Echo::start(&site.node, &[443]);
        for ip in ["203.0.113.1", "203.0.113.2", GATEWAYS[0], GATEWAYS[1], "10.9.0.1"] {
            assert!(!inside.reaches(ip, 443), "{kind}: {ip}");
        }
    }
}

const INNER4: [&str; 22] = [
    "0.0.0.0",
    "10.0.0.1",
    "10.1.2.1",
    "10.1.2.0",
    "10.1.2.255",
    "10.1.2.77",
    "10.9.0.1",
    "10.9.0.2",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.3.4",
    "192.168.1.1",
    "198.18.0.1",
    "203.0.113.1",
    "203.0.113.2",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "192.0.0.8",
];
const INNER6: [&str; 19] = [
    "::",
    "::1",
    "::192.0.2.7",
    "::ffff:192.0.2.7",
    "::ffff:169.254.169.254",
    "::ffff:10.1.2.2",
    "64:ff9b::a01:202",
    "64:ff9b::c000:207",
    "2001:0:1::1",
    "2001:db8:1::1",
    "2001:db8:1::77",
    "2001:db8:a::1",
    "2001:db8:a::2",
    "2002:a01:202::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "ff02::1",
];

/// A container with public addresses behind a bridge of its own.
fn with_public_address(site: &Site) -> Inside {
    let container = Container::new();
    let ipam = site.node.host_local(&["203.0.113.128/28", "2001:db8:c::/64"]);
    let bridge = json!({"type": "bridge", "bridge": "br1", "isGateway": true, "ipam": ipam});
    let conf = json!({"cniVersion": "1.1.0", "name": "others", "plugins": [bridge]});
    let at = Attached::new("far", &container.path());
    let result = Conflist::new(&site.node, conf).add(&at).unwrap();
    eventually("it is reached", || site.node.reaches(&super::super::address(&result, 1)));
    Inside { container, at, result }
}

#[test]
fn an_address_that_the_policy_allows_itself_is_told() {
    for kind in ["bridge", "ptp"] {
        let site = Site::new();
        let neighbour = site.attach(kind, "neighbour", None);
        let _echo = super::client::Echo::start(&neighbour.container, &[443, 80]);
        let _echo2 = super::client::Echo::start(&site.node, &[443]);
        let own = ["10.9.0.2", "169.254.169.254", "10.1.2.2", "10.1.2.1", "2001:db8:1::1"];
        let entry = json!({"to": own, "ports": ["tcp/443"]});
        let mut keys = names();
        keys["allow"].as_array_mut().unwrap().push(entry);
        let inside = site.attach(kind, "c1", Some(&keys));
        let all = [&own[..], &["10.9.0.1", "10.1.2.77", "192.0.2.7"]].concat();
        let zone: Vec<_> = all.iter().map(|ip| Record::address("api.example.org", ip)).collect();
        site.upstream.serve(zone);
        inside.finds("api.example.org", &[&own[..4], &["192.0.2.7"]].concat());
        inside.finds("api.example.org", &own[4..]);
        for ip in [&own[..1], &own[2..], &["192.0.2.7"]].concat() {
            assert!(inside.reaches(ip, 443), "{kind}: {ip}");
            assert!(!inside.reaches(ip, 80), "{kind}: {ip}");
        }
    }
}

#[test]
fn each_policy_has_to_allow_a_name() {
    let second = |policy| json!({"runtimeConfig": {"egressPolicy": policy}});
    let first = json!({"allow": [{"to": ["api.example.org", "*.example.net"], "ports": ["tcp/443", "tcp/80"]}]});
    let narrow = json!({"allow": [{"to": ["api.example.org"], "ports": ["tcp/443"]},
        {"to": ["other.example.org", "203.0.113.10"]}]});
    let sandbox = json!({"profile": "sandbox"});
    for (kind, first) in
        [("bridge", &first), ("ptp", &first), ("bridge", &sandbox), ("ptp", &sandbox)]
    {
        let site = Site::new();
        let inside = site.attach(kind, "c1", Some(&merged(first, &second(narrow.clone()))));
        assert!(!inside.reaches("192.0.2.7", 443), "{kind} {first}");
        inside.finds("api.example.org", &["192.0.2.7"]);
        assert!(inside.reaches("192.0.2.7", 443), "{kind} {first}");
        assert!(!inside.reaches("192.0.2.7", 80), "{kind} {first}");
        assert!(!inside.reaches("203.0.113.11", 443), "{kind} {first}");
        assert_eq!(inside.ask("b.example.net", A).rcode(), REFUSED, "{kind} {first}");
        let is_sandbox = first == &sandbox;
        let other = inside.ask("other.example.org", A);
        assert_eq!(other.rcode() == NOERROR, is_sandbox, "{kind} {first}: {other:?}");
        assert_eq!(inside.reaches("203.0.113.15", 80), is_sandbox, "{kind} {first}");
        assert_eq!(inside.reaches("203.0.113.10", 443), is_sandbox, "{kind} {first}: by address");
    }
}

#[test]
fn service_records_have_no_addresses() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    let hints = [(4, &[203, 0, 113, 90][..]), (5, b"ech"), (6, &[0x20; 16])];
    let alpn: (u16, &[u8]) = (1, b"\x02h3");
    let port: (u16, &[u8]) = (3, &[1, 187]);
    for (kind, name) in [(HTTPS, "api.example.org"), (SVCB, "_dns.example.net")] {
        for target in ["", "svc.example.com"] {
            let all = [alpn, port, hints[0], hints[1], hints[2]];
            site.upstream.serve(vec![Record::service(name, kind, target, &all)]);
            let answer = inside.ask(name, kind);
            let bare = Record::service(name, kind, target, &[alpn, port]);
            let told: Vec<_> = answer.answers.iter().map(|r| (r.kind, &r.data)).collect();
            assert_eq!(told, [(kind, &bare.data)], "{answer:?}");
            assert!(answer.additional.iter().all(|r| r.ip().is_none()), "{answer:?}");
        }
    }
    assert!(!inside.reaches("203.0.113.90", 443));
}
