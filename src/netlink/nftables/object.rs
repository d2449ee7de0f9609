//! Tables, chains, sets and maps: constants that name an object and describe how to create it; elements.

use std::fmt;

use nix::libc;

use super::super::attribute::{Attr, Attributes};
use super::super::request::Request;
use super::kind;
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::value::{Key, Type, byteorder, length, type_number};
use crate::netlink;

/// Priority of chains that translate destinations; `dstnat` in nft.
pub const DSTNAT: i32 = NF_IP_PRI_NAT_DST;
/// Priority of chains that translate sources; `srcnat` in nft.
pub const SRCNAT: i32 = NF_IP_PRI_NAT_SRC;
/// Priority of filters; `filter` in nft.
pub const FILTER: i32 = NF_IP_PRI_FILTER;
/// Priority before connection tracking; `raw` in nft.
pub const RAW: i32 = NF_IP_PRI_RAW;

/// The traffic of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// IPv4 and IPv6.
    Inet = NFPROTO_INET as isize,
    /// IPv4.
    Ip = NFPROTO_IPV4 as isize,
    /// IPv6.
    Ip6 = NFPROTO_IPV6 as isize,
    /// Frames that a bridge forwards.
    Bridge = NFPROTO_BRIDGE as isize,
}

impl From<netlink::Family> for Family {
    fn from(family: netlink::Family) -> Family {
        match family {
            netlink::Family::V4 => Family::Ip,
            netlink::Family::V6 => Family::Ip6,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Family::Inet => "inet",
            Family::Ip => "ip",
            Family::Ip6 => "ip6",
            Family::Bridge => "bridge",
        })
    }
}

/// A table.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Table<'a> {
    pub(super) family: Family,
    pub(super) name: &'a str,
    pub(super) comment: Option<&'a str>,
}

impl<'a> Table<'a> {
    /// A table of any family.
    pub const fn new(family: Family, name: &'a str) -> Table<'a> {
        Table { family, name, comment: None }
    }

    /// A table for both IP families.
    pub const fn inet(name: &'a str) -> Table<'a> {
        Table::new(Family::Inet, name)
    }

    /// With a comment (Linux 5.10).
    pub const fn comment(self, text: &'a str) -> Table<'a> {
        Table { comment: Some(text), ..self }
    }

    /// The regular chain `name` of this table; a base chain with [`filter`](Chain::filter) or [`nat`](Chain::nat).
    pub const fn chain(self, name: &'a str) -> Chain<'a> {
        Chain { table: self, name, base: None, comment: None }
    }

    /// The set `name` of this table.
    pub const fn set(self, name: &'a str, key: &'a [Type]) -> Set<'a> {
        Set { table: self, name, key, data: None }
    }

    /// The map `name` of this table from `key` to `data`.
    pub const fn map(self, name: &'a str, key: &'a [Type], data: &'a [Type]) -> Set<'a> {
        Set { data: Some(DataType::Values(data)), ..self.set(name, key) }
    }

    /// The map `name` of this table from `key` to a verdict.
    pub const fn vmap(self, name: &'a str, key: &'a [Type]) -> Set<'a> {
        Set { data: Some(DataType::Verdict), ..self.set(name, key) }
    }
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.family, self.name)
    }
}

/// The hook of a base chain, by its number in `linux/netfilter.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    Prerouting = libc::NF_INET_PRE_ROUTING as isize,
    Input = libc::NF_INET_LOCAL_IN as isize,
    Forward = libc::NF_INET_FORWARD as isize,
    Output = libc::NF_INET_LOCAL_OUT as isize,
    Postrouting = libc::NF_INET_POST_ROUTING as isize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Base {
    kind: &'static str,
    hook: Hook,
    priority: i32,
}

/// A chain.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain<'a> {
    pub table: Table<'a>,
    pub name: &'a str,
    base: Option<Base>,
    comment: Option<&'a str>,
}

