//! Twins: random sequences of what a runtime, a node and a container do, on two private nodes, one with the reference
//! plugins and one with cnibox. After each step both must look the same to a user: what the call answered, which links,
//! addresses, routes and leases exist, and who reaches whom, seen as which address. Differences must be in [`KNOWN`],
//! which are rows of docs/parity.md. At the end, nothing may be left on the node of cnibox.
//!
//! Release 0.2.0 differed in 53 of the 200 sequences: it took over host routes (seeds 26, 64, 66), deleted a second
//! interface with the same MAC address (145, 184), ended masquerading of an address that another container also had
//! (73, 125, 192), released valid leases at GC (62, 67, 79), refused at CHECK what the reference had added (21, 40, 54,
//! 77, 87), and kept what tuning had changed under the former name of the network (110, 113).
//!
//! `REF` is the directory of the reference plugins; by default `PEER` or Debian's (`compare::peer`). `CNIBOX_TWINS_SEED=n`
//! plays only the sequence of this seed, and prints it.

mod generate;
mod plan;
mod probe;
mod side;
mod view;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use self::plan::{Attachment, By, Extra, HOST, Ipam, Kind, Network, OUTSIDE, Op, Place, Plan, Rules, Step};
use self::side::{PORTMAP_CHECK, Plugins, Seen, Side, Task};
use crate::support::compare::peer;
use crate::support::conflist::Failed;

/// The number of random steps of a sequence, before the DELs at its end.
const LENGTH: usize = 7;

/// The sequences of one test; four tests run in `make test`.
const SEQUENCES: u64 = 50;

/// A difference that docs/parity.md explains.
struct Known {
    /// The subject of the row.
    row: &'static str,
    explains: fn(&Case<'_>) -> bool,
    then: Then,
}

/// What happens after a known difference.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    /// The nodes are the same.
    Continue,
    /// The attachment, which exists on one node only, is deleted on both.
    Detach,
    /// The nodes cannot be compared any more.
    Stop,
}

/// A step after which the nodes differ.
struct Case<'a> {
    plan: &'a Plan,
    number: usize,
    difference: Difference,
    answers: &'a (Seen, Seen),
}

