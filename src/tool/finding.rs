//! The findings of `cnibox lint` and `cnibox doctor`: defects, each with its remedy.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use serde::{Serialize, Serializer};
use serde_json::json;

use super::{json_text, print_text};
use cni::error::{Error, Result};
use cni::json::place::TextPosition;

/// How urgent a finding is.
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
pub(super) enum FindingSubject {
    /// A file of a network configuration. The name of the network is empty if it could not be read.
    File { path: PathBuf, position: Option<TextPosition>, network: String },
    /// Any other object, described in words: a container, a link, a chain.
    Object(String),
}

pub(super) struct Finding {
    pub(super) severity: Severity,
    pub(super) subject: FindingSubject,
    /// The defect; the details are the remedy, a command where there is one.
    pub(super) error: Error,
}

impl Finding {
    pub(super) fn new_error(
        subject: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        let error = Error::config(problem).with_details(remedy);
        Finding {
            severity: Severity::Error,
            subject: FindingSubject::Object(subject.into()),
            error,
        }
    }

    pub(super) fn new_warning(
        subject: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding { severity: Severity::Warning, ..Finding::new_error(subject, problem, remedy) }
    }

    pub(super) fn new_note(
        subject: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding { severity: Severity::Note, ..Finding::new_error(subject, problem, remedy) }
    }

    /// Whether both are the same defect of the same object.
    pub(super) fn is_equal(&self, other: &Finding) -> bool {
        self.subject == other.subject && self.error == other.error
    }
}

/// Prints the findings as JSON or one per line, and `none` if there are no findings. Returns the
/// exit status.
pub(super) fn report_findings(findings: &[Finding], json: bool, none: &str) -> Result<ExitCode> {
    let line = |finding: &Finding| format!("{finding}\n");
    print_text(&match findings {
        _ if json => json_text(&findings)?,
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
        let mut finding = json!({
            "severity": self.severity.to_string(),
            "object": self.subject.to_string(),
            "problem": self.error.message(),
            "remedy": self.error.details(),
        });
        if let FindingSubject::File { path, position, network } = &self.subject {
            finding["file"] = json!(path.display().to_string());
            finding["line"] = json!(position.map(|position| position.line));
            finding["column"] = json!(position.map(|position| position.column));
            finding["network"] = json!(network);
        }
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

impl fmt::Display for FindingSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FindingSubject::File {
                path, position: Some(TextPosition { line, column }), ..
            } => {
                write!(f, "{}:{line}:{column}", path.display())
            }
            FindingSubject::File { path, .. } => write!(f, "{}", path.display()),
            FindingSubject::Object(name) => f.write_str(name),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { severity, subject, error } = self;
        match subject {
            // As compilers do, so that editors find the position.
            FindingSubject::File { .. } => write!(f, "{subject}: {severity}: {error}"),
            FindingSubject::Object(_) => write!(f, "{severity}: {subject}: {error}"),
        }
    }
}
