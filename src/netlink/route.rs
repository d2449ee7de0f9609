//! Routes.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use nix::errno::Errno;
use nix::libc;
use nix::libc::{RTM_DELROUTE, RTM_GETROUTE, RTM_NEWROUTE};
use rtnetlink::packet_core::{NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteNextHop,
    RouteType, RouteVia,
};

use super::Netlink;
use super::error::{Failure, Result};
use super::family::Family;
use super::link::unless_absent;
use super::packet::{Attr, Packet, attrs, ip};

/// The table that packets are looked up in unless a rule says otherwise.
pub const RT_TABLE_MAIN: u32 = libc::RT_TABLE_MAIN as u32;

/// `RTPROT_BOOT`: set up by a program that no routing daemon has to mind.
const RTPROT_BOOT: u8 = 3;
/// `RTA_VIA`, a gateway of the other family; missing in the libc of musl.
const RTA_VIA: u16 = 18;
/// `RTAX_MTU` in `RTA_METRICS`; missing in libc.
const RTAX_MTU: u16 = 2;
/// `RTAX_ADVMSS` in `RTA_METRICS`; missing in libc.
const RTAX_ADVMSS: u16 = 8;
/// Length of `struct rtmsg`.
const HEADER_LEN: usize = 12;
/// Length of `struct rtnexthop`.
const NEXTHOP_LEN: usize = 8;
/// Where `struct rtmsg` has the type of a route.
const TYPE_AT: usize = 7;

/// A unicast route. Fields that are `None` are left to the kernel, or were not told by it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Route {
    /// Where to; host bits are not sent.
    pub dst: IpNet,
    /// The gateway; without one the destination is on the link.
    pub gw: Option<IpAddr>,
    /// The index of the link to leave by.
    pub oif: Option<u32>,
    /// The preferred source address.
    pub src: Option<IpAddr>,
    /// How far the destination is away: 0 anywhere, 253 on the link, 254 on the host.
    pub scope: Option<u8>,
    /// The routing table; `None` is [`RT_TABLE_MAIN`].
    pub table: Option<u32>,
    /// The metric: of several routes, the lowest is taken.
    pub priority: Option<u32>,
    /// The MTU of the path.
    pub mtu: Option<u32>,
    /// The largest TCP segment to announce.
    pub advmss: Option<u32>,
    /// Who made it (`RTPROT_*`); `None` is boot.
    pub protocol: Option<u8>,
    /// Whether the gateway counts as reachable on the link whatever its address.
    pub onlink: bool,
    /// Several ways at once, instead of [`gw`](Route::gw) and [`oif`](Route::oif).
    #[serde(default)]
    pub nexthops: Vec<NextHop>,
}

/// One of the ways of a multipath route.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct NextHop {
    pub gw: Option<IpAddr>,
    /// The index of the link to leave by.
    pub oif: Option<u32>,
    /// Its share of the traffic, from 1 to 256.
    pub weight: u16,
}

/// What to do when there is such a route already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteMode {
    /// Fail with [`is_exists`](super::Error::is_exists) if destination and metric are taken.
    Exclusive,
    /// Put it in front of one with another gateway; fail only for the very same route.
    Create,
    /// Put it in the place of the other one.
    Replace,
    /// Put it behind the other one; with IPv6, add a next hop to it.
    Append,
}

impl RouteMode {
    fn bits(self) -> u16 {
        NLM_F_CREATE
            | match self {
                RouteMode::Exclusive => NLM_F_EXCL,
                RouteMode::Create => 0,
                RouteMode::Replace => NLM_F_REPLACE,
                RouteMode::Append => NLM_F_APPEND,
            }
    }
}

/// Which routes to list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RouteFilter {
    pub family: Option<Family>,
    pub table: Option<u32>,
    /// Leaving by one link.
    pub oif: Option<u32>,
}

impl RouteFilter {
    pub(super) fn message(self) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header.address_family = Family::wire(self.family);
        message.attributes.extend(self.table.map(RouteAttribute::Table));
        message.attributes.extend(self.oif.map(RouteAttribute::Oif));
        message
    }

    /// Kernels before 4.20 ignore the filter, and a multipath route has no link of its own.
    fn admits(self, route: &Route) -> bool {
        let leaves_by =
            |oif| route.oif == Some(oif) || route.nexthops.iter().any(|hop| hop.oif == Some(oif));
        self.family.is_none_or(|family| family == Family::of(route.dst.addr()))
            && self.table.is_none_or(|table| Some(table) == route.table)
            && self.oif.is_none_or(leaves_by)
    }
}

impl Route {
    /// A route with nothing but a destination.
    pub fn new(dst: IpNet) -> Route {
        Route {
            dst,
            gw: None,
            oif: None,
            src: None,
            scope: None,
            table: None,
            priority: None,
            mtu: None,
            advmss: None,
            protocol: None,
            onlink: false,
            nexthops: Vec::new(),
        }
    }

