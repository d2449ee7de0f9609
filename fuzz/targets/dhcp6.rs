//! Input from DHCPv6 servers and neighbours.
#![no_main]

use std::net::Ipv6Addr;
use std::time::Duration;

use cnibox::testing::fuzz::dhcp::machine::v6::Client;
use cnibox::testing::fuzz::dhcp::machine::{Protocol, Step};
use cnibox::testing::fuzz::dhcp::timing::{Exchange, Random, Timing};
use cnibox::testing::fuzz::dhcp::v6::lease::{Binding, Lease};
use cnibox::testing::fuzz::dhcp::v6::message::Message;
use cnibox::testing::fuzz::dhcp::v6::neighbour;
use cnibox::testing::netlink::Mac;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let own = Ipv6Addr::LOCALHOST;
    let _ = neighbour::conflict(bytes, Mac([2; 6]), own);
    let Some(message) = Message::decode(bytes) else { return };
    let mut random = Random::from_seed(1);
    let exchange = Exchange::begin(Duration::ZERO, message.xid);
    let binding = Binding { address: own, server: message.server.clone() };
    for ia in &message.ias {
        let mut client = Client {
            duid: message.client.clone(),
            iaid: ia.iaid,
            mac: Mac([2; 6]),
            timing: Timing::default(),
            sol_max_rt: None,
        };
        for step in [Step::Discover, Step::Request(&binding), Step::Decline(&binding)] {
            let _ = client.judge(&step, &exchange, &message, None, &mut random);
        }
        for own in ia.addrs.iter().map(|given| Some(given.addr)).chain([None]) {
            if let Ok(lease) = Lease::from_reply(&message, ia, own, Duration::ZERO, &mut random) {
                let _ = client.judge(&Step::Renew(&lease), &exchange, &message, None, &mut random);
                let _ = lease.result().to_json();
            }
        }
    }
});
