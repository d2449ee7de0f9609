//! Random networks, and the steps of a sequence.

use std::fmt;

use serde_json::{Value, json};

use crate::node::Node;

/// The host's address towards the other host, and that host's.
pub(super) const HOST: &str = "192.0.2.1";
pub(super) const OUTSIDE: &str = "192.0.2.2";

/// The port at which every place answers.
pub(super) const ECHO: u16 = 7777;

/// The host ports of all sequences.
pub(super) const PORTS: [u16; 2] = [8080, 8081];

const PODS: [&str; 3] = ["A", "B", "C"];
const MAC: &str = "02:00:00:00:00:77";

/// A pseudo-random number generator: xorshift64 (Marsaglia, 2003).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn of_seed(seed: u64) -> Random {
        // Neighbouring seeds give unrelated sequences.
        let mut random = Random((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for _ in 0..8 {
            random.below(2);
        }
        random
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(limit).unwrap()).unwrap()
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn any<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }
}

/// The packet filter that networks name; the reference 1.1.1 always uses iptables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rules {
    Iptables,
    Nftables,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// With the bridge's name.
    Bridge(&'static str),
    Ptp,
    /// With the master's name.
    Macvlan(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ipam {
    /// A subnet of host-local, in which the first address is the gateway's.
    Subnet(&'static str),
    /// The same with the last address that may be assigned.
    UpTo(&'static str, &'static str),
    /// An address and its gateway.
    Static(&'static str, &'static str),
    None,
}

/// What a network has beside its interface plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extra {
    Masquerade,
    SpoofCheck,
    Portmap,
    Firewall,
    Bandwidth,
    /// MTU 1300, a MAC address and a kernel parameter.
    Tuning,
}

#[derive(Clone, Debug)]
pub(super) struct Network {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) ipam: Ipam,
    pub(super) extras: Vec<Extra>,
}

impl Network {
    pub(super) fn has(&self, extra: Extra) -> bool {
        self.extras.contains(&extra)
    }

    /// A network beside others. Two networks on one segment have different subnets, because it is by chance which of two
    /// neighbours with one address answers.
    fn random(random: &mut Random, name: &'static str, others: &[Network]) -> Network {
        let has = |kind| others.iter().any(|other| other.kind == kind);
        let kind = match random.below(10) {
            0..4 => Kind::Bridge(random.any(&["brx", "brx", "bry"])),
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

    /// The list of plugins.
    pub(super) fn conf(&self, node: &Node, rules: Rules) -> Value {
        let route = json!([{"dst": "0.0.0.0/0"}]);
        let pool = |subnet: &str| {
            let mut ipam = node.host_local(&[subnet]);
            ipam["routes"] = route.clone();
            ipam
        };
        let ipam = match self.ipam {
            Ipam::Subnet(subnet) => pool(subnet),
            Ipam::UpTo(subnet, last) => {
                let mut ipam = pool(subnet);
                ipam["ranges"][0][0]["rangeEnd"] = json!(last);
                ipam
            }
            Ipam::Static(address, gateway) => json!({"type": "static", "routes": route,
                "addresses": [{"address": address, "gateway": gateway}]}),
            Ipam::None => json!({}),
        };
        let word = if rules == Rules::Iptables { "iptables" } else { "nftables" };
        let mut first = match self.kind {
            Kind::Bridge(name) => json!({"type": "bridge", "bridge": name, "isGateway": true,
                "hairpinMode": true, "macspoofchk": self.has(Extra::SpoofCheck)}),
            Kind::Ptp => json!({"type": "ptp"}),
            Kind::Macvlan(master) => json!({"type": "macvlan", "master": master,
                "capabilities": {"mac": true}}),
        };
        first["ipam"] = ipam;
        if self.has(Extra::Masquerade) {
            first["ipMasq"] = json!(true);
            first["ipMasqBackend"] = json!(word);
        }
        let more = self.extras.iter().filter_map(|extra| match extra {
            Extra::Masquerade | Extra::SpoofCheck => None,
            Extra::Portmap => Some(json!({"type": "portmap", "backend": word,
                "capabilities": {"portMappings": true}})),
            Extra::Firewall => Some(json!({"type": "firewall", "backend": word})),
            Extra::Bandwidth => Some(json!({"type": "bandwidth",
                "ingressRate": 800_000_000, "ingressBurst": 80_000_000,
                "egressRate": 800_000_000, "egressBurst": 80_000_000})),
            Extra::Tuning => Some(json!({"type": "tuning", "mtu": 1300,
                "dataDir": node.path("tuning"), "sysctl": {"net.core.somaxconn": "500"}})),
        });
        let plugins: Vec<Value> = [first].into_iter().chain(more).collect();
        json!({"cniVersion": "1.0.0", "name": self.name, "plugins": plugins})
    }
}

/// A container and one of its interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) pod: &'static str,
    pub(super) ifname: &'static str,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.pod, self.ifname)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// ADD with these host ports and this MAC address. A failed ADD is followed by DEL, as by runtimes.
    Add {
        place: Place,
        net: usize,
        ports: Vec<u16>,
        mac: Option<&'static str>,
    },
    /// DEL; with the result of ADD, unless an earlier DEL has succeeded and the runtime forgot it.
    Del(Place),
    Check(Place),
    /// GC after which only the attachments without this place are valid. The runtime calls DEL for it,
    /// unless it has lost its cache.
    Gc {
        stale: Option<Place>,
        lost: bool,
    },
    /// The namespace of a container ends without DEL.
    Vanish(&'static str),
    /// The node gets a route to an address through the other host.
    NodeRoute(&'static str),
    /// The container changes its MAC address.
    TenantMac(Place),
    /// DEL of `tuning` only, for a network that has been renamed.
    RenamedTuning(Place),
}

impl Op {
    /// Whether this attaches another interface of the container to the network.
    fn attaches(&self, to: Place, network: usize) -> bool {
        let Op::Add { place, net, .. } = self else { return false };
        *net == network && place.pod == to.pod && place.ifname != to.ifname
    }
}

/// Who executes a call on the node of cnibox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    Cnibox,
    Reference,
}

#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) op: Op,
    pub(super) by: By,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.op {
            Op::Add { place, net, ports, mac } => {
                write!(f, "ADD {place} to network {net}, host ports {ports:?}")?;
                mac.map_or(Ok(()), |mac| write!(f, ", MAC {mac}"))?;
            }
            Op::Del(place) => write!(f, "DEL {place}")?,
            Op::Check(place) => write!(f, "CHECK {place}")?,
            Op::Gc { stale: None, .. } => write!(f, "GC, all valid")?,
            Op::Gc { stale: Some(place), lost: false } => write!(f, "GC without {place}")?,
            Op::Gc { stale: Some(place), .. } => write!(f, "GC without {place}, no DEL before")?,
            Op::Vanish(pod) => write!(f, "the namespace of {pod} ends")?,
            Op::NodeRoute(addr) => write!(f, "the node gets a route to {addr}")?,
            Op::TenantMac(place) => write!(f, "{place} changes its MAC address")?,
            Op::RenamedTuning(place) => write!(f, "DEL of tuning of {place}, network renamed")?,
        }
        if self.by == By::Reference { write!(f, " (by the reference on both)") } else { Ok(()) }
    }
}

/// A sequence on two nodes.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) rules: Rules,
    /// The policy of FORWARD is DROP, so that only what `firewall` accepts passes.
    pub(super) drops: bool,
    pub(super) networks: Vec<Network>,
    pub(super) steps: Vec<Step>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "cnibox with {:?}; FORWARD drops: {}", self.rules, self.drops)?;
        for (n, net) in self.networks.iter().enumerate() {
            let Network { name, kind, ipam, extras } = net;
            writeln!(f, "network {n} {name}: {kind:?}, {ipam:?}, {extras:?}")?;
        }
        for (n, step) in self.steps.iter().enumerate() {
            writeln!(f, "{n:2}. {step}")?;
        }
        Ok(())
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
        let rules = random.any(&[Rules::Iptables, Rules::Nftables]);
        // What nftables accepts may still be dropped by the policy.
        let drops = rules == Rules::Iptables && random.one_in(4);
        let mut plan = Plan { rules, drops, networks, steps: Vec::new() };
        let (attached, ended, undeleted) = (Vec::new(), Vec::new(), Vec::new());
        let mut model = Model { plan: &mut plan, random, attached, ended, undeleted };
        for _ in 0..length {
            model.step();
        }
        plan.with_the_end()
    }

    /// The sequence of these operations by cnibox, and of DEL of what they attach.
    pub(super) fn of(rules: Rules, networks: Vec<Network>, ops: Vec<Op>) -> Plan {
        let steps = ops.into_iter().map(|op| Step { op, by: By::Cnibox }).collect();
        Plan { rules, drops: false, networks, steps }.with_the_end()
    }

    /// The attachments whose namespace has ended and that were not deleted before this step, with their host ports.
    pub(super) fn stale(&self, before: usize) -> Vec<(Place, Vec<u16>)> {
        let (mut alive, mut stale) = (Vec::new(), Vec::new());
        for step in &self.steps[..before] {
            match &step.op {
                Op::Add { place, ports, .. } => {
                    stale.retain(|(other, _)| other != place);
                    alive.push((*place, ports.clone()));
                }
                Op::Del(place) | Op::Gc { stale: Some(place), .. } => {
                    alive.retain(|(other, _)| other != place);
                    stale.retain(|(other, _)| other != place);
                }
                Op::Vanish(pod) => {
                    let (gone, others) =
                        alive.into_iter().partition(|(p, _): &(Place, _)| p.pod == *pod);
                    alive = others;
                    stale.extend::<Vec<_>>(gone);
                }
                _ => {}
            }
        }
        stale
    }

    /// Whether any network of the container is masqueraded.
    pub(super) fn masquerades(&self, pod: &str) -> bool {
        self.steps.iter().any(|step| {
            let Op::Add { place, net, .. } = step.op else { return false };
            place.pod == pod && self.networks[net].has(Extra::Masquerade)
        })
    }

    fn with_the_end(mut self) -> Plan {
        let mut places: Vec<Place> = Vec::new();
        for step in &self.steps {
            if let Op::Add { place, .. } = step.op
                && !places.contains(&place)
            {
                places.push(place);
            }
        }
        self.steps
            .extend(places.into_iter().map(|place| Step { op: Op::Del(place), by: By::Cnibox }));
        self
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
}