    fn default_of(family: AddressFamily) -> Option<Route> {
        match family {
            AddressFamily::Inet => Some(Route::new(Ipv4Net::default().into())),
            AddressFamily::Inet6 => Some(Route::new(Ipv6Net::default().into())),
            _ => None,
        }
    }

    /// What adding and deleting have in common: the attributes that tell routes apart.
    fn message(&self) -> RouteMessage {
        let mut message = RouteMessage::default();
        let dst = self.dst.trunc();
        let family = Family::of(dst.addr());
        message.header.address_family = Family::wire(Some(family));
        message.header.destination_prefix_length = dst.prefix_len();
        let attributes = &mut message.attributes;
        attributes.push(RouteAttribute::Destination(dst.addr().into()));
        attributes.extend(self.gw.map(|gw| gateway(family, gw)));
        attributes.extend(self.oif.map(RouteAttribute::Oif));
        attributes.extend(self.src.map(|src| RouteAttribute::PrefSource(src.into())));
        attributes.extend(self.priority.map(RouteAttribute::Priority));
        let table = self.table.unwrap_or(RT_TABLE_MAIN);
        match u8::try_from(table) {
            Ok(table) => message.header.table = table,
            Err(_) => attributes.push(RouteAttribute::Table(table)),
        }
        if !self.nexthops.is_empty() {
            let hops = self.nexthops.iter().map(|hop| hop.message(family)).collect();
            attributes.push(RouteAttribute::MultiPath(hops));
        }
        message
    }

    fn new_message(&self) -> RouteMessage {
        let mut message = self.message();
        message.header.kind = RouteType::Unicast;
        message.header.protocol = self.protocol.unwrap_or(RTPROT_BOOT).into();
        message.header.scope = self.scope.unwrap_or(libc::RT_SCOPE_UNIVERSE).into();
        message.header.flags.set(RouteFlags::Onlink, self.onlink);
        let mtu = self.mtu.map(RouteMetric::Mtu);
        let metrics: Vec<_> = mtu.into_iter().chain(self.advmss.map(RouteMetric::Advmss)).collect();
        if !metrics.is_empty() {
            message.attributes.push(RouteAttribute::Metrics(metrics));
        }
        message
    }

    fn del_message(&self) -> RouteMessage {
        let mut message = self.message();
        message.header.scope = self.scope.unwrap_or(libc::RT_SCOPE_NOWHERE).into();
        message.header.protocol = self.protocol.unwrap_or_default().into();
        message
    }

    pub(super) fn parse(body: &[u8]) -> Option<Route> {
        let header = RouteHeader::parse(body).ok()?;
        let mut route = Route::default_of(header.address_family)?;
        route.table = Some(header.table.into());
        route.scope = Some(header.scope.into());
        route.protocol = Some(header.protocol.into());
        route.onlink = header.flags.contains(RouteFlags::Onlink);
        for attr in attrs(body.get(HEADER_LEN..)?) {
            route.read(attr, header.destination_prefix_length);
        }
        Some(route)
    }

    fn read(&mut self, attr: Attr<'_>, prefix_len: u8) {
        match attr.kind {
            libc::RTA_DST => {
                let dst = attr.ip().and_then(|addr| IpNet::new(addr, prefix_len).ok());
                self.dst = dst.unwrap_or(self.dst);
            }
            libc::RTA_GATEWAY | RTA_VIA => self.gw = read_gateway(attr),
            libc::RTA_OIF => self.oif = attr.u32(),
            libc::RTA_PREFSRC => self.src = attr.ip(),
            libc::RTA_TABLE => self.table = attr.u32().or(self.table),
            libc::RTA_PRIORITY => self.priority = attr.u32(),
            libc::RTA_METRICS => {
                let metric = |kind| attr.nested().find(|m| m.kind == kind).and_then(Attr::u32);
                (self.mtu, self.advmss) = (metric(RTAX_MTU), metric(RTAX_ADVMSS));
            }
            libc::RTA_MULTIPATH => self.nexthops = nexthops(attr.value),
            _ => {}
        }
    }
}

impl NextHop {
    fn message(&self, family: Family) -> RouteNextHop {
        let mut hop = RouteNextHop::default();
        // The kernel counts from 0, people from 1.
        hop.hops = u8::try_from(self.weight.saturating_sub(1)).unwrap_or(u8::MAX);
        hop.interface_index = self.oif.unwrap_or_default();
        hop.attributes.extend(self.gw.map(|gw| gateway(family, gw)));
        hop
    }
}

