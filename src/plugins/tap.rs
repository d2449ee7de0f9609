//! tap: a persistent tap device in the container, for a program that sends and receives Ethernet
//! frames, such as a virtual machine.
//!
//! Keys: `multiQueue`, `mtu`, `mac`, `owner`, `group`, `selinuxContext`, `bridge` (in the
//! container), `ipam`, which is optional, and the capability `mac`. `selinuxContext` has no effect
//! on nodes without SELinux. There is no state on the host.

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, GcRequest, Plugin, Rollback,
};
use crate::iface::child;
use crate::iface::configure::AddressStyle;
use crate::iface::tun::{self, TUN};
use crate::iface::{ContainerNetns, mtu, veth};
use crate::netlink::{Link, LinkChange, MacAddress};
use cni::CniResult;
use cni::config::{Args, MacConfig};
use cni::error::{Error, ErrorContext, Result};

pub struct Tap;

/// The keys of a tap network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TapConfig {
    /// Allow the device to be opened several times (`IFF_MULTI_QUEUE`).
    multi_queue: bool,
    /// MTU in bytes. Default: the kernel's.
    mtu: i64,
    /// The MAC of the device. Default: random.
    mac: String,
    /// The user who may open the device. Default: root only.
    owner: Option<u32>,
    /// The group whose members may open the device. Default: none.
    group: Option<u32>,
    /// The SELinux label of the device.
    selinux_context: String,
    /// The bridge in the container that the device becomes a port of.
    bridge: String,
    /// Whether the default routes of `ipam` are the container's. Default: true.
    default_route: Option<bool>,
    /// Whether router advertisements give the interface addresses and routes, if it has IPv6
    /// addresses of `ipam`. Default: as the kernel decides.
    #[serde(rename = "acceptRA")]
    accept_ra: Option<bool>,
    /// Decoded for its errors, as the reference does.
    #[serde(rename = "args")]
    _args: Args<IgnoredAny>,
    runtime_config: MacConfig,
}

impl Plugin for Tap {
    const NAME: &'static str = "tap";
    const ABOUT: &'static str = "tap device in the container";
    type Conf = TapConfig;

    fn examine(_: &CallContext<'_>, conf: &TapConfig, _: &mut ConfigRemarks) -> Result<()> {
        mtu::bytes_from_config(conf.mtu)?;
        child::requested_mac(&[&conf.mac]).map(drop)
    }

    fn add(cx: &CallContext<'_>, conf: &TapConfig, req: &AddRequest) -> Result<CniResult> {
        let mtu = mtu::bytes_from_config(conf.mtu)?;
        let mac = requested_mac(cx, conf)?;
        let l3 = cx.has_ipam();
        let netns = req.sandbox.open_netns()?;
        let inside = ContainerNetns::open_in(netns)?.with_accept_ra(conf.accept_ra);
        let bridge = find_bridge(&inside, conf)?;
        inside.require_free_name(req.ifname.as_str())?;

        let label = Some(conf.selinux_context.as_str()).filter(|label| !label.is_empty());
        let (owner, group) = (conf.owner, conf.group);
        let (ifname, multi_queue) = (Some(&req.ifname), conf.multi_queue);
        let wanted =
            tun::NewTapDevice { ifname, multi_queue, owner, group, label, ..Default::default() };
        // Dropped after the rollback, in which a DHCP release needs the device.
        let tap = tun::create_device(netns, wanted)?;
        let mut undo = Rollback::new();
        undo.add_step(format!("delete \"{}\"", req.ifname), || {
            child::roll_back_link(&inside, &req.ifname)
        });
        let link = inside.require_link(req.ifname.as_str())?;
        let up = !l3 || cx.ipam_needs_link();
        let link = set_attributes(&inside, link, mac, mtu, bridge.as_ref(), up)?;
        let mut result =
            if l3 { cx.ipam_add(&mut undo, conf.default_route)? } else { CniResult::new() };
        result.interfaces = vec![veth::interface_entry(&link, &req.sandbox.path)];
        result.assign_ips_to_first();
        if l3 {
            // The program at the other end is not running yet: no host can have the addresses.
            child::configure_link(&inside, &link, &result, AddressStyle::Immediate)?;
        }
        tap.make_persistent()?;
        cx.finish_result(&mut result);
        undo.commit();
        Ok(result)
    }

    fn check(cx: &CallContext<'_>, conf: &TapConfig, req: &CheckRequest) -> Result<()> {
        requested_mac(cx, conf)?;
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        cx.if_ipam(CallContext::ipam_check)?;
        let found = req.find_link(&inside, TUN)?;
        // Without a configured owner or group, any is accepted.
        tun::verify_device(&found.link, conf.owner, conf.group, conf.multi_queue)?;
        let bridge = find_bridge(&inside, conf)?;
        if bridge.is_some_and(|bridge| found.link.master != Some(bridge.index)) {
            let (name, bridge) = (&found.link.name, &conf.bridge);
            return Err(Error::internal(format!(
                "\"{name}\" is not a port of bridge \"{bridge}\""
            )));
        }
        found.verify_layer3(&inside)
    }

    fn del(cx: &CallContext<'_>, _: &TapConfig, req: &DelRequest) -> Result<()> {
        req.delete_link(cx, TUN)
    }

    fn gc(cx: &CallContext<'_>, _: &TapConfig, _: &GcRequest) -> Result<()> {
        // The kernel removes the device with its namespace.
        cx.if_ipam(CallContext::ipam_gc)
    }

    fn status(cx: &CallContext<'_>, conf: &TapConfig) -> Result<()> {
        Self::require_sound(cx, conf)?;
        tun::require_usable().or_unavailable()?;
        cx.if_ipam(CallContext::ipam_status)
    }
}

/// `runtimeConfig.mac`, else `MAC` of `CNI_ARGS`, else `mac`.
fn requested_mac(cx: &CallContext<'_>, conf: &TapConfig) -> Result<Option<MacAddress>> {
    let from_env = cx.mac_arg()?;
    child::requested_mac(&[&conf.runtime_config.mac, &from_env, &conf.mac])
}

/// The configured bridge in the container, if any.
fn find_bridge(inside: &ContainerNetns<'_>, conf: &TapConfig) -> Result<Option<Link>> {
    let name = &conf.bridge;
    if name.is_empty() {
        return Ok(None);
    }
    let link = inside.require_link(name).context(|| format!("failed to get bridge {name}"))?;
    if link.kind.as_deref() == Some("bridge") {
        return Ok(Some(link));
    }
    Err(Error::internal(format!("failed to get bridge {name}: it is not a bridge")))
}

/// Sets MAC, MTU, bridge and state; returns the changed device.
fn set_attributes(
    inside: &ContainerNetns<'_>,
    link: Link,
    mac: Option<MacAddress>,
    mtu: u32,
    bridge: Option<&Link>,
    up: bool,
) -> Result<Link> {
    let mut change = LinkChange::new();
    if let Some(mac) = mac {
        change = change.set_mac(mac);
    }
    if mtu > 0 {
        change = change.set_mtu(mtu);
    }
    if let Some(bridge) = bridge {
        change = change.set_master(bridge.index);
    }
    if up {
        change = change.set_up();
    } else if mac.is_none() && mtu == 0 && bridge.is_none() {
        return Ok(link);
    }
    inside
        .netlink
        .change_link(link.index, change)
        .context(|| format!("failed to set tap \"{}\"", link.name))?;
    Ok(Link { mac: mac.or(link.mac), mtu: if mtu > 0 { mtu } else { link.mtu }, ..link })
}
