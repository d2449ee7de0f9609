//! The records of devices that containers have, beside the alias that the reference plugin sets: one small file for
//! each attachment, which does not survive a reboot, just as the containers.
//!
//! A device that the reference plugin has moved has no record. It gets its name back, from its alias; its address,
//! MTU and whether it was up are unknown.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::origin::Origin;
use crate::cni::{ContainerId, IfName, NetworkName};
use crate::error::{Error, Result};
use crate::files::atomic::{Durability, Writer};
use crate::files::dir;
use crate::log;

/// The default of `dataDir`.
const DATA_DIR: &str = "/run/cni/host-device";

/// An attachment that has a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Record {
    #[serde(rename = "containerID")]
    pub(super) container_id: String,
    pub(super) ifname: String,
    /// The path of its namespace.
    pub(super) netns: String,
    pub(super) device: Origin,
    /// Whether a DEL has already failed to restore the device completely.
    #[serde(default)]
    pub(super) tried: bool,
}

/// The files of one network: `<network>/<container>:<interface>.json`. Of the three names only the separator can
/// contain a colon.
#[derive(Debug)]
pub(super) struct Records {
    all: PathBuf,
    own: PathBuf,
}

impl Records {
    pub(super) fn new(data_dir: Option<&str>, network: &NetworkName) -> Records {
        let all = PathBuf::from(data_dir.filter(|dir| !dir.is_empty()).unwrap_or(DATA_DIR));
        Records { own: all.join(network.as_str()), all }
    }

    fn file(&self, id: &str, ifname: &str) -> PathBuf {
        self.own.join(file_name(id, ifname))
    }

    /// Writes a record, replacing an earlier record of the same attachment.
    pub(super) fn keep(&self, record: &Record) -> Result<()> {
        self.write(record).map_err(|e| {
            let context = format!("keep how \"{}\" was, to give it back so", record.device.name);
            let remedy = "let \"dataDir\" name a folder that can be written to";
            e.context(context).with_details(remedy)
        })
    }

    fn write(&self, record: &Record) -> Result<()> {
        dir::ensure(&self.all, 0o700)?;
        dir::ensure(&self.own, 0o700)?;
        let bytes = serde_json::to_vec(record).map_err(|e| Error::internal(e.to_string()))?;
        let path = self.file(&record.container_id, &record.ifname);
        Ok(Writer::new(temporary(&path), Durability::Volatile).replace(&path, &bytes, 0o600)?)
    }

    /// Ends an attachment whose device is back; `incomplete` is the error of a state that was not restored completely.
    /// The next command retries once: a permanent error must not keep the container from being deleted.
    pub(super) fn conclude(&self, mut record: Record, incomplete: Option<Error>) -> Result<()> {
        match incomplete {
            Some(error) if !record.tried => {
                record.tried = true;
                self.keep(&record)?;
                return Err(error.with_details("the next DEL or GC tries once more"));
            }
            Some(error) => log::warn(error),
            None => {}
        }
        self.forget(&record.container_id, &record.ifname)
    }

    /// The record of an attachment.
    pub(super) fn find(&self, id: &ContainerId, ifname: &IfName) -> Option<Record> {
        if is_trusted(&self.own) { read(&self.file(id.as_str(), ifname.as_str())) } else { None }
    }

    /// Deletes the record of an attachment, and the temporary file of an ADD that was killed.
    pub(super) fn forget(&self, id: &str, ifname: &str) -> Result<()> {
        let path = self.file(id, ifname);
        [temporary(&path), path].iter().try_for_each(|path| match fs::remove_file(path) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                Err(Error::io(format_args!("remove {}", path.display()), &e))
            }
            _ => Ok(()),
        })
    }

    /// Deletes the temporary files of ADDs that were killed, except for valid attachments.
    pub(super) fn sweep(&self, is_valid: &dyn Fn(&str, &str) -> bool) {
        for path in files_in(&self.own, "tmp") {
            let name = path.file_stem().and_then(|name| name.to_str()?.split_once(':'));
            if name.is_some_and(|(id, ifname)| !is_valid(id, ifname)) {
                drop(fs::remove_file(path));
            }
        }
    }

    /// The records of this network.
    pub(super) fn of_network(&self) -> Vec<Record> {
        in_folder(&self.own)
    }

    /// The records of all networks.
    pub(super) fn of_node(&self) -> Vec<Record> {
        let folders = fs::read_dir(&self.all).into_iter().flatten().flatten();
        folders.flat_map(|folder| in_folder(&folder.path())).collect()
    }
}

