//! One node as it is used for an hour, at random: workers attach containers to many networks and
//! end them in every way, while GC, doctor, `repair --watch` and STATUS run, rules are flushed,
//! calls are killed, the disk is full and clocks jump. At the end nothing is left, each failure had
//! a reason, and neither memory nor files have grown.
//!
//! `make soak` runs the hour: `SEED`, `MINUTES` and `WORKERS` are its environment variables. The
//! seed decides what each thread does, not when the kernel lets it. Without `MINUTES`, in the
//! suite, a soak takes half a minute.
//!
//! | module | |
//! | --- | --- |
//! | `networks` | the networks, and the devices for them |
//! | `worker` | the life of an attachment |
//! | `beside` | what runs beside the workers |
//! | `report` | counters, and excuses of failures |
//!
//! **Clocks.** A wall clock cannot be namespaced, and that of the machine is not set: instead,
//! modification times of state files jump by days, back and forth, as if the clock had been set
//! between two calls; and some calls run in a time namespace, whose clocks since boot are days
//! ahead. This shows that no file is believed for its age. It does not show what a process does
//! whose clock jumps while it runs, nor a lease of DHCP that expires while the node is suspended:
//! the daemon has one clock for the whole soak.

mod beside;
mod networks;
mod report;
mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs::File;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Mutex, RwLock};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use self::beside::{Sample, growth};
use self::networks::{GROUPS, Network};
use self::report::{Report, Trouble};
use crate::lane::{self, needs};
use crate::support::node::{
    Call, Container, DESCRIPTORS, FIRST_DESCRIPTOR, Node, Running, Snapshot, eventually, exists,
};
use crate::support::random::Random;

/// The size of the two file systems with state.
const DISK: &str = "32m";

/// How long, how many at a time, and the number from which all chance is derived.
struct Plan {
    seed: u64,
    duration: Duration,
    workers: usize,
}

/// An attachment that gets no DEL.
struct Abandoned {
    id: String,
    _container: Option<Container>,
}

/// What a runtime knows of a network.
#[derive(Default)]
struct Known {
    valid: BTreeSet<String>,
    abandoned: Vec<Abandoned>,
}

/// What the threads of a soak share.
struct Soak<'n> {
    node: &'n Node,
    plan: Plan,
    begin: Instant,
    networks: Vec<Network>,
    /// By network. A runtime begins no ADD while its GC runs, which would not know of it.
    known: BTreeMap<&'static str, (RwLock<()>, Mutex<Known>)>,
    next_port: AtomicU16,
    are_workers_done: AtomicBool,
    report: Report,
}

