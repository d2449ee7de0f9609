//! Doing what was planned: make everything aside, ask it for its versions, keep what is there,
//! note what will be ours, then rename name by name.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::conflist::Conflist;
use super::files::{self, During, copy_label, create_folder, keep, remove, sync};
use super::manifest::{Manifest, backup};
use super::options::Mode;
use super::plan::{Action, Plan, Step};
use super::{BINARY, Job, STATE};
use crate::error::{Error, Result};
use crate::invoke::{self, System};
use crate::skel::{Applet, Main, Rollback};

/// How long a plugin may take to tell its versions. A node under load is slow.
const ANSWER: Duration = Duration::from_secs(60);

/// Does it all, or nothing. The lock is held.
pub(super) fn run(job: &Job<'_>, plan: &Plan, conf: Option<&Conflist>) -> Result<()> {
    let folder = &job.options.folder;
    let stage = Stage::make(folder)?;
    stage.fill(job, plan)?;
    if job.options.verify {
        verify(job, plan, &stage.new)?;
    }
    keep_all(folder, plan)?;
    let mut undo = Rollback::new();
    let old = Manifest::load(folder)?;
    let mut manifest = plan.manifest.clone();
    manifest.save(folder)?;
    undo.push("the manifest", move || old.save(folder));
    for step in &plan.steps {
        stage.switch(folder, step, &mut undo)?;
    }
    sync(folder)?;
    if job.options.verify {
        verify(job, plan, folder)?;
    }
    if let Some(conf) = conf {
        manifest.conflist = Some(conf.install(folder, &mut undo)?);
        manifest.save(folder)?;
    }
    undo.commit();
    Ok(())
}

/// Keeps what `uninstall` will put back.
fn keep_all(folder: &Path, plan: &Plan) -> Result<()> {
    let kept: Vec<&Step> = plan.steps.iter().filter(|step| step.backup).collect();
    if kept.is_empty() {
        return Ok(());
    }
    let backups = folder.join(STATE).join("backup");
    create_folder(&backups)?;
    for step in kept {
        keep(&folder.join(&step.name), &backup(folder, &step.name))?;
    }
    sync(&backups)
}

/// The folder where everything is made, on the file system of the names. Removed in the end.
struct Stage {
    new: PathBuf,
    /// What was at the names, for as long as the switch can be taken back.
    old: PathBuf,
}

impl Drop for Stage {
    fn drop(&mut self) {
        // The next installation removes what is left.
        drop(fs::remove_dir_all(&self.new));
        drop(fs::remove_dir_all(&self.old));
    }
}

impl Stage {
    /// An empty one: what a killed installer left in it is removed.
    fn make(folder: &Path) -> Result<Stage> {
        let stage = |name: &str| folder.join(STATE).join(name);
        let stage = Stage { new: stage("new"), old: stage("old") };
        for dir in [&stage.new, &stage.old] {
            if dir.exists() {
                fs::remove_dir_all(dir).during("empty", dir)?;
            }
            create_folder(dir)?;
        }
        Ok(stage)
    }

    /// Makes what the names will be.
    fn fill(&self, job: &Job<'_>, plan: &Plan) -> Result<()> {
        let binary = self.new.join(BINARY);
        if plan.steps.iter().any(|step| step.name == BINARY && step.action.writes()) {
            files::write_executable(&binary, &job.payload.bytes)?;
            copy_label(&job.options.folder, &binary);
        } else {
            // So that links lead to it here as well.
            keep(&job.options.folder.join(BINARY), &binary)?;
        }
        for step in plan.steps.iter().filter(|step| step.name != BINARY && step.action.writes()) {
            let path = self.new.join(&step.name);
            match job.options.mode {
                Mode::Symlink => symlink(BINARY, &path).during("create", &path)?,
                Mode::Hardlink => fs::hard_link(&binary, &path).during("link", &path)?,
                Mode::Copy => {
                    let bytes = fs::read(&binary).during("read", &binary)?;
                    files::write_executable(&path, &bytes)?;
                }
            }
            copy_label(&job.options.folder, &path);
        }
        sync(&self.new)
    }

    /// Puts what was made in the place of what is there, in one step.
    fn switch<'a>(&self, folder: &'a Path, step: &Step, undo: &mut Rollback<'a>) -> Result<()> {
        if !step.action.changes() {
            return Ok(());
        }
        let (path, old) = (folder.join(&step.name), self.old.join(&step.name));
        let made = identity(&self.new.join(&step.name));
        let target = path.clone();
        if step.action == Action::Install {
            undo.push(step.name.clone(), move || {
                if identity(&target) == made { remove(&target) } else { Ok(()) }
            });
        } else {
            keep(&path, &old)?;
            undo.push(step.name.clone(), move || {
                // A file that another process has put there meanwhile is left alone.
                let is_ours = made.is_none() || identity(&target) == made;
                if is_ours { fs::rename(&old, &target).during("restore", &target) } else { Ok(()) }
            });
        }
        match step.action {
            Action::Remove => remove(&path),
            Action::Restore => {
                fs::rename(backup(folder, &step.name), &path).during("restore", &path)
            }
            _ => fs::rename(self.new.join(&step.name), &path).during("replace", &path),
        }
    }
}

/// Device and inode of what is at a path itself.
fn identity(path: &Path) -> Option<(u64, u64)> {
    path.symlink_metadata().ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Asks every plugin that is ours for its versions, through the name by which it will be started.
fn verify(job: &Job<'_>, plan: &Plan, folder: &Path) -> Result<()> {
    let is_staged = folder != job.options.folder;
    for step in &plan.steps {
        let made = step.action.writes() || step.action == Action::Unchanged && !is_staged;
        let applet = job.applets.iter().find(|applet| applet.name == step.name);
        if let (true, Some(applet)) = (made, applet) {
            let path = folder.join(&step.name);
            let asked = answers(applet, &path, plan.is_own_binary);
            asked.map_err(|error| unanswered(&path, is_staged, &error))?;
        }
    }
    Ok(())
}

/// An error with the remedy that is likely; the plugin's own text may have come as it is.
fn unanswered(path: &Path, is_staged: bool, cause: &Error) -> Error {
    let done = if is_staged { "nothing was changed" } else { "everything was taken back" };
    let msg = format!("ask {} for its versions: {cause}; {done}", path.display());
    let remedy = "is the file system mounted noexec? --no-verify does without the answer";
    Error::new(cause.code(), msg).with_details(remedy)
}

fn answers(applet: &Applet, path: &Path, is_own_binary: bool) -> Result<()> {
    let Main::Plugin(plugin) = applet.main else {
        return fs::metadata(path).map(drop).during("open", path);
    };
    let info = invoke::version_info(&System, path, Some(ANSWER))?;
    match plugin.versions.iter().find(|version| is_own_binary && !info.supports(version.as_str())) {
        Some(version) => Err(Error::internal(format!("it does not speak {version}"))),
        None => Ok(()),
    }
}
