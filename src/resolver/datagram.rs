//! UDP messages with the interface and the local address by which they arrived.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::libc::{in_addr, in_pktinfo, in6_addr, in6_pktinfo};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg,
};

/// Longer than any query that is answered; a longer one is truncated and then malformed.
pub const LONGEST_QUERY: usize = 4096;

/// How a message arrived, and thus where its answer is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    pub source: SocketAddr,
    /// The address that was asked, after the redirection.
    pub local: IpAddr,
    /// The index of the interface.
    pub interface: u32,
}

/// Receives a message into the buffer without waiting. `None` for one that does not tell how it
/// arrived.
pub fn receive_from(
    socket: &UdpSocket,
    buffer: &mut [u8; LONGEST_QUERY],
) -> io::Result<Option<(usize, Path)>> {
    let mut control = nix::cmsg_space!(in_pktinfo, in6_pktinfo);
    let mut parts = [IoSliceMut::new(buffer)];
    let received = recvmsg::<SockaddrStorage>(
        socket.as_raw_fd(),
        &mut parts,
        Some(&mut control),
        MsgFlags::MSG_DONTWAIT,
    )?;
    let source = received.address.as_ref().and_then(socket_address);
    let arrival = received.cmsgs()?.find_map(|message| match message {
        ControlMessageOwned::Ipv4PacketInfo(info) => {
            let local = Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes());
            Some((local.into(), u32::try_from(info.ipi_ifindex).ok()?))
        }
        ControlMessageOwned::Ipv6PacketInfo(info) => {
            let local = Ipv6Addr::from(info.ipi6_addr.s6_addr);
            Some((local.into(), info.ipi6_ifindex))
        }
        _ => None,
    });
    let path =
        source.zip(arrival).map(|(source, (local, interface))| Path { source, local, interface });
    Ok(path.map(|path| (received.bytes, path)))
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().copied().map(SocketAddrV4::from).map(SocketAddr::from);
    v4.or_else(|| address.as_sockaddr_in6().copied().map(SocketAddrV6::from).map(SocketAddr::from))
}

/// Sends an answer from the address that was asked, by the interface of the query, without waiting.
pub fn send_answer(socket: &UdpSocket, path: &Path, answer: &[u8]) -> io::Result<()> {
    let (fd, parts) = (socket.as_raw_fd(), [IoSlice::new(answer)]);
    let to = SockaddrStorage::from(path.source);
    let send = |control| sendmsg(fd, &parts, &[control], MsgFlags::MSG_DONTWAIT, Some(&to));
    match path.local {
        IpAddr::V4(local) => {
            let own = in_addr { s_addr: u32::from_ne_bytes(local.octets()) };
            send(ControlMessage::Ipv4PacketInfo(&in_pktinfo {
                ipi_ifindex: path.interface.try_into().map_err(|_| Errno::ENODEV)?,
                ipi_spec_dst: own,
                ipi_addr: own,
            }))?;
        }
        IpAddr::V6(local) => {
            send(ControlMessage::Ipv6PacketInfo(&in6_pktinfo {
                ipi6_addr: in6_addr { s6_addr: local.octets() },
                ipi6_ifindex: path.interface,
            }))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nix::net::if_::if_nametoindex;
    use nix::sys::socket::{setsockopt, sockopt};

    use super::*;

    #[test]
    fn answers_come_from_the_address_that_was_asked() {
        let lo = if_nametoindex("lo").unwrap();
        for (any, asked, client) in
            [("0.0.0.0:0", "127.0.0.9", "127.0.0.1:0"), ("[::]:0", "::1", "[::1]:0")]
        {
            let server = UdpSocket::bind(any).unwrap();
            if any.starts_with('[') {
                setsockopt(&server, sockopt::Ipv6RecvPacketInfo, &true).unwrap();
            } else {
                setsockopt(&server, sockopt::Ipv4PacketInfo, &true).unwrap();
            }
            let asked: IpAddr = asked.parse().unwrap();
            let client = UdpSocket::bind(client).unwrap();
            client.connect((asked, server.local_addr().unwrap().port())).unwrap();
            client.send(b"query").unwrap();
            let mut buffer = [0; LONGEST_QUERY];
            let (length, path) = receive_from(&server, &mut buffer).unwrap().unwrap();
            assert_eq!(&buffer[..length], b"query");
            let source = client.local_addr().unwrap();
            assert_eq!(path, Path { source, local: asked, interface: lo });
            assert!(receive_from(&server, &mut buffer).is_err());
            // A connected socket receives from no other address.
            send_answer(&server, &path, b"answer").unwrap();
            let length = client.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"answer");
        }
    }
}
