//! The record of an attachment that has something on the host which outlives the container's
//! namespace: rules, devices.
//!
//! ```text
//! /run/cni/cnibox/attachments/<instance>.json
//! /run/cni/cnibox/by-address/10.88.0.2/<instance>
//! ```
//!
//! The first plugin of a list that creates such state writes the record before, and removes the record in its
//! DEL, which is the last DEL of the list. Features of the packet filter add what they restore the attachment's rules
//! from ([`Kept`](super::Kept)). Records are lost at reboot, as the rules are. DEL is complete without
//! a record. A record that cannot be parsed counts as absent.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::slice;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::boot::{Boot, Made};
use super::file::{self, ATTACHMENTS, DIR, place};
use super::liveness::{Doubt, Evidence, HostEnd, Liveness, judge};
use super::owner::{Owner, network_hash};
use crate::cni::NetworkName;
use crate::error::{Error, Result};
use crate::files::lock::Lock;
use crate::files::{self, During, remove_file};
use crate::netns::{self, NetnsId};

/// The records by address, below [`DIR`]: for each address a folder with an entry for each attachment.
const BY_ADDRESS: &str = "by-address";
/// Attempts to add an entry, whose folder another process may be removing.
const LINK_TRIES: usize = 10;

/// The record of an attachment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Record {
    /// The network.
    pub network: String,
    /// The container.
    pub id: String,
    /// The interface in it.
    pub ifname: String,
    /// The plugin that wrote the record; empty if only a feature did.
    pub plugin: String,
    /// `CNI_NETNS`.
    pub sandbox: String,
    /// The network namespace at `sandbox` when the record was written.
    pub netns: Option<NetnsId>,
    /// The [identity](netns::current_id) of the host's network namespace; up to release 0.2.0 its inode number.
    pub host: u64,
    /// The boot in which the record was written; `None` up to release 0.2.0.
    pub boot: Option<Boot>,
    /// The time at which the record was written, in seconds since 1970.
    pub created: i64,
    /// The host's end of the attachment's veth pair.
    pub end: Option<HostEnd>,
    /// The container's addresses.
    pub ips: Vec<IpAddr>,
    /// The host's links in the result: bridge, host ends of veth pairs.
    pub interfaces: Vec<String>,
    /// `ipam.dataDir` of the plugin that wrote the record, if configured.
    pub data_dir: Option<PathBuf>,
    /// What each feature of the packet filter keeps, by its name.
    pub rules: BTreeMap<String, Value>,
}

impl Record {
    /// The record of an attachment that is made now, before its addresses are known.
    pub fn new(owner: Owner<'_>, plugin: &str, sandbox: &str) -> Record {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Record {
            network: owner.network.to_owned(),
            id: owner.id.to_owned(),
            ifname: owner.ifname.to_owned(),
            plugin: plugin.to_owned(),
            sandbox: sandbox.to_owned(),
            host: netns::current_id().unwrap_or_default(),
            boot: Boot::current(),
            created: i64::try_from(since.as_secs()).unwrap_or_default(),
            ..Record::default()
        }
    }

    /// The attachment.
    pub fn owner(&self) -> Owner<'_> {
        Owner { network: &self.network, ifname: &self.ifname, id: &self.id }
    }

    /// The record of an attachment, if there is one for this host.
    pub fn of(owner: Owner<'_>) -> Option<Record> {
        Record::read(&owner.instance())
    }

    /// The record of an attachment, to be changed; an error if it cannot be read.
    pub(super) fn present(owner: Owner<'_>) -> io::Result<Option<Record>> {
        match file::load::<Record>(&place(&owner.instance())) {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            loaded => Ok(loaded?.filter(|record| record.owner() == owner)),
        }
    }

    /// The record of this [instance](Owner::instance).
    pub fn read(instance: &str) -> Option<Record> {
        if !instance.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-') {
            return None;
        }
        let record = file::load::<Record>(&place(instance)).ok()??;
        (is_here(record.host) && record.owner().instance() == instance).then_some(record)
    }

    /// The records of the attachments that were given this address, but for the attachment `except`. One system call if
    /// there is none.
    pub fn sharing(ip: IpAddr, except: Owner<'_>) -> Vec<Record> {
        let entries = fs::read_dir(by_address(ip)).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let records = names.filter_map(|instance| Record::read(&instance));
        records.filter(|record| record.ips.contains(&ip) && record.owner() != except).collect()
    }

    /// All records of `network`, or of all networks, one by one as the iterator advances.
    pub fn each(network: Option<&str>) -> impl Iterator<Item = Record> + use<> {
        let prefix = network.map(network_hash).unwrap_or_default();
        let instances = file::instances(Path::new(ATTACHMENTS), &prefix);
        instances.into_iter().filter_map(|instance| Record::read(&instance))
    }

    /// All records of `network`, or of all networks.
    pub fn all(network: Option<&str>) -> Vec<Record> {
        Record::each(network).collect()
    }

    /// Removes what killed processes left of the network's records, except for the records of `valid`.
    pub fn sweep(network: &NetworkName, valid: &[Owner<'_>]) {
        file::sweep(&network_hash(network.as_str()), &|instance| {
            valid.iter().any(|owner| owner.instance() == instance)
        });
    }

    /// Waits until nobody else reclaims the attachment, and excludes that until the lock is dropped. Without a folder for locks there
    /// are no records either.
    pub fn turn(owner: Owner<'_>) -> Result<Option<Lock>> {
        Ok(file::turn(&owner.instance())?)
    }

    /// Writes the record, replacing an earlier record of the attachment, and its entries by address.
    pub fn write(&self) -> Result<()> {
        let instance = self.owner().instance();
        let written =
            self.save().and_then(|()| self.ips.iter().try_for_each(|ip| link(*ip, &instance)));
        written.map_err(|e| Error::from(e).context("record the attachment"))
    }

    /// Writes the record without entries by address.
    pub(super) fn save(&self) -> files::Result<()> {
        let instance = self.owner().instance();
        if self.host == 0 {
            let why = io::Error::other("the host's network namespace is unknown");
            return Err(files::Error::new("write", &place(&instance), why));
        }
        file::write(&instance, self)
    }

    /// Removes the record and its entries by address.
    pub fn remove(&self) -> Result<()> {
        let instance = self.owner().instance();
        for ip in &self.ips {
            let folder = by_address(*ip);
            remove_file(&folder.join(&instance))?;
            // Fails while the address has other owners.
            drop(fs::remove_dir(&folder));
        }
        Ok(file::remove(&instance)?)
    }

    /// Whether the record is of the same instance of the attachment: a container may be created again with the same id.
    pub fn is_same_instance(&self, other: &Record) -> bool {
        let of = |record: &Record| (record.end, record.netns, record.boot.clone());
        self.owner() == other.owner() && of(self) == of(other)
    }

    /// Whether the attachment exists.
    pub fn liveness(&self) -> Liveness {
        Record::liveness_of(slice::from_ref(self))
            .pop()
            .unwrap_or(Liveness::Unknown(Doubt::NoRecord))
    }

    /// Whether these attachments exist.
    pub fn liveness_of(records: &[Record]) -> Vec<Liveness> {
        let current = Boot::current();
        let made = |record: &Record| match (&record.boot, &current) {
            (Some(then), Some(now)) => then.made(now, record.created),
            // Release 0.2.0, whose records are in memory only, which ends with the boot.
            (None, _) => Made::Now,
            (Some(_), None) => Made::Elsewhere,
        };
        let mut evidence = Vec::with_capacity(records.len());
        for record in records {
            evidence.push(Evidence { owner: record.owner(), made: made(record), end: record.end });
        }
        judge(&evidence)
    }
}

