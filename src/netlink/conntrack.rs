//! Connection tracking: deletes entries, to which a new port mapping or address would not apply.

use std::net::IpAddr;

use nix::errno::Errno;
use rtnetlink::sys::protocols::NETLINK_NETFILTER;

use super::IpFamily;
use super::attribute::{
    AttributeBuilder, ReplyAttribute, find_attribute, ip_from_bytes, parse_attributes,
};
use super::error::{NetlinkResult, RequestFailure};
use super::nftables::TransportProtocol;
use super::nftables::uapi::constants;
use super::request::{NFGENMSG, NetlinkRequest};
use super::socket::NetlinkSocket;

// From `linux/netfilter/nfnetlink_conntrack.h`, the bits of filters from the kernel's
// `nf_internals.h`.
constants! { u16:
    IPCTNL_MSG_CT_GET = 1, IPCTNL_MSG_CT_DELETE = 2,
    CTA_TUPLE_ORIG = 1, CTA_TUPLE_REPLY = 2, CTA_ID = 12, CTA_ZONE = 18, CTA_FILTER = 25,
    CTA_FILTER_ORIG_FLAGS = 1, CTA_FILTER_REPLY_FLAGS = 2,
    CTA_TUPLE_IP = 1, CTA_TUPLE_PROTO = 2,
    CTA_IP_V4_SRC = 1, CTA_IP_V4_DST = 2, CTA_IP_V6_SRC = 3, CTA_IP_V6_DST = 4,
    CTA_PROTO_NUM = 1, CTA_PROTO_DST_PORT = 3,
    GET = NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_GET,
    DELETE = NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_DELETE,
    NFNL_SUBSYS_CTNETLINK = 1,
}

constants! { u32: CTA_FILTER_FLAG_CTA_IP_SRC = 1 << 0, CTA_FILTER_FLAG_CTA_PROTO_NUM = 1 << 3 }

/// A selection of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowSelection {
    All(IpFamily),
    /// UDP flows with replies from this address, regardless of the original destination.
    AnsweredBy(IpAddr),
}

impl FlowSelection {
    fn to_request(self, kind: u16) -> NetlinkRequest {
        let family = match self {
            FlowSelection::All(family) => family,
            FlowSelection::AnsweredBy(addr) => IpFamily::of_address(addr),
        };
        // NFPROTO_IPV4 and NFPROTO_IPV6 have the numbers of AF_INET and AF_INET6.
        NetlinkRequest::new_netfilter(kind, IpFamily::af_number(Some(family)))
    }

    fn matches_flow(self, flow: &TrackedFlow) -> bool {
        match self {
            FlowSelection::All(family) => IpFamily::of_address(flow.daddr) == family,
            FlowSelection::AnsweredBy(addr) => flow.server == addr,
        }
    }

    /// Writes a filter, so that the kernel sends matching connections only. Kernels before 5.8
    /// ignore the filter.
    fn write_filter(self, body: &mut AttributeBuilder) {
        body.put_nested(CTA_TUPLE_ORIG, |tuple| {
            tuple.put_nested(CTA_TUPLE_PROTO, |proto| {
                proto.put_u8(CTA_PROTO_NUM, TransportProtocol::Udp.protocol_number())
            })
        });
        let mut reply = 0;
        if let FlowSelection::AnsweredBy(addr) = self {
            reply = CTA_FILTER_FLAG_CTA_IP_SRC;
            let kind = if addr.is_ipv4() { CTA_IP_V4_SRC } else { CTA_IP_V6_SRC };
            body.put_nested(CTA_TUPLE_REPLY, |tuple| {
                tuple.put_nested(CTA_TUPLE_IP, |list| list.put_ip(kind, addr))
            });
        }
        body.put_nested(CTA_FILTER, |list| {
            // Unlike the rest of netfilter, in host byte order.
            list.put_u32(CTA_FILTER_ORIG_FLAGS, CTA_FILTER_FLAG_CTA_PROTO_NUM)
                .put_u32(CTA_FILTER_REPLY_FLAGS, reply)
        });
    }
}

/// A tracked UDP flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrackedFlow {
    /// The original destination, before any translation.
    pub daddr: IpAddr,
    /// The original destination port.
    pub dport: u16,
    /// The source of the replies.
    pub server: IpAddr,
}

