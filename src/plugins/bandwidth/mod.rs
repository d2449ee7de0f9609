//! bandwidth: limits the rates at which a container receives and sends.
//!
//! A chained plugin, behind a plugin that creates a veth pair: it returns `prevResult` with its ifb
//! device. Keys, in bits and bits per second: `ingressRate`, `ingressBurst`, `egressRate`,
//! `egressBurst`, or the same in `runtimeConfig.bandwidth` (capability `bandwidth`); `latency` in
//! milliseconds.
//!
//! State on the host while the container lives: for ingress, a token bucket on the host's end of
//! the pair; for egress, an `ifb` device with a token bucket, and a redirect from the host's end to
//! the device.

mod ifb;
mod limits;
mod shape;

pub use self::limits::BandwidthConfig;
use self::limits::BandwidthLimits;
use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, Failures, GcRequest, Plugin,
    Rollback, require_prev_result,
};
use crate::iface::{ContainerNetns, guard, peer, redirect, verify, veth};
use crate::netfilter::{AttachmentId, names};
use crate::netlink::traffic::TokenBucket;
use crate::netlink::{Link, Netlink};
use crate::netns::Netns;
use cni::error::{Error, ErrorContext, Result};
use cni::{CniResult, InterfaceName, ResultInterface, SpecVersion};

#[derive(Debug)]
pub struct Bandwidth;

impl Plugin for Bandwidth {
    const NAME: &'static str = "bandwidth";
    const ABOUT: &'static str = "limits what the container sends and receives";
    const VERSIONS: &'static [SpecVersion] = SpecVersion::ALL.split_at(2).1;
    const OUTLIVES_ITS_CONTAINER: bool = true;
    type Conf = BandwidthConfig;

    fn examine(
        cx: &CallContext<'_>,
        conf: &BandwidthConfig,
        remarks: &mut ConfigRemarks,
    ) -> Result<()> {
        let mut warn = |msg: String, remedy: &str| {
            remarks.warnings.push(Error::config(msg).with_details(remedy));
        };
        if !conf.has_limits() && !cx.net.wants_capability("bandwidth") {
            let msg = "nothing is limited: there are no rates, and the capability is not enabled";
            warn(msg.into(), "add \"capabilities\": {\"bandwidth\": true}, or rates and bursts");
        }
        for key in conf.obsolete_keys() {
            warn(format!("\"{key}\" is ignored: the limits are for all traffic"), "remove it");
        }
        conf.resolve_limits().map(drop)
    }

    fn add(cx: &CallContext<'_>, conf: &BandwidthConfig, req: &AddRequest) -> Result<CniResult> {
        let limits = conf.resolve_limits()?;
        let mut result =
            require_prev_result(req.prev.as_ref(), "must be called as chained plugin")?.clone();
        if limits == BandwidthLimits::default() {
            return Ok(result);
        }
        let host = cx.host_netlink()?;
        let end = find_host_end(host, req.sandbox.open_netns()?, &req.ifname)?;
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let former = limits.ingress.map(|_| shape::read_bucket(host, &end)).transpose()?.flatten();
        warn_of_small_buckets(&limits, &end);
        for key in conf.obsolete_keys() {
            warn!("\"{key}\" is ignored: the limits are for all traffic");
        }

        let existing = match limits.egress {
            Some(_) => find_own_device(host, &owner, &end)?,
            None => None,
        };
        let former_egress =
            existing.as_ref().map(|device| shape::read_bucket(host, device)).transpose()?.flatten();
        let mut undo = Rollback::new();
        if limits.egress.is_some() {
            cx.record_attachment(Self::NAME, req, &result, &mut undo);
        }
        if let Some(bucket) = limits.ingress {
            shape::replace_bucket(host, &end, former, bucket, &mut undo)?;
        }
        if let Some(bucket) = limits.egress {
            let device = match existing {
                Some(device) => device,
                None => ifb::create_device(host, &owner, end.mtu, &mut undo)?,
            };
            ifb::label_device(host, &device, &owner, &end)?;
            shape::replace_bucket(host, &device, former_egress, bucket, &mut undo)
                .context(|| "create ifb qdisc")?;
            shape::add_redirect(host, &end, &device, &mut undo)?;
            if !result.interfaces.iter().any(|i| i.name == device.name) {
                let mtu = cx.reported_mtu(end.mtu);
                result
                    .interfaces
                    .push(ResultInterface { mtu, ..veth::interface_entry(&device, "") });
            }
        }
        undo.commit();
        Ok(result)
    }