impl<'a> Chain<'a> {
    /// `type filter hook .. priority ..`
    pub const fn filter(self, hook: Hook, priority: i32) -> Chain<'a> {
        Chain { base: Some(Base { kind: "filter", hook, priority }), ..self }
    }

    /// `type nat hook .. priority ..`
    pub const fn nat(self, hook: Hook, priority: i32) -> Chain<'a> {
        Chain { base: Some(Base { kind: "nat", hook, priority }), ..self }
    }

    /// With a comment (Linux 5.10).
    pub const fn comment(self, text: &'a str) -> Chain<'a> {
        Chain { comment: Some(text), ..self }
    }
}

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.table, self.name)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum DataType<'a> {
    Values(&'a [Type]),
    Verdict,
}

/// A set, or a map: a set whose elements have data.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Set<'a> {
    pub table: Table<'a>,
    pub(super) name: &'a str,
    pub(super) key: &'a [Type],
    pub(super) data: Option<DataType<'a>>,
}

impl fmt::Display for Set<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.data.is_some() { "map" } else { "set" };
        write!(f, "{kind} {} {}", self.table, self.name)
    }
}

/// A table, chain or set as the kernel's messages have it.
#[derive(Debug)]
pub struct Object {
    /// `NFT_MSG_NEW..` with the attributes that name the object; `NFT_MSG_GET..` and `NFT_MSG_DEL..`
    /// are the next two types.
    pub(super) request: Request,
    /// The other attributes for creating the object.
    pub(super) settings: Attributes,
    /// Kind and name, for an error.
    pub(super) text: String,
}

impl From<Table<'_>> for Object {
    fn from(table: Table<'_>) -> Object {
        let mut settings = Attributes::new();
        settings.be32(NFTA_TABLE_FLAGS, 0);
        write_comment(&mut settings, NFTA_TABLE_USERDATA, table.comment);
        let request = request(NFT_MSG_NEWTABLE, table);
        Object { request, settings, text: format!("table {table}") }
    }
}

impl From<Chain<'_>> for Object {
    fn from(chain: Chain<'_>) -> Object {
        let mut settings = Attributes::new();
        if let Some(Base { kind, hook, priority }) = chain.base {
            settings.nest(NFTA_CHAIN_HOOK, |list| {
                list.be32(NFTA_HOOK_HOOKNUM, hook as u32).be32(NFTA_HOOK_PRIORITY, priority)
            });
            settings.text(NFTA_CHAIN_TYPE, kind);
        }
        write_comment(&mut settings, NFTA_CHAIN_USERDATA, chain.comment);
        let mut request = request(NFT_MSG_NEWCHAIN, chain.table);
        request.body.text(NFTA_CHAIN_NAME, chain.name);
        Object { request, settings, text: format!("chain {chain}") }
    }
}

impl From<Set<'_>> for Object {
    fn from(set: Set<'_>) -> Object {
        let mut settings = Attributes::new();
        settings.be32(NFTA_SET_FLAGS, if set.data.is_some() { NFT_SET_MAP } else { 0 });
        settings.be32(NFTA_SET_KEY_TYPE, type_number(set.key));
        settings.be32(NFTA_SET_KEY_LEN, length(set.key));
        // For nft: the byte orders for printing keys and data.
        let mut userdata = Vec::new();
        write_userdata(0, &byteorder(set.key).to_ne_bytes(), &mut userdata);
        if let Some(data) = set.data {
            let (number, length, byteorder) = match data {
                DataType::Values(types) => (type_number(types), length(types), byteorder(types)),
                DataType::Verdict => (NFT_DATA_VERDICT, 0, 0),
            };
            settings.be32(NFTA_SET_DATA_TYPE, number).be32(NFTA_SET_DATA_LEN, length);
            write_userdata(1, &byteorder.to_ne_bytes(), &mut userdata);
        }
        settings.bytes(NFTA_SET_USERDATA, &userdata);
        let mut request = request(NFT_MSG_NEWSET, set.table);
        request.body.text(NFTA_SET_NAME, set.name);
        Object { request, settings, text: set.to_string() }
    }
}

/// A request that names a table.
pub(super) fn request(message: u16, table: Table<'_>) -> Request {
    let mut request = Request::netfilter(kind(message), table.family as u8);
    request.body.text(NFTA_TABLE_NAME, table.name);
    request
}

