//! Leases on disk, for the next daemon: a file per lease in the directory with the name of the
//! socket without `.sock`.
//!
//! Times are relative to boot. Records of another boot are void, like the namespaces in them. A
//! boot id that a container manager or an error has replaced proves no other boot.

use std::cell::RefCell;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha512};

use super::family::{DhcpFamily, DhcpLease, DhcpRouteConfig};
use super::machine::{self, ClientMachine, StateMachine};
use super::rpc::DhcpLeaseKey;
use super::sandbox::{LeaseSandbox, NamespaceNumber};
use super::socket::FoundInterface;
use super::timing::{BootClockTime, ClientTiming, RandomGenerator};
use super::v4::option::{self, Dhcp4Options, pairs};
use super::v6;
use crate::files::dir::{self, OpenDirectory};
use crate::files::lock::FileLock;
use crate::netlink::MacAddress;
use crate::sysctl::{self, REPLACED};
use cni::error::{Error, Result};
use cni::files::atomic::{self, AtomicWriter, Durability};
use cni::json::{self, Json};

const ENDING: &str = ".json";
/// How many bytes of the hash of a key are in the name of its file.
const HASHED: usize = 16;
/// Limit of a record's size in bytes, longer than any record.
const LONGEST: usize = 256 << 10;

/// A lease and everything that is needed to maintain it.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct DhcpRecord {
    pub key: DhcpLeaseKey,
    /// The path of the namespace, as in `CNI_NETNS`.
    pub netns: String,
    /// Device and inode of the namespace: the path may refer to another one meanwhile.
    pub netns_id: (u64, u64),
    /// The cookie of the namespace: the kernel may give the inode's number to another one
    /// meanwhile. `None` before Linux 5.14.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns_cookie: Option<u64>,
    /// The number of the namespace in that of the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns_number: Option<NamespaceNumber>,
    /// The index of the interface, which the container may rename. `None` before the interface was
    /// found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ifindex: Option<u32>,
    /// The Ethernet address of the interface.
    pub mac: MacAddress,
    /// The options of every message.
    #[serde(with = "pairs")]
    pub options: Dhcp4Options,
    /// The metric of routes.
    pub priority: u32,
    /// What the configuration says about routes.
    #[serde(default, skip_serializing_if = "DhcpRouteConfig::is_default")]
    pub routes: DhcpRouteConfig,
    /// Whether the daemon has removed the address from the interface, and so has to add the next
    /// one.
    pub address_removed: bool,
    /// The lease; `None` while the client looks for another.
    pub lease: Option<DhcpLease>,
}

impl DhcpRecord {
    /// Notes the namespace of the lease, and the interface in it.
    pub fn note_interface(&mut self, sandbox: &LeaseSandbox, found: &FoundInterface) {
        self.netns.clone_from(&sandbox.netns);
        self.netns_id = sandbox.id;
        self.netns_cookie = found.cookie;
        self.netns_number = sandbox.number();
        self.ifindex = Some(found.index);
        self.mac = found.mac;
    }

    /// The state machine that continues with the lease; without a lease it starts at `now` and
    /// fails at `limit`.
    pub fn state_machine(
        &self,
        timing: ClientTiming,
        broadcast: bool,
        now: BootClockTime,
        limit: BootClockTime,
    ) -> Box<dyn StateMachine> {
        let (mac, random) = (self.mac, RandomGenerator::default());
        match self.key.family {
            DhcpFamily::V4 => {
                let options = self.options.clone();
                let client = machine::v4::Dhcp4Client { mac, broadcast, options, timing };
                Box::new(match &self.lease {
                    Some(DhcpLease::V4(lease)) => {
                        ClientMachine::resume_lease(client, lease.clone(), random)
                    }
                    _ => ClientMachine::new(client, now, limit, random),
                })
            }
            DhcpFamily::V6 => {
                let (duid, iaid) = (self.client_duid(), v6::interface_iaid(&self.key.ifname));
                let client = machine::v6::Dhcp6Client { duid, iaid, mac, timing, sol_max_rt: None };
                Box::new(match &self.lease {
                    Some(DhcpLease::V6(lease)) => {
                        ClientMachine::resume_lease(client, lease.clone(), random)
                    }
                    _ => ClientMachine::new(client, now, limit, random),
                })
            }
        }
    }

