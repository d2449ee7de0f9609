//! Rules that read like nft's text: `Rule::new().saddr(pod).daddr_not_in(net).masquerade()`.
//!
//! What nft adds on its own, such as `meta nfproto ipv4` before an IPv4 address in an inet table,
//! is added here too.

use std::net::IpAddr;

use ipnet::IpNet;

use super::super::attribute::Attributes;
use super::expr::{Field, Register, Verdict, compare, expression, load, register, write_value};
use super::object::{DataType, Family, Set};
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::value::{L4, Type, Value};

/// `ct state established,related`
pub const CT_STATE_ANSWERS: u32 = 2 | 4;

/// `ct status dnat`: the destination of the connection was translated.
pub const CT_STATUS_DNAT: u32 = 0x20;

/// A part of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// What the field depends on.
    Requires(Field),
    Expression(Attributes),
}

/// A rule: conditions, then what to do.
#[must_use]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    steps: Vec<Step>,
    /// The comment that nft shows.
    pub comment: Option<String>,
}

/// Conditions.
impl Rule {
    /// The rule that does nothing to everything.
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

    /// The first register becomes `value & mask`.
    fn mask(self, mask: &[u8]) -> Rule {
        self.then(expression("bitwise", |data| {
            data.be32(NFTA_BITWISE_SREG, register(0)).be32(NFTA_BITWISE_DREG, register(0));
            data.be32(NFTA_BITWISE_LEN, mask.len());
            data.nest(NFTA_BITWISE_MASK, |d| write_value(d, mask));
            data.nest(NFTA_BITWISE_XOR, |d| write_value(d, &vec![0; mask.len()]));
        }))
    }

    /// Any of the bits is set: `ct status dnat`.
    pub fn any_of(self, field: Field, bits: u32) -> Rule {
        let (bits, none) = (bits.to_ne_bytes(), [0; 4]);
        self.load(field, 0).mask(&bits).then(compare(NFT_CMP_NEQ, &none))
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
        // What they depend on is compared in a register that they use.
        let rule = fields.iter().fold(self, |rule, field| rule.requires(*field));
        let rule = fields.iter().fold(rule, |rule, field| {
            let to = at;
            at += field.registers();
            rule.load(*field, to)
        });
        rule.then(expression("lookup", |data| {
            data.text(NFTA_LOOKUP_SET, set.name).be32(NFTA_LOOKUP_SREG, register(0));
            more(data);
        }))
    }
}

/// Statements.
impl Rule {
    /// `accept`, `drop`, `jump chain`
    pub fn verdict(self, verdict: &Verdict) -> Rule {
        self.then(expression("immediate", |data| {
            data.be32(NFTA_IMMEDIATE_DREG, NFT_REG_VERDICT);
            data.nest(NFTA_IMMEDIATE_DATA, |d| verdict.write(d));
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

    /// `masquerade`
    pub fn masquerade(self) -> Rule {
        self.then(expression("masq", |_| {}))
    }

    fn immediate(self, value: &[u8], to: Register) -> Rule {
        self.then(expression("immediate", |data| {
            data.be32(NFTA_IMMEDIATE_DREG, register(to));
            data.nest(NFTA_IMMEDIATE_DATA, |d| write_value(d, value));
        }))
    }

    /// To the address in the first registers, and to the port behind it. The family is that of the
    /// address, never the family of the table.
    fn nat(self, is_ipv4: bool) -> Rule {
        let (family, port) = if is_ipv4 { (Family::Ip, 1) } else { (Family::Ip6, 4) };
        self.then(expression("nat", |data| {
            data.be32(NFTA_NAT_TYPE, NFT_NAT_DNAT).be32(NFTA_NAT_FAMILY, family as u8);
            data.be32(NFTA_NAT_REG_ADDR_MIN, register(0)).be32(NFTA_NAT_REG_ADDR_MAX, register(0));
            data.be32(NFTA_NAT_REG_PROTO_MIN, register(port));
            data.be32(NFTA_NAT_REG_PROTO_MAX, register(port));
            data.be32(NFTA_NAT_FLAGS, NF_NAT_RANGE_PROTO_SPECIFIED);
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

    /// `comment "text"`; nft allows 128 bytes, what is longer is cut.
    pub fn comment(mut self, text: impl Into<String>) -> Rule {
        self.comment = Some(text.into());
        self
    }

    /// The expressions for a table of `family`, with what they depend on.
    pub(super) fn write(&self, family: Family, list: &mut Attributes) {
        let mut known: Vec<(Field, Vec<u8>)> = Vec::new();
        for step in &self.steps {
            match step {
                Step::Expression(expression) => list.raw(expression.as_bytes()),
                Step::Requires(field) => {
                    let needs = field.depends(family).filter(|needs| !known.contains(needs));
                    if let Some((on, value)) = needs {
                        list.raw(load(on, 0).as_bytes());
                        list.raw(compare(NFT_CMP_EQ, &value).as_bytes());
                        known.push((on, value));
                    }
                }
            }
        }
    }
}

const SADDR: [Field; 2] = [Field::IpSaddr, Field::Ip6Saddr];
const DADDR: [Field; 2] = [Field::IpDaddr, Field::Ip6Daddr];
