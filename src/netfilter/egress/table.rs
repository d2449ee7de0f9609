//! The tables of `nf_tables` for egress policies.
//!
//! ```text
//! table inet cnibox_egress {
//!     set guarded { ifname, counter }         the host's ends of the containers with a policy
//!     map ports { ifname . ether_addr : verdict }     "cni0" . 02:..:01 : goto policy_5f1d..
//!     set refused { ifname . ether_addr, counter }    counts what each container was refused
//!     set flows4, flows6, packet_senders  the refused flows, which refused packets add
//!     chain prerouting {                      before the translation of destinations
//!         type filter hook prerouting priority dstnat - 10
//!         iifname . ether saddr vmap @ports
//!         iifname @guarded drop               a MAC address that is not the container's
//!     }
//!     chain forward {                         when it is known by which link a packet leaves
//!         type filter hook forward priority filter - 10
//!         iifname . ether saddr vmap @ports
//!     }
//!     chain link { .. }                       what IPv6 needs on a link; other source addresses; replies
//!     chain targets { .. }                    other addresses in neighbour discovery
//!     chain record { .. }                     records the flow
//!     chain rejected { .. reject }            counts, records and answers
//!     chain refused { .. drop }               in place of rejected, with "refuse": "drop"
//!     chain noted { .. accept }               in place of rejected, if the policies are audited
//!     chain policy_5f1d.. {                   one for equal policies
//!         meta oiftype != 0 goto forward_5f1d..
//!         jump link
//!         fib daddr type local goto host_5f1d..
//!         ip daddr @forward_5f1d.._all4 accept
//!         ip daddr . meta l4proto . th dport @forward_5f1d.._ranges4 accept
//!         goto rejected
//!     }
//!     chain forward_5f1d.. {
//!         ct status dnat accept
//!         oifkind veth goto neighbours_5f1d..
//!         ip daddr @forward_5f1d.._all4 accept
//!         ..
//!     }
//! }
//! table bridge cnibox_egress {                frames of containers at a bridge
//!     set guarded, bound; map ports; set refused
//!     chain prerouting {                      priority raw
//!         iifname . ether saddr != @bound iifname @guarded drop
//!         meta protocol != ip, ip6, arp iifname @guarded drop
//!         ether type vlan iifname @guarded drop
//!     }
//!     chain forward {                         frames to other ports, also to neighbours
//!         iifname . ether saddr vmap @ports
//!     }
//! }
//! table netdev cnibox_egress {                what the second guard refuses
//!     set refused; set flows4, flows6, arp_targets, packet_senders
//!     chain refused { type filter hook ingress device "cnibox-dropped" priority 0 .. }
//!     chain dropped { type filter hook ingress device "cnibox-dropped" priority 20; drop }
//! }
//! ```
//!
//! Behind a bridge a container is known by the bridge and by the source address of its frames,
//! which `bound` ties to its port before anything else sees the frame. All packets that enter the
//! host's stack are judged with the destination that the container has written, and forwarded ones
//! again by the link by which they leave. A flow that was accepted is judged again with each packet.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

use crate::attachment::AttachmentId;
use crate::netfilter::layout::{FixedRule, TableLayout};
use crate::netlink::MacAddress;
use crate::netlink::nftables::{
    BRIDGE_FILTER, CT_STATE_ESTABLISHED, DSTNAT, NetfilterHook, NftRule, NftSet, NftTable,
    NftValue, PacketField, PacketLimit, PacketVerdict, RAW, SetElement, TableFamily, ValueType,
};

use super::discovery::{ETH_P_IPV6, TARGET_CHAIN, advertises, discovery, foreign_target, probes};
use super::part::EgressPart;
use super::redirect;
use super::{BEFORE_FILTER, LINK_LOCAL, LINK_LOCAL_MULTICAST, PORT, PORT_FIELDS, UNSPECIFIED6};

