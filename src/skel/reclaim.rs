//! All state that a dead attachment left on the node is reclaimed as a whole, by the call that finds a part of it in its
//! way: stale rules would apply to the next owner of the address.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;

use super::context::Cx;
use super::plugin::{AddReq, GcReq};
use super::rollback::{Failures, Rollback};
use crate::attachment::{Doubt, HostEnd, Liveness, Owner, Record, unrecorded};
use crate::cni::{CniResult, NetworkName};
use crate::error::{Context, Error, Result};
use crate::iface::peer;
use crate::leases::{DATA_DIR, LeaseOptions, LeaseStatus, LeaseStore, Listing, Reclaimed};
use crate::log;
use crate::netfilter::ports::Holder;
use crate::netfilter::{PacketFilter, spoof};
use crate::netlink::Netlink;
use crate::trace;

/// Removes the state of an attachment that has certainly ended and had these addresses from the calling thread's network
/// namespace. The caller has the [turn](Record::turn).
pub fn attachment(owner: Owner<'_>, ips: &[IpAddr]) -> Result<()> {
    rules(owner, ips, false)?;
    // The record is removed last: while any state is left, its owner is known.
    Record::of(owner).map_or(Ok(()), |record| record.remove())
}

/// Removes the rules of all features, and the devices. Of an attachment that `is_being_added` the source MAC check stays, which
/// ADD creates before it asks for addresses.
fn rules(owner: Owner<'_>, ips: &[IpAddr], is_being_added: bool) -> Result<()> {
    let packets = PacketFilter::new();
    let mut failures = Failures::new();
    for feature in packets.features {
        if !is_being_added || feature.state.kept != spoof::KEPT {
            failures.keep((feature.remove)(&packets, owner, ips));
        }
    }
    failures.keep(shaping(owner));
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
        if req.prev.is_some() && self.is_noted(owner, req) {
            return;
        }
        let data_dir = self.net.json.get("ipam").and_then(|ipam| ipam.get("dataDir")?.as_str());
        let mut record = Record {
            netns: req.sandbox.identity(),
            end: self.end().or_else(|| self.listed_end(owner, req, result)),
            ips: result.addresses().iter().map(IpNet::addr).collect(),
            ipam: self.net.ipam_type.clone(),
            data_dir: data_dir.filter(|dir| !dir.is_empty()).map(PathBuf::from),
            ..Record::new(owner, plugin, &req.sandbox.path)
        };
        let mut write = || {
            let _turn = Record::turn(owner)?;
            match Record::of(owner) {
                Some(earlier) if earlier.is_same_instance(&record) => record.rules = earlier.rules,
                Some(earlier) if earlier.is_gone() => {
                    attachment(owner, &earlier.ips).unwrap_or_else(log::warn);
                }
                _ => {}
            }
            record.write()
        };
        if let Err(e) = write() {
            unrecorded(format_args!(
                "{e}; if the container dies without a DEL, its state is not reclaimed"
            ));
        }
        undo.push("forget the attachment", move || record.remove());
    }

    /// Whether the plugin calls an IPAM plugin whose leases are for the MAC of the interface: the attachment is recorded for the
    /// plugins that follow.
    pub(super) fn is_leased(&self, plugin: &str) -> bool {
        self.ipam_needs_link() && plugin != self.net.ipam_type
    }

    /// Records the attachment if it [is leased](Cx::is_leased), unless the plugin has recorded it already.
    pub(super) fn note_lease(
        &self,
        plugin: &str,
        req: &AddReq,
        result: &CniResult,
        undo: &mut Rollback<'a>,
    ) {
        let owner = Owner::new(&self.net.name, &req.id, &req.ifname);
        if self.is_leased(plugin) && !self.is_noted(owner, req) {
            self.note(plugin, req, result, undo);
        }
    }

    /// The host's end of the pair that an earlier plugin of the list has created, of whichever program.
    fn listed_end(&self, owner: Owner<'_>, req: &AddReq, result: &CniResult) -> Option<HostEnd> {
        let host = self.host().ok()?;
        let ends = req.sandbox.netns().and_then(|netns| peer::listed_ends(host, netns, result));
        match ends.unwrap_or_default().as_slice() {
            [end] => HostEnd::of(owner, host, end),
            _ => None,
        }
    }

    /// Whether the attachment has a record already, of this container rather than of an earlier one with the same id.
    fn is_noted(&self, owner: Owner<'_>, req: &AddReq) -> bool {
        let may_exist =
            |life| matches!(life, Liveness::Alive | Liveness::Unknown(Doubt::NoHostEnd));
        let is_current = |record: Record| {
            record.netns == req.sandbox.identity()
                && self.host().is_ok_and(|host| may_exist(record.liveness_by(host)))
        };
        Record::of(owner).is_some_and(is_current)
    }
}

