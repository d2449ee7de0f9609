//! Which forwarded traffic of containers passes: rules per attachment, in one of three back ends.
//!
//! | file | |
//! | --- | --- |
//! | `nftables.rs` | own tables, sets keyed by address and interface |
//! | `xtables.rs` | the reference's chains `CNI-FORWARD`, `CNI-ISOLATION-STAGE-1`, ... |
//! | `firewalld.rs`, `dbus.rs` | sources in a zone of firewalld, over D-Bus |
//! | `handover.rs` | rules for the reference plugins |
//! | `kept.rs` | what a flush took from iptables |
//! | `owner.rs` | comments that tell whose a rule is |

pub mod dbus;
pub mod firewalld;
mod handover;
pub mod kept;
pub mod nftables;
mod owner;
pub mod xtables;

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

pub(super) use self::kept::heal as heal_chains;
pub use self::owner::{Network, Owner};
use super::backend::{Backend, PacketFilter};
use super::handover::HandedOver;
use super::layout::Feature;
use super::names;
use crate::attachment::Kept;
use crate::error::{Error, Result};

/// What is kept of each attachment.
const KEPT: Kept = Kept::of("firewall");

/// What an attachment has, and with which back end.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Record {
    backend: Backend,
    ips: Vec<IpAddr>,
    ports: Vec<String>,
    policy: Policy,
    bridge: Option<String>,
    /// The administrator's chain, where iptables has the addresses.
    #[serde(default)]
    admin: Option<String>,
}

impl Record {
    /// Writes that of the attachment, before anything is made.
    fn keep(backend: Backend, pod: &Pod, ingress: Ingress<'_>, admin: Option<&str>) {
        let (ips, ports) = (pod.ips.clone(), pod.ports.clone());
        let Ingress { policy, bridge } = ingress;
        let [bridge, admin] = [bridge, admin].map(|name| name.map(str::to_owned));
        let record = Record { backend, ips, ports, policy, bridge, admin };
        KEPT.keep(pod.owner.attachment(), record);
    }

    fn pod(&self, owner: names::Owner<'_>) -> Pod {
        let pod = Pod::new(Owner::new(owner), self.ips.iter().copied());
        pod.with_ports(self.ports.iter().cloned())
    }

    fn ingress(&self) -> Ingress<'_> {
        Ingress { policy: self.policy, bridge: self.bridge.as_deref() }
    }
}

/// For [`super::heal`].
pub(super) const FEATURE: Feature =
    Feature { kept: KEPT, layouts: nftables::layouts, restore: nftables::restore };

/// An attachment and its addresses.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Whose the rules are.
    pub owner: Owner,
    /// Each address once; on DEL none if they are unknown.
    pub ips: Vec<IpAddr>,
    /// The host's ends: ports of the bridge.
    pub ports: Vec<String>,
}

impl Pod {
    /// The attachment `owner` with `ips`, duplicates left out.
    pub fn new(owner: Owner, ips: impl IntoIterator<Item = IpAddr>) -> Pod {
        let mut once: Vec<IpAddr> = Vec::new();
        for ip in ips {
            if !once.contains(&ip) {
                once.push(ip);
            }
        }
        Pod { owner, ips: once, ports: Vec::new() }
    }

    /// With the host's ends.
    #[must_use]
    pub fn with_ports(mut self, ports: impl IntoIterator<Item = String>) -> Pod {
        self.ports = ports.into_iter().collect();
        self
    }
}

/// Who may open connections to the containers of a bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Everybody.
    Open,
    /// The bridge's own containers, and everybody who is on no bridge with a policy.
    SameBridge,
    /// Nobody on a bridge with a policy, not even the neighbours.
    Isolated,
}

impl Policy {
    /// The policy of this name, `ingressPolicy`.
    pub fn parse(text: &str) -> Result<Policy> {
        match text {
            "" | "open" => Ok(Policy::Open),
            "same-bridge" => Ok(Policy::SameBridge),
            "isolated" => Ok(Policy::Isolated),
            other => Err(Error::config(format!("unknown ingress policy: \"{other}\""))
                .with_details("ingressPolicy is open, same-bridge or isolated")),
        }
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

/// A policy and the bridge that it is for; with [`Policy::Open`] there may be none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ingress<'a> {
    /// The policy.
    pub policy: Policy,
    /// The bridge.
    pub bridge: Option<&'a str>,
}

/// Rewrites our tables of `nf_tables` into iptables rules, the only ones that the reference has;
/// how many addresses and bridges that were. Without iptables everything stays.
pub(super) fn hand_over(filter: &PacketFilter) -> Result<HandedOver> {
    if let Some(nft) = filter.nft_if_present()? {
        let content = nftables::content(nft)?;
        handover::make_ownerless(&content)?;
        nftables::clear(nft)?;
        handover::forget_owners(filter)?;
        return Ok(HandedOver::all(content.ips.len() + content.bridges.len()));
    }
    handover::forget_owners(filter).map(|()| HandedOver::default())
}

/// An object that CHECK did not find.
fn missing(what: impl std::fmt::Display) -> Error {
    Error::internal(format!("expected {what} not found"))
}
