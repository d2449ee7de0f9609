//! A packet as rules see it, with the fields that are known in advance.

use std::net::IpAddr;

use nix::libc::{NFT_CT_DIRECTION, NFT_CT_PROTO_DST, NFT_CT_PROTOCOL};

use super::uapi::{
    IFNAMSIZ, NFPROTO_IPV4, NFPROTO_IPV6, NFT_CT_STATE, NFT_CT_STATUS, NFT_META_IIFNAME,
    NFT_META_L4PROTO, NFT_META_NFPROTO, NFT_META_OIFNAME, NFT_META_PROTOCOL,
    NFT_PAYLOAD_NETWORK_HEADER, NFT_PAYLOAD_TRANSPORT_HEADER, c_int,
};
use super::value::TransportProtocol;

/// The first packet of a connection that the host forwards. Fields that are `None` may have any
/// value.
#[derive(Clone, Debug)]
pub struct ForwardedPacket {
    pub is_ipv4: bool,
    /// The names of the incoming and of the outgoing link.
    pub iif: Option<String>,
    pub oif: Option<String>,
    pub source: Option<IpAddr>,
    pub destination: Option<IpAddr>,
    pub proto: TransportProtocol,
    /// The destination port.
    pub port: Option<u16>,
    /// The original destination port, if the host has translated the destination.
    pub host_port: Option<u16>,
}

/// The bytes of a value; `None` for a byte that is not known.
pub(super) type KnownBytes = Vec<Option<u8>>;

/// The state of `ct state new`.
const NEW: u32 = 8;
/// `IPS_DST_NAT`: the destination is translated.
const TRANSLATED: u32 = 0x20;
/// `IPS_NAT_DONE_MASK`: both translations are determined.
const DETERMINED: u32 = 0x180;
/// The states of iptables' match `conntrack`.
const XT_NEW: u16 = 1 << 3;
const XT_DNAT: u16 = 1 << 7;

fn known_bytes(bytes: &[u8]) -> KnownBytes {
    bytes.iter().copied().map(Some).collect()
}

impl ForwardedPacket {
    /// The state of the match `conntrack`.
    pub(super) fn xt_state(&self) -> u16 {
        XT_NEW | if self.host_port.is_some() { XT_DNAT } else { 0 }
    }

    /// The value of `meta key`.
    pub(super) fn meta_value(&self, key: c_int) -> KnownBytes {
        let (nfproto, ethertype) =
            if self.is_ipv4 { (NFPROTO_IPV4, 0x0800_u16) } else { (NFPROTO_IPV6, 0x86dd) };
        match key {
            NFT_META_IIFNAME => padded_name(self.iif.as_deref()),
            NFT_META_OIFNAME => padded_name(self.oif.as_deref()),
            NFT_META_NFPROTO => known_bytes(&[u8::try_from(nfproto).unwrap_or_default()]),
            NFT_META_L4PROTO => known_bytes(&[self.proto.protocol_number()]),
            NFT_META_PROTOCOL => known_bytes(&ethertype.to_be_bytes()),
            _ => vec![None; IFNAMSIZ],
        }
    }

    /// The value of `ct key`.
    pub(super) fn ct_value(&self, key: c_int) -> KnownBytes {
        let status = DETERMINED | if self.host_port.is_some() { TRANSLATED } else { 0 };
        match key {
            NFT_CT_STATE => known_bytes(&NEW.to_ne_bytes()),
            NFT_CT_STATUS => known_bytes(&status.to_ne_bytes()),
            NFT_CT_DIRECTION => known_bytes(&[0]),
            NFT_CT_PROTOCOL => known_bytes(&[self.proto.protocol_number()]),
            NFT_CT_PROTO_DST => port_bytes(self.host_port.or(self.port)),
            _ => vec![None; IFNAMSIZ],
        }
    }

    /// The `length` bytes at `offset` in the header `base` (`NFT_PAYLOAD_*`).
    pub(super) fn payload_bytes(&self, base: c_int, offset: usize, length: usize) -> KnownBytes {
        let header = match base {
            NFT_PAYLOAD_NETWORK_HEADER => self.network_header(),
            NFT_PAYLOAD_TRANSPORT_HEADER => [vec![None; 2], port_bytes(self.port)].concat(),
            _ => Vec::new(),
        };
        (offset..offset + length).map(|at| header.get(at).copied().flatten()).collect()
    }

    fn network_header(&self) -> KnownBytes {
        let (proto, addrs, width) = if self.is_ipv4 { (9, 12, 4) } else { (6, 8, 16) };
        let mut header = vec![None; addrs];
        header[proto] = Some(self.proto.protocol_number());
        for addr in [self.source, self.destination] {
            header.extend(match addr {
                Some(IpAddr::V4(ip)) => known_bytes(&ip.octets()),
                Some(IpAddr::V6(ip)) => known_bytes(&ip.octets()),
                None => vec![None; width],
            });
        }
        header
    }
}

fn port_bytes(port: Option<u16>) -> KnownBytes {
    port.map_or(vec![None; 2], |port| known_bytes(&port.to_be_bytes()))
}

/// A name, padded with zeros.
fn padded_name(name: Option<&str>) -> KnownBytes {
    let Some(name) = name else { return vec![None; IFNAMSIZ] };
    let mut bytes = known_bytes(name.as_bytes());
    bytes.resize(IFNAMSIZ, Some(0));
    bytes
}
