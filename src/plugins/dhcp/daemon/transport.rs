//! Sending and receiving of one lease: its sockets, opened in the namespace when they are needed.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddrV6};
use std::time::Duration;

use nix::errno::Errno;
use tokio::time::sleep;

use super::super::family::Family;
use super::super::interface::InterfaceError;
use super::super::machine::Listening;
use super::super::timing::now;
use super::super::v4::frame::{self, SERVER_PORT};
use super::super::v4::message::Message;
use super::super::{v4, v6};

use super::task::Running;
use crate::error::Error;

/// How long the link-local address may take until it can be used, and how often it is looked at:
/// waiting inside the namespace would take a thread for each container.
const DAD_TIMEOUT: Duration = Duration::from_secs(3);
const DAD_POLL: Duration = Duration::from_millis(100);

impl Running {
    pub(super) async fn open_frames(&mut self) -> Result<(), InterfaceError> {
        if !self.sockets.has_frames() {
            let socket = self.open(|ifname| v4::socket::frames(&ifname)).await?;
            self.sockets.open_frames(socket).map_err(|e| self.io(&e))?;
        }
        Ok(())
    }

    pub(super) async fn broadcast(&mut self, mut message: Message) -> Result<(), InterfaceError> {
        self.open_frames().await?;
        message.chaddr = self.machine.mac();
        let ends = frame::broadcast_from(self.machine.mac(), message.ciaddr);
        let sent = self.sockets.send_frame(&ends, &message.encode());
        sent.map_err(|e| self.io(&e))
    }

    pub(super) async fn unicast(
        &mut self,
        mut message: Message,
        server: Ipv4Addr,
    ) -> Result<(), InterfaceError> {
        self.open_frames().await?;
        let address = message.ciaddr;
        if self.sockets.udp_address() != Some(address.into()) {
            let socket = self.open(move |ifname| v4::socket::udp(&ifname, address)).await?;
            self.sockets.open_udp(socket).map_err(|e| self.io(&e))?;
        }
        message.chaddr = self.machine.mac();
        let sent = self.sockets.send_udp((server, SERVER_PORT).into(), &message.encode()).await;
        sent.map_err(|e| self.io(&e))
    }

    pub(super) async fn multicast(
        &mut self,
        message: v6::message::Message,
    ) -> Result<(), InterfaceError> {
        let servers = match self.servers {
            Some(servers) if self.sockets.udp_address().is_some() => servers,
            _ => self.open_udp_v6(Duration::ZERO).await?,
        };
        let sent = self.sockets.send_udp(servers.into(), &message.encode()).await;
        sent.map_err(|e| self.io(&e))
    }

    /// Before the first message of DHCPv6: the link-local address is tentative until duplicate address
    /// detection ends, up to two seconds after the interface is up.
    /// The client's clock does not run meanwhile.
    pub(super) async fn wait_link_local(&mut self) -> Result<(), InterfaceError> {
        let begins = self.machine.listening() == Listening::None;
        if !begins || self.task.record.key.family == Family::V4 {
            return Ok(());
        }
        // Without a link-local address, sending fails with the reason.
        match self.open_udp_v6(DAD_TIMEOUT).await {
            Err(InterfaceError::Gone(what)) => Err(InterfaceError::Gone(what)),
            _ => Ok(()),
        }
    }

    /// Opens the socket of DHCPv6, as soon as the link has an address within `patience`.
    async fn open_udp_v6(&mut self, patience: Duration) -> Result<SocketAddrV6, InterfaceError> {
        let deadline = now() + patience;
        let (socket, servers) = loop {
            match self.try_open(|ifname| v6::socket::udp(&ifname)).await? {
                Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => {
                    if now() >= deadline {
                        return Err(self.no_link_local().into());
                    }
                    sleep(DAD_POLL).await;
                }
                opened => break opened.map_err(|e| self.io(&e))?,
            }
        };
        self.sockets.open_udp(socket).map_err(|e| self.io(&e))?;
        self.servers = Some(servers);
        Ok(servers)
    }

    pub(super) async fn probe(&mut self, address: IpAddr) -> Result<(), InterfaceError> {
        if !self.sockets.has_neighbours() {
            let socket = self.open(move |ifname| match address {
                IpAddr::V4(_) => v4::socket::arp(&ifname),
                IpAddr::V6(address) => v6::socket::neighbours(&ifname, address),
            });
            let socket = socket.await?;
            self.sockets.open_neighbours(socket).map_err(|e| self.io(&e))?;
        }
        let mac = self.machine.mac();
        let frame = match address {
            IpAddr::V4(address) => frame::arp_probe(mac, address),
            IpAddr::V6(address) => v6::neighbour::probe(mac, address),
        };
        self.sockets.send_probe(&frame).map_err(|e| self.io(&e))
    }

    /// Opens a socket in the namespace, and learns the interface's address, which a chained plugin
    /// may have changed.
    async fn open<T: Send + 'static>(
        &mut self,
        open: impl FnOnce(String) -> io::Result<T> + Send + 'static,
    ) -> Result<T, InterfaceError> {
        self.try_open(open).await?.map_err(|e| self.io(&e))
    }

    /// As `open`, with the error of the socket itself apart.
    async fn try_open<T: Send + 'static>(
        &mut self,
        open: impl FnOnce(String) -> io::Result<T> + Send + 'static,
    ) -> Result<io::Result<T>, InterfaceError> {
        let ifname = self.interface.ifname.clone();
        let work = move || Ok::<_, io::Error>((v4::socket::mac(&ifname)?, open(ifname)));
        let id = Some(self.task.record.netns_id);
        let (mac, socket) =
            self.task.registry.visit(&self.interface, id, work).await?.map_err(|e| self.io(&e))?;
        if mac != self.machine.mac() {
            self.machine.set_mac(mac);
            self.task.record.mac = mac;
        }
        Ok(socket)
    }

    fn no_link_local(&self) -> Error {
        let name = &self.interface.ifname;
        let msg = format!("{name} has no link-local address of IPv6 that can be used");
        Error::internal(msg).with_details(format!(
            "see net.ipv6.conf.{name}.addr_gen_mode, and whether the link has a carrier"
        ))
    }

    fn io(&self, cause: &io::Error) -> InterfaceError {
        if cause.raw_os_error() == Some(Errno::ENODEV as i32) {
            return InterfaceError::Gone(format!("there is no {} any more", self.interface.ifname));
        }
        InterfaceError::Failed(Error::io(&self.interface.ifname, cause))
    }
}
