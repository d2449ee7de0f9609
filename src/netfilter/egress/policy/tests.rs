//! The rules of policies one by one; random policies, compared with the text of the rules; all
//! errors.

mod places;

use std::net::IpAddr;

use super::super::EgressPart;
use super::super::compile::tests::{
    Random, SERVICES, addresses_around_bounds, assert_canonical, services_around_bounds,
};
use super::*;

const HTTPS: u32 = 0x6_01bb;
const SSH: u32 = 0x6_0016;
const DNS: u32 = 0x11_0035;
const DNS_TCP: u32 = 0x6_0035;
const PING: u32 = 0x1_0000;
const PING_V6: u32 = 0x3a_0000;

fn policy(json: &str) -> EgressPolicy {
    serde_json::from_str(json).unwrap()
}

fn compiled(json: &str) -> CompiledPolicy {
    policy(json).compile(&PolicyScene::default()).unwrap()
}

/// Asserts whether each `address service` is allowed.
fn assert_verdicts(traffic: &AllowedTraffic, allowed: &[(&str, u32)], denied: &[(&str, u32)]) {
    assert_canonical(traffic);
    let allows = |&(addr, service): &(&str, u32)| traffic.allows(addr.parse().unwrap(), service);
    for packet in allowed {
        assert!(allows(packet), "{packet:x?} is denied");
    }
    for packet in denied {
        assert!(!allows(packet), "{packet:x?} is allowed");
    }
}

fn assert_routed(json: &str, allowed: &[(&str, u32)], denied: &[(&str, u32)]) {
    assert_verdicts(&compiled(json).routed, allowed, denied);
}

#[test]
fn destinations_without_an_entry_have_the_default() {
    for deny in ["{}", r#"{"policy": "deny"}"#] {
        assert!(compiled(deny).routed.is_empty(), "{deny}");
    }
    assert_routed(
        r#"{"policy": "allow"}"#,
        &[("10.0.0.1", SSH), ("::1", 0), ("255.255.255.255", 0xff_ffff)],
        &[],
    );
}

#[test]
fn entries_without_ports_are_for_all_services() {
    let any = [("10.0.0.1", 0), ("10.0.0.1", PING), ("10.0.0.1", HTTPS), ("10.0.0.1", 0xff_ffff)];
    assert_routed(
        r#"{"allow": [{"to": ["10.0.0.0/8"]}]}"#,
        &any,
        &[("11.0.0.0", HTTPS), ("9.255.255.255", HTTPS)],
    );
    assert_routed(
        r#"{"policy": "allow", "deny": [{"to": ["10.0.0.0/8"]}]}"#,
        &[("11.0.0.0", HTTPS)],
        &any,
    );
}

#[test]
fn networks_may_be_written_with_any_of_their_addresses() {
    let json = r#"{"allow": [{"to": ["10.1.2.3/8", "2001:db8::5/32"]}]}"#;
    let allowed = [("10.0.0.0", SSH), ("10.255.255.255", SSH), ("2001:db8::", SSH)];
    assert_routed(json, &allowed, &[("11.0.0.0", SSH), ("2001:db9::", SSH)]);
}

#[test]
fn addresses_are_networks_of_one_address() {
    let json = r#"{"allow": [{"to": ["10.0.0.1", "::1"]}]}"#;
    let denied = [("10.0.0.0", SSH), ("10.0.0.2", SSH), ("::", SSH), ("::2", SSH)];
    assert_routed(json, &[("10.0.0.1", SSH), ("::1", SSH)], &denied);
}

#[test]
fn an_entry_is_for_each_of_its_ports() {
    let json = r#"{"allow": [{"to": ["0.0.0.0/0"], "ports": ["tcp/443", "udp/50-53", "icmp"]}]}"#;
    let denied = [
        ("1.1.1.1", SSH),
        ("1.1.1.1", DNS + 1),
        ("1.1.1.1", DNS - 4),
        ("1.1.1.1", PING_V6),
        ("::", HTTPS),
    ];
    assert_routed(
        json,
        &[("1.1.1.1", HTTPS), ("1.1.1.1", DNS), ("1.1.1.1", DNS - 3), ("1.1.1.1", PING)],
        &denied,
    );
}

