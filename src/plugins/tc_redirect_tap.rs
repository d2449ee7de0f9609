//! tc-redirect-tap: gives the container's network to a virtual machine, by a tap device in the
//! container's namespace.
//!
//! A chained plugin, behind an interface plugin: all packets that the interface receives go to the
//! tap device, and all that the machine sends leave by the interface. The result is `prevResult`
//! with the device and with an interface for the inside of the machine, whose `sandbox` is the
//! container's id, as firecracker-go-sdk reads it. Keys: `multiQueue`, `vnetHdr`, `allAddresses`;
//! of `CNI_ARGS`: `TC_REDIRECT_TAP_NAME`, `TC_REDIRECT_TAP_UID`, `TC_REDIRECT_TAP_GID`.
//!
//! All state is in the container's namespace, none on the host. The alias of the device names the
//! attachment. Until ADD is complete the device vanishes with the plugin's process. The redirect to
//! it then drops what the interface receives, until the next ADD or DEL deletes it.

use serde::Deserialize;

use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, Failures, GcRequest, Plugin,
    Rollback, require_prev_result,
};
use crate::iface::tun::{self, NewTapDevice, TUN, TapDevice};
use crate::iface::{ContainerNetns, child, redirect, verify, veth};
use crate::netfilter::AttachmentId;
use crate::netlink::{Link, LinkChange, Netlink};
use crate::netns::Netns;
use cni::error::{Error, ErrorCode, ErrorContext, Result};
use cni::{CniResult, InterfaceName, IpConfig, ResultInterface};

#[derive(Debug)]
pub struct TcRedirectTap;

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TcRedirectTapConfig {
    /// Allow the device to be opened several times (`IFF_MULTI_QUEUE`).
    multi_queue: bool,
    /// Whether frames have headers with offloads (`IFF_VNET_HDR`) unless the program chooses
    /// otherwise. Default: true.
    vnet_hdr: Option<bool>,
    /// Whether the machine's interface gets all addresses of the container's interface.
    /// firecracker-go-sdk requires exactly one.
    all_addresses: bool,
}

/// The keys of `CNI_ARGS`.
#[derive(Debug, Default, PartialEq, Eq)]
struct TapArgs {
    /// The name of the device. Default: the first free one of `tap0`, `tap1` ...
    name: Option<InterfaceName>,
    /// The user and the group who may open the device. Default: root, if neither is given.
    owner: Option<u32>,
    group: Option<u32>,
}

impl TapArgs {
    /// Keys of other plugins are ignored without `IgnoreUnknown`, as the original does.
    fn parse(text: &str) -> Result<TapArgs> {
        let mut args = TapArgs::default();
        for pair in text.split(';').filter(|pair| !pair.is_empty()) {
            let invalid = || Error::internal(format!("ARGS: invalid pair \"{pair}\""));
            let (key, value) = pair.split_once('=').ok_or_else(invalid)?;
            let id =
                || value.parse().map(Some).map_err(|_| invalid().with_details("an id is a number"));
            match key {
                "TC_REDIRECT_TAP_NAME" if value.is_empty() => args.name = None,
                "TC_REDIRECT_TAP_NAME" => {
                    // The original cuts a name at the kernel's limit.
                    let name = value.get(..InterfaceName::MAX_LENGTH).unwrap_or(value);
                    let name =
                        InterfaceName::parse(name).map_err(|e| e.with_code(ErrorCode::INTERNAL));
                    args.name = Some(name.context(|| format!("ARGS: invalid pair \"{pair}\""))?);
                }
                "TC_REDIRECT_TAP_UID" => args.owner = id()?,
                "TC_REDIRECT_TAP_GID" => args.group = id()?,
                _ => {}
            }
        }
        if args.owner.is_none() && args.group.is_none() {
            (args.owner, args.group) = (Some(0), Some(0));
        }
        Ok(args)
    }

