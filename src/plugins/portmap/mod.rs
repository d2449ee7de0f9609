//! portmap: maps ports of the host to a container. A chained plugin: it returns `prevResult`, from
//! which it takes the container's addresses.
//!
//! Keys: `backend`, `snat`, `masqAll`, `markMasqBit`, `externalSetMarkChain`, `conditionsV4`,
//! `conditionsV6`, `allowFrom`; the ports come with the capability `portMappings`. Only packets to
//! an address of the host itself are translated.
//!
//! State on the host while the container lives: elements of the table `inet cnibox_portmap`, or a
//! chain `CNI-DN-..` of iptables. Permanently: the empty table or the chains `CNI-HOSTPORT-..`, and
//! `route_localnet` of the interface towards the container.

mod conf;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipnet::IpNet;

pub use self::conf::PortmapConfig;
use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, GcRequest, Plugin, Rollback,
    port_owner, require_prev_result,
};
use crate::netfilter::ports::conditions::MappingConditions;
use crate::netfilter::ports::{
    self, MappedPort, PortmapPart, RECORDS, SourceTranslation, TakenPort, flows,
};
use crate::netfilter::reconcile::check_attachment;
use crate::netfilter::{
    AttachmentId, IpFamily, PacketFilter, PacketFilterWatch, RuleBackend, localhost,
};
use crate::repairs::RepairFindings;
use crate::sysctl;
use cni::error::{Error, ErrorContext, Result};
use cni::{CniResult, IpConfig};

/// How long ADD waits for a port of another container.
const TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Portmap;

impl Plugin for Portmap {
    const NAME: &'static str = "portmap";
    const ABOUT: &'static str = "maps ports of the host to the container";
    const OUTLIVES_ITS_CONTAINER: bool = true;
    const REPAIRS: bool = true;
    type Conf = PortmapConfig;

    fn examine(
        cx: &CallContext<'_>,
        conf: &PortmapConfig,
        remarks: &mut ConfigRemarks,
    ) -> Result<()> {
        if !cx.net.wants_capability("portMappings") {
            let msg = "no port is mapped: the capability is not enabled";
            let remedy = "add \"capabilities\": {\"portMappings\": true}";
            remarks.warnings.push(Error::config(msg).with_details(remedy));
        }
        let backend = conf.configured_backend()?;
        remarks.warnings.extend(backend.and_then(|backend| conf.ineffective_key(backend)));
        Ok(())
    }

    fn add(cx: &CallContext<'_>, conf: &PortmapConfig, req: &AddRequest) -> Result<CniResult> {
        let filter = cx.packet_filter();
        let parse = || conf.configured_backend().and_then(|_| conf.parse_mappings());
        let mappings = parse().context(|| "failed to parse config")?;
        let prev = require_prev_result(req.prev.as_ref(), "must be called as chained plugin")?;
        if mappings.is_empty() {
            // Missing mappings of other containers are restored nevertheless.
            cx.require_serviceable(None, &[ports::FEATURE, localhost::FEATURE])?;
            return Ok(prev.clone());
        }
        let backend = conf.choose_backend(filter).context(|| "failed to parse config")?;
        conf.ineffective_key(backend).iter().for_each(|warning| warn!("{warning}"));
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let mut forward =
            build_forwarding(conf, backend, mappings, mapped_addresses(conf, prev, owner.ifname)?)?;
        let mut undo = Rollback::new();
        let localnet = localnet_keys(cx, conf, &forward.targets, prev)?;
        forward.localnet = !localnet.is_empty();
        open_localhost(filter, &localnet)?;
        cx.record_with_part(Self::NAME, req, prev, (RECORDS, &forward), &mut undo);
        undo.add_step("remove the record of the mappings", || RECORDS.remove_part(owner));
        // The mappings may exist although the kernel's reply was lost.
        let mut unmap = Rollback::new();
        unmap.add_step("delete the mappings", || ports::delete_mappings(filter, owner, None));
        let taken = create_mappings(filter, owner, &forward)?;
        unmap.commit();
        if let Some(taken) = taken {
            return Err(taken.into());
        }
        flows::delete_flows_to_other_targets(&forward, cx.host_netlink()?);
        undo.commit();
        Ok(prev.clone())
    }

