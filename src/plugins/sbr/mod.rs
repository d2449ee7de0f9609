//! sbr: source-based routing. Packets from an address of the interface are sent through that
//! interface, whatever the routes of the main table.
//!
//! A chained plugin, behind an interface plugin: it returns `prevResult`, from which it takes the
//! addresses. Keys: `table`, `gateways`, `addSourceHints`. For each address ADD adds a rule to a
//! table of its own, from 100 on, and moves the interface's routes from the main table to that
//! table; with `table`, it adds only a rule to that table.
//!
//! There is no state on the host: rules and routes are in the container. DEL deletes the rules and
//! moves the routes back.

mod plan;

use std::net::IpAddr;

use serde::Deserialize;

use self::plan::{RoutingPlan, RuleSource};
use crate::files::lock::FileLock;
use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, Failures, GcRequest, Plugin,
    Rollback, require_prev_result,
};
use crate::iface::{ContainerNetns, tables, verify};
use crate::netlink::{KernelRoute, Link, Netlink, PolicyRule, RT_TABLE_MAIN, RouteFilter};
use cni::error::{Error, ErrorContext, Result};
use cni::ip::parse_ip;
use cni::{CniResult, InterfaceName, IpConfig};

/// The first table for addresses.
const FIRST_TABLE: u32 = 100;
/// `RTPROT_BOOT`, the protocol of source hints.
const PROTOCOL: u8 = 3;

#[derive(Debug)]
pub struct Sbr;

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SbrConfig {
    /// The table for all addresses, managed by another program. Default: a table for each address.
    table: Option<i64>,
    /// The gateways of the default routes, at most one of each family. Default: the addresses'
    /// own.
    gateways: Vec<String>,
    /// Whether the interface's subnets stay in the main table, each with its address as source.
    add_source_hints: bool,
}

impl SbrConfig {
    fn parse_table(&self) -> Result<Option<u32>> {
        let Some(table) = self.table else { return Ok(None) };
        match u32::try_from(table) {
            Ok(number) if number != 0 => Ok(Some(number)),
            _ => Err(Error::config(format!("invalid table {table}"))),
        }
    }

    /// The configured gateways; none with `table`, whose routes another program manages.
    fn parse_gateways(&self) -> Result<Vec<IpAddr>> {
        if self.table.is_some() {
            return Ok(Vec::new());
        }
        if self.gateways.len() > 2 {
            let msg = "gateways list cannot contain more than 2 entries (one IPv4, one IPv6)";
            return Err(Error::config(msg));
        }
        let mut gateways: Vec<IpAddr> = Vec::new();
        for text in &self.gateways {
            let gw = parse_ip(text)
                .map_err(|_| Error::config(format!("invalid static gateway IP address: {text}")))?;
            if let Some(other) = gateways.iter().find(|other| other.is_ipv4() == gw.is_ipv4()) {
                let family = if gw.is_ipv4() { "IPv4" } else { "IPv6" };
                return Err(Error::config(format!(
                    "gateways list contains multiple {family} addresses: {other} and {gw}"
                )));
            }
            gateways.push(gw);
        }
        Ok(gateways)
    }
}

impl Plugin for Sbr {
    const NAME: &'static str = "sbr";
    const ABOUT: &'static str = "routes packets by their source address";
    type Conf = SbrConfig;

    fn examine(_: &CallContext<'_>, conf: &SbrConfig, _: &mut ConfigRemarks) -> Result<()> {
        conf.parse_table()?;
        conf.parse_gateways().map(drop)
    }

    fn add(_: &CallContext<'_>, conf: &SbrConfig, req: &AddRequest) -> Result<CniResult> {
        let (table, gateways) = (conf.parse_table()?, conf.parse_gateways()?);
        let prev =
            require_prev_result(req.prev.as_ref(), "This plugin must be called as chained plugin")?;
        let ips = interface_addresses(prev, &req.ifname)?;
        let netns = req.sandbox.open_netns()?;
        let inside = ContainerNetns::open_in(netns)?;
        let netlink = &inside.netlink;
        let _lock = FileLock::acquire_netns_lock(netns)?;
        let plan = if let Some(table) = table {
            RoutingPlan::for_managed_table(netlink, &ips, table)?
        } else {
            let link = netlink.find_link(req.ifname.as_str())?;
            let link = link.ok_or_else(|| {
                Error::internal(format!("Cannot find network interface {}", req.ifname))
            })?;
            RoutingPlan::for_own_tables(netlink, link, &ips, &gateways)?
        };
        let mut undo = Rollback::new();
        undo.add_step("restore rules and routes", || plan.revert_changes(netlink));
        plan.apply_changes(netlink, conf.add_source_hints.then(|| plan.source_hints()).as_deref())?;
        undo.commit();
        Ok(prev.clone())
    }

