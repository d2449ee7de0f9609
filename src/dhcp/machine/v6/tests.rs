//! The state machine without a network.

use std::net::Ipv6Addr;
use std::time::Duration;

use super::super::super::tests::{FIVE, addr};
use super::super::super::timing::NEVER;
use super::super::super::v6::message::{IaAddr, Status, status};
use super::super::protocol::AT_ONCE;
use super::super::{Machine, StateMachine};
use super::*;

const SIX: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 6);
const ONE: [u8; 4] = [0, 1, 0, 1];
const TWO: [u8; 4] = [0, 1, 0, 2];
const IAID: u32 = 7;

fn seconds(n: u64) -> BootTime {
    Duration::from_secs(n)
}

fn client(probe: u64) -> Client {
    let timing =
        Timing { first: seconds(4), most: seconds(62), probe: Duration::from_millis(probe) };
    let mac = Mac([2, 0, 0, 0, 0, 7]);
    Client { duid: vec![0, 4, 1, 2, 3], iaid: IAID, mac, timing, sol_max_rt: None }
}

fn machine(probe: u64) -> Machine<Client> {
    Machine::new(client(probe), seconds(1000), seconds(1208), Random::from_seed(5))
}

impl Machine<Client> {
    fn receive(&mut self, now: BootTime, message: &Message) -> Vec<Action> {
        self.on_message(now, message, None)
    }
}

#[track_caller]
fn sent(out: &[Action]) -> Message {
    let message = out.iter().find_map(|output| match output {
        Action::Multicast(message) => Some(message.clone()),
        _ => None,
    });
    message.unwrap_or_else(|| panic!("nothing was sent: {out:?}"))
}

#[track_caller]
fn got(out: &[Action]) -> Lease {
    match out {
        [Action::Bound(family::Lease::V6(lease))] => lease.clone(),
        other => panic!("no lease: {other:?}"),
    }
}

fn answer_with(kind: Kind, to: &Message, server: [u8; 4], addrs: Vec<IaAddr>) -> Message {
    let mut message = Message::new(kind, to.xid);
    message.client.clone_from(&to.client);
    message.server = server.to_vec();
    message.ias = vec![IaNa { addrs, ..IaNa::of(IAID, None) }];
    message
}

fn answer(kind: Kind, to: &Message) -> Message {
    answer_with(kind, to, ONE, vec![addr(FIVE, 3000, 3600)])
}

fn failing(kind: Kind, to: &Message, code: u16) -> Message {
    let mut message = answer_with(kind, to, ONE, vec![]);
    message.ias[0].status = Status { code, sentence: "because".to_owned() };
    message
}

fn at_once(mut message: Message) -> Message {
    message.preference = AT_ONCE;
    message
}

/// Goes from Solicit to Request: the Request.
fn requesting(machine: &mut Machine<Client>, now: BootTime) -> Message {
    let solicit = sent(&machine.tick(now));
    assert_eq!(solicit.kind, Kind::Solicit);
    sent(&machine.receive(now, &at_once(answer(Kind::Advertise, &solicit))))
}

/// A machine with a lease of an hour since second 1000.
fn bound() -> Machine<Client> {
    let mut machine = machine(0);
    let request = requesting(&mut machine, seconds(1000));
    got(&machine.receive(seconds(1000), &answer(Kind::Reply, &request)));
    machine
}

#[test]
fn acquires_a_lease() {
    let mut machine = machine(200);
    assert_eq!((machine.deadline(), machine.listening()), (seconds(1000), Listening::None));
    let solicit = sent(&machine.tick(seconds(1000)));
    assert_eq!((solicit.kind, solicit.server.len(), solicit.elapsed), (Kind::Solicit, 0, 0));
    assert_eq!((&solicit.client, &solicit.requested[..]), (&vec![0, 4, 1, 2, 3], &WANTED[..]));
    assert_eq!(solicit.ias, [IaNa::of(IAID, None)]);
    assert!(solicit.xid <= 0x00ff_ffff && (0..50).all(|_| machine.xid() <= 0x00ff_ffff));
    assert_eq!((machine.listening(), machine.binding()), (Listening::Udp, None));

    // All servers have a second to reply.
    assert_eq!(machine.receive(seconds(1000), &answer(Kind::Advertise, &solicit)), []);
    let now = machine.deadline();
    assert!(now >= seconds(1001), "{now:?}");
    let request = sent(&machine.tick(now));
    assert_eq!((request.kind, &request.server[..]), (Kind::Request, &ONE[..]));
    assert_eq!(request.ias, [IaNa::of(IAID, Some(FIVE))]);
    assert_ne!(request.xid, solicit.xid);
    assert_eq!(machine.binding().unwrap().address, FIVE, "may be assigned already");

    let out = machine.receive(now, &answer(Kind::Reply, &request));
    assert_eq!(out, [Action::Probe(FIVE.into())]);
    assert_eq!(
        (machine.listening(), machine.state.lease()),
        (Listening::Neighbours(FIVE.into()), None)
    );
    assert_eq!(machine.tick(machine.deadline()), [Action::Probe(FIVE.into())]);
    let lease = got(&machine.tick(machine.deadline()));
    // The lease starts at the request, not after the probes.
    assert_eq!((lease.expires, lease.server), (now + seconds(3600), ONE.to_vec()));
    assert_eq!((machine.listening(), machine.deadline()), (Listening::None, lease.renew));
}

