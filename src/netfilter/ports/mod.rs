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

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use self::conditions::MappingConditions;
pub use self::iptables::IptablesOptions;
use super::backend::FilterFeature;
use super::layout::{RestorableState, hand_over};
use super::{AttachmentId, IpFamily, PacketFilter, RuleBackend};
use crate::attachment::RecordStore;
use crate::netlink::nftables::TransportProtocol;
use cni::error::{Error, Result, join_outcomes};
use cni::{ContainerId, NetworkName};

/// The addresses of the host that a mapping is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ListenAddresses {
    Everywhere,
    /// All addresses of one family.
    Family(IpFamily),
    Address(IpAddr),
}

/// A port of the host that is mapped to a port of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedPort {
    pub proto: TransportProtocol,
    /// The host's addresses.
    pub listen: ListenAddresses,
    pub host_port: u16,
    pub container_port: u16,
}

impl MappedPort {
    /// Whether it applies to packets of this family.
    pub fn is_for_family(&self, family: IpFamily) -> bool {
        match self.listen {
            ListenAddresses::Everywhere => true,
            ListenAddresses::Family(only) => only == family,
            ListenAddresses::Address(addr) => IpFamily::of_address(addr) == family,
        }
    }

    /// Whether both mappings are for one port of all addresses of a family, or of the same single
    /// address.
    pub fn shares_port_with(&self, other: &MappedPort) -> bool {
        let same_addresses = match (self.listen, other.listen) {
            (ListenAddresses::Family(one), ListenAddresses::Family(other)) => one == other,
            (ListenAddresses::Address(one), ListenAddresses::Address(other)) => one == other,
            (ListenAddresses::Address(_), _) | (_, ListenAddresses::Address(_)) => false,
            _ => true,
        };
        (self.proto, self.host_port) == (other.proto, other.host_port) && same_addresses
    }

    /// Whether it listens on all addresses that the other one listens on.
    pub fn includes_addresses_of(&self, other: &MappedPort) -> bool {
        self.listen == ListenAddresses::Everywhere || self.listen == other.listen
    }

    /// The host's address if the mapping listens on a single address.
    pub fn single_address(&self) -> Option<IpAddr> {
        if let ListenAddresses::Address(addr) = self.listen { Some(addr) } else { None }
    }
}

/// Which connections get the host's address as their source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SourceTranslation {
    /// No connection: the container sees the address of every client.
    Never,
    /// Connections whose replies would not pass the host otherwise: from the host's loopback
    /// addresses, and from containers on the same link.
    WhereNeeded,
    Always,
}

/// The mappings of an attachment: the content of their part in the record.
#[derive(Serialize, Deserialize)]
pub struct PortmapPart {
    pub backend: RuleBackend,
    pub mappings: Vec<MappedPort>,
    /// The container's addresses, at most one per family, with the prefix lengths of their
    /// subnets.
    pub targets: Vec<IpNet>,
    /// Which connections' source addresses are translated.
    pub snat: SourceTranslation,
    /// Additional conditions with the back end nftables.
    pub conditions: MappingConditions,
    /// Options of the back end iptables.
    pub options: Option<IptablesOptions>,
    /// Whether 127.0.0.1 of the host leads to the container, by `route_localnet`.
    pub localnet: bool,
}

impl PortmapPart {
    pub fn mappings_to(&self, target: IpNet) -> impl Iterator<Item = &MappedPort> {
        let family = IpFamily::of_address(target.addr());
        self.mappings.iter().filter(move |mapping| mapping.is_for_family(family))
    }
}

/// The parts of this feature in the records of attachments.
pub const RECORDS: RecordStore = RecordStore("portmap");

