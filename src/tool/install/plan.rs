//! The decision what to do with each name, before anything is changed.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::files::{self, During, if_present};
use super::folder::{Entry, Folder, Manifest, Owned, OwnedConf, backup};
use super::options::{Mode, Policy};
use super::origin::{Origin, is_newer, sha256};
use super::{BINARY, Job};
use crate::cni::NetworkName;
use crate::error::{Context, Error, Result};
use crate::runtime::NetworkList;
use crate::skel::run::REFERENCE_RELEASE;
use crate::sort::sort_by;

#[derive(Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Action {
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

impl Action {
    /// Whether a new file is put at the name.
    pub(super) fn writes(self) -> bool {
        matches!(self, Action::Install | Action::Update | Action::Replace)
    }

    pub(super) fn changes(self) -> bool {
        !matches!(self, Action::Keep | Action::Unchanged)
    }
}

/// What is done with a name; the report in JSON has these keys.
#[derive(Serialize)]
pub(super) struct Step {
    /// The name in the folder; the path of the network configuration.
    pub(super) name: String,
    pub(super) action: Action,
    /// A description of the existing entry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) was: Option<String>,
    /// Whether the existing entry is backed up.
    pub(super) backup: bool,
}

pub(super) struct Plan {
    /// The executable first.
    pub(super) steps: Vec<Step>,
    pub(super) conf: Option<Conf>,
    pub(super) old: Manifest,
    /// The manifest after the steps.
    pub(super) manifest: Manifest,
}

/// The network configuration that is installed last, because runtimes use it at once.
pub(super) struct Conf {
    pub(super) step: Step,
    pub(super) path: PathBuf,
    pub(super) bytes: Vec<u8>,
}

impl Plan {
    /// Reads the folder. Fails if the installation must not be done.
    pub(super) fn new(job: &Job<'_>) -> Result<Plan> {
        let folder = Folder::read(&job.options.folder, &job.names())?;
        let (steps, manifest) = if job.options.policy == Policy::Never {
            let keep = |name| step(job, name, Action::Keep, folder.entry(name));
            let steps = [BINARY].into_iter().chain(job.names()).map(keep);
            (steps.collect(), folder.manifest.clone())
        } else {
            steps(job, &folder)?
        };
        let plan = Plan { steps, conf: None, manifest, old: folder.manifest };
        let conf =
            job.options.conflist.as_deref().map(|file| conf(job, file, &plan)).transpose()?;
        Ok(Plan { conf, ..plan })
    }

    /// Whether the folder is already as planned.
    pub(super) fn is_done(&self) -> bool {
        let conf = self.conf.iter().map(|conf| &conf.step);
        self.manifest == self.old && !self.steps.iter().chain(conf).any(|s| s.action.changes())
    }

    /// Whether the executable of the folder will be that of this process.
    pub(super) fn is_own_binary(&self) -> bool {
        self.steps.iter().any(|step| step.name == BINARY && step.action != Action::Keep)
    }

    /// All steps, for the report.
    pub(super) fn into_steps(self) -> Vec<Step> {
        self.steps.into_iter().chain(self.conf.map(|conf| conf.step)).collect()
    }
}

fn step(job: &Job<'_>, name: &str, action: Action, entry: Option<&Entry>) -> Step {
    let backup = action == Action::Replace && job.options.backup;
    Step { name: name.to_owned(), action, was: entry.map(Entry::describe), backup }
}

fn steps(job: &Job<'_>, folder: &Folder) -> Result<(Vec<Step>, Manifest)> {
    let entry = folder.entry(BINARY);
    let binary = step(job, BINARY, binary_action(job, folder)?, entry);
    let remaining = entry.filter(|_| !binary.action.writes());
    let sha256 = match remaining {
        Some(Entry { content: Some(content), .. }) => &content.sha256,
        _ => &job.payload.sha256,
    };
    let mut steps = vec![binary];
    let mut refused = Vec::new();
    for name in job.names() {
        let entry = folder.entry(name);
        let action = match entry {
            None => Action::Install,
            Some(entry) if is_as_wanted(job.options.mode, entry, remaining, sha256) => {
                Action::Unchanged
            }
            Some(entry) => link_action(job, entry),
        };
        if action == Action::Replace && !entry.is_some_and(|entry| may_replace(job, entry)) {
            refused.push(name);
        }
        steps.push(step(job, name, action, entry));
    }
    if !refused.is_empty() {
        return Err(foreign(job, &refused));
    }
    steps.extend(stale(job, folder));
    let manifest = manifest(job, folder, &steps, sha256);
    Ok((steps, manifest))
}

