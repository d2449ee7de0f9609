//! The tools for users.

pub mod cnitool;
mod directories;
pub mod doctor;
pub mod egress;
mod finding;
pub mod gc;
mod in_process;
pub mod install;
pub mod ipam;
mod life;
pub mod lint;
pub mod multicall;
mod outcome;
pub mod pause;
pub mod repair;
mod snapshot;
mod sysdump;
mod trace;

use std::io::{self, Write};
use std::process::ExitCode;

use serde::Serialize;

use crate::options::{self, CommandLine, CommandOption, ParsedCommandLine, long_option};
use crate::stderr;
use cni::error::{Error, Result};
use cni::json::encode_pretty;

/// The exit status after a wrong command line.
const WRONG_USAGE: u8 = 2;

/// An option of the tools that print objects.
const JSON: CommandOption = long_option("--json", "", "print JSON");

/// An option of the tools that change something.
const DRY_RUN: CommandOption = CommandOption {
    short: Some('n'),
    ..long_option(
        "--dry-run",
        "",
        "print what would be done, and change nothing; exit status 1 if there is something to do",
    )
};

/// An option of the tools that work on networks.
const NETWORK: CommandOption = long_option("--network", "NAME", "this network only");

/// A command with its help.
#[derive(Debug)]
struct ToolCommand {
    /// `cnibox install`, or the name of an applet.
    command: &'static str,
    /// The help before the options. Its first line is the last word of the command, a colon, and a
    /// description.
    usage: &'static str,
    options: &'static [CommandOption],
    /// The help after the options.
    notes: &'static str,
}

impl ToolCommand {
    /// Runs the command: `read` decodes its command line for `work`. Returns the exit status of
    /// `work`, 1 if it failed, or 2 after a wrong command line; prints errors on stderr.
    fn run_command<T>(
        &self,
        args: Vec<String>,
        read: impl FnOnce(CommandLine) -> Result<T>,
        work: impl FnOnce(T) -> Result<ExitCode>,
    ) -> ExitCode {
        let read = options::parse_args(args, self.options).and_then(|asked| match asked {
            ParsedCommandLine::Help => Ok(Err(self.help_text())),
            ParsedCommandLine::Version => Ok(Err(options::version_text())),
            ParsedCommandLine::Work(line) => read(line).map(Ok),
        });
        let command = self.command;
        let done = match read {
            Ok(Ok(job)) => work(job),
            Ok(Err(text)) => print_text(&text),
            Err(error) => {
                stderr::write_line(format_args!("{command}: {error}; see: {command} --help"));
                return ExitCode::from(WRONG_USAGE);
            }
        };
        done.unwrap_or_else(|error| {
            stderr::write_line(format_args!("{command}: {error}"));
            ExitCode::FAILURE
        })
    }

    /// The last word of the command, and a description.
    fn name_and_summary(&self) -> (&'static str, &'static str) {
        let title = self.usage.lines().next().and_then(|line| line.split_once(": "));
        title.unwrap_or((self.command, ""))
    }

    fn help_text(&self) -> String {
        let ToolCommand { usage, options, notes, .. } = self;
        format!("{usage}\nOptions:\n{}{notes}", options::help_text(options))
    }
}

/// Prints a text on stdout, with control characters as escapes.
fn print_text(text: &str) -> Result<ExitCode> {
    let mut stdout = io::stdout().lock();
    let written = stdout
        .write_all(stderr::escape_control_chars(text).as_bytes())
        .and_then(|()| stdout.flush());
    written.map(|()| ExitCode::SUCCESS).map_err(|cause| Error::io("write to stdout", &cause))
}

fn json_text(value: &impl Serialize) -> Result<String> {
    Ok(encode_pretty(value)? + "\n")
}

/// As [`format_columns`], with a heading.
fn format_table<const N: usize>(
    heading: [&str; N],
    lines: impl IntoIterator<Item = [String; N]>,
) -> String {
    format_columns([heading.map(str::to_owned)].into_iter().chain(lines).collect())
}

/// Formats lines of cells, each column as wide as its widest cell. A cell is one line.
fn format_columns<const N: usize>(lines: Vec<[String; N]>) -> String {
    let lines: Vec<_> = lines
        .into_iter()
        .map(|line| line.map(|cell| stderr::escape_control_chars(&cell).replace('\n', "\\n")))
        .collect();
    let length = |column: usize| lines.iter().map(move |line| line[column].chars().count()).max();
    let widths: Vec<usize> = (0..N).map(|column| length(column).unwrap_or(0)).collect();
    lines
        .iter()
        .map(|line| {
            let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
        })
        .collect()
}
