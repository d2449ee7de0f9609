//! ptp: a veth pair between the container and the host, every packet routed by the host.
//!
//! Keys: `mtu`, `ipMasq`, `ipMasqBackend`, and `ipam`, which is required. The container reaches even its own
//! subnet through the gateway, which is the host's end of the pair.
//!
//! On the host it leaves, while the container lives, one `veth` with the gateway's address as a /32 or /128 and a host
//! route to each address of the container, and with `ipMasq` the masquerading of its addresses; permanently, enabled
//! forwarding and the packet filter's table.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use serde::Deserialize;

use crate::attachment::{HostEnd, Record};
use crate::cni::ip::{host_net, width};
use crate::cni::{CniResult, IpConfig};
use crate::error::{Context, Error, Result};
use crate::iface::child::Found;
use crate::iface::configure::{self, Style};
use crate::iface::mtu::Mtu;
use crate::iface::veth::{self, Wanted};
use crate::iface::{Inside, forwarding, overlap, verify};
use crate::iface::{ON_LINK, routes};
use crate::log;
use crate::netfilter::names::identity;
use crate::netfilter::{Backend, Owner, layout, masquerade};
use crate::netlink::{Link, LinkChange, Netlink, RT_TABLE_MAIN, Route, RouteFilter, RouteMode};
use crate::repairs::Repairs;
use crate::skel::{
    AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Remarks, Rollback, del_and_release,
};
use crate::sort::{sort, sort_by_key};

/// `RT_SCOPE_HOST`.
const ON_HOST: u8 = 254;

/// Timeout of the deletion of a pair whose namespace is gone.
const VANISHING: Duration = Duration::from_secs(1);

pub struct Ptp;

/// The keys of a ptp network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    /// Masquerade the container's traffic to other networks.
    ip_masq: bool,
    /// `iptables` or `nftables`. Default: [`Backend::choose`].
    ip_masq_backend: Option<String>,
    /// MTU of both ends in bytes, or `"auto"`. Default: the kernel's.
    mtu: Mtu,
}

impl Conf {
    /// The configured back end of `ipMasq`; the key is ignored without `ipMasq`.
    fn backend(&self) -> Result<Option<Backend>> {
        let value = self.ip_masq_backend.as_deref().filter(|_| self.ip_masq);
        Backend::parse(value, "unknown ipmasq backend")
    }
}

impl Plugin for Ptp {
    const NAME: &'static str = "ptp";
    const ABOUT: &'static str = "veth pair routed by the host, without a bridge";
    const OUTLIVES_ITS_CONTAINER: bool = true;
    const REPAIRS: bool = true;
    type Conf = Conf;

    fn examine(_: &Cx<'_>, conf: &Conf, _: &mut Remarks) -> Result<()> {
        conf.mtu.require_ethernet()?;
        conf.backend().map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let backend = conf.backend()?;
        let netns = req.sandbox.netns()?;
        let host = cx.host()?;
        let mtu = conf.mtu.resolve(host)?;
        let filter = cx.filter();
        let mut undo = Rollback::new();

        // Created before IPAM is called, so that an attachment that exists already keeps its address.
        let wanted = Wanted { ifname: &req.ifname, mtu, mac: None, master: None };
        let inside = Inside::enter(netns)?;
        let veth::Pair { host: end, container: link } = veth::add(host, netns, &wanted)?;
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let index = end.index;
        undo.push(format!("delete \"{}\"", end.name), move || {
            Ok(host.del_link_by_index(index).map(drop)?)
        });
        veth::start(host, &end, &owner.label(), LinkChange::new())?;
        cx.set_end(HostEnd::own(host, &end));
        let mut result = cx.ipam_add(&mut undo)?;
        let hops = hops(&mut result)?;
        forwarding::enable(host, &end, &result.addresses())?;
        add_gateways(host, &end, &hops)?;
        for hop in &hops {
            HostSide { link: &end, owner }.add_route(host, hop, &mut undo)?;
        }

        result.interfaces =
            vec![veth::interface(&end, ""), veth::interface(&link, &req.sandbox.path)];
        configure_container(&inside, &link, &result, &hops)?;
        if conf.ip_masq {
            cx.note(Self::NAME, req, &result, &mut undo);
            let addrs = result.addresses();
            let registered = addrs.clone();
            undo.push("end masquerading", move || masquerade::del(filter, owner, &registered));
            masquerade::add(filter, Backend::choose(backend, filter), owner, &addrs)?;
        }
        configure::wait_for_carrier(host, &end)?;
        configure::wait_for_ipv6(host, &mut hops.iter().map(|hop| hop.gateway))?;
        cx.finish(&mut result);
        undo.commit();
        Ok(result)
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let inside = Inside::enter(req.sandbox.netns()?)?;
        cx.ipam_check()?;
        let found = req.find_link(&inside, "veth")?;
        found.verify_layer3(&inside)?;
        check_host(cx.host()?, &inside, &found)?;
        if !conf.ip_masq {
            return Ok(());
        }
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let addrs: Vec<IpNet> = found.prev.ips_of(found.index).map(|ip| ip.address).collect();
        masquerade::check(cx.filter(), owner, &addrs)
    }

