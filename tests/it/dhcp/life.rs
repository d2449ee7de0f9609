//! The life cycle of a lease: renewing, rebinding, refusal, expiry.

use std::net::Ipv4Addr;
use std::time::Duration;

use serde_json::json;

use super::fake::{ACK, DISCOVER, Fake, NAK, OFFER, RELEASE, REQUEST, Seen};
use super::world::{World, addresses};
use crate::support::node::{Container, eventually};

const FIVE: [u8; 4] = [192, 168, 1, 5];
const SIX: [u8; 4] = [192, 168, 1, 6];
const ROUTER: (u8, &[u8]) = (3, &[192, 168, 1, 1]);

fn is_renewal(message: &Seen) -> bool {
    message.kind() == REQUEST && !message.ciaddr().is_unspecified()
}

#[test]
fn a_renewal_is_unicast_with_its_own_transaction_id() {
    let world = World::new();
    let server = Fake::start(|seen, _| match seen.kind() {
        DISCOVER => vec![seen.answer(OFFER, FIVE, &[ROUTER])],
        REQUEST => vec![seen.answer(ACK, FIVE, &[ROUTER])],
        _ => vec![],
    });
    let _daemon = world.daemon(&["-broadcast"]);
    let (net, container) = (world.net("1.1.0"), Container::new());
    let result = net.add(&container);
    let discover = &server.seen(DISCOVER)[0];
    assert!(discover.broadcast());
    assert_eq!(discover.from.ip(), Ipv4Addr::UNSPECIFIED);
    assert_eq!(discover.option(57), Some(&[5, 0xc0][..]));
    assert_eq!(discover.option(61), Some(&b"\0c1/net/eth0"[..]));
    let first = &server.seen(REQUEST)[0];
    assert_eq!(
        (first.option(50), first.option(54)),
        (Some(&FIVE[..]), Some(&[192, 168, 1, 1][..]))
    );
    assert_eq!(first.xid(), discover.xid());

    let renewal = server.wait("no renewal", is_renewal);
    assert_eq!(renewal.from.to_string(), "192.168.1.5:68");
    assert_eq!((renewal.ciaddr(), renewal.broadcast()), (FIVE.into(), false));
    assert_eq!((renewal.option(50), renewal.option(54)), (None, None));
    assert_ne!(renewal.xid(), discover.xid());
    let renewals =
        || -> Vec<Seen> { server.seen(REQUEST).into_iter().filter(is_renewal).collect() };
    eventually("no third renewal", || renewals().len() >= 3);
    for pair in renewals().windows(2) {
        // A lost reply would cause a retransmission after one second.
        assert_ne!(pair[0].xid(), pair[1].xid());
        assert!(pair[1].at - pair[0].at > Duration::from_millis(1500), "{pair:?}");
    }
    assert_eq!(server.seen(DISCOVER).len(), 1);
    assert_eq!(addresses(&container), ["192.168.1.5/24"]);
    net.check(&container, &result).ok();
    net.del(&container);
    let release = server.wait("no release", |m| m.kind() == RELEASE);
    assert_eq!(release.from.to_string(), "192.168.1.5:68");
    assert_eq!(release.ciaddr(), Ipv4Addr::from(FIVE));
    assert_eq!(release.option(61), Some(&b"\0c1/net/eth0"[..]));
    assert_eq!(release.option(54), Some(&[192, 168, 1, 1][..]));
}

