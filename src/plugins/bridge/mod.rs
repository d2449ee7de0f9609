//! bridge: a veth pair between the container and a Linux bridge on the host.
//!
//! The bridge is created on first use and shared by all containers of its networks. With
//! `isGateway` it has the gateway's address and the host forwards; with `isDefaultGateway` the
//! container's default route points to it. `ipam` is optional: without it the link is layer 2.
//!
//! On the host it leaves, while the container lives, one `veth` port, with `ipMasq` the masquerading of its addresses,
//! with `macspoofchk` the check of its source MACs; permanently, the bridge with its gateway addresses, enabled
//! forwarding, and the packet filter's tables. A VLAN's gateway is an interface of its own, deleted with the last port
//! of the VLAN.

mod mac;
mod repair;
mod shared;
mod verify;
mod vlan;
mod vlan_gateway;

use serde::Deserialize;

use crate::attachment::{HostEnd, Record};
use crate::cni::{CniResult, IfName};
use crate::error::{Context, Error, Result};
use crate::iface::Inside;
use crate::iface::configure::{self, Style};
use crate::iface::mtu::Mtu;
use crate::iface::veth::{self, Wanted};
use crate::netfilter::spoof::{self, Port};
use crate::netfilter::{Backend, Owner, layout, masquerade};
use crate::netlink::{Link, LinkChange, Mac, Netlink, Switch};
use crate::repairs::Repairs;
use crate::skel::{
    AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Remarks, Rollback, del_and_release,
};
use crate::sort::sort_by_key;

use self::shared::Shared;
use self::vlan::{VlanTrunk, Vlans};

pub struct Bridge;

/// The keys of a bridge network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(clippy::struct_excessive_bools, reason = "the configuration's own keys")]
pub struct Conf {
    /// Name of the bridge. Default `cni0`.
    #[serde(default = "default_bridge")]
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
    /// Wait for the end of duplicate address detection for IPv6.
    enabledad: bool,
    /// Leave the container's end down; excludes `ipam`.
    disable_container_interface: bool,
    /// Keep the port from exchanging frames with other isolated ports.
    port_isolation: bool,
    /// `args.cni.mac`: MAC of the container's end.
    args: Args,
    /// `runtimeConfig.mac` (capability `mac`): the same; has precedence.
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
    mac: String,
}

