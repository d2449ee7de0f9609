//! Elements of sets and maps: what is looked up, and what is found.

use std::fmt;

use ipnet::IpNet;

use super::super::attribute::Attributes;
use super::expr::{Verdict, write_value};
use super::object::Set;
use super::userdata;
use super::value::Key;

pub(super) const ELEM_KEY: u16 = 1;
pub(super) const ELEM_DATA: u16 = 2;
pub(super) const ELEM_FLAGS: u16 = 3;
pub(super) const ELEM_USERDATA: u16 = 6;
pub(super) const ELEM_KEY_END: u16 = 10;

/// The flag of an element that only ends the range before it.
pub(super) const INTERVAL_END: u32 = 1;

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
    /// What is looked up; the first of a range.
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

    /// All addresses of a network, in a set with intervals.
    pub fn net(net: IpNet) -> Element {
        Element::new(net.network()).until(net.broadcast())
    }

    /// All keys up to and with `last`, in a set with intervals.
    #[must_use]
    pub fn until(mut self, last: impl Into<Key>) -> Element {
        self.end = Some(last.into());
        self
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
    /// The list of the elements that the kernel knows this as: a range of plain keys is two.
    pub(super) fn write(&self, set: Set<'_>, list: &mut Attributes) {
        let ranges = set.is_interval();
        let plain = set.key.len() == 1;
        let end = self.end.as_ref().unwrap_or(&self.key);
        list.nest(LIST_ELEM, |elem| {
            elem.nest(ELEM_KEY, |d| write_value(d, &self.key.bytes()));
            if ranges && !plain {
                elem.nest(ELEM_KEY_END, |d| write_value(d, &end.bytes()));
            }
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
        // A range up to the largest key has no end.
        if let Some(behind) = successor(end.bytes()).filter(|_| ranges && plain) {
            list.nest(LIST_ELEM, |elem| {
                elem.nest(ELEM_KEY, |d| write_value(d, &behind));
                elem.be32(ELEM_FLAGS, INTERVAL_END);
            });
        }
    }

    /// The key alone: what deletes or finds the element.
    pub(super) fn bare(&self) -> Element {
        Element { data: None, comment: None, ..self.clone() }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.key.fmt(f)?;
        self.end.as_ref().filter(|end| **end != self.key).map_or(Ok(()), |end| write!(f, "-{end}"))
    }
}

/// The next larger number of the same length.
fn successor(mut bytes: Vec<u8>) -> Option<Vec<u8>> {
    let at = bytes.iter().rposition(|byte| *byte != u8::MAX)?;
    bytes[at] += 1;
    bytes[at + 1..].fill(0);
    Some(bytes)
}

/// The next smaller number of the same length.
pub(super) fn predecessor(mut bytes: Vec<u8>) -> Option<Vec<u8>> {
    let at = bytes.iter().rposition(|byte| *byte != 0)?;
    bytes[at] -= 1;
    bytes[at + 1..].fill(u8::MAX);
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_carry() {
        assert_eq!(successor(vec![1, 255]), Some(vec![2, 0]));
        assert_eq!(successor(vec![255, 255]), None);
        assert_eq!(predecessor(vec![2, 0]), Some(vec![1, 255]));
        assert_eq!(predecessor(vec![0, 0]), None);
    }

    #[test]
    fn ranges_are_shown() {
        let element = Element::net("10.0.0.0/8".parse().unwrap());
        assert_eq!(element.to_string(), "10.0.0.0-10.255.255.255");
        assert_eq!(Element::new(80).to_string(), "80");
    }
}
