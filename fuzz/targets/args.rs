//! Parser of `CNI_ARGS`.
#![no_main]

use cnibox::testing::fuzz::Args;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let _ = Args::parse(text, &["IP", "GATEWAY"]);
});
