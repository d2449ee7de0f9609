//! A link on top of another link, its master: macvlan, ipvlan, VLAN.
//!
//! | step | function |
//! | --- | --- |
//! | where is the master, which link is it, does the MTU fit it | [`Below`] |
//! | make the child | [`add`], [`add_up`]: in the container, under its final name, by one message |
//! | take it back | [`take_back`] |
//! | kernel parameters, addresses, up, routes, the result | [`attach`] |
//! | CHECK | [`find`], [`Below::verify`], [`verify_mtu`], [`Found::verify_layer3`] |
//! | DEL | [`del`], which never asks for the master |
//!
//! The master is on the host, or with `linkInContainer` in the container itself: `place` is the
//! netlink socket of its namespace. The container's namespace is entered before the link is created, so that the link
//! can be deleted after any failure. [`AddReq::attach_link`](crate::skel::AddReq::attach_link) is the common
//! part of the plugins' ADD.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::os::fd::AsFd;

use nix::errno::Errno;

use super::configure::{self, Connected, Style};
use super::inside::{Inside, Setting};
use super::mtu::Mtu;
use super::{default_route, routes, verify, veth};
use crate::cni::{CniResult, IfName};
use crate::error::{Context, Error, Result};
use crate::log;
use crate::netlink::{Dad, Link, LinkKind, Mac, Netlink, NewLink};
use crate::netns::Netns;
use crate::repairs::Repairs;

/// Attempts to choose a free index.
const INDEX_TRIES: usize = 5;

/// The child to create.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// Its name in the container.
    pub ifname: &'a IfName,
    /// Its kind, and the link that it is on.
    pub kind: LinkKind<'a>,
    /// Its MTU in bytes; 0 leaves it to the kernel, which takes the master's.
    pub mtu: u32,
    /// Its address; `None` leaves it to the kernel.
    pub mac: Option<Mac>,
}

impl<'a> Wanted<'a> {
    fn new_link(&self) -> NewLink<'a> {
        NewLink::new(self.ifname.as_str(), self.kind.clone()).mtu(self.mtu).mac(self.mac)
    }
}

/// The master called `name`; without a name, the link of the default route, IPv4 first.
fn master(place: &Netlink, name: &str) -> Result<Link> {
    if name.is_empty() {
        return default_route::link(place);
    }
    let failed = || format!("failed to lookup master \"{name}\"");
    place.link(name).context(failed)?.ok_or_else(|| {
        Error::internal(format!("{}: Link not found", failed())).with_details(
            "\"master\" names a link of the host, or with \"linkInContainer\" one of the container",
        )
    })
}

/// Creates the child in the namespace `netns` under its final name, so that [`del`] finds the child even if this process
/// is killed. `place` is the socket of the master's namespace.
pub fn add(place: &Netlink, netns: &Netns, wanted: &Wanted<'_>) -> Result<()> {
    make(place, netns, wanted, wanted.new_link())
}

/// As [`add`], and sets the child up by the same message: for a child without addresses, or with addresses that are
/// requested through the child (DHCP).
pub fn add_up(place: &Netlink, netns: &Netns, wanted: &Wanted<'_>) -> Result<()> {
    make(place, netns, wanted, wanted.new_link().up())
}

fn make<'a>(
    place: &Netlink,
    netns: &'a Netns,
    wanted: &Wanted<'a>,
    link: NewLink<'a>,
) -> Result<()> {
    let name = wanted.ifname.as_str();
    let link = link.netns(netns.as_fd());
    let failed = || format!("failed to create {}", wanted.kind);
    let Err(mut refused) = place.add_link(&link) else { return Ok(()) };
    if refused.is_exists() {
        if Netlink::open_in(netns)?.link(name)?.is_some() {
            let msg = format!("container already has an interface \"{name}\": file exists");
            let remedy =
                "run DEL first, as an earlier ADD was not followed by one, or CNI_IFNAME is taken";
            return Err(Error::internal(msg).with_details(remedy)).context(failed);
        }
        // Kernels before 6.15 look for the name in the namespace of the caller, unless they are
        // given an index to look for.
        let tries = if place.link(name)?.is_some() { INDEX_TRIES } else { 0 };
        for _ in 0..tries {
            match place.add_link(&link.clone().index(random_index())) {
                Ok(()) => return Ok(()),
                Err(error) => refused = error,
            }
            if refused.errno() != Some(Errno::EBUSY) {
                break;
            }
        }
    }
    if refused.is_unanswered() {
        // It may have been made.
        drop(del(netns, wanted.ifname, &wanted.kind.to_string(), None));
    }
    let remedy = refused.errno().and_then(|errno| remedy(errno, &wanted.kind));
    let error = Error::from(refused).context(failed());
    Err(remedy.map_or(error.clone(), |remedy| error.with_details(remedy)))
}

