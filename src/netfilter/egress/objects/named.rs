//! The sets and rules of a policy for the addresses to which names lead.

use super::super::compile::ServiceRange;
use super::super::intervals::service_intervals;
use super::super::policy::name_services;
use super::{PolicyObjects, PolicySet, SetContent, address_type};
use crate::netlink::NetlinkResult;
use crate::netlink::nftables::{
    CT_STATE_ESTABLISHED, CT_STATE_NEW, NftRule, NftSet, NftSocket, NftTable, PacketField,
    ValueType,
};

/// The set of name service, which the host leads to its resolver.
pub(super) const NAME_SERVICE: &str = "dns";
/// The sets of each list of services, with the number of the list behind these names: the addresses
/// of names; those of them to which a container has open connections, which live on when the address
/// has vanished; and the services, unless the list has all.
const NAMED: [&str; 2] = ["named4_", "named6_"];
const CONNECTED: [&str; 2] = ["connected4_", "connected6_"];
const SERVICES: &str = "services_";
/// How long an open connection without packets is kept, in seconds: more than the two hours after which
/// the kernel sends the first keepalive (`net.ipv4.tcp_keepalive_time`).
pub(in super::super) const CONNECTED_TIMEOUT: u32 = 9000;

/// No number: the kernel sets 65535 (`nft_dynset_init`), and begins with a small hash table; for a
/// number it would allocate one of that size for each policy.
const MOST_CONNECTED: u32 = 0;

const SERVICE: [ValueType; 2] = [ValueType::InetProto, ValueType::InetService];
const SERVICE_FIELDS: [PacketField; 2] = [PacketField::L4proto, PacketField::Dport];
const NAMED4: [ValueType; 2] = [ValueType::EtherAddr, ValueType::Ipv4Addr];
const NAMED6: [ValueType; 2] = [ValueType::EtherAddr, ValueType::Ipv6Addr];
/// The set of the addresses of names with one list of services.
#[derive(Clone, Debug)]
pub(in super::super) struct NamedSet {
    table: NftTable<'static>,
    name: String,
    key: &'static [ValueType],
    pub(in super::super) is_ipv4: bool,
    pub(in super::super) services: Vec<ServiceRange>,
}

impl NamedSet {
    pub(in super::super) fn nft_set(&self) -> NftSet<'_> {
        self.table.named_set(&self.name, self.key).with_timeouts()
    }
}

impl PolicySet {
    /// The addresses of names with the list of services of this number.
    fn of_named(prefix: &str, at: usize, is_ipv4: bool, services: &[ServiceRange]) -> PolicySet {
        PolicySet {
            name: format!("{prefix}_{}{at}", NAMED[usize::from(!is_ipv4)]),
            key: if is_ipv4 { &NAMED4 } else { &NAMED6 },
            content: SetContent::Named { is_ipv4, services: services.to_vec() },
        }
    }

    /// The addresses of names to which containers have open connections.
    fn of_connected(prefix: &str, at: usize, is_ipv4: bool) -> PolicySet {
        PolicySet {
            name: format!("{prefix}_{}{at}", CONNECTED[usize::from(!is_ipv4)]),
            key: if is_ipv4 { &NAMED4 } else { &NAMED6 },
            content: SetContent::FilledByPackets {
                most: MOST_CONNECTED,
                timeout: CONNECTED_TIMEOUT,
            },
        }
    }

    /// The list of services of this number; `None` if it has all.
    fn of_services(prefix: &str, at: usize, services: &[ServiceRange]) -> Option<PolicySet> {
        let content = SetContent::Intervals(service_intervals(services));
        let set = PolicySet { name: format!("{prefix}_{SERVICES}{at}"), key: &SERVICE, content };
        Some(set).filter(|_| services != [ServiceRange::ALL])
    }
}

impl PolicyObjects {
    /// Adds the set of name service, and returns the rules that accept it.
    pub(super) fn add_name_service(&mut self, prefix: &str) -> Vec<NftRule> {
        let intervals = service_intervals(&name_services());
        self.add_set(prefix, NAME_SERVICE, &SERVICE, intervals, |set| {
            // A connection from before the redirection has another server.
            let begins = NftRule::new().any_bit_set(PacketField::CtState, CT_STATE_NEW);
            [begins, NftRule::new().match_dnat()]
                .map(|rule| rule.in_set(&SERVICE_FIELDS, set))
                .to_vec()
        })
    }

    /// Adds the sets of names, and returns the rules that accept what is sent to their addresses.
    pub(super) fn add_names(&mut self, prefix: &str, lists: &[Vec<ServiceRange>]) -> Vec<NftRule> {
        let mut rules = Vec::new();
        for (at, services) in lists.iter().enumerate() {
            let set = PolicySet::of_services(prefix, at, services);
            let to_services = |rule: NftRule| match &set {
                Some(set) => rule.in_set(&SERVICE_FIELDS, set.nft_set(self.table)),
                None => rule,
            };
            let is_open = || NftRule::new().any_bit_set(PacketField::CtState, CT_STATE_ESTABLISHED);
            for is_ipv4 in [true, false] {
                let named = PolicySet::of_named(prefix, at, is_ipv4, services);
                let connected = PolicySet::of_connected(prefix, at, is_ipv4);
                let key = [PacketField::EtherSaddr, address_type(is_ipv4).1];
                let (to_named, open) = (named.nft_set(self.table), connected.nft_set(self.table));
                rules.extend([
                    to_services(is_open().in_set(&key, to_named)).update_set(&key, open),
                    to_services(NftRule::new().in_set(&key, to_named)).accept(),
                    to_services(is_open().in_set(&key, open)).update_set(&key, open).accept(),
                ]);
                self.sets.extend([named, connected]);
            }
            self.sets.extend(set);
        }
        rules.into_iter().map(|rule| rule.with_comment("names")).collect()
    }

    /// The sets of the addresses of names.
    pub(in super::super) fn named_sets(&self) -> Vec<NamedSet> {
        let named = self.sets.iter().filter_map(|PolicySet { name, key, content }| match content {
            SetContent::Named { is_ipv4, services } => Some(NamedSet {
                table: self.table,
                name: name.clone(),
                key,
                is_ipv4: *is_ipv4,
                services: services.clone(),
            }),
            _ => None,
        });
        named.collect()
    }
}

/// The ends of the names of the sets for names, which each list of services has; none without names.
pub(super) fn names_of_lists(
    nft: &NftSocket,
    table: NftTable<'_>,
    prefix: &str,
) -> NetlinkResult<Vec<String>> {
    let mut names = Vec::new();
    for at in 0.. {
        let first = format!("{prefix}_{}{at}", NAMED[0]);
        if !nft.has_object(table.named_set(&first, &NAMED4))? {
            break;
        }
        let of_list = NAMED.into_iter().chain(CONNECTED).chain([SERVICES]);
        names.extend(of_list.map(|name| format!("{name}{at}")));
    }
    Ok(names)
}
