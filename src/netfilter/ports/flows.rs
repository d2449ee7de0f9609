//! UDP connections: tracked ones keep their translation for minutes, so packets would go on to
//! where they went before a mapping came, or after it has gone.

use std::net::IpAddr;

use super::maps::Placed;
use super::{Mapping, Target};
use crate::log;
use crate::netfilter::backend::Family;
use crate::netlink::conntrack::{Conntrack, Flows, Version};
use crate::netlink::nftables::L4;

fn flows(family: Family, addr: Option<IpAddr>, port: u16) -> Flows {
    let version = match family {
        Family::V4 => Version::V4,
        Family::V6 => Version::V6,
    };
    let all = addr.map_or(Flows::new(version, L4::Udp), |addr| Flows::to(L4::Udp, addr));
    all.port(port)
}

/// Those that mappings to `targets` are for.
pub fn of_mappings(mappings: &[Mapping], targets: &[Target]) -> Vec<Flows> {
    of_families(mappings, targets.iter().map(Target::family))
}

/// Those that mappings of these families are for.
pub fn of_families(mappings: &[Mapping], families: impl Iterator<Item = Family>) -> Vec<Flows> {
    let mut all = Vec::new();
    for family in families {
        let udp = mappings.iter().filter(|m| m.proto == L4::Udp && m.is_of(family));
        all.extend(udp.map(|m| flows(family, m.address(), m.host_port)));
    }
    all
}

/// Those that were translated by these elements.
pub fn of_elements(deleted: &[Placed]) -> Vec<Flows> {
    deleted.iter().filter_map(Placed::udp).map(|(f, addr, port)| flows(f, addr, port)).collect()
}

/// Forgets them. The mapping is right all the same, so trouble is only told.
pub fn flush(mut all: Vec<Flows>) {
    let mut seen: Vec<Flows> = Vec::new();
    all.retain(|flows| {
        !seen.contains(flows) && {
            seen.push(*flows);
            true
        }
    });
    if all.is_empty() {
        return;
    }
    let conntrack = match Conntrack::open() {
        Ok(conntrack) => conntrack,
        Err(error) => return log::warn(format_args!("flush UDP connections: {error}")),
    };
    for flows in all {
        if let Err(error) = conntrack.flush(flows) {
            log::warn(format_args!("flush UDP connections: {error}"));
        }
    }
}
