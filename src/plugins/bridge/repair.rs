//! What an attachment has lost on the host: its bridge, the gateway, the port; and routes of the
//! container. What somebody has set otherwise is left and told.

use ipnet::IpNet;

use super::protect::{self, NewPort};
use super::{Conf, Plan, Shared, ensure_bridge, gateway, vlan, vlan_gateway};
use crate::cni::CniResult;
use crate::error::Result;
use crate::iface::{Inside, configure, forwarding, routes, verify, veth};
use crate::netfilter::{Owner, PacketFilter, spoof};
use crate::netlink::{Link, LinkChange, Mac, Netlink, OperState, Switch};
use crate::repairs::Repairs;
use crate::skel::{CheckReq, Cx, Rollback};

pub(super) fn attachment(
    cx: &Cx<'_>,
    conf: &Conf,
    plan: &Plan,
    req: &CheckReq,
    repairs: &mut Repairs,
) -> Result<()> {
    let (inside, host) = (Inside::enter(req.sandbox.netns()?)?, cx.host()?);
    let prev = req.require_prev()?;
    let (index, _) = verify::container_entry(prev, &req.ifname, &req.sandbox.path)?;
    let container = inside.link(req.ifname.as_str())?;
    // Without a pair that is proved to be this container's there is nothing to be connected.
    let Some((port, _)) = veth::find_host_end(host, &inside, prev, &container)? else {
        return Ok(());
    };
    let Some(bridge) = bridge(host, conf, plan, prev, repairs)? else { return Ok(()) };
    let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
    let pair = Pair { conf, plan, owner, bridge: &bridge.link, port: &port, container: &container };
    pair.repair(host, repairs)?;
    if plan.gateway {
        let gateway =
            |ip: &crate::cni::IpConfig| IpNet::new(ip.gateway?, ip.address.prefix_len()).ok();
        let gateways: Vec<IpNet> = prev.ips_of(index).filter_map(gateway).collect();
        pair.gateway(host, bridge.pinned, &gateways, repairs)?;
    }
    let mut wanted = routes::connected(&container, prev, index);
    wanted.extend(configure::plan_routes(prev, container.index));
    routes::restore(&inside, &container, &wanted, repairs)
}

/// The bridge, as ADD makes or takes it, with the MAC that its containers know; `None` if there is none.
fn bridge(
    host: &Netlink,
    conf: &Conf,
    plan: &Plan,
    prev: &CniResult,
    repairs: &mut Repairs,
) -> Result<Option<Shared>> {
    let name = &conf.bridge;
    let told = prev.interfaces.iter().find(|i| i.name == *name && i.sandbox.is_empty());
    let told: Option<Mac> = told.and_then(|entry| entry.mac.parse().ok());
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
            if let (Some(told), Some(mac)) = (told, link.mac)
                && told != mac
            {
                repairs
                    .leave(format!("bridge \"{name}\" has the MAC {mac}, containers know {told}"));
            }
            let Some(damage) = damage(conf, plan, link) else { return Ok(found.map(adopted)) };
            (format!("bridge \"{name}\": {damage}"), link.mac)
        }
    };
    let mac = mac.or(told).unwrap_or_else(Mac::random_local);
    let mut made = None;
    repairs.restore(what, || {
        let mtu = conf.mtu.resolve(host)?;
        made = Some(ensure_bridge(host, conf, plan, mtu, mac)?);
        Ok(())
    });
    Ok(made.or(found.map(adopted)))
}

fn adopted(link: Link) -> Shared {
    Shared { link, pinned: false }
}

/// What of a bridge is no longer as ADD leaves it.
fn damage(conf: &Conf, plan: &Plan, link: &Link) -> Option<&'static str> {
    let info = link.bridge.unwrap_or_default();
    let found = [
        (!link.up, "it is down"),
        (link.accept_ra.unwrap_or_default() != 0, "it takes router advertisements"),
        (conf.promisc_mode && link.promiscuity == 0, "it is not promiscuous"),
        (plan.vlans.filtering && !info.vlan_filtering, "it does not keep VLANs apart"),
        (
            conf.macspoofchk && info.learns_link_local == Some(true),
            "it learns from link-local frames",
        ),
    ];
    found.into_iter().find(|(is_so, _)| *is_so).map(|(_, what)| what)
}

/// An attachment's pair and the bridge that it belongs to.
struct Pair<'a> {
    conf: &'a Conf,
    plan: &'a Plan,
    owner: Owner<'a>,
    bridge: &'a Link,
    /// The host's end.
    port: &'a Link,
    container: &'a Link,
}

