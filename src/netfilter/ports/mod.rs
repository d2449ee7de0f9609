//! Port mappings: packets to a port of the host are redirected to a port of a container.
//!
//! | file | |
//! | --- | --- |
//! | `layout.rs` | our table of nftables: chains of constant size, one map element per port |
//! | `nft.rs` | a container's elements in it: add, verify, delete, collect |
//! | `conditions.rs` | additional conditions of mappings, in the syntax of nft |
//! | `iptables/` | the chains of iptables, as the reference plugin creates them, and their rules |
//! | `reference.rs` | the reference plugin's nftables rules: deleted, or created to hand over to it |
//! | `flows.rs` | tracked UDP connections that a new or deleted mapping must not leave as they are |

pub mod conditions;
pub mod flows;
pub(super) mod iptables;
mod layout;
mod nft;
mod reference;

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize};

use self::conditions::Conditions;
pub use self::iptables::Options;
use super::backend::Feature;
use super::layout::{Restorable, hand_over};
use super::{Backend, Family, Owner, PacketFilter, Repair, all, localhost};
use crate::attachment::Kept;
use crate::error::{Error, Result};
use crate::netlink::nftables::L4;

/// The addresses of the host that a mapping is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Listen {
    /// All.
    Everywhere,
    /// All of one family.
    Family(Family),
    /// A single address.
    Address(IpAddr),
}

/// A mapped port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// The transport protocol.
    pub proto: L4,
    /// The host's addresses.
    pub listen: Listen,
    /// The host's port.
    pub host_port: u16,
    /// The container's port.
    pub container_port: u16,
}

impl Mapping {
    /// Whether it applies to packets of this family.
    pub fn is_of(&self, family: Family) -> bool {
        match self.listen {
            Listen::Everywhere => true,
            Listen::Family(only) => only == family,
            Listen::Address(addr) => Family::of(addr) == family,
        }
    }

    /// Whether both mappings are for one port of all addresses of a family, or of the same single address.
    pub fn shares_port_with(&self, other: &Mapping) -> bool {
        let same_addresses = match (self.listen, other.listen) {
            (Listen::Family(one), Listen::Family(other)) => one == other,
            (Listen::Address(one), Listen::Address(other)) => one == other,
            (Listen::Address(_), _) | (_, Listen::Address(_)) => false,
            _ => true,
        };
        (self.proto, self.host_port) == (other.proto, other.host_port) && same_addresses
    }

    /// Whether it listens on all addresses that the other one listens on.
    pub fn includes(&self, other: &Mapping) -> bool {
        self.listen == Listen::Everywhere || self.listen == other.listen
    }

    /// The host's address if the mapping listens on a single address.
    pub fn address(&self) -> Option<IpAddr> {
        if let Listen::Address(addr) = self.listen { Some(addr) } else { None }
    }
}

/// Which connections get the host's address as their source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Snat {
    /// None: the container sees every client's own address.
    Never,
    /// Connections whose replies would not pass the host otherwise: from the host's loopback addresses, and from
    /// containers on the same link.
    WhereNeeded,
    /// All.
    Always,
}

/// The mappings of an attachment. Its record has this content.
#[derive(Serialize, Deserialize)]
pub struct Forward {
    /// The back end.
    pub backend: Backend,
    /// The ports.
    pub mappings: Vec<Mapping>,
    /// The container's addresses, at most one per family, with the prefix lengths of their subnets.
    #[serde(deserialize_with = "targets")]
    pub targets: Vec<IpNet>,
    /// Which connections' source addresses are translated.
    pub snat: Snat,
    /// Additional conditions with the back end nftables.
    pub conditions: Conditions,
    /// Options of the back end iptables.
    pub options: Option<Options>,
    /// Whether 127.0.0.1 of the host leads to the container, by `route_localnet`.
    pub localnet: bool,
}

impl Forward {
    /// The mappings for a target.
    pub fn mappings_to(&self, target: IpNet) -> impl Iterator<Item = &Mapping> {
        let family = Family::of(target.addr());
        self.mappings.iter().filter(move |mapping| mapping.is_of(family))
    }
}

/// Decodes targets, also as release 0.2.0 wrote them: `{"net": "10.1.2.3/24", "via": "cni0"}`.
fn targets<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<IpNet>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Target {
        Net(IpNet),
        WithRoute { net: IpNet },
    }
    let targets = Vec::<Target>::deserialize(d)?.into_iter();
    Ok(targets.map(|(Target::Net(net) | Target::WithRoute { net })| net).collect())
}

/// The records of attachments.
pub const KEPT: Kept = Kept("portmap");

/// Both back ends.
pub(super) const FEATURE: Feature = Feature {
    state: Restorable { kept: KEPT, layouts: || vec![layout::layout()], restore: nft::restore },
    heal: |filter, repair| iptables::RECORDS.heal(&|family| filter.iptables(family), repair),
    remove: |filter, owner, _| del(filter, owner, None),
    hand_over: &[
        ("port mappings", |filter| {
            filter.ask(&|nft| hand_over(nft, layout::TABLE, &reference::create))
        }),
        ("port mappings of second interfaces", iptables::join_interfaces),
    ],
};

/// The first missing rule that attachments of this host depend on.
pub fn damage(filter: &PacketFilter) -> Result<Option<String>> {
    let is_needed = || Backend::Nftables.is_recorded(KEPT);
    let damage = filter.ask(&|nft| layout::layout().damage(nft, &is_needed))?;
    let damage = damage.map_or_else(|| localhost::damage(filter), |damage| Ok(Some(damage)))?;
    if damage.is_some() { Ok(damage) } else { (FEATURE.heal)(filter, Repair::Report) }
}

