//! The redirection of name service to the resolver of the node.
//!
//! ```text
//! table inet cnibox_egress_names {
//!     set asking { ifname . ether_addr }      the containers whose policies have names
//!     chain prerouting {
//!         type nat hook prerouting priority dstnat - 5
//!         iifname . ether saddr @asking tcp dport 53 redirect to :533
//!         iifname . ether saddr @asking udp dport 53 redirect to :533
//!     }
//!     chain input {
//!         type filter hook input priority filter - 10
//!         iifname "lo" accept
//!         ct status dnat accept
//!         tcp dport 533 drop
//!         udp dport 533 drop
//!     }
//! }
//! ```
//!
//! Port 53 of any address is redirected, so that a container cannot choose the name server that
//! tells it where an allowed name leads. The chain is before those of others that translate the
//! destination, such as that of a cluster's name service.
//!
//! The resolver knows a container by its interface and source address. Another container of the
//! bridge can send from the address, but not from the MAC address: its packets are not redirected,
//! and nothing else reaches the port.

use super::part::EgressPart;
use super::{BEFORE_FILTER, PORT, PORT_FIELDS};
use crate::netfilter::layout::TableLayout;
use crate::netlink::nftables::{
    DSTNAT, NetfilterHook, NftRule, NftSet, NftTable, PacketField, SetElement, TransportProtocol,
};

/// The port of name service.
pub(super) const DNS: u16 = 53;

/// The port of the node at which the resolver listens. Only root can: a program of the node that
/// took it could tell containers any address.
pub const RESOLVER_PORT: u16 = 533;

pub(super) const TABLE: NftTable<'_> = NftTable::new_inet("cnibox_egress_names")
    .with_comment("cnibox: leads questions for names to the resolver");

const ASKING: NftSet<'_> = TABLE.named_set("asking", &PORT);

pub(super) const LAYOUT: TableLayout = TableLayout {
    sets: &[ASKING],
    chains: &[
        (
            TABLE.named_chain("prerouting").at_nat_hook(NetfilterHook::Prerouting, DSTNAT - 5),
            &[
                ("TCP", || redirect(TransportProtocol::Tcp)),
                ("UDP", || redirect(TransportProtocol::Udp)),
            ],
        ),
        (
            TABLE.named_chain("input").at_filter_hook(NetfilterHook::Input, BEFORE_FILTER),
            &[
                ("node", || NftRule::new().match_equal(PacketField::Iifname, "lo").accept()),
                ("redirected", || NftRule::new().match_dnat().accept()),
                ("other TCP", || refuse_others(TransportProtocol::Tcp)),
                ("other UDP", || refuse_others(TransportProtocol::Udp)),
            ],
        ),
    ],
    ..TableLayout::new(TABLE)
};

fn redirect(protocol: TransportProtocol) -> NftRule {
    let asks = NftRule::new().in_set(&PORT_FIELDS, ASKING).dport_is(protocol, DNS);
    asks.redirect_to_port(RESOLVER_PORT)
}

fn refuse_others(protocol: TransportProtocol) -> NftRule {
    NftRule::new().dport_is(protocol, RESOLVER_PORT).drop()
}

/// The elements of a container whose policies have names.
pub(super) fn asking_elements(port: &EgressPart) -> impl Iterator<Item = SetElement> {
    let arrives_at = port.arrives_at.iter().filter(|_| port.has_names());
    arrives_at.map(|at| ASKING.element_with_key((at.as_str(), port.mac)))
}
