//! Port mappings: what is sent to a port of the host goes to a port of a container.
//!
//! | file | |
//! | --- | --- |
//! | `layout.rs` | our table of nftables: chains of constant size, one map element per port |
//! | `nft.rs` | a container's elements in it: add, verify, delete, collect |
//! | `conditions.rs` | more conditions for mappings, in nft's words |
//! | `iptables/` | the chains of iptables, as the reference plugin has them, and the rules in them |
//! | `reference.rs` | the nftables rules that the reference plugin makes, to delete them, and to hand over to it |
//! | `flows.rs` | connections that a mapping, or its end, must not leave as they are |

pub mod conditions;
pub mod flows;
pub mod iptables;
mod layout;
pub mod nft;
pub mod reference;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use self::conditions::Conditions;
pub use self::iptables::{Options, Wanted};
use super::backend::{Backend, Family, PacketFilter};
use super::handed_over::{HandedOver, replace_table};
use super::layout::{Change, Feature};
use super::names::Owner;
use super::{Repair, localhost};
use crate::attachment::{Keepsake, Kept};
use crate::error::{Error, Result};
use crate::netlink::nftables::{L4, Nft};

/// Where on the host a mapping listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Listen {
    /// On every local address.
    Everywhere,
    /// On every local address of one family.
    Family(Family),
    /// On one local address.
    Address(IpAddr),
}

/// One port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// The transport protocol.
    pub proto: L4,
    /// The host's address.
    pub listen: Listen,
    /// The host's port.
    pub host_port: u16,
    /// The container's port.
    pub container_port: u16,
}

impl Mapping {
    /// Whether it is for traffic of this family.
    pub fn is_of(&self, family: Family) -> bool {
        match self.listen {
            Listen::Everywhere => true,
            Listen::Family(only) => only == family,
            Listen::Address(addr) => Family::of(addr) == family,
        }
    }

    /// The host's address, if the mapping listens on one address alone.
    pub fn address(&self) -> Option<IpAddr> {
        if let Listen::Address(addr) = self.listen { Some(addr) } else { None }
    }
}

/// Which connections get the host's address as their source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Snat {
    /// None: the container sees every client's own address.
    Never,
    /// Clients whose answers would not come back through the host otherwise: the host's loopback
    /// addresses, and containers on the same link.
    WhereNeeded,
    /// All.
    Always,
}

/// A container's address, and how the host reaches it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// With the prefix length of its subnet.
    pub net: IpNet,
    /// The host's interface towards it; none if there is no route.
    pub via: Option<String>,
}

impl Target {
    /// Its address.
    pub fn addr(&self) -> IpAddr {
        self.net.addr()
    }

    /// Its family.
    pub fn family(&self) -> Family {
        Family::of(self.addr())
    }
}

/// All that is to be forwarded to an attachment.
#[derive(Clone, Debug)]
pub struct Forward<'a> {
    /// The attachment.
    pub owner: Owner<'a>,
    /// The ports.
    pub mappings: &'a [Mapping],
    /// One address of a family at most.
    pub targets: &'a [Target],
    /// Whose source is translated.
    pub snat: Snat,
    /// When the mappings apply, with nftables.
    pub conditions: &'a Conditions,
}

impl Forward<'_> {
    /// The mappings for a target.
    pub fn mappings_to(&self, target: &Target) -> impl Iterator<Item = &Mapping> {
        let family = target.family();
        self.mappings.iter().filter(move |mapping| mapping.is_of(family))
    }
}

/// What is kept of each attachment.
pub const KEPT: Kept = Kept::of("portmap");

/// All of what is forwarded to an attachment, and how.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record<'a> {
    backend: Backend,
    mappings: Cow<'a, [Mapping]>,
    targets: Cow<'a, [Target]>,
    snat: Snat,
    conditions: Cow<'a, Conditions>,
    /// With iptables.
    options: Option<Options<'a>>,
    /// Whether 127.0.0.1 of the host leads to the container, by `route_localnet`.
    localnet: bool,
}

impl Record<'_> {
    fn forward<'a>(&'a self, owner: Owner<'a>) -> Forward<'a> {
        let (mappings, targets, conditions) = (&self.mappings, &self.targets, &self.conditions);
        Forward { owner, mappings, targets, snat: self.snat, conditions }
    }
}

/// Keeps what is about to be made, so that it comes back after a flush. `localnet`: whether 127.0.0.1 of
/// the host leads to the container, by `route_localnet`.
pub fn keep(backend: Backend, forward: &Forward<'_>, options: Option<Options<'_>>, localnet: bool) {
    let Forward { owner, snat, .. } = *forward;
    let (mappings, targets) = (forward.mappings.into(), forward.targets.into());
    let conditions = Cow::Borrowed(forward.conditions);
    let record = Record { backend, mappings, targets, snat, conditions, options, localnet };
    KEPT.keep(owner, record);
}

