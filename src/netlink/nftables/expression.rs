//! The expressions of rules that other programs wrote, above all iptables on top of `nf_tables`.

use super::super::attribute::{ReplyAttribute, find_attribute};
use rtnetlink::packet_core::NLM_F_DUMP;
use rtnetlink::sys::protocols::NETLINK_NETFILTER;

use super::super::error::{NetlinkResult, unless_absent};
use super::super::request::{NFGENMSG, NetlinkReply, NetlinkRequest};
use super::super::socket::NetlinkSocket;
use super::NftSocket;
use super::object::{self, NftChain, NftTable, PacketVerdict, rule_request, table_request};
use super::rule::CompatExtension;
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use crate::netlink::IpFamily;

/// The size of the parts in which the kernel lists rules that may be too many, in bytes.
const FIRST_RULES: usize = 16 * 1024;

/// A rule and its expressions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignRule {
    /// The name of the chain.
    pub chain: String,
    /// The kernel's number of the rule.
    pub handle: u64,
    pub expressions: Vec<RuleExpression>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleExpression {
    Load(LoadedField),
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
    Match(CompatExtension),
    /// A target of iptables.
    Target(CompatExtension),
    Counter,
    Verdict(PacketVerdict),
    Other,
}

/// A field that iptables compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadedField {
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

impl NftSocket {
    /// The rules of a chain, or of all chains of the table, in their order, with expressions; none
    /// if there is no such chain; and whether a process committed a change meanwhile, in this or
    /// another table.
    pub fn dump_foreign_rules(
        &self,
        table: NftTable<'_>,
        chain: Option<&str>,
    ) -> NetlinkResult<(Vec<ForeignRule>, bool)> {
        let mut request = table_request(NFT_MSG_GETRULE, table);
        if let Some(chain) = chain {
            request.body.put_text(NFTA_RULE_CHAIN, chain);
        }
        let listed = self.socket.exchange_one(&request, NLM_F_DUMP);
        let listed = listed.map_err(|f| f.into_error("list rules of table", &table));
        let NetlinkReply { bodies, interrupted } = unless_absent(listed, NetlinkReply::default())?;
        Ok((bodies.iter().filter_map(|body| parse_foreign_rule(body)).collect(), interrupted))
    }

    /// Calls a function with the rules of a chain in their order, until it returns true. Returns
    /// whether a process committed a change meanwhile, in this or another table.
    pub fn visit_foreign_rules(
        chain: NftChain<'_>,
        is_last: &mut dyn FnMut(ForeignRule) -> bool,
    ) -> NetlinkResult<bool> {
        // The kernel continues the list with each read from the socket that has requested it.
        let socket = NetlinkSocket::open_for_parts(NETLINK_NETFILTER, FIRST_RULES)?;
        let request = rule_request(NFT_MSG_GETRULE, chain);
        let listed = socket.exchange_until(&[(request, NLM_F_DUMP)], &mut |message| {
            parse_foreign_rule(&message.body).is_some_and(&mut *is_last)
        });
        let listed = listed.and_then(|replies| replies.into_iter().collect::<Result<Vec<_>, _>>());
        let listed = listed.map_err(|f| f.into_error("list rules of chain", &chain));
        Ok(unless_absent(listed, Vec::new())?.iter().any(|reply| reply.interrupted))
    }

    /// The rule with this handle, if the chain has it.
    pub fn find_foreign_rule(
        &self,
        chain: NftChain<'_>,
        handle: u64,
    ) -> NetlinkResult<Option<ForeignRule>> {
        let mut request = rule_request(NFT_MSG_GETRULE, chain);
        request.body.put_bytes(NFTA_RULE_HANDLE, &handle.to_be_bytes());
        let found = self.socket.request_object(&request).map(Some);
        let found = found.map_err(|f| f.into_error("look up a rule of chain", &chain));
        Ok(unless_absent(found, None)?.and_then(|body| parse_foreign_rule(&body)))
    }

    /// The first of these extensions that the kernel lacks, and cannot load.
    pub fn find_missing_extension<'e>(
        &self,
        family: IpFamily,
        wanted: &'e [XtExtension],
    ) -> Option<&'e XtExtension> {
        let kind = NFNL_SUBSYS_NFT_COMPAT << 8 | NFNL_MSG_COMPAT_GET;
        let requests: Vec<_> = wanted
            .iter()
            .map(|extension| {
                let family = object::TableFamily::from(family) as u8;
                let mut request = NetlinkRequest::new_netfilter(kind, family);
                let body = request.body.put_text(NFTA_COMPAT_NAME, extension.name);
                body.put_u32_be(NFTA_COMPAT_REV, extension.revision);
                body.put_u32_be(NFTA_COMPAT_TYPE, u32::from(extension.is_target));
                (request, 0)
            })
            .collect();
        let replies = self.socket.exchange_all(&requests).unwrap_or_default();
        let mut found = replies.into_iter().map(|reply| reply.is_ok());
        wanted.iter().find(|_| !found.next().unwrap_or(false))
    }
}