impl Case<'_> {
    /// Whether the call failed with this text on the reference's node and succeeded on the other.
    fn only_reference_fails(&self, text: &str) -> bool {
        let (theirs, ours) = self.answers;
        let is_known = |failed: &Failed| failed.msg.contains(text);
        theirs.failed.as_ref().is_some_and(is_known) && ours.failed.is_none()
    }

    fn only_cnibox_fails(&self, text: &str) -> bool {
        let (theirs, ours) = self.answers;
        let is_known = |failed: &Failed| failed.msg.contains(text);
        ours.failed.as_ref().is_some_and(is_known) && theirs.failed.is_none()
    }

    fn only_answers_differ(&self) -> bool {
        self.all(|line| line.starts_with("answer:"))
    }

    fn all(&self, which: impl Fn(&str) -> bool) -> bool {
        let Difference { reference, cnibox } = &self.difference;
        reference.iter().chain(cnibox).all(|line| which(line))
    }

    fn op(&self) -> &Op {
        &self.plan.steps[self.number].op
    }

    fn by(&self) -> By {
        self.plan.steps[self.number].by
    }

    /// Whether two attachments with rules of `firewall` may have had one address.
    fn shares_an_address(&self) -> bool {
        let before = self.plan.steps[..=self.number].iter();
        let is_with_rules = |step: &&Step| match step.op {
            Op::Add { net, .. } => self.plan.networks[net].has(Extra::Firewall),
            _ => false,
        };
        before.filter(is_with_rules).count() > 1
    }

    /// Whether a line is the answer of a host port.
    fn is_mapped(line: &str) -> bool {
        line.starts_with("traffic") && line.contains(&format!("-> {HOST}:808"))
    }

    /// Whether a GC has left alone, on the node of cnibox, what the reference had attached.
    fn is_gc_of_the_references(&self) -> bool {
        let Op::Gc { stale: Some(stale), lost: true } = self.op() else { return false };
        let mut before = self.plan.steps[..self.number].iter().rev();
        let is_added = |step: &&Step| matches!(step.op, Op::Add { place, .. } if place == *stale);
        before.find(is_added).is_some_and(|step| step.by == By::Reference)
            && self.difference.reference.iter().all(|line| line.starts_with("traffic"))
    }

    /// Whether everything that differs belongs to attachments that ended without DEL: an ADD or GC of cnibox has
    /// reclaimed it, DEL has deleted it, and it remains with the reference.
    fn concerns_stale_state(&self) -> bool {
        let (_, stale) = self.plan.attached(self.number);
        let is_stale = |line: &str| {
            let is_of = |Attachment { place, ports, .. }: &Attachment<'_>| {
                let lease = format!("twin-{}\\r\\n{}\"", place.pod, place.ifname);
                let to_port = |port: &u16| line.contains(&format!("-> {HOST}:{port}: "));
                line.contains(&lease) || ports.iter().any(to_port)
            };
            line.contains("link [ifb]") || stale.iter().any(is_of)
        };
        let is_add = matches!(self.op(), Op::Add { .. });
        let Difference { reference, cnibox } = &self.difference;
        let remains = |line: &String| is_add && !stale.is_empty() && is_stale(line);
        // Where nothing answers on the node of the reference.
        let is_reached = |line: &String| {
            let to = line.rsplit_once(": ").map_or(line.as_str(), |(to, _)| to);
            let is_traffic = is_add && !stale.is_empty() && line.starts_with("traffic ");
            is_traffic && !reference.iter().any(|other| other.starts_with(to))
        };
        reference.iter().all(|line| remains(line) || self.is_of_former_owner(line))
            && cnibox.iter().all(|line| self.is_of_former_owner(line) || is_reached(line))
    }

    /// Whether a container that is not to be masqueraded is masqueraded on the node of the reference only, by the rule
    /// of the former owner of its address, whose namespace ended without DEL.
    fn is_of_former_owner(&self, line: &str) -> bool {
        let before = &self.plan.steps[..self.number];
        let has_vanished = before.iter().any(|step| matches!(step.op, Op::Vanish(_)));
        let from = line.strip_prefix("traffic ").and_then(|line| line.split(' ').next());
        has_vanished
            && line.contains(&format!("-> {OUTSIDE}:"))
            && from.is_some_and(|pod| !self.plan.masquerades(pod, self.number))
    }
}

const KNOWN: &[Known] = &[
    Known {
        row: "host port in use by another container, on the same address or both on all addresses",
        explains: |case| case.only_cnibox_fails("host port"),
        then: Then::Detach,
    },
    Known {
        row: "route of the host to an address of a `ptp` container, if another route to it exists",
        explains: |case| {
            let plugin = case.answers.1.failed.as_ref().map(|failed| failed.plugin.as_str());
            plugin == Some("ptp") && case.only_cnibox_fails("route")
        },
        then: Then::Detach,
    },
    Known {
        row: "ADD for a container whose own lease is of an earlier boot",
        explains: |case| case.only_reference_fails("duplicate allocation is not allowed"),
        then: Then::Stop,
    },
    Known {
        row: "host port of a container that died without DEL",
        explains: |case| case.concerns_stale_state(),
        then: Then::Stop,
    },
    Known {
        row: "host port in use by another container, on the same address or both on all addresses",
        explains: |case| {
            let is_add = matches!(case.op(), Op::Add { .. });
            let is_other = case.plan.rules == Rules::Nftables && case.by() == By::Reference;
            is_add && is_other && case.all(Case::is_mapped)
        },
        then: Then::Stop,
    },
    Known {
        row: "host port of one container in several networks",
        explains: |case| {
            matches!(case.op(), Op::Del(_)) && case.difference.cnibox.is_empty() && case.all(Case::is_mapped)
        },
        then: Then::Stop,
    },
    Known {
        row: "a second ADD",
        explains: |case| case.only_reference_fails("adding link: file exists"),
        then: Then::Stop,
    },
    Known {
        row: "IPv4 client on the container's subnet, with nftables",
        explains: |case| case.plan.rules == Rules::Nftables && case.all(Case::is_mapped),
        then: Then::Continue,
    },
    Known {
        row: "published ports of a container where the host drops forwarded packets by default (Docker, ufw)",
        explains: |case| {
            let is_mapped = |line: &str| line.starts_with("traffic") && line.contains(&format!("-> {HOST}:808"));
            case.plan.drops && case.all(is_mapped)
        },
        then: Then::Continue,
    },
    Known {
        row: "rules of an address that two attachments have",
        explains: |case| {
            let is_open = |line: &str| line.starts_with("traffic") || line.starts_with("answer:");
            let lost_rule = case.only_reference_fails("expected rule");
            let lost_traffic = case.plan.drops && case.difference.reference.is_empty();
            case.all(is_open) && (lost_rule || lost_traffic) && case.shares_an_address()
        },
        then: Then::Stop,
    },
    Known { row: "GC of `bridge` and `ptp`", explains: |case| case.is_gc_of_the_references(), then: Then::Stop },
    Known {
        row: "DEL without namespace, interface and prevResult",
        explains: |case| case.only_answers_differ() && case.only_reference_fails("CHAIN_DEL failed"),
        then: Then::Continue,
    },
];

