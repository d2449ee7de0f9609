//! Which forwarded traffic of containers is accepted: rules per attachment, in one of three back
//! ends.
//!
//! | file | |
//! | --- | --- |
//! | `nft.rs` | own tables of `nf_tables`, sets keyed by address and interface |
//! | `iptables.rs`, `iptables/words.rs` | the reference's chains `CNI-FORWARD`, `CNI-ISOLATION-STAGE-1`, ... |
//! | `firewalld.rs`, `dbus.rs` | sources in a zone of firewalld, over D-Bus |

mod dbus;
pub mod firewalld;
pub(super) mod iptables;
mod nft;

use std::collections::HashSet;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

pub use self::iptables::DEFAULT_ADMIN;
use super::backend::FilterFeature;
use super::iptables::TablesLock;
use super::layout::{HandoverCount, RestorableState};
use super::{AttachmentId, PacketFilter, RuleBackend};
use crate::attachment::{AttachmentRecord, RecordStore, StoredRecord, decode_part};
use crate::netlink::{Link, Netlink};
use cni::error::{Error, Result, join_outcomes};
use cni::json::Json;

/// The parts of this feature in the records of attachments.
pub const RECORDS: RecordStore = RecordStore("firewall");

/// The feature, for the back ends `nf_tables` and iptables.
pub const FEATURE: FilterFeature = FilterFeature {
    elements: Some(nft::ELEMENTS),
    rules: Some(iptables::RULES),
    decided_part: nft::decided_part,
    remove: |filter, owner, ips| delete_rules(filter, owner, ips, None),
    hand_over: &[("firewall rules", hand_over)],
    ..FilterFeature::new(RestorableState {
        kept: RECORDS,
        layouts: &nft::LAYOUTS,
        needs_table: |layout| nft::ELEMENTS.need_table(layout.table),
        restore: nft::restore_elements,
    })
};

/// The accepted traffic of an attachment: the content of its part in the record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FirewallPart {
    pub backend: RuleBackend,
    /// The addresses, without duplicates.
    pub ips: Vec<IpAddr>,
    /// The host ends of the veth pairs: ports of the bridge.
    pub ports: Vec<String>,
    /// The policy of the bridge.
    pub policy: IngressPolicy,
    /// The bridge; with [`IngressPolicy::Open`] it may be missing.
    pub bridge: Option<String>,
    /// The administrator's chain in iptables; `None` if firewalld accepts the addresses, and only
    /// the policy is enforced here.
    pub admin: Option<String>,
}

/// Which connections to the containers of a bridge are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IngressPolicy {
    /// All connections.
    Open,
    /// From the bridge's own containers, and from interfaces that are not bridges with a policy.
    SameBridge,
    /// From interfaces that are not bridges with a policy: not even from the same bridge.
    Isolated,
}

impl IngressPolicy {
    /// Parses `ingressPolicy`.
    pub fn parse(text: &str) -> Result<IngressPolicy> {
        let all = [IngressPolicy::Open, IngressPolicy::SameBridge, IngressPolicy::Isolated];
        all.into_iter().find(|policy| policy.as_str() == text || text.is_empty()).ok_or_else(|| {
            Error::config(format!("unknown ingress policy: \"{text}\""))
                .with_details("ingressPolicy is open, same-bridge or isolated")
        })
    }

    /// The name in a configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            IngressPolicy::Open => "open",
            IngressPolicy::SameBridge => "same-bridge",
            IngressPolicy::Isolated => "isolated",
        }
    }
}

/// Whether this record decides the policy that is restored on a bridge that has lost its policy.
/// The latest record with rules decides among those with the same back end, network and bridge;
/// among records of one second, the one with the strictest policy.
fn decides_policy(
    kept: &StoredRecord<Json>,
    all: &[StoredRecord<Json>],
    has_rules: &dyn Fn(&Json) -> bool,
) -> bool {
    fn place(kept: &StoredRecord<Json>) -> (Option<&Json>, &str, Option<&Json>) {
        (
            kept.content.get_member("backend"),
            kept.attachment_id().network,
            kept.content.get_member("bridge"),
        )
    }
    fn rank(kept: &StoredRecord<Json>) -> (i64, Option<u8>, &str, &str) {
        let (owner, policy) = (kept.attachment_id(), kept.content.get_member("policy"));
        let policy = policy.and_then(decode_part::<IngressPolicy>);
        (kept.record.created, policy.map(|policy| policy as u8), owner.id, owner.ifname)
    }
    // Parts are decoded last, and only up to the first such record: a table may have the rules of
    // hundreds.
    let mut later =
        all.iter().filter(|other| place(other) == place(kept) && rank(other) > rank(kept));
    !later.any(|other| has_rules(&other.content))
}

/// Accepts the attachment's traffic, and applies the policy to its bridge. After a failure,
/// [`delete_rules`] removes the rest.
pub fn add_rules(filter: &PacketFilter, owner: AttachmentId<'_>, pod: &FirewallPart) -> Result<()> {
    if pod.backend == RuleBackend::Nftables {
        RECORDS.add_part(owner, pod);
        return Ok(nft::add_elements(filter, owner, pod)?);
    }
    let former = RECORDS.read_content::<FirewallPart>(owner).map(|mut former| {
        former.ips.retain(|ip| !pod.ips.contains(ip));
        former.ips
    });
    // Whoever restores the rules of all records, under this lock, finds the rules of this record.
    let _lock = TablesLock::acquire()?;
    RECORDS.add_part(owner, pod);
    iptables::add_rules(filter, owner, pod, former.as_deref())
}