    /// The DUID for DHCPv6 servers, derived from the client identifier for DHCP servers.
    fn client_duid(&self) -> Vec<u8> {
        let id = self.options.get(&option::CLIENT_ID).cloned();
        v6::duid_from_client_id(&id.unwrap_or_else(|| self.key.client_id()))
    }
}

/// The content of a record's file.
#[derive(Deserialize, Serialize)]
struct DhcpRecordFile<R> {
    /// The kernel's `boot_id`.
    boot: String,
    record: R,
}

/// Decodes a record's file; `None` if the lease is not of the key's family.
fn parse_record_file(bytes: &[u8]) -> Option<DhcpRecordFile<DhcpRecord>> {
    let content: DhcpRecordFile<DhcpRecord> = Json::parse(bytes).ok()?.decode().ok()?;
    match (content.record.key.family, &content.record.lease) {
        (DhcpFamily::V4, Some(DhcpLease::V6(_))) | (DhcpFamily::V6, Some(DhcpLease::V4(_))) => None,
        _ => Some(content),
    }
}

/// Decodes a record's file of any boot, for the fuzz targets.
#[cfg(feature = "testing")]
pub fn decode_record(bytes: &[u8]) -> Option<DhcpRecord> {
    parse_record_file(bytes).map(|content| content.record)
}

/// The directory of leases. Only files that this module has written are read or removed: the
/// configuration determines the directory, which may contain files of other programs.
#[derive(Debug)]
pub struct DhcpRecordStore {
    dir: PathBuf,
    boot: String,
    /// The records that could not be written, as on a full file system: the next write includes
    /// them.
    unwritten: RefCell<Vec<DhcpRecord>>,
}

impl DhcpRecordStore {
    /// The directory for the daemon on this socket, if it exists.
    pub fn open_existing(socket: &Path) -> Result<Option<DhcpRecordStore>> {
        let dir = directory_for_socket(socket);
        Ok(dir::require_own_directory(&dir)?.then(|| DhcpRecordStore::from_directory(dir)))
    }

    /// Opens or creates the directory, with access for root only.
    pub fn open_or_create(socket: &Path) -> Result<DhcpRecordStore> {
        let dir = directory_for_socket(socket);
        dir::ensure_directory(&dir, 0o700)?;
        Ok(DhcpRecordStore::from_directory(dir))
    }

    fn from_directory(dir: PathBuf) -> DhcpRecordStore {
        let boot = sysctl::boot_id().unwrap_or_else(|_| REPLACED.to_string());
        DhcpRecordStore { dir, boot, unwritten: RefCell::default() }
    }

    pub fn directory_path(&self) -> &Path {
        &self.dir
    }

    /// Locks the directory for this process; `None` if another process holds the lock.
    pub fn try_lock(&self) -> Result<Option<FileLock>> {
        Ok(FileLock::try_acquire_exclusive(&self.dir.join("lock"))?)
    }

    /// The pidfile of a daemon that is started on demand.
    pub fn pidfile_path(&self) -> PathBuf {
        self.dir.join("pid")
    }

    /// Waits for the lock that serializes starts of the daemon.
    pub fn lock_daemon_start(&self, patience: Duration) -> Result<FileLock> {
        Ok(FileLock::acquire_within(&self.dir.join("start"), patience)?)
    }

