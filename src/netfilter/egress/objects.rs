//! The chains and sets of one policy in the tables of `nf_tables`, named by a hash of their
//! content.

mod limited;
mod named;

use std::collections::HashSet;

use ipnet::IpNet;
use nix::libc;

use self::limited::{NEW, OPEN};
use self::named::NAME_SERVICE;
pub(super) use self::named::{CONNECTED_TIMEOUT, NamedSet};
use super::compile::{AllowedTraffic, ServiceRange};
use super::discovery::discovery;
use super::intervals::{ALL_BUT_ICMPV6, addresses, services};
use super::limits::ConnectionLimits;
use super::part::EgressPart;
use super::policy::{CompiledPolicy, EgressPolicy};
use super::table::{
    ETH_P_IP, FRAMES, ICMP, ICMPV6, NOTED, PACKETS, PolicyChains, REFUSED, REJECTED,
    established_reply,
};
use super::{CONTAINER_LINKS, LINK_LOCAL, PolicyChain};
use crate::attachment::sha512_hex;
use crate::netfilter::layout::RuleComparison;
use crate::netlink::NetlinkResult;
use crate::netlink::nftables::{
    KeyInterval, NftBatch, NftChain, NftRule, NftSet, NftSocket, NftTable, PacketField, ValueType,
};

/// The prefixes of the names of chains: of the packets or frames of a container, and the chains
/// that a policy has for forwarded packets, for those to the host and to other containers, and for
/// the targets of neighbour discovery.
const POLICY: &str = "policy_";
const FORWARD: &str = "forward_";
const HOST: &str = "host_";
const NEIGHBOURS: &str = "neighbours_";
const DISCOVERY: &str = "discovery_";
const CHAINS: [&str; 5] = [POLICY, FORWARD, HOST, NEIGHBOURS, DISCOVERY];

/// What packets that enter the host's stack may reach, and how many connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct PacketPolicy<'a> {
    pub(super) routed: &'a AllowedTraffic,
    pub(super) neighbours: &'a AllowedTraffic,
    pub(super) host: &'a AllowedTraffic,
    pub(super) limits: ConnectionLimits,
    /// The lists of services of the names that are allowed besides.
    pub(super) service_lists: &'a [Vec<ServiceRange>],
    /// The policies that have the names: the sets of other names have other addresses.
    pub(super) policies: &'a [EgressPolicy],
}

/// The length of the hash in names, in hexadecimal digits: an author of two policies cannot find
/// two with one name.
const ID_LENGTH: usize = 32;

/// The type of packets to the host itself (packet(7)).
const PACKET_HOST: u8 = 0;

/// The ends of the names of sets.
const SET_NAMES: [&str; 10] =
    ["all4", "all6", "prefixes4", "prefixes6", "ranges4", "ranges6", "arp", "nd", NEW, OPEN];

/// A policy in one table.
#[derive(Clone, Debug)]
pub(super) struct PolicyObjects {
    pub(super) table: NftTable<'static>,
    /// The name of the chain that elements refer to.
    pub(super) chain: String,
    /// The chain for what the policy refuses.
    end: &'static str,
    /// The sets, with their content.
    sets: Vec<PolicySet>,
    /// The chains with their rules; a chain comes before those that refer to it.
    chains: Vec<(String, Vec<NftRule>)>,
}

#[derive(Clone, Debug)]
struct PolicySet {
    name: String,
    key: &'static [ValueType],
    content: SetContent,
}

#[derive(Clone, Debug)]
enum SetContent {
    Intervals(Vec<KeyInterval>),
    /// Elements that packets add, how many, and how long they are kept, in seconds.
    FilledByPackets {
        most: u32,
        timeout: u32,
    },
    /// The addresses of names, each with its time; and the services that are allowed there.
    Named {
        is_ipv4: bool,
        services: Vec<ServiceRange>,
    },
}

impl PolicySet {
    fn nft_set(&self, table: NftTable<'static>) -> NftSet<'_> {
        let set = table.named_set(&self.name, self.key);
        match self.content {
            SetContent::Intervals(_) => set.with_intervals(),
            SetContent::FilledByPackets { most, timeout } => set.filled_by_packets(most, timeout),
            SetContent::Named { .. } => set.with_timeouts(),
        }
    }
}

impl PolicyObjects {
    fn new(table: NftTable<'static>, id: &str, end: &'static str) -> PolicyObjects {
        PolicyObjects {
            table,
            chain: format!("{POLICY}{id}"),
            end,
            sets: Vec::new(),
            chains: Vec::new(),
        }
    }

