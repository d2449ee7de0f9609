//! What to do with each name: decided from what is there, before anything is changed.

use serde::Serialize;

use super::folder::{Entry, Folder, Shape};
use super::manifest::{Manifest, Owned, backup};
use super::options::{Mode, Policy};
use super::origin::Origin;
use super::{BINARY, Job};
use crate::error::{Error, Result};
use crate::skel::run::REFERENCE_RELEASE;
use crate::sort::sort_by;

/// What is done with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Action {
    Install,
    /// A file of ours becomes what this installation wants.
    Update,
    /// A file of another origin is replaced.
    Replace,
    /// The entry stays as it is.
    Keep,
    /// The entry is already what this installation wants.
    Unchanged,
    /// The entry is removed: a link to an applet that no longer exists, or a name that is uninstalled.
    Remove,
    /// What was there before the installation is back.
    Restore,
}

impl Action {
    /// Whether the name gets what this installation makes.
    pub(super) fn writes(self) -> bool {
        matches!(self, Action::Install | Action::Update | Action::Replace)
    }

    /// Whether the name is different afterwards.
    pub(super) fn changes(self) -> bool {
        !matches!(self, Action::Keep | Action::Unchanged)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) name: String,
    pub(super) action: Action,
    /// What was there, in words.
    pub(super) was: Option<String>,
    /// Whether what was there is kept for `uninstall`.
    pub(super) backup: bool,
}

/// Everything that is to be done, the executable first.
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    /// What will be ours.
    pub(super) manifest: Manifest,
    pub(super) manifest_is_written: bool,
    /// Whether the executable of the folder will be this one.
    pub(super) is_own_binary: bool,
}

impl Plan {
    /// Looks at the folder. Whatever forbids the installation is told here.
    pub(super) fn make(job: &Job<'_>, folder: &Folder, old: &Manifest) -> Result<Plan> {
        let there = folder.look(BINARY)?;
        let binary = binary_step(job, there.as_ref(), old)?;
        let is_own_binary = binary.action.writes() || binary.action == Action::Unchanged;
        let target = Target {
            sha256: match &there {
                Some(Entry { content: Some(content), .. }) if !is_own_binary => &content.sha256,
                _ => &job.payload.sha256,
            },
            settled: there.as_ref().filter(|_| !binary.action.writes()),
        };
        let mut steps = vec![binary];
        let mut refused = Vec::new();
        for name in job.names() {
            let entry = folder.look(name)?;
            let action = link_action(job, entry.as_ref(), &target);
            let is_odd = entry.as_ref().is_some_and(|entry| entry.shape == Shape::Other);
            if action == Action::Replace && (is_odd || !may_replace(job, entry.as_ref())) {
                refused.push(name);
            }
            steps.push(step(job, name, action, entry.as_ref()));
        }
        if !refused.is_empty() {
            return Err(foreign(job, &refused));
        }
        steps.extend(stale(job, folder, old)?);
        let manifest = manifest(job, folder, old, &steps, target.sha256)?;
        let manifest_is_written = manifest == *old;
        Ok(Plan { steps, manifest, manifest_is_written, is_own_binary })
    }

    pub(super) fn changes(&self) -> bool {
        self.steps.iter().any(|step| step.action.changes())
    }
}

/// What the names lead to.
struct Target<'a> {
    sha256: &'a str,
    /// The executable, if it stays the file it is.
    settled: Option<&'a Entry>,
}

fn step(job: &Job<'_>, name: &str, action: Action, entry: Option<&Entry>) -> Step {
    let backup = action == Action::Replace && job.options.backup;
    Step { name: name.to_owned(), action, was: entry.map(Entry::describe), backup }
}

fn binary_step(job: &Job<'_>, entry: Option<&Entry>, old: &Manifest) -> Result<Step> {
    let mut action = binary_action(job, entry)?;
    // Our own file, which a plain `cp` to the name of a plugin has written through its link.
    if action == Action::Replace && old.get(BINARY).is_some() && old.mode == Mode::Symlink {
        action = Action::Update;
    }
    if action == Action::Replace && !may_replace(job, entry) {
        return Err(foreign(job, &[BINARY]));
    }
    if action == Action::Keep
        && job.options.policy != Policy::Never
        && let Some(entry) = entry
        && !matches!(entry.origin(), Origin::Own(_))
    {
        // The links would lead to it.
        return Err(foreign(job, &[BINARY]));
    }
    Ok(step(job, BINARY, action, entry))
}

fn binary_action(job: &Job<'_>, entry: Option<&Entry>) -> Result<Action> {
    let policy = job.options.policy;
    let Some(entry) = entry else {
        return Ok(if policy == Policy::Never { Action::Keep } else { Action::Install });
    };
    if entry.is_file_of(&job.payload.sha256) {
        return Ok(Action::Unchanged);
    }
    if matches!(policy, Policy::Never | Policy::IfNotPresent) {
        return Ok(Action::Keep);
    }
    let Origin::Own(there) = entry.origin() else { return Ok(Action::Replace) };
    let own = &job.payload.release;
    if policy == Policy::IfNewer && !Origin::is_newer(own, &there) {
        return Ok(Action::Keep);
    }
    if Origin::is_newer(&there, own) && !job.options.force {
        let folder = job.options.folder.display();
        let msg = format!("install into {folder}: cnibox {there} is there, this is {own}");
        return Err(Error::config(msg).with_details("--force installs the older one"));
    }
    Ok(Action::Update)
}