    fn repair(cx: &Cx<'_>, _: &Conf, req: &CheckReq, repairs: &mut Repairs) -> Result<()> {
        let (inside, host) = (Inside::enter(req.sandbox.netns()?)?, cx.host()?);
        let prev = req.require_prev()?;
        let (index, _) = verify::container_entry(prev, &req.ifname, &req.sandbox.path)?;
        let link = inside.link(req.ifname.as_str())?;
        // Nothing to repair without a pair that is proved to be this container's.
        let Some((end, _)) = veth::find_host_end(host, &inside, prev, &link)? else {
            return Ok(());
        };
        let hop = |ip: &IpConfig| Some(Hop { address: ip.address, gateway: ip.gateway? });
        let hops: Vec<Hop> = prev.ips_of(index).filter_map(hop).collect();
        repair_host(host, &end, &hops, repairs)?;
        let mut wanted = routes_to_gateways(&link, &hops);
        wanted.extend(configure::plan_routes(prev, link.index));
        routes::restore(&inside, &link, &wanted, repairs)
    }

    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let mut failures = Failures::new();
        let filter = cx.filter();
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        // The key may have been changed since ADD.
        if conf.ip_masq || Record::of(owner).is_some() {
            let addrs = req.prev.as_ref().map(CniResult::addresses).unwrap_or_default();
            failures.keep(masquerade::del(filter, owner, &addrs));
        }
        del_and_release(cx, &mut failures, Cx::ipam_del, |failures| {
            failures.keep(req.del_veth(cx))
        });
        failures.into_result()
    }

    fn gc(cx: &Cx<'_>, _: &Conf, req: &GcReq) -> Result<()> {
        let mut failures = Failures::new();
        del_and_release(cx, &mut failures, Cx::ipam_gc, |failures| {
            let deleted = failures.keep(req.del_stale_veths(cx));
            let (network, valid) = (&cx.net.name, Owner::each(&cx.net.name, &req.valid));
            failures.keep(masquerade::gc(cx.filter(), network.as_str(), &valid));
            deleted
        });
        failures.into_result()
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let backend = conf.backend().or_unavailable()?;
        conf.mtu.resolve(cx.usable_host()?).or_unavailable()?;
        if conf.ip_masq {
            let filter = cx.filter();
            Backend::choose(backend, filter).require_usable(filter)?;
            layout::refuse(masquerade::damage(filter)?).or_unavailable()?;
        }
        cx.ipam_status()
    }
}

/// An address of the container and its gateway.
#[derive(Clone, Copy, Debug)]
struct Hop {
    address: IpNet,
    gateway: IpAddr,
}

