//! Leases on disk, so that they outlive the daemon: a file each, in the folder that has the
//! socket's name without `.sock`.
//!
//! Times are those since the node was started; a record of another boot is worth nothing, like
//! the namespaces that it tells of.

use std::fs;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha512};

use super::protocol::family::{Client, Family, Lease};
use super::protocol::message::Options;
use super::protocol::timing::{Moment, NEVER, Timing};
use super::protocol::v6::identity;
use super::protocol::{client, lease, option, v6};
use super::wire::{Key, pairs};
use crate::cni::json::{self, Json};
use crate::error::{Error, Result, io_text};
use crate::log;
use crate::netlink::Mac;
use crate::store::atomic::{self, Durability, Writer};
use crate::store::lock::Lock;
use crate::sysctl;

const ENDING: &str = ".json";
/// The layout of the files of a family. A daemon that knows a later one reads these as well, and
/// one that does not know a family does not take its leases for others.
fn layout(family: Family) -> u32 {
    match family {
        Family::V4 => 1,
        Family::V6 => 2,
    }
}

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
        let (mac, options) = (self.mac, self.options.clone());
        match self.key.family {
            Family::V4 => Client::V4(client::Client { mac, broadcast, options, timing }),
            Family::V6 => {
                let id = options.get(&option::CLIENT_ID).cloned();
                let duid = identity::duid(&id.unwrap_or_else(|| self.key.client_id()));
                let iaid = identity::iaid(&self.key.ifname);
                Client::V6(identity::Client { duid, iaid, mac, timing })
            }
        }
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
        let known = stored.layout == layout(stored.key.family);
        (known && stored.boot == self.boot).then(|| stored.into_record())?
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lease_v6: Option<StoredLeaseV6>,
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

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct StoredLeaseV6 {
    address: Ipv6Addr,
    server: Vec<u8>,
    #[serde(default)]
    renew: Option<u64>,
    #[serde(default)]
    rebind: Option<u64>,
    #[serde(default)]
    expires: Option<u64>,
    #[serde(default)]
    name_servers: Vec<Ipv6Addr>,
    #[serde(default)]
    search: Vec<String>,
}

impl From<lease::Lease> for StoredLease {
    fn from(lease: lease::Lease) -> StoredLease {
        StoredLease {
            address: lease.address(),
            prefix: lease.net.prefix_len(),
            server: lease.server,
            server_mac: lease.server_mac.0,
            renew: to_millis(lease.renew),
            rebind: to_millis(lease.rebind),
            expires: to_millis(lease.expires),
            options: lease.options,
        }
    }
}

impl From<v6::lease::Lease> for StoredLeaseV6 {
    fn from(lease: v6::lease::Lease) -> StoredLeaseV6 {
        StoredLeaseV6 {
            address: lease.address,
            server: lease.server,
            renew: to_millis(lease.renew),
            rebind: to_millis(lease.rebind),
            expires: to_millis(lease.expires),
            name_servers: lease.name_servers,
            search: lease.search,
        }
    }
}

impl StoredLease {
    fn into_lease(self) -> Option<Lease> {
        let lease = lease::Lease {
            net: Ipv4Net::new(self.address, self.prefix).ok()?,
            server: self.server,
            server_mac: Mac(self.server_mac),
            renew: from_millis(self.renew),
            rebind: from_millis(self.rebind),
            expires: from_millis(self.expires),
            options: self.options,
        };
        Some(lease.into())
    }
}

impl StoredLeaseV6 {
    fn into_lease(self) -> Lease {
        let lease = v6::lease::Lease {
            address: self.address,
            server: self.server,
            renew: from_millis(self.renew),
            rebind: from_millis(self.rebind),
            expires: from_millis(self.expires),
            name_servers: self.name_servers,
            search: self.search,
        };
        lease.into()
    }
}

