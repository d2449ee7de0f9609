//! Something that is wrong, and how it is told.

use std::fmt;

use serde_json::{Value, json};

use crate::error::Error;
use crate::iface::verify::IN_CONTAINER;
use crate::tool::lint::{Finding, Severity};

/// How the commands in the details of errors start.
const COMMANDS: [&str; 6] =
    ["bridge link ", "cnibox repair", "ip addr ", "ip link ", "ip route ", "sysctl -w "];

/// What a container's network is made anew by.
pub(super) const AGAIN: &str = "delete the container: its runtime attaches the next one anew";

/// Something that is wrong on the node.
#[derive(Clone, Debug)]
pub(in crate::tool) struct Diagnosis {
    pub(super) severity: Severity,
    /// What it is wrong with: a file, a container, the node.
    pub(in crate::tool) subject: String,
    pub(super) problem: String,
    /// What to do about it, a command where there is one.
    pub(super) cure: String,
    /// It is about the rules of all containers.
    pub(super) is_rules: bool,
}

impl Diagnosis {
    /// Containers do without something, as far as `problem` goes.
    pub(super) fn error(
        subject: impl Into<String>,
        problem: impl Into<String>,
        cure: impl Into<String>,
    ) -> Diagnosis {
        let (subject, problem, cure) = (subject.into(), problem.into(), cure.into());
        Diagnosis { severity: Severity::Error, subject, problem, cure, is_rules: false }
    }

    /// Nobody suffers yet.
    pub(super) fn warning(
        subject: impl Into<String>,
        problem: impl Into<String>,
        cure: impl Into<String>,
    ) -> Diagnosis {
        Diagnosis { severity: Severity::Warning, ..Diagnosis::error(subject, problem, cure) }
    }

    /// What CHECK says of an attachment whose namespace is `netns`: the details of the error are the cure if they have
    /// a command.
    pub(super) fn of_check(subject: &str, netns: &str, error: &Error) -> Diagnosis {
        let details = error.details().replace(IN_CONTAINER, &format!("nsenter --net={netns} "));
        if COMMANDS.iter().any(|command| details.contains(command)) {
            return Diagnosis::error(subject, error.msg(), details);
        }
        Diagnosis::error(subject, error.to_string(), AGAIN)
    }

    /// Whether the cure is that of the rules of all containers.
    pub(super) fn names_repair(&self) -> bool {
        self.cure.contains("cnibox repair")
    }

    /// Whether it is about a plugin that is not there.
    pub(super) fn names_missing_plugin(&self) -> bool {
        self.problem.contains("failed to find plugin")
    }

    pub(in crate::tool) fn to_json(&self) -> Value {
        let Diagnosis { severity, subject, problem, cure, .. } = self;
        json!({"severity": severity.to_string(), "subject": subject, "problem": problem, "cure": cure})
    }
}

impl From<Finding> for Diagnosis {
    fn from(finding: Finding) -> Diagnosis {
        let subject = finding.place();
        let Finding { severity, message, remedy, .. } = finding;
        Diagnosis { severity, ..Diagnosis::error(subject, message, remedy) }
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Diagnosis { severity, subject, problem, cure, .. } = self;
        write!(f, "{severity}: {subject}: {problem}")?;
        if cure.is_empty() { Ok(()) } else { write!(f, "; {cure}") }
    }
}
