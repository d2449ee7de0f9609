//! Input of the DHCP daemon (lease files, requests of plugins) and of its clients (replies).
#![no_main]

use cnibox::testing::fuzz::dhcp::record;
use cnibox::testing::fuzz::dhcp::rpc::{DaemonReply, DaemonRequest};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = record::decode_record(bytes);
    let _ = DaemonRequest::decode_line(bytes);
    let _ = DaemonReply::decode_line(bytes);
});
