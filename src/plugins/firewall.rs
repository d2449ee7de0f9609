//! firewall: accepts forwarded traffic of the container, and isolates bridges.
//!
//! A chained plugin, behind an interface plugin: it returns `prevResult`, from which it takes the
//! addresses. Keys: `backend` (`nftables`, `iptables`, `firewalld`; default: firewalld if it runs,
//! else iptables if it works, else nftables), `ingressPolicy` (`open`, `same-bridge`, `isolated`),
//! `iptablesAdminChainName`, `firewalldZone`.
//!
//! State on the host while the container lives: its addresses in the chosen back end
//! (`netfilter/filter/`). Permanently: the back end's tables or chains; and the policy of its
//! bridge until a GC finds it without use.

use std::collections::HashSet;
use std::net::IpAddr;
use std::slice;

use serde::Deserialize;

use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, Failures, GcRequest, Plugin,
    Rollback, require_prev_result,
};
use crate::netfilter::AttachmentId;
use crate::netfilter::RuleBackend::{self, Iptables, Nftables};
use crate::netfilter::filter::firewalld::{self, FirewalldZone};
use crate::netfilter::filter::{self, DEFAULT_ADMIN, FirewallPart, IngressPolicy};
use crate::netfilter::iptables::table;
use crate::netfilter::reconcile::check_attachment;
use cni::error::{Error, ErrorContext, Result};
use cni::{CniResult, SpecVersion};

const ADMIN_REMEDY: &str = "add the rules to the chain admin, as in: nft add rule inet \
                            cnibox_firewall admin ip daddr 192.0.2.1 reject";

#[derive(Debug)]
pub struct Firewall;

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FirewallConfig {
    /// `nftables`, `iptables` or `firewalld`. Default: firewalld if it runs, else
    /// [`RuleBackend::default_backend`].
    backend: String,
    /// The chain for an administrator's own rules. Default: `CNI-ADMIN`.
    iptables_admin_chain_name: String,
    /// The zone of firewalld. Default: `trusted`.
    firewalld_zone: String,
    /// `open`, `same-bridge` or `isolated`. Default: `open`.
    ingress_policy: String,
}

impl FirewallConfig {
    fn zone_name(&self) -> &str {
        if self.firewalld_zone.is_empty() { firewalld::DEFAULT_ZONE } else { &self.firewalld_zone }
    }

    /// The policy, after validation of the names that are passed to the back ends.
    fn parse_policy(&self) -> Result<IngressPolicy> {
        if !self.iptables_admin_chain_name.is_empty() {
            table::require_chain_name("iptablesAdminChainName", &self.iptables_admin_chain_name)?;
        }
        table::require_words("firewalldZone", slice::from_ref(&self.firewalld_zone))?;
        IngressPolicy::parse(&self.ingress_policy)
    }

    /// Keys that the back end does not have, each with its remedy. `backend` is a value of the key
    /// `backend`.
    fn ineffective_keys(&self, backend: &str) -> Vec<Error> {
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

    fn admin_chain(&self) -> &str {
        let name = self.iptables_admin_chain_name.as_str();
        if name.is_empty() { DEFAULT_ADMIN } else { name }
    }
}

impl Plugin for Firewall {
    const NAME: &'static str = "firewall";
    const ABOUT: &'static str = "accepts the container's traffic and isolates bridges";
    const VERSIONS: &'static [SpecVersion] = SpecVersion::ALL.split_at(4).1;
    const OUTLIVES_ITS_CONTAINER: bool = true;
    type Conf = FirewallConfig;

    fn examine(
        _: &CallContext<'_>,
        conf: &FirewallConfig,
        remarks: &mut ConfigRemarks,
    ) -> Result<()> {
        remarks.warnings.extend(conf.ineffective_keys(&conf.backend));
        conf.parse_policy().map(drop)
    }

