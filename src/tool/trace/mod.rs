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

use super::folders::{CACHE, CONF, Folders, LEASES};
use super::{JSON, Tool, columns, ipam, print};
use crate::cni::json::pretty;
use crate::error::{Error, Result};
use crate::options::{CommandLine, Opt, opt, unknown_word, usage};
use crate::skel::{Table, record};
use crate::sort::sort_by_key;

pub(super) const TOOL: Tool = Tool {
    command: "cnibox trace",
    usage: "\
trace: reads the flight recorder

Usage:
  cnibox trace ls [--failed] [--json]     list the calls, oldest first
  cnibox trace show ID [--json]           show the steps of a call and of the other calls of its trace, with durations
  cnibox trace stats [--json]             calls, errors and durations by plugin and verb

Failed calls are always recorded, with their configuration; other calls with CNI_LOG=trace in the runtime's environment,
or if the runtime passes TRACEPARENT. ID is the identifier of a call or of a trace, or a prefix of it.
",
    options: &[
        opt("--failed", "", "ls: failed calls only"),
        opt("--format", "FORMAT", "stats: text or prometheus, for node-exporter's textfile collector [text]"),
        Opt {
            about: "print an array of objects: ls: id, trace, call, network, container, interface, start\n\
                    (seconds since 1970), seconds, code and problem; show: the steps, with id, parent, name,\n\
                    start, seconds, attributes and problem; stats: plugin, verb, calls, failed, and the\n\
                    quantiles in seconds",
            ..JSON
        },
        CONF,
        CACHE,
        LEASES,
    ],
    notes: "
Recordings are lines of OTLP JSON in /run/cnibox/traces.jsonl and failed.jsonl, each with one older file (.1), of
2 MB at most: OpenTelemetry's otlpjsonfile receiver reads /run/cnibox/*.jsonl.

Exit status: 0 done; 1 something failed, see stderr; 2 wrong usage.
",
};

/// The length of identifiers in lists, in characters.
const SHORT: usize = 12;

#[derive(Debug, PartialEq, Eq)]
enum Command {
    List { failed: bool },
    Show(String),
    Stats { prometheus: bool },
}

/// Runs `cnibox trace` with the arguments that follow.
pub(super) fn main(args: Vec<String>, _: Table) -> ExitCode {
    TOOL.run(
        args,
        |line| Ok((Command::read(&line)?, Folders::read(&line), line.has(JSON.flag))),
        |(command, folders, json)| run(&command, &folders, json),
    )
}

impl Command {
    fn read(line: &CommandLine) -> Result<Command> {
        let words: Vec<&str> = line.words.iter().map(String::as_str).collect();
        Ok(match words.as_slice() {
            [] => return Err(usage("a command is missing: ls, show or stats")),
            ["ls" | "list"] => Command::List { failed: line.has("--failed") },
            ["show", id] => Command::Show((*id).to_owned()),
            ["stats"] => match line.last("--format") {
                None | Some("text") => Command::Stats { prometheus: false },
                Some("prometheus") if line.has(JSON.flag) => {
                    return Err(usage("--json excludes --format prometheus"));
                }
                Some("prometheus") => Command::Stats { prometheus: true },
                Some(other) => return Err(unknown_word("format", other, &["text", "prometheus"])),
            },
            ["show"] => return Err(usage("the ID of a call is missing: see cnibox trace ls")),
            ["ls" | "list" | "show" | "stats", .., extra] => {
                return Err(usage(format!("unexpected argument \"{extra}\"")));
            }
            [other, ..] => return Err(unknown_word("command", other, &["ls", "show", "stats"])),
        })
    }
}

fn run(command: &Command, folders: &Folders, json: bool) -> Result<ExitCode> {
    let mut calls = Recording::all(&record::failed().read()?);
    if *command != (Command::List { failed: true }) {
        calls.extend(Recording::all(&record::traces().read()?));
        sort_by_key(&mut calls, |recording| recording.call().start);
    }
    print(&match command {
        Command::List { .. } if json => {
            array(&calls.iter().map(Recording::json).collect::<Vec<_>>())?
        }
        Command::List { .. } => list(&calls),
        Command::Show(id) => {
            let trace = &find(&calls, id)?.call().trace;
            let of_trace = calls.iter().filter(|recording| recording.call().trace == *trace);
            let steps = of_trace.flat_map(|recording| &recording.spans);
            if json {
                array(&steps.map(Span::json).collect::<Vec<_>>())?
            } else {
                waterfall::show(&calls, trace)
            }
        }
        Command::Stats { prometheus: true } => stats::prometheus(&calls, folders)?,
        Command::Stats { prometheus: false } if json => array(&stats::json(&calls))?,
        Command::Stats { prometheus: false } => stats::text(&calls),
    })
}

fn array(objects: &[Value]) -> Result<String> {
    Ok(pretty(&objects)? + "\n")
}

/// The newest call whose identifier, or whose trace's identifier, has this prefix.
fn find<'a>(calls: &'a [Recording], id: &str) -> Result<&'a Recording> {
    let matches = |recording: &&Recording| {
        let call = recording.call();
        !id.is_empty() && (call.id.starts_with(id) || call.trace.starts_with(id))
    };
    let msg = || format!("no call \"{id}\" is recorded: see cnibox trace ls");
    calls.iter().rfind(matches).ok_or_else(|| Error::config(msg()))
}

