//! What the DHCP daemon reads: its files, requests of plugins; and what a plugin reads of it.
#![no_main]

use cnibox::plugins::dhcp::stored;
use cnibox::plugins::dhcp::wire::{Answer, Request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = stored::read(bytes);
    let _ = Request::decode(bytes);
    let _ = Answer::decode(bytes);
});
