//! Sets of intervals, with counters, and filled by packets; chains at the ingress of a link.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::*;
use crate::netlink::{LinkChange, Netlink};
use crate::netns::Netns;

const SERVICE: [ValueType; 3] = [ValueType::Ipv4Addr, ValueType::InetProto, ValueType::InetService];
const RANGES: NftSet<'_> = T.named_set("ranges", &[ValueType::Ipv4Addr]).with_intervals();
const RANGES6: NftSet<'_> = T.named_set("ranges6", &[ValueType::Ipv6Addr]).with_intervals();
const SERVICES: NftSet<'_> = T.named_set("services", &SERVICE).with_intervals();
const COUNTED: NftSet<'_> = T.named_set("counted", &[ValueType::Ipv4Addr]).with_counters();
const SEEN: NftSet<'_> = T.named_set("seen", &SERVICE).filled_by_packets(16, 600);
const TALKERS: NftSet<'_> =
    T.named_set("packet_senders", &[ValueType::Ipv4Addr]).filled_by_packets(16, 0);
const INPUT: NftChain<'_> = T.named_chain("input").at_filter_hook(NetfilterHook::Input, 0);

const ETH_P_IP: u16 = 0x0800;
/// The length of the headers of IPv4 and UDP in bytes.
const HEADERS: u64 = 28;

fn between(first: impl Into<ElementKey>, last: impl Into<ElementKey>) -> KeyInterval {
    KeyInterval { first: first.into(), last: last.into() }
}

fn addresses(first: &str, last: &str) -> KeyInterval {
    between(ip(first), ip(last))
}

/// Ports of TCP at a range of addresses.
fn services(first: &str, last: &str, ports: [u16; 2]) -> KeyInterval {
    let tcp = TransportProtocol::Tcp;
    between((ip(first), tcp, ports[0]), (ip(last), tcp, ports[1]))
}

fn put(nft: &NftSocket, set: NftSet<'_>, intervals: &[KeyInterval]) {
    let replace = |batch: &mut NftBatch| {
        batch.ensure_object(T).ensure_object(set).flush_set(set).add_intervals(set, intervals);
    };
    nft.commit_batch(one(replace)).unwrap();
}

