//! Defects of attachments: those in the runtimes' cache, their leases, and the remains of dead
//! containers.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;

use super::listeners::{find_hidden_program, listening_sockets};
use crate::attachment::AttachmentRecord;
use crate::devices::lost::LostDevice;
use crate::framework::port_owner::{self, PortOwnerState};
use crate::iface::verify::IN_CONTAINER;
use crate::leases::{LeaseListing, LeaseStatus};
use crate::netfilter::PacketFilter;
use crate::netfilter::ports::{self, PORTS};
use crate::netlink::Netlink;
use crate::tool::directories::{LeaseDirectory, ToolDirectories};
use crate::tool::finding::{Finding, FindingSubject};
use crate::tool::life::{ContainerState, doubt_reason, end_reason};
use cni::error::Result;
use cni::json::Json;
use cni::runtime::{CachedAttachment, NetworkList, PluginConfig, Runtime};
use cni::{SpecVersion, VersionNumber};

/// The remedy for remains of dead containers.
pub(super) const COLLECT: &str = "cnibox gc";

/// The remedy for an attachment whose link is gone: if a person deleted the link, the container may
/// run.
const DETACH: &str = "cnibox gc # and delete the container, if it still runs";

/// The remedy for a device in a namespace without a path.
const FREE: &str = "end the processes of the container, then: cnibox gc";

/// The list of leases, with the state of their containers.
const LIST: &str = "cnibox ipam ls";

/// The remedy for a container's network that no command repairs.
const RECREATE: &str = "delete the container: its runtime attaches the next one anew";

/// The prefixes of commands in the details of errors.
const COMMANDS: [&str; 6] =
    ["bridge link ", "cnibox repair", "ip addr ", "ip link ", "ip route ", "sysctl -w "];

/// An attachment in the cache.
pub(super) struct ExaminedAttachment {
    pub(super) cached: CachedAttachment,
    life: ContainerState,
    /// The network as of ADD, if it is in the cache.
    pub(super) list: Option<NetworkList>,
    pub(super) ips: Vec<IpAddr>,
    /// Whether the result of ADD has an IPv4 default route.
    pub(super) has_default: bool,
}

/// All attachments in the cache.
pub(super) fn read_cached(
    directories: &ToolDirectories,
    runtime: &Runtime,
) -> Result<Vec<ExaminedAttachment>> {
    Ok(directories
        .cached_attachments(runtime)?
        .into_iter()
        .map(|(cached, life)| {
            let list = cached.network_list();
            let result =
                list.as_ref().and_then(|list| runtime.cached_result(list, &cached.attach).ok()?);
            let result = result.unwrap_or_default();
            let ips = result.ips.iter().map(|ip| ip.address.addr()).collect();
            let is_default = |dst: &IpNet| dst.addr().is_ipv4() && dst.prefix_len() == 0;
            let has_default = result.routes.iter().any(|route| is_default(&route.dst));
            ExaminedAttachment { cached, life, list, ips, has_default }
        })
        .collect())
}

impl ExaminedAttachment {
    /// The finding of CHECK, or the reason for which CHECK is not run: the container has ended, or
    /// is in doubt.
    pub(super) fn run_check(
        &self,
        directories: &ToolDirectories,
        runtime: &Runtime,
    ) -> Option<Finding> {
        let (title, attach) = (attachment_title(&self.cached), &self.cached.attach);
        if let Some(why) = end_reason(self.life.liveness) {
            let problem = format!("was not detached: {why}");
            return Some(Finding::new_warning(title, problem, DETACH));
        }
        // CHECK would examine the network of another container, and the remedies would change it.
        if let Some(why) = self.displacement_reason() {
            let remedy = directories.doubt_remedy(&self.cached.network, &attach.container_id);
            return Some(Finding::new_warning(title, format!("is in doubt: {why}"), remedy));
        }
        let list = self.list.as_ref()?;
        // CHECK exists since version 0.4.0.
        let version: VersionNumber = list.cni_version.parse().ok()?;
        if version < SpecVersion::V0_4_0.into() {
            return None;
        }
        let error = runtime.check(list, attach).err()?;
        let enter = format!("nsenter --net={} ", attach.netns);
        let details = error.details().replace(IN_CONTAINER, &enter);
        Some(if COMMANDS.iter().any(|command| details.contains(command)) {
            Finding::new_error(title, error.message(), details)
        } else {
            Finding::new_error(title, error.to_string(), RECREATE)
        })
    }

    /// Why the namespace at its path may be that of another container; `None` if nothing suggests
    /// it.
    fn displacement_reason(&self) -> Option<String> {
        self.life.rival.as_ref().and_then(|_| self.life.doubt_reason(&self.cached.attach.netns))
    }