fn default_bridge() -> String {
    "cni0".to_owned()
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
        let bridge = shared::ensure(host, &plan, mtu, Mac::random_local())?;
        let filter = cx.filter();
        let mut undo = Rollback::new();

        let master = Some(bridge.link.index);
        let wanted = Wanted { ifname: &req.ifname, mtu, mac: plan.mac, master };
        let veth::Pair { host: port, container: link } = veth::add(host, netns, &wanted)?;
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let index = port.index;
        let checked = conf.macspoofchk.then(|| spoof_port(&port, &link)).transpose()?;
        let registered = checked.clone();
        undo.push(format!("delete \"{}\"", port.name), move || {
            host.del_link_by_index(index)?;
            registered.map_or(Ok(()), |port| spoof::del(filter, owner, &[port]))
        });
        cx.set_end(HostEnd::own(host, &port));
        // Before the port forwards its first frame.
        if let Some(checked) = &checked {
            // Once more when the addresses are known.
            cx.note(Self::NAME, req, &CniResult::new(), &mut undo);
            spoof::add(filter, owner, checked)?;
            mac::require_unused(host, &plan, &bridge.link, &port)?;
        }
        start_port(host, &plan, owner, &bridge.link, &port)?;
        let mut result = if plan.l3 { cx.ipam_add(&mut undo)? } else { CniResult::new() };
        let gateways = plan.gateways(&mut result);

        result.interfaces = [&bridge.link, &port].map(|link| veth::interface(link, "")).into();
        result.interfaces.push(veth::interface(&link, &req.sandbox.path));
        if conf.macspoofchk || plan.masquerades {
            cx.note(Self::NAME, req, &result, &mut undo);
        }
        configure_container(&inside, &link, conf, &result)?;
        if plan.masquerades {
            let addrs = result.addresses();
            let registered = addrs.clone();
            undo.push("end masquerading", move || masquerade::del(filter, owner, &registered));
            masquerade::add(filter, Backend::choose(plan.backend, filter), owner, &addrs)?;
        }
        if !conf.disable_container_interface {
            configure::wait_for_carrier(host, &port).context(|| "bridge port in error state")?;
        }
        // Late, as other containers may use the addresses that `forceAddress` removes.
        if !gateways.is_empty() {
            if bridge.pinned {
                shared::warn_of_routes(host, &conf.bridge, &gateways);
            }
            let vlan = vlan_gateway::ensure(host, &plan, &bridge.link, index, &mut undo)?;
            let vlan = vlan.map(|link| Shared { link, pinned: true });
            let on = vlan.as_ref().unwrap_or(&bridge);
            shared::ensure_gateways(host, on, conf, &gateways, &mut undo)?;
            result.interfaces.extend(vlan.map(|vlan| veth::interface(&vlan.link, "")));
        }
        if !bridge.pinned {
            result.interfaces[0] = veth::interface(&host.require_link(&conf.bridge)?, "");
        }
        cx.finish(&mut result);
        undo.commit();
        Ok(result)
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        verify::attachment(cx, &Plan::resolve(cx, conf)?, req)
    }

    fn repair(cx: &Cx<'_>, conf: &Conf, req: &CheckReq, repairs: &mut Repairs) -> Result<()> {
        repair::attachment(cx, &Plan::resolve(cx, conf)?, req, repairs)
    }

    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let mut failures = Failures::new();
        let (filter, prev) = (cx.filter(), req.prev.as_ref());
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        // The keys may have been changed since ADD.
        let has_rules = Record::of(owner).is_some();
        if has_rules || (conf.ip_masq && cx.has_ipam()) {
            let addrs = prev.map(CniResult::addresses).unwrap_or_default();
            failures.keep(masquerade::del(filter, owner, &addrs));
        }
        del_and_release(cx, &mut failures, Cx::ipam_del, |failures| {
            let deleted = failures.keep(req.del_veth(cx));
            // After the port, so that it never forwards unchecked frames.
            if has_rules || conf.macspoofchk {
                let ports = prev.map(|prev| listed_ports(prev, &req.ifname)).unwrap_or_default();
                failures.keep(spoof::del(filter, owner, &ports));
            }
            del_gateway(cx, conf, failures);
            deleted
        });
        failures.into_result()
    }

    fn gc(cx: &Cx<'_>, conf: &Conf, req: &GcReq) -> Result<()> {
        let mut failures = Failures::new();
        del_and_release(cx, &mut failures, Cx::ipam_gc, |failures| {
            let deleted = failures.keep(req.del_stale_veths(cx));
            let (filter, network) = (cx.filter(), cx.net.name.as_str());
            let valid = Owner::each(&cx.net.name, &req.valid);
            failures.keep(masquerade::gc(filter, network, &valid));
            failures.keep(spoof::gc(filter, network, &valid));
            del_gateway(cx, conf, failures);
            deleted
        });
        failures.into_result()
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let plan = Plan::resolve(cx, conf).or_unavailable()?;
        let host = cx.usable_host()?;
        conf.mtu.resolve(host).or_unavailable()?;
        if let Some(link) = host.link(&conf.bridge)? {
            shared::require_bridge(&link).or_unavailable()?;
            plan.vlans.require_filtering(host, &link).or_unavailable()?;
        }
        let filter = cx.filter();
        if conf.macspoofchk {
            Backend::Nftables.require_usable(filter)?;
            layout::refuse(spoof::damage(filter)?).or_unavailable()?;
        }
        if plan.masquerades {
            Backend::choose(plan.backend, filter).require_usable(filter)?;
            layout::refuse(masquerade::damage(filter)?).or_unavailable()?;
        }
        cx.if_ipam(Cx::ipam_status)
    }
}

/// The validated configuration.
struct Plan<'a> {
    conf: &'a Conf,
    l3: bool,
    /// Whether the bridge gets the gateway addresses.
    gateway: bool,
    masquerades: bool,
    mac: Option<Mac>,
    /// The configured back end of `ipMasq`.
    backend: Option<Backend>,
    vlans: Vlans,
}

