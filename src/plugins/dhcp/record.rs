//! Leases on disk, so that they outlive the daemon: a file each, in the folder that has the
//! socket's name without `.sock`.
//!
//! Times are those since the node was started; a record of another boot is worth nothing, like
//! the namespaces that it tells of.

use std::fs;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha512};

use super::protocol::client::Client;
use super::protocol::lease::Lease;
use super::protocol::message::Options;
use super::protocol::timing::{Moment, NEVER, Timing};
use super::wire::{Key, pairs};
use crate::cni::json::{self, Json};
use crate::error::{Error, Result, io_text};
use crate::log;
use crate::netlink::Mac;
use crate::store::atomic::{self, Durability, Writer};
use crate::store::lock::Lock;
use crate::sysctl;

const ENDING: &str = ".json";
/// The layout of the files. A daemon that knows a later one reads this one as well.
const LAYOUT: u32 = 1;
/// Larger than any record.
const LONGEST: u64 = 256 << 10;

/// A lease and all that is needed to keep it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// What it belongs to.
    pub key: Key,
    /// The path of the namespace, as the runtime gave it.
    pub netns: String,
    /// Device and inode of the namespace: what is at the path may have changed.
    pub netns_id: (u64, u64),
    /// The Ethernet address of the interface.
    pub mac: Mac,
    /// Options for every message.
    pub options: Options,
    /// The metric of routes.
    pub priority: u32,
    /// Whether the daemon has taken the address off the interface, and so has to add the next.
    pub bare: bool,
    /// The lease; `None` while another one is looked for.
    pub lease: Option<Lease>,
}

impl Record {
    /// The client that the server knows.
    pub fn client(&self, timing: Timing, broadcast: bool) -> Client {
        Client { mac: self.mac, broadcast, options: self.options.clone(), timing }
    }
}

/// The folder of leases.
#[derive(Clone, Debug)]
pub struct Records {
    dir: PathBuf,
    boot: String,
}

impl Records {
    /// The folder that belongs to the daemon on this socket. Nothing is made.
    pub fn beside(socket: &Path) -> Records {
        let name = socket.file_name().unwrap_or_default().to_string_lossy();
        let name = name.strip_suffix(".sock").map_or(format!("{name}.leases"), str::to_owned);
        let boot = sysctl::read("kernel/random/boot_id").unwrap_or_default();
        Records { dir: socket.with_file_name(name), boot }
    }

    /// Makes the folder, for root only.
    pub fn create(&self) -> Result<()> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir);
        made.map_err(|e| Error::io(format_args!("create {}", self.dir.display()), &e))
    }

    /// Takes the folder for this process alone; `None` if another one has it.
    pub fn claim(&self) -> Result<Option<Lock>> {
        Ok(Lock::try_exclusive(&self.dir.join("lock"))?)
    }

    /// The file of the process that was started on demand.
    pub fn pidfile(&self) -> PathBuf {
        self.dir.join("pid")
    }

    /// Where those who start the daemon take turns.
    pub fn start_lock(&self) -> PathBuf {
        self.dir.join("start")
    }

    /// Keeps a record.
    pub fn save(&self, record: &Record) -> Result<()> {
        let path = self.path(&record.key);
        let bytes = json::compact(&Stored::from((record, self.boot.as_str())))?;
        let writer = Writer::unlocked(&path, Durability::Volatile);
        Ok(writer.replace(&path, bytes.as_bytes(), 0o600)?)
    }

    /// Forgets a record.
    pub fn remove(&self, key: &Key) -> Result<()> {
        match fs::remove_file(self.path(key)) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                Err(Error::io(format_args!("remove the lease of {key}"), &e))
            }
            _ => Ok(()),
        }
    }

    /// The record of `key`.
    pub fn load(&self, key: &Key) -> Option<Record> {
        self.read(&self.path(key)).filter(|record| record.key == *key)
    }

    /// All records. Those that make no sense are removed, with a word about it.
    pub fn load_all(&self) -> Vec<Record> {
        atomic::sweep_stale(&self.dir);
        let Ok(entries) = fs::read_dir(&self.dir) else { return Vec::new() };
        let mut found = Vec::new();
        for path in entries.flatten().map(|entry| entry.path()) {
            if !path.to_string_lossy().ends_with(ENDING) {
                continue;
            }
            if let Some(record) = self.read(&path) {
                found.push(record);
            } else {
                log::warn(format_args!("no lease of this boot is in {}", path.display()));
                // It would be there again at the next start.
                drop(fs::remove_file(&path));
            }
        }
        found
    }

    fn read(&self, path: &Path) -> Option<Record> {
        let meta = fs::metadata(path).ok().filter(|meta| meta.is_file() && meta.len() <= LONGEST);
        let bytes = meta.and_then(|_| {
            fs::read(path)
                .map_err(|e| {
                    log::warn(format_args!("read {}: {}", path.display(), io_text(&e)));
                })
                .ok()
        })?;
        let stored: Stored = Json::parse(&bytes).ok()?.decode().ok()?;
        (stored.layout == LAYOUT && stored.boot == self.boot).then(|| stored.into_record())?
    }

    /// Ids and names may be longer than a file's name.
    fn path(&self, key: &Key) -> PathBuf {
        let hash = Sha512::digest(key.to_string());
        let name =
            hash[..16].iter().fold(String::new(), |name, byte| name + &format!("{byte:02x}"));
        self.dir.join(name + ENDING)
    }
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Stored {
    layout: u32,
    boot: String,
    key: Key,
    netns: String,
    netns_id: (u64, u64),
    mac: [u8; 6],
    #[serde(with = "pairs")]
    options: Options,
    priority: u32,
    bare: bool,
    #[serde(default)]
    lease: Option<StoredLease>,
}