impl Model<'_> {
    fn step(&mut self) {
        let op = match self.random.below(if self.attached.is_empty() { 4 } else { 24 }) {
            0..9 => self.add(),
            9..13 => self.del(),
            13 if !self.ended.is_empty() => {
                let place = self.random.any(&self.ended);
                self.undeleted.retain(|(other, _)| *other != place);
                Op::Del(place)
            }
            13..16 => Op::Check(self.some().0),
            16..18 => self.gc(),
            18..20 => self.vanish(),
            20 => Op::NodeRoute(self.random.any(&["10.1.0.2", "10.1.0.3"])),
            21 => Op::TenantMac(self.some().0),
            22 => self.renamed(),
            _ => self.add(),
        };
        let by = self.by(&op);
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
        self.random.any(&self.attached)
    }

    fn add(&mut self) -> Op {
        let place = Place {
            pod: self.random.any(&PODS),
            ifname: self.random.any(&["eth0", "eth0", "eth1"]),
        };
        if self.attached.iter().any(|(taken, _)| *taken == place) {
            return Op::Check(place);
        }
        // Twice in one network, the attachments of a container share chains and ifb devices of the reference.
        let is_used = |net| self.plan.steps.iter().any(|step| step.op.attaches(place, net));
        let free: Vec<usize> = (0..self.plan.networks.len()).filter(|net| !is_used(*net)).collect();
        if free.is_empty() {
            return Op::Gc { stale: None, lost: false };
        }
        // After a restart, a container has the network in which it was not deleted.
        let earlier = self.undeleted.iter().find(|(other, _)| *other == place);
        let net = earlier.map_or_else(|| self.random.any(&free), |(_, net)| *net);
        let network = &self.plan.networks[net];
        let mut ports = Vec::new();
        if network.has(Extra::Portmap) && self.random.one_in(2) {
            let used = |port| {
                let is_used = |step: &Step| matches!(&step.op, Op::Add { ports, .. } if ports.contains(&port));
                self.plan.steps.iter().any(is_used)
            };
            let free: Vec<u16> = PORTS.into_iter().filter(|port| !used(*port)).collect();
            // cnibox waits for two seconds until a port is free.
            ports = if free.is_empty() || self.random.one_in(12) { PORTS.to_vec() } else { free };
            let only = self.random.any(&ports);
            ports.retain(|port| *port == only);
        }
        let is_macvlan = matches!(network.kind, Kind::Macvlan(_));
        let mac = (is_macvlan && !self.random.one_in(3)).then_some(MAC);
        self.ended.retain(|ended| *ended != place);
        self.undeleted.retain(|(other, _)| *other != place);
        self.attached.push((place, net));
        Op::Add { place, net, ports, mac }
    }

    fn del(&mut self) -> Op {
        let (place, _) = self.some();
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
}
