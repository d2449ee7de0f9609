//! The record of an attachment that has something on the host which outlives the container's
//! namespace: rules, devices, a DHCP lease.
//!
//! The first plugin of a list that creates such state writes the record before, and removes the record in its
//! DEL, which is the last DEL of the list. Features of the packet filter add what they restore the attachment's rules
//! from ([`Kept`](super::Kept)). Records are lost at reboot, as the rules are. DEL is complete without
//! a record. A record that cannot be parsed counts as absent.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::boot::{Boot, Made, now};
use super::liveness::{Doubt, Evidence, HostEnd, Liveness, judge, judge_by};
use super::owner::Owner;
use crate::netlink::Netlink;
use crate::netns::{self, NetnsId};

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
    /// `ipam.type` of the plugin that wrote the record; empty without one, and up to release 0.2.0.
    pub ipam: String,
    /// `ipam.dataDir` of the plugin that wrote the record, if configured.
    pub data_dir: Option<PathBuf>,
    /// What each feature of the packet filter keeps, by its name.
    pub rules: BTreeMap<String, Value>,
    /// What one feature keeps, in a file of release 0.2.0.
    #[serde(skip_serializing)]
    pub content: Option<Value>,
}

impl Record {
    /// The record of an attachment that is made now, before its addresses are known.
    pub fn new(owner: Owner<'_>, plugin: &str, sandbox: &str) -> Record {
        Record {
            network: owner.network.to_owned(),
            id: owner.id.to_owned(),
            ifname: owner.ifname.to_owned(),
            plugin: plugin.to_owned(),
            sandbox: sandbox.to_owned(),
            host: netns::current_id().unwrap_or_default(),
            boot: Some(Boot::current()),
            created: now(),
            ..Record::default()
        }
    }

    /// The attachment.
    pub fn owner(&self) -> Owner<'_> {
        Owner { network: &self.network, ifname: &self.ifname, id: &self.id }
    }

    /// Whether the record is of the same instance of the attachment: a container may be created again with the same id.
    pub fn is_same_instance(&self, other: &Record) -> bool {
        let of = |record: &Record| (record.end, record.netns, record.boot.clone());
        self.owner() == other.owner() && of(self) == of(other)
    }

    /// Whether the attachment exists.
    pub fn liveness(&self) -> Liveness {
        Record::liveness_of(&[self]).pop().unwrap_or(Liveness::Unknown(Doubt::NoRecord))
    }

    /// As [`liveness`](Record::liveness), by a socket of the calling thread's network namespace.
    pub fn liveness_by(&self, host: &Netlink) -> Liveness {
        judge_by(&self.evidence(), &|| Ok(host))
    }

    /// Whether the attachment has certainly ended.
    pub fn is_gone(&self) -> bool {
        matches!(self.liveness(), Liveness::Gone(_))
    }

    /// Whether these attachments exist.
    pub fn liveness_of(records: &[&Record]) -> Vec<Liveness> {
        judge(&records.iter().map(|record| record.evidence()).collect::<Vec<_>>())
    }

    fn evidence(&self) -> Evidence<'_> {
        // Release 0.2.0, whose records are in memory only, which ends with the boot.
        let made = |then: &Boot| then.made(&Boot::current(), self.created);
        let made = self.boot.as_ref().map_or(Made::Now, made);
        Evidence { owner: self.owner(), made, end: self.end }
    }
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
            data_dir: Some("/d".into()),
            ..Record::default()
        };
        assert_eq!(serde_json::from_str::<Record>(text).unwrap(), expected);
        assert_eq!(expected.liveness(), Liveness::Unknown(Doubt::NoHostEnd));
    }
}
