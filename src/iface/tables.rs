//! The routing tables of a container: unused tables, and the routes of a link.
//!
//! A route of two links, which the kernel's IPv6 makes of two routes with the same destination and
//! metric, is never created here. Where another program made one, the next hops of a link are a
//! route of the link.

use std::net::IpAddr;

use crate::netlink::{
    KernelRoute, Link, MultipathHop, Netlink, NetlinkResult, PolicyRule, RT_TABLE_MAIN,
    RouteAddMode, RouteFilter,
};
use cni::error::{Error, Result};
use cni::sort::sort_by_key;

/// `default`, `main` and `local`, the tables of the kernel's own rules.
const RESERVED: std::ops::RangeInclusive<u32> = 253..=255;

/// The metric of an IPv6 route that is added without one.
pub const IPV6_METRIC: u32 = 1024;

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

/// The part of a route with next hops through links that are `own`; `None` without such a hop.
pub fn find_part(route: &KernelRoute, own: &dyn Fn(u32) -> bool) -> Option<KernelRoute> {
    let mut part = route.clone();
    if route.nexthops.is_empty() {
        return route.oif.is_some_and(own).then_some(part);
    }
    part.nexthops.retain(|hop| hop.oif.is_some_and(own));
    match part.nexthops[..] {
        [] => return None,
        [MultipathHop { gw, oif, .. }] => {
            part.nexthops.clear();
            (part.gw, part.oif) = (gw, oif);
        }
        _ => {}
    }
    Some(part)
}

/// Whether the route has next hops through the link and through another one.
pub fn is_shared(route: &KernelRoute, link: u32) -> bool {
    route.nexthops.iter().any(|hop| hop.oif == Some(link)) && !uses_only_link(route, link)
}

/// Deletes a route, which may be a part of one of the `present` routes: their other next hops stay.
pub fn delete_part(
    netlink: &Netlink,
    part: &KernelRoute,
    present: &[KernelRoute],
) -> NetlinkResult<()> {
    let is_own = |oif| part.oif == Some(oif) || part.nexthops.iter().any(|h| h.oif == Some(oif));
    let whole = present.iter().find(|whole| {
        *whole != part
            && part.dst.addr().is_ipv4()
            && find_part(whole, &is_own).as_ref() == Some(part)
    });
    let Some(whole) = whole else { return netlink.delete_route(part).map(drop) };
    // IPv4 has no request for a single next hop. The others are added behind the route first: they
    // are never without a route, and the deletion finds the first route that begins with its hops.
    if let Some(rest) = find_part(whole, &|oif| !is_own(oif)) {
        netlink.add_route(&rest, RouteAddMode::Append)?;
    }
    netlink.delete_route(whole).map(drop)
}

/// Adds a route again. As part of another link's route it is not added.
pub fn add_again(netlink: &Netlink, route: &KernelRoute) -> NetlinkResult<()> {
    if route.dst.addr().is_ipv4() {
        // `Create`: routes of other links to the same destination stay.
        return netlink.add_route(route, RouteAddMode::Create);
    }
    match netlink.add_route(route, RouteAddMode::Exclusive) {
        Err(error) if error.is_exists() => Ok(()),
        added => added,
    }
}

/// Adds a route through the link, which is preferred to the routes of other links with the same
/// destination and metric. Returns the route as it was added. `is_chosen` is whether somebody has
/// chosen the metric, which is then not changed: where another link has it, this is an error.
pub fn add_preferred(
    netlink: &Netlink,
    link: &Link,
    route: &KernelRoute,
    is_chosen: bool,
) -> Result<KernelRoute> {
    match netlink.add_route(route, RouteAddMode::Exclusive) {
        Err(error) if error.is_exists() => {}
        added => {
            added?;
            return Ok(route.clone());
        }
    }
    let present = netlink.dump_routes(&RouteFilter::default())?;
    let preferred = prefer_to_others(netlink, link, route, is_chosen, &present)?;
    let preferred = preferred.unwrap_or_else(|| route.clone());
    match netlink.add_route(&preferred, RouteAddMode::Create) {
        // The link has this very route.
        Err(error) if error.is_exists() => {}
        added => added?,
    }
    Ok(preferred)
}

