//! Connection tracking: forgetting connections that a new port mapping or address would not
//! apply to.

use std::net::IpAddr;

use nix::errno::Errno;

use super::attribute::Attributes;
use super::error::{Failure, Result};
use super::family::Family;
use super::netfilter::{NFGENMSG, NfSocket, Query};
use super::nftables::uapi::constants;
use super::nftables::{self, L4, Value};
use super::packet::{Attr, attrs, ip};

// Of `linux/netfilter/nfnetlink_conntrack.h`; the bits of filters are of the kernel's `nf_internals.h`.
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

/// Which connections to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flows {
    /// All UDP of a family.
    All(Family),
    /// UDP that this address answers, whatever it was sent to.
    AnsweredBy(IpAddr),
}

impl Flows {
    /// `NFPROTO_*`
    fn family(self) -> u8 {
        let family = match self {
            Flows::All(family) => family,
            Flows::AnsweredBy(addr) => Family::of(addr),
        };
        nftables::Family::from(family) as u8
    }

    fn admits(self, flow: &Flow) -> bool {
        match self {
            Flows::All(family) => Family::of(flow.daddr) == family,
            Flows::AnsweredBy(addr) => flow.server == addr,
        }
    }

    /// Asks the kernel (5.8) to send only what matches; older ones ignore it.
    fn filter(self) -> Attributes {
        let udp = |tuple: &mut Attributes| {
            tuple.nest(CTA_TUPLE_PROTO, |list| {
                list.u8(CTA_PROTO_NUM, L4::Udp.number());
            });
        };
        let (mut body, mut reply) = (Attributes::new(), 0);
        body.nest(CTA_TUPLE_ORIG, udp);
        if let Flows::AnsweredBy(addr) = self {
            reply = CTA_FILTER_FLAG_CTA_IP_SRC;
            let kind = if addr.is_ipv4() { CTA_IP_V4_SRC } else { CTA_IP_V6_SRC };
            body.nest(CTA_TUPLE_REPLY, |tuple| {
                tuple.nest(CTA_TUPLE_IP, |list| {
                    list.bytes(kind, &Value::Ip(addr).bytes());
                });
            });
        }
        body.nest(CTA_FILTER, |list| {
            // Unlike the rest of netfilter, in host byte order.
            list.bytes(CTA_FILTER_ORIG_FLAGS, &CTA_FILTER_FLAG_CTA_PROTO_NUM.to_ne_bytes());
            list.bytes(CTA_FILTER_REPLY_FLAGS, &reply.to_ne_bytes());
        });
        body
    }
}

/// A tracked connection of UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// What its first packet was sent to, before any translation.
    pub daddr: IpAddr,
    /// The port.
    pub dport: u16,
    /// Who answers.
    pub server: IpAddr,
}

/// A socket to the connection tracking of one network namespace.
#[derive(Debug)]
pub struct Conntrack {
    socket: NfSocket,
}

impl Conntrack {
    /// A socket in the calling thread's namespace.
    pub fn open() -> Result<Conntrack> {
        Ok(Conntrack { socket: NfSocket::open()? })
    }

    /// Forgets the connections that `which` is true of, in one walk, and says how many there were.
    /// A kernel without connection tracking has none.
    pub fn forget(&self, flows: Flows, mut which: impl FnMut(&Flow) -> bool) -> Result<usize> {
        let entries = self.list(flows).map_err(|f| f.doing("list", || "UDP flows".to_owned()))?;
        let mut deleted = 0;
        for entry in entries {
            let Some((flow, body)) = read(&entry) else { continue };
            if !flows.admits(&flow) || !which(&flow) {
                continue;
            }
            match self.socket.request(&Query { kind: DELETE, family: flows.family(), body }) {
                Ok(_) => deleted += 1,
                Err(Failure { errno: Errno::ENOENT, .. }) => {}
                Err(failure) => {
                    let target = || format!("UDP flow to {} port {}", flow.daddr, flow.dport);
                    return Err(failure.doing("delete", target));
                }
            }
        }
        Ok(deleted)
    }

    fn list(&self, flows: Flows) -> Result<Vec<Vec<u8>>, Failure> {
        let mut query = Query { kind: GET, family: flows.family(), body: flows.filter() };
        match self.socket.dump(&query) {
            Err(failure) if unknown(&failure) => query.body = Attributes::new(),
            answer => return answer,
        }
        // Without the filter it is either what is asked for or the subsystem that is unknown.
        match self.socket.dump(&query) {
            Err(failure) if unknown(&failure) => Ok(Vec::new()),
            answer => answer,
        }
    }
}

fn unknown(failure: &Failure) -> bool {
    matches!(failure.errno, Errno::EINVAL | Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT)
}

/// The flow in `entry`, if it is one of UDP, and what names it to the kernel.
pub(super) fn read(entry: &[u8]) -> Option<(Flow, Attributes)> {
    let list = || attrs(entry.get(NFGENMSG..).unwrap_or_default());
    let tuple = |kind| list().find(|attr| attr.kind == kind);
    let (sent, answered) = (tuple(CTA_TUPLE_ORIG)?, tuple(CTA_TUPLE_REPLY)?);
    if inside(sent, CTA_TUPLE_PROTO, &[CTA_PROTO_NUM])? != [L4::Udp.number()] {
        return None;
    }
    let dport = inside(sent, CTA_TUPLE_PROTO, &[CTA_PROTO_DST_PORT])?;
    let flow = Flow {
        daddr: ip(inside(sent, CTA_TUPLE_IP, &[CTA_IP_V4_DST, CTA_IP_V6_DST])?)?,
        dport: u16::from_be_bytes(dport.try_into().ok()?),
        server: ip(inside(answered, CTA_TUPLE_IP, &[CTA_IP_V4_SRC, CTA_IP_V6_SRC])?)?,
    };
    let mut body = Attributes::new();
    body.nest(CTA_TUPLE_ORIG, |inner| inner.raw(sent.value));
    for attr in list().filter(|attr| [CTA_ID, CTA_ZONE].contains(&attr.kind)) {
        body.bytes(attr.kind, attr.value);
    }
    Some((flow, body))
}

fn inside<'a>(tuple: Attr<'a>, outer: u16, kinds: &[u16]) -> Option<&'a [u8]> {
    let outer = tuple.nested().find(|attr| attr.kind == outer)?;
    outer.nested().find(|attr| kinds.contains(&attr.kind)).map(|attr| attr.value)
}

#[cfg(test)]
impl Conntrack {
    /// How many entries the kernel sends.
    pub(super) fn kernel_filtered(&self, flows: Flows) -> usize {
        self.list(flows).unwrap().len()
    }
}
