//! The rollback of a failed ADD, and the collected errors of a DEL.

use std::fmt;

use cni::error::{Error, Result};

type UndoFunction<'a> = Box<dyn FnOnce() -> Result<()> + 'a>;

/// A stack of undo steps. Dropped without [`Rollback::commit`], after an error or a panic, it runs
/// the steps in reverse order and logs their errors to stderr.
#[derive(Default)]
pub struct Rollback<'a> {
    steps: Vec<(String, UndoFunction<'a>)>,
    /// Run after all others.
    last: Vec<(String, UndoFunction<'a>)>,
}

impl<'a> Rollback<'a> {
    pub fn new() -> Rollback<'a> {
        Rollback::default()
    }

    /// Registers the undo step of the previous, or of the next, step.
    pub fn add_step(&mut self, what: impl Into<String>, undo: impl FnOnce() -> Result<()> + 'a) {
        self.steps.push((what.into(), Box::new(undo)));
    }

    /// As [`Rollback::add_step`], for a step that runs after all other steps, also those registered
    /// earlier.
    pub fn add_last_step(
        &mut self,
        what: impl Into<String>,
        undo: impl FnOnce() -> Result<()> + 'a,
    ) {
        self.last.push((what.into(), Box::new(undo)));
    }

    /// The ADD succeeded: drops the undo steps without running them.
    pub fn commit(mut self) {
        self.steps.clear();
        self.last.clear();
    }
}

impl fmt::Debug for Rollback<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.last.iter().chain(&self.steps);
        f.debug_list().entries(steps.map(|(what, _)| what)).finish()
    }
}

impl Drop for Rollback<'_> {
    fn drop(&mut self) {
        while let Some((what, undo)) = self.steps.pop().or_else(|| self.last.pop()) {
            if let Err(error) = undo() {
                warn!("rollback: could not {what}: {error}");
            }
        }
    }
}

/// The errors of a DEL or GC, which continue after an error and report at the end.
#[derive(Debug, Default)]
pub struct Failures(Vec<Error>);

impl Failures {
    pub fn new() -> Failures {
        Failures(Vec::new())
    }

    /// Keeps the error; returns the value if there is one.
    pub fn keep_error<T>(&mut self, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.0.push(error)).ok()
    }

    /// Success, or all errors as one.
    pub fn into_result(self) -> Result<()> {
        Error::join_all(self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn rollback_runs_in_reverse_order_after_panics_and_errors() {
        let log = RefCell::new(Vec::new());
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut undo = Rollback::new();
            undo.add_step("one", || {
                log.borrow_mut().push(1);
                Ok(())
            });
            undo.add_step("two", || {
                log.borrow_mut().push(2);
                Err(Error::internal("no"))
            });
            panic!("step three");
        }));
        assert!(outcome.is_err());
        assert_eq!(*log.borrow(), [2, 1]);
    }

    #[test]
    fn the_final_step_runs_last() {
        let log = RefCell::new(Vec::new());
        let step = |name: &'static str| {
            let log = &log;
            move || {
                log.borrow_mut().push(name);
                Ok(())
            }
        };
        let mut undo = Rollback::new();
        undo.add_step("link", step("link"));
        undo.add_last_step("address", step("address"));
        undo.add_step("rules", step("rules"));
        drop(undo);
        assert_eq!(*log.borrow(), ["rules", "link", "address"]);
    }

    #[test]
    fn commit_undoes_nothing() {
        let mut undo = Rollback::new();
        undo.add_step("never", || panic!("was undone"));
        undo.add_last_step("never", || panic!("was undone"));
        undo.commit();
    }

    #[test]
    fn all_failures_of_a_rollback_are_reported() {
        let mut failures = Failures::new();
        assert_eq!(failures.keep_error(Ok(1)), Some(1));
        assert_eq!(failures.keep_error::<()>(Err(Error::config("a"))), None);
        assert_eq!(failures.keep_error::<()>(Err(Error::internal("b"))), None);
        assert_eq!(failures.into_result().unwrap_err(), Error::config("a; b"));
        assert_eq!(Failures::new().into_result(), Ok(()));
    }
}
