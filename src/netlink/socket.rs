//! A netlink socket: requests and their replies, or events.
//!
//! The kernel replies before send(2) returns, so a plain non-blocking socket is enough
//! (docs/decisions/0018-plain-netlink-sockets.md).

use std::borrow::Borrow;
use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::libc::{ENOBUFS, MSG_DONTWAIT, MSG_TRUNC};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{RcvBufForce, SndBuf, SndBufForce};
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_ECHO, NetlinkBuffer};
use rtnetlink::sys::protocols::NETLINK_NETFILTER;
use rtnetlink::sys::{self, SocketAddr};

use super::deferred_close::DeferredClose;
use super::error::{NetlinkResult, RequestFailure, unless_absent};
use super::request::{KernelMessage, NetlinkReply, NetlinkRequest, repeat_until_consistent};
use crate::netns;
use crate::trace;

/// Size of the buffer for one read, in bytes. The parts of a dump are at most half as large, and
/// about 4 KiB until the first read has shown the kernel the size of the buffer.
const BUFFER: usize = 64 * 1024;

/// The kernel's default size of the send buffer, in bytes.
const DEFAULT_SEND_BUFFER: usize = 128 * 1024;

/// How long to wait for a reply, which is usually queued already.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Retries of a failed receive. The reply is usually in the queue nevertheless, and without the
/// reply the caller does not know whether the kernel executed the request.
const RECEIVE_RETRIES: usize = 3;

/// A socket in one network namespace.
#[derive(Debug)]
pub(super) struct NetlinkSocket {
    inner: sys::Socket,
    /// Dropped after `inner`, so that the socket is closed in the background.
    keeper: Option<DeferredClose>,
    protocol: isize,
    sequence: Cell<u32>,
    /// The size of the buffer for one read.
    size: usize,
    /// The memory of [`NetlinkSocket::receive_datagram`].
    buffer: RefCell<Vec<u8>>,
}

impl AsFd for NetlinkSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl Drop for NetlinkSocket {
    fn drop(&mut self) {
        if self.protocol == NETLINK_NETFILTER {
            self.keeper = DeferredClose::register_file(&self.inner);
        }
    }
}

impl NetlinkSocket {
    /// A socket in the calling thread's namespace.
    pub(super) fn open(protocol: isize) -> NetlinkResult<NetlinkSocket> {
        NetlinkSocket::open_for_parts(protocol, BUFFER)
    }

    /// Like [`NetlinkSocket::open`], with a buffer for one read, which limits the parts of a dump.
    pub(super) fn open_for_parts(protocol: isize, size: usize) -> NetlinkResult<NetlinkSocket> {
        netns::require_home_netns()?;
        let inner = sys::Socket::new(protocol)
            .map_err(|cause| RequestFailure::from(cause).into_error("open", &"netlink socket"))?;
        // The kernel adds a message to refusals, and omits the copy of the request. Kernels before
        // 4.12 lack this.
        drop((inner.set_ext_ack(true), inner.set_cap_ack(true)));
        if protocol == NETLINK_NETFILTER {
            // With the default size, refusals of large batches may be lost.
            setsockopt(&inner, RcvBufForce, &(1024 * 1024)).unwrap_or_default();
        } else {
            // The kernel applies the filters of dumps. Kernels before 4.20 lack this.
            drop(inner.set_netlink_get_strict_chk(true));
        }
        Ok(NetlinkSocket {
            inner,
            keeper: None,
            protocol,
            sequence: Cell::new(1),
            size,
            buffer: RefCell::default(),
        })
    }

    /// A socket for the events of multicast groups of the calling thread's namespace.
    pub(super) fn listen_to_groups(
        protocol: isize,
        groups: &[u32],
    ) -> NetlinkResult<NetlinkSocket> {
        let mut socket = NetlinkSocket::open(protocol)?;
        // A socket without a port receives no events.
        let bound = socket.inner.bind_auto().map(drop);
        let joined = bound
            .and_then(|()| groups.iter().try_for_each(|group| socket.inner.add_membership(*group)));
        joined
            .map_err(|cause| RequestFailure::from(cause).into_error("watch", &"netlink events"))?;
        Ok(socket)
    }

