//! Output of iptables-save, which includes other programs' rules.
#![no_main]

use cnibox::testing::fuzz::Table;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let table = Table::parse("filter", text);
    for chain in &table.chains {
        assert!(table.has_chain(chain));
    }
    let _ = table.rules.len();
});
