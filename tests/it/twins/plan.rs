//! A sequence: its networks and its steps.

use std::fmt;

use serde_json::{Value, json};

use crate::support::node::Node;

/// The MTU that tuning sets.
pub(super) const TUNED_MTU: u32 = 1300;

/// The host's address towards the other host, and that host's.
pub(super) const HOST: &str = "192.0.2.1";
pub(super) const OUTSIDE: &str = "192.0.2.2";

/// The port at which every place answers.
pub(super) const ECHO: u16 = 7777;

/// The host ports of all sequences.
pub(super) const PORTS: [u16; 2] = [8080, 8081];

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
            Extra::Tuning => Some(json!({"type": "tuning", "mtu": TUNED_MTU,
                "sysctl": {"net.core.somaxconn": "500"}})),
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
    /// ADD with these host ports and this MAC address. A failed ADD is followed by DEL, as by
    /// runtimes.
    Add {
        place: Place,
        net: usize,
        ports: Vec<u16>,
        mac: Option<&'static str>,
    },
    /// DEL; with the result of ADD, unless an earlier DEL has succeeded and the runtime forgot it.
    Del(Place),
    Check(Place),
    /// GC after which only the attachments without this place are valid. The runtime calls DEL for
    /// it, unless it has lost its cache.
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
    /// A second ADD of what is attached, in the same namespace or in another one, which then ends.
    Again {
        place: Place,
        moved: bool,
    },
    /// The rules are gone, on both nodes.
    Flush(Damage),
    /// The host's end of a pair is deleted, on both nodes.
    CutPair(Place),
    /// A bridge is deleted, on both nodes.
    CutBridge(&'static str),
    /// Damage on the node of cnibox only, and `cnibox repair`: then it must be as the other node.
    Repair(Damage),
    /// `cnibox gc`. On the node of the reference, which has no such tool, DEL of the dead.
    CollectDead,
    /// `cnibox doctor`, which changes nothing, and finds nothing on a node where nothing was
    /// damaged.
    Doctor,
    /// ADD or DEL of different containers: at the same time on the node of cnibox, one by one on
    /// the other.
    AtOnce(Vec<Op>),
}

impl Op {
    /// The calls of which this consists.
    pub(super) fn parts(&self) -> &[Op] {
        if let Op::AtOnce(ops) = self { ops } else { std::slice::from_ref(self) }
    }
}

/// What an administrator loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Damage {
    /// `nft flush ruleset`
    Ruleset,
    /// `iptables -t nat -F`
    Nat,
    /// This bridge.
    Bridge(&'static str),
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
        self.op.fmt(f)?;
        if self.by == By::Reference { write!(f, " (by the reference on both)") } else { Ok(()) }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
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
            Op::Again { place, moved: false } => write!(f, "second ADD {place}")?,
            Op::Again { place, .. } => write!(f, "second ADD {place}, in another namespace")?,
            Op::Flush(damage) => write!(f, "{damage:?} is lost")?,
            Op::CutPair(place) => write!(f, "the host's end of {place} is deleted")?,
            Op::CutBridge(name) => write!(f, "{name} is deleted")?,
            Op::Repair(damage) => write!(f, "with cnibox {damage:?} is lost, cnibox repair")?,
            Op::CollectDead => write!(f, "cnibox gc")?,
            Op::Doctor => write!(f, "cnibox doctor")?,
            Op::AtOnce(ops) => {
                write!(f, "at the same time:")?;
                ops.iter().try_for_each(|op| write!(f, " [{op}]"))?;
            }
        }
        Ok(())
    }
}

/// An attachment by its ADD.
pub(super) struct Attachment<'p> {
    pub(super) place: Place,
    pub(super) net: usize,
    pub(super) ports: &'p [u16],
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
    /// The sequence of these operations by cnibox, and of DEL of what they attach.
    pub(super) fn of(rules: Rules, networks: Vec<Network>, ops: Vec<Op>) -> Plan {
        let steps = ops.into_iter().map(|op| Step { op, by: By::Cnibox }).collect();
        Plan { rules, drops: false, networks, steps }.with_the_end()
    }

    /// The attachments before this step that are alive, and those whose namespace has ended without
    /// DEL.
    pub(super) fn attached(&self, before: usize) -> (Vec<Attachment<'_>>, Vec<Attachment<'_>>) {
        let (mut alive, mut stale) = (Vec::new(), Vec::new());
        for op in self.steps[..before].iter().flat_map(|step| step.op.parts()) {
            match op {
                Op::Add { place, net, ports, .. } => {
                    stale.retain(|other: &Attachment<'_>| other.place != *place);
                    alive.push(Attachment { place: *place, net: *net, ports });
                }
                Op::Del(place) | Op::Gc { stale: Some(place), .. } => {
                    alive.retain(|other| other.place != *place);
                    stale.retain(|other| other.place != *place);
                }
                Op::Vanish(pod) => {
                    let is_gone = |other: &Attachment<'_>| other.place.pod == *pod;
                    stale.extend(alive.extract_if(.., |other| is_gone(other)));
                }
                Op::CutPair(place) => {
                    stale.extend(alive.extract_if(.., |other| other.place == *place));
                }
                _ => {}
            }
        }
        (alive, stale)
    }

    /// Who has which address is by chance where two ADDs at the same time took them from one pool:
    /// lines that name the owners instead.
    pub(super) fn with_owners(
        &self,
        lines: Vec<String>,
        assigned: &[(Place, usize, String)],
    ) -> Vec<String> {
        let at_once = self.steps.iter().map(|step| step.op.parts()).filter(|parts| parts.len() > 1);
        let nets = |parts: &[Op]| -> Vec<usize> {
            parts
                .iter()
                .filter_map(|op| if let Op::Add { net, .. } = op { Some(*net) } else { None })
                .collect()
        };
        let is_shared =
            |nets: &Vec<usize>| nets.len() > 1 && nets.iter().all(|net| *net == nets[0]);
        let shared: Vec<usize> = at_once.map(nets).filter(is_shared).flatten().collect();
        let rename = |line: String| {
            let of_shared = assigned.iter().filter(|(_, net, _)| shared.contains(net));
            let owned = |line: String, (place, _, addr): &(Place, usize, String)| {
                line.replace(addr, &format!("<{place}>"))
            };
            of_shared.fold(line, owned)
        };
        lines.into_iter().map(rename).collect()
    }

    /// Whether a network of the container is masqueraded after this step.
    pub(super) fn masquerades(&self, pod: &str, after: usize) -> bool {
        let (alive, _) = self.attached(after + 1);
        let has = |net: usize| self.networks[net].has(Extra::Masquerade);
        alive.iter().any(|one| one.place.pod == pod && has(one.net))
    }

    pub(super) fn with_the_end(mut self) -> Plan {
        let mut places: Vec<Place> = Vec::new();
        for op in self.steps.iter().flat_map(|step| step.op.parts()) {
            if let Op::Add { place, .. } = op
                && !places.contains(place)
            {
                places.push(*place);
            }
        }
        self.steps
            .extend(places.into_iter().map(|place| Step { op: Op::Del(place), by: By::Cnibox }));
        self
    }
}