    /// Reserves `count` sequence numbers and returns the first one.
    pub(super) fn reserve_sequence(&self, count: u32) -> u32 {
        let first = self.sequence.get();
        // 0 is the sequence number of events.
        self.sequence.set(first.checked_add(count).unwrap_or(1));
        first
    }

    /// Sends a request whose reply is only success or failure.
    pub(super) fn request_ack(
        &self,
        request: &NetlinkRequest,
        flags: u16,
    ) -> NetlinkResult<(), RequestFailure> {
        self.exchange_one(request, NLM_F_ACK | flags).map(drop)
    }

    /// Like [`NetlinkSocket::request_ack`]; returns the kernel's description of the new object, if
    /// there is one.
    pub(super) fn request_ack_and_echo(
        &self,
        request: &NetlinkRequest,
        flags: u16,
    ) -> NetlinkResult<Option<Vec<u8>>, RequestFailure> {
        let reply = self.exchange_one(request, NLM_F_ACK | NLM_F_ECHO | flags)?;
        Ok(reply.bodies.into_iter().next())
    }

    /// Requests one object, and returns the body of the reply.
    pub(super) fn request_object(
        &self,
        request: &NetlinkRequest,
    ) -> NetlinkResult<Vec<u8>, RequestFailure> {
        let reply = self.exchange_one(request, 0)?;
        reply.bodies.into_iter().next().ok_or(RequestFailure::from(Errno::ENODATA))
    }

    /// Requests a list. An interrupted dump is repeated a few times; then the last attempt is used.
    pub(super) fn request_dump(
        &self,
        request: &NetlinkRequest,
    ) -> NetlinkResult<Vec<Vec<u8>>, RequestFailure> {
        let reply = repeat_until_consistent(&mut || self.exchange_one(request, NLM_F_DUMP))?;
        if reply.interrupted {
            warn!("a netlink dump was interrupted every time; its result may be inconsistent");
        }
        Ok(reply.bodies)
    }

    /// Sends a request that adds or changes an object. An error names the attempt `op` and the
    /// object `target`.
    pub(super) fn request_change(
        &self,
        request: &NetlinkRequest,
        flags: u16,
        op: &'static str,
        target: &dyn Display,
    ) -> NetlinkResult<()> {
        self.request_ack(request, flags).map_err(|failure| failure.into_error(op, target))
    }

    /// Sends a request that deletes an object; `false` if the object was absent.
    pub(super) fn request_deletion(
        &self,
        request: &NetlinkRequest,
        op: &'static str,
        target: &dyn Display,
    ) -> NetlinkResult<bool> {
        unless_absent(self.request_change(request, 0, op, target).map(|()| true), false)
    }

    /// Requests a list, without the objects for which `parse` returns `None`.
    pub(super) fn request_list<T>(
        &self,
        request: &NetlinkRequest,
        op: &'static str,
        target: &dyn Display,
        parse: fn(&[u8]) -> Option<T>,
    ) -> NetlinkResult<Vec<T>> {
        let bodies =
            self.request_dump(request).map_err(|failure| failure.into_error(op, target))?;
        Ok(bodies.iter().filter_map(|body| parse(body)).collect())
    }

    /// Sends a request and collects the whole reply.
    pub(super) fn exchange_one(
        &self,
        request: &NetlinkRequest,
        flags: u16,
    ) -> NetlinkResult<NetlinkReply, RequestFailure> {
        let replies = self.exchange_all(&[(request, flags)])?;
        replies.into_iter().next().unwrap_or_else(|| Err(Errno::ENODATA.into()))
    }

    /// Sends requests, each with its flags, in one datagram, and collects the reply to each. At
    /// most one of the requests may be for a list.
    pub(super) fn exchange_all(
        &self,
        requests: &[(impl Borrow<NetlinkRequest>, u16)],
    ) -> NetlinkResult<Vec<NetlinkResult<NetlinkReply, RequestFailure>>, RequestFailure> {
        self.exchange_until(requests, &mut |_| false)
    }

