//! Traffic control: queueing disciplines (qdiscs) that shape what leaves a link, and filters that
//! lead packets elsewhere.
//!
//! | file | |
//! | --- | --- |
//! | `qdisc.rs` | the qdiscs of a link |
//! | `filter.rs` | the filters of a qdisc |

mod filter;
mod qdisc;
#[cfg(test)]
mod tests;

use std::fmt;

pub use self::filter::{Filter, FilterInfo, Match};
pub use self::qdisc::{Hook, Qdisc, QdiscInfo, TICKS_PER_8_MICROSECONDS, Tbf};
use super::attribute::Attributes;
use super::packet::{Attr, Packet, attrs};

const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;

/// The name of a qdisc (`1:`), class (`1:30`) or filter (`800::800`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Handle(pub(super) u32);

impl Handle {
    /// The handle of a qdisc if `minor` is 0, else of one of its classes.
    pub const fn new(major: u16, minor: u16) -> Handle {
        Handle((major as u32) << 16 | minor as u32)
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = (self.0 >> 16, self.0 & 0xffff);
        write!(f, "{major:x}:")?;
        if minor == 0 { Ok(()) } else { write!(f, "{minor:x}") }
    }
}

/// `struct tcmsg`, which all messages begin with.
#[derive(Clone, Copy, Debug, Default)]
struct Header {
    index: u32,
    handle: u32,
    parent: u32,
    info: u32,
}

/// Length of `struct tcmsg`.
const HEADER_LEN: usize = 20;

impl Header {
    /// A message with this header.
    fn message(self, kind: u16, attributes: Attributes) -> Packet {
        let mut body = vec![0; 4];
        for word in [self.index, self.handle, self.parent, self.info] {
            body.extend_from_slice(&word.to_ne_bytes());
        }
        body.extend(attributes.into_bytes());
        Packet { kind, body }
    }

    /// The header of an answer, and its attributes.
    fn read(body: &[u8]) -> Option<(Header, impl Iterator<Item = Attr<'_>>)> {
        let rest = body.get(HEADER_LEN..)?;
        let word = |at: usize| {
            let bytes = body.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
            bytes.map(u32::from_ne_bytes).unwrap_or_default()
        };
        let header = Header { index: word(4), handle: word(8), parent: word(12), info: word(16) };
        Some((header, attrs(rest)))
    }
}
