//! bridge: a veth pair between the container and a Linux bridge on the host.
//!
//! The bridge is created on first use and shared by all containers of its networks. With
//! `isGateway` it has the gateway's address and the host forwards; with `isDefaultGateway` the
//! container's default route points to it. `ipam` is optional: without it the link is layer 2.
//!
//! State on the host while the container lives: one `veth` port, with `ipMasq` the masquerading of
//! its addresses, with `macspoofchk` the check of its source MACs. Permanently: the bridge with its
//! gateway addresses, enabled forwarding, and the packet filter's tables. A VLAN's gateway is an
//! interface of its own, deleted with the last port of the VLAN.

mod mac;
mod repair;
mod shared;
mod verify;
mod vlan;
mod vlan_gateway;

use serde::Deserialize;

use crate::attachment::{AttachmentRecord, HostVeth};
use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, Failures, GcRequest, Plugin,
    Rollback, delete_and_release,
};
use crate::iface::ContainerNetns;
use crate::iface::configure::{self, AddressStyle};
use crate::iface::mtu::MtuConfig;
use crate::iface::veth::{self, NewVethPair};
use crate::netfilter::masquerade::{self, MasqueradeOptions};
use crate::netfilter::spoof::{self, SpoofPart};
use crate::netfilter::{AttachmentId, RuleBackend};
use crate::netlink::{Link, LinkChange, MacAddress, Netlink, OnOffSetting};
use crate::repairs::RepairFindings;
use cni::config::{Args, MacConfig};
use cni::error::{Error, ErrorContext, Result};
use cni::sort::sort_by_key;
use cni::{CniResult, InterfaceName};

use self::shared::SharedBridge;
use self::vlan::{ConfiguredVlans, VlanTrunkEntry};

pub struct Bridge;

/// The keys of a bridge network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(clippy::struct_excessive_bools, reason = "the configuration's own keys")]
pub struct BridgeConfig {
    /// Name of the bridge. Default `cni0`.
    #[serde(default = "default_bridge")]
    bridge: String,
    /// Give the bridge the gateway address of each range and forward. Needs `ipam`.
    is_gateway: bool,
    /// As `isGateway`, and make it the container's default route.
    is_default_gateway: bool,
    /// Whether the default routes of `ipam` are the container's. Default: true.
    default_route: Option<bool>,
    /// Whether router advertisements give the interface addresses and routes, if it has IPv6
    /// addresses of `ipam`. Default: as the kernel decides.
    #[serde(rename = "acceptRA")]
    accept_ra: Option<bool>,
    /// Replace other addresses of the bridge instead of refusing.
    force_address: bool,
    /// Masquerade the container's traffic to other networks.
    ip_masq: bool,
    /// `iptables` or `nftables`. Default: [`RuleBackend::choose_for_add`].
    ip_masq_backend: Option<String>,
    /// Networks and addresses to which packets are not masqueraded.
    ip_masq_except: Vec<String>,
    /// Whether masqueraded packets get random source ports.
    ip_masq_random_fully: bool,
    /// The name of the host's end, in which `{{pod}}` and other variables stand for their values.
    /// Default: a random one.
    host_interface_name: String,
    /// MTU of the pair, and of the bridge where it is created, in bytes, or `"auto"`. Default: the
    /// kernel's.
    mtu: MtuConfig,
    /// Let frames leave through the port they came in by.
    hairpin_mode: bool,
    /// Set the bridge promiscuous; excludes `hairpinMode`.
    promisc_mode: bool,
    /// VLAN of the port, 0 to 4094. Default 0: none.
    vlan: i64,
    /// VLANs that reach the container tagged.
    vlan_trunk: Option<Vec<VlanTrunkEntry>>,
    /// Keep the port in the VLAN that the bridge puts new ports in.
    preserve_default_vlan: Option<bool>,
    /// Drop frames with a source MAC that is not the container's.
    macspoofchk: bool,
    /// Wait for the end of duplicate address detection for IPv6.
    enabledad: bool,
    /// Leave the container's end down; excludes `ipam`.
    disable_container_interface: bool,
    /// Keep the port from exchanging frames with other isolated ports.
    port_isolation: bool,
    /// `args.cni.mac`: MAC of the container's end.
    args: Args<MacConfig>,
    /// `runtimeConfig.mac` (capability `mac`): the same; has precedence.
    runtime_config: MacConfig,
}

fn default_bridge() -> String {
    "cni0".to_owned()
}

impl Plugin for Bridge {
    const NAME: &'static str = "bridge";
    const ABOUT: &'static str = "veth pair from the container to a bridge of the host";
    const OUTLIVES_ITS_CONTAINER: bool = true;
    const REPAIRS: bool = true;
    type Conf = BridgeConfig;

