//! ipvlan: an interface with other IP addresses and the same MAC as the link below, its master.
//!
//! Keys: `master` (default: the interface of `prevResult`, else the link of the default route),
//! `mode` (`l2`, `l3`, `l3s`), `mtu`, `linkInContainer` (the master is in the container), and
//! `ipam`, which is required unless `prevResult` has addresses: those are used then.
//!
//! On the host it leaves nothing: the interface is made in the container, and vanishes with it.

use serde::Deserialize;

use crate::cni::{CniResult, SpecVersion};
use crate::error::{Code, Error, Result};
use crate::iface::child::{self, Below, Wanted};
use crate::iface::inside::Inside;
use crate::iface::verify;
use crate::netlink::{IpvlanMode, Link, LinkKind};
use crate::skel::{AddReq, CheckReq, Cx, DelReq, GcReq, Plugin, Rollback};

const KIND: &str = "ipvlan";

/// The plugin.
#[derive(Debug)]
pub struct Ipvlan;

/// The keys of an ipvlan network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    /// The link to be on top of. Default: the interface of `prevResult`, else the link of the
    /// default route.
    master: String,
    /// Where packets are switched: by `l2` (default), `l3`, or `l3s`, through the host's netfilter.
    mode: String,
    /// MTU in bytes, at most that of the master. Default: the master's.
    mtu: i64,
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
    type Conf = Conf;

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let mode = mode(conf)?;
        let base = Base::resolve(conf, req)?;
        let given = given_addresses(cx, req);
        if given.is_none() {
            cx.ipam()?;
        }
        let netns = req.sandbox.netns()?;
        let entering = Inside::begin(netns)?;
        let host = cx.host()?;
        let (inside, visitor) = entering.open()?;
        let place = if base.in_container { &inside.netlink } else { host };
        let master = child::master(place, base.name)?;
        let mtu = child::mtu(conf.mtu, &master)?;
        let mut undo = Rollback::new();

        // Before IPAM, so that an attachment that is there already keeps its address.
        let kind = LinkKind::Ipvlan { link: master.index, mode };
        let wanted = Wanted { ifname: &req.ifname, kind, mtu, mac: None };
        let up = child::asks_over_the_link(&cx.net.ipam_type);
        let add = if up { child::add_up } else { child::add };
        add(place, netns, &wanted)?;
        undo.push(format!("delete \"{}\"", req.ifname), || child::take_back(&inside, &req.ifname));
        let mut result = given.map_or_else(|| cx.ipam_add(&mut undo), Ok)?;
        result.version = SpecVersion::NEWEST;
        let names = (&req.ifname, &*req.sandbox.path);
        child::attach((&inside, visitor), names, &mut result)?;
        cx.finish(&mut result);
        undo.commit();
        Ok(result)
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let mode = mode(conf)?;
        let inside = Inside::enter(req.sandbox.netns()?)?;
        if !cx.net.ipam_type.is_empty() {
            cx.ipam_check()?;
        }
        let prev = req.require_prev()?;
        let (index, entry) = verify::container_entry(prev, &req.ifname, &req.sandbox.path)?;
        let link = child::of_kind(&inside, entry, KIND)?;
        check_mode(mode, &link)?;
        child::verify_below(cx.host()?, (&inside, &link), conf.below())?;
        verify::addresses(&inside, &link, (prev, index))?;
        verify::routes(&inside, prev)
    }

    fn del(cx: &Cx<'_>, _: &Conf, req: &DelReq) -> Result<()> {
        req.del_link(cx, KIND)
    }

    fn gc(cx: &Cx<'_>, _: &Conf, _: &GcReq) -> Result<()> {
        // The interface vanishes with the container; addresses are the IPAM plugin's.
        if cx.net.ipam_type.is_empty() { Ok(()) } else { cx.ipam_gc() }
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let unavailable = |e: Error| e.with_code(Code::NOT_AVAILABLE);
        mode(conf).map_err(unavailable)?;
        let host = cx.host().map_err(unavailable)?;
        host.require_admin().map_err(|e| unavailable(e.into()))?;
        // A master that is not named may come with `prevResult`.
        if !conf.link_in_container && !conf.master.is_empty() {
            let master = child::master(host, &conf.master).map_err(unavailable)?;
            child::mtu(conf.mtu, &master).map_err(unavailable)?;
        }
        if cx.net.ipam_type.is_empty() { Ok(()) } else { cx.ipam_status() }
    }
}

/// Where the master is, and its name; empty for the link of the default route.
#[derive(Debug, PartialEq, Eq)]
struct Base<'a> {
    name: &'a str,
    in_container: bool,
}

impl<'a> Base<'a> {
    fn resolve(conf: &'a Conf, req: &'a AddReq) -> Result<Base<'a>> {
        let in_container = conf.link_in_container;
        let Some(prev) = req.prev.as_ref().filter(|_| conf.master.is_empty()) else {
            return Ok(Base { name: &conf.master, in_container });
        };
        let [entry] = &prev.interfaces[..] else { return Err(no_single_interface()) };
        if entry.name.is_empty() {
            return Err(no_single_interface());
        }
        let in_container = in_container || entry.sandbox == req.sandbox.path;
        Ok(Base { name: &entry.name, in_container })
    }
}

fn no_single_interface() -> Error {
    Error::config("chained master failure. PrevResult lacks a single named interface")
        .with_details("name the link in the key \"master\"")
}

/// The addresses of the plugin before this one, where no other plugin is to give some.
fn given_addresses(cx: &Cx<'_>, req: &AddReq) -> Option<CniResult> {
    let prev = req.prev.as_ref().filter(|prev| !prev.ips.is_empty());
    prev.filter(|_| cx.net.ipam_type.is_empty()).cloned()
}

fn mode(conf: &Conf) -> Result<IpvlanMode> {
    let name = if conf.mode.is_empty() { "l2" } else { &conf.mode };
    IpvlanMode::parse(name).ok_or_else(|| {
        Error::config(format!("unknown ipvlan mode: \"{name}\""))
            .with_details("known are \"l2\", \"l3\" and \"l3s\"")
    })
}

fn check_mode(mode: IpvlanMode, link: &Link) -> Result<()> {
    if link.ipvlan == Some(mode) {
        return Ok(());
    }
    let (found, wanted) = (link.ipvlan.map_or("unknown", IpvlanMode::as_str), mode.as_str());
    let msg = format!("Container IPVlan mode {found} does not match expected value: {wanted}");
    Err(Error::internal(msg))
}
