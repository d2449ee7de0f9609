//! The state machine without a network.

use std::net::Ipv4Addr;
use std::time::Duration;

use super::super::super::tests::MAC;
use super::super::super::timing::{BootClockTime, NEVER};
use super::super::super::v4::lease::Dhcp4AckFlaw;
use super::super::{ClientMachine, StateMachine};
use super::*;

const SERVER: MacAddress = MacAddress([2, 0, 0, 0, 0, 99]);
const FIVE: Ipv4Addr = Ipv4Addr::new(10, 1, 2, 5);

fn seconds(n: u64) -> BootClockTime {
    Duration::from_secs(n)
}

fn client(probe: u64) -> Dhcp4Client {
    let timing =
        ClientTiming { first: seconds(4), most: seconds(62), probe: Duration::from_millis(probe) };
    let options = Dhcp4Options::from([(option::CLIENT_ID, b"\0me".to_vec()), (55, vec![1, 3])]);
    Dhcp4Client { mac: MAC, broadcast: false, options, timing }
}

fn machine(probe: u64) -> ClientMachine<Dhcp4Client> {
    ClientMachine::new(client(probe), seconds(1000), seconds(1208), RandomGenerator::from_seed(5))
}

fn sent(out: &[ClientAction]) -> Dhcp4Message {
    let message = out.iter().find_map(|output| match output {
        ClientAction::Broadcast(message) | ClientAction::Unicast(message, _) => {
            Some(message.clone())
        }
        _ => None,
    });
    message.unwrap_or_else(|| panic!("nothing was sent: {out:?}"))
}

fn answer(kind: Dhcp4MessageKind, to: &Dhcp4Message, extra: &[(u8, &[u8])]) -> Dhcp4Message {
    let mut message = Dhcp4Message::new(kind, to.xid, MAC);
    message.yiaddr = FIVE;
    let base: [(u8, &[u8]); 3] =
        [(1, &[255, 255, 255, 0]), (54, &[10, 1, 2, 1]), (51, &[0, 0, 14, 16])];
    for (code, value) in base.iter().chain(extra) {
        message.options.insert(*code, value.to_vec());
    }
    message
}

/// A machine with a lease of an hour since second 1000.
fn bound() -> ClientMachine<Dhcp4Client> {
    let mut machine = machine(0);
    let discover = sent(&machine.handle_timeout(seconds(1000)));
    let offer = answer(Dhcp4MessageKind::Offer, &discover, &[]);
    let request = sent(&machine.on_message(seconds(1000), &offer, Some(SERVER)));
    let ack = answer(Dhcp4MessageKind::Ack, &request, &[]);
    let out = machine.on_message(seconds(1000), &ack, Some(SERVER));
    assert!(matches!(out[..], [ClientAction::Bound(_)]), "{out:?}");
    machine
}

#[test]
fn acquires_a_lease() {
    let mut machine = machine(200);
    assert_eq!(
        (machine.next_deadline(), machine.needed_sockets()),
        (seconds(1000), NeededSockets::None)
    );
    let discover = sent(&machine.handle_timeout(seconds(1000)));
    assert_eq!(
        (discover.kind, discover.ciaddr),
        (Dhcp4MessageKind::Discover, Ipv4Addr::UNSPECIFIED)
    );
    assert_eq!(discover.options[&55], [1, 3]);
    assert_eq!(machine.needed_sockets(), NeededSockets::Frames);
    assert_eq!(machine.assigned_binding(), None);

    let offer = answer(Dhcp4MessageKind::Offer, &discover, &[]);
    let request = sent(&machine.on_message(seconds(1001), &offer, Some(SERVER)));
    assert_eq!((request.kind, request.xid), (Dhcp4MessageKind::Request, discover.xid));
    assert_eq!(request.options[&option::REQUESTED], FIVE.octets());
    assert_eq!(request.options[&option::SERVER], [10, 1, 2, 1]);
    assert_eq!(
        machine.assigned_binding().map(|claim| claim.address),
        Some(FIVE),
        "may be assigned already"
    );

    let ack = answer(Dhcp4MessageKind::Ack, &request, &[]);
    assert_eq!(
        machine.on_message(seconds(1002), &ack, Some(SERVER)),
        [ClientAction::Probe(FIVE.into())]
    );
    assert_eq!(machine.needed_sockets(), NeededSockets::Neighbours(FIVE.into()));
    assert_eq!(machine.state.lease_in_use(), None, "not before the probes");
    assert_eq!(machine.next_deadline(), Duration::from_millis(1_002_100));
    assert_eq!(machine.handle_timeout(machine.next_deadline()), [ClientAction::Probe(FIVE.into())]);
    let out = machine.handle_timeout(machine.next_deadline());
    let [ClientAction::Bound(family::DhcpLease::V4(lease))] = &out[..] else { panic!("{out:?}") };
    assert_eq!(lease.server_mac, SERVER);
    // The lease starts at the request, not at the DHCPACK.
    assert_eq!(lease.expires, seconds(1001 + 3600));
    assert_eq!(machine.needed_sockets(), NeededSockets::None);
    assert_eq!(machine.next_deadline(), lease.renew);
}

