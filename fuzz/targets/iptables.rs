//! Output of iptables-save, which includes other programs' rules.
#![no_main]

use cnibox::testing::fuzz::IptablesTable;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let table = IptablesTable::parse_save_output("filter", text);
    for chain in &table.chains {
        assert!(table.has_chain(chain));
    }
    let _ = table.rules.len();
});
