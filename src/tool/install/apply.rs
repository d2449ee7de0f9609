//! The execution of a plan: stage all files, run each plugin with VERSION, back up what is
//! replaced, save the manifest, then rename file by file.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::files::{self, During, copy_label, create_folder, identity, keep, remove, sync};
use super::folder::{OwnedConf, backup, write};
use super::options::Mode;
use super::origin::sha256;
use super::plan::{Action, Conf, Plan, Step};
use super::{BINARY, Job, STATE};
use crate::error::{Error, Result};
use crate::invoke::{self, System};
use crate::skel::{Applet, Main, OwnPlugin, Rollback};

/// The timeout of a plugin's VERSION, on a node under load.
const VERSION_TIMEOUT: Duration = Duration::from_secs(60);

/// Executes the whole plan, or undoes what was done. The caller holds the lock.
pub(super) fn run(job: &Job<'_>, plan: &Plan) -> Result<()> {
    let folder = &job.options.folder;
    let stage = Stage::new(folder)?;
    stage.fill(job, plan)?;
    if job.options.verify {
        verify(job, plan, &stage.new)?;
    }
    back_up(folder, plan)?;
    let mut undo = Rollback::new();
    let mut manifest = plan.manifest.clone();
    manifest.save(folder)?;
    undo.push("the manifest", || plan.old.save(folder));
    for step in plan.steps.iter().filter(|step| step.action.changes()) {
        stage.switch(folder, step, &mut undo)?;
    }
    sync(folder)?;
    if job.options.verify {
        verify(job, plan, folder)?;
    }
    if let Some(conf) = &plan.conf {
        manifest.conflist = Some(install_conf(plan, conf, &mut undo)?);
        manifest.save(folder)?;
    }
    undo.commit();
    Ok(())
}

/// Backs up for `uninstall`.
fn back_up(folder: &Path, plan: &Plan) -> Result<()> {
    let backups = folder.join(STATE).join("backup");
    create_folder(&backups)?;
    let conf = plan.conf.iter().map(|conf| &conf.step);
    for step in plan.steps.iter().chain(conf).filter(|step| step.backup) {
        // The name of the network configuration is an absolute path.
        keep(&folder.join(&step.name), &backup(folder, &step.name))?;
    }
    sync(&backups)
}

/// The folders of one run, on the file system of the plugins. Removed at the end.
struct Stage {
    /// The files to be installed.
    new: PathBuf,
    /// The replaced files, for the rollback.
    old: PathBuf,
}

impl Drop for Stage {
    fn drop(&mut self) {
        // What cannot be removed is removed by the next run.
        drop(fs::remove_dir_all(&self.new));
        drop(fs::remove_dir_all(&self.old));
    }
}

impl Stage {
    /// Creates the folders, and removes the files of a killed installer.
    fn new(folder: &Path) -> Result<Stage> {
        let own = folder.join(STATE);
        let stage = Stage { new: own.join("new"), old: own.join("old") };
        for dir in [&stage.new, &stage.old] {
            files::if_present(fs::remove_dir_all(dir)).during("empty", dir)?;
            create_folder(dir)?;
        }
        Ok(stage)
    }

    fn fill(&self, job: &Job<'_>, plan: &Plan) -> Result<()> {
        let (folder, binary) = (&job.options.folder, self.new.join(BINARY));
        let mut steps = plan.steps.iter().filter(|step| step.action.writes()).peekable();
        if steps.next_if(|step| step.name == BINARY).is_some() {
            files::write_executable(&binary, &job.payload.bytes)?;
            copy_label(folder, &binary);
        } else if job.options.mode == Mode::Hardlink {
            keep(&folder.join(BINARY), &binary)?;
        } else {
            // The target of the staged links; an immutable file cannot have another name.
            let target = Path::new("../..").join(BINARY);
            symlink(target, &binary).during("create", &binary)?;
        }
        for step in steps {
            let path = self.new.join(&step.name);
            match job.options.mode {
                Mode::Symlink => symlink(BINARY, &path).during("create", &path)?,
                Mode::Hardlink => fs::hard_link(&binary, &path).during("link", &path)?,
                Mode::Copy => {
                    let bytes = files::read(&binary).during("read", &binary)?;
                    files::write_executable(&path, &bytes)?;
                }
            }
            copy_label(folder, &path);
        }
        sync(&self.new)
    }