    fn check(cx: &CallContext<'_>, conf: &BandwidthConfig, req: &CheckRequest) -> Result<()> {
        let limits = conf.resolve_limits()?;
        require_prev_result(req.prev.as_ref(), "must be called as a chained plugin")?;
        if limits == BandwidthLimits::default() {
            return Ok(());
        }
        let host = cx.host_netlink()?;
        let end = find_host_end(host, req.sandbox.open_netns()?, &req.ifname)?;
        if let Some(bucket) = limits.ingress {
            shape::verify_bucket(host, &end, bucket)?;
        }
        if let Some(bucket) = limits.egress {
            let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
            verify_egress(host, &owner, &end, bucket)?;
        }
        Ok(())
    }

    fn del(cx: &CallContext<'_>, conf: &BandwidthConfig, req: &DelRequest) -> Result<()> {
        let host = cx.host_netlink()?;
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let mut failures = Failures::new();
        let devices = failures.keep_error(ifb::find_devices(host, &owner)).unwrap_or_default();
        // No kernel request for the many containers without limits.
        if conf.has_limits() || !devices.is_empty() {
            let peer = failures.keep_error(find_container_peer(host, req)).flatten();
            for end in
                failures.keep_error(find_shaped_ends(host, req, peer, &devices)).unwrap_or_default()
            {
                failures.keep_error(remove_shaping(host, &end, &devices));
            }
        }
        for device in devices {
            failures.keep_error(host.delete_link_by_index(device.index).map_err(Error::from));
        }
        failures.into_result()
    }

    fn gc(cx: &CallContext<'_>, _: &BandwidthConfig, req: &GcRequest) -> Result<()> {
        let host = cx.host_netlink()?;
        let valid = AttachmentId::from_attachments(&cx.net.name, &req.valid);
        let stale = names::stale_matcher(cx.net.name.as_str(), &valid);
        let unfinished = ifb::unfinished_device_filter(cx.net.name.as_str(), &valid);
        let mut failures = Failures::new();
        for device in host.dump_links()?.into_iter().filter(ifb::is_candidate) {
            if !stale(Some(&device.alias)) && !unfinished(&device) {
                continue;
            }
            let end = ifb::host_end_name(&device).map(|name| host.find_link(name)).transpose();
            if let Some(end) = failures.keep_error(end.map_err(Error::from)).flatten().flatten() {
                failures.keep_error(remove_shaping(host, &end, std::slice::from_ref(&device)));
            }
            failures.keep_error(host.delete_link_by_index(device.index).map_err(Error::from));
        }
        failures.into_result()
    }

    fn status(cx: &CallContext<'_>, conf: &BandwidthConfig) -> Result<()> {
        Self::require_sound(cx, conf)?;
        cx.usable_host_netlink()?;
        let tried = Netns::create_unnamed()
            .and_then(|netns| netns.run_inside(try_shaping))
            .or_unavailable()?;
        tried.or_unavailable()
    }
}

/// The host's end of the container's veth pair. The results of some plugins do not list it.
fn find_host_end(host: &Netlink, netns: &Netns, ifname: &InterfaceName) -> Result<Link> {
    let inside = ContainerNetns::open_in(netns)?;
    let link = inside.netlink.find_link(ifname.as_str())?;
    let no_peer = |why: &str| {
        let msg = format!("container interface {ifname} has no veth peer: {why}");
        Error::internal(msg).with_details(
            "only veth pairs can be shaped: put bandwidth behind a plugin that creates a pair, \
             such as bridge or ptp, or remove it from the list",
        )
    };
    let link = link.ok_or_else(|| no_peer("Link not found"))?;
    let peer = link.link.filter(|_| link.kind.as_deref() == Some("veth"));
    let peer = peer.ok_or_else(|| no_peer("it is not a veth"))?;
    peer::find_host_end(host, &inside, &link)?
        .ok_or_else(|| Error::internal(format!("veth peer with index {peer} is not in host ns")))
}

fn warn_of_small_buckets(limits: &BandwidthLimits, end: &Link) {
    for bucket in [limits.ingress, limits.egress].into_iter().flatten() {
        let frame = u64::from(end.mtu) + 14;
        let bytes = limits::bucket_capacity(bucket.rate, bucket.buffer.into());
        if bytes < u128::from(frame) {
            warn!(
                "a burst of {bytes} bytes drops packets of {frame}, the largest of \"{}\"",
                end.name
            );
        }
    }
}