/// A request for rules of a chain.
pub(super) fn rule_request(message: u16, chain: Chain<'_>) -> Request {
    let mut request = request(message, chain.table);
    request.body.text(NFTA_RULE_CHAIN, chain.name);
    request
}

/// A request for elements of a set.
pub(super) fn element_request(message: u16, set: Set<'_>) -> Request {
    let mut request = request(message, set.table);
    request.body.text(NFTA_SET_ELEM_LIST_SET, set.name);
    request
}

/// The verdict on a packet: `NF_*` or `NFT_*`, and the chain of a jump.
#[must_use]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub(super) code: c_int,
    pub(super) chain: Option<String>,
}

impl Verdict {
    /// Ends this base chain; later chains can still drop the packet.
    pub const ACCEPT: Verdict = Verdict { code: NF_ACCEPT, chain: None };
    pub const DROP: Verdict = Verdict { code: NF_DROP, chain: None };
    /// Continues with the next rule.
    pub const CONTINUE: Verdict = Verdict { code: NFT_CONTINUE, chain: None };
    /// Returns to the calling chain.
    pub const RETURN: Verdict = Verdict { code: NFT_RETURN, chain: None };

    /// Continues in another chain, and returns.
    pub fn jump(chain: impl Into<String>) -> Verdict {
        Verdict { code: NFT_JUMP, chain: Some(chain.into()) }
    }

    /// Continues in another chain, without returning.
    pub fn goto(chain: impl Into<String>) -> Verdict {
        Verdict { code: NFT_GOTO, chain: Some(chain.into()) }
    }

    /// The verdict in data.
    pub(super) fn read(data: Attr<'_>) -> Option<Verdict> {
        let verdict = data.find(NFTA_DATA_VERDICT)?;
        let code = verdict.find(NFTA_VERDICT_CODE)?.be32()?.cast_signed();
        Some(Verdict { code, chain: verdict.find(NFTA_VERDICT_CHAIN).map(Attr::text) })
    }

    /// The chain of a jump or goto.
    pub fn chain(&self) -> Option<&str> {
        self.chain.as_deref()
    }

    pub(super) fn write<'a>(&self, list: &'a mut Attributes) -> &'a mut Attributes {
        list.nest(NFTA_DATA_VERDICT, |verdict| {
            verdict.be32(NFTA_VERDICT_CODE, self.code);
            match &self.chain {
                Some(chain) => verdict.text(NFTA_VERDICT_CHAIN, chain),
                None => verdict,
            }
        })
    }
}

/// The data of an element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// Of a map of values.
    Values(Key),
    /// Of a verdict map.
    Verdict(Verdict),
}

/// The comment of [sentinels](Set::sentinel), which differs from all comments of owners.
pub(super) const SENTINEL: &str = "cnibox: not flushed";

impl Set<'static> {
    /// The element with this key, without data.
    pub fn element(self, key: impl Into<Key>) -> Element {
        Element { set: self, key: key.into(), data: None, comment: None }
    }

    /// An element that no packet matches: while it exists, the set has not been flushed.
    pub fn sentinel(self) -> Element {
        let unmatched = |types: &[Type]| Key(types.iter().map(|part| part.unmatched()).collect());
        let data = self.data.map(|data| match data {
            DataType::Values(types) => Data::Values(unmatched(types)),
            DataType::Verdict => Data::Verdict(Verdict::CONTINUE),
        });
        Element { data, ..self.element(unmatched(self.key)).comment(SENTINEL) }
    }
}

/// An element of a set or map, made by [`Set::element`].
#[must_use]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Element {
    pub set: Set<'static>,
    pub key: Key,
    /// Of a map.
    pub data: Option<Data>,
    pub comment: Option<String>,
}

impl Element {
    /// `: value`, for a map.
    pub fn to(mut self, value: impl Into<Key>) -> Element {
        self.data = Some(Data::Values(value.into()));
        self
    }

