//! Input of the DHCP daemon (lease files, requests of plugins) and of its clients (replies).
#![no_main]

use cnibox::testing::fuzz::dhcp::record;
use cnibox::testing::fuzz::dhcp::rpc::{Answer, Request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = record::read(bytes);
    let _ = Request::decode(bytes);
    let _ = Answer::decode(bytes);
});
