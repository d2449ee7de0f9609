//! firewall: lets the host forward the traffic of the container, and keeps bridges apart.
//!
//! It stands behind an interface plugin in a list, takes the addresses from `prevResult`, and
//! passes that on unchanged. Keys: `backend` (`nftables`, `iptables`, `firewalld`; default: firewalld
//! if it runs, else iptables if it works and can print its tables, else nftables), `ingressPolicy`
//! (`open`, `same-bridge`, `isolated`), `iptablesAdminChainName`, `firewalldZone`.
//!
//! On the host it leaves, while the container lives, its addresses in the chosen back end
//! (`netfilter/filter/`); for good, the back end's tables or chains, and until GC finds no
//! attachment of the network any more, the policy of its bridge.

mod backend;

use std::collections::HashSet;
use std::net::IpAddr;
use std::slice;

use serde::Deserialize;

use self::backend::Backend;
use crate::cni::{CniResult, SpecVersion};
use crate::error::{Context, Error, Result};
use crate::netfilter::backend::Backend::Nftables;
use crate::netfilter::filter::firewalld::{self, Zone};
use crate::netfilter::filter::{self, DEFAULT_ADMIN, Pod, Policy};
use crate::netfilter::iptables::table;
use crate::netfilter::{Owner, PacketFilter};
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

    /// The policy, after a check of the names that become words of the back ends.
    fn policy(&self) -> Result<Policy> {
        if !self.iptables_admin_chain_name.is_empty() {
            table::require_chain("iptablesAdminChainName", &self.iptables_admin_chain_name)?;
        }
        table::require_words("firewalldZone", slice::from_ref(&self.firewalld_zone))?;
        Policy::parse(&self.ingress_policy)
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

    fn examine(_: &Cx<'_>, conf: &Conf, _: &mut Remarks) -> Result<()> {
        conf.policy().map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        conf.policy()?;
        let prev = require_prev(req.prev.as_ref(), "missing prevResult from earlier plugin")?;
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let pod = pod(conf, prev)?;
        let filter = PacketFilter::new();
        let backend = Backend::choose(conf, &filter)?;
        let mut undo = Rollback::new();
        cx.note(Self::NAME, req, prev, &mut undo);
        undo.push("remove the rules", || filter::del(&filter, owner, &pod.ips, Some(&pod.ports)));
        match backend {
            Backend::Kernel(backend) => {
                filter::add(&filter, owner, &Pod { backend, ..pod.clone() })?;
            }
            Backend::Firewalld(mut zone) => add_to_zone(&mut zone, &filter, owner, &pod)?,
        }
        undo.commit();
        Ok(prev.clone())
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        conf.policy()?;
        let prev = require_prev(req.prev.as_ref(), "missing prevResult from earlier plugin")?;
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let pod = pod(conf, prev)?;
        let filter = PacketFilter::new();
        match Backend::of(conf, &filter, owner, &pod.ips)? {
            Backend::Kernel(backend) => filter::check(&filter, owner, &Pod { backend, ..pod }),
            Backend::Firewalld(mut zone) => {
                zone.check(owner, &pod.ips)?;
                if pod.policy == Policy::Open {
                    return Ok(());
                }
                let backend = backend::kernel_of(&filter, owner);
                filter::check(&filter, owner, &Pod { backend, admin: None, ..pod })
            }
        }
    }

    /// Looks into every back end, wherever the rules are: the node may have switched.
    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let nothing = CniResult::new();
        let prev = req.prev.as_ref().unwrap_or(&nothing);
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let ips = ips(prev);
        let mut failures = Failures::new();
        failures.keep(filter::del(&PacketFilter::new(), owner, &ips, Some(&ports(prev))));
        if let Some(mut zone) = Backend::zone_to_clean(conf, firewalld::has(owner)) {
            failures.keep(zone.del(owner, &ips));
        }
        failures.into_result()
    }

    fn gc(cx: &Cx<'_>, _: &Conf, req: &GcReq) -> Result<()> {
        let (network, valid) = (cx.net.name.as_str(), Owner::each(&cx.net.name, &req.valid));
        let mut failures = Failures::new();
        failures.keep(filter::gc(&PacketFilter::new(), network, &valid));
        failures.keep(firewalld::gc(network, &valid));
        failures.into_result()
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        Self::require_sound(cx, conf)?;
        let filter = PacketFilter::new();
        Backend::choose(conf, &filter)
            .and_then(|backend| backend.require_usable(&filter))
            .or_unavailable()
    }
}

/// What ADD accepts, before a back end is chosen.
fn pod(conf: &Conf, prev: &CniResult) -> Result<Pod> {
    let policy = conf.policy()?;
    let (ips, ports) = (ips(prev), ports(prev));
    let bridge = bridge(prev, policy)?.map(str::to_owned);
    Ok(Pod { backend: Nftables, ips, ports, policy, bridge, admin: Some(conf.admin().to_owned()) })
}

/// The addresses of the result, whatever interface they belong to, each once.
fn ips(prev: &CniResult) -> Vec<IpAddr> {
    let mut known = HashSet::new();
    let ips = prev.ips.iter().map(|ip| ip.address.addr());
    ips.filter(|ip| known.insert(*ip)).collect()
}

/// The ports of the bridge: between the bridge, which is first, and the container's interface. What later plugins made
/// on the host comes after that.
fn ports(prev: &CniResult) -> Vec<String> {
    let on_host = prev.interfaces.iter().take_while(|interface| interface.sandbox.is_empty());
    let ports = on_host.skip(1).map(|interface| interface.name.clone());
    ports.filter(|name| !name.is_empty()).collect()
}

/// The first interface on the host, which bridge puts first. With the policy `open` there need
/// be none.
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

/// firewalld knows nothing of policies: they are made beside it.
fn add_to_zone(
    zone: &mut Zone<'_>,
    filter: &PacketFilter,
    owner: Owner<'_>,
    pod: &Pod,
) -> Result<()> {
    zone.add(owner, &pod.ips)?;
    let mut undo = Rollback::new();
    undo.push("take the addresses out of the zone", || zone.del(owner, &pod.ips));
    if pod.policy != Policy::Open {
        let backend = backend::kernel(filter);
        filter::add(filter, owner, &Pod { backend, admin: None, ..pod.clone() })?;
    }
    undo.commit();
    Ok(())
}
