//! `cnibox install`: installs this executable and a link for each applet into the directory of
//! plugins of a running node; and `cnibox uninstall`, which restores the previous files.
//!
//! All files are first created in `.cnibox/new` of the directory and run with VERSION. Files to be
//! replaced are backed up in `.cnibox/backup`, and the list of installed files is saved in
//! `.cnibox/manifest.json`. Then the executable, the links and last the network configuration are
//! renamed into place: a name that had a plugin leads to one at every moment, and no running file
//! is written to. An error undoes everything.
//!
//! The origin of a file is read from its content (`origin.rs`); foreign files are not executed.

mod apply;
mod directory;
mod files;
mod options;
mod origin;
mod plan;
mod renew;
mod uninstall;
mod watch;

use std::env;
use std::path::Path;
use std::process::ExitCode;
use std::slice;

use serde::Serialize;

pub(super) use self::renew::OwnExecutable;
use super::finding::Severity;
use super::{ToolCommand, json_text, lint, print_text};
use crate::files::lock::FileLock;
use crate::framework::{Applet, AppletTable};
use crate::options::{CommandLine, unknown_word_error};
use cni::error::Result;
use directory::InstallManifest;
use options::{INSTALL_OPTIONS, InstallOptions, ReplacePolicy, UNINSTALL_OPTIONS};
use origin::InstallPayload;
use plan::{FileAction, InstallPlan, InstallStep};

/// The name of the executable in the directory.
const BINARY: &str = "cnibox";
/// The directory of the installer in the directory of plugins.
const STATE: &str = ".cnibox";

const STATUS: &str = "
Exit status: 0 done; 1 something failed, see stderr, or with --dry-run something would be done; 2 \
                      wrong usage.
";

pub(super) const INSTALL: ToolCommand = ToolCommand {
    command: "cnibox install",
    usage: "\
install: installs this executable, and a link for each applet, into a directory of plugins

Usage:
  cnibox install [DIR] [options]     DIR is /opt/cni/bin by default

Existing plugins are replaced atomically and backed up for cnibox uninstall; running containers
and running calls are not disturbed. If a file is neither a cnibox nor a reference plugin, nothing
is changed. A second run changes nothing.
",
    options: INSTALL_OPTIONS,
    notes: STATUS,
};

pub(super) const UNINSTALL: ToolCommand = ToolCommand {
    command: "cnibox uninstall",
    usage: "\
uninstall: undoes cnibox install

Usage:
  cnibox uninstall [DIR] [options]   DIR is /opt/cni/bin by default

Restores the files that install replaced and removes the others. Files that have changed since
stay.
",
    options: UNINSTALL_OPTIONS,
    notes: STATUS,
};

/// Runs `cnibox install` with the arguments that follow it.
pub(super) fn main(args: Vec<String>, table: AppletTable) -> ExitCode {
    run_tool(&INSTALL, args, |options| {
        if let Some(file) = &options.conflist {
            lint::require_no_errors(file, table, &|_| true)?;
        }
        let applets = table.applets;
        let known: Vec<&str> = applets.iter().map(|applet| applet.name).collect();
        let mut named = options.only.iter().chain(&options.skip);
        if let Some(unknown) = named.find(|name| !known.contains(&name.as_str())) {
            return Err(unknown_word_error("applet", unknown, &known));
        }
        let job = InstallJob { options, applets, payload: InstallPayload::read_own()? };
        warn_of_mistakes(options, table);
        let status = print_report(options, &job.install_files()?)?;
        if let Some(hint) = path_hint(options) {
            print_text(&hint)?;
        }
        Ok(status)
    })
}

/// Warns of the configured networks that this executable refuses, although the plugins that it
/// replaces may attach containers to them.
fn warn_of_mistakes(options: &InstallOptions, table: AppletTable) {
    if options.conf_dir.exists() {
        let findings = lint::lint_files(slice::from_ref(&options.conf_dir), table, None);
        let errors = findings.iter().filter(|finding| finding.severity == Severity::Error);
        errors.for_each(|error| warn!("{error}"));
    }
}

/// The hint to extend `PATH` if the shell does not search the directory.
fn path_hint(options: &InstallOptions) -> Option<String> {
    let paths = env::var_os("PATH").unwrap_or_default();
    let is_searched = env::split_paths(&paths).any(|path| path == options.directory);
    if is_searched || options.json || options.dry_run || options.has_root {
        return None;
    }
    let directory = options.directory.display();
    Some(format!("cnibox and cnitool are in {directory}: export PATH=$PATH:{directory}\n"))
}

