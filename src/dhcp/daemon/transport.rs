//! Sending for one lease: sockets are opened in the container's namespace when the first message
//! needs them.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::time::sleep;

use super::super::family::{DhcpFamily, DhcpLease};
use super::super::machine::NeededSockets;
use super::super::sandbox::InterfaceError;
use super::super::v4::frame::{self, BROADCAST, CLIENT_PORT, FrameAddresses, SERVER_PORT};
use super::super::v4::message::Dhcp4Message;
use super::super::v6::{message::Dhcp6Message as MessageV6, neighbour};
use super::super::{socket, timing::boot_time_now};
use super::registry::LeasePhase;
use super::sockets::send_frame;
use super::task::LeaseTask;
use crate::daemon::watch_readable;
use crate::netlink::MacAddress;
use cni::error::Error;

/// The timeout and the poll interval of duplicate address detection for the link-local address.
/// Waiting for the kernel's event in the namespace would need a thread for each container.
const DAD_TIMEOUT: Duration = Duration::from_secs(3);
const DAD_POLL: Duration = Duration::from_millis(100);

impl LeaseTask {
    pub(super) async fn send_broadcast(
        &mut self,
        mut message: Dhcp4Message,
    ) -> Result<(), InterfaceError> {
        self.ensure_frame_socket().await?;
        let mac = *self.machine.mac_mut();
        message.chaddr = mac;
        let (src, dst) = (message.ciaddr, Ipv4Addr::BROADCAST);
        let ends = FrameAddresses { src_mac: mac, dst_mac: BROADCAST, src, dst };
        send_frame(self.sockets.frames.as_ref(), &frame::encode_udp(&ends, &message.encode()))
    }

    pub(super) async fn send_unicast(
        &mut self,
        mut message: Dhcp4Message,
        server: Ipv4Addr,
    ) -> Result<(), InterfaceError> {
        self.ensure_frame_socket().await?;
        let src = message.ciaddr;
        if self.sockets.udp.is_none() {
            // Another interface of the container may have the address.
            let open = move |ifname: &str, _| {
                let is_own = socket::ip_addresses(ifname)?.contains(&src.into());
                is_own.then(|| socket::open_udp(ifname, (src, CLIENT_PORT).into())).transpose()
            };
            if let Some(socket) = self.open_socket(open).await? {
                let server = SocketAddr::from((server, SERVER_PORT));
                self.sockets.udp = Some((watch_readable(socket)?, server.into()));
            }
        }
        let mac = *self.machine.mac_mut();
        message.chaddr = mac;
        if let (None, Some(DhcpLease::V4(lease))) = (&self.sockets.udp, &self.record.lease) {
            let ends = FrameAddresses { src_mac: mac, dst_mac: lease.server_mac, src, dst: server };
            let frame = frame::encode_udp(&ends, &message.encode());
            return send_frame(self.sockets.frames.as_ref(), &frame);
        }
        self.sockets.send_udp(&message.encode())
    }

    pub(super) async fn send_multicast(
        &mut self,
        message: MessageV6,
    ) -> Result<(), InterfaceError> {
        if self.sockets.udp.is_none() {
            self.open_udp_v6_within(Duration::ZERO).await?;
        }
        self.sockets.send_udp(&message.encode())
    }

    pub(super) async fn send_probe(&mut self, address: IpAddr) -> Result<(), InterfaceError> {
        if self.sockets.neighbours.is_none() {
            let socket = self.open_socket(move |ifname, _| match address {
                IpAddr::V4(_) => socket::open_arp(ifname),
                IpAddr::V6(address) => socket::open_neighbours(ifname, address),
            });
            self.sockets.neighbours = Some(watch_readable(socket.await?)?);
        }
        let mac = *self.machine.mac_mut();
        let frame = match address {
            IpAddr::V4(address) => frame::arp_request(mac, Ipv4Addr::UNSPECIFIED, address),
            IpAddr::V6(address) => neighbour::probe_frame(mac, address),
        };
        send_frame(self.sockets.neighbours.as_ref(), &frame)
    }

    /// Waits before the first message of DHCPv6 until the link-local address is not tentative any
    /// more, up to two seconds after the interface is up. The timers of the client start
    /// afterwards. After an error the first message is sent nevertheless, unless the interface
    /// is missing.
    pub(super) async fn wait_link_local(&mut self) -> Result<(), InterfaceError> {
        let starts = self.machine.needed_sockets() == NeededSockets::None;
        if starts && self.record.key.family == DhcpFamily::V6 {
            self.open_udp_v6_within(DAD_TIMEOUT).await?;
        }
        Ok(())
    }

    async fn ensure_frame_socket(&mut self) -> Result<(), InterfaceError> {
        if self.sockets.frames.is_none() {
            let socket = self.open_socket(socket::open_frames).await?;
            self.sockets.frames = Some(watch_readable(socket)?);
        }
        Ok(())
    }

    /// Opens the socket of DHCPv6 when the link-local address is usable, but not after `patience`.
    async fn open_udp_v6_within(&mut self, patience: Duration) -> Result<(), InterfaceError> {
        let deadline = boot_time_now() + patience;
        loop {
            match self.open_socket(|ifname, _| socket::open_udp_v6(ifname)).await {
                Err(InterfaceError::Io(e)) if e.kind() == io::ErrorKind::AddrNotAvailable => {
                    if boot_time_now() >= deadline {
                        let name = &self.record.key.ifname;
                        let msg = format!("{name} has no usable IPv6 link-local address");
                        return Err(Error::internal(msg)
                            .with_details(format!(
                                "see net.ipv6.conf.{name}.addr_gen_mode, and whether the link has \
                                 a carrier"
                            ))
                            .into());
                    }
                    sleep(DAD_POLL).await;
                }
                opened => {
                    let (socket, servers) = opened?;
                    self.sockets.udp = Some((watch_readable(socket)?, servers.into()));
                    return Ok(());
                }
            }
        }
    }

    /// Opens a socket in the namespace for the client's Ethernet address, which is determined
    /// again.
    async fn open_socket<T: Send + 'static>(
        &mut self,
        open: impl FnOnce(&str, MacAddress) -> io::Result<T> + Send + 'static,
    ) -> Result<T, InterfaceError> {
        let known = *self.machine.mac_mut();
        let leased = self.record.lease.as_ref().map(DhcpLease::ip_address);
        let is_unconfigured =
            self.record.address_removed || matches!(*self.phase.borrow(), LeasePhase::Acquiring);
        let work = move |ifname: &str| {
            let mac = if is_unconfigured {
                socket::mac_address(ifname)?
            } else {
                socket::client_mac(ifname, leased, known)?
            };
            io::Result::Ok((mac, open(ifname, mac)?))
        };
        let (mac, socket) = self.run_in_namespace(work).await??;
        *self.machine.mac_mut() = mac;
        self.record.mac = mac;
        Ok(socket)
    }
}
