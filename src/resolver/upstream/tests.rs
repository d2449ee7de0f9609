//! Upstream servers on the loopback interface, well-meaning and other.

use std::io::{Read, Write};
use std::net;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use domain::base::iana::Rcode;
use domain::base::message_builder::AnswerBuilder;
use domain::base::name::Name;
use domain::base::{Message, MessageBuilder, Rtype, StaticCompressor};
use domain::rdata::A;

use super::super::message::parse_query;
use super::*;

const NAME: &str = "www.example.org";
/// The servers of these tests answer at once or never.
const SHORT: Duration = Duration::from_secs(1);

type Reply = AnswerBuilder<Vec<u8>>;

fn question() -> Question {
    let mut query = MessageBuilder::new_vec().question();
    query.push((NAME.parse::<Name<Vec<u8>>>().unwrap(), Rtype::A)).unwrap();
    parse_query(&query.finish()).unwrap()
}

/// The beginning of an answer.
fn reply_to(query: &[u8]) -> Reply {
    let query = Message::from_octets(query).unwrap();
    MessageBuilder::new_vec().start_answer(&query, Rcode::NOERROR).unwrap()
}

/// An answer with an address for the name.
fn answer_to(query: &[u8], name: &str, address: [u8; 4]) -> Vec<u8> {
    let mut reply = reply_to(query);
    let owner: Name<Vec<u8>> = name.parse().unwrap();
    reply.push((owner, 300, A::new(address.into()))).unwrap();
    reply.finish()
}

fn failure_to(query: &[u8], rcode: Rcode) -> Vec<u8> {
    let mut reply = reply_to(query);
    reply.header_mut().set_rcode(rcode);
    reply.finish()
}

fn truncated_answer_to(query: &[u8]) -> Vec<u8> {
    let mut reply = reply_to(query);
    reply.header_mut().set_tc(true);
    reply.finish()
}

/// A server over UDP that answers `count` queries with the messages of `answers`, and returns the
/// queries.
fn serve_udp(
    socket: net::UdpSocket,
    count: usize,
    answers: impl Fn(&[u8]) -> Vec<Vec<u8>> + Send + 'static,
) -> JoinHandle<Vec<Vec<u8>>> {
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    thread::spawn(move || {
        let mut queries = Vec::new();
        for _ in 0..count {
            let mut buffer = [0; 4096];
            let (length, client) = socket.recv_from(&mut buffer).unwrap();
            let query = buffer[..length].to_vec();
            for answer in answers(&query) {
                socket.send_to(&answer, client).unwrap();
            }
            queries.push(query);
        }
        queries
    })
}

/// A server over TCP that sends, for one query, the bytes of `stream`.
fn serve_tcp(
    listener: net::TcpListener,
    stream: impl Fn(&[u8]) -> Vec<u8> + Send + 'static,
) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        let mut length = [0; 2];
        connection.read_exact(&mut length).unwrap();
        let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
        connection.read_exact(&mut query).unwrap();
        // In two parts; a client that gave up is no failure.
        let bytes = stream(&query);
        let (first, rest) = bytes.split_at(bytes.len() / 2);
        if connection.write_all(first).is_ok() {
            thread::sleep(Duration::from_millis(20));
            drop(connection.write_all(rest));
        }
        query
    })
}

