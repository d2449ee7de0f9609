//! The execution of a plan: stage all files, run each plugin with VERSION, back up what is
//! replaced, save the manifest, then rename file by file.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::directory::{InstalledConfig, backup_path, replace_text_file};
use super::files::{self, copy_label, create_directory, device_inode, link_or_copy};
use super::options::InstallMode;
use super::origin::sha256_hex;
use super::plan::{FileAction, InstallPlan, InstallStep, PlannedConfig};
use super::{BINARY, InstallJob, STATE};
use crate::framework::{Applet, AppletMain, BuiltinPlugin, Rollback};
use cni::error::{Error, Result};
use cni::exec::{ProcessExecutor, query_version_info};
use cni::files::{FileOperationContext, remove_file, sync_directory};

/// The timeout of a plugin's VERSION, on a node under load.
const VERSION_TIMEOUT: Duration = Duration::from_secs(60);

/// Executes the whole plan, or undoes what was done. The caller holds the lock.
pub(super) fn execute_plan(job: &InstallJob<'_>, plan: &InstallPlan) -> Result<()> {
    let directory = &job.options.directory;
    let stage = StagingArea::new(directory)?;
    stage.stage_files(job, plan)?;
    if job.options.verify {
        verify_plugins(job, plan, &stage.new)?;
    }
    back_up(directory, plan)?;
    let mut undo = Rollback::new();
    let mut manifest = plan.manifest.clone();
    manifest.save_to(directory)?;
    undo.add_step("restore the manifest", || plan.old.save_to(directory));
    for step in plan.steps.iter().filter(|step| step.action.is_change()) {
        stage.replace_entry(directory, step, &mut undo)?;
    }
    sync_directory(directory)?;
    if job.options.verify {
        verify_plugins(job, plan, directory)?;
    }
    if let Some(conf) = &plan.conf {
        manifest.conflist = Some(install_config(plan, conf, &mut undo)?);
        manifest.save_to(directory)?;
    }
    undo.commit();
    Ok(())
}

/// Backs up for `uninstall`.
fn back_up(directory: &Path, plan: &InstallPlan) -> Result<()> {
    let backups = directory.join(STATE).join("backup");
    create_directory(&backups)?;
    let conf = plan.conf.iter().map(|conf| &conf.step);
    for step in plan.steps.iter().chain(conf).filter(|step| step.backup) {
        // The name of the network configuration is an absolute path.
        link_or_copy(&directory.join(&step.name), &backup_path(directory, &step.name))?;
    }
    Ok(sync_directory(&backups)?)
}

/// The directories of one run, on the file system of the plugins. Removed at the end.
struct StagingArea {
    /// The files to be installed.
    new: PathBuf,
    /// The replaced files, for the rollback.
    old: PathBuf,
}

impl Drop for StagingArea {
    fn drop(&mut self) {
        // What cannot be removed is removed by the next run.
        drop(fs::remove_dir_all(&self.new));
        drop(fs::remove_dir_all(&self.old));
    }
}

impl StagingArea {
    /// Creates the directories, and removes the files of a killed installer.
    fn new(directory: &Path) -> Result<StagingArea> {
        let own = directory.join(STATE);
        let stage = StagingArea { new: own.join("new"), old: own.join("old") };
        for dir in [&stage.new, &stage.old] {
            files::if_present(fs::remove_dir_all(dir)).during("empty", dir)?;
            create_directory(dir)?;
        }
        Ok(stage)
    }

    fn stage_files(&self, job: &InstallJob<'_>, plan: &InstallPlan) -> Result<()> {
        let (directory, binary) = (&job.options.directory, self.new.join(BINARY));
        let mut steps = plan.steps.iter().filter(|step| step.action.writes_file()).peekable();
        if steps.next_if(|step| step.name == BINARY).is_some() {
            files::write_executable(&binary, &job.payload.bytes)?;
            copy_label(directory, &binary);
        } else if job.options.mode == InstallMode::Hardlink {
            link_or_copy(&directory.join(BINARY), &binary)?;
        } else {
            // The target of the staged links; an immutable file cannot have another name.
            let target = Path::new("../..").join(BINARY);
            symlink(target, &binary).during("create", &binary)?;
        }
        for step in steps {
            let path = self.new.join(&step.name);
            match job.options.mode {
                InstallMode::Symlink => symlink(BINARY, &path).during("create", &path)?,
                InstallMode::Hardlink => {
                    fs::hard_link(&binary, &path).during("link", &path)?;
                }
                InstallMode::Copy => {
                    let bytes = files::read_file(&binary).during("read", &binary)?;
                    files::write_executable(&path, &bytes)?;
                }
            }
            copy_label(directory, &path);
        }
        Ok(sync_directory(&self.new)?)
    }

