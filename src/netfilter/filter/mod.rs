//! Which forwarded traffic of containers is accepted: rules per attachment, in one of three back ends.
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
use super::backend::Feature;
use super::layout::{HandedOver, Restorable};
use super::{Backend, Owner, PacketFilter, Repair, all};
use crate::attachment::{Kept, Record};
use crate::error::{Error, Result};
use crate::netlink::{Link, Netlink};

/// The records of attachments.
pub const KEPT: Kept = Kept("firewall");

/// `nf_tables` and iptables.
pub(super) const FEATURE: Feature = Feature {
    state: Restorable {
        kept: KEPT,
        layouts: nft::layouts,
        restore: |change| change.restore_all(KEPT, &nft::SETS, nft::recorded),
    },
    heal: |filter, repair| iptables::RECORDS.heal(&|family| filter.iptables(family), repair),
    remove: |filter, owner, ips| del(filter, owner, ips, None),
    hand_over: &[("firewall rules", hand_over)],
};

/// The accepted traffic of an attachment. Its record has this content.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pod {
    /// The back end.
    pub backend: Backend,
    /// The addresses, without duplicates.
    pub ips: Vec<IpAddr>,
    /// The host ends of the veth pairs: ports of the bridge.
    pub ports: Vec<String>,
    /// The policy of the bridge.
    pub policy: Policy,
    /// The bridge; with [`Policy::Open`] it may be missing.
    pub bridge: Option<String>,
    /// The administrator's chain in iptables; `None` if firewalld accepts the addresses, and only the policy is
    /// enforced here.
    pub admin: Option<String>,
    /// Whether iptables has the rules for published ports; those of release 0.2.0 and of the reference lack them.
    #[serde(default)]
    pub published: bool,
}

impl Pod {
    /// Whether frames from other ports of the bridge are dropped.
    fn isolates_ports(&self) -> bool {
        self.policy == Policy::Isolated && !self.ports.is_empty()
    }
}

/// Which connections to the containers of a bridge are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// All.
    Open,
    /// From the bridge's own containers, and from interfaces that are not bridges with a policy.
    SameBridge,
    /// From interfaces that are not bridges with a policy: not even from the same bridge.
    Isolated,
}

impl Policy {
    /// Parses `ingressPolicy`.
    pub fn parse(text: &str) -> Result<Policy> {
        let all = [Policy::Open, Policy::SameBridge, Policy::Isolated];
        let is_named = |policy: &Policy| policy.as_str() == text || text.is_empty();
        all.into_iter().find(is_named).ok_or_else(|| {
            Error::config(format!("unknown ingress policy: \"{text}\""))
                .with_details("ingressPolicy is open, same-bridge or isolated")
        })
    }

    /// The name in a configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Policy::Open => "open",
            Policy::SameBridge => "same-bridge",
            Policy::Isolated => "isolated",
        }
    }
}

/// Accepts the attachment's traffic, and applies the policy to its bridge. After a failure, [`del`] removes the rest.
pub fn add(filter: &PacketFilter, owner: Owner<'_>, pod: &Pod) -> Result<()> {
    if pod.backend == Backend::Nftables {
        KEPT.keep(owner, pod);
        return Ok(nft::add(filter, owner, pod)?);
    }
    let mut former = KEPT.read::<Pod>(owner).map(|pod| pod.ips).unwrap_or_default();
    former.retain(|ip| !pod.ips.contains(ip));
    KEPT.keep(owner, pod);
    iptables::add(filter, owner, pod, &former)
}

/// Verifies everything that [`add`] created, and changes nothing.
pub fn check(filter: &PacketFilter, owner: Owner<'_>, pod: &Pod) -> Result<()> {
    let published = KEPT.read::<Pod>(owner).is_some_and(|pod| pod.published);
    let pod = &Pod { published, ..pod.clone() };
    match pod.backend {
        Backend::Nftables => nft::check(filter.nft()?, owner, pod),
        Backend::Iptables => iptables::check(filter, owner, pod),
    }
}

/// Whether one of the addresses is accepted by `nf_tables`.
pub fn is_on_nft(filter: &PacketFilter, owner: Owner<'_>, ips: &[IpAddr]) -> Result<bool> {
    Ok(nft::has(filter.nft()?, owner, ips)?)
}

