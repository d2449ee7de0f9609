//! A test's node: a private host namespace, a directory of links to the executable, a state
//! directory; and containers.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Write};
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use cnibox::testing::netns::Netns;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) use cnibox_tests::cnibox as executable;

use crate::lane;
pub(crate) use crate::support::snapshot::{Snapshot, assert_unchanged};

/// Every version of the specification.
pub(crate) const VERSIONS: [&str; 7] =
    ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// A version of each kind: without interfaces in results; with CHECK and a `prevResult` for DEL;
/// with GC and STATUS. Tests of what a version changes only in the text of results use these.
pub(crate) const MILESTONES: [&str; 3] = ["0.2.0", "0.4.0", "1.1.0"];

/// The timeout of a call including its child processes: in the VM, some calls take half a minute
/// under strace.
const LIMIT: Duration = Duration::from_secs(180);

/// A private host, bound to the thread that created it.
pub(crate) struct Node {
    dir: TempDir,
}

impl Node {
    /// Moves the calling thread into a new namespace with `lo` up and an empty `/run/cni`.
    pub(crate) fn new() -> Node {
        lane::begin_test();
        let apart = CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS;
        unshare(apart).expect("run as root or under `unshare -rn`");
        let node = Node { dir: tempfile::tempdir().unwrap() };
        fs::create_dir(node.bin()).unwrap();
        for applet in cnibox::testing::APPLETS {
            symlink(executable(), node.bin().join(applet.name)).unwrap();
        }
        let unset = None::<&str>;
        mount(unset, "/", unset, MsFlags::MS_REC | MsFlags::MS_PRIVATE, unset).unwrap();
        for (dir, mode) in [("/run/cni", 755), ("/var/lib/cni", 755), ("/run/cnibox", 700)] {
            fs::create_dir_all(dir).unwrap();
            let mode = format!("mode={mode}");
            mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::empty(), Some(mode.as_str()))
                .unwrap();
        }
        crate::support::netlink::set_lo_up();
        node
    }
    pub(crate) fn bin(&self) -> PathBuf {
        self.dir.path().join("bin")
    }

    /// A path below the node's own directory, for leases and other test files.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A path below the node's own `/run/cni`: plugins believe state in few other places.
    #[expect(clippy::unused_self, reason = "it is mounted for the calling thread")]
    pub(crate) fn state(&self, name: &str) -> PathBuf {
        Path::new("/run/cni").join(name)
    }

    /// Writes an executable shell script to the plugin directory.
    pub(crate) fn script(&self, name: &str, text: &str) {
        write_executable(&self.bin().join(name), &format!("#!/bin/sh\n{text}\n"));
    }

    /// Runs a command line on the host, which must succeed.
    #[expect(clippy::unused_self, reason = "the host is the calling thread's namespace")]
    pub(crate) fn sh(&self, line: &str) -> String {
        sh(line)
    }

    /// Runs `ip -j ...` on the host.
    #[expect(clippy::unused_self, reason = "the host is the calling thread's namespace")]
    pub(crate) fn ip(&self, args: &str) -> Value {
        parse_ip(&sh(&format!("ip -j {args}")))
    }

    /// A call of a plugin of this node.
    pub(crate) fn call(&self, plugin: &str, verb: &str) -> Call {
        let env = [
            ("CNI_COMMAND", verb.to_owned()),
            ("CNI_CONTAINERID", "container-1".to_owned()),
            ("CNI_IFNAME", "eth0".to_owned()),
            ("CNI_PATH", self.bin().display().to_string()),
        ];
        let env = env.into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        Call::to(self.bin().join(plugin), env)
    }

    /// A call of a command-line tool, with arguments and without CNI variables.
    pub(crate) fn tool(&self, name: &str, args: &[&str]) -> Call {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Call { args, ..Call::to(self.bin().join(name), BTreeMap::new()) }
    }

    /// A call of `cnibox`.
    pub(crate) fn cnibox(&self, args: &[&str]) -> Call {
        self.tool("cnitool", args).program(executable())
    }

    /// A host-local configuration with one range per subnet and its leases in this node.
    pub(crate) fn host_local(&self, subnets: &[&str]) -> Value {
        let ranges: Vec<_> = subnets.iter().map(|s| json!([{"subnet": s}])).collect();
        json!({"type": "host-local", "dataDir": self.path("leases"), "ranges": ranges})
    }

    /// The addresses leased in a network, sorted, of all containers.
    pub(crate) fn leases(&self, network: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path("leases").join(network)) else {
            return Vec::new();
        };
        let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut ips: Vec<_> = names.filter(|name| name.parse::<IpAddr>().is_ok()).collect();
        ips.sort();
        ips
    }

    /// All host state that a plugin might change, except permitted remainders: see [`Snapshot`].
    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot::take(self)
    }
}

