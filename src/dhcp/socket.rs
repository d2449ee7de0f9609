//! Sockets in the network namespace of the calling thread. A socket stays in its namespace when it
//! is passed to another thread and keeps the namespace alive, so none is held longer than an
//! exchange.

use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{LinkAddr, SockaddrStorage, bind};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use super::v4::frame::{self, CLIENT_PORT};
use crate::netlink::MacAddress;

const CLIENT_PORT_V6: u16 = 546;
const SERVER_PORT_V6: u16 = 547;
/// `All_DHCP_Relay_Agents_and_Servers` (RFC 9915, section 7.1).
const SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
const ETH_P_ALL: u16 = 3;
const ETH_P_IP: u32 = 0x0800;
const ETH_P_ARP: u16 = 0x0806;
const ETH_P_IPV6: u16 = 0x86dd;
/// The timeout for an ARP reply, which never comes from a server behind a router.
const ARP_TIMEOUT: Duration = Duration::from_millis(200);
/// Offset of the client's Ethernet address in a frame without the IPv4 header.
const CHADDR: u32 = 14 + 8 + 28;

const LOAD: u32 = libc::BPF_LD | libc::BPF_ABS;
/// Loads relative to the index register, which holds the length of the IPv4 header.
const LOAD_INDEXED: u32 = libc::BPF_LD | libc::BPF_IND;
const JUMP: u32 = libc::BPF_JMP | libc::BPF_K;
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

/// A socket for the frames of an interface that carry UDP to the client's port, for the client
/// `mac`. It is for all protocols, because a port of a bridge hands received frames to no other
/// sockets.
pub fn open_frames(ifname: &str, mac: MacAddress) -> io::Result<Socket> {
    open_packet_socket(&link_addr(ifname)?, ETH_P_ALL, &client_message_filter(mac.0))
}

/// A socket for the ARP frames of an interface.
pub fn open_arp(ifname: &str) -> io::Result<Socket> {
    open_packet_socket(&link_addr(ifname)?, ETH_P_ARP, &[])
}

/// A socket for the Neighbor Discovery frames of an interface about `addr`.
pub fn open_neighbours(ifname: &str, addr: Ipv6Addr) -> io::Result<Socket> {
    open_packet_socket(&link_addr(ifname)?, ETH_P_IPV6, &neighbour_filter(addr))
}

fn open_packet_socket(link: &LinkAddr, protocol: u16, filter: &[SockFilter]) -> io::Result<Socket> {
    let protocol = Protocol::from(i32::from(protocol.to_be()));
    let socket = Socket::new(Domain::PACKET, Type::RAW.nonblocking(), Some(protocol))?;
    if !filter.is_empty() {
        socket.attach_filter(filter)?;
    }
    bind(socket.as_raw_fd(), link)?;
    Ok(socket)
}

