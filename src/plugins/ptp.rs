//! ptp: a veth pair between the container and the host, every packet routed by the host.
//!
//! Keys: `mtu`, `ipMasq`, `ipMasqBackend`, `ipMasqExcept`, `ipMasqRandomFully`, and `ipam`, which is
//! required. The container reaches even its own subnet through the gateway, which is the host's end
//! of the pair.
//!
//! State on the host while the container lives: one `veth` with the gateway's address as a /32 or
//! /128, a host route to each address of the container, and with `ipMasq` the masquerading of its
//! addresses. Permanently: enabled forwarding and the packet filter's table.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use serde::Deserialize;

use crate::attachment::{AttachmentRecord, HostVeth};
use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, Failures, GcRequest, Plugin,
    Rollback, delete_and_release,
};
use crate::iface::child::CheckedLink;
use crate::iface::configure::{self, AddressStyle};
use crate::iface::mtu::MtuConfig;
use crate::iface::veth::{self, NewVethPair};
use crate::iface::{ContainerNetns, forwarding, overlap, verify};
use crate::iface::{ON_LINK, routes};
use crate::netfilter::masquerade::{self, MasqueradeOptions};
use crate::netfilter::names::parse_label;
use crate::netfilter::{AttachmentId, RuleBackend};
use crate::netlink::{
    KernelRoute, Link, LinkChange, Netlink, RT_TABLE_MAIN, RouteAddMode, RouteFilter,
};
use crate::repairs::RepairFindings;
use cni::CniResult;
use cni::error::{Error, ErrorContext, Result};
use cni::ip::{host_net, max_prefix_len};
use cni::sort::{sort_by_key, sort_items};

/// `RT_SCOPE_HOST`.
const ON_HOST: u8 = 254;

/// Timeout of the deletion of a pair whose namespace is gone.
const VANISHING: Duration = Duration::from_secs(1);

pub struct Ptp;

/// The keys of a ptp network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PtpConfig {
    /// Masquerade the container's traffic to other networks.
    ip_masq: bool,
    /// `iptables` or `nftables`. Default: [`RuleBackend::choose_for_add`].
    ip_masq_backend: Option<String>,
    /// Networks and addresses to which packets are not masqueraded.
    ip_masq_except: Vec<String>,
    /// Whether masqueraded packets get random source ports.
    ip_masq_random_fully: bool,
    /// MTU of both ends in bytes, or `"auto"`. Default: the kernel's.
    mtu: MtuConfig,
    /// The name of the host's end, in which `{{pod}}` and other variables stand for their values.
    /// Default: a random one.
    host_interface_name: String,
    /// Whether the default routes of `ipam` are the container's. Default: true.
    default_route: Option<bool>,
    /// Whether router advertisements give the interface addresses and routes, if it has IPv6
    /// addresses of `ipam`. Default: as the kernel decides.
    #[serde(rename = "acceptRA")]
    accept_ra: Option<bool>,
}

impl PtpConfig {
    /// The configured back end of `ipMasq`, which is ignored without `ipMasq`, and the options.
    fn masquerade_keys(&self) -> Result<(Option<RuleBackend>, MasqueradeOptions)> {
        let value = self.ip_masq_backend.as_deref().filter(|_| self.ip_masq);
        let backend = RuleBackend::parse(value, "unknown ipmasq backend")?;
        Ok((backend, MasqueradeOptions::parse(&self.ip_masq_except, self.ip_masq_random_fully)?))
    }
}

impl Plugin for Ptp {
    const NAME: &'static str = "ptp";
    const ABOUT: &'static str = "veth pair routed by the host, without a bridge";
    const OUTLIVES_ITS_CONTAINER: bool = true;
    const REPAIRS: bool = true;
    type Conf = PtpConfig;

    fn examine(cx: &CallContext<'_>, conf: &PtpConfig, remarks: &mut ConfigRemarks) -> Result<()> {
        conf.mtu.require_ethernet()?;
        cx.host_interface_name(&conf.host_interface_name, cx.example_attachment())?;
        let (_, options) = conf.masquerade_keys()?;
        remarks.warnings.extend(options.ineffective_key(conf.ip_masq));
        Ok(())
    }