fn binary_action(job: &Job<'_>, folder: &Folder) -> Result<Action> {
    let Some(entry) = folder.entry(BINARY) else { return Ok(Action::Install) };
    if entry.is_file_of(&job.payload.sha256) {
        return Ok(Action::Unchanged);
    }
    let (policy, own) = (job.options.policy, &job.payload.release);
    let Origin::Own(release) = entry.origin() else {
        let old = &folder.manifest;
        // An installed executable, overwritten by a `cp` that followed the link of a plugin.
        let is_overwritten = old.get(BINARY).is_some() && old.mode == Mode::Symlink;
        // If a foreign executable stayed, the links would lead to it.
        if policy == Policy::IfNotPresent || !is_overwritten && !may_replace(job, entry) {
            return Err(foreign(job, &[BINARY]));
        }
        return Ok(if is_overwritten { Action::Update } else { Action::Replace });
    };
    if policy == Policy::IfNotPresent || policy == Policy::IfNewer && !is_newer(own, &release) {
        return Ok(Action::Keep);
    }
    if is_newer(&release, own) && !job.options.force {
        let folder = job.options.folder.display();
        let msg = format!("install into {folder}: cnibox {release} is there, this is {own}");
        return Err(Error::config(msg).with_details("--force installs the older release"));
    }
    Ok(Action::Update)
}

/// The action for an entry that is not as it would be installed.
fn link_action(job: &Job<'_>, entry: &Entry) -> Action {
    match (job.options.policy, entry.origin()) {
        (Policy::IfNotPresent, _) => Action::Keep,
        // The links follow the decision about the executable.
        (_, Origin::Own(_)) => Action::Update,
        (Policy::IfNewer, Origin::Reference(Some(release)))
            if is_newer(&release, REFERENCE_RELEASE) =>
        {
            Action::Keep
        }
        _ => Action::Replace,
    }
}

/// Whether the entry is what `mode` creates. `binary` is the executable if it is not replaced.
fn is_as_wanted(mode: Mode, entry: &Entry, binary: Option<&Entry>, sha256: &str) -> bool {
    let is_hard_link = binary.is_some_and(|binary| entry.is_hard_link_to(binary));
    match mode {
        Mode::Symlink => entry.links_to(BINARY),
        Mode::Hardlink => is_hard_link,
        Mode::Copy => entry.is_file_of(sha256) && !is_hard_link,
    }
}

fn may_replace(job: &Job<'_>, entry: &Entry) -> bool {
    entry.is_replaceable() && (job.options.replace || entry.origin() != Origin::Foreign)
}

fn foreign(job: &Job<'_>, names: &[&str]) -> Error {
    let (folder, names) = (job.options.folder.display(), names.join(", "));
    Error::config(format!(
        "install into {folder}: neither cnibox nor reference plugins: {names}; nothing was changed"
    ))
    .with_details("--replace replaces files and backs them up for uninstall, --skip leaves them")
}

/// Unchanged files of an earlier release whose applets no longer exist.
fn stale(job: &Job<'_>, folder: &Folder) -> Vec<Step> {
    let is_stale = |owned: &&Owned| {
        let is_applet = job.applets.iter().any(|applet| applet.name == owned.name);
        !is_applet && owned.name != BINARY && folder.is_unchanged(owned)
    };
    let restore_or_remove = |owned: &Owned| {
        let action = if owned.backup.is_some() { Action::Restore } else { Action::Remove };
        step(job, &owned.name, action, None)
    };
    folder.manifest.files.iter().filter(is_stale).map(restore_or_remove).collect()
}