    /// Creates the device, which vanishes unless it is made persistent.
    fn create_device(&self, conf: &TcRedirectTapConfig, netns: &Netns) -> Result<TapDevice> {
        let &TapArgs { owner, group, .. } = self;
        let (ifname, multi_queue, vnet_hdr) =
            (self.name.as_ref(), conf.multi_queue, conf.vnet_hdr.unwrap_or(true));
        tun::create_device(
            netns,
            NewTapDevice { ifname, multi_queue, vnet_hdr, owner, group, label: None },
        )
    }

    /// Fails unless the device is as [`TapArgs::create_device`] creates it.
    fn verify_device(&self, conf: &TcRedirectTapConfig, tap: &Link) -> Result<()> {
        if let Some(name) = self.name.as_ref().filter(|name| name.as_str() != tap.name) {
            return Err(Error::internal(format!(
                "the tap device is \"{}\", not \"{name}\"",
                tap.name
            )));
        }
        tun::verify_device(tap, self.owner, self.group, conf.multi_queue)
    }
}

impl Plugin for TcRedirectTap {
    const NAME: &'static str = "tc-redirect-tap";
    const ABOUT: &'static str = "gives the container's network to a virtual machine";
    type Conf = TcRedirectTapConfig;

    fn examine(cx: &CallContext<'_>, _: &TcRedirectTapConfig, _: &mut ConfigRemarks) -> Result<()> {
        TapArgs::parse(cx.raw_args()).map(drop)
    }

    fn add(
        cx: &CallContext<'_>,
        conf: &TcRedirectTapConfig,
        req: &AddRequest,
    ) -> Result<CniResult> {
        let args = TapArgs::parse(cx.raw_args())?;
        let prev = require_prev_result(req.prev.as_ref(), "must be called as a chained plugin")?;
        let netns = req.sandbox.open_netns()?;
        let inside = ContainerNetns::open_in(netns)?;
        let netlink = &inside.netlink;
        let link = inside.require_link(req.ifname.as_str())?;
        let addresses = machine_addresses(prev, &req.ifname, conf.all_addresses)?;
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let existing = find_redirected_tap(netlink, &link, &owner)?;

        // Dropped after the rollback, which still needs the device.
        let mut device = None;
        let tap = if let Some(tap) = existing {
            args.verify_device(conf, &tap).map_err(|e| e.with_details("run DEL first"))?;
            tap
        } else {
            args.name.as_ref().map_or(Ok(()), |name| inside.require_free_name(name.as_str()))?;
            let created = device.insert(args.create_device(conf, netns)?);
            inside.require_link(&created.name)?
        };
        let mut undo = Rollback::new();
        let change = LinkChange::new().set_alias(&owner.object_label()).set_mtu(link.mtu).set_up();
        netlink
            .change_link(tap.index, change)
            .context(|| format!("failed to set tap \"{}\"", tap.name))?;
        if device.is_some() || !redirect::find_targets(netlink, &tap)?.contains(&link.index) {
            redirect::add(netlink, &tap, &link)?;
        }
        if let Some(device) = device {
            let (from, to) = (link.clone(), [tap.index]);
            undo.add_step(format!("end the redirect of \"{}\"", link.name), move || {
                redirect::remove(netlink, &from, &to)
            });
            redirect::add(netlink, &link, &tap)?;
            device.make_persistent()?;
        }
        let mut result = prev.clone();
        let reported = Link { mtu: cx.reported_mtu(link.mtu), ..link.clone() };
        add_machine(&mut result, req, &reported, &tap, addresses);
        undo.commit();
        Ok(result)
    }