/// Assigns the addresses to the container's interface; each needs a gateway of its own family.
fn hops(result: &mut CniResult) -> Result<Vec<Hop>> {
    let mut hops = Vec::with_capacity(result.ips.len());
    for ip in &mut result.ips {
        ip.interface = Some(1);
        let gateway = ip.gateway.filter(|gw| gw.is_ipv4() == ip.address.addr().is_ipv4());
        let gateway = gateway.ok_or_else(|| {
            Error::config(format!("ptp: the IPAM plugin returned no gateway for {}", ip.address))
                .with_details("ptp routes everything through a gateway: configure one in \"ipam\"")
        })?;
        hops.push(Hop { address: ip.address, gateway });
    }
    Ok(hops)
}

/// Adds the gateways' addresses to the host's end.
fn add_gateways(host: &Netlink, end: &Link, hops: &[Hop]) -> Result<()> {
    for gateway in gateways(hops) {
        configure::add_gateway(host, end, host_net(gateway))
            .context(|| format!("failed to add IP addr {gateway} to \"{}\"", end.name))?;
    }
    Ok(())
}

/// The host's end of an attachment's pair.
struct HostSide<'a> {
    link: &'a Link,
    owner: Owner<'a>,
}

impl HostSide<'_> {
    /// Adds the host's route to an address of the container. A route of another owner to the address is never replaced:
    /// the owner would lose its traffic to the container, and the route for good when the container's link is deleted.
    fn add_route<'u>(&self, host: &'u Netlink, hop: &Hop, undo: &mut Rollback<'u>) -> Result<()> {
        let failed = || "failed to add route on host";
        let route = route_to(hop, self.link);
        let add = |mode| host.add_route(&route, mode).context(failed);
        let taken = host.matching_route(route.dst.addr())?;
        let Some(present) = taken.clone().filter(|taken| is_to(taken, &route)) else {
            if let Some(wider) = taken {
                self.warn_of_subnet(host, &wider, hop.address);
            }
            return add(RouteMode::Exclusive);
        };
        if present.oif == Some(self.link.index) {
            // The address is listed twice.
            return Ok(());
        }
        let through = present.oif.map(|index| host.link_by_index(index)).transpose()?.flatten();
        if present.oif.is_some() && through.is_none() {
            // The link is gone meanwhile, and its routes with it.
            return add(RouteMode::Exclusive);
        }
        let through = through.as_ref();
        // An earlier pair of the attachment itself.
        if through.is_some_and(|link| self.owner.owns(Some(&link.alias))) {
            undo.push(format!("restore the route {present}"), move || {
                Ok(host.add_route(&present, RouteMode::Replace)?)
            });
            return add(RouteMode::Replace);
        }
        if through.map_or(Ok(false), |link| is_vanishing(host, link))? {
            return add(RouteMode::Exclusive);
        }
        Err(occupied(&present, through)).context(failed)
    }

    /// Warns, for the first container of a network, that the address is of a subnet of another link, to which packets went until
    /// now.
    fn warn_of_subnet(&self, host: &Netlink, wider: &Route, address: IpNet) {
        let Some(oif) = wider.oif.filter(|_| overlap::is_subnet(wider)) else { return };
        let links = host.dump_links().inspect_err(|e| log::debug(e)).unwrap_or_default();
        let is_of_network = |link: &&Link| {
            let network = identity(&link.alias).map(|(_, _, network)| network);
            link.index != self.link.index && network == Some(self.owner.network)
        };
        if links.iter().any(|link| is_of_network(&link)) {
            return;
        }
        if let Some(link) = links.iter().find(|link| link.index == oif) {
            log::warn(overlap::warning(wider, address.trunc(), link));
        }
    }
}

/// Whether a route is to the destination of `wanted`, whatever its metric.
fn is_to(route: &Route, wanted: &Route) -> bool {
    route.dst == wanted.dst && route.table == Some(RT_TABLE_MAIN)
}

