//! The records of devices that containers have, beside the alias that the reference plugin sets:
//! one small file for each device of an attachment. Neither the files nor the containers survive a
//! reboot.
//!
//! A device that a reference plugin has moved has no record. It gets its name back, from its alias;
//! its address, MTU and whether it was up are unknown.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::identity::DeviceIdentity;
use super::origin::OriginalState;
use crate::attachment::{AttachmentId, backup};
use crate::files::dir;
use crate::framework::{Failures, GcRequest};
use crate::netlink::{Link, Netlink};
use crate::netns::{Netns, NetnsIdentity};
use cni::error::{Error, Result};
use cni::files::atomic::{AtomicWriter, Durability};
use cni::files::remove_file;
use cni::{ContainerId, InterfaceName, NetworkName};

/// The directory of all records, with a directory for each plugin. No configuration chooses it: a
/// record decides the name, the addresses and the routes of a link of the host.
const DIR: &str = "/run/cni";
/// The plugins that move devices.
const PLUGINS: [&str; 2] = ["host-device", "bond"];

/// What became of the device of an attachment that ends.
#[derive(Debug)]
pub enum DeviceReturn {
    /// It has its former place and state, apart from what the error names.
    Returned(Option<Error>),
    /// A link in its place stays in the container, with its addresses: it may be the device, but
    /// nothing proves that it came from the host.
    Stays,
    /// It is neither in the container nor on the host.
    Nowhere,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceRecord {
    #[serde(rename = "containerID")]
    pub container_id: String,
    pub ifname: String,
    /// The path of its namespace.
    pub netns: String,
    /// The namespace that was there, if it could be read.
    #[serde(default)]
    pub netns_id: Option<NetnsIdentity>,
    /// The name of the device in the container, if it is a port of the attachment's interface
    /// `ifname`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub port: String,
    /// Whether the device was in the container before, and stays there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_container: bool,
    pub device: OriginalState,
    /// Whether a DEL has already failed to restore the device completely.
    #[serde(default)]
    pub tried: bool,
    /// Whether the attachment has ended without the device, see [`super::lost`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
}

impl DeviceRecord {
    /// The record of a device of the host that becomes `ifname` in the namespace at the path
    /// `netns`.
    pub fn new(
        id: &ContainerId,
        ifname: &InterfaceName,
        netns: &str,
        device: OriginalState,
    ) -> DeviceRecord {
        let (container_id, ifname, netns) = (id.to_string(), ifname.to_string(), netns.to_owned());
        DeviceRecord {
            container_id,
            ifname,
            netns,
            netns_id: None,
            port: String::new(),
            in_container: false,
            device,
            tried: false,
            lost: false,
        }
    }

    /// The name that ADD gave the device in the container.
    pub fn name_in_container(&self) -> &str {
        if self.port.is_empty() { &self.ifname } else { &self.port }
    }

    /// The recorded namespace: at its path, or without one, if a process holds it.
    pub fn open_netns(&self) -> Result<Option<Netns>> {
        Ok(self.open_netns_at_path()?.or_else(|| self.find_held_netns()))
    }

    /// The namespace at the recorded path, if it is the recorded one: another container's namespace
    /// is not entered. A namespace that nothing pins cannot be distinguished from a later one.
    fn open_netns_at_path(&self) -> Result<Option<Netns>> {
        let Some(known) = self.netns_id.filter(|id| id.ctime != 0) else { return Ok(None) };
        let Ok(netns) = Netns::open(&self.netns) else { return Ok(None) };
        let is_recorded = netns.device_and_inode()? == (known.dev, known.ino)
            && NetnsIdentity::at_path(netns.path()) == Some(known);
        Ok((is_recorded && !netns.is_same_as(&Netns::open_current()?)?).then_some(netns))
    }

    /// The recorded namespace by its number, which a later one may have: only for a device that is
    /// like no other and that no later attachment has.
    fn find_held_netns(&self) -> Option<Netns> {
        let known = self.netns_id?;
        let is_found =
            !self.in_container && self.device.identity.is_unique() && !self.is_superseded();
        if is_found { Netns::find_by_process(known.dev, known.ino) } else { None }
    }

