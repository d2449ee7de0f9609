//! The expressions of rules that other programs wrote, above all iptables on top of `nf_tables`.

use super::super::attribute::{Attr, find};
use super::super::error::Result;
use super::super::request::{NFGENMSG, Request};
use super::Nft;
use super::object::{self, Chain, Verdict, rule_request};
use super::rule::Extension;
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use crate::netlink::Family;

/// A rule and its expressions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignRule {
    /// The kernel's number of the rule.
    pub handle: u64,
    pub expressions: Vec<Expression>,
}

/// An expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expression {
    /// Loads a field of the packet.
    Load(Loaded),
    /// Applies a mask to the loaded value.
    Bitwise {
        mask: Vec<u8>,
        xor: Vec<u8>,
    },
    /// Compares the loaded value.
    Compare {
        is_equal: bool,
        value: Vec<u8>,
    },
    /// A match of iptables.
    Match(Extension),
    /// A target of iptables.
    Target(Extension),
    /// Counts packets.
    Counter,
    Verdict(Verdict),
    /// Any other expression.
    Other,
}

/// A field that iptables compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loaded {
    /// The name of the incoming interface.
    Iifname,
    /// The name of the outgoing interface.
    Oifname,
    L4proto,
    Mark,
    /// The first `length` bytes of the source address.
    Source {
        length: usize,
    },
    /// The first `length` bytes of the destination address.
    Destination {
        length: usize,
    },
    Dport,
}

impl Nft {
    /// The rules of a chain in their order, with expressions; none if there is no such chain.
    pub fn dump_foreign(&self, chain: Chain<'_>) -> Result<Vec<ForeignRule>> {
        let request = rule_request(NFT_MSG_GETRULE, chain);
        let bodies = self.list(&request, "list rules of chain", &chain)?;
        Ok(bodies.iter().filter_map(|body| rule(body)).collect())
    }

    /// Whether `nft_compat` finds the match `name` of iptables in this revision.
    pub fn has_match(&self, family: Family, name: &str, revision: u32) -> bool {
        let kind = NFNL_SUBSYS_NFT_COMPAT << 8 | NFNL_MSG_COMPAT_GET;
        let family = object::Family::from(family);
        let mut request = Request::netfilter(kind, family as u8);
        request.body.text(NFTA_COMPAT_NAME, name).be32(NFTA_COMPAT_REV, revision);
        request.body.be32(NFTA_COMPAT_TYPE, 0);
        self.socket.one(&request).is_ok()
    }
}

pub(in crate::netlink) fn rule(body: &[u8]) -> Option<ForeignRule> {
    let body = body.get(NFGENMSG..)?;
    let handle = find(body, NFTA_RULE_HANDLE)?.value.try_into().ok().map(u64::from_be_bytes)?;
    let list = find(body, NFTA_RULE_EXPRESSIONS).into_iter().flat_map(Attr::nested);
    let expressions = list.map(|attr| expression(attr).unwrap_or(Expression::Other)).collect();
    Some(ForeignRule { handle, expressions })
}

fn expression(attr: Attr<'_>) -> Option<Expression> {
    let name = attr.find(NFTA_EXPR_NAME)?.text();
    let data = attr.find(NFTA_EXPR_DATA)?;
    let value = |kind| Some(data.find(kind)?.find(NFTA_DATA_VALUE)?.value.to_vec());
    let number = |kind| data.find(kind).and_then(Attr::be32);
    Some(match name.as_str() {
        "payload" | "meta" => Expression::Load(loaded(&name, &number)?),
        "bitwise" => {
            let [mask, xor] = [NFTA_BITWISE_MASK, NFTA_BITWISE_XOR].map(value);
            Expression::Bitwise { mask: mask?, xor: xor? }
        }
        "cmp" => Expression::Compare {
            is_equal: match c_int::try_from(number(NFTA_CMP_OP)?).ok()? {
                NFT_CMP_EQ => true,
                NFT_CMP_NEQ => false,
                _ => return None,
            },
            value: value(NFTA_CMP_DATA)?,
        },
        "match" | "target" => {
            let extension = Extension {
                name: data.find(NFTA_EXTENSION_NAME)?.text(),
                revision: number(NFTA_EXTENSION_REV)?,
                info: data.find(NFTA_EXTENSION_INFO)?.value.to_vec(),
            };
            let is_match = name == "match";
            if is_match { Expression::Match(extension) } else { Expression::Target(extension) }
        }
        "counter" => Expression::Counter,
        "immediate" => Expression::Verdict(Verdict::read(data.find(NFTA_IMMEDIATE_DATA)?)?),
        _ => return None,
    })
}

/// The field that a `payload` or `meta` expression with these parameters loads.
fn loaded(name: &str, number: &dyn Fn(u16) -> Option<u32>) -> Option<Loaded> {
    let parameter = |at: u16| c_int::try_from(number(NFTA_LOAD_DREG + at)?).ok();
    if name == "meta" {
        return Some(match parameter(1)? {
            NFT_META_IIFNAME => Loaded::Iifname,
            NFT_META_OIFNAME => Loaded::Oifname,
            NFT_META_L4PROTO => Loaded::L4proto,
            NFT_META_MARK => Loaded::Mark,
            _ => return None,
        });
    }
    let length = usize::try_from(parameter(3)?).ok()?;
    Some(match (parameter(1)?, parameter(2)?, length) {
        (NFT_PAYLOAD_NETWORK_HEADER, 9, 1) => Loaded::L4proto,
        (NFT_PAYLOAD_NETWORK_HEADER, 12, 1..=4) | (NFT_PAYLOAD_NETWORK_HEADER, 8, 1..=16) => {
            Loaded::Source { length }
        }
        (NFT_PAYLOAD_NETWORK_HEADER, 16, 1..=4) | (NFT_PAYLOAD_NETWORK_HEADER, 24, 1..=16) => {
            Loaded::Destination { length }
        }
        (NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2) => Loaded::Dport,
        _ => return None,
    })
}
