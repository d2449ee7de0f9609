//! Addresses and routes of an interface inside a container.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use nix::errno::Errno;

use super::{ContainerNetns, ON_LINK, tables};
use crate::netlink::{
    self, DuplicateDetection, KernelRoute, Link, LinkAddress, LinkChange, MultipathHop, Netlink,
    NewLinkAddress, OnOffSetting, OperationalState, WaitOutcome,
};
use crate::sysctl;
use cni::error::{Error, ErrorContext, Result};
use cni::ip::host_net;
use cni::{self, CniResult, IpConfig};

/// How long to wait for duplicate address detection, if the plugin uses it.
const DETECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// How long to wait for addresses without duplicate address detection.
const LOCAL_ADDRESS_TIMEOUT: Duration = Duration::from_secs(1);

/// How long to wait for the carrier after both ends of a pair are up. The kernel sends an event;
/// the reference polls for 2.55 seconds.
const CARRIER_TIMEOUT: Duration = Duration::from_millis(2550);

/// How long to wait for the carrier of a device whose other end is not ours.
const SOON: Duration = Duration::from_millis(20);

/// How addresses are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressStyle {
    /// With duplicate address detection for IPv6: other hosts share the link.
    Detect,
    /// Without duplicate address detection: the addresses can be used at once.
    Immediate,
    /// Like [`AddressStyle::Immediate`], but without routes to the subnets: only the gateway is on
    /// the link, and the plugin adds the routes.
    Routed,
}

/// The addresses of `result` for `ifname`. Addresses without an interface index are ignored; an
/// address with the index of another interface is an error of the plugin that returned the result.
fn addresses_of_link<'r>(result: &'r CniResult, ifname: &str) -> Result<Vec<&'r IpConfig>> {
    if result.interfaces.is_empty() {
        return Err(Error::internal("no interfaces to configure"));
    }
    let mut own = Vec::new();
    for ip in &result.ips {
        let Some(index) = ip.interface else { continue };
        let target = usize::try_from(index).ok().and_then(|i| result.interfaces.get(i));
        if target.is_none_or(|interface| interface.name != ifname) {
            let msg = format!(
                "failed to add IP addr {} to \"{ifname}\": invalid interface index",
                ip.address
            );
            return Err(Error::internal(msg));
        }
        own.push(ip);
    }
    Ok(own)
}

/// Adds the addresses of `result` to `link`, and sets the link up.
pub fn add_addresses_and_set_up(
    inside: &ContainerNetns<'_>,
    link: &Link,
    result: &CniResult,
    style: AddressStyle,
) -> Result<()> {
    let ips = addresses_of_link(result, &link.name)?;
    let dad = if style == AddressStyle::Detect {
        DuplicateDetection::Kernel
    } else {
        DuplicateDetection::Off
    };
    for ip in &ips {
        let prefix_route = style != AddressStyle::Routed;
        let address = NewLinkAddress { dad, prefix_route, ..NewLinkAddress::new(ip.address) };
        inside
            .netlink
            .add_address(link.index, &address)
            .context(|| format!("failed to add IP addr {} to \"{}\"", ip.address, link.name))?;
    }
    set_link_up(inside, link)?;
    if dad == DuplicateDetection::Off {
        return wait_for_ipv6(&inside.netlink, &mut ips.iter().map(|ip| ip.address.addr()));
    }
    if !ips.iter().any(|ip| ip.address.addr().is_ipv6()) {
        return Ok(());
    }
    wait_for_detection(inside, link)
        .context(|| format!("failed to settle addresses for \"{}\"", link.name))
}

/// Configures the container's interface with the addresses and routes of `result`, and sets the
/// interface up. `ipv6` are the optional parameters of [`prepare_ipv6`].
pub fn configure_layer3(
    inside: &ContainerNetns<'_>,
    link: &Link,
    result: &CniResult,
    style: AddressStyle,
    ipv6: &[(&str, &str)],
) -> Result<()> {
    prepare_ipv6(inside, &link.name, result, ipv6)?;
    add_addresses_and_set_up(inside, link, result, style)?;
    add_routes(inside, link, result)
}

