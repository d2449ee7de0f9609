//! Attributes of netlink messages: writing for traffic control and netfilter, reading for all replies.
//!
//! Replies are read attribute by attribute, and unknown or malformed attributes are skipped
//! (docs/decisions/0002-netlink-answers-as-bytes.md). Why there are no types for messages:
//! docs/decisions/0004-netfilter-messages.md.

use std::net::IpAddr;

use rtnetlink::packet_core::{NLA_F_NESTED, NLA_HEADER_SIZE, NlasIterator};

/// The body of a request: the fixed header of its type, then attributes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Attributes(Vec<u8>);

impl Attributes {
    pub(super) fn new() -> Attributes {
        Attributes::default()
    }

    /// Attributes after a fixed header, whose length is a multiple of 4.
    pub(super) fn after(header: impl Into<Vec<u8>>) -> Attributes {
        Attributes(header.into())
    }

    pub(super) fn bytes(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        let at = self.begin(kind);
        self.0.extend_from_slice(value);
        self.end(at)
    }

    pub(super) fn u8(&mut self, kind: u16, value: u8) -> &mut Self {
        self.bytes(kind, &[value])
    }

    /// Signed or unsigned 32 bits in network byte order, as netfilter expects; an excessive value is
    /// replaced by one that the kernel refuses.
    pub(super) fn be32(&mut self, kind: u16, value: impl TryInto<i64>) -> &mut Self {
        self.bytes(kind, &value.try_into().unwrap_or(i64::MAX).to_be_bytes()[4..])
    }

    /// In host byte order; nothing for `None`.
    pub(super) fn u32(&mut self, kind: u16, value: impl Into<Option<u32>>) -> &mut Self {
        match value.into() {
            Some(value) => self.bytes(kind, &value.to_ne_bytes()),
            None => self,
        }
    }

    /// An address; nothing for `None`.
    pub(super) fn ip(&mut self, kind: u16, addr: impl Into<Option<IpAddr>>) -> &mut Self {
        match addr.into() {
            Some(IpAddr::V4(addr)) => self.bytes(kind, &addr.octets()),
            Some(IpAddr::V6(addr)) => self.bytes(kind, &addr.octets()),
            None => self,
        }
    }

    /// A string, with the terminating NUL that the kernel expects.
    pub(super) fn text(&mut self, kind: u16, value: &str) -> &mut Self {
        let at = self.begin(kind);
        self.0.extend_from_slice(value.as_bytes());
        self.0.push(0);
        self.end(at)
    }

    /// An attribute that contains the attributes written by `fill`.
    pub(super) fn nest(
        &mut self,
        kind: u16,
        fill: impl FnOnce(&mut Attributes) -> &mut Attributes,
    ) -> &mut Self {
        let at = self.begin(kind | NLA_F_NESTED);
        fill(self);
        self.end(at)
    }

    /// Appends encoded attributes, or a fixed header inside an attribute.
    pub(super) fn raw(&mut self, attributes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(attributes);
        self
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn begin(&mut self, kind: u16) -> usize {
        let at = self.0.len();
        self.0.extend_from_slice(&[0; 2]);
        self.0.extend_from_slice(&kind.to_ne_bytes());
        at
    }

    /// Writes the length of the attribute that begins at `at`, without the padding, and pads. An excessive
    /// length is replaced by one that the kernel refuses.
    fn end(&mut self, at: usize) -> &mut Self {
        let length = u16::try_from(self.0.len() - at).unwrap_or(u16::MAX);
        self.0[at..at + 2].copy_from_slice(&length.to_ne_bytes());
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }
}

/// An attribute of a reply. Numbers and addresses are `None` when the value has another size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attr<'a> {
    pub(super) kind: u16,
    pub(super) value: &'a [u8],
}

impl<'a> Attr<'a> {
    pub(super) fn u8(self) -> Option<u8> {
        self.value.first().copied()
    }

    pub(super) fn u16(self) -> Option<u16> {
        self.value.try_into().ok().map(u16::from_ne_bytes)
    }

    pub(super) fn u32(self) -> Option<u32> {
        self.value.try_into().ok().map(u32::from_ne_bytes)
    }

    pub(super) fn be32(self) -> Option<u32> {
        self.value.try_into().ok().map(u32::from_be_bytes)
    }

    pub(super) fn i32(self) -> Option<i32> {
        self.value.try_into().ok().map(i32::from_ne_bytes)
    }

    pub(super) fn ip(self) -> Option<IpAddr> {
        ip(self.value)
    }

    /// A string, without the terminating NUL.
    pub(super) fn text(self) -> String {
        let end = self.value.iter().position(|byte| *byte == 0).unwrap_or(self.value.len());
        String::from_utf8_lossy(&self.value[..end]).into_owned()
    }

    /// The attributes that this attribute contains.
    pub(super) fn nested(self) -> impl Iterator<Item = Attr<'a>> {
        attrs(self.value)
    }

    /// The first nested attribute of this type.
    pub(super) fn find(self, kind: u16) -> Option<Attr<'a>> {
        find(self.value, kind)
    }
}

/// The attributes in `bytes`, up to the first with an invalid length.
pub(super) fn attrs(bytes: &[u8]) -> impl Iterator<Item = Attr<'_>> {
    NlasIterator::new(bytes).map_while(Result::ok).map(|nla| {
        let (kind, end) = (nla.kind(), usize::from(nla.length()));
        Attr { kind, value: &nla.into_inner()[NLA_HEADER_SIZE..end] }
    })
}

/// The first attribute of this type.
pub(super) fn find(bytes: &[u8], kind: u16) -> Option<Attr<'_>> {
    attrs(bytes).find(|attr| attr.kind == kind)
}

/// The 32 bits at an offset of a structure, in host byte order.
pub(super) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

/// An address of 4 or 16 bytes.
pub fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = || <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from);
    <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from).or_else(v4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_back() {
        let mut list = Attributes::new();
        list.text(1, "abc").nest(2, |inner| inner.be32(1, 7).u8(2, 9));
        let bytes = list.as_bytes();
        assert_eq!(bytes.len(), 8 + 4 + 8 + 8);
        let read: Vec<_> = attrs(bytes).collect();
        assert_eq!((read[0].kind, read[0].text()), (1, "abc".to_owned()));
        let inner: Vec<_> = read[1].nested().collect();
        assert_eq!((inner[0].value, inner[1].value), (&[0, 0, 0, 7][..], &[9][..]));
    }

    #[test]
    fn attributes_are_read_up_to_the_first_malformed_one() {
        // u32 of type 4; a string of type 3 with padding; a length beyond the end.
        let bytes =
            [8, 0, 4, 0, 0xdc, 5, 0, 0, 7, 0, 3, 0x80, b'l', b'o', 0, 0, 200, 0, 1, 0, 1, 2, 3, 4];
        let read: Vec<Attr<'_>> = attrs(&bytes).collect();
        assert_eq!(read.len(), 2);
        assert_eq!(
            (read[0].kind, read[0].u32(), read[0].ip()),
            (4, Some(1500), ip(&[0xdc, 5, 0, 0]))
        );
        assert_eq!((read[1].kind, read[1].text(), read[1].u32()), (3, "lo".to_owned(), None));
    }
}
