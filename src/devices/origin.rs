//! The state of a device on the host: recorded by ADD, restored by DEL, and with
//! `useInterfaceNetwork` given to the container.

use ipnet::IpNet;
use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::identity::DeviceIdentity;
use crate::attachment::backup::mac_text;
use crate::framework::Failures;
use crate::iface::{ContainerNetns, ON_LINK, tables};
use crate::netlink::{
    KernelRoute, Link, LinkChange, MacAddress, Netlink, NewLinkAddress, RT_TABLE_MAIN,
    RouteAddMode, RouteFilter,
};
use cni::error::{ErrorContext, Result};
use cni::sort::sort_by_key;
use cni::{self, CniResult, IpConfig};

/// `IFA_F_PERMANENT`: the address has no lifetime, so no protocol such as DHCP will add it again.
const IFA_F_PERMANENT: u32 = 0x80;
/// `RT_TABLE_LOCAL`.
const LOCAL: u32 = 255;
/// `RT_SCOPE_UNIVERSE`.
const EVERYWHERE: u8 = 0;
/// `RTPROT_BOOT` and `RTPROT_STATIC`: routes of an administrator. All others are maintained by the
/// kernel, router advertisements, a DHCP client or a routing daemon.
const ADMINISTRATIVE: [u8; 2] = [3, 4];
/// `RTPROT_KERNEL` and `RTPROT_RA`: routes that appear in the container without the plugin.
const AUTOMATIC: [u8; 2] = [2, 9];

/// The state of a device on the host. Unknown values are not restored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OriginalState {
    pub name: String,
    pub alt_names: Vec<String>,
    pub identity: DeviceIdentity,
    /// The alias on the host. In the container the alias is the name on the host.
    pub alias: String,
    #[serde(with = "mac_text")]
    pub mac: Option<MacAddress>,
    /// In bytes; 0 is unknown.
    pub mtu: u32,
    pub up: bool,
    /// The bridge, bond or VRF; empty if there was none.
    pub master: String,
    pub promisc: Option<bool>,
    pub allmulti: Option<bool>,
    /// The permanent addresses, without those that the kernel adds.
    pub addresses: Vec<PermanentAddress>,
    /// The routes through the device that an administrator added.
    pub routes: Vec<KernelRoute>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PermanentAddress {
    net: IpNet,
    no_prefix_route: bool,
    broadcast: bool,
}

impl OriginalState {
    pub fn from_device(host: &Netlink, device: &Link) -> Result<OriginalState> {
        let mut addresses = host.dump_addresses(device.index)?;
        addresses.retain(|addr| {
            let is_automatic = addr.scope == ON_LINK && addr.net.addr().is_ipv6();
            addr.flags & IFA_F_PERMANENT != 0 && !is_automatic
        });
        let master = device.master.map(|index| host.find_link_by_index(index)).transpose()?;
        Ok(OriginalState {
            name: device.name.clone(),
            alt_names: device.alt_names.clone(),
            identity: DeviceIdentity::from_link(device),
            alias: device.alias.clone(),
            mac: device.mac,
            mtu: device.mtu,
            up: device.up,
            master: master.flatten().map(|link| link.name).unwrap_or_default(),
            promisc: Some(device.promisc),
            allmulti: Some(device.allmulti),
            addresses: addresses
                .into_iter()
                .map(|addr| PermanentAddress {
                    net: addr.net,
                    no_prefix_route: addr.is_without_prefix_route(),
                    broadcast: addr.broadcast.is_some(),
                })
                .collect(),
            routes: device_routes(host, device, &|route| {
                route.protocol.is_some_and(|p| ADMINISTRATIVE.contains(&p))
            })?,
        })
    }

    /// The state of a device without a record, of which only the name is known.
    pub fn from_name(name: &str) -> OriginalState {
        OriginalState {
            name: name.to_owned(),
            alt_names: vec![name.to_owned()],
            ..OriginalState::default()
        }
    }

    /// Whether the device had this name, or alternative name.
    pub fn has_name(&self, name: &str) -> bool {
        self.name == name || self.alt_names.iter().any(|other| other == name)
    }

    /// Removes the alternative names that the device did not have: a container must not choose
    /// names on the host.
    pub fn remove_foreign_names(&self, netlink: &Netlink, device: &Link) -> Result<()> {
        for name in device.alt_names.iter().filter(|name| !self.alt_names.contains(name)) {
            match netlink.delete_alt_name(device.index, name) {
                // On Linux 5.10 a name that the device got in another namespace is listed here, but
                // finds nothing.
                Err(error) if error.errno() == Some(Errno::ENOENT) => {}
                deleted => deleted?,
            }
        }
        Ok(())
    }

