//! Deletes tracked UDP connections. Such a connection keeps its translation for minutes, so after a
//! mapping was added or deleted its packets would still go to the former destination.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use super::PortmapPart;
use crate::netlink::conntrack::{ConntrackSocket, FlowSelection, TrackedFlow};
use crate::netlink::nftables::{RuleInfo, TransportProtocol};
use crate::netlink::{self, IpFamily, Netlink};

/// After ADD: deletes the tracked connections to the mapped ports of this host with another
/// destination. Connections that the host forwards are not affected.
pub fn delete_flows_to_other_targets(forward: &PortmapPart, host: &Netlink) {
    for target in forward.targets.iter().copied() {
        let (addr, family) = (target.addr(), IpFamily::of_address(target.addr()));
        let udp =
            forward.mappings_to(target).filter(|mapping| mapping.proto == TransportProtocol::Udp);
        let mapped: HashSet<_> = udp.map(|m| (m.host_port, m.single_address())).collect();
        if mapped.is_empty() {
            continue;
        }
        let mut local = HashMap::new();
        delete_flows(FlowSelection::All(family), &mut |flow| {
            let TrackedFlow { daddr, dport, server } = *flow;
            let is_mapped =
                mapped.contains(&(dport, Some(daddr))) || mapped.contains(&(dport, None));
            is_mapped
                && server != addr
                && (*local.entry(flow.daddr).or_insert_with_key(|a| host.is_local_address(*a)))
        });
    }
}

/// After DEL: deletes the tracked connections that these containers replied to.
pub(super) fn delete_flows_replied_by(servers: impl Iterator<Item = IpAddr>) {
    for server in servers {
        delete_flows(FlowSelection::AnsweredBy(server), &mut |_| true);
    }
}

/// The address that a rule redirects UDP to.
pub(super) fn udp_server_of_rule(rule: &RuleInfo) -> Option<IpAddr> {
    let udp = rule.values().contains(&vec![TransportProtocol::Udp.protocol_number()]);
    server_of_rule(rule).filter(|_| udp)
}

/// The address that a rule redirects to.
pub(super) fn server_of_rule(rule: &RuleInfo) -> Option<IpAddr> {
    let dnat = rule.expressions().last().is_some_and(|kind| kind == "nat");
    // The address is loaded after all compared values, and before the port.
    let addr = rule.values().iter().rev().find_map(|value| netlink::ip_from_bytes(value));
    addr.filter(|_| dnat)
}

/// Deletes tracked connections. Errors are only logged, because the mapping itself is correct.
fn delete_flows(flows: FlowSelection, which: &mut dyn FnMut(&TrackedFlow) -> bool) {
    let deleted: netlink::NetlinkResult<_> =
        ConntrackSocket::open().and_then(|conntrack| conntrack.delete_flows(flows, which));
    if let Err(error) = deleted {
        warn!("could not delete tracked UDP connections: {error}");
    }
}
