//! A worker: one attachment after the other, each from ADD to an end that chance chooses.

use std::cell::Cell;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use serde_json::json;

use super::networks::{self, GROUPS, Network};
use super::report::{Trouble, said};
use super::{Abandoned, Soak};
use crate::support::node::{Call, Container};
use crate::support::random::Random;
use crate::support::traffic::Place;

/// How long DEL is repeated while there is a reason for its failure.
const PATIENCE: Duration = Duration::from_secs(180);

/// Attaches containers until the soak ends.
pub(super) fn work(soak: &Soak<'_>, number: usize) {
    let mut random = soak.random(number);
    let mut round = 0;
    while !soak.is_over() {
        let group = random.below(GROUPS);
        let of_group = soak.networks.iter().filter(|network| network.group == group);
        let network = *random.any(&of_group.collect::<Vec<_>>());
        // A device is for one container.
        let taken = (!network.devices.is_empty()).then(|| network.taken.try_lock());
        if taken.as_ref().is_some_and(Result::is_err) {
            continue;
        }
        networks::provide(soak.node, network);
        round += 1;
        soak.report.event("rounds");
        Attached::new(soak, network, (number, round)).live(&mut random);
    }
}

/// An attachment of a worker.
pub(super) struct Attached<'s> {
    soak: &'s Soak<'s>,
    network: &'s Network,
    container: Option<Container>,
    netns: String,
    id: String,
    capabilities: String,
    port: u16,
    /// ADD succeeded while the disk was full, with a warning: nobody restores its rules.
    is_unrecorded: Cell<bool>,
}