fn list(recordings: &[Recording]) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let line = |recording: &Recording| {
        let call = recording.call();
        let age = now.as_secs().saturating_sub(call.start / 1_000_000_000);
        let outcome = match recording.get("cni.error.code") {
            "" if call.error.is_none() => "ok".to_owned(),
            "" => "failed".to_owned(),
            code => format!("code {code}"),
        };
        let word = |key: &str| match recording.get(key) {
            "" => "-".to_owned(),
            text => text.to_owned(),
        };
        [
            call.id.chars().take(SHORT).collect(),
            ipam::short(age),
            call.name.clone(),
            word("cni.network"),
            word("cni.container_id").chars().take(SHORT).collect(),
            word("cni.ifname"),
            duration(call.duration()),
            outcome,
        ]
    };
    let heading = ["ID", "AGE", "CALL", "NETWORK", "CONTAINER", "INTERFACE", "TIME", "OUTCOME"];
    let lines = [heading.map(str::to_owned)].into_iter().chain(recordings.iter().map(line));
    columns(lines.collect())
}

/// Nanoseconds as milliseconds; `-` if nothing was measured, as in the recording of a failed call without spans.
fn duration(nanos: u64) -> String {
    match nanos {
        0..5_000 => "-".to_owned(),
        _ => format!("{}.{:03} ms", nanos / 1_000_000, nanos / 1_000 % 1_000),
    }
}

/// Nanoseconds as seconds.
#[expect(clippy::cast_precision_loss, reason = "microseconds are precise enough")]
fn seconds(nanos: u64) -> f64 {
    (nanos / 1_000) as f64 / 1e6
}

/// A call with its steps.
struct Recording {
    /// The first span is the call.
    spans: Vec<Span>,
}

/// A call, or a step of one.
struct Span {
    trace: String,
    id: String,
    /// The identifier of the parent; empty for the first span of a trace.
    parent: String,
    name: String,
    /// Nanoseconds since 1970.
    start: u64,
    end: u64,
    attributes: Vec<(String, String)>,
    /// The cause of its failure.
    error: Option<String>,
}

impl Recording {
    /// All recordings of a ring. Lines that are not recordings are skipped.
    fn all(lines: &str) -> Vec<Recording> {
        let parse = |line| {
            let line: Value = serde_json::from_str(line).ok()?;
            let spans = line["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array()?;
            let spans = spans.iter().map(Span::parse).collect::<Option<Vec<_>>>()?;
            (!spans.is_empty()).then_some(Recording { spans })
        };
        lines.lines().filter_map(parse).collect()
    }

    fn call(&self) -> &Span {
        &self.spans[0]
    }

    fn json(&self) -> Value {
        let call = self.call();
        json!({
            "id": call.id,
            "trace": call.trace,
            "call": call.name,
            "network": self.get("cni.network"),
            "container": self.get("cni.container_id"),
            "interface": self.get("cni.ifname"),
            "start": seconds(call.start),
            "seconds": seconds(call.duration()),
            "code": self.get("cni.error.code").parse().unwrap_or(0_u32),
            "problem": call.error.as_deref().unwrap_or_default(),
        })
    }

    /// An attribute of the call; empty if absent.
    fn get(&self, key: &str) -> &str {
        self.call().get(key)
    }
}

impl Span {
    fn parse(json: &Value) -> Option<Span> {
        let text = |key: &str| json[key].as_str().unwrap_or_default().to_owned();
        let attribute = |json: &Value| {
            let value = &json["value"];
            let value = value["stringValue"].as_str().or(value["intValue"].as_str())?;
            Some((json["key"].as_str()?.to_owned(), value.to_owned()))
        };
        let attributes = json["attributes"].as_array()?.iter().filter_map(attribute).collect();
        Some(Span {
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
    fn get(&self, key: &str) -> &str {
        let found = self.attributes.iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value.as_str()).unwrap_or_default()
    }

    fn json(&self) -> Value {
        let attributes = self.attributes.iter().map(|(key, value)| (key.clone(), json!(value)));
        json!({
            "id": self.id,
            "parent": self.parent,
            "name": self.name,
            "start": seconds(self.start),
            "seconds": seconds(self.duration()),
            "attributes": attributes.collect::<serde_json::Map<_, _>>(),
            "problem": self.error.as_deref().unwrap_or_default(),
        })
    }

    /// The duration in nanoseconds.
    fn duration(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{self, Asked};

    fn parsed(line: &str) -> Result<Command> {
        match options::parse(line.split_whitespace().map(str::to_owned).collect(), TOOL.options)? {
            Asked::Work(line) => Command::read(&line),
            asked => panic!("{asked:?}"),
        }
    }

    #[test]
    fn command_lines() {
        assert_eq!(parsed("ls"), Ok(Command::List { failed: false }));
        assert_eq!(parsed("ls --failed"), Ok(Command::List { failed: true }));
        assert_eq!(parsed("show 12ab"), Ok(Command::Show("12ab".to_owned())));
        assert_eq!(parsed("stats --format=prometheus"), Ok(Command::Stats { prometheus: true }));
        for wrong in
            ["", "show", "replay 12ab", "ls x", "stats x", "list a b", "lss", "stats --format json"]
        {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn lines_that_are_not_recordings_are_skipped() {
        assert!(Recording::all("{\"resourceSpans\":[]}\nnot JSON\n[]\n").is_empty());
    }
}
