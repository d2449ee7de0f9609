//! The container's side of a lease: its namespace and interface, and what is done there.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use super::protocol::client::{Claim, Client};
use super::protocol::frame::{EVERYBODY, Ends};
use super::protocol::lease::Lease;
use super::protocol::machine::Machine;
use super::protocol::timing::{Random, Timing};
use super::record::Record;
use super::socket;
use crate::error::{Context, Error, Result};
use crate::iface::configure;
use crate::iface::inside::Inside;
use crate::log;
use crate::netlink::{
    Dad, Family, Link, LinkChange, Mac, Netlink, NewAddr, OperState, Route, RouteFilter, RouteMode,
};
use crate::netns::{Netns, Visit};

/// How long the interface may take to get its carrier. Without one the question is asked anyway.
const CARRIER: Duration = Duration::from_secs(2);
/// How long the server may take to say where it is. One behind a router never does.
const SERVER_ANSWERS: Duration = Duration::from_millis(200);
/// `RTPROT_KERNEL`: routes that come and go with their addresses.
const RTPROT_KERNEL: u8 = 2;

/// An interface in a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The namespace's path for this process.
    pub netns: PathBuf,
    /// The interface's name.
    pub ifname: String,
}

/// What keeps a place from being used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Namespace or interface are gone, or others have taken their names.
    Gone(String),
    /// Something else.
    Failed(Error),
}

impl From<Trouble> for Error {
    fn from(trouble: Trouble) -> Error {
        match trouble {
            Trouble::Gone(what) => Error::internal(what),
            Trouble::Failed(error) => error,
        }
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        Trouble::Failed(error)
    }
}

impl Place {
    /// Opens the namespace, which has to be the one of `id` where that is known.
    pub fn open(&self, id: Option<(u64, u64)>) -> Result<Netns, Trouble> {
        let netns = match Netns::open(&self.netns) {
            Err(e) if e.is_gone() => return Err(Trouble::Gone(e.to_string())),
            opened => opened.map_err(Error::from)?,
        };
        let found = netns.identity().map_err(Error::from)?;
        if id.is_some_and(|id| id != found) {
            let path = self.netns.display();
            return Err(Trouble::Gone(format!("another network namespace is at {path}")));
        }
        Ok(netns)
    }

    /// Has `work` done in the namespace by a thread of its own.
    pub fn visit<T: Send + 'static>(
        &self,
        id: Option<(u64, u64)>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Visit<T>, Trouble> {
        Ok(self.open(id)?.visit(work).map_err(Error::from)?)
    }
}

/// Sets the interface up, waits for its carrier, and returns its Ethernet address.
pub fn prepare(ifname: &str) -> Result<Mac> {
    let failed = || format!("error looking up \"{ifname}\"");
    let netlink = Netlink::open()?;
    let absent = || Error::internal("Link not found");
    let link = netlink.link(ifname)?.ok_or_else(absent).context(failed)?;
    let mac = link.mac.ok_or_else(|| Error::internal("not an Ethernet interface"));
    let mac = mac.context(failed)?;
    if !link.up {
        netlink
            .set_link(link.index, LinkChange::new().up())
            .context(|| format!("failed to set \"{ifname}\" UP"))?;
    }
    let ready = |link: &Link| matches!(link.oper_state, OperState::Up | OperState::Unknown);
    netlink.wait_link(link.index, CARRIER, ready)?;
    Ok(mac)
}

/// The Ethernet address of the interface, `None` if there is no such interface.
pub fn look(ifname: &str) -> Result<Option<Mac>> {
    Ok(Netlink::open()?.link(ifname)?.and_then(|link| link.mac))
}

/// A change of what an interface has been given.
#[derive(Clone, Debug)]
pub struct Change {
    /// The interface.
    pub ifname: String,
    /// What it has.
    pub old: Option<Lease>,
    /// What it gets.
    pub new: Option<Lease>,
    /// The metric of routes.
    pub priority: u32,
    /// Whether the old one was taken off already, by us.
    pub bare: bool,
}