    /// Like [`NetlinkSocket::exchange_all`], up to a message for which `is_last` returns true. Then
    /// the socket has no further use.
    pub(super) fn exchange_until(
        &self,
        requests: &[(impl Borrow<NetlinkRequest>, u16)],
        is_last: &mut dyn FnMut(&KernelMessage) -> bool,
    ) -> NetlinkResult<Vec<NetlinkResult<NetlinkReply, RequestFailure>>, RequestFailure> {
        let first = self.reserve_sequence(u32::try_from(requests.len()).map_err(|_| Errno::E2BIG)?);
        let (mut wire, mut pending) = (Vec::new(), Vec::new());
        for (sequence, (request, flags)) in (first..).zip(requests) {
            request.borrow().encode_into(None, *flags, sequence, &mut wire);
            pending.push(PendingRequest { sequence, flags: *flags, reply: Vec::new() });
        }
        let _span = request_span(&wire);
        self.send_datagram(&wire)?;
        let (mut lost, mut is_enough) = (false, false);
        while !is_enough && !pending.iter().all(PendingRequest::has_ended) {
            match self.receive_datagram() {
                Ok(Some(messages)) => {
                    for message in messages {
                        is_enough = is_enough || is_last(&message);
                        let mut all = pending.iter_mut();
                        // Other messages are late replies to earlier requests.
                        if let Some(one) = all.find(|one| one.sequence == message.sequence) {
                            one.reply.push(message);
                        }
                    }
                }
                // A reply that is not queued now will not come.
                Ok(None) if lost => return Err(RequestFailure::new_unanswered(Errno::ENOBUFS)),
                Ok(None) if self.wait_for_datagram(REPLY_TIMEOUT)? => {}
                Ok(None) => return Err(RequestFailure::new_unanswered(Errno::ETIMEDOUT)),
                Err(RequestFailure { errno: Errno::ENOBUFS, .. }) => lost = true,
                Err(failure) => return Err(failure),
            }
        }
        Ok(pending.into_iter().map(|one| NetlinkReply::from_messages(one.reply)).collect())
    }

    /// Sends one datagram of any size.
    pub(super) fn send_datagram(&self, wire: &[u8]) -> NetlinkResult<(), RequestFailure> {
        if wire.len() > DEFAULT_SEND_BUFFER {
            // The option for unprivileged processes is limited by the sysctl net.core.wmem_max.
            if setsockopt(&self.inner, SndBufForce, &wire.len()).is_err() {
                setsockopt(&self.inner, SndBuf, &wire.len())?;
            }
        }
        loop {
            match self.inner.send_to(wire, &SocketAddr::new(0, 0), 0) {
                Ok(_) => return Ok(()),
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(socket_failure(&cause)),
            }
        }
    }

    /// The messages in the next datagram of the kernel; `None` if the queue is empty. Datagrams of
    /// other processes are discarded. `ENOBUFS` means that datagrams were lost.
    pub(super) fn receive_datagram(
        &self,
    ) -> NetlinkResult<Option<Vec<KernelMessage>>, RequestFailure> {
        let (buffer, mut failures) = (&mut *self.buffer.borrow_mut(), 0);
        buffer.clear();
        buffer.reserve(self.size);
        loop {
            match self.inner.recv_from(buffer, MSG_DONTWAIT | MSG_TRUNC) {
                Ok((_, from)) if from.port_number() != 0 => buffer.clear(),
                // With `MSG_TRUNC` this is the size of the datagram.
                Ok((size, _)) if size > buffer.len() => {
                    return Err(RequestFailure::new_unanswered(Errno::EMSGSIZE));
                }
                Ok(_) => return Ok(Some(split_messages(buffer))),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause)
                    if failures == RECEIVE_RETRIES || cause.raw_os_error() == Some(ENOBUFS) =>
                {
                    return Err(socket_failure(&cause));
                }
                Err(_) => failures += 1,
            }
        }
    }

    /// Waits for a datagram; `false` after `limit`.
    pub(super) fn wait_for_datagram(&self, limit: Duration) -> NetlinkResult<bool, RequestFailure> {
        let mut fds = [PollFd::new(self.inner.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX)) {
            Ok(0) => Ok(false),
            Ok(_) | Err(Errno::EINTR) => Ok(true),
            Err(errno) => Err(RequestFailure::new_unanswered(errno)),
        }
    }

    /// Discards the queued events; `true` if one of them `matters`, or if some were lost.
    pub(super) fn drain_events(
        &self,
        matters: &dyn Fn(&KernelMessage) -> bool,
    ) -> NetlinkResult<bool, RequestFailure> {
        let mut heard = false;
        loop {
            match self.receive_datagram() {
                Ok(None) => return Ok(heard),
                Ok(Some(events)) => heard |= events.iter().any(matters),
                Err(RequestFailure { errno: Errno::ENOBUFS, .. }) => heard = true,
                Err(failure) => return Err(failure),
            }
        }
    }
}

