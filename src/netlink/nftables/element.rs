//! Elements of sets and maps: what is looked up, and what is found.

use std::fmt;

use super::super::attribute::Attributes;
use super::expr::{Verdict, write_value};
use super::userdata;
use super::value::Key;

pub(super) const ELEM_KEY: u16 = 1;
pub(super) const ELEM_DATA: u16 = 2;
pub(super) const ELEM_USERDATA: u16 = 6;
pub(super) const ELEM_KEY_END: u16 = 10;

const LIST_ELEM: u16 = 1;

/// An element's datum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// Of a map of values.
    Values(Key),
    /// Of a verdict map.
    Verdict(Verdict),
}

/// An element of a set or map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Element {
    /// What is looked up; the first of a range, such as others may have made.
    pub key: Key,
    /// The last of a range.
    pub end: Option<Key>,
    /// What a map gives.
    pub data: Option<Data>,
    /// The comment that nft shows.
    pub comment: Option<String>,
}

impl Element {
    /// An element of a set.
    pub fn new(key: impl Into<Key>) -> Element {
        Element { key: key.into(), end: None, data: None, comment: None }
    }

    /// `: value`, for a map.
    #[must_use]
    pub fn to(mut self, value: impl Into<Key>) -> Element {
        self.data = Some(Data::Values(value.into()));
        self
    }

    /// `: verdict`, for a verdict map.
    #[must_use]
    pub fn verdict(mut self, verdict: Verdict) -> Element {
        self.data = Some(Data::Verdict(verdict));
        self
    }

    /// The chain that it sends packets to.
    pub fn leads_to(&self) -> Option<&str> {
        match &self.data {
            Some(Data::Verdict(Verdict::Goto(chain) | Verdict::Jump(chain))) => Some(chain),
            _ => None,
        }
    }

    /// With a comment.
    #[must_use]
    pub fn comment(mut self, text: impl Into<String>) -> Element {
        self.comment = Some(text.into());
        self
    }
}

/// Writing.
impl Element {
    /// As an entry of a list.
    pub(super) fn write(&self, list: &mut Attributes) {
        list.nest(LIST_ELEM, |elem| {
            elem.nest(ELEM_KEY, |d| write_value(d, &self.key.bytes()));
            match &self.data {
                Some(Data::Values(values)) => {
                    elem.nest(ELEM_DATA, |d| write_value(d, &values.bytes()));
                }
                Some(Data::Verdict(verdict)) => {
                    elem.nest(ELEM_DATA, |d| verdict.write(d));
                }
                None => {}
            }
            if let Some(comment) = &self.comment {
                elem.bytes(ELEM_USERDATA, &userdata::comment(comment));
            }
        });
    }

    /// The key alone: what deletes or finds the element.
    pub(super) fn bare(&self) -> Element {
        Element { data: None, comment: None, ..self.clone() }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.key.fmt(f)
    }
}
