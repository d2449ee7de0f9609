//! `useInterfaceNetwork`: the container gets the addresses and routes that the device has on the host, as
//! clouds give them to the device itself and not to an IPAM plugin.

use super::origin::{IFA_F_PERMANENT, Way};
use crate::cni::{self, CniResult, IpConfig};
use crate::error::{Context, Result};
use crate::iface::Inside;
use crate::netlink::{Link, Netlink, Route, RouteFilter};
use crate::sort::sort_by_key;

/// `RT_SCOPE_UNIVERSE`.
const EVERYWHERE: u8 = 0;
/// `RT_TABLE_LOCAL`.
const LOCAL: u32 = 255;
/// `RTPROT_KERNEL` and `RTPROT_RA`: in the container they come by themselves.
const BY_THEMSELVES: [u8; 2] = [2, 9];

/// The addresses and routes of a device on the host.
#[derive(Debug, Default)]
pub(super) struct HostNetwork {
    /// Addresses that are valid everywhere.
    pub(super) ips: Vec<IpConfig>,
    ways: Vec<Way>,
}

impl HostNetwork {
    /// The addresses and routes of a device on the host.
    pub(super) fn of(host: &Netlink, device: &Link) -> Result<HostNetwork> {
        let addrs = host.dump_addrs(device.index)?.into_iter();
        // An IPv6 address that an advertisement or a lease gave is not the device's for long. One of
        // IPv4 is kept, as gateways are reached by it.
        let kept = addrs.filter(|addr| {
            let lasts = addr.net.addr().is_ipv4() || addr.flags & IFA_F_PERMANENT != 0;
            addr.scope == EVERYWHERE && lasts
        });
        let ips = kept.map(|addr| IpConfig { address: addr.net, gateway: None, interface: None });
        let filter = RouteFilter { oif: Some(device.index), ..RouteFilter::default() };
        let comes_by_itself = |route: &Route| {
            route.protocol.is_some_and(|protocol| BY_THEMSELVES.contains(&protocol))
        };
        let routes = host.dump_routes(&filter)?.into_iter().filter(|route| {
            let single = route.nexthops.is_empty();
            single && route.table != Some(LOCAL) && !comes_by_itself(route)
        });
        let mut ways: Vec<Way> = routes.map(|route| Way::like(&route)).collect();
        // Gateways must be reachable before anything goes through them.
        sort_by_key(&mut ways, Way::has_gateway);
        Ok(HostNetwork { ips: ips.collect(), ways })
    }

    /// Adds the addresses to those of IPAM.
    pub(super) fn add_ips(&self, result: &mut CniResult) {
        for ip in &self.ips {
            if !result.ips.iter().any(|other| other.address == ip.address) {
                result.ips.push(ip.clone());
            }
        }
    }

    /// Adds the routes to the device in the container and to the result; those of IPAM go first.
    pub(super) fn add_routes(
        &self,
        inside: &Inside<'_>,
        device: &Link,
        result: &mut CniResult,
    ) -> Result<()> {
        for way in &self.ways {
            let route = way.route();
            let same = |other: &cni::Route| {
                let metric = |route: &cni::Route| route.priority.unwrap_or_default();
                (other.dst.trunc(), other.table, metric(other))
                    == (route.dst, route.table, metric(&route))
            };
            if result.routes.iter().any(same) {
                continue;
            }
            way.add(&inside.netlink, device.index)
                .context(|| format!("failed to add route {} of the host", route.dst))?;
            result.routes.push(route);
        }
        Ok(())
    }
}
