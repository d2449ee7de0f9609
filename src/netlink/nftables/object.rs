//! Tables, chains, sets and maps: constants that name an object and say how it is made.

use std::fmt;

use super::element::Element;
use super::expr::Verdict;
use super::value::{Key, Type};

/// Priority of chains that change destinations; `dstnat` to nft.
pub const DSTNAT: i32 = -100;
/// Priority of chains that change sources; `srcnat` to nft.
pub const SRCNAT: i32 = 100;
/// Priority of filters; `filter` to nft.
pub const FILTER: i32 = 0;
/// Priority before connection tracking; `raw` to nft.
pub const RAW: i32 = -300;

/// What traffic a table sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// IPv4 and IPv6.
    Inet,
    /// IPv4.
    Ip,
    /// IPv6.
    Ip6,
    /// Frames that pass a bridge.
    Bridge,
}

impl Family {
    pub(super) const fn number(self) -> u8 {
        match self {
            Family::Inet => 1,
            Family::Ip => 2,
            Family::Bridge => 7,
            Family::Ip6 => 10,
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
    #[must_use]
    pub const fn comment(mut self, text: &'a str) -> Table<'a> {
        self.comment = Some(text);
        self
    }

    /// The chain `name` of this table; regular unless it is made a base chain.
    pub const fn chain(self, name: &'a str) -> Chain<'a> {
        Chain { table: self, name, base: None, comment: None }
    }

    /// The set `name` of this table.
    pub const fn set(self, name: &'a str, key: &'a [Type]) -> Set<'a> {
        Set { table: self, name, key, data: None, comment: None }
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

/// Where in a packet's way a base chain is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Just arrived.
    Prerouting,
    /// For this host.
    Input,
    /// Passing through.
    Forward,
    /// Made by this host.
    Output,
    /// About to leave.
    Postrouting,
}

impl Hook {
    pub(super) const fn number(self) -> u32 {
        self as u32
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Base {
    pub(super) kind: &'static str,
    pub(super) hook: Hook,
    pub(super) priority: i32,
}

/// A chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain<'a> {
    pub(super) table: Table<'a>,
    pub(super) name: &'a str,
    pub(super) base: Option<Base>,
    pub(super) comment: Option<&'a str>,
}

impl<'a> Chain<'a> {
    /// `type filter hook .. priority ..`
    #[must_use]
    pub const fn filter(self, hook: Hook, priority: i32) -> Chain<'a> {
        self.base("filter", hook, priority)
    }

    /// `type nat hook .. priority ..`
    #[must_use]
    pub const fn nat(self, hook: Hook, priority: i32) -> Chain<'a> {
        self.base("nat", hook, priority)
    }

    const fn base(mut self, kind: &'static str, hook: Hook, priority: i32) -> Chain<'a> {
        self.base = Some(Base { kind, hook, priority });
        self
    }

    /// With a comment, where the kernel (5.10) keeps one.
    #[must_use]
    pub const fn comment(mut self, text: &'a str) -> Chain<'a> {
        self.comment = Some(text);
        self
    }

    /// The table that it is in.
    pub const fn table(&self) -> Table<'a> {
        self.table
    }

    /// The name without the table.
    pub const fn name(&self) -> &'a str {
        self.name
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

const SET_MAP: u32 = 0x8;

/// The comment of [sentinels](Set::sentinel); no owner's begins like this.
pub(super) const SENTINEL: &str = "cnibox: not flushed";

/// A set, or a map: a set whose elements have data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Set<'a> {
    pub(super) table: Table<'a>,
    pub(super) name: &'a str,
    pub(super) key: &'a [Type],
    pub(super) data: Option<DataType<'a>>,
    pub(super) comment: Option<&'a str>,
}

impl<'a> Set<'a> {
    /// With a comment.
    #[must_use]
    pub const fn comment(mut self, text: &'a str) -> Set<'a> {
        self.comment = Some(text);
        self
    }

    /// An element that no packet matches: as long as it is there the set was not flushed.
    pub fn sentinel(&self) -> Element {
        let key = |types: &[Type]| Key(types.iter().map(|part| part.nobody()).collect());
        let element = Element::new(key(self.key)).comment(SENTINEL);
        match self.data {
            Some(DataType::Values(types)) => element.to(key(types)),
            Some(DataType::Verdict) => element.verdict(Verdict::Continue),
            None => element,
        }
    }

    pub(super) fn flags(&self) -> u32 {
        if self.data.is_some() { SET_MAP } else { 0 }
    }

    /// The table that it is in.
    pub const fn table(&self) -> Table<'a> {
        self.table
    }

    /// Whether it is a map to verdicts.
    pub const fn is_vmap(&self) -> bool {
        matches!(self.data, Some(DataType::Verdict))
    }
}

impl fmt::Display for Set<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.data.is_some() { "map" } else { "set" };
        write!(f, "{kind} {} {}", self.table, self.name)
    }
}
