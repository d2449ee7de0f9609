//! A packet as far as its fields are known in advance, as rules see it.

use std::net::IpAddr;

use nix::libc::{NFT_CT_DIRECTION, NFT_CT_PROTO_DST, NFT_CT_PROTOCOL};

use super::uapi::{
    IFNAMSIZ, NFPROTO_IPV4, NFPROTO_IPV6, NFT_CT_STATE, NFT_CT_STATUS, NFT_META_IIFNAME,
    NFT_META_L4PROTO, NFT_META_NFPROTO, NFT_META_OIFNAME, NFT_META_PROTOCOL,
    NFT_PAYLOAD_NETWORK_HEADER, NFT_PAYLOAD_TRANSPORT_HEADER, c_int,
};
use super::value::L4;

/// The first packet of a connection that the host forwards. Fields that are `None` may have any value.
#[derive(Clone, Debug)]
pub struct Packet {
    pub is_ipv4: bool,
    /// The links that it comes from and goes to.
    pub iif: Option<String>,
    pub oif: Option<String>,
    pub source: Option<IpAddr>,
    pub destination: Option<IpAddr>,
    pub proto: L4,
    /// The destination port.
    pub port: Option<u16>,
    /// The original destination port, if the host has translated the destination.
    pub host_port: Option<u16>,
}

/// A value of which some bytes are known.
pub(super) type Known = Vec<Option<u8>>;

/// `ct state new`
const NEW: u32 = 8;
/// `IPS_DST_NAT`, and that both translations are determined: `IPS_NAT_DONE_MASK`.
const TRANSLATED: u32 = 0x20;
const DETERMINED: u32 = 0x180;
/// The states of iptables' match `conntrack`.
const XT_NEW: u16 = 1 << 3;
const XT_DNAT: u16 = 1 << 7;

fn known(bytes: &[u8]) -> Known {
    bytes.iter().copied().map(Some).collect()
}

impl Packet {
    /// The state of the match `conntrack`.
    pub(super) fn xt_state(&self) -> u16 {
        XT_NEW | if self.host_port.is_some() { XT_DNAT } else { 0 }
    }

    /// The value of `meta key`.
    pub(super) fn meta(&self, key: c_int) -> Known {
        let (nfproto, ethertype) =
            if self.is_ipv4 { (NFPROTO_IPV4, 0x0800_u16) } else { (NFPROTO_IPV6, 0x86dd) };
        match key {
            NFT_META_IIFNAME => name(self.iif.as_deref()),
            NFT_META_OIFNAME => name(self.oif.as_deref()),
            NFT_META_NFPROTO => known(&[u8::try_from(nfproto).unwrap_or_default()]),
            NFT_META_L4PROTO => known(&[self.proto.number()]),
            NFT_META_PROTOCOL => known(&ethertype.to_be_bytes()),
            _ => vec![None; IFNAMSIZ],
        }
    }

    /// The value of `ct key`.
    pub(super) fn ct(&self, key: c_int) -> Known {
        let status = DETERMINED | if self.host_port.is_some() { TRANSLATED } else { 0 };
        match key {
            NFT_CT_STATE => known(&NEW.to_ne_bytes()),
            NFT_CT_STATUS => known(&status.to_ne_bytes()),
            NFT_CT_DIRECTION => known(&[0]),
            NFT_CT_PROTOCOL => known(&[self.proto.number()]),
            NFT_CT_PROTO_DST => number(self.host_port.or(self.port)),
            _ => vec![None; IFNAMSIZ],
        }
    }

    /// Bytes of a header.
    pub(super) fn payload(&self, base: c_int, offset: usize, length: usize) -> Known {
        let header = match base {
            NFT_PAYLOAD_NETWORK_HEADER => self.network_header(),
            NFT_PAYLOAD_TRANSPORT_HEADER => [vec![None; 2], number(self.port)].concat(),
            _ => Vec::new(),
        };
        (offset..offset + length).map(|at| header.get(at).copied().flatten()).collect()
    }

    fn network_header(&self) -> Known {
        let (proto, addrs, width) = if self.is_ipv4 { (9, 12, 4) } else { (6, 8, 16) };
        let mut header = vec![None; addrs];
        header[proto] = Some(self.proto.number());
        for addr in [self.source, self.destination] {
            header.extend(match addr {
                Some(IpAddr::V4(ip)) => known(&ip.octets()),
                Some(IpAddr::V6(ip)) => known(&ip.octets()),
                None => vec![None; width],
            });
        }
        header
    }
}

fn number(port: Option<u16>) -> Known {
    port.map_or(vec![None; 2], |port| known(&port.to_be_bytes()))
}

/// A name, padded with zeros.
fn name(name: Option<&str>) -> Known {
    let Some(name) = name else { return vec![None; IFNAMSIZ] };
    let mut bytes = known(name.as_bytes());
    bytes.resize(IFNAMSIZ, Some(0));
    bytes
}
