//! `cnibox install`: installs this executable and a link for each applet into the folder of plugins
//! of a running node; and `cnibox uninstall`, which restores the previous files.
//!
//! All files are first created in `.cnibox/new` of the folder and run with VERSION. Files to be
//! replaced are backed up in `.cnibox/backup`, and the list of installed files is saved in
//! `.cnibox/manifest.json`. Then the executable, the links and last the network configuration are
//! renamed into place: a name that had a plugin leads to one at every moment, and no running file
//! is written to. An error undoes everything.
//!
//! The origin of a file is read from its content (`origin.rs`); foreign files are not executed.

mod apply;
mod files;
mod folder;
mod options;
mod origin;
mod plan;
mod renew;
mod uninstall;
mod watch;

use std::env;
use std::path::Path;
use std::process::ExitCode;

use serde::Serialize;

pub(super) use self::renew::Own;
use super::{Tool, lint, print};
use crate::cni::json::pretty;
use crate::error::Result;
use crate::files::lock::Lock;
use crate::options::{CommandLine, unknown_word};
use crate::skel::{Applet, Table};
use folder::Manifest;
use options::{INSTALL_OPTIONS, Options, Policy, UNINSTALL_OPTIONS};
use origin::Payload;
use plan::{Action, Plan, Step};

/// The name of the executable in the folder.
const BINARY: &str = "cnibox";
/// The folder of the installer in the folder of plugins.
const STATE: &str = ".cnibox";

const STATUS: &str = "
Exit status: 0 done; 1 something failed, see stderr, or with --dry-run something would be done; 2 wrong usage.
";

pub(super) const INSTALL: Tool = Tool {
    command: "cnibox install",
    usage: "\
install: installs this executable, and a link for each applet, into a folder of plugins

Usage:
  cnibox install [DIR] [options]     DIR is /opt/cni/bin by default

Existing plugins are replaced atomically and backed up for cnibox uninstall; running containers
and running calls are not disturbed. If a file is neither a cnibox nor a reference plugin, nothing
is changed. A second run changes nothing.
",
    options: INSTALL_OPTIONS,
    notes: STATUS,
};

pub(super) const UNINSTALL: Tool = Tool {
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
pub(super) fn main(args: Vec<String>, table: Table) -> ExitCode {
    call(&INSTALL, args, |options| {
        if let Some(file) = &options.conflist {
            lint::require_sound(file, table, &|_| true)?;
        }
        let applets = table.applets;
        let known: Vec<&str> = applets.iter().map(|applet| applet.name).collect();
        let mut named = options.only.iter().chain(&options.skip);
        if let Some(unknown) = named.find(|name| !known.contains(&name.as_str())) {
            return Err(unknown_word("applet", unknown, &known));
        }
        let job = Job { options, applets, payload: Payload::own()? };
        if options.watch {
            watch::run(&job).map(|()| ExitCode::SUCCESS)
        } else {
            let status = report(options, &job.run()?)?;
            if let Some(hint) = path_hint(options) {
                print(&hint)?;
            }
            Ok(status)
        }
    })
}

/// How the commands are reached if the shell does not search the folder.
fn path_hint(options: &Options) -> Option<String> {
    let paths = env::var_os("PATH").unwrap_or_default();
    let is_searched = env::split_paths(&paths).any(|path| path == options.folder);
    if is_searched || options.json || options.dry_run || options.has_root {
        return None;
    }
    let folder = options.folder.display();
    Some(format!("cnibox and cnitool are in {folder}: export PATH=$PATH:{folder}\n"))
}

/// Keeps the folder as it was installed, with the mode and the applets of that installation, or with all applets if
/// nothing is installed. Returns at SIGTERM, SIGINT or a failure.
pub(super) fn keep(folder: &Path, table: Table) -> Result<()> {
    let applets = table.applets;
    let installed = Manifest::load(folder).unwrap_or_default();
    let names = applets.iter().map(|applet| applet.name);
    let only = names.filter(|name| installed.get(name).is_some()).map(str::to_owned).collect();
    let mut line = CommandLine::default();
    line.words.push(folder.display().to_string());
    let options = Options { mode: installed.mode, only, ..Options::read(&line, |_| None)? };
    watch::run(&Job { options: &options, applets, payload: Payload::own()? })
}

/// Runs `cnibox uninstall` with the arguments that follow it.
pub(super) fn main_uninstall(args: Vec<String>, _: Table) -> ExitCode {
    call(&UNINSTALL, args, |options| report(options, &uninstall::run(options)?))
}

fn call(
    tool: &Tool,
    args: Vec<String>,
    work: impl FnOnce(&Options) -> Result<ExitCode>,
) -> ExitCode {
    let read = |line| Options::read(&line, |name| env::var_os(name));
    tool.run(args, read, |options| work(&options))
}

/// An installation.
struct Job<'a> {
    options: &'a Options,
    applets: &'a [Applet],
    payload: Payload,
}

