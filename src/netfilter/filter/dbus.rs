//! A minimal D-Bus client: calls methods with string arguments, one at a time, with `EXTERNAL`
//! authentication (D-Bus specification 0.41, "Message Protocol").
//!
//! The existing crates for D-Bus depend on a second executor, or on another version of a
//! dependency.

use std::io::{self, ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Duration;

use nix::unistd::geteuid;

/// The default of `DBUS_SYSTEM_BUS_ADDRESS`.
const DEFAULT_ADDRESS: &str = "unix:path=/var/run/dbus/system_bus_socket";

/// The timeout of libdbus and sd-bus for a reply.
const TIMEOUT: Duration = Duration::from_secs(25);

// Message types.
const METHOD_CALL: u8 = 1;
const METHOD_RETURN: u8 = 2;
const ERROR: u8 = 3;

// Header fields.
const PATH: u8 = 1;
const INTERFACE: u8 = 2;
const MEMBER: u8 = 3;
const REPLY_SERIAL: u8 = 5;
const DESTINATION: u8 = 6;
const SIGNATURE: u8 = 8;

/// The maximum length of a message in bytes.
const MAX_MESSAGE: usize = 1 << 27;

/// A connection to a bus.
#[derive(Debug)]
pub struct DbusConnection {
    socket: UnixStream,
    serial: u32,
}

/// The reply to a method call.
#[derive(Debug)]
pub struct DbusReply {
    /// The byte order of the message: `l` or `B`.
    order: u8,
    body: Vec<u8>,
}

/// The name of the bus itself.
const DBUS: &str = "org.freedesktop.DBus";

impl DbusConnection {
    pub fn connect_system_bus() -> io::Result<DbusConnection> {
        let address = std::env::var("DBUS_SYSTEM_BUS_ADDRESS").unwrap_or_default();
        let address = if address.is_empty() { DEFAULT_ADDRESS } else { &address };
        let mut bus = DbusConnection { socket: connect_first_address(address)?, serial: 0 };
        bus.authenticate_by_uid()?;
        bus.call_method(DBUS, DBUS, "Hello", &[])?;
        Ok(bus)
    }

    /// Whether a service owns this name.
    pub fn has_name_owner(&mut self, name: &str) -> io::Result<bool> {
        Ok(self.call_method(DBUS, DBUS, "NameHasOwner", &[name])?.is_true())
    }

    /// Authenticates by the user id of the socket's peer credentials.
    fn authenticate_by_uid(&mut self) -> io::Result<()> {
        // Each decimal digit is one byte, in hexadecimal.
        let uid: String = geteuid().to_string().chars().flat_map(|digit| ['3', digit]).collect();
        self.socket.write_all(format!("\0AUTH EXTERNAL {uid}\r\n").as_bytes())?;
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") && line.len() < 1024 {
            let mut byte = [0];
            self.socket.read_exact(&mut byte)?;
            line.extend(byte);
        }
        if !line.starts_with(b"OK ") {
            return Err(io::Error::other(String::from_utf8_lossy(&line).trim()));
        }
        self.socket.write_all(b"BEGIN\r\n")
    }

    /// Calls the method `member` of the service's object, whose path is the service's name. An
    /// error reply fails with its text and [`ErrorKind::Other`].
    pub fn call_method(
        &mut self,
        service: &str,
        interface: &str,
        member: &str,
        texts: &[&str],
    ) -> io::Result<DbusReply> {
        self.serial += 1;
        let path = format!("/{}", service.replace('.', "/"));
        let fields = [
            (PATH, b'o', path.as_str()),
            (INTERFACE, b's', interface),
            (MEMBER, b's', member),
            (DESTINATION, b's', service),
        ];
        self.socket.write_all(&encode_call(self.serial, &fields, texts))?;
        loop {
            let mut header = [0; 16];
            self.socket.read_exact(&mut header)?;
            let [order, kind, ..] = header;
            let size = |at| decode_number(order, &header[at..]) as usize;
            let (body, fields) = (size(4), size(12));
            if body.max(fields) > MAX_MESSAGE {
                return Err(ErrorKind::InvalidData.into());
            }
            let mut fields = vec![0; fields.next_multiple_of(8)];
            self.socket.read_exact(&mut fields)?;
            let mut message = vec![0; body];
            self.socket.read_exact(&mut message)?;
            // This field has the size of its alignment, eight bytes.
            let is_reply = |unit: &[u8]| {
                unit.starts_with(&[REPLY_SERIAL, 1, b'u', 0])
                    && decode_number(order, &unit[4..]) == self.serial
            };
            match kind {
                _ if !fields.chunks_exact(8).any(is_reply) => {}
                METHOD_RETURN => return Ok(DbusReply { order, body: message }),
                ERROR => return Err(io::Error::other(decode_string(&message))),
                _ => {}
            }
        }
    }
}

