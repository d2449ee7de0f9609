//! The log on stderr: warnings always, debug lines with `CNI_LOG=debug`.
//!
//! Runtimes collect a plugin's stderr; stdout belongs to the result.

use std::cell::RefCell;
use std::fmt::{self, Write as _};
use std::io::Write as _;

use log::{Level, LevelFilter, Log, Metadata, Record};

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
fn line_prefix() -> String {
    PREFIX.with_borrow(|[call, network]| match call.as_str() {
        "" => String::new(),
        call => format!("{call}{network}: "),
    })
}

/// Logs an error that does not fail the call: a rollback step, a skipped file.
macro_rules! warn {
    ($($text:tt)*) => { $crate::stderr::write_record(log::Level::Warn, format_args!($($text)*)) };
}

/// Logs a step, with `CNI_LOG=debug`.
macro_rules! debug {
    ($($text:tt)*) => { $crate::stderr::write_record(log::Level::Debug, format_args!($($text)*)) };
}

/// A function: the macros of the crate `log` have 150 bytes at each place that logs.
#[cold]
pub fn write_record(level: Level, text: fmt::Arguments<'_>) {
    if level == Level::Warn {
        write_line(format_args!("cnibox: {}{text}", line_prefix()));
    } else if is_level("debug") {
        write_line(format_args!("cnibox: debug: {}{text}", line_prefix()));
    }
}

/// The records of `crates/cni`.
struct LibraryLog;

impl Log for LibraryLog {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        write_record(record.level(), *record.args());
    }

    fn flush(&self) {}
}

/// Begins the log of this process.
pub fn start_log() {
    // A test's process has several calls of a plugin.
    if log::set_logger(&LibraryLog).is_ok() {
        log::set_max_level(LevelFilter::Debug);
    }
}

/// Whether `CNI_LOG` is `level`.
pub fn is_level(level: &str) -> bool {
    std::env::var_os("CNI_LOG").is_some_and(|value| value == level)
}

/// Writes one line. Errors of stderr are ignored.
pub fn write_line(text: impl fmt::Display) {
    drop(writeln!(std::io::stderr().lock(), "{}", escape_control_chars(&text.to_string())));
}

/// The text for a terminal, with control characters as JSON escapes: configurations, arguments and
/// errors of other programs may contain sequences that change the terminal's state or hide text.
/// JSON keeps its meaning.
pub fn escape_control_chars(text: &str) -> String {
    let is_control = |c: char| c.is_control() && c != '\n' && c != '\t';
    // Embeddings, overrides and isolates of text direction (Unicode, UAX #9).
    let is_direction = |c| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if is_control(c) || is_direction(c) {
            // Writing to a string cannot fail.
            write!(shown, "\\u{:04x}", u32::from(c)).unwrap_or_default();
        } else {
            shown.push(c);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        for (text, expected) in [
            ("x\u{1b}[2J\u{7}y\r", "x\\u001b[2J\\u0007y\\u000d"),
            ("\u{9b}1m \u{7f} \u{202e}abc", "\\u009b1m \\u007f \\u202eabc"),
            ("a\tb\nä \u{1f600}", "a\tb\nä \u{1f600}"),
        ] {
            assert_eq!(escape_control_chars(text), expected);
        }
    }
}
