//! What is there: rules of a chain, elements of a set. Nothing is read but what was asked for.

use nix::errno::Errno;

use super::super::attribute::Attributes;
use super::super::error::{Failure, Result};
use super::super::netfilter::Query;
use super::super::packet::{Attr, attrs};
use super::super::request::{Answers, DUMP_ATTEMPTS};
use super::Nft;
use super::batch::{RULE_EXPRESSIONS, element_body, named};
use super::element::{Data, ELEM_DATA, ELEM_KEY, ELEM_KEY_END, ELEM_USERDATA, Element};
use super::expr::Verdict;
use super::object::{Chain, DataType, SENTINEL, Set, Table};
use super::userdata;
use super::value::{self, Key, Value};

const GETTABLE: u16 = 1;
const GETCHAIN: u16 = 4;
const GETRULE: u16 = 7;
const GETSET: u16 = 10;
const GETSETELEM: u16 = 13;
const GETGEN: u16 = 16;

/// The attribute of a table with the number of objects in it.
const TABLE_USE: u16 = 3;

/// How many elements are asked for by one datagram: so many answers fit the socket's buffer.
const TOGETHER: usize = 64;

/// Netfilter's own header before the attributes.
const NFGENMSG: usize = 4;

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
    /// What it is deleted by.
    pub handle: u64,
    /// Its comment.
    pub comment: Option<String>,
    /// The kinds of its expressions.
    pub expressions: Vec<String>,
    /// What it compares with, and what it loads.
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

impl Nft {
    /// Whether the table is there.
    pub fn has_table(&self, table: Table<'_>) -> Result<bool> {
        let mut body = Attributes::new();
        body.text(1, table.name);
        let found = self.ask(GETTABLE, table, body);
        present(found).map_err(|f| f.doing("read table", || table.to_string()))
    }

    /// Whether the chain is there.
    pub fn has_chain(&self, chain: Chain<'_>) -> Result<bool> {
        let found = self.ask(GETCHAIN, chain.table, named(chain.table, 3, chain.name));
        present(found).map_err(|f| f.doing("read chain", || chain.to_string()))
    }

    /// The chain, if it is there.
    pub fn chain(&self, chain: Chain<'_>) -> Result<Option<ChainInfo>> {
        let found = self.ask(GETCHAIN, chain.table, named(chain.table, 3, chain.name));
        let bodies =
            absent_is_empty(found).map_err(|f| f.doing("read chain", || chain.to_string()))?;
        Ok(bodies.first().map(|body| chain_info(body)))
    }

    /// Whether the set or map is there.
    pub fn has_set(&self, set: Set<'_>) -> Result<bool> {
        let found = self.ask(GETSET, set.table, named(set.table, 2, set.name));
        present(found).map_err(|f| f.doing("read", || set.to_string()))
    }

    /// The chains of a table; none if there is no such table.
    pub fn dump_chains(&self, table: Table<'_>) -> Result<Vec<ChainInfo>> {
        // The kernel (6.18) lists the chains of all tables whatever it is asked.
        let bodies = absent_is_empty(self.list(GETCHAIN, table, Attributes::new()))
            .map_err(|f| f.doing("list chains of table", || table.to_string()))?;
        let mine = bodies.iter().filter(|body| {
            body.first() == Some(&table.family.number())
                && find(body, 1).is_some_and(|name| name.text() == table.name)
        });
        Ok(mine.map(|body| chain_info(body)).collect())
    }

    /// The rules of a chain in their order; none if there is no such chain.
    pub fn dump_rules(&self, chain: Chain<'_>) -> Result<Vec<RuleInfo>> {
        let body = named(chain.table, 2, chain.name);
        let bodies = absent_is_empty(self.list(GETRULE, chain.table, body))
            .map_err(|f| f.doing("list rules of chain", || chain.to_string()))?;
        Ok(bodies.iter().filter_map(|body| rule_info(body)).collect())
    }

    /// The elements of a set or map in no order, its [sentinel](Set::sentinel) left out; none if it
    /// is not there.
    pub fn dump_elements(&self, set: Set<'_>) -> Result<Vec<Element>> {
        let body = named(set.table, 2, set.name);
        let bodies = absent_is_empty(self.list(GETSETELEM, set.table, body))
            .map_err(|f| f.doing("list elements of", || set.to_string()))?;
        let mut elements = elements(set, &bodies);
        elements.retain(|element| element.comment.as_deref() != Some(SENTINEL));
        Ok(elements)
    }

