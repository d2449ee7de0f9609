//! Name servers that lie, and containers that ask for others.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use super::client::{Way, client, exchange, receive};
use super::upstream::{Asked, from_zone};
use super::wire::{
    A, AAAA, Message, NOERROR, NXDOMAIN, OPT, RECURSION_DESIRED, REFUSED, Record, SERVFAIL,
    TRUNCATED,
};
use super::{GATEWAYS, Inside, PORT, Site, names, parsed};
use crate::support::node::eventually;
use crate::support::traffic::Place;

const NAME: &str = "api.example.org";
const GOOD: &str = "203.0.113.60";
/// No container may ever learn this one.
const EVIL: &str = "203.0.113.66";

fn good() -> Vec<Record> {
    vec![Record::address(NAME, GOOD)]
}

fn evil(asked: &Asked) -> Message {
    asked.message.reply(NOERROR, vec![Record::address(NAME, EVIL)])
}

/// The answer about [`NAME`] has only the good address, after the upstream said this.
#[track_caller]
fn is_good_after(site: &Site, inside: &Inside, lie: &str) {
    inside.finds(NAME, &[GOOD]);
    assert!(!inside.reaches(EVIL, 443), "{lie}");
    let said = site.upstream.asked();
    assert!(!said.is_empty(), "{lie}: the upstream was asked");
}

/// What a server answers in place of the truth.
type Lie = fn(&Asked) -> Vec<u8>;

#[test]
fn false_answers_are_ignored() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    let lies: [(&str, Lie); 9] = [
        ("another id", |asked| {
            let reply = evil(asked);
            Message { id: reply.id ^ 1, ..reply }.encode()
        }),
        ("another name", |asked| {
            let mut reply = evil(asked);
            reply.questions[0].0 = "b.example.net".to_owned();
            reply.encode()
        }),
        ("another type", |asked| {
            let mut reply = evil(asked);
            reply.questions[0].1 = AAAA;
            reply.encode()
        }),
        ("no question", |asked| Message { questions: Vec::new(), ..evil(asked) }.encode()),
        ("two questions", |asked| {
            let mut reply = evil(asked);
            reply.questions.push(reply.questions[0].clone());
            reply.encode()
        }),
        ("a question", |asked| Message { flags: RECURSION_DESIRED, ..evil(asked) }.encode()),
        ("a part", |asked| evil(asked).encode()[..11].to_vec()),
        ("nothing", |_| Vec::new()),
        ("noise", |_| vec![0xff; 1200]),
    ];
    for (lie, said) in lies {
        site.upstream.answer(move |asked| vec![said(asked), from_zone(&good(), asked)]);
        is_good_after(&site, &inside, lie);
    }
    // From another port and another address of the same host.
    for from in ["10.9.0.2:0", "192.0.2.7:53"] {
        let other = site.outside.within(|| UdpSocket::bind(from).unwrap());
        site.upstream.answer(move |asked| {
            if !asked.is_tcp {
                other.send_to(&evil(asked).encode(), asked.from).unwrap();
                std::thread::sleep(Duration::from_millis(50));
            }
            vec![from_zone(&good(), asked)]
        });
        is_good_after(&site, &inside, from);
    }
    // What a truncated answer has is not used; the one by TCP is.
    site.upstream.answer(|asked| {
        let reply = evil(asked);
        let truncated = Message { flags: reply.flags | TRUNCATED, ..reply };
        vec![if asked.is_tcp { from_zone(&good(), asked) } else { truncated.encode() }]
    });
    is_good_after(&site, &inside, "truncated");
}