    fn check(cx: &CallContext<'_>, conf: &PortmapConfig, req: &CheckRequest) -> Result<()> {
        let filter = cx.packet_filter();
        let (configured, mappings) = (conf.configured_backend()?, conf.parse_mappings()?);
        let prev = req.require_final_result()?;
        if mappings.is_empty() {
            return Ok(());
        }
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let targets = mapped_addresses(conf, prev, owner.ifname)?;
        RuleBackend::check_rules(configured, filter, &ports::FEATURE, owner, &|backend| {
            conf.require_keys_of(backend)?;
            let forward = build_forwarding(conf, backend, mappings.clone(), targets.clone())?;
            check_attachment(filter, &ports::FEATURE, owner, &forward)
        })?;
        for key in localnet_keys(cx, conf, &targets, prev)? {
            if sysctl::read_value(&key)? != "1" {
                return Err(Error::internal(format!("sysctl {key} is not 1"))
                    .with_details(format!("sysctl -w {key}=1")));
            }
        }
        localhost::require_closed(filter)
    }

    fn repair(
        cx: &CallContext<'_>,
        conf: &PortmapConfig,
        req: &CheckRequest,
        repairs: &mut RepairFindings,
    ) -> Result<()> {
        conf.configured_backend()?;
        if conf.parse_mappings()?.is_empty() {
            return Ok(());
        }
        let prev = req.require_final_result()?;
        // A bridge that was created again has default parameters.
        let targets = mapped_addresses(conf, prev, req.ifname.as_str())?;
        for key in localnet_keys(cx, conf, &targets, prev)? {
            if repairs.is_first_examination(&key) && sysctl::read_value(&key)? != "1" {
                let what = format!("sysctl {key}");
                repairs.restore_missing(what, || open_localhost(cx.packet_filter(), &[key]));
            }
        }
        Ok(())
    }

    fn del(cx: &CallContext<'_>, conf: &PortmapConfig, req: &DelRequest) -> Result<()> {
        let filter = cx.packet_filter();
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let targets = req.prev.as_ref().map(|prev| first_addresses(prev, owner.ifname));
        let forward = PortmapPart {
            backend: RuleBackend::Iptables,
            mappings: conf.valid_mappings(),
            targets: targets.unwrap_or_default(),
            snat: conf.source_translation(),
            conditions: MappingConditions::default(),
            options: conf.iptables_options().ok(),
            localnet: false,
        };
        ports::delete_mappings(filter, owner, Some(&forward))
    }

    fn gc(cx: &CallContext<'_>, _: &PortmapConfig, req: &GcRequest) -> Result<()> {
        let valid = AttachmentId::from_attachments(&cx.net.name, &req.valid);
        ports::remove_stale_mappings(cx.packet_filter(), cx.net.name.as_str(), &valid)
    }

    fn status(cx: &CallContext<'_>, conf: &PortmapConfig) -> Result<()> {
        let filter = cx.packet_filter();
        let backend = conf.choose_backend(filter).or_unavailable()?;
        cx.require_serviceable(Some(backend), &[ports::FEATURE])?;
        cx.require_serviceable(None, &[localhost::FEATURE])?;
        cx.usable_host_netlink().map(drop)
    }
}

fn build_forwarding(
    conf: &PortmapConfig,
    backend: RuleBackend,
    mappings: Vec<MappedPort>,
    targets: Vec<IpNet>,
) -> Result<PortmapPart> {
    Ok(PortmapPart {
        backend,
        mappings,
        targets,
        snat: conf.source_translation(),
        conditions: conf.nftables_conditions(backend)?,
        options: (backend == RuleBackend::Iptables).then(|| conf.iptables_options()).transpose()?,
        localnet: false,
    })
}

