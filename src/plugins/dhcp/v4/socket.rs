//! Sockets of DHCP in the namespace of the calling thread. They stay in that namespace when they are passed to
//! another thread, and keep the namespace alive: no socket is held longer than an exchange takes.

use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{LinkAddr, bind};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use super::frame::{self, CLIENT_PORT, Ends};
use crate::netlink::Mac;

const ETH_P_IP: u16 = 0x0800;
const ETH_P_ARP: u16 = 0x0806;
/// Where a frame has the client's Ethernet address, besides the length of the IPv4 header.
const CHADDR: u32 = 14 + 8 + 28;

/// A socket for the frames of an interface that carry UDP to the client's port.
pub fn frames(ifname: &str) -> io::Result<Socket> {
    let socket = packet_socket(ETH_P_IP)?;
    let addr = link_addr(ifname)?;
    socket.attach_filter(&to_client(addr.addr().unwrap_or_default()))?;
    bind(socket.as_raw_fd(), &addr)?;
    Ok(socket)
}

/// A socket for the ARP of an interface.
pub fn arp(ifname: &str) -> io::Result<Socket> {
    let socket = packet_socket(ETH_P_ARP)?;
    bind(socket.as_raw_fd(), &link_addr(ifname)?)?;
    Ok(socket)
}

/// A socket for UDP from `address` on the client's port to a server, by way of the interface.
pub fn udp(ifname: &str, address: Ipv4Addr) -> io::Result<std::net::UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
    // Another DHCP client in the container may use the port as well.
    socket.set_reuse_address(true)?;
    socket.bind_device(Some(ifname.as_bytes()))?;
    socket.bind(&SocketAddrV4::new(address, CLIENT_PORT).into())?;
    Ok(socket.into())
}

/// The Ethernet address of the host that has `addr`, if it answers within `limit`. `own` is the sender's address.
pub fn resolve(
    ifname: &str,
    own: Ipv4Addr,
    addr: Ipv4Addr,
    limit: Duration,
) -> io::Result<Option<Mac>> {
    let socket = arp(ifname)?;
    socket.send(&frame::arp_request(mac(ifname)?, own, addr))?;
    let deadline = Instant::now() + limit;
    let mut buffer = [0; 128];
    while is_readable(&socket, deadline)? {
        let length = (&socket).read(&mut buffer)?;
        if let Some(found) = frame::arp_answer(&buffer[..length], addr) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Whether the socket has input before `deadline`.
pub fn is_readable(socket: &impl AsFd, deadline: Instant) -> io::Result<bool> {
    while let Some(left) = deadline.checked_duration_since(Instant::now()) {
        let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let mut wanted = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        match poll(&mut wanted, left) {
            Err(Errno::EINTR) => {}
            outcome => return Ok(outcome? > 0),
        }
    }
    Ok(false)
}

/// Sends a message in a frame.
pub fn send(socket: &Socket, ends: &Ends, message: &[u8]) -> io::Result<()> {
    socket.send(&frame::udp(ends, message)).map(drop)
}

/// The Ethernet address of an interface.
pub fn mac(ifname: &str) -> io::Result<Mac> {
    // `link_addr` has verified the length.
    Ok(Mac(link_addr(ifname)?.addr().unwrap_or_default()))
}

/// A socket for frames of a protocol.
pub fn packet_socket(protocol: u16) -> io::Result<Socket> {
    let protocol = Protocol::from(i32::from(protocol.to_be()));
    Socket::new(Domain::PACKET, Type::RAW.nonblocking(), Some(protocol))
}

/// The index and address of an Ethernet interface in the form that a packet socket is bound to.
pub fn link_addr(ifname: &str) -> io::Result<LinkAddr> {
    let mut found = getifaddrs()?.filter(|entry| entry.interface_name == ifname);
    let addr = found.find_map(|entry| entry.address?.as_link_addr().copied());
    match addr {
        None => Err(Errno::ENODEV.into()),
        Some(addr) if addr.halen() == 6 => Ok(addr),
        Some(_) => Err(io::Error::other("not an Ethernet interface")),
    }
}

/// An instruction of a filter.
pub fn op(code: u32, jt: u8, jf: u8, k: u32) -> SockFilter {
    SockFilter::new(u16::try_from(code).unwrap_or(0), jt, jf, k)
}

/// The kernel's filter: unfragmented UDP over IPv4 to the client's port, about the client of this
/// Ethernet address. Nothing else that the container receives fills our buffer.
fn to_client(mac: [u8; 6]) -> [SockFilter; 13] {
    let absolute = libc::BPF_LD | libc::BPF_ABS;
    // Behind the IPv4 header, whose length is in the index register.
    let indexed = libc::BPF_LD | libc::BPF_IND;
    let equal = libc::BPF_JMP | libc::BPF_K | libc::BPF_JEQ;
    let [m0, m1, m2, m3, m4, m5] = mac;
    [
        op(absolute | libc::BPF_B, 0, 0, 23),
        op(equal, 0, 9, 17),
        op(absolute | libc::BPF_H, 0, 0, 20),
        op(libc::BPF_JMP | libc::BPF_K | libc::BPF_JSET, 7, 0, 0x3fff),
        op(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH, 0, 0, 14),
        op(indexed | libc::BPF_H, 0, 0, 16),
        op(equal, 0, 4, u32::from(CLIENT_PORT)),
        op(indexed | libc::BPF_W, 0, 0, CHADDR),
        op(equal, 0, 2, u32::from_be_bytes([m0, m1, m2, m3])),
        op(indexed | libc::BPF_H, 0, 0, CHADDR + 4),
        op(equal, 1, 0, u32::from(u16::from_be_bytes([m4, m5]))),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, 0xffff),
    ]
}
