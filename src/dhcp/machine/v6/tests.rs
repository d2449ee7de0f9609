//! The state machine without a network.

use std::net::Ipv6Addr;
use std::time::Duration;

use super::super::super::tests::{FIVE, addr};
use super::super::super::timing::NEVER;
use super::super::super::v6::message::{AssociationAddress, Dhcp6Status, status};
use super::super::protocol::AT_ONCE;
use super::super::{ClientMachine, StateMachine};
use super::*;

const SIX: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 6);
const ONE: [u8; 4] = [0, 1, 0, 1];
const TWO: [u8; 4] = [0, 1, 0, 2];
const IAID: u32 = 7;

fn seconds(n: u64) -> BootClockTime {
    Duration::from_secs(n)
}

fn client(probe: u64) -> Dhcp6Client {
    let timing =
        ClientTiming { first: seconds(4), most: seconds(62), probe: Duration::from_millis(probe) };
    let mac = MacAddress([2, 0, 0, 0, 0, 7]);
    Dhcp6Client { duid: vec![0, 4, 1, 2, 3], iaid: IAID, mac, timing, sol_max_rt: None }
}

fn machine(probe: u64) -> ClientMachine<Dhcp6Client> {
    ClientMachine::new(client(probe), seconds(1000), seconds(1208), RandomGenerator::from_seed(5))
}

impl ClientMachine<Dhcp6Client> {
    fn receive(&mut self, now: BootClockTime, message: &Dhcp6Message) -> Vec<ClientAction> {
        self.on_message(now, message, None)
    }
}

#[track_caller]
fn sent(out: &[ClientAction]) -> Dhcp6Message {
    let message = out.iter().find_map(|output| match output {
        ClientAction::Multicast(message) => Some(message.clone()),
        _ => None,
    });
    message.unwrap_or_else(|| panic!("nothing was sent: {out:?}"))
}

#[track_caller]
fn got(out: &[ClientAction]) -> Dhcp6Lease {
    match out {
        [ClientAction::Bound(family::DhcpLease::V6(lease))] => lease.clone(),
        other => panic!("no lease: {other:?}"),
    }
}

fn answer_with(
    kind: Dhcp6MessageKind,
    to: &Dhcp6Message,
    server: [u8; 4],
    addrs: Vec<AssociationAddress>,
) -> Dhcp6Message {
    let mut message = Dhcp6Message::new(kind, to.xid);
    message.client.clone_from(&to.client);
    message.server = server.to_vec();
    message.ias =
        vec![IdentityAssociation { addrs, ..IdentityAssociation::for_address(IAID, None) }];
    message
}

fn answer(kind: Dhcp6MessageKind, to: &Dhcp6Message) -> Dhcp6Message {
    answer_with(kind, to, ONE, vec![addr(FIVE, 3000, 3600)])
}

fn failing(kind: Dhcp6MessageKind, to: &Dhcp6Message, code: u16) -> Dhcp6Message {
    let mut message = answer_with(kind, to, ONE, vec![]);
    message.ias[0].status = Dhcp6Status { code, sentence: "because".to_owned() };
    message
}

fn at_once(mut message: Dhcp6Message) -> Dhcp6Message {
    message.preference = AT_ONCE;
    message
}

/// Goes from Solicit to Request: the Request.
fn requesting(machine: &mut ClientMachine<Dhcp6Client>, now: BootClockTime) -> Dhcp6Message {
    let solicit = sent(&machine.handle_timeout(now));
    assert_eq!(solicit.kind, Dhcp6MessageKind::Solicit);
    sent(&machine.receive(now, &at_once(answer(Dhcp6MessageKind::Advertise, &solicit))))
}

/// A machine with a lease of an hour since second 1000.
fn bound() -> ClientMachine<Dhcp6Client> {
    let mut machine = machine(0);
    let request = requesting(&mut machine, seconds(1000));
    got(&machine.receive(seconds(1000), &answer(Dhcp6MessageKind::Reply, &request)));
    machine
}

