//! What is there: rules of a chain, elements of a set. Nothing is read but what was asked for.

use std::fmt::Display;

use nix::errno::Errno;

use super::super::attribute::Attributes;
use super::super::error::{Failure, Result};
use super::super::netfilter::{NFGENMSG, Query};
use super::super::packet::{Attr, attrs};
use super::super::request::{Answers, DUMP_ATTEMPTS};
use super::element::{Data, Element, SENTINEL};
use super::expr::Verdict;
use super::object::{Chain, DataType, Family, Hook, Object, Set, Table, named};
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::value;
use super::{Nft, userdata};

/// How many elements are asked for by one datagram: so many answers fit the socket's buffer.
const TOGETHER: usize = 64;

/// What one [look](Nft::look) has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// The generation that was looked at, or an earlier one.
    pub generation: u32,
    /// The number of chains, sets and other objects in the table; none if there is no such table.
    pub objects: Option<u32>,
    /// The rules of all its chains.
    pub rules: Vec<RuleInfo>,
    /// For each key that was asked for, the element if there is one.
    pub elements: Vec<Option<Element>>,
}

/// A rule of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleInfo {
    /// The chain's name.
    pub chain: String,
    /// The kernel's number of the rule, by which it is deleted.
    pub handle: u64,
    /// Its comment.
    pub comment: Option<String>,
    /// The kinds of its expressions.
    pub expressions: Vec<String>,
    /// The values that the rule compares with, and the values that it loads.
    pub values: Vec<Vec<u8>>,
}

/// A chain of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainInfo {
    /// Its name.
    pub name: String,
    /// The type of a base chain: `filter`, `nat` or `route`.
    pub base: Option<String>,
    /// The number of rules and elements that jump to it, and of rules in it.
    pub uses: u32,
}

/// A base chain that drops what none of its rules accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DroppingChain {
    pub family: Family,
    pub table: String,
    pub name: String,
}

/// Tells by its comment whether something is meant.
pub type ByComment<'a> = &'a dyn Fn(Option<&str>) -> bool;

impl Nft {
    /// The base chains of IP families at `hook` whose policy is to drop, of all tables.
    pub fn dropping_chains(&self, hook: Hook) -> Result<Vec<DroppingChain>> {
        // No family: the chains of all.
        let query = query(NFT_MSG_GETCHAIN, 0, Attributes::new());
        let bodies = self.list(&query, "list chains", &"of all tables")?;
        Ok(bodies.iter().filter_map(|body| dropping_chain(body, hook)).collect())
    }

    /// Whether the table, chain or set is there.
    pub fn has(&self, object: impl Into<Object>) -> Result<bool> {
        Ok(!self.get(object.into())?.is_empty())
    }

    /// The chain, if it is there.
    pub fn chain(&self, chain: Chain<'_>) -> Result<Option<ChainInfo>> {
        Ok(self.get(chain.into())?.first().map(|body| chain_info(body)))
    }

    fn get(&self, object: Object) -> Result<Vec<Vec<u8>>> {
        let Object { family, message, name, text, .. } = object;
        absent_is_empty(self.one(query(message + 1, family as u8, name)))
            .map_err(|f| f.doing("read", || text))
    }

    /// The chains of a table; none if there is no such table.
    pub fn dump_chains(&self, table: Table<'_>) -> Result<Vec<ChainInfo>> {
        // The kernel (6.18) lists the chains of all tables whatever it is asked.
        let query = query(NFT_MSG_GETCHAIN, table.family as u8, Attributes::new());
        let bodies = self.list(&query, "list chains of table", &table)?;
        let mine = bodies.iter().filter(|body| {
            body.first() == Some(&(table.family as u8))
                && find(body, NFTA_TABLE_NAME).is_some_and(|name| name.text() == table.name)
        });
        Ok(mine.map(|body| chain_info(body)).collect())
    }

    /// The rules of a chain in their order; none if there is no such chain.
    pub fn dump_rules(&self, chain: Chain<'_>) -> Result<Vec<RuleInfo>> {
        let body = named(chain.table, NFTA_RULE_CHAIN, chain.name);
        let query = query(NFT_MSG_GETRULE, chain.table.family as u8, body);
        let bodies = self.list(&query, "list rules of chain", &chain)?;
        Ok(bodies.iter().filter_map(|body| rule_info(body)).collect())
    }

    /// The rules of a chain whose comment `which` is true of.
    pub fn rules_of(&self, chain: Chain<'_>, which: ByComment<'_>) -> Result<Vec<RuleInfo>> {
        let mut rules = self.dump_rules(chain)?;
        rules.retain(|rule| which(rule.comment.as_deref()));
        Ok(rules)
    }

    /// Whether a rule of the table has an expression of another kind than these.
    pub fn has_other_expressions(&self, table: Table<'_>, kinds: &[&str]) -> Result<bool> {
        let query = query(NFT_MSG_GETRULE, table.family as u8, Object::from(table).name);
        let bodies = self.list(&query, "list rules of table", &table)?;
        let is_other = |name: String| !kinds.contains(&name.as_str());
        Ok(bodies.iter().any(|body| expressions(body).any(is_other)))
    }

