//! What upstream servers answer, and what clients get of it.

use domain::base::iana::OptRcode;

use super::*;

const NAME: &str = "www.example.org";

fn read(answer: TestAnswer) -> Result<UpstreamAnswer, NoAnswer> {
    question(NAME, Rtype::A).read_answer(ID, &answer.finish())
}

/// An answer to a question for addresses.
fn reply() -> TestAnswer {
    answer_builder(NAME, Rtype::A)
}

fn assert_foreign(message: &[u8]) {
    let read = question(NAME, Rtype::A).read_answer(ID, message);
    assert_eq!(read.err(), Some(NoAnswer::Foreign), "{message:?}");
}

fn unusable_because(answer: TestAnswer) -> String {
    match read(answer) {
        Err(NoAnswer::Unusable(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

/// A chain of so many aliases, with an address at its end.
fn chain_of(length: usize) -> TestAnswer {
    let mut answer = reply();
    let mut owner = NAME.to_string();
    for index in 0..length {
        let target = format!("alias{index}.example.net");
        answer = answer.cname(&owner, TTL, &target);
        owner = target;
    }
    answer.a(&owner, TTL, "192.0.2.1")
}

#[test]
fn addresses_are_found_and_told_with_the_smallest_ttl() {
    let answer = reply().a(NAME, 60, "192.0.2.1").a("WWW.Example.org", 90, "192.0.2.2");
    let found = read(answer).unwrap();
    assert_eq!(addresses(&found), ["192.0.2.1 60", "192.0.2.2 90"]);
    let allowed = [("192.0.2.2".parse().unwrap(), 80), ("192.0.2.1".parse().unwrap(), 70)];
    let answer = question("wwW.example.org", Rtype::A).answer(&found, &allowed, 512);
    assert_eq!(
        shown(&answer),
        [
            "7 QR RD RA NOERROR",
            "wwW.example.org IN A?",
            "wwW.example.org 60 A 192.0.2.1",
            "wwW.example.org 80 A 192.0.2.2"
        ]
    );
}

#[test]
fn a_chain_is_followed_in_any_order() {
    let answer = reply()
        .a("c.example.net", 50, "192.0.2.1")
        .cname("b.example.net", 200, "c.example.net")
        .a("unrelated.org", TTL, "192.0.2.66")
        .cname("elsewhere.org", TTL, NAME)
        .cname(NAME, 40, "b.example.net")
        .a(NAME, TTL, "192.0.2.77")
        .a("b.example.net", TTL, "192.0.2.78");
    let found = read(answer).unwrap();
    assert_eq!(addresses(&found), ["192.0.2.1 40"]);
    let asked = question(NAME, Rtype::A);
    let told = asked.answer(&found, &[(found.addresses[0].0, 30)], 512);
    let chain =
        ["www.example.org 30 CNAME b.example.net.", "b.example.net 30 CNAME c.example.net."];
    assert_eq!(shown(&told)[2..4], chain);
    assert_eq!(shown(&told)[4..], ["c.example.net 30 A 192.0.2.1"]);
    // Without the address, the chain is an answer of its own.
    let told = asked.answer(&found, &[("192.0.2.66".parse().unwrap(), 60)], 512);
    let chain =
        ["www.example.org 40 CNAME b.example.net.", "b.example.net 40 CNAME c.example.net."];
    assert_eq!(shown(&told)[2..], chain);
    assert_eq!(shown(&told)[0], "7 QR RD RA NOERROR");
}

#[test]
fn a_chain_has_at_most_16_aliases() {
    assert_eq!(addresses(&read(chain_of(16)).unwrap()).len(), 1);
    assert_eq!(unusable_because(chain_of(17)), "more than 16 aliases, or a loop of them");
}

#[test]
fn loops_of_aliases_are_unusable() {
    let own = reply().cname(NAME, TTL, NAME);
    let two = reply().cname(NAME, TTL, "b.c").cname("b.c", TTL, "WWW.example.org");
    let inner = reply().cname(NAME, TTL, "b.c").cname("b.c", TTL, "c.d").cname("c.d", TTL, "b.c");
    for answer in [own, two, inner] {
        let answer = answer.a(NAME, TTL, "192.0.2.1").a("b.c", TTL, "192.0.2.2");
        assert_eq!(unusable_because(answer), "more than 16 aliases, or a loop of them");
    }
}

#[test]
fn a_question_for_an_alias_gets_that_alone() {
    let asked = question(NAME, Rtype::CNAME);
    let answer = answer_builder(NAME, Rtype::CNAME)
        .cname("b.c", TTL, "c.d")
        .cname(NAME, 20, "b.c")
        .a("c.d", TTL, "192.0.2.1");
    let found = asked.read_answer(ID, &answer.finish()).unwrap();
    assert_eq!(found.addresses, []);
    assert_eq!(shown(&asked.answer(&found, &[], 512))[2..], ["www.example.org 20 CNAME b.c."]);
}

#[test]
fn answers_to_something_else_are_foreign() {
    assert_foreign(b"");
    assert_foreign(&[0; 11]);
    assert_foreign(b"GET / HTTP/1.0\r\n\r\n");
    let good = reply().a(NAME, TTL, "192.0.2.1").finish();
    assert!(question(NAME, Rtype::A).read_answer(ID, &good).is_ok());
    assert_foreign(&answer_builder("www.example.com", Rtype::A).finish());
    assert_foreign(&answer_builder("example.org", Rtype::A).finish());
    assert_foreign(&answer_builder(NAME, Rtype::AAAA).finish());
    let mut other_class = reply().question();
    other_class.rewind();
    other_class.push((wire_name(NAME), Rtype::A, Class::CH)).unwrap();
    assert_foreign(&other_class.finish());
    let mut two = reply().question();
    two.push((wire_name("b.c"), Rtype::A)).unwrap();
    assert_foreign(&two.finish());
    // The number, the bit of a response, the operation, the number of questions.
    for (byte, bits) in [(0, 0x01), (1, 0x80), (2, 0x80), (2, 0x20), (5, 0x01)] {
        let mut message = good.clone();
        message[byte] ^= bits;
        assert_foreign(&message);
    }
}

#[test]
fn failures_are_unusable_with_or_without_a_question() {
    for rcode in [Rcode::FORMERR, Rcode::SERVFAIL, Rcode::NOTIMP, Rcode::REFUSED] {
        let mut answer = reply().a(NAME, TTL, "192.0.2.1");
        answer.header_mut().set_rcode(rcode);
        assert_eq!(unusable_because(answer), rcode.to_string());
        let mut answer = reply().question();
        answer.rewind();
        answer.header_mut().set_rcode(rcode);
        assert_eq!(unusable_because(answer.answer()), rcode.to_string());
    }
    // BADVERS: the lower four bits are those of NOERROR.
    let mut message = reply().a(NAME, TTL, "192.0.2.1").additional();
    let filled = message.opt(|opt| {
        opt.set_rcode(OptRcode::BADVERS);
        Ok(())
    });
    filled.unwrap();
    let read = question(NAME, Rtype::A).read_answer(ID, &message.finish());
    assert_eq!(read.err(), Some(NoAnswer::Unusable("BADVERS".to_string())));
}

#[test]
fn no_such_name_is_an_answer() {
    let mut answer = reply().cname(NAME, TTL, "gone.example").a("gone.example", TTL, "192.0.2.1");
    answer.header_mut().set_rcode(Rcode::NXDOMAIN);
    let found = read(answer).unwrap();
    assert_eq!(found.addresses, []);
    let told = question(NAME, Rtype::A).answer(&found, &[], 512);
    assert_eq!(shown(&told)[0], "7 QR RD RA NXDOMAIN");
    assert_eq!(shown(&told)[2..], ["www.example.org 300 CNAME gone.example."]);
    let nothing = read(reply()).unwrap();
    assert_eq!(shown(&question(NAME, Rtype::A).answer(&nothing, &[], 512)).len(), 2);
}

#[test]
fn truncation_is_noticed() {
    let mut answer = reply().a(NAME, TTL, "192.0.2.1");
    answer.header_mut().set_tc(true);
    assert_eq!(read(answer).err(), Some(NoAnswer::Truncated));
}

#[test]
fn records_of_other_families_and_classes_are_ignored() {
    let six = UnknownRecordData::from_octets(Rtype::AAAA, [0x20; 16]).unwrap();
    let four = A::new(Ipv4Addr::new(192, 0, 2, 9));
    let mut answer = reply().raw(NAME, Rtype::TXT, b"\x04text").raw(NAME, Rtype::AAAA, &[1; 16]);
    answer.push((wire_name(NAME), TTL, &six)).unwrap();
    answer.push((wire_name(NAME), Class::CH, TTL, &four)).unwrap();
    answer.push((wire_name(NAME), Class::CH, TTL, Cname::new(wire_name("a.b")))).unwrap();
    let mut authority = answer.a(NAME, TTL, "192.0.2.1").authority();
    authority.push((wire_name(NAME), TTL, &four)).unwrap();
    let mut additional = authority.additional();
    additional.push((wire_name(NAME), TTL, &four)).unwrap();
    let found = question(NAME, Rtype::A).read_answer(ID, &additional.finish()).unwrap();
    assert_eq!(addresses(&found), ["192.0.2.1 300"]);
}

#[test]
fn addresses_have_their_size() {
    for length in [0, 3, 5, 16] {
        let answer = reply().raw(NAME, Rtype::A, &vec![1; length]);
        assert!(unusable_because(answer).starts_with("malformed message"), "{length}");
    }
    let asked = question(NAME, Rtype::AAAA);
    for (length, is_good) in [(4, false), (15, false), (16, true), (17, false)] {
        let answer = answer_builder(NAME, Rtype::AAAA).raw(NAME, Rtype::AAAA, &vec![1; length]);
        let read = asked.read_answer(ID, &answer.finish());
        assert_eq!(read.is_ok(), is_good, "{length}");
    }
}

#[test]
fn an_answer_cut_off_anywhere_is_no_answer() {
    let whole = reply().cname(NAME, TTL, "b.c").a("b.c", TTL, "192.0.2.1").finish();
    let asked = question(NAME, Rtype::A);
    for length in 0..whole.len() {
        assert!(asked.read_answer(ID, &whole[..length]).is_err(), "{length}");
    }
    assert!(asked.read_answer(ID, &whole).is_ok());
}

#[test]
fn loops_of_compression_end() {
    let mut message = reply().finish();
    message[7] = 1;
    let record = message.len();
    // An owner that points to itself, forward, and behind the end.
    for pointer in [record, record + 2, record + 4, 4000] {
        let mut message = message.clone();
        message.extend((u16::try_from(pointer).unwrap() | 0xc000).to_be_bytes());
        message.extend([0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 192, 0, 2, 1]);
        let read = question(NAME, Rtype::A).read_answer(ID, &message);
        assert!(matches!(read, Err(NoAnswer::Unusable(_))), "{read:?}");
    }
    // A target that points to itself.
    let target = u8::try_from(record + 12).unwrap();
    message.extend([0xc0, 12, 0, 5, 0, 1, 0, 0, 0, 9, 0, 2, 0xc0, target]);
    let read = question(NAME, Rtype::A).read_answer(ID, &message);
    assert!(matches!(read, Err(NoAnswer::Unusable(_))), "{read:?}");
}

#[test]
fn at_most_64_different_addresses_are_used() {
    let mut answer = reply();
    for index in 0..4000_u16 {
        let [high, low] = (index / 2).to_be_bytes();
        answer = answer.a(NAME, TTL, &format!("10.0.{high}.{low}"));
    }
    let found = read(answer).unwrap();
    assert_eq!(found.addresses.len(), 64);
    assert_eq!(addresses(&found)[63], "10.0.0.63 300");
}

#[test]
fn ttls_of_zero_and_of_more_than_31_bits_are_zero() {
    let zero = reply().cname(NAME, TTL, "b.c").a("b.c", 0, "192.0.2.1");
    assert_eq!(addresses(&read(zero).unwrap()), ["192.0.2.1 0"]);
    let huge = reply().a(NAME, 1 << 31, "192.0.2.1").a(NAME, (1 << 31) - 1, "192.0.2.2");
    assert_eq!(addresses(&read(huge).unwrap()), ["192.0.2.1 0", "192.0.2.2 2147483647"]);
    let chain = reply().cname(NAME, 0, "b.c").a("b.c", TTL, "192.0.2.1");
    let found = read(chain).unwrap();
    let told = question(NAME, Rtype::A).answer(&found, &[(found.addresses[0].0, 60)], 512);
    assert_eq!(shown(&told)[2..], ["www.example.org 0 CNAME b.c.", "b.c 0 A 192.0.2.1"]);
}

#[test]
fn an_answer_over_the_limit_is_truncated() {
    let mut answer = reply();
    for index in 0..40 {
        answer = answer.a(NAME, TTL, &format!("192.0.2.{index}"));
    }
    let found = read(answer).unwrap();
    let asked = question(NAME, Rtype::A);
    let whole = asked.answer(&found, &found.addresses, 65535);
    assert_eq!(shown(&whole).len(), 42);
    assert_eq!(whole.len(), 12 + 21 + 40 * 16);
    assert_eq!(asked.answer(&found, &found.addresses, whole.len()), whole);
    let cut = asked.answer(&found, &found.addresses, whole.len() - 1);
    assert_eq!(shown(&cut), ["7 QR TC RD RA NOERROR", "www.example.org IN A?"]);
}

/// The answer to a question of type HTTPS with these record data.
fn services(data: &[&[u8]]) -> Vec<String> {
    let asked = question(NAME, Rtype::HTTPS);
    let mut answer = answer_builder(NAME, Rtype::HTTPS).cname(NAME, 30, "b.c");
    for data in data {
        answer = answer.raw("b.c", Rtype::HTTPS, data);
    }
    let found = asked.read_answer(ID, &answer.finish()).unwrap();
    assert_eq!(found.addresses, []);
    shown(&asked.answer(&found, &[], 1232))[2..].to_vec()
}

#[test]
fn services_lose_hints_and_ech_and_keep_the_rest() {
    let full =
        b"\0\x01\x01s\x01t\0\0\x01\0\x03\x02h2\0\x03\0\x02\x20\xfb\0\x04\0\x04\xc0\0\x02\x01\
                 \0\x05\0\x01e\0\x06\0\x10aaaaaaaaaaaaaaaa\0\x07\0\x01/\xff\0\0\0";
    let alias = b"\0\0\x01s\x01t\0";
    let own = b"\0\x02\0";
    assert_eq!(
        services(&[full, alias, own]),
        [
            "www.example.org 30 CNAME b.c.",
            "b.c 30 HTTPS 1 s.t. alpn=h2 port=8443 dohpath=/ key65280",
            "b.c 30 HTTPS 0 s.t. ",
            "b.c 30 HTTPS 2 . "
        ]
    );
}

#[test]
fn services_that_are_malformed_or_need_hints_are_dropped() {
    let needs_hint = b"\0\x01\0\0\0\0\x04\0\x01\0\x04\0\x01\0\x03\x02h2\0\x04\0\x04\xc0\0\x02\x01";
    let needs_protocol = b"\0\x01\0\0\0\0\x02\0\x01\0\x01\0\x03\x02h2";
    let unordered = b"\0\x01\0\0\x03\0\x02\0\x50\0\x01\0\x03\x02h2";
    let short = b"\0\x01\0\0\x01\0\x09\x02h2";
    let told = services(&[needs_hint, unordered, short, b"", b"\0", needs_protocol]);
    assert_eq!(told[1..], ["b.c 30 HTTPS 1 . mandatory=alpn alpn=h2"]);
}

#[test]
fn at_most_64_services_are_used() {
    let own = b"\0\x02\0";
    assert_eq!(services(&[&own[..]; 70]).len(), 1 + 64);
}

#[test]
fn services_of_the_other_type_are_ignored() {
    let asked = question(NAME, Rtype::SVCB);
    let answer = answer_builder(NAME, Rtype::SVCB)
        .raw(NAME, Rtype::HTTPS, b"\0\x01\0")
        .raw(NAME, Rtype::SVCB, b"\0\x02\0")
        .raw("other.org", Rtype::SVCB, b"\0\x03\0");
    let found = asked.read_answer(ID, &answer.finish()).unwrap();
    let told = shown(&asked.answer(&found, &[], 1232));
    assert_eq!(told[2..], ["www.example.org 300 SVCB 2 . "]);
}

#[test]
fn any_six_bytes_of_an_answer_may_change() {
    let good = chain_of(3).finish();
    let asked = question(NAME, Rtype::A);
    for position in 2..good.len() {
        for value in [0, 1, 0x3f, 0x40, 0x80, 0xc0, 0xff] {
            let mut message = good.clone();
            message[position..].iter_mut().take(6).for_each(|byte| *byte = value);
            if let Ok(found) = asked.read_answer(ID, &message) {
                shown(&asked.answer(&found, &found.addresses, 1232));
            }
        }
    }
}

#[test]
fn unspecified_addresses_are_left_to_the_policy() {
    let found = read(reply().a(NAME, TTL, "0.0.0.0")).unwrap();
    assert_eq!(found.addresses, [(IpAddr::V4(Ipv4Addr::UNSPECIFIED), TTL)]);
}