#[test]
fn messages_are_repeated_until_the_time_limit() {
    let mut machine = machine(0);
    let mut moments = Vec::new();
    let mut xids = Vec::new();
    loop {
        let now = machine.next_deadline();
        let out = machine.handle_timeout(now);
        if out == [ClientAction::TimeIsUp] {
            assert_eq!(now, seconds(1208));
            break;
        }
        let message = sent(&out);
        assert_eq!(
            message.secs,
            u16::try_from(now.saturating_sub(seconds(1000)).as_secs()).unwrap()
        );
        xids.push(message.xid);
        moments.push(now);
    }
    xids.dedup();
    assert_eq!(xids.len(), 1, "one exchange");
    let waits: Vec<_> =
        moments.windows(2).map(|w| w[1].saturating_sub(w[0]).as_secs_f64()).collect();
    let means = [4.0, 8.0, 16.0, 32.0, 62.0, 62.0];
    assert!(waits.len() >= 5, "{waits:?}");
    assert!(waits.iter().zip(means).all(|(w, mean)| (w - mean).abs() <= 1.0), "{waits:?}");
    assert_eq!((machine.next_deadline(), machine.needed_sockets()), (NEVER, NeededSockets::None));
    assert_eq!(machine.handle_timeout(seconds(9999)), []);
}

#[test]
fn a_server_without_replies_is_abandoned() {
    let mut machine = machine(0);
    let discover = sent(&machine.handle_timeout(seconds(1000)));
    let offer = answer(Dhcp4MessageKind::Offer, &discover, &[]);
    machine.on_message(seconds(1000), &offer, Some(SERVER));
    let mut requests = 1;
    let last = loop {
        let out = machine.handle_timeout(machine.next_deadline());
        if sent(&out).kind == Dhcp4MessageKind::Discover {
            break sent(&out);
        }
        requests += 1;
    };
    assert_eq!(requests, Dhcp4Client::REQUESTS);
    assert_ne!(last.xid, discover.xid);
}

#[test]
fn foreign_messages_are_ignored() {
    let mut machine = machine(0);
    let discover = sent(&machine.handle_timeout(seconds(1000)));
    let offer = answer(Dhcp4MessageKind::Offer, &discover, &[]);
    let other_mac = Dhcp4Message { chaddr: SERVER, ..offer.clone() };
    let other_xid = Dhcp4Message { xid: offer.xid ^ 1, ..offer.clone() };
    let no_server = {
        let mut message = offer.clone();
        message.options.remove(&option::SERVER);
        message
    };
    let no_address = Dhcp4Message { yiaddr: Ipv4Addr::UNSPECIFIED, ..offer.clone() };
    let early = answer(Dhcp4MessageKind::Ack, &discover, &[]);
    let nak = answer(Dhcp4MessageKind::Nak, &discover, &[]);
    for message in [&other_mac, &other_xid, &no_server, &no_address, &early, &nak] {
        assert_eq!(machine.on_message(seconds(1001), message, Some(SERVER)), [], "{message:?}");
        assert_eq!(machine.needed_sockets(), NeededSockets::Frames);
    }
    let request = sent(&machine.on_message(seconds(1001), &offer, Some(SERVER)));
    assert_eq!(
        machine.on_message(seconds(1001), &offer, Some(SERVER)),
        [],
        "the first offer counts"
    );
    let foreign = answer(Dhcp4MessageKind::Ack, &request, &[(54, &[10, 1, 2, 66])]);
    assert_eq!(machine.on_message(seconds(1001), &foreign, Some(SERVER)), []);
    let other = Dhcp4Message {
        yiaddr: [10, 1, 2, 6].into(),
        ..answer(Dhcp4MessageKind::Ack, &request, &[])
    };
    assert_eq!(machine.on_message(seconds(1001), &other, Some(SERVER)), []);
    let foreign = answer(Dhcp4MessageKind::Nak, &request, &[(54, &[10, 1, 2, 66])]);
    assert_eq!(machine.on_message(seconds(1001), &foreign, Some(SERVER)), []);
    let ack = answer(Dhcp4MessageKind::Ack, &request, &[]);
    let out = machine.on_message(seconds(1001), &ack, Some(SERVER));
    assert!(matches!(out[..], [ClientAction::Bound(_)]));
}

