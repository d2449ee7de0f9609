//! Routes.

use std::fmt;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use nix::errno::Errno;
use nix::libc::{self, RTM_DELROUTE, RTM_GETROUTE, RTM_NEWROUTE};
use rtnetlink::packet_core::{NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::route::{
    RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteNextHop, RouteType,
    RouteVia,
};

use super::attribute::{Attr, attrs, ip, word};
use super::error::{Result, unless_absent};
use super::request::Request;
use super::{Family, Netlink};

/// The routing table of packets that match no other rule.
pub const RT_TABLE_MAIN: u32 = libc::RT_TABLE_MAIN as u32;

/// `RTA_VIA`, a gateway of the other family; missing in the libc of musl.
const RTA_VIA: u16 = 18;
// In `RTA_METRICS`; missing in libc.
const RTAX_MTU: u16 = 2;
const RTAX_ADVMSS: u16 = 8;
/// Length of `struct rtmsg`.
const HEADER_LEN: usize = 12;
/// Offset of the type in `struct rtmsg`.
const TYPE_AT: usize = 7;

/// A unicast route. `None` is the kernel's default, or an attribute that the kernel did not report.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Route {
    /// The destination; host bits are ignored.
    pub dst: IpNet,
    /// The gateway; `None` for a destination on the link.
    pub gw: Option<IpAddr>,
    /// The index of the outgoing link.
    pub oif: Option<u32>,
    /// The preferred source address.
    pub src: Option<IpAddr>,
    /// The scope (rtnetlink(7)): 0 universe, 253 link, 254 host.
    pub scope: Option<u8>,
    /// The routing table; `None` is [`RT_TABLE_MAIN`].
    pub table: Option<u32>,
    /// The metric: the route with the lowest one is used.
    pub priority: Option<u32>,
    /// The MTU of the path.
    pub mtu: Option<u32>,
    /// The maximum TCP segment size to announce.
    pub advmss: Option<u32>,
    /// The origin of the route (`RTPROT_*`); `None` is `RTPROT_BOOT`.
    pub protocol: Option<u8>,
    /// Whether the gateway is on the link regardless of its address.
    pub onlink: bool,
    /// The next hops of a multipath route, instead of [`gw`](Route::gw) and [`oif`](Route::oif).
    #[serde(default)]
    pub nexthops: Vec<NextHop>,
}

/// A next hop of a multipath route.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct NextHop {
    pub gw: Option<IpAddr>,
    /// The index of the outgoing link.
    pub oif: Option<u32>,
    /// The share of the traffic, from 1 to 256.
    pub weight: u16,
}

/// How to add a route when there are others to the same destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum RouteMode {
    /// Fail with [`is_exists`](super::Error::is_exists) if one has the same metric.
    Exclusive = NLM_F_EXCL,
    /// Insert before a route with another gateway; fail only for an identical route.
    Create = 0,
    /// Replace the route with the same metric.
    Replace = NLM_F_REPLACE,
    /// Append after the other route; with IPv6, add a next hop to it.
    Append = NLM_F_APPEND,
}

/// A selection of routes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RouteFilter {
    pub family: Option<Family>,
    pub table: Option<u32>,
    /// The index of the outgoing link.
    pub oif: Option<u32>,
}

impl RouteFilter {
    pub(super) fn message(self) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header.address_family = Family::number(self.family).into();
        message.attributes.extend(self.table.map(RouteAttribute::Table));
        message.attributes.extend(self.oif.map(RouteAttribute::Oif));
        message
    }

    /// Kernels before 4.20 ignore the filter, and a multipath route has no link of its own.
    fn matches(self, route: &Route) -> bool {
        let leaves_by =
            |oif| route.oif == Some(oif) || route.nexthops.iter().any(|hop| hop.oif == Some(oif));
        self.family.is_none_or(|family| family == Family::of(route.dst.addr()))
            && self.table.is_none_or(|table| Some(table) == route.table)
            && self.oif.is_none_or(leaves_by)
    }
}

impl Route {
    /// A route with only a destination.
    pub fn new(dst: IpNet) -> Route {
        Route { dst, ..Route::default() }
    }

    /// A message to delete the route: the attributes by which the kernel finds it.
    fn del_message(&self) -> RouteMessage {
        let mut message = RouteMessage::default();
        let (dst, header, attributes) =
            (self.dst.trunc(), &mut message.header, &mut message.attributes);
        let family = Family::of(dst.addr());
        header.address_family = Family::number(Some(family)).into();
        header.destination_prefix_length = dst.prefix_len();
        header.scope = self.scope.unwrap_or(libc::RT_SCOPE_NOWHERE).into();
        header.protocol = self.protocol.unwrap_or_default().into();
        attributes.push(RouteAttribute::Destination(dst.addr().into()));
        attributes.extend(self.gw.map(|gw| gateway(family, gw)));
        attributes.extend(self.oif.map(RouteAttribute::Oif));
        attributes.extend(self.src.map(|src| RouteAttribute::PrefSource(src.into())));
        attributes.extend(self.priority.map(RouteAttribute::Priority));
        let table = self.table.unwrap_or(RT_TABLE_MAIN);
        match u8::try_from(table) {
            Ok(table) => header.table = table,
            Err(_) => attributes.push(RouteAttribute::Table(table)),
        }
        if !self.nexthops.is_empty() {
            let hops = self.nexthops.iter().map(|hop| hop.message(family)).collect();
            attributes.push(RouteAttribute::MultiPath(hops));
        }
        message
    }