/// The request that adds an address again, with its flags and lifetime.
pub fn request_to_restore(addr: &LinkAddress) -> NewLinkAddress {
    NewLinkAddress {
        prefix_route: !addr.is_without_prefix_route(),
        broadcast: addr.broadcast.is_some(),
        lifetime: addr.lifetime,
        ..NewLinkAddress::new(addr.net)
    }
}

/// Adds a gateway's address to a link of the host, without duplicate address detection, so that the
/// container can use the gateway at once. Enables IPv6 on the link where new links have IPv6
/// disabled.
pub fn add_gateway_address(
    host: &Netlink,
    link: &Link,
    gateway: IpNet,
) -> netlink::NetlinkResult<()> {
    let address = NewLinkAddress { dad: DuplicateDetection::Off, ..NewLinkAddress::new(gateway) };
    let add = || host.add_address(link.index, &address);
    let added = add();
    if gateway.addr().is_ipv6()
        && added.as_ref().is_err_and(|error| error.errno() == Some(Errno::EACCES))
        && sysctl::write_value(&format!("net/ipv6/conf/{}/disable_ipv6", link.name), "0").is_ok()
    {
        return add();
    }
    added
}

/// Waits for the end of duplicate address detection, which does not begin without a carrier.
fn wait_for_detection(inside: &ContainerNetns<'_>, link: &Link) -> Result<()> {
    if inside.netlink.require_link_by_index(link.index)?.carrier {
        return Ok(inside.netlink.wait_for_addresses(link.index, DETECTION_TIMEOUT)?);
    }
    let name = &link.name;
    warn!("\"{name}\" has no carrier: its IPv6 addresses are still tentative");
    Ok(())
}

/// Waits until the IPv6 addresses among `addrs`, added without duplicate address detection, receive
/// packets. A timeout is no error: on a very busy node the addresses receive packets a little
/// later.
pub fn wait_for_ipv6(netlink: &Netlink, addrs: &mut dyn Iterator<Item = IpAddr>) -> Result<()> {
    let addrs: Vec<_> =
        addrs.filter_map(|addr| if let IpAddr::V6(v6) = addr { Some(v6) } else { None }).collect();
    if !addrs.is_empty() && !netlink.wait_for_local_addresses(&addrs, LOCAL_ADDRESS_TIMEOUT)? {
        debug!("{addrs:?} have no local routes yet");
    }
    Ok(())
}

pub fn set_link_up(inside: &ContainerNetns<'_>, link: &Link) -> Result<()> {
    let Err(refused) = inside.netlink.change_link(link.index, LinkChange::new().set_up()) else {
        return Ok(());
    };
    let taken = matches!(refused.errno(), Some(Errno::EADDRINUSE | Errno::EBUSY));
    let error = Error::from(refused).context(format!("failed to set \"{}\" UP", link.name));
    let remedy = "another link on the same device has its MAC address: request another";
    Err(if taken { error.with_details(remedy) } else { error })
}

/// Waits for the carrier of a pair, for which both ends must be up. The kernel first sends
/// the event of the end that was set up last, so `link` has to be the other end.
pub fn wait_for_carrier(netlink: &Netlink, link: &Link) -> Result<()> {
    match netlink.wait_for_link(link.index, CARRIER_TIMEOUT, |link| {
        link.oper_state == OperationalState::Up
    })? {
        WaitOutcome::Reached(_) => Ok(()),
        WaitOutcome::TimedOut(Link { name, oper_state, .. }) => {
            Err(Error::internal(format!("link \"{name}\" is {oper_state}, not up")))
        }
    }
}