#[test]
fn acquires_a_lease() {
    let mut machine = machine(200);
    assert_eq!(
        (machine.next_deadline(), machine.needed_sockets()),
        (seconds(1000), NeededSockets::None)
    );
    let solicit = sent(&machine.handle_timeout(seconds(1000)));
    assert_eq!(
        (solicit.kind, solicit.server.len(), solicit.elapsed),
        (Dhcp6MessageKind::Solicit, 0, 0)
    );
    assert_eq!((&solicit.client, &solicit.requested[..]), (&vec![0, 4, 1, 2, 3], &WANTED[..]));
    assert_eq!(solicit.ias, [IdentityAssociation::for_address(IAID, None)]);
    assert!(solicit.xid <= 0x00ff_ffff && (0..50).all(|_| machine.next_xid() <= 0x00ff_ffff));
    assert_eq!((machine.needed_sockets(), machine.assigned_binding()), (NeededSockets::Udp, None));

    // All servers have a second to reply.
    assert_eq!(machine.receive(seconds(1000), &answer(Dhcp6MessageKind::Advertise, &solicit)), []);
    let now = machine.next_deadline();
    assert!(now >= seconds(1001), "{now:?}");
    let request = sent(&machine.handle_timeout(now));
    assert_eq!((request.kind, &request.server[..]), (Dhcp6MessageKind::Request, &ONE[..]));
    assert_eq!(request.ias, [IdentityAssociation::for_address(IAID, Some(FIVE))]);
    assert_ne!(request.xid, solicit.xid);
    assert_eq!(machine.assigned_binding().unwrap().address, FIVE, "may be assigned already");

    let out = machine.receive(now, &answer(Dhcp6MessageKind::Reply, &request));
    assert_eq!(out, [ClientAction::Probe(FIVE.into())]);
    assert_eq!(
        (machine.needed_sockets(), machine.state.lease_in_use()),
        (NeededSockets::Neighbours(FIVE.into()), None)
    );
    assert_eq!(machine.handle_timeout(machine.next_deadline()), [ClientAction::Probe(FIVE.into())]);
    let lease = got(&machine.handle_timeout(machine.next_deadline()));
    // The lease starts at the request, not after the probes.
    assert_eq!((lease.expires, lease.server), (now + seconds(3600), ONE.to_vec()));
    assert_eq!(
        (machine.needed_sockets(), machine.next_deadline()),
        (NeededSockets::None, lease.renew)
    );
}

#[test]
fn the_server_with_the_highest_preference_is_chosen() {
    let mut machine = machine(0);
    let solicit = sent(&machine.handle_timeout(seconds(1000)));
    for (server, preference) in [([0, 1, 0, 9], 3), (TWO, 5), (ONE, 5), ([0, 1, 0, 8], 0)] {
        let offer =
            answer_with(Dhcp6MessageKind::Advertise, &solicit, server, vec![addr(FIVE, 9, 9)]);
        let out = machine.receive(seconds(1000), &Dhcp6Message { preference, ..offer });
        assert_eq!(out, []);
    }
    assert_eq!(sent(&machine.handle_timeout(machine.next_deadline())).server, TWO);

    let mut machine = self::machine(0);
    let solicit = sent(&machine.handle_timeout(seconds(1000)));
    machine.receive(seconds(1000), &answer(Dhcp6MessageKind::Advertise, &solicit));
    let eager = answer_with(Dhcp6MessageKind::Advertise, &solicit, TWO, vec![addr(SIX, 9, 9)]);
    let request = sent(&machine.receive(seconds(1000), &at_once(eager)));
    assert_eq!((request.server, request.ias[0].addrs[0].addr), (TWO.to_vec(), SIX));

    // After the first timeout the first offer is taken.
    let mut machine = self::machine(0);
    machine.handle_timeout(seconds(1000));
    let now = machine.next_deadline();
    let solicit = sent(&machine.handle_timeout(now));
    assert!((100..=110).contains(&solicit.elapsed), "{}", solicit.elapsed);
    let request = sent(&machine.receive(now, &answer(Dhcp6MessageKind::Advertise, &solicit)));
    assert_eq!(request.kind, Dhcp6MessageKind::Request);
}

#[test]
fn solicits_are_repeated_until_the_time_limit() {
    let mut machine = machine(0);
    let (mut moments, mut xids) = (Vec::new(), Vec::new());
    loop {
        let now = machine.next_deadline();
        let out = machine.handle_timeout(now);
        if out == [ClientAction::TimeIsUp] {
            assert_eq!(now, seconds(1208));
            break;
        }
        xids.push(sent(&out).xid);
        moments.push(now);
    }
    xids.dedup();
    assert_eq!(xids.len(), 1, "one exchange");
    let waits: Vec<_> =
        moments.windows(2).map(|w| w[1].saturating_sub(w[0]).as_secs_f64()).collect();
    let fine = |pair: &[f64]| pair[1] >= 1.9 * pair[0] || pair[1] >= 55.8;
    assert!(waits.len() >= 6 && waits.windows(2).all(fine), "{waits:?}");
    assert!(waits.iter().all(|wait| *wait <= 62.0 * 1.1), "{waits:?}");
    assert_eq!((machine.next_deadline(), machine.needed_sockets()), (NEVER, NeededSockets::None));
    assert_eq!(machine.handle_timeout(seconds(9999)), []);
}

