//! Making the changes of a batch.
//!
//! The kernel reads the whole batch even when a change fails, and then refuses all of it with
//! one error for each failed change. Deleting what is not there succeeds at once since Linux 6.3; on
//! older kernels, and where even the table is missing, the changes that failed only for that reason
//! are left out, and the rest is tried again. That costs some 15 ms: the kernel waits for its
//! readers after a failure.

use nix::errno::Errno;
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkPayload};

use super::super::attribute::{Attributes, Header};
use super::super::error::{Error, Failure, Result};
use super::super::packet::{Attr, Message, attrs};
use super::super::request::{ext_ack, failure};
use super::super::socket::{LIMIT, request_span};
use super::batch::{Batch, Change};
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::{Nft, kind};

/// Where in the message the kernel found fault.
const NLMSGERR_ATTR_OFFS: u16 = 2;

/// How often a change is tried that others got ahead of; each time at least one of them is done.
const ATTEMPTS: usize = 200;

/// Why a batch was refused: the numbers of changes, and what the kernel said of each.
struct Refusals {
    /// About the batch as a whole.
    whole: Option<Failure>,
    each: Vec<(usize, Failure)>,
    /// Some refusals did not fit in the socket's buffer.
    lost: bool,
}

impl Nft {
    /// Makes all changes, or none of them.
    pub fn commit(&self, batch: Batch) -> Result<()> {
        self.commit_at(batch, 0)
    }

    /// Makes the changes that `plan` finds to be necessary, provided no process changed anything
    /// since it looked; else it looks again.
    pub fn update(&self, plan: &mut dyn FnMut(&Nft) -> Result<Batch>) -> Result<()> {
        let mut outcome = Ok(());
        for _ in 0..ATTEMPTS {
            let generation = self.generation()?;
            let batch = plan(self)?;
            outcome = self.commit_at(batch, generation);
            match &outcome {
                Err(error) if error.errno() == Some(Errno::ERESTART) => {}
                _ => break,
            }
        }
        outcome
    }

    /// Makes all changes, or none of them if there was another change since this
    /// [generation](super::read::Look::generation): `ERESTART`. After 0 there may have been any.
    pub fn commit_at(&self, mut batch: Batch, generation: u32) -> Result<()> {
        // Every repetition but one leaves out at least one change.
        while !batch.changes.is_empty() {
            let refusals = match self.attempt(&batch.changes, generation) {
                Ok(None) => return Ok(()),
                Ok(Some(refusals)) => refusals,
                Err(failure) => return Err(whole(failure)),
            };
            let changes = &batch.changes;
            if self.destroys.get() && refusals.are_of_destroying(changes) {
                self.destroys.set(false);
                continue;
            }
            let unnecessary = refusals.unnecessary(changes);
            if unnecessary.is_empty() {
                return Err(refusals.explain(changes));
            }
            let mut at = 0..;
            batch.changes.retain(|_| at.next().is_none_or(|at| !unnecessary.contains(&at)));
        }
        Ok(())
    }

    /// Sends the batch in one piece; `None` is success.
    fn attempt(&self, changes: &[Change], generation: u32) -> Result<Option<Refusals>, Failure> {
        let count = u32::try_from(changes.len()).map_err(|_| Errno::E2BIG)?;
        let socket = &self.socket.socket;
        let first = socket.sequence(count.saturating_add(2));
        let wire = self.envelope(changes, first, generation);
        let span = request_span(&wire);
        span.number("nf_tables.changes", count.into());
        socket.send(&wire)?;
        let mut refusals = Refusals { whole: None, each: Vec::new(), lost: false };
        let mut done = false;
        loop {
            match socket.receive() {
                Ok(Some(messages)) => {
                    for message in messages {
                        done |= refusals.take(&message, first, changes.len());
                    }
                }
                Ok(None) if done || refusals.any() => break,
                Ok(None) if socket.wait(LIMIT)? => {}
                Ok(None) => return Err(Failure::unanswered(Errno::ETIMEDOUT)),
                Err(Failure { errno: Errno::ENOBUFS, .. }) => refusals.lost = true,
                Err(failure) => return Err(failure),
            }
        }
        Ok(refusals.any().then_some(refusals))
    }