/// The lowest descriptor of a container's namespace. The other files of the process have lower ones,
/// also while many calls are started at once.
pub(crate) static FIRST_DESCRIPTOR: AtomicI32 = AtomicI32::new(300);
/// After so many containers a descriptor, which is a part of the path, is used again.
pub(crate) static DESCRIPTORS: AtomicI32 = AtomicI32::new(700);

/// A container: a namespace that lives as long as this value.
pub(crate) struct Container {
    netns: Netns,
    /// The descriptor that the path leads to.
    _file: OwnedFd,
}

impl Drop for Container {
    fn drop(&mut self) {
        if !lane::VLAN_ENDS_WITH_MASTER.is_here() {
            let names = "ip -o link show type vlan | sed 's/^[0-9]*: \\([^@]*\\)@.*/\\1/'";
            self.try_sh(&format!("{names} | xargs -r -n 1 ip link delete"));
        }
    }
}

impl Container {
    /// The number of the descriptor is in the path. The kernel gives the lowest free one to the
    /// next file, which may be the namespace of another test's node: a DEL after the end of
    /// this container must not find it.
    pub(crate) fn new() -> Container {
        static NEXT: AtomicI32 = AtomicI32::new(0);
        let unnamed = fs::File::open(Netns::create_unnamed().unwrap().path());
        let first = FIRST_DESCRIPTOR.load(Ordering::Relaxed);
        let count = DESCRIPTORS.load(Ordering::Relaxed);
        let number = first + NEXT.fetch_add(1, Ordering::Relaxed).rem_euclid(count);
        let file = rustix::io::fcntl_dupfd_cloexec(unnamed.unwrap(), number).unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        Container { netns: Netns::open(Path::new(&path)).unwrap(), _file: file }
    }

    /// The namespace's path, for `CNI_NETNS`. It dangles after the container is dropped.
    pub(crate) fn path(&self) -> String {
        self.netns.path().display().to_string()
    }

    /// Runs a command line in the container, which must succeed.
    pub(crate) fn sh(&self, line: &str) -> String {
        self.run(|| sh(line))
    }

    /// Whether a command line succeeds in the container.
    pub(crate) fn try_sh(&self, line: &str) -> bool {
        self.run(|| shell(line).output().is_ok_and(|output| output.status.success()))
    }

    /// Runs `ip -j ...` in the container.
    pub(crate) fn ip(&self, args: &str) -> Value {
        parse_ip(&self.sh(&format!("ip -j {args}")))
    }

    /// Whether a single ping is answered within two seconds.
    pub(crate) fn pings(&self, target: &str) -> bool {
        self.try_sh(&format!("ping -n -c 1 -W 2 {target}"))
    }

    /// Sets a kernel parameter in the container.
    pub(crate) fn set_sysctl(&self, key: &str, value: &str) {
        self.run(|| set_sysctl(key, value));
    }

    /// The value of a kernel parameter in the container.
    pub(crate) fn sysctl(&self, key: &str) -> String {
        let path = format!("/proc/sys/{key}");
        self.netns.run_inside(|| fs::read_to_string(path).unwrap().trim().to_owned()).unwrap()
    }

    /// Runs code in the container on a separate thread; sockets that it opens stay in the
    /// namespace.
    pub(crate) fn run<T: Send>(&self, code: impl FnOnce() -> T + Send) -> T {
        self.netns.run_inside(code).unwrap()
    }

    /// All state in the container that a plugin might change.
    pub(crate) fn snapshot(&self, node: &Node) -> Snapshot {
        self.run(|| Snapshot::take(node))
    }
}

/// A call of a plugin, in builder style.
#[derive(Clone)]
pub(crate) struct Call {
    program: PathBuf,
    args: Vec<String>,
    env: BTreeMap<String, String>,
    stdin: Vec<u8>,
    wrapper: Vec<String>,
    is_apart: bool,
}

impl Call {
    fn to(program: PathBuf, env: BTreeMap<String, String>) -> Call {
        Call {
            program,
            args: Vec::new(),
            env,
            stdin: Vec::new(),
            wrapper: Vec::new(),
            is_apart: false,
        }
    }

    /// The configuration on standard input.
    pub(crate) fn conf(mut self, conf: &Value) -> Call {
        self.stdin = conf.to_string().into_bytes();
        self
    }

    /// Standard input, byte for byte.
    pub(crate) fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Call {
        self.stdin = bytes.into();
        self
    }

