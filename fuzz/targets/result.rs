//! Results of other plugins in every version. A converted result must decode to the same result.
#![no_main]

use cnibox::testing::fuzz::Json;
use cnibox::testing::fuzz::{CniResult, SpecVersion};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(json) = Json::parse(bytes) else { return };
    for version in SpecVersion::ALL {
        let _ = CniResult::decode_prev_result(&json, version);
        let Ok(result) = CniResult::decode(&json, version) else { continue };
        for to in SpecVersion::ALL {
            let Ok(converted) = result.clone().convert_to(to) else { continue };
            let told = converted.to_json();
            assert_eq!(CniResult::decode(&told, to).unwrap().to_json(), told);
        }
    }
});
