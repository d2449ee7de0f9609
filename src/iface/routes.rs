//! Restores missing routes of a container, if no other route has their destination.

use std::net::IpAddr;

use super::configure::{describe, gateways};
use super::{Inside, ON_LINK};
use crate::cni::CniResult;
use crate::cni::ip::width;
use crate::error::Result;
use crate::netlink::{Link, Route, RouteFilter, RouteMode};
use crate::repairs::Repairs;

/// The routes to the networks of the addresses of the interface at `index`, which the kernel adds with the addresses.
pub fn connected(link: &Link, result: &CniResult, index: usize) -> Vec<Route> {
    let of_address = |net: ipnet::IpNet| {
        let (oif, src) = (Some(link.index), Some(net.addr()).filter(IpAddr::is_ipv4));
        let scope = src.map(|_| ON_LINK);
        Route { oif, src, scope, ..Route::new(net.trunc()) }
    };
    let nets = result.ips_of(index).map(|ip| ip.address);
    nets.filter(|net| net.prefix_len() < width(net.addr())).map(of_address).collect()
}

/// Restores the missing routes of `wanted`, in order. A different route to the same destination, policy rules, a VRF, an
/// interface that is down and a missing address are deliberate changes: they stay, and are reported.
pub fn restore(
    inside: &Inside<'_>,
    link: &Link,
    wanted: &[Route],
    repairs: &mut Repairs,
) -> Result<()> {
    if wanted.is_empty() {
        return Ok(());
    }
    let present = inside.netlink.dump_routes(&RouteFilter::default())?;
    let mut missing: Vec<&Route> = wanted.iter().collect();
    missing.retain(|route| !present.iter().any(|found| serves(found, route)));
    if missing.is_empty() {
        return Ok(());
    }
    let reason = reason_against(inside, link)?;
    for route in missing {
        let text = format!("route {} in the container", describe(route, &link.name));
        let replaces = |found: &&Route| found.dst == route.dst.trunc() && same_table(found, route);
        if let Some(found) = present.iter().find(replaces) {
            repairs.leave(format!("{text}: the container has \"{found}\""));
        } else if let Some(reason) = &reason {
            repairs.leave(format!("{text}: {reason}"));
        } else {
            let add = || Ok(inside.netlink.add_route(route, RouteMode::Exclusive)?);
            repairs.restore(text, add);
        }
    }
    Ok(())
}

/// The reason not to restore missing routes.
fn reason_against(inside: &Inside<'_>, link: &Link) -> Result<Option<String>> {
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

/// Whether `found` can replace `wanted`. A wanted route without a table may be in any table, since sbr and vrf move
/// routes.
pub(super) fn serves(found: &Route, wanted: &Route) -> bool {
    let present = gateways(found);
    found.dst == wanted.dst.trunc()
        && same_table(found, wanted)
        && wanted.priority.is_none_or(|p| p == 0 || found.priority == Some(p))
        && gateways(wanted).iter().all(|gw| present.contains(gw))
}

fn same_table(found: &Route, wanted: &Route) -> bool {
    wanted.table.is_none_or(|table| found.table == Some(table))
}
