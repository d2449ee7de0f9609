//! portmap: maps ports of the host to a container. A chained plugin: it returns `prevResult`, from which it takes the
//! container's addresses.
//!
//! Keys: `backend`, `snat`, `masqAll`, `markMasqBit`, `externalSetMarkChain`, `conditionsV4`,
//! `conditionsV6`; the ports come with the capability `portMappings`. Only packets to an address of the host itself are
//! translated.
//!
//! State on the host while the container lives: elements of the table `inet cnibox_portmap`, or a chain `CNI-DN-..` of
//! iptables. Permanently: the empty table or the chains `CNI-HOSTPORT-..`, and `route_localnet` of the interface towards
//! the container.

mod conf;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipnet::IpNet;

pub use self::conf::Conf;
use crate::cni::{CniResult, IpConfig};
use crate::error::{Context, Error, Result};
use crate::netfilter::backend::{Backend, Family, PacketFilter};
use crate::netfilter::names::Owner;
use crate::netfilter::ports::conditions::Conditions;
use crate::netfilter::ports::{
    self, Forward, KEPT, Mapping, Snat, Taken, Target, Wanted, flows, iptables, reference,
};
use crate::netfilter::{Watch, layout, localhost};
use crate::repairs::Repairs;
use crate::skel::{
    AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Remarks, Rollback, reclaim, require_prev,
};
use crate::sysctl;

/// How long ADD waits for a port of another container.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The plugin.
#[derive(Debug)]
pub struct Portmap;

impl Plugin for Portmap {
    const NAME: &'static str = "portmap";
    const ABOUT: &'static str = "maps ports of the host to the container";
    const OUTLIVES_ITS_CONTAINER: bool = true;
    const REPAIRS: bool = true;
    type Conf = Conf;

    fn examine(cx: &Cx<'_>, conf: &Conf, remarks: &mut Remarks) -> Result<()> {
        if !cx.net.wants("portMappings") {
            let msg = "no port is mapped: the capability is not enabled";
            let remedy = "add \"capabilities\": {\"portMappings\": true}";
            remarks.warnings.push(Error::config(msg).with_details(remedy));
        }
        conf.backend().map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let filter = PacketFilter::new();
        let parse = || conf.backend().and_then(|_| conf.mappings());
        let mappings = parse().context(|| "failed to parse config")?;
        let prev = require_prev(req.prev.as_ref(), "must be called as chained plugin")?;
        if mappings.is_empty() {
            return ports::heal(&filter).map(|()| prev.clone());
        }
        let backend = conf.choose_backend(&filter).context(|| "failed to parse config")?;
        let targets = targets(cx, prev, req.ifname.as_str())?;
        let conditions = conf.conditions(backend)?;
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let forward = forward(conf, owner, &mappings, &targets, &conditions);
        let mut undo = Rollback::new();
        let localnet = localnet_keys(conf, &targets, prev);
        open_localhost(&filter, &localnet)?;
        cx.note(Self::NAME, req, prev, &mut undo);
        undo.push("remove the record of the mappings", || KEPT.remove(owner));
        let options = (backend == Backend::Iptables).then(|| conf.options()).transpose()?;
        ports::keep(backend, &forward, options, !localnet.is_empty());
        // The mappings may exist although the kernel's reply was lost.
        let mut unmap = Rollback::new();
        unmap.push("delete the mappings", || ports::reclaim(&filter, owner));
        let taken = map(conf, backend, &filter, &forward)?;
        unmap.commit();
        if let Some(taken) = taken {
            return Err(taken.into());
        }
        flows::lead_to(&targets, &mappings, cx.host()?);
        undo.commit();
        Ok(prev.clone())
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let filter = PacketFilter::new();
        let (configured, mappings) = (conf.backend()?, conf.mappings()?);
        let prev = req.require_prev()?;
        if mappings.is_empty() {
            return Ok(());
        }
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let backend = Backend::of(configured, &filter, KEPT, owner);
        conf.require_keys_of(backend)?;
        let targets = targets(cx, prev, req.ifname.as_str())?;
        let conditions = conf.conditions(backend)?;
        let forward = forward(conf, owner, &mappings, &targets, &conditions);
        match backend {
            Backend::Nftables => {
                let nft = filter.nft()?;
                ports::nft::check(nft, &forward).or_else(|missing| {
                    if reference::has(nft, &forward)? { Ok(()) } else { Err(missing) }
                })?;
            }
            Backend::Iptables => iptables::check(&forward, &conf.options()?)?,
        }
        for key in localnet_keys(conf, &targets, prev) {
            if sysctl::read(&key)? != "1" {
                return Err(Error::internal(format!("sysctl {key} is not 1"))
                    .with_details(format!("sysctl -w {key}=1")));
            }
        }
        layout::refuse(localhost::damage(&filter)?)
    }

