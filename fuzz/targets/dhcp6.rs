//! Input from DHCPv6 servers and neighbours.
#![no_main]

use std::net::Ipv6Addr;
use std::time::Duration;

use cnibox::testing::fuzz::dhcp::machine::v6::Dhcp6Client;
use cnibox::testing::fuzz::dhcp::machine::{DhcpProtocol, ExchangeStep};
use cnibox::testing::fuzz::dhcp::timing::{ClientTiming, MessageExchange, RandomGenerator};
use cnibox::testing::fuzz::dhcp::v6::lease::{Dhcp6Binding, Dhcp6Lease};
use cnibox::testing::fuzz::dhcp::v6::message::Dhcp6Message;
use cnibox::testing::fuzz::dhcp::v6::neighbour;
use cnibox::testing::netlink::MacAddress;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let own = Ipv6Addr::LOCALHOST;
    let _ = neighbour::is_conflict(bytes, MacAddress([2; 6]), own);
    let Some(message) = Dhcp6Message::decode(bytes) else { return };
    let mut random = RandomGenerator::from_seed(1);
    let exchange = MessageExchange::begin_at(Duration::ZERO, message.xid);
    let binding = Dhcp6Binding { address: own, server: message.server.clone() };
    for ia in &message.ias {
        let mut client = Dhcp6Client {
            duid: message.client.clone(),
            iaid: ia.iaid,
            mac: MacAddress([2; 6]),
            timing: ClientTiming::default(),
            sol_max_rt: None,
        };
        for step in [ExchangeStep::Discover, ExchangeStep::Request(&binding), ExchangeStep::Decline(&binding)] {
            let _ = client.interpret_reply(&step, &exchange, &message, None, &mut random);
        }
        for own in ia.addrs.iter().map(|given| Some(given.addr)).chain([None]) {
            if let Ok(lease) = Dhcp6Lease::from_reply(&message, ia, own, Duration::ZERO, &mut random) {
                let _ = client.interpret_reply(&ExchangeStep::Renew(&lease), &exchange, &message, None, &mut random);
                let _ = lease.ipam_result().to_json();
            }
        }
    }
});
