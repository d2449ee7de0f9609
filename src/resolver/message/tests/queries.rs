//! What clients ask, and what goes upstream.

use domain::base::iana::Opcode;
use domain::base::opt::UnknownOptData;

use super::*;

/// What the client gets instead of an answer.
fn refused(message: &[u8]) -> Vec<String> {
    match parse_query(message) {
        Err(Unanswered::Refused(message)) => shown(&message),
        other => panic!("{other:?}"),
    }
}

fn assert_dropped(message: &[u8]) {
    assert_eq!(parse_query(message).err(), Some(Unanswered::Dropped), "{message:?}");
}

/// A query with the given labels, written by hand.
fn raw_query(name: &[u8]) -> Vec<u8> {
    let mut message = query_builder("x", Rtype::A).finish();
    message.truncate(12);
    message.extend(name);
    message.extend([0, 1, 0, 1]);
    message
}

#[test]
fn a_question_is_read_and_its_spelling_echoed() {
    let asked = question("WwW.ExAmPle.ORG", Rtype::AAAA);
    assert_eq!((asked.name.as_str(), asked.asked.qtype()), ("www.example.org", Rtype::AAAA));
    assert_eq!(shown(&asked.refusal()), ["7 QR RD RA REFUSED", "WwW.ExAmPle.ORG IN AAAA?"]);
    assert_eq!(shown(&asked.failure())[0], "7 QR RD RA SERVFAIL");
    assert_eq!(shown(&asked.no_records())[0], "7 QR RD RA NOERROR");
    let mut query = query_builder("a_b-c.1", Rtype::HTTPS);
    query.header_mut().set_rd(false);
    let asked = parse_query(&query.finish()).unwrap();
    assert_eq!(asked.name, "a_b-c.1");
    assert_eq!(shown(&asked.refusal())[0], "7 QR RA REFUSED");
}

#[test]
fn questions_for_other_types_are_other_questions() {
    let key = |name, kind| question(name, kind).key();
    assert_eq!(key("A.example.org", Rtype::A), key("a.Example.ORG", Rtype::A));
    assert_ne!(key("a.example.org", Rtype::A), key("a.example.org", Rtype::AAAA));
    assert_ne!(key("a.example.org", Rtype::A), key("b.example.org", Rtype::A));
}

#[test]
fn all_answered_types_are_questions_and_no_others() {
    for kind in ["A", "AAAA", "CNAME", "SVCB", "HTTPS"] {
        assert_eq!(question("a.b", kind.parse().unwrap()).name, "a.b");
    }
    for kind in ["TXT", "ANY", "AXFR", "IXFR", "PTR", "NS", "SOA", "MX", "SRV", "OPT", "TYPE0"] {
        let query = query_builder("a.b", kind.parse().unwrap()).finish();
        assert_eq!(refused(&query)[0], "7 QR RD RA REFUSED", "{kind}");
        assert_eq!(refused(&query).len(), 2, "{kind}");
    }
}

#[test]
fn other_classes_and_operations_are_refused() {
    let mut query = query_builder("a.b", Rtype::A);
    query.rewind();
    query.push((wire_name("a.b"), Rtype::A, Class::CH)).unwrap();
    assert_eq!(refused(&query.finish()), ["7 QR RD RA REFUSED", "a.b CH A?"]);
    for opcode in [Opcode::NOTIFY, Opcode::UPDATE, Opcode::STATUS, Opcode::DSO] {
        let mut query = query_builder("a.b", Rtype::A);
        query.header_mut().set_opcode(opcode);
        let message = query.finish();
        assert_eq!(refused(&message)[0], "7 QR RD RA REFUSED");
        let Err(Unanswered::Refused(reply)) = parse_query(&message) else { unreachable!() };
        assert_eq!(Message::from_octets(reply).unwrap().header().opcode(), opcode);
    }
}

#[test]
fn two_questions_or_none_are_refused_without_them() {
    let mut query = query_builder("a.b", Rtype::A);
    query.push((wire_name("c.d"), Rtype::A)).unwrap();
    assert_eq!(refused(&query.finish()), ["7 QR RD RA REFUSED"]);
    let mut query = query_builder("a.b", Rtype::A);
    query.rewind();
    assert_eq!(refused(&query.finish()), ["7 QR RD RA REFUSED"]);
}

#[test]
fn responses_and_malformed_messages_are_dropped() {
    let mut query = query_builder("a.b", Rtype::A);
    query.header_mut().set_qr(true);
    assert_dropped(&query.finish());
    let whole = query_builder("example.org", Rtype::A).finish();
    for length in 0..whole.len() {
        assert_dropped(&whole[..length]);
    }
    // More additional records than there are.
    let mut message = whole.clone();
    message[11] = 1;
    assert_dropped(&message);
    assert_dropped(&[0xff; 600]);
}

