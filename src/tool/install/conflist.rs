//! The network configuration that comes last: from the moment it is there, runtimes use it.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::Job;
use super::files::{During, copy_label, create_folder, keep, remove};
use super::manifest::{Manifest, OwnedConf, backup};
use super::origin::sha256;
use super::plan::{Action, Plan};
use crate::cni::NetworkName;
use crate::error::{Context, Error, Result};
use crate::files::atomic::{Durability, Writer};
use crate::runtime::NetworkList;
use crate::skel::Rollback;

/// A configuration to be installed.
pub(super) struct Conflist {
    pub(super) path: PathBuf,
    pub(super) action: Action,
    bytes: Vec<u8>,
    backup: bool,
}

impl Conflist {
    /// Reads and checks it: it must parse, and its plugins must be there or be installed now.
    pub(super) fn plan(
        job: &Job<'_>,
        file: &Path,
        plan: &Plan,
        old: &Manifest,
    ) -> Result<Conflist> {
        let read = || format!("network configuration {}", file.display());
        let list = NetworkList::from_file(file).context(read)?;
        NetworkName::parse(&list.name).context(read)?;
        require_plugins(job, &list, plan).context(read)?;
        let bytes = fs::read(file).during("read", file)?;
        let name = file.file_name().unwrap_or_default();
        let path = job.options.conf_dir.join(name);
        let old = old.conflist.as_ref().filter(|conf| conf.path == path);
        let (action, backup) = decide(job, &path, &bytes, old)?;
        Ok(Conflist { path, action, bytes, backup })
    }

    pub(super) fn changes(&self) -> bool {
        self.action.changes()
    }

    /// Puts it in place; what to note about it.
    pub(super) fn install(&self, folder: &Path, undo: &mut Rollback<'_>) -> Result<OwnedConf> {
        let note =
            OwnedConf { path: self.path.clone(), sha256: sha256(&self.bytes), backup: self.backup };
        if !self.action.writes() {
            return Ok(note);
        }
        if let Some(dir) = self.path.parent() {
            create_folder(dir)?;
        }
        if self.action == Action::Replace && self.backup {
            let kept = kept(folder, &self.path);
            create_folder(kept.parent().unwrap_or(folder))?;
            keep(&self.path, &kept)?;
        }
        let path = self.path.clone();
        let before = fs::read(&path).ok();
        undo.push("the network configuration", move || match before {
            Some(bytes) => write(&path, &bytes),
            None => remove(&path),
        });
        write(&self.path, &self.bytes)?;
        Ok(note)
    }
}

/// Where the configuration that was there is kept: no applet has a name with a dot.
pub(super) fn kept(folder: &Path, path: &Path) -> PathBuf {
    backup(folder, &path.file_name().unwrap_or_default().to_string_lossy())
}

/// Replaces a configuration as a whole.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    Writer::unlocked(path, Durability::Synced).replace(path, bytes, 0o644)?;
    copy_label(path.parent().unwrap_or(path), path);
    Ok(())
}

fn decide(
    job: &Job<'_>,
    path: &Path,
    bytes: &[u8],
    old: Option<&OwnedConf>,
) -> Result<(Action, bool)> {
    let kept = old.is_some_and(|conf| conf.backup);
    let there = match fs::read(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok((Action::Install, kept)),
        other => other.during("read", path)?,
    };
    if there == bytes {
        return Ok((Action::Unchanged, kept));
    }
    if old.is_some_and(|conf| conf.sha256 == sha256(&there)) {
        return Ok((Action::Update, kept));
    }
    if job.options.replace {
        return Ok((Action::Replace, job.options.backup));
    }
    let msg =
        format!("{} is there, and not from this installer; nothing was changed", path.display());
    Err(Error::config(msg).with_details("--replace replaces it and keeps it for uninstall"))
}

/// A network that lacks a plugin fails for every container.
fn require_plugins(job: &Job<'_>, list: &NetworkList, plan: &Plan) -> Result<()> {
    for plugin in &list.plugins {
        let kind = &plugin.plugin_type;
        let step = plan.steps.iter().find(|step| step.name == *kind);
        let is_made = step.is_some_and(|step| step.action.writes());
        if !is_made && !job.options.folder.join(kind).exists() {
            let folder = job.options.folder.display();
            return Err(Error::config(format!("no plugin \"{kind}\" in {folder}")));
        }
    }
    Ok(())
}
