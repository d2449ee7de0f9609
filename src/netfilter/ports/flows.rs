//! UDP: tracked connections keep their translation for minutes, so packets would go to their former destination
//! after a mapping was added or deleted.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use super::Forward;
use crate::log;
use crate::netlink::conntrack::{Conntrack, Flow, Flows};
use crate::netlink::nftables::{L4, RuleInfo};
use crate::netlink::{self, Family, Netlink};

/// After ADD: deletes the tracked connections to the mapped ports of this host with another destination.
/// Connections that the host forwards are not affected.
pub fn delete_other_targets(forward: &Forward, host: &Netlink) {
    for target in forward.targets.iter().copied() {
        let (addr, family) = (target.addr(), Family::of(target.addr()));
        let udp = forward.mappings_to(target).filter(|mapping| mapping.proto == L4::Udp);
        let mapped: HashSet<_> = udp.map(|m| (m.host_port, m.address())).collect();
        if mapped.is_empty() {
            continue;
        }
        let mut local = HashMap::new();
        delete(Flows::All(family), &mut |flow| {
            let mut is_local =
                || *local.entry(flow.daddr).or_insert_with_key(|a| host.is_local(*a));
            let Flow { daddr, dport, server } = *flow;
            let is_mapped =
                mapped.contains(&(dport, Some(daddr))) || mapped.contains(&(dport, None));
            is_mapped && server != addr && is_local()
        });
    }
}

/// After DEL: deletes the tracked connections that these containers replied to.
pub(super) fn delete_replied_by(servers: impl Iterator<Item = IpAddr>) {
    for server in servers {
        delete(Flows::AnsweredBy(server), &mut |_| true);
    }
}

/// The address that a rule redirects UDP to.
pub(super) fn served_by(rule: &RuleInfo) -> Option<IpAddr> {
    let udp = rule.values.contains(&vec![L4::Udp.number()]);
    let dnat = rule.expressions.last().is_some_and(|kind| kind == "nat");
    // The address is loaded after all compared values, and before the port.
    let addr = rule.values.iter().rev().find_map(|value| netlink::ip(value));
    addr.filter(|_| udp && dnat)
}

/// Errors are logged only: the mapping is correct nevertheless.
fn delete(flows: Flows, which: &mut dyn FnMut(&Flow) -> bool) {
    let deleted: netlink::Result<_> =
        Conntrack::open().and_then(|conntrack| conntrack.forget(flows, which));
    if let Err(error) = deleted {
        log::warn(format_args!("delete tracked UDP connections: {error}"));
    }
}