/// The lines of one side only.
struct Difference {
    reference: Vec<String>,
    cnibox: Vec<String>,
}

impl Difference {
    /// Between two default routes of a container with two interfaces the kernel decides by the state of its neighbours.
    fn of(reference: &Seen, cnibox: &Seen) -> Difference {
        let only_in = |one: &Seen, other: &Seen| -> Vec<String> {
            let is_undecided = |line: &&String| {
                let Some((pod, to)) = line.strip_prefix("traffic ").and_then(|l| l.split_once(" -> ")) else {
                    return false;
                };
                let routed = format!("{pod}: route default");
                (to.starts_with(HOST) || to.starts_with(OUTSIDE))
                    && one.lines.iter().filter(|line| line.starts_with(&routed)).count() > 1
            };
            one.lines.difference(&other.lines).filter(|line| !is_undecided(line)).cloned().collect()
        };
        Difference { reference: only_in(reference, cnibox), cnibox: only_in(cnibox, reference) }
    }

    fn is_empty(&self) -> bool {
        self.reference.is_empty() && self.cnibox.is_empty()
    }
}

/// How a sequence ended, if it was not a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Ending {
    Complete,
    /// A known difference, after which the nodes cannot be compared.
    Known(&'static str),
}

/// The directory of the reference plugins.
fn reference() -> Option<PathBuf> {
    match std::env::var_os("REF") {
        Some(directory) => Some(directory.into()),
        None => peer("twins"),
    }
}

/// Plays a plan; the first difference as text.
fn play(plan: &Plan, reference: &Path) -> Result<Ending, String> {
    let theirs = Side::start(plan, Plugins::Reference, reference.to_path_buf());
    let ours = Side::start(plan, Plugins::Cnibox, reference.to_path_buf());
    let both = |task: &Task| {
        theirs.tell(task.clone());
        ours.tell(task.clone());
        (theirs.seen(), ours.seen())
    };
    let mut ending = Ending::Complete;
    for (number, step) in plan.steps.iter().enumerate() {
        let answers = both(&Task::Do(step.clone()));
        let mut difference = Difference::of(&answers.0, &answers.1);
        if difference.is_empty() {
            continue;
        }
        // A carrier or an answer may have been late.
        let answer = |line: &String| line.starts_with("answer:");
        if !difference.reference.iter().any(answer) {
            for patience in [30, 200, 1000] {
                std::thread::sleep(Duration::from_millis(patience / 4));
                let (theirs, ours) = both(&Task::Look(Duration::from_millis(patience)));
                difference = Difference::of(&theirs, &ours);
                if difference.is_empty() {
                    break;
                }
            }
        }
        if difference.is_empty() {
            continue;
        }
        let case = Case { plan, number, difference, answers: &answers };
        let Some(known) = KNOWN.iter().find(|known| (known.explains)(&case)) else {
            return Err(report(&case));
        };
        match known.then {
            Then::Continue => {}
            Then::Detach => {
                if let Op::Add { place, .. } = step.op {
                    drop(both(&Task::Detach(place)));
                }
            }
            Then::Stop => {
                ending = Ending::Known(known.row);
                break;
            }
        }
    }
    if ending == Ending::Complete {
        let (_, left) = both(&Task::Leftovers);
        if !left.lines.is_empty() {
            return Err(format!("{plan}left on the node of cnibox: {:#?}", left.lines));
        }
    }
    Ok(ending)
}