impl<'s> Attached<'s> {
    pub(super) fn new(
        soak: &'s Soak<'s>,
        network: &'s Network,
        (worker, round): (usize, usize),
    ) -> Attached<'s> {
        let container = Container::new();
        let port = soak.next_port();
        let address =
            format!("{}.{}.{}/16", network.chosen.unwrap_or_default(), worker, round % 250 + 2);
        let capabilities = json!({
            "portMappings": [{"hostPort": port, "containerPort": 80, "protocol": "tcp"}],
            "ips": [address],
        });
        Attached {
            soak,
            network,
            netns: container.path(),
            container: Some(container),
            id: format!("w{worker}-r{round}"),
            capabilities: capabilities.to_string(),
            port,
            is_unrecorded: Cell::new(false),
        }
    }

    /// A call of cnitool; `jump` is by how many days the clocks since boot differ for it.
    fn call(&self, verb: &str, jump: usize) -> Call {
        let args = [verb, self.network.name, &self.netns, "--container-id", &self.id];
        let rest = ["--ifname", self.network.ifname(), "--cap-args", &self.capabilities];
        let call = self.soak.cnitool(&[&args[..], &rest].concat());
        if jump == 0 {
            return call;
        }
        let seconds = format!("{}", jump * 86_400);
        // A child, because before Linux 6.2 a process that waits for its time namespace cannot
        // start others.
        let jump = ["unshare", "--fork", "-T", "--boottime", &seconds, "--monotonic", &seconds];
        call.under(&jump)
    }

    /// A call that ends by itself; whether it succeeds.
    fn is_done(&self, verb: &'static str, random: &mut Random) -> bool {
        let jump = if random.one_in(16) { 1 + random.below(400) } else { 0 };
        let begin = Instant::now();
        let outcome = self.call(&verb.to_lowercase(), jump).run();
        if verb == "ADD" && self.soak.report.was_since(Trouble::FullDisk, begin) {
            self.soak.report.event("ADD on a full disk");
            self.is_unrecorded.set(true);
        }
        let what = (verb, self.network.name);
        if outcome.status != Some(0) && verb == "CHECK" && self.is_unrecorded.get() {
            let full = Some(Trouble::FullDisk);
            self.soak.report.count_failure(full, what, &self.id, &said(&outcome));
            return false;
        }
        self.soak.report.call(what, &self.id, begin, &outcome)
    }

    /// Kills the call after a random time: all its processes, or a plugin that it has started.
    fn is_killed(&self, verb: &'static str, random: &mut Random) {
        let report = &self.soak.report;
        let mean = report.mean(verb).max(Duration::from_millis(20));
        let delay = mean.mul_f64(f64::from(u32::try_from(random.below(150)).unwrap()) / 100.0);
        let child = self.call(&verb.to_lowercase(), 0).spawn().unwrap();
        thread::sleep(delay);
        let id = child.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
        let plugin = children.unwrap_or_default().split(' ').next().and_then(|id| id.parse().ok());
        // The child is not reaped yet, so that its number is still its own.
        let killed = match plugin.filter(|_| random.one_in(2)) {
            Some(plugin) => kill(Pid::from_raw(plugin), Signal::SIGKILL),
            None => killpg(Pid::from_raw(id.cast_signed()), Signal::SIGKILL),
        };
        let output = child.wait_with_output().unwrap();
        let is_hit = killed.is_ok() && !output.status.success();
        report
            .event(&format!("{verb} {}", if is_hit { "killed" } else { "ended before the kill" }));
        report.fate(&self.id, &format!("{verb} killed after {delay:?}"));
    }

    /// ADD and DEL, without chance.
    pub(super) fn come_and_go(self) {
        for verb in ["add", "del"] {
            let outcome = self.call(verb, 0).run();
            assert_eq!(outcome.status, Some(0), "{verb} {}: {outcome:?}", self.network.name);
        }
    }

    /// The whole life of an attachment.
    pub(super) fn live(mut self, random: &mut Random) {
        let report = &self.soak.report;
        self.soak.register(self.network, &self.id);
        report.fate(&self.id, self.network.name);
        if random.one_in(12) {
            self.is_killed("ADD", random);
        } else if self.is_done("ADD", random) {
            self.is_used(random);
        } else {
            report.fate(&self.id, "ADD failed");
        }
        if random.one_in(10) {
            self.is_killed("DEL", random);
        }
        if random.one_in(5) {
            report.event("namespaces that end before DEL");
            report.fate(&self.id, "the namespace ended");
            self.container = None;
        }
        if self.may_be_left() && random.one_in(10) {
            report.event("attachments without DEL");
            report.fate(&self.id, "without DEL");
            // GC of a runtime ends what is not in its list, also in a namespace that lives.
            let lives = random.one_in(4).then_some(self.container).flatten();
            self.soak.abandon(self.network, Abandoned { id: self.id, _container: lives });
            return;
        }
        self.end(random);
    }

    /// Whether DEL may never come. A device would be missed. And in a later container at the same
    /// path, to which nothing is attached yet, `repair` makes the children of a master again that
    /// an earlier one had, if the time of the result in the cache says that it is the same one: the
    /// clocks jump here.
    fn may_be_left(&self) -> bool {
        let is_child = ["macvlan", "vlan", "ipvlan"].contains(&self.network.name);
        self.network.devices.is_empty() && !is_child
    }

    /// What happens to a living attachment.
    fn is_used(&self, random: &mut Random) {
        self.check(random);
        if random.one_in(3) {
            self.reaches_the_gateway();
        }
        if random.one_in(3) {
            self.serves_its_port();
        }
        // The more workers, the longer their containers live: the machine has so many processors.
        let life = random.below(400 * self.soak.plan.workers);
        thread::sleep(Duration::from_millis(u64::try_from(life).unwrap()));
        if random.one_in(2) {
            self.check(random);
        }
        if random.one_in(10) {
            self.is_added_again(random);
        }
    }

    fn check(&self, random: &mut Random) {
        self.is_done("CHECK", random);
    }

    /// A runtime must not do this. Whether the answer is an error or not, the attachment is as
    /// before.
    fn is_added_again(&self, random: &mut Random) {
        let outcome = self.call("add", 0).run();
        let answer = if outcome.status == Some(0) { "succeeded" } else { "refused" };
        self.soak.report.event(&format!("repeated ADD {answer}"));
        self.soak.report.fate(&self.id, &format!("ADD again {answer}"));
        self.check(random);
    }

    fn reaches_the_gateway(&self) {
        let (Some(gateway), Some(container)) = (self.network.gateway, &self.container) else {
            return;
        };
        let begin = Instant::now();
        self.soak.report.event("pings");
        if !container.reaches(gateway) {
            self.traffic_failed(begin, "no ping");
        }
    }

    fn serves_its_port(&self) {
        let (Some(host), Some(container)) = (self.network.host, &self.container) else { return };
        let begin = Instant::now();
        self.soak.report.event("connections to ports");
        let server = container.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 80)).unwrap());
        let target = SocketAddr::new(host.parse().unwrap(), self.port);
        match TcpStream::connect_timeout(&target, Duration::from_secs(20)) {
            Ok(_) => drop(server.accept().unwrap()),
            Err(error) => self.traffic_failed(begin, &format!("no connection: {error}")),
        }
    }

    fn traffic_failed(&self, begin: Instant, text: &str) {
        let what = ("traffic", self.network.name);
        if self.is_unrecorded.get() {
            self.soak.report.count_failure(Some(Trouble::FullDisk), what, &self.id, text);
        } else {
            self.soak.report.failed(what, &self.id, begin, text);
        }
    }

    /// DEL, which may have to wait for other calls, and the second DEL.
    fn end(self, random: &mut Random) {
        let begin = Instant::now();
        while !self.is_done("DEL", random) {
            if begin.elapsed() > PATIENCE {
                self.soak.report.failed(("DEL", self.network.name), &self.id, begin, "in vain");
                break;
            }
            thread::sleep(Duration::from_millis(500));
        }
        if random.one_in(2) {
            self.is_done("DEL", random);
        }
        self.soak.report.fate(&self.id, "DEL");
        self.soak.forget(self.network, &self.id);
    }
}
