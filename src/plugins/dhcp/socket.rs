//! Sockets of DHCP in the namespace of the calling thread. They stay there when they are handed to
//! another thread, and keep the namespace alive: nobody holds one longer than an exchange takes.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::libc;
use nix::sys::socket::{LinkAddr, bind};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use super::protocol::frame::{self, CLIENT_PORT, Ends};
use crate::netlink::Mac;

const ETH_P_IP: u16 = 0x0800;
const ETH_P_ARP: u16 = 0x0806;

/// A socket for the frames of an interface that carry UDP to the client's port.
pub fn frames(ifname: &str) -> io::Result<Socket> {
    let socket = packet_socket(ETH_P_IP)?;
    socket.attach_filter(&to_client())?;
    bind(socket.as_raw_fd(), &link_addr(ifname)?)?;
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
    // A client that somebody started in the container is none of our business.
    socket.set_reuse_address(true)?;
    socket.bind_device(Some(ifname.as_bytes()))?;
    socket.bind(&SocketAddrV4::new(address, CLIENT_PORT).into())?;
    Ok(socket.into())
}

/// Sends a message in a frame.
pub fn send(socket: &Socket, ends: &Ends, message: &[u8]) -> io::Result<()> {
    socket.send(&frame::udp(ends, message)).map(drop)
}

/// The Ethernet address of an interface.
pub fn mac(ifname: &str) -> io::Result<Mac> {
    // `link_addr` has looked at the length.
    Ok(Mac(link_addr(ifname)?.addr().unwrap_or_default()))
}

fn packet_socket(protocol: u16) -> io::Result<Socket> {
    let protocol = Protocol::from(i32::from(protocol.to_be()));
    Socket::new(Domain::PACKET, Type::RAW.nonblocking(), Some(protocol))
}

/// The index and address of an Ethernet interface in the form that a packet socket is bound to.
fn link_addr(ifname: &str) -> io::Result<LinkAddr> {
    let mut found = getifaddrs()?.filter(|entry| entry.interface_name == ifname);
    let addr = found.find_map(|entry| entry.address?.as_link_addr().copied());
    match addr {
        None => Err(Errno::ENODEV.into()),
        Some(addr) if addr.halen() == 6 => Ok(addr),
        Some(_) => Err(io::Error::other("not an Ethernet interface")),
    }
}

/// The kernel's filter: unfragmented UDP over IPv4 to the client's port. Everything else that the
/// container receives stays out of our buffer.
fn to_client() -> [SockFilter; 9] {
    let op = |code: u32, jt, jf, k| SockFilter::new(u16::try_from(code).unwrap_or(0), jt, jf, k);
    let (byte, half) = (libc::BPF_LD | libc::BPF_B, libc::BPF_LD | libc::BPF_H);
    let jump = libc::BPF_JMP | libc::BPF_K;
    [
        op(byte | libc::BPF_ABS, 0, 0, 23),
        op(jump | libc::BPF_JEQ, 0, 5, 17),
        op(half | libc::BPF_ABS, 0, 0, 20),
        op(jump | libc::BPF_JSET, 3, 0, 0x3fff),
        op(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH, 0, 0, 14),
        op(half | libc::BPF_IND, 0, 0, 16),
        op(jump | libc::BPF_JEQ, 1, 0, u32::from(CLIENT_PORT)),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, 0xffff),
    ]
}
