//! `cnibox trace`: the calls in the flight recorder.
//!
//! | file | |
//! | --- | --- |
//! | `waterfall.rs` | `show`: the spans of a trace as a tree |
//! | `stats.rs` | `stats`: calls, errors and durations, and the use of the address pools |

mod stats;
mod waterfall;

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::directories::{CACHE, CONF, LEASES, ToolDirectories};
use super::{JSON, ToolCommand, format_table, ipam, json_text, print_text};
use crate::framework::{AppletTable, record};
use crate::options::{
    CommandLine, CommandOption, long_option, unexpected_argument, unknown_word_error, usage_error,
};
use cni::error::{Error, Result};
use cni::sort::sort_by_key;

pub(super) const TOOL: ToolCommand = ToolCommand {
    command: "cnibox trace",
    usage: "\
trace: reads the flight recorder

Usage:
  cnibox trace ls [--failed] [--json]     list the calls, oldest first
  cnibox trace show ID [--json]           show the steps of a call and of the other calls of its \
            trace, with durations
  cnibox trace stats [--json]             calls, errors and durations by plugin and verb

Failed calls are always recorded, with their configuration; other calls with CNI_LOG=trace in the \
            runtime's environment,
or if the runtime passes TRACEPARENT. ID is the identifier of a call or of a trace, or a prefix of \
            it.
",
    options: &[
        long_option("--failed", "", "ls: failed calls only"),
        long_option(
            "--format",
            "FORMAT",
            "stats: text or prometheus, for node-exporter's textfile collector [text]",
        ),
        CommandOption {
            about: "print an array of objects: ls: id, trace, call, network, container, \
                    interface, start\n(seconds since 1970), seconds, code and problem; show: the \
                    steps, with id, parent, name,\nstart, seconds, attributes and problem; stats: \
                    plugin, verb, calls, failed, and the\nquantiles in seconds",
            ..JSON
        },
        CONF,
        CACHE,
        LEASES,
    ],
    notes: "
Recordings are lines of OTLP JSON in /run/cnibox/traces.jsonl and failed.jsonl, each with one \
            older file (.1), of
2 MB at most: OpenTelemetry's otlpjsonfile receiver reads /run/cnibox/*.jsonl.

Exit status: 0 done; 1 something failed, see stderr; 2 wrong usage.
",
};

/// The length of identifiers in lists, in characters.
const SHORT: usize = 12;

#[derive(Debug, PartialEq, Eq)]
enum TraceCommand {
    List { failed: bool },
    Show(String),
    Stats { prometheus: bool },
}

/// Runs `cnibox trace` with the arguments that follow.
pub(super) fn main(args: Vec<String>, _: AppletTable) -> ExitCode {
    TOOL.run_command(
        args,
        |line| {
            Ok((
                TraceCommand::from_command_line(&line)?,
                ToolDirectories::from_command_line(&line),
                line.has_option(JSON.flag),
            ))
        },
        |(command, directories, json)| run_command(&command, &directories, json),
    )
}

impl TraceCommand {
    fn from_command_line(line: &CommandLine) -> Result<TraceCommand> {
        let words: Vec<&str> = line.words.iter().map(String::as_str).collect();
        Ok(match words.as_slice() {
            [] => return Err(usage_error("a command is missing: ls, show or stats")),
            ["ls" | "list"] => TraceCommand::List { failed: line.has_option("--failed") },
            ["show", id] => TraceCommand::Show((*id).to_owned()),
            ["stats"] => match line.last_value("--format") {
                None | Some("text") => TraceCommand::Stats { prometheus: false },
                Some("prometheus") if line.has_option(JSON.flag) => {
                    return Err(usage_error("--json excludes --format prometheus"));
                }
                Some("prometheus") => TraceCommand::Stats { prometheus: true },
                Some(other) => {
                    return Err(unknown_word_error("format", other, &["text", "prometheus"]));
                }
            },
            ["show"] => {
                return Err(usage_error("the ID of a call is missing: see cnibox trace ls"));
            }
            ["ls" | "list" | "show" | "stats", .., extra] => {
                return Err(unexpected_argument(extra));
            }
            [other, ..] => {
                return Err(unknown_word_error("command", other, &["ls", "show", "stats"]));
            }
        })
    }
}

