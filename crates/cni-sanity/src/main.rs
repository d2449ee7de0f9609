//! `cni-sanity`: a black-box conformance suite for any directory of CNI plugins.
//!
//! | file | |
//! | --- | --- |
//! | `spec.rs` | the clauses of the specification |
//! | `assertion.rs` | an assertion: level, clauses, text; the table of most of them |
//! | `cases/` | the tests of plugins |
//! | `catalogue.rs` | all assertions, including those in the files of their cases |
//! | `profiles.rs` | the known plugin types |
//! | `known.rs` | public threads about known failures |
//! | `world.rs` | the isolated node of a case |
//! | `netlink.rs`, `observe.rs` | the state of the kernel |
//! | `call.rs`, `kill.rs` | a call of a plugin; a call that is killed |
//! | `traffic.rs` | pings and connections between namespaces |
//! | `recorder.rs` | a plugin that records the calls that it gets from other plugins |
//! | `check.rs`, `report.rs` | verdicts, and reports of them |
//! | `options.rs` | the command line |
//! | `run.rs` | discovery of plugins, and the cases, each in its own process |
//!
//! The suite shares no code with the plugins of this project, so that its verdicts about them are
//! independent.

mod assertion;
mod call;
mod cases;
mod catalogue;
mod check;
mod kill;
mod known;
mod netlink;
mod observe;
mod options;
mod profiles;
mod recorder;
mod report;
mod run;
mod spec;
mod traffic;
mod world;

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use options::{Options, Task};
use report::Report;

/// Exit statuses: an assertion of the level failed; wrong usage, or no plugin to test.
const FAILED: u8 = 1;
const USAGE: u8 = 2;

/// An error is a failure of the suite itself, not of a plugin.
type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Puts the attempt `what` before the text of its error.
fn context<T>(result: std::result::Result<T, impl Into<std::io::Error>>, what: &str) -> Result<T> {
    result.map_err(|error| format!("{what}: {}", error.into()).into())
}

fn main() -> ExitCode {
    if recorder::is_invoked() {
        return recorder::run();
    }
    let status = Options::read(std::env::args_os()).and_then(|task| match task {
        Task::Print(text) => print(&text).map(|()| ExitCode::SUCCESS),
        Task::Case(case) => print(&run::child(&case)?).map(|()| ExitCode::SUCCESS),
        Task::Run(options) => test(&options),
        Task::Scoreboard(directories, options) => scoreboard(&directories, &options),
    });
    status.unwrap_or_else(|error| {
        // stderr may be closed.
        drop(writeln!(std::io::stderr(), "cni-sanity: {error}"));
        ExitCode::from(USAGE)
    })
}

fn print(text: &str) -> Result<()> {
    context(std::io::stdout().write_all(text.as_bytes()), "write to stdout")
}

fn test(options: &Options) -> Result<ExitCode> {
    let outcomes = run::all(&options.directory, options)?;
    let report = Report { outcomes, expected: options.expected.clone(), level: options.level };
    print(&(options.format)(&report))?;
    if let Some(path) = &options.badge {
        context(std::fs::write(path, report.badge()), &format!("write {}", path.display()))?;
    }
    Ok(if report.is_good() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

/// Tests several directories, and prints the results as Markdown tables.
fn scoreboard(directories: &[(String, PathBuf)], options: &Options) -> Result<ExitCode> {
    let mut rows =
        "| plugins | required | recommended | informational |\n| --- | --- | --- | --- |\n"
            .to_owned();
    let mut lists = String::new();
    for (name, directory) in directories {
        let outcomes = run::all(directory, options)?;
        let report = Report { outcomes, expected: Vec::new(), level: options.level };
        let (row, list) = report.row(name);
        rows += &row;
        lists.extend(["\n## ", name, "\n\n"]);
        lists += if list.is_empty() {
            "Nothing failed.\n"
        } else {
            "| level | type | assertion | says | clause | versions | thread |\n| --- | --- | --- | --- | --- | --- | --- |\n"
        };
        lists += &list;
    }
    print(&(rows + &lists)).map(|()| ExitCode::SUCCESS)
}
