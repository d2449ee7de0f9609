//! DHCP messages: RFC 2131 section 2, options as in RFC 2132 and 3396.
//!
//! Received messages are read with bounds checks; a malformed message decodes to `None`.

use std::net::Ipv4Addr;

use super::option::{Dhcp4Options, MESSAGE_TYPE, OVERLOAD, RELAY};
use crate::netlink::MacAddress;

/// Length of the fixed part before the options, with the magic cookie.
const FIXED: usize = 240;
/// The length of a BOOTP message, which every server and relay accepts.
const SHORTEST: usize = 300;
const COOKIE: [u8; 4] = [99, 130, 83, 99];
const BOOTREQUEST: u8 = 1;
const BOOTREPLY: u8 = 2;
const ETHERNET: u8 = 1;
const BROADCAST_FLAG: u8 = 0x80;

const PAD: u8 = 0;
const END: u8 = 255;

/// The DHCP message type, option 53.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dhcp4MessageKind {
    /// DHCPDISCOVER: the client looks for servers.
    Discover = 1,
    /// DHCPOFFER: a server offers an address.
    Offer = 2,
    /// DHCPREQUEST: the client requests an offered address, or renews a lease.
    Request = 3,
    /// DHCPDECLINE: another host uses the address.
    Decline = 4,
    /// DHCPACK: the server commits the lease.
    Ack = 5,
    /// DHCPNAK: the server refuses the address.
    Nak = 6,
    /// DHCPRELEASE: the client releases the address.
    Release = 7,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dhcp4Message {
    pub kind: Dhcp4MessageKind,
    pub xid: u32,
    /// Seconds since the client began.
    pub secs: u16,
    /// Whether the server must broadcast its reply.
    pub broadcast: bool,
    /// The client's address, if the client has a lease.
    pub ciaddr: Ipv4Addr,
    /// The address that the server assigns.
    pub yiaddr: Ipv4Addr,
    /// The client's Ethernet address.
    pub chaddr: MacAddress,
    /// The options, without the message type (53).
    pub options: Dhcp4Options,
}

impl Dhcp4Message {
    /// A client's message without options.
    pub fn new(kind: Dhcp4MessageKind, xid: u32, chaddr: MacAddress) -> Dhcp4Message {
        Dhcp4Message {
            kind,
            xid,
            secs: 0,
            broadcast: false,
            ciaddr: Ipv4Addr::UNSPECIFIED,
            yiaddr: Ipv4Addr::UNSPECIFIED,
            chaddr,
            options: Dhcp4Options::new(),
        }
    }

    /// The bytes of a client's message.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![BOOTREQUEST, ETHERNET, 6, 0];
        bytes.extend(self.xid.to_be_bytes());
        bytes.extend(self.secs.to_be_bytes());
        bytes.extend([if self.broadcast { BROADCAST_FLAG } else { 0 }, 0]);
        bytes.extend(self.ciaddr.octets());
        bytes.extend(self.yiaddr.octets());
        bytes.resize(28, 0);
        bytes.extend(self.chaddr.0);
        bytes.resize(FIXED - COOKIE.len(), 0);
        bytes.extend(COOKIE);
        put_option(&mut bytes, MESSAGE_TYPE, &[self.kind as u8]);
        for (code, value) in self.options.iter().filter(|(code, _)| **code != RELAY) {
            put_option(&mut bytes, *code, value);
        }
        if let Some(value) = self.options.get(&RELAY) {
            put_option(&mut bytes, RELAY, value);
        }
        bytes.push(END);
        bytes.resize(bytes.len().max(SHORTEST), PAD);
        bytes
    }

    /// Decodes a server's message.
    pub fn decode(bytes: &[u8]) -> Option<Dhcp4Message> {
        let (fixed, rest) = bytes.split_at_checked(FIXED)?;
        if fixed[..3] != [BOOTREPLY, ETHERNET, 6] || !fixed.ends_with(&COOKIE) {
            return None;
        }
        let mut options = Dhcp4Options::new();
        collect_options(&mut options, rest)?;
        let overload = options.remove(&OVERLOAD).and_then(|v| v.first().copied()).unwrap_or(0);
        for (bit, field) in [(1, &fixed[108..236]), (2, &fixed[44..108])] {
            if overload & bit != 0 {
                collect_options(&mut options, field)?;
            }
        }
        options.remove(&OVERLOAD);
        let kind = match options.remove(&MESSAGE_TYPE)?[..] {
            [2] => Dhcp4MessageKind::Offer,
            [5] => Dhcp4MessageKind::Ack,
            [6] => Dhcp4MessageKind::Nak,
            _ => return None,
        };
        Some(Dhcp4Message {
            kind,
            xid: u32::from_be_bytes(array_at(fixed, 4)?),
            secs: u16::from_be_bytes(array_at(fixed, 8)?),
            broadcast: fixed[10] & BROADCAST_FLAG != 0,
            ciaddr: array_at::<4>(fixed, 12)?.into(),
            yiaddr: array_at::<4>(fixed, 16)?.into(),
            chaddr: MacAddress(array_at(fixed, 28)?),
            options,
        })
    }
}