    /// Whether another attachment has the device, or has had it since.
    fn is_superseded(&self) -> bool {
        all_records().iter().any(|(_, other)| {
            !other.lost
                && !other.in_container
                && other.device.identity == self.device.identity
                && (self.lost
                    || (&other.container_id, &other.ifname) != (&self.container_id, &self.ifname))
        })
    }

    /// Whether the device may come back to the host: hardware that exists, as far as is known, and
    /// that no other attachment has.
    pub(super) fn may_come_back(&self) -> bool {
        !self.in_container && self.device.identity.may_exist() && !self.is_superseded()
    }

    /// Whether the device may be in this namespace; false for a later namespace at the same path.
    pub fn may_be_in(&self, netns: &Netns) -> Result<bool> {
        let found = netns.device_and_inode()?;
        Ok(self.netns_id.is_none_or(|id| (id.dev, id.ino) == found))
    }

    /// The namespace in which DEL searches for the device: the `given` one, if the device may be
    /// there.
    pub fn netns_of_del(&self, given: Option<&Netns>) -> Result<Option<Netns>> {
        match given {
            Some(netns) if self.may_be_in(netns)? => Ok(Some(netns.clone())),
            _ => self.open_netns(),
        }
    }

    fn file_name(&self) -> String {
        record_file_name(&self.container_id, &self.ifname, self.device_in_file_name())
    }

    /// A lost device's record does not have the name of a record of the next attachment of this
    /// container and interface.
    fn device_in_file_name(&self) -> &str {
        if self.lost { &self.device.name } else { &self.port }
    }
}

/// The remedy for a link `name` that the host lacks.
pub fn missing_device_remedy(name: &str) -> String {
    recorded_device_remedy(&|device| device.has_name(name))
        .unwrap_or_else(|| "\"ip link\" lists the links of the host".to_owned())
}

/// The remedy for a device that the host lacks because a container has it, if there is a record of
/// it.
pub fn recorded_device_remedy(is_meant: &dyn Fn(&OriginalState) -> bool) -> Option<String> {
    let record = find_record_of_host_device(is_meant)?;
    let (id, name) = (&record.container_id, record.name_in_container());
    Some(if record.lost {
        format!(
            "container {id} had it as {name}, and something may hold its namespace: end its \
             processes, then: cnibox gc"
        )
    } else {
        format!(
            "container {id} has it as {name}, or was not followed by DEL: detach it there first"
        )
    })
}

fn find_record_of_host_device(is_meant: &dyn Fn(&OriginalState) -> bool) -> Option<DeviceRecord> {
    let records = all_records().into_iter().map(|(_, record)| record);
    // An attachment that has the device tells more than one that had it.
    records
        .filter(|record| !record.in_container && is_meant(&record.device))
        .min_by_key(|record| record.lost)
}

/// The state of a device of the host for a new record. A device that still has its name as alias
/// was not restored after an earlier container, whose record has the state.
pub fn state_for_record(host: &Netlink, device: &Link) -> Result<OriginalState> {
    if device.alias == device.name
        && let Some(DeviceRecord { device: origin, .. }) =
            find_record_of_host_device(&|recorded| recorded.name == device.name)
        && origin.identity == DeviceIdentity::from_link(device)
    {
        return Ok(origin);
    }
    OriginalState::from_device(host, device)
}

/// Returns the device of a record, given the records of valid attachments.
type GiveBack<'a> = &'a dyn Fn(&DeviceRecord, &[DeviceRecord]) -> Result<DeviceReturn>;

/// The files of one network: `<network>/<container>:<interface>.json`, for ports
/// `<network>/<container>:<interface>:<port>.json`. None of the names contains a colon.
pub struct DeviceRecordStore<'a> {
    network: &'a str,
    all: PathBuf,
    own: PathBuf,
}