#[test]
fn the_server_with_the_highest_preference_is_chosen() {
    let mut machine = machine(0);
    let solicit = sent(&machine.tick(seconds(1000)));
    for (server, preference) in [([0, 1, 0, 9], 3), (TWO, 5), (ONE, 5), ([0, 1, 0, 8], 0)] {
        let offer = answer_with(Kind::Advertise, &solicit, server, vec![addr(FIVE, 9, 9)]);
        let out = machine.receive(seconds(1000), &Message { preference, ..offer });
        assert_eq!(out, []);
    }
    assert_eq!(sent(&machine.tick(machine.deadline())).server, TWO);

    let mut machine = self::machine(0);
    let solicit = sent(&machine.tick(seconds(1000)));
    machine.receive(seconds(1000), &answer(Kind::Advertise, &solicit));
    let eager = answer_with(Kind::Advertise, &solicit, TWO, vec![addr(SIX, 9, 9)]);
    let request = sent(&machine.receive(seconds(1000), &at_once(eager)));
    assert_eq!((request.server, request.ias[0].addrs[0].addr), (TWO.to_vec(), SIX));

    // After the first timeout the first offer is taken.
    let mut machine = self::machine(0);
    machine.tick(seconds(1000));
    let now = machine.deadline();
    let solicit = sent(&machine.tick(now));
    assert!((100..=110).contains(&solicit.elapsed), "{}", solicit.elapsed);
    let request = sent(&machine.receive(now, &answer(Kind::Advertise, &solicit)));
    assert_eq!(request.kind, Kind::Request);
}

