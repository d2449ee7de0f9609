//! SIGKILL and errors at every state-changing system call of ADD, DEL and GC, for twenty chains of
//! plugins; then the runtime's clean-up: DEL with and without `prevResult`, with and without the
//! namespace, and GC. Nothing may leak, no failure may be permanent, and meanwhile another
//! container of the network is added and deleted.
//!
//! The complete sweep takes more than an hour (`make test-long`); `make test` runs a sample of each
//! chain. Findings are collected and printed, and the node is recreated after each finding.

mod chains;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::faults::{changes, has_effect, quick};
use crate::support::net::merged;
use crate::support::node::{Call, Container, Node, Outcome, Snapshot, eventually};
use crate::support::strace::{self, Syscall};

/// The number of runs per chain in `make test`.
const SAMPLE: usize = 6;
/// The number of attempts of a runtime.
const TRIES: usize = 3;
/// The injected errors, in turn.
const ERRORS: [&str; 5] = ["EIO", "ENOSPC", "EPERM", "ENOBUFS", "EINTR"];
/// Container ids; the bystander stays attached, the scratch container is used once.
const IDS: [&str; 4] = ["bystander", "victim", "other", "scratch"];
const BYSTANDER: usize = 0;
const VICTIM: usize = 1;
const OTHER: usize = 2;
const SCRATCH: usize = 3;

/// The kernel parameters that plugins set, by file or directory of `/proc/sys/net`.
const SYSCTLS: [&str; 4] = ["ipv4/ip_forward", "ipv4/conf", "ipv6/conf", "core/somaxconn"];
/// Parameters that no plugin sets: while any process changes links, the kernel restarts each read
/// of them, so that a reader spins.
const SPINNING: [&str; 2] = ["addr_gen_mode", "stable_secret"];

struct Chain {
    name: &'static str,
    /// Creates the host state that the chain needs; called again after a namespace has been
    /// deleted.
    prepare: fn(&Node),
    /// The plugins' configurations for one of the [`IDS`].
    plugins: fn(&Node, usize) -> Vec<Value>,
}

/// A clean-up step of a runtime.
#[derive(Clone, Copy, Debug)]
enum Step {
    Del,
    DelWithResult,
    Gc,
}

use Step::{Del, DelWithResult, Gc};

/// The clean-up steps, and whether the namespace still exists.
#[derive(Clone, Copy, Debug)]
struct Cleanup {
    alive: bool,
    steps: &'static [Step],
}

const fn alive(steps: &'static [Step]) -> Cleanup {
    Cleanup { alive: true, steps }
}

const fn dead(steps: &'static [Step]) -> Cleanup {
    Cleanup { alive: false, steps }
}

/// After a killed ADD no result exists.
const AFTER_ADD: [Cleanup; 4] = [alive(&[Del]), dead(&[Del]), alive(&[Gc, Del]), dead(&[Gc])];
const AFTER_DEL: [Cleanup; 5] =
    [alive(&[Del]), alive(&[DelWithResult]), dead(&[Del]), dead(&[DelWithResult]), dead(&[Gc])];
const AFTER_GC: [Cleanup; 1] = [dead(&[Gc])];

/// One run: a plugin's call is killed or fails at one point.
#[derive(Debug)]
struct Trial {
    verb: &'static str,
    plugin: usize,
    point: Syscall,
    /// The strace injection.
    action: &'static str,
    /// The clean-up after a kill; errors have a fixed one.
    cleanup: Option<Cleanup>,
}

/// A violated expectation.
struct Finding {
    kind: &'static str,
    text: String,
}

impl Finding {
    fn new(kind: &'static str) -> impl FnOnce(String) -> Finding {
        move |text| Finding { kind, text }
    }
}

/// A node with the network of a chain.
struct World {
    node: Node,
    chain: &'static Chain,
    len: usize,
}

impl World {
    fn new(chain: &'static Chain) -> World {
        let node = Node::new();
        // The kernel generates link-local addresses asynchronously, late on a busy machine.
        node.sh("cd /proc/sys/net/ipv6/conf/; echo 1 > default/addr_gen_mode
                 echo 0 > default/accept_dad; echo 0 > all/accept_dad");
        (chain.prepare)(&node);
        let len = (chain.plugins)(&node, BYSTANDER).len();
        World { node, chain, len }
    }
}

/// A container of the chain.
struct Pod<'w> {
    world: &'w World,
    who: usize,
    container: Option<Container>,
    netns: String,
    /// The results of the chain's plugins so far.
    results: Vec<Value>,
}

