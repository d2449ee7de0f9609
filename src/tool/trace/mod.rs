//! `cnibox trace`: what the flight recorder has of calls.
//!
//! | file | |
//! | --- | --- |
//! | `recording.rs` | a line of the recorder, read back |
//! | `waterfall.rs` | `show`: the spans of a trace under each other |
//! | `stats.rs` | `stats`: calls, errors and durations, and how full the pools are |
//! | `replay.rs` | `replay`: a call again, where it can do no harm |

mod recording;
mod replay;
mod stats;
mod waterfall;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use self::recording::Recording;
use super::gc::{CONF, LEASES};
use super::{CONF_DIR, Tool, ipam, print};
use crate::error::{Error, Result};
use crate::leases::DATA_DIR;
use crate::options::{CommandLine, Opt, opt, unknown_word, usage};
use crate::skel::{Table, record};
use crate::sort::sort_by_key;

pub(super) const TOOL: Tool = Tool {
    command: "cnibox trace",
    usage: "\
trace: what the flight recorder has of calls

Usage:
  cnibox trace ls [--failed]     the calls, oldest first
  cnibox trace show ID           what a call and the others of its trace did, and how long it took
  cnibox trace replay ID         makes a call again in network namespaces that are thrown away
  cnibox trace stats             calls, errors and durations by plugin and verb

A failed call is always recorded, with its configuration; the others with CNI_LOG=trace in the runtime's environment,
or where the runtime hands over TRACEPARENT. ID is that of a call or of a trace, or how it begins.
",
    options: &[
        opt("--failed", "", "ls: only calls that failed"),
        opt("--format", "FORMAT", "stats: text or prometheus, for node-exporter's textfile collector [text]"),
        CONF,
        LEASES,
    ],
    notes: "
Recordings are lines of OTLP JSON in /run/cnibox/traces.jsonl and failed.jsonl, each with one older file (.1), of
2 MB at most: OpenTelemetry's otlpjsonfile receiver reads /run/cnibox/*.jsonl.

Exit status: 0 done; 1 something failed, see stderr; 2 wrong usage; 3 no such call.
",
};

/// There is no such call.
const NOT_THERE: u8 = 3;

/// Letters of an identifier that are shown.
const SHORT: usize = 12;

/// What to do.
#[derive(Debug, PartialEq, Eq)]
enum Command {
    List { failed: bool },
    Show(String),
    Replay(String),
    Stats { prometheus: bool },
}

struct Job {
    command: Command,
    /// Network configurations.
    conf: PathBuf,
    /// Leases of host-local.
    leases: PathBuf,
}

/// `cnibox trace` with the arguments behind it.
pub(super) fn main(args: Vec<String>, table: Table) -> ExitCode {
    TOOL.run(args, |line| Job::read(&line), |job| job.run(table))
}

impl Job {
    fn read(line: &CommandLine) -> Result<Job> {
        let words: Vec<&str> = line.words.iter().map(String::as_str).collect();
        let command = match words.as_slice() {
            [] => return Err(usage("say what to do: ls, show, replay or stats")),
            ["ls" | "list"] => Command::List { failed: line.has("--failed") },
            ["show", id] => Command::Show((*id).to_owned()),
            ["replay", id] => Command::Replay((*id).to_owned()),
            ["stats"] => match line.last("--format") {
                None | Some("text") => Command::Stats { prometheus: false },
                Some("prometheus") => Command::Stats { prometheus: true },
                Some(other) => return Err(unknown_word("format", other, &["text", "prometheus"])),
            },
            ["show" | "replay"] => return Err(usage("say which call: see cnibox trace ls")),
            ["ls" | "list" | "show" | "replay" | "stats", .., extra] => {
                return Err(usage(format!("unexpected argument \"{extra}\"")));
            }
            [other, ..] => {
                return Err(unknown_word("command", other, &["ls", "show", "replay", "stats"]));
            }
        };
        let folder = |flag: Opt, default: &str| line.last(flag.flag).unwrap_or(default).into();
        Ok(Job { command, conf: folder(CONF, CONF_DIR), leases: folder(LEASES, DATA_DIR) })
    }

    fn run(&self, table: Table) -> Result<ExitCode> {
        let failed = Recording::all(&record::failed().read()?);
        let mut all = failed.clone();
        all.extend(Recording::all(&record::traces().read()?));
        sort_by_key(&mut all, |recording| recording.call().start);
        match &self.command {
            Command::List { failed: true } => print(&list(&failed)),
            Command::List { failed: false } => print(&list(&all)),
            Command::Show(id) => match find(&all, id) {
                Some(found) => print(&waterfall::show(&of_trace(&all, found))),
                None => Ok(not_there(id)),
            },
            Command::Replay(id) => match find(&all, id) {
                Some(found) => replay::replay(found, table),
                None => Ok(not_there(id)),
            },
            Command::Stats { prometheus: true } => {
                print(&stats::prometheus(&all, &self.conf, &self.leases)?)
            }
            Command::Stats { prometheus: false } => print(&stats::text(&all)),
        }
    }
}

fn not_there(id: &str) -> ExitCode {
    crate::log::line(format_args!(
        "cnibox trace: no call \"{id}\" is recorded: see cnibox trace ls"
    ));
    ExitCode::from(NOT_THERE)
}

/// The newest call whose identifier, or that of its trace, begins so.
fn find<'a>(all: &'a [Recording], id: &str) -> Option<&'a Recording> {
    let is_it = |recording: &&Recording| {
        let call = recording.call();
        !id.is_empty() && (call.id.starts_with(id) || call.trace.starts_with(id))
    };
    all.iter().rfind(is_it)
}

/// The calls of the same trace.
fn of_trace<'a>(all: &'a [Recording], one: &Recording) -> Vec<&'a Recording> {
    let is_same = |recording: &&Recording| recording.call().trace == one.call().trace;
    all.iter().filter(is_same).collect()
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
    let heading = ["ID", "AGE", "CALL", "NETWORK", "CONTAINER", "INTERFACE", "TIME", "OUTCOME"]
        .map(str::to_owned);
    let lines: Vec<_> = [heading].into_iter().chain(recordings.iter().map(line)).collect();
    super::columns(&lines)
}

/// Nanoseconds for a person; `-` where nothing was measured, as of a failed call that nobody asked to record.
fn duration(nanos: u64) -> String {
    match nanos {
        0..5_000 => "-".to_owned(),
        _ => format!("{}.{:03} ms", nanos / 1_000_000, nanos / 1_000 % 1_000),
    }
}

/// What went wrong and is not a plugin's error.
fn failed(what: &str, cause: impl std::fmt::Display) -> Error {
    Error::internal(format!("{what}: {cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{self, Asked};

    fn parsed(line: &str) -> Result<Command> {
        match options::parse(line.split_whitespace().map(str::to_owned).collect(), TOOL.options)? {
            Asked::Work(line) => Job::read(&line).map(|job| job.command),
            asked => panic!("{asked:?}"),
        }
    }

    #[test]
    fn command_lines() {
        assert_eq!(parsed("ls"), Ok(Command::List { failed: false }));
        assert_eq!(parsed("ls --failed"), Ok(Command::List { failed: true }));
        assert_eq!(parsed("show 12ab"), Ok(Command::Show("12ab".to_owned())));
        assert_eq!(parsed("replay 12ab"), Ok(Command::Replay("12ab".to_owned())));
        assert_eq!(parsed("stats --format=prometheus"), Ok(Command::Stats { prometheus: true }));
        for wrong in ["", "show", "ls x", "stats x", "list a b", "lss", "stats --format json"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