impl Change {
    /// Makes the change. An interface that never had the old address is left alone: somebody else
    /// decides about it. `false` then.
    pub fn apply(&self) -> Result<bool> {
        let here = Netns::current().map_err(Error::from)?;
        let inside = Inside { netns: &here, netlink: Netlink::open()? };
        let link = inside.link(&self.ifname)?;
        let present = inside.netlink.dump_addrs(link.index)?;
        let has = |lease: &Lease| present.iter().any(|addr| addr.net == lease.ip_net());
        let had = self.old.as_ref().is_some_and(has);
        if !had && !self.bare {
            return Ok(false);
        }
        let filter = RouteFilter { family: Some(Family::V4), table: None, oif: Some(link.index) };
        let routes = inside.netlink.dump_routes(&filter)?;
        if let Some(old) = self.old.as_ref().filter(|_| had) {
            self.remove(&inside, &link, old)?;
        }
        if let Some(new) = &self.new {
            if !has(new) {
                let address = NewAddr::new(new.ip_net()).dad(Dad::Off);
                inside.netlink.add_addr(link.index, &address)?;
            }
            configure::add_routes(&inside, &link, &new.result(self.priority))?;
            self.restore(&inside, &routes);
        }
        Ok(true)
    }

    /// The routes first: the last address takes all of them along, others do not.
    fn remove(&self, inside: &Inside<'_>, link: &Link, old: &Lease) -> Result<()> {
        for route in &old.result(self.priority).routes {
            let mut kernel = Route::new(route.dst);
            kernel.gw = route.gw.filter(|gw| !gw.is_unspecified());
            kernel.oif = Some(link.index);
            kernel.priority = route.priority;
            inside.netlink.del_route(&kernel)?;
        }
        if self.new.as_ref().is_none_or(|new| new.net != old.net) {
            inside.netlink.del_addr(link.index, old.ip_net())?;
        }
        Ok(())
    }

    /// Routes that others made, such as a chained plugin, as far as they still make sense.
    fn restore(&self, inside: &Inside<'_>, routes: &[Route]) {
        let old = self.old.as_ref().map(|old| old.result(self.priority).routes).unwrap_or_default();
        let ours = |route: &Route| old.iter().any(|o| o.dst == route.dst && o.gw == route.gw);
        let local = |route: &Route| route.protocol == Some(RTPROT_KERNEL);
        for route in routes.iter().filter(|route| !ours(route) && !local(route)) {
            let route = Route { src: None, ..route.clone() };
            if let Err(error) = inside.netlink.add_route(&route, RouteMode::Exclusive) {
                log::debug(error);
            }
        }
    }
}

/// Gives a lease back: one message from the leased address, in a frame to where the server's answers
/// came from. It is under way when this returns, so the interface may go.
pub fn release(ifname: &str, client: &Client, claim: &Claim) -> Result<()> {
    let failed = || "failed to release DHCP lease: failed to send DHCPRELEASE";
    let socket = socket::frames(ifname).map_err(|e| Error::io(ifname, &e)).context(failed)?;
    let message = Machine::release(client, claim, &mut Random::new()).encode();
    let Claim { address, server, server_mac } = *claim;
    // A server on the link may send from another Ethernet address than it listens on.
    let found = socket::resolve(ifname, address, server, SERVER_ANSWERS);
    let dst_mac = found.ok().flatten().unwrap_or(server_mac);
    let ends = Ends { src_mac: client.mac, dst_mac, src: address, dst: server };
    socket::send(&socket, &ends, &message).map_err(|e| Error::io(ifname, &e)).context(failed)
}

/// The same for a record, when no daemon does it.
pub fn release_recorded(record: &Record) -> Result<()> {
    let Some(claim) = record.lease.as_ref().map(Claim::from) else { return Ok(()) };
    let place = Place { netns: (&record.netns).into(), ifname: record.key.ifname.clone() };
    let netns = match place.open(Some(record.netns_id)) {
        Err(Trouble::Gone(_)) => return Ok(()),
        opened => opened?,
    };
    let mut client = record.client(Timing::default(), false);
    netns
        .run(|| match look(&place.ifname)? {
            Some(mac) => {
                client.mac = mac;
                release(&place.ifname, &client, &claim)
            }
            None => Ok(()),
        })
        .map_err(Error::from)?
}

/// The ends of a frame from `src` to everybody on the link.
pub fn to_everybody(mac: Mac, src: Ipv4Addr) -> Ends {
    Ends { src_mac: mac, dst_mac: EVERYBODY, src, dst: Ipv4Addr::BROADCAST }
}
