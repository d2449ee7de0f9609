//! Attributes of netlink messages: writes those of traffic control and netfilter, reads those of
//! all replies.
//!
//! Replies are read attribute by attribute, and unknown or malformed attributes are skipped
//! (docs/decisions/0002-netlink-answers-as-bytes.md). Why there are no types for messages:
//! docs/decisions/0004-netfilter-messages.md.

use std::net::IpAddr;

use rtnetlink::packet_core::{NLA_F_NESTED, NLA_HEADER_SIZE, NlasIterator};

/// The body of a request: the fixed header of its type, then attributes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AttributeBuilder(Vec<u8>);

impl AttributeBuilder {
    pub(super) fn new() -> AttributeBuilder {
        AttributeBuilder::default()
    }

    /// Attributes after a fixed header, whose length is a multiple of 4.
    pub(super) fn after_header(header: impl Into<Vec<u8>>) -> AttributeBuilder {
        AttributeBuilder(header.into())
    }

    pub(super) fn put_bytes(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        let at = self.begin_attribute(kind);
        self.0.extend_from_slice(value);
        self.end_attribute(at)
    }

    pub(super) fn put_u8(&mut self, kind: u16, value: u8) -> &mut Self {
        self.put_bytes(kind, &[value])
    }

    /// Signed or unsigned 32 bits in network byte order, as netfilter expects; an excessive value
    /// is replaced by one that the kernel refuses.
    pub(super) fn put_u32_be(&mut self, kind: u16, value: impl TryInto<i64>) -> &mut Self {
        self.put_bytes(kind, &value.try_into().unwrap_or(i64::MAX).to_be_bytes()[4..])
    }

    /// In host byte order; nothing for `None`.
    pub(super) fn put_u32(&mut self, kind: u16, value: impl Into<Option<u32>>) -> &mut Self {
        match value.into() {
            Some(value) => self.put_bytes(kind, &value.to_ne_bytes()),
            None => self,
        }
    }

    /// An address; nothing for `None`.
    pub(super) fn put_ip(&mut self, kind: u16, addr: impl Into<Option<IpAddr>>) -> &mut Self {
        match addr.into() {
            Some(IpAddr::V4(addr)) => self.put_bytes(kind, &addr.octets()),
            Some(IpAddr::V6(addr)) => self.put_bytes(kind, &addr.octets()),
            None => self,
        }
    }

    /// A string, with the terminating NUL that the kernel expects.
    pub(super) fn put_text(&mut self, kind: u16, value: &str) -> &mut Self {
        let at = self.begin_attribute(kind);
        self.0.extend_from_slice(value.as_bytes());
        self.0.push(0);
        self.end_attribute(at)
    }

    /// An attribute that contains the attributes written by `fill`.
    pub(super) fn put_nested(
        &mut self,
        kind: u16,
        fill: impl FnOnce(&mut AttributeBuilder) -> &mut AttributeBuilder,
    ) -> &mut Self {
        let at = self.begin_attribute(kind | NLA_F_NESTED);
        fill(self);
        self.end_attribute(at)
    }

    /// Appends encoded attributes, or a fixed header inside an attribute.
    pub(super) fn put_raw(&mut self, attributes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(attributes);
        self
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn begin_attribute(&mut self, kind: u16) -> usize {
        let at = self.0.len();
        let [low, high] = kind.to_ne_bytes();
        self.0.extend_from_slice(&[0, 0, low, high]);
        at
    }

    /// Writes the length of the attribute that begins at `at`, without the padding, and pads. An
    /// excessive length is replaced by one that the kernel refuses.
    fn end_attribute(&mut self, at: usize) -> &mut Self {
        let length = u16::try_from(self.0.len() - at).unwrap_or(u16::MAX);
        self.0[at..at + 2].copy_from_slice(&length.to_ne_bytes());
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }
}

/// An attribute of a reply. Numbers and addresses are `None` when the value has another size.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplyAttribute<'a> {
    pub(super) kind: u16,
    pub(super) value: &'a [u8],
}

impl<'a> ReplyAttribute<'a> {
    pub(super) fn to_u8(self) -> Option<u8> {
        self.value.first().copied()
    }

    pub(super) fn to_u16(self) -> Option<u16> {
        self.value.try_into().ok().map(u16::from_ne_bytes)
    }

    pub(super) fn to_u32(self) -> Option<u32> {
        self.value.try_into().ok().map(u32::from_ne_bytes)
    }

    pub(super) fn to_u32_be(self) -> Option<u32> {
        self.value.try_into().ok().map(u32::from_be_bytes)
    }

    pub(super) fn to_i32(self) -> Option<i32> {
        self.value.try_into().ok().map(i32::from_ne_bytes)
    }

    pub(super) fn to_ip(self) -> Option<IpAddr> {
        ip_from_bytes(self.value)
    }

    /// A string, without the terminating NUL.
    pub(super) fn to_text(self) -> String {
        String::from_utf8_lossy(self.to_bytes()).into_owned()
    }

