//! bridge: a veth pair between the container and a Linux bridge on the host.
//!
//! The bridge is created on first use and shared by all containers of its networks. With
//! `isGateway` it has the gateway's address and the host forwards; with `isDefaultGateway` the
//! container's default route points to it. `ipam` is optional: without it the link is layer 2.
//!
//! On the host it leaves, while the container lives, one `veth` port, with `ipMasq` what
//! masquerades its addresses, with `macspoofchk` what checks its port; for good, the bridge with its
//! gateway addresses, forwarding switched on, and the packet filter's tables. A VLAN's gateway is an
//! interface of its own, which goes with the last port of the VLAN.

mod gateway;
mod protect;
mod repair;
mod verify;
mod vlan;
mod vlan_gateway;

use serde::Deserialize;

use crate::cni::{CniResult, IfName};
use crate::error::{Context, Error, Result};
use crate::iface::configure::{self, Connected, Style};
use crate::iface::inside::{Inside, Setting};
use crate::iface::mtu::Mtu;
use crate::iface::veth::{self, Wanted};
use crate::netfilter::{Backend, Owner, PacketFilter, spoof};
use crate::netlink::{Dad, Link, LinkChange, LinkKind, Mac, Netlink, NewLink, OperState, Switch};
use crate::repairs::Repairs;
use crate::skel::{
    AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Remarks, Rollback, del_and_release,
};
use crate::sort::sort_by_key;

use self::protect::NewPort;
use self::vlan::{VlanTrunk, Vlans};

#[derive(Debug)]
pub struct Bridge;

