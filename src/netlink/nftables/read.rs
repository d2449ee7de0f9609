//! Reads chains, rules and elements.

use std::collections::HashSet;
use std::fmt::Display;

use nix::errno::Errno;
use rtnetlink::packet_core::NLM_F_DUMP;

use super::super::attribute::{self, AttributeBuilder, ReplyAttribute};
use super::super::error::{NetlinkResult, RequestFailure, unless_absent};
use super::super::request::{DUMP_ATTEMPTS, NFGENMSG, NetlinkReply, NetlinkRequest};
use super::object::{
    ElementData, MapDataType, NftChain, NftObject, NftSet, NftTable, PacketVerdict, SENTINEL,
    SetElement, element_request, rule_request, table_request,
};
use super::rule::NftRule;
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::userdata::read_comment;
use super::{NftSocket, message_type, value};

/// Number of requests for elements in one datagram, whose replies fit in the receive buffer.
const ELEMENT_REQUESTS: usize = 64;

/// The result of [`NftSocket::read_table`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableContent {
    /// The generation of the tables that was read, or an earlier one.
    pub generation: u32,
    /// The number of chains, sets and other objects in the table; `None` if there is no such
    /// table.
    pub objects: Option<u32>,
    /// Whether the table is dormant: its chains see no packets.
    pub is_dormant: bool,
    /// The rules of all chains.
    pub rules: Vec<RuleInfo>,
    /// For each requested key, the element if it exists.
    pub elements: Vec<Option<SetElement>>,
}

/// A rule, as the kernel lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleInfo {
    /// The name of the chain.
    pub chain: String,
    /// The kernel's number of the rule, for deleting it.
    pub handle: u64,
    pub comment: Option<String>,
    /// The message of the kernel: few callers read expressions.
    body: Vec<u8>,
}

impl RuleInfo {
    /// The names of the expressions, such as `cmp`.
    pub fn expressions(&self) -> Vec<String> {
        expression_list(&self.body)
            .filter_map(|expr| expr.find_nested(NFTA_EXPR_NAME).map(ReplyAttribute::to_text))
            .collect()
    }

    /// The values of `cmp` and `immediate` expressions.
    pub fn values(&self) -> Vec<Vec<u8>> {
        expression_list(&self.body).filter_map(compared_value).collect()
    }
}

/// A chain, as the kernel lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainInfo {
    pub name: String,
    /// The type of a base chain: `filter`, `nat` or `route`.
    pub base: Option<String>,
    /// The number of rules and elements that refer to the chain, plus its rules.
    pub uses: u32,
}

impl NftRule {
    /// Whether the kernel lists the rule with these expressions, in a table of the same family;
    /// comments are not compared.
    pub fn has_expressions_of(&self, table: NftTable<'_>, listed: &RuleInfo) -> bool {
        let mut sent = AttributeBuilder::new();
        self.write_expressions(table.family, &mut sent);
        let found = find_in_message(&listed.body, NFTA_RULE_EXPRESSIONS);
        attribute::are_listed(sent.as_bytes(), found.map_or(&[], |list| list.value))
    }
}

/// Selects rules or elements by their comments.
pub type CommentSelector<'a> = &'a dyn Fn(Option<&str>) -> bool;

impl NftSocket {
    /// Whether the table, chain or set exists.
    pub fn has_object(&self, object: impl Into<NftObject>) -> NetlinkResult<bool> {
        Ok(self.read_object(object.into())?.is_some())
    }

    /// The chain, if it exists.
    pub fn read_chain(&self, chain: NftChain<'_>) -> NetlinkResult<Option<ChainInfo>> {
        Ok(self.read_object(chain.into())?.map(|body| parse_chain(&body)))
    }

    fn read_object(&self, object: NftObject) -> NetlinkResult<Option<Vec<u8>>> {
        let NftObject { mut request, text, .. } = object;
        request.kind += 1;
        let found = self.socket.request_object(&request).map(Some);
        unless_absent(found.map_err(|f| f.into_error("read", &text)), None)
    }