    /// `: verdict`, for a verdict map.
    pub fn verdict(mut self, verdict: Verdict) -> Element {
        self.data = Some(Data::Verdict(verdict));
        self
    }

    pub fn comment(mut self, text: impl Into<String>) -> Element {
        self.comment = Some(text.into());
        self
    }

    /// The chain of a `jump` or `goto`.
    pub fn leads_to(&self) -> Option<&str> {
        let Some(Data::Verdict(verdict)) = &self.data else { return None };
        verdict.chain.as_deref()
    }

    /// A request for this element; `whole` adds data and comment to the key.
    pub(super) fn request(&self, message: u16, whole: bool) -> Request {
        let mut request = element_request(message, self.set);
        request.body.nest(NFTA_SET_ELEM_LIST_ELEMENTS, |list| {
            list.nest(NFTA_LIST_ELEM, |elem| {
                elem.nest(NFTA_SET_ELEM_KEY, |d| write_value(d, &self.key.bytes()));
                if !whole {
                    return elem;
                }
                if let Some(data) = &self.data {
                    elem.nest(NFTA_SET_ELEM_DATA, |d| match data {
                        Data::Values(values) => write_value(d, &values.bytes()),
                        Data::Verdict(verdict) => verdict.write(d),
                    });
                }
                write_comment(elem, NFTA_SET_ELEM_USERDATA, self.comment.as_deref())
            })
        });
        request
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.key.fmt(f)
    }
}

/// Writes a value as data.
pub(super) fn write_value<'a>(list: &'a mut Attributes, bytes: &[u8]) -> &'a mut Attributes {
    list.bytes(NFTA_DATA_VALUE, bytes)
}

/// The type of a comment in user data.
const COMMENT: u8 = 0;

/// The maximum length of a comment in nft, in bytes.
const LONGEST: usize = 128;

/// Appends user data of nft, which the kernel stores with an object: a type, a length, the value.
fn write_userdata(kind: u8, value: &[u8], list: &mut Vec<u8>) {
    list.extend([kind, u8::try_from(value.len()).unwrap_or(u8::MAX)]);
    list.extend_from_slice(value);
}

/// A comment, truncated to the length that nft allows.
pub fn cut(text: &str) -> &str {
    let end = (0..=text.len().min(LONGEST)).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

/// Writes a comment, if there is one, as the user data of an object.
pub(super) fn write_comment<'a>(
    body: &'a mut Attributes,
    kind: u16,
    comment: Option<&str>,
) -> &'a mut Attributes {
    let Some(comment) = comment else { return body };
    let mut list = Vec::new();
    write_userdata(COMMENT, &[cut(comment).as_bytes(), &[0]].concat(), &mut list);
    body.bytes(kind, &list)
}

/// The comment in the user data of an object.
pub(super) fn read_comment(mut list: &[u8]) -> Option<String> {
    while let [kind, length, rest @ ..] = list {
        let (value, after) = rest.split_at_checked(usize::from(*length))?;
        if *kind == COMMENT {
            let value = value.strip_suffix(&[0]).unwrap_or(value);
            return Some(String::from_utf8_lossy(value).into_owned());
        }
        list = after;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::super::attribute::find;
    use super::*;

    fn comment(text: &str) -> Vec<u8> {
        let mut body = Attributes::new();
        write_comment(&mut body, 1, Some(text));
        find(body.as_bytes(), 1).unwrap().value.to_vec()
    }

    #[test]
    fn a_comment_is_written_as_nft_does() {
        assert_eq!(comment("el"), [0, 3, b'e', b'l', 0]);
        assert_eq!(read_comment(&comment("el")), Some("el".to_owned()));
        assert_eq!(read_comment(&[1, 4, 1, 0, 0, 0, 0, 1, b'x']), Some("x".to_owned()));
        assert_eq!(read_comment(&[0, 9, b'x']), None);
    }

    #[test]
    fn a_long_comment_is_cut_between_characters() {
        let long = format!("{}\u{e4}", "x".repeat(127));
        assert_eq!(read_comment(&comment(&long)), Some("x".repeat(127)));
    }
}
