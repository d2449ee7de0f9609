//! The executable: the applet of its own file name, or of its first argument.
#![no_main]

#[cfg(target_env = "musl")]
mod musl;

use std::ffi::{CStr, OsStr, OsString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;

use cnibox::start;
use nix::libc;
use nix::sys::signal::{SigHandler, Signal, signal};

/// The entry point for the C library, instead of the standard library's `main`: see [`start`].
#[expect(
    unsafe_code,
    reason = "the C library's name for it, its arguments, two signals and the auxiliary vector"
)]
#[unsafe(no_mangle)]
extern "C" fn main(count: c_int, values: *const *const c_char) -> c_int {
    let ignored = [Signal::SIGPIPE, Signal::SIGXFSZ].into_iter().try_for_each(|failed_write| {
        // SAFETY: there is no other thread yet, and no handler to replace.
        unsafe { signal(failed_write, SigHandler::SigIgn) }.map(drop)
    });
    if start::open_standard_files().and(ignored).is_err() {
        return 1;
    }
    let arguments = (0..usize::try_from(count).unwrap_or_default())
        .map(|index| {
            // SAFETY: the C library passes `count` pointers to strings that stay.
            let text = unsafe { CStr::from_ptr(*values.add(index)) };
            OsString::from(OsStr::from_bytes(text.to_bytes()))
        })
        .collect();
    // SAFETY: getauxval(3) reads a value that the kernel has passed to the process.
    let is_secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    start::exit_code_number(start::run_applet(arguments, is_secure))
}