    /// Replaces or removes a file of the folder, atomically.
    fn switch(&self, folder: &Path, step: &Step, undo: &mut Rollback<'_>) -> Result<()> {
        let (path, old) = (folder.join(&step.name), self.old.join(&step.name));
        let new = match step.action {
            Action::Restore => backup(folder, &step.name),
            _ => self.new.join(&step.name),
        };
        let identity = |path: &Path| path.symlink_metadata().ok().map(|m| identity(&m));
        let installed = identity(&new);
        let is_new = step.action == Action::Install;
        if !is_new {
            keep(&path, &old)?;
        }
        let target = path.clone();
        undo.push(step.name.clone(), move || {
            if identity(&target) != installed {
                // Another process has replaced the file since.
                Ok(())
            } else if is_new {
                remove(&target)
            } else {
                fs::rename(&old, &target).during("restore", &target)
            }
        });
        match step.action {
            Action::Remove => remove(&path),
            _ => fs::rename(&new, &path).during("replace", &path),
        }
    }
}

/// Runs every installed plugin of `folder` with VERSION, through the name that runtimes use.
fn verify(job: &Job<'_>, plan: &Plan, folder: &Path) -> Result<()> {
    let is_staged = folder != job.options.folder;
    let is_in_folder =
        |step: &&Step| step.action.writes() || step.action == Action::Unchanged && !is_staged;
    for step in plan.steps.iter().filter(is_in_folder) {
        let applet = job.applets.iter().find(|applet| applet.name == step.name);
        let Some(applet) = applet else { continue };
        let path = folder.join(&step.name);
        verify_one(applet, &path, plan.is_own_binary()).map_err(|cause| {
            let state = if is_staged { "nothing was changed" } else { "all changes were undone" };
            let msg = format!("ask {} for its versions: {cause}; {state}", path.display());
            let remedy = "is the file system mounted noexec? --no-verify skips this test";
            Error::new(cause.code(), msg).with_details(remedy)
        })?;
    }
    Ok(())
}

fn verify_one(applet: &Applet, path: &Path, is_own_binary: bool) -> Result<()> {
    let Main::Plugin(OwnPlugin { versions, .. }) = applet.main else {
        return fs::metadata(path).map(drop).during("open", path);
    };
    let info = invoke::version_info(&System, path, Some(VERSION_TIMEOUT))?;
    match versions.iter().find(|version| is_own_binary && !info.supports(version.as_str())) {
        Some(version) => Err(Error::internal(format!("the plugin does not support {version}"))),
        None => Ok(()),
    }
}

/// Installs the network configuration and returns its entry of the manifest.
fn install_conf(plan: &Plan, conf: &Conf, undo: &mut Rollback<'_>) -> Result<OwnedConf> {
    let Conf { step, path, bytes } = conf;
    let old = plan.old.conflist.as_ref().filter(|old| old.path == *path);
    let backup = match step.action {
        Action::Replace => step.backup,
        _ => old.is_some_and(|old| old.backup),
    };
    if step.action.writes() {
        create_folder(path.parent().unwrap_or(path))?;
        let (target, before) = (path.clone(), files::read(path).ok());
        undo.push("the network configuration", move || match before {
            Some(bytes) => write(&target, &bytes),
            None => remove(&target),
        });
        write(path, bytes)?;
    }
    Ok(OwnedConf { path: path.clone(), sha256: sha256(bytes), backup })
}
