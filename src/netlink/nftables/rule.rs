//! Rules that read like nft's text: `NftRule::new().saddr_in(pod).daddr_not_in(net).masquerade()`.
//!
//! As nft does, this module adds the dependencies of a condition, such as `meta nfproto ipv4`
//! before an IPv4 address in an inet table.

use std::net::IpAddr;

use ipnet::IpNet;

use super::super::attribute::AttributeBuilder;
use super::field::PacketField;
use super::object::{MapDataType, NftSet, PacketVerdict, TableFamily, write_value};
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::value::{NftValue, TransportProtocol, ValueType};

/// `ct state established`
pub const CT_STATE_ESTABLISHED: u32 = 2;
/// `ct state new`
pub const CT_STATE_NEW: u32 = 8;
/// `ct state established,related`
pub const CT_STATE_ANSWERS: u32 = CT_STATE_ESTABLISHED | 4;

/// `ct status dnat`: the destination of the connection was translated.
pub(super) const CT_STATUS_DNAT: u32 = 0x20;

#[derive(Clone, Debug, PartialEq, Eq)]
enum RuleStep {
    /// The condition that reading the field depends on, see [`PacketField::dependency_in`].
    Requires(PacketField),
    Expression(AttributeBuilder),
}

/// A match or target of iptables, which the kernel calls by `nft_compat`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompatExtension {
    pub name: String,
    pub revision: u32,
    /// The structure of `linux/netfilter/xt_<name>.h`, padded to 8 bytes.
    pub info: Vec<u8>,
}

/// A rule: conditions, then statements.
#[must_use]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NftRule {
    steps: Vec<RuleStep>,
    pub comment: Option<String>,
    /// The protocol that a compatibility rule of iptables declares, because matches such as `tcp`
    /// are refused without it.
    pub(super) compat: Option<TransportProtocol>,
}

/// Conditions.
impl NftRule {
    /// A rule without conditions and statements.
    pub fn new() -> NftRule {
        NftRule::default()
    }

    fn require_field(mut self, field: PacketField) -> NftRule {
        self.steps.push(RuleStep::Requires(field));
        self
    }

    pub(super) fn push_expression(mut self, expression: AttributeBuilder) -> NftRule {
        self.steps.push(RuleStep::Expression(expression));
        self
    }

    pub(super) fn load_field(self, field: PacketField, to: RegisterIndex) -> NftRule {
        self.require_field(field).push_expression(load_expression(field, to))
    }

    /// `field == value`
    pub fn match_equal(self, field: PacketField, value: impl Into<NftValue>) -> NftRule {
        self.load_field(field, 0)
            .push_expression(compare_expression(NFT_CMP_EQ, &value.into().to_bytes()))
    }

    /// `field != value`
    pub fn match_unequal(self, field: PacketField, value: impl Into<NftValue>) -> NftRule {
        self.load_field(field, 0)
            .push_expression(compare_expression(NFT_CMP_NEQ, &value.into().to_bytes()))
    }

    /// Compares a field with these bytes.
    pub(super) fn match_bytes(self, field: PacketField, is_equal: bool, value: &[u8]) -> NftRule {
        let op = if is_equal { NFT_CMP_EQ } else { NFT_CMP_NEQ };
        self.load_field(field, 0).push_expression(compare_expression(op, value))
    }

    /// Sets the first register to `value & mask`.
    pub(super) fn apply_mask(self, mask: &[u8]) -> NftRule {
        self.push_expression(build_expression("bitwise", |data| {
            data.put_u32_be(NFTA_BITWISE_SREG, register_number(0))
                .put_u32_be(NFTA_BITWISE_DREG, register_number(0));
            data.put_u32_be(NFTA_BITWISE_LEN, mask.len());
            data.put_nested(NFTA_BITWISE_MASK, |d| write_value(d, mask));
            data.put_nested(NFTA_BITWISE_XOR, |d| write_value(d, &vec![0; mask.len()]))
        }))
    }

    /// Whether at least one of the bits is set, as in `ct status dnat`.
    pub fn any_bit_set(self, field: PacketField, bits: u32) -> NftRule {
        let (bits, none) = (bits.to_ne_bytes(), [0; 4]);
        self.load_field(field, 0)
            .apply_mask(&bits)
            .push_expression(compare_expression(NFT_CMP_NEQ, &none))
    }

    fn match_prefix(self, [v4, v6]: [PacketField; 2], net: IpNet, op: c_int) -> NftRule {
        let mut rule = self.load_field(if net.addr().is_ipv4() { v4 } else { v6 }, 0);
        if net.prefix_len() != net.max_prefix_len() {
            rule = rule.apply_mask(&NftValue::Ip(net.netmask()).to_bytes());
        }
        rule.push_expression(compare_expression(op, &NftValue::Ip(net.network()).to_bytes()))
    }

