//! All state that a dead attachment left on the node is reclaimed as a whole, by the call that finds a part of it in its
//! way: stale rules would apply to the next owner of the address.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;

use super::context::Cx;
use super::plugin::{AddReq, GcReq};
use super::rollback::{Failures, Rollback};
use crate::attachment::{Gone, Liveness, Owner, Record};
use crate::cni::json::Json;
use crate::cni::{CniResult, NetworkName};
use crate::error::{Error, Result};
use crate::leases::{self, DATA_DIR, LeaseStatus, Listing, Reclaimed};
use crate::log;
use crate::netfilter::filter::firewalld::{self, Zone};
use crate::netfilter::ports::Holder;
use crate::netfilter::{PacketFilter, filter, masquerade, ports, spoof};
use crate::netlink::Netlink;
use crate::netns::NetnsId;

/// The interface of leases without one: releases of the reference up to 0.7.5 did not write the interface.
const OLD_IFNAME: &str = "eth0";

/// Removes the state of an attachment that is certainly gone and had these addresses from the calling thread's network
/// namespace.
pub fn attachment(owner: Owner<'_>, ips: &[IpAddr]) -> Result<()> {
    spoof::del(&PacketFilter::new(), owner, &[])?;
    all_but_ports(owner, ips)
}

/// As [`attachment`], except for the source MAC check, which the running ADD has already created for the port of the next
/// attachment of this name.
fn all_but_ports(owner: Owner<'_>, ips: &[IpAddr]) -> Result<()> {
    let filter = PacketFilter::new();
    let nets: Vec<IpNet> = ips.iter().map(|ip| IpNet::from(*ip)).collect();
    let mut failures = Failures::new();
    failures.keep(ports::del(&filter, owner, None));
    failures.keep(masquerade::del(&filter, owner, &nets));
    failures.keep(passage(&filter, owner, ips));
    failures.keep(shaping(owner));
    // The record is removed last: while any state is left, its owner is known.
    failures.into_result()?;
    Record::of(owner).map_or(Ok(()), |record| record.remove())
}

/// Removes the rules of the firewall plugin, in every back end.
fn passage(filter: &PacketFilter, owner: Owner<'_>, ips: &[IpAddr]) -> Result<()> {
    let mut failures = Failures::new();
    // The addresses may be incomplete.
    failures.keep(filter::del(filter, owner, ips, None));
    // The record has the zone.
    if firewalld::has(owner)
        && let Some(mut zone) = Zone::find(firewalld::DEFAULT_ZONE)
    {
        failures.keep(zone.del(owner, &[]));
    }
    failures.into_result()
}

/// Removes the ifb devices that shaped the attachment's traffic.
fn shaping(owner: Owner<'_>) -> Result<()> {
    let host = Netlink::open()?;
    let mut failures = Failures::new();
    for link in host.dump_links()? {
        if link.kind.as_deref() == Some("ifb") && owner.owns(Some(&link.alias)) {
            failures.keep(host.del_link_by_index(link.index).map_err(Error::from));
        }
    }
    failures.into_result()
}

impl<'a> Cx<'a> {
    /// Records the attachment on the node, before the first state is created that outlives the container. A record
    /// of an earlier plugin of the list serves as well.
    pub fn note(&self, plugin: &str, req: &AddReq, result: &CniResult, undo: &mut Rollback<'a>) {
        let owner = Owner::new(&self.net.name, &req.id, &req.ifname);
        let netns = req.sandbox.identity();
        let is_noted = || Record::of(owner).is_some_and(|record| record.netns == netns);
        if req.prev.is_some() && is_noted() {
            return;
        }
        let on_host = result.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
        let data_dir = match self.net.json.get("ipam").and_then(|ipam| ipam.get("dataDir")) {
            Some(Json::String(dir)) if !dir.is_empty() => Some(dir),
            _ => None,
        };
        let record = Record {
            netns,
            ips: result.addresses().iter().map(IpNet::addr).collect(),
            interfaces: on_host.map(|interface| interface.name.clone()).collect(),
            data_dir: data_dir.map(PathBuf::from),
            ..Record::new(owner, plugin, &req.sandbox.path)
        };
        if let Err(e) = record.write() {
            log::warn(format_args!(
                "{e}; if the container dies without a DEL, its state is not reclaimed"
            ));
        }
        undo.push("forget the attachment", move || record.remove());
    }
}

/// Reclaims what the previous owner of the address left, if that owner is certainly gone.
pub fn address(ip: IpAddr, next: Owner<'_>) -> Result<()> {
    match Record::of_address(ip) {
        Some(record) if record.owner() != next => if_gone(&record).map(drop),
        _ => Ok(()),
    }
}

/// Reclaims the state of the attachment if its container is certainly gone. Returns whether the container is gone.
pub fn if_gone(record: &Record) -> Result<bool> {
    let Liveness::Gone(why) = record.liveness() else { return Ok(false) };
    let Record { id, ifname, network, .. } = record;
    attachment(record.owner(), &record.ips)
        .map_err(|e| e.context(format!("remove what container \"{id}\" left, which is gone")))?;
    log::warn(format_args!(
        "removed what container \"{id}\" left (network \"{network}\", interface \"{ifname}\"): {why}"
    ));
    Ok(true)
}

