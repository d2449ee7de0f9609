//! The verdicts of a case: one for each assertion that the case could test.

use std::panic::{self, AssertUnwindSafe};

use serde::{Deserialize, Serialize};

use super::Result;
use super::call::Answer;

/// Whether an assertion holds for a plugin and a version.
#[derive(Debug, Serialize, Deserialize)]
pub struct Verdict {
    /// The id of the assertion.
    pub id: String,
    pub passed: bool,
    /// The observation that contradicts the assertion; empty if it passed.
    pub detail: String,
    /// The shell command that reproduces the observation.
    pub by_hand: String,
}

/// The verdicts of a case.
#[derive(Debug, Default)]
pub struct Check {
    pub verdicts: Vec<Verdict>,
    /// The case ends at the first failed assertion whose id contains this text.
    pub ends_at: Option<String>,
}

/// The payload of the unwinding that ends a case at its first failed assertion.
struct Ended;

impl Check {
    /// Runs a case up to its end, or to the first failure if [`Check::ends_at`] says so.
    pub fn run(&mut self, case: impl FnOnce(&mut Check) -> Result<()>) -> Result<()> {
        match panic::catch_unwind(AssertUnwindSafe(|| case(self))) {
            Err(payload) if payload.is::<Ended>() => Ok(()),
            Err(payload) => panic::resume_unwind(payload),
            Ok(result) => result,
        }
    }

    /// Adds a verdict; `detail` is called if the assertion does not hold.
    pub fn that(&mut self, id: &str, holds: bool, detail: impl FnOnce() -> String) {
        self.push(id, holds, detail, String::new());
    }

    /// Adds a verdict that holds if `lines` is empty; otherwise the lines are the detail.
    pub fn none(&mut self, id: &str, lines: &[String]) {
        self.that(id, lines.is_empty(), || lines.join("; "));
    }

    /// Adds a verdict about a call.
    pub fn of(&mut self, id: &str, answer: &Answer, holds: bool) {
        self.push(id, holds, || answer.summary(), answer.by_hand.clone());
    }

    /// Adds a verdict about the effect of a call; `detail` says what the effect is instead.
    pub fn effect(
        &mut self,
        id: &str,
        answer: &Answer,
        holds: bool,
        detail: impl FnOnce() -> String,
    ) {
        let whole = || format!("{}; {}", detail(), answer.summary());
        self.push(id, holds, whole, answer.by_hand.clone());
    }

    /// Adds the verdict on whether a call succeeds.
    pub fn succeeds(&mut self, id: &str, answer: Result<Answer>) -> Result<Answer> {
        let answer = answer?;
        self.of(id, &answer, answer.succeeded());
        Ok(answer)
    }

    /// Adds the verdict on whether a call succeeds and prints nothing.
    pub fn succeeds_silently(
        &mut self,
        [success, silent]: [&str; 2],
        answer: Result<Answer>,
    ) -> Result<Answer> {
        let answer = self.succeeds(success, answer)?;
        self.of(silent, &answer, answer.stdout.is_empty());
        Ok(answer)
    }

    /// Adds the verdict on whether a call fails, but not by a signal.
    pub fn fails(&mut self, id: &str, answer: Result<Answer>) -> Result<Answer> {
        let answer = answer?;
        self.of(id, &answer, answer.failed());
        Ok(answer)
    }

    fn push(&mut self, id: &str, passed: bool, detail: impl FnOnce() -> String, by_hand: String) {
        let (detail, by_hand) = if passed { <_>::default() } else { (detail(), by_hand) };
        self.verdicts.push(Verdict { id: id.to_owned(), passed, detail, by_hand });
        if !passed && self.ends_at.as_ref().is_some_and(|pattern| id.contains(pattern)) {
            // Unlike a panic, this prints nothing.
            panic::resume_unwind(Box::new(Ended));
        }
    }
}
