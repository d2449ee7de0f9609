//! As much of D-Bus as it takes to call a method with texts: a socket, `EXTERNAL` authentication,
//! one call at a time (D-Bus specification 0.41, "Message Protocol").
//!
//! Crates for D-Bus bring a second executor, or a second version of what is here already.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Duration;

use nix::unistd::geteuid;

/// Where the bus is without `DBUS_SYSTEM_BUS_ADDRESS`.
const DEFAULT_ADDRESS: &str = "unix:path=/var/run/dbus/system_bus_socket";

/// How long others wait for an answer, too.
const TIMEOUT: Duration = Duration::from_secs(25);

const CALL: u8 = 1;
const RETURN: u8 = 2;
const ERROR: u8 = 3;

const PATH: u8 = 1;
const INTERFACE: u8 = 2;
const MEMBER: u8 = 3;
const ERROR_NAME: u8 = 4;
const REPLY_SERIAL: u8 = 5;
const DESTINATION: u8 = 6;
const SIGNATURE: u8 = 8;

/// The fixed part of a header.
const PREFIX: usize = 16;
/// No message is longer.
const LONGEST: usize = 1 << 27;

/// A connection to a bus.
#[derive(Debug)]
pub struct Bus {
    socket: UnixStream,
    serial: u32,
}

/// What is called.
#[derive(Clone, Copy, Debug)]
pub struct Method<'a> {
    /// The service's name.
    pub destination: &'a str,
    /// The object.
    pub path: &'a str,
    /// The interface of the object.
    pub interface: &'a str,
    /// The method of the interface.
    pub member: &'a str,
}

/// The bus itself.
const DBUS: Method<'_> = Method {
    destination: "org.freedesktop.DBus",
    path: "/org/freedesktop/DBus",
    interface: "org.freedesktop.DBus",
    member: "Hello",
};

/// Why a call failed.
#[derive(Debug)]
pub enum Failure {
    /// There is no connection, or no more.
    Io(io::Error),
    /// The answer is an error: its name, its text.
    Refused(String, String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Io(error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Io(error) => f.write_str(&crate::error::io_text(error)),
            Failure::Refused(name, text) if text.is_empty() => f.write_str(name),
            Failure::Refused(_, text) => f.write_str(text),
        }
    }
}

impl Bus {
    /// The system bus.
    pub fn system() -> Result<Bus, Failure> {
        let address = std::env::var("DBUS_SYSTEM_BUS_ADDRESS").unwrap_or_default();
        let address = if address.is_empty() { DEFAULT_ADDRESS } else { &address };
        let mut bus = Bus { socket: connect(address)?, serial: 0 };
        bus.authenticate()?;
        bus.call(DBUS, &[])?;
        Ok(bus)
    }

    /// Whether somebody has this name on the bus.
    pub fn has_owner(&mut self, name: &str) -> Result<bool, Failure> {
        Ok(self.call(Method { member: "NameHasOwner", ..DBUS }, &[name])?.is_true())
    }