    /// Whether the chain is at the same hook, if it exists; of a regular chain, whether it is one.
    pub fn is_at_hook(&self, chain: NftChain<'_>) -> NetlinkResult<bool> {
        let object = NftObject::from(chain);
        let settings = object.settings.as_bytes().to_vec();
        let Some(body) = self.read_object(object)? else { return Ok(true) };
        let [hook, kind] = [NFTA_CHAIN_HOOK, NFTA_CHAIN_TYPE].map(|kind| {
            let value = |attr: Option<ReplyAttribute<'_>>| {
                attr.map_or(Vec::new(), |attr| attr.value.to_vec())
            };
            [value(attribute::find_attribute(&settings, kind)), value(find_in_message(&body, kind))]
        });
        Ok(attribute::are_listed(&hook[0], &hook[1]) && kind[0] == kind[1])
    }

    /// The chains of a table; none if there is no such table.
    pub fn dump_chains(&self, table: NftTable<'_>) -> NetlinkResult<Vec<ChainInfo>> {
        // The kernel (6.18) ignores a table in the request.
        let request =
            NetlinkRequest::new_netfilter(message_type(NFT_MSG_GETCHAIN), table.family as u8);
        let bodies = self.dump_or_empty(&request, "list chains of table", &table)?;
        let chains = bodies.iter().filter(|body| {
            body.first() == Some(&(table.family as u8))
                && find_in_message(body, NFTA_TABLE_NAME)
                    .is_some_and(|name| name.to_text() == table.name)
        });
        Ok(chains.map(|body| parse_chain(body)).collect())
    }

    /// The rules of a chain in their order; none if there is no such chain.
    pub fn dump_rules(&self, chain: NftChain<'_>) -> NetlinkResult<Vec<RuleInfo>> {
        let request = rule_request(NFT_MSG_GETRULE, chain);
        let bodies = self.dump_or_empty(&request, "list rules of chain", &chain)?;
        Ok(bodies.into_iter().filter_map(parse_rule).collect())
    }

    /// The rules of a chain for whose comment `which` returns true.
    pub fn find_rules_by_comment(
        &self,
        chain: NftChain<'_>,
        which: CommentSelector<'_>,
    ) -> NetlinkResult<Vec<RuleInfo>> {
        let mut rules = self.dump_rules(chain)?;
        rules.retain(|rule| which(rule.comment.as_deref()));
        Ok(rules)
    }

    /// The elements of a set or map, in no particular order, without the
    /// [sentinel](NftSet::sentinel_element); none if there is no such set.
    pub fn dump_elements(&self, set: NftSet<'static>) -> NetlinkResult<Vec<SetElement>> {
        let request = element_request(NFT_MSG_GETSETELEM, set);
        let bodies = self.dump_or_empty(&request, "list elements of", &set)?;
        let mut elements = parse_elements(set, &bodies);
        elements.retain(|element| element.comment.as_deref() != Some(SENTINEL));
        Ok(elements)
    }

    /// The element with the same key, found without reading the others.
    pub fn read_element(&self, wanted: &SetElement) -> NetlinkResult<Option<SetElement>> {
        Ok(self.read_elements(std::slice::from_ref(wanted))?.into_iter().flatten().next())
    }

    /// Reads the rules of a table, and the elements with the keys of `wanted` in sets of any table,
    /// by one datagram for up to 64 elements. With `chains` only the rules of these chains are
    /// read, by a datagram for each.
    pub fn read_table(
        &self,
        table: NftTable<'_>,
        chains: &[NftChain<'_>],
        wanted: &[SetElement],
    ) -> NetlinkResult<TableContent> {
        let mut content = TableContent::default();
        for _ in 0..DUMP_ATTEMPTS {
            let (now, later) = wanted.split_at(wanted.len().min(ELEMENT_REQUESTS));
            let mut requests =
                vec![(generation_request(), 0), (table_request(NFT_MSG_GETTABLE, table), 0)];
            if chains.is_empty() {
                requests.push((table_request(NFT_MSG_GETRULE, table), NLM_F_DUMP));
            }
            requests.extend(now.iter().map(get_element_request));
            let failed = |f: RequestFailure| f.into_error("read table", &table);
            let mut replies = self.socket.exchange_all(&requests).map_err(failed)?.into_iter();
            let mut next = || replies.next().unwrap_or_else(|| Err(Errno::ENODATA.into()));
            let first = next().map_err(failed)?.bodies;
            content.generation = parse_generation(first.first()).map_err(failed)?;
            let found = unless_absent(next().map_err(failed), NetlinkReply::default())?.bodies;
            let uses = found.first().and_then(|body| find_in_message(body, NFTA_TABLE_USE));
            content.objects = uses.and_then(ReplyAttribute::to_u32_be);
            let flags = found.first().and_then(|body| find_in_message(body, NFTA_TABLE_FLAGS));
            content.is_dormant = flags
                .and_then(ReplyAttribute::to_u32_be)
                .is_some_and(|f| f & NFT_TABLE_F_DORMANT != 0);
            let rules =
                if chains.is_empty() { next().map_err(failed)? } else { NetlinkReply::default() };
            content.rules = rules.bodies.into_iter().filter_map(parse_rule).collect();
            content.elements =
                now.iter().map(|e| parse_element_reply(e, next())).collect::<NetlinkResult<_>>()?;
            content.elements.extend(self.read_elements(later)?);
            for chain in chains {
                content.rules.extend(self.dump_rules(*chain)?);
            }
            if !rules.interrupted {
                break;
            }
        }
        Ok(content)
    }

    /// For each key of `wanted` the element, if it exists. Sends one datagram for 64 keys.
    pub fn read_elements(&self, wanted: &[SetElement]) -> NetlinkResult<Vec<Option<SetElement>>> {
        let mut found = Vec::with_capacity(wanted.len());
        for some in wanted.chunks(ELEMENT_REQUESTS) {
            let requests: Vec<_> = some.iter().map(get_element_request).collect();
            let replies = self.socket.exchange_all(&requests);
            let replies = replies.map_err(|f| f.into_error("read elements of", &some[0].set))?;
            for (element, reply) in some.iter().zip(replies) {
                found.push(parse_element_reply(element, reply)?);
            }
        }
        Ok(found)
    }

    /// The elements with the keys of `known`, each once, or, if `known` is empty, all elements of the
    /// sets. A result of tc-redirect-tap has the address of the container twice.
    pub fn find_elements(
        &self,
        sets: &[NftSet<'static>],
        known: &[SetElement],
    ) -> NetlinkResult<Vec<SetElement>> {
        let mut found: Vec<SetElement> = self.read_elements(known)?.into_iter().flatten().collect();
        let mut keys = HashSet::new();
        found.retain(|element| keys.insert((element.set, element.key.clone())));
        for set in sets.iter().filter(|_| known.is_empty()) {
            found.extend(self.dump_elements(*set)?);
        }
        Ok(found)
    }

    /// Like [`NftSocket::find_elements`], for elements for whose comment `which` returns true.
    pub fn find_elements_by_comment(
        &self,
        sets: &[NftSet<'static>],
        known: &[SetElement],
        which: CommentSelector<'_>,
    ) -> NetlinkResult<Vec<SetElement>> {
        let mut found = self.find_elements(sets, known)?;
        found.retain(|element| which(element.comment.as_deref()));
        Ok(found)
    }

    /// The number of the current generation of all tables, which each commit increments.
    pub fn read_generation(&self) -> NetlinkResult<u32> {
        let reply = self.socket.request_object(&generation_request());
        let id = reply.and_then(|body| parse_generation(Some(&body)));
        id.map_err(|f| f.into_error("read", &"nf_tables' generation"))
    }

    pub(super) fn dump_or_empty(
        &self,
        request: &NetlinkRequest,
        op: &'static str,
        of: &dyn Display,
    ) -> NetlinkResult<Vec<Vec<u8>>> {
        unless_absent(
            self.socket.request_dump(request).map_err(|f| f.into_error(op, of)),
            Vec::new(),
        )
    }
}

fn generation_request() -> NetlinkRequest {
    NetlinkRequest::new_netfilter(message_type(NFT_MSG_GETGEN), 0)
}

/// The generation in a reply; never 0, which would let a commit ignore the generation.
fn parse_generation(body: Option<&Vec<u8>>) -> NetlinkResult<u32, RequestFailure> {
    let id = body
        .and_then(|body| find_in_message(body, NFTA_GEN_ID))
        .and_then(ReplyAttribute::to_u32_be);
    id.filter(|id| *id != 0).ok_or(Errno::ENODATA.into())
}

fn get_element_request(element: &SetElement) -> (NetlinkRequest, u16) {
    (element.to_request(NFT_MSG_GETSETELEM, false), 0)
}

fn parse_element_reply(
    wanted: &SetElement,
    reply: NetlinkResult<NetlinkReply, RequestFailure>,
) -> NetlinkResult<Option<SetElement>> {
    match reply {
        Ok(NetlinkReply { bodies, .. }) => {
            Ok(parse_elements(wanted.set, &bodies).into_iter().next())
        }
        // Without an error, whose text would name the element.
        Err(failure) if failure.is_not_found() => Ok(None),
        Err(failure) => {
            Err(failure.into_error("read element", &format_args!("{wanted} of {}", wanted.set)))
        }
    }
}

pub(super) fn find_in_message(body: &[u8], kind: u16) -> Option<ReplyAttribute<'_>> {
    attribute::find_attribute(body.get(NFGENMSG..)?, kind)
}

pub(in crate::netlink) fn parse_chain(body: &[u8]) -> ChainInfo {
    ChainInfo {
        name: find_in_message(body, NFTA_CHAIN_NAME)
            .map(ReplyAttribute::to_text)
            .unwrap_or_default(),
        base: find_in_message(body, NFTA_CHAIN_TYPE).map(ReplyAttribute::to_text),
        uses: find_in_message(body, NFTA_CHAIN_USE)
            .and_then(ReplyAttribute::to_u32_be)
            .unwrap_or_default(),
    }
}

pub(in crate::netlink) fn parse_rule(body: Vec<u8>) -> Option<RuleInfo> {
    Some(RuleInfo {
        chain: find_in_message(&body, NFTA_RULE_CHAIN)
            .map(ReplyAttribute::to_text)
            .unwrap_or_default(),
        handle: find_in_message(&body, NFTA_RULE_HANDLE)?
            .value
            .try_into()
            .ok()
            .map(u64::from_be_bytes)?,
        comment: find_in_message(&body, NFTA_RULE_USERDATA).and_then(|a| read_comment(a.value)),
        body,
    })
}

fn expression_list(body: &[u8]) -> impl Iterator<Item = ReplyAttribute<'_>> {
    find_in_message(body, NFTA_RULE_EXPRESSIONS)
        .into_iter()
        .flat_map(ReplyAttribute::nested_attributes)
}

