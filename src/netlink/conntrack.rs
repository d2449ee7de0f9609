//! Connection tracking: forgetting connections that a new port mapping or address would not
//! apply to.

use std::net::IpAddr;

use nix::errno::Errno;

use super::attribute::Attributes;
use super::error::{Failure, Result};
use super::netfilter::{NfSocket, Query};
use super::nftables::{L4, Value};
use super::packet::{Attr, attrs, ip};
use crate::netns::Netns;

/// Connection tracking among netfilter's subsystems.
const SUBSYSTEM: u16 = 1;
const GET: u16 = SUBSYSTEM << 8 | 1;
const DELETE: u16 = SUBSYSTEM << 8 | 2;

const NFGENMSG: usize = 4;

const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_SRC: u16 = 3;
const CTA_IP_V6_DST: u16 = 4;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_DST_PORT: u16 = 3;

const FILTER_IP_SRC: u32 = 1 << 0;
const FILTER_PROTO_NUM: u32 = 1 << 3;

/// Which connections to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flows {
    /// All UDP of IPv4.
    V4,
    /// All UDP of IPv6.
    V6,
    /// UDP that this address answers, whatever it was sent to.
    AnsweredBy(IpAddr),
}

impl Flows {
    fn family(self) -> u8 {
        match self {
            Flows::V4 | Flows::AnsweredBy(IpAddr::V4(_)) => 2,
            Flows::V6 | Flows::AnsweredBy(IpAddr::V6(_)) => 10,
        }
    }

    fn admits(self, flow: &Flow) -> bool {
        match self {
            Flows::V4 => flow.daddr.is_ipv4(),
            Flows::V6 => flow.daddr.is_ipv6(),
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
            reply = FILTER_IP_SRC;
            let kind = if addr.is_ipv4() { CTA_IP_V4_SRC } else { CTA_IP_V6_SRC };
            body.nest(CTA_TUPLE_REPLY, |tuple| {
                tuple.nest(CTA_TUPLE_IP, |list| {
                    list.bytes(kind, &Value::Ip(addr).bytes());
                });
            });
        }
        body.nest(CTA_FILTER, |list| {
            // Unlike the rest of netfilter, in host byte order.
            list.bytes(CTA_FILTER_ORIG_FLAGS, &FILTER_PROTO_NUM.to_ne_bytes());
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

    /// A socket in `ns`.
    pub fn open_in(ns: &Netns) -> Result<Conntrack> {
        Ok(Conntrack { socket: NfSocket::open_in(ns)? })
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
