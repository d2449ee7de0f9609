//! Reading chains, rules and elements.

use std::fmt::Display;

use nix::errno::Errno;
use rtnetlink::packet_core::NLM_F_DUMP;

use super::super::attribute::{self, Attr};
use super::super::error::{Failure, Result, unless_absent};
use super::super::request::{Answers, DUMP_ATTEMPTS, NFGENMSG, Request};
use super::object::{
    Chain, Data, DataType, Element, Object, SENTINEL, Set, Table, Verdict, element_request,
    read_comment, request, rule_request,
};
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::{Nft, kind, value};

/// Requests for elements in one datagram: their replies fit in the receive buffer.
const TOGETHER: usize = 64;

/// The result of [`Nft::look`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// The generation of the result, or an earlier one.
    pub generation: u32,
    /// The number of chains, sets and other objects in the table; `None` if there is no such table.
    pub objects: Option<u32>,
    /// The rules of all chains.
    pub rules: Vec<RuleInfo>,
    /// For each requested key, the element if it exists.
    pub elements: Vec<Option<Element>>,
}

/// A rule of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleInfo {
    /// The chain's name.
    pub chain: String,
    /// The kernel's number of the rule, for deleting it.
    pub handle: u64,
    pub comment: Option<String>,
    /// The names of the expressions, such as `cmp`.
    pub expressions: Vec<String>,
    /// The values of `cmp` and `immediate` expressions.
    pub values: Vec<Vec<u8>>,
}

/// A chain of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainInfo {
    pub name: String,
    /// The type of a base chain: `filter`, `nat` or `route`.
    pub base: Option<String>,
    /// The number of rules and elements that refer to the chain, plus its rules.
    pub uses: u32,
}

/// Selects rules or elements by their comments.
pub type ByComment<'a> = &'a dyn Fn(Option<&str>) -> bool;

impl Nft {
    /// Whether the table, chain or set exists.
    pub fn has(&self, object: impl Into<Object>) -> Result<bool> {
        Ok(self.get(object.into())?.is_some())
    }

    /// The chain, if it exists.
    pub fn chain(&self, chain: Chain<'_>) -> Result<Option<ChainInfo>> {
        Ok(self.get(chain.into())?.map(|body| chain_info(&body)))
    }

    fn get(&self, object: Object) -> Result<Option<Vec<u8>>> {
        let Object { mut request, text, .. } = object;
        request.kind += 1;
        let found = self.socket.one(&request).map(Some);
        unless_absent(found.map_err(|f| f.context("read", &text)), None)
    }

    /// The chains of a table; none if there is no such table.
    pub fn dump_chains(&self, table: Table<'_>) -> Result<Vec<ChainInfo>> {
        // The kernel (6.18) ignores a table in the request.
        let request = Request::netfilter(kind(NFT_MSG_GETCHAIN), table.family as u8);
        let bodies = self.list(&request, "list chains of table", &table)?;
        let mine = bodies.iter().filter(|body| {
            body.first() == Some(&(table.family as u8))
                && find(body, NFTA_TABLE_NAME).is_some_and(|name| name.text() == table.name)
        });
        Ok(mine.map(|body| chain_info(body)).collect())
    }

    /// The rules of a chain in their order; none if there is no such chain.
    pub fn dump_rules(&self, chain: Chain<'_>) -> Result<Vec<RuleInfo>> {
        let request = rule_request(NFT_MSG_GETRULE, chain);
        let bodies = self.list(&request, "list rules of chain", &chain)?;
        Ok(bodies.iter().filter_map(|body| rule_info(body)).collect())
    }

    /// The rules of a chain for whose comment `which` returns true.
    pub fn rules_of(&self, chain: Chain<'_>, which: ByComment<'_>) -> Result<Vec<RuleInfo>> {
        let mut rules = self.dump_rules(chain)?;
        rules.retain(|rule| which(rule.comment.as_deref()));
        Ok(rules)
    }

