//! The program against a second, naive evaluation of the rules, on generated policies and frames.

mod frames;
mod interpreter;
mod kernel;
mod naive;

use std::net::IpAddr;

use self::frames::{BRIDGE, FrameGenerator, MAC, Packet, numbered_ip};
use self::interpreter::run_program;
use super::*;
use crate::dhcp::timing::RandomGenerator;
use cni::error::ErrorCode;

/// A policy that owns its parts.
#[derive(Debug, Default)]
struct OwnedPolicy {
    allowed: AllowedTraffic,
    served: Vec<ServiceRange>,
    routers: Vec<IpAddr>,
    /// `None`: all that is allowed.
    found: Option<AllowedTraffic>,
    /// `None`: all that is found.
    neighbours: Option<AllowedTraffic>,
    sources: Option<Vec<IpAddr>>,
    bridge: Option<MacAddress>,
}

impl OwnedPolicy {
    fn guard(&self) -> GuardPolicy<'_> {
        GuardPolicy {
            mac: MAC,
            allowed: &self.allowed,
            served: &self.served,
            routers: &self.routers,
            found: self.found.as_ref().unwrap_or(&self.allowed),
            neighbours: self.neighbours.as_ref().or(self.found.as_ref()).unwrap_or(&self.allowed),
            sources: self.sources.as_deref(),
            bridge: self.bridge,
        }
    }

    fn compile(&self) -> ProgramFilter {
        compile_filter(&self.guard()).unwrap()
    }
}

fn service(protocol: u32, port: u32) -> ServiceRange {
    let first = protocol << 16 | port;
    ServiceRange { first, last: first }
}

fn protocol(number: u32) -> ServiceRange {
    ServiceRange { first: number << 16, last: number << 16 | 0xffff }
}

fn range(first: &str, last: &str, services: &[ServiceRange]) -> AllowedRange {
    let number = |text: &str| numbered_ip(text.parse().unwrap());
    AllowedRange { first: number(first), last: number(last), services: services.to_vec() }
}

/// Networks, single addresses and both ends of each family, with all kinds of services.
fn sample_policy() -> OwnedPolicy {
    let web = [service(6, 80), service(6, 443), service(17, 443)];
    let ports = [ServiceRange { first: service(6, 8000).first, last: service(6, 8100).first }];
    let v4 = vec![
        range("0.0.0.0", "0.0.0.0", &[protocol(1)]),
        range("10.0.0.0", "10.0.255.255", &web),
        range("10.1.0.0", "10.1.0.255", &[ServiceRange::ALL]),
        range("10.1.1.0", "10.1.1.0", &ports),
        range("10.1.1.1", "10.1.1.1", &[protocol(1), service(132, 5), protocol(255)]),
        range("198.51.100.7", "198.51.100.7", &web),
        range("255.255.255.255", "255.255.255.255", &[service(17, 67)]),
    ];
    let v6 = vec![
        range("2001:db8::", "2001:db8:0:ffff:ffff:ffff:ffff:ffff", &web),
        range("2001:db8:1::5", "2001:db8:1::5", &[protocol(58), service(136, 9)]),
        range("2001:db8:1::6", "2001:db8:1:1::", &ports),
        range("2001:db8:2:0:1::", "2001:db8:2:0:1:ffff:ffff:ffff", &[ServiceRange::ALL]),
        range("2001:db8:2:0:2::1", "2001:db8:2:0:2:0:1:0", &[service(33, 1)]),
        range("ffff::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", &[service(17, 546)]),
    ];
    let served = vec![protocol(1), service(6, 8080), service(17, 53)];
    let routers =
        ["10.88.0.1", "2001:db8:9::1", "fe80::1"].map(|text| text.parse().unwrap()).to_vec();
    OwnedPolicy { allowed: AllowedTraffic { v4, v6 }, served, routers, ..OwnedPolicy::default() }
}

/// The policy of a container at a bridge, with two addresses: every second allowed range is on its
/// own link, and every second one of those is a neighbour's.
fn at_bridge(policy: OwnedPolicy) -> OwnedPolicy {
    let part = |ranges: &[AllowedRange], step| ranges.iter().step_by(step).cloned().collect();
    let [found, neighbours] = [2, 4].map(|step| AllowedTraffic {
        v4: part(&policy.allowed.v4, step),
        v6: part(&policy.allowed.v6, step),
    });
    let sources = ["10.88.0.2", "2001:db8:9::5"].map(|text| text.parse().unwrap()).to_vec();
    let (found, neighbours) = (Some(found), Some(neighbours));
    OwnedPolicy { found, neighbours, sources: Some(sources), bridge: Some(BRIDGE), ..policy }
}