    fn repair(cx: &Cx<'_>, conf: &Conf, req: &CheckReq, repairs: &mut Repairs) -> Result<()> {
        conf.backend()?;
        if conf.mappings()?.is_empty() {
            return Ok(());
        }
        let prev = req.require_prev()?;
        let targets = targets(cx, prev, req.ifname.as_str())?;
        // A bridge that was created again has default parameters.
        for key in localnet_keys(conf, &targets, prev) {
            if repairs.is_first(&key) && sysctl::read(&key)? != "1" {
                let what = format!("sysctl {key}");
                repairs.restore(what, || open_localhost(&PacketFilter::new(), &[key]));
            }
        }
        Ok(())
    }

    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let filter = PacketFilter::new();
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let mappings = conf.valid_mappings();
        let mut failures = Failures::new();
        failures.keep(KEPT.remove(owner));
        let nets = req.prev.as_ref().map(|prev| nets(prev, owner.ifname)).unwrap_or_default();
        let addrs: Vec<IpAddr> = nets.iter().map(IpNet::addr).collect();
        let targets: Vec<_> = nets.into_iter().map(|net| Target { net, via: None }).collect();
        let conditions = Conditions::default();
        let forward = forward(conf, owner, &mappings, &targets, &conditions);
        let mut servers = BTreeSet::new();
        if let Some(nft) = failures.keep(filter.nft_if_present()).flatten() {
            let deleted = ports::del(nft, owner, &mappings, &addrs);
            servers.extend(failures.keep(deleted).unwrap_or_default());
        }
        let options = conf.options().ok();
        let wanted = options.as_ref().map(|options| Wanted::each(&forward, options));
        let deleted = iptables::del(&filter, owner, &wanted.unwrap_or_default());
        servers.extend(failures.keep(deleted).unwrap_or_default());
        flows::of_gone(&servers);
        failures.into_result()
    }

    fn gc(cx: &Cx<'_>, _: &Conf, req: &GcReq) -> Result<()> {
        let filter = PacketFilter::new();
        let network = cx.net.name.as_str();
        let valid = Owner::each(&cx.net.name, &req.valid);
        let mut failures = Failures::new();
        failures.keep(KEPT.remove_stale(network, &valid));
        if let Some(nft) = failures.keep(filter.nft_if_present()).flatten()
            && let Some(servers) = failures.keep(ports::nft::collect(nft, network, &valid))
        {
            flows::of_gone(&servers);
        }
        failures.keep(iptables::collect(&filter, network, &valid));
        failures.into_result()
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let filter = PacketFilter::new();
        conf.choose_backend(&filter).or_unavailable()?.require_usable(&filter)?;
        layout::refuse(ports::damage(&filter)?).or_unavailable()?;
        cx.usable_host().map(drop)
    }
}

fn forward<'a>(
    conf: &Conf,
    owner: Owner<'a>,
    mappings: &'a [Mapping],
    targets: &'a [Target],
    conditions: &'a Conditions,
) -> Forward<'a> {
    Forward { owner, mappings, targets, snat: conf.snat(), conditions }
}

