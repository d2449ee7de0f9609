//! `cnibox pause`: waits for the signal to end. The main container of a DaemonSet whose work is
//! done by its init container.

use std::process::ExitCode;

use nix::sys::signal::{SigSet, Signal};

use crate::error::{Error, Result};
use crate::log;

/// Sleeps until SIGTERM or SIGINT. It has no children to reap.
pub fn main(args: &[String]) -> ExitCode {
    if let Some(odd) = args.first() {
        log::line(format_args!("cnibox: pause takes no arguments: \"{odd}\""));
        return ExitCode::FAILURE;
    }
    let waited = endings().and_then(|set| set.wait().map_err(|errno| failed(&errno.into())));
    match waited {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            log::line(format_args!("cnibox: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// The signals that end a program, blocked: process 1 of a container gets them only if it asks
/// for them.
pub(super) fn endings() -> Result<SigSet> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGTERM);
    set.add(Signal::SIGINT);
    set.thread_block().map_err(|errno| failed(&errno.into()))?;
    Ok(set)
}

fn failed(cause: &std::io::Error) -> Error {
    Error::io("wait for a signal", cause)
}
