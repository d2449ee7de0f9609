//! Addresses of links.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use nix::libc;
use nix::libc::{RTM_DELADDR, RTM_GETADDR, RTM_NEWADDR};
use rtnetlink::AddressMessageBuilder;
use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use rtnetlink::packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeader, AddressMessage, CacheInfo,
};

use super::error::Result;
use super::family::Family;
use super::packet::{Packet, attrs};
use super::{Netlink, link};

/// Length of `struct ifaddrmsg`.
const HEADER_LEN: usize = 8;
/// No link has this index; asked for, it means none in particular.
const ALL_LINKS: u32 = 0;

/// An address of a link.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Addr {
    /// The address with the length of its prefix; host bits are kept.
    pub net: IpNet,
    /// The index of its link.
    pub index: u32,
    /// How far it is valid: 0 everywhere, 253 on the link, 254 on the host.
    pub scope: u8,
    /// The `IFA_F_*` bits.
    pub flags: u32,
    /// The broadcast address of IPv4.
    pub broadcast: Option<IpAddr>,
    /// The label of IPv4, usually the name of the link.
    pub label: Option<String>,
    /// How long it is there.
    pub lifetime: Lifetime,
}

/// How many more seconds an address is used and valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Lifetime {
    /// As the source of new connections.
    pub preferred: u32,
    pub valid: u32,
}

impl Lifetime {
    /// No end is known.
    pub const FOREVER: Lifetime = Lifetime { preferred: u32::MAX, valid: u32::MAX };

    /// Reads `struct ifa_cacheinfo`.
    fn parse(bytes: &[u8]) -> Option<Lifetime> {
        let word = |at: usize| Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
        Some(Lifetime { preferred: word(0)?, valid: word(4)? })
    }
}

impl Addr {
    /// Whether duplicate address detection goes on, so that the address cannot be used yet.
    pub fn is_tentative(&self) -> bool {
        self.flags & libc::IFA_F_TENTATIVE != 0
    }

    /// Whether another machine uses the address.
    pub fn is_dad_failed(&self) -> bool {
        self.flags & libc::IFA_F_DADFAILED != 0
    }

    /// Whether the kernel adds no route to its network.
    pub fn is_without_prefix_route(&self) -> bool {
        self.flags & libc::IFA_F_NOPREFIXROUTE != 0
    }

    pub(super) fn parse(body: &[u8]) -> Option<Addr> {
        let header = AddressHeader::parse(body).ok()?;
        let (mut local, mut address, mut broadcast, mut label) = (None, None, None, None);
        let mut flags = u32::from(header.flags.bits());
        let mut lifetime = None;
        for attr in attrs(body.get(HEADER_LEN..)?) {
            match attr.kind {
                libc::IFA_LOCAL => local = attr.ip(),
                libc::IFA_ADDRESS => address = attr.ip(),
                libc::IFA_BROADCAST => broadcast = attr.ip(),
                libc::IFA_LABEL => label = Some(attr.text()),
                libc::IFA_CACHEINFO => lifetime = Lifetime::parse(attr.value),
                libc::IFA_FLAGS => flags = attr.u32().unwrap_or(flags),
                _ => {}
            }
        }
        // IFA_ADDRESS is the other end of a point-to-point link; only then is there both.
        let net = IpNet::new(local.or(address)?, header.prefix_len).ok()?;
        let scope = u8::from(header.scope);
        let lifetime = lifetime.unwrap_or(Lifetime::FOREVER);
        Some(Addr { net, index: header.index, scope, flags, broadcast, label, lifetime })
    }
}

/// Whether the kernel asks the link for another owner of an IPv6 address first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dad {
    /// As the kernel is configured: the address is tentative for a second or two.
    #[default]
    Kernel,
    /// Not for this address: it can be used at once.
    Off,
}

/// An address to be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewAddr {
    net: IpNet,
    dad: Dad,
    prefix_route: bool,
    broadcast: bool,
    lifetime: Lifetime,
}