    /// Sets `CNI_NETNS`.
    pub(crate) fn netns(self, path: &str) -> Call {
        self.env("CNI_NETNS", path)
    }

    /// Sets `CNI_CONTAINERID`.
    pub(crate) fn id(self, id: &str) -> Call {
        self.env("CNI_CONTAINERID", id)
    }

    /// Sets `CNI_IFNAME`.
    pub(crate) fn ifname(self, name: &str) -> Call {
        self.env("CNI_IFNAME", name)
    }

    /// Sets an environment variable.
    pub(crate) fn env(mut self, key: &str, value: &str) -> Call {
        self.env.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Removes an environment variable.
    pub(crate) fn without(mut self, key: &str) -> Call {
        self.env.remove(key);
        self
    }

    /// Runs the plugin as `$0` of a shell script in a new mount namespace.
    pub(crate) fn in_script(self, script: &str) -> Call {
        self.under(&["unshare", "-m", "sh", "-c", script])
    }

    /// Runs the plugin under another program, such as `strace`, which gets the plugin as last
    /// argument.
    pub(crate) fn under(mut self, wrapper: &[&str]) -> Call {
        self.wrapper = wrapper.iter().map(|arg| (*arg).to_owned()).collect();
        self
    }

    /// Runs the call as process 1 of a PID namespace, whose other processes are killed when it
    /// ends. Unlike unshare(1) this is no process more.
    pub(crate) fn apart(mut self) -> Call {
        self.is_apart = true;
        self
    }

    /// Replaces the executable.
    pub(crate) fn program(mut self, path: impl Into<PathBuf>) -> Call {
        self.program = path.into();
        self
    }

    /// The command, for tests that run it themselves.
    pub(crate) fn command(&self) -> Command {
        let mut words = self.wrapper.iter().map(AsRef::as_ref).chain([self.program.as_os_str()]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).args(&self.args);
        for (key, _) in std::env::vars_os() {
            if key.to_string_lossy().starts_with("CNI_") {
                command.env_remove(key);
            }
        }
        command.envs(&self.env);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0);
        command
    }

    /// Standard input, for tests that run the command themselves.
    pub(crate) fn input(&self) -> &[u8] {
        &self.stdin
    }

    /// Runs the call and waits for its end.
    pub(crate) fn run(&self) -> Outcome {
        self.try_run().unwrap()
    }

    /// Starts the process and writes its input.
    pub(crate) fn spawn(&self) -> std::io::Result<Child> {
        let mut child = self.start()?;
        // A plugin may exit without reading its input.
        drop(child.stdin.take().unwrap().write_all(&self.stdin));
        Ok(child)
    }

    /// Retries while the executable is busy: a child of another test, forked meanwhile, may still
    /// hold the descriptor with which the test wrote the executable.
    fn start(&self) -> std::io::Result<Child> {
        let deadline = Instant::now() + Duration::from_secs(5);
        // A thread that has done this cannot start threads.
        let spawn_apart = || {
            unshare(CloneFlags::CLONE_NEWPID)?;
            self.command().spawn()
        };
        loop {
            let started = if self.is_apart {
                thread::scope(|scope| scope.spawn(spawn_apart).join().unwrap())
            } else {
                self.command().spawn()
            };
            match started {
                Err(busy)
                    if busy.kind() == ErrorKind::ExecutableFileBusy
                        && Instant::now() < deadline =>
                {
                    thread::sleep(Duration::from_millis(5));
                }
                started => return started,
            }
        }
    }