/// The file that a record is written to before it is renamed. An attachment has one ADD at a time.
fn temporary(path: &Path) -> PathBuf {
    path.with_extension("tmp")
}

fn in_folder(folder: &Path) -> Vec<Record> {
    files_in(folder, "json").iter().filter_map(|path| read(path)).collect()
}

/// The files with this extension in a folder; none if other users can write to the folder.
fn files_in(folder: &Path, extension: &str) -> Vec<PathBuf> {
    if !is_trusted(folder) {
        return Vec::new();
    }
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    files.filter(|path| path.extension().is_some_and(|e| e == extension)).collect()
}

/// Whether only this user can write to a folder: other users could forge records.
fn is_trusted(folder: &Path) -> bool {
    dir::require_own(folder).inspect_err(|e| log::warn(e)).unwrap_or(false)
}

/// The record at `path`; `None` if it cannot be read, or if its content does not match its name.
fn read(path: &Path) -> Option<Record> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => {
            log::warn(Error::io(format_args!("read {}", path.display()), &error));
            return None;
        }
    };
    let record: Record = serde_json::from_slice(&bytes)
        .inspect_err(|e| log::warn(format_args!("read {}: {e}", path.display())))
        .ok()?;
    let expected = file_name(&record.container_id, &record.ifname);
    (*path.file_name()? == *expected).then_some(record)
}

fn file_name(id: &str, ifname: &str) -> String {
    format!("{id}:{ifname}.json")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn record(id: &str, device: &str) -> Record {
        let device = Origin { mtu: 9000, up: true, ..Origin::named(device) };
        Record {
            container_id: id.into(),
            ifname: "eth0".into(),
            netns: "/x".into(),
            device,
            tried: false,
        }
    }

    fn records(dir: &Path, network: &str) -> Records {
        Records::new(dir.to_str(), &NetworkName::parse(network).unwrap())
    }

    #[test]
    fn kept_found_listed_and_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (records(dir.path(), "a"), records(dir.path(), "b"));
        a.keep(&record("c1", "ens1")).unwrap();
        a.keep(&record("c1", "ens2")).unwrap();
        b.keep(&record("c1", "ens3")).unwrap();
        let (id, ifname) = (ContainerId::parse("c1").unwrap(), IfName::parse("eth0").unwrap());
        assert_eq!(a.find(&id, &ifname), Some(record("c1", "ens2")));
        assert_eq!(a.of_network(), [record("c1", "ens2")]);
        assert_eq!(a.of_node().len(), 2);
        let left = temporary(&a.file("c1", "eth0"));
        fs::write(&left, "{").unwrap();
        a.sweep(&|id, ifname| (id, ifname) == ("c1", "eth0"));
        b.sweep(&|_, _| false);
        assert!(left.exists());
        a.sweep(&|_, _| false);
        assert!(!left.exists());
        a.forget("c1", "eth0").unwrap();
        a.forget("c1", "eth0").unwrap();
        assert_eq!(a.find(&id, &ifname), None);
        assert_eq!(b.of_node(), [record("c1", "ens3")]);
    }

    #[test]
    fn what_cannot_be_read_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path(), "a");
        records.keep(&record("c1", "ens1")).unwrap();
        // A file whose name does not match its content is ignored.
        fs::copy(dir.path().join("a/c1:eth0.json"), dir.path().join("a/c2:eth0.json")).unwrap();
        assert_eq!(records.of_network(), [record("c1", "ens1")]);
        fs::remove_file(dir.path().join("a/c2:eth0.json")).unwrap();
        fs::write(dir.path().join("a/c1:eth0.json"), "{").unwrap();
        assert_eq!(records.of_network(), []);
        records.keep(&record("c1", "ens1")).unwrap();
        let everybody = fs::Permissions::from_mode(0o777);
        fs::set_permissions(dir.path().join("a"), everybody).unwrap();
        assert_eq!(records.of_network(), [], "others may have put it there");
        assert!(records.keep(&record("c1", "ens1")).is_err());
        let nowhere = Records::new(Some("/proc/no"), &NetworkName::parse("n").unwrap());
        let error = nowhere.keep(&record("c1", "ens1")).unwrap_err();
        assert!(error.msg().starts_with("keep how \"ens1\" was"), "{error}");
    }

    #[test]
    fn records_of_later_releases_may_say_more() {
        let text = r#"{"containerID":"c","ifname":"e","netns":"/x","new":1,"device":{"name":"d","more":[]}}"#;
        let record: Record = serde_json::from_str(text).unwrap();
        assert_eq!(record.device, Origin { name: "d".into(), ..Origin::default() });
    }
}
