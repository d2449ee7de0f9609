//! A scripted DHCPv6 server that builds its replies by hand.

use std::net::{Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::net::if_::if_nametoindex;

use crate::support::node::eventually;

pub(super) const SOLICIT: u8 = 1;
pub(super) const ADVERTISE: u8 = 2;
pub(super) const REQUEST: u8 = 3;
pub(super) const RENEW: u8 = 5;
pub(super) const REBIND: u8 = 6;
pub(super) const REPLY: u8 = 7;
pub(super) const RELEASE: u8 = 8;

/// The default DUID of the server.
pub(super) const SERVER: &[u8] = &[0, 1, 0, 0, 0, 1];

/// A received client message.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) from: SocketAddr,
    pub(super) bytes: Vec<u8>,
    pub(super) at: Instant,
}
pub(super) fn option(code: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(value.len()).unwrap();
    [&code.to_be_bytes()[..], &length.to_be_bytes(), value].concat()
}

/// Finds an option's value in encoded options.
fn find(mut options: &[u8], wanted: u16) -> Option<&[u8]> {
    while let [c0, c1, l0, l1, rest @ ..] = options {
        let (value, rest) = rest.split_at(usize::from(u16::from_be_bytes([*l0, *l1])));
        if u16::from_be_bytes([*c0, *c1]) == wanted {
            return Some(value);
        }
        options = rest;
    }
    None
}

/// An IA Address option (RFC 8415 section 21.6), with lifetimes in seconds.
pub(super) fn address(text: &str, preferred: u32, valid: u32) -> Vec<u8> {
    let addr: Ipv6Addr = text.parse().unwrap();
    let times = [preferred.to_be_bytes(), valid.to_be_bytes()].concat();
    option(5, &[&addr.octets()[..], &times].concat())
}

/// A Status Code option (RFC 8415 section 21.13).
pub(super) fn status(code: u16) -> Vec<u8> {
    option(13, &[&code.to_be_bytes()[..], b"because"].concat())
}

impl Seen {
    pub(super) fn kind(&self) -> u8 {
        self.bytes[0]
    }

    pub(super) fn xid(&self) -> &[u8] {
        &self.bytes[1..4]
    }

    pub(super) fn option(&self, wanted: u16) -> Option<&[u8]> {
        find(&self.bytes[4..], wanted)
    }

    /// The IAID of the message's `IA_NA`.
    pub(super) fn iaid(&self) -> &[u8] {
        &self.option(3).unwrap()[..4]
    }

    /// The `IA_NA`'s address.
    pub(super) fn address(&self) -> Option<Ipv6Addr> {
        let value = find(&self.option(3)?[12..], 5)?;
        Some(<[u8; 16]>::try_from(&value[..16]).unwrap().into())
    }

    /// A reply of type `kind` of the server `server`: an `IA_NA` with T1, T2 and the options
    /// `inner`, followed by the options `extra`.
    pub(super) fn answer_of(
        &self,
        kind: u8,
        server: &[u8],
        (t1, t2): (u32, u32),
        inner: &[u8],
        extra: &[u8],
    ) -> Vec<u8> {
        let ia = [self.iaid(), &t1.to_be_bytes(), &t2.to_be_bytes(), inner].concat();
        [
            &[kind][..],
            self.xid(),
            &option(1, self.option(1).unwrap()),
            &option(2, server),
            &option(3, &ia),
            extra,
        ]
        .concat()
    }

    /// The same of the server [`SERVER`], with T1 of one second and T2 of three.
    pub(super) fn answer(&self, kind: u8, inner: &[u8]) -> Vec<u8> {
        // With the Preference value 255 the client does not wait for other servers (RFC 8415
        // section 18.2.1).
        self.answer_of(kind, SERVER, (1, 3), inner, &option(7, &[255]))
    }
}

/// The server: a thread in the test's network namespace.
pub(super) struct Fake {
    seen: Arc<Mutex<Vec<Seen>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Fake {
    /// Starts the server. `script` returns the replies to a message, given the number of earlier
    /// messages of the same type.
    pub(super) fn start(
        mut script: impl FnMut(&Seen, usize) -> Vec<Vec<u8>> + Send + 'static,
    ) -> Fake {
        let socket = UdpSocket::bind("[::]:547").unwrap();
        let index = if_nametoindex("br0").unwrap();
        socket.join_multicast_v6(&"ff02::1:2".parse().unwrap(), index).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let (seen, stop) =
            (Arc::new(Mutex::new(Vec::<Seen>::new())), Arc::new(AtomicBool::new(false)));
        let (log, end) = (Arc::clone(&seen), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            let mut buffer = [0; 2048];
            while !end.load(Ordering::Relaxed) {
                let Ok((length, from)) = socket.recv_from(&mut buffer) else { continue };
                let message = Seen { from, bytes: buffer[..length].to_vec(), at: Instant::now() };
                let kind = message.kind();
                let earlier = log.lock().unwrap().iter().filter(|m| m.kind() == kind).count();
                log.lock().unwrap().push(message.clone());
                for answer in script(&message, earlier) {
                    // The client may have closed its socket.
                    drop(socket.send_to(&answer, from));
                }
            }
        });
        Fake { seen, stop, thread: Some(thread) }
    }

    /// All received messages of a type.
    pub(super) fn seen(&self, kind: u8) -> Vec<Seen> {
        let seen = self.seen.lock().unwrap();
        seen.iter().filter(|message| message.kind() == kind).cloned().collect()
    }

    /// Waits for message number `earlier` (from 0) of a type.
    #[track_caller]
    pub(super) fn wait(&self, kind: u8, earlier: usize) -> Seen {
        eventually(&format!("no message {kind}"), || self.seen(kind).len() > earlier);
        self.seen(kind)[earlier].clone()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}
