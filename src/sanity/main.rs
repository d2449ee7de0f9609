//! `cni-sanity`: a conformance suite for any folder of CNI plugins, from outside.
//!
//! | file | |
//! | --- | --- |
//! | `clause.rs`, `catalogue.rs` | the table of assertions, and all of them |
//! | `cases/` | what is asked of plugins |
//! | `profiles.rs` | the types that are known |
//! | `known.rs` | public threads about what is found |
//! | `world.rs` | a node of a case's own |
//! | `netlink.rs`, `observe.rs` | the kernel as it is |
//! | `call.rs`, `kill.rs` | a call of a plugin, and one that is killed |
//! | `traffic.rs` | packets |
//! | `recorder.rs` | a plugin that writes down how others call it |
//! | `check.rs`, `report.rs` | verdicts, and how they are told |
//! | `run.rs` | discovery, and the cases in processes of their own |
//!
//! It shares no code with the plugins of this project: what it says of them is as independent as of any others.

mod call;
mod cases;
mod catalogue;
mod check;
mod clause;
mod kill;
mod known;
mod netlink;
mod observe;
mod options;
mod profiles;
mod recorder;
mod report;
mod run;
mod traffic;
mod world;

use std::io::Write;
use std::process::ExitCode;

use options::{Format, Options, Task};
use report::Report;

/// Exit statuses: something that is required failed; wrong usage, or nothing to test.
const FAILED: u8 = 1;
const USAGE: u8 = 2;

fn main() -> ExitCode {
    if recorder::is_meant() {
        return recorder::run();
    }
    let done = Options::read(std::env::args_os()).and_then(|task| match task {
        Task::Print(text) => print(&text).map(|()| ExitCode::SUCCESS),
        Task::Case(case) => print(&run::child(&case)).map(|()| ExitCode::SUCCESS),
        Task::Run(options) => test(&options),
        Task::Scoreboard(folders, options) => scoreboard(&folders, &options),
    });
    done.unwrap_or_else(|error| {
        // Where stderr is closed nobody reads it.
        drop(writeln!(std::io::stderr(), "cni-sanity: {error}"));
        ExitCode::from(USAGE)
    })
}

fn print(text: &str) -> Result<(), String> {
    std::io::stdout()
        .write_all(text.as_bytes())
        .map_err(|error| format!("write to stdout: {error}"))
}

fn test(options: &Options) -> Result<ExitCode, String> {
    let outcomes = run::all(&options.folder, options)?;
    let report = Report { outcomes, expected: options.expected.clone() };
    print(&match options.format {
        Format::Text => report.text(),
        Format::Tap => report.tap(),
        Format::Junit => report.junit(),
        Format::Json => report.json(),
    })?;
    if let Some(path) = &options.badge {
        std::fs::write(path, report.badge())
            .map_err(|error| format!("write {}: {error}", path.display()))?;
    }
    Ok(if report.is_good() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

/// The same of several folders, as tables of markdown.
fn scoreboard(
    folders: &[(String, std::path::PathBuf)],
    options: &Options,
) -> Result<ExitCode, String> {
    let mut rows =
        "| plugins | required | recommended | informational |\n| --- | --- | --- | --- |\n"
            .to_owned();
    let mut lists = String::new();
    for (name, folder) in folders {
        let report = Report { outcomes: run::all(folder, options)?, expected: Vec::new() };
        let (row, list) = report.row(name);
        rows += &(row + "\n");
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