impl<'a> Plan<'a> {
    fn resolve(cx: &Cx<'_>, conf: &'a Conf) -> Result<Plan<'a>> {
        IfName::parse(&conf.bridge).map_err(|e| {
            Error::config(format!("bridge name \"{}\": {}", conf.bridge, e.msg()))
                .with_details(e.details())
        })?;
        let vlans = Vlans::resolve(conf)?;
        let mac = mac::requested(cx, conf)?;
        let l3 = cx.has_ipam();
        if l3 && conf.disable_container_interface {
            let msg = "cannot use IPAM when DisableContainerInterface flag is set";
            return Err(Error::config(msg));
        }
        if conf.hairpin_mode && conf.promisc_mode {
            let msg = "cannot set hairpin mode and promiscuous mode at the same time";
            return Err(Error::config(msg)
                .with_details("remove one of them: with \"hairpinMode\" a container reaches its own mapped ports on every node"));
        }
        let masquerades = l3 && conf.ip_masq;
        let backend = conf.ip_masq_backend.as_deref().filter(|_| masquerades);
        let backend = Backend::parse(backend, "unknown ipmasq backend")?;
        let gateway = l3 && (conf.is_gateway || conf.is_default_gateway);
        let plan = Plan { conf, l3, gateway, masquerades, mac, backend, vlans };
        if let Some(name) = vlan_gateway::name(&plan) {
            IfName::parse(&name)
                .map_err(|e| Error::config(format!("VLAN gateway \"{name}\": {}", e.msg())))?;
        }
        Ok(plan)
    }

    /// Assigns the addresses to the container's interface and adds missing gateways and default routes. Returns the
    /// gateway addresses of the bridge.
    fn gateways(&self, result: &mut CniResult) -> Vec<ipnet::IpNet> {
        let mut on_bridge = Vec::new();
        for ip in &mut result.ips {
            ip.interface = Some(2);
            if !self.gateway {
                continue;
            }
            let gw = *ip.gateway.get_or_insert_with(|| shared::first_host(ip.address));
            if self.conf.is_default_gateway {
                shared::add_default_route(&mut result.routes, gw);
            }
            on_bridge.extend(ipnet::IpNet::new(gw, ip.address.prefix_len()).ok());
        }
        // Stable: within a family the order of the ranges is kept.
        sort_by_key(&mut on_bridge, |net: &ipnet::IpNet| net.addr().is_ipv6());
        on_bridge.dedup();
        on_bridge
    }
}

/// Deletes the gateway of a VLAN without other ports. With a configuration that ADD refuses there is no gateway.
fn del_gateway(cx: &Cx<'_>, conf: &Conf, failures: &mut Failures) {
    if conf.vlan != 0
        && let Ok(plan) = Plan::resolve(cx, conf)
    {
        failures.keep(cx.host().and_then(|host| vlan_gateway::del(host, &plan, None)));
    }
}

/// The port for the check of source MACs; `container` is its other end.
fn spoof_port(port: &Link, container: &Link) -> Result<Port> {
    let mac = container
        .mac
        .ok_or_else(|| Error::internal(format!("\"{}\" has no MAC address", container.name)))?;
    Ok(Port { name: port.name.clone(), mac })
}

/// The port in a result: the second interface of the host, behind the bridge, with the MAC of the container's interface.
fn listed_ports(prev: &CniResult, ifname: &IfName) -> Vec<Port> {
    let (host, inside): (Vec<_>, Vec<_>) =
        prev.interfaces.iter().partition(|entry| entry.sandbox.is_empty());
    let inside = inside.iter().find(|entry| entry.name == ifname.as_str());
    let Some(mac) = inside.and_then(|entry| entry.mac.parse().ok()) else { return Vec::new() };
    host.get(1).map(|entry| Port { name: entry.name.clone(), mac }).into_iter().collect()
}

/// Sets the VLANs and the attributes of a port, which is down, and sets the port up. New ports have both attributes off.
fn start_port(
    host: &Netlink,
    plan: &Plan<'_>,
    owner: Owner<'_>,
    bridge: &Link,
    port: &Link,
) -> Result<()> {
    plan.vlans.set(host, bridge, port, &plan.vlans.port)?;
    let mut change = LinkChange::new();
    if plan.conf.hairpin_mode {
        change = change.hairpin(Switch::On);
    }
    if plan.conf.port_isolation {
        change = change.isolated(Switch::On);
    }
    veth::start(host, port, &owner.label(), change)
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
    // Without duplicate address detection, only `ndisc_notify` informs neighbours that an address has moved.
    let (style, ipv6): (_, &[_]) = if conf.enabledad {
        (Style::Detect, &[("accept_dad", "1"), ("enhanced_dad", "1"), ("ndisc_notify", "1")])
    } else {
        (Style::Immediate, &[("accept_dad", "0"), ("ndisc_notify", "1")])
    };
    configure::layer3(inside, link, result, style, ipv6)
}
