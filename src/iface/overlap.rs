//! Routes of the node that lead packets for the containers of a network to another link.

use ipnet::IpNet;

use crate::netlink::{KernelRoute, Link, Netlink, RT_TABLE_MAIN, RouteFilter};
use cni::error::{Error, Result};

/// Warnings about the routes of the main table to a part of the subnets, or to a network that
/// contains a subnet. Routes through the bridge `own` and the gateways of its VLANs, and routes
/// other than [subnet routes](is_subnet_route), do not conflict.
pub fn conflicting_routes(host: &Netlink, subnets: &[IpNet], own: &str) -> Result<Vec<Error>> {
    let vlan_gateways = format!("{own}.");
    let is_own = |link: &Link| link.name == own || link.name.starts_with(&vlan_gateways);
    let filter = RouteFilter { table: Some(RT_TABLE_MAIN), ..RouteFilter::default() };
    let mut found = Vec::new();
    for route in host.dump_routes(&filter)?.iter().filter(|route| is_subnet_route(route)) {
        let Some((subnet, oif)) = subnets
            .iter()
            .find(|net| net.contains(&route.dst) || route.dst.contains(&net.trunc()))
            .zip(route.oif)
        else {
            continue;
        };
        if let Some(link) = host.find_link_by_index(oif)?.filter(|link| !is_own(link)) {
            found.push(conflict_warning(route, subnet.trunc(), &link));
        }
    }
    Ok(found)
}

/// Whether the route leads to the subnet of a link of the node. Others do not: routes to single
/// addresses are routes of ptp, default routes and routes through a gateway lead out of the node,
/// and each link has a route to link-local addresses.
pub fn is_subnet_route(route: &KernelRoute) -> bool {
    let length = route.dst.prefix_len();
    let is_link_local = matches!(route.dst, IpNet::V6(dst) if dst.addr().is_unicast_link_local());
    route.table == Some(RT_TABLE_MAIN)
        && !is_link_local
        && route.gw.is_none()
        && length != 0
        && length != route.dst.max_prefix_len()
}

/// The warning about a route through another link that shares addresses with a network's subnet.
pub fn conflict_warning(route: &KernelRoute, subnet: IpNet, link: &Link) -> Error {
    let (dst, name) = (route.dst, &link.name);
    Error::config(format!("{dst}, in or around the subnet {subnet}, is routed to \"{name}\""))
        .with_details(
            "containers, or hosts behind that link, are not reached: choose a subnet that nothing \
             else on the node uses",
        )
}