impl From<(&Record, &str)> for Stored {
    fn from((record, boot): (&Record, &str)) -> Stored {
        let record = record.clone();
        let (lease, lease_v6) = match record.lease {
            Some(Lease::V4(lease)) => (Some(lease.into()), None),
            Some(Lease::V6(lease)) => (None, Some(lease.into())),
            None => (None, None),
        };
        Stored {
            layout: layout(record.key.family),
            boot: boot.to_owned(),
            key: record.key,
            netns: record.netns,
            netns_id: record.netns_id,
            mac: record.mac.0,
            options: record.options,
            priority: record.priority,
            bare: record.bare,
            lease,
            lease_v6,
        }
    }
}

impl Stored {
    fn into_record(self) -> Option<Record> {
        let lease = match (self.key.family, self.lease, self.lease_v6) {
            (Family::V4, Some(lease), _) => Some(lease.into_lease()?),
            (Family::V6, _, Some(lease)) => Some(lease.into_lease()),
            _ => None,
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
        let key = Key {
            container_id: id.into(),
            network: "n".into(),
            ifname: "eth0".into(),
            family: Family::V4,
        };
        let lease = lease::Lease {
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
            lease: Some(lease.into()),
        }
    }

    fn record_v6(id: &str) -> Record {
        let lease = v6::lease::Lease {
            address: "2001:db8::5".parse().unwrap(),
            server: vec![0, 1, 9],
            renew: Duration::from_millis(5),
            rebind: NEVER,
            expires: NEVER,
            name_servers: vec!["2001:db8::1".parse().unwrap()],
            search: vec!["example.com".to_owned()],
        };
        let record = record(id);
        Record { key: record.key.of(Family::V6), lease: Some(lease.into()), ..record }
    }

    #[test]
    fn both_leases_of_an_attachment_have_files() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::beside(&dir.path().join("s"));
        records.create().unwrap();
        for record in [record("a"), record_v6("a")] {
            records.save(&record).unwrap();
        }
        assert_eq!(records.load_all().len(), 2);
        assert_eq!(records.load(&record("a").key), Some(record("a")));
        assert_eq!(records.load(&record_v6("a").key), Some(record_v6("a")));
        // A daemon that knows nothing of IPv6 must not take one for a lease of IPv4.
        let text = fs::read_to_string(records.path(&record_v6("a").key)).unwrap();
        assert!(text.contains("\"layout\":2") && text.contains("\"family\":\"ipv6\""), "{text}");
        records.remove(&record("a").key).unwrap();
        assert_eq!(records.load_all(), [record_v6("a")]);
    }

    #[test]
    fn files_from_before_there_were_families_are_of_ipv4() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::beside(&dir.path().join("s"));
        records.create().unwrap();
        let text = format!(
            r#"{{"layout":1,"boot":"{}","key":{{"containerId":"a","network":"n","ifname":"eth0"}},
            "netns":"/run/netns/x","netnsId":[4,18446744073709551615],"mac":[2,0,0,0,0,7],
            "options":[[61,[0,1]]],"priority":3,"bare":false,"lease":{{"address":"10.1.2.9",
            "prefix":24,"server":"10.1.2.1","serverMac":[2,0,0,0,0,1],"renew":5,"rebind":6,
            "expires":null,"options":[[1,[255,255,255,0]]]}}}}"#,
            records.boot
        );
        fs::write(records.path(&record("a").key), text).unwrap();
        assert_eq!(records.load_all(), [record("a")]);
    }

    #[test]
    fn clients_are_the_same_for_every_daemon() {
        let duid = |record: &Record| match record.client(Timing::default(), false) {
            Client::V6(client) => client.duid,
            Client::V4(client) => panic!("{client:?}"),
        };
        let one = record_v6("a");
        assert_eq!(duid(&one), duid(&record_v6("b")), "the configured name, whoever it is");
        let bare = |id: &str| Record { options: Options::new(), ..record_v6(id) };
        assert_ne!(duid(&bare("a")), duid(&bare("b")));
        assert!(
            matches!(record("a").client(Timing::default(), true), Client::V4(c) if c.broadcast)
        );
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
