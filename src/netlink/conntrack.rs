//! Connection tracking: deleting entries, to which a new port mapping or address would not apply.

use std::net::IpAddr;

use nix::errno::Errno;
use rtnetlink::sys::protocols::NETLINK_NETFILTER;

use super::Family;
use super::attribute::{Attr, Attributes, attrs, find, ip};
use super::error::{Failure, Result};
use super::nftables::L4;
use super::nftables::uapi::constants;
use super::request::{NFGENMSG, Request};
use super::socket::Socket;

// From `linux/netfilter/nfnetlink_conntrack.h`, the bits of filters from the kernel's `nf_internals.h`.
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
pub enum Flows {
    /// All UDP of a family.
    All(Family),
    /// UDP with replies from this address, regardless of the original destination.
    AnsweredBy(IpAddr),
}

impl Flows {
    fn request(self, kind: u16) -> Request {
        let family = match self {
            Flows::All(family) => family,
            Flows::AnsweredBy(addr) => Family::of(addr),
        };
        // NFPROTO_IPV4 and NFPROTO_IPV6 have the numbers of AF_INET and AF_INET6.
        Request::netfilter(kind, Family::number(Some(family)))
    }

    fn matches(self, flow: &Flow) -> bool {
        match self {
            Flows::All(family) => Family::of(flow.daddr) == family,
            Flows::AnsweredBy(addr) => flow.server == addr,
        }
    }

    /// Has the kernel (5.8) send matching connections only; older kernels ignore the filter.
    fn write_filter(self, body: &mut Attributes) {
        body.nest(CTA_TUPLE_ORIG, |tuple| {
            tuple.nest(CTA_TUPLE_PROTO, |proto| proto.u8(CTA_PROTO_NUM, L4::Udp.number()))
        });
        let mut reply = 0;
        if let Flows::AnsweredBy(addr) = self {
            reply = CTA_FILTER_FLAG_CTA_IP_SRC;
            let kind = if addr.is_ipv4() { CTA_IP_V4_SRC } else { CTA_IP_V6_SRC };
            body.nest(CTA_TUPLE_REPLY, |tuple| {
                tuple.nest(CTA_TUPLE_IP, |list| list.ip(kind, addr))
            });
        }
        body.nest(CTA_FILTER, |list| {
            // Unlike the rest of netfilter, in host byte order.
            list.u32(CTA_FILTER_ORIG_FLAGS, CTA_FILTER_FLAG_CTA_PROTO_NUM)
                .u32(CTA_FILTER_REPLY_FLAGS, reply)
        });
    }
}

/// A tracked connection of UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The original destination, before any translation.
    pub daddr: IpAddr,
    /// The original destination port.
    pub dport: u16,
    /// The source of the replies.
    pub server: IpAddr,
}

/// A socket for the connection tracking of one network namespace.
#[derive(Debug)]
pub struct Conntrack {
    socket: Socket,
}

impl Conntrack {
    /// A socket in the calling thread's namespace.
    pub fn open() -> Result<Conntrack> {
        Ok(Conntrack { socket: Socket::open(NETLINK_NETFILTER)? })
    }

    /// Deletes the connections for which `which` returns true, in one walk, and returns their number.
    /// A kernel without connection tracking has none.
    pub fn forget(&self, flows: Flows, which: &mut dyn FnMut(&Flow) -> bool) -> Result<usize> {
        let entries = self.list(flows).map_err(|f| f.context("list", &"UDP flows"))?;
        let mut deleted = 0;
        for entry in entries {
            let Some((flow, id)) = read(&entry) else { continue };
            if !flows.matches(&flow) || !which(&flow) {
                continue;
            }
            let mut request = flows.request(DELETE);
            request.body.raw(id.as_bytes());
            let target = format_args!("UDP flow to {} port {}", flow.daddr, flow.dport);
            deleted += usize::from(self.socket.delete(&request, "delete", &target)?);
        }
        Ok(deleted)
    }

    fn list(&self, flows: Flows) -> Result<Vec<Vec<u8>>, Failure> {
        let mut filtered = flows.request(GET);
        flows.write_filter(&mut filtered.body);
        // Without the filter, a refusal means that the kernel lacks the subsystem.
        for request in [filtered, flows.request(GET)] {
            match self.socket.dump(&request) {
                Err(Failure {
                    errno: Errno::EINVAL | Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT,
                    ..
                }) => {}
                answer => return answer,
            }
        }
        Ok(Vec::new())
    }
}

/// The flow in `entry`, if it is UDP, and the attributes that identify it.
pub(super) fn read(entry: &[u8]) -> Option<(Flow, Attributes)> {
    let entry = entry.get(NFGENMSG..)?;
    let (sent, answered) = (find(entry, CTA_TUPLE_ORIG)?, find(entry, CTA_TUPLE_REPLY)?);
    if inside(sent, CTA_TUPLE_PROTO, &[CTA_PROTO_NUM])? != [L4::Udp.number()] {
        return None;
    }
    let dport = inside(sent, CTA_TUPLE_PROTO, &[CTA_PROTO_DST_PORT])?;
    let flow = Flow {
        daddr: ip(inside(sent, CTA_TUPLE_IP, &[CTA_IP_V4_DST, CTA_IP_V6_DST])?)?,
        dport: u16::from_be_bytes(dport.try_into().ok()?),
        server: ip(inside(answered, CTA_TUPLE_IP, &[CTA_IP_V4_SRC, CTA_IP_V6_SRC])?)?,
    };
    let mut id = Attributes::new();
    id.nest(CTA_TUPLE_ORIG, |inner| inner.raw(sent.value));
    for attr in attrs(entry).filter(|attr| [CTA_ID, CTA_ZONE].contains(&attr.kind)) {
        id.bytes(attr.kind, attr.value);
    }
    Some((flow, id))
}

fn inside<'a>(tuple: Attr<'a>, outer: u16, kinds: &[u16]) -> Option<&'a [u8]> {
    let inner = tuple.find(outer)?.nested().find(|attr| kinds.contains(&attr.kind))?;
    Some(inner.value)
}

#[cfg(test)]
impl Conntrack {
    /// How many entries the kernel sends.
    pub(super) fn kernel_filtered(&self, flows: Flows) -> usize {
        self.list(flows).unwrap().len()
    }
}
