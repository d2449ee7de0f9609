//! ipvlan: an interface with other IP addresses and the same MAC as the link below, its master.
//!
//! Keys: `master` (default: the interface of `prevResult`, else the link of the default route),
//! `mode` (`l2`, `l3`, `l3s`), `mtu`, `linkInContainer` (the master is in the container), and
//! `ipam`, which is required unless `prevResult` has addresses: those are used then.
//!
//! On the host it leaves nothing: the interface is created in the container, and vanishes with it.

use serde::Deserialize;

use crate::cni::{CniResult, Interface, SpecVersion};
use crate::error::{Context, Error, Result};
use crate::iface::Inside;
use crate::iface::child::{self, Below, Wanted};
use crate::iface::mtu::Mtu;
use crate::netlink::{IpvlanMode, LinkKind};
use crate::repairs::Repairs;
use crate::skel::{AddReq, CheckReq, Cx, DelReq, GcReq, Plugin, Remarks};

const KIND: &str = "ipvlan";

pub struct Ipvlan;

/// The keys of an ipvlan network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    /// The link below. Default: the interface of `prevResult`, else the link of the default route.
    master: String,
    /// The layer of forwarding: by `l2` (default), `l3`, or `l3s`, through the host's netfilter.
    mode: String,
    /// MTU in bytes, at most that of the master, or `"auto"`. Default: the master's.
    mtu: Mtu,
    /// Look for the master in the container.
    link_in_container: bool,
}

impl Conf {
    fn below(&self) -> Below<'_> {
        Below { name: &self.master, in_container: self.link_in_container, mtu: self.mtu }
    }
}

impl Plugin for Ipvlan {
    const NAME: &'static str = KIND;
    const ABOUT: &'static str = "interface that shares the MAC of a link of the host";
    const REPAIRS: bool = true;
    type Conf = Conf;

    fn examine(_: &Cx<'_>, conf: &Conf, _: &mut Remarks) -> Result<()> {
        mode(conf).map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let mode = mode(conf)?;
        let below = below(conf, req)?;
        let given = given_addresses(cx, req);
        if given.is_none() {
            cx.ipam()?;
        }
        let (inside, host) = (Inside::enter(req.sandbox.netns()?)?, cx.host()?);
        let place = below.place(host, &inside);
        let (master, mtu) = below.master(place, host)?;
        let kind = LinkKind::Ipvlan { link: master.index, mode };
        let wanted = Wanted { ifname: &req.ifname, kind, mtu, mac: None };
        req.attach_link(cx, &inside, place, &wanted, given).map(|(result, _)| result)
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let mode = mode(conf)?;
        let inside = Inside::enter(req.sandbox.netns()?)?;
        cx.if_ipam(Cx::ipam_check)?;
        let found = req.find_link(&inside, KIND)?;
        if found.link.ipvlan != Some(mode) {
            let (present, wanted) =
                (found.link.ipvlan.map_or("unknown", IpvlanMode::as_str), mode.as_str());
            let msg =
                format!("Container IPVlan mode {present} does not match expected value: {wanted}");
            return Err(Error::internal(msg));
        }
        conf.below().verify(cx.host()?, &inside, &found.link)?;
        found.verify_layer3(&inside)
    }

    fn repair(_: &Cx<'_>, _: &Conf, req: &CheckReq, repairs: &mut Repairs) -> Result<()> {
        req.restore_routes(KIND, repairs)
    }

    fn del(cx: &Cx<'_>, _: &Conf, req: &DelReq) -> Result<()> {
        req.del_link(cx, KIND)
    }

    fn gc(cx: &Cx<'_>, _: &Conf, _: &GcReq) -> Result<()> {
        // The interface vanishes with the container; addresses are the IPAM plugin's.
        cx.if_ipam(Cx::ipam_gc)
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        Self::require_sound(cx, conf)?;
        let host = cx.usable_host()?;
        // Without the key, the master may be the interface of `prevResult`.
        if !conf.master.is_empty() {
            conf.below().status(host)?;
        }
        let mode = mode(conf)?;
        child::require_driver(&|link| LinkKind::Ipvlan { link, mode }).or_unavailable()?;
        cx.if_ipam(Cx::ipam_status)
    }
}

/// The master of the configuration, or the interface of the previous plugin.
fn below<'a>(conf: &'a Conf, req: &'a AddReq) -> Result<Below<'a>> {
    let below = conf.below();
    let Some(prev) = req.prev.as_ref().filter(|_| conf.master.is_empty()) else {
        return Ok(below);
    };
    match &prev.interfaces[..] {
        [Interface { name, sandbox, .. }] if !name.is_empty() => {
            let in_container = below.in_container || *sandbox == req.sandbox.path;
            Ok(Below { name, in_container, ..below })
        }
        _ => {
            Err(Error::config("chained master failure. PrevResult lacks a single named interface")
                .with_details("name the link in the key \"master\""))
        }
    }
}

/// The addresses of the previous plugin, if no IPAM plugin is configured.
fn given_addresses(cx: &Cx<'_>, req: &AddReq) -> Option<CniResult> {
    let prev = req.prev.clone().filter(|prev| !prev.ips.is_empty() && !cx.has_ipam());
    prev.map(|prev| CniResult { version: SpecVersion::NEWEST, ..prev })
}

fn mode(conf: &Conf) -> Result<IpvlanMode> {
    let name = if conf.mode.is_empty() { "l2" } else { &conf.mode };
    IpvlanMode::parse(name).ok_or_else(|| {
        Error::config(format!("unknown ipvlan mode: \"{name}\""))
            .with_details("known are \"l2\", \"l3\" and \"l3s\"")
    })
}
