//! Messages being written: attributes, nesting; netfilter's headers and its network byte order.
//!
//! Why not the types of netlink-packet-netfilter: docs/decisions/0004-netfilter-messages.md.

/// Marks an attribute that holds attributes.
pub(super) const NLA_F_NESTED: u16 = 1 << 15;

/// The version in the header that netfilter puts behind netlink's.
const NFNETLINK_V0: u8 = 0;

/// The length of netlink's header and netfilter's own.
pub(super) const HEADERS: usize = 20;

/// A growing list of attributes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Attributes(Vec<u8>);

impl Attributes {
    pub(super) fn new() -> Attributes {
        Attributes::default()
    }

    pub(super) fn bytes(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        let at = self.begin(kind);
        self.0.extend_from_slice(value);
        self.end(at)
    }

    pub(super) fn u8(&mut self, kind: u16, value: u8) -> &mut Self {
        self.bytes(kind, &[value])
    }

    /// 32 bits, with or without a sign; what does not fit becomes what the kernel refuses.
    pub(super) fn be32(&mut self, kind: u16, value: impl TryInto<i64>) -> &mut Self {
        self.bytes(kind, &value.try_into().unwrap_or(i64::MAX).to_be_bytes()[4..])
    }

    pub(super) fn be64(&mut self, kind: u16, value: u64) -> &mut Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// In the machine's byte order, which everybody but netfilter wants.
    pub(super) fn u32(&mut self, kind: u16, value: u32) -> &mut Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// In the machine's byte order.
    pub(super) fn u64(&mut self, kind: u16, value: u64) -> &mut Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// A string with the NUL that the kernel wants behind it.
    pub(super) fn text(&mut self, kind: u16, value: &str) -> &mut Self {
        let at = self.begin(kind);
        self.0.extend_from_slice(value.as_bytes());
        self.0.push(0);
        self.end(at)
    }

    /// The attributes that `fill` writes, inside one.
    pub(super) fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Attributes)) -> &mut Self {
        let at = self.begin(kind | NLA_F_NESTED);
        fill(self);
        self.end(at)
    }

    /// Attributes that are written already.
    pub(super) fn raw(&mut self, attributes: &[u8]) {
        self.0.extend_from_slice(attributes);
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn begin(&mut self, kind: u16) -> usize {
        let at = self.0.len();
        self.0.extend_from_slice(&[0; 2]);
        self.0.extend_from_slice(&kind.to_ne_bytes());
        at
    }

    /// Writes the length, without the padding, and pads. A length that does not fit becomes one
    /// that the kernel refuses.
    fn end(&mut self, at: usize) -> &mut Self {
        let length = u16::try_from(self.0.len() - at).unwrap_or(u16::MAX);
        self.0[at..at + 2].copy_from_slice(&length.to_ne_bytes());
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }
}

/// The headers of a message to netfilter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) kind: u16,
    pub(super) flags: u16,
    pub(super) sequence: u32,
    /// `NFPROTO_*`.
    pub(super) family: u8,
    /// The subsystem that a batch is for.
    pub(super) resource: u16,
}

impl Header {
    /// Appends the message to `wire`.
    pub(super) fn write(self, body: &[u8], wire: &mut Vec<u8>) {
        let length = u32::try_from(HEADERS + body.len()).unwrap_or(u32::MAX);
        wire.extend_from_slice(&length.to_ne_bytes());
        wire.extend_from_slice(&self.kind.to_ne_bytes());
        wire.extend_from_slice(&self.flags.to_ne_bytes());
        wire.extend_from_slice(&self.sequence.to_ne_bytes());
        wire.extend_from_slice(&[0; 4]);
        wire.extend_from_slice(&[self.family, NFNETLINK_V0]);
        wire.extend_from_slice(&self.resource.to_be_bytes());
        wire.extend_from_slice(body);
        wire.resize(wire.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::packet::attrs;
    use super::*;

    #[test]
    fn what_is_written_can_be_read() {
        let mut list = Attributes::new();
        list.text(1, "abc").nest(2, |inner| {
            inner.be32(1, 7).u8(2, 9);
        });
        let bytes = list.into_bytes();
        assert_eq!(bytes.len(), 8 + 4 + 8 + 8);
        let read: Vec<_> = attrs(&bytes).collect();
        assert_eq!((read[0].kind, read[0].text()), (1, "abc".to_owned()));
        let inner: Vec<_> = read[1].nested().collect();
        assert_eq!((inner[0].value, inner[1].value), (&[0, 0, 0, 7][..], &[9][..]));
    }
}
