//! `cnibox doctor`: reports defects of this node, the object of each, and the command that repairs
//! it.
//!
//! | file | |
//! | --- | --- |
//! | `attachments.rs` | attachments: CHECK, leases, remains of dead containers |
//! | `forward.rs` | rules of other software that drop forwarded packets |
//! | `listeners.rs` | programs of the node on published ports |
//! | `nearby.rs` | other software that changes packets and links of containers |
//! | `path.rs` | the path of packets between a container and the network outside of the node |

mod attachments;
mod forward;
mod listeners;
mod nearby;
mod path;

use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::slice;
use std::time::Duration;

pub(super) use self::attachments::attachment_title;
use self::attachments::{COLLECT, ExaminedAttachment};
use super::directories::{CACHE, CONF, EMPTY, LEASES, PLUGIN_PATH, ToolDirectories};
use super::finding::{Finding, FindingSubject, Severity, report_findings};
use super::snapshot::{NodeSnapshot, wait_for_running_calls};
use super::{JSON, ToolCommand, lint};
use crate::attachment::StoredRecord;
use crate::framework::AppletTable;
use crate::iface::{ContainerNetns, redirect};
use crate::invoke::{self, TracedExecutor};
use crate::netfilter::PacketFilter;
use crate::netfilter::egress::probe::{require_reachable, require_resolver};
use crate::netfilter::egress::{self, EgressPart};
use crate::netns::{Netns, NetnsIdentity};
use cni::error::Result;
use cni::exec::query_version_info;

use crate::netfilter::reconcile::{ReconcileMode, reconcile_all};
use crate::options::{CommandOption, require_no_words};
use cni::runtime::{NetworkList, Runtime};
use cni::sort::{collect_set, sort_by_key};

/// How long a plugin may take to answer VERSION.
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

/// What errors of unusable plugins contain.
const UNUSABLE: [&str; 3] = ["failed to find plugin", "fork/exec ", "invalid plugin name"];

