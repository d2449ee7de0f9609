//! The log on stderr: warnings always, debug lines with `CNI_LOG=debug`.
//!
//! Runtimes collect a plugin's stderr; stdout belongs to the result.

use std::cell::RefCell;
use std::fmt;
use std::io::Write;

thread_local! {
    /// The prefix of this thread's lines: plugin and verb, container, network.
    static SUBJECT: RefCell<[String; 3]> = const { RefCell::new([const { String::new() }; 3]) };
}

/// Sets the prefix to a call of a plugin, `bridge ADD`, and its container, which may be empty.
pub fn set_call(call: String, container: &str) {
    let container =
        if container.is_empty() { String::new() } else { format!("container {container}") };
    SUBJECT.set([call, container, String::new()]);
}

/// Adds the network of the call to the prefix.
pub fn set_network(name: &str) {
    SUBJECT.with_borrow_mut(|[call, _, network]| {
        if !call.is_empty() {
            *network = format!("network {name}");
        }
    });
}

/// The prefix of lines, with a colon.
fn subject() -> String {
    let words = SUBJECT.with_borrow(|subject| {
        subject.iter().filter(|word| !word.is_empty()).cloned().collect::<Vec<_>>()
    });
    if words.is_empty() { String::new() } else { words.join(", ") + ": " }
}

/// Logs an error that does not fail the call (a rollback step, a skipped file).
pub fn warn(message: impl fmt::Display) {
    line(format_args!("cnibox: {}{message}", subject()));
}

/// Logs a step, with `CNI_LOG=debug`.
pub fn debug(message: impl fmt::Display) {
    if is_level("debug") {
        line(format_args!("cnibox: debug: {}{message}", subject()));
    }
}

/// Whether `CNI_LOG` is `level`.
pub fn is_level(word: &str) -> bool {
    std::env::var_os("CNI_LOG").is_some_and(|level| level == word)
}

/// Writes one line unchanged. Errors of stderr are ignored.
pub fn line(text: impl fmt::Display) {
    drop(writeln!(std::io::stderr().lock(), "{text}"));
}
