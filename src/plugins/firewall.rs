//! firewall: accepts forwarded traffic of the container, and isolates bridges.
//!
//! A chained plugin, behind an interface plugin: it returns `prevResult`, from which it takes the addresses. Keys:
//! `backend` (`nftables`, `iptables`, `firewalld`; default: firewalld if it runs, else iptables if it works and can print
//! its tables, else nftables), `ingressPolicy` (`open`, `same-bridge`, `isolated`), `iptablesAdminChainName`,
//! `firewalldZone`.
//!
//! State on the host while the container lives: its addresses in the chosen back end (`netfilter/filter/`). Permanently:
//! the back end's tables or chains; and the policy of its bridge until a GC without valid attachments of the network.

use std::slice;

use serde::Deserialize;

use crate::cni::{CniResult, SpecVersion};
use crate::error::{Context, Error, Result};
use crate::log;
use crate::netfilter::backend::Backend::{self, Iptables, Nftables};
use crate::netfilter::backend::PacketFilter;
use crate::netfilter::filter::firewalld::Zone;
use crate::netfilter::filter::iptables::Wanted;
use crate::netfilter::filter::{self, Ingress, Pod, Policy, firewalld, iptables};
use crate::netfilter::iptables::table;
use crate::netfilter::layout;
use crate::netfilter::names::Owner;
use crate::skel::{
    AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Remarks, Rollback, require_prev,
};

/// The plugin.
#[derive(Debug)]
pub struct Firewall;

/// The keys of the plugin.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    /// `nftables`, `iptables` or `firewalld`. Default: firewalld if it runs, else [`Backend::choose`].
    backend: String,
    /// The chain for an administrator's own rules. Default: `CNI-ADMIN`.
    iptables_admin_chain_name: String,
    /// The zone of firewalld. Default: `trusted`.
    firewalld_zone: String,
    /// `open`, `same-bridge` or `isolated`. Default: `open`.
    ingress_policy: String,
}

impl Conf {
    fn zone(&self) -> &str {
        if self.firewalld_zone.is_empty() { firewalld::DEFAULT_ZONE } else { &self.firewalld_zone }
    }

    /// The policy, after validation of the names that are passed to the back ends.
    fn policy(&self) -> Result<Policy> {
        if !self.iptables_admin_chain_name.is_empty() {
            table::require_chain("iptablesAdminChainName", &self.iptables_admin_chain_name)?;
        }
        table::require_words("firewalldZone", slice::from_ref(&self.firewalld_zone))?;
        Policy::parse(&self.ingress_policy)
    }

    fn admin(&self) -> &str {
        let name = self.iptables_admin_chain_name.as_str();
        if name.is_empty() { iptables::DEFAULT_ADMIN } else { name }
    }
}

impl Plugin for Firewall {
    const NAME: &'static str = "firewall";
    const ABOUT: &'static str = "accepts the container's traffic and isolates bridges";
    const VERSIONS: &'static [SpecVersion] = SpecVersion::ALL.split_at(4).1;
    const OUTLIVES_ITS_CONTAINER: bool = true;
    type Conf = Conf;

    fn examine(_: &Cx<'_>, conf: &Conf, _: &mut Remarks) -> Result<()> {
        conf.policy().map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let policy = conf.policy()?;
        let prev = require_prev(req.prev.as_ref(), "missing prevResult from earlier plugin")?;
        let ingress = Ingress { policy, bridge: bridge(prev, policy)? };
        let pod = pod(Owner::new(&cx.net.name, &req.id, &req.ifname), prev);
        let filter = PacketFilter::new();
        let Backends { mut zone, kernel } =
            Backends::choose(conf, policy, || Backend::choose(None, &filter))?;
        let is_beside_firewalld = zone.is_some();
        let mut undo = Rollback::new();
        cx.note(Self::NAME, req, prev, &mut undo);
        undo.push("delete the rules", || del_rules(&filter, &pod));
        if let Some(zone) = &mut zone {
            zone.add(&pod)?;
            undo.push("remove the addresses from the zone", || zone.del(&pod));
        }
        match kernel {
            Some(Nftables) if is_beside_firewalld => {
                filter::nft::add_policy(filter.nft()?, &pod, ingress)?;
            }
            Some(Nftables) => filter::nft::add(filter.nft()?, &pod, ingress)?,
            Some(Iptables) => {
                let admin = (!is_beside_firewalld).then(|| conf.admin());
                iptables::add(&filter, Wanted { pod: &pod, ingress, admin })?;
            }
            None => {}
        }
        undo.commit();
        Ok(prev.clone())
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let policy = conf.policy()?;
        let prev = require_prev(req.prev.as_ref(), "missing prevResult from earlier plugin")?;
        let ingress = Ingress { policy, bridge: bridge(prev, policy)? };
        let pod = pod(Owner::new(&cx.net.name, &req.id, &req.ifname), prev);
        let filter = PacketFilter::new();
        // The back ends that have rules; if unknown, those that ADD would choose.
        let is_chosen = ["nftables", "iptables", "firewalld"].contains(&conf.backend.as_str());
        let has_rules =
            || filter.nft().and_then(|nft| filter::nft::has(nft, &pod)).unwrap_or(false);
        let Backends { mut zone, kernel } = if !is_chosen && has_rules() {
            Backends { zone: None, kernel: Some(Nftables) }
        } else {
            Backends::choose(conf, policy, || Backend::of(None, &filter, filter::KEPT, pod.owner))?
        };
        if let Some(zone) = &mut zone {
            zone.check(&pod)?;
        }
        match kernel {
            Some(Nftables) if zone.is_some() => {
                filter::nft::check_policy(filter.nft()?, &pod, ingress)
            }
            Some(Nftables) => filter::nft::check(filter.nft()?, &pod, ingress),
            Some(Iptables) => {
                let admin = zone.is_none().then(|| conf.admin());
                iptables::check(&filter, Wanted { pod: &pod, ingress, admin })
            }
            None => Ok(()),
        }
    }

