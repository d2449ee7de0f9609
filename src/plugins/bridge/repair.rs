//! Repair of an attachment: restores the missing bridge, gateway addresses, port and routes of the container. Deliberate
//! changes are left and reported.

use ipnet::IpNet;

use super::shared::{self, Shared};
use super::{Plan, spoof_port, start_port, vlan, vlan_gateway};
use crate::cni::{CniResult, IpConfig};
use crate::error::Result;
use crate::iface::child::{self, Found};
use crate::iface::{Inside, configure, forwarding, verify, veth};
use crate::netfilter::{Owner, PacketFilter, spoof};
use crate::netlink::{Link, LinkChange, Mac, Netlink, OperState, Switch};
use crate::repairs::Repairs;
use crate::skel::{CheckReq, Cx, Rollback};

pub(super) fn attachment(
    cx: &Cx<'_>,
    plan: &Plan<'_>,
    req: &CheckReq,
    repairs: &mut Repairs,
) -> Result<()> {
    let (inside, host) = (Inside::enter(req.sandbox.netns()?)?, cx.host()?);
    let prev = req.require_prev()?;
    let (index, _) = verify::container_entry(prev, &req.ifname, &req.sandbox.path)?;
    let link = inside.link(req.ifname.as_str())?;
    // Nothing to repair without a pair that is proved to be this container's.
    let Some((port, _)) = veth::find_host_end(host, &inside, prev, &link)? else {
        return Ok(());
    };
    let Some(bridge) = bridge(host, plan, prev, repairs)? else { return Ok(()) };
    let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
    let pair = Pair { plan, owner, bridge: &bridge.link, port: &port, container: &link };
    pair.repair(host, repairs)?;
    if plan.gateway {
        let gateway = |ip: &IpConfig| IpNet::new(ip.gateway?, ip.address.prefix_len()).ok();
        let gateways: Vec<IpNet> = prev.ips_of(index).filter_map(gateway).collect();
        pair.gateway(host, bridge.pinned, &gateways, repairs)?;
    }
    child::restore_routes(&inside, &Found { link, prev, index }, repairs)
}

/// The bridge, created or adopted as by ADD, with the MAC that its containers have cached; `None` if it cannot be
/// restored.
fn bridge(
    host: &Netlink,
    plan: &Plan<'_>,
    prev: &CniResult,
    repairs: &mut Repairs,
) -> Result<Option<Shared>> {
    let name = &plan.conf.bridge;
    let listed = prev.interfaces.iter().find(|i| i.name == *name && i.sandbox.is_empty());
    let known: Option<Mac> = listed.and_then(|entry| entry.mac.parse().ok());
    let found = host.link(name)?;
    let (what, mac) = match &found {
        None => (format!("bridge \"{name}\""), None),
        Some(link) if link.bridge.is_none() => {
            repairs.leave(format!("\"{name}\" is not a bridge"));
            return Ok(None);
        }
        Some(link) => {
            if let Err(error) = plan.vlans.require_filtering(host, link) {
                repairs.leave(error.to_string());
                return Ok(None);
            }
            if let (Some(known), Some(mac)) = (known, link.mac)
                && known != mac
            {
                repairs
                    .leave(format!("bridge \"{name}\" has the MAC {mac}, containers know {known}"));
            }
            let Some(damage) = damage(plan, link) else { return Ok(found.map(adopted)) };
            (format!("bridge \"{name}\": {damage}"), link.mac)
        }
    };
    let mac = mac.or(known).unwrap_or_else(Mac::random_local);
    let mut restored = None;
    repairs.restore(what, || {
        let mtu = plan.conf.mtu.resolve(host)?;
        restored = Some(shared::ensure(host, plan, mtu, mac)?);
        Ok(())
    });
    Ok(restored.or(found.map(adopted)))
}

fn adopted(link: Link) -> Shared {
    Shared { link, pinned: false }
}

/// The first difference of a bridge from the state after ADD.
fn damage(plan: &Plan<'_>, link: &Link) -> Option<&'static str> {
    let conf = plan.conf;
    let info = link.bridge.unwrap_or_default();
    let found = [
        (!link.up, "it is down"),
        (link.accept_ra.unwrap_or_default() != 0, "it accepts router advertisements"),
        (conf.promisc_mode && link.promiscuity == 0, "it is not promiscuous"),
        (plan.vlans.filtering && !info.vlan_filtering, "it does not filter VLANs"),
        (
            conf.macspoofchk && info.learns_link_local == Some(true),
            "it learns from link-local frames",
        ),
    ];
    found.into_iter().find(|(is_so, _)| *is_so).map(|(_, what)| what)
}

/// An attachment's pair and the bridge that it belongs to.
struct Pair<'a> {
    plan: &'a Plan<'a>,
    owner: Owner<'a>,
    bridge: &'a Link,
    /// The host's end.
    port: &'a Link,
    container: &'a Link,
}

