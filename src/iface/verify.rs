//! CHECK: compares a result with the interfaces, addresses and routes of the kernel.
//!
//! `prevResult` is the result of the whole list, with what later plugins added. Therefore an
//! address is expected only on the interface that its index names, and a route without a table may
//! be in any table.

use super::ContainerNetns;
use super::configure::effective_gateway;
use super::routes::satisfies_route;
use crate::netlink::{KernelRoute, Link, RouteFilter};
use cni::error::{Error, Result};
use cni::{CniResult, InterfaceName, ResultInterface, ResultRoute};

/// The prefix, in `details`, of a command to run in the container's network namespace.
pub const IN_CONTAINER: &str = "in the container: ";

/// Like [`IN_CONTAINER`], for a command to run on the host.
pub const ON_HOST: &str = "";

/// The container's interface in the result, with its index: the interface called `ifname` in this
/// sandbox.
pub fn find_container_entry<'r>(
    result: &'r CniResult,
    ifname: &InterfaceName,
    sandbox: &str,
) -> Result<(usize, &'r ResultInterface)> {
    let entries = result.interfaces.iter().enumerate();
    let named: Vec<_> = entries.filter(|(_, i)| i.name == ifname.as_str()).collect();
    if let Some(entry) = named.iter().find(|(_, i)| i.sandbox == sandbox) {
        return Ok(*entry);
    }
    let found = named.last().map(|(_, i)| i.sandbox.as_str()).unwrap_or_default();
    Err(Error::internal(format!(
        "Sandbox in prevResult {found} doesn't match configured netns: {sandbox}"
    )))
}

/// The link of the container that `entry` of the result names; fails unless the link is of this
/// kind and has the hardware address of `entry`.
pub fn find_container_link(
    inside: &ContainerNetns<'_>,
    entry: &ResultInterface,
    kind: &str,
) -> Result<Link> {
    let name = &entry.name;
    let link = inside.netlink.find_link(name)?.ok_or_else(|| {
        Error::internal(format!("Interface name {name} not found in {}", entry.sandbox))
    })?;
    if link.kind.as_deref() != Some(kind) {
        return Err(Error::internal(format!(
            "Error: Container interface {name} not of type {kind}"
        )));
    }
    require_same_mac(&link, entry)?;
    Ok(link)
}

/// Fails if `entry` of the result has a hardware address that the link does not have.
pub fn require_same_mac(link: &Link, entry: &ResultInterface) -> Result<()> {
    let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
    if entry.mac.is_empty() || entry.mac.eq_ignore_ascii_case(&mac) {
        return Ok(());
    }
    let (name, expected) = (&entry.name, &entry.mac);
    let place = if entry.sandbox.is_empty() { ON_HOST } else { IN_CONTAINER };
    Err(Error::internal(format!("Interface {name} Mac {expected} doesn't match link Mac: {mac}"))
        .with_details(format!("{place}ip link set {name} address {expected}")))
}

/// Fails if the link is down; `place` is [`IN_CONTAINER`] or [`ON_HOST`].
pub fn require_up(link: &Link, place: &str) -> Result<()> {
    if link.up {
        return Ok(());
    }
    let name = &link.name;
    Err(Error::internal(format!("interface \"{name}\" is down"))
        .with_details(format!("{place}ip link set {name} up")))
}

/// Fails if a link of the host accepts router advertisements, which containers could send.
pub fn require_no_advertisements(link: &Link) -> Result<()> {
    if link.accept_ra.unwrap_or_default() == 0 {
        return Ok(());
    }
    let name = &link.name;
    Err(Error::internal(format!("\"{name}\" accepts router advertisements of containers"))
        .with_details(format!("sysctl -w net/ipv6/conf/{name}/accept_ra=0")))
}

/// Fails unless `link` has every address of the interface at `index` in the result, and a route to
/// its network.
pub fn require_addresses(
    inside: &ContainerNetns<'_>,
    link: &Link,
    result: &CniResult,
    index: usize,
) -> Result<()> {
    let present = inside.netlink.dump_addresses(link.index)?;
    let filter = RouteFilter { oif: Some(link.index), ..RouteFilter::default() };
    let routes = inside.netlink.dump_routes(&filter)?;
    let name = &link.name;
    for ip in result.ips_of_interface(index) {
        let address = ip.address;
        if !present.iter().any(|addr| addr.net == address) {
            let msg = format!("Failed to match addr {address} on interface {name}");
            return Err(Error::internal(msg)
                .with_details(format!("{IN_CONTAINER}ip addr add {address} dev {name}")));
        }
        let network = ip.address.trunc();
        if !routes.iter().any(|route| route.dst == network) {
            let gateway = ip.gateway.map(|gw| gw.to_string()).unwrap_or_default();
            let msg = format!("Failed to find Gateway {gateway} for interface {name}");
            return Err(Error::internal(msg).with_details(format!(
                "there is no route to {network}: {IN_CONTAINER}ip route add {network} dev {name}"
            )));
        }
    }
    Ok(())
}

/// Fails unless every route of the result exists, through its gateway or the default gateway of its
/// family.
pub fn require_routes(inside: &ContainerNetns<'_>, result: &CniResult) -> Result<()> {
    if result.routes.is_empty() {
        return Ok(());
    }
    let present = inside.netlink.dump_routes(&RouteFilter::default())?;
    for route in &result.routes {
        let wanted = wanted_route(route, result);
        if !present.iter().any(|found| satisfies_route(found, &wanted)) {
            let msg = format!("Expected Route {wanted} not found in routing table");
            return Err(
                Error::internal(msg).with_details(format!("{IN_CONTAINER}ip route add {wanted}"))
            );
        }
    }
    Ok(())
}

/// Whether the kernel's route `found` is a route of the result.
pub fn is_listed(found: &KernelRoute, result: &CniResult) -> bool {
    result.routes.iter().any(|route| satisfies_route(found, &wanted_route(route, result)))
}

/// The route of the kernel that a route of the result describes.
pub fn wanted_route(route: &ResultRoute, result: &CniResult) -> KernelRoute {
    KernelRoute {
        scope: route.scope,
        gw: effective_gateway(route, result),
        table: route.table.filter(|table| *table != 0),
        priority: route.priority,
        ..KernelRoute::new(route.dst)
    }
}
