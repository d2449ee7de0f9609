//! The fields of packets that rules compare.

use nix::libc::c_int;

use super::object::TableFamily;
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;

/// A field of a packet or of its metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketField {
    Iifname,
    Oifname,
    /// `meta oiftype`, an `ARPHRD_*`: known once it is known by which link a packet leaves.
    Oiftype,
    /// `meta oifkind`, the kind of the link, as `veth`.
    Oifkind,
    /// `meta pkttype`, a `PACKET_*`.
    Pkttype,
    L4proto,
    Nfproto,
    Protocol,
    IifType,
    IpSaddr,
    IpDaddr,
    Ip6Saddr,
    Ip6Daddr,
    Dport,
    EtherSaddr,
    /// `ether type`, also of a VLAN tag that is not in the frame's data.
    EtherType,
    CtState,
    CtStatus,
    /// `ct original ip daddr` and `ct original ip6 daddr`: the address to which the client has
    /// connected.
    CtOriginalIpDaddr,
    CtOriginalIp6Daddr,
    CtDirection,
    FibDaddrType,
    /// Type and code of ICMP and ICMPv6.
    IcmpType,
    /// `icmpv6 type`
    Icmpv6Type,
    /// `@th,64,128`, the target address of neighbour discovery: only in chains which nothing else
    /// reaches, as nft would call it `icmpv6 taddr` after a comparison with `icmpv6`.
    Icmpv6Target,
    /// The version and the length of the header of IPv4.
    IpHeader,
    /// `ip6 hoplimit`
    Ip6Hoplimit,
    TcpFlags,
    ArpOperation,
    /// `arp saddr ip`, the sender's address of ARP.
    ArpSender,
    /// `arp daddr ip`, the target address of ARP.
    ArpTarget,
}

impl PacketField {
    /// The expression that loads the field, its attributes after the register, and the field's
    /// length in bytes.
    pub(super) const fn load_parameters(self) -> (&'static str, &'static [c_int], usize) {
        const LINK: c_int = NFT_PAYLOAD_LL_HEADER;
        const NETWORK: c_int = NFT_PAYLOAD_NETWORK_HEADER;
        const TRANSPORT: c_int = NFT_PAYLOAD_TRANSPORT_HEADER;
        match self {
            PacketField::Protocol => ("meta", &[NFT_META_PROTOCOL], 2),
            PacketField::Iifname => ("meta", &[NFT_META_IIFNAME], IFNAMSIZ),
            PacketField::Oifname => ("meta", &[NFT_META_OIFNAME], IFNAMSIZ),
            PacketField::Pkttype => ("meta", &[NFT_META_PKTTYPE], 1),
            PacketField::Oiftype => ("meta", &[NFT_META_OIFTYPE], 2),
            PacketField::Oifkind => ("meta", &[NFT_META_OIFKIND], IFNAMSIZ),
            PacketField::IifType => ("meta", &[NFT_META_IIFTYPE], 2),
            PacketField::Nfproto => ("meta", &[NFT_META_NFPROTO], 1),
            PacketField::L4proto => ("meta", &[NFT_META_L4PROTO], 1),
            PacketField::EtherSaddr => ("payload", &[LINK, 6, 6], 6),
            PacketField::EtherType => ("payload", &[LINK, 12, 2], 2),
            PacketField::IpSaddr => ("payload", &[NETWORK, 12, 4], 4),
            PacketField::IpDaddr => ("payload", &[NETWORK, 16, 4], 4),
            PacketField::Ip6Saddr => ("payload", &[NETWORK, 8, 16], 16),
            PacketField::Ip6Daddr => ("payload", &[NETWORK, 24, 16], 16),
            PacketField::Dport => ("payload", &[TRANSPORT, 2, 2], 2),
            PacketField::CtState => ("ct", &[NFT_CT_STATE], 4),
            PacketField::CtStatus => ("ct", &[NFT_CT_STATUS], 4),
            PacketField::CtOriginalIpDaddr => ("ct", &[NFT_CT_DST_IP], 4),
            PacketField::CtOriginalIp6Daddr => ("ct", &[NFT_CT_DST_IP6], 16),
            PacketField::CtDirection => ("ct", &[NFT_CT_DIRECTION], 1),
            PacketField::IcmpType => ("payload", &[TRANSPORT, 0, 2], 2),
            PacketField::Icmpv6Type => ("payload", &[TRANSPORT, 0, 1], 1),
            PacketField::Icmpv6Target => ("payload", &[TRANSPORT, 8, 16], 16),
            PacketField::IpHeader => ("payload", &[NETWORK, 0, 1], 1),
            PacketField::Ip6Hoplimit => ("payload", &[NETWORK, 7, 1], 1),
            PacketField::TcpFlags => ("payload", &[TRANSPORT, 13, 1], 1),
            PacketField::ArpOperation => ("payload", &[NETWORK, 6, 2], 2),
            PacketField::ArpSender => ("payload", &[NETWORK, 14, 4], 4),
            PacketField::ArpTarget => ("payload", &[NETWORK, 24, 4], 4),
            PacketField::FibDaddrType => ("fib", &[NFT_FIB_RESULT_ADDRTYPE, NFTA_FIB_F_DADDR], 4),
        }
    }

    /// Whether the field is of the client's first packet, before translations.
    pub(super) const fn is_of_original(self) -> bool {
        matches!(self, PacketField::CtOriginalIpDaddr | PacketField::CtOriginalIp6Daddr)
    }

    pub(super) const fn register_count(self) -> usize {
        self.load_parameters().2.div_ceil(4)
    }

    /// The condition under which the field can be read in a table of `family`: another field and
    /// its value.
    pub(super) fn dependency_in(self, family: TableFamily) -> Option<(PacketField, Vec<u8>)> {
        let (nfproto, ethertype): (u8, u16) = match self {
            PacketField::IpSaddr | PacketField::IpDaddr | PacketField::IpHeader => {
                (TableFamily::Ip as u8, 0x0800)
            }
            PacketField::Icmpv6Type => {
                return Some((PacketField::L4proto, vec![IPPROTO_ICMPV6]));
            }
            PacketField::TcpFlags => {
                return Some((PacketField::L4proto, vec![IPPROTO_TCP]));
            }
            PacketField::ArpOperation | PacketField::ArpSender | PacketField::ArpTarget => {
                let field = match family {
                    TableFamily::Bridge => PacketField::EtherType,
                    _ => PacketField::Protocol,
                };
                return Some((field, ETH_P_ARP.to_be_bytes().to_vec()));
            }
            PacketField::Ip6Saddr | PacketField::Ip6Daddr | PacketField::Ip6Hoplimit => {
                (TableFamily::Ip6 as u8, 0x86dd)
            }
            // In the family netdev only for nft: without it nft lists a number of 48 bits, which it
            // does not read.
            PacketField::EtherSaddr if family != TableFamily::Bridge => {
                return Some((PacketField::IifType, ARPHRD_ETHER.to_ne_bytes().to_vec()));
            }
            _ => return None,
        };
        match family {
            TableFamily::Inet => Some((PacketField::Nfproto, vec![nfproto])),
            TableFamily::Bridge | TableFamily::Netdev => {
                Some((PacketField::Protocol, ethertype.to_be_bytes().to_vec()))
            }
            TableFamily::Ip | TableFamily::Ip6 => None,
        }
    }
}
