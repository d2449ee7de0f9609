//! Rules that read like nft's text:
//!
//! ```
//! # use cnibox::netlink::nftables::Rule;
//! # let pod = "10.1.0.5".parse().unwrap();
//! # let net = "10.1.0.0/16".parse().unwrap();
//! Rule::new().saddr(pod).daddr_not_in(net).masquerade().comment("net: pods");
//! ```
//!
//! What nft adds on its own, such as `meta nfproto ipv4` before an IPv4 address in an inet table,
//! is added here too.

use std::net::IpAddr;

use ipnet::IpNet;

use super::super::Mac;
use super::super::attribute::Attributes;
use super::expr::{Compare, Expr, Field, Found, Verdict};
use super::object::{DataType, Family, Set};
use super::userdata;
use super::value::{L4, Value, length};

/// A state of connection tracking, as a bit of `ct state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CtState {
    /// `established`
    Established = 2,
    /// `related`
    Related = 4,
    /// `new`
    New = 8,
}

/// `ct status dnat`: the destination of the connection was translated.
pub const CT_STATUS_DNAT: u32 = 0x20;

/// `fib daddr type local`
const RTN_LOCAL: u32 = 2;

/// A rule: conditions, then what to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    exprs: Vec<Expr>,
    pub(super) comment: Option<String>,
}

/// Conditions.
impl Rule {
    /// The rule that does nothing to everything.
    #[must_use]
    pub fn new() -> Rule {
        Rule::default()
    }

    fn with(mut self, exprs: impl IntoIterator<Item = Expr>) -> Rule {
        self.exprs.extend(exprs);
        self
    }

    /// `field == value`
    #[must_use]
    pub fn eq(self, field: Field, value: impl Into<Value>) -> Rule {
        self.compare(field, Compare::Equal, value.into().bytes())
    }

    /// `field != value`
    #[must_use]
    pub fn ne(self, field: Field, value: impl Into<Value>) -> Rule {
        self.compare(field, Compare::NotEqual, value.into().bytes())
    }

    fn compare(self, field: Field, op: Compare, value: Vec<u8>) -> Rule {
        self.with([Expr::Load(field, 0), Expr::Compare(op, value)])
    }

    /// `field & mask == value`, for marks and other numbers in host byte order.
    #[must_use]
    pub fn masked(self, field: Field, mask: u32, value: u32) -> Rule {
        self.bits(field, mask).with([Expr::Compare(Compare::Equal, host(value))])
    }

    /// Any of the bits is set: `ct status dnat`.
    #[must_use]
    pub fn any_of(self, field: Field, bits: u32) -> Rule {
        self.bits(field, bits).with([Expr::Compare(Compare::NotEqual, host(0))])
    }

    fn bits(self, field: Field, mask: u32) -> Rule {
        self.with([Expr::Load(field, 0), Expr::Bitwise(host(mask), host(0))])
    }

    fn prefix(self, field: Field, op: Compare, net: IpNet) -> Rule {
        let network = Value::Ip(net.network()).bytes();
        let rule = self.with([Expr::Load(field, 0)]);
        let rule = if net.prefix_len() == net.max_prefix_len() {
            rule
        } else {
            let mask = Value::Ip(net.netmask()).bytes();
            let xor = vec![0; mask.len()];
            rule.with([Expr::Bitwise(mask, xor)])
        };
        rule.with([Expr::Compare(op, network)])
    }

    /// `ip saddr` or `ip6 saddr`
    #[must_use]
    pub fn saddr(self, addr: IpAddr) -> Rule {
        self.eq(saddr(addr), addr)
    }

    /// `ip daddr` or `ip6 daddr`
    #[must_use]
    pub fn daddr(self, addr: IpAddr) -> Rule {
        self.eq(daddr(addr), addr)
    }

    /// `ip saddr net`
    #[must_use]
    pub fn saddr_in(self, net: IpNet) -> Rule {
        self.prefix(saddr(net.addr()), Compare::Equal, net)
    }

    /// `ip saddr != net`
    #[must_use]
    pub fn saddr_not_in(self, net: IpNet) -> Rule {
        self.prefix(saddr(net.addr()), Compare::NotEqual, net)
    }

    /// `ip daddr net`
    #[must_use]
    pub fn daddr_in(self, net: IpNet) -> Rule {
        self.prefix(daddr(net.addr()), Compare::Equal, net)
    }

    /// `ip daddr != net`
    #[must_use]
    pub fn daddr_not_in(self, net: IpNet) -> Rule {
        self.prefix(daddr(net.addr()), Compare::NotEqual, net)
    }

    /// `iifname "name"`
    #[must_use]
    pub fn iifname(self, name: &str) -> Rule {
        self.eq(Field::Iifname, name)
    }

    /// `ether saddr mac`
    #[must_use]
    pub fn ether_saddr(self, mac: Mac) -> Rule {
        self.eq(Field::EtherSaddr, mac)
    }

    /// `meta l4proto proto`
    #[must_use]
    pub fn l4proto(self, proto: L4) -> Rule {
        self.eq(Field::L4proto, proto)
    }

    /// `tcp dport port`
    #[must_use]
    pub fn dport(self, proto: L4, port: u16) -> Rule {
        self.l4proto(proto).eq(Field::Dport, port)
    }

    /// `ct state a,b`
    #[must_use]
    pub fn ct_state(self, states: &[CtState]) -> Rule {
        let bits = states.iter().fold(0, |bits, state| bits | *state as u32);
        self.any_of(Field::CtState, bits)
    }

    /// `fib daddr type local`
    #[must_use]
    pub fn daddr_is_local(self) -> Rule {
        self.compare(Field::FibDaddrType, Compare::Equal, host(RTN_LOCAL))
    }

