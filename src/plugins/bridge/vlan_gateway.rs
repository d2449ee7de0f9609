//! The gateway of a VLAN: the interface `<bridge>.<vlan>` of the host, one end of a veth pair whose other end is a port
//! of the bridge in that VLAN.
//!
//! All containers of the VLAN share the gateway. It is created and deleted under a lock, so that no process finds an
//! incomplete gateway, and no container loses the gateway that it has just found. It is deleted with the last other port
//! of the VLAN. A gateway that the reference plugin has created is adopted.

use super::{Plan, vlan};
use crate::error::{Context, Error, Result};
use crate::files::lock::Lock;
use crate::iface::veth;
use crate::netlink::{
    Link, LinkChange, LinkKind, Mac, Netlink, NewLink, PortVlans, Tagging, VethPeer, VlanPort,
};
use crate::skel::Rollback;

/// For the gateways of all bridges.
const LOCK: &str = "bridge-vlan.lock";

/// The name of the gateway's interface; `None` if the configuration has no VLAN or no gateway.
pub(super) fn name(plan: &Plan<'_>) -> Option<String> {
    let id = plan.vlans.access.filter(|_| plan.gateway)?;
    Some(format!("{}.{id}", plan.conf.bridge))
}

/// Finds the gateway's interface, or creates it and registers its deletion for the rollback; `port` is the index of the
/// container's port.
pub(super) fn ensure<'a>(
    host: &'a Netlink,
    plan: &'a Plan<'a>,
    bridge: &Link,
    port: u32,
    undo: &mut Rollback<'a>,
) -> Result<Option<Link>> {
    let Some(name) = name(plan) else { return Ok(None) };
    let failed = || "failed to create vlan interface";
    let turn = Lock::turn(LOCK)?;
    let found = host.link(&name).context(failed)?;
    let is_new = found.is_none();
    let link = found.map_or_else(|| create(host, bridge, &name), Ok).context(failed)?;
    // Completes the gateway of a process that was killed.
    let completed = complete(host, plan, bridge, &link);
    if is_new && completed.is_err() {
        drop(host.del_link_by_index(link.index));
    }
    drop(turn);
    completed.context(failed)?;
    if is_new {
        undo.push(format!("remove \"{name}\""), move || del(host, plan, Some(port)));
    }
    Ok(Some(link))
}

/// Creates the pair, the gateway's end first, so that the other end has the lower index.
fn create(host: &Netlink, bridge: &Link, name: &str) -> Result<Link> {
    let pair = |port: &str| {
        let peer = VethPeer::new(port).mtu(bridge.mtu).mac(Mac::random_port());
        let link = NewLink::new(name, LinkKind::Veth { peer });
        link.mtu(bridge.mtu).mac(Mac::random_local())
    };
    veth::create_pair(host, &pair, &|error, _| {
        if error.is_exists() && host.link(name)?.is_none() { Ok(()) } else { Err(error.into()) }
    })
}

fn complete(host: &Netlink, plan: &Plan<'_>, bridge: &Link, link: &Link) -> Result<()> {
    veth::refuse_advertisements(link);
    if let Some(port) = port_of(host, link)? {
        veth::refuse_advertisements(&port);
        let up = LinkChange::new().up();
        if port.master.is_none() {
            host.set_link(port.index, up.master(bridge.index))?;
        } else if !port.up {
            host.set_link(port.index, up)?;
        }
        // Sent even if not needed: looking it up would need a dump of all ports.
        let own = Vec::from_iter(plan.vlans.access.map(PortVlans::native));
        plan.vlans.set(host, bridge, &port, &own)?;
    }
    if !link.up {
        host.set_link(link.index, LinkChange::new().up())?;
    }
    Ok(())
}

/// The other end of a gateway's interface, if it is a veth pair on the host.
fn port_of(host: &Netlink, link: &Link) -> Result<Option<Link>> {
    let is_pair = link.kind.as_deref() == Some("veth") && link.link_netnsid.is_none();
    match link.link.filter(|_| is_pair) {
        Some(index) => Ok(host.link_by_index(index)?),
        None => Ok(None),
    }
}

/// Deletes the gateway unless a port other than `except` is in its VLAN.
pub(super) fn del(host: &Netlink, plan: &Plan<'_>, except: Option<u32>) -> Result<()> {
    let Some(name) = name(plan) else { return Ok(()) };
    let _turn = Lock::turn(LOCK)?;
    let Some(link) = host.link(&name)? else { return Ok(()) };
    let Some(port) = port_of(host, &link)? else { return Ok(()) };
    let Some(bridge) = host.link(&plan.conf.bridge)? else { return Ok(()) };
    // A port of another bridge is not the plugin's. A port of no bridge that is down was left by a process that was
    // killed: a running process holds the lock.
    let is_incomplete = port.master.is_none() && !port.up && !link.up;
    let is_own = port.master == Some(bridge.index) || is_incomplete;
    if !is_own || is_used(host, plan, &bridge, [Some(port.index), except])? {
        return Ok(());
    }
    let removed = host.del_link_by_index(link.index).map(drop);
    removed.context(|| "remove the VLAN's gateway")
}

/// Whether the bridge has a port in the VLAN besides `except`.
fn is_used(
    host: &Netlink,
    plan: &Plan<'_>,
    bridge: &Link,
    except: [Option<u32>; 2],
) -> Result<bool> {
    let Some(id) = plan.vlans.access else { return Ok(false) };
    let in_vlan =
        |port: &&VlanPort| port.master == Some(bridge.index) && port.tagging(id).is_some();
    let ports = host.dump_port_vlans()?;
    for port in ports.iter().filter(in_vlan).filter(|port| !except.contains(&Some(port.index))) {
        let link = host.link_by_index(port.index)?;
        // While the kernel removes the namespace of the other end, its nsid is -1.
        if link.is_some_and(|link| link.link_netnsid != Some(-1)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// CHECK: fails unless the interface exists, is up, and its other end is in the VLAN.
pub(super) fn verify(host: &Netlink, plan: &Plan<'_>, bridge: &Link) -> Result<Option<Link>> {
    let Some((name, id)) = name(plan).zip(plan.vlans.access) else { return Ok(None) };
    let missing = |why: &str| Error::internal(format!("VLAN gateway \"{name}\" {why}"));
    let link = host.link(&name)?.ok_or_else(|| missing("was not found"))?;
    if !link.up {
        return Err(missing("is down"));
    }
    if let Some(port) = port_of(host, &link)? {
        let tagging = vlan::of_port(host, &port)?.tagging(id);
        if port.master != Some(bridge.index) || tagging != Some(Tagging::Native) {
            let bridge = &bridge.name;
            return Err(missing(&format!("is not connected to VLAN {id} of \"{bridge}\"")));
        }
    }
    Ok(Some(link))
}
