//! The changes of ADD: the choice of tables, and of the routes for each table.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{FIRST_TABLE, is_own_table, is_rule_from};
use crate::iface::ON_LINK;
use crate::iface::tables::{self, RoutingTables};
use crate::netlink::{
    KernelRoute, Link, Netlink, PolicyRule, RT_TABLE_MAIN, RouteAddMode, RouteFilter,
};
use cni::IpConfig;
use cni::error::{ErrorContext, Result};

/// An address and its table.
#[derive(Clone, Copy)]
pub(super) struct RuleSource {
    pub(super) address: IpNet,
    /// The gateway of its default route.
    pub(super) gateway: Option<IpAddr>,
    pub(super) table: u32,
}

impl RuleSource {
    pub(super) fn new(ip: &IpConfig, gateways: &[IpAddr], table: u32) -> RuleSource {
        let v4 = ip.address.addr().is_ipv4();
        let gateway =
            gateways.iter().copied().chain(ip.usable_gateway()).find(|gw| gw.is_ipv4() == v4);
        RuleSource { address: ip.address, gateway, table }
    }

    /// The subnet; `None` for an address with the prefix length /32 or /128.
    pub(super) fn source_network(&self) -> Option<IpNet> {
        let has_subnet = self.address.prefix_len() < self.address.max_prefix_len();
        has_subnet.then(|| self.address.trunc())
    }

    fn is_of_family(&self, route: &KernelRoute) -> bool {
        self.address.addr().is_ipv4() == route.dst.addr().is_ipv4()
    }

    /// Whether the route's source or a gateway is in the address's subnet.
    fn owns_route(&self, route: &KernelRoute) -> bool {
        let gateways = route.nexthops.iter().filter_map(|hop| hop.gw);
        route.src.into_iter().chain(route.gw).chain(gateways).any(|ip| self.address.contains(&ip))
    }
}

/// The changes of ADD, and the present state.
#[derive(Default)]
pub(super) struct RoutingPlan {
    link: Link,
    sources: Vec<RuleSource>,
    rules: Vec<PolicyRule>,
    /// All routes.
    present: Vec<KernelRoute>,
    /// The tables main and of the sources, with the link's routes in them.
    before: Vec<(u32, Vec<KernelRoute>)>,
    /// Whether the gateway of each family, IPv4 first, is configured.
    fixed: [bool; 2],
}

impl RoutingPlan {
    /// Adds rules only, to a table that another program manages.
    pub(super) fn for_managed_table(
        netlink: &Netlink,
        ips: &[&IpConfig],
        table: u32,
    ) -> Result<RoutingPlan> {
        let present = netlink.dump_rules().context(|| "Failed to list all rules")?;
        let exists =
            |addr| present.iter().any(|rule| rule.table == table && is_rule_from(rule, addr));
        let missing = ips.iter().map(|ip| ip.address.addr()).filter(|addr| !exists(*addr));
        let rules = missing.map(|addr| PolicyRule::from_host(addr, table)).collect();
        Ok(RoutingPlan { rules, ..RoutingPlan::default() })
    }

    /// Chooses the tables. An address with a table of an earlier ADD keeps the table.
    pub(super) fn for_own_tables(
        netlink: &Netlink,
        link: Link,
        ips: &[&IpConfig],
        gateways: &[IpAddr],
    ) -> Result<RoutingPlan> {
        let mut tables =
            RoutingTables::read_tables(netlink).context(|| "Failed to list all rules")?;
        let present = netlink.dump_routes(&RouteFilter::default())?;
        let (mut sources, mut rules) = (Vec::new(), Vec::new());
        let own = |table| (table, tables::select_routes(&present, &link, Some(table)));
        let mut before = vec![own(RT_TABLE_MAIN)];
        for ip in ips {
            let addr = ip.address.addr();
            let known = |rule: &&PolicyRule| {
                is_rule_from(rule, addr) && is_own_table(rule.table, &present, Some(&link))
            };
            let known = tables.rules.iter().find(known).map(|rule| rule.table);
            let table = known.map_or_else(|| tables.take_free(FIRST_TABLE), Ok)?;
            if known.is_none() {
                rules.push(PolicyRule::from_host(addr, table));
            }
            before.push(own(table));
            sources.push(RuleSource::new(ip, gateways, table));
        }
        let fixed = [true, false].map(|v4| gateways.iter().any(|gw| gw.is_ipv4() == v4));
        Ok(RoutingPlan { link, sources, rules, present, before, fixed })
    }