    /// The elements of a set or map in no order, its [sentinel](Set::sentinel) left out; none if it
    /// is not there.
    pub fn dump_elements(&self, set: Set<'static>) -> Result<Vec<Element>> {
        let body = named(set.table, NFTA_SET_ELEM_LIST_SET, set.name);
        let query = query(NFT_MSG_GETSETELEM, set.table.family as u8, body);
        let bodies = self.list(&query, "list elements of", &set)?;
        let mut elements = elements(set, &bodies);
        elements.retain(|element| element.comment.as_deref() != Some(SENTINEL));
        Ok(elements)
    }

    /// The element with the key of this one, found without reading the others.
    pub fn element(&self, wanted: &Element) -> Result<Option<Element>> {
        Ok(self.elements(std::slice::from_ref(wanted))?.into_iter().flatten().next())
    }

    /// The rules of a table and the elements with the keys of `wanted`, in sets of any table, by two
    /// system calls; more if that is much.
    pub fn look(&self, table: Table<'_>, wanted: &[Element]) -> Result<Look> {
        let mut look = Look::default();
        for _ in 0..DUMP_ATTEMPTS {
            let (now, later) = wanted.split_at(wanted.len().min(TOGETHER));
            let name = Object::from(table).name;
            let mut queries = vec![
                (generation(), false),
                (query(NFT_MSG_GETTABLE, table.family as u8, name.clone()), false),
                (query(NFT_MSG_GETRULE, table.family as u8, name), true),
            ];
            queries.extend(now.iter().map(element_query));
            let failed = |f: Failure| f.doing("read table", || table.to_string());
            let mut answers = self.socket.request_all(&queries).map_err(failed)?.into_iter();
            let mut next = || answers.next().unwrap_or_else(|| Err(Errno::ENODATA.into()));
            look.generation = read_generation(&next().map_err(failed)?.bodies).map_err(failed)?;
            let found = absent_is_empty(next().map(|a| a.bodies)).map_err(failed)?;
            look.objects = found.first().and_then(|body| find(body, NFTA_TABLE_USE)).and_then(be32);
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

    /// For each key of `wanted` the element if there is one, by two system calls for each 64 of them.
    pub fn elements(&self, wanted: &[Element]) -> Result<Vec<Option<Element>>> {
        let mut found = Vec::with_capacity(wanted.len());
        for some in wanted.chunks(TOGETHER) {
            let queries: Vec<_> = some.iter().map(element_query).collect();
            let answers = self.socket.request_all(&queries);
            let answers =
                answers.map_err(|f| f.doing("read elements of", || some[0].set.to_string()))?;
            for (element, answer) in some.iter().zip(answers) {
                found.push(one_element(element, answer)?);
            }
        }
        Ok(found)
    }

    /// The elements with the keys of `known`, or, where nothing is known, all of the sets.
    pub fn find(&self, sets: &[Set<'static>], known: &[Element]) -> Result<Vec<Element>> {
        let mut found: Vec<Element> = self.elements(known)?.into_iter().flatten().collect();
        for set in sets.iter().filter(|_| known.is_empty()) {
            found.extend(self.dump_elements(*set)?);
        }
        Ok(found)
    }

    /// Of what [`find`](Nft::find) finds, the elements whose comment `which` is true of.
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

    /// The number of the current generation of all tables; each commit makes the next one.
    pub(super) fn generation(&self) -> Result<u32> {
        self.one(generation())
            .and_then(|bodies| read_generation(&bodies))
            .map_err(|f| f.doing("read", || "nf_tables' generation".to_owned()))
    }

    /// Not acknowledged: what there is, or an error, is the whole answer.
    fn one(&self, query: Query) -> Result<Vec<Vec<u8>>, Failure> {
        let answer = self.socket.request_all(&[(query, false)])?.pop();
        answer.unwrap_or_else(|| Err(Errno::ENODATA.into())).map(|answers| answers.bodies)
    }

    fn list(&self, query: &Query, op: &'static str, what: &dyn Display) -> Result<Vec<Vec<u8>>> {
        absent_is_empty(self.socket.dump(query)).map_err(|f| f.doing(op, || what.to_string()))
    }
}

fn generation() -> Query {
    query(NFT_MSG_GETGEN, 0, Attributes::new())
}

/// Never 0, which means to the kernel that the generation does not matter.
fn read_generation(bodies: &[Vec<u8>]) -> Result<u32, Failure> {
    let id = bodies.first().and_then(|body| find(body, NFTA_GEN_ID)).and_then(be32);
    id.filter(|id| *id != 0).ok_or(Errno::ENODATA.into())
}

/// Not for a list.
fn element_query(element: &Element) -> (Query, bool) {
    (query(NFT_MSG_GETSETELEM, element.set.table.family as u8, element.write(false)), false)
}

fn one_element(wanted: &Element, answer: Result<Answers, Failure>) -> Result<Option<Element>> {
    let bodies = absent_is_empty(answer.map(|answers| answers.bodies))
        .map_err(|f| f.doing("read element", || format!("{wanted} of {}", wanted.set)))?;
    Ok(elements(wanted.set, &bodies).into_iter().next())
}

fn query(message: u16, family: u8, body: Attributes) -> Query {
    Query { kind: super::kind(message), family, body }
}

fn absent_is_empty(found: Result<Vec<Vec<u8>>, Failure>) -> Result<Vec<Vec<u8>>, Failure> {
    match found {
        Err(failure) if failure.errno == Errno::ENOENT => Ok(Vec::new()),
        other => other,
    }
}

fn find(body: &[u8], kind: u16) -> Option<Attr<'_>> {
    attrs(body.get(NFGENMSG..)?).find(|attr| attr.kind == kind)
}

fn be32(attr: Attr<'_>) -> Option<u32> {
    attr.value.try_into().ok().map(u32::from_be_bytes)
}

fn dropping_chain(body: &[u8], hook: Hook) -> Option<DroppingChain> {
    let families = [Family::Inet, Family::Ip, Family::Ip6];
    let family = families.into_iter().find(|family| body.first() == Some(&(*family as u8)))?;
    let number = be32(part(find(body, NFTA_CHAIN_HOOK)?, NFTA_HOOK_HOOKNUM)?)?;
    let policy = be32(find(body, NFTA_CHAIN_POLICY)?)?;
    let text = |kind| find(body, kind).map(Attr::text);
    (number == hook as u32 && policy == NF_DROP as u32).then_some(DroppingChain {
        family,
        table: text(NFTA_TABLE_NAME)?,
        name: text(NFTA_CHAIN_NAME)?,
    })
}

pub(in crate::netlink) fn chain_info(body: &[u8]) -> ChainInfo {
    ChainInfo {
        name: find(body, NFTA_CHAIN_NAME).map(Attr::text).unwrap_or_default(),
        base: find(body, NFTA_CHAIN_TYPE).map(Attr::text),
        uses: find(body, NFTA_CHAIN_USE).and_then(be32).unwrap_or_default(),
    }
}

pub(in crate::netlink) fn rule_info(body: &[u8]) -> Option<RuleInfo> {
    Some(RuleInfo {
        chain: find(body, NFTA_RULE_CHAIN).map(Attr::text).unwrap_or_default(),
        handle: find(body, NFTA_RULE_HANDLE)?.value.try_into().ok().map(u64::from_be_bytes)?,
        comment: find(body, NFTA_RULE_USERDATA).and_then(|a| userdata::read_comment(a.value)),
        expressions: expressions(body).collect(),
        values: expression_list(body).filter_map(value).collect(),
    })
}

fn expression_list(body: &[u8]) -> impl Iterator<Item = Attr<'_>> {
    find(body, NFTA_RULE_EXPRESSIONS).into_iter().flat_map(Attr::nested)
}

/// The kinds of a rule's expressions.
fn expressions(body: &[u8]) -> impl Iterator<Item = String> {
    expression_list(body).filter_map(|expr| part(expr, NFTA_EXPR_NAME).map(Attr::text))
}

/// The value of a `cmp` or `immediate` expression.
fn value(expr: Attr<'_>) -> Option<Vec<u8>> {
    let kind = match part(expr, NFTA_EXPR_NAME)?.text().as_str() {
        "cmp" => NFTA_CMP_DATA,
        "immediate" => NFTA_IMMEDIATE_DATA,
        _ => return None,
    };
    let data = part(part(expr, NFTA_EXPR_DATA)?, kind)?;
    Some(part(data, NFTA_DATA_VALUE)?.value.to_vec())
}

fn part(attr: Attr<'_>, kind: u16) -> Option<Attr<'_>> {
    attr.nested().find(|inner| inner.kind == kind)
}

pub(in crate::netlink) fn elements(set: Set<'static>, bodies: &[Vec<u8>]) -> Vec<Element> {
    let lists = bodies.iter().filter_map(|body| find(body, NFTA_SET_ELEM_LIST_ELEMENTS));
    lists.flat_map(Attr::nested).filter_map(|attr| element(set, attr)).collect()
}

fn element(set: Set<'static>, attr: Attr<'_>) -> Option<Element> {
    let key = part(part(attr, NFTA_SET_ELEM_KEY)?, NFTA_DATA_VALUE)?.value;
    let data = part(attr, NFTA_SET_ELEM_DATA).and_then(|attr| attr.nested().next());
    let data = data.zip(set.data).and_then(|(data, kind)| match kind {
        DataType::Values(types) => value::read(types, data.value).map(Data::Values),
        DataType::Verdict => Some(Data::Verdict(Verdict {
            code: part(data, NFTA_VERDICT_CODE)?.value.try_into().ok().map(i32::from_be_bytes)?,
            chain: part(data, NFTA_VERDICT_CHAIN).map(Attr::text),
        })),
    });
    let comment = part(attr, NFTA_SET_ELEM_USERDATA).and_then(|a| userdata::read_comment(a.value));
    Some(Element { set, key: value::read(set.key, key)?, data, comment })
}
