//! Stops a process at a chosen system call, by ptrace(2), while something else happens.

use std::collections::HashSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Child;
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::Signal;
use nix::sys::stat::{major, minor};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::support::node::{Call, Outcome};

/// A run of a call, and the numbers of its system calls in their order, those of all threads and
/// child processes.
pub(crate) struct Run {
    pub(crate) outcome: Outcome,
    pub(crate) calls: Vec<i64>,
    /// Whether the call was paused: it may have had fewer system calls than `number`.
    pub(crate) is_paused: bool,
}

/// Runs the call, and `meanwhile` while it is stopped at the entry of its system call `number`,
/// counted from 0. The call goes on when `meanwhile` is done, or waits for a lock of the call
/// (`waits`).
#[expect(clippy::zombie_processes, reason = "waitpid(2) has waited for it, when it was traced")]
pub(crate) fn run(
    call: &Call,
    number: Option<usize>,
    meanwhile: impl FnOnce() + Send,
    waits: &dyn Fn() -> bool,
) -> Run {
    let mut child = spawn(call);
    let first = Pid::from_raw(child.id().cast_signed());
    let (mut calls, mut inside, mut known) = (Vec::new(), HashSet::new(), HashSet::from([first]));
    let (mut status, mut meanwhile) = (None, Some(meanwhile));
    thread::scope(|scope| {
        let mut running: Option<ScopedJoinHandle<'_, ()>> = None;
        while let Some(event) = next_event() {
            match event {
                WaitStatus::Exited(of, code) if of == first => status = Some(code),
                WaitStatus::PtraceSyscall(of) => {
                    // Each system call stops at its entry and at its exit.
                    if !inside.remove(&of) {
                        inside.insert(of);
                        if Some(calls.len()) == number {
                            let thread = scope.spawn(meanwhile.take().unwrap());
                            while !thread.is_finished() && !waits() {
                                thread::sleep(Duration::from_millis(2));
                            }
                            running = Some(thread);
                        }
                        calls.push(call_number(of));
                    }
                    resume(of, None);
                }
                WaitStatus::PtraceEvent(of, ..) => resume(of, None),
                WaitStatus::Stopped(of, signal) => {
                    // The first stop is at exec; a new thread or process begins with a SIGSTOP.
                    if of == first && calls.is_empty() {
                        ptrace::setoptions(first, follow()).unwrap();
                    }
                    let is_start = known.insert(of) && signal == Signal::SIGSTOP;
                    resume(of, (!is_start && signal != Signal::SIGTRAP).then_some(signal));
                }
                _ => {}
            }
        }
        if let Some(thread) = running {
            thread.join().unwrap();
        }
    });
    let is_paused = meanwhile.is_none();
    let text = |from: &mut dyn Read| {
        let mut text = String::new();
        from.read_to_string(&mut text).unwrap();
        text
    };
    let stdout = text(child.stdout.as_mut().unwrap());
    let stderr = text(child.stderr.as_mut().unwrap());
    Run { outcome: Outcome { status, stdout, stderr }, calls, is_paused }
}

fn follow() -> Options {
    Options::PTRACE_O_TRACEFORK
        | Options::PTRACE_O_TRACEVFORK
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_EXITKILL
}

/// Starts the program, stopped before its first instruction. Its output has to fit into a pipe.
fn spawn(call: &Call) -> Child {
    let mut command = call.command();
    let traced = || ptrace::traceme().map_err(std::io::Error::from);
    #[expect(unsafe_code, reason = "code between fork and exec is unsafe by its nature")]
    // SAFETY: ptrace(PTRACE_TRACEME) is one system call, and allocates nothing.
    unsafe {
        command.pre_exec(traced);
    }
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(call.input()).unwrap();
    child
}

/// The next event of a child process or traced thread of this thread; `None` if there are none.
/// Other threads, which run other tests, have children of their own.
fn next_event() -> Option<WaitStatus> {
    loop {
        match waitpid(None, Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD)) {
            Err(Errno::EINTR) => {}
            Err(Errno::ECHILD) => return None,
            event => return Some(event.unwrap()),
        }
    }
}

/// Lets a thread run to its next system call. It may have been killed meanwhile.
fn resume(of: Pid, signal: Option<Signal>) {
    match ptrace::syscall(of, signal) {
        Err(Errno::ESRCH) => {}
        resumed => resumed.unwrap(),
    }
}

/// The number of the system call at whose entry the thread is stopped.
fn call_number(of: Pid) -> i64 {
    let text = fs::read_to_string(format!("/proc/{of}/syscall")).unwrap_or_default();
    text.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(-1)
}

/// Whether a process waits for the lock of an attachment of this node, or for that on the leases in
/// `store`.
pub(crate) fn waits_for_lock(store: &Path) -> bool {
    let locks =
        fs::read_dir("/run/cni/cnibox").into_iter().flatten().flatten().map(|entry| entry.path());
    let locks = locks.chain([store.join("lock")]).filter_map(|path| path.symlink_metadata().ok());
    let named: Vec<String> = locks
        .map(|meta| format!("{:02x}:{:02x}:{}", major(meta.dev()), minor(meta.dev()), meta.ino()))
        .collect();
    let all = fs::read_to_string("/proc/locks").unwrap();
    all.lines().any(|line| {
        line.contains("->") && line.split(' ').any(|word| named.iter().any(|name| name == word))
    })
}

/// The calls that change something, and exist on every architecture.
const CHANGES: [i64; 3] = [libc::SYS_sendto, libc::SYS_unlinkat, libc::SYS_renameat];
#[cfg(target_arch = "x86_64")]
const OLD_CHANGES: [i64; 2] = [libc::SYS_unlink, libc::SYS_rename];
#[cfg(not(target_arch = "x86_64"))]
const OLD_CHANGES: [i64; 0] = [];

/// The calls at which a pause may matter most: locks, with what is opened before and looked at
/// after, deletions, and messages to the kernel.
pub(crate) fn critical(calls: &[i64]) -> Vec<usize> {
    let is_near_lock =
        |at: usize| calls[at.saturating_sub(3)..calls.len().min(at + 4)].contains(&libc::SYS_flock);
    let changes = |at: usize| CHANGES.contains(&calls[at]) || OLD_CHANGES.contains(&calls[at]);
    (0..calls.len()).filter(|at| is_near_lock(*at) || changes(*at)).collect()
}

/// The number of the first call that takes a lock.
pub(crate) fn first_lock(calls: &[i64]) -> usize {
    calls.iter().position(|call| *call == libc::SYS_flock).expect("a lock is taken")
}
