//! CHECK of a bridge attachment.

use super::shared::require_bridge;
use super::{BridgeConfig, BridgePlan, spoof_port, vlan_gateway};
use crate::framework::{CallContext, CheckRequest};
use crate::iface::child::CheckedLink;
use crate::iface::{ContainerNetns, verify, veth};
use crate::netfilter::{AttachmentId, masquerade, spoof};
use crate::netlink::{Link, Netlink};
use cni::error::{Error, Result};
use cni::{CniResult, ResultInterface};

pub(super) fn check_attachment(
    cx: &CallContext<'_>,
    plan: &BridgePlan<'_>,
    req: &CheckRequest,
) -> Result<()> {
    let conf = plan.conf;
    let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
    cx.if_ipam(CallContext::ipam_check)?;
    let prev = req.require_final_result()?;
    let host = cx.host_netlink()?;
    let bridge = find_verified_bridge(host, plan, prev)?;
    let (index, entry) = verify::find_container_entry(prev, &req.ifname, &req.sandbox.path)?;
    let link = verify::find_container_link(&inside, entry, "veth")?;
    if !conf.disable_container_interface {
        verify::require_up(&link, verify::IN_CONTAINER)?;
    }
    let found = veth::find_listed_host_end(host, &inside, prev, &link)?;
    let port = find_verified_port(conf, &bridge, found)?;
    let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
    // The reference sets no alias.
    let is_labelled = owner.owns_comment(Some(&port.alias));
    plan.vlans.verify_port(host, &bridge, &port, is_labelled)?;
    let of_vlan = vlan_gateway::verify_interface(host, plan, &bridge)?;
    if plan.gateway {
        verify_gateway_addresses(host, of_vlan.as_ref().unwrap_or(&bridge), prev, index)?;
    }
    let found = CheckedLink { link, prev, index };
    found.verify_layer3(&inside)?;
    if conf.macspoofchk {
        spoof::check_port(cx.packet_filter(), owner, &spoof_port(&port, &found.link)?)?;
        // The reference does not protect any port from such frames.
        if is_labelled {
            refuse_link_local_learning(&bridge)?;
        }
    }
    if plan.masquerades {
        let addrs: Vec<_> = prev.ips_of_interface(index).map(|ip| ip.address).collect();
        masquerade::check_addresses(cx.packet_filter(), owner, &addrs, &plan.masquerade)?;
    }
    Ok(())
}

fn find_verified_bridge(host: &Netlink, plan: &BridgePlan<'_>, prev: &CniResult) -> Result<Link> {
    let conf = plan.conf;
    let name = &conf.bridge;
    let listed = |entry: &&ResultInterface| entry.name == *name && entry.sandbox.is_empty();
    let entry =
        prev.interfaces.iter().find(listed).ok_or_else(|| {
            Error::internal(format!("Interface name {name} not found in prevResult"))
        })?;
    let link = host.find_link(name)?.ok_or_else(|| {
        Error::internal(format!("Interface name {name} not found")).with_details("cnibox repair")
    })?;
    require_bridge(&link)?;
    // Containers know the MAC of a gateway, which is pinned. That of another bridge may be the
    // lowest of its ports, and change with them.
    if plan.gateway && plan.vlans.access.is_none() {
        verify::require_same_mac(&link, entry)?;
    }
    verify::require_up(&link, verify::ON_HOST)?;
    verify::require_no_advertisements(&link)?;
    // A packet capture also makes a bridge promiscuous, which is harmless.
    if conf.promisc_mode && link.promiscuity == 0 {
        let msg = format!(
            "Bridge interface {name} configured Promisc Mode true doesn't match current state: \
             false"
        );
        return Err(Error::internal(msg).with_details(format!("ip link set {name} promisc on")));
    }
    Ok(link)
}

/// Fails if the bridge learns from frames that the check of source MACs does not see.
fn refuse_link_local_learning(bridge: &Link) -> Result<()> {
    if bridge.bridge.unwrap_or_default().learns_link_local != Some(true) {
        return Ok(());
    }
    let name = &bridge.name;
    let msg = format!("bridge \"{name}\" learns the sources of link-local frames");
    Err(Error::internal(msg).with_details(format!(
        "they are not checked: ip link set {name} type bridge no_linklocal_learn 1"
    )))
}

fn find_verified_port(
    conf: &BridgeConfig,
    bridge: &Link,
    found: Option<(Link, ResultInterface)>,
) -> Result<Link> {
    let missing =
        || Error::internal(format!("CNI veth created for bridge {} was not found", conf.bridge));
    let (port, entry) = found.ok_or_else(missing)?;
    if port.master != Some(bridge.index) {
        let (port, bridge) = (&port.name, &bridge.name);
        let details = format!("\"{port}\" is not a port of it: ip link set {port} master {bridge}");
        return Err(missing().with_details(details));
    }
    verify::require_same_mac(&port, &entry)?;
    verify::require_up(&port, verify::ON_HOST)?;
    verify::require_no_advertisements(&port)?;
    let state = port.port.unwrap_or_default();
    if (state.hairpin, state.isolated) == (conf.hairpin_mode, conf.port_isolation) {
        return Ok(port);
    }
    let on_off = |is_on| if is_on { "on" } else { "off" };
    let (hairpin, isolated) = (on_off(conf.hairpin_mode), on_off(conf.port_isolation));
    Err(Error::internal(format!(
        "port \"{}\" has hairpin mode {} and isolation {}, configured are {} and {}",
        port.name, state.hairpin, state.isolated, conf.hairpin_mode, conf.port_isolation
    ))
    .with_details(format!(
        "bridge link set dev {} hairpin {hairpin} isolated {isolated}",
        port.name
    )))
}

fn verify_gateway_addresses(
    host: &Netlink,
    bridge: &Link,
    prev: &CniResult,
    index: usize,
) -> Result<()> {
    let present = host.dump_addresses(bridge.index)?;
    for ip in prev.ips_of_interface(index) {
        let Some(gw) = ip.usable_gateway() else { continue };
        if !present.iter().any(|addr| addr.net.addr() == gw) {
            let kind = if bridge.bridge.is_some() { "bridge " } else { "" };
            let msg = format!("gateway {gw} is not an address of {kind}\"{}\"", bridge.name);
            let net = format!("{gw}/{}", ip.address.prefix_len());
            return Err(
                Error::internal(msg).with_details(format!("ip addr add {net} dev {}", bridge.name))
            );
        }
    }
    Ok(())
}
