//! Keys and data of sets and maps: types by their numbers in nft, values as the kernel compares
//! them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nix::libc::IFNAMSIZ;
use serde::{Deserialize, Serialize};

use super::super::MacAddress;
use super::super::attribute::ip_from_bytes;

/// The type of a key or of data, or of one part of a concatenation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ValueType {
    /// `ipv4_addr`
    Ipv4Addr,
    /// `ipv6_addr`
    Ipv6Addr,
    /// `typeof @th,64,128`: the target of neighbour discovery, an IPv6 address.
    DiscoveryTarget,
    /// `ether_addr`
    EtherAddr,
    /// `inet_proto`: the number of a transport protocol.
    InetProto,
    /// `inet_service`: a port.
    InetService,
    /// `mark`
    Mark,
    /// `ifname`
    IfName,
}

/// Number of bits for each part in nft's number of a concatenation.
const TYPE_BITS: u32 = 6;

const BYTEORDER_INVALID: u32 = 0;
const BYTEORDER_HOST: u32 = 1;
const BYTEORDER_BIG: u32 = 2;

impl ValueType {
    /// The number of the type in nft, the length of a value in bytes, the byte order.
    const fn type_properties(self) -> (u32, usize, u32) {
        match self {
            ValueType::Ipv4Addr => (7, 4, BYTEORDER_BIG),
            ValueType::Ipv6Addr => (8, 16, BYTEORDER_BIG),
            ValueType::DiscoveryTarget => (4, 16, BYTEORDER_BIG),
            ValueType::EtherAddr => (9, 6, BYTEORDER_BIG),
            ValueType::InetProto => (12, 1, BYTEORDER_BIG),
            ValueType::InetService => (13, 2, BYTEORDER_BIG),
            ValueType::Mark => (19, 4, BYTEORDER_HOST),
            ValueType::IfName => (41, IFNAMSIZ, BYTEORDER_HOST),
        }
    }

    const fn len(self) -> usize {
        self.type_properties().1
    }

    /// A value that matches no packet: an interface name cannot contain a slash.
    pub(super) fn unmatched_value(self) -> NftValue {
        match self {
            ValueType::Ipv4Addr => Ipv4Addr::UNSPECIFIED.into(),
            ValueType::Ipv6Addr | ValueType::DiscoveryTarget => Ipv6Addr::UNSPECIFIED.into(),
            ValueType::EtherAddr => MacAddress([0; 6]).into(),
            ValueType::InetProto => TransportProtocol::Other(u8::MAX).into(),
            ValueType::InetService => 0.into(),
            ValueType::Mark => NftValue::Mark(0),
            ValueType::IfName => "/cnibox".into(),
        }
    }

    fn parse_value(self, bytes: &[u8]) -> Option<NftValue> {
        Some(match self {
            ValueType::Ipv4Addr | ValueType::Ipv6Addr | ValueType::DiscoveryTarget => {
                NftValue::Ip(ip_from_bytes(bytes)?)
            }
            ValueType::EtherAddr => NftValue::Mac(MacAddress(bytes.try_into().ok()?)),
            ValueType::InetProto => NftValue::Proto(TransportProtocol::from(*bytes.first()?)),
            ValueType::InetService => NftValue::Port(u16::from_be_bytes(bytes.try_into().ok()?)),
            ValueType::Mark => NftValue::Mark(u32::from_ne_bytes(bytes.try_into().ok()?)),
            ValueType::IfName => {
                let name = bytes.split(|b| *b == 0).next()?;
                NftValue::IfName(String::from_utf8_lossy(name).into_owned())
            }
        })
    }
}

/// The length of a value of `types` in bytes; the parts of a concatenation are aligned to 4 bytes.
pub(super) fn length_of_types(types: &[ValueType]) -> usize {
    match types {
        [alone] => alone.len(),
        parts => parts.iter().map(|part| part.len().next_multiple_of(4)).sum(),
    }
}

/// The number of the concatenation of `types` in nft.
pub(super) fn type_number(types: &[ValueType]) -> u32 {
    types.iter().fold(0, |number, part| number << TYPE_BITS | part.type_properties().0)
}

/// The byte order of values of `types`, for `nft`.
pub(super) fn byte_order(types: &[ValueType]) -> u32 {
    match types {
        [alone] => alone.type_properties().2,
        _ => BYTEORDER_INVALID,
    }
}

