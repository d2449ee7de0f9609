//! The messages of the domain name system that the resolver reads and writes (RFC 1035, RFC 6891):
//! pure functions on bytes.
//!
//! Every message is built anew. Nothing of a client's message goes upstream but the name and the
//! type; nothing of an upstream's message goes to a client but the chain of aliases that begins at
//! the name, and the records of the type at its end.
//!
//! | file | |
//! | --- | --- |
//! | `message.rs` | the query of a client, the one that goes upstream, the answers to the client |
//! | `message/answer.rs` | the answer of an upstream server |
//! | `message/service.rs` | the records SVCB and HTTPS |

mod answer;
mod service;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use domain::base::iana::{Class, Opcode, Rcode};
use domain::base::message_builder::{AdditionalBuilder, AnswerBuilder, PushError};
use domain::base::name::{Name, ToName};
use domain::base::opt::{Opt, OptRecord};
use domain::base::wire::{Composer, ParseError};
use domain::base::{Message, MessageBuilder, Rtype, StaticCompressor};
use domain::rdata::{A, Aaaa, Cname};

pub use self::answer::{NoAnswer, UpstreamAnswer};

/// The largest message over UDP that the resolver accepts and sends, in bytes: it fits into a
/// packet of every path, so it is never fragmented.
pub const LARGEST_DATAGRAM: u16 = 1232;
/// The largest message over UDP for a client without EDNS, in bytes (RFC 1035, section 2.3.4).
const LARGEST_DATAGRAM_WITHOUT_EDNS: u16 = 512;
/// The types that are answered.
const ANSWERED_TYPES: [Rtype; 5] = [Rtype::A, Rtype::AAAA, Rtype::CNAME, Rtype::SVCB, Rtype::HTTPS];

/// A name in the form of the wire, as somebody spelled it.
type WireName = Name<Vec<u8>>;
type AskedQuestion = domain::base::Question<WireName>;
type ReplyBuilder = AnswerBuilder<StaticCompressor<Vec<u8>>>;

/// A question that the resolver may answer.
#[derive(Debug, Clone)]
pub struct Question {
    /// Lower case, without the final dot; letters, digits, `-`, `_` and dots only.
    pub name: String,
    asked: AskedQuestion,
    header: QueryHeader,
}

/// Why a message is no question for the resolver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unanswered {
    /// Malformed, or no query.
    Dropped,
    /// A query that the resolver answers for nobody; the message for the client.
    Refused(Vec<u8>),
}

/// What every reply repeats of the query.
#[derive(Debug, Clone, Copy)]
struct QueryHeader {
    id: u16,
    opcode: Opcode,
    asks_recursion: bool,
    /// The largest datagram that the client accepts, in bytes, if it speaks EDNS.
    edns_size: Option<u16>,
}

/// Reads the message of a client.
pub fn parse_query(message: &[u8]) -> Result<Question, Unanswered> {
    let message = Message::from_slice(message).map_err(|_| Unanswered::Dropped)?;
    if message.header().qr() {
        return Err(Unanswered::Dropped);
    }
    let opt = find_opt(message).map_err(|_| Unanswered::Dropped)?;
    let header = QueryHeader {
        id: message.header().id(),
        opcode: message.header().opcode(),
        asks_recursion: message.header().rd(),
        edns_size: opt.as_ref().map(OptRecord::udp_payload_size),
    };
    if message.header_counts().qdcount() != 1 {
        return Err(Unanswered::Refused(header.empty_reply(None, Rcode::REFUSED)));
    }
    let sole = message.sole_question().map_err(|_| Unanswered::Dropped)?;
    let asked = AskedQuestion::new(sole.qname().to_vec(), sole.qtype(), sole.qclass());
    let is_answered = header.opcode == Opcode::QUERY
        && asked.qclass() == Class::IN
        && ANSWERED_TYPES.contains(&asked.qtype())
        && opt.is_none_or(|opt| opt.version() == 0);
    match policy_name(asked.qname()) {
        Some(name) if is_answered => Ok(Question { name, asked, header }),
        _ => Err(Unanswered::Refused(header.empty_reply(Some(&asked), Rcode::REFUSED))),
    }
}

/// The EDNS record of a message; the other additional records are only skipped.
fn find_opt(message: &Message<[u8]>) -> Result<Option<OptRecord<&[u8]>>, ParseError> {
    for record in message.additional()? {
        if let Some(opt) = record?.into_record::<Opt<_>>()? {
            return Ok(Some(OptRecord::from(opt)));
        }
    }
    Ok(None)
}

/// The name as policies have it. None for the root, and for names that no policy can have.
fn policy_name(name: &WireName) -> Option<String> {
    let mut text = String::new();
    for label in name.iter().filter(|label| !label.is_root()) {
        if !text.is_empty() {
            text.push('.');
        }
        for byte in label {
            if !byte.is_ascii_alphanumeric() && byte != b'-' && byte != b'_' {
                return None;
            }
            text.push(char::from(byte.to_ascii_lowercase()));
        }
    }
    (!text.is_empty()).then_some(text)
}

impl Question {
    /// The name, and the number of the type: equal for equal questions.
    pub fn key(&self) -> (String, u16) {
        (self.name.clone(), self.asked.qtype().to_int())
    }

    /// The message that refuses the answer (REFUSED).
    pub fn refusal(&self) -> Vec<u8> {
        self.header.empty_reply(Some(&self.asked), Rcode::REFUSED)
    }

