//! The bridge itself, shared by the containers of its networks, and its addresses as their gateway.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{BridgeConfig, BridgePlan};
use crate::framework::Rollback;
use crate::iface::{configure, forwarding, overlap, veth};
use crate::netlink::{Link, LinkChange, LinkKind, MacAddress, Netlink, NewLink, OnOffSetting};
use cni::ResultRoute;
use cni::error::{Error, ErrorContext, Result};

/// A bridge, or the gateway's interface of a VLAN.
pub(super) struct SharedBridge {
    pub(super) link: Link,
    /// Whether its MAC and MTU are known to have been set: otherwise they follow those of the
    /// ports.
    pub(super) pinned: bool,
}

/// Creates the bridge with the address `mac`, or adopts the existing one; either way it is up.
pub(super) fn ensure_bridge(
    host: &Netlink,
    plan: &BridgePlan<'_>,
    mtu: u32,
    mac: MacAddress,
) -> Result<SharedBridge> {
    let conf = plan.conf;
    let name = &conf.bridge;
    let failed = || format!("failed to create bridge \"{name}\"");
    if let Some(link) = host.find_link(name)? {
        return adopt_bridge(host, link, plan).context(failed);
    }
    // A bridge with a MAC from the start does not take over the MAC of a port.
    let kind = LinkKind::Bridge { vlan_filtering: plan.vlans.filtering.then_some(true) };
    let mut bridge = NewLink::new(name, kind).with_mtu(mtu).set_up();
    // A bridge whose MAC was set has a carrier only with a running port, and without carrier no
    // IPv6 address is usable. While the container's end stays down no port runs, so the MAC is
    // set later.
    let late = conf.disable_container_interface;
    if !late {
        bridge = bridge.with_mac(mac);
    }
    if conf.promisc_mode {
        bridge = bridge.set_promisc();
    }
    match host.add_link(&bridge) {
        Ok(()) => {}
        // Another ADD was faster.
        Err(error) if error.is_exists() => {
            return adopt_bridge(host, host.require_link(name)?, plan).context(failed);
        }
        Err(error) => return Err(error).context(failed),
    }
    let mut link = host.require_link(name)?;
    harden_bridge(host, &link, conf)?;
    if late {
        host.change_link(link.index, LinkChange::new().set_mac(mac))?;
        link.mac = Some(mac);
    }
    Ok(SharedBridge { link, pinned: true })
}

fn adopt_bridge(host: &Netlink, link: Link, plan: &BridgePlan<'_>) -> Result<SharedBridge> {
    require_bridge(&link)?;
    if !plan.vlans.require_filtering(host, &link)? {
        host.change_link(link.index, LinkChange::enable_vlan_filtering())
            .context(|| format!("could not switch on VLAN filtering of \"{}\"", link.name))?;
    }
    harden_bridge(host, &link, plan.conf)?;
    let promisc = plan.conf.promisc_mode && link.promiscuity == 0;
    if !link.up || promisc {
        let up = LinkChange::new().set_up();
        let change = if promisc { up.set_promisc(OnOffSetting::On) } else { up };
        host.change_link(link.index, change)?;
    }
    Ok(SharedBridge { link, pinned: false })
}

pub(super) fn require_bridge(link: &Link) -> Result<()> {
    if link.kind.as_deref() == Some("bridge") {
        return Ok(());
    }
    Err(Error::internal(format!("\"{}\" already exists but is not a bridge", link.name))
        .with_details("choose another name for the key \"bridge\", or remove that link"))
}

/// Protects the host from the containers, also on a bridge of another program: no router
/// advertisements and, with `macspoofchk`, no learning from link-local frames, which bypass the
/// check of source MACs.
fn harden_bridge(host: &Netlink, bridge: &Link, conf: &BridgeConfig) -> Result<()> {
    veth::refuse_advertisements(bridge);
    let learns = bridge.bridge.unwrap_or_default().learns_link_local;
    if !conf.macspoofchk || learns != Some(true) {
        return Ok(());
    }
    let change = LinkChange::no_link_local_learning();
    host.change_link(bridge.index, change).context(|| "failed to setup spoof-check")
}

/// The first address of a network: the gateway of a range without a configured gateway.
pub(super) fn first_host_address(net: IpNet) -> IpAddr {
    match net.network() {
        IpAddr::V4(ip) => Ipv4Addr::from_bits(ip.to_bits() | 1).into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() | 1).into(),
    }
}

/// Adds a default route through `gw` unless its family has a default route. A default route without
/// a gateway counts: it will use the same gateway.
pub(super) fn add_default_route(routes: &mut Vec<ResultRoute>, gw: IpAddr) {
    let dst =
        if gw.is_ipv4() { Ipv4Net::default().into() } else { IpNet::from(Ipv6Net::default()) };
    if !routes.iter().any(|route| route.dst.trunc() == dst) {
        routes.push(ResultRoute { gw: Some(gw), ..ResultRoute::for_destination(dst) });
    }
}

/// Warns of subnets of a new bridge that the node routes to another link.
pub(super) fn warn_of_routes(host: &Netlink, bridge: &str, gateways: &[IpNet]) {
    match overlap::conflicting_routes(host, gateways, bridge) {
        Ok(warnings) => warnings.iter().for_each(|warning| warn!("{warning}")),
        Err(error) => debug!("{error}"),
    }
}

