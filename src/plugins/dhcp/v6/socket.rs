//! Sockets of DHCPv6 in the namespace of the calling thread; as with DHCP, no socket is held
//! longer than an exchange takes.

use std::io;
use std::net::{Ipv6Addr, SocketAddrV6, UdpSocket};
use std::os::fd::AsRawFd;

use nix::ifaddrs::getifaddrs;
use nix::libc;
use nix::sys::socket::{LinkAddr, bind};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use super::super::v4::socket::{link_addr, op, packet_socket};

const CLIENT_PORT: u16 = 546;
const SERVER_PORT: u16 = 547;
/// All servers and relays of the link (RFC 9915, section 7.1).
const SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
const ETH_P_IPV6: u16 = 0x86dd;

/// A socket on the client's port of an interface's link-local address, and the address of all
/// servers. `AddrNotAvailable` while duplicate address detection goes on, or if there is no
/// such address.
pub fn udp(ifname: &str) -> io::Result<(UdpSocket, SocketAddrV6)> {
    let mut last = io::ErrorKind::AddrNotAvailable.into();
    for own in link_locals(ifname)? {
        match udp_from(ifname, own) {
            Ok(socket) => {
                let servers = SocketAddrV6::new(SERVERS, SERVER_PORT, 0, own.scope_id());
                return Ok((socket, servers));
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn udp_from(ifname: &str, own: SocketAddrV6) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV6, Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
    socket.set_only_v6(true)?;
    // Another DHCPv6 client in the container may use the port as well.
    socket.set_reuse_address(true)?;
    socket.bind_device(Some(ifname.as_bytes()))?;
    socket.set_multicast_if_v6(own.scope_id())?;
    socket.bind(&own.into())?;
    Ok(socket.into())
}

/// The link-local addresses of an interface, tentative ones included, with the client's port.
fn link_locals(ifname: &str) -> io::Result<Vec<SocketAddrV6>> {
    // A missing interface is its own error.
    let link = link_addr(ifname)?;
    let scope = u32::try_from(link.ifindex()).unwrap_or_default();
    let own = getifaddrs()?.filter(|entry| entry.interface_name == ifname);
    let v6 = own.filter_map(|entry| Some(entry.address?.as_sockaddr_in6()?.ip()));
    let local = v6.filter(Ipv6Addr::is_unicast_link_local);
    Ok(local.map(|ip| SocketAddrV6::new(ip, CLIENT_PORT, 0, scope)).collect())
}

/// A socket for the Neighbor Discovery frames of an interface about `addr`.
pub fn neighbours(ifname: &str, addr: Ipv6Addr) -> io::Result<Socket> {
    let socket = packet_socket(ETH_P_IPV6)?;
    let link: LinkAddr = link_addr(ifname)?;
    socket.attach_filter(&about(addr))?;
    bind(socket.as_raw_fd(), &link)?;
    Ok(socket)
}

/// The kernel's filter: ICMPv6 with this address where Neighbor Solicitations and Advertisements
/// have their target.
fn about(addr: Ipv6Addr) -> [SockFilter; 8] {
    let word = libc::BPF_LD | libc::BPF_ABS | libc::BPF_W;
    let byte = libc::BPF_LD | libc::BPF_ABS | libc::BPF_B;
    let equal = libc::BPF_JMP | libc::BPF_K | libc::BPF_JEQ;
    let [.., a, b, c, d] = addr.octets();
    [
        op(byte, 0, 0, 14 + 6),
        op(equal, 0, 4, 58),
        op(word, 0, 0, 14 + 40 + 8 + 12),
        op(equal, 0, 2, u32::from_be_bytes([a, b, c, d])),
        op(byte, 0, 0, 14 + 40),
        // Neighbor Solicitation is 135, Neighbor Advertisement 136.
        op(libc::BPF_JMP | libc::BPF_K | libc::BPF_JGE, 1, 0, 135),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, 0xffff),
    ]
}