#[test]
fn another_server_takes_over_when_the_first_is_silent() {
    let world = World::new();
    // The first server's identifier is an unused address, so only broadcasts arrive.
    let first: (u8, &[u8]) = (54, &[192, 168, 1, 77]);
    let server = Fake::start(move |seen, _| match seen.kind() {
        DISCOVER => vec![seen.answer(OFFER, FIVE, &[ROUTER, first])],
        REQUEST if !is_renewal(seen) => vec![seen.answer(ACK, FIVE, &[ROUTER, first])],
        REQUEST => {
            vec![seen.answer(ACK, FIVE, &[ROUTER, (54, &[192, 168, 1, 9]), (51, &[0, 0, 14, 16])])]
        }
        _ => vec![],
    });
    let _daemon = world.daemon(&[]);
    let (net, container) = (world.net("1.1.0"), Container::new());
    let result = net.add(&container);
    eventually("nobody took over", || {
        world.records().iter().any(|p| {
            std::fs::read_to_string(p).unwrap_or_default().contains("\"server\":\"192.168.1.9\"")
        })
    });
    assert_eq!(addresses(&container), ["192.168.1.5/24"]);
    assert!(container.sh("ip route").contains("default via 192.168.1.1"));
    assert_eq!(server.seen(DISCOVER).len(), 1, "no new beginning");
    let rebinding = server.wait("no broadcast", is_renewal);
    assert_eq!((rebinding.option(50), rebinding.option(54)), (None, None));
    assert_eq!(rebinding.from.ip(), Ipv4Addr::from(FIVE));
    net.check(&container, &result).ok();
    net.del(&container);
}

#[test]
fn a_refused_lease_is_replaced_on_the_interface() {
    let world = World::new();
    let server = Fake::start(|seen, earlier| match seen.kind() {
        DISCOVER if earlier == 0 => vec![seen.answer(OFFER, FIVE, &[ROUTER])],
        DISCOVER => vec![seen.answer(OFFER, SIX, &[ROUTER, (51, &[0, 0, 14, 16])])],
        REQUEST if is_renewal(seen) => vec![seen.answer(NAK, [0; 4], &[(56, b"moved")])],
        REQUEST if seen.option(50) == Some(&FIVE) => vec![seen.answer(ACK, FIVE, &[ROUTER])],
        REQUEST => vec![seen.answer(ACK, SIX, &[ROUTER, (51, &[0, 0, 14, 16])])],
        _ => vec![],
    });
    let _daemon = world.daemon(&[]);
    let (net, container) = (world.net("1.1.0"), Container::new());
    let result = net.add(&container);
    container.sh("ip route add 10.77.0.0/16 via 192.168.1.3");
    eventually("the new address did not come", || addresses(&container) == ["192.168.1.6/24"]);
    eventually("no route", || container.sh("ip route").contains("default via 192.168.1.1"));
    assert!(container.pings("192.168.1.1"));
    assert!(world.daemon_log().contains("refused by the server: moved"), "{}", world.daemon_log());
    // The client received the DHCPNAK of the first renewal and did not rebind.
    assert_eq!(server.seen(REQUEST).iter().filter(|m| is_renewal(m)).count(), 1);
    let error =
        net.with(&json!({"ipam": world.ipam(&json!({}))})).check(&container, &result).error();
    assert_eq!(
        error.msg,
        "error calling DHCP.Check: the lease for c1/net/eth0 has the address 192.168.1.6"
    );
    net.del(&container);
    let release = server.wait("no release", |m| m.kind() == RELEASE);
    assert_eq!(release.ciaddr(), Ipv4Addr::from(SIX));
}

#[test]
fn an_expired_address_is_replaced_on_the_interface() {
    let world = World::new();
    let server = Fake::start(|seen, earlier| match seen.kind() {
        DISCOVER if earlier == 0 => vec![seen.answer(OFFER, FIVE, &[ROUTER])],
        DISCOVER if earlier > 2 => vec![seen.answer(OFFER, SIX, &[ROUTER])],
        REQUEST if earlier == 0 => vec![seen.answer(ACK, FIVE, &[ROUTER])],
        REQUEST if seen.option(50) == Some(&SIX) || seen.ciaddr() == Ipv4Addr::from(SIX) => {
            vec![seen.answer(ACK, SIX, &[ROUTER])]
        }
        _ => vec![],
    });
    let _daemon = world.daemon(&["-timeout", "500ms", "-resendmax", "1s"]);
    let (net, container) = (world.net("1.1.0"), Container::new());
    net.add(&container);
    eventually("an expired address stays", || addresses(&container).is_empty());
    let requests = server.seen(REQUEST);
    assert!(requests.iter().any(|m| m.ciaddr() == Ipv4Addr::from(FIVE)), "{requests:?}");
    eventually("there is no new address", || addresses(&container) == ["192.168.1.6/24"]);
    assert!(container.sh("ip route").contains("default via 192.168.1.1"));
    net.del(&container);
}

