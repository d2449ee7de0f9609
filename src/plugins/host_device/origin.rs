//! How a device was on the host, and giving that back.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::identity::Identity;
use crate::cni;
use crate::error::{Context, Result};
use crate::netlink::{
    Addr, Link, LinkChange, Mac, Netlink, NewAddr, Route, RouteFilter, RouteMode,
};
use crate::skel::Failures;
use crate::sort::sort_by_key;

/// `IFA_F_PERMANENT`: set by a person or a program, not by a protocol that will do it again.
pub(super) const IFA_F_PERMANENT: u32 = 0x80;
/// `IFA_F_NOPREFIXROUTE`.
const IFA_F_NOPREFIXROUTE: u32 = 0x200;
/// `RT_TABLE_MAIN`.
const MAIN: u32 = 254;
/// `RT_SCOPE_LINK`: the kernel itself gives a link such IPv6 addresses.
const ON_LINK: u8 = 253;
/// `RTPROT_BOOT` and `RTPROT_STATIC`: routes that people add. All others are maintained by
/// the kernel, router advertisements, a DHCP client or a routing daemon.
const ROUTES_OF_PEOPLE: [u8; 2] = [3, 4];

/// A device as it was on the host. What is not known is not given back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Origin {
    pub(super) name: String,
    pub(super) alt_names: Vec<String>,
    /// The device's identity; releases before 0.2 did not record it.
    pub(super) identity: Option<Identity>,
    /// The device's alias. In the container the alias is the name on the host.
    pub(super) alias: String,
    pub(super) mac: String,
    /// Its MTU; 0 is unknown.
    pub(super) mtu: u32,
    /// Whether it was up.
    pub(super) up: bool,
    /// Whether it was promiscuous, and received every multicast; releases before 0.2 kept neither.
    pub(super) promisc: Option<bool>,
    pub(super) allmulti: Option<bool>,
    /// The permanent addresses.
    pub(super) addresses: Vec<Address>,
    /// The routes through the device that an administrator made.
    pub(super) routes: Vec<Way>,
}

/// A permanent address of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Address {
    net: IpNet,
    #[serde(default)]
    no_prefix_route: bool,
    #[serde(default)]
    broadcast: bool,
}

/// A route through a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Way {
    dst: IpNet,
    gw: Option<IpAddr>,
    src: Option<IpAddr>,
    scope: Option<u8>,
    table: Option<u32>,
    priority: Option<u32>,
    protocol: Option<u8>,
    onlink: bool,
}

impl Origin {
    /// The state of a device on the host.
    pub(super) fn of(host: &Netlink, device: &Link) -> Result<Origin> {
        let addresses = host.dump_addrs(device.index)?;
        let mut routes = Vec::new();
        // A link that is down has none.
        if device.up {
            let filter = RouteFilter { oif: Some(device.index), ..RouteFilter::default() };
            routes = host.dump_routes(&filter)?;
        }
        let mut ways: Vec<Way> = routes.iter().filter_map(Way::of).collect();
        // Gateways must be reachable before anything goes through them.
        sort_by_key(&mut ways, |way| way.gw.is_some());
        Ok(Origin {
            name: device.name.clone(),
            alt_names: device.alt_names.clone(),
            identity: Some(Identity::of(device)),
            alias: device.alias.clone(),
            mac: device.mac.map(|mac| mac.to_string()).unwrap_or_default(),
            mtu: device.mtu,
            up: device.up,
            promisc: Some(device.promisc),
            allmulti: Some(device.allmulti),
            addresses: addresses.iter().filter_map(Address::of).collect(),
            routes: ways,
        })
    }

    /// Of a device of which nothing is kept: its name.
    pub(super) fn named(name: &str) -> Origin {
        Origin { name: name.to_owned(), alt_names: vec![name.to_owned()], ..Origin::default() }
    }

    /// Takes from a device the alternative names that it did not have: names on the host are not the
    /// container's to choose.
    pub(super) fn strip(&self, netlink: &Netlink, device: &Link) -> Result<()> {
        let foreign = |name: &&String| !self.alt_names.contains(name);
        let foreign: Vec<_> = device.alt_names.iter().filter(foreign).cloned().collect();
        if foreign.is_empty() { Ok(()) } else { Ok(netlink.del_alt_names(device.index, &foreign)?) }
    }

