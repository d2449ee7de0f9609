//! Rules that read like nft's text: `Rule::new().saddr_in(pod).daddr_not_in(net).masquerade()`.
//!
//! Dependencies that nft adds implicitly, such as `meta nfproto ipv4` before an IPv4 address in an inet
//! table, are added here too.

use std::net::IpAddr;

use ipnet::IpNet;

use super::super::attribute::Attributes;
use super::object::{DataType, Family, Set, Verdict, write_value};
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::value::{L4, Type, Value};

/// `ct state established,related`
pub const CT_STATE_ANSWERS: u32 = 2 | 4;

/// `ct status dnat`: the destination of the connection was translated.
pub const CT_STATUS_DNAT: u32 = 0x20;

/// A step of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// The dependency of the field.
    Requires(Field),
    Expression(Attributes),
}

/// A match or target of iptables, as `nft_compat` calls it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extension {
    pub name: String,
    pub revision: u32,
    /// The structure of `linux/netfilter/xt_<name>.h`, padded to 8 bytes.
    pub info: Vec<u8>,
}

/// A rule: conditions, then what to do.
#[must_use]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    steps: Vec<Step>,
    pub comment: Option<String>,
    /// The protocol of the packets, for matches of iptables that verify it.
    pub(super) compat: Option<L4>,
}

/// Conditions.
impl Rule {
    /// A rule without conditions and statements.
    pub fn new() -> Rule {
        Rule::default()
    }

    fn requires(mut self, field: Field) -> Rule {
        self.steps.push(Step::Requires(field));
        self
    }

    fn then(mut self, expression: Attributes) -> Rule {
        self.steps.push(Step::Expression(expression));
        self
    }

    fn load(self, field: Field, to: Register) -> Rule {
        self.requires(field).then(load(field, to))
    }

    /// `field == value`
    pub fn eq(self, field: Field, value: impl Into<Value>) -> Rule {
        self.load(field, 0).then(compare(NFT_CMP_EQ, &value.into().bytes()))
    }

    /// `field != value`
    pub fn ne(self, field: Field, value: impl Into<Value>) -> Rule {
        self.load(field, 0).then(compare(NFT_CMP_NEQ, &value.into().bytes()))
    }

    /// Compares a field with these bytes.
    pub(super) fn bytes(self, field: Field, is_equal: bool, value: &[u8]) -> Rule {
        let op = if is_equal { NFT_CMP_EQ } else { NFT_CMP_NEQ };
        self.load(field, 0).then(compare(op, value))
    }

    /// The first register becomes `value & mask`.
    fn mask(self, mask: &[u8]) -> Rule {
        self.mask_xor(mask, &vec![0; mask.len()])
    }

    /// The first register becomes `value & mask ^ xor`.
    fn mask_xor(self, mask: &[u8], xor: &[u8]) -> Rule {
        self.then(expression("bitwise", |data| {
            data.be32(NFTA_BITWISE_SREG, register(0)).be32(NFTA_BITWISE_DREG, register(0));
            data.be32(NFTA_BITWISE_LEN, mask.len());
            data.nest(NFTA_BITWISE_MASK, |d| write_value(d, mask));
            data.nest(NFTA_BITWISE_XOR, |d| write_value(d, xor))
        }))
    }

    /// At least one of the bits is set: `ct status dnat`.
    pub fn any_of(self, field: Field, bits: u32) -> Rule {
        let (bits, none) = (bits.to_ne_bytes(), [0; 4]);
        self.load(field, 0).mask(&bits).then(compare(NFT_CMP_NEQ, &none))
    }

    /// None of the bits is set: `ct mark & bits == 0`.
    pub fn none_of(self, field: Field, bits: u32) -> Rule {
        let (bits, none) = (bits.to_ne_bytes(), [0; 4]);
        self.load(field, 0).mask(&bits).then(compare(NFT_CMP_EQ, &none))
    }

    fn prefix(self, [v4, v6]: [Field; 2], net: IpNet, op: c_int) -> Rule {
        let mut rule = self.load(if net.addr().is_ipv4() { v4 } else { v6 }, 0);
        if net.prefix_len() != net.max_prefix_len() {
            rule = rule.mask(&Value::Ip(net.netmask()).bytes());
        }
        rule.then(compare(op, &Value::Ip(net.network()).bytes()))
    }

    /// `ip saddr` or `ip6 saddr`
    pub fn saddr(self, addr: IpAddr) -> Rule {
        self.saddr_in(addr.into())
    }

