//! Records a plugin's system calls and injects errors and kills at them, from outside with
//! strace(1), so that the executable under test is the released one.

use std::collections::{BTreeSet, HashMap};
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
    let changes = |c: &&Syscall| match c.verb() {
        "open" => c.text.contains("O_CREAT"),
        verb => ["rename", "link", "unlink", "symlink", "mkdir", "rmdir", "fsync", "fchmod"]
            .contains(&verb),
    };
    calls.iter().filter(|c| c.thread == 0).filter(changes).cloned().collect()
}

/// Runs `call` and all its processes with an injection such as
/// `sendto,sendmsg:error=ENOBUFS:when=3`; also returns the calls at which it took place.
pub(crate) fn inject(node: &Node, call: &Call, injection: &str) -> (Outcome, Vec<Syscall>) {
    require();
    let file = node.path("strace.inject");
    let name = file.display().to_string();
    let trace = format!("trace={}", injection.split(':').next().unwrap());
    let inject = format!("inject={injection}");
    let strace = ["strace", "-f", "-o", &name, "-e", &trace, "-e", &inject];
    let outcome = call.clone().under(&strace).run();
    let mut calls = parse(&file, &node.path(""));
    if injection.contains("signal=KILL") {
        let is_killed = fs::read_to_string(&file).unwrap().contains("killed by SIGKILL");
        let last = calls.pop().filter(|_| is_killed);
        calls = last.into_iter().collect();
    } else {
        calls.retain(|call| call.text.contains("(INJECTED)"));
    }
    (outcome, calls)
}

/// The names of the calls at which something was injected. Their number depends on the machine: a
/// sysctl that has its value already is not written, a kernel answers in more datagrams, a loader
/// opens other files.
#[derive(Debug, Default)]
pub(crate) struct Hits(BTreeSet<String>);

impl<'a> Extend<&'a Syscall> for Hits {
    fn extend<T: IntoIterator<Item = &'a Syscall>>(&mut self, calls: T) {
        for call in calls {
            let requests = if call.verb() == "send" { call.messages() } else { Vec::new() };
            if requests.is_empty() {
                self.0.insert(call.verb().to_owned());
            }
            self.0.extend(requests);
        }
    }
}

impl Hits {
    /// Asserts that a call of each of these names was hit: a system call ([`Syscall::verb`]), or a
    /// request to the kernel such as `RTM_NEWLINK`.
    #[track_caller]
    pub(crate) fn assert_include(&self, names: &[&str]) {
        let missing: Vec<_> = names.iter().filter(|name| !self.0.contains(**name)).collect();
        println!("hit: {:?}", self.0);
        assert!(missing.is_empty(), "not at {missing:?}, only at {:?}", self.0);
    }
}

/// The objects of rtnetlink and of `nf_tables` in the order of their message types.
const RTM_OBJECTS: [&str; 8] =
    ["LINK", "ADDR", "ROUTE", "NEIGH", "RULE", "QDISC", "TCLASS", "TFILTER"];
const NFT_OBJECTS: [&str; 5] = ["TABLE", "CHAIN", "RULE", "SET", "SETELEM"];

/// The name of a netlink message type as strace prints it: as a number if it does not know the
/// type, or if the socket is of another namespace. Newer kernels delete with `NFT_MSG_DESTROY..`,
/// which is `NFT_MSG_DEL..` here.
fn message_name(word: &str) -> Option<String> {
    let (subsystem, kind) = word.rsplit_once('|').unwrap_or(("", word));
    let Some(number) = kind.strip_prefix("0x") else {
        let is_request = ["RTM_", "NFT_MSG_"].iter().any(|family| kind.starts_with(family));
        return is_request.then(|| kind.replace("DESTROY", "DEL"));
    };
    let number = usize::from_str_radix(number, 16).ok()?;
    let nft = if subsystem == "NFNL_SUBSYS_NFTABLES<<8" {
        Some(number)
    } else {
        number.checked_sub(0xa00)
    };
    let (family, verb, objects, object): (_, _, &[&str], _) = match nft {
        Some(nft @ 0..15) => ("NFT_MSG", ["NEW", "GET", "DEL"][nft % 3], &NFT_OBJECTS, nft / 3),
        Some(nft @ 26..31) => ("NFT_MSG", "DEL", &NFT_OBJECTS, nft - 26),
        None if (16..256).contains(&number) => {
            ("RTM", ["NEW", "DEL", "GET", "SET"][number % 4], &RTM_OBJECTS, number / 4 - 4)
        }
        _ => return None,
    };
    let object = objects.get(object).copied().unwrap_or("_OTHER");
    Some(format!("{family}_{verb}{object}"))
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

    /// The name without what differs between C libraries: glibc opens with openat(2), forks with
    /// clone(2), and musl with open(2) and fork(2).
    pub(crate) fn verb(&self) -> &str {
        match self.name.as_str() {
            "clone" | "clone3" | "vfork" => "fork",
            "pwrite64" => "write",
            "recvfrom" | "recvmsg" => "recv",
            "sendto" | "sendmsg" => "send",
            name => ["at2", "at"]
                .iter()
                .find_map(|suffix| name.strip_suffix(suffix))
                .filter(|verb| {
                    ["open", "rename", "link", "unlink", "symlink", "mkdir", "fchmod"]
                        .contains(verb)
                })
                .unwrap_or(name),
        }
    }

    /// The types of its netlink messages, and those of the requests that they answer.
    pub(crate) fn messages(&self) -> Vec<String> {
        let types = self.text.split("nlmsg_type=").skip(1);
        let words: Vec<&str> =
            types.filter_map(|rest| rest.split([',', ' ', '}']).next()).collect();
        // The number of NFNL_MSG_BATCH_BEGIN is that of RTM_NEWLINK.
        let is_of_nftables = words.iter().any(|word| word.starts_with("0xa") && word.len() == 5);
        let words = words.iter().filter(|word| !(is_of_nftables && word.len() == 4));
        words.filter_map(|word| message_name(word)).collect()
    }

    /// Whether this call writes the plugin's result.
    pub(crate) fn prints_result(&self) -> bool {
        self.file.as_deref() == Some(Path::new(STDOUT))
    }

    /// Runs `call` with `action` (`error=EPERM`, `signal=KILL`) injected at this system call; also
    /// returns whether the injection took place.
    pub(crate) fn run(&self, node: &Node, call: &Call, action: &str) -> (Outcome, bool) {
        // Child processes are killed together with the plugin.
        let is_kill = action == "signal=KILL";
        self.run_under(
            node,
            &if is_kill { call.clone().apart() } else { call.clone() },
            action,
            &[],
        )
    }

    /// As [`Syscall::run`], with strace under another program.
    pub(crate) fn run_under(
        &self,
        node: &Node,
        call: &Call,
        action: &str,
        program: &[&str],
    ) -> (Outcome, bool) {
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