    fn check(cx: &CallContext<'_>, conf: &TcRedirectTapConfig, req: &CheckRequest) -> Result<()> {
        let args = TapArgs::parse(cx.raw_args())?;
        let prev = req.require_final_result()?;
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        let link = inside.require_link(req.ifname.as_str())?;
        let machine = find_machine(prev, req.id.as_str()).ok_or_else(|| {
            let msg = format!("prevResult has no interface whose sandbox is \"{}\"", req.id);
            Error::internal(msg).with_details("the runtime must send the result of the whole list")
        })?;
        // The interface of the machine is named as its device.
        let is_device = |entry: &&ResultInterface| {
            entry.name == machine.name && entry.sandbox == req.sandbox.path
        };
        let device = prev.interfaces.iter().find(is_device).ok_or_else(|| {
            Error::internal(format!(
                "prevResult has no tap device \"{}\" in {}",
                machine.name, req.sandbox.path
            ))
        })?;
        let tap = verify::find_container_link(&inside, device, TUN)?;
        args.verify_device(conf, &tap)?;
        verify::require_up(&tap, verify::IN_CONTAINER)?;
        verify::require_same_mac(
            &link,
            &ResultInterface { name: link.name.clone(), ..machine.clone() },
        )?;
        child::verify_mtu(&tap, link.mtu)?;
        for (from, to) in [(&tap, &link), (&link, &tap)] {
            if !redirect::find_targets(&inside.netlink, from)?.contains(&to.index) {
                let msg =
                    format!("ingress of \"{}\" is not redirected to \"{}\"", from.name, to.name);
                return Err(Error::internal(msg).with_details("attach the container again"));
            }
        }
        Ok(())
    }

    fn del(cx: &CallContext<'_>, _: &TcRedirectTapConfig, req: &DelRequest) -> Result<()> {
        // The kernel has removed everything with the namespace.
        let Some(netns) = &req.netns else { return Ok(()) };
        let netlink = &ContainerNetns::open_in(netns)?.netlink;
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let link = netlink.find_link(req.ifname.as_str())?;
        let mut failures = Failures::new();
        let targets = link.as_ref().map(|link| redirect::find_targets(netlink, link));
        let targets = targets.and_then(|found| failures.keep_error(found)).unwrap_or_default();
        // The original sets no alias.
        let listed = req.prev.as_ref().and_then(|prev| find_machine(prev, req.id.as_str()));
        let is_listed = |tap: &Link| {
            let is_named = listed.is_some_and(|machine| machine.name == tap.name);
            is_named && tap.alias.is_empty() && targets.contains(&tap.index)
        };
        let mut taps = netlink.dump_links()?;
        taps.retain(|link| {
            link.kind.as_deref() == Some(TUN)
                && (owner.owns_comment(Some(&link.alias)) || is_listed(link))
        });
        if let Some(link) = &link {
            let indexes: Vec<u32> = taps.iter().map(|tap| tap.index).collect();
            failures.keep_error(redirect::remove(netlink, link, &indexes));
        }
        for tap in taps {
            failures.keep_error(netlink.delete_link_by_index(tap.index).map_err(Error::from));
        }
        failures.into_result()
    }

    fn gc(_: &CallContext<'_>, _: &TcRedirectTapConfig, _: &GcRequest) -> Result<()> {
        // The kernel removes everything with the namespace.
        Ok(())
    }

    fn status(cx: &CallContext<'_>, conf: &TcRedirectTapConfig) -> Result<()> {
        Self::require_sound(cx, conf)?;
        cx.usable_host_netlink()?;
        try_redirect(conf).or_unavailable()
    }
}

/// The device of an earlier ADD of the attachment, to which the interface is redirected. Fails if
/// the interface is redirected to another link.
fn find_redirected_tap(
    netlink: &Netlink,
    link: &Link,
    owner: &AttachmentId<'_>,
) -> Result<Option<Link>> {
    let mut own = None;
    for index in redirect::find_targets(netlink, link)? {
        let Some(target) = (if index == 0 { None } else { netlink.find_link_by_index(index)? })
        else {
            continue;
        };
        if target.kind.as_deref() != Some(TUN) || !owner.owns_comment(Some(&target.alias)) {
            let msg = format!("\"{}\" is redirected to \"{}\" already", link.name, target.name);
            return Err(Error::internal(msg)
                .with_details("an interface can be redirected to one tap device only"));
        }
        own = Some(target);
    }
    Ok(own)
}

