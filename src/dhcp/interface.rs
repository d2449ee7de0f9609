//! Work in the namespace of a container: changes of the interface, and releases of leases.

use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use socket2::Socket;

use super::family::{DhcpLease, DhcpRouteConfig};
use super::machine::ReleaseMessage;
use super::record::DhcpRecord;
use super::sandbox::{self, InterfaceError};
use super::socket::{self, FoundInterface};
use super::timing::{ClientTiming, NEVER};
use super::v4::frame::{self, FrameAddresses};
use super::v4::message::Dhcp4Message as MessageV4;
use super::v6::message::{Dhcp6Message, Dhcp6MessageKind, in_hundredths};
use crate::iface::configure;
use crate::iface::inside::ContainerNetns;
use crate::netlink::{
    DuplicateDetection, IpFamily, KernelRoute, Link, LinkChange, Netlink, NewLinkAddress,
    OperationalState, RouteAddMode, RouteFilter,
};
use crate::netns::{self, Netns};
use cni::error::{Error, ErrorContext, Result};

/// The timeout for the carrier of the interface. Without a carrier the first message is sent
/// anyway.
const CARRIER: Duration = Duration::from_secs(2);
/// `RTPROT_KERNEL`: routes that the kernel adds and deletes with their addresses.
const RTPROT_KERNEL: u8 = 2;
/// The timeouts for the Reply to each Release of DHCPv6. RFC 9915 starts with a second, but a
/// runtime waits for this.
const CONFIRMATIONS: [Duration; 3] =
    [Duration::from_millis(250), Duration::from_millis(500), Duration::from_secs(1)];
/// Longer than any valid message.
const BUFFER: usize = 2048;

/// Looks up the interface.
pub fn find_interface(ifname: &str) -> Result<FoundInterface, InterfaceError> {
    let cookie = netns::current_cookie().map_err(Error::from)?;
    Ok(socket::find_interface(ifname, cookie)?)
}

/// Sets the interface up, and waits for its carrier.
pub fn bring_up(ifname: &str) -> Result<FoundInterface> {
    let failed = || format!("error looking up \"{ifname}\"");
    let netlink = Netlink::open()?;
    let link = netlink
        .find_link(ifname)?
        .ok_or_else(|| Error::internal("Link not found"))
        .context(failed)?;
    let mac = link.mac.ok_or_else(|| Error::internal("not an Ethernet interface"));
    let mac = mac.context(failed)?;
    if !link.up {
        netlink
            .change_link(link.index, LinkChange::new().set_up())
            .context(|| format!("failed to set \"{ifname}\" UP"))?;
    }
    netlink.wait_for_link(link.index, CARRIER, |link| {
        matches!(link.oper_state, OperationalState::Up | OperationalState::Unknown)
    })?;
    Ok(FoundInterface { cookie: netns::current_cookie()?, index: link.index, mac })
}

/// A change of the address and the routes of an interface.
#[derive(Debug)]
pub struct DhcpLeaseChange {
    /// The lease of the current address.
    pub old: Option<DhcpLease>,
    pub new: Option<DhcpLease>,
    /// The metric of routes.
    pub priority: u32,
    pub routes: DhcpRouteConfig,
    /// Whether the daemon has removed the current address already.
    pub address_removed: bool,
}

impl DhcpLeaseChange {
    /// Applies the change to an interface. An interface without the current address is configured
    /// by another program: it is not changed, and the function returns `false`.
    pub fn apply_to_interface(&self, ifname: &str) -> Result<bool> {
        let here = Netns::open_current()?;
        let inside = ContainerNetns { netns: &here, netlink: Netlink::open()?, accept_ra: None };
        let link = inside.require_link(ifname)?;
        let present = inside.netlink.dump_addresses(link.index)?;
        let has = |lease: &DhcpLease| present.iter().any(|addr| addr.net == lease.ip_net());
        let has_old = self.old.as_ref().is_some_and(has);
        if !has_old && !self.address_removed {
            return Ok(false);
        }
        let routes = self.ipv4_routes(&inside, &link)?;
        let planned = |lease: &DhcpLease| {
            configure::plan_routes(&lease.ipam_result(self.priority, &self.routes), link.index)
        };
        let old_routes = self.old.as_ref().map(planned).unwrap_or_default();
        if let Some(old) = self.old.as_ref().filter(|_| has_old) {
            self.remove_old_lease(&inside, &link, old, &old_routes)?;
        }
        if let Some(new) = &self.new {
            if !has(new) {
                let address = NewLinkAddress {
                    dad: DuplicateDetection::Off,
                    ..NewLinkAddress::new(new.ip_net())
                };
                inside.netlink.add_address(link.index, &address)?;
            }
            let result = new.ipam_result(self.priority, &self.routes);
            configure::add_routes(&inside, &link, &result)?;
            restore_routes(&inside, &routes, &old_routes);
        }
        Ok(true)
    }

    /// The IPv4 routes, which the kernel deletes together with the last address.
    fn ipv4_routes(&self, inside: &ContainerNetns<'_>, link: &Link) -> Result<Vec<KernelRoute>> {
        if let (Some(DhcpLease::V6(_)), _) | (_, Some(DhcpLease::V6(_))) = (&self.old, &self.new) {
            return Ok(Vec::new());
        }
        let filter = RouteFilter { family: Some(IpFamily::V4), table: None, oif: Some(link.index) };
        Ok(inside.netlink.dump_routes(&filter)?)
    }