    /// Adds the rules first, by which DEL finds the tables if ADD is killed; changes the main table
    /// last, so that every address has a route at any time. `hints` are the subnets' routes
    /// that stay in the main table.
    pub(super) fn apply_changes(
        &self,
        netlink: &Netlink,
        hints: Option<&[KernelRoute]>,
    ) -> Result<()> {
        for rule in &self.rules {
            netlink.add_rule(rule).context(|| "Failed to add rule")?;
        }
        for (source, present) in self.sources.iter().zip(self.table_routes()) {
            tables::replace_routes(netlink, &self.routes_to_add(source, present), source.table)
                .context(|| format!("fill the table {}", source.table))?;
        }
        let hints_to_add = hints.unwrap_or_default().iter();
        for route in hints_to_add.filter(|route| !self.main_routes().contains(route)) {
            let failed = || format!("add the source {} to the subnet", self.link.name);
            // Not replaced: the kernel might replace the route of another interface to the subnet.
            for former in self.main_routes().iter().filter(|former| former.dst == route.dst) {
                tables::delete_part(netlink, former, &self.present).context(failed)?;
            }
            netlink.add_route(route, RouteAddMode::Create).context(failed)?;
        }
        for route in self.routes_to_delete(hints) {
            tables::delete_part(netlink, route, &self.present)
                .context(|| "Failed to delete route")?;
        }
        Ok(())
    }

    /// Undoes [`RoutingPlan::apply_changes`]: completes all steps that can be done, then reports
    /// the first error.
    pub(super) fn revert_changes(&self, netlink: &Netlink) -> Result<()> {
        let mut done = Ok(());
        for (table, routes) in &self.before {
            done = done.and(tables::restore_routes(netlink, &self.link, *table, routes));
        }
        for rule in &self.rules {
            done = done.and(netlink.delete_rule(rule).map(drop).map_err(Into::into));
        }
        done
    }

    /// The link's routes in the main table.
    fn main_routes(&self) -> &[KernelRoute] {
        self.before.first().map(|(_, routes)| routes.as_slice()).unwrap_or_default()
    }

    /// The link's routes in the table of each source.
    fn table_routes(&self) -> impl Iterator<Item = &[KernelRoute]> {
        self.before.iter().skip(1).map(|(_, routes)| routes.as_slice())
    }

    /// The routes to add to a source's table, in an order that the kernel accepts. The `present`
    /// routes are of an earlier ADD.
    fn routes_to_add(&self, source: &RuleSource, present: &[KernelRoute]) -> Vec<KernelRoute> {
        let fixed = self.fixed[usize::from(source.address.addr().is_ipv6())];
        let is_default = |route: &KernelRoute| route.dst.prefix_len() == 0;
        let copied = self.main_routes().iter().filter(|route| {
            self.is_route_for(route, source)
                && !(fixed && is_default(route))
                && !present.iter().any(|r| r.dst == route.dst && r.priority == route.priority)
        });
        let (near, far): (Vec<KernelRoute>, Vec<KernelRoute>) =
            copied.map(alone_in_table).partition(tables::is_direct_route);
        let has_default = present.iter().any(|r| is_default(r) && source.is_of_family(r));
        let default = source.gateway.filter(|_| fixed || !has_default).map(|gw| {
            let mut direct = near.iter().chain(present).filter(|r| tables::is_direct_route(r));
            self.default_route(gw, direct.any(|route| route.dst.contains(&gw)))
        });
        near.into_iter().chain(default).chain(far).collect()
    }

    /// Whether the route is for the address: a route belongs to the addresses whose subnets it
    /// uses, and to all addresses if it uses no subnet.
    fn is_route_for(&self, route: &KernelRoute, source: &RuleSource) -> bool {
        let generic = tables::is_direct_route(route) && route.src.is_none();
        source.is_of_family(route)
            && (generic
                || source.owns_route(route)
                || (!self.sources.iter().any(|other| other.owns_route(route))))
    }

