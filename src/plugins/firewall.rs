//! firewall: accepts forwarded traffic of the container, and isolates bridges.
//!
//! A chained plugin, behind an interface plugin: it returns `prevResult`, from which it takes the addresses. Keys:
//! `backend` (`nftables`, `iptables`, `firewalld`; default: firewalld if it runs, else iptables if it works, else
//! nftables), `ingressPolicy` (`open`, `same-bridge`, `isolated`), `iptablesAdminChainName`,
//! `firewalldZone`.
//!
//! State on the host while the container lives: its addresses in the chosen back end (`netfilter/filter/`). Permanently:
//! the back end's tables or chains; and the policy of its bridge until a GC finds it without use.

use std::collections::HashSet;
use std::net::IpAddr;
use std::slice;

use serde::Deserialize;

use crate::cni::{CniResult, SpecVersion};
use crate::error::{Context, Error, Result};
use crate::log;
use crate::netfilter::Backend::{self, Iptables, Nftables};
use crate::netfilter::filter::firewalld::{self, Zone};
use crate::netfilter::filter::{self, DEFAULT_ADMIN, KEPT, Pod, Policy};
use crate::netfilter::iptables::table;
use crate::netfilter::{Owner, PacketFilter, Repair, layout};
use crate::skel::{
    AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Remarks, Rollback, require_prev,
};

const ADMIN_REMEDY: &str = "add the rules to the chain admin, as in: \
    nft add rule inet cnibox_firewall admin ip daddr 192.0.2.1 reject";

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

    /// Keys that the back end does not have, each with its remedy. `backend` is a value of the key `backend`.
    fn without_effect(&self, backend: &str) -> Vec<Error> {
        let mut unused = Vec::new();
        let mut report = |key, remedy| {
            let msg = format!("\"{key}\" has no effect with the back end {backend}");
            unused.push(Error::config(msg).with_details(remedy));
        };
        if !self.iptables_admin_chain_name.is_empty() && backend == "nftables" {
            report("iptablesAdminChainName", ADMIN_REMEDY);
        } else if !self.iptables_admin_chain_name.is_empty() && backend == "firewalld" {
            report("iptablesAdminChainName", "choose the back end \"iptables\", or remove the key");
        }
        if !self.firewalld_zone.is_empty() && ["nftables", "iptables"].contains(&backend) {
            report("firewalldZone", "choose the back end \"firewalld\", or remove the key");
        }
        unused
    }

    fn admin(&self) -> &str {
        let name = self.iptables_admin_chain_name.as_str();
        if name.is_empty() { DEFAULT_ADMIN } else { name }
    }
}

impl Plugin for Firewall {
    const NAME: &'static str = "firewall";
    const ABOUT: &'static str = "accepts the container's traffic and isolates bridges";
    const VERSIONS: &'static [SpecVersion] = SpecVersion::ALL.split_at(4).1;
    const OUTLIVES_ITS_CONTAINER: bool = true;
    type Conf = Conf;