fn manifest(job: &Job<'_>, folder: &Folder, steps: &[Step], sha256: &str) -> Manifest {
    let old = &folder.manifest;
    let is_kept = |owned: &&Owned| {
        let step = steps.iter().find(|step| step.name == owned.name);
        step.is_none_or(|step| step.action == Action::Keep) && folder.is_unchanged(owned)
    };
    let is_owned = |step: &&Step| step.action.writes() || step.action == Action::Unchanged;
    let mut files: Vec<Owned> = old.files.iter().filter(is_kept).cloned().collect();
    files.extend(steps.iter().filter(is_owned).map(|step| owned(job, old, step, sha256)));
    sort_by(&mut files, |a, b| a.name.cmp(&b.name));
    let keeps_binary = steps.first().is_some_and(|step| step.action == Action::Keep);
    let version = if keeps_binary { old.version.clone() } else { job.payload.release.clone() };
    let protect = job.options.protect || old.protect;
    Manifest { version, mode: job.options.mode, protect, files, conflist: old.conflist.clone() }
}

fn owned(job: &Job<'_>, old: &Manifest, step: &Step, sha256: &str) -> Owned {
    let name = step.name.clone();
    let earlier = || old.get(&name).and_then(|owned| owned.backup.clone());
    // A backup of an installer that was killed before it saved the manifest.
    let orphan = || {
        let path = backup(&job.options.folder, &name);
        path.symlink_metadata().is_ok().then(|| "a backup".to_owned())
    };
    let backup = if step.backup { step.was.clone() } else { earlier().or_else(orphan) };
    let is_link = name != BINARY && job.options.mode == Mode::Symlink;
    let link = is_link.then(|| BINARY.to_owned());
    let sha256 = (!is_link).then(|| sha256.to_owned());
    Owned { name, link, sha256, backup }
}

/// Reads the network configuration. Fails if it is invalid, if a plugin is missing, or if it would
/// replace a file of another origin.
fn conf(job: &Job<'_>, file: &Path, plan: &Plan) -> Result<Conf> {
    let read = || format!("network configuration {}", file.display());
    let list = NetworkList::from_file(file).context(read)?;
    NetworkName::parse(&list.name).context(read)?;
    require_plugins(job, &list, plan).context(read)?;
    let bytes = files::read(file).during("read", file)?;
    let path = job.options.conf_dir.join(file.file_name().unwrap_or_default());
    let is_installed = |there: &[u8]| {
        let hash = sha256(there);
        let is_it = |conf: &OwnedConf| conf.path == path && conf.sha256 == hash;
        plan.old.conflist.as_ref().is_some_and(is_it)
    };
    let action = match if_present(files::read(&path)).during("read", &path)? {
        None => Action::Install,
        Some(there) if there == bytes => Action::Unchanged,
        Some(there) if is_installed(&there) => Action::Update,
        Some(_) if job.options.replace => Action::Replace,
        Some(_) => {
            let path = path.display();
            let msg = format!("{path} exists, and not from this installer; nothing was changed");
            return Err(Error::config(msg)
                .with_details("--replace replaces it and backs it up for uninstall"));
        }
    };
    Ok(Conf { step: step(job, &path.display().to_string(), action, None), path, bytes })
}

/// Every ADD of a network with a missing plugin fails.
fn require_plugins(job: &Job<'_>, list: &NetworkList, plan: &Plan) -> Result<()> {
    let folder = &job.options.folder;
    let is_missing = |kind: &&String| {
        let is_installed = |step: &Step| step.name == **kind && step.action.writes();
        !plan.steps.iter().any(is_installed) && !folder.join(kind).exists()
    };
    match list.plugins.iter().map(|plugin| &plugin.plugin_type).find(is_missing) {
        Some(kind) => Err(Error::config(format!("no plugin \"{kind}\" in {}", folder.display()))),
        None => Ok(()),
    }
}