/// A UDP socket on the DHCPv6 client's port of a link-local address, and the multicast address of
/// all servers. `AddrNotAvailable` during duplicate address detection, or without a link-local
/// address.
pub fn open_udp_v6(ifname: &str) -> io::Result<(Socket, SocketAddrV6)> {
    // Fails with the cause if the interface does not exist.
    let scope = u32::try_from(link_addr(ifname)?.ifindex()).unwrap_or_default();
    let own = getifaddrs()?.filter(|entry| entry.interface_name == ifname);
    let v6 = own.filter_map(|entry| Some(entry.address?.as_sockaddr_in6()?.ip()));
    let mut last = io::ErrorKind::AddrNotAvailable.into();
    for ip in v6.filter(Ipv6Addr::is_unicast_link_local) {
        match open_udp(ifname, SocketAddrV6::new(ip, CLIENT_PORT_V6, 0, scope).into()) {
            Ok(socket) => {
                return Ok((socket, SocketAddrV6::new(SERVERS, SERVER_PORT_V6, 0, scope)));
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// A UDP socket on the address `own`, for one interface.
pub fn open_udp(ifname: &str, own: SocketAddr) -> io::Result<Socket> {
    let domain = Domain::for_address(own);
    let socket = Socket::new(domain, Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
    if let SocketAddr::V6(own) = own {
        socket.set_only_v6(true)?;
        socket.set_multicast_if_v6(own.scope_id())?;
    }
    // Another client in the container may also use the port.
    socket.set_reuse_address(true)?;
    socket.bind_device(Some(ifname.as_bytes()))?;
    socket.bind(&own.into())?;
    Ok(socket)
}

/// The Ethernet address of `addr`, if an ARP reply arrives in time. `mac` and `own` are the source
/// addresses.
pub fn resolve_mac(
    ifname: &str,
    mac: MacAddress,
    own: Ipv4Addr,
    addr: Ipv4Addr,
) -> io::Result<Option<MacAddress>> {
    let socket = open_arp(ifname)?;
    socket.send(&frame::arp_request(mac, own, addr))?;
    let deadline = Instant::now() + ARP_TIMEOUT;
    let mut buffer = [0; 128];
    while wait_readable(&socket, deadline)? {
        let length = (&socket).read(&mut buffer)?;
        if let Some(found) = frame::arp_reply_mac(&buffer[..length], addr) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Waits until the socket is readable; `false` after `deadline`.
pub fn wait_readable(socket: &dyn AsFd, deadline: Instant) -> io::Result<bool> {
    while let Some(left) = deadline.checked_duration_since(Instant::now()) {
        let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let mut polled = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        match poll(&mut polled, left) {
            Err(Errno::EINTR) => {}
            outcome => return Ok(outcome? > 0),
        }
    }
    Ok(false)
}

/// The Ethernet address of an interface.
pub fn mac_address(ifname: &str) -> io::Result<MacAddress> {
    // `link_addr` has verified the length.
    Ok(MacAddress(link_addr(ifname)?.addr().unwrap_or_default()))
}

/// The Ethernet address of the client: the interface's, which a chained plugin may have changed.
/// Without the leased address on the interface it is `known`: a virtual machine behind the
/// interface has both addresses.
pub fn client_mac(
    ifname: &str,
    leased: Option<IpAddr>,
    known: MacAddress,
) -> io::Result<MacAddress> {
    let present = ip_addresses(ifname)?;
    let is_own = leased.is_some_and(|leased| present.contains(&leased));
    if is_own { mac_address(ifname) } else { Ok(known) }
}

/// An interface of a container.
#[derive(Clone, Copy, Debug)]
pub struct FoundInterface {
    /// The cookie of its namespace.
    pub cookie: Option<u64>,
    pub index: u32,
    /// The Ethernet address.
    pub mac: MacAddress,
}

/// The interface with this name, in the namespace with this cookie.
pub fn find_interface(ifname: &str, cookie: Option<u64>) -> io::Result<FoundInterface> {
    let index = u32::try_from(link_addr(ifname)?.ifindex()).unwrap_or_default();
    Ok(FoundInterface { cookie, index, mac: mac_address(ifname)? })
}

/// The present name of the interface with this index, which its container may have renamed. Without
/// such an interface the name from before, if the interface with this name has the address `mac`.
pub fn current_name(ifname: &str, index: Option<u32>, mac: MacAddress) -> io::Result<String> {
    // Not by if_indextoname(3): in musl it opens a socket of AF_UNIX, which the daemon's filter
    // refuses.
    let index_of = |addr: &SockaddrStorage| u32::try_from(addr.as_link_addr()?.ifindex()).ok();
    let mut all = getifaddrs()?;
    let present = index.and_then(|index| {
        all.find(|entry| entry.address.as_ref().and_then(index_of) == Some(index))
    });
    match present {
        Some(entry) => Ok(entry.interface_name),
        None if index.is_none() || mac_address(ifname).ok() == Some(mac) => Ok(ifname.to_owned()),
        None => Err(Errno::ENODEV.into()),
    }
}

pub fn ip_addresses(ifname: &str) -> io::Result<Vec<IpAddr>> {
    let own = getifaddrs()?.filter(|entry| entry.interface_name == ifname);
    let ip = |addr: SockaddrStorage| {
        let v4 = addr.as_sockaddr_in().map(|addr| IpAddr::V4(addr.ip()));
        v4.or_else(|| addr.as_sockaddr_in6().map(|addr| IpAddr::V6(addr.ip())))
    };
    Ok(own.filter_map(|entry| ip(entry.address?)).collect())
}

/// Index and address of an Ethernet interface, as the address of a packet socket.
fn link_addr(ifname: &str) -> io::Result<LinkAddr> {
    let mut found = getifaddrs()?.filter(|entry| entry.interface_name == ifname);
    let addr = found.find_map(|entry| entry.address?.as_link_addr().copied());
    match addr {
        None => Err(Errno::ENODEV.into()),
        Some(addr) if addr.halen() == 6 => Ok(addr),
        Some(_) => Err(io::Error::other("not an Ethernet interface")),
    }
}

fn bpf_instruction(code: u32, jt: u8, jf: u8, k: u32) -> SockFilter {
    SockFilter::new(u16::try_from(code).unwrap_or(0), jt, jf, k)
}

/// Kernel filter for unfragmented UDP over IPv4 to the client's port with this `chaddr`: other
/// traffic of the container does not fill the socket's buffer.
fn client_message_filter(mac: [u8; 6]) -> [SockFilter; 15] {
    let [m0, m1, m2, m3, m4, m5] = mac;
    [
        bpf_instruction(LOAD | libc::BPF_H, 0, 0, 12),
        bpf_instruction(JUMP | libc::BPF_JEQ, 0, 11, ETH_P_IP),
        bpf_instruction(LOAD | libc::BPF_B, 0, 0, 23),
        bpf_instruction(JUMP | libc::BPF_JEQ, 0, 9, 17),
        bpf_instruction(LOAD | libc::BPF_H, 0, 0, 20),
        bpf_instruction(JUMP | libc::BPF_JSET, 7, 0, 0x3fff),
        bpf_instruction(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH, 0, 0, 14),
        bpf_instruction(LOAD_INDEXED | libc::BPF_H, 0, 0, 16),
        bpf_instruction(JUMP | libc::BPF_JEQ, 0, 4, u32::from(CLIENT_PORT)),
        bpf_instruction(LOAD_INDEXED | libc::BPF_W, 0, 0, CHADDR),
        bpf_instruction(JUMP | libc::BPF_JEQ, 0, 2, u32::from_be_bytes([m0, m1, m2, m3])),
        bpf_instruction(LOAD_INDEXED | libc::BPF_H, 0, 0, CHADDR + 4),
        bpf_instruction(JUMP | libc::BPF_JEQ, 1, 0, u32::from(u16::from_be_bytes([m4, m5]))),
        bpf_instruction(RETURN, 0, 0, 0),
        bpf_instruction(RETURN, 0, 0, 0xffff),
    ]
}

/// Kernel filter for ICMPv6 with the last 32 bits of `addr` in the target of Neighbor Solicitations
/// and Advertisements.
fn neighbour_filter(addr: Ipv6Addr) -> [SockFilter; 8] {
    let [.., a, b, c, d] = addr.octets();
    [
        bpf_instruction(LOAD | libc::BPF_B, 0, 0, 14 + 6),
        bpf_instruction(JUMP | libc::BPF_JEQ, 0, 4, 58),
        bpf_instruction(LOAD | libc::BPF_W, 0, 0, 14 + 40 + 8 + 12),
        bpf_instruction(JUMP | libc::BPF_JEQ, 0, 2, u32::from_be_bytes([a, b, c, d])),
        bpf_instruction(LOAD | libc::BPF_B, 0, 0, 14 + 40),
        // Neighbor Solicitation is 135, Neighbor Advertisement 136.
        bpf_instruction(JUMP | libc::BPF_JGE, 1, 0, 135),
        bpf_instruction(RETURN, 0, 0, 0),
        bpf_instruction(RETURN, 0, 0, 0xffff),
    ]
}
