//! Expressions: the instructions that a rule consists of, as the kernel reads them.

use super::super::attribute::Attributes;
use super::object::Family;
use super::value::Type;

const LIST_ELEM: u16 = 1;
const EXPR_NAME: u16 = 1;
const EXPR_DATA: u16 = 2;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const VERDICT_CHAIN: u16 = 2;

/// The first of the 16 registers of 4 bytes.
const REG32_00: u32 = 8;

/// The register whose change ends a rule.
const REG_VERDICT: u32 = 0;

/// What a rule can look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named as in nft: meta, payload, ct and fib expressions")]
pub enum Field {
    Iifname,
    Oifname,
    L4proto,
    Nfproto,
    Protocol,
    Mark,
    IifType,
    IpSaddr,
    IpDaddr,
    Ip6Saddr,
    Ip6Daddr,
    Dport,
    EtherSaddr,
    CtState,
    CtStatus,
    FibDaddrType,
}

enum Source {
    Meta(u32),
    /// Base, offset.
    Payload(u32, u32),
    Ct(u32),
    /// Result, flags.
    Fib(u32, u32),
}

const LINK: u32 = 0;
const NETWORK: u32 = 1;
const TRANSPORT: u32 = 2;

impl Field {
    fn source(self) -> Source {
        match self {
            Field::Protocol => Source::Meta(1),
            Field::Mark => Source::Meta(3),
            Field::Iifname => Source::Meta(6),
            Field::Oifname => Source::Meta(7),
            Field::IifType => Source::Meta(8),
            Field::Nfproto => Source::Meta(15),
            Field::L4proto => Source::Meta(16),
            Field::EtherSaddr => Source::Payload(LINK, 6),
            Field::IpSaddr => Source::Payload(NETWORK, 12),
            Field::IpDaddr => Source::Payload(NETWORK, 16),
            Field::Ip6Saddr => Source::Payload(NETWORK, 8),
            Field::Ip6Daddr => Source::Payload(NETWORK, 24),
            Field::Dport => Source::Payload(TRANSPORT, 2),
            Field::CtState => Source::Ct(0),
            Field::CtStatus => Source::Ct(2),
            Field::FibDaddrType => Source::Fib(3, 2),
        }
    }

    pub(super) fn len(self) -> usize {
        match self {
            Field::Nfproto | Field::L4proto => 1,
            Field::Protocol | Field::IifType | Field::Dport => 2,
            Field::EtherSaddr => 6,
            Field::Iifname | Field::Oifname => Type::IfName.len(),
            Field::Ip6Saddr | Field::Ip6Daddr => 16,
            _ => 4,
        }
    }

    /// What must be known of the packet before this can be read from it, in a table of `family`:
    /// another field and its value.
    pub(super) fn depends(self, family: Family) -> Option<(Field, Vec<u8>)> {
        let (nfproto, ethertype): (u8, u16) = match self {
            Field::IpSaddr | Field::IpDaddr => (2, 0x0800),
            Field::Ip6Saddr | Field::Ip6Daddr => (10, 0x86dd),
            Field::EtherSaddr if family != Family::Bridge => {
                return Some((Field::IifType, 1_u16.to_ne_bytes().to_vec()));
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

/// How a value is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compare {
    Equal = 0,
    NotEqual = 1,
}

/// What is decided about a packet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// It goes on behind this hook's chain.
    Accept,
    /// It is lost.
    Drop,
    /// The next rule.
    Continue,
    /// Back to the chain that jumped here.
    Return,
    /// Another chain, and back.
    Jump(String),
    /// Another chain, not back.
    Goto(String),
}

impl Verdict {
    fn code(&self) -> i32 {
        match self {
            Verdict::Drop => 0,
            Verdict::Accept => 1,
            Verdict::Continue => -1,
            Verdict::Jump(_) => -3,
            Verdict::Goto(_) => -4,
            Verdict::Return => -5,
        }
    }

    pub(super) fn write(&self, list: &mut Attributes) {
        list.nest(DATA_VERDICT, |verdict| {
            verdict.bytes(VERDICT_CODE, &self.code().to_be_bytes());
            if let Verdict::Jump(chain) | Verdict::Goto(chain) = self {
                verdict.text(VERDICT_CHAIN, chain);
            }
        });
    }

    pub(super) fn read(code: i32, chain: String) -> Option<Verdict> {
        Some(match code {
            0 => Verdict::Drop,
            1 => Verdict::Accept,
            -1 => Verdict::Continue,
            -3 => Verdict::Jump(chain),
            -4 => Verdict::Goto(chain),
            -5 => Verdict::Return,
            _ => return None,
        })
    }
}

/// Writes a value as data.
pub(super) fn write_value(list: &mut Attributes, bytes: &[u8]) {
    list.bytes(DATA_VALUE, bytes);
}

/// A port was given: a bit of `NF_NAT_RANGE_*`.
const NAT_PORT: u32 = 0x2;

/// The destination is translated.
const NAT_DNAT: u32 = 1;

/// What a lookup is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Match,
    NoMatch,
    Verdict,
    Data,
}

/// A register of 4 bytes, counted from 0; longer values take the following ones too.
pub(super) type Reg = usize;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Expr {
    Load(Field, Reg),
    /// Nothing but what the field depends on.
    Require(Field),
    Compare(Compare, Vec<u8>),
    /// `(value & mask) ^ xor`
    Bitwise(Vec<u8>, Vec<u8>),
    Lookup(String, Found),
    Immediate(Vec<u8>, Reg),
    Verdict(Verdict),
    /// Family of the address, its register, that of the port.
    Dnat(Family, Reg, Option<Reg>),
    Masquerade,
    Counter,
}

fn reg(at: Reg) -> u32 {
    REG32_00 + u32::try_from(at).unwrap_or(u32::MAX - REG32_00)
}

impl Expr {
    /// Appends this to a list of expressions.
    pub(super) fn write(&self, list: &mut Attributes) {
        list.nest(LIST_ELEM, |expr| {
            expr.text(EXPR_NAME, self.name());
            expr.nest(EXPR_DATA, |data| self.data(data));
        });
    }