    /// As [`Call::run`], for an executable that may fail to start.
    pub(crate) fn try_run(&self) -> std::io::Result<Outcome> {
        let child = self.spawn()?;
        let group = Pid::from_raw(child.id().cast_signed());
        let (done, waiting) = mpsc::channel::<()>();
        let watchdog = thread::spawn(move || {
            if waiting.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
                killpg(group, Signal::SIGKILL).unwrap_or_default();
            }
        });
        let output = child.wait_with_output();
        drop(done);
        watchdog.join().unwrap();
        let output = output?;
        Ok(Outcome {
            status: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        })
    }

    /// Runs the call, which must succeed and print a result.
    #[track_caller]
    pub(crate) fn result(&self) -> Value {
        let outcome = self.run();
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        serde_json::from_str(&outcome.stdout).unwrap_or_else(|e| panic!("{e}: {outcome:?}"))
    }

    /// Runs the call, which must find something, with exit status 1, and returns its JSON.
    #[track_caller]
    pub(crate) fn found(&self) -> Value {
        let outcome = self.run();
        assert_eq!(outcome.status, Some(1), "{outcome:?}");
        serde_json::from_str(&outcome.stdout).unwrap_or_else(|e| panic!("{e}: {outcome:?}"))
    }

    /// Runs the call, which must succeed and print nothing on stdout.
    #[track_caller]
    pub(crate) fn ok(&self) {
        let outcome = self.run();
        assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(0), ""), "{outcome:?}");
    }

    /// Runs the call, which must succeed; returns its output, byte for byte.
    #[track_caller]
    pub(crate) fn printed(&self) -> String {
        let outcome = self.run();
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        outcome.stdout
    }

    /// Runs the call, which must fail with an error object.
    #[track_caller]
    pub(crate) fn error(&self) -> Refusal {
        let outcome = self.run();
        assert_eq!(outcome.status, Some(1), "{outcome:?}");
        let error: Value =
            serde_json::from_str(&outcome.stdout).unwrap_or_else(|e| panic!("{e}: {outcome:?}"));
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        Refusal {
            code: error["code"].as_u64().unwrap_or_else(|| panic!("no code: {outcome:?}")),
            msg: text("msg"),
            details: text("details"),
            version: text("cniVersion"),
        }
    }
}
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) code: u64,
    pub(crate) msg: String,
    pub(crate) details: String,
    pub(crate) version: String,
}

impl Refusal {
    /// Code and message, for comparison.
    pub(crate) fn brief(&self) -> (u64, &str) {
        (self.code, &self.msg)
    }
}

/// Waits at most a minute until `done`: for the kernel's asynchronous work, such as the deletion of
/// a namespace, which takes long under emulation.
#[track_caller]
pub(crate) fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a file or directory exists.
pub(crate) fn exists(path: impl AsRef<Path>) -> bool {
    path.as_ref().symlink_metadata().is_ok()
}

/// Sets a kernel parameter in the calling thread's namespace.
pub(crate) fn set_sysctl(key: &str, value: &str) {
    fs::write(format!("/proc/sys/{key}"), value).unwrap();
}

/// A command line; without a shell, which takes as long as `ip` itself, if it is only words.
fn shell(line: &str) -> Command {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || " ./:_@%+,-".contains(c);
    let mut words = line.split_whitespace();
    if let Some(program) = words.next().filter(|_| line.chars().all(is_plain)) {
        let mut command = Command::new(program);
        command.args(words);
        return command;
    }
    let mut command = Command::new("sh");
    command.args(["-c", line]);
    command
}

/// Writes an executable file by another process: a child that another thread of this one starts
/// meanwhile would have the file open for writing, and nobody could execute it (`ETXTBSY`).
pub(crate) fn write_executable(path: &Path, text: &str) {
    let mut sh = Command::new("sh");
    sh.args(["-c", "cat >\"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
    let mut child = sh.spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "{}", path.display());
}

#[track_caller]
fn sh(line: &str) -> String {
    let output = shell(line).output().unwrap_or_else(|error| panic!("{line}: {error}"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

fn parse_ip(text: &str) -> Value {
    if text.trim().is_empty() { json!([]) } else { serde_json::from_str(text).unwrap() }
}

/// A tool that runs until a signal; killed if the test fails.
pub(crate) struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl Running {
    pub(crate) fn start(call: &Call) -> Running {
        Running::start_with(call, Stdio::piped())
    }

    pub(crate) fn start_with(call: &Call, stderr: Stdio) -> Running {
        let mut command = call.command();
        Running(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).spawn().unwrap())
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// The path of the executable; empty for a moment of execve(2).
    pub(crate) fn executable(&self) -> String {
        let path = fs::read_link(format!("/proc/{}/exe", self.id()));
        path.map_or(String::new(), |path| path.display().to_string())
    }

    /// Asserts that a single SIGTERM ends the tool with status 0.
    #[track_caller]
    pub(crate) fn ends(mut self) {
        kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                assert_eq!(status.code(), Some(0));
                return;
            }
            assert!(Instant::now() < deadline, "still there after SIGTERM");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether the tool sleeps for a second, as opposed to waiting for a processor.
    pub(crate) fn sleeps(&self) -> bool {
        let before = self.ticks();
        thread::sleep(Duration::from_secs(1));
        let tasks = fs::read_dir(format!("/proc/{}/task", self.0.id())).unwrap();
        let states = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("stat")));
        self.ticks() == before
            && states.into_iter().all(|stat| stat.is_ok_and(|stat| stat.contains(") S ")))
    }

    /// The processor time so far, in clock ticks.
    pub(crate) fn ticks(&self) -> u64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }
}