/// Times in milliseconds; an absent one is never.
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct StoredLease {
    address: Ipv4Addr,
    prefix: u8,
    server: Ipv4Addr,
    server_mac: [u8; 6],
    #[serde(default)]
    renew: Option<u64>,
    #[serde(default)]
    rebind: Option<u64>,
    #[serde(default)]
    expires: Option<u64>,
    #[serde(with = "pairs")]
    options: Options,
}

impl From<(&Record, &str)> for Stored {
    fn from((record, boot): (&Record, &str)) -> Stored {
        let record = record.clone();
        Stored {
            layout: LAYOUT,
            boot: boot.to_owned(),
            key: record.key,
            netns: record.netns,
            netns_id: record.netns_id,
            mac: record.mac.0,
            options: record.options,
            priority: record.priority,
            bare: record.bare,
            lease: record.lease.map(|lease| StoredLease {
                address: lease.address(),
                prefix: lease.net.prefix_len(),
                server: lease.server,
                server_mac: lease.server_mac.0,
                renew: to_millis(lease.renew),
                rebind: to_millis(lease.rebind),
                expires: to_millis(lease.expires),
                options: lease.options,
            }),
        }
    }
}

impl Stored {
    fn into_record(self) -> Option<Record> {
        let lease = match self.lease {
            None => None,
            Some(lease) => Some(Lease {
                net: Ipv4Net::new(lease.address, lease.prefix).ok()?,
                server: lease.server,
                server_mac: Mac(lease.server_mac),
                renew: from_millis(lease.renew),
                rebind: from_millis(lease.rebind),
                expires: from_millis(lease.expires),
                options: lease.options,
            }),
        };
        Some(Record {
            key: self.key,
            netns: self.netns,
            netns_id: self.netns_id,
            mac: Mac(self.mac),
            options: self.options,
            priority: self.priority,
            bare: self.bare,
            lease,
        })
    }
}

fn to_millis(moment: Moment) -> Option<u64> {
    u64::try_from(moment.as_millis()).ok().filter(|_| moment != NEVER)
}

fn from_millis(millis: Option<u64>) -> Moment {
    millis.map_or(NEVER, Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: &str) -> Record {
        let key = Key { container_id: id.into(), network: "n".into(), ifname: "eth0".into() };
        let lease = Lease {
            net: "10.1.2.9/24".parse().unwrap(),
            server: [10, 1, 2, 1].into(),
            server_mac: Mac([2, 0, 0, 0, 0, 1]),
            renew: Duration::from_millis(5),
            rebind: Duration::from_millis(6),
            expires: NEVER,
            options: Options::from([(1, vec![255, 255, 255, 0])]),
        };
        Record {
            key,
            netns: "/run/netns/x".into(),
            netns_id: (4, u64::MAX),
            mac: Mac([2, 0, 0, 0, 0, 7]),
            options: Options::from([(61, vec![0, 1])]),
            priority: 3,
            bare: false,
            lease: Some(lease),
        }
    }

    #[test]
    fn what_is_kept_is_found_by_the_next_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("sub/dhcp.sock");
        let records = Records::beside(&socket);
        records.create().unwrap();
        records.save(&record("a")).unwrap();
        records.save(&Record { lease: None, ..record("b") }).unwrap();
        let again = Records::beside(&socket);
        let mut all = again.load_all();
        all.sort_by(|a, b| a.key.cmp(&b.key));
        assert_eq!(all, [record("a"), Record { lease: None, ..record("b") }]);
        assert_eq!(again.load(&record("a").key), Some(record("a")));
        again.remove(&record("a").key).unwrap();
        again.remove(&record("a").key).unwrap();
        assert_eq!(again.load(&record("a").key), None);
        assert!(dir.path().join("sub/dhcp").is_dir());
    }

    #[test]
    fn nonsense_and_other_boots_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::beside(&dir.path().join("s"));
        records.create().unwrap();
        records.save(&record("a")).unwrap();
        let path = records.path(&record("a").key);
        let text = fs::read_to_string(&path).unwrap();
        for bad in [
            String::new(),
            "{".to_owned(),
            text.replace(&records.boot, "another"),
            text.replace("\"layout\":1", "\"layout\":9"),
            text.replace("\"prefix\":24", "\"prefix\":99"),
        ] {
            fs::write(&path, bad).unwrap();
            assert_eq!(records.load_all(), []);
            assert!(!path.exists());
        }
    }

    #[test]
    fn one_process_has_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::beside(&dir.path().join("dhcp.sock"));
        records.create().unwrap();
        let lock = records.claim().unwrap();
        assert!(lock.is_some() && records.claim().unwrap().is_none());
        drop(lock);
        assert!(records.claim().unwrap().is_some());
    }
}
