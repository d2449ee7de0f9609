//! Packets between namespaces, through what plugins have created.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::world::Netns;
use super::{Result, context};

/// The time limit of an expected answer, neighbour discovery included.
pub const LIMIT: Duration = Duration::from_secs(6);

/// The waiting time for an answer that should not come.
pub const MOMENT: Duration = Duration::from_secs(1);

/// The interval of retries.
const RETRY: Duration = Duration::from_millis(500);

/// The payload of all packets.
const WORDS: &[u8] = b"cni-sanity";

/// Whether an address answers an echo request from the namespace.
pub fn pings(from: &Netns, to: IpAddr, limit: Duration) -> Result<bool> {
    from.run(|| Ok(ping(to, limit).unwrap_or(false)))
}

fn ping(to: IpAddr, limit: Duration) -> std::io::Result<bool> {
    let (domain, protocol, request, reply) = match to {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, 8, 0),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, 128, 129),
    };
    let socket = Socket::new(domain, Type::RAW, Some(protocol))?;
    socket.set_read_timeout(Some(RETRY))?;
    let socket = UdpSocket::from(OwnedFd::from(socket));
    let end = Instant::now() + limit;
    for sequence in 1_u16.. {
        let mut packet = vec![request, 0, 0, 0, 0x5a, 0x5a];
        packet.extend(sequence.to_be_bytes());
        packet.extend(WORDS);
        // The kernel computes the checksum of ICMPv6.
        if to.is_ipv4() {
            let sum = checksum(&packet);
            packet[2..4].copy_from_slice(&sum.to_be_bytes());
        }
        // The address may still be tentative, or the neighbour unknown.
        drop(socket.send_to(&packet, SocketAddr::new(to, 0)));
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            // A raw IPv4 socket receives the IP header as well.
            let header = if to.is_ipv4() { usize::from(buffer[0] & 15) * 4 } else { 0 };
            let is_reply = buffer[..length].get(header) == Some(&reply)
                && buffer[header + 4..].starts_with(&[0x5a, 0x5a]);
            if is_reply && from.ip() == to {
                return Ok(true);
            }
        }
        if Instant::now() > end {
            break;
        }
    }
    Ok(false)
}

/// The checksum of RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or_default()
}

/// Whether a TCP connection from the namespace `from` to `to` reaches a server in `server` at
/// `port`; returns the source address that the server sees.
pub fn tcp(
    from: &Netns,
    to: SocketAddr,
    server: &Netns,
    port: u16,
    limit: Duration,
) -> Result<Option<IpAddr>> {
    let any = any(to, port);
    let listener = server.run(|| context(TcpListener::bind(any), &format!("listen on {any}")))?;
    listener.set_nonblocking(true)?;
    let is_over = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&is_over);
    let server = thread::spawn(move || {
        while !stop.load(Ordering::Relaxed) {
            if let Ok((mut stream, peer)) = listener.accept() {
                drop(stream.write_all(WORDS));
                return Some(peer.ip());
            }
            thread::sleep(Duration::from_millis(2));
        }
        None
    });
    let received = from.run(|| {
        let Ok(mut stream) = TcpStream::connect_timeout(&to, limit) else { return Ok(false) };
        drop(stream.set_read_timeout(Some(LIMIT)));
        let mut words = Vec::new();
        drop(stream.read_to_end(&mut words));
        Ok(words == WORDS)
    })?;
    is_over.store(true, Ordering::Relaxed);
    let peer = server.join().ok().flatten();
    Ok(peer.filter(|_| received))
}

/// The unspecified address of the family.
fn any(family: SocketAddr, port: u16) -> SocketAddr {
    let ip: IpAddr =
        if family.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    SocketAddr::new(ip, port)
}

/// Whether a datagram from the namespace `from` to `to` reaches a server in `server` at `port`, and
/// its answer comes back.
pub fn udp(
    from: &Netns,
    to: SocketAddr,
    server: &Netns,
    port: u16,
    limit: Duration,
) -> Result<bool> {
    let bind = |port| Ok(UdpSocket::bind(any(to, port))?);
    let socket = server.run(|| bind(port))?;
    socket.set_read_timeout(Some(limit + RETRY))?;
    let echo = thread::spawn(move || {
        let mut buffer = [0; 64];
        if let Ok((length, peer)) = socket.recv_from(&mut buffer) {
            drop(socket.send_to(&buffer[..length], peer));
        }
    });
    let received = from.run(|| {
        let socket = bind(0)?;
        socket.set_read_timeout(Some(RETRY))?;
        let end = Instant::now() + limit;
        while Instant::now() < end {
            drop(socket.send_to(WORDS, to));
            let mut buffer = [0; 64];
            if socket.recv_from(&mut buffer).is_ok_and(|(length, _)| &buffer[..length] == WORDS) {
                return Ok(true);
            }
        }
        Ok(false)
    })?;
    drop(echo.join());
    Ok(received)
}
