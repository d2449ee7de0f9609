//! Neighbour discovery (RFC 4861): whom a container asks for, and that it advertises no address of
//! another.

use ipnet::IpNet;

use super::UNSPECIFIED6;
use crate::netlink::nftables::{NftRule, NftSet, PacketField};

pub(super) const ETH_P_IPV6: u16 = 0x86dd;

/// Messages of neighbour discovery of these types.
pub(super) fn discovery(first: u8, last: u8) -> NftRule {
    NftRule::new().byte_is(PacketField::Ip6Hoplimit, 255).byte_in_range(
        PacketField::Icmpv6Type,
        first,
        last,
    )
}

/// The chain that compares the target of neighbour discovery. nft names the target in a rule that
/// also compares the type of the message, and then reads its own listing no more: as `icmpv6 taddr`
/// it is no number, of which the key of the set is.
pub(super) const TARGET_CHAIN: &str = "targets";

pub(super) fn advertises() -> NftRule {
    NftRule::new().ethertype_is(ETH_P_IPV6).byte_is(PacketField::Icmpv6Type, 136)
}

/// Detection of duplicates.
pub(super) fn probes() -> NftRule {
    let rule = NftRule::new().ethertype_is(ETH_P_IPV6).byte_is(PacketField::Icmpv6Type, 135);
    rule.saddr_in(IpNet::V6(UNSPECIFIED6))
}

/// An advertised address of another, or a probe that would keep its owner from having it.
pub(super) fn foreign_target(targets: NftSet<'_>) -> NftRule {
    NftRule::new().not_in_set(&[PacketField::EtherSaddr, PacketField::Icmpv6Target], targets)
}
