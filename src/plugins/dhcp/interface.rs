//! The container's side of a lease: its namespace and interface, and the changes made there.

use std::path::PathBuf;
use std::time::Duration;

use super::family::{self, Lease};
use crate::error::{Context, Error, Result};
use crate::iface::configure;
use crate::iface::inside::Inside;
use crate::log;
use crate::netlink::{
    Dad, Family, Link, LinkChange, Mac, Netlink, NewAddr, OperState, Route, RouteFilter, RouteMode,
};
use crate::netns::{Netns, Visit};
use crate::sysctl;

/// How long the interface may take to get its carrier. Without a carrier the first message is sent anyway.
const CARRIER: Duration = Duration::from_secs(2);
/// `RTPROT_KERNEL`: routes that come and go with their addresses.
const RTPROT_KERNEL: u8 = 2;

/// An interface in a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The path of the namespace, as this process sees it.
    pub netns: PathBuf,
    /// The interface's name.
    pub ifname: String,
}

/// Why an interface cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InterfaceError {
    /// The namespace or the interface is gone, or another has its name.
    Gone(String),
    /// Something else.
    Failed(Error),
}

impl From<InterfaceError> for Error {
    fn from(trouble: InterfaceError) -> Error {
        match trouble {
            InterfaceError::Gone(what) => Error::internal(what),
            InterfaceError::Failed(error) => error,
        }
    }
}

impl From<Error> for InterfaceError {
    fn from(error: Error) -> InterfaceError {
        InterfaceError::Failed(error)
    }
}

impl Interface {
    /// Opens the namespace, and verifies its device and inode where `id` tells them.
    pub fn open(&self, id: Option<(u64, u64)>) -> Result<Netns, InterfaceError> {
        let netns = match Netns::open(&self.netns) {
            Err(e) if e.is_gone() => return Err(InterfaceError::Gone(e.to_string())),
            opened => opened.map_err(Error::from)?,
        };
        let found = netns.identity().map_err(Error::from)?;
        if id.is_some_and(|id| id != found) {
            let path = self.netns.display();
            return Err(InterfaceError::Gone(format!("another network namespace is at {path}")));
        }
        Ok(netns)
    }

    /// Runs `work` in the namespace, on a thread of its own.
    pub fn visit<T: Send + 'static>(
        &self,
        id: Option<(u64, u64)>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Visit<T>, InterfaceError> {
        Ok(self.open(id)?.visit(work).map_err(Error::from)?)
    }
}

/// Sets the interface up, waits for its carrier, and returns its Ethernet address. For IPv6, it is
/// switched on, as the plugin that adds the address would do.
pub fn prepare(ifname: &str, family: family::Family) -> Result<Mac> {
    let failed = || format!("error looking up \"{ifname}\"");
    let netlink = Netlink::open()?;
    let absent = || Error::internal("Link not found");
    let link = netlink.link(ifname)?.ok_or_else(absent).context(failed)?;
    let mac = link.mac.ok_or_else(|| Error::internal("not an Ethernet interface"));
    let mac = mac.context(failed)?;
    if family == family::Family::V6 {
        sysctl::ensure(&format!("net/ipv6/conf/{ifname}/disable_ipv6"), "0")?;
    }
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
pub fn mac_address(ifname: &str) -> Result<Option<Mac>> {
    Ok(Netlink::open()?.link(ifname)?.and_then(|link| link.mac))
}

/// A change of an interface's address and routes.
#[derive(Clone, Debug)]
pub struct Change {
    /// The interface.
    pub ifname: String,
    /// The lease whose address the interface has.
    pub old: Option<Lease>,
    /// The lease whose address the interface gets.
    pub new: Option<Lease>,
    /// The metric of routes.
    pub priority: u32,
    /// Whether the daemon has removed the old address already.
    pub address_removed: bool,
}

impl Change {
    /// Makes the change. An interface that does not have the old address is left alone, because another program
    /// configures it; the outcome is `false`.
    pub fn apply(&self) -> Result<bool> {
        let here = Netns::current().map_err(Error::from)?;
        let inside = Inside { netns: &here, netlink: Netlink::open()? };
        let link = inside.link(&self.ifname)?;
        let present = inside.netlink.dump_addrs(link.index)?;
        let has = |lease: &Lease| present.iter().any(|addr| addr.net == lease.ip_net());
        let had = self.old.as_ref().is_some_and(has);
        if !had && !self.address_removed {
            return Ok(false);
        }
        let routes = self.foreign_routes(&inside, &link)?;
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

    /// The IPv4 routes, which the kernel deletes together with the last address.
    fn foreign_routes(&self, inside: &Inside<'_>, link: &Link) -> Result<Vec<Route>> {
        if let (Some(Lease::V6(_)), _) | (_, Some(Lease::V6(_))) = (&self.old, &self.new) {
            return Ok(Vec::new());
        }
        let filter = RouteFilter { family: Some(Family::V4), table: None, oif: Some(link.index) };
        Ok(inside.netlink.dump_routes(&filter)?)
    }

    /// Deletes the routes first: the kernel deletes routes only with the last address.
    fn remove(&self, inside: &Inside<'_>, link: &Link, old: &Lease) -> Result<()> {
        for route in &old.result(self.priority).routes {
            let mut kernel = Route::new(route.dst);
            kernel.gw = route.gw.filter(|gw| !gw.is_unspecified());
            kernel.oif = Some(link.index);
            kernel.priority = route.priority;
            inside.netlink.del_route(&kernel)?;
        }
        if self.new.as_ref().is_none_or(|new| new.ip_net() != old.ip_net()) {
            inside.netlink.del_addr(link.index, old.ip_net())?;
        }
        Ok(())
    }

    /// Restores routes that others made, such as a chained plugin, as far as the kernel accepts them.
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