/// The keys of a bridge network.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(clippy::struct_excessive_bools, reason = "the configuration's own keys")]
pub struct Conf {
    /// Name of the bridge. Default `cni0`.
    bridge: String,
    /// Give the bridge the gateway address of each range and forward. Needs `ipam`.
    is_gateway: bool,
    /// As `isGateway`, and make it the container's default route.
    is_default_gateway: bool,
    /// Replace other addresses of the bridge instead of refusing.
    force_address: bool,
    /// Masquerade the container's traffic to other networks.
    ip_masq: bool,
    /// `iptables` or `nftables`. Default: [`Backend::choose`].
    ip_masq_backend: Option<String>,
    /// MTU of the pair, and of the bridge where it is created, in bytes, or `"auto"`. Default: the
    /// kernel's.
    mtu: Mtu,
    /// Let frames leave through the port they came in by.
    hairpin_mode: bool,
    /// Set the bridge promiscuous; excludes `hairpinMode`.
    promisc_mode: bool,
    /// VLAN of the port, 0 to 4094. Default 0: none.
    vlan: i64,
    /// VLANs that reach the container tagged.
    vlan_trunk: Option<Vec<VlanTrunk>>,
    /// Keep the port in the VLAN that the bridge puts new ports in.
    preserve_default_vlan: bool,
    /// Drop frames with a source MAC that is not the container's.
    macspoofchk: bool,
    /// Let duplicate address detection for IPv6 run its course.
    enabledad: bool,
    /// Leave the container's end down; excludes `ipam`.
    disable_container_interface: bool,
    /// Keep the port from exchanging frames with other isolated ports.
    port_isolation: bool,
    /// `args.cni.mac`: MAC of the container's end.
    args: Args,
    /// `runtimeConfig.mac` (capability `mac`): the same; wins.
    runtime_config: WithMac,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Args {
    cni: WithMac,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct WithMac {
    mac: Option<String>,
}

impl Default for Conf {
    fn default() -> Conf {
        Conf {
            bridge: "cni0".to_owned(),
            is_gateway: false,
            is_default_gateway: false,
            force_address: false,
            ip_masq: false,
            ip_masq_backend: None,
            mtu: Mtu::default(),
            hairpin_mode: false,
            promisc_mode: false,
            vlan: 0,
            vlan_trunk: None,
            preserve_default_vlan: false,
            macspoofchk: false,
            enabledad: false,
            disable_container_interface: false,
            port_isolation: false,
            args: Args::default(),
            runtime_config: WithMac::default(),
        }
    }
}

impl Plugin for Bridge {
    const NAME: &'static str = "bridge";
    const ABOUT: &'static str = "veth pair from the container to a bridge of the host";
    const OUTLIVES_ITS_CONTAINER: bool = true;
    const REPAIRS: bool = true;
    type Conf = Conf;

    fn examine(cx: &Cx<'_>, conf: &Conf, remarks: &mut Remarks) -> Result<()> {
        let needs_addresses = [
            (conf.is_gateway, "isGateway"),
            (conf.is_default_gateway, "isDefaultGateway"),
            (conf.ip_masq, "ipMasq"),
        ];
        for (_, key) in needs_addresses.iter().filter(|(is_set, _)| *is_set && !cx.has_ipam()) {
            let msg = format!("\"{key}\" has no effect without addresses");
            remarks
                .warnings
                .push(Error::config(msg).with_details("add \"ipam\", or remove the key"));
        }
        conf.mtu.require_ethernet()?;
        Plan::resolve(cx, conf).map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let plan = Plan::resolve(cx, conf)?;
        let netns = req.sandbox.netns()?;
        let (inside, host) = (Inside::enter(netns)?, cx.host()?);
        let mtu = conf.mtu.resolve(host)?;
        let bridge = ensure_bridge(host, conf, &plan, mtu, Mac::random_local())?;
        let filter = PacketFilter::new();
        let mut undo = Rollback::new();

        let pair = veth::add(host, netns, plan.veth(&req.ifname, bridge.link.index, mtu))?;
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let veth::Pair { host: port, container: link } = pair;
        let (index, checked) = (port.index, protect::checked(conf, &port, &link)?);
        let (filter, registered) = (&filter, checked.clone());
        undo.push(format!("delete \"{}\"", port.name), move || {
            host.del_link_by_index(index)?;
            registered.map_or(Ok(()), |port| spoof::del(filter, owner, &[port]))
        });
        let new = NewPort { bridge: &bridge.link, link: &port, checked };
        protect::start(host, filter, owner, conf, &plan, &new)?;
        let mut result = if plan.l3 { cx.ipam_add(&mut undo)? } else { CniResult::new() };
        let gateways = plan.gateways(&mut result);

        result.interfaces = [&bridge.link, &port].map(|link| veth::interface(link, "")).into();
        result.interfaces.push(veth::interface(&link, &req.sandbox.path));
        if conf.macspoofchk || (plan.l3 && conf.ip_masq) {
            cx.note(Self::NAME, req, &result, &mut undo);
        }
        configure_container(&inside, &link, conf, &result)?;
        if !gateways.is_empty() {
            let (link, index) = (&bridge.link, port.index);
            let vlan = vlan_gateway::ensure(host, conf, &plan, link, index, &mut undo)?;
            let vlan = vlan.map(|link| Shared { link, pinned: true });
            let on = vlan.as_ref().unwrap_or(&bridge);
            gateway::ensure(host, on, conf, &gateways)?;
            if on.link.name != conf.bridge {
                result.interfaces.push(veth::interface(&on.link, ""));
            }
        }
        if plan.l3 && conf.ip_masq {
            let backend = Backend::choose(plan.backend, filter);
            protect::addresses(filter, owner, backend, &result, &mut undo)?;
        }
        if !conf.disable_container_interface {
            configure::wait_for_carrier(host, &port).context(|| "bridge port in error state")?;
        }
        if bridge.follows(&port) {
            result.interfaces[0] = veth::interface(&host.require_link(&conf.bridge)?, "");
        }
        cx.finish(&mut result);
        undo.commit();
        Ok(result)
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let plan = Plan::resolve(cx, conf)?;
        verify::attachment(cx, conf, &plan, req)
    }

    fn repair(cx: &Cx<'_>, conf: &Conf, req: &CheckReq, repairs: &mut Repairs) -> Result<()> {
        let plan = Plan::resolve(cx, conf)?;
        repair::attachment(cx, conf, &plan, req, repairs)
    }

    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let mut failures = Failures::new();
        let filter = PacketFilter::new();
        protect::del_addresses(cx, &filter, conf, req, &mut failures);
        del_and_release(cx, &mut failures, Cx::ipam_del, |failures| {
            failures.keep(req.del_veth(cx));
            protect::del_port(cx, &filter, conf, req, failures);
            del_gateway(cx, conf, failures);
        });
        failures.into_result()
    }

    fn gc(cx: &Cx<'_>, conf: &Conf, req: &GcReq) -> Result<()> {
        let mut failures = Failures::new();
        del_and_release(cx, &mut failures, Cx::ipam_gc, |failures| {
            failures.keep(req.del_stale_veths(cx));
            protect::gc(cx, req, failures);
            del_gateway(cx, conf, failures);
        });
        failures.into_result()
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let plan = Plan::resolve(cx, conf).or_unavailable()?;
        let host = cx.usable_host()?;
        conf.mtu.resolve(host).or_unavailable()?;
        if let Some(link) = host.link(&conf.bridge)? {
            require_bridge(&link).or_unavailable()?;
            plan.vlans.require_filtering(host, &link).or_unavailable()?;
        }
        protect::status(conf, &plan)?;
        cx.if_ipam(Cx::ipam_status)
    }
}

/// The validated configuration.
#[derive(Debug)]
struct Plan {
    l3: bool,
    gateway: bool,
    default_gateway: bool,
    mac: Option<Mac>,
    /// The configured back end of `ipMasq`.
    backend: Option<Backend>,
    vlans: Vlans,
}

impl Plan {
    fn resolve(cx: &Cx<'_>, conf: &Conf) -> Result<Plan> {
        IfName::parse(&conf.bridge).map_err(|e| {
            Error::config(format!("bridge name \"{}\": {}", conf.bridge, e.msg()))
                .with_details(e.details())
        })?;
        let vlans = Vlans::resolve(conf)?;
        let mac = requested_mac(cx, conf)?;
        let l3 = cx.has_ipam();
        if l3 && conf.disable_container_interface {
            let msg = "cannot use IPAM when DisableContainerInterface flag is set";
            return Err(Error::config(msg));
        }
        if conf.hairpin_mode && conf.promisc_mode {
            let msg = "cannot set hairpin mode and promiscuous mode at the same time";
            return Err(Error::config(msg)
                .with_details("remove \"promiscMode\" or \"hairpinMode\": each reaches a container's own port mapping"));
        }
        let backend = conf.ip_masq_backend.as_deref().filter(|_| conf.ip_masq && l3);
        let plan = Plan {
            l3,
            vlans,
            gateway: l3 && (conf.is_gateway || conf.is_default_gateway),
            default_gateway: l3 && conf.is_default_gateway,
            mac,
            backend: Backend::parse(backend, "unknown ipmasq backend")?,
        };
        vlan_gateway::require_name(conf, &plan)?;
        Ok(plan)
    }

