//! A mistake that was found, and how it is told.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Value, json};

use crate::cni::json::place::Position;
use crate::error::Error;

/// The exit status where containers have no network, or not the configured one.
const ERRORS: u8 = 2;

/// How bad a mistake is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::tool) enum Severity {
    /// Containers get a network, but probably not the one that was meant.
    Warning,
    /// Containers get no network.
    Error,
}

impl Severity {
    /// The exit status of a tool whose worst finding this is.
    pub(in crate::tool) fn exit_status(worst: Option<Severity>) -> ExitCode {
        match worst {
            None => ExitCode::SUCCESS,
            Some(Severity::Warning) => ExitCode::FAILURE,
            Some(Severity::Error) => ExitCode::from(ERRORS),
        }
    }
}

/// A mistake in a configuration.
#[derive(Clone, Debug)]
pub(in crate::tool) struct Finding {
    pub(in crate::tool) file: PathBuf,
    /// The network's name; empty if it could not be read.
    pub(in crate::tool) network: String,
    /// Where it is in the file, if it is anywhere.
    pub(in crate::tool) position: Option<Position>,
    pub(in crate::tool) severity: Severity,
    pub(in crate::tool) message: String,
    /// What to do; empty if the message says it.
    pub(in crate::tool) remedy: String,
}

impl Finding {
    /// What an error says of a file.
    pub(super) fn new(
        file: &Path,
        network: &str,
        position: Option<Position>,
        severity: Severity,
        error: &Error,
    ) -> Finding {
        Finding {
            file: file.to_owned(),
            network: network.to_owned(),
            position,
            severity,
            message: error.msg().to_owned(),
            remedy: error.details().to_owned(),
        }
    }

    /// The file, with line and column if they are known.
    pub(in crate::tool) fn place(&self) -> String {
        let file = self.file.display();
        match self.position {
            Some(Position { line, column }) => format!("{file}:{line}:{column}"),
            None => file.to_string(),
        }
    }

    /// What findings are sorted by, and are the same in.
    pub(super) fn key(&self) -> (&Path, Option<Position>, &str) {
        (&self.file, self.position, &self.message)
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "file": self.file.display().to_string(),
            "line": self.position.map(|at| at.line),
            "column": self.position.map(|at| at.column),
            "network": self.network,
            "severity": self.severity.to_string(),
            "message": self.message,
            "remedy": self.remedy,
        })
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Severity::Warning => "warning",
            Severity::Error => "error",
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.place(), self.severity, self.message)?;
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        Ok(())
    }
}