fn run_command(
    command: &TraceCommand,
    directories: &ToolDirectories,
    json: bool,
) -> Result<ExitCode> {
    let mut calls = RecordedCall::parse_lines(&record::failed_call_log().read_lines()?);
    if *command != (TraceCommand::List { failed: true }) {
        calls.extend(RecordedCall::parse_lines(&record::trace_log().read_lines()?));
        sort_by_key(&mut calls, |recording| recording.call_span().start);
    }
    print_text(&match command {
        TraceCommand::List { .. } if json => {
            json_text(&calls.iter().map(RecordedCall::to_json).collect::<Vec<_>>())?
        }
        TraceCommand::List { .. } => list_calls(&calls),
        TraceCommand::Show(id) => {
            let trace = &find_call(&calls, id)?.call_span().trace;
            let of_trace = calls.iter().filter(|recording| recording.call_span().trace == *trace);
            let steps = of_trace.flat_map(|recording| &recording.spans);
            if json {
                json_text(&steps.map(ParsedSpan::to_json).collect::<Vec<_>>())?
            } else {
                waterfall::show_trace(&calls, trace)
            }
        }
        TraceCommand::Stats { prometheus: true } => stats::prometheus_text(&calls, directories)?,
        TraceCommand::Stats { prometheus: false } if json => {
            json_text(&stats::json_objects(&calls))?
        }
        TraceCommand::Stats { prometheus: false } => stats::text_table(&calls),
    })
}

/// The newest call whose identifier, or whose trace's identifier, has this prefix.
fn find_call<'a>(calls: &'a [RecordedCall], id: &str) -> Result<&'a RecordedCall> {
    let missing = || Error::config(format!("no call \"{id}\" is recorded: see cnibox trace ls"));
    calls
        .iter()
        .rfind(|recording| {
            let call = recording.call_span();
            !id.is_empty() && (call.id.starts_with(id) || call.trace.starts_with(id))
        })
        .ok_or_else(missing)
}

fn list_calls(recordings: &[RecordedCall]) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let line = |recording: &RecordedCall| {
        let call = recording.call_span();
        let age = now.as_secs().saturating_sub(call.start / 1_000_000_000);
        let outcome = match recording.call_attribute("cni.error.code") {
            "" if call.error.is_none() => "ok".to_owned(),
            "" => "failed".to_owned(),
            code => format!("code {code}"),
        };
        let word = |key: &str| match recording.call_attribute(key) {
            "" => "-".to_owned(),
            text => text.to_owned(),
        };
        [
            call.id.chars().take(SHORT).collect(),
            ipam::short_duration(age),
            call.name.clone(),
            word("cni.network"),
            word("cni.container_id").chars().take(SHORT).collect(),
            word("cni.ifname"),
            milliseconds_text(call.duration_nanos()),
            outcome,
        ]
    };
    let heading = ["ID", "AGE", "CALL", "NETWORK", "CONTAINER", "INTERFACE", "TIME", "OUTCOME"];
    format_table(heading, recordings.iter().map(line))
}

/// Nanoseconds as milliseconds; `-` if nothing was measured, as in the recording of a failed call
/// without spans.
fn milliseconds_text(nanos: u64) -> String {
    match nanos {
        0..5_000 => "-".to_owned(),
        _ => format!("{}.{:03} ms", nanos / 1_000_000, nanos / 1_000 % 1_000),
    }
}

/// Nanoseconds as seconds.
#[expect(clippy::cast_precision_loss, reason = "microseconds are precise enough")]
fn nanos_to_seconds(nanos: u64) -> f64 {
    (nanos / 1_000) as f64 / 1e6
}

/// The recording of a call: a span for the call, and one for each of its steps.
struct RecordedCall {
    /// The spans; the first one is the span of the call.
    spans: Vec<ParsedSpan>,
}

/// A call, or a step of a call.
struct ParsedSpan {
    trace: String,
    id: String,
    /// The identifier of the parent; empty for the first span of a trace.
    parent: String,
    name: String,
    /// Nanoseconds since 1970.
    start: u64,
    end: u64,
    attributes: Vec<(String, String)>,
    /// The cause, if the step failed.
    error: Option<String>,
}

