//! Batches: changes that are applied atomically.
//!
//! The kernel reads the whole batch even when a change fails, and then refuses all of it with one
//! error for each failed change. Deleting an absent object succeeds since Linux 6.3. On older
//! kernels, and where even the table is missing, the changes that failed only because their object
//! is absent are left out, and the other changes are sent again. That costs some 15 ms: the kernel
//! waits for its readers after a failure.

use nix::errno::Errno;
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, NLMSG_ERROR};

use super::super::attribute::{ReplyAttribute, find_attribute};
use super::super::error::{NetlinkError, NetlinkResult, RequestFailure};
use super::super::request::{KernelMessage, NFGENMSG, NLMSG_HDRLEN, NetlinkRequest};
use super::super::socket::{REPLY_TIMEOUT, request_span};
use super::object::{
    NftChain, NftObject, NftSet, NftTable, SetElement, element_request, rule_request,
};
use super::read::RuleInfo;
use super::rule::NftRule;
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::userdata::write_comment;
use super::{NftSocket, message_type};

/// The offset of the fault in the refused message.
const NLMSGERR_ATTR_OFFS: u16 = 2;

/// Attempts at a change while other processes commit first; in each round at least one process
/// succeeds.
const ATTEMPTS: usize = 200;

#[derive(Clone, Debug)]
pub(super) struct BatchChange {
    request: NetlinkRequest,
    flags: u16,
    /// `NFT_MSG_DESTROY..` for the deletion of an object that may be absent.
    pub(super) destroy: Option<u16>,
    /// The attempt and the object, for an error.
    op: &'static str,
    target: String,
}

impl BatchChange {
    /// The expression at `offset` of the message, to which the kernel objects.
    fn faulty_expression(&self, offset: usize) -> Option<String> {
        let body = self.request.body.as_bytes();
        let offset = offset.checked_sub(NLMSG_HDRLEN)?;
        if self.request.kind != message_type(NFT_MSG_NEWRULE) {
            return None;
        }
        let list = find_attribute(&body[NFGENMSG..], NFTA_RULE_EXPRESSIONS)?;
        let faulty = list.nested_attributes().find(|expr| {
            let at = expr.value.as_ptr().addr() - body.as_ptr().addr();
            (at.saturating_sub(4)..at + expr.value.len()).contains(&offset)
        })?;
        Some(format!("in its {} expression", faulty.find_nested(NFTA_EXPR_NAME)?.to_text()))
    }
}

/// Changes in their order. `ensure_x` creates an absent object, `add_x` fails if the object exists,
/// `delete_x` ignores an absent object.
#[derive(Clone, Debug, Default)]
pub struct NftBatch {
    pub(super) changes: Vec<BatchChange>,
}

impl NftBatch {
    pub fn new() -> NftBatch {
        NftBatch::default()
    }

    /// Whether a change concerns the table.
    pub fn is_about_table(&self, table: NftTable<'_>) -> bool {
        self.changes.iter().any(|change| {
            let body = change.request.body.as_bytes();
            let name = find_attribute(&body[NFGENMSG..], NFTA_TABLE_NAME);
            body[0] == table.family as u8 && name.is_some_and(|name| name.to_text() == table.name)
        })
    }

    /// Appends the changes of `other`.
    pub fn append_batch(&mut self, other: NftBatch) -> &mut NftBatch {
        self.changes.extend(other.changes);
        self
    }

    /// Creates the table, chain or set if it is absent; an existing chain keeps its policy. The
    /// kernel counts an update of a chain, which makes closing the socket slow: where that
    /// matters, check with [`NftSocket::has_object`] first.
    pub fn ensure_object(&mut self, object: impl Into<NftObject>) -> &mut NftBatch {
        self.push_creation(object.into(), NLM_F_CREATE, "ensure")
    }

    /// Creates the table, chain or set.
    pub fn add_object(&mut self, object: impl Into<NftObject>) -> &mut NftBatch {
        self.push_creation(object.into(), NLM_F_CREATE | NLM_F_EXCL, "add")
    }

    fn push_creation(&mut self, object: NftObject, flags: u16, op: &'static str) -> &mut NftBatch {
        let NftObject { mut request, settings, text } = object;
        request.body.put_raw(settings.as_bytes());
        if request.kind == message_type(NFT_MSG_NEWSET) {
            request.body.put_u32_be(NFTA_SET_ID, self.changes.len() + 1);
        }
        self.push_change(request, flags, op, text)
    }

