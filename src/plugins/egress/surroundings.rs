//! What ADD finds out about the surroundings of a container: who it is, where the host is, and by
//! which links other hosts are reached.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use ipnet::IpNet;

use crate::framework::resolv;
use crate::iface::ContainerNetns;
use crate::netfilter::egress::find_container_link;
use crate::netlink::{FdbEntry, Link, LinkChange, MacAddress, Netlink};
use cni::CniResult;
use cni::error::{Error, ErrorContext, Result};

/// The maximum number of addresses of the host, besides routers, that the filter of a port knows.
const MOST_HOST_ADDRESSES: usize = 64;

/// Addresses that no network has, so that only default routes lead there: RFC 7600, and the
/// beginning of global unicast addresses.
const ANYWHERE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 8)),
    IpAddr::V6(Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 1)),
];

/// The addresses by which the container takes part in neighbour discovery: those that it has, and
/// the one that a kernel derives from the MAC address (RFC 4291, appendix A), as a virtual machine
/// behind the container does.
pub(super) fn link_local_addresses(
    inside: &ContainerNetns,
    link: &Link,
    mac: MacAddress,
) -> Result<Vec<IpAddr>> {
    let [first, second, third, rest @ ..] = mac.0;
    let mut octets = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, first ^ 2, second, third, 0xff, 0xfe, 0, 0, 0];
    octets[13..].copy_from_slice(&rest);
    let derived = Ipv6Addr::from(octets);
    let mut all = vec![IpAddr::V6(derived)];
    all.extend(inside.netlink.dump_addresses(link.index)?.into_iter().map(|addr| addr.net.addr()));
    all.retain(|ip| matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local()));
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

/// The networks of the container's addresses.
pub(super) fn networks_of(prev: &CniResult) -> Vec<IpNet> {
    let mut on_link: Vec<_> = prev.ips.iter().map(|ip| ip.address.trunc()).collect();
    on_link.sort_unstable();
    on_link.dedup();
    on_link
}

/// The addresses to which the host's routes lead by one of the interfaces: to a container behind a
/// bridge without a gateway they may lead away.
pub(super) fn find_answered(
    host: &Netlink,
    ips: &[IpAddr],
    interfaces: &[(u32, String)],
) -> Result<Vec<IpAddr>> {
    let mut answered = Vec::new();
    for ip in ips {
        let by = host.find_route_to(*ip, None)?.and_then(|route| route.oif);
        answered.extend(interfaces.iter().any(|(index, _)| Some(*index) == by).then_some(*ip));
    }
    Ok(answered)
}

/// The container's routers.
pub(super) fn routers_of(prev: &CniResult) -> Vec<IpAddr> {
    let gateways = prev.ips.iter().filter_map(|ip| ip.gateway);
    let mut routers: Vec<IpAddr> =
        gateways.chain(prev.routes.iter().filter_map(|route| route.gw)).collect();
    routers.sort_unstable();
    routers.dedup();
    routers
}

/// The name servers that the container may be told of: those of the result, and those of the host,
/// of which a local one has servers of its own (systemd-resolved.service(8)).
pub(super) fn name_servers(prev: &CniResult) -> Vec<IpAddr> {
    let files = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];
    let listed = files.into_iter().filter_map(|path| resolv::read_file(Path::new(path)).ok());
    let all = listed.flat_map(|dns| dns.nameservers).chain(prev.dns.nameservers.iter().cloned());
    let mut servers: Vec<IpAddr> = all.filter_map(|text| text.parse().ok()).collect();
    servers.retain(|ip: &IpAddr| !ip.is_loopback() && !ip.is_unspecified());
    servers.sort_unstable();
    servers.dedup();
    servers
}

/// The names of the links of default routes, as far as they are of a kind that links of containers
/// are: of a node that is a container itself, and of a bridge with the node's own card.
pub(super) fn find_uplinks(host: &Netlink) -> Result<Vec<String>> {
    let mut uplinks = Vec::new();
    for anywhere in ANYWHERE {
        uplinks.extend(find_container_link(host, anywhere)?.map(|link| link.name));
    }
    uplinks.sort_unstable();
    uplinks.dedup();
    Ok(uplinks)
}

