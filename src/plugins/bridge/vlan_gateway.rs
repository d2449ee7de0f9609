//! The gateway of a VLAN: the interface `<bridge>.<vlan>` of the host, which is one end of a veth pair
//! whose other end is a port of the bridge in that VLAN.
//!
//! All containers of the VLAN share it. Whoever makes or removes one holds a lock, so that it is
//! complete when it is found, and is not removed under a container that has just found it; it
//! goes with the last other port of the VLAN. One that the reference has made is taken over.

use std::path::Path;

use super::{Conf, Plan};
use crate::cni::IfName;
use crate::error::{Context, Error, Result};
use crate::iface::names;
use crate::netlink::{
    Link, LinkChange, LinkKind, Netlink, NewLink, PortVlans, Tagging, VethPeer, VlanPort,
};
use crate::skel::{Cx, Rollback};
use crate::store::lock::Lock;

/// Without a place for it, there is no lock.
const LOCK: &str = "/run/cnibox-bridge-vlan.lock";

/// How often a random name may be taken before something is wrong.
const NAME_TRIES: usize = 10;

/// The name of the gateway's interface; none if VLANs have no gateway here.
pub(super) fn name(conf: &Conf, plan: &Plan) -> Option<String> {
    let id = plan.vlans.access.filter(|_| plan.gateway)?;
    Some(format!("{}.{id}", conf.bridge))
}

/// Refuses a bridge whose name leaves no room for the VLAN's number.
pub(super) fn require_name(conf: &Conf, plan: &Plan) -> Result<()> {
    let Some(name) = name(conf, plan) else { return Ok(()) };
    let why = |e: Error| Error::config(format!("VLAN gateway \"{name}\": {}", e.msg()));
    IfName::parse(&name).map(drop).map_err(why)
}

/// Finds the interface of the gateway, or makes it.
pub(super) fn ensure(host: &Netlink, bridge: &Link, name: &str, id: u16) -> Result<Link> {
    let failed = || "failed to create vlan interface".to_owned();
    let _turn = Lock::exclusive(Path::new(LOCK)).ok();
    let found = host.link(name).context(failed)?;
    let made = found.is_none();
    let link = match found {
        Some(link) => link,
        None => create(host, bridge, name).context(failed)?,
    };
    // One that a process left half made is completed; another kind of link is its maker's affair.
    let completed = complete(host, bridge, (&link, id));
    if made && completed.is_err() {
        drop(host.del_link_by_index(link.index));
    }
    completed.context(failed)?;
    Ok(link)
}

/// The pair, with the gateway's end first, so that the other one has the index before.
fn create(host: &Netlink, bridge: &Link, name: &str) -> Result<Link> {
    for _ in 0..NAME_TRIES {
        let peer = VethPeer::new(names::random_veth()).mtu(bridge.mtu);
        let link = NewLink::new(name, LinkKind::Veth { peer }).mtu(bridge.mtu);
        match host.create_link(&link) {
            Ok(link) => return Ok(link),
            Err(error) if error.is_exists() && host.link(name)?.is_none() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Error::internal("failed to find a unique veth name"))
}

fn complete(host: &Netlink, bridge: &Link, (link, id): (&Link, u16)) -> Result<()> {
    if let Some(port) = port_of(host, link)? {
        let up = LinkChange::new().up();
        if port.master.is_none() {
            host.set_link(port.index, up.master(bridge.index))?;
        } else if !port.up {
            host.set_link(port.index, up)?;
        }
        let all = host.dump_port_vlans()?;
        let vlans = all.into_iter().find(|vlans| vlans.index == port.index).unwrap_or_default();
        if vlans.tagging(id) != Some(Tagging::Native) {
            host.add_port_vlans(port.index, &[PortVlans::native(id)])?;
            let others: Vec<_> = vlans.vlans.into_iter().filter(|v| !v.ids.contains(&id)).collect();
            host.del_port_vlans(port.index, &others)?;
        }
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

/// Registers what becomes of the gateway when an ADD fails.
pub(super) fn register<'a>(
    host: &'a Netlink,
    (conf, plan): (&'a Conf, &'a Plan),
    undo: &mut Rollback<'a>,
) {
    if let Some(name) = name(conf, plan) {
        undo.push("remove the VLAN's gateway", move || remove_unused(host, conf, plan, &name));
    }
}

/// Removes the gateway unless another port is in its VLAN.
pub(super) fn del(cx: &Cx<'_>, conf: &Conf, plan: &Plan) -> Result<()> {
    let Some(name) = name(conf, plan) else { return Ok(()) };
    remove_unused(cx.host()?, conf, plan, &name)
}

fn remove_unused(host: &Netlink, conf: &Conf, plan: &Plan, name: &str) -> Result<()> {
    let _turn = Lock::exclusive(Path::new(LOCK)).ok();
    let Some(link) = host.link(name)? else { return Ok(()) };
    let Some(port) = port_of(host, &link)? else { return Ok(()) };
    let Some(bridge) = host.link(&conf.bridge)? else { return Ok(()) };
    let uses = |other: &VlanPort| {
        other.index != port.index
            && other.master == Some(bridge.index)
            && plan.vlans.access.and_then(|id| other.tagging(id)).is_some()
    };
    // What is in another bridge, or in none, is not ours.
    if port.master != Some(bridge.index) || host.dump_port_vlans()?.iter().any(uses) {
        return Ok(());
    }
    host.del_link_by_index(link.index).map(drop).context(|| "remove the VLAN's gateway")
}

/// CHECK: the interface is there, up, and its other end is in the VLAN.
pub(super) fn verify(
    host: &Netlink,
    (conf, plan): (&Conf, &Plan),
    bridge: &Link,
) -> Result<Option<Link>> {
    let Some((name, id)) = name(conf, plan).zip(plan.vlans.access) else { return Ok(None) };
    let missing = |why: &str| Error::internal(format!("VLAN gateway \"{name}\" {why}"));
    let link = host.link(&name)?.ok_or_else(|| missing("was not found"))?;
    if !link.up {
        return Err(missing("is down"));
    }
    if let Some(port) = port_of(host, &link)? {
        let all = host.dump_port_vlans()?;
        let vlans = all.into_iter().find(|vlans| vlans.index == port.index).unwrap_or_default();
        if port.master != Some(bridge.index) || vlans.tagging(id) != Some(Tagging::Native) {
            let bridge = &bridge.name;
            return Err(missing(&format!("is not connected to VLAN {id} of \"{bridge}\"")));
        }
    }
    Ok(Some(link))
}