/// Creates the mappings in one back end, and deletes those of an earlier ADD in the other. A port of a container that is
/// gone is reclaimed. For a port of a container that may be alive, ADD waits: the container may be about to be deleted, as
/// when a pod is replaced by force. Returns a port that stays another container's.
fn map(
    conf: &Conf,
    backend: Backend,
    filter: &PacketFilter,
    forward: &Forward<'_>,
) -> Result<Option<Taken>> {
    let try_once = || match backend {
        Backend::Nftables => {
            // Before the mappings are created, because this step may fail.
            iptables::del(filter, forward.owner, &[])?;
            ports::nft::add(filter.nft()?, forward)
        }
        Backend::Iptables => {
            let taken = iptables::add(forward, &conf.options()?)?;
            if taken.is_none() {
                let addrs: Vec<IpAddr> = forward.targets.iter().map(Target::addr).collect();
                let nft = filter.nft_if_present()?;
                nft.map(|nft| ports::del(nft, forward.owner, &[], &addrs)).transpose()?;
            }
            Ok(taken)
        }
    };
    let until = Instant::now() + TIMEOUT;
    let mut watch: Option<Watch> = None;
    while let Some(taken) = try_once()? {
        if Instant::now() < until && reclaim::holder(&taken.by)? {
            continue;
        }
        match &watch {
            // Retries once, because the watch does not report earlier changes.
            None => watch = Some(Watch::open(filter)),
            Some(watch) if watch.heard(until) => {}
            Some(_) => return Ok(Some(taken)),
        }
    }
    Ok(None)
}

/// The container's first address of each family.
fn nets(prev: &CniResult, ifname: &str) -> Vec<IpNet> {
    let first = |family| {
        let mine =
            |ip: &&IpConfig| Family::of(ip.address.addr()) == family && is_of(ip, prev, ifname);
        prev.ips.iter().find(mine).map(|ip| ip.address)
    };
    Family::BOTH.into_iter().filter_map(first).collect()
}

/// The container's first address of each family, and the host's interface towards it.
fn targets(cx: &Cx<'_>, prev: &CniResult, ifname: &str) -> Result<Vec<Target>> {
    let target = |net: IpNet| Ok(Target { net, via: interface_to(cx, net.addr())? });
    nets(prev, ifname).into_iter().map(target).collect()
}

/// Whether the address may be of this interface of the container. An address without an interface index may be of any.
fn is_of(ip: &IpConfig, prev: &CniResult, ifname: &str) -> bool {
    let index = ip.interface.and_then(|index| usize::try_from(index).ok());
    match index.and_then(|index| prev.interfaces.get(index)) {
        Some(interface) => interface.name == ifname && !interface.sandbox.is_empty(),
        None => true,
    }
}

/// The host's outgoing interface for packets to `addr`.
fn interface_to(cx: &Cx<'_>, addr: IpAddr) -> Result<Option<String>> {
    let host = cx.host()?;
    let Some(index) = host.route_to(addr)?.and_then(|route| route.oif) else { return Ok(None) };
    Ok(host.link_by_index(index)?.map(|link| link.name))
}

/// Permits connections from 127.0.0.1 of the host to containers, but not from containers to 127.0.0.0/8 of the host. The
/// parameters are never reset, because other containers of the interface depend on them.
fn open_localhost(filter: &PacketFilter, keys: &[String]) -> Result<()> {
    if !keys.is_empty() {
        localhost::close(filter)?;
    }
    for key in keys {
        sysctl::ensure(key, "1").context(|| "unable to enable route_localnet")?;
    }
    Ok(())
}

/// The kernel parameters that permit connections from 127.0.0.1 of the host to the container: of the interface towards
/// the container, if the result lists this interface. Results before 0.3.0 have no interfaces.
fn localnet_keys(conf: &Conf, targets: &[Target], prev: &CniResult) -> Vec<String> {
    if conf.snat() == Snat::Never {
        return Vec::new();
    }
    let is_listed = |name: &str| {
        let mut on_host = prev.interfaces.iter().filter(|i| i.sandbox.is_empty());
        prev.interfaces.is_empty() || on_host.any(|i| i.name == name)
    };
    let v4 = targets.iter().filter(|target| target.addr().is_ipv4());
    let names = v4.filter_map(|target| target.via.as_deref()).filter(|name| is_listed(name));
    names.map(|name| format!("net/ipv4/conf/{name}/route_localnet")).collect()
}
