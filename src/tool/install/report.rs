//! What was done, for a person or a program.

use serde::Serialize;

use super::conflist::Conflist;
use super::options::Options;
use super::plan::{Action, Step};
use crate::cni::json::pretty;
use crate::error::Result;
use crate::tool;

/// All names, and what became of them.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    folder: String,
    version: &'static str,
    dry_run: bool,
    changed: bool,
    files: Vec<File>,
    #[serde(skip)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct File {
    name: String,
    action: Action,
    #[serde(skip_serializing_if = "Option::is_none")]
    was: Option<String>,
    /// Whether it is kept.
    backup: bool,
}

impl Report {
    pub(super) fn new(options: &Options, steps: &[Step], conf: Option<&Conflist>) -> Report {
        let files = steps.iter().map(|step| File {
            name: step.name.clone(),
            action: step.action,
            was: step.was.clone(),
            backup: step.backup,
        });
        let conf = conf.map(|conf| File {
            name: conf.path.display().to_string(),
            action: conf.action,
            was: None,
            backup: conf.action == Action::Replace && options.backup,
        });
        let files: Vec<File> = files.chain(conf).collect();
        Report {
            folder: options.folder.display().to_string(),
            version: env!("CARGO_PKG_VERSION"),
            dry_run: options.dry_run,
            changed: files.iter().any(|file| file.action.changes()),
            files,
            json: options.json,
        }
    }

    pub(super) fn changed(&self) -> bool {
        self.changed
    }

    pub(super) fn print(&self) -> Result<()> {
        let text = if self.json { pretty(self)? + "\n" } else { self.text() };
        tool::print(&text).map(drop)
    }

    fn text(&self) -> String {
        let would = if self.dry_run { ", only looked at" } else { "" };
        let mut lines = vec![format!("{}: cnibox {}{would}", self.folder, self.version)];
        let line = |file: &File| file.words().map(|what| format!("  {:<14} {what}", file.name));
        lines.extend(self.files.iter().filter_map(line));
        let same = self.files.iter().filter(|file| file.action == Action::Unchanged).count();
        if !self.changed {
            lines.push("  nothing to do".to_owned());
        } else if same > 0 {
            lines.push(format!("  {same} unchanged"));
        }
        lines.join("\n") + "\n"
    }
}

impl File {
    fn words(&self) -> Option<String> {
        let was = self.was.as_deref().unwrap_or("what was there");
        let kept = if self.backup { ", which is kept" } else { "" };
        Some(match self.action {
            Action::Install => "new".to_owned(),
            Action::Update => format!("in place of {was}"),
            Action::Replace => format!("in place of {was}{kept}"),
            Action::Keep => format!("stays: {}", self.was.as_deref().unwrap_or("not there")),
            Action::Unchanged => return None,
            Action::Remove => "removed".to_owned(),
            Action::Restore => format!("back: {was}"),
        })
    }
}