pub(super) const PACKETS: NftTable<'_> =
    NftTable::new_inet("cnibox_egress").with_comment("cnibox: what containers may reach");
pub(super) const FRAMES: NftTable<'_> = NftTable::new(TableFamily::Bridge, "cnibox_egress")
    .with_comment("cnibox: what containers may reach");

pub(super) const GUARD: NftTable<'_> = NftTable::new(TableFamily::Netdev, "cnibox_egress")
    .with_comment("cnibox: what the second guard refused");

/// The link that gets the frames that the second guard refuses, and drops them.
pub(crate) const SINK_PORT: &str = "cnibox-dropped";

/// Before the chains that translate destinations.
const BEFORE_DSTNAT: i32 = DSTNAT - 10;

/// The sets with elements of containers.
#[derive(Clone, Copy, Debug)]
pub(super) struct PortSets {
    pub(super) guarded: NftSet<'static>,
    pub(super) ports: NftSet<'static>,
    pub(super) refused: NftSet<'static>,
}

impl PortSets {
    const fn of_table(table: NftTable<'static>) -> PortSets {
        PortSets {
            guarded: table.named_set("guarded", &[ValueType::IfName]).with_counters(),
            ports: table.verdict_map("ports", &PORT),
            refused: table.named_set("refused", &PORT).with_counters(),
        }
    }
}

pub(super) const PACKET_SETS: PortSets = PortSets::of_table(PACKETS);
pub(super) const FRAME_SETS: PortSets = PortSets::of_table(FRAMES);
/// The ports of bridges, and the only source address of each.
pub(super) const BOUND: NftSet<'_> = FRAMES.named_set("bound", &PORT);

