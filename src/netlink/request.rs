//! One request and what its answers mean: success, failure, a list.

use nix::errno::Errno;
use rtnetlink::packet_core::{
    ErrorMessage, NLM_F_ACK, NLM_F_ACK_TLVS, NLM_F_CAPPED, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_ECHO,
    NLM_F_REQUEST, NetlinkHeader, NetlinkPayload,
};

use super::Netlink;
use super::error::Failure;
use super::packet::{Attr, Message, Packet, attrs};
use crate::log;

/// How often a dump is repeated that changed while it was made.
pub(super) const DUMP_ATTEMPTS: usize = 5;

/// The kernel's sentence in an extended acknowledgement.
const NLMSGERR_ATTR_MSG: u16 = 1;

/// Length of a netlink header, which a refusal repeats.
const HEADER_LEN: usize = 16;

impl Netlink {
    /// A request that is answered by success or failure only.
    pub(super) fn ack(&self, packet: Packet, bits: u16) -> Result<(), Failure> {
        self.exchange(packet, NLM_F_ACK | bits).map(drop)
    }

    /// As [`Netlink::ack`], with the description of what was made, if the kernel gives one.
    pub(super) fn ack_and_echo(
        &self,
        packet: Packet,
        bits: u16,
    ) -> Result<Option<Vec<u8>>, Failure> {
        let answers = self.exchange(packet, NLM_F_ACK | NLM_F_ECHO | bits)?;
        Ok(answers.bodies.into_iter().next())
    }

    /// A request for one thing.
    pub(super) fn one(&self, packet: Packet) -> Result<Vec<u8>, Failure> {
        let answers = self.exchange(packet, 0)?;
        answers.bodies.into_iter().next().ok_or(Failure::from(Errno::ENODATA))
    }

    /// A request for a list. One that changed while it was read is read again; when that never
    /// ends, the last attempt has to do.
    pub(super) fn dump(&self, packet: &Packet) -> Result<Vec<Vec<u8>>, Failure> {
        let answers = until_consistent(|| self.exchange(packet.clone(), NLM_F_DUMP))?;
        if answers.interrupted {
            log::warn("a netlink dump was interrupted every time; its result may be inconsistent");
        }
        Ok(answers.bodies)
    }

    fn exchange(&self, packet: Packet, bits: u16) -> Result<Answers, Failure> {
        let (flags, sequence) = (NLM_F_REQUEST | bits, self.socket.sequence(1));
        let mut message = Message::new(NetlinkHeader::default(), packet.into());
        (message.header.flags, message.header.sequence_number) = (flags, sequence);
        message.finalize();
        let mut wire = vec![0; message.buffer_len()];
        message.serialize(&mut wire);
        self.socket.exchange(&wire, sequence, flags)
    }
}

/// What the kernel sent in answer to one request.
#[derive(Debug, Default)]
pub(super) struct Answers {
    pub(super) bodies: Vec<Vec<u8>>,
    pub(super) interrupted: bool,
}

impl Answers {
    pub(super) fn collect(messages: Vec<Message>) -> Result<Answers, Failure> {
        let mut answers = Answers::default();
        for message in messages {
            answers.interrupted |= message.header.flags & NLM_F_DUMP_INTR != 0;
            match message.payload {
                NetlinkPayload::InnerMessage(packet) => answers.bodies.push(packet.body),
                NetlinkPayload::Error(refusal) => check(&message.header, &refusal)?,
                NetlinkPayload::Done(done) if done.code != 0 => {
                    return Err(failure(done.code, &done.extended_ack));
                }
                _ => {}
            }
        }
        Ok(answers)
    }
}

/// Repeats a dump while it is interrupted, and returns the last attempt.
pub(super) fn until_consistent(
    mut attempt: impl FnMut() -> Result<Answers, Failure>,
) -> Result<Answers, Failure> {
    let mut answers = attempt()?;
    for _ in 1..DUMP_ATTEMPTS {
        if !answers.interrupted {
            break;
        }
        answers = attempt()?;
    }
    Ok(answers)
}

/// An acknowledgement is an error with the number 0.
fn check(header: &NetlinkHeader, refusal: &ErrorMessage) -> Result<(), Failure> {
    match refusal.code {
        None => Ok(()),
        Some(code) => Err(failure(code.get(), ext_ack(header.flags, &refusal.header))),
    }
}

/// The attributes at the end of a refusal, behind the request's header and, unless the kernel
/// leaves it out, the request's body.
pub(super) fn ext_ack(answer_flags: u16, refused: &[u8]) -> &[u8] {
    if answer_flags & NLM_F_ACK_TLVS == 0 {
        return &[];
    }
    let length = refused.first_chunk().map_or(0, |length| u32::from_ne_bytes(*length) as usize);
    let skip = match answer_flags & NLM_F_CAPPED {
        0 => length.next_multiple_of(4),
        _ => HEADER_LEN,
    };
    refused.get(skip..).unwrap_or_default()
}

pub(super) fn failure(code: i32, ext_ack: &[u8]) -> Failure {
    let sentence = attrs(ext_ack).find(|attr| attr.kind == NLMSGERR_ATTR_MSG);
    let errno = Errno::from_raw(code.saturating_neg());
    Failure { kernel: sentence.map(Attr::text), ..errno.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A refused request of 20 bytes: its header, perhaps its body, and a sentence.
    fn refused(body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![20, 0, 0, 0];
        bytes.resize(HEADER_LEN, 0);
        bytes.extend(body);
        bytes.extend([7, 0, 1, 0, b'n', b'o', 0, 0]);
        bytes
    }

    fn sentence(bits: u16, bytes: &[u8]) -> Option<String> {
        failure(-1, ext_ack(bits, bytes)).kernel
    }

    #[test]
    fn the_sentence_is_found_behind_a_whole_or_a_capped_request() {
        assert_eq!(sentence(NLM_F_ACK_TLVS | NLM_F_CAPPED, &refused(&[])).as_deref(), Some("no"));
        assert_eq!(sentence(NLM_F_ACK_TLVS, &refused(&[9; 4])).as_deref(), Some("no"));
        assert_eq!(sentence(0, &refused(&[])), None);
        assert_eq!(sentence(NLM_F_ACK_TLVS, &[1, 2]), None);
    }

    #[test]
    fn an_interrupted_dump_is_made_five_times_at_most() {
        for (interruptions, attempts) in [(0, 1), (1, 2), (4, 5), (99, 5)] {
            let mut made = 0;
            let answers = until_consistent(|| {
                made += 1;
                Ok(Answers { interrupted: made <= interruptions, ..Answers::default() })
            });
            assert_eq!(made, attempts);
            assert_eq!(answers.unwrap().interrupted, interruptions >= attempts);
        }
    }

    #[test]
    fn an_interrupted_dump_is_noticed_in_any_message() {
        let part = |bits: u16| {
            let packet = Packet { kind: 16, body: vec![] };
            let mut message = Message::new(NetlinkHeader::default(), packet.into());
            message.header.flags = bits;
            message
        };
        let quiet = Answers::collect(vec![part(0), part(0)]).unwrap();
        assert!(!quiet.interrupted);
        let changed = Answers::collect(vec![part(0), part(NLM_F_DUMP_INTR), part(0)]).unwrap();
        assert!(changed.interrupted);
        assert_eq!(changed.bodies.len(), 3);
    }
}
