//! Keys and data of sets and maps: types by their numbers in `nft`, values as the kernel compares them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nix::libc::IFNAMSIZ;
use serde::{Deserialize, Serialize};

use super::super::Mac;
use super::super::attribute::ip;

/// The type of a key or of data, or of one part of a concatenation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    /// `ipv4_addr`
    Ipv4Addr,
    /// `ipv6_addr`
    Ipv6Addr,
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

/// Bits of each type's number in a concatenation in `nft`.
const TYPE_BITS: u32 = 6;

const BYTEORDER_INVALID: u32 = 0;
const BYTEORDER_HOST: u32 = 1;
const BYTEORDER_BIG: u32 = 2;

impl Type {
    /// `nft`'s number, the length of a single value, the byte order.
    const fn facts(self) -> (u32, usize, u32) {
        match self {
            Type::Ipv4Addr => (7, 4, BYTEORDER_BIG),
            Type::Ipv6Addr => (8, 16, BYTEORDER_BIG),
            Type::EtherAddr => (9, 6, BYTEORDER_BIG),
            Type::InetProto => (12, 1, BYTEORDER_BIG),
            Type::InetService => (13, 2, BYTEORDER_BIG),
            Type::Mark => (19, 4, BYTEORDER_HOST),
            Type::IfName => (41, IFNAMSIZ, BYTEORDER_HOST),
        }
    }

    const fn len(self) -> usize {
        self.facts().1
    }

    /// A value that matches no packet: an interface name cannot contain a slash.
    pub(super) fn unmatched(self) -> Value {
        match self {
            Type::Ipv4Addr => Ipv4Addr::UNSPECIFIED.into(),
            Type::Ipv6Addr => Ipv6Addr::UNSPECIFIED.into(),
            Type::EtherAddr => Mac([0; 6]).into(),
            Type::InetProto => L4::Other(u8::MAX).into(),
            Type::InetService => 0.into(),
            Type::Mark => Value::Mark(0),
            Type::IfName => "/cnibox".into(),
        }
    }

    fn read(self, bytes: &[u8]) -> Option<Value> {
        Some(match self {
            Type::Ipv4Addr | Type::Ipv6Addr => Value::Ip(ip(bytes)?),
            Type::EtherAddr => Value::Mac(Mac(bytes.try_into().ok()?)),
            Type::InetProto => Value::Proto(L4::from(*bytes.first()?)),
            Type::InetService => Value::Port(u16::from_be_bytes(bytes.try_into().ok()?)),
            Type::Mark => Value::Mark(u32::from_ne_bytes(bytes.try_into().ok()?)),
            Type::IfName => {
                let name = bytes.split(|b| *b == 0).next()?;
                Value::IfName(String::from_utf8_lossy(name).into_owned())
            }
        })
    }
}

/// The length of a value of `types`; the parts of a concatenation are aligned to 4 bytes.
pub(super) fn length(types: &[Type]) -> usize {
    match types {
        [alone] => alone.len(),
        parts => parts.iter().map(|part| part.len().next_multiple_of(4)).sum(),
    }
}

/// `nft`'s number of the concatenation of `types`.
pub(super) fn type_number(types: &[Type]) -> u32 {
    types.iter().fold(0, |number, part| number << TYPE_BITS | part.facts().0)
}

/// The byte order of values of `types`, for `nft`.
pub(super) fn byteorder(types: &[Type]) -> u32 {
    match types {
        [alone] => alone.facts().2,
        _ => BYTEORDER_INVALID,
    }
}

/// The values of `types` in the kernel's bytes; `None` for another length.
pub(super) fn read(types: &[Type], bytes: &[u8]) -> Option<Key> {
    let mut rest = bytes;
    let part = |kind: &Type| {
        let value = rest.get(..kind.len())?;
        rest = rest.get(kind.len().next_multiple_of(4)..).unwrap_or_default();
        kind.read(value)
    };
    types.iter().map(part).collect::<Option<_>>().map(Key)
}

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum L4 {
    /// TCP
    Tcp,
    /// UDP
    Udp,
    /// SCTP
    Sctp,
    /// Any other, by its number.
    Other(u8),
}

impl L4 {
    /// The number in the IP header.
    pub fn number(self) -> u8 {
        match self {
            L4::Tcp => 6,
            L4::Udp => 17,
            L4::Sctp => 132,
            L4::Other(number) => number,
        }
    }
}

impl From<u8> for L4 {
    fn from(number: u8) -> L4 {
        let named = [L4::Tcp, L4::Udp, L4::Sctp].into_iter().find(|l4| l4.number() == number);
        named.unwrap_or(L4::Other(number))
    }
}