/// Records that are not on the way from the name, or in other parts of the message.
#[test]
fn only_the_chain_of_the_name_counts() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    let other = |ip| Record::address("other.example.com", ip);
    let chaos = Record { class: super::wire::CH, ..Record::address(NAME, EVIL) };
    let short = Record { data: vec![203, 0, 113], ..Record::address(NAME, EVIL) };
    for stray in [
        vec![other(EVIL)],
        vec![Record::cname("other.example.com", "more.example.com"), other(EVIL)],
        vec![Record::address(NAME, "2001:db8:f::66")],
        vec![chaos],
        vec![Record::text(NAME, EVIL)],
    ] {
        site.upstream.answer(move |asked| {
            let answers = [good(), stray.clone()].concat();
            let mut reply = asked.message.reply(NOERROR, answers);
            reply.authority.push(Record::address(NAME, EVIL));
            reply.additional.push(Record::address(NAME, EVIL));
            vec![reply.encode()]
        });
        is_good_after(&site, &inside, "a stray record");
    }
    let chain = |length: usize| {
        let link = |nth: usize| match nth {
            0 => NAME.to_owned(),
            _ => format!("link{nth}.example.com"),
        };
        let mut all: Vec<_> = (0..length).map(|n| Record::cname(&link(n), &link(n + 1))).collect();
        all.push(Record::address(&link(length), EVIL));
        all
    };
    let cycle = vec![Record::cname(NAME, "b.example.com"), Record::cname("b.example.com", NAME)];
    let itself = vec![Record::cname(NAME, NAME), Record::address(NAME, EVIL)];
    for (bad, said) in
        [(vec![short], "short"), (chain(17), "long"), (cycle, "cycle"), (itself, "itself")]
    {
        site.upstream.answer(move |asked| vec![asked.message.reply(NOERROR, bad.clone()).encode()]);
        let answer = inside.ask(NAME, A);
        assert_eq!((answer.rcode(), answer.answers.len()), (SERVFAIL, 0), "{said}: {answer:?}");
        assert!(!inside.reaches(EVIL, 443), "{said}");
    }
    let longest = chain(16);
    site.upstream.answer(move |asked| vec![asked.message.reply(NOERROR, longest.clone()).encode()]);
    inside.finds(NAME, &[EVIL]);
}

#[test]
fn errors_of_the_upstream_are_failures() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    for (said, told) in [
        (NXDOMAIN, NXDOMAIN),
        (1, SERVFAIL),
        (SERVFAIL, SERVFAIL),
        (4, SERVFAIL),
        (REFUSED, SERVFAIL),
        (9, SERVFAIL),
    ] {
        site.upstream.answer(move |asked| vec![asked.message.reply(said, good()).encode()]);
        let answer = inside.ask(NAME, A);
        assert_eq!((answer.rcode(), answer.ips()), (told, Vec::new()), "{said}: {answer:?}");
        assert!(!inside.reaches(GOOD, 443), "{said}");
    }
}

#[test]
fn thousands_of_addresses_are_cut_to_some() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    let many = |count: u32| -> Vec<Record> {
        (0..count)
            .map(|nth| {
                Record::address(NAME, &std::net::Ipv4Addr::from(0x1400_0100 + nth).to_string())
            })
            .collect()
    };
    let edns = |size| Message::question(NAME, A).with_edns(size, &[]);
    // By this way it fits only by TCP.
    for (count, told) in [(4000, 64), (100, 64), (64, 64), (30, 30), (20, 20)] {
        site.upstream.serve(many(count));
        for (question, fits) in [
            (Message::question(NAME, A), told <= 20),
            (edns(512), told <= 20),
            (edns(0), told <= 20),
            (edns(1232), true),
            (edns(4096), true),
        ] {
            let answer = Way::udp(GATEWAYS[0]).ask(&inside.container, &question);
            assert_eq!(answer.is_truncated(), !fits, "{count}: {answer:?}");
            assert_eq!(answer.answers.len(), if fits { told } else { 0 }, "{count}");
        }
        let answer = Way::tcp(GATEWAYS[0]).ask(&inside.container, &Message::question(NAME, A));
        assert_eq!((answer.is_truncated(), answer.ips().len()), (false, told), "{count}");
        for ip in answer.ips().iter().take(3) {
            assert!(inside.reaches(&ip.to_string(), 443), "{ip}");
        }
    }
    // IPv6 addresses need more than the largest datagram.
    let six = (0..64).map(|nth| Record::address(NAME, &format!("2001:db8:f::{:x}", 0x100 + nth)));
    site.upstream.serve(six.collect::<Vec<_>>());
    let question = Message::question(NAME, AAAA).with_edns(65535, &[]);
    assert!(Way::udp(GATEWAYS[1]).ask(&inside.container, &question).is_truncated());
    let answer = Way::tcp(GATEWAYS[1]).ask(&inside.container, &question);
    assert_eq!(answer.ips().len(), 64);
    assert!(inside.reaches("2001:db8:f::100", 443));
}

/// Times to live are told as the addresses are in force, and each for at least a minute. One with
/// the highest bit is none (RFC 2181, section 8).
#[test]
fn times_to_live_are_bounded() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    // How long a new address is in force.
    let time = |nth: u8, ttl: u32, at_most: u32| {
        let (name, ip) = (format!("n{nth}.example.net"), format!("203.0.113.{}", 80 + nth));
        site.upstream.serve(vec![Record::address(&name, &ip).with_ttl(ttl)]);
        let answer = inside.ask(&name, A);
        // The container forgets it before it vanishes.
        assert!(answer.answers[0].ttl <= (at_most - 5).min(ttl), "{ttl}: {answer:?}");
        assert!(inside.reaches(&ip, 443), "{ttl}");
        site.times_of(&ip).split_whitespace().nth(2).unwrap().to_owned()
    };
    for (nth, ttl, at_most) in
        [(0, 0, 60), (1, 30, 60), (2, 300, 300), (3, 604_800, 3600), (4, u32::MAX, 60)]
    {
        let expected = match at_most {
            60 => "1m",
            300 => "5m",
            _ => "1h",
        };
        // Again if a second began between the record and the element.
        let is_exact = |again: u8| time(nth + 5 * again, ttl, at_most) == expected;
        assert!((0..3u8).any(is_exact), "{ttl}: not {expected}");
    }
}