impl<'a> DeviceRecordStore<'a> {
    pub fn for_network(plugin: &str, network: &'a NetworkName) -> DeviceRecordStore<'a> {
        DeviceRecordStore::for_network_in(&Path::new(DIR).join(plugin), network.as_str())
    }

    fn for_network_in(dir: &Path, network: &'a str) -> DeviceRecordStore<'a> {
        DeviceRecordStore { network, own: dir.join(network), all: dir.to_owned() }
    }

    /// The store with the directory of a network's records.
    pub(super) fn at_directory(own: &'a Path) -> DeviceRecordStore<'a> {
        let network = own.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let all = own.parent().unwrap_or(own).to_owned();
        DeviceRecordStore { network, own: own.to_owned(), all }
    }

    /// The temporary name of the files of an attachment.
    fn temporary_path(&self, id: &str, ifname: &str) -> PathBuf {
        backup::temporary_path(&self.own, &AttachmentId { network: self.network, id, ifname })
    }

    /// Writes a record, replacing an earlier record of the same attachment.
    pub fn save_record(&self, record: &DeviceRecord) -> Result<()> {
        self.write_record(record).map_err(|e| {
            let context = format!("record the state of \"{}\"", record.device.name);
            e.context(context)
                .with_details(format!("only root may write to {}", self.all.display()))
        })
    }

    fn write_record(&self, record: &DeviceRecord) -> Result<()> {
        dir::ensure_directory(&self.all, 0o700)?;
        dir::ensure_directory(&self.own, 0o700)?;
        let bytes = serde_json::to_vec(record).map_err(|e| Error::internal(e.to_string()))?;
        let temporary = self.temporary_path(&record.container_id, &record.ifname);
        let path = self.own.join(record.file_name());
        Ok(AtomicWriter::new(temporary, Durability::Volatile).replace_file(&path, &bytes, 0o600)?)
    }

    /// Ends an attachment. After a state that was not restored completely the next command retries
    /// once: a permanent error must not keep the container from being deleted. The record of
    /// hardware that is nowhere stays, so that the hardware gets its name and state when it is back.
    pub fn end_attachment(&self, mut record: DeviceRecord, returned: DeviceReturn) -> Result<()> {
        match returned {
            DeviceReturn::Returned(Some(error)) if !record.tried => {
                record.tried = true;
                self.save_record(&record)?;
                return Err(error.with_details("the next DEL or GC retries once"));
            }
            DeviceReturn::Returned(Some(error)) => warn!("{error}"),
            DeviceReturn::Nowhere if record.may_come_back() => return self.keep_lost(&record),
            DeviceReturn::Returned(None) | DeviceReturn::Stays | DeviceReturn::Nowhere => {}
        }
        self.remove_record(&record.container_id, &record.ifname, record.device_in_file_name())
    }

    fn keep_lost(&self, record: &DeviceRecord) -> Result<()> {
        if record.lost {
            return Ok(());
        }
        warn!(
            "\"{}\" is neither in the container nor on the host: \"cnibox gc\" and the next ADD \
             restore it when the kernel has given it back",
            record.device.name
        );
        let lost = DeviceRecord { lost: true, ..record.clone() };
        if let Err(error) = self.save_record(&lost) {
            // GC and ADD find the record as it is.
            warn!("{error}");
            return Ok(());
        }
        if lost.file_name() == record.file_name() {
            return Ok(());
        }
        self.remove_record(&record.container_id, &record.ifname, &record.port)
    }

    /// GC: ends the attachments that are not valid; `give_back` returns their devices.
    pub fn end_stale_attachments(&self, req: &GcRequest, give_back: GiveBack<'_>) -> Result<()> {
        let mut failures = Failures::new();
        let owners = req.valid.iter().map(|valid| AttachmentId {
            network: self.network,
            id: &valid.container_id,
            ifname: &valid.ifname,
        });
        self.remove_temporary_files(&owners.collect::<Vec<_>>());
        let (valid, stale): (Vec<_>, Vec<_>) =
            self.list_network_records().into_iter().partition(|record| {
                !record.lost && req.is_valid_attachment(&record.container_id, &record.ifname)
            });
        for record in stale {
            // A later container in the same namespace may have the device.
            let has_device = |other: &DeviceRecord| {
                other.device.name == record.device.name && other.netns == record.netns
            };
            let returned = if valid.iter().any(has_device) {
                Ok(DeviceReturn::Returned(None))
            } else {
                give_back(&record, &valid)
            };
            failures.keep_error(returned.and_then(|it| self.end_attachment(record, it)));
        }
        failures.into_result()
    }

    pub fn find_record(&self, id: &str, ifname: &str) -> Option<DeviceRecord> {
        let path = self.own.join(record_file_name(id, ifname, ""));
        if !is_private_directory(&self.own) {
            return None;
        }
        let bytes = backup::read_backup(&path).inspect_err(|e| warn!("could not {e}")).ok()??;
        decode_record(&path, &bytes)
    }

    /// Deletes the record of an attachment, or of its `port`, and the temporary file of an ADD that
    /// was killed.
    pub fn remove_record(&self, id: &str, ifname: &str, port: &str) -> Result<()> {
        remove_file(&self.temporary_path(id, ifname))?;
        Ok(remove_file(&self.own.join(record_file_name(id, ifname, port)))?)
    }

    /// Deletes the temporary files of ADDs that were killed, except for valid attachments.
    fn remove_temporary_files(&self, valid: &[AttachmentId<'_>]) {
        if is_private_directory(&self.own) {
            backup::remove_temporaries(&self.own, self.network, valid);
        }
    }

    pub fn list_network_records(&self) -> Vec<DeviceRecord> {
        records_in_directory(&self.own)
    }
}

/// The records of all plugins and networks, with their directories.
pub(super) fn all_records() -> Vec<(PathBuf, DeviceRecord)> {
    let mut records = Vec::new();
    for plugin in PLUGINS {
        let networks = fs::read_dir(Path::new(DIR).join(plugin)).into_iter().flatten().flatten();
        for directory in networks.map(|network| network.path()) {
            let found = records_in_directory(&directory).into_iter();
            records.extend(found.map(|record| (directory.clone(), record)));
        }
    }
    records
}

/// The records in a directory; none if other users can write to the directory.
fn records_in_directory(directory: &Path) -> Vec<DeviceRecord> {
    let files =
        backup::read_backups(directory).inspect_err(|e| warn!("could not {e}")).unwrap_or_default();
    files.iter().filter_map(|(path, bytes)| decode_record(path, bytes)).collect()
}

/// Whether only this user can write to a directory: other users could forge records.
fn is_private_directory(directory: &Path) -> bool {
    dir::require_own_directory(directory).inspect_err(|e| warn!("could not {e}")).unwrap_or(false)
}

/// The record in the file at `path`; `None` if it is invalid, or if its content does not match its
/// name.
fn decode_record(path: &Path, bytes: &[u8]) -> Option<DeviceRecord> {
    let record: DeviceRecord = serde_json::from_slice(bytes)
        .inspect_err(|e| warn!("could not read {}: {e}", path.display()))
        .ok()?;
    (*path.file_name()? == *record.file_name()).then_some(record)
}

fn record_file_name(id: &str, ifname: &str, port: &str) -> String {
    if port.is_empty() {
        format!("{id}:{ifname}.json")
    } else {
        format!("{id}:{ifname}:{port}.json")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::netlink::{MacAddress, ParentDevice};

    fn record(id: &str, device: &str) -> DeviceRecord {
        let device = OriginalState { mtu: 9000, up: true, ..OriginalState::from_name(device) };
        DeviceRecord {
            container_id: id.into(),
            ifname: "eth0".into(),
            netns: "/x".into(),
            netns_id: None,
            port: String::new(),
            in_container: false,
            device,
            tried: false,
            lost: false,
        }
    }

    fn records<'a>(dir: &Path, network: &'a str) -> DeviceRecordStore<'a> {
        DeviceRecordStore::for_network_in(dir, network)
    }

    #[test]
    fn records_are_written_found_listed_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (records(dir.path(), "a"), records(dir.path(), "b"));
        a.save_record(&record("c1", "ens1")).unwrap();
        a.save_record(&record("c1", "ens2")).unwrap();
        b.save_record(&record("c1", "ens3")).unwrap();
        assert_eq!(a.find_record("c1", "eth0"), Some(record("c1", "ens2")));
        assert_eq!(a.list_network_records(), [record("c1", "ens2")]);
        let left = a.temporary_path("c1", "eth0");
        fs::write(&left, "{").unwrap();
        a.remove_temporary_files(&[AttachmentId { network: "a", id: "c1", ifname: "eth0" }]);
        b.remove_temporary_files(&[]);
        assert!(left.exists());
        a.remove_temporary_files(&[]);
        assert!(!left.exists());
        a.remove_record("c1", "eth0", "").unwrap();
        a.remove_record("c1", "eth0", "").unwrap();
        assert_eq!(a.find_record("c1", "eth0"), None);
        assert_eq!(b.list_network_records(), [record("c1", "ens3")]);
    }

    #[test]
    fn each_port_has_a_record() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path(), "a");
        let port = |name: &str| DeviceRecord {
            port: name.into(),
            in_container: true,
            ..record("c1", name)
        };
        records.save_record(&port("ens1")).unwrap();
        records.save_record(&port("ens2")).unwrap();
        assert_eq!(
            (records.list_network_records().len(), records.find_record("c1", "eth0")),
            (2, None)
        );
        assert_eq!(
            (port("ens1").name_in_container(), record("c1", "ens1").name_in_container()),
            ("ens1", "eth0")
        );
        records.remove_record("c1", "eth0", "ens1").unwrap();
        assert_eq!(records.list_network_records(), [port("ens2")]);
    }

