//! The log on stderr: warnings always, debug lines with `CNI_LOG=debug`.
//!
//! Runtimes collect a plugin's stderr; stdout belongs to the result.

use std::cell::RefCell;
use std::fmt;
use std::io::Write;

thread_local! {
    /// The prefix of this thread's lines: the call with its container, and the network.
    static PREFIX: RefCell<[String; 2]> = const { RefCell::new([const { String::new() }; 2]) };
}

/// Sets the prefix to a call of a plugin, `bridge ADD`, and its container, which may be empty.
pub fn set_call(call: String, container: &str) {
    let container = if container.is_empty() { "" } else { &format!(", container {container}") };
    PREFIX.set([call + container, String::new()]);
}

/// Adds the network of the call to the prefix.
pub fn set_network(name: &str) {
    PREFIX.with_borrow_mut(|[_, network]| *network = format!(", network {name}"));
}

/// The prefix of lines, with a colon. Empty in a tool, which calls plugins without [`set_call`].
fn prefix() -> String {
    PREFIX.with_borrow(|[call, network]| match call.as_str() {
        "" => String::new(),
        call => format!("{call}{network}: "),
    })
}

/// Logs an error that does not fail the call (a rollback step, a skipped file).
pub fn warn(message: impl fmt::Display) {
    line(format_args!("cnibox: {}{message}", prefix()));
}

/// Logs a step, with `CNI_LOG=debug`.
pub fn debug(message: impl fmt::Display) {
    if is_level("debug") {
        line(format_args!("cnibox: debug: {}{message}", prefix()));
    }
}

/// Whether `CNI_LOG` is `level`.
pub fn is_level(level: &str) -> bool {
    std::env::var_os("CNI_LOG").is_some_and(|value| value == level)
}

/// Writes one line unchanged. Errors of stderr are ignored.
pub fn line(text: impl fmt::Display) {
    drop(writeln!(std::io::stderr().lock(), "{text}"));
}
