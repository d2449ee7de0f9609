//! The choice of the calls that are recorded, and the files of the recordings: rings of OTLP JSON lines in `/run/cnibox`
//! (`docs/decisions/0021-flight-recorder.md`).

use std::path::Path;

use super::call::{Call, Env, Verb};
use crate::cni::json::{Json, compact};
use crate::cni::secrets;
use crate::error::{Error, Result};
use crate::files::ring::Ring;
use crate::log;
use crate::trace::{self, Parent, TRACEPARENT};

/// Limit of each file of a ring in bytes.
const LIMIT: u64 = 1 << 20;

/// Limit of a recorded configuration in bytes.
const MAX_CONFIG: usize = 32 * 1024;

/// Successful calls that were recorded on request, and failed STATUS calls.
pub fn traces() -> Ring {
    Ring::new(Path::new("/run/cnibox/traces.jsonl"), LIMIT)
}

/// Failed calls.
pub fn failed() -> Ring {
    Ring::new(Path::new("/run/cnibox/failed.jsonl"), LIMIT)
}

/// Starts the recording of a call if its caller samples the trace (`TRACEPARENT`) or `CNI_LOG=trace` is set.
pub fn begin(name: impl FnOnce() -> String) {
    let parent = std::env::var(TRACEPARENT).ok().and_then(|header| Parent::parse(&header));
    if log::is_level("trace") || parent.is_some_and(|parent| parent.is_sampled) {
        trace::start(name(), parent);
    }
}

/// Writes the recording of a plugin call. A failed call is always recorded, with its configuration. A failed STATUS is
/// not written to the failed calls: runtimes call STATUS every few seconds, which would displace all other calls.
pub fn end(plugin: &str, call: &Call<'_>, error: Option<&Error>) {
    let verb = &call.env.command;
    if error.is_some() && !trace::is_on() {
        trace::start(name(plugin, &call.env), None);
    }
    if !trace::is_on() {
        return;
    }
    let root = trace::root();
    let Env { container_id, netns, ifname, args, path, .. } = &call.env;
    let json = Json::parse(call.stdin);
    let network = json.as_ref().ok().and_then(|json| json.get("name")?.as_str());
    let variables = [
        ("cni.plugin", plugin),
        ("cni.command", verb),
        ("cni.container_id", container_id),
        ("cni.ifname", ifname),
        ("cni.netns", netns),
        ("cni.network", network.unwrap_or_default()),
    ];
    for (key, value) in variables.into_iter().filter(|(_, value)| !value.is_empty()) {
        root.text(key, || value);
    }
    if let Some(error) = error {
        root.number("cni.error.code", error.code().0.into());
        root.fail(error);
        root.text("cni.path", || path.as_str());
        root.text("cni.args", || secrets::without_text(args));
        root.text("cni.config", || json.map_or_else(|why| why, configuration));
    }
    let is_status = *verb == Verb::Status.as_str();
    write(&if error.is_some() && !is_status { failed() } else { traces() });
}

/// Writes the recording of a tool, if there is one.
pub fn end_of_tool<T>(outcome: &Result<T>) {
    if let Err(error) = outcome {
        trace::root().fail(error);
    }
    write(&traces());
}

fn write(ring: &Ring) {
    if let Some(Err(error)) = trace::finish().map(|line| ring.append(&line)) {
        // A recording that cannot be written must not fail the call.
        log::debug(error);
    }
}

/// The name of a call: `bridge ADD`.
pub fn name(plugin: &str, env: &Env) -> String {
    format!("{plugin} {}", env.command)
}

fn configuration(json: Json) -> String {
    let text = compact(&secrets::without(json)).unwrap_or_default();
    if text.len() <= MAX_CONFIG { text } else { format!("{} bytes", text.len()) }
}
