//! Repair of an attachment: restores the missing bridge, gateway addresses, port and routes of the
//! container. Deliberate changes are left and reported.

use ipnet::IpNet;

use super::shared::{self, SharedBridge};
use super::{BridgePlan, start_port, vlan, vlan_gateway};
use crate::framework::{CallContext, CheckRequest, Rollback};
use crate::iface::child::{self, CheckedLink};
use crate::iface::{ContainerNetns, configure, forwarding, verify, veth};
use crate::netfilter::spoof::{self, SpoofPart};
use crate::netfilter::{AttachmentId, PacketFilter};
use crate::netlink::{Link, LinkChange, MacAddress, Netlink, OnOffSetting, OperationalState};
use crate::repairs::RepairFindings;
use cni::error::{Error, Result};
use cni::{CniResult, ResultInterface};

pub(super) fn restore_attachment(
    cx: &CallContext<'_>,
    plan: &BridgePlan<'_>,
    req: &CheckRequest,
    repairs: &mut RepairFindings,
) -> Result<()> {
    let (inside, host) = (ContainerNetns::open_in(req.sandbox.open_netns()?)?, cx.host_netlink()?);
    let prev = req.require_final_result()?;
    let (index, entry) = verify::find_container_entry(prev, &req.ifname, &req.sandbox.path)?;
    let link = inside.require_link(req.ifname.as_str())?;
    // Nothing to repair without a pair that is proved to be this container's.
    let Some((port, _)) = veth::find_listed_host_end(host, &inside, prev, &link)? else {
        return Ok(());
    };
    let Some(bridge) = restore_bridge(host, plan, prev, repairs)? else { return Ok(()) };
    let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
    let pair =
        BridgedPair { plan, owner, bridge: &bridge.link, port: &port, container: &link, entry };
    pair.restore_port(host, repairs)?;
    if plan.gateway {
        let gateways: Vec<IpNet> = prev
            .ips_of_interface(index)
            .filter_map(|ip| IpNet::new(ip.usable_gateway()?, ip.address.prefix_len()).ok())
            .collect();
        pair.restore_gateway(host, bridge.pinned, &gateways, repairs)?;
    }
    child::restore_routes(&inside, &CheckedLink { link, prev, index }, repairs)
}

/// The bridge, created or adopted as by ADD, with the MAC that its containers have cached; `None`
/// if it cannot be restored.
fn restore_bridge(
    host: &Netlink,
    plan: &BridgePlan<'_>,
    prev: &CniResult,
    repairs: &mut RepairFindings,
) -> Result<Option<SharedBridge>> {
    let name = &plan.conf.bridge;
    let listed = prev.interfaces.iter().find(|i| i.name == *name && i.sandbox.is_empty());
    let known: Option<MacAddress> = listed.and_then(|entry| entry.mac.parse().ok());
    let found = host.find_link(name)?;
    let (what, mac) = match &found {
        None => (format!("bridge \"{name}\""), None),
        Some(link) if link.bridge.is_none() => {
            repairs.record_changed(format!("\"{name}\" is not a bridge"));
            return Ok(None);
        }
        Some(link) => {
            if let Err(error) = plan.vlans.require_filtering(host, link) {
                repairs.record_changed(error.to_string());
                return Ok(None);
            }
            if let (Some(known), Some(mac)) = (known, link.mac)
                && known != mac
            {
                repairs.record_changed(format!(
                    "bridge \"{name}\" has the MAC {mac}, containers know {known}"
                ));
            }
            let Some(damage) = first_difference(plan, link) else {
                return Ok(found.map(adopted_bridge));
            };
            (format!("bridge \"{name}\": {damage}"), link.mac)
        }
    };
    let mac = mac.or(known).unwrap_or_else(MacAddress::random_local);
    let mut restored = None;
    repairs.restore_missing(what, || {
        let mtu = plan.conf.mtu.resolve_bytes(host)?;
        restored = Some(shared::ensure_bridge(host, plan, mtu, mac)?);
        Ok(())
    });
    Ok(restored.or(found.map(adopted_bridge)))
}

fn adopted_bridge(link: Link) -> SharedBridge {
    SharedBridge { link, pinned: false }
}

