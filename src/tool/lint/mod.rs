//! `cnibox lint`: what is wrong with network configurations, before a container needs one.
//!
//! Each file is looked at by itself ([`network`]) and beside the others ([`folder`]); what a plugin
//! makes of its keys it says itself ([`crate::skel::OwnPlugin`]).

mod finding;
mod folder;
mod network;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub(super) use self::finding::{Finding, Severity};
use super::{CONF_DIR, Tool, plugin_path, print};
use crate::cni::json::pretty;
use crate::error::{Error, Result};
use crate::log;
use crate::options::{CommandLine, opt, usage};
use crate::skel::Table;
use crate::sort::sort_by;

pub(super) const TOOL: Tool = Tool {
    command: "cnibox lint",
    usage: "\
lint: tells what is wrong with network configurations

Usage:
  cnibox lint [FILE|DIR]... [--offline] [--json]   the folder is /etc/cni/net.d if none is given

Prints one line for each mistake: file, line and column, and what to do. The keys of plugins that are not of
this executable are not judged.
",
    options: &[
        opt("--json", "", "print an array of objects with file, network, line, column, severity, message and\nremedy"),
        opt("--offline", "", "look at the files only, and not whether this node can serve them"),
    ],
    notes: "
Without --offline, and as root, each plugin of cnibox is asked for its STATUS on this node as well: back ends
that are missing, masters that are not there, an MTU above the master's.

Exit status: 0 nothing was found; 1 only warnings; 2 errors, or wrong usage.
",
};

/// What to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope<'a> {
    /// The configuration alone.
    Files,
    /// Also whether this node can serve it, with delegates from `CNI_PATH`.
    Node { cni_path: &'a str },
}

struct Job {
    paths: Vec<PathBuf>,
    offline: bool,
    json: bool,
}

/// `cnibox lint` with the arguments behind it.
pub(super) fn main(args: Vec<String>, table: Table) -> ExitCode {
    TOOL.run(args, |line| Job::read(&line), |job| job.run(table))
}

/// All findings in the configurations of these files and folders, by file and position.
pub(super) fn lint(paths: &[PathBuf], table: Table, scope: Scope<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut networks = Vec::new();
    for file in folder::files(paths, &mut findings) {
        let (network, found) = network::lint(&file, table, scope);
        findings.extend(found);
        networks.push(network);
    }
    findings.extend(folder::compare(&networks));
    sort_by(&mut findings, |a, b| a.key().cmp(&b.key()));
    // A plugin and its IPAM plugin may both refuse what they have in common.
    findings.dedup_by(|a, b| a.key() == b.key());
    findings
}

/// Refuses configurations with errors; warnings go to stderr. `is_meant` chooses among the findings.
pub(super) fn require_sound(
    path: &Path,
    table: Table,
    is_meant: impl Fn(&Finding) -> bool,
) -> Result<()> {
    let mut findings = lint(&[path.to_owned()], table, Scope::Files);
    findings.retain(is_meant);
    let (errors, warnings): (Vec<_>, Vec<_>) =
        findings.into_iter().partition(|finding| finding.severity == Severity::Error);
    for warning in &warnings {
        log::line(warning);
    }
    match errors.first() {
        None => Ok(()),
        Some(first) => Err(Error::config(first.to_string())),
    }
}

impl Job {
    fn read(line: &CommandLine) -> Result<Job> {
        if line.words.iter().any(String::is_empty) {
            return Err(usage("a file or folder without a name"));
        }
        let mut paths: Vec<PathBuf> = line.words.iter().map(PathBuf::from).collect();
        if paths.is_empty() {
            paths.push(Path::new(CONF_DIR).to_owned());
        }
        let offline = line.has("--offline") || !nix::unistd::geteuid().is_root();
        Ok(Job { paths, offline, json: line.has("--json") })
    }

    fn run(&self, table: Table) -> Result<ExitCode> {
        let cni_path = plugin_path(None);
        let scope = if self.offline { Scope::Files } else { Scope::Node { cni_path: &cni_path } };
        let findings = lint(&self.paths, table, scope);
        if self.json {
            let objects: Vec<_> = findings.iter().map(Finding::to_json).collect();
            print(&(pretty(&objects)? + "\n"))?;
        } else if findings.is_empty() {
            print("no mistake was found\n")?;
        } else {
            let lines: Vec<String> =
                findings.iter().map(|finding| format!("{finding}\n")).collect();
            print(&lines.concat())?;
        }
        Ok(Severity::exit_status(findings.iter().map(|finding| finding.severity).max()))
    }
}
