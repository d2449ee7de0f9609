//! Addresses of links.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use nix::libc::{self, RTM_DELADDR, RTM_GETADDR, RTM_NEWADDR};
use rtnetlink::AddressMessageBuilder;
use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use rtnetlink::packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeader, AddressMessage, CacheInfo,
};

use super::attribute::{parse_attributes, read_u32_at};
use super::error::NetlinkResult;
use super::request::NetlinkRequest;
use super::{IpFamily, Netlink};

/// Length of `struct ifaddrmsg`.
const HEADER_LEN: usize = 8;
/// The index that matches every link.
const ALL_LINKS: u32 = 0;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkAddress {
    /// The address with its prefix length and host bits.
    pub net: IpNet,
    pub index: u32,
    /// The scope (rtnetlink(7)): 0 universe, 253 link, 254 host.
    pub scope: u8,
    /// Bits `IFA_F_*` of `linux/if_addr.h`.
    pub flags: u32,
    /// The broadcast address; IPv4 only.
    pub broadcast: Option<IpAddr>,
    /// The label, usually the name of the link; IPv4 only.
    pub label: Option<String>,
    pub lifetime: AddressLifetime,
}

/// The remaining lifetimes of an address in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressLifetime {
    /// How long the address is preferred as the source address of new connections.
    pub preferred: u32,
    pub valid: u32,
}

impl AddressLifetime {
    /// Both lifetimes are infinite.
    pub const FOREVER: AddressLifetime = AddressLifetime { preferred: u32::MAX, valid: u32::MAX };

    /// Reads `struct ifa_cacheinfo`.
    fn parse(bytes: &[u8]) -> Option<AddressLifetime> {
        Some(AddressLifetime { preferred: read_u32_at(bytes, 0)?, valid: read_u32_at(bytes, 4)? })
    }
}

impl LinkAddress {
    /// Whether duplicate address detection is in progress, so that the address cannot be used yet.
    pub fn is_tentative(&self) -> bool {
        self.flags & libc::IFA_F_TENTATIVE != 0
    }

    /// Whether duplicate address detection found another owner of the address.
    pub fn is_dad_failed(&self) -> bool {
        self.flags & libc::IFA_F_DADFAILED != 0
    }

    /// Whether the kernel has made the address from a router advertisement (RFC 4862).
    pub fn is_advertised(&self) -> bool {
        let made_by_kernel = libc::IFA_F_MANAGETEMPADDR | libc::IFA_F_TEMPORARY;
        self.flags & made_by_kernel != 0 && self.flags & libc::IFA_F_PERMANENT == 0
    }

    /// Whether the kernel omits the route to the network of the address.
    pub fn is_without_prefix_route(&self) -> bool {
        self.flags & libc::IFA_F_NOPREFIXROUTE != 0
    }

    pub(super) fn parse(body: &[u8]) -> Option<LinkAddress> {
        let header = AddressHeader::parse(body).ok()?;
        let mut flags = u32::from(header.flags.bits());
        let (mut local, mut address, mut broadcast, mut label) = (None, None, None, None);
        let mut lifetime = None;
        for attr in parse_attributes(body.get(HEADER_LEN..)?) {
            match attr.kind {
                libc::IFA_LOCAL => local = attr.to_ip(),
                libc::IFA_ADDRESS => address = attr.to_ip(),
                libc::IFA_BROADCAST => broadcast = attr.to_ip(),
                libc::IFA_LABEL => label = Some(attr.to_text()),
                libc::IFA_CACHEINFO => lifetime = AddressLifetime::parse(attr.value),
                libc::IFA_FLAGS => flags = attr.to_u32().unwrap_or(flags),
                _ => {}
            }
        }
        // A point-to-point link has both, and IFA_ADDRESS is the address of the other end.
        let net = IpNet::new(local.or(address)?, header.prefix_len).ok()?;
        let lifetime = lifetime.unwrap_or(AddressLifetime::FOREVER);
        let (index, scope) = (header.index, header.scope.into());
        Some(LinkAddress { net, index, scope, flags, broadcast, label, lifetime })
    }
}