    /// The batch as one datagram. Only the last change is acknowledged: that it worked says that
    /// all did, and thousands of acknowledgements would not fit in the socket's buffer.
    fn envelope(&self, changes: &[Change], first: u32, generation: u32) -> Vec<u8> {
        let mut wire = Vec::new();
        let (flags, resource) = (NLM_F_REQUEST, NFNL_SUBSYS_NFTABLES);
        let edge = |kind, sequence| Header { kind, flags, sequence, family: 0, resource };
        let mut begin = Attributes::new();
        if generation != 0 {
            begin.be32(NFNL_BATCH_GENID, generation);
        }
        edge(NFNL_MSG_BATCH_BEGIN, first).write(&begin.into_bytes(), &mut wire);
        let mut sequence = first;
        for (at, change) in changes.iter().enumerate() {
            sequence += 1;
            let message = change.destroy.filter(|_| self.destroys.get()).unwrap_or(change.message);
            let ack = if at + 1 == changes.len() { NLM_F_ACK } else { 0 };
            let flags = NLM_F_REQUEST | change.flags | ack;
            let (kind, family) = (kind(message), change.family);
            Header { kind, flags, sequence, family, resource: 0 }.write(&change.body, &mut wire);
        }
        edge(NFNL_MSG_BATCH_END, sequence + 1).write(&[], &mut wire);
        wire
    }
}

impl Refusals {
    fn any(&self) -> bool {
        self.whole.is_some() || !self.each.is_empty() || self.lost
    }

    /// Notes what `message` says; whether it is the acknowledgement of the last change.
    fn take(&mut self, message: &Message, first: u32, count: usize) -> bool {
        let NetlinkPayload::Error(error) = &message.payload else { return false };
        // The sequence numbers of an earlier batch wrap to large numbers.
        let at = message.header.sequence_number.wrapping_sub(first) as usize;
        let Some(code) = error.code else { return at == count };
        let extra = ext_ack(message.header.flags, &error.header);
        let mut refusal = failure(code.get(), extra);
        match at {
            0 => self.whole = Some(refusal),
            _ if at > count + 1 => {}
            _ => {
                let offset = attrs(extra).find(|attr| attr.kind == NLMSGERR_ATTR_OFFS);
                refusal.offset = offset.and_then(Attr::u32);
                self.each.push((at - 1, refusal));
            }
        }
        false
    }

    /// Whether a message was refused that older kernels do not know.
    fn are_of_destroying(&self, changes: &[Change]) -> bool {
        self.each.iter().any(|refusal| is_deletion(changes, refusal, Errno::EINVAL))
    }

    /// The changes that were to delete what is not there, if there is no other trouble.
    fn unnecessary(&self, changes: &[Change]) -> Vec<usize> {
        let absent = |refusal: &_| is_deletion(changes, refusal, Errno::ENOENT);
        if self.whole.is_some() || !self.each.iter().all(absent) {
            return Vec::new();
        }
        self.each.iter().map(|(at, _)| *at).collect()
    }

    /// The first change that failed for a reason of its own: the kernel goes on after a failure,
    /// and what depends on the failed change fails too.
    fn explain(self, changes: &[Change]) -> Error {
        let mut each = self.each.into_iter();
        let real = each.find_map(|refusal| {
            let change = changes.get(refusal.0)?;
            (!is_deletion(changes, &refusal, Errno::ENOENT)).then_some((change, refusal.1))
        });
        let Some((change, mut failure)) = real else {
            return whole(self.whole.unwrap_or(Errno::ENOBUFS.into()));
        };
        if failure.kernel.is_none() {
            let blamed = failure.offset.and_then(|offset| change.blamed(offset as usize));
            failure.kernel = blamed;
        }
        failure.doing(change.op, || change.target.clone())
    }
}

/// Whether a change of what may be absent was refused for this reason.
fn is_deletion(changes: &[Change], (at, failure): &(usize, Failure), errno: Errno) -> bool {
    changes.get(*at).is_some_and(|change| change.destroy.is_some()) && failure.errno == errno
}

fn whole(failure: Failure) -> Error {
    let lacking = matches!(failure.errno, Errno::EOPNOTSUPP | Errno::EINVAL);
    let error = failure.doing("change", || "nf_tables".to_owned());
    if lacking {
        let remedy = "the kernel seems to have no nf_tables: load the module nf_tables";
        return error.with_remedy(remedy.to_owned());
    }
    error
}
