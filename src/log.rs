//! What goes to stderr: warnings always, debug lines with `CNI_LOG=debug`.
//!
//! Runtimes collect a plugin's stderr; stdout belongs to the result.

use std::cell::RefCell;
use std::fmt;
use std::io::Write;

thread_local! {
    /// What this thread's lines are about: plugin and verb, container, network.
    static SUBJECT: RefCell<[String; 3]> = const { RefCell::new([const { String::new() }; 3]) };
}

/// Lines are about a call of a plugin from here on: `bridge ADD`. The container is empty where there is none.
pub fn set_call(call: String, container: &str) {
    let container =
        if container.is_empty() { String::new() } else { format!("container {container}") };
    SUBJECT.set([call, container, String::new()]);
}

/// The network of the call, once it is known. Without a call it is not told.
pub fn set_network(name: &str) {
    SUBJECT.with_borrow_mut(|[call, _, network]| {
        if !call.is_empty() {
            *network = format!("network {name}");
        }
    });
}

/// What lines are about, with a colon behind it.
fn subject() -> String {
    let words = SUBJECT.with_borrow(|subject| {
        subject.iter().filter(|word| !word.is_empty()).cloned().collect::<Vec<_>>()
    });
    if words.is_empty() { String::new() } else { words.join(", ") + ": " }
}

/// Reports trouble that does not fail the call (a rollback step, a skipped file).
pub fn warn(message: impl fmt::Display) {
    line(format_args!("cnibox: {}{message}", subject()));
}

/// Tells what is being done, for a person who asked with `CNI_LOG=debug`.
pub fn debug(message: impl fmt::Display) {
    if is_level("debug") {
        line(format_args!("cnibox: debug: {}{message}", subject()));
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