#[test]
fn foreign_messages_are_ignored() {
    let mut machine = machine(0);
    let solicit = sent(&machine.handle_timeout(seconds(1000)));
    let offer = at_once(answer(Dhcp6MessageKind::Advertise, &solicit));
    for wrong in [
        Dhcp6Message { client: vec![0, 4, 1], ..offer.clone() },
        Dhcp6Message { client: vec![], ..offer.clone() },
        Dhcp6Message { server: vec![], ..offer.clone() },
        Dhcp6Message { xid: offer.xid ^ 1, ..offer.clone() },
        answer(Dhcp6MessageKind::Reply, &solicit),
    ] {
        assert_eq!(machine.receive(seconds(1000), &wrong), [], "{wrong:?}");
    }
    let other = Dhcp6Message {
        ias: vec![IdentityAssociation { iaid: 8, ..offer.ias[0].clone() }],
        ..offer.clone()
    };
    for useless in [Dhcp6Message { ias: vec![], ..offer.clone() }, other] {
        let out = machine.receive(seconds(1000), &useless);
        assert!(out.iter().all(|o| matches!(o, ClientAction::Refused(_))), "{out:?}");
    }
    let request = sent(&machine.receive(seconds(1000), &offer));
    let foreign = answer_with(Dhcp6MessageKind::Reply, &request, TWO, vec![addr(FIVE, 9, 9)]);
    assert_eq!(machine.receive(seconds(1000), &foreign), []);
    assert_eq!(machine.receive(seconds(1000), &answer(Dhcp6MessageKind::Advertise, &request)), []);
    got(&machine.receive(seconds(1000), &answer(Dhcp6MessageKind::Reply, &request)));
}

#[test]
fn a_server_without_addresses_is_logged_once() {
    let mut machine = machine(0);
    let mut logged = Vec::new();
    while machine.next_deadline() < seconds(1100) {
        let solicit = sent(&machine.handle_timeout(machine.next_deadline()));
        let mut refusal = failing(Dhcp6MessageKind::Advertise, &solicit, status::NO_ADDRS_AVAIL);
        refusal.sol_max_rt = Some(100);
        logged.extend(machine.receive(machine.next_deadline(), &refusal));
    }
    assert!(machine.next_deadline() > seconds(1100) && machine.next_deadline() < seconds(1208));
    let expected = "refused by the server: NoAddrsAvail (because)".to_owned();
    assert_eq!(logged, [ClientAction::Refused(expected)]);
    assert_eq!(machine.client.sol_max_rt, Some(100));
    // An Advertise with an address and a failure is not an offer.
    let solicit = sent(&machine.handle_timeout(machine.next_deadline()));
    let mut both = at_once(answer(Dhcp6MessageKind::Advertise, &solicit));
    both.status = Dhcp6Status { code: status::NO_ADDRS_AVAIL, sentence: String::new() };
    let out = machine.receive(machine.next_deadline(), &both);
    assert!(matches!(&out[..], [ClientAction::Refused(_)]), "{out:?}");
}

#[test]
fn a_server_without_replies_is_abandoned() {
    let mut machine = machine(0);
    requesting(&mut machine, seconds(1000));
    let mut requests = 1;
    loop {
        let out = machine.handle_timeout(machine.next_deadline());
        if sent(&out).kind == Dhcp6MessageKind::Solicit {
            break;
        }
        requests += 1;
    }
    assert_eq!(requests, 5);
}

#[test]
fn refusals_of_a_request_are_paced_and_failures_repeated() {
    let mut machine = machine(0);
    let mut waits = Vec::new();
    for code in
        [status::NO_ADDRS_AVAIL, status::NOT_ON_LINK, status::NO_BINDING, status::NOT_ON_LINK]
    {
        let now = machine.next_deadline();
        let request = requesting(&mut machine, now);
        // Not a decision: the Request is repeated.
        machine.receive(now, &failing(Dhcp6MessageKind::Reply, &request, status::UNSPEC_FAIL));
        let again = sent(&machine.handle_timeout(machine.next_deadline()));
        assert_eq!((again.kind, again.xid), (Dhcp6MessageKind::Request, request.xid));
        let now = machine.next_deadline();
        let out = machine.receive(now, &failing(Dhcp6MessageKind::Reply, &request, code));
        assert!(matches!(out[..], [ClientAction::Refused(_)]), "{out:?}");
        waits.push(machine.next_deadline().saturating_sub(now).as_millis());
    }
    assert!(waits[0] == 0 && waits[1] < 400 && waits[3] > waits[1], "{waits:?}");
}