fn report(case: &Case<'_>) -> String {
    let Case { plan, number, difference, answers } = case;
    let mut text = format!("{plan}after step {number}, {}:\n", plan.steps[*number]);
    for (title, seen, lines) in
        [("reference", &answers.0, &difference.reference), ("cnibox", &answers.1, &difference.cnibox)]
    {
        writeln!(text, "only with {title}:").unwrap();
        for line in lines {
            writeln!(text, "    {line}").unwrap();
        }
        if let Some(failed) = &seen.failed {
            writeln!(text, "    ({title} said: {failed:?})").unwrap();
        }
    }
    text
}

/// Plays the sequences of these seeds.
fn play_seeds(seeds: std::ops::Range<u64>) {
    let Some(reference) = reference() else { return };
    let only = std::env::var("CNIBOX_TWINS_SEED").ok().map(|text| text.parse::<u64>().unwrap());
    let start = Instant::now();
    let (mut steps, mut endings, mut wrong) = (0, BTreeMap::<_, usize>::new(), Vec::new());
    for seed in seeds.clone().filter(|seed| only.is_none_or(|only| only == *seed)) {
        let plan = Plan::random(seed, LENGTH);
        if only.is_some() {
            println!("seed {seed}: {plan}");
        }
        steps += plan.steps.len();
        // A packet may be late on a loaded machine: a difference must show twice.
        let again = |text: String| {
            println!("seed {seed} once more: {text}");
            play(&plan, &reference)
        };
        match play(&plan, &reference).or_else(again) {
            Ok(ending) => *endings.entry(ending).or_default() += 1,
            Err(text) => wrong.push(format!("seed {seed}: {text}")),
        }
    }
    let count = seeds.end - seeds.start;
    let time = start.elapsed();
    println!("twins: {count} sequences, {steps} steps, {endings:?}, {time:?}");
    assert!(wrong.is_empty(), "{} of {count}\n{}", wrong.len(), wrong.join("\n"));
}

/// Plays one directed sequence of cnibox.
#[track_caller]
fn play_these(rules: Rules, networks: Vec<Network>, ops: Vec<Op>) {
    play_plan(&Plan::of(rules, networks, ops));
}

#[track_caller]
fn play_plan(plan: &Plan) {
    let Some(reference) = reference() else { return };
    if let Err(text) = play(plan, &reference) {
        panic!("{text}");
    }
}

macro_rules! seeds {
    ($($name:ident: $first:literal,)+) => {
        $(
            #[test]
            fn $name() {
                play_seeds($first..$first + SEQUENCES);
            }
        )+
    };
}

seeds! {
    fifty_sequences: 0,
    fifty_more: 50,
    fifty_others: 100,
    the_last_fifty: 150,
}

#[test]
#[ignore = "takes minutes: make soak"]
fn a_thousand_random_sequences_per_round_agree() {
    let rounds = std::env::var("CNIBOX_SOAK").map_or(1, |text| text.parse::<u64>().unwrap());
    play_seeds(1000..1000 + 1000 * rounds);
}

#[test]
fn every_known_difference_is_a_row_of_parity() {
    let parity = include_str!("../../docs/parity.md");
    for row in KNOWN.iter().map(|known| known.row).chain([PORTMAP_CHECK]) {
        assert!(parity.contains(&format!("\n| {row} |")), "docs/parity.md has no row {row:?}");
    }
}

const A: Place = Place { pod: "A", ifname: "eth0" };
const A1: Place = Place { pod: "A", ifname: "eth1" };
const B: Place = Place { pod: "B", ifname: "eth0" };

const SUBNET: Ipam = Ipam::Subnet("10.1.0.0/24");

fn network(name: &'static str, kind: Kind, ipam: Ipam, extras: &[Extra]) -> Network {
    Network { name, kind, ipam, extras: extras.to_vec() }
}

fn add(place: Place, net: usize) -> Op {
    Op::Add { place, net, ports: Vec::new(), mac: None }
}