/// Removes the attachment's rules from both back ends: those of the addresses `ips`, and of its record. Without `ports` the
/// sets of `nf_tables` are searched, also for other addresses. Continues after an error; the errors are joined.
pub fn del(
    filter: &PacketFilter,
    owner: Owner<'_>,
    ips: &[IpAddr],
    ports: Option<&[String]>,
) -> Result<()> {
    let pod = KEPT.read::<Pod>(owner);
    let own = pod.as_ref().and_then(own_link);
    // A DEL that was killed has removed the part, not the record.
    let record = Record::of(owner).unwrap_or_default();
    let recorded = pod.iter().flat_map(|pod| &pod.ips).chain(&record.ips);
    let all_ips: Vec<IpAddr> = ips.iter().chain(recorded).copied().collect();
    let (ips, ports) = ports.map_or_else(Default::default, |ports| (ips, ports));
    all([
        KEPT.remove(owner),
        iptables::del(filter, owner, &all_ips, own),
        filter.ask(&|nft| nft::del(nft, owner, ips, ports, own)),
    ])
}

/// The link with a policy that no other attachment has: the host's end of a pair without a bridge, as of ptp, which goes with
/// the container.
fn own_link(pod: &Pod) -> Option<&str> {
    let has_policy = pod.policy != Policy::Open && pod.ports.is_empty();
    let link = pod.bridge.as_deref().filter(|_| has_policy)?;
    let found = Netlink::open().and_then(|host| host.link(link)).ok()?;
    found.is_none_or(|found| found.kind.as_deref() == Some("veth")).then_some(link)
}

/// Those of the links whose policy has no effect: links that do not exist, and bridges without ports, except for those of
/// living attachments. To be called after the policies are read: ADD writes its record before its policy.
fn unused_links(mut policies: HashSet<String>) -> HashSet<String> {
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
    for bridge in KEPT.living::<Pod>().into_iter().filter_map(|kept| kept.content.bridge) {
        policies.remove(&bridge);
    }
    policies
}

/// Removes the rules of the network's attachments that are not among `valid`, and the policies of links that are not in use;
/// with `nf_tables`, if none is valid, those of the network.
pub fn gc(filter: &PacketFilter, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    let mut stale: Vec<_> = KEPT.all::<Pod>().collect();
    stale.retain(|kept| kept.owner().network == network && !valid.contains(&kept.owner()));
    all([
        KEPT.remove_stale(network, valid),
        iptables::gc(filter, &stale),
        filter.ask(&|nft| nft::gc(nft, network, valid)),
    ])
}

/// The first missing rule that attachments of this host depend on.
pub fn damage(filter: &PacketFilter) -> Result<Option<String>> {
    let damage = filter.ask(&nft::damage)?;
    if damage.is_some() { Ok(damage) } else { (FEATURE.heal)(filter, Repair::Report) }
}

/// Rewrites our tables of `nf_tables` into iptables rules, the only ones of the reference. Counts addresses and
/// bridges. Without iptables nothing is changed.
fn hand_over(filter: &PacketFilter) -> Result<HandedOver> {
    let mut handed = HandedOver::default();
    if let Some(nft) = filter.nft_if_present()? {
        let (ips, bridges) = nft::content(nft)?;
        iptables::create_ownerless(filter, &ips, &bridges)?;
        nft::clear(nft)?;
        handed.objects = ips.len() + bridges.len();
    }
    iptables::forget_owners(filter)?;
    Ok(handed)
}

/// The error for an object that CHECK did not find.
fn missing(owner: Owner<'_>, kept: Kept, what: &str) -> Error {
    Error::internal(format!("expected {what} not found")).with_details(kept.remedy(owner, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_release_0_2_0_are_read() {
        let text = r#"{"backend":"iptables","ips":["10.1.2.3","fd00::3"],"ports":["veth1"],
            "policy":"same-bridge","bridge":"cni0","admin":"CNI-ADMIN"}"#;
        let pod: Pod = serde_json::from_str(text).unwrap();
        assert_eq!((pod.backend, pod.policy), (Backend::Iptables, Policy::SameBridge));
        assert_eq!(pod.ips, ["10.1.2.3", "fd00::3"].map(|ip| ip.parse::<IpAddr>().unwrap()));
        assert_eq!((pod.ports.concat().as_str(), pod.bridge.as_deref()), ("veth1", Some("cni0")));
        assert_eq!(pod.admin.as_deref(), Some("CNI-ADMIN"));
    }
}