/// Enables announcements of the IPv4 addresses when the link comes up (`arp_notify`): another
/// container may have had the addresses before. The interface works without announcements.
pub fn enable_announcements(netlink: &Netlink, link: &Link) {
    // By netlink instead of /proc/sys, where a lookup becomes slower with the number of containers:
    // the names of all namespaces share one list.
    let change = LinkChange::new().set_arp_notify(OnOffSetting::On);
    if let Err(error) = netlink.change_link(link.index, change) {
        debug!("could not enable announcements: {error}");
    }
}

/// Announces the addresses again, by setting the MAC address that the link has: the kernel's
/// announcements when the link comes up are lost if they are sent before the port of the bridge
/// forwards.
pub fn announce_addresses(netlink: &Netlink, link: &Link) {
    let change =
        link.mac.map(|mac| netlink.change_link(link.index, LinkChange::new().set_mac(mac)));
    if let Some(Err(error)) = change {
        debug!("could not announce the addresses: {error}");
    }
}

/// Announces the addresses of a link for which another plugin may not have enabled announcements,
/// which stay as they are. Runs in the link's namespace.
pub fn announce_once(netlink: &Netlink, link: &Link) {
    let keys = ["ipv4/conf/{}/arp_notify", "ipv6/conf/{}/ndisc_notify"];
    let keys = keys.map(|key| format!("net/{}", key.replace("{}", &link.name)));
    let former = keys.each_ref().map(|key| sysctl::read_value(key));
    for key in &keys {
        try_set(key, "1");
    }
    announce_addresses(netlink, link);
    for (key, former) in keys.iter().zip(former) {
        former.map_or_else(|error| debug!("could not {error}"), |former| try_set(key, &former));
    }
}

/// Announces the addresses once the link has a carrier. That of a card may take seconds, for which
/// this does not wait. Of a pair, `far` is the other end with its namespace: as port of a bridge it
/// forwards later than the link is up.
pub fn announce_when_ready(
    netlink: &Netlink,
    link: &Link,
    far: Option<(&Netlink, u32)>,
) -> Result<()> {
    let limit = far.map_or(SOON, |_| CARRIER_TIMEOUT);
    let (netns, index) = far.unwrap_or((netlink, link.index));
    let is_ready = |end: &Link| end.oper_state == OperationalState::Up || !end.up;
    if let WaitOutcome::Reached(_) = netns.wait_for_link(index, limit, is_ready)? {
        announce_addresses(netlink, link);
    }
    Ok(())
}

/// Sets a kernel parameter without which the interface works.
fn try_set(key: &str, value: &str) {
    if let Err(error) = sysctl::ensure_value(key, value) {
        debug!("could not {error}");
    }
}

/// Sets the parameters that IPv6 addresses of `result` need, before the addresses are added: IPv6
/// may be disabled for new interfaces, and the addresses must survive a down link. Then sets the
/// parameters `optional`, keys below `net/ipv6/conf/<ifname>`, without which the interface works,
/// too.
pub fn prepare_ipv6(
    inside: &ContainerNetns<'_>,
    ifname: &str,
    result: &CniResult,
    optional: &[(&str, &str)],
) -> Result<()> {
    if !result.ips.iter().any(|ip| ip.address.addr().is_ipv6()) {
        return Ok(());
    }
    let key = |ifname: &str, key: &str| format!("net/ipv6/conf/{ifname}/{key}");
    let refuses_advertisements = inside.accept_ra == Some(false);
    inside.netns.run_inside(|| {
        try_set(&key("lo", "disable_ipv6"), "0");
        // `ensure`: a parameter with the right value need not be writable.
        sysctl::ensure_value(&key(ifname, "disable_ipv6"), "0")
            .context(|| "configure the interface")?;
        if refuses_advertisements {
            sysctl::ensure_value(&key(ifname, "accept_ra"), "0")
                .context(|| "\"acceptRA\": false")?;
        }
        if let Err(error) = sysctl::ensure_value(&key(ifname, "keep_addr_on_down"), "1") {
            warn!("{error}; IPv6 addresses are lost if the interface is set down");
        }
        for (name, value) in optional {
            try_set(&key(ifname, name), value);
        }
        Ok(())
    })?
}