/// The value of a `cmp` or `immediate` expression.
fn compared_value(expr: ReplyAttribute<'_>) -> Option<Vec<u8>> {
    let kind = match expr.find_nested(NFTA_EXPR_NAME)?.to_text().as_str() {
        "cmp" => NFTA_CMP_DATA,
        "immediate" => NFTA_IMMEDIATE_DATA,
        _ => return None,
    };
    Some(
        expr.find_nested(NFTA_EXPR_DATA)?
            .find_nested(kind)?
            .find_nested(NFTA_DATA_VALUE)?
            .value
            .to_vec(),
    )
}

pub(in crate::netlink) fn parse_elements(
    set: NftSet<'static>,
    bodies: &[Vec<u8>],
) -> Vec<SetElement> {
    let lists = bodies.iter().filter_map(|body| find_in_message(body, NFTA_SET_ELEM_LIST_ELEMENTS));
    lists
        .flat_map(ReplyAttribute::nested_attributes)
        .filter_map(|attr| parse_element(set, attr))
        .collect()
}

pub(super) fn parse_element(set: NftSet<'static>, attr: ReplyAttribute<'_>) -> Option<SetElement> {
    let key = attr.find_nested(NFTA_SET_ELEM_KEY)?.find_nested(NFTA_DATA_VALUE)?.value;
    let data = attr.find_nested(NFTA_SET_ELEM_DATA);
    let data = data.zip(set.data).and_then(|(data, kind)| match kind {
        MapDataType::Values(types) => {
            value::parse_key(types, data.find_nested(NFTA_DATA_VALUE)?.value)
                .map(ElementData::Values)
        }
        MapDataType::Verdict => PacketVerdict::parse_data(data).map(ElementData::Verdict),
    });
    let comment = attr.find_nested(NFTA_SET_ELEM_USERDATA).and_then(|a| read_comment(a.value));
    Some(SetElement { set, key: value::parse_key(set.key, key)?, data, comment })
}