    fn veth<'p>(&self, ifname: &'p IfName, bridge: u32, mtu: u32) -> Wanted<'p> {
        Wanted { ifname, mtu, mac: self.mac, master: Some(bridge) }
    }

    /// Points the addresses to the container's interface, fills in gateways and default routes;
    /// the addresses the bridge has to have as a gateway.
    fn gateways(&self, result: &mut CniResult) -> Vec<ipnet::IpNet> {
        let mut on_bridge = Vec::new();
        for ip in &mut result.ips {
            ip.interface = Some(2);
            if !self.gateway {
                continue;
            }
            let gw = *ip.gateway.get_or_insert_with(|| gateway::first_host(ip.address));
            if self.default_gateway {
                gateway::add_default_route(&mut result.routes, gw);
            }
            on_bridge.extend(ipnet::IpNet::new(gw, ip.address.prefix_len()).ok());
        }
        // The address of an earlier range stays in front, whatever the family.
        sort_by_key(&mut on_bridge, |net: &ipnet::IpNet| net.addr().is_ipv6());
        on_bridge.dedup();
        on_bridge
    }
}

/// Removes the gateway of a VLAN that has no other port. A configuration that ADD would refuse has
/// made none.
fn del_gateway(cx: &Cx<'_>, conf: &Conf, failures: &mut Failures) {
    if conf.vlan != 0
        && let Ok(plan) = Plan::resolve(cx, conf)
    {
        failures.keep(vlan_gateway::del(cx, conf, &plan));
    }
}

/// The bridge, and whether its address is known to stay as it is.
#[derive(Debug)]
struct Shared {
    link: Link,
    pinned: bool,
}

impl Shared {
    /// Whether the bridge may have taken over the address or the MTU of its new port: the lowest of
    /// its ports, unless it was told its own.
    fn follows(&self, port: &Link) -> bool {
        let Link { mac, mtu, oper_state, .. } = &self.link;
        // Without a port that runs it may have none at all.
        let has_lower = *oper_state == OperState::Up && *mac < port.mac;
        *mtu > port.mtu || !(self.pinned || has_lower)
    }
}

/// `runtimeConfig.mac`, else `args.cni.mac`, else `MAC` of `CNI_ARGS`.
fn requested_mac(cx: &Cx<'_>, conf: &Conf) -> Result<Option<Mac>> {
    let parse = |text: &str| text.parse::<Mac>().map_err(|e| e.to_string());
    let from_env = cx.args(&["MAC"])?.get("MAC", |text| Ok(text.to_owned()))?;
    let sources = [conf.runtime_config.mac.clone(), conf.args.cni.mac.clone(), from_env];
    let text = sources.into_iter().flatten().find(|text| !text.is_empty());
    text.map(|text| parse(&text)).transpose().map_err(Error::config)
}

