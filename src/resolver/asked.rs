//! The names that containers asked for, in a file for each container: written by the resolver, read
//! by `cnibox egress`.
//!
//! ```text
//! /run/cni/cnibox/egress-names/<instance>.json
//! ```
//!
//! A container decides what is in it, so its size is bounded.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::attachment::AttachmentId;
use crate::attachment::file::{create_directory, instance_of_file, record_directory, record_path};
use crate::netfilter::egress::RECORDS;
use cni::error::Result;
use cni::files::atomic::{AtomicWriter, Durability, remove_stale_temporaries};
use cni::files::{self, FileOperationContext, remove_file};

/// The directory of the files, beside those of records.
const DIRECTORY: &str = "egress-names";
/// The maximum number of names of a container.
const MOST_NAMES: usize = 64;
/// The maximum number of addresses of a name.
const MOST_ADDRESSES: usize = 16;
/// Limit of a file's size in bytes: no file that the resolver writes is larger.
const MAX_BYTES: usize = 1 << 18;

/// What became of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NameVerdict {
    /// The policies do not allow the name; or, with addresses, it must not lead to these.
    Refused,
    /// It was answered, in the mode audit.
    Noted,
}

/// A name that a container asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskedName {
    /// In lower case, without the final dot.
    pub name: String,
    /// The addresses that were refused, or in the mode audit those that were answered.
    pub addresses: Vec<IpAddr>,
    /// The number of queries.
    pub count: u64,
    /// The time of the last query, in seconds since 1970.
    pub last: u64,
    pub verdict: NameVerdict,
}

/// The names of an attachment, the last one first; none if the resolver has noted nothing.
pub fn read_asked_names(owner: AttachmentId<'_>) -> Vec<AskedName> {
    let mut names = AskedNames::load(&owner.instance_id()).names;
    names.sort_by_key(|asked| std::cmp::Reverse(asked.last));
    names
}

/// The names of a container.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct AskedNames {
    names: Vec<AskedName>,
}

impl AskedNames {
    /// The names that an earlier resolver has written. A file that cannot be read counts as empty.
    pub fn load(instance: &str) -> AskedNames {
        let text = files::read_regular_file(&record_path(DIRECTORY, instance), MAX_BYTES);
        let names = text.ok().and_then(|text| serde_json::from_slice(&text).ok());
        AskedNames { names: names.unwrap_or_default() }
    }

    /// Notes a query at `now`, in seconds since 1970. The name that was asked for the longest time
    /// ago gives way to a new one. Returns whether the name, or an address, was not noted before.
    pub fn note(
        &mut self,
        name: &str,
        addresses: &[IpAddr],
        verdict: NameVerdict,
        now: u64,
    ) -> bool {
        let is_it = |asked: &AskedName| asked.name == name && asked.verdict == verdict;
        let at = self.names.iter().position(is_it).unwrap_or_else(|| {
            if self.names.len() >= MOST_NAMES {
                let oldest = self.names.iter().enumerate().min_by_key(|(_, asked)| asked.last);
                self.names.remove(oldest.map_or(0, |(at, _)| at));
            }
            let name = name.to_owned();
            self.names.push(AskedName {
                name,
                addresses: Vec::new(),
                count: 0,
                last: now,
                verdict,
            });
            self.names.len() - 1
        });
        let asked = &mut self.names[at];
        let mut is_new = asked.count == 0;
        asked.count += 1;
        asked.last = now;
        for addr in addresses {
            if !asked.addresses.contains(addr) && asked.addresses.len() < MOST_ADDRESSES {
                asked.addresses.push(*addr);
                is_new = true;
            }
        }
        is_new
    }

    /// Writes the file of the attachment.
    pub fn save(&self, instance: &str) -> Result<()> {
        let path = record_path(DIRECTORY, instance);
        create_directory(&record_directory(DIRECTORY))?;
        let text = serde_json::to_vec(&self.names).map_err(io::Error::from);
        let text = text.during("write", &path)?;
        let writer = AtomicWriter::with_unique_name(&path, Durability::Volatile);
        Ok(writer.replace_file(&path, &text, 0o600)?)
    }
}

