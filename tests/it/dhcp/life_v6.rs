//! The life cycle of an IPv6 lease, and malicious servers.

use std::io::Write;
use std::net::Ipv6Addr;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::fake_v6::{
    ADVERTISE, Fake, REBIND, RELEASE, RENEW, REPLY, REQUEST, SERVER, SOLICIT, Seen, address,
    option, status,
};
use super::world::{World, addresses_v6};
use crate::support::node::{Container, eventually};

const FIVE: &str = "fd00:1::5";
const SIX: &str = "fd00:1::6";
const NO_BINDING: u16 = 3;

/// A server that assigns one address to all clients and extends its lease.
fn generous(seen: &Seen) -> Vec<Vec<u8>> {
    let given = address(FIVE, 5, 6);
    match seen.kind() {
        SOLICIT => vec![seen.answer(ADVERTISE, &given)],
        _ => vec![seen.answer(REPLY, &given)],
    }
}

fn five() -> Ipv6Addr {
    FIVE.parse().unwrap()
}

#[test]
fn a_release_is_repeated_until_it_is_confirmed() {
    let world = World::v6();
    let server = Fake::start(|seen, earlier| match seen.kind() {
        RELEASE if earlier == 0 => vec![],
        _ => generous(seen),
    });
    let _daemon = world.daemon(&[]);
    let (net, container) = (world.net_of("1.1.0", "ipv6"), Container::new());
    let result = net.add(&container);
    let solicit = server.wait(SOLICIT, 0);
    assert!(solicit.from.to_string().starts_with("[fe80::"), "{}", solicit.from);
    assert_eq!((solicit.from.port(), solicit.option(8)), (546, Some(&[0, 0][..])));
    assert_eq!(solicit.option(6), Some(&[0, 23, 0, 24, 0, 82][..]));
    assert_eq!((solicit.address(), solicit.option(14)), (None, None), "no Rapid Commit");
    let duid = solicit.option(1).unwrap().to_vec();
    assert_eq!((duid.len(), &duid[..2]), (18, &[0, 4][..]));
    let renewal = server.wait(RENEW, 0);
    assert_eq!((renewal.option(2), renewal.address()), (Some(SERVER), Some(five())));
    assert_eq!((renewal.option(1), renewal.iaid()), (Some(&duid[..]), solicit.iaid()));
    server.wait(RENEW, 2);
    for pair in server.seen(RENEW).windows(2) {
        // A lost reply would cause a retransmission with the same transaction id.
        assert_ne!(pair[0].xid(), pair[1].xid());
        assert!(pair[1].at - pair[0].at > Duration::from_millis(900), "{pair:?}");
    }
    assert_eq!((server.seen(SOLICIT).len(), server.seen(REBIND).len()), (1, 0));
    assert_eq!(addresses_v6(&container), ["fd00:1::5/128"]);
    net.check(&container, &result).ok();
    net.del(&container);
    let release = server.wait(RELEASE, 1);
    assert_eq!((release.option(2), release.address()), (Some(SERVER), Some(five())));
    assert_eq!(release.xid(), server.seen(RELEASE)[0].xid());
    assert_eq!(server.seen(RELEASE).len(), 2, "it was confirmed");
}

#[test]
fn the_server_with_the_highest_preference_is_chosen() {
    let world = World::v6();
    let server = Fake::start(|seen, _| {
        let offer = |preference, server: &[u8], addr| {
            let preference = option(7, &[preference]);
            seen.answer_of(ADVERTISE, server, (0, 0), &address(addr, 900, 900), &preference)
        };
        match seen.kind() {
            SOLICIT => vec![offer(1, SERVER, FIVE), offer(2, &[0, 1, 0, 0, 0, 2], SIX)],
            _ => vec![seen.answer_of(REPLY, &[0, 1, 0, 0, 0, 2], (0, 0), &address(SIX, 9, 9), &[])],
        }
    });
    let _daemon = world.daemon(&[]);
    let container = world.wired("v1");
    let result = world.alone_of("ipv6").add(&container);
    assert_eq!(result["ips"][0]["address"], "fd00:1::6/128");
    assert_eq!(server.seen(REQUEST)[0].option(2), Some(&[0, 1, 0, 0, 0, 2][..]));
    let waited = server.seen(REQUEST)[0].at - server.seen(SOLICIT)[0].at;
    assert!(waited >= Duration::from_secs(1), "{waited:?}: others may answer");
    world.alone_of("ipv6").del(&container);
}

