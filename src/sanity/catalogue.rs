//! All assertions: those of the table, and those that stand beside the configurations they are about.

use super::cases::{keys, values};
use super::clause::{Assertion, TABLE};

/// All of them.
pub fn all() -> impl Iterator<Item = &'static Assertion> {
    let values = values::TABLE.iter().map(|wrong| &wrong.assertion);
    TABLE.iter().chain(values).chain(keys::TABLE.iter().map(|key| &key.assertion))
}

/// The assertion of an id.
pub fn find(id: &str) -> Option<&'static Assertion> {
    all().find(|assertion| assertion.id == id)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of the cases.
    const CASES: &str = concat!(
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
    fn every_id_is_there_once_and_used() {
        for (i, assertion) in all().enumerate() {
            let id = assertion.id;
            assert!(!all().take(i).any(|other| other.id == id), "{id} is there twice");
            assert!(CASES.contains(&format!("\"{id}\"")), "no case uses {id}");
        }
        assert!(all().count() >= 400, "{}", all().count());
    }
}
