//! Files of host-local's store: leases, the index, addresses that wait.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| cnibox::store::fuzz::files(bytes));
