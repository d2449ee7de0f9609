//! ipvlan: an interface with other IP addresses and the same MAC as the link below, its master.
//!
//! Keys: `master` (default: the interface of `prevResult`, else the link of the default route),
//! `mode` (`l2`, `l3`, `l3s`), `mtu`, `linkInContainer` (the master is in the container), and
//! `ipam`, which is required unless `prevResult` has addresses: those are used then.
//!
//! There is no state on the host: the interface is created in the container, and vanishes with it.

use serde::Deserialize;

use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, GcRequest, LinkAddresses,
    Plugin,
};
use crate::iface::ContainerNetns;
use crate::iface::child::{self, MasterConfig, NewChildLink};
use crate::iface::mtu::MtuConfig;
use crate::netlink::{IpvlanMode, LinkKind};
use crate::repairs::RepairFindings;
use cni::error::{Error, ErrorContext, Result};
use cni::{CniResult, ResultInterface, SpecVersion};

const KIND: &str = "ipvlan";

pub struct Ipvlan;

/// The keys of an ipvlan network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct IpvlanConfig {
    /// The link below. Default: the interface of `prevResult`, else the link of the default route.
    master: String,
    /// The layer of forwarding: by `l2` (default), `l3`, or `l3s`, through the host's netfilter.
    mode: String,
    /// MTU in bytes, at most that of the master, or `"auto"`. Default: the master's.
    mtu: MtuConfig,
    /// Look for the master in the container.
    link_in_container: bool,
    /// Whether the default routes of `ipam` or `prevResult` are the container's. Default: true.
    default_route: Option<bool>,
    /// Whether router advertisements give the interface addresses and routes, if it has IPv6
    /// addresses of `ipam`. Default: as the kernel decides.
    #[serde(rename = "acceptRA")]
    accept_ra: Option<bool>,
}

impl IpvlanConfig {
    fn master_config(&self) -> MasterConfig<'_> {
        MasterConfig { name: &self.master, in_container: self.link_in_container, mtu: self.mtu }
    }
}

impl Plugin for Ipvlan {
    const NAME: &'static str = KIND;
    const ABOUT: &'static str = "interface that shares the MAC of a link of the host";
    const REPAIRS: bool = true;
    type Conf = IpvlanConfig;

    fn examine(_: &CallContext<'_>, conf: &IpvlanConfig, _: &mut ConfigRemarks) -> Result<()> {
        parse_mode(conf).map(drop)
    }

    fn add(cx: &CallContext<'_>, conf: &IpvlanConfig, req: &AddRequest) -> Result<CniResult> {
        let mode = parse_mode(conf)?;
        let below = choose_master(conf, req)?;
        let given = previous_addresses(cx, req);
        if given.is_none() {
            cx.ipam_plugin()?;
        }
        let (inside, host) = (
            ContainerNetns::open_in(req.sandbox.open_netns()?)?.with_accept_ra(conf.accept_ra),
            cx.host_netlink()?,
        );
        let place = below.master_netlink(host, &inside);
        let (master, mtu) = below.resolve_master(place, host)?;
        let kind = LinkKind::Ipvlan { link: master.index, mode };
        let wanted = NewChildLink { ifname: &req.ifname, kind, mtu, mac: None };
        let addresses = LinkAddresses { given, default_route: conf.default_route };
        req.attach_link(cx, &inside, place, &wanted, addresses).map(|(result, _)| result)
    }

    fn check(cx: &CallContext<'_>, conf: &IpvlanConfig, req: &CheckRequest) -> Result<()> {
        let mode = parse_mode(conf)?;
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        cx.if_ipam(CallContext::ipam_check)?;
        let found = req.find_link(&inside, KIND)?;
        if found.link.ipvlan != Some(mode) {
            let (present, wanted) =
                (found.link.ipvlan.map_or("unknown", IpvlanMode::as_str), mode.as_str());
            let msg =
                format!("Container IPVlan mode {present} does not match expected value: {wanted}");
            return Err(Error::internal(msg));
        }
        conf.master_config().verify_master(cx.host_netlink()?, &inside, &found.link)?;
        found.verify_layer3(&inside)
    }

    fn repair(
        cx: &CallContext<'_>,
        conf: &IpvlanConfig,
        req: &CheckRequest,
        repairs: &mut RepairFindings,
    ) -> Result<()> {
        let (inside, host) = (
            ContainerNetns::open_in(req.sandbox.open_netns()?)?.with_accept_ra(conf.accept_ra),
            cx.host_netlink()?,
        );
        req.restore_link(&inside, KIND, repairs, &|_, up| {
            let below = conf.master_config();
            let place = below.master_netlink(host, &inside);
            let (master, mtu) = below.resolve_master(place, host)?;
            let kind = LinkKind::Ipvlan { link: master.index, mode: parse_mode(conf)? };
            let wanted = NewChildLink { ifname: &req.ifname, kind, mtu, mac: None };
            child::create_link(place, &inside, &wanted, up)
        })
    }

    fn del(cx: &CallContext<'_>, _: &IpvlanConfig, req: &DelRequest) -> Result<()> {
        req.delete_link(cx, KIND)
    }

    fn gc(cx: &CallContext<'_>, _: &IpvlanConfig, _: &GcRequest) -> Result<()> {
        // The interface vanishes with the container; addresses are the IPAM plugin's.
        cx.if_ipam(CallContext::ipam_gc)
    }

    fn status(cx: &CallContext<'_>, conf: &IpvlanConfig) -> Result<()> {
        Self::require_sound(cx, conf)?;
        let host = cx.usable_host_netlink()?;
        // Without the key, the master may be the interface of `prevResult`.
        if !conf.master.is_empty() {
            conf.master_config().require_present(host)?;
        }
        let mode = parse_mode(conf)?;
        child::require_driver(&|link| LinkKind::Ipvlan { link, mode }).or_unavailable()?;
        cx.if_ipam(CallContext::ipam_status)
    }
}

/// The master of the configuration, or the interface of the previous plugin.
fn choose_master<'a>(conf: &'a IpvlanConfig, req: &'a AddRequest) -> Result<MasterConfig<'a>> {
    let below = conf.master_config();
    let Some(prev) = req.prev.as_ref().filter(|_| conf.master.is_empty()) else {
        return Ok(below);
    };
    match &prev.interfaces[..] {
        [ResultInterface { name, sandbox, .. }] if !name.is_empty() => {
            let in_container = below.in_container || *sandbox == req.sandbox.path;
            Ok(MasterConfig { name, in_container, ..below })
        }
        _ => {
            Err(Error::config("chained master failure. PrevResult lacks a single named interface")
                .with_details("name the link in the key \"master\""))
        }
    }
}

/// The addresses of the previous plugin, if no IPAM plugin is configured.
fn previous_addresses(cx: &CallContext<'_>, req: &AddRequest) -> Option<CniResult> {
    let prev = req.prev.clone().filter(|prev| !prev.ips.is_empty() && !cx.has_ipam());
    prev.map(|prev| CniResult { version: SpecVersion::NEWEST, ..prev })
}

fn parse_mode(conf: &IpvlanConfig) -> Result<IpvlanMode> {
    let name = if conf.mode.is_empty() { "l2" } else { &conf.mode };
    IpvlanMode::parse(name).ok_or_else(|| {
        Error::config(format!("unknown ipvlan mode: \"{name}\""))
            .with_details("known are \"l2\", \"l3\" and \"l3s\"")
    })
}