/// A request, and the messages of its reply so far.
struct PendingRequest {
    sequence: u32,
    flags: u16,
    reply: Vec<KernelMessage>,
}

impl PendingRequest {
    /// Whether the reply is complete. If neither an acknowledgement nor a list was requested, the
    /// reply is one message.
    fn has_ended(&self) -> bool {
        let is_short = self.flags & (NLM_F_ACK | NLM_F_DUMP) == 0;
        self.reply.last().is_some_and(|message| is_short || message.is_final())
    }
}

/// A failure of the socket rather than of the request.
fn socket_failure(cause: &io::Error) -> RequestFailure {
    RequestFailure::new_unanswered(cause.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
}

/// The messages in a datagram, up to the first malformed one.
pub(super) fn split_messages(mut datagram: &[u8]) -> Vec<KernelMessage> {
    let mut messages = Vec::new();
    // The error for a datagram without bytes would be a text that nobody reads.
    while !datagram.is_empty()
        && let Ok(message) = NetlinkBuffer::new_checked(datagram)
    {
        messages.push(KernelMessage {
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

/// A trace span for requests, with the message type (netlink(7), `nlmsg_type`) of the first
/// request.
pub(super) fn request_span(wire: &[u8]) -> trace::OpenSpan {
    let span = trace::begin_span("netlink");
    if let [_, _, _, _, low, high, ..] = wire {
        span.add_number("netlink.type", u16::from_ne_bytes([*low, *high]).into());
    }
    span.add_number("netlink.bytes", wire.len() as u64);
    span
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_core::NLMSG_ERROR;
    use rtnetlink::sys::protocols::NETLINK_ROUTE;

    use super::*;
    use crate::netns::isolate_test_thread;

    #[test]
    fn an_unknown_message_type_is_a_reply() {
        let datagram = [&19_u32.to_ne_bytes()[..], &[0xff; 2], &[0; 10], &[0xff; 3]].concat();
        let [message] = &split_messages(&datagram)[..] else { panic!("not one message") };
        assert_eq!((message.kind, &message.body[..]), (0xffff, &[0xff; 3][..]));
        assert!(split_messages(&datagram[..18]).is_empty());
    }

    #[test]
    fn messages_of_other_processes_are_not_replies() {
        isolate_test_thread();
        let socket = NetlinkSocket::open(NETLINK_ROUTE).unwrap();
        // RTM_GETLINK of the link with index 1.
        let request = NetlinkRequest::new(18, &[0_u32, 1, 0, 0].map(u32::to_ne_bytes).concat());
        socket.request_object(&request).unwrap();
        let mut own = SocketAddr::new(0, 0);
        socket.inner.get_address(&mut own).unwrap();
        // A refusal of the next request.
        let sequence = socket.sequence.get();
        let words =
            [20, u32::from(NLMSG_ERROR), sequence, 0, (-(Errno::EPERM as i32)).cast_unsigned()];
        let forged = words.map(u32::to_ne_bytes).concat();
        sys::Socket::new(NETLINK_ROUTE).unwrap().send_to(&forged, &own, 0).unwrap();
        assert!(socket.request_object(&request).is_ok());
    }
}
