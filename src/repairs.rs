//! The findings of `cnibox repair`: missing state, and state that was changed on purpose.

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;

use cni::error::{Error, Result};

/// The findings of one repair, without duplicates.
#[derive(Debug, Default)]
pub struct RepairFindings {
    /// Whether missing state is reported only.
    dry_run: bool,
    /// Another container was attached with the same path of a network namespace: nothing proves
    /// whose namespace is there now.
    pub shares_namespace: bool,
    missing: Vec<String>,
    left: Vec<String>,
    failed: Vec<Error>,
    /// State that attachments share and that was examined already.
    seen: Rc<RefCell<HashSet<String>>>,
}

impl RepairFindings {
    /// No findings. A dry run restores nothing.
    pub fn new(dry_run: bool) -> RepairFindings {
        RepairFindings { dry_run, ..RepairFindings::default() }
    }

    /// Whether this is the first examination of state that attachments share.
    pub fn is_first_examination(&mut self, what: impl Into<String>) -> bool {
        self.seen.borrow_mut().insert(what.into())
    }

    /// No findings of an attachment yet, in the same repair.
    pub fn for_attachment(&self) -> RepairFindings {
        RepairFindings { seen: Rc::clone(&self.seen), ..RepairFindings::new(self.dry_run) }
    }

    /// Adds the findings of an attachment.
    pub fn merge(&mut self, other: RepairFindings) {
        self.record_missing(other.missing);
        other.left.into_iter().for_each(|what| self.record_changed(what));
        other.failed.into_iter().for_each(|error| self.record_failure(error));
    }

    /// Whether nothing was found.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.left.is_empty() && self.failed.is_empty()
    }

    /// Records that `what` is missing and restores it. Records a failure instead of returning it,
    /// so that the next steps are run in any case.
    pub fn restore_missing(
        &mut self,
        what: impl Into<String>,
        restore: impl FnOnce() -> Result<()>,
    ) {
        let what = what.into();
        match if self.dry_run { Ok(()) } else { restore() } {
            Ok(()) => push_unique(&mut self.missing, what),
            Err(error) => self.record_failure(error.context(format_args!("restore {what}"))),
        }
    }

    /// Records missing state that was, or is about to be, restored.
    pub fn record_missing(&mut self, what: impl IntoIterator<Item = String>) {
        what.into_iter().for_each(|what| push_unique(&mut self.missing, what));
    }

    /// Records state that a person or another program has changed on purpose.
    pub fn record_changed(&mut self, what: impl Into<String>) {
        push_unique(&mut self.left, what.into());
    }

    /// Records a failure to examine or restore state.
    pub fn record_failure(&mut self, error: Error) {
        if !self.failed.contains(&error) {
            self.failed.push(error);
        }
    }

    /// The missing state, restored unless this is a dry run.
    pub fn missing_state(&self) -> &[String] {
        &self.missing
    }

    /// The changed state that was left as it is.
    pub fn changed_state(&self) -> &[String] {
        &self.left
    }

    /// The failures.
    pub fn repair_errors(&self) -> &[Error] {
        &self.failed
    }
}

/// Adds a text once: attachments share state, such as their bridge.
fn push_unique(list: &mut Vec<String>, what: String) {
    if !list.contains(&what) {
        list.push(what);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_unique_and_failures_do_not_stop_repairs() {
        let mut repairs = RepairFindings::new(false);
        for _ in 0..2 {
            repairs.restore_missing("bridge \"cni0\"", || Ok(()));
            repairs.restore_missing("a port", || Err(Error::internal("no such device")));
            repairs.record_changed("another port");
        }
        assert_eq!(repairs.missing_state(), ["bridge \"cni0\""]);
        assert_eq!(repairs.changed_state(), ["another port"]);
        assert_eq!(repairs.repair_errors().len(), 1);
        assert_eq!(repairs.repair_errors()[0].to_string(), "restore a port: no such device");
    }

    #[test]
    fn a_dry_run_restores_nothing() {
        let mut repairs = RepairFindings::new(true);
        repairs.restore_missing("a port", || Err(Error::internal("called")));
        assert_eq!(
            (repairs.missing_state(), repairs.repair_errors()),
            (&["a port".to_owned()][..], &[][..])
        );
    }
}