#[test]
fn an_allow_entry_without_networks_allows_nothing() {
    assert!(compiled(r#"{"allow": [{"to": []}, {"ports": ["tcp"]}]}"#).routed.is_empty());
}

#[test]
fn an_allow_entry_with_empty_ports_allows_nothing() {
    assert!(compiled(r#"{"allow": [{"to": ["0.0.0.0/0"], "ports": []}]}"#).routed.is_empty());
}

#[test]
fn a_deny_entry_without_networks_denies_everywhere() {
    let json = r#"{"policy": "allow", "deny": [{"ports": ["tcp/22"]}]}"#;
    assert_routed(json, &[("10.0.0.1", HTTPS), ("::1", HTTPS)], &[("10.0.0.1", SSH), ("::1", SSH)]);
    assert!(compiled(r#"{"policy": "allow", "deny": [{}]}"#).routed.is_empty());
    let overridden = r#"{"allow": [{"to": ["10.0.0.1"]}], "deny": [{"ports": ["tcp/22"]}]}"#;
    assert_routed(overridden, &[("10.0.0.1", SSH)], &[("10.0.0.2", SSH)]);
}

#[test]
fn a_deny_entry_with_empty_ports_denies_all_services() {
    let json = r#"{"policy": "allow", "deny": [{"to": ["10.0.0.0/8"], "ports": []}]}"#;
    assert_routed(
        json,
        &[("11.0.0.1", SSH)],
        &[("10.0.0.1", SSH), ("10.0.0.1", PING), ("10.0.0.1", 0)],
    );
}

#[test]
fn the_longest_prefix_decides() {
    let json = r#"{"allow": [{"to": ["10.0.0.0/8"]}, {"to": ["10.1.2.3"]}], "deny": [{"to": ["10.1.0.0/16"]}]}"#;
    assert_routed(
        json,
        &[("10.0.0.1", SSH), ("10.2.0.0", SSH), ("10.1.2.3", SSH)],
        &[("10.1.0.0", SSH), ("10.1.2.2", SSH), ("10.1.2.4", SSH), ("10.1.255.255", SSH)],
    );
}

#[test]
fn entries_for_other_services_do_not_decide() {
    let json = r#"{"allow": [{"to": ["10.0.0.0/8"], "ports": ["tcp"]}],
        "deny": [{"to": ["10.1.0.0/16"], "ports": ["tcp/22", "udp"]}]}"#;
    assert_routed(
        json,
        &[("10.1.0.1", HTTPS), ("10.2.0.1", SSH)],
        &[("10.1.0.1", SSH), ("10.1.0.1", DNS)],
    );
}

#[test]
fn deny_goes_before_allow_at_equal_prefix_length() {
    let json = r#"{"policy": "allow", "allow": [{"to": ["10.0.0.0/8"]}],
        "deny": [{"to": ["10.9.9.9/8"], "ports": ["tcp/22"]}]}"#;
    assert_routed(json, &[("10.0.0.1", HTTPS), ("11.0.0.1", SSH)], &[("10.0.0.1", SSH)]);
}

#[test]
fn served_services_are_sorted_and_merged() {
    let served = compiled(r#"{"serve": ["udp/53", "tcp/443", "tcp/80-90", "tcp/91"]}"#).served;
    let tcp = [ServiceRange::of_ports(6, 80, 91), ServiceRange::of_port(6, 443)];
    assert_eq!(served, [tcp[0], tcp[1], ServiceRange::of_port(17, 53)]);
    assert!(compiled("{}").served.is_empty());
}

#[test]
fn published_services_are_merged_in_any_order() {
    let published = ["udp/8080", "tcp/443", "tcp/80", "tcp/443"].map(str::to_owned).to_vec();
    let policies = vec![policy(r#"{"serve": ["udp", "tcp/79"]}"#)];
    let served =
        EgressPart { published, policies, ..EgressPart::default() }.compile().unwrap().served;
    let tcp = [ServiceRange::of_ports(6, 79, 80), ServiceRange::of_port(6, 443)];
    assert_eq!(served, [tcp[0], tcp[1], ServiceRange::of_protocol(17)]);
}

#[test]
fn services_are_parsed() {
    for (text, range) in SERVICES {
        assert_eq!(parse_service(text), Ok(range), "{text}");
    }
    for (text, range) in [
        ("sctp", ServiceRange::of_protocol(132)),
        ("6/443", ServiceRange::of_port(6, 443)),
        ("udp/1-65535", ServiceRange::of_ports(17, 1, 65535)),
        ("udp/53-53", ServiceRange::of_port(17, 53)),
        ("47", ServiceRange::of_protocol(47)),
    ] {
        assert_eq!(parse_service(text), Ok(range), "{text}");
    }
}

#[test]
fn two_policies_must_both_allow() {
    let ours =
        compiled(r#"{"profile": "sandbox", "allow": [{"to": ["10.0.0.1"]}], "serve": ["tcp/80"]}"#);
    let theirs = compiled(
        r#"{"allow": [{"to": ["10.0.0.0/24", "8.8.8.8"]}], "serve": ["tcp/80-81", "udp/53"]}"#,
    );
    let both = ours.intersect(&theirs);
    assert_verdicts(
        &both.routed,
        &[("10.0.0.1", SSH), ("8.8.8.8", SSH)],
        &[("10.0.0.2", SSH), ("8.8.4.4", SSH)],
    );
    assert_verdicts(
        &both.host,
        &[("8.8.8.8", DNS)],
        &[("10.0.0.1", SSH), ("8.8.8.8", SSH), ("8.8.4.4", DNS)],
    );
    assert_eq!(both.served, [ServiceRange::of_port(6, 80)]);
}

/// Random policies without a profile.
fn random_policy(random: &mut Random) -> EgressPolicy {
    let entry = |random: &mut Random| PolicyEntry {
        to: (0..random.below(4)).map(|_| random.network().to_string()).collect(),
        ports: (random.below(3) > 0)
            .then(|| (0..random.below(4)).map(|_| random.one_of(&SERVICES).0.to_owned()).collect()),
    };
    let entries = |random: &mut Random| (0..random.below(6)).map(|_| entry(random)).collect();
    EgressPolicy {
        policy: (*random.one_of(&["", "deny", "allow"])).to_owned(),
        allow: entries(random),
        deny: entries(random),
        ..EgressPolicy::default()
    }
}

/// The prefix length of the entry of the list `list` that decides, if any.
fn longest_match(list: &[PolicyEntry], is_deny: bool, addr: IpAddr, service: u32) -> Option<u8> {
    let names_service = |entry: &PolicyEntry| match &entry.ports {
        None => true,
        Some(ports) if ports.is_empty() => is_deny,
        Some(ports) => SERVICES.iter().any(|(text, range)| {
            ports.iter().any(|p| p == text) && range.first <= service && service <= range.last
        }),
    };
    let length = |entry: &PolicyEntry| match entry.to.as_slice() {
        [] => is_deny.then_some(0),
        to => {
            let networks = to.iter().map(|text| text.parse::<IpNet>().unwrap());
            networks
                .filter(|network| network.contains(&addr))
                .map(|network| network.prefix_len())
                .max()
        }
    };
    list.iter().filter(|entry| names_service(entry)).filter_map(length).max()
}

/// The prefix length of the network of metadata services with the address.
fn metadata_prefix(addr: IpAddr) -> Option<u8> {
    let networks = metadata_networks().into_iter();
    networks.filter(|net| net.contains(&addr)).map(|net| net.prefix_len()).max()
}

#[test]
fn random_policies_are_compiled_as_the_rules_say() {
    let mut random = Random(5);
    let mut verdicts = [0; 2];
    for round in 0..80 {
        let policy = random_policy(&mut random);
        let traffic = policy.compile(&PolicyScene::default()).unwrap().routed;
        assert_canonical(&traffic);
        let texts = policy.allow.iter().chain(&policy.deny).flat_map(|entry| &entry.to);
        let networks: Vec<IpNet> = texts.map(|text| text.parse().unwrap()).collect();
        for addr in addresses_around_bounds(&networks) {
            for service in services_around_bounds() {
                let allowed = longest_match(&policy.allow, false, addr, service);
                let denied = longest_match(&policy.deny, true, addr, service);
                let expected = match (allowed, denied) {
                    (None, None) => policy.policy == "allow",
                    (Some(length), None) if policy.policy != "allow" => {
                        Some(length) > metadata_prefix(addr)
                    }
                    (allowed, denied) => allowed > denied,
                };
                verdicts[usize::from(expected)] += 1;
                assert_eq!(
                    traffic.allows(addr, service),
                    expected,
                    "{round}: {addr} {service:x} {policy:?}"
                );
            }
        }
    }
    assert!(verdicts.iter().all(|&count| count > 20_000), "{verdicts:?}");
}

const SANDBOXED: &str = r#"{"profile": "sandbox"}"#;

/// The addresses outside the sandbox: networks that it denies, each as the last address before, its
/// first, its last and the first address after; `-` where a neighbour is denied, too, or there is
/// none.
const BOUNDS: [[&str; 4]; 27] = [
    ["-", "0.0.0.0", "0.255.255.255", "1.0.0.0"],
    ["9.255.255.255", "10.0.0.0", "10.255.255.255", "11.0.0.0"],
    ["100.63.255.255", "100.64.0.0", "100.127.255.255", "100.128.0.0"],
    ["126.255.255.255", "127.0.0.0", "127.255.255.255", "128.0.0.0"],
    ["169.253.255.255", "169.254.0.0", "169.254.255.255", "169.255.0.0"],
    ["172.15.255.255", "172.16.0.0", "172.31.255.255", "172.32.0.0"],
    ["191.255.255.255", "192.0.0.0", "192.0.0.255", "192.0.1.0"],
    ["192.167.255.255", "192.168.0.0", "192.168.255.255", "192.169.0.0"],
    ["198.17.255.255", "198.18.0.0", "198.19.255.255", "198.20.0.0"],
    ["223.255.255.255", "224.0.0.0", "239.255.255.255", "-"],
    ["-", "240.0.0.0", "255.255.255.255", "-"],
    ["169.253.255.255", "169.254.169.254", "169.254.169.254", "169.255.0.0"],
    ["-", "::", "::", "-"],
    ["-", "::1", "::1", "-"],
    ["-", "::ffff:0:0", "::ffff:ffff:ffff", "-"],
    ["-", "64:ff9b::", "64:ff9b::ffff:ffff", "-"],
    ["-", "64:ff9b:1::", "64:ff9b:1:ffff:ffff:ffff:ffff:ffff", "-"],
    [
        "2000:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        "2001::",
        "2001:0:ffff:ffff:ffff:ffff:ffff:ffff",
        "2001:1::",
    ],
    [
        "2001:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        "2002::",
        "2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        "2003::",
    ],
    ["-", "fc00::", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "-"],
    ["-", "fd00:ec2::254", "fd00:ec2::254", "-"],
    ["-", "fe80::", "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "-"],
    ["-", "fec0::", "feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "-"],
    ["-", "ff00::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "-"],
    ["-", "::ffff:0:0", "1fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "2000::"],
    ["3fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "4000::", "ffff::", "-"],
    ["168.63.129.15", "168.63.129.16", "168.63.129.16", "168.63.129.17"],
];

#[test]
fn the_sandbox_denies_private_and_special_networks() {
    let routed = compiled(SANDBOXED).routed;
    for [before, first, last, after] in BOUNDS {
        for service in [0, PING, HTTPS, DNS, 0xff_ffff] {
            let allowed: Vec<_> =
                [before, after].into_iter().filter(|a| *a != "-").map(|a| (a, service)).collect();
            assert_verdicts(&routed, &allowed, &[(first, service), (last, service)]);
        }
    }
}

#[test]
fn the_sandbox_allows_all_else_but_icmpv6() {
    let routed = compiled(SANDBOXED).routed;
    let public = ["1.1.1.1", "8.8.8.8", "203.0.113.1", "2606:4700::1111", "2a00::1"];
    for addr in public {
        assert_verdicts(
            &routed,
            &[(addr, HTTPS), (addr, DNS), (addr, PING), (addr, 0xff_ffff)],
            &[],
        );
    }
    let denied =
        [("2606:4700::1111", PING_V6), ("2606:4700::1111", PING_V6 + 0xffff), ("::5", PING_V6)];
    assert_verdicts(&routed, &[("8.8.8.8", PING_V6), ("2606:4700::1111", PING_V6 - 1)], &denied);
}

#[test]
fn the_sandbox_denies_the_networks_on_link() {
    let on_link = ["203.0.113.77/24", "2001:db8::9/64"].map(|net| net.parse().unwrap());
    let routed = policy(SANDBOXED)
        .compile(&PolicyScene { on_link: &on_link, ..PolicyScene::default() })
        .unwrap()
        .routed;
    let denied = [
        ("203.0.113.0", SSH),
        ("203.0.113.255", SSH),
        ("2001:db8::", SSH),
        ("2001:db8::ffff", SSH),
    ];
    assert_verdicts(
        &routed,
        &[("203.0.112.255", SSH), ("203.0.114.0", SSH), ("2001:db8:0:1::", SSH)],
        &denied,
    );
}

#[test]
fn longer_prefixes_of_a_user_override_the_sandbox() {
    let json = r#"{"profile": "sandbox", "allow": [{"to": ["10.96.0.0/12"], "ports": ["tcp/443"]}, {"to": ["fd00::/8"]}],
        "deny": [{"to": ["8.8.8.8"]}]}"#;
    let allowed = [("10.96.0.1", HTTPS), ("fd00::1", SSH), ("fd00::1", PING_V6), ("8.8.4.4", DNS)];
    let denied = [
        ("10.96.0.1", SSH),
        ("10.95.0.1", HTTPS),
        ("fc00::1", SSH),
        ("fd00:ec2::254", SSH),
        ("8.8.8.8", DNS),
    ];
    assert_routed(json, &allowed, &denied);
    let equal = r#"{"profile": "sandbox", "allow": [{"to": ["10.0.0.0/8"]}]}"#;
    assert_routed(equal, &[("8.8.8.8", SSH)], &[("10.0.0.1", SSH)]);
}

#[test]
fn the_default_of_the_sandbox_may_be_deny() {
    let json = r#"{"profile": "sandbox", "policy": "deny", "allow": [{"to": ["0.0.0.0/0"], "ports": ["tcp/443"]}]}"#;
    assert_routed(
        json,
        &[("8.8.8.8", HTTPS)],
        &[("8.8.8.8", SSH), ("10.0.0.1", HTTPS), ("2a00::1", HTTPS)],
    );
}

#[test]
fn the_sandbox_reaches_name_service_of_the_host_only() {
    for json in [SANDBOXED, r#"{"profile": "sandbox", "policy": "allow"}"#] {
        let host = compiled(json).host;
        for addr in ["10.0.0.1", "203.0.113.1", "169.254.20.10", "fe80::1", "2a00::1"] {
            let denied = [SSH, HTTPS, PING, PING_V6, DNS - 1, DNS + 1, DNS_TCP - 1, DNS_TCP + 1]
                .map(|s| (addr, s));
            assert_verdicts(&host, &[(addr, DNS), (addr, DNS_TCP)], &denied);
        }
    }
}

#[test]
fn what_a_user_denies_is_denied_at_the_host() {
    let json = r#"{"profile": "sandbox", "allow": [{"to": ["host"], "ports": ["tcp/443"]}],
        "deny": [{"to": ["10.0.0.1"]}, {"ports": ["tcp/53"]}]}"#;
    let denied =
        [("10.0.0.1", HTTPS), ("10.0.0.1", DNS), ("10.0.0.2", DNS_TCP), ("192.168.0.1", SSH)];
    assert_verdicts(
        &compiled(json).host,
        &[("10.0.0.2", HTTPS), ("10.0.0.2", DNS), ("192.168.0.1", DNS)],
        &denied,
    );
}

#[test]
fn errors_name_the_entry_and_a_remedy() {
    let network = "write a network like 10.0.0.0/8 or 2001:db8::/32, a complete address, a name with a dot, or host, \
                   neighbours, dns or internet";
    let service = "write tcp, udp, sctp, icmp, icmpv6 or a protocol's number up to 255; ports like tcp/443 or tcp/8000-8100";
    let port = "a port is a number from 1 to 65535";
    let ports = |text: &str| format!(r#"{{"deny": [{{}}, {{"ports": ["tcp", "{text}"]}}]}}"#);
    let to = |text: &str| format!(r#"{{"allow": [{{}}, {{}}, {{"to": ["{text}"]}}]}}"#);
    let cases = [
        (to("10.0.0/8"), r#"allow[2].to[0] "10.0.0/8": not a network or address"#, network),
        (to("10.0.0.0/33"), r#"allow[2].to[0] "10.0.0.0/33": not a network or address"#, network),
        (to("example"), r#"allow[2].to[0] "example": not a network or address"#, network),
        (to("10.0.0"), r#"allow[2].to[0] "10.0.0": not a network or address"#, network),
        (
            to("a.*.com"),
            r#"allow[2].to[0] "a.*.com": "*" is not at the beginning of the name"#,
            "write *.example.org for all names below example.org, or each name for itself",
        ),
        (
            r#"{"deny": [{"to": ["example.com"]}]}"#.to_owned(),
            r#"deny[0].to[0] "example.com": a name cannot be denied, because its addresses have others"#,
            r#"leave it out: names are refused unless "allow" has them"#,
        ),
        (to("fe80::1%eth0"), r#"allow[2].to[0] "fe80::1%eth0": not a network or address"#, network),
        (to(""), r#"allow[2].to[0] "": not a network or address"#, network),
        (ports("http"), r#"deny[1].ports[1] "http": not a service"#, service),
        (ports("256"), r#"deny[1].ports[1] "256": not a service"#, service),
        (ports("+6"), r#"deny[1].ports[1] "+6": not a service"#, service),
        (ports(""), r#"deny[1].ports[1] "": not a service"#, service),
        (ports("/80"), r#"deny[1].ports[1] "/80": not a service"#, service),
        (
            ports("icmp/8"),
            r#"deny[1].ports[1] "icmp/8": only tcp, udp and sctp have ports"#,
            r#"write "icmp""#,
        ),
        (ports("tcp/"), r#"deny[1].ports[1] "tcp/": "" is not a port"#, port),
        (ports("tcp/0"), r#"deny[1].ports[1] "tcp/0": "0" is not a port"#, port),
        (ports("tcp/+1"), r#"deny[1].ports[1] "tcp/+1": "+1" is not a port"#, port),
        (ports("tcp/1-65536"), r#"deny[1].ports[1] "tcp/1-65536": "65536" is not a port"#, port),
        (ports("tcp/1-2-3"), r#"deny[1].ports[1] "tcp/1-2-3": "2-3" is not a port"#, port),
        (
            ports("tcp/90-80"),
            r#"deny[1].ports[1] "tcp/90-80": the first port is larger than the last"#,
            r#"write "tcp/80-90""#,
        ),
        (r#"{"serve": ["tcp", "x"]}"#.to_owned(), r#"serve[1] "x": not a service"#, service),
        (
            r#"{"policy": "drop"}"#.to_owned(),
            r#"policy "drop": unknown verdict"#,
            r#"write "deny" or "allow", or leave the key out"#,
        ),
        (
            r#"{"profile": "Sandbox"}"#.to_owned(),
            r#"profile "Sandbox": unknown profile"#,
            r#"write "sandbox", or leave the key out"#,
        ),
    ];
    for (json, message, remedy) in cases {
        assert_eq!(
            policy(&json).compile(&PolicyScene::default()),
            Err(Error::config(message).with_details(remedy)),
            "{json}"
        );
    }
}

#[test]
fn a_policy_has_at_most_1024_networks() {
    let entry = |count: u16| PolicyEntry {
        to: (0..count).map(|n| format!("10.0.{}.{}", n >> 8, n & 255)).collect(),
        ports: None,
    };
    let policy = |count| EgressPolicy {
        allow: vec![entry(count)],
        deny: vec![entry(512)],
        ..EgressPolicy::default()
    };
    assert!(policy(512).compile(&PolicyScene::default()).is_ok());
    let error = Error::config("allow and deny have 1025 networks")
        .with_details("1024 are possible: write larger networks instead of their parts");
    assert_eq!(policy(513).compile(&PolicyScene::default()), Err(error));
}

#[test]
fn services_are_named_as_they_are_written() {
    for text in ["tcp/443", "udp/53", "sctp/9", "icmp", "icmpv6", "47"] {
        assert_eq!(service_name(parse_service(text).unwrap().first), text);
    }
}

#[test]
fn networks_and_ports_are_bounded_together() {
    let bounded = |networks: usize, ports: usize| {
        let to = (0..networks).map(|n| format!("20.0.{}.{}", n >> 7, (n * 2) & 255)).collect();
        let ports = Some((0..ports).map(|n| format!("tcp/{}", 2 * n + 1)).collect());
        let allow = vec![PolicyEntry { to, ports }];
        let policies = vec![EgressPolicy { allow, ..EgressPolicy::default() }];
        let compiled = EgressPart { policies, ..EgressPart::default() }.compile();
        compiled.map(drop).map_err(|error| error.to_string())
    };
    for (networks, ports) in [(512, 4), (8, 256), (45, 45)] {
        assert_eq!(bounded(networks, ports), Ok(()), "{networks} x {ports}");
    }
    let pairs = "the egress policy has 2050 pairs of a network and a range of ports; 2048 are \
                 possible: write larger networks instead of parts";
    assert_eq!(bounded(410, 5), Err(pairs.to_owned()));
    let services = "the egress policy has 257 ranges of ports for a network; 256 are possible: \
                    write larger ranges instead of parts";
    assert_eq!(bounded(1, 257), Err(services.to_owned()));
}
