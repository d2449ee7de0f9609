//! What `cnibox repair` finds: what was missing, and what it leaves as somebody has set it.

use std::collections::HashSet;
use std::fmt;

use crate::error::{Error, Result};

/// The findings of one repair, each told once.
#[derive(Debug, Default)]
pub struct Repairs {
    /// Whether what is missing is only told.
    dry_run: bool,
    missing: Vec<String>,
    left: Vec<String>,
    failed: Vec<Error>,
    /// What attachments have in common and was looked at.
    seen: HashSet<String>,
}

impl Repairs {
    /// Nothing is found yet. A dry run restores nothing.
    pub fn new(dry_run: bool) -> Repairs {
        Repairs { dry_run, ..Repairs::default() }
    }

    /// Whether this is the first look at something that many attachments have in common.
    pub fn is_first(&mut self, what: impl Into<String>) -> bool {
        self.seen.insert(what.into())
    }

    /// Notes that `what` is missing and restores it. A failure is noted as well, so that what
    /// comes behind is restored nevertheless.
    pub fn restore(&mut self, what: impl Into<String>, restore: impl FnOnce() -> Result<()>) {
        let what = what.into();
        match if self.dry_run { Ok(()) } else { restore() } {
            Ok(()) => note(&mut self.missing, what),
            Err(error) => self.fail(error.context(format_args!("restore {what}"))),
        }
    }

    /// Notes what is missing, of which the remedy is at hand already or was done.
    pub fn found(&mut self, what: impl IntoIterator<Item = String>) {
        what.into_iter().for_each(|what| note(&mut self.missing, what));
    }

    /// Notes what differs because a person, or another program, wants it so.
    pub fn leave(&mut self, what: impl Into<String>) {
        note(&mut self.left, what.into());
    }

    /// Notes what could not be looked at or restored.
    pub fn fail(&mut self, error: Error) {
        if !self.failed.contains(&error) {
            self.failed.push(error);
        }
    }

    /// What was missing, and is restored unless this is a dry run.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// What was left as it is.
    pub fn left(&self) -> &[String] {
        &self.left
    }

    /// What could not be looked at or restored.
    pub fn failed(&self) -> &[Error] {
        &self.failed
    }
}

/// Attachments have things in common, such as their bridge.
fn note(list: &mut Vec<String>, what: String) {
    if !list.contains(&what) {
        list.push(what);
    }
}

impl fmt::Display for Repairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done = if self.dry_run { "missing" } else { "restored" };
        self.missing.iter().try_for_each(|what| writeln!(f, "{done}: {what}"))?;
        self.left.iter().try_for_each(|what| writeln!(f, "left alone: {what}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thing_is_told_once_and_a_failure_ends_nothing() {
        let mut repairs = Repairs::new(false);
        for _ in 0..2 {
            repairs.restore("bridge \"cni0\"", || Ok(()));
            repairs.restore("a port", || Err(Error::internal("no such device")));
            repairs.leave("another port");
        }
        assert_eq!(repairs.to_string(), "restored: bridge \"cni0\"\nleft alone: another port\n");
        assert_eq!(repairs.failed().len(), 1);
        assert_eq!(repairs.failed()[0].to_string(), "restore a port: no such device");
    }

    #[test]
    fn a_dry_run_restores_nothing() {
        let mut repairs = Repairs::new(true);
        repairs.restore("a port", || Err(Error::internal("called")));
        assert_eq!(
            (repairs.to_string().as_str(), repairs.failed().len()),
            ("missing: a port\n", 0)
        );
    }
}