    /// Writes the record, and those that could not be written before.
    pub fn save_record(&self, record: &DhcpRecord) -> Result<()> {
        let mut unwritten = self.unwritten.borrow_mut();
        unwritten.retain(|other| other.key != record.key);
        let written = self.write_record(record);
        if written.is_err() {
            unwritten.push(record.clone());
        } else {
            unwritten.retain(|other| self.write_record(other).is_err());
        }
        written
    }

    fn write_record(&self, record: &DhcpRecord) -> Result<()> {
        let path = self.dir.join(file_name(&record.key));
        let bytes = json::encode_compact(&DhcpRecordFile { boot: self.boot.clone(), record })?;
        let writer = AtomicWriter::with_unique_name(&path, Durability::Volatile);
        Ok(writer.replace_file(&path, bytes.as_bytes(), 0o600)?)
    }

    /// Removes a record, if it exists.
    pub fn remove_record(&self, key: &DhcpLeaseKey) -> Result<()> {
        self.unwritten.borrow_mut().retain(|record| record.key != *key);
        match fs::remove_file(self.dir.join(file_name(key))) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                Err(Error::io(format_args!("remove the lease of {key}"), &e))
            }
            _ => Ok(()),
        }
    }

    pub fn load_record(&self, key: &DhcpLeaseKey) -> Option<DhcpRecord> {
        if let Some(record) = self.unwritten.borrow().iter().find(|record| record.key == *key) {
            return Some(record.clone());
        }
        let content = self
            .read_record_file(&file_name(key))
            .filter(|content| sysctl::is_same_boot(&content.boot, &self.boot))?;
        Some(content.record).filter(|record| record.key == *key)
    }

    /// All records of this boot. Those of another boot are removed; foreign files are not.
    pub fn load_all(&self) -> Vec<DhcpRecord> {
        let names =
            OpenDirectory::open(&self.dir).and_then(|dir| dir.entry_names()).unwrap_or_default();
        let mut found = Vec::new();
        for name in names.iter().filter(|name| is_own_name(name)) {
            let path = self.dir.join(name);
            match self.read_record_file(name) {
                Some(content) if sysctl::is_same_boot(&content.boot, &self.boot) => {
                    found.push(content.record);
                }
                other => {
                    warn!("no lease of this boot in {}", path.display());
                    if other.is_some_and(|content| self.is_other_boot(&content.boot)) {
                        // If this fails, the next start tries again.
                        drop(fs::remove_file(&path));
                    }
                }
            }
        }
        found
    }

    /// Whether the recorded boot is certainly another one.
    fn is_other_boot(&self, recorded: &str) -> bool {
        let is_kernels = |id: &str| !id.is_empty() && !id.starts_with(REPLACED);
        is_kernels(recorded) && is_kernels(&self.boot) && recorded != self.boot
    }

    /// Removes temporary files of a killed daemon. The caller holds the lock on the directory.
    pub fn remove_temporary_files(&self) {
        atomic::remove_stale_temporaries(&self.dir);
    }

    /// Reads the record in a file; `None` if the file is not one of this module, named after the
    /// key in it.
    fn read_record_file(&self, name: &str) -> Option<DhcpRecordFile<DhcpRecord>> {
        let (bytes, _) = OpenDirectory::open(&self.dir).ok()?.read_file(name, LONGEST).ok()?;
        if bytes.len() > LONGEST {
            return None;
        }
        parse_record_file(&bytes).filter(|content| file_name(&content.record.key) == name)
    }
}

/// The directory with the name of the socket without `.sock`.
fn directory_for_socket(socket: &Path) -> PathBuf {
    let name = socket.file_name().unwrap_or_default().to_string_lossy();
    let name = name.strip_suffix(".sock").map_or(format!("{name}.leases"), str::to_owned);
    socket.with_file_name(name)
}

/// A hash, because container IDs and network names may be longer than a file name.
fn file_name(key: &DhcpLeaseKey) -> String {
    let hash = Sha512::digest(key.to_string());
    hash[..HASHED].iter().fold(String::new(), |name, byte| name + &format!("{byte:02x}")) + ENDING
}