    /// The user id is proven by the socket.
    fn authenticate(&mut self) -> Result<(), Failure> {
        // Each digit in hexadecimal ASCII.
        let uid: String = geteuid().to_string().chars().flat_map(|digit| ['3', digit]).collect();
        self.socket.write_all(format!("\0AUTH EXTERNAL {uid}\r\n").as_bytes())?;
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") && line.len() < 1024 {
            let mut byte = [0];
            self.socket.read_exact(&mut byte)?;
            line.extend(byte);
        }
        if !line.starts_with(b"OK ") {
            let text = String::from_utf8_lossy(&line).trim().to_owned();
            return Err(Failure::Refused("authentication".to_owned(), text));
        }
        Ok(self.socket.write_all(b"BEGIN\r\n")?)
    }

    /// Calls a method with texts and waits for the answer.
    pub fn call(&mut self, method: Method<'_>, texts: &[&str]) -> Result<Answer, Failure> {
        self.serial += 1;
        self.socket.write_all(&encode(method, self.serial, texts))?;
        loop {
            let message = self.read()?;
            let fields = Fields::parse(&message).unwrap_or_default();
            if fields.reply_serial != Some(self.serial) {
                continue;
            }
            let answer = Answer { signature: fields.signature, message, body: fields.end };
            match answer.message.bytes.get(1) {
                Some(&RETURN) => return Ok(answer),
                Some(&ERROR) => {
                    return Err(Failure::Refused(fields.error_name, answer.text()));
                }
                _ => {}
            }
        }
    }

    fn read(&mut self) -> Result<Message, Failure> {
        let mut bytes = vec![0; PREFIX];
        self.socket.read_exact(&mut bytes)?;
        let mut message = Message { bytes };
        let (body, fields) = (message.number(4), message.number(12));
        let lengths = body.zip(fields).map(|(body, fields)| (body as usize, fields as usize));
        let (body, fields) = lengths.unwrap_or_default();
        if body > LONGEST || fields > LONGEST {
            return Err(io::Error::from(io::ErrorKind::InvalidData).into());
        }
        message.bytes.resize(PREFIX + fields.next_multiple_of(8) + body, 0);
        let rest = message.bytes.get_mut(PREFIX..).unwrap_or_default();
        self.socket.read_exact(rest)?;
        Ok(message)
    }
}

/// Tries the addresses of a list in their order.
fn connect(list: &str) -> io::Result<UnixStream> {
    let mut outcome = Err(io::Error::from(io::ErrorKind::Unsupported));
    for address in list.split(';') {
        let Some(keys) = address.strip_prefix("unix:") else { continue };
        let key = |name| keys.split(',').find_map(|pair| pair.strip_prefix(name));
        let place = match (key("path="), key("abstract=")) {
            (Some(path), _) => SocketAddr::from_pathname(path),
            (None, Some(name)) => SocketAddr::from_abstract_name(name),
            (None, None) => continue,
        };
        outcome = place.and_then(|place| UnixStream::connect_addr(&place));
        if outcome.is_ok() {
            break;
        }
    }
    let socket = outcome?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    socket.set_write_timeout(Some(TIMEOUT))?;
    Ok(socket)
}

fn pad(bytes: &mut Vec<u8>, to: usize) {
    bytes.resize(bytes.len().next_multiple_of(to), 0);
}

fn length(bytes: usize) -> [u8; 4] {
    u32::try_from(bytes).unwrap_or(u32::MAX).to_le_bytes()
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    pad(bytes, 4);
    bytes.extend(length(text.len()));
    bytes.extend(text.as_bytes());
    bytes.push(0);
}

fn put_signature(bytes: &mut Vec<u8>, text: &str) {
    bytes.push(u8::try_from(text.len()).unwrap_or(u8::MAX));
    bytes.extend(text.as_bytes());
    bytes.push(0);
}

fn encode(method: Method<'_>, serial: u32, texts: &[&str]) -> Vec<u8> {
    let mut body = Vec::new();
    for text in texts {
        put_text(&mut body, text);
    }
    let mut bytes = vec![b'l', CALL, 0, 1];
    bytes.extend(length(body.len()));
    bytes.extend(serial.to_le_bytes());
    bytes.extend([0; 4]);
    for (code, kind, text) in [
        (PATH, "o", method.path),
        (INTERFACE, "s", method.interface),
        (MEMBER, "s", method.member),
        (DESTINATION, "s", method.destination),
    ] {
        pad(&mut bytes, 8);
        bytes.push(code);
        put_signature(&mut bytes, kind);
        put_text(&mut bytes, text);
    }
    if !texts.is_empty() {
        pad(&mut bytes, 8);
        bytes.push(SIGNATURE);
        put_signature(&mut bytes, "g");
        put_signature(&mut bytes, &"s".repeat(texts.len()));
    }
    let fields = length(bytes.len() - PREFIX);
    bytes[12..PREFIX].copy_from_slice(&fields);
    pad(&mut bytes, 8);
    bytes.extend(body);
    bytes
}

/// A message as it came.
#[derive(Debug)]
struct Message {
    bytes: Vec<u8>,
}