    fn name(&self) -> &'static str {
        match self {
            Expr::Load(field, _) => match field.source() {
                Source::Meta(_) => "meta",
                Source::Payload(..) => "payload",
                Source::Ct(_) => "ct",
                Source::Fib(..) => "fib",
            },
            Expr::Require(_) => "",
            Expr::Compare(..) => "cmp",
            Expr::Bitwise(..) => "bitwise",
            Expr::Lookup(..) => "lookup",
            Expr::Immediate(..) | Expr::Verdict(_) => "immediate",
            Expr::Dnat(..) => "nat",
            Expr::Masquerade => "masq",
            Expr::Counter => "counter",
        }
    }

    /// The attributes `NFTA_<NAME>_*`.
    fn data(&self, list: &mut Attributes) {
        match self {
            Expr::Load(field, to) => load(*field, reg(*to), list),
            Expr::Compare(op, value) => {
                list.be32(1, reg(0)).be32(2, *op as u32).nest(3, |d| write_value(d, value));
            }
            Expr::Bitwise(mask, xor) => {
                let length = u32::try_from(mask.len()).unwrap_or(u32::MAX);
                list.be32(1, reg(0)).be32(2, reg(0)).be32(3, length);
                list.nest(4, |d| write_value(d, mask)).nest(5, |d| write_value(d, xor));
            }
            Expr::Lookup(set, found) => lookup(set, *found, list),
            Expr::Immediate(value, to) => {
                list.be32(1, reg(*to)).nest(2, |d| write_value(d, value));
            }
            Expr::Verdict(verdict) => {
                list.be32(1, REG_VERDICT).nest(2, |d| verdict.write(d));
            }
            Expr::Dnat(family, addr, port) => {
                list.be32(1, NAT_DNAT).be32(2, nat_family(*family));
                list.be32(3, reg(*addr)).be32(4, reg(*addr));
                // Kernels refuse flags without one in them.
                port.map(|at| list.be32(5, reg(at)).be32(6, reg(at)).be32(7, NAT_PORT));
            }
            Expr::Counter => {
                list.be64(1, 0).be64(2, 0);
            }
            Expr::Require(_) | Expr::Masquerade => {}
        }
    }
}

fn load(field: Field, to: u32, list: &mut Attributes) {
    match field.source() {
        Source::Meta(key) | Source::Ct(key) => list.be32(1, to).be32(2, key),
        Source::Payload(base, offset) => {
            let length = u32::try_from(field.len()).unwrap_or_default();
            list.be32(1, to).be32(2, base).be32(3, offset).be32(4, length)
        }
        Source::Fib(result, flags) => list.be32(1, to).be32(2, result).be32(3, flags),
    };
}

fn lookup(set: &str, found: Found, list: &mut Attributes) {
    list.text(1, set).be32(2, reg(0));
    match found {
        Found::Match => list,
        Found::NoMatch => list.be32(5, 1),
        Found::Verdict => list.be32(3, REG_VERDICT),
        Found::Data => list.be32(3, reg(0)),
    };
}

/// The family of the addresses, never that of the table.
fn nat_family(family: Family) -> u32 {
    u32::from(family.number())
}