/// Adds the missing gateway addresses to the bridge, or to the interface of a VLAN, and enables
/// forwarding for their families. Removes conflicting addresses if `forceAddress` allows it, which
/// a failed ADD restores.
pub(super) fn ensure_gateways<'a>(
    host: &'a Netlink,
    bridge: &SharedBridge,
    conf: &BridgeConfig,
    gateways: &[IpNet],
    undo: &mut Rollback<'a>,
) -> Result<()> {
    let name = &bridge.link.name;
    let failed = if *name == conf.bridge {
        "failed to set bridge addr"
    } else {
        "failed to set vlan interface for bridge with addr"
    };
    forwarding::enable_for_link(host, &bridge.link, gateways)?;
    let present = host.dump_addresses(bridge.link.index)?;
    let mut missing = gateways.to_vec();
    missing.retain(|gateway| !present.iter().any(|addr| addr.net == *gateway));
    for gateway in &missing {
        // The gateways of other ranges of this network do not conflict.
        let foreign = present.iter().filter(|addr| !gateways.contains(&addr.net));
        for addr in foreign.filter(|addr| addresses_conflict(&addr.net, gateway)) {
            if !conf.force_address {
                let msg = format!(
                    "{failed}: \"{name}\" already has an IP address different from {gateway}"
                );
                let net = addr.net;
                return Err(Error::internal(msg).with_details(format!(
                    "give this network a bridge of its own, with another name in the key \
                     \"bridge\"; or, if no container uses {net} any more: ip addr del {net} dev \
                     {name}"
                )));
            }
            let (index, former) = (addr.index, configure::request_to_restore(addr));
            undo.add_step(format!("restore {} of \"{name}\"", addr.net), move || {
                Ok(host.add_address(index, &former)?)
            });
            host.delete_address(addr.index, addr.net)
                .context(|| format!("{failed}: could not remove IP address from \"{name}\""))?;
        }
        add_gateway(host, bridge, *gateway).context(|| failed)?;
    }
    configure::wait_for_ipv6(host, &mut missing.iter().map(IpNet::addr))
}

/// Adds a gateway's address and pins the MAC of the bridge.
pub(super) fn add_gateway(host: &Netlink, bridge: &SharedBridge, gateway: IpNet) -> Result<()> {
    let Link { index, name, mac, .. } = &bridge.link;
    match configure::add_gateway_address(host, &bridge.link, gateway) {
        // Another ADD was faster.
        Err(error) if error.is_exists() => return Ok(()),
        added => added.context(|| format!("could not add IP address {gateway} to \"{name}\""))?,
    }
    match *mac {
        // A bridge of another program follows the lowest MAC of its ports until its MAC is set;
        // containers keep the gateway's MAC in their neighbour tables.
        Some(mac) if !bridge.pinned => {
            // A bridge without ports may have the MAC 00:00:00:00:00:00, which the kernel does not
            // accept.
            let mac = if mac == MacAddress([0; 6]) { MacAddress::random_local() } else { mac };
            host.change_link(*index, LinkChange::new().set_mac(mac))
                .context(|| "could not set bridge's mac")
        }
        _ => Ok(()),
    }
}

/// IPv4: a bridge has one address. IPv6: several, unless their subnets overlap, which those of
/// link-local addresses always do: the kernel adds one to each link.
fn addresses_conflict(present: &IpNet, gateway: &IpNet) -> bool {
    match (present, gateway) {
        (IpNet::V4(_), IpNet::V4(_)) => true,
        (IpNet::V6(present), _) if present.addr().is_unicast_link_local() => false,
        (IpNet::V6(_), IpNet::V6(_)) => networks_overlap(present, gateway),
        _ => false,
    }
}

/// Whether the network of one address contains the other address.
pub(super) fn networks_overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(&b.addr()) || b.contains(&a.addr())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn ranges_without_a_gateway_get_their_first_address() {
        assert_eq!(first_host_address(net("10.1.2.7/24")).to_string(), "10.1.2.1");
        assert_eq!(first_host_address(net("2001:db8::ff/64")).to_string(), "2001:db8::1");
    }

    #[test]
    fn each_family_gets_one_default_route() {
        let mut routes = vec![ResultRoute::for_destination(net("0.0.0.0/0"))];
        add_default_route(&mut routes, "10.0.0.1".parse().unwrap());
        assert_eq!(routes.len(), 1);
        add_default_route(&mut routes, "2001:db8::1".parse().unwrap());
        add_default_route(&mut routes, "2001:db8::2".parse().unwrap());
        assert_eq!(routes.len(), 2);
        assert_eq!(routes[1].gw.map(|gw| gw.to_string()).as_deref(), Some("2001:db8::1"));
    }

    #[test]
    fn overlapping_addresses_conflict() {
        assert!(addresses_conflict(&net("10.0.0.1/8"), &net("192.168.0.1/24")));
        assert!(addresses_conflict(&net("2001:db8::1/64"), &net("2001:db8::2/64")));
        assert!(!addresses_conflict(&net("2001:db8:1::1/64"), &net("2001:db8:2::1/64")));
        assert!(!addresses_conflict(&net("2001:db8::1/64"), &net("10.0.0.1/8")));
        assert!(!addresses_conflict(&net("fe80::fc/64"), &net("fe80::1/64")));
    }
}
