//! A container with a policy, as its record has it.

use std::mem;
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::GROUPS;
use super::compile::{AllowedTraffic, ServiceRange, combine_services, flatten, merge_services};
use super::guard::{self, GuardPolicy};
use super::limits::PolicyLimits;
use super::named_address::NamedAddress;
use super::policy::{self, CompiledPolicy, EgressPolicy, PolicyScene, name_services};
use crate::netlink::MacAddress;
use crate::netlink::traffic::program::ProgramFilter;
use cni::error::{Error, Result};

/// The maximum number of different lists of services that the names of a container have. Each has
/// sets and rules of its own.
const MOST_SERVICE_LISTS: usize = 16;

/// A container with a policy: its part of the record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EgressPart {
    /// The host's end of the veth pair.
    pub end: String,
    /// The address of the container's end.
    pub mac: MacAddress,
    /// The interfaces by which packets of the container enter the host's stack: the host's end, or
    /// its bridge and the VLANs of the bridge.
    pub arrives_at: Vec<String>,
    /// Whether the host's end is a port of a bridge.
    pub is_bridged: bool,
    /// The address of the bridge, if it is the container's only router: other frames can only be
    /// for neighbours.
    pub bridge_mac: Option<MacAddress>,
    /// The networks of the container's addresses.
    pub on_link: Vec<IpNet>,
    /// The container's addresses, also those of the link.
    pub ips: Vec<IpAddr>,
    /// Those of its addresses to which routes of the host lead by these interfaces: answers to them
    /// do not leave the host.
    pub answered: Vec<IpAddr>,
    /// The routers of the container.
    pub routers: Vec<IpAddr>,
    /// The addresses of the host at the time of ADD.
    pub host: Vec<IpAddr>,
    /// The name servers of the container and of the host at the time of ADD.
    pub name_servers: Vec<IpAddr>,
    /// The veth links and bridges by which packets leave the host instead of reaching another
    /// container.
    pub uplinks: Vec<String>,
    /// Whether what the policies refuse passes, and is only noted.
    #[serde(skip_serializing_if = "is_false")]
    pub is_audited: bool,
    /// Whether what the policies refuse gets no answer.
    #[serde(skip_serializing_if = "is_false")]
    pub is_silent: bool,
    /// The services of published ports, as in [`EgressPolicy::serve`].
    pub published: Vec<String>,
    /// Limits beside those of the policies.
    #[serde(skip_serializing_if = "PolicyLimits::is_empty")]
    pub limits: PolicyLimits,
    /// All of these policies must allow a packet. The last one is of `policy_file`.
    pub policies: Vec<EgressPolicy>,
    /// The addresses of allowed names that are in force; the first is given up first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub named: Vec<NamedAddress>,
    /// The file that `CNI_ARGS` has named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy_file: Option<PathBuf>,
    /// The namespace and name of the pod; empty without one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// The policies of ADD, if `cnibox egress set` has replaced them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub added: Vec<EgressPolicy>,
    /// The ports of earlier ADDs of this attachment that differ from this one. Their elements and
    /// policies are deleted once this port is in force, or by DEL if the ADD is killed before.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub replaced: Vec<EgressPart>,
}

impl EgressPart {
    /// Notes the port that this one replaces, and those that the former one had not replaced yet.
    pub fn replaces(&mut self, former: &EgressPart) {
        let mut former = former.clone();
        let mut earlier = mem::take(&mut former.replaced);
        earlier.push(former);
        self.replaced.clear();
        earlier.retain(|port| port != self);
        self.replaced = earlier;
    }

    /// The addresses of the host at which the container asks the resolver of the node; link-local
    /// ones, which need the interface's name, only without others.
    pub fn resolvers(&self) -> Vec<IpAddr> {
        let own = self.routers.iter().filter(|router| self.host.contains(router)).copied();
        let (of_link, mut resolvers): (Vec<IpAddr>, Vec<IpAddr>) =
            own.partition(|ip| matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local()));
        if resolvers.is_empty() {
            resolvers = of_link;
        }
        resolvers
    }

    /// Whether what the policies refuse gets an answer.
    pub(super) fn is_told(&self) -> bool {
        !self.is_audited && !self.is_silent
    }

    /// The policies that ADD has put in force.
    pub fn policies_of_add(&self) -> &Vec<EgressPolicy> {
        if self.added.is_empty() { &self.policies } else { &self.added }
    }

    /// What the words of the policies mean.
    pub fn scene(&self) -> PolicyScene<'_> {
        PolicyScene { on_link: &self.on_link, name_servers: &self.name_servers }
    }

    /// The traffic that all policies allow.
    pub fn compile(&self) -> Result<CompiledPolicy> {
        let all = self.compile_policies()?;
        let service_lists = service_lists(&all)?;
        let mut compiled =
            all.into_iter().reduce(|all, one| all.intersect(&one)).unwrap_or_default();
        let published: Vec<ServiceRange> =
            self.published.iter().map(|text| policy::parse_service(text)).collect::<Result<_>>()?;
        compiled.served = merge_services([compiled.served, published].concat());
        compiled.limits = compiled.limits.intersect(self.limits.compile()?);
        compiled.service_lists = service_lists;
        compiled.require_bounded()?;
        Ok(compiled)
    }

    /// What each policy allows for itself.
    pub(super) fn compile_policies(&self) -> Result<Vec<CompiledPolicy>> {
        let scene = self.scene();
        self.policies.iter().map(|policy| policy.compile(&scene)).collect()
    }

    /// The filter of the second guard. Without the addresses of names, if it has no place for them: a
    /// container must not prevent its policy, and can ask again.
    pub fn fit_guard_filter(&mut self, compiled: &CompiledPolicy) -> Result<ProgramFilter> {
        self.guard_filter(compiled).or_else(|_| {
            self.named.clear();
            self.guard_filter(compiled)
        })
    }

    /// The filter of the second guard.
    pub fn guard_filter(&self, compiled: &CompiledPolicy) -> Result<ProgramFilter> {
        let policies = if self.named.is_empty() { Vec::new() } else { self.compile_policies()? };
        GuardTraffic::new(self, compiled).compile_filter(self, &policies)
    }

    /// The networks whose addresses are reached without a router: also broadcast and multicast.
    pub(super) fn local_subnets(&self) -> Vec<IpNet> {
        self.on_link.iter().copied().chain(GROUPS).collect()
    }

    /// The addresses of the host that `which` selects, without the broadcast addresses of the
    /// container's networks, which are also for neighbours.
    pub(super) fn own_networks(&self, which: impl Fn(&IpAddr) -> bool) -> Vec<IpNet> {
        let links =
            self.on_link.iter().filter(|net| net.addr().is_ipv4() && net.prefix_len() <= 30);
        let broadcasts: Vec<IpAddr> = links.map(IpNet::broadcast).collect();
        let own = self.host.iter().filter(|addr| !broadcasts.contains(addr) && which(addr));
        own.copied().map(IpNet::from).collect()
    }
}