impl NewAddr {
    /// The address `net`, with its host bits.
    pub fn new(net: IpNet) -> NewAddr {
        NewAddr {
            net,
            dad: Dad::Kernel,
            prefix_route: true,
            broadcast: true,
            lifetime: Lifetime::FOREVER,
        }
    }

    /// Decides about duplicate address detection; IPv4 has none.
    #[must_use]
    pub fn dad(mut self, dad: Dad) -> Self {
        self.dad = dad;
        self
    }

    /// Keeps the kernel from adding a route to the address's network.
    #[must_use]
    pub fn without_prefix_route(mut self) -> Self {
        self.prefix_route = false;
        self
    }

    /// Leaves out the broadcast address of IPv4, which is otherwise the last one of the network.
    #[must_use]
    pub fn without_broadcast(mut self) -> Self {
        self.broadcast = false;
        self
    }

    /// Lets it end at some time.
    #[must_use]
    pub fn lifetime(mut self, lifetime: Lifetime) -> Self {
        self.lifetime = lifetime;
        self
    }

    fn message(self, index: u32) -> AddressMessage {
        let mut message = message(self.net, index);
        if !self.broadcast {
            message.attributes.retain(|a| !matches!(a, AddressAttribute::Broadcast(_)));
        }
        if self.lifetime != Lifetime::FOREVER {
            let mut info = CacheInfo::default();
            info.ifa_preferred = self.lifetime.preferred;
            info.ifa_valid = self.lifetime.valid;
            message.attributes.push(AddressAttribute::CacheInfo(info));
        }
        let mut flags = AddressFlags::empty();
        flags.set(AddressFlags::Nodad, self.dad == Dad::Off && self.net.addr().is_ipv6());
        flags.set(AddressFlags::Noprefixroute, !self.prefix_route);
        if !flags.is_empty() {
            message.attributes.push(AddressAttribute::Flags(flags));
        }
        message
    }
}

/// The message with address, local address and, for IPv4, broadcast address.
fn message(net: IpNet, index: u32) -> AddressMessage {
    match net {
        IpNet::V4(net) => AddressMessageBuilder::<Ipv4Addr>::new()
            .index(index)
            .address(net.addr(), net.prefix_len())
            .build(),
        IpNet::V6(net) => AddressMessageBuilder::<Ipv6Addr>::new()
            .index(index)
            .address(net.addr(), net.prefix_len())
            .build(),
    }
}

impl Netlink {
    /// The addresses of one link.
    pub fn dump_addrs(&self, index: u32) -> Result<Vec<Addr>> {
        self.dump_family(index, None)
    }

    /// The addresses of all links.
    pub fn dump_all_addrs(&self) -> Result<Vec<Addr>> {
        self.dump_family(ALL_LINKS, None)
    }

    pub(super) fn dump_family(&self, index: u32, family: Option<Family>) -> Result<Vec<Addr>> {
        let mut message = AddressMessage::default();
        message.header.index = index;
        message.header.family = Family::wire(family);
        let bodies = self
            .dump(&Packet::new(RTM_GETADDR, &message))
            .map_err(|e| e.doing("list addresses of", || self.label(index)))?;
        let addrs = bodies.iter().filter_map(|body| Addr::parse(body));
        // Kernels before 4.20 ignore the filter.
        Ok(addrs.filter(|addr| index == ALL_LINKS || addr.index == index).collect())
    }

    /// Adds an address to a link.
    pub fn add_addr(&self, index: u32, addr: &NewAddr) -> Result<()> {
        let message = Packet::new(RTM_NEWADDR, &addr.message(index));
        self.ack(message, NLM_F_CREATE | NLM_F_EXCL).map_err(|e| {
            e.doing("add address", || format!("{} to {}", addr.net, self.label(index)))
        })
    }

    /// Deletes an address of a link; `false` if it did not have it.
    pub fn del_addr(&self, index: u32, net: IpNet) -> Result<bool> {
        let deleted = self
            .ack(Packet::new(RTM_DELADDR, &message(net, index)), 0)
            .map_err(|e| e.doing("delete address", || format!("{net} from {}", self.label(index))));
        link::unless_absent(deleted)
    }
}
