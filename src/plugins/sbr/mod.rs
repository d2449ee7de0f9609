//! sbr: source-based routing. Packets from an address of the interface are sent through that interface, whatever the
//! routes of the main table.
//!
//! A chained plugin, behind an interface plugin: it returns `prevResult`, from which it takes the addresses. Keys:
//! `table`, `gateways`, `addSourceHints`. For each address ADD adds a rule to a table of its own, from 100 on, and moves
//! the interface's routes from the main table to that table; with `table`, it adds only a rule to that table.
//!
//! There is no state on the host: rules and routes are in the container. DEL deletes the rules and moves the routes back.

mod plan;

use std::net::IpAddr;

use serde::Deserialize;

use self::plan::{Plan, Source};
use crate::cni::ip::parse_ip;
use crate::cni::{CniResult, IfName, IpConfig};
use crate::error::{Context, Error, Result};
use crate::files::lock::Lock;
use crate::iface::{Inside, tables, verify};
use crate::log;
use crate::netlink::{Link, Netlink, RT_TABLE_MAIN, Route, RouteFilter, Rule};
use crate::skel::{
    AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Remarks, Rollback, require_prev,
};

/// The first table for addresses.
const FIRST_TABLE: u32 = 100;
/// `RTPROT_BOOT`, the protocol of source hints.
const PROTOCOL: u8 = 3;

#[derive(Debug)]
pub struct Sbr;

/// The keys of the plugin.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    /// The table for all addresses, managed by another program. Default: a table for each address.
    table: Option<i64>,
    /// The gateways of the default routes, at most one of each family. Default: the addresses' own.
    gateways: Vec<String>,
    /// Whether the interface's subnets stay in the main table, each with its address as source.
    add_source_hints: bool,
}

impl Conf {
    fn table(&self) -> Result<Option<u32>> {
        let Some(table) = self.table else { return Ok(None) };
        match u32::try_from(table) {
            Ok(number) if number != 0 => Ok(Some(number)),
            _ => Err(Error::config(format!("invalid table {table}"))),
        }
    }

    /// The configured gateways; none with `table`, whose routes another program manages.
    fn gateways(&self) -> Result<Vec<IpAddr>> {
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
    type Conf = Conf;

    fn examine(_: &Cx<'_>, conf: &Conf, _: &mut Remarks) -> Result<()> {
        conf.table()?;
        conf.gateways().map(drop)
    }

    fn add(_: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let (table, gateways) = (conf.table()?, conf.gateways()?);
        let prev = require_prev(req.prev.as_ref(), "This plugin must be called as chained plugin")?;
        let ips = addresses(prev, &req.ifname)?;
        let netns = req.sandbox.netns()?;
        let inside = Inside::enter(netns)?;
        let netlink = &inside.netlink;
        let _turn = Lock::turn_in(netns)?;
        let plan = if let Some(table) = table {
            Plan::of_rules(netlink, &ips, table)?
        } else {
            let missing = || format!("Cannot find network interface {}", req.ifname);
            let link = netlink.link(req.ifname.as_str())?;
            let link = link.ok_or_else(|| Error::internal(missing()))?;
            Plan::resolve(netlink, link, &ips, &gateways)?
        };
        let mut undo = Rollback::new();
        undo.push("restore rules and routes", || plan.revert(netlink));
        plan.apply(netlink, conf.add_source_hints.then(|| plan.hints()).as_deref())?;
        undo.commit();
        Ok(prev.clone())
    }

    fn check(_: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let (table, gateways) = (conf.table()?, conf.gateways()?);
        let prev = req.require_prev()?;
        let ips = addresses(prev, &req.ifname)?;
        let inside = Inside::enter(req.sandbox.netns()?)?;
        let netlink = &inside.netlink;
        let link = inside.link(req.ifname.as_str())?;
        let routes = netlink.dump_routes(&RouteFilter::default())?;
        let own: Vec<&Route> =
            routes.iter().filter(|route| tables::leaves_by(route, link.index)).collect();
        let rules = netlink.dump_rules()?;
        for ip in ips {
            let addr = ip.address.addr();
            let is_own =
                |found| table.map_or_else(|| is_of(found, &routes, Some(&link)), |t| t == found);
            let is_wanted = |rule: &&Rule| is_from(rule, addr) && is_own(rule.table);
            let rule = rules.iter().find(is_wanted).ok_or_else(|| {
                let to =
                    table.map_or("a table of its own".into(), |table| format!("the table {table}"));
                Error::internal(format!("sbr: no rule from {addr} to {to}"))
            })?;
            if table.is_none() {
                let source = Source::new(ip, &gateways, rule.table);
                check_default(&source, &gateways, &own, &link.name)?;
                if conf.add_source_hints {
                    check_hint(&source, &own)?;
                }
            }
        }
        verify::routes(&inside, prev)
    }

    fn del(_: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let Some(netns) = &req.netns else { return Ok(()) };
        // An invalid table was refused by ADD.
        let table = conf.table().unwrap_or_default();
        let inside = Inside::enter(netns)?;
        let netlink = &inside.netlink;
        let _turn = Lock::turn_in(netns).unwrap_or_else(|error| {
            log::warn(error);
            None
        });
        let link = netlink.link(req.ifname.as_str())?;
        let mut failures = Failures::new();
        for rule in own_rules(netlink, table, link.as_ref(), req)? {
            let emptied = match &link {
                Some(link) if table.is_none() => move_back(netlink, link, &rule, conf, req),
                _ => Ok(()),
            };
            // The rule goes last, because a retry of DEL finds the table by the rule.
            let delete = |()| netlink.del_rule(&rule).context(|| "Failed to delete rule");
            failures.keep(emptied.and_then(delete));
        }
        failures.into_result()
    }

    fn gc(_: &Cx<'_>, _: &Conf, _: &GcReq) -> Result<()> {
        // Rules and tables are deleted with the network namespace.
        Lock::sweep_turns();
        Ok(())
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        Self::require_sound(cx, conf)?;
        cx.usable_host().map(drop)
    }
}

/// The addresses of the interface in a result. Addresses without a valid interface index count as well.
fn addresses<'r>(prev: &'r CniResult, ifname: &IfName) -> Result<Vec<&'r IpConfig>> {
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
fn is_from(rule: &Rule, addr: IpAddr) -> bool {
    rule.plain && rule.src == Some(addr.into())
}

