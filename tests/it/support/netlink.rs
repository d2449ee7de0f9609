//! The objects of the calling thread's network namespace as text, read by netlink: no process is
//! started, and the code is not that of the plugins.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};

/// Flags of requests: `NLM_F_REQUEST` with `NLM_F_DUMP` or `NLM_F_ACK`; types of the messages that
/// end an answer.
const DUMP: u16 = 0x301;
const ACKNOWLEDGED: u16 = 0x005;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// The flag of an answer to which objects were added meanwhile.
const INTERRUPTED: u16 = 0x10;

/// `RTM_SETLINK`.
const SET_LINK: u16 = 19;
/// `NFT_MSG_GETTABLE` of `linux/netfilter/nf_tables.h`.
const GET_TABLES: u16 = 10 << 8 | 1;

/// How the value of an attribute is printed.
#[derive(Clone, Copy)]
enum As {
    Text,
    Number,
    Address,
    Bytes,
}

use As::{Address, Bytes, Number, Text};

/// A kind of object of rtnetlink: what [`dump`] prints of it.
pub(crate) struct ObjectKind {
    name: &'static str,
    /// The type of the request.
    get: u16,
    header: usize,
    families: &'static [u8],
    /// Bits of the header that the kernel changes asynchronously after the call that caused it, by
    /// their byte.
    noise: &'static [(usize, u8)],
    attributes: &'static [(u16, &'static str, As)],
}

const IP: &[u8] = &[2, 10];

/// Without counters and the carrier's state.
pub(crate) const LINKS: ObjectKind = ObjectKind {
    name: "link",
    get: 18,
    header: 16,
    families: &[0],
    // IFF_RUNNING, IFF_LOWER_UP; the last field says what has changed.
    noise: &[(8, 0x40), (10, 0x01), (12, 0xff), (13, 0xff), (14, 0xff), (15, 0xff)],
    attributes: &[
        (1, "address", Bytes),
        (2, "broadcast", Bytes),
        (3, "name", Text),
        (4, "mtu", Number),
        (5, "link", Number),
        (10, "master", Number),
        (13, "txqlen", Number),
        (17, "mode", Bytes),
        (20, "alias", Text),
        (27, "group", Number),
        (37, "netnsid", Number),
        (52, "altnames", Bytes),
    ],
};

/// Without lifetimes and the state of duplicate address detection.
pub(crate) const ADDRESSES: ObjectKind = ObjectKind {
    name: "address",
    get: 22,
    header: 8,
    families: IP,
    noise: &[(2, 0x4c)],
    attributes: &[
        (1, "address", Address),
        (2, "local", Address),
        (3, "label", Text),
        (4, "broadcast", Address),
        (9, "metric", Number),
    ],
};

/// Without `RTNH_F_LINKDOWN` and lifetimes.
pub(crate) const ROUTES: ObjectKind = ObjectKind {
    name: "route",
    get: 26,
    header: 12,
    families: IP,
    noise: &[(8, 0x10)],
    attributes: &[
        (1, "to", Address),
        (2, "from", Address),
        (4, "dev", Number),
        (5, "via", Address),
        (6, "metric", Number),
        (7, "src", Address),
        (8, "metrics", Bytes),
        (9, "nexthops", Bytes),
        (15, "table", Number),
        (18, "via", Bytes),
        (20, "pref", Bytes),
        (22, "encap", Bytes),
        (30, "nhid", Number),
    ],
};

pub(crate) const RULES: ObjectKind = ObjectKind {
    name: "rule",
    get: 34,
    header: 12,
    families: IP,
    noise: &[],
    attributes: &[
        (1, "to", Address),
        (2, "from", Address),
        (3, "iif", Text),
        (4, "goto", Number),
        (6, "priority", Number),
        (10, "fwmark", Number),
        (11, "realms", Number),
        (13, "suppress_group", Number),
        (14, "suppress_prefix", Number),
        (15, "table", Number),
        (16, "fwmask", Number),
        (17, "oif", Text),
        (19, "l3mdev", Bytes),
        (20, "uids", Bytes),
        (21, "protocol", Bytes),
        (22, "ipproto", Bytes),
        (23, "sport", Bytes),
        (24, "dport", Bytes),
    ],
};

const QDISCS: ObjectKind = ObjectKind {
    name: "qdisc",
    get: 38,
    header: 20,
    families: &[0],
    noise: &[],
    attributes: &[(1, "kind", Text)],
};

/// The objects of a kind, one a line, without link-local addresses and the kernel's routes to local
/// addresses, which it adds and removes asynchronously.
pub(crate) fn dump(kind: &ObjectKind) -> String {
    let request = |family: &u8| objects(SockProtocol::NetlinkRoute, kind.get, *family, kind.header);
    let objects: Vec<Vec<u8>> = kind.families.iter().flat_map(request).collect();
    let lines = objects.into_iter().filter_map(|object| line(kind, object));
    lines.collect::<Vec<_>>().join("\n")
}