/// Whether one of the addresses is accepted by `nf_tables`.
pub fn has_nft_elements(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    ips: &[IpAddr],
) -> Result<bool> {
    Ok(nft::has_elements(filter.nft_socket()?, owner, ips)?)
}

/// Deletes the attachment's rules in both back ends: the rules of the addresses `ips`, and of the
/// addresses in its record. Without `ports` the sets of `nf_tables` are searched, also for other
/// addresses. Continues after an error; the errors are joined.
pub fn delete_rules(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    ips: &[IpAddr],
    ports: Option<&[String]>,
) -> Result<()> {
    let pod = RECORDS.read_content::<FirewallPart>(owner);
    let own = pod.as_ref().and_then(link_with_own_policy);
    // A killed DEL may have removed the part, but not the record.
    let record = AttachmentRecord::find_by_attachment(owner).unwrap_or_default();
    let recorded = pod.iter().flat_map(|pod| &pod.ips).chain(&record.ips);
    let all_ips: Vec<IpAddr> = ips.iter().chain(recorded).copied().collect();
    let (ips, ports) = ports.map_or_else(Default::default, |ports| (ips, ports));
    filter.warn_of_legacy_rules(RECORDS, owner, "filter", "CNI-FORWARD");
    // GC finds the rules in iptables by the part; nobody restores them before the part is removed.
    let is_in_iptables = pod.as_ref().is_some_and(|pod| pod.backend == RuleBackend::Iptables);
    let lock = is_in_iptables.then(TablesLock::acquire_or_continue);
    let deleted = iptables::delete_rules(filter, owner, &all_ips, own)
        .and_then(|()| RECORDS.remove_part(owner));
    drop(lock);
    join_outcomes([
        deleted,
        filter.query_nft(&|nft| nft::delete_elements(nft, owner, ips, ports, own)),
    ])
}

/// The link whose policy is for this attachment alone: the host's end of a pair without a bridge,
/// as ptp creates it, which is deleted with the container.
fn link_with_own_policy(pod: &FirewallPart) -> Option<&str> {
    let has_policy = pod.policy != IngressPolicy::Open && pod.ports.is_empty();
    let link = pod.bridge.as_deref().filter(|_| has_policy)?;
    let found = Netlink::open().and_then(|host| host.find_link(link)).ok()?;
    found.is_none_or(|found| found.kind.as_deref() == Some("veth")).then_some(link)
}

/// The links in `policies` whose policy has no effect: links that do not exist, and bridges without
/// ports, except the links of living attachments that are not among `stale`. To be called after the
/// policies are read: ADD writes its record before its policy.
fn unused_policy_links(
    mut policies: HashSet<String>,
    stale: &[StoredRecord<FirewallPart>],
) -> HashSet<String> {
    if policies.is_empty() {
        return policies;
    }
    let Ok(links) = Netlink::open().and_then(|host| host.dump_links()) else {
        return HashSet::new();
    };
    let masters: HashSet<_> = links.iter().filter_map(|link| link.master).collect();
    let is_used =
        |link: &&Link| link.kind.as_deref() != Some("bridge") || masters.contains(&link.index);
    for link in links.iter().filter(is_used) {
        policies.remove(&link.name);
    }
    for kept in RECORDS.restorable_parts::<FirewallPart>() {
        let is_stale = stale.iter().any(|other| other.attachment_id() == kept.attachment_id());
        if let Some(bridge) = kept.content.bridge.filter(|_| !is_stale) {
            policies.remove(&bridge);
        }
    }
    policies
}

/// Removes the rules of the network's attachments that are not among `valid`, and the policies of
/// links that are not in use; with `nf_tables`, if no attachment is valid, the policies of the
/// network, too.
pub fn remove_stale_rules(
    filter: &PacketFilter,
    network: &str,
    valid: &[AttachmentId<'_>],
) -> Result<()> {
    let mut stale: Vec<_> = RECORDS.iter_parts::<FirewallPart>().collect();
    stale.retain(|kept| {
        kept.attachment_id().network == network && !valid.contains(&kept.attachment_id())
    });
    // As in DEL.
    let is_in_iptables = stale.iter().any(|kept| kept.content.backend == RuleBackend::Iptables);
    let lock = is_in_iptables.then(TablesLock::acquire_or_continue);
    let removed = iptables::remove_stale_rules(filter, &stale)
        .and_then(|()| RECORDS.remove_stale_parts(network, valid));
    drop(lock);
    join_outcomes([
        removed,
        filter.query_nft(&|nft| nft::remove_stale_elements(nft, network, valid)),
    ])
}

/// Rewrites our tables of `nf_tables` into iptables rules, the only ones of the reference. Counts
/// addresses and bridges. Without iptables nothing is changed.
fn hand_over(filter: &PacketFilter) -> Result<HandoverCount> {
    let mut handed = HandoverCount::default();
    if let Some(nft) = filter.nft_socket_if_present()? {
        let (ips, bridges) = nft::read_content(nft)?;
        iptables::create_ownerless_rules(filter, &ips, &bridges)?;
        nft::delete_tables(nft)?;
        handed.objects = ips.len() + bridges.len();
    }
    iptables::remove_published_rules(filter)?;
    Ok(handed)
}
