//! The routing tables of a container: unused tables, and the routes of a link.

use std::net::IpAddr;

use crate::netlink::{
    KernelRoute, Link, Netlink, PolicyRule, RT_TABLE_MAIN, RouteAddMode, RouteFilter,
};
use cni::error::{Error, Result};
use cni::sort::sort_by_key;

/// `default`, `main` and `local`, the tables of the kernel's own rules.
const RESERVED: std::ops::RangeInclusive<u32> = 253..=255;

/// The rules of a namespace and the routing tables in use.
pub struct RoutingTables {
    /// The rules of both families.
    pub rules: Vec<PolicyRule>,
    used: Vec<u32>,
}

impl RoutingTables {
    /// Reads rules, routes and VRFs. The caller should hold a lock that other programs respect,
    /// because the data shows only which tables were in use at this moment.
    pub fn read_tables(netlink: &Netlink) -> Result<RoutingTables> {
        let rules = netlink.dump_rules()?;
        let routes = netlink.dump_routes(&RouteFilter::default())?;
        let links = netlink.dump_links()?;
        let mut used: Vec<u32> = rules.iter().map(|rule| rule.table).collect();
        used.extend(routes.iter().filter_map(|route| route.table));
        used.extend(links.iter().filter_map(|link| link.vrf_table));
        used.sort_unstable();
        used.dedup();
        Ok(RoutingTables { rules, used })
    }

    /// The first unused table from `first` on; it counts as used from now on.
    pub fn take_free(&mut self, first: u32) -> Result<u32> {
        let free = |table: &u32| !is_reserved(*table) && !self.used.contains(table);
        let table = (first..=u32::MAX)
            .find(free)
            .ok_or_else(|| Error::internal("no routing table is free"))?;
        self.used.push(table);
        Ok(table)
    }
}

/// Whether the table is 0, which means none, or one of [`RESERVED`].
pub fn is_reserved(table: u32) -> bool {
    table == 0 || RESERVED.contains(&table)
}

/// Whether all next hops of the route use the link.
pub fn uses_only_link(route: &KernelRoute, link: u32) -> bool {
    let nexthops = &route.nexthops;
    route.oif.map_or_else(
        || !nexthops.is_empty() && nexthops.iter().all(|hop| hop.oif == Some(link)),
        |oif| oif == link,
    )
}

/// Whether the destination is on the link itself.
pub fn is_direct_route(route: &KernelRoute) -> bool {
    route.gw.is_none() && route.nexthops.is_empty()
}

/// The routes in `table`, or in all tables, that use this link only, in an order in which they can
/// be added. Routes to link-local addresses and multicast groups are left out: the kernel adds them
/// itself.
pub fn routes_of_link(
    netlink: &Netlink,
    link: &Link,
    table: impl Into<Option<u32>>,
) -> Result<Vec<KernelRoute>> {
    let filter = RouteFilter { table: table.into(), ..RouteFilter::default() };
    let mut routes = netlink.dump_routes(&filter)?;
    routes.retain(|route| {
        let is_automatic = match route.dst.addr() {
            IpAddr::V4(addr) => addr.is_multicast(),
            IpAddr::V6(addr) => addr.is_unicast_link_local() || addr.is_multicast(),
        };
        uses_only_link(route, link.index) && !is_automatic
    });
    // The kernel accepts only routes through reachable gateways.
    sort_by_key(&mut routes, |route| !is_direct_route(route));
    Ok(routes)
}

/// Adds routes to `table`, replacing routes to the same destination.
pub fn replace_routes(netlink: &Netlink, routes: &[KernelRoute], table: u32) -> Result<()> {
    for route in routes {
        let route = KernelRoute { table: Some(table), ..route.clone() };
        netlink.add_route(&route, RouteAddMode::Replace)?;
    }
    Ok(())
}

/// Restores the link's routes in `table` to `wanted`, which [`routes_of_link`] returned earlier.
/// Goes on after an error, and then reports the first one.
pub fn restore_routes(
    netlink: &Netlink,
    link: &Link,
    table: u32,
    wanted: &[KernelRoute],
) -> Result<()> {
    let present = routes_of_link(netlink, link, table)?;
    let mut done = Ok(());
    for route in present.iter().filter(|route| !wanted.contains(route)) {
        done = done.and(netlink.delete_route(route).map(drop));
    }
    for route in wanted.iter().filter(|route| !present.contains(route)) {
        // `Create`: routes of other links to the same destination stay.
        done = done.and(netlink.add_route(route, RouteAddMode::Create));
    }
    Ok(done?)
}

/// Moves the routes of `table` back to the main table, after the existing routes, as far as the
/// kernel accepts them.
pub fn return_to_main_table(
    netlink: &Netlink,
    link: &Link,
    table: u32,
    wanted: impl Fn(&KernelRoute) -> bool,
) -> Result<()> {
    let routes = routes_of_link(netlink, link, table)?;
    for route in routes.iter().filter(|route| wanted(route)) {
        let back = KernelRoute { table: Some(RT_TABLE_MAIN), ..route.clone() };
        let mode =
            if is_direct_route(route) { RouteAddMode::Append } else { RouteAddMode::Exclusive };
        match netlink.add_route(&back, mode) {
            Ok(()) => {}
            // The kernel did not reply, so the route may be missing in the main table, and must
            // stay in this table.
            Err(error) if error.is_unanswered() => return Err(error.into()),
            // The link may be going down, or another program may have added an equal route.
            Err(error) => {
                debug!("could not move a route back to the main table: {error}");
            }
        }
    }
    restore_routes(netlink, link, table, &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables(used: &[u32]) -> RoutingTables {
        RoutingTables { rules: Vec::new(), used: used.to_vec() }
    }

    #[test]
    fn a_free_table_is_assigned_once() {
        let mut some = tables(&[1, 2, 3, 5]);
        assert_eq!(some.take_free(1), Ok(4));
        assert_eq!(some.take_free(1), Ok(6));
        assert_eq!(tables(&[]).take_free(1), Ok(1));
        assert_eq!(tables(&(1..1000).collect::<Vec<_>>()).take_free(1), Ok(1000));
    }

    #[test]
    fn reserved_tables_are_never_assigned() {
        assert_eq!(tables(&[]).take_free(0), Ok(1));
        assert_eq!(tables(&[]).take_free(253), Ok(256));
        assert!(tables(&[u32::MAX]).take_free(u32::MAX).is_err());
    }
}
