//! The sockets of one lease. They are closed when the state of the client does not need them,
//! because an open socket keeps the container's namespace alive.

use std::io::{self, Read};
use std::pin::pin;

use futures::future::{Either, pending, select};
use socket2::{SockAddr, Socket};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::super::machine::{NeededSockets, PacketSource};
use super::super::sandbox::InterfaceError;

/// Longer than any Ethernet frame; a longer frame is truncated and then fails to parse.
const BUFFER: usize = 2048;

#[derive(Default)]
pub(super) struct LeaseSockets {
    pub(super) frames: Option<AsyncFd<Socket>>,
    pub(super) neighbours: Option<AsyncFd<Socket>>,
    /// The socket and the destination of its messages.
    pub(super) udp: Option<(AsyncFd<Socket>, SockAddr)>,
}

impl LeaseSockets {
    pub(super) fn close_unneeded(&mut self, listening: &NeededSockets) {
        match listening {
            NeededSockets::None => *self = LeaseSockets::default(),
            NeededSockets::Frames => (self.neighbours, self.udp) = (None, None),
            NeededSockets::Udp => self.neighbours = None,
            NeededSockets::Neighbours(_) => self.udp = None,
        }
    }

    /// Waits for a frame or datagram; for ever if no socket is open.
    pub(super) async fn receive_packet(&self) -> io::Result<(PacketSource, Vec<u8>)> {
        let frame = pin!(read_packet(self.frames.as_ref()));
        let neighbour = pin!(read_packet(self.neighbours.as_ref()));
        let datagram = pin!(read_packet(self.udp.as_ref().map(|(udp, _)| udp)));
        Ok(match select(select(frame, neighbour), datagram).await {
            Either::Left((Either::Left((frame, _)), _)) => (PacketSource::Frames, frame?),
            Either::Left((Either::Right((frame, _)), _)) => (PacketSource::Neighbours, frame?),
            Either::Right((datagram, _)) => (PacketSource::Udp, datagram?),
        })
    }

    pub(super) fn send_udp(&self, message: &[u8]) -> Result<(), InterfaceError> {
        let (udp, to) = self.udp.as_ref().ok_or_else(not_open_error)?;
        udp.get_ref().send_to(message, to)?;
        Ok(())
    }
}

fn not_open_error() -> io::Error {
    io::ErrorKind::NotConnected.into()
}

pub(super) fn send_frame(
    socket: Option<&AsyncFd<Socket>>,
    frame: &[u8],
) -> Result<(), InterfaceError> {
    socket.ok_or_else(not_open_error)?.get_ref().send(frame)?;
    Ok(())
}

async fn read_packet(socket: Option<&AsyncFd<Socket>>) -> io::Result<Vec<u8>> {
    let Some(socket) = socket else { return pending().await };
    let mut buffer = [0; BUFFER];
    let length =
        socket.async_io(Interest::READABLE, |socket| (&mut &*socket).read(&mut buffer)).await?;
    Ok(buffer[..length].to_vec())
}
