//! Who reaches whom: every place sends a datagram to every target, and every place answers.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::plan::ECHO;
use crate::support::traffic::Place;

/// The socket at which a place answers. It keeps the place's namespace alive.
pub(super) struct Echo {
    pub(super) name: String,
    socket: UdpSocket,
}

impl Echo {
    pub(super) fn of(name: &str, place: &impl Place) -> Echo {
        let socket = open(place, ECHO);
        Echo { name: name.to_owned(), socket }
    }
}

/// A sender for one round: connection tracking must not know its port.
pub(super) struct Sender {
    name: String,
    socket: UdpSocket,
}

impl Sender {
    pub(super) fn of(name: &str, place: &impl Place) -> Sender {
        Sender { name: name.to_owned(), socket: open(place, 0) }
    }
}

fn open(place: &impl Place, port: u16) -> UdpSocket {
    let socket = place.within(|| UdpSocket::bind(("0.0.0.0", port)).unwrap());
    socket.set_nonblocking(true).unwrap();
    socket
}

/// A datagram on its way.
struct Probe {
    from: usize,
    target: usize,
    /// Where it arrived, and the sender's address as seen there.
    arrived: Option<(usize, IpAddr)>,
    answered: bool,
}

/// One round, which ends when all have been answered, or when nothing happened for `patience`.
pub(super) fn matrix(
    echoes: &[&Echo],
    senders: &[Sender],
    targets: &[(String, SocketAddr)],
    patience: Duration,
) -> Vec<String> {
    let mut probes = Vec::new();
    for (from, sender) in senders.iter().enumerate() {
        for (target, (_, addr)) in targets.iter().enumerate() {
            let number = u32::try_from(probes.len()).unwrap().to_ne_bytes();
            // An unreachable target may be reported here.
            drop(sender.socket.send_to(&number, addr));
            probes.push(Probe { from, target, arrived: None, answered: false });
        }
    }
    let mut last = Instant::now();
    while probes.iter().any(|probe| !probe.answered) {
        let left = patience.saturating_sub(last.elapsed());
        if left.is_zero() {
            break;
        }
        wait(echoes, senders, left);
        for (at, echo) in echoes.iter().enumerate() {
            while let Some((number, from)) = receive(&echo.socket) {
                last = Instant::now();
                if let Some(probe) = probes.get_mut(number as usize) {
                    probe.arrived = Some((at, from.ip()));
                    drop(echo.socket.send_to(&number.to_ne_bytes(), from));
                }
            }
        }
        for (from, sender) in senders.iter().enumerate() {
            while let Some((number, _)) = receive(&sender.socket) {
                last = Instant::now();
                let mine = probes.get_mut(number as usize).filter(|probe| probe.from == from);
                if let Some(probe) = mine {
                    probe.answered = true;
                }
            }
        }
    }
    let line = |probe: &Probe| {
        let (at, seen) = probe.arrived?;
        let (from, to) = (&senders[probe.from].name, &targets[probe.target].0);
        let answer = if probe.answered { "" } else { ", no answer" };
        Some(format!("traffic {from} -> {to}: {} sees {seen}{answer}", echoes[at].name))
    };
    probes.iter().filter_map(line).collect()
}

fn wait(echoes: &[&Echo], senders: &[Sender], limit: Duration) {
    let sockets = echoes.iter().map(|echo| &echo.socket).chain(senders.iter().map(|s| &s.socket));
    let mut fds: Vec<_> =
        sockets.map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN)).collect();
    // An interrupted wait is followed by reading, and the next wait.
    poll(&mut fds, PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX)).unwrap_or_default();
}

fn receive(socket: &UdpSocket) -> Option<(u32, SocketAddr)> {
    let mut buffer = [0; 4];
    loop {
        match socket.recv_from(&mut buffer) {
            Ok((4, from)) => return Some((u32::from_ne_bytes(buffer), from)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
            Ok(_) | Err(_) => {}
        }
    }
}
