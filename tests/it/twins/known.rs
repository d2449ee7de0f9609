//! The differences that docs/parity.md explains.

use super::Difference;
use super::plan::{Attachment, By, Extra, HOST, Ipam, Op, Place, Plan, Rules, Step};
use super::side::Seen;
use crate::support::compare::lacks_masquerading;
use crate::support::conflist::Failed;

/// A difference that docs/parity.md explains.
pub(super) struct Known {
    /// The subject of the row.
    pub(super) row: &'static str,
    pub(super) explains: fn(&Case<'_>) -> bool,
    pub(super) then: Then,
}

/// What happens after a known difference.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// The nodes are the same.
    Continue,
    /// The attachment, which exists on one node only, is deleted on both.
    Detach,
    /// The nodes cannot be compared any more.
    Stop,
}

/// A step after which the nodes differ.
pub(super) struct Case<'a> {
    pub(super) plan: &'a Plan,
    pub(super) number: usize,
    pub(super) difference: Difference,
    pub(super) answers: &'a (Seen, Seen),
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

    /// Whether rules were flushed and not restored.
    fn is_after_flush(&self) -> bool {
        self.plan.steps[..self.number].iter().any(|step| matches!(step.op, Op::Flush(_)))
    }

    /// Whether this ADD takes a host port that another attachment has.
    fn takes_a_port(&self) -> bool {
        let (alive, stale) = self.plan.attached(self.number);
        let is_taken =
            |port: &u16| alive.iter().chain(&stale).any(|other| other.ports.contains(port));
        self.op()
            .parts()
            .iter()
            .any(|op| matches!(op, Op::Add { ports, .. } if ports.iter().any(is_taken)))
    }

    /// Whether this ADD is that of a container that has ended without DEL.
    fn is_restart(&self) -> bool {
        let (_, stale) = self.plan.attached(self.number);
        let is_stale = |place: &Place| stale.iter().any(|other| other.place == *place);
        self.op().parts().iter().any(|op| matches!(op, Op::Add { place, .. } if is_stale(place)))
    }

    /// Whether the packets to host ports of containers arrive on both nodes, but not from the same
    /// address.
    fn only_sources_differ(&self) -> bool {
        let Difference { reference, cnibox } = &self.difference;
        let arrival = |line: &String| line.split_once(" sees ").map(|(way, _)| way.to_owned());
        let ways = |lines: &Vec<String>| lines.iter().map(arrival).collect::<Option<Vec<_>>>();
        let of_container = |line: &str| {
            !line.starts_with("traffic host ") && !line.starts_with("traffic outside ")
        };
        self.all(|line| Case::is_mapped(line) && of_container(line))
            && ways(reference).is_some_and(|theirs| Some(theirs) == ways(cnibox))
    }

    /// Whether the container that this DEL detaches keeps the host port in another network.
    fn keeps_its_ports(&self) -> bool {
        let Op::Del(place) = self.op() else { return false };
        let (alive, _) = self.plan.attached(self.number);
        let others =
            alive.iter().filter(|other| other.place.pod == place.pod && other.place != *place);
        let ports: Vec<u16> = others.flat_map(|other| other.ports.to_vec()).collect();
        let is_kept =
            |line: &str| ports.iter().any(|port| line.contains(&format!("-> {HOST}:{port}: ")));
        self.difference.cnibox.is_empty() && self.all(is_kept)
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
            && self.difference.cnibox.iter().all(|line| self.is_about(*stale, line))
    }

    /// On the node of cnibox.
    fn addresses(&self, place: Place) -> Vec<String> {
        let own = self.answers.1.assigned.iter().filter(|(other, ..)| *other == place);
        own.map(|(.., addr)| addr.clone()).collect()
    }

    /// Whether a line names the container or an address of this attachment.
    fn is_about(&self, place: Place, line: &str) -> bool {
        let pod = place.pod;
        let seen = self
            .difference
            .cnibox
            .iter()
            .filter_map(|line| line.strip_prefix(&format!("{pod}: address ")));
        let own: Vec<String> =
            seen.filter_map(|line| line.split('/').next()).map(str::to_owned).collect();
        let others = self.answers.1.assigned.iter().filter(|(.., addr)| own.contains(addr));
        let mut sharing = others.map(|(other, ..)| format!("traffic {} ", other.pod));
        let mut names = own.iter().cloned().chain([place.to_string()]);
        let marks = [
            format!("{pod}: "),
            format!("traffic {pod} "),
            format!("twin-{pod}"),
            format!(": {pod} sees"),
        ];
        names.any(|name| line.contains(&name))
            || marks.iter().any(|mark| line.contains(mark))
            || sharing.any(|mark| line.starts_with(&mark))
    }

    /// Attachments without DEL whose state this ADD may reclaim: those of a container whose host
    /// port it takes, of its own place, and those whose addresses it needs.
    fn reclaimed(&self) -> Vec<Attachment<'_>> {
        let (alive, stale) = self.plan.attached(self.number);
        let is_reclaimed = |dead: &Attachment<'_>| {
            self.op().parts().iter().any(|op| match op {
                Op::Add { place, net, ports, .. } => {
                    let is_pool =
                        matches!(self.plan.networks[*net].ipam, Ipam::UpTo(..) | Ipam::Static(..));
                    let is_port = |port: &u16| {
                        let of_container =
                            stale.iter().filter(|other| other.place.pod == dead.place.pod);
                        of_container.flat_map(|other| other.ports).any(|taken| taken == port)
                    };
                    let own = self.addresses(*place);
                    let has_address =
                        self.addresses(dead.place).iter().any(|addr| own.contains(addr));
                    dead.place == *place
                        || has_address
                        || is_pool && dead.net == *net
                        || ports.iter().any(is_port)
                }
                // What is refused has looked for an address.
                Op::Again { place, .. } => {
                    alive.iter().any(|one| one.place == *place && one.net == dead.net)
                }
                _ => false,
            })
        };
        let (_, all) = self.plan.attached(self.number);
        all.into_iter().filter(is_reclaimed).collect()
    }

    /// Whether everything that differs belongs to attachments that ended without DEL, and that ADD
    /// of cnibox has reclaimed: with the reference their leases and host ports remain, and keep
    /// clients from the new owner.
    fn concerns_stale_state(&self) -> bool {
        let reclaimed = self.reclaimed();
        let is_port = |line: &str| {
            let mut ports = reclaimed.iter().flat_map(|dead| dead.ports);
            line.starts_with("traffic ")
                && ports.any(|port| line.contains(&format!("-> {HOST}:{port}: ")))
        };
        let is_lease = |line: &str| {
            let is_of = |Attachment { place, .. }: &Attachment<'_>| {
                line.contains(&format!("twin-{}\\r\\n{}\"", place.pod, place.ifname))
            };
            line.starts_with("lease ") && reclaimed.iter().any(is_of)
        };
        let is_rule = |line: &str| {
            let mut ports = reclaimed.iter().flat_map(|dead| dead.ports);
            let names = |port: &u16| {
                line.contains(&format!("udp {port} ")) || line.contains(&format!("dport {port} "))
            };
            line.starts_with("rule: ") && ports.any(names)
        };
        let remains = |line: &String| is_port(line) || is_lease(line) || is_rule(line);
        let Difference { reference, cnibox } = &self.difference;
        // Where nothing answers on the node of the reference.
        let is_reached = |line: &String| {
            let to = line.rsplit_once(": ").map_or(line.as_str(), |(to, _)| to);
            is_port(line) && !reference.iter().any(|other| other.starts_with(to))
        };
        reference.iter().all(|line| remains(line) || self.is_of_former_owner(line))
            && cnibox.iter().all(|line| self.is_of_former_owner(line) || is_reached(line))
    }

    /// Whether a container that is not to be masqueraded is masqueraded on the node of the
    /// reference only, by the rule of the former owner of its address, which ended without DEL.
    fn is_of_former_owner(&self, line: &str) -> bool {
        let Some((pod, _)) = line.strip_prefix("traffic ").and_then(|line| line.split_once(" -> "))
        else {
            return false;
        };
        let (alive, stale) = self.plan.attached(self.number + 1);
        let is_masqueraded =
            |one: &&Attachment<'_>| self.plan.networks[one.net].has(Extra::Masquerade);
        let former: Vec<String> = stale
            .iter()
            .filter(is_masqueraded)
            .flat_map(|dead| self.addresses(dead.place))
            .collect();
        let own = alive
            .iter()
            .filter(|one| one.place.pod == pod)
            .flat_map(|one| self.addresses(one.place));
        !self.plan.masquerades(pod, self.number)
            && own.into_iter().any(|addr| former.contains(&addr))
    }
}