/// The feature, for both back ends.
pub const FEATURE: FilterFeature = FilterFeature {
    elements: Some(nft::ELEMENTS),
    rules: Some(iptables::RULES),
    check: nft::check_conditional_rules,
    is_of_reference: reference::has_rules,
    remove: |filter, owner, _| delete_mappings(filter, owner, None),
    hand_over: &[
        ("port mappings", |filter| {
            filter.query_nft(&|nft| hand_over(nft, layout::TABLE, &reference::convert_elements))
        }),
        ("port mappings of second interfaces", iptables::join_interfaces),
    ],
    ..FilterFeature::new(RestorableState {
        kept: RECORDS,
        layouts: &[layout::LAYOUT],
        needs_table: |layout| nft::ELEMENTS.need_table(layout.table),
        restore: nft::restore_mappings,
    })
};

/// Creates the mappings in one back end, after deleting those that an earlier ADD created in
/// another. Earlier mappings of the attachment are replaced. If another container holds a port,
/// nothing is created and the port is returned.
pub fn add_mappings(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    forward: &PortmapPart,
) -> Result<Option<TakenPort>> {
    match forward.backend {
        RuleBackend::Nftables => {
            // First, because a failure here does no harm.
            iptables::delete_mappings(filter, owner)?;
            nft::add_mappings(filter, owner, forward)
        }
        RuleBackend::Iptables => {
            let taken = iptables::add_mappings(filter, owner, forward)?;
            if taken.is_none() {
                nft::delete_mappings(filter, owner, None)?;
            }
            Ok(taken)
        }
    }
}

/// Deletes the mappings of an attachment in every layout and back end, and tracked UDP connections
/// to them. With the mappings of ADD `known`, the rules of others need not be read. Continues after
/// an error; the errors are joined.
pub fn delete_mappings(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    known: Option<&PortmapPart>,
) -> Result<()> {
    filter.warn_of_legacy_rules(RECORDS, owner, "nat", &owner.iptables_chain("DN-"));
    let removed = RECORDS.remove_part(owner);
    let servers =
        [nft::delete_mappings(filter, owner, known), iptables::delete_mappings(filter, owner)];
    flows::delete_flows_replied_by(servers.iter().flatten().flatten().copied());
    join_outcomes(servers.map(|servers| servers.map(drop)).into_iter().chain([removed]))
}

/// Deletes the mappings of the network's attachments that are not among `valid`.
pub fn remove_stale_mappings(
    filter: &PacketFilter,
    network: &str,
    valid: &[AttachmentId<'_>],
) -> Result<()> {
    let removed = RECORDS.remove_stale_parts(network, valid);
    let servers = nft::remove_stale_mappings(filter, network, valid);
    flows::delete_flows_replied_by(servers.iter().flatten().copied());
    join_outcomes([
        removed,
        servers.map(drop),
        iptables::remove_stale_chains(filter, network, valid),
    ])
}

/// The description of a port of the host: `8080/tcp`, `192.0.2.1:8080/tcp`.
fn describe_host_port(addr: Option<IpAddr>, port: u16, proto: TransportProtocol) -> String {
    match addr {
        Some(addr) => format!("{}/{proto}", SocketAddr::new(addr, port)),
        None => format!("{port}/{proto}"),
    }
}

/// A port that another container holds.
#[derive(Debug)]
pub struct TakenPort {
    /// The description of the port.
    port: String,
    /// The owner of the port, as far as the rules identify it.
    pub by: PortOwner,
}

/// How a [description of ports](PortOwner::describe_ports) begins.
pub const PORTS: &str = "host port";

/// The owner of ports, as its rules and elements describe it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortOwner {
    /// The [instance](AttachmentId::instance_id); empty if unknown.
    pub instance: String,
    /// The container; empty if unknown.
    pub id: String,
    /// Its network; long names are cut.
    pub network: String,
    /// The interface, if known.
    pub ifname: Option<String>,
    /// A description of the rule, for messages.
    pub comment: String,
    /// The ports of the host that were seen.
    pub ports: BTreeSet<String>,
    /// The addresses to which they are redirected.
    pub targets: BTreeSet<IpAddr>,
}