/// The route as [`add_preferred`] adds it; `None` if no other link has a route with the same
/// destination and metric among those `present`. IPv4 puts the newest route in front of the others;
/// with IPv6 the metric is lowered, as equal ones would become one route of both links. Among IPv4
/// default routes the kernel goes on to the next one while a gateway does not answer, which keeps
/// containers connected whose later network has no router.
pub fn prefer_to_others(
    netlink: &Netlink,
    link: &Link,
    route: &KernelRoute,
    is_chosen: bool,
    present: &[KernelRoute],
) -> Result<Option<KernelRoute>> {
    let table = Some(route.table.unwrap_or(RT_TABLE_MAIN));
    let is_similar = |found: &&KernelRoute| found.dst == route.dst.trunc() && found.table == table;
    let similar: Vec<&KernelRoute> = present.iter().filter(is_similar).collect();
    let is_own = |route: &KernelRoute| uses_only_link(route, link.index);
    let wanted = metric(route);
    let rival = similar.iter().find(|found| !is_own(found) && metric(found) == wanted);
    let Some(rival) = rival else { return Ok(None) };
    let hops = rival.nexthops.iter().map(|hop| hop.oif);
    let other = hops.chain([rival.oif]).flatten().find(|oif| *oif != link.index);
    let other = netlink.find_link_by_index(other.unwrap_or_default())?;
    let other = other.map(|link| link.name).unwrap_or_default();
    let (name, dst) = (&link.name, route.dst);
    let mut preferred = route.clone();
    if dst.addr().is_ipv6() {
        preferred.priority = lower_metric(&similar, &is_own, wanted);
    }
    if is_chosen || (dst.addr().is_ipv6() && preferred.priority.is_none()) {
        let msg = format!("\"{other}\" has a route to {dst} with the metric {wanted}, too");
        return Err(Error::internal(msg).with_details(REMEDY));
    }
    warn!("\"{name}\" takes the traffic to {dst} from \"{other}\": {REMEDY}");
    Ok(Some(preferred))
}

/// The highest free metric below those that other links have got instead of `wanted`. A metric far
/// below was chosen by somebody, and stays the better one.
fn lower_metric(
    similar: &[&KernelRoute],
    is_own: &dyn Fn(&KernelRoute) -> bool,
    wanted: u32,
) -> Option<u32> {
    let others = similar.iter().filter(|route| !is_own(route)).map(|route| metric(route));
    let lowest = others.filter(|m| (wanted / 2 + 1..=wanted).contains(m)).min()?;
    (1..lowest).rev().find(|m| !similar.iter().any(|route| metric(route) == *m))
}

/// What decides which of two links is preferred.
const REMEDY: &str = "\"priority\" of a route is its metric; \"defaultRoute\": false leaves the \
                      default route to the other interface";

/// The metric of a route.
pub fn metric(route: &KernelRoute) -> u32 {
    let default = if route.dst.addr().is_ipv4() { 0 } else { IPV6_METRIC };
    route.priority.filter(|metric| *metric != 0).unwrap_or(default)
}

/// Whether ADD has chosen the metric, not the configuration: that of [`add_preferred`].
pub fn has_usual_metric(route: &KernelRoute) -> bool {
    let usual = if route.dst.addr().is_ipv4() { 0..=0 } else { IPV6_METRIC / 2 + 1..=IPV6_METRIC };
    usual.contains(&metric(route))
}

/// Whether the destination is on the link itself.
pub fn is_direct_route(route: &KernelRoute) -> bool {
    route.gw.is_none() && route.nexthops.is_empty()
}

/// The routes in `table`, or in all tables, that use this link, in an order in which they can be
/// added; of a route that also uses other links, the next hops through this one.
pub fn routes_of_link(
    netlink: &Netlink,
    link: &Link,
    table: impl Into<Option<u32>>,
) -> Result<Vec<KernelRoute>> {
    let table = table.into();
    let filter = RouteFilter { table, ..RouteFilter::default() };
    Ok(select_routes(&netlink.dump_routes(&filter)?, link, table))
}

/// As [`routes_of_link`], from the `present` routes. Routes to link-local addresses and multicast
/// groups are left out: the kernel adds them itself.
pub fn select_routes(present: &[KernelRoute], link: &Link, table: Option<u32>) -> Vec<KernelRoute> {
    let parts = present.iter().filter_map(|route| find_part(route, &|oif| oif == link.index));
    let mut routes: Vec<KernelRoute> = parts.collect();
    routes.retain(|route| {
        let is_automatic = match route.dst.addr() {
            IpAddr::V4(addr) => addr.is_multicast(),
            IpAddr::V6(addr) => addr.is_unicast_link_local() || addr.is_multicast(),
        };
        (table.is_none() || route.table == table) && !is_automatic
    });
    // The kernel accepts only routes through reachable gateways.
    sort_by_key(&mut routes, |route| !is_direct_route(route));
    routes
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
    let all = netlink.dump_routes(&RouteFilter { table: Some(table), ..RouteFilter::default() })?;
    let present = select_routes(&all, link, Some(table));
    let mut done = Ok(());
    for route in present.iter().filter(|route| !wanted.contains(route)) {
        done = done.and(delete_part(netlink, route, &all));
    }
    for route in wanted.iter().filter(|route| !present.contains(route)) {
        done = done.and(add_again(netlink, route));
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
