//! loopback: sets `lo` of the container up on ADD and down on DEL.
//!
//! It has no keys of its own; `CNI_IFNAME` must be valid and is otherwise ignored. With a
//! `prevResult` that is passed on, else the result lists `lo` and the addresses that the kernel
//! gave it. There is no state on the host.

use serde::Deserialize;

use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, GcRequest, Plugin,
};
use crate::iface::veth::interface_entry;
use crate::iface::{ContainerNetns, verify};
use crate::netlink::LinkChange;
use cni::error::{Error, ErrorContext, Result};
use cni::{CniResult, IpConfig};

const LO: &str = "lo";

pub struct Loopback;

#[derive(Debug, Deserialize)]
pub struct LoopbackConfig {}

impl Plugin for Loopback {
    const NAME: &'static str = "loopback";
    const ABOUT: &'static str = "sets the container's lo up";
    const CONNECTS: bool = false;
    type Conf = LoopbackConfig;

    fn examine(_: &CallContext<'_>, _: &LoopbackConfig, _: &mut ConfigRemarks) -> Result<()> {
        Ok(())
    }

    fn add(cx: &CallContext<'_>, _: &LoopbackConfig, req: &AddRequest) -> Result<CniResult> {
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        let lo = inside.require_link(LO)?;
        if !lo.up {
            // Refused while nothing is changed.
            loopback_addresses(&inside, lo.index)?;
            inside.netlink.change_link(lo.index, LinkChange::new().set_up())?;
        }
        let ips = loopback_addresses(&inside, lo.index)?;
        if let Some(prev) = &req.prev {
            return Ok(prev.clone());
        }
        let mut entry = interface_entry(&lo, &req.sandbox.path);
        entry.mtu = cx.reported_mtu(entry.mtu);
        Ok(CniResult { interfaces: vec![entry], ips, ..CniResult::new() })
    }

    fn check(_: &CallContext<'_>, _: &LoopbackConfig, req: &CheckRequest) -> Result<()> {
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        let lo = inside.require_link(LO)?;
        verify::require_up(&lo, verify::IN_CONTAINER)
            .map_err(|_| Error::internal("loopback interface is down"))?;
        loopback_addresses(&inside, lo.index).map(drop)
    }

    fn del(_: &CallContext<'_>, _: &LoopbackConfig, req: &DelRequest) -> Result<()> {
        let Some(netns) = &req.netns else { return Ok(()) };
        let inside = ContainerNetns::open_in(netns)?;
        let lo = inside.require_link(LO)?;
        inside
            .netlink
            .change_link(lo.index, LinkChange::new().set_down())
            .context(|| "set \"lo\" down")
    }

    fn gc(_: &CallContext<'_>, _: &LoopbackConfig, _: &GcRequest) -> Result<()> {
        // The kernel removes `lo` with its namespace.
        Ok(())
    }

    fn status(_: &CallContext<'_>, _: &LoopbackConfig) -> Result<()> {
        Ok(())
    }
}

/// The first address of each family. Anything but a loopback address is foreign to `lo`.
fn loopback_addresses(inside: &ContainerNetns<'_>, index: u32) -> Result<Vec<IpConfig>> {
    let all = inside.netlink.dump_addresses(index)?;
    if let Some(foreign) = all.iter().find(|addr| !addr.net.addr().is_loopback()) {
        let ip = foreign.net.addr();
        let msg = format!("loopback interface found with non-loopback address \"{ip}\"");
        return Err(Error::internal(msg));
    }
    let first = |v4| all.iter().find(|addr| addr.net.addr().is_ipv4() == v4);
    let ips = [first(true), first(false)].into_iter().flatten();
    Ok(ips.map(|a| IpConfig { address: a.net, gateway: None, interface: Some(0) }).collect())
}