    /// The bytes before the terminating NUL.
    pub(super) fn to_bytes(self) -> &'a [u8] {
        self.value.split(|byte| *byte == 0).next().unwrap_or_default()
    }

    pub(super) fn nested_attributes(self) -> impl Iterator<Item = ReplyAttribute<'a>> {
        parse_attributes(self.value)
    }

    /// The first nested attribute of this type.
    pub(super) fn find_nested(self, kind: u16) -> Option<ReplyAttribute<'a>> {
        find_attribute(self.value, kind)
    }
}

/// The attributes in `bytes`, up to the first with an invalid length.
pub(super) fn parse_attributes(bytes: &[u8]) -> impl Iterator<Item = ReplyAttribute<'_>> {
    NlasIterator::new(bytes).map_while(Result::ok).map(|nla| {
        let (kind, end) = (nla.kind(), usize::from(nla.length()));
        ReplyAttribute { kind, value: &nla.into_inner()[NLA_HEADER_SIZE..end] }
    })
}

/// Whether `listed` has the attributes that were `sent`, and otherwise only such that are zero: the
/// kernel also lists what was left out.
pub(super) fn are_listed(sent: &[u8], listed: &[u8]) -> bool {
    let mut others: Vec<ReplyAttribute<'_>> = parse_attributes(listed).collect();
    let has_all = NlasIterator::new(sent).map_while(Result::ok).all(|nla| {
        let Some(at) = others.iter().position(|attr| attr.kind == nla.kind()) else { return false };
        let found = others.remove(at).value;
        // Only what is sent has the flag: many lists of the kernel do not.
        if nla.nested_flag() { are_listed(nla.value(), found) } else { nla.value() == found }
    });
    has_all && others.iter().all(|attr| attr.value.iter().all(|byte| *byte == 0))
}

/// The first attribute of this type.
pub(super) fn find_attribute(bytes: &[u8], kind: u16) -> Option<ReplyAttribute<'_>> {
    parse_attributes(bytes).find(|attr| attr.kind == kind)
}

/// The 32 bits at an offset of a structure, in host byte order.
pub(super) fn read_u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

/// An address of 4 or 16 bytes.
pub fn ip_from_bytes(bytes: &[u8]) -> Option<IpAddr> {
    <[u8; 16]>::try_from(bytes)
        .ok()
        .map(IpAddr::from)
        .or_else(|| <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_round_trip() {
        let mut list = AttributeBuilder::new();
        list.put_text(1, "abc").put_nested(2, |inner| inner.put_u32_be(1, 7).put_u8(2, 9));
        let bytes = list.as_bytes();
        assert_eq!(bytes.len(), 8 + 4 + 8 + 8);
        let read: Vec<_> = parse_attributes(bytes).collect();
        assert_eq!((read[0].kind, read[0].to_text()), (1, "abc".to_owned()));
        let inner: Vec<_> = read[1].nested_attributes().collect();
        assert_eq!((inner[0].value, inner[1].value), (&[0, 0, 0, 7][..], &[9][..]));
    }

    #[test]
    fn a_listing_may_have_zeros_that_were_not_sent() {
        let list = |number: u32, flags: &[u8]| {
            let mut list = AttributeBuilder::new();
            list.put_nested(1, |inner| inner.put_u32(2, number)).put_text(1, "second");
            list.put_bytes(7, flags);
            list
        };
        let mut sent = list(5, &[]);
        assert!(are_listed(sent.as_bytes(), list(5, &[]).as_bytes()));
        sent.0.truncate(sent.0.len() - 4);
        assert!(are_listed(sent.as_bytes(), list(5, &[0, 0]).as_bytes()));
        assert!(!are_listed(sent.as_bytes(), list(5, &[0, 1]).as_bytes()));
        assert!(!are_listed(sent.as_bytes(), list(6, &[0]).as_bytes()));
        assert!(!are_listed(list(5, &[1]).as_bytes(), sent.as_bytes()));
        assert!(!are_listed(sent.as_bytes(), &[]) && are_listed(&[], &[]));
    }

    #[test]
    fn attributes_are_read_up_to_the_first_malformed_one() {
        // u32 of type 4; a string of type 3 with padding; a length beyond the end.
        let header = |words: [u16; 2]| words.map(u16::to_ne_bytes).concat();
        let number = 1500_u32.to_ne_bytes();
        let (first, second) = (
            [header([8, 4]), number.to_vec()],
            [header([7, 3 | NLA_F_NESTED]), b"lo\0\0".to_vec()],
        );
        let bytes = [first, second, [header([200, 1]), vec![1, 2, 3, 4]]].as_flattened().concat();
        let read: Vec<ReplyAttribute<'_>> = parse_attributes(&bytes).collect();
        assert_eq!(read.len(), 2);
        assert_eq!(
            (read[0].kind, read[0].to_u32(), read[0].to_ip()),
            (4, Some(1500), ip_from_bytes(&number))
        );
        assert_eq!((read[1].kind, read[1].to_text(), read[1].to_u32()), (3, "lo".to_owned(), None));
    }
}
