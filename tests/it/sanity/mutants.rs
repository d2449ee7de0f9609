//! The mutants: shell commands that wrap a correct plugin and add one defect each.
//!
//! | file | defects in |
//! | --- | --- |
//! | `protocol.rs` | VERSION, parameters, configurations, errors, the form of results |
//! | `state.rs` | ADD, CHECK, DEL, GC and STATUS against the state of the kernel |
//! | `delegation.rs` | calls of delegated plugins |
//! | `process.rs` | the environment of the process, unusual but valid calls |
//! | `keys.rs` | keys and values of configurations |
//! | `generated.rs` | every verb of every type, every member of a result |

mod delegation;
mod generated;
mod keys;
mod process;
mod protocol;
mod state;
pub(super) fn all() -> Vec<Mutant> {
    let files = [protocol::ALL, state::ALL, delegation::ALL, process::ALL, keys::ALL];
    let rows = files.into_iter().flatten().copied().flatten();
    rows.map(Row::mutant).chain(generated::all()).collect()
}

/// A plugin with one defect.
#[derive(Debug)]
pub(super) struct Mutant {
    /// The plugin's type.
    pub(super) kind: &'static str,
    /// The specification version of the request.
    pub(super) version: &'static str,
    /// The command with the defect, or several as a pattern of the shell.
    pub(super) verb: &'static str,
    /// The shell commands: `run` is the correct plugin, `bend` edits its output with sed, `inside`
    /// runs a command in the container.
    pub(super) body: String,
    /// The assertion that must fail.
    pub(super) seen: &'static str,
    /// The clause of the specification that it breaks, if not the assertion's first one.
    pub(super) clause: Option<&'static str>,
}
#[derive(Debug)]
struct Row {
    kind: &'static str,
    version: &'static str,
    verb: &'static str,
    seen: &'static str,
    body: &'static str,
    clause: Option<&'static str>,
}

impl Row {
    fn mutant(&self) -> Mutant {
        let Row { kind, version, verb, seen, body, clause } = *self;
        Mutant { kind, version, verb, seen, body: body.to_owned(), clause }
    }
}

/// The version, then one mutant per line: type, verb, failing assertion, shell commands, and the
/// clause if it is not the assertion's first one.
macro_rules! rows {
    ($version:literal $($kind:literal $verb:literal $seen:literal $body:literal $($clause:literal)?;)*) => {
        &[$($crate::sanity::mutants::Row {
            kind: $kind,
            version: $version,
            verb: $verb,
            seen: $seen,
            body: $body,
            clause: $crate::sanity::mutants::rows!(@clause $($clause)?),
        },)*]
    };
    (@clause) => { None };
    (@clause $clause:literal) => { Some($clause) };
}
use rows;