/// Two networks of `ptp` have the same subnet: the host's route to the first container stays.
#[test]
fn a_second_owner_of_an_address_keeps_the_first_ones_route() {
    let net = |name| network(name, Kind::Ptp, SUBNET, &[]);
    let ops = vec![add(A, 0), add(B, 1), Op::Del(B)];
    play_these(Rules::Nftables, vec![net("alpha"), net("beta")], ops);
}

#[test]
fn routes_of_the_node_are_kept() {
    let net = network("alpha", Kind::Ptp, SUBNET, &[]);
    let ops = vec![Op::NodeRoute("10.1.0.2"), add(A, 0), Op::Del(A)];
    play_these(Rules::Nftables, vec![net], ops);
}

/// As for a bond inside a container.
#[test]
fn two_interfaces_with_one_mac_are_deleted_one_by_one() {
    let net = |name, master| network(name, Kind::Macvlan(master), Ipam::None, &[]);
    let same = |place, net| Op::Add { place, net, ports: Vec::new(), mac: Some("02:00:00:00:00:77") };
    let ops = vec![same(A, 0), same(A1, 1), Op::Del(A), Op::Check(A1)];
    play_these(Rules::Nftables, vec![net("alpha", "m0"), net("beta", "m1")], ops);
}

/// Two bridges with one subnet: each container is masqueraded as long as it lives.
#[test]
fn del_keeps_masquerading_of_a_shared_address() {
    for rules in [Rules::Nftables, Rules::Iptables] {
        let net = |name, bridge| network(name, Kind::Bridge(bridge), SUBNET, &[Extra::Masquerade]);
        let ops = vec![add(A, 0), add(B, 1), Op::Del(B), Op::Check(A)];
        play_these(rules, vec![net("alpha", "brx"), net("beta", "bry")], ops);
    }
}

/// ADD by the reference, CHECK by cnibox: the reference lets the bridge learn from link-local frames.
#[test]
fn check_accepts_the_spoof_check_of_the_reference() {
    let net = network("alpha", Kind::Bridge("brx"), SUBNET, &[Extra::SpoofCheck]);
    let mut plan = Plan::of(Rules::Nftables, vec![net], vec![add(A, 0), Op::Check(A)]);
    plan.steps[0].by = By::Reference;
    play_plan(&plan);
}

/// ADD by the reference, CHECK and DEL by cnibox, and the other way round, with everything that a network may have.
#[test]
fn each_checks_what_the_other_has_added() {
    let all = [Extra::Masquerade, Extra::SpoofCheck, Extra::Portmap, Extra::Firewall, Extra::Bandwidth, Extra::Tuning];
    let kinds = [Kind::Bridge("brx"), Kind::Ptp, Kind::Macvlan("m0")];
    for (kind, rules) in kinds.iter().flat_map(|kind| [(kind, Rules::Iptables), (kind, Rules::Nftables)]) {
        let extras: Vec<Extra> = match kind {
            Kind::Bridge(_) => all.to_vec(),
            Kind::Ptp => all.into_iter().filter(|e| *e != Extra::SpoofCheck).collect(),
            Kind::Macvlan(_) => vec![Extra::Tuning],
        };
        let net = network("alpha", *kind, SUBNET, &extras);
        let ports = if *kind == Kind::Macvlan("m0") { vec![] } else { vec![8080] };
        let attach = |place, ports| Op::Add { place, net: 0, ports, mac: None };
        let step = |op, by| Step { op, by };
        let mut plan = Plan::of(rules, vec![net], vec![]);
        plan.steps =
            vec![step(attach(A, ports), By::Reference), step(Op::Check(A), By::Cnibox), step(Op::Del(A), By::Cnibox)];
        play_plan(&plan);
        if rules == Rules::Iptables {
            plan.steps = vec![
                step(attach(A, vec![]), By::Cnibox),
                step(Op::Check(A), By::Reference),
                step(Op::Del(A), By::Reference),
            ];
            play_plan(&plan);
        }
    }
}

/// An attachment is identified by container and interface, not by the network.
#[test]
fn tuning_is_restored_after_renaming_the_network() {
    let net = network("alpha", Kind::Ptp, SUBNET, &[Extra::Tuning]);
    play_these(Rules::Nftables, vec![net], vec![add(A, 0), Op::RenamedTuning(A)]);
}
