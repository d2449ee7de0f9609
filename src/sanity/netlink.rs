//! The suite's own way to the kernel: requests over rtnetlink and `nf_tables`, apart from the code of any plugin.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

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

/// Bytes of the largest answer.
const LARGEST: usize = 1 << 17;

/// A netlink socket in the namespace of the thread that opened it.
pub struct Netlink {
    socket: OwnedFd,
    protocol: Protocol,
}

/// What a socket speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Links, addresses, routes, rules, qdiscs.
    Route,
    /// `nf_tables`.
    Netfilter,
}

impl Netlink {
    /// Opens a socket.
    pub fn open(protocol: Protocol) -> io::Result<Netlink> {
        let number = match protocol {
            Protocol::Route => SockProtocol::NetlinkRoute,
            Protocol::Netfilter => SockProtocol::NetlinkNetFilter,
        };
        let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, number)?;
        Ok(Netlink { socket, protocol })
    }

    /// Makes an object that is not there yet.
    pub fn create(&self, message: RouteNetlinkMessage) -> io::Result<()> {
        self.ack(message, NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Changes or deletes an object.
    pub fn change(&self, message: RouteNetlinkMessage) -> io::Result<()> {
        self.ack(message, 0)
    }

    fn ack(&self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.send_message(message, NLM_F_ACK | flags)?;
        self.answers().map(drop)
    }

    /// All objects of a kind.
    pub fn dump(&self, message: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.send_message(message, NLM_F_DUMP)?;
        let parse =
            |bytes: &Vec<u8>| NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes).ok();
        let inner = |message: NetlinkMessage<RouteNetlinkMessage>| match message.payload {
            NetlinkPayload::InnerMessage(inner) => Some(inner),
            _ => None,
        };
        Ok(self.answers()?.iter().filter_map(parse).filter_map(inner).collect())
    }

    /// The whole messages that answer a dump of `nf_tables`: `kind` is the message (`NFT_MSG_*`), `body` its
    /// attributes.
    pub fn dump_nftables(&self, kind: u8, body: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        debug_assert_eq!(self.protocol, Protocol::Netfilter, "the socket's protocol");
        // NFNL_SUBSYS_NFTABLES << 8, and nfgenmsg: all families, version 0.
        let kind = (10 << 8) | u16::from(kind);
        let mut bytes = Vec::new();
        let length = u32::try_from(20 + body.len()).unwrap_or(u32::MAX);
        bytes.extend(length.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend([0; 4]);
        bytes.extend(body);
        send(self.socket.as_raw_fd(), &bytes, MsgFlags::empty())?;
        self.answers()
    }

    /// Deletes all tables of `nf_tables`, those of iptables among them, as `nft flush ruleset` does.
    pub fn flush_nftables(&self) -> io::Result<()> {
        // NFNL_MSG_BATCH_BEGIN, NFT_MSG_DELTABLE of every table, NFNL_MSG_BATCH_END; with nfgenmsg each.
        let header = |kind: u16, flags: u16, resource: u16| {
            let mut bytes = Vec::from(20_u32.to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend((NLM_F_REQUEST | flags).to_ne_bytes());
            bytes.extend([0; 10]);
            bytes.extend(resource.to_be_bytes());
            bytes
        };
        let (subsystem, table) = (10, (10 << 8) | 2);
        let batch =
            [header(16, 0, subsystem), header(table, NLM_F_ACK, 0), header(17, 0, subsystem)];
        send(self.socket.as_raw_fd(), &batch.concat(), MsgFlags::empty())?;
        self.answers().map(drop)
    }

    fn send_message(&self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        let mut message = NetlinkMessage::from(message);
        message.header.flags = NLM_F_REQUEST | flags;
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        send(self.socket.as_raw_fd(), &bytes, MsgFlags::empty())?;
        Ok(())
    }

    /// The messages up to the acknowledgement or the end of the dump.
    fn answers(&self) -> io::Result<Vec<Vec<u8>>> {
        let (mut all, mut buffer) = (Vec::new(), vec![0; LARGEST]);
        loop {
            let length = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            let mut rest = &buffer[..length];
            while let Some((message, behind)) = split(rest) {
                let number =
                    |at: usize| -> Option<[u8; 4]> { message.get(at..at + 4)?.try_into().ok() };
                match u16::from_ne_bytes([message[4], message[5]]) {
                    DONE => return Ok(all),
                    ERROR => {
                        let errno = number(16).map_or(0, i32::from_ne_bytes);
                        let failed = || Err(io::Error::from_raw_os_error(-errno));
                        return if errno == 0 { Ok(all) } else { failed() };
                    }
                    _ => all.push(message.to_vec()),
                }
                rest = behind;
            }
        }
    }
}

/// The first message and what is behind it.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
    let length =
        usize::try_from(length).ok().filter(|length| (16..=bytes.len()).contains(length))?;
    let next = length.next_multiple_of(4).min(bytes.len());
    Some((&bytes[..length], &bytes[next..]))
}