/// Whether an attachment can still be alive, by its record, else its leases in the folder `data_dir`, else the path of its
/// namespace, which may be that of another container meanwhile; the path is empty if it is known to prove nothing.
pub fn liveness(owner: Owner<'_>, sandbox: &str, data_dir: &Path) -> Liveness {
    if let Some(record) = Record::of(owner) {
        return record.liveness();
    }
    let listing = Listing::open_existing(data_dir, owner.network);
    let leases = listing.ok().flatten().map(|listing| listing.statuses()).unwrap_or_default();
    let is_its = |status: &&LeaseStatus| {
        let ifname = status.lease.ifname.as_deref().unwrap_or(OLD_IFNAME);
        status.lease.id == owner.id && ifname == owner.ifname
    };
    let by_lease = leases.iter().find(is_its).map(|status| status.liveness);
    match by_lease.filter(|liveness| *liveness != Liveness::Unknown) {
        Some(certain) => certain,
        None if NetnsId::at(Path::new(sandbox)).is_some() => Liveness::Alive,
        None if by_lease.is_some() || sandbox.is_empty() || Path::new(sandbox).exists() => {
            Liveness::Unknown
        }
        None => Liveness::Gone(Gone::Namespace),
    }
}

/// Reclaims the state of the attachment that holds a port if its container is certainly gone. Returns whether the
/// container is gone: by the record of the attachment, else by its leases in host-local's default folder.
pub fn holder(holder: &Holder) -> Result<bool> {
    let Holder { network, id, ifname, .. } = holder;
    let noted = match ifname {
        _ if !holder.instance.is_empty() => Record::read(&holder.instance),
        Some(ifname) => Record::of(Owner { network, ifname, id }),
        None => None,
    };
    if let Some(record) = noted {
        return if_gone(&record);
    }
    if id.is_empty() || NetworkName::parse(network).is_err() {
        return Ok(false);
    }
    let Ok(Some(listing)) = Listing::open_existing(Path::new(DATA_DIR), network) else {
        return Ok(false);
    };
    let mut leases = listing.statuses();
    leases.retain(|status| {
        status.lease.id == *id && (ifname.is_none() || status.lease.ifname == *ifname)
    });
    let is_gone = |status: &LeaseStatus| matches!(status.liveness, Liveness::Gone(_));
    let Some(first) = leases.first().filter(|_| leases.iter().all(is_gone)) else {
        return Ok(false);
    };
    let ifname = first.lease.ifname.as_deref().unwrap_or(OLD_IFNAME);
    let ips: Vec<IpAddr> = leases.iter().map(|status| status.lease.ip).collect();
    attachment(Owner { network, ifname, id }, &ips).map(|()| true)
}

/// GC: reclaims dead attachments, and removes the records that this plugin wrote of attachments that are not valid,
/// whose state the plugin has removed. Without a request all attachments count as valid.
pub(super) fn collect(plugin: &str, network: &NetworkName, req: Option<&GcReq>) -> Result<()> {
    let mut failures = Failures::new();
    for record in Record::all(Some(network.as_str())) {
        let is_valid = req.is_none_or(|req| req.is_valid(&record.id, &record.ifname));
        if is_valid || record.plugin != plugin {
            failures.keep(if_gone(&record));
        } else {
            failures.keep(record.remove());
        }
    }
    if let Some(req) = req {
        failures.keep(Record::remove_cut_off(network, &Owner::each(network, &req.valid)));
    }
    failures.into_result()
}

/// Reclaims the other state of the owners of these leases. Returns the leases that can be removed; `failures` has
/// the reasons for the others. `next` is the attachment being added.
pub fn leases(
    network: &str,
    mut gone: Vec<Reclaimed>,
    next: Option<&leases::Owner>,
    failures: &mut Failures,
) -> Vec<Reclaimed> {
    let mut reclaimed = Vec::new();
    while let Some(first) = gone.first().map(|gone| gone.lease.clone()) {
        let is_same = |other: &mut Reclaimed| {
            other.lease.id == first.id && other.lease.ifname == first.ifname
        };
        let same: Vec<Reclaimed> = gone.extract_if(.., is_same).collect();
        let ifname = first.ifname.as_deref().unwrap_or(OLD_IFNAME);
        let ips: Vec<IpAddr> = same.iter().map(|gone| gone.lease.ip).collect();
        let owner = Owner { network, ifname, id: &first.id };
        let is_next = next.is_some_and(|next| next.id == first.id && next.ifname == ifname);
        match if is_next { all_but_ports(owner, &ips) } else { attachment(owner, &ips) } {
            Ok(()) => reclaimed.extend(same),
            Err(e) => {
                let error = e.context(format!("{first} stays: its rules cannot be removed"));
                failures.keep::<()>(Err(error));
            }
        }
    }
    reclaimed
}
