//! Input from DHCP servers, as a frame and as a message.
#![no_main]

use std::time::Duration;

use cnibox::testing::fuzz::dhcp::timing::Random;
use cnibox::testing::fuzz::dhcp::v4::frame;
use cnibox::testing::fuzz::dhcp::v4::lease::Lease;
use cnibox::testing::fuzz::dhcp::v4::message::Message;
use cnibox::testing::netlink::Mac;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let payload = frame::read_udp(bytes).map_or(bytes, |(_, payload)| payload);
    let Some(message) = Message::decode(payload) else { return };
    let mut random = Random::from_seed(1);
    let Ok(lease) = Lease::from_ack(&message, Mac([2; 6]), Duration::ZERO, &mut random) else {
        return;
    };
    assert!(!lease.differs_on_link(&lease));
    let _ = lease.result(100).to_json();
});