/// The first difference of a bridge from the state after ADD.
fn first_difference(plan: &BridgePlan<'_>, link: &Link) -> Option<&'static str> {
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
struct BridgedPair<'a> {
    plan: &'a BridgePlan<'a>,
    owner: AttachmentId<'a>,
    bridge: &'a Link,
    /// The host's end.
    port: &'a Link,
    container: &'a Link,
    /// The container's interface in the result.
    entry: &'a ResultInterface,
}

impl BridgedPair<'_> {
    /// Makes the host's end a port again, or restores the missing attributes of the port.
    fn restore_port(&self, host: &Netlink, repairs: &mut RepairFindings) -> Result<()> {
        let BridgedPair { plan, bridge, port, .. } = *self;
        let (conf, name) = (plan.conf, &port.name);
        let Some(master) = port.master else {
            let what = format!("port \"{name}\" of bridge \"{}\"", bridge.name);
            repairs.restore_missing(what, || self.connect_port(host));
            return Ok(());
        };
        if master != bridge.index {
            let bridge = &bridge.name;
            repairs
                .record_changed(format!("\"{name}\" is a port of another link than \"{bridge}\""));
            return Ok(());
        }
        let change = LinkChange::new;
        let set = |change: LinkChange| Ok(host.change_link(port.index, change)?);
        veth::refuse_advertisements_again(port, repairs);
        let state = port.port.unwrap_or_default();
        if conf.port_isolation && !state.isolated {
            let what = format!("isolation of port \"{name}\"");
            repairs.restore_missing(what, || set(change().set_isolated(OnOffSetting::On)));
        }
        if conf.hairpin_mode && !state.hairpin {
            let what = format!("hairpin mode of port \"{name}\"");
            repairs.restore_missing(what, || set(change().set_hairpin(OnOffSetting::On)));
        }
        if (state.hairpin && !conf.hairpin_mode) || (state.isolated && !conf.port_isolation) {
            repairs.record_changed(format!(
                "port \"{name}\" has hairpin mode or isolation, not configured"
            ));
        }
        if !plan.vlans.port.is_empty()
            && let Some(missing) =
                plan.vlans.describe_missing_vlan(port, &vlan::read_port_vlans(host, port)?)
        {
            repairs.restore_missing(missing, || {
                plan.vlans.apply_to_port(host, bridge, port, &plan.vlans.port)
            });
        }
        if !port.up {
            repairs
                .restore_missing(format!("port \"{name}\": it is down"), || set(change().set_up()));
        }
        Ok(())
    }

    /// Connects the port to the bridge. No frame passes before the port is protected: the check of
    /// source MACs matches the name of the port and is restored first; the port is down until
    /// attributes of ports are set.
    fn connect_port(&self, host: &Netlink) -> Result<()> {
        let BridgedPair { plan, owner, bridge, port, container, entry } = *self;
        let conf = plan.conf;
        veth::refuse_advertisements(port);
        if conf.macspoofchk {
            // The container may have changed the MAC of its interface since ADD.
            let mac = entry
                .mac
                .parse()
                .map_err(|e| Error::internal(format!("prevResult: MAC of {}: {e}", entry.name)))?;
            let (filter, checked) =
                (PacketFilter::new(), SpoofPart { name: port.name.clone(), mac });
            // The rules are restored already; a transaction for each port would be slow.
            if spoof::check_port(&filter, owner, &checked).is_err() {
                spoof::add_port(&filter, owner, &checked)?;
            }
        }
        let is_guarded = conf.port_isolation || plan.vlans.filtering;
        if is_guarded {
            host.change_link(port.index, LinkChange::new().set_down())?;
        }
        host.change_link(port.index, LinkChange::new().set_master(bridge.index))?;
        if !port.up || is_guarded || conf.hairpin_mode {
            start_port(host, plan, owner, bridge, port)?;
        }
        // A bridge sends nothing before it has the carrier of its first port.
        if bridge.oper_state == OperationalState::Up || !container.up {
            return Ok(());
        }
        configure::wait_for_carrier(host, bridge)
    }

    /// The gateway's addresses, on the bridge or on the interface of the VLAN, and forwarding.
    fn restore_gateway(
        &self,
        host: &Netlink,
        pinned: bool,
        gateways: &[IpNet],
        repairs: &mut RepairFindings,
    ) -> Result<()> {
        let BridgedPair { plan, bridge, port, .. } = *self;
        let mut link = vlan_gateway::interface_name(plan)
            .map_or(Ok(Some(bridge.clone())), |name| host.find_link(&name))?;
        if let Err(error) = vlan_gateway::verify_interface(host, plan, bridge) {
            repairs.restore_missing(error.message(), || {
                let mut undo = Rollback::new();
                link = vlan_gateway::ensure_interface(host, plan, bridge, port.index, &mut undo)?;
                // Otherwise a DEL has deleted the port, and the gateway may be without users.
                if host.find_link_by_index(port.index)?.is_some() {
                    undo.commit();
                }
                Ok(())
            });
        }
        // The rest is common to all attachments of the network.
        if !repairs.is_first_examination(format!(
            "{gateways:?} of {:?}",
            link.as_ref().map(|link| link.index)
        )) {
            return Ok(());
        }
        let Some(link) = link else { return Ok(()) };
        forwarding::restore_disabled(host, &link, gateways, repairs);
        let on = SharedBridge { pinned: pinned && link.index == bridge.index, link };
        let present = host.dump_addresses(on.link.index)?;
        let is_missing =
            |gateway: &&IpNet| !present.iter().any(|addr| addr.net.addr() == gateway.addr());
        for gateway in gateways.iter().filter(is_missing) {
            let what = format!("address {gateway} of \"{}\"", on.link.name);
            let mut others = present.iter().map(|addr| addr.net);
            let other = others
                .find(|net| shared::networks_overlap(net, gateway) && !gateways.contains(net));
            match other {
                Some(other) => repairs.record_changed(format!("{what}: it has {other}")),
                None => repairs.restore_missing(what, || {
                    shared::add_gateway(host, &on, *gateway)?;
                    configure::wait_for_ipv6(host, &mut [gateway.addr()].into_iter())
                }),
            }
        }
        Ok(())
    }
}