/// Removes the file of an attachment that has ended.
pub fn forget_names(instance: &str) -> Result<()> {
    Ok(remove_file(&record_path(DIRECTORY, instance))?)
}

/// Removes the files of attachments that ended while no resolver ran.
pub fn forget_ended_attachments() -> Result<()> {
    let directory = record_directory(DIRECTORY);
    create_directory(&directory)?;
    remove_stale_temporaries(&directory);
    for entry in fs::read_dir(&directory).during("read", &directory)? {
        let name = entry.during("read", Path::new(&directory))?.file_name();
        if let Some(instance) = instance_of_file(&name)
            && !RECORDS.has_instance(instance)
        {
            forget_names(instance)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_container_cannot_grow_its_log() {
        let mut log = AskedNames::default();
        let filler = "x".repeat(240);
        for number in 0..10_000_u32 {
            let ip = IpAddr::from(number.to_be_bytes());
            log.note(&format!("{number}.{filler}"), &[], NameVerdict::Refused, number.into());
            log.note("evil.example.org", &[ip], NameVerdict::Refused, number.into());
        }
        assert_eq!(log.names.len(), MOST_NAMES);
        let evil = log.names.iter().find(|asked| asked.name == "evil.example.org").unwrap();
        assert_eq!((evil.count, evil.last, evil.addresses.len()), (10_000, 9999, MOST_ADDRESSES));
        // The last names remain, and the file is below the limit of readers, also with the longest
        // addresses.
        assert!(log.names.iter().all(|asked| asked.last > 9900));
        for asked in &mut log.names {
            asked.addresses = vec![addr("2001:db8:1111:2222:3333:4444:5555:6666"); MOST_ADDRESSES];
            // A byte that JSON writes as six.
            asked.name = "\u{1}".repeat(253);
        }
        assert!(serde_json::to_vec(&log.names).unwrap().len() < MAX_BYTES);
    }

    #[test]
    fn verdicts_of_a_name_are_told_apart() {
        let mut log = AskedNames::default();
        let ips = ["192.0.2.1", "10.0.0.1"].map(addr);
        assert!(log.note("a.example.org", &ips[..1], NameVerdict::Noted, 1));
        assert!(log.note("a.example.org", &ips[1..], NameVerdict::Refused, 2));
        let of = |verdict| log.names.iter().find(|asked| asked.verdict == verdict).unwrap();
        assert_eq!(of(NameVerdict::Noted).addresses, ips[..1]);
        assert_eq!(of(NameVerdict::Refused).addresses, ips[1..]);
    }

    #[test]
    fn names_are_written_read_and_forgotten() {
        let owner = AttachmentId { network: "asked-names", ifname: "eth0", id: "c1" };
        let instance = owner.instance_id();
        let mut log = AskedNames::load(&instance);
        assert_eq!(log, AskedNames::default());
        assert!(log.note("a.example.org", &[], NameVerdict::Refused, 7));
        assert!(log.note("b.example.org", &[addr("192.0.2.1")], NameVerdict::Noted, 8));
        assert!(!log.note("a.example.org", &[], NameVerdict::Refused, 9));
        log.save(&instance).unwrap();
        assert_eq!(AskedNames::load(&instance), log);
        let text = concat!(
            r#"[{"name":"a.example.org","addresses":[],"count":2,"last":9,"verdict":"refused"},"#,
            r#"{"name":"b.example.org","addresses":["192.0.2.1"],"count":1,"last":8,"#,
            r#""verdict":"noted"}]"#
        );
        assert_eq!(fs::read_to_string(record_path(DIRECTORY, &instance)).unwrap(), text);
        let read = read_asked_names(owner);
        assert_eq!(read.iter().map(|asked| asked.last).collect::<Vec<_>>(), [9, 8]);
        forget_names(&instance).unwrap();
        forget_names(&instance).unwrap();
        assert_eq!(read_asked_names(owner), []);
    }
}