impl Message {
    /// In the byte order of who wrote it.
    fn number(&self, at: usize) -> Option<u32> {
        let four: [u8; 4] = self.bytes.get(at..at + 4)?.try_into().ok()?;
        let little = self.bytes.first() == Some(&b'l');
        Some(if little { u32::from_le_bytes(four) } else { u32::from_be_bytes(four) })
    }

    fn text(&self, at: usize, length: usize) -> Option<String> {
        let text = self.bytes.get(at..at.checked_add(length)?)?;
        Some(String::from_utf8_lossy(text).into_owned())
    }
}

/// What is in a header.
#[derive(Debug, Default)]
struct Fields {
    reply_serial: Option<u32>,
    error_name: String,
    signature: String,
    /// Where the body begins.
    end: usize,
}

impl Fields {
    fn parse(message: &Message) -> Option<Fields> {
        let end = PREFIX + usize::try_from(message.number(12)?).ok()?;
        let mut fields = Fields { end: end.next_multiple_of(8), ..Fields::default() };
        let mut at = PREFIX;
        while at < end {
            at = at.next_multiple_of(8);
            // Code, length of the signature, its only letter, zero.
            let head: [u8; 4] = message.bytes.get(at..at + 4)?.try_into().ok()?;
            at += 4;
            let [code, 1, kind, 0] = head else { return None };
            let size = match kind {
                b'u' => 0,
                b'g' => usize::from(*message.bytes.get(at)?),
                _ => usize::try_from(message.number(at)?).ok()?,
            };
            let (start, next) = match kind {
                b'u' => (at, at + 4),
                b'g' => (at + 1, at + size + 2),
                _ => (at + 4, at + size + 5),
            };
            match code {
                REPLY_SERIAL => fields.reply_serial = message.number(start),
                ERROR_NAME => fields.error_name = message.text(start, size)?,
                SIGNATURE => fields.signature = message.text(start, size)?,
                _ => {}
            }
            at = next;
        }
        Some(fields)
    }
}

/// What a method returned.
#[derive(Debug)]
pub struct Answer {
    signature: String,
    message: Message,
    body: usize,
}

impl Answer {
    /// Whether it is the boolean `true`.
    pub fn is_true(&self) -> bool {
        self.signature == "b" && self.message.number(self.body) == Some(1)
    }

    /// The text that it begins with; empty if it does not begin with one.
    pub fn text(&self) -> String {
        let read = || {
            let size = usize::try_from(self.message.number(self.body)?).ok()?;
            self.message.text(self.body + 4, size)
        };
        if self.signature.starts_with('s') { read().unwrap_or_default() } else { String::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_laid_out_as_the_specification_says() {
        let bytes = encode(Method { member: "NameHasOwner", ..DBUS }, 7, &["a", "bc"]);
        assert_eq!(bytes[..12], [b'l', 1, 0, 1, 15, 0, 0, 0, 7, 0, 0, 0]);
        assert_eq!(bytes[PREFIX..PREFIX + 8], [1, 1, b'o', 0, 21, 0, 0, 0]);
        assert_eq!(bytes[bytes.len() - 15..], *b"\x01\0\0\0a\0\0\0\x02\0\0\0bc\0");
        assert_eq!((bytes.len() - 15) % 8, 0);
        let message = Message { bytes };
        assert_eq!(Fields::parse(&message).unwrap().signature, "ss");
    }

    #[test]
    fn nonsense_is_no_panic() {
        for end in 0..64 {
            let mut bytes = encode(DBUS, 1, &["x"]);
            bytes.truncate(end);
            let message = Message { bytes };
            drop(Fields::parse(&message));
            let answer = Answer { signature: "s".into(), message, body: 60 };
            assert!(!answer.is_true() && answer.text().is_empty());
        }
    }

    #[test]
    fn addresses_without_a_socket_are_errors() {
        for bad in ["", "tcp:host=x", "unix:tmpdir=/x", "unix:path=/nonexistent;unix:abstract=no-"]
        {
            assert!(connect(bad).is_err(), "{bad}");
        }
    }
}
