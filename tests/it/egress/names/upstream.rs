//! A name server whose answers a test programs, by UDP and TCP.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::wire::{CNAME, Message, NOERROR, NXDOMAIN, OPT, Record, TRUNCATED, encoded_name};
use crate::support::traffic::Place;

/// How often threads look whether the server has ended.
const PAUSE: Duration = Duration::from_millis(20);
/// A limit for threads of connections that nobody closes.
const LIMIT: Duration = Duration::from_secs(30);

/// A question that the server got.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) message: Message,
    pub(super) from: SocketAddr,
    pub(super) is_tcp: bool,
}

impl Asked {
    /// The name in lower case.
    pub(super) fn name(&self) -> String {
        self.message.questions[0].0.to_ascii_lowercase()
    }

    /// The largest message that the client takes by this way.
    fn limit(&self) -> usize {
        let opt = self.message.additional.iter().find(|record| record.kind == OPT);
        match opt {
            _ if self.is_tcp => 65535,
            Some(opt) => opt.class.max(512).into(),
            None => 512,
        }
    }
}

/// The messages that are sent for a question; by TCP only the first.
type Answer = dyn Fn(&Asked) -> Vec<Vec<u8>> + Send + Sync;

/// The server, which ends with this value.
pub(super) struct Upstream {
    pub(super) address: SocketAddr,
    state: Arc<State>,
}

struct State {
    answer: Mutex<Arc<Answer>>,
    asked: Mutex<Vec<Asked>>,
    is_over: AtomicBool,
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::Relaxed);
    }
}

impl Upstream {
    /// A server at this address of the place, without any name.
    pub(super) fn start(place: &impl Place, ip: &str, port: u16) -> Upstream {
        let address = SocketAddr::new(ip.parse::<IpAddr>().unwrap(), port);
        let (udp, tcp) = place
            .within(|| (UdpSocket::bind(address).unwrap(), TcpListener::bind(address).unwrap()));
        udp.set_read_timeout(Some(PAUSE)).unwrap();
        tcp.set_nonblocking(true).unwrap();
        let (answer, asked) = (zone_answer(Vec::new()), Mutex::default());
        let answer = Mutex::new(answer);
        let state = Arc::new(State { answer, asked, is_over: AtomicBool::new(false) });
        for _ in 0..2 {
            let (udp, state) = (udp.try_clone().unwrap(), Arc::clone(&state));
            thread::spawn(move || state.serve_udp(&udp));
        }
        let of_tcp = Arc::clone(&state);
        thread::spawn(move || of_tcp.serve_tcp(&tcp));
        Upstream { address, state }
    }

    /// Answers with these records from now on: those of the asked type at the end of the chain of
    /// CNAME records that begins at the asked name.
    pub(super) fn serve(&self, zone: impl Into<Vec<Record>>) {
        *self.state.answer.lock().unwrap() = zone_answer(zone.into());
    }

    /// Answers so from now on.
    pub(super) fn answer(&self, answer: impl Fn(&Asked) -> Vec<Vec<u8>> + Send + Sync + 'static) {
        *self.state.answer.lock().unwrap() = Arc::new(answer);
    }

    /// The questions since the last call.
    pub(super) fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut *self.state.asked.lock().unwrap())
    }
}

impl State {
    fn serve_udp(&self, socket: &UdpSocket) {
        let mut buffer = [0; 4096];
        while !self.is_over.load(Ordering::Relaxed) {
            let Ok((length, from)) = socket.recv_from(&mut buffer) else { continue };
            for message in self.messages_for(&buffer[..length], from, false) {
                drop(socket.send_to(&message, from));
            }
        }
    }

    fn serve_tcp(self: &Arc<State>, listener: &TcpListener) {
        while !self.is_over.load(Ordering::Relaxed) {
            match listener.accept() {
                Ok((stream, from)) => {
                    let state = Arc::clone(self);
                    thread::spawn(move || state.serve_stream(stream, from));
                }
                Err(_) => thread::sleep(PAUSE),
            }
        }
    }

    fn serve_stream(&self, mut stream: TcpStream, from: SocketAddr) -> Option<()> {
        stream.set_nonblocking(false).ok()?;
        stream.set_read_timeout(Some(LIMIT)).ok()?;
        loop {
            let mut length = [0; 2];
            stream.read_exact(&mut length).ok()?;
            let mut message = vec![0; u16::from_be_bytes(length).into()];
            stream.read_exact(&mut message).ok()?;
            let answer = self.messages_for(&message, from, true).into_iter().next()?;
            let length = u16::try_from(answer.len()).unwrap().to_be_bytes();
            stream.write_all(&[&length, answer.as_slice()].concat()).ok()?;
        }
    }

    fn messages_for(&self, bytes: &[u8], from: SocketAddr, is_tcp: bool) -> Vec<Vec<u8>> {
        let Some(message) = Message::decode(bytes) else { return Vec::new() };
        let asked = Asked { message, from, is_tcp };
        let answer = Arc::clone(&self.answer.lock().unwrap());
        let messages = answer(&asked);
        self.asked.lock().unwrap().push(asked);
        messages
    }
}

fn zone_answer(zone: Vec<Record>) -> Arc<Answer> {
    Arc::new(move |asked| vec![from_zone(&zone, asked)])
}

/// The answer with the records of a zone; truncated, if the client takes no message of this size.
pub(super) fn from_zone(zone: &[Record], asked: &Asked) -> Vec<u8> {
    let (mut name, kind) = (asked.name(), asked.message.questions[0].1);
    let (mut answers, mut is_known) = (Vec::new(), false);
    for _ in 0..20 {
        let of_name = zone.iter().filter(|record| record.name.eq_ignore_ascii_case(&name));
        let of_name: Vec<&Record> = of_name.collect();
        is_known |= !of_name.is_empty();
        answers.extend(of_name.iter().filter(|record| record.kind == kind).copied().cloned());
        let Some(alias) = of_name.into_iter().find(|record| record.kind == CNAME) else { break };
        answers.push(alias.clone());
        let target = |record: &&Record| encoded_name(&record.name) == alias.data;
        let Some(next) = zone.iter().find(target) else { break };
        name.clone_from(&next.name);
    }
    // A server repeats the question's spelling.
    for record in &mut answers {
        if record.name.eq_ignore_ascii_case(&asked.message.questions[0].0) {
            record.name.clone_from(&asked.message.questions[0].0);
        }
    }
    let rcode = if is_known { NOERROR } else { NXDOMAIN };
    let full = asked.message.reply(rcode, answers);
    let bytes = full.encode();
    if bytes.len() <= asked.limit() {
        return bytes;
    }
    let short = Message { flags: full.flags | TRUNCATED, answers: Vec::new(), ..full };
    short.encode()
}
