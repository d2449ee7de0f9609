//! Messages on the wire: requests from rtnetlink's types, answers read attribute by attribute.
//!
//! rtnetlink's parser gives up on a whole message when it cannot read one attribute of it, and
//! `netlink-proto` then drops the message and waits for ever for the answer it has just thrown
//! away. A new kernel would be enough to stop every lookup. So an answer stays bytes until
//! someone asks for the attributes that matter; unknown or odd ones do no harm.

use std::convert::Infallible;
use std::net::IpAddr;

use rtnetlink::packet_core::{
    Emitable, NLA_HEADER_SIZE, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NetlinkSerializable, NlasIterator,
};

/// The body of a message and its type, whatever the protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) kind: u16,
    pub(super) body: Vec<u8>,
}

/// A packet with its netlink header.
pub(super) type Message = NetlinkMessage<Packet>;

impl Packet {
    /// A message of type `kind`, as in `RTM_NEWLINK`. Not by `RouteNetlinkMessage`, which is all that rtnetlink knows: the
    /// executable would have all of it.
    pub(super) fn new(kind: u16, message: &impl Emitable) -> Packet {
        let mut body = vec![0; message.buffer_len()];
        message.emit(&mut body);
        Packet { kind, body }
    }
}

impl NetlinkSerializable for Packet {
    fn message_type(&self) -> u16 {
        self.kind
    }

    fn buffer_len(&self) -> usize {
        self.body.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.body);
    }
}

impl NetlinkDeserializable for Packet {
    type Error = Infallible;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, Infallible> {
        Ok(Packet { kind: header.message_type, body: payload.to_vec() })
    }
}

impl From<Packet> for NetlinkPayload<Packet> {
    fn from(packet: Packet) -> Self {
        NetlinkPayload::InnerMessage(packet)
    }
}

/// An attribute of an answer. Its readers return `None` for a value of another size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attr<'a> {
    pub(super) kind: u16,
    pub(super) value: &'a [u8],
}

impl<'a> Attr<'a> {
    pub(super) fn u8(self) -> Option<u8> {
        self.value.first().copied()
    }

    pub(super) fn u32(self) -> Option<u32> {
        self.value.try_into().ok().map(u32::from_ne_bytes)
    }

    pub(super) fn u64(self) -> Option<u64> {
        self.value.try_into().ok().map(u64::from_ne_bytes)
    }

    pub(super) fn i32(self) -> Option<i32> {
        self.value.try_into().ok().map(i32::from_ne_bytes)
    }

    pub(super) fn ip(self) -> Option<IpAddr> {
        ip(self.value)
    }

    /// A string, which the kernel ends with a NUL.
    pub(super) fn text(self) -> String {
        let end = self.value.iter().position(|byte| *byte == 0).unwrap_or(self.value.len());
        String::from_utf8_lossy(&self.value[..end]).into_owned()
    }

    /// The attributes inside this one.
    pub(super) fn nested(self) -> impl Iterator<Item = Attr<'a>> {
        attrs(self.value)
    }
}

/// The attributes in `bytes`, up to the first whose length makes no sense.
pub(super) fn attrs(bytes: &[u8]) -> impl Iterator<Item = Attr<'_>> {
    NlasIterator::new(bytes).map_while(Result::ok).map(|nla| {
        let (kind, end) = (nla.kind(), usize::from(nla.length()));
        Attr { kind, value: &nla.into_inner()[NLA_HEADER_SIZE..end] }
    })
}

/// The address that 4 or 16 bytes are.
pub fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = || <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from);
    <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from).or_else(v4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_up_to_the_first_broken_one() {
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

    #[test]
    fn a_type_that_no_parser_knows_is_still_an_answer() {
        let header = NetlinkHeader::default();
        let packet = Packet::deserialize(&header, &[0xff; 3]).unwrap();
        assert_eq!(packet.body, [0xff; 3]);
        assert_eq!(attrs(&packet.body).count(), 0);
    }
}
