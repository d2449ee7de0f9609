//! One of the two nodes, on a thread of its own: executes steps, and tells what a user sees after
//! each.

mod cache;
pub(super) mod mend;
mod tools;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender as Tx, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::net::if_::if_nameindex;
use serde_json::{Value, json};

use self::cache::uncache;
use super::plan::{By, Damage, ECHO, HOST, Kind, OUTSIDE, Op, PORTS, Place, Plan, Rules, Step};
use super::probe::{Echo, Sender, matrix};
use super::rules::rules;
use super::{Mutant, view};
use crate::support::compare::lacks_masquerading;
use crate::support::conflist::{Attached, Conflist, Failed};
use crate::support::node::{Container, Node, eventually};
use crate::support::parallel::at_once;
use crate::support::snapshot::without_recorded;

/// Whose plugins a node has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plugins {
    Cnibox,
    Reference,
}
#[derive(Clone, Debug)]
pub(super) enum Task {
    Do(Step),
    /// DEL as after a failed ADD, which the other side's call was.
    Detach(Place),
    /// Look again, with this patience for answers.
    Look(Duration),
    /// What is left of all attachments.
    Leftovers,
}

/// Lines that both sides should have in common.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) lines: BTreeSet<String>,
    /// Whether the call succeeded, and what it said, which may differ.
    pub(super) failed: Option<Failed>,
    /// Who has which address, by network.
    pub(super) assigned: Vec<(Place, usize, String)>,
}

/// The handle of a side's thread.
pub(super) struct Side {
    tasks: Option<Tx<Task>>,
    seen: Receiver<Seen>,
    thread: Option<JoinHandle<()>>,
}

impl Side {
    pub(super) fn start(
        plan: &Plan,
        plugins: Plugins,
        reference: PathBuf,
        mutant: Option<Mutant>,
    ) -> Side {
        let (tasks, inbox) = channel();
        let (outbox, seen) = channel();
        let plan = plan.clone();
        let thread = thread::spawn(move || {
            let node = Node::new();
            let mut machine = Machine::new(&node, &plan, plugins, reference, mutant);
            for task in inbox {
                if outbox.send(machine.perform(&task)).is_err() {
                    break;
                }
            }
        });
        Side { tasks: Some(tasks), seen, thread: Some(thread) }
    }

    pub(super) fn tell(&self, task: Task) {
        self.tasks.as_ref().unwrap().send(task).unwrap();
    }

    /// What is seen after the task.
    pub(super) fn seen(&self) -> Seen {
        self.seen.recv().expect("the other thread has panicked")
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.tasks.take();
        drop(self.thread.take().unwrap().join());
    }
}

/// A container, and the socket at which it answers.
struct Pod {
    container: Container,
    echo: Echo,
    /// Where the namespace is mounted, as by runtimes.
    netns: PathBuf,
}

impl Drop for Pod {
    fn drop(&mut self) {
        umount2(&self.netns, MntFlags::MNT_DETACH).unwrap_or_default();
        fs::remove_file(&self.netns).unwrap_or_default();
    }
}

/// An attachment as the runtime knows it.
struct Known {
    net: usize,
    at: Attached,
    by: By,
    /// The result of ADD, until a DEL succeeds.
    result: Option<Value>,
    /// Whether its namespace or its link is gone.
    is_dead: bool,
}

/// An attachment with its addresses.
type Held<'k> = (Place, &'k Known, Vec<String>);

/// ADD or DEL of all plugins of a network, ready to run.
struct Prepared<'n> {
    place: Place,
    net: usize,
    by: By,
    list: Conflist<'n>,
    at: Attached,
    verb: Verb,
}

enum Verb {
    Add,
    Del(Option<Value>),
}

/// The result of an ADD that succeeded; how the DEL ended that follows one that failed.
enum Ended {
    Added(Value),
    Refused(Failed, Result<(), Failed>),
    Deleted(Result<(), Failed>),
}

impl Prepared<'_> {
    fn run(&self) -> Ended {
        match &self.verb {
            Verb::Del(result) => Ended::Deleted(self.list.del(&self.at, result.as_ref())),
            Verb::Add => match self.list.add(&self.at) {
                Ok(result) => Ended::Added(result),
                Err(failed) => Ended::Refused(failed, self.list.del(&self.at, None)),
            },
        }
    }
}