    /// Restores all that can be restored of a device that is on the host under its name. The alias
    /// comes last: while the alias is the name, the restoration is incomplete.
    pub fn restore_device(&self, host: &Netlink, device: &Link) -> Result<()> {
        let mut failures = Failures::new();
        let change = |change| host.change_link(device.index, change).map_err(Into::into);
        let mut keep = |what: &str, done: Result<()>| {
            failures
                .keep_error(done.context(|| format!("restore the {what} of \"{}\"", self.name)));
        };
        keep("alternative names", self.remove_foreign_names(host, device));
        if let Some(mac) = self.mac.filter(|mac| device.mac != Some(*mac)) {
            keep("MAC", change(LinkChange::new().set_mac(mac)));
        }
        if self.mtu != 0 && device.mtu != self.mtu {
            keep("MTU", change(LinkChange::new().set_mtu(self.mtu)));
        }
        if let Some(on) = self.promisc.filter(|on| *on != device.promisc) {
            keep("promiscuous mode", change(LinkChange::new().set_promisc(on.into())));
        }
        if let Some(on) = self.allmulti.filter(|on| *on != device.allmulti) {
            keep("multicast mode", change(LinkChange::new().set_allmulti(on.into())));
        }
        // Before addresses, which a VRF takes, and before it is up, which a bond refuses.
        if !self.master.is_empty() {
            match host.find_link(&self.master)? {
                Some(master) => keep("master", change(LinkChange::new().set_master(master.index))),
                None => warn!("\"{}\" has no master: \"{}\" is gone", self.name, self.master),
            }
        }
        for address in &self.addresses {
            keep("addresses", add_address(host, device.index, address));
        }
        if self.up {
            keep("state", change(LinkChange::new().set_up()));
        }
        for route in &self.routes {
            keep("routes", add_route(host, device.index, route));
        }
        failures.into_result()?;
        if device.alias != self.alias {
            let alias = change(LinkChange::new().set_alias(&self.alias));
            alias.context(|| format!("restore the alias of \"{}\"", self.name))?;
        }
        Ok(())
    }
}

fn add_address(netlink: &Netlink, index: u32, address: &PermanentAddress) -> Result<()> {
    let PermanentAddress { net, no_prefix_route, broadcast } = *address;
    let addr =
        NewLinkAddress { prefix_route: !no_prefix_route, broadcast, ..NewLinkAddress::new(net) };
    match netlink.add_address(index, &addr) {
        // A network manager may have added the address already.
        Err(error) if error.is_exists() => Ok(()),
        added => Ok(added?),
    }
}

/// The routes with a single next hop through the device that are `wanted`, in an order in which
/// they can be added: a gateway must be reachable before a route uses the gateway.
fn device_routes(
    host: &Netlink,
    device: &Link,
    wanted: &dyn Fn(&KernelRoute) -> bool,
) -> Result<Vec<KernelRoute>> {
    let filter = RouteFilter { oif: Some(device.index), ..RouteFilter::default() };
    let mut routes = host.dump_routes(&filter)?;
    routes.retain(|route| route.nexthops.is_empty() && wanted(route));
    sort_by_key(&mut routes, |route| route.gw.is_some());
    Ok(routes)
}

fn add_route(netlink: &Netlink, index: u32, route: &KernelRoute) -> Result<()> {
    let route = KernelRoute { oif: Some(index), ..route.clone() };
    match netlink.add_route(&route, RouteAddMode::Append) {
        Err(error) if error.is_exists() => Ok(()),
        added => Ok(added?),
    }
}

/// The addresses and routes that the container gets with `useInterfaceNetwork`: clouds assign them
/// to the device itself instead of an IPAM plugin.
#[derive(Debug, Default)]
pub struct HostNetwork {
    /// Addresses of global scope.
    pub ips: Vec<IpConfig>,
    routes: Vec<KernelRoute>,
}

impl HostNetwork {
    /// The addresses and routes of a device on the host; without default routes, if `default_route`
    /// is false.
    pub fn from_device(
        host: &Netlink,
        device: &Link,
        default_route: Option<bool>,
    ) -> Result<HostNetwork> {
        let addrs = host.dump_addresses(device.index)?.into_iter();
        // IPv6 addresses of router advertisements or leases expire. IPv4 addresses of leases are
        // kept, because gateways are reached by them.
        let kept = addrs.filter(|addr| {
            let lasts = addr.net.addr().is_ipv4() || addr.flags & IFA_F_PERMANENT != 0;
            addr.scope == EVERYWHERE && lasts
        });
        let ips = kept.map(|addr| IpConfig { address: addr.net, gateway: None, interface: None });
        Ok(HostNetwork {
            ips: ips.collect(),
            routes: device_routes(host, device, &|route| {
                let is_automatic = route.protocol.is_some_and(|p| AUTOMATIC.contains(&p));
                let is_omitted = default_route == Some(false) && route.dst.prefix_len() == 0;
                route.table != Some(LOCAL) && !is_automatic && !is_omitted
            })?,
        })
    }

    /// Adds the routes to the device in the container and to the result. Routes of IPAM have
    /// precedence.
    pub fn add_routes(
        &self,
        inside: &ContainerNetns<'_>,
        device: &Link,
        result: &mut CniResult,
    ) -> Result<()> {
        for route in &self.routes {
            let mut reported = cni::ResultRoute {
                gw: route.gw,
                priority: route.priority,
                table: route.table.filter(|table| *table != RT_TABLE_MAIN),
                scope: route.gw.is_none().then_some(ON_LINK),
                ..cni::ResultRoute::for_destination(route.dst)
            };
            let key =
                |r: &cni::ResultRoute| (r.dst.trunc(), r.table, r.priority.unwrap_or_default());
            if result.routes.iter().any(|other| key(other) == key(&reported)) {
                continue;
            }
            let route = KernelRoute { oif: Some(device.index), ..route.clone() };
            let added = tables::add_preferred(&inside.netlink, device, &route, false)
                .context(|| format!("failed to add route {} of the host", route.dst))?;
            reported.priority = added.priority;
            result.routes.push(reported);
        }
        Ok(())
    }
}
