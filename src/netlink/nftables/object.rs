//! Tables, chains, sets and maps: constants that name an object and say how it is made.

use std::fmt;

use nix::libc;

use super::super::attribute::Attributes;
use super::super::family;
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::userdata;
use super::value::{Type, byteorder, length, type_number};

/// Priority of chains that change destinations; `dstnat` to nft.
pub const DSTNAT: i32 = NF_IP_PRI_NAT_DST;
/// Priority of chains that change sources; `srcnat` to nft.
pub const SRCNAT: i32 = NF_IP_PRI_NAT_SRC;
/// Priority of filters; `filter` to nft.
pub const FILTER: i32 = NF_IP_PRI_FILTER;
/// Priority before connection tracking; `raw` to nft.
pub const RAW: i32 = NF_IP_PRI_RAW;

/// What traffic a table sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// IPv4 and IPv6.
    Inet = NFPROTO_INET as isize,
    /// IPv4.
    Ip = NFPROTO_IPV4 as isize,
    /// IPv6.
    Ip6 = NFPROTO_IPV6 as isize,
    /// Frames that pass a bridge.
    Bridge = NFPROTO_BRIDGE as isize,
}

impl From<family::Family> for Family {
    fn from(family: family::Family) -> Family {
        match family {
            family::Family::V4 => Family::Ip,
            family::Family::V6 => Family::Ip6,
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

    /// With a comment, where the kernel (5.10) keeps one.
    pub const fn comment(self, text: &'a str) -> Table<'a> {
        Table { comment: Some(text), ..self }
    }

    /// The chain `name` of this table; regular unless it is made a base chain.
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
    /// The table that it is in.
    pub table: Table<'a>,
    /// The name without the table.
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

    /// With a comment, where the kernel (5.10) keeps one.
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
    /// The table that it is in.
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
    pub(super) family: Family,
    /// `NFT_MSG_NEW..`, behind which are `NFT_MSG_GET..` and `NFT_MSG_DEL..`.
    pub(super) message: u16,
    /// The attributes that name it.
    pub(super) name: Attributes,
    /// The attributes that say how it is made.
    pub(super) made: Attributes,
    /// Kind and name, for an error.
    pub(super) text: String,
}

impl From<Table<'_>> for Object {
    fn from(table: Table<'_>) -> Object {
        let (mut name, mut made) = (Attributes::new(), Attributes::new());
        name.text(NFTA_TABLE_NAME, table.name);
        made.be32(NFTA_TABLE_FLAGS, 0);
        if let Some(comment) = table.comment {
            made.bytes(NFTA_TABLE_USERDATA, &userdata::comment(comment));
        }
        let (family, text) = (table.family, format!("table {table}"));
        Object { family, message: NFT_MSG_NEWTABLE, name, made, text }
    }
}

impl From<Chain<'_>> for Object {
    fn from(chain: Chain<'_>) -> Object {
        let name = named(chain.table, NFTA_CHAIN_NAME, chain.name);
        let mut made = Attributes::new();
        if let Some(Base { kind, hook, priority }) = chain.base {
            made.nest(NFTA_CHAIN_HOOK, |list| {
                list.be32(NFTA_HOOK_HOOKNUM, hook as u32).be32(NFTA_HOOK_PRIORITY, priority);
            });
            made.text(NFTA_CHAIN_TYPE, kind);
        }
        if let Some(comment) = chain.comment {
            made.bytes(NFTA_CHAIN_USERDATA, &userdata::comment(comment));
        }
        let text = format!("chain {chain}");
        Object { family: chain.table.family, message: NFT_MSG_NEWCHAIN, name, made, text }
    }
}

impl From<Set<'_>> for Object {
    fn from(set: Set<'_>) -> Object {
        let mut made = Attributes::new();
        let flags = if set.data.is_some() { NFT_SET_MAP } else { 0 };
        made.be32(NFTA_SET_FLAGS, flags);
        made.be32(NFTA_SET_KEY_TYPE, type_number(set.key));
        made.be32(NFTA_SET_KEY_LEN, length(set.key));
        let data = set.data.map(|data| match data {
            DataType::Values(types) => (type_number(types), length(types), byteorder(types)),
            DataType::Verdict => (NFT_DATA_VERDICT, 0, 0),
        });
        if let Some((number, length, _)) = data {
            made.be32(NFTA_SET_DATA_TYPE, number).be32(NFTA_SET_DATA_LEN, length);
        }
        let userdata = userdata::set(byteorder(set.key), data.map(|data| data.2));
        made.bytes(NFTA_SET_USERDATA, &userdata);
        let name = named(set.table, NFTA_SET_NAME, set.name);
        let (family, text) = (set.table.family, set.to_string());
        Object { family, message: NFT_MSG_NEWSET, name, made, text }
    }
}

/// The attributes that name a table, and something in it.
pub(super) fn named(table: Table<'_>, kind: u16, name: &str) -> Attributes {
    let mut body = Attributes::new();
    body.text(NFTA_TABLE_NAME, table.name).text(kind, name);
    body
}
