//! Queries of containers and answers of upstream servers. What the resolver makes of them can be
//! read, and has nothing but what it may have.
#![no_main]

use cnibox::testing::fuzz::resolver::message::{Question, Unanswered, parse_query};
use domain::base::iana::Class;
use domain::base::{Message, Rtype};
use domain::rdata::AllRecordData;
use libfuzzer_sys::fuzz_target;

const KINDS: [Rtype; 5] = [Rtype::A, Rtype::AAAA, Rtype::CNAME, Rtype::SVCB, Rtype::HTTPS];
const NAME: &[u8] = b"\x03www\x07example\x03org\0";
/// The parameters of a service that nobody is told: `ipv4hint`, `ech`, `ipv6hint`.
const SECRET: [u16; 3] = [4, 5, 6];

/// A message with one question about [`NAME`].
fn message_about(kind: Rtype, header: [u8; 12]) -> Vec<u8> {
    let mut message = header.to_vec();
    message.extend(NAME);
    message.extend(kind.to_int().to_be_bytes());
    message.extend([0, 1]);
    message
}

fn verify_keys(keys: impl Iterator<Item = u16>) {
    for key in keys {
        assert!(!SECRET.contains(&key), "key {key}");
    }
}

/// A message that the resolver sends has these records only.
fn verify(message: &[u8], kinds: &[Rtype]) {
    let message = Message::from_octets(message).unwrap();
    for question in message.question() {
        question.unwrap();
    }
    for record in message.answer().unwrap() {
        let record = record.unwrap();
        assert!(kinds.contains(&record.rtype()), "{}", record.rtype());
        assert_eq!(record.class(), Class::IN);
        match record.to_any_record::<AllRecordData<_, _>>().unwrap().data() {
            AllRecordData::Https(data) => {
                verify_keys(data.params().iter_raw().map(|it| it.key().to_int()))
            }
            AllRecordData::Svcb(data) => {
                verify_keys(data.params().iter_raw().map(|it| it.key().to_int()))
            }
            AllRecordData::Unknown(data) => panic!("unknown: {}", data.rtype()),
            _ => {}
        }
    }
    assert_eq!(message.authority().unwrap().count(), 0);
    let mut options = 0;
    for record in message.additional().unwrap() {
        let record = record.unwrap();
        assert_eq!((record.rtype(), record.rdlen()), (Rtype::OPT, 0));
        options += 1;
    }
    assert!(options <= 1);
}

/// What the container gets if `message` comes as the answer.
fn verify_answer(question: &Question, kind: Rtype, id: u16, message: &[u8]) {
    let Ok(found) = question.read_answer(id, message) else { return };
    assert!(found.addresses.len() <= 64);
    let kinds = [Rtype::CNAME, kind];
    verify(&question.answer(&found, &found.addresses, 65535), &kinds);
    verify(&question.answer(&found, &[], 65535), &kinds);
    let datagram = question.answer(&found, &found.addresses, question.udp_limit());
    assert!(datagram.len() <= question.udp_limit());
    verify(&datagram, &kinds);
}

fuzz_target!(|bytes: &[u8]| {
    match parse_query(bytes) {
        Ok(question) => {
            for message in [
                question.refusal(),
                question.failure(),
                question.no_records(),
                question.upstream_query(1),
            ] {
                verify(&message, &[]);
            }
        }
        Err(Unanswered::Refused(message)) => verify(&message, &[]),
        Err(Unanswered::Dropped) => {}
    }
    let [high, low, rest @ ..] = bytes else { return };
    for kind in KINDS {
        let query = message_about(kind, [0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        let question = parse_query(&query).unwrap();
        verify_answer(&question, kind, u16::from_be_bytes([*high, *low]), bytes);
        // As many records as the first byte says, behind a header that is right.
        let mut message = message_about(kind, [0, 9, 0x81, 0x80, 0, 1, 0, *high, 0, 0, 0, 0]);
        message.extend(rest);
        verify_answer(&question, kind, 9, &message);
    }
});
