//! The MAC that the runtime or the container's annotation requests for the container's end.

use super::{BridgeConfig, BridgePlan};
use crate::framework::CallContext;
use crate::netfilter::names::parse_label;
use crate::netfilter::{PacketFilter, spoof};
use crate::netlink::{BridgePortVlans, Link, MacAddress, Netlink};
use cni::error::{Error, Result};

/// `runtimeConfig.mac`, else `args.cni.mac`, else `MAC` of `CNI_ARGS`.
pub(super) fn requested_address(
    cx: &CallContext<'_>,
    conf: &BridgeConfig,
) -> Result<Option<MacAddress>> {
    let from_env = cx.mac_arg()?;
    let sources = [&conf.runtime_config.mac, &conf.args.cni.mac, &from_env];
    let text = sources.into_iter().find(|text| !text.is_empty());
    text.map(|text| MacAddress::parse_unicast(text)).transpose()
}

/// Fails if the requested MAC is in use on the bridge: `macspoofchk` would accept it, and the
/// bridge would also send the frames of the MAC's owner to the new port. `port` is the new port,
/// registered but still down, so that of two concurrent ADDs with one MAC at most one succeeds.
pub(super) fn require_unused(
    host: &Netlink,
    plan: &BridgePlan<'_>,
    bridge: &Link,
    port: &Link,
) -> Result<()> {
    let Some(mac) = plan.mac else { return Ok(()) };
    let mut links = host.dump_links()?;
    links.retain(|link| link.index != port.index);
    let found =
        links.iter().find(|link| link.mac == Some(mac) && is_on_bridge(bridge, link, &links));
    let holder = match found {
        None => find_mac_holder(host, plan, bridge, &links)?,
        on_host => on_host,
    };
    let Some(holder) = holder else { return Ok(()) };
    let (name, bridge) = (&holder.name, &bridge.name);
    let msg = format!("the MAC {mac} is in use on bridge \"{bridge}\", by \"{name}\"");
    Err(Error::internal(msg).with_details(match parse_label(&holder.alias) {
        Some((id, ifname, network)) => format!(
            "{ifname} of container {id} has it in network \"{network}\": request another MAC, or \
             detach that container first"
        ),
        None => "request another MAC".to_owned(),
    }))
}

/// Whether frames of the bridge reach this link of the host: the bridge and its ports, links on top
/// of the bridge, and the other ends of ports.
fn is_on_bridge(bridge: &Link, link: &Link, links: &[Link]) -> bool {
    let is_port = |index: u32| {
        links.iter().any(|port| port.index == index && port.master == Some(bridge.index))
    };
    let below = link.link.filter(|_| link.link_netnsid.is_none());
    link.index == bridge.index
        || link.master == Some(bridge.index)
        || below.is_some_and(|below| below == bridge.index || is_port(below))
}

/// The port of another container that may send with the requested MAC, or behind which the bridge
/// has seen it. A MAC behind any other port, such as an uplink, may be this container's own, in its
/// former place.
fn find_mac_holder<'l>(
    host: &Netlink,
    plan: &BridgePlan<'_>,
    bridge: &Link,
    links: &'l [Link],
) -> Result<Option<&'l Link>> {
    let Some(mac) = plan.mac else { return Ok(None) };
    let checked = spoof::ports_with_mac(&PacketFilter::new(), mac)?;
    let mut seen = host.dump_fdb(bridge.index)?;
    seen.retain(|entry| entry.mac == mac);
    let filters = bridge.bridge.unwrap_or_default().vlan_filtering;
    let vlans = if filters { host.dump_port_vlans()? } else { Vec::new() };
    Ok(links.iter().find(|link| {
        link.master == Some(bridge.index)
            && link.link_netnsid.is_some()
            && (checked.iter().any(|port| port.name == link.name)
                || seen.iter().any(|entry| entry.port == link.index))
            && (!filters || shares_vlan(plan, bridge, vlans.iter().find(|p| p.index == link.index)))
    }))
}

/// Whether the new port will be in a VLAN of another port.
fn shares_vlan(plan: &BridgePlan<'_>, bridge: &Link, other: Option<&BridgePortVlans>) -> bool {
    let is_in = |id: u16| other.is_some_and(|port| port.tagging_of_vlan(id).is_some());
    let by_default = plan.vlans.port.is_empty() || plan.vlans.preserve;
    (by_default && is_in(bridge.bridge.unwrap_or_default().default_pvid))
        || plan.vlans.port.iter().any(|vlans| vlans.ids.clone().any(is_in))
}