/// The remedy for a refused request, by its errno.
fn remedy(errno: Errno, kind: &LinkKind<'_>) -> Option<&'static str> {
    match (errno, kind) {
        (Errno::EBUSY, LinkKind::Macvlan { .. } | LinkKind::Ipvlan { .. }) => {
            Some("the master is a port of a bridge or bond, or has children of another kind")
        }
        (Errno::EADDRINUSE, LinkKind::Macvlan { .. }) => {
            Some("another macvlan on the master, or the master itself, has this MAC address")
        }
        (Errno::EINVAL, LinkKind::Macvlan { .. }) => Some(
            "choose another master: a macvlan in mode \"passthru\" is the only one on its master, \
             which must be an Ethernet device",
        ),
        (Errno::EEXIST, LinkKind::Vlan { .. }) => {
            Some("this VLAN of this master is somebody else's, maybe another container's")
        }
        _ => None,
    }
}

/// Deletes the link that [`add`] has created.
pub fn take_back(inside: &Inside<'_>, ifname: &IfName) -> Result<()> {
    Ok(inside.netlink.del_link(ifname.as_str()).map(drop)?)
}

/// Adds the addresses and routes of `result` to the child, sets the child up, and adds the child to `result`. Without
/// addresses the child stays as [`add_up`] created it.
pub fn attach(
    inside: &Inside<'_>,
    ifname: &IfName,
    sandbox: &str,
    result: &mut CniResult,
) -> Result<Link> {
    result.assign_to_first();
    let link = inside.link(ifname.as_str())?;
    result.interfaces = vec![veth::interface(&link, sandbox)];
    if !result.ips.is_empty() {
        configure(inside, &link, result)?;
    }
    Ok(link)
}

/// Deletes the link `ifname` of this kind; success if there is none. A link of another kind under this name is not the
/// attachment's: the container may have renamed the attachment's link, which is then found by its unique MAC.
pub fn del(netns: &Netns, ifname: &IfName, kind: &str, mac: Option<Mac>) -> Result<()> {
    let inside = Netlink::open_in(netns)?;
    let is_of_kind = |link: &Link| link.kind.as_deref() == Some(kind);
    let named = inside.link(ifname.as_str())?;
    if named.as_ref().is_some_and(|link| !is_of_kind(link)) {
        log::warn(format_args!("\"{ifname}\" is no {kind}, and is left alone"));
    }
    if let Some(link) = named.filter(is_of_kind) {
        inside.del_link_by_index(link.index)?;
    }
    let links = if mac.is_some() { inside.dump_links()? } else { Vec::new() };
    for renamed in links.iter().filter(|link| is_of_kind(link) && link.mac == mac) {
        inside.del_link_by_index(renamed.index)?;
    }
    Ok(())
}

/// Sets the kernel parameters that the addresses need before they are added; all addresses are announced to the
/// neighbours.
pub fn prepare(inside: &Inside<'_>, link: &Link, result: &CniResult) -> Result<()> {
    configure::announce(inside, link);
    let mut settings = configure::settings(result, &link.name);
    if configure::has_ipv6(result) {
        let key = format!("net/ipv6/conf/{}/ndisc_notify", link.name);
        settings.push(Setting::optional(key, "1"));
    }
    inside.set(&settings)
}

/// Adds the addresses, sets the link up, adds the routes. Other hosts share the link, so duplicate address detection
/// stays on.
fn configure(inside: &Inside<'_>, link: &Link, result: &CniResult) -> Result<()> {
    prepare(inside, link, result)?;
    let style = Style { dad: Dad::Kernel, connected: Connected::Route };
    configure::addresses_and_up(inside, link, result, style)?;
    configure::add_routes(inside, link, result)
}

/// CHECK: an attachment's link, as a result lists it.
#[derive(Clone, Debug)]
pub struct Found<'r> {
    pub link: Link,
    prev: &'r CniResult,
    index: usize,
}

/// CHECK: the link that `prev` lists under this name and in this sandbox is there, of this kind,
/// with the hardware address that is listed, up.
pub fn find<'r>(
    inside: &Inside<'_>,
    prev: &'r CniResult,
    ifname: &IfName,
    sandbox: &str,
    kind: &str,
) -> Result<Found<'r>> {
    let (index, entry) = verify::container_entry(prev, ifname, sandbox)?;
    let link = verify::container_link(inside, entry, kind)?;
    verify::is_up_inside(&link)?;
    Ok(Found { link, prev, index })
}