    fn new_message(&self) -> RouteMessage {
        let mut message = self.del_message();
        let header = &mut message.header;
        header.kind = RouteType::Unicast;
        header.protocol = self.protocol.unwrap_or(libc::RTPROT_BOOT).into();
        header.scope = self.scope.unwrap_or(libc::RT_SCOPE_UNIVERSE).into();
        header.flags.set(RouteFlags::Onlink, self.onlink);
        let mtu = self.mtu.map(RouteMetric::Mtu);
        let metrics: Vec<_> = mtu.into_iter().chain(self.advmss.map(RouteMetric::Advmss)).collect();
        if !metrics.is_empty() {
            message.attributes.push(RouteAttribute::Metrics(metrics));
        }
        message
    }

    pub(super) fn parse(body: &[u8]) -> Option<Route> {
        let header = RouteHeader::parse(body).ok()?;
        let mut route = Route::new(match header.address_family {
            AddressFamily::Inet => Ipv4Net::default().into(),
            AddressFamily::Inet6 => Ipv6Net::default().into(),
            _ => return None,
        });
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
                let metric = |kind| attr.find(kind).and_then(Attr::u32);
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
        // The kernel's weights begin with 0.
        hop.hops = u8::try_from(self.weight.saturating_sub(1)).unwrap_or(u8::MAX);
        hop.interface_index = self.oif.unwrap_or_default();
        hop.attributes.extend(self.gw.map(|gw| gateway(family, gw)));
        hop
    }
}

/// A gateway of the other family has an attribute of its own.
fn gateway(family: Family, gw: IpAddr) -> RouteAttribute {
    match (family, gw) {
        (Family::V4, IpAddr::V6(gw)) => RouteAttribute::Via(RouteVia::Inet6(gw)),
        _ => RouteAttribute::Gateway(gw.into()),
    }
}

fn read_gateway(attr: Attr<'_>) -> Option<IpAddr> {
    match attr.kind {
        // `struct rtvia`: the family, then the address.
        RTA_VIA => ip(attr.value.get(2..)?),
        _ => attr.ip(),
    }
}

/// Reads a list of `struct rtnexthop`, each with its length in front and attributes behind.
fn nexthops(mut bytes: &[u8]) -> Vec<NextHop> {
    let mut hops = Vec::new();
    while let [l0, l1, _flags, hops_less_one, ..] = *bytes {
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        let (Some(oif), Some(inner)) = (word(bytes, 4), bytes.get(8..length)) else { break };
        let gw = attrs(inner)
            .find(|attr| matches!(attr.kind, libc::RTA_GATEWAY | RTA_VIA))
            .and_then(read_gateway);
        let weight = u16::from(hops_less_one) + 1;
        hops.push(NextHop { gw, oif: (oif != 0).then_some(oif), weight });
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    hops
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
        // Without any route the kernel replies with an error.
        self.socket
            .one(&lookup(addr, None, RouteFlags::empty()))
            .is_ok_and(|body| body.get(TYPE_AT) == Some(&libc::RTN_LOCAL))
    }

    pub fn add_route(&self, route: &Route, mode: RouteMode) -> Result<()> {
        let request = Request::route(RTM_NEWROUTE, &route.new_message());
        self.socket.change(&request, NLM_F_CREATE | mode as u16, "add route", route)
    }

    /// Deletes the first route that matches all fields of `route`; `false` if there was none.
    pub fn del_route(&self, route: &Route) -> Result<bool> {
        let request = Request::route(RTM_DELROUTE, &route.del_message());
        self.socket.delete(&request, "delete route", route)
    }

    /// The route that a packet to `addr` would take, from `source` if that is an address of this host;
    /// `None` if there is none.
    pub fn route_to(&self, addr: IpAddr, source: Option<IpAddr>) -> Result<Option<Route>> {
        self.look_up_route(addr, source, RouteFlags::empty())
    }

    fn look_up_route(
        &self,
        addr: IpAddr,
        source: Option<IpAddr>,
        flags: RouteFlags,
    ) -> Result<Option<Route>> {
        match self.socket.one(&lookup(addr, source, flags)) {
            Ok(body) => Ok(Route::parse(&body)),
            Err(failure) => match failure.refusal() {
                Some(Errno::ENETUNREACH | Errno::EHOSTUNREACH | Errno::EACCES | Errno::EINVAL) => {
                    Ok(None)
                }
                _ => Err(failure.context("look up the route to", &addr)),
            },
        }
    }

    /// The route of the routing tables that packets to `addr` take, with its own destination; `None` if there is none.
    pub fn matching_route(&self, addr: IpAddr) -> Result<Option<Route>> {
        self.look_up_route(addr, None, RouteFlags::FibMatch)
    }

    /// The routes that match `filter`.
    pub fn dump_routes(&self, filter: &RouteFilter) -> Result<Vec<Route>> {
        let request = Request::route(RTM_GETROUTE, &filter.message());
        let found = self.socket.list(&request, "list", &"routes", Route::parse);
        // A table that was never used does not exist; neither does a link that was deleted.
        let mut routes = unless_absent(found, Vec::new())?;
        routes.retain(|route| filter.matches(route));
        Ok(routes)
    }
}

/// A request for the route of a packet.
fn lookup(addr: IpAddr, source: Option<IpAddr>, flags: RouteFlags) -> Request {
    let mut message = RouteMessage::default();
    let header = &mut message.header;
    header.flags = flags;
    header.address_family = Family::number(Some(Family::of(addr))).into();
    header.destination_prefix_length = if addr.is_ipv4() { 32 } else { 128 };
    message.attributes.push(RouteAttribute::Destination(addr.into()));
    if let Some(source) = source {
        header.source_prefix_length = header.destination_prefix_length;
        message.attributes.push(RouteAttribute::Source(source.into()));
    }
    Request::route(RTM_GETROUTE, &message)
}
