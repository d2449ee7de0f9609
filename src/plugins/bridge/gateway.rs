//! The bridge as the containers' gateway.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use super::{Conf, Shared};
use crate::cni::Route;
use crate::error::{Context, Error, Result};
use crate::iface::{configure, forwarding};
use crate::netlink::{Addr, LinkChange, Mac, Netlink};

/// The address of a link that has none.
const NONE: Mac = Mac([0; 6]);

/// The address after the network's own: the gateway of a range that names none.
pub(super) fn first_host(net: IpNet) -> IpAddr {
    match net.network() {
        IpAddr::V4(ip) => Ipv4Addr::from_bits(ip.to_bits() | 1).into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() | 1).into(),
    }
}

/// Adds a default route through `gw` unless its family has one. One without a gateway counts:
/// it will go through the same address.
pub(super) fn add_default_route(routes: &mut Vec<Route>, gw: IpAddr) {
    let same_family = |route: &Route| route.dst.addr().is_ipv4() == gw.is_ipv4();
    if routes.iter().any(|route| route.is_default() && same_family(route)) {
        return;
    }
    let everywhere: IpAddr =
        if gw.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let dst = IpNet::new_assert(everywhere, 0);
    routes.push(Route { gw: Some(gw), ..Route::to(dst) });
}

/// Gives the bridge, or the interface of a VLAN, its gateway addresses and switches forwarding on for their families.
pub(super) fn ensure(
    host: &Netlink,
    bridge: &Shared,
    conf: &Conf,
    gateways: &[IpNet],
) -> Result<()> {
    let failed = if bridge.link.name == conf.bridge {
        "failed to set bridge addr"
    } else {
        "failed to set vlan interface for bridge with addr"
    };
    let present = host.dump_addrs(bridge.link.index)?;
    let is_missing = |gateway: &&IpNet| !present.iter().any(|addr| addr.net == **gateway);
    let missing: Vec<&IpNet> = gateways.iter().filter(is_missing).collect();
    for gateway in &missing {
        clear_conflicts(host, conf, &bridge.link.name, &present, gateway, gateways)
            .and_then(|()| add(host, bridge, **gateway))
            .context(|| failed)?;
    }
    forwarding::enable(host, gateways.iter().map(IpNet::addr))?;
    configure::wait_for_ipv6(host, missing.iter().map(|gateway| gateway.addr()))
}

/// Adds a gateway's address, which the kernel makes the bridge keep its MAC for.
pub(super) fn add(host: &Netlink, bridge: &Shared, gateway: IpNet) -> Result<()> {
    match configure::add_gateway(host, &bridge.link, gateway) {
        Ok(()) => {}
        // Another ADD was faster.
        Err(error) if error.is_exists() => return Ok(()),
        Err(error) => {
            let name = &bridge.link.name;
            return Err(error)
                .context(|| format!("could not add IP address {gateway} to \"{name}\""));
        }
    }
    match bridge.link.mac {
        // A bridge that others made follows the lowest address of its ports until it is told its
        // own; containers keep the gateway's address in their neighbour tables.
        Some(mac) if !bridge.pinned => {
            // A bridge that lost its last port has the MAC 00:00:00:00:00:00, which the kernel does not accept.
            let mac = if mac == NONE { Mac::random_local() } else { mac };
            host.set_link(bridge.link.index, LinkChange::new().mac(mac))
                .context(|| "could not set bridge's mac")
        }
        _ => Ok(()),
    }
}

/// Removes what the link `name` has in place of `gateway` among its addresses `present`, if
/// `forceAddress` allows it.
fn clear_conflicts(
    host: &Netlink,
    conf: &Conf,
    name: &str,
    present: &[Addr],
    gateway: &IpNet,
    gateways: &[IpNet],
) -> Result<()> {
    let conflicts = present.iter().filter(|addr| {
        // The gateways of other ranges of this network belong there, too.
        !gateways.contains(&addr.net) && conflict(&addr.net, gateway)
    });
    for addr in conflicts {
        if !conf.force_address {
            let msg = format!("\"{name}\" already has an IP address different from {gateway}");
            return Err(Error::internal(msg)
                .with_details(format!("remove {} or set \"forceAddress\": true", addr.net)));
        }
        host.del_addr(addr.index, addr.net)
            .context(|| format!("could not remove IP address from \"{name}\""))?;
    }
    Ok(())
}

/// IPv4: a bridge has one address. IPv6: several, unless their subnets overlap.
fn conflict(present: &IpNet, gateway: &IpNet) -> bool {
    match (present, gateway) {
        (IpNet::V4(_), IpNet::V4(_)) => true,
        (IpNet::V6(_), IpNet::V6(_)) => {
            present.contains(&gateway.addr()) || gateway.contains(&present.addr())
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn gateways_of_ranges_without_one() {
        assert_eq!(first_host(net("10.1.2.7/24")).to_string(), "10.1.2.1");
        assert_eq!(first_host(net("2001:db8::ff/64")).to_string(), "2001:db8::1");
    }

    #[test]
    fn one_default_route_per_family() {
        let mut routes = vec![Route::to(net("0.0.0.0/0"))];
        add_default_route(&mut routes, "10.0.0.1".parse().unwrap());
        assert_eq!(routes.len(), 1);
        add_default_route(&mut routes, "2001:db8::1".parse().unwrap());
        add_default_route(&mut routes, "2001:db8::2".parse().unwrap());
        assert_eq!(routes.len(), 2);
        assert_eq!(routes[1].gw.map(|gw| gw.to_string()).as_deref(), Some("2001:db8::1"));
    }

    #[test]
    fn conflicting_addresses() {
        assert!(conflict(&net("10.0.0.1/8"), &net("192.168.0.1/24")));
        assert!(conflict(&net("2001:db8::1/64"), &net("2001:db8::2/64")));
        assert!(!conflict(&net("2001:db8:1::1/64"), &net("2001:db8:2::1/64")));
        assert!(!conflict(&net("fe80::1/64"), &net("10.0.0.1/8")));
    }
}