/// What the filter of the second guard lets pass, without the addresses of names.
#[derive(Debug)]
pub(super) struct GuardTraffic {
    allowed: AllowedTraffic,
    /// The allowed addresses on the container's networks, whose MAC addresses it may ask for.
    found: AllowedTraffic,
    neighbours: AllowedTraffic,
    served: Vec<ServiceRange>,
}

impl GuardTraffic {
    /// That of a port with this policy.
    pub(super) fn new(port: &EgressPart, compiled: &CompiledPolicy) -> GuardTraffic {
        let served = compiled.served.clone();
        if port.is_audited {
            let everything = flatten(&[], &[ServiceRange::ALL]);
            let [allowed, found, neighbours] = [everything.clone(), everything.clone(), everything];
            return GuardTraffic { allowed, found, neighbours, served };
        }
        let host: Vec<IpNet> = port.host.iter().copied().map(IpNet::from).collect();
        let near = port.local_subnets();
        let on_link = compiled.neighbours.restrict_to(&near);
        let groups = compiled.host.restrict_to(&GROUPS);
        // The filter does not know where other containers are.
        let away = compiled.routed.union(&compiled.neighbours).without(&near);
        let allowed = away.union(&on_link).union(&groups);
        let mut allowed = allowed.without(&host).union(&compiled.host.restrict_to(&host));
        let found = allowed.restrict_to(&near);
        if port.has_names() {
            allowed = allowed.union(&flatten(&[], &name_services()));
        }
        let neighbours = on_link.without(&port.own_networks(|_| true));
        GuardTraffic { allowed, found, neighbours, served }
    }

    /// The filter of the port, with its addresses of names by these policies.
    pub(super) fn compile_filter(
        &self,
        port: &EgressPart,
        policies: &[CompiledPolicy],
    ) -> Result<ProgramFilter> {
        guard::compile_filter(&GuardPolicy {
            mac: port.mac,
            allowed: &self.allowed.union(&port.named_traffic(policies)),
            served: &self.served,
            routers: &port.routers,
            sources: Some(&port.ips),
            found: &self.found,
            neighbours: &self.neighbours,
            bridge: port.bridge_mac,
        })
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// The different lists of services that names of a container with these policies may have, sorted.
/// Each policy must allow a packet: one with the name by the services of the name, the others by
/// those of the address.
///
/// Fails with code 7 if there are too many.
fn service_lists(policies: &[CompiledPolicy]) -> Result<Vec<Vec<ServiceRange>>> {
    if policies.iter().all(|policy| policy.names.is_empty()) {
        return Ok(Vec::new());
    }
    let mut lists = vec![vec![ServiceRange::ALL]];
    for CompiledPolicy { names, routed, .. } in policies {
        let mut own: Vec<&[ServiceRange]> = names.all_services().collect();
        if policies.len() > 1 {
            let ranges = routed.v4.iter().chain(&routed.v6);
            own.extend(ranges.map(|range| range.services.as_slice()));
        }
        own.sort_unstable();
        own.dedup();
        let both = |list: &Vec<ServiceRange>| {
            let combined =
                own.iter().map(|own| combine_services(list, own, |list, own| list && own));
            combined.collect::<Vec<_>>()
        };
        lists = lists.iter().flat_map(both).filter(|list| !list.is_empty()).collect();
        lists.sort_unstable();
        lists.dedup();
        if lists.len() > MOST_SERVICE_LISTS {
            let problem =
                format!("the names of the egress policy have {} lists of ports", lists.len());
            return Err(Error::config(problem).with_details(format!(
                "{MOST_SERVICE_LISTS} are possible: give several names the same ports"
            )));
        }
    }
    Ok(lists)
}
