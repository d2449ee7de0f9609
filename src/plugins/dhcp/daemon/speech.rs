//! Speaking and hearing of one lease: its sockets, opened in the namespace when they are needed.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddrV6};
use std::time::Duration;

use nix::errno::Errno;
use tokio::time::sleep;

use super::super::place::Trouble;
use super::super::protocol::client::Listening;
use super::super::protocol::family::Family;
use super::super::protocol::frame::{self, SERVER_PORT};
use super::super::protocol::message::Message;
use super::super::protocol::timing::now;
use super::super::protocol::v6;
use super::super::{socket, socket_v6};
use super::keeper::Running;
use crate::error::Error;

/// How long the link-local address may take until it can be used, and how often it is looked at:
/// a thread that waited there would be one for each container.
const TENTATIVE: Duration = Duration::from_secs(3);
const TENTATIVE_LOOK: Duration = Duration::from_millis(100);

impl Running {
    pub(super) async fn hear_frames(&mut self) -> Result<(), Trouble> {
        if !self.ears.has_frames() {
            let socket = self.open(|ifname| socket::frames(&ifname)).await?;
            self.ears.open_frames(socket).map_err(|e| self.io(&e))?;
        }
        Ok(())
    }

    pub(super) async fn broadcast(&mut self, mut message: Message) -> Result<(), Trouble> {
        self.hear_frames().await?;
        message.chaddr = self.machine.mac();
        let ends = frame::to_everybody(self.machine.mac(), message.ciaddr);
        let sent = self.ears.send_frame(&ends, &message.encode());
        sent.map_err(|e| self.io(&e))
    }

    pub(super) async fn unicast(
        &mut self,
        mut message: Message,
        server: Ipv4Addr,
    ) -> Result<(), Trouble> {
        self.hear_frames().await?;
        let address = message.ciaddr;
        if self.ears.udp_address() != Some(address.into()) {
            let socket = self.open(move |ifname| socket::udp(&ifname, address)).await?;
            self.ears.open_udp(socket).map_err(|e| self.io(&e))?;
        }
        message.chaddr = self.machine.mac();
        let sent = self.ears.send_udp((server, SERVER_PORT).into(), &message.encode()).await;
        sent.map_err(|e| self.io(&e))
    }

    pub(super) async fn multicast(&mut self, message: v6::message::Message) -> Result<(), Trouble> {
        let servers = match self.servers {
            Some(servers) if self.ears.udp_address().is_some() => servers,
            _ => self.hear_servers(Duration::ZERO).await?,
        };
        let sent = self.ears.send_udp(servers.into(), &message.encode()).await;
        sent.map_err(|e| self.io(&e))
    }

    /// Before the first message of IPv6: the link's address cannot be used before nobody else was
    /// found to have it, which takes the kernel up to two seconds from when the interface is up.
    /// The client's clock does not run meanwhile.
    pub(super) async fn come_to_speak(&mut self) -> Result<(), Trouble> {
        let begins = self.machine.listening() == Listening::None;
        if !begins || self.keeper.record.key.family == Family::V4 {
            return Ok(());
        }
        // Without it, the attempt to send tells why.
        match self.hear_servers(TENTATIVE).await {
            Err(Trouble::Gone(what)) => Err(Trouble::Gone(what)),
            _ => Ok(()),
        }
    }

    /// Opens the socket of DHCPv6, as soon as the link has an address within `patience`.
    async fn hear_servers(&mut self, patience: Duration) -> Result<SocketAddrV6, Trouble> {
        let deadline = now() + patience;
        let (socket, servers) = loop {
            match self.try_open(|ifname| socket_v6::udp(&ifname)).await? {
                Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => {
                    if now() >= deadline {
                        return Err(self.no_link_local().into());
                    }
                    sleep(TENTATIVE_LOOK).await;
                }
                opened => break opened.map_err(|e| self.io(&e))?,
            }
        };
        self.ears.open_udp(socket).map_err(|e| self.io(&e))?;
        self.servers = Some(servers);
        Ok(servers)
    }

    pub(super) async fn probe(&mut self, address: IpAddr) -> Result<(), Trouble> {
        if !self.ears.has_neighbours() {
            let socket = self.open(move |ifname| match address {
                IpAddr::V4(_) => socket::arp(&ifname),
                IpAddr::V6(address) => socket_v6::neighbours(&ifname, address),
            });
            let socket = socket.await?;
            self.ears.open_neighbours(socket).map_err(|e| self.io(&e))?;
        }
        let mac = self.machine.mac();
        let frame = match address {
            IpAddr::V4(address) => frame::arp_probe(mac, address),
            IpAddr::V6(address) => v6::neighbour::probe(mac, address),
        };
        self.ears.send_probe(&frame).map_err(|e| self.io(&e))
    }

    /// Opens a socket in the namespace, and learns the interface's address, which a chained plugin
    /// may have changed.
    async fn open<T: Send + 'static>(
        &mut self,
        open: impl FnOnce(String) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Trouble> {
        self.try_open(open).await?.map_err(|e| self.io(&e))
    }

    /// The same, with the error of the socket itself apart.
    async fn try_open<T: Send + 'static>(
        &mut self,
        open: impl FnOnce(String) -> io::Result<T> + Send + 'static,
    ) -> Result<io::Result<T>, Trouble> {
        let ifname = self.place.ifname.clone();
        let work = move || Ok::<_, io::Error>((socket::mac(&ifname)?, open(ifname)));
        let id = Some(self.keeper.record.netns_id);
        let (mac, socket) =
            self.keeper.registry.visit(&self.place, id, work).await?.map_err(|e| self.io(&e))?;
        if mac != self.machine.mac() {
            self.machine.set_mac(mac);
            self.keeper.record.mac = mac;
        }
        Ok(socket)
    }

    fn no_link_local(&self) -> Error {
        let name = &self.place.ifname;
        let msg = format!("{name} has no link-local address of IPv6 that can be used");
        Error::internal(msg).with_details(format!(
            "see net.ipv6.conf.{name}.addr_gen_mode, and whether the link has a carrier"
        ))
    }

    fn io(&self, cause: &io::Error) -> Trouble {
        if cause.raw_os_error() == Some(Errno::ENODEV as i32) {
            return Trouble::Gone(format!("there is no {} any more", self.place.ifname));
        }
        Trouble::Failed(Error::io(&self.place.ifname, cause))
    }
}