    fn default_route(&self, gw: IpAddr, is_reachable: bool) -> KernelRoute {
        let (dst, is_link_local) = match gw {
            IpAddr::V4(_) => (Ipv4Net::default().into(), false),
            IpAddr::V6(gw) => (Ipv6Net::default().into(), gw.is_unicast_link_local()),
        };
        let onlink = !is_reachable && !is_link_local;
        KernelRoute { gw: Some(gw), oif: Some(self.link.index), onlink, ..KernelRoute::new(dst) }
    }

    /// The subnets' routes for the main table, with their addresses as sources.
    pub(super) fn source_hints(&self) -> Vec<KernelRoute> {
        let mut hints: Vec<KernelRoute> = Vec::new();
        for source in &self.sources {
            let Some(network) = source.source_network() else { continue };
            hints.retain(|hint| hint.dst != network);
            let present =
                self.main_routes().iter().find(|r| r.dst == network && r.nexthops.is_empty());
            let mut hint = present.cloned().unwrap_or_else(|| KernelRoute::new(network));
            if present.is_none() {
                hint.oif = Some(self.link.index);
                hint.scope = network.addr().is_ipv4().then_some(ON_LINK);
            }
            hint.src = Some(source.address.addr());
            hints.push(hint);
        }
        hints
    }

    /// The routes to delete from the main table. With hints, routes without a gateway stay.
    fn routes_to_delete(
        &self,
        hints: Option<&[KernelRoute]>,
    ) -> impl Iterator<Item = &KernelRoute> {
        self.main_routes().iter().filter(move |route| {
            let stays = hints.is_some_and(|hints| {
                (tables::is_direct_route(route) && route.dst.prefix_len() != 0)
                    || hints.iter().any(|hint| hint.dst == route.dst)
            });
            !stays && self.sources.iter().any(|source| source.is_of_family(route))
        })
    }
}

