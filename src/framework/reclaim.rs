//! Reclaims all state that a dead attachment left on the node. A call that finds a part of this
//! state in use reclaims the whole, because stale rules would apply to the next owner of the
//! address.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use serde::Serialize;

use super::context::{CallContext, KnownRecord};
use super::plugin::{AddRequest, GcRequest};
use super::rollback::{Failures, Rollback};
use super::turn::AttachmentTurn;
use crate::attachment::{
    AttachmentId, AttachmentRecord, HostVeth, Liveness, RecordStore, UnknownBecause, log_unrecorded,
};
use crate::iface::peer;
use crate::leases::{DATA_DIR, LeaseListing, LeaseOptions, LeaseStore, ReclaimedLease};
use crate::netfilter::{PacketFilter, reconcile, spoof};
use crate::netlink::Netlink;
use crate::trace;
use cni::error::{Error, ErrorContext, Result};
use cni::json::Json;
use cni::{CniResult, NetworkName};

/// Removes the state of an attachment that has certainly ended and had these addresses from the
/// calling thread's network namespace. The caller has the [turn](super::turn).
pub fn remove_attachment_state(owner: AttachmentId<'_>, ips: &[IpAddr]) -> Result<()> {
    remove_rules_and_devices(owner, ips, false)?;
    // The record is removed last, so that the owner of remaining state is known.
    AttachmentRecord::find_by_attachment(owner)
        .map_or(Ok(()), |record| record.remove_with_addresses())
}

/// Removes the rules of all features, and the devices. The source MAC check of an attachment that
/// `is_being_added` stays: ADD creates it before it requests addresses.
fn remove_rules_and_devices(
    owner: AttachmentId<'_>,
    ips: &[IpAddr],
    is_being_added: bool,
) -> Result<()> {
    let packets = PacketFilter::new();
    let mut failures = Failures::new();
    for feature in packets.features {
        if !is_being_added || feature.state.kept != spoof::RECORDS {
            failures.keep_error((feature.remove)(&packets, owner, ips));
        }
    }
    failures.keep_error(remove_shaping_devices(owner));
    failures.into_result()
}

/// Removes the ifb devices that shaped the attachment's traffic.
fn remove_shaping_devices(owner: AttachmentId<'_>) -> Result<()> {
    let host = Netlink::open()?;
    let mut failures = Failures::new();
    for link in host.dump_links()? {
        if link.kind.as_deref() == Some("ifb") && owner.owns_comment(Some(&link.alias)) {
            failures.keep_error(host.delete_link_by_index(link.index).map_err(Error::from));
        }
    }
    failures.into_result()
}

impl<'a> CallContext<'a> {
    /// Records the attachment on the node, before the first state is created that outlives the
    /// container. The record of an earlier plugin of the list is sufficient.
    pub fn record_attachment(
        &self,
        plugin: &str,
        req: &AddRequest,
        result: &CniResult,
        undo: &mut Rollback<'a>,
    ) {
        self.write_record(plugin, req, result, None, undo);
    }

    /// Like [`CallContext::record_attachment`]; adds a part, as [`RecordStore::add_part`] does, by
    /// the same write.
    pub fn record_with_part<T: Serialize>(
        &self,
        plugin: &str,
        req: &AddRequest,
        result: &CniResult,
        (kept, content): (RecordStore, T),
        undo: &mut Rollback<'a>,
    ) {
        self.write_record(plugin, req, result, Some((kept, Json::encode(&content))), undo);
    }

    fn write_record(
        &self,
        plugin: &str,
        req: &AddRequest,
        result: &CniResult,
        part: Option<(RecordStore, Json)>,
        undo: &mut Rollback<'a>,
    ) {
        let owner = AttachmentId::new(&self.net.name, &req.id, &req.ifname);
        let known = self.record.take();
        if req.prev.is_some() && (known == KnownRecord::Current || self.has_record(owner, req)) {
            if let Some((kept, content)) = part {
                kept.add_part(owner, content);
            }
            return;
        }
        let mut record = AttachmentRecord {
            netns: req.sandbox.netns_identity(),
            end: self.host_end().or_else(|| self.find_listed_end(owner, req, result)),
            ips: result.all_addresses().iter().map(IpNet::addr).collect(),
            ipam: self.net.ipam_type.clone(),
            data_dir: self.configured_data_dir(),
            ..AttachmentRecord::new(owner, plugin, &req.sandbox.path)
        };
        let former = if known == KnownRecord::Absent {
            None
        } else {
            AttachmentRecord::find_by_attachment(owner)
        };
        if let Some(same) = former.as_ref().filter(|former| former.is_same_instance(&record)) {
            record.rules.clone_from(&same.rules);
        }
        let kept = part.map(|(kept, content)| {
            record.rules.insert(kept.0.to_owned(), content);
            kept
        });
        let record_now = || -> Result<()> {
            former.as_ref().map_or_else(
                || record.save_with_addresses(),
                |former| record.replace_record(former),
            )?;
            Ok(kept.map_or(Ok(()), |kept| kept.link_part(owner))?)
        };
        if let Err(e) = record_now() {
            log_unrecorded(format_args!(
                "could not record the attachment: {e}; if the container dies without a DEL, its \
                 state is not reclaimed"
            ));
        }
        undo.add_step("forget the attachment", move || {
            record.remove_with_addresses()?;
            match former {
                Some(former) if former.is_same_instance(&record) => former.save_with_addresses(),
                Some(former) => restore_instance(&former),
                None => Ok(()),
            }
        });
    }

