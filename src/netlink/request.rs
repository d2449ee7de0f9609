//! Requests, and the meaning of their replies: success, failure, a list.

use nix::errno::Errno;
use rtnetlink::packet_core::{
    Emitable, NLM_F_ACK_TLVS, NLM_F_CAPPED, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE,
    NLMSG_ERROR, NLMSG_NOOP, NLMSG_OVERRUN,
};

use super::attribute::{AttributeBuilder, ReplyAttribute, find_attribute, read_u32_at};
use super::error::{NetlinkResult, RequestFailure};

/// Attempts at a dump that changes while the kernel sends it.
pub(super) const DUMP_ATTEMPTS: usize = 5;

/// The kernel's message in an extended acknowledgement.
const NLMSGERR_ATTR_MSG: u16 = 1;

/// Length of `struct nlmsghdr`.
pub(super) const NLMSG_HDRLEN: usize = 16;

/// Length of `struct nfgenmsg`, the fixed header of netfilter.
pub(super) const NFGENMSG: usize = 4;

/// A request before it has flags and a sequence number.
#[derive(Clone, Debug)]
pub(super) struct NetlinkRequest {
    /// The message type, such as `RTM_NEWLINK`.
    pub(super) kind: u16,
    /// The fixed header of the message type, then attributes.
    pub(super) body: AttributeBuilder,
}

impl NetlinkRequest {
    pub(super) fn new(kind: u16, header: &[u8]) -> NetlinkRequest {
        NetlinkRequest { kind, body: AttributeBuilder::after_header(header) }
    }

    /// A request with a message of the crate rtnetlink. The crate's `RouteNetlinkMessage` would do
    /// the same, but then the executable would contain the code for all messages.
    pub(super) fn new_route(kind: u16, message: &dyn Emitable) -> NetlinkRequest {
        let mut body = vec![0; message.buffer_len()];
        message.emit(&mut body);
        NetlinkRequest { kind, body: AttributeBuilder::after_header(body) }
    }

    /// A request to a netfilter subsystem; `family` is `NFPROTO_*`.
    pub(super) fn new_netfilter(kind: u16, family: u8) -> NetlinkRequest {
        NetlinkRequest::new(kind, &[family, 0, 0, 0])
    }

    /// Appends the message to `wire`. `kind` replaces the message type of the request, if there is
    /// one.
    pub(super) fn encode_into(
        &self,
        kind: Option<u16>,
        flags: u16,
        sequence: u32,
        wire: &mut Vec<u8>,
    ) {
        let body = self.body.as_bytes();
        let length = u32::try_from(NLMSG_HDRLEN + body.len()).unwrap_or(u32::MAX);
        wire.extend_from_slice(&length.to_ne_bytes());
        wire.extend_from_slice(&kind.unwrap_or(self.kind).to_ne_bytes());
        wire.extend_from_slice(&(NLM_F_REQUEST | flags).to_ne_bytes());
        wire.extend_from_slice(&sequence.to_ne_bytes());
        wire.extend_from_slice(&[0; 4]);
        wire.extend_from_slice(body);
    }
}

#[derive(Clone, Debug)]
pub(super) struct KernelMessage {
    pub(super) kind: u16,
    pub(super) flags: u16,
    pub(super) sequence: u32,
    pub(super) body: Vec<u8>,
}

impl KernelMessage {
    /// Whether this is an acknowledgement, a refusal or the end of a list.
    pub(super) fn is_final(&self) -> bool {
        matches!(self.kind, NLMSG_ERROR | NLMSG_DONE)
    }

    /// The failure in a final message. An acknowledgement is an error with the number 0, and the
    /// end of a list may be empty.
    pub(super) fn failure(&self) -> Option<RequestFailure> {
        let code = match self.body.first_chunk() {
            Some(code) => i32::from_ne_bytes(*code),
            None if self.kind == NLMSG_DONE => 0,
            None => -(Errno::EBADMSG as i32),
        };
        let sentence = self.ext_ack_attribute(NLMSGERR_ATTR_MSG).map(ReplyAttribute::to_text);
        let errno = Errno::from_raw(code.saturating_neg());
        (code != 0).then_some(RequestFailure { kernel: sentence, ..errno.into() })
    }

