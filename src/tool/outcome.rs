//! The actions of `cnibox gc`, `ipam free` and `cnibox repair` on objects of the node, done or only
//! listed.

use std::fmt;
use std::process::ExitCode;

use serde::Serialize;

use super::{json_text, print_text};
use cni::error::{Error, Result};

/// The action for an attachment that stays because nothing proves that it has ended.
pub(super) const IN_DOUBT: &str = "in doubt";

/// The action for a step that failed.
pub(super) const FAILED: &str = "failed";

/// The actions of `cnibox repair`.
pub(super) const MISSING: &str = "missing";
pub(super) const RESTORED: &str = "restored";
pub(super) const LEFT_ALONE: &str = "left alone";

/// An object and what was done to it. In JSON the keys are sorted, as everywhere.
#[derive(Debug, Serialize)]
pub(super) struct ActionOutcome {
    /// For example `detached`, `would detach` or [`IN_DOUBT`].
    pub(super) action: &'static str,
    /// The network of the object; empty if there is none.
    pub(super) network: String,
    pub(super) object: String,
    /// The reason of the action; empty if the action says it.
    pub(super) problem: String,
    /// What a person still has to do; empty if that is nothing.
    pub(super) remedy: String,
}

impl ActionOutcome {
    /// An outcome after which nothing has to be done.
    pub(super) fn new(
        action: &'static str,
        network: impl Into<String>,
        object: impl Into<String>,
        problem: impl Into<String>,
    ) -> ActionOutcome {
        ActionOutcome {
            action,
            network: network.into(),
            object: object.into(),
            problem: problem.into(),
            remedy: String::new(),
        }
    }

    pub(super) fn with_remedy(self, remedy: impl Into<String>) -> ActionOutcome {
        ActionOutcome { remedy: remedy.into(), ..self }
    }

    /// A failure, which is also logged.
    pub(super) fn log_failure(network: &str, object: String, error: &Error) -> ActionOutcome {
        warn!("{object}: {error}");
        ActionOutcome::new(FAILED, network, object, error.message()).with_remedy(error.details())
    }
}

impl fmt::Display for ActionOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ActionOutcome { action, network, object, problem, remedy } = self;
        let is_state = [IN_DOUBT, MISSING, RESTORED, LEFT_ALONE].contains(action);
        let colon = if is_state { ":" } else { "" };
        write!(f, "{action}{colon} {object}")?;
        if !problem.is_empty() {
            write!(f, ": {problem}")?;
        }
        if !network.is_empty() {
            write!(f, " (network {network})")?;
        }
        // The remedies of the others are the command without --dry-run.
        if *action == IN_DOUBT { write!(f, "; {remedy}") } else { Ok(()) }
    }
}

/// Prints the outcomes as JSON, or one per line without the failures; the text `none` if there are
/// no outcomes. The exit status is 1 if something failed, or with `dry_run` if something would be
/// done.
pub(super) fn report_outcomes(
    outcomes: &[ActionOutcome],
    json: bool,
    dry_run: bool,
    none: &str,
) -> Result<ExitCode> {
    let told = outcomes.iter().filter(|outcome| outcome.action != FAILED);
    let text: String = told.map(|outcome| format!("{outcome}\n")).collect();
    print_text(&match text.as_str() {
        _ if json => json_text(&outcomes)?,
        "" if outcomes.is_empty() => format!("{none}\n"),
        _ => text,
    })?;
    Ok(
        if outcomes.iter().any(|outcome| match outcome.action {
            FAILED => true,
            IN_DOUBT | LEFT_ALONE => false,
            _ => dry_run,
        }) {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        },
    )
}
