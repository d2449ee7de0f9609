//! Which forwarded traffic of containers passes: rules per attachment, in one of three back ends.
//!
//! | file | |
//! | --- | --- |
//! | `nft.rs` | own tables of `nf_tables`, sets keyed by address and interface |
//! | `iptables.rs` | the reference's chains `CNI-FORWARD`, `CNI-ISOLATION-STAGE-1`, ... |
//! | `firewalld.rs`, `dbus.rs` | sources in a zone of firewalld, over D-Bus |
//! | `reference.rs` | rules for the reference plugins |

pub mod dbus;
pub mod firewalld;
pub mod iptables;
pub mod nft;
mod reference;

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::backend::{Backend, PacketFilter};
use super::handed_over::HandedOver;
use super::layout::Feature;
use super::names::Owner;
use crate::attachment::Kept;
use crate::error::{Error, Result};

/// What is kept of each attachment.
pub const KEPT: Kept = Kept::of("firewall");

/// What an attachment has, and with which back end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
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
    /// Writes the record of the attachment, before any rule is made.
    fn keep(backend: Backend, pod: &Pod<'_>, ingress: Ingress<'_>, admin: Option<&str>) {
        let (ips, ports) = (pod.ips.clone(), pod.ports.clone());
        let Ingress { policy, bridge } = ingress;
        let [bridge, admin] = [bridge, admin].map(|name| name.map(str::to_owned));
        let record = Record { backend, ips, ports, policy, bridge, admin };
        KEPT.keep(pod.owner, record);
    }

    fn pod<'a>(&self, owner: Owner<'a>) -> Pod<'a> {
        Pod { owner, ips: self.ips.clone(), ports: self.ports.clone() }
    }

    fn ingress(&self) -> Ingress<'_> {
        Ingress { policy: self.policy, bridge: self.bridge.as_deref() }
    }
}

/// For [`super::heal`].
pub(super) const FEATURE: Feature =
    Feature { kept: KEPT, layouts: nft::layouts, restore: nft::restore };

/// An attachment and its addresses.
#[derive(Clone, Debug)]
pub struct Pod<'a> {
    /// The owner of the rules.
    pub owner: Owner<'a>,
    /// Each address once; on DEL none if they are unknown.
    pub ips: Vec<IpAddr>,
    /// The host's ends: ports of the bridge.
    pub ports: Vec<String>,
}

impl<'a> Pod<'a> {
    /// The attachment `owner` with `ips`, duplicates left out.
    pub fn new(owner: Owner<'a>, ips: impl IntoIterator<Item = IpAddr>) -> Pod<'a> {
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
    pub fn with_ports(mut self, ports: impl IntoIterator<Item = String>) -> Pod<'a> {
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
    /// No container on a bridge with a policy, the neighbours on the same bridge included.
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
    let mut handed = HandedOver::default();
    if let Some(nft) = filter.nft_if_present()? {
        let content = nft::content(nft)?;
        reference::make_ownerless(&content)?;
        nft::clear(nft)?;
        handed.objects = content.ips.len() + content.bridges.len();
    }
    reference::forget_owners(filter)?;
    Ok(handed)
}

/// An object that CHECK did not find.
fn missing(what: impl std::fmt::Display) -> Error {
    Error::internal(format!("expected {what} not found"))
}