    /// Deletes routes and address. The kernel deletes routes with the last address only.
    fn remove_old_lease(
        &self,
        inside: &ContainerNetns<'_>,
        link: &Link,
        old: &DhcpLease,
        routes: &[KernelRoute],
    ) -> Result<()> {
        for route in routes {
            inside.netlink.delete_route(route)?;
        }
        if self.new.as_ref().is_none_or(|new| new.ip_net() != old.ip_net()) {
            inside.netlink.delete_address(link.index, old.ip_net())?;
        }
        Ok(())
    }
}

/// Restores the routes of other programs, such as a chained plugin, as far as the kernel accepts
/// them; not those of the `old` lease.
fn restore_routes(inside: &ContainerNetns<'_>, routes: &[KernelRoute], old: &[KernelRoute]) {
    let ours = |route: &KernelRoute| {
        old.iter().any(|o| (o.dst, o.gw, &o.nexthops) == (route.dst, route.gw, &route.nexthops))
    };
    let local = |route: &KernelRoute| route.protocol == Some(RTPROT_KERNEL);
    for route in routes.iter().filter(|route| !ours(route) && !local(route)) {
        let route = KernelRoute { src: None, ..route.clone() };
        if let Err(error) = inside.netlink.add_route(&route, RouteAddMode::Exclusive) {
            debug!("could not restore a route: {error}");
        }
    }
}

/// Releases the lease of a record without a daemon.
pub fn release_recorded(record: &DhcpRecord) -> Result<()> {
    let netns = match sandbox::open_verified(Path::new(&record.netns), Some(record.netns_id)) {
        Err(InterfaceError::OutOfView(_)) => return Ok(()),
        opened => opened?,
    };
    match netns.run_inside(|| sandbox::require_cookie(record.netns_cookie))? {
        Err(InterfaceError::Gone(_)) => return Ok(()),
        same => same?,
    }
    let mut machine = record.state_machine(ClientTiming::default(), false, NEVER, NEVER);
    let Some(release) = machine.release_message() else { return Ok(()) };
    netns.run_inside(|| {
        let ifname = &record.key.ifname;
        let found = socket::current_name(ifname, record.ifindex, record.mac)
            .and_then(|name| socket::mac_address(&name).map(|_| name));
        match found {
            Err(e) if e.raw_os_error() == Some(Errno::ENODEV as i32) => Ok(()),
            found => send_release(found.as_ref().unwrap_or(ifname), release),
        }
    })?
}

/// Sends the release of a lease. It has left the interface when this returns, so the interface can
/// be deleted.
pub fn send_release(ifname: &str, release: ReleaseMessage) -> Result<()> {
    match release {
        ReleaseMessage::V4(message, ends) => send_release_v4(ifname, message, ends)
            .map_err(|e| Error::io(ifname, &e))
            .context(|| "failed to release DHCP lease: failed to send DHCPRELEASE"),
        ReleaseMessage::V6(message, _) => {
            let failed = || "failed to release DHCPv6 lease";
            if send_release_v6(ifname, message)
                .map_err(|e| Error::io(ifname, &e))
                .context(failed)?
            {
                return Ok(());
            }
            Err(Error::internal(failed()).with_details("the server did not confirm the release"))
        }
    }
}

/// Sends one message from the leased address to the Ethernet address that the server replied from.
fn send_release_v4(
    ifname: &str,
    mut message: MessageV4,
    mut ends: FrameAddresses,
) -> io::Result<()> {
    let mac = socket::client_mac(ifname, Some(ends.src.into()), message.chaddr)?;
    message.chaddr = mac;
    ends.src_mac = mac;
    // A server on the link may send from another Ethernet address than it receives on.
    let found = socket::resolve_mac(ifname, mac, ends.src, ends.dst);
    ends.dst_mac = found.ok().flatten().unwrap_or(ends.dst_mac);
    socket::open_frames(ifname, mac)?.send(&frame::encode_udp(&ends, &message.encode())).map(drop)
}

/// Sends the message until the server confirms it; `false` after the last timeout.
fn send_release_v6(ifname: &str, mut message: Dhcp6Message) -> io::Result<bool> {
    let (socket, servers) = socket::open_udp_v6(ifname)?;
    let begun = Instant::now();
    for timeout in CONFIRMATIONS {
        message.elapsed = in_hundredths(begun.elapsed());
        socket.send_to(&message.encode(), &servers.into())?;
        if wait_for_confirmation(&socket, &message, timeout)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn wait_for_confirmation(
    mut socket: &Socket,
    sent: &Dhcp6Message,
    timeout: Duration,
) -> io::Result<bool> {
    let deadline = Instant::now() + timeout;
    let mut buffer = [0; BUFFER];
    while socket::wait_readable(socket, deadline)? {
        let length = socket.read(&mut buffer)?;
        if Dhcp6Message::decode(&buffer[..length]).is_some_and(|message| {
            message.kind == Dhcp6MessageKind::Reply
                && (message.xid, &message.client, &message.server)
                    == (sent.xid, &sent.client, &sent.server)
        }) {
            return Ok(true);
        }
    }
    Ok(false)
}
