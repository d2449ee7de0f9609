//! The record of an attachment that has something on the host which outlives the container's
//! namespace: rules, devices.
//!
//! ```text
//! /run/cni/cnibox/attachments/<instance>.json
//! /run/cni/cnibox/addresses/10.88.0.2 -> ../attachments/<instance>.json
//! ```
//!
//! The first plugin of a list that creates such state writes the record before, and removes the record in its
//! DEL, which is the last DEL of the list. Records are lost at reboot, as the rules are. DEL is complete without
//! a record. A truncated record cannot be parsed and counts as absent.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::{fs, slice};

use serde::{Deserialize, Serialize};

use super::file::{self, ENDING, host};
use super::liveness::{Liveness, Trace, judge};
use super::owner::{Owner, network_hash};
use crate::cni::NetworkName;
use crate::error::{Error, Result};
use crate::files::{self, During, remove_file};
use crate::netns::NetnsId;

const ATTACHMENTS: &str = "/run/cni/cnibox/attachments";
const ADDRESSES: &str = "/run/cni/cnibox/addresses";
/// The prefix of the target of a symbolic link to a record.
const LINK: &str = "../attachments/";

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
    /// The plugin that wrote the record.
    pub plugin: String,
    /// `CNI_NETNS`.
    pub sandbox: String,
    /// The network namespace at `sandbox` when the record was written.
    pub netns: Option<NetnsId>,
    /// The inode number of the host's network namespace.
    pub host: u64,
    /// The container's addresses.
    pub ips: Vec<IpAddr>,
    /// The host's links in the result: bridge, host ends of veth pairs.
    pub interfaces: Vec<String>,
    /// `ipam.dataDir` of the plugin that wrote the record, if configured.
    pub data_dir: Option<PathBuf>,
}

impl Record {
    /// The record of an attachment before its addresses are known.
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

    /// The attachment.
    pub fn owner(&self) -> Owner<'_> {
        Owner { network: &self.network, ifname: &self.ifname, id: &self.id }
    }

    /// The record of an attachment, if there is one for this host.
    pub fn of(owner: Owner<'_>) -> Option<Record> {
        Record::read(&owner.instance())
    }

    /// The record of this [instance](Owner::instance).
    pub fn read(instance: &str) -> Option<Record> {
        if !instance.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-') {
            return None;
        }
        let record = file::load::<Record>(&place(instance)).ok()??;
        (record.is_here() && record.owner().instance() == instance).then_some(record)
    }

    /// The record of the last attachment that was given this address. One system call if there is none.
    pub fn of_address(ip: IpAddr) -> Option<Record> {
        let target = fs::read_link(Path::new(ADDRESSES).join(ip.to_string())).ok()?;
        let instance = target.to_str()?.strip_prefix(LINK)?.strip_suffix(ENDING)?;
        Record::read(instance).filter(|record| record.ips.contains(&ip))
    }

    /// The records of the other attachments of this host that have this address.
    pub fn sharing(ip: IpAddr, except: Owner<'_>) -> Vec<Record> {
        let mut records = Record::all(None);
        records.retain(|record| record.ips.contains(&ip) && record.owner() != except);
        records
    }

    /// All records of `network`, or of all networks.
    pub fn all(network: Option<&str>) -> Vec<Record> {
        let prefix = network.map(network_hash).unwrap_or_default();
        let instances = file::instances(Path::new(ATTACHMENTS), &prefix);
        instances.iter().filter_map(|instance| Record::read(instance)).collect()
    }

    /// Removes the truncated records of the network, except for the records of `valid`.
    pub fn remove_cut_off(network: &NetworkName, valid: &[Owner<'_>]) -> Result<()> {
        let valid: Vec<String> = valid.iter().map(Owner::instance).collect();
        let mut cut_off = file::instances(Path::new(ATTACHMENTS), &network_hash(network.as_str()));
        cut_off.retain(|instance| {
            let is_cut_off = || matches!(file::load::<Record>(&place(instance)), Ok(None));
            !valid.contains(instance) && is_cut_off()
        });
        Ok(cut_off.iter().try_for_each(|instance| remove_file(&place(instance)))?)
    }

    /// Whether the record was written in the calling thread's network namespace.
    fn is_here(&self) -> bool {
        host().is_some_and(|host| self.host == host)
    }

    /// Writes the record, replacing an earlier record of the attachment, and links its addresses to the record.
    pub fn write(&self) -> Result<()> {
        let instance = self.owner().instance();
        let path = place(&instance);
        let written = file::write(&path, self.host, self)
            .and_then(|()| self.ips.iter().try_for_each(|ip| link(*ip, &target(&instance))));
        written.map_err(|e| Error::from(e).context("record the attachment"))
    }

    /// Removes the record and the links of its addresses.
    pub fn remove(&self) -> Result<()> {
        let instance = self.owner().instance();
        let target = target(&instance);
        for ip in &self.ips {
            let link = Path::new(ADDRESSES).join(ip.to_string());
            if fs::read_link(&link).is_ok_and(|to| to == Path::new(&target)) {
                remove_file(&link)?;
            }
        }
        Ok(remove_file(&place(&instance))?)
    }

    /// Whether the container can still be alive.
    pub fn liveness(&self) -> Liveness {
        Record::liveness_of(slice::from_ref(self)).pop().unwrap_or(Liveness::Unknown)
    }

    /// Whether these containers can still be alive.
    pub fn liveness_of(records: &[Record]) -> Vec<Liveness> {
        let is_alive = |record: &Record| {
            let known = record.netns.filter(|netns| netns.ctime != 0);
            known.is_some() && known == NetnsId::at(Path::new(&record.sandbox))
        };
        let mut lives: Vec<Liveness> = vec![Liveness::Alive; records.len()];
        let doubtful: Vec<usize> = (0..records.len()).filter(|i| !is_alive(&records[*i])).collect();
        let trace = |i: &usize| Trace {
            netns: records[*i].netns,
            earlier_boot: false,
            ips: records[*i].ips.clone(),
        };
        let traces: Vec<Trace> = doubtful.iter().map(trace).collect();
        for (i, life) in doubtful.into_iter().zip(judge(&traces)) {
            lives[i] = life;
        }
        lives
    }
}

/// Removes the attachment's record if this plugin wrote the record, or the record cannot be parsed.
pub fn forget(owner: Owner<'_>, plugin: &str) -> Result<()> {
    let path = place(&owner.instance());
    match file::load::<Record>(&path) {
        Ok(Some(record)) if record.plugin == plugin && record.is_here() => record.remove(),
        Ok(None) => Ok(remove_file(&path)?),
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

/// Links the address to this record, replacing the link to the record of its previous owner.
fn link(ip: IpAddr, target: &str) -> files::Result<()> {
    let path = Path::new(ADDRESSES).join(ip.to_string());
    match symlink(target, &path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => remove_file(&path)?,
        Err(e) if e.kind() == ErrorKind::NotFound => file::make_folder(Path::new(ADDRESSES))?,
        linked => return linked.during("link", &path),
    }
    symlink(target, &path).during("link", &path)
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
        };
        assert_eq!(serde_json::from_str::<Record>(text).unwrap(), expected);
    }
}