    /// The element with this key, found without reading the others.
    pub fn element(&self, set: Set<'_>, key: impl Into<Key>) -> Result<Option<Element>> {
        Ok(self.elements(&[(set, key.into())])?.into_iter().flatten().next())
    }

    /// The rules of a table and the elements of these keys, in sets of any table, by two system
    /// calls; more if that is much.
    pub fn look(&self, table: Table<'_>, keys: &[(Set<'_>, Key)]) -> Result<Look> {
        let mut look = Look::default();
        for _ in 0..DUMP_ATTEMPTS {
            let (now, later) = keys.split_at(keys.len().min(TOGETHER));
            let mut queries = vec![(generation(), false)];
            let mut body = Attributes::new();
            body.text(1, table.name);
            queries.push((query(GETTABLE, table, body.clone()), false));
            queries.push((query(GETRULE, table, body), true));
            queries.extend(now.iter().map(|(set, key)| (element_query(*set, key), false)));
            let failed = |f: Failure| f.doing("read table", || table.to_string());
            let mut answers = self.socket.request_all(&queries).map_err(failed)?.into_iter();
            let mut next = || answers.next().unwrap_or_else(|| Err(Errno::ENODATA.into()));
            look.generation = read_generation(&next().map_err(failed)?.bodies).map_err(failed)?;
            let found = absent_is_empty(next().map(|a| a.bodies)).map_err(failed)?;
            look.objects = found.first().and_then(|body| find(body, TABLE_USE)).and_then(be32);
            let rules = next().map_err(failed)?;
            look.rules = rules.bodies.iter().filter_map(|body| rule_info(body)).collect();
            look.elements = now
                .iter()
                .map(|(set, key)| one_element(*set, key, next()))
                .collect::<Result<_>>()?;
            look.elements.extend(self.elements(later)?);
            if !rules.interrupted {
                break;
            }
        }
        Ok(look)
    }

    /// For each key the element if there is one, by two system calls for each 64 of them.
    pub fn elements(&self, keys: &[(Set<'_>, Key)]) -> Result<Vec<Option<Element>>> {
        let mut found = Vec::with_capacity(keys.len());
        for some in keys.chunks(TOGETHER) {
            let queries: Vec<_> =
                some.iter().map(|(set, key)| (element_query(*set, key), false)).collect();
            let answers = self.socket.request_all(&queries);
            let answers =
                answers.map_err(|f| f.doing("read elements of", || some[0].0.to_string()))?;
            for ((set, key), answer) in some.iter().zip(answers) {
                found.push(one_element(*set, key, answer)?);
            }
        }
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

    fn ask(&self, get: u16, table: Table<'_>, body: Attributes) -> Result<Vec<Vec<u8>>, Failure> {
        self.one(query(get, table, body))
    }

    fn list(&self, get: u16, table: Table<'_>, body: Attributes) -> Result<Vec<Vec<u8>>, Failure> {
        self.socket.dump(&query(get, table, body))
    }
}

fn generation() -> Query {
    Query { kind: super::kind(GETGEN), family: 0, body: Attributes::new() }
}

/// Never 0, which means to the kernel that the generation does not matter.
fn read_generation(bodies: &[Vec<u8>]) -> Result<u32, Failure> {
    let id = bodies.first().and_then(|body| find(body, 1)).and_then(be32);
    id.filter(|id| *id != 0).ok_or(Errno::ENODATA.into())
}

fn element_query(set: Set<'_>, key: &Key) -> Query {
    query(GETSETELEM, set.table, element_body(set, &Element::new(key.clone())))
}

fn one_element(
    set: Set<'_>,
    key: &Key,
    answer: Result<Answers, Failure>,
) -> Result<Option<Element>> {
    let bodies = absent_is_empty(answer.map(|answers| answers.bodies))
        .map_err(|f| f.doing("read element", || format!("{key} of {set}")))?;
    Ok(elements(set, &bodies).into_iter().next())
}

fn query(get: u16, table: Table<'_>, body: Attributes) -> Query {
    Query { kind: super::kind(get), family: table.family.number(), body }
}

fn present(found: Result<Vec<Vec<u8>>, Failure>) -> Result<bool, Failure> {
    absent_is_empty(found).map(|bodies| !bodies.is_empty())
}

fn absent_is_empty(found: Result<Vec<Vec<u8>>, Failure>) -> Result<Vec<Vec<u8>>, Failure> {
    match found {
        Err(failure) if failure.errno == Errno::ENOENT => Ok(Vec::new()),
        other => other,
    }
}

fn attributes(body: &[u8]) -> impl Iterator<Item = Attr<'_>> {
    attrs(body.get(NFGENMSG..).unwrap_or_default())
}

fn find(body: &[u8], kind: u16) -> Option<Attr<'_>> {
    attributes(body).find(|attr| attr.kind == kind)
}

