//! What a person runs.

pub mod cnitool;
pub mod completion;
pub mod install;
pub mod ipam;
pub mod multicall;
pub mod pause;
pub mod repair;

use std::io::{self, Write};
use std::process::ExitCode;

/// Writes a text on stdout.
fn write(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
}

/// Writes a text on stdout, as all that a program does.
fn print(text: &str) -> ExitCode {
    if write(text).is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
