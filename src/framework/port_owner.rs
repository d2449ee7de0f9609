//! Whether the rules that lead a port of the host to a container still have a container.
//!
//! An attachment of this program has a record, which decides. Rules without one are those of the
//! reference, or were loaded from a file after a boot. Their container is gone if the kernel, the
//! leases of its network or their absence show that it no longer has the addresses to which the
//! rules lead; else it is in doubt, and the port stays with it.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;

use super::living::may_be_cached;
use super::reclaim::{HOST_LOCAL, log_reclaimed, remove_attachment_state, remove_if_ended};
use super::turn::AttachmentTurn;
use crate::attachment::{AttachmentId, AttachmentRecord, Liveness};
use crate::leases::{DATA_DIR, LeaseListing, LeaseStatus};
use crate::netfilter::PacketFilter;
use crate::netfilter::ports::{self, PortOwner};
use crate::netlink::{Netlink, NetlinkResult};
use cni::error::{ErrorContext, Result};
use cni::sort::collect_set;

/// The parents of directories whose leases are believed without a configuration that names them:
/// only root can write there.
const STATE: [&str; 2] = ["/run/cni", "/var/lib/cni"];

/// Whether the container of a port's rules exists, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortOwnerState {
    Alive,
    /// The rules lead to nobody, or to another container.
    Ended(String),
    InDoubt(String),
}

impl From<Liveness> for PortOwnerState {
    fn from(liveness: Liveness) -> PortOwnerState {
        match liveness {
            Liveness::Alive => PortOwnerState::Alive,
            Liveness::Gone(why) => PortOwnerState::Ended(why.to_string()),
            Liveness::Unknown(why) => PortOwnerState::InDoubt(why.to_string()),
        }
    }
}

fn doubt(why: impl Into<String>) -> PortOwnerState {
    PortOwnerState::InDoubt(why.into())
}

pub fn find_record(owner: &PortOwner) -> Option<AttachmentRecord> {
    let PortOwner { network, id, ifname, .. } = owner;
    match ifname {
        _ if !owner.instance.is_empty() => AttachmentRecord::find_by_instance(&owner.instance),
        Some(ifname) => AttachmentRecord::find_by_attachment(AttachmentId { network, ifname, id }),
        None => None,
    }
}

/// Whether the container of these rules exists; `data_dirs` may have the leases of its network.
pub fn judge_port_owner(owner: &PortOwner, data_dirs: &[PathBuf]) -> PortOwnerState {
    if let Some(record) = find_record(owner) {
        return record.liveness().into();
    }
    let PortOwner { network, id, .. } = owner;
    // Comments are whatever someone has written.
    if owner.collect_command().is_none() {
        return doubt("its rules do not have its whole names");
    }
    let records = AttachmentRecord::read_all(None);
    if records.iter().any(|record| record.network == *network && record.id == *id) {
        return doubt("it has another attachment to the network");
    }
    let leases = NetworkLeases::read(network, data_dirs);
    let leases = match leases {
        Ok(Some(leases)) => leases,
        Ok(None) => NetworkLeases::default(),
        Err(error) => return doubt(format!("the leases of its network cannot be read: {error}")),
    };
    let judged = owner.targets.iter().map(|target| judge_target(owner, *target, &leases, &records));
    let mut states: Vec<PortOwnerState> = judged.collect();
    // The address that proves least decides.
    let is_open = |state: &PortOwnerState| !matches!(state, PortOwnerState::Ended(_));
    let open = states.iter().position(is_open).unwrap_or_default();
    if states.is_empty() { doubt("its rules lead nowhere") } else { states.swap_remove(open) }
}

/// The leases of a network, in all of its directories.
#[derive(Default)]
struct NetworkLeases {
    statuses: Vec<LeaseStatus>,
    /// All addresses that have a file, also without a lease in it.
    taken: BTreeSet<IpAddr>,
}

impl NetworkLeases {
    /// `None` if none of the directories has leases of the network.
    fn read(network: &str, data_dirs: &[PathBuf]) -> Result<Option<NetworkLeases>> {
        let mut found = None;
        for dir in data_dirs {
            let Some(listing) = LeaseListing::open_existing(dir, network)? else { continue };
            let leases = found.get_or_insert_with(NetworkLeases::default);
            leases.taken.extend(listing.taken_addresses());
            leases.statuses.extend(listing.lease_statuses());
        }
        Ok(found)
    }

    /// Whether host-local manages the network's addresses there: some lease is not that of an ended
    /// container.
    fn is_in_use(&self) -> bool {
        self.statuses.iter().any(|status| !matches!(status.liveness, Liveness::Gone(_)))
    }
}