    /// An attribute at the end of a final message. In a refusal the attributes follow the request's
    /// header and, unless the kernel omits it, the request's body.
    pub(super) fn ext_ack_attribute(&self, kind: u16) -> Option<ReplyAttribute<'_>> {
        let rest = self.body.get(4..)?;
        let skip = if self.kind == NLMSG_DONE {
            0
        } else if self.flags & NLM_F_ACK_TLVS == 0 {
            return None;
        } else if self.flags & NLM_F_CAPPED != 0 {
            NLMSG_HDRLEN
        } else {
            (read_u32_at(rest, 0)? as usize).checked_next_multiple_of(4)?
        };
        find_attribute(rest.get(skip..)?, kind)
    }
}

/// The reply to one request, without acknowledgements.
#[derive(Debug, Default)]
pub(super) struct NetlinkReply {
    pub(super) bodies: Vec<Vec<u8>>,
    /// Whether the list changed while the kernel sent it.
    pub(super) interrupted: bool,
}

impl NetlinkReply {
    pub(super) fn from_messages(
        messages: Vec<KernelMessage>,
    ) -> NetlinkResult<NetlinkReply, RequestFailure> {
        let mut reply = NetlinkReply::default();
        for message in messages {
            reply.interrupted |= message.flags & NLM_F_DUMP_INTR != 0;
            if message.is_final() {
                message.failure().map_or(Ok(()), Err)?;
            } else if !matches!(message.kind, NLMSG_NOOP | NLMSG_OVERRUN) {
                reply.bodies.push(message.body);
            }
        }
        Ok(reply)
    }
}

/// Repeats an interrupted dump, and returns the last attempt.
pub(super) fn repeat_until_consistent(
    attempt: &mut dyn FnMut() -> NetlinkResult<NetlinkReply, RequestFailure>,
) -> NetlinkResult<NetlinkReply, RequestFailure> {
    let mut reply = attempt()?;
    for _ in 1..DUMP_ATTEMPTS {
        if !reply.interrupted {
            break;
        }
        reply = attempt()?;
    }
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A refused request of 20 bytes: its header, perhaps its body, and a sentence.
    fn refused(flags: u16, body: &[u8]) -> KernelMessage {
        let mut bytes = 20_u32.to_ne_bytes().to_vec();
        bytes.resize(NLMSG_HDRLEN, 0);
        bytes.extend(body);
        bytes.extend([7_u16, NLMSGERR_ATTR_MSG].map(u16::to_ne_bytes).concat());
        bytes.extend(b"no\0\0");
        refusal(flags, &bytes)
    }

    fn refusal(flags: u16, header: &[u8]) -> KernelMessage {
        let body = [&(-1_i32).to_ne_bytes(), header].concat();
        KernelMessage { kind: NLMSG_ERROR, flags, sequence: 1, body }
    }

    fn sentence(message: &KernelMessage) -> Option<String> {
        message.failure().unwrap().kernel
    }

    #[test]
    fn the_message_is_found_after_a_whole_or_a_capped_request() {
        let capped = refused(NLM_F_ACK_TLVS | NLM_F_CAPPED, &[]);
        assert_eq!(sentence(&capped).as_deref(), Some("no"));
        assert_eq!(sentence(&refused(NLM_F_ACK_TLVS, &[9; 4])).as_deref(), Some("no"));
        assert_eq!(sentence(&refused(0, &[])), None);
        assert_eq!(sentence(&refusal(NLM_F_ACK_TLVS, &[1, 2])), None);
    }

    #[test]
    fn an_interrupted_dump_is_attempted_at_most_five_times() {
        for (interruptions, attempts) in [(0, 1), (1, 2), (4, 5), (99, 5)] {
            let mut made = 0;
            let answers = repeat_until_consistent(&mut || {
                made += 1;
                Ok(NetlinkReply { interrupted: made <= interruptions, ..NetlinkReply::default() })
            });
            assert_eq!(made, attempts);
            assert_eq!(answers.unwrap().interrupted, interruptions >= attempts);
        }
    }

    #[test]
    fn an_interruption_in_any_message_is_detected() {
        let part = |flags: u16| KernelMessage { kind: 16, flags, sequence: 1, body: vec![] };
        let quiet = NetlinkReply::from_messages(vec![part(0), part(0)]).unwrap();
        assert!(!quiet.interrupted);
        let changed =
            NetlinkReply::from_messages(vec![part(0), part(NLM_F_DUMP_INTR), part(0)]).unwrap();
        assert!(changed.interrupted);
        assert_eq!(changed.bodies.len(), 3);
    }
}