/// Where the bridge knows the container's MAC address and its own.
pub(super) fn known_ports(host: &Netlink, bridge: &Link, mac: MacAddress) -> Result<Vec<FdbEntry>> {
    if bridge.bridge.is_some_and(|bridge| bridge.vlan_filtering) {
        // Each VLAN has entries of its own.
        return Ok(host.dump_fdb(bridge.index)?);
    }
    let mut known = Vec::new();
    for mac in [Some(mac), bridge.mac].into_iter().flatten() {
        known.extend(host.find_fdb_entry(bridge.index, mac)?);
    }
    Ok(known)
}

/// The MAC address of a bridge, by which the policy knows the router of its containers. Until an
/// address is set, a bridge has the lowest one of its ports, and would get another one with another
/// container.
pub(super) fn pin_mac(
    host: &Netlink,
    bridge: &Link,
    fdb: &[FdbEntry],
) -> Result<Option<MacAddress>> {
    if let Some(mac) = bridge.mac.filter(|_| {
        fdb.iter().any(|entry| Some(entry.mac) == bridge.mac && entry.port != bridge.index)
    }) {
        let set = host.change_link(bridge.index, LinkChange::new().set_mac(mac));
        set.context(|| {
            format!("set the MAC address of bridge \"{}\" to its present one", bridge.name)
        })?;
    }
    Ok(bridge.mac)
}

/// Fails if the bridge knows the MAC address at another port: the policy would hold for the packets
/// of that port.
pub(super) fn require_unused_mac(fdb: &[FdbEntry], end: &Link, mac: MacAddress) -> Result<()> {
    let Some(other) = fdb.iter().find(|entry| entry.mac == mac && entry.port != end.index) else {
        return Ok(());
    };
    let (name, port) = (&end.name, other.port);
    Err(Error::config(format!(
        "the MAC address {mac} of port \"{name}\" is in use at port {port} of the bridge"
    ))
    .with_details("a policy is bound to the address: request another one"))
}

/// The addresses by which packets arrive at the host.
pub(super) struct HostAddresses {
    own: Vec<IpAddr>,
    /// The broadcast and anycast addresses of the networks.
    groups: Vec<IpAddr>,
}

impl HostAddresses {
    /// Each address once; those of the public Internet, which policies allow most often, first.
    pub(super) fn of_networks(networks: impl Iterator<Item = IpNet> + Clone) -> HostAddresses {
        let own = networks.clone().map(|net| net.addr()).collect();
        let wide = networks
            .filter(|net| !net.addr().is_loopback() && net.prefix_len() + 1 < net.max_prefix_len());
        let mut known = HostAddresses {
            own,
            groups: wide.flat_map(|net| [net.network(), net.broadcast()]).collect(),
        };
        for list in [&mut known.own, &mut known.groups] {
            list.sort_unstable_by_key(|ip| (!is_public(*ip), *ip));
            list.dedup();
        }
        known
    }

    /// Those that the filter knows: the container's routers first.
    pub(super) fn for_filter(self, routers: &[IpAddr]) -> Vec<IpAddr> {
        let mut known: Vec<IpAddr> =
            routers.iter().filter(|router| self.own.contains(router)).copied().collect();
        known.extend(
            self.own.into_iter().filter(|addr| !addr.is_loopback()).take(MOST_HOST_ADDRESSES),
        );
        known.extend(self.groups.into_iter().take(2 * MOST_HOST_ADDRESSES));
        known
    }
}

fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !ip.is_private() && !ip.is_link_local() && !ip.is_loopback(),
        IpAddr::V6(ip) => !ip.is_unique_local() && !ip.is_unicast_link_local() && !ip.is_loopback(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_many_links_are_known_once_and_public_ones_first() {
        let network = |net: &str| net.parse::<IpNet>().unwrap();
        let mut all = vec![network("10.1.0.1/16"); 70];
        all.extend((0..70).map(|i| network(&format!("fe80::{i:x}/64"))));
        all.extend(["198.51.100.1/32", "2001:db8::1/64", "127.0.0.1/8"].map(network));
        let known = HostAddresses::of_networks(all.into_iter()).for_filter(&[]);
        let texts: Vec<String> = known.iter().take(3).map(ToString::to_string).collect();
        assert_eq!(texts, ["198.51.100.1", "2001:db8::1", "10.1.0.1"]);
        let groups: Vec<String> =
            known[MOST_HOST_ADDRESSES..].iter().map(ToString::to_string).collect();
        assert_eq!(groups.len(), 6, "{groups:?}");
    }
}
