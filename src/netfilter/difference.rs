//! What is not as the records of attachments want it, and what is done about it.

use crate::error::Error;

/// What is done about differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReconcileMode {
    /// The packet filter is changed.
    Apply,
    /// Nothing is changed.
    Report,
}

/// Something that is not as the records want it.
#[derive(Debug)]
pub struct Difference {
    /// What is missing or was changed, for messages.
    pub object: String,
    /// Why it could not be restored.
    pub failure: Option<Error>,
}

impl Difference {
    /// A difference that is restored, or reported only.
    pub fn new(object: impl Into<String>) -> Difference {
        Difference { object: object.into(), failure: None }
    }
}