    fn add(cx: &CallContext<'_>, conf: &PtpConfig, req: &AddRequest) -> Result<CniResult> {
        let (backend, options) = conf.masquerade_keys()?;
        options.ineffective_key(conf.ip_masq).iter().for_each(|warning| warn!("{warning}"));
        let netns = req.sandbox.open_netns()?;
        let host = cx.host_netlink()?;
        let mtu = conf.mtu.resolve_bytes(host)?;
        let mut undo = Rollback::new();

        // Created before IPAM is called, so that an attachment that exists already keeps its
        // address.
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let host_name = cx.host_interface_name(&conf.host_interface_name, owner)?;
        let wanted = NewVethPair { ifname: &req.ifname, host_name, mtu, mac: None, master: None };
        let inside = ContainerNetns::open_in(netns)?.with_accept_ra(conf.accept_ra);
        let veth::VethPairEnds { host: end, container: link } =
            veth::add_pair(host, netns, &wanted)?;
        let index = end.index;
        undo.add_step(format!("delete \"{}\"", end.name), move || {
            Ok(host.delete_link_by_index(index).map(drop)?)
        });
        veth::start_host_end(host, &end, &owner.object_label(), LinkChange::new())?;
        cx.set_host_end(HostVeth::from_labelled_link(host, &end));
        let mut result = cx.ipam_add(&mut undo, conf.default_route)?;
        let addresses = assign_addresses(&mut result)?;
        forwarding::enable_for_link(host, &end, &result.all_addresses())?;
        add_gateways(host, &end, &addresses)?;
        for routed in &addresses {
            PtpHostEnd { link: &end, owner }.add_route(host, routed, &mut undo)?;
        }

        result.interfaces =
            vec![veth::interface_entry(&end, ""), veth::interface_entry(&link, &req.sandbox.path)];
        configure_container(&inside, &link, &result, &addresses)?;
        if conf.ip_masq {
            cx.record_attachment(Self::NAME, req, &result, &mut undo);
            cx.masquerade_result(backend, owner, &result, &options, &mut undo)?;
        }
        configure::wait_for_carrier(host, &end)?;
        configure::wait_for_ipv6(host, &mut addresses.iter().map(|routed| routed.gateway))?;
        cx.finish_result(&mut result);
        undo.commit();
        Ok(result)
    }

    fn check(cx: &CallContext<'_>, conf: &PtpConfig, req: &CheckRequest) -> Result<()> {
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        cx.ipam_check()?;
        let found = req.find_link(&inside, "veth")?;
        found.verify_layer3(&inside)?;
        verify_host_end(cx.host_netlink()?, &inside, &found)?;
        if !conf.ip_masq {
            return Ok(());
        }
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let addrs: Vec<IpNet> =
            found.prev.ips_of_interface(found.index).map(|ip| ip.address).collect();
        let (_, options) = conf.masquerade_keys()?;
        masquerade::check_addresses(cx.packet_filter(), owner, &addrs, &options)
    }

    fn repair(
        cx: &CallContext<'_>,
        _: &PtpConfig,
        req: &CheckRequest,
        repairs: &mut RepairFindings,
    ) -> Result<()> {
        let (inside, host) =
            (ContainerNetns::open_in(req.sandbox.open_netns()?)?, cx.host_netlink()?);
        let prev = req.require_final_result()?;
        let (index, _) = verify::find_container_entry(prev, &req.ifname, &req.sandbox.path)?;
        let link = inside.require_link(req.ifname.as_str())?;
        // Nothing to repair without a pair that is proved to be this container's.
        let Some((end, _)) = veth::find_listed_host_end(host, &inside, prev, &link)? else {
            return Ok(());
        };
        let addresses: Vec<RoutedAddress> = prev
            .ips_of_interface(index)
            .filter_map(|ip| {
                Some(RoutedAddress { address: ip.address, gateway: ip.usable_gateway()? })
            })
            .collect();
        restore_host_end(host, &end, &addresses, repairs)?;
        let mut wanted = routes_to_gateways(&link, &addresses);
        wanted.extend(configure::plan_routes(prev, link.index));
        routes::restore_missing(&inside, &link, &wanted, repairs)
    }

    fn del(cx: &CallContext<'_>, conf: &PtpConfig, req: &DelRequest) -> Result<()> {
        let mut failures = Failures::new();
        let filter = cx.packet_filter();
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        // The key may have been changed since ADD.
        if conf.ip_masq || AttachmentRecord::find_by_attachment(owner).is_some() {
            let addrs = req.prev.as_ref().map(CniResult::all_addresses).unwrap_or_default();
            failures.keep_error(masquerade::delete_addresses(filter, owner, &addrs));
        }
        delete_and_release(cx, &mut failures, CallContext::ipam_del, |failures| {
            failures.keep_error(req.delete_veth(cx))
        });
        failures.into_result()
    }

