//! A netlink socket: requests, their answers, and what the kernel tells unasked.
//!
//! Without tokio: the kernel answers while it is asked, so that the answers wait when sending
//! returns. A plain socket that never blocks does, and a batch needs no reader beside its writer.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc::MSG_DONTWAIT;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::sockopt::{SndBuf, SndBufForce};
use nix::sys::socket::{MsgFlags, MultiHeaders, NetlinkAddr, recvmmsg, setsockopt};
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_DUMP, NetlinkBuffer, NetlinkHeader, NetlinkPayload};
use rtnetlink::sys::{self, SocketAddr};

use super::error::{Failure, Result};
use super::packet::Message;
use super::request::Answers;
use crate::netns;
use crate::trace;

/// How much one read may bring: the kernel fills dumps up to half of it.
const BUFFER: usize = 64 * 1024;

/// How much the kernel puts at most into the datagram of a list, and of one thing: an element has
/// two keys, a value and a comment.
const PART: usize = 32 * 1024;
const ONE: usize = 1024;

/// What a socket can send without asking for more, on a kernel with the usual default.
const DEFAULT_SEND_BUFFER: usize = 128 * 1024;

/// How long to wait for an answer that should be there already.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

/// How often receiving may fail. The answer usually is in the queue nevertheless, and without it the caller
/// does not know whether the kernel carried the request out.
const FAILURES: usize = 3;

