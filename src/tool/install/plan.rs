//! The decision what to do with each name, before anything is changed.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::directory::{
    InstallManifest, InstalledFile, PluginDirectory, PluginDirectoryEntry, backup_path,
};
use super::files::{self, if_present};
use super::options::{InstallMode, ReplacePolicy};
use super::origin::{ExecutableOrigin, is_newer_release, sha256_hex};
use super::{BINARY, InstallJob};
use crate::framework::run::REFERENCE_RELEASE;
use cni::NetworkName;
use cni::error::{Error, ErrorContext, Result};
use cni::files::FileOperationContext;
use cni::runtime::NetworkList;
use cni::sort::sort_by;

#[derive(Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum FileAction {
    Install,
    /// An installed file is replaced.
    Update,
    /// A file of another origin is replaced.
    Replace,
    /// The entry stays, although it differs from what would be installed.
    Keep,
    /// The entry is already as it would be installed.
    Unchanged,
    Remove,
    /// The backup is moved back.
    Restore,
}

impl FileAction {
    /// Whether a new file is put at the name.
    pub(super) fn writes_file(self) -> bool {
        matches!(self, FileAction::Install | FileAction::Update | FileAction::Replace)
    }

    pub(super) fn is_change(self) -> bool {
        !matches!(self, FileAction::Keep | FileAction::Unchanged)
    }
}

/// What is done with a name; the report in JSON has these keys.
#[derive(Serialize)]
pub(super) struct InstallStep {
    /// The name in the directory; the path of the network configuration.
    pub(super) name: String,
    pub(super) action: FileAction,
    /// A description of the existing entry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) was: Option<String>,
    /// Whether the existing entry is backed up.
    pub(super) backup: bool,
}

pub(super) struct InstallPlan {
    /// The steps in their order; the step of the executable is the first one.
    pub(super) steps: Vec<InstallStep>,
    pub(super) conf: Option<PlannedConfig>,
    pub(super) old: InstallManifest,
    /// The manifest after the steps.
    pub(super) manifest: InstallManifest,
}

/// The network configuration that is installed last, because runtimes use it at once.
pub(super) struct PlannedConfig {
    pub(super) step: InstallStep,
    pub(super) path: PathBuf,
    pub(super) bytes: Vec<u8>,
}

impl InstallPlan {
    /// Reads the directory. Fails if the installation must not be done.
    pub(super) fn new(job: &InstallJob<'_>) -> Result<InstallPlan> {
        let directory = PluginDirectory::read_entries(&job.options.directory, &job.applet_names())?;
        let (steps, manifest) = if job.options.policy == ReplacePolicy::Never {
            let steps = [BINARY]
                .into_iter()
                .chain(job.applet_names())
                .map(|name| new_step(job, name, FileAction::Keep, directory.find_entry(name)));
            (steps.collect(), directory.manifest.clone())
        } else {
            plan_steps(job, &directory)?
        };
        let plan = InstallPlan { steps, conf: None, manifest, old: directory.manifest };
        let conf = job
            .options
            .conflist
            .as_deref()
            .map(|file| plan_config(job, file, &plan))
            .transpose()?;
        Ok(InstallPlan { conf, ..plan })
    }

    /// Whether the directory is already as planned.
    pub(super) fn is_done(&self) -> bool {
        let conf = self.conf.iter().map(|conf| &conf.step);
        self.manifest == self.old && !self.steps.iter().chain(conf).any(|s| s.action.is_change())
    }

    /// Whether the executable of the directory will be that of this process.
    pub(super) fn is_own_binary(&self) -> bool {
        self.steps.iter().any(|step| step.name == BINARY && step.action != FileAction::Keep)
    }

    /// All steps, for the report.
    pub(super) fn into_steps(self) -> Vec<InstallStep> {
        self.steps.into_iter().chain(self.conf.map(|conf| conf.step)).collect()
    }
}

fn new_step(
    job: &InstallJob<'_>,
    name: &str,
    action: FileAction,
    entry: Option<&PluginDirectoryEntry>,
) -> InstallStep {
    let backup = action == FileAction::Replace && job.options.backup;
    InstallStep {
        name: name.to_owned(),
        action,
        was: entry.map(PluginDirectoryEntry::describe),
        backup,
    }
}

