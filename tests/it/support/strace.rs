//! Records a plugin's system calls and injects errors and kills at them, from outside with
//! strace(1), so that the executable under test is the released one.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::support::node::{Call, Node, Outcome};

/// System calls of libc, the allocator and the runtime: an injected error would test those.
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

/// The file for stdout when writes to it are injected: strace cannot select a pipe by path.
const STDOUT: &str = "stdout";

/// A system call of a recorded run.
#[derive(Debug, Clone)]
pub(crate) struct Syscall {
    /// The system call's name.
    pub(crate) name: String,
    /// Arguments and result, with descriptors resolved to paths.
    pub(crate) text: String,
    /// The number of calls of this name, and to this file, in this thread so far, including this
    /// one.
    nth: usize,
    /// The number of subsequent calls that get the same injection.
    more: usize,
    /// The thread's index; 0 is the main thread.
    pub(crate) thread: usize,
    /// The file of a write, relative to the node's root if below it. Writes are counted per file,
    /// because the kernel may restart writes to some files, and strace counts each restart.
    file: Option<PathBuf>,
}

/// Fails if strace is not installed.
pub(crate) fn require() {
    let found = std::process::Command::new("strace").arg("-V").output();
    assert!(
        found.is_ok_and(|output| output.status.success()),
        "strace is missing: install the package \"strace\" (make test does)"
    );
}

/// Runs `call` and returns its system calls.
pub(crate) fn record(node: &Node, call: &Call) -> (Outcome, Vec<Syscall>) {
    record_under(node, call, &[])
}

/// As [`record`], with strace under another program.
pub(crate) fn record_under(node: &Node, call: &Call, wrapper: &[&str]) -> (Outcome, Vec<Syscall>) {
    require();
    let file = node.path("strace.record");
    let name = file.display().to_string();
    let strace = ["strace", "-f", "-y", "-s", "200", "-o", &name];
    let outcome = call.clone().under(&[wrapper, &strace].concat()).run();
    (outcome, parse(&file, &node.path("")))
}

/// The cost of a call, independent of other load on the machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    /// The number of system calls.
    pub(crate) calls: usize,
    /// The number of bytes read or received.
    pub(crate) bytes: usize,
}

/// Runs `call`, which must succeed, and returns its cost.
pub(crate) fn cost(node: &Node, call: &Call) -> Cost {
    cost_and_outcome(node, call).0
}

/// As [`cost`], with the outcome.
pub(crate) fn cost_and_outcome(node: &Node, call: &Call) -> (Cost, Outcome) {
    let (outcome, calls) = record(node, call);
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let result = |call: &Syscall| {
        let text = call.text.rsplit_once(" = ")?.1.split(' ').next()?;
        text.parse::<usize>().ok()
    };
    let reads = calls.iter().filter(|call| call.name == "read" || call.name.starts_with("recv"));
    (Cost { calls: calls.len(), bytes: reads.filter_map(result).sum() }, outcome)
}

fn parse(file: &Path, root: &Path) -> Vec<Syscall> {
    let text = String::from_utf8_lossy(&fs::read(file).unwrap()).into_owned();
    let mut threads: Vec<&str> = Vec::new();
    let mut calls: Vec<Syscall> = Vec::new();
    let mut counts: HashMap<(usize, &str, Option<PathBuf>), usize> = HashMap::new();
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
        let mut count = |file: Option<&PathBuf>| {
            let count = counts.entry((thread, name, file.cloned())).or_insert(0);
            *count += 1;
            *count
        };
        let of_name = count(None);
        let nth = if file.is_some() { count(file.as_ref()) } else { of_name };
        let (name, text) = (name.to_owned(), args.to_owned());
        calls.push(Syscall { name, text, nth, more: 0, thread, file });
    }
    calls
}

fn is_name(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

/// The injection points of a recorded run: every call of the main thread, which is a plugin's only
/// thread, from reading stdin to writing the result, inclusive.
pub(crate) fn points(calls: &[Syscall]) -> Vec<Syscall> {
    let is_stdin = |c: &Syscall| c.name == "read" && c.text.starts_with("0<");
    let first = calls.iter().position(is_stdin).expect("stdin is read");
    let last = calls.iter().position(Syscall::prints_result).unwrap_or(calls.len() - 1);
    let ours = |c: &&Syscall| c.thread == 0 && !NOT_OURS.contains(&c.name.as_str()) && !wakes(c);
    calls[first..=last].iter().filter(ours).cloned().collect()
}

/// A write to an eventfd wakes the executor and cannot fail.
fn wakes(syscall: &Syscall) -> bool {
    syscall.text.contains("[eventfd]>, \"")
}

/// The injection points of the main thread that change files.
pub(crate) fn file_changes(calls: &[Syscall]) -> Vec<Syscall> {
    let changes = |c: &&Syscall| match c.name.as_str() {
        "openat" | "open" => c.text.contains("O_CREAT"),
        name => ["rename", "link", "unlink", "symlink", "mkdir", "rmdir", "fsync", "fchmod"]
            .iter()
            .any(|verb| name.strip_prefix(verb).is_some_and(|rest| ["", "at", "at2"].contains(&rest))),
    };
    calls.iter().filter(|c| c.thread == 0).filter(changes).cloned().collect()
}

/// The file of the descriptor in the first argument.
fn file_of(args: &str, root: &Path) -> Option<PathBuf> {
    let (fd, rest) = args.split_once('<').filter(|(fd, _)| fd.parse::<u32>().is_ok())?;
    if fd == "1" {
        return Some(STDOUT.into());
    }
    let path = Path::new(rest.split_once('>')?.0);
    path.is_absolute().then(|| path.strip_prefix(root).unwrap_or(path).to_owned())
}

impl Syscall {
    /// Extends the injection to this number of subsequent calls of the same name.
    pub(crate) fn and(self, more: usize) -> Syscall {
        Syscall { more, ..self }
    }

    /// Whether this call writes the plugin's result.
    pub(crate) fn prints_result(&self) -> bool {
        self.file.as_deref() == Some(Path::new(STDOUT))
    }

    /// Runs `call` with `action` (`error=EPERM`, `signal=KILL`) injected at this system call; also returns whether the
    /// injection took place.
    pub(crate) fn run(&self, node: &Node, call: &Call, action: &str) -> (Outcome, bool) {
        // Child processes are killed together with the plugin.
        let is_kill = action == "signal=KILL";
        self.run_under(node, &if is_kill { call.clone().apart() } else { call.clone() }, action, &[])
    }

    /// As [`Syscall::run`], with strace under another program.
    pub(crate) fn run_under(&self, node: &Node, call: &Call, action: &str, program: &[&str]) -> (Outcome, bool) {
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
        wrapper.extend(program);
        // Traces only the main thread: strace counts the calls of each process and thread
        // separately.
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

    /// A description for messages.
    pub(crate) fn describe(&self) -> String {
        let Syscall { name, text, nth, thread, .. } = self;
        let text: String = text.chars().take(160).collect();
        format!("thread {thread}, {name} #{nth}: {text}")
    }
}
