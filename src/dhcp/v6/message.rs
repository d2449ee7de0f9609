//! DHCPv6 messages: RFC 9915 sections 8 and 21, DNS options of RFC 3646.
//!
//! Received messages are read with bounds checks; a malformed message decodes to `None`.

use std::net::Ipv6Addr;
use std::time::Duration;

use super::super::text;

/// Option codes, named as in IANA's registry.
const CLIENTID: u16 = 1;
const SERVERID: u16 = 2;
const IA_NA: u16 = 3;
const IAADDR: u16 = 5;
const ORO: u16 = 6;
const PREFERENCE: u16 = 7;
const ELAPSED_TIME: u16 = 8;
const STATUS_CODE: u16 = 13;
const DNS_SERVERS: u16 = 23;
const DOMAIN_LIST: u16 = 24;
const SOL_MAX_RT: u16 = 82;

/// The options that the client requests besides the address.
pub const WANTED: [u16; 3] = [DNS_SERVERS, DOMAIN_LIST, SOL_MAX_RT];
/// Length of a DUID: its type and 1 to 128 bytes (section 11.1).
const DUID_LEN: std::ops::RangeInclusive<usize> = 3..=130;
/// The bits of a transaction ID.
const XID_BITS: u32 = 0x00ff_ffff;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dhcp6MessageKind {
    /// The client looks for servers.
    #[default]
    Solicit = 1,
    /// A server offers an address.
    Advertise = 2,
    /// The client requests the offered address.
    Request = 3,
    /// The client renews with the server of the lease.
    Renew = 5,
    /// The client renews with any server.
    Rebind = 6,
    /// A server's reply to every message but Solicit.
    Reply = 7,
    /// The client releases the address.
    Release = 8,
    /// Another host uses the address.
    Decline = 9,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dhcp6Message {
    pub kind: Dhcp6MessageKind,
    /// The transaction ID, 24 bits.
    pub xid: u32,
    /// The client's DUID; empty if absent.
    pub client: Vec<u8>,
    /// The server's DUID; empty if absent.
    pub server: Vec<u8>,
    /// Identity associations.
    pub ias: Vec<IdentityAssociation>,
    /// Hundredths of a second since the exchange began; sent by clients only.
    pub elapsed: u16,
    /// The requested options; sent by clients only.
    pub requested: Vec<u16>,
    /// The preference of the server, 0 to 255.
    pub preference: u8,
    pub status: Dhcp6Status,
    /// DNS servers in order of preference.
    pub name_servers: Vec<Ipv6Addr>,
    /// The domain search list.
    pub search: Vec<String>,
    /// The maximum timeout of a Solicit, in seconds.
    pub sol_max_rt: Option<u32>,
}

/// An identity association: the addresses of one interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdentityAssociation {
    pub iaid: u32,
    /// T1 in seconds; 0 leaves the choice to the client.
    pub t1: u32,
    /// T2 in seconds; 0 leaves the choice to the client.
    pub t2: u32,
    pub addrs: Vec<AssociationAddress>,
    pub status: Dhcp6Status,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssociationAddress {
    pub addr: Ipv6Addr,
    /// The preferred lifetime in seconds; `u32::MAX` is infinite.
    pub preferred: u32,
    /// The valid lifetime in seconds.
    pub valid: u32,
    pub status: Dhcp6Status,
}

/// The status code; success if the server sends none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dhcp6Status {
    /// The code, see [`status`].
    pub code: u16,
    pub sentence: String,
}

/// Codes of [`Dhcp6Status`] (section 21.13).
pub mod status {
    pub const SUCCESS: u16 = 0;
    /// Failure without a more specific code.
    #[cfg(test)]
    pub const UNSPEC_FAIL: u16 = 1;
    /// The server has no address available.
    pub const NO_ADDRS_AVAIL: u16 = 2;
    /// The server has no such binding.
    pub const NO_BINDING: u16 = 3;
    /// The address is not appropriate to the link.
    pub const NOT_ON_LINK: u16 = 4;
    /// The names of all codes.
    pub const NAMES: [&str; 6] =
        ["Success", "UnspecFail", "NoAddrsAvail", "NoBinding", "NotOnLink", "UseMulticast"];
}

impl Dhcp6Status {
    /// Whether the code is success.
    pub fn is_success(&self) -> bool {
        self.code == status::SUCCESS
    }