    /// Replaces or removes a file of the directory, atomically.
    fn replace_entry(
        &self,
        directory: &Path,
        step: &InstallStep,
        undo: &mut Rollback<'_>,
    ) -> Result<()> {
        let (path, old) = (directory.join(&step.name), self.old.join(&step.name));
        let new = match step.action {
            FileAction::Restore => backup_path(directory, &step.name),
            _ => self.new.join(&step.name),
        };
        let identity = |path: &Path| path.symlink_metadata().ok().map(|m| device_inode(&m));
        let installed = identity(&new);
        let is_new = step.action == FileAction::Install;
        if !is_new {
            link_or_copy(&path, &old)?;
        }
        let target = path.clone();
        undo.add_step(format!("restore {}", step.name), move || {
            if identity(&target) != installed {
                // Another process has replaced the file since.
                Ok(())
            } else if is_new {
                Ok(remove_file(&target)?)
            } else {
                Ok(fs::rename(&old, &target).during("restore", &target)?)
            }
        });
        match step.action {
            FileAction::Remove => remove_file(&path)?,
            _ => fs::rename(&new, &path).during("replace", &path)?,
        }
        Ok(())
    }
}

/// Runs every installed plugin of `directory` with VERSION, through the name that runtimes use.
fn verify_plugins(job: &InstallJob<'_>, plan: &InstallPlan, directory: &Path) -> Result<()> {
    let is_staged = directory != job.options.directory;
    let is_in_directory = |step: &&InstallStep| {
        step.action.writes_file() || step.action == FileAction::Unchanged && !is_staged
    };
    for step in plan.steps.iter().filter(is_in_directory) {
        let applet = job.applets.iter().find(|applet| applet.name == step.name);
        let Some(applet) = applet else { continue };
        let path = directory.join(&step.name);
        verify_plugin(applet, &path, plan.is_own_binary()).map_err(|cause| {
            let state = if is_staged { "nothing was changed" } else { "all changes were undone" };
            let msg = format!("ask {} for its versions: {cause}; {state}", path.display());
            let remedy = "is the file system mounted noexec? --no-verify skips this test";
            Error::new(cause.code(), msg).with_details(remedy)
        })?;
    }
    Ok(())
}

fn verify_plugin(applet: &Applet, path: &Path, is_own_binary: bool) -> Result<()> {
    let AppletMain::Plugin(BuiltinPlugin { versions, .. }) = applet.main else {
        return Ok(fs::metadata(path).map(drop).during("open", path)?);
    };
    let info = query_version_info(&ProcessExecutor, path, Some(VERSION_TIMEOUT))?;
    match versions.iter().find(|version| is_own_binary && !info.supports_version(version.as_str()))
    {
        Some(version) => Err(Error::internal(format!("the plugin does not support {version}"))),
        None => Ok(()),
    }
}

/// Installs the network configuration and returns its entry of the manifest.
fn install_config(
    plan: &InstallPlan,
    conf: &PlannedConfig,
    undo: &mut Rollback<'_>,
) -> Result<InstalledConfig> {
    let PlannedConfig { step, path, bytes } = conf;
    let old = plan.old.conflist.as_ref().filter(|old| old.path == *path);
    let backup = match step.action {
        FileAction::Replace => step.backup,
        _ => old.is_some_and(|old| old.backup),
    };
    if step.action.writes_file() {
        create_directory(path.parent().unwrap_or(path))?;
        let (target, before) = (path.clone(), files::read_file(path).ok());
        undo.add_step("restore the network configuration", move || match before {
            Some(bytes) => replace_text_file(&target, &bytes),
            None => Ok(remove_file(&target)?),
        });
        replace_text_file(path, bytes)?;
    }
    Ok(InstalledConfig { path: path.clone(), sha256: sha256_hex(bytes), backup })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_undo_keeps_what_another_process_installed_since() {
        let dir = tempfile::tempdir().unwrap();
        let (stage, path) = (StagingArea::new(dir.path()).unwrap(), dir.path().join("bridge"));
        let step = InstallStep {
            name: "bridge".to_owned(),
            action: FileAction::Update,
            was: None,
            backup: false,
        };
        for (since, expected) in [(None, "old"), (Some("other"), "other")] {
            fs::write(&path, "old").unwrap();
            fs::write(stage.new.join("bridge"), "new").unwrap();
            let mut undo = Rollback::new();
            stage.replace_entry(dir.path(), &step, &mut undo).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "new");
            if let Some(text) = since {
                let temporary = dir.path().join("temporary");
                fs::write(&temporary, text).unwrap();
                fs::rename(&temporary, &path).unwrap();
            }
            drop(undo);
            assert_eq!(fs::read_to_string(&path).unwrap(), expected);
        }
    }
}