impl<'n> Soak<'n> {
    fn new(node: &'n Node, plan: Plan) -> Soak<'n> {
        let networks = networks::all(node, (plan.workers / 6).max(2));
        let known = networks.iter().map(|network| (network.name, Default::default())).collect();
        Soak {
            node,
            plan,
            begin: Instant::now(),
            networks,
            known,
            next_port: AtomicU16::new(0),
            are_workers_done: AtomicBool::new(false),
            report: Report::new(),
        }
    }

    fn are_workers_done(&self) -> bool {
        self.are_workers_done.load(Ordering::Relaxed)
    }

    fn is_over(&self) -> bool {
        self.begin.elapsed() > self.plan.duration
    }

    /// A random generator for each thread.
    fn random(&self, thread: usize) -> Random {
        let thread = u64::try_from(thread).unwrap() + 1;
        Random((self.plan.seed ^ thread.wrapping_mul(0x9e37_79b9_7f4a_7c15)).max(1))
    }

    /// A port of the host that was not used for a long time.
    fn next_port(&self) -> u16 {
        10_000 + self.next_port.fetch_add(1, Ordering::Relaxed) % 50_000
    }

    fn cnitool(&self, args: &[&str]) -> Call {
        self.on_directory(&[&["cnitool"], args].concat())
    }

    /// A tool that reads the configurations.
    fn on_directory(&self, args: &[&str]) -> Call {
        let directory = self.node.path("net.d").display().to_string();
        self.tool(&[args, &["--conf-dir", &directory]].concat())
    }

    fn tool(&self, args: &[&str]) -> Call {
        self.node.cnibox(args).env("CNI_PATH", &self.node.bin().display().to_string())
    }

    /// A runtime has the attachment in its list from before ADD on.
    fn register(&self, network: &Network, id: &str) {
        let (gc, known) = &self.known[network.name];
        let _no_gc = gc.read().unwrap();
        known.lock().unwrap().valid.insert(id.to_owned());
        if network.takes_the_last() {
            self.report.begin(Trouble::NoAddress);
        }
    }

    fn forget(&self, network: &Network, id: &str) {
        self.known[network.name].1.lock().unwrap().valid.remove(id);
        self.released(network);
    }

    fn released(&self, network: &Network) {
        if network.gives_the_last_back() {
            self.report.end(Trouble::NoAddress);
        }
    }

    fn abandon(&self, network: &Network, abandoned: Abandoned) {
        let mut known = self.known[network.name].1.lock().unwrap();
        known.valid.remove(&abandoned.id);
        known.abandoned.push(abandoned);
    }

    /// The GC of a runtime, with the attachments that it has not forgotten.
    fn collect(&self, network: &Network) {
        let (gc, known) = &self.known[network.name];
        let _no_add = gc.write().unwrap();
        let (valid, abandoned) = {
            let mut known = known.lock().unwrap();
            (known.valid.clone(), std::mem::take(&mut known.abandoned))
        };
        let kept: Vec<String> =
            valid.iter().map(|id| format!("{id}:{}", network.ifname())).collect();
        let mut args = vec!["gc", network.name];
        if kept.is_empty() {
            args.push("--keep-none");
        }
        for kept in &kept {
            args.extend(["--keep", kept]);
        }
        let begin = Instant::now();
        let outcome = self.cnitool(&args).run();
        if self.report.call(("GC", network.name), "-", begin, &outcome) {
            for _ in abandoned {
                self.released(network);
            }
        } else {
            known.lock().unwrap().abandoned.extend(abandoned);
        }
    }

    /// Creates what stays for good: bridges, chains, tables, directories.
    fn warm_up(&self) {
        for network in &self.networks {
            networks::provide(self.node, network);
            worker::Attached::new(self, network, (200, 0)).come_and_go();
        }
    }

    /// What names an attachment of a worker: rules, leases, records, results. A journal of leases
    /// has lines of the past.
    fn names_left(&self) -> String {
        let line = "{ nft list ruleset; find /var/lib/cni /run/cni; \
                    grep -r . /var/lib/cni --exclude-dir=.cnibox; } 2> /dev/null | \
                    grep -E 'w[0-9]+-r[1-9][0-9]*' || true";
        // The child process of a DEL may still be deleting.
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let named = self.node.sh(line);
            if named.is_empty() || Instant::now() > deadline {
                return named;
            }
            thread::sleep(Duration::from_millis(200));
        }
    }

    /// Asserts that all is as before, at the latest when the kernel has deleted what it has to.
    fn assert_restored(&self, before: &Snapshot) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut after = self.snapshot();
        while after != *before && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(200));
            after = self.snapshot();
        }
        let difference = before.difference(&after);
        let fates = self.report.fates_in(&difference);
        assert!(after == *before, "left behind:\n{difference}\n{fates}");
    }

    /// Everything that plugins may leave, except what was learnt: the order of rules follows that
    /// of ADDs.
    fn snapshot(&self) -> Snapshot {
        let node = self.node;
        let mut rules = Vec::new();
        let mut blocks: Vec<&str> = Vec::new();
        let text = node.sh("nft -s list ruleset");
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            if line == "}" {
                blocks.pop();
                continue;
            }
            // nft names this target only in the first family that has it.
            let rule = line.replace(" counter masquerade", " counter");
            rules.push([blocks.join(" "), rule].join(" "));
            if line.ends_with('{') {
                blocks.push(line);
            }
        }
        rules.sort();
        let own = std::process::id();
        let files = "find /var/lib/cni /run -type f ! -path '/run/cnibox/*' -o -type d | sort";
        let programs = format!(
            "for p in /proc/[0-9]*; do [ $p = /proc/{own} ] || [ $p = /proc/$$ ] || \
             [ \"$(readlink $p/ns/net)\" != \"$(readlink /proc/self/ns/net)\" ] || cat $p/comm; \
             done 2> /dev/null | grep -vx 'readlink\\|cat\\|grep\\|sort\\|sh' | sort"
        );
        node.snapshot()
            .with("rules", rules.join("\n"))
            .with("files", node.sh(files))
            .with("mounts", node.sh("cut -d ' ' -f 5 /proc/thread-self/mountinfo | sort"))
            .with("processes", node.sh(&programs))
    }
}

/// File systems of a limited size, so that they can be full, and of this node alone.
fn limit_the_disk(node: &Node) {
    node.sh(&format!("mount -o remount,size={DISK} /var/lib/cni"));
    node.sh(&format!("mount -t tmpfs -o size={DISK},mode=755 tmpfs /run"));
    node.sh("mkdir -m 755 /run/cni && mkdir -m 700 /run/cnibox");
}