    /// Deletes the table with its content, the chain with its rules, the set with its elements.
    /// Fails if another object refers to the chain or set.
    pub fn delete_object(&mut self, object: impl Into<NftObject>) -> &mut NftBatch {
        let NftObject { mut request, text, .. } = object.into();
        request.kind += 2;
        self.push_deletion(request, "delete", text)
    }

    /// Deletes the rules of the chain, which must exist.
    pub fn flush_chain(&mut self, chain: NftChain<'_>) -> &mut NftBatch {
        self.push_change(rule_request(NFT_MSG_DELRULE, chain), 0, "flush chain", chain.to_string())
    }

    /// Deletes all elements of the set or map, which must exist.
    pub fn flush_set(&mut self, set: NftSet<'_>) -> &mut NftBatch {
        self.push_change(element_request(NFT_MSG_DELSETELEM, set), 0, "flush", set.to_string())
    }

    /// Adds an element; fails if the key exists.
    pub fn add_element(&mut self, element: &SetElement) -> &mut NftBatch {
        let request = element.to_request(NFT_MSG_NEWSETELEM, true);
        let target = format!("{element} to {}", element.set);
        self.push_change(request, NLM_F_CREATE | NLM_F_EXCL, "add element", target)
    }

    /// Adds an element if its key is absent. Fails if the key exists with other data; an existing
    /// comment stays. To replace an element, delete and add in one batch.
    pub fn ensure_element(&mut self, element: &SetElement) -> &mut NftBatch {
        let request = element.to_request(NFT_MSG_NEWSETELEM, true);
        let target = format!("{element} in {}", element.set);
        self.push_change(request, NLM_F_CREATE, "ensure element", target)
    }

    /// Adds elements of a request that may exist already.
    pub(super) fn push_elements(&mut self, request: NetlinkRequest, target: String) {
        self.push_change(request, NLM_F_CREATE, "add", target);
    }

    pub fn delete_element(&mut self, element: &SetElement) -> &mut NftBatch {
        let target = format!("{element} from {}", element.set);
        self.push_deletion(element.to_request(NFT_MSG_DELSETELEM, false), "delete element", target)
    }

    /// Adds a rule at the end of the chain.
    pub fn append_rule(&mut self, chain: NftChain<'_>, rule: &NftRule) -> &mut NftBatch {
        self.insert_rule_at(chain, rule, RulePosition::End)
    }

    pub fn insert_rule_at(
        &mut self,
        chain: NftChain<'_>,
        rule: &NftRule,
        place: RulePosition,
    ) -> &mut NftBatch {
        let mut request = rule_request(NFT_MSG_NEWRULE, chain);
        let body = &mut request.body;
        body.put_nested(NFTA_RULE_EXPRESSIONS, |list| {
            rule.write_expressions(chain.table.family, list)
        });
        if let Some(proto) = rule.compat {
            body.put_nested(NFTA_RULE_COMPAT, |compat| {
                let compat = compat.put_u32_be(NFTA_RULE_COMPAT_PROTO, proto.protocol_number());
                compat.put_u32_be(NFTA_RULE_COMPAT_FLAGS, 0)
            });
        }
        if let RulePosition::After(handle) = place {
            body.put_bytes(NFTA_RULE_POSITION, &handle.to_be_bytes());
        }
        write_comment(body, NFTA_RULE_USERDATA, rule.comment.as_deref());
        let name = rule.comment.as_ref().map_or(String::new(), |comment| format!("{comment:?} "));
        let target = format!("{name}to chain {chain}");
        let append = if place == RulePosition::Beginning { 0 } else { NLM_F_APPEND };
        self.push_change(request, NLM_F_CREATE | append, "add rule", target)
    }

    pub fn delete_rule(&mut self, chain: NftChain<'_>, handle: u64) -> &mut NftBatch {
        let mut request = rule_request(NFT_MSG_DELRULE, chain);
        request.body.put_bytes(NFTA_RULE_HANDLE, &handle.to_be_bytes());
        self.push_deletion(request, "delete rule", format!("{handle} from chain {chain}"))
    }

    pub fn delete_rules(&mut self, table: NftTable<'_>, rules: &[RuleInfo]) -> &mut NftBatch {
        for rule in rules {
            self.delete_rule(table.named_chain(&rule.chain), rule.handle);
        }
        self
    }