    fn check(_: &CallContext<'_>, conf: &SbrConfig, req: &CheckRequest) -> Result<()> {
        let (table, gateways) = (conf.parse_table()?, conf.parse_gateways()?);
        let prev = req.require_final_result()?;
        let ips = interface_addresses(prev, &req.ifname)?;
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        let netlink = &inside.netlink;
        let link = inside.require_link(req.ifname.as_str())?;
        let routes = netlink.dump_routes(&RouteFilter::default())?;
        let own = tables::select_routes(&routes, &link, None);
        if table.is_none() {
            verify_not_shared(&routes, &link)?;
        }
        let rules = netlink.dump_rules()?;
        for ip in ips {
            let addr = ip.address.addr();
            let is_own = |found| {
                table.map_or_else(|| is_own_table(found, &routes, Some(&link)), |t| t == found)
            };
            let is_wanted = |rule: &&PolicyRule| is_rule_from(rule, addr) && is_own(rule.table);
            let rule = rules.iter().find(is_wanted).ok_or_else(|| {
                let to =
                    table.map_or("a table of its own".into(), |table| format!("the table {table}"));
                Error::internal(format!("sbr: no rule from {addr} to {to}"))
            })?;
            if table.is_none() {
                let source = RuleSource::new(ip, &gateways, rule.table);
                verify_default_route(&source, &gateways, &own, &link.name)?;
                if conf.add_source_hints {
                    verify_source_hint(&source, &own)?;
                }
            }
        }
        verify::require_routes(&inside, prev)
    }

    fn del(_: &CallContext<'_>, conf: &SbrConfig, req: &DelRequest) -> Result<()> {
        let Some(netns) = &req.netns else { return Ok(()) };
        // An invalid table was refused by ADD.
        let table = conf.parse_table().unwrap_or_default();
        let inside = ContainerNetns::open_in(netns)?;
        let netlink = &inside.netlink;
        let _lock = FileLock::acquire_netns_lock(netns).unwrap_or_else(|error| {
            warn!("DEL continues without the lock of the namespace: {error}");
            None
        });
        let link = netlink.find_link(req.ifname.as_str())?;
        let mut failures = Failures::new();
        for rule in find_own_rules(netlink, table, link.as_ref(), req)? {
            let emptied = match &link {
                Some(link) if table.is_none() => move_routes_back(netlink, link, &rule, conf, req),
                _ => Ok(()),
            };
            // The rule goes last, because a retry of DEL finds the table by the rule.
            let delete = |()| netlink.delete_rule(&rule).context(|| "Failed to delete rule");
            failures.keep_error(emptied.and_then(delete));
        }
        failures.into_result()
    }

    fn gc(_: &CallContext<'_>, _: &SbrConfig, _: &GcRequest) -> Result<()> {
        // Rules and tables are deleted with the network namespace.
        FileLock::remove_stale_locks();
        Ok(())
    }

    fn status(cx: &CallContext<'_>, conf: &SbrConfig) -> Result<()> {
        Self::require_sound(cx, conf)?;
        cx.usable_host_netlink().map(drop)
    }
}

/// The addresses of the interface in a result. Addresses without a valid interface index are
/// included.
fn interface_addresses<'r>(
    prev: &'r CniResult,
    ifname: &InterfaceName,
) -> Result<Vec<&'r IpConfig>> {
    if prev.ips.is_empty() {
        let msg = format!("No IP addresses supplied on interface: {ifname}");
        return Err(Error::internal(msg));
    }
    let mut own: Vec<&IpConfig> = Vec::new();
    for ip in &prev.ips {
        let listed = ip.interface.and_then(|index| usize::try_from(index).ok());
        let listed = listed.and_then(|index| prev.interfaces.get(index));
        let known = own.iter().any(|other| other.address.addr() == ip.address.addr());
        if !known && listed.is_none_or(|interface| interface.name == ifname.as_str()) {
            own.push(ip);
        }
    }
    Ok(own)
}

/// Whether the rule has the form of this plugin's rules for the address.
fn is_rule_from(rule: &PolicyRule, addr: IpAddr) -> bool {
    rule.plain && rule.src == Some(addr.into())
}

