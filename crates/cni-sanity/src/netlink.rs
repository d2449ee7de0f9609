//! The suite's own netlink client: rtnetlink and `nf_tables` requests, independent of the code of
//! any plugin. Each request uses a new socket in the network namespace of the calling thread.

use std::io;
use std::os::fd::AsRawFd;

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};
use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::RouteNetlinkMessage;

/// `NLMSG_ERROR` and `NLMSG_DONE` of `linux/netlink.h`.
const ERROR: u16 = 2;
const DONE: u16 = 3;

/// `NFNL_SUBSYS_NFTABLES` of `linux/netfilter/nfnetlink.h`; `NFT_MSG_DELTABLE` and
/// `NFT_MSG_GETRULE` of `linux/netfilter/nf_tables.h`.
const NFTABLES: u16 = 10;
const DELETE_TABLE: u16 = NFTABLES << 8 | 2;
const GET_RULES: u16 = NFTABLES << 8 | 7;

/// Bytes of the receive buffer, more than the kernel puts into one datagram.
const BUFFER: usize = 1 << 17;

/// Creates an object; fails if the object exists.
pub fn create(message: RouteNetlinkMessage) -> io::Result<()> {
    route(message, NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL).map(drop)
}

/// Changes or deletes an object.
pub fn change(message: RouteNetlinkMessage) -> io::Result<()> {
    route(message, NLM_F_ACK).map(drop)
}

/// Sends a dump request, and returns the messages of all objects.
pub fn dump(message: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
    let parse = |bytes: Vec<u8>| match NetlinkMessage::deserialize(&bytes).ok()?.payload {
        NetlinkPayload::InnerMessage(inner) => Some(inner),
        _ => None,
    };
    Ok(route(message, NLM_F_DUMP)?.into_iter().filter_map(parse).collect())
}

fn route(message: RouteNetlinkMessage, flags: u16) -> io::Result<Vec<Vec<u8>>> {
    let mut message = NetlinkMessage::from(message);
    message.header.flags = NLM_F_REQUEST | flags;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    request(SockProtocol::NetlinkRoute, &bytes)
}

/// The messages of the `nf_tables` rules of all families.
pub fn filter_rules() -> io::Result<Vec<Vec<u8>>> {
    request(SockProtocol::NetlinkNetFilter, &nfnetlink(GET_RULES, NLM_F_DUMP, 0))
}

/// Deletes all `nf_tables` tables, including those of iptables, as `nft flush ruleset` does.
pub fn flush_nftables() -> io::Result<()> {
    // NFNL_MSG_BATCH_BEGIN, NFT_MSG_DELTABLE without a name, NFNL_MSG_BATCH_END.
    let batch = [
        nfnetlink(16, 0, NFTABLES),
        nfnetlink(DELETE_TABLE, NLM_F_ACK, 0),
        nfnetlink(17, 0, NFTABLES),
    ];
    request(SockProtocol::NetlinkNetFilter, &batch.concat()).map(drop)
}

/// A message without attributes: the netlink header and `nfgenmsg` (all families, version 0).
fn nfnetlink(kind: u16, flags: u16, resource: u16) -> Vec<u8> {
    let mut bytes = Vec::from(20_u32.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    bytes.extend([0; 10]);
    bytes.extend(resource.to_be_bytes());
    bytes
}

/// Sends a request; returns the messages up to the acknowledgement or the end of the dump.
fn request(protocol: SockProtocol, bytes: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
    send(socket.as_raw_fd(), bytes, MsgFlags::empty())?;
    let (mut all, mut buffer) = (Vec::new(), vec![0; BUFFER]);
    loop {
        let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        let mut rest = &buffer[..length];
        while let Some((message, next)) = split(rest) {
            match u16::from_ne_bytes([message[4], message[5]]) {
                DONE => return Ok(all),
                ERROR => {
                    let errno = message.get(16..20).and_then(|bytes| bytes.try_into().ok());
                    return match errno.map_or(0, i32::from_ne_bytes) {
                        0 => Ok(all),
                        errno => Err(io::Error::from_raw_os_error(-errno)),
                    };
                }
                _ => all.push(message.to_vec()),
            }
            rest = next;
        }
    }
}

/// The first message and the bytes after it.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
    let length =
        usize::try_from(length).ok().filter(|length| (16..=bytes.len()).contains(length))?;
    let next = length.next_multiple_of(4).min(bytes.len());
    Some((&bytes[..length], &bytes[next..]))
}