fn with_length(message: &[u8]) -> Vec<u8> {
    let mut bytes = u16::try_from(message.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend(message);
    bytes
}

fn udp_socket() -> (net::UdpSocket, SocketAddr) {
    let socket = net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

/// Sockets of both protocols with the same port.
fn both_sockets() -> (net::UdpSocket, net::TcpListener, SocketAddr) {
    loop {
        let (socket, address) = udp_socket();
        if let Ok(listener) = net::TcpListener::bind(address) {
            return (socket, listener, address);
        }
    }
}

fn resolve(servers: &[SocketAddr]) -> Result<UpstreamAnswer, String> {
    let mut upstreams = Upstreams::new(servers.to_vec());
    upstreams.patience = Patience { datagram: SHORT, connection: SHORT, stream: 2 * SHORT };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(upstreams.resolve(&question()))
}

fn addresses(found: &UpstreamAnswer) -> Vec<String> {
    found.addresses.iter().map(|(address, _)| address.to_string()).collect()
}

#[test]
fn what_is_not_the_answer_is_waited_out() {
    let (socket, address) = udp_socket();
    let server = serve_udp(socket, 1, |query| {
        let mut other_id = answer_to(query, NAME, [192, 0, 2, 66]);
        other_id[1] ^= 1;
        let mut other_question = answer_to(query, NAME, [192, 0, 2, 67]);
        other_question[13] = b'x';
        let right = answer_to(query, NAME, [192, 0, 2, 1]);
        vec![other_id, other_question, Vec::new(), vec![0xff; 40], query.to_vec(), right]
    });
    assert_eq!(addresses(&resolve(&[address]).unwrap()), ["192.0.2.1"]);
    assert_eq!(server.join().unwrap().len(), 1);
}

#[test]
fn what_comes_from_elsewhere_is_not_read() {
    let (socket, address) = udp_socket();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let server = thread::spawn(move || {
        let mut buffer = [0; 512];
        let (length, client) = socket.recv_from(&mut buffer).unwrap();
        let (elsewhere, _) = udp_socket();
        let forged = answer_to(&buffer[..length], NAME, [192, 0, 2, 66]);
        elsewhere.send_to(&forged, client).unwrap();
        thread::sleep(SHORT / 4);
        let right = answer_to(&buffer[..length], NAME, [192, 0, 2, 1]);
        socket.send_to(&right, client).unwrap();
    });
    assert_eq!(addresses(&resolve(&[address]).unwrap()), ["192.0.2.1"]);
    server.join().unwrap();
}

#[test]
fn a_truncated_answer_is_asked_for_over_tcp() {
    let (socket, listener, address) = both_sockets();
    let udp = serve_udp(socket, 1, |query| vec![truncated_answer_to(query)]);
    let tcp = serve_tcp(listener, |query| {
        let query = Message::from_octets(query).unwrap();
        // 16 bytes for each address.
        let target = StaticCompressor::new(Vec::new());
        let reply = MessageBuilder::from_target(target).unwrap();
        let mut reply = reply.start_answer(&query, Rcode::NOERROR).unwrap();
        let owner = query.sole_question().unwrap().into_qname();
        for index in 0..4000_u16 {
            let [high, low] = index.to_be_bytes();
            reply.push((owner, 300, A::new([10, 0, high, low].into()))).unwrap();
        }
        with_length(&reply.finish().into_target())
    });
    let found = resolve(&[address]).unwrap();
    assert_eq!(found.addresses.len(), 64);
    assert_eq!(addresses(&found)[63], "10.0.0.63");
    let (first, second) = (udp.join().unwrap().remove(0), tcp.join().unwrap());
    assert_eq!(first[2..], second[2..]);
}

#[test]
fn every_query_has_a_new_number_and_port() {
    let mut ports = Vec::new();
    let mut ids = Vec::new();
    for _ in 0..8 {
        let (socket, address) = udp_socket();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let server = thread::spawn(move || {
            let mut buffer = [0; 512];
            let (length, client) = socket.recv_from(&mut buffer).unwrap();
            socket.send_to(&answer_to(&buffer[..length], NAME, [192, 0, 2, 1]), client).unwrap();
            (client.port(), [buffer[0], buffer[1]])
        });
        resolve(&[address]).unwrap();
        let (port, id) = server.join().unwrap();
        ports.push(port);
        ids.push(u16::from_be_bytes(id));
    }
    // Whoever gets one query of his own must not know the number of the next one.
    let mut steps: Vec<_> = ids.windows(2).map(|ids| ids[1].wrapping_sub(ids[0])).collect();
    steps.sort_unstable();
    steps.dedup();
    assert!(steps.len() > 4, "{ids:?}");
    // Two of eight are the same now and then, all of them never.
    ports.sort_unstable();
    ports.dedup();
    ids.sort_unstable();
    ids.dedup();
    assert!(ports.len() > 4 && ids.len() > 4, "{ports:?} {ids:?}");
}

#[test]
fn a_server_that_fails_is_passed_over_at_once() {
    let (closed, closed_address) = udp_socket();
    drop(closed);
    let (failing, failing_address) = udp_socket();
    let failing = serve_udp(failing, 1, |query| vec![failure_to(query, Rcode::SERVFAIL)]);
    let (good, good_address) = udp_socket();
    let good = serve_udp(good, 1, |query| vec![answer_to(query, NAME, [192, 0, 2, 1])]);
    let begin = Instant::now();
    let found = resolve(&[closed_address, failing_address, good_address]).unwrap();
    assert!(begin.elapsed() < SHORT, "{:?}", begin.elapsed());
    assert_eq!(addresses(&found), ["192.0.2.1"]);
    failing.join().unwrap();
    good.join().unwrap();
}

#[test]
fn a_silent_server_is_asked_in_the_second_round() {
    let (silent, silent_address) = udp_socket();
    let late = thread::spawn(move || {
        let mut buffer = [0; 512];
        silent.recv_from(&mut buffer).unwrap();
        let (length, client) = silent.recv_from(&mut buffer).unwrap();
        silent.send_to(&answer_to(&buffer[..length], NAME, [192, 0, 2, 2]), client).unwrap();
    });
    assert_eq!(addresses(&resolve(&[silent_address]).unwrap()), ["192.0.2.2"]);
    late.join().unwrap();
}

#[test]
fn an_error_names_all_servers() {
    let (closed, closed_address) = udp_socket();
    drop(closed);
    let (silent, silent_address) = udp_socket();
    let (failing, failing_address) = udp_socket();
    let failing = serve_udp(failing, 2, |query| vec![failure_to(query, Rcode::REFUSED)]);
    let error = resolve(&[closed_address, silent_address, failing_address]).unwrap_err();
    assert_eq!(
        error,
        format!(
            "ask for \"{NAME}\": {closed_address}: Connection refused (os error 111); \
             {silent_address}: no answer within 1s; {failing_address}: REFUSED"
        )
    );
    failing.join().unwrap();
    drop(silent);
    assert_eq!(resolve(&[]).unwrap_err(), "no upstream server is known");
}

#[test]
fn what_goes_wrong_over_tcp_is_an_error() {
    type Stream = fn(&[u8]) -> Vec<u8>;
    let cases: [(Stream, &str); 5] = [
        (|_| Vec::new(), "unexpected end of file"),
        (|_| vec![0, 50, 1, 2, 3], "unexpected end of file"),
        (|query| with_length(&truncated_answer_to(query)), "a truncated answer"),
        (|_| with_length(&[0; 30]), "an answer to another question"),
        (|_| with_length(b""), "an answer to another question"),
    ];
    for (stream, expected) in cases {
        let (socket, listener, address) = both_sockets();
        let udp = serve_udp(socket, 2, |query| vec![truncated_answer_to(query)]);
        let second = listener.try_clone().unwrap();
        let tcp = [serve_tcp(listener, stream), serve_tcp(second, stream)];
        let error = resolve(&[address]).unwrap_err();
        assert_eq!(error, format!("ask for \"{NAME}\": {address}: {expected}"));
        udp.join().unwrap();
        for server in tcp {
            server.join().unwrap();
        }
    }
}

#[test]
fn a_tcp_server_that_stalls_is_given_up() {
    let (socket, listener, address) = both_sockets();
    let udp = serve_udp(socket, 2, |query| vec![truncated_answer_to(query)]);
    let begin = Instant::now();
    // Connected by the kernel, never accepted.
    let error = resolve(&[address]).unwrap_err();
    assert!(error.ends_with("no answer within 2s"), "{error}");
    assert!(begin.elapsed() < 8 * SHORT, "{:?}", begin.elapsed());
    udp.join().unwrap();
    drop(listener);
}