impl fmt::Display for L4 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            L4::Tcp => f.write_str("tcp"),
            L4::Udp => f.write_str("udp"),
            L4::Sctp => f.write_str("sctp"),
            L4::Other(number) => write!(f, "{number}"),
        }
    }
}

/// A value of some [`Type`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    /// An address of either family.
    Ip(IpAddr),
    /// A hardware address.
    Mac(Mac),
    /// A transport protocol.
    Proto(L4),
    /// A port.
    Port(u16),
    /// A packet or connection mark.
    Mark(u32),
    /// The name of an interface.
    IfName(String),
}

impl Value {
    /// As the kernel compares it, without padding.
    pub(in crate::netlink) fn bytes(&self) -> Vec<u8> {
        match self {
            Value::Ip(IpAddr::V4(addr)) => addr.octets().to_vec(),
            Value::Ip(IpAddr::V6(addr)) => addr.octets().to_vec(),
            Value::Mac(mac) => mac.0.to_vec(),
            Value::Proto(proto) => vec![proto.number()],
            Value::Port(port) => port.to_be_bytes().to_vec(),
            Value::Mark(mark) => mark.to_ne_bytes().to_vec(),
            Value::IfName(name) => {
                let mut bytes = name.clone().into_bytes();
                bytes.resize(bytes.len().max(IFNAMSIZ), 0);
                bytes
            }
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Ip(addr) => addr.fmt(f),
            Value::Mac(mac) => mac.fmt(f),
            Value::Proto(proto) => proto.fmt(f),
            Value::Port(port) => port.fmt(f),
            Value::Mark(mark) => write!(f, "{mark:#010x}"),
            Value::IfName(name) => write!(f, "{name:?}"),
        }
    }
}

macro_rules! value_from {
    ($($from:ty => $make:expr),* $(,)?) => {
        $(impl From<$from> for Value {
            fn from(value: $from) -> Value {
                $make(value)
            }
        })*
    };
}

value_from! {
    IpAddr => Value::Ip,
    Ipv4Addr => |addr: Ipv4Addr| Value::Ip(addr.into()),
    Ipv6Addr => |addr: Ipv6Addr| Value::Ip(addr.into()),
    Mac => Value::Mac,
    L4 => Value::Proto,
    u16 => Value::Port,
    &str => |name: &str| Value::IfName(name.to_owned()),
}

/// One value or a concatenation: a key, or the data of a map. Converted from a value or a tuple of
/// values: `(L4::Tcp, 80).into()`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub Vec<Value>);

impl Key {
    /// As the kernel compares it.
    pub(super) fn bytes(&self) -> Vec<u8> {
        if let [alone] = self.0.as_slice() {
            return alone.bytes();
        }
        let mut bytes = Vec::new();
        for part in &self.0 {
            bytes.extend(part.bytes());
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, part) in self.0.iter().enumerate() {
            write!(f, "{}{part}", if at == 0 { "" } else { " . " })?;
        }
        Ok(())
    }
}

impl<A> From<A> for Key
where
    Value: From<A>,
{
    fn from(alone: A) -> Key {
        Key(vec![alone.into()])
    }
}

macro_rules! key_from {
    ($($part:ident),+) => {
        impl<$($part: Into<Value>),+> From<($($part,)+)> for Key {
            #[expect(non_snake_case, reason = "named as their types")]
            fn from(($($part,)+): ($($part,)+)) -> Key {
                Key(vec![$($part.into()),+])
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
        let types = [Type::Ipv4Addr, Type::InetProto, Type::InetService];
        assert_eq!(type_number(&types), 0x730d);
        assert_eq!(length(&types), 12);
        assert_eq!(length(&[Type::InetService]), 2);
    }

    #[test]
    fn parts_are_padded_and_read_back() {
        let types = [Type::Ipv4Addr, Type::InetProto, Type::InetService];
        let key = Key::from((Ipv4Addr::new(10, 0, 0, 1), L4::Tcp, 80));
        assert_eq!(key.bytes(), [10, 0, 0, 1, 6, 0, 0, 0, 0, 80, 0, 0]);
        assert_eq!(read(&types, &key.bytes()), Some(key.clone()));
        assert_eq!(key.to_string(), "10.0.0.1 . tcp . 80");
        let name = Key::from("eth0");
        assert_eq!(read(&[Type::IfName], &name.bytes()), Some(name.clone()));
        assert_eq!(name.to_string(), "\"eth0\"");
    }

    #[test]
    fn a_value_of_another_size_is_none() {
        assert_eq!(read(&[Type::Ipv4Addr], &[1, 2]), None);
    }
}