/// Whether [`file_name`] can return this name.
fn is_own_name(name: &str) -> bool {
    let stem = name.strip_suffix(ENDING);
    stem.is_some_and(|stem| {
        stem.len() == 2 * HASHED
            && stem.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    })
}

#[cfg(test)]
mod tests {
    use super::super::timing::NEVER;
    use super::super::{v4::lease, v6};
    use super::*;

    fn record(id: &str) -> DhcpRecord {
        let key = DhcpLeaseKey {
            container_id: id.into(),
            network: "n".into(),
            ifname: "eth0".into(),
            family: DhcpFamily::V4,
        };
        let lease = lease::Dhcp4Lease {
            net: "10.1.2.9/24".parse().unwrap(),
            server: [10, 1, 2, 1].into(),
            server_mac: MacAddress([2, 0, 0, 0, 0, 1]),
            renew: Duration::from_millis(5),
            rebind: Duration::from_millis(6),
            expires: NEVER,
            options: Dhcp4Options::from([(1, vec![255, 255, 255, 0])]),
        };
        DhcpRecord {
            key,
            netns: "/run/netns/x".into(),
            netns_id: (4, u64::MAX),
            netns_cookie: Some(u64::MAX),
            netns_number: None,
            ifindex: Some(2),
            mac: MacAddress([2, 0, 0, 0, 0, 7]),
            options: Dhcp4Options::from([(61, vec![0, 1])]),
            priority: 3,
            routes: DhcpRouteConfig { added: Vec::new(), default_route: Some(false) },
            address_removed: false,
            lease: Some(DhcpLease::V4(lease)),
        }
    }

    fn record_v6(id: &str) -> DhcpRecord {
        let lease = v6::lease::Dhcp6Lease {
            address: "2001:db8::5".parse().unwrap(),
            server: vec![0, 1, 9],
            renew: Duration::from_millis(5),
            rebind: NEVER,
            expires: NEVER,
            name_servers: vec!["2001:db8::1".parse().unwrap()],
            search: vec!["example.com".to_owned()],
        };
        let record = record(id);
        DhcpRecord {
            key: record.key.with_family(DhcpFamily::V6),
            lease: Some(DhcpLease::V6(lease)),
            ..record
        }
    }