/// The first server is silent, the second one answers; then both are silent.
#[test]
fn silent_servers_are_passed_over() {
    let mut site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    let silent = site.outside.within(|| UdpSocket::bind("10.9.0.2:54").unwrap());
    site.upstream.serve(good());
    site.kill_resolver();
    site.start_resolver(&["10.9.0.2:54", "10.9.0.2"]);
    let began = Instant::now();
    inside.finds(NAME, &[GOOD]);
    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
    silent.set_nonblocking(true).unwrap();
    assert!(silent.recv(&mut [0; 512]).is_ok(), "the first one was asked");
    site.upstream.answer(|_| Vec::new());
    let began = Instant::now();
    let answer = inside.ask(NAME, A);
    assert_eq!(answer.rcode(), SERVFAIL, "{answer:?}");
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(8) && took < Duration::from_secs(30), "{took:?}");
    // A dead one is no reason to wait.
    site.upstream.serve(good());
    site.kill_resolver();
    site.start_resolver(&["10.9.0.2:55", "10.9.0.2"]);
    inside.finds(NAME, &[GOOD]);
}

#[test]
fn what_goes_upstream_is_the_resolvers_own() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    site.upstream.serve(good());
    site.upstream.asked();
    // A client subnet, a cookie and padding; a signature; further records.
    let options = [
        &[0, 8, 0, 7, 0, 1, 24, 0, 198, 51, 100][..],
        &[0, 10, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8],
        &[0, 12, 0, 4, 0, 0, 0, 0],
    ]
    .concat();
    for nth in 0..40 {
        let mut question = Message::question("aPi.ExamPle.oRg", A).with_edns(4096, &options);
        question.additional.push(Record::text("secret.example.com", "of the container"));
        // CD, AD, DO.
        question.flags |= 0x30;
        question.additional[0].ttl = 0x8000;
        let way = if nth % 2 == 0 { Way::udp(GATEWAYS[0]) } else { Way::tcp(GATEWAYS[0]) };
        assert_eq!(way.ask(&inside.container, &question).ips(), parsed(&[GOOD]));
    }
    let asked = site.upstream.asked();
    assert_eq!(asked.len(), 40);
    for Asked { message, is_tcp, .. } in &asked {
        assert!(!is_tcp);
        assert_eq!(message.flags, RECURSION_DESIRED);
        assert_eq!(message.questions, [(NAME.to_owned(), A, 1)]);
        let [opt] = message.additional.as_slice() else { panic!("{message:?}") };
        assert_eq!((opt.kind, opt.class, opt.ttl, opt.data.len()), (OPT, 1232, 0, 0));
    }
    let distinct = |mut all: Vec<u16>| {
        all.sort_unstable();
        all.dedup();
        all.len()
    };
    // Of 65,536 numbers a few may be equal.
    assert!(distinct(asked.iter().map(|asked| asked.message.id).collect()) > 35);
    assert!(distinct(asked.iter().map(|asked| asked.from.port()).collect()) > 30);
    let low = asked.iter().filter(|asked| asked.message.id < 1000).count();
    assert!(low < 10, "ids are not those of the container");
}

