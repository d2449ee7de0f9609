//! Answers to what the second guard refuses: a reset of TCP, or the ICMP error "administratively
//! prohibited", so that a program fails at once instead of waiting.
//!
//! ```text
//! table inet cnibox_egress_answers {
//!     set told4 { ether_addr . ipv4_addr }    the containers that get answers
//!     set told6 { ether_addr . ipv6_addr }
//!     chain answer {
//!         type filter hook ingress device "cnibox-dropped" priority 10
//!         ether saddr . ip saddr @told4 meta l4proto tcp reject with tcp reset
//!         ether saddr . ip saddr @told4 reject with icmpx admin-prohibited
//!         ..
//!     }
//! }
//! ```
//!
//! The host routes an answer to the source of the refused packet. The first program of each guard
//! has compared its MAC address, the sets have the container's addresses: nobody else is told. This
//! table enforces nothing: where the kernel lacks what it needs (`nft_reject_inet` at the hook
//! ingress, Linux 5.11), packets are refused without an answer.

use std::net::IpAddr;

use super::part::EgressPart;
use super::table::SINK_PORT;
use crate::attachment::AttachmentId;
use crate::netfilter::PacketFilter;
use crate::netfilter::layout::TableLayout;
use crate::netlink::NetlinkResult;
use crate::netlink::nftables::{
    NftBatch, NftRule, NftSet, NftSocket, NftTable, PacketField, SetElement, ValueType,
};

const TABLE: NftTable<'_> = NftTable::new_inet("cnibox_egress_answers")
    .with_comment("cnibox: tells containers what was refused");

const TOLD: [NftSet<'_>; 2] = [
    TABLE.named_set("told4", &[ValueType::EtherAddr, ValueType::Ipv4Addr]),
    TABLE.named_set("told6", &[ValueType::EtherAddr, ValueType::Ipv6Addr]),
];

pub(super) const LAYOUT: TableLayout = TableLayout {
    sets: &TOLD,
    chains: &[(
        // After the chain that counts and records.
        TABLE.named_chain("answer").at_ingress_of(SINK_PORT, 10),
        &[
            ("TCP", || told(PacketField::IpSaddr).reset_tcp()),
            ("other protocols", || told(PacketField::IpSaddr).reject()),
            ("TCP over IPv6", || told(PacketField::Ip6Saddr).reset_tcp()),
            ("other protocols over IPv6", || told(PacketField::Ip6Saddr).reject()),
        ],
    )],
    ..TableLayout::new(TABLE)
};

/// Packets of containers that get answers; `source` is of one family.
fn told(source: PacketField) -> NftRule {
    let set = TOLD[usize::from(source == PacketField::Ip6Saddr)];
    NftRule::new().in_set(&[PacketField::EtherSaddr, source], set)
}

/// The elements of a container for its addresses that get answers.
pub(super) fn told_elements(owner: AttachmentId<'_>, port: &EgressPart) -> Vec<SetElement> {
    let element = |ip: &IpAddr| TOLD[usize::from(ip.is_ipv6())].element_with_key((port.mac, *ip));
    let told = port.answered.iter().filter(|_| port.is_told());
    told.map(|ip| element(ip).with_comment(owner.object_label())).collect()
}

/// Whether the container gets answers: creates the table unless it exists. A change of a layout
/// would take a refusal of the kernel for a conflict with another process, and try again.
pub(super) fn is_ready(filter: &PacketFilter, port: &EgressPart) -> bool {
    port.is_told() && filter.nft_socket().is_ok_and(ensure_table)
}

/// Whether the table exists.
pub(super) fn exists(nft: &NftSocket) -> NetlinkResult<bool> {
    nft.has_object(LAYOUT.chains[0].0)
}

fn ensure_table(nft: &NftSocket) -> bool {
    let ensured = nft.update_tables(&mut |nft| {
        let mut batch = NftBatch::new();
        if !exists(nft)? {
            batch.append_batch(LAYOUT.creation());
        }
        Ok(batch)
    });
    ensured.inspect_err(|error| debug!("what is refused gets no answer: {error}")).is_ok()
}