/// Creates the mappings in one back end, after deleting those that an earlier ADD created in another. Earlier
/// mappings of the attachment are replaced. If another container holds a port, nothing is created and the port is
/// returned.
pub fn add(filter: &PacketFilter, owner: Owner<'_>, forward: &Forward) -> Result<Option<Taken>> {
    match forward.backend {
        Backend::Nftables => {
            // This may fail without harm, so it comes first.
            iptables::del(filter, owner)?;
            nft::add(filter, owner, forward)
        }
        Backend::Iptables => {
            let taken = iptables::add(filter, owner, forward)?;
            if taken.is_none() {
                nft::del(filter, owner, None)?;
            }
            Ok(taken)
        }
    }
}

/// Verifies every rule of the attachment, and the rules that all attachments share.
pub fn check(filter: &PacketFilter, owner: Owner<'_>, forward: &Forward) -> Result<()> {
    match forward.backend {
        Backend::Nftables => nft::check(filter.nft()?, owner, forward),
        Backend::Iptables => iptables::check(filter, owner, forward),
    }
}

/// Deletes the mappings of an attachment in every layout and back end, and tracked UDP connections to them. With the
/// mappings of ADD `known`, the rules of others need not be read. Continues after an error; the errors are joined.
pub fn del(filter: &PacketFilter, owner: Owner<'_>, known: Option<&Forward>) -> Result<()> {
    let removed = KEPT.remove(owner);
    let servers = [nft::del(filter, owner, known), iptables::del(filter, owner)];
    flows::delete_replied_by(servers.iter().flatten().flatten().copied());
    all(servers.map(|servers| servers.map(drop)).into_iter().chain([removed]))
}

/// Deletes the mappings of the network's attachments that are not among `valid`.
pub fn gc(filter: &PacketFilter, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    let removed = KEPT.remove_stale(network, valid);
    let servers = nft::collect(filter, network, valid);
    flows::delete_replied_by(servers.iter().flatten().copied());
    all([removed, servers.map(drop), iptables::collect(filter, network, valid)])
}

/// The description of a port of the host: `8080/tcp`, `192.0.2.1:8080/tcp`.
fn host_port(addr: Option<IpAddr>, port: u16, proto: L4) -> String {
    match addr {
        Some(addr) => format!("{}/{proto}", SocketAddr::new(addr, port)),
        None => format!("{port}/{proto}"),
    }
}

/// A port that another container holds.
#[derive(Debug)]
pub struct Taken {
    /// The description of the port.
    port: String,
    /// The owner of the port, as far as the rules identify it.
    pub by: Holder,
}

/// The owner of a port.
#[derive(Debug, Default)]
pub struct Holder {
    /// The [instance](Owner::instance); empty if unknown.
    pub instance: String,
    /// The container; empty if unknown.
    pub id: String,
    /// Its network; long names are cut.
    pub network: String,
    /// The interface, if known.
    pub ifname: Option<String>,
    /// A description of the rule, for messages.
    pub comment: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Holder { id, network, ifname, comment, .. } = self;
        if id.is_empty() {
            return write!(f, "an unknown owner: \"{comment}\"");
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

#[cfg(test)]
mod tests {
    use super::*;

    fn record(text: &str) -> Forward {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn records_of_release_0_2_0_are_read() {
        let record = record(
            r#"{"backend":"nftables","mappings":[
                {"proto":"Tcp","listen":"Everywhere","host_port":80,"container_port":8080},
                {"proto":"Udp","listen":{"Family":"V6"},"host_port":53,"container_port":53},
                {"proto":"Sctp","listen":{"Address":"192.0.2.1"},"host_port":9,"container_port":9}],
               "targets":[{"net":"10.1.2.3/24","via":"cni0"},{"net":"fd00::3/64","via":null}],
               "snat":"WhereNeeded","conditions":{"v4":[[{"NotSource":"10.0.0.0/8"},
                {"Interface":"eth0"}]],"v6":[]},"options":null,"localnet":true}"#,
        );
        let listen = [
            Listen::Everywhere,
            Listen::Family(Family::V6),
            Listen::Address("192.0.2.1".parse().unwrap()),
        ];
        assert!(record.mappings.iter().map(|mapping| mapping.listen).eq(listen));
        assert_eq!(record.targets, ["10.1.2.3/24", "fd00::3/64"].map(|net| net.parse().unwrap()));
        let words = ["ip saddr != 10.0.0.0/8", "iifname eth0"].map(str::to_owned);
        assert_eq!(record.conditions, Conditions::parse(&words, &[], 1).unwrap());
        let kept = serde_json::to_string(&record).unwrap();
        assert_eq!(self::record(&kept).targets, record.targets);
    }

    #[test]
    fn records_of_release_0_2_0_with_iptables_are_read() {
        let record = record(
            r#"{"backend":"iptables","mappings":[],"targets":[],"snat":"Always",
               "conditions":{"v4":[],"v6":[]},"options":{"mark_bit":13,"set_mark_chain":null,
                "conditions":[["-s","10.0.0.0/8"],[]]},"localnet":false}"#,
        );
        let options = record.options.unwrap();
        assert_eq!((options.mark_bit, options.set_mark_chain), (13, None));
        assert_eq!(options.conditions[0].join(" "), "-s 10.0.0.0/8");
        assert!(options.conditions[1].is_empty());
    }
}
