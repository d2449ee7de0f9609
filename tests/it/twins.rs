//! Twins: random sequences of what a runtime, a node and a container do, on two private nodes, one
//! with the reference plugins and one with cnibox, where the reference makes some of the calls (or,
//! in such a step, on both). Between calls rules are flushed, links and bridges deleted, containers
//! end, the tools of cnibox run, a place is attached a second time, and two containers are attached
//! or deleted at the same time.
//!
//! After each step both nodes must look the same to a user: what the call answered, which links,
//! addresses, routes, leases and rules exist, and who reaches whom, seen as which address.
//! Differences must be in [`KNOWN`], or are put right by `side/mend.rs`; both are rows of
//! docs/parity.md. At the end, DEL must have left nothing on the node of cnibox; only what
//! the reference has deleted there may wait for GC.
//!
//! `REF` is the directory of the reference plugins; by default `PEER` or Debian's
//! (`compare::peer`). `CNIBOX_TWINS_SEEDS=n..m` plays only these sequences, in one of the tests,
//! and prints them. `CNIBOX_TWINS_MUTANT="portmap DEL"` gives cnibox a defect of [`MUTANTS`], which
//! then should fail the test.

mod generate;
mod known;
mod plan;
mod probe;
mod rules;
mod side;
mod view;

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use self::known::{Case, KNOWN, Then};
use self::plan::{
    By, Damage, Extra, HOST, Ipam, Kind, Network, OUTSIDE, Op, Place, Plan, Rules, Step,
};
use self::side::mend::MENDED;
use self::side::{PORTMAP_CHECK, Plugins, Seen, Side, Task};
use crate::support::compare::peer;

/// The number of random steps of a sequence, before the DELs at its end.
const LENGTH: usize = 7;

/// The sequences of one test; four tests are always run.
const SEQUENCES: u64 = 20;

/// The lines of one side only.
struct Difference {
    reference: Vec<String>,
    cnibox: Vec<String>,
}

impl Difference {
    fn of(reference: &Seen, cnibox: &Seen) -> Difference {
        let only_in = |one: &Seen, other: &Seen| -> Vec<String> {
            let lines = one.lines.difference(&other.lines);
            lines.filter(|line| !is_undecided(one, line)).cloned().collect()
        };
        Difference { reference: only_in(reference, cnibox), cnibox: only_in(cnibox, reference) }
    }

    fn is_empty(&self) -> bool {
        self.reference.is_empty() && self.cnibox.is_empty()
    }
}

/// Between two default routes of a container with two interfaces the kernel decides by the state of
/// its neighbours, and which of two neighbours with one address, those of a network of `static`,
/// answers is by chance.
fn is_undecided(seen: &Seen, line: &str) -> bool {
    let Some((pod, to)) = line.strip_prefix("traffic ").and_then(|line| line.split_once(" -> "))
    else {
        return false;
    };
    let routed = format!("{pod}: route default");
    let has_two_routes = seen.lines.iter().filter(|line| line.starts_with(&routed)).count() > 1;
    let is_shared = |(place, net, addr): &(Place, usize, String)| {
        let is_other = |other: &(Place, usize, String)| {
            (&other.1, &other.2) == (net, addr) && other.0 != *place
        };
        let is_meant = pod == place.pod
            || to.starts_with(addr)
            || to.contains(&format!(": {} sees", place.pod));
        is_meant && seen.assigned.iter().any(is_other)
    };
    (to.starts_with(HOST) || to.starts_with(OUTSIDE)) && has_two_routes
        || seen.assigned.iter().any(is_shared)
}

/// A defect that cnibox does not have, to see whether a sequence shows it: the plugin does nothing
/// at the verb. At `ROLLBACK` it deletes what it has after an ADD that failed, even of an earlier
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mutant {
    plugin: &'static str,
    verb: &'static str,
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.plugin, self.verb)
    }
}

