//! Requests and dumps of netfilter.

use std::fmt;
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::RcvBufForce;
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST};
use rtnetlink::sys::protocols::NETLINK_NETFILTER;

use super::attribute::{Attributes, Header};
use super::deferred_close::Keeper;
use super::error::{Failure, Result};
use super::request::{Answers, until_consistent};
use super::socket::Socket;
use crate::log;

/// The length of netfilter's own header, in front of the attributes: `struct nfgenmsg`.
pub(super) const NFGENMSG: usize = 4;

/// A socket in one network namespace.
pub(super) struct NfSocket {
    pub(super) socket: Socket,
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

impl Query {
    fn write(&self, flags: u16, sequence: u32, wire: &mut Vec<u8>) {
        let Query { kind, family, ref body } = *self;
        Header { kind, flags, sequence, family, resource: 0 }.write(body.as_bytes(), wire);
    }
}

impl NfSocket {
    /// A socket in the calling thread's namespace.
    pub(super) fn open() -> Result<NfSocket> {
        let socket = Socket::open(NETLINK_NETFILTER)?;
        // Without it refusals of large batches may be lost.
        setsockopt(&socket, RcvBufForce, &(1024 * 1024)).unwrap_or_default();
        Ok(NfSocket { socket, keeper: None })
    }

    /// Waits for an event, and reads all that are queued; whether one came before `until`. Events are told from
    /// answers by their port, which is that of the socket that made the change; their content is not read.
    pub(super) fn heard(&self, until: Instant) -> Result<bool, Failure> {
        let heard = self.socket.wait(until.saturating_duration_since(Instant::now()))?;
        loop {
            match self.socket.receive() {
                Ok(None) => return Ok(heard),
                // More than fits: something did happen.
                Ok(Some(_)) | Err(Failure { errno: Errno::ENOBUFS, .. }) => {}
                Err(failure) => return Err(failure),
            }
        }
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

    /// Requests for one thing each, but for a list where that is said, in one datagram.
    pub(super) fn request_all(
        &self,
        queries: &[(Query, bool)],
    ) -> Result<Vec<Result<Answers, Failure>>, Failure> {
        let count = u32::try_from(queries.len()).map_err(|_| Errno::E2BIG)?;
        let first = self.socket.sequence(count);
        let (mut wire, mut all, mut sequence) = (Vec::new(), Vec::new(), first);
        for (query, is_list) in queries {
            let flags = NLM_F_REQUEST | if *is_list { NLM_F_DUMP } else { 0 };
            query.write(flags, sequence, &mut wire);
            all.push(flags);
            sequence += 1;
        }
        self.socket.exchange_all(&wire, first, &all)
    }

    fn exchange(&self, query: &Query, bits: u16) -> Result<Answers, Failure> {
        let (flags, sequence) = (NLM_F_REQUEST | bits, self.socket.sequence(1));
        let mut wire = Vec::new();
        query.write(flags, sequence, &mut wire);
        self.socket.exchange(&wire, sequence, flags)
    }
}