/// A match or target of iptables.
#[derive(Clone, Copy, Debug)]
pub struct XtExtension {
    pub name: &'static str,
    pub revision: u32,
    pub is_target: bool,
    /// The kernel's module.
    pub module: &'static str,
}

pub(in crate::netlink) fn parse_foreign_rule(body: &[u8]) -> Option<ForeignRule> {
    let body = body.get(NFGENMSG..)?;
    let chain = find_attribute(body, NFTA_RULE_CHAIN)?.to_text();
    let handle =
        find_attribute(body, NFTA_RULE_HANDLE)?.value.try_into().ok().map(u64::from_be_bytes)?;
    let list = find_attribute(body, NFTA_RULE_EXPRESSIONS)
        .into_iter()
        .flat_map(ReplyAttribute::nested_attributes);
    let expressions =
        list.map(|attr| parse_expression(attr).unwrap_or(RuleExpression::Other)).collect();
    Some(ForeignRule { chain, handle, expressions })
}

fn parse_expression(attr: ReplyAttribute<'_>) -> Option<RuleExpression> {
    let name = attr.find_nested(NFTA_EXPR_NAME)?.to_bytes();
    let data = attr.find_nested(NFTA_EXPR_DATA)?;
    let value = |kind| Some(data.find_nested(kind)?.find_nested(NFTA_DATA_VALUE)?.value.to_vec());
    let number = |kind| data.find_nested(kind).and_then(ReplyAttribute::to_u32_be);
    Some(match name {
        b"payload" | b"meta" => RuleExpression::Load(parse_loaded_field(name, &number)?),
        b"bitwise" => {
            let [mask, xor] = [NFTA_BITWISE_MASK, NFTA_BITWISE_XOR].map(value);
            RuleExpression::Bitwise { mask: mask?, xor: xor? }
        }
        b"cmp" => RuleExpression::Compare {
            is_equal: match c_int::try_from(number(NFTA_CMP_OP)?).ok()? {
                NFT_CMP_EQ => true,
                NFT_CMP_NEQ => false,
                _ => return None,
            },
            value: value(NFTA_CMP_DATA)?,
        },
        b"match" | b"target" => {
            let extension = CompatExtension {
                name: data.find_nested(NFTA_EXTENSION_NAME)?.to_text(),
                revision: number(NFTA_EXTENSION_REV)?,
                info: data.find_nested(NFTA_EXTENSION_INFO)?.value.to_vec(),
            };
            if name == b"match" {
                RuleExpression::Match(extension)
            } else {
                RuleExpression::Target(extension)
            }
        }
        b"counter" => RuleExpression::Counter,
        b"immediate" => RuleExpression::Verdict(PacketVerdict::parse_data(
            data.find_nested(NFTA_IMMEDIATE_DATA)?,
        )?),
        _ => return None,
    })
}

/// The field that a `payload` or `meta` expression with these parameters loads.
fn parse_loaded_field(name: &[u8], number: &dyn Fn(u16) -> Option<u32>) -> Option<LoadedField> {
    let parameter = |at: u16| c_int::try_from(number(NFTA_LOAD_DREG + at)?).ok();
    if name == b"meta" {
        return Some(match parameter(1)? {
            NFT_META_IIFNAME => LoadedField::Iifname,
            NFT_META_OIFNAME => LoadedField::Oifname,
            NFT_META_L4PROTO => LoadedField::L4proto,
            NFT_META_MARK => LoadedField::Mark,
            _ => return None,
        });
    }
    let length = usize::try_from(parameter(3)?).ok()?;
    Some(match (parameter(1)?, parameter(2)?, length) {
        (NFT_PAYLOAD_NETWORK_HEADER, 9, 1) => LoadedField::L4proto,
        (NFT_PAYLOAD_NETWORK_HEADER, 12, 1..=4) | (NFT_PAYLOAD_NETWORK_HEADER, 8, 1..=16) => {
            LoadedField::Source { length }
        }
        (NFT_PAYLOAD_NETWORK_HEADER, 16, 1..=4) | (NFT_PAYLOAD_NETWORK_HEADER, 24, 1..=16) => {
            LoadedField::Destination { length }
        }
        (NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2) => LoadedField::Dport,
        _ => return None,
    })
}
