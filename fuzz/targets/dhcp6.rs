//! What a DHCPv6 server and neighbours send.
#![no_main]

use std::net::Ipv6Addr;
use std::time::Duration;

use cnibox::testing::fuzz::dhcp::timing::Random;
use cnibox::testing::fuzz::dhcp::v6::lease::Lease;
use cnibox::testing::fuzz::dhcp::v6::message::Message;
use cnibox::testing::fuzz::dhcp::v6::{neighbour, reply};
use cnibox::testing::netlink::Mac;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let own = Ipv6Addr::LOCALHOST;
    let _ = neighbour::conflict(bytes, Mac([2; 6]), own);
    let Some(message) = Message::decode(bytes) else { return };
    let mut random = Random::from_seed(1);
    for ia in &message.ias {
        let _ = reply::offer(&message, ia.iaid);
        reply::evaluate(&message, ia.iaid, own, Duration::ZERO, &mut random);
        for own in ia.addrs.iter().map(|given| Some(given.addr)).chain([None]) {
            if let Ok(lease) = Lease::from_reply(&message, ia, own, Duration::ZERO, &mut random) {
                let _ = lease.result().to_json();
            }
        }
    }
});
