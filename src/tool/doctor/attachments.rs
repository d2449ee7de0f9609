//! What is wrong with attachments: those of the runtimes' cache, their leases, and what dead containers left.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::Job;
use super::diagnosis::{AGAIN, Diagnosis};
use super::path::End;
use crate::attachment::{Liveness, Record};
use crate::cni::{SpecVersion, Version};
use crate::error::Result;
use crate::leases::{self, LeaseStatus, Listing};
use crate::runtime::{Attach, CachedAttachment, Json, NetworkList, PluginConf, Runtime};
use crate::sysctl;
use crate::tool::gc::Folders;

/// How what dead containers left is taken back.
const COLLECT: &str = "cnibox gc";

/// The attachments of the node.
pub(super) struct Attachments<'a> {
    folders: &'a Folders,
    runtime: &'a Runtime,
    all: Vec<Attached>,
}

/// An attachment in the cache.
struct Attached {
    cached: CachedAttachment,
    liveness: Liveness,
    /// The network as it was at ADD, if the cache tells.
    list: Option<NetworkList>,
    ips: Vec<IpAddr>,
    /// The result of ADD has an IPv4 default route.
    has_default: bool,
}

impl Attached {
    fn title(&self) -> String {
        title(&self.cached)
    }

    fn is_of(&self, network: &str, id: &str, ifname: &str) -> bool {
        let CachedAttachment { network: own, attach, .. } = &self.cached;
        own == network && attach.container_id == id && attach.ifname == ifname
    }

    fn is_gone(&self) -> bool {
        matches!(self.liveness, Liveness::Gone(_))
    }
}

impl<'a> Attachments<'a> {
    pub(super) fn read(folders: &'a Folders, runtime: &'a Runtime) -> Result<Attachments<'a>> {
        let attached = |cached: CachedAttachment| {
            let list = cached.list();
            let result =
                list.as_ref().and_then(|list| runtime.cached_result(list, &cached.attach).ok()?);
            let result = result.unwrap_or_default();
            let ips = result.ips.iter().map(|ip| ip.address.addr()).collect();
            let is_default = |dst: &IpNet| dst.addr().is_ipv4() && dst.prefix_len() == 0;
            let has_default = result.routes.iter().any(|route| is_default(&route.dst));
            Attached { liveness: folders.liveness(&cached), list, ips, has_default, cached }
        };
        let all = runtime.cached_attachments("")?.into_iter().map(attached).collect();
        Ok(Attachments { folders, runtime, all })
    }

    /// The networks that the attachments were made in.
    pub(super) fn networks(&self) -> impl Iterator<Item = &NetworkList> {
        self.all.iter().filter_map(|attached| attached.list.as_ref())
    }

    /// CHECK of those that may be alive, in so many parts; the others have to be collected.
    pub(super) fn checks(&self, parts: usize) -> Vec<Job<'_>> {
        let missing = Arc::new(self.missing_plugins());
        let mut jobs: Vec<Job<'_>> = Vec::new();
        for part in self.all.chunks(self.all.len().div_ceil(parts).max(1)) {
            let missing = Arc::clone(&missing);
            let check = move |attached| self.check(attached, &missing);
            jobs.push(Box::new(move || part.iter().filter_map(check).collect()));
        }
        jobs
    }

    /// What containers left that runtimes have no result of.
    pub(super) fn forgotten(&self) -> Vec<Diagnosis> {
        let mut found = Vec::new();
        for record in Record::all(None) {
            let Record { network, id, ifname, .. } = &record;
            if let Liveness::Gone(why) = record.liveness()
                && !self.all.iter().any(|attached| attached.is_of(network, id, ifname))
            {
                let problem = format!("left rules or devices: {why}");
                found.push(Diagnosis::warning(title_of(network, id, ifname), problem, COLLECT));
            }
        }
        found
    }

    fn check(&self, attached: &Attached, missing: &HashSet<&str>) -> Option<Diagnosis> {
        if let Liveness::Gone(why) = attached.liveness {
            let problem = format!("was not detached: {why}");
            return Some(Diagnosis::warning(attached.title(), problem, COLLECT));
        }
        let is_complete =
            |list: &NetworkList| plugin_names(list).all(|name| !missing.contains(name));
        let can_check = |list: &&NetworkList| knows_check(list) && is_complete(list);
        let list = attached.list.as_ref().filter(can_check)?;
        let error = self.runtime.check(list, &attached.cached.attach).err()?;
        let netns = &attached.cached.attach.netns;
        Some(Diagnosis::of_check(&attached.title(), netns, &error))
    }

    /// The plugins that are not there, each looked for once.
    fn missing_plugins(&self) -> HashSet<&str> {
        let Runtime { executor, plugin_dirs, .. } = self.runtime;
        let mut names: HashSet<&str> = self.networks().flat_map(plugin_names).collect();
        names.retain(|name| executor.find(name, plugin_dirs).is_err());
        names
    }

    /// Leases of the dead, addresses that two living containers have, and addresses without their lease.
    pub(super) fn leases(&self) -> Result<Vec<Diagnosis>> {
        let mut found = Vec::new();
        let mut owners: HashMap<IpAddr, String> = HashMap::new();
        for network in leases::networks(&self.folders.leases)? {
            let Some(listing) = Listing::open_existing(&self.folders.leases, &network)? else {
                continue;
            };
            let (mut dead, mut leased) = (0, HashSet::new());
            for LeaseStatus { lease, liveness, .. } in listing.statuses() {
                leased.insert((lease.ip, lease.id.clone()));
                if matches!(liveness, Liveness::Gone(_)) {
                    dead += 1;
                    continue;
                }
                let owner = title_of(&network, &lease.id, lease.ifname.as_deref().unwrap_or("?"));
                if let Some(other) = owners.insert(lease.ip, owner.clone()) {
                    let problem = format!("has {}, and so has {other}", lease.ip);
                    let cure =
                        "delete one of them, and give the networks subnets that do not overlap";
                    found.push(Diagnosis::error(owner, problem, cure));
                }
            }
            if dead > 0 {
                let problem = format!("addresses leased to containers that are gone: {dead}");
                found.push(Diagnosis::warning(format!("network {network}"), problem, COLLECT));
            }
            let is_here = |attached: &&Attached| attached.cached.network == network;
            for attached in self.living().filter(is_here).filter(|attached| has_leases(attached)) {
                let id = &attached.cached.attach.container_id;
                for ip in attached.ips.iter().filter(|ip| !leased.contains(&(**ip, id.clone()))) {
                    let problem = format!("{ip} is not leased to it: another container may get it");
                    found.push(Diagnosis::error(attached.title(), problem, AGAIN));
                }
            }
        }
        Ok(found)
    }

    /// The networks of living containers that the node is the gateway of, each once, with all their addresses.
    pub(super) fn routed(&self) -> Vec<(&NetworkList, Vec<IpAddr>)> {
        let mut networks: Vec<(&NetworkList, Vec<IpAddr>)> = Vec::new();
        for attached in self.living() {
            let Some(list) = attached.list.as_ref().filter(|list| is_routed(list)) else {
                continue;
            };
            match networks.iter_mut().find(|(known, _)| known.name == list.name) {
                Some((_, ips)) => ips.extend(&attached.ips),
                None => networks.push((list, attached.ips.clone())),
            }
        }
        networks
    }

    /// The interfaces in living containers.
    pub(super) fn ends(&self) -> Vec<End<'_>> {
        let end = |attached| {
            let Attached { cached, list, ips, has_default, .. }: &Attached = attached;
            let Attach { netns, ifname, .. } = &cached.attach;
            let is_routed = list.as_ref().is_some_and(is_routed);
            let (title, network) = (attached.title(), cached.network.as_str());
            End { title, network, netns, ifname, ips, is_routed, has_default: *has_default }
        };
        self.living().map(end).collect()
    }

    /// Forwarding that is off where the node is the gateway of a container.
    pub(super) fn forwarding(&self) -> Vec<Diagnosis> {
        let routed = self.routed().into_iter();
        let (v4, v6): (Vec<IpAddr>, Vec<IpAddr>) =
            routed.flat_map(|(_, ips)| ips).partition(IpAddr::is_ipv4);
        let keys = [(v4, "net/ipv4/ip_forward"), (v6, "net/ipv6/conf/all/forwarding")];
        let is_off = |(ips, key): &(Vec<IpAddr>, &str)| {
            !ips.is_empty() && sysctl::read(key).is_ok_and(|value| value == "0")
        };
        let diagnosis = |(_, key): (_, &str)| {
            let key = key.replace('/', ".");
            let problem = format!("{key} is 0: packets of containers are not forwarded");
            Diagnosis::error("node", problem, format!("sysctl -w {key}=1"))
        };
        keys.into_iter().filter(is_off).map(diagnosis).collect()
    }

    fn living(&self) -> impl Iterator<Item = &Attached> {
        self.all.iter().filter(|attached| !attached.is_gone())
    }
}

