//! From the C library's `main` to the applet, without the slow part of the standard library's
//! initialisation.
//!
//! A plugin runs for about a millisecond. The standard library uses 50 µs of it, and 100 kB of
//! memory, to find the end of the stack in `/proc/self/maps`, for the message of a stack overflow.
//! An overflow ends the process also without that message.
//!
//! Two steps of that initialisation are needed: a closed standard descriptor must not become the
//! descriptor of the first file that is opened, and a signal about a failed write (`SIGPIPE`,
//! `SIGXFSZ`) must not end the process before the rollback of an ADD.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::{fs, io, mem};

use nix::fcntl::{OFlag, open};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use nix::unistd::{getegid, geteuid, getgid, getuid, setresgid, setresuid};
use rustix::thread::capabilities;

use crate::applets::TABLE;
use crate::framework::run;
use crate::stderr;
use crate::tool::multicall;
use cni::SpecVersion;
use cni::error::{Error, errno_text};
use cni::plugin::process::print_error;

/// Opens `/dev/null` in place of a closed stdin, stdout or stderr; for stdout without write access,
/// because a result that cannot be delivered is an error. After an error none of the descriptors
/// may be used.
pub fn open_standard_files() -> nix::Result<()> {
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    let files = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
    let mut states = files.map(|file| PollFd::new(file, PollFlags::empty()));
    poll(&mut states, PollTimeout::ZERO)?;
    let is_closed =
        |state: &PollFd<'_>| state.revents().is_some_and(|it| it.contains(PollFlags::POLLNVAL));
    let modes = [OFlag::O_RDONLY, OFlag::O_RDONLY, OFlag::O_WRONLY];
    for (_, mode) in states.iter().zip(modes).filter(|(state, _)| is_closed(state)) {
        // The new descriptor has the lowest free number, and stays open.
        mem::forget(open("/dev/null", mode, Mode::empty())?);
    }
    Ok(())
}

/// Runs the applet of the executable's own name, or of its first argument. `arguments` begin with
/// the name; `is_secure` is the kernel's `AT_SECURE`, getauxval(3).
pub fn run_applet(arguments: Vec<OsString>, is_secure: bool) -> ExitCode {
    stderr::start_log();
    if is_secure && has_file_privileges() {
        stderr::write_line(ELEVATED);
        let error = Error::internal(ELEVATED).with_details(
            "remove the bits and the capabilities from the file: \"chmod ug-s\" and \"setcap -r\"",
        );
        return print_error(&error, SpecVersion::NEWEST);
    }
    if is_secure {
        adopt_effective_ids();
    }
    let mut args = arguments.into_iter().map(|arg| arg.to_string_lossy().into_owned());
    let program = args.next().unwrap_or_default();
    let name = Path::new(&program).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut args: Vec<String> = args.collect();
    let is_own = multicall::is_own_name(&name);
    if let Some(applet) = TABLE.find_by_file_name(&name).filter(|_| !is_own) {
        return multicall::run_linked_applet(applet, args, TABLE);
    }
    match args.first().and_then(|first| TABLE.find_applet(first)) {
        Some(applet) if is_own => {
            args.remove(0);
            run::main(applet, args, TABLE)
        }
        _ => multicall::main(&name, &args, TABLE),
    }
}

/// The error of an executable with set-user-ID, set-group-ID or capabilities.
const ELEVATED: &str = "set-user-id, set-group-id or with file capabilities: refused, because \
                        arguments and environment are those of a user without these powers";

/// Whether the executable's file gives this process privileges that its caller does not have.
/// `AT_SECURE` alone is no proof: the kernel sets it also if the caller's real and effective ids
/// differ, as in a runtime with set-user-ID, and for a change of the SELinux domain, for instance
/// when systemd starts the daemon.
fn has_file_privileges() -> bool {
    const OWN: &str = "/proc/self/exe";
    let (user, group) = (getuid(), getgid());
    let changed = user != geteuid() || group != getegid();
    if !changed
        && (user.is_root() || !(capabilities(None).map_or(true, |sets| !sets.permitted.is_empty())))
    {
        return false;
    }
    let bits = fs::metadata(OWN).map_or(true, |meta| meta.permissions().mode() & 0o6000 != 0);
    let given = match rustix::fs::getxattr(OWN, "security.capability", &mut [0_u8; 0][..]) {
        Err(rustix::io::Errno::NODATA | rustix::io::Errno::NOTSUP) => false,
        Ok(_) | Err(_) => true,
    };
    bits || given
}

/// Makes the effective ids the real ones, for the programs that this process starts: iptables
/// refuses to run otherwise.
fn adopt_effective_ids() {
    let (user, group) = (geteuid(), getegid());
    let taken = setresgid(group, group, group).and_then(|()| setresuid(user, user, user));
    if let Err(error) = taken {
        warn!("could not take on the effective ids: {}", errno_text(error));
    }
}

/// The number of an [`ExitCode`], to return from `main`; the standard library has no such
/// conversion.
pub fn exit_code_number(code: ExitCode) -> i32 {
    let number = (0..=u8::MAX).find(|number| ExitCode::from(*number) == code);
    i32::from(number.unwrap_or(u8::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_exit_code_has_its_number() {
        assert_eq!(exit_code_number(ExitCode::SUCCESS), 0);
        assert_eq!(exit_code_number(ExitCode::FAILURE), 1);
        assert_eq!(exit_code_number(ExitCode::from(255)), 255);
    }
}