#[test]
fn a_decline_is_repeated_until_the_reply() {
    let mut machine = machine(200);
    for (conflict, pause) in [(1, 0), (2, 10)] {
        let now = machine.next_deadline();
        let request = requesting(&mut machine, now);
        machine.receive(now, &answer(Dhcp6MessageKind::Reply, &request));
        let decline = sent(&machine.on_conflict(now));
        assert_eq!((decline.kind, &decline.server[..]), (Dhcp6MessageKind::Decline, &ONE[..]));
        assert_eq!(decline.ias, [IdentityAssociation::for_address(IAID, Some(FIVE))]);
        assert_eq!((decline.requested.len(), machine.assigned_binding()), (0, None));
        let again = sent(&machine.handle_timeout(machine.next_deadline()));
        assert_eq!((again.kind, again.xid), (Dhcp6MessageKind::Decline, decline.xid));
        assert_eq!(machine.receive(now, &answer(Dhcp6MessageKind::Reply, &decline)), []);
        assert_eq!(machine.next_deadline(), now + seconds(pause), "{conflict}");
        assert_eq!(machine.on_conflict(now), [], "once");
    }
    // The number of declines is limited.
    let now = machine.next_deadline();
    let request = requesting(&mut machine, now);
    machine.receive(now, &answer(Dhcp6MessageKind::Reply, &request));
    machine.on_conflict(now);
    let declines = (0..10)
        .take_while(|_| {
            let out = machine.handle_timeout(machine.next_deadline());
            out.iter().any(
                |o| matches!(o, ClientAction::Multicast(m) if m.kind == Dhcp6MessageKind::Decline),
            )
        })
        .count();
    assert_eq!(declines, 3);
}

