//! Requests: JSON, and the keys common to all configurations. Printed JSON must parse again.
#![no_main]

use cnibox::testing::fuzz::NetConf;
use cnibox::testing::fuzz::{Json, compact, pretty};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(json) = Json::parse(bytes) else { return };
    Json::parse(compact(&json).unwrap().as_bytes()).unwrap();
    Json::parse(pretty(&json.sorted().normalised()).unwrap().as_bytes()).unwrap();
    if let Ok(mut conf) = NetConf::parse(bytes) {
        let _ = (conf.read_version(), conf.read_common(), conf.valid_attachments());
    }
});
