//! The resolver of a test's node, which containers with names in their policies ask.

use std::fs::{self, File};
use std::path::Path;

use crate::support::node::{Node, Running, eventually};

/// Starts `cnibox egress resolver` in the calling thread's namespaces, with these upstream servers,
/// and waits until it serves. It is killed at the end of the value.
#[track_caller]
pub(crate) fn start_resolver(node: &Node, upstreams: &[&str]) -> Running {
    let options = upstreams.iter().flat_map(|server| ["--upstream", server]);
    let words: Vec<&str> = ["egress", "resolver"].into_iter().chain(options).collect();
    let log = node.path("resolver.log");
    let stderr = File::create(&log).unwrap();
    let resolver = Running::start_with(&node.cnibox(&words), stderr.into());
    is_ready(&log);
    resolver
}

/// Waits until a program has written a line that begins with "ready".
#[track_caller]
pub(crate) fn is_ready(log: &Path) {
    let read = || fs::read_to_string(log).unwrap();
    eventually("it does not start", || read().lines().any(|line| line.starts_with("ready")));
}