/// The attachment's device of an earlier ADD. A device without an alias counts if the host's end is
/// redirected to it.
fn find_own_device(host: &Netlink, owner: &AttachmentId<'_>, end: &Link) -> Result<Option<Link>> {
    for device in ifb::find_devices(host, owner)? {
        if !device.alias.is_empty() || redirect::find_targets(host, end)?.contains(&device.index) {
            return Ok(Some(device));
        }
    }
    Ok(None)
}

fn verify_egress(
    host: &Netlink,
    owner: &AttachmentId<'_>,
    end: &Link,
    bucket: TokenBucket,
) -> Result<()> {
    let missing = || {
        let [name, _] = ifb::device_names(owner);
        Error::internal("get ifb device: Link not found").with_details(name)
    };
    let device = find_own_device(host, owner, end)?.ok_or_else(missing)?;
    shape::verify_bucket(host, &device, bucket)?;
    verify::require_up(&device, verify::ON_HOST)?;
    if redirect::find_targets(host, end)?.contains(&device.index) {
        return Ok(());
    }
    let (from, to) = (&end.name, &device.name);
    Err(Error::internal(format!("ingress of \"{from}\" is not redirected to \"{to}\"")))
}

fn find_container_peer(host: &Netlink, req: &DelRequest) -> Result<Option<Link>> {
    let Some(netns) = &req.netns else { return Ok(None) };
    let inside = ContainerNetns::open_in(netns)?;
    let link = inside.netlink.find_link(req.ifname.as_str())?;
    Ok(link.map(|link| peer::find_host_end(host, &inside, &link)).transpose()?.flatten())
}

/// The host's ends that may be shaped: the peer, or else those of the result, and those named by
/// the devices.
fn find_shaped_ends(
    host: &Netlink,
    req: &DelRequest,
    peer: Option<Link>,
    devices: &[Link],
) -> Result<Vec<Link>> {
    let mut ends = Vec::from_iter(peer);
    if ends.is_empty() {
        for entry in req.prev.iter().flat_map(|prev| &prev.interfaces) {
            let Some(link) = host.find_link(&entry.name)?.filter(|_| entry.sandbox.is_empty())
            else {
                continue;
            };
            // Another pair may have got the name since.
            let is_same =
                link.mac.is_some_and(|mac| mac.to_string().eq_ignore_ascii_case(&entry.mac));
            if link.kind.as_deref() == Some("veth") && is_same {
                ends.push(link);
            }
        }
    }
    for name in devices.iter().filter_map(ifb::host_end_name) {
        if !ends.iter().any(|end| end.name == name) {
            ends.extend(host.find_link(name)?);
        }
    }
    Ok(ends)
}

/// Deletes the redirect and the token bucket of a host's end. A guard on the device stays in force
/// on the end: the container may still run.
fn remove_shaping(host: &Netlink, end: &Link, devices: &[Link]) -> Result<()> {
    let indexes: Vec<u32> = devices.iter().map(|device| device.index).collect();
    let mut failures = Failures::new();
    failures.keep_error(guard::keep_without_redirect(host, end, || {
        redirect::remove(host, end, &indexes)
    }));
    failures.keep_error(shape::delete_bucket(host, end));
    match failures.into_result() {
        // The end may go meanwhile, with the container's namespace.
        Err(_) if host.find_link_by_index(end.index)?.is_none() => Ok(()),
        outcome => outcome,
    }
}

/// Fails if the kernel lacks a feature for shaping: shapes a device in the calling thread's
/// namespace.
fn try_shaping() -> Result<()> {
    let host = Netlink::open()?;
    let owner = AttachmentId { network: "status", ifname: "eth0", id: "status" };
    let mut undo = Rollback::new();
    let device = ifb::create_device(&host, &owner, 1500, &mut undo)?;
    let bucket = TokenBucket { rate: 1_000_000, buffer: 1_562_500, limit: 125_000 };
    shape::replace_bucket(&host, &device, None, bucket, &mut undo)?;
    shape::add_redirect(&host, &device, &device, &mut undo)?;
    undo.commit();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::isolate_test_thread;

    #[test]
    fn a_hosts_end_that_went_meanwhile_needs_no_removal() {
        isolate_test_thread();
        let host = Netlink::open().unwrap();
        let end = Link { index: 77, name: "veth12345678".to_owned(), ..Link::default() };
        remove_shaping(&host, &end, &[]).unwrap();
    }
}
