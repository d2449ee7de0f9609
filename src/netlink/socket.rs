//! A netlink socket: requests, their replies, and events.
//!
//! The kernel replies before send(2) returns, so a plain non-blocking socket is enough
//! (docs/decisions/0018-plain-netlink-sockets.md).

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt::Display;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc::{ENOBUFS, MSG_DONTWAIT};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::sockopt::{RcvBufForce, SndBuf, SndBufForce};
use nix::sys::socket::{MsgFlags, MultiHeaders, NetlinkAddr, recvmmsg, setsockopt};
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_ECHO, NetlinkBuffer};
use rtnetlink::sys::protocols::NETLINK_NETFILTER;
use rtnetlink::sys::{self, SocketAddr};

use super::deferred_close::Keeper;
use super::error::{Failure, Result, unless_absent};
use super::request::{Answers, Message, Request, until_consistent};
use crate::log;
use crate::netns;
use crate::trace;

/// Size of the buffer for one read; the datagrams of a dump have up to half of it.
const BUFFER: usize = 64 * 1024;

/// The largest datagram of a list, and of one `nf_tables` object: an element has two keys, a value and a comment.
const PART: usize = 32 * 1024;
const ONE: usize = 1024;

/// The kernel's default size of the send buffer.
const DEFAULT_SEND_BUFFER: usize = 128 * 1024;

/// Timeout for a reply, which is usually queued already.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

/// Retries of a failed receive. The reply usually is in the queue nevertheless, and without the reply the
/// caller does not know whether the kernel executed the request.
const FAILURES: usize = 3;

/// A socket in one network namespace.
#[derive(Debug)]
pub(super) struct Socket {
    inner: sys::Socket,
    /// Dropped after the socket, which then is closed in the background.
    keeper: Option<Keeper>,
    protocol: isize,
    sequence: Cell<u32>,
    /// Whether a multicast group was joined.
    joined: Cell<bool>,
    /// Events that arrived while a reply was awaited.
    events: RefCell<VecDeque<Message>>,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.protocol == NETLINK_NETFILTER {
            self.keeper = Keeper::of(&self.inner);
        }
    }
}

impl Socket {
    /// A socket in the calling thread's namespace.
    pub(super) fn open(protocol: isize) -> Result<Socket> {
        netns::at_home()?;
        let opening = |cause| Failure::from(cause).context("open", &"netlink socket");
        let inner = sys::Socket::new(protocol).map_err(opening)?;
        // Refusals with a message and without a copy of the request. Kernels before 4.12 lack this.
        drop((inner.set_ext_ack(true), inner.set_cap_ack(true)));
        if protocol == NETLINK_NETFILTER {
            // With the default size, refusals of large batches may be lost.
            setsockopt(&inner, RcvBufForce, &(1024 * 1024)).unwrap_or_default();
        } else {
            // Filters of dumps are applied. Kernels before 4.20 lack this.
            drop(inner.set_netlink_get_strict_chk(true));
        }
        let (sequence, joined, events) = (Cell::new(1), Cell::new(false), RefCell::default());
        Ok(Socket { inner, keeper: None, protocol, sequence, joined, events })
    }

    /// Reserves `count` sequence numbers and returns the first one.
    pub(super) fn sequence(&self, count: u32) -> u32 {
        let first = self.sequence.get();
        // 0 is the sequence number of events.
        self.sequence.set(first.checked_add(count).unwrap_or(1));
        first
    }

    /// A request that is answered by success or failure only.
    pub(super) fn ack(&self, request: &Request, flags: u16) -> Result<(), Failure> {
        self.exchange(request, NLM_F_ACK | flags).map(drop)
    }

    /// As [`Socket::ack`]; returns the kernel's description of the new object, if there is one.
    pub(super) fn ack_and_echo(
        &self,
        request: &Request,
        flags: u16,
    ) -> Result<Option<Vec<u8>>, Failure> {
        let answers = self.exchange(request, NLM_F_ACK | NLM_F_ECHO | flags)?;
        Ok(answers.bodies.into_iter().next())
    }

    /// A request for one object.
    pub(super) fn one(&self, request: &Request) -> Result<Vec<u8>, Failure> {
        let answers = self.exchange(request, 0)?;
        answers.bodies.into_iter().next().ok_or(Failure::from(Errno::ENODATA))
    }

    /// A request for a list. An interrupted dump is repeated a few times; then the last attempt
    /// is used.
    pub(super) fn dump(&self, request: &Request) -> Result<Vec<Vec<u8>>, Failure> {
        let answers = until_consistent(&mut || self.exchange(request, NLM_F_DUMP))?;
        if answers.interrupted {
            log::warn("a netlink dump was interrupted every time; its result may be inconsistent");
        }
        Ok(answers.bodies)
    }

    /// A request that adds or changes `target`, for an error.
    pub(super) fn change(
        &self,
        request: &Request,
        flags: u16,
        op: &'static str,
        target: &dyn Display,
    ) -> Result<()> {
        self.ack(request, flags).map_err(|failure| failure.context(op, target))
    }

