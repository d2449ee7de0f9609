//! System calls of a plugin, recorded, made to fail or made deadly: strace(1) from outside, so
//! that the executable under test is the one that is shipped.

use std::fs;
use std::path::Path;

use crate::node::{Call, Node, Outcome};

/// What only the C library, the allocator and threads use: making these fail tests those.
const NOT_OURS: [&str; 21] = [
    "brk",
    "close",
    "exit",
    "exit_group",
    "futex",
    "getrandom",
    "gettid",
    "madvise",
    "mmap",
    "mprotect",
    "mremap",
    "munmap",
    "poll",
    "prctl",
    "restart_syscall",
    "rseq",
    "rt_sigaction",
    "rt_sigprocmask",
    "sched_getaffinity",
    "set_robust_list",
    "sigaltstack",
];

/// One system call of a recorded run.
#[derive(Debug, Clone)]
pub(crate) struct Syscall {
    /// Its name.
    pub(crate) name: String,
    /// Arguments and result, descriptors with their paths.
    pub(crate) text: String,
    /// How many of this name its thread has made, with this one.
    nth: usize,
    /// 0 is the main thread.
    pub(crate) thread: usize,
}

/// One place in a run where something can be made to happen.
#[derive(Debug, Clone)]
pub(crate) struct Point {
    /// What is done there, for messages.
    pub(crate) syscall: Syscall,
    /// On a scratch thread: the file that tells the place apart.
    path: Option<String>,
}

/// Fails unless strace is there.
pub(crate) fn require() {
    let found = std::process::Command::new("strace").arg("-V").output();
    assert!(
        found.is_ok_and(|output| output.status.success()),
        "strace is missing: install the package \"strace\" (make test does)"
    );
}

/// Runs `call` and tells its system calls.
pub(crate) fn record(node: &Node, call: &Call) -> (Outcome, Vec<Syscall>) {
    require();
    let file = node.path("strace.record");
    let name = file.display().to_string();
    let outcome = call.clone().under(&["strace", "-f", "-y", "-s", "200", "-o", &name]).run();
    (outcome, parse(&file))
}

fn parse(file: &Path) -> Vec<Syscall> {
    let text = String::from_utf8_lossy(&fs::read(file).unwrap()).into_owned();
    let mut threads: Vec<&str> = Vec::new();
    let mut calls: Vec<Syscall> = Vec::new();
    for line in text.lines() {
        let (pid, rest) = line.split_once(' ').unwrap();
        let rest = rest.trim_start();
        let Some((name, args)) = rest.split_once('(').filter(|(name, _)| is_name(name)) else {
            continue;
        };
        let thread = threads.iter().position(|t| *t == pid).unwrap_or_else(|| {
            threads.push(pid);
            threads.len() - 1
        });
        let before = calls.iter().filter(|c| c.thread == thread && c.name == name).count();
        let (name, text) = (name.to_owned(), args.to_owned());
        calls.push(Syscall { name, text, nth: before + 1, thread });
    }
    calls
}

