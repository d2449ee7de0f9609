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
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_DST: u16 = 4;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_DST_PORT: u16 = 3;

const FILTER_IP_DST: u32 = 1 << 1;
const FILTER_PROTO_NUM: u32 = 1 << 3;
const FILTER_DST_PORT: u32 = 1 << 5;

/// An IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// IPv4
    V4,
    /// IPv6
    V6,
}

/// Which connections are meant, by what their first packet was sent to, before any translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flows {
    version: Version,
    proto: L4,
    daddr: Option<IpAddr>,
    dport: Option<u16>,
}

impl Flows {
    /// All connections of a protocol.
    pub fn new(version: Version, proto: L4) -> Flows {
        Flows { version, proto, daddr: None, dport: None }
    }

    /// Those to an address.
    pub fn to(proto: L4, daddr: IpAddr) -> Flows {
        let version = if daddr.is_ipv4() { Version::V4 } else { Version::V6 };
        Flows { daddr: Some(daddr), ..Flows::new(version, proto) }
    }

    /// Only those to this port.
    #[must_use]
    pub fn port(mut self, dport: u16) -> Flows {
        self.dport = Some(dport);
        self
    }

    fn family(self) -> u8 {
        match self.version {
            Version::V4 => 2,
            Version::V6 => 10,
        }
    }

    fn matches(self, tuple: Attr<'_>) -> bool {
        let inside = |outer, inner: &[u16]| {
            let outer = tuple.nested().find(|attr| attr.kind == outer)?;
            outer.nested().find(|attr| inner.contains(&attr.kind)).map(|attr| attr.value)
        };
        let daddr = inside(CTA_TUPLE_IP, &[CTA_IP_V4_DST, CTA_IP_V6_DST]).and_then(ip);
        let dport = inside(CTA_TUPLE_PROTO, &[CTA_PROTO_DST_PORT]);
        inside(CTA_TUPLE_PROTO, &[CTA_PROTO_NUM]) == Some(&[self.proto.number()][..])
            && self.daddr.is_none_or(|wanted| daddr == Some(wanted))
            && self.dport.is_none_or(|wanted| dport == Some(&wanted.to_be_bytes()[..]))
    }

    /// Asks the kernel (5.8) to send only what matches; older ones ignore it.
    fn filter(self) -> Attributes {
        let mut flags = FILTER_PROTO_NUM;
        let mut body = Attributes::new();
        body.nest(CTA_TUPLE_ORIG, |tuple| {
            if let Some(addr) = self.daddr {
                flags |= FILTER_IP_DST;
                let kind = if addr.is_ipv4() { CTA_IP_V4_DST } else { CTA_IP_V6_DST };
                tuple.nest(CTA_TUPLE_IP, |list| {
                    list.bytes(kind, &Value::Ip(addr).bytes());
                });
            }
            tuple.nest(CTA_TUPLE_PROTO, |list| {
                list.u8(CTA_PROTO_NUM, self.proto.number());
                if let Some(port) = self.dport {
                    flags |= FILTER_DST_PORT;
                    list.be16(CTA_PROTO_DST_PORT, port);
                }
            });
        });
        body.nest(CTA_FILTER, |list| {
            // Unlike the rest of netfilter, in host byte order.
            list.bytes(CTA_FILTER_ORIG_FLAGS, &flags.to_ne_bytes());
            list.bytes(CTA_FILTER_REPLY_FLAGS, &0_u32.to_ne_bytes());
        });
        body
    }
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

    /// Forgets the connections that match, and says how many there were. A kernel without
    /// connection tracking has none.
    pub fn flush(&self, flows: Flows) -> Result<usize> {
        let doing = |failure: Failure| {
            failure.doing("list connections of protocol", || flows.proto.to_string())
        };
        let entries = self.list(flows).map_err(doing)?;
        let mut deleted = 0;
        for entry in entries {
            let Some(body) = identity(flows, &entry) else { continue };
            let query = Query { kind: DELETE, family: flows.family(), body };
            match self.socket.request(&query) {
                Ok(_) => deleted += 1,
                Err(Failure { errno: Errno::ENOENT, .. }) => {}
                Err(failure) => {
                    let target = || format!("connection of protocol {}", flows.proto);
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

/// What names the connection in `entry`, if it is meant.
pub(super) fn identity(flows: Flows, entry: &[u8]) -> Option<Attributes> {
    let list = || attrs(entry.get(NFGENMSG..).unwrap_or_default());
    let tuple = list().find(|attr| attr.kind == CTA_TUPLE_ORIG)?;
    if !flows.matches(tuple) {
        return None;
    }
    let mut body = Attributes::new();
    body.nest(CTA_TUPLE_ORIG, |inner| inner.raw(tuple.value));
    for attr in list().filter(|attr| [CTA_ID, CTA_ZONE].contains(&attr.kind)) {
        body.bytes(attr.kind, attr.value);
    }
    Some(body)
}

#[cfg(test)]
impl Conntrack {
    /// How many entries the kernel sends.
    pub(super) fn kernel_filtered(&self, flows: Flows) -> usize {
        self.list(flows).unwrap().len()
    }
}