    /// `a . b @set`
    #[must_use]
    pub fn in_set(self, fields: &[Field], set: Set<'_>) -> Rule {
        self.lookup(fields, set, Found::Match)
    }

    /// `a . b != @set`
    #[must_use]
    pub fn not_in_set(self, fields: &[Field], set: Set<'_>) -> Rule {
        self.lookup(fields, set, Found::NoMatch)
    }

    fn lookup(self, fields: &[Field], set: Set<'_>, found: Found) -> Rule {
        let mut at = 0;
        let loads = fields.iter().map(|field| {
            let load = Expr::Load(*field, at);
            at += field.len().div_ceil(4);
            load
        });
        let loads: Vec<Expr> = loads.collect();
        // What they depend on is compared in a register that they use.
        let first = fields.iter().map(|field| Expr::Require(*field));
        self.with(first).with(loads).with([Expr::Lookup(set.name.to_owned(), found)])
    }
}

/// Statements.
impl Rule {
    /// `counter`
    #[must_use]
    pub fn counter(self) -> Rule {
        self.with([Expr::Counter])
    }

    /// `accept`, `drop`, `jump chain`
    #[must_use]
    pub fn verdict(self, verdict: Verdict) -> Rule {
        self.with([Expr::Verdict(verdict)])
    }

    /// `accept`
    #[must_use]
    pub fn accept(self) -> Rule {
        self.verdict(Verdict::Accept)
    }

    /// `drop`
    #[must_use]
    pub fn drop(self) -> Rule {
        self.verdict(Verdict::Drop)
    }

    /// `return`
    #[must_use]
    pub fn ret(self) -> Rule {
        self.verdict(Verdict::Return)
    }

    /// `jump chain`
    #[must_use]
    pub fn jump(self, chain: &str) -> Rule {
        self.verdict(Verdict::Jump(chain.to_owned()))
    }

    /// `goto chain`
    #[must_use]
    pub fn goto(self, chain: &str) -> Rule {
        self.verdict(Verdict::Goto(chain.to_owned()))
    }

    /// `a . b vmap @map`
    #[must_use]
    pub fn vmap(self, fields: &[Field], map: Set<'_>) -> Rule {
        self.lookup(fields, map, Found::Verdict)
    }

    /// `masquerade`
    #[must_use]
    pub fn masquerade(self) -> Rule {
        self.with([Expr::Masquerade])
    }

    /// `dnat ip to addr`, `dnat ip to addr:port`
    #[must_use]
    pub fn dnat(self, addr: IpAddr, port: Option<u16>) -> Rule {
        let bytes = Value::Ip(addr).bytes();
        let family = if addr.is_ipv4() { Family::Ip } else { Family::Ip6 };
        let behind = bytes.len() / 4;
        let rule = self.with([Expr::Immediate(bytes, 0)]);
        let port = port.map(|port| Expr::Immediate(port.to_be_bytes().to_vec(), behind));
        let to = port.is_some().then_some(behind);
        rule.with(port).with([Expr::Dnat(family, 0, to)])
    }

    /// `dnat ip to a . b map @map`: the map has addresses, or addresses and ports.
    #[must_use]
    pub fn dnat_by(self, fields: &[Field], map: Set<'_>) -> Rule {
        let types = match map.data {
            Some(DataType::Values(types)) => types,
            _ => &[],
        };
        let addr = length(types.get(..1).unwrap_or_default());
        let family = if addr == 16 { Family::Ip6 } else { Family::Ip };
        let port = (types.len() > 1).then_some(addr / 4);
        let nat = Expr::Dnat(family, 0, port);
        let proto = if family == Family::Ip6 { Field::Ip6Daddr } else { Field::IpDaddr };
        self.with([Expr::Require(proto)]).lookup(fields, map, Found::Data).with([nat])
    }

    /// `comment "text"`; nft allows 128 bytes, what is longer is cut.
    #[must_use]
    pub fn comment(mut self, text: impl Into<String>) -> Rule {
        self.comment = Some(text.into());
        self
    }

    /// The comment.
    pub fn comment_text(&self) -> Option<&str> {
        self.comment.as_deref()
    }

    /// The expressions for a table of `family`, with what they depend on.
    pub(super) fn write(&self, family: Family, list: &mut Attributes) {
        let mut known: Vec<(Field, Vec<u8>)> = Vec::new();
        for (at, expr) in self.exprs.iter().enumerate() {
            if let (Expr::Load(field, _), Some(Expr::Compare(Compare::Equal, value))) =
                (expr, self.exprs.get(at + 1))
            {
                known.push((*field, value.clone()));
            }
            if let Expr::Load(field, _) | Expr::Require(field) = expr {
                let needs = field.depends(family).filter(|needs| !known.contains(needs));
                if let Some((on, value)) = needs {
                    Expr::Load(on, 0).write(list);
                    Expr::Compare(Compare::Equal, value.clone()).write(list);
                    known.push((on, value));
                }
            }
            if !matches!(expr, Expr::Require(_)) {
                expr.write(list);
            }
        }
    }

    pub(super) fn userdata(&self) -> Option<Vec<u8>> {
        self.comment.as_deref().map(userdata::comment)
    }
}

fn host(number: u32) -> Vec<u8> {
    number.to_ne_bytes().to_vec()
}

fn saddr(addr: IpAddr) -> Field {
    if addr.is_ipv4() { Field::IpSaddr } else { Field::Ip6Saddr }
}

fn daddr(addr: IpAddr) -> Field {
    if addr.is_ipv4() { Field::IpDaddr } else { Field::Ip6Daddr }
}