/// The attribute for a gateway; one of the other family goes into another attribute.
fn gateway(family: Family, gw: IpAddr) -> RouteAttribute {
    match (family, gw) {
        (Family::V4, IpAddr::V6(gw)) => RouteAttribute::Via(RouteVia::Inet6(gw)),
        _ => RouteAttribute::Gateway(RouteAddress::from(gw)),
    }
}

fn read_gateway(attr: Attr<'_>) -> Option<IpAddr> {
    match attr.kind {
        // struct rtvia: the family, then the address.
        RTA_VIA => ip(attr.value.get(2..)?),
        _ => attr.ip(),
    }
}

/// A list of `struct rtnexthop`, each with its length in front and attributes behind.
fn nexthops(mut bytes: &[u8]) -> Vec<NextHop> {
    let mut hops = Vec::new();
    while let Some([l0, l1, _flags, hops_less_one, i0, i1, i2, i3]) = bytes.first_chunk() {
        let length = usize::from(u16::from_ne_bytes([*l0, *l1]));
        let Some(inner) = bytes.get(NEXTHOP_LEN..length) else { break };
        let gw = attrs(inner)
            .find(|attr| matches!(attr.kind, libc::RTA_GATEWAY | RTA_VIA))
            .and_then(read_gateway);
        let oif = u32::from_ne_bytes([*i0, *i1, *i2, *i3]);
        let weight = u16::from(*hops_less_one) + 1;
        hops.push(NextHop { gw, oif: (oif != 0).then_some(oif), weight });
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    hops
}

impl std::fmt::Display for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.dst)?;
        if let Some(gw) = self.gw {
            write!(f, " via {gw}")?;
        }
        match self.table {
            Some(table) if table != RT_TABLE_MAIN => write!(f, " table {table}"),
            _ => Ok(()),
        }
    }
}

impl Netlink {
    /// Whether packets to `addr` are for this host.
    pub fn is_local(&self, addr: IpAddr) -> bool {
        let mut message = RouteMessage::default();
        message.header.address_family = Family::wire(Some(Family::of(addr)));
        message.header.destination_prefix_length = if addr.is_ipv4() { 32 } else { 128 };
        message.attributes.push(RouteAttribute::Destination(addr.into()));
        // No route at all is an error.
        self.one(Packet::new(RTM_GETROUTE, &message))
            .is_ok_and(|body| body.get(TYPE_AT) == Some(&libc::RTN_LOCAL))
    }

    pub fn add_route(&self, route: &Route, mode: RouteMode) -> Result<()> {
        self.ack(Packet::new(RTM_NEWROUTE, &route.new_message()), mode.bits())
            .map_err(|e| e.doing("add route", || route.to_string()))
    }

    /// Deletes the first route that has all that `route` says; `false` if there was none.
    pub fn del_route(&self, route: &Route) -> Result<bool> {
        let deleted = self.ack(Packet::new(RTM_DELROUTE, &route.del_message()), 0);
        unless_absent(deleted.map_err(|e| e.doing("delete route", || route.to_string())))
    }

    /// The route that a packet to `addr` would take; `None` if there is none.
    pub fn route_to(&self, addr: IpAddr) -> Result<Option<Route>> {
        self.find_route(addr, None)
    }

    /// The route that a packet from `source`, an address of this host, would take to `addr`.
    pub fn route_from(&self, source: IpAddr, addr: IpAddr) -> Result<Option<Route>> {
        self.find_route(addr, Some(source))
    }

    fn find_route(&self, addr: IpAddr, source: Option<IpAddr>) -> Result<Option<Route>> {
        let mut message = Route::new(addr.into()).message();
        message.header.table = 0;
        if let Some(source) = source {
            message.header.source_prefix_length = message.header.destination_prefix_length;
            message.attributes.push(RouteAttribute::Source(source.into()));
        }
        match self.one(Packet::new(RTM_GETROUTE, &message)) {
            Ok(body) => Ok(Route::parse(&body)),
            Err(Failure {
                errno: Errno::ENETUNREACH | Errno::EHOSTUNREACH | Errno::EACCES | Errno::EINVAL,
                unanswered: false,
                ..
            }) => Ok(None),
            Err(failure) => Err(failure.doing("look up the route to", || addr.to_string())),
        }
    }

    /// The routes that `filter` admits.
    pub fn dump_routes(&self, filter: &RouteFilter) -> Result<Vec<Route>> {
        match self.dump(&Packet::new(RTM_GETROUTE, &filter.message())) {
            Ok(bodies) => {
                let routes = bodies.iter().filter_map(|body| Route::parse(body));
                Ok(routes.filter(|route| filter.admits(route)).collect())
            }
            // A table that was never used does not exist; neither does a link that is gone.
            Err(Failure { errno: Errno::ENOENT | Errno::ENODEV, unanswered: false, .. }) => {
                Ok(Vec::new())
            }
            Err(failure) => Err(failure.doing("list", || "routes".to_owned())),
        }
    }
}
