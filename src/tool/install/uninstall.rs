//! Uninstallation: first the configuration, then the links, last the executable. A backup is moved
//! back with one rename, so that its name leads to a plugin at every moment.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use super::files::{self, During, remove, sync, unprotect};
use super::folder::{Entry, Folder, Manifest, Owned, OwnedConf, backup, write};
use super::options::Options;
use super::origin::sha256;
use super::plan::{Action, Step};
use super::{BINARY, STATE};
use crate::attachment::{self, Record};
use crate::error::{Context, Result};
use crate::files::lock::Lock;
use crate::log;
use crate::netfilter::{PacketFilter, handover};

/// Removes the installed files that have not changed since.
pub(super) fn run(options: &Options) -> Result<Vec<Step>> {
    let (folder, state) = (&options.folder, options.folder.join(STATE));
    if options.dry_run || !state.exists() {
        return plan(folder);
    }
    let lock = Lock::exclusive(&state.join("lock"))?;
    unprotect(folder)?;
    let steps = plan(folder)?;
    for step in &steps {
        // The name of the network configuration is an absolute path.
        let (path, kept) = (folder.join(&step.name), backup(folder, &step.name));
        match step.action {
            Action::Restore => match fs::rename(&kept, &path) {
                Err(cause) if cause.kind() == ErrorKind::CrossesDevices => {
                    write(&path, &files::read(&kept).during("read", &kept)?)?;
                    remove(&kept)?;
                }
                other => other.during("restore", &path)?,
            },
            Action::Remove => remove(&path)?,
            _ => {}
        }
    }
    sync(folder)?;
    remove_state(folder, &steps)?;
    drop(lock);
    let is_restored = || steps.iter().any(|step| step.action == Action::Restore);
    let is_removed = || steps.iter().any(|step| step.action.changes());
    if options.hand_over && (is_restored() || is_removed() && !Record::all(None).is_empty()) {
        // The plugins that follow find the rules of running containers only in their own layout. The
        // plugins of this executable can no longer be started.
        let done = handover::to_reference(&PacketFilter::new());
        for line in done.context(|| "all files were removed or restored, but not all rules")? {
            log::line(format_args!("cnibox: {line}"));
        }
        // Other plugins do not know our records: after their DEL, a later installation would take the attachment
        // for one that lives.
        attachment::remove_all()?;
    }
    Ok(steps)
}

/// The executable is the last step: until then every link leads to it.
fn plan(folder: &Path) -> Result<Vec<Step>> {
    let state = Folder::read(folder, &[])?;
    let (binary, links): (Vec<&Owned>, Vec<&Owned>) =
        state.manifest.files.iter().partition(|owned| owned.name == BINARY);
    let conf = state.manifest.conflist.iter().map(conf_step);
    let files = links.into_iter().chain(binary).map(|owned| step(folder, &state, owned));
    Ok(conf.chain(files).collect())
}

fn step(folder: &Path, state: &Folder, owned: &Owned) -> Step {
    let entry = state.entry(&owned.name);
    let has_backup = || backup(folder, &owned.name).symlink_metadata().is_ok();
    let action = match entry {
        Some(_) if !state.is_unchanged(owned) => Action::Keep,
        // Also if somebody has removed the plugin.
        _ if owned.backup.is_some() && has_backup() => Action::Restore,
        Some(_) => Action::Remove,
        None => Action::Unchanged,
    };
    let was = match action {
        Action::Restore => owned.backup.clone(),
        _ => entry.map(Entry::describe),
    };
    Step { name: owned.name.clone(), action, was, backup: false }
}

fn conf_step(conf: &OwnedConf) -> Step {
    let action = match files::read(&conf.path) {
        Ok(bytes) if sha256(&bytes) != conf.sha256 => Action::Keep,
        Ok(_) if conf.backup => Action::Restore,
        Ok(_) => Action::Remove,
        Err(_) => Action::Unchanged,
    };
    let was = Some("a network configuration".to_owned());
    Step { name: conf.path.display().to_string(), action, was, backup: false }
}

/// Removes [`STATE`], unless the backup of a file that stays is in it.
fn remove_state(folder: &Path, steps: &[Step]) -> Result<()> {
    let state = folder.join(STATE);
    remove(&Manifest::path(folder))?;
    let has_backups =
        || fs::read_dir(state.join("backup")).is_ok_and(|mut dir| dir.next().is_some());
    if steps.iter().any(|step| step.action == Action::Keep) && has_backups() {
        return sync(&state);
    }
    fs::remove_dir_all(&state).during("remove", &state)
}