    /// `ipam.dataDir`, if configured.
    fn configured_data_dir(&self) -> Option<PathBuf> {
        let dir =
            self.net.json.get_member("ipam").and_then(|ipam| ipam.get_member("dataDir")?.as_str());
        dir.filter(|dir| !dir.is_empty()).map(PathBuf::from)
    }

    /// At the start of an ADD, which has the turn: removes what an earlier container of the same id
    /// left, if that container has certainly ended. From then on nobody takes the new container
    /// for the earlier one.
    pub(super) fn end_former_instance(&self, owner: AttachmentId<'_>, req: &AddRequest) {
        let Some(record) = AttachmentRecord::find_by_attachment(owner) else {
            return self.record.set(KnownRecord::Absent);
        };
        let Ok(host) = self.host_netlink() else { return };
        match record.liveness_by(host) {
            Liveness::Gone(_) => {
                let removed =
                    remove_proved_leases(&record, Some(owner)).and_then(|()| remove_ended(&record));
                removed.map_or_else(|error| warn!("{error}"), drop);
            }
            life if is_of_container(&record, life, req) => self.record.set(KnownRecord::Current),
            _ => {}
        }
    }

    /// Whether the plugin calls an IPAM plugin whose leases are for the MAC of the interface: the
    /// attachment is recorded for the plugins that follow.
    pub(super) fn has_mac_lease(&self, plugin: &str) -> bool {
        self.ipam_needs_link() && plugin != self.net.ipam_type
    }

    /// Records the attachment if it [is leased](CallContext::has_mac_lease), unless the plugin has
    /// recorded it already.
    pub(super) fn record_if_leased(
        &self,
        plugin: &str,
        req: &AddRequest,
        result: &CniResult,
        undo: &mut Rollback<'a>,
    ) {
        let owner = AttachmentId::new(&self.net.name, &req.id, &req.ifname);
        if self.has_mac_lease(plugin) && !self.has_record(owner, req) {
            self.record_attachment(plugin, req, result, undo);
        }
    }

    /// The host's end of the pair that an earlier plugin of the list has created; the plugin may be
    /// another program's.
    fn find_listed_end(
        &self,
        owner: AttachmentId<'_>,
        req: &AddRequest,
        result: &CniResult,
    ) -> Option<HostVeth> {
        let host = self.host_netlink().ok()?;
        let ends =
            req.sandbox.open_netns().and_then(|netns| peer::find_listed_ends(host, netns, result));
        match ends.unwrap_or_default().as_slice() {
            [end] => HostVeth::from_link(owner, host, end),
            _ => None,
        }
    }

    /// Whether the attachment has a record already, of this container rather than of an earlier one
    /// with the same id.
    fn has_record(&self, owner: AttachmentId<'_>, req: &AddRequest) -> bool {
        AttachmentRecord::find_by_attachment(owner).is_some_and(|record| {
            self.host_netlink()
                .is_ok_and(|host| is_of_container(&record, record.liveness_by(host), req))
        })
    }
}

/// Whether the record, whose attachment has this liveness, is of the container of the ADD.
fn is_of_container(record: &AttachmentRecord, life: Liveness, req: &AddRequest) -> bool {
    let may_exist = matches!(life, Liveness::Alive | Liveness::Unknown(UnknownBecause::NoHostEnd));
    may_exist && record.netns == req.sandbox.netns_identity()
}

/// Restores the record and the rules of an instance after another ADD with the same names has
/// failed.
fn restore_instance(record: &AttachmentRecord) -> Result<()> {
    record.save_with_addresses()?;
    let packets = PacketFilter::new();
    for kept in packets.features.iter().map(|feature| feature.state.kept) {
        if record.rules.contains_key(kept.0) {
            kept.link_part(record.attachment_id())?;
        }
    }
    Error::join_all(reconcile::restore_all(&packets))
}

