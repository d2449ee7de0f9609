//! Batches: changes that are applied atomically.
//!
//! The kernel reads the whole batch even when a change fails, and then refuses all of it with one
//! error for each failed change. Deleting an absent object succeeds since Linux 6.3; on older kernels,
//! and where even the table is missing, the changes that failed only for that reason are left out, and
//! the rest is sent again. That costs some 15 ms: the kernel waits for its readers after a failure.

use nix::errno::Errno;
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, NLMSG_ERROR};

use super::super::attribute::{Attr, find};
use super::super::error::{Error, Failure, Result};
use super::super::request::{Message, NFGENMSG, NLMSG_HDRLEN, Request};
use super::super::socket::{LIMIT, request_span};
use super::object::{
    Chain, Element, Object, Set, Table, element_request, rule_request, write_comment,
};
use super::read::RuleInfo;
use super::rule::Rule;
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::{Nft, kind};

/// The offset of the fault in the refused message.
const NLMSGERR_ATTR_OFFS: u16 = 2;

/// Attempts at a change when other processes commit first; in each round at least one of them succeeds.
const ATTEMPTS: usize = 200;

/// One change.
#[derive(Clone, Debug)]
pub(super) struct Change {
    request: Request,
    flags: u16,
    /// `NFT_MSG_DESTROY..` for the deletion of an object that may be absent.
    pub(super) destroy: Option<u16>,
    /// The attempt and the object, for an error.
    op: &'static str,
    target: String,
}

impl Change {
    /// The expression at `offset` of the message, to which the kernel objects.
    fn faulty_expression(&self, offset: usize) -> Option<String> {
        let body = self.request.body.as_bytes();
        let offset = offset.checked_sub(NLMSG_HDRLEN)?;
        if self.request.kind != kind(NFT_MSG_NEWRULE) {
            return None;
        }
        let list = find(&body[NFGENMSG..], NFTA_RULE_EXPRESSIONS)?;
        let faulty = list.nested().find(|expr| {
            let at = expr.value.as_ptr().addr() - body.as_ptr().addr();
            (at.saturating_sub(4)..at + expr.value.len()).contains(&offset)
        })?;
        Some(format!("in its {} expression", faulty.find(NFTA_EXPR_NAME)?.text()))
    }
}

/// Changes in their order. `ensure` creates an absent object, `add` fails if the object exists, `del`
/// ignores an absent object.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub(super) changes: Vec<Change>,
}

impl Batch {
    pub fn new() -> Batch {
        Batch::default()
    }

    /// Whether a change concerns the table.
    pub fn is_about(&self, table: Table<'_>) -> bool {
        self.changes.iter().any(|change| {
            let body = change.request.body.as_bytes();
            let name = find(&body[NFGENMSG..], NFTA_TABLE_NAME);
            body[0] == table.family as u8 && name.is_some_and(|name| name.text() == table.name)
        })
    }

    /// Appends the changes of `other`.
    pub fn append(&mut self, other: Batch) -> &mut Batch {
        self.changes.extend(other.changes);
        self
    }

    /// Creates the table, chain or set if it is absent; an existing chain keeps its policy. The kernel
    /// counts an update of a chain, which makes closing the socket slow: where that matters, check
    /// with [`Nft::has`] first.
    pub fn ensure(&mut self, object: impl Into<Object>) -> &mut Batch {
        self.create(object.into(), NLM_F_CREATE, "ensure")
    }

    /// Creates the table, chain or set.
    pub fn add(&mut self, object: impl Into<Object>) -> &mut Batch {
        self.create(object.into(), NLM_F_CREATE | NLM_F_EXCL, "add")
    }

    fn create(&mut self, object: Object, flags: u16, op: &'static str) -> &mut Batch {
        let Object { mut request, settings, text } = object;
        request.body.raw(settings.as_bytes());
        if request.kind == kind(NFT_MSG_NEWSET) {
            request.body.be32(NFTA_SET_ID, self.changes.len() + 1);
        }
        self.push(request, flags, op, text)
    }

    /// Deletes the table with its content, the chain with its rules, the set with its elements.
    /// Fails if another object refers to the chain or set.
    pub fn del(&mut self, object: impl Into<Object>) -> &mut Batch {
        let Object { mut request, text, .. } = object.into();
        request.kind += 2;
        self.remove(request, "delete", text)
    }

    /// Deletes the rules of the chain, which must exist.
    pub fn flush_chain(&mut self, chain: Chain<'_>) -> &mut Batch {
        self.push(rule_request(NFT_MSG_DELRULE, chain), 0, "flush chain", chain.to_string())
    }

    /// Deletes all elements of the set or map, which must exist.
    pub fn flush_set(&mut self, set: Set<'_>) -> &mut Batch {
        self.push(element_request(NFT_MSG_DELSETELEM, set), 0, "flush", set.to_string())
    }