    /// The policy of packets that enter the host's stack. They are judged before the host translates
    /// their destination, as the container has written it; forwarded ones again, when it is known by
    /// which link they leave. A translation is the administrator's.
    pub(super) fn of_packets(
        policy: &PacketPolicy<'_>,
        uplinks: &[String],
        end: &'static str,
    ) -> PolicyObjects {
        let PacketPolicy { routed, neighbours, host, limits, service_lists, policies } = *policy;
        let mut content = [routed, neighbours, host].map(AllowedTraffic::to_bytes).concat();
        content.extend(uplinks.join("/").into_bytes());
        content.extend(format!("{end}{limits:?}").into_bytes());
        let has_names = policies.iter().any(EgressPolicy::has_names);
        if has_names {
            content.extend(format!("{service_lists:?}{policies:?}").into_bytes());
        }
        let id = sha512_hex(content, ID_LENGTH);
        let mut objects = PolicyObjects::new(PACKETS, &id, end);
        let [start, forward, to_host, to_neighbours, _] =
            CHAINS.map(|prefix| format!("{prefix}{id}"));
        objects.add_traffic_chain(&to_host, host);
        objects.add_traffic_chain(&to_neighbours, neighbours);

        let accepted = objects.add_traffic(&forward, routed);
        let named = objects.add_names(&forward, service_lists);
        let refused = objects.refuse();
        let mut rules = vec![
            established_reply().accept().with_comment("replies of connections"),
            NftRule::new().match_dnat().accept().with_comment("translated by the host"),
            // The host has decremented the hop limit of what it routes: this is a frame on a bridge,
            // which the other table judges.
            discovery(133, 136).accept().with_comment("neighbour discovery"),
        ];
        for kind in CONTAINER_LINKS {
            let leaves = NftRule::new().match_interface(PacketField::Oifkind, true, kind);
            let leaves = uplinks.iter().fold(leaves, |rule, uplink| {
                rule.match_interface(PacketField::Oifname, false, uplink)
            });
            rules.push(leaves.go_to(&to_neighbours).with_comment("other containers"));
        }
        rules.extend(accepted.iter().chain(&named).cloned());
        rules.push(refused.clone());
        objects.chains.push((forward.clone(), rules));

        let mut rules = vec![
            NftRule::new().match_leaving().go_to(&forward).with_comment("forwarded"),
            NftRule::new().jump_to("link").with_comment("replies and the link"),
        ];
        rules.extend(objects.add_limits(&start, limits));
        if has_names {
            // The host leads it to its resolver, whatever the address is.
            rules.extend(objects.add_name_service(&start));
        }
        for (kind, comment) in [
            (libc::RTN_LOCAL, "the host itself"),
            (libc::RTN_BROADCAST, "broadcast of the host"),
            (libc::RTN_ANYCAST, "anycast of the host"),
            (libc::RTN_MULTICAST, "multicast"),
        ] {
            rules.push(NftRule::new().daddr_type_is(kind).go_to(&to_host).with_comment(comment));
        }
        // Which link a packet leaves by is known later.
        let either = routed.union(neighbours);
        rules.extend(if either == *routed {
            accepted
        } else {
            objects.add_traffic(&start, &either)
        });
        rules.extend(named);
        rules.push(refused);
        objects.chains.push((start, rules));
        objects
    }