    fn push_change(
        &mut self,
        request: NetlinkRequest,
        flags: u16,
        op: &'static str,
        target: String,
    ) -> &mut NftBatch {
        self.changes.push(BatchChange { request, flags, destroy: None, op, target });
        self
    }

    fn push_deletion(
        &mut self,
        request: NetlinkRequest,
        op: &'static str,
        target: String,
    ) -> &mut NftBatch {
        // The types of `DESTROY` are in the order of the triples of `NEW`, `GET` and `DEL`.
        let destroy = Some(message_type(NFT_MSG_DESTROYTABLE + (request.kind & 0xff) / 3));
        self.changes.push(BatchChange { request, flags: 0, destroy, op, target });
        self
    }
}

/// The place of a new rule in its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RulePosition {
    Beginning,
    /// After the rule with this handle.
    After(u64),
    End,
}

/// Why a batch was refused.
#[derive(Default)]
struct BatchRefusals {
    /// The refusal of the batch as a whole.
    whole: Option<RequestFailure>,
    /// The refused changes, by their positions in the batch.
    each: Vec<(usize, RequestFailure)>,
    /// Whether some refusals did not fit in the receive buffer.
    lost: bool,
}

impl NftSocket {
    /// Applies all changes, or none of them.
    pub fn commit_batch(&self, batch: NftBatch) -> NetlinkResult<()> {
        self.commit_at_generation(batch, 0)
    }

    /// Applies the changes that `plan` returns, if no process changed anything since `plan` read
    /// the tables; otherwise calls `plan` again.
    pub fn update_tables(
        &self,
        plan: &mut dyn FnMut(&NftSocket) -> NetlinkResult<NftBatch>,
    ) -> NetlinkResult<()> {
        let mut outcome = Ok(());
        for _ in 0..ATTEMPTS {
            let generation = self.read_generation()?;
            let batch = plan(self)?;
            outcome = self.commit_at_generation(batch, generation);
            match &outcome {
                Err(error) if error.errno() == Some(Errno::ERESTART) => {}
                _ => break,
            }
        }
        outcome
    }

    /// The result of a call of `read` during which no process committed anything. Fails with
    /// `ERESTART` if there is always a commit.
    pub(super) fn read_between_commits<T>(
        &self,
        read: &mut dyn FnMut() -> NetlinkResult<T>,
    ) -> NetlinkResult<T> {
        for _ in 0..ATTEMPTS {
            let generation = self.read_generation()?;
            // A batch waits for the end of a commit, which changes the generation at its beginning.
            // An empty batch does not change it, at least since Linux 5.3; sets of
            // concatenated intervals need 5.6.
            let empty = self.encode_changes(&[], self.socket.reserve_sequence(2), 0);
            self.socket.send_datagram(&empty).map_err(batch_error)?;
            let found = read()?;
            if self.read_generation()? == generation {
                return Ok(found);
            }
        }
        Err(batch_error(Errno::ERESTART.into()))
    }

    /// Applies all changes, or none of them. Fails with `ERESTART` if a process changed anything
    /// since this [generation](super::read::TableContent::generation); 0 stands for any
    /// generation.
    pub fn commit_at_generation(&self, mut batch: NftBatch, generation: u32) -> NetlinkResult<()> {
        // Ends, because every repetition but one leaves out at least one change.
        while !batch.changes.is_empty() {
            let changes = &batch.changes;
            let refusals = self.send_changes(changes, generation).map_err(batch_error)?;
            if refusals.is_empty() {
                return Ok(());
            }
            let is_deletion = |(at, failure): &(usize, RequestFailure), errno| {
                changes[*at].destroy.is_some() && failure.errno == errno
            };
            if self.destroys.get() && refusals.each.iter().any(|r| is_deletion(r, Errno::EINVAL)) {
                self.destroys.set(false);
                continue;
            }
            // The kernel continues after a failure, so that dependent changes fail as well: the
            // first failure counts.
            let mut each = refusals.each.iter();
            if let Some((at, failure)) = each.find(|r| !is_deletion(r, Errno::ENOENT)) {
                return Err(failure.clone().into_error(changes[*at].op, &changes[*at].target));
            }
            if refusals.whole.is_some() || refusals.each.is_empty() {
                return Err(batch_error(refusals.whole.unwrap_or(Errno::ENOBUFS.into())));
            }
            let mut at = 0..;
            let is_absent = |at| refusals.each.iter().any(|(absent, _)| *absent == at);
            batch.changes.retain(|_| at.next().is_none_or(|at| !is_absent(at)));
        }
        Ok(())
    }