/// Adds the routes of `result` through `link`. Routes without a gateway use the first gateway of
/// their family among the addresses; equal routes are added once, and several gateways to one
/// destination form one multipath route. They are preferred to equal routes of other links.
pub fn add_routes(inside: &ContainerNetns<'_>, link: &Link, result: &CniResult) -> Result<()> {
    for route in plan_routes(result, link.index) {
        let is_chosen = route.priority.is_some_and(|metric| metric != 0);
        let add = |onlink| {
            let route = KernelRoute { onlink, ..route.clone() };
            tables::add_preferred(&inside.netlink, link, &route, is_chosen)
        };
        // Another route may lead to the gateway.
        add(false)
            .or_else(|error| if route.onlink { add(true) } else { Err(error) })
            .map_err(|error| refused_route_error(error, &route, link, result))?;
    }
    Ok(())
}

/// The error for a route of `result` that the kernel refused.
pub fn refused_route_error(
    error: Error,
    route: &KernelRoute,
    link: &Link,
    result: &CniResult,
) -> Error {
    if let Some(family) = family_without_address(route, result) {
        let (name, dst) = (&link.name, route.dst);
        let what = format_args!("no {family} address of \"{name}\" for the route to {dst}");
        return error
            .context(what)
            .with_details(format!("remove the route from \"routes\", or add {family} addresses"));
    }
    let what = format_args!("failed to add route '{}'", describe_route(route, &link.name));
    let error = error.context(what);
    match gateway_remedy(route, result) {
        Some(remedy) => error.with_details(remedy),
        None => error,
    }
}

/// The family of the route, if the interface has no address of this family.
fn family_without_address(route: &KernelRoute, result: &CniResult) -> Option<&'static str> {
    let is_v4 = route.dst.addr().is_ipv4();
    let has_one = result.ips.iter().any(|ip| ip.address.addr().is_ipv4() == is_v4);
    (!has_one).then_some(if is_v4 { "IPv4" } else { "IPv6" })
}

/// The remedy for a route whose gateway the kernel refused.
fn gateway_remedy(route: &KernelRoute, result: &CniResult) -> Option<String> {
    let gw = route.gw?;
    if gw.is_ipv4() != route.dst.addr().is_ipv4() {
        return Some(format!("the gateway {gw} is of another family than the destination"));
    }
    let is_reachable = result.ips.iter().any(|ip| ip.address.contains(&gw));
    if is_reachable {
        return None;
    }
    let dst = host_net(gw);
    Some(format!(
        "the gateway {gw} is in no subnet of the interface: correct it, or put the route \
         {{\"dst\": \"{dst}\", \"scope\": 253}} before this one"
    ))
}

/// The default gateway of a route without one: the first gateway of the same family among the
/// addresses.
pub fn implied_gateway(result: &CniResult, dst: &IpNet) -> Option<IpAddr> {
    result
        .ips
        .iter()
        .filter_map(IpConfig::usable_gateway)
        .find(|gw| gw.is_ipv4() == dst.addr().is_ipv4())
}

/// The gateway of a route. A route without a gateway, whose destination is not on the link, uses
/// the default gateway.
pub fn effective_gateway(route: &cni::ResultRoute, result: &CniResult) -> Option<IpAddr> {
    route.gw.or_else(|| implied_gateway(result, &route.dst).filter(|_| !is_on_link(route, result)))
}

/// Whether the destination of a route without a gateway is on the link: because of the scope of the
/// route, or because the destination is a gateway that no subnet of the interface contains.
pub fn is_on_link(route: &cni::ResultRoute, result: &CniResult) -> bool {
    let ip = route.dst.addr();
    let is_gateway = || {
        let route_gateways = result.routes.iter().filter_map(|route| route.gw);
        route_gateways.chain(result.ips.iter().filter_map(|ip| ip.gateway)).any(|gw| gw == ip)
    };
    route.gw.is_none()
        && (route.scope >= Some(ON_LINK)
            || (route.dst == host_net(ip)
                && (!result.ips.iter().any(|own| own.address.contains(&ip)))
                && is_gateway()))
}