    /// Gives a device that is on the host, with its old name, the rest back: all that can be. The
    /// alias comes last: while it is the name, the rest is still to be done.
    pub(super) fn give_back(&self, host: &Netlink, device: &Link) -> Result<()> {
        let mut failures = Failures::new();
        let change = |change| host.set_link(device.index, change).map_err(Into::into);
        let mut keep = |what: &str, done: Result<()>| {
            failures.keep(done.context(|| format!("give \"{}\" its {what} back", self.name)));
        };
        keep("alternative names", self.strip(host, device));
        if let Ok(mac) = self.mac.parse::<Mac>()
            && device.mac != Some(mac)
        {
            keep("MAC", change(LinkChange::new().mac(mac)));
        }
        if self.mtu != 0 && device.mtu != self.mtu {
            keep("MTU", change(LinkChange::new().mtu(self.mtu)));
        }
        if let Some(on) = self.promisc.filter(|on| *on != device.promisc) {
            keep("promiscuous mode", change(LinkChange::new().promisc(on.into())));
        }
        if let Some(on) = self.allmulti.filter(|on| *on != device.allmulti) {
            keep("multicast mode", change(LinkChange::new().allmulti(on.into())));
        }
        for address in &self.addresses {
            keep("addresses", address.add(host, device.index));
        }
        if self.up {
            keep("state", change(LinkChange::new().up()));
        }
        for way in &self.routes {
            keep("routes", way.add(host, device.index));
        }
        failures.into_result()?;
        if device.alias != self.alias {
            let alias = change(LinkChange::new().alias(&self.alias));
            alias.context(|| format!("give \"{}\" its alias back", self.name))?;
        }
        Ok(())
    }
}

impl Address {
    fn of(addr: &Addr) -> Option<Address> {
        let permanent = addr.flags & IFA_F_PERMANENT != 0;
        let kernels_own = addr.scope == ON_LINK && addr.net.addr().is_ipv6();
        let no_prefix_route = addr.flags & IFA_F_NOPREFIXROUTE != 0;
        let broadcast = addr.broadcast.is_some();
        (permanent && !kernels_own).then_some(Address { net: addr.net, no_prefix_route, broadcast })
    }

    fn add(&self, host: &Netlink, index: u32) -> Result<()> {
        let mut address = NewAddr::new(self.net);
        if self.no_prefix_route {
            address = address.without_prefix_route();
        }
        if !self.broadcast {
            address = address.without_broadcast();
        }
        match host.add_addr(index, &address) {
            // A network manager was faster.
            Err(error) if error.is_exists() => Ok(()),
            added => Ok(added?),
        }
    }
}

impl Way {
    fn of(route: &Route) -> Option<Way> {
        let of_people = route.protocol.is_some_and(|p| ROUTES_OF_PEOPLE.contains(&p));
        (of_people && route.nexthops.is_empty()).then(|| Way::like(route))
    }

    /// The same as that route, of a single gateway or none.
    pub(super) fn like(route: &Route) -> Way {
        Way {
            dst: route.dst,
            gw: route.gw,
            src: route.src,
            scope: route.scope,
            table: route.table,
            priority: route.priority,
            protocol: route.protocol,
            onlink: route.onlink,
        }
    }

    pub(super) fn has_gateway(&self) -> bool {
        self.gw.is_some()
    }

    /// As results show it.
    pub(super) fn route(&self) -> cni::Route {
        cni::Route {
            dst: self.dst,
            gw: self.gw,
            mtu: None,
            advmss: None,
            priority: self.priority,
            table: self.table.filter(|table| *table != MAIN),
            scope: self.gw.is_none().then_some(ON_LINK),
        }
    }

    pub(super) fn add(&self, host: &Netlink, index: u32) -> Result<()> {
        let mut route = Route::new(self.dst);
        route.oif = Some(index);
        (route.gw, route.src, route.scope) = (self.gw, self.src, self.scope);
        (route.table, route.priority) = (self.table, self.priority);
        (route.protocol, route.onlink) = (self.protocol, self.onlink);
        match host.add_route(&route, RouteMode::Append) {
            Err(error) if error.is_exists() => Ok(()),
            added => Ok(added?),
        }
    }
}
