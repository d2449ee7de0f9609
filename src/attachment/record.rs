//! The record of an attachment that has something on the host which outlives the container's
//! namespace: rules, devices.
//!
//! ```text
//! /run/cni/cnibox/attachments/<instance>.json
//! /run/cni/cnibox/addresses/10.88.0.2 -> ../attachments/<instance>.json
//! ```
//!
//! The first plugin of a list that makes such a thing writes it before, and removes it with its DEL,
//! which is the last one. It ends with the boot, as the rules do. DEL needs none to be complete. One
//! that was cut off half-way cannot be read, and is as good as none: nothing is believed.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

use super::life::{Life, Trace, judge};
use super::owner::{Owner, network_hash};
use crate::error::{Error, Result};
use crate::netns::census::NetnsId;

/// Root's own, on a file system of this boot.
const DIR: &str = "/run/cni/cnibox";
const ATTACHMENTS: &str = "/run/cni/cnibox/attachments";
const ADDRESSES: &str = "/run/cni/cnibox/addresses";
/// How a link to a record begins, and ends.
const LINK: &str = "../attachments/";
const ENDING: &str = ".json";
/// The host's namespace: several may share `/run`.
const HOST: &str = "/proc/thread-self/ns/net";

/// What is noted of an attachment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Record {
    /// The network.
    pub network: String,
    /// The container.
    pub id: String,
    /// The interface in it.
    pub ifname: String,
    /// The plugin that wrote this.
    pub plugin: String,
    /// `CNI_NETNS`.
    pub sandbox: String,
    /// The namespace that was there.
    pub netns: Option<NetnsId>,
    /// The number of the host's namespace.
    pub host: u64,
    /// The container's addresses.
    pub ips: Vec<IpAddr>,
    /// Links of the host in the result: bridge, host's ends.
    pub interfaces: Vec<String>,
    /// `ipam.dataDir`, if it was configured where this was written.
    pub data_dir: Option<PathBuf>,
}

impl Record {
    /// That of an attachment, as far as it is known before its addresses.
    pub fn new(owner: Owner<'_>, plugin: &str, sandbox: &str) -> Record {
        Record {
            network: owner.network.to_owned(),
            id: owner.id.to_owned(),
            ifname: owner.ifname.to_owned(),
            plugin: plugin.to_owned(),
            sandbox: sandbox.to_owned(),
            host: host().unwrap_or_default(),
            ..Record::default()
        }
    }

