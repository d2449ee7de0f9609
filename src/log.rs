//! What goes to stderr: warnings always, debug lines with `CNI_LOG=debug`.
//!
//! Runtimes collect a plugin's stderr; stdout belongs to the result.

use std::fmt;
use std::io::Write;

/// Reports trouble that does not fail the call (a rollback step, a skipped file).
pub fn warn(message: impl fmt::Display) {
    line(format_args!("cnibox: {message}"));
}

/// Tells what is being done, for a person who asked with `CNI_LOG=debug`.
pub fn debug(message: impl fmt::Display) {
    if is_level("debug") {
        line(format_args!("cnibox: debug: {message}"));
    }
}

/// Whether `CNI_LOG` is this word.
pub fn is_level(word: &str) -> bool {
    std::env::var_os("CNI_LOG").is_some_and(|level| level == word)
}

/// Writes one line as it is. Failure to write to stderr is ignored.
pub fn line(text: impl fmt::Display) {
    drop(writeln!(std::io::stderr().lock(), "{text}"));
}