    /// A request that deletes `target`; `false` if it was absent.
    pub(super) fn delete(
        &self,
        request: &Request,
        op: &'static str,
        target: &dyn Display,
    ) -> Result<bool> {
        unless_absent(self.change(request, 0, op, target).map(|()| true), false)
    }

    /// A request for a list of `target`, without the objects that `parse` skips.
    pub(super) fn list<T>(
        &self,
        request: &Request,
        op: &'static str,
        target: &dyn Display,
        parse: fn(&[u8]) -> Option<T>,
    ) -> Result<Vec<T>> {
        let bodies = self.dump(request).map_err(|failure| failure.context(op, target))?;
        Ok(bodies.iter().filter_map(|body| parse(body)).collect())
    }

    /// Sends a request and collects the whole reply.
    pub(super) fn exchange(&self, request: &Request, flags: u16) -> Result<Answers, Failure> {
        let (mut wire, sequence) = (Vec::new(), self.sequence(1));
        request.write(None, flags, sequence, &mut wire);
        let _span = request_span(&wire);
        // A receive buffer that is full of events has no room for the reply.
        self.drain()?;
        self.send(&wire)?;
        let (mut collected, mut lost) = (Vec::new(), false);
        loop {
            match self.receive() {
                Ok(Some(messages)) => {
                    let mine = |m: &Message| m.sequence == sequence;
                    let (answers, others) = messages.into_iter().partition(mine);
                    self.keep(others);
                    collected.extend::<Vec<_>>(answers);
                    if collected.last().is_some_and(|message| ends(message, flags)) {
                        return Answers::collect(collected);
                    }
                }
                // A reply that is not queued now will not come.
                Ok(None) if lost => return Err(Failure::unanswered(Errno::ENOBUFS)),
                Ok(None) if self.wait(LIMIT)? => {}
                Ok(None) => return Err(Failure::unanswered(Errno::ETIMEDOUT)),
                Err(Failure { errno: Errno::ENOBUFS, .. }) => lost = true,
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Sends requests, each with its flags, in one datagram and collects the reply to each. At most one
    /// of them may ask for a list. Two system calls, if the list is short.
    pub(super) fn exchange_all(
        &self,
        requests: &[(Request, u16)],
    ) -> Result<Vec<Result<Answers, Failure>>, Failure> {
        let first = self.sequence(u32::try_from(requests.len()).map_err(|_| Errno::E2BIG)?);
        let mut wire = Vec::new();
        for (sequence, (request, flags)) in (first..).zip(requests) {
            request.write(None, *flags, sequence, &mut wire);
        }
        let _span = request_span(&wire);
        self.drain()?;
        self.send(&wire)?;
        // The replies come in the order of the requests, then the rest of a list.
        let room = |(_, flags): &(_, u16)| if flags & NLM_F_DUMP != 0 { PART } else { ONE };
        let rooms: Vec<usize> = requests.iter().map(room).chain([PART]).collect();
        let mut answers = vec![Vec::new(); requests.len()];
        let mut open = requests.len();
        while open > 0 {
            let messages = self.receive_each(&rooms)?;
            if messages.is_empty() && !self.wait(LIMIT)? {
                return Err(Failure::unanswered(Errno::ETIMEDOUT));
            }
            for message in messages {
                let at = message.sequence.wrapping_sub(first) as usize;
                if let Some(answer) = answers.get_mut(at) {
                    open -= usize::from(ends(&message, requests[at].1));
                    answer.push(message);
                } else {
                    self.keep(vec![message]);
                }
            }
        }
        Ok(answers.into_iter().map(Answers::collect).collect())
    }

    /// The kernel's messages in the queued datagrams, at most one datagram for each of `rooms`.
    fn receive_each(&self, rooms: &[usize]) -> Result<Vec<Message>, Failure> {
        let mut buffer = vec![0; rooms.iter().sum()];
        let mut rest = buffer.as_mut_slice();
        let mut slices = Vec::new();
        for room in rooms {
            let (slice, behind) = rest.split_at_mut(*room);
            slices.push([IoSliceMut::new(slice)]);
            rest = behind;
        }
        let mut headers = MultiHeaders::<NetlinkAddr>::preallocate(rooms.len(), None);
        let fd = self.inner.as_raw_fd();
        let slices = slices.iter_mut();
        let datagrams = match recvmmsg(fd, &mut headers, slices, MsgFlags::MSG_DONTWAIT, None) {
            Ok(datagrams) => datagrams,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(Vec::new()),
            Err(errno) => return Err(Failure::unanswered(errno)),
        };
        let mut messages = Vec::new();
        for datagram in datagrams {
            if datagram.flags.contains(MsgFlags::MSG_TRUNC) {
                return Err(Failure::unanswered(Errno::EMSGSIZE));
            }
            if datagram.address.is_some_and(|from| from.pid() == 0) {
                messages.extend(datagram.iovs().flat_map(split));
            }
        }
        Ok(messages)
    }

    /// Sends one datagram of any size.
    pub(super) fn send(&self, wire: &[u8]) -> Result<(), Failure> {
        if wire.len() > DEFAULT_SEND_BUFFER {
            // The unprivileged option is limited by the sysctl net.core.wmem_max.
            if setsockopt(&self.inner, SndBufForce, &wire.len()).is_err() {
                setsockopt(&self.inner, SndBuf, &wire.len())?;
            }
        }
        loop {
            match self.inner.send_to(wire, &SocketAddr::new(0, 0), 0) {
                Ok(_) => return Ok(()),
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(failed(&cause)),
            }
        }
    }

    /// The messages in the next datagram of the kernel; `None` if the queue is empty. Datagrams of
    /// other processes are discarded. `ENOBUFS` means that datagrams were lost.
    pub(super) fn receive(&self) -> Result<Option<Vec<Message>>, Failure> {
        let (mut buffer, mut failures) = (Vec::with_capacity(BUFFER), 0);
        loop {
            match self.inner.recv_from(&mut buffer, MSG_DONTWAIT) {
                Ok((_, from)) if from.port_number() != 0 => buffer.clear(),
                Ok(_) => return Ok(Some(split(&buffer))),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) if failures == FAILURES || cause.raw_os_error() == Some(ENOBUFS) => {
                    return Err(failed(&cause));
                }
                Err(_) => failures += 1,
            }
        }
    }

    /// Stores events, if a group was joined.
    fn keep(&self, messages: Vec<Message>) {
        if self.joined.get() {
            self.events.borrow_mut().extend(messages);
        }
    }

    /// Stores the queued events.
    fn drain(&self) -> Result<(), Failure> {
        while self.joined.get() {
            match self.receive() {
                Ok(Some(messages)) => self.keep(messages),
                Err(Failure { errno: Errno::ENOBUFS, .. }) => self.keep(vec![Message::LOST]),
                Ok(None) => break,
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    /// Waits for a datagram; `false` after `limit`.
    pub(super) fn wait(&self, limit: Duration) -> Result<bool, Failure> {
        let mut fds = [PollFd::new(self.inner.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX)) {
            Ok(0) => Ok(false),
            Ok(_) | Err(Errno::EINTR) => Ok(true),
            Err(errno) => Err(Failure::unanswered(errno)),
        }
    }

    /// Waits for the next event of the joined groups; `None` after `deadline`. Lost events are
    /// reported as [`Message::LOST`].
    pub(super) fn event(&self, deadline: Instant) -> Result<Option<Message>, Failure> {
        loop {
            if let Some(event) = self.events.borrow_mut().pop_front() {
                return Ok(Some(event));
            }
            self.drain()?;
            if self.events.borrow().is_empty() {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() || !self.wait(left)? {
                    return Ok(None);
                }
            }
        }
    }

    /// Joins a multicast group of the socket's namespace. Events have the sequence numbers of other
    /// processes' requests, which usually begin at 1 or at the time; own requests get different ones.
    pub(super) fn join(&self, group: u32) -> Result<(), Failure> {
        let number = RandomState::new().hash_one(group).to_le_bytes();
        self.sequence.set(u32::from_le_bytes([number[0], number[1], number[2], 0x70]));
        self.inner.add_membership(group)?;
        self.joined.set(true);
        Ok(())
    }

    /// Leaves a multicast group and discards its events.
    pub(super) fn leave(&self, group: u32) -> Result<(), Failure> {
        self.inner.drop_membership(group)?;
        self.drain()?;
        self.joined.set(false);
        self.events.borrow_mut().clear();
        Ok(())
    }
}

/// A failure of the socket rather than of the request.
fn failed(cause: &io::Error) -> Failure {
    Failure::unanswered(cause.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
}

/// Whether this message is the end of the reply to a request with these flags.
fn ends(message: &Message, flags: u16) -> bool {
    message.is_final() || flags & (NLM_F_ACK | NLM_F_DUMP) == 0
}

/// The messages in a datagram, up to the first malformed one.
pub(super) fn split(mut datagram: &[u8]) -> Vec<Message> {
    let mut messages = Vec::new();
    while let Ok(message) = NetlinkBuffer::new_checked(datagram) {
        messages.push(Message {
            kind: message.message_type(),
            flags: message.flags(),
            sequence: message.sequence_number(),
            body: message.payload().to_vec(),
        });
        let length = message.length() as usize;
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    messages
}

/// A trace span for requests, with the type (netlink(7), `nlmsg_type`) of the first.
pub(super) fn request_span(wire: &[u8]) -> trace::Span {
    let span = trace::span("netlink");
    if let [_, _, _, _, low, high, ..] = wire {
        span.number("netlink.type", u16::from_ne_bytes([*low, *high]).into());
    }
    span.number("netlink.bytes", wire.len() as u64);
    span
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_message_type_is_a_reply() {
        let datagram = [vec![19, 0, 0, 0, 0xff, 0xff], vec![0; 10], vec![0xff; 3]].concat();
        let [message] = &split(&datagram)[..] else { panic!("not one message") };
        assert_eq!((message.kind, &message.body[..]), (0xffff, &[0xff; 3][..]));
        assert!(split(&datagram[..18]).is_empty());
    }
}