/// The routes of `result` through the link `oif` as [`add_routes`] adds them.
pub fn plan_routes(result: &CniResult, oif: u32) -> Vec<KernelRoute> {
    let mut planned: Vec<(cni::ResultRoute, Vec<Option<IpAddr>>)> = Vec::new();
    for route in &result.routes {
        let gw = effective_gateway(route, result);
        // The kernel accepts a gateway only if its own route has this scope.
        let is_on_link = route.dst.addr().is_ipv4() && is_on_link(route, result);
        let scope = route.scope.or(is_on_link.then_some(ON_LINK));
        let key = cni::ResultRoute { dst: route.dst.trunc(), gw: None, scope, ..route.clone() };
        match planned.iter_mut().find(|(k, _)| *k == key) {
            Some((_, gateways)) if gateways.contains(&gw) => {}
            Some((_, gateways)) => gateways.push(gw),
            None => planned.push((key, vec![gw])),
        }
    }
    planned
        .into_iter()
        .map(|(key, gateways)| {
            let route = kernel_route(&key, &gateways, oif);
            KernelRoute { onlink: route.gw.is_some_and(|gw| is_outside(gw, result)), ..route }
        })
        .collect()
}

/// Whether `gw` is the gateway of an address, but in no subnet of the interface, as with hosters
/// that give single addresses. No route of the result leads to it either.
fn is_outside(gw: IpAddr, result: &CniResult) -> bool {
    let is_link_local = matches!(gw, IpAddr::V6(gw) if gw.is_unicast_link_local());
    result.ips.iter().any(|ip| ip.gateway == Some(gw))
        && !is_link_local
        && !result.ips.iter().any(|ip| ip.address.contains(&gw))
        && !result.routes.iter().any(|route| route.dst.contains(&gw) && is_on_link(route, result))
}

fn kernel_route(route: &cni::ResultRoute, gateways: &[Option<IpAddr>], oif: u32) -> KernelRoute {
    let is_set = |value: &u32| *value != 0;
    let kernel = KernelRoute {
        scope: route.scope,
        table: route.table.filter(is_set),
        priority: route.priority,
        mtu: route.mtu.filter(is_set),
        advmss: route.advmss.filter(is_set),
        ..KernelRoute::new(route.dst)
    };
    if let [gw] = gateways {
        return KernelRoute { gw: *gw, oif: Some(oif), ..kernel };
    }
    KernelRoute {
        nexthops: gateways
            .iter()
            .map(|gw| MultipathHop { gw: *gw, oif: Some(oif), weight: 1 })
            .collect(),
        ..kernel
    }
}

/// The gateways of a route; the gateways of all next hops for a multipath route.
pub(super) fn route_gateways(route: &KernelRoute) -> Vec<IpAddr> {
    route.gw.into_iter().chain(route.nexthops.iter().filter_map(|hop| hop.gw)).collect()
}