/// Connects to the first address of a list that accepts the connection.
fn connect_first_address(list: &str) -> io::Result<UnixStream> {
    let mut outcome = Err(io::Error::from(ErrorKind::Unsupported));
    for address in list.split(';').filter_map(|address| address.strip_prefix("unix:")) {
        let key = |name| address.split(',').find_map(|pair| pair.strip_prefix(name));
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

/// Encodes a call with these header fields (code, type, string) and a body of strings.
fn encode_call(serial: u32, header: &[(u8, u8, &str)], texts: &[&str]) -> Vec<u8> {
    let (mut body, mut fields) = (Vec::new(), Vec::new());
    for text in texts {
        put_text(&mut body, text);
    }
    for (code, kind, text) in header {
        pad_to_multiple(&mut fields, 8);
        fields.extend([*code, 1, *kind, 0]);
        put_text(&mut fields, text);
    }
    if !texts.is_empty() {
        pad_to_multiple(&mut fields, 8);
        fields.extend([SIGNATURE, 1, b'g', 0, u8::try_from(texts.len()).unwrap_or(u8::MAX)]);
        fields.extend(texts.iter().map(|_| b's').chain([0]));
    }
    let mut bytes = vec![b'l', METHOD_CALL, 0, 1];
    bytes.extend(encode_length(&body));
    bytes.extend(serial.to_le_bytes());
    bytes.extend(encode_length(&fields));
    bytes.extend(fields);
    pad_to_multiple(&mut bytes, 8);
    bytes.extend(body);
    bytes
}

fn pad_to_multiple(bytes: &mut Vec<u8>, to: usize) {
    bytes.resize(bytes.len().next_multiple_of(to), 0);
}

fn encode_length(bytes: &[u8]) -> [u8; 4] {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes()
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    pad_to_multiple(bytes, 4);
    bytes.extend(encode_length(text.as_bytes()));
    bytes.extend(text.as_bytes());
    bytes.push(0);
}

/// Decodes a `u32` in the byte order of the message; 0 if the bytes are too few.
fn decode_number(order: u8, bytes: &[u8]) -> u32 {
    let four = bytes.first_chunk().copied().unwrap_or_default();
    if order == b'l' { u32::from_le_bytes(four) } else { u32::from_be_bytes(four) }
}

impl DbusReply {
    /// Whether the body is the boolean `true`, a `u32`.
    pub fn is_true(&self) -> bool {
        self.body.len() == 4 && decode_number(self.order, &self.body) == 1
    }

    /// The strings of a body that is an array of strings.
    pub fn to_strings(&self) -> Vec<String> {
        let (mut all, mut at) = (Vec::new(), 4);
        while let Some(length) = self.body.get(at..at + 4) {
            let end = (at + 4).saturating_add(decode_number(self.order, length) as usize);
            let Some(text) = self.body.get(at + 4..end) else { break };
            all.push(String::from_utf8_lossy(text).into_owned());
            at = (end + 1).next_multiple_of(4);
        }
        all
    }
}

/// Decodes the string at the beginning of a body.
fn decode_string(body: &[u8]) -> String {
    let text = body.get(4..).unwrap_or_default().split(|byte| *byte == 0).next();
    String::from_utf8_lossy(text.unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_encoded_as_specified() {
        let header = [(PATH, b'o', "/org/freedesktop/DBus"), (MEMBER, b's', "NameHasOwner")];
        let bytes = encode_call(7, &header, &["a", "bc"]);
        assert_eq!(bytes[..12], [b'l', 1, 0, 1, 15, 0, 0, 0, 7, 0, 0, 0]);
        assert_eq!(bytes[16..24], [1, 1, b'o', 0, 21, 0, 0, 0]);
        assert_eq!(bytes[bytes.len() - 15..], *b"\x01\0\0\0a\0\0\0\x02\0\0\0bc\0");
        assert_eq!((bytes.len() - 15) % 8, 0);
        assert!(bytes.windows(8).any(|field| field == b"\x08\x01g\0\x02ss\0"));
    }

    /// The result of [`Bus::call`] for these bytes of the bus.
    fn answer(bytes: &[u8]) -> io::Result<DbusReply> {
        let (socket, mut bus) = UnixStream::pair().unwrap();
        bus.write_all(bytes).unwrap();
        bus.shutdown(std::net::Shutdown::Write).unwrap();
        DbusConnection { socket, serial: 6 }.call_method(DBUS, DBUS, "Hello", &["x"])
    }

    #[test]
    fn replies_are_identified_by_their_serial() {
        let reply = |kind, serial, body: &[u8]| {
            let body_length = u8::try_from(body.len()).unwrap();
            let mut bytes = vec![b'l', kind, 0, 1, body_length, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0];
            bytes.extend([REPLY_SERIAL, 1, b'u', 0, serial, 0, 0, 0]);
            bytes.extend(body);
            bytes
        };
        let [early, signal] = [reply(METHOD_RETURN, 6, &[0; 4]), reply(4, 7, &[0; 4])];
        let yes = [early.clone(), signal, reply(METHOD_RETURN, 7, &[1, 0, 0, 0])].concat();
        assert!(answer(&yes).unwrap().is_true());
        let no = [early, reply(ERROR, 7, b"\x02\0\0\0no\0")].concat();
        assert_eq!(answer(&no).unwrap_err().to_string(), "no");
        for end in 0..no.len() {
            assert_eq!(answer(&no[..end]).unwrap_err().kind(), ErrorKind::UnexpectedEof, "{end}");
        }
        assert_eq!(decode_string(&[0; 3]), "");
    }

    #[test]
    fn replies_are_decoded_in_their_byte_order() {
        let reply = |order, body: &[u8]| DbusReply { order, body: body.to_vec() };
        assert!(reply(b'l', &[1, 0, 0, 0]).is_true() && reply(b'B', &[0, 0, 0, 1]).is_true());
        for no in [&[0; 4], &[0, 0, 1, 0], &b"\x01\0\0\0a\0"[..]] {
            assert!(!reply(b'l', no).is_true() && !reply(b'B', no).is_true());
        }
        let little = b"\0\0\0\0\x02\0\0\0::\0\0\0\0\0\0\0\0\0\0\x01\0\0\0a\0";
        let big = b"\0\0\0\0\0\0\0\x02::\0\0\0\0\0\0\0\0\0\0\0\0\0\x01a\0";
        for (order, bytes) in [(b'l', little), (b'B', big)] {
            assert_eq!(reply(order, bytes).to_strings(), ["::", "", "a"]);
            assert_eq!(reply(order, &bytes[..20]).to_strings().len(), 2);
            assert!(
                reply(order, &[0; 4]).to_strings().is_empty()
                    && reply(order, &[]).to_strings().is_empty()
            );
            assert!(reply(order, &[0xff; 9]).to_strings().is_empty());
        }
    }

    #[test]
    fn addresses_without_a_socket_are_errors() {
        for bad in ["", "tcp:host=x", "unix:tmpdir=/x", "unix:path=/nonexistent;unix:abstract=no-"]
        {
            assert!(connect_first_address(bad).is_err(), "{bad}");
        }
    }
}