/// The route for a table without routes of other links, for which ADD lowered its metric.
fn alone_in_table(route: &KernelRoute) -> KernelRoute {
    let is_lowered = route.dst.addr().is_ipv6()
        && tables::has_usual_metric(route)
        && !tables::is_direct_route(route);
    let priority = if is_lowered { Some(tables::IPV6_METRIC) } else { route.priority };
    KernelRoute { priority, ..route.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(address: &str, gateway: &str, table: u32) -> RuleSource {
        RuleSource { address: address.parse().unwrap(), gateway: gateway.parse().ok(), table }
    }

    /// `dst`, then perhaps `via` or `src` and an address.
    fn route(text: &str) -> KernelRoute {
        let words: Vec<&str> = text.split(' ').collect();
        let mut route = KernelRoute::new(words[0].parse().unwrap());
        match words[1..] {
            ["via", gw] => route.gw = gw.parse().ok(),
            ["src", src] => route.src = src.parse().ok(),
            _ => {}
        }
        route.oif = Some(7);
        route
    }

    fn plan(sources: &[RuleSource], main: &[&str]) -> RoutingPlan {
        let main = main.iter().map(|text| route(text)).collect();
        RoutingPlan {
            link: Link { index: 7, name: "net1".to_owned(), ..Link::default() },
            sources: sources.to_vec(),
            rules: Vec::new(),
            present: Vec::new(),
            before: vec![(RT_TABLE_MAIN, main)],
            fixed: [false, false],
        }
    }

    fn contents(plan: &RoutingPlan) -> Vec<Vec<String>> {
        plan.sources
            .iter()
            .map(|source| plan.routes_to_add(source, &[]).iter().map(ToString::to_string).collect())
            .collect()
    }

    #[test]
    fn routes_go_to_the_tables_of_their_subnets_or_to_all() {
        let sources = [source("10.1.0.2/24", "10.1.0.1", 100), source("10.2.0.2/24", "", 101)];
        let main = [
            "10.1.0.0/24 src 10.1.0.2",
            "10.2.0.0/24 src 10.2.0.2",
            "10.9.0.0/16",
            "10.8.0.0/16 via 10.2.0.9",
            "10.7.0.0/16 via 169.254.1.1",
        ];
        let expected: [&[&str]; 2] = [
            &[
                "10.1.0.0/24",
                "10.9.0.0/16",
                "0.0.0.0/0 via 10.1.0.1",
                "10.7.0.0/16 via 169.254.1.1",
            ],
            &[
                "10.2.0.0/24",
                "10.9.0.0/16",
                "10.8.0.0/16 via 10.2.0.9",
                "10.7.0.0/16 via 169.254.1.1",
            ],
        ];
        assert_eq!(contents(&plan(&sources, &main)), expected);
    }

    #[test]
    fn routes_stay_in_their_family() {
        let sources = [source("10.1.0.2/24", "", 100), source("fd00::2/64", "fe80::1", 101)];
        let plan = plan(&sources, &["10.9.0.0/16", "fd09::/32"]);
        let expected: [&[&str]; 2] = [&["10.9.0.0/16"], &["fd09::/32", "::/0 via fe80::1"]];
        assert_eq!(contents(&plan), expected);
        assert!(!plan.routes_to_add(&sources[1], &[])[1].onlink);
        let only_v4 = tests::plan(&sources[..1], &["10.9.0.0/16", "fd09::/32"]);
        let leaving: Vec<_> = only_v4.routes_to_delete(None).map(ToString::to_string).collect();
        assert_eq!(leaving, ["10.9.0.0/16"]);
    }

    #[test]
    fn a_configured_gateway_overrides_the_main_table() {
        let main = ["10.1.0.0/24 src 10.1.0.2", "0.0.0.0/0 via 10.1.0.1"];
        let mut plan = plan(&[source("10.1.0.2/24", "10.1.0.9", 100)], &main);
        assert_eq!(contents(&plan)[0][1..], ["0.0.0.0/0 via 10.1.0.9", "0.0.0.0/0 via 10.1.0.1"]);
        plan.fixed = [true, false];
        assert_eq!(contents(&plan)[0][1..], ["0.0.0.0/0 via 10.1.0.9"]);
        assert_eq!(
            plan.routes_to_delete(None).count(),
            2,
            "the other one leaves the main table all the same"
        );
    }

    #[test]
    fn a_gateway_without_a_route_is_onlink() {
        let near = plan(&[source("10.1.0.2/24", "10.1.0.1", 100)], &["10.1.0.0/24 src 10.1.0.2"]);
        assert!(!near.routes_to_add(&near.sources[0], &[])[1].onlink);
        let far = plan(&[source("10.1.0.2/32", "10.1.0.1", 100)], &[]);
        assert!(far.routes_to_add(&far.sources[0], &[])[0].onlink);
    }

    #[test]
    fn routes_of_an_earlier_add_are_kept() {
        let mut plan =
            plan(&[source("10.1.0.2/24", "10.1.0.1", 100)], &["10.1.0.0/24 src 10.1.0.2"]);
        let present = [route("10.1.0.0/24"), route("0.0.0.0/0 via 10.1.0.7")];
        assert_eq!(plan.routes_to_add(&plan.sources[0], &present), []);
        plan.fixed = [true, false];
        let default = plan.routes_to_add(&plan.sources[0], &present);
        assert_eq!(default[0].to_string(), "0.0.0.0/0 via 10.1.0.1");
        assert!(default.len() == 1 && !default[0].onlink);
    }

    #[test]
    fn hints_keep_subnets_and_neighbours_in_the_main_table() {
        let main = ["10.1.0.0/24", "10.9.0.1/32", "10.8.0.0/16 via 10.1.0.9", "0.0.0.0/0"];
        let plan = plan(&[source("10.1.0.2/24", "", 100), source("10.3.0.2/24", "", 101)], &main);
        let hints = plan.source_hints();
        let texts: Vec<_> = hints.iter().map(|hint| (hint.dst.to_string(), hint.src)).collect();
        assert_eq!(texts[0], ("10.1.0.0/24".to_owned(), "10.1.0.2".parse().ok()));
        assert_eq!((texts[1].0.as_str(), hints[1].scope), ("10.3.0.0/24", Some(ON_LINK)));
        let leaving: Vec<_> =
            plan.routes_to_delete(Some(&hints)).map(ToString::to_string).collect();
        assert_eq!(leaving, ["10.8.0.0/16 via 10.1.0.9", "0.0.0.0/0"]);
    }
}