/// Whether a table was chosen by this plugin, not by another program: all its routes use the link.
/// The table of a deleted link is empty.
fn is_own_table(table: u32, routes: &[KernelRoute], link: Option<&Link>) -> bool {
    let mut inside = routes.iter().filter(|route| route.table == Some(table));
    table >= FIRST_TABLE
        && !tables::is_reserved(table)
        && inside.all(|route| link.is_some_and(|link| tables::uses_only_link(route, link.index)))
}

/// The attachment's rules, also those of the reference: from its addresses, which are on the link
/// or in `prevResult`. Without either, from addresses that no link has.
fn find_own_rules(
    netlink: &Netlink,
    table: Option<u32>,
    link: Option<&Link>,
    req: &DelRequest,
) -> Result<Vec<PolicyRule>> {
    let mut rules = netlink.dump_rules()?;
    rules.retain(|rule| rule.plain && rule.src.is_some_and(|src| src == src.addr().into()));
    if rules.is_empty() {
        return Ok(rules);
    }
    let routes = netlink.dump_routes(&RouteFilter::default())?;
    rules.retain(|rule| match table {
        Some(table) => rule.table == table,
        None => is_own_table(rule.table, &routes, link),
    });
    let reported =
        req.prev.as_ref().map(|prev| interface_addresses(prev, &req.ifname).unwrap_or_default());
    let mut addrs: Vec<IpAddr> = reported.iter().flatten().map(|ip| ip.address.addr()).collect();
    if let Some(link) = link {
        addrs.extend(netlink.dump_addresses(link.index)?.iter().map(|addr| addr.net.addr()));
    }
    if reported.is_some()
        || addrs.iter().any(|addr| !matches!(addr, IpAddr::V6(v6) if v6.is_unicast_link_local()))
    {
        rules.retain(|rule| addrs.iter().any(|addr| is_rule_from(rule, *addr)));
        return Ok(rules);
    }
    for other in netlink.dump_links()? {
        let taken = netlink.dump_addresses(other.index)?;
        rules.retain(|rule| !taken.iter().any(|addr| is_rule_from(rule, addr.net.addr())));
    }
    Ok(rules)
}

/// Moves the routes of a rule's table back to the main table.
fn move_routes_back(
    netlink: &Netlink,
    link: &Link,
    rule: &PolicyRule,
    conf: &SbrConfig,
    req: &DelRequest,
) -> Result<()> {
    if conf.add_source_hints
        && let Some(src) = rule.src
    {
        // Hints are deleted, because the subnet's original route is moved back, if there was one.
        let mut hints = tables::routes_of_link(netlink, link, RT_TABLE_MAIN)?;
        let own = tables::routes_of_link(netlink, link, rule.table)?;
        hints.retain(|hint| {
            let mut originals = own.iter().filter(|r| r.dst == hint.dst).peekable();
            let is_added = hint.protocol == Some(PROTOCOL) && hint.dst.contains(&src.addr());
            hint.src == Some(src.addr())
                && tables::is_direct_route(hint)
                && (is_added || originals.peek().is_some())
                && !originals.any(|r| KernelRoute { table: hint.table, ..r.clone() } == *hint)
        });
        for hint in &hints {
            netlink.delete_route(hint)?;
        }
    }
    // Default routes may have been added by ADD: only those of the result were in the main table
    // before.
    let is_in_main = |table: Option<u32>| table.is_none_or(|t| t == 0 || t == RT_TABLE_MAIN);
    tables::return_to_main_table(netlink, link, rule.table, |route| {
        let mut reported = req.prev.iter().flat_map(|prev| &prev.routes);
        route.dst.prefix_len() != 0
            || reported.any(|told| told.dst == route.dst && is_in_main(told.table))
    })
    .context(|| format!("empty the table {}", rule.table))
}

/// Verifies that the interface's `own` routes include the default route of the address's table.
fn verify_default_route(
    source: &RuleSource,
    gateways: &[IpAddr],
    own: &[KernelRoute],
    name: &str,
) -> Result<()> {
    let Some(gateway) = source.gateway else { return Ok(()) };
    // A default route of the main table overrides the address's own gateway.
    let is_exact = gateways.contains(&gateway);
    if own.iter().any(|route| {
        route.table == Some(source.table)
            && route.dst.prefix_len() == 0
            && route.dst.addr().is_ipv4() == gateway.is_ipv4()
            && (!is_exact || route.gw == Some(gateway))
    }) {
        return Ok(());
    }
    let table = source.table;
    let msg = format!("sbr: the table {table} has no default route via {gateway} dev {name}");
    Err(Error::internal(msg))
}