    fn gc(cx: &CallContext<'_>, _: &PtpConfig, req: &GcRequest) -> Result<()> {
        let mut failures = Failures::new();
        delete_and_release(cx, &mut failures, CallContext::ipam_gc, |failures| {
            let deleted = failures.keep_error(req.delete_stale_veths(cx));
            let (filter, network) = (cx.packet_filter(), cx.net.name.as_str());
            let valid = AttachmentId::from_attachments(&cx.net.name, &req.valid);
            failures.keep_error(masquerade::remove_stale_addresses(filter, network, &valid));
            deleted
        });
        failures.into_result()
    }

    fn status(cx: &CallContext<'_>, conf: &PtpConfig) -> Result<()> {
        let (backend, _) = conf.masquerade_keys().or_unavailable()?;
        conf.mtu.resolve_bytes(cx.usable_host_netlink()?).or_unavailable()?;
        if conf.ip_masq {
            let filter = cx.packet_filter();
            cx.require_serviceable(
                Some(RuleBackend::choose_for_add(backend, filter, &masquerade::FEATURE)),
                &[masquerade::FEATURE],
            )?;
        }
        cx.ipam_status()
    }
}

/// An address of the container and its gateway.
#[derive(Clone, Copy, Debug)]
struct RoutedAddress {
    address: IpNet,
    gateway: IpAddr,
}

/// Assigns the addresses to the container's interface; each needs a gateway of its own family.
fn assign_addresses(result: &mut CniResult) -> Result<Vec<RoutedAddress>> {
    let mut addresses = Vec::with_capacity(result.ips.len());
    for ip in &mut result.ips {
        ip.interface = Some(1);
        let gateway = ip.gateway.filter(|gw| gw.is_ipv4() == ip.address.addr().is_ipv4());
        let gateway = gateway.ok_or_else(|| {
            Error::config(format!("ptp: the IPAM plugin returned no gateway for {}", ip.address))
                .with_details("ptp routes everything through a gateway: configure one in \"ipam\"")
        })?;
        addresses.push(RoutedAddress { address: ip.address, gateway });
    }
    Ok(addresses)
}

fn add_gateways(host: &Netlink, end: &Link, addresses: &[RoutedAddress]) -> Result<()> {
    for gateway in unique_gateways(addresses) {
        configure::add_gateway_address(host, end, host_net(gateway))
            .context(|| format!("failed to add IP addr {gateway} to \"{}\"", end.name))?;
    }
    Ok(())
}

/// The host's end of an attachment's pair.
struct PtpHostEnd<'a> {
    link: &'a Link,
    owner: AttachmentId<'a>,
}

impl PtpHostEnd<'_> {
    /// Adds the host's route to an address of the container. A route of another owner to the
    /// address is never replaced: the owner would lose its traffic to the container, and the
    /// route for good when the container's link is deleted.
    fn add_route<'u>(
        &self,
        host: &'u Netlink,
        routed: &RoutedAddress,
        undo: &mut Rollback<'u>,
    ) -> Result<()> {
        let failed = || "failed to add route on host";
        let route = host_route(routed, self.link);
        let add = |mode| host.add_route(&route, mode).context(failed);
        let taken = host.find_matching_route(route.dst.addr())?;
        let Some(present) = taken.clone().filter(|taken| is_same_destination(taken, &route)) else {
            if let Some(wider) = taken {
                self.warn_of_subnet(host, &wider, routed.address);
            }
            return add(RouteAddMode::Exclusive);
        };
        if present.oif == Some(self.link.index) {
            // The address is listed twice.
            return Ok(());
        }
        let through =
            present.oif.map(|index| host.find_link_by_index(index)).transpose()?.flatten();
        if present.oif.is_some() && through.is_none() {
            // The link is gone meanwhile, and its routes with it.
            return add(RouteAddMode::Exclusive);
        }
        let through = through.as_ref();
        // The route of an earlier pair of this attachment is replaced.
        if through.is_some_and(|link| self.owner.owns_comment(Some(&link.alias))) {
            undo.add_step(format!("restore the route {present}"), move || {
                Ok(host.add_route(&present, RouteAddMode::Replace)?)
            });
            return add(RouteAddMode::Replace);
        }
        if through.map_or(Ok(false), |link| is_vanishing(host, link))? {
            return add(RouteAddMode::Exclusive);
        }
        Err(occupied_error(&present, through)).context(failed)
    }

    /// Warns, for the first container of a network, that the address is in a subnet that the host
    /// routes to another link.
    fn warn_of_subnet(&self, host: &Netlink, wider: &KernelRoute, address: IpNet) {
        let Some(oif) = wider.oif.filter(|_| overlap::is_subnet_route(wider)) else { return };
        let links = host.dump_links().inspect_err(|e| debug!("{e}")).unwrap_or_default();
        let is_of_network = |link: &&Link| {
            let network = parse_label(&link.alias).map(|(_, _, network)| network);
            link.index != self.link.index && network == Some(self.owner.network)
        };
        if links.iter().any(|link| is_of_network(&link)) {
            return;
        }
        if let Some(link) = links.iter().find(|link| link.index == oif) {
            warn!("{}", overlap::conflict_warning(wider, address.trunc(), link));
        }
    }
}