/// Whether the owner, which has no record, still has an address.
fn judge_target(
    owner: &PortOwner,
    target: IpAddr,
    leases: &NetworkLeases,
    records: &[AttachmentRecord],
) -> PortOwnerState {
    let PortOwner { network, id, .. } = owner;
    let mut of_target = leases.statuses.iter().filter(|status| status.lease.ip == target);
    if let Some(own) = of_target.clone().find(|status| status.lease.id == *id) {
        return own.liveness.into();
    }
    if let Some(other) = of_target.find(|status| status.liveness == Liveness::Alive) {
        return PortOwnerState::Ended(format!(
            "{target} is leased to container \"{}\"",
            other.lease.id
        ));
    }
    let mut with_address = records.iter().filter(|record| record.ips.contains(&target)).peekable();
    if let Some(other) = with_address
        .clone()
        .find(|record| record.network == *network && record.liveness() == Liveness::Alive)
    {
        return PortOwnerState::Ended(format!("container \"{}\" has {target}", other.id));
    }
    if !leases.is_in_use() {
        return doubt("nothing was recorded of it, and its network has no leases");
    }
    if leases.statuses.iter().any(|status| status.lease.id == *id) {
        return doubt("it has a lease of another address");
    }
    if leases.taken.contains(&target) || with_address.peek().is_some() {
        return doubt(format!("nothing was recorded of it, and {target} is in use"));
    }
    match find_traffic_to(target) {
        Ok(None) => {}
        Ok(Some(what)) => {
            return doubt(format!("nothing was recorded of it, and the host has {what} {target}"));
        }
        Err(error) => return doubt(error.to_string()),
    }
    if may_be_cached(id) {
        return doubt("nothing was recorded of it, but it is in a runtime's cache");
    }
    PortOwnerState::Ended(format!("it has no lease, and nobody has {target}"))
}

/// Whether the host has a route to this single address, or a neighbour with it, as the beginning of
/// a reason.
fn find_traffic_to(target: IpAddr) -> NetlinkResult<Option<&'static str>> {
    let host = Netlink::open()?;
    let route = host.find_matching_route(target)?;
    Ok(
        if route.is_some_and(|route| route.dst == IpNet::from(target))
            || host.is_local_address(target)
        {
            Some("a route to")
        } else if host.has_neighbour(target)? {
            Some("heard the neighbour")
        } else {
            None
        },
    )
}

/// The directories with the leases of a network, by the records of its attachments. None if a
/// record names a directory that a tenant may write to.
fn recorded_data_dirs(network: &str) -> Vec<PathBuf> {
    let records = AttachmentRecord::read_all(Some(network))
        .into_iter()
        .filter(|record| record.ipam == HOST_LOCAL);
    let named = records.map(|record| record.data_dir.unwrap_or_else(|| DATA_DIR.into()));
    let mut dirs = collect_set(named);
    if dirs.is_empty() {
        dirs.insert(DATA_DIR.into());
    }
    if dirs.iter().all(|dir| STATE.iter().any(|state| Path::new(dir).starts_with(state))) {
        dirs.into_iter().collect()
    } else {
        Vec::new()
    }
}

/// For ADD: as [`remove_ended_port_owner`], with the directories of leases that the node's records
/// name.
pub fn remove_port_owner_if_ended(filter: &PacketFilter, owner: &PortOwner) -> Result<bool> {
    let removed = remove_ended_port_owner(filter, owner, &recorded_data_dirs(&owner.network))?;
    Ok(removed.is_some())
}

/// Removes the rules of an owner without a record that a person knows to have ended, if its rules
/// are still those that were seen. Returns whether they were.
pub fn remove_named_port_owner(filter: &PacketFilter, owner: &PortOwner) -> Result<bool> {
    let PortOwner { network, id, ifname, .. } = owner;
    let of_ifname = |ifname| AttachmentId { network, ifname, id };
    let _lock =
        ifname.as_deref().map(|ifname| AttachmentTurn::take(of_ifname(ifname))).transpose()?;
    if find_record(owner).is_some() || !ports::list_port_owners(filter)?.contains(owner) {
        return Ok(false);
    }
    let ips: Vec<IpAddr> = owner.targets.iter().copied().collect();
    // Rules of iptables do not have the name of the interface.
    remove_attachment_state(of_ifname(ifname.as_deref().unwrap_or_default()), &ips)?;
    Ok(true)
}

/// Removes the rules that lead ports to the owner, if its container has certainly ended. If the
/// owner has a record, its whole state is removed. Returns the reason if something was removed.
pub fn remove_ended_port_owner(
    filter: &PacketFilter,
    owner: &PortOwner,
    data_dirs: &[PathBuf],
) -> Result<Option<String>> {
    let PortOwnerState::Ended(why) = judge_port_owner(owner, data_dirs) else { return Ok(None) };
    if let Some(record) = find_record(owner) {
        return Ok(remove_if_ended(&record)?.then_some(why));
    }
    let PortOwner { network, id, .. } = owner;
    let _lock = owner
        .ifname
        .as_ref()
        .map(|ifname| AttachmentTurn::take(AttachmentId { network, ifname, id }))
        .transpose()?;
    // The owner may have got further ports since, and rules in the other family.
    let Some(now) = ports::list_port_owners(filter)?.into_iter().find(|other| other.is_same(owner))
    else {
        return Ok(None);
    };
    let PortOwnerState::Ended(why) = judge_port_owner(&now, data_dirs) else { return Ok(None) };
    ports::remove_port_owner(filter, &now)
        .context(|| format!("remove the port mappings of container \"{id}\", which is gone"))?;
    let ports = now.describe_ports();
    log_reclaimed(format!(
        "removed what led {ports} to container \"{id}\" (network \"{network}\"): {why}"
    ));
    Ok(Some(why))
}
