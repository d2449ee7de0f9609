//! The sockets on which containers ask, by UDP and by TCP: from systemd, or bound here.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsFd;

use listenfd::ListenFd;
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Protocol, Socket, Type};

use crate::netfilter::egress::RESOLVER_PORT;
use cni::error::{Error, Result, errno_text};

/// The size in bytes of the receive buffer of a UDP socket: a burst of queries of all containers.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 256;

/// The sockets of one address family each.
#[derive(Debug, Default)]
pub struct Listeners {
    pub datagrams: Vec<UdpSocket>,
    pub streams: Vec<TcpListener>,
}

impl Listeners {
    /// Takes the sockets that systemd passed in `LISTEN_FDS`, or binds the resolver's port of all
    /// addresses. All of them tell the arrival interfaces of packets.
    pub fn open() -> Result<Listeners> {
        let mut passed = ListenFd::from_env();
        let listeners = if passed.len() > 0 {
            Listeners::take_passed(&mut passed)?
        } else {
            Listeners::bind_port(RESOLVER_PORT)?
        };
        for socket in &listeners.datagrams {
            // Also what rmem_max forbids to others.
            if let Err(errno) = setsockopt(socket, sockopt::RcvBufForce, &RECEIVE_BUFFER) {
                debug!("could not enlarge the receive buffer: {}", errno_text(errno));
            }
            prepare_socket(socket, socket.local_addr())?;
            socket.set_nonblocking(true).map_err(|e| Error::io("use a socket", &e))?;
        }
        for socket in &listeners.streams {
            prepare_socket(socket, socket.local_addr())?;
            socket.set_nonblocking(true).map_err(|e| Error::io("use a socket", &e))?;
        }
        Ok(listeners)
    }

    fn take_passed(passed: &mut ListenFd) -> Result<Listeners> {
        let mut listeners = Listeners::default();
        for at in 0..passed.len() {
            if let Ok(Some(socket)) = passed.take_udp_socket(at) {
                listeners.datagrams.push(socket);
            } else if let Ok(Some(socket)) = passed.take_tcp_listener(at) {
                listeners.streams.push(socket);
            }
        }
        let Listeners { datagrams, streams } = &listeners;
        if datagrams.is_empty()
            || streams.is_empty()
            || datagrams.len() + streams.len() < passed.len()
        {
            return Err(Error::internal("systemd passed other sockets than those of the resolver")
                .with_details("correct ListenDatagram= and ListenStream= of its socket unit"));
        }
        Ok(listeners)
    }

    fn bind_port(port: u16) -> Result<Listeners> {
        let mut listeners = Listeners::default();
        for addr in [
            SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)),
            SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)),
        ] {
            match bind_socket(addr, Type::DGRAM, Protocol::UDP) {
                Ok(socket) => listeners.datagrams.push(socket.into()),
                // The kernel was started without IPv6.
                Err(error) if addr.is_ipv6() && is_family_missing(&error) => continue,
                Err(error) => return Err(bind_error(addr, "UDP", &error)),
            }
            match bind_socket(addr, Type::STREAM, Protocol::TCP) {
                Ok(socket) => listeners.streams.push(socket.into()),
                Err(error) => return Err(bind_error(addr, "TCP", &error)),
            }
        }
        Ok(listeners)
    }
}

fn bind_socket(addr: SocketAddr, kind: Type, protocol: Protocol) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), kind, Some(protocol))?;
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    if kind == Type::STREAM {
        // Connections of an earlier resolver may be in TIME_WAIT.
        socket.set_reuse_address(true)?;
    }
    socket.bind(&addr.into())?;
    if kind == Type::STREAM {
        socket.listen(BACKLOG)?;
    }
    Ok(socket)
}

fn is_family_missing(error: &std::io::Error) -> bool {
    let codes = [nix::libc::EAFNOSUPPORT, nix::libc::EADDRNOTAVAIL];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

fn bind_error(addr: SocketAddr, protocol: &str, error: &std::io::Error) -> Error {
    let failed = Error::io(format_args!("bind the {protocol} port {addr}"), error);
    if error.kind() == ErrorKind::AddrInUse {
        return failed.with_details(
            "another resolver runs, or its socket unit: systemctl status \
             cnibox-egress-resolver.socket",
        );
    }
    failed
}

/// Lets the kernel tell the arrival interface and the local address of each packet.
fn prepare_socket(socket: &impl AsFd, own: std::io::Result<SocketAddr>) -> Result<()> {
    let set = match own.map_err(|e| Error::io("read the address of a socket", &e))? {
        SocketAddr::V4(_) => setsockopt(socket, sockopt::Ipv4PacketInfo, &true),
        SocketAddr::V6(_) => setsockopt(socket, sockopt::Ipv6RecvPacketInfo, &true),
    };
    set.map_err(|errno| Error::io("ask for the interfaces of packets", &errno.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::isolate_test_thread;

    #[test]
    fn a_second_resolver_is_told_that_the_port_is_taken() {
        isolate_test_thread();
        let first = Listeners::bind_port(RESOLVER_PORT).unwrap();
        assert_eq!((first.datagrams.len(), first.streams.len()), (2, 2));
        let error = Listeners::bind_port(RESOLVER_PORT).unwrap_err();
        assert_eq!(error.message(), "bind the UDP port 0.0.0.0:533: address already in use");
        assert!(error.details().starts_with("another resolver runs"));
        drop(first);
        assert!(Listeners::bind_port(RESOLVER_PORT).is_ok());
    }
}