/// Whether a route is to the destination of `wanted`, whatever its metric.
fn is_same_destination(route: &KernelRoute, wanted: &KernelRoute) -> bool {
    route.dst == wanted.dst && route.table == Some(RT_TABLE_MAIN)
}

/// Whether a link is the pair of another container that the kernel deletes now, with the
/// container's namespace: the route through it ends then. The address of a container is often free
/// a little earlier.
fn is_vanishing(host: &Netlink, link: &Link) -> Result<bool> {
    if link.kind.as_deref() != Some("veth") || link.link_netnsid.is_none() {
        return Ok(false);
    }
    match host.wait_for_link(link.index, VANISHING, |_| false) {
        Err(error) if error.is_not_found() => Ok(true),
        still_there => Ok(still_there.map(|_| false)?),
    }
}

/// The host's route to the destination of `wanted`.
fn find_present_route(host: &Netlink, wanted: &KernelRoute) -> Result<Option<KernelRoute>> {
    Ok(host
        .find_matching_route(wanted.dst.addr())?
        .filter(|route| is_same_destination(route, wanted)))
}

/// The error for a route that another owner has to the container's address.
fn occupied_error(present: &KernelRoute, through: Option<&Link>) -> Error {
    let name = through.map_or("several links", |link| &link.name);
    let text = configure::describe_route(&KernelRoute { table: None, ..present.clone() }, name);
    let error = Error::internal(format!("the host has the route \"{text}\""));
    match through.and_then(|link| parse_label(&link.alias)) {
        Some((id, ifname, network)) => error.with_details(format!(
            "it is of {ifname} of container {id} in network \"{network}\": the ranges of the \
             networks overlap, give one of them another"
        )),
        None => error.with_details(
            "exclude its destination from the addresses of the network; a route that nothing \
             needs: ip route del",
        ),
    }
}

fn host_route(routed: &RoutedAddress, end: &Link) -> KernelRoute {
    let (oif, scope) = (Some(end.index), Some(ON_HOST));
    KernelRoute { oif, scope, ..KernelRoute::new(host_net(routed.address.addr())) }
}

/// Restores missing attributes, addresses and routes of the host's end. The kernel has deleted all
/// routes of an end that was down.
fn restore_host_end(
    host: &Netlink,
    end: &Link,
    addresses: &[RoutedAddress],
    repairs: &mut RepairFindings,
) -> Result<()> {
    let name = &end.name;
    veth::refuse_advertisements_again(end, repairs);
    if !end.up {
        repairs.restore_missing(format!("\"{name}\": it is down"), || {
            Ok(host.change_link(end.index, LinkChange::new().set_up())?)
        });
    }
    let nets: Vec<IpNet> = addresses.iter().map(|routed| routed.address).collect();
    forwarding::restore_disabled(host, end, &nets, repairs);
    let addrs = host.dump_addresses(end.index)?;
    let is_missing = |gateway: &IpAddr| !addrs.iter().any(|addr| addr.net.addr() == *gateway);
    for gateway in unique_gateways(addresses).into_iter().filter(is_missing) {
        repairs.restore_missing(format!("address {gateway} of \"{name}\""), || {
            Ok(configure::add_gateway_address(host, end, host_net(gateway))?)
        });
    }
    let through =
        host.dump_routes(&RouteFilter { oif: Some(end.index), ..RouteFilter::default() })?;
    let routes = addresses.iter().map(|routed| host_route(routed, end));
    for route in routes.filter(|route| !through.iter().any(|found| found.dst == route.dst)) {
        let text = format!("route {} dev {name}", route.dst);
        if let Some(present) = find_present_route(host, &route)? {
            repairs
                .record_changed(format!("{text}: the host has \"{present}\" through another link"));
            continue;
        }
        repairs.restore_missing(text, || Ok(host.add_route(&route, RouteAddMode::Exclusive)?));
    }
    Ok(())
}

