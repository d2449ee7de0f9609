//! portmap: ports of the host that lead to a container. Chained: it takes the container's addresses
//! from the result of the plugin before it, and passes that on.
//!
//! Keys: `backend`, `snat`, `masqAll`, `markMasqBit`, `externalSetMarkChain`, `conditionsV4`,
//! `conditionsV6`; the ports come with the capability `portMappings`. Only what is sent to an
//! address of the host itself is translated.
//!
//! On the host it leaves, while the container lives, its elements of the table `inet
//! cnibox_portmap`, or its chain `CNI-DN-..` in iptables; for good, the empty table or the chains
//! `CNI-HOSTPORT-..`, and `route_localnet` of the interface towards the container.

mod conf;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipnet::IpNet;

pub use self::conf::Conf;
use crate::cni::{CniResult, IpConfig};
use crate::error::{Context, Error, Result};
use crate::netfilter::backend::{Backend, Family, PacketFilter};
use crate::netfilter::names::Owner;
use crate::netfilter::ports::{self, Forward, KEPT, Mapping, Snat, Taken, flows};
use crate::netfilter::{Watch, layout, localhost};
use crate::repairs::Repairs;
use crate::skel::{
    AddReq, CheckReq, Cx, DelReq, GcReq, Plugin, Remarks, Rollback, reclaim, require_prev,
};
use crate::sysctl;

/// How long a port of another container is waited for.
const PATIENCE: Duration = Duration::from_secs(2);

/// The plugin.
#[derive(Debug)]
pub struct Portmap;

impl Plugin for Portmap {
    const NAME: &'static str = "portmap";
    const ABOUT: &'static str = "ports of the host that lead to the container";
    const OUTLIVES_ITS_CONTAINER: bool = true;
    const REPAIRS: bool = true;
    type Conf = Conf;

    fn examine(cx: &Cx<'_>, conf: &Conf, remarks: &mut Remarks) -> Result<()> {
        if !cx.net.wants("portMappings") {
            let warning =
                Error::config("no port is ever mapped: the runtime is not asked for them");
            remarks
                .warnings
                .push(warning.with_details("add \"capabilities\": {\"portMappings\": true}"));
        }
        let backend = conf.backend()?;
        backend.map_or(Ok(()), |backend| conf.require_keys_of(backend))
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let filter = PacketFilter::new();
        let (configured, mappings) = read(conf).context(|| "failed to parse config")?;
        let prev = require_prev(req.prev.as_ref(), "must be called as chained plugin")?;
        if mappings.is_empty() {
            return ports::heal(&filter).map(|()| prev.clone());
        }
        let backend = backend(conf, configured, &filter).context(|| "failed to parse config")?;
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let targets = nets(prev, owner.ifname);
        let mut forward = forward(conf, backend, &mappings, &targets)?;
        let mut undo = Rollback::new();
        let localnet = localnet_keys(cx, conf, &targets, prev)?;
        forward.localnet = !localnet.is_empty();
        open_localhost(&filter, &localnet)?;
        cx.note(Self::NAME, req, prev, &mut undo);
        undo.push("forget the mappings", || KEPT.remove(owner));
        KEPT.keep(owner, &forward);
        // An answer that is lost may have said that the mappings are made.
        let mut unmap = Rollback::new();
        unmap.push("delete the mappings", || ports::del(&filter, owner, None));
        let taken = make(&filter, owner, &forward)?;
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
        let (configured, mappings) = read(conf)?;
        let prev = req.require_prev()?;
        if mappings.is_empty() {
            return Ok(());
        }
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let backend = Backend::of(configured, &filter, KEPT, owner);
        conf.require_keys_of(backend)?;
        let targets = nets(prev, owner.ifname);
        ports::check(&filter, owner, &forward(conf, backend, &mappings, &targets)?)?;
        for key in localnet_keys(cx, conf, &targets, prev)? {
            if sysctl::read(&key)? != "1" {
                return Err(Error::internal(format!("sysctl {key} is not 1"))
                    .with_details(format!("sysctl -w {key}=1")));
            }
        }
        layout::refuse(localhost::damage(&filter)?)
    }

