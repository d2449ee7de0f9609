//! The journal's data on the attachments of leases, from which [`crate::attachment::liveness`] decides whether an attachment has
//! ended.

use std::fs::Metadata;

use super::journal;
use super::lease::Lease;
use super::lines::{self, Contents, Entry, FileId};
use crate::attachment::liveness::judge;
use crate::attachment::{Boot, Doubt, Evidence, HostEnd, Liveness, Made, Owner, Record};
use crate::files::dir::Dir;

impl Contents {
    /// Reads the journal in `folder`, sealed or not, in the boot `current`.
    pub(super) fn read(folder: Option<&Dir>, current: &Boot) -> Contents {
        let text = folder.map(journal::read).unwrap_or_default();
        let mut contents = Contents { unlisted: Made::Now, ..Contents::parse(&text) };
        let Some(then) = lines::parse_header(&text) else { return contents };
        for entry in contents.entries.values_mut() {
            entry.made = match (entry.made, then.made(current, entry.file.created())) {
                (Made::Now, made) => made,
                // Earlier than the boot in which the journal was written.
                (Made::Earlier, Made::Now | Made::Earlier) => Made::Earlier,
                _ => Made::Elsewhere,
            };
        }
        if !then.is_same_machine(current) && then.made(current, i64::MAX) != Made::Now {
            contents.unlisted = Made::Elsewhere;
        }
        contents
    }

    /// The entry of a lease with the file `meta`. A lease without an entry, made by the reference, gets one
    /// now: after the next boot the lease is known to be of an earlier boot.
    pub(super) fn entry(&self, lease: &Lease, meta: &Metadata) -> Entry {
        let file = FileId::of(meta);
        let noted = self.entries.get(&lease.ip);
        noted
            .filter(|entry| entry.lease == *lease && entry.file == file)
            .cloned()
            .unwrap_or_else(|| Entry { lease: lease.clone(), file, end: None, made: self.unlisted })
    }

    /// Whether the attachments of the leases of `network` exist, in order.
    pub(super) fn judge(&self, network: &str, leases: &[(Lease, Metadata)]) -> Vec<Liveness> {
        let entries: Vec<_> = leases.iter().map(|(lease, meta)| self.entry(lease, meta)).collect();
        judge_all(network, &entries)
    }
}

/// Whether the attachment of each entry of `network` exists, in order. A lease without an interface names no attachment: its file
/// may be a reservation by an administrator.
pub(super) fn judge_all(network: &str, entries: &[Entry]) -> Vec<Liveness> {
    let evidence = entries.iter().map(|entry| {
        let Lease { id, ifname, .. } = &entry.lease;
        let owner = Owner { network, ifname: ifname.as_deref().unwrap_or_default(), id };
        let end = entry.end.or_else(|| noted_end(owner, entry));
        Evidence { owner, made: entry.made, end }
    });
    let lives = judge(&evidence.collect::<Vec<_>>());
    let names_none = |entry: &Entry| entry.lease.ifname.is_none();
    let doubt = Liveness::Unknown(Doubt::NoRecord);
    let lives = lives.into_iter().zip(entries);
    lives.map(|(life, entry)| if names_none(entry) { doubt } else { life }).collect()
}

/// The end in the attachment's record: a plugin of another program tells host-local nothing of its link, but the plugins after it
/// see the link in its result. A record that is older than the lease may be of an earlier container with the same id.
fn noted_end(owner: Owner<'_>, Entry { lease, file, .. }: &Entry) -> Option<HostEnd> {
    let record = Record::of(owner)?;
    let is_its = record.created >= file.created() && record.ips.contains(&lease.ip);
    record.end.filter(|_| is_its)
}