    /// Adds an element; fails if the key exists.
    pub fn add_element(&mut self, element: &Element) -> &mut Batch {
        let request = element.request(NFT_MSG_NEWSETELEM, true);
        let target = format!("{element} to {}", element.set);
        self.push(request, NLM_F_CREATE | NLM_F_EXCL, "add element", target)
    }

    /// Adds an element if its key is absent. Fails if the key exists with other data; an existing
    /// comment stays. To replace an element, delete and add in one batch.
    pub fn ensure_element(&mut self, element: &Element) -> &mut Batch {
        let request = element.request(NFT_MSG_NEWSETELEM, true);
        let target = format!("{element} in {}", element.set);
        self.push(request, NLM_F_CREATE, "ensure element", target)
    }

    /// Deletes the element with this key.
    pub fn del_element(&mut self, element: &Element) -> &mut Batch {
        let target = format!("{element} from {}", element.set);
        self.remove(element.request(NFT_MSG_DELSETELEM, false), "delete element", target)
    }

    /// Adds a rule at the end of the chain.
    pub fn append_rule(&mut self, chain: Chain<'_>, rule: &Rule) -> &mut Batch {
        self.place_rule(chain, rule, Place::End)
    }

    /// Adds a rule to the chain.
    pub fn place_rule(&mut self, chain: Chain<'_>, rule: &Rule, place: Place) -> &mut Batch {
        let mut request = rule_request(NFT_MSG_NEWRULE, chain);
        let body = &mut request.body;
        body.nest(NFTA_RULE_EXPRESSIONS, |list| rule.write(chain.table.family, list));
        if let Some(proto) = rule.compat {
            body.nest(NFTA_RULE_COMPAT, |compat| {
                let compat = compat.be32(NFTA_RULE_COMPAT_PROTO, proto.number());
                compat.be32(NFTA_RULE_COMPAT_FLAGS, 0)
            });
        }
        if let Place::After(handle) = place {
            body.bytes(NFTA_RULE_POSITION, &handle.to_be_bytes());
        }
        write_comment(body, NFTA_RULE_USERDATA, rule.comment.as_deref());
        let named = rule.comment.as_ref().map_or(String::new(), |comment| format!("{comment:?} "));
        let target = format!("{named}to chain {chain}");
        let append = if place == Place::Beginning { 0 } else { NLM_F_APPEND };
        self.push(request, NLM_F_CREATE | append, "add rule", target)
    }

    /// Deletes the rule with this handle.
    pub fn del_rule(&mut self, chain: Chain<'_>, handle: u64) -> &mut Batch {
        let mut request = rule_request(NFT_MSG_DELRULE, chain);
        request.body.bytes(NFTA_RULE_HANDLE, &handle.to_be_bytes());
        self.remove(request, "delete rule", format!("{handle} from chain {chain}"))
    }

    /// Deletes rules of the table.
    pub fn del_rules(&mut self, table: Table<'_>, rules: &[RuleInfo]) -> &mut Batch {
        for rule in rules {
            self.del_rule(table.chain(&rule.chain), rule.handle);
        }
        self
    }

    fn push(
        &mut self,
        request: Request,
        flags: u16,
        op: &'static str,
        target: String,
    ) -> &mut Batch {
        self.changes.push(Change { request, flags, destroy: None, op, target });
        self
    }

    fn remove(&mut self, request: Request, op: &'static str, target: String) -> &mut Batch {
        // Their types are in the order of the triples of `NEW`, `GET` and `DEL`.
        let destroy = Some(kind(NFT_MSG_DESTROYTABLE + (request.kind & 0xff) / 3));
        self.changes.push(Change { request, flags: 0, destroy, op, target });
        self
    }
}

/// The place of a new rule in its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Beginning,
    /// After the rule with this handle.
    After(u64),
    End,
}

/// Why a batch was refused.
#[derive(Default)]
struct Refusals {
    /// The refusal of the batch as a whole.
    whole: Option<Failure>,
    /// The refused changes by their positions.
    each: Vec<(usize, Failure)>,
    /// Whether some refusals did not fit in the receive buffer.
    lost: bool,
}

impl Nft {
    /// Applies all changes, or none of them.
    pub fn commit(&self, batch: Batch) -> Result<()> {
        self.commit_at(batch, 0)
    }

    /// Applies the changes that `plan` finds necessary, provided that no process changed anything
    /// since `plan` read the tables; otherwise `plan` is called again.
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

