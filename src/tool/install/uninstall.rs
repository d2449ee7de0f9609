//! Taking an installation back: the configuration first, the links, the executable last. What was
//! replaced returns in one step, so that its names have a plugin at every moment.

use std::fs;
use std::path::Path;

use super::conflist;
use super::files::{self, During, remove, sync};
use super::folder::Folder;
use super::manifest::{Manifest, Owned, OwnedConf, backup};
use super::options::Options;
use super::origin::sha256;
use super::plan::{Action, Step};
use super::report::Report;
use super::{BINARY, STATE, protect};
use crate::error::{Context, Result};
use crate::log;
use crate::netfilter::{PacketFilter, handover};

/// Removes what is ours and unchanged, and says what it was.
pub(super) fn run(options: &Options) -> Result<Report> {
    let folder = Folder::new(&options.folder);
    if options.dry_run || !options.folder.join(STATE).exists() {
        return Ok(Report::new(options, &plan(&folder)?.0, None));
    }
    let lock = files::lock(&options.folder)?;
    protect::lift(&options.folder)?;
    let (steps, manifest) = plan(&folder)?;
    if let Some(conf) = &manifest.conflist {
        take_back_conf(&options.folder, conf)?;
    }
    for step in &steps {
        take_back(&options.folder, step)?;
    }
    sync(&options.folder)?;
    forget(&options.folder, &steps)?;
    drop(lock);
    if options.hand_over && steps.iter().any(|step| step.action == Action::Restore) {
        hand_over()?;
    }
    Ok(Report::new(options, &steps, None))
}

/// The rules of running containers, for the plugins that are back: they find no others. Plugins
/// of ours cannot be started by now.
fn hand_over() -> Result<()> {
    let done = handover::to_reference(&PacketFilter::new());
    for what in done.context(|| "the files are back, but not all rules")? {
        log::line(format_args!("cnibox: {what}"));
    }
    Ok(())
}

/// The executable comes last: until then every link leads to it.
fn plan(folder: &Folder) -> Result<(Vec<Step>, Manifest)> {
    let manifest = Manifest::load(&folder.path)?;
    let (binary, links): (Vec<&Owned>, Vec<&Owned>) =
        manifest.files.iter().partition(|owned| owned.name == BINARY);
    let mut steps = Vec::new();
    if let Some(conf) = &manifest.conflist {
        steps.push(conf_step(conf));
    }
    for owned in links.into_iter().chain(binary) {
        steps.push(step(folder, owned)?);
    }
    Ok((steps, manifest))
}

fn step(folder: &Folder, owned: &Owned) -> Result<Step> {
    let there = folder.look(&owned.name)?;
    let is_kept =
        owned.backup.is_some() && backup(&folder.path, &owned.name).symlink_metadata().is_ok();
    let action = match &there {
        // Gone: the earlier one is wanted all the same.
        None if is_kept => Action::Restore,
        None => Action::Unchanged,
        Some(_) if !owned.is_unchanged(folder)? => Action::Keep,
        Some(_) if is_kept => Action::Restore,
        Some(_) => Action::Remove,
    };
    let was = match action {
        Action::Restore => owned.backup.clone(),
        _ => there.map(|entry| entry.describe()),
    };
    Ok(Step { name: owned.name.clone(), action, was, backup: false })
}

fn take_back(folder: &Path, step: &Step) -> Result<()> {
    let path = folder.join(&step.name);
    match step.action {
        Action::Restore => fs::rename(backup(folder, &step.name), &path).during("restore", &path),
        Action::Remove if !step.name.contains('/') => remove(&path),
        _ => Ok(()),
    }
}

/// The configuration in the list of steps, by its path.
fn conf_step(conf: &OwnedConf) -> Step {
    let action = match fs::read(&conf.path) {
        Ok(bytes) if sha256(&bytes) != conf.sha256 => Action::Keep,
        Ok(_) if conf.backup => Action::Restore,
        Ok(_) => Action::Remove,
        Err(_) => Action::Unchanged,
    };
    let name = conf.path.display().to_string();
    let was = Some("a network configuration".to_owned());
    Step { name, action, was, backup: false }
}

fn take_back_conf(folder: &Path, conf: &OwnedConf) -> Result<()> {
    match conf_step(conf).action {
        Action::Remove => remove(&conf.path),
        Action::Restore => {
            // Perhaps on another file system.
            let kept = conflist::kept(folder, &conf.path);
            let bytes = fs::read(&kept).during("read", &kept)?;
            conflist::write(&conf.path, &bytes)?;
            remove(&kept)
        }
        _ => Ok(()),
    }
}

/// Our own folder goes with the last file; while a file that was kept is in it, it stays.
fn forget(folder: &Path, steps: &[Step]) -> Result<()> {
    let state = folder.join(STATE);
    Manifest::remove(folder)?;
    let has_kept = || fs::read_dir(state.join("backup")).is_ok_and(|mut dir| dir.next().is_some());
    if steps.iter().any(|step| step.action == Action::Keep) && has_kept() {
        return sync(&state);
    }
    fs::remove_dir_all(&state).during("remove", &state)
}