/// Removes the attachment's record if this plugin wrote the record, or the record cannot be parsed.
pub fn forget(owner: Owner<'_>, plugin: &str) -> Result<()> {
    let instance = owner.instance();
    let path = place(&instance);
    match file::load::<Record>(&path) {
        Ok(Some(record)) if record.plugin == plugin && is_here(record.host) => record.remove()?,
        Ok(None) => file::remove(&instance)?,
        Ok(Some(_)) => return Ok(()),
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) => return Err(Error::io(format_args!("open {}", path.display()), &e)),
    }
    Ok(file::remove_remains_of(&instance)?)
}

/// Removes all records of this host: other plugins are responsible for its attachments from now on.
pub fn remove_all() -> Result<()> {
    Record::each(None).try_for_each(|record| record.remove())?;
    Ok(file::remove_remains(&is_here)?)
}

/// Whether a record with this [`Record::host`] was written in the calling thread's network namespace.
pub(super) fn is_here(host: u64) -> bool {
    let host = Some(host);
    host == netns::current_id() || host == netns::current_inode()
}

fn by_address(ip: IpAddr) -> PathBuf {
    Path::new(DIR).join(BY_ADDRESS).join(ip.to_string())
}

/// Adds the attachment to the owners of the address.
fn link(ip: IpAddr, instance: &str) -> files::Result<()> {
    let folder = by_address(ip);
    let path = folder.join(instance);
    for _ in 0..LINK_TRIES {
        match symlink(place(instance), &path) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => return Ok(()),
            Err(e) if e.kind() == ErrorKind::NotFound => {
                file::make_folder(&Path::new(DIR).join(BY_ADDRESS))?;
                file::make_folder(&folder)?;
            }
            linked => return linked.during("link", &path),
        }
    }
    Err(files::Error::new("link", &path, ErrorKind::ResourceBusy))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_release_0_2_0_are_read() {
        let text = r#"{"network":"net","id":"c1","ifname":"eth0","plugin":"bridge","sandbox":"/x",
            "netns":{"dev":4,"ino":4026532265,"ctime":17},"host":4026531840,"ips":["10.1.2.3"],
            "interfaces":["cni0","veth1"],"dataDir":"/d"}"#;
        let expected = Record {
            network: "net".to_owned(),
            id: "c1".to_owned(),
            ifname: "eth0".to_owned(),
            plugin: "bridge".to_owned(),
            sandbox: "/x".to_owned(),
            netns: Some(NetnsId { dev: 4, ino: 4_026_532_265, ctime: 17 }),
            host: 4_026_531_840,
            ips: vec!["10.1.2.3".parse().unwrap()],
            interfaces: vec!["cni0".to_owned(), "veth1".to_owned()],
            data_dir: Some("/d".into()),
            ..Record::default()
        };
        assert_eq!(serde_json::from_str::<Record>(text).unwrap(), expected);
        assert_eq!(expected.liveness(), Liveness::Unknown(Doubt::NoHostEnd));
    }
}