    fn examine(
        cx: &CallContext<'_>,
        conf: &BridgeConfig,
        remarks: &mut ConfigRemarks,
    ) -> Result<()> {
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
        cx.host_interface_name(&conf.host_interface_name, cx.example_attachment())?;
        let plan = BridgePlan::from_config(cx, conf)?;
        remarks.warnings.extend(plan.masquerade.ineffective_key(conf.ip_masq));
        Ok(())
    }

    fn add(cx: &CallContext<'_>, conf: &BridgeConfig, req: &AddRequest) -> Result<CniResult> {
        let plan = BridgePlan::from_config(cx, conf)?;
        plan.masquerade.ineffective_key(conf.ip_masq).iter().for_each(|warning| warn!("{warning}"));
        let netns = req.sandbox.open_netns()?;
        let (inside, host) =
            (ContainerNetns::open_in(netns)?.with_accept_ra(conf.accept_ra), cx.host_netlink()?);
        let mtu = conf.mtu.resolve_bytes(host)?;
        let bridge = shared::ensure_bridge(host, &plan, mtu, MacAddress::random_local())?;
        let filter = cx.packet_filter();
        let mut undo = Rollback::new();

        let master = Some(bridge.link.index);
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let host_name = cx.host_interface_name(&conf.host_interface_name, owner)?;
        let wanted = NewVethPair { ifname: &req.ifname, host_name, mtu, mac: plan.mac, master };
        let veth::VethPairEnds { host: port, container: link } =
            veth::add_pair(host, netns, &wanted)?;
        let index = port.index;
        let delete_port = move || Ok(host.delete_link_by_index(index).map(drop)?);
        undo.add_step(format!("delete \"{}\"", port.name), delete_port);
        let checked = conf.macspoofchk.then(|| spoof_port(&port, &link)).transpose()?;
        cx.set_host_end(HostVeth::from_labelled_link(host, &port));
        // Before the port forwards its first frame.
        if let Some(checked) = &checked {
            // Set again when the addresses are known.
            cx.record_attachment(Self::NAME, req, &CniResult::new(), &mut undo);
            let registered = checked.clone();
            undo.add_step("end the check of source MACs", move || {
                // The port is deleted first, so that it never forwards unchecked frames.
                delete_port()?;
                spoof::delete_ports(filter, owner, &[registered])
            });
            spoof::add_port(filter, owner, checked)?;
            mac::require_unused(host, &plan, &bridge.link, &port)?;
        }
        start_port(host, &plan, owner, &bridge.link, &port)?;
        let mut result =
            if plan.l3 { cx.ipam_add(&mut undo, conf.default_route)? } else { CniResult::new() };
        let gateways = plan.assign_gateways(&mut result);

        result.interfaces =
            [&bridge.link, &port].map(|link| veth::interface_entry(link, "")).into();
        result.interfaces.push(veth::interface_entry(&link, &req.sandbox.path));
        if conf.macspoofchk || plan.masquerades {
            cx.record_attachment(Self::NAME, req, &result, &mut undo);
        }
        configure_container(&inside, &link, conf, &result)?;
        if plan.masquerades {
            cx.masquerade_result(plan.backend, owner, &result, &plan.masquerade, &mut undo)?;
        }
        if !conf.disable_container_interface {
            configure::wait_for_carrier(host, &port).context(|| "bridge port in error state")?;
            if !result.ips.is_empty() {
                configure::announce_addresses(&inside.netlink, &link);
            }
        }
        // As late as possible, because other containers may use the addresses that `forceAddress`
        // removes.
        if !gateways.is_empty() {
            if bridge.pinned {
                shared::warn_of_routes(host, &conf.bridge, &gateways);
            }
            let vlan = vlan_gateway::ensure_interface(host, &plan, &bridge.link, index, &mut undo)?;
            let vlan = vlan.map(|link| SharedBridge { link, pinned: true });
            let on = vlan.as_ref().unwrap_or(&bridge);
            shared::ensure_gateways(host, on, conf, &gateways, &mut undo)?;
            result.interfaces.extend(vlan.map(|vlan| veth::interface_entry(&vlan.link, "")));
        }
        if !bridge.pinned {
            result.interfaces[0] = veth::interface_entry(&host.require_link(&conf.bridge)?, "");
        }
        cx.finish_result(&mut result);
        undo.commit();
        Ok(result)
    }

    fn check(cx: &CallContext<'_>, conf: &BridgeConfig, req: &CheckRequest) -> Result<()> {
        verify::check_attachment(cx, &BridgePlan::from_config(cx, conf)?, req)
    }