    /// The policy of frames that a bridge forwards; `found` has the addresses that may be asked for
    /// by ARP and neighbour discovery.
    pub(super) fn of_frames(
        traffic: &AllowedTraffic,
        found: &AllowedTraffic,
        end: &'static str,
    ) -> PolicyObjects {
        let content = [&traffic.to_bytes(), &found.to_bytes(), end.as_bytes()].concat();
        let id = sha512_hex(content, ID_LENGTH);
        let mut objects = PolicyObjects::new(FRAMES, &id, end);
        let pongs = NftRule::new().ethertype_is(ETH_P_IP).byte_is(PacketField::L4proto, ICMP);
        // Frames belong to no connection: what opens none is a reply.
        let mut rules = vec![
            // The container has sent it to the bridge. It leaves by a port because the host has
            // translated its destination (bridge-nf-call-iptables), and is judged as a packet.
            NftRule::new()
                .byte_is(PacketField::Pkttype, PACKET_HOST)
                .accept()
                .with_comment("translated by the host"),
            NftRule::new().match_arp_reply().accept().with_comment("ARP replies"),
            NftRule::new().opens_no_connection().accept().with_comment("TCP replies"),
            pongs.icmp_is(0, 0).accept().with_comment("echo replies"),
            NftRule::new()
                .byte_is(PacketField::Icmpv6Type, 129)
                .accept()
                .with_comment("echo replies"),
        ];
        // The target is the container's own: the table compares it before.
        rules.push(discovery(136, 136).accept().with_comment("advertisements"));
        let prefix = objects.chain.clone();
        rules.extend(objects.add_set(
            &prefix,
            "arp",
            &[ValueType::Ipv4Addr],
            addresses(&found.v4, true, |_| true),
            |set| vec![NftRule::new().in_set(&[PacketField::ArpTarget], set)],
        ));
        let known = objects.add_set(
            &prefix,
            "nd",
            &[ValueType::DiscoveryTarget],
            addresses(&found.v6, false, |_| true),
            |set| vec![NftRule::new().in_set(&[PacketField::Icmpv6Target], set)],
        );
        if !known.is_empty() {
            let targets = format!("{DISCOVERY}{id}");
            rules.push(discovery(135, 135).jump_to(&targets).with_comment("solicitations"));
            objects.chains.push((targets, known));
        }
        rules.extend(objects.add_traffic(&prefix, traffic));
        rules.push(objects.refuse());
        objects.chains.push((objects.chain.clone(), rules));
        objects
    }

    /// Adds a chain that accepts the traffic, and refuses the rest.
    fn add_traffic_chain(&mut self, name: &str, traffic: &AllowedTraffic) {
        let mut rules = self.add_traffic(name, traffic);
        rules.push(self.refuse());
        self.chains.push((name.to_owned(), rules));
    }

    fn refuse(&self) -> NftRule {
        NftRule::new().go_to(self.end).with_comment(self.end)
    }

    /// Adds the sets of allowed traffic. Returns the rules that accept it.
    fn add_traffic(&mut self, prefix: &str, traffic: &AllowedTraffic) -> Vec<NftRule> {
        let mut rules = Vec::new();
        for (is_ipv4, ranges) in [(true, &traffic.v4), (false, &traffic.v6)] {
            let (kind, field) = address_type(is_ipv4);
            let [all, most, some] = if is_ipv4 {
                ["all4", "prefixes4", "ranges4"]
            } else {
                ["all6", "prefixes6", "ranges6"]
            };
            rules.extend(self.add_set(
                prefix,
                all,
                kind,
                addresses(ranges, is_ipv4, |range| range.services == [ServiceRange::ALL]),
                |set| vec![NftRule::new().in_set(&[field], set)],
            ));
            rules.extend(self.add_set(
                prefix,
                most,
                kind,
                addresses(ranges, is_ipv4, |range| range.services == ALL_BUT_ICMPV6),
                |set| {
                    let others = [(0, ICMPV6 - 1), (ICMPV6 + 1, u8::MAX)];
                    let of = |(first, last)| {
                        NftRule::new().byte_in_range(PacketField::L4proto, first, last)
                    };
                    others.map(|range| of(range).in_set(&[field], set)).to_vec()
                },
            ));
            let key = if is_ipv4 { &SOME4 } else { &SOME6 };
            rules.extend(self.add_set(prefix, some, key, services(ranges, is_ipv4), |set| {
                vec![NftRule::new().in_set(&[field, PacketField::L4proto, PacketField::Dport], set)]
            }));
        }
        rules
    }

