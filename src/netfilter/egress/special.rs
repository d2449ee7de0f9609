//! The networks that are not the Internet.

use std::net::IpAddr;
use std::sync::LazyLock;

use ipnet::IpNet;

/// The metadata services of clouds and their neighbours: no larger network of a policy opens them.
const METADATA: [&str; 4] = ["169.254.0.0/16", "fd00:ec2::254", "168.63.129.16", "100.100.100.200"];

/// The networks that are not the Internet, besides the container's own: the profile `sandbox`
/// denies them.
const SPECIAL: [&str; 27] = [
    // link-local addresses: the metadata services of clouds and their neighbours
    "169.254.0.0/16",
    "fd00:ec2::254",
    "168.63.129.16",
    "100.100.100.200",
    // private, shared, loopback, protocol assignments, benchmarks, multicast, reserved, broadcast
    // (RFC 6890)
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/4",
    "240.0.0.0/4",
    // unspecified, loopback, unique local, link-local, site-local (RFC 3879), multicast
    "::",
    "::1",
    "fc00::/7",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
    // IPv4 addresses in IPv6 addresses: NAT64 (RFC 6052, RFC 8215), 6to4, Teredo
    "64:ff9b::/96",
    "64:ff9b:1::/48",
    "2002::/16",
    "2001::/32",
    // not global unicast (RFC 4291)
    "::/3",
    "4000::/2",
    "8000::/1",
];

/// The networks that are not the Internet, besides the container's own.
pub(super) fn special_networks() -> &'static [IpNet] {
    static NETWORKS: LazyLock<Vec<IpNet>> = LazyLock::new(|| parse_networks(&SPECIAL));
    &NETWORKS
}

/// The metadata services of clouds and their neighbours.
pub(super) fn metadata_networks() -> Vec<IpNet> {
    parse_networks(&METADATA)
}

fn parse_networks(texts: &[&str]) -> Vec<IpNet> {
    let address = |text: &str| text.parse().map(|addr: IpAddr| addr.into());
    texts.iter().filter_map(|text| text.parse().or_else(|_| address(text)).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_network_is_one() {
        assert_eq!(special_networks().len(), SPECIAL.len());
        assert_eq!(metadata_networks().len(), METADATA.len());
    }
}