/// Up to three of the services, or all; sorted.
fn random_services(random: &mut RandomGenerator) -> Vec<ServiceRange> {
    let all = [
        protocol(1),
        service(6, 80),
        service(6, 443),
        service(17, 53),
        protocol(58),
        service(132, 0),
    ];
    match random.next_number() % 8 {
        0 => vec![ServiceRange::ALL],
        1 => all.to_vec(),
        at => all.iter().skip(at as usize - 2).step_by(2).copied().collect(),
    }
}

/// Up to six ranges of addresses of so many bits, often adjacent, often at the ends.
fn random_ranges(random: &mut RandomGenerator, width: u32) -> Vec<AllowedRange> {
    let mut number =
        |most: u32| u128::from(random.next_number() % 3) << (random.next_number() % most);
    let distances: Vec<_> = (0..6).map(|_| (number(width - 2), number(width - 2))).collect();
    let mut found = Vec::new();
    let (mut next, largest) = (0_u128, u128::MAX >> (128 - width));
    for (gap, more) in distances {
        let first = next.saturating_add(gap).min(largest);
        let last = first.saturating_add(more).min(largest);
        found.push(AllowedRange { first, last, services: random_services(random) });
        if last == largest {
            break;
        }
        next = last + 1;
    }
    found
}

fn random_policy(random: &mut RandomGenerator) -> OwnedPolicy {
    let allowed = AllowedTraffic { v4: random_ranges(random, 32), v6: random_ranges(random, 128) };
    let (served, routers) = (random_services(random), sample_policy().routers);
    let policy = OwnedPolicy { allowed, served, routers, ..OwnedPolicy::default() };
    if random.next_number().is_multiple_of(2) { at_bridge(policy) } else { policy }
}

/// Compares both judgements of a frame; returns whether the frame passes.
fn judge(policy: &OwnedPolicy, filter: &ProgramFilter, frame: &[u8]) -> bool {
    let passes = match run_program(&filter.first, frame) {
        TC_ACT_UNSPEC => {
            let result = run_program(&filter.program, frame);
            assert!([PASS, DROP].contains(&result), "{result}: {frame:02x?}");
            result == PASS
        }
        result => {
            assert_eq!(result, TC_ACT_SHOT, "{frame:02x?}");
            false
        }
    };
    assert_eq!(passes, naive::passes(&policy.guard(), frame), "{frame:02x?}\n{policy:?}");
    passes
}

fn compare(policy: &OwnedPolicy, seed: u64, count: usize) {
    let filter = policy.compile();
    let mut frames = FrameGenerator::new(&policy.guard(), seed);
    let mut passed = 0;
    for at in 0..count {
        let frame = frames.next_frame();
        passed += usize::from(judge(policy, &filter, &frame));
        if at % 16 == 0 {
            for end in 0..frame.len() {
                judge(policy, &filter, &frame[..end]);
            }
        }
    }
    // The frames are neither all good nor all bad.
    assert!(passed > count / 50 && passed < count, "{passed} of {count}: {policy:?}");
}

#[test]
fn the_sample_is_judged_as_by_the_rules() {
    compare(&sample_policy(), 1, 60_000);
    compare(&OwnedPolicy { served: vec![ServiceRange::ALL], ..sample_policy() }, 2, 5000);
    compare(&OwnedPolicy { served: Vec::new(), routers: Vec::new(), ..sample_policy() }, 3, 5000);
    compare(&OwnedPolicy { allowed: AllowedTraffic::default(), ..sample_policy() }, 4, 5000);
    compare(&at_bridge(sample_policy()), 5, 60_000);
    compare(
        &at_bridge(OwnedPolicy { served: vec![ServiceRange::ALL], ..sample_policy() }),
        6,
        5000,
    );
    compare(&OwnedPolicy { bridge: None, ..at_bridge(sample_policy()) }, 7, 5000);
}

#[test]
fn generated_policies_are_judged_as_by_the_rules() {
    let mut random = RandomGenerator::from_seed(17);
    for seed in 0..150 {
        compare(&random_policy(&mut random), seed, 400);
    }
}

