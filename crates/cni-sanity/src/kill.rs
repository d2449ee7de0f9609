//! Kills a plugin at a chosen system call: ptrace(2) counts the calls of the process, its threads
//! and its descendants.

use std::collections::HashSet;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// Starts the plugin stopped before its first instruction, so that [`kill_at`] can trace it.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    let traced = || ptrace::traceme().map_err(io::Error::from);
    #[expect(unsafe_code, reason = "code between fork and exec is unsafe by its nature")]
    // SAFETY: ptrace(PTRACE_TRACEME) is one system call, and allocates nothing.
    unsafe {
        command.pre_exec(traced);
    }
    command.spawn()
}

/// Kills the plugin and its descendants at the entry of system call `number`, counted from 0.
/// Returns the number of calls before that, fewer than `number` if the plugin exited first. Needs a
/// child of [`spawn`] on the same thread.
pub fn kill_at(plugin: &Child, number: u64) -> nix::Result<u64> {
    let first = Pid::from_raw(i32::try_from(plugin.id()).unwrap_or(i32::MAX));
    // The process stops at exec.
    waitpid(first, None)?;
    let follow = Options::PTRACE_O_TRACEFORK
        | Options::PTRACE_O_TRACEVFORK
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_EXITKILL;
    ptrace::setoptions(first, follow)?;
    resume(first, None)?;
    let (mut calls, mut inside, mut known) = (0, HashSet::new(), HashSet::from([first]));
    loop {
        match wait()? {
            WaitStatus::Exited(of, _) | WaitStatus::Signaled(of, ..) => {
                if of == first {
                    known.into_iter().for_each(end);
                    return Ok(calls);
                }
                known.remove(&of);
            }
            WaitStatus::PtraceSyscall(of) => {
                // Each call stops at its entry and at its exit.
                if !inside.remove(&of) {
                    if calls == number {
                        known.into_iter().for_each(end);
                        return reap().map(|()| calls);
                    }
                    calls += 1;
                    inside.insert(of);
                }
                resume(of, None)?;
            }
            WaitStatus::PtraceEvent(of, ..) => resume(of, None)?,
            WaitStatus::Stopped(of, signal) => {
                // A new thread or process begins with a SIGSTOP.
                let is_start = known.insert(of) && signal == Signal::SIGSTOP;
                resume(of, (!is_start && signal != Signal::SIGTRAP).then_some(signal))?;
            }
            _ => {}
        }
    }
}

/// Waits for any child or traced thread.
fn wait() -> nix::Result<WaitStatus> {
    loop {
        match waitpid(None, Some(WaitPidFlag::__WALL)) {
            Err(Errno::EINTR) => {}
            status => return status,
        }
    }
}

/// Lets a thread run to its next system call. It may have been killed meanwhile.
fn resume(of: Pid, signal: Option<Signal>) -> nix::Result<()> {
    match ptrace::syscall(of, signal) {
        Err(Errno::ESRCH) => Ok(()),
        resumed => resumed,
    }
}

/// Kills a process, which may have exited already.
fn end(of: Pid) {
    kill(of, Signal::SIGKILL).unwrap_or_default();
}

/// Waits for all killed processes, and kills those that were about to start.
fn reap() -> nix::Result<()> {
    loop {
        match wait() {
            Err(Errno::ECHILD) => return Ok(()),
            Ok(
                WaitStatus::Stopped(of, _)
                | WaitStatus::PtraceEvent(of, ..)
                | WaitStatus::PtraceSyscall(of),
            ) => end(of),
            status => drop(status?),
        }
    }
}