/// Creates the mappings. A port of a container that is gone is reclaimed. For a port of a container
/// that may be alive, ADD waits: the container may be about to be deleted, as when a pod is
/// replaced by force. Returns a port that another container keeps.
fn create_mappings(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    forward: &PortmapPart,
) -> Result<Option<TakenPort>> {
    for by in ports::list_rule_owners(filter, owner, forward)? {
        port_owner::remove_port_owner_if_ended(filter, &by)?;
    }
    let until = Instant::now() + TIMEOUT;
    let mut watch: Option<PacketFilterWatch> = None;
    while let Some(taken) = ports::add_mappings(filter, owner, forward)? {
        if Instant::now() < until && port_owner::remove_port_owner_if_ended(filter, &taken.by)? {
            continue;
        }
        match &watch {
            // Retries once, because the watch does not report earlier changes.
            None => watch = Some(PacketFilterWatch::open(filter)),
            Some(watch) if watch.wait_for_change(until) => {}
            Some(_) => return Ok(Some(taken)),
        }
    }
    Ok(None)
}

/// The addresses to which ports are mapped: the first of each family that an allowed client has.
fn mapped_addresses(conf: &PortmapConfig, prev: &CniResult, ifname: &str) -> Result<Vec<IpNet>> {
    let mut targets = first_addresses(prev, ifname);
    if let Some(clients) = conf.allowed_clients()? {
        let family = |net: &IpNet| IpFamily::of_address(net.addr());
        targets.retain(|target| clients.iter().any(|net| family(net) == family(target)));
    }
    Ok(targets)
}

/// The container's first address of each family.
fn first_addresses(prev: &CniResult, ifname: &str) -> Vec<IpNet> {
    IpFamily::BOTH
        .into_iter()
        .filter_map(|family| {
            let mine = |ip: &&IpConfig| {
                IpFamily::of_address(ip.address.addr()) == family
                    && is_of_interface(ip, prev, ifname)
            };
            prev.ips.iter().find(mine).map(|ip| ip.address)
        })
        .collect()
}

/// Whether the address may be of this interface of the container. An address without an interface
/// index may be of any.
fn is_of_interface(ip: &IpConfig, prev: &CniResult, ifname: &str) -> bool {
    let index = ip.interface.and_then(|index| usize::try_from(index).ok());
    match index.and_then(|index| prev.interfaces.get(index)) {
        Some(interface) => interface.name == ifname && !interface.sandbox.is_empty(),
        None => true,
    }
}

/// The host's outgoing interface for packets to `addr`.
fn find_outgoing_interface(cx: &CallContext<'_>, addr: IpAddr) -> Result<Option<String>> {
    let host = cx.host_netlink()?;
    let Some(index) = host.find_route_to(addr, None)?.and_then(|route| route.oif) else {
        return Ok(None);
    };
    Ok(host.find_link_by_index(index)?.map(|link| link.name))
}

/// Permits connections from 127.0.0.1 of the host to containers, but not from containers to
/// 127.0.0.0/8 of the host. The parameters are never reset, because other containers of the
/// interface depend on them.
fn open_localhost(filter: &PacketFilter, keys: &[String]) -> Result<()> {
    if !keys.is_empty() {
        localhost::close_to_containers(filter)?;
    }
    for key in keys {
        sysctl::ensure_value(key, "1").context(|| "unable to enable route_localnet")?;
    }
    Ok(())
}

/// The kernel parameters that permit connections from 127.0.0.1 of the host to the container: of
/// the interface towards the container, if the result lists this interface. Results before 0.3.0
/// have no interfaces.
fn localnet_keys(
    cx: &CallContext<'_>,
    conf: &PortmapConfig,
    targets: &[IpNet],
    prev: &CniResult,
) -> Result<Vec<String>> {
    let is_listed = |name: &String| {
        let mut on_host = prev.interfaces.iter().filter(|i| i.sandbox.is_empty());
        prev.interfaces.is_empty() || on_host.any(|i| i.name == *name)
    };
    let v4 = targets.iter().map(IpNet::addr).find(IpAddr::is_ipv4);
    let Some(addr) = v4.filter(|_| conf.source_translation() != SourceTranslation::Never) else {
        return Ok(Vec::new());
    };
    let name = find_outgoing_interface(cx, addr)?.filter(is_listed);
    Ok(name.into_iter().map(|name| format!("net/ipv4/conf/{name}/route_localnet")).collect())
}
