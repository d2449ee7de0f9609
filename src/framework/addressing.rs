//! Addresses and routes of a configuration that no container can use, for `cnibox lint` and the
//! warnings of ADD; and default routes that the container does not want.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::iface::configure::is_on_link;
use cni::error::Error;
use cni::sort::collect_set;
use cni::{CniResult, IpConfig, NetworkConfig, ResultRoute};

/// "network" or "broadcast" for an address that no host of the subnet can have; `None` for all
/// others. IPv6 has no broadcast address.
pub fn reserved_address_kind(ip: IpAddr, subnet: IpNet) -> Option<&'static str> {
    let is_wide = subnet.max_prefix_len() - subnet.prefix_len() > 1;
    match ip {
        _ if !is_wide || !subnet.contains(&ip) => None,
        ip if ip == subnet.network() => Some("network"),
        ip if ip.is_ipv4() && ip == subnet.broadcast() => Some("broadcast"),
        _ => None,
    }
}

/// Removes the default routes of an IPAM plugin's result, if the key `defaultRoute` is false.
pub fn omit_default_routes(result: &mut CniResult, default_route: Option<bool>) {
    if default_route == Some(false) {
        result.routes.retain(|route| route.dst.prefix_len() != 0);
    }
}

/// Warns of routes of a family in which the interface has no address, and of default routes that
/// are written like subnets. Without addresses, which the runtime supplies, only of the latter.
pub fn route_warnings(ips: &[IpConfig], routes: &[ResultRoute]) -> Vec<Error> {
    let mut warnings = Vec::new();
    for ResultRoute { dst, .. } in routes {
        let is_v4 = dst.addr().is_ipv4();
        if dst.prefix_len() == 0 && !dst.addr().is_unspecified() {
            let msg = format!("the route to {dst} is the default route");
            let remedy =
                format!("write {}, or the length of the prefix that is meant", dst.trunc());
            warnings.push(Error::config(msg).with_details(remedy));
        }
        if !ips.is_empty() && ips.iter().all(|ip| ip.address.addr().is_ipv4() != is_v4) {
            let family = if is_v4 { "IPv4" } else { "IPv6" };
            let msg = format!("the route to {dst} is of {family}, but no address is");
            let remedy = format!("remove the route, or add {family} addresses");
            warnings.push(Error::config(msg).with_details(remedy));
        }
    }
    warnings
}

