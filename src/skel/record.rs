//! The choice of the calls that are recorded, and the files of the recordings: rings of OTLP JSON lines in `/run/cnibox`
//! (`docs/decisions/0021-flight-recorder.md`).

use std::path::Path;

use super::call::{Applet, Call, Env, Table, Verb};
use crate::cni::json::{Json, compact};
use crate::cni::secrets::{self, Shown};
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

/// As [`shown`], for the plugins of a call: the keys of all plugins take longer to find than most calls.
fn shown_of_call(plugin: &str, call: &Call<'_>) -> Shown {
    let text = String::from_utf8_lossy(call.stdin);
    let is_named = |name: &str| name == plugin || text.contains(&format!("\"{name}\""));
    // The type of a delegate may be its caller's default.
    let has_delegate = text.contains("\"delegate\"");
    let applets = call.table.applets.iter().filter(|a| has_delegate || is_named(a.name));
    Shown::new(applets.filter_map(Applet::as_plugin).map(|plugin| (plugin.keys)()))
}

/// These recordings for a document that leaves the node: another release may have left out less.
pub fn without_secrets(lines: &str, shown: &Shown) -> String {
    let clean = |json: &mut Json| {
        let key = json.get("key").and_then(Json::as_str).unwrap_or_default().to_owned();
        let value = json.get_mut("value").and_then(|value| value.get_mut("stringValue"));
        match (key.as_str(), value) {
            ("cni.config", Some(Json::String(text))) => {
                // The reason why it is none, or its length.
                let reason = |_| secrets::without_text(text);
                *text = Json::parse(text.as_bytes())
                    .map_or_else(reason, |conf| configuration(conf, shown));
            }
            ("cni.args", Some(Json::String(text))) => *text = secrets::without_args(text),
            _ => {}
        }
        if let Some(Json::String(text)) = json.get_mut("message") {
            *text = secrets::without_text(text);
        }
    };
    let line = |line: &str| {
        let mut json = Json::parse(line.as_bytes()).ok()?;
        json.for_each(&clean);
        Some(compact(&json).ok()? + "\n")
    };
    lines.lines().filter_map(line).collect()
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
        root.text("cni.args", || secrets::without_args(args));
    }
    let values = json.as_ref().map(secrets::values).unwrap_or_default();
    if error.is_some() {
        let conf = |json| configuration(json, &shown_of_call(plugin, call));
        root.text("cni.config", || json.map_or_else(|why| why.to_string(), conf));
    }
    let is_status = *verb == Verb::Status.as_str();
    write(&if error.is_some() && !is_status { failed() } else { traces() }, &values);
}

/// What is shown of configurations: the keys that a plugin of this executable or the specification knows.
pub fn shown(table: Table) -> Shown {
    let plugins = table.applets.iter().filter_map(Applet::as_plugin);
    Shown::new(plugins.map(|plugin| (plugin.keys)()))
}

/// Writes the recording of a tool, if there is one.
pub fn end_of_tool<T>(outcome: &Result<T>) {
    if let Err(error) = outcome {
        trace::root().fail(error);
    }
    write(&traces(), &[]);
}

/// Writes the recording, if there is one, without these values in its errors.
fn write(ring: &Ring, values: &[String]) {
    let line = trace::finish(&|error| secrets::without_values(error, values));
    if let Some(Err(error)) = line.map(|line| ring.append(&line)) {
        // A recording that cannot be written must not fail the call.
        log::debug(error);
    }
}

/// The name of a call: `bridge ADD`.
pub fn name(plugin: &str, env: &Env) -> String {
    format!("{plugin} {}", env.command)
}

fn configuration(json: Json, shown: &Shown) -> String {
    let text = compact(&shown.conf(json)).unwrap_or_default();
    if text.len() <= MAX_CONFIG { text } else { format!("{} bytes", text.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::applets::TABLE;
    use crate::cni::json::keys::Keys;

    /// A value of each of these keys, `7` where any value is possible.
    fn sample(keys: &Keys) -> Json {
        match keys {
            Keys::Any => Json::Number(7.into()),
            Keys::Items(keys) => Json::Array(vec![sample(keys)]),
            Keys::Fields(fields) => {
                let member = |(name, keys): &(&str, Keys)| ((*name).to_owned(), sample(keys));
                Json::Object(fields.iter().map(member).collect())
            }
        }
    }

    #[test]
    fn all_keys_of_the_plugins_are_shown() {
        for applet in TABLE.applets {
            let Some(plugin) = applet.as_plugin() else { continue };
            let conf = sample(&(plugin.keys)());
            assert_eq!(shown(TABLE).conf(conf.clone()), conf, "{}", applet.name);
        }
    }

    #[test]
    fn a_recording_of_another_release_leaves_out_as_much() {
        let line = r#"{"spans":[{"attributes":[{"key":"cni.args","value":{"stringValue":"A=x1"}},{"key":"cni.config","value":{"stringValue":"{\"type\":\"theirs\",\"login\":\"x2\"}"}},{"key":"cni.path","value":{"stringValue":"/opt"}}],"status":{"code":2,"message":"get https://u:x3@h"}}]}"#;
        let text = without_secrets(&format!("{line}\nno JSON: x4\n"), &shown(TABLE));
        assert!(!["x1", "x2", "x3", "x4"].iter().any(|secret| text.contains(secret)), "{text}");
        assert!(text.contains(r#"\"type\":\"theirs\""#) && text.contains("@h"), "{text}");
        assert_eq!(text.lines().count(), 1);
    }
}