/// Keeps the directory as it was installed, with the mode and the applets of that installation, or
/// with all applets if nothing is installed. Returns at SIGTERM, SIGINT or a failure.
pub(super) fn maintain_installation(directory: &Path, table: AppletTable) -> Result<()> {
    let applets = table.applets;
    let installed = InstallManifest::load_from(directory).unwrap_or_default();
    let names = applets.iter().map(|applet| applet.name);
    let only =
        names.filter(|name| installed.find_file(name).is_some()).map(str::to_owned).collect();
    let mut line = CommandLine::default();
    line.words.push(directory.display().to_string());
    let options = InstallOptions {
        mode: installed.mode,
        only,
        ..InstallOptions::from_command_line(&line, |_| None)?
    };
    watch::install_and_watch(&InstallJob {
        options: &options,
        applets,
        payload: InstallPayload::read_own()?,
    })
}

/// Runs `cnibox uninstall` with the arguments that follow it.
pub(super) fn main_uninstall(args: Vec<String>, _: AppletTable) -> ExitCode {
    run_tool(&UNINSTALL, args, |options| {
        print_report(options, &uninstall::remove_installation(options)?)
    })
}

fn run_tool(
    tool: &ToolCommand,
    args: Vec<String>,
    work: impl FnOnce(&InstallOptions) -> Result<ExitCode>,
) -> ExitCode {
    tool.run_command(
        args,
        |line| InstallOptions::from_command_line(&line, |name| env::var_os(name)),
        |options| work(&options),
    )
}

struct InstallJob<'a> {
    options: &'a InstallOptions,
    applets: &'a [Applet],
    payload: InstallPayload,
}

impl InstallJob<'_> {
    /// Installs the files. A directory that is already as planned is not written to, and may be
    /// read-only.
    fn install_files(&self) -> Result<Vec<InstallStep>> {
        let directory = &self.options.directory;
        let protect = |plan: &InstallPlan| {
            if plan.manifest.protect && self.options.policy != ReplacePolicy::Never {
                files::protect_executable(directory);
            }
        };
        let mut plan = InstallPlan::new(self)?;
        if !self.options.dry_run && plan.is_done() {
            protect(&plan);
        } else if !self.options.dry_run {
            files::create_directory(&directory.join(STATE))?;
            let _lock = FileLock::acquire_exclusive(&directory.join(STATE).join("lock"))?;
            // Another process may have changed the directory in the meantime.
            plan = InstallPlan::new(self)?;
            // The flag stays while only links are restored.
            if plan.steps.iter().any(|step| step.name == BINARY && step.action.is_change()) {
                files::unprotect_executable(directory)?;
            }
            let done = apply::execute_plan(self, &plan);
            protect(&plan);
            done?;
        }
        Ok(plan.into_steps())
    }

    /// The names of the applets to be installed.
    fn applet_names(&self) -> Vec<&'static str> {
        let InstallOptions { only, skip, .. } = self.options;
        self.applets
            .iter()
            .map(|applet| applet.name)
            .filter(|name| {
                let is_listed = |names: &[String]| names.iter().any(|listed| listed == name);
                (only.is_empty() || is_listed(only)) && !is_listed(skip)
            })
            .collect()
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct InstallReport<'a> {
    directory: String,
    version: &'a str,
    dry_run: bool,
    changed: bool,
    files: &'a [InstallStep],
}

/// Prints what was done, as text or JSON. The exit status is 1 if a dry run found something to do.
fn print_report(options: &InstallOptions, steps: &[InstallStep]) -> Result<ExitCode> {
    let report = InstallReport {
        directory: options.directory.display().to_string(),
        version: env!("CARGO_PKG_VERSION"),
        dry_run: options.dry_run,
        changed: steps.iter().any(|step| step.action.is_change()),
        files: steps,
    };
    let text = if options.json { json_text(&report)? } else { report.to_text() };
    print_text(&text)?;
    let is_found = options.dry_run && report.changed;
    Ok(if is_found { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

impl InstallReport<'_> {
    fn to_text(&self) -> String {
        let dry_run = if self.dry_run { ", dry run" } else { "" };
        let mut lines = vec![format!("{}: cnibox {}{dry_run}", self.directory, self.version)];
        let mut unchanged = 0;
        for step in self.files {
            let was = step.was.as_deref();
            let what = match step.action {
                FileAction::Install => "new".to_owned(),
                FileAction::Update | FileAction::Replace => {
                    let backup = if step.backup { ", which is backed up" } else { "" };
                    format!("replaces {}{backup}", was.unwrap_or("another file"))
                }
                FileAction::Keep => format!("stays: {}", was.unwrap_or("missing")),
                FileAction::Unchanged => {
                    unchanged += 1;
                    continue;
                }
                FileAction::Remove => "removed".to_owned(),
                FileAction::Restore => format!("restored: {}", was.unwrap_or("another file")),
            };
            lines.push(format!("  {:<14} {what}", step.name));
        }
        if !self.changed {
            lines.push("  nothing to do".to_owned());
        } else if unchanged > 0 {
            lines.push(format!("  {unchanged} unchanged"));
        }
        lines.join("\n") + "\n"
    }
}