#[test]
fn a_new_router_is_used_after_a_renewal() {
    let world = World::new();
    let other: (u8, &[u8]) = (3, &[192, 168, 1, 2]);
    let _server = Fake::start(move |seen, _| match seen.kind() {
        DISCOVER => vec![seen.answer(OFFER, FIVE, &[ROUTER])],
        REQUEST if is_renewal(seen) => vec![seen.answer(ACK, FIVE, &[other])],
        REQUEST => vec![seen.answer(ACK, FIVE, &[ROUTER])],
        _ => vec![],
    });
    let _daemon = world.daemon(&[]);
    let (net, container) = (world.net("1.1.0"), Container::new());
    net.add(&container);
    eventually("the router is the old one", || {
        let routes = container.sh("ip route");
        routes.contains("default via 192.168.1.2") && !routes.contains("192.168.1.1 ")
    });
    assert_eq!(addresses(&container), ["192.168.1.5/24"]);
    net.del(&container);
}

#[test]
fn a_plugin_that_is_killed_ends_the_search() {
    let world = World::new();
    let server = Fake::start(|_, _| vec![]);
    let _daemon = world.daemon(&["-timeout", "200ms", "-resendmax", "200ms"]);
    let container = world.wired("v1");
    let mut child = world.alone("1.1.0").on("ADD", &container).command().spawn().unwrap();
    {
        use std::io::Write;
        let conf = world.alone("1.1.0").conf.to_string();
        child.stdin.take().unwrap().write_all(conf.as_bytes()).unwrap();
    }
    eventually("it asks", || server.seen(DISCOVER).len() > 2);
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("the search goes on", || {
        let before = server.seen(DISCOVER).len();
        std::thread::sleep(Duration::from_millis(600));
        server.seen(DISCOVER).len() == before
    });
    assert!(world.records().is_empty());
}

#[test]
fn del_ends_an_add_in_progress() {
    let world = World::new();
    let server = Fake::start(|seen, _| match seen.kind() {
        DISCOVER => vec![seen.answer(OFFER, FIVE, &[ROUTER])],
        _ => vec![],
    });
    let _daemon = world.daemon(&[]);
    let container = world.wired("v1");
    let net = world.alone("1.1.0");
    std::thread::scope(|scope| {
        let add = net.on("ADD", &container);
        let adding = scope.spawn(move || add.error());
        server.wait("no request", |m| m.kind() == REQUEST);
        net.del(&container);
        let error = adding.join().unwrap();
        assert_eq!(error.msg, "error calling DHCP.Allocate: context canceled");
    });
    // The server may have assigned the address already, so DEL releases it.
    let release = server.wait("no release", |m| m.kind() == RELEASE);
    assert_eq!(release.ciaddr(), Ipv4Addr::from(FIVE));
    assert!(world.records().is_empty());
}

#[test]
fn the_lease_follows_a_changed_mac() {
    let world = World::new();
    let server = Fake::start(|seen, _| match seen.kind() {
        DISCOVER => vec![seen.answer(OFFER, FIVE, &[ROUTER])],
        REQUEST => vec![seen.answer(ACK, FIVE, &[ROUTER])],
        _ => vec![],
    });
    let _daemon = world.daemon(&[]);
    let (net, container) = (world.net("1.1.0"), Container::new());
    net.add(&container);
    // As the tuning plugin does later in a chain.
    container.sh("ip link set eth0 address 02:00:00:00:00:42");
    let renewal = server.wait("no renewal", is_renewal);
    assert_eq!(renewal.bytes[28..34], [2, 0, 0, 0, 0, 0x42]);
    eventually("it was not renewed", || {
        server.seen(REQUEST).iter().filter(|m| is_renewal(m)).count() >= 2
    });
    assert_eq!(addresses(&container), ["192.168.1.5/24"]);
    net.del(&container);
}