/// The set as nft lists it, on one line.
fn listed_set(name: &str) -> String {
    nft(&["list", "set", "inet", "t", name]).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A namespace whose loopback interface is up, and a receiver of datagrams to 127.0.0.1.
fn loopback() -> (NftSocket, UdpSocket) {
    let nft = sandbox();
    let own = Netlink::open().unwrap();
    let link = own.require_link("lo").unwrap();
    own.change_link(link.index, LinkChange::new().set_up()).unwrap();
    (nft, UdpSocket::bind("127.0.0.1:0").unwrap())
}

fn send(to: &UdpSocket, payloads: &[&[u8]]) {
    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
    for payload in payloads {
        from.send_to(payload, to.local_addr().unwrap()).unwrap();
    }
}

#[test]
fn intervals_are_listed_as_if_created_by_nft() {
    let nft = sandbox();
    let all = [
        addresses("240.0.0.0", "255.255.255.255"),
        addresses("10.0.0.0", "10.255.255.255"),
        addresses("192.0.2.7", "192.0.2.9"),
        addresses("198.51.100.1", "198.51.100.1"),
    ];
    put(&nft, RANGES, &all);
    let elements =
        "flags interval elements = { 10.0.0.0/8, 192.0.2.7-192.0.2.9, 198.51.100.1, 240.0.0.0/4 }";
    assert!(listed_set("ranges").contains(elements), "{}", listed_set("ranges"));
    put(
        &nft,
        RANGES6,
        &[
            addresses("::", "::ffff"),
            addresses("fd00::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
        ],
    );
    let elements =
        "flags interval elements = { ::/112, fd00::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff }";
    assert!(listed_set("ranges6").contains(elements), "{}", listed_set("ranges6"));
    put(
        &nft,
        SERVICES,
        &[
            services("10.0.0.0", "10.0.0.255", [80, 90]),
            services("10.0.1.1", "10.0.1.1", [443, 443]),
        ],
    );
    let elements = "flags interval elements = { 10.0.0.0/24 . tcp . 80-90, 10.0.1.1 . tcp . 443 }";
    assert!(listed_set("services").contains(elements), "{}", listed_set("services"));
}

#[test]
fn intervals_are_compared_and_replaced_in_one_batch() {
    let nft = sandbox();
    let simple = [addresses("10.0.0.0", "10.0.0.255"), addresses("192.0.2.0", "255.255.255.255")];
    let keyed = [
        services("10.0.0.0", "10.0.0.255", [80, 90]),
        services("10.0.0.0", "10.0.0.255", [443, 443]),
    ];
    assert!(!nft.has_intervals(RANGES, &simple).unwrap(), "there is no set");
    for (set, all, other) in [
        (RANGES, simple, addresses("10.0.0.128", "10.0.1.7")),
        (SERVICES, keyed, services("10.0.0.128", "10.0.1.7", [1, 90])),
    ] {
        put(&nft, set, &all);
        assert!(nft.has_intervals(set, &all).unwrap());
        assert!(nft.has_intervals(set, &[all[1].clone(), all[0].clone()]).unwrap(), "in any order");
        assert!(!nft.has_intervals(set, &all[..1]).unwrap(), "too many");
        assert!(
            !nft.has_intervals(
                set,
                &[&all[..], &[services("1.1.1.1", "1.1.1.1", [1, 1])]].concat()
            )
            .unwrap()
        );
        // Each overlaps the one before.
        put(&nft, set, std::slice::from_ref(&other));
        assert!(nft.has_intervals(set, &[other]).unwrap());
        put(&nft, set, &all);
        assert!(nft.has_intervals(set, &all).unwrap());
        put(&nft, set, &[]);
        assert!(nft.has_intervals(set, &[]).unwrap());
    }
}

#[test]
fn intervals_are_found_while_another_socket_replaces_them() {
    let nft = sandbox();
    let here = Netns::open_current().unwrap();
    let ends = AtomicBool::new(false);
    let (ranges, ports) =
        ([addresses("10.0.0.0", "10.0.0.9")], [services("10.0.0.0", "10.0.0.9", [53, 80])]);
    let replace = |nft: &NftSocket| {
        [(RANGES, &ranges), (SERVICES, &ports)].map(|(set, all)| put(nft, set, all))
    };
    replace(&nft);
    thread::scope(|scope| {
        scope.spawn(|| {
            let nft = here.run_inside(|| NftSocket::open().unwrap()).unwrap();
            while !ends.load(Ordering::Relaxed) {
                replace(&nft);
            }
        });
        let found = (0..2000).filter(|_| {
            nft.has_intervals(RANGES, &ranges).unwrap()
                && nft.has_intervals(SERVICES, &ports).unwrap()
        });
        let found = found.count();
        ends.store(true, Ordering::Relaxed);
        assert_eq!(found, 2000);
    });
}

#[test]
fn two_thousand_intervals_are_several_messages() {
    let nft = sandbox();
    let net = |n: u16| -> IpAddr {
        let [high, low] = n.to_be_bytes();
        [10, high, low, 0].into()
    };
    let simple: Vec<_> = (0..2000).map(|n| between(net(2 * n), net(2 * n))).collect();
    let keyed: Vec<_> = (0..2000)
        .map(|n| {
            between((net(n), TransportProtocol::Udp, n), (net(n), TransportProtocol::Udp, n + 1))
        })
        .collect();
    for (set, all) in [(RANGES, simple), (SERVICES, keyed)] {
        for _ in 0..2 {
            let renew = |batch: &mut NftBatch| {
                batch.ensure_object(T).ensure_object(set).delete_object(set);
                batch.ensure_object(set).add_intervals(set, &all);
            };
            nft.commit_batch(one(renew)).unwrap();
            assert!(nft.has_intervals(set, &all).unwrap());
        }
    }
}

#[test]
fn packets_match_intervals_to_their_ends() {
    let (nft, receiver) = loopback();
    let port = receiver.local_addr().unwrap().port();
    let udp = |first: u16, last: u16| {
        let proto = TransportProtocol::Udp;
        between((ip("127.0.0.0"), proto, first), (ip("127.0.0.1"), proto, last))
    };
    let matches = |rule: NftRule| {
        let drop = |batch: &mut NftBatch| {
            batch.ensure_object(INPUT).flush_chain(INPUT).append_rule(INPUT, &rule.drop());
        };
        nft.commit_batch(one(drop)).unwrap();
        send(&receiver, &[b"x"]);
        receiver.set_nonblocking(true).unwrap();
        receiver.recv(&mut [0; 8]).is_err()
    };
    let daddr = || NftRule::new().ethertype_is(ETH_P_IP).in_set(&[PacketField::IpDaddr], RANGES);
    for (last, expected) in [("127.0.0.0", false), ("127.0.0.1", true), ("255.255.255.255", true)] {
        put(&nft, RANGES, &[addresses("10.0.0.0", last)]);
        assert_eq!(matches(daddr()), expected, "{last}");
    }
    put(&nft, RANGES, &[addresses("127.0.0.2", "255.255.255.255")]);
    assert!(!matches(daddr()));
    let key = [PacketField::IpDaddr, PacketField::L4proto, PacketField::Dport];
    for (first, last, expected) in
        [(1, port - 1, false), (1, port, true), (port, 65535, true), (port + 1, 65535, false)]
    {
        put(&nft, SERVICES, &[udp(first, last)]);
        let rule = NftRule::new().ethertype_is(ETH_P_IP).in_set(&key, SERVICES);
        assert_eq!(matches(rule), expected, "{first}-{last}");
    }
}

#[test]
fn elements_count_the_packets_that_match_them() {
    let (nft, receiver) = loopback();
    let elements = [ip("127.0.0.1"), ip("192.0.2.1")]
        .map(|addr| COUNTED.element_with_key(addr).with_comment("c1"));
    let batch = one(|batch| {
        let rule = NftRule::new().ethertype_is(ETH_P_IP).in_set(&[PacketField::IpDaddr], COUNTED);
        batch
            .ensure_object(T)
            .ensure_object(COUNTED)
            .ensure_object(INPUT)
            .append_rule(INPUT, &rule);
        for element in &elements {
            batch.add_element(element);
        }
    });
    assert!(nft.dump_counters(COUNTED).unwrap().is_empty(), "there is no set");
    nft.commit_batch(batch).unwrap();
    send(&receiver, &[b"four", b"eight..."]);
    let mut found = nft.dump_counters(COUNTED).unwrap();
    found.sort_by_key(|(_, count)| count.packets);
    let [unused, used] = elements;
    let counted = PacketCount { packets: 2, bytes: 2 * HEADERS + 12 };
    assert_eq!(found, [(used, PacketCount::default()), (unused, counted)]);
    assert!(
        listed_set("counted").contains("counter packets 2 bytes 68"),
        "{}",
        listed_set("counted")
    );
}

#[test]
fn packets_add_themselves_up_to_the_limit() {
    const BURST: u32 = 2;
    let (nft, receiver) = loopback();
    let others: Vec<_> = (0..3).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
    let key = [PacketField::IpDaddr, PacketField::L4proto, PacketField::Dport];
    let batch = one(|batch| {
        let rule = NftRule::new().ethertype_is(ETH_P_IP).add_with_limit(
            &key[..1],
            TALKERS,
            PacketLimit { packets: 1, seconds: 60, burst: BURST },
        );
        batch.ensure_object(T).ensure_object(SEEN).ensure_object(TALKERS).ensure_object(INPUT);
        batch.append_rule(INPUT, &rule.update_set(&key, SEEN));
    });
    nft.commit_batch(batch).unwrap();
    assert!(nft.dump_recorded(SEEN).unwrap().is_empty());
    for receiver in [&receiver].into_iter().chain(&others) {
        send(receiver, &[b"x"]);
    }
    let found = nft.dump_recorded(SEEN).unwrap();
    assert_eq!(found.len(), 2, "{found:?}");
    for to in [&receiver, &others[0]] {
        let wanted = ElementKey::from((
            ip("127.0.0.1"),
            TransportProtocol::Udp,
            to.local_addr().unwrap().port(),
        ));
        let RecordedKey { remaining, count, .. } =
            found.iter().find(|found| found.key == wanted).unwrap();
        assert!((500..=600).contains(&remaining.as_secs()), "{remaining:?}");
        assert_eq!(*count, PacketCount { packets: 1, bytes: HEADERS + 1 });
    }
    let of_talker = RecordedKey {
        key: ip("127.0.0.1").into(),
        remaining: Duration::ZERO,
        count: PacketCount::default(),
    };
    assert_eq!(nft.dump_recorded(TALKERS).unwrap(), [of_talker]);
    let text = listed_set("seen");
    assert!(text.contains("size 16 flags dynamic,timeout"), "{text}");
    let rules = listed("input").join("\n");
    assert!(
        rules.contains("add @packet_senders { ip daddr limit rate 1/minute burst 2 packets }"),
        "{rules}"
    );
    assert!(
        rules.contains("update @seen { ip daddr . meta l4proto . th dport timeout 10m counter"),
        "{rules}"
    );
}

#[test]
fn a_chain_at_the_ingress_of_a_link_sees_its_frames() {
    const FRAMES: NftTable<'_> = NftTable::new(TableFamily::Netdev, "f");
    const COUNTER: NftSet<'_> = FRAMES.named_set("counted", &[ValueType::Ipv4Addr]).with_counters();
    let (nft, receiver) = loopback();
    let chain = FRAMES.named_chain("refused").at_ingress_of("lo", 0);
    let element = COUNTER.element_with_key(ip("127.0.0.1"));
    let count = NftRule::new().ethertype_is(ETH_P_IP).in_set(&[PacketField::IpDaddr], COUNTER);
    for _ in 0..2 {
        let batch = one(|batch| {
            batch
                .ensure_object(FRAMES)
                .ensure_object(COUNTER)
                .ensure_object(chain)
                .flush_chain(chain);
            batch
                .ensure_element(&element)
                .append_rule(chain, &count)
                .append_rule(chain, &NftRule::new().drop());
        });
        nft.commit_batch(batch).unwrap();
    }
    let elsewhere = [("lo", 1), ("lo0", 0)];
    let elsewhere =
        elsewhere.map(|(name, at)| FRAMES.named_chain("refused").at_ingress_of(name, at));
    assert!(nft.is_at_hook(chain).unwrap());
    assert!(elsewhere.iter().all(|other| !nft.is_at_hook(*other).unwrap()));
    assert!(ruleset().contains("hook ingress device \"lo\" priority"), "{}", ruleset());
    send(&receiver, &[b"x"]);
    receiver.set_nonblocking(true).unwrap();
    assert!(receiver.recv(&mut [0; 8]).is_err(), "the frame was not dropped");
    let counted = PacketCount { packets: 1, bytes: HEADERS + 1 };
    assert_eq!(nft.dump_counters(COUNTER).unwrap(), [(element, counted)]);
}