#[test]
fn an_unusable_acknowledgement_fails_the_first_time() {
    let mut machine = machine(0);
    let discover = sent(&machine.handle_timeout(seconds(1000)));
    let offer = answer(Dhcp4MessageKind::Offer, &discover, &[]);
    let request = sent(&machine.on_message(seconds(1000), &offer, Some(SERVER)));
    let ack = answer(Dhcp4MessageKind::Ack, &request, &[(1, &[9])]);
    let out = machine.on_message(seconds(1000), &ack, Some(SERVER));
    assert_eq!(out, [ClientAction::Unusable(Dhcp4AckFlaw::NoMask)]);
    assert_eq!(machine.next_deadline(), NEVER);
}

#[test]
fn a_conflicting_address_is_declined() {
    let mut machine = machine(200);
    for (conflict, pause) in [(1, 0), (2, 10), (3, 10)] {
        let now = machine.next_deadline();
        let discover = sent(&machine.handle_timeout(now));
        let offer = answer(Dhcp4MessageKind::Offer, &discover, &[]);
        let request = sent(&machine.on_message(now, &offer, Some(SERVER)));
        machine.on_message(now, &answer(Dhcp4MessageKind::Ack, &request, &[]), Some(SERVER));
        let decline = sent(&machine.on_conflict(now));
        assert_eq!(
            (decline.kind, decline.ciaddr),
            (Dhcp4MessageKind::Decline, Ipv4Addr::UNSPECIFIED)
        );
        assert_eq!(decline.options[&option::REQUESTED], FIVE.octets());
        assert_eq!(decline.options[&option::SERVER], [10, 1, 2, 1]);
        assert_eq!(decline.options[&option::CLIENT_ID], b"\0me");
        assert_eq!(decline.options.get(&option::PARAMETERS), None);
        assert_eq!(machine.next_deadline(), now + seconds(pause), "{conflict}");
        assert_eq!(machine.on_conflict(now), [], "once");
    }
}

#[test]
fn renewal_is_unicast_and_rebinding_is_broadcast() {
    let mut machine = bound();
    let lease = machine.state.lease_in_use().unwrap().clone();
    let out = machine.handle_timeout(machine.next_deadline());
    let [ClientAction::Unicast(renewal, server)] = &out[..] else { panic!("{out:?}") };
    assert_eq!(*server, Ipv4Addr::new(10, 1, 2, 1));
    assert_eq!((renewal.kind, renewal.ciaddr), (Dhcp4MessageKind::Request, FIVE));
    for absent in [option::REQUESTED, option::SERVER] {
        assert_eq!(renewal.options.get(&absent), None);
    }
    assert_eq!(machine.needed_sockets(), NeededSockets::Udp);
    // Half of the remaining time, at least a minute; then all servers.
    let mut kinds = Vec::new();
    let mut last = lease.renew;
    while machine.state.lease_in_use().is_some() {
        let now = machine.next_deadline();
        assert!(now >= last + seconds(30) || now == lease.rebind || now == lease.expires);
        last = now;
        for output in machine.handle_timeout(now) {
            kinds.push(match output {
                ClientAction::Unicast(..) => 'u',
                ClientAction::Broadcast(message) => {
                    assert_eq!(message.ciaddr, FIVE);
                    'b'
                }
                ClientAction::Lost(_) => 'L',
                other => panic!("{other:?}"),
            });
        }
    }
    let text: String = kinds.iter().collect();
    assert!(text.trim_start_matches('u').trim_start_matches('b') == "L", "{text}");
    assert!(text.contains("uu") && text.contains("bb") && text.len() < 20, "{text}");
    assert_eq!(last, lease.expires);
    // The search continues without a time limit.
    assert_eq!(
        sent(&machine.handle_timeout(machine.next_deadline())).kind,
        Dhcp4MessageKind::Discover
    );
    assert!(
        machine.handle_timeout(seconds(1_000_000)).iter().all(|o| *o != ClientAction::TimeIsUp)
    );
}

