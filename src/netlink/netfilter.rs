//! The socket to netfilter: requests, dumps and batches, without tokio.
//!
//! Netfilter answers while it is asked: when sending returns, the answers wait. So a plain
//! socket that never blocks does, and a batch needs no reader beside its writer.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{RcvBufForce, SndBuf, SndBufForce};
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkBuffer, NetlinkPayload};
use rtnetlink::sys::protocols::NETLINK_NETFILTER;
use rtnetlink::sys::{Socket, SocketAddr};

use super::attribute::{Attributes, Header};
use super::error::{Failure, Result};
use super::later::Keeper;
use super::packet::Message;
use super::request::{Answers, until_consistent};
use crate::log;
use crate::netns::{self, Netns};

/// How much one read may bring: the kernel fills dumps up to half of it.
const BUFFER: usize = 64 * 1024;

/// What a socket can send without asking for more, on a kernel with the usual default.
const DEFAULT_SEND_BUFFER: usize = 128 * 1024;

/// How long to wait for an answer that should be there already.
const LIMIT_MS: u16 = 60_000;

/// A socket in one network namespace.
pub(super) struct NfSocket {
    socket: Socket,
    sequence: Cell<u32>,
    // Behind the socket: it is dropped after it.
    keeper: Option<Keeper>,
}

impl Drop for NfSocket {
    fn drop(&mut self) {
        self.keeper = Keeper::of(&self.socket);
    }
}

impl fmt::Debug for NfSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NfSocket").finish_non_exhaustive()
    }
}

/// A question for one subsystem.
#[derive(Clone, Debug)]
pub(super) struct Query {
    /// Subsystem and message.
    pub(super) kind: u16,
    pub(super) family: u8,
    pub(super) body: Attributes,
}

impl NfSocket {
    /// A socket in the calling thread's namespace.
    pub(super) fn open() -> Result<NfSocket> {
        let opening = |cause: io::Error| {
            Failure::from(cause).doing("open", || "netfilter's netlink socket".to_owned())
        };
        netns::at_home()?;
        let mut socket = Socket::new(NETLINK_NETFILTER).map_err(opening)?;
        socket.bind_auto().map_err(opening)?;
        socket.set_non_blocking(true).map_err(opening)?;
        // Kernels before 4.12 do without the sentence; errors work without all three.
        let options = (socket.set_ext_ack(true), socket.set_cap_ack(true));
        let room = setsockopt(&socket, RcvBufForce, &(1024 * 1024));
        drop((options, room));
        Ok(NfSocket { socket, sequence: Cell::new(1), keeper: None })
    }

    /// A socket in `ns`.
    pub(super) fn open_in(ns: &Netns) -> Result<NfSocket> {
        ns.run(NfSocket::open)?
    }

    /// Reserves `count` sequence numbers and returns the first.
    pub(super) fn sequence(&self, count: u32) -> u32 {
        let first = self.sequence.get();
        // 0 is for what nobody asked for.
        self.sequence.set(first.checked_add(count).unwrap_or(1));
        first
    }

    /// A request for one thing, or for a change; returns what came before the acknowledgement.
    pub(super) fn request(&self, query: &Query) -> Result<Vec<Vec<u8>>, Failure> {
        self.exchange(query, NLM_F_ACK).map(|answers| answers.bodies)
    }

    /// A request for a list.
    pub(super) fn dump(&self, query: &Query) -> Result<Vec<Vec<u8>>, Failure> {
        let answers = until_consistent(|| self.exchange(query, NLM_F_DUMP))?;
        if answers.interrupted {
            log::warn("a netfilter dump was interrupted every time; it may be inconsistent");
        }
        Ok(answers.bodies)
    }

    fn exchange(&self, query: &Query, bits: u16) -> Result<Answers, Failure> {
        let (kind, family, flags) = (query.kind, query.family, NLM_F_REQUEST | bits);
        let sequence = self.sequence(1);
        let mut wire = Vec::new();
        let header = Header { kind, flags, sequence, family, resource: 0 };
        header.write(&query.body.clone().into_bytes(), &mut wire);
        self.send(&wire)?;
        let mut collected = Vec::new();
        loop {
            let Some(messages) = self.receive()? else {
                self.wait()?;
                continue;
            };
            let mine = messages.into_iter().filter(|m| m.header.sequence_number == sequence);
            collected.extend(mine);
            if collected.last().is_some_and(ends) {
                return Answers::collect(collected);
            }
        }
    }

    /// Sends everything at once, whatever its size: a batch is one datagram.
    pub(super) fn send(&self, wire: &[u8]) -> Result<(), Failure> {
        if wire.len() > DEFAULT_SEND_BUFFER {
            // The unprivileged option is bounded by a sysctl, but better than none.
            if setsockopt(&self.socket, SndBufForce, &wire.len()).is_err() {
                setsockopt(&self.socket, SndBuf, &wire.len())?;
            }
        }
        loop {
            match self.socket.send_to(wire, &SocketAddr::new(0, 0), 0) {
                Ok(_) => return Ok(()),
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(cause.into()),
            }
        }
    }

    /// The next datagram's messages; `None` when there is none.
    pub(super) fn receive(&self) -> Result<Option<Vec<Message>>, Failure> {
        let mut buffer = Vec::with_capacity(BUFFER);
        loop {
            match self.socket.recv(&mut buffer, 0) {
                Ok(_) => return Ok(Some(split(&buffer))),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(cause.into()),
            }
        }
    }

    /// Waits for a datagram that should have been there.
    pub(super) fn wait(&self) -> Result<(), Failure> {
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::from(LIMIT_MS)) {
            Ok(0) => Err(Errno::ETIMEDOUT.into()),
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Whether nothing follows this answer.
fn ends(message: &Message) -> bool {
    matches!(message.payload, NetlinkPayload::Error(_) | NetlinkPayload::Done(_))
}

/// The messages in a datagram, up to the first that makes no sense.
pub(super) fn split(mut datagram: &[u8]) -> Vec<Message> {
    let mut messages = Vec::new();
    while let Ok(header) = NetlinkBuffer::new_checked(datagram) {
        let length = header.length() as usize;
        let Ok(message) = Message::deserialize(&datagram[..length]) else { break };
        messages.push(message);
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    messages
}
