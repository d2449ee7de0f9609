//! UDP: tracked connections keep their translation for minutes, so packets would go on to where
//! they went before a mapping came, or after it has gone.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use super::{Mapping, Target};
use crate::log;
use crate::netlink::conntrack::{Conntrack, Flow, Flows};
use crate::netlink::nftables::{L4, RuleInfo};
use crate::netlink::{self, Netlink};

/// After ADD: forgets what was sent to the mapped ports of this host and went elsewhere. What goes
/// through it to others is none of the mappings' business.
pub fn lead_to(targets: &[Target], mappings: &[Mapping], host: &Netlink) {
    for target in targets {
        let udp = mappings.iter().filter(|m| m.proto == L4::Udp && m.is_of(target.family()));
        let mapped: HashSet<_> = udp.map(|m| (m.host_port, m.address())).collect();
        if mapped.is_empty() {
            continue;
        }
        let mut local = HashMap::new();
        forget(Flows::All(target.family()), |flow| {
            let mut is_local =
                || *local.entry(flow.daddr).or_insert_with_key(|a| host.is_local(*a));
            let Flow { daddr, dport, server } = *flow;
            let is_mapped =
                mapped.contains(&(dport, Some(daddr))) || mapped.contains(&(dport, None));
            is_mapped && server != target.addr() && is_local()
        });
    }
}

/// After DEL: forgets all that these containers answered.
pub fn of_gone(servers: &BTreeSet<IpAddr>) {
    for server in servers {
        forget(Flows::AnsweredBy(*server), |_| true);
    }
}

/// Where a rule leads UDP to.
pub(super) fn served_by(rule: &RuleInfo) -> Option<IpAddr> {
    let udp = rule.values.contains(&vec![L4::Udp.number()]);
    let dnat = rule.expressions.last().is_some_and(|kind| kind == "nat");
    // The address is loaded behind all that is compared, and before the port.
    let addr = rule.values.iter().rev().find_map(|value| netlink::ip(value));
    addr.filter(|_| udp && dnat)
}

/// The mapping is right all the same, so trouble is only told.
fn forget(flows: Flows, which: impl FnMut(&Flow) -> bool) {
    let forgotten: netlink::Result<_> =
        Conntrack::open().and_then(|conntrack| conntrack.forget(flows, which));
    if let Err(error) = forgotten {
        log::warn(format_args!("forget UDP flows: {error}"));
    }
}