/// Reclaims the state of the address's previous owners that have certainly ended. Warns if an owner
/// in the same network still exists.
pub fn remove_ended_owners(ip: IpAddr, next: AttachmentId<'_>) -> Result<()> {
    for record in AttachmentRecord::find_others_by_address(ip, next) {
        if !remove_if_ended(&record)?
            && record.network == next.network
            && record.liveness() == Liveness::Alive
        {
            let AttachmentRecord { id, ifname, .. } = &record;
            warn!("{ip} is also in use by container {id}, interface {ifname}");
        }
    }
    Ok(())
}

/// Reclaims the state of the attachment if it has certainly ended. Returns whether it has. The
/// caller may have another attachment's turn, but no lock of leases.
pub fn remove_if_ended(record: &AttachmentRecord) -> Result<bool> {
    if !record.is_gone() {
        return Ok(false);
    }
    remove_proved_leases(record, None)?;
    let _lock = AttachmentTurn::take(record.attachment_id())?;
    remove_ended(record)
}

/// Removes the leases whose end only this record proves, that of an attachment that has ended: they
/// were made for another program's plugin. `next` is the attachment being added.
fn remove_proved_leases(record: &AttachmentRecord, next: Option<AttachmentId<'_>>) -> Result<()> {
    if record.end.is_none_or(|end| end.labelled) {
        return Ok(());
    }
    NetworkName::parse(&record.network)?;
    let dir = record.data_dir.as_deref().unwrap_or(Path::new(DATA_DIR));
    let store = LeaseStore::open_existing(dir, &record.network, LeaseOptions::default())?;
    let mut failures = Failures::new();
    store.map_or(Ok(Vec::new()), |mut store| {
        reclaim_leases(
            &mut store,
            &|gone| gone.lease.attachment_in(&record.network) == Some(record.attachment_id()),
            next,
            &mut failures,
        )
    })?;
    failures.into_result()
}

/// Removes the state of an attachment that has ended, without its leases, unless a later instance
/// has the record. Returns whether it was removed. The caller has the turn.
fn remove_ended(record: &AttachmentRecord) -> Result<bool> {
    let Liveness::Gone(why) = record.liveness() else { return Ok(false) };
    match AttachmentRecord::find_by_attachment(record.attachment_id()) {
        Some(now) if now.is_same_instance(record) => {}
        Some(_) => return Ok(false),
        // Removed meanwhile. A later instance has no rules before its own record.
        None => return Ok(true),
    }
    let AttachmentRecord { id, ifname, network, .. } = record;
    remove_attachment_state(record.attachment_id(), &record.ips)
        .map_err(|e| e.context(format!("remove what container \"{id}\" left, which is gone")))?;
    log_reclaimed(format!(
        "removed what container \"{id}\" left (network \"{network}\", interface \"{ifname}\"): \
         {why}"
    ));
    Ok(true)
}

/// Logs what was reclaimed, and adds it to the call's trace.
pub fn log_reclaimed(what: String) {
    warn!("{}", &what);
    trace::root_span().add_text("cnibox.reclaimed", || what);
}

/// The plugin whose leases are in directories of this node.
pub const HOST_LOCAL: &str = "host-local";

/// Releases the leases of an attachment that is being deleted in the directory that ADD has
/// recorded and in the default one, but not in the directories `done`: the configuration may have
/// been changed since.
pub fn release_recorded_leases(owner: AttachmentId<'_>, done: &[&Path]) -> Result<()> {
    let recorded = AttachmentRecord::find_by_attachment(owner).and_then(|record| record.data_dir);
    let recorded = recorded.as_deref().filter(|dir| *dir != Path::new(DATA_DIR));
    let dirs = recorded.into_iter().chain([Path::new(DATA_DIR)]);
    let mut failures = Failures::new();
    for dir in dirs.filter(|dir| !done.contains(dir)) {
        let store = LeaseStore::open_existing(dir, owner.network, LeaseOptions::default());
        let released =
            store.map(|store| store.map_or(Ok(Vec::new()), |mut it| it.release_attachment(owner)));
        for ip in failures.keep_error(released.and_then(|released| released)).unwrap_or_default() {
            warn!("released {ip}, whose lease is in {}", dir.display());
        }
    }
    failures.into_result()
}

/// Releases the addresses that a failed ADD has reserved in the directory of its configuration.
pub(super) fn release_addresses(
    cx: &CallContext<'_>,
    owner: AttachmentId<'_>,
    ips: &[IpAddr],
) -> Result<()> {
    let dir = cx.configured_data_dir();
    let dir = dir.as_deref().unwrap_or(Path::new(DATA_DIR));
    let Some(mut store) = LeaseStore::open_existing(dir, owner.network, LeaseOptions::default())?
    else {
        return Ok(());
    };
    let mut failures = Failures::new();
    for ip in ips {
        failures.keep_error(store.release_address(*ip, owner));
    }
    failures.into_result()
}