fn is_name(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

/// The points of a recorded run: every call of the main thread from the reading of stdin to the
/// writing of the result (both included), and those calls of scratch threads that name a file.
/// strace counts for each thread, so a scratch thread's other calls share their numbers, and so
/// their runs, with the main thread's.
pub(crate) fn points(calls: &[Syscall]) -> Vec<Point> {
    let of_a_thread = |syscall: &Syscall| match file_of(&syscall.text) {
        None if syscall.nth > 1 => None,
        path => Some(Point { syscall: syscall.clone(), path }),
    };
    points_by(calls, of_a_thread)
}

/// As [`points`], for a plugin that does its work on a thread that visits the container: with that
/// thread's calls beyond those of the main thread, and without what would fail together with the
/// waking of an executor, which cannot fail.
pub(crate) fn points_of_a_visit(calls: &[Syscall]) -> Vec<Point> {
    let is_shared = |syscall: &Syscall| {
        let Syscall { name, nth, thread, .. } = syscall;
        calls.iter().any(|c| c.thread < *thread && c.name == *name && c.nth == *nth)
    };
    let of_a_thread = |syscall: &Syscall| match file_of(&syscall.text) {
        None if syscall.nth > 1 && is_shared(syscall) => None,
        path => Some(Point { syscall: syscall.clone(), path }),
    };
    let mut points = points_by(calls, of_a_thread);
    points.retain(|Point { syscall, path }| {
        let is_waking = |c: &Syscall| wakes(c) && c.name == syscall.name && c.nth == syscall.nth;
        path.is_some() || !calls.iter().any(is_waking)
    });
    points
}

fn points_by(calls: &[Syscall], of_a_thread: impl Fn(&Syscall) -> Option<Point>) -> Vec<Point> {
    let is_stdin = |c: &Syscall| c.name == "read" && c.text.starts_with("0<");
    let is_stdout = |c: &Syscall| c.name == "write" && c.text.starts_with("1<");
    let first = calls.iter().position(is_stdin).expect("stdin is read");
    let last = calls.iter().position(is_stdout).unwrap_or(calls.len() - 1);
    let ours = |c: &&Syscall| !NOT_OURS.contains(&c.name.as_str()) && !wakes(c);
    let point = |syscall: &Syscall| match syscall.thread {
        0 => Some(Point { syscall: syscall.clone(), path: None }),
        _ => of_a_thread(syscall),
    };
    calls[first..=last].iter().filter(ours).filter_map(point).collect()
}

/// Writing to an eventfd wakes the executor, and cannot fail.
fn wakes(syscall: &Syscall) -> bool {
    syscall.text.contains("[eventfd]>, \"")
}

/// The points of the main thread where files are changed.
pub(crate) fn file_changes(calls: &[Syscall]) -> Vec<Point> {
    let changes = |c: &&Syscall| match c.name.as_str() {
        "openat" | "open" => c.text.contains("O_CREAT"),
        name => ["rename", "link", "unlink", "symlink", "mkdir", "rmdir", "fsync", "fchmod"]
            .iter()
            .any(|verb| {
                name.strip_prefix(verb).is_some_and(|rest| ["", "at", "at2"].contains(&rest))
            }),
    };
    let calls = calls.iter().filter(|c| c.thread == 0).filter(changes);
    calls.map(|syscall| Point { syscall: syscall.clone(), path: None }).collect()
}

/// The kernel parameter in the arguments.
fn file_of(text: &str) -> Option<String> {
    let start = text.find("/proc/sys/")?;
    let end = text[start..].find(['"', '>']).map(|n| start + n)?;
    Some(text[start..end].to_owned())
}

impl Point {
    /// Runs `call` with `action` (`error=EPERM`, `signal=KILL`) at this point and tells whether
    /// it came to that. Ends it after 20 seconds.
    pub(crate) fn run(&self, node: &Node, call: &Call, action: &str) -> (Outcome, bool) {
        let file = node.path("strace.inject");
        let name = file.display().to_string();
        let trace = format!("trace={}", self.syscall.name);
        let nth = if self.path.is_some() { 1 } else { self.syscall.nth };
        let inject = format!("inject={}:{action}:when={nth}", self.syscall.name);
        let mut wrapper = vec!["timeout", "20", "strace", "-f", "-o", &name];
        wrapper.extend(["-e", &trace, "-e", &inject]);
        if let Some(path) = &self.path {
            wrapper.extend(["-P", path]);
        }
        let outcome = call.clone().under(&wrapper).run();
        let text = fs::read(&file).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        (outcome, text.contains("(INJECTED)") || text.contains("killed by SIGKILL"))
    }

    /// For messages.
    pub(crate) fn describe(&self) -> String {
        let Syscall { name, text, nth, thread } = &self.syscall;
        let text: String = text.chars().take(160).collect();
        format!("thread {thread}, {name} #{nth}: {text}")
    }
}
