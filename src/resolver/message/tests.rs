//! Messages as clients and upstream servers send them, well-meaning and other.

mod answers;
mod queries;

use std::net::{IpAddr, Ipv4Addr};

use domain::base::iana::{Class, Rcode};
use domain::base::message_builder::{AnswerBuilder, QuestionBuilder};
use domain::base::name::Name;
use domain::base::{Message, MessageBuilder, Rtype, UnknownRecordData};
use domain::rdata::{A, Cname};

use super::*;

const ID: u16 = 0x1234;
const TTL: u32 = 300;

pub type TestAnswer = AnswerBuilder<Vec<u8>>;

pub fn wire_name(text: &str) -> Name<Vec<u8>> {
    text.parse().unwrap()
}

/// The query of a client, without EDNS.
pub fn query_builder(name: &str, kind: Rtype) -> QuestionBuilder<Vec<u8>> {
    let mut builder = MessageBuilder::new_vec();
    builder.header_mut().set_id(7);
    builder.header_mut().set_rd(true);
    let mut question = builder.question();
    question.push((wire_name(name), kind)).unwrap();
    question
}

pub fn question(name: &str, kind: Rtype) -> Question {
    parse_query(&query_builder(name, kind).finish()).unwrap()
}

/// An answer of an upstream server to [`ID`], without records.
pub fn answer_builder(name: &str, kind: Rtype) -> TestAnswer {
    let mut builder = MessageBuilder::new_vec();
    builder.header_mut().set_id(ID);
    builder.header_mut().set_qr(true);
    builder.header_mut().set_ra(true);
    let mut question = builder.question();
    question.push((wire_name(name), kind)).unwrap();
    question.answer()
}

impl TestAnswerExt for TestAnswer {}

/// Records in one line.
pub trait TestAnswerExt: Into<TestAnswer> {
    fn a(self, owner: &str, ttl: u32, address: &str) -> TestAnswer {
        let mut answer = self.into();
        let data = A::new(address.parse().unwrap());
        answer.push((wire_name(owner), ttl, data)).unwrap();
        answer
    }

    fn cname(self, owner: &str, ttl: u32, target: &str) -> TestAnswer {
        let mut answer = self.into();
        answer.push((wire_name(owner), ttl, Cname::new(wire_name(target)))).unwrap();
        answer
    }

    fn raw(self, owner: &str, kind: Rtype, data: &[u8]) -> TestAnswer {
        let mut answer = self.into();
        let data = UnknownRecordData::from_octets(kind, data).unwrap();
        answer.push((wire_name(owner), TTL, data)).unwrap();
        answer
    }
}

pub fn addresses(found: &UpstreamAnswer) -> Vec<String> {
    found.addresses.iter().map(|(address, ttl)| format!("{address} {ttl}")).collect()
}

/// The records of a message, one a line, with the header in front.
pub fn shown(message: &[u8]) -> Vec<String> {
    let message = Message::from_octets(message).unwrap();
    let header = message.header();
    let mut lines = vec![format!("{} {} {}", header.id(), header.flags(), header.rcode())];
    for question in message.question() {
        let question = question.unwrap();
        lines.push(format!("{} {} {}?", question.qname(), question.qclass(), question.qtype()));
    }
    for record in message.answer().unwrap() {
        let record = record.unwrap();
        let known = record.to_any_record::<domain::rdata::AllRecordData<_, _>>().unwrap();
        let (owner, ttl) = (record.owner(), record.ttl().as_secs());
        lines.push(format!("{owner} {ttl} {} {}", record.rtype(), known.data()));
    }
    let counts = message.header_counts();
    assert_eq!(counts.nscount(), 0, "{counts:?}");
    match message.opt() {
        Some(opt) => {
            assert_eq!((counts.arcount(), opt.version(), opt.opt().len()), (1, 0, 0));
            lines.push(format!("EDNS {}", opt.udp_payload_size()));
        }
        None => assert_eq!(counts.arcount(), 0),
    }
    lines
}