    fn decode(value: &[u8]) -> Option<Dhcp6Status> {
        let (code, sentence) = value.split_first_chunk()?;
        Some(Dhcp6Status {
            code: u16::from_be_bytes(*code),
            sentence: text::printable_text(sentence),
        })
    }
}

impl std::fmt::Display for Dhcp6Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match status::NAMES.get(usize::from(self.code)) {
            Some(name) => f.write_str(name)?,
            None => write!(f, "status {}", self.code)?,
        }
        if self.sentence.is_empty() { Ok(()) } else { write!(f, " ({})", self.sentence) }
    }
}

impl IdentityAssociation {
    /// A client's option for `addr`; the lifetimes are the server's choice.
    pub fn for_address(iaid: u32, addr: Option<Ipv6Addr>) -> IdentityAssociation {
        IdentityAssociation {
            iaid,
            addrs: addr
                .into_iter()
                .map(|addr| AssociationAddress {
                    addr,
                    preferred: 0,
                    valid: 0,
                    status: Dhcp6Status::default(),
                })
                .collect(),
            ..IdentityAssociation::default()
        }
    }

    fn encode(&self) -> Vec<u8> {
        let mut value = [self.iaid, self.t1, self.t2].map(u32::to_be_bytes).concat();
        for addr in &self.addrs {
            let lifetimes = [addr.preferred, addr.valid].map(u32::to_be_bytes).concat();
            put_option(&mut value, IAADDR, &[&addr.addr.octets()[..], &lifetimes].concat());
        }
        value
    }

    fn decode(value: &[u8]) -> Option<IdentityAssociation> {
        let ([iaid, t1, t2], rest) = split_numbers(value)?;
        let mut ia = IdentityAssociation { iaid, t1, t2, ..IdentityAssociation::default() };
        for (code, value) in decode_options(rest)? {
            match code {
                IAADDR => ia.addrs.push(AssociationAddress::decode(value)?),
                STATUS_CODE => ia.status = Dhcp6Status::decode(value)?,
                _ => {}
            }
        }
        Some(ia)
    }
}

impl AssociationAddress {
    fn decode(value: &[u8]) -> Option<AssociationAddress> {
        let (addr, rest) = value.split_first_chunk::<16>()?;
        let ([preferred, valid], rest) = split_numbers(rest)?;
        let mut status = Dhcp6Status::default();
        for (_, value) in decode_options(rest)?.into_iter().filter(|(code, _)| *code == STATUS_CODE)
        {
            status = Dhcp6Status::decode(value)?;
        }
        Some(AssociationAddress { addr: Ipv6Addr::from(*addr), preferred, valid, status })
    }
}

impl Dhcp6Message {
    /// A message without options.
    pub fn new(kind: Dhcp6MessageKind, xid: u32) -> Dhcp6Message {
        Dhcp6Message { kind, xid: xid & XID_BITS, ..Dhcp6Message::default() }
    }

    /// The bytes of a client's message.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = (u32::from(self.kind as u8) << 24 | self.xid).to_be_bytes().to_vec();
        put_option(&mut bytes, CLIENTID, &self.client);
        if !self.server.is_empty() {
            put_option(&mut bytes, SERVERID, &self.server);
        }
        for ia in &self.ias {
            put_option(&mut bytes, IA_NA, &ia.encode());
        }
        put_option(&mut bytes, ELAPSED_TIME, &self.elapsed.to_be_bytes());
        if !self.requested.is_empty() {
            let codes: Vec<u8> = self.requested.iter().flat_map(|c| c.to_be_bytes()).collect();
            put_option(&mut bytes, ORO, &codes);
        }
        bytes
    }

    /// Decodes a server's message.
    pub fn decode(bytes: &[u8]) -> Option<Dhcp6Message> {
        let ([head], rest) = split_numbers(bytes)?;
        let kind = match head >> 24 {
            2 => Dhcp6MessageKind::Advertise,
            7 => Dhcp6MessageKind::Reply,
            _ => return None,
        };
        let mut message = Dhcp6Message::new(kind, head);
        for (code, value) in decode_options(rest)? {
            message.apply_option(code, value)?;
        }
        Some(message)
    }

    fn apply_option(&mut self, code: u16, value: &[u8]) -> Option<()> {
        match code {
            CLIENTID => self.client = decode_duid(value)?,
            SERVERID => self.server = decode_duid(value)?,
            IA_NA => self.ias.push(IdentityAssociation::decode(value)?),
            PREFERENCE => self.preference = <[u8; 1]>::try_from(value).ok()?[0],
            STATUS_CODE => self.status = Dhcp6Status::decode(value)?,
            DNS_SERVERS => {
                let (addrs, _) = value.as_chunks::<16>();
                self.name_servers = addrs.iter().map(|addr| Ipv6Addr::from(*addr)).collect();
            }
            DOMAIN_LIST => self.search = text::decode_domains(value),
            SOL_MAX_RT => self.sol_max_rt = Some(u32::from_be_bytes(value.try_into().ok()?)),
            _ => {}
        }
        Some(())
    }
}