/// Creates the bridge with the address `mac`, or uses the existing one; either way it is up.
fn ensure_bridge(host: &Netlink, conf: &Conf, plan: &Plan, mtu: u32, mac: Mac) -> Result<Shared> {
    let name = &conf.bridge;
    let failed = || format!("failed to create bridge \"{name}\"");
    if let Some(link) = host.link(name)? {
        return adopt(host, link, conf, plan).context(failed);
    }
    // A bridge with a MAC from the start does not take over the MAC of a port.
    let kind = LinkKind::Bridge { vlan_filtering: plan.vlans.filtering.then_some(true) };
    let mut bridge = NewLink::new(name, kind).mtu(mtu).up();
    // A bridge whose MAC was set has a carrier only with a running port, and without carrier no IPv6 address
    // is usable. While the container's end stays down no port runs, so the MAC is set later.
    let late = conf.disable_container_interface;
    if !late {
        bridge = bridge.mac(mac);
    }
    if conf.promisc_mode {
        bridge = bridge.promisc();
    }
    let pinned = match host.add_link(&bridge) {
        Ok(()) => true,
        // Another ADD was faster.
        Err(error) if error.is_exists() => {
            return adopt(host, host.require_link(name)?, conf, plan).context(failed);
        }
        Err(error) => return Err(error).context(failed),
    };
    let link = host.require_link(name)?;
    veth::refuse_advertisements(&link);
    not_to_learn_link_local(host, &link, conf)?;
    if late {
        host.set_link(link.index, LinkChange::new().mac(mac))?;
        return Ok(Shared { link: Link { mac: Some(mac), ..link }, pinned });
    }
    Ok(Shared { link, pinned })
}

fn adopt(host: &Netlink, link: Link, conf: &Conf, plan: &Plan) -> Result<Shared> {
    require_bridge(&link)?;
    plan.vlans.ensure_filtering(host, &link)?;
    // Also on a bridge that others made: containers are about to be on it.
    veth::refuse_advertisements(&link);
    not_to_learn_link_local(host, &link, conf)?;
    let promisc = conf.promisc_mode && link.promiscuity == 0;
    if !link.up || promisc {
        let change = LinkChange::new().up();
        host.set_link(link.index, if promisc { change.promisc(Switch::On) } else { change })?;
    }
    Ok(Shared { link, pinned: false })
}

fn require_bridge(link: &Link) -> Result<()> {
    if link.kind.as_deref() == Some("bridge") {
        return Ok(());
    }
    Err(Error::internal(format!("\"{}\" already exists but is not a bridge", link.name))
        .with_details("choose another name for the key \"bridge\", or remove that link"))
}

/// Frames to link-local addresses pass the check of source MACs by: the bridge is not to learn from
/// them. Nothing else depends on that, so it is done to bridges that others made as well.
fn not_to_learn_link_local(host: &Netlink, bridge: &Link, conf: &Conf) -> Result<()> {
    let learns = bridge.bridge.unwrap_or_default().learns_link_local;
    if !conf.macspoofchk || learns != Some(true) {
        return Ok(());
    }
    let change = LinkChange::no_link_local_learning();
    host.set_link(bridge.index, change).context(|| "failed to setup spoof-check")
}

/// The parameters for IPv6 addresses. Without an IPv6 address, duplicate address detection runs for
/// the link-local address only, and delays nothing.
fn settings(conf: &Conf, ifname: &str, result: &CniResult) -> Vec<Setting> {
    if !configure::has_ipv6(result) {
        return Vec::new();
    }
    let mut settings = configure::settings(result, ifname);
    let mut set = |key, value| {
        let key = format!("net/ipv6/conf/{ifname}/{key}");
        settings.push(Setting::optional(key, value));
    };
    set("accept_dad", if conf.enabledad { "1" } else { "0" });
    if conf.enabledad {
        set("enhanced_dad", "1");
    }
    // Without duplicate address detection neighbours would not learn that the addresses have moved.
    set("ndisc_notify", "1");
    settings
}

fn configure_container(
    inside: &Inside<'_>,
    link: &Link,
    conf: &Conf,
    result: &CniResult,
) -> Result<()> {
    if result.ips.is_empty() {
        if conf.disable_container_interface {
            return Ok(());
        }
        return configure::set_up(inside, link);
    }
    configure::announce(inside, link);
    inside.set(&settings(conf, &link.name, result))?;
    let dad = if conf.enabledad { Dad::Kernel } else { Dad::Off };
    let style = Style { dad, connected: Connected::Route };
    configure::addresses_and_up(inside, link, result, style)?;
    configure::add_routes(inside, link, result)
}
