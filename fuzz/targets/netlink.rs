//! Netlink replies: links, addresses, routes, rules, VLANs, traffic control, `nf_tables`,
//! conntrack.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| cnibox::testing::fuzz::parse_replies(bytes));