fn configure_container(
    inside: &ContainerNetns<'_>,
    link: &Link,
    result: &CniResult,
    addresses: &[RoutedAddress],
) -> Result<()> {
    configure::prepare_ipv6(inside, &link.name, result, &[])?;
    // No other host is on the link that could have the addresses.
    configure::add_addresses_and_set_up(inside, link, result, AddressStyle::Routed)?;
    for route in routes_to_gateways(link, addresses) {
        inside
            .netlink
            .add_route(&route, RouteAddMode::Exclusive)
            .context(|| format!("failed to add route {}", route.dst))?;
    }
    configure::add_routes(inside, link, result)
}

/// The container's routes: the gateway is on the link, and the rest of the subnet behind the
/// gateway.
fn routes_to_gateways(link: &Link, addresses: &[RoutedAddress]) -> Vec<KernelRoute> {
    let mut routes: Vec<KernelRoute> = Vec::new();
    for RoutedAddress { address, gateway } in addresses {
        let route = |dst| {
            let (oif, src) = (Some(link.index), Some(address.addr()));
            KernelRoute { oif, src, ..KernelRoute::new(dst) }
        };
        let to_gateway = KernelRoute { scope: Some(ON_LINK), ..route(host_net(*gateway)) };
        let to_subnet = KernelRoute { gw: Some(*gateway), ..route(address.trunc()) };
        let has_subnet = address.prefix_len() < max_prefix_len(address.addr());
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

fn unique_gateways(addresses: &[RoutedAddress]) -> Vec<IpAddr> {
    let mut gateways: Vec<IpAddr> = addresses.iter().map(|routed| routed.gateway).collect();
    sort_items(&mut gateways);
    gateways.dedup();
    gateways
}

/// Fails unless the host's end exists, with the gateways' addresses and the routes to the
/// container.
fn verify_host_end(
    host: &Netlink,
    inside: &ContainerNetns<'_>,
    found: &CheckedLink<'_>,
) -> Result<()> {
    let CheckedLink { link, prev, index } = found;
    let (end, entry) = veth::find_listed_host_end(host, inside, prev, link)?.ok_or_else(|| {
        Error::internal(format!("ptp: host end of \"{}\" was not found", link.name))
    })?;
    verify::require_same_mac(&end, &entry)?;
    verify::require_up(&end, verify::ON_HOST)?;
    verify::require_no_advertisements(&end)?;
    let addrs = host.dump_addresses(end.index)?;
    let routes =
        host.dump_routes(&RouteFilter { oif: Some(end.index), ..RouteFilter::default() })?;
    for ip in prev.ips_of_interface(*index) {
        let name = &end.name;
        if let Some(gw) = ip.usable_gateway()
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

    fn routed(address: &str, gateway: &str) -> RoutedAddress {
        RoutedAddress { address: address.parse().unwrap(), gateway: gateway.parse().unwrap() }
    }

    fn destinations(addresses: &[RoutedAddress]) -> Vec<String> {
        let link = Link::default();
        routes_to_gateways(&link, addresses).iter().map(|route| route.dst.to_string()).collect()
    }

    #[test]
    fn shared_gateways_and_subnets_are_routed_once() {
        let both = [routed("10.0.0.2/24", "10.0.0.1"), routed("10.0.0.3/24", "10.0.0.1")];
        assert_eq!(destinations(&both), ["10.0.0.1/32", "10.0.0.0/24"]);
        assert_eq!(unique_gateways(&both).len(), 1);
    }

    #[test]
    fn a_single_address_has_no_subnet() {
        assert_eq!(destinations(&[routed("10.0.0.2/32", "10.9.9.1")]), ["10.9.9.1/32"]);
    }

    #[test]
    fn gateways_come_first() {
        let both = [routed("10.0.0.2/24", "10.0.0.1"), routed("2001:db8::2/64", "2001:db8::1")];
        assert_eq!(
            destinations(&both),
            ["10.0.0.1/32", "2001:db8::1/128", "10.0.0.0/24", "2001:db8::/64"]
        );
    }
}