impl Job<'_> {
    /// Installs. A folder that is already as planned is not written to, and may be read-only.
    fn run(&self) -> Result<Vec<Step>> {
        let folder = &self.options.folder;
        let protect = |plan: &Plan| {
            if plan.manifest.protect && self.options.policy != Policy::Never {
                files::protect(folder);
            }
        };
        let mut plan = Plan::new(self)?;
        if !self.options.dry_run && plan.is_done() {
            protect(&plan);
        } else if !self.options.dry_run {
            files::create_folder(&folder.join(STATE))?;
            let _lock = Lock::exclusive(&folder.join(STATE).join("lock"))?;
            // Another process may have changed the folder in the meantime.
            plan = Plan::new(self)?;
            // The flag stays while only links are restored.
            if plan.steps.iter().any(|step| step.name == BINARY && step.action.changes()) {
                files::unprotect(folder)?;
            }
            let done = apply::run(self, &plan);
            protect(&plan);
            done?;
        }
        Ok(plan.into_steps())
    }

    /// The names of the applets to be installed.
    fn names(&self) -> Vec<&'static str> {
        let Options { only, skip, .. } = self.options;
        let is_wanted = |name: &&str| {
            let is_listed = |names: &[String]| names.iter().any(|listed| listed == name);
            (only.is_empty() || is_listed(only)) && !is_listed(skip)
        };
        self.applets.iter().map(|applet| applet.name).filter(is_wanted).collect()
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Report<'a> {
    folder: String,
    version: &'a str,
    dry_run: bool,
    changed: bool,
    files: &'a [Step],
}

/// Prints what was done, as text or JSON. The exit status is 1 if a dry run found something to do.
fn report(options: &Options, steps: &[Step]) -> Result<ExitCode> {
    let report = Report {
        folder: options.folder.display().to_string(),
        version: env!("CARGO_PKG_VERSION"),
        dry_run: options.dry_run,
        changed: steps.iter().any(|step| step.action.changes()),
        files: steps,
    };
    let text = if options.json { pretty(&report)? + "\n" } else { report.text() };
    print(&text)?;
    let is_found = options.dry_run && report.changed;
    Ok(if is_found { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

impl Report<'_> {
    fn text(&self) -> String {
        let dry_run = if self.dry_run { ", dry run" } else { "" };
        let mut lines = vec![format!("{}: cnibox {}{dry_run}", self.folder, self.version)];
        let mut unchanged = 0;
        for step in self.files {
            let was = step.was.as_deref();
            let what = match step.action {
                Action::Install => "new".to_owned(),
                Action::Update | Action::Replace => {
                    let backup = if step.backup { ", which is backed up" } else { "" };
                    format!("replaces {}{backup}", was.unwrap_or("another file"))
                }
                Action::Keep => format!("stays: {}", was.unwrap_or("missing")),
                Action::Unchanged => {
                    unchanged += 1;
                    continue;
                }
                Action::Remove => "removed".to_owned(),
                Action::Restore => format!("restored: {}", was.unwrap_or("another file")),
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
