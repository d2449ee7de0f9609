//! Files of host-local's store: leases, the journal, released addresses.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| cnibox::testing::fuzz::parse_lease_files(bytes));