pub(super) const TOOL: ToolCommand = ToolCommand {
    command: "cnibox doctor",
    usage: "\
doctor: reports defects of this node, with their remedies

Usage:
  cnibox doctor [--conf-dir DIR] [--json]

Checks the network configurations (as cnibox lint does), their plugins, the rules of cnibox, \
            forwarding, and each
attachment in the cache of the runtimes: CHECK of its plugins, its leases, whether its container \
            is alive. Changes
nothing. Run it as root in the network namespace of the host.
",
    options: &[
        CommandOption {
            about: "print an array of objects with severity, object, problem and remedy",
            ..JSON
        },
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
pub(super) fn main(args: Vec<String>, table: AppletTable) -> ExitCode {
    TOOL.run_command(
        args,
        |line| require_no_words(&line).map(|()| line),
        |line| {
            let directories = ToolDirectories::from_command_line(&line);
            let (findings, count) =
                examine_node(&directories, &directories.new_runtime(table), table)?;
            let s = if count == 1 { "" } else { "s" };
            let none = format!("healthy: {count} attachment{s}");
            report_findings(&findings, line.has_option("--json"), &none)
        },
    )
}

/// All defects of the node, errors first, and the number of attachments that were examined.
/// Attachments with defects are examined again: those that a runtime is detaching or attaching have
/// none.
pub(super) fn examine_node(
    directories: &ToolDirectories,
    runtime: &Runtime,
    table: AppletTable,
) -> Result<(Vec<Finding>, usize)> {
    let snapshot = NodeSnapshot::take(&[runtime.results_dir()]);
    let (first, attached) = examine_once(directories, runtime, table)?;
    let title =
        |attached: &ExaminedAttachment| FindingSubject::Object(attachment_title(&attached.cached));
    let mut titles: Vec<FindingSubject> = attached.iter().map(title).collect();
    // DEL deletes the record before the rules.
    titles.extend(first.iter().filter_map(attachments::subject_of_ports));
    if !first.iter().any(|finding| titles.contains(&finding.subject)) {
        return Ok((first, attached.len()));
    }
    wait_for_running_calls();
    let (mut findings, now) = examine_once(directories, runtime, table)?;
    let moving = now.iter().filter(|it| !snapshot.is_at_rest(runtime, &it.cached));
    let moving: Vec<FindingSubject> = moving.map(title).collect();
    let is_confirmed = |finding: &Finding| first.iter().any(|other| other.is_equal(finding));
    findings.retain(|finding| {
        !moving.contains(&finding.subject)
            && (!titles.contains(&finding.subject) || is_confirmed(finding))
    });
    Ok((findings, now.len()))
}

/// As [`examine_node`], with attachments in motion.
fn examine_once(
    directories: &ToolDirectories,
    runtime: &Runtime,
    table: AppletTable,
) -> Result<(Vec<Finding>, Vec<ExaminedAttachment>)> {
    let attached = attachments::read_cached(directories, runtime)?;
    let mut findings = examine_rules();
    let is_flushed = !findings.is_empty();
    let mut networks = directories.configured_networks();
    networks.extend(attached.iter().filter_map(|attached| attached.list.clone()));
    let missing = examine_plugins(&networks, runtime, table);
    // lint, STATUS and CHECK also report unusable plugins and flushed rules: each defect is
    // reported once.
    let is_incomplete = missing.iter().any(|finding| finding.severity == Severity::Error);
    let is_new = |finding: &Finding| {
        !(is_incomplete && UNUSABLE.iter().any(|text| finding.error.message().contains(text))
            || is_flushed && finding.error.details().contains("cnibox repair"))
    };
    findings.extend(examine_resolver());
    findings.extend(lint_configurations(directories, table).into_iter().filter(is_new));
    findings.extend(missing);
    let checks = attached.iter().filter_map(|attached| attached.run_check(directories, runtime));
    findings.extend(checks.filter(is_new));
    findings.extend(attachments::find_unknown_remains(&attached));
    findings.extend(attachments::find_lost_devices()?);
    let empty = directories.empty_cache_files();
    findings.extend(
        empty.iter().map(|path| Finding::new_warning(path.display().to_string(), EMPTY, COLLECT)),
    );
    let leases = directories.find_lease_directories(None)?;
    findings.extend(attachments::examine_leases(&attached, &leases)?);
    findings.extend(attachments::examine_ports(directories, &leases)?);
    let routed = attachments::routed_networks(&attached);
    findings.extend(path::find_disabled_forwarding(&routed));
    findings.extend(nearby::examine_networks(&routed));
    findings.extend(path::examine_paths(&attached));
    sort_by_key(&mut findings, |finding| Reverse(finding.severity));
    Ok((findings, attached))
}

/// The missing rules of cnibox.
fn examine_rules() -> Vec<Finding> {
    let subject = "rules of containers";
    match reconcile_all(&PacketFilter::new(), ReconcileMode::Report) {
        Ok(outcome) => outcome
            .differences
            .into_iter()
            .map(|rule| Finding::new_error(subject, format!("missing: {rule}"), "cnibox repair"))
            .collect(),
        Err(error) => vec![Finding::new_error(subject, error.message(), error.details())],
    }
}

/// The resolver does not answer containers with names in their egress policies, or they do not reach
/// it.
fn examine_resolver() -> Option<Finding> {
    let has_names = |stored: &StoredRecord<EgressPart>| stored.content.has_names();
    let asking = egress::RECORDS.find_restorable_parts(&has_names);
    if asking.is_empty() {
        return None;
    }
    let reaches = |stored: &StoredRecord<EgressPart>| {
        let path = Path::new(&stored.record.sandbox);
        // The runtime may hold the namespace elsewhere.
        let same = NetnsIdentity::at_path(path).filter(|found| Some(*found) == stored.record.netns);
        let Some(inside) = same.and_then(|_| Netns::open(path).ok()) else { return Ok(()) };
        let ifname = &stored.record.ifname;
        let is_of_machine = ContainerNetns::open_in(&inside)
            .and_then(|inside| redirect::has_target(&inside, ifname));
        if is_of_machine.unwrap_or(true) {
            Ok(())
        } else {
            require_reachable(&inside, &stored.content)
        }
    };
    let error = require_resolver().and_then(|()| asking.iter().try_for_each(reaches)).err()?;
    let subject = "name service of egress";
    Some(Finding::new_error(subject, error.message(), error.details()))
}

/// The findings of `cnibox lint` except notes, which need no remedy.
fn lint_configurations(directories: &ToolDirectories, table: AppletTable) -> Vec<Finding> {
    let conf = slice::from_ref(&directories.conf);
    let findings = lint::lint_files(conf, table, Some(&directories.cni_path)).into_iter();
    findings
        .filter(|finding| finding.severity != Severity::Note)
        .map(|finding| {
            let subject = FindingSubject::Object(finding.subject.to_string());
            Finding { subject, ..finding }
        })
        .collect()
}

/// Plugins of these networks that are missing, cannot run, or are replaced by another executable.
fn examine_plugins(
    networks: &[NetworkList],
    runtime: &Runtime,
    table: AppletTable,
) -> Vec<Finding> {
    let plugins = networks.iter().flat_map(|list| &list.plugins);
    let mut names =
        collect_set(plugins.flat_map(|plugin| [&*plugin.plugin_type, &*plugin.ipam_type]));
    names.remove("");
    names.iter().filter_map(|name| examine_plugin(name, runtime, table)).collect()
}

fn examine_plugin(name: &str, runtime: &Runtime, table: AppletTable) -> Option<Finding> {
    let subject = format!("plugin \"{name}\"");
    let is_ours = table.find_applet(name).is_some();
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
    match runtime.executor.find_plugin(name, dirs) {
        Err(error) => {
            let problem = match &entry {
                Some(path) if !path.exists() => {
                    format!("{} is a dangling symbolic link", path.display())
                }
                _ => error.message().to_owned(),
            };
            Some(Finding::new_error(subject, problem, remedy()))
        }
        Ok(path) => {
            // A copy over the link of one plugin becomes the executable of all of them.
            let target = fs::read_link(&path).unwrap_or_default();
            let leads_to_cnibox = target.file_name().is_some_and(|name| name == "cnibox");
            if is_ours && leads_to_cnibox && !invoke::is_own_executable(&path) {
                let problem = format!("{} is not the executable that runs now", path.display());
                return Some(Finding::new_warning(subject, problem, remedy()));
            }
            // As a process: a plugin of this executable may have lost its permissions.
            let error = query_version_info(&TracedExecutor, &path, Some(VERSION_TIMEOUT)).err()?;
            let problem = format!("{} cannot run: {}", path.display(), error.message());
            let is_denied = error.message().ends_with("permission denied");
            Some(if is_denied {
                Finding::new_error(subject, problem, error.details())
            } else if is_ours {
                Finding::new_error(subject, problem, format!("{} --replace", remedy()))
            } else {
                Finding::new_error(subject, problem, remedy())
            })
        }
    }
}