/// A route through the link `ifname`, in the syntax of `ip route`.
pub fn describe_route(route: &KernelRoute, ifname: &str) -> String {
    let gateways: Vec<String> = route_gateways(route).iter().map(ToString::to_string).collect();
    let via =
        if gateways.is_empty() { String::new() } else { format!(" via {}", gateways.join(", ")) };
    let table = route.table.map(|table| format!(" table {table}")).unwrap_or_default();
    let metric = route.priority.map(|metric| format!(" metric {metric}")).unwrap_or_default();
    format!("{}{via} dev {ifname}{metric}{table}", route.dst)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni::json::Json;
    use cni::{ResultInterface, SpecVersion};

    fn result(text: &str) -> CniResult {
        CniResult::decode(&Json::parse(text.as_bytes()).unwrap(), SpecVersion::NEWEST).unwrap()
    }

    #[test]
    fn gateways_are_filled_in_and_duplicates_dropped() {
        let result = result(
            r#"{"ips":[{"address":"10.0.0.2/24","gateway":"10.0.0.1"}],
                "routes":[{"dst":"0.0.0.0/0"},{"dst":"0.0.0.0/0","gw":"10.0.0.1"},
                          {"dst":"192.168.5.7/16"},{"dst":"::/0"}]}"#,
        );
        let texts: Vec<_> =
            plan_routes(&result, 3).iter().map(|route| describe_route(route, "eth0")).collect();
        assert_eq!(
            texts,
            [
                "0.0.0.0/0 via 10.0.0.1 dev eth0",
                "192.168.0.0/16 via 10.0.0.1 dev eth0",
                "::/0 dev eth0"
            ]
        );
    }

    #[test]
    fn a_route_to_a_gateway_outside_of_all_subnets_is_on_link() {
        let planned = |ip: &str, routes: &str| -> Vec<_> {
            let result = result(&format!(r#"{{"ips":[{ip}],"routes":[{routes}]}}"#));
            let routes = plan_routes(&result, 3);
            routes.iter().map(|route| (describe_route(route, "eth0"), route.scope)).collect()
        };
        let (far, own) = (r#"{"dst":"203.0.113.1/32"}"#, r#"{"address":"10.0.0.2/32"}"#);
        let default = r#"{"dst":"0.0.0.0/0","gw":"203.0.113.1"}"#;
        let expected = |scope| ("203.0.113.1/32 dev eth0".to_owned(), scope);
        assert_eq!(planned(own, &format!("{far},{default}"))[0], expected(Some(253)));
        assert_eq!(planned(own, far)[0], expected(None));
        let with_gateway = r#"{"address":"10.0.0.2/32","gateway":"203.0.113.1"}"#;
        assert_eq!(planned(with_gateway, far)[0], expected(Some(253)));
        let scope = r#"{"dst":"203.0.113.9/32","scope":253},{"dst":"0.0.0.0/0"}"#;
        let routes = planned(with_gateway, scope);
        assert_eq!(routes[0], ("203.0.113.9/32 dev eth0".to_owned(), Some(253)));
        assert_eq!(routes[1].0, "0.0.0.0/0 via 203.0.113.1 dev eth0");
        let v6 = r#"{"dst":"fd00::1/128"},{"dst":"::/0","gw":"fd00::1"}"#;
        assert_eq!(planned(own, v6)[0], ("fd00::1/128 dev eth0".to_owned(), None));
    }

    #[test]
    fn several_gateways_make_one_multipath_route() {
        let result = result(
            r#"{"routes":[{"dst":"10.9.0.0/16","gw":"10.0.0.1"},{"dst":"10.9.0.0/16","gw":"10.0.0.2"},
                          {"dst":"10.9.0.0/16","gw":"10.0.0.3","priority":5}]}"#,
        );
        let routes = plan_routes(&result, 3);
        assert_eq!(routes.len(), 2);
        assert_eq!((routes[0].nexthops.len(), routes[0].oif), (2, None));
        assert_eq!((routes[1].nexthops.len(), routes[1].priority), (0, Some(5)));
    }

    #[test]
    fn addresses_are_selected_by_interface_index() {
        let mut result = result(r#"{"ips":[{"address":"10.0.0.2/24"}]}"#);
        assert_eq!(
            addresses_of_link(&result, "eth0").unwrap_err().message(),
            "no interfaces to configure"
        );
        result
            .interfaces
            .push(ResultInterface { name: "eth0".into(), ..ResultInterface::default() });
        assert!(addresses_of_link(&result, "eth0").unwrap().is_empty());
        for (index, fine) in [(0, true), (1, false), (-1, false)] {
            result.ips[0].interface = Some(index);
            assert_eq!(addresses_of_link(&result, "eth0").is_ok(), fine, "{index}");
        }
        result.ips[0].interface = Some(0);
        assert!(addresses_of_link(&result, "eth1").is_err());
    }
}