impl Pair<'_> {
    /// Makes the host's end a port again, or completes what the port has lost.
    fn repair(&self, host: &Netlink, repairs: &mut Repairs) -> Result<()> {
        let Pair { conf, plan, bridge, port, container, .. } = *self;
        let name = &port.name;
        match port.master {
            None => {
                let what = format!("port \"{name}\" of bridge \"{}\"", bridge.name);
                repairs.restore(what, || {
                    self.connect(host)?;
                    // A bridge sends nothing before it has the carrier of its first port.
                    if bridge.oper_state == OperState::Up || !container.up {
                        return Ok(());
                    }
                    configure::wait_for_carrier(host, bridge)
                });
                return Ok(());
            }
            Some(master) if master != bridge.index => {
                repairs.leave(format!(
                    "\"{name}\" is a port of another link than \"{}\"",
                    bridge.name
                ));
                return Ok(());
            }
            Some(_) => {}
        }
        let change = LinkChange::new;
        let set = |change: LinkChange| Ok(host.set_link(port.index, change)?);
        if port.accept_ra.unwrap_or_default() != 0 {
            let what = format!("sysctl net/ipv6/conf/{name}/accept_ra");
            repairs.restore(what, || {
                veth::refuse_advertisements(port);
                Ok(())
            });
        }
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
        if plan.vlans.has_any()
            && let Some(missing) = plan.vlans.missing(port, &vlan::of_port(host, port)?)
        {
            repairs.restore(missing, || plan.vlans.set(host, bridge, port));
        }
        if !port.up {
            repairs.restore(format!("port \"{name}\": it is down"), || set(change().up()));
        }
        Ok(())
    }

    /// No frame passes before the port is protected: its MAC is checked by its name, so already now; for what
    /// only a port can have, it is down meanwhile.
    fn connect(&self, host: &Netlink) -> Result<()> {
        let Pair { conf, plan, owner, bridge, port, container } = *self;
        veth::refuse_advertisements(port);
        if let Some(checked) = protect::checked(conf, port, container)? {
            let filter = PacketFilter::new();
            // Rules are back already; a transaction for each port would take long.
            if spoof::check(&filter, owner, &checked).is_err() {
                spoof::add(&filter, owner, &checked)?;
            }
        }
        let is_guarded = conf.port_isolation || plan.vlans.filtering;
        if is_guarded {
            host.set_link(port.index, LinkChange::new().down())?;
        }
        host.set_link(port.index, LinkChange::new().master(bridge.index))?;
        if port.up && !is_guarded && !conf.hairpin_mode {
            return Ok(());
        }
        let new = NewPort { bridge, link: port, checked: None };
        protect::start(host, &PacketFilter::new(), owner, conf, plan, &new)
    }

    /// The gateway's addresses, on the bridge or on the interface of the VLAN, and forwarding.
    fn gateway(
        &self,
        host: &Netlink,
        pinned: bool,
        gateways: &[IpNet],
        repairs: &mut Repairs,
    ) -> Result<()> {
        let Pair { conf, plan, bridge, port, .. } = *self;
        let mut link = vlan_gateway::name(conf, plan)
            .map_or(Ok(Some(bridge.clone())), |name| host.link(&name))?;
        if let Err(error) = vlan_gateway::verify(host, conf, plan, bridge) {
            repairs.restore(error.msg(), || {
                let mut undo = Rollback::new();
                link = vlan_gateway::ensure(host, conf, plan, bridge, port.index, &mut undo)?;
                // Unless the container is just being deleted: its gateway goes with it.
                if host.link_by_index(port.index)?.is_some() {
                    undo.commit();
                }
                Ok(())
            });
        }
        // All attachments of the network share what follows.
        if !repairs.is_first(format!("{gateways:?} of {:?}", link.as_ref().map(|link| link.index)))
        {
            return Ok(());
        }
        for key in forwarding::missing(gateways.iter().map(IpNet::addr)) {
            let ips = gateways.iter().map(IpNet::addr);
            repairs.restore(format!("sysctl {key}"), || forwarding::enable(host, ips));
        }
        let Some(link) = link else { return Ok(()) };
        let on = Shared { pinned: pinned && link.index == bridge.index, link };
        let present = host.dump_addrs(on.link.index)?;
        let is_missing =
            |gateway: &&IpNet| !present.iter().any(|addr| addr.net.addr() == gateway.addr());
        for gateway in gateways.iter().filter(is_missing) {
            let what = format!("address {gateway} of \"{}\"", on.link.name);
            let overlaps =
                |net: &IpNet| net.contains(&gateway.addr()) || gateway.contains(&net.addr());
            let other = present
                .iter()
                .map(|addr| addr.net)
                .find(|net| overlaps(net) && !gateways.contains(net));
            match other {
                Some(other) => repairs.leave(format!("{what}: it has {other}")),
                None => repairs.restore(what, || {
                    gateway::add(host, &on, *gateway)?;
                    configure::wait_for_ipv6(host, [gateway.addr()].into_iter())
                }),
            }
        }
        Ok(())
    }
}