impl<'w> Pod<'w> {
    fn new(world: &'w World, who: usize) -> Pod<'w> {
        let container = quick();
        container.set_sysctl("net/ipv6/conf/default/addr_gen_mode", "1");
        let netns = container.path();
        Pod { world, who, container: Some(container), netns, results: Vec::new() }
    }

    fn call(&self, verb: &str, plugin: usize, prev: Option<&Value>) -> Call {
        let World { node, chain, .. } = self.world;
        let conf = (chain.plugins)(node, self.who).swap_remove(plugin);
        let mut conf = merged(&json!({"cniVersion": "1.1.0", "name": "n"}), &conf);
        if let Some(prev) = prev {
            conf["prevResult"] = prev.clone();
        }
        if verb == "GC" {
            let valid = [BYSTANDER, OTHER].map(|who| IDS[who]);
            let valid = valid.map(|id| json!({"containerID": id, "ifname": "eth0"}));
            conf["cni.dev/valid-attachments"] = json!(valid);
        }
        let call = node.call(conf["type"].as_str().unwrap(), verb).conf(&conf);
        call.netns(&self.netns).id(IDS[self.who]).env("RUST_BACKTRACE", "0")
    }

    fn add(&mut self, until: usize) -> Result<(), String> {
        for plugin in self.results.len()..until {
            let add = || self.call("ADD", plugin, self.results.last()).run();
            let mut outcome = add();
            // The master holds a macvlan's MAC until the kernel has deleted the macvlan's
            // namespace.
            eventually("the MAC of the container before is free", || {
                let is_busy = outcome.stdout.contains("address already in use");
                if is_busy {
                    outcome = add();
                }
                !is_busy
            });
            self.results.push(printed(&outcome)?);
        }
        Ok(())
    }

    /// Runs a verb without a result for these plugins, until one fails.
    fn each(
        &self,
        verb: &str,
        plugins: impl Iterator<Item = usize>,
        prev: bool,
    ) -> Result<(), String> {
        let prev = self.results.last().filter(|_| prev);
        for plugin in plugins {
            let outcome = self.call(verb, plugin, prev).run();
            if outcome.status != Some(0) {
                return Err(format!("{verb}: {outcome:?}"));
            }
        }
        Ok(())
    }

    fn del(&self, prev: bool) -> Result<(), String> {
        self.each("DEL", (0..self.world.len).rev(), prev)
    }

    fn gc(&self) -> Result<(), String> {
        self.each("GC", 0..self.world.len, false)
    }

    /// Runs the chain up to `plugin` and returns the call of `plugin`.
    fn up_to(&mut self, verb: &str, plugin: usize) -> Result<Call, String> {
        if verb == "ADD" {
            self.add(plugin)?;
            return Ok(self.call(verb, plugin, self.results.last()));
        }
        self.add(self.world.len)?;
        if verb == "DEL" {
            self.each("DEL", (plugin + 1..self.world.len).rev(), true)?;
            return Ok(self.call(verb, plugin, self.results.last()));
        }
        self.dies();
        self.each("GC", 0..plugin, false)?;
        Ok(self.call(verb, plugin, None))
    }

    /// Drops the namespace. The kernel may soon reuse the path, so the pod gets another one.
    fn dies(&mut self) {
        self.container = None;
        "/run/netns/gone".clone_into(&mut self.netns);
    }

    /// Cleans up, with a runtime's retries.
    fn clean_up(&mut self, how: Cleanup) -> Result<(), Finding> {
        if !how.alive {
            self.dies();
        }
        let once = || {
            how.steps.iter().try_for_each(|step| match step {
                Del => self.del(false),
                DelWithResult => self.del(true),
                Gc => self.gc(),
            })
        };
        let first = once();
        let end = (1..TRIES).fold(first, |end, _| end.or_else(|_| once()));
        end.map_err(Finding::new("permanent"))
    }
}

/// The result of a plugin that must have succeeded.
fn printed(outcome: &Outcome) -> Result<Value, String> {
    let result = serde_json::from_str(&outcome.stdout).ok().filter(|_| outcome.status == Some(0));
    result.ok_or_else(|| format!("ADD: {outcome:?}"))
}

/// Whether the call received a kernel reply; the number of attempts that got `EAGAIN` varies.
fn answers(point: &Syscall) -> bool {
    point.name.starts_with("recv") && !point.text.contains("EAGAIN")
}

/// Whether the call removes the file of an attachment's lock: the last act, whose failure leaves an
/// empty file until the next holder of the lock, or GC.
fn removes_lock(point: &Syscall) -> bool {
    point.name == "unlinkat" && point.text.contains("/turn-")
}

/// The state of the host and of the container, if it exists.
type State = [Option<Snapshot>; 2];
struct Stage<'w> {
    world: &'w World,
    bystander: Pod<'w>,
    other: Pod<'w>,
    /// The state with only the bystander attached.
    before: State,
    tally: Tally,
}