/// The addresses from which each container may send, IPv4 and IPv6.
pub(super) const SOURCES: [NftSet<'_>; 2] = sources_of_table(PACKETS);
const FRAME_SOURCES: [NftSet<'_>; 2] = sources_of_table(FRAMES);
/// The same IPv6 addresses as targets of neighbour discovery.
const TARGETS: NftSet<'_> = PACKETS.named_set("targets6", &TARGET);
const FRAME_TARGETS: NftSet<'_> = FRAMES.named_set("targets6", &TARGET);
const TARGET: [ValueType; 2] = [ValueType::EtherAddr, ValueType::DiscoveryTarget];

const fn sources_of_table(table: NftTable<'static>) -> [NftSet<'static>; 2] {
    [
        table.named_set("sources4", &[ValueType::EtherAddr, ValueType::Ipv4Addr]),
        table.named_set("sources6", &[ValueType::EtherAddr, ValueType::Ipv6Addr]),
    ]
}

/// How long a refused flow is kept after its last packet, in seconds.
pub(super) const FLOW_TIMEOUT: u32 = 600;
/// The flows of a container that are recorded.
const NEW_FLOWS: PacketLimit = PacketLimit { packets: 5, seconds: 60, burst: 50 };
/// The maximum number of recorded flows of all containers.
const MOST_FLOWS: u32 = 65536;

/// The sets by which packets record what was refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlowSets {
    /// Container, protocol, port, destination.
    pub(super) flows4: NftSet<'static>,
    pub(super) flows6: NftSet<'static>,
    /// The containers whose flows were recorded, each with its limit.
    packet_senders: NftSet<'static>,
}

const FLOW4: [ValueType; 4] =
    [ValueType::EtherAddr, ValueType::InetProto, ValueType::InetService, ValueType::Ipv4Addr];
const FLOW6: [ValueType; 4] =
    [ValueType::EtherAddr, ValueType::InetProto, ValueType::InetService, ValueType::Ipv6Addr];

impl FlowSets {
    const fn of_table(table: NftTable<'static>) -> FlowSets {
        FlowSets {
            flows4: table.named_set("flows4", &FLOW4).filled_by_packets(MOST_FLOWS, FLOW_TIMEOUT),
            flows6: table.named_set("flows6", &FLOW6).filled_by_packets(MOST_FLOWS, FLOW_TIMEOUT),
            packet_senders: table
                .named_set("packet_senders", &[ValueType::EtherAddr])
                .filled_by_packets(MOST_FLOWS, FLOW_TIMEOUT),
        }
    }

    /// The packets of this kind, the key of their flows, and its set.
    fn describe(self, kind: FlowKind) -> (NftRule, [PacketField; 4], NftSet<'static>) {
        let ipv4 = || NftRule::new().ethertype_is(ETH_P_IP);
        let ipv6 = || NftRule::new().ethertype_is(ETH_P_IPV6);
        let (packets, service) = match kind {
            FlowKind::Icmp => (ipv4().byte_is(PacketField::L4proto, ICMP), PacketField::IcmpType),
            FlowKind::Icmpv6 => {
                (ipv6().byte_is(PacketField::L4proto, ICMPV6), PacketField::IcmpType)
            }
            FlowKind::Ipv4 => (ipv4(), PacketField::Dport),
            FlowKind::Ipv6 => (ipv6(), PacketField::Dport),
        };
        let (daddr, flows) = match kind {
            FlowKind::Icmp | FlowKind::Ipv4 => (PacketField::IpDaddr, self.flows4),
            FlowKind::Icmpv6 | FlowKind::Ipv6 => (PacketField::Ip6Daddr, self.flows6),
        };
        (packets, [PacketField::EtherSaddr, PacketField::L4proto, service, daddr], flows)
    }

    /// Keeps a recorded flow for longer: its packets do not count for the limit.
    fn keep(self, kind: FlowKind) -> NftRule {
        let (packets, key, flows) = self.describe(kind);
        keep_recorded(packets, &key, flows)
    }

    /// Records a new flow, unless the container has too many.
    fn record(self, kind: FlowKind) -> NftRule {
        let (packets, key, flows) = self.describe(kind);
        self.record_key(packets, &key, flows)
    }

    /// Records a key that begins with the container.
    fn record_key(self, packets: NftRule, key: &[PacketField], flows: NftSet<'_>) -> NftRule {
        packets
            .add_with_limit(&key[..1], self.packet_senders, NEW_FLOWS)
            .update_set(key, flows)
            .return_to_caller()
    }
}

fn keep_recorded(packets: NftRule, key: &[PacketField], flows: NftSet<'_>) -> NftRule {
    packets.in_set(key, flows).update_set(key, flows).return_to_caller()
}

/// Packets whose flows are recorded in the same way.
#[derive(Clone, Copy, Debug)]
enum FlowKind {
    /// By type and code: in place of a port it has a checksum, with which each ping would be a
    /// flow.
    Icmp,
    Icmpv6,
    /// The other protocols.
    Ipv4,
    Ipv6,
}

pub(super) const PACKET_FLOWS: FlowSets = FlowSets::of_table(PACKETS);
pub(super) const GUARD_FLOWS: FlowSets = FlowSets::of_table(GUARD);
/// The neighbours that the requests of ARP which the second guard refused were for: container,
/// address.
pub(super) const GUARD_ARP: NftSet<'_> = GUARD
    .named_set("arp_targets", &[ValueType::EtherAddr, ValueType::Ipv4Addr])
    .filled_by_packets(MOST_FLOWS, FLOW_TIMEOUT);
const ARP_KEY: [PacketField; 2] = [PacketField::EtherSaddr, PacketField::ArpTarget];
const PACKET_RECORDERS: [NftSet<'_>; 3] =
    [PACKET_FLOWS.flows4, PACKET_FLOWS.flows6, PACKET_FLOWS.packet_senders];
const GUARD_RECORDERS: [NftSet<'_>; 4] =
    [GUARD_FLOWS.flows4, GUARD_FLOWS.flows6, GUARD_ARP, GUARD_FLOWS.packet_senders];
/// What the second guard refused, by container.
pub(super) const GUARD_REFUSED: NftSet<'_> =
    GUARD.named_set("refused", &[ValueType::EtherAddr]).with_counters();

const LINK: &str = "link";
/// The chains for what a policy refuses with an answer and without, and for what it would refuse.
pub(super) const REJECTED: &str = "rejected";
pub(super) const REFUSED: &str = "refused";
pub(super) const NOTED: &str = "noted";

/// The number of ICMP (RFC 792).
pub(super) const ICMP: u8 = 1;
/// The number of ICMPv6 (RFC 4443).
pub(super) const ICMPV6: u8 = 58;

pub(super) const ETH_P_IP: u16 = 0x0800;
const ETH_P_ARP: u16 = 0x0806;
const ETH_P_8021Q: u16 = 0x8100;
const ETH_P_8021AD: u16 = 0x88a8;

/// The elements of a container in both tables.
pub(super) fn port_elements(
    owner: AttachmentId<'_>,
    port: &EgressPart,
    chains: &PolicyChains,
) -> Vec<SetElement> {
    let (end, mac) = (port.end.as_str(), port.mac);
    let mut all = vec![PACKET_SETS.guarded.element_with_key(end)];
    let own = |sources: [NftSet<'static>; 2], targets: NftSet<'static>| {
        let ips6 = port.ips.iter().filter(|ip| ip.is_ipv6());
        let targets = ips6.map(move |ip| targets.element_with_key((mac, *ip)));
        let by_family = move |ip: &IpAddr| sources[usize::from(ip.is_ipv6())];
        let sources = port.ips.iter().map(move |ip| by_family(ip).element_with_key((mac, *ip)));
        sources.chain(targets)
    };
    all.extend(own(SOURCES, TARGETS));
    let judged = |sets: PortSets, at: &str, chain: &str| {
        let selects =
            sets.ports.element_with_key((at, mac)).with_verdict(PacketVerdict::go_to(chain));
        [selects, sets.refused.element_with_key((at, mac))]
    };
    all.extend(port.arrives_at.iter().flat_map(|at| judged(PACKET_SETS, at, &chains.packets)));
    if port.is_bridged {
        all.extend(own(FRAME_SOURCES, FRAME_TARGETS));
        all.extend([FRAME_SETS.guarded.element_with_key(end), BOUND.element_with_key((end, mac))]);
        all.extend(judged(FRAME_SETS, end, &chains.frames));
    }
    all.extend(redirect::asking_elements(port));
    let label = owner.object_label();
    all.into_iter().map(|element| element.with_comment(label.clone())).collect()
}

/// The counter of what the second guard refuses a container.
pub(super) fn guard_element(owner: AttachmentId<'_>, mac: MacAddress) -> SetElement {
    GUARD_REFUSED.element_with_key(mac).with_comment(owner.object_label())
}

/// The names of the chains of a container's policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PolicyChains {
    pub(super) packets: String,
    pub(super) frames: String,
}

pub(super) const LAYOUTS: [TableLayout; 3] = [PACKET_LAYOUT, FRAME_LAYOUT, redirect::LAYOUT];

/// The layouts of the tables whose rules judge a container's packets.
pub(super) fn layouts_of_port(port: &EgressPart) -> Vec<TableLayout> {
    let mut layouts = LAYOUTS.to_vec();
    layouts.retain(|layout| needs_table(port, layout));
    layouts
}

/// Whether the rules of the table judge the container's packets, or lead them to the resolver.
pub(super) fn needs_table(port: &EgressPart, layout: &TableLayout) -> bool {
    match layout.table {
        FRAMES => port.is_bridged,
        redirect::TABLE => port.has_names(),
        _ => true,
    }
}

fn select_policy(ports: NftSet<'_>) -> NftRule {
    NftRule::new().verdict_by_map(&PORT_FIELDS, ports)
}

/// Drops what comes from a port with a policy, if `rule` matches.
fn drop_guarded(rule: NftRule, guarded: NftSet<'_>) -> NftRule {
    rule.in_set(&[PacketField::Iifname], guarded).drop()
}

/// Drops tagged frames from a port with a policy.
fn drop_tagged(tag: u16) -> NftRule {
    drop_guarded(NftRule::new().frame_type_is(tag), FRAME_SETS.guarded)
}

fn count_refusal(refused: NftSet<'_>) -> NftRule {
    NftRule::new().in_set(&PORT_FIELDS, refused)
}

/// The chain that records flows.
const RECORD: &str = "record";
const RECORD_FLOW: FixedRule = ("record", || NftRule::new().jump_to(RECORD));
const COUNT_PACKET: FixedRule = ("count", || count_refusal(PACKET_SETS.refused));
const DROP: FixedRule = ("drop", || NftRule::new().drop());
const ACCEPT: FixedRule = ("accept", || NftRule::new().accept());
const FOREIGN: &str = "from another address";

const PACKET_LAYOUT: TableLayout = TableLayout {
    sets: &[
        PACKET_SETS.guarded,
        PACKET_SETS.ports,
        PACKET_SETS.refused,
        SOURCES[0],
        SOURCES[1],
        TARGETS,
    ],
    packet_filled_sets: &PACKET_RECORDERS,
    chains: &[
        (
            PACKETS.named_chain(RECORD),
            &[
                ("recorded ICMP", || PACKET_FLOWS.keep(FlowKind::Icmp)),
                ("record ICMP", || PACKET_FLOWS.record(FlowKind::Icmp)),
                ("recorded ICMPv6", || PACKET_FLOWS.keep(FlowKind::Icmpv6)),
                ("record ICMPv6", || PACKET_FLOWS.record(FlowKind::Icmpv6)),
                ("recorded IPv4", || PACKET_FLOWS.keep(FlowKind::Ipv4)),
                ("record IPv4", || PACKET_FLOWS.record(FlowKind::Ipv4)),
                ("recorded IPv6", || PACKET_FLOWS.keep(FlowKind::Ipv6)),
                ("record IPv6", || PACKET_FLOWS.record(FlowKind::Ipv6)),
            ],
        ),
        (
            PACKETS.named_chain(REJECTED),
            &[
                COUNT_PACKET,
                RECORD_FLOW,
                ("reset TCP", || NftRule::new().reset_tcp()),
                ("reject", || NftRule::new().reject()),
            ],
        ),
        (PACKETS.named_chain(REFUSED), &[COUNT_PACKET, RECORD_FLOW, DROP]),
        (PACKETS.named_chain(NOTED), &[COUNT_PACKET, RECORD_FLOW, ACCEPT]),
        (
            PACKETS.named_chain(TARGET_CHAIN),
            &[("another address", || foreign_target(TARGETS).go_to(REFUSED))],
        ),
        (PACKETS.named_chain(LINK), &LINK_RULES),
        (
            PACKETS
                .named_chain("prerouting")
                .at_filter_hook(NetfilterHook::Prerouting, BEFORE_DSTNAT),
            &[
                ("policy of the container", || select_policy(PACKET_SETS.ports)),
                (FOREIGN, || drop_guarded(NftRule::new(), PACKET_SETS.guarded)),
            ],
        ),
        (
            PACKETS.named_chain("forward").at_filter_hook(NetfilterHook::Forward, BEFORE_FILTER),
            &[("policy of the container", || select_policy(PACKET_SETS.ports))],
        ),
    ],
    has_only_these_rules: true,
    ..TableLayout::new(PACKETS)
};

/// What passes with every policy: replies to a client, and the discovery of neighbours on the link,
/// which no router forwards.
///
/// All that tells who the container is must be its own. With another source address it could send
/// the packets of both directions of a connection, and so make the replies of that connection pass;
/// by neighbour discovery it could get what is for others.
const LINK_RULES: [FixedRule; 14] = [
    ("IPv4 options", || NftRule::new().has_ip_options().go_to(REFUSED)),
    ("from another IPv4 address", || foreign_v4(SOURCES).go_to(REFUSED)),
    ("from another IPv6 address", || foreign_v6(SOURCES).go_to(REFUSED)),
    ("advertised addresses", || advertises().jump_to(TARGET_CHAIN)),
    ("probed addresses", || probes().jump_to(TARGET_CHAIN)),
    ("router solicitation", || {
        discovery(133, 133).daddr_in(IpNet::V6(LINK_LOCAL_MULTICAST)).accept()
    }),
    ("solicitations", || discovery(135, 135).daddr_in(IpNet::V6(LINK_LOCAL_MULTICAST)).accept()),
    ("solicitations on the link", || discovery(135, 135).daddr_in(IpNet::V6(LINK_LOCAL)).accept()),
    ("solicitations of the host", || discovery(135, 135).daddr_is_local().accept()),
    // What is routed is judged again, without this rule.
    ("advertisements", || discovery(136, 136).accept()),
    ("multicast groups", || group_message(131, 132).accept()),
    ("multicast groups, version 2", || group_message(143, 143).accept()),
    ("from no address", || NftRule::new().saddr_in(IpNet::V6(UNSPECIFIED6)).go_to(REFUSED)),
    // Without related packets: an ICMP error may quote a connection of another container.
    ("replies of connections", || established_reply().accept()),
];

/// Replies to those who have opened a connection to the container.
pub(super) fn established_reply() -> NftRule {
    NftRule::new().match_reply().any_bit_set(PacketField::CtState, CT_STATE_ESTABLISHED)
}

fn foreign_v4(sources: [NftSet<'_>; 2]) -> NftRule {
    NftRule::new().not_in_set(&[PacketField::EtherSaddr, PacketField::IpSaddr], sources[0])
}

fn foreign_v6(sources: [NftSet<'_>; 2]) -> NftRule {
    let rule = NftRule::new().saddr_not_in(IpNet::V6(UNSPECIFIED6));
    rule.not_in_set(&[PacketField::EtherSaddr, PacketField::Ip6Saddr], sources[1])
}

/// ARP from another address than the container's and none, as probes have it (RFC 5227).
fn foreign_arp() -> NftRule {
    let rule = NftRule::new()
        .match_unequal(PacketField::ArpSender, NftValue::Ip(Ipv4Addr::UNSPECIFIED.into()));
    rule.not_in_set(&[PacketField::EtherSaddr, PacketField::ArpSender], FRAME_SOURCES[0])
}

/// Messages of these types about multicast groups of the link.
fn group_message(first: u8, last: u8) -> NftRule {
    let rule = NftRule::new().daddr_in(IpNet::V6(LINK_LOCAL_MULTICAST));
    rule.byte_in_range(PacketField::Icmpv6Type, first, last)
}

const FRAME_LAYOUT: TableLayout = TableLayout {
    sets: &[
        FRAME_SETS.guarded,
        FRAME_SETS.ports,
        FRAME_SETS.refused,
        BOUND,
        FRAME_SOURCES[0],
        FRAME_SOURCES[1],
        FRAME_TARGETS,
    ],
    chains: &[
        (FRAMES.named_chain(REFUSED), &[("count", || count_refusal(FRAME_SETS.refused)), DROP]),
        (FRAMES.named_chain(NOTED), &[("count", || count_refusal(FRAME_SETS.refused)), ACCEPT]),
        (
            FRAMES.named_chain(TARGET_CHAIN),
            &[("another address", || {
                drop_guarded(foreign_target(FRAME_TARGETS), FRAME_SETS.guarded)
            })],
        ),
        (
            FRAMES.named_chain("prerouting").at_filter_hook(NetfilterHook::Prerouting, RAW),
            &[
                (FOREIGN, || {
                    drop_guarded(NftRule::new().not_in_set(&PORT_FIELDS, BOUND), FRAME_SETS.guarded)
                }),
                ("other protocols", || {
                    let known = [ETH_P_IP, ETH_P_IPV6, ETH_P_ARP];
                    drop_guarded(
                        known.into_iter().fold(NftRule::new(), NftRule::ethertype_is_not),
                        FRAME_SETS.guarded,
                    )
                }),
                ("ARP from another address", || drop_guarded(foreign_arp(), FRAME_SETS.guarded)),
                ("from another IPv4 address", || {
                    drop_guarded(foreign_v4(FRAME_SOURCES), FRAME_SETS.guarded)
                }),
                ("from another IPv6 address", || {
                    drop_guarded(foreign_v6(FRAME_SOURCES), FRAME_SETS.guarded)
                }),
                ("advertised addresses", || advertises().jump_to(TARGET_CHAIN)),
                ("probed addresses", || probes().jump_to(TARGET_CHAIN)),
                ("VLANs", || drop_tagged(ETH_P_8021Q)),
                ("VLANs of providers", || drop_tagged(ETH_P_8021AD)),
            ],
        ),
        (
            FRAMES.named_chain("forward").at_filter_hook(NetfilterHook::Forward, BRIDGE_FILTER),
            &[("policy of the container", || select_policy(FRAME_SETS.ports))],
        ),
    ],
    has_only_these_rules: true,
    ..TableLayout::new(FRAMES)
};

/// Counts and records what the second guard refuses, before it is answered and dropped.
pub(super) const GUARD_LAYOUT: TableLayout = TableLayout {
    sets: &[GUARD_REFUSED],
    packet_filled_sets: &GUARD_RECORDERS,
    chains: &[
        (
            GUARD.named_chain(RECORD),
            &[
                ("recorded ICMP", || GUARD_FLOWS.keep(FlowKind::Icmp)),
                ("record ICMP", || GUARD_FLOWS.record(FlowKind::Icmp)),
                ("recorded ICMPv6", || GUARD_FLOWS.keep(FlowKind::Icmpv6)),
                ("record ICMPv6", || GUARD_FLOWS.record(FlowKind::Icmpv6)),
                ("recorded IPv4", || GUARD_FLOWS.keep(FlowKind::Ipv4)),
                ("record IPv4", || GUARD_FLOWS.record(FlowKind::Ipv4)),
                ("recorded IPv6", || GUARD_FLOWS.keep(FlowKind::Ipv6)),
                ("record IPv6", || GUARD_FLOWS.record(FlowKind::Ipv6)),
                ("recorded ARP", || {
                    keep_recorded(NftRule::new().ethertype_is(ETH_P_ARP), &ARP_KEY, GUARD_ARP)
                }),
                ("record ARP", || {
                    let requests = NftRule::new().ethertype_is(ETH_P_ARP);
                    GUARD_FLOWS.record_key(requests, &ARP_KEY, GUARD_ARP)
                }),
            ],
        ),
        (
            GUARD.named_chain(REFUSED).at_ingress_of(SINK_PORT, 0),
            &[
                // With any other address a container could fill the sets.
                (FOREIGN, || {
                    NftRule::new().not_in_set(&[PacketField::EtherSaddr], GUARD_REFUSED).drop()
                }),
                ("count", || NftRule::new().in_set(&[PacketField::EtherSaddr], GUARD_REFUSED)),
                RECORD_FLOW,
                ("for the answer", || NftRule::new().take_for_this_host()),
            ],
        ),
        // After the answer.
        (GUARD.named_chain("dropped").at_ingress_of(SINK_PORT, 20), &[DROP]),
    ],
    ..TableLayout::new(GUARD)
};
