//! Answers to what the second guard refuses: a reset of TCP, or the ICMP error "administratively
//! prohibited", so that a program fails at once instead of waiting.
//!
//! ```text
//! table netdev cnibox_egress_answers {
//!     map ends { ether_addr : iface_index }   the containers that get answers: the host's ends
//!     chain answer { type filter hook ingress device "cnibox-dropped" priority 10
//!         meta l4proto tcp reject with tcp reset
//!         reject with icmpx admin-prohibited
//!     }
//!     chain deliver { type filter hook ingress device "cnibox-refused" priority 0
//!         fwd to ether daddr map @ends
//!         drop
//!     }
//! }
//! ```
//!
//! The kernel sends an answer by the link that got the refused frame, to the frame's source, so it
//! arrives at the other end of the sink. The first program of each guard has compared the source
//! with the container's address. This table enforces nothing: where the kernel lacks what it needs
//! (`nft_reject_netdev`, Linux 5.11; `nft_fwd_netdev`), packets are refused without an answer.

use nix::net::if_::if_nametoindex;

use super::part::EgressPart;
use super::table::SINK_PORT;
use crate::attachment::AttachmentId;
use crate::netfilter::PacketFilter;
use crate::netfilter::layout::TableLayout;
use crate::netlink::MacAddress;
use crate::netlink::nftables::{
    ElementKey, NftBatch, NftRule, NftSet, NftSocket, NftTable, NftValue, PacketField, SetElement,
    TableFamily, ValueType,
};

const TABLE: NftTable<'_> = NftTable::new(TableFamily::Netdev, "cnibox_egress_answers")
    .with_comment("cnibox: tells containers what was refused");

/// The other end of [`SINK_PORT`].
pub(crate) const SINK_ENTRY: &str = "cnibox-refused";

pub(super) const ENDS: NftSet<'_> =
    TABLE.value_map("ends", &[ValueType::EtherAddr], &[ValueType::IfIndex]);

pub(super) const LAYOUT: TableLayout = TableLayout {
    sets: &[ENDS],
    chains: &[
        (
            // After the chain that counts and records.
            TABLE.named_chain("answer").at_ingress_of(SINK_PORT, 10),
            &[
                ("TCP", || NftRule::new().reset_tcp()),
                ("other protocols", || NftRule::new().reject()),
            ],
        ),
        (
            TABLE.named_chain("deliver").at_ingress_of(SINK_ENTRY, 0),
            &[
                ("to the container", || {
                    NftRule::new().forward_by_map(&[PacketField::EtherDaddr], ENDS)
                }),
                ("drop", || NftRule::new().drop()),
            ],
        ),
    ],
    ..TableLayout::new(TABLE)
};

/// The element of a container that gets answers; `None` if it gets none.
pub(super) fn end_element(owner: AttachmentId<'_>, port: &EgressPart) -> Option<SetElement> {
    let index = if_nametoindex(port.end.as_str()).ok().filter(|_| port.is_told())?;
    let end = ElementKey(vec![NftValue::IfIndex(index)]);
    Some(end_key(port.mac).with_values(end).with_comment(owner.object_label()))
}

pub(super) fn end_key(mac: MacAddress) -> SetElement {
    ENDS.element_with_key(mac)
}

/// Whether the container gets answers: creates the table unless it exists. A change of a layout
/// would take a refusal of the kernel for a conflict with another process, and try again.
pub(super) fn is_ready(filter: &PacketFilter, port: &EgressPart) -> bool {
    port.is_told() && filter.nft_socket().is_ok_and(ensure_table)
}

fn ensure_table(nft: &NftSocket) -> bool {
    let ensured = nft.update_tables(&mut |nft| {
        let mut batch = NftBatch::new();
        if !nft.has_object(LAYOUT.chains[0].0)? {
            batch.append_batch(LAYOUT.creation());
        }
        Ok(batch)
    });
    ensured.inspect_err(|error| debug!("what is refused gets no answer: {error}")).is_ok()
}