    fn add(cx: &CallContext<'_>, conf: &FirewallConfig, req: &AddRequest) -> Result<CniResult> {
        let policy = conf.parse_policy()?;
        let prev =
            require_prev_result(req.prev.as_ref(), "missing prevResult from earlier plugin")?;
        let bridge = find_bridge_name(prev, policy)?;
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let filter = cx.packet_filter();
        let FirewallBackends { mut zone, kernel } =
            FirewallBackends::from_config(conf, policy, || {
                RuleBackend::default_backend(filter, &filter::FEATURE)
            })?;
        let chosen = match kernel {
            _ if zone.is_some() => "firewalld",
            Some(Nftables) => "nftables",
            _ => "iptables",
        };
        conf.ineffective_keys(chosen).iter().for_each(|warning| warn!("{warning}"));
        let admin = zone.is_none().then(|| conf.admin_chain());
        let (ips, ports) = (result_addresses(prev), bridge_ports(prev));
        let mut undo = Rollback::new();
        cx.record_attachment(Self::NAME, req, prev, &mut undo);
        undo.add_step("delete the rules", || {
            filter::delete_rules(filter, owner, &ips, Some(&ports))
        });
        if let Some(zone) = &mut zone {
            zone.add_sources(owner, &ips)?;
            undo.add_step("remove the addresses from the zone", || {
                zone.delete_sources(owner, &ips)
            });
        }
        if let Some(backend) = kernel {
            let traffic = accepted_traffic(backend, prev, policy, bridge, admin);
            filter::add_rules(filter, owner, &traffic)?;
        }
        undo.commit();
        Ok(prev.clone())
    }

    fn check(cx: &CallContext<'_>, conf: &FirewallConfig, req: &CheckRequest) -> Result<()> {
        let policy = conf.parse_policy()?;
        let prev =
            require_prev_result(req.prev.as_ref(), "missing prevResult from earlier plugin")?;
        let bridge = find_bridge_name(prev, policy)?;
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let filter = cx.packet_filter();
        // The back ends that have rules; if unknown, those that ADD would choose.
        let is_chosen = ["nftables", "iptables", "firewalld"].contains(&conf.backend.as_str());
        let FirewallBackends { mut zone, kernel } = if !is_chosen
            && (filter::has_nft_elements(filter, owner, &result_addresses(prev)).unwrap_or(false))
        {
            FirewallBackends { zone: None, kernel: Some(Nftables) }
        } else {
            FirewallBackends::from_config(conf, policy, || {
                RuleBackend::default_backend(filter, &filter::FEATURE)
            })?
        };
        if let Some(zone) = &mut zone {
            zone.check_sources(owner, &result_addresses(prev))?;
        }
        let Some(backend) = kernel else { return Ok(()) };
        let admin = zone.is_none().then(|| conf.admin_chain());
        RuleBackend::check_rules(Some(backend), filter, &filter::FEATURE, owner, &|backend| {
            let traffic = accepted_traffic(backend, prev, policy, bridge, admin);
            check_attachment(filter, &filter::FEATURE, owner, &traffic)
        })
    }

    /// Deletes the rules in all back ends: the node's back end may have changed since ADD.
    fn del(cx: &CallContext<'_>, conf: &FirewallConfig, req: &DelRequest) -> Result<()> {
        let nothing = CniResult::new();
        let prev = req.prev.as_ref().unwrap_or(&nothing);
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let ips = result_addresses(prev);
        let mut failures = Failures::new();
        let ports = bridge_ports(prev);
        let deleted = filter::delete_rules(cx.packet_filter(), owner, &ips, Some(&ports));
        failures.keep_error(deleted);
        let is_without_firewalld = ["nftables", "iptables"].contains(&conf.backend.as_str());
        if (!is_without_firewalld || firewalld::has_record(owner))
            && let Some(mut zone) = FirewalldZone::find_running(conf.zone_name())
        {
            failures.keep_error(zone.delete_sources(owner, &ips));
        }
        failures.into_result()
    }

    fn gc(cx: &CallContext<'_>, _: &FirewallConfig, req: &GcRequest) -> Result<()> {
        let (network, valid) =
            (cx.net.name.as_str(), AttachmentId::from_attachments(&cx.net.name, &req.valid));
        let mut failures = Failures::new();
        failures.keep_error(filter::remove_stale_rules(cx.packet_filter(), network, &valid));
        failures.keep_error(firewalld::remove_stale_sources(network, &valid));
        failures.into_result()
    }