    #[test]
    fn unreadable_records_are_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path(), "a");
        records.save_record(&record("c1", "ens1")).unwrap();
        // A file whose name does not match its content is ignored.
        fs::copy(dir.path().join("a/c1:eth0.json"), dir.path().join("a/c2:eth0.json")).unwrap();
        assert_eq!(records.list_network_records(), [record("c1", "ens1")]);
        fs::remove_file(dir.path().join("a/c2:eth0.json")).unwrap();
        fs::write(dir.path().join("a/c1:eth0.json"), "{").unwrap();
        assert_eq!(records.list_network_records(), []);
        records.save_record(&record("c1", "ens1")).unwrap();
        let everybody = fs::Permissions::from_mode(0o777);
        fs::set_permissions(dir.path().join("a"), everybody).unwrap();
        assert_eq!(records.list_network_records(), [], "others may have put it there");
        assert!(records.save_record(&record("c1", "ens1")).is_err());
        let nowhere = DeviceRecordStore::for_network_in(Path::new("/proc/no"), "n");
        let error = nowhere.save_record(&record("c1", "ens1")).unwrap_err();
        assert!(error.message().starts_with("record the state of \"ens1\""), "{error}");
    }

    #[test]
    fn a_record_without_optional_fields_is_read() {
        let text = r#"{"containerID":"c1","ifname":"eth0","netns":"/x","device":{"name":"ens1",
            "altNames":["enp1s0"],"identity":{"kind":"","bus":"pci","parent":"0000:01:00.0",
             "permanentMac":"02:00:00:00:00:01","vlan":null,"link":null,"linkNetnsid":null},
            "alias":"","mac":"02:00:00:00:00:02","mtu":9000,"up":true,"promisc":false,
            "allmulti":null,
            "addresses":[{"net":"192.0.2.1/24","noPrefixRoute":false,"broadcast":true}],
            "routes":[{"dst":"10.0.0.0/8","gw":"192.0.2.254","src":null,"scope":0,"table":254,
             "priority":null,"protocol":4,"onlink":false}]},"tried":true}"#;
        let DeviceRecord { device, tried, netns_id, .. } = serde_json::from_str(text).unwrap();
        assert_eq!(netns_id, None);
        let hardware = ParentDevice { bus: "pci".into(), name: "0000:01:00.0".into() };
        let permanent_mac = Some(MacAddress([2, 0, 0, 0, 0, 1]));
        let link = Link { parent: Some(hardware), permanent_mac, ..Link::default() };
        assert_eq!(device.identity, DeviceIdentity::from_link(&link));
        assert_eq!((device.mac, tried), (Some(MacAddress([2, 0, 0, 0, 0, 2])), true));
        assert_eq!(device.addresses.len(), 1);
        assert_eq!(device.routes[0].gw, Some("192.0.2.254".parse().unwrap()));
    }

    #[test]
    fn unknown_keys_of_records_are_ignored() {
        let text = r#"{"containerID":"c","ifname":"e","netns":"/x","new":1,"device":{"name":"d","more":[]}}"#;
        let record: DeviceRecord = serde_json::from_str(text).unwrap();
        assert_eq!(record.device, OriginalState { name: "d".into(), ..OriginalState::default() });
    }
}