    /// `ip daddr` or `ip6 daddr`
    pub fn daddr(self, addr: IpAddr) -> Rule {
        self.daddr_in(addr.into())
    }

    /// `ip saddr net`
    pub fn saddr_in(self, net: IpNet) -> Rule {
        self.prefix(SADDR, net, NFT_CMP_EQ)
    }

    /// `ip saddr != net`
    pub fn saddr_not_in(self, net: IpNet) -> Rule {
        self.prefix(SADDR, net, NFT_CMP_NEQ)
    }

    /// `ip daddr net`
    pub fn daddr_in(self, net: IpNet) -> Rule {
        self.prefix(DADDR, net, NFT_CMP_EQ)
    }

    /// `ip daddr != net`
    pub fn daddr_not_in(self, net: IpNet) -> Rule {
        self.prefix(DADDR, net, NFT_CMP_NEQ)
    }

    /// `tcp dport port`
    pub fn dport(self, proto: L4, port: u16) -> Rule {
        self.eq(Field::L4proto, proto).eq(Field::Dport, port)
    }

    /// `fib daddr type local`
    pub fn daddr_is_local(self) -> Rule {
        let local = u32::from(RTN_LOCAL).to_ne_bytes();
        self.load(Field::FibDaddrType, 0).then(compare(NFT_CMP_EQ, &local))
    }

    /// `a . b @set`
    pub fn in_set(self, fields: &[Field], set: Set<'_>) -> Rule {
        self.lookup(fields, set, |data| data)
    }

    /// `a . b != @set`
    pub fn not_in_set(self, fields: &[Field], set: Set<'_>) -> Rule {
        self.lookup(fields, set, |data| data.be32(NFTA_LOOKUP_FLAGS, NFT_LOOKUP_F_INV))
    }

    fn lookup(
        self,
        fields: &[Field],
        set: Set<'_>,
        more: fn(&mut Attributes) -> &mut Attributes,
    ) -> Rule {
        let mut at = 0;
        // Dependencies first, because they are compared in a register of the key.
        let rule = fields.iter().fold(self, |rule, field| rule.requires(*field));
        let rule = fields.iter().fold(rule, |rule, field| {
            let to = at;
            at += field.registers();
            rule.load(*field, to)
        });
        rule.then(expression("lookup", |data| {
            data.text(NFTA_LOOKUP_SET, set.name).be32(NFTA_LOOKUP_SREG, register(0));
            more(data)
        }))
    }
}

/// Statements.
impl Rule {
    /// `accept`, `drop`, `jump chain`
    pub fn verdict(self, verdict: &Verdict) -> Rule {
        self.then(expression("immediate", |data| {
            data.be32(NFTA_IMMEDIATE_DREG, NFT_REG_VERDICT);
            data.nest(NFTA_IMMEDIATE_DATA, |d| verdict.write(d))
        }))
    }

    /// `accept`
    pub fn accept(self) -> Rule {
        self.verdict(&Verdict::ACCEPT)
    }

    /// `drop`
    pub fn drop(self) -> Rule {
        self.verdict(&Verdict::DROP)
    }

    /// `return`
    pub fn ret(self) -> Rule {
        self.verdict(&Verdict::RETURN)
    }

    /// `jump chain`
    pub fn jump(self, chain: &str) -> Rule {
        self.verdict(&Verdict::jump(chain))
    }

    /// `goto chain`
    pub fn goto(self, chain: &str) -> Rule {
        self.verdict(&Verdict::goto(chain))
    }

    /// `a . b vmap @map`
    pub fn vmap(self, fields: &[Field], map: Set<'_>) -> Rule {
        self.lookup(fields, map, |data| data.be32(NFTA_LOOKUP_DREG, NFT_REG_VERDICT))
    }

    /// Counts packets and bytes.
    pub fn counter(self) -> Rule {
        self.then(expression("counter", |data| data))
    }

    /// A `match` or `target` of `nft_compat`.
    pub(super) fn extension(self, kind: &str, extension: &Extension) -> Rule {
        self.then(expression(kind, |data| {
            data.text(NFTA_EXTENSION_NAME, &extension.name);
            data.be32(NFTA_EXTENSION_REV, extension.revision);
            data.bytes(NFTA_EXTENSION_INFO, &extension.info)
        }))
    }

    /// `masquerade`
    pub fn masquerade(self) -> Rule {
        self.then(expression("masq", |data| data))
    }

