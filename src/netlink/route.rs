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

use super::attribute::{ReplyAttribute, ip_from_bytes, parse_attributes, read_u32_at};
use super::error::{NetlinkResult, unless_absent};
use super::request::NetlinkRequest;
use super::{IpFamily, Netlink};

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
pub struct KernelRoute {
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
    /// The metric: the kernel uses the route with the lowest metric.
    pub priority: Option<u32>,
    /// The MTU of the path in bytes.
    pub mtu: Option<u32>,
    /// The maximum TCP segment size to announce, in bytes.
    pub advmss: Option<u32>,
    /// The origin of the route (`RTPROT_*`); `None` is `RTPROT_BOOT`.
    pub protocol: Option<u8>,
    /// Whether the gateway is on the link regardless of its address.
    pub onlink: bool,
    /// The next hops of a multipath route, instead of [`gw`](KernelRoute::gw) and
    /// [`oif`](KernelRoute::oif).
    #[serde(default)]
    pub nexthops: Vec<MultipathHop>,
}

/// A next hop of a multipath route.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct MultipathHop {
    pub gw: Option<IpAddr>,
    /// The index of the outgoing link.
    pub oif: Option<u32>,
    /// The share of the traffic, from 1 to 256.
    pub weight: u16,
}

/// How to add a route when there are others to the same destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum RouteAddMode {
    /// Fail with [`is_exists`](super::NetlinkError::is_exists) if a route has the same metric.
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
    pub family: Option<IpFamily>,
    pub table: Option<u32>,
    /// The index of the outgoing link.
    pub oif: Option<u32>,
}

impl RouteFilter {
    pub(super) fn to_message(self) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header.address_family = IpFamily::af_number(self.family).into();
        message.attributes.extend(self.table.map(RouteAttribute::Table));
        message.attributes.extend(self.oif.map(RouteAttribute::Oif));
        message
    }

    /// Applies the filter to a reply, because kernels before 4.20 ignore it. A multipath route
    /// matches by any next hop.
    fn matches_route(self, route: &KernelRoute) -> bool {
        self.family.is_none_or(|family| family == IpFamily::of_address(route.dst.addr()))
            && self.table.is_none_or(|table| Some(table) == route.table)
            && self.oif.is_none_or(|oif| {
                route.oif == Some(oif) || route.nexthops.iter().any(|hop| hop.oif == Some(oif))
            })
    }
}

impl KernelRoute {
    /// A route with only a destination.
    pub fn new(dst: IpNet) -> KernelRoute {
        KernelRoute { dst, ..KernelRoute::default() }
    }

    /// A message to delete the route, with the attributes by which the kernel finds the route.
    fn deletion_message(&self) -> RouteMessage {
        let mut message = RouteMessage::default();
        let (dst, header, attributes) =
            (self.dst.trunc(), &mut message.header, &mut message.attributes);
        let family = IpFamily::of_address(dst.addr());
        header.address_family = IpFamily::af_number(Some(family)).into();
        header.destination_prefix_length = dst.prefix_len();
        header.scope = self.scope.unwrap_or(libc::RT_SCOPE_NOWHERE).into();
        header.protocol = self.protocol.unwrap_or_default().into();
        attributes.push(RouteAttribute::Destination(dst.addr().into()));
        attributes.extend(self.gw.map(|gw| gateway_attribute(family, gw)));
        attributes.extend(self.oif.map(RouteAttribute::Oif));
        attributes.extend(self.src.map(|src| RouteAttribute::PrefSource(src.into())));
        attributes.extend(self.priority.map(RouteAttribute::Priority));
        let table = self.table.unwrap_or(RT_TABLE_MAIN);
        match u8::try_from(table) {
            Ok(table) => header.table = table,
            Err(_) => attributes.push(RouteAttribute::Table(table)),
        }
        if !self.nexthops.is_empty() {
            let nexthops = self.nexthops.iter().map(|hop| hop.to_message(family)).collect();
            attributes.push(RouteAttribute::MultiPath(nexthops));
        }
        message
    }

