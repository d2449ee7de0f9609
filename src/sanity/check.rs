//! What a case finds: one verdict for each assertion that it could look at.

use std::borrow::Borrow;

use serde::{Deserialize, Serialize};

use super::call::Answer;

/// Whether an assertion holds for a plugin and a version.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Verdict {
    /// The assertion's id.
    pub id: String,
    pub passed: bool,
    /// What was seen instead; empty where it passed.
    pub detail: String,
    /// How a person sees the same.
    pub by_hand: String,
}

/// The verdicts of a case.
#[derive(Debug, Default)]
pub struct Check {
    pub verdicts: Vec<Verdict>,
}

impl Check {
    /// One verdict; `detail` is asked where it does not hold.
    pub fn that(&mut self, id: &str, holds: bool, detail: impl FnOnce() -> String) {
        self.push(id, holds, detail, String::new());
    }

    /// Holds if there are no such lines; else they are the detail.
    pub fn none(&mut self, id: &str, lines: &[impl Borrow<str>]) {
        self.that(id, lines.is_empty(), || lines.join("; "));
    }

    /// The same of a call.
    pub fn of(&mut self, id: &str, answer: &Answer, holds: bool) {
        self.push(id, holds, || answer.said(), answer.by_hand.clone());
    }

    fn push(&mut self, id: &str, passed: bool, detail: impl FnOnce() -> String, by_hand: String) {
        let (detail, by_hand) = if passed { <_>::default() } else { (detail(), by_hand) };
        self.verdicts.push(Verdict { id: id.to_owned(), passed, detail, by_hand });
    }
}