    /// `ip saddr` or `ip6 saddr`
    pub fn saddr_is(self, addr: IpAddr) -> NftRule {
        self.saddr_in(addr.into())
    }

    /// `ip daddr` or `ip6 daddr`
    pub fn daddr_is(self, addr: IpAddr) -> NftRule {
        self.daddr_in(addr.into())
    }

    /// `ip saddr net`
    pub fn saddr_in(self, net: IpNet) -> NftRule {
        self.match_prefix(SADDR, net, NFT_CMP_EQ)
    }

    /// `ip saddr != net`
    pub fn saddr_not_in(self, net: IpNet) -> NftRule {
        self.match_prefix(SADDR, net, NFT_CMP_NEQ)
    }

    /// `ip daddr net`
    pub fn daddr_in(self, net: IpNet) -> NftRule {
        self.match_prefix(DADDR, net, NFT_CMP_EQ)
    }

    /// `ip daddr != net`
    pub fn daddr_not_in(self, net: IpNet) -> NftRule {
        self.match_prefix(DADDR, net, NFT_CMP_NEQ)
    }

    /// `tcp dport port`
    pub fn dport_is(self, proto: TransportProtocol, port: u16) -> NftRule {
        self.match_equal(PacketField::L4proto, proto).match_equal(PacketField::Dport, port)
    }

    /// `fib daddr type local`
    pub fn daddr_is_local(self) -> NftRule {
        self.daddr_type_is(RTN_LOCAL)
    }

    /// `fib daddr type type`, an `RTN_*`.
    pub fn daddr_type_is(self, kind: u8) -> NftRule {
        self.fib_type_is(PacketField::FibDaddrType, kind)
    }

    fn fib_type_is(self, field: PacketField, kind: u8) -> NftRule {
        let kind = u32::from(kind).to_ne_bytes();
        self.load_field(field, 0).push_expression(compare_expression(NFT_CMP_EQ, &kind))
    }

    /// `a . b @set`
    pub fn in_set(self, fields: &[PacketField], set: NftSet<'_>) -> NftRule {
        self.look_up_set(fields, set, |data| data)
    }

    /// `a . b != @set`
    pub fn not_in_set(self, fields: &[PacketField], set: NftSet<'_>) -> NftRule {
        self.look_up_set(fields, set, |data| data.put_u32_be(NFTA_LOOKUP_FLAGS, NFT_LOOKUP_F_INV))
    }

    /// Loads the fields into the first registers, as a key of a set.
    pub(super) fn load_key(self, fields: &[PacketField]) -> NftRule {
        let mut at = 0;
        // Dependencies first, because they are compared in a register of the key.
        let rule = fields.iter().fold(self, |rule, field| rule.require_field(*field));
        fields.iter().fold(rule, |rule, field| {
            let to = at;
            at += field.register_count();
            rule.load_field(*field, to)
        })
    }

    fn look_up_set(
        self,
        fields: &[PacketField],
        set: NftSet<'_>,
        more: fn(&mut AttributeBuilder) -> &mut AttributeBuilder,
    ) -> NftRule {
        self.load_key(fields).push_expression(build_expression("lookup", |data| {
            data.put_text(NFTA_LOOKUP_SET, set.name)
                .put_u32_be(NFTA_LOOKUP_SREG, register_number(0));
            more(data)
        }))
    }
}

/// Statements.
impl NftRule {
    /// `accept`, `drop`, `jump chain`
    pub fn with_verdict(self, verdict: &PacketVerdict) -> NftRule {
        self.push_expression(build_expression("immediate", |data| {
            data.put_u32_be(NFTA_IMMEDIATE_DREG, NFT_REG_VERDICT);
            data.put_nested(NFTA_IMMEDIATE_DATA, |d| verdict.write_data(d))
        }))
    }

    /// `accept`
    pub fn accept(self) -> NftRule {
        self.with_verdict(&PacketVerdict::ACCEPT)
    }

    /// `drop`
    pub fn drop(self) -> NftRule {
        self.with_verdict(&PacketVerdict::DROP)
    }

    /// `return`
    pub fn return_to_caller(self) -> NftRule {
        self.with_verdict(&PacketVerdict::RETURN)
    }

    /// `jump chain`
    pub fn jump_to(self, chain: &str) -> NftRule {
        self.with_verdict(&PacketVerdict::jump_to(chain))
    }

    /// `goto chain`
    pub fn go_to(self, chain: &str) -> NftRule {
        self.with_verdict(&PacketVerdict::go_to(chain))
    }

    /// `a . b vmap @map`
    pub fn verdict_by_map(self, fields: &[PacketField], map: NftSet<'_>) -> NftRule {
        self.look_up_set(fields, map, |data| data.put_u32_be(NFTA_LOOKUP_DREG, NFT_REG_VERDICT))
    }