    fn repair(
        cx: &CallContext<'_>,
        conf: &BridgeConfig,
        req: &CheckRequest,
        repairs: &mut RepairFindings,
    ) -> Result<()> {
        repair::restore_attachment(cx, &BridgePlan::from_config(cx, conf)?, req, repairs)
    }

    fn del(cx: &CallContext<'_>, conf: &BridgeConfig, req: &DelRequest) -> Result<()> {
        let mut failures = Failures::new();
        let (filter, prev) = (cx.packet_filter(), req.prev.as_ref());
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        // The keys may have been changed since ADD.
        let has_rules = AttachmentRecord::find_by_attachment(owner).is_some();
        if has_rules || (conf.ip_masq && cx.has_ipam()) {
            let addrs = prev.map(CniResult::all_addresses).unwrap_or_default();
            failures.keep_error(masquerade::delete_addresses(filter, owner, &addrs));
        }
        delete_and_release(cx, &mut failures, CallContext::ipam_del, |failures| {
            let deleted = failures.keep_error(req.delete_veth(cx));
            // The port was deleted first, so that it never forwards unchecked frames.
            if has_rules || conf.macspoofchk {
                let ports = prev.map(|prev| listed_ports(prev, &req.ifname)).unwrap_or_default();
                failures.keep_error(spoof::delete_ports(filter, owner, &ports));
            }
            delete_gateway(cx, conf, failures);
            deleted
        });
        failures.into_result()
    }

    fn gc(cx: &CallContext<'_>, conf: &BridgeConfig, req: &GcRequest) -> Result<()> {
        let mut failures = Failures::new();
        delete_and_release(cx, &mut failures, CallContext::ipam_gc, |failures| {
            let deleted = failures.keep_error(req.delete_stale_veths(cx));
            let (filter, network) = (cx.packet_filter(), cx.net.name.as_str());
            let valid = AttachmentId::from_attachments(&cx.net.name, &req.valid);
            failures.keep_error(masquerade::remove_stale_addresses(filter, network, &valid));
            failures.keep_error(spoof::remove_stale_ports(filter, network, &valid));
            delete_gateway(cx, conf, failures);
            deleted
        });
        failures.into_result()
    }

    fn status(cx: &CallContext<'_>, conf: &BridgeConfig) -> Result<()> {
        let plan = BridgePlan::from_config(cx, conf).or_unavailable()?;
        let host = cx.usable_host_netlink()?;
        conf.mtu.resolve_bytes(host).or_unavailable()?;
        if let Some(link) = host.find_link(&conf.bridge)? {
            shared::require_bridge(&link).or_unavailable()?;
            plan.vlans.require_filtering(host, &link).or_unavailable()?;
        }
        let filter = cx.packet_filter();
        if conf.macspoofchk {
            cx.require_serviceable(Some(RuleBackend::Nftables), &[spoof::FEATURE])?;
        }
        if plan.masquerades {
            let backend = RuleBackend::choose_for_add(plan.backend, filter, &masquerade::FEATURE);
            cx.require_serviceable(Some(backend), &[masquerade::FEATURE])?;
        }
        cx.if_ipam(CallContext::ipam_status)
    }
}

struct BridgePlan<'a> {
    conf: &'a BridgeConfig,
    l3: bool,
    /// Whether the bridge gets the gateway addresses.
    gateway: bool,
    masquerades: bool,
    mac: Option<MacAddress>,
    /// The configured back end of `ipMasq`.
    backend: Option<RuleBackend>,
    masquerade: MasqueradeOptions,
    vlans: ConfiguredVlans,
}