#[test]
fn each_boundary_of_an_address_is_exact() {
    let policy = sample_policy();
    let filter = policy.compile();
    let ranges = policy
        .allowed
        .v4
        .iter()
        .map(|range| (range, 32))
        .chain(policy.allowed.v6.iter().map(|r| (r, 128)));
    for (allowed, width) in ranges {
        let largest = u128::MAX >> (128 - width);
        for addr in [
            allowed.first.wrapping_sub(1),
            allowed.first,
            allowed.last,
            allowed.last.wrapping_add(1),
        ] {
            if addr > largest {
                continue;
            }
            for port in
                [0, 1, 5, 9, 67, 79, 80, 81, 442, 443, 444, 546, 7999, 8000, 8100, 8101, 65535]
            {
                for protocol in [6, 17, 132, 136, 33, 1, 58, 255, 0] {
                    let packet = Packet { protocol, port, ..Packet::to_number(addr, width == 32) };
                    judge(&policy, &filter, &packet.to_frame());
                }
            }
        }
    }
}

#[test]
fn single_frames_have_the_verdicts_of_the_rules() {
    let policy = sample_policy();
    let filter = policy.compile();
    let verdict = |packet: Packet| judge(&policy, &filter, &packet.to_frame());
    let to = |addr: &str, protocol: u8, port: u16| Packet { protocol, port, ..Packet::to(addr) };
    for (packet, passes) in [
        (to("10.0.3.4", 6, 443), true),
        (to("10.0.3.4", 6, 444), false),
        (to("10.0.3.4", 17, 80), false),
        (Packet { mac: MacAddress([2; 6]), ..to("10.0.3.4", 6, 443) }, false),
        (Packet { ethertype: Some(0x88cc), ..to("10.0.3.4", 6, 443) }, false),
        (Packet { fragment: 0x2000, ..to("10.0.3.4", 6, 444) }, false),
        (Packet { fragment: 0x2001, ..to("10.0.3.4", 6, 444) }, true),
        (Packet { fragment: 1, source_port: 8080, ..to("192.0.2.1", 6, 444) }, false),
        (Packet { options: 40, ..to("10.0.3.4", 6, 443) }, true),
        (Packet { options: 40, ..to("10.0.3.4", 6, 444) }, false),
        // Replies, and a request from a served port.
        (Packet { source_port: 8080, flags: 0x12, ..to("192.0.2.1", 6, 5000) }, true),
        (Packet { source_port: 8080, flags: 0x10, ..to("192.0.2.1", 6, 5000) }, true),
        (Packet { source_port: 8080, flags: 0x04, ..to("192.0.2.1", 6, 5000) }, true),
        (Packet { source_port: 9, flags: 0x10, ..to("192.0.2.1", 6, 5000) }, true),
        (Packet { source_port: 8080, flags: 0x01, ..to("192.0.2.1", 6, 5000) }, false),
        (Packet { source_port: 8080, flags: 0x02, ..to("192.0.2.1", 6, 5000) }, false),
        (Packet { source_port: 8080, flags: 0x02, ..to("10.0.3.4", 6, 443) }, true),
        (Packet { source_port: 53, ..to("2001:db8:9::9", 17, 5000) }, true),
        (to("192.0.2.1", 1, 0), true),
        (to("2001:db8:1::5", 58, 0), true),
        (to("2001:db8:1::4", 58, 0), false),
        (to("2001:db8:1::5", 44, 0), true),
        (to("2001:db8:1::4", 44, 0), false),
    ] {
        assert_eq!(verdict(packet.clone()), passes, "{packet:?}");
    }
}

