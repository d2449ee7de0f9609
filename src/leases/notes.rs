//! The journal's data on the attachments of leases, from which [`crate::attachment::liveness`] decides whether an attachment has
//! ended.

use std::fs::Metadata;
use std::net::IpAddr;

use super::journal;
use super::lease::{Lease, Reclaimed};
use super::lines::{self, Contents, Entry, FileId};
use crate::attachment::liveness::judge;
use crate::attachment::{Boot, Doubt, Evidence, HostEnd, Liveness, Made, Owner, Record};
use crate::files::dir::Dir;

/// The notes of a network's leases.
pub(super) struct Notes {
    contents: Contents,
    /// When a lease without an entry was made: another machine, that wrote the journal before, may have made it.
    unlisted: Made,
}

impl Notes {
    /// Reads the journal in `folder`, sealed or not, in the boot `current`.
    pub(super) fn read(folder: Option<&Dir>, current: &Boot) -> Notes {
        let text = folder.map(journal::read).unwrap_or_default();
        let mut contents = Contents::parse(&text);
        let written_in = lines::parse_header(&text);
        for entry in contents.entries.values_mut() {
            let made = |then: &Boot| then.made(current, entry.file.created());
            entry.made = match (entry.made, &written_in) {
                (Made::Now, Some(then)) => made(then),
                // Earlier than the boot in which the journal was written.
                (Made::Earlier, Some(then)) if made(then) != Made::Elsewhere => Made::Earlier,
                _ => Made::Elsewhere,
            };
        }
        let is_shared = written_in.is_some_and(|then| {
            !then.is_same_machine(current) && then.made(current, i64::MAX) != Made::Now
        });
        Notes { contents, unlisted: if is_shared { Made::Elsewhere } else { Made::Now } }
    }

    /// The entry of a lease with the file `meta`. A lease without an entry, made by the reference, gets one
    /// now: after the next boot the lease is known to be of an earlier boot.
    pub(super) fn entry(&self, lease: &Lease, meta: &Metadata) -> Entry {
        let file = FileId::of(meta);
        let noted = self.contents.entries.get(&lease.ip);
        noted
            .filter(|entry| entry.lease == *lease && entry.file == file)
            .cloned()
            .unwrap_or_else(|| Entry { lease: lease.clone(), file, end: None, made: self.unlisted })
    }

    /// What the journal tells, without reading the leases.
    pub(super) fn into_contents(self) -> Contents {
        self.contents
    }

    /// The previous lease of the address, if it was reclaimed.
    pub(super) fn reclaimed(&self, ip: IpAddr) -> Option<Reclaimed> {
        self.contents.removals.get(&ip)?.reclaimed.clone()
    }
}

/// Whether the attachment of each entry of `network` exists, in order. A lease without an interface names no attachment: its file
/// may be a reservation by an administrator.
pub(super) fn judge_all(network: &str, entries: &[Entry]) -> Vec<Liveness> {
    let mut evidence = Vec::with_capacity(entries.len());
    for entry @ Entry { lease, end, made, .. } in entries {
        let ifname = lease.ifname.as_deref().unwrap_or_default();
        let owner = Owner { network, ifname, id: &lease.id };
        evidence.push(Evidence {
            owner,
            made: *made,
            end: end.or_else(|| noted_end(owner, entry)),
        });
    }
    let lives = judge(&evidence).into_iter().zip(entries);
    let names_none = |entry: &Entry| entry.lease.ifname.is_none();
    let doubt = Liveness::Unknown(Doubt::NoRecord);
    lives.map(|(life, entry)| if names_none(entry) { doubt } else { life }).collect()
}

/// The end in the attachment's record: a plugin of another program tells host-local nothing of its link, but the plugins after it
/// see the link in its result. A record that is older than the lease may be of an earlier container with the same id.
fn noted_end(owner: Owner<'_>, Entry { lease, file, .. }: &Entry) -> Option<HostEnd> {
    let record = Record::of(owner)?;
    let is_its = record.created >= file.created() && record.ips.contains(&lease.ip);
    record.end.filter(|_| is_its)
}