    fn repair(cx: &Cx<'_>, conf: &Conf, req: &CheckReq, repairs: &mut Repairs) -> Result<()> {
        let (_, mappings) = read(conf)?;
        if mappings.is_empty() {
            return Ok(());
        }
        let prev = req.require_prev()?;
        // A bridge that was made again has its own parameters.
        for key in localnet_keys(cx, conf, &nets(prev, req.ifname.as_str()), prev)? {
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
        let mappings = conf.sound_mappings();
        let targets = req.prev.as_ref().map(|prev| nets(prev, owner.ifname)).unwrap_or_default();
        let mut forward = forward(conf, Backend::Nftables, &mappings, &targets)?;
        forward.options = conf.options().ok();
        ports::del(&filter, owner, Some(&forward))
    }

    fn gc(cx: &Cx<'_>, _: &Conf, req: &GcReq) -> Result<()> {
        let valid = Owner::each(&cx.net.name, &req.valid);
        ports::gc(&PacketFilter::new(), cx.net.name.as_str(), &valid)
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let filter = PacketFilter::new();
        let configured = conf.backend().or_unavailable()?;
        let backend = backend(conf, configured, &filter).or_unavailable()?;
        backend.require_usable(&filter)?;
        layout::refuse(ports::damage(&filter)?).or_unavailable()?;
        cx.usable_host().map(drop)
    }
}

fn read(conf: &Conf) -> Result<(Option<Backend>, Vec<Mapping>)> {
    let configured = conf.backend()?;
    if let Some(backend) = configured {
        conf.require_keys_of(backend)?;
    }
    Ok((configured, conf.mappings()?))
}

fn backend(conf: &Conf, configured: Option<Backend>, filter: &PacketFilter) -> Result<Backend> {
    let backend = Backend::choose(configured, filter);
    conf.require_keys_of(backend).map(|()| backend)
}

fn forward<'a>(
    conf: &'a Conf,
    backend: Backend,
    mappings: &'a [Mapping],
    targets: &'a [IpNet],
) -> Result<Forward<'a>> {
    Ok(Forward {
        backend,
        mappings: mappings.into(),
        targets: targets.into(),
        snat: conf.snat(),
        conditions: conf.conditions(),
        options: (backend == Backend::Iptables).then(|| conf.options()).transpose()?,
        localnet: false,
    })
}

/// Makes the mappings. A port of a container that is gone is freed; for one of a container that may
/// live it is waited a while: it may be just about to be deleted, as when a pod is replaced by force.
/// A port that stays another's is returned.
fn make(filter: &PacketFilter, owner: Owner<'_>, forward: &Forward<'_>) -> Result<Option<Taken>> {
    let until = Instant::now() + PATIENCE;
    let mut watch: Option<Watch> = None;
    while let Some(taken) = ports::add(filter, owner, forward)? {
        if Instant::now() < until && reclaim::holder(&taken.by)? {
            continue;
        }
        match &watch {
            // What happens before it listens is not heard: it looks once more.
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

/// Whether the address may be of this interface of the container: also without an interface index.
fn is_of(ip: &IpConfig, prev: &CniResult, ifname: &str) -> bool {
    let index = ip.interface.and_then(|index| usize::try_from(index).ok());
    match index.and_then(|index| prev.interfaces.get(index)) {
        Some(interface) => interface.name == ifname && !interface.sandbox.is_empty(),
        None => true,
    }
}

/// The host's interface by which packets to `addr` leave.
fn interface_to(cx: &Cx<'_>, addr: IpAddr) -> Result<Option<String>> {
    let host = cx.host()?;
    let Some(index) = host.route_to(addr, None)?.and_then(|route| route.oif) else {
        return Ok(None);
    };
    Ok(host.link_by_index(index)?.map(|link| link.name))
}

/// Lets 127.0.0.1 of the host reach containers, but not these 127.0.0.0/8 of the host. Never off
/// again, as other containers of the interface rely on it.
fn open_localhost(filter: &PacketFilter, keys: &[String]) -> Result<()> {
    if !keys.is_empty() {
        localhost::close(filter)?;
    }
    for key in keys {
        sysctl::ensure(key, "1").context(|| "unable to enable route_localnet")?;
    }
    Ok(())
}

/// The settings that let 127.0.0.1 of the host reach the container: of the interface towards the container,
/// if the result names this interface. Results before 0.3.0 name none.
fn localnet_keys(
    cx: &Cx<'_>,
    conf: &Conf,
    targets: &[IpNet],
    prev: &CniResult,
) -> Result<Vec<String>> {
    let ours = |name: &String| {
        let mut hosts = prev.interfaces.iter().filter(|i| i.sandbox.is_empty());
        prev.interfaces.is_empty() || hosts.any(|i| i.name == *name)
    };
    let v4 = targets.iter().map(IpNet::addr).find(IpAddr::is_ipv4);
    let Some(addr) = v4.filter(|_| conf.snat() != Snat::Never) else { return Ok(Vec::new()) };
    let name = interface_to(cx, addr)?.filter(ours);
    Ok(name.into_iter().map(|name| format!("net/ipv4/conf/{name}/route_localnet")).collect())
}