#[test]
fn a_lease_lost_by_the_server_is_requested_again() {
    let world = World::v6();
    let server = Fake::start(|seen, earlier| match seen.kind() {
        RENEW if earlier == 0 => vec![seen.answer(REPLY, &status(NO_BINDING))],
        _ => generous(seen),
    });
    let _daemon = world.daemon(&[]);
    let (net, container) = (world.net_of("1.1.0", "ipv6"), Container::new());
    let result = net.add(&container);
    let index = container.ip("link show dev eth0")[0]["ifindex"].clone();
    container.sh("ip -6 route add fd00:77::/64 via fe80::1 dev eth0");
    server.wait(RENEW, 1);
    let request = &server.seen(REQUEST)[1];
    assert_eq!((request.option(2), request.address()), (Some(SERVER), Some(five())));
    assert_eq!(server.seen(SOLICIT).len(), 1);
    assert_eq!(addresses_v6(&container), ["fd00:1::5/128"]);
    assert!(container.sh("ip -6 route").contains("fd00:77::/64 via fe80::1"));
    assert_eq!(container.ip("link show dev eth0")[0]["ifindex"], index);
    assert!(
        !world.daemon_log().contains("the server refuses to renew the lease"),
        "{}",
        world.daemon_log()
    );
    net.check(&container, &result).ok();
    net.del(&container);
}

#[test]
fn a_withdrawn_address_is_replaced_on_the_interface() {
    for renumbered in [true, false] {
        let world = World::v6();
        let _server = Fake::start(move |seen, earlier| {
            let six = [address(FIVE, 0, 0), address(SIX, 900, 900)].concat();
            match seen.kind() {
                RENEW if renumbered => vec![seen.answer(REPLY, &six)],
                RENEW if earlier == 0 => vec![seen.answer(REPLY, &address(FIVE, 0, 0))],
                SOLICIT if earlier > 0 => vec![seen.answer(ADVERTISE, &address(SIX, 900, 900))],
                REQUEST if earlier > 0 => vec![seen.answer(REPLY, &address(SIX, 900, 900))],
                _ => generous(seen),
            }
        });
        let _daemon = world.daemon(&[]);
        let (net, container) = (world.net_of("1.1.0", "ipv6"), Container::new());
        let result = net.add(&container);
        container.sh("ip -6 route add fd00:77::/64 via fe80::1 dev eth0");
        eventually("the new address did not come", || {
            addresses_v6(&container) == ["fd00:1::6/128"]
        });
        assert!(container.sh("ip -6 route").contains("fd00:77::/64 via fe80::1"));
        let lost = world.daemon_log().contains("refused by the server: it takes the address back");
        assert_eq!(lost, !renumbered, "{}", world.daemon_log());
        let error = net.check(&container, &result).error();
        let msg =
            "error calling DHCP.Check: the lease for c1/net/eth0 (ipv6) has the address fd00:1::6";
        assert_eq!(error.msg, msg);
        net.del(&container);
    }
}

#[test]
fn an_expired_address_is_replaced_on_the_interface() {
    let world = World::v6();
    let server = Fake::start(|seen, earlier| match seen.kind() {
        RENEW | REBIND => vec![],
        SOLICIT if (1..3).contains(&earlier) => vec![],
        SOLICIT if earlier > 2 => vec![seen.answer(ADVERTISE, &address(SIX, 900, 900))],
        REQUEST if earlier > 0 => vec![seen.answer(REPLY, &address(SIX, 900, 900))],
        _ => generous(seen),
    });
    let _daemon = world.daemon(&[]);
    let (net, container) = (world.net_of("1.1.0", "ipv6"), Container::new());
    let result = net.add(&container);
    eventually("an expired address stays", || addresses_v6(&container).is_empty());
    assert!(!server.seen(RENEW).is_empty());
    let rebinding = server.wait(REBIND, 0);
    assert_eq!((rebinding.option(2), rebinding.address()), (None, Some(five())));
    let error = net.check(&container, &result).error();
    assert!(error.msg.ends_with("the lease for c1/net/eth0 (ipv6) was lost"), "{error:?}");
    eventually("there is no new address", || addresses_v6(&container) == ["fd00:1::6/128"]);
    net.del(&container);
    assert_eq!(server.wait(RELEASE, 0).address(), Some(SIX.parse().unwrap()));
}

#[test]
fn killing_the_plugin_or_del_ends_an_add_in_progress() {
    let world = World::v6();
    let server = Fake::start(|seen, earlier| match seen.kind() {
        SOLICIT if earlier < 3 => vec![],
        REQUEST => vec![],
        _ => generous(seen),
    });
    let _daemon = world.daemon(&["-timeout", "200ms", "-resendmax", "200ms"]);
    let container = world.wired("v1");
    let net = world.alone_of("ipv6");
    let mut child = net.on("ADD", &container).command().spawn().unwrap();
    child.stdin.take().unwrap().write_all(net.conf.to_string().as_bytes()).unwrap();
    server.wait(SOLICIT, 1);
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("the search goes on", || {
        let before = server.seen(SOLICIT).len();
        std::thread::sleep(Duration::from_millis(600));
        server.seen(SOLICIT).len() == before
    });
    assert!(world.records().is_empty());

    std::thread::scope(|scope| {
        let adding = scope.spawn(|| net.on("ADD", &container).error());
        server.wait(REQUEST, 0);
        net.del(&container);
        let error = adding.join().unwrap();
        assert_eq!(error.msg, "error calling DHCP.Allocate: context canceled");
    });
    // The server may have assigned the address already, so DEL releases it.
    assert_eq!(server.wait(RELEASE, 0).address(), Some(five()));
    assert!(world.records().is_empty());
}