/// A duration as the Elapsed Time option has it: hundredths of a second, at most `u16::MAX`.
pub fn in_hundredths(elapsed: Duration) -> u16 {
    u16::try_from(elapsed.as_millis() / 10).unwrap_or(u16::MAX)
}

fn decode_duid(value: &[u8]) -> Option<Vec<u8>> {
    DUID_LEN.contains(&value.len()).then(|| value.to_vec())
}

/// Appends an option. No option of a client exceeds the 16-bit length.
fn put_option(bytes: &mut Vec<u8>, code: u16, value: &[u8]) {
    bytes.extend(code.to_be_bytes());
    bytes.extend(u16::try_from(value.len()).unwrap_or(u16::MAX).to_be_bytes());
    bytes.extend(value);
}

/// The 32-bit numbers at the start of `bytes`, and the bytes behind them.
fn split_numbers<const N: usize>(bytes: &[u8]) -> Option<([u32; N], &[u8])> {
    let (head, rest) = bytes.split_at_checked(4 * N)?;
    let (words, _) = head.as_chunks::<4>();
    Some((words.try_into().ok().map(|words: [[u8; 4]; N]| words.map(u32::from_be_bytes))?, rest))
}

/// All options in `bytes`; `None` if the last one is truncated.
fn decode_options(mut bytes: &[u8]) -> Option<Vec<(u16, &[u8])>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let (code, rest) = bytes.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let (value, rest) = rest.split_at_checked(usize::from(u16::from_be_bytes(*length)))?;
        found.push((u16::from_be_bytes(*code), value));
        bytes = rest;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::super::super::timing::RandomGenerator;
    use super::*;

    const ADDR: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 5);

    fn option(code: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        put_option(&mut bytes, code, value);
        bytes
    }

    /// A reply with all that is read.
    fn reply() -> Vec<u8> {
        let status = option(STATUS_CODE, b"\0\x02none\n left");
        let lifetimes = [0, 0, 0, 100, 0, 0, 0, 200];
        let addr = [&ADDR.octets()[..], &lifetimes, &option(STATUS_CODE, &[0, 0])].concat();
        let times = [0, 0, 0, 7, 0, 0, 0, 50, 0, 0, 0, 80];
        let ia = [&times[..], &option(IAADDR, &addr), &option(99, b"?"), &status].concat();
        [
            vec![7, 1, 2, 3],
            option(CLIENTID, &[0, 4, 9]),
            option(SERVERID, &[0, 1, 8, 8]),
            option(IA_NA, &ia),
            option(PREFERENCE, &[255]),
            option(STATUS_CODE, &[0, 1]),
            option(DNS_SERVERS, &[&ADDR.octets()[..], &[1, 2]].concat()),
            option(DOMAIN_LIST, b"\x01a\x03com\x00\x03a b\x00\x01b\x00"),
            option(SOL_MAX_RT, &[0, 0, 0, 60]),
            option(1234, b"unknown"),
        ]
        .concat()
    }

    #[test]
    fn requests_have_the_layout_of_the_rfc() {
        let mut message = Dhcp6Message::new(Dhcp6MessageKind::Request, 0xff01_0203);
        message.client = vec![0, 4, 9];
        message.server = vec![0, 1, 8];
        message.ias = vec![IdentityAssociation::for_address(7, Some(ADDR))];
        message.elapsed = 258;
        message.requested = WANTED.to_vec();
        let expected = [
            &[3, 1, 2, 3][..],
            &[0, 1, 0, 3, 0, 4, 9],
            &[0, 2, 0, 3, 0, 1, 8],
            &[0, 3, 0, 40, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0],
            &[0, 5, 0, 24],
            &ADDR.octets(),
            &[0; 8],
            &[0, 8, 0, 2, 1, 2],
            &[0, 6, 0, 6, 0, 23, 0, 24, 0, 82],
        ];
        assert_eq!(message.encode(), expected.concat());
        let address_removed = Dhcp6Message {
            client: vec![1, 2, 3],
            ..Dhcp6Message::new(Dhcp6MessageKind::Solicit, 1)
        };
        assert_eq!(address_removed.encode(), [1, 0, 0, 1, 0, 1, 0, 3, 1, 2, 3, 0, 8, 0, 2, 0, 0]);
    }

    #[test]
    fn a_reply_is_read() {
        let message = Dhcp6Message::decode(&reply()).unwrap();
        assert_eq!((message.kind, message.xid), (Dhcp6MessageKind::Reply, 0x01_0203));
        assert_eq!((message.client, message.server), (vec![0, 4, 9], vec![0, 1, 8, 8]));
        assert_eq!((message.preference, message.status.code), (255, status::UNSPEC_FAIL));
        assert_eq!((message.name_servers, message.sol_max_rt), (vec![ADDR], Some(60)));
        assert_eq!(message.search, ["a.com", "b"]);
        let [ia] = &message.ias[..] else { panic!("{:?}", message.ias) };
        assert_eq!((ia.iaid, ia.t1, ia.t2), (7, 50, 80));
        assert_eq!(ia.status.to_string(), "NoAddrsAvail (none left)");
        let addr = AssociationAddress {
            addr: ADDR,
            preferred: 100,
            valid: 200,
            status: Dhcp6Status::default(),
        };
        assert_eq!(ia.addrs, [addr]);
    }

    #[test]
    fn malformed_messages_decode_to_none() {
        let good = reply();
        let ends: Vec<usize> = {
            // A message that is cut at the end of an option is still a message.
            let all = decode_options(&good[4..]).unwrap();
            let mut at = 4;
            [4].into_iter()
                .chain(all.iter().map(|(_, value)| {
                    at += 4 + value.len();
                    at
                }))
                .collect()
        };
        for length in 0..good.len() {
            let read = Dhcp6Message::decode(&good[..length]);
            assert_eq!(read.is_some(), ends.contains(&length), "{length}");
        }
        for kind in [0, 1, 3, 10, 12, 13, 255] {
            let mut bad = good.clone();
            bad[0] = kind;
            assert_eq!(Dhcp6Message::decode(&bad), None, "{kind}");
        }
        for (code, value) in [
            (CLIENTID, &[0, 4][..]),
            (SERVERID, &[0; 131]),
            (IA_NA, &[0; 11]),
            (IA_NA, &[0; 13]),
            (IA_NA, &[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 1, 0]),
            (PREFERENCE, &[]),
            (PREFERENCE, &[1, 2]),
            (STATUS_CODE, &[1]),
            (SOL_MAX_RT, &[1, 2]),
        ] {
            let bad = [&good[..], &option(code, value)].concat();
            assert_eq!(Dhcp6Message::decode(&bad), None, "{code} {value:?}");
        }
    }

    #[test]
    fn random_bytes_never_panic_and_memory_is_bounded() {
        let mut random = RandomGenerator::from_seed(11);
        let good = reply();
        for _ in 0..20_000 {
            let mut bytes = good.clone();
            for _ in 0..8 {
                let at = random.next_number() as usize % bytes.len();
                bytes[at] = random.next_number().to_be_bytes()[0];
            }
            if let Some(message) = Dhcp6Message::decode(&bytes) {
                assert!(message.ias.len() + message.name_servers.len() <= bytes.len() / 4);
                assert!(message.client.len() <= 130 && message.search.len() <= text::MOST_DOMAINS);
            }
        }
        let long = [&[7, 0, 0, 1][..], &option(STATUS_CODE, &vec![b'x'; 60_000])].concat();
        assert_eq!(Dhcp6Message::decode(&long).unwrap().status.sentence.len(), 200);
    }

    #[test]
    fn elapsed_time_is_in_hundredths_and_saturates() {
        assert_eq!(in_hundredths(Duration::ZERO), 0);
        assert_eq!(in_hundredths(Duration::from_millis(1500)), 150);
        assert_eq!(in_hundredths(Duration::from_secs(9998)), u16::MAX);
    }
}