    /// The elements of a set or map in no particular order, without its [sentinel](Set::sentinel); none
    /// if there is no such set.
    pub fn dump_elements(&self, set: Set<'static>) -> Result<Vec<Element>> {
        let request = element_request(NFT_MSG_GETSETELEM, set);
        let bodies = self.list(&request, "list elements of", &set)?;
        let mut elements = elements(set, &bodies);
        elements.retain(|element| element.comment.as_deref() != Some(SENTINEL));
        Ok(elements)
    }

    /// The element with the same key, found without reading the others.
    pub fn element(&self, wanted: &Element) -> Result<Option<Element>> {
        Ok(self.elements(std::slice::from_ref(wanted))?.into_iter().flatten().next())
    }

    /// The rules of a table and the elements with the keys of `wanted`, in sets of any table, by one
    /// datagram for up to 64 elements.
    pub fn look(&self, table: Table<'_>, wanted: &[Element]) -> Result<Look> {
        let mut look = Look::default();
        for _ in 0..DUMP_ATTEMPTS {
            let (now, later) = wanted.split_at(wanted.len().min(TOGETHER));
            let mut requests = vec![
                (generation_request(), 0),
                (request(NFT_MSG_GETTABLE, table), 0),
                (request(NFT_MSG_GETRULE, table), NLM_F_DUMP),
            ];
            requests.extend(now.iter().map(get_element));
            let failed = |f: Failure| f.context("read table", &table);
            let mut replies = self.socket.exchange_all(&requests).map_err(failed)?.into_iter();
            let mut next = || replies.next().unwrap_or_else(|| Err(Errno::ENODATA.into()));
            let first = next().map_err(failed)?.bodies;
            look.generation = generation(first.first()).map_err(failed)?;
            let found = unless_absent(next().map_err(failed), Answers::default())?.bodies;
            let uses = found.first().and_then(|body| find(body, NFTA_TABLE_USE));
            look.objects = uses.and_then(Attr::be32);
            let rules = next().map_err(failed)?;
            look.rules = rules.bodies.iter().filter_map(|body| rule_info(body)).collect();
            look.elements = now.iter().map(|e| one_element(e, next())).collect::<Result<_>>()?;
            look.elements.extend(self.elements(later)?);
            if !rules.interrupted {
                break;
            }
        }
        Ok(look)
    }

    /// For each key of `wanted` the element if it exists, by one datagram for 64 keys.
    pub fn elements(&self, wanted: &[Element]) -> Result<Vec<Option<Element>>> {
        let mut found = Vec::with_capacity(wanted.len());
        for some in wanted.chunks(TOGETHER) {
            let requests: Vec<_> = some.iter().map(get_element).collect();
            let replies = self.socket.exchange_all(&requests);
            let replies = replies.map_err(|f| f.context("read elements of", &some[0].set))?;
            for (element, reply) in some.iter().zip(replies) {
                found.push(one_element(element, reply)?);
            }
        }
        Ok(found)
    }