/// Reclaims what the previous owners of the address left, if they have certainly ended; warns of one in the same network that
/// exists.
pub fn address(ip: IpAddr, next: Owner<'_>) -> Result<()> {
    for record in Record::sharing(ip, next) {
        if !if_gone(&record)?
            && record.network == next.network
            && record.liveness() == Liveness::Alive
        {
            let Record { id, ifname, .. } = &record;
            log::warn(format_args!(
                "{ip} is in use by container {id}, interface {ifname}, as well"
            ));
        }
    }
    Ok(())
}

/// Reclaims the state of the attachment if it has certainly ended. Returns whether it has. The caller has no lock.
pub fn if_gone(record: &Record) -> Result<bool> {
    // The record proves the end of leases that were made for another program's plugin.
    if record.end.is_some_and(|end| !end.labelled) && record.is_gone() {
        NetworkName::parse(&record.network)?;
        let dir = record.data_dir.as_deref().unwrap_or(Path::new(DATA_DIR));
        let store = LeaseStore::open_existing(dir, &record.network, LeaseOptions::default())?;
        let mut failures = Failures::new();
        store.map_or(Ok(Vec::new()), |mut store| in_store(&mut store, None, &mut failures))?;
        failures.into_result()?;
    }
    alone(record)
}

/// As [`if_gone`], without the leases.
fn alone(record: &Record) -> Result<bool> {
    let Liveness::Gone(why) = record.liveness() else { return Ok(false) };
    let _turn = Record::turn(record.owner())?;
    // Meanwhile the container may have been created again, with the same id.
    if Record::of(record.owner()).is_some_and(|now| !now.is_same_instance(record)) {
        return Ok(false);
    }
    let Record { id, ifname, network, .. } = record;
    attachment(record.owner(), &record.ips)
        .map_err(|e| e.context(format!("remove what container \"{id}\" left, which is gone")))?;
    tell(format!(
        "removed what container \"{id}\" left (network \"{network}\", interface \"{ifname}\"): {why}"
    ));
    Ok(true)
}

/// Logs what was reclaimed, and adds it to the call's trace.
pub fn tell(what: String) {
    log::warn(&what);
    trace::root().text("cnibox.reclaimed", || what);
}

/// Reclaims what an earlier container of the same id left, but for its leases, if it has certainly ended.
pub fn former(owner: Owner<'_>) {
    if let Some(Err(e)) = Record::of(owner).map(|record| alone(&record)) {
        log::warn(e);
    }
}

/// The plugin whose leases are in folders of this node.
pub const LEASER: &str = "host-local";

/// Releases the leases of an attachment that is being deleted in the folder that ADD has recorded and in the default one, but not
/// in the folders `done`: the configuration may have been changed since.
pub fn leases_of(owner: Owner<'_>, done: &[&Path]) -> Result<()> {
    let recorded = Record::of(owner).and_then(|record| record.data_dir);
    let recorded = recorded.as_deref().filter(|dir| *dir != Path::new(DATA_DIR));
    let dirs = recorded.into_iter().chain([Path::new(DATA_DIR)]);
    let mut failures = Failures::new();
    for dir in dirs.filter(|dir| !done.contains(dir)) {
        let store = LeaseStore::open_existing(dir, owner.network, LeaseOptions::default());
        let released = store.map(|store| store.map_or(Ok(Vec::new()), |mut it| it.release(owner)));
        for ip in failures.keep(released.and_then(|released| released)).unwrap_or_default() {
            log::warn(format_args!("released {ip}, whose lease is in {}", dir.display()));
        }
    }
    failures.into_result()
}

