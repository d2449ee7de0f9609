//! Packets through what plugins have made: what a container is for.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::world::{Netns, Result};

/// How long an answer may take, neighbour discovery included.
const LIMIT: Duration = Duration::from_secs(6);
const ONE: Duration = Duration::from_millis(500);

/// What is sent and comes back.
const WORDS: &[u8] = b"cni-sanity";

/// Whether an echo request from the namespace (`None`: the node) to the address is answered.
pub fn pings(from: Option<&Netns>, to: IpAddr) -> Result<bool> {
    let ping = || Ok(ping(to, LIMIT).unwrap_or(false));
    from.map_or_else(ping, |netns| netns.run(ping))
}

/// The same of an address that should not answer, which takes all that time.
pub fn pings_within(from: &Netns, to: IpAddr, limit: Duration) -> Result<bool> {
    from.run(|| Ok(ping(to, limit).unwrap_or(false)))
}

fn ping(to: IpAddr, limit: Duration) -> std::io::Result<bool> {
    let (domain, protocol, request) = match to {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, 8),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, 128),
    };
    let socket = Socket::new(domain, Type::RAW, Some(protocol))?;
    socket.set_read_timeout(Some(ONE))?;
    let socket = UdpSocket::from(OwnedFd::from(socket));
    let end = Instant::now() + limit;
    for sequence in 1_u16.. {
        let mut packet = vec![request, 0, 0, 0, 0x5a, 0x5a];
        packet.extend(sequence.to_be_bytes());
        packet.extend(WORDS);
        // Of ICMPv6 the kernel makes the sum.
        if to.is_ipv4() {
            let sum = checksum(&packet);
            packet[2..4].copy_from_slice(&sum.to_be_bytes());
        }
        // The address may be tentative, or the neighbour unknown yet.
        drop(socket.send_to(&packet, SocketAddr::new(to, 0)));
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            // A raw IPv4 socket gets the header as well.
            let header = if to.is_ipv4() { usize::from(buffer[0] & 15) * 4 } else { 0 };
            let answer = if to.is_ipv4() { 0 } else { 129 };
            let is_it = buffer[..length].get(header) == Some(&answer)
                && buffer[header + 4..].starts_with(&[0x5a, 0x5a]);
            if is_it && from.ip() == to {
                return Ok(true);
            }
        }
        if Instant::now() > end {
            break;
        }
    }
    Ok(false)
}

/// The sum of RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or_default()
}

/// Whether a TCP connection from the namespace `from` to `to` reaches a server in `server` at `port`; the address
/// that the server saw.
pub fn tcp(from: &Netns, to: SocketAddr, server: &Netns, port: u16) -> Result<Option<IpAddr>> {
    tcp_within(from, to, server, port, LIMIT)
}

/// The same where no connection is expected, which takes all that time.
pub fn tcp_within(
    from: &Netns,
    to: SocketAddr,
    server: &Netns,
    port: u16,
    limit: Duration,
) -> Result<Option<IpAddr>> {
    let any = any(to, port);
    let listener = server
        .run(|| TcpListener::bind(any).map_err(|error| format!("listen on {any}: {error}")))?;
    listener.set_nonblocking(true).map_err(|error| error.to_string())?;
    let is_over = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&is_over);
    let answers = thread::spawn(move || {
        while !stop.load(Ordering::Relaxed) {
            if let Ok((mut stream, peer)) = listener.accept() {
                drop(stream.write_all(WORDS));
                return Some(peer.ip());
            }
            thread::sleep(Duration::from_millis(2));
        }
        None
    });
    let got = from.run(|| {
        let Ok(mut stream) = TcpStream::connect_timeout(&to, limit) else { return Ok(false) };
        drop(stream.set_read_timeout(Some(LIMIT)));
        let mut words = Vec::new();
        drop(stream.read_to_end(&mut words));
        Ok(words == WORDS)
    })?;
    is_over.store(true, Ordering::Relaxed);
    let seen = answers.join().ok().flatten();
    Ok(seen.filter(|_| got))
}

/// Every address of the family.
fn any(family: SocketAddr, port: u16) -> SocketAddr {
    let ip: IpAddr =
        if family.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    SocketAddr::new(ip, port)
}

/// Whether a datagram from the namespace `from` to `to` reaches a server in `server` at `port`, and its answer
/// comes back.
pub fn udp(from: &Netns, to: SocketAddr, server: &Netns, port: u16) -> Result<bool> {
    udp_within(from, to, server, port, LIMIT)
}

/// The same where no answer is expected, which takes all that time.
pub fn udp_within(
    from: &Netns,
    to: SocketAddr,
    server: &Netns,
    port: u16,
    limit: Duration,
) -> Result<bool> {
    let bind = |port| UdpSocket::bind(any(to, port)).map_err(|error| error.to_string());
    let socket = server.run(|| bind(port))?;
    socket.set_read_timeout(Some(limit + ONE)).map_err(|error| error.to_string())?;
    let echo = thread::spawn(move || {
        let mut buffer = [0; 64];
        if let Ok((length, peer)) = socket.recv_from(&mut buffer) {
            drop(socket.send_to(&buffer[..length], peer));
        }
    });
    let got = from.run(|| {
        let socket = bind(0)?;
        socket.set_read_timeout(Some(ONE)).map_err(|error| error.to_string())?;
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
    Ok(got)
}