#[test]
fn renew_goes_to_the_server_rebind_to_all_until_expiry() {
    let mut machine = bound();
    let lease = machine.state.lease_in_use().unwrap().clone();
    let (mut kinds, mut last) = (String::new(), lease.renew);
    while machine.state.lease_in_use().is_some() {
        let now = machine.next_deadline();
        assert!(now >= last, "{now:?}");
        last = now;
        for output in machine.handle_timeout(now) {
            kinds.push(match output {
                ClientAction::Multicast(message) => {
                    assert_eq!(message.ias, [IdentityAssociation::for_address(IAID, Some(FIVE))]);
                    match message.kind {
                        Dhcp6MessageKind::Renew if message.server == ONE => 'n',
                        Dhcp6MessageKind::Rebind if message.server.is_empty() => 'b',
                        other => panic!("{other:?}"),
                    }
                }
                ClientAction::Lost(_) => 'L',
                other => panic!("{other:?}"),
            });
        }
    }
    assert!(kinds.trim_start_matches('n').trim_start_matches('b') == "L", "{kinds}");
    assert!(kinds.contains("nn") && kinds.contains("bb") && kinds.len() < 25, "{kinds}");
    assert_eq!(last, lease.expires);
    assert_eq!(
        sent(&machine.handle_timeout(machine.next_deadline())).kind,
        Dhcp6MessageKind::Solicit
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
    let mut crossed = answer(Dhcp6MessageKind::Reply, &renewal);
    (crossed.ias[0].t1, crossed.ias[0].t2) = (9, 8);
    let failed = |code| failing(Dhcp6MessageKind::Reply, &renewal, code);
    for useless in [crossed, failed(status::UNSPEC_FAIL), failed(status::NO_ADDRS_AVAIL)] {
        let out = machine.receive(now, &useless);
        assert!(
            matches!(out[..], [ClientAction::Refused(_)])
                && machine.state.lease_in_use() == Some(&first)
        );
    }
    let lease = got(&machine.receive(now, &answer(Dhcp6MessageKind::Reply, &renewal)));
    assert_eq!((lease.address, lease.expires), (FIVE, now + seconds(3600)));
    // Rebind goes to all servers; the server that replies is the server of the lease.
    machine.handle_timeout(machine.next_deadline());
    let now = machine.state.lease_in_use().unwrap().rebind;
    let rebinding = sent(&machine.handle_timeout(now));
    assert_eq!(rebinding.kind, Dhcp6MessageKind::Rebind);
    let other = answer_with(Dhcp6MessageKind::Reply, &rebinding, TWO, vec![addr(SIX, 30, 40)]);
    let lease = got(&machine.receive(now, &other));
    assert_eq!((lease.address, lease.server), (SIX, TWO.to_vec()));
}

#[test]
fn an_unknown_lease_is_requested_again() {
    let mut machine = bound();
    let now = machine.next_deadline();
    let renewal = sent(&machine.handle_timeout(now));
    let out = machine.receive(now, &failing(Dhcp6MessageKind::Reply, &renewal, status::NO_BINDING));
    let request = sent(&out);
    assert_eq!((request.kind, &request.server[..]), (Dhcp6MessageKind::Request, &ONE[..]));
    assert_eq!(request.ias, [IdentityAssociation::for_address(IAID, Some(FIVE))]);
    assert!(machine.state.lease_in_use().is_some(), "still in use");
    // The client uses the address already: no probe.
    let mut again = bound();
    let renewal = sent(&again.handle_timeout(now));
    let request_again =
        sent(&again.receive(now, &failing(Dhcp6MessageKind::Reply, &renewal, status::NO_BINDING)));
    again.client.timing.probe = seconds(1);
    got(&again.receive(now, &answer(Dhcp6MessageKind::Reply, &request_again)));
    // The server may refuse the address.
    let refusal = failing(Dhcp6MessageKind::Reply, &request, status::NO_ADDRS_AVAIL);
    let out = machine.receive(now, &refusal);
    assert!(matches!(out[..], [ClientAction::Lost(_), ClientAction::Refused(_)]), "{out:?}");
    assert_eq!(machine.state.lease_in_use(), None);
}

#[test]
fn an_unconfirmed_lease_expires() {
    let mut machine = bound();
    let expires = machine.state.lease_in_use().unwrap().expires;
    let mut kinds = Vec::new();
    while machine.state.lease_in_use().is_some() {
        let now = machine.next_deadline();
        let out = machine.handle_timeout(now);
        for output in &out {
            if let ClientAction::Multicast(message) = output {
                kinds.push(message.kind);
                if message.kind != Dhcp6MessageKind::Request {
                    machine.receive(
                        now,
                        &failing(Dhcp6MessageKind::Reply, message, status::NO_BINDING),
                    );
                }
            }
        }
        assert!(now <= expires && kinds.len() < 1000);
    }
    assert!(
        kinds.contains(&Dhcp6MessageKind::Rebind) && kinds.contains(&Dhcp6MessageKind::Request)
    );
}

#[test]
fn a_withdrawn_or_misplaced_address_is_lost() {
    for misplaced in [true, false] {
        let mut machine = bound();
        let now = machine.next_deadline();
        let renewal = sent(&machine.handle_timeout(now));
        let reply = if misplaced {
            failing(Dhcp6MessageKind::Reply, &renewal, status::NOT_ON_LINK)
        } else {
            answer_with(Dhcp6MessageKind::Reply, &renewal, ONE, vec![addr(FIVE, 0, 0)])
        };
        let out = machine.receive(now, &reply);
        assert!(matches!(out[..], [ClientAction::Lost(_), ClientAction::Refused(_)]), "{out:?}");
        assert_eq!(
            (machine.next_deadline(), machine.state.lease_in_use()),
            (now, None),
            "at once the first time"
        );
    }
}

#[test]
fn a_resumed_lease_keeps_its_timers() {
    let lease = bound().state.lease_in_use().unwrap().clone();
    for (now, kind) in [
        (lease.renew.saturating_sub(seconds(1)), None),
        (lease.renew, Some(Dhcp6MessageKind::Renew)),
        (lease.rebind, Some(Dhcp6MessageKind::Rebind)),
    ] {
        let mut machine =
            ClientMachine::resume_lease(client(200), lease.clone(), RandomGenerator::from_seed(2));
        let out = machine.handle_timeout(now);
        assert_eq!(out.first().map(|_| sent(&out).kind), kind);
    }
    let mut machine =
        ClientMachine::resume_lease(client(200), lease.clone(), RandomGenerator::from_seed(2));
    assert!(matches!(machine.handle_timeout(lease.expires)[..], [ClientAction::Lost(_)]));
}

#[test]
fn a_release_has_only_the_required_options() {
    let Some(ReleaseMessage::V6(message, FIVE)) = bound().release_message() else {
        panic!("no release")
    };
    assert_eq!((message.kind, &message.server[..]), (Dhcp6MessageKind::Release, &ONE[..]));
    assert_eq!((message.client, message.requested.len()), (client(0).duid, 0));
    assert_eq!(message.ias, [IdentityAssociation::for_address(IAID, Some(FIVE))]);
}
