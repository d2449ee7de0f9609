//! What iptables-save prints: rules of others are in it.
#![no_main]

use cnibox::netfilter::draft::Draft;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let draft = Draft::parse("filter", text);
    for chain in draft.chains() {
        assert!(draft.has_chain(chain));
    }
    let _ = draft.rules().len();
});