fn link_action(job: &Job<'_>, entry: Option<&Entry>, target: &Target<'_>) -> Action {
    let policy = job.options.policy;
    if policy == Policy::Never {
        return Action::Keep;
    }
    let Some(entry) = entry else { return Action::Install };
    if is_wanted(job.options.mode, entry, target) {
        return Action::Unchanged;
    }
    if policy == Policy::IfNotPresent {
        return Action::Keep;
    }
    match entry.origin() {
        // The executable has been decided about; its names follow it.
        Origin::Own(_) => Action::Update,
        Origin::Reference(Some(release))
            if policy == Policy::IfNewer && Origin::is_newer(&release, REFERENCE_RELEASE) =>
        {
            Action::Keep
        }
        Origin::Reference(_) | Origin::Foreign => Action::Replace,
    }
}

fn is_wanted(mode: Mode, entry: &Entry, target: &Target<'_>) -> bool {
    match mode {
        Mode::Symlink => entry.link().is_some_and(|link| link.as_os_str() == BINARY),
        Mode::Hardlink => target.settled.is_some_and(|file| entry.is_hard_link_to(file)),
        Mode::Copy => {
            let own_file = |file: &Entry| !entry.is_hard_link_to(file);
            entry.is_file_of(target.sha256) && target.settled.is_none_or(own_file)
        }
    }
}

fn may_replace(job: &Job<'_>, entry: Option<&Entry>) -> bool {
    let foreign = |entry: &Entry| entry.origin() == Origin::Foreign;
    job.options.replace || !entry.is_some_and(foreign)
}

fn foreign(job: &Job<'_>, names: &[&str]) -> Error {
    let (folder, names) = (job.options.folder.display(), names.join(", "));
    Error::config(format!(
        "install into {folder}: neither cnibox's nor the reference's: {names}; nothing was changed"
    ))
    .with_details("--replace replaces files and keeps them for uninstall, --skip leaves them")
}

/// Links of an earlier release whose applets are no more.
fn stale(job: &Job<'_>, folder: &Folder, old: &Manifest) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    if job.options.policy == Policy::Never {
        return Ok(steps);
    }
    for owned in &old.files {
        let is_applet = job.applets.iter().any(|applet| applet.name == owned.name);
        if !is_applet && owned.name != BINARY && owned.is_unchanged(folder)? {
            let action = if owned.backup.is_some() { Action::Restore } else { Action::Remove };
            let (name, was) = (owned.name.clone(), None);
            steps.push(Step { name, action, was, backup: false });
        }
    }
    Ok(steps)
}

/// What will be ours when the steps are done.
fn manifest(
    job: &Job<'_>,
    folder: &Folder,
    old: &Manifest,
    steps: &[Step],
    sha256: &str,
) -> Result<Manifest> {
    let mut files = Vec::new();
    for step in steps {
        match step.action {
            Action::Remove | Action::Restore => {}
            Action::Keep => files.extend(still_owned(folder, old, &step.name)?),
            _ => files.push(owned(job, old, step, sha256)),
        }
    }
    for earlier in &old.files {
        if !steps.iter().any(|step| step.name == earlier.name) {
            files.extend(still_owned(folder, old, &earlier.name)?);
        }
    }
    sort_by(&mut files, |a, b| a.name.cmp(&b.name));
    let binary = steps.first().is_some_and(|step| step.action == Action::Keep);
    let version = if binary { old.version.clone() } else { job.payload.release.clone() };
    let protect = job.options.protect || old.protect;
    let (mode, conflist) = (job.options.mode, old.conflist.clone());
    Ok(Manifest { version, mode, protect, files, conflist })
}

fn still_owned(folder: &Folder, old: &Manifest, name: &str) -> Result<Option<Owned>> {
    let Some(owned) = old.get(name) else { return Ok(None) };
    Ok(owned.is_unchanged(folder)?.then(|| owned.clone()))
}

fn owned(job: &Job<'_>, old: &Manifest, step: &Step, sha256: &str) -> Owned {
    let name = step.name.clone();
    let kept = old.get(&name).and_then(|owned| owned.backup.clone());
    // One that an installer kept which was killed before it could note it.
    let orphan = || {
        let path = backup(&job.options.folder, &name);
        path.symlink_metadata().is_ok().then(|| "kept earlier".to_owned())
    };
    let backup = if step.backup { step.was.clone() } else { kept.or_else(orphan) };
    if name == BINARY || job.options.mode != Mode::Symlink {
        return Owned { name, sha256: Some(sha256.to_owned()), backup, ..Owned::default() };
    }
    Owned { name, link: Some(BINARY.to_owned()), backup, ..Owned::default() }
}
