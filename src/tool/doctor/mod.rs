//! `cnibox doctor`: what is wrong on this node, in which object, and the command that cures it.
//!
//! | file | |
//! | --- | --- |
//! | `diagnosis.rs` | one thing that is wrong, and how it is told |
//! | `node.rs` | configurations, plugins, rules and forwarding |
//! | `nearby.rs` | what other software does to packets and links of containers |
//! | `path.rs` | what is in the way of packets that leave a container |
//! | `attachments.rs` | what each container has, and what dead ones left |

mod attachments;
mod diagnosis;
mod nearby;
mod node;
mod path;

use std::num::NonZero;
use std::panic::resume_unwind;
use std::process::ExitCode;
use std::thread::{self, ScopedJoinHandle};

use self::attachments::Attachments;
pub(super) use self::attachments::title;
pub(super) use self::diagnosis::Diagnosis;
use super::gc::{CACHE, CONF, Folders, LEASES, PLUGIN_PATH};
use super::lint::Severity;
use super::{Tool, print};
use crate::cni::json::pretty;
use crate::error::Result;
use crate::options::{CommandLine, no_words, opt};
use crate::runtime::Runtime;
use crate::skel::Table;
use crate::sort::sort_by_key;

pub(super) const TOOL: Tool = Tool {
    command: "cnibox doctor",
    usage: "\
doctor: tells what is wrong on this node, and what cures it

Usage:
  cnibox doctor [--json]

Looks at the network configurations (as cnibox lint does), their plugins, our rules, forwarding, and each attachment
that runtimes have cached: CHECK of its plugins, leases, whether its container is alive. Changes nothing.
Run it as root in the host's network namespace.
",
    options: &[
        opt("--json", "", "print an array of objects with severity, subject, problem and cure"),
        CONF,
        PLUGIN_PATH,
        CACHE,
        LEASES,
    ],
    notes: "
Exit status: 0 healthy; 1 only warnings; 2 errors, or wrong usage.
",
};

struct Options {
    json: bool,
    folders: Folders,
}

/// `cnibox doctor` with the arguments behind it.
pub(super) fn main(args: Vec<String>, table: Table) -> ExitCode {
    TOOL.run(args, |line| Options::read(&line), |options| options.run(table))
}

impl Options {
    fn read(line: &CommandLine) -> Result<Options> {
        no_words(line)?;
        Ok(Options { json: line.has("--json"), folders: Folders::read(line) })
    }

    fn run(&self, table: Table) -> Result<ExitCode> {
        let runtime = self.folders.runtime(table);
        let (found, looked_at) = examine(&self.folders, &runtime, table)?;
        if self.json {
            let objects: Vec<_> = found.iter().map(Diagnosis::to_json).collect();
            print(&(pretty(&objects)? + "\n"))?;
        } else if found.is_empty() {
            print(&format!("healthy: {looked_at}\n"))?;
        } else {
            let lines: Vec<String> =
                found.iter().map(|diagnosis| format!("{diagnosis}\n")).collect();
            print(&lines.concat())?;
        }
        Ok(Severity::exit_status(found.first().map(|diagnosis| diagnosis.severity)))
    }
}

/// All that is wrong on the node, the worst first, and what was looked at.
pub(super) fn examine(
    folders: &Folders,
    runtime: &Runtime,
    table: Table,
) -> Result<(Vec<Diagnosis>, String)> {
    let attachments = Attachments::read(folders, runtime)?;
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    let configurations = || node::configurations(&folders.conf, &folders.cni_path, table);
    let mut jobs: Vec<Job<'_>> = vec![Box::new(node::rules), Box::new(configurations)];
    jobs.extend(attachments.checks(processors));
    let mut done = at_once(jobs).into_iter();
    let mut found = done.next().unwrap_or_default();
    let is_flushed = !found.is_empty();
    found.extend(done.next().unwrap_or_default());
    let mut networks = node::networks(&folders.conf);
    networks.extend(attachments.networks().cloned());
    let missing = node::plugins(&networks, runtime, table);
    // What is missing fails every STATUS and CHECK, which say so as well.
    let is_incomplete = missing.iter().any(|diagnosis| diagnosis.severity == Severity::Error);
    found.retain(|diagnosis| !is_incomplete || !diagnosis.names_missing_plugin());
    found.extend(missing);
    done.for_each(|checked| found.extend(checked));
    found.extend(attachments.forgotten());
    found.extend(attachments.leases()?);
    found.extend(attachments.forwarding());
    found.extend(nearby::examine(&attachments.routed()));
    found.extend(path::examine(&attachments.ends()));
    // Where rules are missing, each STATUS and CHECK says so as well.
    found.retain(|diagnosis| diagnosis.is_rules || !is_flushed || !diagnosis.names_repair());
    sort_by_key(&mut found, |diagnosis| std::cmp::Reverse(diagnosis.severity));
    Ok((found, attachments.to_string()))
}

/// A part of the examination that needs no other.
type Job<'a> = Box<dyn FnOnce() -> Vec<Diagnosis> + Send + 'a>;

/// Each on a thread of its own: they mostly wait for the kernel.
fn at_once(jobs: Vec<Job<'_>>) -> Vec<Vec<Diagnosis>> {
    thread::scope(|scope| {
        let threads: Vec<_> = jobs.into_iter().map(|job| scope.spawn(job)).collect();
        let done = |thread: ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))
        };
        threads.into_iter().map(done).collect()
    })
}