fn plan_steps(
    job: &InstallJob<'_>,
    directory: &PluginDirectory,
) -> Result<(Vec<InstallStep>, InstallManifest)> {
    let entry = directory.find_entry(BINARY);
    let binary = new_step(job, BINARY, binary_action(job, directory)?, entry);
    let remaining = entry.filter(|_| !binary.action.writes_file());
    let sha256 = match remaining {
        Some(PluginDirectoryEntry { content: Some(content), .. }) => &content.sha256,
        _ => &job.payload.sha256,
    };
    let mut steps = vec![binary];
    let mut refused = Vec::new();
    for name in job.applet_names() {
        let entry = directory.find_entry(name);
        let action = match entry {
            None => FileAction::Install,
            Some(entry) if is_as_wanted(job.options.mode, entry, remaining, sha256) => {
                FileAction::Unchanged
            }
            Some(entry) => link_action(job, entry),
        };
        if action == FileAction::Replace && !entry.is_some_and(|entry| may_replace(job, entry)) {
            refused.push(name);
        }
        steps.push(new_step(job, name, action, entry));
    }
    if !refused.is_empty() {
        return Err(foreign_files_error(job, &refused));
    }
    steps.extend(stale_file_steps(job, directory));
    let manifest = new_manifest(job, directory, &steps, sha256);
    Ok((steps, manifest))
}

fn binary_action(job: &InstallJob<'_>, directory: &PluginDirectory) -> Result<FileAction> {
    let Some(entry) = directory.find_entry(BINARY) else { return Ok(FileAction::Install) };
    if entry.is_file_with_hash(&job.payload.sha256) {
        return Ok(FileAction::Unchanged);
    }
    let (policy, own) = (job.options.policy, &job.payload.release);
    let ExecutableOrigin::Own(release) = entry.file_origin() else {
        let old = &directory.manifest;
        // An installed executable, overwritten by a `cp` that followed the link of a plugin.
        let is_overwritten = old.find_file(BINARY).is_some() && old.mode == InstallMode::Symlink;
        // A foreign executable must not stay: the links of the plugins would lead to it.
        if policy == ReplacePolicy::IfNotPresent || !is_overwritten && !may_replace(job, entry) {
            return Err(foreign_files_error(job, &[BINARY]));
        }
        return Ok(if is_overwritten { FileAction::Update } else { FileAction::Replace });
    };
    if policy == ReplacePolicy::IfNotPresent
        || policy == ReplacePolicy::IfNewer && !is_newer_release(own, &release)
    {
        return Ok(FileAction::Keep);
    }
    if is_newer_release(&release, own) && !job.options.force {
        let directory = job.options.directory.display();
        let msg = format!("install into {directory}: cnibox {release} is there, this is {own}");
        return Err(Error::config(msg).with_details("--force installs the older release"));
    }
    Ok(FileAction::Update)
}

/// The action for an entry that is not as it would be installed.
fn link_action(job: &InstallJob<'_>, entry: &PluginDirectoryEntry) -> FileAction {
    match (job.options.policy, entry.file_origin()) {
        (ReplacePolicy::IfNotPresent, _) => FileAction::Keep,
        // The links follow the decision about the executable.
        (_, ExecutableOrigin::Own(_)) => FileAction::Update,
        (ReplacePolicy::IfNewer, ExecutableOrigin::Reference(Some(release)))
            if is_newer_release(&release, REFERENCE_RELEASE) =>
        {
            FileAction::Keep
        }
        _ => FileAction::Replace,
    }
}

/// Whether the entry is what `mode` creates. `binary` is the executable if it is not replaced.
fn is_as_wanted(
    mode: InstallMode,
    entry: &PluginDirectoryEntry,
    binary: Option<&PluginDirectoryEntry>,
    sha256: &str,
) -> bool {
    let is_hard_link = binary.is_some_and(|binary| entry.is_hard_link_to(binary));
    match mode {
        InstallMode::Symlink => entry.links_to(BINARY),
        InstallMode::Hardlink => is_hard_link,
        InstallMode::Copy => entry.is_file_with_hash(sha256) && !is_hard_link,
    }
}

fn may_replace(job: &InstallJob<'_>, entry: &PluginDirectoryEntry) -> bool {
    entry.is_replaceable()
        && (job.options.replace || entry.file_origin() != ExecutableOrigin::Foreign)
}

fn foreign_files_error(job: &InstallJob<'_>, names: &[&str]) -> Error {
    let (directory, names) = (job.options.directory.display(), names.join(", "));
    Error::config(format!(
        "install into {directory}: neither cnibox nor reference plugins: {names}; nothing was \
         changed"
    ))
    .with_details("--replace replaces files and backs them up for uninstall, --skip leaves them")
}