    /// `ct mark set ct mark | bits`
    pub fn set_ct_mark(self, bits: u32) -> Rule {
        self.change_ct_mark(bits, bits)
    }

    /// `ct mark set ct mark & ~bits`
    pub fn clear_ct_mark(self, bits: u32) -> Rule {
        self.change_ct_mark(bits, 0)
    }

    /// Replaces these bits of the connection's mark.
    fn change_ct_mark(self, bits: u32, value: u32) -> Rule {
        let rule = self.load(Field::CtMark, 0);
        let rule = rule.mask_xor(&(!bits).to_ne_bytes(), &value.to_ne_bytes());
        rule.then(expression("ct", |data| {
            data.be32(NFTA_CT_KEY, NFT_CT_MARK).be32(NFTA_CT_SREG, register(0))
        }))
    }

    fn immediate(self, value: &[u8], to: Register) -> Rule {
        self.then(expression("immediate", |data| {
            data.be32(NFTA_IMMEDIATE_DREG, register(to));
            data.nest(NFTA_IMMEDIATE_DATA, |d| write_value(d, value))
        }))
    }

    /// Translates to the address in the first registers, and to the port in the next register. The family
    /// is the address's, never the table's.
    fn nat(self, is_ipv4: bool) -> Rule {
        let (family, port) = if is_ipv4 { (Family::Ip, 1) } else { (Family::Ip6, 4) };
        self.then(expression("nat", |data| {
            data.be32(NFTA_NAT_TYPE, NFT_NAT_DNAT).be32(NFTA_NAT_FAMILY, family as u8);
            data.be32(NFTA_NAT_REG_ADDR_MIN, register(0)).be32(NFTA_NAT_REG_ADDR_MAX, register(0));
            data.be32(NFTA_NAT_REG_PROTO_MIN, register(port));
            data.be32(NFTA_NAT_REG_PROTO_MAX, register(port));
            data.be32(NFTA_NAT_FLAGS, NF_NAT_RANGE_PROTO_SPECIFIED)
        }))
    }

    /// `dnat ip to addr:port`
    pub fn dnat(self, addr: IpAddr, port: u16) -> Rule {
        let bytes = Value::Ip(addr).bytes();
        let rule = self.immediate(&bytes, 0).immediate(&port.to_be_bytes(), bytes.len() / 4);
        rule.nat(addr.is_ipv4())
    }

    /// `dnat ip to a . b map @map`: the map has addresses and ports.
    pub fn dnat_by(self, fields: &[Field], map: Set<'_>) -> Rule {
        let is_ipv4 = matches!(map.data, Some(DataType::Values([Type::Ipv4Addr, ..])));
        let rule = self.requires(if is_ipv4 { Field::IpDaddr } else { Field::Ip6Daddr });
        let rule = rule.lookup(fields, map, |data| data.be32(NFTA_LOOKUP_DREG, register(0)));
        rule.nat(is_ipv4)
    }

    /// `comment "text"`, truncated to the 128 bytes that nft allows.
    pub fn comment(mut self, text: impl Into<String>) -> Rule {
        self.comment = Some(text.into());
        self
    }

    /// Writes the expressions for a table of `family`, with their dependencies.
    pub(super) fn write<'a>(&self, family: Family, list: &'a mut Attributes) -> &'a mut Attributes {
        let mut known = Vec::new();
        for step in &self.steps {
            match step {
                Step::Expression(expression) => _ = list.raw(expression.as_bytes()),
                Step::Requires(field) => {
                    if let Some(needs) = field.depends(family)
                        && !known.contains(&needs)
                    {
                        list.raw(load(needs.0, 0).as_bytes());
                        list.raw(compare(NFT_CMP_EQ, &needs.1).as_bytes());
                        known.push(needs);
                    }
                }
            }
        }
        list
    }
}

/// Steps of a rule as iptables writes them.
impl Rule {
    /// `iifname name` or `oifname name`, without the padding that nft writes.
    pub fn interface(self, field: Field, is_equal: bool, name: &str) -> Rule {
        self.bytes(field, is_equal, &[name.as_bytes(), &[0]].concat())
    }

    /// A match, for packets of this protocol.
    pub fn matching(mut self, extension: &Extension, proto: Option<L4>) -> Rule {
        self.compat = self.compat.or(proto);
        self.extension("match", extension)
    }

    /// A target.
    pub fn target(self, extension: &Extension) -> Rule {
        self.extension("target", extension)
    }
}