/// Duplicate address detection for an IPv6 address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DuplicateDetection {
    /// As the link's sysctls specify: the address is tentative for a second or two.
    #[default]
    Kernel,
    /// No detection: the address can be used at once.
    Off,
}

/// An address to be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewLinkAddress {
    /// The address with its host bits.
    pub net: IpNet,
    /// Duplicate address detection; ignored for IPv4.
    pub dad: DuplicateDetection,
    /// Whether the kernel adds a route to the network of the address.
    pub prefix_route: bool,
    /// Whether an IPv4 address has a broadcast address, the last address of its network.
    pub broadcast: bool,
    pub lifetime: AddressLifetime,
}

impl NewLinkAddress {
    /// An address with the kernel's defaults.
    pub fn new(net: IpNet) -> NewLinkAddress {
        let (dad, lifetime) = (DuplicateDetection::Kernel, AddressLifetime::FOREVER);
        NewLinkAddress { net, dad, prefix_route: true, broadcast: true, lifetime }
    }

    fn to_message(self, index: u32) -> AddressMessage {
        let mut message = address_message(self.net, index);
        let attributes = &mut message.attributes;
        if !self.broadcast {
            attributes.retain(|a| !matches!(a, AddressAttribute::Broadcast(_)));
        }
        if self.lifetime != AddressLifetime::FOREVER {
            let mut info = CacheInfo::default();
            (info.ifa_preferred, info.ifa_valid) = (self.lifetime.preferred, self.lifetime.valid);
            attributes.push(AddressAttribute::CacheInfo(info));
        }
        let mut flags = AddressFlags::empty();
        flags.set(
            AddressFlags::Nodad,
            self.dad == DuplicateDetection::Off && self.net.addr().is_ipv6(),
        );
        flags.set(AddressFlags::Noprefixroute, !self.prefix_route);
        if !flags.is_empty() {
            attributes.push(AddressAttribute::Flags(flags));
        }
        message
    }
}

/// A message with the address and, for IPv4, the broadcast address.
fn address_message(net: IpNet, index: u32) -> AddressMessage {
    let mut message = match net {
        IpNet::V4(net) => {
            AddressMessageBuilder::<Ipv4Addr>::new().address(net.addr(), net.prefix_len()).build()
        }
        IpNet::V6(net) => {
            AddressMessageBuilder::<Ipv6Addr>::new().address(net.addr(), net.prefix_len()).build()
        }
    };
    message.header.index = index;
    message
}

impl Netlink {
    /// The addresses of one link.
    pub fn dump_addresses(&self, index: u32) -> NetlinkResult<Vec<LinkAddress>> {
        self.dump_family_addresses(index, None)
    }

    pub fn dump_all_addresses(&self) -> NetlinkResult<Vec<LinkAddress>> {
        self.dump_family_addresses(ALL_LINKS, None)
    }

    pub(super) fn dump_family_addresses(
        &self,
        index: u32,
        family: Option<IpFamily>,
    ) -> NetlinkResult<Vec<LinkAddress>> {
        let mut message = AddressMessage::default();
        message.header.index = index;
        message.header.family = IpFamily::af_number(family).into();
        let request = NetlinkRequest::new_route(RTM_GETADDR, &message);
        let target = &self.link_label(index);
        let mut addrs =
            self.socket.request_list(&request, "list addresses of", target, LinkAddress::parse)?;
        // Kernels before 4.20 ignore the filter.
        addrs.retain(|addr| index == ALL_LINKS || addr.index == index);
        Ok(addrs)
    }

    pub fn add_address(&self, index: u32, addr: &NewLinkAddress) -> NetlinkResult<()> {
        let request = NetlinkRequest::new_route(RTM_NEWADDR, &addr.to_message(index));
        let target = format_args!("{} to {}", addr.net, self.link_label(index));
        self.socket.request_change(&request, NLM_F_CREATE | NLM_F_EXCL, "add address", &target)
    }

    /// Deletes an address of a link; `false` if the link does not have the address.
    pub fn delete_address(&self, index: u32, net: IpNet) -> NetlinkResult<bool> {
        let request = NetlinkRequest::new_route(RTM_DELADDR, &address_message(net, index));
        let target = format_args!("{net} from {}", self.link_label(index));
        self.socket.request_deletion(&request, "delete address", &target)
    }
}
