//! loopback: sets `lo` of the container up on ADD and down on DEL.
//!
//! It has no keys of its own; `CNI_IFNAME` must be valid and is otherwise ignored. With a
//! `prevResult` that is passed on, else the result lists `lo` and the addresses that the kernel
//! gave it. On the host it leaves nothing.

use serde::Deserialize;

use crate::cni::{CniResult, IpConfig};
use crate::error::{Context, Error, Result};
use crate::iface::veth::interface;
use crate::iface::{Inside, verify};
use crate::netlink::LinkChange;
use crate::skel::{AddReq, CheckReq, Cx, DelReq, GcReq, Plugin, Remarks};

const LO: &str = "lo";

pub struct Loopback;

/// It has no keys of its own.
#[derive(Debug, Deserialize)]
pub struct Conf {}

impl Plugin for Loopback {
    const NAME: &'static str = "loopback";
    const ABOUT: &'static str = "sets the container's lo up";
    const CONNECTS: bool = false;
    type Conf = Conf;

    fn examine(_: &Cx<'_>, _: &Conf, _: &mut Remarks) -> Result<()> {
        Ok(())
    }

    fn add(cx: &Cx<'_>, _: &Conf, req: &AddReq) -> Result<CniResult> {
        let inside = Inside::enter(req.sandbox.netns()?)?;
        let lo = inside.link(LO)?;
        if !lo.up {
            // Refused while nothing is changed.
            addresses(&inside, lo.index)?;
            inside.netlink.set_link(lo.index, LinkChange::new().up())?;
        }
        let ips = addresses(&inside, lo.index)?;
        if let Some(prev) = &req.prev {
            return Ok(prev.clone());
        }
        let mut entry = interface(&lo, &req.sandbox.path);
        entry.mtu = cx.reported_mtu(entry.mtu);
        Ok(CniResult { interfaces: vec![entry], ips, ..CniResult::new() })
    }

    fn check(_: &Cx<'_>, _: &Conf, req: &CheckReq) -> Result<()> {
        let inside = Inside::enter(req.sandbox.netns()?)?;
        let lo = inside.link(LO)?;
        verify::is_up(&lo, verify::IN_CONTAINER)
            .map_err(|_| Error::internal("loopback interface is down"))?;
        addresses(&inside, lo.index).map(drop)
    }

    fn del(_: &Cx<'_>, _: &Conf, req: &DelReq) -> Result<()> {
        let Some(netns) = &req.netns else { return Ok(()) };
        let inside = Inside::enter(netns)?;
        let lo = inside.link(LO)?;
        inside.netlink.set_link(lo.index, LinkChange::new().down()).context(|| "set \"lo\" down")
    }

    fn gc(_: &Cx<'_>, _: &Conf, _: &GcReq) -> Result<()> {
        // The kernel removes `lo` with its namespace.
        Ok(())
    }

    fn status(_: &Cx<'_>, _: &Conf) -> Result<()> {
        Ok(())
    }
}

/// The first address of each family. Anything but a loopback address is foreign to `lo`.
fn addresses(inside: &Inside<'_>, index: u32) -> Result<Vec<IpConfig>> {
    let all = inside.netlink.dump_addrs(index)?;
    if let Some(foreign) = all.iter().find(|addr| !addr.net.addr().is_loopback()) {
        let ip = foreign.net.addr();
        let msg = format!("loopback interface found with non-loopback address \"{ip}\"");
        return Err(Error::internal(msg));
    }
    let first = |v4| all.iter().find(|addr| addr.net.addr().is_ipv4() == v4);
    let ips = [first(true), first(false)].into_iter().flatten();
    Ok(ips.map(|a| IpConfig { address: a.net, gateway: None, interface: Some(0) }).collect())
}