impl PortOwner {
    /// Whether both are one owner, whose rules may have changed.
    pub fn is_same(&self, other: &PortOwner) -> bool {
        fn key(owner: &PortOwner) -> [Option<&str>; 4] {
            [Some(&owner.instance), Some(&owner.id), Some(&owner.network), owner.ifname.as_deref()]
        }
        key(self) == key(other)
    }

    /// The command that removes the owner, which a person knows to have ended; `None` if its names
    /// are not known.
    pub fn collect_command(&self) -> Option<String> {
        let PortOwner { network, id, .. } = self;
        let is_named =
            NetworkName::parse(network).is_ok() && ContainerId::parse(id).is_ok() && !self.is_cut();
        is_named.then(|| format!("cnibox gc --network {network} --container {id}"))
    }

    /// The ports in messages.
    pub fn describe_ports(&self) -> String {
        let ports: Vec<&str> = self.ports.iter().map(String::as_str).collect();
        format!("{PORTS}{} {}", if ports.len() == 1 { "" } else { "s" }, ports.join(", "))
    }

    /// Whether the network's name was cut: the instance is the hash of the whole names.
    fn is_cut(&self) -> bool {
        let PortOwner { network, id, .. } = self;
        let ifname = self.ifname.as_deref().unwrap_or_default();
        !self.instance.is_empty()
            && AttachmentId { network, ifname, id }.instance_id() != self.instance
    }

    /// Adds what was found of the same owner in another family or rule.
    fn merge(all: &mut Vec<PortOwner>, found: PortOwner) {
        match all.iter_mut().find(|owner| owner.is_same(&found)) {
            Some(owner) => {
                owner.ports.extend(found.ports);
                owner.targets.extend(found.targets);
            }
            None => all.push(found),
        }
    }
}

/// The owners of all ports, whichever back end has their rules. The reference's own rules of
/// nftables name no network, and are left out.
pub fn list_port_owners(filter: &PacketFilter) -> Result<Vec<PortOwner>> {
    let mut all = Vec::new();
    for found in
        nft::list_port_owners(filter)?.into_iter().chain(iptables::list_port_owners(filter)?)
    {
        PortOwner::merge(&mut all, found);
    }
    Ok(all)
}

/// The other owners of rules for the ports of mappings with conditions, which are not reserved: the
/// first rule serves a port.
pub fn list_rule_owners(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    forward: &PortmapPart,
) -> Result<Vec<PortOwner>> {
    let mut all = Vec::new();
    for found in nft::list_rule_owners(filter, owner, forward)? {
        PortOwner::merge(&mut all, found);
    }
    Ok(all)
}

/// Deletes the rules and elements of an owner without a record, if they still redirect to the
/// addresses that were seen, and tracked UDP connections to them.
pub fn remove_port_owner(filter: &PacketFilter, owner: &PortOwner) -> Result<()> {
    let servers = if owner.instance.is_empty() {
        iptables::remove_port_owner(filter, owner)?
    } else {
        nft::remove_port_owner(filter, owner)?
    };
    flows::delete_flows_replied_by(servers.into_iter());
    Ok(())
}

impl fmt::Display for PortOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PortOwner { id, network, ifname, comment, .. } = self;
        if id.is_empty() {
            return write!(f, "an unknown owner: \"{comment}\"");
        }
        write!(f, "container \"{id}\" (network \"{network}\"")?;
        ifname.as_ref().map_or(Ok(()), |ifname| write!(f, ", interface \"{ifname}\""))?;
        f.write_str(")")
    }
}

impl fmt::Display for TakenPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host port {} is taken by {}", self.port, self.by)
    }
}

impl From<TakenPort> for Error {
    fn from(taken: TakenPort) -> Error {
        let remedy = match taken.by.collect_command() {
            Some(command) => format!(
                "choose another hostPort, or delete that container; if it has ended: {command}"
            ),
            None => "choose another hostPort, or delete that container".to_owned(),
        };
        Error::internal(taken.to_string()).with_details(remedy)
    }
}