#[test]
fn solicits_are_repeated_until_the_time_limit() {
    let mut machine = machine(0);
    let (mut moments, mut xids) = (Vec::new(), Vec::new());
    loop {
        let now = machine.deadline();
        let out = machine.tick(now);
        if out == [Action::TimeIsUp] {
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
    assert_eq!((machine.deadline(), machine.listening()), (NEVER, Listening::None));
    assert_eq!(machine.tick(seconds(9999)), []);
}

#[test]
fn foreign_messages_are_ignored() {
    let mut machine = machine(0);
    let solicit = sent(&machine.tick(seconds(1000)));
    let offer = at_once(answer(Kind::Advertise, &solicit));
    for wrong in [
        Message { client: vec![0, 4, 1], ..offer.clone() },
        Message { client: vec![], ..offer.clone() },
        Message { server: vec![], ..offer.clone() },
        Message { xid: offer.xid ^ 1, ..offer.clone() },
        answer(Kind::Reply, &solicit),
    ] {
        assert_eq!(machine.receive(seconds(1000), &wrong), [], "{wrong:?}");
    }
    let other = Message { ias: vec![IaNa { iaid: 8, ..offer.ias[0].clone() }], ..offer.clone() };
    for useless in [Message { ias: vec![], ..offer.clone() }, other] {
        let out = machine.receive(seconds(1000), &useless);
        assert!(out.iter().all(|o| matches!(o, Action::Refused(_))), "{out:?}");
    }
    let request = sent(&machine.receive(seconds(1000), &offer));
    let foreign = answer_with(Kind::Reply, &request, TWO, vec![addr(FIVE, 9, 9)]);
    assert_eq!(machine.receive(seconds(1000), &foreign), []);
    assert_eq!(machine.receive(seconds(1000), &answer(Kind::Advertise, &request)), []);
    got(&machine.receive(seconds(1000), &answer(Kind::Reply, &request)));
}

#[test]
fn a_server_without_addresses_is_logged_once() {
    let mut machine = machine(0);
    let mut logged = Vec::new();
    while machine.deadline() < seconds(1100) {
        let solicit = sent(&machine.tick(machine.deadline()));
        let mut refusal = failing(Kind::Advertise, &solicit, status::NO_ADDRS_AVAIL);
        refusal.sol_max_rt = Some(100);
        logged.extend(machine.receive(machine.deadline(), &refusal));
    }
    assert!(machine.deadline() > seconds(1100) && machine.deadline() < seconds(1208));
    let expected = "refused by the server: NoAddrsAvail (because)".to_owned();
    assert_eq!(logged, [Action::Refused(expected)]);
    assert_eq!(machine.client.sol_max_rt, Some(100));
    // An Advertise with an address and a failure is not an offer.
    let solicit = sent(&machine.tick(machine.deadline()));
    let mut both = at_once(answer(Kind::Advertise, &solicit));
    both.status = Status { code: status::NO_ADDRS_AVAIL, sentence: String::new() };
    let out = machine.receive(machine.deadline(), &both);
    assert!(matches!(&out[..], [Action::Refused(_)]), "{out:?}");
}

#[test]
fn a_server_without_replies_is_abandoned() {
    let mut machine = machine(0);
    requesting(&mut machine, seconds(1000));
    let mut requests = 1;
    loop {
        let out = machine.tick(machine.deadline());
        if sent(&out).kind == Kind::Solicit {
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
        let now = machine.deadline();
        let request = requesting(&mut machine, now);
        // Not a decision: the Request is repeated.
        machine.receive(now, &failing(Kind::Reply, &request, status::UNSPEC_FAIL));
        let again = sent(&machine.tick(machine.deadline()));
        assert_eq!((again.kind, again.xid), (Kind::Request, request.xid));
        let now = machine.deadline();
        let out = machine.receive(now, &failing(Kind::Reply, &request, code));
        assert!(matches!(out[..], [Action::Refused(_)]), "{out:?}");
        waits.push(machine.deadline().saturating_sub(now).as_millis());
    }
    assert!(waits[0] == 0 && waits[1] < 400 && waits[3] > waits[1], "{waits:?}");
}

#[test]
fn a_decline_is_repeated_until_the_reply() {
    let mut machine = machine(200);
    for (conflict, pause) in [(1, 0), (2, 10)] {
        let now = machine.deadline();
        let request = requesting(&mut machine, now);
        machine.receive(now, &answer(Kind::Reply, &request));
        let decline = sent(&machine.on_conflict(now));
        assert_eq!((decline.kind, &decline.server[..]), (Kind::Decline, &ONE[..]));
        assert_eq!(decline.ias, [IaNa::of(IAID, Some(FIVE))]);
        assert_eq!((decline.requested.len(), machine.binding()), (0, None));
        let again = sent(&machine.tick(machine.deadline()));
        assert_eq!((again.kind, again.xid), (Kind::Decline, decline.xid));
        assert_eq!(machine.receive(now, &answer(Kind::Reply, &decline)), []);
        assert_eq!(machine.deadline(), now + seconds(pause), "{conflict}");
        assert_eq!(machine.on_conflict(now), [], "once");
    }
    // The number of declines is limited.
    let now = machine.deadline();
    let request = requesting(&mut machine, now);
    machine.receive(now, &answer(Kind::Reply, &request));
    machine.on_conflict(now);
    let declines = (0..10)
        .take_while(|_| {
            let out = machine.tick(machine.deadline());
            out.iter().any(|o| matches!(o, Action::Multicast(m) if m.kind == Kind::Decline))
        })
        .count();
    assert_eq!(declines, 3);
}

#[test]
fn renew_goes_to_the_server_rebind_to_all_until_expiry() {
    let mut machine = bound();
    let lease = machine.state.lease().unwrap().clone();
    let (mut kinds, mut last) = (String::new(), lease.renew);
    while machine.state.lease().is_some() {
        let now = machine.deadline();
        assert!(now >= last, "{now:?}");
        last = now;
        for output in machine.tick(now) {
            kinds.push(match output {
                Action::Multicast(message) => {
                    assert_eq!(message.ias, [IaNa::of(IAID, Some(FIVE))]);
                    match message.kind {
                        Kind::Renew if message.server == ONE => 'n',
                        Kind::Rebind if message.server.is_empty() => 'b',
                        other => panic!("{other:?}"),
                    }
                }
                Action::Lost(_) => 'L',
                other => panic!("{other:?}"),
            });
        }
    }
    assert!(kinds.trim_start_matches('n').trim_start_matches('b') == "L", "{kinds}");
    assert!(kinds.contains("nn") && kinds.contains("bb") && kinds.len() < 25, "{kinds}");
    assert_eq!(last, lease.expires);
    assert_eq!(sent(&machine.tick(machine.deadline())).kind, Kind::Solicit);
    assert!(machine.tick(seconds(1_000_000)).iter().all(|o| *o != Action::TimeIsUp));
}

#[test]
fn a_reply_extends_the_lease() {
    let mut machine = bound();
    let first = machine.state.lease().unwrap().clone();
    let now = machine.deadline();
    let renewal = sent(&machine.tick(now));
    let mut crossed = answer(Kind::Reply, &renewal);
    (crossed.ias[0].t1, crossed.ias[0].t2) = (9, 8);
    let failed = |code| failing(Kind::Reply, &renewal, code);
    for useless in [crossed, failed(status::UNSPEC_FAIL), failed(status::NO_ADDRS_AVAIL)] {
        let out = machine.receive(now, &useless);
        assert!(matches!(out[..], [Action::Refused(_)]) && machine.state.lease() == Some(&first));
    }
    let lease = got(&machine.receive(now, &answer(Kind::Reply, &renewal)));
    assert_eq!((lease.address, lease.expires), (FIVE, now + seconds(3600)));
    // Rebind goes to all servers; the server that replies is the server of the lease.
    machine.tick(machine.deadline());
    let now = machine.state.lease().unwrap().rebind;
    let rebinding = sent(&machine.tick(now));
    assert_eq!(rebinding.kind, Kind::Rebind);
    let other = answer_with(Kind::Reply, &rebinding, TWO, vec![addr(SIX, 30, 40)]);
    let lease = got(&machine.receive(now, &other));
    assert_eq!((lease.address, lease.server), (SIX, TWO.to_vec()));
}

#[test]
fn an_unknown_lease_is_requested_again() {
    let mut machine = bound();
    let now = machine.deadline();
    let renewal = sent(&machine.tick(now));
    let out = machine.receive(now, &failing(Kind::Reply, &renewal, status::NO_BINDING));
    let request = sent(&out);
    assert_eq!((request.kind, &request.server[..]), (Kind::Request, &ONE[..]));
    assert_eq!(request.ias, [IaNa::of(IAID, Some(FIVE))]);
    assert!(machine.state.lease().is_some(), "still in use");
    // The client uses the address already: no probe.
    let mut again = bound();
    let renewal = sent(&again.tick(now));
    let request_again =
        sent(&again.receive(now, &failing(Kind::Reply, &renewal, status::NO_BINDING)));
    again.client.timing.probe = seconds(1);
    got(&again.receive(now, &answer(Kind::Reply, &request_again)));
    // The server may refuse the address.
    let refusal = failing(Kind::Reply, &request, status::NO_ADDRS_AVAIL);
    let out = machine.receive(now, &refusal);
    assert!(matches!(out[..], [Action::Lost(_), Action::Refused(_)]), "{out:?}");
    assert_eq!(machine.state.lease(), None);
}

#[test]
fn an_unconfirmed_lease_expires() {
    let mut machine = bound();
    let expires = machine.state.lease().unwrap().expires;
    let mut kinds = Vec::new();
    while machine.state.lease().is_some() {
        let now = machine.deadline();
        let out = machine.tick(now);
        for output in &out {
            if let Action::Multicast(message) = output {
                kinds.push(message.kind);
                if message.kind != Kind::Request {
                    machine.receive(now, &failing(Kind::Reply, message, status::NO_BINDING));
                }
            }
        }
        assert!(now <= expires && kinds.len() < 1000);
    }
    assert!(kinds.contains(&Kind::Rebind) && kinds.contains(&Kind::Request));
}

#[test]
fn a_withdrawn_or_misplaced_address_is_lost() {
    for misplaced in [true, false] {
        let mut machine = bound();
        let now = machine.deadline();
        let renewal = sent(&machine.tick(now));
        let reply = if misplaced {
            failing(Kind::Reply, &renewal, status::NOT_ON_LINK)
        } else {
            answer_with(Kind::Reply, &renewal, ONE, vec![addr(FIVE, 0, 0)])
        };
        let out = machine.receive(now, &reply);
        assert!(matches!(out[..], [Action::Lost(_), Action::Refused(_)]), "{out:?}");
        assert_eq!(
            (machine.deadline(), machine.state.lease()),
            (now, None),
            "at once the first time"
        );
    }
}

#[test]
fn a_resumed_lease_keeps_its_timers() {
    let lease = bound().state.lease().unwrap().clone();
    for (now, kind) in [
        (lease.renew.saturating_sub(seconds(1)), None),
        (lease.renew, Some(Kind::Renew)),
        (lease.rebind, Some(Kind::Rebind)),
    ] {
        let mut machine = Machine::resume(client(200), lease.clone(), Random::from_seed(2));
        let out = machine.tick(now);
        assert_eq!(out.first().map(|_| sent(&out).kind), kind);
    }
    let mut machine = Machine::resume(client(200), lease.clone(), Random::from_seed(2));
    assert!(matches!(machine.tick(lease.expires)[..], [Action::Lost(_)]));
}

#[test]
fn a_release_has_only_the_required_options() {
    let Some(Release::V6(message, FIVE)) = bound().release() else { panic!("no release") };
    assert_eq!((message.kind, &message.server[..]), (Kind::Release, &ONE[..]));
    assert_eq!((message.client, message.requested.len()), (client(0).duid, 0));
    assert_eq!(message.ias, [IaNa::of(IAID, Some(FIVE))]);
}