/// A socket for the connection tracking of one network namespace.
#[derive(Debug)]
pub struct ConntrackSocket {
    socket: NetlinkSocket,
}

impl ConntrackSocket {
    /// A socket in the calling thread's namespace.
    pub fn open() -> NetlinkResult<ConntrackSocket> {
        Ok(ConntrackSocket { socket: NetlinkSocket::open(NETLINK_NETFILTER)? })
    }

    /// Deletes the flows of the selection for which `which` returns true, after one dump, and
    /// returns their number: 0 also if the kernel has no connection tracking.
    pub fn delete_flows(
        &self,
        flows: FlowSelection,
        which: &mut dyn FnMut(&TrackedFlow) -> bool,
    ) -> NetlinkResult<usize> {
        let entries = self.dump_entries(flows).map_err(|f| f.into_error("list", &"UDP flows"))?;
        let mut deleted = 0;
        for entry in entries {
            let Some((flow, id)) = parse_flow(&entry) else { continue };
            if !flows.matches_flow(&flow) || !which(&flow) {
                continue;
            }
            let mut request = flows.to_request(DELETE);
            request.body.put_raw(id.as_bytes());
            let target = format_args!("UDP flow to {} port {}", flow.daddr, flow.dport);
            deleted += usize::from(self.socket.request_deletion(&request, "delete", &target)?);
        }
        Ok(deleted)
    }

    fn dump_entries(&self, flows: FlowSelection) -> NetlinkResult<Vec<Vec<u8>>, RequestFailure> {
        let mut filtered = flows.to_request(GET);
        flows.write_filter(&mut filtered.body);
        // If the kernel refuses the request without the filter, too, it lacks the subsystem.
        for request in [filtered, flows.to_request(GET)] {
            match self.socket.request_dump(&request) {
                Err(RequestFailure {
                    errno: Errno::EINVAL | Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT,
                    ..
                }) => {}
                reply => return reply,
            }
        }
        Ok(Vec::new())
    }
}

/// The flow in `entry`, if it is UDP, and the attributes that identify it.
pub(super) fn parse_flow(entry: &[u8]) -> Option<(TrackedFlow, AttributeBuilder)> {
    let entry = entry.get(NFGENMSG..)?;
    let original = find_attribute(entry, CTA_TUPLE_ORIG)?;
    let replies = find_attribute(entry, CTA_TUPLE_REPLY)?;
    if nested_value(original, CTA_TUPLE_PROTO, &[CTA_PROTO_NUM])?
        != [TransportProtocol::Udp.protocol_number()]
    {
        return None;
    }
    let dport = nested_value(original, CTA_TUPLE_PROTO, &[CTA_PROTO_DST_PORT])?;
    let daddr = nested_value(original, CTA_TUPLE_IP, &[CTA_IP_V4_DST, CTA_IP_V6_DST])?;
    let server = nested_value(replies, CTA_TUPLE_IP, &[CTA_IP_V4_SRC, CTA_IP_V6_SRC])?;
    let flow = TrackedFlow {
        daddr: ip_from_bytes(daddr)?,
        dport: u16::from_be_bytes(dport.try_into().ok()?),
        server: ip_from_bytes(server)?,
    };
    let mut id = AttributeBuilder::new();
    id.put_nested(CTA_TUPLE_ORIG, |inner| inner.put_raw(original.value));
    for attr in parse_attributes(entry).filter(|attr| [CTA_ID, CTA_ZONE].contains(&attr.kind)) {
        id.put_bytes(attr.kind, attr.value);
    }
    Some((flow, id))
}

fn nested_value<'a>(tuple: ReplyAttribute<'a>, outer: u16, kinds: &[u16]) -> Option<&'a [u8]> {
    let inner =
        tuple.find_nested(outer)?.nested_attributes().find(|attr| kinds.contains(&attr.kind))?;
    Some(inner.value)
}

#[cfg(test)]
impl ConntrackSocket {
    /// How many entries the kernel sends.
    pub(super) fn count_dumped_entries(&self, flows: FlowSelection) -> usize {
        self.dump_entries(flows).unwrap().len()
    }
}
