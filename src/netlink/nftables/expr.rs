//! Expressions: the instructions that a rule consists of, as the kernel reads them.

use super::super::attribute::Attributes;
use super::object::Family;
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;

/// What a rule can look at.
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
    FibDaddrType,
}

impl Field {
    /// The expression that loads the field, its attributes behind the register, and the field's length in bytes.
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
            Field::FibDaddrType => ("fib", &[NFT_FIB_RESULT_ADDRTYPE, NFTA_FIB_F_DADDR], 4),
        }
    }

    /// The number of registers that it takes.
    pub(super) const fn registers(self) -> usize {
        self.source().2.div_ceil(4)
    }

    /// What must be known of the packet before this can be read from it, in a table of `family`:
    /// another field and its value.
    pub(super) fn depends(self, family: Family) -> Option<(Field, Vec<u8>)> {
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

/// What is decided about a packet: `NF_*` or `NFT_*`, and the chain that it goes to.
#[must_use]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub(super) code: c_int,
    pub(super) chain: Option<String>,
}

impl Verdict {
    /// It goes on behind this hook's chain.
    pub const ACCEPT: Verdict = Verdict { code: NF_ACCEPT, chain: None };
    /// It is lost.
    pub const DROP: Verdict = Verdict { code: NF_DROP, chain: None };
    /// The next rule.
    pub const CONTINUE: Verdict = Verdict { code: NFT_CONTINUE, chain: None };
    /// Back to the chain that jumped here.
    pub const RETURN: Verdict = Verdict { code: NFT_RETURN, chain: None };

    /// Another chain, and back.
    pub fn jump(chain: impl Into<String>) -> Verdict {
        Verdict { code: NFT_JUMP, chain: Some(chain.into()) }
    }

    /// Another chain, not back.
    pub fn goto(chain: impl Into<String>) -> Verdict {
        Verdict { code: NFT_GOTO, chain: Some(chain.into()) }
    }

    pub(super) fn write(&self, list: &mut Attributes) {
        list.nest(NFTA_DATA_VERDICT, |verdict| {
            verdict.be32(NFTA_VERDICT_CODE, self.code);
            if let Some(chain) = &self.chain {
                verdict.text(NFTA_VERDICT_CHAIN, chain);
            }
        });
    }
}

/// Writes a value as data.
pub(super) fn write_value(list: &mut Attributes, bytes: &[u8]) {
    list.bytes(NFTA_DATA_VALUE, bytes);
}

/// A register of 4 bytes, counted from 0; longer values take the following ones too.
pub(super) type Register = usize;

pub(super) fn register(at: Register) -> Register {
    NFT_REG32_00 + at
}

/// The expression of this name, as an entry of a list; `fill` writes `NFTA_<NAME>_*`.
pub(super) fn expression(name: &str, fill: impl FnOnce(&mut Attributes)) -> Attributes {
    let mut list = Attributes::new();
    list.nest(NFTA_LIST_ELEM, |expr| {
        expr.text(NFTA_EXPR_NAME, name).nest(NFTA_EXPR_DATA, fill);
    });
    list
}

pub(super) fn load(field: Field, to: Register) -> Attributes {
    let (name, parameters, _) = field.source();
    expression(name, |data| {
        data.be32(NFTA_LOAD_DREG, register(to));
        for (kind, parameter) in (NFTA_LOAD_DREG + 1..).zip(parameters) {
            data.be32(kind, *parameter);
        }
    })
}

/// Compares the first register.
pub(super) fn compare(op: c_int, value: &[u8]) -> Attributes {
    expression("cmp", |data| {
        data.be32(NFTA_CMP_SREG, register(0)).be32(NFTA_CMP_OP, op);
        data.nest(NFTA_CMP_DATA, |d| write_value(d, value));
    })
}