    /// The message that no answer was found (SERVFAIL).
    pub fn failure(&self) -> Vec<u8> {
        self.header.empty_reply(Some(&self.asked), Rcode::SERVFAIL)
    }

    /// The message that there is no such name (NXDOMAIN).
    pub fn absence(&self) -> Vec<u8> {
        self.header.empty_reply(Some(&self.asked), Rcode::NXDOMAIN)
    }

    /// The message that there are no records of the name (NOERROR).
    pub fn no_records(&self) -> Vec<u8> {
        self.header.empty_reply(Some(&self.asked), Rcode::NOERROR)
    }

    /// The largest message that the client accepts over UDP, in bytes: 512 to 1232.
    pub fn udp_limit(&self) -> usize {
        let size = self.header.edns_size.unwrap_or(LARGEST_DATAGRAM_WITHOUT_EDNS);
        usize::from(size.clamp(LARGEST_DATAGRAM_WITHOUT_EDNS, LARGEST_DATAGRAM))
    }

    /// The message with what was found. Of the addresses it has those in `allowed`, with the
    /// smaller of both TTLs in seconds. A message of more than `limit` bytes becomes one without
    /// records that is marked as truncated, so that the client asks again over TCP.
    pub fn answer(
        &self,
        found: &UpstreamAnswer,
        allowed: &[(IpAddr, u32)],
        limit: usize,
    ) -> Vec<u8> {
        match self.complete_answer(found, allowed) {
            Ok(message) if message.len() <= limit => message,
            _ => self.truncated_answer(found.rcode).unwrap_or_default(),
        }
    }

    fn complete_answer(
        &self,
        found: &UpstreamAnswer,
        allowed: &[(IpAddr, u32)],
    ) -> Result<Vec<u8>, PushError> {
        let addresses = found.addresses_among(allowed);
        let ttls = addresses.iter().map(|(_, ttl)| *ttl);
        let service_ttls = found.services.iter().map(|(_, ttl)| *ttl);
        let alias_ttl = ttls.chain(service_ttls).fold(found.chain_ttl, u32::min);
        let mut reply = self.header.start_reply(Some(&self.asked), found.rcode)?;
        let mut owner = self.asked.qname();
        for target in &found.chain {
            reply.push((owner, alias_ttl, Cname::new(target)))?;
            owner = target;
        }
        for (address, ttl) in addresses {
            match address {
                IpAddr::V4(address) => reply.push((owner, ttl, A::new(address)))?,
                IpAddr::V6(address) => reply.push((owner, ttl, Aaaa::new(address)))?,
            }
        }
        for (service, ttl) in &found.services {
            reply.push((owner, *ttl, service))?;
        }
        self.header.finish_reply(reply)
    }

    fn truncated_answer(&self, rcode: Rcode) -> Result<Vec<u8>, PushError> {
        let mut reply = self.header.start_reply(Some(&self.asked), rcode)?;
        reply.header_mut().set_tc(true);
        self.header.finish_reply(reply)
    }

    /// The query that asks an upstream server the same: the name in lower case, the type, and EDNS
    /// without any option.
    pub fn upstream_query(&self, id: u16) -> Vec<u8> {
        self.build_upstream_query(id).unwrap_or_default()
    }

    fn build_upstream_query(&self, id: u16) -> Result<Vec<u8>, PushError> {
        let Ok(mut query) = MessageBuilder::from_target(Vec::new());
        query.header_mut().set_id(id);
        query.header_mut().set_rd(true);
        let mut question = query.question();
        // Spelled by us: upper and lower case would carry a bit per letter to the server.
        let mut name = self.asked.qname().clone();
        name.make_canonical();
        question.push((name, self.asked.qtype()))?;
        let mut additional = question.additional();
        add_edns(&mut additional)?;
        Ok(additional.finish())
    }
}

impl QueryHeader {
    /// A reply without records.
    fn empty_reply(self, asked: Option<&AskedQuestion>, rcode: Rcode) -> Vec<u8> {
        let reply = self.start_reply(asked, rcode).and_then(|reply| self.finish_reply(reply));
        // Only the number of records can be too large, and there are none.
        reply.unwrap_or_default()
    }

    /// The header and the question of a reply.
    fn start_reply(
        self,
        asked: Option<&AskedQuestion>,
        rcode: Rcode,
    ) -> Result<ReplyBuilder, PushError> {
        let Ok(mut reply) = MessageBuilder::from_target(StaticCompressor::new(Vec::new()));
        let header = reply.header_mut();
        header.set_id(self.id);
        header.set_qr(true);
        header.set_opcode(self.opcode);
        header.set_rd(self.asks_recursion);
        header.set_ra(true);
        header.set_rcode(rcode);
        let mut question = reply.question();
        if let Some(asked) = asked {
            question.push(asked)?;
        }
        Ok(question.answer())
    }

    /// The bytes of a reply, with EDNS if the query had it.
    fn finish_reply(self, reply: ReplyBuilder) -> Result<Vec<u8>, PushError> {
        let mut additional = reply.additional();
        if self.edns_size.is_some() {
            add_edns(&mut additional)?;
        }
        Ok(additional.finish().into_target())
    }
}

/// Adds the EDNS record of a message: our size, no options.
fn add_edns<Target: Composer>(additional: &mut AdditionalBuilder<Target>) -> Result<(), PushError> {
    additional.opt(|opt| {
        opt.set_udp_payload_size(LARGEST_DATAGRAM);
        Ok(())
    })
}