const MUTANTS: &[Mutant] = &[
    Mutant { plugin: "portmap", verb: "DEL" },
    Mutant { plugin: "portmap", verb: "ADD" },
    Mutant { plugin: "firewall", verb: "DEL" },
    Mutant { plugin: "firewall", verb: "ADD" },
    Mutant { plugin: "bandwidth", verb: "ADD" },
    Mutant { plugin: "tuning", verb: "DEL" },
    Mutant { plugin: "host-local", verb: "ROLLBACK" },
    Mutant { plugin: "portmap", verb: "ROLLBACK" },
];

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
fn play(plan: &Plan, reference: &Path, mutant: Option<Mutant>) -> Result<Ending, String> {
    let theirs = Side::start(plan, Plugins::Reference, reference.to_path_buf(), None);
    let ours = Side::start(plan, Plugins::Cnibox, reference.to_path_buf(), mutant);
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
    for (title, seen, lines) in [
        ("reference", &answers.0, &difference.reference),
        ("cnibox", &answers.1, &difference.cnibox),
    ] {
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

/// Plays the sequences of these seeds; those that the environment names instead, if any.
fn play_seeds(seeds: Range<u64>) {
    let Some(reference) = reference() else { return };
    let named = std::env::var("CNIBOX_TWINS_SEEDS").ok().map(|text| {
        let (first, end) = text.split_once("..").unwrap();
        first.parse::<u64>().unwrap()..end.parse::<u64>().unwrap()
    });
    let is_chosen = named.is_some();
    let seeds = named.unwrap_or(seeds);
    let defect = std::env::var("CNIBOX_TWINS_MUTANT").ok();
    let mutant =
        defect.map(|name| *MUTANTS.iter().find(|mutant| mutant.to_string() == name).unwrap());
    let start = Instant::now();
    let (mut steps, mut endings, mut wrong) = (0, BTreeMap::<_, usize>::new(), Vec::new());
    for seed in seeds.clone() {
        let plan = Plan::random(seed, LENGTH);
        if is_chosen {
            println!("seed {seed}: {plan}");
        }
        steps += plan.steps.len();
        // A packet may be late on a loaded machine: a difference must show twice.
        let again = |text: String| {
            println!("seed {seed} once more: {text}");
            play(&plan, &reference, mutant)
        };
        match play(&plan, &reference, mutant).or_else(again) {
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
    if let Err(text) = play(plan, &reference, None) {
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
    seeds_from_0: 0,
    seeds_from_20: 20,
    seeds_from_40: 40,
    seeds_from_60: 60,
}

#[test]
#[ignore = "takes minutes: make test-long"]
fn hundreds_of_random_sequences_per_round_agree() {
    let rounds = std::env::var("CNIBOX_LONG").map_or(1, |text| text.parse::<u64>().unwrap());
    play_seeds(1000..1000 + 300 * rounds);
}

#[test]
fn every_known_difference_is_a_row_of_parity() {
    let parity = include_str!("../../docs/parity.md");
    for row in KNOWN.iter().map(|known| known.row).chain([PORTMAP_CHECK]).chain(MENDED) {
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
    let same =
        |place, net| Op::Add { place, net, ports: Vec::new(), mac: Some("02:00:00:00:00:77") };
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

/// ADD by the reference, CHECK by cnibox: the reference lets the bridge learn from link-local
/// frames.
#[test]
fn check_accepts_the_spoof_check_of_the_reference() {
    let net = network("alpha", Kind::Bridge("brx"), SUBNET, &[Extra::SpoofCheck]);
    let mut plan = Plan::of(Rules::Nftables, vec![net], vec![add(A, 0), Op::Check(A)]);
    plan.steps[0].by = By::Reference;
    play_plan(&plan);
}

/// ADD by the reference, CHECK and DEL by cnibox, and the other way round, with everything that a
/// network may have.
#[test]
fn each_checks_what_the_other_has_added() {
    let all = [
        Extra::Masquerade,
        Extra::SpoofCheck,
        Extra::Portmap,
        Extra::Firewall,
        Extra::Bandwidth,
        Extra::Tuning,
    ];
    let kinds = [Kind::Bridge("brx"), Kind::Ptp, Kind::Macvlan("m0")];
    for (kind, rules) in
        kinds.iter().flat_map(|kind| [(kind, Rules::Iptables), (kind, Rules::Nftables)])
    {
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
        plan.steps = vec![
            step(attach(A, ports), By::Reference),
            step(Op::Check(A), By::Cnibox),
            step(Op::Del(A), By::Cnibox),
        ];
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

/// Each defect shows in one short sequence.
#[test]
fn mutants_are_seen() {
    let Some(reference) = reference() else { return };
    let all = [Extra::Masquerade, Extra::Portmap, Extra::Firewall, Extra::Bandwidth, Extra::Tuning];
    let net = network("alpha", Kind::Ptp, SUBNET, &all);
    let attach = Op::Add { place: A, net: 0, ports: vec![8080], mac: None };
    let again = Op::Again { place: A, moved: true };
    for rules in [Rules::Nftables, Rules::Iptables] {
        let plan = Plan::of(rules, vec![net.clone()], vec![attach.clone(), again.clone()]);
        assert_eq!(play(&plan, &reference, None), Ok(Ending::Complete));
        for mutant in MUTANTS {
            let ending = play(&plan, &reference, Some(*mutant));
            assert!(ending.is_err(), "{mutant} with {rules:?}: {ending:?}");
        }
    }
}

/// What an administrator or another program has deleted on the node of cnibox is as before after
/// `cnibox repair`.
#[test]
fn repair_restores_what_the_other_node_has() {
    let all = [Extra::Masquerade, Extra::Portmap, Extra::Firewall];
    let net = network("alpha", Kind::Bridge("brx"), SUBNET, &all);
    let attach = |place, port| Op::Add { place, net: 0, ports: vec![port], mac: None };
    let mut ops = vec![attach(A, 8080), attach(B, 8081)];
    ops.extend([Damage::Ruleset, Damage::Nat, Damage::Bridge("brx")].map(Op::Repair));
    ops.push(Op::Vanish("A"));
    ops.push(Op::CollectDead);
    for rules in [Rules::Nftables, Rules::Iptables] {
        play_these(rules, vec![net.clone()], ops.clone());
    }
}
