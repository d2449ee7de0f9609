//! What a port has in the packet filter: masquerading of its addresses, the check of its MAC.

use super::{Conf, Plan};
use crate::cni::CniResult;
use crate::error::{Context, Error, Result};
use crate::iface::veth;
use crate::netfilter::spoof::Port;
use crate::netfilter::{Backend, Owner, PacketFilter, layout, masquerade, spoof};
use crate::netlink::{Link, LinkChange, Netlink, Switch};
use crate::skel::{CheckReq, Cx, DelReq, Failures, GcReq, Rollback};

/// The port as it is to be checked, if it is; `container` is its other end.
pub(super) fn checked(conf: &Conf, port: &Link, container: &Link) -> Result<Option<Port>> {
    conf.macspoofchk.then(|| port_of(port, container)).transpose()
}

fn port_of(port: &Link, container: &Link) -> Result<Port> {
    let mac = container.mac.ok_or_else(|| {
        Error::internal(format!("\"{}\" has no MAC to be checked", container.name))
    })?;
    Ok(Port { name: port.name.clone(), mac })
}

/// A port that is in its bridge, and down.
#[derive(Debug)]
pub(super) struct NewPort<'a> {
    pub(super) bridge: &'a Link,
    pub(super) link: &'a Link,
    /// Of [`checked`].
    pub(super) checked: Option<Port>,
}

/// Protects the port, then sets it up: all of it before the port forwards its first frame.
pub(super) fn start(
    host: &Netlink,
    filter: &PacketFilter,
    owner: Owner<'_>,
    conf: &Conf,
    plan: &Plan,
    port: &NewPort<'_>,
) -> Result<()> {
    if let Some(checked) = &port.checked {
        spoof::add(filter, owner, checked)?;
    }
    plan.vlans.set(host, port.bridge, port.link)?;
    veth::start(host, port.link, &owner.label(), attributes(conf))
}

/// New ports have both attributes off.
fn attributes(conf: &Conf) -> LinkChange {
    let mut change = LinkChange::new();
    if conf.hairpin_mode {
        change = change.hairpin(Switch::On);
    }
    if conf.port_isolation {
        change = change.isolated(Switch::On);
    }
    change
}

/// Masquerades the addresses of the result.
pub(super) fn addresses<'a>(
    filter: &'a PacketFilter,
    owner: Owner<'a>,
    backend: Backend,
    result: &CniResult,
    undo: &mut Rollback<'a>,
) -> Result<()> {
    let addrs = result.addresses();
    let registered = addrs.clone();
    undo.push("end masquerading", move || masquerade::del(filter, owner, &registered));
    masquerade::add(filter, backend, owner, &addrs)
}

/// Ends masquerading, of the addresses that the result tells, or else by name.
pub(super) fn del_addresses(
    cx: &Cx<'_>,
    filter: &PacketFilter,
    conf: &Conf,
    req: &DelReq,
    failures: &mut Failures,
) {
    if conf.ip_masq && cx.has_ipam() {
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let addrs = req.prev.as_ref().map(CniResult::addresses).unwrap_or_default();
        failures.keep(masquerade::del(filter, owner, &addrs));
    }
}

/// Ends the check of the port. The port must be deleted before, so that it never forwards unchecked.
pub(super) fn del_port(
    cx: &Cx<'_>,
    filter: &PacketFilter,
    conf: &Conf,
    req: &DelReq,
    failures: &mut Failures,
) {
    if conf.macspoofchk {
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let ports = req.prev.as_ref().map(|prev| ports_in(prev, req.ifname.as_str()));
        failures.keep(spoof::del(filter, owner, &ports.unwrap_or_default()));
    }
}

/// The port among the interfaces outside the sandbox, behind the bridge, with the MAC of the interface
/// inside.
fn ports_in(prev: &CniResult, ifname: &str) -> Vec<Port> {
    let inside = prev.interfaces.iter().find(|i| i.name == ifname && !i.sandbox.is_empty());
    let Some(mac) = inside.and_then(|entry| entry.mac.parse().ok()) else { return Vec::new() };
    let outside = prev.interfaces.iter().filter(|entry| entry.sandbox.is_empty());
    outside.skip(1).take(1).map(|entry| Port { name: entry.name.clone(), mac }).collect()
}

/// Verifies the check of source MACs at `port`, the other end of which is `container`.
pub(super) fn check_port(cx: &Cx<'_>, req: &CheckReq, port: &Link, container: &Link) -> Result<()> {
    let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
    spoof::check(&PacketFilter::new(), owner, &port_of(port, container)?)
}

/// Verifies the masquerading of the addresses of the interface at `index` of `prev`.
pub(super) fn check_addresses(
    cx: &Cx<'_>,
    req: &CheckReq,
    prev: &CniResult,
    index: usize,
) -> Result<()> {
    let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
    let addrs: Vec<_> = prev.ips_of(index).map(|ip| ip.address).collect();
    masquerade::check(&PacketFilter::new(), owner, &addrs)
}

/// Removes what no valid attachment of the network owns.
pub(super) fn gc(cx: &Cx<'_>, req: &GcReq, failures: &mut Failures) {
    let (filter, network) = (PacketFilter::new(), cx.net.name.as_str());
    let valid = Owner::each(&cx.net.name, &req.valid);
    failures.keep(masquerade::gc(&filter, network, &valid));
    failures.keep(spoof::gc(&filter, network, &valid));
}

/// Whether both can be had, and what others have of them is in force.
pub(super) fn status(conf: &Conf, plan: &Plan) -> Result<()> {
    let filter = PacketFilter::new();
    if conf.macspoofchk {
        Backend::Nftables.require_usable(&filter)?;
        layout::refuse(spoof::damage(&filter)?).or_unavailable()?;
    }
    if plan.l3 && conf.ip_masq {
        Backend::choose(plan.backend, &filter).require_usable(&filter)?;
        layout::refuse(masquerade::damage(&filter)?).or_unavailable()?;
    }
    Ok(())
}