/// Restores routes of the container through a child that was found; see [`routes::restore`].
pub fn restore_routes(inside: &Inside<'_>, found: &Found<'_>, repairs: &mut Repairs) -> Result<()> {
    let Found { link, prev, index } = found;
    let mut wanted = routes::connected(link, prev, *index);
    wanted.extend(configure::plan_routes(prev, link.index));
    routes::restore(inside, link, &wanted, repairs)
}

impl Found<'_> {
    /// Its addresses and the routes are there.
    pub fn verify_layer3(&self, inside: &Inside<'_>) -> Result<()> {
        verify::addresses(inside, &self.link, self.prev, self.index)?;
        verify::routes(inside, self.prev)
    }
}

/// CHECK: `link` is on top of `master`.
fn verify_master(link: &Link, master: &Link) -> Result<()> {
    if link.link == Some(master.index) {
        return Ok(());
    }
    let (name, master) = (&link.name, &master.name);
    Err(Error::internal(format!("interface \"{name}\" is not on top of \"{master}\"")))
}

/// The configuration's keys about the master.
#[derive(Clone, Copy, Debug)]
pub struct Below<'a> {
    /// Its name; empty if it is none in particular.
    pub name: &'a str,
    /// Whether it is in the container.
    pub in_container: bool,
    /// The MTU of the child; the master's at most.
    pub mtu: Mtu,
}

impl Below<'_> {
    /// Where the master is.
    pub fn place<'n>(self, host: &'n Netlink, inside: &'n Inside<'_>) -> &'n Netlink {
        if self.in_container { &inside.netlink } else { host }
    }

    /// The master, and the MTU for the child in bytes.
    pub fn master(self, place: &Netlink, host: &Netlink) -> Result<(Link, u32)> {
        let master = master(place, self.name)?;
        let mtu = self.mtu.resolve_below(host, &master)?;
        Ok((master, mtu))
    }

    /// STATUS: the master is there. Which container is not known yet, and so neither is a master
    /// in it.
    pub fn status(self, host: &Netlink) -> Result<()> {
        if self.in_container { Ok(()) } else { self.master(host, host).map(drop).or_unavailable() }
    }

    /// CHECK: `link` is on top of the configured master. Without a configured master any existing one
    /// is right: the default route may have moved since ADD.
    pub fn verify(self, host: &Netlink, inside: &Inside<'_>, link: &Link) -> Result<()> {
        let in_container = link.link_netnsid.is_none();
        if self.name.is_empty() {
            let place = Below { in_container, ..self }.place(host, inside);
            return Ok(place.require_link_by_index(link.link.unwrap_or_default()).map(drop)?);
        }
        let master = master(self.place(host, inside), self.name)?;
        // The container may be in the host's own namespace.
        let same_place = in_container == self.in_container
            || Netns::current().and_then(|host| host.same_as(inside.netns))?;
        if !same_place {
            let (name, master) = (&link.name, &master.name);
            let place = if self.in_container { "in the container" } else { "on the host" };
            let msg = format!("interface \"{name}\" is not on top of \"{master}\" {place}");
            return Err(Error::internal(msg));
        }
        verify_master(link, &master)?;
        match self.mtu {
            // The default route may have moved since ADD.
            Mtu::Auto => Ok(()),
            Mtu::Bytes(_) => self.mtu.resolve_below(host, &master).map(drop),
        }
    }
}

/// The hardware address that a configuration gives an interface.
pub fn parse_mac(text: &str) -> Result<Mac> {
    let refuse = |why| Error::config(format!("invalid args {text} for MAC addr: {why}"));
    let mac: Mac = text.parse().map_err(|why| refuse(format!("{why}")))?;
    if mac.is_unicast() {
        return Ok(mac);
    }
    Err(refuse(format!("address {mac}: no address of a single interface")))
}

/// CHECK: `link` has the MTU that is configured, where one is.
pub fn verify_mtu(link: &Link, configured: u32) -> Result<()> {
    if configured == 0 || link.mtu == configured {
        return Ok(());
    }
    let Link { name, mtu, .. } = link;
    Err(Error::internal(format!("interface \"{name}\" has MTU {mtu}, configured is {configured}")))
}

/// A random index far above the indexes that the kernel assigns.
fn random_index() -> u32 {
    let random = RandomState::new().build_hasher().finish();
    0x0100_0000 | (random & 0x00ff_ffff) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_indexes_are_positive_and_differ() {
        let indexes: std::collections::HashSet<_> = (0..50).map(|_| random_index()).collect();
        assert!(indexes.len() > 40 && indexes.iter().all(|i| *i < 1 << 25));
    }
}