/// Whether an attachment exists, by its record, else by its leases in the directory `data_dir`.
pub fn attachment_liveness(owner: AttachmentId<'_>, data_dir: &Path) -> Liveness {
    if let Some(record) = AttachmentRecord::find_by_attachment(owner) {
        return record.liveness();
    }
    let listing = LeaseListing::open_existing(data_dir, owner.network);
    let leases = listing.ok().flatten().map(|listing| listing.lease_statuses()).unwrap_or_default();
    leases
        .iter()
        .find(|status| status.lease.attachment_in(owner.network) == Some(owner))
        .map_or(Liveness::Unknown(UnknownBecause::NoRecord), |its| its.liveness)
}

/// GC: removes this plugin's records of stale attachments, whose state the plugin has removed; the
/// parts of a record by which the next plugins find their rules stay. Then reclaims attachments
/// that have certainly ended, except for those that the runtime lists as valid. Without a request
/// only attachments that have certainly ended are reclaimed.
pub(super) fn collect_garbage(
    plugin: &str,
    network: &NetworkName,
    req: Option<&GcRequest>,
) -> Result<()> {
    let mut failures = Failures::new();
    for record in AttachmentRecord::read_all(Some(network.as_str())) {
        match req {
            Some(req) if req.is_valid_attachment(&record.id, &record.ifname) => {}
            Some(_) if record.plugin == plugin => {
                failures.keep_error(record.release_from_plugin());
            }
            _ => {
                failures.keep_error(remove_if_ended(&record));
            }
        }
    }
    if let Some(req) = req {
        AttachmentRecord::remove_leftovers(
            network,
            &AttachmentId::from_attachments(network, &req.valid),
        );
    }
    failures.into_result()
}

/// Removes the state of the owner of leases, except for the leases. Returns whether nothing is left:
/// what another call is changing is left to that call; it is an error of an ADD, which lacks an
/// address. The attachment being added, `next`, may have the same names: its record and its source
/// MAC check stay.
fn remove_lease_owner_state(
    owner: AttachmentId<'_>,
    ips: &[IpAddr],
    next: Option<AttachmentId<'_>>,
) -> Result<bool> {
    let is_next = next == Some(owner);
    let _turn = match AttachmentTurn::take_at_once(owner) {
        // The attachment being added has the turn of its names.
        _ if is_next => None,
        Err(busy) if next.is_none() => {
            debug!("{busy}");
            return Ok(false);
        }
        turn => turn?,
    };
    match AttachmentRecord::find_by_attachment(owner) {
        // The record proves the end; the lease does not, because its store may be in a directory of
        // a tenant.
        Some(record) if record.is_gone() => remove_attachment_state(owner, ips),
        _ if is_next => remove_rules_and_devices(owner, ips, true),
        _ => Ok(()),
    }?;
    Ok(true)
}

/// Removes and returns the leases of attachments that have ended, with their other state.
/// `failures` get the leases that cannot be removed. `next` is the attachment being added.
pub fn remove_ended_leases(
    store: &mut LeaseStore,
    next: Option<AttachmentId<'_>>,
    failures: &mut Failures,
) -> Result<Vec<ReclaimedLease>> {
    reclaim_leases(store, &|_| true, next, failures)
}

/// As [`remove_ended_leases`], for the leases that `which` selects.
fn reclaim_leases(
    store: &mut LeaseStore,
    which: &dyn Fn(&ReclaimedLease) -> bool,
    next: Option<AttachmentId<'_>>,
    failures: &mut Failures,
) -> Result<Vec<ReclaimedLease>> {
    let reclaimed = store.reclaim_ended(|network, mut gone| {
        gone.retain(which);
        remove_lease_owners(network, gone, next, failures)
    })?;
    for gone in &reclaimed {
        log_reclaimed(format!("reclaimed {gone}"));
    }
    Ok(reclaimed)
}

/// Reclaims the other state of the owners of these leases, whose attachments have ended. Returns
/// the leases that can be removed; `failures` gets the reasons for the others. `next` is the
/// attachment being added.
pub fn remove_lease_owners(
    network: &str,
    mut gone: Vec<ReclaimedLease>,
    next: Option<AttachmentId<'_>>,
    failures: &mut Failures,
) -> Vec<ReclaimedLease> {
    let mut reclaimed = Vec::new();
    while let Some(first) = gone.first().map(|gone| gone.lease.clone()) {
        let owner = first.attachment_in(network);
        let same: Vec<ReclaimedLease> =
            gone.extract_if(.., |other| other.lease.attachment_in(network) == owner).collect();
        let ips: Vec<IpAddr> = same.iter().map(|gone| gone.lease.ip).collect();
        let Some(owner) = owner else { continue };
        let removed = remove_lease_owner_state(owner, &ips, next)
            .context(|| format!("{first} stays: its rules cannot be removed"));
        if failures.keep_error(removed).unwrap_or_default() {
            reclaimed.extend(same);
        }
    }
    reclaimed
}
