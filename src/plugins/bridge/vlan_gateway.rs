//! The gateway of a VLAN: the interface `<bridge>.<vlan>` of the host, which is one end of a veth pair
//! whose other end is a port of the bridge in that VLAN.
//!
//! All containers of the VLAN share the gateway. It is made and removed under a lock, so that it is
//! complete when it is found, and is not removed under a container that has just found it; it
//! goes with the last other port of the VLAN. A gateway that the reference has made is taken over.

use super::{Conf, Plan};
use crate::cni::IfName;
use crate::error::{Context, Error, Result};
use crate::files::lock::Lock;
use crate::iface::{names, veth};
use crate::netlink::{
    Link, LinkChange, LinkKind, Mac, Netlink, NewLink, Tagging, VethPeer, VlanPort,
};
use crate::skel::{Cx, Rollback};

/// For the gateways of all bridges.
const LOCK: &str = "bridge-vlan.lock";

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

/// Finds the interface of the gateway, or makes it and registers its removal for the roll-back; `port` is
/// the container's port for which it is made.
pub(super) fn ensure<'a>(
    host: &'a Netlink,
    conf: &'a Conf,
    plan: &'a Plan,
    bridge: &Link,
    port: u32,
    undo: &mut Rollback<'a>,
) -> Result<Option<Link>> {
    let Some(name) = name(conf, plan) else { return Ok(None) };
    let (link, made) = find_or_make(host, plan, bridge, &name)?;
    if made {
        let users = Users { conf, plan, except: Some(port) };
        undo.push(format!("remove \"{name}\""), move || users.remove_gateway(host, &name));
    }
    Ok(Some(link))
}

fn find_or_make(host: &Netlink, plan: &Plan, bridge: &Link, name: &str) -> Result<(Link, bool)> {
    let failed = || "failed to create vlan interface".to_owned();
    let _turn = Lock::turn(LOCK)?;
    let found = host.link(name).context(failed)?;
    let made = found.is_none();
    let link = match found {
        Some(link) => link,
        None => create(host, bridge, name).context(failed)?,
    };
    // One that a process left half made is completed; another kind of link is its maker's affair.
    let completed = complete(host, plan, bridge, &link);
    if made && completed.is_err() {
        drop(host.del_link_by_index(link.index));
    }
    completed.context(failed)?;
    Ok((link, made))
}

/// The pair, with the gateway's end first, so that the other one has the index before.
fn create(host: &Netlink, bridge: &Link, name: &str) -> Result<Link> {
    for _ in 0..NAME_TRIES {
        let port = names::random_veth();
        let peer = VethPeer::new(&port).mtu(bridge.mtu).mac(Mac::random_port());
        let link = NewLink::new(name, LinkKind::Veth { peer });
        let link = link.mtu(bridge.mtu).mac(Mac::random_local());
        match host.create_link(&link) {
            Ok(link) => return Ok(link),
            Err(error) if error.is_exists() && host.link(name)?.is_none() => {}
            Err(error) => {
                if error.is_unanswered() {
                    // What has the name now is the pair.
                    drop(host.del_link(&port));
                }
                return Err(error.into());
            }
        }
    }
    Err(Error::internal("failed to find a unique veth name"))
}

fn complete(host: &Netlink, plan: &Plan, bridge: &Link, link: &Link) -> Result<()> {
    veth::refuse_advertisements(link);
    if let Some(port) = port_of(host, link)? {
        veth::refuse_advertisements(&port);
        let up = LinkChange::new().up();
        if port.master.is_none() {
            host.set_link(port.index, up.master(bridge.index))?;
        } else if !port.up {
            host.set_link(port.index, up)?;
        }
        // Sent whether it is needed or not: to ask would cost a list of all ports.
        plan.vlans.set_gateway(host, bridge, &port)?;
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

/// Removes the gateway unless another port is in its VLAN.
pub(super) fn del(cx: &Cx<'_>, conf: &Conf, plan: &Plan) -> Result<()> {
    let Some(name) = name(conf, plan) else { return Ok(()) };
    Users { conf, plan, except: None }.remove_gateway(cx.host()?, &name)
}

/// The ports that a gateway is for.
#[derive(Clone, Copy, Debug)]
struct Users<'a> {
    conf: &'a Conf,
    plan: &'a Plan,
    /// A gateway that goes as well.
    except: Option<u32>,
}

impl Users<'_> {
    fn remove_gateway(self, host: &Netlink, name: &str) -> Result<()> {
        let _turn = Lock::turn(LOCK)?;
        let Some(link) = host.link(name)? else { return Ok(()) };
        let Some(port) = port_of(host, &link)? else { return Ok(()) };
        let Some(bridge) = host.link(&self.conf.bridge)? else { return Ok(()) };
        // A port of another bridge is not ours. A port of no bridge that is down was left by a process that
        // was killed: a process that is still at work holds the lock.
        let half_made = port.master.is_none() && !port.up && !link.up;
        let is_ours = port.master == Some(bridge.index) || half_made;
        if !is_ours || self.exist(host, &bridge, &port)? {
            return Ok(());
        }
        let removed = host.del_link_by_index(link.index).map(drop);
        removed.context(|| "remove the VLAN's gateway")
    }

    fn exist(self, host: &Netlink, bridge: &Link, gateway: &Link) -> Result<bool> {
        let id = self.plan.vlans.access;
        let in_vlan = |port: &&VlanPort| {
            port.master == Some(bridge.index) && id.and_then(|id| port.tagging(id)).is_some()
        };
        for port in host.dump_port_vlans()?.iter().filter(in_vlan) {
            if port.index == gateway.index || Some(port.index) == self.except {
                continue;
            }
            let port = host.link_by_index(port.index)?;
            // The kernel has no number for the namespace of the other end while it removes it.
            if port.is_some_and(|port| port.link_netnsid != Some(-1)) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// CHECK: the interface is there, up, and its other end is in the VLAN.
pub(super) fn verify(
    host: &Netlink,
    conf: &Conf,
    plan: &Plan,
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
