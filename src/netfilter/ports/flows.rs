//! UDP: tracked connections keep their translation for minutes, so packets would go to their former destination
//! after a mapping was added or deleted.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::Mapping;
use crate::log;
use crate::netlink::conntrack::{Conntrack, Flow, Flows};
use crate::netlink::nftables::{L4, RuleInfo};
use crate::netlink::{self, Family, Netlink};

/// After ADD: deletes the tracked connections to the mapped ports of this host with another destination.
/// Connections that the host forwards are not affected.
pub fn lead_to(targets: &[IpNet], mappings: &[Mapping], host: &Netlink) {
    for addr in targets.iter().map(IpNet::addr) {
        let family = Family::of(addr);
        let udp = mappings.iter().filter(|m| m.proto == L4::Udp && m.is_of(family));
        let mapped: HashSet<_> = udp.map(|m| (m.host_port, m.address())).collect();
        if mapped.is_empty() {
            continue;
        }
        let mut local = HashMap::new();
        forget(Flows::All(family), &mut |flow| {
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
pub(super) fn of_gone(servers: impl Iterator<Item = IpAddr>) {
    for server in servers {
        forget(Flows::AnsweredBy(server), &mut |_| true);
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
fn forget(flows: Flows, which: &mut dyn FnMut(&Flow) -> bool) {
    let forgotten: netlink::Result<_> =
        Conntrack::open().and_then(|conntrack| conntrack.forget(flows, which));
    if let Err(error) = forgotten {
        log::warn(format_args!("delete tracked UDP connections: {error}"));
    }
}
