//! `cnibox install`: this executable and a link for each applet in a folder of plugins, on a node
//! that is at work; and `cnibox uninstall`, which puts back what was there.
//!
//! A switch of names in this order: everything is made and asked for its versions in a folder
//! beside the names (`.cnibox/new`), what is to be replaced is kept (`.cnibox/backup`), the
//! manifest says what will be ours (`.cnibox/manifest.json`), then the executable, the links and
//! last the network's configuration are renamed into place. A name that had a plugin has one at
//! every moment, and no file is written that could be running. What goes wrong is taken back.
//!
//! Whose a file is, is read in the file (`origin.rs`); nothing foreign is started.

mod apply;
mod conflist;
mod files;
mod folder;
mod manifest;
mod options;
mod origin;
mod plan;
mod protect;
mod report;
mod uninstall;
mod watch;

use std::path::Path;
use std::process::ExitCode;

use super::{Tool, lint};
use crate::error::Result;
use crate::options::unknown_word;
use crate::skel::{Applet, Table};
use conflist::Conflist;
use folder::Folder;
use manifest::Manifest;
use options::{INSTALL_OPTIONS, Options, Policy, UNINSTALL_OPTIONS};
use origin::Payload;
use plan::Plan;
use report::Report;

/// The executable's name in the folder.
const BINARY: &str = "cnibox";
/// Our own folder in the folder of plugins.
const STATE: &str = ".cnibox";

pub(super) const INSTALL: Tool = Tool {
    command: "cnibox install",
    usage: "\
install: this executable, and a link for each applet, in a folder of plugins

Usage:
  cnibox install [DIR] [options]     DIR is /opt/cni/bin if it is not given

What is there is switched at once and kept for cnibox uninstall; running containers and calls
under way are not disturbed. Files that are neither cnibox's nor the reference plugins' stop it
before anything is changed. A second run changes nothing.
",
    options: INSTALL_OPTIONS,
    notes: "",
};

pub(super) const UNINSTALL: Tool = Tool {
    command: "cnibox uninstall",
    usage: "\
uninstall: take cnibox install back

Usage:
  cnibox uninstall [DIR] [options]   DIR is /opt/cni/bin if it is not given

What install replaced returns, what it made goes. Files that changed since stay.
",
    options: UNINSTALL_OPTIONS,
    notes: "",
};

/// `cnibox install` with the arguments behind it.
pub(super) fn main(args: Vec<String>, table: Table) -> ExitCode {
    call(&INSTALL, args, |options| {
        if let Some(file) = &options.conflist {
            lint::require_sound(file, table, &|_| true)?;
        }
        let applets = table.applets;
        require_known(options, applets)?;
        let job = Job { options, applets, payload: Payload::own()? };
        if options.watch { watch::run(&job) } else { job.run()?.print() }
    })
}

/// `cnibox install --watch` of what a folder has from an earlier call: the same names in the same
/// way. Everything, where nothing was installed.
pub(super) fn keep(folder: String, table: Table) -> ExitCode {
    let installed = Manifest::load(Path::new(&folder)).unwrap_or_default();
    let names = table.applets.iter().map(|applet| applet.name);
    let names: Vec<&str> = names.filter(|name| installed.get(name).is_some()).collect();
    let mode = format!("--mode={}", installed.mode.name());
    let mut args = vec![folder, "--watch".to_owned(), mode];
    if !names.is_empty() {
        args.push(format!("--only={}", names.join(",")));
    }
    main(args, table)
}

/// `cnibox uninstall` with the arguments behind it.
pub(super) fn main_uninstall(args: Vec<String>) -> ExitCode {
    call(&UNINSTALL, args, |options| uninstall::run(options)?.print())
}

/// Refuses names in --only and --skip that are no applets.
fn require_known(options: &Options, applets: &[Applet]) -> Result<()> {
    let known: Vec<&str> = applets.iter().map(|applet| applet.name).collect();
    let unknown =
        options.only.iter().chain(&options.skip).find(|name| !known.contains(&name.as_str()));
    unknown.map_or(Ok(()), |name| Err(unknown_word("applet", name, &known)))
}

fn call(tool: &Tool, args: Vec<String>, work: impl FnOnce(&Options) -> Result<()>) -> ExitCode {
    let read = |line| Options::read(&line, |name| std::env::var_os(name));
    tool.run(args, read, |options| work(&options).map(|()| ExitCode::SUCCESS))
}

/// What is to be installed, where and how.
struct Job<'a> {
    options: &'a Options,
    applets: &'a [Applet],
    payload: Payload,
}

impl Job<'_> {
    /// Brings the folder to what is wanted. A folder that is so already is not written to, so
    /// that it may be read-only then.
    fn run(&self) -> Result<Report> {
        let (plan, conf) = self.plan()?;
        if self.options.dry_run {
            return Ok(Report::new(self.options, &plan.steps, conf.as_ref()));
        }
        if self.is_done(&plan, conf.as_ref()) {
            self.protect(&plan);
            return Ok(Report::new(self.options, &plan.steps, conf.as_ref()));
        }
        files::create_folder(&self.options.folder.join(STATE))?;
        let _lock = files::lock(&self.options.folder)?;
        // Somebody else may have been at work until now.
        let (plan, conf) = self.plan()?;
        protect::lift(&self.options.folder)?;
        let done = apply::run(self, &plan, conf.as_ref());
        self.protect(&plan);
        done?;
        Ok(Report::new(self.options, &plan.steps, conf.as_ref()))
    }

    fn protect(&self, plan: &Plan) {
        if plan.manifest.protect && self.options.policy != Policy::Never {
            protect::set(&self.options.folder);
        }
    }

    fn is_done(&self, plan: &Plan, conf: Option<&Conflist>) -> bool {
        let never = self.options.policy == Policy::Never;
        let conf_done = conf.is_none_or(|conf| !conf.changes());
        (never || !plan.changes() && plan.manifest_is_written) && conf_done
    }

    fn plan(&self) -> Result<(Plan, Option<Conflist>)> {
        let folder = Folder::new(&self.options.folder);
        let old = Manifest::load(&self.options.folder)?;
        let plan = Plan::make(self, &folder, &old)?;
        let conf = match &self.options.conflist {
            Some(file) => Some(Conflist::plan(self, file, &plan, &old)?),
            None => None,
        };
        Ok((plan, conf))
    }

    /// The applets that are wanted.
    fn names(&self) -> impl Iterator<Item = &'static str> {
        let Options { only, skip, .. } = self.options;
        let all = self.applets.iter().map(|applet| applet.name);
        all.filter(move |name| {
            let is = |listed: &String| listed == name;
            (only.is_empty() || only.iter().any(is)) && !skip.iter().any(is)
        })
    }
}
