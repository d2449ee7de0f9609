//! Elements of sets and maps: what is looked up, and what is found.

use std::fmt;

use super::super::attribute::Attributes;
use super::expr::{Verdict, write_value};
use super::object::{DataType, Set, named};
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::userdata;
use super::value::{Key, Type};

/// An element's datum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// Of a map of values.
    Values(Key),
    /// Of a verdict map.
    Verdict(Verdict),
}

/// The comment of [sentinels](Set::sentinel); no owner's begins like this.
pub(super) const SENTINEL: &str = "cnibox: not flushed";

impl Set<'static> {
    /// The element with this key, without data.
    pub fn element(self, key: impl Into<Key>) -> Element {
        Element { set: self, key: key.into(), data: None, comment: None }
    }

    /// An element that no packet matches: as long as it is there the set was not flushed.
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
    /// The set or map that it is in.
    pub set: Set<'static>,
    /// What is looked up.
    pub key: Key,
    /// What a map gives.
    pub data: Option<Data>,
    /// The comment that nft shows.
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

    /// With a comment.
    pub fn comment(mut self, text: impl Into<String>) -> Element {
        self.comment = Some(text.into());
        self
    }

    /// The chain that it sends packets to.
    pub fn leads_to(&self) -> Option<&str> {
        let Some(Data::Verdict(verdict)) = &self.data else { return None };
        verdict.chain.as_deref()
    }

    /// The attributes that find or delete it, or, with data and comment, add it.
    pub(super) fn write(&self, whole: bool) -> Attributes {
        let mut body = named(self.set.table, NFTA_SET_ELEM_LIST_SET, self.set.name);
        let fill = |elem: &mut Attributes| {
            elem.nest(NFTA_SET_ELEM_KEY, |d| write_value(d, &self.key.bytes()));
            match self.data.as_ref().filter(|_| whole) {
                Some(Data::Values(values)) => {
                    elem.nest(NFTA_SET_ELEM_DATA, |d| write_value(d, &values.bytes()));
                }
                Some(Data::Verdict(verdict)) => {
                    elem.nest(NFTA_SET_ELEM_DATA, |d| verdict.write(d));
                }
                None => {}
            }
            if let Some(comment) = self.comment.as_ref().filter(|_| whole) {
                elem.bytes(NFTA_SET_ELEM_USERDATA, &userdata::comment(comment));
            }
        };
        body.nest(NFTA_SET_ELEM_LIST_ELEMENTS, |list| {
            list.nest(NFTA_LIST_ELEM, fill);
        });
        body
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.key.fmt(f)
    }
}
