//! The assertions: the text of each, the clauses that it follows from, and the consequence of a violation for a runtime.

mod table;

use table::TABLE;

use super::cases::{keys, values};
use super::spec::{self, Clause};

/// How binding an assertion is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// A MUST or a definition of the specification, or a condition without which containers have no network.
    Required,
    /// A SHOULD of the specification, or a promise of the plugin's documentation.
    Recommended,
    /// Worth knowing.
    Informational,
}

impl Level {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Level::Required => "required",
            Level::Recommended => "recommended",
            Level::Informational => "informational",
        }
    }
}

/// A property of a conforming plugin.
#[derive(Debug)]
pub struct Assertion {
    pub id: &'static str,
    pub level: Level,
    /// The ids of the clauses in `spec.rs` that it follows from, separated by blanks, the most important first.
    pub clauses: &'static str,
    /// The property.
    pub text: &'static str,
    /// The consequence of a violation.
    pub why: &'static str,
}

impl Assertion {
    /// The second part of the id, the type of the plugin in the assertions of one type.
    pub fn kind(&self) -> &'static str {
        self.id.split('.').nth(1).unwrap_or_default()
    }

    /// The clauses that it follows from.
    pub fn clauses(&self) -> impl Iterator<Item = &'static Clause> {
        self.clauses.split(' ').filter_map(spec::find)
    }

    /// Section and force of the first clause, for reports.
    pub fn source(&self) -> String {
        let source = |clause: &Clause| match clause.force {
            spec::Force::Plain => clause.section.to_owned(),
            force => format!("{} ({})", clause.section, force.name()),
        };
        self.clauses().next().map(source).unwrap_or_default()
    }
}

const MISREAD: &str = "runtimes cannot read the answer";
const LEAK: &str = "the node fills up with what nobody will remove";
const STUCK: &str = "the runtime takes the container's network for broken, or cannot end the container before a repeated DEL succeeds";
const CHOICE: &str = "runtimes choose the version to speak by it";
pub const BLIND: &str = "a wrong call looks like one that was carried out";
const WORDS: &str = "operators and runtimes cannot tell what was wrong";
pub const LIE: &str = "what the runtime passes on to its users is not what the container has";
const ISOLATION: &str = "one container's end breaks another's network";
pub const TRAFFIC: &str = "the container has no network";

/// All assertions.
pub fn all() -> impl Iterator<Item = &'static Assertion> {
    let values = values::TABLE.iter().map(|wrong| &wrong.assertion);
    TABLE.iter().chain(values).chain(keys::TABLE.iter().map(|key| &key.assertion))
}

/// The assertion with this id.
pub fn find(id: &str) -> Option<&'static Assertion> {
    all().find(|assertion| assertion.id == id)
}

#[cfg(test)]
mod tests {
    use super::super::spec::Force;
    use super::*;

    /// The source of the cases.
    const CASES: &str = concat!(
        include_str!("run.rs"),
        include_str!("cases/protocol.rs"),
        include_str!("cases/results.rs"),
        include_str!("cases/lifecycle.rs"),
        include_str!("cases/ipam.rs"),
        include_str!("cases/chained.rs"),
        include_str!("cases/housekeeping.rs"),
        include_str!("cases/faults.rs"),
        include_str!("cases/delegation.rs"),
        include_str!("cases/process.rs"),
        include_str!("cases/damage.rs"),
        include_str!("cases/values.rs"),
        include_str!("cases/keys.rs"),
    );

    #[test]
    fn every_id_is_unique_and_used() {
        for (i, assertion) in all().enumerate() {
            let id = assertion.id;
            assert!(!all().take(i).any(|other| other.id == id), "{id} occurs twice");
            assert!(CASES.contains(&format!("\"{id}\"")), "no case uses {id}");
        }
        assert!(all().count() >= 400, "{}", all().count());
    }

    #[test]
    fn every_assertion_follows_from_known_clauses() {
        for assertion in all() {
            let named = assertion.clauses.split(' ').count();
            assert_eq!(assertion.clauses().count(), named, "{}", assertion.id);
        }
    }

    /// What is only a SHOULD is required only if the container has no network, or another one loses its own.
    #[test]
    fn no_level_is_above_that_of_the_text() {
        for assertion in all().filter(|assertion| assertion.level == Level::Required) {
            let is_vital = [TRAFFIC, ISOLATION].contains(&assertion.why);
            let is_should = assertion.clauses().all(|clause| clause.force == Force::Should);
            assert!(is_vital || !is_should, "{}", assertion.id);
        }
    }

    #[test]
    fn a_clause_has_an_assertion_or_a_reason() {
        for clause in spec::TABLE {
            let has_assertion =
                all().any(|assertion| assertion.clauses().any(|c| c.id == clause.id));
            assert_ne!(has_assertion, !clause.untested.is_empty(), "{}", clause.id);
        }
    }
}
