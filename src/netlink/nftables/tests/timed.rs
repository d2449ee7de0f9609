//! Sets whose elements vanish after a time; the redirection to a port.

use std::net::UdpSocket;
use std::thread;
use std::time::Duration;

use super::*;
use crate::netlink::{LinkChange, MacAddress, Netlink};
use nix::errno::Errno;

const NAMED: NftSet<'_> =
    T.named_set("named", &[ValueType::EtherAddr, ValueType::Ipv4Addr]).with_timeouts();

fn key(last: u8, seconds: u32) -> TimedKey {
    ((MacAddress([2, 0, 0, 0, 0, 1]), ip(&format!("192.0.2.{last}"))).into(), seconds)
}

/// The set as nft lists it, on one line.
fn listed_set() -> String {
    nft(&["list", "set", "inet", "t", "named"]).split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn each_element_vanishes_at_its_own_time() {
    let nft_socket = sandbox();
    let (brief, long) = (key(1, 1), key(2, 3600));
    nft_socket
        .commit_batch(one(|batch| {
            batch.ensure_object(T).ensure_object(NAMED);
            batch.add_timed_keys(NAMED, &[brief.clone(), long.clone()]);
        }))
        .unwrap();
    let both = [brief.clone(), long.clone()];
    assert_eq!(nft_socket.present_keys(NAMED, &both).unwrap(), both);
    let listed = listed_set();
    assert!(listed.contains("02:00:00:00:00:01 . 192.0.2.2 timeout 1h"), "{listed}");
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(nft_socket.present_keys(NAMED, &both).unwrap(), [long]);
    // Such an element is absent for a deletion, too.
    let deletion = one(|batch| {
        batch.delete_keys(NAMED, &[brief]);
    });
    assert_eq!(nft_socket.commit_batch(deletion).unwrap_err().errno(), Some(Errno::ENOENT));
}

#[test]
fn the_time_of_an_element_is_replaced() {
    let nft_socket = sandbox();
    let many: Vec<TimedKey> = (0..200).map(|last| key(last, 60)).collect();
    nft_socket
        .commit_batch(one(|batch| {
            batch.ensure_object(T).ensure_object(NAMED).add_timed_keys(NAMED, &many);
        }))
        .unwrap();
    let later: Vec<TimedKey> = (0..200).map(|last| key(last, 600)).collect();
    nft_socket
        .commit_batch(one(|batch| {
            batch.delete_keys(NAMED, &later).add_timed_keys(NAMED, &later);
        }))
        .unwrap();
    let listed = listed_set();
    assert_eq!(listed.matches("timeout 10m").count(), 200, "{listed}");
    assert!(!listed.contains("timeout 1m "), "{listed}");
}

#[test]
fn a_packet_is_redirected_to_the_port() {
    let nft_socket = sandbox();
    let own = Netlink::open().unwrap();
    let link = own.require_link("lo").unwrap();
    own.change_link(link.index, LinkChange::new().set_up()).unwrap();
    let output = T.named_chain("output").at_nat_hook(NetfilterHook::Output, -100);
    let rule = NftRule::new().dport_is(TransportProtocol::Udp, 53).redirect_to_port(533);
    nft_socket
        .commit_batch(one(|batch| {
            batch.ensure_object(T).ensure_object(output).append_rule(output, &rule);
        }))
        .unwrap();
    let listed = nft(&["list", "chain", "inet", "t", "output"]);
    assert!(listed.contains("udp dport 53 redirect to :533"), "{listed}");
    let receiver = UdpSocket::bind("127.0.0.1:533").unwrap();
    receiver.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    UdpSocket::bind("127.0.0.1:0").unwrap().send_to(b"asked", "127.0.0.2:53").unwrap();
    let mut buffer = [0; 16];
    assert_eq!(receiver.recv(&mut buffer).unwrap(), 5);
}