    /// The elements with the keys of `known`, or, if `known` is empty, all elements of the sets.
    pub fn find(&self, sets: &[Set<'static>], known: &[Element]) -> Result<Vec<Element>> {
        let mut found: Vec<Element> = self.elements(known)?.into_iter().flatten().collect();
        for set in sets.iter().filter(|_| known.is_empty()) {
            found.extend(self.dump_elements(*set)?);
        }
        Ok(found)
    }

    /// As [`find`](Nft::find), for elements for whose comment `which` returns true.
    pub fn find_of(
        &self,
        sets: &[Set<'static>],
        known: &[Element],
        which: ByComment<'_>,
    ) -> Result<Vec<Element>> {
        let mut found = self.find(sets, known)?;
        found.retain(|element| which(element.comment.as_deref()));
        Ok(found)
    }

    /// The number of the current generation of all tables, which each commit increments.
    pub fn generation(&self) -> Result<u32> {
        let reply = self.socket.one(&generation_request());
        let id = reply.and_then(|body| generation(Some(&body)));
        id.map_err(|f| f.context("read", &"nf_tables' generation"))
    }

    pub(super) fn list(
        &self,
        request: &Request,
        op: &'static str,
        of: &dyn Display,
    ) -> Result<Vec<Vec<u8>>> {
        unless_absent(self.socket.dump(request).map_err(|f| f.context(op, of)), Vec::new())
    }
}

fn generation_request() -> Request {
    Request::netfilter(kind(NFT_MSG_GETGEN), 0)
}

/// Never 0, which would let a commit ignore the generation.
fn generation(body: Option<&Vec<u8>>) -> Result<u32, Failure> {
    let id = body.and_then(|body| find(body, NFTA_GEN_ID)).and_then(Attr::be32);
    id.filter(|id| *id != 0).ok_or(Errno::ENODATA.into())
}

fn get_element(element: &Element) -> (Request, u16) {
    (element.request(NFT_MSG_GETSETELEM, false), 0)
}

fn one_element(wanted: &Element, reply: Result<Answers, Failure>) -> Result<Option<Element>> {
    let target = format_args!("{wanted} of {}", wanted.set);
    let reply = reply.map_err(|f| f.context("read element", &target));
    let bodies = unless_absent(reply, Answers::default())?.bodies;
    Ok(elements(wanted.set, &bodies).into_iter().next())
}

fn find(body: &[u8], kind: u16) -> Option<Attr<'_>> {
    attribute::find(body.get(NFGENMSG..)?, kind)
}

pub(in crate::netlink) fn chain_info(body: &[u8]) -> ChainInfo {
    ChainInfo {
        name: find(body, NFTA_CHAIN_NAME).map(Attr::text).unwrap_or_default(),
        base: find(body, NFTA_CHAIN_TYPE).map(Attr::text),
        uses: find(body, NFTA_CHAIN_USE).and_then(Attr::be32).unwrap_or_default(),
    }
}

pub(in crate::netlink) fn rule_info(body: &[u8]) -> Option<RuleInfo> {
    Some(RuleInfo {
        chain: find(body, NFTA_RULE_CHAIN).map(Attr::text).unwrap_or_default(),
        handle: find(body, NFTA_RULE_HANDLE)?.value.try_into().ok().map(u64::from_be_bytes)?,
        comment: find(body, NFTA_RULE_USERDATA).and_then(|a| read_comment(a.value)),
        expressions: expressions(body).collect(),
        values: expression_list(body).filter_map(value).collect(),
    })
}

fn expression_list(body: &[u8]) -> impl Iterator<Item = Attr<'_>> {
    find(body, NFTA_RULE_EXPRESSIONS).into_iter().flat_map(Attr::nested)
}

/// The kinds of a rule's expressions.
fn expressions(body: &[u8]) -> impl Iterator<Item = String> {
    expression_list(body).filter_map(|expr| expr.find(NFTA_EXPR_NAME).map(Attr::text))
}

/// The value of a `cmp` or `immediate` expression.
fn value(expr: Attr<'_>) -> Option<Vec<u8>> {
    let kind = match expr.find(NFTA_EXPR_NAME)?.text().as_str() {
        "cmp" => NFTA_CMP_DATA,
        "immediate" => NFTA_IMMEDIATE_DATA,
        _ => return None,
    };
    Some(expr.find(NFTA_EXPR_DATA)?.find(kind)?.find(NFTA_DATA_VALUE)?.value.to_vec())
}

pub(in crate::netlink) fn elements(set: Set<'static>, bodies: &[Vec<u8>]) -> Vec<Element> {
    let lists = bodies.iter().filter_map(|body| find(body, NFTA_SET_ELEM_LIST_ELEMENTS));
    lists.flat_map(Attr::nested).filter_map(|attr| element(set, attr)).collect()
}

fn element(set: Set<'static>, attr: Attr<'_>) -> Option<Element> {
    let key = attr.find(NFTA_SET_ELEM_KEY)?.find(NFTA_DATA_VALUE)?.value;
    let data = attr.find(NFTA_SET_ELEM_DATA);
    let data = data.zip(set.data).and_then(|(data, kind)| match kind {
        DataType::Values(types) => {
            value::read(types, data.find(NFTA_DATA_VALUE)?.value).map(Data::Values)
        }
        DataType::Verdict => Verdict::read(data).map(Data::Verdict),
    });
    let comment = attr.find(NFTA_SET_ELEM_USERDATA).and_then(|a| read_comment(a.value));
    Some(Element { set, key: value::read(set.key, key)?, data, comment })
}