impl Pair<'_> {
    /// Makes the host's end a port again, or restores the missing attributes of the port.
    fn repair(&self, host: &Netlink, repairs: &mut Repairs) -> Result<()> {
        let Pair { plan, bridge, port, .. } = *self;
        let (conf, name) = (plan.conf, &port.name);
        let Some(master) = port.master else {
            let what = format!("port \"{name}\" of bridge \"{}\"", bridge.name);
            repairs.restore(what, || self.connect(host));
            return Ok(());
        };
        if master != bridge.index {
            let bridge = &bridge.name;
            repairs.leave(format!("\"{name}\" is a port of another link than \"{bridge}\""));
            return Ok(());
        }
        let change = LinkChange::new;
        let set = |change: LinkChange| Ok(host.set_link(port.index, change)?);
        veth::repair_advertisements(port, repairs);
        let state = port.port.unwrap_or_default();
        if conf.port_isolation && !state.isolated {
            let what = format!("isolation of port \"{name}\"");
            repairs.restore(what, || set(change().isolated(Switch::On)));
        }
        if conf.hairpin_mode && !state.hairpin {
            let what = format!("hairpin mode of port \"{name}\"");
            repairs.restore(what, || set(change().hairpin(Switch::On)));
        }
        if (state.hairpin && !conf.hairpin_mode) || (state.isolated && !conf.port_isolation) {
            repairs.leave(format!("port \"{name}\" has hairpin mode or isolation, not configured"));
        }
        if !plan.vlans.port.is_empty()
            && let Some(missing) = plan.vlans.missing(port, &vlan::of_port(host, port)?)
        {
            repairs.restore(missing, || plan.vlans.set(host, bridge, port, &plan.vlans.port));
        }
        if !port.up {
            repairs.restore(format!("port \"{name}\": it is down"), || set(change().up()));
        }
        Ok(())
    }

    /// Connects the port to the bridge. No frame passes before the port is protected: the check of source MACs
    /// matches the name of the port and is restored first; the port is down until attributes of ports are set.
    fn connect(&self, host: &Netlink) -> Result<()> {
        let Pair { plan, owner, bridge, port, container } = *self;
        let conf = plan.conf;
        veth::refuse_advertisements(port);
        if conf.macspoofchk {
            let (filter, checked) = (PacketFilter::new(), spoof_port(port, container)?);
            // The rules are restored already; a transaction for each port would be slow.
            if spoof::check(&filter, owner, &checked).is_err() {
                spoof::add(&filter, owner, &checked)?;
            }
        }
        let is_guarded = conf.port_isolation || plan.vlans.filtering;
        if is_guarded {
            host.set_link(port.index, LinkChange::new().down())?;
        }
        host.set_link(port.index, LinkChange::new().master(bridge.index))?;
        if !port.up || is_guarded || conf.hairpin_mode {
            start_port(host, plan, owner, bridge, port)?;
        }
        // A bridge sends nothing before it has the carrier of its first port.
        if bridge.oper_state == OperState::Up || !container.up {
            return Ok(());
        }
        configure::wait_for_carrier(host, bridge)
    }

    /// The gateway's addresses, on the bridge or on the interface of the VLAN, and forwarding.
    fn gateway(
        &self,
        host: &Netlink,
        pinned: bool,
        gateways: &[IpNet],
        repairs: &mut Repairs,
    ) -> Result<()> {
        let Pair { plan, bridge, port, .. } = *self;
        let mut link =
            vlan_gateway::name(plan).map_or(Ok(Some(bridge.clone())), |name| host.link(&name))?;
        if let Err(error) = vlan_gateway::verify(host, plan, bridge) {
            repairs.restore(error.msg(), || {
                let mut undo = Rollback::new();
                link = vlan_gateway::ensure(host, plan, bridge, port.index, &mut undo)?;
                // Otherwise a DEL has deleted the port, and the gateway may be without users.
                if host.link_by_index(port.index)?.is_some() {
                    undo.commit();
                }
                Ok(())
            });
        }
        // The rest is common to all attachments of the network.
        if !repairs.is_first(format!("{gateways:?} of {:?}", link.as_ref().map(|link| link.index)))
        {
            return Ok(());
        }
        let Some(link) = link else { return Ok(()) };
        forwarding::repair(host, &link, gateways, repairs);
        let on = Shared { pinned: pinned && link.index == bridge.index, link };
        let present = host.dump_addrs(on.link.index)?;
        let is_missing =
            |gateway: &&IpNet| !present.iter().any(|addr| addr.net.addr() == gateway.addr());
        for gateway in gateways.iter().filter(is_missing) {
            let what = format!("address {gateway} of \"{}\"", on.link.name);
            let mut others = present.iter().map(|addr| addr.net);
            let other = others.find(|net| shared::overlap(net, gateway) && !gateways.contains(net));
            match other {
                Some(other) => repairs.leave(format!("{what}: it has {other}")),
                None => repairs.restore(what, || {
                    shared::add_gateway(host, &on, *gateway)?;
                    configure::wait_for_ipv6(host, &mut [gateway.addr()].into_iter())
                }),
            }
        }
        Ok(())
    }
}
