//! Random networks, and random steps.

use super::plan::{By, Damage, Extra, Ipam, Kind, Network, Op, PORTS, Place, Plan, Rules, Step};
use crate::support::random::Random;

const PODS: [&str; 3] = ["A", "B", "C"];
const MAC: &str = "02:00:00:00:00:77";

impl Network {
    /// A network beside others. Two networks on one segment have different subnets, because it is
    /// by chance which of two neighbours with one address answers.
    fn random(random: &mut Random, name: &'static str, others: &[Network]) -> Network {
        let has = |kind| others.iter().any(|other| other.kind == kind);
        let kind = match random.below(10) {
            0..4 => Kind::Bridge(random.pick(&["brx", "brx", "bry"])),
            4..7 => Kind::Ptp,
            _ if has(Kind::Macvlan("m0")) => Kind::Macvlan("m1"),
            _ => Kind::Macvlan("m0"),
        };
        let is_shared = kind != Kind::Ptp && has(kind);
        let ipam = match random.below(12) {
            _ if is_shared => Ipam::Subnet(["10.3.0.0/24", "10.4.0.0/24"][others.len() - 1]),
            0..7 => Ipam::Subnet("10.1.0.0/24"),
            7..9 => Ipam::Subnet("10.2.0.0/24"),
            9 => Ipam::UpTo("10.1.0.0/24", "10.1.0.3"),
            10 => Ipam::Static("10.1.0.3/24", "10.1.0.1"),
            _ => Ipam::Static("10.2.0.5/24", "10.2.0.1"),
        };
        let optional: &[Extra] = match kind {
            Kind::Bridge(_) => &[
                Extra::Masquerade,
                Extra::SpoofCheck,
                Extra::Portmap,
                Extra::Firewall,
                Extra::Bandwidth,
                Extra::Tuning,
            ],
            Kind::Ptp => &[
                Extra::Masquerade,
                Extra::Portmap,
                Extra::Firewall,
                Extra::Bandwidth,
                Extra::Tuning,
            ],
            Kind::Macvlan(_) => &[Extra::Tuning],
        };
        // Each plugin of the reference takes time: three of them on average.
        let extras = optional.iter().copied().filter(|_| random.one_in(2)).collect();
        Network { name, kind, ipam, extras }
    }
}

impl Plan {
    /// The sequence of a seed, with this number of random steps. At its end all is deleted.
    pub(super) fn random(seed: u64, length: usize) -> Plan {
        let mut random = Random::of_seed(seed);
        let names = ["alpha", "beta", "gamma"];
        let count = 2 + random.below(2);
        let mut networks = Vec::new();
        for name in &names[..count] {
            networks.push(Network::random(&mut random, name, &networks));
        }
        let rules = random.pick(&[Rules::Iptables, Rules::Nftables]);
        // What nftables accepts may still be dropped by the policy.
        let drops = rules == Rules::Iptables && random.one_in(4);
        let mut plan = Plan { rules, drops, networks, steps: Vec::new() };
        let (attached, ended, undeleted, foreign) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut model = Model {
            plan: &mut plan,
            random,
            attached,
            ended,
            undeleted,
            foreign,
            is_flushed: false,
        };
        for _ in 0..length {
            model.step();
        }
        plan.with_the_end()
    }
}

impl Plan {
    /// Whether calls for these networks can be exchanged: their addresses are distinct, or of one
    /// large pool that no other network has and no route of the node takes from.
    fn is_independent(&self, one: usize, other: usize) -> bool {
        let subnet = |net: usize| match self.networks[net].ipam {
            Ipam::Subnet(subnet) | Ipam::UpTo(subnet, _) => Some(&subnet[..5]),
            Ipam::Static(address, _) => Some(&address[..5]),
            Ipam::None => None,
        };
        if one != other {
            // A bridge has the gateway of the first network only.
            return subnet(one) != subnet(other)
                && self.networks[one].kind != self.networks[other].kind;
        }
        let is_routed = self.steps.iter().any(|step| matches!(step.op, Op::NodeRoute(_)));
        let sharing = (0..self.networks.len()).filter(|net| subnet(*net) == subnet(one));
        matches!(self.networks[one].ipam, Ipam::Subnet(_)) && sharing.count() == 1 && !is_routed
    }
}

impl Op {
    fn place(&self) -> Option<Place> {
        match self {
            Op::Add { place, .. } | Op::Del(place) => Some(*place),
            _ => None,
        }
    }

    fn network(&self) -> Option<usize> {
        if let Op::Add { net, .. } = self { Some(*net) } else { None }
    }

    fn ports(&self) -> &[u16] {
        if let Op::Add { ports, .. } = self { ports } else { &[] }
    }