    /// Applies all changes, or none of them with `ERESTART` if a process changed anything since this
    /// [generation](super::read::Look::generation); 0 for any generation.
    pub fn commit_at(&self, mut batch: Batch, generation: u32) -> Result<()> {
        // Every repetition but one leaves out at least one change.
        while !batch.changes.is_empty() {
            let changes = &batch.changes;
            let refusals = self.attempt(changes, generation).map_err(whole)?;
            if refusals.is_empty() {
                return Ok(());
            }
            let is_deletion = |(at, failure): &(usize, Failure), errno| {
                changes[*at].destroy.is_some() && failure.errno == errno
            };
            if self.destroys.get() && refusals.each.iter().any(|r| is_deletion(r, Errno::EINVAL)) {
                self.destroys.set(false);
                continue;
            }
            // The kernel continues after a failure, so that dependent changes fail as well: the first
            // failure counts.
            let mut each = refusals.each.iter();
            if let Some((at, failure)) = each.find(|r| !is_deletion(r, Errno::ENOENT)) {
                return Err(failure.clone().context(changes[*at].op, &changes[*at].target));
            }
            if refusals.whole.is_some() || refusals.each.is_empty() {
                return Err(whole(refusals.whole.unwrap_or(Errno::ENOBUFS.into())));
            }
            let mut at = 0..;
            let is_absent = |at| refusals.each.iter().any(|(absent, _)| *absent == at);
            batch.changes.retain(|_| at.next().is_none_or(|at| !is_absent(at)));
        }
        Ok(())
    }

    fn attempt(&self, changes: &[Change], generation: u32) -> Result<Refusals, Failure> {
        let count = u32::try_from(changes.len()).map_err(|_| Errno::E2BIG)?;
        let first = self.socket.sequence(count.saturating_add(2));
        let wire = self.datagram(changes, first, generation);
        let span = request_span(&wire);
        span.number("nf_tables.changes", count.into());
        self.socket.send(&wire)?;
        let (mut refusals, mut done) = (Refusals::default(), false);
        loop {
            match self.socket.receive() {
                Ok(Some(messages)) => {
                    for message in messages {
                        done |= refusals.take(&message, first, changes);
                    }
                }
                Ok(None) if done || !refusals.is_empty() => return Ok(refusals),
                Ok(None) if self.socket.wait(LIMIT)? => {}
                Ok(None) => return Err(Failure::unanswered(Errno::ETIMEDOUT)),
                Err(Failure { errno: Errno::ENOBUFS, .. }) => refusals.lost = true,
                Err(failure) => return Err(failure),
            }
        }
    }

    /// The batch as one datagram. Only the last change is acknowledged: its success implies that of
    /// all, and thousands of acknowledgements would not fit in the receive buffer.
    fn datagram(&self, changes: &[Change], first: u32, generation: u32) -> Vec<u8> {
        let [high, low] = NFNL_SUBSYS_NFTABLES.to_be_bytes();
        let mut begin = Request::new(NFNL_MSG_BATCH_BEGIN, &[0, 0, high, low]);
        if generation != 0 {
            begin.body.be32(NFNL_BATCH_GENID, generation);
        }
        let (mut wire, mut sequence) = (Vec::new(), first);
        begin.write(None, 0, first, &mut wire);
        for (at, Change { request, flags, destroy, .. }) in changes.iter().enumerate() {
            sequence += 1;
            let ack = if at + 1 == changes.len() { NLM_F_ACK } else { 0 };
            let kind = destroy.filter(|_| self.destroys.get());
            request.write(kind, flags | ack, sequence, &mut wire);
        }
        Request::new(NFNL_MSG_BATCH_END, &[0, 0, high, low]).write(
            None,
            0,
            sequence + 1,
            &mut wire,
        );
        wire
    }
}

impl Refusals {
    fn is_empty(&self) -> bool {
        self.whole.is_none() && self.each.is_empty() && !self.lost
    }

    /// Adds a message; `true` for the acknowledgement of the last change.
    fn take(&mut self, message: &Message, first: u32, changes: &[Change]) -> bool {
        if message.kind != NLMSG_ERROR {
            return false;
        }
        // The sequence numbers of an earlier batch wrap to large numbers.
        let at = message.sequence.wrapping_sub(first) as usize;
        let Some(mut failure) = message.failure() else { return at == changes.len() };
        match at.checked_sub(1).map(|at| (at, changes.get(at))) {
            Some((at, Some(change))) => {
                let offset = message.ext_ack(NLMSGERR_ATTR_OFFS).and_then(Attr::u32);
                let expression = || change.faulty_expression(offset? as usize);
                failure.kernel = failure.kernel.or_else(expression);
                self.each.push((at, failure));
            }
            Some((at, None)) if at > changes.len() => {}
            _ => self.whole = Some(failure),
        }
        false
    }
}

fn whole(failure: Failure) -> Error {
    let lacking = matches!(failure.errno, Errno::EOPNOTSUPP | Errno::EINVAL);
    let error = failure.context("change", &"nf_tables");
    if lacking {
        let remedy = "the kernel seems to have no nf_tables: load the module nf_tables";
        return error.with_remedy(remedy.to_owned());
    }
    error
}