    /// Deletes the rules in all back ends: the node's back end may have changed since ADD.
    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let nothing = CniResult::new();
        let prev = req.prev.as_ref().unwrap_or(&nothing);
        let pod = pod(Owner::new(&cx.net.name, &req.id, &req.ifname), prev);
        let filter = PacketFilter::new();
        let mut failures = Failures::new();
        failures.keep(del_rules(&filter, &pod));
        let is_without_firewalld = ["nftables", "iptables"].contains(&conf.backend.as_str());
        if (!is_without_firewalld || firewalld::has(&pod))
            && let Some(mut zone) = Zone::find(conf.zone())
        {
            failures.keep(zone.del(&pod));
        }
        failures.into_result()
    }

    fn gc(cx: &Cx<'_>, conf: &Conf, req: &GcReq) -> Result<()> {
        let (network, valid) = (cx.net.name.as_str(), Owner::each(&cx.net.name, &req.valid));
        let filter = PacketFilter::new();
        let mut failures = Failures::new();
        failures.keep(iptables::gc(&filter, network, &valid));
        if firewalld::has_stale(network, &valid)
            && let Some(mut zone) = Zone::find(conf.zone())
        {
            failures.keep(zone.gc(network, &valid));
        }
        if let Some(nft) = failures.keep(filter.nft_if_present()).flatten() {
            failures.keep(filter::nft::gc(nft, network, &valid));
        }
        failures.into_result()
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        Self::require_sound(cx, conf)?;
        let filter = PacketFilter::new();
        // A policy adds no requirement.
        Backends::choose(conf, Policy::Open, || Backend::choose(None, &filter))
            .and_then(|backends| backends.require_usable(&filter))
            .or_unavailable()
    }
}

/// The back ends of an attachment's rules.
struct Backends<'a> {
    /// firewalld, over D-Bus.
    zone: Option<Zone<'a>>,
    /// `nf_tables` or iptables; beside firewalld only for a policy, which firewalld does not support.
    kernel: Option<Backend>,
}

impl<'a> Backends<'a> {
    /// The configured back end; by default firewalld if it runs, else `default`. As in the reference an unknown name is
    /// ignored.
    fn choose(
        conf: &'a Conf,
        policy: Policy,
        default: impl FnOnce() -> Backend,
    ) -> Result<Backends<'a>> {
        let zone = match conf.backend.as_str() {
            "nftables" => return Ok(Backends { zone: None, kernel: Some(Nftables) }),
            "iptables" => return Ok(Backends { zone: None, kernel: Some(Iptables) }),
            "firewalld" => Some(Zone::open(conf.zone())?),
            other => {
                if !["", "auto"].contains(&other) {
                    log::warn(format_args!(
                        "firewall: unknown backend \"{other}\" is ignored; choose nftables, iptables or firewalld"
                    ));
                }
                Zone::find(conf.zone())
            }
        };
        let kernel = (zone.is_none() || policy != Policy::Open).then(default);
        Ok(Backends { zone, kernel })
    }

    /// For STATUS: fails if a back end does not work.
    fn require_usable(self, filter: &PacketFilter) -> Result<()> {
        if let Some(mut zone) = self.zone {
            zone.status()?;
            layout::refuse(zone.damage())?;
        }
        self.kernel.map_or(Ok(()), |kernel| kernel.require_usable(filter))?;
        // Ports are isolated in `nf_tables` with every back end.
        let nft = filter.nft_if_present()?;
        layout::refuse(nft.map(filter::nft::damage).transpose()?.flatten())?;
        layout::refuse(iptables::RECORDS.damage()?)
    }
}

/// Deletes the rules and their records in iptables and `nf_tables`.
fn del_rules(filter: &PacketFilter, pod: &Pod<'_>) -> Result<()> {
    let mut failures = Failures::new();
    failures.keep(iptables::del(filter, pod));
    if let Some(nft) = failures.keep(filter.nft_if_present()).flatten() {
        failures.keep(filter::nft::del(nft, pod));
    }
    failures.into_result()
}

/// The addresses of the result, of all interfaces, and the ports of the bridge. The result lists the bridge first, then its
/// ports, then the container's interface, then interfaces of later plugins.
fn pod<'a>(owner: Owner<'a>, prev: &CniResult) -> Pod<'a> {
    let on_host = prev.interfaces.iter().take_while(|interface| interface.sandbox.is_empty());
    let ports = on_host.skip(1).map(|interface| interface.name.clone());
    Pod::new(owner, prev.ips.iter().map(|ip| ip.address.addr()))
        .with_ports(ports.filter(|name| !name.is_empty()))
}

/// The bridge: the first interface on the host. Optional with the policy `open`.
fn bridge(prev: &CniResult, policy: Policy) -> Result<Option<&str>> {
    let first = prev.interfaces.iter().find(|interface| interface.sandbox.is_empty());
    match first {
        Some(interface) if !interface.name.is_empty() => {
            if policy != Policy::Open {
                table::require_interface("prevResult", &interface.name)?;
            }
            Ok(Some(&interface.name))
        }
        _ if policy == Policy::Open => Ok(None),
        Some(_) => Err(Error::config("got empty bridge name")),
        None => Err(Error::config(format!(
            "interface needs to be set for ingress policy \"{}\", make sure to chain \"firewall\" plugin with \"bridge\"",
            policy.as_str()
        ))),
    }
}