/// Whether an attachment exists, by its record, else by its leases in the folder `data_dir`.
pub fn liveness(owner: Owner<'_>, data_dir: &Path) -> Liveness {
    if let Some(record) = Record::of(owner) {
        return record.liveness();
    }
    let listing = Listing::open_existing(data_dir, owner.network);
    let leases = listing.ok().flatten().map(|listing| listing.statuses()).unwrap_or_default();
    let is_its = |status: &&LeaseStatus| status.lease.owner(owner.network) == Some(owner);
    leases.iter().find(is_its).map_or(Liveness::Unknown(Doubt::NoRecord), |its| its.liveness)
}

/// Reclaims the state of the attachment that holds a port if it has certainly ended. Returns whether it has. Nothing is proved of an
/// attachment without a record, such as the reference's.
pub fn holder(holder: &Holder) -> Result<bool> {
    let Holder { network, id, ifname, .. } = holder;
    let record = match ifname {
        _ if !holder.instance.is_empty() => Record::read(&holder.instance),
        Some(ifname) => Record::of(Owner { network, ifname, id }),
        None => None,
    };
    record.map_or(Ok(false), |record| if_gone(&record))
}

/// GC: removes the records that this plugin wrote of attachments that are not valid, whose state the plugin has removed, but for
/// the parts from which the next plugins know their rules; and reclaims attachments that have certainly ended, except for those that the runtime lists as valid. Without a request only the
/// proof counts.
pub(super) fn collect(plugin: &str, network: &NetworkName, req: Option<&GcReq>) -> Result<()> {
    let mut failures = Failures::new();
    for record in Record::all(Some(network.as_str())) {
        match req {
            Some(req) if req.is_valid(&record.id, &record.ifname) => {}
            Some(_) if record.plugin == plugin => {
                failures.keep(record.release());
            }
            _ => {
                failures.keep(if_gone(&record));
            }
        }
    }
    if let Some(req) = req {
        Record::sweep(network, &Owner::each(network, &req.valid));
    }
    failures.into_result()
}

/// Removes the other state of the owner of leases. The attachment being added, `next`, may have the same name: its record and its
/// source MAC check stay.
fn lease_owner(owner: Owner<'_>, ips: &[IpAddr], next: Option<Owner<'_>>) -> Result<()> {
    let _turn = Record::turn(owner)?;
    match Record::of(owner) {
        // By its own proof: the store of the leases may be in a folder of a tenant.
        Some(record) if record.is_gone() => attachment(owner, ips),
        _ if next == Some(owner) => rules(owner, ips, true),
        _ => Ok(()),
    }
}

/// Removes and returns the leases of attachments that have ended, with their other state. `failures` get the leases that cannot be
/// removed. `next` is the attachment being added.
pub fn in_store(
    store: &mut LeaseStore,
    next: Option<Owner<'_>>,
    failures: &mut Failures,
) -> Result<Vec<Reclaimed>> {
    let reclaimed = store.reclaim_dead(|network, gone| leases(network, gone, next, failures))?;
    for gone in &reclaimed {
        tell(format!("reclaimed {gone}"));
    }
    Ok(reclaimed)
}

/// Reclaims the other state of the owners of these leases, whose attachments have ended. Returns the leases that can be removed;
/// `failures` has the reasons for the others. `next` is the attachment being added.
pub fn leases(
    network: &str,
    mut gone: Vec<Reclaimed>,
    next: Option<Owner<'_>>,
    failures: &mut Failures,
) -> Vec<Reclaimed> {
    let mut reclaimed = Vec::new();
    while let Some(first) = gone.first().map(|gone| gone.lease.clone()) {
        let owner = first.owner(network);
        let is_same = |other: &mut Reclaimed| other.lease.owner(network) == owner;
        let same: Vec<Reclaimed> = gone.extract_if(.., is_same).collect();
        let ips: Vec<IpAddr> = same.iter().map(|gone| gone.lease.ip).collect();
        let Some(owner) = owner else { continue };
        let removed = lease_owner(owner, &ips, next)
            .context(|| format!("{first} stays: its rules cannot be removed"));
        if failures.keep(removed).is_some() {
            reclaimed.extend(same);
        }
    }
    reclaimed
}
