//! Questions and connections of containers.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::wire::Message;
use crate::support::traffic::Place;

/// How long an answer may take that has to come: machines that run tests are busy.
pub(super) const PATIENCE: Duration = Duration::from_secs(40);
/// How long an answer may take that should not come.
pub(super) const WAIT: Duration = Duration::from_millis(700);

/// Where a question goes, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way<'w> {
    pub(super) server: &'w str,
    pub(super) port: u16,
    pub(super) is_tcp: bool,
}

impl<'w> Way<'w> {
    pub(super) fn udp(server: &'w str) -> Way<'w> {
        Way { server, port: 53, is_tcp: false }
    }

    pub(super) fn tcp(server: &'w str) -> Way<'w> {
        Way { server, port: 53, is_tcp: true }
    }

    pub(super) fn at_port(self, port: u16) -> Way<'w> {
        Way { port, ..self }
    }

    /// Sends bytes from a place; returns what comes back.
    pub(super) fn send(self, from: &impl Place, bytes: &[u8], limit: Duration) -> Option<Vec<u8>> {
        let server = SocketAddr::new(self.server.parse().unwrap(), self.port);
        if self.is_tcp {
            let mut stream = from.within(|| TcpStream::connect_timeout(&server, limit)).ok()?;
            stream.set_read_timeout(Some(limit)).unwrap();
            return exchange(&mut stream, bytes).ok();
        }
        let any: IpAddr = if server.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        let socket = from.within(|| UdpSocket::bind((any, 0)).unwrap());
        // Connected, because another address must not answer.
        socket.connect(server).ok()?;
        socket.set_read_timeout(Some(limit)).unwrap();
        socket.send(bytes).ok()?;
        let mut buffer = vec![0; 65535];
        let length = receive(&socket, &mut buffer).ok()?;
        Some(buffer[..length].to_vec())
    }

    /// The answer to a question, which has to come.
    #[track_caller]
    pub(super) fn ask(self, from: &impl Place, question: &Message) -> Message {
        let bytes = self.send(from, &question.encode(), PATIENCE);
        let bytes = bytes.unwrap_or_else(|| panic!("no answer: {self:?} {question:?}"));
        let answer = Message::decode(&bytes).unwrap_or_else(|| panic!("malformed: {bytes:?}"));
        assert_eq!(answer.id, question.id, "{answer:?}");
        assert_eq!(answer.questions, question.questions, "{answer:?}");
        answer
    }

    /// Whether there is any answer to a question.
    pub(super) fn is_answered(self, from: &impl Place, question: &Message) -> bool {
        self.send(from, &question.encode(), WAIT).is_some()
    }
}

/// A socket for questions of a place to a name server.
pub(super) fn client(from: &impl Place, server: &str) -> UdpSocket {
    let socket = from.within(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    socket.connect((server, 53)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Receives a datagram. A signal for the tests' process does not end waiting.
pub(super) fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match socket.recv(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

/// One message of a TCP connection and the next one that comes back.
pub(super) fn exchange(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
    stream.write_all(&[&length, bytes].concat())?;
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut answer = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut answer)?;
    Ok(answer)
}

/// A connection, if it comes about.
pub(super) fn connect(from: &impl Place, ip: &str, port: u16) -> io::Result<TcpStream> {
    connect_within(Duration::from_secs(10), from, ip, port)
}

/// A connection, if it comes about within this time: of what is refused without an answer, too.
pub(super) fn connect_within(
    limit: Duration,
    from: &impl Place,
    ip: &str,
    port: u16,
) -> io::Result<TcpStream> {
    let to = SocketAddr::new(ip.parse().unwrap(), port);
    let stream = from.within(|| TcpStream::connect_timeout(&to, limit))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Whether a connection carries data both ways.
pub(super) fn is_alive(stream: &mut TcpStream) -> bool {
    let mut buffer = [0; 4];
    stream.write_all(b"ping").is_ok() && stream.read_exact(&mut buffer).is_ok()
}

/// Servers that return what they get, at all addresses of a place.
pub(super) struct Echo(Arc<AtomicBool>);

impl Drop for Echo {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Echo {
    pub(super) fn start(place: &impl Place, ports: &[u16]) -> Echo {
        let is_over = Arc::new(AtomicBool::new(false));
        for port in ports {
            let listener = place.within(|| TcpListener::bind(("::", *port)).unwrap());
            listener.set_nonblocking(true).unwrap();
            let is_over = Arc::clone(&is_over);
            thread::spawn(move || accept(&listener, &is_over));
        }
        Echo(is_over)
    }
}

fn accept(listener: &TcpListener, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => drop(thread::spawn(move || echo(stream))),
            Err(_) => thread::sleep(Duration::from_millis(2)),
        }
    }
}

fn echo(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    // Somebody may keep a connection for the time of a whole test.
    stream.set_read_timeout(Some(Duration::from_secs(600)))?;
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            length => stream.write_all(&buffer[..length])?,
        }
    }
}
