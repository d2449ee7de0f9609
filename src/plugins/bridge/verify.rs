//! CHECK of a bridge attachment.

use super::shared::require_bridge;
use super::{Conf, Plan, spoof_port, vlan_gateway};
use crate::cni::{CniResult, Interface};
use crate::error::{Error, Result};
use crate::iface::child::Found;
use crate::iface::{Inside, verify, veth};
use crate::netfilter::{Owner, masquerade, spoof};
use crate::netlink::{Link, Netlink};
use crate::skel::{CheckReq, Cx};

pub(super) fn attachment(cx: &Cx<'_>, plan: &Plan<'_>, req: &CheckReq) -> Result<()> {
    let conf = plan.conf;
    let inside = Inside::enter(req.sandbox.netns()?)?;
    cx.if_ipam(Cx::ipam_check)?;
    let prev = req.require_prev()?;
    let host = cx.host()?;
    let bridge = bridge_of(host, conf, prev)?;
    let (index, entry) = verify::container_entry(prev, &req.ifname, &req.sandbox.path)?;
    let link = verify::container_link(&inside, entry, "veth")?;
    if !conf.disable_container_interface {
        verify::is_up(&link, verify::IN_CONTAINER)?;
    }
    let found = veth::find_host_end(host, &inside, prev, &link)?;
    let port = port_of(conf, &bridge, found)?;
    let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
    // The reference sets no alias.
    let is_labelled = owner.owns(Some(&port.alias));
    plan.vlans.verify(host, &bridge, &port, is_labelled)?;
    let of_vlan = vlan_gateway::verify(host, plan, &bridge)?;
    if plan.gateway {
        gateway_addresses(host, of_vlan.as_ref().unwrap_or(&bridge), prev, index)?;
    }
    let found = Found { link, prev, index };
    found.verify_layer3(&inside)?;
    if conf.macspoofchk {
        spoof::check(cx.filter(), owner, &spoof_port(&port, &found.link)?)?;
        // The reference protects neither its ports nor those of others from such frames.
        if is_labelled {
            learns_nothing_unchecked(&bridge)?;
        }
    }
    if plan.masquerades {
        let addrs: Vec<_> = prev.ips_of(index).map(|ip| ip.address).collect();
        masquerade::check(cx.filter(), owner, &addrs)?;
    }
    Ok(())
}

fn bridge_of(host: &Netlink, conf: &Conf, prev: &CniResult) -> Result<Link> {
    let name = &conf.bridge;
    let listed = |entry: &&Interface| entry.name == *name && entry.sandbox.is_empty();
    let entry =
        prev.interfaces.iter().find(listed).ok_or_else(|| {
            Error::internal(format!("Interface name {name} not found in prevResult"))
        })?;
    let link = host.link(name)?.ok_or_else(|| {
        Error::internal(format!("Interface name {name} not found")).with_details("cnibox repair")
    })?;
    require_bridge(&link)?;
    verify::same_mac(&link, entry)?;
    verify::is_up(&link, verify::ON_HOST)?;
    verify::refuses_advertisements(&link)?;
    // A packet capture makes a bridge promiscuous as well, which does no harm.
    if conf.promisc_mode && link.promiscuity == 0 {
        let msg = format!(
            "Bridge interface {name} configured Promisc Mode true doesn't match current state: false"
        );
        return Err(Error::internal(msg).with_details(format!("ip link set {name} promisc on")));
    }
    Ok(link)
}

/// Fails if the bridge learns from frames that the check of source MACs does not see.
fn learns_nothing_unchecked(bridge: &Link) -> Result<()> {
    if bridge.bridge.unwrap_or_default().learns_link_local != Some(true) {
        return Ok(());
    }
    let name = &bridge.name;
    let msg = format!("bridge \"{name}\" learns the sources of link-local frames");
    Err(Error::internal(msg).with_details(format!(
        "they are not checked: ip link set {name} type bridge no_linklocal_learn 1"
    )))
}

fn port_of(conf: &Conf, bridge: &Link, found: Option<(Link, Interface)>) -> Result<Link> {
    let missing =
        || Error::internal(format!("CNI veth created for bridge {} was not found", conf.bridge));
    let (port, entry) = found.ok_or_else(missing)?;
    if port.master != Some(bridge.index) {
        let (port, bridge) = (&port.name, &bridge.name);
        let details = format!("\"{port}\" is not a port of it: ip link set {port} master {bridge}");
        return Err(missing().with_details(details));
    }
    verify::same_mac(&port, &entry)?;
    verify::is_up(&port, verify::ON_HOST)?;
    verify::refuses_advertisements(&port)?;
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

fn gateway_addresses(host: &Netlink, bridge: &Link, prev: &CniResult, index: usize) -> Result<()> {
    let present = host.dump_addrs(bridge.index)?;
    for ip in prev.ips_of(index) {
        let Some(gw) = ip.gateway else { continue };
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