/// Whether a table was chosen by this plugin, not by another program: all its routes use the link. The table of a deleted
/// link is empty.
fn is_of(table: u32, routes: &[Route], link: Option<&Link>) -> bool {
    let mut inside = routes.iter().filter(|route| route.table == Some(table));
    let own = |route: &Route| link.is_some_and(|link| tables::leaves_by(route, link.index));
    table >= FIRST_TABLE && !tables::is_reserved(table) && inside.all(own)
}

/// The attachment's rules, also those of the reference: from its addresses, which are on the link or in `prevResult`.
/// Without either, from addresses that no link has.
fn own_rules(
    netlink: &Netlink,
    table: Option<u32>,
    link: Option<&Link>,
    req: &DelReq,
) -> Result<Vec<Rule>> {
    let mut rules = netlink.dump_rules()?;
    rules.retain(|rule| rule.plain && rule.src.is_some_and(|src| src == src.addr().into()));
    if rules.is_empty() {
        return Ok(rules);
    }
    let routes = netlink.dump_routes(&RouteFilter::default())?;
    rules.retain(|rule| match table {
        Some(table) => rule.table == table,
        None => is_of(rule.table, &routes, link),
    });
    let reported = req.prev.as_ref().map(|prev| addresses(prev, &req.ifname).unwrap_or_default());
    let mut addrs: Vec<IpAddr> = reported.iter().flatten().map(|ip| ip.address.addr()).collect();
    if let Some(link) = link {
        addrs.extend(netlink.dump_addrs(link.index)?.iter().map(|addr| addr.net.addr()));
    }
    let is_assigned = |addr: &IpAddr| !matches!(addr, IpAddr::V6(v6) if v6.is_unicast_link_local());
    if reported.is_some() || addrs.iter().any(is_assigned) {
        rules.retain(|rule| addrs.iter().any(|addr| is_from(rule, *addr)));
        return Ok(rules);
    }
    for other in netlink.dump_links()? {
        let taken = netlink.dump_addrs(other.index)?;
        rules.retain(|rule| !taken.iter().any(|addr| is_from(rule, addr.net.addr())));
    }
    Ok(rules)
}