/// The server of leases on `br-dhcp`.
fn serve_leases(node: &Node) -> Running {
    let leases = format!("--dhcp-leasefile={}", node.path("dnsmasq.leases").display());
    let args = [
        "--keep-in-foreground",
        "--log-facility=-",
        "--conf-file=/dev/null",
        "--pid-file=",
        "--port=0",
        "--interface=br-dhcp",
        "--bind-interfaces",
        "--no-ping",
        "--dhcp-authoritative",
        "--dhcp-range=192.168.1.5,192.168.1.250,2m",
        &leases,
    ];
    Running::start_with(&node.tool("dnsmasq", &args).program("dnsmasq"), log(node, "dnsmasq"))
}

/// A log beside the state.
fn log(node: &Node, name: &str) -> Stdio {
    File::create(node.path(&format!("{name}.log"))).unwrap().into()
}

/// Runs all threads until the end of the soak.
fn run(soak: &Soak<'_>, daemons: &[(&'static str, u32)]) -> Vec<Sample> {
    thread::scope(|scope| {
        for group in 0..GROUPS {
            scope.spawn(move || soak.ask_for_status(group));
        }
        scope.spawn(|| soak.collect_in_turn());
        scope.spawn(|| soak.consult_doctor());
        scope.spawn(|| soak.fill_the_disk());
        scope.spawn(|| soak.set_times());
        let measuring = scope.spawn(|| soak.measure(daemons));
        let flushing = scope.spawn(|| soak.flush());
        let work = |number| scope.spawn(move || worker::work(soak, number));
        let workers: Vec<_> = (0..soak.plan.workers).map(work).collect();
        let ends: Vec<_> =
            workers.into_iter().chain([flushing]).map(ScopedJoinHandle::join).collect();
        soak.are_workers_done.store(true, Ordering::Relaxed);
        ends.into_iter().for_each(Result::unwrap);
        measuring.join().unwrap()
    })
}

/// The whole scenario.
fn soak(plan: Plan) {
    let Plan { seed, duration, workers } = plan;
    let minutes = duration.as_secs_f64() / 60.0;
    println!("soak: make soak SEED={seed} MINUTES={minutes:.1} WORKERS={workers}");
    // Pipes of all workers; and no container has the path of an attachment that waits for GC.
    let count = i32::try_from(workers).unwrap();
    FIRST_DESCRIPTOR.fetch_max(16 * count, Ordering::Relaxed);
    DESCRIPTORS.fetch_max(45 * count, Ordering::Relaxed);
    let node = Node::new();
    limit_the_disk(&node);
    let mut soak = Soak::new(&node, plan);
    networks::prepare(&node, &soak.networks);
    let _server = serve_leases(&node);
    let [watch, daemon] = [&["repair", "--watch"][..], &["dhcp", "daemon"]];
    let watch = Running::start_with(&soak.tool(watch), log(&node, "watch"));
    let daemon = Running::start_with(&soak.tool(daemon), log(&node, "daemon"));
    eventually("the daemon does not listen", || exists("/run/cni/dhcp.sock"));
    soak.warm_up();
    let (before, files) = (soak.snapshot(), soak.count_files());
    soak.begin = Instant::now();
    soak.report.begin(Trouble::OtherCalls);
    let samples = run(&soak, &[("repair --watch", watch.id()), ("dhcp daemon", daemon.id())]);
    let (medians, grown) = growth(&samples, duration);
    soak.networks.iter().for_each(|network| soak.collect(network));
    soak.collect_the_dead();
    println!(
        "soak: seed {seed}, {minutes:.1} minutes, {workers} workers\n{}{medians}",
        soak.report.text()
    );
    let named = soak.names_left();
    soak.warm_up();
    soak.assert_restored(&before);
    let left = soak.count_files();
    watch.ends();
    daemon.ends();
    let faults = soak.report.faults();
    assert!(named.is_empty(), "left of attachments:\n{named}\n{}", soak.report.fates_in(&named));
    assert!(left[1] <= files[1] + 64, "{files:?} files and kB became {left:?}");
    assert!(grown.is_empty(), "grown: {grown:#?}");
    assert!(faults.is_empty(), "without a reason: {faults:#?}");
}

/// What the environment says, or a short soak for the suite.
fn asked() -> Plan {
    let number = |name| env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    Plan {
        seed: number("SEED").unwrap_or(1),
        duration: Duration::from_secs(number("MINUTES").map_or(15, |minutes| 60 * minutes)),
        workers: number("WORKERS").map_or(8, |workers| usize::try_from(workers).unwrap()),
    }
}

#[test]
fn everything_at_once_leaves_nothing() {
    soak(asked());
}

/// The same with the plugins whose links some kernels lack.
#[test]
fn everything_and_more_links_leave_nothing() {
    needs!(lane::DUMMY, lane::VRF, lane::VLAN, lane::IPVLAN, lane::BOND);
    soak(asked());
}
