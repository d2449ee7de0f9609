//! The sockets of one lease during an exchange: opened when they are needed, closed right after, since
//! an open socket keeps the container's namespace alive.

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};
use std::pin::pin;

use futures::future::{Either, pending, select};
use socket2::Socket;
use tokio::io::unix::AsyncFd;
use tokio::net::UdpSocket;

use super::super::machine::Listening;
use super::super::v4::frame::Ends;
use super::super::v4::socket;

/// Longer than any Ethernet frame; a longer frame is truncated and then fails to parse.
const BUFFER: usize = 2048;

/// An event on the sockets.
#[derive(Debug)]
pub(super) enum Event {
    /// A frame with UDP in it.
    Frame(Vec<u8>),
    /// An ARP or Neighbor Discovery frame.
    Neighbour(Vec<u8>),
    /// The payload of a UDP datagram.
    Datagram(Vec<u8>),
    /// A socket has failed.
    Broken(io::Error),
}

/// The open sockets.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    frames: Option<AsyncFd<Socket>>,
    neighbours: Option<AsyncFd<Socket>>,
    udp: Option<(IpAddr, UdpSocket)>,
}

impl Sockets {
    pub(super) fn has_frames(&self) -> bool {
        self.frames.is_some()
    }

    pub(super) fn has_neighbours(&self) -> bool {
        self.neighbours.is_some()
    }

    /// The address that messages are sent from.
    pub(super) fn udp_address(&self) -> Option<IpAddr> {
        self.udp.as_ref().map(|(own, _)| *own)
    }

    pub(super) fn open_frames(&mut self, socket: Socket) -> io::Result<()> {
        self.frames = Some(watch(socket)?);
        Ok(())
    }

    pub(super) fn open_neighbours(&mut self, socket: Socket) -> io::Result<()> {
        self.neighbours = Some(watch(socket)?);
        Ok(())
    }

    pub(super) fn open_udp(&mut self, socket: std::net::UdpSocket) -> io::Result<()> {
        let own = socket.local_addr()?.ip();
        self.udp = Some((own, UdpSocket::from_std(socket)?));
        Ok(())
    }

    /// Closes what is not needed for `listening`.
    pub(super) fn trim(&mut self, listening: Listening) {
        match listening {
            Listening::FramesAndArp(_) | Listening::Neighbours(_) => self.udp = None,
            Listening::Frames => (self.neighbours, self.udp) = (None, None),
            Listening::FramesAndUdp(_) | Listening::Udp => self.neighbours = None,
            Listening::None => *self = Sockets::default(),
        }
    }

    /// Sends a message in a frame.
    pub(super) fn send_frame(&self, ends: &Ends, message: &[u8]) -> io::Result<()> {
        let frames = self.frames.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        socket::send(frames.get_ref(), ends, message)
    }

    /// Sends an ARP probe or a Neighbor Solicitation.
    pub(super) fn send_probe(&self, frame: &[u8]) -> io::Result<()> {
        let neighbours = self.neighbours.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        neighbours.get_ref().send(frame).map(drop)
    }

    /// Sends a message by UDP.
    pub(super) async fn send_udp(&self, to: SocketAddr, message: &[u8]) -> io::Result<()> {
        let (_, udp) = self.udp.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        udp.send_to(message, to).await.map(drop)
    }

    /// Waits for an event; for ever if no socket is open.
    pub(super) async fn next_event(&self) -> Event {
        let frame = pin!(read(self.frames.as_ref()));
        let neighbour = pin!(read(self.neighbours.as_ref()));
        let datagram = pin!(receive(self.udp.as_ref()));
        match select(select(frame, neighbour), datagram).await {
            Either::Left((Either::Left((frame, _)), _)) => frame.map(Event::Frame),
            Either::Left((Either::Right((frame, _)), _)) => frame.map(Event::Neighbour),
            Either::Right((datagram, _)) => datagram.map(Event::Datagram),
        }
        .unwrap_or_else(Event::Broken)
    }
}

/// Registers a descriptor with the executor, for input.
#[expect(deprecated, reason = "the other way is unsafe; these types keep their descriptor")]
pub(super) fn watch<T: AsFd + AsRawFd>(socket: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(socket, tokio::io::Interest::READABLE)
}

async fn read(socket: Option<&AsyncFd<Socket>>) -> io::Result<Vec<u8>> {
    let Some(socket) = socket else { return pending().await };
    let mut buffer = [0; BUFFER];
    loop {
        let mut ready = socket.readable().await?;
        if let Ok(length) = ready.try_io(|socket| (&mut socket.get_ref()).read(&mut buffer)) {
            return Ok(buffer[..length?].to_vec());
        }
    }
}

async fn receive(udp: Option<&(IpAddr, UdpSocket)>) -> io::Result<Vec<u8>> {
    let Some((_, socket)) = udp else { return pending().await };
    let mut buffer = [0; BUFFER];
    let (length, _) = socket.recv_from(&mut buffer).await?;
    Ok(buffer[..length].to_vec())
}
