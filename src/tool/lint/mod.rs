//! `cnibox lint`: reports mistakes in network configurations before a container needs them.
//!
//! Each file is examined by itself ([`network`]), then the networks are compared with each other.
//! Plugins examine the values of their own keys
//! ([`OwnPlugin::examine`](crate::framework::Plugin::examine)).

mod keys;
mod network;
mod routes;
mod together;

use std::collections::HashMap;
use std::mem;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use self::keys::mistake_error;
use self::network::LintedNetwork;
use super::directories::{CONF, CONF_DIR, plugin_path};
use super::finding::{Finding, FindingSubject, Severity, report_findings};
use super::{JSON, ToolCommand};
use crate::framework::AppletTable;
use crate::options::{CommandOption, long_option, usage_error};
use crate::stderr;
use cni::error::{Error, Result};
use cni::runtime::{EXTENSIONS, find_config_files};
use cni::sort::sort_by;

pub(super) const TOOL: ToolCommand = ToolCommand {
    command: "cnibox lint",
    usage: "\
lint: reports mistakes in network configurations

Usage:
  cnibox lint [FILE|DIR]... [--conf-dir DIR] [--offline] [--json]

Checks these files and directories, or else the directory of network configurations. Prints one \
            line for each mistake:
file, line and column, the problem, and the remedy. The keys of plugins that are not part of this \
            executable are not
checked.
",
    options: &[
        CONF,
        CommandOption {
            about: "print an array of objects with severity, object, problem, remedy, file, \
                    network, line and\ncolumn",
            ..JSON
        },
        long_option(
            "--offline",
            "",
            "check the files only, not whether this node can serve the networks",
        ),
    ],
    notes: "
Without --offline, and as root, the STATUS command of each plugin of cnibox runs on this node as \
            well: missing back
ends, missing master interfaces, an MTU above the master's. So are plugins that the node lacks.

Exit status: 0 no findings; 1 findings; 2 wrong usage.
",
};

/// Runs `cnibox lint` with the arguments that follow.
pub(super) fn main(args: Vec<String>, table: AppletTable) -> ExitCode {
    TOOL.run_command(
        args,
        |line| {
            if line.words.iter().any(String::is_empty) {
                return Err(usage_error("a file or directory without a name"));
            }
            Ok(line)
        },
        |line| {
            let mut paths: Vec<PathBuf> = line.words.iter().map(PathBuf::from).collect();
            paths.extend(line.all_values(CONF.flag).map(PathBuf::from));
            if paths.is_empty() {
                paths.push(CONF_DIR.into());
            }
            let cni_path = plugin_path(None);
            let is_offline = line.has_option("--offline") || !nix::unistd::geteuid().is_root();
            let cni_path = (!is_offline).then_some(&*cni_path);
            report_findings(
                &lint_files(&paths, table, cni_path),
                line.has_option("--json"),
                "no mistake was found",
            )
        },
    )
}

/// All findings in the configurations of these files and directories, by file and position. With a
/// `CNI_PATH`, in which delegates are searched, the findings include whether this node can serve
/// the networks.
pub(super) fn lint_files(
    paths: &[PathBuf],
    table: AppletTable,
    cni_path: Option<&str>,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut networks = Vec::new();
    for path in paths {
        match files_of_path(path) {
            Ok(files) => {
                networks.extend(
                    files.iter().map(|file| LintedNetwork::lint_file(file, table, cni_path)),
                );
            }
            Err(error) => {
                let subject = FindingSubject::File {
                    path: path.clone(),
                    position: None,
                    network: String::new(),
                };
                findings.push(Finding { severity: Severity::Error, subject, error });
            }
        }
    }
    findings.extend(networks.iter_mut().flat_map(|network| mem::take(&mut network.findings)));
    findings.extend(repeated_names(&networks));
    findings.extend(subnet_overlaps(&networks));
    sort_by(&mut findings, |a, b| sort_key(a).cmp(&sort_key(b)));
    // A plugin and its IPAM plugin may both refuse the same key.
    findings.dedup_by(|a, b| sort_key(a) == sort_key(b));
    findings
}

/// The order of findings; equal keys are the same finding.
fn sort_key(finding: &Finding) -> (&FindingSubject, &str) {
    (&finding.subject, finding.error.message())
}

/// Fails if a configuration has errors; logs warnings. Findings of networks that `is_meant` rejects
/// are ignored.
pub(super) fn require_no_errors(
    path: &Path,
    table: AppletTable,
    is_meant: &dyn Fn(&str) -> bool,
) -> Result<()> {
    let mut result = Ok(());
    for finding in lint_files(&[path.to_owned()], table, None) {
        match &finding.subject {
            FindingSubject::File { network, .. } if !is_meant(network) => {}
            _ if finding.severity != Severity::Error => stderr::write_line(finding),
            _ => result = result.and_then(|()| Err(Error::config(finding.to_string()))),
        }
    }
    result
}

/// The configuration files of a path. An empty directory is an error: runtimes have no network
/// then.
fn files_of_path(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let files = find_config_files(path, &EXTENSIONS)?;
    if files.is_empty() {
        let msg = "no network configuration: runtimes report \"cni plugin not initialized\"";
        return Err(mistake_error(msg, "install a file that ends in .conflist"));
    }
    Ok(files)
}

fn repeated_names(networks: &[LintedNetwork]) -> Vec<Finding> {
    let mut files: HashMap<&str, &Path> = HashMap::new();
    let named = networks.iter().filter(|network| !network.name.is_empty());
    named
        .filter_map(|network| {
            let LintedNetwork { name, file, .. }: &LintedNetwork = network;
            let first = *files.entry(name).or_insert(file);
            (first != file).then(|| {
                let msg = format!("network \"{name}\" is already in {}", first.display());
                let remedy = "runtimes use the first of them: rename or remove one";
                network.network_warning(mistake_error(msg, remedy))
            })
        })
        .collect()
}

/// Subnets that networks of different names share.
fn subnet_overlaps(networks: &[LintedNetwork]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (i, network) in networks.iter().enumerate() {
        for other in networks[..i].iter().filter(|other| other.name != network.name) {
            let mut pairs =
                network.subnets.iter().flat_map(|a| other.subnets.iter().map(move |b| (a, b)));
            if let Some((own, others)) = pairs.find(|(a, b)| a.contains(*b) || b.contains(*a)) {
                let (name, file) = (&other.name, other.file.display());
                let msg = format!("subnet {own} overlaps {others} of network \"{name}\" in {file}");
                let remedy = "two containers may get the same address: choose another subnet";
                findings.push(network.network_warning(mistake_error(msg, remedy)));
            }
        }
    }
    findings
}
