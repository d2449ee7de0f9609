//! `cnibox doctor`: reports defects of this node, the object of each, and the command that repairs it.
//!
//! | file | |
//! | --- | --- |
//! | `attachments.rs` | attachments: CHECK, leases, remains of dead containers |
//! | `forward.rs` | rules of other software that drop forwarded packets |
//! | `nearby.rs` | other software that changes packets and links of containers |
//! | `path.rs` | the path of packets between a container and the network outside of the node |

mod attachments;
mod forward;
mod nearby;
mod path;

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fs;
use std::num::NonZero;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::slice;
use std::thread::{self, ScopedJoinHandle};

use self::attachments::Attached;
pub(super) use self::attachments::title;
use super::finding::{Finding, Severity, Subject, report};
use super::folders::{CACHE, CONF, Folders, LEASES, PLUGIN_PATH};
use super::{JSON, Tool, lint};
use crate::error::Result;
use crate::invoke;
use crate::netfilter::{self, PacketFilter, Repair};
use crate::options::{Opt, no_words};
use crate::runtime::{NetworkList, Runtime};
use crate::skel::Table;
use crate::sort::sort_by_key;

pub(super) const TOOL: Tool = Tool {
    command: "cnibox doctor",
    usage: "\
doctor: reports defects of this node, with their remedies

Usage:
  cnibox doctor [--conf-dir DIR] [--json]

Checks the network configurations (as cnibox lint does), their plugins, the rules of cnibox, forwarding, and each
attachment in the cache of the runtimes: CHECK of its plugins, its leases, whether its container is alive. Changes
nothing. Run it as root in the network namespace of the host.
",
    options: &[
        Opt { about: "print an array of objects with severity, object, problem and remedy", ..JSON },
        CONF,
        PLUGIN_PATH,
        CACHE,
        LEASES,
    ],
    notes: "
Exit status: 0 healthy; 1 findings; 2 wrong usage.
",
};

/// Runs `cnibox doctor` with the arguments that follow.
pub(super) fn main(args: Vec<String>, table: Table) -> ExitCode {
    TOOL.run(
        args,
        |line| no_words(&line).map(|()| line),
        |line| {
            let folders = Folders::read(&line);
            let (findings, count) = examine(&folders, &folders.runtime(table), table)?;
            let s = if count == 1 { "" } else { "s" };
            report(&findings, line.has("--json"), &format!("healthy: {count} attachment{s}"))
        },
    )
}

/// All defects of the node, errors first, and the number of attachments that were examined.
pub(super) fn examine(
    folders: &Folders,
    runtime: &Runtime,
    table: Table,
) -> Result<(Vec<Finding>, usize)> {
    let attached = attachments::read(folders, runtime)?;
    // The checks mostly wait for the kernel.
    let (mut findings, configurations, checks) = thread::scope(|scope| {
        let rules = scope.spawn(rules);
        let configurations = scope.spawn(|| configurations(folders, table));
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        let parts = attached.chunks(attached.len().div_ceil(processors).max(1));
        let check = |part: &'_ [Attached]| part.iter().filter_map(|a| a.check(runtime)).collect();
        let checks: Vec<_> = parts.map(|part| scope.spawn(move || check(part))).collect();
        let checks: Vec<Vec<Finding>> = checks.into_iter().map(join).collect();
        (join(rules), join(configurations), checks)
    });
    let is_flushed = !findings.is_empty();
    let mut networks = folders.networks();
    networks.extend(attached.iter().filter_map(|attached| attached.list.clone()));
    let missing = plugins(&networks, runtime, table);
    // STATUS and CHECK report missing plugins and flushed rules as well.
    let is_incomplete = missing.iter().any(|finding| finding.severity == Severity::Error);
    let is_new = |finding: &Finding| {
        !(is_incomplete && finding.error.msg().contains("failed to find plugin")
            || is_flushed && finding.error.details().contains("cnibox repair"))
    };
    findings.extend(configurations.into_iter().filter(is_new));
    findings.extend(missing);
    findings.extend(checks.into_iter().flatten().filter(is_new));
    findings.extend(attachments::unknown(&attached));
    findings.extend(attachments::leases(&attached, &folders.stores(None)?)?);
    let routed = attachments::routed(&attached);
    findings.extend(path::forwarding(&routed));
    findings.extend(nearby::examine(&routed));
    findings.extend(path::examine(&attached));
    sort_by_key(&mut findings, |finding| Reverse(finding.severity));
    Ok((findings, attached.len()))
}

fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// The missing rules of cnibox.
fn rules() -> Vec<Finding> {
    let subject = "rules of containers";
    let missing = |rule| Finding::error(subject, format!("missing: {rule}"), "cnibox repair");
    match netfilter::heal(&PacketFilter::new(), Repair::Report) {
        Ok(rules) => rules.into_iter().map(missing).collect(),
        Err(error) => vec![Finding::error(subject, error.msg(), error.details())],
    }
}

/// The findings of `cnibox lint`, but for notes, which are about what nobody may have asked for.
fn configurations(folders: &Folders, table: Table) -> Vec<Finding> {
    let conf = slice::from_ref(&folders.conf);
    let findings = lint::lint(conf, table, Some(&folders.cni_path)).into_iter();
    let named = |finding: Finding| {
        let subject = Subject::Object(finding.subject.to_string());
        Finding { subject, ..finding }
    };
    findings.filter(|finding| finding.severity != Severity::Note).map(named).collect()
}

/// Plugins of these networks that are missing or replaced by another executable.
fn plugins(networks: &[NetworkList], runtime: &Runtime, table: Table) -> Vec<Finding> {
    let plugins = networks.iter().flat_map(|list| &list.plugins);
    let mut names: BTreeSet<&str> =
        plugins.flat_map(|plugin| [&*plugin.plugin_type, &*plugin.ipam_type]).collect();
    names.remove("");
    names.iter().filter_map(|name| plugin(name, runtime, table)).collect()
}

fn plugin(name: &str, runtime: &Runtime, table: Table) -> Option<Finding> {
    let subject = format!("plugin \"{name}\"");
    let is_ours = table.find(name).is_some();
    let dirs = &runtime.plugin_dirs;
    let entry = dirs.iter().map(|dir| dir.join(name)).find(|path| path.symlink_metadata().is_ok());
    let remedy = || {
        if !is_ours {
            return "install it, or remove it from the configuration".to_owned();
        }
        let dir = entry.as_deref().and_then(Path::parent);
        let dir = dir.or(dirs.first().map(PathBuf::as_path)).unwrap_or(Path::new("."));
        format!("cnibox install {}", dir.display())
    };
    match runtime.executor.find(name, dirs) {
        Err(error) => {
            let problem = match &entry {
                Some(path) if !path.exists() => {
                    format!("{} is a dangling symbolic link", path.display())
                }
                _ => error.msg().to_owned(),
            };
            Some(Finding::error(subject, problem, remedy()))
        }
        Ok(path) => {
            // A copy over the link of one plugin becomes the executable of all of them.
            let target = fs::read_link(&path).ok()?;
            let leads_to_cnibox = target.file_name().is_some_and(|name| name == "cnibox");
            (is_ours && leads_to_cnibox && !invoke::is_own_executable(&path)).then(|| {
                let problem = format!("{} is not the executable that runs now", path.display());
                Finding::warning(subject, problem, remedy())
            })
        }
    }
}