/// Moves the routes of a rule's table back to the main table.
fn move_back(netlink: &Netlink, link: &Link, rule: &Rule, conf: &Conf, req: &DelReq) -> Result<()> {
    if conf.add_source_hints
        && let Some(src) = rule.src
    {
        // Hints are deleted, because the subnet's original route is moved back, if there was one.
        let mut hints = tables::routes_of(netlink, link, RT_TABLE_MAIN)?;
        let own = tables::routes_of(netlink, link, rule.table)?;
        hints.retain(|hint| {
            let mut originals = own.iter().filter(|r| r.dst == hint.dst).peekable();
            let is_added = hint.protocol == Some(PROTOCOL) && hint.dst.contains(&src.addr());
            hint.src == Some(src.addr())
                && tables::is_near(hint)
                && (is_added || originals.peek().is_some())
                && !originals.any(|r| Route { table: hint.table, ..r.clone() } == *hint)
        });
        for hint in &hints {
            netlink.del_route(hint)?;
        }
    }
    // Default routes may have been added by ADD: only those of the result were in the main table before.
    let is_in_main = |table: Option<u32>| table.is_none_or(|t| t == 0 || t == RT_TABLE_MAIN);
    let was_in_main = |route: &Route| {
        let mut reported = req.prev.iter().flat_map(|prev| &prev.routes);
        route.dst.prefix_len() != 0
            || reported.any(|told| told.dst == route.dst && is_in_main(told.table))
    };
    tables::give_back(netlink, link, rule.table, was_in_main)
        .context(|| format!("empty the table {}", rule.table))
}

/// Verifies that the interface's `own` routes include the default route of the address's table.
fn check_default(source: &Source, gateways: &[IpAddr], own: &[&Route], name: &str) -> Result<()> {
    let Some(gateway) = source.gateway else { return Ok(()) };
    // A default route of the main table overrides the address's own gateway.
    let is_exact = gateways.contains(&gateway);
    let is_wanted = |route: &&Route| {
        route.table == Some(source.table)
            && route.dst.prefix_len() == 0
            && route.dst.addr().is_ipv4() == gateway.is_ipv4()
            && (!is_exact || route.gw == Some(gateway))
    };
    if own.iter().any(is_wanted) {
        return Ok(());
    }
    let table = source.table;
    let msg = format!("sbr: the table {table} has no default route via {gateway} dev {name}");
    Err(Error::internal(msg))
}

/// Verifies that the main table has a source address for the address's subnet.
fn check_hint(source: &Source, own: &[&Route]) -> Result<()> {
    let Some(network) = source.network() else { return Ok(()) };
    // One of the addresses in the subnet is the source.
    let is_hint = |route: &&Route| {
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
    use crate::error::Code;

    fn conf(text: &str) -> Conf {
        crate::cni::json::Json::parse(text.as_bytes()).unwrap().decode().unwrap()
    }

    fn refusal(text: &str) -> String {
        let conf = conf(text);
        let error = conf.table().and_then(|_| conf.gateways()).unwrap_err();
        assert_eq!(error.code(), Code::INVALID_CONFIG);
        error.msg().to_owned()
    }

    #[test]
    fn one_gateway_of_each_family() {
        let both = conf(r#"{"gateways":["10.1.0.9","fd00::9"]}"#).gateways().unwrap();
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
        assert_eq!(conf(r#"{"table":70000}"#).table(), Ok(Some(70_000)));
        assert_eq!(conf(r#"{"table":7,"gateways":["x"]}"#).gateways(), Ok(vec![]));
        for table in ["0", "-1", "4294967296"] {
            assert_eq!(
                refusal(&format!(r#"{{"table":{table}}}"#)),
                format!("invalid table {table}")
            );
        }
    }

    #[test]
    fn addresses_of_other_interfaces_do_not_count() {
        let text = r#"{"interfaces":[{"name":"eth0"},{"name":"net1"}],"ips":[
            {"address":"10.1.0.2/24","interface":0},{"address":"10.2.0.2/24","interface":1},
            {"address":"10.3.0.2/24"},{"address":"10.4.0.2/24","interface":7},
            {"address":"10.5.0.2/24","interface":-1},{"address":"10.2.0.2/16","interface":1}]}"#;
        let json = crate::cni::json::Json::parse(text.as_bytes()).unwrap();
        let prev = CniResult::decode(&json, crate::cni::SpecVersion::NEWEST).unwrap();
        let ips = addresses(&prev, &IfName::parse("net1").unwrap()).unwrap();
        let ips: Vec<_> = ips.iter().map(|ip| ip.address.to_string()).collect();
        assert_eq!(ips, ["10.2.0.2/24", "10.3.0.2/24", "10.4.0.2/24", "10.5.0.2/24"]);
        let nothing = addresses(&CniResult::new(), &IfName::parse("net1").unwrap()).unwrap_err();
        assert_eq!(nothing.msg(), "No IP addresses supplied on interface: net1");
    }
}