/// The number of runs by kind, and the verbs that were killed or failed.
#[derive(Default)]
struct Tally {
    hit: BTreeSet<&'static str>,
    kills: usize,
    errors: usize,
    failed_adds: usize,
    findings: Vec<String>,
}

impl<'w> Stage<'w> {
    fn new(world: &'w World, tally: Tally) -> Stage<'w> {
        let mut bystander = Pod::new(world, BYSTANDER);
        bystander.add(world.len).unwrap();
        // Creates the state that may remain: forwarding, the store's directory.
        let mut scratch = Pod::new(world, SCRATCH);
        scratch.add(world.len).unwrap();
        scratch.del(true).unwrap();
        let other = Pod::new(world, OTHER);
        let before = state(&other);
        Stage { world, bystander, other, before, tally }
    }

    /// The runs of a chain: each kill with each clean-up, and errors in turn.
    fn trials(&self, round: usize) -> Vec<Trial> {
        let world = self.world;
        let mut trials = Vec::new();
        for (verb, cleanups) in [("ADD", &AFTER_ADD[..]), ("DEL", &AFTER_DEL), ("GC", &AFTER_GC)] {
            for plugin in 0..world.len {
                let mut pod = Pod::new(world, VICTIM);
                let call = pod.up_to(verb, plugin).unwrap();
                let (outcome, calls) = strace::record(&world.node, &call);
                assert_eq!(outcome.status, Some(0), "{outcome:?}");
                pod.del(false).unwrap();
                settles(&self.before, &pod).unwrap();
                for (nth, point) in strace::points(&calls).into_iter().enumerate() {
                    let trial = |action, cleanup| Trial {
                        verb,
                        plugin,
                        point: point.clone(),
                        action,
                        cleanup,
                    };
                    if changes(&point) {
                        trials.extend(cleanups.iter().map(|how| trial("signal=KILL", Some(*how))));
                    }
                    if (has_effect(&point) && !removes_lock(&point)) || answers(&point) {
                        trials.push(trial(ERRORS[(nth + round) % ERRORS.len()], None));
                    }
                }
            }
        }
        trials
    }

    /// Runs trials until the first finding.
    fn run_all<'t, T: Iterator<Item = &'t Trial>>(mut self, trials: &mut T) -> Tally {
        let bystander = inside(&self.bystander);
        for trial in trials {
            let end = self.run(trial);
            let end = end.and_then(|()| match inside(&self.bystander) {
                now if now == bystander => Ok(()),
                now => Err(Finding::new("bystander hurt")(format!("{now:#?}"))),
            });
            let Err(Finding { kind, text }) = end else { continue };
            let Trial { verb, plugin, point, action, cleanup } = trial;
            let (chain, point) = (self.world.chain.name, point.describe());
            let what =
                format!("{chain}: {verb} of plugin {plugin}, {action} at {point}, {cleanup:?}");
            println!("FOUND {kind}: {what}\n{text}");
            self.tally.findings.push(format!("{kind}: {what}"));
            break;
        }
        self.tally
    }

    fn run(&mut self, trial: &Trial) -> Result<(), Finding> {
        let mut victim = Pod::new(self.world, VICTIM);
        let call = victim.up_to(trial.verb, trial.plugin).map_err(Finding::new("broken"))?;
        let Some(how) = trial.cleanup else { return self.fails(trial, victim, &call) };
        let (_, fired) = trial.point.run(&self.world.node, &call, trial.action);
        self.tally.kills += usize::from(fired);
        self.tally.hit.extend(fired.then_some(trial.verb));
        self.other.add(self.world.len).map_err(Finding::new("other hurt"))?;
        victim.clean_up(how)?;
        self.other.del(true).map_err(Finding::new("other hurt"))?;
        self.other.results.clear();
        settles(&self.before, &victim).map_err(Finding::new("leak"))
    }

    /// Makes the call fail and does the runtime's clean-up.
    fn fails(&mut self, trial: &Trial, mut victim: Pod<'_>, call: &Call) -> Result<(), Finding> {
        let start = state(&victim);
        let action = format!("error={}", trial.action);
        let (outcome, fired) = trial.point.run(&self.world.node, call, &action);
        self.tally.errors += usize::from(fired);
        self.tally.hit.extend(fired.then_some(trial.verb));
        let failed = outcome.status != Some(0);
        let say = |text: String| format!("{outcome:?}\n{text}");
        if !matches!(outcome.status, Some(0 | 1)) {
            return Err(Finding::new("hang or crash")(say(String::new())));
        }
        let rest = 0..self.world.len;
        match trial.verb {
            "ADD" if failed => {
                self.tally.failed_adds += 1;
                settles(&start, &victim).map_err(say).map_err(Finding::new("failed ADD left"))?;
                victim.clean_up(alive(&[Del]))?;
            }
            "ADD" => {
                victim.results.push(printed(&outcome).map_err(Finding::new("no result"))?);
                victim.clean_up(alive(&[DelWithResult]))?;
            }
            "DEL" if failed => victim.clean_up(alive(&[DelWithResult]))?,
            "DEL" => {
                let rest = rest.take(trial.plugin).rev();
                victim.each("DEL", rest, true).map_err(Finding::new("broken"))?;
            }
            _ if failed => victim.clean_up(dead(&[Gc]))?,
            _ => {
                let rest = rest.skip(trial.plugin + 1);
                victim.each("GC", rest, false).map_err(Finding::new("broken"))?;
            }
        }
        settles(&self.before, &victim).map_err(say).map_err(Finding::new("leak"))
    }
}

/// All state outside of containers that a call may change.
fn host(node: &Node) -> Snapshot {
    let is_lease =
        |path: &str| !path.contains("/last_reserved_ip.") && !path.ends_with("/.cnibox/tmp");
    let is_record =
        |path: &str| !path.starts_with("/run/cni/cnibox") && !path.starts_with("/run/cni/dhcp");
    let files =
        contents(&node.path("leases"), &is_lease) + &contents(Path::new("/run/cni"), &is_record);
    node.snapshot().with("files", files).with("sysctls", sysctls())
}

/// All state inside a container, if it exists.
fn inside(pod: &Pod<'_>) -> Option<Snapshot> {
    let container = pod.container.as_ref()?;
    Some(container.snapshot(&pod.world.node).with("sysctls", container.run(sysctls)))
}

fn sysctls() -> String {
    let is_read = |path: &str| !SPINNING.iter().any(|name| path.ends_with(name));
    SYSCTLS.map(|name| contents(&Path::new("/proc/sys/net").join(name), &is_read)).concat()
}

/// The files and directories at a path for which the function is true, with the contents of files;
/// the journal of the store without contents.
fn contents(path: &Path, is_wanted: &dyn Fn(&str) -> bool) -> String {
    let name = path.display().to_string();
    if !is_wanted(&name) {
        return String::new();
    }
    let Ok(entries) = fs::read_dir(path) else {
        let bytes = if name.contains("/.cnibox/") {
            Vec::new()
        } else {
            fs::read(path).unwrap_or_default()
        };
        return format!("{name}: {}\n", String::from_utf8_lossy(&bytes));
    };
    let mut entries: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries.iter().fold(name + "\n", |text, entry| text + &contents(entry, is_wanted))
}

fn state(pod: &Pod<'_>) -> State {
    [Some(host(&pod.world.node)), inside(pod)]
}

/// Waits until nothing is left: the kernel deletes devices asynchronously.
fn settles(before: &State, pod: &Pod<'_>) -> Result<(), String> {
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        if pod.container.is_none() {
            (pod.world.chain.prepare)(&pod.world.node);
        }
        let now = state(pod);
        let pairs = before.iter().zip(&now).filter_map(|(a, b)| Some((a.as_ref()?, b.as_ref()?)));
        let text: String = pairs.map(|(before, now)| before.difference(now)).collect();
        if text.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(text);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The number of rounds of errors.
fn rounds() -> usize {
    std::env::var("CNIBOX_LONG").map_or(1, |text| text.parse().unwrap())
}

/// All runs of a chain, or a sample of them.
fn sweep(chain: &'static Chain, sample: Option<usize>) {
    let rounds = sample.map_or_else(rounds, |_| 1);
    let (mut tally, mut round) = (Tally::default(), 0);
    while round < rounds {
        let world = World::new(chain);
        let all = Stage::new(&world, Tally::default()).trials(round);
        println!("sweep: {} | {} runs", chain.name, all.len());
        let step = sample.map_or(1, |sample| all.len() / sample);
        let mut rest = all
            .iter()
            .step_by(step)
            .filter(|trial| round == 0 || trial.cleanup.is_none())
            .peekable();
        while rest.peek().is_some() {
            let world = World::new(chain);
            tally = Stage::new(&world, tally).run_all(&mut rest);
        }
        round += 1;
    }
    let Tally { hit, kills, errors, failed_adds, findings } = tally;
    println!(
        "sweep: {} | {kills} kills | {errors} errors, {failed_adds} failed ADDs | {} findings",
        chain.name,
        findings.len()
    );
    assert!(findings.is_empty(), "{}", findings.join("\n"));
    // Few runs of a sample are of GC, which has the fewest points.
    let verbs = if sample.is_some() { &["ADD", "DEL"][..] } else { &["ADD", "DEL", "GC"] };
    assert!(verbs.iter().all(|verb| hit.contains(verb)), "only {hit:?}");
}