    /// Adds a set unless it is empty. Returns the rules of `rules`, which accept what is in the
    /// set.
    fn add_set(
        &mut self,
        prefix: &str,
        name: &str,
        key: &'static [ValueType],
        intervals: Vec<KeyInterval>,
        rules: impl FnOnce(NftSet<'_>) -> Vec<NftRule>,
    ) -> Vec<NftRule> {
        if intervals.is_empty() {
            return Vec::new();
        }
        let content = SetContent::Intervals(intervals);
        let set = PolicySet { name: format!("{prefix}_{name}"), key, content };
        let rules = rules(set.nft_set(self.table));
        self.sets.push(set);
        rules.into_iter().map(|rule| rule.accept().with_comment(name)).collect()
    }

    /// Whether the table has these chains and sets with this content.
    pub(super) fn exist(&self, nft: &NftSocket, comparison: RuleComparison) -> NetlinkResult<bool> {
        for (name, rules) in &self.chains {
            let found = nft.dump_rules(self.table.named_chain(name))?;
            if found.len() != rules.len()
                || !rules.iter().zip(&found).all(|(rule, found)| {
                    let is_named = rule.comment == found.comment;
                    is_named
                        && (comparison == RuleComparison::ByComment
                            || rule.has_expressions_of(self.table, found))
                })
            {
                return Ok(false);
            }
        }
        for set in &self.sets {
            let nft_set = set.nft_set(self.table);
            let is_whole = match &set.content {
                SetContent::Intervals(intervals) => nft.has_intervals(nft_set, intervals)?,
                SetContent::FilledByPackets { .. } | SetContent::Named { .. } => {
                    nft.has_object(nft_set)?
                }
            };
            if !is_whole {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The changes that create the chains and sets, or replace their content.
    pub(super) fn creation(&self, nft: &NftSocket) -> NetlinkResult<NftBatch> {
        // A deletion makes the closing of the socket slow: nothing is flushed that does not exist.
        let mut exists = false;
        for (name, _) in &self.chains {
            exists = exists || nft.has_object(self.table.named_chain(name))?;
        }
        let mut batch = NftBatch::new();
        for (name, _) in &self.chains {
            let chain = self.table.named_chain(name);
            batch.ensure_object(chain);
            if exists {
                batch.flush_chain(chain);
            }
        }
        for set in &self.sets {
            let nft_set = set.nft_set(self.table);
            batch.ensure_object(nft_set);
            if exists {
                // Not flushed: Linux 5.10 refuses the intervals of several fields that a flush of
                // the same transaction has removed.
                batch.delete_object(nft_set).ensure_object(nft_set);
            }
            if let SetContent::Intervals(intervals) = &set.content {
                batch.add_intervals(nft_set, intervals);
            }
        }
        for (name, rules) in &self.chains {
            for rule in rules {
                batch.append_rule(self.table.named_chain(name), rule);
            }
        }
        Ok(batch)
    }
}

impl EgressPart {
    pub(super) fn replaced_chains(&self) -> HashSet<PolicyChain> {
        let compiled = self.replaced.iter().filter_map(|port| Some((port, port.compile().ok()?)));
        let objects = compiled.flat_map(|(port, compiled)| port.objects(&compiled));
        objects.map(|policy| (policy.table, policy.chain)).collect()
    }

    pub(super) fn objects(&self, compiled: &CompiledPolicy) -> Vec<PolicyObjects> {
        let end_of_frames = if self.is_audited { NOTED } else { REFUSED };
        let end = if self.is_told() { REJECTED } else { end_of_frames };
        // In a VRF, or on a bridge, rules cannot ask the kernel whether an address is local to the
        // host, so the policy lists the host's addresses. Only those of the container's own
        // networks: others come and go, and equal policies would get different chains.
        let own = self.own_networks(|addr| {
            self.routers.contains(addr) || self.on_link.iter().any(|net| net.contains(addr))
        });
        let at_own = compiled.host.restrict_to(&own);
        let routed = compiled.routed.without(&own).union(&at_own);
        let neighbours = compiled.neighbours.without(&own);
        let mut objects = vec![PolicyObjects::of_packets(
            &PacketPolicy {
                routed: &routed,
                neighbours: &neighbours,
                host: &compiled.host,
                limits: compiled.limits,
                service_lists: &compiled.service_lists,
                policies: &self.policies,
            },
            &self.uplinks,
            end,
        )];
        if self.is_bridged {
            let near = self.local_subnets();
            let on_link = neighbours.restrict_to(&near);
            let traffic = match self.bridge_mac {
                Some(_) => on_link,
                None => compiled.routed.without(&near).union(&on_link),
            };
            // A router other than the host answers through the bridge, so the container may ask for
            // its MAC address.
            let routers =
                self.routers.iter().copied().map(IpNet::from).chain([IpNet::V6(LINK_LOCAL)]);
            let routers: Vec<IpNet> = routers.filter(|_| self.bridge_mac.is_none()).collect();
            let found = traffic.union(&AllowedTraffic::to_networks(&routers));
            objects.push(PolicyObjects::of_frames(&traffic, &found, end_of_frames));
        }
        objects
    }
}

pub(super) fn policy_chains(objects: &[PolicyObjects]) -> PolicyChains {
    let name = |table| {
        objects.iter().find(|o| o.table == table).map(|o| o.chain.clone()).unwrap_or_default()
    };
    PolicyChains { packets: name(PACKETS), frames: name(FRAMES) }
}

/// Adds the deletion of a policy, if nothing but `deleted` elements refers to its chain.
pub(super) fn delete_unused(
    nft: &NftSocket,
    batch: &mut NftBatch,
    chain: NftChain<'_>,
    deleted: usize,
) -> NetlinkResult<()> {
    let Some(id) = chain.name.strip_prefix(POLICY) else { return Ok(()) };
    let Some(info) = nft.read_chain(chain)? else { return Ok(()) };
    if info.uses as usize > deleted + nft.dump_rules(chain)?.len() {
        return Ok(());
    }
    batch.delete_object(chain);
    let names = CHAINS.map(|prefix| format!("{prefix}{id}"));
    for name in &names[1..] {
        let chain = chain.table.named_chain(name);
        if nft.has_object(chain)? {
            batch.delete_object(chain);
        }
    }
    for (at, prefix) in names.iter().enumerate() {
        // The first prefix is of the chain that accepts name service, the second of that with names.
        let of_names = match at {
            0 => vec![NAME_SERVICE.to_owned()],
            1 => named::names_of_lists(nft, chain.table, prefix)?,
            _ => Vec::new(),
        };
        for name in SET_NAMES.map(str::to_owned).into_iter().chain(of_names) {
            let name = format!("{prefix}_{name}");
            // The key of a set is not needed for its deletion.
            let set = chain.table.named_set(&name, &[ValueType::Ipv4Addr]);
            if nft.has_object(set)? {
                batch.delete_object(set);
            }
        }
    }
    Ok(())
}

pub(super) fn list_policies(
    nft: &NftSocket,
    table: NftTable<'static>,
) -> NetlinkResult<Vec<PolicyChain>> {
    let names = nft.dump_chains(table)?.into_iter().map(|chain| chain.name);
    Ok(names.filter(|name| name.starts_with(POLICY)).map(|name| (table, name)).collect())
}

const SOME4: [ValueType; 3] = [ValueType::Ipv4Addr, ValueType::InetProto, ValueType::InetService];
const SOME6: [ValueType; 3] = [ValueType::Ipv6Addr, ValueType::InetProto, ValueType::InetService];

fn address_type(is_ipv4: bool) -> (&'static [ValueType], PacketField) {
    if is_ipv4 {
        (&[ValueType::Ipv4Addr], PacketField::IpDaddr)
    } else {
        (&[ValueType::Ipv6Addr], PacketField::Ip6Daddr)
    }
}

#[cfg(test)]
mod tests {
    use super::super::policy::PolicyScene;
    use super::*;

    #[test]
    fn a_sandbox_has_plain_sets_for_the_internet() {
        let policy = EgressPolicy { profile: "sandbox".to_owned(), ..EgressPolicy::default() };
        let compiled = policy.compile(&PolicyScene::default()).unwrap();
        let CompiledPolicy { routed, neighbours, host, limits, .. } = &compiled;
        let policies = &[policy];
        let (limits, service_lists) = (*limits, &[]);
        let policy = PacketPolicy { routed, neighbours, host, limits, service_lists, policies };
        let objects = PolicyObjects::of_packets(&policy, &[], REFUSED);
        let names = objects.sets.iter().filter(|set| set.name.starts_with(FORWARD));
        let ends: Vec<&str> = names.map(|set| set.name.rsplit('_').next().unwrap()).collect();
        assert_eq!(ends, ["all4", "prefixes6"]);
    }
}
