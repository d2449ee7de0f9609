//! Uninstallation: first the configuration, then the links, last the executable. A backup is moved
//! back with one rename, so that its name leads to a plugin at every moment.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use super::directory::{
    InstallManifest, InstalledConfig, InstalledFile, PluginDirectory, PluginDirectoryEntry,
    backup_path, replace_text_file,
};
use super::files::{self, unprotect_executable};
use super::options::InstallOptions;
use super::origin::sha256_hex;
use super::plan::{FileAction, InstallStep};
use super::{BINARY, STATE};
use crate::attachment::{self, AttachmentRecord};
use crate::files::lock::FileLock;
use crate::netfilter::{PacketFilter, handover};
use crate::stderr;
use cni::error::{ErrorContext, Result};
use cni::files::{FileOperationContext, remove_file, sync_directory};

/// Removes the installed files that have not changed since.
pub(super) fn remove_installation(options: &InstallOptions) -> Result<Vec<InstallStep>> {
    let (directory, state) = (&options.directory, options.directory.join(STATE));
    if options.dry_run || !state.exists() {
        return plan_removal(directory);
    }
    let lock = FileLock::acquire_exclusive(&state.join("lock"))?;
    unprotect_executable(directory)?;
    let steps = plan_removal(directory)?;
    for step in &steps {
        // The name of the network configuration is an absolute path.
        let (path, backup) = (directory.join(&step.name), backup_path(directory, &step.name));
        match step.action {
            FileAction::Restore => match fs::rename(&backup, &path) {
                Err(cause) if cause.kind() == ErrorKind::CrossesDevices => {
                    let bytes = files::read_file(&backup).during("read", &backup)?;
                    replace_text_file(&path, &bytes)?;
                    remove_file(&backup)?;
                }
                other => other.during("restore", &path)?,
            },
            FileAction::Remove => remove_file(&path)?,
            _ => {}
        }
    }
    sync_directory(directory)?;
    remove_state(directory, &steps)?;
    drop(lock);
    if options.hand_over
        && ((steps.iter().any(|step| step.action == FileAction::Restore))
            || (steps.iter().any(|step| step.action.is_change()))
                && !AttachmentRecord::read_all(None).is_empty())
    {
        // The restored plugins find the rules of running containers only in their own layout, and
        // the plugins of this executable can no longer be started.
        let done = handover::hand_over_to_reference(&PacketFilter::new());
        for line in done.context(|| "all files were removed or restored, but not all rules")? {
            stderr::write_line(format_args!("cnibox: {line}"));
        }
        // Other plugins do not remove our records at DEL: a later installation would take the
        // attachment for one that still exists.
        attachment::remove_all_records()?;
    }
    Ok(steps)
}

/// The executable is the last step: until then every link leads to it.
fn plan_removal(directory: &Path) -> Result<Vec<InstallStep>> {
    let state = PluginDirectory::read_entries(directory, &[])?;
    let (binary, links): (Vec<&InstalledFile>, Vec<&InstalledFile>) =
        state.manifest.files.iter().partition(|owned| owned.name == BINARY);
    let conf = state.manifest.conflist.iter().map(config_step);
    let files = links.into_iter().chain(binary).map(|owned| file_step(directory, &state, owned));
    Ok(conf.chain(files).collect())
}

fn file_step(directory: &Path, state: &PluginDirectory, owned: &InstalledFile) -> InstallStep {
    let entry = state.find_entry(&owned.name);
    let action = match entry {
        Some(_) if !state.is_unchanged(owned) => FileAction::Keep,
        // The backup is restored even if somebody has removed the plugin.
        _ if owned.backup.is_some()
            && (backup_path(directory, &owned.name).symlink_metadata().is_ok()) =>
        {
            FileAction::Restore
        }
        Some(_) => FileAction::Remove,
        None => FileAction::Unchanged,
    };
    let was = match action {
        FileAction::Restore => owned.backup.clone(),
        _ => entry.map(PluginDirectoryEntry::describe),
    };
    InstallStep { name: owned.name.clone(), action, was, backup: false }
}

fn config_step(conf: &InstalledConfig) -> InstallStep {
    let action = match files::read_file(&conf.path) {
        Ok(bytes) if sha256_hex(&bytes) != conf.sha256 => FileAction::Keep,
        Ok(_) if conf.backup => FileAction::Restore,
        Ok(_) => FileAction::Remove,
        Err(_) => FileAction::Unchanged,
    };
    let was = Some("a network configuration".to_owned());
    InstallStep { name: conf.path.display().to_string(), action, was, backup: false }
}

/// Removes [`STATE`], unless the backup of a file that stays is in it.
fn remove_state(directory: &Path, steps: &[InstallStep]) -> Result<()> {
    let state = directory.join(STATE);
    remove_file(&InstallManifest::file_path(directory))?;
    if steps.iter().any(|step| step.action == FileAction::Keep)
        && (fs::read_dir(state.join("backup")).is_ok_and(|mut dir| dir.next().is_some()))
    {
        return Ok(sync_directory(&state)?);
    }
    Ok(fs::remove_dir_all(&state).during("remove", &state)?)
}