    #[test]
    fn a_record_without_optional_fields_is_read() {
        let read = |family: &str, lease: &str| {
            let text = format!(
                r#"{{"boot":"b","record":{{"key":{{"containerId":"a","network":"n",
                "ifname":"eth0","family":"{family}"}},"netns":"/run/netns/x","netnsId":[4,9],
                "mac":[2,0,0,0,0,7],"options":[[61,[0,1]]],"priority":3,"addressRemoved":false,
                "lease":{lease}}}}}"#
            );
            parse_record_file(text.as_bytes()).unwrap().record
        };
        let v4 = read(
            "ipv4",
            r#"{"net":"10.1.2.5/24","server":"10.1.2.1","serverMac":[2,0,0,0,0,1],"renew":5,
            "rebind":6,"expires":18446744073709551615,"options":[[1,[255,255,255,0]]]}"#,
        );
        assert_eq!((v4.netns_id, v4.mac), ((4, 9), MacAddress([2, 0, 0, 0, 0, 7])));
        assert_eq!((v4.netns_cookie, v4.routes), (None, DhcpRouteConfig::default()));
        assert!(matches!(v4.lease, Some(DhcpLease::V4(lease)) if lease.expires == NEVER));
        let v6 = read(
            "ipv6",
            r#"{"address":"2001:db8::5","server":[0,1,9],"renew":5,"rebind":6,"expires":7,
            "nameServers":["2001:db8::1"],"search":["example.com"]}"#,
        );
        assert_eq!(v6.lease.map(|lease| lease.server_text()).as_deref(), Some("00:01:09"));
    }

    #[test]
    fn both_leases_of_an_attachment_have_files() {
        let dir = tempfile::tempdir().unwrap();
        let records = DhcpRecordStore::open_or_create(&dir.path().join("s")).unwrap();
        for record in [record("a"), record_v6("a")] {
            records.save_record(&record).unwrap();
        }
        assert_eq!(records.load_all().len(), 2);
        assert_eq!(records.load_record(&record("a").key), Some(record("a")));
        assert_eq!(records.load_record(&record_v6("a").key), Some(record_v6("a")));
        records.remove_record(&record("a").key).unwrap();
        assert_eq!(records.load_all(), [record_v6("a")]);
    }

    #[test]
    fn duids_are_the_same_for_every_daemon() {
        let one = record_v6("a");
        assert_eq!(
            one.client_duid(),
            record_v6("b").client_duid(),
            "the configured identifier, whatever the key"
        );
        let plain = |id: &str| DhcpRecord { options: Dhcp4Options::new(), ..record_v6(id) };
        assert_ne!(plain("a").client_duid(), plain("b").client_duid());
    }

    #[test]
    fn records_survive_the_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("sub/dhcp.sock");
        let records = DhcpRecordStore::open_or_create(&socket).unwrap();
        records.save_record(&record("a")).unwrap();
        records.save_record(&DhcpRecord { lease: None, ..record("b") }).unwrap();
        let again = DhcpRecordStore::open_existing(&socket).unwrap().unwrap();
        let mut all = again.load_all();
        all.sort_by(|a, b| a.key.cmp(&b.key));
        assert_eq!(all, [record("a"), DhcpRecord { lease: None, ..record("b") }]);
        assert_eq!(again.load_record(&record("a").key), Some(record("a")));
        again.remove_record(&record("a").key).unwrap();
        again.remove_record(&record("a").key).unwrap();
        assert_eq!(again.load_record(&record("a").key), None);
        assert!(dir.path().join("sub/dhcp").is_dir());
    }

    #[test]
    fn only_own_files_of_another_boot_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let records = DhcpRecordStore::open_or_create(&dir.path().join("s")).unwrap();
        records.save_record(&record("a")).unwrap();
        let path = records.dir.join(file_name(&record("a").key));
        let text = fs::read_to_string(&path).unwrap();
        let of_before = text.replace(&records.boot, "another");
        let unknown = [text.replace(&records.boot, "~another"), text.replace(&records.boot, "")];
        let foreign = [
            "daemon.json".to_owned(),
            format!("{}.json", "0".repeat(32)),
            file_name(&record("a").key).to_uppercase(),
        ];
        for name in &foreign {
            fs::write(records.dir.join(name), &of_before).unwrap();
        }
        for (bad, stays) in [
            (String::new(), true),
            ("{".to_owned(), true),
            (text.replace("10.1.2.9/24", "10.1.2.9/99"), true),
            (text.replace("serverMac", "server"), true),
            (unknown[0].clone(), true),
            (unknown[1].clone(), true),
            (of_before.clone(), false),
        ] {
            fs::write(&path, &bad).unwrap();
            assert_eq!(records.load_all(), []);
            assert_eq!(records.load_record(&record("a").key), None);
            assert_eq!(path.exists(), stays, "{bad}");
        }
        // A symbolic link with the name of a record is not followed.
        let target = dir.path().join("target");
        fs::write(&target, &of_before).unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert_eq!(records.load_all(), []);
        assert!(path.is_symlink() && target.exists());
        for name in &foreign {
            assert_eq!(fs::read_to_string(records.dir.join(name)).unwrap(), of_before);
        }
    }

    #[test]
    fn one_process_holds_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let records = DhcpRecordStore::open_or_create(&dir.path().join("dhcp.sock")).unwrap();
        let lock = records.try_lock().unwrap();
        assert!(lock.is_some() && records.try_lock().unwrap().is_none());
        drop(lock);
        assert!(records.try_lock().unwrap().is_some());
    }
}
