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

use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipnet::IpNet;

pub use self::conf::Conf;
use crate::cni::{CniResult, IpConfig};
use crate::error::{Context, Error, Result};
use crate::log;
use crate::netfilter::ports::conditions::Conditions;
use crate::netfilter::ports::{self, Forward, KEPT, Mapping, Snat, Taken, flows};
use crate::netfilter::{
    self, Backend, Family, Owner, PacketFilter, Repair, Watch, layout, localhost,
};
use crate::repairs::Repairs;
use crate::skel::{
    AddReq, CheckReq, Cx, DelReq, GcReq, Plugin, Remarks, Rollback, reclaim, require_prev,
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
        let backend = conf.backend()?;
        remarks.warnings.extend(backend.and_then(|backend| conf.without_effect(backend)));
        Ok(())
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let filter = cx.filter();
        let parse = || conf.backend().and_then(|_| conf.mappings());
        let mappings = parse().context(|| "failed to parse config")?;
        let prev = require_prev(req.prev.as_ref(), "must be called as chained plugin")?;
        if mappings.is_empty() {
            // Mappings of others that are missing are restored nevertheless.
            if KEPT.is_used() && ports::damage(filter)?.is_some() {
                netfilter::heal(filter, Repair::Restore)?;
            }
            return Ok(prev.clone());
        }
        let backend = conf.choose_backend(filter).context(|| "failed to parse config")?;
        conf.without_effect(backend).iter().for_each(log::warn);
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let mut forward = forward(conf, backend, mappings, nets(prev, owner.ifname))?;
        let mut undo = Rollback::new();
        let localnet = localnet_keys(cx, conf, &forward.targets, prev)?;
        forward.localnet = !localnet.is_empty();
        open_localhost(filter, &localnet)?;
        cx.note(Self::NAME, req, prev, &mut undo);
        undo.push("remove the record of the mappings", || KEPT.remove(owner));
        KEPT.keep(owner, &forward);
        // The mappings may exist although the kernel's reply was lost.
        let mut unmap = Rollback::new();
        unmap.push("delete the mappings", || ports::del(filter, owner, None));
        let taken = map(filter, owner, &forward)?;
        unmap.commit();
        if let Some(taken) = taken {
            return Err(taken.into());
        }
        flows::delete_other_targets(&forward, cx.host()?);
        undo.commit();
        Ok(prev.clone())
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let filter = cx.filter();
        let (configured, mappings) = (conf.backend()?, conf.mappings()?);
        let prev = req.require_prev()?;
        if mappings.is_empty() {
            return Ok(());
        }
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let targets = nets(prev, owner.ifname);
        Backend::verify(configured, filter, KEPT, owner, &|backend| {
            conf.require_keys_of(backend)?;
            let forward = forward(conf, backend, mappings.clone(), targets.clone())?;
            ports::check(filter, owner, &forward)
        })?;
        for key in localnet_keys(cx, conf, &targets, prev)? {
            if sysctl::read(&key)? != "1" {
                return Err(Error::internal(format!("sysctl {key} is not 1"))
                    .with_details(format!("sysctl -w {key}=1")));
            }
        }
        layout::refuse(localhost::damage(filter)?)
    }

    fn repair(cx: &Cx<'_>, conf: &Conf, req: &CheckReq, repairs: &mut Repairs) -> Result<()> {
        conf.backend()?;
        if conf.mappings()?.is_empty() {
            return Ok(());
        }
        let prev = req.require_prev()?;
        // A bridge that was created again has default parameters.
        for key in localnet_keys(cx, conf, &nets(prev, req.ifname.as_str()), prev)? {
            if repairs.is_first(&key) && sysctl::read(&key)? != "1" {
                let what = format!("sysctl {key}");
                repairs.restore(what, || open_localhost(cx.filter(), &[key]));
            }
        }
        Ok(())
    }

    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let filter = cx.filter();
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let targets = req.prev.as_ref().map(|prev| nets(prev, owner.ifname));
        let forward = Forward {
            backend: Backend::Iptables,
            mappings: conf.valid_mappings(),
            targets: targets.unwrap_or_default(),
            snat: conf.snat(),
            conditions: Conditions::default(),
            options: conf.options().ok(),
            localnet: false,
        };
        ports::del(filter, owner, Some(&forward))
    }

    fn gc(cx: &Cx<'_>, _: &Conf, req: &GcReq) -> Result<()> {
        let valid = Owner::each(&cx.net.name, &req.valid);
        ports::gc(cx.filter(), cx.net.name.as_str(), &valid)
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let filter = cx.filter();
        conf.choose_backend(filter).or_unavailable()?.require_usable(filter)?;
        layout::refuse(ports::damage(filter)?).or_unavailable()?;
        cx.usable_host().map(drop)
    }
}

fn forward(
    conf: &Conf,
    backend: Backend,
    mappings: Vec<Mapping>,
    targets: Vec<IpNet>,
) -> Result<Forward> {
    Ok(Forward {
        backend,
        mappings,
        targets,
        snat: conf.snat(),
        conditions: conf.conditions(backend)?,
        options: (backend == Backend::Iptables).then(|| conf.options()).transpose()?,
        localnet: false,
    })
}

/// Creates the mappings. A port of a container that is gone is reclaimed. For a port of a container that may be alive, ADD
/// waits: the container may be about to be deleted, as when a pod is replaced by force. Returns a port that stays another
/// container's.
fn map(filter: &PacketFilter, owner: Owner<'_>, forward: &Forward) -> Result<Option<Taken>> {
    let until = Instant::now() + TIMEOUT;
    let mut watch: Option<Watch> = None;
    while let Some(taken) = ports::add(filter, owner, forward)? {
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
    let Some(index) = host.route_to(addr, None)?.and_then(|route| route.oif) else {
        return Ok(None);
    };
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
fn localnet_keys(
    cx: &Cx<'_>,
    conf: &Conf,
    targets: &[IpNet],
    prev: &CniResult,
) -> Result<Vec<String>> {
    let is_listed = |name: &String| {
        let mut on_host = prev.interfaces.iter().filter(|i| i.sandbox.is_empty());
        prev.interfaces.is_empty() || on_host.any(|i| i.name == *name)
    };
    let v4 = targets.iter().map(IpNet::addr).find(IpAddr::is_ipv4);
    let Some(addr) = v4.filter(|_| conf.snat() != Snat::Never) else { return Ok(Vec::new()) };
    let name = interface_to(cx, addr)?.filter(is_listed);
    Ok(name.into_iter().map(|name| format!("net/ipv4/conf/{name}/route_localnet")).collect())
}
