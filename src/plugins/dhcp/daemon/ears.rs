//! The sockets of one lease while it talks: opened when they are needed, closed right after, since
//! an open one keeps the container's namespace alive.

use std::io::{self, Read};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::pin;

use futures::future::{Either, pending, select};
use socket2::Socket;
use tokio::io::unix::AsyncFd;
use tokio::net::UdpSocket;

use super::super::protocol::client::Listening;
use super::super::protocol::frame::{Ends, SERVER_PORT};
use super::super::socket;

/// Longer than any Ethernet frame; what is longer is cut off and so makes no sense.
const BUFFER: usize = 2048;

/// What was heard.
#[derive(Debug)]
pub(super) enum Heard {
    /// A frame with UDP in it.
    Frame(Vec<u8>),
    /// A frame with ARP in it.
    Arp(Vec<u8>),
    /// A message by UDP.
    Datagram(Vec<u8>),
    /// A socket does not work any more.
    Broken(io::Error),
}

/// The open sockets.
#[derive(Debug, Default)]
pub(super) struct Ears {
    frames: Option<AsyncFd<Socket>>,
    arp: Option<AsyncFd<Socket>>,
    udp: Option<(Ipv4Addr, UdpSocket)>,
}

impl Ears {
    pub(super) fn has_frames(&self) -> bool {
        self.frames.is_some()
    }

    pub(super) fn has_arp(&self) -> bool {
        self.arp.is_some()
    }

    pub(super) fn has_udp(&self, address: Ipv4Addr) -> bool {
        self.udp.as_ref().is_some_and(|(own, _)| *own == address)
    }

    pub(super) fn open_frames(&mut self, socket: Socket) -> io::Result<()> {
        self.frames = Some(watch(socket)?);
        Ok(())
    }

    pub(super) fn open_arp(&mut self, socket: Socket) -> io::Result<()> {
        self.arp = Some(watch(socket)?);
        Ok(())
    }

    pub(super) fn open_udp(
        &mut self,
        address: Ipv4Addr,
        socket: std::net::UdpSocket,
    ) -> io::Result<()> {
        self.udp = Some((address, UdpSocket::from_std(socket)?));
        Ok(())
    }

    /// Closes what is not needed for `listening`.
    pub(super) fn trim(&mut self, listening: Listening) {
        match listening {
            Listening::FramesAndArp(_) => self.udp = None,
            Listening::Frames => (self.arp, self.udp) = (None, None),
            Listening::FramesAndUdp(_) => self.arp = None,
            Listening::None => *self = Ears::default(),
        }
    }

    /// Sends a message in a frame.
    pub(super) fn send_frame(&self, ends: &Ends, message: &[u8]) -> io::Result<()> {
        let frames = self.frames.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        socket::send(frames.get_ref(), ends, message)
    }

    /// Sends a frame with ARP in it.
    pub(super) fn send_arp(&self, frame: &[u8]) -> io::Result<()> {
        let arp = self.arp.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        arp.get_ref().send(frame).map(drop)
    }

    /// Sends a message to a server by UDP.
    pub(super) fn send_udp(&self, server: Ipv4Addr, message: &[u8]) -> io::Result<()> {
        let (_, udp) = self.udp.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        udp.try_send_to(message, (server, SERVER_PORT).into()).map(drop)
    }

    /// Waits for something to hear; for ever if there is no ear.
    pub(super) async fn hear(&self) -> Heard {
        let frame = pin!(read(self.frames.as_ref()));
        let arp = pin!(read(self.arp.as_ref()));
        let datagram = pin!(receive(self.udp.as_ref()));
        match select(select(frame, arp), datagram).await {
            Either::Left((Either::Left((frame, _)), _)) => frame.map(Heard::Frame),
            Either::Left((Either::Right((frame, _)), _)) => frame.map(Heard::Arp),
            Either::Right((datagram, _)) => datagram.map(Heard::Datagram),
        }
        .unwrap_or_else(Heard::Broken)
    }
}

/// Has the executor watch a descriptor for input.
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

async fn receive(udp: Option<&(Ipv4Addr, UdpSocket)>) -> io::Result<Vec<u8>> {
    let Some((_, socket)) = udp else { return pending().await };
    let mut buffer = [0; BUFFER];
    let (length, _) = socket.recv_from(&mut buffer).await?;
    Ok(buffer[..length].to_vec())
}