#[test]
fn the_client_id_does_not_depend_on_the_mac() {
    let world = World::v6();
    let server = Fake::start(|seen, _| generous(seen));
    let _daemon = world.daemon(&[]);
    let (net, container) = (world.net_of("1.1.0", "ipv6"), Container::new());
    net.add(&container);
    // As the tuning plugin does later in a chain; the link-local address changes too.
    container.sh("ip link set eth0 down");
    container.sh("ip link set eth0 address 02:00:00:00:00:42");
    container.sh("ip link set eth0 up");
    let from = |n: usize| server.wait(RENEW, n).from.to_string();
    eventually("it is not renewed", || from(server.seen(RENEW).len()).contains("::ff:fe00:42%"));
    assert_eq!(addresses_v6(&container), ["fd00:1::5/128"]);
    let renewals = server.seen(RENEW);
    assert!(renewals.iter().all(|m| m.option(1) == server.seen(SOLICIT)[0].option(1)));
    net.del(&container);
}

#[test]
fn hostile_options_are_ignored() {
    let world = World::v6();
    let _server = Fake::start(|seen, _| {
        let bad = [
            address("ff02::1", 9, 9),
            address("::1", 9, 9),
            address("fe80::9", 9, 9),
            address("::ffff:10.0.0.1", 9, 9),
            address(SIX, 10, 9),
            address(FIVE, 0xffff_ffff, 0xffff_ffff),
        ];
        let extra = [
            option(7, &[255]),
            option(23, &[&[0xff; 7][..]].concat()),
            option(24, b"\x14evil\nnameserver 6.6.\x00\xc0\x00\xc0\x02"),
            option(82, &[0, 0, 0, 1]),
            option(65535, &[7; 900]),
        ];
        let kind = if seen.kind() == SOLICIT { ADVERTISE } else { REPLY };
        vec![seen.answer_of(
            kind,
            SERVER,
            (0xffff_ffff, 0xffff_ffff),
            &bad.concat(),
            &extra.concat(),
        )]
    });
    let mut daemon = world.daemon(&[]);
    let container = world.wired("v1");
    let result = world.alone_of("ipv6").add(&container);
    assert_eq!(result["ips"], json!([{"address": "fd00:1::5/128"}]));
    assert_eq!(result["dns"], Value::Null);
    assert!(world.daemon_log().contains("for ever"), "{}", world.daemon_log());
    world.alone_of("ipv6").del(&container);
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
}

#[test]
fn noise_neither_prevents_a_lease_nor_stops_the_daemon() {
    let world = World::v6();
    // Before each reply: truncated, oversized and random packets, and replies to another client or
    // transaction id.
    let server = Fake::start(|seen, earlier| {
        let good = generous(seen).remove(0);
        let mut noise: Vec<Vec<u8>> = (0..good.len()).map(|n| good[..n].to_vec()).collect();
        for at in 0..8 {
            let mut bad = good.clone();
            bad[at] ^= 0xff;
            noise.push(bad);
        }
        noise.push([&good[..], &[0, 3, 0xff, 0xff, 1, 2]].concat());
        noise.push([&good[..4], &[0xff; 1400]].concat());
        noise.push([&good[..4], &option(13, &[b'x'; 1900])].concat());
        // Without a Server Identifier, without a Client Identifier, of another server.
        noise.push([&good[..4], &option(1, seen.option(1).unwrap())].concat());
        noise.push([&good[..4], &option(2, SERVER)].concat());
        let mut state = u32::try_from(earlier).unwrap() + 1;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.to_be_bytes()[0]
        };
        for _ in 0..200 {
            let random: Vec<u8> = (0..300).map(|_| byte()).collect();
            noise.push([&good[..4], &random].concat());
            noise.push(random);
        }
        noise.push(good);
        noise
    });
    let mut daemon = world.daemon(&[]);
    let (net, container) = (world.net_of("1.1.0", "ipv6"), Container::new());
    let result = net.add(&container);
    assert_eq!(addresses_v6(&container), ["fd00:1::5/128"]);
    server.wait(RENEW, 1);
    net.check(&container, &result).ok();
    net.del(&container);
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
}
