//! The journal's data on the attachments of leases, from which [`crate::attachment::liveness`]
//! decides whether an attachment has ended.

use std::fs::Metadata;
use std::net::IpAddr;
use std::rc::Rc;

use super::journal;
use super::lease::AddressLease;
use super::lines::{JournalContents, JournalEntry, LeaseFileId};
use crate::attachment::liveness::judge_liveness;
use crate::attachment::{
    AttachmentId, AttachmentRecord, BootIdentity, BootRelation, HostVeth, Liveness,
    LivenessEvidence, UnknownBecause,
};
use crate::files::dir::OpenDirectory;

impl JournalContents {
    /// Reads the journal in `directory`, sealed or not, in the boot `current`.
    pub(super) fn read_journal(
        directory: Option<&OpenDirectory>,
        current: &Rc<BootIdentity>,
    ) -> JournalContents {
        let text = directory.map(journal::read_journal_text).unwrap_or_default();
        let mut contents = JournalContents::parse(&text);
        let is_current =
            |then: &BootIdentity| then.relation_to(current, i64::MAX) == BootRelation::Now;
        if contents
            .written_in
            .as_deref()
            .is_none_or(|then| then.is_same_machine(current) || is_current(then))
        {
            contents.unlisted = Some(Rc::clone(current));
        }
        contents
    }

    /// The entry of a lease with the file `meta`, or a new entry for a lease that the reference
    /// created: after the next boot the lease is known to be of an earlier boot.
    pub(super) fn entry_of_lease(&self, lease: &AddressLease, meta: &Metadata) -> JournalEntry {
        let noted = self.entry_of_file(lease.ip, meta);
        noted.filter(|entry| entry.lease == *lease).cloned().unwrap_or_else(|| JournalEntry {
            lease: lease.clone(),
            file: LeaseFileId::from_metadata(meta),
            end: None,
            boot: self.unlisted.clone(),
        })
    }

    /// The entry of the file `meta` with the name `ip`, which may have lost its text.
    pub(super) fn entry_of_file(&self, ip: IpAddr, meta: &Metadata) -> Option<&JournalEntry> {
        self.entries.get(&ip).filter(|entry| entry.file == LeaseFileId::from_metadata(meta))
    }

    /// Whether a lease that lost its text was certainly created in an earlier boot.
    pub(super) fn is_of_earlier_boot(
        &self,
        ip: IpAddr,
        meta: &Metadata,
        current: &BootIdentity,
    ) -> bool {
        let created = LeaseFileId::from_metadata(meta).creation_time();
        let boot = match self.entry_of_file(ip, meta) {
            Some(entry) => entry.boot.as_ref(),
            // What lost the text may have lost the entry, too. The first command in another boot,
            // or on another machine, writes a new journal: what was created after the
            // first line was created in the boot of this line.
            None => {
                self.written_in.as_ref().filter(|_| self.written_at.is_some_and(|at| created >= at))
            }
        };
        boot.is_some_and(|boot| boot.relation_to(current, created) == BootRelation::Earlier)
    }

    /// Whether the attachments of the leases of `network` exist, in order.
    pub(super) fn judge_leases(
        &self,
        network: &str,
        leases: &[(AddressLease, Metadata)],
        current: &BootIdentity,
    ) -> Vec<Liveness> {
        let entries: Vec<_> =
            leases.iter().map(|(lease, meta)| self.entry_of_lease(lease, meta)).collect();
        judge_entries(network, &entries, current)
    }
}

/// Whether the attachment of each entry of `network` exists, in order. A lease without an interface
/// names no attachment: its file may be a reservation by an administrator.
pub(super) fn judge_entries(
    network: &str,
    entries: &[JournalEntry],
    current: &BootIdentity,
) -> Vec<Liveness> {
    let evidence = entries.iter().map(|entry| {
        let AddressLease { id, ifname, .. } = &entry.lease;
        let owner = AttachmentId { network, ifname: ifname.as_deref().unwrap_or_default(), id };
        let end = entry.end.or_else(|| recorded_host_end(owner, entry));
        let made = |then: &Rc<BootIdentity>| then.relation_to(current, entry.file.creation_time());
        let made = entry.boot.as_ref().map_or(BootRelation::Elsewhere, made);
        LivenessEvidence { owner, made, end }
    });
    let lives = judge_liveness(&evidence.collect::<Vec<_>>());
    let names_none = |entry: &JournalEntry| entry.lease.ifname.is_none();
    let doubt = Liveness::Unknown(UnknownBecause::NoRecord);
    let lives = lives.into_iter().zip(entries);
    lives.map(|(life, entry)| if names_none(entry) { doubt } else { life }).collect()
}

/// The host's end in the attachment's record. A plugin of another program does not pass its link to
/// host-local, but the plugins that follow it find the link in its result and record it. A record
/// that is older than the lease may be of an earlier container with the same id, and does not
/// count.
fn recorded_host_end(
    owner: AttachmentId<'_>,
    JournalEntry { lease, file, .. }: &JournalEntry,
) -> Option<HostVeth> {
    let record = AttachmentRecord::find_by_attachment(owner)?;
    let is_its = record.created >= file.creation_time() && record.ips.contains(&lease.ip);
    record.end.filter(|_| is_its)
}