    pub fn count_packets(self) -> NftRule {
        self.push_expression(build_expression("counter", |data| data))
    }

    /// A `match` or `target` of `nft_compat`.
    pub(super) fn push_extension(self, kind: &str, extension: &CompatExtension) -> NftRule {
        self.push_expression(build_expression(kind, |data| {
            data.put_text(NFTA_EXTENSION_NAME, &extension.name);
            data.put_u32_be(NFTA_EXTENSION_REV, extension.revision);
            data.put_bytes(NFTA_EXTENSION_INFO, &extension.info)
        }))
    }

    /// `meta l4proto tcp reject with tcp reset`
    pub fn reset_tcp(self) -> NftRule {
        self.match_equal(PacketField::L4proto, TransportProtocol::Tcp).push_expression(
            build_expression("reject", |data| {
                data.put_u32_be(NFTA_REJECT_TYPE, NFT_REJECT_TCP_RST)
            }),
        )
    }

    /// `reject with icmpx admin-prohibited`
    pub fn reject(self) -> NftRule {
        self.push_expression(build_expression("reject", |data| {
            data.put_u32_be(NFTA_REJECT_TYPE, NFT_REJECT_ICMPX_UNREACH);
            data.put_bytes(NFTA_REJECT_ICMP_CODE, &[NFT_REJECT_ICMPX_ADMIN_PROHIBITED])
        }))
    }

    /// `meta pkttype otherhost meta pkttype set host`: a frame to another MAC address counts as one
    /// to this host, which alone gets an ICMP error.
    pub fn take_for_this_host(self) -> NftRule {
        let rule = self.byte_is(PacketField::Pkttype, PACKET_OTHERHOST);
        rule.load_immediate(&[PACKET_HOST], 0).push_expression(build_expression("meta", |data| {
            data.put_u32_be(NFTA_META_KEY, NFT_META_PKTTYPE)
                .put_u32_be(NFTA_META_SREG, register_number(0))
        }))
    }

    /// `masquerade`
    pub fn masquerade(self) -> NftRule {
        self.push_expression(build_expression("masq", |data| data))
    }

    /// `masquerade fully-random`
    pub fn masquerade_fully_random(self) -> NftRule {
        self.push_expression(build_expression("masq", |data| {
            data.put_u32_be(NFTA_MASQ_FLAGS, NF_NAT_RANGE_PROTO_RANDOM_FULLY)
        }))
    }

    fn load_immediate(self, value: &[u8], to: RegisterIndex) -> NftRule {
        self.push_expression(build_expression("immediate", |data| {
            data.put_u32_be(NFTA_IMMEDIATE_DREG, register_number(to));
            data.put_nested(NFTA_IMMEDIATE_DATA, |d| write_value(d, value))
        }))
    }

    /// Translates to the address in the first registers, and to the port in the next register.
    fn translate_destination(self, is_ipv4: bool) -> NftRule {
        let (family, port) = if is_ipv4 { (TableFamily::Ip, 1) } else { (TableFamily::Ip6, 4) };
        self.push_expression(build_expression("nat", |data| {
            data.put_u32_be(NFTA_NAT_TYPE, NFT_NAT_DNAT).put_u32_be(NFTA_NAT_FAMILY, family as u8);
            data.put_u32_be(NFTA_NAT_REG_ADDR_MIN, register_number(0))
                .put_u32_be(NFTA_NAT_REG_ADDR_MAX, register_number(0));
            data.put_u32_be(NFTA_NAT_REG_PROTO_MIN, register_number(port));
            data.put_u32_be(NFTA_NAT_REG_PROTO_MAX, register_number(port));
            data.put_u32_be(NFTA_NAT_FLAGS, NF_NAT_RANGE_PROTO_SPECIFIED)
        }))
    }

    /// `dnat ip to addr:port`
    pub fn dnat_to(self, addr: IpAddr, port: u16) -> NftRule {
        let bytes = NftValue::Ip(addr).to_bytes();
        let rule =
            self.load_immediate(&bytes, 0).load_immediate(&port.to_be_bytes(), bytes.len() / 4);
        rule.translate_destination(addr.is_ipv4())
    }

    /// `redirect to :port`: to an address of the interface by which the packet arrives.
    pub fn redirect_to_port(self, port: u16) -> NftRule {
        let rule = self.load_immediate(&port.to_be_bytes(), 0);
        rule.push_expression(build_expression("redir", |data| {
            data.put_u32_be(NFTA_REDIR_REG_PROTO_MIN, register_number(0))
                .put_u32_be(NFTA_REDIR_REG_PROTO_MAX, register_number(0));
            data.put_u32_be(NFTA_REDIR_FLAGS, NF_NAT_RANGE_PROTO_SPECIFIED)
        }))
    }