    /// Whether this attaches another interface of the container to the network.
    fn attaches(&self, to: Place, network: usize) -> bool {
        let Op::Add { place, net, .. } = self else { return false };
        *net == network && place.pod == to.pod && place.ifname != to.ifname
    }
}

/// What is attached if every ADD succeeds.
struct Model<'p> {
    plan: &'p mut Plan,
    random: Random,
    attached: Vec<(Place, usize)>,
    /// Places after their DEL or the end of their namespace.
    ended: Vec<Place>,
    /// Those without DEL, and their networks.
    undeleted: Vec<(Place, usize)>,
    /// What the reference has attached on both nodes.
    foreign: Vec<Place>,
    /// The next ADD of cnibox would restore the rules, that of the reference would not.
    is_flushed: bool,
}

impl Model<'_> {
    fn step(&mut self) {
        let op = match self.random.below(if self.attached.is_empty() { 4 } else { 33 }) {
            _ if self.is_flushed => self.after_flush(),
            0..9 | 23 => self.add(),
            20 if !self.plan.steps.iter().any(|step| matches!(step.op, Op::AtOnce(_))) => {
                Op::NodeRoute(self.random.pick(&["10.1.0.2", "10.1.0.3"]))
            }
            9..13 | 20 => self.del(),
            13 if !self.ended.is_empty() => self.late_del(),
            13..16 => Op::Check(self.some().0),
            16..18 => self.gc(),
            18..20 => self.vanish(),
            21 => Op::TenantMac(self.some().0),
            22 => self.renamed(),
            24..27 => self.again(),
            27 => self.repair(),
            28 => self.collect_dead(),
            29 => self.cut(),
            30 => self.at_once(),
            31 => Op::Doctor,
            _ => self.flush(),
        };
        let by = self.by(&op);
        if let Op::Add { place, .. } = op
            && by == By::Reference
        {
            self.foreign.push(place);
        }
        self.plan.steps.push(Step { op, by });
    }

    /// With nftables, the reference does not know the rules of cnibox.
    fn by(&mut self, op: &Op) -> By {
        let is_possible = match op {
            Op::Add { .. } => true,
            Op::Del(_) | Op::Check(_) => self.plan.rules == Rules::Iptables,
            _ => false,
        };
        if is_possible && self.random.one_in(6) { By::Reference } else { By::Cnibox }
    }

    fn some(&mut self) -> (Place, usize) {
        self.random.pick(&self.attached)
    }

    fn add(&mut self) -> Op {
        let place = Place {
            pod: self.random.pick(&PODS),
            ifname: self.random.pick(&["eth0", "eth0", "eth1"]),
        };
        if self.attached.iter().any(|(taken, _)| *taken == place) {
            return self.again_at(place);
        }
        // Twice in one network, the attachments of a container share chains and ifb devices of the
        // reference.
        let calls = || self.plan.steps.iter().flat_map(|step| step.op.parts());
        let is_used = |net| calls().any(|op| op.attaches(place, net));
        let free: Vec<usize> = (0..self.plan.networks.len()).filter(|net| !is_used(*net)).collect();
        if free.is_empty() {
            return Op::Gc { stale: None, lost: false };
        }
        // After a restart, a container has the network in which it was not deleted.
        let earlier = self.undeleted.iter().find(|(other, _)| *other == place);
        let net = earlier.map_or_else(|| self.random.pick(&free), |(_, net)| *net);
        let network = &self.plan.networks[net];
        if earlier.is_some() && network.has(Extra::SpoofCheck) {
            // The chain of the reference would have both MAC addresses.
            self.undeleted.retain(|(other, _)| *other != place);
            return Op::Del(place);
        }
        let mut ports = Vec::new();
        if network.has(Extra::Portmap) && self.random.one_in(2) {
            let used = |port| {
                let is_used =
                    |op: &Op| matches!(op, Op::Add { ports, .. } if ports.contains(&port));
                self.plan.steps.iter().flat_map(|step| step.op.parts()).any(is_used)
            };
            let free: Vec<u16> = PORTS.into_iter().filter(|port| !used(*port)).collect();
            // cnibox waits for two seconds until a port is free.
            ports = if free.is_empty() || self.random.one_in(12) { PORTS.to_vec() } else { free };
            let only = self.random.pick(&ports);
            ports.retain(|port| *port == only);
        }
        let is_macvlan = matches!(network.kind, Kind::Macvlan(_));
        let mac = (is_macvlan && !self.random.one_in(3)).then_some(MAC);
        self.ended.retain(|ended| *ended != place);
        self.undeleted.retain(|(other, _)| *other != place);
        self.foreign.retain(|other| *other != place);
        self.attached.push((place, net));
        Op::Add { place, net, ports, mac }
    }

    fn del(&mut self) -> Op {
        let (place, _) = self.some();
        self.del_of(place)
    }

    fn del_of(&mut self, place: Place) -> Op {
        self.end(place);
        Op::Del(place)
    }

    fn end(&mut self, place: Place) {
        self.attached.retain(|(other, _)| *other != place);
        self.ended.push(place);
    }

    fn gc(&mut self) -> Op {
        if self.random.one_in(2) {
            return Op::Gc { stale: None, lost: false };
        }
        let (place, net) = self.some();
        self.end(place);
        // GC alone removes pairs, but no links inside the container.
        let is_pair = !matches!(self.plan.networks[net].kind, Kind::Macvlan(_));
        Op::Gc { stale: Some(place), lost: is_pair && self.random.one_in(2) }
    }

    /// The attachments are over; ADD of the same container is a restart.
    fn vanish(&mut self) -> Op {
        let (place, _) = self.some();
        let attached = self.attached.clone().into_iter();
        for (place, net) in attached.filter(|(other, _)| other.pod == place.pod) {
            self.end(place);
            self.undeleted.push((place, net));
        }
        Op::Vanish(place.pod)
    }

    fn renamed(&mut self) -> Op {
        let (place, net) = self.some();
        if self.plan.networks[net].has(Extra::Tuning) {
            Op::RenamedTuning(place)
        } else {
            self.del()
        }
    }

    fn late_del(&mut self) -> Op {
        let place = self.random.pick(&self.ended);
        self.undeleted.retain(|(other, _)| *other != place);
        Op::Del(place)
    }

    fn again(&mut self) -> Op {
        let (place, _) = self.some();
        self.again_at(place)
    }

    /// With `static`, a second ADD in another namespace succeeds, and takes the place of the first
    /// one: it has the host's route and the record, which are over with that namespace. One
    /// that fails takes the reference's spoof check along.
    fn again_at(&mut self, place: Place) -> Op {
        let is_replaced = |(other, net): &(Place, usize)| {
            let network = &self.plan.networks[*net];
            *other == place
                && (network.has(Extra::SpoofCheck) || matches!(network.ipam, Ipam::Static(..)))
        };
        let moves = !self.attached.iter().any(is_replaced);
        Op::Again { place, moved: moves && self.random.one_in(2) }
    }

    fn damage(&mut self) -> Damage {
        let (_, net) = self.some();
        match self.plan.networks[net].kind {
            Kind::Bridge(name) if self.random.one_in(2) => Damage::Bridge(name),
            // With nftables, one table of iptables has the rules of one side only.
            _ if self.plan.rules == Rules::Nftables => Damage::Ruleset,
            _ => self.random.pick(&[Damage::Ruleset, Damage::Nat]),
        }
    }

    /// cnibox does not restore what the reference has attached, but everything else.
    fn repair(&mut self) -> Op {
        let damage = self.damage();
        let is_cut = self.plan.steps.iter().any(|step| matches!(step.op, Op::CutBridge(_)));
        if self.foreign.is_empty() && !is_cut {
            Op::Repair(damage)
        } else {
            Op::Check(self.some().0)
        }
    }

    fn collect_dead(&mut self) -> Op {
        self.undeleted.clear();
        Op::CollectDead
    }

    fn flush(&mut self) -> Op {
        match self.damage() {
            Damage::Bridge(name) => Op::CutBridge(name),
            damage => {
                self.is_flushed = true;
                Op::Flush(damage)
            }
        }
    }

    fn after_flush(&mut self) -> Op {
        match self.random.below(5) {
            0 => Op::Doctor,
            4 if !self.attached.is_empty() => self.vanish(),
            1 if !self.ended.is_empty() => self.late_del(),
            _ if self.attached.is_empty() => Op::Doctor,
            2 => Op::Check(self.some().0),
            _ => self.del(),
        }
    }

    /// The attachment is over; the container lives.
    fn cut(&mut self) -> Op {
        let (place, net) = self.some();
        if matches!(self.plan.networks[net].kind, Kind::Macvlan(_)) {
            return Op::Check(place);
        }
        self.end(place);
        self.undeleted.push((place, net));
        Op::CutPair(place)
    }

    /// Two calls whose outcome does not depend on their order, up to who gets which address.
    fn at_once(&mut self) -> Op {
        let (place, net) = self.some();
        let is_del = self.random.one_in(2);
        let first = if is_del { self.del_of(place) } else { self.add() };
        let second = self.add();
        let first_net = if is_del { Some(net) } else { first.network() };
        if let (Some(one), Some(other)) = (first_net, second.network())
            && first.place().zip(second.place()).is_some_and(|(one, other)| one.pod != other.pod)
            && self.plan.is_independent(one, other)
            && first.ports().iter().all(|port| !second.ports().contains(port))
        {
            return Op::AtOnce(vec![first, second]);
        }
        self.plan.steps.push(Step { op: first, by: By::Cnibox });
        second
    }
}
