//! Requests: JSON, and the keys common to all configurations. Printed JSON must parse again.
#![no_main]

use cnibox::testing::fuzz::NetworkConfig;
use cnibox::testing::fuzz::{Json, encode_compact, encode_pretty};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(json) = Json::parse(bytes) else { return };
    Json::parse(encode_compact(&json).unwrap().as_bytes()).unwrap();
    Json::parse(encode_pretty(&json.with_sorted_keys().with_normalised_numbers()).unwrap().as_bytes()).unwrap();
    if let Ok(mut conf) = NetworkConfig::parse(bytes) {
        let _ = (conf.read_version(), conf.read_common(None), conf.valid_attachments());
    }
});
