//! The findings of `cnibox lint` and `cnibox doctor`: defects, each with its remedy.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use serde::{Serialize, Serializer};
use serde_json::json;

use super::print;
use crate::cni::json::place::Position;
use crate::cni::json::pretty;
use crate::error::{Error, Result};

/// The severity of a finding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Severity {
    /// For information: nothing has to be done.
    Note,
    /// Containers have a network, but probably not the intended one.
    Warning,
    /// Containers have no network, or lack a part of it.
    Error,
}

/// The object with the defect.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    /// A file of a network configuration. The name of the network is empty if it could not be read.
    File { path: PathBuf, position: Option<Position>, network: String },
    /// Any other object, described in words: a container, a link, a chain.
    Object(String),
}

pub(super) struct Finding {
    pub(super) severity: Severity,
    pub(super) subject: Subject,
    /// The defect; the details are the remedy, a command where there is one.
    pub(super) error: Error,
}

impl Finding {
    pub(super) fn error(
        subject: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        let error = Error::config(problem).with_details(remedy);
        Finding { severity: Severity::Error, subject: Subject::Object(subject.into()), error }
    }

    pub(super) fn warning(
        subject: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding { severity: Severity::Warning, ..Finding::error(subject, problem, remedy) }
    }

    pub(super) fn note(
        subject: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding { severity: Severity::Note, ..Finding::error(subject, problem, remedy) }
    }
}

/// Prints the findings as JSON or one per line, and `none` if there are no findings. Returns the exit status.
pub(super) fn report(findings: &[Finding], json: bool, none: &str) -> Result<ExitCode> {
    let line = |finding: &Finding| format!("{finding}\n");
    print(&match findings {
        _ if json => pretty(&findings)? + "\n",
        _ if findings.iter().all(|finding| finding.severity == Severity::Note) => {
            findings.iter().map(line).collect::<String>() + none + "\n"
        }
        _ => findings.iter().map(line).collect(),
    })?;
    Ok(match findings.iter().map(|finding| finding.severity).max() {
        None | Some(Severity::Note) => ExitCode::SUCCESS,
        Some(Severity::Warning | Severity::Error) => ExitCode::FAILURE,
    })
}

impl Serialize for Finding {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // "message", "subject" and "cure" are the keys of 0.2, for one minor version.
        let (severity, problem) = (self.severity.to_string(), self.error.msg());
        let (remedy, object) = (self.error.details(), self.subject.to_string());
        let finding = match &self.subject {
            Subject::File { path, position, network } => json!({
                "file": path.display().to_string(),
                "line": position.map(|position| position.line),
                "column": position.map(|position| position.column),
                "network": network,
                "severity": severity,
                "object": object,
                "problem": problem,
                "message": problem,
                "remedy": remedy,
            }),
            Subject::Object(_) => json!({
                "severity": severity,
                "object": object,
                "subject": object,
                "problem": problem,
                "remedy": remedy,
                "cure": remedy,
            }),
        };
        finding.serialize(serializer)
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Error => "error",
        })
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Subject::File { path, position: Some(Position { line, column }), .. } => {
                write!(f, "{}:{line}:{column}", path.display())
            }
            Subject::File { path, .. } => write!(f, "{}", path.display()),
            Subject::Object(name) => f.write_str(name),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { severity, subject, error } = self;
        match subject {
            // As compilers do, so that editors find the position.
            Subject::File { .. } => write!(f, "{subject}: {severity}: {error}"),
            Subject::Object(_) => write!(f, "{severity}: {subject}: {error}"),
        }
    }
}