    /// Whether the host is the gateway of the container.
    pub(super) fn is_routed(&self) -> bool {
        let is_set = |plugin: &PluginConfig, key| {
            plugin.json().get_present_member(key) == Some(&Json::Bool(true))
        };
        self.list.as_ref().is_some_and(|list| {
            list.plugins.iter().any(|plugin| match plugin.plugin_type.as_str() {
                "ptp" => true,
                "bridge" => ["isGateway", "isDefaultGateway"].iter().any(|key| is_set(plugin, key)),
                _ => false,
            })
        })
    }

    /// Whether all addresses are leased by host-local.
    fn has_leases(&self) -> bool {
        let plugins = self.list.iter().flat_map(|list| &list.plugins);
        let mut ipam =
            plugins.map(|plugin| plugin.ipam_type.as_str()).filter(|name| !name.is_empty());
        ipam.next() == Some("host-local") && ipam.all(|name| name == "host-local")
    }
}

impl ExaminedAttachment {
    /// The addresses of the container that are not leased to it.
    fn find_unleased(&self, leased: &HashSet<(IpAddr, &str)>) -> Vec<Finding> {
        let id = self.cached.attach.container_id.as_str();
        let missing = self.ips.iter().filter(|ip| !leased.contains(&(**ip, id)));
        missing
            .map(|ip| {
                let problem = format!(
                    "{ip} is not leased to this container: host-local may allocate it again"
                );
                Finding::new_error(attachment_title(&self.cached), problem, RECREATE)
            })
            .collect()
    }
}

/// The attachments whose containers may be alive.
pub(super) fn living_attachments(
    attached: &[ExaminedAttachment],
) -> impl Iterator<Item = &ExaminedAttachment> {
    attached.iter().filter(|attached| end_reason(attached.life.liveness).is_none())
}

/// A network whose gateway is the node, with the addresses of its living containers.
pub(super) type RoutedNetwork<'a> = (&'a NetworkList, Vec<IpAddr>);

pub(super) fn routed_networks(attached: &[ExaminedAttachment]) -> Vec<RoutedNetwork<'_>> {
    let mut networks: Vec<RoutedNetwork<'_>> = Vec::new();
    for attached in living_attachments(attached).filter(|attached| attached.is_routed()) {
        let Some(list) = &attached.list else { continue };
        match networks.iter_mut().find(|(known, _)| known.name == list.name) {
            Some((_, ips)) => ips.extend(&attached.ips),
            None => networks.push((list, attached.ips.clone())),
        }
    }
    networks
}

/// Whether the state of an ended attachment is still there while no other process is changing the
/// attachment: its DEL deletes the link first.
fn is_left(instance: &str, is_there: impl Fn() -> bool) -> bool {
    let lock = AttachmentRecord::try_lock_instance(instance);
    // Without a directory for locks there is no lock to hold.
    !matches!(lock, Ok(None)) && is_there()
}

/// Remains of dead containers that are not in the cache.
pub(super) fn find_unknown_remains(attached: &[ExaminedAttachment]) -> Vec<Finding> {
    let remains = |record: AttachmentRecord| {
        let why = end_reason(record.liveness())?;
        let instance = record.attachment_id().instance_id();
        if !is_left(&instance, || {
            AttachmentRecord::find_by_instance(&instance)
                .is_some_and(|now| now.is_same_instance(&record))
        }) {
            return None;
        }
        let title = format_title(&record.network, &record.id, &record.ifname);
        let is_known = attached.iter().any(|attached| attachment_title(&attached.cached) == title);
        let problem = format!("left rules or devices: {why}");
        (!is_known).then(|| Finding::new_warning(title, problem, COLLECT))
    };
    AttachmentRecord::read_all(None).into_iter().filter_map(remains).collect()
}

/// Devices of the host that DEL has not found.
pub(super) fn find_lost_devices() -> Result<Vec<Finding>> {
    let host = Netlink::open()?;
    let mut findings = Vec::new();
    for device in LostDevice::find_all() {
        let (problem, remedy) = if device.is_on_host(&host)? {
            ("is on the host without its name and state", COLLECT)
        } else if device.may_come_back() {
            ("has not come back: something may hold its namespace", FREE)
        } else {
            continue;
        };
        findings.push(Finding::new_warning(device.object(), problem, remedy));
    }
    Ok(findings)
}