const SADDR: [Field; 2] = [Field::IpSaddr, Field::Ip6Saddr];
const DADDR: [Field; 2] = [Field::IpDaddr, Field::Ip6Daddr];

/// A field of a packet or of its metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    Iifname,
    Oifname,
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
    CtState,
    CtStatus,
    CtMark,
    FibDaddrType,
}

impl Field {
    /// The expression that loads the field, its attributes after the register, and the field's length in bytes.
    const fn source(self) -> (&'static str, &'static [c_int], usize) {
        const LINK: c_int = NFT_PAYLOAD_LL_HEADER;
        const NETWORK: c_int = NFT_PAYLOAD_NETWORK_HEADER;
        const TRANSPORT: c_int = NFT_PAYLOAD_TRANSPORT_HEADER;
        match self {
            Field::Protocol => ("meta", &[NFT_META_PROTOCOL], 2),
            Field::Iifname => ("meta", &[NFT_META_IIFNAME], IFNAMSIZ),
            Field::Oifname => ("meta", &[NFT_META_OIFNAME], IFNAMSIZ),
            Field::IifType => ("meta", &[NFT_META_IIFTYPE], 2),
            Field::Nfproto => ("meta", &[NFT_META_NFPROTO], 1),
            Field::L4proto => ("meta", &[NFT_META_L4PROTO], 1),
            Field::EtherSaddr => ("payload", &[LINK, 6, 6], 6),
            Field::IpSaddr => ("payload", &[NETWORK, 12, 4], 4),
            Field::IpDaddr => ("payload", &[NETWORK, 16, 4], 4),
            Field::Ip6Saddr => ("payload", &[NETWORK, 8, 16], 16),
            Field::Ip6Daddr => ("payload", &[NETWORK, 24, 16], 16),
            Field::Dport => ("payload", &[TRANSPORT, 2, 2], 2),
            Field::CtState => ("ct", &[NFT_CT_STATE], 4),
            Field::CtStatus => ("ct", &[NFT_CT_STATUS], 4),
            Field::CtMark => ("ct", &[NFT_CT_MARK], 4),
            Field::FibDaddrType => ("fib", &[NFT_FIB_RESULT_ADDRTYPE, NFTA_FIB_F_DADDR], 4),
        }
    }

    /// The number of registers for the field.
    const fn registers(self) -> usize {
        self.source().2.div_ceil(4)
    }

    /// The condition for reading the field in a table of `family`: another field and its value.
    fn depends(self, family: Family) -> Option<(Field, Vec<u8>)> {
        let (nfproto, ethertype): (u8, u16) = match self {
            Field::IpSaddr | Field::IpDaddr => (Family::Ip as u8, 0x0800),
            Field::Ip6Saddr | Field::Ip6Daddr => (Family::Ip6 as u8, 0x86dd),
            Field::EtherSaddr if family != Family::Bridge => {
                return Some((Field::IifType, ARPHRD_ETHER.to_ne_bytes().to_vec()));
            }
            _ => return None,
        };
        match family {
            Family::Inet => Some((Field::Nfproto, vec![nfproto])),
            Family::Bridge => Some((Field::Protocol, ethertype.to_be_bytes().to_vec())),
            Family::Ip | Family::Ip6 => None,
        }
    }
}

/// The number of a register of 4 bytes, from 0; longer values occupy several registers.
type Register = usize;

fn register(at: Register) -> Register {
    NFT_REG32_00 + at
}

/// The expression of this name, as an entry of a list; `fill` writes `NFTA_<NAME>_*`.
fn expression(name: &str, fill: impl FnOnce(&mut Attributes) -> &mut Attributes) -> Attributes {
    let mut list = Attributes::new();
    list.nest(NFTA_LIST_ELEM, |expr| expr.text(NFTA_EXPR_NAME, name).nest(NFTA_EXPR_DATA, fill));
    list
}

fn load(field: Field, to: Register) -> Attributes {
    let (name, parameters, _) = field.source();
    expression(name, |data| {
        data.be32(NFTA_LOAD_DREG, register(to));
        let parameters = (NFTA_LOAD_DREG + 1..).zip(parameters);
        parameters.fold(data, |data, (kind, parameter)| data.be32(kind, *parameter))
    })
}

/// Compares the first register.
fn compare(op: c_int, value: &[u8]) -> Attributes {
    expression("cmp", |data| {
        data.be32(NFTA_CMP_SREG, register(0)).be32(NFTA_CMP_OP, op);
        data.nest(NFTA_CMP_DATA, |d| write_value(d, value))
    })
}
