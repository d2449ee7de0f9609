//! Parser of `CNI_ARGS`.
#![no_main]

use cnibox::testing::fuzz::CniArgPairs;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let _ = CniArgPairs::parse(text, &["IP", "GATEWAY"]);
});