/// Whether traffic control has more than the kernel's default qdiscs, which have no handle.
pub(crate) fn has_qdiscs() -> bool {
    let qdiscs = objects(SockProtocol::NetlinkRoute, QDISCS.get, 0, QDISCS.header);
    qdiscs.iter().any(|qdisc| qdisc[8..12] != [0; 4])
}

/// Whether `nf_tables` has a table.
pub(crate) fn has_tables() -> bool {
    !objects(SockProtocol::NetlinkNetFilter, GET_TABLES, 0, 4).is_empty()
}

fn line(kind: &ObjectKind, mut object: Vec<u8>) -> Option<String> {
    for (byte, bits) in kind.noise {
        object[*byte] &= !bits;
    }
    let (header, mut rest) = object.split_at(kind.header);
    let is_local = kind.get == ROUTES.get && (header[4], header[5]) == (255, 2);
    let is_cached = kind.get == ROUTES.get && header[9] & 0x02 != 0;
    let mut text = format!("{} {header:?}", kind.name);
    while let [a, b, c, d, ..] = rest {
        let (length, number) =
            (usize::from(u16::from_ne_bytes([*a, *b])), u16::from_ne_bytes([*c, *d]) & 0x3fff);
        let value = &rest[4..length];
        if let Some((_, name, how)) = kind.attributes.iter().find(|attribute| attribute.0 == number)
        {
            text.extend([" ", name, " ", &print(value, *how)]);
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    let is_noise = is_local || is_cached || text.contains(" fe80::") || text.contains(" ff00::");
    (!is_noise).then_some(text)
}

fn print(value: &[u8], how: As) -> String {
    match (how, value.len()) {
        (Text, _) => String::from_utf8_lossy(value).trim_end_matches('\0').to_owned(),
        (Number, 4) => u32::from_ne_bytes(value.try_into().unwrap()).to_string(),
        (Address, 4) => Ipv4Addr::from(<[u8; 4]>::try_from(value).unwrap()).to_string(),
        (Address, 16) => Ipv6Addr::from(<[u8; 16]>::try_from(value).unwrap()).to_string(),
        _ => format!("{value:02x?}"),
    }
}

/// Sets `lo` up, which has the index 1 in every namespace.
pub(crate) fn set_lo_up() {
    let socket = open(SockProtocol::NetlinkRoute);
    let mut header = [0; 16];
    // The index, and IFF_UP in the flags and in the mask of flags that change.
    (header[4], header[8], header[12]) = (1, 1, 1);
    send(socket.as_raw_fd(), &message(SET_LINK, ACKNOWLEDGED, &header), MsgFlags::empty()).unwrap();
    let mut answer = [0; 64];
    recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty()).unwrap();
    assert_eq!(answer[16..20], [0; 4], "lo cannot be set up");
}

fn open(protocol: SockProtocol) -> OwnedFd {
    socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol).unwrap()
}

fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(16 + body.len()).unwrap();
    [&length.to_ne_bytes(), &kind.to_ne_bytes()[..], &flags.to_ne_bytes(), &[0; 8], body].concat()
}

/// The answer to a dump request, without the netlink headers.
fn objects(protocol: SockProtocol, get: u16, family: u8, header: usize) -> Vec<Vec<u8>> {
    let socket = open(protocol);
    let mut body = vec![0; header];
    body[0] = family;
    let request = message(get, DUMP, &body);
    loop {
        send(socket.as_raw_fd(), &request, MsgFlags::empty()).unwrap();
        if let Some(objects) = answer(&socket) {
            return objects;
        }
    }
}

/// The objects of an answer; `None` if they changed meanwhile.
fn answer(socket: &impl AsRawFd) -> Option<Vec<Vec<u8>>> {
    let (mut all, mut buffer, mut is_whole) = (Vec::new(), vec![0; 1 << 16], true);
    loop {
        let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()).unwrap();
        let mut rest = &buffer[..length];
        while rest.len() >= 16 {
            let length =
                usize::try_from(u32::from_ne_bytes(rest[..4].try_into().unwrap())).unwrap();
            let half = |at: usize| u16::from_ne_bytes([rest[at], rest[at + 1]]);
            is_whole &= half(6) & INTERRUPTED == 0;
            match half(4) {
                DONE => return is_whole.then_some(all),
                // A kernel without nf_tables.
                ERROR => return Some(all),
                _ => all.push(rest[16..length].to_vec()),
            }
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}