pub(super) struct Machine<'n> {
    node: &'n Node,
    plan: &'n Plan,
    plugins: Plugins,
    reference: PathBuf,
    mutant: Option<Mutant>,
    outside: Container,
    echoes: Vec<Echo>,
    pods: BTreeMap<&'static str, Pod>,
    known: BTreeMap<Place, Known>,
    /// Attachments without DEL, whose containers were started again.
    replaced: Vec<(Place, Known)>,
    /// The owners of the host ends of all pairs.
    owners: BTreeMap<String, String>,
    /// The number of containers so far.
    count: usize,
    /// Whether the reference has been called on the node of cnibox.
    mixed: bool,
    /// What the reference has deleted on the node of cnibox, whose records then remain until GC:
    /// names and addresses.
    handed: Vec<String>,
    /// Whether nothing has happened that `cnibox doctor` may report.
    is_healthy: bool,
    /// Whether rules were flushed and not restored.
    is_flushed: bool,
}

/// Answers arrive within a fraction of it on an idle machine; differences are looked at again.
const PATIENCE: Duration = Duration::from_millis(12);

impl<'n> Machine<'n> {
    fn new(
        node: &'n Node,
        plan: &'n Plan,
        plugins: Plugins,
        reference: PathBuf,
        mutant: Option<Mutant>,
    ) -> Machine<'n> {
        let outside = Container::new();
        let path = outside.path();
        node.sh(&format!(
            "ip -batch - <<END
link add out0 type veth peer name eth0 netns {path}
addr add {HOST}/24 dev out0
link set out0 up
link add m0 type veth peer name m0far
link add m1 type veth peer name m1far
link set m0 up
link set m1 up
link set m0far up
link set m1far up
END
nsenter --net={path} ip -batch - <<END
addr add {OUTSIDE}/24 dev eth0
link set eth0 up
link set lo up
route add default via {HOST}
END"
        ));
        if plan.drops {
            node.sh("iptables -P FORWARD DROP");
        }
        let echoes = vec![Echo::of("host", node), Echo::of("outside", &outside)];
        Machine {
            node,
            plan,
            plugins,
            reference,
            mutant,
            outside,
            echoes,
            pods: BTreeMap::new(),
            known: BTreeMap::new(),
            replaced: Vec::new(),
            owners: BTreeMap::new(),
            count: 0,
            mixed: false,
            handed: Vec::new(),
            is_healthy: true,
            is_flushed: false,
        }
    }

    fn perform(&mut self, task: &Task) -> Seen {
        match task {
            Task::Do(step) => {
                let answer = self.step(step);
                let mut seen = self.look(PATIENCE);
                let failed = match answer {
                    Ok(said) => {
                        let mut said = self.plan.with_owners(said, &self.assigned());
                        said.sort();
                        seen.lines.insert(format!("answer: success {said:?}"));
                        None
                    }
                    Err(failed) => {
                        seen.lines.insert("answer: failure".to_owned());
                        Some(failed)
                    }
                };
                Seen { failed, ..seen }
            }
            Task::Detach(place) => {
                let answer = self.del(*place, By::Cnibox);
                // DEL does not restore parameters.
                if let Some(pod) = self.pods.get(place.pod) {
                    pod.container.try_sh("sysctl -q -w net.core.somaxconn=4096");
                }
                Seen { failed: answer.err(), ..self.look(PATIENCE) }
            }
            Task::Look(patience) => self.look(*patience),
            Task::Leftovers => self.leftovers(),
        }
    }

    /// Executes a step; the addresses of a result.
    fn step(&mut self, step: &Step) -> Result<Vec<String>, Failed> {
        self.mixed |= step.by == By::Reference;
        let is_damage = matches!(
            step.op,
            Op::Vanish(_)
                | Op::NodeRoute(_)
                | Op::TenantMac(_)
                | Op::RenamedTuning(_)
                | Op::Flush(_)
                | Op::CutPair(_)
                | Op::CutBridge(_)
        );
        self.is_healthy &= !is_damage && step.by == By::Cnibox;
        self.is_flushed |= matches!(step.op, Op::Flush(_));
        match &step.op {
            Op::Add { .. } | Op::Del(_) | Op::AtOnce(_) => {
                return self.calls(step.op.parts(), step.by);
            }
            Op::Check(place) => {
                if let Some(Known { net, at, result: Some(result), .. }) = self.known.get(place)
                    && self.pods.contains_key(place.pod)
                {
                    let list = self.list(*net, step.by);
                    let mut failures = list.failures_of_check(at, result);
                    return failures.find(|failed| !is_known(failed)).map_or(Ok(Vec::new()), Err);
                }
            }
            Op::Gc { stale, lost } => self.gc(*stale, *lost)?,
            Op::Vanish(pod) => self.vanish(pod),
            Op::NodeRoute(addr) => {
                self.node.sh(&format!("ip route add {addr} via {OUTSIDE} 2>/dev/null || true"));
            }
            Op::TenantMac(place) => {
                if let Some(pod) = self.pods.get(place.pod) {
                    pod.container
                        .try_sh(&format!("ip link set {} address 02:00:00:00:00:99", place.ifname));
                }
            }
            Op::RenamedTuning(place) => self.renamed_tuning(*place)?,
            Op::Again { place, moved } => return self.add_again(*place, *moved),
            Op::Flush(damage) => self.damage(*damage),
            Op::CutPair(place) => self.cut_pair(*place),
            Op::CutBridge(name) => self.damage(Damage::Bridge(name)),
            Op::Repair(damage) => self.repair(*damage)?,
            Op::Doctor => self.doctor()?,
            Op::CollectDead => self.collect_dead()?,
        }
        Ok(Vec::new())
    }

    /// The list of a network, for the implementation that executes the call.
    fn list(&self, net: usize, by: By) -> Conflist<'n> {
        let directory = if self.is_ours(by) { self.node.bin() } else { self.reference.clone() };
        let conf = self.plan.networks[net].conf(self.node, self.plan.rules);
        Conflist { directory, ..Conflist::new(self.node, conf) }
    }

    fn is_ours(&self, by: By) -> bool {
        (self.plugins, by) == (Plugins::Cnibox, By::Cnibox)
    }

    /// The list for a verb, without the plugin that does nothing.
    fn mutated(&self, net: usize, by: By, verb: &str) -> Conflist<'n> {
        let mut list = self.list(net, by);
        if let Some(mutant) = self.mutant.filter(|mutant| self.is_ours(by) && mutant.verb == verb) {
            list.conf["plugins"]
                .as_array_mut()
                .unwrap()
                .retain(|plugin| plugin["type"] != mutant.plugin);
        }
        list
    }

    fn attachment(&mut self, place: Place, ports: &[u16], mac: Option<&str>) -> Attached {
        if !self.pods.contains_key(place.pod) {
            let container = Container::new();
            self.count += 1;
            let uses_macvlan = |net: &super::plan::Network| matches!(net.kind, Kind::Macvlan(_));
            if self.plan.networks.iter().any(uses_macvlan) {
                // Its end on the host tells when the kernel has deleted the namespace.
                let (count, path) = (self.count, container.path());
                self.node
                    .sh(&format!("ip link add mark{count} type veth peer name mark netns {path}"));
                self.owners.insert(format!("mark{count}"), place.pod.to_owned());
            }
            let echo = Echo::of(place.pod, &container);
            let netns = self.node.path(&format!("netns-{}", self.count));
            fs::write(&netns, "").unwrap();
            let none = None::<&str>;
            mount(Some(container.path().as_str()), &netns, none, MsFlags::MS_BIND, none).unwrap();
            self.pods.insert(place.pod, Pod { container, echo, netns });
        }
        let port = |port: &u16| json!({"hostPort": port, "containerPort": ECHO, "protocol": "udp"});
        let ports: Vec<Value> = ports.iter().map(port).collect();
        let netns = self.pods[place.pod].netns.display().to_string();
        let at = Attached::new(&format!("twin-{}", place.pod), &netns);
        let mut runtime = json!({"portMappings": ports});
        if let Some(mac) = mac {
            runtime["mac"] = json!(mac);
        }
        Attached { ifname: place.ifname.to_owned(), runtime, ..at }
    }

    fn prepare(&mut self, op: &Op, by: By) -> Option<Prepared<'n>> {
        match op {
            Op::Add { place, net, ports, mac } => {
                let at = self.attachment(*place, ports, *mac);
                let list = self.mutated(*net, by, "ADD");
                Some(Prepared { place: *place, net: *net, by, list, at, verb: Verb::Add })
            }
            Op::Del(place) => {
                let Known { net, at, result, .. } = self.known.get(place)?;
                let list = self.mutated(*net, by, "DEL");
                let (net, at, verb) = (*net, at.clone(), Verb::Del(result.clone()));
                Some(Prepared { place: *place, net, by, list, at, verb })
            }
            _ => None,
        }
    }

    /// The addresses of all results, or the first failure.
    fn calls(&mut self, ops: &[Op], by: By) -> Result<Vec<String>, Failed> {
        let calls: Vec<_> = ops.iter().filter_map(|op| self.prepare(op, by)).collect();
        let ended = match self.plugins {
            Plugins::Cnibox if calls.len() > 1 => at_once(calls.len(), |n| calls[n].run()),
            _ => calls.iter().map(Prepared::run).collect(),
        };
        let answers: Vec<_> =
            calls.into_iter().zip(ended).map(|(call, ended)| self.note(call, ended)).collect();
        Ok(answers.into_iter().collect::<Result<Vec<_>, _>>()?.concat())
    }

    /// What the runtime knows after a call.
    fn note(&mut self, call: Prepared<'n>, ended: Ended) -> Result<Vec<String>, Failed> {
        let Prepared { place, net, by, at, .. } = call;
        let (result, answer) = match ended {
            Ended::Deleted(Ok(())) => {
                self.deleted(place, by);
                uncache(&call.list, place);
                return Ok(Vec::new());
            }
            Ended::Deleted(Err(failed)) => {
                if lacks_masquerading(&failed.msg) {
                    self.deleted(place, by);
                }
                return Err(failed);
            }
            Ended::Refused(failed, Ok(())) => return Err(failed),
            Ended::Refused(failed, Err(_)) => (None, Err(failed)),
            Ended::Added(result) => {
                self.note_host_ends(place, &result);
                self.cache(&call.list, &at, &result);
                let addresses = addresses(&result);
                (Some(result), Ok(addresses))
            }
        };
        let known = Known { net, at, by, result, is_dead: false };
        if let Some(former) = self.known.insert(place, known).filter(|former| former.is_dead) {
            self.replaced.push((place, former));
        }
        answer
    }

    fn note_host_ends(&mut self, place: Place, result: &Value) {
        for interface in result["interfaces"].as_array().into_iter().flatten() {
            let name = interface["name"].as_str().unwrap_or_default();
            let is_pair_or_limit = name.starts_with("veth") || name.starts_with("bwp");
            if interface["sandbox"].as_str().unwrap_or_default().is_empty() && is_pair_or_limit {
                self.owners.insert(name.to_owned(), place.to_string());
            }
        }
    }

    fn del(&mut self, place: Place, by: By) -> Result<(), Failed> {
        self.calls(&[Op::Del(place)], by).map(drop)
    }

    /// The runtime does not call DEL after it: the attachment is alive.
    fn add_again(&mut self, place: Place, moved: bool) -> Result<Vec<String>, Failed> {
        let Some(Known { net, at, result: Some(_), is_dead: false, .. }) = self.known.get(&place)
        else {
            return Ok(Vec::new());
        };
        let list = self.list(*net, By::Cnibox);
        let elsewhere = moved.then(Container::new);
        let netns = elsewhere.as_ref().map_or_else(|| at.netns.clone(), Container::path);
        let at = Attached { netns, ..at.clone() };
        let added = list.add(&at);
        if let Some(mutant) =
            self.mutant.filter(|mutant| self.is_ours(By::Cnibox) && mutant.verb == "ROLLBACK")
            && added.is_err()
        {
            let nth =
                list.types().iter().position(|plugin| *plugin == mutant.plugin).unwrap_or_default();
            drop(
                list.call("DEL", &at, nth, None).program(list.directory.join(mutant.plugin)).run(),
            );
        }
        if elsewhere.is_some() {
            drop(elsewhere);
            eventually("the kernel deletes the namespace", || !self.has_unknown_pair());
        }
        Ok(addresses(&added?))
    }

    /// Whether there is a pair of no container.
    fn has_unknown_pair(&self) -> bool {
        let links = if_nameindex().unwrap();
        let mut names = links.iter().map(|link| link.name().to_string_lossy().into_owned());
        names.any(|name| name.starts_with("veth") && !self.owners.contains_key(&name))
    }

    fn gc(&mut self, stale: Option<Place>, lost: bool) -> Result<(), Failed> {
        let is_reference = self.plugins == Plugins::Reference;
        if let Some(place) = stale {
            // What GC alone should achieve, DEL does on the reference's node.
            if !lost || is_reference {
                self.del(place, By::Cnibox)?;
            } else if let Some(net) = self.known.get(&place).map(|known| known.net) {
                uncache(&self.list(net, By::Cnibox), place);
                self.forget(place);
            }
        }
        if is_reference {
            return Ok(());
        }
        (0..self.plan.networks.len()).try_for_each(|net| {
            let valid =
                self.known.values().filter(|known| known.net == net && known.result.is_some());
            let valid: Vec<Attached> = valid.map(|known| known.at.clone()).collect();
            self.mutated(net, By::Cnibox, "GC").gc(&valid)
        })
    }

    /// Waits until the kernel has deleted the namespace.
    fn vanish(&mut self, pod: &str) {
        if self.pods.remove(pod).is_none() {
            return;
        }
        for (_, known) in self.known.iter_mut().filter(|(place, _)| place.pod == pod) {
            known.is_dead = true;
        }
        let is_of = |owner: &String| owner == pod || owner.starts_with(&format!("{pod}/"));
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            let links = if_nameindex().unwrap();
            let mut names = links.iter().map(|link| link.name().to_string_lossy().into_owned());
            if !names
                .any(|name| !name.starts_with("bwp") && self.owners.get(&name).is_some_and(is_of))
            {
                return;
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn renamed_tuning(&self, place: Place) -> Result<(), Failed> {
        let Some(Known { net, at, result: Some(result), .. }) = self.known.get(&place) else {
            return Ok(());
        };
        let mut list = self.list(*net, By::Cnibox);
        list.conf["name"] = json!("renamed");
        list.conf["plugins"].as_array_mut().unwrap().retain(|plugin| plugin["type"] == "tuning");
        list.del(at, Some(result))
    }

    /// Everything that a user sees.
    fn look(&self, patience: Duration) -> Seen {
        let mut lines = view::lines(self.node, "host", &self.owners);
        for (name, pod) in &self.pods {
            lines.extend(view::lines(&pod.container, name, &self.owners));
            lines.push(format!("{name}: somaxconn {}", pod.container.sysctl("net/core/somaxconn")));
        }
        lines.extend(self.leases());
        lines.extend(self.rules());
        lines.extend(self.traffic(patience));
        // The next ADD of cnibox deletes the limits of the dead.
        let (_, dead) = self.held();
        let is_of =
            |line: &str, (place, ..): &Held<'_>| line.contains(&format!("[limit of {place}]"));
        lines.retain(|line| !dead.iter().any(|one| is_of(line, one)));
        let assigned = self.assigned();
        Seen { lines: numbered(self.plan.with_owners(lines, &assigned)), failed: None, assigned }
    }

    /// The attachments without DEL: those that are alive, and the dead.
    fn held(&self) -> (Vec<Held<'_>>, Vec<Held<'_>>) {
        let replaced = self.replaced.iter().map(|(place, known)| (place, known));
        let all = self.known.iter().chain(replaced).filter(|(_, known)| known.result.is_some());
        let all =
            all.map(|(place, known)| (*place, known, addresses(known.result.as_ref().unwrap())));
        let (dead, alive) = all.partition(|(_, known, _)| known.is_dead);
        (alive, dead)
    }

    /// The rules of all but the dead, which a call of cnibox may reclaim.
    fn rules(&self) -> Vec<String> {
        let (alive, dead) = self.held();
        let rules = rules(self.node, self.plan.rules).into_iter().filter(|rule| {
            let is_of = |(place, known, addresses): &Held<'_>| {
                rule.is_of(place.pod, &self.plan.networks[known.net], addresses)
            };
            alive.iter().any(is_of) || !dead.iter().any(is_of)
        });
        let mut texts: Vec<String> = rules.map(|rule| rule.text).collect();
        if self.plan.rules == Rules::Nftables {
            texts.dedup();
        }
        texts
    }

    /// The places that have addresses, with their networks.
    fn assigned(&self) -> Vec<(Place, usize, String)> {
        let of = |(place, known): (&Place, &Known)| {
            let (place, net) = (*place, known.net);
            let addresses = known.result.as_ref().map(addresses).unwrap_or_default();
            addresses.into_iter().map(move |addr| (place, net, addr))
        };
        self.known.iter().flat_map(of).collect()
    }

    fn leases(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for net in &self.plan.networks {
            for lease in self.node.leases(net.name) {
                let text = fs::read_to_string(self.node.path("leases").join(net.name).join(&lease));
                lines.push(format!("lease {} {lease}: {:?}", net.name, text.unwrap_or_default()));
            }
        }
        lines
    }

    fn traffic(&self, patience: Duration) -> Vec<String> {
        let echoes: Vec<&Echo> =
            self.echoes.iter().chain(self.pods.values().map(|pod| &pod.echo)).collect();
        let mut senders = vec![Sender::of("host", self.node), Sender::of("outside", &self.outside)];
        senders.extend(self.pods.iter().map(|(name, pod)| Sender::of(name, &pod.container)));
        let mut targets = BTreeSet::new();
        targets.extend([(HOST.to_owned(), ECHO), (OUTSIDE.to_owned(), ECHO)]);
        for Known { at, result, .. } in self.known.values() {
            let Some(result) = result else { continue };
            targets.extend(addresses(result).into_iter().map(|addr| (addr, ECHO)));
            for mapping in at.runtime["portMappings"].as_array().unwrap() {
                let port = mapping["hostPort"].as_u64().and_then(|port| u16::try_from(port).ok());
                targets.insert((HOST.to_owned(), port.unwrap()));
            }
        }
        let target = |(addr, port): (String, u16)| {
            let socket: SocketAddr = format!("{addr}:{port}").parse().unwrap();
            (socket.to_string(), socket)
        };
        let targets: Vec<_> = targets.into_iter().map(target).collect();
        matrix(&echoes, &senders, &targets, patience)
    }

    /// What mentions an attachment after all were deleted. DEL leaves nothing by itself; records of
    /// what the reference has deleted stay until GC.
    fn leftovers(&mut self) -> Seen {
        let mut lines = self.left();
        if self.mixed && self.plugins == Plugins::Cnibox {
            let text = |line: &String| match line.strip_prefix("file left: ") {
                Some(file) => fs::read_to_string(file).unwrap_or_default(),
                None => line.clone(),
            };
            lines.retain(|line| !self.handed.iter().any(|name| text(line).contains(name)));
            for net in 0..self.plan.networks.len() {
                drop(self.list(net, By::Cnibox).gc(&[]));
            }
            let after = self.left().into_iter().map(|line| format!("{line} (after GC)"));
            lines.extend(after);
        }
        Seen { lines: numbered(lines), ..Seen::default() }
    }

    fn left(&self) -> Vec<String> {
        let rules = without_recorded(&self.node.sh("nft -s list ruleset"));
        let ports = PORTS.map(|port| port.to_string());
        let is_ours = |line: &&str| {
            line.contains("twin-")
                || (1..=4).any(|net| line.contains(&format!("10.{net}.0.")))
                || ports.iter().any(|port| line.contains(port.as_str()))
        };
        let rules = rules.lines().filter(is_ours).map(|line| format!("rule left: {}", line.trim()));
        let mut lines: Vec<String> = rules.collect();
        let find = "find /run/cni ! -type d ! -name '*.lock' 2>/dev/null | sort || true";
        lines.extend(self.node.sh(find).lines().map(|file| format!("file left: {file}")));
        lines.extend(self.leases());
        let present = view::lines(self.node, "host", &self.owners);
        lines.extend(present.into_iter().filter(|line| line.contains("link [")));
        lines
    }
}

/// A row of docs/parity.md. A runtime would end here, but what the reference's next plugins find
/// would be hidden.
pub(super) const PORTMAP_CHECK: &str = "CHECK of `portmap` for a container without IPv6";

/// Whether a CHECK has failed for the reason of [`PORTMAP_CHECK`].
fn is_known(failed: &Failed) -> bool {
    failed.plugin == "portmap" && failed.msg.contains("could not check ipv6 dnat")
}

/// The addresses of a result, without their prefix lengths.
fn addresses(result: &Value) -> Vec<String> {
    let ips = result["ips"].as_array().into_iter().flatten();
    let texts = ips.filter_map(|ip| ip["address"].as_str()?.split('/').next());
    texts.map(str::to_owned).collect()
}

/// The lines as a set, in which repeated lines differ by a number.
fn numbered(lines: Vec<String>) -> BTreeSet<String> {
    let mut set = BTreeSet::new();
    for line in lines {
        let mut text = line.clone();
        let mut number = 1;
        while !set.insert(text.clone()) {
            number += 1;
            text = format!("{line} ({number})");
        }
    }
    set
}