/// Rules that lead ports of the host to containers that are gone, or in doubt; and ports on which
/// programs of the node listen.
pub(super) fn examine_ports(
    directories: &ToolDirectories,
    stores: &[LeaseDirectory],
) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let owners = ports::list_port_owners(&PacketFilter::new())?;
    let listeners = if owners.is_empty() { Vec::new() } else { listening_sockets() };
    for owner in owners {
        let of_network = stores.iter().filter(|store| store.network == owner.network);
        let dirs: Vec<PathBuf> = of_network.map(|store| store.data_dir.clone()).collect();
        let title = owner.describe_ports();
        match port_owner::judge_port_owner(&owner, &dirs) {
            PortOwnerState::Alive => findings.extend(find_hidden_program(&owner, &listeners)),
            // All remains of an attachment with a record are one finding.
            PortOwnerState::Ended(_) if port_owner::find_record(&owner).is_some() => {}
            PortOwnerState::Ended(why) => {
                let problem = format!("the rules of {owner} have no container: {why}");
                findings.push(Finding::new_warning(title, problem, COLLECT));
            }
            PortOwnerState::InDoubt(why) => {
                let remedy = match owner.collect_command() {
                    Some(_) => directories.doubt_remedy(&owner.network, &owner.id),
                    None => "delete the rules, if their container has ended".to_owned(),
                };
                findings.push(Finding::new_note(
                    title,
                    format!("held by {owner}, in doubt: {why}"),
                    remedy,
                ));
            }
        }
    }
    Ok(findings)
}

/// The subject of a finding of [`examine_ports`].
pub(super) fn subject_of_ports(finding: &Finding) -> Option<FindingSubject> {
    match &finding.subject {
        FindingSubject::Object(name) if name.starts_with(PORTS) => {
            Some(FindingSubject::Object(name.clone()))
        }
        _ => None,
    }
}

/// Leases of dead containers, addresses of two living containers, and addresses of living
/// containers without a lease.
pub(super) fn examine_leases(
    attached: &[ExaminedAttachment],
    stores: &[LeaseDirectory],
) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let mut owners: HashMap<IpAddr, String> = HashMap::new();
    // A network that was configured anew may have leases in several directories.
    for stores in stores.chunk_by(|a, b| a.network == b.network) {
        let network = &stores[0].network;
        let mut statuses = Vec::new();
        for store in stores {
            let listing = LeaseListing::open_existing(&store.data_dir, network)?;
            statuses.extend(listing.iter().flat_map(LeaseListing::lease_statuses));
        }
        let (mut dead, living_leases): (Vec<_>, Vec<_>) =
            statuses.iter().partition(|status| end_reason(status.liveness).is_some());
        dead.retain(|status| {
            let owner = status.lease.attachment_in(network);
            owner.is_none_or(|owner| {
                is_left(&owner.instance_id(), || {
                    stores.iter().any(|store| store.has_lease(status.lease.ip))
                })
            })
        });
        for LeaseStatus { lease, .. } in living_leases {
            let owner = format_title(network, &lease.id, lease.ifname.as_deref().unwrap_or("?"));
            if let Some(other) = owners.insert(lease.ip, owner.clone()) {
                let problem = format!("{} is also leased to {other}", lease.ip);
                let remedy =
                    "delete one of them, and give the networks subnets that do not overlap";
                findings.push(Finding::new_error(owner, problem, remedy));
            }
        }
        findings.extend(leases_in_doubt(network, &statuses));
        if !dead.is_empty() {
            let problem = format!("addresses leased to dead containers: {}", dead.len());
            findings.push(Finding::new_warning(format!("network {network}"), problem, COLLECT));
        }
        let leased: HashSet<(IpAddr, &str)> =
            statuses.iter().map(|status| (status.lease.ip, status.lease.id.as_str())).collect();
        let is_here = |attached: &&ExaminedAttachment| {
            attached.cached.network == *network && attached.displacement_reason().is_none()
        };
        for attached in
            living_attachments(attached).filter(is_here).filter(|attached| attached.has_leases())
        {
            findings.extend(attached.find_unleased(&leased));
        }
    }
    Ok(findings)
}

/// For information: leases that stay until DEL or GC because nothing proves whether their
/// attachments exist, by reason.
fn leases_in_doubt(network: &str, statuses: &[LeaseStatus]) -> Vec<Finding> {
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    for status in statuses {
        if let Some(why) = doubt_reason(status.liveness) {
            *reasons.entry(why).or_default() += 1;
        }
    }
    reasons
        .into_iter()
        .map(|(reason, count)| {
            let problem = format!("leases in doubt, which stay until DEL or GC: {count}: {reason}");
            Finding::new_note(format!("network {network}"), problem, LIST)
        })
        .collect()
}

/// The description of an attachment in findings.
pub(in crate::tool) fn attachment_title(cached: &CachedAttachment) -> String {
    let CachedAttachment { network, attach, .. } = cached;
    format_title(network, &attach.container_id, &attach.ifname)
}

fn format_title(network: &str, id: &str, ifname: &str) -> String {
    format!("container {id}, interface {ifname} (network {network})")
}