/// Appends an option; a value of more than 255 bytes is split (RFC 3396).
fn put_option(bytes: &mut Vec<u8>, code: u8, value: &[u8]) {
    let mut pieces = value.chunks(usize::from(u8::MAX));
    let first = pieces.next().unwrap_or_default();
    for piece in std::iter::once(first).chain(pieces) {
        bytes.extend([code, u8::try_from(piece.len()).unwrap_or(u8::MAX)]);
        bytes.extend(piece);
    }
}

/// Reads options up to the end mark and joins split options.
fn collect_options(options: &mut Dhcp4Options, mut bytes: &[u8]) -> Option<()> {
    while let [code, rest @ ..] = bytes {
        bytes = rest;
        match *code {
            PAD => {}
            END => break,
            code => {
                let (length, rest) = rest.split_first()?;
                let (value, rest) = rest.split_at_checked(usize::from(*length))?;
                options.entry(code).or_default().extend(value);
                bytes = rest;
            }
        }
    }
    Some(())
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::MAC;
    use super::*;

    /// The bytes that a server would send.
    fn from_server(message: &Dhcp4Message) -> Vec<u8> {
        let mut bytes = message.encode();
        bytes[0] = BOOTREPLY;
        bytes
    }

    fn offer() -> Dhcp4Message {
        let mut message = Dhcp4Message::new(Dhcp4MessageKind::Offer, 0x0102_0304, MAC);
        message.yiaddr = [10, 1, 2, 3].into();
        message.options.insert(54, vec![10, 1, 2, 1]);
        message.options.insert(1, vec![255, 255, 255, 0]);
        message
    }

    #[test]
    fn requests_have_the_layout_of_the_rfc() {
        let mut message = Dhcp4Message::new(Dhcp4MessageKind::Request, 0x0102_0304, MAC);
        message.broadcast = true;
        message.secs = 258;
        message.ciaddr = [10, 0, 0, 5].into();
        message.options.insert(82, vec![9]);
        message.options.insert(61, vec![0, b'a']);
        message.options.insert(200, vec![1]);
        let bytes = message.encode();
        assert_eq!(bytes.len(), 300);
        assert_eq!(bytes[..16], [1, 1, 6, 0, 1, 2, 3, 4, 1, 2, 0x80, 0, 10, 0, 0, 5]);
        assert_eq!(bytes[28..34], MAC.0);
        assert!(bytes[34..236].iter().all(|byte| *byte == 0));
        let options = [99, 130, 83, 99, 53, 1, 3, 61, 2, 0, b'a', 200, 1, 1, 82, 1, 9, 255];
        assert_eq!(bytes[236..254], options);
    }

    #[test]
    fn messages_round_trip_and_long_options_are_split() {
        let mut message = offer();
        message.options.insert(121, (0..=255).chain(0..=255).collect());
        message.options.insert(80, vec![]);
        let bytes = from_server(&message);
        assert_eq!(Dhcp4Message::decode(&bytes), Some(message));
        // Three times as the code, twice inside.
        assert_eq!(bytes.split(|byte| *byte == 121).count(), 3 + 2 + 1);
    }

    #[test]
    fn options_in_other_fields_are_found() {
        let mut message = offer();
        message.options.insert(OVERLOAD, vec![3]);
        let mut bytes = from_server(&message);
        bytes[44..48].copy_from_slice(&[3, 4, 10, 1]);
        bytes[48..51].copy_from_slice(&[2, 1, 255]);
        bytes[108..113].copy_from_slice(&[15, 2, b'd', b'e', 255]);
        let read = Dhcp4Message::decode(&bytes).unwrap();
        assert_eq!(read.options.get(&3), Some(&vec![10, 1, 2, 1]));
        assert_eq!(read.options.get(&15), Some(&b"de".to_vec()));
        assert_eq!(read.options.get(&OVERLOAD), None);
    }

    #[test]
    fn malformed_messages_decode_to_none() {
        let good = from_server(&offer());
        assert!(Dhcp4Message::decode(&good).is_some());
        assert_eq!(Dhcp4Message::decode(&offer().encode()), None, "a client's message");
        for length in 0..good.len() - 40 {
            // Cut inside the options, the rest may still be a message; it must not panic.
            drop(Dhcp4Message::decode(&good[..length]));
        }
        assert_eq!(Dhcp4Message::decode(&good[..239]), None);
        for (at, what) in [(1, "hardware"), (2, "length"), (236, "cookie"), (242, "type")] {
            let mut bad = good.clone();
            bad[at] = 77;
            assert_eq!(Dhcp4Message::decode(&bad), None, "{what}");
        }
        let mut long = good.clone();
        long[244] = 255;
        assert_eq!(Dhcp4Message::decode(&long), None, "an option beyond the end");
    }

    #[test]
    fn random_bytes_never_panic() {
        let mut random = super::super::super::timing::RandomGenerator::from_seed(11);
        let good = from_server(&offer());
        for _ in 0..20_000 {
            let mut bytes = good.clone();
            for _ in 0..8 {
                let at = random.next_number() as usize % bytes.len();
                bytes[at] = random.next_number().to_be_bytes()[0];
            }
            drop(Dhcp4Message::decode(&bytes));
        }
    }
}
