//! A scripted `DHCPv4` server that builds its replies by hand.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};

use crate::support::node::eventually;

pub(super) const DISCOVER: u8 = 1;
pub(super) const OFFER: u8 = 2;
pub(super) const REQUEST: u8 = 3;
pub(super) const ACK: u8 = 5;
pub(super) const NAK: u8 = 6;
pub(super) const RELEASE: u8 = 7;

/// A received client message.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) from: SocketAddr,
    pub(super) bytes: Vec<u8>,
    pub(super) at: Instant,
}

impl Seen {
    pub(super) fn kind(&self) -> u8 {
        self.option(53).map_or(0, |value| value[0])
    }

    pub(super) fn ciaddr(&self) -> Ipv4Addr {
        <[u8; 4]>::try_from(&self.bytes[12..16]).unwrap().into()
    }

    pub(super) fn broadcast(&self) -> bool {
        self.bytes[10] & 0x80 != 0
    }

    pub(super) fn xid(&self) -> [u8; 4] {
        self.bytes[4..8].try_into().unwrap()
    }

    pub(super) fn option(&self, wanted: u8) -> Option<&[u8]> {
        let mut rest = &self.bytes[240..];
        while let [code, length, tail @ ..] = rest {
            match code {
                0 => rest = &rest[1..],
                255 => return None,
                _ if *code == wanted => return Some(&tail[..usize::from(*length)]),
                _ => rest = &tail[usize::from(*length)..],
            }
        }
        None
    }

    /// A reply of type `kind` for `address`. The options of `extra` replace the default subnet
    /// mask, server identifier and lease time; an empty value omits the option.
    pub(super) fn answer(&self, kind: u8, address: [u8; 4], extra: &[(u8, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![2, 1, 6, 0];
        bytes.extend(self.xid());
        bytes.resize(16, 0);
        bytes.extend(address);
        bytes.resize(28, 0);
        bytes.extend(&self.bytes[28..44]);
        bytes.resize(236, 0);
        bytes.extend([99, 130, 83, 99, 53, 1, kind]);
        let base: [(u8, &[u8]); 3] =
            [(1, &[255, 255, 255, 0]), (54, &[192, 168, 1, 1]), (51, &[0, 0, 0, 4])];
        for (code, value) in base {
            if !extra.iter().any(|(c, _)| *c == code) {
                bytes.extend([code, 4]);
                bytes.extend(value);
            }
        }
        for (code, value) in extra.iter().filter(|(_, value)| !value.is_empty()) {
            bytes.extend([*code, u8::try_from(value.len()).unwrap()]);
            bytes.extend(*value);
        }
        bytes.push(255);
        bytes
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
        let socket = UdpSocket::bind("0.0.0.0:67").unwrap();
        setsockopt(&socket, sockopt::BindToDevice, &"br0".into()).unwrap();
        socket.set_broadcast(true).unwrap();
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
                    // RFC 2131 section 4.1: unicast to a non-zero ciaddr, but DHCPNAK is broadcast.
                    let refusal = answer.get(242) == Some(&NAK);
                    let there =
                        Some(message.ciaddr()).filter(|ip| !ip.is_unspecified() && !refusal);
                    drop(socket.send_to(&answer, (there.unwrap_or(Ipv4Addr::BROADCAST), 68)));
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

    /// Waits for a message that `fits` accepts.
    #[track_caller]
    pub(super) fn wait(&self, what: &str, fits: impl Fn(&Seen) -> bool) -> Seen {
        let find = || self.seen.lock().unwrap().iter().find(|m| fits(m)).cloned();
        eventually(what, || find().is_some());
        find().unwrap()
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