#[test]
fn a_reply_extends_the_lease() {
    let mut machine = bound();
    let first = machine.state.lease_in_use().unwrap().clone();
    let now = machine.next_deadline();
    let renewal = sent(&machine.handle_timeout(now));
    let unusable = answer(Dhcp4MessageKind::Ack, &renewal, &[(1, &[0; 4])]);
    let out = machine.on_message(now, &unusable, None);
    assert!(
        matches!(out[..], [ClientAction::Note(_)]) && machine.state.lease_in_use() == Some(&first)
    );
    let ack = answer(Dhcp4MessageKind::Ack, &renewal, &[]);
    let out = machine.on_message(now, &ack, None);
    let [ClientAction::Bound(family::DhcpLease::V4(lease))] = &out[..] else { panic!("{out:?}") };
    assert_eq!((lease.expires, lease.server_mac), (now + seconds(3600), SERVER));
    // The request is broadcast; the reply arrives in a frame from any server.
    machine.handle_timeout(machine.next_deadline());
    let now = machine.state.lease_in_use().unwrap().rebind;
    let rebinding = sent(&machine.handle_timeout(now));
    assert_eq!(machine.needed_sockets(), NeededSockets::Frames);
    let other = MacAddress([2, 0, 0, 0, 0, 98]);
    let ack = answer(Dhcp4MessageKind::Ack, &rebinding, &[(54, &[10, 1, 2, 2])]);
    let out = machine.on_message(now, &ack, Some(other));
    let [ClientAction::Bound(family::DhcpLease::V4(lease))] = &out[..] else { panic!("{out:?}") };
    assert_eq!((lease.server, lease.server_mac), ([10, 1, 2, 2].into(), other));
}

#[test]
fn a_nak_ends_the_lease_and_restarts_are_delayed() {
    let mut machine = bound();
    let now = machine.next_deadline();
    let renewal = sent(&machine.handle_timeout(now));
    let out =
        machine.on_message(now, &answer(Dhcp4MessageKind::Nak, &renewal, &[(56, b"moved")]), None);
    assert!(
        matches!(&out[..], [ClientAction::Lost(_), ClientAction::Refused(text)] if text.contains("moved"))
    );
    assert_eq!(machine.next_deadline(), now, "at once the first time");
    let mut waits = Vec::new();
    for _ in 0..9 {
        let now = machine.next_deadline();
        let discover = sent(&machine.handle_timeout(now));
        let offer = answer(Dhcp4MessageKind::Offer, &discover, &[]);
        let request = sent(&machine.on_message(now, &offer, Some(SERVER)));
        machine.on_message(now, &answer(Dhcp4MessageKind::Nak, &request, &[]), Some(SERVER));
        waits.push(machine.next_deadline().saturating_sub(now).as_millis());
    }
    assert!(waits[0] < 400 && waits.windows(2).all(|pair| pair[1] > pair[0]), "{waits:?}");
}

#[test]
fn a_resumed_lease_keeps_its_timers() {
    let lease = bound().state.lease_in_use().unwrap().clone();
    for (now, kind) in [
        (lease.renew.saturating_sub(seconds(1)), None),
        (lease.renew, Some('u')),
        (lease.rebind, Some('b')),
        (lease.expires, Some('L')),
    ] {
        let mut machine =
            ClientMachine::resume_lease(client(200), lease.clone(), RandomGenerator::from_seed(2));
        let out = machine.handle_timeout(now);
        let found = out.first().map(|output| match output {
            ClientAction::Unicast(..) => 'u',
            ClientAction::Broadcast(_) => 'b',
            ClientAction::Lost(_) => 'L',
            other => panic!("{other:?}"),
        });
        assert_eq!(found, kind);
    }
}

#[test]
fn a_release_has_only_the_required_options() {
    let mut machine = bound();
    let Some(ReleaseMessage::V4(message, ends)) = machine.release_message() else {
        panic!("{machine:?}")
    };
    assert_eq!((ends.src_mac, ends.dst_mac, ends.src), (MAC, SERVER, FIVE));
    assert_eq!((message.kind, message.ciaddr), (Dhcp4MessageKind::Release, FIVE));
    let codes: Vec<_> = message.options.keys().copied().collect();
    assert_eq!(codes, [option::SERVER, option::CLIENT_ID]);
}

#[test]
fn renewals_of_short_leases_are_paced() {
    let mut machine = machine(0);
    let discover = sent(&machine.handle_timeout(seconds(1000)));
    let offer = answer(Dhcp4MessageKind::Offer, &discover, &[]);
    let request = sent(&machine.on_message(seconds(1000), &offer, Some(SERVER)));
    let ack = answer(Dhcp4MessageKind::Ack, &request, &[(51, &[0, 0, 0, 0])]);
    machine.on_message(seconds(1000), &ack, Some(SERVER));
    let mut ticks = 0;
    while machine.state.lease_in_use().is_some() {
        machine.handle_timeout(machine.next_deadline());
        ticks += 1;
    }
    assert!((3..10).contains(&ticks), "{ticks}");
}
