//! The gateway of a VLAN: the interface `<bridge>.<vlan>` of the host, one end of a veth pair whose
//! other end is a port of the bridge in that VLAN.
//!
//! All containers of the VLAN share the gateway. It is created and deleted under a lock, so that no
//! process finds an incomplete gateway, and no container loses the gateway that it has just found.
//! It is deleted with the last other port of the VLAN. A gateway that the reference plugin has
//! created is adopted.

use super::{BridgePlan, vlan};
use crate::files::lock::FileLock;
use crate::framework::Rollback;
use crate::iface::veth;
use crate::netlink::{
    BridgePortVlans, Link, LinkChange, LinkKind, MacAddress, Netlink, NewLink, PortVlanRange,
    VethPeer, VlanTagging,
};
use cni::error::{Error, ErrorContext, Result};

/// The lock for the gateways of all bridges.
const LOCK: &str = "bridge-vlan.lock";

/// The name of the gateway's interface; `None` if the configuration has no VLAN or no gateway.
pub(super) fn interface_name(plan: &BridgePlan<'_>) -> Option<String> {
    let id = plan.vlans.access.filter(|_| plan.gateway)?;
    Some(format!("{}.{id}", plan.conf.bridge))
}

/// Finds the gateway's interface, or creates it and registers its deletion for the rollback; `port`
/// is the index of the container's port.
pub(super) fn ensure_interface<'a>(
    host: &'a Netlink,
    plan: &'a BridgePlan<'a>,
    bridge: &Link,
    port: u32,
    undo: &mut Rollback<'a>,
) -> Result<Option<Link>> {
    let Some(name) = interface_name(plan) else { return Ok(None) };
    let failed = || "failed to create vlan interface";
    let turn = FileLock::acquire_host_lock(LOCK)?;
    let found = host.find_link(&name).context(failed)?;
    let is_new = found.is_none();
    let link = found.map_or_else(|| create_veth_pair(host, bridge, &name), Ok).context(failed)?;
    // Completes the gateway of a process that was killed.
    let completed = complete_pair(host, plan, bridge, &link);
    if is_new && completed.is_err() {
        drop(host.delete_link_by_index(link.index));
    }
    drop(turn);
    completed.context(failed)?;
    if is_new {
        undo.add_step(format!("remove \"{name}\""), move || {
            delete_if_unused(host, plan, Some(port))
        });
    }
    Ok(Some(link))
}

/// Creates the pair, the gateway's end first, so that the other end has the lower index.
fn create_veth_pair(host: &Netlink, bridge: &Link, name: &str) -> Result<Link> {
    veth::create_with_free_name(
        host,
        None,
        &|port| {
            let peer = VethPeer::new(port)
                .with_mtu(bridge.mtu)
                .with_mac(MacAddress::random_for_bridge_port());
            let link = NewLink::new(name, LinkKind::Veth { peer });
            link.with_mtu(bridge.mtu).with_mac(MacAddress::random_local())
        },
        &|error, _| {
            if error.is_exists() && host.find_link(name)?.is_none() {
                Ok(())
            } else {
                Err(error.into())
            }
        },
    )
}

fn complete_pair(host: &Netlink, plan: &BridgePlan<'_>, bridge: &Link, link: &Link) -> Result<()> {
    veth::refuse_advertisements(link);
    if let Some(port) = find_bridge_port(host, link)? {
        veth::refuse_advertisements(&port);
        let up = LinkChange::new().set_up();
        if port.master.is_none() {
            host.change_link(port.index, up.set_master(bridge.index))?;
        } else if !port.up {
            host.change_link(port.index, up)?;
        }
        // Sets the VLAN even if the port has it already: finding that out would take a dump of all
        // ports.
        let own = Vec::from_iter(plan.vlans.access.map(PortVlanRange::native_vlan));
        plan.vlans.apply_to_port(host, bridge, &port, &own)?;
    }
    if !link.up {
        host.change_link(link.index, LinkChange::new().set_up())?;
    }
    Ok(())
}

/// The other end of a gateway's interface, if it is a veth pair on the host.
fn find_bridge_port(host: &Netlink, link: &Link) -> Result<Option<Link>> {
    let is_pair = link.kind.as_deref() == Some("veth") && link.link_netnsid.is_none();
    match link.link.filter(|_| is_pair) {
        Some(index) => Ok(host.find_link_by_index(index)?),
        None => Ok(None),
    }
}

/// Deletes the gateway unless a port other than `except` is in its VLAN.
pub(super) fn delete_if_unused(
    host: &Netlink,
    plan: &BridgePlan<'_>,
    except: Option<u32>,
) -> Result<()> {
    let Some(name) = interface_name(plan) else { return Ok(()) };
    let _lock = FileLock::acquire_host_lock(LOCK)?;
    let Some(link) = host.find_link(&name)? else { return Ok(()) };
    let Some(port) = find_bridge_port(host, &link)? else { return Ok(()) };
    let Some(bridge) = host.find_link(&plan.conf.bridge)? else { return Ok(()) };
    // A port of another bridge is not the plugin's. A port of no bridge that is down was left by a
    // process that was killed: a running process holds the lock.
    let is_incomplete = port.master.is_none() && !port.up && !link.up;
    let is_own = port.master == Some(bridge.index) || is_incomplete;
    if !is_own || is_used(host, plan, &bridge, [Some(port.index), except])? {
        return Ok(());
    }
    let removed = host.delete_link_by_index(link.index).map(drop);
    removed.context(|| "remove the VLAN's gateway")
}

/// Whether the bridge has a port in the VLAN besides `except`.
fn is_used(
    host: &Netlink,
    plan: &BridgePlan<'_>,
    bridge: &Link,
    except: [Option<u32>; 2],
) -> Result<bool> {
    let Some(id) = plan.vlans.access else { return Ok(false) };
    let in_vlan = |port: &&BridgePortVlans| {
        port.master == Some(bridge.index) && port.tagging_of_vlan(id).is_some()
    };
    let ports = host.dump_port_vlans()?;
    for port in ports.iter().filter(in_vlan).filter(|port| !except.contains(&Some(port.index))) {
        let link = host.find_link_by_index(port.index)?;
        // While the kernel removes the namespace of the other end, its nsid is -1.
        if link.is_some_and(|link| link.link_netnsid != Some(-1)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// CHECK: fails unless the interface exists, is up, and its other end is in the VLAN.
pub(super) fn verify_interface(
    host: &Netlink,
    plan: &BridgePlan<'_>,
    bridge: &Link,
) -> Result<Option<Link>> {
    let Some((name, id)) = interface_name(plan).zip(plan.vlans.access) else { return Ok(None) };
    let missing = |why: &str| Error::internal(format!("VLAN gateway \"{name}\" {why}"));
    let link = host.find_link(&name)?.ok_or_else(|| missing("was not found"))?;
    if !link.up {
        return Err(missing("is down"));
    }
    if let Some(port) = find_bridge_port(host, &link)? {
        let tagging = vlan::read_port_vlans(host, &port)?.tagging_of_vlan(id);
        if port.master != Some(bridge.index) || tagging != Some(VlanTagging::Native) {
            let bridge = &bridge.name;
            return Err(missing(&format!("is not connected to VLAN {id} of \"{bridge}\"")));
        }
    }
    Ok(Some(link))
}
