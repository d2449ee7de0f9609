//! System calls of a plugin, recorded, made to fail or made deadly: strace(1) from outside, so
//! that the executable under test is the one that is shipped.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

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

/// Where a run's output goes when it is the writing of it that fails: a pipe has no name by which
/// strace could tell it from other files.
const STDOUT: &str = "stdout";

/// One system call of a recorded run.
#[derive(Debug, Clone)]
pub(crate) struct Syscall {
    /// Its name.
    pub(crate) name: String,
    /// Arguments and result, descriptors with their paths.
    pub(crate) text: String,
    /// How many of this name, and to this file, its thread has made, with this one.
    nth: usize,
    /// How many of the next ones meet the same.
    more: usize,
    /// 0 is the main thread.
    pub(crate) thread: usize,
    /// What it writes to; below the node's root if it is relative. Writes are counted for each
    /// file, because the kernel may restart those to some, and strace counts each try.
    file: Option<PathBuf>,
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
    (outcome, parse(&file, &node.path("")))
}

/// Runs `call` with a pause before it opens the file at `path` for the `nth` time.
pub(crate) fn pause_before(
    node: &Node,
    call: &Call,
    path: &str,
    nth: usize,
    pause: Duration,
) -> Outcome {
    require();
    let log = node.path("strace.pause").display().to_string();
    let inject = format!("inject=openat:delay_enter={}:when={nth}", pause.as_micros());
    let wrapper = ["strace", "-o", &log, "-e", "trace=openat", "-e", &inject, "-P", path];
    call.clone().under(&wrapper).run()
}

/// What a call costs, whatever else the machine does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    /// System calls.
    pub(crate) calls: usize,
    /// Bytes that were read or received.
    pub(crate) bytes: usize,
}

/// Runs `call`, which has to succeed, and tells what it costs.
pub(crate) fn cost(node: &Node, call: &Call) -> Cost {
    let (outcome, calls) = record(node, call);
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let result = |call: &Syscall| {
        let text = call.text.rsplit_once(" = ")?.1.split(' ').next()?;
        text.parse::<usize>().ok()
    };
    let reads = calls.iter().filter(|call| call.name == "read" || call.name.starts_with("recv"));
    Cost { calls: calls.len(), bytes: reads.filter_map(result).sum() }
}

fn parse(file: &Path, root: &Path) -> Vec<Syscall> {
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
        let file = (name == "write").then(|| file_of(args, root)).flatten();
        let counts = |c: &&Syscall| {
            c.thread == thread && c.name == name && (file.is_none() || c.file == file)
        };
        let nth = calls.iter().filter(counts).count() + 1;
        let (name, text) = (name.to_owned(), args.to_owned());
        calls.push(Syscall { name, text, nth, more: 0, thread, file });
    }
    calls
}

fn is_name(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

/// The points of a recorded run: every call of the main thread, the only one that a plugin has,
/// from the reading of stdin to the writing of the result (both included).
pub(crate) fn points(calls: &[Syscall]) -> Vec<Syscall> {
    let is_stdin = |c: &Syscall| c.name == "read" && c.text.starts_with("0<");
    let first = calls.iter().position(is_stdin).expect("stdin is read");
    let last = calls.iter().position(Syscall::prints_result).unwrap_or(calls.len() - 1);
    let ours = |c: &&Syscall| c.thread == 0 && !NOT_OURS.contains(&c.name.as_str()) && !wakes(c);
    calls[first..=last].iter().filter(ours).cloned().collect()
}

/// Writing to an eventfd wakes the executor, and cannot fail.
fn wakes(syscall: &Syscall) -> bool {
    syscall.text.contains("[eventfd]>, \"")
}

/// The points of the main thread where files are changed.
pub(crate) fn file_changes(calls: &[Syscall]) -> Vec<Syscall> {
    let changes = |c: &&Syscall| match c.name.as_str() {
        "openat" | "open" => c.text.contains("O_CREAT"),
        name => ["rename", "link", "unlink", "symlink", "mkdir", "rmdir", "fsync", "fchmod"]
            .iter()
            .any(|verb| {
                name.strip_prefix(verb).is_some_and(|rest| ["", "at", "at2"].contains(&rest))
            }),
    };
    calls.iter().filter(|c| c.thread == 0).filter(changes).cloned().collect()
}

/// The file behind the descriptor that comes first in the arguments.
fn file_of(args: &str, root: &Path) -> Option<PathBuf> {
    let (fd, rest) = args.split_once('<').filter(|(fd, _)| fd.parse::<u32>().is_ok())?;
    if fd == "1" {
        return Some(STDOUT.into());
    }
    let path = Path::new(rest.split_once('>')?.0);
    path.is_absolute().then(|| path.strip_prefix(root).unwrap_or(path).to_owned())
}

impl Syscall {
    /// With the next ones of its name, so many.
    pub(crate) fn and(self, more: usize) -> Syscall {
        Syscall { more, ..self }
    }

    /// Whether this writes the result of the command.
    pub(crate) fn prints_result(&self) -> bool {
        self.file.as_deref() == Some(Path::new(STDOUT))
    }

    /// Runs `call` with `action` (`error=EPERM`, `signal=KILL`) at this call and tells whether it
    /// came to that. Ends it after 20 seconds.
    pub(crate) fn run(&self, node: &Node, call: &Call, action: &str) -> (Outcome, bool) {
        let file = node.path("strace.inject");
        let name = file.display().to_string();
        let trace = format!("trace={}", self.name);
        let last = self.nth + self.more;
        let inject = format!("inject={}:{action}:when={}..{last}", self.name, self.nth);
        let path = self.file.as_ref().map(|path| node.path("").join(path).display().to_string());
        let mut wrapper = Vec::new();
        if let (Some(path), true) = (&path, self.prints_result()) {
            wrapper.extend(["sh", "-c", "\"$@\" >\"$0\"", path]);
        }
        wrapper.extend(["timeout", "20"]);
        if action == "signal=KILL" {
            // What it has started dies with it.
            wrapper.extend(["unshare", "--pid", "--fork", "--kill-child"]);
        }
        // The main thread alone: another one, or a child, would count for itself.
        wrapper.extend(["strace", "-o", &name]);
        wrapper.extend(["-e", &trace, "-e", &inject]);
        if let Some(path) = &path {
            wrapper.extend(["-P", path]);
        }
        let mut outcome = call.clone().under(&wrapper).run();
        if let (Some(path), true) = (&path, self.prints_result()) {
            outcome.stdout = fs::read_to_string(path).unwrap_or_default();
        }
        let text = fs::read(&file).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        (outcome, text.contains("(INJECTED)") || text.contains("killed by SIGKILL"))
    }

    /// For messages.
    pub(crate) fn describe(&self) -> String {
        let Syscall { name, text, nth, thread, .. } = self;
        let text: String = text.chars().take(160).collect();
        format!("thread {thread}, {name} #{nth}: {text}")
    }
}