    fn status(cx: &CallContext<'_>, conf: &FirewallConfig) -> Result<()> {
        Self::require_sound(cx, conf)?;
        let filter = cx.packet_filter();
        // A policy adds no requirement.
        FirewallBackends::from_config(conf, IngressPolicy::Open, || {
            RuleBackend::default_backend(filter, &filter::FEATURE)
        })
        .and_then(|backends| backends.require_usable(cx))
        .or_unavailable()
    }
}

/// The back ends of an attachment's rules.
struct FirewallBackends<'a> {
    /// firewalld, over D-Bus.
    zone: Option<FirewalldZone<'a>>,
    /// `nf_tables` or iptables; beside firewalld only for a policy, which firewalld does not
    /// support.
    kernel: Option<RuleBackend>,
}

impl<'a> FirewallBackends<'a> {
    /// The configured back end; by default firewalld if it runs, else `default`. As in the
    /// reference an unknown name is ignored.
    fn from_config(
        conf: &'a FirewallConfig,
        policy: IngressPolicy,
        default: impl FnOnce() -> RuleBackend,
    ) -> Result<FirewallBackends<'a>> {
        let zone = match conf.backend.as_str() {
            "nftables" => return Ok(FirewallBackends { zone: None, kernel: Some(Nftables) }),
            "iptables" => return Ok(FirewallBackends { zone: None, kernel: Some(Iptables) }),
            "firewalld" => Some(FirewalldZone::open_zone(conf.zone_name())?),
            other => {
                if !["", "auto"].contains(&other) {
                    warn!(
                        "firewall: unknown backend \"{other}\" is ignored; choose nftables, \
                         iptables or firewalld"
                    );
                }
                FirewalldZone::find_running(conf.zone_name())
            }
        };
        let kernel = (zone.is_none() || policy != IngressPolicy::Open).then(default);
        Ok(FirewallBackends { zone, kernel })
    }

    /// For STATUS: fails if a back end does not work.
    fn require_usable(self, cx: &CallContext<'_>) -> Result<()> {
        if let Some(mut zone) = self.zone {
            zone.require_zone()?;
        }
        cx.require_serviceable(self.kernel, &[filter::FEATURE, firewalld::FEATURE])
    }
}

/// The traffic to accept. Beside firewalld there is no `admin` chain.
fn accepted_traffic(
    backend: RuleBackend,
    prev: &CniResult,
    policy: IngressPolicy,
    bridge: Option<&str>,
    admin: Option<&str>,
) -> FirewallPart {
    let (bridge, admin) = (bridge.map(str::to_owned), admin.map(str::to_owned));
    FirewallPart {
        backend,
        ips: result_addresses(prev),
        ports: bridge_ports(prev),
        policy,
        bridge,
        admin,
    }
}

/// The addresses of the result, of all interfaces, without duplicates.
fn result_addresses(prev: &CniResult) -> Vec<IpAddr> {
    let mut known = HashSet::new();
    let ips = prev.ips.iter().map(|ip| ip.address.addr());
    ips.filter(|ip| known.insert(*ip)).collect()
}

/// The ports of the bridge. The result lists the bridge first, then its ports, then the container's
/// interface, then interfaces of later plugins.
fn bridge_ports(prev: &CniResult) -> Vec<String> {
    let on_host = prev.interfaces.iter().take_while(|interface| interface.sandbox.is_empty());
    let ports = on_host.skip(1).map(|interface| interface.name.clone());
    ports.filter(|name| !name.is_empty()).collect()
}

/// The bridge: the first interface on the host. Optional with the policy `open`.
fn find_bridge_name(prev: &CniResult, policy: IngressPolicy) -> Result<Option<&str>> {
    let first = prev.interfaces.iter().find(|interface| interface.sandbox.is_empty());
    match first {
        Some(interface) if !interface.name.is_empty() => {
            if policy != IngressPolicy::Open {
                table::require_interface_name("prevResult", &interface.name)?;
            }
            Ok(Some(&interface.name))
        }
        _ if policy == IngressPolicy::Open => Ok(None),
        Some(_) => Err(Error::config("got empty bridge name")),
        None => Err(Error::config(format!(
            "interface needs to be set for ingress policy \"{}\", make sure to chain \"firewall\" \
             plugin with \"bridge\"",
            policy.as_str()
        ))),
    }
}
