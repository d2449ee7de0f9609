//! One of the two nodes, on a thread of its own: executes steps, and tells what a user sees after each.

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

use super::plan::{By, ECHO, HOST, Kind, OUTSIDE, Op, PORTS, Place, Plan, Step};
use super::probe::{Echo, Sender, matrix};
use super::view;
use crate::support::conflist::{Attached, Conflist, Failed};
use crate::support::node::{Container, Node};

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
}

/// The handle of a side's thread.
pub(super) struct Side {
    tasks: Option<Tx<Task>>,
    seen: Receiver<Seen>,
    thread: Option<JoinHandle<()>>,
}

impl Side {
    pub(super) fn start(plan: &Plan, plugins: Plugins, reference: PathBuf) -> Side {
        let (tasks, inbox) = channel();
        let (outbox, seen) = channel();
        let plan = plan.clone();
        let thread = thread::spawn(move || {
            let node = Node::new();
            let mut machine = Machine::new(&node, &plan, plugins, reference);
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
    /// The result of ADD, until a DEL succeeds.
    result: Option<Value>,
}

struct Machine<'n> {
    node: &'n Node,
    plan: &'n Plan,
    plugins: Plugins,
    reference: PathBuf,
    outside: Container,
    echoes: Vec<Echo>,
    pods: BTreeMap<&'static str, Pod>,
    known: BTreeMap<Place, Known>,
    /// The owners of the host ends of all pairs.
    owners: BTreeMap<String, String>,
    /// The number of containers so far.
    count: usize,
    /// Whether the reference has deleted something on a node of cnibox, whose records then remain until GC.
    mixed: bool,
}

/// Answers arrive within a fraction of it on an idle machine; differences are looked at again.
const PATIENCE: Duration = Duration::from_millis(12);

impl<'n> Machine<'n> {
    fn new(node: &'n Node, plan: &'n Plan, plugins: Plugins, reference: PathBuf) -> Machine<'n> {
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
        let (pods, known, owners) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Machine { node, plan, plugins, reference, outside, echoes, pods, known, owners, count: 0, mixed: false }
    }

    fn perform(&mut self, task: &Task) -> Seen {
        match task {
            Task::Do(step) => {
                let answer = self.step(step);
                let mut seen = self.look(PATIENCE);
                match &answer {
                    Ok(said) => seen.lines.insert(format!("answer: success {said:?}")),
                    Err(_) => seen.lines.insert("answer: failure".to_owned()),
                };
                Seen { failed: answer.err(), ..seen }
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
        match &step.op {
            Op::Add { place, net, ports, mac } => {
                self.mixed |= step.by == By::Reference;
                let at = self.attachment(*place, ports, *mac);
                return self.add(*place, *net, at, step.by);
            }
            Op::Del(place) => {
                self.mixed |= step.by == By::Reference;
                self.del(*place, step.by)?;
            }
            Op::Check(place) => {
                if let Some(Known { net, at, result: Some(result) }) = self.known.get(place)
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
                    pod.container.try_sh(&format!("ip link set {} address 02:00:00:00:00:99", place.ifname));
                }
            }
            Op::RenamedTuning(place) => self.renamed_tuning(*place)?,
        }
        Ok(Vec::new())
    }

    /// The list of a network, for the implementation that executes the call.
    fn list(&self, net: usize, by: By) -> Conflist<'n> {
        let is_ours = (self.plugins, by) == (Plugins::Cnibox, By::Cnibox);
        let directory = if is_ours { self.node.bin() } else { self.reference.clone() };
        let conf = self.plan.networks[net].conf(self.node, self.plan.rules);
        Conflist { directory, ..Conflist::new(self.node, conf) }
    }

    fn attachment(&mut self, place: Place, ports: &[u16], mac: Option<&str>) -> Attached {
        if !self.pods.contains_key(place.pod) {
            let container = Container::new();
            self.count += 1;
            let uses_macvlan = |net: &super::plan::Network| matches!(net.kind, Kind::Macvlan(_));
            if self.plan.networks.iter().any(uses_macvlan) {
                // Its end on the host tells when the kernel has deleted the namespace.
                let (count, path) = (self.count, container.path());
                self.node.sh(&format!("ip link add mark{count} type veth peer name mark netns {path}"));
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

    fn add(&mut self, place: Place, net: usize, at: Attached, by: By) -> Result<Vec<String>, Failed> {
        let list = self.list(net, by);
        let added = list.add(&at);
        let ended = added.is_err().then(|| list.del(&at, None));
        let result = added.as_ref().ok().cloned();
        for interface in result.iter().flat_map(|result| result["interfaces"].as_array().into_iter().flatten()) {
            let name = interface["name"].as_str().unwrap_or_default();
            if interface["sandbox"].as_str().unwrap_or_default().is_empty() && name.starts_with("veth") {
                self.owners.insert(name.to_owned(), place.to_string());
            }
        }
        if !matches!(ended, Some(Ok(()))) {
            self.known.insert(place, Known { net, at, result });
        }
        Ok(addresses(&added?))
    }

    fn del(&mut self, place: Place, by: By) -> Result<(), Failed> {
        let Some(Known { net, at, result }) = self.known.get(&place) else { return Ok(()) };
        self.list(*net, by).del(at, result.as_ref())?;
        self.known.get_mut(&place).unwrap().result = None;
        Ok(())
    }

    fn gc(&mut self, stale: Option<Place>, lost: bool) -> Result<(), Failed> {
        let is_reference = self.plugins == Plugins::Reference;
        if let Some(place) = stale {
            // What GC alone should achieve, DEL does on the reference's node.
            if !lost || is_reference {
                self.del(place, By::Cnibox)?;
            } else if let Some(known) = self.known.get_mut(&place) {
                known.result = None;
            }
        }
        if is_reference {
            return Ok(());
        }
        (0..self.plan.networks.len()).try_for_each(|net| {
            let valid = self.known.values().filter(|known| known.net == net && known.result.is_some());
            let valid: Vec<Attached> = valid.map(|known| known.at.clone()).collect();
            self.list(net, By::Cnibox).gc(&valid)
        })
    }

    /// Waits until the kernel has deleted the namespace.
    fn vanish(&mut self, pod: &str) {
        if self.pods.remove(pod).is_none() {
            return;
        }
        let is_of = |owner: &String| owner == pod || owner.starts_with(&format!("{pod}/"));
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            let links = if_nameindex().unwrap();
            let mut names = links.iter().map(|link| link.name().to_string_lossy().into_owned());
            if !names.any(|name| self.owners.get(&name).is_some_and(is_of)) {
                return;
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn renamed_tuning(&self, place: Place) -> Result<(), Failed> {
        let Some(Known { net, at, result: Some(result) }) = self.known.get(&place) else {
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
        lines.extend(self.traffic(patience));
        Seen { lines: numbered(lines), failed: None }
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
        let echoes: Vec<&Echo> = self.echoes.iter().chain(self.pods.values().map(|pod| &pod.echo)).collect();
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

    /// What mentions an attachment after all were deleted.
    fn leftovers(&mut self) -> Seen {
        if self.mixed && self.plugins == Plugins::Cnibox {
            for net in 0..self.plan.networks.len() {
                drop(self.list(net, By::Cnibox).gc(&[]));
            }
        }
        let rules = self.node.sh("nft -s list ruleset");
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
        Seen { lines: numbered(lines), failed: None }
    }
}

/// A row of docs/parity.md. A runtime would end here, but what the reference's next plugins find would be hidden.
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
