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
mod report;
mod uninstall;
mod watch;

use std::process::ExitCode;

pub use options::{INSTALL_OPTIONS, Opt, UNINSTALL_OPTIONS};

use crate::error::Result;
use crate::log;
use crate::skel::Applet;
use conflist::Conflist;
use folder::Folder;
use manifest::Manifest;
use options::{Options, Policy};
use origin::Payload;
use plan::Plan;
use report::Report;

/// The executable's name in the folder.
const BINARY: &str = "cnibox";
/// Our own folder in the folder of plugins.
const STATE: &str = ".cnibox";

/// `cnibox install` with the arguments behind it.
pub fn main(args: Vec<String>, applets: &[Applet]) -> ExitCode {
    call(args, INSTALL_OPTIONS, options::help_install, |options| {
        let job = Job { options, applets, payload: Payload::own()? };
        if options.watch { watch::run(&job) } else { job.run()?.print() }
    })
}

/// `cnibox uninstall` with the arguments behind it.
pub fn main_uninstall(args: Vec<String>) -> ExitCode {
    call(args, UNINSTALL_OPTIONS, options::help_uninstall, |options| {
        uninstall::run(options)?.print()
    })
}

fn call(
    args: Vec<String>,
    known: &[Opt],
    help: fn() -> String,
    work: impl FnOnce(&Options) -> Result<()>,
) -> ExitCode {
    let done = match Options::parse(args, known, |name| std::env::var_os(name)) {
        Ok(None) => return super::print(&help()),
        Ok(Some(options)) => work(&options),
        Err(error) => Err(error),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::line(format_args!("cnibox: {error}"));
            ExitCode::FAILURE
        }
    }
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
        if self.options.dry_run || self.is_done(&plan, conf.as_ref()) {
            return Ok(Report::new(self.options, &plan.steps, conf.as_ref()));
        }
        files::create_folder(&self.options.folder.join(STATE))?;
        let _lock = files::lock(&self.options.folder)?;
        // Somebody else may have been at work until now.
        let (plan, conf) = self.plan()?;
        apply::run(self, &plan, conf.as_ref())?;
        Ok(Report::new(self.options, &plan.steps, conf.as_ref()))
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