impl<'a> BridgePlan<'a> {
    fn from_config(cx: &CallContext<'_>, conf: &'a BridgeConfig) -> Result<BridgePlan<'a>> {
        InterfaceName::parse(&conf.bridge).map_err(|e| {
            Error::config(format!("bridge name \"{}\": {}", conf.bridge, e.message()))
                .with_details(e.details())
        })?;
        let vlans = ConfiguredVlans::from_config(conf)?;
        let mac = mac::requested_address(cx, conf)?;
        let l3 = cx.has_ipam();
        if l3 && conf.disable_container_interface {
            let msg = "cannot use IPAM when DisableContainerInterface flag is set";
            return Err(Error::config(msg));
        }
        if conf.hairpin_mode && conf.promisc_mode {
            let msg = "cannot set hairpin mode and promiscuous mode at the same time";
            return Err(Error::config(msg).with_details(
                "remove one of them: with \"hairpinMode\" a container reaches its own mapped \
                 ports on every node",
            ));
        }
        if conf.is_default_gateway && conf.default_route == Some(false) {
            let msg =
                "\"isDefaultGateway\" adds the default routes that \"defaultRoute\": false omits";
            return Err(Error::config(msg).with_details("set \"isGateway\" instead"));
        }
        let masquerades = l3 && conf.ip_masq;
        let backend = conf.ip_masq_backend.as_deref().filter(|_| masquerades);
        let backend = RuleBackend::parse(backend, "unknown ipmasq backend")?;
        let gateway = l3 && (conf.is_gateway || conf.is_default_gateway);
        let masquerade = MasqueradeOptions::parse(&conf.ip_masq_except, conf.ip_masq_random_fully)?;
        let plan = BridgePlan { conf, l3, gateway, masquerades, mac, backend, masquerade, vlans };
        if let Some(name) = vlan_gateway::interface_name(&plan) {
            InterfaceName::parse(&name)
                .map_err(|e| Error::config(format!("VLAN gateway \"{name}\": {}", e.message())))?;
        }
        Ok(plan)
    }

    /// Assigns the addresses to the container's interface and adds missing gateways and default
    /// routes. Returns the gateway addresses of the bridge.
    fn assign_gateways(&self, result: &mut CniResult) -> Vec<ipnet::IpNet> {
        let mut on_bridge = Vec::new();
        for ip in &mut result.ips {
            ip.interface = Some(2);
            if !self.gateway {
                continue;
            }
            let gw = *ip.gateway.get_or_insert_with(|| shared::first_host_address(ip.address));
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

/// Deletes the gateway of a VLAN without other ports. With a configuration that ADD refuses there
/// is no gateway.
fn delete_gateway(cx: &CallContext<'_>, conf: &BridgeConfig, failures: &mut Failures) {
    if conf.vlan != 0
        && let Ok(plan) = BridgePlan::from_config(cx, conf)
    {
        failures.keep_error(
            cx.host_netlink().and_then(|host| vlan_gateway::delete_if_unused(host, &plan, None)),
        );
    }
}

/// The port for the check of source MACs; `container` is its other end.
fn spoof_port(port: &Link, container: &Link) -> Result<SpoofPart> {
    let mac = container
        .mac
        .ok_or_else(|| Error::internal(format!("\"{}\" has no MAC address", container.name)))?;
    Ok(SpoofPart { name: port.name.clone(), mac })
}

/// The port in a result: the second interface of the host, behind the bridge, with the MAC of the
/// container's interface.
fn listed_ports(prev: &CniResult, ifname: &InterfaceName) -> Vec<SpoofPart> {
    let (host, inside): (Vec<_>, Vec<_>) =
        prev.interfaces.iter().partition(|entry| entry.sandbox.is_empty());
    let inside = inside.iter().find(|entry| entry.name == ifname.as_str());
    let Some(mac) = inside.and_then(|entry| entry.mac.parse().ok()) else { return Vec::new() };
    host.get(1).map(|entry| SpoofPart { name: entry.name.clone(), mac }).into_iter().collect()
}

/// Sets the VLANs and the attributes of a port, which is down, and sets the port up. New ports have
/// both attributes off.
fn start_port(
    host: &Netlink,
    plan: &BridgePlan<'_>,
    owner: AttachmentId<'_>,
    bridge: &Link,
    port: &Link,
) -> Result<()> {
    plan.vlans.apply_to_port(host, bridge, port, &plan.vlans.port)?;
    let mut change = LinkChange::new();
    if plan.conf.hairpin_mode {
        change = change.set_hairpin(OnOffSetting::On);
    }
    if plan.conf.port_isolation {
        change = change.set_isolated(OnOffSetting::On);
    }
    veth::start_host_end(host, port, &owner.object_label(), change)
}

fn configure_container(
    inside: &ContainerNetns<'_>,
    link: &Link,
    conf: &BridgeConfig,
    result: &CniResult,
) -> Result<()> {
    if result.ips.is_empty() {
        if conf.disable_container_interface {
            return Ok(());
        }
        return configure::set_link_up(inside, link);
    }
    configure::enable_announcements(&inside.netlink, link);
    // Without duplicate address detection, only `ndisc_notify` informs neighbours that an address
    // has moved.
    let (style, ipv6): (_, &[_]) = if conf.enabledad {
        (AddressStyle::Detect, &[("accept_dad", "1"), ("enhanced_dad", "1"), ("ndisc_notify", "1")])
    } else {
        (AddressStyle::Immediate, &[("accept_dad", "0"), ("ndisc_notify", "1")])
    };
    configure::configure_layer3(inside, link, result, style, ipv6)
}