/// Parses a value of `types` in the kernel's form; `None` if the length is another one.
pub(super) fn parse_key(types: &[ValueType], bytes: &[u8]) -> Option<ElementKey> {
    let mut rest = bytes;
    types
        .iter()
        .map(|kind| {
            let value = rest.get(..kind.len())?;
            rest = rest.get(kind.len().next_multiple_of(4)..).unwrap_or_default();
            kind.parse_value(value)
        })
        .collect::<Option<_>>()
        .map(ElementKey)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TransportProtocol {
    Tcp,
    Udp,
    Sctp,
    /// Any other, by its number.
    Other(u8),
}

impl TransportProtocol {
    /// The number in the IP header.
    pub fn protocol_number(self) -> u8 {
        match self {
            TransportProtocol::Tcp => 6,
            TransportProtocol::Udp => 17,
            TransportProtocol::Sctp => 132,
            TransportProtocol::Other(number) => number,
        }
    }
}

impl From<u8> for TransportProtocol {
    fn from(number: u8) -> TransportProtocol {
        let named = [TransportProtocol::Tcp, TransportProtocol::Udp, TransportProtocol::Sctp]
            .into_iter()
            .find(|l4| l4.protocol_number() == number);
        named.unwrap_or(TransportProtocol::Other(number))
    }
}

impl fmt::Display for TransportProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TransportProtocol::Tcp => f.write_str("tcp"),
            TransportProtocol::Udp => f.write_str("udp"),
            TransportProtocol::Sctp => f.write_str("sctp"),
            TransportProtocol::Other(number) => write!(f, "{number}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum NftValue {
    /// An address of either family.
    Ip(IpAddr),
    Mac(MacAddress),
    Proto(TransportProtocol),
    Port(u16),
    /// A packet or connection mark.
    Mark(u32),
    /// The name of an interface.
    IfName(String),
}

impl NftValue {
    /// The value as the kernel compares it, without padding.
    pub(in crate::netlink) fn to_bytes(&self) -> Vec<u8> {
        match self {
            NftValue::Ip(IpAddr::V4(addr)) => addr.octets().to_vec(),
            NftValue::Ip(IpAddr::V6(addr)) => addr.octets().to_vec(),
            NftValue::Mac(mac) => mac.0.to_vec(),
            NftValue::Proto(proto) => vec![proto.protocol_number()],
            NftValue::Port(port) => port.to_be_bytes().to_vec(),
            NftValue::Mark(number) => number.to_ne_bytes().to_vec(),
            NftValue::IfName(name) => {
                let mut bytes = name.clone().into_bytes();
                bytes.resize(bytes.len().max(IFNAMSIZ), 0);
                bytes
            }
        }
    }
}

impl fmt::Display for NftValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NftValue::Ip(addr) => addr.fmt(f),
            NftValue::Mac(mac) => mac.fmt(f),
            NftValue::Proto(proto) => proto.fmt(f),
            NftValue::Port(port) => port.fmt(f),
            NftValue::Mark(mark) => write!(f, "{mark:#010x}"),
            NftValue::IfName(name) => write!(f, "{name:?}"),
        }
    }
}

macro_rules! value_from {
    ($($from:ty => $make:expr),* $(,)?) => {
        $(impl From<$from> for NftValue {
            fn from(value: $from) -> NftValue {
                $make(value)
            }
        })*
    };
}

value_from! {
    IpAddr => NftValue::Ip,
    Ipv4Addr => |addr: Ipv4Addr| NftValue::Ip(addr.into()),
    Ipv6Addr => |addr: Ipv6Addr| NftValue::Ip(addr.into()),
    MacAddress => NftValue::Mac,
    TransportProtocol => NftValue::Proto,
    u16 => NftValue::Port,
    &str => |name: &str| NftValue::IfName(name.to_owned()),
}

/// One value or a concatenation: a key, or the data of a map. A value or a tuple of values can be
/// converted to it: `(TransportProtocol::Tcp, 80).into()`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ElementKey(pub Vec<NftValue>);

impl ElementKey {
    /// The key as the kernel compares it.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        if let [alone] = self.0.as_slice() {
            return alone.to_bytes();
        }
        let mut bytes = Vec::new();
        for part in &self.0 {
            bytes.extend(part.to_bytes());
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }
}

impl fmt::Display for ElementKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, part) in self.0.iter().enumerate() {
            write!(f, "{}{part}", if at == 0 { "" } else { " . " })?;
        }
        Ok(())
    }
}

impl<A> From<A> for ElementKey
where
    NftValue: From<A>,
{
    fn from(alone: A) -> ElementKey {
        ElementKey(vec![alone.into()])
    }
}

macro_rules! key_from {
    ($($part:ident),+) => {
        impl<$($part: Into<NftValue>),+> From<($($part,)+)> for ElementKey {
            #[expect(non_snake_case, reason = "named as their types")]
            fn from(($($part,)+): ($($part,)+)) -> ElementKey {
                ElementKey(vec![$($part.into()),+])
            }
        }
    };
}

key_from!(A, B);
key_from!(A, B, C);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_the_numbers_of_nft() {
        let types = [ValueType::Ipv4Addr, ValueType::InetProto, ValueType::InetService];
        assert_eq!(type_number(&types), 0x730d);
        assert_eq!(length_of_types(&types), 12);
        assert_eq!(length_of_types(&[ValueType::InetService]), 2);
    }

    #[test]
    fn parts_of_concatenations_are_padded_and_round_trip() {
        let types = [ValueType::Ipv4Addr, ValueType::InetProto, ValueType::InetService];
        let key = ElementKey::from((Ipv4Addr::new(10, 0, 0, 1), TransportProtocol::Tcp, 80));
        assert_eq!(key.to_bytes(), [10, 0, 0, 1, 6, 0, 0, 0, 0, 80, 0, 0]);
        assert_eq!(parse_key(&types, &key.to_bytes()), Some(key.clone()));
        assert_eq!(key.to_string(), "10.0.0.1 . tcp . 80");
        let name = ElementKey::from("eth0");
        assert_eq!(parse_key(&[ValueType::IfName], &name.to_bytes()), Some(name.clone()));
        assert_eq!(name.to_string(), "\"eth0\"");
    }

    #[test]
    fn values_of_the_wrong_size_are_ignored() {
        assert_eq!(parse_key(&[ValueType::Ipv4Addr], &[1, 2]), None);
    }
}