fn be32(attr: Attr<'_>) -> Option<u32> {
    attr.value.try_into().ok().map(u32::from_be_bytes)
}

pub(in crate::netlink) fn chain_info(body: &[u8]) -> ChainInfo {
    ChainInfo {
        name: find(body, 3).map(Attr::text).unwrap_or_default(),
        base: find(body, 7).map(Attr::text),
        uses: find(body, 6).and_then(be32).unwrap_or_default(),
    }
}

pub(in crate::netlink) fn rule_info(body: &[u8]) -> Option<RuleInfo> {
    let handle = find(body, 3)?.value.try_into().ok().map(u64::from_be_bytes)?;
    let comment = find(body, 7).and_then(|attr| userdata::read_comment(attr.value));
    let list = || find(body, RULE_EXPRESSIONS).into_iter().flat_map(Attr::nested);
    let expressions = list().filter_map(|expr| part(expr, 1).map(Attr::text)).collect();
    let values = list().filter_map(value).collect();
    let chain = find(body, 2).map(Attr::text).unwrap_or_default();
    Some(RuleInfo { chain, handle, comment, expressions, values })
}

/// The value of a `cmp` or `immediate` expression.
fn value(expr: Attr<'_>) -> Option<Vec<u8>> {
    let kind = match part(expr, 1)?.text().as_str() {
        "cmp" => 3,
        "immediate" => 2,
        _ => return None,
    };
    Some(part(part(part(expr, 2)?, kind)?, 1)?.value.to_vec())
}

fn part(attr: Attr<'_>, kind: u16) -> Option<Attr<'_>> {
    attr.nested().find(|inner| inner.kind == kind)
}

pub(in crate::netlink) fn elements(set: Set<'_>, bodies: &[Vec<u8>]) -> Vec<Element> {
    let lists = bodies.iter().filter_map(|body| find(body, 3));
    lists.flat_map(Attr::nested).filter_map(|attr| element(set, attr)).collect()
}

fn element(set: Set<'_>, attr: Attr<'_>) -> Option<Element> {
    let part = |kind| attr.nested().find(|attr| attr.kind == kind);
    let bytes = |kind| part(kind).and_then(|attr| attr.nested().next()).map(|data| data.value);
    let key = bytes(ELEM_KEY)?;
    let read = |key| value::read(set.key, key);
    Some(Element {
        key: read(key),
        end: bytes(ELEM_KEY_END).filter(|end| *end != key).map(read),
        data: part(ELEM_DATA).and_then(|attr| data(set, attr)),
        comment: part(ELEM_USERDATA).and_then(|attr| userdata::read_comment(attr.value)),
    })
}

fn data(set: Set<'_>, attr: Attr<'_>) -> Option<Data> {
    let inner = attr.nested().next()?;
    match set.data? {
        DataType::Values(types) => Some(Data::Values(value::read(types, inner.value))),
        DataType::Verdict => {
            let part = |kind| inner.nested().find(|attr| attr.kind == kind);
            let code = part(1)?.value.try_into().ok().map(i32::from_be_bytes)?;
            let chain = part(2).map(Attr::text).unwrap_or_default();
            let raw = || Data::Values(Key(vec![Value::Raw(inner.value.to_vec())]));
            Some(Verdict::read(code, chain).map_or_else(raw, Data::Verdict))
        }
    }
}
