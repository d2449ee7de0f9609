//! The executable: the applet of its own file name, or of its first argument.
#![cfg_attr(target_env = "gnu", no_main)]

use std::path::Path;
use std::process::ExitCode;

use cnibox::applets::{self, APPLETS, LOOKUP};
use cnibox::log;
use cnibox::skel::{run, start};
use cnibox::tool::multicall;
use nix::libc;

/// Where the C library starts, in place of the standard library's `main`: see [`skel::start`].
/// glibc tells `std::env::args` the arguments; another C library does not.
///
/// [`skel::start`]: cnibox::skel::start
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "the C library's name for it, and two signals")]
#[unsafe(no_mangle)]
extern "C" fn main() -> i32 {
    use nix::sys::signal::{SigHandler, Signal, signal};

    let ignored = [Signal::SIGPIPE, Signal::SIGXFSZ].into_iter().try_for_each(|failed_write| {
        // SAFETY: there is no other thread yet, and no handler that this would replace.
        unsafe { signal(failed_write, SigHandler::SigIgn) }.map(drop)
    });
    match start::open_standard_files().and(ignored) {
        Ok(()) => start::number(run_applet()),
        Err(_) => 1,
    }
}

#[cfg(not(target_env = "gnu"))]
fn main() -> ExitCode {
    run_applet()
}

#[expect(unsafe_code, reason = "neither the standard library nor nix reads the auxiliary vector")]
fn run_applet() -> ExitCode {
    // SAFETY: this reads a word that the kernel has put beside the arguments.
    let is_secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    if is_secure && start::is_elevated() {
        log::line(start::ELEVATED);
        return ExitCode::FAILURE;
    }
    let mut args = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned());
    let program = args.next().unwrap_or_default();
    let name = Path::new(&program).file_name().unwrap_or_default().to_string_lossy().into_owned();
    if let Some(applet) = applets::find(&name) {
        return run::main(applet, args.collect(), LOOKUP);
    }
    let mut args: Vec<String> = args.collect();
    match args.first().and_then(|first| applets::find(first)) {
        Some(applet) if multicall::is_own_name(&name) => {
            args.remove(0);
            run::main(applet, args, LOOKUP)
        }
        _ => multicall::main(&name, &args, APPLETS),
    }
}
