//! Option values: RFC 2132, domain search lists (RFC 3397), classless routes (RFC 3442).
//!
//! A malformed value counts as absent.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use ipnet::{Ipv4Net, ipv4_mask_to_prefix};

use super::super::text;

/// Options by code, with the bytes of their values.
pub type Dhcp4Options = BTreeMap<u8, Vec<u8>>;

/// Options as a list of pairs, because keys of JSON objects cannot be numbers. For
/// `#[serde(with)]`.
pub mod pairs {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Dhcp4Options;

    pub fn serialize<S: Serializer>(options: &Dhcp4Options, s: S) -> Result<S::Ok, S::Error> {
        options.iter().collect::<Vec<_>>().serialize(s)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Dhcp4Options, D::Error> {
        Ok(Vec::<(u8, Vec<u8>)>::deserialize(d)?.into_iter().collect())
    }
}

/// Subnet Mask.
pub const SUBNET_MASK: u8 = 1;
/// Router, in order of preference.
pub const ROUTERS: u8 = 3;
/// Domain Name Server, in order of preference.
pub const NAME_SERVERS: u8 = 6;
/// Host Name.
pub const HOST_NAME: u8 = 12;
/// Domain Name.
pub const DOMAIN: u8 = 15;
/// Interface MTU.
pub const MTU: u8 = 26;
/// Static Route: routes to classful networks.
pub const STATIC_ROUTES: u8 = 33;
/// Requested IP Address.
pub const REQUESTED: u8 = 50;
/// IP Address Lease Time, in seconds.
pub const LEASE_TIME: u8 = 51;
/// Option Overload: the fields `sname` and `file` contain options.
pub const OVERLOAD: u8 = 52;
/// DHCP Message Type.
pub const MESSAGE_TYPE: u8 = 53;
/// Server Identifier.
pub const SERVER: u8 = 54;
/// Parameter Request List.
pub const PARAMETERS: u8 = 55;
/// Message: the reason for a refusal, as text.
pub const MESSAGE: u8 = 56;
/// Maximum DHCP Message Size.
pub const MAX_SIZE: u8 = 57;
/// Renewal (T1) Time Value, in seconds.
pub const RENEWAL: u8 = 58;
/// Rebinding (T2) Time Value, in seconds.
pub const REBINDING: u8 = 59;
/// Vendor class identifier.
pub const VENDOR_CLASS: u8 = 60;
/// Client-identifier.
pub const CLIENT_ID: u8 = 61;
/// User Class (RFC 3004).
pub const USER_CLASS: u8 = 77;
/// Relay Agent Information, the last option of a message (RFC 3046).
pub const RELAY: u8 = 82;
/// Domain Search (RFC 3397).
pub const SEARCH: u8 = 119;
/// Classless Static Route (RFC 3442).
pub const CLASSLESS_ROUTES: u8 = 121;

fn value_bytes(options: &Dhcp4Options, code: u8) -> &[u8] {
    options.get(&code).map(Vec::as_slice).unwrap_or_default()
}

pub fn first_address(options: &Dhcp4Options, code: u8) -> Option<Ipv4Addr> {
    address_list(options, code).next()
}

/// The addresses of an option, without an incomplete last address.
pub fn address_list(options: &Dhcp4Options, code: u8) -> impl Iterator<Item = Ipv4Addr> {
    value_bytes(options, code).as_chunks::<4>().0.iter().map(|octets| Ipv4Addr::from(*octets))
}

pub fn number_value(options: &Dhcp4Options, code: u8) -> Option<u32> {
    value_bytes(options, code).try_into().ok().map(u32::from_be_bytes)
}

/// The prefix length of the subnet mask.
pub fn prefix_len(options: &Dhcp4Options) -> Option<u8> {
    let length = ipv4_mask_to_prefix(first_address(options, SUBNET_MASK)?).ok();
    length.filter(|length| *length > 0)
}

/// The MTU, unless it is below the minimum for IPv4 hosts.
pub fn interface_mtu(options: &Dhcp4Options) -> Option<u32> {
    let mtu = u16::from_be_bytes(value_bytes(options, MTU).try_into().ok()?);
    (mtu >= 576).then_some(mtu.into())
}

/// The domain name, without a trailing dot or the NUL that some servers append.
pub fn domain_name(options: &Dhcp4Options) -> Option<String> {
    let text = std::str::from_utf8(value_bytes(options, DOMAIN)).ok()?;
    let text = text.trim_end_matches('\0').trim_end_matches('.');
    text::is_domain(text).then(|| text.to_owned())
}

/// The reason for a refusal, without unprintable characters.
pub fn server_message(options: &Dhcp4Options) -> String {
    text::printable_text(value_bytes(options, MESSAGE))
}

/// The domain search list, with the name compression of RFC 1035, section 4.1.4.
pub fn search_domains(options: &Dhcp4Options) -> Vec<String> {
    text::decode_domains(value_bytes(options, SEARCH))
}

/// Classless routes: destination and router, which is 0.0.0.0 for a destination on the link. `None`
/// if the option is absent or malformed.
pub fn classless_routes(options: &Dhcp4Options) -> Option<Vec<(Ipv4Net, Ipv4Addr)>> {
    let mut rest = options.get(&CLASSLESS_ROUTES)?.as_slice();
    let mut routes = Vec::new();
    while let Some((width, tail)) = rest.split_first() {
        let (significant, tail) = tail.split_at_checked(usize::from(width.div_ceil(8)))?;
        let (gateway, tail) = tail.split_first_chunk::<4>()?;
        let mut octets = [0; 4];
        octets.get_mut(..significant.len())?.copy_from_slice(significant);
        routes.push((Ipv4Net::new(octets.into(), *width).ok()?, Ipv4Addr::from(*gateway)));
        rest = tail;
    }
    Some(routes)
}

/// Routes to classful networks. Multicast and reserved destinations have no class and are skipped.
pub fn static_routes(options: &Dhcp4Options) -> Vec<(Ipv4Net, Ipv4Addr)> {
    let addresses: Vec<_> = address_list(options, STATIC_ROUTES).collect();
    let class = |dst: Ipv4Addr| match dst.octets()[0] {
        0..128 => Some(8),
        128..192 => Some(16),
        192..224 => Some(24),
        _ => None,
    };
    addresses
        .as_chunks::<2>()
        .0
        .iter()
        .filter_map(|[dst, gw]| Some((Ipv4Net::new(*dst, class(*dst)?).ok()?, *gw)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(code: u8, value: &[u8]) -> Dhcp4Options {
        Dhcp4Options::from([(code, value.to_vec())])
    }

    #[test]
    fn subnet_masks_are_decoded() {
        let length = |mask: [u8; 4]| prefix_len(&one(SUBNET_MASK, &mask));
        assert_eq!(length([255, 255, 255, 0]), Some(24));
        assert_eq!(length([255, 255, 255, 255]), Some(32));
        assert_eq!(length([128, 0, 0, 0]), Some(1));
        for bad in [[0, 0, 0, 0], [255, 0, 255, 0], [0, 255, 255, 255]] {
            assert_eq!(length(bad), None, "{bad:?}");
        }
        assert_eq!(prefix_len(&one(SUBNET_MASK, &[255, 255, 255])), None);
    }

    #[test]
    fn classful_static_routes_are_decoded() {
        let value = [10, 0, 0, 0, 10, 1, 2, 3, 192, 168, 1, 0, 192, 168, 2, 3, 224, 0, 0, 1, 1, 2];
        let routes = static_routes(&one(STATIC_ROUTES, &value));
        let texts: Vec<_> = routes.iter().map(|(dst, gw)| format!("{dst} {gw}")).collect();
        assert_eq!(texts, ["10.0.0.0/8 10.1.2.3", "192.168.1.0/24 192.168.2.3"]);
        assert!(static_routes(&one(STATIC_ROUTES, &[224, 0, 0, 1, 10, 0, 0, 1])).is_empty());
    }

    #[test]
    fn classless_static_routes_are_decoded() {
        let value =
            [0, 10, 0, 0, 1, 8, 10, 10, 0, 0, 2, 25, 10, 229, 0, 128, 0, 0, 0, 0, 32, 1, 2, 3, 4];
        let all = [&value[..], &[9, 9, 9, 9]].concat();
        let routes = classless_routes(&one(CLASSLESS_ROUTES, &all)).unwrap();
        let texts: Vec<_> = routes.iter().map(|(dst, gw)| format!("{dst} {gw}")).collect();
        let expected = [
            "0.0.0.0/0 10.0.0.1",
            "10.0.0.0/8 10.0.0.2",
            "10.229.0.128/25 0.0.0.0",
            "1.2.3.4/32 9.9.9.9",
        ];
        assert_eq!(texts, expected);
        for bad in [&[33, 1, 2, 3, 4, 5, 9, 9, 9, 9][..], &[24, 10, 1], &[8, 10, 1, 2, 3], &[255]] {
            assert_eq!(classless_routes(&one(CLASSLESS_ROUTES, bad)), None, "{bad:?}");
        }
    }

    #[test]
    fn search_domains_are_decompressed() {
        let value = b"\x03eng\x05apple\x03com\x00\x09marketing\xc0\x04\xc0\x00";
        let expected = ["eng.apple.com", "marketing.apple.com", "eng.apple.com"];
        assert_eq!(search_domains(&one(SEARCH, value)), expected);
        for bad in [
            &b"\xc0\x00"[..],
            b"\x01a\xc0\x00",
            b"\x01a\xc0\x02",
            b"\x01a\xc0",
            b"\x3fa",
            b"\x80a\x00",
            b"\x03a b\x00",
            b"\x03a\nb\x00",
            b"",
        ] {
            assert_eq!(search_domains(&one(SEARCH, bad)), [""; 0], "{bad:?}");
        }
        let many: Vec<u8> = b"\x01a\x00".repeat(500);
        assert_eq!(search_domains(&one(SEARCH, &many)).len(), text::MOST_DOMAINS);
        let long: Vec<u8> =
            [[b"\x20".as_slice(), &[b'a'; 32]].concat().repeat(9), vec![0]].concat();
        assert_eq!(search_domains(&one(SEARCH, &long)), [""; 0]);
    }

    #[test]
    fn unsafe_text_is_rejected() {
        assert_eq!(domain_name(&one(DOMAIN, b"example.com\0")).as_deref(), Some("example.com"));
        for bad in [&b"a b"[..], b"a\nnameserver 6.6.6.6", b"", b".", b"a..b", b"\xff"] {
            assert_eq!(domain_name(&one(DOMAIN, bad)), None, "{bad:?}");
        }
        assert_eq!(server_message(&one(MESSAGE, b"no\n\x1b[31mway")), "no[31mway");
        assert_eq!(server_message(&one(MESSAGE, &[b'x'; 900])).len(), 200);
    }

    #[test]
    fn numbers_of_the_wrong_size_are_ignored() {
        assert_eq!(number_value(&one(LEASE_TIME, &[0, 0, 1, 0]), LEASE_TIME), Some(256));
        assert_eq!(number_value(&one(LEASE_TIME, &[1, 0]), LEASE_TIME), None);
        assert_eq!(interface_mtu(&one(MTU, &[5, 0xdc])), Some(1500));
        assert_eq!(interface_mtu(&one(MTU, &[0, 68])), None);
    }
}
