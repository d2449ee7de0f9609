//! The runtime's cache, as libcni writes it, for the tools of cnibox.

use std::fs;

use serde_json::{Value, json};

use super::super::plan::Place;
use super::{Machine, Plugins};
use crate::support::conflist::{Attached, Conflist};

/// The results of the runtime's cache.
const CACHE: &str = "/var/lib/cni/results";

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits = (0..3)
            .fold(0, |bits, n| bits << 8 | usize::from(chunk.get(n).copied().unwrap_or_default()));
        for digit in 0..4 {
            let is_padding = digit > chunk.len();
            let value = bits >> (18 - 6 * digit) & 63;
            text.push(if is_padding { '=' } else { char::from(DIGITS[value]) });
        }
    }
    text
}

impl Machine<'_> {
    pub(super) fn cache(&self, list: &Conflist<'_>, at: &Attached, result: &Value) {
        if self.plugins == Plugins::Reference {
            return;
        }
        let file = json!({"kind": "cniCacheV1", "containerId": at.id, "ifName": at.ifname,
            "config": base64(list.conf.to_string().as_bytes()), "networkName": list.conf["name"], "netns": at.netns,
            "capabilityArgs": at.runtime, "result": result});
        fs::create_dir_all(CACHE).unwrap();
        let name = list.conf["name"].as_str().unwrap();
        fs::write(format!("{CACHE}/{name}-{}-{}", at.id, at.ifname), file.to_string()).unwrap();
    }
}

pub(super) fn uncache(list: &Conflist<'_>, place: Place) {
    let name = list.conf["name"].as_str().unwrap();
    fs::remove_file(format!("{CACHE}/{name}-twin-{}-{}", place.pod, place.ifname))
        .unwrap_or_default();
}
