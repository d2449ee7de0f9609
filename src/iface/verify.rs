//! CHECK: compares a result with the interfaces, addresses and routes of the kernel.
//!
//! `prevResult` is the result of the whole list, with additions of later plugins: an address counts only for the
//! interface of its index, and a route without a table may be in any table.

use std::net::IpAddr;

use super::configure::implied_gateway;
use super::inside::Inside;
use crate::cni::{CniResult, IfName, Interface, IpConfig, Route};
use crate::error::{Error, Result};
use crate::netlink::{self, Link, RouteFilter};

/// The prefix, in the details of errors, of a command for the container's namespace.
pub const IN_CONTAINER: &str = "in the container: ";

/// `RT_SCOPE_LINK`.
const ON_LINK: u8 = 253;

/// The container's interface in the result: of this name, in this sandbox.
pub fn container_entry<'r>(
    result: &'r CniResult,
    ifname: &IfName,
    sandbox: &str,
) -> Result<(usize, &'r Interface)> {
    let mut entries = result.interfaces.iter().enumerate();
    let named: Vec<_> = entries.by_ref().filter(|(_, i)| i.name == ifname.as_str()).collect();
    if let Some(entry) = named.iter().find(|(_, i)| i.sandbox == sandbox) {
        return Ok(*entry);
    }
    let found = named.last().map(|(_, i)| i.sandbox.as_str()).unwrap_or_default();
    Err(Error::internal(format!(
        "Sandbox in prevResult {found} doesn't match configured netns: {sandbox}"
    )))
}

/// The link must be a veth with the address that the result gives.
pub fn container_veth(inside: &Inside<'_>, entry: &Interface) -> Result<Link> {
    container_link(inside, entry, "veth")
}

/// The link must be of this kind, with the address that the result gives.
pub fn container_link(inside: &Inside<'_>, entry: &Interface, kind: &str) -> Result<Link> {
    let name = &entry.name;
    let link = inside.netlink.link(name)?.ok_or_else(|| {
        Error::internal(format!("Interface name {name} not found in {}", entry.sandbox))
    })?;
    if link.kind.as_deref() != Some(kind) {
        return Err(Error::internal(format!(
            "Error: Container interface {name} not of type {kind}"
        )));
    }
    same_mac(&link, entry)?;
    Ok(link)
}

/// The link has the hardware address of the result, if the result has one.
pub fn same_mac(link: &Link, entry: &Interface) -> Result<()> {
    let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
    if entry.mac.is_empty() || entry.mac.eq_ignore_ascii_case(&mac) {
        return Ok(());
    }
    let (name, expected) = (&entry.name, &entry.mac);
    let place = if entry.sandbox.is_empty() { "" } else { IN_CONTAINER };
    Err(Error::internal(format!("Interface {name} Mac {expected} doesn't match link Mac: {mac}"))
        .with_details(format!("{place}ip link set {name} address {expected}")))
}

/// The link of the host is switched on.
pub fn is_up(link: &Link) -> Result<()> {
    require_up(link, "")
}

/// The link in the container is switched on.
pub fn is_up_inside(link: &Link) -> Result<()> {
    require_up(link, IN_CONTAINER)
}

fn require_up(link: &Link, place: &str) -> Result<()> {
    if link.up {
        return Ok(());
    }
    let name = &link.name;
    Err(Error::internal(format!("interface \"{name}\" is down"))
        .with_details(format!("{place}ip link set {name} up")))
}

/// A link of the host that containers send to takes no router advertisements.
pub fn refuses_advertisements(link: &Link) -> Result<()> {
    if link.accept_ra.unwrap_or_default() == 0 {
        return Ok(());
    }
    let name = &link.name;
    Err(Error::internal(format!("\"{name}\" takes router advertisements of containers"))
        .with_details(format!("sysctl -w net/ipv6/conf/{name}/accept_ra=0")))
}

/// Every address of the interface at `index` in the result is on `link`, and its network is reachable.
pub fn addresses(inside: &Inside<'_>, link: &Link, result: &CniResult, index: usize) -> Result<()> {
    let present = inside.netlink.dump_addrs(link.index)?;
    let routes = inside
        .netlink
        .dump_routes(&RouteFilter { oif: Some(link.index), ..RouteFilter::default() })?;
    for ip in result.ips_of(index) {
        if !present.iter().any(|addr| addr.net == ip.address) {
            let (address, name) = (ip.address, &link.name);
            return Err(Error::internal(format!(
                "Failed to match addr {address} on interface {name}"
            ))
            .with_details(format!("{IN_CONTAINER}ip addr add {address} dev {name}")));
        }
        network_is_routed(ip, link, &routes)?;
    }
    Ok(())
}

fn network_is_routed(ip: &IpConfig, link: &Link, routes: &[netlink::Route]) -> Result<()> {
    let network = ip.address.trunc();
    if routes.iter().any(|route| route.dst == network) {
        return Ok(());
    }
    let gateway = ip.gateway.map(|gw| gw.to_string()).unwrap_or_default();
    let name = &link.name;
    Err(Error::internal(format!("Failed to find Gateway {gateway} for interface {name}"))
        .with_details(format!(
            "there is no route to {network}: {IN_CONTAINER}ip route add {network} dev {name}"
        )))
}

/// Every route of the result exists, through its gateway or the default gateway of its family.
pub fn routes(inside: &Inside<'_>, result: &CniResult) -> Result<()> {
    if result.routes.is_empty() {
        return Ok(());
    }
    let present = inside.netlink.dump_routes(&RouteFilter::default())?;
    for route in &result.routes {
        // What is on the link has no gateway.
        let implied =
            || implied_gateway(result, &route.dst).filter(|_| route.scope < Some(ON_LINK));
        let gw = route.gw.or_else(implied);
        let route = Route { gw, ..route.clone() };
        if !present.iter().any(|found| serves(found, &route)) {
            let route = describe(&route);
            return Err(Error::internal(format!(
                "Expected Route {route} not found in routing table"
            ))
            .with_details(format!("{IN_CONTAINER}ip route add {route}")));
        }
    }
    Ok(())
}

fn serves(found: &netlink::Route, wanted: &Route) -> bool {
    let table = wanted.table.filter(|table| *table != 0);
    found.dst == wanted.dst.trunc()
        && table.is_none_or(|table| found.table == Some(table))
        && wanted.priority.is_none_or(|p| p == 0 || found.priority == Some(p))
        && wanted.gw.is_none_or(|gw| gateways(found).any(|hop| hop == gw))
}

fn gateways(route: &netlink::Route) -> impl Iterator<Item = IpAddr> + '_ {
    route.gw.into_iter().chain(route.nexthops.iter().filter_map(|hop| hop.gw))
}

fn describe(route: &Route) -> String {
    let gw = route.gw.map(|gw| format!(" via {gw}")).unwrap_or_default();
    let table = route.table.map(|table| format!(" table {table}")).unwrap_or_default();
    format!("{}{gw}{table}", route.dst)
}
