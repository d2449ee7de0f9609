//! Addresses and prefixes in CNI's notation, with functions for serde's `deserialize_with`.
//!
//! Host bits are kept (`10.1.0.5/16`). An IPv4-mapped IPv6 address is read as the IPv4 address.
//! Leading zeros and zones are refused.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net};
use serde::de::{Deserialize, Deserializer, Error as _};

use crate::error::Error;

/// Parses an address.
pub fn parse_ip(text: &str) -> Result<IpAddr, String> {
    let ip: IpAddr = text.parse().map_err(|_| format!("invalid IP address: {text}"))?;
    Ok(ip.to_canonical())
}

/// Parses `address/prefix`.
pub fn parse_cidr(text: &str) -> Result<IpNet, String> {
    // ipnet's own parser accepts leading zeros.
    let parts = text.split_once('/').and_then(|(ip, len)| {
        let len = len.bytes().all(|b| b.is_ascii_digit()).then_some(len)?.parse().ok()?;
        IpNet::new(ip.parse().ok()?, len).ok()
    });
    parts.map(canonical_net).ok_or_else(|| format!("invalid CIDR address: {text}"))
}

/// Parses the networks and addresses of a configuration's key, without host bits.
pub fn parse_networks(key: &str, texts: &[String]) -> Result<Vec<IpNet>, Error> {
    let parse = |(at, text): (usize, &String)| {
        let net = parse_cidr(text).or_else(|_| parse_ip(text).map(host_net));
        net.map(|net| net.trunc()).map_err(|_| {
            Error::config(format!("{key}[{at}] {text:?}: not a network or address"))
                .with_details("write it as \"203.0.113.0/24\", \"2001:db8::/32\" or \"192.0.2.7\"")
        })
    };
    texts.iter().enumerate().map(parse).collect()
}

/// Parses an address with or without a prefix, which is dropped.
pub fn parse_ip_or_cidr(text: &str) -> Result<IpAddr, String> {
    let parsed =
        if text.contains('/') { parse_cidr(text).map(|net| net.addr()) } else { parse_ip(text) };
    parsed.map_err(|_| format!("invalid IP address {text}"))
}

/// The largest prefix length of `ip`'s family.
pub fn max_prefix_len(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 32 } else { 128 }
}

/// `ip/32` or `ip/128`.
pub fn host_net(ip: IpAddr) -> IpNet {
    IpNet::from(ip)
}

fn canonical_net(net: IpNet) -> IpNet {
    let IpNet::V6(v6) = net else { return net };
    let mapped = v6.addr().to_ipv4_mapped().zip(v6.prefix_len().checked_sub(96));
    mapped.and_then(|(v4, len)| Ipv4Net::new(v4, len).ok()).map_or(net, IpNet::V4)
}

/// Deserializes `Option<IpAddr>`: `""` is `None`.
pub fn deserialize_optional_ip<'de, D: Deserializer<'de>>(
    d: D,
) -> Result<Option<IpAddr>, D::Error> {
    match Option::<String>::deserialize(d)?.as_deref() {
        None | Some("") => Ok(None),
        Some(text) => parse_ip(text).map(Some).map_err(D::Error::custom),
    }
}

/// Deserializes `Option<IpNet>`: `""` is an error.
pub fn deserialize_optional_cidr<'de, D: Deserializer<'de>>(
    d: D,
) -> Result<Option<IpNet>, D::Error> {
    let text = Option::<String>::deserialize(d)?;
    text.map(|text| parse_cidr(&text).map_err(D::Error::custom)).transpose()
}

/// Deserializes `IpNet`.
pub fn deserialize_cidr<'de, D: Deserializer<'de>>(d: D) -> Result<IpNet, D::Error> {
    parse_cidr(&String::deserialize(d)?).map_err(D::Error::custom)
}

/// Deserializes a list of addresses, each with or without a prefix, which is dropped. An empty text
/// is no request.
pub fn deserialize_requested<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<IpAddr>, D::Error> {
    let texts = Vec::<String>::deserialize(d)?;
    let given = texts.iter().filter(|text| !text.trim().is_empty());
    given.map(|text| parse_ip_or_cidr(text).map_err(D::Error::custom)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_prefixes_are_parsed_as_the_reference_does() {
        assert_eq!(parse_ip("::ffff:10.1.2.3").unwrap().to_string(), "10.1.2.3");
        assert_eq!(parse_cidr("10.1.0.5/16").unwrap().to_string(), "10.1.0.5/16");
        assert_eq!(parse_cidr("::ffff:10.1.0.5/112").unwrap().to_string(), "10.1.0.5/16");
        assert_eq!(parse_cidr("2001:DB8::/32").unwrap().to_string(), "2001:db8::/32");
        for bad in ["", "10.1.2", "10.1.2.03", "fe80::1%eth0", "10.1.2.3/24"] {
            assert_eq!(parse_ip(bad).unwrap_err(), format!("invalid IP address: {bad}"));
        }
        for bad in ["", "10.1.2.3", "10.1.2.3/33", "10.1.2.3/", "10.1.2.03/24", "::/129"] {
            assert_eq!(parse_cidr(bad).unwrap_err(), format!("invalid CIDR address: {bad}"));
        }
        assert_eq!(parse_ip_or_cidr("abc").unwrap_err(), "invalid IP address abc");
        assert_eq!(parse_ip_or_cidr("10.0.0.5/8").unwrap().to_string(), "10.0.0.5");
    }
}