/// Whether a link is the pair of another container that the kernel deletes now, with the container's namespace: the
/// route through it ends then. The address of a container is often free a little earlier.
fn is_vanishing(host: &Netlink, link: &Link) -> Result<bool> {
    if link.kind.as_deref() != Some("veth") || link.link_netnsid.is_none() {
        return Ok(false);
    }
    match host.wait_link(link.index, VANISHING, |_| false) {
        Err(error) if error.is_not_found() => Ok(true),
        still_there => Ok(still_there.map(|_| false)?),
    }
}

/// The host's route to the destination of `wanted`.
fn present_route(host: &Netlink, wanted: &Route) -> Result<Option<Route>> {
    Ok(host.matching_route(wanted.dst.addr())?.filter(|route| is_to(route, wanted)))
}

/// The error for a route that another owner has to the container's address.
fn occupied(present: &Route, through: Option<&Link>) -> Error {
    let name = through.map_or("several links", |link| &link.name);
    let text = configure::describe(&Route { table: None, ..present.clone() }, name);
    let error = Error::internal(format!("the host has the route \"{text}\""));
    match through.and_then(|link| identity(&link.alias)) {
        Some((id, ifname, network)) => error.with_details(format!(
            "it is of {ifname} of container {id} in network \"{network}\": the ranges of the networks overlap, give one of them another"
        )),
        None => error.with_details(
            "exclude its destination from the addresses of the network; a route that nothing needs: ip route del",
        ),
    }
}

/// The host's route to an address of the container.
fn route_to(hop: &Hop, end: &Link) -> Route {
    let (oif, scope) = (Some(end.index), Some(ON_HOST));
    Route { oif, scope, ..Route::new(host_net(hop.address.addr())) }
}

/// Restores missing attributes, addresses and routes of the host's end. An end that was down has lost all of its routes.
fn repair_host(host: &Netlink, end: &Link, hops: &[Hop], repairs: &mut Repairs) -> Result<()> {
    let name = &end.name;
    veth::repair_advertisements(end, repairs);
    if !end.up {
        let up = || Ok(host.set_link(end.index, LinkChange::new().up())?);
        repairs.restore(format!("\"{name}\": it is down"), up);
    }
    let addresses: Vec<IpNet> = hops.iter().map(|hop| hop.address).collect();
    forwarding::repair(host, end, &addresses, repairs);
    let addrs = host.dump_addrs(end.index)?;
    let is_missing = |gateway: &IpAddr| !addrs.iter().any(|addr| addr.net.addr() == *gateway);
    for gateway in gateways(hops).into_iter().filter(is_missing) {
        let add = || Ok(configure::add_gateway(host, end, host_net(gateway))?);
        repairs.restore(format!("address {gateway} of \"{name}\""), add);
    }
    let through =
        host.dump_routes(&RouteFilter { oif: Some(end.index), ..RouteFilter::default() })?;
    let routes = hops.iter().map(|hop| route_to(hop, end));
    for route in routes.filter(|route| !through.iter().any(|found| found.dst == route.dst)) {
        let text = format!("route {} dev {name}", route.dst);
        if let Some(present) = present_route(host, &route)? {
            repairs.leave(format!("{text}: the host has \"{present}\" through another link"));
            continue;
        }
        repairs.restore(text, || Ok(host.add_route(&route, RouteMode::Exclusive)?));
    }
    Ok(())
}

fn configure_container(
    inside: &Inside<'_>,
    link: &Link,
    result: &CniResult,
    hops: &[Hop],
) -> Result<()> {
    configure::prepare_ipv6(inside, &link.name, result, &[])?;
    // No other host is on the link that could have the addresses.
    configure::addresses_and_up(inside, link, result, Style::Routed)?;
    for route in routes_to_gateways(link, hops) {
        inside
            .netlink
            .add_route(&route, RouteMode::Exclusive)
            .context(|| format!("failed to add route {}", route.dst))?;
    }
    configure::add_routes(inside, link, result)
}

