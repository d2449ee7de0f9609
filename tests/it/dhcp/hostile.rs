//! Malicious servers, and invalid packets.

use std::net::UdpSocket;

use super::fake::{ACK, DISCOVER, Fake, OFFER, REQUEST};
use super::world::{World, addresses};
use crate::support::node::Container;

const FIVE: [u8; 4] = [192, 168, 1, 5];

/// A server that adds `extra` options to its DHCPACK.
fn acknowledging(extra: &'static [(u8, &'static [u8])]) -> Fake {
    Fake::start(move |seen, _| match seen.kind() {
        DISCOVER => vec![seen.answer(OFFER, FIVE, &[])],
        REQUEST => vec![seen.answer(ACK, FIVE, extra)],
        _ => vec![],
    })
}

#[test]
fn an_acknowledgement_without_a_mask_is_refused() {
    for mask in [&[][..], &[255, 0, 255, 0], &[0, 0, 0, 0], &[255]] {
        let world = World::new();
        let _server = Fake::start(move |seen, _| match seen.kind() {
            DISCOVER => vec![seen.answer(OFFER, FIVE, &[])],
            REQUEST => vec![seen.answer(ACK, FIVE, &[(1, mask)])],
            _ => vec![],
        });
        let _daemon = world.daemon(&[]);
        let container = world.wired("v1");
        let error = world.alone("1.1.0").on("ADD", &container).error();
        let msg = "error calling DHCP.Allocate: DHCP option Subnet Mask not found in DHCPACK";
        assert_eq!(error.brief(), (999, msg), "{mask:?}");
        assert!(world.records().is_empty());
    }
}

#[test]
fn hostile_options_are_ignored() {
    let world = World::new();
    let _server = acknowledging(&[
        (3, &[192, 168, 1]),
        (6, &[8, 8, 8, 8, 9]),
        (15, b"evil\nnameserver 6.6.6.6"),
        (26, &[0, 1]),
        (33, &[224, 0, 0, 1, 1, 1, 1, 1]),
        (51, &[0, 0, 0, 0]),
        (58, &[255, 255, 255, 255]),
        (119, &[0xc0, 0, 0xc0, 2, 1, b'a', 0xc0, 4]),
        (121, &[200, 1, 2, 3]),
    ]);
    let mut daemon = world.daemon(&[]);
    let container = world.wired("v1");
    let result = world.alone("1.1.0").add(&container);
    assert_eq!(result["ips"][0]["address"], "192.168.1.5/24");
    assert_eq!(result["routes"], serde_json::Value::Null);
    assert_eq!(result["dns"], serde_json::json!({"nameservers": ["8.8.8.8"]}));
    world.alone("1.1.0").del(&container);
    daemon.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
}

#[test]
fn noise_on_the_link_does_not_prevent_a_lease() {
    let world = World::new();
    // Before each reply: truncated, oversized and random packets, and replies to another client or
    // transaction id.
    let server = Fake::start(move |seen, earlier| {
        let kind = match seen.kind() {
            DISCOVER => OFFER,
            REQUEST => ACK,
            _ => return vec![],
        };
        let good = seen.answer(kind, FIVE, &[(51, &[0, 0, 14, 16])]);
        let mut noise: Vec<Vec<u8>> =
            (0..good.len()).step_by(3).map(|n| good[..n].to_vec()).collect();
        for at in [0, 1, 2, 4, 28, 236, 242] {
            let mut bad = good.clone();
            bad[at] ^= 0xff;
            noise.push(bad);
        }
        let mut overlong = good.clone();
        overlong.pop();
        overlong.extend([200, 255, 1, 2, 3]);
        noise.push(overlong);
        noise.push([&good[..240], &[43, 255][..], &[7; 255], &vec![0; 1100]].concat());
        let mut state = u32::try_from(earlier).unwrap() + 1;
        for _ in 0..200 {
            noise.push(
                (0..300)
                    .map(|_| {
                        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        state.to_be_bytes()[0]
                    })
                    .collect(),
            );
        }
        noise.push(good);
        noise
    });
    let mut daemon = world.daemon(&[]);
    let (net, container) = (world.net("1.1.0"), Container::new());
    let result = net.add(&container);
    assert_eq!(addresses(&container), ["192.168.1.5/24"]);
    assert!(server.seen(DISCOVER).len() <= 2);
    net.check(&container, &result).ok();
    net.del(&container);
    daemon.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
}

#[test]
fn a_flood_neither_blocks_other_leases_nor_fills_memory() {
    let world = World::new();
    let flooding = UdpSocket::bind("192.168.1.1:0").unwrap();
    flooding.set_broadcast(true).unwrap();
    let server = Fake::start(move |seen, _| match seen.kind() {
        // The client with the container id c1 receives everything but a valid offer.
        DISCOVER if seen.option(61).is_some_and(|id| id.starts_with(b"\0c1/")) => {
            let mut wrong = seen.answer(OFFER, FIVE, &[]);
            wrong[4] ^= 1;
            let flooding = flooding.try_clone().unwrap();
            std::thread::spawn(move || {
                for _ in 0..50_000 {
                    drop(flooding.send_to(&wrong, "255.255.255.255:68"));
                }
            });
            vec![]
        }
        DISCOVER => vec![seen.answer(OFFER, FIVE, &[])],
        REQUEST => vec![seen.answer(ACK, FIVE, &[(51, &[0, 0, 14, 16])])],
        _ => vec![],
    });
    let daemon = world.daemon(&["-timeout", "1s", "-resendmax", "1s", "-resendtimeout", "8s"]);
    let (one, two) = (world.wired("v1"), world.wired("v2"));
    let net = world.alone("1.1.0");
    let rss = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.id())).unwrap();
        let line = status.lines().find(|l| l.starts_with("VmRSS")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let before = rss();
    std::thread::scope(|scope| {
        let add = net.on("ADD", &one);
        let first = scope.spawn(move || add.error());
        server.wait("no question", |m| m.kind() == DISCOVER);
        net.call("ADD", "c2").netns(&two.path()).result();
        let error = first.join().unwrap();
        assert_eq!(error.msg, "error calling DHCP.Allocate: no more tries");
    });
    let grown = rss().saturating_sub(before);
    assert!(grown < 8_000, "{grown} kB more");
    net.call("DEL", "c2").netns(&two.path()).ok();
}

#[test]
fn unusable_offers_are_ignored() {
    let world = World::new();
    let server = Fake::start(|seen, _| match seen.kind() {
        DISCOVER => vec![
            seen.answer(OFFER, [0; 4], &[]),
            seen.answer(OFFER, [255; 4], &[]),
            seen.answer(OFFER, [224, 0, 0, 1], &[]),
            seen.answer(OFFER, [192, 168, 1, 9], &[(54, &[])]),
            seen.answer(OFFER, FIVE, &[]),
        ],
        REQUEST => vec![
            seen.answer(ACK, FIVE, &[(54, &[6, 6, 6, 6])]),
            seen.answer(ACK, [192, 168, 1, 66], &[]),
            seen.answer(ACK, FIVE, &[(51, &[0, 0, 14, 16])]),
        ],
        _ => vec![],
    });
    let _daemon = world.daemon(&[]);
    let container = world.wired("v1");
    let result = world.alone("1.1.0").add(&container);
    assert_eq!(result["ips"][0]["address"], "192.168.1.5/24");
    assert_eq!(server.seen(REQUEST)[0].option(50), Some(&FIVE[..]));
    world.alone("1.1.0").del(&container);
}
