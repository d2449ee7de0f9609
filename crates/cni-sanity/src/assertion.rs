//! An assertion: its text, the clauses that it follows from, and the consequence of a violation for
//! a runtime.

mod table;

pub use table::TABLE;

use super::spec::{self, Clause};

/// How binding an assertion is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// A MUST or a definition of the specification, or a condition without which containers have no
    /// network.
    Required,
    /// A SHOULD of the specification, or a promise of the plugin's documentation.
    Recommended,
    /// Additional information: a plugin without the property conforms too.
    Informational,
}

impl Level {
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
    /// The ids of the clauses in `spec.rs` that it follows from, separated by spaces, the most
    /// important first.
    pub clauses: &'static str,
    pub text: &'static str,
    /// The consequence of a violation.
    pub why: &'static str,
}

impl Assertion {
    /// The second part of the id, the type of the plugin in the assertions of one type.
    pub fn kind(&self) -> &'static str {
        self.id.split('.').nth(1).unwrap_or_default()
    }

    /// The clauses that the assertion follows from.
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
pub const ISOLATION: &str = "one container's end breaks another's network";
pub const TRAFFIC: &str = "the container has no network";