#[test]
fn the_link_of_ipv6_works_without_entries() {
    let policy = OwnedPolicy { allowed: AllowedTraffic::default(), ..sample_policy() };
    let filter = policy.compile();
    for (to, kind, target, passes) in [
        ("ff02::2", 133, "::", true),
        ("2001:db8:9::1", 133, "::", false),
        ("ff02::1:ff00:1", 135, "2001:db8:9::1", true),
        ("ff02::1:ff00:1", 135, "2001:db8:9::2", false),
        ("ff02::1:ff00:1", 135, "fe80::7", true),
        ("2001:db8:9::1", 135, "2001:db8:9::1", true),
        ("2001:db8:9::2", 135, "2001:db8:9::2", false),
        ("fe80::7", 136, "fe80::8", true),
        ("ff02::1", 136, "fe80::8", true),
        ("2001:db8:9::2", 136, "fe80::8", true),
        ("ff02::16", 143, "::", true),
        ("ff02::1", 134, "::", false),
        ("ff05::1:3", 143, "::", false),
    ] {
        let packet =
            Packet { protocol: 58, icmp: kind, target: target.parse().unwrap(), ..Packet::to(to) };
        assert_eq!(judge(&policy, &filter, &packet.to_frame()), passes, "{packet:?}");
        let routed = Packet { hop_limit: 254, ..packet.clone() };
        assert_eq!(
            judge(&policy, &filter, &routed.to_frame()),
            kind == 143 && passes,
            "{routed:?}"
        );
        let duplicate = Packet { from_unspecified: true, ..packet };
        // The policy binds no sources.
        let detects = passes || (kind == 135 && to.starts_with("ff02"));
        assert_eq!(judge(&policy, &filter, &duplicate.to_frame()), detects, "{duplicate:?}");
    }
    let report = Packet { protocol: 0, icmp: 143, hop_limit: 1, ..Packet::to("ff02::16") };
    assert!(judge(&policy, &filter, &report.to_frame()));
    assert!(!judge(&policy, &filter, &Packet { icmp: 128, ..report }.to_frame()));
}

#[test]
fn no_end_of_a_frame_lets_it_pass() {
    let policy = sample_policy();
    let filter = policy.compile();
    let reply = Packet { protocol: 6, source_port: 8080, flags: 0x10, ..Packet::to("192.0.2.1") };
    let solicitation = Packet { protocol: 58, icmp: 135, ..Packet::to("ff02::1:ff00:1") };
    let web = |addr| Packet { protocol: 6, port: 443, ..Packet::to(addr) };
    let least: [(Packet, usize); 11] = [
        (web("10.0.3.4"), 14 + 20 + 14),
        (Packet { options: 40, ..web("10.0.3.4") }, 14 + 60 + 14),
        (web("2001:db8::1"), 14 + 40 + 14),
        (Packet { fragment: 9, ..web("10.0.3.4") }, 14 + 20),
        (Packet { protocol: 1, ..Packet::to("10.1.0.1") }, 14 + 20 + 1),
        (reply.clone(), 14 + 20 + 14),
        (Packet { options: 12, ..reply }, 14 + 32 + 14),
        (Packet { target: "fe80::1".parse().unwrap(), ..solicitation.clone() }, 14 + 40 + 24),
        (Packet { from_unspecified: true, ..solicitation }, 14 + 40 + 24),
        (Packet { protocol: 0, icmp: 143, ..Packet::to("ff02::16") }, 14 + 40 + 9),
        (Packet { arp: Some(1), ..Packet::to("10.88.0.1") }, 14 + 28),
    ];
    for (packet, least) in least {
        let frame = packet.to_frame();
        for end in 0..=frame.len() {
            assert_eq!(judge(&policy, &filter, &frame[..end]), end >= least, "{end} of {packet:?}");
        }
    }
}

/// So many networks of IPv4, each with a service of its own if `distinct`.
fn networks(count: u32, distinct: bool) -> OwnedPolicy {
    let network = |at: u32| {
        let first = u128::from(0x0a00_0000 + at * 512);
        let services = vec![service(6, if distinct { 1000 + at } else { 443 })];
        AllowedRange { first, last: first + 255, services }
    };
    let allowed = AllowedTraffic { v4: (0..count).map(network).collect(), v6: Vec::new() };
    OwnedPolicy { allowed, ..OwnedPolicy::default() }
}

#[test]
fn a_hundred_networks_need_some_hundred_instructions() {
    let lengths = [networks(0, false), networks(100, false), networks(100, true)]
        .map(|policy| policy.compile().program.len());
    assert_eq!(lengths, [213, 421, 821]);
    let mut many = networks(500, true);
    many.routers = sample_policy().routers;
    compare(&many, 5, 3000);
}

#[test]
fn a_policy_beyond_the_limit_is_refused() {
    let error = compile_program(&networks(3000, false).guard()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::INVALID_CONFIG);
    assert_eq!(error.message(), "the egress policy needs a filter of 6282 instructions of 4000");
    assert!(error.details().contains("larger networks"), "{error}");
}