impl fmt::Display for Attachments<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = if self.all.len() == 1 { "" } else { "s" };
        write!(f, "{} attachment{s}", self.all.len())
    }
}

/// What a diagnosis of this attachment is about.
pub(in crate::tool) fn title(cached: &CachedAttachment) -> String {
    let CachedAttachment { network, attach, .. } = cached;
    title_of(network, &attach.container_id, &attach.ifname)
}

fn title_of(network: &str, id: &str, ifname: &str) -> String {
    format!("container {id}, interface {ifname} (network {network})")
}

/// The plugins of a network and of its addresses.
fn plugin_names(list: &NetworkList) -> impl Iterator<Item = &str> {
    let both = list.plugins.iter().flat_map(|plugin| [&plugin.plugin_type, &plugin.ipam_type]);
    both.map(String::as_str).filter(|name| !name.is_empty())
}

/// CHECK came with version 0.4.0.
fn knows_check(list: &NetworkList) -> bool {
    list.cni_version.parse::<Version>().is_ok_and(|version| version >= SpecVersion::V0_4_0.into())
}

/// All addresses are of host-local.
fn has_leases(attached: &Attached) -> bool {
    let mut ipam = attached.list.iter().flat_map(|list| &list.plugins).map(|p| &p.ipam_type);
    ipam.clone().any(|name| name == "host-local")
        && ipam.all(|name| name.is_empty() || name == "host-local")
}

/// The host is the gateway of its containers.
fn is_routed(list: &NetworkList) -> bool {
    let is_set =
        |plugin: &PluginConf, key| plugin.json().get_present(key) == Some(&Json::Bool(true));
    list.plugins.iter().any(|plugin| match plugin.plugin_type.as_str() {
        "ptp" => true,
        "bridge" => ["isGateway", "isDefaultGateway"].iter().any(|key| is_set(plugin, key)),
        _ => false,
    })
}