/// The addresses of the container's interface that the machine's interface gets: one, preferably
/// of IPv4, or all. Addresses that name no interface are those of the only one, as in results of
/// Cilium. Fails if the machine would have none, although the container has some.
fn machine_addresses(prev: &CniResult, ifname: &InterfaceName, all: bool) -> Result<Vec<IpConfig>> {
    let is_own =
        |entry: &ResultInterface| entry.name == ifname.as_str() && !entry.sandbox.is_empty();
    let own = prev.interfaces.iter().position(is_own).and_then(|own| i64::try_from(own).ok());
    let mut ips = prev.ips.clone();
    if ips.iter().any(|ip| ip.interface.is_some()) {
        ips.retain(|ip| own.is_some() && ip.interface == own);
    }
    if ips.is_empty() && !prev.ips.is_empty() {
        let msg = format!("no address of prevResult is one of \"{ifname}\": the machine has none");
        return Err(Error::internal(msg)
            .with_details("CNI_IFNAME must name the interface whose network the machine gets"));
    }
    if !all {
        let v4 = ips.iter().position(|ip| ip.address.addr().is_ipv4());
        ips = ips.into_iter().skip(v4.unwrap_or_default()).take(1).collect();
    }
    Ok(ips)
}

/// Adds the tap device and the machine's interface with its addresses.
fn add_machine(
    result: &mut CniResult,
    req: &AddRequest,
    link: &Link,
    tap: &Link,
    ips: Vec<IpConfig>,
) {
    result
        .interfaces
        .push(ResultInterface { mtu: link.mtu, ..veth::interface_entry(tap, &req.sandbox.path) });
    let machine = i64::try_from(result.interfaces.len()).ok();
    result.interfaces.push(ResultInterface {
        name: tap.name.clone(),
        ..veth::interface_entry(link, req.id.as_str())
    });
    result.ips.extend(ips.into_iter().map(|ip| IpConfig { interface: machine, ..ip }));
}

/// The machine's interface in a result: the one whose sandbox is the container's id.
fn find_machine<'r>(result: &'r CniResult, id: &str) -> Option<&'r ResultInterface> {
    result.interfaces.iter().find(|entry| entry.sandbox == id)
}

/// Fails if the kernel lacks a feature: redirects a device to itself in a namespace without other
/// links.
fn try_redirect(conf: &TcRedirectTapConfig) -> Result<()> {
    let netns = Netns::create_unnamed()?;
    let inside = ContainerNetns::open_in(&netns)?;
    let device = TapArgs::default().create_device(conf, &netns)?;
    let tap = inside.require_link(&device.name)?;
    redirect::add(&inside.netlink, &tap, &tap)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn args_have_defaults_and_other_plugins_keys_are_ignored() {
        let root = TapArgs { name: None, owner: Some(0), group: Some(0) };
        for text in ["", "IgnoreUnknown=1", "A=b=c;K8S_POD_NAME=x", "TC_REDIRECT_TAP_NAME=", ";"] {
            assert_eq!(TapArgs::parse(text).unwrap(), root, "{text}");
        }
        let args = TapArgs::parse(
            "TC_REDIRECT_TAP_NAME=vm0;TC_REDIRECT_TAP_UID=123;TC_REDIRECT_TAP_GID=45",
        )
        .unwrap();
        let name = InterfaceName::parse("vm0").ok();
        assert_eq!(args, TapArgs { name, owner: Some(123), group: Some(45) });
        let args = TapArgs::parse("TC_REDIRECT_TAP_UID=123").unwrap();
        assert_eq!(
            (args.owner, args.group),
            (Some(123), None),
            "a group of root would lock the user out"
        );
    }

    #[test]
    fn wrong_args_name_the_pair() {
        for (text, pair) in [
            ("TC_REDIRECT_TAP_UID=root", "TC_REDIRECT_TAP_UID=root"),
            ("A=1;TC_REDIRECT_TAP_GID=-1", "TC_REDIRECT_TAP_GID=-1"),
            ("TC_REDIRECT_TAP_NAME=a/b", "TC_REDIRECT_TAP_NAME=a/b"),
            ("TC_REDIRECT_TAP_NAME=vm%d", "TC_REDIRECT_TAP_NAME=vm%d"),
            ("TC_REDIRECT_TAP_NAME", "TC_REDIRECT_TAP_NAME"),
        ] {
            let error = TapArgs::parse(text).unwrap_err();
            assert!(
                error.message().starts_with(&format!("ARGS: invalid pair \"{pair}\"")),
                "{error}"
            );
        }
    }
}
