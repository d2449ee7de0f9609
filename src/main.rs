//! The executable: the applet of its own file name, or of its first argument.
#![cfg_attr(target_env = "gnu", no_main)]

use std::process::ExitCode;

use cnibox::start;
use nix::libc;

/// The entry point for the C library, instead of the standard library's `main`: see [`start`].
/// glibc passes the arguments to `std::env::args` by itself; another C library does not.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "the C library's name for it, and two signals")]
#[unsafe(no_mangle)]
extern "C" fn main() -> i32 {
    use nix::sys::signal::{SigHandler, Signal, signal};

    let ignored = [Signal::SIGPIPE, Signal::SIGXFSZ].into_iter().try_for_each(|failed_write| {
        // SAFETY: there is no other thread yet, and no handler to replace.
        unsafe { signal(failed_write, SigHandler::SigIgn) }.map(drop)
    });
    match start::open_standard_files().and(ignored) {
        Ok(()) => start::exit_code_number(run_applet()),
        Err(_) => 1,
    }
}

#[cfg(not(target_env = "gnu"))]
fn main() -> ExitCode {
    run_applet()
}

#[expect(unsafe_code, reason = "neither the standard library nor nix reads the auxiliary vector")]
fn run_applet() -> ExitCode {
    // SAFETY: getauxval(3) reads a value that the kernel has passed to the process.
    start::run_applet(unsafe { libc::getauxval(libc::AT_SECURE) } != 0)
}