    fn addition_message(&self) -> RouteMessage {
        let mut message = self.deletion_message();
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

    pub(super) fn parse(body: &[u8]) -> Option<KernelRoute> {
        let header = RouteHeader::parse(body).ok()?;
        let mut route = KernelRoute::new(match header.address_family {
            AddressFamily::Inet => Ipv4Net::default().into(),
            AddressFamily::Inet6 => Ipv6Net::default().into(),
            _ => return None,
        });
        route.table = Some(header.table.into());
        route.scope = Some(header.scope.into());
        route.protocol = Some(header.protocol.into());
        route.onlink = header.flags.contains(RouteFlags::Onlink);
        for attr in parse_attributes(body.get(HEADER_LEN..)?) {
            route.read_attribute(attr, header.destination_prefix_length);
        }
        Some(route)
    }

    fn read_attribute(&mut self, attr: ReplyAttribute<'_>, prefix_len: u8) {
        match attr.kind {
            libc::RTA_DST => {
                let dst = attr.to_ip().and_then(|addr| IpNet::new(addr, prefix_len).ok());
                self.dst = dst.unwrap_or(self.dst);
            }
            libc::RTA_GATEWAY | RTA_VIA => self.gw = read_gateway(attr),
            libc::RTA_OIF => self.oif = attr.to_u32(),
            libc::RTA_PREFSRC => self.src = attr.to_ip(),
            libc::RTA_TABLE => self.table = attr.to_u32().or(self.table),
            libc::RTA_PRIORITY => self.priority = attr.to_u32(),
            libc::RTA_METRICS => {
                let metric = |kind| attr.find_nested(kind).and_then(ReplyAttribute::to_u32);
                (self.mtu, self.advmss) = (metric(RTAX_MTU), metric(RTAX_ADVMSS));
            }
            libc::RTA_MULTIPATH => self.nexthops = parse_next_hops(attr.value),
            _ => {}
        }
    }
}

impl MultipathHop {
    fn to_message(&self, family: IpFamily) -> RouteNextHop {
        let mut hop = RouteNextHop::default();
        // The kernel's weights begin with 0.
        hop.hops = u8::try_from(self.weight.saturating_sub(1)).unwrap_or(u8::MAX);
        hop.interface_index = self.oif.unwrap_or_default();
        hop.attributes.extend(self.gw.map(|gw| gateway_attribute(family, gw)));
        hop
    }
}

/// `RTA_GATEWAY`, or `RTA_VIA` for the IPv6 gateway of an IPv4 route.
fn gateway_attribute(family: IpFamily, gw: IpAddr) -> RouteAttribute {
    match (family, gw) {
        (IpFamily::V4, IpAddr::V6(gw)) => RouteAttribute::Via(RouteVia::Inet6(gw)),
        _ => RouteAttribute::Gateway(gw.into()),
    }
}

fn read_gateway(attr: ReplyAttribute<'_>) -> Option<IpAddr> {
    match attr.kind {
        // `struct rtvia`: the family, then the address.
        RTA_VIA => ip_from_bytes(attr.value.get(2..)?),
        _ => attr.to_ip(),
    }
}

/// Reads a list of `struct rtnexthop`, each of which begins with its length and ends with
/// attributes.
fn parse_next_hops(mut bytes: &[u8]) -> Vec<MultipathHop> {
    let mut nexthops = Vec::new();
    while let [l0, l1, _flags, hops_less_one, ..] = *bytes {
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        let (Some(oif), Some(inner)) = (read_u32_at(bytes, 4), bytes.get(8..length)) else { break };
        let gw = parse_attributes(inner)
            .find(|attr| matches!(attr.kind, libc::RTA_GATEWAY | RTA_VIA))
            .and_then(read_gateway);
        let weight = u16::from(hops_less_one) + 1;
        nexthops.push(MultipathHop { gw, oif: (oif != 0).then_some(oif), weight });
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    nexthops
}

impl fmt::Display for KernelRoute {
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
    pub fn is_local_address(&self, addr: IpAddr) -> bool {
        // Without any route the kernel replies with an error.
        self.socket
            .request_object(&lookup_request(addr, None, RouteFlags::empty()))
            .is_ok_and(|body| body.get(TYPE_AT) == Some(&libc::RTN_LOCAL))
    }

    pub fn add_route(&self, route: &KernelRoute, mode: RouteAddMode) -> NetlinkResult<()> {
        let request = NetlinkRequest::new_route(RTM_NEWROUTE, &route.addition_message());
        self.socket.request_change(&request, NLM_F_CREATE | mode as u16, "add route", route)
    }

    /// Deletes the first route that matches all fields of `route`; `false` if there was none.
    pub fn delete_route(&self, route: &KernelRoute) -> NetlinkResult<bool> {
        let request = NetlinkRequest::new_route(RTM_DELROUTE, &route.deletion_message());
        self.socket.request_deletion(&request, "delete route", route)
    }

    /// The route of a packet to `addr`, from `source` if that is an address of this host; `None` if
    /// there is no route.
    pub fn find_route_to(
        &self,
        addr: IpAddr,
        source: Option<IpAddr>,
    ) -> NetlinkResult<Option<KernelRoute>> {
        self.look_up_route(addr, source, RouteFlags::empty())
    }

    fn look_up_route(
        &self,
        addr: IpAddr,
        source: Option<IpAddr>,
        flags: RouteFlags,
    ) -> NetlinkResult<Option<KernelRoute>> {
        match self.socket.request_object(&lookup_request(addr, source, flags)) {
            Ok(body) => Ok(KernelRoute::parse(&body)),
            Err(failure) => match failure.refusal_errno() {
                Some(Errno::ENETUNREACH | Errno::EHOSTUNREACH | Errno::EACCES | Errno::EINVAL) => {
                    Ok(None)
                }
                // A kernel without IPv6.
                Some(Errno::EOPNOTSUPP | Errno::EAFNOSUPPORT) => Ok(None),
                _ => Err(failure.into_error("look up the route to", &addr)),
            },
        }
    }

    /// The entry of the routing tables that packets to `addr` match, with the destination of the
    /// entry; `None` if there is none.
    pub fn find_matching_route(&self, addr: IpAddr) -> NetlinkResult<Option<KernelRoute>> {
        self.look_up_route(addr, None, RouteFlags::FibMatch)
    }

    pub fn dump_routes(&self, filter: &RouteFilter) -> NetlinkResult<Vec<KernelRoute>> {
        let request = NetlinkRequest::new_route(RTM_GETROUTE, &filter.to_message());
        let found = self.socket.request_list(&request, "list", &"routes", KernelRoute::parse);
        // A table that was never used does not exist; neither does a link that was deleted.
        let mut routes = unless_absent(found, Vec::new())?;
        routes.retain(|route| filter.matches_route(route));
        Ok(routes)
    }
}

/// A request for the route of a packet.
fn lookup_request(addr: IpAddr, source: Option<IpAddr>, flags: RouteFlags) -> NetlinkRequest {
    let mut message = RouteMessage::default();
    let header = &mut message.header;
    header.flags = flags;
    header.address_family = IpFamily::af_number(Some(IpFamily::of_address(addr))).into();
    header.destination_prefix_length = if addr.is_ipv4() { 32 } else { 128 };
    message.attributes.push(RouteAttribute::Destination(addr.into()));
    if let Some(source) = source {
        header.source_prefix_length = header.destination_prefix_length;
        message.attributes.push(RouteAttribute::Source(source.into()));
    }
    NetlinkRequest::new_route(RTM_GETROUTE, &message)
}