    /// Whose it is.
    pub fn owner(&self) -> Owner<'_> {
        Owner { network: &self.network, ifname: &self.ifname, id: &self.id }
    }

    /// That of an attachment, if there is one for this host.
    pub fn of(owner: Owner<'_>) -> Option<Record> {
        Record::read(&owner.instance())
    }

    /// The one of this [instance](Owner::instance).
    pub fn read(instance: &str) -> Option<Record> {
        if !instance.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-') {
            return None;
        }
        let record = Record::load(&place(instance)).ok()??;
        (record.is_here() && record.owner().instance() == instance).then_some(record)
    }

    /// That of the attachment which got this address last. Costs one system call if none has it.
    pub fn of_address(ip: IpAddr) -> Option<Record> {
        let target = fs::read_link(Path::new(ADDRESSES).join(ip.to_string())).ok()?;
        let instance = target.to_str()?.strip_prefix(LINK)?.strip_suffix(ENDING)?;
        Record::read(instance).filter(|record| record.ips.contains(&ip))
    }

    /// All of a network, or of every one.
    pub fn all(network: Option<&str>) -> Vec<Record> {
        let prefix = network.map(network_hash).unwrap_or_default();
        let entries = fs::read_dir(ATTACHMENTS).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let names = names.filter(|name| name.starts_with(&prefix));
        names.filter_map(|name| Record::read(name.strip_suffix(ENDING)?)).collect()
    }

    /// `None` is one that makes no sense.
    fn load(path: &Path) -> io::Result<Option<Record>> {
        let file = OpenOptions::new().read(true).custom_flags(nofollow()).open(path)?;
        Ok(serde_json::from_reader(io::BufReader::new(file)).ok())
    }

    /// Whether it is about the calling thread's host.
    fn is_here(&self) -> bool {
        host().is_some_and(|host| self.host == host)
    }

    /// Writes it, in place of an earlier one of the attachment, and has its addresses lead to it.
    pub fn write(&self) -> Result<()> {
        let instance = self.owner().instance();
        let path = place(&instance);
        let noted = || {
            if self.host == 0 {
                return Err(io::Error::other("the host's namespace cannot be told"));
            }
            let mut file = create(&path)?;
            file.write_all(&serde_json::to_vec(&self)?)?;
            self.ips.iter().try_for_each(|ip| link(*ip, &target(&instance)))
        };
        noted()
            .map_err(|e| Error::io(format_args!("note the attachment in {}", path.display()), &e))
    }

    /// Removes it, and what leads to it.
    pub fn remove(&self) -> Result<()> {
        let instance = self.owner().instance();
        let target = target(&instance);
        for ip in &self.ips {
            let link = Path::new(ADDRESSES).join(ip.to_string());
            if fs::read_link(&link).is_ok_and(|to| to == Path::new(&target)) {
                remove(&link)?;
            }
        }
        remove(&place(&instance))
    }

    /// Whether the container can still be alive.
    pub fn life(&self) -> Life {
        let known = self.netns.filter(|netns| netns.born != 0);
        if known.is_some() && known == NetnsId::at(Path::new(&self.sandbox)) {
            return Life::Alive;
        }
        let trace = Trace { netns: self.netns, earlier_boot: false, ips: self.ips.clone() };
        judge(&[trace]).pop().unwrap_or(Life::Unknown)
    }
}

/// Removes the attachment's record if it is this plugin's, or cannot be read.
pub fn forget(owner: Owner<'_>, plugin: &str) -> Result<()> {
    let path = place(&owner.instance());
    match Record::load(&path) {
        Ok(Some(record)) if record.plugin == plugin && record.is_here() => record.remove(),
        Ok(None) => remove(&path),
        Ok(Some(_)) => Ok(()),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(Error::io(format_args!("open {}", path.display()), &e)),
    }
}

fn place(instance: &str) -> PathBuf {
    Path::new(ATTACHMENTS).join(format!("{instance}{ENDING}"))
}

fn target(instance: &str) -> String {
    format!("{LINK}{instance}{ENDING}")
}

fn nofollow() -> i32 {
    (OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC).bits()
}

fn host() -> Option<u64> {
    fs::metadata(HOST).ok().map(|meta| meta.ino())
}

/// Not by way of a temporary name: calls for one attachment come one after the other, and what is
/// cut off half-way is not believed.
fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(nofollow());
    options.open(path).or_else(|e| match e.kind() {
        ErrorKind::NotFound => make_folders().and_then(|()| options.open(path)),
        _ => Err(e),
    })
}

fn make_folders() -> io::Result<()> {
    for dir in [ATTACHMENTS, ADDRESSES] {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    for dir in [DIR, ATTACHMENTS, ADDRESSES] {
        let meta = fs::symlink_metadata(dir)?;
        if !meta.is_dir() || meta.uid() != geteuid().as_raw() || meta.mode() & 0o022 != 0 {
            return Err(io::Error::new(
                ErrorKind::PermissionDenied,
                format!("{dir} is not root's own"),
            ));
        }
    }
    Ok(())
}

/// Has the address lead to a record; it led to that of whoever had it before.
fn link(ip: IpAddr, target: &str) -> io::Result<()> {
    let path = Path::new(ADDRESSES).join(ip.to_string());
    match symlink(target, &path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => {
            fs::remove_file(&path)?;
            symlink(target, &path)
        }
        linked => linked,
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            Err(Error::io(format_args!("remove {}", path.display()), &e))
        }
        _ => Ok(()),
    }
}
