//! The choice of the calls that are recorded, and the files of the recordings: rings of OTLP JSON
//! lines in `/run/cnibox` (`docs/decisions/0021-flight-recorder.md`).

use std::path::Path;

use super::call::{Applet, AppletTable, PluginCall};
use crate::files::ring::RotatingLog;
use crate::secrets::{self, VisibleKeys};
use crate::stderr;
use crate::trace::{self, TRACEPARENT, TraceParent};
use cni::error::{Error, Result};
use cni::json::{Json, encode_compact};
use cni::plugin::{CallEnvironment, CniVerb};

/// Limit of each file of a ring in bytes.
const LIMIT: u64 = 1 << 20;

/// Limit of a recorded configuration in bytes.
const MAX_CONFIG: usize = 32 * 1024;

/// The log of successful calls that were recorded on request, and of failed STATUS calls.
pub fn trace_log() -> RotatingLog {
    RotatingLog::new(Path::new("/run/cnibox/traces.jsonl"), LIMIT)
}

/// The log of failed calls, except for STATUS.
pub fn failed_call_log() -> RotatingLog {
    RotatingLog::new(Path::new("/run/cnibox/failed.jsonl"), LIMIT)
}

/// As [`shown_keys`], for the plugins of a call: the keys of all plugins take longer to find than
/// most calls.
fn shown_keys_of_call(plugin: &str, call: &PluginCall<'_>) -> VisibleKeys {
    let text = String::from_utf8_lossy(call.stdin);
    let is_named = |name: &str| name == plugin || text.contains(&format!("\"{name}\""));
    // The type of a delegate may be its caller's default.
    let has_delegate = text.contains("\"delegate\"");
    let applets = call.table.applets.iter().filter(|a| has_delegate || is_named(a.name));
    VisibleKeys::new(applets.filter_map(Applet::as_plugin).map(|plugin| (plugin.keys)()))
}

/// Removes secrets from recordings for a document that leaves the node: an earlier release may have
/// recorded more.
pub fn without_secrets(lines: &str, shown: &VisibleKeys) -> String {
    let clean = |json: &mut Json| {
        let key = json.get_member("key").and_then(Json::as_str).unwrap_or_default().to_owned();
        let value =
            json.get_member_mut("value").and_then(|value| value.get_member_mut("stringValue"));
        match (key.as_str(), value) {
            ("cni.config", Some(Json::String(text))) => {
                // The text may be the reason why there is no configuration, or its length.
                let reason = |_| secrets::redact_text(text);
                *text = Json::parse(text.as_bytes())
                    .map_or_else(reason, |conf| configuration_text(conf, shown));
            }
            ("cni.args", Some(Json::String(text))) => *text = secrets::redact_args(text),
            _ => {}
        }
        if let Some(Json::String(text)) = json.get_member_mut("message") {
            *text = secrets::redact_text(text);
        }
    };
    lines
        .lines()
        .filter_map(|line| {
            let mut json = Json::parse(line.as_bytes()).ok()?;
            json.modify_values(&clean);
            Some(encode_compact(&json).ok()? + "\n")
        })
        .collect()
}

/// Starts the recording of a call if its caller samples the trace (`TRACEPARENT`) or
/// `CNI_LOG=trace` is set.
pub fn start_recording(name: impl FnOnce() -> String) {
    let parent = std::env::var(TRACEPARENT).ok().and_then(|header| TraceParent::parse(&header));
    if stderr::is_level("trace") || parent.is_some_and(|parent| parent.is_sampled) {
        trace::start_recording(name(), parent);
    }
}

