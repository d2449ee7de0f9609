//! The record of an attachment that has state on the host which outlives the container's network
//! namespace: rules, devices, a DHCP lease.
//!
//! The first plugin of a list that creates such state writes the record first, and removes the
//! record in its DEL, which is the last DEL of the list. Features of the packet filter add the data
//! from which they restore the attachment's rules ([`RecordStore`](super::RecordStore)). Records
//! are lost at reboot, like the rules. DEL needs no record. A record that cannot be parsed counts
//! as absent.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::boot::{BootIdentity, BootRelation, current_unix_time};
use super::liveness::{
    HostVeth, Liveness, LivenessEvidence, UnknownBecause, check_socket, judge_liveness,
};
use super::owner::AttachmentId;
use crate::netlink::Netlink;
use crate::netns::{self, NetnsIdentity};
use cni::json::Json;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AttachmentRecord {
    pub network: String,
    /// The container id.
    pub id: String,
    /// The name of the interface in the container.
    pub ifname: String,
    /// The plugin that wrote the record; empty if only a feature did.
    pub plugin: String,
    /// The path in `CNI_NETNS`.
    pub sandbox: String,
    /// The network namespace at `sandbox` when the record was written.
    pub netns: Option<NetnsIdentity>,
    /// The [identity](netns::current_id) of the host's network namespace.
    pub host: u64,
    /// The boot in which the record was written.
    pub boot: Option<BootIdentity>,
    /// The time at which the record was written, in seconds since 1970.
    pub created: i64,
    pub end: Option<HostVeth>,
    pub ips: Vec<IpAddr>,
    /// `ipam.type` of the plugin that wrote the record; empty without one.
    pub ipam: String,
    /// `ipam.dataDir` of the plugin that wrote the record, if configured.
    pub data_dir: Option<PathBuf>,
    /// The part of each feature of the packet filter, by the feature's name.
    pub rules: BTreeMap<String, Json>,
}

/// The [identity](netns::current_id) of the host's network namespace, which a thread asks for once.
pub(super) fn host_netns_id() -> Option<u64> {
    thread_local! {
        static HOST: Cell<Option<u64>> = const { Cell::new(None) };
    }
    // The thread of a test moves to other namespaces.
    if HOST.get().is_none() || cfg!(any(test, feature = "testing")) {
        HOST.set(netns::current_id());
    }
    HOST.get()
}

impl AttachmentRecord {
    /// The record of an attachment that is being created, before its addresses are known.
    pub fn new(owner: AttachmentId<'_>, plugin: &str, sandbox: &str) -> AttachmentRecord {
        AttachmentRecord {
            network: owner.network.to_owned(),
            id: owner.id.to_owned(),
            ifname: owner.ifname.to_owned(),
            plugin: plugin.to_owned(),
            sandbox: sandbox.to_owned(),
            host: host_netns_id().unwrap_or_default(),
            boot: Some(BootIdentity::current()),
            created: current_unix_time(),
            ..AttachmentRecord::default()
        }
    }

    pub fn attachment_id(&self) -> AttachmentId<'_> {
        AttachmentId { network: &self.network, ifname: &self.ifname, id: &self.id }
    }

    /// Whether the record is of the same instance of the attachment: a container may be created
    /// again with the same id.
    pub fn is_same_instance(&self, other: &AttachmentRecord) -> bool {
        let instance = |record: &AttachmentRecord| (record.end, record.netns, record.boot.clone());
        self.attachment_id() == other.attachment_id() && instance(self) == instance(other)
    }

    /// Whether the attachment exists.
    pub fn liveness(&self) -> Liveness {
        AttachmentRecord::liveness_of_all(&[self])
            .pop()
            .unwrap_or(Liveness::Unknown(UnknownBecause::NoRecord))
    }

    /// Like [`liveness`](AttachmentRecord::liveness), by a socket of the calling thread's network
    /// namespace.
    pub fn liveness_by(&self, host: &Netlink) -> Liveness {
        check_socket(&self.liveness_evidence(), &|| Ok(host))
    }

    /// Whether the attachment has certainly ended.
    pub fn is_gone(&self) -> bool {
        matches!(self.liveness(), Liveness::Gone(_))
    }

    /// Whether these attachments exist.
    pub fn liveness_of_all(records: &[&AttachmentRecord]) -> Vec<Liveness> {
        judge_liveness(&records.iter().map(|record| record.liveness_evidence()).collect::<Vec<_>>())
    }

    fn liveness_evidence(&self) -> LivenessEvidence<'_> {
        let made = |then: &BootIdentity| then.relation_to(&BootIdentity::current(), self.created);
        let made = self.boot.as_ref().map_or(BootRelation::Elsewhere, made);
        LivenessEvidence { owner: self.attachment_id(), made, end: self.end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attachment::ContainerVeth;

    /// A node may run executables of several architectures: 32-bit plugins on a 64-bit kernel, or
    /// under emulation.
    #[test]
    fn records_have_the_same_text_on_every_architecture() {
        let record = AttachmentRecord {
            network: "net".to_owned(),
            id: "c1".to_owned(),
            ifname: "eth0".to_owned(),
            plugin: "ptp".to_owned(),
            netns: Some(NetnsIdentity { dev: 4, ino: u64::MAX, ctime: 5_000_000_000_000_000_000 }),
            host: 1 << 63,
            boot: Some(BootIdentity { machine: Some("m".to_owned()), id: "b".to_owned() }),
            created: 5_000_000_000,
            end: Some(HostVeth {
                netns: 1 << 32,
                index: u32::MAX,
                labelled: true,
                peer: Some(ContainerVeth { nsid: i32::MAX, index: 2 }),
            }),
            ips: vec!["10.1.2.3".parse().unwrap(), "fd00::1".parse().unwrap()],
            rules: BTreeMap::from([("spoof".to_owned(), Json::encode(&u64::MAX))]),
            ..AttachmentRecord::default()
        };
        let text = concat!(
            r#"{"network":"net","id":"c1","ifname":"eth0","plugin":"ptp","sandbox":"","#,
            r#""netns":{"dev":4,"ino":18446744073709551615,"ctime":5000000000000000000},"host":9223372036854775808,"#,
            r#""boot":{"machine":"m","id":"b"},"created":5000000000,"#,
            r#""end":{"netns":4294967296,"index":4294967295,"labelled":true,"peer":{"nsid":2147483647,"index":2}},"#,
            r#""ips":["10.1.2.3","fd00::1"],"#,
            r#""ipam":"","dataDir":null,"rules":{"spoof":18446744073709551615}}"#
        );
        assert_eq!(serde_json::to_string(&record).unwrap(), text);
        assert_eq!(serde_json::from_str::<AttachmentRecord>(text).unwrap(), record);
    }
}