/// What may differ.
pub(super) const KNOWN: &[Known] = &[
    Known {
        row: "host port in use by another container, on the same address or both on all addresses",
        explains: |case| case.takes_a_port() && case.only_cnibox_fails("host port"),
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
        explains: |case| {
            case.is_restart() && case.only_reference_fails("duplicate allocation is not allowed")
        },
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
            let is_other = case.plan.rules == Rules::Nftables && case.by() == By::Reference;
            case.takes_a_port() && is_other && case.all(Case::is_mapped)
        },
        then: Then::Stop,
    },
    Known {
        row: "host port of one container in several networks",
        explains: |case| case.keeps_its_ports(),
        then: Then::Stop,
    },
    Known {
        row: "a second ADD",
        explains: |case| case.is_restart() && case.only_reference_fails("adding link: file exists"),
        then: Then::Stop,
    },
    Known {
        row: "MAC address of a new bridge",
        explains: |case| {
            // The first ADD after its end has failed before the bridge had a port.
            let is_cut = case.plan.steps[..case.number]
                .iter()
                .any(|step| matches!(step.op, Op::CutBridge(_)));
            is_cut && case.only_reference_fails("could not set bridge's mac")
        },
        then: Then::Stop,
    },
    Known {
        row: "IPv4 client on the container's subnet, with nftables",
        explains: |case| case.plan.rules == Rules::Nftables && case.only_sources_differ(),
        then: Then::Continue,
    },
    Known {
        row: "published ports of a container where the host drops forwarded packets by default (Docker, ufw)",
        explains: |case| {
            case.plan.drops && case.difference.reference.is_empty() && case.all(Case::is_mapped)
        },
        then: Then::Continue,
    },
    Known {
        row: "flushed rules",
        explains: |case| {
            let is_expected = match case.op() {
                Op::Del(_) => case
                    .answers
                    .0
                    .failed
                    .as_ref()
                    .is_some_and(|failed| lacks_masquerading(&failed.msg)),
                Op::Check(_) => case.answers.1.failed.is_some(),
                _ => false,
            };
            case.is_after_flush() && case.only_answers_differ() && is_expected
        },
        then: Then::Continue,
    },
    Known {
        row: "GC of `bridge` and `ptp`",
        explains: |case| case.is_gc_of_the_references(),
        then: Then::Stop,
    },
    Known {
        row: "DEL without namespace, interface and prevResult",
        explains: |case| {
            case.only_answers_differ() && case.only_reference_fails("CHAIN_DEL failed")
        },
        then: Then::Continue,
    },
];