/// Who is no container with names in its policy gets no answer.
#[test]
fn nobody_else_is_answered() {
    for kind in ["bridge", "ptp"] {
        let site = Site::new();
        let neighbour = site.attach(kind, "neighbour", None);
        let inside = site.attach(kind, "c1", Some(&names()));
        inside.finds("a.example.net", &["203.0.113.10"]);
        let question = || Message::question(NAME, A);
        site.upstream.asked();
        for is_tcp in [false, true] {
            let way = |server| Way { server, port: PORT, is_tcp };
            let from_neighbour =
                |server| way(server).is_answered(&neighbour.container, &question());
            for server in [GATEWAYS[0], GATEWAYS[1], "10.9.0.1"] {
                assert!(!from_neighbour(server), "{kind} {server} {is_tcp}");
            }
            for server in ["10.9.0.1", "10.1.2.1", "2001:db8:9::1"] {
                assert!(!way(server).is_answered(&site.outside, &question()), "{kind} {server}");
            }
            for server in ["127.0.0.1", "10.9.0.1", "10.1.2.1", "::1"] {
                assert!(!way(server).is_answered(&site.node, &question()), "{kind} {server}");
            }
        }
        assert!(site.answers_probe());
        // From a forged source: the neighbour and the host outside have the container's address.
        let (forged, to) = (inside.ip(false), GATEWAYS[0]);
        neighbour.container.sh(&format!("ip addr add {forged}/32 dev eth0"));
        site.outside.sh(&format!("ip addr add {forged}/32 dev eth0"));
        for (place, to) in [(&neighbour.container, to), (&site.outside, "10.9.0.1")] {
            for port in [53, PORT] {
                let socket = place.within(|| UdpSocket::bind((forged.as_str(), 0)).unwrap());
                socket.send_to(&question().encode(), (to, port)).unwrap();
            }
        }
        std::thread::sleep(Duration::from_millis(500));
        let asked = site.upstream.asked();
        assert!(asked.is_empty(), "{kind}: {asked:?}");
        assert!(!inside.reaches("192.0.2.7", 443), "{kind}: another one's question opens nothing");
    }
}

/// A container cannot ask by its own packets for another one, nor at the port of the resolver.
#[test]
fn a_container_asks_for_itself_only() {
    let site = Site::new();
    let other = site.attach(
        "bridge",
        "c0",
        Some(&serde_json::json!({"allow": [{"to": ["api.example.org"]}]})),
    );
    let inside = site.attach(
        "bridge",
        "c1",
        Some(&serde_json::json!({"allow": [{"to": ["a.example.net"]}]})),
    );
    let question = || Message::question(NAME, A);
    assert!(!Way::udp(GATEWAYS[0]).at_port(PORT).is_answered(&inside.container, &question()));
    let forged = other.ip(false);
    inside.container.sh(&format!("ip addr add {forged}/32 dev eth0"));
    let socket = inside.container.within(|| UdpSocket::bind((forged.as_str(), 0)).unwrap());
    site.upstream.asked();
    for port in [53, PORT] {
        drop(socket.send_to(&question().encode(), (GATEWAYS[0], port)));
    }
    std::thread::sleep(Duration::from_millis(500));
    assert!(site.upstream.asked().is_empty());
    assert!(!other.reaches("192.0.2.7", 443));
}

/// Whoever asks too often gets fewer answers; others get theirs.
#[test]
fn a_flood_of_questions_is_limited() {
    let site = Site::new();
    let other = site.attach("bridge", "c0", Some(&names()));
    let inside = site.attach("bridge", "c1", Some(&names()));
    inside.finds("a.example.net", &["203.0.113.10"]);
    let socket = client(&inside.container, GATEWAYS[0]);
    socket.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let (began, mut answered) = (Instant::now(), 0);
    for _ in 0..3000 {
        let refused = Message::question("refused.example.com", A);
        drop(socket.send(&refused.encode()));
        answered += usize::from(receive(&socket, &mut [0; 512]).is_ok());
    }
    other.finds("a.example.net", &["203.0.113.10"]);
    socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    while receive(&socket, &mut [0; 512]).is_ok() {
        answered += 1;
    }
    let most = 500 + 100 * (usize::try_from(began.elapsed().as_secs()).unwrap() + 1);
    assert!((400..=most).contains(&answered), "{answered} of 3000, at most {most}");
    eventually("it is answered again", || inside.is_answered("a.example.net"));
}

/// Connections that say nothing, and many of them.
#[test]
fn idle_connections_end_and_are_few() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    let open = || {
        let stream = super::connect(&inside.container, GATEWAYS[0], 53).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(25))).unwrap();
        stream
    };
    // Sixteen questions on one, and no more.
    let mut stream = open();
    let question = Message::question("refused.example.com", A).encode();
    let answers = (0..20).map_while(|_| exchange(&mut stream, &question).ok()).count();
    assert_eq!(answers, 16);
    let mut idle: Vec<_> = (0..8).map(|_| open()).collect();
    std::thread::sleep(Duration::from_millis(300));
    let mut ninth = open();
    assert!(exchange(&mut ninth, &question).is_err(), "a ninth connection");
    assert!(exchange(&mut idle[0], &question).is_ok());
    let began = Instant::now();
    let end = std::io::Read::read(&mut idle[7], &mut [0; 1]);
    assert!(matches!(end, Ok(0)) || end.is_err(), "{end:?}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    eventually("there is room again", || exchange(&mut open(), &question).is_ok());
}