#[test]
fn names_that_no_policy_has_are_refused() {
    for name in
        [".", "a b.c", "*.example.org", "\\000.org", "\\255.org", "a\\.b.org", "b\\195\\188.de"]
    {
        let query = query_builder(name, Rtype::A).finish();
        assert_eq!(refused(&query)[0], "7 QR RD RA REFUSED", "{name}");
    }
}

#[test]
fn labels_and_names_have_their_largest_lengths() {
    let label = "a".repeat(63);
    assert_eq!(question(&format!("{label}.org"), Rtype::A).name.len(), 67);
    let longest = format!("{label}.{label}.{label}.{}", "b".repeat(61));
    assert_eq!(question(&longest, Rtype::A).name, longest);
    assert_eq!(longest.len(), 253);
    let mut wire = wire_name(&longest).as_slice().to_vec();
    // One more byte in the last label.
    wire[192] = 62;
    wire.insert(193, b'b');
    assert_dropped(&raw_query(&wire));
    let mut long_label = vec![64];
    long_label.extend([b'a'; 64]);
    long_label.push(0);
    assert_dropped(&raw_query(&long_label));
}

#[test]
fn compression_in_a_question_ends() {
    for name in [&[0xc0, 12][..], &[0xc0, 14], &[1, b'a', 0xc0, 12], &[0xc0, 0xff], &[0xc0]] {
        assert_dropped(&raw_query(name));
    }
}

fn with_edns(size: u16, version: u8) -> Vec<u8> {
    let mut query = query_builder("WWW.example.org", Rtype::A).additional();
    let filled = query.opt(|opt| {
        opt.set_udp_payload_size(size);
        opt.set_version(version);
        opt.set_dnssec_ok(true);
        // Client subnet, cookie, padding, and one that nobody knows.
        for code in [8, 10, 12, 65001] {
            let secret = UnknownOptData::new(code.into(), &b"secret01"[..]).unwrap();
            opt.push(&secret)?;
        }
        Ok(())
    });
    filled.unwrap();
    query.finish()
}

#[test]
fn edns_is_answered_with_our_size_and_no_options() {
    let asked = parse_query(&with_edns(4096, 0)).unwrap();
    let shown_refusal = shown(&asked.refusal());
    assert_eq!(shown_refusal[1..], ["WWW.example.org IN A?", "EDNS 1232"]);
    assert_eq!(refused(&with_edns(4096, 1))[2], "EDNS 1232");
}

#[test]
fn datagrams_have_512_to_1232_bytes() {
    assert_eq!(question("a.b", Rtype::A).udp_limit(), 512);
    for (told, used) in
        [(0, 512), (511, 512), (512, 512), (1000, 1000), (1232, 1232), (65535, 1232)]
    {
        assert_eq!(parse_query(&with_edns(told, 0)).unwrap().udp_limit(), used, "{told}");
    }
}

#[test]
fn a_malformed_option_is_dropped() {
    let mut message = with_edns(1232, 0);
    // The length of the last option.
    let length = message.len() - 9;
    message[length] = 200;
    assert_dropped(&message);
}

#[test]
fn only_name_and_type_go_upstream() {
    let expected = b"\xab\xcd\x01\x00\0\x01\0\0\0\0\0\x01\x03www\x07example\x03org\0\0\x01\0\x01\
                     \0\0\x29\x04\xd0\0\0\0\0\0\0";
    let asked = parse_query(&with_edns(4096, 0)).unwrap();
    assert_eq!(asked.upstream_query(0xabcd), expected);
    // The client's flags and records are not there either.
    let mut query = query_builder("www.EXAMPLE.org", Rtype::A);
    query.header_mut().set_rd(false);
    query.header_mut().set_cd(true);
    query.header_mut().set_ad(true);
    query.header_mut().set_aa(true);
    let mut additional = query.additional();
    additional.push((wire_name("secret"), 5, A::new(Ipv4Addr::LOCALHOST))).unwrap();
    let asked = parse_query(&additional.finish()).unwrap();
    assert_eq!(asked.upstream_query(0xabcd), expected);
}

#[test]
fn a_query_with_records_behind_it_is_read() {
    let mut query = query_builder("a.b", Rtype::A).finish();
    query.extend(b"trailing");
    assert_eq!(parse_query(&query).unwrap().name, "a.b");
}