/// Writes the recording of a plugin call. A failed call is always recorded, with its configuration.
/// A failed STATUS is not written to the failed calls: runtimes call STATUS every few seconds,
/// which would displace all other calls.
pub fn finish_call(plugin: &str, call: &PluginCall<'_>, error: Option<&Error>) {
    let verb = &call.env.command;
    if error.is_some() && !trace::is_recording() {
        trace::start_recording(call_name(plugin, &call.env), None);
    }
    if !trace::is_recording() {
        return;
    }
    let root = trace::root_span();
    let CallEnvironment { container_id, netns, ifname, args, path, .. } = &call.env;
    let json = Json::parse(call.stdin);
    let network = json.as_ref().ok().and_then(|json| json.get_member("name")?.as_str());
    let variables = [
        ("cni.plugin", plugin),
        ("cni.command", verb),
        ("cni.container_id", container_id),
        ("cni.ifname", ifname),
        ("cni.netns", netns),
        ("cni.network", network.unwrap_or_default()),
    ];
    for (key, value) in variables.into_iter().filter(|(_, value)| !value.is_empty()) {
        root.add_text(key, || value);
    }
    if let Some(error) = error {
        root.add_number("cni.error.code", error.code().0.into());
        root.mark_failed(error);
        root.add_text("cni.path", || path.as_str());
        root.add_text("cni.args", || secrets::redact_args(args));
    }
    let values = json.as_ref().map(secrets::find_values).unwrap_or_default();
    if error.is_some() {
        root.add_text("cni.config", || {
            json.map_or_else(
                |why| why.to_string(),
                |json| configuration_text(json, &shown_keys_of_call(plugin, call)),
            )
        });
    }
    let is_status = *verb == CniVerb::Status.as_str();
    write_recording(
        &if error.is_some() && !is_status { failed_call_log() } else { trace_log() },
        &values,
    );
}

/// The keys of configurations whose values are shown: those of the plugins of this executable and
/// the specification.
pub fn shown_keys(table: AppletTable) -> VisibleKeys {
    let plugins = table.applets.iter().filter_map(Applet::as_plugin);
    VisibleKeys::new(plugins.map(|plugin| (plugin.keys)()))
}

/// Writes the recording of a tool, if there is one.
pub fn finish_tool<T>(outcome: &Result<T>) {
    if let Err(error) = outcome {
        trace::root_span().mark_failed(error);
    }
    write_recording(&trace_log(), &[]);
}

/// Writes the recording, if there is one, without these values in its errors.
fn write_recording(ring: &RotatingLog, values: &[String]) {
    let line = trace::finish_recording(&|error| secrets::redact_values(error, values));
    if let Some(Err(error)) = line.map(|line| ring.append_line(&line)) {
        // A recording that cannot be written must not fail the call.
        debug!("could not write the recording: {error}");
    }
}

/// The name of a call: `bridge ADD`.
pub fn call_name(plugin: &str, env: &CallEnvironment) -> String {
    format!("{plugin} {}", env.command)
}

fn configuration_text(json: Json, shown: &VisibleKeys) -> String {
    let text = encode_compact(&shown.redact_config(json)).unwrap_or_default();
    if text.len() <= MAX_CONFIG { text } else { format!("{} bytes", text.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::applets::TABLE;
    use cni::json::keys::DecodedKeys;

    /// A value of each of these keys, `7` where any value is possible.
    fn sample(keys: &DecodedKeys) -> Json {
        match keys {
            DecodedKeys::Any => Json::Number(7.into()),
            DecodedKeys::Items(keys) => Json::Array(vec![sample(keys)]),
            DecodedKeys::Fields(fields) => Json::Object(
                fields.iter().map(|(name, keys)| ((*name).to_owned(), sample(keys))).collect(),
            ),
        }
    }

    #[test]
    fn recordings_show_all_keys_of_plugins() {
        for applet in TABLE.applets {
            let Some(plugin) = applet.as_plugin() else { continue };
            let conf = sample(&(plugin.keys)());
            assert_eq!(shown_keys(TABLE).redact_config(conf.clone()), conf, "{}", applet.name);
        }
    }

    #[test]
    fn recordings_of_other_releases_lose_their_secrets() {
        let line = r#"{"spans":[{"attributes":[{"key":"cni.args","value":{"stringValue":"A=x1"}},{"key":"cni.config","value":{"stringValue":"{\"type\":\"theirs\",\"login\":\"x2\"}"}},{"key":"cni.path","value":{"stringValue":"/opt"}}],"status":{"code":2,"message":"get https://u:x3@h"}}]}"#;
        let text = without_secrets(&format!("{line}\nno JSON: x4\n"), &shown_keys(TABLE));
        assert!(!["x1", "x2", "x3", "x4"].iter().any(|secret| text.contains(secret)), "{text}");
        assert!(text.contains(r#"\"type\":\"theirs\""#) && text.contains("@h"), "{text}");
        assert_eq!(text.lines().count(), 1);
    }
}
