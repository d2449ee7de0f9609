//! The journal's data on the attachments of leases, from which [`crate::attachment::liveness`] decides whether an
//! attachment has ended.

use std::fs::Metadata;

use super::journal;
use super::lease::AddressLease;
use super::lines::{self, JournalContents, JournalEntry, LeaseFileId};
use crate::attachment::liveness::judge_liveness;
use crate::attachment::{
    AttachmentId, AttachmentRecord, BootIdentity, BootRelation, HostPairEnd, Liveness, LivenessDoubt, LivenessEvidence,
};
use crate::files::dir::OpenDirectory;

impl JournalContents {
    /// Reads the journal in `directory`, sealed or not, in the boot `current`.
    pub(super) fn read_journal(directory: Option<&OpenDirectory>, current: &BootIdentity) -> JournalContents {
        let text = directory.map(journal::read_journal_text).unwrap_or_default();
        let mut contents = JournalContents { unlisted: BootRelation::Now, ..JournalContents::parse(&text) };
        let Some(then) = lines::parse_header(&text) else { return contents };
        for entry in contents.entries.values_mut() {
            entry.made = match (entry.made, then.relation_to(current, entry.file.creation_time())) {
                (BootRelation::Now, made) => made,
                // An earlier boot than the one in which the journal was written.
                (BootRelation::Earlier, BootRelation::Now | BootRelation::Earlier) => BootRelation::Earlier,
                _ => BootRelation::Elsewhere,
            };
        }
        if !then.is_same_machine(current) && then.relation_to(current, i64::MAX) != BootRelation::Now {
            contents.unlisted = BootRelation::Elsewhere;
        }
        contents
    }

    /// The entry of a lease with the file `meta`, or a new entry for a lease that the reference created: after the next
    /// boot the lease is known to be of an earlier boot.
    pub(super) fn entry_of_lease(&self, lease: &AddressLease, meta: &Metadata) -> JournalEntry {
        let file = LeaseFileId::from_metadata(meta);
        let noted = self.entries.get(&lease.ip);
        noted.filter(|entry| entry.lease == *lease && entry.file == file).cloned().unwrap_or_else(|| JournalEntry {
            lease: lease.clone(),
            file,
            end: None,
            made: self.unlisted,
        })
    }

    /// Whether the attachments of the leases of `network` exist, in order.
    pub(super) fn judge_leases(&self, network: &str, leases: &[(AddressLease, Metadata)]) -> Vec<Liveness> {
        let entries: Vec<_> = leases.iter().map(|(lease, meta)| self.entry_of_lease(lease, meta)).collect();
        judge_entries(network, &entries)
    }
}

/// Whether the attachment of each entry of `network` exists, in order. A lease without an interface names no
/// attachment: its file may be a reservation by an administrator.
pub(super) fn judge_entries(network: &str, entries: &[JournalEntry]) -> Vec<Liveness> {
    let evidence = entries.iter().map(|entry| {
        let AddressLease { id, ifname, .. } = &entry.lease;
        let owner = AttachmentId { network, ifname: ifname.as_deref().unwrap_or_default(), id };
        let end = entry.end.or_else(|| recorded_host_end(owner, entry));
        LivenessEvidence { owner, made: entry.made, end }
    });
    let lives = judge_liveness(&evidence.collect::<Vec<_>>());
    let names_none = |entry: &JournalEntry| entry.lease.ifname.is_none();
    let doubt = Liveness::Unknown(LivenessDoubt::NoRecord);
    let lives = lives.into_iter().zip(entries);
    lives.map(|(life, entry)| if names_none(entry) { doubt } else { life }).collect()
}

/// The host's end in the attachment's record. A plugin of another program does not pass its link to host-local, but the
/// plugins that follow it find the link in its result and record it. A record that is older than the lease may be of an
/// earlier container with the same id, and does not count.
fn recorded_host_end(owner: AttachmentId<'_>, JournalEntry { lease, file, .. }: &JournalEntry) -> Option<HostPairEnd> {
    let record = AttachmentRecord::find_by_attachment(owner)?;
    let is_its = record.created >= file.creation_time() && record.ips.contains(&lease.ip);
    record.end.filter(|_| is_its)
}
