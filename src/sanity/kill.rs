//! A plugin that is killed at a chosen system call: ptrace(2) counts the calls of the process, of its threads and of
//! the processes it starts.

use std::collections::HashSet;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// How a traced plugin ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was killed as it entered this system call; the first is number 0.
    Killed(u64),
    /// By itself, after so many system calls, with this exit status: 128 and the number for a signal.
    ByItself { calls: u64, status: i32 },
}

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

/// Lets the plugin run until it enters the system call `number`, then kills it with all that it has started; to its end
/// if it makes fewer. It must come from [`spawn`], on the same thread.
pub fn kill_at(plugin: &Child, number: u64) -> nix::Result<Ended> {
    let first = pid(plugin);
    // The stop of exec.
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
        let stopped = match waitpid(None, Some(WaitPidFlag::__WALL)) {
            Err(Errno::EINTR) => continue,
            stopped => stopped?,
        };
        match stopped {
            WaitStatus::Exited(of, status) if of == first => {
                end_all(&known);
                return Ok(Ended::ByItself { calls, status });
            }
            WaitStatus::Signaled(of, signal, _) if of == first => {
                end_all(&known);
                return Ok(Ended::ByItself { calls, status: 128 + signal as i32 });
            }
            WaitStatus::PtraceSyscall(of) => {
                // Each call stops twice: at its entry and at its end.
                if inside.remove(&of) {
                    resume(of, None)?;
                    continue;
                }
                if calls == number {
                    kill_all(&known, first)?;
                    return Ok(Ended::Killed(number));
                }
                calls += 1;
                inside.insert(of);
                resume(of, None)?;
            }
            WaitStatus::PtraceEvent(of, ..) => resume(of, None)?,
            WaitStatus::Stopped(of, signal) => {
                // A new thread or process begins with a stop of its own.
                let is_new = known.insert(of);
                let is_start = is_new && signal == Signal::SIGSTOP;
                resume(of, (!is_start && signal != Signal::SIGTRAP).then_some(signal))?;
            }
            WaitStatus::Exited(of, _) | WaitStatus::Signaled(of, ..) => {
                known.remove(&of);
            }
            _ => {}
        }
    }
}

/// One that was killed meanwhile needs nothing.
fn resume(of: Pid, signal: Option<Signal>) -> nix::Result<()> {
    match ptrace::syscall(of, signal) {
        Err(Errno::ESRCH) => Ok(()),
        resumed => resumed,
    }
}

/// Kills what the plugin started and did not wait for. It may be gone already.
fn end_all(known: &HashSet<Pid>) {
    for of in known {
        kill(*of, Signal::SIGKILL).unwrap_or_default();
    }
}

fn kill_all(known: &HashSet<Pid>, first: Pid) -> nix::Result<()> {
    end_all(known);
    loop {
        match waitpid(None, Some(WaitPidFlag::__WALL)) {
            Err(Errno::EINTR) => {}
            Err(Errno::ECHILD) => return Ok(()),
            Err(error) => return Err(error),
            // A process that was about to start.
            Ok(
                WaitStatus::Stopped(of, _)
                | WaitStatus::PtraceEvent(of, ..)
                | WaitStatus::PtraceSyscall(of),
            ) => {
                kill(of, Signal::SIGKILL).unwrap_or_default();
            }
            Ok(WaitStatus::Exited(of, _) | WaitStatus::Signaled(of, ..)) if of == first => {}
            Ok(_) => {}
        }
    }
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX))
}