/// The container's routes: the gateway is on the link, and the rest of the subnet behind the gateway.
fn routes_to_gateways(link: &Link, hops: &[Hop]) -> Vec<Route> {
    let mut routes: Vec<Route> = Vec::new();
    for Hop { address, gateway } in hops {
        let route = |dst| {
            let (oif, src) = (Some(link.index), Some(address.addr()));
            Route { oif, src, ..Route::new(dst) }
        };
        let to_gateway = Route { scope: Some(ON_LINK), ..route(host_net(*gateway)) };
        let to_subnet = Route { gw: Some(*gateway), ..route(address.trunc()) };
        let has_subnet = address.prefix_len() < width(address.addr());
        for route in [to_gateway].into_iter().chain(has_subnet.then_some(to_subnet)) {
            // Several addresses may share a gateway or a subnet.
            if !routes.iter().any(|other| other.dst == route.dst) {
                routes.push(route);
            }
        }
    }
    // The routes to gateways first: the kernel accepts only routes through reachable gateways.
    sort_by_key(&mut routes, |route| route.gw.is_some());
    routes
}

fn gateways(hops: &[Hop]) -> Vec<IpAddr> {
    let mut gateways: Vec<IpAddr> = hops.iter().map(|hop| hop.gateway).collect();
    sort(&mut gateways);
    gateways.dedup();
    gateways
}

/// Fails unless the host's end exists, with the gateways' addresses and the routes to the container.
fn check_host(host: &Netlink, inside: &Inside<'_>, found: &Found<'_>) -> Result<()> {
    let Found { link, prev, index } = found;
    let (end, entry) = veth::find_host_end(host, inside, prev, link)?.ok_or_else(|| {
        Error::internal(format!("ptp: host end of \"{}\" was not found", link.name))
    })?;
    verify::same_mac(&end, &entry)?;
    verify::is_up(&end, verify::ON_HOST)?;
    verify::refuses_advertisements(&end)?;
    let addrs = host.dump_addrs(end.index)?;
    let routes =
        host.dump_routes(&RouteFilter { oif: Some(end.index), ..RouteFilter::default() })?;
    for ip in prev.ips_of(*index) {
        let name = &end.name;
        if let Some(gw) = ip.gateway
            && !addrs.iter().any(|addr| addr.net.addr() == gw)
        {
            return Err(Error::internal(format!("ptp: {gw} is not an address of \"{name}\""))
                .with_details(format!("ip addr add {gw} dev {name}")));
        }
        let target = host_net(ip.address.addr());
        if !routes.iter().any(|route| route.dst == target) {
            return Err(Error::internal(format!("ptp: no route to {target} through \"{name}\""))
                .with_details(format!("ip route add {target} dev {name}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hop(address: &str, gateway: &str) -> Hop {
        Hop { address: address.parse().unwrap(), gateway: gateway.parse().unwrap() }
    }

    fn destinations(hops: &[Hop]) -> Vec<String> {
        let link = Link::default();
        routes_to_gateways(&link, hops).iter().map(|route| route.dst.to_string()).collect()
    }

    #[test]
    fn shared_gateways_and_subnets_are_routed_once() {
        let hops = [hop("10.0.0.2/24", "10.0.0.1"), hop("10.0.0.3/24", "10.0.0.1")];
        assert_eq!(destinations(&hops), ["10.0.0.1/32", "10.0.0.0/24"]);
        assert_eq!(gateways(&hops).len(), 1);
    }

    #[test]
    fn a_single_address_has_no_subnet() {
        assert_eq!(destinations(&[hop("10.0.0.2/32", "10.9.9.1")]), ["10.9.9.1/32"]);
    }

    #[test]
    fn gateways_come_first() {
        let hops = [hop("10.0.0.2/24", "10.0.0.1"), hop("2001:db8::2/64", "2001:db8::1")];
        assert_eq!(
            destinations(&hops),
            ["10.0.0.1/32", "2001:db8::1/128", "10.0.0.0/24", "2001:db8::/64"]
        );
    }
}