    /// `dnat ip to a . b map @map`: the map has addresses and ports.
    pub fn dnat_by_map(self, fields: &[PacketField], map: NftSet<'_>) -> NftRule {
        let is_ipv4 = matches!(map.data, Some(MapDataType::Values([ValueType::Ipv4Addr, ..])));
        let rule =
            self.require_field(if is_ipv4 { PacketField::IpDaddr } else { PacketField::Ip6Daddr });
        let rule = rule
            .look_up_set(fields, map, |data| data.put_u32_be(NFTA_LOOKUP_DREG, register_number(0)));
        rule.translate_destination(is_ipv4)
    }

    /// `comment "text"`, truncated to the 128 bytes that nft allows.
    pub fn with_comment(mut self, text: impl Into<String>) -> NftRule {
        self.comment = Some(text.into());
        self
    }

    /// Writes the expressions for a table of `family`, with their dependencies.
    pub(super) fn write_expressions<'a>(
        &self,
        family: TableFamily,
        list: &'a mut AttributeBuilder,
    ) -> &'a mut AttributeBuilder {
        let mut known = Vec::new();
        for step in &self.steps {
            match step {
                RuleStep::Expression(expression) => _ = list.put_raw(expression.as_bytes()),
                RuleStep::Requires(field) => {
                    if let Some(needs) = field.dependency_in(family)
                        && !known.contains(&needs)
                    {
                        list.put_raw(load_expression(needs.0, 0).as_bytes());
                        list.put_raw(compare_expression(NFT_CMP_EQ, &needs.1).as_bytes());
                        known.push(needs);
                    }
                }
            }
        }
        list
    }
}

/// Steps of a rule as iptables writes them.
impl NftRule {
    /// `iifname name` or `oifname name`, without the padding that nft writes.
    pub fn match_interface(self, field: PacketField, is_equal: bool, name: &str) -> NftRule {
        self.match_bytes(field, is_equal, &[name.as_bytes(), &[0]].concat())
    }

    /// A match of iptables, for packets of this protocol.
    pub fn with_match(
        mut self,
        extension: &CompatExtension,
        proto: Option<TransportProtocol>,
    ) -> NftRule {
        self.compat = self.compat.or(proto);
        self.push_extension("match", extension)
    }

    /// A target of iptables.
    pub fn with_target(self, extension: &CompatExtension) -> NftRule {
        self.push_extension("target", extension)
    }
}

const SADDR: [PacketField; 2] = [PacketField::IpSaddr, PacketField::Ip6Saddr];
const DADDR: [PacketField; 2] = [PacketField::IpDaddr, PacketField::Ip6Daddr];

/// The number of a register of 4 bytes, from 0; longer values occupy several registers.
pub(super) type RegisterIndex = usize;

/// The kernel lists each fourth register by its older number.
pub(super) fn register_number(at: RegisterIndex) -> RegisterIndex {
    if at.is_multiple_of(4) { NFT_REG_1 + at / 4 } else { NFT_REG32_00 + at }
}

/// The expression of this name, as an entry of a list; `fill` writes `NFTA_<NAME>_*`.
pub(super) fn build_expression(
    name: &str,
    fill: impl FnOnce(&mut AttributeBuilder) -> &mut AttributeBuilder,
) -> AttributeBuilder {
    // The size of most expressions: the rules of whole tables are built for comparing them with the
    // kernel's.
    let mut list = AttributeBuilder::after_header(Vec::with_capacity(96));
    list.put_nested(NFTA_LIST_ELEM, |expr| {
        expr.put_text(NFTA_EXPR_NAME, name).put_nested(NFTA_EXPR_DATA, fill)
    });
    list
}

fn load_expression(field: PacketField, to: RegisterIndex) -> AttributeBuilder {
    let (name, parameters, _) = field.load_parameters();
    build_expression(name, |data| {
        data.put_u32_be(NFTA_LOAD_DREG, register_number(to));
        for (kind, parameter) in (NFTA_LOAD_DREG + 1..).zip(parameters) {
            data.put_u32_be(kind, *parameter);
        }
        if field.is_of_original() {
            data.put_u8(NFTA_CT_DIRECTION, IP_CT_DIR_ORIGINAL);
        }
        data
    })
}

/// Compares the first register.
pub(super) fn compare_expression(op: c_int, value: &[u8]) -> AttributeBuilder {
    build_expression("cmp", |data| {
        data.put_u32_be(NFTA_CMP_SREG, register_number(0)).put_u32_be(NFTA_CMP_OP, op);
        data.put_nested(NFTA_CMP_DATA, |d| write_value(d, value))
    })
}