    fn examine(_: &Cx<'_>, conf: &Conf, remarks: &mut Remarks) -> Result<()> {
        remarks.warnings.extend(conf.without_effect(&conf.backend));
        conf.policy().map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let policy = conf.policy()?;
        let prev = require_prev(req.prev.as_ref(), "missing prevResult from earlier plugin")?;
        let bridge = bridge(prev, policy)?;
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let filter = cx.filter();
        let Backends { mut zone, kernel } =
            Backends::choose(conf, policy, || Backend::choose(None, filter))?;
        let chosen = match kernel {
            _ if zone.is_some() => "firewalld",
            Some(Nftables) => "nftables",
            _ => "iptables",
        };
        conf.without_effect(chosen).iter().for_each(log::warn);
        let admin = zone.is_none().then(|| conf.admin());
        let (ips, ports) = (ips(prev), ports(prev));
        let mut undo = Rollback::new();
        cx.note(Self::NAME, req, prev, &mut undo);
        undo.push("delete the rules", || filter::del(filter, owner, &ips, Some(&ports)));
        if let Some(zone) = &mut zone {
            zone.add(owner, &ips)?;
            undo.push("remove the addresses from the zone", || zone.del(owner, &ips));
        }
        if let Some(backend) = kernel {
            filter::add(filter, owner, &pod(backend, prev, policy, bridge, admin))?;
        }
        undo.commit();
        Ok(prev.clone())
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let policy = conf.policy()?;
        let prev = require_prev(req.prev.as_ref(), "missing prevResult from earlier plugin")?;
        let bridge = bridge(prev, policy)?;
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let filter = cx.filter();
        // The back ends that have rules; if unknown, those that ADD would choose.
        let is_chosen = ["nftables", "iptables", "firewalld"].contains(&conf.backend.as_str());
        let has_rules = || filter::is_on_nft(filter, owner, &ips(prev)).unwrap_or(false);
        let Backends { mut zone, kernel } = if !is_chosen && has_rules() {
            Backends { zone: None, kernel: Some(Nftables) }
        } else {
            Backends::choose(conf, policy, || Backend::usual(filter))?
        };
        if let Some(zone) = &mut zone {
            zone.check(owner, &ips(prev))?;
        }
        let Some(backend) = kernel else { return Ok(()) };
        let admin = zone.is_none().then(|| conf.admin());
        Backend::verify(Some(backend), filter, KEPT, owner, &|backend| {
            filter::check(filter, owner, &pod(backend, prev, policy, bridge, admin))
        })
    }

    /// Deletes the rules in all back ends: the node's back end may have changed since ADD.
    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let nothing = CniResult::new();
        let prev = req.prev.as_ref().unwrap_or(&nothing);
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let ips = ips(prev);
        let mut failures = Failures::new();
        failures.keep(filter::del(cx.filter(), owner, &ips, Some(&ports(prev))));
        let is_without_firewalld = ["nftables", "iptables"].contains(&conf.backend.as_str());
        if (!is_without_firewalld || firewalld::has(owner))
            && let Some(mut zone) = Zone::find(conf.zone())
        {
            failures.keep(zone.del(owner, &ips));
        }
        failures.into_result()
    }

    fn gc(cx: &Cx<'_>, _: &Conf, req: &GcReq) -> Result<()> {
        let (network, valid) = (cx.net.name.as_str(), Owner::each(&cx.net.name, &req.valid));
        let mut failures = Failures::new();
        failures.keep(filter::gc(cx.filter(), network, &valid));
        failures.keep(firewalld::gc(network, &valid));
        failures.into_result()
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        Self::require_sound(cx, conf)?;
        let filter = cx.filter();
        // A policy adds no requirement.
        Backends::choose(conf, Policy::Open, || Backend::choose(None, filter))
            .and_then(|backends| backends.require_usable(filter))
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
            layout::refuse(firewalld::heal(Repair::Report))?;
        }
        self.kernel.map_or(Ok(()), |kernel| kernel.require_usable(filter))?;
        layout::refuse(filter::damage(filter)?)
    }
}

/// The traffic to accept. Beside firewalld there is no `admin` chain.
fn pod(
    backend: Backend,
    prev: &CniResult,
    policy: Policy,
    bridge: Option<&str>,
    admin: Option<&str>,
) -> Pod {
    let (bridge, admin) = (bridge.map(str::to_owned), admin.map(str::to_owned));
    Pod { backend, ips: ips(prev), ports: ports(prev), policy, bridge, admin, published: true }
}

/// The addresses of the result, of all interfaces, without duplicates.
fn ips(prev: &CniResult) -> Vec<IpAddr> {
    let mut known = HashSet::new();
    let ips = prev.ips.iter().map(|ip| ip.address.addr());
    ips.filter(|ip| known.insert(*ip)).collect()
}

/// The ports of the bridge. The result lists the bridge first, then its ports, then the container's interface, then
/// interfaces of later plugins.
fn ports(prev: &CniResult) -> Vec<String> {
    let on_host = prev.interfaces.iter().take_while(|interface| interface.sandbox.is_empty());
    let ports = on_host.skip(1).map(|interface| interface.name.clone());
    ports.filter(|name| !name.is_empty()).collect()
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