/// A socket in one network namespace.
pub(super) struct Socket {
    inner: sys::Socket,
    sequence: Cell<u32>,
    /// Whether events are wanted.
    joined: Cell<bool>,
    /// Messages that arrived while another answer was awaited.
    events: RefCell<VecDeque<Message>>,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl Socket {
    /// A socket in the calling thread's namespace.
    pub(super) fn open(protocol: isize) -> Result<Socket> {
        netns::at_home()?;
        let opening = |cause| Failure::from(cause).doing("open", || "netlink socket".to_owned());
        let socket = sys::Socket::new(protocol).map_err(opening)?;
        // Errors with a sentence and without a copy of the request, and filters that are not
        // ignored: kernels before 4.20 do without, and netfilter without the last one.
        let strict = || socket.set_netlink_get_strict_chk(true);
        let strict = (protocol == sys::protocols::NETLINK_ROUTE).then(strict);
        drop((socket.set_ext_ack(true), socket.set_cap_ack(true), strict));
        let (sequence, joined, events) = (Cell::new(1), Cell::new(false), RefCell::default());
        Ok(Socket { inner: socket, sequence, joined, events })
    }

    /// Reserves `count` sequence numbers and returns the first.
    pub(super) fn sequence(&self, count: u32) -> u32 {
        let first = self.sequence.get();
        // 0 is the sequence number of events.
        self.sequence.set(first.checked_add(count).unwrap_or(1));
        first
    }

    /// Sends the request of this number and collects everything the kernel answers.
    pub(super) fn exchange(
        &self,
        wire: &[u8],
        sequence: u32,
        flags: u16,
    ) -> Result<Answers, Failure> {
        let _span = request_span(wire);
        // Where events have filled the socket there is no room for an answer.
        self.drain()?;
        self.send(wire)?;
        let (mut collected, mut lost) = (Vec::new(), false);
        loop {
            match self.receive() {
                Ok(Some(messages)) => {
                    let mine = |m: &Message| m.header.sequence_number == sequence;
                    let (answers, others) = messages.into_iter().partition(mine);
                    self.keep(others);
                    collected.extend::<Vec<_>>(answers);
                    if collected.last().is_some_and(|message| ends(message, flags)) {
                        return Answers::collect(collected);
                    }
                }
                // What is not there now will not come.
                Ok(None) if lost => return Err(Failure::unanswered(Errno::ENOBUFS)),
                Ok(None) if self.wait(LIMIT)? => {}
                Ok(None) => return Err(Failure::unanswered(Errno::ETIMEDOUT)),
                Err(Failure { errno: Errno::ENOBUFS, .. }) => lost = true,
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Sends requests in one datagram and collects what the kernel answers to each. Their numbers begin
    /// with `first`; one of them may ask for a list. Two system calls, if the list is short.
    pub(super) fn exchange_all(
        &self,
        wire: &[u8],
        first: u32,
        flags: &[u16],
    ) -> Result<Vec<Result<Answers, Failure>>, Failure> {
        let _span = request_span(wire);
        self.drain()?;
        self.send(wire)?;
        // The answers come in the order of the requests, the rest of a list behind them.
        let is_list = |flags: &u16| flags & NLM_F_DUMP != 0;
        let room = |flags: &u16| if is_list(flags) { PART } else { ONE };
        let rooms: Vec<usize> = flags.iter().map(room).chain([PART]).collect();
        let mut answers = vec![Vec::new(); flags.len()];
        let mut open = flags.len();
        while open > 0 {
            let messages = self.receive_each(&rooms)?;
            if messages.is_empty() && !self.wait(LIMIT)? {
                return Err(Failure::unanswered(Errno::ETIMEDOUT));
            }
            for message in messages {
                let at = message.header.sequence_number.wrapping_sub(first) as usize;
                let (Some(answer), Some(flags)) = (answers.get_mut(at), flags.get(at)) else {
                    self.keep(vec![message]);
                    continue;
                };
                open -= usize::from(ends(&message, *flags));
                answer.push(message);
            }
        }
        Ok(answers.into_iter().map(Answers::collect).collect())
    }

    /// The messages of the kernel in the datagrams that wait, one for each of `rooms` at most.
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

    /// Sends everything at once, whatever its size: a batch is one datagram.
    pub(super) fn send(&self, wire: &[u8]) -> Result<(), Failure> {
        if wire.len() > DEFAULT_SEND_BUFFER {
            // The unprivileged option is bounded by a sysctl, but better than none.
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

    /// The messages in the next datagram of the kernel; `None` when there is none. What another
    /// process sends is nothing. `ENOBUFS` says that something was lost.
    pub(super) fn receive(&self) -> Result<Option<Vec<Message>>, Failure> {
        let (mut buffer, mut failures) = (Vec::with_capacity(BUFFER), 0);
        loop {
            match self.inner.recv_from(&mut buffer, MSG_DONTWAIT) {
                Ok((_, from)) if from.port_number() != 0 => buffer.clear(),
                Ok(_) => return Ok(Some(split(&buffer))),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) if failures == FAILURES || is_overrun(&cause) => {
                    return Err(failed(&cause));
                }
                Err(_) => failures += 1,
            }
        }
    }

    /// Keeps messages that answer nothing, if events are wanted.
    fn keep(&self, messages: Vec<Message>) {
        if self.joined.get() {
            self.events.borrow_mut().extend(messages);
        }
    }

    /// Keeps the events that have come.
    fn drain(&self) -> Result<(), Failure> {
        while self.joined.get() {
            match self.receive() {
                Ok(Some(messages)) => self.keep(messages),
                Err(Failure { errno: Errno::ENOBUFS, .. }) => self.keep(vec![lost()]),
                Ok(None) => break,
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    /// Waits for a datagram; whether one came in time.
    pub(super) fn wait(&self, limit: Duration) -> Result<bool, Failure> {
        let mut fds = [PollFd::new(self.inner.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX)) {
            Ok(0) => Ok(false),
            Ok(_) | Err(Errno::EINTR) => Ok(true),
            Err(errno) => Err(Failure::unanswered(errno)),
        }
    }

    /// Waits for the next event of the groups that were joined; `None` after `deadline`. An
    /// event that was lost is one as well.
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

    /// Joins a multicast group, so that events of the socket's own namespace arrive. They have the
    /// numbers of other processes' requests, which begin at 1 or at the time.
    pub(super) fn join(&self, group: u32) -> Result<(), Failure> {
        let number = RandomState::new().hash_one(group).to_le_bytes();
        self.sequence.set(u32::from_le_bytes([number[0], number[1], number[2], 0x70]));
        self.inner.add_membership(group)?;
        self.joined.set(true);
        Ok(())
    }

    /// Leaves a multicast group and forgets what it sent.
    pub(super) fn leave(&self, group: u32) -> Result<(), Failure> {
        self.inner.drop_membership(group)?;
        self.drain()?;
        self.joined.set(false);
        self.events.borrow_mut().clear();
        Ok(())
    }
}

/// The socket has failed, not the request.
fn failed(cause: &io::Error) -> Failure {
    Failure::unanswered(cause.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
}

fn is_overrun(cause: &io::Error) -> bool {
    cause.raw_os_error() == Some(nix::libc::ENOBUFS)
}

/// What stands for events that were lost.
fn lost() -> Message {
    Message::new(NetlinkHeader::default(), NetlinkPayload::Overrun(Vec::new()))
}

/// Whether nothing follows this answer to a request with these flags.
fn ends(message: &Message, flags: u16) -> bool {
    match message.payload {
        NetlinkPayload::Error(_) | NetlinkPayload::Done(_) => true,
        _ => flags & (NLM_F_ACK | NLM_F_DUMP) == 0,
    }
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

/// The span of requests; the type is that of the first (netlink(7), `nlmsg_type`).
pub(super) fn request_span(wire: &[u8]) -> trace::Span {
    let span = trace::span("netlink");
    if let [_, _, _, _, low, high, ..] = wire {
        span.number("netlink.type", u16::from_ne_bytes([*low, *high]).into());
    }
    span.number("netlink.bytes", wire.len() as u64);
    span
}