/// Verifies that no route of the main table uses the link and another one: ADD has taken the link's
/// next hops out of it.
fn verify_not_shared(routes: &[KernelRoute], link: &Link) -> Result<()> {
    let is_left = |route: &&KernelRoute| {
        route.table == Some(RT_TABLE_MAIN) && tables::is_shared(route, link.index)
    };
    let Some(route) = routes.iter().find(is_left) else { return Ok(()) };
    let (dst, name) = (route.dst, &link.name);
    let msg = format!("sbr: the route of the main table to {dst} has a next hop through {name}");
    Err(Error::internal(msg))
}

/// Verifies that the main table has a source address for the address's subnet.
fn verify_source_hint(source: &RuleSource, own: &[KernelRoute]) -> Result<()> {
    let Some(network) = source.source_network() else { return Ok(()) };
    // One of the addresses in the subnet is the source.
    let is_hint = |route: &KernelRoute| {
        route.table == Some(RT_TABLE_MAIN) && route.dst == network && route.src.is_some()
    };
    if own.iter().any(is_hint) {
        return Ok(());
    }
    let msg = format!("sbr: the main table has no route to {network} with a source address");
    Err(Error::internal(msg))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni::error::ErrorCode;

    fn conf(text: &str) -> SbrConfig {
        cni::json::Json::parse(text.as_bytes()).unwrap().decode().unwrap()
    }

    fn refusal(text: &str) -> String {
        let conf = conf(text);
        let error = conf.parse_table().and_then(|_| conf.parse_gateways()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::INVALID_CONFIG);
        error.message().to_owned()
    }

    #[test]
    fn at_most_one_gateway_per_family_is_accepted() {
        let both = conf(r#"{"gateways":["10.1.0.9","fd00::9"]}"#).parse_gateways().unwrap();
        assert_eq!(both.len(), 2);
        for (gateways, msg) in [
            (r#"["10.1.0.9","10.1.0.8"]"#, "multiple IPv4 addresses: 10.1.0.9 and 10.1.0.8"),
            (r#"["fd00::9","fd00::8"]"#, "multiple IPv6 addresses: fd00::9 and fd00::8"),
            (r#"["10.1.0.x"]"#, "invalid static gateway IP address: 10.1.0.x"),
            (r#"["a","b","c"]"#, "gateways list cannot contain more than 2 entries"),
        ] {
            let refusal = refusal(&format!(r#"{{"gateways":{gateways}}}"#));
            assert!(refusal.contains(msg), "{refusal}");
        }
    }

    #[test]
    fn a_fixed_table_is_a_valid_number() {
        assert_eq!(conf(r#"{"table":70000}"#).parse_table(), Ok(Some(70_000)));
        assert_eq!(conf(r#"{"table":7,"gateways":["x"]}"#).parse_gateways(), Ok(vec![]));
        for table in ["0", "-1", "4294967296"] {
            assert_eq!(
                refusal(&format!(r#"{{"table":{table}}}"#)),
                format!("invalid table {table}")
            );
        }
    }

    #[test]
    fn addresses_of_other_interfaces_are_ignored() {
        let text = r#"{"interfaces":[{"name":"eth0"},{"name":"net1"}],"ips":[
            {"address":"10.1.0.2/24","interface":0},{"address":"10.2.0.2/24","interface":1},
            {"address":"10.3.0.2/24"},{"address":"10.4.0.2/24","interface":7},
            {"address":"10.5.0.2/24","interface":-1},{"address":"10.2.0.2/16","interface":1}]}"#;
        let json = cni::json::Json::parse(text.as_bytes()).unwrap();
        let prev = CniResult::decode(&json, cni::SpecVersion::NEWEST).unwrap();
        let ips = interface_addresses(&prev, &InterfaceName::parse("net1").unwrap()).unwrap();
        let ips: Vec<_> = ips.iter().map(|ip| ip.address.to_string()).collect();
        assert_eq!(ips, ["10.2.0.2/24", "10.3.0.2/24", "10.4.0.2/24", "10.5.0.2/24"]);
        let nothing =
            interface_addresses(&CniResult::new(), &InterfaceName::parse("net1").unwrap())
                .unwrap_err();
        assert_eq!(nothing.message(), "No IP addresses supplied on interface: net1");
    }
}
