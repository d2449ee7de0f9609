//! Elements of sets and maps: reading back, replacing, cost.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use super::*;

#[test]
fn elements_round_trip() {
    let nft = sandbox();
    commit_base(&nft);
    let marks = T.value_map("marks", &[ValueType::Mark], &[ValueType::IfName]);
    let six =
        T.value_map("six", &[ValueType::Ipv6Addr, ValueType::EtherAddr], &[ValueType::Ipv6Addr]);
    let mac = crate::netlink::MacAddress([2, 0, 0, 0, 0, 1]);
    let all = [
        DNAT4
            .element_with_key((ip("10.0.0.1"), TransportProtocol::Udp, 53))
            .with_values((ip("10.1.0.1"), 53)),
        NAMES
            .element_with_key("eth0")
            .with_verdict(PacketVerdict::go_to("regular"))
            .with_comment("x"),
        NAMES.element_with_key("eth1").with_verdict(PacketVerdict::DROP),
        marks
            .element_with_key(NftValue::Mark(0x10))
            .with_values("veth1")
            .with_comment("\"quoted\" \u{e4}"),
        six.element_with_key((ip("fd00::1"), mac)).with_values(ip("fd00::2")),
    ];
    let batch = one(|batch| {
        batch.add_object(marks).add_object(six);
        for element in &all {
            batch.add_element(element);
        }
    });
    nft.commit_batch(batch).unwrap();
    for element in &all {
        assert!(nft.dump_elements(element.set).unwrap().contains(element), "{element}");
        assert_eq!(nft.read_element(element).unwrap().as_ref(), Some(element));
    }
    assert_eq!(nft.read_element(&NAMES.element_with_key("eth9")).unwrap(), None);
    assert_eq!(
        nft.read_element(&T.verdict_map("none", &[ValueType::IfName]).element_with_key("eth9"))
            .unwrap(),
        None
    );
    let text = ruleset();
    assert!(text.contains("fd00::1 . 02:00:00:00:00:01 : fd00::2"), "{text}");
    assert!(text.contains("0x00000010 comment \"\"quoted\" \u{e4}\" : \"veth1\""), "{text}");
}

#[test]
fn an_element_is_replaced_in_one_batch() {
    let nft = sandbox();
    commit_base(&nft);
    let key = (ip("10.0.0.1"), TransportProtocol::Tcp, 80);
    for (port, destroys) in [(1, true), (2, true), (3, false), (4, false)] {
        nft.destroys.set(destroys);
        let element = DNAT4
            .element_with_key(key)
            .with_values((ip("10.1.0.1"), port))
            .with_comment(format!("{port}"));
        let batch = one(|batch| {
            batch.delete_element(&element).add_element(&element);
        });
        nft.commit_batch(batch).unwrap();
        assert_eq!(nft.read_element(&element).unwrap(), Some(element));
    }
}

/// The CPU time of the calling thread, in user and kernel mode, which other processes hardly
/// affect.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

/// The median of 30 runs.
fn median(mut run: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..30)
        .map(|_| {
            let start = cpu_time();
            run();
            cpu_time().saturating_sub(start)
        })
        .collect();
    times.sort();
    times[15]
}

fn cost(nft: &NftSocket) -> [Duration; 3] {
    let element = DNAT4
        .element_with_key((ip("10.0.0.1"), TransportProtocol::Tcp, 80))
        .with_values((ip("10.1.0.1"), 8080));
    let add = || {
        let mut batch = NftBatch::new();
        base(&mut batch);
        batch.add_element(&element);
        nft.commit_batch(batch).unwrap();
    };
    let del = || {
        nft.commit_batch(one(|b| {
            b.delete_element(&element);
        }))
        .unwrap();
    };
    let both = median(|| {
        add();
        del();
    });
    add();
    let get = median(|| assert!(nft.read_element(&element).unwrap().is_some()));
    del();
    let del_absent = median(del);
    [both, get, del_absent]
}

#[test]
fn ten_thousand_elements_do_not_slow_down_changes() {
    let nft = sandbox();
    commit_base(&nft);
    let empty = cost(&nft);
    let batch = one(|batch| {
        for n in 0..10_000_u16 {
            let key = (ip("10.2.0.1"), TransportProtocol::Tcp, n);
            batch.add_element(
                &DNAT4.element_with_key(key).with_values((ip("10.1.0.1"), n)).with_comment("pod"),
            );
        }
    });
    let start = cpu_time();
    nft.commit_batch(batch).unwrap();
    let filled = cpu_time().saturating_sub(start);
    let full = cost(&nft);
    let start = cpu_time();
    assert_eq!(nft.dump_elements(DNAT4).unwrap().len(), 10_000);
    let dump = cpu_time().saturating_sub(start);
    eprintln!("base + element + delete, get, delete absent: {empty:?}; with 10,000: {full:?}");
    let opening = median(|| drop(NftSocket::open().unwrap()));
    let mut kept = Vec::new();
    let working = median(|| {
        let nft = NftSocket::open().unwrap();
        commit_base(&nft);
        kept.push(nft);
    });
    let closing = median(|| drop(kept.pop()));
    eprintln!("opening: {opening:?}; ensuring the base: {working:?}; closing: {closing:?}");
    let wrong = PODS.element_with_key(ip("fd00::1"));
    let error = nft
        .commit_batch(one(|b| {
            b.delete_element(&wrong);
        }))
        .unwrap_err()
        .to_string();
    eprintln!("{error}");
    let missing = median(|| {
        nft.commit_batch(one(|b| {
            b.delete_object(NftTable::new_inet("none").named_set("s", &[]));
        }))
        .unwrap();
    });
    eprintln!("deleting from a missing table: {missing:?}");
    eprintln!("adding 10,000 in one batch: {filled:?}; reading them: {dump:?}");
    for (full, empty) in full.iter().zip(empty) {
        // Reading all elements takes milliseconds.
        assert!(*full < empty * 8 + Duration::from_millis(2), "{full:?} {empty:?}");
    }
}