/// For [`super::heal`].
pub(super) const FEATURE: Feature =
    Feature { kept: KEPT, layouts: || vec![layout::layout()], restore };

fn restore(change: &mut Change<'_>) {
    for kept in change.living::<Record<'static>>(KEPT) {
        if kept.content.backend == Backend::Nftables {
            nft::restore(change, &kept.content.forward(kept.owner()));
        }
    }
}

/// What is wrong with the rules that attachments of this host depend on.
pub fn damage(filter: &PacketFilter) -> Result<Option<String>> {
    let is_ours = |kept: &Keepsake<Record<'static>>| kept.content.backend == Backend::Nftables;
    let is_needed = || KEPT.living().iter().any(is_ours);
    if let Some(nft) = filter.nft_if_present()?
        && let Some(damage) = layout::layout().damage(nft, is_needed)?
    {
        return Ok(Some(damage));
    }
    if let Some(damage) = localhost::damage(filter)? {
        return Ok(Some(damage));
    }
    iptables::RECORDS.damage()
}

/// Restores everything that was flushed if port mappings are missing.
pub fn heal(filter: &PacketFilter) -> Result<()> {
    if KEPT.is_used() && damage(filter)?.is_some() {
        super::heal(filter, Repair::Restore)?;
    }
    Ok(())
}

/// Deletes what an attachment has in every layout and back end, when nothing else is known of it.
pub fn reclaim(filter: &PacketFilter, owner: Owner<'_>) -> Result<()> {
    KEPT.remove(owner)?;
    let in_chains = iptables::del(filter, owner, &[]);
    let mut servers = match filter.nft_if_present()? {
        Some(nft) => del(nft, owner, &[], &[])?,
        None => BTreeSet::new(),
    };
    servers.extend(in_chains?);
    flows::of_gone(&servers);
    Ok(())
}

/// Deletes what an attachment has in `nf_tables`; where that led UDP to.
pub fn del(
    nft: &Nft,
    owner: Owner<'_>,
    mappings: &[Mapping],
    addrs: &[IpAddr],
) -> Result<BTreeSet<IpAddr>> {
    let mut servers = nft::del(nft, owner, mappings, addrs)?;
    servers.extend(reference::del(nft, owner.id)?);
    Ok(servers)
}

/// Rewrites our layout on `nf_tables` into the reference's; how many rules that are.
pub(super) fn hand_over(nft: &Nft) -> Result<HandedOver> {
    replace_table(nft, layout::TABLE, &|nft, batch| {
        let mut handed = HandedOver::default();
        for family in Family::BOTH {
            let rules = reference::read(nft, family, &mut handed)?;
            if !rules.is_empty() {
                reference::make(batch, family, &rules);
            }
        }
        handed.conditional = nft.dump_rules(layout::CONDITIONAL)?.len().saturating_sub(1);
        Ok(handed)
    })
}

/// A port as people write it: `8080/tcp`, `192.0.2.1:8080/tcp`.
#[derive(Clone, Copy, Debug)]
struct HostPort(Option<IpAddr>, u16, L4);

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostPort(addr, port, proto) = *self;
        match addr {
            Some(addr) => write!(f, "{}/{proto}", SocketAddr::new(addr, port)),
            None => write!(f, "{port}/{proto}"),
        }
    }
}

/// A port that another container has.
#[derive(Clone, Debug)]
pub struct Taken {
    port: HostPort,
    /// The owner of the port, as far as the rules tell.
    pub by: Holder,
}

/// The owner of a port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holder {
    /// The [instance](Owner::instance), if the rules tell.
    pub instance: String,
    /// The container; empty if unknown.
    pub id: String,
    /// Its network; long names are cut.
    pub network: String,
    /// The interface, if the rules tell.
    pub ifname: Option<String>,
    /// What else there is, for a message.
    pub comment: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Holder { id, network, ifname, comment, .. } = self;
        if id.is_empty() {
            return write!(f, "somebody else: \"{comment}\"");
        }
        write!(f, "container \"{id}\" (network \"{network}\"")?;
        ifname.as_ref().map_or(Ok(()), |ifname| write!(f, ", interface \"{ifname}\""))?;
        f.write_str(")")
    }
}

impl From<Taken> for Error {
    fn from(Taken { port, by }: Taken) -> Error {
        Error::internal(format!("host port {port} is taken by {by}")).with_details(
            "choose another hostPort, or delete that attachment; GC removes it if it is stale",
        )
    }
}
