//! All assertions: those of the table in `assertion`, and those of the cases `keys` and `values`.

use super::assertion::{Assertion, TABLE};
use super::cases::{keys, values};

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
    use super::super::assertion::{ISOLATION, Level, TRAFFIC};
    use super::super::spec::{self, Force};
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

    /// An assertion that follows only from a SHOULD is required only if its violation takes the
    /// network of a container.
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