/// Unchanged files of an earlier release whose applets no longer exist.
fn stale_file_steps(job: &InstallJob<'_>, directory: &PluginDirectory) -> Vec<InstallStep> {
    directory
        .manifest
        .files
        .iter()
        .filter(|owned| {
            let is_applet = job.applets.iter().any(|applet| applet.name == owned.name);
            !is_applet && owned.name != BINARY && directory.is_unchanged(owned)
        })
        .map(|owned| {
            let action =
                if owned.backup.is_some() { FileAction::Restore } else { FileAction::Remove };
            new_step(job, &owned.name, action, None)
        })
        .collect()
}

fn new_manifest(
    job: &InstallJob<'_>,
    directory: &PluginDirectory,
    steps: &[InstallStep],
    sha256: &str,
) -> InstallManifest {
    let old = &directory.manifest;
    let is_owned =
        |step: &&InstallStep| step.action.writes_file() || step.action == FileAction::Unchanged;
    let mut files: Vec<InstalledFile> = old
        .files
        .iter()
        .filter(|owned| {
            let step = steps.iter().find(|step| step.name == owned.name);
            step.is_none_or(|step| step.action == FileAction::Keep) && directory.is_unchanged(owned)
        })
        .cloned()
        .collect();
    files.extend(
        steps.iter().filter(is_owned).map(|step| new_manifest_entry(job, old, step, sha256)),
    );
    sort_by(&mut files, |a, b| a.name.cmp(&b.name));
    let keeps_binary = steps.first().is_some_and(|step| step.action == FileAction::Keep);
    let version = if keeps_binary { old.version.clone() } else { job.payload.release.clone() };
    let protect = job.options.protect || old.protect;
    InstallManifest {
        version,
        mode: job.options.mode,
        protect,
        files,
        conflist: old.conflist.clone(),
    }
}

fn new_manifest_entry(
    job: &InstallJob<'_>,
    old: &InstallManifest,
    step: &InstallStep,
    sha256: &str,
) -> InstalledFile {
    let name = step.name.clone();
    // A backup of an installer that was killed before it saved the manifest.
    let orphan = || {
        let path = backup_path(&job.options.directory, &name);
        path.symlink_metadata().is_ok().then(|| "a backup".to_owned())
    };
    let backup = if step.backup {
        step.was.clone()
    } else {
        (old.find_file(&name).and_then(|owned| owned.backup.clone())).or_else(orphan)
    };
    let is_link = name != BINARY && job.options.mode == InstallMode::Symlink;
    let link = is_link.then(|| BINARY.to_owned());
    let sha256 = (!is_link).then(|| sha256.to_owned());
    InstalledFile { name, link, sha256, backup }
}

/// Reads the network configuration. Fails if it is invalid, if a plugin is missing, or if it would
/// replace a file of another origin.
fn plan_config(job: &InstallJob<'_>, file: &Path, plan: &InstallPlan) -> Result<PlannedConfig> {
    let read = || format!("network configuration {}", file.display());
    let list = NetworkList::from_file(file).context(read)?;
    NetworkName::parse(&list.name).context(read)?;
    require_plugins(job, &list, plan).context(read)?;
    let bytes = files::read_file(file).during("read", file)?;
    let path = job.options.conf_dir.join(file.file_name().unwrap_or_default());
    let is_installed = |there: &[u8]| {
        let hash = sha256_hex(there);
        plan.old.conflist.as_ref().is_some_and(|conf| conf.path == path && conf.sha256 == hash)
    };
    let action = match if_present(files::read_file(&path)).during("read", &path)? {
        None => FileAction::Install,
        Some(there) if there == bytes => FileAction::Unchanged,
        Some(there) if is_installed(&there) => FileAction::Update,
        Some(_) if job.options.replace => FileAction::Replace,
        Some(_) => {
            let path = path.display();
            let msg = format!("{path} exists, and is not from this installer; nothing was changed");
            return Err(Error::config(msg)
                .with_details("--replace replaces it and backs it up for uninstall"));
        }
    };
    Ok(PlannedConfig {
        step: new_step(job, &path.display().to_string(), action, None),
        path,
        bytes,
    })
}

/// Fails if a plugin of the network will be missing: each ADD would fail.
fn require_plugins(job: &InstallJob<'_>, list: &NetworkList, plan: &InstallPlan) -> Result<()> {
    let directory = &job.options.directory;
    match list.plugins.iter().map(|plugin| &plugin.plugin_type).find(|kind| {
        !plan.steps.iter().any(|step| step.name == **kind && step.action.writes_file())
            && !directory.join(kind).exists()
    }) {
        Some(kind) => {
            Err(Error::config(format!("no plugin \"{kind}\" in {}", directory.display())))
        }
        None => Ok(()),
    }
}