/// Warns of gateways that the interface cannot reach: outside of all subnets, without a route to
/// them. ptp adds the routes itself.
pub fn gateway_warnings(
    net: &NetworkConfig,
    ips: &[IpConfig],
    routes: &[ResultRoute],
) -> Vec<Error> {
    if ips.is_empty()
        || net.json.get_present_member("type").and_then(|name| name.as_str()) == Some("ptp")
    {
        return Vec::new();
    }
    let result = CniResult { ips: ips.to_vec(), routes: routes.to_vec(), ..CniResult::new() };
    let reaches = |gateway: &IpAddr, earlier: &[ResultRoute]| {
        let mut on_link = earlier.iter().filter(|route| is_on_link(route, &result));
        ips.iter().any(|ip| ip.address.contains(gateway))
            || on_link.any(|route| route.dst.contains(gateway))
    };
    let of_addresses =
        ips.iter().filter_map(|ip| ip.gateway).filter(|gateway| !reaches(gateway, routes));
    // The kernel refuses a route whose gateway has no route yet.
    let of_routes = routes.iter().enumerate();
    let of_routes = of_routes
        .filter_map(|(at, route)| route.gw.filter(|gateway| !reaches(gateway, &routes[..at])));
    let all = collect_set(of_addresses.chain(of_routes));
    all.into_iter()
        .map(|gateway| {
            let length = if gateway.is_ipv4() { 32 } else { 128 };
            let remedy = format!(
                "begin \"routes\" with {{\"dst\": \"{gateway}/{length}\", \"scope\": 253}}, or \
                 choose a gateway of the subnet"
            );
            let msg = format!("the gateway {gateway} is in no subnet of the interface");
            Error::config(msg).with_details(remedy)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni::json::Json;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn ip(address: &str, gateway: &str) -> IpConfig {
        IpConfig { address: net(address), gateway: gateway.parse().ok(), interface: None }
    }

    #[test]
    fn only_the_ends_of_a_subnet_are_reserved() {
        for (ip, subnet, what) in [
            ("10.0.0.0", "10.0.0.0/24", Some("network")),
            ("10.0.0.255", "10.0.0.0/24", Some("broadcast")),
            ("10.0.0.255", "10.0.0.0/16", None),
            ("10.0.0.1", "10.0.0.0/31", None),
            ("10.0.1.0", "10.0.0.0/24", None),
            ("fd00::", "fd00::/64", Some("network")),
            ("fd00::ffff:ffff:ffff:ffff", "fd00::/64", None),
        ] {
            assert_eq!(
                reserved_address_kind(ip.parse().unwrap(), net(subnet)),
                what,
                "{ip} of {subnet}"
            );
        }
    }

    #[test]
    fn routes_need_addresses_of_their_family() {
        let of = |ips: &[IpConfig], dst: &str| {
            route_warnings(ips, &[ResultRoute::for_destination(net(dst))]).len()
        };
        let v4 = [ip("10.1.0.0/24", "")];
        for (dst, found) in [("0.0.0.0/0", 0), ("::/0", 1), ("10.9.0.0/0", 1), ("fd00::/0", 2)] {
            assert_eq!(of(&v4, dst), found, "{dst}");
        }
        assert_eq!(of(&[], "::/0"), 0);
    }

    #[test]
    fn a_gateway_must_be_reachable() {
        let conf = |kind: &str| {
            NetworkConfig::parse(format!(r#"{{"name":"n","type":"{kind}"}}"#).as_bytes())
        };
        let (macvlan, ptp) = (conf("macvlan").unwrap(), conf("ptp").unwrap());
        let far = [ip("10.1.0.5/32", "10.9.0.1")];
        let route =
            |text: &str| Json::parse(text.as_bytes()).unwrap().decode::<ResultRoute>().unwrap();
        let on_link = route(r#"{"dst":"10.9.0.1/32","scope":253}"#);
        assert_eq!(gateway_warnings(&macvlan, &far, &[]).len(), 1);
        assert_eq!(
            gateway_warnings(&macvlan, &far, &[ResultRoute::for_destination(net("0.0.0.0/0"))])
                .len(),
            1
        );
        assert_eq!(gateway_warnings(&macvlan, &far, &[on_link]), []);
        let (near, default) =
            (route(r#"{"dst":"10.9.0.1/32"}"#), route(r#"{"dst":"0.0.0.0/0","gw":"10.9.0.1"}"#));
        let alone = [ip("10.1.0.5/32", "")];
        assert_eq!(gateway_warnings(&macvlan, &alone, &[near.clone(), default.clone()]), []);
        assert_eq!(gateway_warnings(&macvlan, &alone, &[default, near]).len(), 1);
        for (scope, found) in [(253, 0), (0, 1)] {
            let default = route(&format!(r#"{{"dst":"0.0.0.0/0","scope":{scope}}}"#));
            assert_eq!(gateway_warnings(&macvlan, &far, &[default]).len(), found, "{scope}");
        }
        assert_eq!(gateway_warnings(&ptp, &far, &[]), []);
        assert_eq!(gateway_warnings(&macvlan, &[ip("10.1.0.5/24", "10.1.0.1")], &[]), []);
        let by = route(r#"{"dst":"0.0.0.0/0","gw":"10.7.0.1"}"#);
        assert_eq!(gateway_warnings(&macvlan, &[ip("10.1.0.5/24", "")], &[by]).len(), 1);
    }
}