    fn send_changes(
        &self,
        changes: &[BatchChange],
        generation: u32,
    ) -> NetlinkResult<BatchRefusals, RequestFailure> {
        let count = u32::try_from(changes.len()).map_err(|_| Errno::E2BIG)?;
        let first = self.socket.reserve_sequence(count.saturating_add(2));
        let wire = self.encode_changes(changes, first, generation);
        let span = request_span(&wire);
        span.add_number("nf_tables.changes", count.into());
        self.socket.send_datagram(&wire)?;
        let (mut refusals, mut done) = (BatchRefusals::default(), false);
        loop {
            match self.socket.receive_datagram() {
                Ok(Some(messages)) => {
                    for message in messages {
                        done |= refusals.take_message(&message, first, changes);
                    }
                }
                Ok(None) if done || !refusals.is_empty() => return Ok(refusals),
                Ok(None) if self.socket.wait_for_datagram(REPLY_TIMEOUT)? => {}
                Ok(None) => return Err(RequestFailure::new_unanswered(Errno::ETIMEDOUT)),
                Err(RequestFailure { errno: Errno::ENOBUFS, .. }) => refusals.lost = true,
                Err(failure) => return Err(failure),
            }
        }
    }

    /// The batch as one datagram. Only the last change is acknowledged: if it succeeds, all changes
    /// have succeeded, and thousands of acknowledgements would not fit in the receive buffer.
    fn encode_changes(&self, changes: &[BatchChange], first: u32, generation: u32) -> Vec<u8> {
        let [high, low] = NFNL_SUBSYS_NFTABLES.to_be_bytes();
        let mut begin = NetlinkRequest::new(NFNL_MSG_BATCH_BEGIN, &[0, 0, high, low]);
        if generation != 0 {
            begin.body.put_u32_be(NFNL_BATCH_GENID, generation);
        }
        let (mut wire, mut sequence) = (Vec::new(), first);
        begin.encode_into(None, 0, first, &mut wire);
        for (at, BatchChange { request, flags, destroy, .. }) in changes.iter().enumerate() {
            sequence += 1;
            let ack = if at + 1 == changes.len() { NLM_F_ACK } else { 0 };
            let kind = destroy.filter(|_| self.destroys.get());
            request.encode_into(kind, flags | ack, sequence, &mut wire);
        }
        NetlinkRequest::new(NFNL_MSG_BATCH_END, &[0, 0, high, low]).encode_into(
            None,
            0,
            sequence + 1,
            &mut wire,
        );
        wire
    }
}

impl BatchRefusals {
    fn is_empty(&self) -> bool {
        self.whole.is_none() && self.each.is_empty() && !self.lost
    }

    /// Adds the refusal in a message; `true` if the message is the acknowledgement of the last
    /// change.
    fn take_message(
        &mut self,
        message: &KernelMessage,
        first: u32,
        changes: &[BatchChange],
    ) -> bool {
        if message.kind != NLMSG_ERROR {
            return false;
        }
        // The sequence numbers of an earlier batch wrap to large numbers.
        let at = message.sequence.wrapping_sub(first) as usize;
        let Some(mut failure) = message.failure() else { return at == changes.len() };
        match at.checked_sub(1).map(|at| (at, changes.get(at))) {
            Some((at, Some(change))) => {
                let offset =
                    message.ext_ack_attribute(NLMSGERR_ATTR_OFFS).and_then(ReplyAttribute::to_u32);
                failure.kernel =
                    failure.kernel.or_else(|| change.faulty_expression(offset? as usize));
                self.each.push((at, failure));
            }
            Some((at, None)) if at > changes.len() => {}
            _ => self.whole = Some(failure),
        }
        false
    }
}

fn batch_error(failure: RequestFailure) -> NetlinkError {
    let lacks_nf_tables = matches!(failure.errno, Errno::EOPNOTSUPP | Errno::EINVAL);
    let error = failure.into_error("change", &"nf_tables");
    if lacks_nf_tables {
        let remedy = "the kernel seems to have no nf_tables: load the module nf_tables";
        return error.with_remedy(remedy.to_owned());
    }
    error
}
