//! Input from DHCP servers, as a frame and as a message.
#![no_main]

use std::time::Duration;

use cnibox::testing::fuzz::dhcp::timing::RandomGenerator;
use cnibox::testing::fuzz::dhcp::v4::frame;
use cnibox::testing::fuzz::dhcp::v4::lease::Dhcp4Lease;
use cnibox::testing::fuzz::dhcp::v4::message::Dhcp4Message;
use cnibox::testing::netlink::MacAddress;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let payload = frame::decode_udp(bytes).map_or(bytes, |(_, payload)| payload);
    let Some(message) = Dhcp4Message::decode(payload) else { return };
    let mut random = RandomGenerator::from_seed(1);
    let Ok(lease) = Dhcp4Lease::from_ack(&message, MacAddress([2; 6]), Duration::ZERO, &mut random) else {
        return;
    };
    assert!(!lease.differs_on_link(&lease));
    let _ = lease.ipam_result().to_json();
});