impl RecordedCall {
    /// All recordings of a ring. Lines that are not recordings are skipped.
    fn parse_lines(lines: &str) -> Vec<RecordedCall> {
        lines
            .lines()
            .filter_map(|line| {
                let line: Value = serde_json::from_str(line).ok()?;
                let spans = line["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array()?;
                let spans = spans.iter().map(ParsedSpan::from_json).collect::<Option<Vec<_>>>()?;
                (!spans.is_empty()).then_some(RecordedCall { spans })
            })
            .collect()
    }

    fn call_span(&self) -> &ParsedSpan {
        &self.spans[0]
    }

    fn to_json(&self) -> Value {
        let call = self.call_span();
        json!({
            "id": call.id,
            "trace": call.trace,
            "call": call.name,
            "network": self.call_attribute("cni.network"),
            "container": self.call_attribute("cni.container_id"),
            "interface": self.call_attribute("cni.ifname"),
            "start": nanos_to_seconds(call.start),
            "seconds": nanos_to_seconds(call.duration_nanos()),
            "code": self.call_attribute("cni.error.code").parse().unwrap_or(0_u32),
            "problem": call.error.as_deref().unwrap_or_default(),
        })
    }

    /// An attribute of the call; empty if absent.
    fn call_attribute(&self, key: &str) -> &str {
        self.call_span().attribute_value(key)
    }
}

impl ParsedSpan {
    fn from_json(json: &Value) -> Option<ParsedSpan> {
        let text = |key: &str| json[key].as_str().unwrap_or_default().to_owned();
        let attributes = json["attributes"]
            .as_array()?
            .iter()
            .filter_map(|json| {
                let value = &json["value"];
                let value = value["stringValue"].as_str().or(value["intValue"].as_str())?;
                Some((json["key"].as_str()?.to_owned(), value.to_owned()))
            })
            .collect();
        Some(ParsedSpan {
            trace: text("traceId"),
            id: text("spanId"),
            parent: text("parentSpanId"),
            name: text("name"),
            start: text("startTimeUnixNano").parse().ok()?,
            end: text("endTimeUnixNano").parse().ok()?,
            attributes,
            error: json["status"]["message"].as_str().map(str::to_owned),
        })
    }

    /// An attribute; empty if absent.
    fn attribute_value(&self, key: &str) -> &str {
        let found = self.attributes.iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value.as_str()).unwrap_or_default()
    }

    fn to_json(&self) -> Value {
        let attributes = self.attributes.iter().map(|(key, value)| (key.clone(), json!(value)));
        json!({
            "id": self.id,
            "parent": self.parent,
            "name": self.name,
            "start": nanos_to_seconds(self.start),
            "seconds": nanos_to_seconds(self.duration_nanos()),
            "attributes": attributes.collect::<serde_json::Map<_, _>>(),
            "problem": self.error.as_deref().unwrap_or_default(),
        })
    }

    /// The duration in nanoseconds.
    fn duration_nanos(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{self, ParsedCommandLine};

    fn parsed(line: &str) -> Result<TraceCommand> {
        let words = line.split_whitespace().map(str::to_owned).collect();
        match options::parse_args(words, TOOL.options)? {
            ParsedCommandLine::Work(line) => TraceCommand::from_command_line(&line),
            asked => panic!("{asked:?}"),
        }
    }

    #[test]
    fn command_lines_are_parsed() {
        assert_eq!(parsed("ls"), Ok(TraceCommand::List { failed: false }));
        assert_eq!(parsed("ls --failed"), Ok(TraceCommand::List { failed: true }));
        assert_eq!(parsed("show 12ab"), Ok(TraceCommand::Show("12ab".to_owned())));
        assert_eq!(
            parsed("stats --format=prometheus"),
            Ok(TraceCommand::Stats { prometheus: true })
        );
        for wrong in
            ["", "show", "replay 12ab", "ls x", "stats x", "list a b", "lss", "stats --format json"]
        {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn lines_that_are_not_recordings_are_skipped() {
        assert!(RecordedCall::parse_lines("{\"resourceSpans\":[]}\nnot JSON\n[]\n").is_empty());
    }
}
