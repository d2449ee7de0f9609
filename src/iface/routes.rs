//! Restores missing routes of a container, unless another route has the same destination.

use std::net::IpAddr;

use super::configure::{describe_route, route_gateways};
use super::{ContainerNetns, ON_LINK};
use crate::netlink::{KernelRoute, Link, RouteAddMode, RouteFilter};
use crate::repairs::RepairFindings;
use cni::CniResult;
use cni::error::Result;
use cni::ip::max_prefix_len;

/// The routes to the networks of the addresses of the interface at `index`, which the kernel adds
/// with the addresses.
pub fn connected_routes(link: &Link, result: &CniResult, index: usize) -> Vec<KernelRoute> {
    let nets = result.ips_of_interface(index).map(|ip| ip.address);
    nets.filter(|net| net.prefix_len() < max_prefix_len(net.addr()))
        .map(|net| {
            let (oif, src) = (Some(link.index), Some(net.addr()).filter(IpAddr::is_ipv4));
            let scope = src.map(|_| ON_LINK);
            KernelRoute { oif, src, scope, ..KernelRoute::new(net.trunc()) }
        })
        .collect()
}

/// Restores the missing routes of `wanted`, in order. A different route to the same destination,
/// policy rules, a VRF, an interface that is down and a missing address are deliberate changes:
/// they stay, and are reported.
pub fn restore_missing(
    inside: &ContainerNetns<'_>,
    link: &Link,
    wanted: &[KernelRoute],
    repairs: &mut RepairFindings,
) -> Result<()> {
    if wanted.is_empty() {
        return Ok(());
    }
    let present = inside.netlink.dump_routes(&RouteFilter::default())?;
    let mut missing: Vec<&KernelRoute> = wanted.iter().collect();
    missing.retain(|route| !present.iter().any(|found| satisfies_route(found, route)));
    if missing.is_empty() {
        return Ok(());
    }
    let reason = reason_not_to_restore(inside, link)?;
    for route in missing {
        let text = format!("route {} in the container", describe_route(route, &link.name));
        let replaces =
            |found: &&KernelRoute| found.dst == route.dst.trunc() && is_same_table(found, route);
        if let Some(found) = present.iter().find(replaces) {
            repairs.record_changed(format!("{text}: the container has \"{found}\""));
        } else if let Some(reason) = &reason {
            repairs.record_changed(format!("{text}: {reason}"));
        } else {
            repairs.restore_missing(text, || {
                Ok(inside.netlink.add_route(route, RouteAddMode::Exclusive)?)
            });
        }
    }
    Ok(())
}

fn reason_not_to_restore(inside: &ContainerNetns<'_>, link: &Link) -> Result<Option<String>> {
    let name = &link.name;
    if !link.up {
        return Ok(Some(format!("\"{name}\" is down")));
    }
    if link.master.is_some() {
        return Ok(Some(format!("\"{name}\" belongs to another link")));
    }
    // Some plugins move routes to tables of their own.
    if inside.netlink.dump_rules()?.iter().any(|rule| rule.src.is_some() || !rule.plain) {
        return Ok(Some("the container has policy rules".to_owned()));
    }
    Ok(None)
}

/// Whether `found` can replace `wanted`. A wanted route without a table may be in any table, since
/// sbr and vrf move routes.
pub(super) fn satisfies_route(found: &KernelRoute, wanted: &KernelRoute) -> bool {
    let present = route_gateways(found);
    found.dst == wanted.dst.trunc()
        && is_same_table(found, wanted)
        && wanted.priority.is_none_or(|p| p == 0 || found.priority == Some(p))
        && route_gateways(wanted).iter().all(|gw| present.contains(gw))
}

fn is_same_table(found: &KernelRoute, wanted: &KernelRoute) -> bool {
    wanted.table.is_none_or(|table| found.table == Some(table))
}
